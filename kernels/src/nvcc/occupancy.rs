//! How many blocks of a kernel a multiprocessor runs at once, by what they use; after
//! `cuda_occupancy.h` of the toolkit.

use serde::{Deserialize, Serialize};

use super::Architecture;

/// A launch, and what a multiprocessor has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Occupancy {
    /// Threads of a block.
    pub threads: u32,
    /// Its dynamic shared memory in bytes.
    pub dynamic_shared_bytes: u32,
    /// Blocks that a multiprocessor runs at once.
    pub blocks: u32,
    /// Their warps, in percent of the most that it runs.
    pub percent: u32,
}

/// What a multiprocessor has.
struct Multiprocessor {
    warps: u32,
    blocks: u32,
    shared_bytes: u32,
}

/// Registers of a multiprocessor, in so many parts; a warp has a multiple of `REGISTER_UNIT` in one.
const REGISTERS: u32 = 65_536;
const PARTS: u32 = 4;
const REGISTER_UNIT: u32 = 256;
/// Shared memory is given out in such units, and a block takes so much more than it asks for.
const SHARED_UNIT: u32 = 128;
const SHARED_RESERVED: u32 = 1024;
const WARP: u32 = 32;
/// What a block may have where it may have most. A kernel that asks for it gets as much as there is: the host parts that.
const ALL_SHARED: u32 = 227 << 10;

impl Multiprocessor {
    /// From the table of compute capabilities in the CUDA programming guide; `None` for others.
    fn of(architecture: &Architecture) -> Option<Multiprocessor> {
        let (warps, blocks, kib) = match architecture.number {
            80 => (64, 32, 164),
            86 => (48, 16, 100),
            89 => (48, 24, 100),
            90 | 100 | 103 => (64, 32, 228),
            120 | 121 => (48, 24, 100),
            _ => return None,
        };
        Some(Multiprocessor {
            warps,
            blocks,
            shared_bytes: kib << 10,
        })
    }
}

impl Occupancy {
    /// Of blocks of so many threads, each with so many registers.
    pub fn new(
        architecture: &Architecture,
        threads: u32,
        registers: u32,
        static_shared_bytes: u32,
        dynamic_shared_bytes: u32,
    ) -> Option<Occupancy> {
        let has = Multiprocessor::of(architecture)?;
        let warps = threads.div_ceil(WARP).max(1);
        let of_warp = (registers * WARP)
            .next_multiple_of(REGISTER_UNIT)
            .max(REGISTER_UNIT);
        let dynamic_shared_bytes = match dynamic_shared_bytes {
            ALL_SHARED => has.shared_bytes - SHARED_RESERVED - static_shared_bytes,
            bytes => bytes,
        };
        let by_registers = REGISTERS / PARTS / of_warp * PARTS / warps;
        let shared = (static_shared_bytes + dynamic_shared_bytes + SHARED_RESERVED)
            .next_multiple_of(SHARED_UNIT);
        let blocks = (has.warps / warps)
            .min(has.blocks)
            .min(by_registers)
            .min(has.shared_bytes / shared);
        Some(Occupancy {
            threads,
            dynamic_shared_bytes,
            blocks,
            percent: blocks * warps * 100 / has.warps,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the calculator of the toolkit has it.
    #[test]
    fn the_scarcest_decides() {
        let blocks = |number, threads, registers, shared| {
            let arch = Architecture {
                number,
                suffix: String::new(),
            };
            let occupancy = Occupancy::new(&arch, threads, registers, 0, shared);
            occupancy.map(|o| (o.blocks, o.percent))
        };
        // Warps, blocks, registers, shared memory.
        assert_eq!(blocks(90, 256, 32, 0), Some((8, 100)));
        assert_eq!(blocks(80, 32, 16, 0), Some((32, 50)));
        assert_eq!(blocks(86, 32, 16, 0), Some((16, 33)));
        assert_eq!(blocks(90, 128, 255, 0), Some((2, 12)));
        assert_eq!(blocks(90, 384, 168, 0), Some((1, 18)));
        assert_eq!(blocks(90, 128, 128, 113 << 10), Some((2, 12)));
        assert_eq!(blocks(80, 128, 128, 82 << 10), Some((1, 6)));
        assert_eq!(blocks(89, 256, 40, 99 << 10), Some((1, 16)));
        assert_eq!(blocks(999, 256, 40, 0), None);
        // All that there is, and more than there is.
        assert_eq!(blocks(90, 512, 128, ALL_SHARED), Some((1, 25)));
        assert_eq!(blocks(80, 512, 128, ALL_SHARED), Some((1, 25)));
        assert_eq!(blocks(80, 512, 128, 200 << 10), Some((0, 0)));
    }
}
