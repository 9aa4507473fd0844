//! RMSNorm and LayerNorm, one pass over memory: the first scales a row by its root mean square; the
//! second, which is `centered`, subtracts its mean before.
//!
//! Two kernels. `rows` moves 16 bytes per access: a row of up to `threads * vectors` vectors
//! belongs to `threads` threads, each with `vectors` loads in flight. `any` takes what is
//! misaligned, of odd length, longer, or has gains or biases of a third dtype, or of different
//! ones; it reads rows element by element, two or three times.
//!
//! The mean is subtracted before squares are taken: the variance of a row far from zero keeps its
//! digits.

mod any;
pub mod backward;
mod share;

use cubecl::prelude::*;

use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rows::{self, Sizes, Strides, row_index, row_start};
use any::norm_any;
pub(crate) use any::parameter;
use share::*;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Form {
    dtype: Dtype,
    /// LayerNorm, which has biases, and no residual here.
    centered: bool,
    has_residual: bool,
    /// Whether gains and biases are f32 beside rows of 16 bits. Otherwise they are like the rows.
    wide: bool,
    threads: u32,
    /// 0 for the kernel that takes anything.
    vectors: u32,
}

impl Form {
    /// Whether gains and biases are loaded with the row. Of many vectors or threads they come
    /// later: registers for them would be missing.
    fn early(self) -> bool {
        self.vectors <= 2 && self.threads < 1024 && !self.wide
    }

    /// A word of gains that are all one.
    fn ones(self) -> u32 {
        match self.dtype {
            Dtype::Bf16 if !self.wide => 0x3f80_3f80,
            Dtype::F16 if !self.wide => 0x3c00_3c00,
            _ => 1.0f32.to_bits(),
        }
    }
}

/// What both kernels take besides pointers.
#[derive(CubeType, Clone, Copy)]
struct Args {
    rows: u32,
    /// Row length, in elements or vectors.
    length: u32,
    sizes: Sizes,
    x: Strides,
    residual: Strides,
    out: Strides,
    residual_out: Strides,
    /// A `contract::Float` each, or 0 for none.
    weight_dtype: u32,
    bias_dtype: u32,
    /// 0 without gains.
    weight_offset: f32,
    epsilon: f32,
    /// 1 / elements of a row.
    inverse_length: f32,
}

/// The elements of 16 bytes. What is loaded ahead stays words until then: elements of 16 bits would
/// take a register each.
#[cube]
fn unpack<F: Float, N: Size>(words: Words, #[comptime] form: Form) -> Vector<f32, N> {
    let mut values = Vector::<f32, N>::cast_from(Vector::<F, N>::reinterpret(words));
    if comptime!(form.dtype == Dtype::Bf16) {
        // bf16 is the upper half of f32. The compiler needs three instructions for a pair, this is
        // two.
        #[unroll]
        for i in 0..4usize {
            values[comptime!(2 * i)] = f32::reinterpret(words[i] << 16u32);
            values[comptime!(2 * i + 1)] = f32::reinterpret(words[i] & 0xffff_0000u32);
        }
    }
    values
}

/// The 16 bytes of vector `i` of gains or biases. Where there are none, each word is `otherwise`,
/// which is ones or zeros as elements: words are chosen here, since there are fewer of them.
#[cube]
fn load_parameter(of: &Array<Words>, i: u32, absent: bool, #[comptime] otherwise: u32) -> Words {
    let mut words = Words::new(otherwise);
    if !absent {
        words = of[i as usize];
    }
    words
}

/// Gains or biases of vector `i` of a row, which is a thread's `k`th. `early` has words that were
/// loaded already, or nothing.
#[cube]
fn parameters<F: Float, N: Size>(
    of: &Array<Words>,
    early: &Sequence<Words>,
    i: u32,
    absent: bool,
    #[comptime] otherwise: u32,
    #[comptime] k: u32,
    #[comptime] form: Form,
) -> Vector<f32, N> {
    if comptime!(form.wide) {
        let parts = comptime!(N::value() as u32 / 4);
        let mut values = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for part in 0..parts {
            let words = load_parameter(of, i * parts + part, absent, otherwise);
            let four = Vector::<f32, Const<4>>::reinterpret(words);
            #[unroll]
            for j in 0..4usize {
                values[comptime!(part as usize * 4 + j)] = four[j];
            }
        }
        values
    } else if comptime!(form.early()) {
        unpack::<F, N>(*early.index(k as usize), form)
    } else {
        unpack::<F, N>(load_parameter(of, i, absent, otherwise), form)
    }
}

/// A thread's share of a row.
#[derive(CubeType, Clone, Copy)]
struct Share {
    /// The first of its vectors; the next are a row's number of threads further each.
    lane: u32,
    /// Vectors of the row.
    length: u32,
    /// Those that are stored: `length`, or none.
    stored: u32,
}

/// The sum over the row of its values, or of the squares of their distances from `mean`.
#[cube]
fn sum_of_row<N: Size>(
    values: &Sequence<Vector<f32, N>>,
    mean: f32,
    share: Share,
    #[comptime] squares: bool,
    #[comptime] form: Form,
) -> f32 {
    let mut sums = Array::<f32>::new(comptime!(form.vectors as usize));
    #[unroll]
    for k in 0..form.vectors {
        let v = *values.index(k as usize);
        let mut sum = v[0];
        if squares {
            let d = v - Vector::new(mean);
            sum = d[0] * d[0];
            #[unroll]
            for j in 1..N::value() {
                sum = fma(d[j], d[j], sum);
            }
        } else {
            #[unroll]
            for j in 1..N::value() {
                sum += v[j];
            }
        }
        if share.lane + k * form.threads >= share.length {
            sum = 0.0f32;
        }
        sums[k as usize] = sum;
    }
    row_sum(&mut sums, form.threads, form.vectors)
}

/// Gains and biases, and those that were loaded early.
#[derive(CubeType)]
struct Parameters {
    gains: Sequence<Words>,
    biases: Sequence<Words>,
}

/// Scales values and stores them, from vector `to` on. `all` says that gains and biases are both
/// there, so that no load has to ask.
#[cube]
fn store_row<F: Float, N: Size>(
    values: &Sequence<Vector<f32, N>>,
    weight: &Array<Words>,
    bias: &Array<Words>,
    early: &Parameters,
    out: &mut Array<Vector<F, N>>,
    to: usize,
    mean: f32,
    scale: f32,
    share: Share,
    args: Args,
    #[comptime] all: bool,
    #[comptime] form: Form,
) {
    let ones = comptime!(form.ones());
    #[unroll]
    for k in 0..form.vectors {
        let i = share.lane + k * form.threads;
        if i < share.stored {
            let absent = if comptime!(all) {
                false.runtime()
            } else {
                args.weight_dtype == 0u32
            };
            let gains = parameters::<F, N>(weight, &early.gains, i, absent, ones, k, form);
            let mut y = *values.index(k as usize);
            if comptime!(form.centered) {
                let absent = if comptime!(all) {
                    false.runtime()
                } else {
                    args.bias_dtype == 0u32
                };
                let biases = parameters::<F, N>(bias, &early.biases, i, absent, 0u32, k, form);
                y = (y - Vector::new(mean)) * (gains * Vector::new(scale)) + biases;
            } else {
                y *= (gains + Vector::new(args.weight_offset)) * Vector::new(scale);
            }
            out[to + comptime!((k * form.threads) as usize)] = Vector::cast_from(y);
        }
    }
}

/// Grid: rows, in groups of as many as a block
/// has threads for.
#[cube]
fn norm_rows<F: Float, N: Size>(
    x: &Array<Words>,
    residual: &Array<Words>,
    weight: &Array<Words>,
    bias: &Array<Words>,
    out: &mut Array<Vector<F, N>>,
    residual_out: &mut Array<Vector<F, N>>,
    args: Args,
    #[comptime] form: Form,
) {
    let lane = UNIT_POS_X % form.threads;
    let mut row = CUBE_POS_X;
    let mut stored = args.length;
    take_share(&mut row, &mut stored, args.rows, form.threads);
    let index = row_index(row, args.sizes);
    let length = args.length;
    let share = Share {
        lane,
        length,
        stored,
    };

    // Everything is on its way before anything is waited for.
    let (threads, vectors) = comptime!((form.threads, form.vectors));
    let with = comptime!(if form.has_residual { vectors } else { 0 });
    let from = row_start(index, args.x);
    let xs = load_row(x, from, lane, length, threads, vectors);
    let from = row_start(index, args.residual);
    let residuals = load_row(residual, from, lane, length, threads, with);
    let mut gains = Sequence::<Words>::new();
    let mut biases = Sequence::<Words>::new();
    if comptime!(form.early()) {
        let ones = comptime!(form.ones());
        #[unroll]
        for k in 0..vectors {
            let i = min(lane + k * threads, length - 1u32);
            gains.push(load_parameter(weight, i, args.weight_dtype == 0u32, ones));
            if comptime!(form.centered) {
                biases.push(load_parameter(bias, i, args.bias_dtype == 0u32, 0u32));
            }
        }
    }

    let mut values = Sequence::<Vector<f32, N>>::new();
    #[unroll]
    for k in 0..form.vectors {
        let mut value = unpack::<F, N>(*xs.index(k as usize), form);
        if comptime!(form.has_residual) {
            value += unpack::<F, N>(*residuals.index(k as usize), form);
        }
        values.push(value);
    }
    if comptime!(form.has_residual) {
        let to = row_start(index, args.residual_out) + lane as usize;
        #[unroll]
        for k in 0..form.vectors {
            if lane + k * form.threads < stored {
                residual_out[to + comptime!((k * form.threads) as usize)] =
                    Vector::cast_from(*values.index(k as usize));
            }
        }
    }

    let mut mean = 0.0f32;
    if comptime!(form.centered) {
        mean = sum_of_row::<N>(&values, 0.0f32, share, false, form) * args.inverse_length;
    }
    let variance = sum_of_row::<N>(&values, mean, share, true, form) * args.inverse_length;
    let scale = (variance + args.epsilon).inverse_sqrt();

    let to = row_start(index, args.out) + lane as usize;
    let early = Parameters { gains, biases };
    let mut all = args.weight_dtype != 0u32;
    if comptime!(form.centered) {
        all = all && args.bias_dtype != 0u32;
    }
    if comptime!(form.early()) {
        store_row::<F, N>(
            &values, weight, bias, &early, out, to, mean, scale, share, args, false, form,
        );
    } else if all {
        // The usual case, in which each load would ask whether there is something to load.
        store_row::<F, N>(
            &values, weight, bias, &early, out, to, mean, scale, share, args, true, form,
        );
    } else {
        store_row::<F, N>(
            &values, weight, bias, &early, out, to, mean, scale, share, args, false, form,
        );
    }
}

fn args(b: &mut Builder) -> ArgsExpand {
    use ScalarType::{F32, U32};
    ArgsExpand {
        rows: b.scalar("rows", U32).into(),
        length: b.scalar("length", U32).into(),
        sizes: rows::sizes(b),
        x: rows::strides(b, ["x_0", "x_1", "x_2"]),
        residual: rows::strides(b, ["residual_0", "residual_1", "residual_2"]),
        out: rows::strides(b, ["out_0", "out_1", "out_2"]),
        residual_out: rows::strides(b, ["residual_out_0", "residual_out_1", "residual_out_2"]),
        weight_dtype: b.scalar("weight_dtype", U32).into(),
        bias_dtype: b.scalar("bias_dtype", U32).into(),
        weight_offset: b.scalar("weight_offset", F32).into(),
        epsilon: b.scalar("epsilon", F32).into(),
        inverse_length: b.scalar("inverse_length", F32).into(),
    }
}

fn kernel(form: Form) -> Result<Kernel, Error> {
    let any = form.vectors == 0;
    let mut b = Builder::default();
    with_vector!(form.dtype, F, N => {
        let (of_x, of_out, of_parameters) = match any {
            true => (b.type_of::<F>(), b.type_of::<F>(), b.type_of::<u16>()),
            false => (b.type_of::<Words>(), b.type_of::<Vector<F, N>>(), b.type_of::<Words>()),
        };
        // x and residual may be overwritten in place, hence not `read`.
        let x = b.write("x", of_x);
        let residual = b.write("residual", of_x);
        // What is only read the compiler may load when it likes: behind barriers what should come
        // early.
        let [weight, bias] = ["weight", "bias"].map(|name| match form.early() {
            true => b.write(name, of_parameters),
            false => b.read(name, of_parameters),
        });
        let out = b.write("out", of_out);
        let residual_out = b.write("residual_out", of_out);
        let args = args(&mut b);
        if any {
            norm_any::expand::<F>(
                b.scope(), x.into(), residual.into(), weight.into(), bias.into(), out.into(),
                residual_out.into(), args, form,
            );
        } else {
            norm_rows::expand::<F, N>(
                b.scope(), x.into(), residual.into(), weight.into(), bias.into(), out.into(),
                residual_out.into(), args, form,
            );
        }
    });
    let name = format!(
        "{}_{}{}_{}x{}",
        if form.centered {
            "layer_norm"
        } else {
            "rms_norm"
        },
        form.dtype.name(),
        match (form.has_residual, form.wide) {
            (false, false) => "",
            (true, false) => "_residual",
            (false, true) => "_wide",
            (true, true) => "_residual_wide",
        },
        form.threads,
        if any {
            "any".into()
        } else {
            form.vectors.to_string()
        },
    );
    let choices = vec![
        ("centered", u32::from(form.centered)),
        ("dtype", form.dtype.code()),
        ("residual", u32::from(form.has_residual)),
        ("wide", u32::from(form.wide)),
        ("threads", form.threads),
        ("vectors", form.vectors),
    ];
    let kernel = b.finish(name, choices, block(form.threads))?;
    Ok(bounded(kernel, form.threads, form.vectors, form.wide))
}

/// Every form: LayerNorm, RMSNorm without and with residual; by dtype, that of gains and biases,
/// and shape; and the general ones, for short and long rows.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for (centered, has_residual) in [(true, false), (false, false), (false, true)] {
            for wide in [false, true] {
                let any = [(32, 0), (256, 0)].into_iter().filter(|_| !wide);
                let rows = SHAPES.into_iter().filter(|shape| {
                    let exists = !wide || dtype != Dtype::F32;
                    exists && (centered || *shape != CENTERED_ONLY)
                });
                for (threads, vectors) in rows.chain(any) {
                    kernels.push(kernel(Form {
                        dtype,
                        centered,
                        has_residual,
                        wide,
                        threads,
                        vectors,
                    })?);
                }
            }
        }
    }
    Ok(kernels)
}
