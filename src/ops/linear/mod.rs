//! Linear layer: `y = x Wᵀ + bias`, with an optional fused addition of a residual.
//!
//! `x` may pass an RMSNorm before ([`Params::x_norm`]). That gives the bits of [`rms_norm`](super::rms_norm) and the product one after
//! the other, and needs a workspace for what is normalised, but for up to eight rows on a Hopper GPU: there every block of the product
//! normalises `x` itself, of 16 bits with a million weights in the same dtype, or with any in blocks, of up to 32,768 aligned elements.
//! Several rows must fit a multiprocessor's memory beside the weight: by weights of 16 bits two of 22,208 elements do, four of 10,560 and
//! eight of 4,736. [`workspace_size`] says what a call needs.
//!
//! Products are accumulated in f32 whatever the dtypes; bias and residual are added to the f32 sum, and the only rounding to the
//! output's dtype is that of the result. The output, and with it the residual, may be f32 whatever `x` is: logits that are not rounded,
//! a residual stream of more bits, partial sums that ranks add up in f32. The same inputs give the same bits with any number of threads.
//!
//! A weight may be in blocks, as GGUF has them. A block's weights are `scale * code + offset`; scales of a format with
//! scales of blocks of scales are multiplied in f32, exactly. Products of it are of one of two kinds. Where the weight asks for it
//! ([`TensorRef::with_float_activations`]), weights are decoded to f32 and all is as for weights in f32. Else each 32 neighbours of a
//! row of `x` may be rounded to 16 bits first, `x ≈ s * code` with `s = max |x| / 32639` in f32, and the codes' products are summed
//! exactly; an element of `x` is off by `s / 2` at most. A weight may allow 8 bits ([`TensorRef::with_int8_activations`]), with
//! `s = max |x| / 127`, which products of more than eight rows by AVX-512 and all by AVX2 then are of. Which rows that is done for depends on the
//! processor and on the number of rows, as it is for speed alone. Elements of `x` that are not finite give results that are not.
//!
//! A weight may also be of codes of 8 or 2 bits with scales that lie apart ([`TensorRef::with_scales`]). Then each row of `x`
//! is rounded to 8 bits as [`quantize`](crate::ops::quantize) does by its greatest magnitude, codes are multiplied and summed as integers,
//! exactly, and the sum is rounded to f32 and multiplied by the f32 product of both scales: the same
//! bits on every backend, but for what a GPU's activation rounds. This is how BitNet b1.58's layers are defined.
//!
//! And it may be of 8-bit floats, f8e4m3, with such scales. Then `x` is left as it is, codes are widened exactly, and their f32
//! sums are scaled: what the weights lost when they were rounded is all that is lost. On CUDA that is so for up to 64 rows, and on
//! Hopper for up to 3,072 of an `x` of 16 bits, where rows of both are whole lines of 16 bytes; of others the weights are scaled
//! first and rounded to the dtype of `x`, as blocks are.
//!
//! On CUDA products of up to 24 rows read blocks as they are, and round `x` in the same way: as the two digits of base 256 that a
//! code is, which tensor cores multiply by the weights' codes; neighbours of which none exceeds 1e-33 count as zeros. Of `x` in 16 bits
//! that is done for up to 8 rows; on Hopper for up to 4, where rows of the weight are whole lines of 16 bytes, of at most 16,384
//! elements, and not more than 6,144 (in Q8_0 and Q6_K any number). From there to 32 rows, and for fewer whose weight asks for float
//! activations, nothing is rounded: tensor cores multiply codes by `x` as it is, and sums of the neighbours of a scale are scaled in
//! f32. On Hopper 9 to 3,072 rows of 16 bits (of Q6_K 17, with float activations 33) multiply codes and scales that are rounded to the dtype
//! of `x`, and their products too, where rows of both are whole lines of 16 bytes: two roundings where a decoded weight has one. All others
//! have the weight decoded to the dtype of `x`, to which it is rounded, in a workspace that they cannot do without: the whole of it,
//! or parts of 128 MiB.
//!
//! On CUDA, products of more than a few rows go to cuBLASLt where it is installed, `x` and the weights have one dtype, and a bias has
//! that of the output; f32 is computed in f32, without TF32. All others go to kernels of this library. Products of f32, and those of few columns
//! and many elements, are faster with a workspace, in which cuBLAS lets more of the device share their sums; [`workspace_size`] says how large a one is of use.

pub mod backward;

use crate::comm::Comm;
use crate::context::Context;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::{Layout, MAX_RANK};
use crate::ops::check::{Arg, with_last};
use crate::ops::operation::{self, Operation, Tensors};
use crate::ops::parallel::{OF_X, Parallel, Partition};
use crate::ops::parts::{OneOr, Parts};
use crate::ops::rms_norm::Norm;
use crate::problem::linear::{self as problem, Problem};
use crate::tensor::{Activations, InOut, RawTensor, Scales, TensorMut, TensorRef, Workspace};

pub use backward::backward;

const OP: &str = "linear";
/// What the arguments of the input's norm are called.
const OF_NORM: [&str; 3] = ["x_norm", "norm_weight_offset", "norm_epsilon"];

/// Arguments of [`forward`].
#[derive(Debug)]
pub struct Params<'a> {
    /// `[.., in_features]`, f32, f16 or bf16; rows strided, contiguous in the last dimension.
    pub x: TensorRef<'a>,
    /// An RMSNorm that `x` passes before it is multiplied, for a forward pass on one rank: the bits of [`rms_norm`](crate::ops::rms_norm)
    /// and then this product. `None` for no norm.
    pub x_norm: Option<Norm<'a>>,
    /// What multiplies it.
    pub weights: Weights<'a>,
    /// `[.., out_features]`: leading dimensions of `x`; its dtype or f32; rows strided, contiguous in the last dimension.
    pub output: Output<'a>,
    /// With at least [`workspace_size`] bytes the product may be faster. A smaller one is not
    /// touched, and the product is computed without it, unless a weight in blocks is decoded. With
    /// `parallel` all of it is needed.
    pub workspace: Workspace<'a>,
    /// The group that the weight is divided among; `None` where a rank has all of it. `weight` and, of a
    /// weight divided by rows, `bias` are this rank's part.
    ///
    /// Divided by rows, `output` has this rank's columns, and `x` is the same on all ranks; sequence
    /// parallel, it is gathered from the rows of each. Divided by columns, `x` has this rank's columns, and
    /// the products of all ranks are added up: `output` is contiguous and gets the sum on every rank;
    /// sequence parallel, its rows of it. `bias` and residual are the same on all ranks (the residual a
    /// rank's rows, where `output` is), and are added once.
    pub parallel: Option<Parallel<'a>>,
}

/// A layer's matrix and bias.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// `[out_features, in_features]`, any float dtype whatever that of `x`, one of [`DType::BLOCKS`] or of
    /// [`DType::QUANTIZED`]; rows strided, contiguous in the last dimension. Rows of blocks are whole blocks and begin at multiples of
    /// them, at any address; rows of ternary codes are multiples of 128.
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
        Arg::new(op, "out", &self.out()).dtype_of(x)?;
        self.check_but_dtype(op, shape)
    }

    /// Checks all but the dtype of `out`.
    fn check_but_dtype(&self, op: &'static str, shape: &[usize]) -> Result<()> {
        let out = self.out();
        let out = Arg::new(op, "out", &out)
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

    /// Whether it is the memory that `x` has: a block that has read all of a normalised `x` before it writes may take its place.
    pub(crate) fn is_in_place_of(&self, x: &TensorRef<'_>) -> bool {
        self.out().same_as(&x.raw())
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
            .dtype(DType::MATRICES)?
            .rows_in_blocks()?;
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
        let scales = self.check_scales(op, names.0)?;
        Ok(problem::Weights {
            weight,
            scales,
            activations: self.weight.activations(),
            constant: self.weight.is_constant(),
            bias,
        })
    }

    /// Refuses what products of codes do not have; `name` is that of the weight.
    fn check_scales(&self, op: &'static str, name: &'static str) -> Result<Option<Scales>> {
        let (weight, scales) = (self.weight.raw(), self.weight.scales());
        let (dtype, shape) = (weight.dtype, weight.layout.shape());
        if !dtype.is_quantized() {
            if scales.is_some() {
                let problem = text!("has scales, which {dtype} has not");
                return Err(Error::invalid(op, name, problem));
            }
            return Ok(None);
        }
        if let Some(most) = longest_row(dtype) {
            if shape[1] > most {
                let problem = text!(
                    "has rows of {} elements, above the maximum {most} of {dtype}",
                    shape[1]
                );
                return Err(Error::invalid(op, name, problem));
            }
            if self.weight.activations() == Activations::Float {
                let problem =
                    text!("has dtype {dtype} and float_activations, which it has no products of");
                return Err(Error::unsupported(op, name, problem));
            }
        }
        if let Some(scales) = scales
            && (scales.len == 0 || !shape[0].is_multiple_of(scales.len))
        {
            let problem = text!(
                "has {} scales, their number must divide its {} rows",
                scales.len,
                shape[0]
            );
            return Err(Error::invalid(op, name, problem));
        }
        Ok(scales)
    }

    /// Refuses blocks and codes, for what gradients follow; `name` is that of the weight.
    pub(crate) fn check_floats(&self, op: &'static str, name: &'static str) -> Result<()> {
        Arg::new(op, name, &self.weight.raw()).dtype(DType::FLOATS)?;
        Ok(())
    }

    /// What it reads; `names` are those of weight and bias.
    pub(crate) fn tensors(&self, names: (&'static str, &'static str), tensors: &mut Tensors) {
        tensors.read(names.0, &self.weight);
        if let Some(scales) = self.weight.scales() {
            tensors.scales(scales);
        }
        tensors.read_optional(names.1, self.bias.as_ref());
    }
}

/// Elements of a row of integers whose products with codes of 8 bits fit 32; none of other dtypes.
fn longest_row(dtype: DType) -> Option<usize> {
    match dtype {
        DType::I8 => Some(i32::MAX as usize / (127 * 128)),
        // Of 2 at most.
        DType::Ternary => Some(i32::MAX as usize / (127 * 2)),
        _ => None,
    }
}

impl<'a> Params<'a> {
    /// The product of an input that is checked, with the weights that there are.
    fn product(&self, x: RawTensor) -> Result<Problem> {
        let in_features = x.layout.dim(x.layout.rank() - 1);
        let weights = self.weights.problem(OP, ("weight", "bias"), in_features)?;
        let mut room = [0; MAX_RANK];
        let mut shape = with_last(&x, weights.out_features(), &mut room);
        let mut own = [0; MAX_RANK];
        if let Some(parallel) = &self.parallel
            && parallel.partition == Partition::Row
        {
            if parallel.sequence {
                Arg::new(OP, "x", &x).min_rank(2)?;
                shape = parallel.own_shape(OP, ("x", &x), weights.out_features(), &mut own)?;
            }
            Arg::new(OP, "out", &self.output.out()).contiguous()?;
        }
        let out = self.output.out();
        Arg::new(OP, "out", &out).dtype_of_or_f32(Arg::new(OP, "x", &x))?;
        self.output.check_but_dtype(OP, shape)?;
        let norm = match &self.x_norm {
            None => None,
            Some(_) if self.parallel.is_some() => {
                let problem = "is there together with parallel, where x is to be normalised before";
                return Err(Error::unsupported(OP, "x_norm", problem));
            }
            Some(norm) => Some(norm.problem(OP, OF_NORM, &x)?),
        };
        Ok(Problem {
            x,
            norm,
            weights,
            residual: self.output.residual(),
            out,
        })
    }

    /// The input, checked.
    fn input(&self) -> Result<RawTensor> {
        let x = self.x.raw();
        Arg::new(OP, "x", &x)
            .min_rank(1)?
            .dtype(DType::FLOATS)?
            .last_contiguous()?;
        Ok(x)
    }

    /// The problem of a layer that is not divided.
    pub(crate) fn alone(&self) -> Result<Problem> {
        self.product(self.input()?)
    }
}

impl<'a> Operation for Params<'a> {
    const NAME: &'static str = OP;
    /// Where ranks divide the layer: products of up to three ranges of rows, more in chunks.
    type Problem = OneOr<'a, Problem, 3>;

    fn problem(&self) -> Result<Self::Problem> {
        let Some(parallel) = &self.parallel else {
            return Ok(OneOr::One(self.alone()?));
        };
        parallel.check(OP)?;
        let mut x = self.input()?;
        let mut parts = Parts::new(OP, &self.workspace).exactly();
        if parallel.partition == Partition::Row {
            let chunks = parallel.push_product(OP, self.product(x)?, &[], &mut parts)?;
            parallel.push_join(OP, chunks, &mut parts)?;
            return Ok(OneOr::Parts(parts));
        }
        if parallel.sequence {
            x = parallel.push_gather(OP, ("x", OF_X), x, &mut parts)?;
        }
        parts.push(Ok(self.product(x)?), &[])?;
        Ok(OneOr::Parts(parts))
    }

    fn tensors(&self, tensors: &mut Tensors) {
        tensors.read("x", &self.x);
        let norm = self.x_norm.as_ref();
        tensors.read_optional("x_norm", norm.map(|norm| &norm.weight));
        self.weights.tensors(("weight", "bias"), tensors);
        self.output.tensors(tensors);
    }

    fn workspace(&self) -> Option<&Workspace<'_>> {
        Some(&self.workspace)
    }

    fn comm(&self) -> Option<&Comm> {
        self.parallel.as_ref().map(|parallel| parallel.comm)
    }
}

operation::functions!();

/// What [`workspace_size`] answers for a layer without a bias whose tensors are contiguous: `tokens` times `rows` by `columns`, of the
/// dtypes of `x`, of the weights and of the output. With a group these are a rank's rows or columns.
pub(crate) fn estimated_workspace_size(
    ctx: &Context,
    tokens: usize,
    (rows, columns): (usize, usize),
    (dtype, weight_dtype, out_dtype): (DType, DType, DType),
    parallel: Option<Parallel<'_>>,
) -> Result<usize> {
    let described = |dtype, shape: [usize; 2]| -> Result<TensorRef<'static>> {
        // SAFETY: queries do not look at data.
        Ok(unsafe { TensorRef::from_raw(std::ptr::null(), dtype, Layout::contiguous(&shape)?) })
    };
    let out = Layout::contiguous(&[tokens, rows])?;
    // SAFETY: as above.
    let out = unsafe { TensorMut::from_raw(std::ptr::null_mut(), out_dtype, out) };
    let params = Params {
        x_norm: None,
        parallel,
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
