//! What the library tells about itself: events, and ranges for profilers.
//!
//! Events go through the [`tracing`] facade, under targets that begin with `unsloth`; the subscriber
//! is the program's choice, and [`ffi::log`](crate::ffi::log) has one for C. While nobody listens an
//! event costs one relaxed load. Levels:
//!
//! | level | what |
//! |-|-|
//! | error | the device's context is lost, or a bug in this library |
//! | warn | memory that could not be had; something missing that costs speed |
//! | info | once in a process or context: devices, modules, libraries that were found |
//! | debug | first uses, choices that are remembered, calls that were refused |
//! | trace | each launch: what was chosen for it, and why |

use crate::error::Error;

/// Reports a call from C that failed, as it becomes a status.
#[cold]
pub(crate) fn failed(error: &Error) {
    match error {
        Error::Internal { .. } | Error::Cuda { sticky: true, .. } => tracing::error!("{error}"),
        Error::OutOfMemory { .. } | Error::Cuda { .. } => tracing::warn!("{error}"),
        _ => tracing::debug!("{error}"),
    }
}

/// A range of the calling thread's time in an operation, for a profiler to show; ends when dropped.
#[must_use]
pub(crate) struct Range {
    #[cfg(feature = "cuda")]
    pushed: bool,
}

/// Begins a range with the operation's name, where a profiler listens for NVTX.
#[cfg(feature = "cuda")]
#[inline]
pub(crate) fn range(op: &'static str) -> Range {
    let pushed = *PROFILED;
    if pushed {
        nvtx::range_push!("unsloth: {op}");
    }
    Range { pushed }
}

/// No range: only GPUs have profilers that listen for NVTX.
#[cfg(not(feature = "cuda"))]
#[inline]
pub(crate) fn range(_op: &'static str) -> Range {
    Range {}
}

/// Whether the process was started under a profiler, which NVTX finds by this variable. Without one
/// the crate would still format and copy each name.
#[cfg(feature = "cuda")]
static PROFILED: std::sync::LazyLock<bool> =
    std::sync::LazyLock::new(|| std::env::var_os("NVTX_INJECTION64_PATH").is_some());

#[cfg(feature = "cuda")]
impl Drop for Range {
    #[inline]
    fn drop(&mut self) {
        if self.pushed {
            nvtx::range_pop!();
        }
    }
}
