//! Operations on rows: norms, casts, quantisation, and what turns tokens into rows and back.

use unsloth::ffi::argmax::*;
use unsloth::ffi::cast::*;
use unsloth::ffi::embedding::backward::*;
use unsloth::ffi::embedding::*;
use unsloth::ffi::layer_norm::backward::*;
use unsloth::ffi::layer_norm::*;
use unsloth::ffi::quantize::*;
use unsloth::ffi::rms_norm::backward::*;
use unsloth::ffi::rms_norm::*;
use unsloth::ffi::tensor::*;
use unsloth::ffi::weight_repack::*;

use crate::call::{Call, Stated, zeroed};

impl Call<'_, '_> {
    pub fn cast(&mut self) -> Box<Stated<unsloth_cast_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_cast_params>> = unsafe { zeroed() };
        let (from, to) = (self.float_dtype(), self.float_dtype());
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(from, &shape);
        p.out = self.tensor(to, &shape);
        p.reserved = self.flag(0);
        stated
    }

    pub fn argmax(&mut self) -> Box<Stated<unsloth_argmax_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_argmax_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let to = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let (leading, n) = self.rows();
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &[&leading[..], &[n]].concat());
        p.out = match leading.is_empty() {
            true => self.tensor(to, &[1]),
            false => self.tensor(to, &leading),
        };
        p.reserved = self.flag(0);
        stated
    }

    pub fn quantize(&mut self) -> Box<Stated<unsloth_quantize_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_quantize_params>> = unsafe { zeroed() };
        let from = self.float_dtype();
        let to = self.input.pick(&[
            UNSLOTH_DTYPE_I8,
            UNSLOTH_DTYPE_TERNARY,
            UNSLOTH_DTYPE_F8E4M3,
        ]);
        let (leading, mut dim) = self.rows();
        if to == UNSLOTH_DTYPE_TERNARY {
            dim = 128 * (1 + dim % 3);
        }
        let of_rows = match leading.is_empty() {
            true => vec![1],
            false => leading.clone(),
        };
        let of_groups = [&leading[..], &[self.input.pick(&[1, 2, dim])]].concat();
        let scales = self.input.pick(&[0, 1, 2]);
        let p = &mut stated.params;
        p.rule = self.flag(2);
        p.x = self.tensor(from, &[&leading[..], &[dim]].concat());
        p.out = self.tensor(to, &[&leading[..], &[dim]].concat());
        let (scale, sum) = match scales {
            0 => (vec![1], of_rows),
            1 => (of_rows.clone(), of_rows),
            _ => (of_groups.clone(), of_groups),
        };
        p.scale = self.tensor(UNSLOTH_DTYPE_F32, &scale);
        p.sum = self.optional(UNSLOTH_DTYPE_I32, &sum);
        stated
    }

    pub fn weight_repack(&mut self) -> Box<Stated<unsloth_weight_repack_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_weight_repack_params>> = unsafe { zeroed() };
        let (n, k) = (self.extent(40), 128 * self.extent(3));
        let p = &mut stated.params;
        p.format = self.flag(0);
        p.packed = self.tensor(UNSLOTH_DTYPE_I8, &[n.saturating_mul(k) / 4 + 32]);
        p.out = self.tensor(UNSLOTH_DTYPE_TERNARY, &[n, k]);
        p.scale = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        if self.input.one_in(3) {
            p.out.data = p.packed.data;
        }
        stated
    }

    pub fn rms_norm(&mut self) -> Box<Stated<unsloth_rms_norm_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_rms_norm_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &shape);
        p.out = self.optional(dtype, &shape);
        p.residual = self.optional(dtype, &shape);
        p.residual_out = self.optional(dtype, &shape);
        let weight_dtype = self.float_dtype();
        p.weight = self.optional(weight_dtype, &[dim]);
        p.epsilon = self.factor().max(1e-5);
        p.weight_offset = self.factor();
        p.reserved = self.flag(0);
        stated
    }

    pub fn rms_norm_backward(&mut self) -> Box<Stated<unsloth_rms_norm_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_rms_norm_backward_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &shape);
        p.dout = self.tensor(dtype, &shape);
        p.dx = self.optional(dtype, &shape);
        p.dresidual = self.optional(dtype, &shape);
        let of_weight = self.float_dtype();
        p.weight = self.optional(of_weight, &[dim]);
        if p.weight.rank > 0 {
            p.weight_offset = self.factor();
            let of_gradient = self.float_dtype();
            p.dweight = self.optional(of_gradient, &[dim]);
        }
        p.accumulate = self.flag(1);
        p.epsilon = self.factor().max(1e-5);
        stated
    }

    pub fn layer_norm(&mut self) -> Box<Stated<unsloth_layer_norm_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_layer_norm_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &shape);
        p.out = self.optional(dtype, &shape);
        for vector in [&mut p.weight, &mut p.bias] {
            let dtype = self.float_dtype();
            *vector = self.optional(dtype, &[dim]);
        }
        p.epsilon = self.factor().max(1e-5);
        stated
    }

    pub fn layer_norm_backward(&mut self) -> Box<Stated<unsloth_layer_norm_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_layer_norm_backward_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, dim) = self.rows();
        shape.push(dim);
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &shape);
        p.dout = self.tensor(dtype, &shape);
        p.dx = self.optional(dtype, &shape);
        p.dresidual = self.optional(dtype, &shape);
        for vector in [&mut p.weight, &mut p.dbias] {
            let dtype = self.float_dtype();
            *vector = self.optional(dtype, &[dim]);
        }
        if p.weight.rank > 0 {
            let of_gradient = self.float_dtype();
            p.dweight = self.optional(of_gradient, &[dim]);
        }
        p.accumulate = self.flag(1);
        p.epsilon = self.factor().max(1e-5);
        stated
    }

    pub fn embedding(&mut self) -> Box<Stated<unsloth_embedding_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_embedding_params>> = unsafe { zeroed() };
        let (leading, dim) = self.rows();
        let (dtype, out_dtype) = (self.float_dtype(), self.float_dtype());
        let (dtype, dim) = match self.input.one_in(3) {
            true => self.blocks(),
            false => (dtype, dim),
        };
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let p = &mut stated.params;
        let vocabulary = self.extent(40);
        p.table = self.tensor(dtype, &[vocabulary, dim]);
        p.ids = self.tensor(integer, &leading);
        p.out = self.tensor(out_dtype, &[&leading[..], &[dim]].concat());
        p.parallel = self.parallel_of_rows(&p.out);
        (p.vocab_begin, p.vocab_size) = self.vocabulary(&p.parallel, vocabulary);
        stated
    }

    pub fn embedding_backward(&mut self) -> Box<Stated<unsloth_embedding_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_embedding_backward_params>> = unsafe { zeroed() };
        let (leading, dim) = self.rows();
        let (dtype, table_dtype) = (self.float_dtype(), self.float_dtype());
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let p = &mut stated.params;
        let vocabulary = self.extent(40);
        p.accumulate = self.flag(1);
        p.has_padding_idx = self.flag(1);
        p.padding_idx = self.input.up_to(40);
        let grad_dtype = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => table_dtype,
        };
        p.dout = self.tensor(dtype, &[&leading[..], &[dim]].concat());
        p.ids = self.tensor(integer, &leading);
        p.dweight = self.tensor(grad_dtype, &[vocabulary, dim]);
        p.parallel = self.parallel_of_rows(&p.dout);
        (p.vocab_begin, p.vocab_size) = self.vocabulary(&p.parallel, vocabulary);
        stated
    }
}
