//! Weights in blocks: GGUF's formats, decoded to f32 or multiplied as integers.
//!
//! Every format comes down to the same three: a code without a sign for each weight, and for each
//! group of neighbours a scale and an offset, with `weight = scale * code + offset`. Scales and
//! offsets are exact in f32 in all formats, and so are products of scales and codes: only a sum with
//! an offset that is not a multiple of the scale rounds.

mod activations;
mod bytes;
mod dot;
mod form;
mod formats;
pub(crate) mod fused;
pub(crate) mod panel;
mod ternary;

use std::ops::Range;

use crate::cpu::Cpu;
use crate::dtype::DType;
use crate::tensor::RawTensor;
pub(crate) use activations::{Activations, Codes, Row};
pub(crate) use dot::Dot;
pub(crate) use form::{Bits, Form};
pub(crate) use formats::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
pub(crate) use ternary::{Q2_0, Tq1_0, Tq2_0};

/// Weights that are unpacked at a time: whole blocks of every format.
pub(crate) const CHUNK: usize = 2048;

/// The smallest group.
const LEAST_GROUP: usize = 16;

/// Weights of a row, unpacked. Only as much as was unpacked last is of use.
#[derive(Clone)]
#[repr(align(64))]
pub(crate) struct Chunk {
    codes: [u8; CHUNK],
    scales: [f32; CHUNK / LEAST_GROUP],
    offsets: [f32; CHUNK / LEAST_GROUP],
}

impl Chunk {
    pub const fn new() -> Chunk {
        Chunk {
            codes: [0; CHUNK],
            scales: [0.0; CHUNK / LEAST_GROUP],
            offsets: [0.0; CHUNK / LEAST_GROUP],
        }
    }

    /// Unpacks blocks, no more than [`CHUNK`] weights.
    #[inline(always)]
    pub fn unpack<F: Format>(&mut self, blocks: &[u8]) {
        let (len, bytes) = F::DTYPE.block();
        let weights = blocks.len() / bytes * len;
        let groups = weights / F::GROUP;
        F::unpack(
            blocks,
            &mut self.codes[..weights],
            &mut self.scales[..groups],
            &mut self.offsets[..groups],
        );
    }

    /// A weight, without its offset, and that.
    #[cfg(test)]
    pub fn number(&self, i: usize, group: usize) -> [f32; 2] {
        let scale = self.scales[i / group];
        [scale * f32::from(self.codes[i]), self.offsets[i / group]]
    }

    /// The weights that were unpacked.
    #[inline(always)]
    pub fn decode<F: Format>(&self, out: &mut [f32]) {
        let groups = out.chunks_exact_mut(F::GROUP);
        let codes = self.codes.chunks_exact(F::GROUP);
        let factors = self.scales.iter().zip(&self.offsets);
        for ((out, codes), (scale, offset)) in groups.zip(codes).zip(factors) {
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(*code) + offset;
            }
        }
    }
}

/// Decodes blocks of a dtype to as many weights as `out` has room for. It is compiled once, and not
/// again wherever it is used.
#[inline(never)]
pub(crate) fn decode(cpu: &Cpu, dtype: DType, blocks: &[u8], out: &mut [f32], chunk: &mut Chunk) {
    let bytes = dtype.row_bytes(CHUNK);
    with_format!(dtype, F => cpu.vectorize(#[inline(always)] || {
        for (blocks, out) in blocks.chunks(bytes).zip(out.chunks_mut(CHUNK)) {
            chunk.unpack::<F>(blocks);
            chunk.decode::<F>(out);
        }
    }));
}

/// The blocks of some columns of a row.
///
/// # Safety
/// The tensor is checked: its rows are initialised memory of whole blocks. `columns` are whole
/// blocks of row `row`.
#[inline(always)]
pub(crate) unsafe fn blocks_of<'a>(t: &RawTensor, row: usize, columns: Range<usize>) -> &'a [u8] {
    if columns.is_empty() {
        return &[];
    }
    let start = t.dtype.row_bytes(t.layout.row_offset(row) + columns.start);
    // SAFETY: the caller's promise; offsets of existing rows fit an isize (see Layout).
    unsafe {
        let start = t.ptr.cast_const().add(start);
        std::slice::from_raw_parts(start, t.dtype.row_bytes(columns.len()))
    }
}

/// The group of a dtype in blocks.
pub(crate) const fn group(dtype: DType) -> usize {
    match dtype {
        DType::Q6K => Q6K::GROUP,
        _ => 32,
    }
}

/// Runs `$body` with `$f` bound to the format of a dtype that has been checked to be one in blocks.
macro_rules! with_format {
    ($dtype:expr, $f:ident => $body:expr) => {{
        use $crate::cpu::blocks;
        use $crate::dtype::DType;
        match $dtype {
            DType::Q8_0 => {
                type $f = blocks::Q8_0;
                $body
            }
            DType::Q4_0 => {
                type $f = blocks::Q4_0;
                $body
            }
            DType::Q4_1 => {
                type $f = blocks::Q4_1;
                $body
            }
            DType::Q5_0 => {
                type $f = blocks::Q5_0;
                $body
            }
            DType::Q5_1 => {
                type $f = blocks::Q5_1;
                $body
            }
            DType::Q4K => {
                type $f = blocks::Q4K;
                $body
            }
            DType::Q5K => {
                type $f = blocks::Q5K;
                $body
            }
            DType::Q6K => {
                type $f = blocks::Q6K;
                $body
            }
            DType::Tq1_0 => {
                type $f = blocks::Tq1_0;
                $body
            }
            DType::Tq2_0 => {
                type $f = blocks::Tq2_0;
                $body
            }
            DType::Q2_0 => {
                type $f = blocks::Q2_0;
                $body
            }
            other => unreachable!("the problem was checked to be of blocks, not {other}"),
        }
    }};
}
pub(crate) use with_format;

/// Bits of a code of a dtype in blocks.
pub(crate) fn code_bits(dtype: DType) -> u32 {
    with_format!(dtype, F => F::BITS)
}
