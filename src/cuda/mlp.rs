//! The gated feed-forward block on the GPU.
//!
//! It is computed in one of two ways. With one intermediate: the kernels of this library multiply
//! what they compute of up by the activated gate. With two, gate and up side by side, which are
//! activated between the products: cuBLASLt can do no other, and weights that lie side by side are
//! then one product for any kernel. That takes as many tokens at a time as the workspace has room
//! for, and each part reads the weights once more, so few tokens without room for two intermediates
//! are left to the kernels.

use std::cell::Cell;

use super::linear::{self, Epilogue, Product, Sizes};
use super::rows::{Matrix, Rows};
use super::tuning::rules::products::{JOINED_TOKENS, LEAST_INTERMEDIATE};
use super::{Cuda, swiglu};
use crate::backend::{Implementation, Stream};
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::problem::linear::Weights;
use crate::problem::mlp::Problem;
use crate::problem::swiglu::Problem as Activated;
use crate::problem::{self, Plans};
use crate::tensor::{RawTensor, Scratch, Workspace};

const OP: &str = "mlp";

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

    /// One intermediate, and what products need behind it; before it what is normalised by itself.
    fn needed(&self) -> usize {
        if self.problem.out.layout.is_empty() {
            return 0;
        }
        let before = match fuses(self.cuda, &self.problem) {
            true => 0,
            false => self.normalised(),
        };
        before + self.needed_behind()
    }

    /// Two intermediates where they are of use, and a workspace for products behind them. Addresses may tell
    /// that a norm is by itself after all.
    fn useful(&self) -> Result<usize> {
        if self.problem.out.layout.is_empty() {
            return Ok(0);
        }
        Ok(self.normalised() + self.useful_behind()?)
    }

    /// More rows of intermediates are of use whether or not products have a workspace.
    fn used(&self, given: usize) -> Result<usize> {
        Ok(given.min(self.useful()?))
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        if p.out.layout.is_empty() {
            return Ok(());
        }
        let norm = p.norm.as_ref().filter(|_| !fuses(self.cuda, p));
        let Some(norm) = norm else {
            return self.launch_behind(scratch, stream);
        };
        let (x, scratch) = linear::normalise(self.cuda, OP, (&p.x, norm), scratch, stream)?;
        let plan = Plan {
            cuda: self.cuda,
            problem: Problem {
                x,
                norm: None,
                ..*p
            },
        };
        plan.launch_behind(scratch, stream)
    }
}

impl Plan<'_> {
    /// Bytes of what is normalised by itself, unless one kernel does both.
    fn normalised(&self) -> usize {
        linear::normalised_bytes(&self.problem.x, self.problem.norm.as_ref())
    }

    /// What is needed but for a norm.
    fn needed_behind(&self) -> usize {
        let intermediate = self.intermediate();
        match needed_by_products(&self.problem) {
            0 => intermediate,
            products => aligned(intermediate) + products,
        }
    }

    /// What is of use but for a norm.
    fn useful_behind(&self) -> Result<usize> {
        let most = self.cuda.resources.tuning.mlp.asked_tokens;
        let products = products_size(self.cuda, &self.problem, most)?;
        Ok(match products {
            0 => self.bytes(most, false),
            _ => aligned(self.bytes(most, true)) + products,
        })
    }

    /// Queues the products.
    fn launch_behind(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let most = self.cuda.resources.tuning.mlp.tokens;
        let needed = needed_by_products(p);
        let products = match scratch.size > aligned(self.needed_behind()) {
            true => products_size(self.cuda, p, most)?,
            false => 0,
        };
        if needed > 0 {
            let fits = products > 0 && scratch.size >= aligned(self.intermediate()) + products;
            return self.run(scratch, if fits { products } else { needed }, stream);
        }
        // All tokens at once gain more than a workspace for products does.
        let crowds_out =
            |both: usize| both <= scratch.size && scratch.size < aligned(both) + products;
        let with = products > 0
            && scratch.size >= aligned(self.needed_behind()) + products
            && !crowds_out(self.bytes(most, false));
        self.run(scratch, if with { products } else { 0 }, stream)
    }
}

impl Plan<'_> {
    /// Bytes of a row of an intermediate.
    fn row(&self) -> usize {
        self.problem.intermediate * self.problem.x.dtype.size()
    }

    /// Bytes of one for all tokens.
    fn intermediate(&self) -> usize {
        self.problem.x.layout.num_rows() * self.row()
    }

    /// Queues the block with so much of the workspace, its end, for products.
    fn run(&self, scratch: Scratch, products: usize, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let most = self.cuda.resources.tuning.mlp.tokens;
        let left = (scratch.size - products) / Workspace::ALIGNMENT * Workspace::ALIGNMENT;
        let least = p.x.layout.num_rows();
        let rows = left.checked_div(self.row()).unwrap_or(0);
        let rows = rows.clamp(least, most_rows(self.cuda, p, products > 0, most));
        let intermediates = RawTensor {
            ptr: scratch.ptr,
            dtype: p.x.dtype,
            layout: Layout::contiguous(&[rows, p.intermediate])?,
        };
        let products = match products {
            0 => Scratch::NONE,
            size => Scratch {
                ptr: scratch.ptr.wrapping_add(aligned(rows * self.row())),
                size,
            },
        };
        forward(self.cuda, p, intermediates, products, stream)
    }

    /// Bytes of the intermediates of up to `most` tokens at a time, beside a workspace for products
    /// or without one.
    fn bytes(&self, most: usize, with_workspace: bool) -> usize {
        most_rows(self.cuda, &self.problem, with_workspace, most) * self.row()
    }
}

/// Rounds up to the alignment of a workspace.
fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(Workspace::ALIGNMENT)
}

/// What the products cannot do without, in bytes, with as many rows as there are tokens.
fn needed_by_products(p: &Problem) -> usize {
    let all = [&p.gate, &p.up, &p.down].map(|weights| linear::needed_scratch(&p.x, weights));
    all.into_iter().max().unwrap_or(0)
}

/// The gate's product, with the norm of its input, as far as it makes the whole intermediate.
fn gated(p: &Problem) -> Product<'_> {
    Product {
        op: OP,
        x: &p.x,
        norm: p.norm.as_ref(),
        weights: &p.gate,
        epilogue: Epilogue::Gated(p.up, p.activation),
        // Like the intermediate, whose columns lie one behind the other.
        out: &p.x,
    }
}

/// Whether gate and up, with a norm of their input, are one launch.
fn fuses(cuda: &Cuda, p: &Problem) -> bool {
    linear::fuses(cuda, &gated(p))
}

/// Whether cuBLASLt serves the block's products better than kernels of this library do.
fn library_serves(cuda: &Cuda, p: &Problem, with_workspace: bool) -> bool {
    let sizes = Sizes {
        rows: p.x.layout.num_rows(),
        columns: p.intermediate,
        in_features: p.gate.weight.layout.dim(1),
    };
    (cuda.linear).serves(&p.x, &p.gate, sizes, with_workspace)
}

/// Whether the block gains by storing gate and up side by side, given room for them. With a
/// workspace for products cuBLASLt serves more of them.
fn gains_by_both(cuda: &Cuda, p: &Problem, with_workspace: bool) -> bool {
    let few_joined = || {
        p.x.layout.num_rows() <= JOINED_TOKENS
            && p.x.dtype == p.gate.weight.dtype
            && (joined(&p.gate, &p.up).is_some() || joined(&p.up, &p.gate).is_some())
    };
    p.intermediate >= LEAST_INTERMEDIATE
        && (few_joined() || library_serves(cuda, p, with_workspace))
}

/// Rows of intermediates that the problem has use for, with up to `most` tokens at a time; as many
/// as it has tokens are enough.
fn most_rows(cuda: &Cuda, p: &Problem, with_workspace: bool, most: usize) -> usize {
    let tokens = p.x.layout.num_rows();
    match gains_by_both(cuda, p, with_workspace) {
        true => tokens.max(2 * tokens.min(most)),
        false => tokens,
    }
}

/// How many tokens at a time have gate and up side by side, where there is room for so many rows of
/// intermediates; `None` where kernels that need one intermediate are better.
fn tokens_of_both(cuda: &Cuda, p: &Problem, rows: usize, with_workspace: bool) -> Option<usize> {
    if fuses(cuda, p) {
        return None;
    }
    let tuning = &cuda.resources.tuning.mlp;
    let tokens = p.x.layout.num_rows();
    let at_once = (rows / 2).min(tuning.tokens);
    let in_parts = || {
        at_once > 0 && tokens > tuning.tokens_by_kernels && library_serves(cuda, p, with_workspace)
    };
    let gains = gains_by_both(cuda, p, with_workspace) && (at_once >= tokens || in_parts());
    gains.then_some(at_once)
}

/// The workspace with which products are the fastest, in bytes, beside as few rows of intermediates
/// as there may be or as many as up to `most` tokens at a time have use for.
fn products_size(cuda: &Cuda, p: &Problem, most: usize) -> Result<usize> {
    // Of an input that is normalised.
    let p = &Problem { norm: None, ..*p };
    let most = most_rows(cuda, p, true, most);
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
    let rows = scratch.layout.dim(0);
    let both = tokens_of_both(queue.cuda, p, rows, with_workspace);
    let at_once = both.unwrap_or(rows);
    let other = p.residual.unwrap_or(p.out);
    let rows = Rows::new([&p.x.layout, &p.out.layout, &other.layout]);
    // The matrices differ in their addresses only.
    let count = match queue.mode {
        Mode::Run(..) => usize::MAX,
        Mode::Measure(_) => 1,
    };
    for matrix in rows.matrices().take(count) {
        let parts = matrix.rows.div_ceil(at_once.max(1));
        for part in 0..parts {
            // All parts have the same size, give or take a row.
            let first = matrix.rows * part / parts;
            let rows = matrix.rows * (part + 1) / parts - first;
            let part = Part::new(p, &matrix, first, rows)?;
            match both {
                Some(_) => part.with_both(queue, p, scratch)?,
                None => part.with_one(queue, p, scratch)?,
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

    fn with_one(&self, queue: &Queue<'_>, p: &Problem, scratch: RawTensor) -> Result<()> {
        let intermediate = RawTensor {
            layout: Layout::contiguous(&[self.rows, p.intermediate])?,
            ..scratch
        };
        let whole = Product {
            x: &self.x,
            out: &intermediate,
            ..gated(p)
        };
        if linear::fuses(queue.cuda, &whole) {
            queue.multiply(&whole)?;
            return queue.product(&intermediate, &p.down, self.epilogue, &self.out);
        }
        if p.norm.is_some() {
            let message = text!("a norm that no kernel computes");
            return Err(Error::Internal { op: OP, message });
        }
        queue.product(&self.x, &p.gate, Epilogue::Store, &intermediate)?;
        let gated = Epilogue::Gate(intermediate, p.activation);
        queue.product(&self.x, &p.up, gated, &intermediate)?;
        queue.product(&intermediate, &p.down, self.epilogue, &self.out)
    }

    fn with_both(&self, queue: &Queue<'_>, p: &Problem, scratch: RawTensor) -> Result<()> {
        let both = RawTensor {
            layout: Layout::contiguous(&[self.rows, 2 * p.intermediate])?,
            ..scratch
        };
        let half = |i: usize| both.narrowed(1, i * p.intermediate, p.intermediate);
        let is_one = |weights: &Weights| queue.is_one(&self.x, weights, &both);
        let (first, second) = (joined(&p.gate, &p.up), joined(&p.up, &p.gate));
        let (gate, up) = match (first.filter(is_one), second.filter(is_one)) {
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
        self.multiply(&Product {
            op: OP,
            x,
            norm: None,
            weights,
            epilogue,
            out,
        })
    }

    fn multiply(&self, product: &Product<'_>) -> Result<()> {
        match &self.mode {
            Mode::Run(scratch, stream) => linear::multiply(self.cuda, product, *scratch, *stream),
            Mode::Measure(most) => {
                most.set(most.get().max(linear::scratch_size(self.cuda, product)?));
                Ok(())
            }
        }
    }

    /// Whether two layers that lie one behind the other are one product: not where their weights would be decoded, of which
    /// twice as many would be so at a time.
    fn is_one(&self, x: &RawTensor, weights: &Weights, out: &RawTensor) -> bool {
        let product = Product {
            op: OP,
            x,
            norm: None,
            weights,
            epilogue: Epilogue::Store,
            out,
        };
        match &self.mode {
            Mode::Run(scratch, _) => linear::reads(self.cuda, &product, *scratch),
            // Addresses may tell later that they are two after all.
            Mode::Measure(_) => !weights.weight.dtype.is_in_blocks(),
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
        let end = a.ptr.addr() + a.layout.dim(0) * a.dtype.row_bytes(a.layout.stride(0));
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
    // Codes have scales of their own.
    let alike = first.activations == second.activations && follows(&first.weight, &second.weight);
    if first.weight.dtype.is_quantized() || !alike {
        return None;
    }
    let bias = match (&first.bias, &second.bias) {
        (None, None) => None,
        (Some(a), Some(b)) if follows(a, b) => Some(both(a)?),
        _ => return None,
    };
    let weight = both(&first.weight)?;
    let fits = linear::fits(OP, ("gate_weight", &weight), ("gate_weight", &weight)).is_ok();
    fits.then_some(Weights {
        weight,
        bias,
        constant: first.constant && second.constant,
        ..*first
    })
}
