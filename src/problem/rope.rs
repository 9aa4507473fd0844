//! RoPE: which angle each pair of components turns by, and which vectors are rotated.
//!
//! For a rotary dimension `d`, pair `i` of `d / 2` turns by `position * inv_freq[i]`, with
//! `inv_freq[i] = theta^(-2i/d)` before scaling. Frequencies, angles, sines and cosines are f32, as in the
//! models' own code: the product `position * inv_freq[i]` is rounded to f32, its sine and cosine are those of
//! that rounded angle.

use crate::tensor::RawTensor;

/// Validated arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    /// Input and output of q, then of k, where present.
    pub tensors: [Option<(RawTensor, RawTensor)>; 2],
    pub positions: PositionSource,
    pub rotation: Rotation,
    pub inverse: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum PositionSource {
    From(i64),
    PerToken(RawTensor),
}

/// A validated rotation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rotation {
    pub style: Style,
    /// Even, not above the head dimension.
    pub rotary_dim: usize,
    pub angles: Angles,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Angles {
    Computed {
        theta: f32,
        scaling: Scaling,
        freq_factors: Option<RawTensor>,
        /// 0 for the scaling's own.
        attention_factor: f32,
    },
    Table {
        cos: RawTensor,
        sin: RawTensor,
    },
}

impl Rotation {
    /// Positions a table has; `None` if angles are computed and any position will do.
    pub fn max_positions(&self) -> Option<usize> {
        match &self.angles {
            Angles::Computed { .. } => None,
            Angles::Table { cos, .. } => Some(cos.layout.dim(0)),
        }
    }
}

/// Which components form the pairs that are rotated. The discriminants are those of the C ABI (`UNSLOTH_ROPE_STYLE_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Style {
    /// Components `i` and `i + rotary_dim / 2` (GPT-NeoX, and Llama in Hugging Face's layout).
    #[default]
    HalfSplit = 0,
    /// Components `2i` and `2i + 1` (GPT-J, and Llama in Meta's layout, which GGUF keeps).
    Interleaved = 1,
}

impl Style {
    /// The style with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Style> {
        [Style::HalfSplit, Style::Interleaved]
            .into_iter()
            .find(|s| *s as u32 == value)
    }
}

/// How frequencies are stretched for contexts longer than the model was trained with.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Scaling {
    /// Not at all.
    #[default]
    None,
    /// Position interpolation (Chen et al. 2023, arXiv:2306.15595): every frequency is divided by `factor`.
    Linear {
        /// At least 1 to lengthen the context; positive.
        factor: f32,
    },
    /// NTK-aware (bloc97 2023, as in the YaRN paper's equation 16): theta becomes `theta * factor^(d / (d - 2))`, so that the
    /// lowest frequency is divided by `factor` and the highest kept. The static form: `factor` does not follow the length.
    Ntk {
        /// As for linear scaling.
        factor: f32,
    },
    /// YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.4): pairs that turn more than `beta_fast` times in the original
    /// context are kept, those that turn less than `beta_slow` times are divided by `factor`, with a linear ramp over the pair
    /// index between them. Cosines and sines are multiplied by the attention factor. As in the authors' code and Hugging Face's
    /// `_compute_yarn_parameters`.
    Yarn {
        /// Context extension; positive.
        factor: f32,
        /// Positions the model was trained with before extension.
        original_max_positions: u32,
        /// Turns above which a pair is kept; 0 for the usual 32.
        beta_fast: f32,
        /// Turns below which a pair is interpolated; 0 for the usual 1.
        beta_slow: f32,
        /// Share of the ramp that is applied, the authors' `extrapolation_factor`; 0 for the usual 1.
        extrapolation_factor: f32,
        /// The ramp's ends stay fractional, as in gpt-oss (`truncate: false`); otherwise they are rounded outwards.
        fractional_ramp: bool,
    },
    /// Llama 3.1's: wavelengths below `original_max_positions / high_freq_factor` are kept, those above
    /// `original_max_positions / low_freq_factor` are multiplied by `factor`, with a linear blend between. As in Meta's
    /// `apply_scaling` and Hugging Face's `_compute_llama3_parameters`.
    Llama3 {
        /// Context extension, 8 or 32 in the released models; positive.
        factor: f32,
        /// 1 in the released models; positive.
        low_freq_factor: f32,
        /// 4 in the released models; above `low_freq_factor`.
        high_freq_factor: f32,
        /// 8192 in the released models.
        original_max_positions: u32,
    },
}

/// The inverse frequencies of a base and a scaling, as many as there are pairs that turn; gives the
/// factor that multiplies cosines and sines (1 but for YaRN).
pub(crate) fn scaled_frequencies(theta: f32, scaling: Scaling, out: &mut [f32]) -> f32 {
    let rotary_dim = 2 * out.len();
    let dim = rotary_dim as f32;
    // The power is computed before the reciprocal, as the models' code does: the two roundings
    // decide the last bit.
    let power = |theta: f32, i: usize| theta.powf((2 * i) as f32 / dim);
    let mut fill = |frequency: &dyn Fn(usize) -> f32| {
        for (i, f) in out.iter_mut().enumerate() {
            *f = frequency(i);
        }
    };
    match scaling {
        Scaling::None => fill(&|i| power(theta, i).recip()),
        Scaling::Linear { factor } => fill(&|i| power(theta, i).recip() / factor),
        Scaling::Ntk { factor } => {
            // With two components there is one frequency, 1, whatever the base.
            let exponent = f64::from(dim) / f64::from(dim - 2.0).max(1.0);
            let theta = (f64::from(theta) * f64::from(factor).powf(exponent)) as f32;
            fill(&|i| power(theta, i).recip());
        }
        Scaling::Yarn {
            factor,
            original_max_positions,
            beta_fast,
            beta_slow,
            extrapolation_factor,
            fractional_ramp,
        } => {
            let or = |value: f32, default: f32| if value == 0.0 { default } else { value };
            let (low, high) = yarn_ramp(
                theta,
                rotary_dim,
                original_max_positions,
                (or(beta_fast, 32.0), or(beta_slow, 1.0)),
                fractional_ramp,
            );
            let extrapolation = f64::from(or(extrapolation_factor, 1.0));
            fill(&|i| {
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let kept = (1.0 - ramp) * extrapolation;
                // Both ends are the models' f32 numbers, so that pairs outside the ramp get these
                // to the bit; what lies between is rounded once.
                let power = power(theta, i);
                let (stretched, plain) = ((factor * power).recip(), power.recip());
                (f64::from(stretched) * (1.0 - kept) + f64::from(plain) * kept) as f32
            });
            return match factor <= 1.0 {
                true => 1.0,
                false => (0.1 * f64::from(factor).ln() + 1.0) as f32,
            };
        }
        Scaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_positions,
        } => {
            let context = original_max_positions as f32;
            let longest = context / low_freq_factor;
            let shortest = context / high_freq_factor;
            fill(&|i| {
                let frequency = power(theta, i).recip();
                let wavelength = 2.0 * std::f32::consts::PI / frequency;
                if wavelength > longest {
                    frequency / factor
                } else if wavelength < shortest {
                    frequency
                } else {
                    let smooth = (context / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            });
        }
    }
    1.0
}

/// The pair indices where YaRN's ramp begins and ends, in f64, as Python has them.
fn yarn_ramp(
    theta: f32,
    rotary_dim: usize,
    original_max_positions: u32,
    (beta_fast, beta_slow): (f32, f32),
    fractional: bool,
) -> (f64, f64) {
    let dim = rotary_dim as f64;
    // The pair that turns `turns` times over the original context.
    let pair = |turns: f32| {
        let wavelength =
            f64::from(original_max_positions) / (f64::from(turns) * 2.0 * std::f64::consts::PI);
        dim * wavelength.ln() / (2.0 * f64::from(theta).ln())
    };
    let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
    if !fractional {
        (low, high) = (low.floor(), high.ceil());
    }
    (low, high) = (low.max(0.0), high.min(dim - 1.0));
    if low == high {
        high += 0.001;
    }
    (low, high)
}
