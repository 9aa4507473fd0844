//! Gradients of attention against their definition, and that against finite differences.

use crate::common::attention::backward::{BackwardCall, Host, Wanted, check_backward};
use crate::common::attention::{Case, KeyForm, QueryForm, Strides};
use crate::common::reference::attention::{
    Options, Precision, Sequence, attention, attention_backward,
};
use crate::common::tensor::normal;
use crate::common::{FLOATS, contexts, rng};
use unsloth::{Context, ContextOptions, DType, Stream};

/// Every case, and all gradients.
pub fn run_table(cases: &[Case]) {
    run_with(cases, Wanted::ALL);
}

/// Every case in every dtype on every device.
fn run_with(cases: &[Case], wanted: Wanted) {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(cases, |case| {
                check_backward(&ctx, &mut rng(), dtype, case, wanted);
            });
        }
    }
}

/// A case that has everything at once.
fn everything() -> Case {
    Case {
        lens: vec![(33, 41); 2],
        softcap: Some(5.0),
        bias: Some((DType::F32, [false; 4])),
        mask: Some([false; 4]),
        alibi: Some(true),
        sinks: true,
        causal: true,
        window_left: Some(20),
        scale: Some(0.2),
        ..Case::default()
    }
}

/// The loss whose gradients `dout` and `dlse` are.
fn loss(s: &Sequence, o: &Options, dout: &[f64], dlse: &[f64]) -> f64 {
    let (out, lse) = attention(s, o, Precision::Exact);
    let of_out: f64 = out.iter().zip(dout).map(|(a, b)| a * b).sum();
    let of_lse = lse.iter().zip(dlse).filter(|(lse, _)| lse.is_finite());
    of_out + of_lse.map(|(a, b)| a * b).sum::<f64>()
}

/// The reference is the derivative of the forward pass's reference: along random directions of every
/// input it agrees with central differences.
#[test]
fn the_reference_is_the_derivative() {
    let cases = [
        Case::default(),
        Case {
            dim: 5,
            dim_v: 9,
            heads: 6,
            kv_heads: 1,
            causal: true,
            lens: vec![(20, 11)],
            ..Case::default()
        },
        Case {
            softcap: Some(2.0),
            window_right: Some(9),
            sinks: true,
            ..Case::default()
        },
        everything(),
    ];
    let rng = &mut rng();
    for case in &cases {
        let inputs = case.inputs(rng, DType::F32);
        for (s, o) in inputs.sequences.iter().zip(&inputs.options) {
            let mut random = |n: usize| -> Vec<f64> { (0..n).map(|_| normal(rng)).collect() };
            let dout = random(s.q_len * s.heads * s.dim_v);
            let dlse = random(s.q_len * s.heads);
            let g = attention_backward(s, o, &dout, &dlse, Precision::Exact);
            let (q, k, v) = (random(s.q.len()), random(s.k.len()), random(s.v.len()));
            let sinks = random(s.heads);
            let bias = random(s.heads * s.q_len * s.k_len);
            // Each input alone, then all together.
            for which in [0, 1, 2, 3, 4, 5] {
                let moves = |input: usize| which == input || which == 5;
                let at = |step: f64| {
                    let (mut s, mut o) = (s.clone(), o.clone());
                    let shift = |x: &mut [f64], by: &[f64], input: usize| {
                        let step = if moves(input) { step } else { 0.0 };
                        x.iter_mut().zip(by).for_each(|(x, by)| *x += step * by);
                    };
                    shift(&mut s.q, &q, 0);
                    shift(&mut s.k, &k, 1);
                    shift(&mut s.v, &v, 2);
                    if let Some(sinks_now) = &mut o.sinks {
                        shift(sinks_now, &sinks, 3);
                    }
                    if let Some(table) = &mut o.bias {
                        for (row, by) in table.iter_mut().flatten().zip(bias.chunks(s.k_len)) {
                            shift(row, by, 4);
                        }
                    }
                    loss(&s, &o, &dout, &dlse)
                };
                let step = 1e-5;
                let measured = (at(step) - at(-step)) / (2.0 * step);
                let product = |g: &[f64], by: &[f64], input: usize| -> f64 {
                    match moves(input) {
                        true => g.iter().zip(by).map(|(a, b)| a * b).sum(),
                        false => 0.0,
                    }
                };
                let mut expected = product(&g.dq, &q, 0) + product(&g.dk, &k, 1);
                expected += product(&g.dv, &v, 2);
                if o.sinks.is_some() {
                    expected += product(&g.dsinks, &sinks, 3);
                }
                if o.bias.is_some() {
                    let dbias: Vec<f64> = g.dbias.iter().flatten().flatten().copied().collect();
                    expected += product(&dbias, &bias, 4);
                }
                let bound = 1e-6 * (1.0 + expected.abs());
                assert!(
                    (measured - expected).abs() < bound,
                    "{case:?}, input {which}: {measured}, not {expected}"
                );
            }
        }
    }
}

/// Queries and keys of one sequence: one, few, around the sizes at which kernels cut.
#[test]
fn lengths() {
    let lens = [
        (1, 1),
        (1, 65),
        (2, 3),
        (5, 5),
        (9, 17),
        (17, 300),
        (31, 33),
        (64, 64),
        (65, 127),
        (128, 128),
        (129, 65),
        (140, 260),
        (50, 7),
        (300, 2),
        (0, 5),
        (5, 0),
        (0, 0),
    ];
    let mut cases = Vec::new();
    for len in lens {
        for causal in [false, true] {
            cases.push(Case {
                lens: vec![len],
                causal,
                ..Case::default()
            });
        }
    }
    run_table(&cases);
}

#[test]
fn heads_and_head_dims() {
    let mut cases = Vec::new();
    for (heads, kv_heads) in [(1, 1), (3, 3), (9, 3), (8, 1), (7, 1), (40, 1), (130, 1)] {
        cases.push(Case {
            lens: vec![(if heads > 9 { 4 } else { 40 }, 50); 2],
            heads,
            kv_heads,
            causal: true,
            ..Case::default()
        });
    }
    for (dim, dim_v) in [
        (1, 1),
        (3, 5),
        (16, 8),
        (64, 64),
        (80, 80),
        (96, 33),
        (128, 128),
        (192, 128),
        (256, 256),
        (300, 7),
        (512, 512),
        (5, 512),
    ] {
        cases.push(Case {
            lens: vec![(21, 40)],
            heads: 2,
            kv_heads: 1,
            dim,
            dim_v,
            causal: true,
            ..Case::default()
        });
    }
    run_table(&cases);
}

#[test]
fn forms_and_strides() {
    let ragged = vec![(7, 20), (1, 33), (0, 4), (12, 12), (5, 0), (40, 70)];
    let mut cases = Vec::new();
    for strides in [Strides::Contiguous, Strides::Gaps, Strides::HeadsFirst] {
        for keys in [KeyForm::Padded, KeyForm::Packed] {
            cases.push(Case {
                lens: ragged.clone(),
                queries: QueryForm::Packed,
                keys,
                strides,
                causal: true,
                bias: Some((DType::F32, [true, false, false, false])),
                sinks: true,
                ..Case::default()
            });
            // Batched queries have one length.
            cases.push(Case {
                lens: vec![(13, 20), (13, 13), (13, 9), (13, 0)],
                keys,
                strides,
                ..Case::default()
            });
        }
        cases.push(Case {
            lens: vec![(9, 30), (2, 30), (60, 30)],
            queries: QueryForm::Packed,
            strides,
            ..Case::default()
        });
        cases.push(Case {
            lens: vec![(9, 30); 3],
            strides,
            causal: true,
            ..Case::default()
        });
    }
    run_table(&cases);
}

#[test]
fn windows() {
    let mut cases = Vec::new();
    for lens in [(3, 90), (100, 100), (70, 150), (90, 40)] {
        for (causal, window_left, window_right) in [
            (true, Some(1), None),
            (true, Some(17), None),
            (true, Some(64), None),
            (true, Some(1000), None),
            (false, None, Some(1)),
            (false, Some(20), Some(9)),
            (false, Some(1), Some(1)),
            (false, Some(usize::MAX), Some(usize::MAX)),
        ] {
            cases.push(Case {
                lens: vec![lens],
                causal,
                window_left,
                window_right,
                ..Case::default()
            });
        }
    }
    run_table(&cases);
}

#[test]
fn score_modifiers() {
    let all = [false; 4];
    let mut cases = Vec::new();
    for [q, k] in [[3, 80], [50, 60]] {
        let base = Case {
            lens: vec![(q, k); 2],
            ..Case::default()
        };
        let mut add = |change: &dyn Fn(&mut Case)| {
            let mut case = base.clone();
            change(&mut case);
            cases.push(case);
        };
        add(&|case| case.scale = Some(0.7));
        add(&|case| case.scale = Some(-0.3));
        for softcap in [0.5, 20.0] {
            add(&|case| (case.softcap, case.causal) = (Some(softcap), true));
        }
        for mask in [all, [true, true, false, false], [false, true, true, false]] {
            add(&|case| case.mask = Some(mask));
        }
        for causal in [false, true] {
            add(&|case| (case.sinks, case.causal) = (true, causal));
            add(&|case| (case.alibi, case.causal) = (Some(causal), causal));
        }
    }
    cases.push(everything());
    cases.push(Case {
        lens: vec![(20, 35), (30, 40), (5, 9)],
        queries: QueryForm::Packed,
        keys: KeyForm::Packed,
        ..everything()
    });
    run_table(&cases);
}

/// The gradient of a bias is summed over what it repeats.
#[test]
fn bias() {
    let mut cases = Vec::new();
    for bits in 0..16 {
        cases.push(Case {
            lens: vec![(33, 70); 2],
            heads: 4,
            kv_heads: 2,
            bias: Some((DType::F32, [1, 2, 4, 8].map(|bit| bits & bit != 0))),
            causal: bits % 2 == 0,
            ..Case::default()
        });
    }
    for dtype in [DType::F16, DType::Bf16] {
        cases.push(Case {
            bias: Some((dtype, [true, false, false, false])),
            softcap: Some(4.0),
            ..Case::default()
        });
    }
    // More queries than a block of the bias has.
    cases.push(Case {
        lens: vec![(150, 30), (20, 150)],
        queries: QueryForm::Packed,
        keys: KeyForm::Packed,
        heads: 2,
        kv_heads: 2,
        bias: Some((DType::F32, [true, true, false, false])),
        causal: true,
        ..Case::default()
    });
    // More scores to sum than a GPU has parts for.
    cases.push(Case {
        lens: vec![(65, 40); 2],
        heads: 130,
        kv_heads: 2,
        dim: 8,
        dim_v: 8,
        bias: Some((DType::F32, [true, true, true, false])),
        ..Case::default()
    });
    // Head dimensions that go by in several pieces.
    for (dim, dim_v) in [(72, 136), (512, 8)] {
        cases.push(Case {
            lens: vec![(70, 40)],
            heads: 2,
            kv_heads: 1,
            dim,
            dim_v,
            bias: Some((DType::F32, [false; 4])),
            causal: true,
            ..Case::default()
        });
    }
    run_table(&cases);
}

#[test]
fn mixed_dtypes() {
    let mut cases = vec![Case {
        out_f32: true,
        causal: true,
        ..Case::default()
    }];
    for kv_dtype in FLOATS {
        for out_f32 in [false, true] {
            cases.push(Case {
                lens: vec![(30, 90)],
                kv_dtype: Some(kv_dtype),
                out_f32,
                bias: Some((DType::F32, [true, false, false, false])),
                causal: true,
                ..Case::default()
            });
        }
    }
    run_table(&cases);
}

#[test]
fn large_logits() {
    let cases = [30.0, 1000.0].map(|magnitude| Case {
        lens: vec![(60, 120)],
        magnitude,
        causal: true,
        ..Case::default()
    });
    run_table(&cases);
}

/// Every gradient by itself, and added to what is there.
#[test]
fn gradients_are_optional() {
    let cases = [everything()];
    let one = |set: fn(&mut Wanted)| {
        let mut wanted = Wanted::NONE;
        set(&mut wanted);
        run_with(&cases, wanted);
    };
    one(|w| w.dq = true);
    one(|w| w.dk = true);
    one(|w| w.dv = true);
    one(|w| w.dbias = true);
    one(|w| w.dsinks = true);
    one(|w| (w.dk, w.dv) = (true, true));
    run_with(
        &cases,
        Wanted {
            accumulate: true,
            ..Wanted::ALL
        },
    );
}

/// The same bits every time and with any number of threads.
#[test]
fn bits_are_the_same() {
    let case = Case {
        lens: vec![(300, 200), (40, 150)],
        queries: QueryForm::Packed,
        keys: KeyForm::Packed,
        bias: Some((DType::F32, [true, false, false, true])),
        ..everything()
    };
    let bits = |ctx: &Context, host: &Host| -> Vec<Vec<u8>> {
        let mut call = BackwardCall::new(ctx, &case, Wanted::ALL, host).unwrap();
        call.queue(ctx, Stream::DEFAULT);
        ctx.synchronize(Stream::DEFAULT).unwrap();
        let results = call.results();
        results.iter().flatten().map(|t| t.bits()).collect()
    };
    for dtype in FLOATS {
        let host = Host::new(&mut rng(), dtype, &case, Wanted::ALL);
        let with_threads = |num_threads| {
            let options = ContextOptions {
                num_threads,
                ..ContextOptions::default()
            };
            bits(&Context::new(&options).unwrap(), &host)
        };
        let one = with_threads(1);
        assert_eq!(one.len(), 5);
        for threads in [2, 3, 7] {
            assert!(with_threads(threads) == one, "{dtype}, {threads} threads");
        }
        let Some(ctx) = crate::common::gpu() else {
            continue;
        };
        let first = bits(&ctx, &host);
        for _ in 0..50 {
            assert!(bits(&ctx, &host) == first, "{dtype}");
        }
    }
}
