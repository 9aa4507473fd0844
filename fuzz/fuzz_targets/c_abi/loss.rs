//! Losses, of logits and with the head's product.

use unsloth::ffi::cross_entropy::*;
use unsloth::ffi::linear_cross_entropy::*;
use unsloth::ffi::linear_logprob::backward::*;
use unsloth::ffi::linear_logprob::*;
use unsloth::ffi::tensor::*;

use crate::call::{Call, Stated, zeroed};

/// A layer over a vocabulary, and the tokens that it is for.
pub struct Head {
    x: unsloth_tensor,
    dx: unsloth_tensor,
    weight: unsloth_tensor,
    bias: unsloth_tensor,
    ids: unsloth_tensor,
    /// The shape of `ids`.
    tokens: Vec<i64>,
    ignore_index: i64,
    chunk_tokens: i64,
}

impl Call<'_, '_> {
    pub fn cross_entropy(&mut self) -> Box<Stated<unsloth_cross_entropy_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_cross_entropy_params>> = unsafe { zeroed() };
        let dtype = self.float_dtype();
        let (mut shape, vocab) = self.rows();
        if shape.is_empty() {
            shape.push(1);
        }
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let p = &mut stated.params;
        p.targets = self.tensor(integer, &shape);
        for of_tokens in [&mut p.losses, &mut p.lse] {
            *of_tokens = self.optional(UNSLOTH_DTYPE_F32, &shape);
        }
        shape.push(vocab);
        p.logits = self.tensor(dtype, &shape);
        p.dlogits = self.optional(dtype, &shape);
        p.loss = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        p.dloss = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        p.reduction = self.flag(1);
        if p.reduction == UNSLOTH_REDUCTION_MEAN {
            p.denominator = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        }
        p.has_ignore_index = self.flag(1);
        if p.has_ignore_index == 1 {
            p.ignore_index = i64::from(self.flag(3));
        }
        p.label_smoothing = self.factor();
        p.z_loss = self.factor();
        p.softcap = self.factor();
        stated
    }

    /// Tokens that have ids, and a weight for them.
    pub fn head(&mut self) -> Head {
        let (dtype, of_weight) = (self.float_dtype(), self.float_dtype());
        let (mut tokens, hidden) = self.rows();
        if tokens.is_empty() {
            tokens.push(1);
        }
        let vocab = self.dim(40);
        let integer = self.input.pick(&[UNSLOTH_DTYPE_I32, UNSLOTH_DTYPE_I64]);
        let ids = self.tensor(integer, &tokens);
        let of_x = [&tokens[..], &[hidden]].concat();
        Head {
            x: self.tensor(dtype, &of_x),
            dx: self.optional(dtype, &of_x),
            weight: self.tensor(of_weight, &[vocab, hidden]),
            bias: self.optional(of_weight, &[vocab]),
            ids,
            tokens,
            // Some ids are ignored.
            ignore_index: i64::from(self.flag(3)),
            chunk_tokens: i64::from(self.flag(7)),
        }
    }

    pub fn linear_cross_entropy(&mut self) -> Box<Stated<unsloth_linear_cross_entropy_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_cross_entropy_params>> = unsafe { zeroed() };
        let head = self.head();
        let p = &mut stated.params;
        (p.x, p.weight, p.bias) = (head.x, head.weight, head.bias);
        (p.targets, p.dx) = (head.ids, head.dx);
        for of_tokens in [&mut p.losses, &mut p.lse] {
            *of_tokens = self.optional(UNSLOTH_DTYPE_F32, &head.tokens);
        }
        p.accumulate = self.flag(1);
        let gradient = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => p.weight.dtype,
        };
        let [vocab, hidden, ..] = p.weight.shape;
        p.dweight = self.optional(gradient, &[vocab, hidden]);
        p.dbias = self.optional(gradient, &[vocab]);
        for number in [&mut p.loss, &mut p.dloss] {
            *number = self.optional(UNSLOTH_DTYPE_F32, &[1]);
        }
        p.reduction = self.flag(1);
        (p.has_ignore_index, p.ignore_index) = (1, head.ignore_index);
        p.chunk_tokens = head.chunk_tokens;
        p.label_smoothing = self.factor();
        p.z_loss = self.factor();
        p.softcap = self.factor();
        p.parallel = self.parallel_of_rows(&p.x);
        (p.vocab_begin, p.vocab_size) = self.vocabulary(&p.parallel, vocab);
        stated
    }

    pub fn linear_logprob(&mut self) -> Box<Stated<unsloth_linear_logprob_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_logprob_params>> = unsafe { zeroed() };
        let head = self.head();
        let p = &mut stated.params;
        (p.x, p.weight, p.bias, p.ids) = (head.x, head.weight, head.bias, head.ids);
        for of_tokens in [&mut p.logprobs, &mut p.entropy, &mut p.lse] {
            *of_tokens = self.optional(UNSLOTH_DTYPE_F32, &head.tokens);
        }
        (p.has_ignore_index, p.ignore_index) = (1, head.ignore_index);
        p.chunk_tokens = head.chunk_tokens;
        p.temperature = self.factor();
        p.softcap = self.factor();
        stated
    }

    pub fn linear_logprob_backward(
        &mut self,
    ) -> Box<Stated<unsloth_linear_logprob_backward_params>> {
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_linear_logprob_backward_params>> = unsafe { zeroed() };
        let head = self.head();
        let p = &mut stated.params;
        (p.x, p.weight, p.bias, p.ids) = (head.x, head.weight, head.bias, head.ids);
        for of_tokens in [&mut p.dlogprobs, &mut p.dentropy] {
            *of_tokens = self.optional(UNSLOTH_DTYPE_F32, &head.tokens);
        }
        p.dx = head.dx;
        p.accumulate = self.flag(1);
        let gradient = match p.accumulate {
            1 => UNSLOTH_DTYPE_F32,
            _ => p.weight.dtype,
        };
        let [vocab, hidden, ..] = p.weight.shape;
        p.dweight = self.optional(gradient, &[vocab, hidden]);
        p.dbias = self.optional(gradient, &[vocab]);
        (p.has_ignore_index, p.ignore_index) = (1, head.ignore_index);
        p.chunk_tokens = head.chunk_tokens;
        p.temperature = self.factor();
        p.softcap = self.factor();
        stated
    }
}
