//! Parts of attention as one, from the definition.

/// Of one row: its parts' outputs and logarithms give the output, the logarithm, and the sum of the terms' magnitudes.
pub fn merge(parts: &[(&[f64], f64)]) -> (Vec<f64>, f64, Vec<f64>) {
    let total: f64 = parts.iter().map(|(_, lse)| lse.exp()).sum();
    let dim = parts[0].0.len();
    let (mut out, mut terms) = (vec![0.0; dim], vec![0.0; dim]);
    for (x, lse) in parts.iter().filter(|(_, lse)| *lse != f64::NEG_INFINITY) {
        let weight = lse.exp() / total;
        for ((out, terms), x) in out.iter_mut().zip(&mut terms).zip(*x) {
            *out += weight * x;
            *terms += (weight * x).abs();
        }
    }
    (out, total.ln(), terms)
}
