//! Packed sequences, whose tokens ranks divide as one run of them, against the definition in f64.

use unsloth::comm::tokens;
use unsloth::ops::context_parallel_attention::{self as divided, Method, Order, backward};
use unsloth::{Comm, Context, DType, Stream, Workspace};

use super::definition::{every, joined};
use super::{CASE, Case};
use crate::common::reference::attention::{
    Options, Precision, Sequence, attention, attention_backward, gradient_rounding, score_rounding,
};
use crate::common::rules::epsilon;
use crate::common::{
    DeviceTensor, FLOATS, TestTensor, assert_flash_rule_of_sums, contiguous, rng, rounded,
};
use crate::group::{ranks, sizes};
use crate::parallel::{Gradient, greatest, poisoned, rows, run, unbound};

/// Sequences, one of which has no tokens, and padding before and behind them.
const LENGTHS: [usize; 5] = [5, 0, 9, 1, 3];
const FIRST: usize = 1;

#[derive(Clone, Copy, Debug)]
struct Packed {
    case: Case,
    /// Of each rank.
    tokens: usize,
}

impl Packed {
    /// Where sequences begin among the tokens of all ranks; they end with these at the latest.
    fn cu_seqlens(&self, size: usize) -> Vec<i32> {
        let all = self.tokens * size;
        let mut starts = vec![FIRST.min(all)];
        for length in LENGTHS {
            starts.push((starts[starts.len() - 1] + length).min(all));
        }
        starts.into_iter().map(|start| start as i32).collect()
    }

    /// `q`, `k`, `v` and `dout` of all tokens; those of no sequence are NaN.
    fn whole(&self, dtype: DType, size: usize) -> [TestTensor; 4] {
        let (kv, (d, dv)) = (self.case.kv_heads(size), self.case.dims);
        let heads = kv * self.case.group;
        let cu = self.cu_seqlens(size);
        let rng = &mut rng();
        [[heads, d], [kv, d], [kv, dv], [heads, dv]].map(|[heads, dim]| {
            let layout = contiguous(&[self.tokens * size, heads, dim]);
            let mut t = TestTensor::normal(rng, dtype, layout);
            let mut values = t.values();
            let row = heads * dim;
            values[..cu[0] as usize * row].fill(f64::NAN);
            values[cu[LENGTHS.len()] as usize * row..].fill(f64::NAN);
            t.set_values(&values);
            t
        })
    }

    /// Output, `lse`, gradients and `dsinks`, all of which are zero without tokens.
    fn run(
        &self,
        ctx: &Context,
        comm: &Comm,
        [q, k, v, dout]: &[TestTensor; 4],
    ) -> Vec<TestTensor> {
        let (dtype, case) = (q.dtype, &self.case);
        let [q, k, v, dout] = [q, k, v, dout].map(|t| t.upload(ctx));
        let heads = q.layout.dim(1);
        let like = |t: &DeviceTensor| poisoned(dtype, t.layout.shape()).upload(ctx);
        let (mut out, mut gradients) = (like(&dout), [&q, &k, &v].map(like));
        let mut lse = poisoned(DType::F32, &[heads, self.tokens]).upload(ctx);
        let mut dsinks = poisoned(DType::F32, &[heads]).upload(ctx);
        let numbers = case.of_heads(heads).map(|t| t.upload(ctx));
        let sinks = case.sinks.then(|| numbers[0].view());
        let alibi_slopes = case.slopes.then(|| numbers[1].view());
        let all = self.cu_seqlens(comm.size());
        let of = tokens::Packed {
            rank: comm.rank(),
            size: comm.size(),
            tokens: self.tokens,
            cu_seqlens: &all,
            causal: case.causal,
        };
        let (of_queries, of_keys): (Vec<i32>, Vec<i32>) = match case.method {
            Method::Ulysses => all.iter().map(|start| (*start, *start)).unzip(),
            _ => of.each().unwrap().unzip(),
        };
        let lengths = [of_queries, of_keys].map(|starts| {
            let starts: Vec<f64> = starts.into_iter().map(f64::from).collect();
            TestTensor::of(DType::I32, &[LENGTHS.len() + 1], &starts).upload(ctx)
        });
        let [cu_seqlens_q, cu_seqlens_k] = lengths.each_ref().map(|t| Some(t.view()));
        let (window_left, window_right) = case.windows;
        // SAFETY: described for one call at a time, and alive while it runs.
        let output = |t: &mut DeviceTensor| unsafe { unbound(t) };
        let mut params = |workspace| divided::Params {
            method: case.method,
            lse: Some(output(&mut lse)),
            sinks,
            alibi_slopes,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_k: 9,
            causal: case.causal,
            window_left,
            window_right,
            workspace,
            ..divided::Params::new(comm, q.view(), k.view(), v.view(), output(&mut out))
        };
        let size = divided::workspace_size(ctx, &params(Workspace::none()));
        run(ctx, "context_parallel_attention", size, |workspace| {
            divided::forward(ctx, &params(workspace), Stream::DEFAULT)
        });
        let [dq, dk, dv] = &mut gradients;
        let mut params = |workspace| backward::Params {
            method: case.method,
            dq: case.gradients[0].then(|| output(dq)),
            dk: case.gradients[1].then(|| output(dk)),
            dv: case.gradients[2].then(|| output(dv)),
            sinks,
            dsinks: case.sinks.then(|| output(&mut dsinks)),
            alibi_slopes,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_k: 9,
            causal: case.causal,
            window_left,
            window_right,
            workspace,
            ..backward::Params::new(
                comm,
                [q.view(), k.view(), v.view()],
                out.view(),
                lse.view(),
                dout.view(),
            )
        };
        let size = backward::workspace_size(ctx, &params(Workspace::none()));
        let op = "context_parallel_attention_backward";
        run(ctx, op, size, |workspace| {
            backward(ctx, &params(workspace), Stream::DEFAULT)
        });
        let asked = gradients.into_iter().zip(case.gradients);
        let asked = asked.filter_map(|(t, asked)| asked.then_some(t));
        let dsinks = case.sinks.then_some(dsinks);
        let all = [out, lse].into_iter().chain(asked).chain(dsinks);
        all.map(|t| t.download_output()).collect()
    }

    /// What `compute` gives of every sequence, at its place among zeros; `lse` among −∞.
    fn of_sequences(
        &self,
        size: usize,
        tensors: &[TestTensor; 4],
        compute: impl Fn(&Sequence, &Options, &[f64]) -> [Vec<f64>; 6],
        nothing: f64,
    ) -> [Vec<f64>; 6] {
        let [q, k, v, dout] = tensors;
        let (all, heads) = (q.layout.dim(0), q.layout.dim(1));
        let numbers = self.case.of_heads(heads).map(|t| t.values());
        let mut found = [dout, dout, q, k, v]
            .map(|t| vec![0.0; t.layout.num_elements()])
            .to_vec();
        found[1] = vec![nothing; heads * all];
        found.push(vec![0.0; heads]);
        for starts in self.cu_seqlens(size).windows(2) {
            let range = starts[0] as usize..starts[1] as usize;
            if range.is_empty() {
                continue;
            }
            let of = |t: &TestTensor| rows(t, range.clone()).values();
            let s = Sequence {
                q_len: range.len(),
                k_len: range.len(),
                heads,
                kv_heads: k.layout.dim(1),
                dim: self.case.dims.0,
                dim_v: self.case.dims.1,
                q: of(q),
                k: of(k),
                v: of(v),
            };
            let window = |window: usize| (window > 0).then_some(window);
            let o = Options {
                causal: self.case.causal,
                window_left: window(self.case.windows.0),
                window_right: window(self.case.windows.1),
                sinks: self.case.sinks.then(|| numbers[0].clone()),
                alibi_slopes: self.case.slopes.then(|| numbers[1].clone()),
                ..Options::default()
            };
            for (which, part) in compute(&s, &o, &of(dout)).into_iter().enumerate() {
                match which {
                    1 => {
                        for (head, part) in part.chunks(range.len()).enumerate() {
                            found[1][head * all..][range.clone()].copy_from_slice(part);
                        }
                    }
                    5 => found[5].iter_mut().zip(part).for_each(|(sum, x)| *sum += x),
                    _ => {
                        let row = part.len() / range.len();
                        found[which][range.start * row..][..part.len()].copy_from_slice(&part);
                    }
                }
            }
        }
        found.try_into().unwrap()
    }
}

fn check(size: usize, packed: &Packed, dtype: DType) {
    println!("{size} ranks, {dtype}, {packed:?}");
    let whole = packed.whole(dtype, size);
    let defined = |precision| {
        let compute = |s: &Sequence, o: &Options, dout: &[f64]| {
            let (out, lse) = attention(s, o, precision);
            let g = attention_backward(s, o, dout, &vec![0.0; lse.len()], precision);
            [out, lse, g.dq, g.dk, g.dv, g.dsinks]
        };
        packed.of_sequences(size, &whole, compute, f64::NEG_INFINITY)
    };
    let (exact, plain) = (defined(Precision::Exact), defined(Precision::Plain(dtype)));
    let of_out = if dtype == DType::F32 {
        0.0
    } else {
        epsilon(dtype)
    };
    let compute = |s: &Sequence, o: &Options, dout: &[f64]| {
        let (out, lse) = score_rounding(s, o);
        let g = gradient_rounding(s, o, dout, &vec![0.0; lse.len()], of_out);
        [out, lse, g.dq, g.dk, g.dv, g.dsinks]
    };
    let rounding = packed.of_sequences(size, &whole, compute, 0.0);
    let found = ranks(size, |ctx, comm| {
        let first = comm.rank() * packed.tokens;
        let own = whole
            .each_ref()
            .map(|t| rows(t, first..first + packed.tokens));
        packed.run(ctx, comm, &own)
    });
    let asked = packed.case.gradients.iter().enumerate();
    let asked = asked.filter_map(|(i, asked)| asked.then_some(2 + i));
    let asked = asked.chain(packed.case.sinks.then_some(5));
    for (j, which) in [0, 1].into_iter().chain(asked).enumerate() {
        let parts: Vec<&TestTensor> = found.iter().map(|all| &all[j]).collect();
        let got = match which {
            5 => {
                assert!(parts.iter().all(|part| part.bits() == parts[0].bits()));
                parts[0].values()
            }
            _ => joined(Order::Contiguous, &parts, usize::from(which == 1)),
        };
        let name = ["out", "lse", "dq", "dk", "dv", "dsinks"][which];
        let (exact, plain) = (exact[which].clone(), plain[which].clone());
        let is_seen = |x: &f64| *x != f64::NEG_INFINITY;
        let finite =
            |values: &[f64]| -> Vec<f64> { values.iter().copied().filter(is_seen).collect() };
        let places: Vec<_> = exact.iter().map(is_seen).collect();
        assert_eq!(
            places,
            got.iter().map(is_seen).collect::<Vec<_>>(),
            "{name}"
        );
        let [got, exact, plain] = [got, exact, plain].map(|values| finite(&values));
        let own_dtype = parts[0].dtype;
        let terms = greatest(&exact) + greatest(&rounding[which]) / f64::from(f32::EPSILON);
        if which < 2 {
            let plain = rounded(own_dtype, &plain);
            assert_flash_rule_of_sums(name, own_dtype, &got, &exact, &plain, terms);
        } else {
            let mut gradient = Gradient::default();
            gradient.push(&got, exact, [plain.clone(), plain]);
            gradient.check(name, own_dtype, terms);
        }
    }
}

#[test]
fn they_are_those_of_the_definition() {
    let case = |method| Case { method, ..CASE };
    for size in sizes() {
        let mut all = Vec::new();
        for method in [Method::Ulysses, Method::AllGather] {
            let case = case(method);
            #[rustfmt::skip]
            all.extend([
                case,
                Case { causal: false, group: 2, dims: (16, 4), ..case },
                Case { windows: (3, 0), gradients: [false, true, true], ..case },
                Case { sinks: true, slopes: true, group: 2, ..case },
                Case { sinks: true, causal: false, gradients: [true, false, false], ..case },
            ]);
        }
        let ulysses = case(Method::Ulysses);
        all.push(Case {
            causal: false,
            windows: (2, 3),
            slopes: true,
            ..ulysses
        });
        for (i, case) in all.into_iter().enumerate().step_by(every()) {
            // Sequences cut in several places, none cut, some cut off; and ranks that have no sequence's tokens.
            for tokens in [20usize.div_ceil(size), 4, 9] {
                let dtype = FLOATS[(size + i + tokens) % FLOATS.len()];
                check(size, &Packed { case, tokens }, dtype);
            }
        }
    }
}

/// No tokens at all.
#[test]
fn there_may_be_no_tokens() {
    for method in [Method::Ulysses, Method::AllGather] {
        let case = Case { method, ..CASE };
        check(3, &Packed { case, tokens: 0 }, DType::F32);
    }
}
