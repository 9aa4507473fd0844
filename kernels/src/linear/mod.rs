//! `y = x Wᵀ + bias + residual`: rows of W against few or many rows of x.
//!
//! | kernel | what it is for |
//! |-|-|
//! | [`rows`] | 8, 16 or 32 rows of 16-bit x at a time on tensor cores, bound by reading W |
//! | [`rows_simt`] | the same for any dtypes; of long rows f32 has forms of its own |
//! | [`tiles`] | many rows of 16-bit x where there is no cuBLASLt |
//! | [`tiles_simt`] | everything else |
//!
//! Each can multiply by an activated gate instead of adding a residual, for gated feed-forward blocks.

pub mod backward;
mod rows;
mod rows_simt;
mod tiles;
mod tiles_simt;

use contract::Activation;
use contract::linear::{Epilogue, Kind, TILE};
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, scalars, with_vector};
use crate::swiglu::activate;
use tiles::TILE_THREADS;
use tiles_simt::SIMT_THREADS;

scalars! { Args, ArgsExpand {
    /// Rows of x.
    rows: u32,
    in_features: u32,
    out_features: u32,
    /// A `contract::Float`, or 0 for none.
    bias_dtype: u32,
    /// An [`Epilogue`], whose residual or gate is passed as the residual.
    epilogue: u32,
    /// 1: out and residual are `out_f32` and `residual_f32`, for x of less.
    wide: u32,
    /// 1: no kernel in flight writes W, which may be read before they have ended.
    constant: u32,
    /// Between rows, in the units of the kernel's x and w; of out and residual in elements.
    x_stride: u64,
    w_stride: u64,
    out_stride: u64,
    residual_stride: u64,
} }

/// Bias, residual or gate, and where results go.
#[derive(CubeType)]
struct Outside<E: Float> {
    bias_f32: Array<f32>,
    bias_f16: Array<half::f16>,
    bias_bf16: Array<half::bf16>,
    residual: Array<E>,
    residual_f32: Array<f32>,
    out: Array<E>,
    out_f32: Array<f32>,
}

impl<E: Float> Outside<E> {
    fn declare(b: &mut Builder) -> OutsideExpand<E> {
        let (f32_, f16_, bf16_) = (
            b.type_of::<f32>(),
            b.type_of::<half::f16>(),
            b.type_of::<half::bf16>(),
        );
        let ty = b.type_of::<E>();
        OutsideExpand {
            bias_f32: b.read("bias_f32", f32_).into(),
            bias_f16: b.read("bias_f16", f16_).into(),
            bias_bf16: b.read("bias_bf16", bf16_).into(),
            // The output may be the residual.
            residual: b.write("residual", ty).into(),
            residual_f32: b.write("residual_f32", f32_).into(),
            out: b.write("out", ty).into(),
            out_f32: b.write("out_f32", f32_).into(),
        }
    }
}

/// Adds what is to be added, and stores one element.
#[cube]
fn store<E: Float>(outside: &mut Outside<E>, args: &Args, row: u32, column: u32, sum: f32) {
    let mut y = sum;
    if args.bias_dtype != 0u32 {
        let at = column as usize;
        if args.bias_dtype == comptime!(Dtype::F32.code()) {
            y += outside.bias_f32[at];
        } else if args.bias_dtype == comptime!(Dtype::F16.code()) {
            y += f32::cast_from(outside.bias_f16[at]);
        } else {
            y += f32::cast_from(outside.bias_bf16[at]);
        }
    }
    if args.epilogue != comptime!(Epilogue::Store.code()) {
        let at = (u64::cast_from(row) * args.residual_stride + u64::cast_from(column)) as usize;
        let mut other = 0.0f32;
        if args.wide != 0u32 {
            other += outside.residual_f32[at];
        } else {
            other += f32::cast_from(outside.residual[at]);
        }
        if args.epilogue == comptime!(Epilogue::Add.code()) {
            y += other;
        } else if args.epilogue == comptime!(Epilogue::GateSilu.code()) {
            y *= activate(other, Activation::Silu);
        } else if args.epilogue == comptime!(Epilogue::GateGelu.code()) {
            y *= activate(other, Activation::Gelu);
        } else if args.epilogue == comptime!(Epilogue::GateGeluTanh.code()) {
            y *= activate(other, Activation::GeluTanh);
        } else {
            y *= activate(other, Activation::ReluSquared);
        }
    }
    let at = (u64::cast_from(row) * args.out_stride + u64::cast_from(column)) as usize;
    if args.wide != 0u32 {
        outside.out_f32[at] = y;
    } else {
        outside.out[at] = E::cast_from(y);
    }
}

fn declared(
    name: String,
    choices: Vec<(&'static str, u32)>,
    threads: u32,
    expand: impl FnOnce(&mut Builder),
) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    expand(&mut b);
    b.finish(name, choices, threads)
}

/// Every form.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    let choices = |kind: Kind, (dtype, weight): (Dtype, Dtype), (rows, columns), width| {
        vec![
            ("kind", kind.code()),
            ("dtype", dtype.code()),
            ("weight", weight.code()),
            ("rows", rows),
            ("columns", columns),
            ("width", width),
        ]
    };
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let name = dtype.name();
        for shape in rows::SHAPES {
            let tile = (shape.eights * 8, shape.sixteens * 16);
            let kernel = declared(
                format!("linear_rows_{name}_{}_{}", tile.0, shape.planes),
                choices(Kind::Rows, (dtype, dtype), tile, 8),
                shape.planes * 32,
                |b| with_vector!(dtype, E, _N => rows::expand::<E>(b, shape)),
            )?;
            kernels.push(kernel.for_blocks(shape.cubes));
        }
        kernels.push(declared(
            format!("linear_tiles_{name}"),
            choices(Kind::Tiles, (dtype, dtype), (TILE, TILE), 8),
            TILE_THREADS,
            |b| with_vector!(dtype, E, _N => tiles::expand::<E>(b)),
        )?);
    }
    for dtype in Dtype::ALL.iter().copied() {
        for weight in Dtype::ALL.iter().copied() {
            let dtypes = (dtype, weight);
            let name = format!("{}_{}", dtype.name(), weight.name());
            // f32 is what the tensor cores do not serve; other pairs of dtypes are rare.
            let (wide, deep, width): (&[_], &[_], _) = match dtypes {
                (Dtype::F32, Dtype::F32) => (&rows_simt::WIDE, &rows_simt::DEEP, 4),
                (Dtype::F32, _) => (&rows_simt::MIXED, &[], 8),
                _ => (&[], &[], 4),
            };
            let wide = wide
                .iter()
                .map(move |shape| (*shape, Kind::RowsSimt, width));
            let deep = deep.iter().map(|shape| (*shape, Kind::RowsDeep, 4));
            let any = [(rows_simt::ANY, Kind::RowsSimt, 1)];
            for (shape, kind, width) in wide.chain(deep).chain(any) {
                let tile = shape.tile();
                let form = if kind == Kind::RowsDeep {
                    "deep"
                } else {
                    "simt"
                };
                let kernel = declared(
                    format!("linear_rows_{form}_{name}_{}x{}_w{width}", tile.0, tile.1),
                    choices(kind, dtypes, tile, width),
                    shape.threads(),
                    |b| {
                        with_vector!(dtype, E, _N => with_vector!(weight, W, _M => match width {
                            8 => rows_simt::expand::<E, W, u32, Const<8>, Const<4>>(b, shape),
                            4 => rows_simt::expand::<E, W, W, Const<4>, Const<4>>(b, shape),
                            _ => rows_simt::expand::<E, W, W, Const<1>, Const<1>>(b, shape),
                        }));
                    },
                )?;
                kernels.push(kernel.for_blocks(shape.cubes));
            }
            kernels.push(declared(
                format!("linear_tiles_simt_{name}"),
                choices(Kind::TilesSimt, dtypes, (TILE, TILE), 1),
                SIMT_THREADS,
                |b| {
                    with_vector!(dtype, E, _N => with_vector!(weight, W, _M => {
                        tiles_simt::expand::<E, W>(b);
                    }));
                },
            )?);
        }
    }
    Ok(kernels)
}
