//! Quantisation on the GPU: a launch where rows or groups have scales. Where all share one, rows give
//! their part of it to the workspace, a block makes the scale of these, and codes follow;
//! [`Rule::Threshold`] needs the first two twice.

use contract::quantize::{Codes, HELD, Kind};

use super::device::Resources;
use super::images::quantize::Arguments;
use super::rows::{Launch, Rows};
use super::table::Table;
use super::{Cuda, VECTOR, check_blocks, is_aligned};
use crate::backend::{Implementation, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;
use crate::problem::quantize::{Problem, Rule, Scope};
use crate::problem::{self, Plans};
use crate::tensor::{RawTensor, Scratch};

const OP: &str = "quantize";

/// What queues roundings.
pub(super) struct Kernels {
    /// By kind, dtype of x, and codes.
    table: Table<Arguments, 3>,
    /// Warps that the device runs at once of kernels whose threads hold one group.
    held: usize,
    /// And of those whose threads hold one after another.
    in_turn: usize,
}

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    let table = Table::<Arguments, 3>::new(OP, resources, |c| [c.kind, c.dtype, c.codes])?;
    let at_once = |kind: Kind| {
        let mut least = usize::MAX;
        for &dtype in DType::FLOATS {
            let kernel = table.get([kind.code(), dtype as u32, Codes::I8.code()])?;
            least = least.min(WARPS * resources.resident_blocks(kernel)?.max(1));
        }
        Ok(least)
    };
    let (held, in_turn) = (at_once(Kind::Codes)?, at_once(Kind::InTurn)?);
    Ok(Kernels {
        table,
        held,
        in_turn,
    })
}

/// Elements above which a group that is not held has a block of its own.
const LONG: usize = 2048;

/// Groups of a block where each has a warp.
const WARPS: usize = 8;

/// Who rounds a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    kind: Kind,
    /// Whether threads hold it, and read it once.
    held: bool,
    warps: usize,
}

/// Who holds groups of so many vectors, if all threads of a block can: the fewest warps that keep
/// the device busy, because warps wait for each other. Threads that have many vectors need more
/// others beside them. Groups that cannot all be held at once are held in turn. `held` and `in_turn`:
/// as in [`Kernels`].
fn share_of_held(vectors: usize, groups: usize, held: usize, in_turn: usize) -> Option<Share> {
    [1, 2, 4, WARPS].into_iter().find_map(|warps| {
        let of_thread = vectors.div_ceil(32 * warps);
        let all = groups.saturating_mul(warps);
        let busy = if of_thread > 5 { in_turn } else { in_turn / 2 };
        let is_enough = of_thread <= 1 || warps == WARPS || all >= busy;
        (of_thread <= HELD as usize && is_enough).then_some(Share {
            kind: if all <= held {
                Kind::Codes
            } else {
                Kind::InTurn
            },
            held: true,
            warps,
        })
    })
}

/// Bytes that a row, and all together, have in the workspace.
const FOUND: usize = 2 * size_of::<f32>();

/// Where rows of codes of 8 bits go that are multiplied next.
pub(super) struct Rounded {
    /// Codes, a multiple of 16 bytes of each row, of which those behind the last are zeros.
    pub codes: *mut u8,
    /// Bytes from row to row.
    pub stride: usize,
    /// f32, one for each row.
    pub scales: *mut u8,
    /// i32, one for each row.
    pub sums: *mut u8,
}

/// Queues the rounding of equally spaced rows, `[rows, k]`, as [`Rule::AbsMax`] does it.
pub(super) fn round_rows(
    cuda: &Cuda,
    op: &'static str,
    x: &RawTensor,
    to: &Rounded,
    stream: Stream,
) -> Result<()> {
    let (rows, k) = (x.layout.dim(0), x.layout.dim(1));
    let of_rows = |ptr, dtype| -> Result<RawTensor> {
        Ok(RawTensor {
            ptr,
            dtype,
            layout: Layout::contiguous(&[rows])?,
        })
    };
    let problem = Problem {
        x: *x,
        out: RawTensor {
            ptr: to.codes,
            dtype: DType::I8,
            layout: Layout::strided(&[rows, k], &[to.stride, 1])?,
        },
        scale: of_rows(to.scales, DType::F32)?,
        sum: Some(of_rows(to.sums, DType::I32)?),
        rule: Rule::AbsMax,
        scope: Scope::Groups(1),
    };
    let rounding = || {
        let plan = cuda.plan(problem)?;
        let arguments = Arguments {
            padded: to.stride as u32,
            ..plan.arguments()
        };
        plan.queue_rows(plan.share().kind, &arguments, stream)
    };
    rounding().map_err(|error: Error| error.within(op))
}

/// Codes that wait to be queued.
pub(crate) struct Plan<'a> {
    cuda: &'a Cuda,
    problem: Problem,
    /// Of `x` and of the output.
    rows: Rows<2>,
}

impl Plans<Problem> for Cuda {
    type Plan<'a> = Plan<'a>;

    fn plan(&self, problem: Problem) -> Result<Plan<'_>> {
        let rows = Rows::new([&problem.x.layout, &problem.out.layout]);
        let plan = Plan {
            cuda: self,
            problem,
            rows,
        };
        let num_rows = problem.x.layout.num_rows();
        check_blocks(OP, "x", num_rows.saturating_mul(plan.groups()))?;
        if num_rows > i32::MAX as usize {
            let problem = text!("has {num_rows} rows, the CUDA backend takes {}", i32::MAX);
            return Err(Error::unsupported(OP, "x", problem));
        }
        Ok(plan)
    }
}

impl problem::Plan for Plan<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn needed(&self) -> usize {
        match self.problem.scope {
            Scope::Tensor => (self.problem.x.layout.num_rows() + 1) * FOUND,
            Scope::Groups(_) => 0,
        }
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        if self.problem.scope == Scope::Tensor {
            let start = scratch.ptr.addr() as u64;
            let arguments = Arguments {
                shared: start,
                rows_found: start + FOUND as u64,
                ..self.arguments()
            };
            self.share_scale(&arguments, stream)?;
            return self.queue_rows(Kind::Codes, &arguments, stream);
        }
        self.queue_rows(self.share().kind, &self.arguments(), stream)
    }
}

impl Plan<'_> {
    fn codes(&self) -> Codes {
        match self.problem.out.dtype {
            DType::Ternary => Codes::Ternary,
            DType::F8E4M3 => Codes::E4m3,
            _ => Codes::I8,
        }
    }

    /// Groups of a row.
    fn groups(&self) -> usize {
        match self.problem.scope {
            Scope::Tensor => 1,
            Scope::Groups(groups) => groups,
        }
    }

    fn length(&self) -> usize {
        let layout = &self.problem.x.layout;
        layout.dim(layout.rank().saturating_sub(1)) / self.groups().max(1)
    }

    /// Elements of a vector.
    fn width(&self) -> usize {
        VECTOR / self.problem.x.dtype.size()
    }

    /// Whether groups are vectors, and codes of 8 bits are written as many at once.
    fn are_vectors(&self) -> bool {
        let (p, width) = (&self.problem, self.width());
        self.length().is_multiple_of(width)
            && self.rows.aligned_to(width)
            && is_aligned(&p.x, width)
            && p.out.ptr.addr().is_multiple_of(width)
    }

    fn share(&self) -> Share {
        let p = &self.problem;
        let kernels = &self.cuda.quantize;
        let may_hold = self.are_vectors()
            && self.codes() == Codes::I8
            && p.rule == Rule::AbsMax
            && p.scope != Scope::Tensor;
        let vectors = self.length() / self.width();
        let groups = p.x.layout.num_rows().saturating_mul(self.groups());
        let share = share_of_held(vectors, groups, kernels.held, kernels.in_turn);
        share.filter(|_| may_hold).unwrap_or(Share {
            kind: Kind::Codes,
            held: false,
            warps: if self.length() > LONG { WARPS } else { 1 },
        })
    }

    /// What all launches are told.
    fn arguments(&self) -> Arguments {
        let p = &self.problem;
        let (length, share) = (self.length(), self.share());
        Arguments {
            scale: p.scale.ptr.addr() as u64,
            sum: p.sum.map_or(0, |sum| sum.ptr.addr() as u64),
            num_elements: p.x.layout.num_elements() as u64,
            groups: self.groups() as u32,
            length: length as u32,
            padded: length as u32,
            rule: p.rule as u32,
            vectors: u32::from(self.are_vectors()),
            warps: share.warps as u32,
            held: u32::from(share.held),
            ..Arguments::ZERO
        }
    }

    /// Queues what makes the scale that all share.
    fn share_scale(&self, common: &Arguments, stream: Stream) -> Result<()> {
        let codes = self.codes().code();
        let kernel = self
            .cuda
            .quantize
            .table
            .get([Kind::Scale.code(), 0, codes])?;
        let passes = if self.problem.rule == Rule::Threshold {
            2
        } else {
            1
        };
        for second in 0..passes {
            let arguments = Arguments { second, ..*common };
            self.queue_rows(Kind::Rows, &arguments, stream)?;
            let arguments = Arguments {
                num_rows: self.problem.x.layout.num_rows() as u32,
                ..arguments
            };
            // SAFETY: the workspace has what each row found, and the scale is of one element.
            unsafe { self.cuda.launch(OP, kernel, 1, &arguments, stream) }?;
        }
        Ok(())
    }

    /// Queues what each row has, for its groups or as a whole.
    fn queue_rows(&self, kind: Kind, common: &Arguments, stream: Stream) -> Result<()> {
        let p = &self.problem;
        let codes = match kind {
            Kind::Rows => 0,
            _ => self.codes().code(),
        };
        let choices = [kind.code(), p.x.dtype as u32, codes];
        let kernel = self.cuda.quantize.table.get(choices)?;
        let mut first_row = 0;
        for launch in self.rows.launches() {
            let groups = launch.num_rows() * self.groups();
            let per_block = WARPS / common.warps as usize;
            let mut blocks = check_blocks(OP, "x", groups.div_ceil(per_block))?;
            if blocks == 0 {
                continue;
            }
            if kind == Kind::InTurn {
                blocks = blocks.min((self.cuda.quantize.in_turn / WARPS) as u32);
            }
            let arguments = self.of_launch(common, &launch, first_row);
            first_row += launch.num_rows();
            // SAFETY: the problem was checked: its tensors have the rows that the arguments describe,
            // and the workspace a place for each.
            unsafe { self.cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
        }
        Ok(())
    }

    fn of_launch(&self, common: &Arguments, launch: &Launch<2>, first_row: usize) -> Arguments {
        let p = &self.problem;
        let [size_1, size_2] = launch.divisors();
        let x = |dim: usize| (launch.strides[dim][0] * p.x.dtype.size()) as i64;
        let out = |dim: usize| p.out.dtype.row_bytes(launch.strides[dim][1]) as i64;
        Arguments {
            x: (p.x.ptr.addr() + launch.offsets[0] * p.x.dtype.size()) as u64,
            out: (p.out.ptr.addr() + p.out.dtype.row_bytes(launch.offsets[1])) as u64,
            x_0: x(0),
            x_1: x(1),
            x_2: x(2),
            out_0: out(0),
            out_1: out(1),
            out_2: out(2),
            num_rows: launch.num_rows() as u32,
            first_row: first_row as u32,
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            ..*common
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Kind, share_of_held};

    #[test]
    fn groups_have_the_fewest_warps_that_keep_the_device_busy() {
        // Of an H200: four and six blocks of eight warps of a multiprocessor.
        let share = |length: usize, groups| share_of_held(length / 8, groups, 4224, 6336);
        for (length, groups, warps, kind) in [
            // Few rows: all threads that have a vector.
            (256, 1, 1, Kind::Codes),
            (512, 1, 2, Kind::Codes),
            (2560, 16, 8, Kind::Codes),
            (2048, 512, 8, Kind::Codes),
            // More: fewer, of which each has more.
            (1024, 4096, 1, Kind::Codes),
            (2560, 1024, 4, Kind::Codes),
            (2048, 4096, 2, Kind::InTurn),
            (2048, 8192, 1, Kind::InTurn),
            (2560, 4096, 2, Kind::InTurn),
            (4096, 2048, 4, Kind::InTurn),
            (4096, 4096, 2, Kind::InTurn),
            (8192, 1024, 8, Kind::InTurn),
            (8192, 4096, 4, Kind::InTurn),
            // As many as it takes to hold one.
            (14336, 512, 8, Kind::Codes),
            (14336, 8192, 8, Kind::InTurn),
            (16384, 1, 8, Kind::Codes),
            (16384, usize::MAX, 8, Kind::InTurn),
        ] {
            let found = share(length, groups).map(|share| (share.warps, share.kind));
            assert_eq!(found, Some((warps, kind)), "{length} {groups}");
        }
        assert_eq!(share(16392, 8192), None);
    }
}
