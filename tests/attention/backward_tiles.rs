//! Gradients of attention by kernels on tensor cores: at the edges of their tiles, and their several forms.

use super::backward::run_table;
use crate::common::attention::{Case, KeyForm, QueryForm};
use unsloth::DType;

/// Shapes whose gradients take the kernels on tensor cores where there are some: several blocks of
/// queries and keys, groups of heads, and every feature that these kernels have.
#[test]
fn tensor_core_shapes() {
    let mut cases = Vec::new();
    for dim in [64, 128, 256] {
        let base = Case {
            lens: vec![(70, 90)],
            heads: 2,
            kv_heads: 1,
            dim,
            dim_v: dim,
            ..Case::default()
        };
        cases.push(base.clone());
        cases.push(Case {
            causal: true,
            dim_v: 64,
            ..base.clone()
        });
        cases.push(Case {
            lens: vec![(66, 70), (1, 80), (20, 20), (0, 9), (65, 0)],
            queries: QueryForm::Packed,
            keys: KeyForm::Packed,
            causal: true,
            window_left: Some(50),
            sinks: true,
            ..base.clone()
        });
        cases.push(Case {
            lens: vec![(20, 66), (20, 33), (20, 0)],
            keys: KeyForm::Padded,
            bias: Some((DType::Bf16, [true, false, false, false])),
            mask: Some([false, true, false, false]),
            alibi: Some(true),
            softcap: Some(4.0),
            ..base
        });
    }
    run_table(&cases);
}

/// Lengths on both sides of a tile's edge, and blocks of keys in several heads' walks over queries;
/// with everything that scores may have on tensor cores.
#[test]
fn tile_edges() {
    let mut cases = Vec::new();
    for dim in [64, 128, 192, 256] {
        let base = Case {
            lens: vec![(128, 65), (63, 64)],
            heads: 2,
            kv_heads: 1,
            dim,
            dim_v: dim,
            queries: QueryForm::Packed,
            keys: KeyForm::Packed,
            sinks: true,
            ..Case::default()
        };
        cases.push(base.clone());
        cases.push(Case {
            lens: vec![(130, 129), (1, 65), (0, 5), (3, 0)],
            causal: true,
            softcap: Some(4.0),
            ..base.clone()
        });
        cases.push(Case {
            lens: vec![(140, 130)],
            queries: QueryForm::Batched,
            keys: KeyForm::Batched,
            dim: dim - 8,
            dim_v: dim - 8,
            softcap: Some(3.0),
            alibi: Some(true),
            window_left: Some(40),
            window_right: Some(30),
            ..base.clone()
        });
        cases.push(Case {
            lens: vec![(60, 70); 2],
            queries: QueryForm::Batched,
            keys: KeyForm::Batched,
            alibi: Some(false),
            ..base
        });
    }
    run_table(&cases);
}

/// Queries that see many keys of wide heads: on Hopper pairs of blocks of threads exchange what they have.
#[test]
fn many_keys_of_wide_heads() {
    let base = Case {
        lens: vec![(66, 810)],
        heads: 2,
        kv_heads: 1,
        dim: 256,
        dim_v: 256,
        ..Case::default()
    };
    let packed = Case {
        queries: QueryForm::Packed,
        keys: KeyForm::Packed,
        ..base.clone()
    };
    run_table(&[
        base.clone(),
        Case {
            lens: vec![(40, 833), (1, 80), (0, 9), (65, 0), (30, 130), (64, 192)],
            sinks: true,
            dim: 200,
            dim_v: 200,
            ..packed.clone()
        },
        Case {
            lens: vec![(40, 1601), (40, 63), (65, 65)],
            causal: true,
            dim_v: 128,
            ..packed.clone()
        },
        Case {
            lens: vec![(65, 1100)],
            window_left: Some(900),
            window_right: Some(300),
            ..base
        },
        Case {
            lens: vec![(20, 1200), (65, 129)],
            causal: true,
            window_left: Some(1100),
            dim: 224,
            dim_v: 248,
            ..packed
        },
    ]);
}

/// Likewise of 192 dimensions, with values as wide.
#[test]
fn many_keys_of_heads_of_192() {
    many_keys_of_192(192);
}

/// And less wide.
#[test]
fn many_keys_of_192_and_values_of_128() {
    many_keys_of_192(128);
}

fn many_keys_of_192(dim_v: usize) {
    let base = Case {
        lens: vec![(66, 1210)],
        heads: 2,
        kv_heads: 1,
        dim: 192,
        dim_v,
        ..Case::default()
    };
    let packed = Case {
        queries: QueryForm::Packed,
        keys: KeyForm::Packed,
        ..base.clone()
    };
    run_table(&[
        base.clone(),
        // Three steps and more, whose dS takes buffers by turns.
        Case {
            lens: vec![(200, 1203), (1, 80), (0, 9), (65, 0), (30, 130), (64, 192)],
            sinks: true,
            heads: 4,
            kv_heads: 2,
            dim: dim_v + 8 * usize::from(dim_v == 128),
            dim_v: dim_v - 16,
            ..packed.clone()
        },
        Case {
            lens: vec![(40, 2401), (40, 63), (65, 65)],
            causal: true,
            ..packed.clone()
        },
        Case {
            lens: vec![(65, 1650)],
            window_left: Some(1300),
            window_right: Some(300),
            ..base
        },
        Case {
            lens: vec![(20, 3300), (65, 129)],
            causal: true,
            window_left: Some(1600),
            ..packed
        },
    ]);
}

/// Dimensions of values that are not those of keys, and dimensions between those that kernels are made for.
#[test]
fn dims_between_tiles() {
    let dims = [
        (192, 128),
        (96, 96),
        (80, 80),
        (128, 64),
        (64, 128),
        (40, 24),
        (136, 8),
        (256, 128),
        (72, 200),
    ];
    let mut cases = Vec::new();
    for (dim, dim_v) in dims {
        let base = Case {
            lens: vec![(70, 130)],
            heads: 4,
            kv_heads: 2,
            dim,
            dim_v,
            ..Case::default()
        };
        cases.push(Case {
            causal: true,
            ..base.clone()
        });
        cases.push(Case {
            lens: vec![(66, 70), (1, 80), (0, 9), (65, 0), (129, 130)],
            queries: QueryForm::Packed,
            keys: KeyForm::Packed,
            window_left: Some(50),
            sinks: true,
            ..base.clone()
        });
        cases.push(Case {
            softcap: Some(3.0),
            alibi: Some(true),
            causal: true,
            ..base
        });
    }
    run_table(&cases);
}
