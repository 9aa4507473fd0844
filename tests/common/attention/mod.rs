//! Attention's test cases: sequences and options, and the tensors of every form that say the same.

mod inputs;

use rand::rngs::StdRng;
use unsloth::ops::attention::{self, PageLayout, Params};
use unsloth::{Context, DType, Stream};

pub use inputs::Inputs;
use inputs::SPARE_TOKENS;

use super::reference::attention::{Options, Precision, Sequence, attention, score_rounding};
use super::{DeviceTensor, TestTensor, assert_flash_rule};

/// How queries are given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QueryForm {
    Batched,
    Packed,
}

/// How keys are given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KeyForm {
    Batched,
    /// Batched with lengths, and room for more than the longest.
    Padded,
    Packed,
    Paged(usize, PageLayout),
}

/// How tensors lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Strides {
    Contiguous,
    /// Rows are longer than their data, and begin at an odd element.
    Gaps,
    /// Heads before tokens, as `[B, H, S, D]` transposed.
    HeadsFirst,
}

/// Which sizes of a bias or mask are 1: `[batch, heads, queries, keys]`.
pub type Repeated = [bool; 4];

/// One row of a table.
#[derive(Clone, Debug)]
pub struct Case {
    /// Queries and keys of each sequence.
    pub lens: Vec<(usize, usize)>,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub dim_v: usize,
    pub queries: QueryForm,
    pub keys: KeyForm,
    pub strides: Strides,
    pub kv_dtype: Option<DType>,
    pub out_f32: bool,
    pub scale: Option<f32>,
    pub softcap: Option<f32>,
    pub causal: bool,
    pub window_left: Option<usize>,
    pub window_right: Option<usize>,
    pub bias: Option<(DType, Repeated)>,
    pub mask: Option<Repeated>,
    /// Some for slopes; true for slopes per sequence.
    pub alibi: Option<bool>,
    pub sinks: bool,
    /// Factor of the queries, for large logits.
    pub magnitude: f64,
}

impl Default for Case {
    fn default() -> Self {
        Case {
            lens: vec![(37, 53); 2],
            heads: 4,
            kv_heads: 2,
            dim: 24,
            dim_v: 24,
            queries: QueryForm::Batched,
            keys: KeyForm::Batched,
            strides: Strides::Contiguous,
            kv_dtype: None,
            out_f32: false,
            scale: None,
            softcap: None,
            causal: false,
            window_left: None,
            window_right: None,
            bias: None,
            mask: None,
            alibi: None,
            sinks: false,
            magnitude: 1.0,
        }
    }
}

/// Runs a case through the Rust API: `out` and `lse`.
pub fn run(ctx: &Context, case: &Case, inputs: &Inputs) -> (TestTensor, TestTensor) {
    let upload = |t: &Option<TestTensor>| t.as_ref().map(|t| t.upload(ctx));
    let (q, k, v) = (
        inputs.q.upload(ctx),
        inputs.k.upload(ctx),
        inputs.v.upload(ctx),
    );
    let (mut out, mut lse) = (inputs.out.upload(ctx), inputs.lse.upload(ctx));
    let (bias, mask) = (upload(&inputs.bias), upload(&inputs.mask));
    let (slopes, sinks) = (upload(&inputs.alibi_slopes), upload(&inputs.sinks));
    let (cu_q, cu_k) = (upload(&inputs.cu_seqlens_q), upload(&inputs.cu_seqlens_k));
    let (lens, table) = (upload(&inputs.seq_lens_k), upload(&inputs.block_table));
    let mut params = Params::new(q.view(), k.view(), v.view(), out.view_mut());
    params.lse = Some(lse.view_mut());
    params.bias = bias.as_ref().map(DeviceTensor::view);
    params.mask = mask.as_ref().map(DeviceTensor::view);
    params.alibi_slopes = slopes.as_ref().map(DeviceTensor::view);
    params.sinks = sinks.as_ref().map(DeviceTensor::view);
    params.cu_seqlens_q = cu_q.as_ref().map(DeviceTensor::view);
    params.cu_seqlens_k = cu_k.as_ref().map(DeviceTensor::view);
    params.seq_lens_k = lens.as_ref().map(DeviceTensor::view);
    params.block_table = table.as_ref().map(DeviceTensor::view);
    if let KeyForm::Paged(_, layout) = case.keys {
        params.page_layout = layout;
    }
    let (max_q, max_k) = case.score_bounds();
    params.max_seqlen_q = max_q;
    params.max_seqlen_k = max_k;
    params.scale = case.scale.unwrap_or(0.0);
    params.softcap = case.softcap.unwrap_or(0.0);
    params.causal = case.causal;
    params.window_left = case.window_left.unwrap_or(0);
    params.window_right = case.window_right.unwrap_or(0);
    attention::supported(ctx, &params).unwrap();
    let mut workspace =
        unsloth::Buffer::new(ctx, attention::workspace_size(ctx, &params).unwrap()).unwrap();
    params.workspace = workspace.workspace();
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
    ctx.synchronize(Stream::DEFAULT).unwrap();
    (out.download_output(), lse.download_output())
}

/// What an output should hold: the reference's sequences in the output's order, NaN where nothing may be written.
fn expected(
    case: &Case,
    inputs: &Inputs,
    reference: impl Fn(&Sequence, &Options) -> (Vec<f64>, Vec<f64>),
) -> (Vec<f64>, Vec<f64>) {
    let results: Vec<_> = (inputs.sequences.iter())
        .zip(&inputs.options)
        .map(|(s, o)| reference(s, o))
        .collect();
    let mut out: Vec<f64> = results.iter().flat_map(|r| r.0.iter().copied()).collect();
    out.resize(inputs.out.layout.num_elements(), f64::NAN);
    let lse = match case.queries {
        QueryForm::Batched => results.into_iter().flat_map(|r| r.1).collect(),
        QueryForm::Packed => {
            let mut lse = Vec::new();
            for h in 0..case.heads {
                for (s, r) in inputs.sequences.iter().zip(&results) {
                    lse.extend_from_slice(&r.1[h * s.q_len..][..s.q_len]);
                }
                lse.extend([f64::NAN; SPARE_TOKENS]);
            }
            lse
        }
    };
    (out, lse)
}

/// Runs a case with fresh inputs and holds the results against the definition.
pub fn check(ctx: &Context, rng: &mut StdRng, dtype: DType, case: &Case) {
    let inputs = case.inputs(rng, dtype);
    let (out, lse) = run(ctx, case, &inputs);
    let at = |precision| expected(case, &inputs, |s, o| attention(s, o, precision));
    let (exact_out, exact_lse) = at(Precision::Exact);
    // The result's dtype: one in f32 must be as good as plain f32 code, whatever its inputs.
    let (plain_out, _) = at(Precision::Plain(out.dtype));
    let (_, plain_lse) = at(Precision::Plain(dtype));
    let (rounding_out, rounding_lse) = expected(case, &inputs, score_rounding);
    compare("out", &out, &exact_out, &plain_out, &rounding_out);
    compare("lse", &lse, &exact_lse, &plain_lse, &rounding_lse);
}

/// The flash rule where something was to be written, and untouched poison elsewhere.
///
/// The error of plain code is one sample of what rounding may do, and on a handful of outputs it is small by luck now and then; what
/// rounding scores to f32 costs is added to it.
fn compare(what: &str, actual: &TestTensor, exact: &[f64], plain: &[f64], rounding: &[f64]) {
    let plain: Vec<f64> = (exact.iter().zip(plain).zip(rounding))
        .map(|((&exact, &plain), &rounding)| match plain == exact {
            true => exact + rounding,
            false => plain + rounding.copysign(plain - exact),
        })
        .collect();
    let written: Vec<bool> = exact.iter().map(|x| !x.is_nan()).collect();
    let keep = |values: &[f64]| -> Vec<f64> {
        values
            .iter()
            .zip(&written)
            .filter(|(_, w)| **w)
            .map(|(x, _)| *x)
            .collect()
    };
    let values = actual.values();
    assert_flash_rule(
        what,
        actual.dtype,
        &keep(&values),
        &keep(exact),
        &keep(&plain),
    );
    let size = actual.dtype.size();
    let before = TestTensor::poisoned(actual.dtype, actual.layout).bits();
    for ((now, before), written) in actual
        .bits()
        .chunks(size)
        .zip(before.chunks(size))
        .zip(&written)
    {
        assert!(
            *written || now == before,
            "{what}: a token of no sequence was written"
        );
    }
}
