//! RMSNorm, one pass over memory: a row stays in the registers of the threads that share it.
//!
//! Two kernels. `rows` moves 16 bytes per access: a row of up to `threads * vectors` vectors belongs to `threads` threads, each with
//! `vectors` loads in flight. `any` takes what is misaligned, of odd length, longer, or has gains of a third dtype; it reads rows
//! element by element, twice.
//!
//! `rows` sums in one order whatever the threads: the elements of a vector, 32 vectors by halves, then the sums of these. So a row has
//! the same bits alone as among many, although few rows get more threads.

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rows::{self, Sizes, Strides, row_index, row_start};

/// Threads per row, and 16-byte vectors per thread. Rows of a warp or less share a block; of two shapes for rows of one length, that of
/// more threads is for few rows, which wait for nothing but memory, and the other for many, which fill it.
const SHAPES: [(u32, u32); 15] = [
    (8, 1),
    (16, 1),
    (32, 1),
    (32, 2),
    (128, 1),
    (32, 4),
    (256, 1),
    (64, 4),
    (512, 1),
    (128, 4),
    (512, 2),
    (256, 4),
    (1024, 2),
    (512, 4),
    (1024, 4),
];

/// Threads of a block whose rows need fewer.
const MIN_BLOCK: u32 = 128;

/// Threads of a block whose rows need so many.
const fn block(threads: u32) -> u32 {
    if threads < MIN_BLOCK {
        MIN_BLOCK
    } else {
        threads
    }
}

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

/// The sum over the `threads` threads of a row, on each of them; the same on all. `sums` has a value per vector of the thread.
#[cube]
fn row_sum(sums: &mut Array<f32>, #[comptime] threads: u32, #[comptime] vectors: u32) -> f32 {
    let lanes = comptime!(threads.min(32));
    let lane = UNIT_POS_X % lanes;
    // Of several values, each lane passes on the half that it does not keep: with bit 0 of its number set it keeps the odd ones, and so on.
    let halvings = comptime!(vectors.ilog2());
    #[unroll]
    for step in 0..comptime!(lanes.ilog2()) {
        let left = comptime!(if step < halvings {
            vectors >> (step + 1)
        } else {
            0
        });
        if left > 0 {
            let keeps_odd = (lane >> step) & 1u32 == 1u32;
            #[unroll]
            for k in 0..left {
                let even = sums[comptime!(2 * k as usize)];
                let odd = sums[comptime!(2 * k as usize + 1)];
                let mut kept = even;
                let mut passed = odd;
                if keeps_odd {
                    kept = odd;
                    passed = even;
                }
                sums[k as usize] = kept + plane_shuffle_xor(passed, comptime!(1u32 << step));
            }
        } else {
            let mine = sums[0];
            sums[0] = mine + plane_shuffle_xor(mine, comptime!(1u32 << step));
        }
    }
    if threads <= 32 && vectors == 1 {
        sums[0]
    } else {
        // A part is what 32 lanes have in one vector each: lane k of a warp has the k-th of the warp's.
        let warps = comptime!(threads.div_ceil(32));
        let parts = comptime!(warps * vectors);
        let rows = comptime!(block(threads) / threads);
        let mut partial = SharedMemory::<f32>::new(comptime!((rows * parts) as usize));
        let row = UNIT_POS_X / threads;
        let warp = UNIT_POS_X % threads / 32;
        if lane < vectors {
            partial[(row * parts + lane * warps + warp) as usize] = sums[0];
        }
        sync_cube();
        // Four sums at a time, which do not wait for each other.
        let chains = comptime!(parts.min(4));
        let mut totals = Array::<f32>::new(chains as usize);
        #[unroll]
        for part in 0..parts {
            let value = partial[(row * parts + part) as usize];
            if part < chains {
                totals[part as usize] = value;
            } else {
                totals[comptime!((part % chains) as usize)] += value;
            }
        }
        let mut sum = totals[0];
        #[unroll]
        for chain in 1..chains {
            sum += totals[chain as usize];
        }
        sum
    }
}

/// 16 bytes of a row.
type Words = Vector<u32, Const<4>>;

/// Their elements. What is loaded ahead stays words until then: elements of 16 bits would take a register each.
#[cube]
fn unpack<F: Float, N: Size>(words: Words) -> Vector<f32, N> {
    Vector::cast_from(Vector::<F, N>::reinterpret(words))
}

/// The first words of a vector's gains. `kind`: 0 none, 1 like `x`, 2 f32, which fill as many vectors as `parts`.
#[cube]
fn load_gains(weight: &Array<Words>, kind: u32, i: u32, #[comptime] parts: u32) -> Words {
    let mut at = i;
    if kind == 2 {
        at = i * parts;
    }
    weight[at as usize]
}

/// The gains of vector `i`, whose first words were loaded.
#[cube]
fn gains<F: Float, N: Size>(
    first: Words,
    weight: &Array<Words>,
    kind: u32,
    offset: f32,
    i: u32,
) -> Vector<f32, N> {
    let parts = comptime!(N::value() / 4);
    let mut gains = Vector::<f32, N>::new(1.0f32);
    if kind == 1 {
        gains = unpack::<F, N>(first) + Vector::new(offset);
    }
    if kind == 2 {
        #[unroll]
        for part in 0..parts {
            let words = if part == 0 {
                first
            } else {
                weight[i as usize * parts + part]
            };
            let g = Vector::<f32, Const<4>>::reinterpret(words);
            #[unroll]
            for j in 0..4usize {
                gains[comptime!(part * 4 + j)] = g[j] + offset;
            }
        }
    }
    gains
}

/// `weight_kind`: 0 no gains (then `weight` is any memory of a row's size), 1 gains like `x`, 2 f32 gains.
///
/// Grid: rows, in groups of as many as a block has threads for.
#[cube]
fn rms_norm_rows<F: Float, N: Size>(
    x: &Array<Words>,
    residual: &Array<Words>,
    weight: &Array<Words>,
    out: &mut Array<Vector<F, N>>,
    residual_out: &mut Array<Vector<F, N>>,
    shape: Shape,
    weight_kind: u32,
    weight_offset: f32,
    epsilon: f32,
    inverse_length: f32,
    #[comptime] has_residual: bool,
    #[comptime] threads: u32,
    #[comptime] vectors: u32,
) {
    let count = vectors as usize;
    let parts = comptime!(N::value() as u32 / 4);
    let lane = UNIT_POS_X % threads;
    let mut row = CUBE_POS_X;
    let mut length = shape.length;
    if comptime!(threads < MIN_BLOCK) {
        row = CUBE_POS_X * comptime!(MIN_BLOCK / threads) + UNIT_POS_X / threads;
        // A row past the last one reads that, and stores nothing.
        if row >= shape.rows {
            row = shape.rows - 1;
            length = 0u32;
        }
    }
    let index = row_index(row, shape.sizes);

    // Everything is on its way before anything is waited for. Past a row's end its last vector is read again.
    let mut xs = Sequence::<Words>::new();
    let mut residuals = Sequence::<Words>::new();
    let mut weights = Sequence::<Words>::new();
    let from = row_start(index, shape.x);
    #[unroll]
    for k in 0..vectors {
        let i = min(lane + k * threads, shape.length - 1u32);
        xs.push(x[from + i as usize]);
    }
    if has_residual {
        let from = row_start(index, shape.residual);
        #[unroll]
        for k in 0..vectors {
            let i = min(lane + k * threads, shape.length - 1u32);
            residuals.push(residual[from + i as usize]);
        }
    }
    // Of many vectors the gains come later: registers for them would be missing for rows at a time.
    let early = comptime!(vectors <= 2);
    if early {
        #[unroll]
        for k in 0..vectors {
            let i = min(lane + k * threads, shape.length - 1u32);
            weights.push(load_gains(weight, weight_kind, i, parts));
        }
    }

    let mut values = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for k in 0..count {
        let mut value = unpack::<F, N>(*xs.index(k));
        if has_residual {
            value += unpack::<F, N>(*residuals.index(k));
        }
        values.push(value);
    }
    if has_residual {
        let to = row_start(index, shape.residual_out) + lane as usize;
        #[unroll]
        for k in 0..vectors {
            if lane + k * threads < length {
                residual_out[to + comptime!((k * threads) as usize)] =
                    Vector::cast_from(*values.index(k as usize));
            }
        }
    }
    let mut sums = Array::<f32>::new(count);
    #[unroll]
    for k in 0..vectors {
        let v = *values.index(k as usize);
        let mut sum = v[0] * v[0];
        #[unroll]
        for j in 1..N::value() {
            sum = fma(v[j], v[j], sum);
        }
        if lane + k * threads >= shape.length {
            sum = 0.0f32;
        }
        sums[k as usize] = sum;
    }
    let sum = row_sum(&mut sums, threads, vectors);
    let scale = (sum * inverse_length + epsilon).inverse_sqrt();
    let to = row_start(index, shape.out) + lane as usize;
    #[unroll]
    for k in 0..vectors {
        let i = lane + k * threads;
        if i < length {
            let first = if early {
                *weights.index(k as usize)
            } else {
                load_gains(weight, weight_kind, i, parts)
            };
            let gains = gains::<F, N>(first, weight, weight_kind, weight_offset, i);
            let v = *values.index(k as usize) * (gains * Vector::new(scale));
            out[to + comptime!((k * threads) as usize)] = Vector::cast_from(v);
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
    inverse_length: f32,
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
    let mut sums = Array::<f32>::new(1usize);
    sums[0] = sum;
    let sum = row_sum(&mut sums, threads, 1u32);
    let scale = (sum * inverse_length + epsilon).inverse_sqrt();
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
    inverse_length: NativeExpand<f32>,
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
        inverse_length: b.scalar("inverse_length", F32).into(),
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
        let words = b.type_of::<Words>();
        // x and residual may be overwritten in place, hence not `read`.
        let x = b.write("x", words);
        let residual = b.write("residual", words);
        let weight = b.read("weight", words);
        let out = b.write("out", ty);
        let residual_out = b.write("residual_out", ty);
        let s = scalars(&mut b);
        rms_norm_rows::expand::<F, N>(
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
            s.inverse_length,
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
        // Gains are like x or f32, and known at run time.
        ("weight", 0),
        ("residual", u32::from(has_residual)),
        ("threads", threads),
        ("vectors", vectors),
    ];
    let kernel = b.finish(name, choices, block(threads))?;
    Ok(match (threads < MIN_BLOCK, vectors) {
        // 64 registers for each thread.
        (true, 4) => kernel.for_blocks(1024 / block(threads)),
        _ => kernel,
    })
}

fn any(dtype: Dtype, weight: Dtype, has_residual: bool, threads: u32) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, _N => with_vector!(weight, W, _M => {
        let ty = b.type_of::<F>();
        let ty_w = b.type_of::<W>();
        let x = b.write("x", ty);
        let residual = b.write("residual", ty);
        let weight = b.read("weight", ty_w);
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
            s.inverse_length,
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
    b.finish(name, choices, block(threads))
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
