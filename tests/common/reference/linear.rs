//! Linear layers from their definition.

/// `x weightᵀ + bias + residual`; sizes are rows, `in_features` and `out_features`.
pub fn linear(
    x: &[f64],
    weight: &[f64],
    sizes: (usize, usize, usize),
    bias: Option<&[f64]>,
    residual: Option<&[f64]>,
) -> Vec<f64> {
    compute(x, weight, sizes, bias, residual, |a, b| {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    })
}

/// The same with f32 products summed one after the other: the plain implementation that errors are measured against.
pub fn linear_f32(
    x: &[f64],
    weight: &[f64],
    sizes: (usize, usize, usize),
    bias: Option<&[f64]>,
    residual: Option<&[f64]>,
) -> Vec<f64> {
    compute(x, weight, sizes, bias, residual, |a, b| {
        let products = a.iter().zip(b).map(|(a, b)| *a as f32 * *b as f32);
        f64::from(products.fold(0.0, |sum: f32, p| sum + p))
    })
}

fn compute(
    x: &[f64],
    weight: &[f64],
    (rows, depth, columns): (usize, usize, usize),
    bias: Option<&[f64]>,
    residual: Option<&[f64]>,
    dot: impl Fn(&[f64], &[f64]) -> f64,
) -> Vec<f64> {
    let mut y = Vec::with_capacity(rows * columns);
    for row in 0..rows {
        for column in 0..columns {
            let product = dot(
                &x[row * depth..(row + 1) * depth],
                &weight[column * depth..(column + 1) * depth],
            );
            let bias = bias.map_or(0.0, |b| b[column]);
            y.push(product + bias + residual.map_or(0.0, |r| r[row * columns + column]));
        }
    }
    y
}
