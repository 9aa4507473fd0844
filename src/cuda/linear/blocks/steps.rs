//! Products of five to eight rows of 16 bits with weights in blocks on Hopper, both as they are
//! (`kernels/cuda/linear/steps`).

use super::{Aligned, Arguments};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_steps;
use crate::cuda::linear::{OP, Product};
use crate::cuda::tuning::rules::products::{
    BLOCKS_STEPS_COLUMNS, BLOCKS_STEPS_LEAST_ROWS, BLOCKS_STEPS_OF_ANY_COLUMNS,
};
use crate::cuda::{Cuda, Shape};
use crate::dtype::DType;
use crate::error::Result;

/// Rows of a weight that are a tile.
const COLUMNS: usize = 16;
/// Blocks of a cluster that were measured.
const MOST_PARTS: usize = 2;

pub(super) type Kernels = Vec<Kernel<linear_steps::Arguments>>;

/// None on other devices than those of Hopper.
pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<linear_steps::Arguments>()? {
        push(OP, &mut kernels, kernel)?;
    }
    Ok(kernels)
}

/// How a product is parted among warps and blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    /// Blocks that part a row of the weight.
    parts: usize,
    /// Warps along a row, and side by side.
    along: usize,
    across: usize,
    /// Of a warp's ring.
    slots: usize,
    /// Between two additions of shares.
    tiles_of_round: usize,
    /// Of a cluster.
    columns: usize,
    shared_bytes: usize,
}

/// What a form depends on.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    out_features: usize,
    /// Of a row of the weight.
    steps: usize,
    multiprocessors: usize,
    /// Whether blocks have clusters.
    clusters: bool,
    /// What the kernel's blocks have: rows of `x`, threads, shared memory, and of that a step of a tile.
    rows: usize,
    warps: usize,
    room: usize,
    slot_bytes: usize,
}

impl Sizes {
    /// A step for each warp, and a block for each multiprocessor; none if rows have too many steps for a cluster, or for a block where there
    /// are none.
    fn form(&self) -> Option<Form> {
        /// With more, nothing is faster.
        const MOST_SLOTS: usize = 8;
        const MOST_TILES: usize = 16;
        /// Bytes of shares, unless those of one tile take more.
        const SHARES: usize = 16 << 10;
        /// Of a transaction barrier, and of what aligns the shares behind them.
        const BARRIER: usize = 8;
        const ALIGNMENT: usize = 16;
        let parts = self.steps.div_ceil(self.warps).next_power_of_two();
        let most_parts = if self.clusters { MOST_PARTS } else { 1 };
        if self.steps == 0 || parts > most_parts {
            return None;
        }
        let along = self.steps.div_ceil(parts);
        let across = self.warps / along;
        let clusters = (self.multiprocessors / parts).max(1);
        let columns = self.out_features.div_ceil(clusters).max(1);
        let tiles = columns.div_ceil(COLUMNS);
        // Two rounds: one is added while the next is computed.
        let shares = |tiles_of_round: usize| {
            let of_block = (tiles_of_round * across).div_ceil(parts);
            2 * of_block * parts * along * COLUMNS * self.rows * size_of::<f32>()
        };
        let mut tiles_of_round = 1;
        while tiles_of_round < MOST_TILES
            && shares(2 * tiles_of_round) <= SHARES
            && tiles_of_round * across < tiles
        {
            tiles_of_round *= 2;
        }
        let rest = shares(tiles_of_round) + ALIGNMENT;
        let of_slot = along * across * (self.slot_bytes + BARRIER);
        let slots = (self.room.checked_sub(rest)? / of_slot)
            .min(MOST_SLOTS)
            .min(tiles.div_ceil(across));
        (slots > 0).then_some(Form {
            parts,
            along,
            across,
            slots,
            tiles_of_round,
            columns,
            shared_bytes: slots * of_slot + rest,
        })
    }
}

/// Whether these kernels were the fastest for weights of a format.
fn are_fastest(format: DType, rows: usize, out_features: usize) -> bool {
    rows >= BLOCKS_STEPS_LEAST_ROWS
        && (out_features <= BLOCKS_STEPS_COLUMNS || BLOCKS_STEPS_OF_ANY_COLUMNS.contains(&format))
}

/// The kernel and how it is parted, if these kernels are for the rows.
fn chosen<'a>(
    cuda: &'a Cuda,
    p: &Product<'_>,
    a: &Arguments,
) -> Option<(&'a Kernel<linear_steps::Arguments>, Sizes, Form)> {
    let weight = &p.weights.weight;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let is_aligned = a.aligned == Aligned::Lines as u32 && a.x_aligned != 0;
    if !is_aligned || !are_fastest(weight.dtype, a.rows as usize, out_features) {
        return None;
    }
    let kernels = &cuda.linear.blocks;
    let kernel = kernels.steps.iter().find(|k| {
        k.choices.format == weight.dtype as u32
            && k.choices.x_dtype == p.x.dtype as u32
            && k.choices.rows >= a.rows
    })?;
    let sizes = Sizes {
        out_features,
        steps: in_features.div_ceil(kernel.choices.step as usize),
        multiprocessors: kernels.multiprocessors,
        clusters: cuda.resources.launches_early,
        rows: kernel.choices.rows as usize,
        warps: kernel.info.block[0] as usize / 32,
        room: kernel.room as usize,
        slot_bytes: kernel.choices.slot_bytes as usize,
    };
    let form = sizes.form()?;
    Some((kernel, sizes, form))
}

/// Whether these kernels are for equally spaced rows.
pub(super) fn serve(cuda: &Cuda, p: &Product<'_>, a: &Arguments) -> bool {
    chosen(cuda, p, a).is_some()
}

/// Queues a product of equally spaced rows if these kernels are for it, or says that they are not.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    a: &Arguments,
    stream: Stream,
) -> Result<bool> {
    let weight = &p.weights.weight;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let Some((kernel, sizes, form)) = chosen(cuda, p, a) else {
        return Ok(false);
    };
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, as they are, by steps, {form:?}",
        p.op,
        a.rows,
        weight.dtype,
    );
    let arguments = linear_steps::Arguments {
        x: a.x,
        weight: a.weight,
        out: a.out,
        bias: a.bias,
        residual: a.residual,
        weight_stride: a.weight_stride,
        x_stride: a.x_stride,
        out_stride: a.out_stride,
        residual_stride: a.residual_stride,
        rows: a.rows,
        out_features: a.out_features,
        blocks: a.blocks,
        steps: sizes.steps as u32,
        bias_dtype: a.bias_dtype,
        epilogue: a.epilogue,
        dtype: a.dtype,
        parts: form.parts as u32,
        along: form.along as u32,
        across: form.across as u32,
        columns: form.columns as u32,
        slots: form.slots as u32,
        tiles_of_round: form.tiles_of_round as u32,
        constant: a.constant,
    };
    let shape = Shape {
        grid: [
            (out_features.div_ceil(form.columns) * form.parts) as u32,
            1,
            1,
        ],
        block: [(form.along * form.across) as u32 * 32, 1, 1],
        shared_bytes: form.shared_bytes as u32,
        cluster: form.parts as u32,
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, of whole
    // blocks, and where these lie is as the kernel needs it. A form's shared memory has room for the
    // rings, their barriers and the shares.
    unsafe { cuda.launch_shape(p.op, kernel, shape, &arguments, stream)? };
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of Q4_0 on an H100.
    fn sizes(out_features: usize, steps: usize) -> Sizes {
        Sizes {
            out_features,
            steps,
            multiprocessors: 132,
            clusters: true,
            rows: 8,
            warps: 16,
            room: 227 << 10,
            slot_bytes: 16 * 304,
        }
    }

    /// Every step has a warp, every column a cluster, and shared memory is there.
    #[test]
    fn forms_cover_their_products() {
        for steps in 1..=32 {
            for out_features in [1, 17, 1000, 4096, 14336, 128_256] {
                for slot_bytes in [16 * 304, 16 * 560] {
                    let sizes = Sizes {
                        slot_bytes,
                        ..sizes(out_features, steps)
                    };
                    let form = sizes.form().unwrap();
                    assert!(form.parts * form.along >= steps, "{sizes:?} {form:?}");
                    assert!((1..=16).contains(&(form.along * form.across)), "{form:?}");
                    assert!(form.shared_bytes <= sizes.room, "{sizes:?} {form:?}");
                    let clusters = out_features.div_ceil(form.columns);
                    assert!(clusters * form.parts <= 132, "{sizes:?} {form:?}");
                }
            }
        }
        assert_eq!(sizes(4096, 33).form(), None);
    }

    /// Older drivers give blocks no cluster, without which one of them has all steps of a row.
    #[test]
    fn rows_are_parted_only_among_clusters() {
        for steps in 1..=32 {
            let sizes = Sizes {
                clusters: false,
                ..sizes(4096, steps)
            };
            let form = sizes.form();
            assert_eq!(form.is_some(), steps <= sizes.warps, "{sizes:?} {form:?}");
            assert!(form.is_none_or(|form| form.parts == 1), "{sizes:?}");
        }
    }

    /// Those that were measured.
    #[test]
    fn forms_are_those_that_were_measured() {
        let form = |n, steps| {
            let form = sizes(n, steps).form().unwrap();
            (form.parts, form.along, form.across, form.columns)
        };
        assert_eq!(form(4096, 8), (1, 8, 2, 32));
        assert_eq!(form(14336, 8), (1, 8, 2, 109));
        assert_eq!(form(4096, 28), (2, 14, 1, 63));
    }
}
