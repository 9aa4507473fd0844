//! Gradients of linear layers against their definition, which is proved by differences of the
//! forward: shapes, layouts, dtypes, accumulation, gradients left out; their properties.

use crate::common::contiguous;
use crate::common::reference::linear::{
    Gradients, linear, linear_backward as exact, linear_backward_f32 as plain,
};
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_gradient_rule, contexts, cut_off, rng, rounded,
};
use proptest::prelude::*;
use unsloth::ops::linear::{self, backward::Params};
use unsloth::{Context, ContextOptions, DType, Error, Layout, Stream, Workspace};

#[derive(Clone, Debug)]
struct Case {
    dout: Layout,
    x: Layout,
    weight: Layout,
    dx: Layout,
    dweight: Layout,
    accumulate: bool,
    skew: usize,
}

fn case(leading: &[usize], (n, k): (usize, usize)) -> Case {
    let shape = |last| [leading, &[last]].concat();
    Case {
        dout: contiguous(&shape(n)),
        x: contiguous(&shape(k)),
        weight: contiguous(&[n, k]),
        dx: contiguous(&shape(k)),
        dweight: contiguous(&[n, k]),
        accumulate: false,
        skew: 0,
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Around vector widths and tiles, in each direction.
    for rows in [1, 2, 5, 8, 31, 64, 130] {
        for size in [(1, 1), (3, 5), (33, 31), (64, 128), (72, 200)] {
            cases.push(case(&[rows], size));
        }
    }
    for (leading, size) in [
        (&[][..], (7, 12)),
        (&[2, 3, 2], (9, 40)),
        (&[2, 3, 1, 2, 5], (9, 40)),
        (&[600], (140, 33)),
        (&[1100], (17, 70)),
        (&[10], (600, 300)),
        (&[10], (16, 1100)),
        (&[0], (5, 3)),
        (&[3], (0, 4)),
        (&[3], (4, 0)),
    ] {
        for accumulate in [false, true] {
            cases.push(Case {
                accumulate,
                ..case(leading, size)
            });
        }
    }
    for rows in [1, 3, 40] {
        let base = Case {
            accumulate: rows == 3,
            ..case(&[rows], (50, 70))
        };
        cases.push(Case {
            skew: 1,
            ..base.clone()
        });
        cases.push(Case {
            dout: strided_rows(&[rows, 50], 2),
            x: strided_rows(&[rows, 70], 3),
            weight: strided_rows(&[50, 70], 5),
            dx: strided_rows(&[rows, 70], 1),
            dweight: strided_rows(&[50, 70], 4),
            ..base.clone()
        });
        // Rows in steps that allow vectors.
        cases.push(Case {
            dout: strided_rows(&[rows, 64], 8),
            x: strided_rows(&[rows, 32], 16),
            weight: strided_rows(&[64, 32], 8),
            dx: strided_rows(&[rows, 32], 8),
            dweight: strided_rows(&[64, 32], 16),
            ..base.clone()
        });
        // Leading dimensions that do not merge.
        cases.push(Case {
            dout: transposed(&[rows, 4, 50], 0, 1),
            x: contiguous(&[rows, 4, 70]),
            dx: transposed(&[rows, 4, 70], 0, 1),
            ..base.clone()
        });
        cases.push(Case {
            dout: transposed(&[2, rows, 3, 2, 2, 50], 1, 3),
            x: transposed(&[2, rows, 3, 2, 2, 70], 0, 2),
            dx: contiguous(&[2, rows, 3, 2, 2, 70]),
            ..base.clone()
        });
        // Rows that repeat.
        cases.push(Case {
            dout: Layout::strided(&[rows, 50], &[0, 1]).unwrap(),
            ..base
        });
    }
    cases
}

fn skewed(rng: &mut impl rand::Rng, dtype: DType, layout: Layout, skew: usize) -> TestTensor {
    let mut tensor = TestTensor::poisoned_at(dtype, layout, skew);
    // As many as there are addresses: some layouts repeat elements.
    tensor.set_values(&TestTensor::normal(rng, dtype, layout).values());
    tensor
}

/// Inputs on a device, and outputs to come.
struct Call {
    dout: DeviceTensor,
    x: DeviceTensor,
    weight: DeviceTensor,
    dx: Option<DeviceTensor>,
    dweight: Option<DeviceTensor>,
    dbias: Option<DeviceTensor>,
    accumulate: bool,
}

/// A workspace.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lent {
    Needed,
    Useful,
}

impl Call {
    fn params(&mut self) -> Params<'_> {
        let mut outputs = [&mut self.dx, &mut self.dweight, &mut self.dbias]
            .map(|t| t.as_mut().map(DeviceTensor::view_mut));
        Params {
            parallel: None,
            dout: self.dout.view(),
            x: Some(self.x.view()),
            weight: Some(self.weight.view()),
            dx: outputs[0].take(),
            dweight: outputs[1].take(),
            dbias: outputs[2].take(),
            accumulate: self.accumulate,
            workspace: Workspace::none(),
        }
    }

    /// Computes, with what is needed of a workspace or with all that is useful, and gives that.
    fn run(&mut self, ctx: &Context, lent: Lent) -> usize {
        let mut params = self.params();
        linear::backward::supported(ctx, &params).unwrap();
        let useful = linear::backward::workspace_size(ctx, &params).unwrap();
        let mut size = useful;
        if lent == Lent::Needed {
            size = match linear::backward(ctx, &params, Stream::DEFAULT) {
                Ok(()) => return useful,
                Err(Error::WorkspaceTooSmall { required, .. }) => required,
                Err(error) => panic!("{error}"),
            };
        }
        let layout = contiguous(&[size.div_ceil(4)]);
        let memory = TestTensor::poisoned(DType::F32, layout).upload(ctx);
        // SAFETY: `size` bytes from the start of the tensor are its elements, which nothing else
        // uses.
        params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
        linear::backward(ctx, &params, Stream::DEFAULT).unwrap();
        memory.download_output();
        useful
    }
}

fn check(ctx: &Context, dtype: DType, weight_dtype: DType, case: &Case) {
    let rng = &mut rng();
    let (n, k) = (case.weight.dim(0), case.weight.dim(1));
    let dout = skewed(rng, dtype, case.dout, case.skew);
    let x = skewed(rng, dtype, case.x, case.skew);
    let weight = skewed(rng, weight_dtype, case.weight, case.skew);
    // Of parameters, gradients have their dtype or f32.
    let wide = case.accumulate || rand::Rng::random::<bool>(rng);
    let grad_dtype = if wide { DType::F32 } else { weight_dtype };
    let before = [case.dweight, contiguous(&[n])].map(|layout| match case.accumulate {
        true => skewed(rng, grad_dtype, layout, case.skew),
        false => TestTensor::poisoned_at(grad_dtype, layout, case.skew),
    });
    let run = |lent| {
        let mut call = Call {
            dout: dout.upload(ctx),
            x: x.upload(ctx),
            weight: weight.upload(ctx),
            dx: Some(TestTensor::poisoned_at(dtype, case.dx, case.skew).upload(ctx)),
            dweight: Some(before[0].upload(ctx)),
            dbias: Some(before[1].upload(ctx)),
            accumulate: case.accumulate,
        };
        let useful = call.run(ctx, lent);
        let got = [call.dx, call.dweight, call.dbias].map(|t| t.unwrap().download_output());
        (got.map(|t| t.values()), useful)
    };

    let (dout, x, weight) = (dout.values(), x.values(), weight.values());
    let sizes = (case.x.num_rows(), k, n);
    let before = before.each_ref().map(|t| match case.accumulate {
        true => t.values(),
        false => vec![0.0; t.layout.num_elements()],
    });
    let magnitudes = |values: &[f64]| values.iter().map(|v| v.abs()).collect::<Vec<_>>();
    let listed = |g: Gradients, before: &[Vec<f64>; 2]| {
        let add = |g: Vec<f64>, b: &[f64]| g.iter().zip(b).map(|(g, b)| g + b).collect();
        [g.dx, add(g.dweight, &before[0]), add(g.dbias, &before[1])]
    };
    let expected = listed(exact(&dout, &x, &weight, sizes), &before);
    let plain = listed(plain(&dout, &x, &weight, sizes), &before);
    let great = (magnitudes(&dout), magnitudes(&x), magnitudes(&weight));
    let terms = exact(&great.0, &great.1, &great.2, sizes);
    let terms = listed(terms, &[magnitudes(&before[0]), magnitudes(&before[1])]);
    let compare = |got: &[Vec<f64>; 3]| {
        let dtypes = [dtype, grad_dtype, grad_dtype];
        for (i, name) in ["dx", "dweight", "dbias"].into_iter().enumerate() {
            let plain = rounded(dtypes[i], &plain[i]);
            let most = terms[i].iter().copied().fold(0.0, f64::max);
            let depth = [n, sizes.0, 0][i];
            let most = most.max(cut_off(ctx, dtype, depth, &expected[i]));
            assert_gradient_rule(name, dtypes[i], &got[i], &expected[i], &plain, most);
        }
    };
    let (with, useful) = run(Lent::Useful);
    compare(&with);
    assert!(
        run(Lent::Useful).0 == with,
        "other bits from the same inputs"
    );
    if useful > 0 {
        compare(&run(Lent::Needed).0);
    }
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for weight_dtype in FLOATS {
                crate::common::for_each_case(&cases(), |case| {
                    check(&ctx, dtype, weight_dtype, case)
                });
            }
        }
    }
}

/// The reference is the derivative of the forward's: along any direction, by differences. (The
/// layer is linear in each of its tensors, so that differences along one of them are exact.)
#[test]
fn the_reference_is_the_derivative_of_the_forwards() {
    let rng = &mut rng();
    let (rows, k, n) = (5, 7, 3);
    let mut random = |len: usize| -> Vec<f64> {
        (0..len)
            .map(|_| crate::common::tensor::normal(rng))
            .collect()
    };
    let (x, weight, bias) = (random(rows * k), random(n * k), random(n));
    let dout = random(rows * n);
    let (vx, vw, vb) = (random(rows * k), random(n * k), random(n));
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let along = |a: &[f64], v: &[f64], h: f64| -> Vec<f64> {
        a.iter().zip(v).map(|(a, v)| a + h * v).collect()
    };
    // The loss whose gradient by the output is `dout`.
    let loss = |h: f64| {
        let (x, weight) = (along(&x, &vx, h), along(&weight, &vw, h));
        let bias = along(&bias, &vb, h);
        dot(&linear(&x, &weight, (rows, k, n), Some(&bias), None), &dout)
    };
    let h = 1e-3;
    let difference = (loss(h) - loss(-h)) / (2.0 * h);
    let g = exact(&dout, &x, &weight, (rows, k, n));
    let derivative = dot(&g.dx, &vx) + dot(&g.dweight, &vw) + dot(&g.dbias, &vb);
    let error = (difference - derivative).abs();
    assert!(
        error < 1e-9 * derivative.abs().max(1.0),
        "{difference} {derivative}"
    );
}

/// All gradients of contiguous tensors.
fn gradients(
    ctx: &Context,
    (dout, x, weight): (&TestTensor, &TestTensor, &TestTensor),
    wanted: [bool; 3],
    sums: Option<[&TestTensor; 2]>,
) -> [Option<TestTensor>; 3] {
    let (n, k) = (weight.layout.dim(0), weight.layout.dim(1));
    let poisoned = |dtype, layout| TestTensor::poisoned(dtype, layout).upload(ctx);
    let dweight = || match sums {
        Some([dweight, _]) => dweight.upload(ctx),
        None => poisoned(DType::F32, contiguous(&[n, k])),
    };
    let dbias = || match sums {
        Some([_, dbias]) => dbias.upload(ctx),
        None => poisoned(DType::F32, contiguous(&[n])),
    };
    let mut call = Call {
        dout: dout.upload(ctx),
        x: x.upload(ctx),
        weight: weight.upload(ctx),
        dx: wanted[0].then(|| poisoned(x.dtype, x.layout)),
        dweight: wanted[1].then(dweight),
        dbias: wanted[2].then(dbias),
        accumulate: sums.is_some(),
    };
    call.run(ctx, Lent::Useful);
    [call.dx, call.dweight, call.dbias].map(|t| t.map(|t| t.download_output()))
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads_nor_on_what_else_is_computed() {
    let of_threads = [1, 2, 5].map(|num_threads| {
        Context::new(&ContextOptions {
            num_threads,
            ..ContextOptions::default()
        })
        .unwrap()
    });
    for dtype in FLOATS {
        for rows in [1, 40, 700] {
            let rng = &mut rng();
            let dout = TestTensor::normal(rng, dtype, contiguous(&[rows, 300]));
            let x = TestTensor::normal(rng, dtype, contiguous(&[rows, 200]));
            let weight = TestTensor::normal(rng, dtype, contiguous(&[300, 200]));
            let inputs = (&dout, &x, &weight);
            let bits = |ctx: &Context, wanted| {
                gradients(ctx, inputs, wanted, None).map(|t| t.map(|t| t.bits()))
            };
            let [one, two, five] = of_threads.each_ref().map(|ctx| bits(ctx, [true; 3]));
            assert!(one == two && one == five, "{dtype} {rows}");
            for ctx in contexts() {
                let all = bits(&ctx, [true; 3]);
                for i in 0..3 {
                    let alone = bits(&ctx, [0, 1, 2].map(|j| i == j));
                    assert!(alone[i] == all[i], "{dtype} {rows} {i}");
                    assert!((0..3).all(|j| alone[j].is_some() == (i == j)));
                }
            }
        }
    }
}

/// Nothing is read of what no gradient needs, which may be overwritten then.
#[test]
fn what_is_not_needed_is_not_looked_at() {
    for ctx in contexts() {
        let rng = &mut rng();
        let (dout, x, weight) = (
            TestTensor::normal(rng, DType::Bf16, contiguous(&[6, 5])),
            TestTensor::normal(rng, DType::Bf16, contiguous(&[6, 3])),
            TestTensor::normal(rng, DType::Bf16, contiguous(&[5, 3])),
        );
        let apart = gradients(&ctx, (&dout, &x, &weight), [true, false, false], None);
        let [d, w] = [&dout, &weight].map(|t| t.upload(&ctx));
        let mut over = x.upload(&ctx);
        // SAFETY: without `dweight` the input is described and not read.
        let described = unsafe {
            unsloth::TensorRef::from_raw(over.data().cast_const().cast(), x.dtype, x.layout)
        };
        let params = Params {
            parallel: None,
            dout: d.view(),
            x: Some(described),
            weight: Some(w.view()),
            dx: Some(over.view_mut()),
            dweight: None,
            dbias: None,
            accumulate: false,
            workspace: Workspace::none(),
        };
        linear::backward(&ctx, &params, Stream::DEFAULT).unwrap();
        assert!(over.download_output().bits() == apart[0].as_ref().unwrap().bits());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// On small integers, where f32 is exact, two half batches accumulated are one batch, to the
    /// bit.
    #[test]
    fn halves_add_up(
        (rows, n, k) in (2usize..70, 1usize..80, 1usize..90),
        bf16 in any::<bool>(),
    ) {
        let dtype = if bf16 { DType::Bf16 } else { DType::F32 };
        for ctx in contexts() {
            let rng = &mut rng();
            let mut integers = |shape: &[usize]| {
                TestTensor::integers(rng, dtype, contiguous(shape), 9)
            };
            let (dout, x) = (integers(&[rows, n]), integers(&[rows, k]));
            let weight = integers(&[n, k]);
            let whole = gradients(&ctx, (&dout, &x, &weight), [true; 3], None);
            let half = rows / 2;
            let part = |t: &TestTensor, from: usize, to: usize| {
                let width = t.layout.dim(1);
                TestTensor::of(dtype, &[to - from, width], &t.values()[from * width..to * width])
            };
            let halves = [(0, half), (half, rows)].map(|(from, to)| {
                (part(&dout, from, to), part(&x, from, to))
            });
            let inputs = |i: usize| (&halves[i].0, &halves[i].1, &weight);
            let first = gradients(&ctx, inputs(0), [true; 3], None);
            let [dx0, Some(dweight), Some(dbias)] = first else { unreachable!() };
            let sums = Some([&dweight, &dbias]);
            let second = gradients(&ctx, inputs(1), [true; 3], sums);
            let rows_of = |t: &Option<TestTensor>| t.as_ref().unwrap().values();
            prop_assert_eq!([rows_of(&dx0), rows_of(&second[0])].concat(), rows_of(&whole[0]));
            prop_assert_eq!(rows_of(&second[1]), rows_of(&whole[1]));
            prop_assert_eq!(rows_of(&second[2]), rows_of(&whole[2]));
        }
    }
}
