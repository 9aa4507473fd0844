//! Linear layers on the GPU: which kernel a product gets, and its launch.
//!
//! Products of few rows are bound by reading the weights, which the kernels of this library do once; those of more rows go to cuBLASLt
//! where there is one that serves their dtypes, and to kernels of this library otherwise. Weights in blocks are in `blocks`, those
//! of integers whose scales lie apart in `codes`, few rows by these in `few_codes`, those of 8-bit floats in `e4m3`; many rows by any of
//! these, on Hopper, in `wide`.

mod backward;
mod blocks;
mod codes;
mod decoded;
mod e4m3;
mod few;
mod few_codes;
mod part;
mod wide;

use contract::linear::Epilogue as EpilogueCode;

use super::cublaslt::Library;
use super::device::{Kernel, Resources};
use super::images::linear::Arguments;
use super::rows::Rows;
use super::tuning;
use super::{Cuda, Run};
use crate::alloc::push;
use crate::backend::{Implementation, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::linear::{Problem, Weights};
use crate::problem::rms_norm::OfInput;
use crate::problem::swiglu::Activation;
use crate::problem::{self, Plans};
use crate::tensor::{RawTensor, Scratch};
use part::Part;
pub(crate) use part::Sizes;

const OP: &str = "linear";

/// A kernel of this library's, and what tells it from others.
struct Form {
    kernel: Kernel<Arguments>,
    choices: Choices,
    /// Columns of a tile.
    columns: usize,
    /// Blocks that the device runs at once.
    resident: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choices {
    kind: u32,
    x: u32,
    weight: u32,
    /// Of a tile.
    rows: u32,
    /// Elements per access.
    width: u32,
}

/// The operation's kernels.
pub(crate) struct Kernels {
    forms: Vec<Form>,
    backward: backward::Kernels,
    blocks: blocks::Kernels,
    codes: codes::Kernels,
    e4m3: e4m3::Kernels,
    few: few::Kernels,
    few_codes: few_codes::Kernels,
    wide: wide::Kernels,
    library: Option<Library>,
    tuning: tuning::Linear,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(resources)
}

impl Kernels {
    fn new(resources: &Resources) -> Result<Kernels> {
        let mut forms = Vec::new();
        for kernel in resources.kernels::<Arguments>()? {
            let of_kernel = *kernel.choices;
            let choices = Choices {
                kind: of_kernel.kind,
                x: of_kernel.dtype,
                weight: of_kernel.weight,
                rows: of_kernel.rows,
                width: of_kernel.width,
            };
            push(
                OP,
                &mut forms,
                Form {
                    choices,
                    columns: of_kernel.columns as usize,
                    resident: resources.resident_blocks(&kernel)?.max(1),
                    kernel,
                },
            )?;
        }
        let _entered = resources.primary.enter(OP)?;
        Ok(Kernels {
            forms,
            backward: backward::kernels(resources)?,
            blocks: blocks::kernels(resources)?,
            codes: codes::kernels(resources)?,
            e4m3: e4m3::kernels(resources)?,
            few: few::kernels(resources)?,
            few_codes: few_codes::kernels(resources)?,
            wide: wide::kernels(resources)?,
            library: Library::open(OP, resources.tuning.linear)?,
            tuning: resources.tuning.linear,
        })
    }

    /// The kernel for so many columns and tiles of rows. Of several, those that share a tile among more planes are first: the first whose
    /// tiles all run at once keeps most of the device busy; the last reads ahead.
    fn form(&self, choices: Choices, columns: usize, row_tiles: usize) -> Result<&Form> {
        let fits = |form: &&Form| columns.div_ceil(form.columns) * row_tiles <= form.resident;
        // A few dozen entries at most.
        let mut forms = self.forms.iter().filter(|form| form.choices == choices);
        let found = forms.clone().find(fits).or(forms.next_back());
        found.ok_or_else(|| Error::Internal {
            op: OP,
            message: text!("no kernel with {choices:?}"),
        })
    }

    /// Gives back what the library holds, in the device's context.
    pub fn close(&mut self) {
        if let Some(mut library) = self.library.take() {
            library.close();
        }
    }

    /// Whether there is cuBLASLt.
    pub fn has_library(&self) -> bool {
        self.library.is_some()
    }

    /// Whether products of such sizes go to cuBLASLt, those with blocks once these are decoded.
    pub fn serves(
        &self,
        x: &RawTensor,
        weights: &Weights,
        sizes: Sizes,
        with_workspace: bool,
    ) -> bool {
        let weight = match weights.weight.dtype {
            dtype if is_decoded(dtype) && !decoded::are_few_rows(x, weights) => x.dtype,
            dtype => dtype,
        };
        let x = x.dtype;
        self.library.is_some()
            && x == weight
            && !sizes.are_few_rows(&self.tuning, x, with_workspace)
    }
}

/// `x Wᵀ + bias`, and what becomes of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product<'a> {
    pub op: &'static str,
    pub x: &'a RawTensor,
    /// Of `x` on its way, where one kernel does both: [`fuses`].
    pub norm: Option<&'a OfInput>,
    pub weights: &'a Weights,
    pub epilogue: Epilogue,
    pub out: &'a RawTensor,
}

/// What becomes of a product and its bias.
#[derive(Clone, Copy, Debug)]
pub(super) enum Epilogue {
    /// It is the output.
    Store,
    /// A residual is added.
    Add(RawTensor),
    /// An activated gate multiplies it.
    Gate(RawTensor, Activation),
    /// Activated, it multiplies another product of `x`, where one kernel does both: [`fuses`].
    Gated(Weights, Activation),
}

impl Epilogue {
    /// The other tensor, and what kernels are told to do with it.
    fn parts(&self) -> (Option<&RawTensor>, EpilogueCode) {
        let (gate, activation) = match self {
            Epilogue::Store => return (None, EpilogueCode::Store),
            Epilogue::Add(residual) => return (Some(residual), EpilogueCode::Add),
            Epilogue::Gate(gate, activation) => (Some(gate), activation),
            Epilogue::Gated(_, activation) => (None, activation),
        };
        let code = match activation {
            Activation::Silu => EpilogueCode::GateSilu,
            Activation::Gelu => EpilogueCode::GateGelu,
            Activation::GeluTanh => EpilogueCode::GateGeluTanh,
            Activation::ReluSquared => EpilogueCode::GateReluSquared,
        };
        (gate, code)
    }
}

/// Rows and columns of a tile.
const TILE: usize = contract::linear::TILE as usize;
/// Blocks of a grid in its second dimension.
const MAX_GRID_Y: usize = 65535;

/// A layer that waits to be queued.
pub(crate) struct Plan<'a> {
    cuda: &'a Cuda,
    problem: Problem,
}

impl Plans<Problem> for Cuda {
    type Plan<'a> = Plan<'a>;

    fn plan(&self, problem: Problem) -> Result<Plan<'_>> {
        let weight = ("weight", &problem.weights.weight);
        fits(OP, ("x", &problem.x), weight)?;
        Ok(Plan {
            cuda: self,
            problem,
        })
    }
}

impl problem::Plan for Plan<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    /// The decoded weight, where it is in blocks and rows are many; rows of codes, where it has codes; and what
    /// is normalised by itself.
    fn needed(&self) -> usize {
        let p = &self.problem;
        let before = match fuses(self.cuda, &Product::of(p)) {
            true => 0,
            false => normalised_bytes(&p.x, p.norm.as_ref()),
        };
        before + needed_scratch(&p.x, &p.weights)
    }

    /// Addresses may tell that a norm is by itself after all.
    fn useful(&self) -> Result<usize> {
        let p = &self.problem;
        let product = scratch_size(self.cuda, &Product::of(p))?;
        Ok(normalised_bytes(&p.x, p.norm.as_ref()) + product)
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let product = Product::of(p);
        let norm = p.norm.as_ref().filter(|_| !fuses(self.cuda, &product));
        let Some(norm) = norm else {
            return multiply(self.cuda, &product, scratch, stream);
        };
        let (x, scratch) = normalise(self.cuda, OP, (&p.x, norm), scratch, stream)?;
        let product = Product {
            x: &x,
            norm: None,
            ..product
        };
        multiply(self.cuda, &product, scratch, stream)
    }
}

/// Whether a product with its norm and what it gates is one launch. Without either there is nothing to ask.
pub(super) fn fuses(cuda: &Cuda, p: &Product<'_>) -> bool {
    match p.weights.weight.dtype {
        dtype if dtype.is_in_blocks() => blocks::fuses(cuda, p),
        dtype if dtype.is_quantized() => false,
        _ => few::serves(cuda, p),
    }
}

/// Bytes of workspace for an input that is normalised by itself.
pub(super) fn normalised_bytes(x: &RawTensor, norm: Option<&OfInput>) -> usize {
    norm.map_or(0, |_| OfInput::bytes(x))
}

/// Queues a norm of an input to the beginning of the scratch memory. Gives what is normalised, and the rest of
/// that.
pub(super) fn normalise(
    cuda: &Cuda,
    op: &'static str,
    (x, norm): (&RawTensor, &OfInput),
    scratch: Scratch,
    stream: Stream,
) -> Result<(RawTensor, Scratch)> {
    let norm = norm.alone(*x, scratch.ptr)?;
    norm.run(cuda, stream).map_err(|e| e.within(op))?;
    Ok((norm.out, scratch.behind(OfInput::bytes(x))))
}

/// Bytes of workspace without which a product is not computed.
pub(super) fn needed_scratch(x: &RawTensor, weights: &Weights) -> usize {
    match weights.weight.dtype {
        dtype if is_decoded(dtype) => decoded::bytes(x, weights),
        dtype if dtype.is_of_integers() => codes::rounded_bytes(x, weights),
        _ => 0,
    }
}

/// Whether a product that is given such a workspace reads its weights as they are.
pub(super) fn reads(cuda: &Cuda, p: &Product<'_>, scratch: Scratch) -> bool {
    !is_decoded(p.weights.weight.dtype) || wide::serves(cuda, p, scratch)
}

/// Whether weights of a dtype are decoded for many rows.
fn is_decoded(dtype: DType) -> bool {
    dtype.is_in_blocks() || dtype == DType::F8E4M3
}

/// Whether sizes are within what kernels count in 32 bits, and tiles of columns within a grid.
pub(super) fn fits(
    op: &'static str,
    (x_name, x): (&'static str, &RawTensor),
    (weight_name, weight): (&'static str, &RawTensor),
) -> Result<()> {
    let most = i32::MAX as usize;
    let sizes = [
        (x_name, "rows", x.layout.num_rows(), most),
        (weight_name, "rows", weight.layout.dim(0), MAX_GRID_Y * TILE),
        (weight_name, "columns", weight.layout.dim(1), most),
    ];
    for (name, what, size, most) in sizes {
        if size > most {
            let problem = text!("has {size} {what}, the CUDA backend takes {most}");
            return Err(Error::unsupported(op, name, problem));
        }
    }
    Ok(())
}

impl<'a> Product<'a> {
    fn of(p: &'a Problem) -> Product<'a> {
        Product {
            op: OP,
            x: &p.x,
            norm: p.norm.as_ref(),
            weights: &p.weights,
            epilogue: p.residual.map_or(Epilogue::Store, Epilogue::Add),
            out: &p.out,
        }
    }

    /// Whether the output has more bits than `x`: it is f32 then.
    fn is_wide(&self) -> bool {
        self.out.dtype != self.x.dtype
    }

    fn rows(&self) -> Rows<3> {
        let (other, _) = self.epilogue.parts();
        let other = other.unwrap_or(self.out);
        Rows::new([&self.x.layout, &self.out.layout, &other.layout])
    }
}

/// The workspace with which a product is computed the fastest, in bytes. Data pointers are not looked at.
pub(super) fn scratch_size(cuda: &Cuda, p: &Product<'_>) -> Result<usize> {
    let dtype = p.weights.weight.dtype;
    if dtype.is_of_integers() {
        return Ok(codes::rounded_bytes(p.x, p.weights) + wide::scratch_size(cuda, p));
    }
    if is_decoded(dtype) {
        return Ok(decoded::scratch_size(cuda, p)?.max(wide::scratch_size(cuda, p)));
    }
    let (Some(library), false) = (&cuda.linear.library, p.out.layout.is_empty()) else {
        return Ok(0);
    };
    // The matrices differ in their addresses only.
    let Some(matrix) = p.rows().matrices().next() else {
        return Ok(0);
    };
    let part = Part::new(p, &matrix);
    let product = part
        .for_library(p)
        .filter(|_| !part.has_few_rows(cuda, p, true));
    let Some(product) = product.filter(|p| library.has_use_for_workspace(p)) else {
        return Ok(0);
    };
    let primary = &cuda.resources.primary;
    let _entered = primary.enter(p.op)?;
    let _relaxed = primary.driver.relax_capture(p.op)?;
    library.workspace_size(p.op, &product.aligned())
}

/// Queues a product whose tensors have been checked. `scratch` has what is needed, and beside it may be too small to be of use.
pub(super) fn multiply(
    cuda: &Cuda,
    p: &Product<'_>,
    scratch: Scratch,
    stream: Stream,
) -> Result<()> {
    if p.out.layout.is_empty() {
        return Ok(());
    }
    match p.weights.weight.dtype {
        dtype if dtype.is_in_blocks() && few::serves(cuda, p) => blocks::multiply(cuda, p, stream),
        dtype if is_decoded(dtype) && wide::multiply(cuda, p, scratch, stream)? => Ok(()),
        DType::F8E4M3 => e4m3::multiply(cuda, p, scratch, stream),
        dtype if dtype.is_in_blocks() && blocks::are_few_rows(p.x, p.weights) => {
            blocks::multiply(cuda, p, stream)
        }
        dtype if dtype.is_in_blocks() => decoded::multiply(cuda, p, scratch, stream),
        dtype if dtype.is_of_integers() => codes::multiply(cuda, p, scratch, stream),
        _ => multiply_floats(cuda, p, scratch, stream),
    }
}

fn multiply_floats(cuda: &Cuda, p: &Product<'_>, scratch: Scratch, stream: Stream) -> Result<()> {
    for matrix in p.rows().matrices() {
        let part = Part::new(p, &matrix);
        if few::multiply(cuda, p, &matrix, stream)? {
            continue;
        }
        if !part.through_library(cuda, p, scratch, stream)? {
            part.launch(cuda, p, stream)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::Context;
    use crate::layout::Layout;
    use crate::memory::Buffer;
    use crate::tensor::Activations;
    use half::{bf16, f16};

    fn tensor(ctx: &Context, dtype: DType, shape: &[usize], values: &[f32]) -> (Buffer, RawTensor) {
        let bytes: Vec<u8> = match dtype {
            DType::F16 => values
                .iter()
                .flat_map(|v| f16::from_f32(*v).to_ne_bytes())
                .collect(),
            DType::Bf16 => values
                .iter()
                .flat_map(|v| bf16::from_f32(*v).to_ne_bytes())
                .collect(),
            _ => values.iter().flat_map(|v| v.to_ne_bytes()).collect(),
        };
        let words: Vec<i32> = bytes
            .chunks(4)
            .map(|chunk| {
                let mut word = [0; 4];
                word[..chunk.len()].copy_from_slice(chunk);
                i32::from_ne_bytes(word)
            })
            .collect();
        let buffer = Buffer::from_slice(ctx, &words).unwrap();
        let raw = RawTensor {
            ptr: buffer.as_ptr(),
            dtype,
            layout: Layout::contiguous(shape).unwrap(),
        };
        (buffer, raw)
    }

    /// With and without cuBLASLt the same products come out, to the bit where sums are exact.
    #[test]
    fn kernels_serve_where_there_is_no_library() {
        let Some(ctx) = crate::cuda::test_context() else {
            return;
        };
        let with = Cuda::new(OP, 0).unwrap();
        let without = Cuda::without_library(OP, 0).unwrap();
        println!("cuBLASLt: {}", with.linear.library.is_some());
        let small = |seed: usize, i: usize| ((seed + i) * 2_654_435_761 % 7919 % 7) as f32 - 3.0;
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            for (rows, k, n) in [
                (17, 8, 40),
                (40, 64, 1),
                (130, 72, 200),
                (65, 33, 31),
                (700, 512, 96),
            ] {
                let values = |seed, len| (0..len).map(|i| small(seed, i)).collect::<Vec<f32>>();
                let (_x, x) = tensor(&ctx, dtype, &[rows, k], &values(1, rows * k));
                let (_w, weight) = tensor(&ctx, dtype, &[n, k], &values(2, n * k));
                let (_b, bias) = tensor(&ctx, dtype, &[n], &values(3, n));
                let (_r, residual) = tensor(&ctx, dtype, &[rows, n], &values(4, rows * n));
                let results = [&with, &without].map(|cuda| {
                    let (buffer, out) = tensor(&ctx, dtype, &[rows, n], &vec![f32::NAN; rows * n]);
                    let problem = Problem {
                        x,
                        norm: None,
                        weights: Weights {
                            weight,
                            scales: None,
                            activations: Activations::Sixteen,
                            constant: false,
                            bias: Some(bias),
                        },
                        residual: Some(residual),
                        out,
                    };
                    let plan = cuda.plan(problem).unwrap();
                    problem::Plan::launch(&plan, Scratch::NONE, Stream::DEFAULT).unwrap();
                    ctx.synchronize(Stream::DEFAULT).unwrap();
                    let len = buffer.size() / 4;
                    buffer.to_vec::<i32>(0, len, Stream::DEFAULT).unwrap()
                });
                assert!(results[0] == results[1], "{dtype} {rows} {k} {n}");
            }
        }
    }
}
