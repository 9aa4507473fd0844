//! A sum of all ranks and its RMSNorm on GPUs. Few rows of a group that has slots are one launch; all else is NCCL's sum, and the
//! norm behind it.

use super::collective::{Comm, Slots};
use super::device::{Kernel, Resources};
use super::images::all_reduce_rms_norm::Arguments;
use super::{Cuda, Run, is_aligned};
use crate::alloc::push;
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::collective::Normalised;
use crate::tensor::RawTensor;

const OP: &str = "all_reduce_rms_norm";

/// Those for fewest ranks and shortest rows first.
pub(super) struct Kernels(Vec<Kernel<Arguments>>);

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let mut kernels = Vec::new();
    for kernel in resources.kernels::<Arguments>()? {
        push(OP, &mut kernels, kernel)?;
    }
    kernels.sort_by_key(|kernel| (kernel.choices.ranks, kernel.choices.lines));
    Ok(Kernels(kernels))
}

impl Kernels {
    fn of(&self, dtype: DType, ranks: u32, row_lines: u32) -> Result<&Kernel<Arguments>> {
        let mut kernels = self.0.iter();
        let found = kernels.find(|kernel| {
            let of = kernel.choices;
            of.dtype == dtype as u32 && ranks <= of.ranks && row_lines <= of.lines
        });
        found.ok_or_else(|| Error::Internal {
            op: OP,
            message: text!("no kernel for {ranks} ranks and {row_lines} lines of {dtype}"),
        })
    }
}

impl Run for Normalised<'_, Comm> {
    fn check(&self) -> Result<()> {
        self.sum.check()?;
        self.norm.check()
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let x = &self.norm.x;
        let num_rows = x.layout.num_rows();
        // Only what is the same on all ranks may decide here: one that took the other way would wait for ever.
        match self.sum.transport.slots() {
            Some(slots) if Slots::fit(num_rows, self.row_bytes()) => {
                if x.layout.is_empty() {
                    return Ok(());
                }
                self.sum.transport.in_turn(OP, || {
                    let arguments = self.arguments(slots);
                    let Arguments {
                        ranks, row_lines, ..
                    } = arguments;
                    let kernel = cuda.all_reduce_rms_norm.of(x.dtype, ranks, row_lines)?;
                    // SAFETY: the problem was checked: tensors are contiguous rows as the arguments say, and the slots are the
                    // group's for as long as it lives.
                    unsafe { cuda.launch(OP, kernel, num_rows as u32, &arguments, stream) }
                })
            }
            _ => {
                self.sum.run(cuda, stream)?;
                self.norm.run(cuda, stream)
            }
        }
    }
}

impl Normalised<'_, Comm> {
    fn row_bytes(&self) -> usize {
        let x = &self.norm.x;
        x.layout.dim(x.layout.rank().saturating_sub(1)) * x.dtype.size()
    }

    fn arguments(&self, slots: &Slots) -> Arguments {
        let (norm, ranks) = (&self.norm, self.sum.transport);
        let x = self.sum.problem.x.unwrap_or(norm.x);
        let weight = norm.weight;
        // Elements that a thread has in one piece.
        let width = contract::rank_sums::LINE as usize / x.dtype.size();
        let residual = norm.residual.iter().flat_map(|(r, out)| [r, out]);
        let rows = [&x, &norm.out].into_iter().chain(residual);
        // Gains of another dtype are read one by one.
        let gains = weight.iter().filter(|w| w.dtype == x.dtype);
        let aligned = rows.chain(gains).all(|t| is_aligned(t, width));
        let address = |t: Option<RawTensor>| t.map_or(0, |t| t.ptr.addr() as u64);
        let [
            slots_0,
            slots_1,
            slots_2,
            slots_3,
            slots_4,
            slots_5,
            slots_6,
            slots_7,
        ] = slots.ranks;
        Arguments {
            x: x.ptr.addr() as u64,
            residual: address(norm.residual.map(|(residual, _)| residual)),
            weight: address(weight),
            out: norm.out.ptr.addr() as u64,
            residual_out: address(norm.residual.map(|(_, out)| out)),
            slots_0,
            slots_1,
            slots_2,
            slots_3,
            slots_4,
            slots_5,
            slots_6,
            slots_7,
            own_slots: slots.own,
            calls: slots.calls,
            aborted: slots.aborted(),
            rank: ranks.rank() as u32,
            ranks: ranks.size() as u32,
            row_lines: (self.row_bytes() / contract::rank_sums::LINE as usize) as u32,
            aligned: u32::from(aligned),
            weight_dtype: weight.map_or(x.dtype, |w| w.dtype) as u32,
            weight_offset: norm.weight_offset,
            epsilon: norm.epsilon,
        }
    }
}
