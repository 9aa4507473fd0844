//! The gated feed-forward block on the GPU.
//!
//! Few rows are products by kernels of this library, which multiply what they compute of up by the activated gate: that needs one
//! intermediate. cuBLASLt cannot, so what it serves has gate and up side by side and is activated between the products: of as many rows
//! at a time as the workspace has room for: half of them at least, if they are even.

use std::cell::Cell;

use super::linear::{self, Epilogue, Product, Sizes};
use super::rows::{Matrix, Rows};
use super::{Cuda, swiglu};
use crate::backend::{Implementation, Stream};
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::linear::Weights;
use crate::problem::mlp::Problem;
use crate::problem::swiglu::Problem as Activated;
use crate::problem::{self, Plans};
use crate::tensor::{RawTensor, Scratch, Workspace};

const OP: &str = "mlp";

/// Rows of intermediates beyond which more are of no use: half as many tokens at a time keep the tensor cores busy.
const ENOUGH: usize = 1024;

/// A block that waits to be queued.
pub(crate) struct Plan<'a> {
    cuda: &'a Cuda,
    problem: Problem,
}

impl Plans<Problem> for Cuda {
    type Plan<'a> = Plan<'a>;

    fn plan(&self, problem: Problem) -> Result<Plan<'_>> {
        let p = &problem;
        linear::fits(OP, ("x", &p.x), ("gate_weight", &p.gate.weight))?;
        linear::fits(OP, ("x", &p.x), ("down_weight", &p.down.weight))?;
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

    /// One intermediate.
    fn needed(&self) -> usize {
        self.problem.x.layout.num_rows() * self.row()
    }

    /// As many rows of intermediates as are of use, and a workspace for products behind them.
    fn useful(&self) -> Result<usize> {
        let products = products_size(self.cuda, &self.problem)?;
        let rows = most_rows(self.cuda, &self.problem, products > 0) * self.row();
        Ok(match products {
            0 => rows,
            _ => aligned(rows) + products,
        })
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let products = match scratch.size > aligned(self.needed()) {
            true => products_size(self.cuda, p)?,
            false => 0,
        };
        let with = products > 0 && scratch.size >= aligned(self.needed()) + products;
        let left = if with {
            scratch.size - products
        } else {
            scratch.size
        };
        let left = left / Workspace::ALIGNMENT * Workspace::ALIGNMENT;
        let least = p.x.layout.num_rows();
        let rows = left.checked_div(self.row()).unwrap_or(0);
        let rows = rows.clamp(least, most_rows(self.cuda, p, with).max(least));
        let intermediates = RawTensor {
            ptr: scratch.ptr,
            dtype: p.x.dtype,
            layout: Layout::contiguous(&[rows, p.intermediate])?,
        };
        let products = match with {
            true => Scratch {
                ptr: scratch.ptr.wrapping_add(aligned(rows * self.row())),
                size: products,
            },
            false => Scratch::NONE,
        };
        forward(self.cuda, p, intermediates, products, stream)
    }
}

impl Plan<'_> {
    /// Bytes of a row of an intermediate.
    fn row(&self) -> usize {
        self.problem.intermediate * self.problem.x.dtype.size()
    }
}

/// Rounds up to the alignment of a workspace.
fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(Workspace::ALIGNMENT)
}

/// Whether cuBLASLt multiplies, and gate and up are stored side by side. With a workspace for products it multiplies more often.
fn stores_both(cuda: &Cuda, p: &Problem, with_workspace: bool) -> bool {
    /// Fewer columns gain nothing.
    const LEAST: usize = 512;
    let dtypes = (p.x.dtype, p.gate.weight.dtype);
    let rows = p.x.layout.num_rows();
    let sizes = Sizes {
        rows,
        columns: p.intermediate,
        in_features: p.gate.weight.layout.dim(1),
    };
    // A single row cannot be halved.
    rows > 1 && p.intermediate >= LEAST && cuda.linear.serves(dtypes, sizes, with_workspace)
}

/// Rows of intermediates that the problem has use for, with or without a workspace for products; as many as it has rows are enough.
fn most_rows(cuda: &Cuda, p: &Problem, with_workspace: bool) -> usize {
    let rows = p.x.layout.num_rows();
    if stores_both(cuda, p, with_workspace) {
        rows.max(rows.saturating_mul(2).min(ENOUGH))
    } else {
        rows
    }
}

/// The workspace with which products are the fastest, in bytes, beside as few rows of intermediates as there may be or as many as are of
/// use.
fn products_size(cuda: &Cuda, p: &Problem) -> Result<usize> {
    let most = most_rows(cuda, p, true);
    let queue = Queue {
        cuda,
        mode: Mode::Measure(Cell::new(0)),
    };
    for rows in [p.x.layout.num_rows(), most] {
        let scratch = RawTensor {
            ptr: std::ptr::null_mut(),
            dtype: p.x.dtype,
            layout: Layout::contiguous(&[rows, p.intermediate])?,
        };
        walk(&queue, p, scratch, true)?;
        if rows == most {
            break;
        }
    }
    match queue.mode {
        Mode::Measure(size) => Ok(size.get()),
        Mode::Run(..) => Ok(0),
    }
}

/// `scratch` has at least as many rows as the problem, at most [`most_rows`]. `products` has the size of [`products_size`], or is none.
fn forward(
    cuda: &Cuda,
    p: &Problem,
    scratch: RawTensor,
    products: Scratch,
    stream: Stream,
) -> Result<()> {
    let queue = Queue {
        cuda,
        mode: Mode::Run(products, stream),
    };
    walk(&queue, p, scratch, products.size > 0)
}

fn walk(queue: &Queue<'_>, p: &Problem, scratch: RawTensor, with_workspace: bool) -> Result<()> {
    if p.out.layout.is_empty() {
        return Ok(());
    }
    let stores_both = stores_both(queue.cuda, p, with_workspace);
    let room = scratch.layout.dim(0) / if stores_both { 2 } else { 1 };
    let other = p.residual.unwrap_or(p.out);
    let rows = Rows::new([&p.x.layout, &p.out.layout, &other.layout]);
    // The matrices differ in their addresses only.
    let count = match queue.mode {
        Mode::Run(..) => usize::MAX,
        Mode::Measure(_) => 1,
    };
    for matrix in rows.matrices().take(count) {
        let parts = matrix.rows.div_ceil(room.max(1));
        for part in 0..parts {
            // All parts have the same size, give or take a row.
            let first = matrix.rows * part / parts;
            let rows = matrix.rows * (part + 1) / parts - first;
            let part = Part::new(p, &matrix, first, rows)?;
            if stores_both {
                part.through_library(queue, p, scratch)?;
            } else {
                part.through_kernels(queue, p, scratch)?;
            }
        }
    }
    Ok(())
}

/// Equally spaced rows of the block.
struct Part {
    rows: usize,
    x: RawTensor,
    /// What becomes of the last product.
    epilogue: Epilogue,
    out: RawTensor,
}

impl Part {
    fn new(p: &Problem, matrix: &Matrix<3>, first: usize, rows: usize) -> Result<Part> {
        let part = |t: &RawTensor, i: usize| {
            let columns = t.layout.dim(t.layout.rank() - 1);
            let offset = matrix.offsets[i] + first * matrix.strides[i];
            Ok(RawTensor {
                ptr: t.ptr.wrapping_add(offset * t.dtype.size()),
                layout: Layout::strided(&[rows, columns], &[matrix.strides[i], 1])?,
                ..*t
            })
        };
        let residual = p.residual.map(|r| part(&r, 2)).transpose()?;
        Ok(Part {
            rows,
            x: part(&p.x, 0)?,
            epilogue: residual.map_or(Epilogue::Store, Epilogue::Add),
            out: part(&p.out, 1)?,
        })
    }

    fn through_kernels(&self, queue: &Queue<'_>, p: &Problem, scratch: RawTensor) -> Result<()> {
        let intermediate = RawTensor {
            layout: Layout::contiguous(&[self.rows, p.intermediate])?,
            ..scratch
        };
        queue.product(&self.x, &p.gate, Epilogue::Store, &intermediate)?;
        let gated = Epilogue::Gate(intermediate, p.activation);
        queue.product(&self.x, &p.up, gated, &intermediate)?;
        queue.product(&intermediate, &p.down, self.epilogue, &self.out)
    }

    fn through_library(&self, queue: &Queue<'_>, p: &Problem, scratch: RawTensor) -> Result<()> {
        let both = RawTensor {
            layout: Layout::contiguous(&[self.rows, 2 * p.intermediate])?,
            ..scratch
        };
        let half = |i: usize| both.narrowed(1, i * p.intermediate, p.intermediate);
        let (gate, up) = match (joined(&p.gate, &p.up), joined(&p.up, &p.gate)) {
            (Some(weights), _) => {
                queue.product(&self.x, &weights, Epilogue::Store, &both)?;
                (half(0)?, half(1)?)
            }
            (None, Some(weights)) => {
                queue.product(&self.x, &weights, Epilogue::Store, &both)?;
                (half(1)?, half(0)?)
            }
            (None, None) => {
                let (gate, up) = (half(0)?, half(1)?);
                queue.product(&self.x, &p.gate, Epilogue::Store, &gate)?;
                queue.product(&self.x, &p.up, Epilogue::Store, &up)?;
                (gate, up)
            }
        };
        let activated = Activated {
            gate,
            up,
            out: gate,
            activation: p.activation,
        };
        queue.activation(&activated)?;
        queue.product(&gate, &p.down, self.epilogue, &self.out)
    }
}

/// What becomes of products.
enum Mode {
    /// They are queued, with a workspace.
    Run(Scratch, Stream),
    /// They are asked for the workspace that they have use for, which goes here.
    Measure(Cell<usize>),
}

/// Where products go.
struct Queue<'a> {
    cuda: &'a Cuda,
    mode: Mode,
}

impl Queue<'_> {
    fn product(
        &self,
        x: &RawTensor,
        weights: &Weights,
        epilogue: Epilogue,
        out: &RawTensor,
    ) -> Result<()> {
        let product = Product {
            op: OP,
            x,
            weights,
            epilogue,
            out,
        };
        match &self.mode {
            Mode::Run(scratch, stream) => linear::multiply(self.cuda, &product, *scratch, *stream),
            Mode::Measure(most) => {
                most.set(most.get().max(linear::scratch_size(self.cuda, &product)?));
                Ok(())
            }
        }
    }

    fn activation(&self, problem: &Activated) -> Result<()> {
        match &self.mode {
            Mode::Run(_, stream) => {
                swiglu::forward(self.cuda, problem, *stream).map_err(|e| e.within(OP))
            }
            Mode::Measure(_) => Ok(()),
        }
    }
}

/// Two layers as one, if the rows of the second follow those of the first.
fn joined(first: &Weights, second: &Weights) -> Option<Weights> {
    let follows = |a: &RawTensor, b: &RawTensor| {
        let elements = a.layout.dim(0) * a.layout.stride(0);
        let end = a.ptr.addr() + elements * a.dtype.size();
        (a.dtype, a.layout) == (b.dtype, b.layout) && b.ptr.addr() == end
    };
    let both = |a: &RawTensor| {
        let mut shape = [0; 2];
        let mut strides = [0; 2];
        let rank = a.layout.rank();
        shape[..rank].copy_from_slice(a.layout.shape());
        strides[..rank].copy_from_slice(a.layout.strides());
        shape[0] *= 2;
        let layout = Layout::strided(&shape[..rank], &strides[..rank]).ok()?;
        Some(RawTensor { layout, ..*a })
    };
    if !follows(&first.weight, &second.weight) {
        return None;
    }
    let bias = match (&first.bias, &second.bias) {
        (None, None) => None,
        (Some(a), Some(b)) if follows(a, b) => Some(both(a)?),
        _ => return None,
    };
    let weight = both(&first.weight)?;
    let fits = linear::fits(OP, ("gate_weight", &weight), ("gate_weight", &weight)).is_ok();
    fits.then_some(Weights { weight, bias })
}
