//! Quantisation of values that share a scale.

use unsloth::ops::quantize::Rule;

/// The mean magnitude.
pub fn mean(x: &[f64]) -> f64 {
    let sum: f64 = x.iter().map(|x| x.abs()).sum();
    if x.is_empty() {
        0.0
    } else {
        sum / x.len() as f64
    }
}

/// The scale of values, and how far the operation's may be off.
pub fn scale(x: &[f64], rule: Rule, most: f64) -> (f64, f64) {
    let all = mean(x);
    match rule {
        // Rounded to f32, once.
        Rule::AbsMax => {
            let greatest = x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            (f64::from(greatest as f32 / most as f32), 0.0)
        }
        Rule::AbsMean => (all, 1e-5 * all),
        _ => {
            let above = x.iter().copied().filter(|x| x.abs() > 0.7 * all);
            (mean(&above.collect::<Vec<_>>()), 1e-5 * all)
        }
    }
}

/// Whether a code is that of a value, but for what f32 rounds of a quotient or a threshold. `mean`
/// is that of what shares the scale.
pub fn is_code(code: f64, x: f64, mean: f64, scale: f64, rule: Rule, most: f64) -> bool {
    const MARGIN: f64 = 1e-5;
    if rule == Rule::Threshold {
        let distance = x.abs() - 0.7 * mean;
        return code == if distance > 0.0 { x.signum() } else { 0.0 }
            || (distance.abs() <= MARGIN * mean && [0.0, x.signum()].contains(&code));
    }
    let quotient = x / scale;
    let nearest = quotient.round_ties_even().clamp(-most, most);
    let is_near = (quotient - code).abs() <= 0.5 + MARGIN * quotient.abs().max(1.0);
    code == nearest || (code.abs() <= most && is_near)
}
