//! The attention block and its gradients, of the references of what it is made of.

use super::attention::{
    Options, Precision, Sequence, attention, attention_backward, gradient_rounding,
};
use super::mlp::Layer;
use super::norm::Norm;
use super::{linear, rope};
use crate::common::rules::epsilon;
use crate::common::tensor::round_to;
use unsloth::DType;

/// A block without what its sequences are.
#[derive(Clone, Debug)]
pub struct Block {
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub dim_v: usize,
    pub hidden: usize,
    pub hidden_out: usize,
    /// Of queries, keys and values.
    pub projections: [Layer; 3],
    pub out: Layer,
    /// Gains of queries and of keys: of a head, or of all of a token.
    pub norms: [Option<Vec<f64>>; 2],
    pub norm_weight_offset: f64,
    pub norm_epsilon: f64,
    /// Whether pairs are interleaved, if they are rotated.
    pub rotation: Option<bool>,
    pub options: Options,
}

/// How precisely to compute.
#[derive(Clone, Copy, Debug)]
pub enum Arithmetic {
    /// In f64.
    Exact,
    /// In f64, what passes between operations rounded to a dtype.
    Stored(DType),
    /// As plain code in this dtype does.
    Plain(DType),
}

impl Arithmetic {
    fn precision(self) -> Precision {
        match self {
            Arithmetic::Plain(dtype) => Precision::Plain(dtype),
            _ => Precision::Exact,
        }
    }

    /// Of what passes between operations: attention's output is among it.
    fn spacing(self) -> f64 {
        match self {
            Arithmetic::Exact => 0.0,
            Arithmetic::Stored(dtype) | Arithmetic::Plain(dtype) => epsilon(dtype),
        }
    }

    /// What passes between operations.
    fn stored(self, values: Vec<f64>) -> Vec<f64> {
        match self {
            Arithmetic::Exact => values,
            Arithmetic::Stored(dtype) | Arithmetic::Plain(dtype) => {
                values.into_iter().map(|v| round_to(dtype, v)).collect()
            }
        }
    }
}

/// What the forward pass computes on its way, of all tokens: `[tokens, columns]`.
pub struct Forward {
    /// Queries, keys and values as the projections give them, and as attention takes them.
    pub projected: [Vec<f64>; 3],
    pub turned: [Vec<f64>; 3],
    pub attended: Vec<f64>,
    pub out: Vec<f64>,
}

/// The gradients of a block.
#[derive(Clone, Debug)]
pub struct Gradients {
    pub dx: Vec<f64>,
    /// Weights and biases of queries, keys and values.
    pub projections: [(Vec<f64>, Vec<f64>); 3],
    pub norms: [Vec<f64>; 2],
    pub sinks: Vec<f64>,
    pub out: (Vec<f64>, Vec<f64>),
    /// Bounds of the sums that give all of these, in the same order, and of what roundings inside
    /// attention and of its output cost them, in units of f32.
    pub terms: [f64; 12],
}

impl Block {
    /// Columns of queries, keys and values.
    pub fn columns(&self) -> [usize; 3] {
        [
            self.heads * self.dim,
            self.kv_heads * self.dim,
            self.kv_heads * self.dim_v,
        ]
    }

    fn norm(&self, which: usize) -> Option<Norm<'_>> {
        self.norms[which].as_ref().map(|gains| Norm {
            centered: false,
            weight: Some(gains),
            weight_offset: self.norm_weight_offset,
            epsilon: self.norm_epsilon,
            dim: gains.len(),
        })
    }

    /// Queries or keys of sequences of these lengths, rotated or rotated back.
    fn rotated(&self, x: Vec<f64>, heads: usize, lens: &[usize], back: bool) -> Vec<f64> {
        let Some(interleaved) = self.rotation else {
            return x;
        };
        let half = self.dim / 2;
        let mut angles = Vec::new();
        for position in lens.iter().flat_map(|len| 0..*len) {
            for i in 0..half {
                let frequency = 10000f64.powf(-2.0 * i as f64 / self.dim as f64) as f32;
                let angle = f64::from(position as f32 * frequency);
                angles.push(if back { -angle } else { angle });
            }
        }
        let shape = rope::Shape {
            heads,
            head_dim: self.dim,
            rotary_dim: self.dim,
            interleaved,
        };
        rope::rope(&x, shape, &angles, 1.0)
    }

    /// The sequences that attention is of.
    fn sequences(&self, [q, k, v]: &[Vec<f64>; 3], lens: &[usize]) -> Vec<Sequence> {
        let mut start = 0;
        let part = |t: &[f64], start: usize, len: usize, i: usize| {
            let columns = self.columns()[i];
            t[start * columns..(start + len) * columns].to_vec()
        };
        let sequence = |&len: &usize| {
            let s = Sequence {
                q_len: len,
                k_len: len,
                heads: self.heads,
                kv_heads: self.kv_heads,
                dim: self.dim,
                dim_v: self.dim_v,
                q: part(q, start, len, 0),
                k: part(k, start, len, 1),
                v: part(v, start, len, 2),
            };
            start += len;
            s
        };
        lens.iter().map(sequence).collect()
    }

    /// The forward pass, of sequences one behind the other.
    pub fn forward(&self, x: &[f64], lens: &[usize], arithmetic: Arithmetic) -> Forward {
        let rows = lens.iter().sum();
        let product = |x: &[f64], layer: &Layer, (depth, columns): (usize, usize)| {
            let f = match arithmetic {
                Arithmetic::Plain(_) => linear::linear_f32,
                _ => linear::linear,
            };
            let sizes = (rows, depth, columns);
            let y = f(x, &layer.weight, sizes, layer.bias.as_deref(), None);
            arithmetic.stored(y)
        };
        let columns = self.columns();
        let projected =
            [0, 1, 2].map(|i| product(x, &self.projections[i], (self.hidden, columns[i])));
        let mut turned = projected.clone();
        for (which, heads) in [self.heads, self.kv_heads].into_iter().enumerate() {
            let mut t = turned[which].clone();
            if let Some(norm) = self.norm(which) {
                t = arithmetic.stored(norm.forward(&t));
            }
            turned[which] = arithmetic.stored(self.rotated(t, heads, lens, false));
        }
        let sequences = self.sequences(&turned, lens);
        let attended = sequences
            .iter()
            .flat_map(|s| attention(s, &self.options, arithmetic.precision()).0);
        let attended: Vec<f64> = attended.collect();
        let out = product(
            &attended,
            &self.out,
            (self.heads * self.dim_v, self.hidden_out),
        );
        Forward {
            projected,
            turned,
            attended,
            out,
        }
    }

    /// The backward pass; `apart` if the input's gradient is added up in memory.
    pub fn backward(
        &self,
        (x, dout): (&[f64], &[f64]),
        lens: &[usize],
        arithmetic: Arithmetic,
        apart: bool,
    ) -> Gradients {
        let rows: usize = lens.iter().sum();
        let f = self.forward(x, lens, arithmetic);
        let product = |dout: &[f64], x: &[f64], layer: &Layer, sizes| match arithmetic {
            Arithmetic::Plain(_) => linear::linear_backward_f32(dout, x, &layer.weight, sizes),
            _ => linear::linear_backward(dout, x, &layer.weight, sizes),
        };
        let mut terms = [0.0; 12];
        let of_terms = |dout: &[f64], x: &[f64], layer: &Layer, sizes| {
            let magnitudes = |t: &[f64]| t.iter().map(|v| v.abs()).collect::<Vec<_>>();
            let [dout, x, weight] = [dout, x, &layer.weight].map(magnitudes);
            let g = linear::linear_backward(&dout, &x, &weight, sizes);
            [g.dx, g.dweight, g.dbias].map(|g| g.into_iter().fold(0.0, f64::max))
        };
        let sizes = (rows, self.heads * self.dim_v, self.hidden_out);
        let out = product(dout, &f.attended, &self.out, sizes);
        [_, terms[10], terms[11]] = of_terms(dout, &f.attended, &self.out, sizes);
        let dattended = arithmetic.stored(out.dx);

        let mut gradients = [const { Vec::new() }; 3];
        let mut roundings = [const { Vec::new() }; 3];
        let mut sinks = vec![0.0; self.heads];
        let mut start = 0;
        for s in self.sequences(&f.turned, lens) {
            let columns = self.heads * self.dim_v;
            let dout = &dattended[start * columns..(start + s.q_len) * columns];
            start += s.q_len;
            let dlse = vec![0.0; s.q_len * self.heads];
            let g = attention_backward(&s, &self.options, dout, &dlse, arithmetic.precision());
            for (all, part) in gradients.iter_mut().zip([g.dq, g.dk, g.dv]) {
                all.extend(part);
            }
            sinks.iter_mut().zip(&g.dsinks).for_each(|(all, part)| {
                *all += part;
            });
            terms[9] += g.dsinks.iter().map(|v| v.abs()).fold(0.0, f64::max);
            let unit = f64::from(f32::EPSILON);
            let spacing = arithmetic.spacing();
            let cost = gradient_rounding(&s, &self.options, dout, &dlse, spacing);
            for (all, part) in roundings.iter_mut().zip([cost.dq, cost.dk, cost.dv]) {
                all.extend(part.into_iter().map(|cost| cost / unit));
            }
            terms[9] += cost.dsinks.into_iter().fold(0.0, f64::max) / unit;
        }
        let mut norms = [const { Vec::new() }; 2];
        for (which, heads) in [self.heads, self.kv_heads].into_iter().enumerate() {
            let g = std::mem::take(&mut gradients[which]);
            let mut g = arithmetic.stored(self.rotated(g, heads, lens, true));
            if let Some(norm) = self.norm(which) {
                let all = norm.backward(&f.projected[which], &g);
                g = arithmetic.stored(all.dx);
                norms[which] = all.dweight;
                terms[7 + which] = all.dweight_terms.into_iter().fold(0.0, f64::max);
                let cost = norm.backward(&f.projected[which], &roundings[which]);
                terms[7 + which] += cost.dweight_terms.into_iter().fold(0.0, f64::max);
                roundings[which] = cost.dx_terms;
            }
            gradients[which] = g;
        }
        let mut dx = vec![0.0; x.len()];
        let projections = [0, 1, 2].map(|i| {
            let (layer, columns) = (&self.projections[i], self.columns()[i]);
            let sizes = (rows, self.hidden, columns);
            let g = product(&gradients[i], x, layer, sizes);
            let of_products = of_terms(&gradients[i], x, layer, sizes);
            let of_roundings = of_terms(&roundings[i], x, layer, sizes);
            let [of_x, of_weight, of_bias] = [0, 1, 2].map(|i| of_products[i] + of_roundings[i]);
            // What is summed was stored: each term may be half a spacing off. Of the few columns that
            // a bias has, both references may happen to lose next to nothing, in one of some
            // hundred runs.
            let of_column = |column: usize| {
                let stored = gradients[i].chunks(columns).map(|row| row[column]);
                let squares = stored.map(|g| (0.5 * arithmetic.spacing() * g).powi(2));
                squares.sum::<f64>().sqrt() / f64::from(f32::EPSILON)
            };
            let stored = (0..columns).map(of_column).fold(0.0, f64::max);
            terms[0] += of_x;
            (terms[1 + 2 * i], terms[2 + 2 * i]) = (of_weight, of_bias + stored);
            dx.iter_mut().zip(g.dx).for_each(|(sum, part)| *sum += part);
            if apart && i < 2 {
                dx = arithmetic.stored(std::mem::take(&mut dx));
            }
            (g.dweight, g.dbias)
        });
        Gradients {
            dx,
            projections,
            norms,
            sinks,
            out: (out.dweight, out.dbias),
            terms,
        }
    }
}
