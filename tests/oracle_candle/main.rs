//! The library against candle, which nobody here wrote: the same inputs through both, and gradients
//! against those of candle's autograd.

#[path = "../../benches/train/candle_llama.rs"]
mod candle_llama;
#[path = "../common/mod.rs"]
mod common;
mod forward;
mod gradients;
#[path = "../../examples/rust/llama/mod.rs"]
mod llama;

use candle_core::{Device, Tensor};
use common::{DeviceTensor, TestTensor, rng};
use unsloth::{Context, DType, Layout};

/// candle's tensor with the same elements.
fn candle(t: &TestTensor) -> Tensor {
    let values: Vec<f32> = t.values().iter().map(|v| *v as f32).collect();
    let dtype = match t.dtype {
        DType::F16 => candle_core::DType::F16,
        DType::Bf16 => candle_core::DType::BF16,
        _ => candle_core::DType::F32,
    };
    Tensor::from_vec(values, t.layout.shape(), &Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap()
}

/// candle's result equals ours up to `units` in the last place of the largest element: what both
/// may lose on the way.
fn assert_agrees(what: &str, ours: &TestTensor, theirs: &Tensor, units: f64) {
    let theirs: Vec<f32> = theirs
        .to_dtype(candle_core::DType::F32)
        .and_then(|t| t.flatten_all())
        .and_then(|t| t.to_vec1())
        .unwrap();
    let ours_values = ours.values();
    assert_eq!(ours_values.len(), theirs.len(), "{what}");
    let magnitude = theirs.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
    assert!(magnitude > 0.0, "{what}: candle gives zeros alone");
    let bound = units * common::rules::epsilon(ours.dtype) * magnitude;
    for (i, (a, b)) in ours_values.iter().zip(&theirs).enumerate() {
        let error = (a - f64::from(*b)).abs();
        assert!(
            error <= bound,
            "{what} {}: element {i} is {a}, candle's {b}",
            ours.dtype
        );
    }
}

fn normal(dtype: DType, shape: &[usize]) -> TestTensor {
    TestTensor::normal(&mut rng(), dtype, Layout::contiguous(shape).unwrap())
}

fn output(ctx: &Context, dtype: DType, shape: &[usize]) -> DeviceTensor {
    TestTensor::poisoned(dtype, Layout::contiguous(shape).unwrap()).upload(ctx)
}
