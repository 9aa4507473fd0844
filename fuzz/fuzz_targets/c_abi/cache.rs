//! The life of a KV cache.

use std::ptr;

use unsloth::ffi::attention::*;
use unsloth::ffi::kv_cache::*;
use unsloth::ffi::kv_cache_sequence::*;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::*;

use crate::arena::{Arena, absent};
use crate::attention::Batch;
use crate::call::Call;
use crate::input::Input;
use crate::{context, last_message, operations};

const CAPACITY: usize = 4;

struct Cache {
    handle: *mut unsloth_kv_cache,
    heads: i64,
    dim: i64,
    page_layout: u32,
    /// Identifiers, some of sequences that were freed.
    sequences: Vec<i64>,
}

pub fn run(input: &mut Input) {
    let Some(mut cache) = Cache::create(input) else {
        return;
    };
    for _ in 0..24 {
        if input.is_empty() {
            break;
        }
        cache.step(input);
        cache.check();
    }
    // SAFETY: made above; what it is after that is a handle that names nothing.
    let destroyed = [(); 2].map(|()| unsafe { unsloth_kv_cache_destroy(cache.handle) });
    assert_eq!(
        destroyed,
        [UNSLOTH_STATUS_SUCCESS, UNSLOTH_STATUS_INVALID_HANDLE]
    );
}

/// No call may find a bug in the library; anything else it may answer.
fn passes(status: unsloth_status) -> bool {
    assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
    status == UNSLOTH_STATUS_SUCCESS
}

impl Cache {
    fn create(input: &mut Input) -> Option<Cache> {
        let mut params = unsloth_kv_cache_params {
            struct_size: size_of::<unsloth_kv_cache_params>() as u32,
            dtype: input.pick(&[
                UNSLOTH_DTYPE_F32,
                UNSLOTH_DTYPE_F16,
                UNSLOTH_DTYPE_BF16,
                UNSLOTH_DTYPE_F8E4M3,
            ]),
            page_layout: u32::from(input.byte() % 2),
            reserved: 0,
            num_layers: 1 + input.up_to(1),
            num_kv_heads: 1 + input.up_to(1),
            head_dim: input.pick(&[4, 8]),
            v_head_dim: 0,
            page_size: 1 << input.up_to(2),
            num_pages: 1 + input.up_to(7),
            max_batch_size: 1 + input.up_to(3),
            max_batch_tokens: 1 + input.up_to(15),
            max_sequence_length: input.up_to(20),
        };
        if input.one_in(16) {
            let fields = [
                &mut params.num_layers,
                &mut params.num_kv_heads,
                &mut params.head_dim,
                &mut params.v_head_dim,
                &mut params.page_size,
                &mut params.num_pages,
                &mut params.max_batch_size,
                &mut params.max_batch_tokens,
                &mut params.max_sequence_length,
            ];
            let chosen = usize::from(input.byte()) % fields.len();
            for (at, field) in fields.into_iter().enumerate() {
                if at == chosen {
                    *field = input.number();
                }
            }
        }
        let mut handle = ptr::null_mut();
        // SAFETY: pointers to live locals.
        if !passes(unsafe { unsloth_kv_cache_create(context(), &params, &mut handle) }) {
            assert!(handle.is_null());
            return None;
        }
        Some(Cache {
            handle,
            heads: params.num_kv_heads,
            dim: params.head_dim,
            page_layout: params.page_layout,
            sequences: Vec::new(),
        })
    }

    /// A sequence, seldom one that is not there.
    fn sequence(&self, input: &mut Input) -> i64 {
        if self.sequences.is_empty() || input.one_in(32) {
            return input.number();
        }
        input.pick(&self.sequences)
    }

    fn step(&mut self, input: &mut Input) {
        let none = ptr::null_mut();
        let handle = self.handle;
        // SAFETY: pointers to live locals and blocks of the sizes stated.
        unsafe {
            match input.byte() % 13 {
                0 | 1 => {
                    let mut sequence = 0;
                    if passes(unsloth_kv_cache_sequence_create(handle, &mut sequence)) {
                        assert!(sequence > 0 && !self.sequences.contains(&sequence));
                        self.sequences.push(sequence);
                    }
                }
                2 => {
                    passes(unsloth_kv_cache_sequence_free(handle, self.sequence(input)));
                }
                3 => {
                    let mut fork = 0;
                    if passes(unsloth_kv_cache_sequence_fork(
                        handle,
                        self.sequence(input),
                        &mut fork,
                    )) {
                        assert!(fork > 0 && !self.sequences.contains(&fork));
                        self.sequences.push(fork);
                    }
                }
                4 => {
                    let to = self.amount(input);
                    passes(unsloth_kv_cache_sequence_truncate(
                        handle,
                        self.sequence(input),
                        to,
                    ));
                }
                5 => {
                    let (sinks, window) = (self.amount(input), self.amount(input));
                    let mut evicted = 0;
                    let sequence = self.sequence(input);
                    passes(unsloth_kv_cache_sequence_evict(
                        handle,
                        sequence,
                        sinks,
                        window,
                        &mut evicted,
                    ));
                    assert!(evicted >= 0);
                }
                6 => {
                    let tokens = self.amount(input);
                    passes(unsloth_kv_cache_sequence_reserve(
                        handle,
                        self.sequence(input),
                        tokens,
                        none,
                    ));
                }
                7 => self.describe(input),
                8 => {
                    let (k, v) = ([0.5, 2.0], [1e-3, f32::from_bits(input.word() as u32)]);
                    let (layer, count) = (input.up_to(2), input.up_to(3) as usize);
                    if count <= 2 || count as i64 != self.heads {
                        let (k, v) = (k.as_ptr(), v.as_ptr());
                        passes(unsloth_kv_cache_scales_set(
                            handle, layer, k, v, count, none,
                        ));
                    }
                }
                _ => self.extend(input),
            }
        }
    }

    fn amount(&self, input: &mut Input) -> i64 {
        if input.one_in(16) {
            input.number()
        } else {
            input.up_to(12)
        }
    }

    /// Asks about a sequence, with too little room for its pages at times.
    unsafe fn describe(&self, input: &mut Input) {
        let sequence = self.sequence(input);
        // SAFETY: pointers to live locals of the sizes stated.
        unsafe {
            let mut info: unsloth_kv_cache_sequence_info = std::mem::zeroed();
            info.struct_size = size_of::<unsloth_kv_cache_sequence_info>() as u32;
            let mut count = 0;
            let known = passes(unsloth_kv_cache_sequence_info_get(
                self.handle,
                sequence,
                &mut info,
            ));
            let counted = unsloth_kv_cache_sequence_pages_get(
                self.handle,
                sequence,
                ptr::null_mut(),
                0,
                &mut count,
            );
            assert_eq!(known, passes(counted));
            if known {
                assert_eq!(count as i64, info.num_pages);
                let mut pages = vec![-1; input.up_to(count as i64) as usize];
                let mut found = 0;
                let status = unsloth_kv_cache_sequence_pages_get(
                    self.handle,
                    sequence,
                    pages.as_mut_ptr(),
                    pages.len(),
                    &mut found,
                );
                assert_eq!(passes(status), pages.is_empty() || pages.len() == count);
            }
        }
    }

    /// Extends a batch, appends to a layer, and attends to it.
    unsafe fn extend(&mut self, input: &mut Input) {
        let count = input.up_to(CAPACITY as i64 - 1) as usize;
        let sequences: Vec<i64> = (0..count).map(|_| self.sequence(input)).collect();
        let tokens: Vec<i64> = (0..count).map(|_| self.amount(input)).collect();
        let none = ptr::null_mut();
        // SAFETY: pointers to live locals and blocks of the sizes stated; the cache's own tensors are live.
        unsafe {
            if !passes(unsloth_kv_cache_extend(
                self.handle,
                sequences.as_ptr(),
                tokens.as_ptr(),
                count,
                none,
            )) {
                return;
            }
            let mut batch: unsloth_kv_cache_batch = std::mem::zeroed();
            batch.struct_size = size_of::<unsloth_kv_cache_batch>() as u32;
            assert!(passes(unsloth_kv_cache_batch_get(self.handle, &mut batch)));
            assert_eq!(batch.num_tokens, tokens.iter().sum::<i64>());

            let layer = if input.one_in(16) {
                input.number()
            } else {
                input.up_to(1)
            };
            let mut arena = Arena::default();
            let rows = [batch.num_tokens, self.heads, self.dim];
            let mut params = unsloth_kv_cache_append_params {
                struct_size: size_of::<unsloth_kv_cache_append_params>() as u32,
                layer,
                k: arena.tensor(input, UNSLOTH_DTYPE_F32, &rows),
                v: arena.tensor(input, UNSLOTH_DTYPE_F32, &rows),
                ..std::mem::zeroed()
            };
            if input.one_in(2) {
                params.rotate = u32::from(!input.one_in(8));
                params.q = arena.tensor(input, UNSLOTH_DTYPE_F32, &rows);
                if input.one_in(2) {
                    params.q_out = arena.tensor(input, UNSLOTH_DTYPE_F32, &rows);
                }
            }
            let appended = passes(unsloth_kv_cache_append(self.handle, &params, none));
            // Queries are rotated where they lie, or to `q_out`.
            let is_written = appended && params.q.rank != 0;
            assert!(is_written || arena.is_untouched());

            if input.one_in(2) {
                let batch = Batch {
                    cache: self.handle,
                    layer,
                    heads: self.heads,
                    dim: self.dim,
                    num_tokens: batch.num_tokens,
                };
                operations::attention_block(&mut Call::new(input), Some(&batch));
            }

            let mut p: unsloth_attention_params = std::mem::zeroed();
            (p.k, p.v) = (absent(), absent());
            if !passes(unsloth_kv_cache_layer_get(
                self.handle,
                layer,
                &mut p.k,
                &mut p.v,
            )) {
                return;
            }
            p.struct_size = size_of::<unsloth_attention_params>() as u32;
            p.causal = 1;
            p.page_layout = self.page_layout;
            p.q = arena.tensor(input, UNSLOTH_DTYPE_F32, &rows);
            p.out = arena.tensor(input, UNSLOTH_DTYPE_F32, &rows);
            p.cu_seqlens_q = batch.cu_seqlens;
            p.seq_lens_k = batch.seq_lens;
            p.block_table = batch.block_table;
            passes(unsloth_attention_forward(context(), &p, none));
        }
    }

    /// Pages are used or free.
    fn check(&self) {
        // SAFETY: a struct of integers and a float, of the size stated.
        let stats = unsafe {
            let mut stats: unsloth_kv_cache_stats = std::mem::zeroed();
            stats.struct_size = size_of::<unsloth_kv_cache_stats>() as u32;
            assert!(passes(unsloth_kv_cache_stats_get(self.handle, &mut stats)));
            stats
        };
        assert_eq!(stats.num_used_pages + stats.num_free_pages, stats.num_pages);
        assert!(stats.num_stored_tokens >= 0 && stats.num_tokens >= stats.num_stored_tokens);
    }
}
