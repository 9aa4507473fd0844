//! The arguments of a decoder layer's passes.

use unsloth::estimate::{Checkpointing, Model};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::ops::{attention_block, decoder_layer};
use unsloth::{InOut, Result, TensorMut, TensorRef, Workspace};

use super::tensors::{
    ATTENTION_NORM, DOWN, DOWN_BIAS, GATE_UP, GATE_UP_BIAS, K_NORM, Layer, MLP_NORM, OUT, OUT_BIAS,
    Q_NORM, QKV, QKV_BIAS, Tensor,
};
use super::{EPSILON, Inputs};

fn view(tensor: &Option<Tensor>) -> Result<Option<TensorRef<'_>>> {
    tensor.as_ref().map(Tensor::view).transpose()
}

fn view_mut(tensor: &mut Option<Tensor>) -> Result<Option<TensorMut<'_>>> {
    tensor.as_mut().map(Tensor::view_mut).transpose()
}

fn weights(layer: &Layer, matrix: usize, bias: usize) -> Result<Weights<'_>> {
    Ok(Weights {
        weight: view(&layer[matrix])?.expect("every layer has its matrices"),
        bias: view(&layer[bias])?,
    })
}

/// The arguments of a layer's forward pass, which are part of its backward pass's.
pub fn layer_params<'a>(
    (m, checkpointing): (&Model, Checkpointing),
    layer: &'a Layer,
    inputs: &'a Inputs,
    (x, out): (TensorRef<'a>, TensorMut<'a>),
    (saved, workspace): (Workspace<'a>, Workspace<'a>),
) -> Result<decoder_layer::Params<'a>> {
    let packed = inputs.packed.as_ref();
    let packed = packed.map(|(at, ends)| Ok::<_, unsloth::Error>((at.view()?, ends.view()?)));
    let packed = packed.transpose()?;
    let attention = attention_block::Params {
        x_norm: None,
        parallel: None,
        x,
        num_heads: m.num_heads as usize,
        num_kv_heads: m.num_kv_heads as usize,
        head_dim: m.head_dim as usize,
        v_head_dim: m.v_head_dim as usize,
        projections: attention_block::Projections::Packed(weights(layer, QKV, QKV_BIAS)?),
        q_norm: view(&layer[Q_NORM])?,
        k_norm: view(&layer[K_NORM])?,
        norm_weight_offset: 0.0,
        norm_epsilon: EPSILON,
        rotation: Some(Rotation::default()),
        positions: packed.map_or(Positions::From(0), |(at, _)| Positions::PerToken(at)),
        cache: None,
        cu_seqlens: packed.map(|(_, ends)| ends),
        max_seqlen: 0,
        scale: 0.0,
        softcap: 0.0,
        bidirectional: false,
        window: 0,
        alibi_slopes: None,
        sinks: None,
        attended_norm: None,
        out_projection: weights(layer, OUT, OUT_BIAS)?,
        output: Output::none(),
        workspace: Workspace::none(),
        qkv_out: None,
        attended_out: None,
        lse_out: None,
    };
    let mlp = mlp::Params {
        x_norm: None,
        parallel: None,
        x,
        gate_up: GateUp::Packed {
            weights: weights(layer, GATE_UP, GATE_UP_BIAS)?,
            order: GateOrder::GateFirst,
        },
        activation: Activation::Silu,
        intermediate_norm: None,
        down: weights(layer, DOWN, DOWN_BIAS)?,
        output: Output::none(),
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    Ok(decoder_layer::Params {
        x,
        attention_norm: view(&layer[ATTENTION_NORM])?.expect("every layer has its norms"),
        mlp_norm: view(&layer[MLP_NORM])?.expect("every layer has its norms"),
        norm_weight_offset: 0.0,
        norm_epsilon: EPSILON,
        attention,
        mlp,
        checkpointing,
        out,
        saved,
        workspace,
    })
}

/// Of a layer's backward pass; `dout` becomes `dx`.
pub fn backward_params<'a>(
    forward: decoder_layer::Params<'a>,
    dout: TensorMut<'a>,
    gradients: &'a mut Layer,
    accumulate: bool,
    workspace: Workspace<'a>,
) -> Result<decoder_layer::backward::Params<'a>> {
    let [
        a,
        qkv,
        qkv_bias,
        q,
        k,
        out,
        out_bias,
        m,
        gate_up,
        gate_up_bias,
        down,
        down_bias,
    ] = gradients;
    Ok(decoder_layer::backward::Params {
        forward,
        dout: InOut::InPlace(dout),
        dattention_norm: view_mut(a)?,
        dmlp_norm: view_mut(m)?,
        attention: attention_block::backward::Gradients {
            dqkv_weight: view_mut(qkv)?,
            dqkv_bias: view_mut(qkv_bias)?,
            dq_norm: view_mut(q)?,
            dk_norm: view_mut(k)?,
            dout_weight: view_mut(out)?,
            dout_bias: view_mut(out_bias)?,
            ..Default::default()
        },
        deterministic: false,
        mlp: mlp::backward::Gradients {
            dgate_up_weight: view_mut(gate_up)?,
            dgate_up_bias: view_mut(gate_up_bias)?,
            ddown_weight: view_mut(down)?,
            ddown_bias: view_mut(down_bias)?,
            ..Default::default()
        },
        accumulate,
        workspace,
    })
}
