//! A decoder layer whose blocks ranks divide, against that of one rank, under policies of checkpointing.

use unsloth::ops::attention_block;
use unsloth::ops::decoder_layer::{self, Checkpointing, backward};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::parallel::Parallel;
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::ops::swiglu::Activation;
use unsloth::{Buffer, Context, DType, InOut, Stream, Workspace};

use super::{Rows, assert_same, columns, divided, greatest, poisoned, rows, unbound};
use crate::common::workspace::poisoned_workspace;
use crate::common::{DeviceTensor, TestTensor, contiguous, rng};
use crate::group::{ranks, sizes};

const KV_HEADS: usize = 8;
const GROUP: usize = 2;
const DIM: usize = 4;
const HIDDEN: usize = 20;
const INTERMEDIATE: usize = 29;

/// A layer's matrices: queries, keys, values, attention's output, gate, up and down. Of the first, and of
/// gate and up, ranks have rows, of the others columns.
const MATRICES: [(usize, usize); 7] = [
    (KV_HEADS * GROUP * DIM, HIDDEN),
    (KV_HEADS * DIM, HIDDEN),
    (KV_HEADS * DIM, HIDDEN),
    (HIDDEN, KV_HEADS * GROUP * DIM),
    (INTERMEDIATE, HIDDEN),
    (INTERMEDIATE, HIDDEN),
    (HIDDEN, INTERMEDIATE),
];

struct Tensors {
    x: TestTensor,
    dout: TestTensor,
    matrices: Vec<TestTensor>,
    /// Before attention and before the MLP.
    norms: [TestTensor; 2],
}

impl Tensors {
    fn new(dtype: DType, tokens: usize) -> Tensors {
        let rng = &mut rng();
        let mut normal = |shape: &[usize], scale: f64| {
            let normal = TestTensor::normal(rng, DType::F32, contiguous(shape)).values();
            let values: Vec<f64> = normal.iter().map(|v| v * scale).collect();
            TestTensor::of(dtype, shape, &values)
        };
        Tensors {
            x: normal(&[tokens, HIDDEN], 1.0),
            dout: normal(&[tokens, HIDDEN], 1.0),
            matrices: MATRICES
                .iter()
                .map(|(n, k)| normal(&[*n, *k], 0.2))
                .collect(),
            norms: [normal(&[HIDDEN], 1.0), normal(&[HIDDEN], 1.0)],
        }
    }

    /// A rank's part of a matrix, or of its gradient.
    fn part(i: usize, of: &TestTensor, size: usize, rank: usize) -> TestTensor {
        let kv = divided(KV_HEADS, size, rank);
        let times = |n: usize| kv.start * n..kv.end * n;
        match i {
            0 => rows(of, times(GROUP * DIM)),
            1 | 2 => rows(of, times(DIM)),
            3 => columns(of, times(GROUP * DIM)),
            4 | 5 => rows(of, divided(INTERMEDIATE, size, rank)),
            _ => columns(of, divided(INTERMEDIATE, size, rank)),
        }
    }
}

/// A rank's layer.
struct Layer {
    x: DeviceTensor,
    matrices: Vec<DeviceTensor>,
    norms: [DeviceTensor; 2],
    kv_heads: usize,
}

impl Layer {
    fn new(ctx: &Context, t: &Tensors, own: &Rows, (size, rank): (usize, usize)) -> Layer {
        let matrices = t.matrices.iter().enumerate();
        Layer {
            x: rows(&t.x, own.of(rank)).upload(ctx),
            matrices: matrices
                .map(|(i, of)| Tensors::part(i, of, size, rank).upload(ctx))
                .collect(),
            norms: t.norms.each_ref().map(|norm| norm.upload(ctx)),
            kv_heads: divided(KV_HEADS, size, rank).len(),
        }
    }

    fn params<'a>(
        &'a self,
        out: &mut DeviceTensor,
        checkpointing: Checkpointing,
        parallel: Option<Parallel<'a>>,
        [saved, workspace]: [Workspace<'a>; 2],
    ) -> decoder_layer::Params<'a> {
        let weights = |i: usize| Weights {
            weight: self.matrices[i].view(),
            bias: None,
        };
        decoder_layer::Params {
            x: self.x.view(),
            attention_norm: self.norms[0].view(),
            mlp_norm: self.norms[1].view(),
            norm_weight_offset: 0.0,
            norm_epsilon: 1e-5,
            attention: attention_block::Params {
                x_norm: None,
                x: self.x.view(),
                num_heads: self.kv_heads * GROUP,
                num_kv_heads: self.kv_heads,
                head_dim: DIM,
                v_head_dim: DIM,
                projections: attention_block::Projections::Apart {
                    q: weights(0),
                    k: weights(1),
                    v: weights(2),
                },
                q_norm: None,
                k_norm: None,
                norm_weight_offset: 0.0,
                norm_epsilon: 1e-5,
                rotation: Some(Rotation::default()),
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
                out_projection: weights(3),
                output: Output::none(),
                workspace: Workspace::none(),
                qkv_out: None,
                attended_out: None,
                lse_out: None,
                parallel,
            },
            mlp: mlp::Params {
                x_norm: None,
                x: self.x.view(),
                gate_up: GateUp::Apart {
                    gate: weights(4),
                    up: weights(5),
                },
                activation: Activation::Silu,
                intermediate_norm: None,
                down: weights(6),
                output: Output::none(),
                workspace: Workspace::none(),
                gate_up_out: None,
                parallel,
            },
            checkpointing,
            // SAFETY: it lives, and nothing else uses it, while a call with these runs.
            out: unsafe { unbound(out) },
            saved,
            workspace,
        }
    }

    /// The output, the gradient of the input, those of the norms, and those of the matrices.
    fn run(
        &self,
        ctx: &Context,
        dout: &TestTensor,
        checkpointing: Checkpointing,
        parallel: Option<Parallel<'_>>,
    ) -> Vec<TestTensor> {
        let dtype = dout.dtype;
        let mut out = poisoned(dtype, dout.layout.shape()).upload(ctx);
        let none = || [Workspace::none(), Workspace::none()];
        let asked = self.params(&mut out, checkpointing, parallel, none());
        let size = decoder_layer::saved_size(ctx, &asked).unwrap();
        let mut saved = poisoned_workspace(ctx, size);
        let size = decoder_layer::workspace_size(ctx, &asked).unwrap();
        let mut memory = poisoned_workspace(ctx, size);
        let lent = [saved.workspace(), memory.workspace()];
        let params = self.params(&mut out, checkpointing, parallel, lent);
        decoder_layer::forward(ctx, &params, Stream::DEFAULT).unwrap();

        // `dx` may take the place of `dout`.
        let in_place = checkpointing == Checkpointing::Full;
        let mut dout = dout.upload(ctx);
        let mut dx = poisoned(dtype, dout.view().shape()).upload(ctx);
        let like = |t: &DeviceTensor| poisoned(DType::F32, t.view().shape()).upload(ctx);
        let mut norms = self.norms.each_ref().map(like);
        let mut matrices: Vec<_> = self.matrices.iter().map(like).collect();
        let mut params = |saved, memory: Option<&mut Buffer>| {
            // SAFETY: described once for each call, and alive while it runs.
            let mut all = matrices.iter_mut().map(|t| Some(unsafe { unbound(t) }));
            let mut attention = attention_block::backward::Gradients::default();
            let mut of_mlp = mlp::backward::Gradients::default();
            attention.dq_weight = all.next().unwrap();
            attention.dk_weight = all.next().unwrap();
            attention.dv_weight = all.next().unwrap();
            attention.dout_weight = all.next().unwrap();
            of_mlp.dgate_weight = all.next().unwrap();
            of_mlp.dup_weight = all.next().unwrap();
            of_mlp.ddown_weight = all.next().unwrap();
            let [attention_norm, mlp_norm] = &mut norms;
            let forward = self.params(
                &mut out,
                checkpointing,
                parallel,
                [saved, Workspace::none()],
            );
            // SAFETY: as above.
            let (dx, dattention_norm, dmlp_norm) =
                unsafe { (unbound(&mut dx), unbound(attention_norm), unbound(mlp_norm)) };
            let asks = memory.is_none();
            let params = backward::Params {
                forward,
                dout: match in_place {
                    // SAFETY: as above.
                    true => InOut::InPlace(unsafe { unbound(&mut dout) }),
                    false => InOut::Apart {
                        input: dout.view(),
                        output: dx,
                    },
                },
                dattention_norm: Some(dattention_norm),
                dmlp_norm: Some(dmlp_norm),
                attention,
                mlp: of_mlp,
                accumulate: false,
                deterministic: true,
                workspace: match memory {
                    None => Workspace::none(),
                    Some(memory) => memory.workspace(),
                },
            };
            match asks {
                true => decoder_layer::backward::workspace_size(ctx, &params),
                false => decoder_layer::backward(ctx, &params, Stream::DEFAULT).map(|()| 0),
            }
        };
        let size = params(Workspace::none(), None).unwrap();
        let mut memory = poisoned_workspace(ctx, size);
        params(saved.workspace(), Some(&mut memory)).unwrap();
        let dx = if in_place { dout } else { dx };
        let mut all = vec![out.download_output(), dx.download_output()];
        all.extend(norms.map(|t| t.download_output()));
        all.extend(matrices.into_iter().map(|t| t.download_output()));
        all
    }
}

/// Errors of f32 on their way through a layer.
#[track_caller]
fn assert_near(what: &str, a: &[f64], b: &[f64]) {
    let most = 1e-4 * greatest(b).max(1.0);
    assert_eq!(a.len(), b.len(), "{what}");
    for (a, b) in a.iter().zip(b) {
        assert!((a - b).abs() <= most, "{what}: {a} is not {b}");
    }
}

#[test]
fn it_is_that_of_one_rank_under_every_policy() {
    for size in sizes() {
        for own in Rows::all(size) {
            println!("{size} ranks, {own:?}");
            let t = Tensors::new(DType::F32, own.total());
            let one = Rows::Whole(own.total());
            let ctx = Context::cpu().unwrap();
            let layer = Layer::new(&ctx, &t, &one, (1, 0));
            let expected = layer.run(&ctx, &t.dout, Checkpointing::None, None);
            let outs = ranks(size, |ctx, comm| {
                let rank = comm.rank();
                let layer = Layer::new(ctx, &t, &own, (size, rank));
                let dout = rows(&t.dout, own.of(rank));
                let parallel = Some(own.parallel(comm));
                let run = |policy| layer.run(ctx, &dout, policy, parallel);
                let all = run(Checkpointing::None);
                for policy in [Checkpointing::Selective, Checkpointing::Full] {
                    let again = run(policy);
                    let pairs = all.iter().zip(&again);
                    pairs.for_each(|(a, b)| assert!(a.bits() == b.bits(), "{policy:?}"));
                }
                all
            });
            let of = |i: usize| outs.iter().map(|all| all[i].clone()).collect::<Vec<_>>();
            assert_near("out", &own.joined(&of(0)), &expected[0].values());
            assert_near("dx", &own.joined(&of(1)), &expected[1].values());
            for i in [2, 3] {
                // Of whole rows every rank has the gradient, of its rows a part.
                let parts = of(i);
                let mut sum = parts[0].values();
                if own.is_divided() {
                    for part in &parts[1..] {
                        let values = part.values();
                        sum.iter_mut().zip(values).for_each(|(sum, v)| *sum += v);
                    }
                } else {
                    assert_same(&parts);
                }
                assert_near("norm", &sum, &expected[i].values());
            }
            for (i, (rank, all)) in
                (0..MATRICES.len()).flat_map(|i| outs.iter().enumerate().map(move |all| (i, all)))
            {
                let own = Tensors::part(i, &expected[4 + i], size, rank);
                assert_near("matrix", &all[4 + i].values(), &own.values());
            }
        }
    }
}
