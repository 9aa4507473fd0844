//! The update of weights and moments: each is read and written once.

use contract::Float;
use contract::optimizer::{Kind, Storage, shift};
use cubecl::prelude::*;

use super::memory::{
    F32, FOUR, Memory, at, load, load_one_by_one, store, store_one_by_one, widened,
};
use super::rounding::{cut, joined, lower_halves};
use super::{Args, Chunk, Control, THREADS, elements_of, find, gradient_dtype};

/// Vectors of each tensor that a thread loads before it computes.
const UNROLL: u32 = 2;

const BF16: u32 = Float::Bf16.code();
const IN_F32: u32 = Storage::F32.code();
const IN_REMAINDER: u32 = Storage::Remainder.code();

type Four = Vector<f32, Const<4>>;

/// What the elements of a chunk have in common.
#[derive(CubeType, Clone, Copy)]
struct Numbers {
    coefficient: f32,
    learning_rate: f32,
    /// Added to the gradient, times the weight.
    decay: f32,
    /// What the weight is multiplied by.
    keep: f32,
    step_size: f32,
    bias2: f32,
    beta1: f32,
    beta2: f32,
    new1: f32,
    new2: f32,
    epsilon: f32,
    momentum: f32,
    nesterov: u32,
}

#[cube]
fn numbers(chunk: Chunk, control: &Control, groups: &Array<f32>, args: &Args) -> Numbers {
    let group = 2u32 * (chunk.traits >> shift::GROUP);
    let learning_rate = groups[group as usize];
    let weight_decay = groups[(group + 1u32) as usize];
    let mut decay = weight_decay;
    let mut keep = 1.0f32;
    if args.decoupled != 0u32 {
        decay = 0.0f32;
        keep = 1.0f32 - learning_rate * weight_decay;
    }
    Numbers {
        coefficient: control.f32s[1],
        learning_rate,
        decay,
        keep,
        step_size: learning_rate * control.f32s[6],
        bias2: control.f32s[7],
        beta1: args.beta1,
        beta2: args.beta2,
        new1: args.new1,
        new2: args.new2,
        epsilon: args.epsilon,
        momentum: args.momentum,
        nesterov: args.nesterov,
    }
}

/// Where a parameter's tensors begin, and what they are.
#[derive(CubeType, Clone, Copy)]
struct Tensors {
    weight: u64,
    gradient: u64,
    first: u64,
    second: u64,
    master: u64,
    weight_dtype: u32,
    gradient_dtype: u32,
    storage: u32,
}

#[cube]
fn tensors(chunk: Chunk, entries: &Array<u64>) -> Tensors {
    Tensors {
        weight: entries[chunk.entry],
        gradient: entries[chunk.entry + 1],
        first: entries[chunk.entry + 2],
        second: entries[chunk.entry + 3],
        master: entries[chunk.entry + 4],
        weight_dtype: chunk.traits & 15u32,
        gradient_dtype: gradient_dtype(chunk),
        storage: (chunk.traits >> shift::STORAGE) & 15u32,
    }
}

/// What a step turns into something else: of four elements, in f32.
#[derive(CubeType, Clone, Copy)]
struct State {
    p: Four,
    first: Four,
    second: Four,
}

#[cube]
fn stepped(of: State, gradient: Four, n: Numbers, #[comptime] kind: Kind) -> State {
    let mut p = of.p;
    let mut first = of.first;
    let mut second = of.second;
    #[unroll]
    for j in 0..4usize {
        let mut g = fma(p[j], n.decay, gradient[j] * n.coefficient);
        let kept = p[j] * n.keep;
        if comptime!(kind == Kind::Adam) {
            let m = fma(n.beta1, first[j], n.new1 * g);
            let v = fma(n.beta2, second[j], n.new2 * (g * g));
            first[j] = m;
            second[j] = v;
            let denominator = fma(v.sqrt(), n.bias2, n.epsilon);
            p[j] = fma(-n.step_size, m / denominator, kept);
        } else {
            if comptime!(kind == Kind::Momentum) {
                let b = fma(n.momentum, first[j], g);
                first[j] = b;
                let mut by = b;
                if n.nesterov != 0u32 {
                    by = fma(n.momentum, b, g);
                }
                g = by;
            }
            p[j] = fma(g, -n.learning_rate, kept);
        }
    }
    State { p, first, second }
}

/// The weights, as [`load`] has them; zeros where they are kept in f32 besides.
#[cube]
fn load_weight(
    memory: &Memory,
    of: Tensors,
    start: u64,
    vector: u32,
    #[comptime] wide: bool,
) -> Four {
    let mut raw = Four::zeroed();
    if comptime!(wide) {
        raw = load(memory, of.weight, start, vector, true);
    } else if of.storage != IN_F32 {
        raw = load(memory, of.weight, start, vector, false);
    }
    raw
}

/// What is loaded besides weights and gradients; what the parameter does not have is zero.
#[derive(CubeType, Clone, Copy)]
struct Kept {
    master: Four,
    remainder: Vector<u32, Const<2>>,
    first: Four,
    second: Four,
}

#[cube]
fn load_kept(
    memory: &Memory,
    of: Tensors,
    start: u64,
    vector: u32,
    #[comptime] kind: Kind,
    #[comptime] wide_weight: bool,
) -> Kept {
    let mut master = Four::zeroed();
    let mut remainder = Vector::<u32, Const<2>>::zeroed();
    let mut first = Four::zeroed();
    let mut second = Four::zeroed();
    // An f32 weight is its own master.
    if comptime!(!wide_weight) {
        if of.storage == IN_F32 {
            master = memory.f32x4[at(of.master, start, vector, 2u64)];
        } else if of.storage == IN_REMAINDER {
            remainder = memory.u32x2[at(of.master, start, vector, 1u64)];
        }
    }
    if comptime!(kind != Kind::Plain) {
        first = memory.f32x4[at(of.first, start, vector, 2u64)];
    }
    if comptime!(kind == Kind::Adam) {
        second = memory.f32x4[at(of.second, start, vector, 2u64)];
    }
    Kept {
        master,
        remainder,
        first,
        second,
    }
}

#[cube]
fn store_kept(
    memory: &mut Memory,
    of: Tensors,
    start: u64,
    vector: u32,
    state: State,
    #[comptime] kind: Kind,
    #[comptime] wide_weight: bool,
) {
    if comptime!(kind != Kind::Plain) {
        memory.f32x4[at(of.first, start, vector, 2u64)] = state.first;
    }
    if comptime!(kind == Kind::Adam) {
        memory.f32x4[at(of.second, start, vector, 2u64)] = state.second;
    }
    if comptime!(!wide_weight) {
        if of.storage == IN_F32 {
            memory.f32x4[at(of.master, start, vector, 2u64)] = state.p;
        } else if of.storage == IN_REMAINDER {
            memory.u32x2[at(of.master, start, vector, 1u64)] = lower_halves(state.p);
        }
    }
}

/// What the weight is stored from.
#[cube]
fn of_weight(
    p: Four,
    of: Tensors,
    first_pack: u64,
    start: u64,
    vector: u32,
    control: &Control,
    args: &Args,
) -> Four {
    let mut rounded = p;
    if of.weight_dtype == BF16 && of.storage >= IN_REMAINDER {
        let draw = first_pack * 2u64 + (start >> 2u64) + u64::cast_from(vector);
        rounded = cut(p, of.storage, draw, control, args);
    }
    rounded
}

/// The f32 weights, from where they are.
#[cube]
fn weights(weight: Four, kept: Kept, storage: u32, #[comptime] wide_weight: bool) -> Four {
    let mut p = weight;
    if comptime!(!wide_weight) {
        if storage == IN_F32 {
            p = kept.master;
        } else if storage == IN_REMAINDER {
            p = joined(weight, kept.remainder);
        }
    }
    p
}

/// Updates a chunk, or only zeroes its gradients. Grid: chunks.
#[cube]
pub fn update(
    memory: &mut Memory,
    entries: &Array<u64>,
    control: &Control,
    groups: &Array<f32>,
    args: &Args,
    #[comptime] kind: Kind,
) {
    let skipped = control.u32s[3] != 0u32;
    if !skipped || args.zero_gradients != 0u32 {
        let chunk = find(entries, args.num_tensors);
        let of = tensors(chunk, entries);
        if !skipped {
            let n = numbers(chunk, control, groups, args);
            // Loads of one dtype each, which are queued one behind the other without a condition.
            let wide_weight = of.weight_dtype == F32;
            let wide_gradient = of.gradient_dtype == F32;
            if wide_weight && wide_gradient {
                whole(
                    memory, entries, control, args, chunk, of, n, kind, true, true,
                );
            } else if wide_weight {
                whole(
                    memory, entries, control, args, chunk, of, n, kind, true, false,
                );
            } else if wide_gradient {
                whole(
                    memory, entries, control, args, chunk, of, n, kind, false, true,
                );
            } else {
                whole(
                    memory, entries, control, args, chunk, of, n, kind, false, false,
                );
            }
            rest(memory, entries, control, args, chunk, of, n, kind);
        } else {
            clear(memory, chunk, of);
        }
    }
}

/// The vectors that are accessed as such.
#[cube]
fn whole(
    memory: &mut Memory,
    entries: &Array<u64>,
    control: &Control,
    args: &Args,
    chunk: Chunk,
    of: Tensors,
    n: Numbers,
    #[comptime] kind: Kind,
    #[comptime] wide_weight: bool,
    #[comptime] wide_gradient: bool,
) {
    let first_pack = entries[chunk.entry + 6];
    let mut i = UNIT_POS_X;
    while i < chunk.whole {
        let mut gradients = Sequence::<Four>::new();
        let mut raws = Sequence::<Four>::new();
        let mut kepts = Sequence::<Kept>::new();
        #[unroll]
        for k in 0..UNROLL {
            // Past the end the last one is read again.
            let at = min(i + k * THREADS, chunk.whole - 1u32);
            gradients.push(load(memory, of.gradient, chunk.start, at, wide_gradient));
            raws.push(load_weight(memory, of, chunk.start, at, wide_weight));
            kepts.push(load_kept(memory, of, chunk.start, at, kind, wide_weight));
        }
        #[unroll]
        for k in 0..UNROLL {
            let at = i + k * THREADS;
            if at < chunk.whole {
                let kept = *kepts.index(k as usize);
                let weight = widened(*raws.index(k as usize), of.weight_dtype, wide_weight);
                let before = State {
                    p: weights(weight, kept, of.storage, wide_weight),
                    first: kept.first,
                    second: kept.second,
                };
                let g = widened(
                    *gradients.index(k as usize),
                    of.gradient_dtype,
                    wide_gradient,
                );
                let after = stepped(before, g, n, kind);
                let mut p = after.p;
                if comptime!(!wide_weight) {
                    p = of_weight(after.p, of, first_pack, chunk.start, at, control, args);
                }
                store(
                    memory,
                    of.weight,
                    of.weight_dtype,
                    chunk.start,
                    at,
                    p,
                    wide_weight,
                );
                store_kept(memory, of, chunk.start, at, after, kind, wide_weight);
                if args.zero_gradients != 0u32 {
                    let zeros = Four::zeroed();
                    let dtype = of.gradient_dtype;
                    store(
                        memory,
                        of.gradient,
                        dtype,
                        chunk.start,
                        at,
                        zeros,
                        wide_gradient,
                    );
                }
            }
        }
        i += comptime!(THREADS * UNROLL);
    }
}

/// The others. What the state has for them is whole.
#[cube]
fn rest(
    memory: &mut Memory,
    entries: &Array<u64>,
    control: &Control,
    args: &Args,
    chunk: Chunk,
    of: Tensors,
    n: Numbers,
    #[comptime] kind: Kind,
) {
    let first_pack = entries[chunk.entry + 6];
    let start = chunk.start;
    let mut i = chunk.whole + UNIT_POS_X;
    while i * FOUR < chunk.length {
        let count = elements_of(chunk, i);
        let weight = load_one_by_one(memory, of.weight, of.weight_dtype, start, i, count);
        let g = load_one_by_one(memory, of.gradient, of.gradient_dtype, start, i, count);
        let kept = load_kept(memory, of, start, i, kind, false);
        let before = State {
            p: weights(weight, kept, of.storage, false),
            first: kept.first,
            second: kept.second,
        };
        let after = stepped(before, g, n, kind);
        let p = of_weight(after.p, of, first_pack, start, i, control, args);
        store_one_by_one(memory, of.weight, of.weight_dtype, start, i, count, p);
        store_kept(memory, of, start, i, after, kind, false);
        if args.zero_gradients != 0u32 {
            let zeros = Four::zeroed();
            store_one_by_one(
                memory,
                of.gradient,
                of.gradient_dtype,
                start,
                i,
                count,
                zeros,
            );
        }
        i += THREADS;
    }
}

/// Zeroes the gradients of a chunk.
#[cube]
fn clear(memory: &mut Memory, chunk: Chunk, of: Tensors) {
    let zeros = Four::zeroed();
    let (gradient, dtype) = (of.gradient, of.gradient_dtype);
    let mut i = UNIT_POS_X;
    while i * FOUR < chunk.length {
        if i >= chunk.whole {
            let count = elements_of(chunk, i);
            store_one_by_one(memory, gradient, dtype, chunk.start, i, count, zeros);
        } else if dtype == F32 {
            store(memory, gradient, dtype, chunk.start, i, zeros, true);
        } else {
            store(memory, gradient, dtype, chunk.start, i, zeros, false);
        }
        i += THREADS;
    }
}
