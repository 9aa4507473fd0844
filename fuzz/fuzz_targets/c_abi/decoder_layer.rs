//! Decoder layers: structs that point to structs, and memory that lasts from forward to backward.

use std::ptr;

use unsloth::ffi::attention_block::backward::unsloth_attention_block_backward_params;
use unsloth::ffi::attention_block::unsloth_attention_block_params;
use unsloth::ffi::decoder_layer::backward::*;
use unsloth::ffi::decoder_layer::*;
use unsloth::ffi::mlp::backward::unsloth_mlp_backward_params;
use unsloth::ffi::mlp::unsloth_mlp_params;
use unsloth::ffi::status::UNSLOTH_STATUS_SUCCESS;
use unsloth::ffi::tensor::UNSLOTH_DTYPE_F32;

use crate::call::{Call, Stated, like, zeroed};
use crate::context;

impl Call<'_, '_> {
    /// A layer whose parts are nearly sound; what the attention block has for outputs is not looked
    /// at.
    pub fn decoder_layer(&mut self) -> Box<Stated<unsloth_decoder_layer_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_decoder_layer_params>> = unsafe { zeroed() };
        let mut attention = self.attention_block(None);
        attention.params.struct_size = size_of::<unsloth_attention_block_params>() as u32;
        let f = &mut attention.params;
        let shape = like(&f.x);
        let hidden = shape.last().copied().unwrap_or(0);
        let dtype = f.x.dtype;
        if !self.input.one_in(8) {
            let columns = f.out_weight.shape[1];
            f.out_weight = self.tensor(dtype, &[hidden, columns]);
            f.out_bias = self.optional(dtype, &[hidden]);
        }
        // SAFETY: a params struct.
        let mut mlp: Box<Stated<unsloth_mlp_params>> = unsafe { zeroed() };
        let inner = 1 + self.input.up_to(19);
        mlp.params.struct_size = size_of::<unsloth_mlp_params>() as u32;
        mlp.params.gate_up_weight = self.tensor(dtype, &[2 * inner, hidden]);
        mlp.params.down_weight = self.tensor(dtype, &[hidden, inner]);
        mlp.params.parallel = match self.input.one_in(8) {
            true => self.parallel(&f.x),
            false => f.parallel,
        };
        let p = &mut stated.params;
        p.checkpointing = u32::from(self.input.byte()) % 7;
        p.norm_epsilon = self.factor().max(1e-5);
        p.x = f.x;
        p.attention_norm = self.tensor(dtype, &[hidden]);
        p.mlp_norm = self.tensor(dtype, &[hidden]);
        p.out = self.tensor(dtype, &shape);
        p.attention = &raw const attention.params;
        p.mlp = &raw const mlp.params;
        self.kept.push(attention);
        self.kept.push(mlp);
        let mut size = 0;
        let mut asked = *p;
        asked.struct_size = size_of::<unsloth_decoder_layer_params>() as u32;
        // SAFETY: the structs are live, and data is not looked at.
        let status = unsafe { unsloth_decoder_layer_saved_size(context(), &asked, &mut size) };
        if status == UNSLOTH_STATUS_SUCCESS && size < 1 << 20 {
            let mut memory = vec![0u8; size + 256];
            p.saved = memory.as_mut_ptr().cast();
            p.saved = p.saved.wrapping_byte_add(p.saved.align_offset(256));
            p.saved_size = if self.input.one_in(16) {
                size / 2
            } else {
                size
            };
            self.kept.push(Box::new(memory));
        }
        stated
    }

    pub fn decoder_layer_backward(&mut self) -> Box<Stated<unsloth_decoder_layer_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_decoder_layer_backward_params>> = unsafe { zeroed() };
        let mut forward = self.decoder_layer();
        forward.params.struct_size = size_of::<unsloth_decoder_layer_params>() as u32;
        let f = forward.params;
        // SAFETY: `decoder_layer` keeps both.
        let (block, inner) = unsafe { (*f.attention, *f.mlp) };
        // SAFETY: params structs.
        let (mut attention, mut mlp): (
            Box<Stated<unsloth_attention_block_backward_params>>,
            Box<Stated<unsloth_mlp_backward_params>>,
        ) = unsafe { (zeroed(), zeroed()) };
        attention.params.struct_size = size_of_val(&attention.params) as u32;
        mlp.params.struct_size = size_of_val(&mlp.params) as u32;
        let p = &mut stated.params;
        p.accumulate = self.flag(1);
        let dtype = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => f.x.dtype,
        };
        for (to, of) in [
            (&mut attention.params.dqkv_weight, block.qkv_weight),
            (&mut attention.params.dq_weight, block.q_weight),
            (&mut attention.params.dout_weight, block.out_weight),
            (&mut mlp.params.dgate_up_weight, inner.gate_up_weight),
            (&mut mlp.params.ddown_weight, inner.down_weight),
            (&mut p.dattention_norm, f.attention_norm),
            (&mut p.dmlp_norm, f.mlp_norm),
        ] {
            if of.rank > 0 {
                *to = self.optional(dtype, &like(&of));
            }
        }
        p.dout = self.tensor(f.x.dtype, &like(&f.x));
        p.dx = self.optional(f.x.dtype, &like(&f.x));
        p.forward = &raw const forward.params;
        p.attention = match self.input.one_in(4) {
            true => ptr::null(),
            false => &raw const attention.params,
        };
        p.mlp = match self.input.one_in(4) {
            true => ptr::null(),
            false => &raw const mlp.params,
        };
        self.kept.push(forward);
        self.kept.push(attention);
        self.kept.push(mlp);
        stated
    }
}
