//! Cross-entropy on the GPU: a launch that counts tokens where the mean needs it, one for the tokens,
//! one that adds their losses.

mod parts;
mod ring;

use super::device::Resources;
use super::images::{cross_entropy, cross_entropy_sums};
use super::rows::{Launch, Rows};
use super::table::Table;
use super::{Cuda, Run, VECTOR, check_blocks, is_aligned};
use crate::backend::{Implementation, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::problem::cross_entropy::{Problem, Reduction, Targets, Total};
use crate::problem::{Plan, Plans};
use crate::tensor::{RawTensor, Scratch, Workspace};

const OP: &str = "cross_entropy";

/// The kernels of the tokens, by dtype and elements per access, and that of sums.
pub(super) struct Kernels {
    tokens: Table<cross_entropy::Arguments, 2>,
    sums: Table<cross_entropy_sums::Arguments, 0>,
    ring: ring::Kernels,
    parts: parts::Kernels,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Ok(Kernels {
        tokens: Table::<cross_entropy::Arguments, 2>::new(OP, resources, |c| [c.dtype, c.width])?,
        sums: Table::<cross_entropy_sums::Arguments, 0>::new(OP, resources, |_| [])?,
        ring: ring::Kernels::new(resources)?,
        parts: parts::Kernels::new(resources)?,
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

    /// Bytes of the workspace's parts: the number of tokens that count, the counter from which blocks take tokens, losses.
    fn sizes(&self) -> [usize; 3] {
        let losses = usize::from(self.keeps_losses()) * size_of::<f32>();
        let counter = self.ring().is_some_and(|ring| ring.counts);
        [
            usize::from(self.counts()) * Workspace::ALIGNMENT,
            usize::from(counter) * Workspace::ALIGNMENT,
            losses.saturating_mul(self.problem.num_tokens()),
        ]
    }

    /// Elements of a vector, and whether rows are made of whole ones.
    fn vectors(&self) -> (usize, bool) {
        let p = &self.problem;
        let vector = VECTOR / p.logits.dtype.size();
        let rows = [0, 1].iter().all(|t| self.rows.aligned_to_of(*t, vector));
        (vector, rows && p.vocab().is_multiple_of(vector))
    }

    /// How the kernels for Hopper would run it. Data pointers are not looked at.
    fn ring(&self) -> Option<ring::Plan<'_>> {
        let (_, fits) = self.vectors();
        let ring = &self.cuda.cross_entropy.ring;
        ring.plan(&self.problem).filter(|_| fits)
    }

    /// What is looked for in the targets of all tokens.
    fn targets(&self, count: Option<RawTensor>) -> Targets {
        Targets {
            targets: self.problem.targets,
            vocab: self.problem.vocab(),
            ignore_index: self.problem.ignore_index,
            count,
        }
    }

    fn tokens(
        &self,
        launch: &Launch<3>,
        losses: Option<&RawTensor>,
        denominator: Option<&RawTensor>,
        counter: *mut u8,
        stream: Stream,
    ) -> Result<()> {
        let p = &self.problem;
        let (vector, fits) = self.vectors();
        let fits = fits
            && is_aligned(&p.logits, vector)
            && p.dlogits.is_none_or(|t| is_aligned(&t, vector));
        if let Some(ring) = self.ring().filter(|_| fits) {
            let numbers = [losses, denominator];
            // SAFETY: the problem was checked: its tensors have the rows that the launch describes. The workspace has the planned size,
            // so the counter is there if the plan wants one.
            return unsafe { ring.launch(self.cuda, p, launch, numbers, counter, stream) };
        }
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
        let optional = |t: Option<&RawTensor>| t.map_or(0, |t| t.ptr.addr() as u64);
        let logits = address(&p.logits, 0);
        let targets = address(&p.targets, 2);
        let [size_1, size_2] = launch.divisors();
        let arguments = cross_entropy::Arguments {
            logits,
            plain: logits,
            targets,
            targets_i64: targets,
            dlogits: p.dlogits.map_or(0, |t| address(&t, 1)),
            losses: optional(losses),
            lses: optional(p.lse.as_ref()),
            dloss: optional(p.dloss.as_ref()),
            denominator: optional(denominator),
            length: (p.vocab() / width) as u32,
            wide_targets: u32::from(p.targets.dtype == DType::I64),
            ignore_index: p.ignore_index,
            label_smoothing: p.label_smoothing,
            spread: p.label_smoothing / p.vocab() as f32,
            z_loss: p.z_loss,
            softcap: p.softcap,
            has_dlogits: u32::from(p.dlogits.is_some()),
            has_losses: u32::from(losses.is_some()),
            has_lse: u32::from(p.lse.is_some()),
            has_dloss: u32::from(p.dloss.is_some()),
            has_denominator: u32::from(denominator.is_some()),
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

impl Run for Targets {
    fn check(&self) -> Result<()> {
        let targets = &self.targets.layout;
        check_tokens("targets", targets.num_elements())?;
        if self.rows().launches().count() > 1 {
            let strides = targets.strides();
            let problem = text!("has strides {strides:?}, of which no three describe the tokens");
            return Err(Error::unsupported(OP, "targets", problem));
        }
        Ok(())
    }

    /// The values of targets are not looked at: one that is no column makes its token's loss NaN.
    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let Some(count) = &self.count else {
            return Ok(());
        };
        let kernel = cuda.cross_entropy.sums.get([])?;
        for launch in self.rows().launches().take(1) {
            let [size_1, size_2] = launch.divisors();
            let targets = self.targets.ptr.addr() as u64;
            let arguments = cross_entropy_sums::Arguments {
                targets,
                targets_i64: targets,
                out: count.ptr.addr() as u64,
                tokens: self.targets.layout.num_elements() as u32,
                counts: 1,
                wide_targets: u32::from(self.targets.dtype == DType::I64),
                ignore_index: self.ignore_index,
                size_1: size_1.size,
                size_1_multiplier: size_1.multiplier,
                size_1_shift: size_1.shift,
                size_2: size_2.size,
                size_2_multiplier: size_2.multiplier,
                size_2_shift: size_2.shift,
                targets_0: launch.strides[0][0] as u64,
                targets_1: launch.strides[1][0] as u64,
                targets_2: launch.strides[2][0] as u64,
                ..cross_entropy_sums::Arguments::ZERO
            };
            // SAFETY: the problem was checked: its tensors are what the arguments describe.
            unsafe { cuda.launch(OP, kernel, 1, &arguments, stream) }?;
        }
        Ok(())
    }
}

impl Targets {
    fn rows(&self) -> Rows<1> {
        // Without tokens there are no rows; the count is stored as if there was one.
        let leading = match self.targets.layout.is_empty() {
            true => 0,
            false => self.targets.layout.rank(),
        };
        Rows::of_dims(leading, [&self.targets.layout])
    }
}

impl Run for Total {
    fn check(&self) -> Result<()> {
        check_tokens("losses", self.losses.layout.num_elements())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let kernel = cuda.cross_entropy.sums.get([])?;
        let arguments = cross_entropy_sums::Arguments {
            losses: self.losses.ptr.addr() as u64,
            denominator: self.denominator.map_or(0, |t| t.ptr.addr() as u64),
            out: self.loss.ptr.addr() as u64,
            tokens: self.losses.layout.num_elements() as u32,
            has_denominator: u32::from(self.denominator.is_some()),
            ..cross_entropy_sums::Arguments::ZERO
        };
        // SAFETY: the problem was checked: its tensors are what the arguments describe.
        unsafe { cuda.launch(OP, kernel, 1, &arguments, stream) }
    }
}

/// Losses are numbered in 32 bits.
fn check_tokens(tensor: &'static str, tokens: usize) -> Result<()> {
    if tokens <= i32::MAX as usize {
        return Ok(());
    }
    let problem = text!("has {tokens} tokens, the CUDA backend takes {}", i32::MAX);
    Err(Error::unsupported(OP, tensor, problem))
}

impl Plan for Ready<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn needed(&self) -> usize {
        let sum = |sum: usize, size| sum.saturating_add(size);
        self.sizes().into_iter().fold(0, sum)
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let number = |ptr: *mut u8, len: usize| -> Result<RawTensor> {
            Ok(RawTensor {
                ptr,
                dtype: DType::F32,
                layout: Layout::contiguous(&[len])?,
            })
        };
        let mut denominator = p.denominator;
        if self.counts() {
            let count = number(scratch.ptr, 1)?;
            denominator = Some(count);
            self.targets(Some(count)).run(self.cuda, stream)?;
        }
        let [count, counter, _] = self.sizes();
        let counter_at = scratch.ptr.wrapping_add(count);
        let losses = match self.keeps_losses() {
            true => {
                let at = counter_at.wrapping_add(counter);
                Some(number(at, p.num_tokens())?)
            }
            false => p.losses,
        };
        if p.num_tokens() > 0 {
            for launch in self.rows.launches().take(1) {
                let (losses, denominator) = (losses.as_ref(), denominator.as_ref());
                self.tokens(&launch, losses, denominator, counter_at, stream)?;
            }
        }
        if let (Some(loss), Some(losses)) = (p.loss, losses) {
            let total = Total {
                losses,
                denominator,
                loss,
            };
            total.run(self.cuda, stream)?;
        }
        Ok(())
    }
}
