//! Cross-entropy on the GPU: a launch that counts tokens where the mean needs it, one for the tokens,
//! one that adds their losses.

use super::device::Resources;
use super::images::{cross_entropy, cross_entropy_sums};
use super::rows::{Launch, Rows};
use super::table::Table;
use super::{Cuda, VECTOR, check_blocks, is_aligned};
use crate::backend::{Implementation, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::cross_entropy::{Problem, Reduction};
use crate::problem::{Plan, Plans};
use crate::tensor::{RawTensor, Scratch, Workspace};

const OP: &str = "cross_entropy";

/// The kernels of the tokens, by dtype and elements per access, and that of sums.
pub(super) struct Kernels {
    tokens: Table<cross_entropy::Arguments, 2>,
    sums: Table<cross_entropy_sums::Arguments, 0>,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Ok(Kernels {
        tokens: Table::<cross_entropy::Arguments, 2>::new(OP, resources, |c| [c.dtype, c.width])?,
        sums: Table::<cross_entropy_sums::Arguments, 0>::new(OP, resources, |_| [])?,
    })
}

/// A problem that waits to be queued.
pub(crate) struct Ready<'a> {
    cuda: &'a Cuda,
    problem: Problem,
    /// Rows of logits and of their gradient, and targets.
    rows: Rows<3>,
}

impl Plans<Problem> for Cuda {
    type Plan<'a> = Ready<'a>;

    fn plan(&self, problem: Problem) -> Result<Ready<'_>> {
        // Without tokens there are no rows; the sums are stored as if there was one.
        let leading = match problem.num_tokens() {
            0 => 0,
            _ => problem.targets.layout.rank(),
        };
        let dlogits = problem.dlogits.unwrap_or(problem.logits);
        let tensors = [&problem.logits, &dlogits, &problem.targets];
        let rows = Rows::of_dims(leading, tensors.map(|t| &t.layout));
        check_blocks(OP, "logits", rows.rows_per_launch())?;
        // Losses are numbered in 32 bits, whatever the launches.
        for (what, size) in [
            ("tokens", problem.num_tokens()),
            ("columns", problem.vocab()),
        ] {
            if size > i32::MAX as usize {
                let problem = text!("has {size} {what}, the CUDA backend takes {}", i32::MAX);
                return Err(Error::unsupported(OP, "logits", problem));
            }
        }
        // The targets are counted by one launch.
        if rows.launches().count() > 1 {
            let problem = text!(
                "has strides {:?}, of which no three describe the tokens",
                problem.logits.layout.strides()
            );
            return Err(Error::unsupported(OP, "logits", problem));
        }
        Ok(Ready {
            cuda: self,
            problem,
            rows,
        })
    }
}

impl Ready<'_> {
    /// Whether tokens are counted for the mean.
    fn counts(&self) -> bool {
        let p = &self.problem;
        p.reduction == Reduction::Mean
            && p.denominator.is_none()
            && (p.loss.is_some() || p.dlogits.is_some())
    }

    /// Whether losses are added that the caller does not want.
    fn keeps_losses(&self) -> bool {
        self.problem.loss.is_some() && self.problem.losses.is_none()
    }

    fn count_bytes(&self) -> usize {
        usize::from(self.counts()) * Workspace::ALIGNMENT
    }

    /// The number of tokens that count, or the sum of the losses.
    fn sum(&self, launch: &Launch<3>, of: Sum, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let kernel = self.cuda.cross_entropy.sums.get([])?;
        let targets = p.targets.ptr.addr() + launch.offsets[2] * p.targets.dtype.size();
        let [size_1, size_2] = launch.divisors();
        let arguments = cross_entropy_sums::Arguments {
            targets: targets as u64,
            targets_i64: targets as u64,
            losses: of.losses,
            denominator: of.denominator,
            out: of.out,
            tokens: p.num_tokens() as u32,
            counts: u32::from(of.counts),
            wide_targets: u32::from(p.targets.dtype == DType::I64),
            has_denominator: u32::from(of.denominator != 0),
            ignore_index: p.ignore_index,
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            targets_0: launch.strides[0][2] as u64,
            targets_1: launch.strides[1][2] as u64,
            targets_2: launch.strides[2][2] as u64,
        };
        // SAFETY: the problem was checked: its tensors are what the arguments describe.
        unsafe { self.cuda.launch(OP, kernel, 1, &arguments, stream) }
    }

    fn tokens(&self, launch: &Launch<3>, at: Addresses, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let vector = VECTOR / p.logits.dtype.size();
        let fits = p.vocab().is_multiple_of(vector)
            && [0, 1].iter().all(|t| self.rows.aligned_to_of(*t, vector))
            && is_aligned(&p.logits, vector)
            && p.dlogits.is_none_or(|t| is_aligned(&t, vector));
        let width = if fits { vector } else { 1 };
        let kernel = self
            .cuda
            .cross_entropy
            .tokens
            .get([p.logits.dtype as u32, width as u32])?;
        let address =
            |t: &RawTensor, i: usize| (t.ptr.addr() + launch.offsets[i] * t.dtype.size()) as u64;
        let stride = |dim: usize, i: usize| {
            let per_access = if i == 2 { 1 } else { width };
            (launch.strides[dim][i] / per_access) as u64
        };
        let optional = |t: &Option<RawTensor>| t.map_or(0, |t| t.ptr.addr() as u64);
        let logits = address(&p.logits, 0);
        let targets = address(&p.targets, 2);
        let [size_1, size_2] = launch.divisors();
        let arguments = cross_entropy::Arguments {
            logits,
            plain: logits,
            targets,
            targets_i64: targets,
            dlogits: p.dlogits.map_or(0, |t| address(&t, 1)),
            losses: at.losses,
            lses: optional(&p.lse),
            dloss: optional(&p.dloss),
            denominator: at.denominator,
            length: (p.vocab() / width) as u32,
            wide_targets: u32::from(p.targets.dtype == DType::I64),
            ignore_index: p.ignore_index,
            label_smoothing: p.label_smoothing,
            spread: p.label_smoothing / p.vocab() as f32,
            z_loss: p.z_loss,
            softcap: p.softcap,
            has_dlogits: u32::from(p.dlogits.is_some()),
            has_losses: u32::from(at.losses != 0),
            has_lse: u32::from(p.lse.is_some()),
            has_dloss: u32::from(p.dloss.is_some()),
            has_denominator: u32::from(at.denominator != 0),
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            logits_0: stride(0, 0),
            logits_1: stride(1, 0),
            logits_2: stride(2, 0),
            dlogits_0: stride(0, 1),
            dlogits_1: stride(1, 1),
            dlogits_2: stride(2, 1),
            targets_0: stride(0, 2),
            targets_1: stride(1, 2),
            targets_2: stride(2, 2),
            ..cross_entropy::Arguments::ZERO
        };
        let blocks = check_blocks(OP, "logits", launch.num_rows())?;
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { self.cuda.launch(OP, kernel, blocks, &arguments, stream) }
    }
}

/// Where the launches find each other's results; 0 for what is not there.
#[derive(Clone, Copy)]
struct Addresses {
    losses: u64,
    denominator: u64,
}

struct Sum {
    counts: bool,
    losses: u64,
    denominator: u64,
    out: u64,
}

impl Plan for Ready<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn needed(&self) -> usize {
        let losses = usize::from(self.keeps_losses()) * size_of::<f32>();
        self.count_bytes() + losses.saturating_mul(self.problem.num_tokens())
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let workspace = scratch.ptr.addr() as u64;
        let given = p.denominator.map_or(0, |t| t.ptr.addr() as u64);
        let at = Addresses {
            losses: match self.keeps_losses() {
                true => workspace + self.count_bytes() as u64,
                false => p.losses.map_or(0, |t| t.ptr.addr() as u64),
            },
            denominator: if self.counts() { workspace } else { given },
        };
        for launch in self.rows.launches().take(1) {
            if self.counts() {
                let count = Sum {
                    counts: true,
                    losses: 0,
                    denominator: 0,
                    out: workspace,
                };
                self.sum(&launch, count, stream)?;
            }
            if p.num_tokens() > 0 {
                self.tokens(&launch, at, stream)?;
            }
            if let Some(loss) = &p.loss {
                let sum = Sum {
                    counts: false,
                    losses: at.losses,
                    denominator: at.denominator,
                    out: loss.ptr.addr() as u64,
                };
                self.sum(&launch, sum, stream)?;
            }
        }
        Ok(())
    }
}
