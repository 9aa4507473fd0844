//! Attention against candle on the CPU, in one process on the same data: criterion groups
//! `attention`, and the peak of live heap bytes of one call of each at growing lengths, written
//! beside criterion's results as `attention-memory.json`.
//!
//! candle's contender is the usual chain of operations: `q kᵀ`, scale, causal mask, softmax,
//! product with `v`, each the fastest that candle has; for decoding it multiplies the query heads
//! of a key head as one matrix, so that it need not repeat keys. Its tiled attention for the CPU
//! (`candle_nn::attention::flash_attn`) is measured too, as `candle flash`.

mod common;

use std::hint::black_box;

use candle_core::{DType, Device, Tensor};
use candle_nn::attention::AttnMask;
use common::heap::{Counting, peak_of};
use common::{Storage, compare, random, results, tensor};
use criterion::{BenchmarkId, Criterion};
use half::f16;
use unsloth::ops::attention::{self, Params};
use unsloth::{Context, Stream, TensorMut, TensorRef};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    causal: bool,
}

/// The heads of SmolLM2-135M, the model of the examples.
const SMOLLM2: Shape = Shape {
    batch: 1,
    queries: 1,
    keys: 1,
    heads: 9,
    kv_heads: 3,
    head_dim: 64,
    causal: false,
};

fn prefill(len: usize, causal: bool) -> Shape {
    Shape {
        queries: len,
        keys: len,
        causal,
        ..SMOLLM2
    }
}

fn decode(batch: usize, keys: usize) -> Shape {
    Shape {
        batch,
        keys,
        ..SMOLLM2
    }
}

/// The same numbers for both contenders, `[batch, heads, tokens, head_dim]`, candle's favourite
/// order.
struct Data<T> {
    shape: Shape,
    q: Vec<T>,
    k: Vec<T>,
    v: Vec<T>,
    out: Vec<T>,
    tensors: [Tensor; 3],
    mask: Option<Tensor>,
}

impl<T: Storage> Data<T> {
    fn new(shape: Shape) -> Self {
        let dims = |heads, tokens| [shape.batch, heads, tokens, shape.head_dim];
        let q_dims = dims(shape.heads, shape.queries);
        let k_dims = dims(shape.kv_heads, shape.keys);
        let q: Vec<T> = random(q_dims.iter().product(), 1);
        let k: Vec<T> = random(k_dims.iter().product(), 2);
        let v: Vec<T> = random(k_dims.iter().product(), 3);
        let tensors = [
            tensor(&q, &q_dims),
            tensor(&k, &k_dims),
            tensor(&v, &k_dims),
        ];
        let mask = shape.causal.then(|| {
            let n = shape.queries;
            let values: Vec<f32> = (0..n * n)
                .map(|i| {
                    if i % n > i / n {
                        f32::NEG_INFINITY
                    } else {
                        0.0
                    }
                })
                .collect();
            let mask = Tensor::from_vec(values, (n, n), &Device::Cpu).unwrap();
            mask.to_dtype(tensors[0].dtype()).unwrap()
        });
        let out = vec![T::from_f32(0.0); q.len()];
        Data {
            shape,
            q,
            k,
            v,
            out,
            tensors,
            mask,
        }
    }

    fn ours(&mut self, ctx: &Context) {
        let s = self.shape;
        let q_dims = [s.batch, s.heads, s.queries, s.head_dim];
        let k_dims = [s.batch, s.kv_heads, s.keys, s.head_dim];
        let view = |data, dims: &[usize]| {
            TensorRef::from_slice(data, dims)
                .unwrap()
                .transposed(1, 2)
                .unwrap()
        };
        let out = TensorMut::from_slice(&mut self.out, &q_dims).unwrap();
        let mut params = Params::new(
            view(&self.q, &q_dims),
            view(&self.k, &k_dims),
            view(&self.v, &k_dims),
            out.transposed(1, 2).unwrap(),
        );
        params.causal = s.causal;
        attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
        black_box(&self.out);
    }

    fn candle(&self) -> candle_core::Result<Tensor> {
        let s = self.shape;
        let [q, k, v] = &self.tensors;
        let group = s.heads / s.kv_heads;
        let q = (q * (1.0 / (s.head_dim as f64).sqrt()))?;
        if s.queries == 1 {
            let q = q.reshape((s.batch, s.kv_heads, group, s.head_dim))?;
            let weights = candle_nn::ops::softmax_last_dim(&q.matmul(&k.t()?)?)?;
            return weights.matmul(v);
        }
        let repeat = |t: &Tensor| {
            t.unsqueeze(2)?
                .expand((s.batch, s.kv_heads, group, s.keys, s.head_dim))?
                .reshape((s.batch, s.heads, s.keys, s.head_dim))
        };
        let mut scores = q.matmul(&repeat(k)?.t()?)?;
        if let Some(mask) = &self.mask {
            scores = scores.broadcast_add(mask)?;
        }
        candle_nn::ops::softmax_last_dim(&scores)?.matmul(&repeat(v)?)
    }

    /// Both contenders must compute the same thing.
    fn verify(&mut self, ctx: &Context) {
        self.ours(ctx);
        let dims = self.tensors[0].dims().to_vec();
        let ours = Tensor::from_slice(&self.out, dims.as_slice(), &Device::Cpu).unwrap();
        let theirs = self.candle().and_then(|t| t.reshape(dims)).unwrap();
        let wide = |t: Tensor| t.to_dtype(DType::F32).unwrap();
        let difference = (wide(ours) - wide(theirs)).unwrap().abs().unwrap();
        let worst: f32 = difference
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar()
            .unwrap();
        let allowed = if T::dtype() == unsloth::DType::F32 {
            1e-5
        } else {
            2e-2
        };
        assert!(worst < allowed, "contenders differ by {worst}");
    }
}

impl Data<f32> {
    /// candle's own tiled attention, on tensors in the order it takes.
    fn candle_flash(&self, tensors: &[Tensor; 3]) -> candle_core::Result<Tensor> {
        let [q, k, v] = tensors;
        let scale = 1.0 / (self.shape.head_dim as f32).sqrt();
        let mask = match self.shape.causal {
            true => AttnMask::causal(),
            false => AttnMask::None,
        };
        candle_nn::attention::flash_attn::<f32>(q, k, v, scale, mask, None, None)
    }
}

fn bench<T: Storage>(c: &mut Criterion, ctx: &Context, name: &str, shape: Shape) {
    let mut data = Data::<T>::new(shape);
    data.verify(ctx);
    let theirs = Data::<T>::new(shape);
    compare(c, "attention", name, || data.ours(ctx), || theirs.candle());
}

/// As [`bench`], and candle's tiled attention as a third contender.
fn bench_all(c: &mut Criterion, ctx: &Context, name: &str, shape: Shape) {
    bench::<f32>(c, ctx, name, shape);
    let data = Data::<f32>::new(shape);
    let tensors = [0, 1, 2].map(|i| {
        let t = data.tensors[i].transpose(1, 2);
        t.and_then(|t| t.contiguous()).unwrap()
    });
    let mut group = c.benchmark_group("attention");
    group.sample_size(10);
    group.bench_function(BenchmarkId::new("candle flash", name), |b| {
        b.iter(|| data.candle_flash(&tensors).unwrap());
    });
    group.finish();
}

/// Peaks of one causal prefill each, output included.
fn memory(ctx: &Context) -> String {
    let mut entries = Vec::new();
    for len in [512, 1024, 2048, 4096] {
        let mut data = Data::<f32>::new(prefill(len, true));
        let output = data.out.len() * size_of::<f32>();
        let ((), ours) = peak_of(|| data.ours(ctx));
        let ours = ours + output;
        let ((), theirs) = peak_of(|| drop(black_box(data.candle().unwrap())));
        entries.push(format!(
            "\"{len}\": {{\"unsloth\": {ours}, \"candle\": {theirs}}}"
        ));
    }
    format!("{{{}}}\n", entries.join(", "))
}

fn main() {
    let ctx = Context::cpu().unwrap();
    let mut c = Criterion::default().configure_from_args();
    for len in [512, 2048] {
        for causal in [false, true] {
            let name = format!("prefill {len}{}", if causal { " causal" } else { "" });
            bench_all(&mut c, &ctx, &name, prefill(len, causal));
        }
    }
    bench::<f16>(&mut c, &ctx, "prefill 2048 causal f16", prefill(2048, true));
    for (batch, keys) in [(1, 512), (1, 2048), (8, 2048)] {
        let name = format!("decode {batch}x{keys}");
        bench_all(&mut c, &ctx, &name, decode(batch, keys));
    }
    bench::<f16>(&mut c, &ctx, "decode 8x2048 f16", decode(8, 2048));
    c.final_summary();

    let memory = memory(&ctx);
    print!("peak heap bytes of one causal call: {memory}");
    results("attention-memory.json", &memory);
}
