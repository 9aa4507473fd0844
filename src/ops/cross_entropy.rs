//! Cross-entropy of logits, with its gradient in the same call.
//!
//! For every token with logits `z` of length `vocab` and target `t`, which is not ignored:
//!
//! ```text
//! s       = softcap tanh(z / softcap)                     (s = z without a softcap)
//! lse     = ln(sum(exp(s)))
//! loss    = lse - (1 - e) s[t] - e mean(s) + z_loss lse²   (e = label_smoothing)
//! dlogits = g (exp(s - lse) (1 + 2 z_loss lse) - (1 - e) [i = t] - e / vocab) (1 - (s / softcap)²)
//! ```
//!
//! `g` is `dloss`, over the denominator if the losses are averaged. Label smoothing is that of
//! Szegedy et al. (2015, arXiv:1512.00567), z-loss that of PaLM (arXiv:2204.02311). Arithmetic is
//! f32, and the losses are added in one order: the same inputs give the same bits.
//!
//! Tokens whose target is `ignore_index` count for nothing: their loss, lse and gradient are zero.
//! Without any other the mean is zero.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::cross_entropy::Problem;
pub use crate::problem::cross_entropy::Reduction;
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef, Workspace};

const OP: &str = "cross_entropy";

/// The `ignore_index` of PyTorch.
pub const IGNORE_INDEX: i64 = -100;

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., vocab]`, f32, f16 or bf16, strided, contiguous in the last dimension; and whether their
    /// gradient is wanted.
    pub logits: Logits<'a>,
    /// `[..]`, i32 or i64, any strides: each below `vocab`, or `ignore_index`. Where the host cannot
    /// look, on a device, another makes the token's loss and gradient NaN.
    pub targets: TensorRef<'a>,
    /// f32 `[1]`: the losses as one number.
    pub loss: Option<TensorMut<'a>>,
    /// f32, contiguous, the shape of `targets`: the loss of each token, not reduced.
    pub losses: Option<TensorMut<'a>>,
    /// As `losses`: the natural logarithm of each token's sum of exponentials.
    pub lse: Option<TensorMut<'a>>,
    /// f32 `[1]`, on the device: the gradient of `loss`, such as a loss scale; 1 if absent.
    pub dloss: Option<TensorRef<'a>>,
    /// f32 `[1]`, on the device: what a mean divides by in place of the number of tokens that are
    /// not ignored, as where a batch is accumulated in parts.
    pub denominator: Option<TensorRef<'a>>,
    /// How losses become one.
    pub reduction: Reduction,
    /// The target of tokens that count for nothing; see [`IGNORE_INDEX`].
    pub ignore_index: i64,
    /// The share of the target's probability that is spread over the vocabulary: 0 to 1.
    pub label_smoothing: f32,
    /// The weight of `lse²`; not negative.
    pub z_loss: f32,
    /// Bounds logits; 0 for none.
    pub softcap: f32,
    /// [`workspace_size`] bytes.
    pub workspace: Workspace<'a>,
}

/// Logits, and where their gradient goes.
#[derive(Debug)]
pub enum Logits<'a> {
    /// No gradient is wanted.
    Read(TensorRef<'a>),
    /// The gradient, of the same shape and dtype, which may take the logits' place.
    Differentiate(InOut<'a>),
}

impl Logits<'_> {
    fn input(&self) -> RawTensor {
        match self {
            Logits::Read(logits) => logits.raw(),
            Logits::Differentiate(pair) => pair.input(),
        }
    }
}

/// What the parameters of a loss have beside logits.
pub(crate) struct Fields<'p, 'a> {
    pub targets: &'p TensorRef<'a>,
    pub loss: &'p Option<TensorMut<'a>>,
    pub losses: &'p Option<TensorMut<'a>>,
    pub lse: &'p Option<TensorMut<'a>>,
    pub dloss: &'p Option<TensorRef<'a>>,
    pub denominator: &'p Option<TensorRef<'a>>,
    pub reduction: Reduction,
    pub ignore_index: i64,
    pub label_smoothing: f32,
    pub z_loss: f32,
    pub softcap: f32,
}

impl Fields<'_, '_> {
    /// Checks them, for logits with these leading dimensions, which have been checked.
    pub fn problem(
        &self,
        op: &'static str,
        (logits, dlogits): (RawTensor, Option<RawTensor>),
        leading: &[usize],
    ) -> Result<Problem> {
        let targets = self.targets.raw();
        Arg::new(op, "targets", &targets)
            .dtype(&[DType::I32, DType::I64])?
            .shape(leading)?;
        if self.reduction != Reduction::Mean && self.denominator.is_some() {
            let problem = "is there, without a mean it has no use";
            return Err(Error::invalid(op, "denominator", problem));
        }
        for (name, value, most) in [
            ("label_smoothing", self.label_smoothing, 1.0),
            ("z_loss", self.z_loss, f32::MAX),
            ("softcap", self.softcap, f32::MAX),
        ] {
            if !(0.0..=most).contains(&check::finite(op, name, value)?) {
                let problem = match most {
                    1.0 => text!("is {value}, allowed: 0 to 1"),
                    _ => text!("is {value}, it must not be negative"),
                };
                return Err(Error::invalid(op, name, problem));
            }
        }
        let written = |name, tensor: &Option<TensorMut<'_>>, shape: &[usize]| {
            let raw = tensor.as_ref().map(TensorMut::raw);
            raw.as_ref().map_or(Ok(()), |raw| {
                let arg = Arg::new(op, name, raw).dtype(&[DType::F32])?.shape(shape)?;
                arg.contiguous().map(drop)
            })?;
            Ok::<_, Error>(raw)
        };
        let number = |name, tensor: &Option<TensorRef<'_>>| {
            let raw = tensor.as_ref().map(TensorRef::raw);
            raw.as_ref().map_or(Ok(()), |raw| {
                let arg = Arg::new(op, name, raw).dtype(&[DType::F32])?;
                arg.shape(&[1]).map(drop)
            })?;
            Ok::<_, Error>(raw)
        };
        Ok(Problem {
            logits,
            targets,
            loss: written("loss", self.loss, &[1])?,
            losses: written("losses", self.losses, leading)?,
            lse: written("lse", self.lse, leading)?,
            dlogits,
            dloss: number("dloss", self.dloss)?,
            denominator: number("denominator", self.denominator)?,
            reduction: self.reduction,
            ignore_index: self.ignore_index,
            label_smoothing: self.label_smoothing,
            z_loss: self.z_loss,
            softcap: self.softcap,
        })
    }

    /// What it reads and writes.
    pub fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("targets", self.targets);
        tensors.read_optional("dloss", self.dloss.as_ref());
        tensors.read_optional("denominator", self.denominator.as_ref());
        tensors.write_optional("loss", self.loss.as_ref());
        tensors.write_optional("losses", self.losses.as_ref());
        tensors.write_optional("lse", self.lse.as_ref());
    }
}

impl<'a> Params<'a> {
    fn fields(&self) -> Fields<'_, 'a> {
        Fields {
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

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let logits = self.logits.input();
        Arg::new(OP, "logits", &logits)
            .min_rank(2)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let dlogits = match &self.logits {
            Logits::Read(_) => None,
            Logits::Differentiate(pair) => {
                check::in_out(OP, ("logits", "dlogits"), pair)?;
                Some(pair.output())
            }
        };
        let (vocab, leading) = match logits.layout.shape() {
            [leading @ .., vocab] => (*vocab, leading),
            [] => (0, [].as_slice()),
        };
        if vocab == 0 {
            let problem = "has no columns, there is no target among them";
            return Err(Error::invalid(OP, "logits", problem));
        }
        self.fields().problem(OP, (logits, dlogits), leading)
    }

    fn tensors(&self, tensors: &mut Tensors) {
        match &self.logits {
            Logits::Read(logits) => tensors.read("logits", logits),
            Logits::Differentiate(pair) => tensors.in_out(("logits", "dlogits"), pair),
        }
        self.fields().tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!();
