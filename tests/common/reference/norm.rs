//! The gradients of RMSNorm and LayerNorm from their definition.

/// What a row is normalised with.
pub struct Norm<'a> {
    /// LayerNorm, which subtracts the mean.
    pub centered: bool,
    pub weight: Option<&'a [f64]>,
    pub weight_offset: f64,
    pub epsilon: f64,
    pub dim: usize,
}

/// Gradients, each with the magnitudes of the terms that add up to it.
#[derive(Default)]
pub struct Gradients {
    pub dx: Vec<f64>,
    pub dx_terms: Vec<f64>,
    pub dweight: Vec<f64>,
    pub dweight_terms: Vec<f64>,
    pub dbias: Vec<f64>,
    pub dbias_terms: Vec<f64>,
}

impl Norm<'_> {
    fn gain(&self, i: usize) -> f64 {
        self.weight.map_or(1.0, |w| w[i] + self.weight_offset)
    }

    /// The mean that a row loses, and 1 / its deviation.
    fn statistics(&self, row: &[f64]) -> (f64, f64) {
        let mean_of = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / self.dim as f64;
        let mean = match self.centered {
            true => mean_of(&mut row.iter().copied()),
            false => 0.0,
        };
        let variance = mean_of(&mut row.iter().map(|x| (x - mean).powi(2)));
        (mean, 1.0 / (variance + self.epsilon).sqrt())
    }

    /// `y` without a bias.
    pub fn forward(&self, x: &[f64]) -> Vec<f64> {
        let mut y = Vec::with_capacity(x.len());
        for row in x.chunks(self.dim.max(1)) {
            let (mean, scale) = self.statistics(row);
            let normal = row.iter().map(|x| (x - mean) * scale);
            y.extend(normal.enumerate().map(|(i, n)| n * self.gain(i)));
        }
        y
    }

    pub fn backward(&self, x: &[f64], dout: &[f64]) -> Gradients {
        let dim = self.dim;
        let zeros = || vec![0.0; dim];
        let mut all = Gradients {
            dweight: zeros(),
            dweight_terms: zeros(),
            dbias: zeros(),
            dbias_terms: zeros(),
            ..Gradients::default()
        };
        for (row, dout) in x.chunks(dim.max(1)).zip(dout.chunks(dim.max(1))) {
            let (mean, scale) = self.statistics(row);
            let normal: Vec<f64> = row.iter().map(|x| (x - mean) * scale).collect();
            let g: Vec<f64> = (0..dim).map(|i| dout[i] * self.gain(i)).collect();
            let mean_of = |f: &dyn Fn(usize) -> f64| (0..dim).map(f).sum::<f64>() / dim as f64;
            let product = mean_of(&|i| g[i] * normal[i]);
            let product_terms = mean_of(&|i| (g[i] * normal[i]).abs());
            let (gradient, gradient_terms) = match self.centered {
                true => (mean_of(&|i| g[i]), mean_of(&|i| g[i].abs())),
                false => (0.0, 0.0),
            };
            // The difference from the mean is as exact as its terms are.
            let distance = match self.centered {
                true => mean_of(&|i| row[i].abs()) * scale,
                false => 0.0,
            };
            for i in 0..dim {
                let n = normal[i].abs() + distance;
                all.dx.push(scale * (g[i] - gradient - normal[i] * product));
                all.dx_terms
                    .push(scale * (g[i].abs() + gradient_terms + n * product_terms));
                all.dweight[i] += dout[i] * normal[i];
                all.dweight_terms[i] += dout[i].abs() * n;
                all.dbias[i] += dout[i];
                all.dbias_terms[i] += dout[i].abs();
            }
        }
        all
    }
}
