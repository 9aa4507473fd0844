//! Products of an input that passes a norm on its way: the bits of the norm and then the product.

use crate::common::guarded::AtEnd;
use crate::common::reference::blocks;
use crate::common::tensor::strided_rows;
use crate::common::workspace::poisoned_workspace;
use crate::common::{DeviceTensor, TestTensor, contexts, contiguous, for_each_case, rng};
use unsloth::ops::attention_block::{self, Projections};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rms_norm::{self, Norm};
use unsloth::ops::rope::Positions;
use unsloth::ops::swiglu::Activation;
use unsloth::{Context, DType, InOut, Layout, Stream, TensorRef, Workspace};

const EPSILON: f32 = 1e-5;
const OFFSET: f32 = 0.25;

#[derive(Clone, Copy, Debug)]
struct Case {
    x: DType,
    weight: DType,
    gains: DType,
    rows: usize,
    /// Columns of `x`, and of what it is multiplied to.
    sizes: (usize, usize),
    /// Elements between the end of a row of `x` and the next one.
    gap: usize,
}

enum Matrix {
    Floats(DeviceTensor),
    Blocks(AtEnd, DType, Layout),
}

impl Matrix {
    fn random(ctx: &Context, dtype: DType, rows: usize, columns: usize) -> Matrix {
        let rng = &mut rng();
        let layout = contiguous(&[rows, columns]);
        if dtype.is_float() {
            return Matrix::Floats(TestTensor::normal(rng, dtype, layout).upload(ctx));
        }
        let codes: Vec<u8> = (0..rows)
            .flat_map(|_| blocks::random(rng, dtype, columns))
            .collect();
        Matrix::Blocks(AtEnd::new(ctx, &codes), dtype, layout)
    }

    fn weights<'a>(&'a self, bias: Option<&'a DeviceTensor>) -> Weights<'a> {
        let weight = match self {
            Matrix::Floats(tensor) => tensor.view(),
            Matrix::Blocks(memory, dtype, layout) => memory.view(*dtype, *layout),
        };
        Weights {
            weight,
            bias: bias.map(DeviceTensor::view),
        }
    }
}

/// An input, its norm, and what that gives by itself.
struct Input {
    x: DeviceTensor,
    gains: DeviceTensor,
    normalised: DeviceTensor,
}

impl Input {
    fn new(ctx: &Context, case: &Case) -> Input {
        let shape = [case.rows, case.sizes.0];
        let x = TestTensor::normal(&mut rng(), case.x, strided_rows(&shape, case.gap)).upload(ctx);
        let gains = contiguous(&[case.sizes.0]);
        let gains = TestTensor::normal(&mut rng(), case.gains, gains).upload(ctx);
        let mut normalised = TestTensor::poisoned(case.x, contiguous(&shape)).upload(ctx);
        let norm = rms_norm::Params {
            x: InOut::Apart {
                input: x.view(),
                output: normalised.view_mut(),
            },
            residual: None,
            weight: Some(gains.view()),
            weight_offset: OFFSET,
            epsilon: EPSILON,
        };
        rms_norm::forward(ctx, &norm, Stream::DEFAULT).unwrap();
        Input {
            x,
            gains,
            normalised,
        }
    }

    fn norm(&self) -> Norm<'_> {
        Norm {
            weight: self.gains.view(),
            weight_offset: OFFSET,
            epsilon: EPSILON,
        }
    }

    /// What `run` gives of `x` and its norm, and of what is normalised; both have the same bits.
    fn check(
        &self,
        case: &Case,
        ctx: &Context,
        columns: usize,
        run: impl Fn(TensorRef<'_>, Option<Norm<'_>>, &mut DeviceTensor),
    ) {
        let [got, expected] = [true, false].map(|fused| {
            let layout = contiguous(&[case.rows, columns]);
            let mut out = TestTensor::poisoned(case.x, layout).upload(ctx);
            match fused {
                true => run(self.x.view(), Some(self.norm()), &mut out),
                false => run(self.normalised.view(), None, &mut out),
            }
            out.download_output()
        });
        // Of f16 an activated intermediate of long rows is too great.
        let finite = expected.values().iter().all(|y| y.is_finite());
        assert!(finite || case.x == DType::F16, "{case:?}");
        assert!(got.bits() == expected.bits(), "{case:?}");
    }
}

fn cases() -> Vec<Case> {
    let floats = [
        (DType::Bf16, DType::Bf16, DType::F32),
        (DType::Bf16, DType::Bf16, DType::Bf16),
        (DType::F16, DType::F16, DType::F32),
        (DType::F32, DType::F32, DType::F32),
        (DType::F32, DType::Bf16, DType::Bf16),
        (DType::Bf16, DType::Bf16, DType::F16),
    ];
    let in_blocks = [DType::Q8_0, DType::Q4_0, DType::Q4K, DType::Q6K];
    let in_blocks = in_blocks.map(|weight| (DType::Bf16, weight, DType::F32));
    let others = [
        (DType::F16, DType::Q4_0, DType::F16),
        (DType::F32, DType::Q8_0, DType::F32),
    ];
    let mut cases = Vec::new();
    for (x, weight, gains) in floats.into_iter().chain(in_blocks).chain(others) {
        // Gaps that leave rows aligned, and one that does not.
        for (rows, sizes, gap) in [
            (1, (768, 40), 0),
            (3, (256, 150), 8),
            (4, (512, 33), 0),
            (8, (768, 24), 8),
            (9, (256, 40), 0),
            (2, (512, 24), 1),
            // More than 16 parts of 32 vectors.
            (1, (4864, 24), 0),
            (1, (4608, 48), 0),
        ] {
            cases.push(Case {
                x,
                weight,
                gains,
                rows,
                sizes,
                gap,
            });
        }
    }
    // One row by blocks that are no whole lines of a row, nor whole steps; more than 16 parts, the last one shorter.
    for (i, weight) in [DType::Q8_0, DType::Q4_0, DType::Q4_1, DType::Q5_0]
        .into_iter()
        .enumerate()
    {
        for sizes in [(576, 48), (4672, 48), (1120, 2112)] {
            cases.push(Case {
                x: [DType::Bf16, DType::F16][i % 2],
                weight,
                gains: DType::F32,
                rows: 1,
                sizes,
                gap: 0,
            });
        }
    }
    // As large as a GPU's kernels for few rows of 16 bits want it: also of rows that are no whole units, and no whole vectors.
    for (i, (rows, sizes, gap)) in [
        (1, (768, 1400), 0),
        (3, (1000, 1051), 8),
        (4, (4864, 218), 0),
        (1, (9000, 117), 0),
        (2, (1444, 729), 0),
        (2, (1032, 1030), 1),
        (5, (512, 2050), 0),
        // So many columns that a block of such a kernel has several tiles.
        (3, (136, 8461), 0),
        (8, (520, 8450), 8),
        // More rows than they take, and rows too long for as many.
        (9, (512, 2050), 0),
        (8, (8192, 136), 0),
    ]
    .into_iter()
    .enumerate()
    {
        let (x, weight, gains) = floats[i % 3];
        cases.push(Case {
            x,
            weight,
            gains,
            rows,
            sizes,
            gap,
        });
    }
    cases
}

#[test]
fn linear_is_the_norm_and_the_product() {
    for ctx in contexts() {
        for_each_case(&cases(), |case| {
            let input = Input::new(&ctx, case);
            let (columns, rows) = case.sizes;
            let weight = Matrix::random(&ctx, case.weight, rows, columns);
            let bias = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[rows])).upload(&ctx);
            input.check(case, &ctx, rows, |x, x_norm, out| {
                let mut params = linear::Params {
                    x,
                    x_norm,
                    weights: weight.weights(Some(&bias)),
                    output: Output::Write(out.view_mut()),
                    workspace: Workspace::none(),
                    parallel: None,
                };
                linear::supported(&ctx, &params).unwrap();
                let size = linear::workspace_size(&ctx, &params).unwrap();
                let mut workspace = poisoned_workspace(&ctx, size);
                params.workspace = workspace.workspace();
                linear::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            });
        });
    }
}

#[test]
fn mlp_is_the_norm_and_the_block() {
    for ctx in contexts() {
        for_each_case(&cases(), |case| {
            let input = Input::new(&ctx, case);
            let hidden = case.sizes.0;
            // A multiple of every block's length.
            let intermediate = if case.weight.is_float() {
                case.sizes.1
            } else {
                256
            };
            let [gate, up] =
                [0, 1].map(|_| Matrix::random(&ctx, case.weight, intermediate, hidden));
            let down = Matrix::random(&ctx, case.weight, 24, intermediate);
            let bias = contiguous(&[intermediate]);
            let bias = TestTensor::normal(&mut rng(), case.gains, bias).upload(&ctx);
            input.check(case, &ctx, 24, |x, x_norm, out| {
                let mut params = mlp::Params {
                    x,
                    x_norm,
                    gate_up: GateUp::Apart {
                        gate: gate.weights(Some(&bias)),
                        up: up.weights(None),
                    },
                    activation: Activation::Silu,
                    intermediate_norm: None,
                    down: down.weights(None),
                    output: Output::Write(out.view_mut()),
                    workspace: Workspace::none(),
                    gate_up_out: None,
                    parallel: None,
                };
                mlp::supported(&ctx, &params).unwrap();
                let size = mlp::workspace_size(&ctx, &params).unwrap();
                let mut workspace = poisoned_workspace(&ctx, size);
                params.workspace = workspace.workspace();
                mlp::forward(&ctx, &params, Stream::DEFAULT).unwrap();
            });
        });
    }
}

#[test]
fn attention_block_is_the_norm_and_the_block() {
    let (heads, dim) = (2, 32);
    for ctx in contexts() {
        for_each_case(&cases(), |case| {
            let input = Input::new(&ctx, case);
            let hidden = case.sizes.0;
            let out_features = heads * dim;
            let matrices = [3 * out_features, out_features, out_features, out_features]
                .map(|rows| Matrix::random(&ctx, case.weight, rows, hidden));
            let dtype = if case.weight.is_float() {
                case.weight
            } else {
                DType::F32
            };
            let out_weight = Matrix::random(&ctx, dtype, 24, out_features);
            let [qkv, q, k, v] = matrices.each_ref().map(|matrix| matrix.weights(None));
            for projections in [Projections::Packed(qkv), Projections::Apart { q, k, v }] {
                input.check(case, &ctx, 24, |x, x_norm, out| {
                    let mut params = attention_block::Params {
                        x,
                        x_norm: x_norm.map(|norm| norm.weight),
                        num_heads: heads,
                        num_kv_heads: heads,
                        head_dim: dim,
                        v_head_dim: dim,
                        projections,
                        q_norm: None,
                        k_norm: None,
                        norm_weight_offset: OFFSET,
                        norm_epsilon: EPSILON,
                        rotation: None,
                        positions: Positions::From(0),
                        cache: None,
                        cu_seqlens: None,
                        max_seqlen: 0,
                        scale: 0.0,
                        softcap: 0.0,
                        bidirectional: false,
                        window: 0,
                        alibi_slopes: None,
                        sinks: None,
                        attended_norm: None,
                        out_projection: out_weight.weights(None),
                        output: Output::Write(out.view_mut()),
                        workspace: Workspace::none(),
                        qkv_out: None,
                        attended_out: None,
                        lse_out: None,
                        parallel: None,
                    };
                    attention_block::supported(&ctx, &params).unwrap();
                    let size = attention_block::workspace_size(&ctx, &params).unwrap();
                    let mut workspace = poisoned_workspace(&ctx, size);
                    params.workspace = workspace.workspace();
                    attention_block::forward(&ctx, &params, Stream::DEFAULT).unwrap();
                });
            }
        });
    }
}
