//! What linear layers, feed-forward blocks, casts and argmax have only on the CUDA backend:
//! streams, graph capture, threads, sizes that the host-only tests have no time for.
//!
//! Their numerics are in each operation's own tests, which run on every device there is.
use crate::common::graph::Graph;
use crate::common::reference::linear::{
    Gradients as OfLinear, linear as exact_linear, linear_backward as exact_gradients,
    linear_backward_f32 as gradients_f32, linear_f32,
};
use crate::common::reference::mlp::{Layer, Layers, Plain, mlp as exact_mlp};
use crate::common::{
    DeviceTensor, TestTensor, assert_flash_rule_of_sums, assert_gradient_rule, cut_off, gpu, rng,
    rounded,
};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::ops::{argmax, cast};
use unsloth::{Context, DType, InOut, Layout, Stream, Workspace};

fn contiguous(shape: &[usize]) -> Layout {
    Layout::contiguous(shape).unwrap()
}

fn normal(ctx: &Context, dtype: DType, shape: &[usize]) -> DeviceTensor {
    TestTensor::normal(&mut rng(), dtype, contiguous(shape)).upload(ctx)
}

fn poisoned(ctx: &Context, dtype: DType, shape: &[usize]) -> DeviceTensor {
    TestTensor::poisoned(dtype, contiguous(shape)).upload(ctx)
}

/// Weights whose products of normal inputs are about as large as those.
fn weights(ctx: &Context, dtype: DType, n: usize, k: usize) -> DeviceTensor {
    let values = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[n, k])).values();
    let scale = 1.0 / (k as f64).sqrt();
    let values: Vec<f64> = values.iter().map(|v| v * scale).collect();
    TestTensor::of(dtype, &[n, k], &values).upload(ctx)
}

/// An operation with its tensors.
trait Call {
    fn queue(&mut self, ctx: &Context, stream: Stream);
    /// The tensor that a replay may find changed.
    fn input(&mut self) -> &mut DeviceTensor;
    /// The output, having checked what lies around it and around the workspace.
    fn result(&self) -> TestTensor;
    /// Poisons the output, and the workspace if there is one.
    fn poison(&mut self);
}

fn poison(tensor: &mut DeviceTensor) {
    let poisoned = TestTensor::poisoned(tensor.dtype, tensor.layout);
    tensor.overwrite(&poisoned);
}

/// With the workspace that is asked for.
struct Product {
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: DeviceTensor,
    residual: DeviceTensor,
    out: DeviceTensor,
    workspace: DeviceTensor,
}

impl Product {
    fn new(ctx: &Context, dtype: DType, (rows, n, k): (usize, usize, usize)) -> Product {
        let mut product = Product {
            x: normal(ctx, dtype, &[rows, k]),
            weight: weights(ctx, dtype, n, k),
            bias: normal(ctx, dtype, &[n]),
            residual: normal(ctx, dtype, &[rows, n]),
            out: poisoned(ctx, dtype, &[rows, n]),
            workspace: poisoned(ctx, DType::Bool, &[0]),
        };
        let size = linear::workspace_size(ctx, &product.params()).unwrap();
        product.workspace = poisoned(ctx, DType::Bool, &[size]);
        product
    }

    fn params(&mut self) -> linear::Params<'_> {
        linear::Params {
            x: self.x.view(),
            weights: Weights {
                weight: self.weight.view(),
                bias: Some(self.bias.view()),
            },
            output: Output::Add(InOut::Apart {
                input: self.residual.view(),
                output: self.out.view_mut(),
            }),
            workspace: lent(&self.workspace),
        }
    }
}

/// All of a tensor as a workspace.
fn lent(memory: &DeviceTensor) -> Workspace<'_> {
    let size = memory.layout.num_elements() * memory.dtype.size();
    // SAFETY: the tensor's elements, which nothing else uses.
    unsafe { Workspace::from_raw(memory.data().cast(), size) }
}

impl Call for Product {
    fn queue(&mut self, ctx: &Context, stream: Stream) {
        linear::forward(ctx, &self.params(), stream).unwrap();
    }

    fn input(&mut self) -> &mut DeviceTensor {
        &mut self.x
    }

    fn result(&self) -> TestTensor {
        self.workspace.download_output();
        self.out.download_output()
    }

    fn poison(&mut self) {
        poison(&mut self.out);
        poison(&mut self.workspace);
    }
}

struct Block {
    x: DeviceTensor,
    gate_up: DeviceTensor,
    down: DeviceTensor,
    out: DeviceTensor,
    workspace: DeviceTensor,
}

impl Block {
    /// With a workspace of as many times what is asked for, or with what is needed.
    fn new(
        ctx: &Context,
        dtype: DType,
        (rows, hidden, dim): (usize, usize, usize),
        times: usize,
    ) -> Block {
        let mut block = Block {
            x: normal(ctx, dtype, &[rows, hidden]),
            gate_up: weights(ctx, dtype, 2 * dim, hidden),
            down: weights(ctx, dtype, hidden, dim),
            out: poisoned(ctx, dtype, &[rows, hidden]),
            workspace: poisoned(ctx, dtype, &[1]),
        };
        let size = match times {
            0 => rows * dim * dtype.size(),
            _ => times * mlp::workspace_size(ctx, &block.params()).unwrap(),
        };
        block.workspace = poisoned(ctx, DType::Bool, &[size]);
        block
    }

    fn params(&mut self) -> mlp::Params<'_> {
        let layer = |weight| Weights { weight, bias: None };
        mlp::Params {
            x: self.x.view(),
            gate_up: GateUp::Packed {
                weights: layer(self.gate_up.view()),
                order: GateOrder::UpFirst,
            },
            activation: Activation::Silu,
            down: layer(self.down.view()),
            output: Output::Write(self.out.view_mut()),
            workspace: lent(&self.workspace),
            gate_up_out: None,
        }
    }
}

impl Call for Block {
    fn queue(&mut self, ctx: &Context, stream: Stream) {
        mlp::forward(ctx, &self.params(), stream).unwrap();
    }

    fn input(&mut self) -> &mut DeviceTensor {
        &mut self.x
    }

    fn result(&self) -> TestTensor {
        self.workspace.download_output();
        self.out.download_output()
    }

    fn poison(&mut self) {
        poison(&mut self.out);
        poison(&mut self.workspace);
    }
}

/// Gradients of a layer, with the workspace that is asked for.
struct Gradients {
    dout: DeviceTensor,
    x: DeviceTensor,
    weight: DeviceTensor,
    dx: DeviceTensor,
    dweight: DeviceTensor,
    dbias: DeviceTensor,
    workspace: DeviceTensor,
}

impl Gradients {
    /// Those of the parameters of dtype `gradient`.
    fn new(
        ctx: &Context,
        (dtype, gradient): (DType, DType),
        (rows, n, k): (usize, usize, usize),
    ) -> Gradients {
        let mut call = Gradients {
            dout: normal(ctx, dtype, &[rows, n]),
            x: normal(ctx, dtype, &[rows, k]),
            weight: weights(ctx, dtype, n, k),
            dx: poisoned(ctx, dtype, &[rows, k]),
            dweight: poisoned(ctx, gradient, &[n, k]),
            dbias: poisoned(ctx, gradient, &[n]),
            workspace: poisoned(ctx, DType::Bool, &[0]),
        };
        let size = linear::backward::workspace_size(ctx, &call.params()).unwrap();
        call.workspace = poisoned(ctx, DType::Bool, &[size]);
        call
    }

    fn params(&mut self) -> linear::backward::Params<'_> {
        linear::backward::Params {
            dout: self.dout.view(),
            x: Some(self.x.view()),
            weight: Some(self.weight.view()),
            dx: Some(self.dx.view_mut()),
            dweight: Some(self.dweight.view_mut()),
            dbias: Some(self.dbias.view_mut()),
            accumulate: false,
            workspace: lent(&self.workspace),
        }
    }

    fn results(&self) -> [TestTensor; 3] {
        [&self.dx, &self.dweight, &self.dbias].map(|t| t.download_output())
    }
}

impl Call for Gradients {
    fn queue(&mut self, ctx: &Context, stream: Stream) {
        linear::backward(ctx, &self.params(), stream).unwrap();
    }

    fn input(&mut self) -> &mut DeviceTensor {
        &mut self.dout
    }

    /// All three behind each other; f32 holds each of their values.
    fn result(&self) -> TestTensor {
        self.workspace.download_output();
        let values = self.results().map(|t| t.values()).concat();
        TestTensor::of(DType::F32, &[values.len()], &values)
    }

    fn poison(&mut self) {
        for tensor in [&mut self.dx, &mut self.dweight, &mut self.dbias] {
            poison(tensor);
        }
        poison(&mut self.workspace);
    }
}

/// Rows cast, and the greatest of each.
struct Sample {
    x: DeviceTensor,
    cast: DeviceTensor,
    out: DeviceTensor,
}

impl Sample {
    fn new(ctx: &Context, dtype: DType, rows: usize, n: usize) -> Sample {
        Sample {
            x: normal(ctx, dtype, &[rows, n]),
            cast: poisoned(ctx, DType::Bf16, &[rows, n]),
            out: poisoned(ctx, DType::I64, &[rows]),
        }
    }
}

impl Call for Sample {
    fn queue(&mut self, ctx: &Context, stream: Stream) {
        let params = cast::Params {
            x: self.x.view(),
            out: self.cast.view_mut(),
        };
        cast::forward(ctx, &params, stream).unwrap();
        let params = argmax::Params {
            x: self.cast.view(),
            out: self.out.view_mut(),
        };
        argmax::forward(ctx, &params, stream).unwrap();
    }

    fn input(&mut self) -> &mut DeviceTensor {
        &mut self.x
    }

    fn result(&self) -> TestTensor {
        self.cast.download_output();
        self.out.download_output()
    }

    fn poison(&mut self) {
        poison(&mut self.cast);
        poison(&mut self.out);
    }
}

/// Few and many rows of each operation, through every kind of kernel.
fn calls(ctx: &Context) -> Vec<Box<dyn Call>> {
    use DType::{Bf16, F16, F32};
    let mut calls: Vec<Box<dyn Call>> = Vec::new();
    for (dtype, sizes) in [
        (Bf16, (1, 512, 1024)),
        (F16, (13, 100, 264)),
        (F32, (3, 130, 320)),
        (Bf16, (17, 512, 256)),
        (Bf16, (300, 1024, 1024)),
        (F16, (64, 131, 72)),
        (F32, (90, 200, 300)),
        (F32, (33, 31, 7)),
        // With sums that are shared in a workspace.
        (F32, (70, 256, 2048)),
        (F32, (200, 1024, 512)),
    ] {
        calls.push(Box::new(Product::new(ctx, dtype, sizes)));
    }
    for (dtype, sizes, times) in [
        (Bf16, (2, 256, 704), 1),
        (F32, (5, 64, 100), 1),
        (F16, (40, 128, 330), 2),
        // Rows all at once, in two parts and in three.
        (Bf16, (64, 128, 1400), 2),
        (Bf16, (700, 128, 1400), 1),
        (F16, (1101, 64, 520), 1),
        (F32, (66, 512, 1024), 0),
        (F32, (66, 512, 1024), 1),
        (F32, (130, 256, 1024), 2),
    ] {
        calls.push(Box::new(Block::new(ctx, dtype, sizes, times)));
    }
    for (dtypes, sizes) in [
        ((Bf16, Bf16), (300, 512, 256)),
        ((Bf16, F32), (1000, 264, 128)),
        ((F16, F32), (70, 33, 31)),
        ((F32, F32), (200, 256, 320)),
        // A pair that cuBLASLt does not serve.
        ((Bf16, F16), (130, 72, 96)),
    ] {
        calls.push(Box::new(Gradients::new(ctx, dtypes, sizes)));
    }
    calls.push(Box::new(Sample::new(ctx, F32, 3, 4096)));
    calls
}

#[test]
fn every_stream_gives_the_same_bits() {
    let Some(ctx) = gpu() else { return };
    for mut call in calls(&ctx) {
        call.queue(&ctx, Stream::DEFAULT);
        ctx.synchronize(Stream::DEFAULT).unwrap();
        let expected = call.result().bits();
        let stream = ctx.create_stream().unwrap();
        for _ in 0..3 {
            call.poison();
            call.queue(&ctx, stream);
            ctx.synchronize(stream).unwrap();
            assert!(call.result().bits() == expected);
        }
        // SAFETY: made above, and used no more.
        unsafe { ctx.destroy_stream(stream) }.unwrap();
    }
}

#[test]
fn threads_share_a_context() {
    let Some(ctx) = gpu() else { return };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = ctx.create_stream().unwrap();
                for mut call in calls(&ctx) {
                    call.queue(&ctx, stream);
                    ctx.synchronize(stream).unwrap();
                    let expected = call.result().bits();
                    call.poison();
                    call.queue(&ctx, stream);
                    ctx.synchronize(stream).unwrap();
                    assert!(call.result().bits() == expected);
                }
                // SAFETY: made above, and used no more.
                unsafe { ctx.destroy_stream(stream) }.unwrap();
            });
        }
    });
}

/// The first calls of a context go into a graph, whose replays see what the inputs hold then.
#[test]
fn the_first_call_can_be_captured() {
    let Some(first) = gpu() else { return };
    let count = calls(&first).len();
    for index in 0..count {
        let ctx = gpu().unwrap();
        let mut call = calls(&ctx).swap_remove(index);
        let stream = ctx.create_stream().unwrap();
        let graph = Graph::capture(&ctx, stream, || call.queue(&ctx, stream));
        for _ in 0..3 {
            call.poison();
            graph.launch(stream);
            ctx.synchronize(stream).unwrap();
            let replayed = call.result().bits();
            call.poison();
            call.queue(&ctx, stream);
            ctx.synchronize(stream).unwrap();
            assert!(replayed == call.result().bits(), "call {index}");
            let (dtype, layout) = (call.input().dtype, call.input().layout);
            let other = TestTensor::normal(&mut rng(), dtype, layout);
            call.input().overwrite(&other);
        }
        // SAFETY: made above, and used no more.
        unsafe { ctx.destroy_stream(stream) }.unwrap();
    }
}

fn magnitudes(values: &[f64]) -> Vec<f64> {
    values.iter().map(|v| v.abs()).collect()
}

#[test]
fn great_products_agree_with_their_definition() {
    let Some(ctx) = gpu() else { return };
    for (dtype, sizes) in [
        (DType::Bf16, (1, 4096, 4096)),
        (DType::F16, (16, 1100, 4096)),
        (DType::F32, (2, 1000, 4100)),
        (DType::Bf16, (257, 1000, 1024)),
        (DType::F16, (130, 520, 2048)),
        (DType::F32, (128, 512, 1024)),
        (DType::F32, (40, 520, 4096)),
        (DType::F32, (20, 1024, 2048)),
        // Of rows so long that f32 has kernels of their own.
        (DType::F32, (5, 200, 8196)),
        (DType::F32, (13, 200, 9000)),
        (DType::F32, (11, 120, 2000)),
        (DType::Bf16, (70, 300, 8192)),
        (DType::Bf16, (17, 520, 4096)),
    ] {
        let mut call = Product::new(&ctx, dtype, sizes);
        call.queue(&ctx, Stream::DEFAULT);
        ctx.synchronize(Stream::DEFAULT).unwrap();
        let (rows, n, k) = sizes;
        let sizes = (rows, k, n);
        let [x, weight, bias, residual] = [&call.x, &call.weight, &call.bias, &call.residual]
            .map(|tensor| tensor.download().values());
        let expected = exact_linear(&x, &weight, sizes, Some(&bias), Some(&residual));
        let plain = linear_f32(&x, &weight, sizes, Some(&bias), Some(&residual));
        let terms = exact_linear(
            &magnitudes(&x),
            &magnitudes(&weight),
            sizes,
            Some(&magnitudes(&bias)),
            Some(&magnitudes(&residual)),
        );
        assert_flash_rule_of_sums(
            &format!("{dtype} {sizes:?}"),
            dtype,
            &call.result().values(),
            &expected,
            &rounded(dtype, &plain),
            terms.into_iter().fold(0.0, f64::max),
        );
    }
}

#[test]
fn great_gradients_agree_with_their_definition() {
    let Some(ctx) = gpu() else { return };
    for (dtype, gradient, sizes) in [
        (DType::Bf16, DType::F32, (2100, 512, 320)),
        (DType::F16, DType::F16, (1000, 264, 1024)),
        (DType::F32, DType::F32, (1500, 256, 200)),
        (DType::Bf16, DType::F16, (1100, 200, 136)),
        (DType::F32, DType::Bf16, (700, 130, 260)),
    ] {
        let mut call = Gradients::new(&ctx, (dtype, gradient), sizes);
        call.queue(&ctx, Stream::DEFAULT);
        ctx.synchronize(Stream::DEFAULT).unwrap();
        let (rows, n, k) = sizes;
        let sizes = (rows, k, n);
        let [dout, x, weight] = [&call.dout, &call.x, &call.weight].map(|t| t.download().values());
        let all = |g: OfLinear| [g.dx, g.dweight, g.dbias];
        let expected = all(exact_gradients(&dout, &x, &weight, sizes));
        let plain = all(gradients_f32(&dout, &x, &weight, sizes));
        let great = [&dout, &x, &weight].map(|values| magnitudes(values));
        let terms = all(exact_gradients(&great[0], &great[1], &great[2], sizes));
        let dtypes = [dtype, gradient, gradient];
        for (i, got) in call.results().iter().enumerate() {
            let most = terms[i].iter().copied().fold(0.0, f64::max);
            let lost = cut_off(&ctx, dtype, [n, rows, 0][i], &expected[i]);
            assert_gradient_rule(
                &format!("{dtype} {gradient} {sizes:?} {i}"),
                dtypes[i],
                &got.values(),
                &expected[i],
                &rounded(dtypes[i], &plain[i]),
                most.max(lost),
            );
        }
    }
}

#[test]
fn blocks_in_parts_agree_with_their_definition() {
    let Some(ctx) = gpu() else { return };
    for (dtype, (rows, hidden, dim), times) in [
        (DType::Bf16, (64, 256, 1000), 1),
        (DType::Bf16, (64, 256, 1000), 2),
        (DType::F32, (700, 64, 520), 1),
        (DType::F32, (66, 512, 1024), 0),
        (DType::F32, (66, 512, 1024), 1),
        (DType::F32, (131, 256, 1024), 2),
        (DType::F16, (1101, 64, 520), 1),
        (DType::F16, (1101, 64, 520), 3),
    ] {
        let mut call = Block::new(&ctx, dtype, (rows, hidden, dim), times);
        call.queue(&ctx, Stream::DEFAULT);
        ctx.synchronize(Stream::DEFAULT).unwrap();
        let x = call.x.download().values();
        let gate_up = call.gate_up.download().values();
        let (up, gate) = gate_up.split_at(dim * hidden);
        let layers = |of: &dyn Fn(&[f64]) -> Vec<f64>| {
            let layer = |weight: &[f64]| Layer {
                weight: of(weight),
                bias: None,
            };
            Layers {
                gate: layer(gate),
                up: layer(up),
                down: layer(&call.down.download().values()),
            }
        };
        let same = layers(&|values| values.to_vec());
        let sizes = (rows, hidden, dim);
        let run = |plain| exact_mlp(&x, &same, sizes, Activation::Silu, None, plain);
        let great = layers(&magnitudes);
        let terms = exact_mlp(&magnitudes(&x), &great, sizes, Activation::Silu, None, None);
        assert_flash_rule_of_sums(
            &format!("{dtype}"),
            dtype,
            &call.result().values(),
            &run(None),
            &rounded(dtype, &run(Some(Plain::Everything(dtype)))),
            terms.into_iter().fold(0.0, f64::max),
        );
    }
}

/// A workspace is an offer: what is too small for it is not looked at, and what is used must be in
/// order.
#[test]
fn workspaces_of_products_are_checked_where_they_are_of_use() {
    let Some(ctx) = gpu() else { return };
    let mut product = Product::new(&ctx, DType::F32, (70, 256, 2048));
    let size = product.workspace.layout.num_elements();
    if size == 0 {
        println!("cuBLASLt has no use for a workspace here");
        return;
    }
    let aligned = product.workspace.data().cast::<u8>();
    let tensors = [
        ("x", &product.x),
        ("weight", &product.weight),
        ("bias", &product.bias),
        ("residual", &product.residual),
        ("out", &product.out),
    ]
    .map(|(name, tensor)| (name, tensor.data().cast::<u8>()));
    let mut run = |start: *mut u8, size: usize| {
        let params = linear::Params {
            // SAFETY: refused before it is touched, too small to be, or the product's.
            workspace: unsafe { Workspace::from_raw(start, size) },
            ..product.params()
        };
        let done = linear::forward(&ctx, &params, Stream::DEFAULT);
        ctx.synchronize(Stream::DEFAULT).unwrap();
        done.map_err(|e| e.to_string())
    };
    let odd = aligned.wrapping_add(16);
    let problem = format!("linear: workspace {odd:p} is not aligned to 256 bytes");
    assert_eq!(run(odd, size), Err(problem));
    let null = std::ptr::null_mut();
    assert_eq!(run(null, size), Err("linear: workspace is NULL".into()));
    for (name, start) in tensors {
        let start = start.wrapping_sub(start.addr() % 256);
        let problem = run(start, size).unwrap_err();
        // Whatever else lies behind it may be found first.
        let expected = "linear: workspace overlaps ";
        assert!(problem.starts_with(expected), "{name}: {problem}");
        assert_eq!(run(start, size - 1), Ok(()));
    }
    assert_eq!(run(odd, size - 1), Ok(()));
    assert_eq!(run(null, 0), Ok(()));
    assert_eq!(run(aligned, size), Ok(()));
}
