//! Ranks that gather keys and values, against the definition in f64.

use unsloth::DType;
use unsloth::ops::context_parallel_attention::Method;

use super::{CASE, Case, part};
use crate::common::reference::attention::{
    Options, Precision, Sequence, attention, attention_backward, gradient_rounding, score_rounding,
};
use crate::common::rules::epsilon;
use crate::common::{FLOATS, TestTensor, assert_flash_rule_of_sums, rounded};
use crate::group::{SIZES, context, ranks};
use crate::parallel::{Gradient, assert_same, greatest};

const GATHERED: Case = Case {
    method: Method::AllGather,
    ..CASE
};

#[rustfmt::skip]
const CASES: [Case; 8] = [
    GATHERED,
    Case { causal: false, batch: 2, ..GATHERED },
    Case { kv_heads: 2, group: 3, batch: 3, dims: (16, 4), ..GATHERED },
    Case { queries: 1, keys: 1, group: 2, ..GATHERED },
    Case { causal: false, queries: 2, keys: 7, softcap: 3.0, ..GATHERED },
    Case { gaps: true, kv_heads: 2, batch: 2, windows: (6, 0), ..GATHERED },
    Case { gaps: true, group: 2, gradients: [false, true, false], ..GATHERED },
    Case { gradients: [true, false, false], ..GATHERED },
];

/// Parts of a dimension behind each other.
fn joined(parts: &[&TestTensor], dim: usize) -> Vec<f64> {
    let shape = parts[0].layout.shape();
    let before: usize = shape[..dim].iter().product();
    let chunk: usize = shape[dim..].iter().product();
    let values: Vec<_> = parts.iter().map(|part| part.values()).collect();
    let of = |i: usize| {
        values
            .iter()
            .flat_map(move |v| v[i * chunk..][..chunk].to_vec())
    };
    (0..before).flat_map(of).collect()
}

/// What [`Case::of_sequences`] gives: output, `lse`, `dq`, `dk`, `dv`.
type All = [Vec<f64>; 5];

impl Case {
    /// What `compute` gives of each sequence, and of the gradient of its output, in turn.
    fn of_sequences(
        &self,
        tensors: &[TestTensor; 4],
        compute: impl Fn(&Sequence, &Options, &[f64]) -> All,
    ) -> All {
        let [q, k, v, dout] = tensors;
        let [heads, kv_heads] = [q, k].map(|t| t.layout.dim(2));
        let mut all = All::default();
        for b in 0..self.batch {
            let of = |t: &TestTensor| part(t, 0, (self.batch, b)).values();
            let s = Sequence {
                q_len: q.layout.dim(1),
                k_len: k.layout.dim(1),
                heads,
                kv_heads,
                dim: self.dims.0,
                dim_v: self.dims.1,
                q: of(q),
                k: of(k),
                v: of(v),
            };
            let o = Options {
                causal: self.causal,
                softcap: (self.softcap > 0.0).then_some(self.softcap.into()),
                window_left: (self.windows.0 > 0).then_some(self.windows.0),
                ..Options::default()
            };
            let found = compute(&s, &o, &of(dout));
            all.iter_mut()
                .zip(found)
                .for_each(|(all, found)| all.extend(found));
        }
        all
    }

    fn defined(&self, tensors: &[TestTensor; 4], precision: Precision) -> All {
        self.of_sequences(tensors, |s, o, dout| {
            let (out, lse) = attention(s, o, precision);
            let dlse = vec![0.0; lse.len()];
            let g = attention_backward(s, o, dout, &dlse, precision);
            [out, lse, g.dq, g.dk, g.dv]
        })
    }

    /// What rounding scores to f32, and `out` to its dtype, may cost.
    fn rounding(&self, tensors: &[TestTensor; 4]) -> All {
        let of_out = match tensors[0].dtype {
            DType::F32 => 0.0,
            dtype => epsilon(dtype),
        };
        self.of_sequences(tensors, |s, o, dout| {
            let (out, lse) = score_rounding(s, o);
            let g = gradient_rounding(s, o, dout, &vec![0.0; lse.len()], of_out);
            [out, lse, g.dq, g.dk, g.dv]
        })
    }
}

#[test]
fn it_is_that_of_the_definition() {
    for size in SIZES {
        for (i, case) in CASES.iter().enumerate() {
            let dtypes = match i {
                0 => &FLOATS[..],
                _ => &FLOATS[(size + i) % FLOATS.len()..][..1],
            };
            for dtype in dtypes {
                check(size, case, *dtype);
            }
        }
    }
}

fn check(size: usize, case: &Case, dtype: DType) {
    println!("{size} ranks, {dtype}, {case:?}");
    let whole = case.whole(dtype, size).tensors;
    let exact = case.defined(&whole, Precision::Exact);
    let plain = case.defined(&whole, Precision::Plain(dtype));
    let rounding = case.rounding(&whole);
    let alone = case.run(&context(2), None, &whole);
    let run = || {
        ranks(size, |ctx, comm| {
            let own = whole.each_ref().map(|t| part(t, 1, (size, comm.rank())));
            case.run(ctx, Some(comm), &own)
        })
    };
    let (found, again) = (run(), run());
    let asked = case.gradients.iter().enumerate();
    let asked = asked.filter_map(|(i, asked)| asked.then_some(2 + i));
    for (j, which) in [0, 1].into_iter().chain(asked).enumerate() {
        let parts: Vec<&TestTensor> = found.iter().map(|all| &all[j]).collect();
        for (rank, own) in parts.iter().enumerate() {
            assert_same(&[(*own).clone(), again[rank][j].clone()]);
        }
        let got = joined(&parts, if which == 1 { 2 } else { 1 });
        let exact = exact[which].clone();
        let own_dtype = alone[j].dtype;
        let name = ["out", "lse", "dq", "dk", "dv"][which];
        // In units of f32 in the last place of the greatest result.
        let terms = greatest(&exact) + greatest(&rounding[which]) / f64::from(f32::EPSILON);
        if which < 2 {
            let plain = rounded(own_dtype, &plain[which]);
            assert_flash_rule_of_sums(name, own_dtype, &got, &exact, &plain, terms);
        } else {
            let mut gradient = Gradient::default();
            let plain = [plain[which].clone(), alone[j].values()];
            gradient.push(&got, exact, plain);
            gradient.check(name, own_dtype, terms);
        }
    }
}

/// No tokens at all: nothing is computed, and nobody waits.
#[test]
fn there_may_be_no_tokens() {
    for causal in [false, true] {
        let case = Case {
            causal,
            queries: 0,
            keys: 0,
            ..GATHERED
        };
        let found = ranks(3, |ctx, comm| {
            let whole = case.whole(DType::F32, 3).tensors;
            let own = whole.each_ref().map(|t| part(t, 1, (3, comm.rank())));
            case.run(ctx, Some(comm), &own).len()
        });
        assert_eq!(found, [5; 3]);
    }
}
