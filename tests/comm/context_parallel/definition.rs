//! Ranks that gather keys and values, or pass them on, against the definition in f64.

use unsloth::DType;
use unsloth::comm::tokens;
use unsloth::ops::context_parallel_attention::{Method, Order};

use super::{CASE, Case, held, taken};
use crate::common::reference::attention::{
    Options, Precision, Sequence, attention, attention_backward, gradient_rounding, score_rounding,
};
use crate::common::rules::epsilon;
use crate::common::{FLOATS, TestTensor, assert_flash_rule_of_sums, rounded};
use crate::group::{context, is_emulated, ranks, sizes};
use crate::parallel::{Gradient, assert_same, greatest};

const GATHERED: Case = Case {
    method: Method::AllGather,
    ..CASE
};

const METHODS: [Method; 2] = [Method::AllGather, Method::Ring];

const ZIGZAG: Case = Case {
    order: Order::Zigzag,
    queries: 6,
    keys: 6,
    ..GATHERED
};

#[rustfmt::skip]
const CASES: [Case; 25] = [
    GATHERED,
    Case { causal: false, batch: 2, ..GATHERED },
    Case { kv_heads: 2, group: 3, batch: 3, dims: (16, 4), ..GATHERED },
    Case { queries: 1, keys: 1, group: 2, ..GATHERED },
    Case { causal: false, queries: 2, keys: 7, softcap: 3.0, ..GATHERED },
    Case { gaps: true, kv_heads: 2, batch: 2, windows: (6, 0), ..GATHERED },
    Case { gaps: true, group: 2, gradients: [false, true, false], ..GATHERED },
    Case { gradients: [true, false, false], ..GATHERED },
    Case { causal: false, windows: (4, 3), ..GATHERED },
    Case { causal: false, windows: (0, 7), gradients: [false, true, true], ..GATHERED },
    Case { queries: 2, keys: 7, ..GATHERED },
    // The first queries are before all keys.
    Case { queries: 7, keys: 2, batch: 2, ..GATHERED },
    ZIGZAG,
    Case { batch: 2, kv_heads: 2, group: 2, dims: (16, 4), ..ZIGZAG },
    Case { causal: false, queries: 2, keys: 8, softcap: 3.0, ..ZIGZAG },
    Case { queries: 2, keys: 2, batch: 3, gradients: [false, true, true], ..ZIGZAG },
    Case { gaps: true, batch: 2, windows: (5, 0), ..ZIGZAG },
    Case { causal: false, windows: (4, 2), ..ZIGZAG },
    Case { queries: 2, keys: 6, gradients: [true, true, false], ..ZIGZAG },
    Case { queries: 6, keys: 2, ..ZIGZAG },
    Case { gaps: true, group: 2, gradients: [true, false, false], ..ZIGZAG },
    Case { sinks: true, slopes: true, group: 2, batch: 2, ..GATHERED },
    Case { sinks: true, causal: false, windows: (3, 4), gradients: [false, false, true], ..GATHERED },
    Case { sinks: true, slopes: true, windows: (5, 0), ..ZIGZAG },
    Case { sinks: true, queries: 6, keys: 2, gradients: [true, false, false], ..ZIGZAG },
];

/// What ranks have of a dimension, in the order of sequences.
pub fn joined(order: Order, parts: &[&TestTensor], dim: usize) -> Vec<f64> {
    let size = parts.len();
    let shape = parts[0].layout.shape();
    let (before, own) = (shape[..dim].iter().product::<usize>(), shape[dim]);
    let (all, after) = (own * size, shape[dim + 1..].iter().product::<usize>());
    let mut joined = vec![f64::NAN; before * all * after];
    for (rank, part) in parts.iter().enumerate() {
        let (values, held) = (part.values(), held(order, all, (size, rank)));
        for i in 0..before {
            for (j, token) in held.iter().enumerate() {
                let to = (i * all + token) * after;
                let from = (i * own + j) * after;
                joined[to..to + after].copy_from_slice(&values[from..from + after]);
            }
        }
    }
    joined
}

/// What [`Case::of_sequences`] gives: output, `lse`, `dq`, `dk`, `dv`, and `dsinks`, which is of all sequences.
type All = [Vec<f64>; 6];

impl Case {
    /// What `compute` gives of each sequence, and of the gradient of its output, in turn.
    fn of_sequences(
        &self,
        tensors: &[TestTensor; 4],
        compute: impl Fn(&Sequence, &Options, &[f64]) -> All,
    ) -> All {
        let [q, k, v, dout] = tensors;
        let [heads, kv_heads] = [q, k].map(|t| t.layout.dim(2));
        let [sinks, slopes] = self.of_heads(heads);
        let mut all = All::default();
        all[5] = vec![0.0; heads];
        for b in 0..self.batch {
            let of = |t: &TestTensor| taken(t, 0, &[b]).values();
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
                window_right: (self.windows.1 > 0).then_some(self.windows.1),
                sinks: self.sinks.then(|| sinks.values()),
                alibi_slopes: self.slopes.then(|| slopes.values()),
                ..Options::default()
            };
            let mut found = compute(&s, &o, &of(dout));
            for (sum, of_sequence) in all[5].iter_mut().zip(std::mem::take(&mut found[5])) {
                *sum += of_sequence;
            }
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
            [out, lse, g.dq, g.dk, g.dv, g.dsinks]
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
            [out, lse, g.dq, g.dk, g.dv, g.dsinks]
        })
    }
}

/// An emulated GPU takes seconds for a case: of tables, every so many cases.
pub fn every() -> usize {
    if is_emulated() { 6 } else { 1 }
}

#[test]
fn it_is_that_of_the_definition() {
    for size in sizes() {
        for method in METHODS {
            for (i, case) in CASES.iter().enumerate().step_by(every()) {
                let dtypes = match i {
                    0 => &FLOATS[..],
                    _ => &FLOATS[(size + i) % FLOATS.len()..][..1],
                };
                for dtype in dtypes {
                    // Positions are not known where keys travel.
                    let slopes = case.slopes && method != Method::Ring;
                    let case = Case {
                        method,
                        slopes,
                        ..*case
                    };
                    check(size, &case, *dtype);
                }
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
            let own = whole
                .each_ref()
                .map(|t| case.part(t, 1, (size, comm.rank())));
            case.run(ctx, Some(comm), &own)
        })
    };
    let (found, again) = (run(), run());
    let asked = case.gradients.iter().enumerate();
    let asked = asked.filter_map(|(i, asked)| asked.then_some(2 + i));
    let asked = asked.chain(case.sinks.then_some(5));
    for (j, which) in [0, 1].into_iter().chain(asked).enumerate() {
        let parts: Vec<&TestTensor> = found.iter().map(|all| &all[j]).collect();
        for (rank, own) in parts.iter().enumerate() {
            assert_same(&[(*own).clone(), again[rank][j].clone()]);
        }
        let got = match which {
            5 => {
                assert!(parts.iter().all(|part| part.bits() == parts[0].bits()));
                parts[0].values()
            }
            _ => joined(case.order, &parts, if which == 1 { 2 } else { 1 }),
        };
        let exact = exact[which].clone();
        let own_dtype = alone[j].dtype;
        let name = ["out", "lse", "dq", "dk", "dv", "dsinks"][which];
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
    for (method, causal, order) in [
        (Method::AllGather, false, Order::Contiguous),
        (Method::AllGather, true, Order::Contiguous),
        (Method::AllGather, true, Order::Zigzag),
        (Method::Ring, false, Order::Contiguous),
        (Method::Ring, true, Order::Zigzag),
    ] {
        let case = Case {
            method,
            causal,
            order,
            queries: 0,
            keys: 0,
            ..GATHERED
        };
        let found = ranks(3, |ctx, comm| {
            let whole = case.whole(DType::F32, 3).tensors;
            let own = whole.each_ref().map(|t| case.part(t, 1, (3, comm.rank())));
            case.run(ctx, Some(comm), &own).len()
        });
        assert_eq!(found, [5; 3]);
    }
}

/// Sequences of different lengths, too short for some ranks to have any of them: what ranks hold by
/// [`tokens::Params::fill`] attends as in whole sequences, behind which there is padding.
#[test]
fn short_sequences_are_padded() {
    const LENGTHS: [i64; 2] = [5, 3];
    const LENGTH: usize = 5;
    for (size, method) in [2, 3, 8].into_iter().flat_map(|n| METHODS.map(|m| (n, m))) {
        for order in Order::ALL {
            let of = |rank| tokens::Params {
                order,
                lengths: Some(&LENGTHS),
                ..tokens::Params::new(rank, size, LENGTHS.len(), LENGTH)
            };
            let own = of(0).tokens().unwrap();
            let case = Case {
                method,
                order,
                queries: own,
                keys: own,
                group: 2,
                ..GATHERED
            };
            let whole = Case {
                batch: LENGTHS.len(),
                queries: LENGTH,
                keys: LENGTH,
                ..case
            };
            let whole = whole.whole(DType::F32, 1).tensors;
            // A token of the batch, or one of zeros.
            let rows = |t: &TestTensor, ids: &[i64]| {
                let shape = [&[LENGTHS.len(), own], &t.layout.shape()[2..]].concat();
                let (values, row) = (t.values(), shape[2] * shape[3]);
                let of = |id: &i64| match usize::try_from(*id) {
                    Ok(id) => values[id * row..][..row].to_vec(),
                    Err(_) => vec![0.0; row],
                };
                let values: Vec<f64> = ids.iter().flat_map(of).collect();
                TestTensor::of(t.dtype, &shape, &values)
            };
            let found = ranks(size, |ctx, comm| {
                let mut ids = vec![0; LENGTHS.len() * own];
                of(comm.rank()).fill(None, Some(&mut ids)).unwrap();
                let own = whole.each_ref().map(|t| rows(t, &ids));
                (ids, case.run(ctx, Some(comm), &own))
            });
            assert!(size < 8 || found.iter().any(|(ids, _)| ids.iter().all(|id| *id < 0)));
            for (b, length) in LENGTHS.iter().enumerate() {
                let tokens: Vec<usize> = (0..*length as usize).collect();
                let alone = whole
                    .each_ref()
                    .map(|t| taken(&taken(t, 0, &[b]), 1, &tokens));
                let alone = case.run(&context(1), None, &alone);
                for (ids, found) in &found {
                    for (which, (found, alone)) in found.iter().zip(&alone).enumerate() {
                        let dim = if which == 1 { 2 } else { 1 };
                        for (j, id) in ids[b * own..][..own].iter().enumerate() {
                            let Ok(id) = usize::try_from(*id) else {
                                continue;
                            };
                            let found = taken(&taken(found, 0, &[b]), dim, &[j]).values();
                            let alone = taken(alone, dim, &[id - b * LENGTH]).values();
                            let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-5;
                            assert!(found.iter().zip(&alone).all(near), "{size} {order:?}");
                        }
                    }
                }
            }
        }
    }
}

/// A ring has room for two ranks' keys and values, and for the sums of their gradients, with any number of ranks.
#[test]
fn room_does_not_grow_with_ranks() {
    for order in Order::ALL {
        let sizes = [3, 4, 8].map(|size| {
            let sizes = ranks(size, |ctx, comm| {
                let case = Case {
                    method: Method::Ring,
                    order,
                    queries: 64,
                    keys: 64,
                    ..GATHERED
                };
                let whole = case.whole(DType::F32, 1).tensors;
                case.workspace_sizes(ctx, comm, &whole)
            });
            assert!(
                sizes.iter().all(|of_rank| *of_rank == sizes[0]),
                "{sizes:?}"
            );
            sizes[0]
        });
        assert!(
            sizes.iter().all(|of_size| *of_size == sizes[0]),
            "{sizes:?}"
        );
    }
}
