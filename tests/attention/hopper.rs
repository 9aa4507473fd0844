//! Attention on Hopper's own kernels: which problems they serve, the edges of their tiles, ragged
//! batches, counters.
//!
//! Numerics at large are in `attention.rs`, whose cases run on every device there is.
use crate::common::attention::{
    Call, Case, KeyForm, QueryForm, Strides, Uploaded, check, check_results,
};
use crate::common::graph::Graph;
use crate::common::{hopper, rng};
use unsloth::ops::Implementation;
use unsloth::ops::attention::{self, PageLayout};
use unsloth::{Context, DType};

const HALVES: [DType; 2] = [DType::F16, DType::Bf16];

fn served(ctx: &Context, dtype: DType, case: &Case) -> Implementation {
    let inputs = case.inputs(&mut rng(), dtype);
    let mut tensors = Uploaded::new(ctx, &inputs);
    attention::supported(ctx, &tensors.params(case)).unwrap()
}

/// A case that Hopper's kernels serve.
fn plain() -> Case {
    Case {
        lens: vec![(70, 90)],
        heads: 4,
        kv_heads: 2,
        dim: 64,
        dim_v: 64,
        ..Case::default()
    }
}

fn run(ctx: &Context, cases: &[Case]) {
    for dtype in HALVES {
        crate::common::for_each_case(cases, |case| {
            assert_eq!(served(ctx, dtype, case), Implementation::CudaHopper);
            check(ctx, &mut rng(), dtype, case);
        });
    }
}

#[test]
fn what_is_served() {
    let Some(ctx) = hopper() else { return };
    let yes = [
        plain(),
        Case {
            lens: vec![(33, 90)],
            ..plain()
        },
        Case {
            dim: 8,
            dim_v: 256,
            ..plain()
        },
        Case {
            strides: Strides::HeadsFirst,
            ..plain()
        },
        Case {
            queries: QueryForm::Packed,
            keys: KeyForm::Paged(16, PageLayout::HeadMajor),
            causal: true,
            window_left: Some(9),
            softcap: Some(3.0),
            sinks: true,
            ..plain()
        },
    ];
    // Few queries, but of many sequences; the fewest have kernels of their own (`decode.rs`).
    let many = Case {
        lens: vec![(16, 40); 30],
        heads: 8,
        ..plain()
    };
    let no = [
        // Decoding.
        Case {
            lens: vec![(32, 90)],
            ..plain()
        },
        Case {
            lens: vec![(4, 40); 30],
            dim: 56,
            dim_v: 56,
            ..many.clone()
        },
        // One of them may be long.
        Case {
            keys: KeyForm::Padded,
            ..many.clone()
        },
        Case { dim: 60, ..plain() },
        Case {
            dim_v: 20,
            ..plain()
        },
        Case {
            strides: Strides::Gaps,
            ..plain()
        },
        Case {
            out_f32: true,
            ..plain()
        },
        Case {
            kv_dtype: Some(DType::F32),
            ..plain()
        },
        Case {
            scale: Some(-1.0),
            ..plain()
        },
        Case {
            mask: Some([true; 4]),
            ..plain()
        },
        Case {
            bias: Some((DType::F32, [true; 4])),
            ..plain()
        },
        Case {
            alibi: Some(false),
            ..plain()
        },
        Case {
            keys: KeyForm::Paged(8, PageLayout::TokenMajor),
            ..plain()
        },
    ];
    for dtype in HALVES {
        for case in yes.iter().chain([&many]) {
            assert_eq!(
                served(&ctx, dtype, case),
                Implementation::CudaHopper,
                "{case:?}"
            );
        }
        for case in &no {
            assert_eq!(served(&ctx, dtype, case), Implementation::Cuda, "{case:?}");
        }
    }
    assert_eq!(served(&ctx, DType::F32, &plain()), Implementation::Cuda);
}

/// Head dimensions that each shape of tile serves: the least, for the sake of the reference's time,
/// and the greatest of one.
const DIMS: [(usize, usize); 7] = [
    (8, 16),
    (72, 8),
    (128, 128),
    (136, 8),
    (136, 136),
    (200, 24),
    (256, 256),
];

/// Lengths just below, at and above the sizes of tiles and of what a warpgroup owns of them.
#[test]
fn tile_edges() {
    let Some(ctx) = hopper() else { return };
    let mut cases = Vec::new();
    for (dim, dim_v) in DIMS {
        for (q, k, causal) in [
            (65, 1, true),
            (127, 79, true),
            (128, 128, false),
            (128, 129, true),
            (129, 112, false),
            (191, 257, true),
            (192, 95, false),
            (193, 97, true),
        ] {
            cases.push(Case {
                lens: vec![(q, k)],
                heads: 1,
                kv_heads: 1,
                dim,
                dim_v,
                causal,
                ..plain()
            });
        }
    }
    run(&ctx, &cases);
}

/// Every mask and form with every tile, and heads that are packed or are not.
#[test]
fn masks_and_forms() {
    let Some(ctx) = hopper() else { return };
    let ragged = vec![(70, 100), (0, 3), (1, 260), (33, 33), (80, 1), (5, 0)];
    let mut cases = Vec::new();
    for (i, (dim, dim_v)) in DIMS.into_iter().enumerate() {
        let (heads, kv_heads) = [(2, 2), (4, 1), (3, 1)][i % 3];
        let base = Case {
            lens: ragged.clone(),
            heads,
            kv_heads,
            dim,
            dim_v,
            queries: QueryForm::Packed,
            keys: KeyForm::Packed,
            ..plain()
        };
        cases.push(base.clone());
        cases.push(Case {
            causal: true,
            keys: KeyForm::Paged(16, PageLayout::TokenMajor),
            ..base.clone()
        });
        cases.push(Case {
            keys: KeyForm::Paged(64, PageLayout::HeadMajor),
            ..base.clone()
        });
        cases.push(Case {
            window_left: Some(40),
            window_right: Some(9),
            keys: KeyForm::Paged(128, PageLayout::HeadMajor),
            strides: Strides::HeadsFirst,
            ..base.clone()
        });
        cases.push(Case {
            causal: true,
            window_left: Some(70),
            softcap: Some(2.0),
            sinks: true,
            keys: KeyForm::Padded,
            ..base.clone()
        });
        cases.push(Case {
            lens: vec![(90, 150); 2],
            queries: QueryForm::Batched,
            keys: KeyForm::Batched,
            strides: Strides::HeadsFirst,
            causal: true,
            ..base
        });
    }
    run(&ctx, &cases);
}

/// More sequences than a warp has lanes, of all lengths, in any order.
#[test]
fn ragged_batches() {
    let Some(ctx) = hopper() else { return };
    let len = |i: usize| 1 + (i * 37) % (400 >> (i % 8));
    let lens: Vec<_> = (0..75).map(|i| (len(i), len(i) + i % 3)).collect();
    let base = Case {
        lens,
        heads: 4,
        kv_heads: 1,
        queries: QueryForm::Packed,
        keys: KeyForm::Packed,
        causal: true,
        ..plain()
    };
    let cases = [
        Case {
            keys: KeyForm::Padded,
            heads: 3,
            ..base.clone()
        },
        base,
    ];
    run(&ctx, &cases);
}

/// Problems with more tiles than any GPU has multiprocessors, so that tiles are counted: of one
/// length, and of many.
fn counted() -> [Case; 2] {
    [
        Case {
            lens: vec![(129, 60); 6],
            heads: 24,
            kv_heads: 24,
            dim: 8,
            dim_v: 8,
            causal: true,
            ..plain()
        },
        Case {
            lens: (0..30).map(|i| (7 * i, 5 * i + 1)).collect(),
            heads: 12,
            kv_heads: 12,
            dim: 8,
            dim_v: 8,
            queries: QueryForm::Packed,
            keys: KeyForm::Packed,
            ..plain()
        },
    ]
}

/// Tiles are counted from zero whatever the workspace holds: anything, another launch's count, or,
/// in a graph, the launch's own.
#[test]
fn counters_need_no_care() {
    let Some(ctx) = hopper() else { return };
    let stream = ctx.create_stream().unwrap();
    for case in counted() {
        let inputs = case.inputs(&mut rng(), DType::Bf16);
        let mut call = Call::new(&ctx, &case, &inputs);
        assert_eq!(call.scratch.size(), 16, "a counter");
        call.queue(&ctx, stream);
        ctx.synchronize(stream).unwrap();
        let (out, lse) = call.tensors.results();
        check_results(&ctx, DType::Bf16, &case, &inputs, &out, &lse);
        let expected = call.bits();
        let again = |call: &mut Call, run: &mut dyn FnMut(&mut Call)| {
            call.tensors.out.overwrite(&inputs.out);
            call.tensors.lse.overwrite(&inputs.lse);
            run(call);
            ctx.synchronize(stream).unwrap();
            assert!(call.bits() == expected, "{case:?}");
        };
        for round in 0..20 {
            if round % 3 == 0 {
                call.scratch.poison();
            }
            again(&mut call, &mut |call| call.queue(&ctx, stream));
        }
        let graph = Graph::capture(&ctx, stream, || call.queue(&ctx, stream));
        for round in 0..20 {
            if round % 7 == 6 {
                call.scratch.poison();
            }
            if round % 5 == 4 {
                again(&mut call, &mut |call| call.queue(&ctx, stream));
            }
            again(&mut call, &mut |_| graph.launch(stream));
        }
    }
    // SAFETY: made above, and used no more.
    unsafe { ctx.destroy_stream(stream) }.unwrap();
}

/// Launches that are in flight together each count for themselves: from several threads, on streams
/// of their own.
#[test]
fn launches_in_flight() {
    let Some(ctx) = hopper() else { return };
    let [case, ragged] = counted();
    std::thread::scope(|scope| {
        for case in [&case, &ragged, &case, &ragged] {
            let ctx = &ctx;
            scope.spawn(move || {
                let stream = ctx.create_stream().unwrap();
                let inputs = case.inputs(&mut rng(), DType::F16);
                let mut call = Call::new(ctx, case, &inputs);
                call.queue(ctx, stream);
                ctx.synchronize(stream).unwrap();
                let expected = call.bits();
                for _ in 0..50 {
                    call.queue(ctx, stream);
                }
                ctx.synchronize(stream).unwrap();
                assert!(call.bits() == expected);
                // SAFETY: made above, and used no more.
                unsafe { ctx.destroy_stream(stream) }.unwrap();
            });
        }
    });
}
