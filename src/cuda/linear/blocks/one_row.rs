//! Products of one row of 16 bits with weights in blocks on Hopper (`kernels/cuda/linear/one_row`): also behind a
//! norm of `x`, and of a gate and what it gates in one.

use super::{Aligned, Arguments, Way, way};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::linear_one_row;
use crate::cuda::linear::{Epilogue, OP, Product};
use crate::cuda::{Cuda, Shape, VECTOR};
use crate::error::Result;
use crate::tensor::RawTensor;

pub(super) type Kernels = Vec<Kernel<linear_one_row::Arguments>>;

/// None on other devices than those of Hopper.
pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<linear_one_row::Arguments>()? {
        push(OP, &mut kernels, kernel)?;
    }
    Ok(kernels)
}

/// How a product is parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    blocks: usize,
    /// Of a block, but for the first blocks, which have one more.
    tiles: usize,
    one_more: usize,
    /// Of the chunks of a row, by which blocks divide their index.
    chunks_inverse: u32,
    slots: usize,
    slot_bytes: usize,
    /// Nanoseconds from one chunk that a warp asks for to the next; 0 for no pace.
    interval: u32,
    shared_bytes: usize,
}

/// What a form depends on.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    out_features: usize,
    gated: bool,
    /// Of a row of the weight, the last of which may be shorter, and of those that are copied together.
    steps: usize,
    steps_of_chunk: usize,
    /// Of a row, if tiles are copied whole.
    tile_row_bytes: Option<usize>,
    multiprocessors: usize,
    /// Bytes that memory moves in a microsecond, by its clock; 0 if that is not known.
    bandwidth: usize,
    /// What blocks have, and what they need: for a chunk of a tile, for a step of `x`, for a tile, and beside these.
    room: usize,
    chunk_bytes: usize,
    x_bytes: usize,
    share_bytes: usize,
    rest_bytes: usize,
}

impl Sizes {
    /// As many slots as there is room for; none if that is for less than two, or if tiles are not whole.
    fn form(&self) -> Option<Form> {
        /// Rows of a weight that are a tile: where gated, half of them are the gate's.
        const COLUMNS: usize = 16;
        /// By fewer of Q4_0 layers of decoding were slower (H200).
        const MOST_SLOTS: usize = 8;
        /// A slot's two transaction barriers.
        const BARRIERS: usize = 16;
        let rows = if self.gated { COLUMNS / 2 } else { COLUMNS };
        let tiles = self.out_features / rows;
        let blocks = self.multiprocessors.min(tiles);
        let is_whole = self.out_features.is_multiple_of(rows);
        if self.steps == 0 || blocks == 0 || !is_whole {
            return None;
        }
        let of_block = tiles.div_ceil(blocks);
        let rest = self.steps * self.x_bytes + of_block * self.share_bytes + self.rest_bytes;
        // Whole lines: eight rows are.
        let slot_bytes = self
            .tile_row_bytes
            .map_or(self.chunk_bytes, |row| COLUMNS * row);
        let of_slot = slot_bytes + BARRIERS;
        // An even number, so that each slot is always for the same half of the warps.
        let slots = (self.room.checked_sub(rest)? / of_slot).min(MOST_SLOTS) / 2 * 2;
        (slots > 0).then_some(Form {
            blocks,
            tiles: tiles / blocks,
            one_more: tiles % blocks,
            chunks_inverse: inverse(self.steps.div_ceil(self.steps_of_chunk)),
            slots,
            slot_bytes,
            interval: self.interval(blocks),
            shared_bytes: rest + slots * of_slot,
        })
    }

    /// Memory that is asked for more than it can give gives less: so warps ask for as much as it can give to so many
    /// blocks.
    fn interval(&self, blocks: usize) -> u32 {
        /// Warps of a block that ask.
        const ASKERS: usize = 2;
        /// Of what memory moves by its clock (H200; see the kernel's ladder).
        const PERCENT: usize = 98;
        /// No such device has slower memory: what tells so is wrong.
        const LEAST_BANDWIDTH: usize = 1_000_000;
        if self.tile_row_bytes.is_some() || self.bandwidth < LEAST_BANDWIDTH {
            return 0;
        }
        let bytes = ASKERS * self.chunk_bytes * blocks;
        u32::try_from(bytes * 1000 * 100 / (self.bandwidth * PERCENT)).unwrap_or(0)
    }
}

/// What an index of a block is multiplied by, so that the upper half of 32 bits is the index by `chunks`, rounded down.
/// Right for so many blocks and chunks that their product is less than 2^16.
const fn inverse(chunks: usize) -> u32 {
    (1 << 16) / chunks as u32 + 1
}

/// The kernel and how it is parted, if these kernels are for the row.
fn chosen<'a>(
    cuda: &'a Cuda,
    p: &Product<'_>,
    a: &Arguments,
) -> Option<(&'a Kernel<linear_one_row::Arguments>, Sizes, Form)> {
    let weight = &p.weights.weight;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    let begins_at_line = |t: &RawTensor| t.ptr.addr().is_multiple_of(VECTOR);
    let lies_at_lines = begins_at_line(weight)
        && match &p.epilogue {
            Epilogue::Gated(up, _) => begins_at_line(&up.weight),
            _ => true,
        };
    if a.rows != 1 || a.x_aligned != 2 || !lies_at_lines || way(p.x, p.weights) != Way::Integers {
        return None;
    }
    let kernel = cuda.linear.blocks.one_row.iter().find(|k| {
        k.choices.format == weight.dtype as u32 && k.choices.x_dtype == p.x.dtype as u32
    })?;
    let choices = kernel.choices;
    let step = choices.step as usize;
    let is_lines = a.aligned == Aligned::Lines as u32 && in_features.is_multiple_of(step);
    let tile_row_bytes = match is_lines {
        true => None,
        false => Some(tile_row_bytes(weight, a)?),
    };
    let sizes = Sizes {
        out_features,
        gated: matches!(p.epilogue, Epilogue::Gated(..)),
        steps: in_features.div_ceil(step),
        steps_of_chunk: choices.steps as usize,
        tile_row_bytes,
        multiprocessors: cuda.linear.blocks.multiprocessors,
        bandwidth: cuda.linear.blocks.bandwidth,
        room: kernel.room as usize,
        chunk_bytes: choices.slot_bytes as usize,
        x_bytes: step / 32 * choices.x_bytes as usize,
        share_bytes: choices.share_bytes as usize,
        rest_bytes: choices.rest_bytes as usize,
    };
    let form = sizes.form()?;
    Some((kernel, sizes, form))
}

/// Bytes of a row, if tiles can be copied whole: rows have no gaps, and words of theirs lie at multiples of four bytes
/// where those of whole steps do.
fn tile_row_bytes(weight: &RawTensor, a: &Arguments) -> Option<usize> {
    let row = weight.dtype.row_bytes(weight.layout.dim(1));
    let (len, bytes) = weight.dtype.block();
    let has_words = (256 / len * bytes).is_multiple_of(4);
    (a.gapless == 1 && (!has_words || row.is_multiple_of(4))).then_some(row)
}

/// Whether these kernels are for a row.
pub(super) fn serve(cuda: &Cuda, p: &Product<'_>, a: &Arguments) -> bool {
    chosen(cuda, p, a).is_some()
}

/// Queues a product of one row if these kernels are for it, or says that they are not.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    a: &Arguments,
    stream: Stream,
) -> Result<bool> {
    let Some((kernel, sizes, form)) = chosen(cuda, p, a) else {
        return Ok(false);
    };
    let weight = &p.weights.weight;
    tracing::trace!(
        "{}: one row of {} by {} in {}, {form:?}",
        p.op,
        weight.layout.dim(1),
        sizes.out_features,
        weight.dtype,
    );
    let up = match &p.epilogue {
        Epilogue::Gated(up, _) => up.weight.ptr.addr() as u64,
        _ => 0,
    };
    let arguments = linear_one_row::Arguments {
        x: a.x,
        weight: a.weight,
        up,
        out: a.out,
        residual: a.residual,
        bias: a.bias,
        up_bias: a.up_bias,
        norm: a.norm,
        weight_stride: a.weight_stride,
        units: (weight.layout.dim(1) / 32) as u32,
        slots: form.slots as u32,
        slot_bytes: form.slot_bytes as u32,
        interval: form.interval,
        whole_tiles: u32::from(sizes.tile_row_bytes.is_some()),
        tiles: form.tiles as u32,
        chunks_inverse: form.chunks_inverse,
        one_more: form.one_more as u32,
        bias_dtype: a.bias_dtype,
        up_bias_dtype: a.up_bias_dtype,
        epilogue: a.epilogue,
        dtype: a.dtype,
        gated: a.gated,
        norm_dtype: a.norm_dtype,
        norm_constant: u32::from(p.norm.is_some_and(|norm| norm.constant)),
        norm_offset: a.norm_offset,
        norm_epsilon: a.norm_epsilon,
        norm_inverse_length: a.norm_inverse_length,
        constant: a.constant,
    };
    let shape = Shape {
        grid: [form.blocks as u32, 1, 1],
        block: kernel.info.block,
        shared_bytes: form.shared_bytes as u32,
        cluster: 1,
    };
    // SAFETY: the problem was checked: its tensors have the row that the arguments describe, and
    // where these lie is as the kernel needs it. A form's shared memory has room for the ring, its barriers, the
    // integers and the shares.
    unsafe { cuda.launch_shape(p.op, kernel, shape, &arguments, stream)? };
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of Q4_0 on an H200.
    fn sizes(out_features: usize, in_features: usize) -> Sizes {
        Sizes {
            out_features,
            gated: false,
            steps: in_features.div_ceil(256),
            steps_of_chunk: 8,
            tile_row_bytes: None,
            multiprocessors: 132,
            bandwidth: 4_814_304,
            room: 227 << 10,
            chunk_bytes: 16 * 1168,
            x_bytes: 8 * 72,
            share_bytes: 1024,
            rest_bytes: 512,
        }
    }

    /// Every block has a tile, halves of the warps have their own slots, and shared memory is there.
    #[test]
    fn forms_cover_their_products() {
        for in_features in [256, 2048, 4096, 14336, 28672, 65536] {
            for out_features in [16, 1008, 4096, 14336, 128_256] {
                for (chunk_bytes, gated) in [(16 * 1168, false), (16 * 2192, true)] {
                    let sizes = Sizes {
                        gated,
                        chunk_bytes,
                        ..sizes(out_features, in_features)
                    };
                    let Some(form) = sizes.form() else {
                        assert!(in_features + out_features > 60_000, "{sizes:?}");
                        continue;
                    };
                    assert!(form.shared_bytes <= sizes.room, "{sizes:?} {form:?}");
                    assert!(form.slots.is_multiple_of(2) && form.slots > 0, "{form:?}");
                    assert!(
                        (1..=132).contains(&form.blocks) && form.tiles > 0,
                        "{form:?}"
                    );
                    let rows = if gated { 8 } else { 16 };
                    let tiles = form.blocks * form.tiles + form.one_more;
                    assert_eq!(tiles * rows, out_features, "{sizes:?} {form:?}");
                }
            }
        }
        // Of Q4_1, as SmolLM2's: as many slots, of less.
        let short = Sizes {
            tile_row_bytes: Some(360),
            ..sizes(1536, 576)
        };
        let form = short.form().unwrap();
        assert_eq!((form.blocks, form.slots, form.slot_bytes), (96, 8, 5760));
        assert_eq!(form.interval, 0);
        let long = Sizes {
            tile_row_bytes: Some(1 << 13),
            ..sizes(4096, 14336)
        };
        assert_eq!(long.form(), None);
        assert_eq!(sizes(4096, 0).form(), None);
        assert_eq!(sizes(4097, 4096).form(), None);
    }

    /// Of as many blocks as a device may have, and of the longest rows.
    #[test]
    fn blocks_divide_their_index() {
        for chunks in 1..=64 {
            for block in 0..1000 {
                assert_eq!(
                    (block as u32 * inverse(chunks)) >> 16,
                    (block / chunks) as u32,
                    "{block} by {chunks}"
                );
            }
        }
    }

    /// Those that were measured.
    #[test]
    fn forms_are_those_that_were_measured() {
        let of = |sizes: Sizes| sizes.form().map(|f| (f.blocks, f.slots, f.interval));
        assert_eq!(of(sizes(4096, 4096)), Some((132, 8, 1045)));
        assert_eq!(of(sizes(4096, 14336)), Some((132, 8, 1045)));
        // Fewer blocks have more of what memory gives; of a memory that is not known nothing is expected.
        assert_eq!(of(sizes(1056, 4096)), Some((66, 8, 522)));
        let unknown = Sizes {
            bandwidth: 999,
            ..sizes(4096, 4096)
        };
        assert_eq!(of(unknown), Some((132, 8, 0)));
    }
}
