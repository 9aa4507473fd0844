//! RMSNorm from its definition.

/// `y` and `s = x + residual` for rows of length `dim`.
pub fn rms_norm(
    x: &[f64],
    residual: Option<&[f64]>,
    weight: Option<&[f64]>,
    weight_offset: f64,
    epsilon: f64,
    dim: usize,
) -> (Vec<f64>, Vec<f64>) {
    let sum: Vec<f64> = match residual {
        Some(residual) => x.iter().zip(residual).map(|(x, r)| x + r).collect(),
        None => x.to_vec(),
    };
    let mut y = Vec::with_capacity(sum.len());
    for row in sum.chunks(dim.max(1)) {
        let mean_square = row.iter().map(|s| s * s).sum::<f64>() / dim as f64;
        let scale = 1.0 / (mean_square + epsilon).sqrt();
        for (i, s) in row.iter().enumerate() {
            y.push(s * scale * weight.map_or(1.0, |w| w[i] + weight_offset));
        }
    }
    (y, sum)
}
