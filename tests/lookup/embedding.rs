//! Embedding against its definition: shapes, layouts, dtypes.

use crate::common::guarded::AtEnd;
use crate::common::reference::blocks;
use crate::common::tensor::{round_to, strided_rows, transposed};
use crate::common::{FLOATS, TestTensor, contexts, rng};
use unsloth::ops::embedding::{self, Params};
use unsloth::{Context, DType, Error, Layout, Stream, Workspace};

#[derive(Clone, Debug)]
struct Case {
    ids: Layout,
    table: Layout,
    out: Layout,
}

fn cases() -> Vec<Case> {
    let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
    let case = |ids: &[usize], table: &[usize]| {
        let mut out = ids.to_vec();
        out.push(table[1]);
        Case {
            ids: contiguous(ids),
            table: contiguous(table),
            out: contiguous(&out),
        }
    };
    let base = case(&[3, 4], &[10, 17]);
    vec![
        case(&[1], &[1, 1]),
        case(&[7], &[5, 3]),
        case(&[0], &[5, 3]),
        case(&[4], &[5, 0]),
        case(&[2, 3, 1, 2, 2], &[9, 8]),
        case(&[300], &[50, 1030]),
        base.clone(),
        Case {
            ids: Layout::strided(&[3, 4], &[0, 2]).unwrap(),
            ..base.clone()
        },
        Case {
            ids: transposed(&[3, 4], 0, 1),
            ..base.clone()
        },
        Case {
            table: strided_rows(&[10, 17], 4),
            ..base.clone()
        },
        Case {
            out: strided_rows(&[3, 4, 17], 1),
            ..base.clone()
        },
        Case {
            out: transposed(&[3, 4, 17], 0, 1),
            ..base
        },
    ]
}

fn check(ctx: &Context, from: DType, to: DType, ids: DType, case: &Case) {
    let rng = &mut rng();
    let table = TestTensor::normal(rng, from, case.table);
    let ids = TestTensor::integers(rng, ids, case.ids, case.table.dim(0) as i64);
    let mut out = TestTensor::poisoned(to, case.out).upload(ctx);
    let (table_device, ids_device) = (table.upload(ctx), ids.upload(ctx));
    let params = Params {
        vocabulary: None,
        workspace: Workspace::none(),
        table: table_device.view(),
        ids: ids_device.view(),
        out: out.view_mut(),
    };
    embedding::supported(ctx, &params).unwrap();
    embedding::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let dim = case.table.dim(1);
    let values = table.values();
    let row = |id: &f64| &values[*id as usize * dim..][..dim];
    let expected: Vec<f64> = ids
        .values()
        .iter()
        .flat_map(row)
        .map(|x| round_to(to, *x))
        .collect();
    assert!(out.download_output().values() == expected, "rows differ");
}

#[test]
fn gathers_rows() {
    for ctx in contexts() {
        for from in FLOATS {
            for to in FLOATS {
                for ids in [DType::I32, DType::I64] {
                    crate::common::for_each_case(&cases(), |case| check(&ctx, from, to, ids, case));
                }
            }
        }
    }
}

#[test]
fn special_values_survive() {
    let values = [
        f64::INFINITY,
        f64::NEG_INFINITY,
        -0.0,
        f64::NAN,
        6e-8,
        65504.0,
    ];
    for ctx in contexts() {
        for dtype in FLOATS {
            let table = TestTensor::of(dtype, &[1, 6], &values);
            let device = table.upload(&ctx);
            let ids = TestTensor::of(DType::I32, &[1], &[0.0]).upload(&ctx);
            let mut out = TestTensor::poisoned(dtype, table.layout).upload(&ctx);
            let params = Params {
                vocabulary: None,
                workspace: Workspace::none(),
                table: device.view(),
                ids: ids.view(),
                out: out.view_mut(),
            };
            embedding::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            assert_eq!(out.download_output().bits(), table.bits());
        }
    }
}

#[test]
fn ids_outside_are_refused_before_anything_is_written() {
    let ctx = Context::cpu().unwrap();
    let table = TestTensor::of(DType::F32, &[3, 2], &[1.0; 6]).upload(&ctx);
    for (dtype, id) in [
        (DType::I32, 3.0),
        (DType::I32, -1.0),
        (DType::I64, 3.0),
        (DType::I64, -9e18),
        (DType::I64, 4294967296.0),
    ] {
        let ids = TestTensor::of(dtype, &[2], &[0.0, id]).upload(&ctx);
        let mut out = TestTensor::poisoned(DType::F32, table.layout.narrowed(0, 0, 2).unwrap().0);
        let before = out.bits();
        let mut device = out.upload(&ctx);
        let params = Params {
            vocabulary: None,
            workspace: Workspace::none(),
            table: table.view(),
            ids: ids.view(),
            out: device.view_mut(),
        };
        let error = embedding::forward(&ctx, &params, Stream::DEFAULT).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument { .. }));
        let message = format!(
            "embedding: ids has {} at index 1, the table has 3 rows",
            id as i64
        );
        assert_eq!(error.to_string(), message);
        out = device.download_output();
        assert_eq!(out.bits(), before);
    }
}

/// The exact value of each element, rounded once; to 16 bits from f32. The last row ends where memory
/// does.
#[test]
fn rows_in_blocks_are_decoded() {
    let rng = &mut rng();
    let all = contexts();
    let formats = |ctx| DType::BLOCKS.map(move |f| (ctx, f));
    for (ctx, format) in all.iter().flat_map(formats) {
        let (len, bytes) = format.block();
        for (rows, columns) in [(3, len), (5, 9 * 256)] {
            let table = blocks::random(rng, format, rows * columns);
            let values = blocks::decode(format, &table);
            // An odd distance from where memory ends, and the end itself.
            for skew in [1, 0] {
                let memory = AtEnd::new(ctx, &[&table[..], &[0; 1][..skew]].concat());
                let ids: Vec<f64> = (0..2 * rows).map(|i| (i % rows) as f64).collect();
                let device = TestTensor::of(DType::I32, &[2 * rows], &ids).upload(ctx);
                for to in FLOATS {
                    let layout = Layout::contiguous(&[2 * rows, columns]).unwrap();
                    let mut out = TestTensor::poisoned(to, layout).upload(ctx);
                    let params = Params {
                        vocabulary: None,
                        workspace: Workspace::none(),
                        table: memory.view(format, Layout::contiguous(&[rows, columns]).unwrap()),
                        ids: device.view(),
                        out: out.view_mut(),
                    };
                    embedding::supported(ctx, &params).unwrap();
                    embedding::forward(ctx, &params, Stream::DEFAULT).unwrap();
                    let once = |x: &f64| round_to(to, f64::from(*x as f32));
                    let expected: Vec<f64> = values.iter().chain(&values).map(once).collect();
                    let same = out.download_output().values() == expected;
                    assert!(same, "{format} to {to}, {columns} of {bytes} bytes");
                }
            }
        }
    }
}
