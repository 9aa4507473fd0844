//! Operations on candle's tensors agree with candle's own, on every device of candle's build, from
//! views with strides and offsets.

use candle_core::{D, DType, Device, Result, Tensor};
use unsloth::candle::{Attention, attention, linear, rms_norm, rope, swiglu};
use unsloth::ops::rope::Style;

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    if cfg!(feature = "candle-cuda") && candle_core::utils::cuda_is_available() {
        devices.push(Device::new_cuda(0).unwrap());
        devices.push(Device::new_cuda_with_stream(0).unwrap());
    }
    devices
}

/// Standard normal numbers, as a view into a larger tensor that begins and ends with others.
fn normal(shape: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let mut room = shape.to_vec();
    room[0] += 2;
    Tensor::randn(0f32, 1.0, room, device)?
        .to_dtype(dtype)?
        .narrow(0, 1, shape[0])
}

fn wide(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F32)?.contiguous()
}

/// Asserts that `actual` is `expected`, computed in f32, up to the rounding of its dtype.
#[track_caller]
fn assert_close(actual: &Tensor, expected: &Tensor) -> Result<()> {
    let bound = match actual.dtype() {
        DType::F32 if actual.device().is_cpu() => 2e-5,
        // Candle's products on a GPU may round their factors.
        DType::F32 => 5e-3,
        DType::F16 => 4e-3,
        _ => 3e-2,
    };
    assert_eq!(actual.dims(), expected.dims());
    let (actual, expected) = (wide(actual)?, wide(expected)?);
    let scale = (expected.abs()? + 1.0)?;
    let error = ((actual - expected)?.abs()? / scale)?;
    let worst = error.flatten_all()?.max(D::Minus1)?.to_scalar::<f32>()?;
    assert!(worst <= bound, "{worst} is above {bound}");
    Ok(())
}

fn each(run: impl Fn(&Device, DType) -> Result<()>) -> Result<()> {
    for device in devices() {
        for dtype in FLOATS {
            println!("{device:?} {dtype:?}");
            run(&device, dtype)?;
        }
    }
    Ok(())
}

#[test]
fn rms_norm_of_views() -> Result<()> {
    each(|device, dtype| {
        let weight = normal(&[96], dtype, device)?;
        let rows = normal(&[4, 5, 96], dtype, device)?;
        for x in [rows.clone(), rows.transpose(0, 1)?] {
            let y = wide(&x)?;
            let mean = y.sqr()?.mean_keepdim(D::Minus1)?;
            let plain = y.broadcast_div(&(mean + 1e-5)?.sqrt()?)?;
            assert_close(&rms_norm(&x, None, 1e-5)?, &plain)?;
            let expected = plain.broadcast_mul(&wide(&weight)?)?;
            assert_close(&rms_norm(&x, Some(&weight), 1e-5)?, &expected)?;
        }
        Ok(())
    })
}

#[test]
fn rope_with_tables() -> Result<()> {
    each(|device, dtype| {
        let (batch, seq, heads, dim) = (2, 7, 3, 16);
        let angles = Tensor::randn(0f32, 1.0, (20, dim / 2), device)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        // As candle has it: heads before the sequence.
        let x = normal(&[batch, heads, seq, dim], dtype, device)?;
        let ours = |positions: Option<&Tensor>, style| {
            rope(&x.transpose(1, 2)?, &cos, &sin, positions, style)?.transpose(1, 2)
        };
        let y = wide(&x)?;
        let first = candle_nn::rotary_emb::rope(&y, &cos, &sin)?;
        assert_close(&ours(None, Style::HalfSplit)?, &first)?;
        let pairs = candle_nn::rotary_emb::rope_i(&y, &cos, &sin)?;
        assert_close(&ours(None, Style::Interleaved)?, &pairs)?;
        let positions = Tensor::arange(5i64, 5 + seq as i64, device)?;
        let shared = positions.unsqueeze(0)?.broadcast_as((batch, seq))?;
        let (cos, sin) = (cos.narrow(0, 5, seq)?, sin.narrow(0, 5, seq)?);
        let later = candle_nn::rotary_emb::rope(&y, &cos, &sin)?;
        assert_close(&ours(Some(&shared), Style::HalfSplit)?, &later)
    })
}

#[test]
fn swiglu_of_halves() -> Result<()> {
    each(|device, dtype| {
        let packed = normal(&[6, 2 * 40], dtype, device)?;
        let (gate, up) = (packed.narrow(1, 0, 40)?, packed.narrow(1, 40, 40)?);
        let expected = (wide(&gate)?.silu()? * wide(&up)?)?;
        assert_close(&swiglu(&gate, &up)?, &expected)
    })
}

#[test]
fn linear_with_and_without_bias() -> Result<()> {
    each(|device, dtype| {
        let weight = (normal(&[48, 64], dtype, device)? * 0.1)?;
        let bias = normal(&[48], dtype, device)?;
        for rows in [1, 3, 40] {
            let x = normal(&[2, rows, 64], dtype, device)?;
            let product = wide(&x)?.broadcast_matmul(&wide(&weight)?.t()?)?;
            assert_close(&linear(&x, &weight, None)?, &product)?;
            let expected = product.broadcast_add(&wide(&bias)?)?;
            assert_close(&linear(&x, &weight, Some(&bias))?, &expected)?;
        }
        Ok(())
    })
}

#[test]
fn attention_of_transposed_heads() -> Result<()> {
    each(|device, dtype| {
        let (batch, heads, kv_heads, dim) = (2, 6, 2, 64);
        for (queries, keys) in [(1, 700), (33, 33), (130, 200)] {
            // As candle has them: heads before the sequence.
            let q = normal(&[batch, heads, queries, dim], dtype, device)?;
            let k = normal(&[batch, kv_heads, keys, dim], dtype, device)?;
            let v = normal(&[batch, kv_heads, keys, dim], dtype, device)?;
            let repeat = |x: &Tensor| {
                let x = wide(x)?.unsqueeze(2)?;
                x.broadcast_as((batch, kv_heads, heads / kv_heads, keys, dim))?
                    .contiguous()?
                    .reshape((batch, heads, keys, dim))
            };
            for causal in [false, true] {
                let mut scores = (wide(&q)?.matmul(&repeat(&k)?.t()?)? / (dim as f64).sqrt())?;
                if causal {
                    // The last query sees the last key.
                    let hidden: Vec<f32> = (0..queries)
                        .flat_map(|i| (0..keys).map(move |j| (i, j)))
                        .map(|(i, j)| if j + queries > i + keys { -1e9 } else { 0.0 })
                        .collect();
                    let hidden = Tensor::from_vec(hidden, (queries, keys), device)?;
                    scores = scores.broadcast_add(&hidden)?;
                }
                let weights = candle_nn::ops::softmax_last_dim(&scores)?;
                let expected = weights.matmul(&repeat(&v)?)?;
                let options = Attention {
                    causal,
                    ..Attention::default()
                };
                let [q, k, v] = [&q, &k, &v].map(|x| x.transpose(1, 2).unwrap());
                let out = attention(&q, &k, &v, options)?.transpose(1, 2)?;
                assert_close(&out, &expected)?;
            }
        }
        Ok(())
    })
}

#[test]
fn what_does_not_fit_is_refused_by_name() -> Result<()> {
    for device in devices() {
        let x = Tensor::zeros((2, 4), DType::F32, &device)?;
        let message = |result: Result<Tensor>| result.unwrap_err().to_string();
        let text = message(linear(
            &x,
            &Tensor::zeros((3, 5), DType::F32, &device)?,
            None,
        ));
        assert!(text.contains("linear: weight has shape"), "{text}");
        let text = message(rms_norm(&x.t()?, None, 0.0));
        assert!(
            text.contains("along its last dimension, allowed: 1"),
            "{text}"
        );
        let text = message(swiglu(&x, &x.to_dtype(DType::F64)?));
        assert!(text.contains("F64"), "{text}");
        let text = message(rms_norm(&x.to_dtype(DType::U32)?, None, 0.0));
        assert!(text.contains("U32"), "{text}");
        if !device.is_cpu() {
            let elsewhere = x.to_device(&Device::Cpu)?;
            assert!(message(swiglu(&x, &elsewhere)).contains("device"));
        }
    }
    Ok(())
}
