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
            let out = &mut out[(i * s.heads + h) * s.dim_v..][..s.dim_v];
            for (j, w) in weights.iter().enumerate() {
                let v = &s.v[(j * s.kv_heads + kv_head) * s.dim_v..][..s.dim_v];
                for (acc, v) in out.iter_mut().zip(v) {
                    *acc = precision.computed(*acc + precision.computed(w * v));
                }
            }
            out.iter_mut().for_each(|x| *x = precision.stored(*x));
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
            let spread = &mut out[(i * s.heads + h) * s.dim_v..][..s.dim_v];
            for (j, w) in weights.iter().enumerate() {
                let v = &s.v[(j * s.kv_heads + kv_head) * s.dim_v..][..s.dim_v];
                for (spread, v) in spread.iter_mut().zip(v) {
                    *spread += w / sum * v.abs();
                }
            }
            spread.iter_mut().for_each(|x| *x *= shift);
        }
    }
    (out, lse)
}

/// Gradients as [`attention_backward`] gives them: of `q`, `k` and `v` in their order, of the bias as
/// `[head][query][key]`, and of the sinks.
#[derive(Clone, Debug)]
pub struct Gradients {
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub dbias: Vec<Vec<Vec<f64>>>,
    pub dsinks: Vec<f64>,
}

impl Gradients {
    fn zeros(s: &Sequence) -> Gradients {
        Gradients {
            dq: vec![0.0; s.q.len()],
            dk: vec![0.0; s.k.len()],
            dv: vec![0.0; s.v.len()],
            dbias: vec![vec![vec![0.0; s.k_len]; s.q_len]; s.heads],
            dsinks: vec![0.0; s.heads],
        }
    }
}

/// Gradients of a loss whose gradients with respect to `out` and `lse` are given, in their order.
pub fn attention_backward(
    s: &Sequence,
    o: &Options,
    dout: &[f64],
    dlse: &[f64],
    precision: Precision,
) -> Gradients {
    let (stored, computed) = (|x| precision.stored(x), |x| precision.computed(x));
    let scale = computed(o.scale.unwrap_or(1.0 / (s.dim as f64).sqrt()));
    let mut g = Gradients::zeros(s);
    for h in 0..s.heads {
        let kv_head = h / (s.heads / s.kv_heads);
        for i in 0..s.q_len {
            let weights = weights(s, o, precision, h, i);
            let Some((weights, of_sink)) = weights else {
                continue;
            };
            let dout = &dout[(i * s.heads + h) * s.dim_v..][..s.dim_v];
            let v = |j: usize| &s.v[(j * s.kv_heads + kv_head) * s.dim_v..][..s.dim_v];
            let dot = |v: &[f64]| {
                let terms = dout.iter().zip(v).map(|(a, b)| computed(a * b));
                terms.fold(0.0, |sum, x| computed(sum + x))
            };
            let dweight = |j: usize| match weights[j] {
                // Hidden, or too small to matter: the key has no part in anything.
                0.0 => 0.0,
                _ => stored(dot(v(j))),
            };
            let dweights: Vec<f64> = (0..s.k_len).map(dweight).collect();
            let terms = weights.iter().zip(&dweights).map(|(w, d)| computed(w * d));
            let delta = terms.fold(0.0, |sum, x| computed(sum + x)) - dlse[h * s.q_len + i];
            g.dsinks[h] = computed(g.dsinks[h] - computed(of_sink * delta));
            let at = (i * s.heads + h) * s.dim;
            let (q, dq) = (&s.q[at..][..s.dim], &mut g.dq[at..][..s.dim]);
            for j in 0..s.k_len {
                if weights[j] == 0.0 {
                    continue;
                }
                let ds = stored(computed(weights[j] * computed(dweights[j] - delta)));
                g.dbias[h][i][j] = ds;
                let slope = softcap_slope(s, o, precision, h, i, j);
                let dx = stored(computed(stored(computed(ds * slope)) * scale));
                let at = (j * s.kv_heads + kv_head) * s.dim;
                let (k, dk) = (&s.k[at..][..s.dim], &mut g.dk[at..][..s.dim]);
                for (dq, k) in dq.iter_mut().zip(k) {
                    *dq = computed(*dq + computed(dx * k));
                }
                for (dk, q) in dk.iter_mut().zip(q) {
                    *dk = computed(*dk + computed(dx * q));
                }
                let v = (j * s.kv_heads + kv_head) * s.dim_v;
                for (x, dout) in g.dv[v..].iter_mut().zip(dout) {
                    *x = computed(*x + computed(weights[j] * dout));
                }
            }
        }
    }
    for gradient in [&mut g.dq, &mut g.dk, &mut g.dv] {
        gradient.iter_mut().for_each(|x| *x = stored(*x));
    }
    g
}

/// The softmax of a query's scores, and what the sink has of it; `None` if it sees no key and no sink.
fn weights(
    s: &Sequence,
    o: &Options,
    precision: Precision,
    h: usize,
    i: usize,
) -> Option<(Vec<f64>, f64)> {
    let scores: Vec<f64> = (0..s.k_len)
        .map(|j| score(s, o, precision, h, i, j))
        .collect();
    let sink = o.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks[h]);
    let max = scores.iter().copied().fold(sink, f64::max);
    if max == f64::NEG_INFINITY {
        return None;
    }
    let exp = |x: f64| precision.computed(precision.computed(x - max).exp());
    let exps: Vec<f64> = scores.iter().map(|x| exp(*x)).collect();
    let sum = exps
        .iter()
        .fold(exp(sink), |sum, x| precision.computed(sum + x));
    let weights = exps
        .iter()
        .map(|x| precision.stored(precision.computed(x / sum)));
    Some((weights.collect(), precision.computed(exp(sink) / sum)))
}

/// The derivative of the softcap at a score: `1 - tanh²`.
fn softcap_slope(
    s: &Sequence,
    o: &Options,
    precision: Precision,
    h: usize,
    i: usize,
    j: usize,
) -> f64 {
    let Some(cap) = o.softcap else { return 1.0 };
    let plain = Options {
        scale: o.scale,
        ..Options::default()
    };
    let x = score(s, &plain, precision, h, i, j);
    let t = precision.computed(precision.computed(x / cap).tanh());
    precision.computed(1.0 - precision.computed(t * t))
}

/// What rounding scores, LSE and `delta` to f32 may cost each gradient, as [`score_rounding`] is for
/// outputs, and what it costs that `out` is given rounded to a spacing of `epsilon`.
pub fn gradient_rounding(
    s: &Sequence,
    o: &Options,
    dout: &[f64],
    dlse: &[f64],
    epsilon: f64,
) -> Gradients {
    let scale = o.scale.unwrap_or(1.0 / (s.dim as f64).sqrt()).abs();
    let (_, shifts) = score_rounding(s, o);
    let mut g = Gradients::zeros(s);
    for h in 0..s.heads {
        let kv_head = h / (s.heads / s.kv_heads);
        for i in 0..s.q_len {
            let Some((weights, of_sink)) = weights(s, o, Precision::Exact, h, i) else {
                continue;
            };
            let shift = shifts[h * s.q_len + i] + f64::from(f32::EPSILON);
            let dout = &dout[(i * s.heads + h) * s.dim_v..][..s.dim_v];
            let products: Vec<f64> = (0..s.k_len)
                .map(|j| {
                    let v = &s.v[(j * s.kv_heads + kv_head) * s.dim_v..][..s.dim_v];
                    dout.iter().zip(v).map(|(a, b)| (a * b).abs()).sum()
                })
                .collect();
            let sum: f64 = weights.iter().zip(&products).map(|(w, p)| w * p).sum();
            let delta = sum + dlse[h * s.q_len + i].abs();
            let of_delta = shift * delta + 0.5 * epsilon * sum;
            g.dsinks[h] += of_sink * of_delta;
            let at = (i * s.heads + h) * s.dim;
            let (q, dq) = (&s.q[at..][..s.dim], &mut g.dq[at..][..s.dim]);
            for j in 0..s.k_len {
                if weights[j] == 0.0 {
                    continue;
                }
                let ds = weights[j] * (shift * products[j] + of_delta);
                g.dbias[h][i][j] = ds;
                let at = (j * s.kv_heads + kv_head) * s.dim;
                let (k, dk) = (&s.k[at..][..s.dim], &mut g.dk[at..][..s.dim]);
                for (dq, k) in dq.iter_mut().zip(k) {
                    *dq += ds * scale * k.abs();
                }
                for (dk, q) in dk.iter_mut().zip(q) {
                    *dk += ds * scale * q.abs();
                }
                let v = (j * s.kv_heads + kv_head) * s.dim_v;
                for (x, dout) in g.dv[v..].iter_mut().zip(dout) {
                    *x += shift * weights[j] * dout.abs();
                }
            }
        }
    }
    g
}
