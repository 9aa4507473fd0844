//! Cross-entropy of a linear layer's output, as of a language model's head, with all gradients in
//! the same call: [`linear`](super::linear), [`cross_entropy`] and
//! [`linear::backward`](super::linear::backward()), without logits of all tokens being there at a
//! time.
//!
//! Tokens are taken in chunks. Those of a chunk are multiplied by the weight; their logits, rounded
//! to the dtype of `x`, give losses and are overwritten by their gradient, of which `dx` and the
//! chunk's share of `dweight` and `dbias` are made. Shares are added in f32 and rounded once, in
//! the order of chunks; losses are added in one order too. So the same inputs give the same bits,
//! and where one chunk has all tokens those of the three operations. The gradient is that of `loss`
//! times `dloss`, which is known before: with it a training step needs no backward pass of the head.
//!
//! In f16 a logit's gradient below 3e-8 is lost, as is that of most entries of a vocabulary where
//! losses are averaged over many tokens: a loss scale, `dloss`, keeps it.
//!
//! Where ranks divide the vocabulary ([`Params::vocabulary`]), each has the logits of its rows of the
//! weight. They exchange four numbers for each token, of which every rank makes the same losses, and add
//! up `dx`; gradients of parameters are of a rank's rows.
//!
//! How many tokens a chunk has follows from shapes and the backend alone; see
//! [`Params::chunk_tokens`]. Without gradients nothing of their work is done.

mod divided;
mod plan;

use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::layout::Layout;
use crate::ops::check::Arg;
use crate::ops::chunked::{self, merged};
use crate::ops::cross_entropy;
use crate::ops::linear::Weights;
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parallel::Vocabulary;
use crate::problem::chunked::Layer;
use crate::problem::cross_entropy::Reduction;
use crate::problem::linear_cross_entropy::Problem;
use crate::tensor::{RawTensor, TensorMut, TensorRef, Workspace};

use divided::Divided;
use plan::Call;

const OP: &str = "linear_cross_entropy";

/// Arguments of [`forward`]. At least one of `loss`, `losses`, `lse` and the gradients is there.
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., hidden]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// `[vocab, hidden]`, and a bias `[vocab]` where there is one.
    pub weights: Weights<'a>,
    /// `[..]`, i32 or i64, any strides: each below `vocab`, or `ignore_index`. Where the host cannot
    /// look, on a device, another makes the token's loss and gradient NaN.
    pub targets: TensorRef<'a>,
    /// f32 `[1]`: the losses as one number.
    pub loss: Option<TensorMut<'a>>,
    /// f32, contiguous, the shape of `targets`: the loss of each token, not reduced.
    pub losses: Option<TensorMut<'a>>,
    /// As `losses`: the natural logarithm of each token's sum of exponentials.
    pub lse: Option<TensorMut<'a>>,
    /// Like `x`: overwritten by its gradient; rows strided.
    pub dx: Option<TensorMut<'a>>,
    /// `[vocab, hidden]`, the weight's dtype or f32 (any float dtype is taken); rows strided.
    pub dweight: Option<TensorMut<'a>>,
    /// `[vocab]`, the bias's dtype or f32 (any float dtype is taken), contiguous.
    pub dbias: Option<TensorMut<'a>>,
    /// Adds to what `dweight` and `dbias` hold, which must be f32 then. `dx` is overwritten always.
    pub accumulate: bool,
    /// f32 `[1]`, on the device: the gradient of `loss`, such as a loss scale; 1 if absent.
    pub dloss: Option<TensorRef<'a>>,
    /// f32 `[1]`, on the device: what a mean divides by in place of the number of tokens that are
    /// not ignored, as where a batch is accumulated in parts.
    pub denominator: Option<TensorRef<'a>>,
    /// How losses become one.
    pub reduction: Reduction,
    /// The target of tokens that count for nothing; see
    /// [`IGNORE_INDEX`](cross_entropy::IGNORE_INDEX).
    pub ignore_index: i64,
    /// The share of the target's probability that is spread over the vocabulary: 0 to 1.
    pub label_smoothing: f32,
    /// The weight of `lse²`; not negative.
    pub z_loss: f32,
    /// Bounds logits; 0 for none.
    pub softcap: f32,
    /// The most tokens whose logits are stored at a time. 0 for as many as 512 MiB have room for
    /// on a GPU and 128 MiB on the CPU, up to 8192, in chunks of about a size and of multiples of
    /// 128 tokens; for all where the sum of `dweight` in f32 that chunks need would take more
    /// memory than they save. (Where leading dimensions of `x`, `dx` and `targets` do not merge, a chunk has
    /// whole entries of the inner ones, or is a part of one.)
    pub chunk_tokens: usize,
    /// What a call needs is refused below [`workspace_size`].
    pub workspace: Workspace<'a>,
    /// The group that the rows of the weight are divided among, of which this rank gives its own: those of
    /// `weights`, and of `dweight` and `dbias`. Targets, the same on all ranks, are of the whole
    /// vocabulary, and so are `loss`, `losses` and `lse`, which have the same bits on all. `x` and `dx`
    /// are whole on all ranks; sequence parallel their first dimension has a rank's rows, and targets and
    /// losses are of all rows. `x`, `targets` and `dx` are contiguous. All ranks ask for the same outputs,
    /// and with the same `chunk_tokens`.
    pub vocabulary: Option<Vocabulary<'a>>,
}

impl<'a> Params<'a> {
    fn of_layer(&self) -> chunked::Fields<'_, 'a> {
        chunked::Fields {
            x: &self.x,
            weights: &self.weights,
            dx: &self.dx,
            dweight: &self.dweight,
            dbias: &self.dbias,
            accumulate: self.accumulate,
            chunk_tokens: self.chunk_tokens,
        }
    }

    fn of_loss(&self) -> cross_entropy::Fields<'_, 'a> {
        cross_entropy::Fields {
            targets: &self.targets,
            loss: &self.loss,
            losses: &self.losses,
            lse: &self.lse,
            dloss: &self.dloss,
            denominator: &self.denominator,
            reduction: self.reduction,
            ignore_index: self.ignore_index,
            label_smoothing: self.label_smoothing,
            z_loss: self.z_loss,
            softcap: self.softcap,
        }
    }
}

impl<'a> Params<'a> {
    /// What ranks do together, with the layer over the rows of all of them.
    fn divided(&self, layer: &mut Layer) -> Result<Option<Divided<'a>>> {
        let Some(vocabulary) = self.vocabulary else {
            return Ok(None);
        };
        vocabulary.check(OP, ("weight", layer.vocab()))?;
        Arg::new(OP, "targets", &self.targets.raw()).contiguous()?;
        for (name, tensor) in [("x", Some(layer.x)), ("dx", layer.dx)] {
            if let Some(tensor) = &tensor {
                Arg::new(OP, name, tensor).contiguous()?;
            }
        }
        let mut own = None;
        if vocabulary.parallel.sequence {
            own = Some((layer.x, layer.dx));
            let layout = vocabulary.parallel.whole(OP, "x", &layer.x)?;
            layer.x.layout = layout;
            layer.dx = layer.dx.map(|dx| RawTensor { layout, ..dx });
        }
        Ok(Some(Divided { vocabulary, own }))
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    type Problem = Call<'a>;

    fn problem(&self) -> Result<Call<'a>> {
        let mut layer = self.of_layer().layer(OP, self.vocabulary.is_some())?;
        let divided = self.divided(&mut layer)?;
        let of_loss = [&self.loss, &self.losses, &self.lse];
        if !layer.is_differentiated() && of_loss.iter().all(|t| t.is_none()) {
            let problem = "is absent (rank 0), and so are losses, lse and gradients: one is needed";
            return Err(Error::invalid(OP, "loss", problem));
        }
        let leading = layer.tokens();
        // One row for all tokens: logits are nowhere.
        let logits = RawTensor {
            ptr: std::ptr::null_mut(),
            dtype: layer.x.dtype,
            layout: Layout::contiguous(&[layer.vocab()])?,
        };
        let dlogits = layer.is_differentiated().then_some(logits);
        let mut loss = self.of_loss().problem(OP, (logits, dlogits), leading)?;
        let all = [
            Some(layer.x),
            layer.dx,
            Some(loss.targets),
            loss.losses,
            loss.lse,
        ];
        let [x, dx, targets, losses, lse] = merged(leading, all)?;
        (loss.losses, loss.lse) = (losses, lse);
        let layer = Layer {
            x: x.unwrap_or(layer.x),
            dx,
            ..layer
        };
        loss.targets = targets.unwrap_or(loss.targets);
        let problem = Problem { layer, loss };
        Ok(Call { problem, divided })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        self.of_layer().tensors(tensors);
        self.of_loss().tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.vocabulary.as_ref().map(|of| of.parallel.comm)
    }
}

operation::functions!();
