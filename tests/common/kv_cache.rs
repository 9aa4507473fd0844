//! KV caches with known contents.

use unsloth::kv_cache::{Append, Config, KvCache, PageLayout};
use unsloth::memory::{self, CopyKind};
use unsloth::{Context, DType, Stream, TensorRef};

use super::TestTensor;
use super::tensor::strided_rows;

/// Copies a view of device memory to the host, as the elements' values in row-major order.
pub fn download(ctx: &Context, view: &TensorRef<'_>) -> Vec<f64> {
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

/// What token `token` holds in a component of a layer's keys (`which` 0) or values (1): exact in
/// f16.
pub fn component(token: usize, layer: usize, which: usize, head: usize, dim: usize) -> f64 {
    ((token * 131 + layer * 31 + which * 17 + head * 7 + dim) % 2039) as f64
}

/// Appends `tokens` to every layer of the current batch.
pub fn append_all(ctx: &Context, cache: &mut KvCache, tokens: &[usize], dtype: DType) {
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
            let layout = strided_rows(&shape, which);
            TestTensor::from_values(dtype, layout, &values).upload(ctx)
        };
        let (k, v) = (tensor(0, config.head_dim), tensor(1, config.v_head_dim));
        let params = Append {
            layer,
            k: k.view(),
            v: v.view(),
            q: None,
            rotation: None,
        };
        cache.append(&params, Stream::DEFAULT).unwrap();
    }
}

/// The pages of every layer, on the host.
pub struct Contents {
    pub layers: Vec<[Vec<f64>; 2]>,
}

impl Contents {
    pub fn of(ctx: &Context, cache: &KvCache) -> Contents {
        let layers = (0..cache.config().num_layers)
            .map(|layer| {
                let (k, v) = cache.layer(layer).unwrap();
                [download(ctx, &k), download(ctx, &v)]
            })
            .collect();
        Contents { layers }
    }

    /// Asserts that slot `index` of a sequence's pages holds `token`, in every layer, head and
    /// component.
    pub fn assert_token(&self, config: &Config, pages: &[u32], index: usize, token: usize) {
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

/// A small cache of two layers.
pub fn small(page_layout: PageLayout, page_size: usize, dtype: DType) -> Config {
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
