//! A few rows of x, of any dtypes, bound by reading W.

use cubecl::prelude::*;

use super::{Args, Outside, store};
use crate::attention::fragments::Pair;
use crate::emit::Builder;

/// How a kernel's work is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows of x of a plane: a power of two, as are the others.
    pub rows: u32,
    /// Rows of W of a plane.
    pub columns: u32,
    /// Planes side by side: a tile has `columns` times as many rows of W.
    pub across: u32,
    /// Planes one below the other: a tile has `rows` times as many rows of x.
    pub down: u32,
    /// Planes that share the elements of these rows.
    pub along: u32,
    /// Accesses to each row of W that a lane has under way at a time, while it multiplies as many before.
    pub in_flight: u32,
    /// Whether those to x are under way with them.
    pub ahead: bool,
    /// Cubes that a multiprocessor has registers for, at least.
    pub cubes: u32,
}

/// Of any dtypes, an element per access.
pub const ANY: Shape = Shape {
    rows: 4,
    columns: 2,
    across: 8,
    down: 1,
    along: 1,
    in_flight: 2,
    ahead: false,
    cubes: 2,
};

/// Of f32 by f32, four elements per access: the fastest on an H200 of those that were tried. Of as many rows, fewer columns to a tile first.
pub const WIDE: [Shape; 4] = [
    Shape {
        rows: 1,
        columns: 8,
        across: 1,
        down: 1,
        along: 8,
        in_flight: 1,
        ahead: false,
        cubes: 2,
    },
    Shape {
        rows: 8,
        columns: 4,
        across: 2,
        down: 1,
        along: 4,
        in_flight: 1,
        ahead: false,
        cubes: 2,
    },
    Shape {
        rows: 8,
        columns: 8,
        across: 1,
        down: 2,
        along: 4,
        in_flight: 1,
        ahead: true,
        cubes: 1,
    },
    Shape {
        rows: 16,
        columns: 8,
        across: 2,
        down: 1,
        along: 4,
        in_flight: 1,
        ahead: false,
        cubes: 1,
    },
];

/// Of f32 by 16 bits, eight elements per access: the same shapes as far as registers go.
pub const MIXED: [Shape; 3] = [
    WIDE[0],
    Shape {
        cubes: 1,
        ..WIDE[1]
    },
    Shape {
        rows: 16,
        cubes: 1,
        ..WIDE[1]
    },
];

/// As `WIDE`, where rows are so long that x does not stay in the caches.
pub const DEEP: [Shape; 2] = [
    Shape {
        rows: 8,
        columns: 8,
        across: 2,
        down: 1,
        along: 4,
        in_flight: 1,
        ahead: true,
        cubes: 1,
    },
    Shape {
        rows: 16,
        columns: 4,
        across: 4,
        down: 1,
        along: 2,
        in_flight: 1,
        ahead: true,
        cubes: 1,
    },
];

impl Shape {
    pub fn threads(self) -> u32 {
        self.across * self.down * self.along * 32
    }

    /// Rows of x and of W of a tile.
    pub fn tile(self) -> (u32, u32) {
        (self.rows * self.down, self.columns * self.across)
    }

    /// Results of a plane.
    fn of_plane(self) -> u32 {
        self.rows * self.columns
    }

    /// Results of a tile.
    fn outputs(self) -> u32 {
        self.of_plane() * self.across * self.down
    }
}

/// Tiles of which each cube takes every so many, as in `rows`. `N` elements per access; x comes from the caches. Of W an access is `M`
/// values `L`: its elements, or words of two elements each.
///
/// Grid: up to rows / `rows` times out features / (`columns` `across`); rows first, so that tiles that share rows of W run together.
#[cube]
fn rows_simt<E: Float, W: Float, L: Numeric, N: Size, M: Size>(
    x: &Array<Vector<E, N>>,
    w: &Array<Vector<L, M>>,
    outside: &mut Outside<E>,
    args: &Args,
    #[comptime] shape: Shape,
) {
    let (rows, columns) = comptime!(shape.tile());
    let outputs = comptime!(shape.outputs());
    let of_plane = comptime!(shape.of_plane());
    let of_w = comptime!((shape.columns * shape.in_flight) as usize);
    let of_x = comptime!((shape.rows * shape.in_flight) as usize);
    let plane = UNIT_POS_X / 32u32;
    let lines = args.in_features / comptime!(N::value() as u32);
    let per_step = comptime!(shape.along * shape.in_flight * 32);
    let steps = max(lines.div_ceil(per_step), 1u32);
    let row_tiles = args.rows.div_ceil(rows);
    let tiles = args.out_features.div_ceil(columns) * row_tiles;

    let mut acc = Array::<f32>::new(of_plane as usize);
    #[unroll]
    for i in 0..of_plane as usize {
        acc[i] = 0.0f32;
    }
    // Two sets of sums, by turns: a plane may be a tile ahead of those that add them.
    let mut sums = SharedMemory::<f32>::new(comptime!((2 * shape.along * outputs) as usize));
    let mut turn = 0u32;
    let mut weights = Array::<Vector<L, M>>::new(of_w);
    let mut inputs = Array::<Vector<E, N>>::new(of_x);
    let mut tile = CUBE_POS_X;
    let mut step = 0u32;
    load::<L, M>(w, lines, args, &mut weights, tile, 0u32, shape);
    if comptime!(shape.ahead) {
        load_inputs::<E, N>(x, args, &mut inputs, tile, 0u32, shape);
    }
    while tile < tiles {
        let mut next_step = step + 1u32;
        let mut next_tile = tile;
        if next_step == steps {
            next_step = 0u32;
            next_tile += CUBE_COUNT_X;
        }
        let mut next_weights = Array::<Vector<L, M>>::new(of_w);
        let mut next_inputs = Array::<Vector<E, N>>::new(of_x);
        if next_tile < tiles {
            load::<L, M>(
                w,
                lines,
                args,
                &mut next_weights,
                next_tile,
                next_step,
                shape,
            );
            if comptime!(shape.ahead) {
                load_inputs::<E, N>(x, args, &mut next_inputs, next_tile, next_step, shape);
            }
        }
        let row0 = tile % row_tiles * rows;
        multiply::<E, W, L, N, M>(x, args, &inputs, &weights, &mut acc, row0, step, shape);
        if next_step == 0u32 {
            let base = turn * comptime!(shape.along * outputs);
            turn = 1u32 - turn;
            let of_tile = comptime!(shape.across * shape.down);
            let at = base + plane / of_tile * outputs + plane % of_tile * of_plane;
            put_sums(&mut acc, &mut sums, at, of_plane);
            sync_cube();
            let column0 = tile / row_tiles * columns;
            let mut at = UNIT_POS_X;
            while at < outputs {
                let of = at / of_plane;
                let row = row0 + of / shape.across * shape.rows + at % of_plane / shape.columns;
                let column = column0 + of % shape.across * shape.columns + at % shape.columns;
                if row < args.rows && column < args.out_features {
                    let mut sum = 0.0f32;
                    #[unroll]
                    for p in 0..comptime!(shape.along) {
                        sum += sums[(base + at + comptime!(p * outputs)) as usize];
                    }
                    store::<E>(outside, args, row, column, sum);
                }
                at += comptime!(shape.threads());
            }
            #[unroll]
            for i in 0..of_plane as usize {
                acc[i] = 0.0f32;
            }
        }
        #[unroll]
        for i in 0..of_w {
            weights[i] = next_weights[i];
        }
        if comptime!(shape.ahead) {
            #[unroll]
            for i in 0..of_x {
                inputs[i] = next_inputs[i];
            }
        }
        tile = next_tile;
        step = next_step;
    }
}

/// The first line of a lane in a step.
#[cube]
fn first_line(step: u32, #[comptime] shape: Shape) -> u32 {
    let along = UNIT_POS_X / 32u32 / comptime!(shape.across * shape.down);
    (step * shape.along + along) * comptime!(shape.in_flight * 32) + UNIT_POS_X % 32u32
}

/// A lane's lines of W in a step, as far as there are any.
#[cube]
fn load<L: Numeric, M: Size>(
    w: &Array<Vector<L, M>>,
    lines: u32,
    args: &Args,
    weights: &mut Array<Vector<L, M>>,
    tile: u32,
    step: u32,
    #[comptime] shape: Shape,
) {
    let columns = comptime!(shape.columns as usize);
    let row_tiles = args.rows.div_ceil(comptime!(shape.tile().0));
    let plane = UNIT_POS_X / 32u32;
    let column0 = (tile / row_tiles * shape.across + plane % shape.across) * shape.columns;
    let first = first_line(step, shape);
    let mut w_at = Array::<u64>::new(columns);
    #[unroll]
    for c in 0..columns {
        let column = min(column0 + comptime!(c as u32), args.out_features - 1u32);
        w_at[c] = u64::cast_from(column) * args.w_stride + u64::cast_from(first);
    }
    #[unroll]
    for u in 0..comptime!(shape.in_flight as usize) {
        if first + comptime!(u as u32 * 32) < lines {
            #[unroll]
            for c in 0..columns {
                weights[u * columns + c] = w[(w_at[c] + comptime!(u as u64 * 32)) as usize];
            }
        }
    }
}

/// The first row of a plane in a tile that begins at `row0`.
#[cube]
fn first_row(row0: u32, #[comptime] shape: Shape) -> u32 {
    row0 + UNIT_POS_X / 32u32 / shape.across % shape.down * shape.rows
}

/// A line of x, of the last row for what is beyond it.
#[cube]
fn input<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    args: &Args,
    row: u32,
    line: u32,
) -> Vector<E, N> {
    let row = min(row, args.rows - 1u32);
    x[(u64::cast_from(row) * args.x_stride + u64::cast_from(line)) as usize]
}

/// A lane's lines of x in a step, as far as there are any.
#[cube]
fn load_inputs<E: Float, N: Size>(
    x: &Array<Vector<E, N>>,
    args: &Args,
    inputs: &mut Array<Vector<E, N>>,
    tile: u32,
    step: u32,
    #[comptime] shape: Shape,
) {
    let rows = comptime!(shape.rows as usize);
    let row_tiles = args.rows.div_ceil(comptime!(shape.tile().0));
    let lines = args.in_features / comptime!(N::value() as u32);
    let first = first_line(step, shape);
    let row0 = first_row(tile % row_tiles * comptime!(shape.tile().0), shape);
    #[unroll]
    for u in 0..comptime!(shape.in_flight as usize) {
        let line = first + comptime!(u as u32 * 32);
        if line < lines {
            #[unroll]
            for r in 0..rows {
                inputs[u * rows + r] = input::<E, N>(x, args, row0 + comptime!(r as u32), line);
            }
        }
    }
}

/// With the lines of x that were loaded ahead, or as they come from the caches.
#[cube]
#[expect(clippy::too_many_arguments, reason = "what a step is of")]
fn multiply<E: Float, W: Float, L: Numeric, N: Size, M: Size>(
    x: &Array<Vector<E, N>>,
    args: &Args,
    inputs: &Array<Vector<E, N>>,
    weights: &Array<Vector<L, M>>,
    acc: &mut Array<f32>,
    row0: u32,
    step: u32,
    #[comptime] shape: Shape,
) {
    let (rows, columns) = comptime!((shape.rows as usize, shape.columns as usize));
    let lines = args.in_features / comptime!(N::value() as u32);
    let first = first_line(step, shape);
    let row0 = first_row(row0, shape);
    #[unroll]
    for u in 0..comptime!(shape.in_flight as usize) {
        let line = first + comptime!(u as u32 * 32);
        if line < lines {
            #[unroll]
            for r in 0..rows {
                let mut of_row = inputs[u * rows + r];
                if comptime!(!shape.ahead) {
                    of_row = input::<E, N>(x, args, row0 + comptime!(r as u32), line);
                }
                let input = Vector::<f32, N>::cast_from(of_row);
                #[unroll]
                for c in 0..columns {
                    acc[r * columns + c] =
                        dot::<W, L, N, M>(input, weights[u * columns + c], acc[r * columns + c]);
                }
            }
        }
    }
}

/// Adds each of `count` values over the lanes and puts the sums at `base`. While there are several, lanes halve what they have: a lane
/// gives the one half to its partner and adds what it gets to the other.
#[cube]
fn put_sums(acc: &mut Array<f32>, sums: &mut SharedMemory<f32>, base: u32, #[comptime] count: u32) {
    let lane = UNIT_POS_X % 32u32;
    let mut at = 0u32;
    #[unroll]
    for round in 0..5u32 {
        let bit = comptime!(16u32 >> round);
        let half = comptime!((count >> (round + 1)) as usize);
        if comptime!(half > 0) {
            let upper = lane & bit != 0u32;
            #[unroll]
            for i in 0..half {
                let low = acc[i];
                let high = acc[i + half];
                let kept = select(upper, high, low);
                let given = select(upper, low, high);
                acc[i] = kept + plane_shuffle_xor(given, bit);
            }
            at += select(upper, comptime!(half as u32), 0u32);
        } else {
            acc[0] += plane_shuffle_xor(acc[0], bit);
        }
    }
    let kept = comptime!(max(count / 32, 1));
    // Lanes that differ in these bits alone have the same sum.
    let same = comptime!((32 / count).max(1) - 1);
    if lane & same == 0u32 {
        #[unroll]
        for i in 0..kept {
            sums[(base + at + i) as usize] = acc[i as usize];
        }
    }
}

#[cube]
fn dot<W: Float, L: Numeric, N: Size, M: Size>(
    a: Vector<f32, N>,
    line: Vector<L, M>,
    sum: f32,
) -> f32 {
    let mut sum = sum;
    if comptime!(N::value() == M::value()) {
        let b = Vector::<f32, M>::cast_from(line);
        #[unroll]
        for j in 0..N::value() {
            sum = fma(a[j], b[j], sum);
        }
    } else {
        #[unroll]
        for j in 0..M::value() {
            let b = Vector::<f32, Pair>::cast_from(Vector::<W, Pair>::reinterpret(line[j]));
            sum = fma(a[comptime!(2 * j)], b[0usize], sum);
            sum = fma(a[comptime!(2 * j + 1)], b[1usize], sum);
        }
    }
    sum
}

/// `L` and `M` as of the kernel.
pub fn expand<E: Float, W: Float, L: Numeric, N: Size, M: Size>(b: &mut Builder, shape: Shape) {
    let (xs, ws) = (b.type_of::<Vector<E, N>>(), b.type_of::<Vector<L, M>>());
    let (x, w) = (b.read("x", xs), b.read("w", ws));
    let outside = Outside::<E>::declare(b);
    let args = Args::declare(b);
    rows_simt::expand::<E, W, L, N, M>(b.scope(), x.into(), w.into(), outside, args, shape);
}
