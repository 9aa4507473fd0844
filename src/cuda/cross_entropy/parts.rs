//! Cross-entropy of logits whose columns ranks divide, on the GPU: a launch before ranks exchange what
//! their columns come to, and one behind.

use super::{OP, check_tokens};
use crate::backend::Stream;
use crate::cuda::device::Resources;
use crate::cuda::images::{cross_entropy_part, cross_entropy_whole};
use crate::cuda::rows::Rows;
use crate::cuda::table::Table;
use crate::cuda::{Cuda, Run, VECTOR, check_blocks, is_aligned};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::cross_entropy::{Part, Problem, SUMS, Whole};
use crate::tensor::RawTensor;

const _: () = assert!(SUMS == contract::cross_entropy::SUMS as usize);

/// By dtype and elements per access.
pub(super) struct Kernels {
    part: Table<cross_entropy_part::Arguments, 2>,
    whole: Table<cross_entropy_whole::Arguments, 2>,
}

impl Kernels {
    pub fn new(resources: &Resources) -> Result<Kernels> {
        Ok(Kernels {
            part: Table::<cross_entropy_part::Arguments, 2>::new(OP, resources, |c| {
                [c.dtype, c.width]
            })?,
            whole: Table::<cross_entropy_whole::Arguments, 2>::new(OP, resources, |c| {
                [c.dtype, c.width]
            })?,
        })
    }
}

/// Logits and targets, both contiguous.
fn rows(p: &Problem) -> Rows<2> {
    Rows::of_dims(
        p.targets.layout.rank(),
        [&p.logits.layout, &p.targets.layout],
    )
}

fn check(p: &Problem) -> Result<()> {
    check_tokens("targets", p.num_tokens())?;
    check_blocks(OP, "logits", p.num_tokens())?;
    if p.vocab() > i32::MAX as usize {
        let (columns, most) = (p.vocab(), i32::MAX);
        let problem = text!("has {columns} columns, the CUDA backend takes {most}");
        return Err(Error::unsupported(OP, "logits", problem));
    }
    Ok(())
}

/// Elements per access.
fn width(p: &Problem) -> usize {
    let vector = VECTOR / p.logits.dtype.size();
    let fits = p.vocab().is_multiple_of(vector) && is_aligned(&p.logits, vector);
    if fits { vector } else { 1 }
}

fn address(t: &RawTensor) -> u64 {
    t.ptr.addr() as u64
}

/// The fields that both kernels' arguments have.
macro_rules! arguments {
    ($image:ident, $p:expr, $width:expr, $launch:expr, { $($more:tt)* }) => {{
        let [size_1, size_2] = $launch.divisors();
        let stride = |dim: usize| ($launch.strides[dim][0] / $width) as u64;
        $image::Arguments {
            logits: address(&$p.logits),
            targets: address(&$p.targets),
            targets_i64: address(&$p.targets),
            length: ($p.vocab() / $width) as u32,
            wide_targets: u32::from($p.targets.dtype == DType::I64),
            ignore_index: $p.ignore_index,
            softcap: $p.softcap,
            size_1: size_1.size,
            size_1_multiplier: size_1.multiplier,
            size_1_shift: size_1.shift,
            size_2: size_2.size,
            size_2_multiplier: size_2.multiplier,
            size_2_shift: size_2.shift,
            logits_0: stride(0),
            logits_1: stride(1),
            logits_2: stride(2),
            targets_0: $launch.strides[0][1] as u64,
            targets_1: $launch.strides[1][1] as u64,
            targets_2: $launch.strides[2][1] as u64,
            $($more)*
            ..$image::Arguments::ZERO
        }
    }};
}

impl Run for Part {
    fn check(&self) -> Result<()> {
        check(&self.of)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let (p, width) = (&self.of, width(&self.of));
        if p.num_tokens() == 0 {
            return Ok(());
        }
        let kernels = &cuda.cross_entropy.parts.part;
        let kernel = kernels.get([p.logits.dtype as u32, width as u32])?;
        // Contiguous rows are of one launch.
        for launch in rows(p).launches().take(1) {
            let arguments = arguments!(cross_entropy_part, p, width, launch, {
                plain: address(&p.logits),
                sums: address(&self.sums),
                begin: self.columns.begin as u64,
            });
            let blocks = check_blocks(OP, "logits", launch.num_rows())?;
            // SAFETY: the problem was checked: its tensors have the rows that the arguments describe.
            unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
        }
        Ok(())
    }
}

impl Run for Whole {
    fn check(&self) -> Result<()> {
        check(&self.of)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let (p, width) = (&self.of, width(&self.of));
        if p.num_tokens() == 0 {
            return Ok(());
        }
        let optional = |t: &Option<RawTensor>| t.as_ref().map_or(0, address);
        let kernels = &cuda.cross_entropy.parts.whole;
        let kernel = kernels.get([p.logits.dtype as u32, width as u32])?;
        for launch in rows(p).launches().take(1) {
            let arguments = arguments!(cross_entropy_whole, p, width, launch, {
                read: address(&p.logits),
                sums: address(&self.sums),
                losses: optional(&p.losses),
                lses: optional(&p.lse),
                dloss: optional(&p.dloss),
                denominator: optional(&p.denominator),
                label_smoothing: p.label_smoothing,
                spread: p.label_smoothing / self.columns.vocab as f32,
                z_loss: p.z_loss,
                has_dlogits: u32::from(p.dlogits.is_some()),
                has_losses: u32::from(p.losses.is_some()),
                has_lse: u32::from(p.lse.is_some()),
                has_dloss: u32::from(p.dloss.is_some()),
                has_denominator: u32::from(p.denominator.is_some()),
                begin: self.columns.begin as u64,
                vocab: self.columns.vocab as u64,
                ranks: self.ranks as u32,
                tokens: p.num_tokens() as u32,
            });
            let blocks = check_blocks(OP, "logits", launch.num_rows())?;
            // SAFETY: as above.
            unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }?;
        }
        Ok(())
    }
}
