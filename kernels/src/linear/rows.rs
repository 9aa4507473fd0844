//! A few rows of 16-bit x on tensor cores, bound by reading W once.

use cubecl::prelude::*;

use super::{Addends, Args, store};
use crate::attention::fragments::{Line, Pair, mma, zeros};
use crate::emit::Builder;

/// How a kernel's work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows of x, in eights.
    pub eights: u32,
    /// Rows of W of a cube, in sixteens.
    pub sixteens: u32,
    /// Planes of a cube, which share the elements of its rows.
    pub planes: u32,
    /// Blocks of four lines that a plane loads at a time.
    pub in_flight: u32,
}

/// The fastest on an H200 of those that were tried: up to 8 rows the loads of many small cubes overlap; 32 rows are for few columns, or
/// where no library serves.
pub const SHAPES: [Shape; 3] = [
    Shape {
        eights: 1,
        sixteens: 1,
        planes: 4,
        in_flight: 4,
    },
    Shape {
        eights: 2,
        sixteens: 1,
        planes: 8,
        in_flight: 4,
    },
    Shape {
        eights: 4,
        sixteens: 2,
        planes: 8,
        in_flight: 1,
    },
];

/// Lines go from memory to registers, in an order of elements that x and W have in common.
///
/// Grid: rows / (8 `eights`) times out features / (16 `sixteens`), rows first, so that cubes that share rows of W run together.
#[cube]
fn rows<E: Float>(
    x: &Array<Vector<E, Line>>,
    w: &Array<Vector<E, Line>>,
    out: &mut Array<E>,
    addends: &Addends<E>,
    args: &Args,
    #[comptime] shape: Shape,
) {
    let eights = comptime!(shape.eights);
    let in_flight = comptime!(shape.in_flight as usize);
    // Half fragments of W's rows.
    let halves = comptime!(2 * shape.sixteens as usize);
    let columns = comptime!(16 * shape.sixteens);
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let lines = args.in_features / 8u32;
    let row_cubes = (args.rows + comptime!(eights * 8 - 1)) / comptime!(eights * 8);
    let column0 = CUBE_POS_X / row_cubes * columns;
    let row0 = CUBE_POS_X % row_cubes * comptime!(eights * 8);

    let mut w_at = Array::<u64>::new(halves);
    #[unroll]
    for h in 0..halves {
        let column = min(
            column0 + lane / 4u32 + comptime!(h as u32 * 8),
            args.out_features - 1u32,
        );
        w_at[h] = u64::cast_from(column) * args.w_stride;
    }
    let mut x_at = Array::<u64>::new(eights as usize);
    #[unroll]
    for e in 0..eights as usize {
        let row = min(
            row0 + lane / 4u32 + comptime!(e as u32 * 8),
            args.rows - 1u32,
        );
        x_at[e] = u64::cast_from(row) * args.x_stride;
    }
    let mut acc = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..comptime!(eights * shape.sixteens) {
        acc.push(zeros());
    }

    // Runs of `in_flight` blocks of four lines: whole ones without guards, so that their loads are in flight together.
    let mut first = plane * comptime!(in_flight as u32 * 4);
    while first < lines {
        let mut weights = Array::<Vector<E, Line>>::new(comptime!(halves * in_flight));
        let mut inputs = Array::<Vector<E, Line>>::new(comptime!(eights as usize * in_flight));
        if first + comptime!(in_flight as u32 * 4) <= lines {
            #[unroll]
            for u in 0..in_flight {
                let line = u64::cast_from(first + lane % 4u32 + comptime!(u as u32 * 4));
                #[unroll]
                for h in 0..halves {
                    weights[u * halves + h] = w[(w_at[h] + line) as usize];
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
                for h in 0..halves {
                    weights[u * halves + h] = Vector::zeroed();
                    if line < lines {
                        weights[u * halves + h] = w[(w_at[h] + u64::cast_from(line)) as usize];
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
                let mut b = Sequence::<Array<Vector<E, Pair>>>::new();
                #[unroll]
                for e in 0..eights as usize {
                    let mut of_rows = Array::<Vector<E, Pair>>::new(2usize);
                    #[unroll]
                    for i in 0..2usize {
                        of_rows[i] =
                            pair::<E>(inputs[u * eights as usize + e], comptime!(step * 4 + i * 2));
                    }
                    b.push(of_rows);
                }
                #[unroll]
                for s in 0..comptime!(shape.sixteens as usize) {
                    let mut a = Array::<Vector<E, Pair>>::new(4usize);
                    #[unroll]
                    for i in 0..4usize {
                        a[i] = pair::<E>(
                            weights[u * halves + s * 2 + i % 2],
                            comptime!(step * 4 + i / 2 * 2),
                        );
                    }
                    #[unroll]
                    for e in 0..eights as usize {
                        mma::<E>(
                            &a,
                            b.index(e),
                            acc.index_mut(comptime!(s * eights as usize + e)),
                        );
                    }
                }
            }
        }
        first += comptime!(shape.planes * in_flight as u32 * 4);
    }

    // Accumulators have W's rows as rows and x's as columns.
    let outputs = comptime!(eights * 8 * columns);
    let mut sums = SharedMemory::<f32>::new(comptime!((shape.planes * outputs) as usize));
    #[unroll]
    for s in 0..comptime!(shape.sixteens) {
        #[unroll]
        for e in 0..eights {
            #[unroll]
            for h in 0..2u32 {
                let value = acc.index(comptime!((s * eights + e) as usize))[h as usize];
                #[unroll]
                for c in 0..2u32 {
                    let row = lane % 4u32 * 2u32 + comptime!(e * 8 + c);
                    let column = lane / 4u32 + comptime!(s * 16 + h * 8);
                    sums[(plane * outputs + row * columns + column) as usize] = value[c as usize];
                }
            }
        }
    }
    sync_cube();
    let mut at = UNIT_POS_X;
    while at < outputs {
        let row = row0 + at / columns;
        let column = column0 + at % columns;
        if row < args.rows && column < args.out_features {
            let mut sum = 0.0f32;
            #[unroll]
            for p in 0..comptime!(shape.planes) {
                sum += sums[(at + comptime!(p * outputs)) as usize];
            }
            store::<E>(out, addends, args, row, column, sum);
        }
        at += comptime!(shape.planes * 32);
    }
}

#[cube]
fn pair<E: Float>(line: Vector<E, Line>, #[comptime] first: usize) -> Vector<E, Pair> {
    let mut two = Vector::<E, Pair>::empty();
    two[0] = line[first];
    two[1] = line[comptime!(first + 1)];
    two
}

pub fn expand<E: Float>(b: &mut Builder, shape: Shape) {
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
        shape,
    );
}
