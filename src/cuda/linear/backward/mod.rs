//! Gradients of linear layers on the GPU. Products go to cuBLASLt where there is one that takes
//! their dtypes and strides, without anything being transposed, and to kernels of this library
//! otherwise. What adds to f32 gradients does so in the product's epilogue. The bias takes a pass
//! over `dout`: of many rows, parts are summed into the workspace first.

mod bias;
mod product;

use contract::linear_backward::{Kind, TILE};

use crate::backend::{Implementation, Stream};
use crate::cuda::Cuda;
use crate::cuda::device::Resources;
use crate::cuda::images::linear_backward::Arguments;
use crate::cuda::rows::Divisor;
use crate::cuda::table::Table;
use crate::error::{Error, Result, text};
use crate::layout::MAX_RANK;
use crate::problem::linear::Backward;
use crate::problem::{self, Plans};
use crate::tensor::{RawTensor, Scratch};
use bias::Bias;
use product::Product;

const OP: &str = "linear_backward";

/// Row dimensions that kernels take: all that there may be.
const DIMS: usize = MAX_RANK - 1;

/// By kind, the dtypes of `dout`, of what it is multiplied by and of the gradient, and elements per
/// access.
pub(in crate::cuda) type Kernels = Table<Arguments, 5>;

pub(in crate::cuda) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.kind, c.dtype, c.by, c.out, c.width])
}

/// Gradients that wait to be queued.
pub(crate) struct Plan<'a> {
    cuda: &'a Cuda,
    problem: Backward,
}

impl Plans<Backward> for Cuda {
    type Plan<'a> = Plan<'a>;

    fn plan(&self, problem: Backward) -> Result<Plan<'_>> {
        fits(&problem)?;
        Ok(Plan {
            cuda: self,
            problem,
        })
    }
}

/// Whether sizes are within what kernels count in 32 bits, and tiles of columns within a grid.
fn fits(p: &Backward) -> Result<()> {
    const MOST: usize = i32::MAX as usize;
    let dout = &p.dout.layout;
    let last = dout.rank().saturating_sub(1);
    let columns = |t: &RawTensor| t.layout.dim(t.layout.rank().saturating_sub(1));
    let by = p.dx.iter().chain(&p.dweight);
    let in_features = by.map(|g| columns(&g.out)).max().unwrap_or(0);
    let most_columns = crate::cuda::linear::MAX_GRID_Y * TILE as usize;
    let sizes = [
        ("dout", "rows", dout.num_rows(), MOST),
        ("dout", "columns", dout.dim(last), MOST),
        (
            if p.dx.is_some() { "dx" } else { "dweight" },
            "columns",
            in_features,
            most_columns,
        ),
    ];
    for (name, what, size, most) in sizes {
        if size > most {
            let problem = text!("has {size} {what}, the CUDA backend takes {most}");
            return Err(Error::unsupported(OP, name, problem));
        }
    }
    Ok(())
}

impl Plan<'_> {
    /// The products that have elements to write.
    fn products(&self) -> impl Iterator<Item = Product<'_>> {
        let p = &self.problem;
        let dx = p.dx.as_ref().map(|g| (Kind::Input, g, p.add_dx));
        let dweight = p.dweight.as_ref().filter(|_| !self.adds_nothing());
        let dweight = dweight.map(|g| (Kind::Weight, g, p.accumulate));
        let wanted = dx.into_iter().chain(dweight);
        wanted
            .filter(|(_, gradient, _)| !gradient.out.layout.is_empty())
            .map(|(kind, gradient, adds)| Product::new(&p.dout, gradient, kind, adds))
    }

    /// Whether parameters' gradients stay as they are: there are no rows.
    fn adds_nothing(&self) -> bool {
        self.problem.accumulate && self.problem.dout.layout.num_rows() == 0
    }

    /// The bias's gradient, where it has elements.
    fn bias(&self) -> Option<Bias<'_>> {
        let p = &self.problem;
        let wanted = |out: &&RawTensor| !out.layout.is_empty() && !self.adds_nothing();
        let out = p.dbias.as_ref().filter(wanted)?;
        Some(Bias::new(&p.dout, out, p.accumulate))
    }
}

impl problem::Plan for Plan<'_> {
    fn implementation(&self) -> Implementation {
        Implementation::Cuda
    }

    fn needed(&self) -> usize {
        self.bias().map_or(0, |bias| bias.needed())
    }

    fn useful(&self) -> Result<usize> {
        // One after the other they use the same memory.
        self.products().try_fold(self.needed(), |most, product| {
            Ok(most.max(product.workspace_size(self.cuda)?))
        })
    }

    fn launch(&self, scratch: Scratch, stream: Stream) -> Result<()> {
        if let Some(bias) = self.bias() {
            bias.queue(self.cuda, scratch, stream)?;
        }
        self.products()
            .try_for_each(|product| product.queue(self.cuda, scratch, stream))
    }
}

/// The arguments that say where rows are, those of `dout` in accesses of `width` elements.
fn with_rows((sizes, strides): ([usize; DIMS], [[usize; 2]; DIMS]), width: usize) -> Arguments {
    let [_, size_1, size_2, size_3, size_4] = sizes.map(|size| Divisor::new(size.max(1)));
    let dout = strides.map(|[dout, _]| (dout / width) as u64);
    let other = strides.map(|[_, other]| other as u64);
    Arguments {
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
        first_0: dout[0],
        first_1: dout[1],
        first_2: dout[2],
        first_3: dout[3],
        first_4: dout[4],
        second_0: other[0],
        second_1: other[1],
        second_2: other[2],
        second_3: other[3],
        second_4: other[4],
        ..Arguments::ZERO
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::context::Context;
    use crate::dtype::DType;
    use crate::layout::Layout;
    use crate::memory::Buffer;
    use crate::problem::linear::Gradient;

    fn tensor(ctx: &Context, dtype: DType, layout: Layout, value: f32) -> (Buffer, RawTensor) {
        let bytes = |i: usize| {
            // Small integers, of which sums are exact.
            let v = value + (i * 2_654_435_761 % 7919 % 7) as f32 - 3.0;
            match dtype {
                DType::F16 => f16::from_f32(v).to_ne_bytes().to_vec(),
                DType::Bf16 => bf16::from_f32(v).to_ne_bytes().to_vec(),
                _ => v.to_ne_bytes().to_vec(),
            }
        };
        let mut all: Vec<u8> = (0..layout.span()).flat_map(bytes).collect();
        all.resize(all.len().next_multiple_of(4), 0);
        let words = all
            .chunks(4)
            .map(|w| i32::from_ne_bytes([w[0], w[1], w[2], w[3]]));
        let buffer = Buffer::from_slice(ctx, &words.collect::<Vec<_>>()).unwrap();
        let ptr = buffer.as_ptr();
        (buffer, RawTensor { ptr, dtype, layout })
    }

    /// With and without cuBLASLt the same gradients come out, to the bit where sums are exact.
    #[test]
    fn kernels_serve_where_there_is_no_library() {
        let Some(ctx) = crate::cuda::test_context() else {
            return;
        };
        let with = Cuda::new(OP, 0).unwrap();
        let without = Cuda::without_library(OP, 0).unwrap();
        let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
        let rows_apart = |rows: usize, last: usize| {
            let strides = [(rows / 2 + 3) * (last + 8), last + 8, 1];
            Layout::strided(&[2, rows / 2, last], &strides).unwrap()
        };
        for (dtype, gradient) in [
            (DType::F32, DType::F32),
            (DType::F16, DType::F16),
            (DType::Bf16, DType::Bf16),
            (DType::Bf16, DType::F32),
            (DType::F16, DType::F32),
        ] {
            for (rows, n, k) in [(16, 8, 40), (130, 72, 200), (64, 33, 31), (700, 96, 512)] {
                for apart in [false, true] {
                    let of_rows = |last| match apart {
                        false => contiguous(&[rows, last]),
                        true => rows_apart(rows, last),
                    };
                    for accumulate in [false, gradient == DType::F32] {
                        let (_d, dout) = tensor(&ctx, dtype, of_rows(n), 0.0);
                        let (_x, x) = tensor(&ctx, dtype, of_rows(k), 1.0);
                        let (_w, weight) = tensor(&ctx, dtype, contiguous(&[n, k]), 0.0);
                        let results = [&with, &without].map(|cuda| {
                            let (dx, of_x) = tensor(&ctx, dtype, of_rows(k), 5.0);
                            let (dw, of_w) = tensor(&ctx, gradient, contiguous(&[n, k]), 5.0);
                            let problem = Backward {
                                dout,
                                dx: Some(Gradient {
                                    by: weight,
                                    out: of_x,
                                }),
                                dweight: Some(Gradient { by: x, out: of_w }),
                                dbias: None,
                                add_dx: accumulate,
                                accumulate,
                            };
                            let plan = cuda.plan(problem).unwrap();
                            problem::Plan::launch(&plan, Scratch::NONE, Stream::DEFAULT).unwrap();
                            ctx.synchronize(Stream::DEFAULT).unwrap();
                            [dx, dw].map(|buffer| {
                                let len = buffer.size() / 4;
                                buffer.to_vec::<i32>(0, len, Stream::DEFAULT).unwrap()
                            })
                        });
                        assert!(
                            results[0] == results[1],
                            "{dtype} {gradient} {rows} {n} {k} {apart} {accumulate}"
                        );
                    }
                }
            }
        }
    }
}
