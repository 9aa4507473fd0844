//! An optimizer's step: parameters of any number, wherever they are, in three launches.
//!
//! What belongs to a parameter is found through a table on the device. Its addresses are not those
//! of arguments, so arrays of [`Memory`] begin at address zero, and an index is an address divided
//! by the size of an element.
//!
//! | kernel | what it is for |
//! |-|-|
//! | [`norm`] | the sum of squares of each chunk of the gradients |
//! | [`decide`](decide::decide) | norm, clipping, loss scale, number of the step: one block |
//! | [`sum`](decide::sum) | what a rank tells the others of its chunks: one block |
//! | [`agree`](decide::agree) | what [`decide`] does, from what all ranks have told: one block |
//! | [`update`](update::update) | weights and moments |
//! | [`scale`] | gradients multiplied by a factor |

mod decide;
mod memory;
mod rounding;
mod update;

use contract::optimizer::{CHUNK, ENTRY, Kind, shift};
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Kernel, scalars};
use crate::math::nan;
use memory::{F32, FOUR, Memory, load, load_one_by_one, store, store_one_by_one, widened};

/// Threads of a block.
const THREADS: u32 = 256;
/// Vectors that a thread loads before it looks at them: of gradients that are only read, and of
/// those that are written.
const DEEP: u32 = 8;
const UNROLL: u32 = 4;

/// Bits of infinity.
const INFINITY: u32 = 0x7f80_0000;

scalars! { Args, ArgsExpand {
    /// Of the table.
    num_tensors: u32,
    num_chunks: u32,
    /// 0 for any.
    max_norm: f32,
    /// Whether the loss scale changes.
    dynamic: u32,
    growth: f32,
    backoff: f32,
    interval: u32,
    hysteresis: u32,
    beta1: f32,
    beta2: f32,
    /// `1 - beta1`.
    new1: f32,
    new2: f32,
    epsilon: f32,
    momentum: f32,
    nesterov: u32,
    decoupled: u32,
    zero_gradients: u32,
    /// Of gradients.
    factor: f32,
    /// Of stochastic rounding.
    seed_low: u32,
    seed_high: u32,
} }

/// The words of the control block, by their types.
#[derive(CubeType)]
pub struct Control {
    /// Scale, coefficient, norm; 6 and 7 are the corrections of bias.
    f32s: Array<f32>,
    /// 3 is whether a gradient was not finite; tracker, hysteresis.
    u32s: Array<u32>,
    /// 4 is the step; skipped.
    u64s: Array<u64>,
    /// 6 and 7 are the powers of the betas.
    f64s: Array<f64>,
}

/// The part of a parameter that a block has.
#[derive(CubeType, Clone, Copy)]
pub struct Chunk {
    /// The first word of the parameter's entry.
    entry: usize,
    traits: u32,
    /// Elements of the parameter before it.
    start: u64,
    /// Elements.
    length: u32,
    /// Of its vectors of four elements those that are accessed as such. The others, which are a
    /// last one that is cut or all of them, are accessed by element.
    whole: u32,
}

/// Finds a block's chunk: that of the last parameter that begins at it or before. All that follows
/// from it is the same in all threads, as the compiler knows, which keeps it in few registers.
#[cube]
fn find(entries: &Array<u64>, num_tensors: u32) -> Chunk {
    let mut low = 0u32;
    let mut high = num_tensors;
    while high - low > 1u32 {
        let middle = low + (high - low) / 2u32;
        let first = u32::cast_from(entries[(middle * ENTRY + 7u32) as usize]);
        if first <= CUBE_POS_X {
            low = middle;
        } else {
            high = middle;
        }
    }
    chunk_of(entries, low)
}

/// The same for short blocks that have registers: lanes look at 32 parameters at a time, for each
/// look waits for memory.
#[cube]
fn find_by_lanes(entries: &Array<u64>, num_tensors: u32) -> Chunk {
    let lane = UNIT_POS_X % 32;
    let mut low = 0u32;
    let mut count = num_tensors;
    while count > 1u32 {
        let stride = (count + 31u32) >> 5u32;
        let candidate = low + min(lane * stride, count - 1u32);
        let first = u32::cast_from(entries[(candidate * ENTRY + 7u32) as usize]);
        let mut mine = low;
        if first <= CUBE_POS_X {
            mine = candidate;
        }
        let found = plane_max(mine);
        count = min(stride, low + count - found);
        low = found;
    }
    chunk_of(entries, low)
}

/// A block's chunk, which is the parameter's of this number.
#[cube]
fn chunk_of(entries: &Array<u64>, parameter: u32) -> Chunk {
    let entry = (parameter * ENTRY) as usize;
    let last = entries[entry + 7];
    let traits = u32::cast_from(last >> 32u64);
    let before = CUBE_POS_X - u32::cast_from(last & 0xffff_ffffu64);
    let start = u64::cast_from(before) * u64::cast_from(CHUNK);
    let length = u32::cast_from(min(entries[entry + 5] - start, u64::cast_from(CHUNK)));
    let mut whole = 0u32;
    if (traits >> shift::VECTORS) & 1u32 == 1u32 {
        whole = length / FOUR;
    }
    Chunk {
        entry,
        traits,
        start,
        length,
        whole,
    }
}

/// Codes of dtypes in a parameter's traits.
#[cube]
fn gradient_dtype(chunk: Chunk) -> u32 {
    (chunk.traits >> shift::GRADIENT) & 15u32
}

#[cube]
fn elements_of(chunk: Chunk, vector: u32) -> u32 {
    min(chunk.length - vector * FOUR, FOUR)
}

/// Sums, and whether something was not finite.
#[derive(CubeType, Clone, Copy)]
struct Squares {
    sum: f32,
    found: u32,
}

#[cube]
fn squares(x: Vector<f32, Const<4>>, inverse: f32, before: Squares) -> Squares {
    let mut sum = before.sum;
    let mut found = before.found;
    #[unroll]
    for j in 0..4usize {
        let y = x[j] * inverse;
        sum = fma(y, y, sum);
        if u32::reinterpret(y) & INFINITY == INFINITY {
            found = 1u32;
        }
    }
    Squares { sum, found }
}

/// Of the vectors that are accessed as such.
#[cube]
fn squares_of_whole(
    memory: &Memory,
    gradient: u64,
    chunk: Chunk,
    inverse: f32,
    #[comptime] wide: bool,
) -> Squares {
    let dtype = gradient_dtype(chunk);
    let mut sum = 0.0f32;
    let mut found = 0u32;
    let mut i = UNIT_POS_X;
    while i < chunk.whole {
        let mut loaded = Sequence::<Vector<f32, Const<4>>>::new();
        #[unroll]
        for k in 0..DEEP {
            // Past the end the last one is read again.
            let at = min(i + k * THREADS, chunk.whole - 1u32);
            loaded.push(load(memory, gradient, chunk.start, at, wide));
        }
        #[unroll]
        for k in 0..DEEP {
            if i + k * THREADS < chunk.whole {
                let x = widened(*loaded.index(k as usize), dtype, wide);
                let after = squares(x, inverse, Squares { sum, found });
                sum = after.sum;
                found = after.found;
            }
        }
        i += comptime!(THREADS * DEEP);
    }
    Squares { sum, found }
}

/// Sums the squares of a chunk of the gradients, each multiplied by the inverse of the loss scale.
/// Grid: chunks.
#[cube]
fn norm(
    memory: &Memory,
    entries: &Array<u64>,
    control: &Control,
    partials: &mut Array<f32>,
    args: &Args,
) {
    let chunk = find_by_lanes(entries, args.num_tensors);
    let gradient = entries[chunk.entry + 1];
    let dtype = gradient_dtype(chunk);
    let inverse = 1.0f32 / control.f32s[0];
    let mut sum = 0.0f32;
    let mut found = 0u32;
    if dtype == F32 {
        let whole = squares_of_whole(memory, gradient, chunk, inverse, true);
        sum += whole.sum;
        found |= whole.found;
    } else {
        let whole = squares_of_whole(memory, gradient, chunk, inverse, false);
        sum += whole.sum;
        found |= whole.found;
    }
    let mut i = chunk.whole + UNIT_POS_X;
    while i * FOUR < chunk.length {
        let count = elements_of(chunk, i);
        let x = load_one_by_one(memory, gradient, dtype, chunk.start, i, count);
        let after = squares(x, inverse, Squares { sum, found });
        sum = after.sum;
        found = after.found;
        i += THREADS;
    }
    let mut sums = SharedMemory::<f64>::new(comptime!(THREADS as usize));
    let mut finds = SharedMemory::<u32>::new(comptime!(THREADS as usize));
    sums[UNIT_POS_X as usize] = f64::cast_from(sum);
    finds[UNIT_POS_X as usize] = found;
    sync_cube();
    #[unroll]
    for step in 0..8u32 {
        let half = comptime!((THREADS / 2) >> step);
        if UNIT_POS_X < half {
            let other = (UNIT_POS_X + half) as usize;
            sums[UNIT_POS_X as usize] = sums[UNIT_POS_X as usize] + sums[other];
            finds[UNIT_POS_X as usize] = finds[UNIT_POS_X as usize] | finds[other];
        }
        sync_cube();
    }
    if UNIT_POS_X == 0u32 {
        let mut sum = f32::cast_from(sums[0]);
        if finds[0] != 0u32 {
            sum = nan();
        }
        partials[CUBE_POS_X as usize] = sum;
    }
}

/// The vectors that are accessed as such.
#[cube]
fn scale_whole(
    memory: &mut Memory,
    gradient: u64,
    chunk: Chunk,
    factor: f32,
    #[comptime] wide: bool,
) {
    let dtype = gradient_dtype(chunk);
    let mut i = UNIT_POS_X;
    while i < chunk.whole {
        let mut loaded = Sequence::<Vector<f32, Const<4>>>::new();
        #[unroll]
        for k in 0..UNROLL {
            let at = min(i + k * THREADS, chunk.whole - 1u32);
            loaded.push(load(memory, gradient, chunk.start, at, wide));
        }
        #[unroll]
        for k in 0..UNROLL {
            let at = i + k * THREADS;
            if at < chunk.whole {
                let x = widened(*loaded.index(k as usize), dtype, wide);
                let y = x * Vector::new(factor);
                store(memory, gradient, dtype, chunk.start, at, y, wide);
            }
        }
        i += comptime!(THREADS * UNROLL);
    }
}

/// Multiplies a chunk of the gradients. Grid: chunks.
#[cube]
fn scale(memory: &mut Memory, entries: &Array<u64>, args: &Args) {
    let chunk = find(entries, args.num_tensors);
    let gradient = entries[chunk.entry + 1];
    let dtype = gradient_dtype(chunk);
    if dtype == F32 {
        scale_whole(memory, gradient, chunk, args.factor, true);
    } else {
        scale_whole(memory, gradient, chunk, args.factor, false);
    }
    let mut i = chunk.whole + UNIT_POS_X;
    while i * FOUR < chunk.length {
        let count = elements_of(chunk, i);
        let x = load_one_by_one(memory, gradient, dtype, chunk.start, i, count);
        let y = x * Vector::new(args.factor);
        store_one_by_one(memory, gradient, dtype, chunk.start, i, count, y);
        i += THREADS;
    }
}

fn kernel(kind: Kind, name: &str) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let memory = memory::declare(&mut b);
    let words = b.type_of::<u64>();
    let entries = b.read("entries", words);
    let (f32s, u32s) = (b.type_of::<f32>(), b.type_of::<u32>());
    let (u64s, f64s) = (words, b.type_of::<f64>());
    // One address for all.
    let control = ControlExpand {
        f32s: b.write("control", f32s).into(),
        u32s: b.write("control_u32", u32s).into(),
        u64s: b.write("control_u64", u64s).into(),
        f64s: b.write("control_f64", f64s).into(),
    };
    let groups = b.read("groups", f32s);
    let partials = b.write("partials", f32s);
    let args = Args::declare(&mut b);
    let s = b.scope();
    match kind {
        Kind::Norm => norm::expand(s, memory, entries.into(), control, partials.into(), args),
        Kind::Decide => decide::decide::expand(s, control, partials.into(), args),
        Kind::Sum => decide::sum::expand(s, control, partials.into(), args),
        Kind::Agree => decide::agree::expand(s, control, entries.into(), args),
        Kind::Adam | Kind::Momentum | Kind::Plain => {
            update::update::expand(
                s,
                memory,
                entries.into(),
                control,
                groups.into(),
                args,
                kind,
            );
        }
        Kind::Scale => scale::expand(s, memory, entries.into(), args),
    }
    let threads = match kind {
        Kind::Decide | Kind::Sum => decide::THREADS,
        Kind::Agree => decide::FEW,
        _ => THREADS,
    };
    let choices = vec![("kind", kind.code())];
    let kernel = b.finish(format!("optimizer_{name}"), choices, threads)?;
    Ok(match kind {
        // Left to choose, the compiler takes 64 for Blackwell, and spills one in vain.
        Kind::Momentum => kernel.with_registers(96),
        // Blocks compute by turns while others' loads are on their way.
        Kind::Adam => kernel.for_blocks(4),
        _ => kernel,
    })
}

/// One of each kind.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    [
        (Kind::Norm, "norm"),
        (Kind::Decide, "decide"),
        (Kind::Adam, "adam"),
        (Kind::Momentum, "momentum"),
        (Kind::Plain, "plain"),
        (Kind::Scale, "scale"),
        (Kind::Sum, "sum"),
        (Kind::Agree, "agree"),
    ]
    .into_iter()
    .map(|(kind, name)| kernel(kind, name))
    .collect()
}
