//! Attention against its definition: forms, layouts, dtypes, features.

use crate::common::attention::{Case, KeyForm, QueryForm, Strides, check};
use crate::common::{FLOATS, contexts, rng};
use unsloth::DType;
use unsloth::ops::attention::PageLayout;

const TOKEN: PageLayout = PageLayout::TokenMajor;
const HEAD: PageLayout = PageLayout::HeadMajor;

fn run_table(cases: &[Case]) {
    for ctx in contexts() {
        for dtype in FLOATS {
            crate::common::for_each_case(cases, |case| check(&ctx, &mut rng(), dtype, case));
        }
    }
}

/// Queries and keys of one sequence: one, few, around the sizes at which kernels cut, long.
#[test]
fn lengths() {
    let lens = [
        (1, 1),
        (1, 2),
        (1, 63),
        (1, 64),
        (1, 65),
        (1, 1024),
        (1, 1025),
        (1, 2500),
        (2, 3),
        (3, 130),
        (4, 1100),
        (5, 5),
        (8, 8),
        (9, 17),
        (16, 64),
        (17, 1500),
        (31, 33),
        (33, 31),
        (64, 64),
        (65, 127),
        (128, 128),
        (129, 65),
        (200, 300),
        (50, 1),
        (50, 7),
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
    for (heads, kv_heads) in [(1, 1), (3, 3), (9, 3), (8, 1), (7, 1), (12, 2), (40, 1)] {
        for lens in [(1, 70), (3, 70), (40, 50)] {
            cases.push(Case {
                lens: vec![lens; 2],
                heads,
                kv_heads,
                causal: true,
                ..Case::default()
            });
        }
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
        for lens in [(1, 70), (21, 40), (70, 90)] {
            cases.push(Case {
                lens: vec![lens],
                heads: 2,
                kv_heads: 1,
                dim,
                dim_v,
                causal: true,
                ..Case::default()
            });
        }
    }
    run_table(&cases);
}

#[test]
fn forms_and_strides() {
    let ragged = vec![(7, 20), (1, 33), (0, 4), (12, 12), (5, 0), (40, 70)];
    let decode = vec![(1, 20), (1, 1), (1, 33), (1, 0), (1, 70), (1, 1200)];
    let mut cases = Vec::new();
    for strides in [Strides::Contiguous, Strides::Gaps, Strides::HeadsFirst] {
        let keys = [
            KeyForm::Padded,
            KeyForm::Packed,
            KeyForm::Paged(1, TOKEN),
            KeyForm::Paged(16, TOKEN),
            KeyForm::Paged(4, HEAD),
            KeyForm::Paged(64, HEAD),
        ];
        for keys in keys {
            for lens in [&ragged, &decode] {
                let case = Case {
                    lens: lens.clone(),
                    queries: QueryForm::Packed,
                    keys,
                    strides,
                    causal: true,
                    ..Case::default()
                };
                cases.push(case);
            }
            // Batched queries have one length.
            cases.push(Case {
                lens: decode.clone(),
                keys,
                strides,
                causal: true,
                ..Case::default()
            });
            cases.push(Case {
                lens: vec![(13, 20), (13, 13), (13, 9)],
                keys,
                strides,
                ..Case::default()
            });
        }
        cases.push(Case {
            lens: vec![(9, 30); 3],
            strides,
            causal: true,
            ..Case::default()
        });
        cases.push(Case {
            lens: vec![(9, 30), (2, 30), (60, 30)],
            queries: QueryForm::Packed,
            strides,
            ..Case::default()
        });
    }
    run_table(&cases);
}

#[test]
fn windows() {
    let mut cases = Vec::new();
    for lens in [(1, 200), (3, 90), (100, 100), (70, 150), (90, 40)] {
        for (causal, window_left, window_right) in [
            (true, Some(1), None),
            (true, Some(17), None),
            (true, Some(64), None),
            (true, Some(1000), None),
            (false, Some(5), None),
            (false, None, Some(1)),
            (false, None, Some(40)),
            (false, Some(20), Some(9)),
            (false, Some(1), Some(1)),
            (true, Some(30), Some(30)),
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
    cases.push(Case {
        lens: vec![(1, 5000)],
        window_left: Some(1500),
        causal: true,
        ..Case::default()
    });
    cases.push(Case {
        lens: vec![(1, 300)],
        window_left: Some(usize::MAX),
        window_right: Some(usize::MAX),
        ..Case::default()
    });
    run_table(&cases);
}

#[test]
fn score_modifiers() {
    let all = [false; 4];
    let shapes = [[1, 80], [3, 80], [50, 60]];
    let mut cases = Vec::new();
    for [q, k] in shapes {
        let base = Case {
            lens: vec![(q, k); 2],
            ..Case::default()
        };
        cases.push(Case {
            scale: Some(0.7),
            ..base.clone()
        });
        cases.push(Case {
            scale: Some(-0.3),
            ..base.clone()
        });
        for softcap in [0.5, 20.0] {
            cases.push(Case {
                softcap: Some(softcap),
                causal: true,
                ..base.clone()
            });
        }
        let repeats = [
            all,
            [true, true, false, false],
            [true; 4],
            [false, true, true, false],
            [true, false, false, true],
            [false, true, false, true],
        ];
        for repeated in repeats {
            cases.push(Case {
                bias: Some((DType::F32, repeated)),
                ..base.clone()
            });
            cases.push(Case {
                mask: Some(repeated),
                ..base.clone()
            });
        }
        for dtype in [DType::F16, DType::Bf16] {
            cases.push(Case {
                bias: Some((dtype, all)),
                causal: true,
                ..base.clone()
            });
        }
        for per_sequence in [false, true] {
            cases.push(Case {
                alibi: Some(per_sequence),
                ..base.clone()
            });
            cases.push(Case {
                alibi: Some(per_sequence),
                causal: true,
                ..base.clone()
            });
        }
        for causal in [false, true] {
            cases.push(Case {
                sinks: true,
                causal,
                ..base.clone()
            });
        }
        cases.push(Case {
            softcap: Some(5.0),
            bias: Some((DType::F32, all)),
            mask: Some(all),
            alibi: Some(true),
            sinks: true,
            causal: true,
            window_left: Some(40),
            scale: Some(0.2),
            ..base.clone()
        });
    }
    // Everything again where keys are split and merged, and where tokens are packed and paged.
    for (lens, queries, keys) in [
        (
            vec![(1, 2100), (1, 2100)],
            QueryForm::Batched,
            KeyForm::Batched,
        ),
        (
            vec![(1, 1500), (30, 40), (5, 9)],
            QueryForm::Packed,
            KeyForm::Packed,
        ),
        (
            vec![(2, 1500), (30, 40), (5, 9)],
            QueryForm::Packed,
            KeyForm::Padded,
        ),
    ] {
        cases.push(Case {
            lens,
            queries,
            keys,
            softcap: Some(5.0),
            bias: Some((DType::F32, all)),
            mask: Some([false, true, false, false]),
            alibi: Some(true),
            sinks: true,
            causal: true,
            window_left: Some(1300),
            ..Case::default()
        });
    }
    cases.push(Case {
        lens: vec![(20, 30), (4, 200), (1, 1)],
        queries: QueryForm::Packed,
        keys: KeyForm::Paged(8, HEAD),
        sinks: true,
        alibi: Some(true),
        softcap: Some(3.0),
        causal: true,
        ..Case::default()
    });
    run_table(&cases);
}

#[test]
fn mixed_dtypes() {
    let mut cases = Vec::new();
    for kv_dtype in FLOATS {
        for out_f32 in [false, true] {
            for lens in [(1, 90), (30, 90)] {
                cases.push(Case {
                    lens: vec![lens],
                    kv_dtype: Some(kv_dtype),
                    out_f32,
                    causal: true,
                    ..Case::default()
                });
            }
        }
    }
    run_table(&cases);
}

/// Logits in the hundreds and thousands: the running maximum must keep every exponential finite.
#[test]
fn large_logits() {
    let mut cases = Vec::new();
    for magnitude in [30.0, 1000.0] {
        for lens in [(1, 2000), (4, 100), (60, 200)] {
            cases.push(Case {
                lens: vec![lens],
                magnitude,
                causal: true,
                ..Case::default()
            });
        }
    }
    run_table(&cases);
}
