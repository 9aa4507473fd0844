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

/// Gradients of a linear layer.
#[derive(Clone, Debug)]
pub struct Gradients {
    pub dx: Vec<f64>,
    pub dweight: Vec<f64>,
    pub dbias: Vec<f64>,
}

/// The gradients for that of the output; sizes are those of [`linear`].
pub fn linear_backward(
    dout: &[f64],
    x: &[f64],
    weight: &[f64],
    sizes: (usize, usize, usize),
) -> Gradients {
    compute_backward(dout, x, weight, sizes, |terms| terms.sum())
}

/// The same with f32 products summed one after the other: the plain implementation that errors are measured against.
pub fn linear_backward_f32(
    dout: &[f64],
    x: &[f64],
    weight: &[f64],
    sizes: (usize, usize, usize),
) -> Gradients {
    compute_backward(dout, x, weight, sizes, |terms| {
        f64::from(terms.fold(0.0, |sum: f32, term| sum + term as f32))
    })
}

fn compute_backward(
    dout: &[f64],
    x: &[f64],
    weight: &[f64],
    (rows, depth, columns): (usize, usize, usize),
    sum: impl Fn(&mut dyn Iterator<Item = f64>) -> f64,
) -> Gradients {
    let mut gradients = Gradients {
        dx: Vec::with_capacity(rows * depth),
        dweight: Vec::with_capacity(columns * depth),
        dbias: Vec::with_capacity(columns),
    };
    for row in 0..rows {
        for i in 0..depth {
            let mut terms = (0..columns).map(|o| dout[row * columns + o] * weight[o * depth + i]);
            gradients.dx.push(sum(&mut terms));
        }
    }
    for o in 0..columns {
        for i in 0..depth {
            let mut terms = (0..rows).map(|row| dout[row * columns + o] * x[row * depth + i]);
            gradients.dweight.push(sum(&mut terms));
        }
        gradients
            .dbias
            .push(sum(&mut (0..rows).map(|row| dout[row * columns + o])));
    }
    gradients
}
