//! The kernels for Hopper (`kernels/cuda/cross_entropy`): logits stay in shared memory from their
//! sum to their gradient, a block fills a multiprocessor and takes tokens from a counter.

use super::OP;
use crate::alloc::push;
use crate::backend::Stream;
use crate::cuda::claims;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::driver::CUdevice_attribute;
use crate::cuda::images::cross_entropy_ring::Arguments;
use crate::cuda::rows::Launch;
use crate::cuda::{Cuda, VECTOR};
use crate::dtype::DType;
use crate::error::Result;
use crate::problem::cross_entropy::Problem;
use crate::tensor::RawTensor;

/// Bytes of a token's logits below which a block of this size has too little to do.
const MIN_BYTES: usize = 16 << 10;
/// Bytes of a token's logits from which on two blocks share it: of longer ones, less than two tokens
/// fit a block's ring.
const PAIR_BYTES: usize = 112 << 10;

/// None on other devices, and in builds without them.
pub(super) struct Kernels {
    kernels: Vec<Kernel<Arguments>>,
    multiprocessors: usize,
}

/// How a problem is run.
pub(super) struct Plan<'a> {
    kernel: &'a Kernel<Arguments>,
    /// Of the launch.
    blocks: u32,
    /// Whether there are more tokens than blocks, or pairs of blocks, which then claim them.
    pub counts: bool,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        let mut kernels = Vec::new();
        for kernel in resources.kernels::<Arguments>()? {
            push(OP, &mut kernels, kernel)?;
        }
        let units = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        Ok(Kernels {
            kernels,
            multiprocessors: resources.primary.attribute(OP, units)? as usize,
        })
    }

    /// How logits are run whose vectors are aligned; not without a gradient, which is what a
    /// second look at them is for, nor with a softcap.
    pub fn plan(&self, p: &Problem) -> Option<Plan<'_>> {
        let bytes = p.vocab() * p.logits.dtype.size();
        let suits = p.dlogits.is_some() && p.softcap == 0.0 && bytes >= MIN_BYTES;
        let blocks = if bytes > PAIR_BYTES { 2 } else { 1 };
        let mut kernels = self.kernels.iter().filter(|_| suits);
        let kernel = kernels.find(|kernel| {
            let choices = kernel.choices;
            choices.dtype == p.logits.dtype as u32 && choices.blocks == blocks
        })?;
        let at_once = (self.multiprocessors / blocks as usize).max(1);
        Some(Plan {
            kernel,
            blocks: blocks * p.num_tokens().min(at_once) as u32,
            counts: p.num_tokens() > at_once,
        })
    }
}

impl Plan<'_> {
    /// Queues the losses and the gradients of a launch's tokens.
    ///
    /// # Safety
    /// The problem's tensors have the rows that the launch describes, in aligned vectors; `losses`
    /// have one for each, `denominator` is a number, and `counter` has [`claims::COUNTER`] bytes
    /// where the plan counts. The stream is live.
    pub unsafe fn launch(
        &self,
        cuda: &Cuda,
        p: &Problem,
        launch: &Launch<3>,
        [losses, denominator]: [Option<&RawTensor>; 2],
        counter: *mut u8,
        stream: Stream,
    ) -> Result<()> {
        let at =
            |t: &RawTensor, i: usize| (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64;
        let sizes = [p.logits.dtype, p.logits.dtype, p.targets.dtype].map(|dtype| dtype.size());
        let stride = |dim: usize, i: usize| (launch.strides[dim][i] * sizes[i]) as i64;
        let optional = |t: Option<&RawTensor>| t.map_or(0, |t| t.ptr.addr() as u64);
        let [size_1, size_2] = launch.divisors();
        let arguments = Arguments {
            logits: at(&p.logits, 0),
            targets: at(&p.targets, 2),
            dlogits: p.dlogits.map_or(0, |t| at(&t, 1)),
            losses: optional(losses),
            lses: optional(p.lse.as_ref()),
            dloss: optional(p.dloss.as_ref()),
            denominator: optional(denominator),
            counter: if self.counts {
                counter.addr() as u64
            } else {
                0
            },
            launch_tag: if self.counts { claims::tag() } else { 0 },
            ignore_index: p.ignore_index,
            logits_0: stride(0, 0),
            logits_1: stride(1, 0),
            logits_2: stride(2, 0),
            dlogits_0: stride(0, 1),
            dlogits_1: stride(1, 1),
            dlogits_2: stride(2, 1),
            targets_0: stride(0, 2),
            targets_1: stride(1, 2),
            targets_2: stride(2, 2),
            tokens: launch.num_rows() as u32,
            length: (p.vocab() * sizes[0] / VECTOR) as u32,
            wide_targets: u32::from(p.targets.dtype == DType::I64),
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            label_smoothing: p.label_smoothing,
            spread: p.label_smoothing / p.vocab() as f32,
            z_loss: p.z_loss,
        };
        // SAFETY: the caller's promise.
        unsafe { cuda.launch(OP, self.kernel, self.blocks, &arguments, stream) }
    }
}
