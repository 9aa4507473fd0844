//! Kernels of the backward pass that run on every architecture from sm_80.
//!
//! | kernel | what it computes |
//! |-|-|
//! | [`rows::delta`] | statistics of every row, of `out`, `dout` and the LSE |
//! | [`queries`](queries::queries) | `dq` of f16 and bf16 on tensor cores, a block of queries of one head per cube |
//! | [`keys`](keys::keys) | `dk` and `dv` likewise, a block of keys of one key head per cube; of large heads each alone |
//! | [`queries_f32`](queries_f32::queries_f32), [`keys_f32`](keys_f32::keys_f32) | the same of f32, in products of its parts; of heads up to 128 |
//! | [`simt`] | both of everything else |
//! | [`rows::sinks`] | `dsinks` |
//! | [`bias`](bias::bias), [`bias_f32`](bias_f32::bias_f32) | the gradient of the bias on tensor cores, a tile of it per cube |
//! | [`bias::join`] | adds what parts of its sums give |
//! | [`any`] | all gradients of dtypes that differ, and of large heads; the gradient of the bias of all else |
//!
//! Scores are computed twice, once for `dq` and once for `dk` and `dv`: seven products instead of five,
//! and in return every element is the sum of one cube, in one order, without atomic additions or a
//! buffer of f32. A cube of keys walks over all query heads that share its key head.
//!
//! The statistics are f32 `[2, heads, tokens]`, the workspace. Arguments are those of the forward pass
//! (`out`, `lse` and partial results are not looked at), and [`arguments::Strides`]; `row_blocks` are
//! blocks of queries, or of keys. All strides count elements of the kernel's buffers.

use contract::attention::{BiasSum, Gradient, RowSum};
use cubecl::prelude::*;

use super::arguments::{Args, Buffers};
use super::fragments::Line;
use super::tf32::Quad;
use super::tiles::Config;
use super::{HALVES, with_half};
use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, with_vector};
use any::{Dtypes, Elements, Inputs};
use arguments::Strides;
use bias::Bias;
use keys::Sums;

pub mod any;
pub mod arguments;
pub mod bias;
pub mod bias_f32;
pub mod keys;
pub mod keys_f32;
pub mod queries;
pub mod queries_f32;
pub mod rows;
pub mod simt;
pub mod tiles;
pub mod tiles_f32;

/// On tensor cores.
fn kernel(dtype: Dtype, gradient: Gradient, config: Config) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_half!(dtype, E => {
        let ty = b.type_of::<Vector<E, Line>>();
        let (q, k, v, dout) = (b.read("q", ty), b.read("k", ty), b.read("v", ty), b.read("dout", ty));
        let (dq, dk, dv) = (b.write("dq", ty), b.write("dk", ty), b.write("dv", ty));
        let f32_ = b.type_of::<f32>();
        let statistics = b.read("statistics", f32_);
        let buffers = Buffers::declare(&mut b);
        let args = Args::declare(&mut b);
        let strides = Strides::declare(&mut b);
        match gradient {
            Gradient::Queries => queries::queries::expand::<E>(
                b.scope(), q.into(), k.into(), v.into(), dout.into(), dq.into(), statistics.into(),
                buffers, args, strides, config,
            ),
            _ => keys::keys::expand::<E>(
                b.scope(), q.into(), k.into(), v.into(), dout.into(), dk.into(), dv.into(),
                statistics.into(), buffers, args, strides, config, sums(gradient),
            ),
        }
    });
    let name = format!(
        "attention_backward_{}_{}_d{}{}",
        name_of(gradient),
        dtype.name(),
        config.head_dim,
        if config.scores { "_scores" } else { "" }
    );
    let choices = vec![
        ("gradient", gradient.code()),
        ("dtype", dtype.code()),
        ("head_dim", config.head_dim),
        ("scores", u32::from(config.scores)),
        ("width", 8),
        ("rows", config.rows()),
    ];
    b.finish(name, choices, config.threads())
}

fn sums(gradient: Gradient) -> Sums {
    Sums {
        keys: gradient != Gradient::Values,
        values: gradient != Gradient::Keys,
    }
}

/// `tile_keys` of [`Config`] are the rows of a tile that goes by, of keys or of queries.
fn configs(gradient: Gradient) -> Vec<Config> {
    let tiles: &[(u32, u32)] = match gradient {
        Gradient::Queries => &[(64, 64), (128, 64), (256, 16)],
        Gradient::KeysAndValues => &[(64, 64), (128, 32)],
        // The sums of both have no room for 256 dimensions.
        Gradient::Keys | Gradient::Values => &[(256, 16)],
        // In an image of its own.
        Gradient::Bias => &[],
    };
    let config = |&(head_dim, tile_keys): &(u32, u32), scores| Config {
        head_dim,
        tile_keys,
        planes: 4,
        fragments: 1,
        scores,
    };
    let both = |tile| [false, true].map(|scores| config(tile, scores));
    tiles.iter().flat_map(both).collect()
}

/// Of f32 on tensor cores. Scores are few beside the products: one kernel is for all that they may have.
fn f32_kernel(gradient: Gradient, config: Config) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let ty = b.type_of::<Vector<f32, Quad>>();
    let (q, k, v, dout) = (
        b.read("q", ty),
        b.read("k", ty),
        b.read("v", ty),
        b.read("dout", ty),
    );
    let (dq, dk, dv) = (b.write("dq", ty), b.write("dk", ty), b.write("dv", ty));
    let f32_ = b.type_of::<f32>();
    let statistics = b.read("statistics", f32_).into();
    let buffers = Buffers::declare(&mut b);
    let args = Args::declare(&mut b);
    let strides = Strides::declare(&mut b);
    let (q, k, v, dout) = (q.into(), k.into(), v.into(), dout.into());
    match gradient {
        Gradient::Queries => queries_f32::queries_f32::expand(
            b.scope(),
            q,
            k,
            v,
            dout,
            dq.into(),
            statistics,
            buffers,
            args,
            strides,
            config,
        ),
        _ => keys_f32::keys_f32::expand(
            b.scope(),
            q,
            k,
            v,
            dout,
            dk.into(),
            dv.into(),
            statistics,
            buffers,
            args,
            strides,
            config,
        ),
    }
    let name = format!(
        "attention_backward_{}_f32_d{}",
        name_of(gradient),
        config.head_dim
    );
    let choices = vec![
        ("gradient", gradient.code()),
        ("dtype", Dtype::F32.code()),
        ("head_dim", config.head_dim),
        ("scores", 1),
        ("width", 4),
        ("rows", config.rows()),
    ];
    b.finish(name, choices, config.threads())
}

/// Heads above 128 have no room in shared memory.
const F32_TILES: [(u32, u32); 2] = [(64, 32), (128, 16)];

fn simt_kernel(dtype: Dtype, gradient: Gradient) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, E, _N => {
        let ty = b.type_of::<E>();
        let (q, k, v, dout) = (b.read("q", ty), b.read("k", ty), b.read("v", ty), b.read("dout", ty));
        let (dq, dk, dv) = (b.write("dq", ty), b.write("dk", ty), b.write("dv", ty));
        let f32_ = b.type_of::<f32>();
        let statistics = b.read("statistics", f32_);
        let buffers = Buffers::declare(&mut b);
        let args = Args::declare(&mut b);
        let strides = Strides::declare(&mut b);
        match gradient {
            Gradient::Queries => simt::queries::expand::<E>(
                b.scope(), q.into(), k.into(), v.into(), dout.into(), dq.into(), statistics.into(),
                buffers, args, strides,
            ),
            _ => simt::keys::expand::<E>(
                b.scope(), q.into(), k.into(), v.into(), dout.into(), dk.into(), dv.into(),
                statistics.into(), buffers, args, strides,
            ),
        }
    });
    let name = format!(
        "attention_backward_{}_simt_{}",
        name_of(gradient),
        dtype.name()
    );
    let choices = vec![
        ("gradient", gradient.code()),
        ("dtype", dtype.code()),
        ("head_dim", simt::HEAD_DIM),
        ("scores", 1),
        ("width", 1),
        ("rows", simt::ROWS),
    ];
    Ok(b.finish(name, choices, simt::THREADS)?.for_blocks(1))
}

fn name_of(gradient: Gradient) -> &'static str {
    match gradient {
        Gradient::Queries => "queries",
        Gradient::KeysAndValues => "keys_values",
        Gradient::Keys => "keys",
        Gradient::Values => "values",
        Gradient::Bias => "bias",
    }
}

/// Every form.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for gradient in Gradient::ALL.iter().copied() {
        for config in configs(gradient) {
            for dtype in HALVES {
                kernels.push(kernel(dtype, gradient, config)?);
            }
        }
    }
    for gradient in [Gradient::Queries, Gradient::KeysAndValues] {
        for (head_dim, tile_keys) in F32_TILES {
            let config = Config {
                head_dim,
                tile_keys,
                planes: 4,
                fragments: 1,
                scores: true,
            };
            kernels.push(f32_kernel(gradient, config)?);
        }
        for dtype in Dtype::ALL.iter().copied() {
            kernels.push(simt_kernel(dtype, gradient)?);
        }
    }
    Ok(kernels)
}

/// Of rows: `out` may be f32 where its gradient is not, and the other way round.
pub fn row_kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = vec![sinks_kernel()?];
    for dtype in Dtype::ALL.iter().copied() {
        kernels.push(delta_kernel(dtype, dtype)?);
        if dtype != Dtype::F32 {
            kernels.push(delta_kernel(Dtype::F32, dtype)?);
            kernels.push(delta_kernel(dtype, Dtype::F32)?);
        }
    }
    Ok(kernels)
}

/// The buffers of all kernels of rows, in their order: `cu_seqlens_q`, `sinks`, `out`, `dout`, `lse`,
/// `dlse`, `statistics`, `dsinks`.
fn delta_kernel(out_dtype: Dtype, dtype: Dtype) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(out_dtype, O, _N => with_vector!(dtype, D, _M => {
        let (u32_, f32_) = (b.type_of::<u32>(), b.type_of::<f32>());
        let (of_out, of_dout) = (b.type_of::<O>(), b.type_of::<D>());
        b.read("cu_seqlens_q", u32_);
        b.read("sinks", f32_);
        let (out, dout) = (b.read("out", of_out), b.read("dout", of_dout));
        let (lse, dlse) = (b.read("lse", f32_), b.read("dlse", f32_));
        let statistics = b.write("statistics", f32_);
        b.write("dsinks", f32_);
        let args = rows::Args::declare(&mut b);
        rows::delta::expand::<O, D>(
            b.scope(), out.into(), dout.into(), lse.into(), dlse.into(), statistics.into(), args,
        );
    }));
    let name = format!(
        "attention_backward_delta_{}_{}",
        out_dtype.name(),
        dtype.name()
    );
    let choices = vec![
        ("kind", RowSum::Delta.code()),
        ("out_dtype", out_dtype.code()),
        ("dtype", dtype.code()),
    ];
    b.finish(name, choices, rows::PLANES * 32)
}

fn sinks_kernel() -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let (u32_, f32_) = (b.type_of::<u32>(), b.type_of::<f32>());
    let cu_seqlens_q = b.read("cu_seqlens_q", u32_);
    let sinks = b.read("sinks", f32_);
    b.read("out", f32_);
    b.read("dout", f32_);
    b.read("lse", f32_);
    b.read("dlse", f32_);
    let statistics = b.read("statistics", f32_);
    let dsinks = b.write("dsinks", f32_);
    let args = rows::Args::declare(&mut b);
    rows::sinks::expand(
        b.scope(),
        cu_seqlens_q.into(),
        sinks.into(),
        statistics.into(),
        dsinks.into(),
        args,
    );
    let choices = vec![
        ("kind", RowSum::Sinks.code()),
        ("out_dtype", 0),
        ("dtype", 0),
    ];
    b.finish("attention_backward_sinks".into(), choices, rows::THREADS)
}

/// Of the bias: on tensor cores, and what adds parts of its sums.
pub fn bias_kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in HALVES {
        kernels.push(bias_kernel(dtype)?);
    }
    kernels.push(bias_f32_kernel()?);
    kernels.push(join_kernel()?);
    Ok(kernels)
}

fn bias_kernel(dtype: Dtype) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let config = bias::CONFIG;
    with_half!(dtype, E => {
        let ty = b.type_of::<Vector<E, Line>>();
        let f32_ = b.type_of::<f32>();
        let (q, k, v, dout) = (b.read("q", ty), b.read("k", ty), b.read("v", ty), b.read("dout", ty));
        b.read("of_parts", f32_);
        let dbias = b.write("dbias", f32_);
        let statistics = b.read("statistics", f32_);
        let buffers = Buffers::declare(&mut b);
        let args = Args::declare(&mut b);
        let strides = Strides::declare(&mut b);
        let of = Bias::declare(&mut b);
        bias::bias::expand::<E>(
            b.scope(), q.into(), k.into(), v.into(), dout.into(), dbias.into(), statistics.into(),
            buffers, args, strides, of, config,
        );
    });
    let choices = vec![
        ("kind", BiasSum::Tile.code()),
        ("dtype", dtype.code()),
        ("width", 8),
        ("rows", config.rows()),
        ("columns", config.tile_keys),
    ];
    let name = format!("attention_backward_bias_{}", dtype.name());
    // The compiler would take registers for two.
    Ok(b.finish(name, choices, config.threads())?.for_blocks(3))
}

fn bias_f32_kernel() -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let config = bias_f32::CONFIG;
    let ty = b.type_of::<Vector<f32, Quad>>();
    let f32_ = b.type_of::<f32>();
    let (q, k, v, dout) = (
        b.read("q", ty),
        b.read("k", ty),
        b.read("v", ty),
        b.read("dout", ty),
    );
    b.read("of_parts", f32_);
    let dbias = b.write("dbias", f32_);
    let statistics = b.read("statistics", f32_);
    let buffers = Buffers::declare(&mut b);
    let args = Args::declare(&mut b);
    let strides = Strides::declare(&mut b);
    let of = Bias::declare(&mut b);
    bias_f32::bias_f32::expand(
        b.scope(),
        q.into(),
        k.into(),
        v.into(),
        dout.into(),
        dbias.into(),
        statistics.into(),
        buffers,
        args,
        strides,
        of,
        config,
    );
    let choices = vec![
        ("kind", BiasSum::Tile.code()),
        ("dtype", Dtype::F32.code()),
        ("width", 4),
        ("rows", config.rows()),
        ("columns", config.tile_keys),
    ];
    b.finish(
        "attention_backward_bias_f32".into(),
        choices,
        config.threads(),
    )
}

fn join_kernel() -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let f32_ = b.type_of::<f32>();
    for name in ["q", "k", "v", "dout"] {
        b.read(name, f32_);
    }
    let of_parts = b.read("of_parts", f32_);
    let dbias = b.write("dbias", f32_);
    b.read("statistics", f32_);
    Buffers::declare(&mut b);
    let args = Args::declare(&mut b);
    Strides::declare(&mut b);
    let of = Bias::declare(&mut b);
    bias::join::expand(b.scope(), of_parts.into(), dbias.into(), args, of);
    let choices = vec![
        ("kind", BiasSum::Join.code()),
        ("dtype", 0),
        ("width", 1),
        ("rows", 1),
        ("columns", bias::THREADS),
    ];
    b.finish(
        "attention_backward_bias_join".into(),
        choices,
        bias::THREADS,
    )
}

/// Of tensors of any dtypes.
pub fn any_kernels() -> Result<Vec<Kernel>, Error> {
    use Gradient::{Bias, Keys, Queries, Values};
    [Queries, Keys, Values, Bias]
        .map(any_kernel)
        .into_iter()
        .collect()
}

fn any_kernel(gradient: Gradient) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let f32_ = b.type_of::<f32>();
    let inputs = Inputs::declare(&mut b);
    let to = Elements::written(&mut b);
    let dbias = b.write("dbias", f32_);
    let statistics = b.read("statistics", f32_);
    let buffers = Buffers::declare(&mut b);
    let args = Args::declare(&mut b);
    let strides = Strides::declare(&mut b);
    let dtypes = Dtypes::declare(&mut b);
    let of = Bias::declare(&mut b);
    let statistics = statistics.into();
    match gradient {
        Gradient::Queries => any::queries::expand(
            b.scope(),
            inputs,
            to,
            statistics,
            buffers,
            args,
            strides,
            dtypes,
        ),
        Gradient::Bias => any::bias::expand(
            b.scope(),
            inputs,
            dbias.into(),
            statistics,
            buffers,
            args,
            strides,
            dtypes,
            of,
        ),
        _ => any::keys::expand(
            b.scope(),
            inputs,
            to,
            statistics,
            buffers,
            args,
            strides,
            dtypes,
            gradient == Gradient::Values,
        ),
    }
    let name = format!("attention_backward_any_{}", name_of(gradient));
    let choices = vec![("gradient", gradient.code()), ("rows", any::ROWS)];
    Ok(b.finish(name, choices, any::THREADS)?.for_blocks(1))
}
