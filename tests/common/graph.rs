//! Capturing work into a CUDA graph, as an engine would.

use std::ptr;

use cudarc::driver::sys;
use unsloth::{Context, Stream};

/// A result of the driver's, in calls that tests make on their own.
#[track_caller]
pub fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}

/// While it lives, the device's primary context is the thread's current one.
struct Current(i32);

impl Current {
    fn of(ctx: &Context) -> Current {
        let mut primary = ptr::null_mut();
        // SAFETY: `primary` is valid for a write; what is retained here is released in `drop`.
        unsafe {
            ok(sys::cuDevicePrimaryCtxRetain(
                &mut primary,
                ctx.device_ordinal(),
            ));
            ok(sys::cuCtxPushCurrent_v2(primary));
        }
        Current(ctx.device_ordinal())
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut popped = ptr::null_mut();
        // SAFETY: pushed and retained by `of`, on this thread.
        unsafe {
            ok(sys::cuCtxPopCurrent_v2(&mut popped));
            ok(sys::cuDevicePrimaryCtxRelease_v2(self.0));
        }
    }
}

/// What `queue` queues on `stream`, as a graph. It is called while the stream is captured.
pub struct Graph {
    ctx: Context,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

impl Graph {
    pub fn capture(ctx: &Context, stream: Stream, queue: impl FnOnce()) -> Graph {
        let _current = Current::of(ctx);
        let raw: sys::CUstream = stream.as_raw().cast();
        let (mut graph, mut executable) = (ptr::null_mut(), ptr::null_mut());
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live; both results are valid for writes and given back in `drop`.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(raw, mode));
            queue();
            ok(sys::cuStreamEndCapture(raw, &mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&mut executable, graph, 0));
        }
        Graph {
            ctx: ctx.clone(),
            graph,
            executable,
        }
    }

    pub fn launch(&self, stream: Stream) {
        let _current = Current::of(&self.ctx);
        // SAFETY: both are live.
        ok(unsafe { sys::cuGraphLaunch(self.executable, stream.as_raw().cast()) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let _current = Current::of(&self.ctx);
        // SAFETY: made by `capture`.
        unsafe {
            ok(sys::cuGraphExecDestroy(self.executable));
            ok(sys::cuGraphDestroy(self.graph));
        }
    }
}
