//! Codes of ternary weights in another order.

use crate::tensor::RawTensor;

/// How a file has ternary weights. The discriminants are those of the C ABI
/// (`UNSLOTH_WEIGHT_REPACK_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Format {
    /// BitNet's I2_S, as its builds for x86 write it: the ternary dtype's blocks with the four codes
    /// of a byte from its high bits down, then the one scale, f32, in the first of 32 bytes.
    #[default]
    I2S = 0,
}

impl Format {
    /// The format with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Format> {
        [Format::I2S]
            .into_iter()
            .find(|format| *format as u32 == value)
    }

    /// Bytes behind the codes.
    pub const fn tail_bytes(self) -> usize {
        match self {
            Format::I2S => 32,
        }
    }
}

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// Bytes: the codes of `out` as `format` has them, and its tail.
    pub packed: RawTensor,
    /// Ternary, contiguous; of the same address where it takes the place of the codes.
    pub out: RawTensor,
    /// One f32.
    pub scale: Option<RawTensor>,
    pub format: Format,
}

impl Problem {
    /// Bytes of the codes.
    pub fn bytes(&self) -> usize {
        self.out.dtype.row_bytes(self.out.layout.num_elements())
    }
}
