//! Gated activations from their definitions.

use unsloth::ops::swiglu::Activation;

/// `activation(gate) * up`.
pub fn swiglu(gate: &[f64], up: &[f64], activation: Activation) -> Vec<f64> {
    let gated = gate.iter().zip(up);
    gated.map(|(g, u)| activate(*g, activation) * u).collect()
}

/// The activation of one number.
pub fn activate(x: f64, activation: Activation) -> f64 {
    match activation {
        Activation::Gelu => x * normal_cdf(x),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            // 1 + tanh(u), without cancellation for negative u.
            x / (1.0 + (-2.0 * u).exp())
        }
        Activation::ReluSquared => x.max(0.0).powi(2),
        _ => x / (1.0 + (-x).exp()),
    }
}

/// The activation's derivative.
pub fn derivative(x: f64, activation: Activation) -> f64 {
    match activation {
        Activation::Gelu => normal_cdf(x) + x * (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt(),
        Activation::GeluTanh => {
            let scale = (2.0 / std::f64::consts::PI).sqrt();
            let u = scale * (x + 0.044715 * x.powi(3));
            let slope = scale * (1.0 + 3.0 * 0.044715 * x * x);
            let (s, rest) = (
                1.0 / (1.0 + (-2.0 * u).exp()),
                1.0 / (1.0 + (2.0 * u).exp()),
            );
            s + 2.0 * x * s * rest * slope
        }
        Activation::ReluSquared => 2.0 * x.max(0.0),
        _ => {
            let (s, rest) = (1.0 / (1.0 + (-x).exp()), 1.0 / (1.0 + x.exp()));
            s + x * s * rest
        }
    }
}

/// The normal distribution function, by its series around zero (Abramowitz and Stegun 26.2.10) and in the tails by its continued
/// fraction (26.2.14).
fn normal_cdf(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
    if x.abs() < 3.0 {
        let (mut term, mut sum) = (x, x);
        for n in 1..200 {
            term *= x * x / f64::from(2 * n + 1);
            sum += term;
        }
        return 0.5 + density * sum;
    }
    let fraction = (1..200)
        .rev()
        .fold(x.abs(), |f, n| x.abs() + f64::from(n) / f);
    let tail = density / fraction;
    if x > 0.0 { 1.0 - tail } else { tail }
}
