//! Attention kernels that run on every architecture from sm_80.
//!
//! | kernel | what it is for |
//! |-|-|
//! | [`forward`] | f16 and bf16 on tensor cores, a block of queries per cube |
//! | [`decode`] | f16 and bf16, few queries: heads packed, keys split |
//! | [`combine`] | joins what splits give |
//! | [`simt`] | everything else |

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, with_vector};
use arguments::{Args, Buffers};
use fragments::Line;

pub mod arguments;
pub mod combine;
pub mod decode;
pub mod forward;
pub mod fragments;
pub mod simt;

/// Runs `$body` with `$t` as a 16-bit type.
macro_rules! with_half {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            Dtype::F16 => {
                type $t = half::f16;
                $body
            }
            _ => {
                type $t = half::bf16;
                $body
            }
        }
    };
}

const HALVES: [Dtype; 2] = [Dtype::F16, Dtype::Bf16];

pub fn forward_kernel(dtype: Dtype, config: forward::Config) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_half!(dtype, E => {
        let ty = b.type_of::<Vector<E, Line>>();
        let (q, k, v, out) = (b.read("q", ty), b.read("k", ty), b.read("v", ty), b.write("out", ty));
        let buffers = Buffers::declare(&mut b);
        let args = Args::declare(&mut b);
        forward::forward::expand::<E>(b.scope(), q.into(), k.into(), v.into(), out.into(), buffers, args, config);
    });
    let name = format!(
        "attention_{}_d{}{}",
        dtype.name(),
        config.head_dim,
        if config.scores { "_scores" } else { "" }
    );
    let choices = vec![
        ("dtype", dtype as u32),
        ("head_dim", config.head_dim),
        ("rows", config.rows()),
        ("scores", u32::from(config.scores)),
    ];
    b.finish(name, choices, config.threads())
}

pub fn decode_kernel(dtype: Dtype, config: decode::Config) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_half!(dtype, E => {
        let ty = b.type_of::<Vector<E, Line>>();
        let (q, k, v, out) = (b.read("q", ty), b.read("k", ty), b.read("v", ty), b.write("out", ty));
        let buffers = Buffers::declare(&mut b);
        let args = Args::declare(&mut b);
        decode::decode::expand::<E>(b.scope(), q.into(), k.into(), v.into(), out.into(), buffers, args, config);
    });
    let name = format!(
        "attention_decode_{}_d{}{}",
        dtype.name(),
        config.head_dim,
        if config.scores { "_scores" } else { "" }
    );
    let choices = vec![
        ("dtype", dtype as u32),
        ("head_dim", config.head_dim),
        ("rows", 16),
        ("scores", u32::from(config.scores)),
    ];
    b.finish(name, choices, config.threads())
}

/// `width`: elements of an access, 4 or 1.
pub fn simt_kernel(dtype: Dtype, kv_dtype: Dtype, width: u32) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, Q, _N => with_vector!(kv_dtype, K, _M => {
        if width == 4 {
            simt_declare::<Q, K, Const<4>>(&mut b);
        } else {
            simt_declare::<Q, K, Const<1>>(&mut b);
        }
    }));
    let name = format!(
        "attention_simt_{}_{}_w{width}",
        dtype.name(),
        kv_dtype.name()
    );
    let choices = vec![
        ("dtype", dtype as u32),
        ("kv_dtype", kv_dtype as u32),
        ("head_dim", simt::HEAD_DIM),
        ("width", width),
        ("rows", simt::ROWS),
    ];
    b.finish(name, choices, simt::THREADS)
}

fn simt_declare<Q: Float, K: Float, N: Size>(b: &mut Builder) {
    let ty = b.type_of::<Vector<Q, N>>();
    let kv = b.type_of::<Vector<K, N>>();
    let (q, k, v, out) = (
        b.read("q", ty),
        b.read("k", kv),
        b.read("v", kv),
        b.write("out", ty),
    );
    let buffers = Buffers::declare(b);
    let args = Args::declare(b);
    simt::simt::expand::<Q, K, N>(
        b.scope(),
        q.into(),
        k.into(),
        v.into(),
        out.into(),
        buffers,
        args,
        simt::HEAD_DIM,
    );
}

pub fn combine_kernel(dtype: Dtype) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, E, _N => {
        let (quad, f32_, u32_) = (b.type_of::<Vector<f32, Const<4>>>(), b.type_of::<f32>(), b.type_of::<u32>());
        let ty = b.type_of::<Vector<E, Const<4>>>();
        let partial = b.read("partial", quad);
        let partial_lse = b.read("partial_lse", f32_);
        let cu_seqlens_q = b.read("cu_seqlens_q", u32_);
        let cu_seqlens_k = b.read("cu_seqlens_k", u32_);
        let seq_lens_k = b.read("seq_lens_k", u32_);
        let sinks = b.read("sinks", f32_);
        let out = b.write("out", ty);
        let lse = b.write("lse", f32_);
        let args = combine::Args::declare(&mut b);
        combine::combine::expand::<E>(b.scope(), partial.into(), partial_lse.into(), cu_seqlens_q.into(), cu_seqlens_k.into(),
            seq_lens_k.into(), sinks.into(), out.into(), lse.into(), args, 2);
    });
    b.finish(
        format!("attention_combine_{}", dtype.name()),
        vec![("dtype", dtype as u32)],
        combine::PLANES * 32,
    )
}

/// Every form.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in HALVES {
        for (head_dim, tile_keys, fragments) in [(64, 96, 2), (128, 48, 2), (256, 48, 1)] {
            let config = forward::Config {
                head_dim,
                tile_keys,
                planes: 4,
                fragments,
                scores: false,
            };
            kernels.push(forward_kernel(dtype, config)?);
            let tile_keys = if head_dim == 256 { 32 } else { 64 };
            let config = forward::Config {
                tile_keys,
                fragments: 1,
                scores: true,
                ..config
            };
            kernels.push(forward_kernel(dtype, config)?);
        }
        // Biased scores do not fit the registers together with 256 dimensions: that is left to `simt`. 64 dimensions use the
        // kernel for 128.
        for (head_dim, groups, scores) in [
            (64, 2, false),
            (128, 1, false),
            (128, 1, true),
            (256, 1, false),
        ] {
            let config = decode::Config {
                head_dim,
                planes: 4,
                groups,
                scores,
                prefetch: head_dim < 256,
            };
            kernels.push(decode_kernel(dtype, config)?);
        }
    }
    kernels.push(simt_kernel(Dtype::F32, Dtype::F32, 4)?);
    for dtype in Dtype::ALL {
        for kv_dtype in Dtype::ALL {
            kernels.push(simt_kernel(dtype, kv_dtype, 1)?);
        }
    }
    Ok(kernels)
}

/// One per output dtype.
pub fn combine_kernels() -> Result<Vec<Kernel>, Error> {
    Dtype::ALL.into_iter().map(combine_kernel).collect()
}
