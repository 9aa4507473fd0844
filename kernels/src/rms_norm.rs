//! RMSNorm, one pass over memory: a row stays in the registers of the threads that share it.
//!
//! Two kernels. `rows` moves 16 bytes per access: a row of up to `threads * vectors` vectors belongs to `threads` threads, each with
//! `vectors` loads in flight. `any` takes what is misaligned, of odd length, longer, or has gains of a third dtype; it reads rows
//! element by element, twice.

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rows::{self, Sizes, Strides, row_index, row_start};

/// Threads per row and 16-byte vectors per thread. Short rows share a warp; the longest fill a block at 64 registers a thread.
const SHAPES: [(u32, u32); 10] = [
    (8, 1),
    (16, 1),
    (32, 1),
    (32, 2),
    (32, 4),
    (64, 4),
    (128, 4),
    (256, 4),
    (512, 4),
    (1024, 4),
];

/// Threads of a block whose rows need fewer.
const MIN_BLOCK: u32 = 128;

/// Where a row of each tensor begins.
#[derive(CubeType, Clone, Copy)]
struct RowOffsets {
    x: usize,
    residual: usize,
    out: usize,
    residual_out: usize,
}

/// What both kernels take besides pointers.
#[derive(CubeType, Clone, Copy)]
struct Shape {
    rows: u32,
    /// Row length, in elements or vectors.
    length: u32,
    sizes: Sizes,
    x: Strides,
    residual: Strides,
    out: Strides,
    residual_out: Strides,
}

#[cube]
fn row_offsets(row: u32, s: Shape, #[comptime] has_residual: bool) -> RowOffsets {
    let index = row_index(row, s.sizes);
    let x = row_start(index, s.x);
    let out = row_start(index, s.out);
    let mut residual = 0usize;
    let mut residual_out = 0usize;
    if has_residual {
        residual = row_start(index, s.residual);
        residual_out = row_start(index, s.residual_out);
    }
    RowOffsets {
        x,
        residual,
        out,
        residual_out,
    }
}

/// The sum over the `threads` threads of a row, on each of them; the same on all.
#[cube]
fn row_sum(value: f32, #[comptime] threads: u32) -> f32 {
    let mut sum = value;
    #[unroll]
    for step in 0..comptime!(threads.min(32).ilog2()) {
        sum += plane_shuffle_xor(sum, 1u32 << step);
    }
    if threads > 32 {
        let warps = comptime!(threads / 32);
        let block_warps = comptime!(warps.max(MIN_BLOCK / 32));
        let mut partial = SharedMemory::<f32>::new(comptime!(block_warps as usize));
        if UNIT_POS_PLANE == 0 {
            partial[(UNIT_POS_X / 32) as usize] = sum;
        }
        sync_cube();
        // A block may have several rows, each with its own warps.
        let first = UNIT_POS_X / threads * warps;
        sum = 0.0f32;
        #[unroll]
        for warp in 0..warps {
            sum += partial[(first + warp) as usize];
        }
    }
    sum
}

/// `weight_kind`: 0 no gains, 1 gains like `x`, 2 f32 gains.
#[cube]
fn rms_norm_rows<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    residual: &Array<Vector<F, N>>,
    weight: &Array<Vector<F, N>>,
    weight_f32: &Array<Vector<f32, Const<4>>>,
    out: &mut Array<Vector<F, N>>,
    residual_out: &mut Array<Vector<F, N>>,
    shape: Shape,
    weight_kind: u32,
    weight_offset: f32,
    epsilon: f32,
    #[comptime] has_residual: bool,
    #[comptime] threads: u32,
    #[comptime] vectors: u32,
) {
    let width = N::value();
    let rows_per_block = comptime!(if threads < MIN_BLOCK {
        MIN_BLOCK / threads
    } else {
        1
    });
    let row = CUBE_POS_X * rows_per_block + UNIT_POS_X / threads;
    let lane = UNIT_POS_X % threads;
    // A row past the last one has no elements: its threads take part in the shuffles and touch no memory.
    let mut length = shape.length;
    if row >= shape.rows {
        length = 0u32;
    }
    let at = row_offsets(row, shape, has_residual);

    let mut sums = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for k in 0..vectors {
        let i = lane + k * threads;
        let mut v = Vector::<F, N>::zeroed();
        if i < length {
            v = x[at.x + i as usize];
        }
        let mut sum = Vector::<f32, N>::cast_from(v);
        if has_residual {
            let mut v = Vector::<F, N>::zeroed();
            if i < length {
                v = residual[at.residual + i as usize];
            }
            sum += Vector::cast_from(v);
        }
        sums.push(sum);
    }
    // After all loads, so that they are in flight together.
    if has_residual {
        #[unroll]
        for k in 0..vectors {
            let i = lane + k * threads;
            if i < length {
                residual_out[at.residual_out + i as usize] =
                    Vector::cast_from(*sums.index(k as usize));
            }
        }
    }

    let mut squares = Vector::<f32, N>::zeroed();
    #[unroll]
    for k in 0..vectors {
        let v = *sums.index(k as usize);
        squares += v * v;
    }
    let mut sum = 0.0f32;
    #[unroll]
    for j in 0..width {
        sum += squares[j];
    }
    let sum = row_sum(sum, threads);
    let scale = (sum / f32::cast_from(shape.length * width as u32) + epsilon).inverse_sqrt();

    #[unroll]
    for k in 0..vectors {
        let i = lane + k * threads;
        if i < length {
            let mut gains = Vector::<f32, N>::new(1.0f32);
            if weight_kind == 1 {
                gains =
                    Vector::<f32, N>::cast_from(weight[i as usize]) + Vector::new(weight_offset);
            }
            if weight_kind == 2 {
                #[unroll]
                for part in 0..comptime!(width / 4) {
                    let g = weight_f32[i as usize * comptime!(width / 4) + part];
                    #[unroll]
                    for j in 0..4usize {
                        gains[comptime!(part * 4 + j)] = g[j] + weight_offset;
                    }
                }
            }
            let v = *sums.index(k as usize) * (gains * Vector::new(scale));
            out[at.out + i as usize] = Vector::cast_from(v);
        }
    }
}

/// `weight_kind`: 0 no gains, otherwise gains of type `W`.
#[cube]
fn rms_norm_any<F: Float, W: Float>(
    x: &Array<F>,
    residual: &Array<F>,
    weight: &Array<W>,
    out: &mut Array<F>,
    residual_out: &mut Array<F>,
    shape: Shape,
    weight_kind: u32,
    weight_offset: f32,
    epsilon: f32,
    #[comptime] has_residual: bool,
    #[comptime] threads: u32,
) {
    let rows_per_block = comptime!(if threads < MIN_BLOCK {
        MIN_BLOCK / threads
    } else {
        1
    });
    let row = CUBE_POS_X * rows_per_block + UNIT_POS_X / threads;
    let mut length = shape.length;
    if row >= shape.rows {
        length = 0u32;
    }
    let at = row_offsets(row, shape, has_residual);
    let mut sum = 0.0f32;
    let mut i = UNIT_POS_X % threads;
    while i < length {
        let mut v = f32::cast_from(x[at.x + i as usize]);
        if has_residual {
            v += f32::cast_from(residual[at.residual + i as usize]);
        }
        sum += v * v;
        i += threads;
    }
    let sum = row_sum(sum, threads);
    let scale = (sum / f32::cast_from(shape.length) + epsilon).inverse_sqrt();
    // Each thread overwrites only elements that it alone reads, so the tensors may be the same.
    let mut i = UNIT_POS_X % threads;
    while i < length {
        let mut v = f32::cast_from(x[at.x + i as usize]);
        if has_residual {
            v += f32::cast_from(residual[at.residual + i as usize]);
            residual_out[at.residual_out + i as usize] = F::cast_from(v);
        }
        let mut gain = 1.0f32;
        if weight_kind != 0 {
            gain = f32::cast_from(weight[i as usize]) + weight_offset;
        }
        out[at.out + i as usize] = F::cast_from(v * (gain * scale));
        i += threads;
    }
}

/// The scalars of both kernels, in one order.
struct Scalars {
    shape: ShapeExpand,
    weight_kind: NativeExpand<u32>,
    weight_offset: NativeExpand<f32>,
    epsilon: NativeExpand<f32>,
}

fn scalars(b: &mut Builder) -> Scalars {
    use ScalarType::{F32, U32};
    Scalars {
        shape: ShapeExpand {
            rows: b.scalar("rows", U32).into(),
            length: b.scalar("length", U32).into(),
            sizes: rows::sizes(b),
            x: rows::strides(b, ["x_0", "x_1", "x_2"]),
            residual: rows::strides(b, ["residual_0", "residual_1", "residual_2"]),
            out: rows::strides(b, ["out_0", "out_1", "out_2"]),
            residual_out: rows::strides(b, ["residual_out_0", "residual_out_1", "residual_out_2"]),
        },
        weight_kind: b.scalar("weight_kind", U32).into(),
        weight_offset: b.scalar("weight_offset", F32).into(),
        epsilon: b.scalar("epsilon", F32).into(),
    }
}

fn in_vectors(
    dtype: Dtype,
    has_residual: bool,
    (threads, vectors): (u32, u32),
) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, N => {
        let ty = b.type_of::<Vector<F, N>>();
        let ty_f32 = b.type_of::<Vector<f32, Const<4>>>();
        // x and residual may be overwritten in place, hence not `read`.
        let x = b.write("x", ty);
        let residual = b.write("residual", ty);
        let weight = b.read("weight", ty);
        let weight_f32 = b.read("weight_f32", ty_f32);
        let out = b.write("out", ty);
        let residual_out = b.write("residual_out", ty);
        let s = scalars(&mut b);
        rms_norm_rows::expand::<F, N>(
            b.scope(),
            x.into(),
            residual.into(),
            weight.into(),
            weight_f32.into(),
            out.into(),
            residual_out.into(),
            s.shape,
            s.weight_kind,
            s.weight_offset,
            s.epsilon,
            has_residual,
            threads,
            vectors,
        );
    });
    let name = format!(
        "rms_norm_{}{}_{threads}x{vectors}",
        dtype.name(),
        if has_residual { "_residual" } else { "" }
    );
    let choices = vec![
        ("dtype", dtype as u32),
        ("residual", u32::from(has_residual)),
        ("threads", threads),
        ("vectors", vectors),
    ];
    b.finish(name, choices, threads.max(MIN_BLOCK))
}

fn any(dtype: Dtype, weight: Dtype, has_residual: bool, threads: u32) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, _N => with_vector!(weight, W, _M => {
        let ty = b.type_of::<F>();
        let ty_w = b.type_of::<W>();
        let ty_f32 = b.type_of::<f32>();
        let x = b.write("x", ty);
        let residual = b.write("residual", ty);
        let weight = b.read("weight", ty_w);
        // Unused: every kernel of the operation takes the same arguments.
        let _ = b.read("weight_f32", ty_f32);
        let out = b.write("out", ty);
        let residual_out = b.write("residual_out", ty);
        let s = scalars(&mut b);
        rms_norm_any::expand::<F, W>(
            b.scope(),
            x.into(),
            residual.into(),
            weight.into(),
            out.into(),
            residual_out.into(),
            s.shape,
            s.weight_kind,
            s.weight_offset,
            s.epsilon,
            has_residual,
            threads,
        );
    }));
    let name = format!(
        "rms_norm_any_{}_{}{}_{threads}",
        dtype.name(),
        weight.name(),
        if has_residual { "_residual" } else { "" }
    );
    let choices = vec![
        ("dtype", dtype as u32),
        ("weight", weight as u32),
        ("residual", u32::from(has_residual)),
        ("threads", threads),
        ("vectors", 0),
    ];
    b.finish(name, choices, threads.max(MIN_BLOCK))
}

/// Every form: dtype by residual by shape, and the general one by the dtype of gains as well.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL {
        for has_residual in [false, true] {
            for shape in SHAPES {
                kernels.push(in_vectors(dtype, has_residual, shape)?);
            }
            for weight in Dtype::ALL {
                for threads in [32, 256] {
                    kernels.push(any(dtype, weight, has_residual, threads)?);
                }
            }
        }
    }
    Ok(kernels)
}
