//! Parts of attention as one, against the definition: dtypes, layouts, parts that saw nothing; and what is refused.

use unsloth::ops::attention_merge::{self, Params};
use unsloth::{Context, DType, Error, Layout, Stream, TensorMut};

use crate::common::reference::attention_merge::merge;
use crate::common::tensor::{strided_rows, transposed};
use crate::common::{
    FLOATS, TestTensor, assert_close_of_sums, contexts, contiguous, for_each_case, rng,
};

/// What the logarithms of parts are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lses {
    Normal,
    /// Of the first part of every second row, and of all parts of every third, −∞, and NaN for outputs.
    SomeNothing,
    /// Far apart, and too great for their exponentials.
    Great,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    parts: usize,
    /// Batch, tokens, heads, components; without the first, packed.
    shape: [usize; 4],
    packed: bool,
    /// Gaps between rows, and heads before tokens.
    gaps: usize,
    transposed: bool,
    lses: Lses,
    dtypes: (DType, DType),
    lse: bool,
}

const CASE: Case = Case {
    parts: 2,
    shape: [2, 5, 3, 64],
    packed: false,
    gaps: 0,
    transposed: false,
    lses: Lses::Normal,
    dtypes: (DType::F32, DType::F32),
    lse: true,
};

fn cases() -> Vec<Case> {
    #[rustfmt::skip]
    let mut cases = vec![
        Case { parts: 1, ..CASE },
        Case { parts: 3, shape: [1, 7, 2, 128], ..CASE },
        Case { parts: 33, shape: [1, 2, 1, 8], ..CASE },
        Case { shape: [3, 1, 1, 1], ..CASE },
        Case { shape: [1, 3, 2, 7], ..CASE },
        Case { shape: [1, 2, 1, 1100], ..CASE },
        Case { shape: [0, 5, 3, 8], ..CASE },
        Case { shape: [2, 0, 3, 8], ..CASE },
        Case { packed: true, shape: [1, 9, 4, 16], ..CASE },
        Case { packed: true, transposed: true, shape: [1, 9, 4, 16], lse: false, ..CASE },
        Case { gaps: 4, ..CASE },
        Case { gaps: 3, parts: 3, ..CASE },
        Case { transposed: true, ..CASE },
        Case { transposed: true, gaps: 1, lse: false, ..CASE },
        Case { lses: Lses::SomeNothing, parts: 3, ..CASE },
        Case { lses: Lses::Great, parts: 4, ..CASE },
    ];
    for from in FLOATS {
        for to in FLOATS {
            let dtypes = (from, to);
            cases.push(Case { dtypes, ..CASE });
            let shape = [1, 4, 2, 36];
            let lses = Lses::SomeNothing;
            cases.push(Case {
                dtypes,
                shape,
                lses,
                ..CASE
            });
        }
    }
    cases
}

impl Case {
    fn shape(&self) -> &[usize] {
        &self.shape[usize::from(self.packed)..]
    }

    /// Of the logarithms, heads before tokens.
    fn of_lse(&self) -> Vec<usize> {
        let [batch, tokens, heads, _] = self.shape;
        [batch, heads, tokens][usize::from(self.packed)..].to_vec()
    }

    fn layout(&self, shape: &[usize]) -> Layout {
        let rank = shape.len();
        match self.transposed {
            true if self.gaps == 0 => transposed(shape, rank - 3, rank - 2),
            _ => strided_rows(shape, self.gaps),
        }
    }

    fn lse_layout(&self, shape: &[usize]) -> Layout {
        let rank = shape.len();
        match self.transposed {
            true => transposed(shape, rank - 2, rank - 1),
            false => contiguous(shape),
        }
    }

    /// Outputs and logarithms of the parts.
    fn inputs(&self) -> [TestTensor; 2] {
        let rng = &mut rng();
        let with_parts = |shape: &[usize]| [&[self.parts], shape].concat();
        let layout = self.layout(&with_parts(self.shape()));
        let mut outs = TestTensor::normal(rng, self.dtypes.0, layout);
        let layout = self.lse_layout(&with_parts(&self.of_lse()));
        let mut lses = TestTensor::normal(rng, DType::F32, layout);
        let (mut x, mut logs) = (outs.values(), lses.values());
        let rows = logs.len() / self.parts;
        for (i, log) in logs.iter_mut().enumerate() {
            let (part, row) = (i / rows.max(1), i % rows.max(1));
            match self.lses {
                Lses::Normal => {}
                Lses::Great => *log += 200.0 * ((part + row) % 5) as f64 - 100.0,
                Lses::SomeNothing if row % 3 == 2 || (part == 0 && row % 2 == 1) => {
                    *log = f64::NEG_INFINITY;
                    let at = (part * rows + self.row_of_out(row)) * self.shape[3];
                    x[at..at + self.shape[3]].fill(f64::NAN);
                }
                Lses::SomeNothing => {}
            }
        }
        outs.set_values(&x);
        lses.set_values(&logs);
        [outs, lses]
    }

    /// Which of the outputs a logarithm is of.
    fn row_of_out(&self, row: usize) -> usize {
        let [_, tokens, heads, _] = self.shape;
        let (outer, head, token) = (row / tokens / heads, row / tokens % heads, row % tokens);
        (outer * tokens + token) * heads + head
    }

    fn run(&self, ctx: &Context, [outs, lses]: &[TestTensor; 2]) -> [TestTensor; 2] {
        let [outs, lses] = [outs, lses].map(|t| t.upload(ctx));
        let out = self.layout(self.shape());
        let mut out = TestTensor::poisoned(self.dtypes.1, out).upload(ctx);
        let lse = self.lse_layout(&self.of_lse());
        let mut lse = TestTensor::poisoned(DType::F32, lse).upload(ctx);
        let mut params = Params::new(outs.view(), lses.view(), out.view_mut());
        params.lse = self.lse.then(|| lse.view_mut());
        attention_merge::supported(ctx, &params).unwrap();
        assert_eq!(attention_merge::workspace_size(ctx, &params).unwrap(), 0);
        attention_merge::forward(ctx, &params, Stream::DEFAULT).unwrap();
        [out, lse].map(|t| t.download_output())
    }
}

#[test]
fn it_is_that_of_the_definition() {
    for ctx in contexts() {
        for_each_case(&cases(), |case| {
            let inputs = case.inputs();
            let found = case.run(&ctx, &inputs);
            let [x, logs] = inputs.each_ref().map(TestTensor::values);
            let [out, lse] = found.each_ref().map(TestTensor::values);
            let (rows, dim) = (logs.len() / case.parts, case.shape[3]);
            for row in 0..rows {
                let at = case.row_of_out(row) * dim;
                let parts: Vec<_> = (0..case.parts)
                    .map(|part| (&x[part * rows * dim + at..][..dim], logs[part * rows + row]))
                    .collect();
                let peak = parts.iter().map(|(_, lse)| *lse).fold(-1e30, f64::max);
                let near: Vec<_> = parts.iter().map(|(x, lse)| (*x, lse - peak)).collect();
                let (expected, total, terms) = merge(&near);
                // A unit of the logarithms' difference is one of the weight.
                let ulps = 16.0 + peak.abs().min(1e3);
                let out = &out[at..at + dim];
                assert_close_of_sums("out", case.dtypes.1, out, &expected, &terms, ulps);
                if case.lse {
                    let (found, expected) = ([lse[row]], [total + peak]);
                    let expected = match total {
                        f64::NEG_INFINITY => [total],
                        _ => expected,
                    };
                    let terms = [peak.abs().min(1e6) + 4.0];
                    assert_close_of_sums("lse", DType::F32, &found, &expected, &terms, 4.0);
                }
            }
            assert_eq!(case.run(&ctx, &inputs)[0].bits(), found[0].bits());
        });
    }
}

/// A NaN comes through; other rows have none.
#[test]
fn nan_is_not_lost() {
    for ctx in contexts() {
        for of_lse in [false, true] {
            let [mut outs, mut lses] = CASE.inputs();
            let spoiled = if of_lse { &mut lses } else { &mut outs };
            let mut values = spoiled.values();
            let last = values.len() - 1;
            values[last] = f64::NAN;
            spoiled.set_values(&values);
            let [out, lse] = CASE.run(&ctx, &[outs, lses]).map(|t| t.values());
            let dim = CASE.shape[3];
            let is_nan: Vec<_> = out.iter().map(|x| x.is_nan()).collect();
            let row = out.len() - if of_lse { dim } else { 1 };
            assert!(is_nan[row..].iter().all(|nan| *nan) && !is_nan[..row].contains(&true));
            assert_eq!(
                lse.iter().filter(|lse| lse.is_nan()).count(),
                usize::from(of_lse)
            );
        }
    }
}

#[test]
fn what_is_wrong_is_refused() {
    type Shapes = [(DType, Vec<usize>); 4];
    type Spoil = fn(&mut Shapes);
    let cases: [(Spoil, &str); 12] = [
        (
            |t| t[0].0 = DType::I32,
            "outs has dtype i32, allowed: f32, f16, bf16",
        ),
        (|t| t[0].1 = vec![2, 3, 4], "outs has rank 3, allowed: 4, 5"),
        (|t| t[0].1[0] = 0, "outs has 0 parts, at least 1 is needed"),
        (|t| t[1].0 = DType::F16, "lses has dtype f16, allowed: f32"),
        (
            |t| t[1].1[0] = 3,
            "lses has shape [3, 1, 2, 3], expected [2, 1, 2, 3]",
        ),
        (
            |t| t[1].1.swap(2, 3),
            "lses has shape [2, 1, 3, 2], expected [2, 1, 2, 3]",
        ),
        (
            |t| t[1].1 = vec![2, 2, 3],
            "lses has shape [2, 2, 3], expected [2, 1, 2, 3]",
        ),
        (
            |t| t[2].0 = DType::Bool,
            "out has dtype bool, allowed: f32, f16, bf16",
        ),
        (
            |t| t[2].1[3] = 5,
            "out has shape [1, 3, 2, 5], expected [1, 3, 2, 4]",
        ),
        (
            |t| t[2].1 = vec![3, 2, 4],
            "out has shape [3, 2, 4], expected [1, 3, 2, 4]",
        ),
        (|t| t[3].0 = DType::Bf16, "lse has dtype bf16, allowed: f32"),
        (
            |t| t[3].1[2] = 4,
            "lse has shape [1, 2, 4], expected [1, 2, 3]",
        ),
    ];
    let good = || -> Shapes {
        let shapes = [
            &[2, 1, 3, 2, 4][..],
            &[2, 1, 2, 3],
            &[1, 3, 2, 4],
            &[1, 2, 3],
        ];
        shapes.map(|shape| (DType::F32, shape.to_vec()))
    };
    for ctx in contexts() {
        for (spoil, expected) in &cases {
            let mut shapes = good();
            spoil(&mut shapes);
            let [outs, lses, mut out, mut lse] = shapes
                .map(|(dtype, shape)| TestTensor::poisoned(dtype, contiguous(&shape)).upload(&ctx));
            let mut params = Params::new(outs.view(), lses.view(), out.view_mut());
            params.lse = Some(lse.view_mut());
            let expected = Some(format!("attention_merge: {expected}"));
            let said = |result: Option<Error>| result.map(|error| error.to_string());
            assert_eq!(
                said(attention_merge::supported(&ctx, &params).err()),
                expected
            );
            let launched = attention_merge::forward(&ctx, &params, Stream::DEFAULT);
            assert_eq!(said(launched.err()), expected);
        }
        // An output that is one of the parts.
        let [outs, lses, ..] = good()
            .map(|(dtype, shape)| TestTensor::poisoned(dtype, contiguous(&shape)).upload(&ctx));
        let layout = contiguous(&[1, 3, 2, 4]);
        // SAFETY: elements of a live tensor; the call is refused.
        let part = unsafe { TensorMut::from_raw(outs.data().cast(), DType::F32, layout) };
        let params = Params::new(outs.view(), lses.view(), part);
        let error = attention_merge::forward(&ctx, &params, Stream::DEFAULT).unwrap_err();
        assert_eq!(error.to_string(), "attention_merge: out overlaps outs");
    }
}
