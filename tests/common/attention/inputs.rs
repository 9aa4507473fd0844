//! A case's tensors: the same sequences in every form.

use rand::Rng;
use rand::rngs::StdRng;
use unsloth::ops::attention::PageLayout;
use unsloth::{DType, Layout};

use super::{Case, KeyForm, QueryForm, Repeated, Strides};
use crate::common::TestTensor;
use crate::common::reference::attention::{Options, Sequence};
use crate::common::tensor::{normal, round_to, strided_rows, transposed};

/// A case's tensors on the host, and the sequences and options they stand for.
pub struct Inputs {
    pub sequences: Vec<Sequence>,
    pub options: Vec<Options>,
    pub q: TestTensor,
    pub k: TestTensor,
    pub v: TestTensor,
    pub kv_scales: Option<[TestTensor; 2]>,
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
pub const SPARE_TOKENS: usize = 3;

/// What lies in places that must not be read. Overwriting with a value keeps the poison of integers
/// away from indices.
const UNREAD: f64 = f64::NAN;

fn layout(strides: Strides, shape: &[usize], token: usize) -> Layout {
    match strides {
        Strides::Contiguous => Layout::contiguous(shape).unwrap(),
        Strides::Gaps => strided_rows(shape, 5),
        Strides::HeadsFirst => transposed(shape, token, token + 1),
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
        let mut sequences: Vec<Sequence> = self
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
        let kv_scales = (self.kv_scales).map(|per_head| {
            [0, 1].map(|_| self.scaled_by(rng, if per_head { self.kv_heads } else { 1 }))
        });
        if let Some([of_k, of_v]) = &kv_scales {
            // What codes are multiplied by is what sequences hold.
            for s in &mut sequences {
                scale_heads(&mut s.k, (self.kv_heads, self.dim), &of_k.values());
                scale_heads(&mut s.v, (self.kv_heads, self.dim_v), &of_v.values());
            }
        }

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
            kv_scales,
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

    /// As many scales, f32, from 0.05 to 1.5.
    fn scaled_by(&self, rng: &mut StdRng, count: usize) -> TestTensor {
        let values: Vec<f64> = (0..count)
            .map(|_| round_to(DType::F32, rng.random_range(0.05..1.5)))
            .collect();
        TestTensor::of(DType::F32, &[count], &values)
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

    /// Shape and elements of keys or values in this case's form, with NaN where nothing may be
    /// read.
    pub(super) fn arranged(
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
    pub fn score_bounds(&self) -> (usize, usize) {
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

/// Multiplies rows `[.., heads, dim]` by the scale of their head, or by the one that there is.
fn scale_heads(rows: &mut [f64], (heads, dim): (usize, usize), scales: &[f64]) {
    for (i, row) in rows.chunks_mut(dim).enumerate() {
        for x in row {
            *x *= scales[i % heads % scales.len()];
        }
    }
}

fn layout_of_lse(strides: Strides, shape: &[usize]) -> Layout {
    match strides {
        Strides::Contiguous => Layout::contiguous(shape).unwrap(),
        Strides::Gaps => strided_rows(shape, 3),
        // [.., heads, queries] stored with heads last.
        Strides::HeadsFirst => transposed(shape, shape.len() - 2, shape.len() - 1),
    }
}
