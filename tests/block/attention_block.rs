//! The attention block against the operations that it is made of, and its errors.

use crate::common::attention_block::*;
use crate::common::workspace::poisoned_workspace;
use crate::common::{DeviceTensor, FLOATS, TestTensor, contexts};
use unsloth::kv_cache::{Config, KvCache};
use unsloth::ops::attention;
use unsloth::ops::attention_block::{self, Params, Projections};
use unsloth::ops::linear::Output;
use unsloth::ops::rope::Positions;
use unsloth::{Buffer, Context, DType, Layout, Stream, TensorRef};

fn cases() -> Vec<Case> {
    vec![
        PLAIN,
        Case {
            packed: true,
            tokens: &[9],
            residual: Residual::InPlace,
            ..PLAIN
        },
        Case {
            biases: true,
            norm: Norm::Heads,
            residual: Residual::Apart,
            ..PLAIN
        },
        Case {
            packed: true,
            biases: true,
            norm: Norm::All,
            heads: (3, 1),
            dims: (8, 5),
            weight_dtype: Some(DType::F32),
            ..PLAIN
        },
        Case {
            attended_norm: true,
            residual: Residual::InPlace,
            ..PLAIN
        },
        Case {
            rotate: false,
            bidirectional: true,
            window: 3,
            tokens: &[3, 11],
            ..PLAIN
        },
        Case {
            window: 4,
            softcap: 5.0,
            logits: true,
            tokens: &[1, 33],
            heads: (6, 6),
            ..PLAIN
        },
        Case {
            tokens: &[1],
            ..PLAIN
        },
        Case {
            tokens: &[0],
            ..PLAIN
        },
        Case {
            tokens: &[2, 0],
            packed: true,
            ..PLAIN
        },
    ]
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let t = Tensors::new(ctx, dtype, case);
    let [q, k, v] = heads(ctx, &t, case, Positions::From(0), [true; 2]);
    let shape = [case.tokens, &[case.heads.0, case.dims.1]].concat();
    let mut attended = TestTensor::poisoned(dtype, Layout::contiguous(&shape).unwrap()).upload(ctx);
    {
        let batched = |t: TensorRef<'static>| match case.tokens {
            [n] => t.unflattened(0, &[1, *n]).unwrap(),
            _ => t,
        };
        let detach = |t: &DeviceTensor| {
            // SAFETY: the tensors outlive the call.
            let view = unsafe { TensorRef::from_raw(t.data().cast(), t.dtype, t.layout) };
            batched(view)
        };
        let mut out = attended.view_mut();
        if let [n] = case.tokens {
            out = out.unflattened(0, &[1, *n]).unwrap();
        }
        let params = attention::Params {
            causal: !case.bidirectional,
            window_left: case.window,
            window_right: if case.bidirectional { case.window } else { 0 },
            softcap: case.softcap,
            alibi_slopes: case.logits.then(|| t.slopes.view()),
            sinks: case.logits.then(|| t.sinks.view()),
            ..attention::Params::new(detach(&q), detach(&k), detach(&v), out)
        };
        let mut workspace =
            Buffer::new(ctx, attention::workspace_size(ctx, &params).unwrap()).unwrap();
        let params = attention::Params {
            workspace: workspace.workspace(),
            ..params
        };
        attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
    }
    let expected = project_out(ctx, &t, case, &attended);

    let (mut out, residual) = t.outputs(ctx, case);
    let mut params = t.params(case, output(case, &mut out, &residual));
    attention_block::supported(ctx, &params).unwrap();
    let size = attention_block::workspace_size(ctx, &params).unwrap();
    let mut workspace = poisoned_workspace(ctx, size);
    params.workspace = workspace.workspace();
    attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let out = out.download_output();
    assert!(out.values().iter().all(|x| x.is_finite()));
    assert_same(ctx, &out, &expected);
}

#[test]
fn it_is_its_operations() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(), |case| check(&ctx, dtype, case));
        }
    }
}

/// Packed sequences are those sequences one by one.
#[test]
fn packed_sequences_do_not_see_each_other() {
    for ctx in contexts() {
        let case = Case {
            tokens: &[12],
            ..PLAIN
        };
        let t = Tensors::new(&ctx, DType::F32, &case);
        let starts = [0, 5, 5, 12];
        let positions: Vec<i32> = (0..5).chain(0..7).collect();
        let cu = Buffer::from_slice(&ctx, &starts).unwrap();
        let at = Buffer::from_slice(&ctx, &positions).unwrap();
        let i32s = |n: usize| Layout::contiguous(&[n]).unwrap();
        let run = |x: TensorRef<'_>, packed: bool, rows: usize| {
            let layout = Layout::contiguous(&[rows, HIDDEN_OUT]).unwrap();
            let mut out = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let mut params = Params {
                x,
                ..t.params(&case, Output::Write(out.view_mut()))
            };
            if packed {
                params.cu_seqlens = Some(cu.tensor(0, DType::I32, i32s(4)).unwrap());
                params.max_seqlen = 7;
                let at = at.tensor(0, DType::I32, i32s(12)).unwrap();
                params.positions = Positions::PerToken(at);
            }
            let size = attention_block::workspace_size(&ctx, &params).unwrap();
            let mut workspace = poisoned_workspace(&ctx, size);
            params.workspace = workspace.workspace();
            attention_block::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            out.download_output().values()
        };
        let together = run(t.x.view(), true, 12);
        let one = run(t.x.view().narrowed(0, 0, 5).unwrap(), false, 5);
        let two = run(t.x.view().narrowed(0, 5, 7).unwrap(), false, 7);
        assert_near(&together, &[one, two].concat());
    }
}

#[test]
fn bad_calls_say_why() {
    for ctx in contexts() {
        let case = Case {
            tokens: &[4],
            ..PLAIN
        };
        let t = Tensors::new(&ctx, DType::F32, &case);
        type Change = for<'p> fn(&'p Tensors, &mut Params<'p>);
        let cases: [(Change, &str); 12] = [
            (
                |_, p| p.num_heads = 0,
                "attention_block: num_heads is 0 (not set), allowed: 1 to 1048576",
            ),
            (
                |_, p| p.num_kv_heads = 3,
                "attention_block: num_heads is 4, a multiple of num_kv_heads 3 is needed",
            ),
            (
                |_, p| p.head_dim = 513,
                "attention_block: head_dim is 513, allowed: 1 to 512",
            ),
            (
                |_, p| p.num_heads = 8,
                "attention_block: q_weight has 64 rows, 128 are needed",
            ),
            (
                |_, p| p.projections = Projections::Packed(p.out_projection),
                "attention_block: qkv_weight has shape [20, 64], expected [20, 24]",
            ),
            (
                |t, p| p.out_projection.weight = t.qkv.view(),
                "attention_block: out_weight has shape [128, 24], expected [128, 64]",
            ),
            (
                |t, p| p.q_norm = Some(t.sinks.view()),
                "attention_block: q_norm has shape [4], allowed: [16] or [64]",
            ),
            (
                |t, p| p.sinks = Some(t.qkv_bias.view()),
                "attention_block: sinks has shape [128], expected [4]",
            ),
            (
                |t, p| {
                    p.k_norm = Some(t.norms[1].view());
                    p.norm_epsilon = -1.0;
                },
                "attention_block: norm_epsilon is -1, it must be above 0",
            ),
            (
                |_, p| p.softcap = -1.0,
                "attention_block: softcap is -1, at least 0 is needed",
            ),
            (
                |_, p| p.cu_seqlens = Some(TensorRef::from_slice(&[0i32; 4], &[4]).unwrap()),
                "attention_block: positions are absent: packed sequences need them for the rotation",
            ),
            (
                |t, p| p.x = t.residual_view(),
                "attention_block: q_weight has shape [64, 24], expected [64, 20]",
            ),
        ];
        for (change, message) in &cases {
            let layout = Layout::contiguous(&[4, HIDDEN_OUT]).unwrap();
            let mut out = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let mut params = t.params(&case, Output::Write(out.view_mut()));
            change(&t, &mut params);
            let result = attention_block::forward(&ctx, &params, Stream::DEFAULT);
            let query = attention_block::workspace_size(&ctx, &params);
            assert_eq!(result.unwrap_err().to_string(), *message);
            assert_eq!(query.unwrap_err().to_string(), *message);
            crate::common::abi::assert_untouched(&out);
        }
    }
}

#[test]
fn bad_caches_say_why() {
    for ctx in contexts() {
        let case = Case {
            tokens: &[4],
            ..PLAIN
        };
        let t = Tensors::new(&ctx, DType::F32, &case);
        let fails = |cache: &mut KvCache, layer, change: fn(&mut Params<'_>), message: &str| {
            let layout = Layout::contiguous(&[4, HIDDEN_OUT]).unwrap();
            let mut out = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let mut params = t.params(&case, Output::Write(out.view_mut()));
            change(&mut params);
            let result = cache.lend(layer).and_then(|layer| {
                params.cache = Some(layer);
                attention_block::forward(&ctx, &params, Stream::DEFAULT)
            });
            assert_eq!(result.unwrap_err().to_string(), message);
            crate::common::abi::assert_untouched(&out);
        };
        let keep: fn(&mut Params<'_>) = |_| {};
        let config = Config::new(2, 2, 16, 4, DType::F32);
        let mut cache = KvCache::new(&ctx, &config).unwrap();
        fails(
            &mut cache,
            0,
            keep,
            "kv_cache_lend: cache has no current batch: it must be extended first, and again after its sequences changed",
        );
        let id = cache.create_sequence().unwrap();
        cache.extend(&[(id, 3)], Stream::DEFAULT).unwrap();
        fails(
            &mut cache,
            0,
            keep,
            "attention_block: x has 4 tokens, the cache's batch has 3",
        );
        cache.extend(&[(id, 4)], Stream::DEFAULT).unwrap();
        fails(
            &mut cache,
            2,
            keep,
            "kv_cache_lend: layer is 2, the cache has 2 layers",
        );
        fails(
            &mut cache,
            0,
            |p| p.bidirectional = true,
            "attention_block: bidirectional is set: with a cache attention is causal",
        );
        fails(
            &mut cache,
            1,
            keep,
            "attention_block: workspace_size is 0 bytes, 3072 are required",
        );
        let other = Config::new(1, 4, 16, 4, DType::F32);
        let mut cache = KvCache::new(&ctx, &other).unwrap();
        let id = cache.create_sequence().unwrap();
        cache.extend(&[(id, 4)], Stream::DEFAULT).unwrap();
        fails(
            &mut cache,
            0,
            keep,
            "attention_block: num_kv_heads is 2, the cache has 4",
        );
    }
}

/// What the CPU finds in data is named as the block names it.
#[test]
fn errors_of_a_launch_name_the_blocks_arguments() {
    let ctx = Context::cpu().unwrap();
    let case = Case {
        tokens: &[4],
        rotate: false,
        ..PLAIN
    };
    let t = Tensors::new(&ctx, DType::F32, &case);
    let (mut out, _) = t.outputs(&ctx, &case);
    let starts = [0i32, 3, 2];
    let mut params = t.params(&case, Output::Write(out.view_mut()));
    params.cu_seqlens = Some(TensorRef::from_slice(&starts, &[3]).unwrap());
    let size = attention_block::workspace_size(&ctx, &params).unwrap();
    let mut workspace = poisoned_workspace(&ctx, size);
    params.workspace = workspace.workspace();
    let error = attention_block::forward(&ctx, &params, Stream::DEFAULT).unwrap_err();
    let expected = "attention_block: cu_seqlens falls from 3 to 2 at index 2";
    assert_eq!(error.to_string(), expected);
}
