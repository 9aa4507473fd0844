//! The gradients of RMSNorm and LayerNorm, one pass over memory.
//!
//! A block takes every `groups`-th row and keeps its share of the parameters' gradients, which it
//! stores at the end; `column_sums` adds the shares. While a row is summed the next one is on its
//! way. `rows` has rows in registers, 16 bytes per access; `any` takes what is misaligned, of odd
//! length or longer, reads rows two or three times, and keeps its share in memory.

// CubeCL has no such method.
#![allow(clippy::manual_is_multiple_of)]
// A condition of compile time is none beside one of run time.
#![allow(clippy::collapsible_if)]

use cubecl::prelude::*;

use super::any::parameter;
use super::share::{MIN_BLOCK, Words, block, load_row, rows_per_block};
use crate::Error;
use crate::emit::{Builder, Float as Dtype, Kernel, ScalarType, with_vector};
use crate::rows::{self, RowIndex, Sizes, Strides, row_index, row_start};

/// Threads per row, and 16-byte vectors per thread. One vector leaves registers for the next row and
/// for the gradients' shares; where rows need two, there are none for the next row.
const SHAPES: [(u32, u32); 9] = [
    (8, 1),
    (16, 1),
    (32, 1),
    (64, 1),
    (128, 1),
    (256, 1),
    (512, 1),
    (1024, 1),
    (1024, 2),
];

/// Threads of the kernel that takes any row.
const ANY: u32 = 256;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Form {
    dtype: Dtype,
    centered: bool,
    /// Whether a residual's gradient is added.
    has_residual: bool,
    threads: u32,
    /// 0 for the kernel that takes anything.
    vectors: u32,
}

impl Form {
    /// Whether the next row is loaded while one is summed.
    fn reads_ahead(self) -> bool {
        self.vectors == 1
    }

    /// Whether a thread has registers for it: of 16 bits there are eight elements in a vector, and
    /// LayerNorm has two shares. What is left out is served by the kernel that takes any row.
    fn fits(self) -> bool {
        self.vectors < 2 || self.dtype == Dtype::F32 || !(self.centered || self.has_residual)
    }
}

/// What both kernels take besides pointers.
#[derive(CubeType, Clone, Copy)]
struct Args {
    rows: u32,
    /// Row length, in elements or vectors.
    length: u32,
    /// Blocks.
    groups: u32,
    /// Whether the gradients of gains and of biases are asked for.
    has_dweight: u32,
    has_dbias: u32,
    sizes: Sizes,
    x: Strides,
    dout: Strides,
    dresidual: Strides,
    dx: Strides,
    /// A `contract::Float`, or 0 for none.
    weight_dtype: u32,
    weight_offset: f32,
    epsilon: f32,
    /// 1 / elements of a row.
    inverse_length: f32,
}

/// What is known of a row once it has been summed.
#[derive(CubeType, Clone, Copy)]
struct Means {
    mean: f32,
    /// 1 / deviation.
    scale: f32,
    /// Of the gradient before the normalisation, and of its product with the normalised row.
    gradient: f32,
    product: f32,
}

/// `count` sums over the threads of a row, on each of them. Between two calls with one `half` of
/// `shared` all threads have to meet, as they do in a call with the other half.
#[cube]
fn row_sums(
    sums: &mut Array<f32>,
    shared: &mut SharedMemory<f32>,
    half: u32,
    #[comptime] threads: u32,
    #[comptime] count: u32,
) {
    #[unroll]
    for step in 0..comptime!(threads.min(32).ilog2()) {
        #[unroll]
        for c in 0..count {
            let mine = sums[c as usize];
            sums[c as usize] = mine + plane_shuffle_xor(mine, comptime!(1u32 << step));
        }
    }
    if threads > 32 {
        let warps = comptime!(threads / 32);
        let all = comptime!(block(threads) / 32);
        let warp = UNIT_POS_X / 32;
        let from = half * comptime!(all * count);
        if UNIT_POS_X % 32 == 0u32 {
            #[unroll]
            for c in 0..count {
                shared[(from + c * all + warp) as usize] = sums[c as usize];
            }
        }
        sync_cube();
        let first = UNIT_POS_X / threads * warps;
        #[unroll]
        for c in 0..count {
            let mut sum = shared[(from + c * all + first + UNIT_POS_X % warps) as usize];
            #[unroll]
            for step in 0..comptime!(warps.ilog2()) {
                sum += plane_shuffle_xor(sum, comptime!(1u32 << step));
            }
            sums[c as usize] = sum;
        }
    }
}

/// Means of a row of which `sums` has the squares, the products and, if centered, the gradients.
#[cube]
fn means_of(sums: &Array<f32>, mean: f32, args: Args, #[comptime] centered: bool) -> Means {
    let variance = sums[0] * args.inverse_length;
    let scale = (variance + args.epsilon).inverse_sqrt();
    let mut gradient = 0.0f32;
    if centered {
        gradient = sums[2] * args.inverse_length;
    }
    Means {
        mean,
        scale,
        gradient,
        product: sums[1] * args.inverse_length * scale,
    }
}

#[cube]
fn unpack<F: Float, N: Size>(words: Words) -> Vector<f32, N> {
    Vector::<f32, N>::cast_from(Vector::<F, N>::reinterpret(words))
}

/// The sum over a vector.
#[cube]
fn total<N: Size>(v: Vector<f32, N>) -> f32 {
    let mut sum = v[0];
    #[unroll]
    for j in 1..N::value() {
        sum += v[j];
    }
    sum
}

/// A thread's gains as f32, of any dtype: ones without a weight.
#[cube]
fn load_gains<N: Size>(
    weight: &Array<u16>,
    lane: u32,
    args: Args,
    #[comptime] form: Form,
) -> Array<Vector<f32, N>> {
    let mut gains = Array::<Vector<f32, N>>::new(comptime!(form.vectors as usize));
    #[unroll]
    for k in 0..form.vectors {
        let mut gain = Vector::<f32, N>::new(1.0f32);
        if args.weight_dtype != 0u32 {
            let i = min(lane + k * form.threads, args.length - 1u32);
            #[unroll]
            for j in 0..N::value() {
                let at = i * comptime!(N::value() as u32) + comptime!(j as u32);
                gain[j] = parameter(weight, args.weight_dtype, at) + args.weight_offset;
            }
        }
        gains[k as usize] = gain;
    }
    gains
}

/// Sums a row that a thread has a share of.
#[cube]
fn sum_row<F: Float, N: Size>(
    xs: &Array<Words>,
    douts: &Array<Words>,
    gains: &Array<Vector<f32, N>>,
    shared: &mut SharedMemory<f32>,
    shared_mean: &mut SharedMemory<f32>,
    half: u32,
    lane: u32,
    args: Args,
    #[comptime] form: Form,
) -> Means {
    let mut mean = 0.0f32;
    if comptime!(form.centered) {
        let mut sums = Array::<f32>::new(1usize);
        sums[0] = 0.0f32;
        #[unroll]
        for k in 0..form.vectors {
            if lane + k * form.threads < args.length {
                sums[0] += total::<N>(unpack::<F, N>(xs[k as usize]));
            }
        }
        row_sums(&mut sums, shared_mean, half, form.threads, 1u32);
        mean = sums[0] * args.inverse_length;
    }
    let count = comptime!(2 + form.centered as u32);
    let mut sums = Array::<f32>::new(comptime!(count as usize));
    #[unroll]
    for c in 0..count {
        sums[c as usize] = 0.0f32;
    }
    #[unroll]
    for k in 0..form.vectors {
        if lane + k * form.threads < args.length {
            let d = unpack::<F, N>(xs[k as usize]) - Vector::new(mean);
            let g = unpack::<F, N>(douts[k as usize]) * gains[k as usize];
            sums[0] += total::<N>(d * d);
            sums[1] += total::<N>(g * d);
            if comptime!(form.centered) {
                sums[2] += total::<N>(g);
            }
        }
    }
    row_sums(&mut sums, shared, half, form.threads, count);
    means_of(&sums, mean, args, form.centered)
}

/// Where a row begins in every tensor.
#[cube]
fn index_of(row: u32, args: Args) -> RowIndex {
    row_index(min(row, args.rows - 1u32), args.sizes)
}

/// Loads a thread's vectors of a row.
#[cube]
fn fetch(
    to: &mut Array<Words>,
    from: &Array<Words>,
    start: usize,
    lane: u32,
    length: u32,
    #[comptime] form: Form,
) {
    let words = load_row(from, start, lane, length, form.threads, form.vectors);
    #[unroll]
    for k in 0..form.vectors {
        to[k as usize] = *words.index(k as usize);
    }
}

/// Adds the shares of a block's rows and stores the sum: each slot of the block has one.
#[cube]
fn store_share<N: Size>(
    share: &Array<Vector<f32, N>>,
    to: &mut Array<Vector<f32, N>>,
    lane: u32,
    args: Args,
    #[comptime] form: Form,
) {
    let start = CUBE_POS_X as usize * args.length as usize + lane as usize;
    if comptime!(form.threads < MIN_BLOCK) {
        let slots = comptime!(rows_per_block(form.threads));
        let size = comptime!((MIN_BLOCK * form.vectors) as usize);
        let mut all = SharedMemory::<Vector<f32, N>>::new(size);
        #[unroll]
        for k in 0..form.vectors {
            all[(UNIT_POS_X * form.vectors + k) as usize] = share[k as usize];
        }
        sync_cube();
        if UNIT_POS_X < form.threads {
            #[unroll]
            for k in 0..form.vectors {
                let mut sum = share[k as usize];
                for slot in 1..slots {
                    let from = (slot * form.threads + lane) * form.vectors + k;
                    sum += all[from as usize];
                }
                if lane + k * form.threads < args.length {
                    to[start + comptime!((k * form.threads) as usize)] = sum;
                }
            }
        }
    } else {
        #[unroll]
        for k in 0..form.vectors {
            if lane + k * form.threads < args.length {
                to[start + comptime!((k * form.threads) as usize)] = share[k as usize];
            }
        }
    }
}

/// Stores a row's `dx`, and adds to the shares of the parameters' gradients.
#[cube]
fn finish_row<F: Float, N: Size>(
    xs: &Array<Words>,
    douts: &Array<Words>,
    residuals: &Sequence<Words>,
    gains: &Array<Vector<f32, N>>,
    dweight: &mut Array<Vector<f32, N>>,
    dbias: &mut Array<Vector<f32, N>>,
    dx: &mut Array<Vector<F, N>>,
    to: usize,
    means: Means,
    lane: u32,
    args: Args,
    #[comptime] form: Form,
) {
    #[unroll]
    for k in 0..form.vectors {
        let x = unpack::<F, N>(xs[k as usize]);
        let normal = (x - Vector::new(means.mean)) * Vector::new(means.scale);
        let dout = unpack::<F, N>(douts[k as usize]);
        dweight[k as usize] += dout * normal;
        if comptime!(form.centered) {
            dbias[k as usize] += dout;
        }
        let g = dout * gains[k as usize] - Vector::new(means.gradient);
        let mut y = (g - normal * Vector::new(means.product)) * Vector::new(means.scale);
        if comptime!(form.has_residual) {
            y += unpack::<F, N>(*residuals.index(k as usize));
        }
        if lane + k * form.threads < args.length {
            dx[to + comptime!((k * form.threads) as usize)] = Vector::cast_from(y);
        }
    }
}

/// Grid: `groups`.
#[cube]
fn backward_rows<F: Float, N: Size>(
    x: &Array<Words>,
    dout: &Array<Words>,
    dresidual: &Array<Words>,
    weight: &Array<u16>,
    dx: &mut Array<Vector<F, N>>,
    dweights: &mut Array<Vector<f32, N>>,
    dbiases: &mut Array<Vector<f32, N>>,
    args: Args,
    #[comptime] form: Form,
) {
    let (threads, vectors) = comptime!((form.threads, form.vectors as usize));
    let slots = comptime!(rows_per_block(threads));
    let warps = comptime!((block(threads) / 32) as usize);
    let count = comptime!(2 + form.centered as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * count * warps));
    let mut shared_mean = SharedMemory::<f32>::new(comptime!(2 * warps));
    let lane = UNIT_POS_X % threads;
    let slot = UNIT_POS_X / threads;
    let length = args.length;
    let step = args.groups * slots;

    let mut xs = Array::<Words>::new(vectors);
    let mut douts = Array::<Words>::new(vectors);
    let mut first = CUBE_POS_X * slots;
    let index = index_of(first + slot, args);
    fetch(&mut xs, x, row_start(index, args.x), lane, length, form);
    fetch(
        &mut douts,
        dout,
        row_start(index, args.dout),
        lane,
        length,
        form,
    );
    let gains = load_gains::<N>(weight, lane, args, form);
    let mut dweight = Array::<Vector<f32, N>>::new(vectors);
    let mut dbias = Array::<Vector<f32, N>>::new(vectors);
    #[unroll]
    for k in 0..form.vectors {
        dweight[k as usize] = Vector::new(0.0f32);
        dbias[k as usize] = Vector::new(0.0f32);
    }
    let mut half = 0u32;
    while first < args.rows {
        let index = index_of(first + slot, args);
        let with = comptime!(if form.has_residual { form.vectors } else { 0 });
        let from = row_start(index, args.dresidual);
        let residuals = load_row(dresidual, from, lane, length, threads, with);
        let mut next_xs = Array::<Words>::new(vectors);
        let mut next_douts = Array::<Words>::new(vectors);
        let next = first + step;
        if comptime!(!form.reads_ahead()) {
            fetch(&mut xs, x, row_start(index, args.x), lane, length, form);
            fetch(
                &mut douts,
                dout,
                row_start(index, args.dout),
                lane,
                length,
                form,
            );
        } else if next < args.rows {
            let index = index_of(next + slot, args);
            fetch(
                &mut next_xs,
                x,
                row_start(index, args.x),
                lane,
                length,
                form,
            );
            fetch(
                &mut next_douts,
                dout,
                row_start(index, args.dout),
                lane,
                length,
                form,
            );
        }
        let means = sum_row::<F, N>(
            &xs,
            &douts,
            &gains,
            &mut shared,
            &mut shared_mean,
            half,
            lane,
            args,
            form,
        );
        if first + slot < args.rows {
            let to = row_start(index, args.dx) + lane as usize;
            finish_row::<F, N>(
                &xs,
                &douts,
                &residuals,
                &gains,
                &mut dweight,
                &mut dbias,
                dx,
                to,
                means,
                lane,
                args,
                form,
            );
        }
        if comptime!(form.reads_ahead()) {
            #[unroll]
            for k in 0..form.vectors {
                xs[k as usize] = next_xs[k as usize];
                douts[k as usize] = next_douts[k as usize];
            }
        }
        first = next;
        half = 1u32 - half;
    }
    if args.has_dweight != 0u32 {
        store_share::<N>(&dweight, dweights, lane, args, form);
    }
    if comptime!(form.centered) {
        if args.has_dbias != 0u32 {
            store_share::<N>(&dbias, dbiases, lane, args, form);
        }
    }
}

/// A row's distance from its mean, and its gradient before the normalisation.
#[cube]
fn element<F: Float>(
    x: &Array<F>,
    dout: &Array<F>,
    weight: &Array<u16>,
    from: usize,
    from_dout: usize,
    mean: f32,
    i: u32,
    args: Args,
) -> (f32, f32) {
    let d = f32::cast_from(x[from + i as usize]) - mean;
    let mut g = f32::cast_from(dout[from_dout + i as usize]);
    if args.weight_dtype != 0u32 {
        g *= parameter(weight, args.weight_dtype, i) + args.weight_offset;
    }
    (d, g)
}

/// Grid: `groups`. Each thread overwrites only elements that it alone reads, so `dx` may be `dout`.
#[cube]
fn backward_any<F: Float>(
    x: &Array<F>,
    dout: &Array<F>,
    dresidual: &Array<F>,
    weight: &Array<u16>,
    dx: &mut Array<F>,
    dweights: &mut Array<f32>,
    dbiases: &mut Array<f32>,
    args: Args,
    #[comptime] form: Form,
) {
    let count = comptime!(2 + form.centered as u32);
    let warps = comptime!((ANY / 32) as usize);
    let mut shared = SharedMemory::<f32>::new(comptime!(2 * count as usize * warps));
    let mut shared_mean = SharedMemory::<f32>::new(comptime!(2 * warps));
    let share = CUBE_POS_X as usize * args.length as usize;
    let mut i = UNIT_POS_X;
    while i < args.length {
        if args.has_dweight != 0u32 {
            dweights[share + i as usize] = 0.0f32;
        }
        if args.has_dbias != 0u32 {
            dbiases[share + i as usize] = 0.0f32;
        }
        i += ANY;
    }
    let mut half = 0u32;
    let mut row = CUBE_POS_X;
    while row < args.rows {
        let index = row_index(row, args.sizes);
        let from = row_start(index, args.x);
        let from_dout = row_start(index, args.dout);
        let mut mean = 0.0f32;
        if comptime!(form.centered) {
            let mut sums = Array::<f32>::new(1usize);
            sums[0] = 0.0f32;
            let mut i = UNIT_POS_X;
            while i < args.length {
                sums[0] += f32::cast_from(x[from + i as usize]);
                i += ANY;
            }
            row_sums(&mut sums, &mut shared_mean, half, ANY, 1u32);
            mean = sums[0] * args.inverse_length;
        }
        let mut sums = Array::<f32>::new(comptime!(count as usize));
        #[unroll]
        for c in 0..count {
            sums[c as usize] = 0.0f32;
        }
        let mut i = UNIT_POS_X;
        while i < args.length {
            let (d, g) = element(x, dout, weight, from, from_dout, mean, i, args);
            sums[0] = fma(d, d, sums[0]);
            sums[1] = fma(g, d, sums[1]);
            if comptime!(form.centered) {
                sums[2] += g;
            }
            i += ANY;
        }
        row_sums(&mut sums, &mut shared, half, ANY, count);
        let means = means_of(&sums, mean, args, form.centered);
        let from_residual = row_start(index, args.dresidual);
        let to = row_start(index, args.dx);
        let mut i = UNIT_POS_X;
        while i < args.length {
            let (d, g) = element(x, dout, weight, from, from_dout, mean, i, args);
            let normal = d * means.scale;
            let gradient = f32::cast_from(dout[from_dout + i as usize]);
            if args.has_dweight != 0u32 {
                dweights[share + i as usize] += gradient * normal;
            }
            if args.has_dbias != 0u32 {
                dbiases[share + i as usize] += gradient;
            }
            let mut y = means.scale * ((g - means.gradient) - normal * means.product);
            if comptime!(form.has_residual) {
                y += f32::cast_from(dresidual[from_residual + i as usize]);
            }
            dx[to + i as usize] = F::cast_from(y);
            i += ANY;
        }
        row += args.groups;
        half = 1u32 - half;
    }
}

fn args(b: &mut Builder) -> ArgsExpand {
    use ScalarType::{F32, U32};
    ArgsExpand {
        rows: b.scalar("rows", U32).into(),
        length: b.scalar("length", U32).into(),
        groups: b.scalar("groups", U32).into(),
        has_dweight: b.scalar("has_dweight", U32).into(),
        has_dbias: b.scalar("has_dbias", U32).into(),
        sizes: rows::sizes(b),
        x: rows::strides(b, ["x_0", "x_1", "x_2"]),
        dout: rows::strides(b, ["dout_0", "dout_1", "dout_2"]),
        dresidual: rows::strides(b, ["dresidual_0", "dresidual_1", "dresidual_2"]),
        dx: rows::strides(b, ["dx_0", "dx_1", "dx_2"]),
        weight_dtype: b.scalar("weight_dtype", U32).into(),
        weight_offset: b.scalar("weight_offset", F32).into(),
        epsilon: b.scalar("epsilon", F32).into(),
        inverse_length: b.scalar("inverse_length", F32).into(),
    }
}

fn kernel(form: Form) -> Result<Kernel, Error> {
    let any = form.vectors == 0;
    let mut b = Builder::default();
    with_vector!(form.dtype, F, N => {
        let (of_x, of_dx, of_shares) = match any {
            true => (b.type_of::<F>(), b.type_of::<F>(), b.type_of::<f32>()),
            false => {
                let of_dx = b.type_of::<Vector<F, N>>();
                (b.type_of::<Words>(), of_dx, b.type_of::<Vector<f32, N>>())
            }
        };
        let halves = b.type_of::<u16>();
        let x = b.read("x", of_x);
        // May be overwritten in place, hence not `read`.
        let dout = b.write("dout", of_x);
        let dresidual = b.read("dresidual", of_x);
        let weight = b.read("weight", halves);
        let dx = b.write("dx", of_dx);
        let dweights = b.write("dweights", of_shares);
        let dbiases = b.write("dbiases", of_shares);
        let args = args(&mut b);
        if any {
            backward_any::expand::<F>(
                b.scope(), x.into(), dout.into(), dresidual.into(), weight.into(), dx.into(),
                dweights.into(), dbiases.into(), args, form,
            );
        } else {
            backward_rows::expand::<F, N>(
                b.scope(), x.into(), dout.into(), dresidual.into(), weight.into(), dx.into(),
                dweights.into(), dbiases.into(), args, form,
            );
        }
    });
    let name = format!(
        "{}_backward_{}{}_{}x{}",
        if form.centered {
            "layer_norm"
        } else {
            "rms_norm"
        },
        form.dtype.name(),
        if form.has_residual { "_residual" } else { "" },
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
        ("threads", form.threads),
        ("vectors", form.vectors),
    ];
    b.finish(name, choices, block(form.threads))
}

/// Every form: RMSNorm and LayerNorm, with a residual's gradient and without; by dtype and shape.
pub fn kernels() -> Result<Vec<Kernel>, Error> {
    let mut kernels = Vec::new();
    for dtype in Dtype::ALL.iter().copied() {
        for centered in [false, true] {
            for has_residual in [false, true] {
                for (threads, vectors) in SHAPES.into_iter().chain([(ANY, 0)]) {
                    let form = Form {
                        dtype,
                        centered,
                        has_residual,
                        threads,
                        vectors,
                    };
                    if form.fits() {
                        kernels.push(kernel(form)?);
                    }
                }
            }
        }
    }
    Ok(kernels)
}
