//! The loop that products of few rows have in common: over parts of the output's columns, each of which is finished
//! for all rows while it is in cache.

use std::ops::Range;

use crate::cpu::Cpu;

/// Output columns that are finished at a time.
pub(super) const PART: usize = 16;

/// Rows that are multiplied at a time, and up to which that beats tiles.
pub(super) const MAX_ROWS: usize = 32;

/// Rows up to which there is room for the sums of no more than these: it is filled with zeros, and for [`MAX_ROWS`] these
/// would take as long as the products of one row of a small model.
const FEW: usize = 4;

/// Calls `multiply(room, i, (rows, columns), sums)` for each weight `i` and part of the output, which gives the products of these
/// rows, and then `done(row, columns, sums)` inside the vectorised dispatch. A part costs so many elementary operations. `room`
/// is what a thread makes for itself, once.
pub(super) fn for_each<T, const N: usize>(
    cpu: &Cpu,
    (rows, columns): (usize, usize),
    cost: usize,
    room: impl Fn() -> T + Sync,
    multiply: impl Fn(&mut T, usize, (Range<usize>, Range<usize>), &mut [[f32; PART]]) + Sync,
    done: impl Fn(usize, Range<usize>, [&mut [f32]; N]) + Sync,
) {
    cpu.for_each_in_order(columns.div_ceil(PART), cost, room, |room, parts| {
        let (mut few, mut many);
        let mut sums: [&mut [[f32; PART]]; N] = if rows <= FEW {
            few = [[[0.0; PART]; FEW]; N];
            few.each_mut().map(|sums| &mut sums[..])
        } else {
            many = [[[0.0; PART]; MAX_ROWS]; N];
            many.each_mut().map(|sums| &mut sums[..])
        };
        for part in parts {
            let part = part * PART..columns.min((part + 1) * PART);
            // The weights of a part stay in cache while rows pass.
            for first in (0..rows).step_by(MAX_ROWS) {
                let here = first..rows.min(first + MAX_ROWS);
                for (i, sums) in sums.iter_mut().enumerate() {
                    let of = (here.clone(), part.clone());
                    multiply(room, i, of, &mut sums[..here.len()]);
                }
                cpu.vectorize(
                    #[inline(always)]
                    || {
                        for row in here.clone() {
                            let sums = sums.each_mut().map(
                                #[inline(always)]
                                |sums| &mut sums[row - first][..part.len()],
                            );
                            done(row, part.clone(), sums);
                        }
                    },
                );
            }
        }
    });
}
