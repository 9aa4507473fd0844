//! Products of some rows with weights in blocks, both as they are.
//!
//! How a launch is parted is a rule from the bytes that a multiprocessor moves, which chooses as the
//! times of all forms of Q4_0 on an H200 do; no record of other devices exists.

use super::{Arguments, Kernels, arguments};
use crate::backend::Stream;
use crate::cuda::device::Kernel;
use crate::cuda::linear::Product;
use crate::cuda::rows::Matrix;
use crate::cuda::{Cuda, Shape};
use crate::dtype::DType;
use crate::error::{Error, Result, text};

/// Blocks of a cluster that every device has, where it has clusters.
const MOST_PARTS: usize = 8;
/// Stages of shared memory.
const SLOTS: [usize; 2] = [3, 2];

/// How a product is parted among warps and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    /// Warps side by side, and along a row of the weight.
    across: usize,
    along: usize,
    slots: usize,
    /// Blocks that part a row of the weight.
    parts: usize,
    shared_bytes: usize,
}

/// What a form depends on.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Of the weight.
    out_features: usize,
    /// Along its rows.
    steps: usize,
    /// Of the grid's second dimension.
    row_tiles: usize,
    multiprocessors: usize,
    /// Whether blocks have clusters.
    clusters: bool,
    /// What the kernel's blocks have: rows of `x`, columns of a warp, threads, shared memory.
    rows: usize,
    columns: usize,
    warps: usize,
    room: usize,
    /// Of shared memory: a warp's weights of a step, a row of `x` of a step, a warp's sums.
    slot_bytes: usize,
    x_bytes: usize,
    sums_bytes: usize,
}

impl Sizes {
    /// The form with which the busiest multiprocessor reads the fewest bytes.
    fn form(&self) -> Option<Form> {
        let mut best: Option<(usize, Form)> = None;
        let powers = |most: usize| (0..=most.max(1).ilog2()).map(|log2| 1usize << log2);
        for across in powers(self.warps) {
            for along in powers((self.warps / across).min(self.steps)) {
                for parts in powers(if self.clusters { MOST_PARTS } else { 1 }) {
                    // A part has a step for each warp along a row.
                    if parts > 1 && parts * along > self.steps {
                        continue;
                    }
                    let Some(form) = self.with_slots(across, along, parts) else {
                        continue;
                    };
                    let cost = self.cost(&form);
                    if best.is_none_or(|(least, _)| cost < least) {
                        best = Some((cost, form));
                    }
                }
            }
        }
        best.map(|(_, form)| form)
    }

    /// With as many stages as there is room for.
    fn with_slots(&self, across: usize, along: usize, parts: usize) -> Option<Form> {
        let warps = across * along;
        let stage = along * self.rows * self.x_bytes + warps * self.slot_bytes;
        SLOTS.into_iter().find_map(|slots| {
            let shared_bytes = (slots * stage).max(warps * self.sums_bytes);
            (shared_bytes <= self.room).then_some(Form {
                across,
                along,
                slots,
                parts,
                shared_bytes,
            })
        })
    }

    /// Bytes that the busiest multiprocessor moves, and the time that few warps take more.
    fn cost(&self, form: &Form) -> usize {
        /// Warps that keep a multiprocessor's units busy.
        const ENOUGH_WARPS: usize = 16;
        let warps = form.across * form.along;
        let columns = form.across * self.columns;
        let blocks = self.out_features.div_ceil(columns) * form.parts * self.row_tiles;
        let fit = (self.room / form.shared_bytes.max(1))
            .min(self.warps / warps)
            .max(1);
        // The multiprocessors are in groups, which clusters do not cross and larger ones do not fill: on an
        // H200 16 clusters of eight blocks, each as large as a multiprocessor, take two rounds.
        let multiprocessors = match form.parts {
            1 | 2 => self.multiprocessors,
            4 => self.multiprocessors * 7 / 8,
            _ => self.multiprocessors * 3 / 4,
        };
        let multiprocessors = (multiprocessors / form.parts * form.parts).max(1);
        // Of a multiprocessor at once, and in all.
        let at_once = fit.min(blocks.div_ceil(multiprocessors)).max(1);
        let rounds = blocks.div_ceil(at_once * multiprocessors);
        let steps = self.steps.div_ceil(form.parts).div_ceil(form.along) * form.along;
        let weights = steps * form.across * self.slot_bytes;
        // From the cache, whose bytes take half of the time.
        let x = steps * self.rows * self.x_bytes / 2;
        let sums = warps * self.sums_bytes;
        let busy = (at_once * warps).min(ENOUGH_WARPS);
        rounds * at_once * (weights + x + sums) * (ENOUGH_WARPS + busy) / (2 * busy)
    }
}

impl Kernels {
    /// The kernel that takes all rows of `x`, or the most.
    fn of_tiles(&self, x: DType, format: DType, rows: usize) -> Option<&Kernel<Arguments>> {
        self.kernels
            .iter()
            .filter(|k| k.choices.format == format as u32 && k.choices.x_dtype == x as u32)
            .min_by_key(|k| {
                let of_tile = k.choices.rows as usize;
                (rows.div_ceil(of_tile), of_tile)
            })
    }
}

/// Queues a product of equally spaced rows.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    matrix: &Matrix<3>,
    stream: Stream,
) -> Result<()> {
    let weight = &p.weights.weight;
    let kernels = &cuda.linear.blocks;
    let none = || Error::Internal {
        op: p.op,
        message: text!("no kernel for {} by {}", p.x.dtype, weight.dtype),
    };
    let kernel = kernels
        .of_tiles(p.x.dtype, weight.dtype, matrix.rows)
        .ok_or_else(none)?;
    let choices = kernel.choices;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let sizes = Sizes {
        out_features,
        steps: in_features.div_ceil(choices.step as usize),
        row_tiles: matrix.rows.div_ceil(choices.rows as usize),
        multiprocessors: kernels.multiprocessors,
        clusters: cuda.resources.launches_early,
        rows: choices.rows as usize,
        columns: choices.columns as usize,
        warps: kernel.info.block[0] as usize / 32,
        room: kernel.room as usize,
        slot_bytes: choices.slot_bytes as usize,
        x_bytes: choices.x_bytes as usize,
        sums_bytes: choices.sums_bytes as usize,
    };
    let form = sizes.form().ok_or_else(none)?;
    let columns = form.across * sizes.columns;
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, as they are, {form:?}",
        p.op,
        matrix.rows,
        weight.dtype,
    );
    let arguments = Arguments {
        steps: sizes.steps as u32,
        slots: form.slots as u32,
        columns_of_block: columns as u32,
        parts: form.parts as u32,
        across: form.across as u32,
        ..arguments(p, matrix)
    };
    let blocks = out_features.div_ceil(columns) * form.parts;
    let shape = Shape {
        grid: [blocks as u32, sizes.row_tiles as u32, 1],
        block: [(form.across * form.along) as u32 * 32, 1, 1],
        shared_bytes: form.shared_bytes as u32,
        cluster: form.parts as u32,
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, of whole
    // blocks. A form's shared memory has its stages, and behind them its sums.
    unsafe { cuda.launch_shape(p.op, kernel, shape, &arguments, stream) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 32 rows of x on an H200, but for the room.
    fn sizes(slot_bytes: usize, steps: usize, room: usize, clusters: bool) -> Sizes {
        Sizes {
            out_features: 4096,
            steps,
            row_tiles: 1,
            multiprocessors: 132,
            clusters,
            rows: 32,
            columns: 16,
            warps: 16,
            room,
            slot_bytes,
            x_bytes: 544,
            sums_bytes: 32 * 20 * 4,
        }
    }

    /// There is a form for the least shared memory that a device has, and it has room.
    #[test]
    fn a_form_fits_the_shared_memory_there_is() {
        for room in [99 << 10, 163 << 10, 227 << 10] {
            for slot_bytes in [2816, 4864, 8960] {
                for steps in [1, 3, 16, 56] {
                    for clusters in [false, true] {
                        let sizes = sizes(slot_bytes, steps, room, clusters);
                        let form = sizes.form().unwrap();
                        let warps = form.across * form.along;
                        let stage = form.along * 32 * 544 + warps * slot_bytes;
                        assert!(form.shared_bytes <= room, "{sizes:?} {form:?}");
                        assert!(form.shared_bytes >= form.slots * stage, "{form:?}");
                        assert!(form.shared_bytes >= warps * sizes.sums_bytes, "{form:?}");
                        assert!(warps <= 16 && (2..=4).contains(&form.slots), "{form:?}");
                        assert!(form.parts * form.along <= steps, "{form:?}");
                        assert!(clusters || form.parts == 1, "{form:?}");
                    }
                }
            }
        }
    }

    /// The fastest that were measured for Q4_0 with 4096 rows.
    #[test]
    fn forms_are_those_that_were_fastest() {
        for steps in [16, 56] {
            let form = sizes(2816, steps, 227 << 10, true).form().unwrap();
            let shape = (form.across, form.along, form.parts);
            assert_eq!(shape, (4, 4, 2), "{form:?}");
        }
    }
}
