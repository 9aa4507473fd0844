//! Gradients of RMSNorm and LayerNorm against their definition, which is proved by differences of
//! the forward: shapes, layouts, dtypes, features, misuse.

mod misuse;

use crate::common::contiguous;
use crate::common::reference::norm::{Gradients, Norm};
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, assert_close_of_sums, contexts, in_out, rng};
use proptest::prelude::*;
use unsloth::ops::{layer_norm, rms_norm};
use unsloth::{Buffer, Context, DType, Layout, Result, Stream, TensorMut, TensorRef, Workspace};

#[derive(Clone, Debug)]
struct Case {
    centered: bool,
    layout: Layout,
    weight: Option<DType>,
    weight_offset: f64,
    /// The parameters' gradients: none, overwritten in a dtype, or accumulated.
    gradients: Option<(DType, bool)>,
    residual: bool,
    in_place: bool,
    skew: usize,
}

fn cases(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut push = |centered, layout: Layout, features: usize| {
        let bit = |i: usize| features >> i & 1 == 1;
        let weight = bit(0).then_some(if bit(1) { DType::F32 } else { dtype });
        cases.push(Case {
            centered,
            layout,
            weight,
            weight_offset: if weight.is_some() && !centered && bit(2) {
                1.0
            } else {
                0.0
            },
            gradients: match features % 3 {
                0 => None,
                1 => Some((dtype, false)),
                _ => Some((DType::F32, bit(3))),
            },
            residual: bit(2),
            in_place: bit(3),
            skew: usize::from(bit(4)),
        });
    };
    for centered in [false, true] {
        for features in 0..32 {
            for layout in [contiguous(&[5, 96]), strided_rows(&[3, 2, 31], 1)] {
                push(centered, layout, features);
            }
        }
        for (i, layout) in [
            contiguous(&[1]),
            contiguous(&[1, 1]),
            contiguous(&[7, 3]),
            contiguous(&[2, 2, 3, 80]),
            contiguous(&[0, 64]),
            contiguous(&[4, 0]),
            contiguous(&[3000, 16]),
            contiguous(&[1500, 33]),
            transposed(&[2, 3, 4, 16], 1, 2),
            Layout::strided(&[2, 3, 2, 3, 8], &[640, 152, 72, 16, 1]).unwrap(),
        ]
        .into_iter()
        .enumerate()
        {
            push(centered, layout, 11 + i % 2 * 12);
        }
        // Rows for which a GPU takes more threads each, and one vector more and less.
        for power in 6..15 {
            for dim in [(1 << power) - 8, 1 << power, (1 << power) + 8] {
                push(centered, contiguous(&[5, dim]), 1 + power % 2 * 4);
            }
        }
        // Rows of which one block of a GPU has all, and stores sums of each dtype or adds them to what
        // is there.
        push(centered, contiguous(&[1, 4096]), 11);
        push(centered, contiguous(&[3, 1544]), 8);
        push(centered, strided_rows(&[2, 2, 2, 1032], 8), 7);
        // Rows that are many for a GPU, with a residual and without, the last in place.
        push(centered, contiguous(&[1900, 2056]), 1);
        push(centered, strided_rows(&[2, 600, 776], 8), 5);
        push(centered, contiguous(&[1057, 520]), 13);
    }
    cases
}

/// The arguments of a call, of either norm.
struct Call<'a> {
    case: &'a Case,
    x: TensorRef<'a>,
    dout: unsloth::InOut<'a>,
    dresidual: Option<TensorRef<'a>>,
    weight: Option<TensorRef<'a>>,
    dweight: Option<TensorMut<'a>>,
    dbias: Option<TensorMut<'a>>,
}

const EPSILON: f32 = 1e-5;

impl Call<'_> {
    /// Runs with exactly the workspace that it asks for, which is poisoned.
    fn run(self, ctx: &Context) -> Result<()> {
        let accumulate = self
            .case
            .gradients
            .is_some_and(|(_, accumulate)| accumulate);
        if self.case.centered {
            let mut params = layer_norm::backward::Params {
                x: self.x,
                dout: self.dout,
                dresidual: self.dresidual,
                weight: self.weight,
                epsilon: EPSILON,
                dweight: self.dweight,
                dbias: self.dbias,
                accumulate,
                workspace: Workspace::none(),
            };
            let mut memory = poisoned(ctx, layer_norm::backward::workspace_size(ctx, &params)?);
            params.workspace = memory.workspace();
            layer_norm::backward::supported(ctx, &params)?;
            return layer_norm::backward(ctx, &params, Stream::DEFAULT);
        }
        let mut params = rms_norm::backward::Params {
            x: self.x,
            dout: self.dout,
            dresidual: self.dresidual,
            weight: self.weight,
            weight_offset: self.case.weight_offset as f32,
            epsilon: EPSILON,
            dweight: self.dweight,
            accumulate,
            workspace: Workspace::none(),
        };
        let mut memory = poisoned(ctx, rms_norm::backward::workspace_size(ctx, &params)?);
        params.workspace = memory.workspace();
        rms_norm::backward::supported(ctx, &params)?;
        rms_norm::backward(ctx, &params, Stream::DEFAULT)
    }
}

fn poisoned(ctx: &Context, size: usize) -> Buffer {
    let buffer = Buffer::from_slice(ctx, &vec![f32::NAN; size / 4]).unwrap();
    assert_eq!(buffer.size(), size);
    buffer
}

/// Gradients from the reference, of what a case has.
fn expected(case: &Case, x: &[f64], dout: &[f64], weight: Option<&[f64]>) -> Gradients {
    let norm = Norm {
        centered: case.centered,
        weight,
        weight_offset: case.weight_offset,
        epsilon: EPSILON.into(),
        dim: *case.layout.shape().last().unwrap(),
    };
    norm.backward(x, dout)
}

fn check(ctx: &Context, dtype: DType, case: &Case) {
    let rng = &mut rng();
    let dim = *case.layout.shape().last().unwrap();
    let row = contiguous(&[dim]);
    let mut normal = || {
        let mut t = TestTensor::poisoned_at(dtype, case.layout, case.skew);
        t.set_values(&TestTensor::normal(rng, dtype, case.layout).values());
        t
    };
    let (x, dout, dresidual) = (normal(), normal(), normal());
    let weight = case.weight.map(|d| TestTensor::normal(rng, d, row));
    let values = weight.as_ref().map(TestTensor::values);
    let mut wanted = expected(case, &x.values(), &dout.values(), values.as_deref());
    if case.residual {
        for (i, r) in dresidual.values().into_iter().enumerate() {
            wanted.dx[i] += r;
            wanted.dx_terms[i] += r.abs();
        }
    }
    // What is accumulated to.
    let mut gradient = |there: bool, sums: &mut [f64], terms: &mut [f64]| {
        let (d, accumulate) = case.gradients.filter(|_| there)?;
        if !accumulate {
            return Some(TestTensor::poisoned(d, row));
        }
        let held = TestTensor::normal(rng, d, row);
        for (i, h) in held.values().into_iter().enumerate() {
            sums[i] += h;
            terms[i] += h.abs();
        }
        Some(held)
    };
    let has_weight = case.weight.is_some();
    let dweight = gradient(has_weight, &mut wanted.dweight, &mut wanted.dweight_terms);
    let dbias = gradient(case.centered, &mut wanted.dbias, &mut wanted.dbias_terms);

    let upload = |t: &Option<TestTensor>| t.as_ref().map(|t| t.upload(ctx));
    let (there_x, there_weight) = (x.upload(ctx), upload(&weight));
    let there_residual = dresidual.upload(ctx);
    let (mut there_dweight, mut there_dbias) = (upload(&dweight), upload(&dbias));
    let mut there_dout = dout.upload(ctx);
    let mut there_dx = TestTensor::poisoned_at(dtype, case.layout, case.skew).upload(ctx);
    let call = Call {
        case,
        x: there_x.view(),
        dout: in_out(case.in_place, &mut there_dout, &mut there_dx),
        dresidual: case.residual.then(|| there_residual.view()),
        weight: there_weight.as_ref().map(|w| w.view()),
        dweight: there_dweight.as_mut().map(|t| t.view_mut()),
        dbias: there_dbias.as_mut().map(|t| t.view_mut()),
    };
    call.run(ctx).unwrap();

    let dx = if case.in_place { there_dout } else { there_dx }.download_output();
    // Two or three means of `dim` terms in partial sums, a root, products.
    let ulps = 16.0 + (dim as f64).sqrt() / 4.0;
    assert_close_of_sums(
        "dx",
        dtype,
        &dx.values(),
        &wanted.dx,
        &wanted.dx_terms,
        ulps,
    );
    // As many terms as rows, each as exact as the normalised row.
    let ulps = ulps + (case.layout.num_rows() as f64).sqrt();
    for (name, got, sums, terms) in [
        (
            "dweight",
            there_dweight,
            wanted.dweight,
            wanted.dweight_terms,
        ),
        ("dbias", there_dbias, wanted.dbias, wanted.dbias_terms),
    ] {
        if let Some(got) = got {
            let got = got.download_output();
            assert_close_of_sums(name, got.dtype, &got.values(), &sums, &terms, ulps);
        }
    }
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(&cases(dtype), |case| check(&ctx, dtype, case));
        }
    }
}

/// The reference's gradients are the forward's differences along random directions.
#[test]
fn the_definition_is_the_forwards_derivative() {
    const STEP: f64 = 1e-5;
    let rng = &mut rng();
    for (centered, weight_offset) in [(false, 0.0), (false, 1.0), (true, 0.0)] {
        let dim = 13;
        let mut random = |n| TestTensor::normal(rng, DType::F32, contiguous(&[n])).values();
        let (x, dout, weight) = (random(4 * dim), random(4 * dim), random(dim));
        let (along_x, along_weight) = (random(4 * dim), random(dim));
        let loss = |step: f64| {
            let moved = |from: &[f64], along: &[f64]| -> Vec<f64> {
                from.iter().zip(along).map(|(a, b)| a + step * b).collect()
            };
            let norm = Norm {
                centered,
                weight: Some(&moved(&weight, &along_weight)),
                weight_offset,
                epsilon: 1e-5,
                dim,
            };
            let y = norm.forward(&moved(&x, &along_x));
            y.iter().zip(&dout).map(|(y, d)| y * d).sum::<f64>()
        };
        let difference = (loss(STEP) - loss(-STEP)) / (2.0 * STEP);
        let norm = Norm {
            centered,
            weight: Some(&weight),
            weight_offset,
            epsilon: 1e-5,
            dim,
        };
        let gradients = norm.backward(&x, &dout);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let derivative = dot(&gradients.dx, &along_x) + dot(&gradients.dweight, &along_weight);
        assert!(
            (difference - derivative).abs() < 1e-7 * (1.0 + derivative.abs()),
            "{difference} {derivative}"
        );
    }
}

/// A call through both modules with everything there, of tensors `[rows, dim]`, the parameters' of
/// f32.
fn gradients(
    (ctx, dtype): (&Context, DType),
    centered: bool,
    x: &[f64],
    dout: &[f64],
    held: &[f64],
) -> [Vec<u8>; 3] {
    let dim = held.len();
    let shape = [x.len() / dim, dim];
    let case = Case {
        centered,
        layout: contiguous(&shape),
        weight: Some(DType::F32),
        weight_offset: 0.0,
        gradients: Some((DType::F32, true)),
        residual: false,
        in_place: false,
        skew: 0,
    };
    let rows = |values: &[f64]| TestTensor::of(dtype, &shape, values).upload(ctx);
    let vector = || TestTensor::of(DType::F32, &[dim], held).upload(ctx);
    let (x, mut dout, weight) = (rows(x), rows(dout), vector());
    let (mut dweight, mut dbias) = (vector(), vector());
    let mut dx = TestTensor::poisoned(dtype, case.layout).upload(ctx);
    let call = Call {
        case: &case,
        x: x.view(),
        dout: in_out(false, &mut dout, &mut dx),
        dresidual: None,
        weight: Some(weight.view()),
        dweight: Some(dweight.view_mut()),
        dbias: centered.then(|| dbias.view_mut()),
    };
    call.run(ctx).unwrap();
    [dx, dweight, dbias].map(|t| t.download_output().bits())
}

/// The same inputs give the same bits, and with any number of threads.
#[test]
fn bits_repeat() {
    let rng = &mut rng();
    let one = unsloth::ContextOptions {
        num_threads: 1,
        ..Default::default()
    };
    let mut normal =
        |shape: &[usize]| TestTensor::normal(rng, DType::F32, contiguous(shape)).values();
    // Rows that a GPU's threads share in several ways, and that one block has.
    for (dtype, shape) in [
        (DType::F32, [777, 40]),
        (DType::Bf16, [333, 2056]),
        (DType::Bf16, [3, 2056]),
    ] {
        let (x, dout, held) = (normal(&shape), normal(&shape), normal(&shape[1..]));
        for centered in [false, true] {
            for ctx in contexts() {
                let of = |ctx| gradients((ctx, dtype), centered, &x, &dout, &held);
                let first = of(&ctx);
                for _ in 0..5 {
                    assert!(first == of(&ctx));
                }
                if ctx.backend() == unsloth::Backend::Cpu {
                    assert!(first == of(&Context::new(&one).unwrap()));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// A norm that no shift (no scale) of a row changes has gradients that are orthogonal to such a
    /// change: their sum over a row (their product with it) is zero, but for epsilon's part.
    #[test]
    fn gradients_are_orthogonal_to_what_changes_nothing(
        rows in 1usize..20, dim in 2usize..300, centered: bool, seed: u64,
    ) {
        use rand::SeedableRng;
        let rng = &mut rand::rngs::StdRng::seed_from_u64(seed);
        let layout = contiguous(&[rows, dim]);
        let mut normal = || TestTensor::normal(rng, DType::F32, layout).values();
        let (x, dout) = (normal(), normal());
        for ctx in contexts() {
            let [dx, ..] = gradients((&ctx, DType::F32), centered, &x, &dout, &vec![1.0; dim]);
            let dx: Vec<f64> = dx
                .chunks(4)
                .map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap())))
                .collect();
            for (row, dx) in x.chunks(dim).zip(dx.chunks(dim)) {
                let mean = if centered { row.iter().sum::<f64>() / dim as f64 } else { 0.0 };
                let norm = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>().sqrt();
                let spread = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / dim as f64;
                let along: f64 = row.iter().zip(dx).map(|(x, d)| (x - mean) * d).sum();
                // Epsilon's part is the product's share epsilon / (spread + epsilon).
                let bound = 1e-4 + 2e-5 / (spread + 1e-5);
                prop_assert!(along.abs() <= bound * (1.0 + norm(row) * norm(dx)), "{along}");
                if centered {
                    let sum: f64 = dx.iter().sum();
                    prop_assert!(sum.abs() <= 1e-4 * (1.0 + norm(dx) * (dim as f64).sqrt()), "{sum}");
                }
            }
        }
    }
}
