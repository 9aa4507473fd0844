//! The gradient of an embedding's table: positions are sorted by id, keeping their order, and each
//! row of the table sums its own.
//!
//! | kernel | what it is for |
//! |-|-|
//! | [`count`] | the counts of the first digit that the sort begins with |
//! | [`scatter`] | a pass of the sort, by one digit |
//! | [`rows`] | rows of few positions, and of none; of rows of many, what pieces of the sorted order sum to |
//! | [`joins`] | rows of many positions, of their pieces |

mod sort;
mod sums;

use contract::embedding_backward::{BINS, Kind, THREADS};
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, scalars, with_vector};
use crate::rows::Dims;
use sort::{count, scatter};
use sums::{joins, rows};

/// Lanes of a warp, and positions of a piece.
const LANES: u32 = 32;

scalars! { Args, ArgsExpand {
    tokens: u32,
    /// Rows of the gradient, and the row of the vocabulary that the first of them is.
    vocab: u32,
    begin: u64,
    /// Bits below the digit of this pass, or of the last, and of the next.
    shift: u32,
    next_shift: u32,
    /// Of the sort. The keys of pass 0 are made of the ids.
    pass: u32,
    passes: u32,
    /// Tiles of the sort.
    tiles: u32,
    /// Blocks that sum rows of few positions.
    windows: u32,
    /// Of the sorted order, if rows may have so many positions that they are cut.
    pieces: u32,
    /// 0 for i32, 1 for i64.
    wide_ids: u32,
    /// The row whose gradient is zero, or one that there is not.
    padding: u32,
    /// Whether what is there is added.
    accumulate: u32,
    /// Of a row, in vectors.
    length: u32,
    /// Between rows of the gradient, in vectors.
    out_stride: u64,
} }

macro_rules! kernel {
    ($kind:ident, $e:ty, $o:ty, $n:ty, $adds:expr, $symbol:expr, $choices:expr) => {{
        let mut b = Builder::default();
        let (ty, out_ty) = (b.type_of::<Vector<$e, $n>>(), b.type_of::<Vector<$o, $n>>());
        let (narrow, wide) = (b.type_of::<i32>(), b.type_of::<i64>());
        let (word, sums) = (b.type_of::<u32>(), b.type_of::<Vector<f32, $n>>());
        let atomic = b.type_of::<Atomic<u32>>();
        let dout = b.read("dout", ty);
        let ids = b.read("ids", narrow);
        let ids_i64 = b.read("ids_i64", wide);
        let keys_in = b.read("keys_in", word);
        let positions_in = b.read("positions_in", word);
        let keys_out = b.write("keys_out", word);
        let positions_out = b.write("positions_out", word);
        let counts = b.write("counts", word);
        let next_counts = b.write("next_counts", atomic);
        let bounds = b.write("bounds", word);
        let partials = b.write("partials", sums);
        let out = b.write("out", out_ty);
        let args = Args::declare(&mut b);
        let dims = Dims::declare(&mut b);
        let s = b.scope();
        match $kind {
            Kind::Count => count::expand(
                s,
                ids.into(),
                ids_i64.into(),
                keys_in.into(),
                counts.into(),
                args,
                dims,
            ),
            Kind::Scatter => scatter::expand(
                s,
                ids.into(),
                ids_i64.into(),
                keys_in.into(),
                positions_in.into(),
                keys_out.into(),
                positions_out.into(),
                counts.into(),
                next_counts.into(),
                bounds.into(),
                args,
                dims,
            ),
            Kind::Rows => rows::expand::<$e, $o, $n>(
                s,
                dout.into(),
                keys_in.into(),
                positions_in.into(),
                bounds.into(),
                partials.into(),
                out.into(),
                args,
                dims,
                $adds,
            ),
            Kind::Joins => {
                joins::expand::<$o, $n>(s, keys_in.into(), partials.into(), out.into(), args)
            }
        }
        let sorts = matches!($kind, Kind::Count | Kind::Scatter);
        b.finish($symbol, $choices, if sorts { BINS } else { THREADS })
    }};
}

/// What tells the kernels apart; those that sort have no dtypes.
fn choices(kind: Kind, dtype: u32, out: u32, width: u32) -> Vec<(&'static str, u32)> {
    vec![
        ("kind", kind.code()),
        ("dtype", dtype),
        ("out", out),
        ("width", width),
    ]
}

fn sorting(kind: Kind, name: &str) -> Result<Kernel, Error> {
    let symbol = format!("embedding_backward_{name}");
    kernel!(
        kind,
        f32,
        f32,
        Const<4>,
        false,
        symbol,
        choices(kind, 0, 0, 1)
    )
}

fn summing(kind: Kind, name: &str, dtypes: (Dtype, Dtype), vectors: bool) -> Result<Kernel, Error> {
    let (dtype, out) = dtypes;
    // Vectors of 16 bytes on the wider side.
    let vector = dtype.per_vector().min(out.per_vector());
    let width = if vectors { vector } else { 1 };
    let symbol = format!(
        "embedding_backward_{name}_{}_{}x{width}",
        dtype.name(),
        out.name()
    );
    // Sums are added to f32 alone.
    let adds = out == Dtype::F32;
    let choices = choices(kind, dtype.code(), out.code(), width);
    let kernel = with_vector!(dtype, E, _N => with_vector!(out, O, _M => match width {
        1 => kernel!(kind, E, O, Const<1>, adds, symbol, choices),
        4 => kernel!(kind, E, O, Const<4>, adds, symbol, choices),
        _ => kernel!(kind, E, O, Const<8>, adds, symbol, choices),
    }))?;
    // Before Hopper the compiler spills to let more blocks run at once.
    let spills = kind == Kind::Rows && width == 8;
    Ok(if spills { kernel.for_blocks(2) } else { kernel })
}

/// Every form: those that sort; those that sum by the dtypes of dout and of the gradient, in
/// vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = vec![
        sorting(Kind::Count, "count")?,
        sorting(Kind::Scatter, "scatter")?,
    ];
    for dtype in Dtype::ALL.iter().copied() {
        for out in Dtype::ALL.iter().copied() {
            for vectors in [true, false] {
                let dtypes = (dtype, out);
                kernels.push(summing(Kind::Rows, "rows", dtypes, vectors)?);
                kernels.push(summing(Kind::Joins, "joins", dtypes, vectors)?);
            }
        }
    }
    Ok(kernels)
}
