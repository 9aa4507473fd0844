//! Gated activations: `act(gate) * up`, in f32. A thread has one vector of each: what the GPU has in flight comes from its many threads,
//! and few rows spread over more of it.

pub mod backward;

use contract::Activation;
use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::math;
use crate::rows::{self, Divisor, Sizes, Strides, divide, row_index, row_start};

const THREADS: u32 = 128;
/// Elements of each input that a thread loads before it computes, where it cannot load vectors.
const UNROLL: u32 = 4;

/// The gate's function.
#[cube]
pub(crate) fn activate(x: f32, #[comptime] activation: Activation) -> f32 {
    if comptime!(activation == Activation::Silu) {
        x * math::logistic(x)
    } else if comptime!(activation == Activation::Gelu) {
        x * math::normal_cdf(x)
    } else if comptime!(activation == Activation::ReluSquared) {
        let positive = math::relu(x);
        positive * positive
    } else {
        // (1 + tanh(u)) / 2 is the logistic function of 2u; the factor is 2 √(2/π).
        let u = 1.595_769_f32 * fma(0.044_715f32 * x * x, x, x);
        x * math::logistic(u)
    }
}

/// [`activate`] with the cheaper exponential that 16 bits allow.
#[cube]
fn activate_for_16_bits(x: f32, #[comptime] activation: Activation) -> f32 {
    if comptime!(activation == Activation::Silu) {
        x * math::logistic_for_16_bits(x)
    } else if comptime!(activation == Activation::Gelu) {
        x * math::normal_cdf(x)
    } else if comptime!(activation == Activation::ReluSquared) {
        let positive = math::relu(x);
        positive * positive
    } else {
        let u = 1.595_769_f32 * fma(0.044_715f32 * x * x, x, x);
        x * math::logistic_for_16_bits(u)
    }
}

#[cube]
fn gated<F: Float, N: Size>(
    gate: Vector<F, N>,
    up: Vector<F, N>,
    #[comptime] activation: Activation,
    #[comptime] narrow: bool,
) -> Vector<F, N> {
    let g = Vector::<f32, N>::cast_from(gate);
    let u = Vector::<f32, N>::cast_from(up);
    let mut v = Vector::<f32, N>::zeroed();
    #[unroll]
    for j in 0..N::value() {
        if narrow {
            v[j] = activate_for_16_bits(g[j], activation) * u[j];
        } else {
            v[j] = activate(g[j], activation) * u[j];
        }
    }
    Vector::cast_from(v)
}

#[cube]
fn swiglu<F: Float, N: Size>(
    gate: &Array<Vector<F, N>>,
    up: &Array<Vector<F, N>>,
    out: &mut Array<Vector<F, N>>,
    sizes: Sizes,
    length: usize,
    blocks_per_row: Divisor,
    gate_strides: Strides,
    up_strides: Strides,
    out_strides: Strides,
    #[comptime] activation: Activation,
    #[comptime] narrow: bool,
    #[comptime] unroll: u32,
) {
    let row = divide(CUBE_POS_X, blocks_per_row);
    let index = row_index(row, sizes);
    let block = CUBE_POS_X - row * blocks_per_row.size;
    let first = block as usize * comptime!((THREADS * unroll) as usize) + UNIT_POS_X as usize;
    let gate_start = row_start(index, gate_strides);
    let up_start = row_start(index, up_strides);
    let out_start = row_start(index, out_strides);
    if unroll == 1 {
        if first < length {
            let g = gate[gate_start + first];
            let u = up[up_start + first];
            out[out_start + first] = gated::<F, N>(g, u, activation, narrow);
        }
    } else {
        let mut gates = Sequence::<Vector<F, N>>::new();
        let mut ups = Sequence::<Vector<F, N>>::new();
        #[unroll]
        for k in 0..unroll {
            let i = first + (k * THREADS) as usize;
            let mut g = Vector::<F, N>::zeroed();
            let mut u = Vector::<F, N>::zeroed();
            if i < length {
                g = gate[gate_start + i];
                u = up[up_start + i];
            }
            gates.push(g);
            ups.push(u);
        }
        #[unroll]
        for k in 0..unroll {
            let i = first + (k * THREADS) as usize;
            if i < length {
                let (g, u) = (*gates.index(k as usize), *ups.index(k as usize));
                out[out_start + i] = gated::<F, N>(g, u, activation, narrow);
            }
        }
    }
}

macro_rules! kernel {
    ($b:ident, $f:ty, $n:ty, $activation:ident, $narrow:expr, $unroll:expr) => {{
        let ty = $b.type_of::<Vector<$f, $n>>();
        // The gate may be overwritten in place, hence not `read`.
        let gate = $b.write("gate", ty);
        let up = $b.read("up", ty);
        let out = $b.write("out", ty);
        let sizes = rows::sizes(&mut $b);
        let length = $b.scalar("length", ScalarType::U64);
        let blocks_per_row = rows::blocks_per_row(&mut $b);
        let gate_strides = rows::strides(&mut $b, ["gate_0", "gate_1", "gate_2"]);
        let up_strides = rows::strides(&mut $b, ["up_0", "up_1", "up_2"]);
        let out_strides = rows::strides(&mut $b, ["out_0", "out_1", "out_2"]);
        swiglu::expand::<$f, $n>(
            $b.scope(),
            gate.into(),
            up.into(),
            out.into(),
            sizes,
            length.into(),
            blocks_per_row,
            gate_strides,
            up_strides,
            out_strides,
            $activation,
            $narrow,
            $unroll,
        );
    }};
}

fn name(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_tanh",
        Activation::ReluSquared => "relu_squared",
    }
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
    let symbol = format!("swiglu_{}_{}x{width}", name(activation), dtype.name());
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
