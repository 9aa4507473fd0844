//! Attention's test cases: sequences and options, and the tensors of every form that say the same.

use rand::Rng;
use rand::rngs::StdRng;
use unsloth::ops::attention::{self, PageLayout, Params};
use unsloth::{Context, DType, Layout, Stream};

use super::reference::attention::{Options, Precision, Sequence, attention, score_rounding};
use super::tensor::{normal, round_to, strided_rows};
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

/// A case's tensors on the host, and the sequences and options they stand for.
pub struct Inputs {
    pub sequences: Vec<Sequence>,
    pub options: Vec<Options>,
    pub q: TestTensor,
    pub k: TestTensor,
    pub v: TestTensor,
    pub out: TestTensor,
    pub lse: TestTensor,
    pub bias: Option<TestTensor>,
    pub mask: Option<TestTensor>,
    pub alibi_slopes: Option<TestTensor>,
    pub sinks: Option<TestTensor>,
    pub cu_seqlens_q: Option<TestTensor>,
    pub cu_seqlens_k: Option<TestTensor>,
    pub seq_lens_k: Option<TestTensor>,
    pub block_table: Option<TestTensor>,
}

/// Tokens at the end of packed tensors that belong to no sequence.
const SPARE_TOKENS: usize = 3;

/// What lies in places that must not be read. Overwriting with a value keeps the poison of integers away from indices.
const UNREAD: f64 = f64::NAN;

fn layout(strides: Strides, shape: &[usize], token: usize) -> Layout {
    match strides {
        Strides::Contiguous => Layout::contiguous(shape).unwrap(),
        Strides::Gaps => strided_rows(shape, 5),
        Strides::HeadsFirst => super::tensor::transposed(shape, token, token + 1),
    }
}

fn ints(values: &[usize], shape: &[usize]) -> TestTensor {
    let values: Vec<f64> = values.iter().map(|&v| v as f64).collect();
    TestTensor::of(DType::I32, shape, &values)
}

fn cumulative(lens: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut sums = vec![0];
    sums.extend(lens.scan(0, |sum, len| {
        *sum += len;
        Some(*sum)
    }));
    sums
}

impl Case {
    /// The most queries and the most keys.
    pub fn max_lens(&self) -> (usize, usize) {
        let q = self.lens.iter().map(|l| l.0).max().unwrap_or(0);
        let k = self.lens.iter().map(|l| l.1).max().unwrap_or(0);
        (q, k)
    }

    /// Random tensors of `dtype`.
    pub fn inputs(&self, rng: &mut StdRng, dtype: DType) -> Inputs {
        let kv_dtype = self.kv_dtype.unwrap_or(dtype);
        let sequences: Vec<Sequence> = self
            .lens
            .iter()
            .map(|&lens| self.sequence(rng, dtype, kv_dtype, lens))
            .collect();
        let batch = self.lens.len();
        let skew = usize::from(self.strides == Strides::Gaps);

        let q_shape = |dim| match self.queries {
            QueryForm::Batched => vec![batch, self.max_lens().0, self.heads, dim],
            QueryForm::Packed => vec![self.total_q(), self.heads, dim],
        };
        let q_token = q_shape(0).len() - 3;
        let mut q = TestTensor::poisoned_at(
            dtype,
            layout(self.strides, &q_shape(self.dim), q_token),
            skew,
        );
        let mut q_values: Vec<f64> = sequences.iter().flat_map(|s| s.q.iter().copied()).collect();
        q_values.resize(q.layout.num_elements(), UNREAD);
        q.set_values(&q_values);
        let out_dtype = if self.out_f32 { DType::F32 } else { dtype };
        let out = TestTensor::poisoned_at(
            out_dtype,
            layout(self.strides, &q_shape(self.dim_v), q_token),
            skew,
        );
        let lse = match self.queries {
            QueryForm::Batched => vec![batch, self.heads, self.max_lens().0],
            QueryForm::Packed => vec![self.heads, self.total_q()],
        };
        let lse = TestTensor::poisoned_at(DType::F32, layout_of_lse(self.strides, &lse), skew);

        let (block_table, pages) = self.pages(rng);
        let kv = |dim: usize, of: fn(&Sequence) -> &[f64]| {
            let (shape, values) = self.arranged(&sequences, dim, of, &pages);
            let token = match self.keys {
                KeyForm::Packed => 0,
                _ => 1,
            };
            let mut t =
                TestTensor::poisoned_at(kv_dtype, layout(self.strides, &shape, token), skew);
            t.set_values(&values);
            t
        };
        let k = kv(self.dim, |s| &s.k);
        let v = kv(self.dim_v, |s| &s.v);

        let mut options: Vec<Options> = (0..batch)
            .map(|_| Options {
                scale: self.scale.map(f64::from),
                softcap: self.softcap.map(f64::from),
                causal: self.causal,
                window_left: self.window_left,
                window_right: self.window_right,
                ..Options::default()
            })
            .collect();
        let bias = self.bias.map(|(dtype, repeated)| {
            let t = self.scores(dtype, repeated, || match rng.random_range(0..20) {
                0 => f64::NEG_INFINITY,
                _ => normal(rng),
            });
            for (o, table) in options.iter_mut().zip(self.expanded(&t)) {
                o.bias = Some(table);
            }
            t
        });
        let mask = self.mask.map(|repeated| {
            let t = self.scores(DType::Bool, repeated, || {
                f64::from(u8::from(rng.random_bool(0.7)))
            });
            for (o, table) in options.iter_mut().zip(self.expanded(&t)) {
                let as_bools = |row: Vec<f64>| row.into_iter().map(|x| x != 0.0).collect();
                let rows = |rows: Vec<Vec<f64>>| rows.into_iter().map(as_bools).collect();
                o.mask = Some(table.into_iter().map(rows).collect());
            }
            t
        });
        let alibi_slopes = self.alibi.map(|per_sequence| {
            let rows = if per_sequence { batch } else { 1 };
            let values: Vec<f64> = (0..rows * self.heads)
                .map(|_| round_to(DType::F32, rng.random_range(0.0..0.5)))
                .collect();
            for (b, o) in options.iter_mut().enumerate() {
                o.alibi_slopes = Some(values[b % rows * self.heads..][..self.heads].to_vec());
            }
            match per_sequence {
                true => TestTensor::from_values(
                    DType::F32,
                    strided_rows(&[batch, self.heads], 2),
                    &values,
                ),
                false => TestTensor::of(DType::F32, &[self.heads], &values),
            }
        });
        let sinks = self.sinks.then(|| {
            let t = TestTensor::normal(rng, DType::F32, Layout::contiguous(&[self.heads]).unwrap());
            for o in &mut options {
                o.sinks = Some(t.values());
            }
            t
        });
        let cu = |lens: Vec<usize>| ints(&cumulative(lens.into_iter()), &[batch + 1]);
        let q_lens = || self.lens.iter().map(|l| l.0).collect();
        let k_lens = || -> Vec<usize> { self.lens.iter().map(|l| l.1).collect() };
        Inputs {
            sequences,
            options,
            q,
            k,
            v,
            out,
            lse,
            bias,
            mask,
            alibi_slopes,
            sinks,
            cu_seqlens_q: (self.queries == QueryForm::Packed).then(|| cu(q_lens())),
            cu_seqlens_k: (self.keys == KeyForm::Packed).then(|| cu(k_lens())),
            seq_lens_k: matches!(self.keys, KeyForm::Padded | KeyForm::Paged(..))
                .then(|| ints(&k_lens(), &[batch])),
            block_table,
        }
    }

    fn sequence(
        &self,
        rng: &mut StdRng,
        dtype: DType,
        kv_dtype: DType,
        (q_len, k_len): (usize, usize),
    ) -> Sequence {
        let mut random = |dtype, n: usize, factor: f64| -> Vec<f64> {
            (0..n)
                .map(|_| round_to(dtype, factor * normal(rng)))
                .collect()
        };
        Sequence {
            q_len,
            k_len,
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            dim_v: self.dim_v,
            q: random(dtype, q_len * self.heads * self.dim, self.magnitude),
            k: random(kv_dtype, k_len * self.kv_heads * self.dim, 1.0),
            v: random(kv_dtype, k_len * self.kv_heads * self.dim_v, 1.0),
        }
    }

    fn total_q(&self) -> usize {
        self.lens.iter().map(|l| l.0).sum::<usize>() + SPARE_TOKENS
    }

    /// For paged keys a block table in random order, and the pages of each sequence.
    fn pages(&self, rng: &mut StdRng) -> (Option<TestTensor>, Vec<Vec<usize>>) {
        let KeyForm::Paged(page_size, _) = self.keys else {
            return (None, Vec::new());
        };
        let counts: Vec<usize> = self.lens.iter().map(|l| l.1.div_ceil(page_size)).collect();
        let num_pages = counts.iter().sum::<usize>() + 2;
        let mut free: Vec<usize> = (0..num_pages).collect();
        let pages: Vec<Vec<usize>> = counts
            .iter()
            .map(|&n| {
                (0..n)
                    .map(|_| free.swap_remove(rng.random_range(0..free.len())))
                    .collect()
            })
            .collect();
        let max_pages = counts.iter().max().unwrap_or(&0) + 1;
        // Entries that hold no keys name no page.
        let values: Vec<f64> = pages
            .iter()
            .flat_map(|row: &Vec<usize>| {
                (0..max_pages).map(|i| row.get(i).map_or(-1.0, |&p| p as f64))
            })
            .collect();
        let table = TestTensor::from_values(
            DType::I32,
            strided_rows(&[pages.len(), max_pages], 1),
            &values,
        );
        (Some(table), pages)
    }

    /// Shape and elements of keys or values in this case's form, with NaN where nothing may be read.
    fn arranged(
        &self,
        sequences: &[Sequence],
        dim: usize,
        of: fn(&Sequence) -> &[f64],
        pages: &[Vec<usize>],
    ) -> (Vec<usize>, Vec<f64>) {
        let (heads, batch, max_k) = (self.kv_heads, sequences.len(), self.max_lens().1);
        let shape = match self.keys {
            KeyForm::Batched => vec![batch, max_k, heads, dim],
            KeyForm::Padded => vec![batch, max_k + 2, heads, dim],
            KeyForm::Packed => {
                let total: usize = self.lens.iter().map(|l| l.1).sum();
                vec![total + SPARE_TOKENS, heads, dim]
            }
            KeyForm::Paged(page_size, layout) => {
                let num_pages = pages.iter().map(Vec::len).sum::<usize>() + 2;
                match layout {
                    PageLayout::TokenMajor => vec![num_pages, page_size, heads, dim],
                    PageLayout::HeadMajor => vec![num_pages, heads, page_size, dim],
                }
            }
        };
        let mut values = vec![UNREAD; shape.iter().product()];
        let mut token_before = 0;
        for (b, s) in sequences.iter().enumerate() {
            for (row, from) in of(s).chunks(dim.max(1)).enumerate() {
                let (j, h) = (row / heads, row % heads);
                let to = match self.keys {
                    KeyForm::Batched | KeyForm::Padded => (b * shape[1] + j) * heads + h,
                    KeyForm::Packed => (token_before + j) * heads + h,
                    KeyForm::Paged(size, PageLayout::TokenMajor) => {
                        (pages[b][j / size] * size + j % size) * heads + h
                    }
                    KeyForm::Paged(size, PageLayout::HeadMajor) => {
                        (pages[b][j / size] * heads + h) * size + j % size
                    }
                };
                values[to * dim..][..dim].copy_from_slice(from);
            }
            token_before += s.k_len;
        }
        (shape, values)
    }

    /// A bias or mask.
    fn scores(
        &self,
        dtype: DType,
        repeated: Repeated,
        mut value: impl FnMut() -> f64,
    ) -> TestTensor {
        let (q, k) = self.score_bounds();
        let sizes = [self.lens.len(), self.heads, q, k];
        let shape: Vec<usize> = sizes
            .iter()
            .zip(repeated)
            .map(|(&n, r)| if r { 1 } else { n })
            .collect();
        let layout = strided_rows(&shape, 3);
        let values: Vec<f64> = (0..layout.num_elements())
            .map(|_| round_to(dtype, value()))
            .collect();
        TestTensor::from_values(dtype, layout, &values)
    }

    /// Queries and keys that a bias or mask must cover.
    fn score_bounds(&self) -> (usize, usize) {
        let (q, k) = self.max_lens();
        let k = match self.keys {
            KeyForm::Padded => k + 2,
            _ => k,
        };
        (q, k)
    }

    /// A bias or mask per sequence as `[head][query][key]`.
    fn expanded(&self, t: &TestTensor) -> Vec<Vec<Vec<Vec<f64>>>> {
        let (values, shape) = (t.values(), t.layout.shape());
        let at = |index: [usize; 4]| {
            let flat = index
                .iter()
                .zip(shape)
                .fold(0, |flat, (&i, &n)| flat * n + if n == 1 { 0 } else { i });
            values[flat]
        };
        let key_row = |b, h, i, k_len| (0..k_len).map(|j| at([b, h, i, j])).collect();
        let heads = |b: usize, q_len: usize, k_len: usize| {
            (0..self.heads)
                .map(|h| (0..q_len).map(|i| key_row(b, h, i, k_len)).collect())
                .collect()
        };
        self.lens
            .iter()
            .enumerate()
            .map(|(b, &(q_len, k_len))| heads(b, q_len, k_len))
            .collect()
    }
}

fn layout_of_lse(strides: Strides, shape: &[usize]) -> Layout {
    match strides {
        Strides::Contiguous => Layout::contiguous(shape).unwrap(),
        Strides::Gaps => strided_rows(shape, 3),
        // [.., heads, queries] stored with heads last.
        Strides::HeadsFirst => super::tensor::transposed(shape, shape.len() - 2, shape.len() - 1),
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
