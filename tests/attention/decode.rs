//! Attention of few queries on Hopper's own kernels: equal shares of all keys, parts that are joined, lengths of all sizes.
use crate::common::attention::{
    Call, Case, KeyForm, QueryForm, Strides, Uploaded, check, check_results,
};
use crate::common::graph::Graph;
use crate::common::{hopper, rng};
use unsloth::ops::Implementation;
use unsloth::ops::attention::{self, PageLayout};
use unsloth::{Context, DType};

const HALVES: [DType; 2] = [DType::F16, DType::Bf16];
const DIMS: [usize; 3] = [64, 128, 256];
const PAGES: KeyForm = KeyForm::Paged(16, PageLayout::TokenMajor);

/// One query token of one sequence, with as many key heads as are read together.
fn plain(dim: usize) -> Case {
    Case {
        lens: vec![(1, 700)],
        heads: if dim == 256 { 4 } else { 8 },
        kv_heads: 256 / dim,
        dim,
        dim_v: dim,
        ..Case::default()
    }
}

fn ragged(dim: usize) -> Case {
    Case {
        queries: QueryForm::Packed,
        keys: PAGES,
        causal: true,
        ..plain(dim)
    }
}

/// The cases with floats and with codes as keys and values.
fn run(ctx: &Context, cases: &[Case]) {
    for dtype in HALVES {
        crate::common::for_each_case(cases, |case| {
            assert_eq!(served(ctx, dtype, case), Implementation::CudaHopper);
            check(ctx, &mut rng(), dtype, case);
        });
        let codes: Vec<_> = cases.iter().map(of_codes).collect();
        crate::common::for_each_case(&codes, |case| {
            // Others are faster where a row of codes is short and the next one far.
            let heads_first = case.strides == Strides::HeadsFirst
                || matches!(case.keys, KeyForm::Paged(_, PageLayout::HeadMajor));
            let beside = case.kv_heads == 1 || case.kv_heads.is_multiple_of(256 / case.dim);
            let expected = match heads_first || beside {
                true => Implementation::CudaHopper,
                false => Implementation::Cuda,
            };
            assert_eq!(served(ctx, dtype, case), expected);
            check(ctx, &mut rng(), dtype, case);
        });
    }
}

fn served(ctx: &Context, dtype: DType, case: &Case) -> Implementation {
    let inputs = case.inputs(&mut rng(), dtype);
    let mut tensors = Uploaded::new(ctx, &inputs);
    attention::supported(ctx, &tensors.params(case)).unwrap()
}

fn of_codes(case: &Case) -> Case {
    Case {
        kv_dtype: Some(DType::F8E4M3),
        kv_scales: Some(true),
        ..case.clone()
    }
}

/// Lengths at the edges of tiles and pages, none and one among them, in parts and whole.
#[test]
fn lengths() {
    let Some(ctx) = hopper() else { return };
    let mut cases = Vec::new();
    for dim in DIMS {
        for keys in [1, 15, 16, 17, 63, 64, 65, 129, 1000] {
            cases.push(Case {
                lens: vec![(1, keys)],
                ..plain(dim)
            });
            // Without a cap one query to few keys has another kernel.
            cases.push(Case {
                lens: vec![(1, keys)],
                softcap: Some(20.0),
                ..plain(dim)
            });
        }
        let lens: Vec<_> = [0, 1, 333, 16, 700, 129].map(|keys| (1, keys)).into();
        let head_major = KeyForm::Paged(16, PageLayout::HeadMajor);
        for keys in [PAGES, head_major, KeyForm::Padded] {
            cases.push(Case {
                lens: lens.clone(),
                keys,
                ..plain(dim)
            });
        }
        // As many keys as that kernel takes, with sixteen heads of a key head; and one more.
        for keys in [2048, 2049] {
            cases.push(Case {
                lens: vec![(1, keys)],
                heads: 16 * 256 / dim,
                ..plain(dim)
            });
        }
        let lens: Vec<_> = [0, 1, 333, 16, 0, 2000, 127, 128, 129, 31, 0]
            .into_iter()
            .map(|keys| (1, keys))
            .collect();
        for keys in [PAGES, KeyForm::Packed, KeyForm::Padded] {
            cases.push(Case {
                lens: lens.clone(),
                keys,
                sinks: keys == KeyForm::Packed,
                ..ragged(dim)
            });
        }
        cases.push(Case {
            lens: vec![(1, 333); 7],
            ..plain(dim)
        });
        // Heads that are read one by one: of an odd number, and that lie apart.
        cases.push(Case {
            lens: vec![(1, 333); 3],
            heads: 3,
            kv_heads: 3,
            ..plain(dim)
        });
        cases.push(Case {
            lens: vec![(1, 1500), (1, 40)],
            keys: KeyForm::Paged(16, PageLayout::HeadMajor),
            ..ragged(dim)
        });
    }
    run(&ctx, &cases);
}

/// More sequences than a device has blocks, more than a warp has lanes and more groups of them than are summed up at a time;
/// and one that every block has a part of.
#[test]
fn shares() {
    let Some(ctx) = hopper() else { return };
    let len = |i: usize| (1, (i * 37) % (200 >> (i % 5)));
    let cases = [
        Case {
            lens: (0..333).map(len).collect(),
            heads: 4,
            ..ragged(64)
        },
        Case {
            lens: (0..200).map(len).collect(),
            heads: 2,
            kv_heads: 1,
            ..ragged(128)
        },
        Case {
            lens: (0..2100)
                .map(|i| (usize::from(i % 7 != 3), i % 3))
                .collect(),
            heads: 1,
            kv_heads: 1,
            ..ragged(64)
        },
        Case {
            lens: vec![(1, 90); 150],
            heads: 2,
            ..plain(128)
        },
        // As many keys in each: whole ones in turns, and what is left in parts. Lengths that the host knows, and does not.
        Case {
            lens: vec![(1, 700); 150],
            heads: 1,
            kv_heads: 1,
            ..plain(64)
        },
        Case {
            lens: vec![(1, 700); 150],
            heads: 1,
            kv_heads: 1,
            ..ragged(64)
        },
        Case {
            lens: vec![(1, 20000)],
            heads: 2,
            kv_heads: 1,
            ..plain(128)
        },
        Case {
            lens: vec![(1, 3), (1, 9000), (1, 1), (1, 4000)],
            heads: 2,
            kv_heads: 1,
            ..ragged(256)
        },
    ];
    run(&ctx, &cases);
}

/// One head of a key head to sixteen, and as many rows by several queries.
#[test]
fn rows() {
    let Some(ctx) = hopper() else { return };
    let mut cases = Vec::new();
    for (i, (heads, kv_heads, queries)) in [
        (3, 3, 1),
        (8, 2, 1),
        (8, 1, 1),
        (16, 1, 1),
        (4, 1, 4),
        (5, 1, 3),
        (2, 2, 16),
        (16, 2, 2),
        (16, 4, 3),
        (12, 4, 2),
        (8, 8, 5),
    ]
    .into_iter()
    .enumerate()
    {
        let dim = DIMS[(i + i / 8) % 3];
        cases.push(Case {
            lens: vec![(queries, 530), (queries, 2), (1, 77), (0, 5), (queries, 0)],
            heads,
            kv_heads,
            ..ragged(dim)
        });
        cases.push(Case {
            lens: vec![(queries, 410); 2],
            heads,
            kv_heads,
            causal: i % 2 == 0,
            ..plain(dim)
        });
    }
    run(&ctx, &cases);
}

/// Windows, caps, sinks, larger pages and other strides.
#[test]
fn forms() {
    let Some(ctx) = hopper() else { return };
    let mut cases = Vec::new();
    for dim in DIMS {
        let lens = vec![(1, 500), (3, 90), (2, 1), (1, 0)];
        for (window, page) in [(1, 16), (40, 32), (200, 64), (129, 128), (3, 512)] {
            cases.push(Case {
                lens: lens.clone(),
                window_left: Some(window),
                keys: KeyForm::Paged(page, PageLayout::HeadMajor),
                softcap: (window == 40).then_some(2.0),
                sinks: window > 100,
                ..ragged(dim)
            });
        }
        cases.push(Case {
            lens: vec![(4, 300); 2],
            window_left: Some(100),
            window_right: Some(2),
            strides: Strides::HeadsFirst,
            ..plain(dim)
        });
        cases.push(Case {
            lens: vec![(2, 300), (4, 20)],
            window_right: Some(20),
            keys: KeyForm::Padded,
            strides: Strides::HeadsFirst,
            causal: false,
            ..ragged(dim)
        });
    }
    run(&ctx, &cases);
}

/// Parts are counted from zero whatever the workspace holds: anything, another launch's count, or, in a graph, the launch's own.
/// They are joined in one order, whoever comes last.
#[test]
fn workspaces_need_no_care() {
    let Some(ctx) = hopper() else { return };
    let stream = ctx.create_stream().unwrap();
    let few_keys = plain(128);
    let mut cases = vec![
        few_keys.clone(),
        Case {
            lens: vec![(1, 9000)],
            ..plain(128)
        },
        Case {
            lens: vec![(1, 900), (1, 1), (1, 4000), (1, 0), (2, 333)],
            ..ragged(64)
        },
    ];
    let long = |dim| Case {
        lens: vec![(1, 1400), (1, 1), (1, 900), (1, 0), (2, 700)],
        ..ragged(dim)
    };
    cases.extend(DIMS.map(|dim| of_codes(&long(dim))));
    for case in cases {
        let inputs = case.inputs(&mut rng(), DType::Bf16);
        let mut call = Call::new(&ctx, &case, &inputs);
        // One query to few keys: parts are joined by the blocks of a cluster.
        assert_eq!(call.scratch.size() > 0, case.lens != few_keys.lens);
        call.queue(&ctx, stream);
        ctx.synchronize(stream).unwrap();
        let (out, lse) = call.tensors.results();
        check_results(&ctx, DType::Bf16, &case, &inputs, &out, &lse);
        let expected = call.bits();
        let graph = Graph::capture(&ctx, stream, || call.queue(&ctx, stream));
        for round in 0..40 {
            call.tensors.out.overwrite(&inputs.out);
            call.tensors.lse.overwrite(&inputs.lse);
            if round % 7 == 6 {
                call.scratch.poison();
            }
            match round % 3 {
                0 => call.queue(&ctx, stream),
                _ => graph.launch(stream),
            }
            ctx.synchronize(stream).unwrap();
            assert!(call.bits() == expected, "{case:?}");
        }
    }
    // SAFETY: made above, and used no more.
    unsafe { ctx.destroy_stream(stream) }.unwrap();
}
