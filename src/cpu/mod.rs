//! The CPU backend: threads, vector dispatch, and one file per operation.
//!
//! Operations arrive here checked. Each splits its work into independent items (rows, tiles, heads) whose results do not depend
//! on which thread computes them, so the same inputs give the same bits with any number of threads.

mod accumulate;
pub(crate) mod argmax;
pub(crate) mod attention;
mod attention_merge;
pub(crate) mod blocks;
pub(crate) mod cast;
pub(crate) mod collective;
mod cross_entropy;
mod e4m3;
pub(crate) mod embedding;
mod event;
pub(crate) mod float;
mod host;
pub(crate) mod kv_cache;
mod layer_norm;
pub(crate) mod linear;
mod logprob;
pub(crate) mod math;
mod memory;
pub(crate) mod mlp;
mod norm;
mod optimizer;
mod pages;
mod pool;
mod qk_norm_rope;
pub(crate) mod quantize;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod scratch;
pub(crate) mod swiglu;
pub(crate) mod vector;
mod weight_repack;

pub(crate) use event::Event;
pub(crate) use host::device_info;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::backend::{Implementation, Stream};
use crate::error::{Error, Result, text};
use crate::problem::{Plan, Plans};
use crate::tensor::Scratch;
use host::available_threads;
use pool::{MAX_THREADS, Pool};
use scratch::Floats;

/// The CPU backend's state.
pub(crate) struct Cpu {
    pool: Pool,
    arch: pulp::Arch,
}

impl std::fmt::Debug for Cpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cpu")
            .field("num_threads", &self.num_threads())
            .finish_non_exhaustive()
    }
}

/// A problem that this backend runs.
pub(crate) trait Run {
    /// Bytes of workspace that it needs.
    fn needed(&self) -> usize {
        0
    }

    /// See [`Plan::without_allocating`].
    fn without_allocating(&self, _: &Cpu) -> usize {
        self.needed()
    }

    /// See [`Plan::probe`].
    fn probe(&self, _: &Cpu) -> Result<()> {
        Ok(())
    }

    /// Computes it, to its end. Data and `scratch` have been checked.
    ///
    /// # Errors
    /// What only the data tells, before anything was written; memory ran out.
    fn run(&self, cpu: &Cpu, scratch: Scratch) -> Result<()>;
}

/// A problem that waits to be run: this backend has one way for each.
pub(crate) struct Ready<'a, P> {
    cpu: &'a Cpu,
    problem: P,
}

impl<P: Run> Plan for Ready<'_, P> {
    fn implementation(&self) -> Implementation {
        Implementation::Cpu
    }

    fn needed(&self) -> usize {
        self.problem.needed()
    }

    fn without_allocating(&self) -> usize {
        self.problem.without_allocating(self.cpu)
    }

    fn probe(&self) -> Result<()> {
        self.problem.probe(self.cpu)
    }

    fn launch(&self, scratch: Scratch, _: Stream) -> Result<()> {
        self.problem.run(self.cpu, scratch)
    }
}

impl<P: Run> Plans<P> for Cpu {
    type Plan<'a> = Ready<'a, P>;

    fn plan(&self, problem: P) -> Result<Ready<'_, P>> {
        Ok(Ready { cpu: self, problem })
    }
}

/// Work below this many elementary operations is done on the calling thread: what threads would save is less than what it takes to
/// wake them.
const SERIAL_COST: usize = 1 << 15;

impl Cpu {
    /// With threads for callers: `num_threads` with the caller's own, 0 for as many as the process may run at a time.
    pub fn new(num_threads: usize) -> Result<Cpu> {
        const OP: &str = "context";
        if num_threads > MAX_THREADS {
            return Err(Error::invalid(
                OP,
                "num_threads",
                text!("{num_threads} is above the maximum {MAX_THREADS}"),
            ));
        }
        let num_threads = match num_threads {
            0 => available_threads().min(MAX_THREADS),
            n => n,
        };
        Ok(Cpu {
            pool: Pool::new(OP, num_threads)?,
            arch: pulp::Arch::new(),
        })
    }

    pub fn num_threads(&self) -> usize {
        self.pool.num_threads()
    }

    /// Calls `f` compiled for the processor's instruction set, if `f` and its helpers are `#[inline(always)]`.
    ///
    /// `arch().dispatch` calls a closure as `FnOnce`. Where the closure is more than that, it goes through a shim that is not
    /// inlined: the body is compiled for the baseline, and every `mul_add` becomes a call.
    #[inline(always)]
    pub fn vectorize<R>(&self, f: impl FnMut() -> R) -> R {
        struct Call<F>(F);
        impl<R, F: FnMut() -> R> pulp::WithSimd for Call<F> {
            type Output = R;

            #[inline(always)]
            fn with_simd<S: pulp::Simd>(mut self, _: S) -> R {
                (self.0)()
            }
        }
        self.arch.dispatch(Call(f))
    }

    /// The instruction set, for code written with explicit vectors; plain loops go through [`Cpu::vectorize`].
    pub fn arch(&self) -> pulp::Arch {
        self.arch
    }

    /// How `items` of `cost` elementary operations each are cut: items of a piece, pieces, and threads that take part.
    fn cut(&self, items: usize, cost: usize) -> (usize, usize, usize) {
        let threads = self.num_threads();
        if threads == 1 || items <= 1 || items.saturating_mul(cost) <= SERIAL_COST {
            return (items, items.min(1), 1);
        }
        // A few pieces per thread even out items of unequal cost; none is cheaper than what pays for a wake-up.
        let least = SERIAL_COST.div_ceil(cost.max(1).saturating_mul(4)).max(1);
        let piece = items.div_ceil(threads * 8).max(least);
        let pieces = items.div_ceil(piece);
        (piece, pieces, threads.min(pieces))
    }

    /// Calls `f` on disjoint ranges that cover `0..items`, in parallel when `items * cost` (elementary operations) pays for it.
    /// `f` must compute each item independently of how the range was cut.
    pub fn for_each_range(&self, items: usize, cost: usize, f: impl Fn(Range<usize>) + Sync) {
        let (piece, pieces, threads) = self.cut(items, cost);
        self.pool.run(threads, pieces, &|_, i| {
            f(i * piece..items.min((i + 1) * piece));
        });
    }

    /// As [`Cpu::for_each_range`], for items that lie one behind the other in memory, where reading them is what
    /// counts: each thread goes through a part of its own from one end to the other, and helps others when it is done.
    /// `room` is what a thread makes for itself before.
    pub fn for_each_in_order<T>(
        &self,
        items: usize,
        cost: usize,
        room: impl Fn() -> T + Sync,
        f: impl Fn(&mut T, Range<usize>) + Sync,
    ) {
        /// Of more threads, each reads little.
        const MOST: usize = 32;
        /// What a piece costs, or a little more. Taking one is cheap, because a thread counts its pieces where no other
        /// one writes before it helps; and short pieces keep the thread that is done first from waiting long.
        const PIECE_COST: usize = SERIAL_COST / 8;
        /// The next piece of a part, in a cache line of its own.
        #[repr(align(64))]
        struct Next(AtomicUsize);

        let (_, pieces, threads) = self.cut(items, cost);
        if !(2..=MOST).contains(&threads) {
            return self.for_each_range(items, cost, |range| f(&mut room(), range));
        }
        let piece = PIECE_COST.div_ceil(cost.max(1)).min(items.div_ceil(pieces));
        let pieces = items.div_ceil(piece);
        let starts_at = |part: usize| pieces * part / threads;
        let next: [Next; MOST] = std::array::from_fn(|part| Next(starts_at(part).into()));
        self.pool.run(threads, threads, &|_, own| {
            let mut room = room();
            for part in (own..threads).chain(0..own) {
                loop {
                    let i = next[part].0.fetch_add(1, Ordering::Relaxed);
                    if i >= starts_at(part + 1) {
                        break;
                    }
                    f(&mut room, i * piece..items.min((i + 1) * piece));
                }
            }
        });
    }

    /// How many threads take part in [`Cpu::for_each_range`].
    pub fn participants(&self, items: usize, cost: usize) -> usize {
        self.cut(items, cost).2
    }

    /// As [`Cpu::for_each_range`], for work that needs scratch: each thread that takes part has `len` floats, zeros at first, for
    /// all of its ranges.
    ///
    /// # Errors
    /// There is no memory; nothing was called.
    pub fn for_each_range_with(
        &self,
        op: &'static str,
        (items, cost): (usize, usize),
        len: usize,
        f: impl Fn(&mut [f32], Range<usize>) + Sync,
    ) -> Result<()> {
        if self.cut(items, cost).1 == 0 {
            return Ok(());
        }
        let scratch = self.scratch(op, (items, cost), len)?;
        self.for_each_range_in(&scratch, (items, cost), f);
        Ok(())
    }

    /// The scratch of [`Cpu::for_each_range_with`], for work that several calls make up, none of
    /// which may begin before there is memory for all.
    ///
    /// # Errors
    /// There is no memory.
    pub fn scratch(
        &self,
        op: &'static str,
        (items, cost): (usize, usize),
        len: usize,
    ) -> Result<Floats> {
        Floats::new(op, self.participants(items, cost), len)
    }

    /// [`Cpu::for_each_range_with`] in the [`Cpu::scratch`] of as many items of this cost.
    pub fn for_each_range_in(
        &self,
        scratch: &Floats,
        (items, cost): (usize, usize),
        f: impl Fn(&mut [f32], Range<usize>) + Sync,
    ) {
        let (piece, pieces, threads) = self.cut(items, cost);
        self.pool.run(threads, pieces, &|thread, i| {
            // SAFETY: a participant does one piece after another, so its part is in use once.
            let part = unsafe { scratch.part(thread) };
            f(part, i * piece..items.min((i + 1) * piece));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_cover_once() {
        let cpu = Cpu::new(3).unwrap();
        for items in [0, 1, 2, 7, 1000, 100_003] {
            for cost in [0, 1, 100, usize::MAX] {
                let seen: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                cpu.for_each_range(items, cost, |range| {
                    for i in range {
                        seen[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(
                    seen.iter().all(|n| n.load(Ordering::Relaxed) == 1),
                    "{items} {cost}"
                );
                let room = || ();
                cpu.for_each_in_order(items, cost, room, |(), range| {
                    for i in range {
                        seen[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(
                    seen.iter().all(|n| n.load(Ordering::Relaxed) == 2),
                    "{items} {cost}, in order"
                );
            }
        }
    }

    #[test]
    fn scratch_is_each_threads_own() {
        let cpu = Cpu::new(3).unwrap();
        let run = |items| {
            let sum = AtomicUsize::new(0);
            cpu.for_each_range_with("test", (items, 1 << 20), 5, |scratch, range| {
                assert_eq!(scratch.len(), 5);
                for i in range {
                    // What the thread's last item left, or zeros.
                    assert!(scratch.iter().all(|x| *x == scratch[0]));
                    scratch.fill(i as f32);
                    sum.fetch_add(i, Ordering::Relaxed);
                }
            })
            .unwrap();
            sum.into_inner()
        };
        assert_eq!([run(0), run(1), run(1000)], [0, 0, 499_500]);
        let error = cpu.for_each_range_with("test", (1, 1), usize::MAX / 8, |_, _| ());
        assert!(matches!(error, Err(Error::OutOfMemory { op: "test", .. })));
    }

    #[test]
    fn absurd_thread_counts_are_refused() {
        assert!(Cpu::new(MAX_THREADS + 1).is_err());
    }
}
