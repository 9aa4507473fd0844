//! What the CPU benches share: random data, and a case measured for the library and for candle, one
//! after the other in one process.
#![allow(dead_code)] // each bench uses its part

pub mod heap;

use std::path::Path;
use std::time::Duration;

use candle_core::{Device, Tensor};
use criterion::{BenchmarkId, Criterion};
use half::{bf16, f16};
use unsloth::{DType, Element};

/// A storage type of both libraries.
pub trait Storage: Element + candle_core::WithDType {
    fn from_f32(x: f32) -> Self;

    /// Both traits have a `DTYPE`.
    fn dtype() -> DType {
        <Self as Element>::DTYPE
    }
}

impl Storage for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Storage for f16 {
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
}

impl Storage for bf16 {
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
}

/// Uniform numbers in [-1, 1), the same in every run.
pub fn random<T: Storage>(len: usize, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            T::from_f32((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0)
        })
        .collect()
}

/// candle's copy of the data.
pub fn tensor<T: Storage>(data: &[T], shape: &[usize]) -> Tensor {
    Tensor::from_slice(data, shape, &Device::Cpu).expect("the data fill the shape")
}

/// Measures one case of a group for both.
pub fn compare(
    criterion: &mut Criterion,
    group: &str,
    case: &str,
    mut ours: impl FnMut(),
    mut theirs: impl FnMut() -> candle_core::Result<Tensor>,
) {
    let mut group = criterion.benchmark_group(group);
    group
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    group.bench_function(BenchmarkId::new("unsloth", case), |b| b.iter(&mut ours));
    group.bench_function(BenchmarkId::new("candle", case), |b| {
        b.iter(|| theirs().expect("candle runs the case"));
    });
    group.finish();
}

/// Writes a file beside criterion's results, where `benches/report.py record` takes it from.
pub fn results(file: &str, text: &str) {
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".to_string());
    let folder = Path::new(&target).join("criterion");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(file), text).unwrap();
}
