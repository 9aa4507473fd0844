//! The order of ternary codes on the GPU.

use super::device::Resources;
use super::images::weight_repack::Arguments;
use super::table::Table;
use super::{Cuda, Run, VECTOR, check_blocks};
use crate::backend::Stream;
use crate::error::Result;
use crate::problem::weight_repack::{Format, Problem};

const OP: &str = "weight_repack";

/// By bytes per access.
pub(super) type Kernels = Table<Arguments, 1>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.width])
}

/// Bytes that the smallest block covers: one per thread and load.
const LEAST_PER_BLOCK: usize = 1024;

impl Run for Problem {
    fn check(&self) -> Result<()> {
        check_blocks(OP, "out", self.bytes().div_ceil(LEAST_PER_BLOCK)).map(drop)
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        match self.format {
            Format::I2S => forward(cuda, self, stream),
        }
    }
}

fn forward(cuda: &Cuda, p: &Problem, stream: Stream) -> Result<()> {
    let bytes = p.bytes();
    if bytes == 0 && p.scale.is_none() {
        return Ok(());
    }
    let fits = |ptr: *mut u8| ptr.addr().is_multiple_of(VECTOR);
    let width = if fits(p.packed.ptr) && fits(p.out.ptr) {
        VECTOR
    } else {
        1
    };
    let kernel = cuda.weight_repack.get([width as u32])?;
    let length = bytes / width;
    // The scale takes a block even where there are no codes.
    let blocks = length.div_ceil(kernel.choices.per_block as usize).max(1);
    let blocks = check_blocks(OP, "out", blocks)?;
    let arguments = Arguments {
        packed: p.packed.ptr.addr() as u64,
        tail: (p.packed.ptr.addr() + bytes) as u64,
        out: p.out.ptr.addr() as u64,
        scale: p.scale.map_or(0, |scale| scale.ptr.addr() as u64),
        length: length as u64,
        has_scale: u32::from(p.scale.is_some()),
        ..Arguments::ZERO
    };
    // SAFETY: the problem was checked: its tensors have the bytes that the arguments describe.
    unsafe { cuda.launch(OP, kernel, blocks, &arguments, stream) }
}
