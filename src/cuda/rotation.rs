//! What a rotation is to a kernel: RoPE's, and the KV cache's that rotates keys. The host computes the frequencies, as for the CPU, and
//! they travel with the launch.

use std::cell::RefCell;

use contract::rotation::{Angles as AngleCode, Positions};

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::rope::{
    self as problem, Angles, PositionSource, Scaling, Style, scaled_frequencies,
};
use crate::tensor::RawTensor;

/// Pairs of components that fit a launch.
const MAX_PAIRS: usize = contract::rotation::MAX_PAIRS as usize;

type Frequencies = [f32; MAX_PAIRS];

/// A rotation's arguments, in the kernels' terms.
pub(super) struct Rotation {
    pub kind: u32,
    pub pairs: u32,
    pub scale: f32,
    pub direction: f32,
    pub factors: u64,
    pub cos_table: u64,
    pub sin_table: u64,
    pub table_rows: u64,
    pub cos_stride: u64,
    pub sin_stride: u64,
    pub frequencies: Frequencies,
    /// Items of a head that are rotated: vectors of the first half, vectors of pairs, or single pairs.
    pub per_head: u32,
    /// Vectors of half the rotated components.
    pub per_half: u32,
    /// Vectors of the rotated components.
    pub rotated: u32,
}

/// Whether a launch has room for a rotation.
pub(super) fn check(op: &'static str, p: &problem::Rotation) -> Result<()> {
    if p.rotary_dim <= 2 * MAX_PAIRS {
        return Ok(());
    }
    let (dim, max) = (p.rotary_dim, 2 * MAX_PAIRS);
    let problem = text!("is {dim}, the CUDA backend takes up to {max}");
    Err(Error::unsupported(op, "rotary_dim", problem))
}

/// Whether the parts of a head that are treated alike consist of vectors of `width` elements.
pub(super) fn fits(p: &problem::Rotation, head_dim: usize, width: usize) -> bool {
    let part = match p.style {
        Style::HalfSplit => p.rotary_dim / 2,
        Style::Interleaved => p.rotary_dim,
    };
    part.is_multiple_of(width) && head_dim.is_multiple_of(width)
}

/// Whether a tensor's heads can be accessed in vectors of `width` elements.
pub(super) fn is_aligned(t: &RawTensor, width: usize) -> bool {
    let mut heads = t.layout.strides()[..t.layout.rank() - 1].iter();
    super::is_aligned(t, width) && heads.all(|stride| stride.is_multiple_of(width))
}

/// The strides of a tensor's batch entries, tokens and heads, in accesses.
pub(super) fn strides(t: &RawTensor, width: usize) -> [u64; 3] {
    let rank = t.layout.rank();
    let stride = |dim: usize| (t.layout.stride(dim) / width) as u64;
    let batch = if rank == 4 { stride(0) } else { 0 };
    [batch, stride(rank - 3), stride(rank - 2)]
}

/// Where tokens stand, in the kernels' terms.
pub(super) struct Position {
    pub kind: u32,
    pub first: i64,
    pub address: u64,
    pub batch: u64,
    pub token: u64,
}

impl Position {
    pub fn new(source: &PositionSource) -> Position {
        match source {
            PositionSource::From(first) => Position {
                kind: Positions::From.code(),
                first: *first,
                address: 0,
                batch: 0,
                token: 0,
            },
            PositionSource::PerToken(t) => {
                let kind = match t.dtype {
                    DType::I64 => Positions::I64,
                    _ => Positions::I32,
                };
                let rank = t.layout.rank();
                let stride = |dim: usize| t.layout.stride(dim) as u64;
                Position {
                    kind: kind.code(),
                    first: 0,
                    address: t.ptr.addr() as u64,
                    batch: if rank == 2 { stride(0) } else { 0 },
                    token: stride(rank - 1),
                }
            }
        }
    }
}

impl Rotation {
    /// For accesses of `width` elements.
    pub fn new(p: &problem::Rotation, inverse: bool, width: usize) -> Rotation {
        let address = |t: &RawTensor| t.ptr.addr() as u64;
        let half = p.rotary_dim / 2;
        let per_head = match (p.style, width) {
            (Style::Interleaved, 1) | (Style::HalfSplit, _) => half / width,
            (Style::Interleaved, _) => p.rotary_dim / width,
        };
        let mut rotation = Rotation {
            kind: AngleCode::Frequencies.code(),
            pairs: half as u32,
            scale: 1.0,
            direction: if inverse { -1.0 } else { 1.0 },
            factors: 0,
            cos_table: 0,
            sin_table: 0,
            table_rows: 0,
            cos_stride: 0,
            sin_stride: 0,
            frequencies: [0.0; MAX_PAIRS],
            per_head: per_head as u32,
            per_half: (half / width) as u32,
            rotated: (p.rotary_dim / width) as u32,
        };
        match &p.angles {
            Angles::Computed {
                theta,
                scaling,
                freq_factors,
                attention_factor,
            } => {
                let (frequencies, own) = frequencies(*theta, *scaling, p.rotary_dim);
                rotation.frequencies = frequencies;
                rotation.scale = if *attention_factor == 0.0 {
                    own
                } else {
                    *attention_factor
                };
                if let Some(factors) = freq_factors {
                    rotation.kind = AngleCode::Factors.code();
                    rotation.factors = address(factors);
                }
            }
            Angles::Table { cos, sin } => {
                rotation.kind = AngleCode::Table.code();
                rotation.cos_table = address(cos);
                rotation.sin_table = address(sin);
                rotation.table_rows = cos.layout.dim(0) as u64;
                rotation.cos_stride = cos.layout.stride(0) as u64;
                rotation.sin_stride = sin.layout.stride(0) as u64;
            }
        }
        rotation
    }
}

/// The frequencies of a base and a scaling, and the factor of cosines and sines. A model asks for the same ones at every layer and step:
/// each thread keeps its last.
fn frequencies(theta: f32, scaling: Scaling, rotary_dim: usize) -> (Frequencies, f32) {
    type Key = (u32, Scaling, usize);
    thread_local! {
        static LAST: RefCell<Option<(Key, Frequencies, f32)>> = const { RefCell::new(None) };
    }
    let key = (theta.to_bits(), scaling, rotary_dim);
    LAST.with_borrow_mut(|last| match last {
        Some((known, frequencies, factor)) if *known == key => (*frequencies, *factor),
        _ => {
            let mut frequencies = [0.0; MAX_PAIRS];
            let factor = scaled_frequencies(theta, scaling, &mut frequencies[..rotary_dim / 2]);
            *last = Some((key, frequencies, factor));
            (frequencies, factor)
        }
    })
}
