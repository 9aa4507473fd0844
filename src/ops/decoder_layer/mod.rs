//! A decoder layer of a transformer in one call, for training:
//!
//! ```text
//! h = x + attention_block(rms_norm(x))
//! y = h + mlp(rms_norm(h))
//! ```
//!
//! It is a sequence of this library's operations, [`rms_norm`](super::rms_norm), [`attention_block`]
//! and [`mlp`], each of which rounds its result to the dtype of `x`. What its
//! [`backward`](fn@backward) pass needs is left in [`Params::saved`], memory of [`saved_size`] bytes, as
//! much as [`Params::checkpointing`] says; the rest the backward pass computes again, by the same
//! kernels in the same way, so that gradients have the same bits under every policy.
//!
//! A layer's input is not in `saved`: the caller keeps it, as it is the output of the layer before.
//! Which layers of a stack run twice is planned by [`training::checkpoint`](crate::training::checkpoint).

pub mod backward;
mod layer;

pub use backward::backward;

use crate::comm::Comm;
use crate::context::Context;
use crate::error::Result;
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parts::Parts;
use crate::ops::{attention_block, mlp};
pub use crate::problem::decoder_layer::Checkpointing;
use crate::tensor::{TensorMut, TensorRef, Workspace};
use layer::{Layer, Norm};

const OP: &str = "decoder_layer";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[batch, seq, hidden]` or `[tokens, hidden]`, f32, f16 or bf16; rows strided, contiguous in
    /// the last dimension. With `cu_seqlens` of the attention it is `[tokens, hidden]`.
    pub x: TensorRef<'a>,
    /// Gains of the norm before the attention block, `[hidden]`, any float dtype.
    pub attention_norm: TensorRef<'a>,
    /// Gains of the norm before the MLP, likewise.
    pub mlp_norm: TensorRef<'a>,
    /// Added to the gains of both norms: 1 for Gemma, else 0.
    pub norm_weight_offset: f32,
    /// Added to the mean squares of both norms; above 0.
    pub norm_epsilon: f32,
    /// The attention block, without a cache. Its `x`, output, workspace and what it keeps are the
    /// layer's: what is said of them here is not looked at. Where ranks divide it, they divide the MLP among
    /// the same group in the same way; sequence parallel, `x` and `out` are this rank's rows.
    pub attention: attention_block::Params<'a>,
    /// The MLP, of which likewise.
    pub mlp: mlp::Params<'a>,
    /// What is kept for the backward pass.
    pub checkpointing: Checkpointing,
    /// Like `x`, and not the same: `y`.
    pub out: TensorMut<'a>,
    /// [`saved_size`] bytes: written by the forward pass, read by the backward pass.
    pub saved: Workspace<'a>,
    /// [`workspace_size`] bytes, all of which are needed.
    pub workspace: Workspace<'a>,
}

impl Params<'_> {
    /// What is kept, as a tensor for checks of overlap; `None` where nothing is.
    fn saved_tensor(&self) -> Result<Option<TensorMut<'_>>> {
        self.saved.as_tensor(Layer::new(OP, self)?.saved.size)
    }

    fn check_saved(&self, op: &'static str) -> Result<()> {
        let size = Layer::new(op, self)?.saved.size;
        self.saved.check_argument(op, "saved", size)
    }

    /// What forward and backward read alike.
    fn weights(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        tensors.read("attention_norm", &self.attention_norm);
        tensors.read("mlp_norm", &self.mlp_norm);
        self.attention.inputs(tensors);
        self.mlp.weights(tensors);
    }
}

/// Bytes of [`Params::saved`], rounded up to 256. Data pointers are not looked at.
///
/// # Errors
/// An argument is wrong.
pub fn saved_size(_ctx: &Context, params: &Params<'_>) -> Result<usize> {
    Ok(Layer::new(OP, params)?.saved.size)
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Parts<'a, 22>;

    fn problem(&self) -> Result<Self::Problem> {
        let layer = Layer::new(OP, self)?;
        let out = self.out.raw();
        layer.check_like_x("out", &out)?.writable()?;
        let mut parts = Parts::new(OP, &self.workspace).exactly();
        let saved = &layer.saved;
        let hidden = layer.saved_or_taken(saved.hidden, &mut parts)?;
        let norm = layer.saved_or_taken(saved.attention_norm, &mut parts)?;
        layer.push_norm(Norm::Attention, layer.x, norm, &mut parts)?;
        let taken = parts.taken();
        let attended = layer.attended(&mut parts)?;
        let summed = layer.push_attention(norm, &attended, hidden, &mut parts)?;
        parts.give_back(taken);
        // The first norm's output is not read again: what is not kept of the second takes its place.
        let norm = saved.mlp_norm.unwrap_or(norm);
        let gate_up = match saved.gate_up {
            Some(saved) => saved,
            None => layer.take_gate_up(&mut parts)?,
        };
        layer.push_mlp(norm, gate_up, (hidden, summed), out, &mut parts)?;
        Ok(parts)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.weights(tensors);
        tensors.write("out", &self.out);
        if let Ok(Some(saved)) = self.saved_tensor() {
            tensors.write("saved", &saved);
        }
    }

    fn ready(&self) -> Result<()> {
        self.check_saved(OP)
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.attention.comm()
    }
}

operation::functions!();
