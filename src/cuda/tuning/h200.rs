//! An H200. `python3 benches/tuning.py write` made this from, in `benches/results`,
//! `tuning_h200_2026-11-22.json`, `rings_h200_2026-11-24.json`, `norm_groups_or_ring_h200_2026-11-26.json`, `attention_decode_fetch_h200_2026-11-26.json`.

use super::linear::{Linear, Server::*, Shape};
use super::rules::F32;
use super::{Argmax, Decoding, Fetch, Hopper, Mlp, NormBackward, Refill, Tuning};

pub(super) const TUNING: Tuning = Tuning {
    argmax: Argmax {
        thin_blocks: 0,
        full_blocks: 528,
    },
    linear: Linear {
        halves: HALVES,
        f32: F32,
    },
    mlp: Mlp {
        tokens: 4096,
        asked_tokens: 2048,
        tokens_by_kernels: 96,
    },
    hopper: Hopper {
        short: &[(64, 1024)],
        together: &[(64, 4, 16)],
        decoding: &[Decoding {
            head_dims: (65, 128),
            ragged: false,
            tiles: 256,
            keys: 512,
        }],
        decoding_fetch: Fetch::Bytes128,
    },
    norm_backward: NormBackward {
        group_bytes: 96 << 20,
        rms_norm: (3, Refill::AfterSums),
        rms_norm_full: (2, Refill::BeforeSums),
        rms_norm_single_bytes: 128 << 10,
        layer_norm: (2, Refill::BeforeSums),
        layer_norm_single: (2, Refill::AtOnce),
    },
};

const HALVES: &[Shape] = &[
    Shape {
        columns: 576,
        in_features: 576,
        alone: &[(16, Own), (usize::MAX, Library)],
        with: &[(16, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 576,
        in_features: 1536,
        alone: &[(16, Own), (usize::MAX, Library)],
        with: &[(16, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 1024,
        in_features: 4096,
        alone: &[(16, Own), (usize::MAX, Library)],
        with: &[(16, Own), (usize::MAX, Workspace)],
    },
    Shape {
        columns: 1024,
        in_features: 8192,
        alone: &[(16, Own), (usize::MAX, Library)],
        with: &[(8, Own), (usize::MAX, Workspace)],
    },
    Shape {
        columns: 1536,
        in_features: 576,
        alone: &[(16, Own), (usize::MAX, Library)],
        with: &[(16, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 2048,
        in_features: 2048,
        alone: &[
            (16, Own),
            (48, Library),
            (128, Cluster(5)),
            (usize::MAX, Library),
        ],
        with: &[
            (16, Own),
            (48, Library),
            (128, Cluster(5)),
            (usize::MAX, Library),
        ],
    },
    Shape {
        columns: 2048,
        in_features: 8192,
        alone: &[(16, Own), (usize::MAX, Library)],
        with: &[(16, Own), (96, Workspace), (usize::MAX, Library)],
    },
    Shape {
        columns: 3072,
        in_features: 2048,
        alone: &[(8, Own), (usize::MAX, Library)],
        with: &[(8, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 4096,
        in_features: 4096,
        alone: &[
            (8, Own),
            (96, Library),
            (128, Cluster(7)),
            (usize::MAX, Library),
        ],
        with: &[
            (8, Own),
            (96, Library),
            (128, Cluster(7)),
            (usize::MAX, Library),
        ],
    },
    Shape {
        columns: 4096,
        in_features: 14336,
        alone: &[
            (8, Own),
            (96, Library),
            (128, Cluster(7)),
            (usize::MAX, Library),
        ],
        with: &[
            (8, Own),
            (96, Library),
            (128, Cluster(7)),
            (usize::MAX, Library),
        ],
    },
    Shape {
        columns: 6144,
        in_features: 4096,
        alone: &[(8, Own), (usize::MAX, Library)],
        with: &[(8, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 8192,
        in_features: 2048,
        alone: &[(8, Own), (usize::MAX, Library)],
        with: &[(8, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 8192,
        in_features: 8192,
        alone: &[(8, Own), (usize::MAX, Library)],
        with: &[(8, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 14336,
        in_features: 4096,
        alone: &[(8, Own), (usize::MAX, Library)],
        with: &[(8, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 28672,
        in_features: 4096,
        alone: &[(2, Own), (usize::MAX, Library)],
        with: &[(2, Own), (usize::MAX, Library)],
    },
    Shape {
        columns: 49152,
        in_features: 576,
        alone: &[(usize::MAX, Library)],
        with: &[(usize::MAX, Library)],
    },
];
