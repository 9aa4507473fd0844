//! The KV cache against a plain model of it, and its errors.

mod common;

use std::collections::HashMap;

use common::{FLOATS, TestTensor, contexts, rng};
use proptest::prelude::*;
use unsloth::kv_cache::{Append, CacheStats, Config, KvCache, PageLayout, SequenceId};
use unsloth::memory::{self, CopyKind};
use unsloth::ops::attention;
use unsloth::ops::rope::{self, Angles, Positions, Rotation, Style};
use unsloth::{Buffer, Context, ContextOptions, DType, Error, InOut, Layout, Stream, TensorRef};

/// Copies a view of device memory to the host, as the elements' values in row-major order.
fn download(ctx: &Context, view: &TensorRef<'_>) -> Vec<f64> {
    assert!(view.layout().is_contiguous());
    let mut host = TestTensor::poisoned(view.dtype(), *view.layout());
    let mut bytes = vec![0u8; view.layout().num_elements() * view.dtype().size()];
    // SAFETY: both ranges have this many bytes.
    unsafe {
        memory::copy(
            ctx,
            bytes.as_mut_ptr(),
            view.as_ptr(),
            bytes.len(),
            CopyKind::DeviceToHost,
            Stream::DEFAULT,
        )
        .unwrap();
    }
    ctx.synchronize(Stream::DEFAULT).unwrap();
    host.set_bits(&bytes);
    host.values()
}

/// What token `token` holds in a component of a layer's keys (`which` 0) or values (1): exact in f16.
fn component(token: usize, layer: usize, which: usize, head: usize, dim: usize) -> f64 {
    ((token * 131 + layer * 31 + which * 17 + head * 7 + dim) % 2039) as f64
}

/// Appends `tokens` to every layer of the current batch.
fn append_all(ctx: &Context, cache: &mut KvCache, tokens: &[usize], dtype: DType) {
    let config = cache.config().clone();
    for layer in 0..config.num_layers {
        let tensor = |which, dim: usize| {
            let mut values = Vec::new();
            for &token in tokens {
                for head in 0..config.num_kv_heads {
                    values.extend((0..dim).map(|d| component(token, layer, which, head, d)));
                }
            }
            // Keys are a slice of a wider tensor, as from a packed projection.
            let shape = [tokens.len(), config.num_kv_heads, dim];
            let layout = common::tensor::strided_rows(&shape, which);
            TestTensor::from_values(dtype, layout, &values).upload(ctx)
        };
        let (k, v) = (tensor(0, config.head_dim), tensor(1, config.v_head_dim));
        let params = Append {
            layer,
            k: k.view(),
            v: v.view(),
            rotation: None,
        };
        cache.append(&params, Stream::DEFAULT).unwrap();
    }
}

/// The pages of every layer, on the host.
struct Contents {
    layers: Vec<[Vec<f64>; 2]>,
}

impl Contents {
    fn of(ctx: &Context, cache: &KvCache) -> Contents {
        let layers = (0..cache.config().num_layers)
            .map(|layer| {
                let (k, v) = cache.layer(layer).unwrap();
                [download(ctx, &k), download(ctx, &v)]
            })
            .collect();
        Contents { layers }
    }

    /// Asserts that slot `index` of a sequence's pages holds `token`, in every layer, head and component.
    fn assert_token(&self, config: &Config, pages: &[u32], index: usize, token: usize) {
        let (page, slot) = (
            pages[index / config.page_size] as usize,
            index % config.page_size,
        );
        for (layer, sides) in self.layers.iter().enumerate() {
            for (which, dim) in [config.head_dim, config.v_head_dim].into_iter().enumerate() {
                for head in 0..config.num_kv_heads {
                    let row = match config.page_layout {
                        PageLayout::TokenMajor => {
                            (page * config.page_size + slot) * config.num_kv_heads + head
                        }
                        PageLayout::HeadMajor => {
                            (page * config.num_kv_heads + head) * config.page_size + slot
                        }
                    };
                    for d in 0..dim {
                        let expected = component(token, layer, which, head, d);
                        assert_eq!(
                            sides[which][row * dim + d],
                            expected,
                            "token {token} at index {index}, layer {layer}, side {which}, head {head}"
                        );
                    }
                }
            }
        }
    }
}

/// The plain model: what each sequence holds, as (position, token), and its next position.
#[derive(Clone, Debug, Default, PartialEq)]
struct ModelSequence {
    held: Vec<(usize, usize)>,
    next: usize,
}

impl ModelSequence {
    fn missing(&self) -> Vec<usize> {
        let held: Vec<_> = self.held.iter().map(|h| h.0).collect();
        (0..self.next).filter(|p| !held.contains(p)).collect()
    }

    /// Drops the pages that lie between the sinks and the window, if what is missing then is still one range.
    fn evict(&mut self, num_sinks: usize, window: usize, page_size: usize) {
        let mut after = self.clone();
        after.held.retain(|&(position, _)| {
            let first = position / page_size * page_size;
            let is_sink = first < num_sinks;
            let is_recent = first + page_size > self.next.saturating_sub(window);
            is_sink || is_recent
        });
        let missing = after.missing();
        if missing.windows(2).all(|pair| pair[1] == pair[0] + 1) {
            *self = after;
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Create,
    Extend(Vec<(usize, usize)>),
    Fork(usize),
    Truncate(usize, usize),
    Evict(usize, usize, usize),
    Reserve(usize, usize),
    Free(usize),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let who = 0..64usize;
    let action = prop_oneof![
        2 => Just(Action::Create),
        8 => prop::collection::vec((who.clone(), 0..7usize), 1..4).prop_map(Action::Extend),
        3 => who.clone().prop_map(Action::Fork),
        3 => (who.clone(), 0..40usize).prop_map(|(s, n)| Action::Truncate(s, n)),
        3 => (who.clone(), 0..10usize, 0..14usize).prop_map(|(s, n, w)| Action::Evict(s, n, w)),
        1 => (who.clone(), 0..9usize).prop_map(|(s, n)| Action::Reserve(s, n)),
        2 => who.prop_map(Action::Free),
    ];
    prop::collection::vec(action, 1..60)
}

struct Harness {
    ctx: Context,
    cache: KvCache,
    model: Vec<(SequenceId, ModelSequence)>,
    dead: Vec<SequenceId>,
    next_token: usize,
    input: DType,
}

impl Harness {
    fn new(ctx: &Context, config: &Config, input: DType) -> Harness {
        Harness {
            ctx: ctx.clone(),
            cache: KvCache::new(ctx, config).unwrap(),
            model: Vec::new(),
            dead: Vec::new(),
            next_token: 0,
            input,
        }
    }

    fn run(&mut self, action: &Action) {
        let page_size = self.cache.config().page_size;
        let num = self.model.len();
        let pick = |s: usize| s % num.max(1);
        match action {
            Action::Create => {
                let id = self.cache.create_sequence().unwrap();
                assert!(!self.dead.contains(&id));
                self.model.push((id, ModelSequence::default()));
            }
            _ if num == 0 => {}
            Action::Extend(list) => {
                let mut batch: Vec<(usize, usize)> = Vec::new();
                for &(s, n) in list {
                    if batch.iter().all(|b| b.0 != pick(s)) {
                        batch.push((pick(s), n));
                    }
                }
                self.extend(&batch);
            }
            Action::Fork(s) => {
                let (id, held) = self.model[pick(*s)].clone();
                let fork = self.cache.fork_sequence(id).unwrap();
                self.model.push((fork, held));
            }
            Action::Truncate(s, n) => {
                let (id, sequence) = &mut self.model[pick(*s)];
                let result = self.cache.truncate_sequence(*id, *n);
                let missing = sequence.missing();
                let inside = missing.contains(n) && missing.first() != Some(n);
                if *n > sequence.next || inside {
                    assert!(matches!(result, Err(Error::InvalidArgument { .. })));
                } else {
                    result.unwrap();
                    sequence.held.retain(|h| h.0 < *n);
                    sequence.next = *n;
                }
            }
            Action::Evict(s, sinks, window) => {
                let (id, sequence) = &mut self.model[pick(*s)];
                let before = sequence.held.len();
                sequence.evict(*sinks, *window, page_size);
                let evicted = self.cache.evict_sequence(*id, *sinks, *window).unwrap();
                assert_eq!(evicted, before - sequence.held.len());
            }
            Action::Reserve(s, n) => {
                let id = self.model[pick(*s)].0;
                let before = self.state();
                match self.cache.reserve_sequence(id, *n, Stream::DEFAULT) {
                    Ok(()) => {
                        assert!(*n == 0 || self.cache.sequence(id).unwrap().num_reserved >= *n);
                        // What was reserved is there.
                        self.extend_expecting(&[(pick(*s), *n)], true);
                    }
                    Err(Error::OutOfPages {
                        requested, free, ..
                    }) => {
                        assert!(requested > free);
                        assert_eq!(self.state(), before);
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            Action::Free(s) => {
                let (id, _) = self.model.remove(pick(*s));
                self.cache.free_sequence(id).unwrap();
                self.dead.push(id);
            }
        }
        self.check();
    }

    fn extend(&mut self, batch: &[(usize, usize)]) {
        self.extend_expecting(batch, false);
    }

    fn extend_expecting(&mut self, batch: &[(usize, usize)], must_succeed: bool) {
        let ids: Vec<_> = batch.iter().map(|&(s, n)| (self.model[s].0, n)).collect();
        let before = self.state();
        let had_batch = self.cache.batch().is_ok();
        match self.cache.extend(&ids, Stream::DEFAULT) {
            Ok(()) => {}
            Err(Error::OutOfPages {
                requested, free, ..
            }) if !must_succeed => {
                assert!(requested > free);
                assert_eq!(self.state(), before, "a failed call changed the cache");
                assert_eq!(self.cache.batch().is_ok(), had_batch);
                return;
            }
            Err(other) => panic!("{other}"),
        }
        let mut tokens = Vec::new();
        for &(s, n) in batch {
            let sequence = &mut self.model[s].1;
            for _ in 0..n {
                tokens.push(self.next_token);
                sequence.held.push((sequence.next, self.next_token));
                sequence.next += 1;
                self.next_token += 1;
            }
        }
        self.check_batch(batch, tokens.len());
        append_all(&self.ctx, &mut self.cache, &tokens, self.input);
    }

    /// Everything about the cache that a caller can see, but what pages hold.
    fn state(
        &self,
    ) -> (
        CacheStats,
        Vec<Vec<u32>>,
        Vec<unsloth::kv_cache::SequenceInfo>,
    ) {
        let ids = self.model.iter().map(|m| m.0);
        let stats = CacheStats {
            // A failed call may not have taken a page, not even for a moment.
            ..self.cache.stats().unwrap()
        };
        (
            stats,
            ids.clone()
                .map(|id| self.cache.sequence_pages(id).unwrap().to_vec())
                .collect(),
            ids.map(|id| self.cache.sequence(id).unwrap()).collect(),
        )
    }

    fn check_batch(&self, list: &[(usize, usize)], num_tokens: usize) {
        let batch = self.cache.batch().unwrap();
        let sequences: Vec<_> = list.iter().map(|&(s, n)| (&self.model[s], n)).collect();
        let as_f64 = |values: &[i32]| -> Vec<f64> { values.iter().map(|&v| v.into()).collect() };
        let lens: Vec<f64> = sequences
            .iter()
            .map(|((_, m), _)| m.held.len() as f64)
            .collect();
        let mut cu = vec![0.0];
        let mut positions = Vec::new();
        for ((_, m), n) in &sequences {
            cu.push(cu[cu.len() - 1] + *n as f64);
            positions.extend((m.next - n..m.next).map(|p| p as f64));
        }
        assert_eq!(batch.num_tokens, num_tokens);
        assert_eq!(batch.num_sequences, list.len());
        assert_eq!(download(&self.ctx, &batch.seq_lens), lens);
        assert_eq!(download(&self.ctx, &batch.cu_seqlens), cu);
        assert_eq!(download(&self.ctx, &batch.positions), positions);
        assert_eq!(as_f64(batch.host_seq_lens), lens);
        assert_eq!(as_f64(batch.host_cu_seqlens), cu);
        assert_eq!(as_f64(batch.host_positions), positions);
        let most = |values: &[f64]| values.iter().fold(0.0, |m: f64, v| m.max(*v)) as usize;
        assert_eq!(batch.max_sequence_length, most(&lens));
        let counts: Vec<f64> = list.iter().map(|l| l.1 as f64).collect();
        assert_eq!(batch.max_query_length, most(&counts));
        let table = download(&self.ctx, &batch.block_table);
        assert_eq!(as_f64(batch.host_block_table), table);
        let row = self.cache.config().max_pages_per_sequence();
        for (i, ((id, m), _)) in sequences.iter().enumerate() {
            let filled = m.held.len().div_ceil(self.cache.config().page_size);
            let pages: Vec<f64> = self.cache.sequence_pages(*id).unwrap()[..filled]
                .iter()
                .map(|&p| f64::from(p))
                .collect();
            assert_eq!(table[i * row..i * row + filled], pages);
        }
    }

    fn check(&self) {
        let config = self.cache.config();
        let contents = Contents::of(&self.ctx, &self.cache);
        let mut holders: HashMap<u32, usize> = HashMap::new();
        let mut stored: HashMap<u32, usize> = HashMap::new();
        for (id, sequence) in &self.model {
            let info = self.cache.sequence(*id).unwrap();
            let pages = self.cache.sequence_pages(*id).unwrap();
            assert_eq!(info.length, sequence.held.len());
            assert_eq!(info.position, sequence.next);
            let missing = sequence.missing();
            assert_eq!(info.num_evicted, missing.len());
            assert_eq!(
                info.evicted_from,
                missing.first().copied().unwrap_or(info.length)
            );
            assert_eq!(info.num_pages, pages.len());
            for (i, &page) in pages.iter().enumerate() {
                *holders.entry(page).or_default() += 1;
                let here = (info.length.saturating_sub(i * config.page_size)).min(config.page_size);
                let most = stored.entry(page).or_default();
                *most = here.max(*most);
            }
            for (index, &(_, token)) in sequence.held.iter().enumerate() {
                contents.assert_token(config, pages, index, token);
            }
            let shared = pages.iter().filter(|p| {
                let lists = self
                    .model
                    .iter()
                    .map(|m| self.cache.sequence_pages(m.0).unwrap());
                lists.filter(|list| list.contains(p)).count() > 1
            });
            assert_eq!(info.num_shared_pages, shared.count());
        }
        let stats = self.cache.stats().unwrap();
        assert_eq!(stats.num_used_pages, holders.len());
        assert_eq!(
            stats.num_used_pages + stats.num_free_pages,
            config.num_pages
        );
        assert_eq!(
            stats.num_shared_pages,
            holders.values().filter(|&&n| n > 1).count()
        );
        assert!(stats.peak_used_pages >= stats.num_used_pages);
        assert_eq!(stats.num_sequences, self.model.len());
        let held: usize = self.model.iter().map(|m| m.1.held.len()).sum();
        assert_eq!(stats.num_tokens, held as u64);
        let stored: usize = stored.values().sum();
        assert_eq!(stats.num_stored_tokens, stored as u64);
        let room = (holders.len() * config.page_size) as f64;
        let waste = if room == 0.0 {
            0.0
        } else {
            (room - stored as f64) / room
        };
        assert!((stats.fragmentation - waste).abs() < 1e-12);
        for id in &self.dead {
            assert!(matches!(
                self.cache.sequence(*id),
                Err(Error::InvalidHandle { .. })
            ));
        }
    }

    /// Frees every sequence: every page must be free again.
    fn finish(mut self) {
        while let Some((id, _)) = self.model.pop() {
            self.cache.free_sequence(id).unwrap();
        }
        self.check();
        assert_eq!(self.cache.stats().unwrap().num_used_pages, 0);
    }
}

fn small(page_layout: PageLayout, page_size: usize, dtype: DType) -> Config {
    Config {
        v_head_dim: 2,
        page_layout,
        page_size,
        max_batch_size: 3,
        max_batch_tokens: 24,
        max_sequence_length: 48,
        ..Config::new(2, 2, 3, 14, dtype)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Any history leaves every sequence with exactly the tokens that a list would hold.
    #[test]
    fn histories_agree_with_a_list(
        actions in actions(),
        head_major: bool,
        exponent in 0..4u32,
        half: bool,
    ) {
        let layout = if head_major { PageLayout::HeadMajor } else { PageLayout::TokenMajor };
        let dtype = if half { DType::F16 } else { DType::F32 };
        for ctx in contexts() {
            let mut config = small(layout, 1 << exponent, dtype);
            config.max_sequence_length = 1000;
            // Pages end before rows of the table do.
            let mut harness = Harness::new(&ctx, &config, DType::F32);
            for action in &actions {
                harness.run(action);
            }
            harness.finish();
        }
    }
}

/// `half` rounds an f32 to the nearest; from an f64 it looks at the upper half only and may take a number beside a tie for one.
fn round_from_f32(dtype: DType, value: f32) -> f64 {
    match dtype {
        DType::F16 => half::f16::from_f32(value).to_f64(),
        DType::Bf16 => half::bf16::from_f32(value).to_f64(),
        _ => value.into(),
    }
}

/// What is appended is rounded once, to the cache's dtype, from every dtype and any strides.
#[test]
fn append_converts_between_dtypes() {
    for ctx in contexts() {
        for stored in FLOATS {
            for given in FLOATS {
                for (num_heads, dim) in [(1, 1), (3, 64), (2, 600)] {
                    let config = Config {
                        v_head_dim: 8,
                        ..Config::new(1, num_heads, dim, 4, stored)
                    };
                    let mut cache = KvCache::new(&ctx, &config).unwrap();
                    let id = cache.create_sequence().unwrap();
                    cache.extend(&[(id, 20)], Stream::DEFAULT).unwrap();
                    let layout = |dim| common::tensor::transposed(&[20, num_heads, dim], 0, 1);
                    let k = TestTensor::normal(&mut rng(), given, layout(dim));
                    let v = TestTensor::normal(&mut rng(), given, layout(8));
                    let (dk, dv) = (k.upload(&ctx), v.upload(&ctx));
                    let params = Append {
                        layer: 0,
                        k: dk.view(),
                        v: dv.view(),
                        rotation: None,
                    };
                    cache.append(&params, Stream::DEFAULT).unwrap();
                    let (keys, values) = cache.layer(0).unwrap();
                    // A fresh sequence of a fresh cache has pages 0 and 1, so its tokens lie in order.
                    for (pages, given) in [(keys, &k), (values, &v)] {
                        let written = download(&ctx, &pages);
                        let expected: Vec<f64> = given
                            .values()
                            .iter()
                            .map(|&x| round_from_f32(stored, x as f32))
                            .collect();
                        assert_eq!(written[..expected.len()], expected);
                        assert!(written[expected.len()..].iter().all(|&x| x == 0.0));
                    }
                }
            }
        }
    }
}

/// Rotating keys on their way to the cache is rotating them first, to the bit, at the positions of the tokens.
#[test]
fn append_rotates_keys() {
    for ctx in contexts() {
        for stored in FLOATS {
            for (style, rotary_dim, table) in [
                (Style::HalfSplit, 0, false),
                (Style::Interleaved, 8, false),
                (Style::HalfSplit, 6, true),
            ] {
                let (num_heads, dim, num_tokens) = (3, 16, 21);
                let config = Config::new(1, num_heads, dim, 6, stored);
                let half = if rotary_dim == 0 {
                    dim / 2
                } else {
                    rotary_dim / 2
                };
                let uniform = |n: usize| {
                    let layout = Layout::contiguous(&[n, half]).unwrap();
                    TestTensor::normal(&mut rng(), DType::F32, layout).upload(&ctx)
                };
                let (cos, sin) = (uniform(60), uniform(60));
                let rotation = Rotation {
                    style,
                    rotary_dim,
                    angles: match table {
                        false => Angles::default(),
                        true => Angles::Table {
                            cos: cos.view(),
                            sin: sin.view(),
                        },
                    },
                };
                let mut cache = KvCache::new(&ctx, &config).unwrap();
                let (first, second) = (
                    cache.create_sequence().unwrap(),
                    cache.create_sequence().unwrap(),
                );
                // The second starts later, after an eviction, in the middle of a page.
                cache.extend(&[(second, 37)], Stream::DEFAULT).unwrap();
                assert_eq!(cache.evict_sequence(second, 0, 5).unwrap(), 32);
                cache
                    .extend(&[(first, 9), (second, num_tokens - 9)], Stream::DEFAULT)
                    .unwrap();
                let layout = Layout::contiguous(&[num_tokens, num_heads, dim]).unwrap();
                let k = TestTensor::normal(&mut rng(), DType::F32, layout).upload(&ctx);
                let mut rotated = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
                rope::forward(
                    &ctx,
                    &rope::Params {
                        k: Some(InOut::Apart {
                            input: k.view(),
                            output: rotated.view_mut(),
                        }),
                        positions: Positions::PerToken(cache.batch().unwrap().positions),
                        rotation,
                        ..rope::Params::default()
                    },
                    Stream::DEFAULT,
                )
                .unwrap();
                let params = |k, rotation| Append {
                    layer: 0,
                    k,
                    v: rotated.view(),
                    rotation,
                };
                let before = params(rotated.view(), None);
                cache.append(&before, Stream::DEFAULT).unwrap();
                let expected = download(&ctx, &cache.layer(0).unwrap().0);
                let fused = params(k.view(), Some(rotation));
                cache.append(&fused, Stream::DEFAULT).unwrap();
                assert_eq!(download(&ctx, &cache.layer(0).unwrap().0), expected);
            }
        }
    }
}

#[test]
fn a_table_must_reach_the_batch() {
    let ctx = Context::cpu().unwrap();
    let mut cache = KvCache::new(&ctx, &Config::new(1, 1, 4, 4, DType::F32)).unwrap();
    let id = cache.create_sequence().unwrap();
    let data = [0.5f32; 64];
    let tensor = |shape: &[usize]| TensorRef::from_slice(&data, shape).unwrap();
    let rotation = Some(Rotation {
        angles: Angles::Table {
            cos: tensor(&[9, 2]),
            sin: tensor(&[9, 2]),
        },
        ..Rotation::default()
    });
    for (num_tokens, fits) in [(9, true), (1, false)] {
        cache.extend(&[(id, num_tokens)], Stream::DEFAULT).unwrap();
        let (k, v) = (tensor(&[num_tokens, 1, 4]), tensor(&[num_tokens, 1, 4]));
        let params = Append {
            layer: 0,
            k,
            v,
            rotation,
        };
        match cache.append(&params, Stream::DEFAULT) {
            Ok(()) => assert!(fits),
            Err(error) => assert_eq!(
                (error.to_string().as_str(), fits),
                (
                    "kv_cache_append: cos has 9 positions, the batch reaches position 9",
                    false
                )
            ),
        }
    }
}

/// After any history, attention straight from the cache is attention over the tokens that each sequence holds, evicted ones gone.
#[test]
fn attention_sees_what_is_held() {
    let (num_heads, num_kv_heads, dim, dim_v) = (4, 2, 8, 6);
    for ctx in contexts() {
        for page_layout in [PageLayout::TokenMajor, PageLayout::HeadMajor] {
            let config = Config {
                v_head_dim: dim_v,
                page_size: 4,
                page_layout,
                ..Config::new(1, num_kv_heads, dim, 24, DType::F32)
            };
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let mut held: Vec<(SequenceId, Vec<[Vec<f64>; 2]>)> = Vec::new();
            let rng = &mut rng();
            let mut last_q = Vec::new();
            let mut extend = |cache: &mut KvCache,
                              held: &mut Vec<(SequenceId, Vec<[Vec<f64>; 2]>)>,
                              counts: &[usize]| {
                let batch: Vec<_> = held
                    .iter()
                    .map(|h| h.0)
                    .zip(counts.iter().copied())
                    .collect();
                cache.extend(&batch, Stream::DEFAULT).unwrap();
                let total: usize = counts.iter().sum();
                let mut normal = |heads: usize, dim: usize| {
                    let layout = Layout::contiguous(&[total, heads, dim]).unwrap();
                    TestTensor::normal(rng, DType::F32, layout)
                };
                let (q, k, v) = (
                    normal(num_heads, dim),
                    normal(num_kv_heads, dim),
                    normal(num_kv_heads, dim_v),
                );
                let (keys, values) = (k.values(), v.values());
                let rows = keys
                    .chunks(num_kv_heads * dim)
                    .zip(values.chunks(num_kv_heads * dim_v));
                let mut rows = rows.map(|(k, v)| [k.to_vec(), v.to_vec()]);
                for (h, &n) in held.iter_mut().zip(counts) {
                    h.1.extend(rows.by_ref().take(n));
                }
                let (dk, dv) = (k.upload(&ctx), v.upload(&ctx));
                let append = Append {
                    layer: 0,
                    k: dk.view(),
                    v: dv.view(),
                    rotation: None,
                };
                cache.append(&append, Stream::DEFAULT).unwrap();
                last_q = q.values();
            };
            for _ in 0..2 {
                held.push((cache.create_sequence().unwrap(), Vec::new()));
            }
            extend(&mut cache, &mut held, &[19, 7]);
            let fork = cache.fork_sequence(held[1].0).unwrap();
            held.push((fork, held[1].1.clone()));
            extend(&mut cache, &mut held, &[2, 3, 1]);
            // Sinks 0..4, window from 12 on: 8 tokens go.
            assert_eq!(cache.evict_sequence(held[0].0, 2, 7).unwrap(), 8);
            held[0].1.drain(4..12);
            cache.truncate_sequence(held[1].0, 6).unwrap();
            held[1].1.truncate(6);
            let counts = [3, 4, 1];
            extend(&mut cache, &mut held, &counts);

            let total: usize = counts.iter().sum();
            let q = TestTensor::of(DType::F32, &[total, num_heads, dim], &last_q).upload(&ctx);
            let layout = Layout::contiguous(&[total, num_heads, dim_v]).unwrap();
            let mut out = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
            let params = cache.attention(0, q.view(), out.view_mut()).unwrap();
            attend(&ctx, params);
            let out = out.download_output().values();

            let mut start = 0;
            for ((_, tokens), &n) in held.iter().zip(&counts) {
                let side = |which: usize| -> Vec<f64> {
                    tokens
                        .iter()
                        .flat_map(|t| t[which].iter().copied())
                        .collect()
                };
                let shape = |len, heads, dim| [1, len, heads, dim];
                let k = shape(tokens.len(), num_kv_heads, dim);
                let k = TestTensor::of(DType::F32, &k, &side(0)).upload(&ctx);
                let v = shape(tokens.len(), num_kv_heads, dim_v);
                let v = TestTensor::of(DType::F32, &v, &side(1)).upload(&ctx);
                let rows = &last_q[start * num_heads * dim..(start + n) * num_heads * dim];
                let q = TestTensor::of(DType::F32, &shape(n, num_heads, dim), rows).upload(&ctx);
                let layout = Layout::contiguous(&shape(n, num_heads, dim_v)).unwrap();
                let mut alone = TestTensor::poisoned(DType::F32, layout).upload(&ctx);
                let params = attention::Params {
                    causal: true,
                    ..attention::Params::new(q.view(), k.view(), v.view(), alone.view_mut())
                };
                attend(&ctx, params);
                let expected = alone.download_output().values();
                let width = num_heads * dim_v;
                for (a, b) in out[start * width..].iter().zip(&expected) {
                    assert!((a - b).abs() <= 1e-5, "{a} {b}");
                }
                start += n;
            }
        }
    }
}

fn attend(ctx: &Context, params: attention::Params<'_>) {
    let size = attention::workspace_size(ctx, &params).unwrap();
    let mut workspace = Buffer::new(ctx, size).unwrap();
    let params = attention::Params {
        workspace: workspace.workspace(),
        ..params
    };
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
}

#[test]
fn running_out_of_pages_changes_nothing() {
    for ctx in contexts() {
        let mut harness = Harness::new(
            &ctx,
            &small(PageLayout::TokenMajor, 4, DType::F32),
            DType::F32,
        );
        for _ in 0..3 {
            harness.run(&Action::Create);
        }
        harness.extend(&[(0, 6), (1, 6), (2, 6)]);
        harness.extend(&[(0, 16), (1, 8)]);
        harness.run(&Action::Fork(0));
        let before = harness.state();
        let pages = Contents::of(&ctx, &harness.cache);
        assert_eq!(before.0.num_free_pages, 2);
        // A copy of the shared page, one page for sequence 1, one for sequence 2: one too many.
        let batch: Vec<_> = [(0, 1), (1, 3), (2, 3)]
            .iter()
            .map(|&(s, n)| (harness.model[s].0, n))
            .collect();
        let error = harness.cache.extend(&batch, Stream::DEFAULT).unwrap_err();
        assert_eq!(
            error.to_string(),
            "kv_cache_extend: 3 pages are needed, 2 of 14 are free"
        );
        assert_eq!(harness.state(), before);
        assert_eq!(Contents::of(&ctx, &harness.cache).layers, pages.layers);
        let error = harness
            .cache
            .reserve_sequence(harness.model[1].0, 12, Stream::DEFAULT)
            .unwrap_err();
        assert!(matches!(error, Error::OutOfPages { requested: 3, .. }));
        assert_eq!(harness.state(), before);
        // Two of the three fit.
        harness.extend(&[(0, 1), (1, 3)]);
        harness.check();
    }
}

/// Of several holders of a page in one batch all but one copy it.
#[test]
fn forks_in_one_batch_copy_once_less_than_they_are() {
    for ctx in contexts() {
        let mut harness = Harness::new(
            &ctx,
            &small(PageLayout::HeadMajor, 8, DType::F32),
            DType::F32,
        );
        harness.run(&Action::Create);
        harness.extend(&[(0, 11)]);
        harness.run(&Action::Fork(0));
        harness.run(&Action::Fork(1));
        assert_eq!(harness.cache.stats().unwrap().num_used_pages, 2);
        harness.extend(&[(2, 1), (0, 2), (1, 3)]);
        harness.check();
        let stats = harness.cache.stats().unwrap();
        assert_eq!((stats.num_used_pages, stats.num_shared_pages), (4, 1));
        // With one holder left outside the batch, each of the others copies.
        harness.run(&Action::Fork(0));
        harness.extend(&[(0, 1)]);
        assert_eq!(harness.cache.stats().unwrap().num_used_pages, 5);
        harness.check();
    }
}

#[test]
fn the_batch_ends_with_its_sequences() {
    for ctx in contexts() {
        let mut cache = KvCache::new(&ctx, &small(PageLayout::TokenMajor, 4, DType::F32)).unwrap();
        assert!(cache.batch().is_err());
        type Change = fn(&mut KvCache, SequenceId);
        let changes: [Change; 5] = [
            |c, id| c.truncate_sequence(id, 1).unwrap(),
            |c, id| assert_eq!(c.evict_sequence(id, 0, 0).unwrap(), 8),
            |c, id| c.reserve_sequence(id, 20, Stream::DEFAULT).unwrap(),
            |c, id| {
                let fork = c.fork_sequence(id).unwrap();
                c.free_sequence(fork).unwrap();
            },
            |c, id| c.free_sequence(id).unwrap(),
        ];
        for change in changes {
            let (id, other) = (
                cache.create_sequence().unwrap(),
                cache.create_sequence().unwrap(),
            );
            cache.extend(&[(id, 9)], Stream::DEFAULT).unwrap();
            cache.reserve_sequence(other, 4, Stream::DEFAULT).unwrap();
            cache.free_sequence(other).unwrap();
            assert_eq!(cache.batch().unwrap().num_tokens, 9, "others do not matter");
            change(&mut cache, id);
            assert_eq!(
                cache.batch().unwrap_err().to_string(),
                "kv_cache_batch: cache has no current batch: it must be extended first, and again after its sequences changed"
            );
            let _ = cache.free_sequence(id);
        }
    }
}

#[test]
fn an_empty_batch_is_a_batch() {
    for ctx in contexts() {
        let mut cache = KvCache::new(&ctx, &small(PageLayout::TokenMajor, 4, DType::F16)).unwrap();
        cache.extend(&[], Stream::DEFAULT).unwrap();
        assert_eq!(cache.batch().unwrap().num_sequences, 0);
        append_all(&ctx, &mut cache, &[], DType::F32);
        let id = cache.create_sequence().unwrap();
        cache.extend(&[(id, 0)], Stream::DEFAULT).unwrap();
        assert_eq!(cache.batch().unwrap().host_seq_lens, [0]);
        append_all(&ctx, &mut cache, &[], DType::F32);
        assert_eq!(cache.stats().unwrap().peak_used_pages, 0);
    }
}

#[test]
fn it_allocates_what_its_size_says() {
    for ctx in contexts() {
        let configs = [
            small(PageLayout::TokenMajor, 4, DType::F32),
            small(PageLayout::HeadMajor, 16, DType::Bf16),
            Config::new(3, 1, 7, 5, DType::F16),
        ];
        for config in configs {
            let before = ctx.memory_stats();
            let mut cache = KvCache::new(&ctx, &config).unwrap();
            let size = config.size().unwrap();
            assert_eq!(ctx.memory_stats().in_use - before.in_use, size.total());
            assert_eq!(cache.stats().unwrap().size, size);
            let id = cache.create_sequence().unwrap();
            cache.extend(&[(id, 5)], Stream::DEFAULT).unwrap();
            append_all(&ctx, &mut cache, &[1, 2, 3, 4, 5], DType::F32);
            assert_eq!(ctx.memory_stats().in_use - before.in_use, size.total());
            drop(cache);
            assert_eq!(ctx.memory_stats().in_use, before.in_use);
        }
    }
}

#[test]
fn the_limit_of_the_context_holds() {
    let config = Config::new(1, 1, 8, 4, DType::F32);
    let total = config.size().unwrap().total();
    for (limit, fits) in [(total, true), (total - 1, false)] {
        let ctx = Context::new(&ContextOptions {
            memory_limit: Some(limit),
            ..ContextOptions::default()
        })
        .unwrap();
        let made = KvCache::new(&ctx, &config);
        assert_eq!(made.is_ok(), fits);
        assert!(fits || matches!(made, Err(Error::OutOfMemory { .. })));
        drop(made);
        assert_eq!(ctx.memory_stats().in_use, 0);
    }
}

#[test]
fn bad_calls_say_why() {
    let ctx = Context::cpu().unwrap();
    let mut cache = KvCache::new(&ctx, &small(PageLayout::TokenMajor, 4, DType::F32)).unwrap();
    let ids: Vec<_> = (0..4).map(|_| cache.create_sequence().unwrap()).collect();
    let fails = |cache: &mut KvCache, batch: &[(SequenceId, usize)], message: &str| {
        let error = cache.extend(batch, Stream::DEFAULT).unwrap_err();
        assert_eq!(error.to_string(), message);
    };
    let all: Vec<_> = ids.iter().map(|&id| (id, 1)).collect();
    fails(
        &mut cache,
        &all,
        "kv_cache_extend: num_sequences is 4, above max_batch_size 3",
    );
    fails(
        &mut cache,
        &[(ids[0], 20), (ids[1], 5)],
        "kv_cache_extend: num_tokens sum to 25, above max_batch_tokens 24",
    );
    fails(
        &mut cache,
        &[(ids[0], usize::MAX), (ids[1], 5)],
        "kv_cache_extend: num_tokens sum to more than an integer holds, above max_batch_tokens 24",
    );
    fails(
        &mut cache,
        &[(ids[0], 1), (ids[0], 1)],
        "kv_cache_extend: sequences contains 0x100000000 twice",
    );
    for _ in 0..2 {
        cache.extend(&[(ids[0], 24)], Stream::DEFAULT).unwrap();
    }
    fails(
        &mut cache,
        &[(ids[1], 1), (ids[0], 1)],
        "kv_cache_extend: num_tokens is 1, 48 of max_sequence_length 48 are in use",
    );
    assert_eq!(cache.sequence(ids[1]).unwrap().num_pages, 0);
    let error = cache.truncate_sequence(ids[0], 49).unwrap_err();
    assert_eq!(
        error.to_string(),
        "kv_cache_sequence_truncate: num_tokens is 49, the sequence ends at 48"
    );
    assert_eq!(cache.evict_sequence(ids[0], 3, 20).unwrap(), 24);
    let error = cache.truncate_sequence(ids[0], 20).unwrap_err();
    assert_eq!(
        error.to_string(),
        "kv_cache_sequence_truncate: num_tokens is 20, positions 4 to 27 were evicted"
    );
    assert_eq!(
        cache.layer(2).unwrap_err().to_string(),
        "kv_cache_layer: layer is 2, the cache has 2 layers"
    );

    cache.extend(&[(ids[1], 2)], Stream::DEFAULT).unwrap();
    let data = [0.0f32; 64];
    let tensor = |shape: &[usize]| TensorRef::from_slice(&data, shape).unwrap();
    let bad: [(usize, TensorRef<'_>, TensorRef<'_>, &str); 5] = [
        (
            2,
            tensor(&[2, 2, 3]),
            tensor(&[2, 2, 2]),
            "kv_cache_append: layer is 2, the cache has 2 layers",
        ),
        (
            0,
            tensor(&[4, 3]),
            tensor(&[2, 2, 2]),
            "kv_cache_append: k has rank 2, allowed: 3",
        ),
        (
            0,
            tensor(&[3, 2, 3]),
            tensor(&[2, 2, 2]),
            "kv_cache_append: k has shape [3, 2, 3], expected [2, 2, 3]",
        ),
        (
            0,
            tensor(&[2, 2, 3]),
            tensor(&[2, 2, 3]),
            "kv_cache_append: v has shape [2, 2, 3], expected [2, 2, 2]",
        ),
        (
            0,
            TensorRef::from_slice_with_layout(
                &data,
                Layout::strided(&[2, 2, 3], &[12, 6, 2]).unwrap(),
            )
            .unwrap(),
            tensor(&[2, 2, 2]),
            "kv_cache_append: k has stride 2 along its last dimension, allowed: 1",
        ),
    ];
    for (layer, k, v, message) in bad {
        let error = cache
            .append(
                &Append {
                    layer,
                    k,
                    v,
                    rotation: None,
                },
                Stream::DEFAULT,
            )
            .unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let (k, v) = cache.layer(0).unwrap();
    let (k, v) = (download(&ctx, &k), download(&ctx, &v));
    assert!(k.iter().chain(&v).all(|&x| x == 0.0), "nothing was written");
}
