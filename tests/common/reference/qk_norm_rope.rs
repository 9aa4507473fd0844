//! QK-norm and RoPE from their definitions, and the plain implementations that errors are measured
//! against: two operations, with a rounding between them.

use unsloth::DType;

use super::norm::{Gradients, Norm};
use super::rope::{Shape, rope, rope_f32};
use crate::common::rounded;

/// How heads are normalised and rotated.
pub struct QkNorm<'a> {
    pub shape: Shape,
    /// `rotary_dim / 2` for each token.
    pub angles: &'a [f64],
    /// Multiplies cosines and sines.
    pub scale: f64,
    pub weight: Option<&'a [f64]>,
    pub weight_offset: f64,
    pub epsilon: f64,
}

impl QkNorm<'_> {
    fn norm(&self) -> Norm<'_> {
        Norm {
            centered: false,
            weight: self.weight,
            weight_offset: self.weight_offset,
            epsilon: self.epsilon,
            dim: self.shape.head_dim,
        }
    }

    fn gain(&self, i: usize) -> f32 {
        self.weight.map_or(1.0, |w| w[i] + self.weight_offset) as f32
    }

    fn back(&self) -> Vec<f64> {
        self.angles.iter().map(|angle| -angle).collect()
    }

    pub fn forward(&self, x: &[f64]) -> Vec<f64> {
        rope(&self.norm().forward(x), self.shape, self.angles, self.scale)
    }

    pub fn backward(&self, x: &[f64], dout: &[f64]) -> Gradients {
        let g = rope(dout, self.shape, &self.back(), self.scale);
        self.norm().backward(x, &g)
    }

    /// A head in f32, and 1 / the root of its mean square.
    fn plain_head(&self, head: &[f64]) -> (Vec<f32>, f32) {
        let head: Vec<f32> = head.iter().map(|x| *x as f32).collect();
        let mean = head.iter().map(|x| x * x).sum::<f32>() / head.len() as f32;
        (head, 1.0 / (mean + self.epsilon as f32).sqrt())
    }

    pub fn plain_forward(&self, dtype: DType, x: &[f64]) -> Vec<f64> {
        let mut normal = Vec::with_capacity(x.len());
        for head in x.chunks(self.shape.head_dim.max(1)) {
            let (head, scale) = self.plain_head(head);
            let scaled = head.iter().enumerate();
            normal.extend(scaled.map(|(i, x)| f64::from(x * scale * self.gain(i))));
        }
        let normal = rounded(dtype, &normal);
        rounded(
            dtype,
            &rope_f32(&normal, self.shape, self.angles, self.scale),
        )
    }

    /// Gradients of heads, in a dtype, and of gains, in f32.
    pub fn plain_backward(&self, dtype: DType, x: &[f64], dout: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let dim = self.shape.head_dim;
        let g = rounded(dtype, &rope_f32(dout, self.shape, &self.back(), self.scale));
        let (mut dx, mut dweight) = (Vec::with_capacity(x.len()), vec![0.0f32; dim]);
        for (head, g) in x.chunks(dim.max(1)).zip(g.chunks(dim.max(1))) {
            let (head, scale) = self.plain_head(head);
            let normal: Vec<f32> = head.iter().map(|x| x * scale).collect();
            let mut product = 0.0f32;
            for i in 0..dim {
                dweight[i] += g[i] as f32 * normal[i];
                product += g[i] as f32 * self.gain(i) * normal[i];
            }
            product /= dim as f32;
            let of = |i: usize| scale * (g[i] as f32 * self.gain(i) - normal[i] * product);
            dx.extend((0..dim).map(|i| f64::from(of(i))));
        }
        let dweight = dweight.into_iter().map(f64::from).collect();
        (rounded(dtype, &dx), dweight)
    }
}
