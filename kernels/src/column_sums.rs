//! Sums of the columns of an f32 matrix, or of two: the second step of sums over many rows, whose
//! blocks have stored a share each. Columns are added in one order, whatever runs beside them.

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};

/// Columns of a block, and threads that share a column.
const COLUMNS: u32 = 32;
const SHARERS: u32 = 32;

/// What a thread has of a column of `[rows, columns]`: every 32nd row, four on their way at a time.
#[cube]
fn part(shares: &Array<f32>, rows: u32, columns: u32, column: u32, sharer: u32) -> f32 {
    let mut sum = 0.0f32;
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

/// `out = sum over rows of shares`, `shares` being `[rows, columns]`; to f32, what `out` holds is
/// added if asked for. Grid: columns in groups of 32, then those of `more_shares`, if there are, of
/// which there may be more or fewer rows.
#[cube]
fn column_sums<F: Float>(
    shares: &Array<f32>,
    more_shares: &Array<f32>,
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
        part(more_shares, more_rows, columns, column, sharer)
    } else {
        part(shares, rows, columns, column, sharer)
    };
    // A row of 33, so that the threads of a column do not meet in a bank.
    let mut parts = SharedMemory::<f32>::new(comptime!((SHARERS * (COLUMNS + 1)) as usize));
    parts[(sharer * comptime!(COLUMNS + 1) + lane) as usize] = sum;
    sync_cube();
    // Warp `sharer` adds what the sharers of column `sharer` have.
    let mut sum = parts[(lane * comptime!(COLUMNS + 1) + sharer) as usize];
    #[unroll]
    for step in 0..5u32 {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
    }
    let column = group * COLUMNS + sharer;
    if lane == 0u32 && column < columns {
        if more {
            store(more_out, column, sum, accumulate);
        } else {
            store(out, column, sum, accumulate);
        }
    }
}

fn kernel(dtype: Dtype) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    with_vector!(dtype, F, _N => {
        let (of_shares, of_out) = (b.type_of::<f32>(), b.type_of::<F>());
        let shares = b.read("shares", of_shares);
        let more_shares = b.read("more_shares", of_shares);
        let out = b.write("out", of_out);
        let more_out = b.write("more_out", of_out);
        let rows = b.scalar("rows", ScalarType::U32);
        let more_rows = b.scalar("more_rows", ScalarType::U32);
        let columns = b.scalar("columns", ScalarType::U32);
        let accumulate = b.scalar("accumulate", ScalarType::U32);
        column_sums::expand::<F>(
            b.scope(), shares.into(), more_shares.into(), out.into(), more_out.into(), rows.into(),
            more_rows.into(), columns.into(), accumulate.into(),
        );
    });
    let name = format!("column_sums_{}", dtype.name());
    let choices = vec![("dtype", dtype.code()), ("columns", COLUMNS)];
    b.finish(name, choices, COLUMNS * SHARERS)
}

/// One for each dtype of the sums.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    Dtype::ALL.iter().map(|dtype| kernel(*dtype)).collect()
}
