//! The gradient of an embedding's table against its definition, which is the adjoint of the
//! forward's; layouts, dtypes, padding, accumulation; arguments that are refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::contiguous;
use crate::common::tensor::{normal, strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, assert_close_of_sums, contexts, rng};
use proptest::prelude::*;
use unsloth::ffi::embedding::backward::*;
use unsloth::ffi::status::*;
use unsloth::ops::embedding::{self, backward::Params};
use unsloth::{Context, ContextOptions, DType, Error, Layout, Stream, Workspace};

/// The sums of the rows of `dout` where each id stands, from `before` on.
fn reference(dout: &[f64], ids: &[f64], padding: Option<usize>, before: &[f64]) -> Vec<f64> {
    let mut sums = before.to_vec();
    let dim = dout.len() / ids.len().max(1);
    for (i, id) in ids.iter().enumerate() {
        if Some(*id as usize) != padding {
            for c in 0..dim {
                sums[*id as usize * dim + c] += dout[i * dim + c];
            }
        }
    }
    sums
}

/// Looking up is linear in the table, and the reference is its adjoint: what a direction of the
/// table does to a loss is the same looked up, times the output's gradient, and times the table's.
#[test]
fn the_reference_is_the_adjoint_of_the_forward() {
    let rng = &mut rng();
    let (vocab, dim, tokens) = (7, 3, 20);
    let ids = TestTensor::integers(rng, DType::I32, contiguous(&[tokens]), vocab as i64).values();
    let mut random = |len| (0..len).map(|_| normal(rng)).collect::<Vec<f64>>();
    let (dout, direction) = (random(tokens * dim), random(vocab * dim));
    let looked_up = ids
        .iter()
        .flat_map(|id| &direction[*id as usize * dim..][..dim]);
    let difference: f64 = looked_up.zip(&dout).map(|(v, d)| v * d).sum();
    let gradient = reference(&dout, &ids, None, &vec![0.0; vocab * dim]);
    let derivative: f64 = gradient.iter().zip(&direction).map(|(g, v)| g * v).sum();
    assert!((difference - derivative).abs() < 1e-10);
}

#[derive(Clone, Debug)]
struct Case {
    ids: Layout,
    dout: Layout,
    dweight: Layout,
    /// Ids are below it.
    used: usize,
    padding: Option<usize>,
    accumulate: bool,
}

fn cases() -> Vec<Case> {
    let case = |ids: &[usize], [vocab, dim]: [usize; 2]| Case {
        ids: contiguous(ids),
        dout: contiguous(&[ids, &[dim]].concat()),
        dweight: contiguous(&[vocab, dim]),
        used: vocab,
        padding: None,
        accumulate: false,
    };
    let base = case(&[3, 4], [10, 17]);
    let mut cases = vec![
        case(&[1], [1, 1]),
        case(&[7], [5, 3]),
        case(&[0], [5, 3]),
        case(&[4], [5, 0]),
        case(&[2, 3, 1, 2, 2], [9, 8]),
        case(&[300], [50, 1030]),
        case(&[2000], [70_000, 2]),
        // Ids that take two and three digits of nine bits to sort.
        Case {
            used: 66_000,
            ..case(&[1500], [70_000, 2])
        },
        Case {
            used: 266_000,
            ..case(&[2100], [270_000, 1])
        },
        // More positions than ten blocks sort.
        case(&[20_500], [900, 2]),
        // Many positions of few ids, and of one.
        Case {
            used: 3,
            ..case(&[5000], [300, 40])
        },
        Case {
            used: 1,
            ..case(&[1025], [2, 264])
        },
        // As many of one id as are summed at once, in one piece, in two; and one more.
        case(&[32], [1, 24]),
        case(&[33], [1, 24]),
        case(&[64], [1, 24]),
        case(&[65], [1, 24]),
        // Rows of a few positions less than are summed in pieces beside rows of a few more.
        case(&[2000], [66, 40]),
        case(&[1500], [50, 264]),
        // Of more pieces than a thread asks for at once, for more vectors than a block has.
        case(&[3000], [1, 1040]),
        Case {
            ids: Layout::strided(&[3, 4], &[0, 2]).unwrap(),
            ..base.clone()
        },
        Case {
            ids: transposed(&[3, 4], 0, 1),
            ..base.clone()
        },
        Case {
            dweight: strided_rows(&[10, 17], 4),
            ..base.clone()
        },
        Case {
            dout: strided_rows(&[3, 4, 17], 1),
            ..base.clone()
        },
        Case {
            dout: transposed(&[3, 4, 17], 0, 1),
            ..base
        },
    ];
    for case in cases.clone() {
        cases.push(Case {
            accumulate: true,
            padding: Some(case.used / 2),
            ..case
        });
        cases.push(Case {
            padding: Some(0),
            ..case
        });
    }
    cases
}

/// Runs with a workspace of exactly what is asked for, after one byte less was refused.
fn run(ctx: &Context, mut params: Params<'_>) {
    embedding::backward::supported(ctx, &params).unwrap();
    let size = embedding::backward::workspace_size(ctx, &params).unwrap();
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
    if size > 0 {
        // SAFETY: refused for its size.
        params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size - 1) };
        let refused = embedding::backward(ctx, &params, Stream::DEFAULT);
        let small =
            matches!(refused, Err(Error::WorkspaceTooSmall { required, .. }) if required == size);
        assert!(small, "{refused:?}");
    }
    // SAFETY: as many bytes are the tensor's elements, which nothing else uses.
    params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
    embedding::backward(ctx, &params, Stream::DEFAULT).unwrap();
    memory.download_output();
}

fn check(ctx: &Context, dtype: DType, to: DType, ids: DType, case: &Case) {
    let rng = &mut rng();
    let dout = TestTensor::normal(rng, dtype, case.dout);
    let ids = TestTensor::integers(rng, ids, case.ids, case.used as i64);
    let to = if case.accumulate { DType::F32 } else { to };
    let before = match case.accumulate {
        true => TestTensor::normal(rng, to, case.dweight),
        false => TestTensor::poisoned(to, case.dweight),
    };
    let compute = || {
        let (dout, ids) = (dout.upload(ctx), ids.upload(ctx));
        let mut dweight = before.upload(ctx);
        let params = Params {
            vocabulary: None,
            dout: dout.view(),
            ids: ids.view(),
            dweight: dweight.view_mut(),
            padding_idx: case.padding,
            accumulate: case.accumulate,
            workspace: Workspace::none(),
        };
        run(ctx, params);
        dweight.download_output()
    };
    let got = compute();
    assert!(
        compute().bits() == got.bits(),
        "other bits from the same inputs"
    );
    let (dout, ids) = (dout.values(), ids.values());
    let before = match case.accumulate {
        true => before.values(),
        false => vec![0.0; case.dweight.num_elements()],
    };
    let magnitudes = |values: &[f64]| values.iter().map(|v| v.abs()).collect::<Vec<_>>();
    let expected = reference(&dout, &ids, case.padding, &before);
    let terms = reference(&magnitudes(&dout), &ids, case.padding, &magnitudes(&before));
    // As many roundings as the longest sum has, at worst; half of its logarithm is what is seen.
    let mut counts = vec![0usize; case.used];
    ids.iter().for_each(|id| counts[*id as usize] += 1);
    let most = counts.into_iter().max().unwrap_or(0) as f64;
    assert_close_of_sums(
        "dweight",
        to,
        &got.values(),
        &expected,
        &terms,
        1.0 + most.sqrt(),
    );
}

#[test]
fn agrees_with_its_definition() {
    for ctx in contexts() {
        for dtype in FLOATS {
            for to in FLOATS {
                for ids in [DType::I32, DType::I64] {
                    crate::common::for_each_case(&cases(), |case| {
                        check(&ctx, dtype, to, ids, case)
                    });
                }
            }
        }
    }
}

fn gradient(ctx: &Context, dout: &TestTensor, ids: &TestTensor, before: &TestTensor) -> TestTensor {
    let (dout, ids) = (dout.upload(ctx), ids.upload(ctx));
    let mut dweight = before.upload(ctx);
    let params = Params {
        vocabulary: None,
        dout: dout.view(),
        ids: ids.view(),
        dweight: dweight.view_mut(),
        padding_idx: None,
        accumulate: true,
        workspace: Workspace::none(),
    };
    run(ctx, params);
    dweight.download_output()
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let of_threads = [1, 2, 5].map(|num_threads| {
        let options = ContextOptions {
            num_threads,
            ..ContextOptions::default()
        };
        Context::new(&options).unwrap()
    });
    let rng = &mut rng();
    let dout = TestTensor::normal(rng, DType::Bf16, contiguous(&[3000, 700]));
    let ids = TestTensor::integers(rng, DType::I32, contiguous(&[3000]), 40);
    let before = TestTensor::normal(rng, DType::F32, contiguous(&[200, 700]));
    let [one, two, five] =
        (of_threads.each_ref()).map(|ctx| gradient(ctx, &dout, &ids, &before).bits());
    assert!(one == two && one == five);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// In the order of the ids, so two parts accumulated are the whole, to the bit.
    #[test]
    fn parts_add_up((tokens, vocab, dim) in (2usize..400, 1usize..300, 1usize..40)) {
        for ctx in contexts() {
            let rng = &mut rng();
            // Integers, of which sums are exact.
            let dout = TestTensor::integers(rng, DType::F32, contiguous(&[tokens, dim]), 9);
            let ids = TestTensor::integers(rng, DType::I64, contiguous(&[tokens]), vocab as i64);
            let zeros = TestTensor::of(DType::F32, &[vocab, dim], &vec![0.0; vocab * dim]);
            let whole = gradient(&ctx, &dout, &ids, &zeros);
            let cut = tokens / 3;
            let part = |from: usize, to: usize, before: &TestTensor| {
                let rows = &dout.values()[from * dim..to * dim];
                let dout = TestTensor::of(DType::F32, &[to - from, dim], rows);
                let ids = TestTensor::of(DType::I64, &[to - from], &ids.values()[from..to]);
                gradient(&ctx, &dout, &ids, before)
            };
            let first = part(0, cut, &zeros);
            prop_assert_eq!(part(cut, tokens, &first).values(), whole.values());
        }
    }
}

/// A host refuses them before anything is written; a device adds them to no row.
#[test]
fn ids_outside_add_to_no_row() {
    for ctx in contexts() {
        for (dtype, id) in [
            (DType::I32, 3.0),
            (DType::I32, -1.0),
            (DType::I64, 3.0),
            (DType::I64, -9e18),
            (DType::I64, 4294967296.0),
        ] {
            let ids = TestTensor::of(dtype, &[3], &[0.0, id, 2.0]).upload(&ctx);
            let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
            let dout = TestTensor::of(DType::F32, &[3, 2], &values).upload(&ctx);
            let before = TestTensor::poisoned(DType::F32, contiguous(&[3, 2]));
            let mut dweight = before.upload(&ctx);
            let mut params = Params {
                vocabulary: None,
                dout: dout.view(),
                ids: ids.view(),
                dweight: dweight.view_mut(),
                padding_idx: None,
                accumulate: false,
                workspace: Workspace::none(),
            };
            if ctx.backend() != unsloth::Backend::Cpu {
                run(&ctx, params);
                let got = dweight.download_output().values();
                assert_eq!(got, [1.0, 2.0, 0.0, 0.0, 5.0, 6.0]);
                continue;
            }
            params.workspace = Workspace::none();
            let error = embedding::backward(&ctx, &params, Stream::DEFAULT).unwrap_err();
            let message = format!(
                "embedding_backward: ids has {} at index 1, dweight has 3 rows",
                id as i64
            );
            assert_eq!(error.to_string(), message);
            assert!(dweight.download_output().bits() == before.bits());
        }
    }
}

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;

const MISUSE: &[Misuse<unsloth_embedding_backward_params>] = &[
    (
        |p| p.struct_size = 4,
        INVALID,
        "embedding_backward: struct_size is 4, at least 504 is needed",
    ),
    (
        |p| p.accumulate = 7,
        INVALID,
        "embedding_backward: accumulate is 7, allowed: 0, 1",
    ),
    (
        |p| p.has_padding_idx = 2,
        INVALID,
        "embedding_backward: has_padding_idx is 2, allowed: 0, 1",
    ),
    (
        |p| p.reserved = 1,
        INVALID,
        "embedding_backward: reserved is 1, allowed: 0",
    ),
    (
        |p| (p.has_padding_idx, p.padding_idx) = (1, -1),
        INVALID,
        "embedding_backward: padding_idx is -1, at least 0 is needed",
    ),
    (
        |p| (p.has_padding_idx, p.padding_idx) = (1, 5),
        INVALID,
        "embedding_backward: padding_idx is 5, dweight has 5 rows",
    ),
    (
        |p| p.dout = absent(),
        INVALID,
        "embedding_backward: dout is absent (rank 0), it is required",
    ),
    (
        |p| p.ids = absent(),
        INVALID,
        "embedding_backward: ids is absent (rank 0), it is required",
    ),
    (
        |p| p.dweight = absent(),
        INVALID,
        "embedding_backward: dweight is absent (rank 0), it is required",
    ),
    (
        |p| p.dweight.rank = 1,
        INVALID,
        "embedding_backward: dweight has rank 1, allowed: 2",
    ),
    (
        |p| p.dweight.dtype = DType::I64 as u32,
        INVALID,
        "embedding_backward: dweight has dtype i64, allowed: f32, f16, bf16",
    ),
    (
        |p| (p.accumulate, p.dweight.dtype) = (1, DType::Bf16 as u32),
        INVALID,
        "embedding_backward: dweight has dtype bf16, allowed: f32",
    ),
    (
        |p| p.ids.rank = 6,
        INVALID,
        "embedding_backward: ids has rank 6, allowed: 1, 2, 3, 4, 5",
    ),
    (
        |p| p.ids.dtype = DType::F32 as u32,
        INVALID,
        "embedding_backward: ids has dtype f32, allowed: i32, i64",
    ),
    (
        |p| p.dout.dtype = DType::I32 as u32,
        INVALID,
        "embedding_backward: dout has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |p| p.dout.shape[1] = 2,
        INVALID,
        "embedding_backward: dout has shape [4, 2], expected [4, 3]",
    ),
    (
        |p| p.dout.strides = [1, 4, 0, 0, 0, 0],
        INVALID,
        "embedding_backward: dout has stride 4 along its last dimension, allowed: 1",
    ),
    (
        |p| p.dweight.strides = [1, 5, 0, 0, 0, 0],
        INVALID,
        "embedding_backward: dweight has stride 5 along its last dimension, allowed: 1",
    ),
    (
        |p| p.dweight.strides = [2, 1, 0, 0, 0, 0],
        INVALID,
        "embedding_backward: dweight has shape [5, 3] with strides [2, 1]: elements of an output \
         may not overlap",
    ),
    (
        |p| p.dweight.data = p.dout.data,
        INVALID,
        "embedding_backward: dweight overlaps dout",
    ),
    (
        |p| p.dweight.data = p.ids.data,
        INVALID,
        "embedding_backward: dweight overlaps ids",
    ),
    (
        |p| p.dout.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "embedding_backward: data of dout is NULL",
    ),
    (
        |p| p.dweight.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "embedding_backward: data of dweight is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let memory = &memory;
        let dout = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[4, 3])).upload(memory);
        let ids = TestTensor::of(DType::I32, &[4], &[1.0, 4.0, 1.0, 0.0]).upload(memory);
        let dweight = TestTensor::poisoned(DType::F32, contiguous(&[5, 3])).upload(memory);
        // SAFETY: integers and pointers, size first.
        let mut good: unsloth_embedding_backward_params = unsafe { abi::zeroed_params() };
        (good.dout, good.ids, good.dweight) = (c_tensor(&dout), c_tensor(&ids), c_tensor(&dweight));
        // SAFETY: pointers to live locals.
        unsafe {
            unsloth_embedding_backward_workspace_size(ctx.0, &good, &mut good.workspace_size);
        }
        let words = contiguous(&[good.workspace_size.div_ceil(4)]);
        let workspace = TestTensor::poisoned(DType::F32, words).upload(memory);
        good.workspace = workspace.data();
        let operation = Operation {
            name: "embedding_backward",
            supported: unsloth_embedding_backward_supported,
            forward: unsloth_embedding_backward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&dweight]);
    }
}
