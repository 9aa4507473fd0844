//! The attention block with a KV cache, against the operations that it is made of, and against itself without a cache.

use crate::common::attention_block::*;
use crate::common::workspace::poisoned_workspace;
use crate::common::{TestTensor, contexts, rng};
use rand::Rng;
use unsloth::kv_cache::{Append, Config, KvCache, PageLayout};
use unsloth::ops::attention;
use unsloth::ops::attention_block::{self, Params};
use unsloth::ops::linear::Output;
use unsloth::ops::rope::Positions;
use unsloth::{Buffer, Context, DType, Layout, Stream, TensorRef};

/// Before there is a batch the query answers what is enough for every batch of as many tokens, and
/// what is run is refused.
#[test]
fn without_a_batch_the_query_is_for_every_batch() {
    const SEQUENCES: usize = 5;
    for ctx in contexts() {
        for (dtype, tokens) in [
            (DType::F32, &[1]),
            (DType::Bf16, &[1]),
            (DType::Bf16, &[9]),
            (DType::F32, &[40]),
        ] {
            let case = Case { tokens, ..PLAIN };
            let n = case.tokens[0];
            let t = Tensors::new(&ctx, dtype, &case);
            let (mut out, _) = t.outputs(&ctx, &case);
            let config = Config {
                max_batch_size: SEQUENCES,
                ..Config::new(1, 2, 16, 300, dtype)
            };
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let ids = [(); SEQUENCES].map(|()| cache.create_sequence().unwrap());
            let mut params = t.params(&case, Output::Write(out.view_mut()));
            params.cache = Some(cache.describe(0, n).unwrap());
            attention_block::supported(&ctx, &params).unwrap();
            let enough = attention_block::workspace_size(&ctx, &params).unwrap();
            let refused = attention_block::forward(&ctx, &params, Stream::DEFAULT).unwrap_err();
            let no_batch = "attention_block: cache has no current batch";
            assert!(refused.to_string().starts_with(no_batch), "{refused}");
            let mut workspace = poisoned_workspace(&ctx, enough);
            // Every number of sequences with every length of the longest.
            for used in 1..=SEQUENCES {
                for longest in n.div_ceil(used)..=n {
                    let mut left = n;
                    let batch = ids.map(|id| {
                        let count = longest.min(left);
                        left -= count;
                        (id, count)
                    });
                    cache.extend(&batch[..used], Stream::DEFAULT).unwrap();
                    let mut params = t.params(&case, Output::Write(out.view_mut()));
                    params.cache = Some(cache.lend(0).unwrap());
                    let size = attention_block::workspace_size(&ctx, &params).unwrap();
                    assert!(size <= enough, "{used} {longest}: {size} of {enough}");
                    params.workspace = workspace.workspace();
                    attention_block::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                    for id in ids {
                        cache.truncate_sequence(id, 0).unwrap();
                    }
                }
            }
        }
    }
}

/// With a cache: the same bits as projecting, rotating, appending and attending by single operations, over several steps of
/// several sequences.
#[test]
fn with_a_cache_it_is_its_operations() {
    for ctx in contexts() {
        for (dtype, cached) in [
            (DType::F32, DType::F32),
            (DType::F32, DType::F16),
            (DType::Bf16, DType::Bf16),
            (DType::F32, DType::F8E4M3),
            (DType::Bf16, DType::F8E4M3),
        ] {
            let config = Config {
                v_head_dim: 5,
                page_size: 4,
                page_layout: PageLayout::HeadMajor,
                ..Config::new(2, 2, 16, 20, cached)
            };
            let mut caches = [0, 1].map(|_| KvCache::new(&ctx, &config).unwrap());
            for cache in &mut caches {
                for _ in 0..3 {
                    cache.create_sequence().unwrap();
                }
                if cached == DType::F8E4M3 {
                    let (k, v) = (&[0.02, 0.3], &[0.7]);
                    cache.set_scales(1, k, &[v[0]; 2], Stream::DEFAULT).unwrap();
                    cache.set_scales(0, v, k, Stream::DEFAULT).unwrap();
                }
            }
            let steps: [(&'static [usize], [usize; 3]); 4] = [
                (&[9], [6, 3, 0]),
                (&[3], [1, 1, 1]),
                (&[5], [0, 4, 1]),
                (&[0], [0, 0, 0]),
            ];
            for (tokens, counts) in steps {
                let case = Case {
                    tokens,
                    dims: (16, 5),
                    norm: Norm::Heads,
                    packed: tokens[0] % 2 == 0,
                    ..PLAIN
                };
                // Identifiers are the same in both, which had the same history.
                let batch: Vec<_> = (0..3usize)
                    .map(|i| unsloth::kv_cache::SequenceId::from_raw((1 << 32) | i as i64))
                    .zip(counts)
                    .collect();
                for cache in &mut caches {
                    cache.extend(&batch, Stream::DEFAULT).unwrap();
                }
                for layer in 0..2 {
                    let t = Tensors::new(&ctx, dtype, &case);
                    let expected = cached_by_hand(&ctx, &t, &case, &mut caches[0], layer);
                    let (mut out, residual) = t.outputs(&ctx, &case);
                    let mut params = t.params(&case, output(&case, &mut out, &residual));
                    params.cache = Some(caches[1].lend(layer).unwrap());
                    attention_block::supported(&ctx, &params).unwrap();
                    let size = attention_block::workspace_size(&ctx, &params).unwrap();
                    let mut workspace = poisoned_workspace(&ctx, size);
                    params.workspace = workspace.workspace();
                    attention_block::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                    assert_same(&ctx, &out.download_output(), &expected);
                }
            }
        }
    }
}

fn cached_by_hand(
    ctx: &Context,
    t: &Tensors,
    case: &Case,
    cache: &mut KvCache,
    layer: usize,
) -> TestTensor {
    // The cache rotates keys itself.
    let positions = Positions::PerToken(cache.batch().unwrap().positions);
    let [q, k, v] = heads(ctx, t, case, positions, [true, false]);
    let rotation = Tensors::rotation(case).unwrap();
    let append = Append {
        layer,
        k: k.view(),
        v: v.view(),
        q: None,
        rotation: Some(rotation),
    };
    cache.append(&append, Stream::DEFAULT).unwrap();
    let shape = [case.tokens[0], case.heads.0, case.dims.1];
    let layout = Layout::contiguous(&shape).unwrap();
    let mut attended = TestTensor::poisoned(t.x.dtype, layout).upload(ctx);
    let params = cache
        .attention(layer, q.view(), attended.view_mut())
        .unwrap();
    let mut workspace = Buffer::new(ctx, attention::workspace_size(ctx, &params).unwrap()).unwrap();
    let params = attention::Params {
        workspace: workspace.workspace(),
        ..params
    };
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
    project_out(ctx, t, case, &attended)
}

/// Feeding a text through the cache in pieces gives what the whole gives at once without one.
#[test]
fn append_then_attend_is_attention() {
    for ctx in contexts() {
        for page_layout in [PageLayout::TokenMajor, PageLayout::HeadMajor] {
            let case = Case {
                tokens: &[29],
                ..PLAIN
            };
            let t = Tensors::new(&ctx, DType::F32, &case);
            let layout = Layout::contiguous(&[29, HIDDEN_OUT]).unwrap();
            let run = |ctx: &Context, cache: Option<&mut KvCache>, x: TensorRef<'_>| {
                let rows = x.shape()[0];
                let layout = Layout::contiguous(&[rows, HIDDEN_OUT]).unwrap();
                let mut out = TestTensor::poisoned(DType::F32, layout).upload(ctx);
                let mut params = Params {
                    x,
                    ..t.params(&case, Output::Write(out.view_mut()))
                };
                params.cache = cache.map(|cache| cache.lend(0).unwrap());
                let size = attention_block::workspace_size(ctx, &params);
                let mut workspace = poisoned_workspace(ctx, size.unwrap());
                params.workspace = workspace.workspace();
                attention_block::forward(ctx, &params, Stream::DEFAULT).unwrap();
                out.download_output().values()
            };
            let whole = run(&ctx, None, t.x.view());
            assert_eq!(whole.len(), layout.num_elements());
            let config = Config {
                page_size: 8,
                page_layout,
                ..Config::new(1, 2, 16, 8, DType::F32)
            };
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let id = cache.create_sequence().unwrap();
            let mut pieces = Vec::new();
            let mut start = 0;
            while start < 29 {
                let len = rng().random_range(1..=8usize).min(29 - start);
                cache.extend(&[(id, len)], Stream::DEFAULT).unwrap();
                let x = t.x.view().narrowed(0, start, len).unwrap();
                pieces.extend(run(&ctx, Some(&mut cache), x));
                start += len;
            }
            assert_near(&whole, &pieces);
        }
    }
}
