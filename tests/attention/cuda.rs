//! What attention has only on the CUDA backend: kernels to choose from, workspaces, streams, graph
//! capture, limits.
//!
//! Its numerics are in `attention.rs`, whose cases run on every device there is; here are those
//! that tell the kernels apart.
use std::ptr;

use crate::common::attention::{
    Call, Case, KeyForm, QueryForm, Scratch, Uploaded, check, check_results,
};
use crate::common::graph::Graph;
use crate::common::{FLOATS, TestTensor, gpu, rng};
use unsloth::ops::attention::{self, PageLayout, Params};
use unsloth::{DType, Layout, Stream, TensorMut, TensorRef};

/// Few queries and many keys: what is split. The other sequences have a key, none, and about as
/// many as one part.
fn split() -> Case {
    Case {
        lens: vec![(1, 5000), (1, 1), (1, 0), (1, 300)],
        heads: 8,
        kv_heads: 2,
        dim: 64,
        dim_v: 64,
        queries: QueryForm::Packed,
        keys: KeyForm::Paged(16, PageLayout::TokenMajor),
        causal: true,
        sinks: true,
        ..Case::default()
    }
}

/// One of each: split and not, few queries and many, paged and not, biased and not.
fn cases() -> Vec<Case> {
    vec![
        split(),
        Case {
            lens: vec![(3, 2000); 2],
            queries: QueryForm::Batched,
            keys: KeyForm::Batched,
            alibi: Some(false),
            ..split()
        },
        Case {
            lens: vec![(150, 260), (1, 80), (0, 3)],
            dim: 128,
            dim_v: 128,
            ..split()
        },
        Case {
            lens: vec![(140, 200)],
            queries: QueryForm::Batched,
            keys: KeyForm::Batched,
            mask: Some([false; 4]),
            ..split()
        },
        // No multiple of eight.
        Case {
            lens: vec![(2, 900); 2],
            dim: 20,
            dim_v: 12,
            ..split()
        },
    ]
}

/// The kernels for each size of heads, with and without adjusted scores, for many and for few
/// queries, with long and short keys.
#[test]
fn every_kernel() {
    let Some(ctx) = gpu() else { return };
    let mut cases = Vec::new();
    for (dim, dim_v) in [
        (64, 64),
        (40, 56),
        (128, 128),
        (104, 72),
        (256, 256),
        (192, 128),
    ] {
        for lens in [
            vec![(1, 700), (1, 33)],
            vec![(9, 600)],
            vec![(70, 100), (33, 33), (65, 1)],
        ] {
            let plain = Case {
                lens,
                heads: 4,
                kv_heads: 2,
                dim,
                dim_v,
                queries: QueryForm::Packed,
                keys: KeyForm::Paged(8, PageLayout::HeadMajor),
                causal: true,
                ..Case::default()
            };
            cases.push(Case {
                scale: Some(-0.2),
                ..plain.clone()
            });
            cases.push(Case {
                softcap: Some(4.0),
                window_left: Some(50),
                sinks: true,
                ..plain.clone()
            });
            cases.push(Case {
                bias: Some((DType::F16, [false; 4])),
                mask: Some([true, false, false, false]),
                keys: KeyForm::Packed,
                ..plain.clone()
            });
            cases.push(Case {
                out_f32: true,
                causal: false,
                window_left: Some(90),
                window_right: Some(7),
                keys: KeyForm::Padded,
                ..plain
            });
        }
    }
    for dtype in FLOATS {
        crate::common::for_each_case(&cases, |case| check(&ctx, &mut rng(), dtype, case));
    }
}

/// Prompts of f32 are on tensor cores, which would be far off without the small parts of its
/// elements; the more so, the larger the logits. Here dimensions are multiples of four only, or of
/// no use to a tile.
#[test]
fn prompts_in_f32() {
    let Some(ctx) = gpu() else { return };
    let mut cases = Vec::new();
    for (dim, dim_v) in [
        (36, 60),
        (4, 64),
        (100, 68),
        (128, 12),
        (132, 200),
        (256, 4),
    ] {
        let plain = Case {
            lens: vec![(150, 230), (40, 250), (70, 33)],
            heads: 6,
            kv_heads: 2,
            dim,
            dim_v,
            queries: QueryForm::Packed,
            keys: KeyForm::Paged(16, PageLayout::TokenMajor),
            magnitude: 8.0,
            ..Case::default()
        };
        cases.push(Case {
            softcap: Some(30.0),
            causal: true,
            ..plain.clone()
        });
        cases.push(plain);
    }
    crate::common::for_each_case(&cases, |case| check(&ctx, &mut rng(), DType::F32, case));
}

/// Keys are split where blocks of whole ones would leave most of a GPU idle, and tensor cores have
/// all others.
#[test]
fn prompts_in_f32_split_when_few() {
    let Some(ctx) = gpu() else { return };
    let size = |batch: usize, queries: usize, keys: usize, heads: usize| {
        let layout = |tokens| Layout::contiguous(&[batch, tokens, heads, 128]).unwrap();
        // SAFETY: queries read no data.
        let described =
            |tokens| unsafe { TensorRef::from_raw(ptr::null(), DType::F32, layout(tokens)) };
        // SAFETY: as above.
        let out = unsafe { TensorMut::from_raw(ptr::null_mut(), DType::F32, layout(queries)) };
        let params = Params::new(described(queries), described(keys), described(keys), out);
        attention::workspace_size(&ctx, &params).unwrap()
    };
    assert_eq!(size(8, 2048, 2048, 32), 0);
    assert_eq!(size(8, 2048, 1 << 16, 32), 0);
    assert!(size(1, 100, 1 << 16, 1) > 0);
}

/// Groups of query heads that fill a block of rows, or more than one, or none evenly.
#[test]
fn packed_heads() {
    let Some(ctx) = gpu() else { return };
    let mut cases = Vec::new();
    for (heads, kv_heads) in [(5, 1), (16, 1), (24, 1), (40, 2), (64, 1), (65, 1), (6, 6)] {
        for lens in [(1, 600), (2, 90), (3, 40)] {
            cases.push(Case {
                lens: vec![lens; 2],
                heads,
                kv_heads,
                dim: 32,
                dim_v: 32,
                causal: true,
                ..Case::default()
            });
        }
    }
    for dtype in FLOATS {
        crate::common::for_each_case(&cases, |case| check(&ctx, &mut rng(), dtype, case));
    }
}

/// Whatever the workspace held, and whatever another problem left in it.
#[test]
fn workspaces_need_no_care() {
    let Some(ctx) = gpu() else { return };
    for dtype in FLOATS {
        for case in cases() {
            let inputs = case.inputs(&mut rng(), dtype);
            let mut call = Call::new(&ctx, &case, &inputs);
            let mut first = None;
            for _ in 0..3 {
                call.queue(&ctx, Stream::DEFAULT);
                ctx.synchronize(Stream::DEFAULT).unwrap();
                let bits = call.bits();
                assert!(*first.get_or_insert(bits.clone()) == bits, "{case:?}");
                call.scratch.poison();
            }
        }
    }
}

/// The answer follows from shapes alone; a byte less is refused, and a longer bound on lengths
/// changes no result.
#[test]
fn workspace_sizes_are_exact() {
    let Some(ctx) = gpu() else { return };
    // Of no head dimension that Hopper's own kernels have for few queries.
    let split = || Case {
        dim: 56,
        dim_v: 56,
        ..split()
    };
    let inputs = split().inputs(&mut rng(), DType::Bf16);
    let mut call = Call::new(&ctx, &split(), &inputs);
    let mut params = call.tensors.params(&split());
    let size = attention::workspace_size(&ctx, &params).unwrap();
    // Parts of 4 sequences, 8 heads, 56 values and a sum each.
    let part = 4 * 8 * (56 + 1) * 4;
    assert!(size > part && size.is_multiple_of(part), "{size}");
    let mut less = Scratch::new(&ctx, size - 1);
    params.workspace = less.workspace();
    let error = attention::forward(&ctx, &params, Stream::DEFAULT).unwrap_err();
    let expected = format!(
        "attention: workspace_size is {} bytes, {size} are required",
        size - 1
    );
    assert_eq!(error.to_string(), expected);

    let described = |t: &TestTensor| {
        // SAFETY: queries read no data.
        unsafe { TensorRef::from_raw(ptr::null(), t.dtype, t.layout) }
    };
    // SAFETY: as above.
    let out = unsafe { TensorMut::from_raw(ptr::null_mut(), DType::Bf16, inputs.out.layout) };
    let mut nothing = Params::new(
        described(&inputs.q),
        described(&inputs.k),
        described(&inputs.v),
        out,
    );
    nothing.cu_seqlens_q = inputs.cu_seqlens_q.as_ref().map(described);
    nothing.seq_lens_k = inputs.seq_lens_k.as_ref().map(described);
    nothing.block_table = inputs.block_table.as_ref().map(described);
    nothing.max_seqlen_q = 1;
    nothing.max_seqlen_k = 5000;
    assert_eq!(attention::workspace_size(&ctx, &nothing).unwrap(), size);

    let long = Case {
        lens: vec![(200, 5000)],
        ..split()
    };
    let inputs = long.inputs(&mut rng(), DType::Bf16);
    let size = attention::workspace_size(&ctx, &Uploaded::new(&ctx, &inputs).params(&long));
    assert_eq!(size.unwrap(), 0);
}

/// Addresses that no vector access allows take other kernels with the same workspace.
#[test]
fn misaligned_addresses() {
    let Some(ctx) = gpu() else { return };
    let moved = |t: &TestTensor| {
        let mut moved = TestTensor::poisoned_at(t.dtype, t.layout, 1);
        moved.set_bits(&t.bits());
        moved
    };
    for dtype in FLOATS {
        for case in cases() {
            let aligned = {
                let inputs = case.inputs(&mut rng(), dtype);
                Call::new(&ctx, &case, &inputs).scratch
            };
            for which in 0..6 {
                let mut inputs = case.inputs(&mut rng(), dtype);
                let chosen = |i| which == i || which == 5;
                for (i, t) in [&mut inputs.q, &mut inputs.k, &mut inputs.v]
                    .into_iter()
                    .enumerate()
                {
                    if chosen(i) {
                        *t = moved(t);
                    }
                }
                if chosen(3) {
                    inputs.out = TestTensor::poisoned_at(dtype, inputs.out.layout, 1);
                }
                if chosen(4) {
                    inputs.lse = TestTensor::poisoned_at(DType::F32, inputs.lse.layout, 1);
                }
                let mut call = Call::new(&ctx, &case, &inputs);
                assert_eq!(call.scratch.size(), aligned.size());
                call.queue(&ctx, Stream::DEFAULT);
                ctx.synchronize(Stream::DEFAULT).unwrap();
                call.scratch.assert_within();
                let (out, lse) = call.tensors.results();
                check_results(&ctx, dtype, &case, &inputs, &out, &lse);
            }
        }
    }
}

/// Two streams at once, each with a workspace of its own, and a third that waits for nobody.
#[test]
fn streams_do_not_mix() {
    let Some(ctx) = gpu() else { return };
    let mut calls = Vec::new();
    for case in [
        split(),
        Case {
            softcap: Some(2.0),
            ..split()
        },
        cases().swap_remove(2),
    ] {
        let inputs = case.inputs(&mut rng(), DType::F16);
        let mut call = Call::new(&ctx, &case, &inputs);
        call.queue(&ctx, Stream::DEFAULT);
        ctx.synchronize(Stream::DEFAULT).unwrap();
        let expected = call.bits();
        let again = Call::new(&ctx, &case, &inputs);
        calls.push((ctx.create_stream().unwrap(), again, expected));
    }
    for _ in 0..30 {
        for (stream, call, _) in &mut calls {
            call.queue(&ctx, *stream);
        }
    }
    for (stream, call, expected) in calls {
        ctx.synchronize(stream).unwrap();
        assert!(call.bits() == expected);
        // SAFETY: made above, and used no more.
        unsafe { ctx.destroy_stream(stream) }.unwrap();
    }
}

/// The first call of a context goes into a graph, whose replays see what tensors hold then:
/// queries, and lengths that have grown.
#[test]
fn the_first_call_can_be_captured() {
    if gpu().is_none() {
        return;
    }
    for case in cases() {
        let ctx = gpu().unwrap();
        let rng = &mut rng();
        let inputs = case.inputs(rng, DType::Bf16);
        let mut call = Call::new(&ctx, &case, &inputs);
        let stream = ctx.create_stream().unwrap();
        let graph = Graph::capture(&ctx, stream, || call.queue(&ctx, stream));
        for round in 0..3 {
            call.tensors.out.overwrite(&inputs.out);
            call.tensors.lse.overwrite(&inputs.lse);
            call.scratch.poison();
            graph.launch(stream);
            ctx.synchronize(stream).unwrap();
            let (out, lse) = call.tensors.results();
            if round == 0 {
                check_results(&ctx, DType::Bf16, &case, &inputs, &out, &lse);
            }
            call.queue(&ctx, stream);
            ctx.synchronize(stream).unwrap();
            assert!(call.bits() == (out.bits(), lse.bits()), "{case:?}");
            let other = TestTensor::normal(rng, DType::Bf16, inputs.q.layout);
            call.tensors.q.overwrite(&other);
            if let (Some(lens), Some(t)) = (&mut call.tensors.seq_lens_k, &inputs.seq_lens_k) {
                let shorter: Vec<f64> = t.values().iter().map(|n| (n / 2.0).floor()).collect();
                let shape = t.layout.shape();
                lens.overwrite(&TestTensor::of(DType::I32, shape, &shorter));
            }
        }
        // SAFETY: made above, and used no more.
        unsafe { ctx.destroy_stream(stream) }.unwrap();
    }
}

/// Shapes, dtypes and bounds that the backend refuses in the queries as in the call.
#[test]
fn limits() {
    let Some(ctx) = gpu() else { return };
    struct Shape {
        q: [usize; 4],
        k: [usize; 4],
        dim_v: usize,
        dtypes: [DType; 3],
    }
    let [f32_, f16_, bf16_] = FLOATS;
    let good = || Shape {
        q: [1, 2, 4, 64],
        k: [1, 8, 2, 64],
        dim_v: 64,
        dtypes: [f16_; 3],
    };
    let table = [
        (
            Shape {
                q: [1, 2, 4, 264],
                k: [1, 8, 2, 264],
                ..good()
            },
            "attention: q has head_dim 264, the CUDA backend takes 1 to 256",
        ),
        (
            Shape {
                dim_v: 257,
                ..good()
            },
            "attention: v has head_dim 257, the CUDA backend takes 1 to 256",
        ),
        (
            Shape {
                dtypes: [f32_, f16_, bf16_],
                ..good()
            },
            "attention: v has dtype bf16, k has f16: the CUDA backend takes one for both",
        ),
        (
            Shape {
                q: [1, 1 << 30, 4, 64],
                ..good()
            },
            "attention: q has up to 1073741824 queries per sequence, the CUDA backend takes 1073741823",
        ),
        (
            Shape {
                k: [1, 1 << 30, 2, 64],
                ..good()
            },
            "attention: k has up to 1073741824 keys per sequence, the CUDA backend takes 1073741823",
        ),
        (
            Shape {
                q: [1 << 20, 1 << 12, 4, 64],
                k: [1 << 20, 8, 2, 64],
                ..good()
            },
            "attention: q has 1048576 sequences of up to 4096 queries and 4 heads, the CUDA backend takes 4294967295 rows in all",
        ),
        (
            Shape {
                q: [1 << 31, 1, 1, 64],
                k: [1 << 31, 8, 1, 64],
                ..good()
            },
            "attention: q needs 2147483648 thread blocks, the CUDA backend launches 2147483647",
        ),
    ];
    let describe = |s: &Shape, error: Option<&str>| {
        let layout = |shape: &[usize; 4], dim| {
            Layout::contiguous(&[shape[0], shape[1], shape[2], dim]).unwrap()
        };
        let [q, k, v] =
            [(s.q, s.q[3]), (s.k, s.k[3]), (s.k, s.dim_v)].map(|(shape, dim)| layout(&shape, dim));
        // SAFETY: nothing is read or written through them: the queries do not, the call is refused
        // before.
        let params = unsafe {
            let read = |dtype, layout| TensorRef::from_raw(ptr::null(), dtype, layout);
            let out = TensorMut::from_raw(ptr::null_mut(), s.dtypes[0], layout(&s.q, s.dim_v));
            Params::new(
                read(s.dtypes[0], q),
                read(s.dtypes[1], k),
                read(s.dtypes[2], v),
                out,
            )
        };
        let answers = [
            attention::supported(&ctx, &params).map(drop),
            attention::workspace_size(&ctx, &params).map(drop),
        ];
        for answer in answers {
            assert_eq!(answer.err().map(|e| e.to_string()).as_deref(), error);
        }
        if error.is_some() {
            let answer = attention::forward(&ctx, &params, Stream::DEFAULT);
            assert_eq!(answer.err().map(|e| e.to_string()).as_deref(), error);
        }
    };
    describe(&good(), None);
    for (shape, error) in &table {
        describe(shape, Some(error));
    }
    // One below.
    describe(
        &Shape {
            q: [1, 1, 4, 256],
            k: [1, (1 << 30) - 1, 2, 256],
            dim_v: 256,
            dtypes: [f32_, bf16_, bf16_],
        },
        None,
    );
}
