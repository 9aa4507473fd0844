//! RoPE from its definition, and the frequencies of each scaling in f64.

use unsloth::ops::rope::Scaling;

/// How components pair up and how many of them turn.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub heads: usize,
    pub head_dim: usize,
    pub rotary_dim: usize,
    pub interleaved: bool,
}

/// Turns every pair of every head by its token's angles, `rotary_dim / 2` for each token; the result is multiplied by `scale` in
/// the rotated components.
pub fn rope(x: &[f64], shape: Shape, angles: &[f64], scale: f64) -> Vec<f64> {
    rotate(x, shape, angles, |a, b, angle| {
        let (sin, cos) = angle.sin_cos();
        (scale * (a * cos - b * sin), scale * (b * cos + a * sin))
    })
}

/// The same in f32, operation by operation: the plain implementation that errors are measured against.
pub fn rope_f32(x: &[f64], shape: Shape, angles: &[f64], scale: f64) -> Vec<f64> {
    rotate(x, shape, angles, |a, b, angle| {
        let (sin, cos) = (angle as f32).sin_cos();
        let (sin, cos) = (sin * scale as f32, cos * scale as f32);
        let (a, b) = (a as f32, b as f32);
        (f64::from(a * cos - b * sin), f64::from(b * cos + a * sin))
    })
}

fn rotate(
    x: &[f64],
    shape: Shape,
    angles: &[f64],
    turn: impl Fn(f64, f64, f64) -> (f64, f64),
) -> Vec<f64> {
    let half = shape.rotary_dim / 2;
    let mut y = x.to_vec();
    for (row, head) in y.chunks_mut(shape.head_dim).enumerate() {
        let token = row / shape.heads;
        for i in 0..half {
            let (a, b) = match shape.interleaved {
                true => (2 * i, 2 * i + 1),
                false => (i, i + half),
            };
            (head[a], head[b]) = turn(head[a], head[b], angles[token * half + i]);
        }
    }
    y
}

/// Inverse frequencies and attention factor, as Hugging Face's `modeling_rope_utils` defines them, in f64.
pub fn inverse_frequencies(theta: f64, scaling: Scaling, rotary_dim: usize) -> (Vec<f64>, f64) {
    let d = rotary_dim as f64;
    let plain = |theta: f64| -> Vec<f64> {
        (0..rotary_dim / 2)
            .map(|i| theta.powf(-2.0 * i as f64 / d))
            .collect()
    };
    match scaling {
        Scaling::Linear { factor } => {
            let frequencies = plain(theta);
            (
                frequencies.iter().map(|f| f / f64::from(factor)).collect(),
                1.0,
            )
        }
        Scaling::Ntk { factor } => (plain(theta * f64::from(factor).powf(d / (d - 2.0))), 1.0),
        Scaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_positions,
        } => {
            let (factor, low, high) = (
                f64::from(factor),
                f64::from(low_freq_factor),
                f64::from(high_freq_factor),
            );
            let scaled = plain(theta).into_iter().map(|f| {
                let turns = f64::from(original_max_positions) * f / std::f64::consts::TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                (1.0 - kept) * f / factor + kept * f
            });
            (scaled.collect(), 1.0)
        }
        Scaling::Yarn {
            factor,
            original_max_positions,
            beta_fast,
            beta_slow,
            extrapolation_factor,
            fractional_ramp,
        } => {
            let or = |value: f32, default: f64| match value {
                0.0 => default,
                value => f64::from(value),
            };
            let pair = |turns: f64| {
                let context = f64::from(original_max_positions);
                d * (context / (turns * std::f64::consts::TAU)).ln() / (2.0 * theta.ln())
            };
            let (mut low, mut high) = (pair(or(beta_fast, 32.0)), pair(or(beta_slow, 1.0)));
            if !fractional_ramp {
                (low, high) = (low.floor(), high.ceil());
            }
            let (low, high) = (low.max(0.0), high.min(d - 1.0));
            let width = if low == high { 0.001 } else { high - low };
            let scaled = plain(theta).into_iter().enumerate().map(|(i, f)| {
                let ramp = ((i as f64 - low) / width).clamp(0.0, 1.0);
                let kept = (1.0 - ramp) * or(extrapolation_factor, 1.0);
                f / f64::from(factor) * (1.0 - kept) + f * kept
            });
            let attention = 1.0 + 0.1 * f64::from(factor).ln().max(0.0);
            (scaled.collect(), attention)
        }
        _ => (plain(theta), 1.0),
    }
}
