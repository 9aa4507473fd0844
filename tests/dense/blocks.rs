//! Weights in blocks: products with each format. A weight's last row ends where memory does, or a byte before it.

use crate::common::guarded::AtEnd;
use crate::common::reference::blocks;
use crate::common::reference::linear::{linear as exact, linear_f32 as plain};
use crate::common::{
    FLOATS, TestTensor, assert_flash_rule_of_sums, contexts, contiguous, for_each_case, rng,
    rounded, rules,
};
use unsloth::ops::linear::{self, Output, Params, Weights};
use unsloth::{
    Backend, Context, ContextOptions, DType, InOut, Layout, Stream, TensorRef, Workspace,
};

/// Rows of `x` up to which a GPU reads blocks as they are, be it f32, and where it has 16 bits.
const FEW_ROWS: usize = 24;
const SOME_ROWS: usize = 32;

/// A matrix in blocks, and its elements.
pub struct Matrix {
    memory: AtEnd,
    dtype: DType,
    layout: Layout,
    pub values: Vec<f64>,
}

impl Matrix {
    /// Rows `gap` blocks apart.
    pub fn random(ctx: &Context, dtype: DType, shape: [usize; 2], gap: usize) -> Matrix {
        Matrix::random_at(ctx, dtype, shape, gap, 0)
    }

    /// As many bytes before the end of memory.
    fn random_at(
        ctx: &Context,
        dtype: DType,
        [rows, columns]: [usize; 2],
        gap: usize,
        behind: usize,
    ) -> Matrix {
        let (len, bytes) = dtype.block();
        let stride = columns + gap * len;
        let elements = (rows - 1) * stride + columns;
        // What lies between rows is no number.
        let mut all = vec![0xff; elements / len * bytes];
        let rng = &mut rng();
        let mut values = Vec::new();
        for row in all.chunks_mut(stride / len * bytes) {
            let row = &mut row[..columns / len * bytes];
            row.copy_from_slice(&blocks::random(rng, dtype, columns));
            values.extend(blocks::decode(dtype, row));
        }
        all.extend(vec![0xff; behind]);
        Matrix {
            memory: AtEnd::new(ctx, &all),
            dtype,
            layout: Layout::strided(&[rows, columns], &[stride, 1]).unwrap(),
            values,
        }
    }

    pub fn view(&self) -> TensorRef<'_> {
        self.memory.view(self.dtype, self.layout)
    }

    pub fn weights(&self, float_activations: bool) -> Weights<'_> {
        let weight = match float_activations {
            true => self.view().with_float_activations(),
            false => self.view(),
        };
        Weights { weight, bias: None }
    }

    /// Whose products may round what it multiplies to 8 bits.
    pub fn int8_weights(&self) -> Weights<'_> {
        let weight = self.view().with_int8_activations();
        Weights { weight, bias: None }
    }

    /// The same matrix of f32.
    pub fn decoded(&self, ctx: &Context) -> crate::common::DeviceTensor {
        TestTensor::of(DType::F32, self.layout.shape(), &self.values).upload(ctx)
    }
}

/// `x Wᵀ`.
pub fn product(ctx: &Context, x: &TestTensor, weights: Weights<'_>) -> TestTensor {
    product_as(ctx, x, weights, x.dtype)
}

/// `x Wᵀ` in a dtype.
fn product_as(ctx: &Context, x: &TestTensor, weights: Weights<'_>, dtype: DType) -> TestTensor {
    let layout = contiguous(&[x.layout.dim(0), weights.weight.layout().dim(0)]);
    let mut out = TestTensor::poisoned(dtype, layout).upload(ctx);
    run(ctx, x, weights, Output::Write(out.view_mut()));
    out.download_output()
}

/// `x Wᵀ` added to a residual, in place.
pub fn added(
    ctx: &Context,
    x: &TestTensor,
    weights: Weights<'_>,
    residual: &TestTensor,
) -> TestTensor {
    let mut out = residual.upload(ctx);
    let output = Output::Add(InOut::InPlace(out.view_mut()));
    run(ctx, x, weights, output);
    out.download_output()
}

fn run(ctx: &Context, x: &TestTensor, weights: Weights<'_>, output: Output<'_>) {
    let x = x.upload(ctx);
    let mut params = Params {
        x_norm: None,
        parallel: None,
        x: x.view(),
        weights,
        output,
        workspace: Workspace::none(),
    };
    linear::supported(ctx, &params).unwrap();
    // The CPU takes what it lacks from its own.
    let size = match ctx.backend() {
        Backend::Cpu => 0,
        _ => linear::workspace_size(ctx, &params).unwrap(),
    };
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size / 4])).upload(ctx);
    if size > 0 {
        // SAFETY: the tensor's elements, which nothing else uses.
        params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
    }
    linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
}

/// The greatest code of 16 bits.
const MOST: f64 = 32639.0;

/// Asserts that products are off by no more than half a step of each 32 neighbours of `x`, and what
/// f32 and the output's dtype round.
fn assert_rounded_once(dtype: DType, y: &[f64], x: &[f64], w: &[f64], sizes: [usize; 3]) {
    assert_rounded_to(MOST, dtype, y, x, w, sizes);
}

/// As [`assert_rounded_once`], where `most` is the greatest code.
fn assert_rounded_to(
    most: f64,
    dtype: DType,
    y: &[f64],
    x: &[f64],
    w: &[f64],
    [rows, n, k]: [usize; 3],
) {
    let expected = exact(x, w, (rows, k, n), None, None);
    for (i, (y, expected)) in y.iter().zip(expected).enumerate() {
        let (x, w) = (&x[i / n * k..][..k], &w[i % n * k..][..k]);
        let (mut bound, mut terms) = (0.0, 0.0);
        for (x, w) in x.chunks(32).zip(w.chunks(32)) {
            let greatest = x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let weights: f64 = w.iter().map(|w| w.abs()).sum();
            bound += weights * greatest / most / 2.0;
            terms += weights * greatest;
        }
        // Codes are summed without their offset, which may be 16 times as much.
        bound += 16.0 * terms * rules::epsilon(DType::F32);
        bound += expected.abs() * rules::epsilon(dtype);
        let error = (y - expected).abs();
        assert!(
            error <= bound,
            "{i}: {y}, not {expected}: off by {error}, allowed {bound}"
        );
    }
}

/// `|y - expected|² / |expected|²`.
pub fn nmse(y: &[f64], expected: &[f64]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    squares(&mut y.iter().zip(expected).map(|(y, e)| y - e))
        / squares(&mut expected.iter().copied())
}

/// Numbers of rows on both sides of each switch; lengths of one block, of odd numbers of them, and of
/// more than are unpacked at a time.
fn cases(dtype: DType) -> Vec<(usize, [usize; 2], usize)> {
    let (len, _) = dtype.block();
    let mut cases = Vec::new();
    for rows in [1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 32, 33] {
        cases.push((rows, [33, 3 * len], 0));
    }
    // Few rows: of one block and of several of a cluster, the last of which has less; and more rows than that.
    for (rows, shape) in [
        (2, [48, 16 * 256]),
        (8, [24, 57 * 256]),
        (12, [40, 16 * 256]),
        (16, [160, 56 * 256]),
        (16, [16, 64 * 256]),
    ] {
        cases.push((rows, shape, 0));
    }
    // Few rows by tiles that are copied as they lie: many columns, odd numbers of units, and more rows.
    for (rows, shape) in [
        (2, [48, 18]),
        (8, [2128, 18]),
        (16, [16, 28]),
        (5, [8, 9]),
        (9, [24, 63]),
        (3, [32, 66]),
    ] {
        let [columns, units] = shape;
        let units: usize = units;
        cases.push((rows, [columns, (32 * units / len).max(1) * len], 0));
    }
    // Rows that are whole lines of 16 bytes; some tiles for each of a GPU's blocks; more integers of x
    // than a block has shared memory for.
    for rows in [1, 3, 8, 16, 33] {
        cases.push((rows, [40, 16 * 256], 0));
        cases.push((rows, [2400, 2 * 256], 0));
        cases.push((rows, [17, 56 * 256], 0));
    }
    // One row by whole tiles: of one chunk and of two, of odd numbers of them, the last without all steps; more
    // columns than a block has threads.
    for shape in [
        [48, 16 * 256],
        [32, 8 * 256],
        [160, 56 * 256],
        [16, 17 * 256],
        [2128, 3 * 256],
    ] {
        cases.push((1, shape, 0));
    }
    // By tiles of rows that are no whole lines, or no whole steps: more columns than a block has threads, and more
    // quads of blocks than warps.
    for shape in [[48, 18], [2128, 18], [16, 28], [32, 65], [32, 66]] {
        let [columns, units] = shape;
        cases.push((1, [columns, (32 * units / len).max(1) * len], 0));
    }
    // Half of a step, and tiles without all columns.
    cases.push((6, [530, 9 * 256], 0));
    for rows in [1, 5, 33] {
        cases.push((rows, [16, 9 * 256], 1));
    }
    for blocks in [1, 2, 7, 9] {
        cases.push((1, [5, blocks * len], 2));
        cases.push((65, [67, blocks * len], 0));
    }
    // Many rows by few columns, which blocks of a cluster part among them.
    cases.push((300, [128, 4 * 256], 0));
    // More rows than are rounded at a time.
    if len == 32 {
        cases.push((530, [35, len], 0));
    }
    cases
}

/// f32 is what the dtype of `x` is rounded from.
#[test]
fn outputs_may_be_f32() {
    for ctx in contexts() {
        for format in DType::BLOCKS {
            let (len, _) = format.block();
            // More rows go to cuBLASLt on a GPU, which may add in another order for another dtype.
            for rows in [1, 8, 9, FEW_ROWS, SOME_ROWS] {
                let matrix = Matrix::random(&ctx, format, [35, 3 * len], 0);
                for dtype in [DType::F16, DType::Bf16] {
                    let x = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, 3 * len]));
                    let wide = product_as(&ctx, &x, matrix.weights(false), DType::F32);
                    let narrow = product(&ctx, &x, matrix.weights(false));
                    let rounded = crate::common::rounded(dtype, &wide.values());
                    assert!(rounded == narrow.values(), "{format} {dtype} {rows}");
                    assert!(wide.values() != narrow.values(), "{format} {dtype} {rows}");
                }
            }
        }
    }
}

#[test]
fn products_are_those_of_the_decoded_weight() {
    for ctx in contexts() {
        for format in DType::BLOCKS {
            for_each_case(&cases(format), |&(rows, shape, gap)| {
                // Some at odd addresses.
                let behind = usize::from(rows % 2 == 1 && !shape[0].is_multiple_of(16));
                let matrix = Matrix::random_at(&ctx, format, shape, gap, behind);
                for dtype in FLOATS {
                    // The CPU widens all to f32.
                    let few: &[usize] = match ctx.backend() {
                        Backend::Cpu => &[1, 33],
                        _ => &[1, 2, 3, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 65, 300],
                    };
                    if dtype == DType::F32 || few.contains(&rows) {
                        let x =
                            TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, shape[1]]));
                        assert_products_are_right(&ctx, &x, &matrix);
                    }
                }
            });
        }
    }
}

fn assert_products_are_right(ctx: &Context, x: &TestTensor, matrix: &Matrix) {
    let (dtype, rows, k) = (x.dtype, x.layout.dim(0), x.layout.dim(1));
    let n = matrix.layout.dim(0);
    let (x_values, w) = (x.values(), &matrix.values);
    let on_gpu = ctx.backend() != Backend::Cpu;
    // Of more rows of 16 bits Hopper may round weights too.
    let few = match dtype {
        DType::F32 => FEW_ROWS,
        _ => 8,
    };
    if !on_gpu || rows <= few {
        let y = product(ctx, x, matrix.weights(false)).values();
        assert_rounded_once(dtype, &y, &x_values, w, [rows, n, k]);
    }
    let sizes = (rows, k, n);
    let expected = exact(&x_values, w, sizes, None, None);
    // Of more rows, or of x as it is, a GPU's products are those of weights of the dtype of x.
    let of_dtype = match on_gpu {
        true => rounded(dtype, w),
        false => w.clone(),
    };
    let plain = rounded(dtype, &plain(&x_values, &of_dtype, sizes, None, None));
    let magnitudes = |values: &[f64]| values.iter().map(|v| v.abs()).collect::<Vec<_>>();
    let terms = exact(&magnitudes(&x_values), &magnitudes(w), sizes, None, None);
    let most = terms.into_iter().fold(0.0, f64::max);
    // Such that ask for float activations are rounded by no kernel for some rows of 16 bits.
    if on_gpu && dtype != DType::F32 && (few + 1..=SOME_ROWS).contains(&rows) {
        let y = product(ctx, x, matrix.weights(true)).values();
        assert_rounded_once(dtype, &y, &x_values, w, [rows, n, k]);
    }
    for float_activations in [false, true] {
        if float_activations || (on_gpu && rows > few) {
            let y = product(ctx, x, matrix.weights(float_activations)).values();
            assert_flash_rule_of_sums("out", dtype, &y, &expected, &plain, most);
        }
    }
}

/// Where tiles are few for a GPU's multiprocessors and rows are long, blocks have even shares of their steps, or of those
/// of the last tiles; two of them may copy rows for each other, and rows may have two launches: with the same bits each time.
#[test]
fn blocks_share_steps() {
    const EVERY: usize = 67;
    for ctx in contexts() {
        if ctx.backend() == Backend::Cpu {
            continue;
        }
        let cases = [
            (DType::Q4_0, DType::Bf16, 40, 33),
            (DType::Q8_0, DType::F16, 64, 33),
            (DType::Q6K, DType::Bf16, 17, 33),
            (DType::Q4K, DType::F16, 128, 33),
            // Most of a last tile is not copied, or is a launch of its own.
            (DType::Q8_0, DType::Bf16, 144, 33),
            (DType::Q4_0, DType::F16, 535, 33),
            (DType::Q6K, DType::Bf16, 535, 36),
            // 144 tiles of 256 rows, where 132 are at once.
            (DType::Q4_0, DType::Bf16, 1024, 36),
            (DType::Q5K, DType::F16, 512, 36),
        ];
        for_each_case(&cases, |&(format, dtype, rows, tiles)| {
            let [n, k] = [tiles * 128 - 8, 33 * 256];
            let matrix = Matrix::random(&ctx, format, [n, k], 0);
            let x = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, k]));
            let run = || product(&ctx, &x, matrix.weights(false));
            let y = run();
            assert!((0..3).all(|_| run().bits() == y.bits()), "{format} {rows}");
            // Columns of every tile.
            let columns: Vec<_> = (0..n).step_by(EVERY).collect();
            let of = |values: &[f64]| -> Vec<f64> {
                let rows = values.chunks(n);
                rows.flat_map(|row| columns.iter().map(|c| row[*c]))
                    .collect()
            };
            let w: Vec<_> = columns
                .iter()
                .flat_map(|c| &matrix.values[c * k..(c + 1) * k])
                .copied()
                .collect();
            let expected = exact(&x.values(), &w, (rows, k, columns.len()), None, None);
            assert!(nmse(&of(&y.values()), &expected) < 2e-5, "{format} {rows}");
            let residual = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, n]));
            let sum = added(&ctx, &x, matrix.weights(false), &residual).values();
            let others = of(&residual.values());
            let expected: Vec<f64> = expected.iter().zip(others).map(|(y, r)| y + r).collect();
            assert!(nmse(&of(&sum), &expected) < 2e-5, "{format} {rows}, added");
        });
    }
}

/// Great and small numbers have their products.
#[test]
fn scales_of_activations_reach_to_both_ends() {
    for ctx in contexts() {
        for format in DType::BLOCKS {
            let k = 512;
            let matrix = Matrix::random(&ctx, format, [20, k], 0);
            // Of many rows a GPU rounds none.
            let all: &[usize] = match ctx.backend() {
                Backend::Cpu => &[2, 40],
                _ => &[2],
            };
            for scale in [1e-25, 1e-12, 1e12, 1e30] {
                for &rows in all {
                    let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[rows, k]));
                    let values: Vec<f64> = x.values().iter().map(|x| x * scale).collect();
                    let x = TestTensor::of(DType::F32, &[rows, k], &values);
                    let y = product(&ctx, &x, matrix.weights(false)).values();
                    let (x, sizes) = (x.values(), [rows, 20, k]);
                    assert_rounded_once(DType::F32, &y, &x, &matrix.values, sizes);
                }
            }
        }
    }
}

/// Far less than the 5e-4 that ggml allows its own products.
#[test]
fn errors_of_rounded_activations_are_small() {
    let ctx = Context::cpu().unwrap();
    for format in DType::BLOCKS {
        for rows in [1, 16, 64] {
            let matrix = Matrix::random(&ctx, format, [512, 1024], 0);
            let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[rows, 1024]));
            let y = product(&ctx, &x, matrix.weights(false)).values();
            let expected = exact(&x.values(), &matrix.values, (rows, 1024, 512), None, None);
            let error = nmse(&y, &expected);
            assert!(error < 1e-8, "{format} {rows}: {error}");
        }
    }
}

/// Where it is asked for, activations may be rounded to 8 bits: an order below what ggml allows its own products.
/// On a GPU all are as without.
#[test]
fn activations_of_8_bits() {
    for ctx in contexts() {
        for format in DType::BLOCKS {
            let [n, k] = [75, 768];
            let matrix = Matrix::random(&ctx, format, [n, k], 0);
            for (dtype, rows) in [
                (DType::F32, 1),
                (DType::F32, 8),
                (DType::F32, 9),
                (DType::F16, 40),
                (DType::Bf16, 131),
            ] {
                let x = TestTensor::normal(&mut rng(), dtype, contiguous(&[rows, k]));
                let y = product(&ctx, &x, matrix.int8_weights());
                let all = x.values();
                if ctx.backend() != Backend::Cpu {
                    let plain = product(&ctx, &x, matrix.weights(false));
                    assert!(y.bits() == plain.bits(), "{format} {rows}");
                }
                let sizes = [rows, n, k];
                assert_rounded_to(127.0, dtype, &y.values(), &all, &matrix.values, sizes);
                let expected = exact(&all, &matrix.values, (rows, k, n), None, None);
                if rows >= 40 {
                    let error = nmse(&y.values(), &expected);
                    assert!(error < 5e-5, "{format} {rows}: {error}");
                    continue;
                }
                // Of a few rows sums may cancel out, and what is rounded off may not: it is compared with the terms. All columns of
                // formats with offsets have much of it in common.
                let squares = |of: &[f64]| of.iter().map(|x| x * x).collect::<Vec<_>>();
                let terms = (squares(&all), squares(&matrix.values));
                let terms = exact(&terms.0, &terms.1, (rows, k, n), None, None);
                let off = y
                    .values()
                    .iter()
                    .zip(&expected)
                    .map(|(y, e)| (y - e) * (y - e))
                    .sum::<f64>();
                let error = off / terms.iter().sum::<f64>();
                let most = if rows == 1 { 3e-4 } else { 1e-4 };
                assert!(error < most, "{format} {rows}: {error}");
            }
        }
    }
}

#[test]
fn bits_depend_on_neither_threads_nor_neighbours() {
    let contexts = [1, 2, 5].map(|num_threads| {
        let options = ContextOptions {
            num_threads,
            ..ContextOptions::default()
        };
        Context::new(&options).unwrap()
    });
    for format in [DType::Q4_1, DType::Q6K] {
        let matrix = Matrix::random(&contexts[0], format, [300, 768], 0);
        for rows in [1, 7, 8, 32, 100] {
            let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[rows, 768]));
            for weights in [matrix.weights(false), matrix.int8_weights()] {
                let run = |ctx| product(ctx, &x, weights).bits();
                let [one, two, five] = contexts.each_ref().map(run);
                assert!(one == two && one == five, "{format} {rows}");
            }
            let run = |ctx| product(ctx, &x, matrix.weights(false)).bits();
            let one = run(&contexts[0]);
            // The same order of additions: up to eight rows, the processor's kernels of few; then panels or, where it has
            // none, chunks.
            let beside = match rows {
                1..=8 => 1,
                9..=32 => 9,
                _ => continue,
            };
            let last = &x.values()[(rows - beside) * 768..];
            let last = TestTensor::of(DType::F32, &[beside, 768], last);
            let alone = product(&contexts[0], &last, matrix.weights(false)).bits();
            assert!(one.ends_with(&alone), "{format} {rows}");
        }
    }
}

#[test]
fn what_is_no_number_shows() {
    for ctx in contexts() {
        for (format, odd) in [
            (DType::Q4_0, f64::NAN),
            (DType::Q8_0, f64::INFINITY),
            (DType::Q4_1, f64::INFINITY),
        ] {
            let matrix = Matrix::random(&ctx, format, [20, 512], 0);
            for rows in [3, 8, 40] {
                let mut values = vec![1.0; rows * 512];
                values[512 + 77] = odd;
                for dtype in FLOATS {
                    let x = TestTensor::of(dtype, &[rows, 512], &values);
                    let y = product(&ctx, &x, matrix.weights(false)).values();
                    for (i, y) in y.iter().enumerate() {
                        assert_eq!(y.is_finite(), i / 20 != 1, "{format} {dtype} {rows} {i}");
                    }
                }
            }
        }
    }
}
