//! Cross-entropy on the CPU: tokens in parallel, their logits read twice or, for a gradient, three
//! times, in blocks that stay on the stack.

mod parts;

use std::ops::Range;

use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::math;
use crate::cpu::rows::{Integers, part_of, part_of_mut, row_of_mut};
use crate::cpu::{Cpu, Run};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::problem::cross_entropy::{Problem, Reduction, Targets, Total};
use crate::tensor::{RawTensor, Scratch};

/// Partial sums of a token, so that loops vectorise and large vocabularies lose less to rounding.
pub(super) const LANES: usize = 16;

/// Elementary operations per logit: an exponential in two passes.
const COST: usize = 24;

impl Run for Problem {
    fn needed(&self) -> usize {
        // The losses that are added, where the caller does not want them.
        match self.loss.is_some() && self.losses.is_none() {
            true => self.num_tokens().saturating_mul(size_of::<f32>()),
            false => 0,
        }
    }

    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()> {
        // SAFETY: checked to be integers, and whoever made the tensor has promised that it is
        // initialised memory which nobody writes during the call.
        let targets = unsafe { Integers::new(&self.targets) };
        let num_valid = num_valid(targets, self.vocab(), self.ignore_index)?;
        let denominator = match (self.reduction, &self.denominator) {
            (Reduction::Sum, _) => 1.0,
            (Reduction::Mean, None) => num_valid.max(1) as f32,
            // SAFETY: a checked f32.
            (Reduction::Mean, Some(given)) => unsafe { number(given) },
        };
        // SAFETY: as above.
        let dloss = self.dloss.as_ref().map_or(1.0, |d| unsafe { number(d) });
        let losses = match (&self.losses, &self.loss) {
            (None, Some(_)) => Some(RawTensor {
                ptr: scratch.ptr,
                dtype: DType::F32,
                layout: Layout::contiguous(&[self.num_tokens()])?,
            }),
            (losses, _) => *losses,
        };
        with_float!(self.logits.dtype, T => {
            let cost = self.vocab().saturating_mul(COST);
            cpu.for_each_range(self.num_tokens(), cost, |range| {
                cpu.vectorize(#[inline(always)] || {
                    for token in range.clone() {
                        // SAFETY: a token of the checked tensors, which no other thread has.
                        unsafe {
                            let target = targets.get(token);
                            one_token::<T>(self, token, target, dloss / denominator, &losses);
                        }
                    }
                });
            });
        });
        if let (Some(loss), Some(losses)) = (&self.loss, &losses) {
            add(losses, denominator, loss)?;
        }
        Ok(())
    }
}

impl Run for Targets {
    fn run(&self, _: &Cpu, _: Scratch) -> Result<()> {
        // SAFETY: as above.
        let targets = unsafe { Integers::new(&self.targets) };
        let count = num_valid(targets, self.vocab, self.ignore_index)?.max(1) as f32;
        if let Some(to) = &self.count {
            // SAFETY: a checked f32.
            unsafe { to.ptr.cast::<f32>().write(count) };
        }
        Ok(())
    }
}

impl Run for Total {
    fn run(&self, _: &Cpu, _: Scratch) -> Result<()> {
        // SAFETY: a checked f32.
        let denominator = self.denominator.as_ref().map(|d| unsafe { number(d) });
        add(&self.losses, denominator.unwrap_or(1.0), &self.loss)
    }
}

/// Refuses targets that are no column; how many are not ignored.
fn num_valid(targets: Integers<'_>, vocab: usize, ignored: i64) -> Result<usize> {
    let mut num_valid = 0;
    for i in 0..targets.len() {
        let target = targets.get(i);
        if target == ignored {
            continue;
        }
        if !(0..vocab as i64).contains(&target) {
            let problem = text!(
                "has {target} at index {i}, allowed: 0 to {}, and {ignored} to ignore the token",
                vocab - 1
            );
            return Err(Error::invalid("cross_entropy", "targets", problem));
        }
        num_valid += 1;
    }
    Ok(num_valid)
}

/// Stores the sum of losses, which have been written, over a denominator.
fn add(losses: &RawTensor, denominator: f32, loss: &RawTensor) -> Result<()> {
    // SAFETY: contiguous, an element for each token.
    let all = unsafe { row_of_mut::<f32>(&flat(losses)?, 0, losses.layout.num_elements()) };
    let sum: f64 = all.iter().map(|loss| f64::from(*loss)).sum();
    // SAFETY: a single element.
    unsafe {
        let loss = loss.ptr.cast::<f32>();
        loss.write((sum / f64::from(denominator)) as f32);
    }
    Ok(())
}

/// # Safety
/// The tensor is one f32 that is there.
unsafe fn number(tensor: &RawTensor) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { tensor.ptr.cast::<f32>().read() }
}

/// A contiguous tensor as one row.
fn flat(tensor: &RawTensor) -> Result<RawTensor> {
    Ok(RawTensor {
        layout: Layout::contiguous(&[tensor.layout.num_elements()])?,
        ..*tensor
    })
}

/// What is known of a token once its logits have been read.
#[derive(Clone, Copy)]
struct Sums {
    /// The greatest of the logits, after the softcap.
    peak: f32,
    /// Of the distances from it.
    exponentials: f32,
    /// Of the logits, after the softcap.
    total: f32,
    /// That of the target; zero where it is elsewhere.
    target: f32,
}

impl Sums {
    fn lse(&self) -> f32 {
        self.peak + self.exponentials.ln()
    }

    /// The loss, of a vocabulary of as many logits.
    fn loss(&self, p: &Problem, vocab: usize) -> f32 {
        let (lse, spread) = (self.lse(), p.label_smoothing / vocab as f32);
        // Logits may be minus infinity where no probability is spread over them.
        let smooth = if spread > 0.0 {
            spread * self.total
        } else {
            0.0
        };
        lse - (1.0 - p.label_smoothing) * self.target - smooth + p.z_loss * lse * lse
    }
}

/// # Safety
/// `token` is a row of the checked tensors, whose logits are T and which nobody else has.
#[inline(always)]
unsafe fn one_token<T: Float>(
    p: &Problem,
    token: usize,
    target: i64,
    scale: f32,
    losses: &Option<RawTensor>,
) {
    let vocab = p.vocab();
    let ignored = target == p.ignore_index;
    let (mut loss, mut lse) = (0.0, 0.0);
    if ignored {
        // SAFETY: the caller's promise.
        unsafe { clear::<T>(p, token) };
    } else {
        // SAFETY: the caller's promise.
        let sums = unsafe { sums_of::<T>(p, token, target as usize) };
        (loss, lse) = (sums.loss(p, vocab), sums.lse());
        // SAFETY: the caller's promise.
        unsafe { differentiate::<T>(p, vocab, token, target as usize, lse, scale) };
    }
    // SAFETY: the caller's promise.
    unsafe { store([(losses, loss), (&p.lse, lse)], token) };
}

/// Writes what is wanted of a token's numbers.
///
/// # Safety
/// The tensors are contiguous f32 with an element for each token, which nobody else has.
unsafe fn store(numbers: [(&Option<RawTensor>, f32); 2], token: usize) {
    for (tensor, value) in numbers {
        if let Some(tensor) = tensor {
            // SAFETY: the caller's promise.
            unsafe { tensor.ptr.cast::<f32>().add(token).write(value) };
        }
    }
}

/// Zeros, for a token that is ignored.
///
/// # Safety
/// As [`one_token`].
#[inline(always)]
unsafe fn clear<T: Float>(p: &Problem, token: usize) {
    let Some(dlogits) = &p.dlogits else { return };
    for columns in blocks(p.vocab()) {
        let zeros = &[0.0; BLOCK][..columns.len()];
        // SAFETY: columns of the token's row.
        T::store(zeros, unsafe { part_of_mut::<T>(dlogits, token, columns) });
    }
}

/// # Safety
/// As [`one_token`].
#[inline(always)]
unsafe fn sums_of<T: Float>(p: &Problem, token: usize, target: usize) -> Sums {
    let mut block = [0.0; BLOCK];
    let (mut peaks, mut totals) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
    let mut of_target = 0.0;
    for columns in blocks(p.vocab()) {
        let z = &mut block[..columns.len()];
        // SAFETY: columns of the token's row.
        unsafe { load::<T>(p, token, &columns, z) };
        if columns.contains(&target) {
            of_target = z[target - columns.start];
        }
        for chunk in z.chunks(LANES) {
            for ((peak, total), z) in peaks.iter_mut().zip(&mut totals).zip(chunk) {
                *peak = peak.max(*z);
                *total += z;
            }
        }
    }
    // Below every logit but minus infinity, from which it has a distance.
    let peak = peaks.iter().copied().fold(f32::MIN, f32::max);
    let mut sums = [0.0; LANES];
    for columns in blocks(p.vocab()) {
        let z = &mut block[..columns.len()];
        // SAFETY: as above.
        unsafe { load::<T>(p, token, &columns, z) };
        for chunk in z.chunks(LANES) {
            for (sum, z) in sums.iter_mut().zip(chunk) {
                *sum += math::exp(z - peak);
            }
        }
    }
    Sums {
        peak,
        exponentials: sums.iter().sum(),
        total: totals.iter().sum(),
        target: of_target,
    }
}

/// Writes the gradient, if it is wanted, of logits of a vocabulary of as many.
///
/// # Safety
/// As [`one_token`].
#[inline(always)]
unsafe fn differentiate<T: Float>(
    p: &Problem,
    vocab: usize,
    token: usize,
    target: usize,
    lse: f32,
    scale: f32,
) {
    let Some(dlogits) = &p.dlogits else { return };
    let mut block = [0.0; BLOCK];
    let factor = 1.0 + 2.0 * p.z_loss * lse;
    let spread = p.label_smoothing / vocab as f32;
    for columns in blocks(p.vocab()) {
        let z = &mut block[..columns.len()];
        // SAFETY: columns of the token's row; the gradient, which may be the same memory, is
        // borrowed after these were read.
        unsafe { load::<T>(p, token, &columns, z) };
        let of_target = columns.contains(&target).then(|| target - columns.start);
        let slope = |s: f32| match p.softcap > 0.0 {
            true => 1.0 - (s / p.softcap) * (s / p.softcap),
            false => 1.0,
        };
        let at_target = of_target.map(|i| {
            let probability = math::exp(z[i] - lse) * factor;
            (
                i,
                scale * (probability - (1.0 - p.label_smoothing) - spread) * slope(z[i]),
            )
        });
        for z in z.iter_mut() {
            *z = scale * (math::exp(*z - lse) * factor - spread) * slope(*z);
        }
        if let Some((i, gradient)) = at_target {
            z[i] = gradient;
        }
        // SAFETY: as above.
        T::store(z, unsafe { part_of_mut::<T>(dlogits, token, columns) });
    }
}

/// Columns of a token's logits, after the softcap.
///
/// # Safety
/// As [`one_token`], and the columns lie in the row.
#[inline(always)]
unsafe fn load<T: Float>(p: &Problem, token: usize, columns: &Range<usize>, z: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { load_capped::<T>(&p.logits, p.softcap, token, columns, z) };
}

/// Columns of a row of logits, after a softcap; 0 for none.
///
/// # Safety
/// They are of the checked tensor, whose elements are T, and nobody writes them.
#[inline(always)]
pub(super) unsafe fn load_capped<T: Float>(
    logits: &RawTensor,
    softcap: f32,
    row: usize,
    columns: &Range<usize>,
    z: &mut [f32],
) {
    // SAFETY: the caller's promise.
    T::load(unsafe { part_of::<T>(logits, row, columns.clone()) }, z);
    if softcap > 0.0 {
        z.iter_mut()
            .for_each(|z| *z = softcap * math::tanh(*z / softcap));
    }
}
