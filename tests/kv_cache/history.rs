//! The KV cache against a plain model of it: any history leaves what a list would hold.

use std::collections::HashMap;

use crate::common::contexts;
use crate::common::kv_cache::{Contents, append_all, download, small};
use proptest::prelude::*;
use unsloth::kv_cache::{CacheStats, KvCache, PageLayout, SequenceId};
use unsloth::{Context, DType, Error, Stream};

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

    /// Drops the pages that lie between the sinks and the window, if what is missing then is still
    /// one range.
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
    fn new(ctx: &Context, config: &unsloth::kv_cache::Config, input: DType) -> Harness {
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
