//! Attention's test cases: sequences and options, and the tensors of every form that say the same.

pub mod backward;
mod inputs;

use rand::rngs::StdRng;
use unsloth::ops::attention::backward::Params as Backward;
use unsloth::ops::attention::{self, PageLayout, Params};
use unsloth::{Backend, Buffer, Context, DType, Error, Stream, TensorRef, Workspace};

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
    /// Some for scales of keys and values that are codes; true for one of each head.
    pub kv_scales: Option<bool>,
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
            kv_scales: None,
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

/// A case's tensors in a context's memory.
pub struct Uploaded {
    pub q: DeviceTensor,
    pub k: DeviceTensor,
    pub v: DeviceTensor,
    kv_scales: Option<[DeviceTensor; 2]>,
    pub out: DeviceTensor,
    pub lse: DeviceTensor,
    bias: Option<DeviceTensor>,
    mask: Option<DeviceTensor>,
    alibi_slopes: Option<DeviceTensor>,
    sinks: Option<DeviceTensor>,
    cu_seqlens_q: Option<DeviceTensor>,
    cu_seqlens_k: Option<DeviceTensor>,
    pub seq_lens_k: Option<DeviceTensor>,
    block_table: Option<DeviceTensor>,
}

impl Uploaded {
    pub fn new(ctx: &Context, inputs: &Inputs) -> Uploaded {
        let upload = |t: &Option<TestTensor>| t.as_ref().map(|t| t.upload(ctx));
        Uploaded {
            q: inputs.q.upload(ctx),
            k: inputs.k.upload(ctx),
            v: inputs.v.upload(ctx),
            kv_scales: (inputs.kv_scales.as_ref())
                .map(|both| both.each_ref().map(|t| t.upload(ctx))),
            out: inputs.out.upload(ctx),
            lse: inputs.lse.upload(ctx),
            bias: upload(&inputs.bias),
            mask: upload(&inputs.mask),
            alibi_slopes: upload(&inputs.alibi_slopes),
            sinks: upload(&inputs.sinks),
            cu_seqlens_q: upload(&inputs.cu_seqlens_q),
            cu_seqlens_k: upload(&inputs.cu_seqlens_k),
            seq_lens_k: upload(&inputs.seq_lens_k),
            block_table: upload(&inputs.block_table),
        }
    }

    /// Everything but a workspace.
    pub fn params(&mut self, case: &Case) -> Params<'_> {
        fn view(t: &Option<DeviceTensor>) -> Option<TensorRef<'_>> {
            t.as_ref().map(DeviceTensor::view)
        }
        let (mut k, mut v) = (self.k.view(), self.v.view());
        if let Some([of_k, of_v]) = &self.kv_scales {
            k = k.with_scales(of_k.view()).unwrap();
            v = v.with_scales(of_v.view()).unwrap();
        }
        let mut params = Params::new(self.q.view(), k, v, self.out.view_mut());
        params.lse = Some(self.lse.view_mut());
        params.bias = view(&self.bias);
        params.mask = view(&self.mask);
        params.alibi_slopes = view(&self.alibi_slopes);
        params.sinks = view(&self.sinks);
        params.cu_seqlens_q = view(&self.cu_seqlens_q);
        params.cu_seqlens_k = view(&self.cu_seqlens_k);
        params.seq_lens_k = view(&self.seq_lens_k);
        params.block_table = view(&self.block_table);
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
        params
    }

    /// Everything of the backward pass but gradients and a workspace.
    pub fn backward_params<'a>(&'a self, case: &Case, dout: TensorRef<'a>) -> Backward<'a> {
        fn view(t: &Option<DeviceTensor>) -> Option<TensorRef<'_>> {
            t.as_ref().map(DeviceTensor::view)
        }
        let (q, k, v) = (self.q.view(), self.k.view(), self.v.view());
        let mut params = Backward::new(q, k, v, self.out.view(), self.lse.view(), dout);
        params.bias = view(&self.bias);
        params.mask = view(&self.mask);
        params.alibi_slopes = view(&self.alibi_slopes);
        params.sinks = view(&self.sinks);
        params.cu_seqlens_q = view(&self.cu_seqlens_q);
        params.cu_seqlens_k = view(&self.cu_seqlens_k);
        params.seq_lens_k = view(&self.seq_lens_k);
        (params.max_seqlen_q, params.max_seqlen_k) = case.score_bounds();
        params.scale = case.scale.unwrap_or(0.0);
        params.softcap = case.softcap.unwrap_or(0.0);
        params.causal = case.causal;
        params.window_left = case.window_left.unwrap_or(0);
        params.window_right = case.window_right.unwrap_or(0);
        params
    }

    /// `out` and `lse`.
    pub fn results(&self) -> (TestTensor, TestTensor) {
        (self.out.download_output(), self.lse.download_output())
    }
}

/// Memory for a workspace of exactly this size, all NaN, with a guard behind it.
pub struct Scratch {
    buffer: Buffer,
    size: usize,
}

impl Scratch {
    const GUARD: usize = Workspace::ALIGNMENT;

    pub fn new(ctx: &Context, size: usize) -> Scratch {
        let size_in_words = size.div_ceil(4) * 4;
        let buffer = Buffer::new(ctx, size_in_words + Self::GUARD).unwrap();
        let mut scratch = Scratch { buffer, size };
        scratch.poison();
        scratch
    }

    pub fn size(&self) -> usize {
        self.size
    }

    pub fn poison(&mut self) {
        let nan = vec![f32::from_bits(0x7fc0_7fc0); self.buffer.size() / 4];
        self.buffer
            .copy_from_slice(0, &nan, Stream::DEFAULT)
            .unwrap();
        self.buffer.context().synchronize(Stream::DEFAULT).unwrap();
    }

    pub fn workspace(&mut self) -> Workspace<'_> {
        // SAFETY: the buffer has more than `size` bytes, is borrowed exclusively, and of the
        // context.
        unsafe { Workspace::from_raw(self.buffer.as_ptr(), self.size) }
    }

    /// Panics if the guard was written.
    pub fn assert_within(&self) {
        let start = self.buffer.size() - Self::GUARD;
        let guard: Vec<i32> = self
            .buffer
            .to_vec(start, Self::GUARD / 4, Stream::DEFAULT)
            .unwrap();
        assert!(guard.iter().all(|word| *word == 0x7fc0_7fc0));
    }
}

/// What the CUDA backend has no kernel for, and says so.
fn refused(ctx: &Context, case: &Case) -> bool {
    ctx.backend() == Backend::Cuda && case.dim.max(case.dim_v) > 256
}

/// A case on a device, with its workspace.
pub struct Call {
    pub case: Case,
    pub tensors: Uploaded,
    pub scratch: Scratch,
}

impl Call {
    pub fn new(ctx: &Context, case: &Case, inputs: &Inputs) -> Call {
        let mut tensors = Uploaded::new(ctx, inputs);
        let size = attention::workspace_size(ctx, &tensors.params(case)).unwrap();
        Call {
            case: case.clone(),
            tensors,
            scratch: Scratch::new(ctx, size),
        }
    }

    pub fn queue(&mut self, ctx: &Context, stream: Stream) {
        let mut params = self.tensors.params(&self.case);
        params.workspace = self.scratch.workspace();
        attention::forward(ctx, &params, stream).unwrap();
    }

    pub fn bits(&self) -> (Vec<u8>, Vec<u8>) {
        self.scratch.assert_within();
        let (out, lse) = self.tensors.results();
        (out.bits(), lse.bits())
    }
}

/// Runs a case through the Rust API: `out` and `lse`.
pub fn run(ctx: &Context, case: &Case, inputs: &Inputs) -> (TestTensor, TestTensor) {
    let mut tensors = Uploaded::new(ctx, inputs);
    let mut params = tensors.params(case);
    attention::supported(ctx, &params).unwrap();
    let size = attention::workspace_size(ctx, &params).unwrap();
    let mut scratch = Scratch::new(ctx, size);
    params.workspace = scratch.workspace();
    attention::forward(ctx, &params, Stream::DEFAULT).unwrap();
    ctx.synchronize(Stream::DEFAULT).unwrap();
    scratch.assert_within();
    tensors.results()
}

/// The queries and the call refuse a case alike, and nothing is written.
fn check_refusal(ctx: &Context, case: &Case, inputs: &Inputs) {
    let mut tensors = Uploaded::new(ctx, inputs);
    let params = tensors.params(case);
    let error = attention::supported(ctx, &params).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    assert_eq!(attention::workspace_size(ctx, &params), Err(error.clone()));
    assert_eq!(
        attention::forward(ctx, &params, Stream::DEFAULT),
        Err(error)
    );
    ctx.synchronize(Stream::DEFAULT).unwrap();
    let (out, lse) = tensors.results();
    assert!(out.bits() == inputs.out.bits() && lse.bits() == inputs.lse.bits());
}

/// What an output should hold: the reference's sequences in the output's order, NaN where nothing
/// may be written.
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
    if refused(ctx, case) {
        return check_refusal(ctx, case, &inputs);
    }
    let (out, lse) = run(ctx, case, &inputs);
    check_results(ctx, dtype, case, &inputs, &out, &lse);
}

/// Holds results against the definition.
pub fn check_results(
    ctx: &Context,
    dtype: DType,
    case: &Case,
    inputs: &Inputs,
    out: &TestTensor,
    lse: &TestTensor,
) {
    let at = |precision| expected(case, inputs, |s, o| attention(s, o, precision));
    let (exact_out, exact_lse) = at(Precision::Exact);
    // The result's dtype: one in f32 must be as good as plain f32 code, whatever its inputs; but
    // tensor cores take weights of 16 bits.
    let plain_dtype = match ctx.backend() {
        Backend::Cuda => dtype,
        _ => out.dtype,
    };
    let (plain_out, mut plain_lse) = at(Precision::Plain(plain_dtype));
    if plain_dtype != dtype {
        (_, plain_lse) = at(Precision::Plain(dtype));
    }
    let (rounding_out, rounding_lse) = expected(case, inputs, score_rounding);
    let rule = assert_flash_rule;
    compare("out", rule, out, [&exact_out, &plain_out, &rounding_out]);
    compare("lse", rule, lse, [&exact_lse, &plain_lse, &rounding_lse]);
}

/// A rule where something was to be written, and untouched poison elsewhere.
///
/// The error of plain code is one sample of what rounding may do, and on a handful of outputs it is
/// small by luck now and then; what rounding scores to f32 costs is added to it.
fn compare(
    what: &str,
    rule: impl Fn(&str, DType, &[f64], &[f64], &[f64]),
    actual: &TestTensor,
    [exact, plain, rounding]: [&[f64]; 3],
) {
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
    rule(
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
