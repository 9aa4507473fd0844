//! LayerNorm from its definition.

/// `y` for rows of length `dim`, and the magnitudes of what is summed to it: the
/// element, those that the mean is taken of, and the bias.
pub fn layer_norm(
    x: &[f64],
    weight: Option<&[f64]>,
    bias: Option<&[f64]>,
    epsilon: f64,
    dim: usize,
) -> (Vec<f64>, Vec<f64>) {
    let (mut y, mut terms) = (Vec::with_capacity(x.len()), Vec::with_capacity(x.len()));
    for row in x.chunks(dim.max(1)) {
        let mean = row.iter().sum::<f64>() / dim as f64;
        let variance = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / dim as f64;
        let magnitude = row.iter().map(|x| x.abs()).sum::<f64>() / dim as f64;
        for (i, x) in row.iter().enumerate() {
            let factor = weight.map_or(1.0, |w| w[i]) / (variance + epsilon).sqrt();
            let bias = bias.map_or(0.0, |b| b[i]);
            y.push((x - mean) * factor + bias);
            terms.push((x.abs() + magnitude) * factor.abs() + bias.abs());
        }
    }
    (y, terms)
}
