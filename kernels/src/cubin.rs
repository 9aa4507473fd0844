//! What can be read from compiled machine code: variables that it exports, and how its instructions are arranged.

use object::read::elf::ElfFile64;
use object::{Endianness, Object, ObjectSection, ObjectSymbol};
use serde::{Deserialize, Serialize};

/// The machine code of one translation unit.
pub struct Cubin<'a> {
    file: ElfFile64<'a, Endianness>,
}

/// How a kernel that multiplies matrices by wgmma came out. That runs at full speed only in unbroken groups, with operand
/// descriptors that stay in uniform registers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wgmma {
    /// wgmma instructions.
    pub count: u32,
    /// Waits for them; ptxas adds some where it gives up to overlap them.
    pub waits: u32,
    /// Moves into uniform registers between two of a group: descriptors that are put together anew.
    pub descriptors_moved: u32,
    /// Whether registers are handed from producer to consumers.
    pub hands_registers_over: bool,
    /// Instructions in all.
    pub instructions: u32,
}

/// How a kernel that has boxes copied by the copy engine (TMA) came out. Where the compiler cannot tell that a warp is
/// whole, and that what it names a box by is alike in all lanes, it issues a copy in a loop over the lanes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boxes {
    /// Instructions that copy a box.
    pub copies: u32,
    /// Those in such a loop.
    pub by_lanes: u32,
}

// Operation codes of sm_90: the low bits of an instruction's 128.
const OPCODE: u64 = 0xfff;
/// Without the bits that tell where the operands come from.
const FORM: u64 = 0x1ff;
/// wgmma of floats, and of integers.
const GMMA: [u64; 2] = [0x1f0, 0x1f1];
const R2UR: u64 = 0x0ca;
const WARPGROUP: u64 = 0x9c5;
/// Of WARPGROUP: wait rather than begin.
const DEPBAR: u64 = 1 << 47;
const USETMAXREG: u64 = 0x9c8;
const UTMALDG: u64 = 0x1b4;
const BRA: u64 = 0x947;
/// Of BRA, in its upper half: if any lane is to, which ends a loop over lanes.
const ANY: u64 = 1 << 20;

/// wgmma closer than this are of one group.
const GROUP: usize = 12;

impl<'a> Cubin<'a> {
    /// Reads an image of one architecture.
    ///
    /// # Errors
    /// It is none.
    pub fn parse(bytes: &'a [u8]) -> Result<Cubin<'a>, object::Error> {
        ElfFile64::parse(bytes).map(|file| Cubin { file })
    }

    /// The words of an exported variable.
    pub fn variable(&self, name: &str) -> Option<Vec<u32>> {
        let symbol = self.file.symbols().find(|s| s.name() == Ok(name))?;
        let section = self.file.section_by_index(symbol.section_index()?).ok()?;
        let at = symbol.address().checked_sub(section.address())? as usize;
        let bytes = section
            .data()
            .ok()?
            .get(at..)?
            .get(..symbol.size() as usize)?;
        let words = bytes.chunks_exact(4);
        Some(
            words
                .map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]]))
                .collect(),
        )
    }

    /// The names of the kernels.
    pub fn kernels(&self) -> Vec<String> {
        let sections = self.file.sections();
        let mut names: Vec<_> = sections
            .filter_map(|s| Some(s.name().ok()?.strip_prefix(".text.")?.to_string()))
            .collect();
        names.sort();
        names
    }

    /// The instructions of a kernel, their lower halves first.
    fn instructions(&self, kernel: &str) -> Option<impl Iterator<Item = [u64; 2]>> {
        let section = self.file.section_by_name(&format!(".text.{kernel}"))?;
        let (words, _) = section.data().ok()?.as_chunks::<8>();
        let (pairs, _) = words.as_chunks::<2>();
        Some(pairs.iter().map(|pair| pair.map(u64::from_le_bytes)))
    }

    /// How a kernel's boxes are copied; `None` if it has none.
    pub fn boxes(&self, kernel: &str) -> Option<Boxes> {
        let mut found = Boxes::default();
        let mut since = usize::MAX;
        for [head, upper] in self.instructions(kernel)? {
            since = since.saturating_add(1);
            if head & FORM == UTMALDG {
                found.copies += 1;
                since = 0;
            } else if head & OPCODE == BRA && upper & ANY != 0 && since <= 2 {
                found.by_lanes += 1;
            }
        }
        (found.copies > 0).then_some(found)
    }

    /// How a kernel's wgmma are arranged; `None` if it has none.
    pub fn wgmma(&self, kernel: &str) -> Option<Wgmma> {
        let mut found = Wgmma::default();
        // Instructions since the last wgmma, and the moves among them.
        let (mut since, mut moves) = (usize::MAX, 0);
        for [head, _] in self.instructions(kernel)? {
            found.instructions += 1;
            since = since.saturating_add(1);
            if GMMA.contains(&(head & FORM)) {
                if since < GROUP {
                    found.descriptors_moved += moves;
                }
                found.count += 1;
                (since, moves) = (0, 0);
            } else if head & FORM == R2UR {
                moves += 1;
            } else if head & OPCODE == WARPGROUP && head & DEPBAR != 0 {
                found.waits += 1;
            } else if head & OPCODE == USETMAXREG {
                found.hands_registers_over = true;
            }
        }
        (found.count > 0).then_some(found)
    }
}
