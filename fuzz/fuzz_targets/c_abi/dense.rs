//! Linear layers, SwiGLU and the MLP.

use unsloth::ffi::linear::backward::*;
use unsloth::ffi::linear::*;
use unsloth::ffi::mlp::backward::*;
use unsloth::ffi::mlp::*;
use unsloth::ffi::swiglu::backward::*;
use unsloth::ffi::swiglu::*;
use unsloth::ffi::tensor::*;

use crate::arena::absent;
use crate::call::{Call, Stated, like, zeroed};

impl Call<'_, '_> {
    pub fn linear(&mut self) -> Box<Stated<unsloth_linear_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let weight_dtype = if self.input.one_in(4) {
            self.float_dtype()
        } else {
            dtype
        };
        let (leading, inner) = self.rows();
        let outer = self.extent(40);
        let shape = [&leading[..], &[outer]].concat();
        let (matrix_dtype, inner) = match self.input.byte() % 7 {
            0 | 1 => self.blocks(),
            2 => (UNSLOTH_DTYPE_I8, inner),
            6 => (UNSLOTH_DTYPE_F8E4M3, inner),
            3 => (UNSLOTH_DTYPE_TERNARY, 128 * self.dim(3)),
            _ => (weight_dtype, inner),
        };
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &[&leading[..], &[inner]].concat());
        p.weight = self.tensor(matrix_dtype, &[outer, inner]);
        p.weight.quantization = self.quantization(matrix_dtype, outer);
        p.bias = self.optional(weight_dtype, &[outer]);
        p.residual = self.optional(dtype, &shape);
        p.out = self.tensor(dtype, &shape);
        p.parallel = self.parallel(&p.x);
        if self.input.one_in(3) {
            p.x_norm = self.tensor(weight_dtype, &[inner]);
            p.norm_epsilon = self.factor();
            p.norm_weight_offset = self.factor();
        }
        stated
    }

    pub fn linear_backward(&mut self) -> Box<Stated<unsloth_linear_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_backward_params>> = unsafe { zeroed() };
        let (dtype, weight_dtype) = (self.float_dtype(), self.float_dtype());
        let (leading, inner) = self.rows();
        let outer = self.extent(40);
        let rows = |last| [&leading[..], &[last]].concat();
        let p = &mut stated.params;
        p.accumulate = self.flag(1);
        let grad_dtype = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => weight_dtype,
        };
        p.dout = self.tensor(dtype, &rows(outer));
        p.x = self.optional(dtype, &rows(inner));
        p.weight = self.optional(weight_dtype, &[outer, inner]);
        if p.weight.rank > 0 {
            p.dx = self.optional(dtype, &rows(inner));
        }
        if p.x.rank > 0 {
            p.dweight = self.optional(grad_dtype, &[outer, inner]);
        }
        p.dbias = self.optional(grad_dtype, &[outer]);
        p.parallel = self.parallel(&p.dout);
        stated
    }

    pub fn swiglu(&mut self) -> Box<Stated<unsloth_swiglu_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_swiglu_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (leading, dim) = self.rows();
        let shape = [&leading[..], &[dim]].concat();
        let p = &mut stated.params;
        if self.input.one_in(2) {
            p.gate_up = self.tensor(dtype, &[&leading[..], &[2 * dim]].concat());
            p.out = self.tensor(dtype, &shape);
        } else {
            p.gate = self.tensor(dtype, &shape);
            p.up = self.tensor(dtype, &shape);
            p.out = self.optional(dtype, &shape);
        }
        p.activation = self.flag(3);
        p.gate_order = self.flag(1);
        stated
    }

    pub fn swiglu_backward(&mut self) -> Box<Stated<unsloth_swiglu_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_swiglu_backward_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (leading, dim) = self.rows();
        let shape = |last: i64| [&leading[..], &[last]].concat();
        let p = &mut stated.params;
        if self.input.one_in(2) {
            p.gate_up = self.tensor(dtype, &shape(2 * dim));
            p.dgate_up = self.optional(dtype, &shape(2 * dim));
        } else {
            p.gate = self.tensor(dtype, &shape(dim));
            p.up = self.tensor(dtype, &shape(dim));
            p.dgate = self.optional(dtype, &shape(dim));
            p.dup = self.optional(dtype, &shape(dim));
        }
        p.dout = self.tensor(dtype, &shape(dim));
        p.out = self.optional(dtype, &shape(dim));
        p.activation = self.flag(3);
        p.gate_order = self.flag(1);
        stated
    }

    pub fn mlp(&mut self) -> Box<Stated<unsloth_mlp_params>> {
        let dtype = self.float_dtype();
        let mut stated = self.mlp_of(dtype);
        if self.input.one_in(3) {
            let p = &mut stated.params;
            let hidden = p.x.shape[(p.x.rank as usize).clamp(1, UNSLOTH_MAX_RANK) - 1];
            p.x_norm = self.tensor(dtype, &[hidden]);
            p.x_norm_epsilon = self.factor();
            p.x_norm_weight_offset = self.factor();
        }
        stated
    }

    pub fn mlp_of(&mut self, dtype: unsloth_dtype) -> Box<Stated<unsloth_mlp_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_mlp_params>> = unsafe { zeroed() };
        let (leading, hidden) = self.rows();
        let (inner, outer) = (self.extent(20), self.extent(20));
        let shape = [&leading[..], &[outer]].concat();
        let p = &mut stated.params;
        p.x = self.tensor(dtype, &[&leading[..], &[hidden]].concat());
        if self.input.one_in(2) {
            p.gate_up_weight = self.tensor(dtype, &[2 * inner, hidden]);
            p.gate_up_bias = self.optional(dtype, &[2 * inner]);
        } else {
            p.gate_weight = self.tensor(dtype, &[inner, hidden]);
            p.gate_bias = self.optional(dtype, &[inner]);
            p.up_weight = self.tensor(dtype, &[inner, hidden]);
            p.up_bias = self.optional(dtype, &[inner]);
        }
        p.down_weight = self.tensor(dtype, &[outer, inner]);
        p.down_bias = self.optional(dtype, &[outer]);
        p.residual = self.optional(dtype, &shape);
        p.out = self.tensor(dtype, &shape);
        p.gate_up_out = self.optional(dtype, &[&leading[..], &[2 * inner]].concat());
        p.activation = self.flag(3);
        p.gate_order = self.flag(1);
        p.parallel = self.parallel(&p.x);
        stated
    }

    pub fn mlp_backward(&mut self) -> Box<Stated<unsloth_mlp_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_mlp_backward_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let mut forward = self.mlp_of(dtype);
        forward.params.struct_size = size_of::<unsloth_mlp_params>() as u32;
        let f = forward.params;
        let p = &mut stated.params;
        p.forward = &raw const forward.params;
        self.kept.push(forward);
        p.accumulate = self.flag(1);
        let grad_dtype = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => dtype,
        };
        // A bias has elements where the large tensors of a call may have none.
        let of_nothing = like(&f.x).last() == Some(&0) || f.down_weight.shape[0] == 0;
        let bias = |t: &unsloth_tensor| if of_nothing { absent() } else { *t };
        for (to, of) in [
            (&mut p.dgate_weight, f.gate_weight),
            (&mut p.dgate_bias, bias(&f.gate_bias)),
            (&mut p.dup_weight, f.up_weight),
            (&mut p.dup_bias, bias(&f.up_bias)),
            (&mut p.dgate_up_weight, f.gate_up_weight),
            (&mut p.dgate_up_bias, bias(&f.gate_up_bias)),
            (&mut p.ddown_weight, f.down_weight),
            (&mut p.ddown_bias, bias(&f.down_bias)),
        ] {
            if of.rank > 0 {
                *to = self.optional(grad_dtype, &like(&of));
            }
        }
        p.dx = self.optional(dtype, &like(&f.x));
        p.dout = self.tensor(dtype, &like(&f.out));
        if f.gate_up_out.rank > 0 {
            p.gate_up = self.tensor(dtype, &like(&f.gate_up_out));
        }
        stated
    }
}
