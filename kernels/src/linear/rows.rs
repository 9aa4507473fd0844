//! At most 16 rows of 16-bit x on tensor cores, bound by reading W once.

use cubecl::prelude::*;

use super::{Addends, Args, store};
use crate::attention::fragments::{Line, Pair, mma, zeros};
use crate::emit::Builder;

/// Planes of a cube of `rows`.
pub const PLANES: u32 = 8;
/// A cube has 16 rows of W, its planes share their elements. Lines go from memory to registers, in an order of elements that x
/// and W have in common. `eights` of x: rows / 8, rounded up.
///
/// Grid: out features / 16.
#[cube]
fn rows<E: Float>(
    x: &Array<Vector<E, Line>>,
    w: &Array<Vector<E, Line>>,
    out: &mut Array<E>,
    addends: &Addends<E>,
    args: &Args,
    #[comptime] eights: u32,
) {
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let lines = args.in_features / 8u32;
    let column0 = CUBE_POS_X * 16u32;
    let in_flight = 4usize;

    let mut w_at = Array::<u64>::new(2usize);
    #[unroll]
    for h in 0..2usize {
        let column = min(
            column0 + lane / 4u32 + comptime!(h as u32 * 8),
            args.out_features - 1u32,
        );
        w_at[h] = u64::cast_from(column) * args.w_stride;
    }
    let mut x_at = Array::<u64>::new(eights as usize);
    #[unroll]
    for e in 0..eights as usize {
        let row = min(lane / 4u32 + comptime!(e as u32 * 8), args.rows - 1u32);
        x_at[e] = u64::cast_from(row) * args.x_stride;
    }
    let mut acc = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..eights {
        acc.push(zeros());
    }

    // Runs of `in_flight` blocks of four lines: whole ones without guards, so that their loads are in flight together.
    let mut first = plane * comptime!(in_flight as u32 * 4);
    while first < lines {
        let mut weights = Array::<Vector<E, Line>>::new(comptime!(2 * in_flight));
        let mut inputs = Array::<Vector<E, Line>>::new(comptime!(eights as usize * in_flight));
        if first + comptime!(in_flight as u32 * 4) <= lines {
            #[unroll]
            for u in 0..in_flight {
                let line = u64::cast_from(first + lane % 4u32 + comptime!(u as u32 * 4));
                #[unroll]
                for h in 0..2usize {
                    weights[u * 2 + h] = w[(w_at[h] + line) as usize];
                }
                #[unroll]
                for e in 0..eights as usize {
                    inputs[u * eights as usize + e] = x[(x_at[e] + line) as usize];
                }
            }
        } else {
            #[unroll]
            for u in 0..in_flight {
                let line = first + lane % 4u32 + comptime!(u as u32 * 4);
                #[unroll]
                for h in 0..2usize {
                    weights[u * 2 + h] = Vector::zeroed();
                    if line < lines {
                        weights[u * 2 + h] = w[(w_at[h] + u64::cast_from(line)) as usize];
                    }
                }
                #[unroll]
                for e in 0..eights as usize {
                    inputs[u * eights as usize + e] = Vector::zeroed();
                    if line < lines {
                        inputs[u * eights as usize + e] =
                            x[(x_at[e] + u64::cast_from(line)) as usize];
                    }
                }
            }
        }
        #[unroll]
        for u in 0..in_flight {
            #[unroll]
            for step in 0..2usize {
                let mut a = Array::<Vector<E, Pair>>::new(4usize);
                #[unroll]
                for i in 0..4usize {
                    a[i] = pair::<E>(weights[u * 2 + i % 2], comptime!(step * 4 + i / 2 * 2));
                }
                #[unroll]
                for e in 0..eights as usize {
                    let mut b = Array::<Vector<E, Pair>>::new(2usize);
                    #[unroll]
                    for i in 0..2usize {
                        b[i] =
                            pair::<E>(inputs[u * eights as usize + e], comptime!(step * 4 + i * 2));
                    }
                    mma::<E>(&a, &b, acc.index_mut(e));
                }
            }
        }
        first += comptime!(PLANES * in_flight as u32 * 4);
    }

    // Accumulators have W's rows as rows and x's as columns.
    let mut sums = SharedMemory::<f32>::new(comptime!((PLANES * eights * 128) as usize));
    #[unroll]
    for e in 0..eights {
        #[unroll]
        for h in 0..2u32 {
            let value = acc.index(e as usize)[h as usize];
            #[unroll]
            for c in 0..2u32 {
                let row = lane % 4u32 * 2u32 + comptime!(e * 8 + c);
                let column = lane / 4u32 + comptime!(h * 8);
                sums[(plane * comptime!(eights * 128) + row * 16u32 + column) as usize] =
                    value[c as usize];
            }
        }
    }
    sync_cube();
    if UNIT_POS_X < comptime!(eights * 128) {
        let row = UNIT_POS_X / 16u32;
        let column = column0 + UNIT_POS_X % 16u32;
        if row < args.rows && column < args.out_features {
            let mut sum = 0.0f32;
            #[unroll]
            for p in 0..PLANES {
                sum += sums[(UNIT_POS_X + comptime!(p * eights * 128)) as usize];
            }
            store::<E>(out, addends, args, row, column, sum);
        }
    }
}

#[cube]
fn pair<E: Float>(line: Vector<E, Line>, #[comptime] first: usize) -> Vector<E, Pair> {
    let mut two = Vector::<E, Pair>::empty();
    two[0] = line[first];
    two[1] = line[comptime!(first + 1)];
    two
}

pub fn expand<E: Float>(b: &mut Builder, eights: u32) {
    let (line, ty) = (b.type_of::<Vector<E, Line>>(), b.type_of::<E>());
    let (x, w, out) = (b.read("x", line), b.read("w", line), b.write("out", ty));
    let addends = Addends::<E>::declare(b);
    let args = Args::declare(b);
    rows::expand::<E>(
        b.scope(),
        x.into(),
        w.into(),
        out.into(),
        addends,
        args,
        eights,
    );
}
