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

mod rows;
mod rows_simt;
mod tiles;
mod tiles_simt;

use cubecl::prelude::*;

use crate::Error;
use crate::attention::arguments::scalars;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::swiglu::activate;
use tiles::{TILE, TILE_THREADS};
use tiles_simt::SIMT_THREADS;

scalars! { Args, ArgsExpand {
    /// Rows of x.
    rows: u32,
    in_features: u32,
    out_features: u32,
    /// A dtype of `emit::Dtype`, or 0 for none.
    bias_dtype: u32,
    /// Of `epilogue`.
    epilogue: u32,
    /// Between rows, in the units of the kernel's x and w; of out and residual in elements.
    x_stride: u64,
    w_stride: u64,
    out_stride: u64,
    residual_stride: u64,
} }

/// What becomes of a product and its bias.
mod epilogue {
    /// It is the output.
    pub const STORE: u32 = 0;
    /// The residual is added.
    pub const ADD: u32 = 1;
    /// It is multiplied by the activated gate, which is passed as the residual; plus the activation's number.
    pub const GATE: u32 = 2;
}

/// Bias, and residual or gate.
#[derive(CubeType)]
struct Addends<E: Float> {
    bias_f32: Array<f32>,
    bias_f16: Array<half::f16>,
    bias_bf16: Array<half::bf16>,
    residual: Array<E>,
}

impl<E: Float> Addends<E> {
    fn declare(b: &mut Builder) -> AddendsExpand<E> {
        let (f32_, f16_, bf16_) = (
            b.type_of::<f32>(),
            b.type_of::<half::f16>(),
            b.type_of::<half::bf16>(),
        );
        let ty = b.type_of::<E>();
        AddendsExpand {
            bias_f32: b.read("bias_f32", f32_).into(),
            bias_f16: b.read("bias_f16", f16_).into(),
            bias_bf16: b.read("bias_bf16", bf16_).into(),
            // The output may be the residual.
            residual: b.write("residual", ty).into(),
        }
    }
}

/// Adds what is to be added, and stores one element.
#[cube]
fn store<E: Float>(
    out: &mut Array<E>,
    addends: &Addends<E>,
    args: &Args,
    row: u32,
    column: u32,
    sum: f32,
) {
    let mut y = sum;
    if args.bias_dtype != 0u32 {
        let at = column as usize;
        if args.bias_dtype == 1u32 {
            y += addends.bias_f32[at];
        } else if args.bias_dtype == 2u32 {
            y += f32::cast_from(addends.bias_f16[at]);
        } else {
            y += f32::cast_from(addends.bias_bf16[at]);
        }
    }
    if args.epilogue != epilogue::STORE {
        let other = f32::cast_from(
            addends.residual
                [(u64::cast_from(row) * args.residual_stride + u64::cast_from(column)) as usize],
        );
        if args.epilogue == epilogue::ADD {
            y += other;
        } else if args.epilogue == epilogue::GATE {
            y *= activate(other, 0u32);
        } else if args.epilogue == comptime!(epilogue::GATE + 1) {
            y *= activate(other, 1u32);
        } else {
            y *= activate(other, 2u32);
        }
    }
    out[(u64::cast_from(row) * args.out_stride + u64::cast_from(column)) as usize] =
        E::cast_from(y);
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

/// Which kernel a name means, as the choice `kind`.
pub mod kind {
    pub const ROWS: u32 = 0;
    pub const ROWS_SIMT: u32 = 1;
    pub const TILES: u32 = 2;
    pub const TILES_SIMT: u32 = 3;
    pub const ROWS_DEEP: u32 = 4;
}

/// Every form.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    let choices = |kind, (dtype, weight), (rows, columns), width| {
        vec![
            ("kind", kind),
            ("dtype", dtype as u32),
            ("weight", weight as u32),
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
                choices(kind::ROWS, (dtype, dtype), tile, 8),
                shape.planes * 32,
                |b| with_vector!(dtype, E, _N => rows::expand::<E>(b, shape)),
            )?;
            kernels.push(kernel.for_blocks(shape.cubes));
        }
        kernels.push(declared(
            format!("linear_tiles_{name}"),
            choices(kind::TILES, (dtype, dtype), (TILE, TILE), 8),
            TILE_THREADS,
            |b| with_vector!(dtype, E, _N => tiles::expand::<E>(b)),
        )?);
    }
    for dtype in Dtype::ALL {
        for weight in Dtype::ALL {
            let dtypes = (dtype, weight);
            let name = format!("{}_{}", dtype.name(), weight.name());
            // f32 is what the tensor cores do not serve; other pairs of dtypes are rare.
            let (wide, deep): (&[_], &[_]) = match dtypes {
                (Dtype::F32, Dtype::F32) => (&rows_simt::WIDE, &rows_simt::DEEP),
                _ => (&[], &[]),
            };
            let wide = wide.iter().map(|shape| (*shape, kind::ROWS_SIMT, 4));
            let deep = deep.iter().map(|shape| (*shape, kind::ROWS_DEEP, 4));
            let any = [(rows_simt::ANY, kind::ROWS_SIMT, 1)];
            for (shape, kind, width) in wide.chain(deep).chain(any) {
                let tile = shape.tile();
                let form = if kind == kind::ROWS_DEEP {
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
                            4 => rows_simt::expand::<E, W, Const<4>>(b, shape),
                            _ => rows_simt::expand::<E, W, Const<1>>(b, shape),
                        }));
                    },
                )?;
                kernels.push(kernel.for_blocks(shape.cubes));
            }
            kernels.push(declared(
                format!("linear_tiles_simt_{name}"),
                choices(kind::TILES_SIMT, dtypes, (TILE, TILE), 1),
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
