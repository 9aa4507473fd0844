//! The plans of a chunk's operations, and their launch one after the other.

use super::chunks::Chunks;
use crate::backend::{Backend, Implementation, Stream};
use crate::context::{Context, Planned};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::chunked::Layer;
use crate::problem::linear::{Backward, Gradient};
use crate::problem::{Plan, cast, linear};
use crate::tensor::{RawTensor, Scratch, Workspace};

/// The most bytes of outputs at a time, where the caller does not say of how many tokens. On a GPU
/// every chunk adds to an f32 gradient of the weight, which is of about that size; on the CPU
/// products of a few hundred rows are as fast as those of more.
const GPU_BYTES: usize = 512 << 20;
const CPU_BYTES: usize = 128 << 20;
/// The most tokens of a chunk, and of which chunks have multiples, then.
const MOST_TOKENS: usize = 8192;
const MULTIPLE: usize = 128;

/// What a part and its operation call the same argument.
pub(crate) type Names = &'static [(&'static str, &'static str)];

/// A layer whose output is made in chunks.
#[derive(Clone, Copy)]
pub(crate) struct Chunked<'a> {
    ctx: &'a Context,
    op: &'static str,
    names: Names,
    layer: Layer,
    chunks: Chunks,
}

/// Parts of a workspace, one behind the other.
pub(crate) struct Memory {
    start: *mut u8,
    size: usize,
}

impl Memory {
    /// From `start` on, which is NULL where memory is only counted.
    pub fn new(start: *mut u8) -> Memory {
        Memory { start, size: 0 }
    }

    /// A contiguous tensor behind what was taken before.
    pub fn take(&mut self, dtype: DType, shape: &[usize]) -> Result<RawTensor> {
        let tensor = RawTensor {
            ptr: self.start.wrapping_add(self.size),
            dtype,
            layout: Layout::contiguous(shape)?,
        };
        let bytes = tensor.layout.span() * dtype.size();
        // What is too large for an address space is never there.
        let end = self.size.saturating_add(bytes);
        self.size = end
            .checked_next_multiple_of(Workspace::ALIGNMENT)
            .unwrap_or(end);
        Ok(tensor)
    }

    /// Bytes taken.
    pub fn size(&self) -> usize {
        self.size
    }

    /// What a workspace that begins here and has `size` bytes has behind what was taken.
    pub fn rest(&self, size: usize) -> Scratch {
        Scratch {
            ptr: self.start.wrapping_add(self.size),
            size: size.saturating_sub(self.size),
        }
    }
}

/// Where chunks are, and what they add up to.
pub(crate) struct Rooms {
    /// The memory of every chunk's output.
    output: *mut u8,
    /// In f32, where the gradient's dtype is another and several chunks add to it.
    dweight: Option<RawTensor>,
    dbias: Option<RawTensor>,
}

/// What several chunks add the weight's gradient up in, where its dtype is another; else 0. `columns` is
/// as of [`Chunked::new`].
fn bytes_of_sum(layer: &Layer, columns: Option<usize>) -> usize {
    let in_f32 = |t: &RawTensor| {
        let elements = match columns {
            None => t.layout.span(),
            Some(columns) => columns.saturating_mul(t.layout.dim(1)),
        };
        elements.saturating_mul(DType::F32.size())
    };
    let gradient = layer.dweight.as_ref().filter(|t| t.dtype != DType::F32);
    gradient.map_or(0, in_f32)
}

impl<'a> Chunked<'a> {
    /// Of a layer whose dimensions of tokens are merged.
    /// `names` has what problems between the products and the operation call the same argument. Where
    /// ranks divide the output, which all take the same chunks of, `columns` is as many as a rank has.
    pub fn new(
        ctx: &'a Context,
        (op, names): (&'static str, Names),
        layer: Layer,
        columns: Option<usize>,
    ) -> Chunked<'a> {
        let (mut most, mut multiples) = (layer.chunk_tokens, None);
        if most == 0 {
            let bytes = match ctx.backend() {
                Backend::Cpu => CPU_BYTES,
                Backend::Cuda => GPU_BYTES,
            };
            let row = columns.unwrap_or(layer.vocab()).max(1);
            let row = row.saturating_mul(layer.x.dtype.size());
            most = (bytes / row).clamp(1, MOST_TOKENS);
            if most >= MULTIPLE {
                most = most / MULTIPLE * MULTIPLE;
                multiples = Some(MULTIPLE);
            }
            // One chunk needs no sum in f32. Where that is larger than what chunks save, all at once
            // take less memory, and less time.
            let sum = bytes_of_sum(&layer, columns);
            let tokens = layer
                .tokens()
                .iter()
                .try_fold(1usize, |n, dim| n.checked_mul(*dim));
            let all = tokens.and_then(|n| n.checked_mul(row));
            if sum > 0 && all.is_some_and(|all| all <= bytes.saturating_add(sum)) {
                most = most.max(tokens.unwrap_or(0));
            }
        }
        let chunks = Chunks::new(layer.tokens(), most, multiples);
        Chunked {
            ctx,
            op,
            names,
            layer,
            chunks,
        }
    }

    /// The same with the input and its gradient elsewhere.
    pub fn over(mut self, x: RawTensor, dx: Option<RawTensor>) -> Chunked<'a> {
        (self.layer.x, self.layer.dx) = (x, dx);
        self
    }

    /// The most tokens of a chunk.
    pub fn most_tokens(&self) -> usize {
        self.chunks.shape(0, 1).iter().product()
    }

    pub fn layer(&self) -> &Layer {
        &self.layer
    }

    /// Takes memory for chunks and for what they add up to.
    pub fn rooms(&self, memory: &mut Memory) -> Result<Rooms> {
        let Layer { dweight, dbias, .. } = &self.layer;
        let mut sum = |gradient: &Option<RawTensor>| {
            let adds = |t: &&RawTensor| t.dtype != DType::F32 && self.chunks.count > 1;
            let in_f32 = gradient.as_ref().filter(adds);
            in_f32
                .map(|t| memory.take(DType::F32, t.layout.shape()))
                .transpose()
        };
        let (dweight, dbias) = (sum(dweight)?, sum(dbias)?);
        // The first chunk is as large as any.
        let shape = self.chunks.shape(0, self.layer.vocab());
        let output = memory.take(self.layer.x.dtype, &shape)?.ptr;
        Ok(Rooms {
            output,
            dweight,
            dbias,
        })
    }

    /// A chunk of a tensor whose first dimensions are those of the tokens.
    pub fn part(&self, chunk: usize, t: &RawTensor) -> Result<RawTensor> {
        self.chunks.of(chunk, t)
    }

    /// [`Chunked::part`] of a tensor that may be absent.
    pub fn part_of(&self, chunk: usize, t: &Option<RawTensor>) -> Result<Option<RawTensor>> {
        t.as_ref().map(|t| self.part(chunk, t)).transpose()
    }

    /// That of the product, which alone has several.
    pub fn implementation(&self, rooms: &Rooms) -> Result<Implementation> {
        let (product, _) = self.product(rooms, 0)?;
        Ok(product.plan(self.ctx)?.implementation())
    }

    /// The most of `size` over the plans of all chunks.
    pub fn most<P: Planned>(
        &self,
        rooms: &Rooms,
        step: impl Fn(usize, RawTensor) -> Result<P>,
        size: impl Fn(&dyn Plan) -> Result<usize>,
    ) -> Result<usize> {
        let mut most = 0;
        let mut visit = |plan: &dyn Plan| {
            most = most.max(size(plan)?);
            Ok(())
        };
        // All chunks are like the first, but the last of a dimension.
        let last = self.chunks.count - 1;
        for chunk in [0, last] {
            self.visit(rooms, chunk, &step, &mut visit)?;
        }
        self.visit_sums(rooms, &mut visit)?;
        Ok(most)
    }

    /// Runs every chunk, with the problem that `step` makes of its output between the product and
    /// its gradients: the output's gradient takes its place.
    pub fn launch<P: Planned>(
        &self,
        rooms: &Rooms,
        step: impl Fn(usize, RawTensor) -> Result<P>,
        scratch: Scratch,
        stream: Stream,
    ) -> Result<()> {
        // Nothing is written before there is memory for everything.
        self.visit(rooms, 0, &step, &mut |plan| plan.probe())?;
        let mut launch = |plan: &dyn Plan| plan.launch(scratch, stream);
        for chunk in 0..self.chunks.count {
            self.visit(rooms, chunk, &step, &mut launch)?;
        }
        self.visit_sums(rooms, &mut launch)
    }

    /// Runs, or asks, the plan of a problem beside the chunks.
    pub fn visit_one<P: Planned>(
        &self,
        problem: P,
        visit: &mut dyn FnMut(&dyn Plan) -> Result<()>,
    ) -> Result<()> {
        self.named(problem.plan(self.ctx).and_then(|plan| visit(&plan)))
    }

    /// The product of a chunk, and where it goes.
    fn product(&self, rooms: &Rooms, chunk: usize) -> Result<(linear::Problem, RawTensor)> {
        let shape = self.chunks.shape(chunk, self.layer.vocab());
        let output = RawTensor {
            ptr: rooms.output,
            dtype: self.layer.x.dtype,
            layout: Layout::contiguous(&shape)?,
        };
        let product = linear::Problem {
            norm: None,
            x: self.part(chunk, &self.layer.x)?,
            weights: self.layer.weights,
            residual: None,
            out: output,
        };
        Ok((product, output))
    }

    fn visit<P: Planned>(
        &self,
        rooms: &Rooms,
        chunk: usize,
        step: impl Fn(usize, RawTensor) -> Result<P>,
        visit: &mut dyn FnMut(&dyn Plan) -> Result<()>,
    ) -> Result<()> {
        let (product, output) = self.product(rooms, chunk)?;
        self.visit_one(product, visit)?;
        self.visit_one(step(chunk, output)?, visit)?;
        if !self.layer.is_differentiated() {
            return Ok(());
        }
        let Layer { dx, dweight, .. } = &self.layer;
        let gradient = |by, out| Gradient { by, out };
        let dx = self.part_of(chunk, dx)?;
        let backward = Backward {
            dout: output,
            dx: dx.map(|dx| gradient(self.layer.weights.weight, dx)),
            add_dx: false,
            dweight: rooms
                .dweight
                .or(*dweight)
                .map(|dweight| gradient(product.x, dweight)),
            dbias: rooms.dbias.or(self.layer.dbias),
            accumulate: self.layer.accumulate || chunk > 0,
        };
        self.visit_one(backward, visit)
    }

    /// The roundings of what chunks added up to.
    fn visit_sums(
        &self,
        rooms: &Rooms,
        visit: &mut dyn FnMut(&dyn Plan) -> Result<()>,
    ) -> Result<()> {
        let Layer { dweight, dbias, .. } = self.layer;
        for (sum, out) in [(rooms.dweight, dweight), (rooms.dbias, dbias)] {
            if let (Some(x), Some(out)) = (sum, out) {
                self.visit_one(cast::Problem { x, out }, visit)?;
            }
        }
        Ok(())
    }

    /// An error of a part as the operation's own: outputs of chunks have the sizes of tokens and of
    /// the vocabulary.
    fn named<T>(&self, result: Result<T>) -> Result<T> {
        const NAMES: Names = &[("out", "weight"), ("dout", "x"), ("logits", "x")];
        result.map_err(|error| error.within(self.op).renamed(NAMES).renamed(self.names))
    }
}
