//! The order of ternary codes on the CPU: parts of the bytes, in parallel.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use crate::cpu::{Cpu, Run};
use crate::error::Result;
use crate::problem::weight_repack::{Format, Problem};
use crate::tensor::Scratch;

/// Bytes of a part. Those of a matrix are a multiple of a block's.
const PART: usize = 16 << 10;

impl Run for Problem {
    fn run(&self, cpu: &Cpu, _: Scratch) -> Result<()> {
        match self.format {
            Format::I2S => reverse(cpu, self),
        }
        if let Some(scale) = &self.scale {
            // SAFETY: the checked tensors: four bytes at any address behind the codes, and an f32.
            unsafe {
                let found = self.packed.ptr.add(self.bytes()).cast::<f32>();
                scale.ptr.cast::<f32>().write(found.read_unaligned());
            }
        }
        Ok(())
    }
}

fn reverse(cpu: &Cpu, p: &Problem) {
    let bytes = p.bytes();
    let in_place = p.packed.ptr == p.out.ptr;
    cpu.for_each_range(bytes.div_ceil(PART), PART / 4, |range| {
        let (start, end) = (range.start * PART, bytes.min(range.end * PART));
        // SAFETY: these bytes lie in the checked tensors, and no other thread has them.
        let to = unsafe { from_raw_parts_mut(p.out.ptr.add(start), end - start) };
        cpu.vectorize(
            #[inline(always)]
            || {
                if in_place {
                    to.iter_mut().for_each(|byte| *byte = reversed(*byte));
                    return;
                }
                // SAFETY: as above; what is written lies elsewhere.
                let from = unsafe { from_raw_parts(p.packed.ptr.add(start), end - start) };
                for (to, from) in to.iter_mut().zip(from) {
                    *to = reversed(*from);
                }
            },
        );
    });
}

/// The four codes of a byte the other way round.
#[inline(always)]
fn reversed(byte: u8) -> u8 {
    let pairs = byte.rotate_left(4);
    (pairs & 0x33) << 2 | pairs >> 2 & 0x33
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_change_places() {
        for byte in 0..=u8::MAX {
            let code = |byte: u8, i: u32| byte >> (2 * i) & 3;
            for i in 0..4 {
                assert_eq!(code(reversed(byte), i), code(byte, 3 - i), "{byte:#x}");
            }
        }
    }
}
