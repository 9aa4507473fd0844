//! A few rows of 16-bit x on tensor cores, bound by reading W once.

use cubecl::prelude::*;

use super::{Args, Outside, store};
use crate::attention::fragments::{Pair, mma, zeros};
use crate::emit::Builder;

/// A line: eight 16-bit elements, moved as words. As elements the compiler takes them apart where they arrive, and waits for them there.
type Words = Const<4>;

/// How a kernel's work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows of x, in eights.
    pub eights: u32,
    /// Rows of W of a tile, in sixteens.
    pub sixteens: u32,
    /// Planes of a cube, which share the elements of its rows.
    pub planes: u32,
    /// Blocks of four lines that a plane loads at a time.
    pub in_flight: u32,
    /// Cubes that a multiprocessor has registers for, at least.
    pub cubes: u32,
    /// Whether a plane's next loads are under way while it multiplies.
    pub ahead: bool,
}

/// The fastest on an H200 of those that were tried; of as many rows, more planes to a tile first.
pub const SHAPES: [Shape; 5] = [
    Shape {
        eights: 1,
        sixteens: 1,
        planes: 16,
        in_flight: 4,
        cubes: 1,
        ahead: false,
    },
    Shape {
        eights: 1,
        sixteens: 1,
        planes: 8,
        in_flight: 4,
        cubes: 3,
        ahead: false,
    },
    Shape {
        eights: 1,
        sixteens: 1,
        planes: 4,
        in_flight: 4,
        cubes: 4,
        ahead: true,
    },
    Shape {
        eights: 2,
        sixteens: 1,
        planes: 16,
        in_flight: 2,
        cubes: 1,
        ahead: true,
    },
    Shape {
        eights: 4,
        sixteens: 2,
        planes: 8,
        in_flight: 1,
        cubes: 2,
        ahead: false,
    },
];

/// Tiles of 16 `sixteens` columns and 8 `eights` rows, of which each cube takes every so many: as many cubes as the device runs at once
/// keep it reading until the last tile, where a wave of cubes that is not full would leave it idle. Of planes that load ahead, those of
/// the next tile's first lines are under way while the last tile's sums are stored.
///
/// Lines go from memory to registers, in an order of elements that x and W have in common.
///
/// Grid: up to rows / (8 `eights`) times out features / (16 `sixteens`); rows first, so that tiles that share rows of W run together.
#[cube]
fn rows<E: Float>(
    x: &Array<Vector<u32, Words>>,
    w: &Array<Vector<u32, Words>>,
    outside: &mut Outside<E>,
    args: &Args,
    #[comptime] shape: Shape,
) {
    let eights = comptime!(shape.eights);
    // Lines of W and of x that a lane loads at a time.
    let of_w = comptime!((2 * shape.sixteens * shape.in_flight) as usize);
    let of_x = comptime!((shape.eights * shape.in_flight) as usize);
    let columns = comptime!(16 * shape.sixteens);
    let outputs = comptime!(eights * 8 * columns);
    let lane = UNIT_POS_X % 32u32;
    let plane = UNIT_POS_X / 32u32;
    let per_step = comptime!(shape.planes * shape.in_flight * 4);
    let steps = max((args.in_features / 8u32).div_ceil(per_step), 1u32);
    let row_tiles = args.rows.div_ceil(comptime!(eights * 8));
    let tiles = args.out_features.div_ceil(columns) * row_tiles;

    let mut acc = Sequence::<Array<Vector<f32, Pair>>>::new();
    #[unroll]
    for _ in 0..comptime!(eights * shape.sixteens) {
        acc.push(zeros());
    }
    // Two sets of sums, by turns: a plane may be a tile ahead of those that add them.
    let mut sums = SharedMemory::<f32>::new(comptime!((2 * shape.planes * outputs) as usize));
    let mut turn = 0u32;
    let mut weights = Array::<Vector<u32, Words>>::new(of_w);
    let mut inputs = Array::<Vector<u32, Words>>::new(of_x);
    let mut tile = CUBE_POS_X;
    let mut step = 0u32;
    // A constant W is on its way before the kernel before has written x.
    if args.constant == 0u32 {
        comment!("await the kernel before");
    }
    load_weights(w, args, &mut weights, tile, 0u32, shape);
    comment!("await the kernel before");
    load_inputs(x, args, &mut inputs, tile, 0u32, shape);
    while tile < tiles {
        let mut next_step = step + 1u32;
        let mut next_tile = tile;
        if next_step == steps {
            next_step = 0u32;
            next_tile += CUBE_COUNT_X;
        }
        let mut next_weights = Array::<Vector<u32, Words>>::new(of_w);
        let mut next_inputs = Array::<Vector<u32, Words>>::new(of_x);
        if comptime!(shape.ahead) {
            let more = next_tile < tiles;
            if more {
                load_weights(w, args, &mut next_weights, next_tile, next_step, shape);
                load_inputs(x, args, &mut next_inputs, next_tile, next_step, shape);
            }
        }
        multiply::<E>(&weights, &inputs, &mut acc, shape);
        if next_step == 0u32 {
            // Accumulators have W's rows as rows and x's as columns.
            let base = turn * comptime!(shape.planes * outputs);
            turn = 1u32 - turn;
            #[unroll]
            for s in 0..comptime!(shape.sixteens) {
                #[unroll]
                for e in 0..eights {
                    let of_pair = acc.index_mut(comptime!((s * eights + e) as usize));
                    #[unroll]
                    for h in 0..2u32 {
                        let value = of_pair[h as usize];
                        of_pair[h as usize] = Vector::new(0.0f32);
                        #[unroll]
                        for c in 0..2u32 {
                            let row = lane % 4u32 * 2u32 + comptime!(e * 8 + c);
                            let column = lane / 4u32 + comptime!(s * 16 + h * 8);
                            sums[(base + plane * outputs + row * columns + column) as usize] =
                                value[c as usize];
                        }
                    }
                }
            }
            sync_cube();
            let row0 = tile % row_tiles * comptime!(eights * 8);
            let column0 = tile / row_tiles * columns;
            let mut at = UNIT_POS_X;
            while at < outputs {
                let row = row0 + at / columns;
                let column = column0 + at % columns;
                if row < args.rows && column < args.out_features {
                    let mut sum = 0.0f32;
                    #[unroll]
                    for p in 0..comptime!(shape.planes) {
                        sum += sums[(base + at + comptime!(p * outputs)) as usize];
                    }
                    store::<E>(outside, args, row, column, sum);
                }
                at += comptime!(shape.planes * 32);
            }
        }
        if comptime!(shape.ahead) {
            #[unroll]
            for i in 0..of_w {
                weights[i] = next_weights[i];
            }
            #[unroll]
            for i in 0..of_x {
                inputs[i] = next_inputs[i];
            }
        } else if next_tile < tiles {
            load_weights(w, args, &mut weights, next_tile, next_step, shape);
            load_inputs(x, args, &mut inputs, next_tile, next_step, shape);
        }
        tile = next_tile;
        step = next_step;
    }
}

/// A plane's lines of W of a step: whole ones without guards, so that their loads are in flight together. Lines beyond the last are zeros.
#[cube]
fn load_weights(
    w: &Array<Vector<u32, Words>>,
    args: &Args,
    weights: &mut Array<Vector<u32, Words>>,
    tile: u32,
    step: u32,
    #[comptime] shape: Shape,
) {
    // Half fragments of W's rows.
    let halves = comptime!(2 * shape.sixteens);
    let row_tiles = args.rows.div_ceil(comptime!(shape.eights * 8));
    let column0 = tile / row_tiles * comptime!(16 * shape.sixteens);
    load(
        w,
        args.out_features,
        args.w_stride,
        args,
        weights,
        column0,
        step,
        halves,
        shape,
    );
}

/// As [`load_weights`], of x.
#[cube]
fn load_inputs(
    x: &Array<Vector<u32, Words>>,
    args: &Args,
    inputs: &mut Array<Vector<u32, Words>>,
    tile: u32,
    step: u32,
    #[comptime] shape: Shape,
) {
    let row_tiles = args.rows.div_ceil(comptime!(shape.eights * 8));
    let row0 = tile % row_tiles * comptime!(shape.eights * 8);
    load(
        x,
        args.rows,
        args.x_stride,
        args,
        inputs,
        row0,
        step,
        shape.eights,
        shape,
    );
}

/// Of `count` rows of a matrix from `row0` on, `eights` times eight of them; those beyond the last are the last again.
#[cube]
#[expect(clippy::too_many_arguments, reason = "what lines are of")]
fn load(
    from: &Array<Vector<u32, Words>>,
    count: u32,
    stride: u64,
    args: &Args,
    to: &mut Array<Vector<u32, Words>>,
    row0: u32,
    step: u32,
    #[comptime] eights: u32,
    #[comptime] shape: Shape,
) {
    let in_flight = comptime!(shape.in_flight as usize);
    let eights = comptime!(eights as usize);
    let lane = UNIT_POS_X % 32u32;
    let lines = args.in_features / 8u32;
    let first = (step * shape.planes + UNIT_POS_X / 32u32) * comptime!(shape.in_flight * 4);

    let mut at = Array::<u64>::new(eights);
    #[unroll]
    for e in 0..eights {
        let row = min(row0 + lane / 4u32 + comptime!(e as u32 * 8), count - 1u32);
        at[e] = u64::cast_from(row) * stride + u64::cast_from(first + lane % 4u32);
    }
    if first + comptime!(shape.in_flight * 4) <= lines {
        #[unroll]
        for u in 0..in_flight {
            #[unroll]
            for e in 0..eights {
                to[u * eights + e] = from[(at[e] + comptime!(u as u64 * 4)) as usize];
            }
        }
    } else {
        #[unroll]
        for u in 0..in_flight {
            let line = first + lane % 4u32 + comptime!(u as u32 * 4);
            #[unroll]
            for e in 0..eights {
                to[u * eights + e] = Vector::zeroed();
                if line < lines {
                    to[u * eights + e] = from[(at[e] + comptime!(u as u64 * 4)) as usize];
                }
            }
        }
    }
}

#[cube]
fn multiply<E: Float>(
    weights: &Array<Vector<u32, Words>>,
    inputs: &Array<Vector<u32, Words>>,
    acc: &mut Sequence<Array<Vector<f32, Pair>>>,
    #[comptime] shape: Shape,
) {
    let eights = comptime!(shape.eights as usize);
    let halves = comptime!(2 * shape.sixteens as usize);
    #[unroll]
    for u in 0..comptime!(shape.in_flight as usize) {
        #[unroll]
        for step in 0..2usize {
            let mut b = Sequence::<Array<Vector<E, Pair>>>::new();
            #[unroll]
            for e in 0..eights {
                let mut of_rows = Array::<Vector<E, Pair>>::new(2usize);
                #[unroll]
                for i in 0..2usize {
                    of_rows[i] = pair::<E>(inputs[u * eights + e], comptime!(step * 4 + i * 2));
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
                for e in 0..eights {
                    mma::<E>(&a, b.index(e), acc.index_mut(comptime!(s * eights + e)));
                }
            }
        }
    }
}

/// Two of a line's elements.
#[cube]
fn pair<E: Float>(line: Vector<u32, Words>, #[comptime] first: usize) -> Vector<E, Pair> {
    Vector::<E, Pair>::reinterpret(line[comptime!(first / 2)])
}

pub fn expand<E: Float>(b: &mut Builder, shape: Shape) {
    let line = b.type_of::<Vector<u32, Words>>();
    let (x, w) = (b.read("x", line), b.read("w", line));
    let outside = Outside::<E>::declare(b);
    let args = Args::declare(b);
    rows::expand::<E>(b.scope(), x.into(), w.into(), outside, args, shape);
}
