//! The gradients of gated activations, elementwise and in f32, and the activation's output again
//! where it is asked for. As in the forward a thread has one vector of each.

use contract::Activation;
use cubecl::prelude::*;

use super::{THREADS, UNROLL};
use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::math;
use crate::rows::{self, Divisor, Sizes, Strides, divide, row_index, row_start};

/// Where the rows of every tensor are.
#[derive(CubeType, Clone, Copy)]
struct Args {
    has_out: u32,
    sizes: Sizes,
    length: usize,
    blocks_per_row: Divisor,
    gate: Strides,
    up: Strides,
    dout: Strides,
    dgate: Strides,
    dup: Strides,
    out: Strides,
}

/// An activation and its derivative.
#[derive(CubeType, Clone, Copy)]
struct Slope {
    value: f32,
    derivative: f32,
}

#[cube]
fn logistic(x: f32, #[comptime] narrow: bool) -> f32 {
    if narrow {
        math::logistic_for_16_bits(x)
    } else {
        math::logistic(x)
    }
}

#[cube]
fn slope(x: f32, #[comptime] activation: Activation, #[comptime] narrow: bool) -> Slope {
    if comptime!(activation == Activation::Silu) {
        let s = logistic(x, narrow);
        let value = x * s;
        Slope {
            value,
            derivative: fma(value, 1.0f32 - s, s),
        }
    } else if comptime!(activation == Activation::Gelu) {
        let cdf = math::normal_cdf(x);
        Slope {
            value: x * cdf,
            derivative: fma(x, math::normal_density(x), cdf),
        }
    } else if comptime!(activation == Activation::ReluSquared) {
        let positive = math::relu(x);
        Slope {
            value: positive * positive,
            derivative: 2.0f32 * positive,
        }
    } else {
        // (1 + tanh(u)) / 2 is the logistic function of 2u; the factor is 2 √(2/π).
        let square = x * x;
        let s = logistic(1.595_769_f32 * fma(0.044_715f32 * square, x, x), narrow);
        let value = x * s;
        let inner = 1.595_769_f32 * fma(0.134_145f32, square, 1.0f32);
        Slope {
            value,
            derivative: fma(value * (1.0f32 - s), inner, s),
        }
    }
}

/// Makes of gate, up and the gradient of the output the gradients of gate and up, and the output,
/// and stores them.
#[cube]
fn finish<F: Float, N: Size>(
    of: Vector<F, N>,
    up: Vector<F, N>,
    dout: Vector<F, N>,
    dgate: &mut Array<Vector<F, N>>,
    dup: &mut Array<Vector<F, N>>,
    out: &mut Array<Vector<F, N>>,
    index: RowAt,
    i: usize,
    has_out: u32,
    #[comptime] activation: Activation,
    #[comptime] narrow: bool,
) {
    let g = Vector::<f32, N>::cast_from(of);
    let u = Vector::<f32, N>::cast_from(up);
    let d = Vector::<f32, N>::cast_from(dout);
    let mut to_gate = Vector::<f32, N>::zeroed();
    let mut to_up = Vector::<f32, N>::zeroed();
    let mut again = Vector::<f32, N>::zeroed();
    #[unroll]
    for j in 0..N::value() {
        let s = slope(g[j], activation, narrow);
        to_gate[j] = d[j] * u[j] * s.derivative;
        to_up[j] = d[j] * s.value;
        again[j] = s.value * u[j];
    }
    dgate[index.dgate + i] = Vector::cast_from(to_gate);
    dup[index.dup + i] = Vector::cast_from(to_up);
    if has_out != 0u32 {
        out[index.out + i] = Vector::cast_from(again);
    }
}

/// Where a row begins in each tensor that is written.
#[derive(CubeType, Clone, Copy)]
struct RowAt {
    dgate: usize,
    dup: usize,
    out: usize,
}

/// Grid: rows times the blocks of each.
#[cube]
fn swiglu_backward<F: Float, N: Size>(
    gate: &Array<Vector<F, N>>,
    up: &Array<Vector<F, N>>,
    dout: &Array<Vector<F, N>>,
    dgate: &mut Array<Vector<F, N>>,
    dup: &mut Array<Vector<F, N>>,
    out: &mut Array<Vector<F, N>>,
    args: Args,
    #[comptime] activation: Activation,
    #[comptime] narrow: bool,
    #[comptime] unroll: u32,
) {
    let row = divide(CUBE_POS_X, args.blocks_per_row);
    let index = row_index(row, args.sizes);
    let block = CUBE_POS_X - row * args.blocks_per_row.size;
    let first = block as usize * comptime!((THREADS * unroll) as usize) + UNIT_POS_X as usize;
    let from_gate = row_start(index, args.gate);
    let from_up = row_start(index, args.up);
    let from_dout = row_start(index, args.dout);
    let to = RowAt {
        dgate: row_start(index, args.dgate),
        dup: row_start(index, args.dup),
        out: row_start(index, args.out),
    };
    let mut gates = Sequence::<Vector<F, N>>::new();
    let mut ups = Sequence::<Vector<F, N>>::new();
    let mut douts = Sequence::<Vector<F, N>>::new();
    #[unroll]
    for k in 0..unroll {
        // Past the end the last one is read again.
        let i = min(first + (k * THREADS) as usize, args.length - 1usize);
        gates.push(gate[from_gate + i]);
        ups.push(up[from_up + i]);
        douts.push(dout[from_dout + i]);
    }
    #[unroll]
    for k in 0..unroll {
        let i = first + (k * THREADS) as usize;
        if i < args.length {
            let (g, u) = (*gates.index(k as usize), *ups.index(k as usize));
            let d = *douts.index(k as usize);
            finish::<F, N>(
                g,
                u,
                d,
                dgate,
                dup,
                out,
                to,
                i,
                args.has_out,
                activation,
                narrow,
            );
        }
    }
}

fn args(b: &mut Builder) -> ArgsExpand {
    ArgsExpand {
        has_out: b.scalar("has_out", ScalarType::U32).into(),
        sizes: rows::sizes(b),
        length: b.scalar("length", ScalarType::U64).into(),
        blocks_per_row: rows::blocks_per_row(b),
        gate: rows::strides(b, ["gate_0", "gate_1", "gate_2"]),
        up: rows::strides(b, ["up_0", "up_1", "up_2"]),
        dout: rows::strides(b, ["dout_0", "dout_1", "dout_2"]),
        dgate: rows::strides(b, ["dgate_0", "dgate_1", "dgate_2"]),
        dup: rows::strides(b, ["dup_0", "dup_1", "dup_2"]),
        out: rows::strides(b, ["out_0", "out_1", "out_2"]),
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty, $activation:ident, $narrow:expr, $unroll:expr) => {{
        let ty = $b.type_of::<Vector<$f, $n>>();
        // All may be overwritten in place, hence not `read`.
        let [gate, up, dout] = ["gate", "up", "dout"].map(|name| $b.write(name, ty));
        let [dgate, dup, out] = ["dgate", "dup", "out"].map(|name| $b.write(name, ty));
        let args = args(&mut $b);
        swiglu_backward::expand::<$f, $n>(
            $b.scope(),
            gate.into(),
            up.into(),
            dout.into(),
            dgate.into(),
            dup.into(),
            out.into(),
            args,
            $activation,
            $narrow,
            $unroll,
        );
    }};
}

fn kernel(dtype: Dtype, activation: Activation, vectors: bool) -> Result<Kernel, Error> {
    let mut b = Builder::default();
    let narrow = dtype != Dtype::F32;
    let unroll = if vectors { 1 } else { UNROLL };
    with_vector!(dtype, F, N => match vectors {
        true => kernel!(b, F, N, activation, narrow, unroll),
        false => kernel!(b, F, Const<1>, activation, narrow, unroll),
    });
    let width = if vectors { dtype.per_vector() } else { 1 };
    let name = super::name(activation);
    let symbol = format!("swiglu_backward_{name}_{}x{width}", dtype.name());
    let choices = vec![
        ("dtype", dtype.code()),
        ("activation", activation.code()),
        ("width", width),
        ("per_block", THREADS * unroll),
    ];
    b.finish(symbol, choices, THREADS)
}

/// Every form: dtype by activation, in vectors and by element.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for activation in Activation::ALL {
            for vectors in [true, false] {
                kernels.push(kernel(dtype, *activation, vectors)?);
            }
        }
    }
    Ok(kernels)
}
