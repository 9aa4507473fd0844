//! What only the CUDA backend has: streams, graph capture, the caller's current context, images, a
//! missing driver.
//!
//! Numerics are in each operation's own tests, which run on every device there is.
#![cfg(feature = "cuda")]

mod common;

use std::ptr;

use common::graph::{Graph, ok};
use common::{TestTensor, gpu, gpu_options, rng};
use cudarc::driver::sys;
use unsloth::ops::{rms_norm, rope, swiglu};
use unsloth::{
    Backend, Buffer, Context, ContextOptions, DType, Error, InOut, Layout, Stream, TensorRef,
};

#[test]
fn a_missing_driver_is_named() {
    assert!(Backend::Cuda.is_compiled());
    if Backend::Cuda.device_count().is_ok() {
        return;
    }
    let errors = [
        Backend::Cuda.device_count().unwrap_err(),
        Backend::Cuda.device_info(0).unwrap_err(),
        Context::new(&gpu_options()).unwrap_err(),
    ];
    for error in errors {
        assert!(matches!(error, Error::BackendUnavailable { .. }), "{error}");
        assert!(error.to_string().contains("libcuda"), "{error}");
    }
}

#[test]
fn devices_outside_the_count_are_refused() {
    let Some(_ctx) = gpu() else { return };
    let count = Backend::Cuda.device_count().unwrap();
    for device in [-1, count, i32::MAX] {
        let options = ContextOptions {
            device,
            ..gpu_options()
        };
        let error = Context::new(&options).unwrap_err();
        let expected = format!("context: device {device} is outside 0 to {}", count - 1);
        assert_eq!(error.to_string(), expected);
    }
}

/// Views know whose memory they are of: what is made safely cannot reach another device, and a
/// slice, whose borrow ends before queued work does, no GPU at all.
#[test]
fn views_of_other_devices_are_refused() {
    let Some(gpu) = gpu() else { return };
    let cpu = Context::cpu().unwrap();
    let layout = || Layout::contiguous(&[2, 3]).unwrap();
    let on = |ctx| Buffer::new(ctx, 24).unwrap();
    let (there, here) = (on(&gpu), on(&cpu));
    let [there, here] = [&there, &here].map(|b| b.tensor(0, DType::F32, layout()).unwrap());
    let data = [1f32; 6];
    let slice = TensorRef::from_slice(&data, &[2, 3]).unwrap();
    let theirs = "memory of cuda device 0";
    for (ctx, input, of_output, expected) in [
        (
            &cpu,
            there,
            &cpu,
            format!("x is {theirs}, ctx takes host memory"),
        ),
        (
            &gpu,
            here,
            &gpu,
            format!("x is host memory, ctx takes {theirs}"),
        ),
        (
            &gpu,
            slice,
            &gpu,
            format!("x is host memory, ctx takes {theirs}"),
        ),
        (
            &cpu,
            slice,
            &gpu,
            format!("out is {theirs}, ctx takes host memory"),
        ),
        (
            &gpu,
            there,
            &cpu,
            format!("out is host memory, ctx takes {theirs}"),
        ),
        (&gpu, there, &gpu, String::new()),
        (&cpu, slice, &cpu, String::new()),
    ] {
        let mut out = on(of_output);
        let params = rms_norm::Params {
            x: InOut::Apart {
                input,
                output: out.tensor_mut(0, DType::F32, layout()).unwrap(),
            },
            residual: None,
            weight: None,
            weight_offset: 0.0,
            epsilon: 1e-5,
        };
        let done = rms_norm::forward(ctx, &params, Stream::DEFAULT);
        let found = done.map_or_else(|error| error.to_string(), |()| String::new());
        assert_eq!(found.trim_start_matches("rms_norm: "), expected);
    }
}

#[test]
fn devices_are_described() {
    let Some(_ctx) = gpu() else { return };
    let info = Backend::Cuda.device_info(0).unwrap();
    println!("{info:?}");
    assert!(!info.name.is_empty() && info.num_units > 0);
    assert!(info.compute_capability >= (8, 0));
    assert!(info.free_memory > 0 && info.free_memory <= info.total_memory);
}

/// No kernel keeps anything in local memory: no stack frame, no spilled register, and no warning
/// that says so.
#[test]
fn kernels_stay_in_registers() {
    // Part of the test, which may run on another machine than it was built on.
    let report = include_bytes!(env!("UNSLOTH_KERNEL_REPORT"));
    let report: serde_json::Value = serde_json::from_slice(report).unwrap();
    let kernels = report.as_array().unwrap();
    assert!(kernels.len() > 100);
    for kernel in kernels {
        for field in ["stack_bytes", "spill_store_bytes", "spill_load_bytes"] {
            assert_eq!(kernel[field], 0, "{field} of {kernel}");
        }
        assert_eq!(kernel["warnings"].as_array().unwrap().len(), 0, "{kernel}");
        assert!(
            (1..=255).contains(&kernel["registers"].as_u64().unwrap()),
            "{kernel}"
        );
        if let Some(blocks) = kernel["occupancy"]["blocks"].as_u64() {
            assert!(blocks >= 1, "{kernel}");
        }
    }
}

/// Kernels that multiply with wgmma do so in unbroken groups (forward: of Q K^T and P V, outside and
/// inside the loop, and of half a block; backward: of five products; 8-bit weights: of a step), whose operand descriptors stay
/// where the instruction takes them from.
#[test]
fn wgmma_are_unbroken() {
    let report = include_bytes!(env!("UNSLOTH_KERNEL_REPORT"));
    let report: serde_json::Value = serde_json::from_slice(report).unwrap();
    for kernel in report.as_array().unwrap() {
        let wgmma = &kernel["wgmma"];
        let image = kernel["image"].as_str().unwrap();
        let name = kernel["kernel"].as_str().unwrap();
        let of_rows = ["_prepare", "_finish", "_sinks"];
        let multiplies = !of_rows.iter().any(|end| name.ends_with(end));
        let (least, most_waits, most_moved) = match image {
            _ if image.starts_with("attention_forward") => (8, 5, 0),
            _ if image.starts_with("attention_gradients") && name.ends_with("_queries") => {
                (24, 5, 0)
            }
            // Two roles in one kernel.
            _ if image.starts_with("attention_gradients") && name.ends_with("_keys") => (32, 10, 0),
            // Two roles, each with the first steps and the last by themselves.
            "attention_gradients_hd256" if multiplies => (160, 18, 0),
            "attention_gradients_hd192" if multiplies => (128, 16, 0),
            "attention_gradients_hd96" if multiplies => (30, 5, 0),
            // What a warpgroup does whose turn it is, which waits elsewhere where its block comes last, and one
            // whose turn it is not.
            "attention_gradients_hd64" if multiplies => (50, 9, 0),
            _ if image.starts_with("attention_gradients") && multiplies => (34, 5, 0),
            // The products of a step, by weights that were widened in registers.
            "linear_wide_e4m3_bf16" | "linear_wide_e4m3_f16" => (8, 3, 0),
            // Warps multiply by themselves.
            _ if name == "linear_wide_ternary_16" => {
                assert!(wgmma.is_null(), "{kernel}");
                continue;
            }
            "linear_wide_i8" | "linear_wide_ternary" => (8, 3, 0),
            _ if image.starts_with("linear_wide") => (16, 5, 0),
            _ => {
                assert!(wgmma.is_null(), "{kernel}");
                continue;
            }
        };
        let count = |field: &str| wgmma[field].as_u64().unwrap();
        assert!(count("count") >= least, "{kernel}");
        assert!((1..=most_waits).contains(&count("waits")), "{kernel}");
        assert!(count("descriptors_moved") <= most_moved, "{kernel}");
        assert_eq!(wgmma["hands_registers_over"], true, "{kernel}");
    }
}

/// Kernels that many small copies keep busy have them issued by a whole warp. In a loop over its lanes decoding took up to
/// half as much time again.
#[test]
fn boxes_are_copied_by_whole_warps() {
    let report = include_bytes!(env!("UNSLOTH_KERNEL_REPORT"));
    let report: serde_json::Value = serde_json::from_slice(report).unwrap();
    for kernel in report.as_array().unwrap() {
        let image = kernel["image"].as_str().unwrap();
        let is_busy = image.starts_with("attention_decoding") || image.starts_with("linear_wide");
        if is_busy {
            assert!(kernel["boxes"]["copies"].as_u64().unwrap() > 0, "{kernel}");
            assert_eq!(kernel["boxes"]["by_lanes"], 0, "{kernel}");
        }
    }
}

/// One layer's worth of small operations: norm, rotation, activation.
struct Step {
    x: common::DeviceTensor,
    normed: common::DeviceTensor,
    up: common::DeviceTensor,
    out: common::DeviceTensor,
}

const SHAPE: [usize; 3] = [5, 4, 64];

impl Step {
    fn new(ctx: &Context) -> Step {
        let layout = Layout::contiguous(&SHAPE).unwrap();
        let normal = || TestTensor::normal(&mut rng(), DType::Bf16, layout).upload(ctx);
        let blank = || TestTensor::poisoned(DType::Bf16, layout).upload(ctx);
        Step {
            x: normal(),
            normed: blank(),
            up: normal(),
            out: blank(),
        }
    }

    fn queue(&mut self, ctx: &Context, stream: Stream) {
        let norm = rms_norm::Params {
            x: InOut::Apart {
                input: self.x.view(),
                output: self.normed.view_mut(),
            },
            residual: None,
            weight: None,
            weight_offset: 0.0,
            epsilon: 1e-5,
        };
        rms_norm::forward(ctx, &norm, stream).unwrap();
        let rotation = rope::Params {
            q: Some(InOut::InPlace(self.normed.view_mut())),
            ..rope::Params::default()
        };
        rope::forward(ctx, &rotation, stream).unwrap();
        let gated = swiglu::Params {
            tensors: swiglu::Tensors::Apart {
                gate: InOut::Apart {
                    input: self.normed.view(),
                    output: self.out.view_mut(),
                },
                up: self.up.view(),
            },
            activation: swiglu::Activation::Silu,
        };
        swiglu::forward(ctx, &gated, stream).unwrap();
    }

    fn reset(&mut self, ctx: &Context) {
        let layout = self.out.layout;
        self.normed = TestTensor::poisoned(DType::Bf16, layout).upload(ctx);
        self.out = TestTensor::poisoned(DType::Bf16, layout).upload(ctx);
    }

    fn result(&self) -> Vec<u8> {
        self.out.download_output().bits()
    }
}

#[test]
fn every_stream_gives_the_same_bits() {
    let Some(ctx) = gpu() else { return };
    let mut step = Step::new(&ctx);
    step.queue(&ctx, Stream::DEFAULT);
    ctx.synchronize(Stream::DEFAULT).unwrap();
    let expected = step.result();
    let stream = ctx.create_stream().unwrap();
    step.reset(&ctx);
    step.queue(&ctx, stream);
    ctx.synchronize(stream).unwrap();
    assert!(step.result() == expected);
    // SAFETY: made above, and used no more.
    unsafe { ctx.destroy_stream(stream) }.unwrap();
}

#[test]
fn threads_share_a_context() {
    let Some(ctx) = gpu() else { return };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = ctx.create_stream().unwrap();
                let mut step = Step::new(&ctx);
                step.queue(&ctx, stream);
                ctx.synchronize(stream).unwrap();
                let expected = step.result();
                for _ in 0..20 {
                    step.queue(&ctx, stream);
                }
                ctx.synchronize(stream).unwrap();
                assert!(step.result() == expected);
                // SAFETY: made above, and used no more.
                unsafe { ctx.destroy_stream(stream) }.unwrap();
            });
        }
    });
}

/// Contexts of one device share its memory and disturb each other in nothing: each has threads and
/// streams of its own, and they end in any order.
#[test]
fn contexts_share_a_device() {
    let Some(first) = gpu() else { return };
    let mut step = Step::new(&first);
    step.queue(&first, Stream::DEFAULT);
    first.synchronize(Stream::DEFAULT).unwrap();
    let (expected, x, up) = (step.result(), step.x.download(), step.up.download());
    std::thread::scope(|scope| {
        for i in 0..6 {
            let (expected, x, up) = (&expected, &x, &up);
            scope.spawn(move || {
                let ctx = gpu().unwrap();
                let streams = [(); 2].map(|()| ctx.create_stream().unwrap());
                let mut steps = streams.map(|stream| {
                    let mut step = Step::new(&ctx);
                    step.x.overwrite(x);
                    step.up.overwrite(up);
                    (stream, step)
                });
                for _ in 0..10 + i {
                    for (stream, step) in &mut steps {
                        step.queue(&ctx, *stream);
                    }
                }
                for (stream, step) in &steps {
                    ctx.synchronize(*stream).unwrap();
                    assert!(step.result() == *expected);
                    // SAFETY: made above, and used no more.
                    unsafe { ctx.destroy_stream(*stream) }.unwrap();
                }
                // The tensors outlive the caller's handle of their context.
                drop(ctx);
                assert!(steps[0].1.result() == *expected);
            });
        }
    });
    drop(first);
    assert!(step.result() == expected, "the last context's memory");
}

/// The first calls of a context go into a graph, whose replays see what the inputs hold then.
#[test]
fn the_first_call_can_be_captured() {
    let Some(ctx) = gpu() else { return };
    let mut step = Step::new(&ctx);
    let stream = ctx.create_stream().unwrap();
    let graph = Graph::capture(&ctx, stream, || step.queue(&ctx, stream));
    for _ in 0..3 {
        graph.launch(stream);
        ctx.synchronize(stream).unwrap();
        let replayed = step.result();
        step.queue(&ctx, stream);
        ctx.synchronize(stream).unwrap();
        assert!(replayed == step.result());
        let layout = step.x.layout;
        let other = TestTensor::normal(&mut rng(), DType::Bf16, layout);
        step.x.overwrite(&other);
    }
    // SAFETY: made above, and used no more.
    unsafe { ctx.destroy_stream(stream) }.unwrap();
}

#[test]
fn the_current_context_is_left_alone() {
    let Some(ctx) = gpu() else { return };
    let mut step = Step::new(&ctx);
    let [mut primary, mut other, mut current] = [ptr::null_mut(); 3];
    // SAFETY: results are valid for writes; what is retained or made is given back; the thread ends
    // with no current context, as it began.
    unsafe {
        ok(sys::cuDevicePrimaryCtxRetain(&mut primary, 0));
        ok(sys::cuCtxCreate_v4(&mut other, ptr::null_mut(), 0, 0));
        for before in [ptr::null_mut(), primary, other] {
            ok(sys::cuCtxSetCurrent(before));
            step.queue(&ctx, Stream::DEFAULT);
            let another = Context::new(&gpu_options()).unwrap();
            drop(another);
            ctx.synchronize(Stream::DEFAULT).unwrap();
            ok(sys::cuCtxGetCurrent(&mut current));
            assert_eq!(current, before);
            // So after a call that fails.
            Context::new(&ContextOptions {
                device: -1,
                ..gpu_options()
            })
            .unwrap_err();
            unsloth::Buffer::new(&ctx, 1 << 50).unwrap_err();
            ok(sys::cuCtxGetCurrent(&mut current));
            assert_eq!(current, before);
        }
        ok(sys::cuCtxSetCurrent(ptr::null_mut()));
        ok(sys::cuCtxDestroy_v2(other));
        ok(sys::cuDevicePrimaryCtxRelease_v2(0));
    }
}

#[test]
fn what_cannot_be_allocated_is_refused() {
    let Some(ctx) = gpu() else { return };
    let size = 1usize << 50;
    let error = unsloth::Buffer::new(&ctx, size).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert_eq!(ctx.memory_stats().in_use, 0);
}

#[test]
fn allocations_begin_zeroed() {
    let Some(ctx) = gpu() else { return };
    for _ in 0..8 {
        let mut buffer = unsloth::Buffer::new(&ctx, 1 << 20).unwrap();
        let read = buffer.to_vec::<i32>(0, 1 << 18, Stream::DEFAULT).unwrap();
        assert!(read.iter().all(|word| *word == 0));
        let dirt = vec![-1i32; 1 << 18];
        buffer.copy_from_slice(0, &dirt, Stream::DEFAULT).unwrap();
        let read = buffer.to_vec::<i32>(0, 1 << 18, Stream::DEFAULT).unwrap();
        assert!(read == dirt);
    }
}

/// A kernel that faults takes the device's context with it. The calls that find out say so, by the
/// driver's name, and the process can still end in order.
#[test]
fn a_fault_is_told_as_such() {
    const CHILD: &str = "UNSLOTH_TEST_FAULT";
    if std::env::var_os(CHILD).is_some() {
        return fault();
    }
    if gpu().is_none() {
        return;
    }
    // In another process: this one's other tests go on.
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_fault_is_told_as_such", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(child.status.success(), "{child:?}");
}

fn fault() {
    let ctx = gpu().unwrap();
    let mut out = TestTensor::of(DType::F32, &[1, 4], &[0.0; 4]).upload(&ctx);
    let nowhere = ptr::without_provenance::<u8>(1 << 46);
    // SAFETY: unsound, which is what is tested: no memory is there.
    let x = unsafe { TensorRef::from_raw(nowhere, DType::F32, out.layout) };
    let stream = ctx.create_stream().unwrap();
    let params = rms_norm::Params {
        x: InOut::Apart {
            input: x,
            output: out.view_mut(),
        },
        residual: None,
        weight: None,
        weight_offset: 0.0,
        epsilon: 1e-5,
    };
    rms_norm::forward(&ctx, &params, stream).unwrap();
    let told = "CUDA_ERROR_ILLEGAL_ADDRESS (700); the device's context is lost";
    for error in [
        ctx.synchronize(stream).unwrap_err(),
        rms_norm::forward(&ctx, &params, stream).unwrap_err(),
        unsloth::Buffer::new(&ctx, 16).unwrap_err(),
    ] {
        assert!(matches!(error, Error::Cuda { sticky: true, .. }), "{error}");
        assert!(error.to_string().contains(told), "{error}");
    }
    assert_eq!(ctx.memory_stats().num_allocations, 1);
}
