//! Attention from its definition: every score in memory, one loop per symbol.

use unsloth::DType;

use crate::common::tensor::round_to;

/// One sequence: `q` is `[q_len, heads, dim]`, `k` `[k_len, kv_heads, dim]`, `v` `[k_len, kv_heads, dim_v]`.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    pub q_len: usize,
    pub k_len: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub dim_v: usize,
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
}

/// What may be asked beyond plain attention. Scores are indexed `[head][query][key]`.
#[derive(Clone, Debug, Default)]
pub struct Options {
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    pub causal: bool,
    pub window_left: Option<usize>,
    pub window_right: Option<usize>,
    pub bias: Option<Vec<Vec<Vec<f64>>>>,
    pub mask: Option<Vec<Vec<Vec<bool>>>>,
    pub alibi_slopes: Option<Vec<f64>>,
    pub sinks: Option<Vec<f64>>,
}

/// How precisely to compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Precision {
    /// In f64: the truth.
    Exact,
    /// As plain code in this dtype does: scores, probabilities and results are rounded to it; every operation between is f32.
    Plain(DType),
}

impl Precision {
    /// A stored value.
    fn stored(self, x: f64) -> f64 {
        match self {
            Precision::Exact => x,
            Precision::Plain(dtype) => round_to(dtype, x),
        }
    }

    /// An intermediate value.
    fn computed(self, x: f64) -> f64 {
        match self {
            Precision::Exact => x,
            Precision::Plain(_) => f64::from(x as f32),
        }
    }
}

/// `out` `[q_len, heads, dim_v]` and `lse` `[heads, q_len]`.
pub fn attention(s: &Sequence, o: &Options, precision: Precision) -> (Vec<f64>, Vec<f64>) {
    let mut out = vec![0.0; s.q_len * s.heads * s.dim_v];
    let mut lse = vec![0.0; s.heads * s.q_len];
    for h in 0..s.heads {
        for i in 0..s.q_len {
            let scores: Vec<f64> = (0..s.k_len)
                .map(|j| score(s, o, precision, h, i, j))
                .collect();
            let sink = o.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[h]);
            let max = scores.iter().copied().fold(sink, f64::max);
            lse[h * s.q_len + i] = max;
            if max == f64::NEG_INFINITY {
                continue;
            }
            let weights: Vec<f64> = scores
                .iter()
                .map(|x| precision.computed(precision.computed(x - max).exp()))
                .collect();
            let mut sum = precision.computed(precision.computed(sink - max).exp());
            for w in &weights {
                sum = precision.computed(sum + w);
            }
            lse[h * s.q_len + i] = precision.computed(max + precision.computed(sum.ln()));
            let weights: Vec<f64> = weights
                .iter()
                .map(|w| precision.stored(precision.computed(w / sum)))
                .collect();
            let kv_head = h / (s.heads / s.kv_heads);
            for x in 0..s.dim_v {
                let mut acc = 0.0;
                for (j, w) in weights.iter().enumerate() {
                    let v = s.v[(j * s.kv_heads + kv_head) * s.dim_v + x];
                    acc = precision.computed(acc + precision.computed(w * v));
                }
                out[(i * s.heads + h) * s.dim_v + x] = precision.stored(acc);
            }
        }
    }
    (out, lse)
}

/// The score of query `i` and key `j` in head `h`; −∞ where the key is hidden.
fn score(s: &Sequence, o: &Options, precision: Precision, h: usize, i: usize, j: usize) -> f64 {
    let kv_head = h / (s.heads / s.kv_heads);
    // The last query is at the last key.
    let (position, key) = (i as i128 + s.k_len as i128 - s.q_len as i128, j as i128);
    let hidden = o.causal && key > position
        || o.window_left.is_some_and(|w| key <= position - w as i128)
        || o.window_right.is_some_and(|w| key >= position + w as i128)
        || o.mask.as_ref().is_some_and(|mask| !mask[h][i][j]);
    if hidden {
        return f64::NEG_INFINITY;
    }
    let q = &s.q[(i * s.heads + h) * s.dim..][..s.dim];
    let k = &s.k[(j * s.kv_heads + kv_head) * s.dim..][..s.dim];
    let mut dot = 0.0;
    for (q, k) in q.iter().zip(k) {
        dot = precision.computed(dot + precision.computed(q * k));
    }
    let scale = o.scale.unwrap_or(1.0 / (s.dim as f64).sqrt());
    let mut x = precision.stored(precision.computed(dot * precision.computed(scale)));
    if let Some(cap) = o.softcap {
        x = precision.stored(cap * precision.computed(precision.computed(x / cap).tanh()));
    }
    if let Some(bias) = &o.bias {
        x = precision.stored(x + bias[h][i][j]);
    }
    if let Some(slopes) = &o.alibi_slopes {
        x = precision.stored(x - precision.computed(slopes[h] * (position - key).abs() as f64));
    }
    x
}

/// What rounding scores to f32 may cost, for outputs and LSE as [`attention`] orders them: a score is a sum of terms, known to no
/// better than their size times the spacing of f32, and shifts the weights by as much.
pub fn score_rounding(s: &Sequence, o: &Options) -> (Vec<f64>, Vec<f64>) {
    let mut out = vec![0.0; s.q_len * s.heads * s.dim_v];
    let mut lse = vec![0.0; s.heads * s.q_len];
    let scale = o.scale.unwrap_or(1.0 / (s.dim as f64).sqrt()).abs();
    for h in 0..s.heads {
        let kv_head = h / (s.heads / s.kv_heads);
        for i in 0..s.q_len {
            let scores: Vec<f64> = (0..s.k_len)
                .map(|j| score(s, o, Precision::Exact, h, i, j))
                .collect();
            let size = |j: usize| {
                let q = &s.q[(i * s.heads + h) * s.dim..][..s.dim];
                let k = &s.k[(j * s.kv_heads + kv_head) * s.dim..][..s.dim];
                let product: f64 = q.iter().zip(k).map(|(q, k)| (q * k).abs()).sum();
                scale * product + scores[j].abs()
            };
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if max == f64::NEG_INFINITY {
                continue;
            }
            // Keys of no weight do not matter, however large their terms.
            let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let shift = (0..s.k_len)
                .filter(|&j| weights[j] > 1e-9)
                .map(size)
                .fold(0.0, f64::max)
                * f64::from(f32::EPSILON);
            lse[h * s.q_len + i] = shift;
            for x in 0..s.dim_v {
                let v = |j: usize| s.v[(j * s.kv_heads + kv_head) * s.dim_v + x].abs();
                let spread: f64 = (0..s.k_len).map(|j| weights[j] / sum * v(j)).sum();
                out[(i * s.heads + h) * s.dim_v + x] = shift * spread;
            }
        }
    }
    (out, lse)
}
