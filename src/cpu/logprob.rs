//! Log-probabilities on the CPU: tokens in parallel, their logits read twice or, for a gradient, three
//! times, in blocks that stay on the stack.

use std::ops::Range;

use crate::cpu::cross_entropy::{LANES, load_capped};
use crate::cpu::float::{BLOCK, Float, blocks, with_float};
use crate::cpu::math;
use crate::cpu::rows::{Integers, part_of_mut};
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::logprob::Problem;
use crate::tensor::{RawTensor, Scratch};

/// Elementary operations per logit: an exponential in two passes.
const COST: usize = 28;

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        // SAFETY: checked to be integers, and whoever made the tensor has promised that it is
        // initialised memory which nobody writes during the call.
        let ids = unsafe { Integers::new(&self.ids) };
        with_float!(self.logits.dtype, T => {
            let cost = self.vocab().saturating_mul(COST);
            cpu.for_each_range(self.num_tokens(), cost, |range| {
                cpu.vectorize(#[inline(always)] || {
                    for token in range.clone() {
                        // SAFETY: a token of the checked tensors, which no other thread has.
                        unsafe { one_token::<T>(self, token, ids.get(token)) };
                    }
                });
            });
        });
        Ok(())
    }
}

/// What is known of a token once its logits `s` have been read.
#[derive(Clone, Copy, Default)]
struct Sums {
    peak: f32,
    /// `ln(sum(exp(s - peak)))`.
    log_sum: f32,
    entropy: f32,
    /// Of the token's id.
    logprob: f32,
}

/// # Safety
/// `token` is a row of the checked tensors, whose logits are T and which nobody else has.
#[inline(always)]
unsafe fn one_token<T: Float>(p: &Problem, token: usize, id: i64) {
    let ignored = id == p.ignore_index;
    let mut sums = Sums::default();
    if !ignored {
        // SAFETY: the caller's promise.
        sums = unsafe { sums_of::<T>(p, token, id) };
    }
    for (tensor, value) in [
        (&p.logprobs, sums.logprob),
        (&p.entropy, sums.entropy),
        (&p.lse, sums.peak + sums.log_sum),
    ] {
        if let Some(tensor) = tensor {
            // SAFETY: contiguous, an element for each token.
            unsafe { tensor.ptr.cast::<f32>().add(token).write(value) };
        }
    }
    if p.differentiate {
        // SAFETY: contiguous, an element for each token.
        let of_token = |t: &RawTensor| unsafe { t.ptr.cast::<f32>().add(token).read() };
        let [dlogprob, dentropy] = [&p.dlogprobs, &p.dentropy].map(|t| match (t, ignored) {
            (Some(t), false) => of_token(t),
            _ => 0.0,
        });
        // SAFETY: the caller's promise.
        unsafe {
            differentiate::<T>(
                p,
                token,
                (!ignored).then_some(id),
                &sums,
                dlogprob,
                dentropy,
            )
        };
    }
}

/// # Safety
/// As [`one_token`].
#[inline(always)]
unsafe fn sums_of<T: Float>(p: &Problem, token: usize, id: i64) -> Sums {
    let mut block = [0.0; BLOCK];
    let mut peaks = [f32::NEG_INFINITY; LANES];
    let mut of_id = f32::NAN;
    for columns in blocks(p.vocab()) {
        let s = &mut block[..columns.len()];
        // SAFETY: columns of the token's row.
        unsafe { load::<T>(p, token, &columns, s) };
        if let Some(i) = index_in(&columns, id) {
            of_id = s[i];
        }
        for chunk in s.chunks(LANES) {
            for (peak, s) in peaks.iter_mut().zip(chunk) {
                *peak = peak.max(*s);
            }
        }
    }
    let peak = peaks.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (mut sums, mut weighted) = ([0.0; LANES], [0.0; LANES]);
    for columns in blocks(p.vocab()) {
        let s = &mut block[..columns.len()];
        // SAFETY: as above.
        unsafe { load::<T>(p, token, &columns, s) };
        for chunk in s.chunks(LANES) {
            for ((sum, weighted), s) in sums.iter_mut().zip(&mut weighted).zip(chunk) {
                let e = math::exp(s - peak);
                *sum += e;
                // A logit of minus infinity has no share.
                *weighted += if e > 0.0 { e * (s - peak) } else { 0.0 };
            }
        }
    }
    let (sum, weighted) = (sums.iter().sum::<f32>(), weighted.iter().sum::<f32>());
    let log_sum = sum.ln();
    Sums {
        peak,
        log_sum,
        entropy: log_sum - weighted / sum,
        logprob: (of_id - peak) - log_sum,
    }
}

/// Stores a token's gradient, zeros if it has no id, where its logits are.
///
/// # Safety
/// As [`one_token`].
#[inline(always)]
unsafe fn differentiate<T: Float>(
    p: &Problem,
    token: usize,
    id: Option<i64>,
    sums: &Sums,
    dlogprob: f32,
    dentropy: f32,
) {
    let mut block = [0.0; BLOCK];
    let (inverse, bend) = (1.0 / p.temperature, bend(p));
    for columns in blocks(p.vocab()) {
        let s = &mut block[..columns.len()];
        if let Some(id) = id {
            // SAFETY: columns of the token's row; the gradient, the same memory, is borrowed after
            // these were read.
            unsafe { load::<T>(p, token, &columns, s) };
            let of_id = index_in(&columns, id).map(|i| (i, s[i]));
            // Without a softcap a logit may be minus infinity.
            let slope = |s: f32| match bend > 0.0 {
                true => inverse * (1.0 - (s * bend) * (s * bend)),
                false => inverse,
            };
            for s in s.iter_mut() {
                let log_p = (*s - sums.peak) - sums.log_sum;
                let probability = math::exp(log_p);
                let surprise = if probability > 0.0 { log_p } else { 0.0 };
                let gradient = dlogprob + dentropy * (surprise + sums.entropy);
                *s = -probability * gradient * slope(*s);
            }
            if let Some((i, of_id)) = of_id {
                s[i] += dlogprob * slope(of_id);
            }
        } else {
            s.fill(0.0);
        }
        // SAFETY: as above.
        T::store(s, unsafe { part_of_mut::<T>(&p.logits, token, columns) });
    }
}

/// What a logit is multiplied by to be a share of the softcap; 0 without one.
fn bend(p: &Problem) -> f32 {
    match p.softcap > 0.0 {
        true => p.temperature / p.softcap,
        false => 0.0,
    }
}

/// Where an id is among columns.
#[inline(always)]
fn index_in(columns: &Range<usize>, id: i64) -> Option<usize> {
    let id = usize::try_from(id).ok()?;
    columns.contains(&id).then(|| id - columns.start)
}

/// Columns of a token's logits, after the softcap and over the temperature.
///
/// # Safety
/// As [`one_token`], and the columns lie in the row.
#[inline(always)]
unsafe fn load<T: Float>(p: &Problem, token: usize, columns: &Range<usize>, s: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe { load_capped::<T>(&p.logits, p.softcap, token, columns, s) };
    let inverse = 1.0 / p.temperature;
    s.iter_mut().for_each(|s| *s *= inverse);
}
