//! The kernels for Hopper (`kernels/cuda/norm/backward`): rows pass through shared memory, a block
//! fills a multiprocessor. Those of groups have several rows at a time in registers, too.

use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::driver::CUdevice_attribute;
use crate::cuda::images::norm_backward_ring::Arguments;
use crate::cuda::rows::Launch;
use crate::cuda::tuning::{NormBackward, Refill};
use crate::cuda::{Cuda, VECTOR};
use crate::error::Result;
use crate::problem::norm::Backward;
use crate::tensor::RawTensor;

/// Shorter rows leave most threads of a warp without a vector.
const MIN_VECTORS: usize = 32;
/// Rows of a multiprocessor below which the portable kernels are faster, if they take rows whole:
/// there is too little to do for blocks of this size.
const MIN_ROWS: usize = 8;

/// Vectors of a row that a warp takes alone, whose threads wait for nobody: faster than a group.
const MAX_VECTORS_OF_WARP: usize = 128;

/// None on other devices, and in builds without them.
pub(super) struct Kernels {
    kernels: Vec<Kernel<Arguments>>,
    multiprocessors: usize,
    tuning: NormBackward,
}

/// A kernel, and how its threads and its shared memory are parted.
pub(super) struct Form<'a> {
    kernel: &'a Kernel<Arguments>,
    /// Threads that share a row.
    threads: usize,
    /// Rows on their way to these threads, and the one that they have.
    stages: usize,
    refill: Refill,
    /// Blocks of a launch.
    pub groups: usize,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        let op = "norm_backward";
        let mut kernels = Vec::new();
        for kernel in resources.kernels::<Arguments>()? {
            push(op, &mut kernels, kernel)?;
        }
        let units = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(Kernels {
            kernels,
            multiprocessors: resources.primary.attribute(op, units)? as usize,
            tuning: resources.tuning.norm_backward,
        })
    }

    /// The kernel for `rows` rows in each launch, whose vectors are aligned; none where rows are
    /// short, or so long that no two of them fit shared memory, or few, if another is `good`.
    pub fn choose(&self, p: &Backward, rows: usize, good: bool) -> Option<Form<'_>> {
        let vectors = p.dim() * p.x.dtype.size() / VECTOR;
        if vectors < MIN_VECTORS {
            return None;
        }
        let few = rows < MIN_ROWS.saturating_mul(self.multiprocessors);
        self.group(p, rows, vectors).or_else(|| match few && good {
            true => None,
            false => self.ring(p, rows, vectors),
        })
    }

    /// The kernels for a problem.
    fn of(&self, p: &Backward) -> impl Iterator<Item = &Kernel<Arguments>> {
        let (dtype, centered) = (p.x.dtype as u32, u32::from(p.centered));
        let residual = u32::from(p.dresidual.is_some());
        self.kernels.iter().filter(move |kernel| {
            let choices = kernel.choices;
            (choices.dtype, choices.centered, choices.residual) == (dtype, centered, residual)
        })
    }

    /// The kernel with the fewest threads to a row, for rows that no warp takes alone and launches in which
    /// it is the faster one.
    fn group(&self, p: &Backward, rows: usize, vectors: usize) -> Option<Form<'_>> {
        let bytes = rows.saturating_mul(vectors * VECTOR);
        let pays = bytes <= self.tuning.group_bytes || p.dresidual.is_some();
        if vectors <= MAX_VECTORS_OF_WARP || !pays {
            return None;
        }
        // None of a ring alone, whose group is 0.
        let takes =
            |k: &&Kernel<Arguments>| (k.choices.group * k.choices.vectors) as usize >= vectors;
        let kernel = self.of(p).filter(takes).min_by_key(|k| k.choices.group)?;
        let (threads, at_once) = (kernel.choices.group as usize, kernel.choices.rows as usize);
        let block = Block::of(kernel, 0);
        let (step, stages) = block.steps(threads, at_once, row_bytes(p))?;
        // What a block takes at once costs less there than to add the shares of several.
        let alone = rows <= step && p.parameters.iter().count() > 0;
        Some(Form {
            kernel,
            threads,
            stages,
            refill: Refill::AfterSums,
            groups: rows.min(if alone { 1 } else { self.multiprocessors }),
        })
    }

    /// The kernel that has rows in shared memory alone.
    fn ring(&self, p: &Backward, rows: usize, vectors: usize) -> Option<Form<'_>> {
        let of = |refill: Option<Refill>| {
            self.of(p).find(|kernel| {
                let choices = kernel.choices;
                choices.group == 0
                    && refill.is_none_or(|r| [r as u32, AS_TOLD].contains(&choices.refill))
            })
        };
        let gains = match p.centered {
            true => p.dim() * size_of::<f32>(),
            false => 0,
        };
        // All of them have blocks alike.
        let block = Block::of(of(None)?, gains);
        let (threads, stages, refill) =
            block.part(&self.tuning, vectors, row_bytes(p), p.centered)?;
        Some(Form {
            kernel: of(Some(refill))?,
            threads,
            stages,
            refill,
            groups: rows.min(self.multiprocessors),
        })
    }
}

/// Bytes that a row has in all tensors that are read.
fn row_bytes(p: &Backward) -> usize {
    (2 + usize::from(p.dresidual.is_some())) * p.dim() * p.x.dtype.size()
}

/// Of a kernel that takes the [`Refill`] as an argument.
const AS_TOLD: u32 = 3;

/// What a block has: threads, bytes for stages; at most, vectors of a thread and stages of a ring.
struct Block {
    threads: usize,
    room: usize,
    vectors: usize,
    stages: usize,
}

impl Block {
    /// Of a kernel that has so many bytes of gains beside its stages.
    fn of(kernel: &Kernel<Arguments>, gains: usize) -> Block {
        let head = kernel.choices.head_bytes as usize + gains;
        Block {
            threads: kernel.info.block[0] as usize,
            room: (kernel.info.shared_bytes as usize).saturating_sub(head),
            vectors: kernel.choices.vectors as usize,
            stages: kernel.choices.stages as usize,
        }
    }

    /// Rows that all slots take in a step, of so many threads to a row and rows at a time, and stages
    /// of such steps: three where there is room. Two are as fast within 1 % on the one device that was
    /// measured (`benches/results/norm_groups_h100_2026-11-25.json`).
    fn steps(&self, threads: usize, at_once: usize, bytes: usize) -> Option<(usize, usize)> {
        let step = self.threads / threads * at_once;
        let stages = (self.room / (step * bytes)).min(self.stages);
        (stages >= 2).then_some((step, stages))
    }

    /// Threads that share a row of so many vectors, stages of their ring, which take so many bytes
    /// each, and when these are filled again. Too many bytes on their way are as slow as too few.
    fn part(
        &self,
        tuning: &NormBackward,
        vectors: usize,
        bytes: usize,
        centered: bool,
    ) -> Option<(usize, usize, Refill)> {
        // LayerNorm costs a thread more for each row, and less with few threads; others wait less for
        // their row with two vectors each. Within a warp nobody waits.
        let wide = centered || vectors <= 32 * self.vectors;
        let sharers = vectors.div_ceil(if wide { self.vectors } else { 2 });
        let most = vectors.div_ceil(self.vectors).next_power_of_two();
        let threads = sharers.next_power_of_two().clamp(32, self.threads.max(32));
        let slots = self.threads / threads;
        let (wanted, refill) = match (threads, slots) {
            (32, _) => (2 + usize::from(centered), Refill::AfterSums),
            (_, 1) if centered => tuning.layer_norm_single,
            _ if centered => tuning.layer_norm,
            // Rows that take all vectors of all threads.
            (_, 1) if 2 * threads < vectors => tuning.rms_norm_full,
            (_, 1) => (
                (tuning.rms_norm_single_bytes / bytes).max(3),
                Refill::AfterSums,
            ),
            _ => tuning.rms_norm,
        };
        let stages = wanted.min(self.room / (slots * bytes)).min(self.stages);
        (most <= self.threads && stages >= 2).then_some((threads, stages, refill))
    }
}

impl Form<'_> {
    /// Queues the gradients of a launch's rows; the shares of the parameters' go to `shares`. With
    /// none there the gradients are stored themselves.
    ///
    /// # Safety
    /// The problem's tensors have the rows that the launch describes; what `shares` are asked for
    /// have room for those of each block, or there is one block and launch. The stream is live.
    pub unsafe fn launch(
        &self,
        cuda: &Cuda,
        op: &'static str,
        p: &Backward,
        launch: &Launch<4>,
        shares: Option<[u64; 2]>,
        stream: Stream,
    ) -> Result<()> {
        let at =
            |t: &RawTensor, i: usize| (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64;
        let stride = |dim: usize, i: usize| (launch.strides[dim][i] * p.x.dtype.size()) as i64;
        let [size_1, size_2] = launch.divisors();
        let sums = |i: usize, gradient: Option<RawTensor>| match (gradient, shares) {
            (None, _) => (0, 0),
            (Some(_), Some(shares)) => (shares[i], 0),
            (Some(gradient), None) => (gradient.ptr.addr() as u64, gradient.dtype as u32),
        };
        let (dweights, dweights_dtype) = sums(0, p.parameters.dweight);
        let (dbiases, dbiases_dtype) = sums(1, p.parameters.dbias);
        let arguments = Arguments {
            x: at(&p.x, 0),
            dout: at(&p.dout, 1),
            dresidual: p.dresidual.as_ref().map_or(0, |t| at(t, 2)),
            weight: p.weight.map_or(0, |w| w.ptr.addr() as u64),
            dx: at(&p.dx, 3),
            dweights,
            dbiases,
            x_0: stride(0, 0),
            x_1: stride(1, 0),
            x_2: stride(2, 0),
            dout_0: stride(0, 1),
            dout_1: stride(1, 1),
            dout_2: stride(2, 1),
            dresidual_0: stride(0, 2),
            dresidual_1: stride(1, 2),
            dresidual_2: stride(2, 2),
            dx_0: stride(0, 3),
            dx_1: stride(1, 3),
            dx_2: stride(2, 3),
            rows: launch.num_rows() as u32,
            length: (p.dim() * p.x.dtype.size() / VECTOR) as u32,
            threads: self.threads as u32,
            stages: self.stages as u32,
            refill: self.refill as u32,
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            dweights_dtype,
            dbiases_dtype,
            accumulate: u32::from(p.parameters.accumulate),
            weight_dtype: p.weight.map_or(0, |w| w.dtype as u32),
            weight_offset: p.weight_offset,
            epsilon: p.epsilon,
            inverse_length: 1.0 / p.dim() as f32,
        };
        // SAFETY: the caller's promise; rows are aligned, and fit the stages, by `choose`.
        unsafe { cuda.launch(op, self.kernel, self.groups as u32, &arguments, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_parted_by_the_length_of_rows() {
        use Refill::{AfterSums, AtOnce, BeforeSums};
        let tuning = NormBackward {
            group_bytes: 0,
            rms_norm: (3, AfterSums),
            rms_norm_full: (2, BeforeSums),
            rms_norm_single_bytes: 128 << 10,
            layer_norm: (2, BeforeSums),
            layer_norm_single: (2, AtOnce),
        };
        // Of 16 bits: elements, tensors in the ring, whether centred; threads, stages, refills.
        let cases = [
            (256, 2, false, Some((32, 2, AfterSums))),
            (768, 2, false, Some((32, 2, AfterSums))),
            (768, 2, true, Some((32, 3, AfterSums))),
            (2048, 2, false, Some((128, 3, AfterSums))),
            (4096, 2, true, Some((128, 2, BeforeSums))),
            (4096, 3, false, Some((256, 3, AfterSums))),
            (8192, 2, false, Some((512, 4, AfterSums))),
            (8192, 3, false, Some((512, 3, AfterSums))),
            (8192, 3, true, Some((256, 2, BeforeSums))),
            (16384, 2, false, Some((512, 2, BeforeSums))),
            (16384, 2, true, Some((512, 2, AtOnce))),
            (16384, 3, true, None),
            (16392, 2, false, None),
        ];
        for (dim, tensors, centered, expected) in cases {
            let gains = if centered { 4 * dim } else { 0 };
            let block = Block {
                threads: 512,
                room: (227 << 10) - 2688 - gains,
                vectors: 4,
                stages: 8,
            };
            let found = block.part(&tuning, dim / 8, tensors * dim * 2, centered);
            assert_eq!(found, expected, "{dim} {tensors} {centered}");
        }
    }

    #[test]
    fn a_group_has_three_stages_where_there_is_room() {
        let block = Block {
            threads: 512,
            room: (227 << 10) - 4096,
            vectors: 2,
            stages: 3,
        };
        // Of 16 bits: elements, tensors, threads to a row; rows of a step, stages.
        let cases = [
            (1032, 2, 128, (8, 3)),
            (2048, 2, 128, (8, 3)),
            (4096, 2, 256, (4, 3)),
            (5120, 3, 512, (2, 3)),
            (8192, 2, 512, (2, 3)),
            (8192, 3, 512, (2, 2)),
        ];
        for (dim, tensors, threads, expected) in cases {
            let found = block.steps(threads, 2, tensors * dim * 2);
            assert_eq!(found, Some(expected), "{dim} {tensors}");
        }
    }
}
