//! Parts of attention over disjoint sets of keys, as one: averages, weighted by what the parts sum to. A row for each
//! plane.

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, scalars, with_vector};

scalars! { Args, ArgsExpand {
    /// Batch × tokens × heads.
    rows: u32,
    tokens: u32,
    num_heads: u32,
    parts: u32,
    /// Vectors of a row.
    length: u32,
    has_lse: u32,
    /// Strides in vectors, and in elements of logarithms.
    outs_part: u64,
    outs_outer: u64,
    outs_token: u64,
    outs_head: u64,
    lses_part: u64,
    lses_outer: u64,
    lses_token: u64,
    lses_head: u64,
    out_outer: u64,
    out_token: u64,
    out_head: u64,
    lse_outer: u64,
    lse_token: u64,
    lse_head: u64,
} }

/// Rows of a cube, one per plane.
const PLANES: u32 = 4;

/// Grid: rows / `PLANES`. The output may be one of the parts.
#[cube]
fn merge<T: Float, U: Float, N: Size>(
    outs: &Array<Vector<T, N>>,
    lses: &Array<f32>,
    out: &mut Array<Vector<U, N>>,
    lse: &mut Array<f32>,
    args: &Args,
) {
    let row = CUBE_POS_X * PLANES + UNIT_POS_X / 32u32;
    if row >= args.rows {
        terminate!();
    }
    let lane = UNIT_POS_X % 32u32;
    let head = u64::cast_from(row % args.num_heads);
    let token = u64::cast_from(row / args.num_heads % args.tokens);
    let outer = u64::cast_from(row / args.num_heads / args.tokens);
    let of_lse = outer * args.lses_outer + token * args.lses_token + head * args.lses_head;
    // Where all are −∞ their exponentials are to be zero.
    let mut peak = f32::new(f32::MIN);
    for part in 0..args.parts {
        peak = max(peak, lses[lse_at(args, of_lse, part)]);
    }
    let mut total = 0.0f32;
    for part in 0..args.parts {
        total += (lses[lse_at(args, of_lse, part)] - peak).exp();
    }
    // Not `> 0`: a NaN is to come through.
    let mut factor = 0.0f32;
    if total != 0.0f32 {
        factor = 1.0f32 / total;
    }
    let from = outer * args.outs_outer + token * args.outs_token + head * args.outs_head;
    let to = outer * args.out_outer + token * args.out_token + head * args.out_head;
    let mut i = lane;
    while i < args.length {
        let mut sum = Vector::<f32, N>::zeroed();
        for part in 0..args.parts {
            let weight = (lses[lse_at(args, of_lse, part)] - peak).exp();
            // A part that saw no key may have anything for an output.
            if weight != 0.0f32 {
                let at = from + u64::cast_from(part) * args.outs_part + u64::cast_from(i);
                sum += Vector::<f32, N>::cast_from(outs[at as usize]) * Vector::new(weight);
            }
        }
        out[(to + u64::cast_from(i)) as usize] = Vector::cast_from(sum * Vector::new(factor));
        i += 32u32;
    }
    // All lanes have the same total; when they have shared it all have read what `lse` may take the place of.
    let total = plane_max(total);
    if lane == 0u32 && args.has_lse != 0u32 {
        let at = outer * args.lse_outer + token * args.lse_token + head * args.lse_head;
        lse[at as usize] = peak + total.ln();
    }
}

#[cube]
fn lse_at(args: &Args, row: u64, part: u32) -> usize {
    (row + u64::cast_from(part) * args.lses_part) as usize
}

macro_rules! kernel {
    ($b:ident, $t:ty, $u:ty, $n:ty) => {{
        let (from, to) = (
            $b.type_of::<Vector<$t, $n>>(),
            $b.type_of::<Vector<$u, $n>>(),
        );
        let of_lse = $b.type_of::<f32>();
        let outs = $b.read("outs", from);
        let lses = $b.read("lses", of_lse);
        let out = $b.write("out", to);
        let lse = $b.write("lse", of_lse);
        let args = Args::declare(&mut $b);
        merge::expand::<$t, $u, $n>(
            $b.scope(),
            outs.into(),
            lses.into(),
            out.into(),
            lse.into(),
            args,
        );
    }};
}

fn kernel(from: Dtype, to: Dtype, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    // Vectors of 16 bytes on the wider side.
    let width = from.per_vector().min(to.per_vector());
    with_vector!(from, T, _N => with_vector!(to, U, _M => match (vectors, width) {
        (false, _) => kernel!(b, T, U, Const<1>),
        (true, 4) => kernel!(b, T, U, Const<4>),
        (true, _) => kernel!(b, T, U, Const<8>),
    }));
    let width = if vectors { width } else { 1 };
    let symbol = format!("attention_merge_{}_{}x{width}", from.name(), to.name());
    let choices = vec![
        ("from", from.code()),
        ("to", to.code()),
        ("width", width),
        ("rows", PLANES),
    ];
    b.finish(symbol, choices, PLANES * 32)
}

/// Every form: dtype by dtype, in vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for from in Dtype::ALL.iter().copied() {
        for to in Dtype::ALL.iter().copied() {
            for vectors in [true, false] {
                kernels.push(kernel(from, to, vectors)?);
            }
        }
    }
    Ok(kernels)
}
