//! The CPU backend: threads, vector dispatch, and one file per operation.
//!
//! Operations arrive here checked. Each splits its work into independent items (rows, tiles, heads) whose results do not depend
//! on which thread computes them, so the same inputs give the same bits with any number of threads.

pub(crate) mod argmax;
pub(crate) mod attention;
pub(crate) mod cast;
pub(crate) mod embedding;
mod event;
pub(crate) mod float;
pub(crate) mod kv_cache;
pub(crate) mod linear;
pub(crate) mod math;
mod memory;
pub(crate) mod mlp;
pub(crate) mod rms_norm;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod swiglu;
pub(crate) mod vector;

pub(crate) use event::Event;

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use crate::backend::{DeviceInfo, Implementation, Stream};
use crate::error::{Error, Result, text};
use crate::problem::{Plan, Plans};
use crate::tensor::Scratch;

/// The CPU backend's state.
pub(crate) struct Cpu {
    pool: rayon::ThreadPool,
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

/// Work below this many elementary operations is done on the calling thread: waking another costs about as much.
const SERIAL_COST: usize = 1 << 15;

/// The most threads a context may ask for.
const MAX_THREADS: usize = 4096;

impl Cpu {
    pub fn new(num_threads: usize) -> Result<Cpu> {
        const OP: &str = "context";
        if num_threads > MAX_THREADS {
            return Err(Error::invalid(
                OP,
                "num_threads",
                text!("{num_threads} is above the maximum {MAX_THREADS}"),
            ));
        }
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(num_threads)
            .thread_name(|i| text!("unsloth-{i}"))
            .build()
            .map_err(|e| Error::OutOfMemory {
                op: OP,
                requested: 0,
                reason: text!("threads could not be started: {e}"),
            })?;
        Ok(Cpu {
            pool,
            arch: pulp::Arch::new(),
        })
    }

    pub fn num_threads(&self) -> usize {
        self.pool.current_num_threads()
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

    /// Runs `f` on a thread of the pool, so that nested rayon (and gemm) parallelism uses it.
    pub fn install<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.pool.install(f)
    }

    /// Calls `f` on disjoint ranges that cover `0..items`, in parallel when `items * cost` (elementary operations) pays for it.
    /// `f` must compute each item independently of how the range was cut.
    pub fn for_each_range(&self, items: usize, cost: usize, f: impl Fn(Range<usize>) + Sync) {
        if items == 0 {
            return;
        }
        let threads = self.num_threads();
        if threads == 1 || items == 1 || items.saturating_mul(cost) <= SERIAL_COST {
            return f(0..items);
        }
        // A few pieces per thread even out items of unequal cost; none is cheaper than what pays for a wake-up.
        let least = SERIAL_COST.div_ceil(cost.max(1).saturating_mul(2)).max(1);
        let piece = items.div_ceil(threads * 8).max(least);
        let pieces = items.div_ceil(piece);
        self.install(|| {
            use rayon::prelude::*;
            (0..pieces).into_par_iter().with_max_len(1).for_each(|i| {
                f(i * piece..items.min((i + 1) * piece));
            });
        });
    }

    /// As [`Cpu::for_each_range`], for work that needs scratch: one `T` for each thread that takes part, used again from range to
    /// range, because large allocations cost a page fault for every page.
    pub fn for_each_range_with<T: Default + Send>(
        &self,
        items: usize,
        cost: usize,
        f: impl Fn(&mut T, Range<usize>) + Sync,
    ) {
        let free = Mutex::new(Vec::new());
        self.for_each_range(items, cost, |range| {
            // What is in there is scratch, good after a panic elsewhere too.
            let lock = || free.lock().unwrap_or_else(PoisonError::into_inner);
            let mut scratch = lock().pop().unwrap_or_default();
            f(&mut scratch, range);
            lock().push(scratch);
        });
    }
}

pub(crate) fn device_info() -> DeviceInfo {
    let field = |text: &str, key: &str| {
        text.lines()
            .find(|line| line.starts_with(key))
            .and_then(|line| line.split_once(':'))
            .map(|(_, value)| value.trim().to_string())
    };
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |key| {
        field(&meminfo, key)
            .and_then(|value| {
                value
                    .strip_suffix(" kB")
                    .and_then(|kb| kb.trim().parse().ok())
            })
            .map_or(0, |kb: u64| kb.saturating_mul(1024))
    };
    DeviceInfo {
        name: field(&cpuinfo, "model name").unwrap_or_else(|| std::env::consts::ARCH.to_string()),
        total_memory: bytes("MemTotal"),
        free_memory: bytes("MemAvailable"),
        compute_capability: (0, 0),
        num_units: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
            }
        }
    }

    #[test]
    fn absurd_thread_counts_are_refused() {
        assert!(Cpu::new(MAX_THREADS + 1).is_err());
    }
}
