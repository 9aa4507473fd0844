//! Products of up to eight rows of 16 bits with weights like them on Hopper (`kernels/cuda/linear/few`): also
//! behind a norm of `x`, and of a gate and what it gates in one.

use super::{Epilogue, Product};
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::driver::CUdevice_attribute;
use crate::cuda::images::linear_few::{Arguments, Choices};
use crate::cuda::rows::Matrix;
use crate::cuda::tuning::Server;
use crate::cuda::tuning::rules::products::{FEW_LEAST_ELEMENTS, FEW_ROWS};
use crate::cuda::{Cuda, Shape, VECTOR};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::linear::Weights;
use crate::problem::rms_norm::OfInput;
use crate::tensor::RawTensor;

pub(super) struct Kernels {
    kernels: Vec<Kernel<Arguments>>,
    multiprocessors: usize,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(super::OP, &mut kernels, kernel)?;
    }
    let units = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let multiprocessors = resources.primary.attribute(super::OP, units)? as usize;
    Ok(Kernels {
        kernels,
        multiprocessors: multiprocessors.max(1),
    })
}

/// What is the same in every norm that a product's kernel computes.
pub(super) struct Norm {
    pub gains: u64,
    /// 0 for no norm.
    pub dtype: u32,
    pub offset: f32,
    pub epsilon: f32,
    pub inverse_length: f32,
}

impl Norm {
    /// Vectors of a row at most: the greatest that the kernels of the norm alone keep in registers.
    const MOST_VECTORS: usize = 4096;

    /// Whether a kernel that normalises rows of 16 bits in vectors gives this norm the bits that it has alone.
    pub fn is_in_vectors(norm: &OfInput, x: &RawTensor) -> bool {
        let columns = x.layout.dim(x.layout.rank() - 1);
        let weight = &norm.weight;
        (weight.dtype == x.dtype || weight.dtype == DType::F32)
            && weight.ptr.addr().is_multiple_of(VECTOR)
            && (columns * x.dtype.size()).is_multiple_of(VECTOR)
            && columns * x.dtype.size() <= Self::MOST_VECTORS * VECTOR
    }

    pub fn new(norm: Option<&OfInput>, x: &RawTensor) -> Norm {
        let columns = x.layout.dim(x.layout.rank() - 1);
        Norm {
            gains: norm.map_or(0, |norm| norm.weight.ptr.addr() as u64),
            dtype: norm.map_or(0, |norm| norm.weight.dtype as u32),
            offset: norm.map_or(0.0, |norm| norm.weight_offset),
            epsilon: norm.map_or(0.0, |norm| norm.epsilon),
            inverse_length: 1.0 / columns.max(1) as f32,
        }
    }
}

/// Slots of the ring, at most: for each a lane of a warp that copies makes barriers.
const MOST_SLOTS: usize = 32;
/// Of the weight, on their way to a block once its ring has been full: with as many as it has room for, a layer of
/// decoding took 3 to 5 % longer, with half as many 32 % (H200).
const BYTES_IN_FLIGHT: usize = 64 << 10;
/// Where `x` leaves room for fewer, other kernels are faster: with four, six rows by 4096x14336 took 1.7 times as long (H200).
const LEAST_SLOTS: usize = 8;

/// How a product is parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Form {
    blocks: usize,
    /// Of the output.
    columns_of_tile: usize,
    /// Of a block, but for the first blocks, which have one more.
    tiles: usize,
    one_more: usize,
    /// Of a row of the weight.
    steps: usize,
    steps_of_chunk: usize,
    slots: usize,
    /// Chunks that are on their way for a team, once the ring has been full.
    in_flight: usize,
    pitch: usize,
    shared_bytes: usize,
}

/// What a form depends on.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    rows: usize,
    out_features: usize,
    in_features: usize,
    gated: bool,
    multiprocessors: usize,
    room: usize,
    choices: Choices,
}

impl Sizes {
    /// As many slots as there is room for; none where rows are too many or too long for it.
    fn form(&self) -> Option<Form> {
        const ELEMENT: usize = 2;
        /// Bytes of a transaction barrier.
        const BARRIER: usize = 8;
        /// The same words of two neighbouring rows of a slot lie in different banks.
        const BANKS: usize = 128;
        let [columns, step, most_steps, teams, share_bytes] = [
            self.choices.columns,
            self.choices.step,
            self.choices.steps,
            self.choices.teams,
            self.choices.share_bytes,
        ]
        .map(|choice| choice as usize);
        /// Which are counted in 32 bits.
        const MOST_COLUMNS: usize = 1 << 31;
        if !(1..=MOST_COLUMNS).contains(&self.out_features) || self.in_features == 0 {
            return None;
        }
        let most_columns = if self.gated { columns / 2 } else { columns };
        let columns_of_tile = most_columns.min(self.out_features.div_ceil(self.multiprocessors));
        let tiles = self.out_features.div_ceil(columns_of_tile);
        let blocks = self.multiprocessors.min(tiles);
        let steps = self.in_features.div_ceil(step);
        // As many in each chunk, so that warps have as much to do.
        let steps_of_chunk = steps.div_ceil(steps.div_ceil(most_steps));
        let row_bytes = steps_of_chunk.checked_mul(step * ELEMENT)?;
        let pitch = row_bytes.next_multiple_of(BANKS) + BANKS / 2;
        let of_slot = columns * pitch + 2 * BARRIER;
        let of_x = steps
            .checked_mul(step * ELEMENT)?
            .checked_add(share_bytes)?;
        let rest = self.rows.checked_mul(of_x)?.checked_add(4 * BARRIER)?;
        let slots = (self.room.checked_sub(rest)? / of_slot).min(MOST_SLOTS) / teams * teams;
        let in_flight = BYTES_IN_FLIGHT / (teams * columns * row_bytes);
        (slots >= LEAST_SLOTS).then_some(Form {
            blocks,
            columns_of_tile,
            tiles: tiles / blocks,
            one_more: tiles % blocks,
            steps,
            steps_of_chunk,
            slots,
            in_flight: in_flight.clamp(1, (slots / teams).max(1)),
            pitch,
            shared_bytes: rest + slots * of_slot,
        })
    }
}

/// The kernel that is to run, and how.
type Chosen<'a> = (&'a Kernel<Arguments>, Form);

impl Kernels {
    /// None where rows are too many or too long.
    fn choose(
        &self,
        dtype: DType,
        rows: usize,
        (out_features, in_features): (usize, usize),
        gated: bool,
    ) -> Option<Chosen<'_>> {
        let of_dtype = |k: &&Kernel<Arguments>| {
            k.choices.dtype == dtype as u32 && rows <= k.choices.rows as usize
        };
        let kernel = self.kernels.iter().find(of_dtype)?;
        let sizes = Sizes {
            rows,
            out_features,
            in_features,
            gated,
            multiprocessors: self.multiprocessors,
            room: kernel.room as usize,
            choices: *kernel.choices,
        };
        Some((kernel, sizes.form()?))
    }
}

/// Whether all rows of a matrix begin at, and consist of, whole vectors.
fn in_vectors(w: &Weights) -> bool {
    let weight = &w.weight;
    let bytes = |elements: usize| elements * weight.dtype.size();
    [
        weight.ptr.addr(),
        bytes(stride(weight)),
        bytes(weight.layout.dim(1)),
    ]
    .iter()
    .all(|at| at.is_multiple_of(VECTOR))
}

fn stride(weight: &RawTensor) -> usize {
    match weight.layout.dim(0) {
        1 => weight.layout.dim(1),
        _ => weight.layout.stride(0),
    }
}

/// The kernel for equally spaced rows, if it is for them.
fn choose<'a>(cuda: &'a Cuda, p: &Product<'_>, matrix: &Matrix<3>) -> Option<Chosen<'a>> {
    let (x, weight) = (p.x, &p.weights.weight);
    let sizes = (weight.layout.dim(0), weight.layout.dim(1));
    let x_lies = [
        x.ptr.addr() + matrix.offsets[0] * x.dtype.size(),
        matrix.strides[0] * x.dtype.size(),
    ];
    let mut fits = x.dtype == weight.dtype
        && (1..=FEW_ROWS).contains(&matrix.rows)
        && sizes.0.saturating_mul(sizes.1) >= FEW_LEAST_ELEMENTS
        && in_vectors(p.weights)
        && x_lies.iter().all(|at| at.is_multiple_of(VECTOR))
        && p.norm.is_none_or(|norm| Norm::is_in_vectors(norm, x));
    if let Epilogue::Gated(up, _) = &p.epilogue {
        fits = fits && is_like(&up.weight, weight) && in_vectors(up);
    }
    // One way for what is normalised here and what was normalised before: the same bits.
    let own = |with_workspace| {
        let tuning = &cuda.resources.tuning.linear;
        tuning.server(x.dtype, matrix.rows, sizes.0, sizes.1, with_workspace) == Server::Own
    };
    if !fits || !own(false) || !own(true) {
        return None;
    }
    let gated = matches!(p.epilogue, Epilogue::Gated(..));
    (cuda.linear.few).choose(x.dtype, matrix.rows, sizes, gated)
}

/// Whether two matrices lie alike.
pub(super) fn is_like(a: &RawTensor, b: &RawTensor) -> bool {
    a.dtype == b.dtype && a.layout.shape() == b.layout.shape() && stride(a) == stride(b)
}

/// Whether a product, with its norm and what it gates, is one launch of these kernels.
pub(super) fn fuses(cuda: &Cuda, p: &Product<'_>) -> bool {
    p.rows()
        .matrices()
        .all(|matrix| choose(cuda, p, &matrix).is_some())
}

/// Queues a product of equally spaced rows if these kernels are for it, or says that they are not.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    matrix: &Matrix<3>,
    stream: Stream,
) -> Result<bool> {
    let Some((kernel, form)) = choose(cuda, p, matrix) else {
        return Ok(false);
    };
    let weight = &p.weights.weight;
    let (out_features, in_features) = (weight.layout.dim(0), weight.layout.dim(1));
    tracing::trace!(
        "{}: {} rows of {in_features} by {out_features} in {}, {form:?}",
        p.op,
        matrix.rows,
        weight.dtype,
    );
    let (other, epilogue) = p.epilogue.parts();
    let other = other.unwrap_or(p.out);
    let at = |t: &RawTensor, i: usize| (t.ptr.addr() + matrix.offsets[i] * t.dtype.size()) as u64;
    let bytes = |t: &RawTensor, i: usize| (matrix.strides[i] * t.dtype.size()) as i64;
    let up = match &p.epilogue {
        Epilogue::Gated(up, _) => Some(up),
        _ => None,
    };
    let bias = p.weights.bias.as_ref();
    let up_bias = up.and_then(|up| up.bias.as_ref());
    let address = |t: Option<&RawTensor>| t.map_or(0, |t| t.ptr.addr() as u64);
    let code = |t: Option<&RawTensor>| t.map_or(0, |t| t.dtype as u32);
    let norm = Norm::new(p.norm, p.x);
    let arguments = Arguments {
        x: at(p.x, 0),
        weight: weight.ptr.addr() as u64,
        out: at(p.out, 1),
        bias: address(bias),
        up_bias: address(up_bias),
        residual: at(other, 2),
        norm: norm.gains,
        weight_stride: (stride(weight) * weight.dtype.size()) as i64,
        up_offset: up.map_or(0, |up| offset(weight, &up.weight)),
        x_stride: bytes(p.x, 0),
        out_stride: bytes(p.out, 1),
        residual_stride: bytes(other, 2),
        rows: matrix.rows as u32,
        out_features: out_features as u32,
        lines: (in_features * weight.dtype.size() / VECTOR) as u32,
        steps: form.steps as u32,
        steps_of_chunk: form.steps_of_chunk as u32,
        slots: form.slots as u32,
        in_flight: form.in_flight as u32,
        pitch: form.pitch as u32,
        columns_of_tile: form.columns_of_tile as u32,
        tiles: form.tiles as u32,
        one_more: form.one_more as u32,
        bias_dtype: code(bias),
        up_bias_dtype: code(up_bias),
        epilogue: epilogue.code(),
        gated: u32::from(up.is_some()),
        dtype: p.out.dtype as u32,
        norm_dtype: norm.dtype,
        norm_offset: norm.offset,
        norm_epsilon: norm.epsilon,
        norm_inverse_length: norm.inverse_length,
        constant: u32::from(p.weights.constant && up.is_none_or(|up| up.constant)),
    };
    let shape = Shape {
        grid: [form.blocks as u32, 1, 1],
        block: kernel.info.block,
        shared_bytes: form.shared_bytes as u32,
        cluster: 1,
    };
    // SAFETY: the problem was checked: its tensors have the rows that the arguments describe, and where these
    // lie is as the kernel needs it. `Sizes::form` counted the shared memory of ring, rows and shares.
    unsafe { cuda.launch_shape(p.op, kernel, shape, &arguments, stream)? };
    Ok(true)
}

/// Bytes from one matrix to another.
pub(super) fn offset(from: &RawTensor, to: &RawTensor) -> i64 {
    (to.ptr.addr() as i64).wrapping_sub(from.ptr.addr() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of one row on an H200.
    fn sizes(out_features: usize, in_features: usize) -> Sizes {
        Sizes {
            rows: 1,
            out_features,
            in_features,
            gated: false,
            multiprocessors: 132,
            room: 227 << 10,
            choices: Choices {
                dtype: DType::Bf16 as u32,
                rows: 8,
                columns: 16,
                step: 64,
                steps: 8,
                teams: 2,
                share_bytes: 2048,
            },
        }
    }

    /// Every column is in a tile of a block, and shared memory is there.
    #[test]
    fn forms_cover_their_products() {
        for in_features in [8, 72, 576, 4096, 14336, 28672] {
            for out_features in [1, 15, 133, 960, 4096, 14336, 128_256] {
                for (rows, gated) in [(1, false), (1, true), (4, false), (8, true)] {
                    let sizes = Sizes {
                        rows,
                        gated,
                        ..sizes(out_features, in_features)
                    };
                    let Some(form) = sizes.form() else {
                        assert!(rows * in_features > 32_768, "{sizes:?}");
                        continue;
                    };
                    assert!(form.shared_bytes <= sizes.room, "{sizes:?} {form:?}");
                    assert!(
                        form.slots.is_multiple_of(2)
                            && (LEAST_SLOTS..=MOST_SLOTS).contains(&form.slots),
                        "{form:?}"
                    );
                    assert_eq!(form.pitch % 128, 64, "{form:?}");
                    let most = if gated { 8 } else { 16 };
                    assert!((1..=most).contains(&form.columns_of_tile), "{form:?}");
                    assert!(
                        (1..=132).contains(&form.blocks) && form.tiles > 0,
                        "{form:?}"
                    );
                    let tiles = form.blocks * form.tiles + form.one_more;
                    let columns = tiles * form.columns_of_tile;
                    let is_covered = columns >= out_features;
                    assert!(
                        is_covered && columns < out_features + form.columns_of_tile,
                        "{form:?}"
                    );
                }
            }
        }
        assert_eq!(sizes(0, 4096).form(), None);
        assert_eq!(sizes(4096, 0).form(), None);
        assert_eq!(sizes(usize::MAX, 4096).form(), None);
        assert_eq!(sizes(4096, usize::MAX / 2).form(), None);
    }

    /// Those that were measured.
    #[test]
    fn forms_are_those_that_were_measured() {
        let form = |n, k| {
            let form = sizes(n, k).form().unwrap();
            (form.blocks, form.columns_of_tile, form.slots)
        };
        assert_eq!(form(4096, 4096), (132, 16, 12));
        assert_eq!(form(4096, 14336), (132, 16, 10));
        assert_eq!(form(960, 576), (120, 8, 20));
    }
}
