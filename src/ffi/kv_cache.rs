//! The paged KV cache.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard};

use crate::alloc::Shared;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ffi::attention::{unsloth_attention_params, unsloth_page_layout};
use crate::ffi::context::{context_from, unsloth_context};
use crate::ffi::handle::Table;
use crate::ffi::params::{self, params};
use crate::ffi::rope::unsloth_rotation;
use crate::ffi::status::unsloth_status;
use crate::ffi::tensor::{
    implemented, in_out, unsloth_dtype, unsloth_quantization, unsloth_tensor,
};
use crate::ffi::{check_out, check_pointer, count, flag, guard, stream_from, unsloth_stream};
use crate::kv_cache::{Append, Config, KvCache, PageLayout, SequenceId};

/// A paged cache of the keys and values of many sequences. Opaque; made by `unsloth_kv_cache_create`, ended by
/// `unsloth_kv_cache_destroy`. Several threads may use one cache at a time; calls take turns.
///
/// A step of a model is one batch: `unsloth_kv_cache_extend` makes room for the new tokens of a few sequences and advances their
/// lengths; for every layer `unsloth_kv_cache_append` then writes the keys and values of these tokens, and attention reads the
/// layer's pages through the batch's block table and lengths. To undo a step, truncate.
///
/// Bookkeeping is on the host; keys, values, and the tables that kernels read are on the context's device. A call that fails leaves
/// every sequence as it was. Calls on one cache belong on one stream, or on streams that the caller orders, since pages move
/// between sequences without waiting for the device.
pub struct unsloth_kv_cache {
    _opaque: [u8; 0],
}

/// The shape of a cache.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_kv_cache_params {
    /// `sizeof(unsloth_kv_cache_params)`.
    pub struct_size: u32,
    /// What keys and values are stored as: f32, f16, bf16, or f8e4m3 with the scales that
    /// `unsloth_kv_cache_scales_set` gives.
    pub dtype: unsloth_dtype,
    /// The order of a page's dimensions, `UNSLOTH_PAGE_LAYOUT_*`; 0 is token-major.
    pub page_layout: unsloth_page_layout,
    /// Zero.
    pub reserved: u32,
    /// Layers of the model, each with its own pages.
    pub num_layers: i64,
    /// Key and value heads per layer.
    pub num_kv_heads: i64,
    /// Elements of a key head.
    pub head_dim: i64,
    /// Elements of a value head; 0 for `head_dim`.
    pub v_head_dim: i64,
    /// Tokens per page, a power of two; 0 for 16.
    pub page_size: i64,
    /// Pages; one page holds `page_size` tokens of one sequence in every layer.
    pub num_pages: i64,
    /// The most sequences of one batch; 0 for 64.
    pub max_batch_size: i64,
    /// The most new tokens of one batch; 0 for 8192.
    pub max_batch_tokens: i64,
    /// The most tokens that a sequence may hold at a time; 0 for `num_pages * page_size`.
    pub max_sequence_length: i64,
}
params!(unsloth_kv_cache_params, [reserved]);

/// Arguments of `unsloth_kv_cache_append`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_kv_cache_append_params {
    /// `sizeof(unsloth_kv_cache_append_params)`.
    pub struct_size: u32,
    /// 1 rotates keys by their tokens' positions, in f32, before they are rounded to the cache's dtype; 0 stores them as they are.
    pub rotate: u32,
    /// The layer.
    pub layer: i64,
    /// Keys of the batch's new tokens `[num_tokens, num_kv_heads, head_dim]`, in the order of the batch; f32, f16 or bf16, rounded to
    /// the cache's dtype, f8e4m3 by the layer's scales; any strides with a contiguous last dimension.
    pub k: unsloth_tensor,
    /// Values `[num_tokens, num_kv_heads, v_head_dim]`, otherwise like `k`.
    pub v: unsloth_tensor,
    /// With `rotate`: how. A table must have every position of the batch.
    pub rotation: unsloth_rotation,
    /// Optional, with `rotate`: queries of the new tokens `[num_tokens, num_heads, head_dim]`, any number of heads, of the dtype of `k`,
    /// any strides with a contiguous last dimension. They are rotated as the keys are, in the same launch, to `q_out`: the same bits as
    /// `unsloth_rope_forward` gives.
    pub q: unsloth_tensor,
    /// Like `q`. Absent, or the same tensor as `q`: `q` is overwritten.
    pub q_out: unsloth_tensor,
}
params!(unsloth_kv_cache_append_params, [k, v, rotation, q, q_out]);

/// The current batch, in the order it was given in. Tensors are i32, on the context's device, and stay at their addresses for the
/// life of the cache; each `unsloth_kv_cache_extend` changes their contents.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_kv_cache_batch {
    /// `sizeof(unsloth_kv_cache_batch)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Sequences.
    pub num_sequences: i64,
    /// New tokens of all sequences.
    pub num_tokens: i64,
    /// New tokens of the sequence that has the most.
    pub max_query_length: i64,
    /// Tokens of the longest sequence, new ones included.
    pub max_sequence_length: i64,
    /// Tokens of each sequence, new ones included: `[num_sequences]`.
    pub seq_lens: unsloth_tensor,
    /// Where each sequence's new tokens start among those of the batch, and their number: `[num_sequences + 1]`.
    pub cu_seqlens: unsloth_tensor,
    /// Position of each new token: `[num_tokens]`.
    pub positions: unsloth_tensor,
    /// Pages of each sequence: `[num_sequences, ceil(max_sequence_length / page_size)]` with the cache's `max_sequence_length`.
    /// Entries past a sequence's last page are unspecified.
    pub block_table: unsloth_tensor,
    /// `seq_lens` on the host. This and the other copies stay at their addresses for the life of the cache as well; no other
    /// thread may extend it while they are read.
    pub host_seq_lens: *const i32,
    /// `cu_seqlens` on the host.
    pub host_cu_seqlens: *const i32,
    /// `positions` on the host.
    pub host_positions: *const i32,
    /// `block_table` on the host, its rows one after the other.
    pub host_block_table: *const i32,
}
params!(unsloth_kv_cache_batch, [reserved]);

/// How a cache is used.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_kv_cache_stats {
    /// `sizeof(unsloth_kv_cache_stats)`, set by the caller.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Pages in the cache.
    pub num_pages: i64,
    /// Pages that a sequence holds.
    pub num_used_pages: i64,
    /// Pages that no sequence holds.
    pub num_free_pages: i64,
    /// Pages that more than one sequence holds.
    pub num_shared_pages: i64,
    /// The most pages that were used at a time.
    pub peak_used_pages: i64,
    /// Live sequences.
    pub num_sequences: i64,
    /// Tokens held, those of shared pages counted for each sequence.
    pub num_tokens: i64,
    /// Tokens stored, those of shared pages counted once.
    pub num_stored_tokens: i64,
    /// Bytes of a page over all layers.
    pub page_bytes: u64,
    /// Bytes allocated: keys, values and tables.
    pub total_bytes: u64,
    /// Bytes allocated for keys.
    pub key_bytes: u64,
    /// Bytes allocated for values.
    pub value_bytes: u64,
    /// Bytes allocated for block tables, lengths, positions, and scales of f8e4m3.
    pub table_bytes: u64,
    /// The part of the used pages' room that stores no token; 0 with none used.
    pub fragmentation: f64,
}
params!(unsloth_kv_cache_stats, [reserved]);

static CACHES: Table<Mutex<Held>> = Table::new("unsloth_kv_cache", 2);

/// A cache, and for each layer the quantization of its keys and of its values, to which tensors of C
/// point; none where it stores floats.
struct Held {
    cache: KvCache,
    quantizations: Vec<[unsloth_quantization; 2]>,
}

// SAFETY: the quantizations hold addresses of the cache's own memory, which is dereferenced where the
// cache is used; it may be sent.
unsafe impl Send for Held {}

impl Held {
    fn new(op: &'static str, cache: KvCache) -> Result<Held> {
        let mut quantizations = Vec::new();
        if cache.config().dtype == DType::F8E4M3 {
            let layers = cache.config().num_layers;
            let bytes = layers.saturating_mul(size_of::<[unsloth_quantization; 2]>());
            quantizations
                .try_reserve_exact(layers)
                .map_err(|_| Error::out_of_host_memory(op, bytes))?;
            for layer in 0..layers {
                let (k, v) = cache.layer(layer)?;
                quantizations.push([k, v].map(|t| unsloth_quantization::of(&t)));
            }
        }
        Ok(Held {
            cache,
            quantizations,
        })
    }

    /// Keys and values of a layer.
    fn layer(&self, layer: usize) -> Result<[unsloth_tensor; 2]> {
        let (k, v) = self.cache.layer(layer)?;
        let mut tensors = [k, v].map(|t| unsloth_tensor::of(&t));
        if let Some(quantizations) = self.quantizations.get(layer) {
            for (tensor, quantization) in tensors.iter_mut().zip(quantizations) {
                tensor.quantization = quantization;
            }
        }
        Ok(tensors)
    }
}

/// A cache for this thread alone, which lives at least as long.
pub(crate) struct LockedCache {
    // Dropped first, as the first field: it borrows from what the second keeps alive.
    guard: MutexGuard<'static, Held>,
    _alive: Shared<Mutex<Held>>,
}

impl LockedCache {
    fn tensors(&self, layer: usize) -> Result<[unsloth_tensor; 2]> {
        self.guard.layer(layer)
    }
}

impl Deref for LockedCache {
    type Target = KvCache;

    fn deref(&self) -> &KvCache {
        &self.guard.cache
    }
}

impl DerefMut for LockedCache {
    fn deref_mut(&mut self) -> &mut KvCache {
        &mut self.guard.cache
    }
}

/// The cache behind a handle. A panic inside an earlier call cannot have left it half-changed in a
/// way that later calls would trust: indices are checked where they are used.
pub(crate) fn cache_from(op: &'static str, cache: *const unsloth_kv_cache) -> Result<LockedCache> {
    let alive = CACHES.get(op, "cache", cache)?;
    // SAFETY: the mutex stays where it is while `_alive` counts, and the guard is dropped before
    // that.
    let mutex: &'static Mutex<Held> = unsafe { &*std::ptr::from_ref(&*alive) };
    Ok(LockedCache {
        guard: mutex.lock().unwrap_or_else(|p| p.into_inner()),
        _alive: alive,
    })
}

/// The cache's shape, zeros replaced by the defaults.
pub(crate) fn config_from(op: &'static str, p: &unsloth_kv_cache_params) -> Result<Config> {
    let dtype = DType::from_raw(p.dtype).ok_or_else(|| {
        let problem = text!(
            "is {}, allowed: 1 (f32), 2 (f16), 3 (bf16), 7 (f8e4m3)",
            p.dtype
        );
        Error::invalid(op, "dtype", problem)
    })?;
    let dtype = implemented(op, "the cache", dtype)?;
    let page_layout = PageLayout::from_raw(p.page_layout).ok_or_else(|| {
        let problem = text!(
            "is {}, allowed: 0 (token-major), 1 (head-major)",
            p.page_layout
        );
        Error::invalid(op, "page_layout", problem)
    })?;
    let field = |name, value, default| match count(op, name, value)? {
        0 => Ok(default),
        n => Ok::<_, Error>(n),
    };
    let mut config = Config::new(
        count(op, "num_layers", p.num_layers)?,
        count(op, "num_kv_heads", p.num_kv_heads)?,
        count(op, "head_dim", p.head_dim)?,
        count(op, "num_pages", p.num_pages)?,
        dtype,
    );
    config.page_layout = page_layout;
    config.v_head_dim = field("v_head_dim", p.v_head_dim, config.head_dim)?;
    config.page_size = field("page_size", p.page_size, config.page_size)?;
    config.max_batch_size = field("max_batch_size", p.max_batch_size, config.max_batch_size)?;
    config.max_batch_tokens = field(
        "max_batch_tokens",
        p.max_batch_tokens,
        config.max_batch_tokens,
    )?;
    let all = config.all_tokens();
    config.max_sequence_length = field("max_sequence_length", p.max_sequence_length, all)?;
    Ok(config)
}

/// Allocates an empty cache on the context's device and writes its handle to `cache`; the caller ends it with
/// `unsloth_kv_cache_destroy`. The cache keeps the context's device and accounting alive on its own.
///
/// It allocates exactly what `unsloth_kv_cache_memory_estimate` answers, once; nothing else about a cache allocates device memory.
/// `UNSLOTH_STATUS_OUT_OF_MEMORY` if that is not there.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; `cache` is NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_create(
    ctx: *mut unsloth_context,
    params: *const unsloth_kv_cache_params,
    cache: *mut *mut unsloth_kv_cache,
) -> unsloth_status {
    const OP: &str = "kv_cache_create";
    guard(OP, || {
        check_out(OP, "cache", cache)?;
        let context = &context_from(OP, ctx)?.context;
        // SAFETY: the caller's promise.
        let p = unsafe { params::read(OP, params) }?;
        let created = KvCache::new(context, &config_from(OP, &p)?)?;
        let handle = CACHES.insert(OP, Mutex::new(Held::new(OP, created)?))?;
        // SAFETY: checked; the caller promises that it is valid.
        unsafe { cache.write(handle) };
        Ok(())
    })
}

/// Ends a cache with its sequences and frees its memory. NULL is fine. Where another thread is
/// inside a call with it, the cache ends with that call.
///
/// # Safety
/// No work that is queued uses memory of the cache, and none will.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_destroy(cache: *mut unsloth_kv_cache) -> unsloth_status {
    const OP: &str = "kv_cache_destroy";
    guard(OP, || {
        if !cache.is_null() {
            drop(CACHES.remove(OP, "cache", cache)?);
        }
        Ok(())
    })
}

/// Makes `num_sequences` sequences, of which `sequences[i]` gets `num_tokens[i]` new tokens, the current batch: finds pages for the
/// new tokens, advances lengths and positions, and puts the batch's tables on the device by at most one copy on `stream`, from
/// page-locked memory and without waiting: what changed since the last batch, or nothing.
///
/// `unsloth_kv_cache_append` must then write the new tokens in every layer. Numbers may be zero, and so may `num_sequences`. A
/// captured graph of appends and attention can be launched again after extending a batch with the same numbers of tokens; this
/// function itself stays outside the graph, and refuses a stream that is being captured.
///
/// `UNSLOTH_STATUS_OUT_OF_PAGES` if too few are free, `UNSLOTH_STATUS_INVALID_HANDLE` for an unknown sequence,
/// `UNSLOTH_STATUS_INVALID_ARGUMENT` if one occurs twice or a limit of the cache would be passed: every sequence is as it was.
///
/// # Safety
/// `sequences` and `num_tokens` are NULL or have `num_sequences` entries; `stream` is NULL or a live stream of the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_extend(
    cache: *mut unsloth_kv_cache,
    sequences: *const i64,
    num_tokens: *const i64,
    num_sequences: usize,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "kv_cache_extend";
    guard(OP, || {
        let mut cache = cache_from(OP, cache)?;
        let most = cache.config().max_batch_size;
        if num_sequences > most {
            let problem = text!("is {num_sequences}, above max_batch_size {most}");
            return Err(Error::invalid(OP, "num_sequences", problem));
        }
        let mut batch = Vec::new();
        batch
            .try_reserve(num_sequences)
            .map_err(|_| Error::out_of_host_memory(OP, num_sequences.saturating_mul(16)))?;
        if num_sequences > 0 {
            check_pointer(OP, "sequences", sequences)?;
            check_pointer(OP, "num_tokens", num_tokens)?;
            for i in 0..num_sequences {
                // SAFETY: checked; the caller promises this many entries.
                let (id, n) = unsafe { (*sequences.add(i), *num_tokens.add(i)) };
                batch.push((SequenceId::from_raw(id), count(OP, "num_tokens", n)?));
            }
        }
        // SAFETY: the caller's promise.
        cache.extend(&batch, unsafe { stream_from(stream) })
    })
}

/// Describes the current batch in `batch`, whose `struct_size` the caller has set (`UNSLOTH_KV_CACHE_BATCH_INIT`).
///
/// The current batch is that of the last `unsloth_kv_cache_extend`, until one of its sequences is forked, truncated, evicted from,
/// given more pages, or freed; `UNSLOTH_STATUS_INVALID_ARGUMENT` if there is none.
///
/// # Safety
/// `batch` is NULL or points to `batch->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_batch_get(
    cache: *mut unsloth_kv_cache,
    batch: *mut unsloth_kv_cache_batch,
) -> unsloth_status {
    const OP: &str = "kv_cache_batch";
    guard(OP, || {
        check_out(OP, "batch", batch)?;
        // SAFETY: the caller's promise.
        let mut out = unsafe { params::read(OP, batch.cast_const()) }?;
        let cache = cache_from(OP, cache)?;
        let current = cache.batch()?;
        out.num_sequences = current.num_sequences as i64;
        out.num_tokens = current.num_tokens as i64;
        out.max_query_length = current.max_query_length as i64;
        out.max_sequence_length = current.max_sequence_length as i64;
        out.seq_lens = unsloth_tensor::of(&current.seq_lens);
        out.cu_seqlens = unsloth_tensor::of(&current.cu_seqlens);
        out.positions = unsloth_tensor::of(&current.positions);
        out.block_table = unsloth_tensor::of(&current.block_table);
        out.host_seq_lens = current.host_seq_lens.as_ptr();
        out.host_cu_seqlens = current.host_cu_seqlens.as_ptr();
        out.host_positions = current.host_positions.as_ptr();
        out.host_block_table = current.host_block_table.as_ptr();
        // SAFETY: the caller promises `struct_size` writable bytes.
        unsafe { params::write(&out, batch) };
        Ok(())
    })
}

/// Gives a layer of a cache of f8e4m3 the scales of its keys and of its values: `num_scales` floats on the host each, one for all
/// heads or `num_kv_heads`. Until then they are 1. Codes times their scale are what is meant: `unsloth_kv_cache_append` stores the
/// code nearest to `x * (1 / scale)`, of what lies beyond 448 the last, NaN as NaN; attention of the layer's pages multiplies. The
/// greatest magnitude that a layer's keys reach, divided by 448, is a good scale.
///
/// The numbers are copied to the device on `stream`, and may change once this returns. They are part of what stored tokens are, so
/// they are set while no sequence holds any; it may not be captured.
///
/// `UNSLOTH_STATUS_INVALID_ARGUMENT` if the cache has another dtype, a sequence holds tokens, or a scale is not positive or has
/// no reciprocal in f32.
///
/// # Safety
/// `k_scale` and `v_scale` are NULL or have `num_scales` entries; `stream` is NULL or a live stream of the context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_scales_set(
    cache: *mut unsloth_kv_cache,
    layer: i64,
    k_scale: *const f32,
    v_scale: *const f32,
    num_scales: usize,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "kv_cache_scales_set";
    guard(OP, || {
        check_pointer(OP, "k_scale", k_scale)?;
        check_pointer(OP, "v_scale", v_scale)?;
        let mut cache = cache_from(OP, cache)?;
        let layer = count(OP, "layer", layer)?;
        let heads = cache.config().num_kv_heads;
        if num_scales != 1 && num_scales != heads {
            let problem = text!("is {num_scales}, allowed: 1, or one for each of {heads} heads");
            return Err(Error::invalid(OP, "num_scales", problem));
        }
        // SAFETY: checked; the caller promises this many entries.
        let [k, v] =
            [k_scale, v_scale].map(|ptr| unsafe { std::slice::from_raw_parts(ptr, num_scales) });
        // SAFETY: the caller's promise.
        cache.set_scales(layer, k, v, unsafe { stream_from(stream) })
    })
}

/// Writes the keys and values of the current batch's new tokens to one layer's pages on `stream`, and rotates the tokens' queries
/// if `q` is there. Neither allocates nor synchronises, and may be captured into a CUDA graph.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` readable bytes; its tensors are valid on the context's device until the work
/// has run; `stream` is NULL or a live stream of that device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_append(
    cache: *mut unsloth_kv_cache,
    params: *const unsloth_kv_cache_append_params,
    stream: unsloth_stream,
) -> unsloth_status {
    const OP: &str = "kv_cache_append";
    guard(OP, || {
        let mut cache = cache_from(OP, cache)?;
        // SAFETY: the caller's promises.
        unsafe {
            let p = params::read(OP, params)?;
            let params = Append {
                layer: count(OP, "layer", p.layer)?,
                k: p.k.input(OP, "k")?,
                v: p.v.input(OP, "v")?,
                q: in_out(OP, ("q", "q_out"), &p.q, &p.q_out)?,
                rotation: match flag(OP, "rotate", p.rotate)? {
                    false => None,
                    true => Some(p.rotation.read(OP)?),
                },
            };
            cache.append(&params, stream_from(stream))
        }
    })
}

/// Writes views of a layer's key and value pages to `k` and `v`: `[num_pages, page_size, num_kv_heads, head_dim]`, or head-major
/// `[num_pages, num_kv_heads, page_size, head_dim]`, as attention takes them, with their scales where they are f8e4m3. They stay
/// valid until the cache is destroyed.
///
/// # Safety
/// `k` and `v` are NULL or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_layer_get(
    cache: *mut unsloth_kv_cache,
    layer: i64,
    k: *mut unsloth_tensor,
    v: *mut unsloth_tensor,
) -> unsloth_status {
    const OP: &str = "kv_cache_layer";
    guard(OP, || {
        check_out(OP, "k", k)?;
        check_out(OP, "v", v)?;
        let cache = cache_from(OP, cache)?;
        let [keys, values] = cache.tensors(count(OP, "layer", layer)?)?;
        // SAFETY: checked; the caller promises that they are valid.
        unsafe {
            k.write(keys);
            v.write(values);
        }
        Ok(())
    })
}

/// Completes `params`, whose `struct_size` the caller has set (`UNSLOTH_ATTENTION_PARAMS_INIT`), for attention of the current batch's
/// new tokens over everything their sequences hold in a layer: sets `k`, `v`, `cu_seqlens_q`, `seq_lens_k`, `block_table`,
/// `page_layout`, `max_seqlen_q`, `max_seqlen_k` and `causal`, and leaves the rest to the caller: `q` and `out`, packed
/// `[num_tokens, num_heads, head_dim]` and `[num_tokens, num_heads, v_head_dim]`, scale, softcap, workspace.
///
/// `max_seqlen_k` is the cache's `max_sequence_length`, so that workspace and launch suit every later step, those of a captured
/// graph among them; the batch's `max_sequence_length` is a tighter bound for this step alone. A sliding window of attention counts
/// the tokens held, so after an eviction it is right as long as no sinks were kept.
///
/// # Safety
/// `params` is NULL or points to `params->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_attention_prepare(
    cache: *mut unsloth_kv_cache,
    layer: i64,
    params: *mut unsloth_attention_params,
) -> unsloth_status {
    const OP: &str = "kv_cache_attention_prepare";
    guard(OP, || {
        check_out(OP, "params", params)?;
        // SAFETY: the caller's promise.
        let mut p = unsafe { params::read(OP, params.cast_const()) }?;
        let cache = cache_from(OP, cache)?;
        let layer = cache.tensors(count(OP, "layer", layer)?);
        let [k, v] = layer.map_err(|error| error.within(OP))?;
        let batch = cache.batch().map_err(|error| error.within(OP))?;
        (p.k, p.v) = (k, v);
        p.cu_seqlens_q = unsloth_tensor::of(&batch.cu_seqlens);
        p.seq_lens_k = unsloth_tensor::of(&batch.seq_lens);
        p.block_table = unsloth_tensor::of(&batch.block_table);
        p.page_layout = cache.config().page_layout as u32;
        p.max_seqlen_q = batch.max_query_length as i64;
        p.max_seqlen_k = cache.config().max_sequence_length as i64;
        p.causal = 1;
        // SAFETY: the caller promises `struct_size` writable bytes.
        unsafe { params::write(&p, params) };
        Ok(())
    })
}

/// Describes in `stats` how the cache is used; the caller has set `struct_size` (`UNSLOTH_KV_CACHE_STATS_INIT`). Takes time in
/// proportion to the pages.
///
/// # Safety
/// `stats` is NULL or points to `stats->struct_size` bytes valid for reads and writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unsloth_kv_cache_stats_get(
    cache: *mut unsloth_kv_cache,
    stats: *mut unsloth_kv_cache_stats,
) -> unsloth_status {
    const OP: &str = "kv_cache_stats";
    guard(OP, || {
        check_out(OP, "stats", stats)?;
        // SAFETY: the caller's promise.
        let mut out = unsafe { params::read(OP, stats.cast_const()) }?;
        let found = cache_from(OP, cache)?.stats()?;
        out.num_pages = found.num_pages as i64;
        out.num_used_pages = found.num_used_pages as i64;
        out.num_free_pages = found.num_free_pages as i64;
        out.num_shared_pages = found.num_shared_pages as i64;
        out.peak_used_pages = found.peak_used_pages as i64;
        out.num_sequences = found.num_sequences as i64;
        out.num_tokens = found.num_tokens as i64;
        out.num_stored_tokens = found.num_stored_tokens as i64;
        out.page_bytes = found.page_bytes;
        out.total_bytes = found.size.total();
        out.key_bytes = found.size.keys;
        out.value_bytes = found.size.values;
        out.table_bytes = found.size.tables;
        out.fragmentation = found.fragmentation;
        // SAFETY: the caller promises `struct_size` writable bytes.
        unsafe { params::write(&out, stats) };
        Ok(())
    })
}
