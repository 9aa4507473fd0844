//! Sums of the columns of an f32 matrix, or of two: the second step of sums over many rows, whose
//! blocks have stored a share each. Columns are added in one order, whatever runs beside them.

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};

/// Columns of a block, or vectors of columns that follow each other, and threads that share one.
const COLUMNS: u32 = 32;
const SHARERS: u32 = 32;
/// Columns of a vector where there are many columns: one at a time, more blocks would be needed than
/// run at once.
const WIDTH: u32 = 4;

/// What a thread has of a column of `[rows, columns]`: every 32nd row, four on their way at a time.
#[cube]
fn part<N: Size>(
    shares: &Array<Vector<f32, N>>,
    rows: u32,
    columns: u32,
    column: u32,
    sharer: u32,
) -> Vector<f32, N> {
    let mut sum = Vector::<f32, N>::zeroed();
    if column < columns {
        let step = SHARERS as usize * columns as usize;
        let mut row = sharer;
        let mut at = sharer as usize * columns as usize + column as usize;
        while row + 3 * SHARERS < rows {
            let a = shares[at];
            let b = shares[at + step];
            let c = shares[at + 2 * step];
            let d = shares[at + 3 * step];
            sum += (a + b) + (c + d);
            row += 4 * SHARERS;
            at += 4 * step;
        }
        while row < rows {
            sum += shares[at];
            row += SHARERS;
            at += step;
        }
    }
    sum
}

#[cube]
fn store<F: Float>(out: &mut Array<F>, column: u32, sum: f32, accumulate: u32) {
    let mut stored = sum;
    if accumulate != 0u32 {
        stored += f32::cast_from(out[column as usize]);
    }
    out[column as usize] = F::cast_from(stored);
}

/// `out = sum over rows of shares`, `shares` being `[rows, columns]`, of which `columns` counts vectors;
/// to f32, what `out` holds is added if asked for. Grid: columns in groups of 32, then those of
/// `more_shares`, if there are, of which there may be more or fewer rows.
#[cube]
fn column_sums<F: Float, N: Size>(
    shares: &Array<Vector<f32, N>>,
    more_shares: &Array<Vector<f32, N>>,
    out: &mut Array<F>,
    more_out: &mut Array<F>,
    rows: u32,
    more_rows: u32,
    columns: u32,
    accumulate: u32,
) {
    let lane = UNIT_POS_X % COLUMNS;
    let sharer = UNIT_POS_X / COLUMNS;
    let groups = (columns + comptime!(COLUMNS - 1)) / COLUMNS;
    let more = CUBE_POS_X >= groups;
    let group = select(more, CUBE_POS_X - groups, CUBE_POS_X);
    let column = group * COLUMNS + lane;
    let sum = if more {
        part::<N>(more_shares, more_rows, columns, column, sharer)
    } else {
        part::<N>(shares, rows, columns, column, sharer)
    };
    // A row of 33, so that the threads of a column do not meet in a bank.
    let mut parts =
        SharedMemory::<Vector<f32, N>>::new(comptime!((SHARERS * (COLUMNS + 1)) as usize));
    parts[(sharer * comptime!(COLUMNS + 1) + lane) as usize] = sum;
    sync_cube();
    // Warp `sharer` adds what the sharers of column `sharer` have.
    let all = parts[(lane * comptime!(COLUMNS + 1) + sharer) as usize];
    let column = group * COLUMNS + sharer;
    #[unroll]
    for i in 0..N::value() {
        let mut sum = all[i];
        #[unroll]
        for step in 0..5u32 {
            sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
        }
        if lane == 0u32 && column < columns {
            let at = column * comptime!(N::value() as u32) + comptime!(i as u32);
            if more {
                store(more_out, at, sum, accumulate);
            } else {
                store(out, at, sum, accumulate);
            }
        }
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty) => {{
        let (of_shares, of_out) = ($b.type_of::<Vector<f32, $n>>(), $b.type_of::<$f>());
        let shares = $b.read("shares", of_shares);
        let more_shares = $b.read("more_shares", of_shares);
        let out = $b.write("out", of_out);
        let more_out = $b.write("more_out", of_out);
        let rows = $b.scalar("rows", ScalarType::U32);
        let more_rows = $b.scalar("more_rows", ScalarType::U32);
        let columns = $b.scalar("columns", ScalarType::U32);
        let accumulate = $b.scalar("accumulate", ScalarType::U32);
        column_sums::expand::<$f, $n>(
            $b.scope(),
            shares.into(),
            more_shares.into(),
            out.into(),
            more_out.into(),
            rows.into(),
            more_rows.into(),
            columns.into(),
            accumulate.into(),
        );
    }};
}

fn kernel(dtype: Dtype, width: u32) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, _N => match width {
        1 => kernel!(b, F, Const<1>),
        _ => kernel!(b, F, Const<{ WIDTH as usize }>),
    });
    let name = format!("column_sums_{}x{width}", dtype.name());
    let choices = vec![
        ("dtype", dtype.code()),
        ("width", width),
        ("columns", COLUMNS * width),
    ];
    b.finish(name, choices, COLUMNS * SHARERS)
}

/// One for each dtype of the sums, of columns and of vectors of them.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let of = |dtype: &Dtype| [1, WIDTH].map(|width| kernel(*dtype, width));
    Dtype::ALL.iter().flat_map(of).collect()
}
