//! Linear layer: `y = x Wᵀ + bias`, with an optional fused addition of a residual.
//!
//! Products are accumulated in f32 whatever the dtypes; bias and residual are added to the f32 sum, and the only rounding to the
//! output's dtype is that of the result. The same inputs give the same bits with any number of threads.
//!
//! On CUDA, products of more than a few rows go to cuBLASLt where it is installed, `x` and the weights have one dtype, and a bias has
//! it too; f32 is computed in f32, without TF32. All others go to kernels of this library. Products of f32, and those of few columns
//! and many elements, are faster with a workspace, in which cuBLAS lets more of the device share their sums; [`workspace_size`] says how large a one is of use.

pub mod backward;

use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, with_last};
use crate::ops::operation::{self, Operation, Tensors};
use crate::problem::linear::{self as problem, Problem};
use crate::tensor::{InOut, RawTensor, TensorMut, TensorRef, Workspace};

pub use backward::backward;

const OP: &str = "linear";

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., in_features]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// What multiplies it.
    pub weights: Weights<'a>,
    /// `[.., out_features]`: leading dimensions and dtype of `x`; rows strided, contiguous in the last dimension.
    pub output: Output<'a>,
    /// With at least [`workspace_size`] bytes the product may be faster. A smaller one is not
    /// touched, and the product is computed without it.
    pub workspace: Workspace<'a>,
}

/// A layer's matrix and bias.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// `[out_features, in_features]`, any float dtype whatever that of `x`; rows strided, contiguous in the last dimension.
    pub weight: TensorRef<'a>,
    /// `[out_features]`, any float dtype, contiguous.
    pub bias: Option<TensorRef<'a>>,
}

/// Where a product goes.
#[derive(Debug)]
pub enum Output<'a> {
    /// Written.
    Write(TensorMut<'a>),
    /// Added to a residual: in place, the output accumulates; apart, the input is the residual and the output receives the sum.
    Add(InOut<'a>),
}

impl Output<'_> {
    /// None: for parameters whose output is not looked at, as those of a forward pass that a
    /// backward pass refers to.
    pub fn none() -> Output<'static> {
        // SAFETY: the tensor has no elements.
        let none = unsafe { TensorMut::from_raw(std::ptr::null_mut(), DType::F32, Layout::NONE) };
        Output::Write(none)
    }

    pub(crate) fn out(&self) -> RawTensor {
        match self {
            Output::Write(out) => out.raw(),
            Output::Add(pair) => pair.output(),
        }
    }

    pub(crate) fn residual(&self) -> Option<RawTensor> {
        match self {
            Output::Write(_) => None,
            Output::Add(pair) => Some(pair.input()),
        }
    }

    /// Checks shape, dtype and strides: `x` with `out_features` columns.
    pub(crate) fn check(&self, op: &'static str, x: Arg<'_>, shape: &[usize]) -> Result<()> {
        let out = self.out();
        let out = Arg::new(op, "out", &out)
            .dtype_of(x)?
            .shape(shape)?
            .last_contiguous()?
            .writable()?;
        if let Output::Add(pair) = self {
            let residual = pair.input();
            Arg::new(op, "residual", &residual)
                .dtype_of(out)?
                .shape_of(out)?
                .last_contiguous()?;
        }
        Ok(())
    }

    /// What it reads and writes.
    pub(crate) fn tensors(&self, tensors: &mut Tensors) {
        match self {
            Output::Write(out) => tensors.write("out", out),
            Output::Add(pair) => tensors.in_out(("residual", "out"), pair),
        }
    }
}

impl Weights<'_> {
    /// Validates for inputs of `in_features`; `names` are those of weight and bias.
    pub(crate) fn problem(
        &self,
        op: &'static str,
        names: (&'static str, &'static str),
        in_features: usize,
    ) -> Result<problem::Weights> {
        let weight = self.weight.raw();
        let arg = Arg::new(op, names.0, &weight)
            .rank(&[2])?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let out_features = weight.layout.dim(0);
        if weight.layout.dim(1) != in_features && out_features == in_features {
            let (shape, expected) = (weight.layout.shape(), [weight.layout.dim(1), out_features]);
            let problem = text!(
                "has shape {shape:?}, expected {expected:?} = [out_features, in_features]; looks transposed"
            );
            return Err(Error::invalid(op, names.0, problem));
        }
        arg.shape(&[out_features, in_features])?;
        let bias = self.bias.as_ref().map(TensorRef::raw);
        if let Some(bias) = &bias {
            Arg::new(op, names.1, bias)
                .dtype(DType::FLOATS)?
                .shape(&[out_features])?
                .last_contiguous()?;
        }
        Ok(problem::Weights { weight, bias })
    }

    /// What it reads; `names` are those of weight and bias.
    pub(crate) fn tensors(&self, names: (&'static str, &'static str), tensors: &mut Tensors) {
        tensors.read(names.0, &self.weight);
        tensors.read_optional(names.1, self.bias.as_ref());
    }
}

impl Operation for Params<'_> {
    const NAME: &'static str = OP;
    type Problem = Problem;

    fn problem(&self) -> Result<Problem> {
        let x = self.x.raw();
        let arg = Arg::new(OP, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        let in_features = x.layout.dim(x.layout.rank() - 1);
        let weights = self.weights.problem(OP, ("weight", "bias"), in_features)?;
        let mut room = [0; MAX_RANK];
        self.output
            .check(OP, arg, with_last(&x, weights.out_features(), &mut room))?;
        Ok(Problem {
            x,
            weights,
            residual: self.output.residual(),
            out: self.output.out(),
        })
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        self.weights.tensors(("weight", "bias"), tensors);
        self.output.tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }
}

operation::functions!();

/// What [`workspace_size`] answers for a layer without a bias whose tensors are contiguous: `tokens` times `rows` by `columns`, of the
/// dtypes of `x` and of the weights.
pub(crate) fn estimated_workspace_size(
    ctx: &Context,
    tokens: usize,
    (rows, columns): (usize, usize),
    (dtype, weight_dtype): (DType, DType),
) -> Result<usize> {
    let described = |dtype, shape: [usize; 2]| -> Result<TensorRef<'static>> {
        // SAFETY: queries do not look at data.
        Ok(unsafe { TensorRef::from_raw(std::ptr::null(), dtype, Layout::contiguous(&shape)?) })
    };
    let out = Layout::contiguous(&[tokens, rows])?;
    // SAFETY: as above.
    let out = unsafe { TensorMut::from_raw(std::ptr::null_mut(), dtype, out) };
    let params = Params {
        x: described(dtype, [tokens, columns])?,
        weights: Weights {
            weight: described(weight_dtype, [rows, columns])?,
            bias: None,
        },
        output: Output::Write(out),
        workspace: Workspace::none(),
    };
    workspace_size(ctx, &params)
}
