//! Attention on candle's CUDA tensors beside candle's own operations: time, and device memory
//! beyond the inputs. Prints one JSON object per line. Without a GPU it says so and ends.
//!
//! Candle's side has the layout that it likes, heads before the sequence, and no mask to add; ours
//! takes candle's tensors in ours.

use std::ptr;
use std::time::Instant;

use candle_core::{D, DType, Device, Result, Tensor};
use cudarc::driver::sys;
use unsloth::candle::{Attention, attention};

const HEADS: usize = 32;
const HEAD_DIM: usize = 128;
const ROUNDS: usize = 15;
const CALLS: usize = 5;

fn main() -> Result<()> {
    if !candle_core::utils::cuda_is_available() {
        println!("{}", serde_json::json!({ "skipped": "no CUDA device" }));
        return Ok(());
    }
    let device = Device::new_cuda(0)?;
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for seq in [512, 2048, 4096] {
            case(&device, dtype, seq)?;
        }
    }
    Ok(())
}

fn case(device: &Device, dtype: DType, seq: usize) -> Result<()> {
    let normal = || Tensor::randn(0f32, 1.0, (1, seq, HEADS, HEAD_DIM), device)?.to_dtype(dtype);
    let (q, k, v) = (normal()?, normal()?, normal()?);
    let heads_first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let (tq, tk, tv) = (heads_first(&q)?, heads_first(&k)?, heads_first(&v)?);
    let ours = || attention(&q, &k, &v, Attention::default());
    let theirs = || {
        let scores = (tq.matmul(&tk.t()?)? / (HEAD_DIM as f64).sqrt())?;
        candle_nn::ops::softmax_last_dim(&scores)?.matmul(&tv)
    };
    let difference =
        (ours()?.transpose(1, 2)?.to_dtype(DType::F32)? - theirs()?.to_dtype(DType::F32)?)?;
    let difference = difference
        .abs()?
        .flatten_all()?
        .max(D::Minus1)?
        .to_scalar::<f32>()?;
    assert!(difference < 5e-2, "they differ by {difference}");

    let needs = [peak(device, &ours)?, peak(device, &theirs)?];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        let contenders: [&dyn Fn() -> Result<Tensor>; 2] = [&ours, &theirs];
        for (times, contender) in times.iter_mut().zip(contenders) {
            device.synchronize()?;
            let started = Instant::now();
            for _ in 0..CALLS {
                contender()?;
            }
            device.synchronize()?;
            times.push(started.elapsed().as_secs_f64() / CALLS as f64 * 1e6);
        }
    }
    let [ours, theirs] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[ROUNDS / 2]
    });
    println!(
        "{}",
        serde_json::json!({
            "case": format!("{} {seq} keys", dtype.as_str()),
            "dtype": dtype.as_str(),
            "us": { "unsloth": ours, "candle": theirs },
            "memory": { "unsloth": needs[0], "candle": needs[1] },
        })
    );
    Ok(())
}

/// The most bytes that a call holds at once of the pool from which candle's tensors come.
fn peak(device: &Device, call: &impl Fn() -> Result<Tensor>) -> Result<u64> {
    device.synchronize()?;
    let before = pool(|pool| {
        used(
            pool,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
        )
    });
    pool(|pool| {
        let mut zero = 0u64;
        let high = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
        // SAFETY: this attribute is set from a u64, which must be zero.
        ok(unsafe { sys::cuMemPoolSetAttribute(pool, high, (&raw mut zero).cast()) });
    });
    let result = call()?;
    device.synchronize()?;
    drop(result);
    let high = pool(|pool| {
        used(
            pool,
            sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
        )
    });
    Ok(high - before)
}

fn pool<R>(f: impl FnOnce(sys::CUmemoryPool) -> R) -> R {
    let mut pool = ptr::null_mut();
    // SAFETY: valid for a write; candle has initialised the driver.
    ok(unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, 0) });
    f(pool)
}

fn used(pool: sys::CUmemoryPool, attribute: sys::CUmemPool_attribute) -> u64 {
    let mut bytes = 0u64;
    // SAFETY: the attributes asked for are a u64 each.
    ok(unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) });
    bytes
}

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}
