//! Quantisation on the GPU: a launch where rows or groups have scales. Where all share one, rows give
//! their part of it to the workspace, a block makes the scale of these, and codes follow;
//! [`Rule::Threshold`] needs the first two twice.

use contract::quantize::{Codes, Kind};

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

/// By kind, dtype of x, and codes.
pub(super) type Kernels = Table<Arguments, 3>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.kind, c.dtype, c.codes])
}

/// Elements above which a group has a block of its own.
const LONG: usize = 2048;

/// Groups of a block where each has a warp.
const WARPS: usize = 8;

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
        plan.queue_rows(Kind::Codes, &arguments, stream)
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
        self.queue_rows(Kind::Codes, &self.arguments(), stream)
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

    /// What all launches are told.
    fn arguments(&self) -> Arguments {
        let p = &self.problem;
        let width = VECTOR / p.x.dtype.size();
        let length = self.length();
        // Codes of 8 bits are written as words.
        let vectors = length.is_multiple_of(width)
            && self.rows.aligned_to(width)
            && is_aligned(&p.x, width)
            && p.out.ptr.addr().is_multiple_of(size_of::<u32>());
        Arguments {
            scale: p.scale.ptr.addr() as u64,
            sum: p.sum.map_or(0, |sum| sum.ptr.addr() as u64),
            num_elements: p.x.layout.num_elements() as u64,
            groups: self.groups() as u32,
            length: length as u32,
            padded: length as u32,
            rule: p.rule as u32,
            vectors: u32::from(vectors),
            warps: if length > LONG { WARPS as u32 } else { 1 },
            ..Arguments::ZERO
        }
    }

    /// Queues what makes the scale that all share.
    fn share_scale(&self, common: &Arguments, stream: Stream) -> Result<()> {
        let codes = self.codes().code();
        let kernel = self.cuda.quantize.get([Kind::Scale.code(), 0, codes])?;
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
            Kind::Codes => self.codes().code(),
            _ => 0,
        };
        let choices = [kind.code(), p.x.dtype as u32, codes];
        let kernel = self.cuda.quantize.get(choices)?;
        let mut first_row = 0;
        for launch in self.rows.launches() {
            let groups = launch.num_rows() * self.groups();
            let per_block = WARPS / common.warps as usize;
            let blocks = check_blocks(OP, "x", groups.div_ceil(per_block))?;
            if blocks == 0 {
                continue;
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
