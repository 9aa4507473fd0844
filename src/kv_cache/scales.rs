//! The scales of a cache whose elements are codes.

use crate::context::{Context, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::memory::Buffer;
use crate::ops::kv_cache::LayerScales;

use super::config::Config;
use super::{OP, reserve};

/// What a layer has for each head: the scales of keys and of values, and their reciprocals.
const KINDS: usize = 4;

/// On the device, f32 `[num_layers, KINDS, num_kv_heads]`.
#[derive(Debug)]
pub(super) struct LayersScales {
    device: Buffer,
    num_kv_heads: usize,
}

impl LayersScales {
    /// In bytes, of a cache of this shape; `None` if it fits no address space.
    pub fn size(config: &Config) -> Option<usize> {
        if config.dtype != DType::F8E4M3 {
            return Some(0);
        }
        let of_layer = config.num_kv_heads.checked_mul(KINDS * size_of::<f32>())?;
        let all = of_layer.checked_mul(config.num_layers);
        all.filter(|bytes| *bytes <= isize::MAX as usize)
    }

    /// All ones; nothing where the cache has no codes.
    pub fn new(context: &Context, config: &Config) -> Result<Option<LayersScales>> {
        let count = LayersScales::size(config).unwrap_or(0) / size_of::<f32>();
        if count == 0 {
            return Ok(None);
        }
        let mut ones: Vec<f32> = Vec::new();
        reserve(OP, &mut ones, count)?;
        ones.resize(count, 1.0);
        Ok(Some(LayersScales {
            device: Buffer::from_slice(context, &ones)?,
            num_kv_heads: config.num_kv_heads,
        }))
    }

    /// Those of a layer, which there is.
    pub fn layer(&self, layer: usize) -> Result<LayerScales> {
        let [k, v, k_factors, v_factors] = [0, 1, 2, 3].map(|kind| {
            let at = (layer * KINDS + kind) * self.num_kv_heads * size_of::<f32>();
            let layout = Layout::contiguous(&[self.num_kv_heads])?;
            self.device.tensor(at, DType::F32, layout)
        });
        Ok(LayerScales {
            k: k?.as_scales(),
            v: v?.as_scales(),
            k_factors: k_factors?.raw(),
            v_factors: v_factors?.raw(),
        })
    }

    /// Gives a layer, which there is, other scales: one for all heads, or one for each.
    pub fn set(
        &mut self,
        op: &'static str,
        layer: usize,
        given: [(&'static str, &[f32]); 2],
        stream: Stream,
    ) -> Result<()> {
        let heads = self.num_kv_heads;
        let mut values: Vec<f32> = Vec::new();
        reserve(op, &mut values, KINDS * heads)?;
        for (name, scales) in given {
            if scales.len() != 1 && scales.len() != heads {
                let problem = text!(
                    "has {} entries, allowed: 1, or one for each of {heads} heads",
                    scales.len()
                );
                return Err(Error::invalid(op, name, problem));
            }
            // What is stored is multiplied by the reciprocal.
            let fits = |x: f32| x > 0.0 && x.is_normal() && x.recip().is_normal();
            if let Some((i, x)) = scales.iter().enumerate().find(|(_, x)| !fits(**x)) {
                let problem =
                    text!("has {x} at {i}, allowed: positive numbers with a reciprocal in f32");
                return Err(Error::invalid(op, name, problem));
            }
            let each = |head: usize| scales[if scales.len() == 1 { 0 } else { head }];
            values.extend((0..heads).map(each));
        }
        for i in 0..2 * heads {
            values.push(values[i].recip());
        }
        let offset = layer * KINDS * heads * size_of::<f32>();
        self.device.copy_from_slice(offset, &values, stream)
    }
}
