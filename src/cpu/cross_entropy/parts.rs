//! Cross-entropy of logits whose columns ranks divide, on the CPU.

use super::{COST, Sums, clear, differentiate, number, store, sums_of};
use crate::cpu::float::{Float, with_float};
use crate::cpu::math;
use crate::cpu::rows::Integers;
use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::cross_entropy::{Columns, Part, Problem, Reduction, SUMS, Whole};
use crate::tensor::{RawTensor, Scratch};

/// Runs `one` for every token with its target, and with its logits' type.
macro_rules! for_each_token {
    ($cpu:expr, $p:expr, |$token:ident, $target:ident, $t:ident| $one:expr) => {{
        // SAFETY: checked to be integers, and whoever made the tensor has promised that it is
        // initialised memory which nobody writes during the call.
        let targets = unsafe { Integers::new(&$p.targets) };
        with_float!($p.logits.dtype, $t => {
            let cost = $p.vocab().saturating_mul(COST).max(1);
            $cpu.for_each_range($p.num_tokens(), cost, |range| {
                $cpu.vectorize(#[inline(always)] || {
                    for $token in range.clone() {
                        let $target = targets.get($token);
                        $one
                    }
                });
            });
        });
    }};
}

impl Columns {
    /// Where a target is among the columns of this rank; behind them all if it is elsewhere.
    fn place(&self, target: i64) -> usize {
        (target as usize).wrapping_sub(self.begin)
    }
}

impl Run for Part {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        for_each_token!(cpu, self.of, |token, target, T| {
            // SAFETY: a token of the checked tensors, which no other thread has.
            unsafe { part::<T>(self, token, target) }
        });
        Ok(())
    }
}

/// # Safety
/// `token` is a row of the checked tensors, whose logits are T and which nobody else has.
#[inline(always)]
unsafe fn part<T: Float>(p: &Part, token: usize, target: i64) {
    let mut numbers = [0.0; SUMS];
    if target != p.of.ignore_index {
        // SAFETY: the caller's promise.
        let sums = unsafe { sums_of::<T>(&p.of, token, p.columns.place(target)) };
        numbers = [sums.peak, sums.exponentials, sums.total, sums.target];
    }
    // SAFETY: the token's row.
    unsafe { p.sums.ptr.cast::<[f32; SUMS]>().add(token).write(numbers) };
}

impl Run for Whole {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        let p = &self.of;
        // SAFETY: checked f32.
        let number = |t: &Option<RawTensor>| t.as_ref().map_or(1.0, |t| unsafe { number(t) });
        let denominator = match p.reduction {
            Reduction::Sum => 1.0,
            Reduction::Mean => number(&p.denominator),
        };
        let scale = number(&p.dloss) / denominator;
        for_each_token!(cpu, p, |token, target, T| {
            // SAFETY: a token of the checked tensors, which no other thread has.
            unsafe { whole::<T>(self, token, target, scale) }
        });
        Ok(())
    }
}

/// # Safety
/// As [`part`].
#[inline(always)]
unsafe fn whole<T: Float>(all: &Whole, token: usize, target: i64, scale: f32) {
    let p: &Problem = &all.of;
    let (mut loss, mut lse) = (0.0, 0.0);
    if target == p.ignore_index {
        // SAFETY: the caller's promise.
        unsafe { clear::<T>(p, token) };
    } else {
        // SAFETY: the caller's promise.
        let sums = unsafe { joined(all, token) };
        (loss, lse) = (sums.loss(p, all.columns.vocab), sums.lse());
        let place = all.columns.place(target);
        // SAFETY: the caller's promise.
        unsafe { differentiate::<T>(p, all.columns.vocab, token, place, lse, scale) };
    }
    // SAFETY: the caller's promise.
    unsafe { store([(&p.losses, loss), (&p.lse, lse)], token) };
}

/// The sums of all ranks, in their order: the same on each of them.
///
/// # Safety
/// As [`part`].
#[inline(always)]
unsafe fn joined(all: &Whole, token: usize) -> Sums {
    let tokens = all.of.num_tokens();
    let of_rank = |rank: usize| {
        // SAFETY: a row of the sums, which were written before.
        unsafe {
            all.sums
                .ptr
                .cast::<[f32; SUMS]>()
                .add(rank * tokens + token)
                .read()
        }
    };
    let peaks = (0..all.ranks).map(|rank| of_rank(rank)[0]);
    let mut sums = Sums {
        peak: peaks.fold(f32::MIN, f32::max),
        exponentials: 0.0,
        total: 0.0,
        target: 0.0,
    };
    for rank in 0..all.ranks {
        let [peak, exponentials, total, target] = of_rank(rank);
        sums.exponentials += exponentials * math::exp(peak - sums.peak);
        sums.total += total;
        sums.target += target;
    }
    sums
}
