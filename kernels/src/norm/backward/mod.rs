//! The gradients of RMSNorm and LayerNorm, one pass over memory.
//!
//! A block takes every `groups`-th row and keeps its share of the parameters' gradients, which it
//! stores at the end; `column_sums` adds the shares. While a row is summed the next one is on its
//! way. `rows` has rows in registers, 16 bytes per access; `any` takes what is misaligned, of odd
//! length or longer, reads rows two or three times, and keeps its share in memory.

// CubeCL has no such method.
#![allow(clippy::manual_is_multiple_of)]
// A condition of compile time is none beside one of run time.
#![allow(clippy::collapsible_if)]

mod any;
mod rows;

use cubecl::prelude::*;

use super::share::{Words, block};
use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rows::{Sizes, Strides, sizes, strides};
use any::backward_any;
use rows::backward_rows;

/// Threads per row, and 16-byte vectors per thread. One vector leaves registers for the next row and
/// for the gradients' shares; where rows need two, there are none for the next row.
const SHAPES: [(u32, u32); 9] = [
    (8, 1),
    (16, 1),
    (32, 1),
    (64, 1),
    (128, 1),
    (256, 1),
    (512, 1),
    (1024, 1),
    (1024, 2),
];

/// Threads of the kernel that takes any row.
const ANY: u32 = 256;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Form {
    dtype: Dtype,
    centered: bool,
    /// Whether a residual's gradient is added.
    has_residual: bool,
    threads: u32,
    /// 0 for the kernel that takes anything.
    vectors: u32,
}

impl Form {
    /// Whether the next row is loaded while one is summed.
    fn reads_ahead(self) -> bool {
        self.vectors == 1
    }

    /// Whether a thread has registers for it: of 16 bits there are eight elements in a vector, and
    /// LayerNorm has two shares. What is left out is served by the kernel that takes any row.
    fn fits(self) -> bool {
        self.vectors < 2 || self.dtype == Dtype::F32 || !(self.centered || self.has_residual)
    }
}

/// What both kernels take besides pointers.
#[derive(CubeType, Clone, Copy)]
struct Args {
    rows: u32,
    /// Row length, in elements or vectors.
    length: u32,
    /// Blocks.
    groups: u32,
    /// Whether the gradients of gains and of biases are asked for.
    has_dweight: u32,
    has_dbias: u32,
    sizes: Sizes,
    x: Strides,
    dout: Strides,
    dresidual: Strides,
    dx: Strides,
    /// A `contract::Float`, or 0 for none.
    weight_dtype: u32,
    weight_offset: f32,
    epsilon: f32,
    /// 1 / elements of a row.
    inverse_length: f32,
}

/// What is known of a row once it has been summed.
#[derive(CubeType, Clone, Copy)]
struct Means {
    mean: f32,
    /// 1 / deviation.
    scale: f32,
    /// Of the gradient before the normalisation, and of its product with the normalised row.
    gradient: f32,
    product: f32,
}

/// `count` sums over the threads of a row, on each of them. Between two calls with one `half` of
/// `shared` all threads have to meet, as they do in a call with the other half.
#[cube]
fn row_sums(
    sums: &mut Array<f32>,
    shared: &mut SharedMemory<f32>,
    half: u32,
    #[comptime] threads: u32,
    #[comptime] count: u32,
) {
    #[unroll]
    for step in 0..comptime!(threads.min(32).ilog2()) {
        #[unroll]
        for c in 0..count {
            let mine = sums[c as usize];
            sums[c as usize] = mine + plane_shuffle_xor(mine, comptime!(1u32 << step));
        }
    }
    if threads > 32 {
        let warps = comptime!(threads / 32);
        let all = comptime!(block(threads) / 32);
        let warp = UNIT_POS_X / 32;
        let from = half * comptime!(all * count);
        if UNIT_POS_X % 32 == 0u32 {
            #[unroll]
            for c in 0..count {
                shared[(from + c * all + warp) as usize] = sums[c as usize];
            }
        }
        sync_cube();
        let first = UNIT_POS_X / threads * warps;
        #[unroll]
        for c in 0..count {
            let mut sum = shared[(from + c * all + first + UNIT_POS_X % warps) as usize];
            #[unroll]
            for step in 0..comptime!(warps.ilog2()) {
                sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
            }
            sums[c as usize] = sum;
        }
    }
}

/// Means of a row of which `sums` has the squares, the products and, if centered, the gradients.
#[cube]
fn means_of(sums: &Array<f32>, mean: f32, args: Args, #[comptime] centered: bool) -> Means {
    let variance = sums[0] * args.inverse_length;
    let scale = (variance + args.epsilon).inverse_sqrt();
    let mut gradient = 0.0f32;
    if centered {
        gradient = sums[2] * args.inverse_length;
    }
    Means {
        mean,
        scale,
        gradient,
        product: sums[1] * args.inverse_length * scale,
    }
}

fn args(b: &mut Builder) -> ArgsExpand {
    use ScalarType::{F32, U32};
    ArgsExpand {
        rows: b.scalar("rows", U32).into(),
        length: b.scalar("length", U32).into(),
        groups: b.scalar("groups", U32).into(),
        has_dweight: b.scalar("has_dweight", U32).into(),
        has_dbias: b.scalar("has_dbias", U32).into(),
        sizes: sizes(b),
        x: strides(b, ["x_0", "x_1", "x_2"]),
        dout: strides(b, ["dout_0", "dout_1", "dout_2"]),
        dresidual: strides(b, ["dresidual_0", "dresidual_1", "dresidual_2"]),
        dx: strides(b, ["dx_0", "dx_1", "dx_2"]),
        weight_dtype: b.scalar("weight_dtype", U32).into(),
        weight_offset: b.scalar("weight_offset", F32).into(),
        epsilon: b.scalar("epsilon", F32).into(),
        inverse_length: b.scalar("inverse_length", F32).into(),
    }
}

fn kernel(form: Form) -> Result<Kernel, Error> {
    let any = form.vectors == 0;
    let mut b = Builder::default();
    with_vector!(form.dtype, F, N => {
        let (of_x, of_dx, of_shares) = match any {
            true => (b.type_of::<F>(), b.type_of::<F>(), b.type_of::<f32>()),
            false => {
                let of_dx = b.type_of::<Vector<F, N>>();
                (b.type_of::<Words>(), of_dx, b.type_of::<Vector<f32, N>>())
            }
        };
        let halves = b.type_of::<u16>();
        let x = b.read("x", of_x);
        // May be overwritten in place, hence not `read`.
        let dout = b.write("dout", of_x);
        let dresidual = b.read("dresidual", of_x);
        let weight = b.read("weight", halves);
        let dx = b.write("dx", of_dx);
        let dweights = b.write("dweights", of_shares);
        let dbiases = b.write("dbiases", of_shares);
        let args = args(&mut b);
        if any {
            backward_any::expand::<F>(
                b.scope(), x.into(), dout.into(), dresidual.into(), weight.into(), dx.into(),
                dweights.into(), dbiases.into(), args, form,
            );
        } else {
            backward_rows::expand::<F, N>(
                b.scope(), x.into(), dout.into(), dresidual.into(), weight.into(), dx.into(),
                dweights.into(), dbiases.into(), args, form,
            );
        }
    });
    let name = format!(
        "{}_backward_{}{}_{}x{}",
        if form.centered {
            "layer_norm"
        } else {
            "rms_norm"
        },
        form.dtype.name(),
        if form.has_residual { "_residual" } else { "" },
        form.threads,
        if any {
            "any".into()
        } else {
            form.vectors.to_string()
        },
    );
    let choices = vec![
        ("centered", u32::from(form.centered)),
        ("dtype", form.dtype.code()),
        ("residual", u32::from(form.has_residual)),
        ("threads", form.threads),
        ("vectors", form.vectors),
    ];
    b.finish(name, choices, block(form.threads))
}

/// Every form: RMSNorm and LayerNorm, with a residual's gradient and without; by dtype and shape.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for centered in [false, true] {
            for has_residual in [false, true] {
                for (threads, vectors) in SHAPES.into_iter().chain([(ANY, 0)]) {
                    let form = Form {
                        dtype,
                        centered,
                        has_residual,
                        threads,
                        vectors,
                    };
                    if form.fits() {
                        kernels.push(kernel(form)?);
                    }
                }
            }
        }
    }
    Ok(kernels)
}
