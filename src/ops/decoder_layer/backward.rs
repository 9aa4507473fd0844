//! The backward pass of a decoder layer:
//!
//! ```text
//! dh = dy + rms_norm'(h) mlp'(rms_norm(h)) dy
//! dx = dh + rms_norm'(x) attention_block'(rms_norm(x)) dh
//! ```
//!
//! with the gradients of both norms' gains and of the weights of the attention block and the MLP,
//! each of which is optional. It is a sequence of this library's operations. What the forward pass
//! did not keep is computed again as it was there, so gradients have the same bits under every
//! [`Checkpointing`](super::Checkpointing), on a GPU where
//! [`deterministic`](Params::deterministic) is asked for.

use super::Params as Forward;
use super::layer::{Layer, Norm};
use crate::comm::Comm;
use crate::error::Result;
use crate::ops::check;
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parts::Parts;
use crate::ops::{attention_block, mlp};
use crate::problem::norm::Parameters;
use crate::tensor::{InOut, RawTensor, TensorMut, Workspace};

const OP: &str = "decoder_layer_backward";

/// Arguments of [`backward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// The forward's, with what it left in `saved`. Its output and workspace are not looked at.
    pub forward: Forward<'a>,
    /// The gradient of the output and that of `x`, both like `x`; `dx` may take its place.
    pub dout: InOut<'a>,
    /// Receives the gradient of the gains before the attention block: `[hidden]`, any float dtype. Sequence
    /// parallel it is of this rank's rows, and its sum over ranks is the gradient.
    pub dattention_norm: Option<TensorMut<'a>>,
    /// Receives that of the gains before the MLP, likewise.
    pub dmlp_norm: Option<TensorMut<'a>>,
    /// Receive those of the attention block's weights.
    pub attention: attention_block::backward::Gradients<'a>,
    /// Receive those of the MLP's weights.
    pub mlp: mlp::backward::Gradients<'a>,
    /// Adds to what the gradients of weights, biases and gains hold, which must be f32 then. `dx`
    /// is overwritten always.
    pub accumulate: bool,
    /// Whether the same inputs must give the same bits on a GPU, which may take longer: see
    /// [`attention`'s](crate::ops::attention::backward::Params::deterministic). On the CPU they do in
    /// any case.
    pub deterministic: bool,
    /// [`workspace_size`] bytes, all of which are needed.
    pub workspace: Workspace<'a>,
}

impl Params<'_> {
    /// A norm's gradient, checked.
    fn of_norm(
        &self,
        name: &'static str,
        gradient: Option<&TensorMut<'_>>,
        weight: RawTensor,
    ) -> Result<Parameters> {
        let gradient = (name, gradient);
        Ok(Parameters {
            dweight: check::gradient_like(OP, gradient, Some(&weight), self.accumulate)?,
            dbias: None,
            accumulate: self.accumulate,
        })
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Parts<'a, 50>;

    fn problem(&self) -> Result<Self::Problem> {
        let layer = Layer::new(OP, &self.forward)?;
        let (dout, dx) = (self.dout.input(), self.dout.output());
        layer.check_like_x("dout", &dout)?;
        check::in_out(OP, ("dout", "dx"), &self.dout)?;
        let gains = &self.forward.attention_norm;
        let of_attention_norm = self.of_norm(
            "dattention_norm",
            self.dattention_norm.as_ref(),
            gains.raw(),
        )?;
        let gains = &self.forward.mlp_norm;
        let of_mlp_norm = self.of_norm("dmlp_norm", self.dmlp_norm.as_ref(), gains.raw())?;

        let mut parts = Parts::new(OP, &self.workspace).exactly();
        let saved = &layer.saved;
        let dhidden = layer.take(&mut parts)?;
        // The norms' outputs share room, and are there when they are read.
        let norm = match (saved.attention_norm, saved.mlp_norm) {
            (Some(saved), Some(_)) => saved,
            _ => layer.take(&mut parts)?,
        };
        let (qkv, attended, hidden) = match (saved.attended, saved.hidden) {
            (Some(attended), Some(hidden)) => (saved.qkv, attended, hidden),
            _ => {
                let hidden = layer.take(&mut parts)?;
                let again = layer.attended(&mut parts)?;
                layer.push_norm(Norm::Attention, layer.x, norm, &mut parts)?;
                let summed = layer.push_attention(norm, &again, hidden, &mut parts)?;
                layer.push_join(summed, &mut parts)?;
                (Some(again.qkv), (again.out, again.lse), hidden)
            }
        };

        let of_mlp = (&self.mlp, self.accumulate);
        let mlp_norm = layer.norm_again(Norm::Mlp, hidden, (saved.mlp_norm, norm), &mut parts)?;
        layer.push_mlp_backward(mlp_norm, dout, dhidden, of_mlp, &mut parts)?;
        let both = [dhidden, dout];
        layer.push_norm_backward(Norm::Mlp, hidden, both, of_mlp_norm, &mut parts)?;

        let of_attention = (&self.attention, self.accumulate, self.deterministic);
        let kept = (saved.attention_norm, norm);
        let attention_norm = layer.norm_again(Norm::Attention, layer.x, kept, &mut parts)?;
        // By now `dout` has been read, whose place `dx` may take.
        layer.push_attention_backward(
            attention_norm,
            (qkv, attended),
            [dhidden, dx],
            of_attention,
            &mut parts,
        )?;
        let both = [dx, dhidden];
        layer.push_norm_backward(
            Norm::Attention,
            layer.x,
            both,
            of_attention_norm,
            &mut parts,
        )?;
        Ok(parts)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.forward.weights(tensors);
        if let Ok(Some(saved)) = self.forward.saved_tensor() {
            tensors.read("saved", &saved.as_ref());
        }
        tensors.in_out(("dout", "dx"), &self.dout);
        tensors.write_optional("dattention_norm", self.dattention_norm.as_ref());
        tensors.write_optional("dmlp_norm", self.dmlp_norm.as_ref());
        for (name, gradient) in self.attention.list().into_iter().chain(self.mlp.list()) {
            tensors.write_optional(name, gradient);
        }
    }

    fn ready(&self) -> Result<()> {
        self.forward.check_saved(OP)
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.forward.comm()
    }
}

operation::functions!(backward);
