//! The backward pass of a case: its tensors, the call, and how its gradients are judged.

use rand::Rng;
use rand::rngs::StdRng;
use unsloth::ops::Implementation;
use unsloth::ops::attention::backward::{self, Params};
use unsloth::{Context, DType, Error, Stream};

use super::{Case, Inputs, KeyForm, QueryForm, SPARE_TOKENS, Scratch, Uploaded, compare, expected};
use crate::common::reference::attention::{
    Gradients, Options, Precision, Sequence, attention, attention_backward, gradient_rounding,
};
use crate::common::rules::epsilon;
use crate::common::tensor::normal;
use crate::common::{DeviceTensor, TestTensor, assert_gradient_rule};

/// Which gradients are asked for, and what else there is.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    pub dq: bool,
    pub dk: bool,
    pub dv: bool,
    /// Those of the bias and the sinks, where the case has them.
    pub dbias: bool,
    pub dsinks: bool,
    /// The loss depends on the LSE too.
    pub dlse: bool,
    pub accumulate: bool,
    pub deterministic: bool,
}

impl Wanted {
    pub const ALL: Wanted = Wanted {
        dq: true,
        dk: true,
        dv: true,
        dbias: true,
        dsinks: true,
        dlse: true,
        accumulate: false,
        deterministic: false,
    };

    pub const NONE: Wanted = Wanted {
        dq: false,
        dk: false,
        dv: false,
        dbias: false,
        dsinks: false,
        dlse: false,
        accumulate: false,
        deterministic: false,
    };
}

/// What the backward pass takes beside the forward pass's inputs, on the host.
pub struct Host {
    pub inputs: Inputs,
    pub dout: TestTensor,
    pub dlse: Option<TestTensor>,
    pub dq: Option<TestTensor>,
    pub dk: Option<TestTensor>,
    pub dv: Option<TestTensor>,
    pub dbias: Option<TestTensor>,
    pub dsinks: Option<TestTensor>,
}

impl Host {
    /// Random inputs, what the forward pass makes of them, and poisoned gradients.
    pub fn new(rng: &mut StdRng, dtype: DType, case: &Case, wanted: Wanted) -> Host {
        let mut inputs = case.inputs(rng, dtype);
        let forward = |s: &Sequence, o: &Options| attention(s, o, Precision::Exact);
        let (out, lse) = expected(case, &inputs, forward);
        inputs.out.set_values(&out);
        inputs.lse.set_values(&lse);
        let mut dout = match (case.out_f32, case.kv_dtype) {
            // An output of f32 whose gradient is of the queries' dtype.
            (true, None) => TestTensor::poisoned(dtype, inputs.out.layout),
            _ => TestTensor::poisoned_like(&inputs.out),
        };
        // Gradients of tokens of no sequence are not looked at.
        let values: Vec<f64> = out
            .iter()
            .map(|x| if x.is_nan() { *x } else { normal(rng) })
            .collect();
        dout.set_values(&values);
        let dlse = wanted.dlse.then(|| {
            let mut dlse = TestTensor::poisoned_like(&inputs.lse);
            // Nor is that of the LSE of a query that sees no key.
            let values: Vec<f64> = lse
                .iter()
                .map(|x| if x.is_finite() { normal(rng) } else { f64::NAN })
                .collect();
            dlse.set_values(&values);
            dlse
        });
        let like = |wanted: bool, t: &TestTensor| wanted.then(|| TestTensor::poisoned_like(t));
        // What is accumulated, or poison.
        let mut sum_of = |wanted_at_all: bool, t: &Option<TestTensor>| {
            let t = t.as_ref().filter(|_| wanted_at_all)?;
            let mut sum = TestTensor::poisoned(DType::F32, t.layout);
            if wanted.accumulate {
                let n = t.layout.num_elements();
                let values: Vec<f64> = (0..n).map(|_| rng.random_range(-4.0..4.0)).collect();
                sum.set_values(&values);
            }
            Some(sum)
        };
        Host {
            dout,
            dlse,
            dq: like(wanted.dq, &inputs.q),
            dk: like(wanted.dk, &inputs.k),
            dv: like(wanted.dv, &inputs.v),
            dbias: sum_of(wanted.dbias, &inputs.bias),
            dsinks: sum_of(wanted.dsinks, &inputs.sinks),
            inputs,
        }
    }

    fn gradients(&self) -> [&Option<TestTensor>; 5] {
        [&self.dq, &self.dk, &self.dv, &self.dbias, &self.dsinks]
    }
}

/// A backward pass on a device, with its workspace.
pub struct BackwardCall {
    case: Case,
    wanted: Wanted,
    inputs: Uploaded,
    dout: DeviceTensor,
    dlse: Option<DeviceTensor>,
    /// `dq`, `dk`, `dv`, `dbias`, `dsinks`.
    gradients: [Option<DeviceTensor>; 5],
    scratch: Scratch,
}

impl BackwardCall {
    /// With a workspace of exactly what is needed.
    ///
    /// # Errors
    /// There is no implementation.
    pub fn new(
        ctx: &Context,
        case: &Case,
        wanted: Wanted,
        host: &Host,
    ) -> Result<BackwardCall, Error> {
        let upload = |t: &Option<TestTensor>| t.as_ref().map(|t| t.upload(ctx));
        let mut call = BackwardCall {
            case: case.clone(),
            wanted,
            inputs: Uploaded::new(ctx, &host.inputs),
            dout: host.dout.upload(ctx),
            dlse: upload(&host.dlse),
            gradients: host.gradients().map(upload),
            scratch: Scratch::new(ctx, 0),
        };
        let params = call.params();
        let supported = backward::supported(ctx, &params);
        let size = backward::workspace_size(ctx, &params);
        assert_eq!(supported.as_ref().err(), size.as_ref().err());
        call.scratch = Scratch::new(ctx, size?);
        Ok(call)
    }

    fn params(&mut self) -> Params<'_> {
        let BackwardCall {
            case,
            inputs,
            dout,
            dlse,
            gradients,
            scratch,
            ..
        } = self;
        let [dq, dk, dv, dbias, dsinks] = gradients;
        let mut params = inputs.backward_params(case, dout.view());
        params.dlse = dlse.as_ref().map(DeviceTensor::view);
        params.dq = dq.as_mut().map(DeviceTensor::view_mut);
        params.dk = dk.as_mut().map(DeviceTensor::view_mut);
        params.dv = dv.as_mut().map(DeviceTensor::view_mut);
        params.dbias = dbias.as_mut().map(DeviceTensor::view_mut);
        params.dsinks = dsinks.as_mut().map(DeviceTensor::view_mut);
        params.accumulate = self.wanted.accumulate;
        params.deterministic = self.wanted.deterministic;
        params.workspace = scratch.workspace();
        params
    }

    pub fn implementation(&mut self, ctx: &Context) -> Implementation {
        backward::supported(ctx, &self.params()).unwrap()
    }

    pub fn queue(&mut self, ctx: &Context, stream: Stream) {
        let params = self.params();
        unsloth::ops::attention::backward(ctx, &params, stream).unwrap();
    }

    /// The gradients, absent where they were not asked for.
    pub fn results(&self) -> [Option<TestTensor>; 5] {
        self.scratch.assert_within();
        let download = |t: &Option<DeviceTensor>| t.as_ref().map(DeviceTensor::download_output);
        [0, 1, 2, 3, 4].map(|i| download(&self.gradients[i]))
    }
}

/// Runs a case with fresh inputs and holds its gradients against the definition; where another
/// implementation gives the same bits every time, its gradients too.
pub fn check_backward(ctx: &Context, rng: &mut StdRng, dtype: DType, case: &Case, wanted: Wanted) {
    let host = Host::new(rng, dtype, case, wanted);
    let run = |wanted: Wanted| {
        let mut call = BackwardCall::new(ctx, case, wanted, &host).unwrap();
        call.queue(ctx, Stream::DEFAULT);
        ctx.synchronize(Stream::DEFAULT).unwrap();
        check_gradients(dtype, case, wanted, &host, &call.results());
        call.implementation(ctx)
    };
    if run(wanted) == Implementation::CudaHopper {
        run(Wanted {
            deterministic: true,
            ..wanted
        });
    }
}

/// Holds gradients against the definition.
pub fn check_gradients(
    dtype: DType,
    case: &Case,
    wanted: Wanted,
    host: &Host,
    actual: &[Option<TestTensor>; 5],
) {
    let at = |precision| {
        by_sequence(case, host, |s, o, dout, dlse| {
            attention_backward(s, o, dout, dlse, precision)
        })
    };
    let out_epsilon = match host.inputs.out.dtype {
        DType::F32 => 0.0,
        dtype => epsilon(dtype),
    };
    let exact = at(Precision::Exact);
    let plain = at(Precision::Plain(dtype));
    let rounding = by_sequence(case, host, |s, o, dout, dlse| {
        gradient_rounding(s, o, dout, dlse, out_epsilon)
    });
    let names = ["dq", "dk", "dv", "dbias", "dsinks"];
    for (i, (name, actual)) in names.iter().zip(actual).enumerate() {
        let Some(actual) = actual else { continue };
        let of = |gradients: &[Gradients]| match i {
            0 => of_queries(case, gradients),
            1 | 2 => of_keys(case, host, gradients, i == 2),
            3 => of_bias(host, gradients, |x| x),
            _ => of_sinks(case, gradients),
        };
        let (mut exact_values, mut plain_values) = (of(&exact), of(&plain));
        let mut terms = 0.0;
        if i >= 3 {
            let sizes = match i {
                3 => of_bias(host, &exact, f64::abs),
                _ => exact_values.clone(),
            };
            terms = sizes.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            if wanted.accumulate {
                let before = host.gradients()[i].as_ref().unwrap().values();
                for ((exact, plain), before) in
                    exact_values.iter_mut().zip(&mut plain_values).zip(before)
                {
                    *exact += before;
                    *plain += before;
                }
                terms += 4.0;
            }
        }
        let rule = |what: &str, dtype, a: &[f64], r: &[f64], p: &[f64]| {
            assert_gradient_rule(what, dtype, a, r, p, terms);
        };
        let expected: [&[f64]; 3] = [&exact_values, &plain_values, &of(&rounding)];
        compare(name, rule, actual, expected);
    }
}

/// A function of every sequence, its options, and its gradients of output and LSE.
fn by_sequence(
    case: &Case,
    host: &Host,
    of: impl Fn(&Sequence, &Options, &[f64], &[f64]) -> Gradients,
) -> Vec<Gradients> {
    let dout = host.dout.values();
    let (mut token, mut result) = (0, Vec::new());
    let all_lse = host.inputs.lse.layout.num_elements();
    let dlse = match &host.dlse {
        None => vec![0.0; all_lse],
        Some(dlse) => dlse.values(),
    };
    for (b, (s, o)) in host
        .inputs
        .sequences
        .iter()
        .zip(&host.inputs.options)
        .enumerate()
    {
        let row = case.heads * case.dim_v;
        let dout = &dout[token * row..][..s.q_len * row];
        let dlse: Vec<f64> = (0..case.heads)
            .flat_map(|h| {
                let start = match case.queries {
                    QueryForm::Batched => (b * case.heads + h) * s.q_len,
                    QueryForm::Packed => h * (all_lse / case.heads) + token,
                };
                dlse[start..][..s.q_len].iter()
            })
            .map(|x| if x.is_nan() { 0.0 } else { *x })
            .collect();
        result.push(of(s, o, dout, &dlse));
        token += s.q_len;
    }
    result
}

fn of_queries(case: &Case, gradients: &[Gradients]) -> Vec<f64> {
    let mut values: Vec<f64> = gradients
        .iter()
        .flat_map(|g| g.dq.iter().copied())
        .collect();
    if case.queries == QueryForm::Packed {
        values.extend(vec![f64::NAN; SPARE_TOKENS * case.heads * case.dim]);
    }
    values
}

fn of_keys(case: &Case, host: &Host, gradients: &[Gradients], of_v: bool) -> Vec<f64> {
    let sequences: Vec<Sequence> = (host.inputs.sequences.iter())
        .zip(gradients)
        .map(|(s, g)| Sequence {
            k: g.dk.clone(),
            v: g.dv.clone(),
            ..s.clone()
        })
        .collect();
    let (_, mut values) = match of_v {
        true => case.arranged(&sequences, case.dim_v, |s| &s.v, &[]),
        false => case.arranged(&sequences, case.dim, |s| &s.k, &[]),
    };
    if case.keys == KeyForm::Padded {
        // Padding has gradients, which are zero.
        values
            .iter_mut()
            .filter(|x| x.is_nan())
            .for_each(|x| *x = 0.0);
    }
    values
}

fn of_bias(host: &Host, gradients: &[Gradients], term: fn(f64) -> f64) -> Vec<f64> {
    let Some(bias) = &host.inputs.bias else {
        return Vec::new();
    };
    let shape = bias.layout.shape();
    let mut sums = vec![0.0; bias.layout.num_elements()];
    for (b, g) in gradients.iter().enumerate() {
        for (h, rows) in g.dbias.iter().enumerate() {
            for (i, row) in rows.iter().enumerate() {
                for (j, x) in row.iter().enumerate() {
                    let place = [b, h, i, j]
                        .iter()
                        .zip(shape)
                        .fold(0, |flat, (&i, &n)| flat * n + if n == 1 { 0 } else { i });
                    sums[place] += term(*x);
                }
            }
        }
    }
    sums
}

fn of_sinks(case: &Case, gradients: &[Gradients]) -> Vec<f64> {
    (0..case.heads)
        .map(|h| gradients.iter().map(|g| g.dsinks[h]).sum())
        .collect()
}
