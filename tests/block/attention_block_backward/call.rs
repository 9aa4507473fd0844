//! The attention block of a case on a device: its forward, its gradients, and what they are of.

use super::Packed;
use crate::common::attention_block::*;
use crate::common::reference::attention::Options;
use crate::common::reference::attention_block::{Block, Gradients as Expected};
use crate::common::reference::mlp::Layer;
use crate::common::workspace::with_workspace;
use crate::common::{DeviceTensor, TestTensor, rng};
use unsloth::ops::attention_block::backward::{Gradients, Params};
use unsloth::ops::attention_block::{self, Params as Forward};
use unsloth::ops::linear::Output;
use unsloth::ops::rope::Positions;
use unsloth::{Context, DType, Layout, Stream, Workspace};

/// A case on a device.
pub struct Call {
    pub packed: Packed,
    pub t: Tensors,
    pub dout: DeviceTensor,
    pub cu_seqlens: Option<DeviceTensor>,
    pub positions: Option<DeviceTensor>,
}

impl Call {
    pub fn new(ctx: &Context, dtype: DType, packed: &Packed) -> Call {
        let integers = |values: Vec<usize>| {
            let values: Vec<f64> = values.into_iter().map(|v| v as f64).collect();
            TestTensor::of(DType::I32, &[values.len()], &values).upload(ctx)
        };
        let starts = packed.lens.iter().scan(0, |sum, len| {
            *sum += len;
            Some(*sum)
        });
        let is_packed = !packed.lens.is_empty();
        let dout = crate::common::tensor::strided_rows(&packed.shape(HIDDEN_OUT), 5);
        Call {
            t: Tensors::new(ctx, dtype, &packed.case),
            dout: TestTensor::normal(&mut rng(), dtype, dout).upload(ctx),
            cu_seqlens: is_packed.then(|| integers([0].into_iter().chain(starts).collect())),
            positions: is_packed
                .then(|| integers(packed.lens.iter().flat_map(|len| 0..*len).collect())),
            packed: *packed,
        }
    }

    pub fn forward<'a>(&'a self, output: Output<'a>) -> Forward<'a> {
        let mut params = self.t.params(&self.packed.case, output);
        params.cu_seqlens = self.cu_seqlens.as_ref().map(DeviceTensor::view);
        if let Some(positions) = &self.positions {
            params.positions = Positions::PerToken(positions.view());
        }
        params
    }

    /// The block in f64.
    pub fn reference(&self) -> Block {
        let case = &self.packed.case;
        let values = |t: &DeviceTensor| t.download().values();
        let mut start = 0;
        let (weight, bias) = (values(&self.t.qkv), values(&self.t.qkv_bias));
        let projections = self.packed.columns().map(|rows| {
            let range = start..start + rows;
            start += rows;
            Layer {
                weight: weight[range.start * HIDDEN..range.end * HIDDEN].to_vec(),
                bias: case.biases.then(|| bias[range].to_vec()),
            }
        });
        let window = (case.window > 0).then_some(case.window);
        Block {
            heads: case.heads.0,
            kv_heads: case.heads.1,
            dim: case.dims.0,
            dim_v: case.dims.1,
            hidden: HIDDEN,
            hidden_out: HIDDEN_OUT,
            projections,
            out: Layer {
                weight: values(&self.t.out_weight),
                bias: case.biases.then(|| values(&self.t.out_bias)),
            },
            norms: [0, 1].map(|i| (case.norm != Norm::None).then(|| values(&self.t.norms[i]))),
            norm_weight_offset: 0.5,
            norm_epsilon: f64::from(EPSILON),
            rotation: case.rotate.then_some(case.packed),
            options: Options {
                softcap: (case.softcap > 0.0).then_some(f64::from(case.softcap)),
                causal: !case.bidirectional,
                window_left: window,
                window_right: window.filter(|_| case.bidirectional),
                alibi_slopes: case.logits.then(|| values(&self.t.slopes)),
                sinks: case.logits.then(|| values(&self.t.sinks)),
                ..Options::default()
            },
        }
    }
}

/// Queries, keys and values, attention's output and LSE, as the forward keeps them.
pub struct Kept(pub [DeviceTensor; 3]);

/// The forward, which keeps what it can; gives its output too.
pub fn forward(ctx: &Context, call: &Call) -> (TestTensor, Kept) {
    let (packed, dtype) = (&call.packed, call.t.x.dtype);
    let poisoned = |dtype, shape: &[usize]| {
        TestTensor::poisoned(dtype, Layout::contiguous(shape).unwrap()).upload(ctx)
    };
    let heads = packed.case.heads.0;
    let lse = match packed.case.tokens {
        [batch, len] => vec![*batch, heads, *len],
        tokens => vec![heads, tokens[0]],
    };
    let mut kept = [
        poisoned(dtype, &packed.shape(packed.columns().iter().sum())),
        poisoned(dtype, &packed.shape(packed.attended())),
        poisoned(DType::F32, &lse),
    ];
    let mut out = poisoned(dtype, &packed.shape(HIDDEN_OUT));
    {
        let [qkv, attended, lse] = &mut kept;
        let mut params = call.forward(Output::Write(out.view_mut()));
        params.qkv_out = Some(qkv.view_mut());
        params.attended_out = Some(attended.view_mut());
        params.lse_out = Some(lse.view_mut());
        attention_block::supported(ctx, &params).unwrap();
        let size = attention_block::workspace_size(ctx, &params).unwrap();
        with_workspace(ctx, "attention_block", size, |workspace| {
            params.workspace = workspace;
            attention_block::forward(ctx, &params, Stream::DEFAULT)
        });
    }
    (out.download_output(), Kept(kept))
}

/// The gradients that are wanted, in the order of `NAMES`; of packed weights those of all under
/// the names of the queries'. `before` is what those of parameters hold.
pub fn backward(
    ctx: &Context,
    call: &Call,
    kept: [Option<&DeviceTensor>; 3],
    wanted: &dyn Fn(usize) -> bool,
    before: &dyn Fn(Layout) -> TestTensor,
) -> [Option<TestTensor>; 12] {
    let (case, t) = (&call.packed.case, &call.t);
    let vector = |n| Some(Layout::contiguous(&[n]).unwrap());
    let matrix = |n| Some(Layout::contiguous(&[n, HIDDEN]).unwrap());
    let [q, k, v] = call.packed.columns();
    let of_norm = |i: usize| (case.norm != Norm::None).then_some(t.norms[i].layout);
    let mut layouts = [
        Some(t.x.layout),
        matrix(q),
        vector(q).filter(|_| case.biases),
        matrix(k),
        vector(k).filter(|_| case.biases),
        matrix(v),
        vector(v).filter(|_| case.biases),
        of_norm(0),
        of_norm(1),
        case.logits.then_some(t.sinks.layout),
        Some(t.out_weight.layout),
        Some(t.out_bias.layout).filter(|_| case.biases),
    ];
    if case.packed {
        layouts[1] = matrix(q + k + v);
        layouts[2] = vector(q + k + v).filter(|_| case.biases);
        layouts[3..7].fill(None);
    }
    let mut tensors = [const { None }; 12];
    for (i, layout) in layouts.into_iter().enumerate() {
        tensors[i] = layout.filter(|_| wanted(i)).map(|layout| match i {
            0 => TestTensor::poisoned(t.x.dtype, layout).upload(ctx),
            9 if !call.packed.accumulate => TestTensor::poisoned(DType::F32, layout).upload(ctx),
            _ => before(layout).upload(ctx),
        });
    }
    {
        let mut views = tensors
            .each_mut()
            .map(|t| t.as_mut().map(DeviceTensor::view_mut));
        let mut view = |i: usize| views[i].take();
        let dx = view(0);
        let mut gradients = Gradients {
            dq_norm: view(7),
            dk_norm: view(8),
            dsinks: view(9),
            dout_weight: view(10),
            dout_bias: view(11),
            ..Gradients::default()
        };
        if case.packed {
            (gradients.dqkv_weight, gradients.dqkv_bias) = (view(1), view(2));
        } else {
            (gradients.dq_weight, gradients.dq_bias) = (view(1), view(2));
            (gradients.dk_weight, gradients.dk_bias) = (view(3), view(4));
            (gradients.dv_weight, gradients.dv_bias) = (view(5), view(6));
        }
        let mut params = Params {
            forward: call.forward(Output::none()),
            qkv: kept[0].map(DeviceTensor::view),
            attended: kept[1].map(DeviceTensor::view),
            lse: kept[2].map(DeviceTensor::view),
            dout: call.dout.view(),
            dx,
            gradients,
            accumulate: call.packed.accumulate,
            deterministic: true,
            workspace: Workspace::none(),
        };
        attention_block::backward::supported(ctx, &params).unwrap();
        let size = attention_block::backward::workspace_size(ctx, &params).unwrap();
        with_workspace(ctx, "attention_block_backward", size, |workspace| {
            params.workspace = workspace;
            attention_block::backward(ctx, &params, Stream::DEFAULT)
        });
    }
    tensors.map(|t| t.map(|t| t.download_output()))
}

/// What of a packed gradient is of queries, of keys and of values.
pub fn unpacked(packed: &Packed, gradients: &[Option<TestTensor>; 12]) -> [Option<Vec<f64>>; 12] {
    let mut values = gradients
        .each_ref()
        .map(|t| t.as_ref().map(TestTensor::values));
    if packed.case.packed {
        for (first, width) in [(1, HIDDEN), (2, 1)] {
            let Some(all) = values[first].take() else {
                continue;
            };
            let mut start = 0;
            for (i, rows) in packed.columns().into_iter().enumerate() {
                let end = start + rows * width;
                values[first + 2 * i] = Some(all[start..end].to_vec());
                start = end;
            }
        }
    }
    values
}

pub fn listed(g: Expected, start: f64) -> [Vec<f64>; 12] {
    let add = |g: Vec<f64>| g.into_iter().map(|g| g + start).collect();
    let [(a, b), (c, d), (e, f)] = g.projections.map(|(w, b)| (add(w), add(b)));
    let [q_norm, k_norm] = g.norms.map(add);
    let (weight, bias) = g.out;
    [
        g.dx,
        a,
        b,
        c,
        d,
        e,
        f,
        q_norm,
        k_norm,
        add(g.sinks),
        add(weight),
        add(bias),
    ]
}
