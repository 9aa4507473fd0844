//! A sum of all ranks and its RMSNorm on GPUs. Few rows of a group that has slots are one launch; where ranks divide the rows and have
//! them in windows, they exchange their parts, which one launch adds up and normalises; all else is NCCL's sum, and the norm behind it.

use super::collective::{Comm, Slots};
use super::device::{Kernel, Resources};
use super::images::all_reduce_rms_norm::Arguments;
use super::images::sum_rms_norm::Arguments as OfParts;
use super::{Cuda, Run, VECTOR, check_blocks, is_aligned};
use crate::alloc::push;
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::collective::{Kind, Normalised, Problem};
use crate::tensor::RawTensor;

const OP: &str = "all_reduce_rms_norm";

/// Those for fewest ranks and shortest rows first.
pub(super) struct Kernels {
    by_slots: Vec<Kernel<Arguments>>,
    of_parts: Vec<Kernel<OfParts>>,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let (mut by_slots, mut of_parts) = (Vec::new(), Vec::new());
    for kernel in resources.kernels::<Arguments>()? {
        push(OP, &mut by_slots, kernel)?;
    }
    by_slots.sort_by_key(|kernel| (kernel.choices.ranks, kernel.choices.lines));
    for kernel in resources.kernels::<OfParts>()? {
        push(OP, &mut of_parts, kernel)?;
    }
    of_parts.sort_by_key(|kernel| kernel.choices.vectors);
    Ok(Kernels { by_slots, of_parts })
}

impl Kernels {
    /// That for rows of so many bytes, if they are not too long and divide into vectors.
    fn of_parts(&self, dtype: DType, row_bytes: usize) -> Option<&Kernel<OfParts>> {
        let vectors = row_bytes / VECTOR;
        let mut kernels = self.of_parts.iter();
        let found = kernels.find(|kernel| {
            kernel.choices.dtype == dtype as u32 && vectors <= kernel.choices.vectors as usize
        });
        found.filter(|_| row_bytes.is_multiple_of(VECTOR))
    }

    fn of(&self, dtype: DType, ranks: u32, row_lines: u32) -> Result<&Kernel<Arguments>> {
        let mut kernels = self.by_slots.iter();
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
        if let Some(gathered) = &self.gathered {
            match self.exchanged(cuda, gathered) {
                Some((exchanged, kernel)) => {
                    self.sum.transport.launch(&exchanged, stream)?;
                    self.add_parts(cuda, gathered, kernel, stream)?;
                }
                None => {
                    self.sum.run(cuda, stream)?;
                    self.norm.run(cuda, stream)?;
                }
            }
            return self.sum.transport.launch(gathered, stream);
        }
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
    /// The exchange of parts in place of their sum, and what adds them up: where both tensors are in windows, and apart. All ranks
    /// find the same.
    fn exchanged<'a>(
        &'a self,
        cuda: &'a Cuda,
        gathered: &Problem<'a>,
    ) -> Option<(Problem<'a>, &'a Kernel<OfParts>)> {
        let exchanged = Problem {
            kind: Kind::AllToAll,
            out: gathered.out,
            ..self.sum.problem
        };
        let (x, out) = (exchanged.x?, exchanged.out?);
        let fits = x.ptr != out.ptr
            && is_aligned(&out, VECTOR / out.dtype.size())
            && self.sum.transport.by_copies(&exchanged);
        let kernel = fits.then(|| cuda.all_reduce_rms_norm.of_parts(x.dtype, self.row_bytes()));
        Some((exchanged, kernel.flatten()?))
    }

    /// Adds up and normalises this rank's rows of all parts, which lie in the output: each row of the sum takes the place of one of
    /// its own parts.
    fn add_parts(
        &self,
        cuda: &Cuda,
        gathered: &Problem<'_>,
        kernel: &Kernel<OfParts>,
        stream: Stream,
    ) -> Result<()> {
        let norm = &self.norm;
        let rows = norm.x.layout.num_rows();
        if norm.x.layout.is_empty() {
            return Ok(());
        }
        let address = |t: Option<RawTensor>| t.map_or(0, |t| t.ptr.addr() as u64);
        let row_vectors = self.row_bytes() / VECTOR;
        let mut residual = norm.residual.iter().flat_map(|(r, out)| [r, out]);
        let aligned = residual.all(|t| is_aligned(t, VECTOR / t.dtype.size()));
        let arguments = OfParts {
            parts: address(gathered.out),
            residual: address(norm.residual.map(|(residual, _)| residual)),
            weight: address(norm.weight),
            out: norm.out.ptr.addr() as u64,
            residual_out: address(norm.residual.map(|(_, out)| out)),
            part_vectors: (rows * row_vectors) as u64,
            num_parts: self.sum.transport.size() as u32,
            row_vectors: row_vectors as u32,
            aligned: u32::from(aligned),
            weight_dtype: norm.weight.map_or(0, |w| w.dtype as u32),
            weight_offset: norm.weight_offset,
            epsilon: norm.epsilon,
        };
        let blocks = check_blocks(OP, "x", rows)?;
        // SAFETY: the problem was checked: tensors are contiguous rows as the arguments say, and the output has those of every rank.
        unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }
    }

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
