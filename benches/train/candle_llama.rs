//! A model of the Llama family in candle, made of what candle has gradients of, with its AdamW:
//! what `examples/rust/llama` is of ours. Candle's fused norm, rotation, softmax and attention have
//! none.

use candle_core::backprop::GradStore;
use candle_core::{D, Device, Error, Result, Tensor, Var};
use candle_nn::ops::rms_norm_slow;
use candle_nn::rotary_emb::rope_slow;
use candle_nn::{AdamW, Optimizer, ParamsAdamW};
use unsloth::estimate::Model;

pub const EPSILON: f32 = 1e-5;
const THETA: f64 = 10_000.0;

/// Sequences of one length, with what attention is told of places: `cos` and `sin`
/// `[seq, head_dim / 2]`, and the causal mask `[seq, seq]`, which is added to scores.
pub struct Places {
    pub batch: usize,
    pub seq: usize,
    pub cos: Tensor,
    pub sin: Tensor,
    pub mask: Tensor,
}

impl Places {
    pub fn new(batch: usize, seq: usize, head_dim: usize) -> Result<Places> {
        let half = head_dim / 2;
        let angle = |i: usize| {
            let frequency = THETA.powf(-((i % half) as f64) / half as f64) as f32;
            (i / half) as f32 * frequency
        };
        let angles: Vec<f32> = (0..seq * half).map(angle).collect();
        let angles = Tensor::from_vec(angles, (seq, half), &Device::Cpu)?;
        Ok(Places {
            batch,
            seq,
            cos: angles.cos()?,
            sin: angles.sin()?,
            mask: causal_mask(seq, seq)?,
        })
    }
}

/// What hides the keys behind each query, of which the last sees the last key.
pub fn causal_mask(queries: usize, keys: usize) -> Result<Tensor> {
    let hidden = |i: usize| i % keys + queries > i / keys + keys;
    let mask: Vec<f32> = (0..queries * keys)
        .map(|i| if hidden(i) { f32::NEG_INFINITY } else { 0.0 })
        .collect();
    Tensor::from_vec(mask, (queries, keys), &Device::Cpu)
}

/// The last dimension less its greatest element, through which no gradient has to go: it changes
/// neither a softmax nor its logarithm.
fn shifted(x: &Tensor) -> Result<Tensor> {
    x.broadcast_sub(&x.detach().max_keepdim(D::Minus1)?)
}

/// Attention of `q` `[batch, heads, queries, dim]` to `k` and `v` `[batch, kv_heads, keys, dim]`.
/// The query heads of a key head are one matrix, so that no key is repeated.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let (batch, heads, queries, dim) = q.dims4()?;
    let (_, kv_heads, keys, _) = k.dims4()?;
    let rows = heads / kv_heads * queries;
    let q = (q * (1.0 / (dim as f64).sqrt()))?.reshape((batch, kv_heads, rows, dim))?;
    let scores = q.matmul(&k.t()?)?.reshape((batch, heads, queries, keys))?;
    let scores = match mask {
        Some(mask) => scores.broadcast_add(mask)?,
        None => scores,
    };
    let weights = shifted(&scores)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    let weights = weights.reshape((batch, kv_heads, rows, keys))?;
    weights.matmul(v)?.reshape((batch, heads, queries, ()))
}

fn linear(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    x.matmul(&weight.t()?)
}

/// The gated feed-forward block of the matrices gate, up and down.
pub fn mlp(x: &Tensor, [gate, up, down]: [&Var; 3]) -> Result<Tensor> {
    let activated = (linear(x, gate)?.silu()? * linear(x, up)?)?;
    linear(&activated, down)
}

/// Projections as candle's own models have them.
pub struct Layer {
    pub attention_norm: Var,
    pub q: Var,
    pub k: Var,
    pub v: Var,
    pub out: Var,
    pub mlp_norm: Var,
    pub gate: Var,
    pub up: Var,
    pub down: Var,
}

impl Layer {
    /// Of `x` `[batch * seq, hidden]`.
    pub fn forward(&self, m: &Model, x: &Tensor, places: &Places) -> Result<Tensor> {
        let normed = rms_norm_slow(x, &self.attention_norm, EPSILON)?;
        let hidden = (x + self.attention_block(m, &normed, places)?)?;
        let normed = rms_norm_slow(&hidden, &self.mlp_norm, EPSILON)?;
        hidden + mlp(&normed, [&self.gate, &self.up, &self.down])?
    }

    pub fn attention_block(&self, m: &Model, x: &Tensor, places: &Places) -> Result<Tensor> {
        let heads_first = |x: Tensor, heads: u64| {
            x.reshape((places.batch, places.seq, heads as usize, ()))?
                .transpose(1, 2)?
                .contiguous()
        };
        let rope = |x: Tensor| rope_slow(&x, &places.cos, &places.sin);
        let q = rope(heads_first(linear(x, &self.q)?, m.num_heads)?)?;
        let k = rope(heads_first(linear(x, &self.k)?, m.num_kv_heads)?)?;
        let v = heads_first(linear(x, &self.v)?, m.num_kv_heads)?;
        let attended = attention(&q, &k, &v, Some(&places.mask))?.transpose(1, 2)?;
        linear(
            &attended.reshape((places.batch * places.seq, ()))?,
            &self.out,
        )
    }
}

/// Shapes and values of a model's weights, in the order of `examples/rust/llama`: the embedding,
/// the last norm, the head where it is apart, then of each layer its norm, the packed projections
/// to queries, keys and values, that of attention's output, the other norm, packed gate and up,
/// down.
pub type Weights = Vec<(Vec<usize>, Vec<f32>)>;

pub struct CandleLlama {
    model: Model,
    places: Places,
    embedding: Var,
    norm: Var,
    head: Option<Var>,
    layers: Vec<Layer>,
    optimizer: AdamW,
}

/// Rows of the next weight as matrices of so many rows; a vector is a matrix of its own.
fn split<const N: usize>(
    weights: &mut impl Iterator<Item = (Vec<usize>, Vec<f32>)>,
    rows: [u64; N],
) -> Result<[Var; N]> {
    let (shape, values) = weights
        .next()
        .ok_or_else(|| Error::msg("the weights end before the model"))?;
    let whole = Tensor::from_vec(values, shape, &Device::Cpu)?;
    let mut first = 0;
    let mut parts = rows.into_iter().map(|rows| {
        let part = whole.narrow(0, first, rows as usize)?;
        first += rows as usize;
        // A variable is a copy of its own.
        Var::from_tensor(&part.copy()?)
    });
    let parts: Result<Vec<Var>> = parts.by_ref().collect();
    parts?.try_into().map_err(|_| Error::msg("a part is lost"))
}

impl CandleLlama {
    pub fn new(
        model: &Model,
        (batch, seq): (usize, usize),
        weights: Weights,
        rate: f64,
    ) -> Result<CandleLlama> {
        let m = *model;
        let weights = &mut weights.into_iter();
        let [embedding] = split(weights, [m.vocab_size])?;
        let [norm] = split(weights, [m.hidden_size])?;
        let head = match m.tied_embeddings {
            true => None,
            false => Some(split::<1>(weights, [m.vocab_size])?),
        };
        let head = head.map(|[head]| head);
        let mut layers = Vec::new();
        for _ in 0..m.num_layers {
            let [attention_norm] = split(weights, [m.hidden_size])?;
            let of_heads = [
                m.num_heads * m.head_dim,
                m.num_kv_heads * m.head_dim,
                m.num_kv_heads * m.v_head_dim,
            ];
            let [q, k, v] = split(weights, of_heads)?;
            let [out] = split(weights, [m.hidden_size])?;
            let [mlp_norm] = split(weights, [m.hidden_size])?;
            let [gate, up] = split(weights, [m.intermediate_size; 2])?;
            let [down] = split(weights, [m.hidden_size])?;
            layers.push(Layer {
                attention_norm,
                q,
                k,
                v,
                out,
                mlp_norm,
                gate,
                up,
                down,
            });
        }
        let mut llama = CandleLlama {
            model: m,
            places: Places::new(batch, seq, m.head_dim as usize)?,
            embedding,
            norm,
            head,
            layers,
            optimizer: AdamW::empty(ParamsAdamW::default())?,
        };
        let variables = llama.variables().into_iter().flatten().cloned().collect();
        let params = ParamsAdamW {
            lr: rate,
            weight_decay: 0.0,
            ..ParamsAdamW::default()
        };
        llama.optimizer = AdamW::new(variables, params)?;
        Ok(llama)
    }

    /// In the order of [`Weights`], with the parts of each.
    fn variables(&self) -> Vec<Vec<&Var>> {
        let mut all = vec![vec![&self.embedding], vec![&self.norm]];
        all.extend(self.head.iter().map(|head| vec![head]));
        for l in &self.layers {
            all.push(vec![&l.attention_norm]);
            all.push(vec![&l.q, &l.k, &l.v]);
            all.push(vec![&l.out]);
            all.push(vec![&l.mlp_norm]);
            all.push(vec![&l.gate, &l.up]);
            all.push(vec![&l.down]);
        }
        all
    }

    /// The weights as they are now.
    #[allow(dead_code)] // tests compare them, the bench does not
    pub fn weights(&self) -> Result<Weights> {
        let whole = |parts: Vec<&Var>| {
            let parts: Vec<&Tensor> = parts.into_iter().map(|part| part.as_tensor()).collect();
            let whole = Tensor::cat(&parts, 0)?;
            Ok((whole.dims().to_vec(), whole.flatten_all()?.to_vec1()?))
        };
        self.variables().into_iter().map(whole).collect()
    }

    /// The mean loss of all tokens, and its gradients.
    pub fn gradients(&self, ids: &[i32], targets: &[i32]) -> Result<(f32, GradStore)> {
        let tokens = |ids: &[i32]| {
            let ids: Vec<u32> = ids.iter().map(|id| id.cast_unsigned()).collect();
            Tensor::from_vec(ids, self.places.batch * self.places.seq, &Device::Cpu)
        };
        let mut x = self.embedding.index_select(&tokens(ids)?, 0)?;
        for layer in &self.layers {
            x = layer.forward(&self.model, &x, &self.places)?;
        }
        let x = rms_norm_slow(&x, &self.norm, EPSILON)?;
        let logits = linear(&x, self.head.as_ref().unwrap_or(&self.embedding))?;
        let logits = shifted(&logits)?;
        let lse = logits.exp()?.sum(D::Minus1)?.log()?;
        let chosen = logits.gather(&tokens(targets)?.unsqueeze(1)?, 1)?;
        let loss = (lse - chosen.squeeze(1)?)?.mean_all()?;
        Ok((loss.to_scalar()?, loss.backward()?))
    }

    /// Makes a step; gives the loss.
    pub fn step(&mut self, ids: &[i32], targets: &[i32]) -> Result<f32> {
        let (loss, gradients) = self.gradients(ids, targets)?;
        self.optimizer.step(&gradients)?;
        Ok(loss)
    }
}
