//! Linear layers on the GPU: which kernel a product gets, and its launch.
//!
//! Products of few rows are bound by reading the weights, which the kernels of this library do once; those of more rows go to cuBLASLt
//! where there is one that serves their dtypes, and to kernels of this library otherwise.

use super::cublaslt::{self, Library};
use super::device::{Kernel, Resources};
use super::images::linear::Arguments;
use super::rows::{Matrix, Rows};
use super::{Cuda, VECTOR};
use crate::context::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::linear::{Problem, WeightsProblem};
use crate::ops::swiglu::Activation;
use crate::tensor::RawTensor;

const OP: &str = "linear";

/// Rows up to which kernels of this library are faster than cuBLASLt without a workspace, for as many columns: timed on an H200.
const FEW_ROWS: [(usize, usize); 2] = [(8, usize::MAX), (16, 2048)];
/// The same for f32, whose products cuBLASLt gives to few multiprocessors.
const FEW_ROWS_F32: [(usize, usize); 3] = [(32, usize::MAX), (64, 8192), (128, 2048)];

/// Whether kernels of this library are the fastest, as far as they depend on sizes.
fn has_few_rows(x: DType, rows: usize, columns: usize) -> bool {
    let few: &[_] = match x {
        DType::F32 => &FEW_ROWS_F32,
        _ => &FEW_ROWS,
    };
    few.iter()
        .any(|(few, most)| rows <= *few && columns <= *most)
}

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
    library: Option<Library>,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        let mut forms = Vec::new();
        for kernel in resources.kernels::<Arguments>()? {
            let choice = |name| kernel.info.choice(name);
            let choices = Choices {
                kind: choice("kind"),
                x: choice("dtype"),
                weight: choice("weight"),
                rows: choice("rows"),
                width: choice("width"),
            };
            forms.push(Form {
                choices,
                columns: choice("columns").max(1) as usize,
                resident: resources.resident_blocks(&kernel)?.max(1),
                kernel,
            });
        }
        let _entered = resources.primary.enter(OP)?;
        Ok(Kernels {
            forms,
            library: Library::open(),
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
            message: format!("no kernel with {choices:?}"),
        })
    }

    /// Gives back what the library holds, in the device's context.
    pub fn close(&mut self) {
        if let Some(mut library) = self.library.take() {
            library.close();
        }
    }

    /// Whether products of such sizes go to cuBLASLt.
    pub fn serves(&self, (x, weight): (DType, DType), rows: usize, columns: usize) -> bool {
        self.library.is_some() && x == weight && !has_few_rows(x, rows, columns)
    }
}

/// `x Wᵀ + bias`, and what becomes of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product<'a> {
    pub op: &'static str,
    pub x: &'a RawTensor,
    pub weights: &'a WeightsProblem,
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
}

impl Epilogue {
    /// The other tensor, and the number by which kernels know what to do with it.
    fn parts(&self) -> (Option<&RawTensor>, u32) {
        match self {
            Epilogue::Store => (None, 0),
            Epilogue::Add(residual) => (Some(residual), 1),
            Epilogue::Gate(gate, activation) => (Some(gate), 2 + *activation as u32),
        }
    }
}

/// A kernel of this library's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Rows = 0,
    RowsSimt = 1,
    Tiles = 2,
    TilesSimt = 3,
}

/// Rows and columns of a tile.
const TILE: usize = 64;
/// Blocks of a grid in its second dimension.
const MAX_GRID_Y: usize = 65535;

/// Whether there is a kernel for the problem.
pub(crate) fn supported(p: &Problem) -> Result<()> {
    fits(OP, ("x", &p.x), ("weight", &p.weights.weight))
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
            let problem = format!("has {size} {what}, the CUDA backend takes {most}");
            return Err(Error::unsupported(op, name, problem));
        }
    }
    Ok(())
}

pub(crate) fn forward(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    let product = Product {
        op: OP,
        x: &p.x,
        weights: &p.weights,
        epilogue: p.residual.map_or(Epilogue::Store, Epilogue::Add),
        out: &p.out,
    };
    multiply(cuda, &product, stream)
}

/// Queues a product whose tensors have been checked.
pub(super) fn multiply(cuda: &Cuda, p: &Product<'_>, stream: Stream) -> Result<()> {
    if p.out.layout.is_empty() {
        return Ok(());
    }
    let (other, _) = p.epilogue.parts();
    let other = other.unwrap_or(p.out);
    let rows = Rows::new([&p.x.layout, &p.out.layout, &other.layout]);
    for matrix in rows.matrices() {
        let part = Part::new(p, &matrix);
        if let Some(product) = part.for_library(p)
            && let Some(library) = &cuda.linear.library
        {
            let primary = &cuda.resources.primary;
            let _entered = primary.enter(p.op)?;
            let _relaxed = primary.driver.relax_capture(p.op)?;
            // SAFETY: the problem was checked: its tensors have the rows that the part describes.
            if unsafe { library.multiply(p.op, &product, stream) }? {
                continue;
            }
        }
        part.launch(cuda, p, stream)?;
    }
    Ok(())
}

/// Equally spaced rows of a product.
struct Part {
    rows: usize,
    in_features: usize,
    out_features: usize,
    x: usize,
    x_stride: usize,
    weight_stride: usize,
    out: usize,
    out_stride: usize,
    /// Residual or gate.
    other: usize,
    other_stride: usize,
}

impl Part {
    fn new(p: &Product<'_>, matrix: &Matrix<3>) -> Part {
        let (other, _) = p.epilogue.parts();
        let other = other.unwrap_or(p.out);
        let at = |t: &RawTensor, i: usize| t.ptr.addr() + matrix.offsets[i] * t.dtype.size();
        let weight = &p.weights.weight.layout;
        Part {
            rows: matrix.rows,
            in_features: weight.dim(1),
            out_features: weight.dim(0),
            x: at(p.x, 0),
            x_stride: matrix.strides[0],
            weight_stride: match weight.dim(0) {
                1 => weight.dim(1),
                _ => weight.stride(0),
            },
            out: at(p.out, 1),
            out_stride: matrix.strides[1],
            other: at(other, 2),
            other_stride: matrix.strides[2],
        }
    }

    /// What the library is asked for, if it may serve this part.
    fn for_library(&self, p: &Product<'_>) -> Option<cublaslt::Product> {
        let weight = &p.weights.weight;
        let bias = p.weights.bias.as_ref();
        let bias_fits =
            bias.is_none_or(|b| b.dtype == p.out.dtype && b.ptr.addr().is_multiple_of(VECTOR));
        let residual = match p.epilogue {
            Epilogue::Store => Some(None),
            Epilogue::Add(_) => Some(Some((self.other, self.other_stride))),
            Epilogue::Gate(..) => None,
        };
        // Rows of inputs may overlap, which the library does not take.
        let apart = self.x_stride >= self.in_features
            && self.weight_stride >= self.in_features
            && (p.epilogue.parts().0.is_none() || self.other_stride >= self.out_features);
        let fits = !has_few_rows(p.x.dtype, self.rows, self.out_features)
            && self.in_features > 0
            && weight.dtype == p.x.dtype
            && bias_fits
            && apart;
        residual.filter(|_| fits).map(|residual| cublaslt::Product {
            dtype: p.x.dtype,
            rows: self.rows,
            in_features: self.in_features,
            out_features: self.out_features,
            x: self.x,
            x_stride: self.x_stride,
            weight: weight.ptr.addr(),
            weight_stride: self.weight_stride,
            bias: bias.map(|b| b.ptr.addr()),
            residual,
            out: self.out,
            out_stride: self.out_stride,
        })
    }

    /// Whether rows of x and of the weights can be read in accesses of `width` elements.
    fn in_accesses_of(&self, p: &Product<'_>, width: usize) -> bool {
        let weight = &p.weights.weight;
        self.in_features.is_multiple_of(width)
            && self.x_stride.is_multiple_of(width)
            && self.weight_stride.is_multiple_of(width)
            && self.x.is_multiple_of(width * p.x.dtype.size())
            && weight
                .ptr
                .addr()
                .is_multiple_of(width * weight.dtype.size())
    }

    /// The kernel that serves this part without cuBLASLt.
    fn choices(&self, p: &Product<'_>) -> Choices {
        /// Rows up to which reading the weights for every 32 costs less than tiles do.
        const MODERATE: usize = 512;
        const LINE: usize = 8;
        let (x, weight) = (p.x.dtype, p.weights.weight.dtype);
        let (kind, rows, width) = if x != DType::F32 && x == weight && self.in_accesses_of(p, LINE)
        {
            match self.rows {
                0..=8 => (Kind::Rows, 8, LINE),
                9..=16 => (Kind::Rows, 16, LINE),
                17..=MODERATE => (Kind::Rows, 32, LINE),
                _ => (Kind::Tiles, TILE, LINE),
            }
        } else if x == DType::F32 && x == weight && self.in_accesses_of(p, 4) {
            match self.rows {
                0..=1 => (Kind::RowsSimt, 1, 4),
                2..=8 => (Kind::RowsSimt, 8, 4),
                9..=128 => (Kind::RowsSimt, 16, 4),
                _ => (Kind::TilesSimt, TILE, 1),
            }
        } else {
            match self.rows {
                0..=16 => (Kind::RowsSimt, 4, 1),
                _ => (Kind::TilesSimt, TILE, 1),
            }
        };
        Choices {
            kind: kind as u32,
            x: x as u32,
            weight: weight as u32,
            rows: rows as u32,
            width: width as u32,
        }
    }

    fn launch(&self, cuda: &Cuda, p: &Product<'_>, stream: Stream) -> Result<()> {
        let choices = self.choices(p);
        let width = choices.width as usize;
        let row_tiles = self.rows.div_ceil(choices.rows as usize);
        let form = (cuda.linear).form(choices, self.out_features, row_tiles)?;
        let column_tiles = self.out_features.div_ceil(form.columns);
        let grid = if choices.kind < Kind::Tiles as u32 {
            // Blocks take tiles by turns.
            [(row_tiles * column_tiles).min(form.resident) as u32, 1, 1]
        } else {
            [row_tiles as u32, column_tiles as u32, 1]
        };
        let (_, epilogue) = p.epilogue.parts();
        let bias = p.weights.bias.as_ref();
        let bias_of = |dtype| match bias {
            Some(b) if b.dtype == dtype => b.ptr.addr() as u64,
            _ => 0,
        };
        let arguments = Arguments {
            x: self.x as u64,
            w: p.weights.weight.ptr.addr() as u64,
            out: self.out as u64,
            bias_f32: bias_of(DType::F32),
            bias_f16: bias_of(DType::F16),
            bias_bf16: bias_of(DType::Bf16),
            residual: self.other as u64,
            rows: self.rows as u32,
            in_features: self.in_features as u32,
            out_features: self.out_features as u32,
            bias_dtype: bias.map_or(0, |b| b.dtype as u32),
            epilogue,
            x_stride: (self.x_stride / width) as u64,
            w_stride: (self.weight_stride / width) as u64,
            out_stride: self.out_stride as u64,
            residual_stride: self.other_stride as u64,
            ..Arguments::ZERO
        };
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
        unsafe { cuda.launch_grid(p.op, &form.kernel, grid, &arguments, stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::{Backend, Context, ContextOptions};
    use crate::layout::Layout;
    use crate::memory::Buffer;
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
        if !Backend::Cuda.device_count().is_ok_and(|n| n > 0) {
            return;
        }
        let options = ContextOptions {
            backend: Backend::Cuda,
            ..ContextOptions::default()
        };
        let ctx = Context::new(&options).unwrap();
        let with = Cuda::new(OP, 0).unwrap();
        let mut without = Cuda::new(OP, 0).unwrap();
        without.linear.close();
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
                        weights: WeightsProblem {
                            weight,
                            bias: Some(bias),
                        },
                        residual: Some(residual),
                        out,
                    };
                    forward(cuda, &problem, Stream::DEFAULT).unwrap();
                    ctx.synchronize(Stream::DEFAULT).unwrap();
                    let len = buffer.size() / 4;
                    buffer.to_vec::<i32>(0, len, Stream::DEFAULT).unwrap()
                });
                assert!(results[0] == results[1], "{dtype} {rows} {k} {n}");
            }
        }
    }
}
