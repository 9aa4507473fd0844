//! The attention half of a transformer layer on candle's tensors: `cargo run --example candle
//! --features candle`, or with `--features candle-cuda` on a GPU. Beside it, the same by candle's
//! own operations.

use candle_core::{D, DType, Device, Result, Tensor};
use unsloth::candle::{Attention, attention, linear, rms_norm, rope};
use unsloth::ops::rope::Style;

const SEQ: usize = 512;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const DIM: usize = 64;
const HIDDEN: usize = HEADS * DIM;
const EPSILON: f32 = 1e-5;

struct Layer {
    norm: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cos: Tensor,
    sin: Tensor,
}

impl Layer {
    fn random(device: &Device) -> Result<Layer> {
        let matrix = |rows: usize| Tensor::randn(0f32, 0.05, (rows, HIDDEN), device);
        let exponents = Tensor::arange(0, DIM as i64 / 2, device)?.to_dtype(DType::F32)?;
        let frequencies = (exponents * (-2.0 / DIM as f64 * 10000f64.ln()))?.exp()?;
        let positions = Tensor::arange(0, SEQ as i64, device)?.to_dtype(DType::F32)?;
        let angles = positions
            .unsqueeze(1)?
            .broadcast_mul(&frequencies.unsqueeze(0)?)?;
        Ok(Layer {
            norm: Tensor::ones(HIDDEN, DType::F32, device)?,
            q: matrix(HEADS * DIM)?,
            k: matrix(KV_HEADS * DIM)?,
            v: matrix(KV_HEADS * DIM)?,
            out: matrix(HIDDEN)?,
            cos: angles.cos()?,
            sin: angles.sin()?,
        })
    }

    /// `x + out(attention(rope(q), rope(k), v))` of the normalised `x`, by this library.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let normed = rms_norm(x, Some(&self.norm), EPSILON)?;
        let heads = |weight, heads| linear(&normed, weight, None)?.reshape((1, SEQ, heads, DIM));
        let rotate = |x: Tensor| rope(&x, &self.cos, &self.sin, None, Style::HalfSplit);
        let q = rotate(heads(&self.q, HEADS)?)?;
        let k = rotate(heads(&self.k, KV_HEADS)?)?;
        let v = heads(&self.v, KV_HEADS)?;
        let causal = Attention {
            causal: true,
            ..Attention::default()
        };
        let attended = attention(&q, &k, &v, causal)?.reshape((1, SEQ, HIDDEN))?;
        x + linear(&attended, &self.out, None)?
    }

    /// The same by candle's operations.
    fn by_candle(&self, x: &Tensor) -> Result<Tensor> {
        let normed = candle_nn::ops::rms_norm(x, &self.norm, EPSILON)?;
        let heads = |weight: &Tensor, heads: usize| {
            let projected = normed.broadcast_matmul(&weight.t()?)?;
            let split = projected.reshape((1, SEQ, heads, DIM))?;
            split.transpose(1, 2)?.contiguous()
        };
        let rotate = |x: &Tensor| candle_nn::rotary_emb::rope(x, &self.cos, &self.sin);
        let repeat = |x: Tensor| {
            let shape = (1, KV_HEADS, HEADS / KV_HEADS, SEQ, DIM);
            let repeated = x.unsqueeze(2)?.broadcast_as(shape)?;
            repeated.contiguous()?.reshape((1, HEADS, SEQ, DIM))
        };
        let q = rotate(&heads(&self.q, HEADS)?)?;
        let k = repeat(rotate(&heads(&self.k, KV_HEADS)?)?)?;
        let v = repeat(heads(&self.v, KV_HEADS)?)?;
        let scores = (q.matmul(&k.t()?)? / (DIM as f64).sqrt())?;
        let visible = Tensor::tril2(SEQ, DType::F32, x.device())?;
        let hidden = ((visible - 1.0)? * 1e9)?;
        let weights = candle_nn::ops::softmax_last_dim(&scores.broadcast_add(&hidden)?)?;
        let attended = weights.matmul(&v)?.transpose(1, 2)?;
        let attended = attended.contiguous()?.reshape((1, SEQ, HIDDEN))?;
        x + attended.broadcast_matmul(&self.out.t()?)?
    }
}

fn main() -> Result<()> {
    // A GPU in a build with `candle-cuda`, where there is one.
    let device = Device::cuda_if_available(0)?;
    let layer = Layer::random(&device)?;
    let x = Tensor::randn(0f32, 1.0, (1, SEQ, HIDDEN), &device)?;
    let (ours, theirs) = (layer.forward(&x)?, layer.by_candle(&x)?);
    let difference = (&ours - &theirs)?.abs()?.flatten_all()?.max(D::Minus1)?;
    let difference = difference.to_scalar::<f32>()?;
    println!("{device:?}: {ours:?}, greatest difference from candle's own {difference:.1e}");
    // On a GPU candle's products may round their factors.
    let bound = if device.is_cpu() { 1e-4 } else { 1e-2 };
    assert!(difference < bound);
    Ok(())
}
