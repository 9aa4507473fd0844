//! The gradient of the bias: tiles of it, each summed by one block or, where there are few, in
//! parts.

use contract::attention::{BiasSum, Gradient, flag};

use super::{OP, address, any, arguments, described, one_dtype, room, statistics_size, strides};
use super::{has_strides_of, is_at, tokens};
use crate::backend::Stream;
use crate::cuda::device::{Kernel, Resources};
use crate::cuda::images::{attention_backward_any, attention_backward_bias};
use crate::cuda::table::Table;
use crate::cuda::{Cuda, check_blocks};
use crate::error::Result;
use crate::problem::attention::{Backward, Rows, ScoresGradient};

/// Blocks that keep a device busy: so many there are, if there is enough to sum. Parts take at most
/// so many tiles of workspace.
const ENOUGH: usize = 512;

pub(super) struct Kernels {
    /// By kind and dtype.
    table: Table<attention_backward_bias::Arguments, 2>,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        let choices = |c: &attention_backward_bias::Choices| [c.kind, c.dtype];
        let table = Table::<attention_backward_bias::Arguments, 2>::new(OP, resources, choices)?;
        Ok(Kernels { table })
    }
}

/// How the gradient is cut.
#[derive(Clone, Copy)]
struct Cut {
    tiles: usize,
    /// Of each tile's sums.
    parts: usize,
}

impl Cut {
    /// Into tiles of so many rows and columns.
    fn new(b: &Backward, dbias: &ScoresGradient, rows: u32, columns: u32) -> Cut {
        let p = &b.forward;
        let [batch, heads, q, k] = dbias.sizes;
        let (rows, columns) = (rows as usize, columns as usize);
        let tiles = [heads, q.div_ceil(rows), k.div_ceil(columns)];
        let tiles = tiles.into_iter().fold(batch, usize::saturating_mul);
        let summed = |size: usize, all: usize| if size == 1 { all } else { 1 };
        let sums = [
            summed(heads, p.num_heads),
            summed(q, p.max_seqlen_q.div_ceil(rows)),
        ];
        let sums = sums
            .into_iter()
            .fold(summed(batch, p.batch), usize::saturating_mul);
        let parts = ENOUGH.checked_div(tiles).unwrap_or(1);
        Cut {
            tiles,
            parts: parts.clamp(1, sums.max(1)),
        }
    }

    fn blocks(self) -> Result<u32> {
        check_blocks(OP, "dbias", self.tiles.saturating_mul(self.parts))
    }

    /// Bytes of the parts.
    fn needed(self, elements: usize) -> usize {
        match self.parts {
            1 => 0,
            parts => parts
                .saturating_mul(elements)
                .saturating_mul(size_of::<f32>()),
        }
    }
}

/// What a kernel is told of the gradient.
macro_rules! describe {
    ($a:ident, $b:expr, $sizes:expr, $to:expr) => {
        let to: Target = $to;
        $a.batch = $b.forward.batch as u32;
        [$a.size_batch, $a.size_heads, $a.size_q, $a.size_k] = $sizes.map(|size| size as u32);
        $a.dbias = to.address;
        [$a.dbias_outer, $a.dbias_head, $a.dbias_token] = to.strides.map(|stride| stride as u64);
        $a.parts = to.parts as u32;
        $a.part_stride = to.part_stride as u64;
        $a.flags |= to.flags;
    };
}

/// How it is computed.
pub(super) struct Plan<'a> {
    dbias: ScoresGradient,
    /// On tensor cores, for data at good addresses.
    best: Option<(&'a Kernel<attention_backward_bias::Arguments>, Cut)>,
    any: (&'a Kernel<attention_backward_any::Arguments>, Cut),
    join: &'a Kernel<attention_backward_bias::Arguments>,
}

/// What is read in vectors.
fn read(b: &Backward) -> [&Rows; 4] {
    let p = &b.forward;
    [&p.q, &p.k, &p.v, &b.dout]
}

impl<'a> Plan<'a> {
    pub fn new(
        kernels: &'a super::Kernels,
        b: &Backward,
        dbias: &ScoresGradient,
    ) -> Result<Plan<'a>> {
        let table = &kernels.bias.table;
        let dims = [b.forward.head_dim, b.forward.head_dim_v];
        let dtype = b.forward.q.dtype as u32;
        let serves = |kernel: &Kernel<attention_backward_bias::Arguments>| {
            let width = kernel.choices.width as usize;
            one_dtype(b)
                && dims.iter().all(|dim| dim.is_multiple_of(width))
                && read(b).iter().all(|rows| has_strides_of(rows, width))
        };
        let best = table.get([BiasSum::Tile.code(), dtype]).ok();
        let best = best.filter(|kernel| serves(kernel)).map(|kernel| {
            let choices = kernel.choices;
            (kernel, Cut::new(b, dbias, choices.rows, choices.columns))
        });
        let any = kernels.any.get(Gradient::Bias)?;
        let rows = any.choices.rows;
        let plan = Plan {
            dbias: *dbias,
            best,
            any: (any, Cut::new(b, dbias, rows, rows)),
            join: table.get([BiasSum::Join.code(), 0])?,
        };
        plan.any.1.blocks()?;
        if let Some((_, cut)) = &plan.best {
            cut.blocks()?;
        }
        Ok(plan)
    }

    fn elements(&self) -> usize {
        self.dbias.sizes.iter().product()
    }

    /// Bytes of workspace, behind the statistics.
    pub fn needed(&self) -> usize {
        let best = self
            .best
            .as_ref()
            .map_or(0, |(_, cut)| cut.needed(self.elements()));
        best.max(self.any.1.needed(self.elements()))
    }

    pub fn launch(&self, cuda: &Cuda, b: &Backward, statistics: u64, stream: Stream) -> Result<()> {
        let best = self.best.as_ref().filter(|(kernel, _)| {
            let width = kernel.choices.width as usize;
            read(b).iter().all(|rows| is_at(rows, width))
        });
        let cut = best.map_or(self.any.1, |(_, cut)| *cut);
        let blocks = cut.blocks()?;
        tracing::trace!(
            "{OP}: gradient of the bias, {}; {} parts, {blocks} blocks in all",
            if best.is_some() {
                "on tensor cores"
            } else {
                "of any dtypes"
            },
            cut.parts,
        );
        if blocks == 0 {
            return Ok(());
        }
        let of_parts = statistics + statistics_size(&b.forward) as u64;
        let to = match cut.parts {
            1 => self.whole(b),
            parts => self.in_parts(of_parts, parts),
        };
        // The safety of both: the problem was checked: its tensors have the rows and dtypes that
        // the arguments describe, as far as lengths in device memory are what the caller promises;
        // the statistics are written by what was queued before, and behind them is room for the
        // parts.
        match best {
            Some((kernel, _)) => {
                let mut a = self.inputs(b, kernel.choices.width as usize, statistics);
                describe!(a, b, self.dbias.sizes, to);
                // SAFETY: as above.
                unsafe { cuda.launch(OP, kernel, blocks, &a, stream) }?;
            }
            None => {
                let mut a = any::inputs(b, statistics);
                describe!(a, b, self.dbias.sizes, to);
                // SAFETY: as above.
                unsafe { cuda.launch(OP, self.any.0, blocks, &a, stream) }?;
            }
        }
        if cut.parts == 1 {
            return Ok(());
        }
        let threads = self.join.choices.columns as usize;
        let blocks = check_blocks(OP, "dbias", self.elements().div_ceil(threads))?;
        let mut a = self.inputs(b, 1, statistics);
        describe!(a, b, self.dbias.sizes, self.whole(b));
        a.of_parts = of_parts;
        a.parts = cut.parts as u32;
        a.part_stride = self.elements() as u64;
        // SAFETY: as above; the parts are written by what was queued before.
        unsafe { cuda.launch(OP, self.join, blocks, &a, stream) }
    }

    /// The gradient itself.
    fn whole(&self, b: &Backward) -> Target {
        let [batch, head, query, _] = self.dbias.strides;
        Target {
            address: address(self.dbias.ptr.cast_const()),
            strides: [batch, head, query],
            parts: 1,
            part_stride: 0,
            flags: if b.accumulate { flag::ACCUMULATE } else { 0 },
        }
    }

    /// Parts of its shape, one behind the other.
    fn in_parts(&self, address: u64, parts: usize) -> Target {
        let [_, heads, q, k] = self.dbias.sizes;
        Target {
            address,
            strides: [heads * q * k, q * k, k],
            parts,
            part_stride: self.elements(),
            flags: 0,
        }
    }

    fn inputs(
        &self,
        b: &Backward,
        width: usize,
        statistics: u64,
    ) -> attention_backward_bias::Arguments {
        let p = &b.forward;
        let mut a = described!(attention_backward_bias::Arguments, b, width, statistics);
        a.q = address(p.q.ptr);
        a.k = address(p.k.ptr);
        a.v = address(p.v.ptr);
        a.dout = address(b.dout.ptr);
        a
    }
}

/// Where sums are written.
struct Target {
    address: u64,
    /// Of sequences, heads and queries, in elements.
    strides: [usize; 3],
    parts: usize,
    part_stride: usize,
    flags: u32,
}
