//! Steps of the KV cache that are queued faster than the device runs them, and replayed from a
//! graph.

use crate::common::kv_cache::small;
use crate::common::{contexts, rng};
use rand::Rng;
use unsloth::kv_cache::{Batch, Config, KvCache, PageLayout};
use unsloth::memory::{self, CopyKind};
use unsloth::{Backend, Buffer, DType, Stream, TensorRef};

/// The tables of a batch, one behind the other.
fn tables<'a>(batch: &Batch<'a>) -> [(TensorRef<'a>, &'a [i32]); 4] {
    [
        (batch.seq_lens, batch.host_seq_lens),
        (batch.cu_seqlens, batch.host_cu_seqlens),
        (batch.positions, batch.host_positions),
        (batch.block_table, batch.host_block_table),
    ]
}

/// Every step sees its own tables on the device, however many the host has queued behind it.
#[test]
fn the_host_may_run_ahead() {
    const STEPS: usize = 300;
    for ctx in contexts() {
        let config = Config {
            page_size: 2,
            max_batch_size: 4,
            max_batch_tokens: 32,
            max_sequence_length: 4096,
            ..Config::new(1, 1, 4, 8192, DType::F16)
        };
        let mut cache = KvCache::new(&ctx, &config).unwrap();
        let sequences: Vec<_> = (0..6).map(|_| cache.create_sequence().unwrap()).collect();
        let words = 4 + 5 + 32 + 4 * config.max_pages_per_sequence();
        let log = Buffer::new(&ctx, STEPS * words * 4).unwrap();
        let busy = match ctx.backend() {
            Backend::Cpu => None,
            _ => Some(Buffer::new(&ctx, 1 << 28).unwrap()),
        };
        let stream = ctx.create_stream().unwrap();
        let rng = &mut rng();
        let mut expected = Vec::new();
        for step in 0..STEPS {
            if let Some(busy) = &busy {
                // Tens of microseconds for the device, and hardly one for the host.
                // SAFETY: the range is the buffer's.
                unsafe { memory::set(&ctx, busy.as_ptr(), 1, busy.size(), stream) }.unwrap();
            }
            let start = rng.random_range(0..sequences.len());
            let chosen = sequences.iter().cycle().skip(start);
            let batch: Vec<_> = chosen
                .take(rng.random_range(0..=4))
                .map(|&id| (id, rng.random_range(0..=8)))
                .collect();
            cache.extend(&batch, stream).unwrap();
            let batch = cache.batch().unwrap();
            let mut seen: Vec<i32> = Vec::new();
            for (device, host) in tables(&batch) {
                let to = log.as_ptr().wrapping_add((step * words + seen.len()) * 4);
                let kind = CopyKind::DeviceToDevice;
                // SAFETY: a step's tables have as many words at most, and the device's as many as
                // the host's.
                unsafe {
                    memory::copy(&ctx, to, device.as_ptr(), host.len() * 4, kind, stream).unwrap();
                }
                seen.extend(host);
            }
            expected.push(seen);
        }
        for (step, expected) in expected.iter().enumerate() {
            let read = log.to_vec::<i32>(step * words * 4, expected.len(), stream);
            assert_eq!(read.unwrap(), *expected, "step {step}");
        }
        // SAFETY: made above, and used no more.
        unsafe { ctx.destroy_stream(stream) }.unwrap();
    }
}

/// The tables stay where they are, whatever the batch.
#[test]
fn tables_stay_at_their_addresses() {
    for ctx in contexts() {
        let mut cache = KvCache::new(&ctx, &small(PageLayout::TokenMajor, 4, DType::F32)).unwrap();
        let ids: Vec<_> = (0..3).map(|_| cache.create_sequence().unwrap()).collect();
        let mut addresses = Vec::new();
        for batch in [&[(ids[0], 3)][..], &[(ids[2], 1), (ids[0], 9)], &[]] {
            cache.extend(batch, Stream::DEFAULT).unwrap();
            let batch = cache.batch().unwrap();
            addresses.push(tables(&batch).map(|(device, host)| (device.as_ptr(), host.as_ptr())));
        }
        assert!(addresses.iter().all(|a| *a == addresses[0]));
    }
}

#[cfg(feature = "cuda")]
mod captured {
    use super::*;
    use crate::common::graph::Graph;
    use crate::common::kv_cache::download;
    use crate::common::{DeviceTensor, TestTensor};
    use unsloth::kv_cache::{Append, SequenceId};
    use unsloth::ops::attention;
    use unsloth::{Context, Layout};

    const HEADS: usize = 6;
    const KV_HEADS: usize = 2;
    const DIM: usize = 64;
    const LAYERS: usize = 2;

    /// A cache with three sequences, and the tensors of a decode step of all of them.
    struct Decoder {
        ctx: Context,
        cache: KvCache,
        ids: Vec<SequenceId>,
        /// Per layer: queries, keys, values, and the output.
        layers: Vec<[DeviceTensor; 4]>,
        workspace: Buffer,
    }

    impl Decoder {
        fn new(ctx: &Context, prompts: &[(usize, TestTensor)], stream: Stream) -> Decoder {
            let config = Config {
                page_size: 8,
                max_batch_size: 4,
                ..Config::new(LAYERS, KV_HEADS, DIM, 64, DType::Bf16)
            };
            let mut cache = KvCache::new(ctx, &config).unwrap();
            let mut ids = Vec::new();
            for (length, keys) in prompts {
                let id = cache.create_sequence().unwrap();
                cache.extend(&[(id, *length)], stream).unwrap();
                let keys = keys.upload(ctx);
                for layer in 0..LAYERS {
                    let append = Append {
                        layer,
                        k: keys.view(),
                        v: keys.view(),
                        q: None,
                        rotation: None,
                    };
                    cache.append(&append, stream).unwrap();
                }
                ctx.synchronize(stream).unwrap();
                ids.push(id);
            }
            let blank = |heads| {
                let layout = Layout::contiguous(&[ids.len(), heads, DIM]).unwrap();
                TestTensor::poisoned(DType::Bf16, layout).upload(ctx)
            };
            let layers = (0..LAYERS).map(|_| [HEADS, KV_HEADS, KV_HEADS, HEADS].map(blank));
            let mut decoder = Decoder {
                layers: layers.collect(),
                workspace: Buffer::new(ctx, 0).unwrap(),
                ctx: ctx.clone(),
                cache,
                ids,
            };
            decoder.extend(stream);
            let [q, _, _, out] = &mut decoder.layers[0];
            let params = decoder.cache.attention(0, q.view(), out.view_mut());
            let size = attention::workspace_size(ctx, &params.unwrap()).unwrap();
            decoder.workspace = Buffer::new(ctx, size).unwrap();
            for id in &decoder.ids {
                let position = decoder.cache.sequence(*id).unwrap().position;
                decoder.cache.truncate_sequence(*id, position - 1).unwrap();
            }
            decoder
        }

        fn extend(&mut self, stream: Stream) {
            let batch: Vec<_> = self.ids.iter().map(|&id| (id, 1)).collect();
            self.cache.extend(&batch, stream).unwrap();
        }

        /// The step's work, which neither allocates nor waits.
        fn queue(&mut self, stream: Stream) {
            for (layer, [q, k, v, out]) in self.layers.iter_mut().enumerate() {
                let append = Append {
                    layer,
                    k: k.view(),
                    v: v.view(),
                    q: None,
                    rotation: None,
                };
                self.cache.append(&append, stream).unwrap();
                let params = self.cache.attention(layer, q.view(), out.view_mut());
                let params = attention::Params {
                    workspace: self.workspace.workspace(),
                    ..params.unwrap()
                };
                attention::forward(&self.ctx, &params, stream).unwrap();
            }
        }

        fn contents(&self) -> Vec<[Vec<f64>; 2]> {
            let layer = |layer| {
                let (k, v) = self.cache.layer(layer).unwrap();
                [download(&self.ctx, &k), download(&self.ctx, &v)]
            };
            (0..LAYERS).map(layer).collect()
        }
    }

    /// One graph serves every later step of the batch: pages are added and lengths grow without it
    /// being captured again.
    #[test]
    fn one_graph_serves_every_step() {
        const STEPS: usize = 40;
        for ctx in contexts() {
            if ctx.backend() != Backend::Cuda {
                continue;
            }
            let stream = ctx.create_stream().unwrap();
            let rng = &mut rng();
            let prompts: Vec<_> = [5, 16, 31]
                .into_iter()
                .map(|length| {
                    let layout = Layout::contiguous(&[length, KV_HEADS, DIM]).unwrap();
                    (length, TestTensor::normal(rng, DType::Bf16, layout))
                })
                .collect();
            let mut eager = Decoder::new(&ctx, &prompts, stream);
            let mut replayed = Decoder::new(&ctx, &prompts, stream);
            let mut graph = None;
            for step in 0..STEPS {
                for layer in 0..LAYERS {
                    for tensor in 0..3 {
                        let layout = eager.layers[layer][tensor].layout;
                        let fresh = TestTensor::normal(rng, DType::Bf16, layout);
                        eager.layers[layer][tensor].overwrite(&fresh);
                        replayed.layers[layer][tensor].overwrite(&fresh);
                    }
                }
                eager.extend(stream);
                eager.queue(stream);
                replayed.extend(stream);
                let graph = graph
                    .get_or_insert_with(|| Graph::capture(&ctx, stream, || replayed.queue(stream)));
                graph.launch(stream);
                ctx.synchronize(stream).unwrap();
                for layer in 0..LAYERS {
                    let [expected, out] =
                        [&eager, &replayed].map(|d| d.layers[layer][3].download_output().bits());
                    assert!(out == expected, "step {step}, layer {layer}");
                }
            }
            assert!(eager.contents() == replayed.contents());
            drop(graph);
            // SAFETY: made above, and used no more.
            unsafe { ctx.destroy_stream(stream) }.unwrap();
        }
    }

    #[test]
    fn bookkeeping_stays_outside_of_a_capture() {
        for ctx in contexts() {
            if ctx.backend() != Backend::Cuda {
                continue;
            }
            let stream = ctx.create_stream().unwrap();
            let config = small(PageLayout::TokenMajor, 4, DType::F32);
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let id = cache.create_sequence().unwrap();
            cache.extend(&[(id, 3)], stream).unwrap();
            let before = cache.stats().unwrap();
            Graph::capture(&ctx, stream, || {
                assert_eq!(
                    cache.extend(&[(id, 1)], stream).unwrap_err().to_string(),
                    "kv_cache_extend: stream is being captured into a graph: extend before the capture and before each launch of the graph"
                );
                let error = cache.reserve_sequence(id, 9, stream).unwrap_err();
                assert_eq!(
                    error.to_string(),
                    "kv_cache_sequence_reserve: stream is being captured into a graph: reserve before the capture"
                );
            });
            assert_eq!(cache.stats().unwrap(), before);
            assert_eq!(cache.batch().unwrap().num_tokens, 3);
            // SAFETY: made above, and used no more.
            unsafe { ctx.destroy_stream(stream) }.unwrap();
        }
    }
}
