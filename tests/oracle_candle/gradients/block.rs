//! The attention block and the decoder layer of a Llama.

use candle_core::{Result, Tensor};
use unsloth::estimate::Model;
use unsloth::ops::decoder_layer::Checkpointing;
use unsloth::ops::linear::Output;
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::ops::swiglu::Activation;
use unsloth::ops::{attention_block, decoder_layer};
use unsloth::{Context, DType, InOut, Stream, TensorMut, Workspace};

use super::{Leaf, assert_gradients, gradients};
use crate::candle_llama::{self, EPSILON, Places};
use crate::common::workspace::poisoned_workspace;
use crate::common::{DeviceTensor, contexts, for_each_case};
use crate::{assert_agrees, normal, output};

const BATCH: usize = 2;
const SEQ: usize = 19;
const MODEL: Model = Model {
    vocab_size: 1,
    hidden_size: 48,
    intermediate_size: 80,
    num_layers: 1,
    num_heads: 6,
    num_kv_heads: 2,
    head_dim: 16,
    v_head_dim: 16,
    tied_embeddings: true,
    qkv_bias: false,
    output_bias: false,
    mlp_bias: false,
    qk_norm: false,
};
const UNITS: f64 = 32.0;

/// A layer's input and parameters, in the order in which candle's layer names them.
struct Layer {
    x: Leaf,
    attention_norm: Leaf,
    q: Leaf,
    k: Leaf,
    v: Leaf,
    out: Leaf,
    mlp_norm: Leaf,
    gate: Leaf,
    up: Leaf,
    down: Leaf,
}

impl Layer {
    fn new(ctx: &Context) -> Layer {
        let m = &MODEL;
        let [hidden, inner] = [m.hidden_size, m.intermediate_size].map(|n| n as usize);
        let [queries, keys] = [m.num_heads, m.num_kv_heads].map(|n| (n * m.head_dim) as usize);
        Layer {
            x: Leaf::normal(ctx, &[BATCH, SEQ, hidden]),
            attention_norm: Leaf::normal(ctx, &[hidden]),
            q: Leaf::matrix(ctx, [queries, hidden]),
            k: Leaf::matrix(ctx, [keys, hidden]),
            v: Leaf::matrix(ctx, [keys, hidden]),
            out: Leaf::matrix(ctx, [hidden, queries]),
            mlp_norm: Leaf::normal(ctx, &[hidden]),
            gate: Leaf::matrix(ctx, [inner, hidden]),
            up: Leaf::matrix(ctx, [inner, hidden]),
            down: Leaf::matrix(ctx, [hidden, inner]),
        }
    }

    fn attention(&self) -> attention_block::Params<'_> {
        attention_block::Params {
            x_norm: None,
            x: self.x.ours.view(),
            num_heads: MODEL.num_heads as usize,
            num_kv_heads: MODEL.num_kv_heads as usize,
            head_dim: MODEL.head_dim as usize,
            v_head_dim: MODEL.v_head_dim as usize,
            projections: attention_block::Projections::Apart {
                q: self.q.weights(),
                k: self.k.weights(),
                v: self.v.weights(),
            },
            q_norm: None,
            k_norm: None,
            norm_weight_offset: 0.0,
            norm_epsilon: EPSILON,
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
            out_projection: self.out.weights(),
            output: Output::none(),
            workspace: Workspace::none(),
            qkv_out: None,
            attended_out: None,
            lse_out: None,
            parallel: None,
        }
    }

    fn mlp(&self) -> mlp::Params<'_> {
        mlp::Params {
            x_norm: None,
            x: self.x.ours.view(),
            gate_up: GateUp::Apart {
                gate: self.gate.weights(),
                up: self.up.weights(),
            },
            activation: Activation::Silu,
            intermediate_norm: None,
            down: self.down.weights(),
            output: Output::none(),
            workspace: Workspace::none(),
            gate_up_out: None,
            parallel: None,
        }
    }

    fn forward<'a>(
        &'a self,
        checkpointing: Checkpointing,
        out: TensorMut<'a>,
        saved: Workspace<'a>,
        workspace: Workspace<'a>,
    ) -> decoder_layer::Params<'a> {
        decoder_layer::Params {
            x: self.x.ours.view(),
            attention_norm: self.attention_norm.ours.view(),
            mlp_norm: self.mlp_norm.ours.view(),
            norm_weight_offset: 0.0,
            norm_epsilon: EPSILON,
            attention: self.attention(),
            mlp: self.mlp(),
            checkpointing,
            out,
            saved,
            workspace,
        }
    }

    /// candle's layer of the same variables, its input as rows, and where tokens stand.
    fn candle(&self) -> Result<(candle_llama::Layer, Tensor, Places)> {
        let of = |leaf: &Leaf| leaf.theirs.clone();
        let layer = candle_llama::Layer {
            attention_norm: of(&self.attention_norm),
            q: of(&self.q),
            k: of(&self.k),
            v: of(&self.v),
            out: of(&self.out),
            mlp_norm: of(&self.mlp_norm),
            gate: of(&self.gate),
            up: of(&self.up),
            down: of(&self.down),
        };
        let rows = self.x.theirs.reshape((BATCH * SEQ, ()))?;
        Ok((
            layer,
            rows,
            Places::new(BATCH, SEQ, MODEL.head_dim as usize)?,
        ))
    }
}

#[test]
fn attention_block() {
    for ctx in contexts() {
        let layer = Layer::new(&ctx);
        let dout = normal(DType::F32, layer.x.ours.layout.shape());
        let ours = dout.upload(&ctx);
        let [mut dx, mut dq, mut dk, mut dv, mut dweight] =
            [&layer.x, &layer.q, &layer.k, &layer.v, &layer.out].map(|leaf| leaf.gradient(&ctx));
        let mut params = attention_block::backward::Params {
            forward: layer.attention(),
            qkv: None,
            attended: None,
            lse: None,
            dout: ours.view(),
            dx: Some(dx.view_mut()),
            gradients: attention_block::backward::Gradients {
                dq_weight: Some(dq.view_mut()),
                dk_weight: Some(dk.view_mut()),
                dv_weight: Some(dv.view_mut()),
                dout_weight: Some(dweight.view_mut()),
                ..Default::default()
            },
            accumulate: false,
            deterministic: false,
            workspace: Workspace::none(),
        };
        let size = attention_block::backward::workspace_size(&ctx, &params).unwrap();
        let mut workspace = poisoned_workspace(&ctx, size);
        params.workspace = workspace.workspace();
        attention_block::backward(&ctx, &params, Stream::DEFAULT).unwrap();

        let (theirs, rows, places) = layer.candle().unwrap();
        let theirs = gradients(&[(theirs.attention_block(&MODEL, &rows, &places), &dout)]);
        let leaves = [
            ("x", &layer.x, &dx),
            ("q", &layer.q, &dq),
            ("k", &layer.k, &dk),
            ("v", &layer.v, &dv),
            ("out", &layer.out, &dweight),
        ];
        assert_gradients("attention_block", &leaves, &theirs, UNITS);
    }
}

#[test]
fn decoder_layer() {
    for ctx in contexts() {
        for_each_case(
            &[Checkpointing::None, Checkpointing::Full],
            |&checkpointing| {
                let l = &Layer::new(&ctx);
                let shape = l.x.ours.layout.shape();
                let dout = normal(DType::F32, shape);
                let ours = dout.upload(&ctx);
                let mut out = output(&ctx, DType::F32, shape);
                let none = Workspace::none;
                let asked = l.forward(checkpointing, out.view_mut(), none(), none());
                let size = decoder_layer::saved_size(&ctx, &asked).unwrap();
                let mut saved = poisoned_workspace(&ctx, size);
                let size = decoder_layer::workspace_size(&ctx, &asked).unwrap();
                let mut workspace = poisoned_workspace(&ctx, size);
                let params = l.forward(
                    checkpointing,
                    out.view_mut(),
                    saved.workspace(),
                    workspace.workspace(),
                );
                decoder_layer::forward(&ctx, &params, Stream::DEFAULT).unwrap();

                let leaves = [
                    ("x", &l.x),
                    ("attention_norm", &l.attention_norm),
                    ("q", &l.q),
                    ("k", &l.k),
                    ("v", &l.v),
                    ("out", &l.out),
                    ("mlp_norm", &l.mlp_norm),
                    ("gate", &l.gate),
                    ("up", &l.up),
                    ("down", &l.down),
                ];
                let mut all = leaves.map(|(_, leaf)| leaf.gradient(&ctx));
                let [dx, da, dq, dk, dv, dout_weight, dm, dgate, dup, ddown] =
                    all.each_mut().map(DeviceTensor::view_mut);
                let mut not_looked_at = output(&ctx, DType::F32, shape);
                let mut params = decoder_layer::backward::Params {
                    forward: l.forward(
                        checkpointing,
                        not_looked_at.view_mut(),
                        saved.workspace(),
                        none(),
                    ),
                    dout: InOut::Apart {
                        input: ours.view(),
                        output: dx,
                    },
                    dattention_norm: Some(da),
                    dmlp_norm: Some(dm),
                    attention: attention_block::backward::Gradients {
                        dq_weight: Some(dq),
                        dk_weight: Some(dk),
                        dv_weight: Some(dv),
                        dout_weight: Some(dout_weight),
                        ..Default::default()
                    },
                    mlp: mlp::backward::Gradients {
                        dgate_weight: Some(dgate),
                        dup_weight: Some(dup),
                        ddown_weight: Some(ddown),
                        ..Default::default()
                    },
                    accumulate: false,
                    deterministic: false,
                    workspace: none(),
                };
                let size = decoder_layer::backward::workspace_size(&ctx, &params).unwrap();
                let mut workspace = poisoned_workspace(&ctx, size);
                params.workspace = workspace.workspace();
                decoder_layer::backward(&ctx, &params, Stream::DEFAULT).unwrap();

                let (theirs, rows, places) = l.candle().unwrap();
                let y = theirs.forward(&MODEL, &rows, &places).unwrap();
                assert_agrees("decoder_layer", &out.download_output(), &y, UNITS);
                let theirs = gradients(&[(Ok(y), &dout)]);
                let leaves: Vec<_> = leaves
                    .iter()
                    .zip(&all)
                    .map(|((n, l), d)| (*n, *l, d))
                    .collect();
                assert_gradients("decoder_layer", &leaves, &theirs, UNITS);
            },
        );
    }
}
