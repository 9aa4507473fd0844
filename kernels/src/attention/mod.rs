//! Attention kernels that run on every architecture from sm_80.
//!
//! | kernel | what it is for |
//! |-|-|
//! | [`forward`] | f16 and bf16 on tensor cores, a block of queries per cube |
//! | [`forward_f32`] | the same of f32, in products of its parts |
//! | [`decode`] | f16 and bf16, few queries: heads packed, keys split |
//! | [`decode::decode_codes`], [`simt::simt_codes`] | the last two where keys and values are codes of 8-bit floats |
//! | [`combine`] | joins what splits give |
//! | [`simt`] | everything else |
//! | [`backward`] | the gradients |
//!
//! Each is a page of stages: where a cube's rows and keys are, loads, scores, masks, softmax, sums
//! of values, what is stored. What they share is in files of its own:
//!
//! | file | what it has | of |
//! |-|-|-|
//! | [`arguments`] | what kernels are told; where sequences, rows and scores lie | all |
//! | [`block`] | the rows and keys of a cube with one head | [`forward`], [`forward_f32`] |
//! | [`packed`] | those of a cube with all heads of a key head, and a part of the keys | [`decode`], [`simt`] |
//! | [`copies`] | copies to shared memory that go on meanwhile | [`forward`], [`forward_f32`] |
//! | [`tiles`], [`tiles_f32`] | queries, keys and values there | [`forward`]; [`forward_f32`] |
//! | [`loads`] | keys and values in registers | [`decode`] |
//! | [`products`] | scores, and sums of values | [`forward`], [`backward`] |
//! | [`fragments`], [`tf32`](mod@tf32) | products on tensor cores | all but [`simt`]; [`forward_f32`] |
//! | [`softmax`] | scores in fragments to exponentials, and sums with them | all but [`simt`] |
//! | [`merge`] | how the planes of a cube come together | [`decode`] |
//!
//! # What the host does
//!
//! All but [`combine`] take the same arguments. `head_dim` and `head_dim_v` are at most the kernel's choice `head_dim`; lengths and
//! windows are below 2³⁰, an unlimited window is 2³⁰, and a causal mask is `window_right` 1. Null pointers are fine where `flags` says
//! that an argument is absent. `out` and `out_f32` are the same pointer. A bias goes into the buffer of its dtype.
//!
//! - [`forward`]: needs head dimensions, strides and addresses that are multiples of 8 elements (and 16 bytes), keys of the queries' dtype,
//!   and a positive scale. `scores` if there is a softcap, a bias, a mask, ALiBi or a negative scale. Its grid is
//!   `ceil(seqlen_q / rows) * num_heads * batch` with that first factor as `row_blocks`; `splits` 1.
//! - [`forward_f32`]: the same, but multiples of 4 elements.
//! - [`decode`]: the same needs (its plain form takes a softcap); best while `seqlen_q * group` is at most 64. The grid is
//!   `splits * ceil(seqlen_q * group / rows) * num_kv_heads * batch`, the second factor being `row_blocks`.
//! - [`simt`]: `width` 4 needs multiples of 4 elements and 16 bytes, 1 needs nothing. The grid is as for [`decode`].
//!
//! Strides of q, k, v and out count units of `width` elements, all others elements; in paged form `k_outer` and `v_outer` are the distance
//! of pages, in packed form they are 0.
//!
//! Keys are split if unsplit blocks would leave much of the GPU idle. The host chooses how many parts there are; how long they
//! are follows from the length of each sequence, which only the device knows, but at least `split_keys`, a multiple of 64. With
//! `rows = batch * seqlen_q * num_heads` the workspace has `splits * rows * (head_dim_v + 1) * 4` bytes: `partial`, then `partial_lse`;
//! [`combine`] follows, in `ceil(rows / 4)` blocks, and wants `out` in multiples of four elements; otherwise `splits` is 1. The first
//! kernel leaves sinks to it.

// What these lints would have instead is not in CubeCL's language, or means something else there.
#![allow(
    clippy::assign_op_pattern,
    clippy::collapsible_if,
    clippy::manual_div_ceil,
    clippy::manual_is_multiple_of
)]

use contract::attention::Kind;
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, with_vector};
use arguments::{Args, Buffers, Scales};
use decode::Loads;
use fragments::Line;

use crate::e4m3::with_instruction;

pub mod arguments;
pub mod backward;
pub mod block;
pub mod combine;
pub mod copies;
pub mod decode;
pub mod forward;
pub mod forward_f32;
pub mod fragments;
pub mod loads;
pub mod merge;
pub mod packed;
pub mod products;
pub mod simt;
pub mod softmax;
pub mod tf32;
pub mod tiles;
pub mod tiles_f32;

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

use with_half;

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
        ("kind", Kind::Forward.code()),
        ("dtype", dtype.code()),
        ("kv_dtype", dtype.code()),
        ("head_dim", config.head_dim),
        ("scores", u32::from(config.scores)),
        ("width", 8),
        ("rows", config.rows()),
    ];
    b.finish(name, choices, config.threads())
}

pub fn forward_f32_kernel(config: forward_f32::Config) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let ty = b.type_of::<Vector<f32, tf32::Quad>>();
    let (q, k, v, out) = (
        b.read("q", ty),
        b.read("k", ty),
        b.read("v", ty),
        b.write("out", ty),
    );
    let buffers = Buffers::declare(&mut b);
    let args = Args::declare(&mut b);
    forward_f32::forward_f32::expand(
        b.scope(),
        q.into(),
        k.into(),
        v.into(),
        out.into(),
        buffers,
        args,
        config,
    );
    let name = format!(
        "attention_f32_d{}{}",
        config.head_dim,
        if config.scores { "_scores" } else { "" }
    );
    let choices = vec![
        ("kind", Kind::Forward.code()),
        ("dtype", Dtype::F32.code()),
        ("kv_dtype", Dtype::F32.code()),
        ("head_dim", config.head_dim),
        ("scores", u32::from(config.scores)),
        ("width", 4),
        ("rows", config.rows()),
    ];
    b.finish(name, choices, config.threads())
}

pub fn decode_kernel(dtype: Dtype, config: decode::Config) -> Result<Kernel, Error> {
    if !config.deals_evenly() {
        return Err(Error::Expand {
            kernel: format!("attention_decode_d{}", config.head_dim),
            reason: format!("{} threads are too many for 16 rows", config.threads()),
        });
    }
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
        ("kind", Kind::Decode.code()),
        ("dtype", dtype.code()),
        ("kv_dtype", dtype.code()),
        ("head_dim", config.head_dim),
        ("scores", u32::from(config.scores)),
        ("width", 8),
        ("rows", 16),
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
        ("kind", Kind::Simt.code()),
        ("dtype", dtype.code()),
        ("kv_dtype", kv_dtype.code()),
        ("head_dim", simt::HEAD_DIM),
        ("scores", 1),
        ("width", width),
        ("rows", simt::ROWS),
    ];
    let kernel = b.finish(name, choices, simt::THREADS)?;
    Ok(if width == 1 {
        kernel.for_blocks(1)
    } else {
        kernel
    })
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
        vec![("dtype", dtype.code())],
        combine::PLANES * 32,
    )
}

/// Every form.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    // Kernels that differ in the dtype alone lie beside each other, where they compress best.
    for (head_dim, tile_keys, fragments) in [(64, 96, 2), (128, 48, 2), (256, 48, 1)] {
        let plain = forward::Config {
            head_dim,
            tile_keys,
            planes: 4,
            fragments,
            scores: false,
        };
        let tile_keys = if head_dim == 256 { 32 } else { 64 };
        let scores = forward::Config {
            tile_keys,
            fragments: 1,
            scores: true,
            ..plain
        };
        for config in [plain, scores] {
            for dtype in HALVES {
                kernels.push(forward_kernel(dtype, config)?);
            }
        }
    }
    // Biased scores do not fit the registers together with 256 dimensions: that is left to `simt`. Those of 64
    // dimensions use the kernel for 128.
    for (head_dim, planes, groups, scores, loads) in [
        (64, 4, 4, false, Loads::Ahead),
        (128, 8, 2, false, Loads::Together),
        (128, 4, 1, true, Loads::Ahead),
        (256, 4, 1, false, Loads::Late),
    ] {
        let config = decode::Config {
            head_dim,
            planes,
            groups,
            scores,
            loads,
            codes: false,
        };
        for dtype in HALVES {
            kernels.push(decode_kernel(dtype, config)?);
        }
    }
    for (head_dim, tile_keys, fragments, scores) in [
        (64, 64, 2, false),
        (64, 32, 1, true),
        (128, 32, 2, false),
        (128, 32, 1, true),
        (256, 16, 1, false),
        (256, 16, 1, true),
    ] {
        let config = forward_f32::Config {
            head_dim,
            tile_keys,
            planes: 4,
            fragments,
            scores,
        };
        let kernel = forward_f32_kernel(config)?;
        kernels.push(match (head_dim, scores) {
            (256, _) | (_, true) => kernel.for_blocks(if head_dim == 64 { 3 } else { 2 }),
            _ => kernel.with_registers(248),
        });
    }
    kernels.push(simt_kernel(Dtype::F32, Dtype::F32, 4)?);
    for dtype in Dtype::ALL.iter().copied() {
        for kv_dtype in Dtype::ALL.iter().copied() {
            kernels.push(simt_kernel(dtype, kv_dtype, 1)?);
        }
    }
    Ok(kernels)
}

fn decode_codes_kernel(dtype: Dtype, config: decode::Config) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_half!(dtype, E => match config.is_wide() {
        true => decode_codes_declare::<E, Const<4>>(&mut b, config),
        false => decode_codes_declare::<E, Const<2>>(&mut b, config),
    });
    let name = format!(
        "attention_decode_{}_e4m3_d{}{}",
        dtype.name(),
        config.head_dim,
        if config.scores { "_scores" } else { "" }
    );
    let choices = vec![
        ("kind", Kind::Decode.code()),
        ("dtype", dtype.code()),
        ("kv_dtype", contract::E4M3),
        ("head_dim", config.head_dim),
        ("scores", u32::from(config.scores)),
        ("width", 8),
        ("kv_width", config.line()),
        ("rows", 16),
    ];
    b.finish(name, choices, config.threads())
}

/// Lines of keys and values being `W` words.
fn decode_codes_declare<E: Float, W: Size>(b: &mut Builder, config: decode::Config) {
    let ty = b.type_of::<Vector<E, Line>>();
    let codes = b.type_of::<Vector<u32, W>>();
    let (q, k, v, out) = (
        b.read("q", ty),
        b.read("k", codes),
        b.read("v", codes),
        b.write("out", ty),
    );
    let buffers = Buffers::declare(b);
    let scales = Scales::declare(b);
    let args = Args::declare(b);
    decode::decode_codes::expand::<E, W>(
        b.scope(),
        q.into(),
        k.into(),
        v.into(),
        out.into(),
        buffers,
        args,
        scales,
        config,
    );
}

/// `width`: elements of an access, 4 or 1.
fn simt_codes_kernel(dtype: Dtype, width: u32) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, Q, _N => {
        if width == 4 {
            simt_codes_declare::<Q, Const<4>>(&mut b);
        } else {
            simt_codes_declare::<Q, Const<1>>(&mut b);
        }
    });
    let name = format!("attention_simt_{}_e4m3_w{width}", dtype.name());
    let choices = vec![
        ("kind", Kind::Simt.code()),
        ("dtype", dtype.code()),
        ("kv_dtype", contract::E4M3),
        ("head_dim", simt::HEAD_DIM),
        ("scores", 1),
        ("width", width),
        ("kv_width", width),
        ("rows", simt::ROWS),
    ];
    let kernel = b.finish(name, choices, simt::THREADS)?;
    Ok(if width == 1 {
        kernel.for_blocks(1)
    } else {
        kernel
    })
}

fn simt_codes_declare<Q: Float, N: Size>(b: &mut Builder) {
    let ty = b.type_of::<Vector<Q, N>>();
    let kv = b.type_of::<Vector<u8, N>>();
    let (q, k, v, out) = (
        b.read("q", ty),
        b.read("k", kv),
        b.read("v", kv),
        b.write("out", ty),
    );
    let buffers = Buffers::declare(b);
    let scales = Scales::declare(b);
    let args = Args::declare(b);
    simt::simt_codes::expand::<Q, N>(
        b.scope(),
        q.into(),
        k.into(),
        v.into(),
        out.into(),
        buffers,
        args,
        scales,
    );
}

/// Every form where keys and values are codes of 8-bit floats. Queries of 16 bits are decoded whatever their number.
pub fn e4m3_kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for (head_dim, planes, groups, scores, loads) in [
        (64, 8, 2, false, Loads::Ahead),
        (128, 4, 2, false, Loads::Ahead),
        (128, 4, 1, true, Loads::Ahead),
        (256, 4, 1, false, Loads::Ahead),
    ] {
        let config = decode::Config {
            head_dim,
            planes,
            groups,
            scores,
            loads,
            codes: true,
        };
        for dtype in HALVES {
            kernels.push(with_instruction(decode_codes_kernel(dtype, config)?));
        }
    }
    kernels.push(simt_codes_kernel(Dtype::F32, 4)?);
    for dtype in Dtype::ALL.iter().copied() {
        kernels.push(simt_codes_kernel(dtype, 1)?);
    }
    Ok(kernels)
}

/// One per output dtype.
pub fn combine_kernels() -> Result<Vec<Kernel>, Error> {
    Dtype::ALL.iter().copied().map(combine_kernel).collect()
}

#[cfg(test)]
mod tests {
    use crate::catalog::tests::expanded;
    use crate::emit::Kernel;

    fn kernels() -> &'static [Kernel] {
        let image = expanded().iter().find(|image| image.name == "attention");
        &image.unwrap().kernels
    }

    /// What a block may have on every architecture from sm_80, consumer GPUs included.
    const SHARED_BYTES: usize = 99 << 10;

    #[test]
    fn kernels_fit_every_architecture() {
        for kernel in expanded().iter().flat_map(|image| &image.kernels) {
            assert!(
                kernel.shared_bytes <= SHARED_BYTES,
                "{} has {}",
                kernel.name,
                kernel.shared_bytes
            );
        }
    }

    #[test]
    fn products_are_on_tensor_cores() {
        for kernel in kernels() {
            let has = |text: &str| kernel.text.contains(text);
            let simt = kernel.name.contains("simt");
            let decode = kernel.name.contains("decode");
            let f32 = kernel.name.contains("attention_f32");
            let tf32 = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32";
            assert_eq!(has(tf32), f32, "{}", kernel.name);
            for of_halves in ["mma.sync.aligned.m16n8k16", "ldmatrix.sync.aligned.m8n8.x4"] {
                assert_eq!(has(of_halves), !simt && !f32, "{}", kernel.name);
            }
            assert_eq!(
                has("cp.async.cg.shared"),
                !simt && !decode,
                "{}",
                kernel.name
            );
        }
    }

    #[test]
    fn names_and_choices_are_unique() {
        let kernels = kernels();
        for (i, a) in kernels.iter().enumerate() {
            for b in &kernels[..i] {
                assert!(
                    a.name != b.name && a.choices != b.choices,
                    "{} and {}",
                    a.name,
                    b.name
                );
            }
        }
    }
}
