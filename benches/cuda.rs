//! The CUDA backend's small operations: what they move per second, beside a plain copy of as many
//! bytes in the same run, and what a call costs the host; `cargo bench --features cuda --bench cuda
//! -- host` prints that alone. One JSON object per line. Without a GPU it says so and ends.

use std::ptr;
use std::time::Instant;

use cudarc::driver::sys;
use rand::Rng;
use serde_json::json;
use unsloth::memory::{self, CopyKind};
use unsloth::ops::{attention, embedding, linear, mlp, rms_norm, rope, swiglu};
use unsloth::{
    Backend, Buffer, Context, ContextOptions, DType, InOut, Layout, Stream, TensorMut, TensorRef,
    Workspace,
};

/// Working sets together exceed the L2 caches of today's GPUs several times.
const WORKING_SET: usize = 512 << 20;
const ROUNDS: usize = 7;

fn main() {
    if !Backend::Cuda.device_count().is_ok_and(|n| n > 0) {
        println!("{}", json!({ "skipped": "no CUDA device" }));
        return;
    }
    let options = ContextOptions {
        backend: Backend::Cuda,
        ..ContextOptions::default()
    };
    let started = Instant::now();
    drop(Context::new(&options).unwrap());
    let first = started.elapsed();
    let held = Context::new(&options).unwrap();
    let started = Instant::now();
    let ctx = Context::new(&options).unwrap();
    let info = Backend::Cuda.device_info(0).unwrap();
    println!(
        "{}",
        json!({
            "device": info.name,
            "first_context_ms": first.as_secs_f64() * 1e3,
            "context_ms": started.elapsed().as_secs_f64() * 1e3,
        })
    );
    drop(held);
    let bench = Bench::new(ctx);
    bench.host_costs();
    if std::env::args().any(|argument| argument == "host") {
        return;
    }
    for (rows, dim) in [
        (16384, 4096),
        (16384, 8192),
        (32768, 2048),
        (8192, 16384),
        (64, 4096),
        (1, 4096),
        (524_288, 128),
    ] {
        bench.rms_norm(rows, dim, false);
        bench.rms_norm(rows, dim, true);
    }
    for (rows, dim) in [(16384, 14336), (4096, 11008), (64, 14336)] {
        bench.swiglu(rows, dim);
    }
    for (batch, seq) in [(4, 4096), (1, 512), (1, 1)] {
        bench.rope(batch, seq, 32, 8, 128);
    }
    for (tokens, dim) in [(16384, 4096), (64, 4096)] {
        bench.embedding(128_256, tokens, dim);
    }
    for rows in [1, 8, 64, 1024, 8192] {
        bench.mlp(rows, 4096, 14336);
    }
}

struct Bench {
    ctx: Context,
    stream: Stream,
    events: [sys::CUevent; 2],
}

/// Memory for several working sets of one shape.
struct Sets {
    buffers: Vec<Buffer>,
    layout: Layout,
}

impl Sets {
    fn view(&self, i: usize) -> TensorRef<'_> {
        let buffer = &self.buffers[i % self.buffers.len()];
        buffer.tensor(0, DType::Bf16, self.layout).unwrap()
    }

    fn view_mut(&mut self, i: usize) -> TensorMut<'_> {
        let n = self.buffers.len();
        self.buffers[i % n]
            .tensor_mut(0, DType::Bf16, self.layout)
            .unwrap()
    }
}

impl Bench {
    fn new(ctx: Context) -> Bench {
        let stream = ctx.create_stream().unwrap();
        let mut events = [ptr::null_mut(); 2];
        for event in &mut events {
            // SAFETY: valid for a write; the primary context is made current for the harness' own
            // calls.
            unsafe {
                let mut primary = ptr::null_mut();
                ok(sys::cuDevicePrimaryCtxRetain(&mut primary, 0));
                ok(sys::cuCtxSetCurrent(primary));
                ok(sys::cuEventCreate(event, 0));
            }
        }
        Bench {
            ctx,
            stream,
            events,
        }
    }

    /// As many working sets as exceed the caches, for an operation that touches `bytes`.
    fn sets(&self, shape: &[usize], bytes: usize) -> Sets {
        let count = WORKING_SET.div_ceil(bytes).clamp(2, 64);
        let layout = Layout::contiguous(shape).unwrap();
        let mut rng = rand::rng();
        // Random bf16 numbers near one: zeros would cost less power.
        let words: Vec<i32> = (0..layout.num_elements().div_ceil(2))
            .map(|_| (rng.random::<u32>() & 0x80ff_80ff | 0x3f00_3f00) as i32)
            .collect();
        let buffers = (0..count).map(|_| Buffer::from_slice(&self.ctx, &words).unwrap());
        Sets {
            buffers: buffers.collect(),
            layout,
        }
    }

    /// Seconds of one call, the median of several rounds.
    fn time(&self, mut call: impl FnMut(usize)) -> f64 {
        let calls = 20;
        let mut times = Vec::new();
        for round in 0..ROUNDS + 1 {
            let mut ms = 0.0f32;
            // SAFETY: events and stream are live.
            unsafe {
                let raw = self.stream.as_raw().cast();
                ok(sys::cuEventRecord(self.events[0], raw));
                for i in 0..calls {
                    call(round * calls + i);
                }
                ok(sys::cuEventRecord(self.events[1], raw));
                self.ctx.synchronize(self.stream).unwrap();
                ok(sys::cuEventElapsedTime_v2(
                    &mut ms,
                    self.events[0],
                    self.events[1],
                ));
            }
            times.push(f64::from(ms) / 1e3 / calls as f64);
        }
        times.remove(0);
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    }

    /// Prints what an operation that moves `bytes` reached, beside a copy that moves as many.
    fn report(&self, op: &str, shape: &[usize], bytes: usize, call: impl FnMut(usize)) {
        let seconds = self.time(call);
        let mut copies = self.sets(&[bytes / 4], bytes);
        let targets = copies.buffers.split_off(copies.buffers.len() / 2);
        let copy = self.time(|i| {
            let from = &copies.buffers[i % copies.buffers.len()];
            let to = &targets[i % targets.len()];
            // SAFETY: both have this many bytes, and nothing else uses them.
            unsafe {
                memory::copy(
                    &self.ctx,
                    to.as_ptr(),
                    from.as_ptr(),
                    bytes / 2,
                    CopyKind::DeviceToDevice,
                    self.stream,
                )
                .unwrap();
            }
        });
        println!(
            "{}",
            json!({
                "op": op,
                "shape": shape,
                "dtype": "bf16",
                "us": round(seconds * 1e6),
                "tb_per_s": round(bytes as f64 / seconds / 1e12),
                "copy_us": round(copy * 1e6),
                "of_copy": round(copy / seconds),
            })
        );
    }

    fn rms_norm(&self, rows: usize, dim: usize, residual: bool) {
        let one = rows * dim * 2;
        let bytes = one * if residual { 4 } else { 2 };
        let shape = [rows, dim];
        let x = self.sets(&shape, bytes);
        let mut out = self.sets(&shape, bytes);
        let mut r = residual.then(|| (self.sets(&shape, bytes), self.sets(&shape, bytes)));
        let weight = self.sets(&[dim], WORKING_SET / 2);
        let name = if residual {
            "rms_norm_residual"
        } else {
            "rms_norm"
        };
        self.report(name, &shape, bytes, |i| {
            let params = rms_norm::Params {
                x: InOut::Apart {
                    input: x.view(i),
                    output: out.view_mut(i),
                },
                residual: r.as_mut().map(|(input, output)| InOut::Apart {
                    input: input.view(i),
                    output: output.view_mut(i),
                }),
                weight: Some(weight.view(0)),
                weight_offset: 0.0,
                epsilon: 1e-5,
            };
            rms_norm::forward(&self.ctx, &params, self.stream).unwrap();
        });
    }

    fn swiglu(&self, rows: usize, dim: usize) {
        let bytes = rows * dim * 6;
        let shape = [rows, dim];
        let (gate, up) = (self.sets(&shape, bytes), self.sets(&shape, bytes));
        let mut out = self.sets(&shape, bytes);
        self.report("swiglu", &shape, bytes, |i| {
            let params = swiglu::Params {
                tensors: swiglu::Tensors::Apart {
                    gate: InOut::Apart {
                        input: gate.view(i),
                        output: out.view_mut(i),
                    },
                    up: up.view(i),
                },
                activation: swiglu::Activation::Silu,
            };
            swiglu::forward(&self.ctx, &params, self.stream).unwrap();
        });
    }

    fn rope(&self, batch: usize, seq: usize, heads: usize, kv_heads: usize, dim: usize) {
        let bytes = batch * seq * (heads + kv_heads) * dim * 4;
        let mut q = self.sets(&[batch, seq, heads, dim], bytes);
        let mut k = self.sets(&[batch, seq, kv_heads, dim], bytes);
        self.report("rope", &[batch, seq, heads, kv_heads, dim], bytes, |i| {
            let params = rope::Params {
                q: Some(InOut::InPlace(q.view_mut(i))),
                k: Some(InOut::InPlace(k.view_mut(i))),
                ..rope::Params::default()
            };
            rope::forward(&self.ctx, &params, self.stream).unwrap();
        });
    }

    fn embedding(&self, vocab: usize, tokens: usize, dim: usize) {
        let bytes = tokens * dim * 4;
        let table = self.sets(&[vocab, dim], WORKING_SET);
        let mut out = self.sets(&[tokens, dim], bytes);
        let mut rng = rand::rng();
        let ids: Vec<i32> = (0..tokens)
            .map(|_| rng.random_range(0..vocab as i32))
            .collect();
        let ids = Buffer::from_slice(&self.ctx, &ids).unwrap();
        let layout = Layout::contiguous(&[tokens]).unwrap();
        self.report("embedding", &[vocab, tokens, dim], bytes, |i| {
            let params = embedding::Params {
                vocabulary: None,
                workspace: Workspace::none(),
                table: table.view(i),
                ids: ids.tensor(0, DType::I32, layout).unwrap(),
                out: out.view_mut(i),
            };
            embedding::forward(&self.ctx, &params, self.stream).unwrap();
        });
    }

    /// With the workspace that it asks for, and with the intermediate alone that it needs. Few rows
    /// are bound by reading the weights, as the copy beside them is; many are not.
    fn mlp(&self, rows: usize, hidden: usize, intermediate: usize) {
        let bytes = (3 * hidden * intermediate + 2 * rows * hidden) * 2;
        let gate_up = self.sets(&[2 * intermediate, hidden], bytes);
        let down = self.sets(&[hidden, intermediate], bytes);
        let x = self.sets(&[rows, hidden], bytes);
        let mut out = self.sets(&[rows, hidden], bytes);
        let weights = |i| [gate_up.view(i), down.view(i)];
        let asked = block(x.view(0), weights(0), out.view_mut(0), Workspace::none());
        let asked = mlp::workspace_size(&self.ctx, &asked).unwrap();
        for (name, size) in [
            ("mlp", asked),
            ("mlp_least_workspace", rows * intermediate * 2),
        ] {
            let mut workspace = self.buffer(size);
            self.report(name, &[rows, hidden, intermediate], bytes, |i| {
                let params = block(
                    x.view(i),
                    weights(i),
                    out.view_mut(i),
                    workspace.workspace(),
                );
                mlp::forward(&self.ctx, &params, self.stream).unwrap();
            });
        }
    }

    /// Time until a call returns that launches on a queue which is not full, of each way to a
    /// kernel, beside the driver's own launch.
    fn host_costs(&self) {
        let bare = BareLaunch::new();
        let about =
            json!({ "what": "cuLaunchKernel of an empty kernel with the parameters of rms_norm" });
        self.host_cost("launch", about, || bare.launch(self.stream));
        let (from, to) = (self.buffer(1024), self.buffer(1024));
        self.host_cost("copy", json!({ "bytes": 1024 }), || {
            let kind = CopyKind::DeviceToDevice;
            // SAFETY: both have this many bytes, and nothing else uses them.
            unsafe {
                memory::copy(
                    &self.ctx,
                    to.as_ptr(),
                    from.as_ptr(),
                    1024,
                    kind,
                    self.stream,
                )
                .unwrap();
            }
        });
        let x = self.sets(&[1, 1024], WORKING_SET);
        let mut out = self.sets(&[1, 1024], WORKING_SET);
        self.host_cost("rms_norm", json!({ "shape": [1, 1024] }), || {
            let params = rms_norm::Params {
                x: InOut::Apart {
                    input: x.view(0),
                    output: out.view_mut(0),
                },
                residual: None,
                weight: None,
                weight_offset: 0.0,
                epsilon: 1e-5,
            };
            rms_norm::forward(&self.ctx, &params, self.stream).unwrap();
        });
        // A few rows go to a kernel of the library's, more to cuBLASLt.
        for rows in [1, 64] {
            self.linear_host_cost(rows);
        }
        // One launch where keys are few, two where they are split, and one of the Hopper kernels
        // where there are.
        for (queries, keys) in [(1, 256), (1, 4096), (256, 256)] {
            self.attention_host_cost(queries, keys);
        }
    }

    fn linear_host_cost(&self, rows: usize) {
        let (x, weight) = (
            self.sets(&[rows, 64], WORKING_SET),
            self.sets(&[64, 64], WORKING_SET),
        );
        let mut out = self.sets(&[rows, 64], WORKING_SET);
        self.host_cost("linear", json!({ "shape": [rows, 64, 64] }), || {
            let params = linear::Params {
                x_norm: None,
                parallel: None,
                x: x.view(0),
                weights: linear::Weights {
                    weight: weight.view(0),
                    bias: None,
                },
                output: linear::Output::Write(out.view_mut(0)),
                workspace: Workspace::none(),
            };
            linear::forward(&self.ctx, &params, self.stream).unwrap();
        });
    }

    fn attention_host_cost(&self, queries: usize, keys: usize) {
        let q = self.sets(&[1, queries, 32, 128], WORKING_SET);
        let (k, v) = (
            self.sets(&[1, keys, 8, 128], WORKING_SET),
            self.sets(&[1, keys, 8, 128], WORKING_SET),
        );
        let mut out = self.sets(&[1, queries, 32, 128], WORKING_SET);
        let params = attention::Params::new(q.view(0), k.view(0), v.view(0), out.view_mut(0));
        let size = attention::workspace_size(&self.ctx, &params).unwrap();
        let implementation = attention::supported(&self.ctx, &params).unwrap();
        let mut workspace = self.buffer(size);
        let params = attention::Params {
            workspace: workspace.workspace(),
            ..params
        };
        let about = json!({
            "queries": queries,
            "keys": keys,
            "implementation": format!("{implementation:?}"),
            "workspace_size": size,
        });
        self.host_cost("attention", about, || {
            attention::forward(&self.ctx, &params, self.stream).unwrap();
        });
    }

    fn buffer(&self, bytes: usize) -> Buffer {
        Buffer::new(&self.ctx, bytes).unwrap()
    }

    /// Prints the least of several rounds' means.
    fn host_cost(&self, op: &str, about: serde_json::Value, mut call: impl FnMut()) {
        let mut least = f64::INFINITY;
        let calls = 100;
        for _ in 0..50 {
            let started = Instant::now();
            for _ in 0..calls {
                call();
            }
            least = least.min(started.elapsed().as_secs_f64() / f64::from(calls));
            self.ctx.synchronize(self.stream).unwrap();
        }
        println!(
            "{}",
            json!({ "op": op, "about": about, "host_us": round(least * 1e6) })
        );
    }
}

fn block<'a>(
    x: TensorRef<'a>,
    [gate_up, down]: [TensorRef<'a>; 2],
    out: TensorMut<'a>,
    workspace: Workspace<'a>,
) -> mlp::Params<'a> {
    let bare = |weight| linear::Weights { weight, bias: None };
    mlp::Params {
        x_norm: None,
        parallel: None,
        x,
        gate_up: mlp::GateUp::Packed {
            weights: bare(gate_up),
            order: swiglu::GateOrder::GateFirst,
        },
        activation: swiglu::Activation::Silu,
        intermediate_norm: None,
        down: bare(down),
        output: linear::Output::Write(out),
        workspace,
        gate_up_out: None,
    }
}

/// An empty kernel, launched as a program without this library would: what no call can cost less
/// than.
struct BareLaunch {
    function: sys::CUfunction,
}

impl BareLaunch {
    const SCALARS: usize = 128;

    fn new() -> BareLaunch {
        let ptx = format!(
            ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing(.param .u64 a, .param .u64 b, .param .u64 c,\n\
             .param .u64 d, .param .u64 e, .param .u64 f, .param .align 8 .b8 g[{}]) {{ ret; }}\n\0",
            BareLaunch::SCALARS
        );
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: both are valid for writes, the text ends in NUL, and the harness has made the
        // primary context current.
        unsafe {
            ok(sys::cuModuleLoadData(&mut module, ptx.as_ptr().cast()));
            ok(sys::cuModuleGetFunction(
                &mut function,
                module,
                c"nothing".as_ptr(),
            ));
        }
        BareLaunch { function }
    }

    fn launch(&self, stream: Stream) {
        let (mut pointers, mut scalars) = ([0u64; 6], [0u64; BareLaunch::SCALARS / 8]);
        let mut parameters = [ptr::null_mut(); 7];
        for (parameter, pointer) in parameters.iter_mut().zip(&mut pointers) {
            *parameter = ptr::from_mut(pointer).cast();
        }
        parameters[6] = scalars.as_mut_ptr().cast();
        // SAFETY: as many parameters as the kernel has, of its sizes; it reads none.
        ok(unsafe {
            sys::cuLaunchKernel(
                self.function,
                1,
                1,
                1,
                128,
                1,
                1,
                0,
                stream.as_raw().cast(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        });
    }
}

fn round(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

fn ok(result: sys::CUresult) {
    assert_eq!(result, sys::CUresult::CUDA_SUCCESS);
}
