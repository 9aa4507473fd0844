//! The gradient of a table on the GPU: positions are sorted by id in the workspace, then every row
//! sums its own, in their order. Rows of many positions are summed in pieces, which are cut by
//! where they lie in the sorted order and added in that order.

use contract::embedding_backward::{BINS, COLUMNS, DIGIT, Kind, LONG, ROUNDS, ROWS, THREADS, TILE};

use crate::backend::{Implementation, Stream};
use crate::cuda::device::Resources;
use crate::cuda::images::embedding_backward::Arguments;
use crate::cuda::rows::{Divisor, Rows};
use crate::cuda::table::Table;
use crate::cuda::{Cuda, VECTOR, is_aligned};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::embedding::Backward;
use crate::problem::{self, Plans};
use crate::tensor::Scratch;

const OP: &str = "embedding_backward";

/// By kind, dtype of `dout`, dtype of the gradient, and elements per access.
pub(in crate::cuda) type Kernels = Table<Arguments, 4>;

pub(in crate::cuda) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.kind, c.dtype, c.out, c.width])
}

/// A gradient that waits to be queued.
pub(crate) struct Plan<'a> {
    cuda: &'a Cuda,
    problem: Backward,
    sizes: Sizes,
}

impl Plans<Backward> for Cuda {
    type Plan<'a> = Plan<'a>;

    fn plan(&self, problem: Backward) -> Result<Plan<'_>> {
        let sizes = Sizes::new(&problem)?;
        Ok(Plan {
            cuda: self,
            problem,
            sizes,
        })
    }
}

/// What there is to do.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Without them nothing is sorted.
    tokens: usize,
    vocab: usize,
    dim: usize,
    /// Whether anything is written.
    writes: bool,
}

impl Sizes {
    /// Sizes that are within what kernels count in 32 bits.
    fn new(p: &Backward) -> Result<Sizes> {
        const MOST: usize = i32::MAX as usize - 1;
        let layout = &p.dweight.layout;
        let tokens = p.ids.layout.num_elements();
        let counted = [
            ("ids", "elements", tokens),
            ("dweight", "rows", layout.dim(0)),
            ("dweight", "columns", layout.dim(1)),
        ];
        for (name, what, size) in counted {
            if size > MOST && !layout.is_empty() {
                let problem = text!("has {size} {what}, the CUDA backend takes {MOST}");
                return Err(Error::unsupported(OP, name, problem));
            }
        }
        let adds_nothing = p.accumulate && tokens == 0;
        Ok(Sizes {
            tokens,
            vocab: layout.dim(0),
            dim: layout.dim(1),
            writes: !layout.is_empty() && !adds_nothing,
        })
    }

    /// Tiles of a pass of the sort.
    fn tiles(&self) -> usize {
        self.tokens.div_ceil(TILE as usize)
    }

    /// Pieces of the sorted order, if a row may have so many positions that it is cut.
    fn pieces(&self) -> usize {
        match self.tokens > LONG as usize {
            true => self.tokens.div_ceil(LONG as usize),
            false => 0,
        }
    }

    /// Bits of a key, which is at most `vocab`.
    fn bits(&self) -> u32 {
        usize::BITS - self.vocab.leading_zeros()
    }

    /// Passes of the sort.
    fn passes(&self) -> u32 {
        match self.tokens {
            0 => 0,
            _ => self.bits().div_ceil(DIGIT).max(1),
        }
    }

    /// Bits below the digit of a pass. The last has the key's first bits, of which some may have been
    /// sorted by before: so many values has that digit that few keys have the same.
    fn shift(&self, pass: u32) -> u32 {
        match pass + 1 < self.passes() {
            true => pass * DIGIT,
            false => self.bits().saturating_sub(DIGIT),
        }
    }

    /// Bytes from the start of the workspace to each of its lists, and of all.
    fn lists(&self) -> ([usize; LISTS], usize) {
        let word = size_of::<u32>();
        let lists = [
            self.tokens * word,
            self.tokens * word,
            self.tokens * word,
            self.tokens * word,
            self.passes() as usize * self.tiles() * BINS as usize * word,
            (BINS as usize + 1) * word,
            self.pieces() * 2 * self.dim * size_of::<f32>(),
        ];
        let mut end = 0;
        let starts = lists.map(|size| {
            let start = end;
            end += size.next_multiple_of(VECTOR);
            start
        });
        (starts, end)
    }
}

/// Keys and positions twice, counts, bounds of the last digit and partial sums.
const LISTS: usize = 7;

impl problem::Plan for Plan<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn needed(&self) -> usize {
        match self.sizes.writes {
            true => self.sizes.lists().1,
            false => 0,
        }
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        if !self.sizes.writes {
            return Ok(());
        }
        let launch = Launch::new(self, scratch);
        let sorted = launch.sort(stream)?;
        launch.sum(sorted, stream)
    }
}

/// The launches of a plan.
struct Launch<'a> {
    plan: &'a Plan<'a>,
    /// Addresses of the workspace's lists.
    lists: [u64; LISTS],
    /// What all launches are told.
    common: Arguments,
    /// Elements per access.
    width: usize,
}

impl<'a> Launch<'a> {
    fn new(plan: &'a Plan<'a>, scratch: Scratch) -> Self {
        let (p, sizes) = (&plan.problem, plan.sizes);
        let start = scratch.ptr.addr();
        let (offsets, _) = sizes.lists();
        let lists = offsets.map(|offset| (start + offset) as u64);
        let rows = Rows::of_dims(p.ids.layout.rank(), [&p.ids.layout, &p.dout.layout]);
        let vector = VECTOR / p.dout.dtype.size().max(p.dweight.dtype.size());
        let fits = sizes.dim.is_multiple_of(vector)
            && p.dweight.layout.stride(0).is_multiple_of(vector)
            && rows.aligned_to_of(1, vector)
            && is_aligned(&p.dout, vector)
            && is_aligned(&p.dweight, vector);
        let width = if fits { vector } else { 1 };
        let (dims, strides) = rows.dims();
        let [_, size_1, size_2, size_3, size_4] = dims.map(|size| Divisor::new(size.max(1)));
        let ids = strides.map(|[ids, _]| ids as u64);
        let dout = strides.map(|[_, dout]| (dout / width) as u64);
        let [_, _, _, _, counts, bounds, partials] = lists;
        let common = Arguments {
            dout: p.dout.ptr.addr() as u64,
            ids: p.ids.ptr.addr() as u64,
            ids_i64: p.ids.ptr.addr() as u64,
            counts,
            next_counts: counts,
            bounds,
            partials,
            out: p.dweight.ptr.addr() as u64,
            tokens: sizes.tokens as u32,
            vocab: sizes.vocab as u32,
            begin: p.slice.begin as u64,
            passes: sizes.passes(),
            tiles: sizes.tiles() as u32,
            pieces: sizes.pieces() as u32,
            wide_ids: u32::from(p.ids.dtype == DType::I64),
            padding: p.padding_idx.map_or(u32::MAX, |row| row as u32),
            accumulate: u32::from(p.accumulate),
            length: (sizes.dim / width) as u32,
            out_stride: (p.dweight.layout.stride(0) / width) as u64,
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            size_3: size_3.size,
            size_3_multiplier: size_3.multiplier,
            size_3_shift: size_3.shift,
            size_4: size_4.size,
            size_4_multiplier: size_4.multiplier,
            size_4_shift: size_4.shift,
            first_0: ids[0],
            first_1: ids[1],
            first_2: ids[2],
            first_3: ids[3],
            first_4: ids[4],
            second_0: dout[0],
            second_1: dout[1],
            second_2: dout[2],
            second_3: dout[3],
            second_4: dout[4],
            ..Arguments::ZERO
        };
        Launch {
            plan,
            lists,
            common,
            width,
        }
    }

    fn queue(
        &self,
        kind: Kind,
        grid: [usize; 2],
        arguments: &Arguments,
        stream: Stream,
    ) -> Result<()> {
        let (cuda, p) = (self.plan.cuda, &self.plan.problem);
        let sums = [Kind::Rows, Kind::Joins].contains(&kind);
        let (dtype, out) = (p.dout.dtype as u32, p.dweight.dtype as u32);
        let choices = match sums {
            true => [kind.code(), dtype, out, self.width as u32],
            false => [kind.code(), 0, 0, 1],
        };
        let kernel = cuda.embedding.backward.get(choices)?;
        let grid = [grid[0] as u32, grid[1] as u32, 1];
        // SAFETY: the problem was checked: its tensors have the rows that the arguments describe,
        // and the workspace the lists; ids outside the table are seen to by the kernels.
        unsafe { cuda.launch_grid(OP, kernel, grid, arguments, stream) }
    }

    /// Sorts positions by id. Gives the list of keys, behind which that of positions is.
    fn sort(&self, stream: Stream) -> Result<usize> {
        let sizes = self.plan.sizes;
        let (mut from, mut to) = (2, 0);
        for pass in 0..sizes.passes() {
            let arguments = Arguments {
                keys_in: self.lists[from],
                positions_in: self.lists[from + 1],
                keys_out: self.lists[to],
                positions_out: self.lists[to + 1],
                shift: sizes.shift(pass),
                next_shift: sizes.shift(pass + 1),
                pass,
                ..self.common
            };
            if pass == 0 {
                self.queue(Kind::Count, [sizes.tiles(), 1], &arguments, stream)?;
            }
            self.queue(Kind::Scatter, [sizes.tiles(), 1], &arguments, stream)?;
            (from, to) = (to, from);
        }
        Ok(from)
    }

    /// Sums the rows over what was sorted, and zeroes those that have no positions.
    fn sum(&self, sorted: usize, stream: Stream) -> Result<()> {
        let sizes = self.plan.sizes;
        let at_a_time = (THREADS as usize / (sizes.dim / self.width)).max(1);
        let windows = sizes.tokens.div_ceil(at_a_time * ROUNDS as usize);
        let arguments = Arguments {
            keys_in: self.lists[sorted],
            positions_in: self.lists[sorted + 1],
            shift: sizes.shift(sizes.passes().saturating_sub(1)),
            windows: windows as u32,
            ..self.common
        };
        let written = match self.plan.problem.accumulate {
            true => 0,
            false => sizes.vocab.div_ceil(ROWS as usize),
        };
        let pieces = sizes.pieces();
        let blocks = 2 * pieces + windows + written;
        self.queue(Kind::Rows, [blocks, 1], &arguments, stream)?;
        if pieces > 0 {
            let groups = (sizes.dim / self.width).div_ceil(COLUMNS as usize);
            self.queue(Kind::Joins, [pieces, groups], &arguments, stream)?;
        }
        Ok(())
    }
}
