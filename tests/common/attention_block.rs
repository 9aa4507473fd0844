//! Cases of the attention block, their tensors, and the single operations that the block is made of.

use unsloth::ops::attention_block::{Params, Projections};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::rope::{self, Positions, Rotation, Style};
use unsloth::ops::{qk_norm_rope, rms_norm};
use unsloth::{Backend, Buffer, Context, DType, InOut, Layout, Stream, TensorRef};

use super::{DeviceTensor, TestTensor, rng, rules};

/// What a case varies.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Leading dimensions of `x`.
    pub tokens: &'static [usize],
    pub heads: (usize, usize),
    pub dims: (usize, usize),
    pub packed: bool,
    pub biases: bool,
    /// Gains per head, for all heads together, or none.
    pub norm: Norm,
    /// Gains of attention's output.
    pub attended_norm: bool,
    pub rotate: bool,
    pub residual: Residual,
    pub bidirectional: bool,
    pub window: usize,
    pub softcap: f32,
    /// Sinks and ALiBi slopes.
    pub logits: bool,
    pub weight_dtype: Option<DType>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    None,
    Heads,
    All,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Residual {
    None,
    Apart,
    InPlace,
}

pub const PLAIN: Case = Case {
    tokens: &[2, 7],
    heads: (4, 2),
    dims: (16, 16),
    packed: false,
    biases: false,
    norm: Norm::None,
    attended_norm: false,
    rotate: true,
    residual: Residual::None,
    bidirectional: false,
    window: 0,
    softcap: 0.0,
    logits: false,
    weight_dtype: None,
};
pub const HIDDEN: usize = 24;
pub const HIDDEN_OUT: usize = 20;
pub const EPSILON: f32 = 1e-5;

/// The tensors of a case.
pub struct Tensors {
    pub x: DeviceTensor,
    /// Query, key, value and output weights; views of one matrix where packed.
    pub qkv: DeviceTensor,
    pub qkv_bias: DeviceTensor,
    pub out_weight: DeviceTensor,
    pub out_bias: DeviceTensor,
    pub norms: [DeviceTensor; 2],
    pub attended_norm: DeviceTensor,
    pub sinks: DeviceTensor,
    pub slopes: DeviceTensor,
    pub residual: TestTensor,
}

impl Tensors {
    pub fn new(ctx: &Context, dtype: DType, case: &Case) -> Tensors {
        let rng = &mut rng();
        let contiguous = |shape: &[usize]| Layout::contiguous(shape).unwrap();
        let weights = case.weight_dtype.unwrap_or(dtype);
        let mut normal = |dtype, layout: Layout, scale: f64| {
            let values: Vec<f64> = TestTensor::normal(rng, DType::F32, layout)
                .values()
                .iter()
                .map(|x| x * scale)
                .collect();
            TestTensor::from_values(dtype, layout, &values)
        };
        let leading = |last: usize| [case.tokens, &[last]].concat();
        let (nq, nk) = case.heads;
        let (d, dv) = case.dims;
        let rows = nq * d + nk * (d + dv);
        let gains = |n: usize, per_head: usize| match case.norm {
            Norm::All => n * per_head,
            _ => per_head,
        };
        let x = super::tensor::strided_rows(&leading(HIDDEN), 3);
        Tensors {
            x: normal(dtype, x, 1.0).upload(ctx),
            qkv: normal(weights, contiguous(&[rows, HIDDEN]), 0.3).upload(ctx),
            qkv_bias: normal(weights, contiguous(&[rows]), 0.3).upload(ctx),
            out_weight: normal(weights, contiguous(&[HIDDEN_OUT, nq * dv]), 0.3).upload(ctx),
            out_bias: normal(weights, contiguous(&[HIDDEN_OUT]), 0.3).upload(ctx),
            norms: [
                normal(weights, contiguous(&[gains(nq, d)]), 1.0).upload(ctx),
                normal(weights, contiguous(&[gains(nk, d)]), 1.0).upload(ctx),
            ],
            attended_norm: normal(weights, contiguous(&[nq * dv]), 1.0).upload(ctx),
            sinks: normal(DType::F32, contiguous(&[nq]), 1.0).upload(ctx),
            slopes: normal(DType::F32, contiguous(&[nq]), 0.1).upload(ctx),
            residual: normal(dtype, contiguous(&leading(HIDDEN_OUT)), 1.0),
        }
    }

    pub fn rotation(case: &Case) -> Option<Rotation<'static>> {
        case.rotate.then(|| Rotation {
            style: if case.packed {
                Style::Interleaved
            } else {
                Style::HalfSplit
            },
            ..Rotation::default()
        })
    }

    /// Rows `start..start + len` of the matrix of queries, keys and values.
    pub fn projection(&self, case: &Case, start: usize, len: usize) -> Weights<'_> {
        Weights {
            weight: self.qkv.view().narrowed(0, start, len).unwrap(),
            bias: case
                .biases
                .then(|| self.qkv_bias.view().narrowed(0, start, len).unwrap()),
        }
    }

    pub fn apart(&self, case: &Case) -> [Weights<'_>; 3] {
        let ((nq, nk), (d, dv)) = (case.heads, case.dims);
        [
            self.projection(case, 0, nq * d),
            self.projection(case, nq * d, nk * d),
            self.projection(case, (nq + nk) * d, nk * dv),
        ]
    }

    pub fn params<'a>(&'a self, case: &Case, output: Output<'a>) -> Params<'a> {
        let [q, k, v] = self.apart(case);
        Params {
            x_norm: None,
            parallel: None,
            x: self.x.view(),
            num_heads: case.heads.0,
            num_kv_heads: case.heads.1,
            head_dim: case.dims.0,
            v_head_dim: case.dims.1,
            projections: match case.packed {
                false => Projections::Apart { q, k, v },
                true => Projections::Packed(self.projection(case, 0, self.qkv.layout.dim(0))),
            },
            q_norm: (case.norm != Norm::None).then(|| self.norms[0].view()),
            k_norm: (case.norm != Norm::None).then(|| self.norms[1].view()),
            attended_norm: case.attended_norm.then(|| self.attended_norm.view()),
            norm_weight_offset: 0.5,
            norm_epsilon: EPSILON,
            rotation: Self::rotation(case),
            positions: Positions::From(0),
            cache: None,
            cu_seqlens: None,
            max_seqlen: 0,
            scale: 0.0,
            softcap: case.softcap,
            bidirectional: case.bidirectional,
            window: case.window,
            alibi_slopes: case.logits.then(|| self.slopes.view()),
            sinks: case.logits.then(|| self.sinks.view()),
            out_projection: Weights {
                weight: self.out_weight.view(),
                bias: case.biases.then(|| self.out_bias.view()),
            },
            output,
            workspace: unsloth::Workspace::none(),
            qkv_out: None,
            attended_out: None,
            lse_out: None,
        }
    }

    /// Output and residual, as the case has them.
    pub fn outputs(&self, ctx: &Context, case: &Case) -> (DeviceTensor, DeviceTensor) {
        let out = match case.residual {
            Residual::InPlace => self.residual.clone(),
            _ => TestTensor::poisoned(self.residual.dtype, self.residual.layout),
        };
        (out.upload(ctx), self.residual.upload(ctx))
    }
}

pub fn output<'a>(
    case: &Case,
    out: &'a mut DeviceTensor,
    residual: &'a DeviceTensor,
) -> Output<'a> {
    match case.residual {
        Residual::None => Output::Write(out.view_mut()),
        Residual::InPlace => Output::Add(InOut::InPlace(out.view_mut())),
        Residual::Apart => Output::Add(InOut::Apart {
            input: residual.view(),
            output: out.view_mut(),
        }),
    }
}

/// Queries, keys and values with heads, projected, normalised and, those of the first two that are
/// `rotated`, rotated by single operations.
pub fn heads(
    ctx: &Context,
    t: &Tensors,
    case: &Case,
    positions: Positions<'_>,
    rotated: [bool; 2],
) -> [DeviceTensor; 3] {
    let ((nq, nk), (d, dv)) = (case.heads, case.dims);
    let project = |weights: Weights<'_>| {
        let columns = weights.weight.shape()[0];
        let shape = [case.tokens, &[columns]].concat();
        let layout = Layout::contiguous(&shape).unwrap();
        let mut out = TestTensor::poisoned(t.x.dtype, layout).upload(ctx);
        let params = linear::Params {
            x_norm: None,
            parallel: None,
            x: t.x.view(),
            weights,
            output: Output::Write(out.view_mut()),
            workspace: unsloth::Workspace::none(),
        };
        linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
        out
    };
    let sizes = [(nq, d), (nk, d), (nk, dv)];
    let mut out = match case.packed {
        false => t.apart(case).map(project),
        true => {
            // One product, since the order of its sums may depend on the number of columns; then its slices.
            let columns = t.qkv.layout.dim(0);
            let values = project(t.projection(case, 0, columns)).download().values();
            let mut start = 0;
            sizes.map(|(num, dim)| {
                let slice: Vec<f64> = values
                    .chunks(columns)
                    .flat_map(|row| row[start..start + num * dim].iter().copied())
                    .collect();
                start += num * dim;
                let shape = [case.tokens, &[num * dim]].concat();
                TestTensor::of(t.x.dtype, &shape, &slice).upload(ctx)
            })
        }
    };
    let rotation = Tensors::rotation(case);
    // A norm of all heads is that of one where there is but one.
    let of_heads = |num| case.norm == Norm::Heads || (case.norm == Norm::All && num == 1);
    let in_one_pass =
        |i: usize| rotation.is_some() && rotated[i] && of_heads(if i == 0 { nq } else { nk });
    for (i, (num, weight)) in [nq, nk].into_iter().zip(&t.norms).enumerate() {
        if case.norm == Norm::None || in_one_pass(i) {
            continue;
        }
        let mut x = out[i].view_mut();
        if case.norm == Norm::Heads {
            x = x.unflattened(case.tokens.len(), &[num, d]).unwrap();
        }
        let params = rms_norm::Params {
            x: InOut::InPlace(x),
            residual: None,
            weight: Some(weight.view()),
            weight_offset: 0.5,
            epsilon: EPSILON,
        };
        rms_norm::forward(ctx, &params, Stream::DEFAULT).unwrap();
    }
    for (t, (num, dim)) in out.iter_mut().zip(sizes) {
        t.layout = t
            .layout
            .unflattened(case.tokens.len(), &[num, dim])
            .unwrap();
    }
    let Some(rotation) = rotation else {
        return out;
    };
    let [q, k, _] = &mut out;
    for (i, x) in [q, k].into_iter().enumerate().filter(|(i, _)| rotated[*i]) {
        let x = Some(InOut::InPlace(x.view_mut()));
        if in_one_pass(i) {
            let params = qk_norm_rope::Params {
                q: x,
                q_weight: Some(t.norms[i].view()),
                weight_offset: 0.5,
                epsilon: EPSILON,
                positions,
                rotation,
                ..Default::default()
            };
            qk_norm_rope::forward(ctx, &params, Stream::DEFAULT).unwrap();
        } else {
            let params = rope::Params {
                q: x,
                positions,
                rotation,
                ..Default::default()
            };
            rope::forward(ctx, &params, Stream::DEFAULT).unwrap();
        }
    }
    out
}

pub fn project_out(ctx: &Context, t: &Tensors, case: &Case, attended: &DeviceTensor) -> TestTensor {
    let (mut out, residual) = t.outputs(ctx, case);
    let shape = [case.tokens, &[case.heads.0 * case.dims.1]].concat();
    let flat = Layout::contiguous(&shape).unwrap();
    // The heads lie one after the other, so the same memory is a row per token.
    let data = TestTensor::of(attended.dtype, &shape, &attended.download_output().values());
    assert_eq!(data.layout, flat);
    let mut data = data.upload(ctx);
    if case.attended_norm {
        let norm = rms_norm::Params {
            x: InOut::InPlace(data.view_mut()),
            residual: None,
            weight: Some(t.attended_norm.view()),
            weight_offset: 0.5,
            epsilon: EPSILON,
        };
        rms_norm::forward(ctx, &norm, Stream::DEFAULT).unwrap();
    }
    let params = linear::Params {
        x_norm: None,
        parallel: None,
        x: data.view(),
        weights: Weights {
            weight: t.out_weight.view(),
            bias: case.biases.then(|| t.out_bias.view()),
        },
        output: output(case, &mut out, &residual),
        workspace: unsloth::Workspace::none(),
    };
    linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
    out.download_output()
}
/// The same bits; up to rounding on a GPU, where the order of a product's sums depends on how tensors lie, and on what else is computed
/// with it.
pub fn assert_same(ctx: &Context, a: &TestTensor, b: &TestTensor) {
    if ctx.backend() == Backend::Cpu {
        assert!(a.bits() == b.bits(), "not the same bits");
        return;
    }
    let expected = b.values();
    let greatest = expected.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
    let bound = greatest * (4.0 * rules::epsilon(b.dtype)).max(2e-5);
    for (a, b) in a.values().iter().zip(&expected) {
        assert!((a - b).abs() <= bound, "{a} and {b}, {bound} apart at most");
    }
}

/// Equal but for the order of f32 sums, which may depend on how many rows a product has.
pub fn assert_near(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() <= 1e-5 * a.abs().max(1.0), "{i}: {a} {b}");
    }
}
impl Tensors {
    /// A tensor with rows of another length than the hidden state.
    pub fn residual_view(&self) -> TensorRef<'_> {
        self.out_bias
            .view()
            .unflattened(0, &[1, HIDDEN_OUT])
            .unwrap()
    }
}
