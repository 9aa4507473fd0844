//! What linear layers, feed-forward blocks, casts and argmax have only on the CUDA backend:
//! streams, graph capture, threads, sizes that the host-only tests have no time for.
//!
//! Their numerics are in each operation's own tests, which run on every device there is.

mod calls;

use calls::*;

use crate::blocks::Matrix;
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
use unsloth::ops::linear;
use unsloth::ops::swiglu::Activation;
use unsloth::{Context, DType, Stream, Workspace};

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

/// Blocks that share the steps of a product tell each other anew in each replay, though the workspace is what the
/// replay before has left and the launch is the same.
#[test]
fn replays_share_steps() {
    let Some(ctx) = gpu() else { return };
    check_replays(&ctx, [17, 33 * 128, 17 * 256], true);
}

/// Rows of two launches, the second of which runs beside the first, have the bits of one call in a replay, too.
#[test]
fn replays_have_two_launches() {
    let Some(ctx) = gpu() else { return };
    check_replays(&ctx, [535, 48 * 128, 16 * 256], false);
}

/// Products of rows by a weight `[n, k]`, captured and called.
fn check_replays(ctx: &Context, [rows, n, k]: [usize; 3], shares: bool) {
    let matrix = Matrix::random(ctx, DType::Q4_0, [n, k], 0);
    let mut x = normal(ctx, DType::Bf16, &[rows, k]);
    let mut out = poisoned(ctx, DType::Bf16, &[rows, n]);
    fn params<'a>(
        matrix: &'a Matrix,
        x: &'a DeviceTensor,
        out: &'a mut DeviceTensor,
        workspace: Workspace<'a>,
    ) -> linear::Params<'a> {
        linear::Params {
            x_norm: None,
            parallel: None,
            x: x.view(),
            weights: matrix.weights(false),
            output: linear::Output::Write(out.view_mut()),
            workspace,
        }
    }
    let size = {
        let asked = params(&matrix, &x, &mut out, Workspace::none());
        linear::workspace_size(ctx, &asked).unwrap()
    };
    let [kept, mut other] = [0, 1].map(|_| poisoned(ctx, DType::Bool, &[size]));
    let stream = ctx.create_stream().unwrap();
    let graph = Graph::capture(ctx, stream, || {
        let captured = params(&matrix, &x, &mut out, lent(&kept));
        linear::forward(ctx, &captured, stream).unwrap();
    });
    for replay in 0..4 {
        poison(&mut out);
        graph.launch(stream);
        ctx.synchronize(stream).unwrap();
        let replayed = out.download_output().bits();
        // The last word is that of a block that has told another, which has taken the tag away.
        let words = kept.download_output().bits();
        assert!(
            !shares || words.iter().rev().take(8).all(|byte| *byte == 0),
            "replay {replay}"
        );
        poison(&mut out);
        poison(&mut other);
        let eager = params(&matrix, &x, &mut out, lent(&other));
        linear::forward(ctx, &eager, stream).unwrap();
        ctx.synchronize(stream).unwrap();
        assert!(out.download_output().bits() == replayed, "replay {replay}");
        let next = TestTensor::normal(&mut rng(), x.dtype, x.layout);
        x.overwrite(&next);
    }
    // SAFETY: made above, and used no more.
    unsafe { ctx.destroy_stream(stream) }.unwrap();
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
