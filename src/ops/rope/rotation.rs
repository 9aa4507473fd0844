//! Which angle each pair of components turns by: the part of RoPE that other operations (the KV cache's fused append, the
//! attention block) share.
//!
//! For a rotary dimension `d`, pair `i` of `d / 2` turns by `position * inv_freq[i]`, with
//! `inv_freq[i] = theta^(-2i/d)` before scaling. Frequencies, angles, sines and cosines are f32, as in the models' own code: the
//! product `position * inv_freq[i]` is rounded to f32, its sine and cosine are those of that rounded angle.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::ops::check::{self, Arg};
use crate::tensor::{RawTensor, TensorRef};

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

/// Where the angles come from.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Angles<'a> {
    /// Frequencies of a base and a scaling; see [`inverse_frequencies`].
    Computed {
        /// The base; 0 for 10000.
        theta: f32,
        /// Context extension.
        scaling: Scaling,
        /// Divides every scaled frequency: f32 `[rotary_dim / 2]`, contiguous. GGUF's `rope_freqs`, the short or long factors
        /// of LongRoPE (arXiv:2402.13753).
        freq_factors: Option<TensorRef<'a>>,
        /// Multiplies cosines and sines; 0 for the scaling's own: `0.1 ln(factor) + 1` for YaRN with a `factor` above 1, else 1. A
        /// model with `mscale` and `mscale_all_dim` (DeepSeek) wants
        /// `(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)`.
        attention_factor: f32,
    },
    /// The caller's cosines and sines, both f32 `[max_positions, rotary_dim / 2]`, contiguous in the last dimension. Positions
    /// must lie inside.
    Table {
        /// Cosines.
        cos: TensorRef<'a>,
        /// Sines.
        sin: TensorRef<'a>,
    },
}

impl Default for Angles<'_> {
    fn default() -> Self {
        Angles::Computed {
            theta: 0.0,
            scaling: Scaling::None,
            freq_factors: None,
            attention_factor: 0.0,
        }
    }
}

/// How vectors are rotated; the default is plain half-split RoPE of the whole head with theta 10000.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rotation<'a> {
    /// Which components form pairs.
    pub style: Style,
    /// Leading components that are rotated, even; the rest pass through. 0 for the whole head.
    pub rotary_dim: usize,
    /// Where the angles come from.
    pub angles: Angles<'a>,
}

/// A validated [`Rotation`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct RotationProblem {
    pub style: Style,
    /// Even, not above the head dimension.
    pub rotary_dim: usize,
    pub angles: AngleSource,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum AngleSource {
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

impl RotationProblem {
    /// Positions a table has; `None` if angles are computed and any position will do.
    pub fn max_positions(&self) -> Option<usize> {
        match &self.angles {
            AngleSource::Computed { .. } => None,
            AngleSource::Table { cos, .. } => Some(cos.layout.dim(0)),
        }
    }

    /// The tensors it reads, with their names, for data and overlap checks.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &RawTensor)> {
        let pair = match &self.angles {
            AngleSource::Computed { freq_factors, .. } => {
                [freq_factors.as_ref().map(|t| ("freq_factors", t)), None]
            }
            AngleSource::Table { cos, sin } => [Some(("cos", cos)), Some(("sin", sin))],
        };
        pair.into_iter().flatten()
    }

    /// The data checks of its tensors.
    pub fn check_data(&self, op: &'static str) -> Result<()> {
        for (name, tensor) in self.tensors() {
            Arg::new(op, name, tensor).data()?;
        }
        Ok(())
    }
}

impl Rotation<'_> {
    /// Validates for heads of `head_dim` components.
    pub(crate) fn problem(&self, op: &'static str, head_dim: usize) -> Result<RotationProblem> {
        let (name, rotary_dim) = match self.rotary_dim {
            0 => ("head_dim", head_dim),
            n => ("rotary_dim", n),
        };
        if rotary_dim > head_dim {
            let problem = format!("is {rotary_dim}, above the head_dim {head_dim}");
            return Err(Error::invalid(op, name, problem));
        }
        if !rotary_dim.is_multiple_of(2) {
            let problem = format!("is {rotary_dim}: an even number of components is rotated");
            return Err(Error::invalid(op, name, problem));
        }
        let half = rotary_dim / 2;
        let angles = match &self.angles {
            Angles::Computed {
                theta,
                scaling,
                freq_factors,
                attention_factor,
            } => {
                let theta = match check::finite(op, "theta", *theta)? {
                    0.0 => 10_000.0,
                    theta => positive(op, "theta", theta)?,
                };
                scaling.check(op)?;
                not_negative(op, "attention_factor", *attention_factor)?;
                let freq_factors = freq_factors.as_ref().map(TensorRef::raw);
                if let Some(factors) = &freq_factors {
                    Arg::new(op, "freq_factors", factors)
                        .dtype(&[DType::F32])?
                        .shape(&[half])?
                        .last_contiguous()?;
                }
                AngleSource::Computed {
                    theta,
                    scaling: *scaling,
                    freq_factors,
                    attention_factor: *attention_factor,
                }
            }
            Angles::Table { cos, sin } => {
                let (cos, sin) = (cos.raw(), sin.raw());
                let c = Arg::new(op, "cos", &cos)
                    .dtype(&[DType::F32])?
                    .rank(&[2])?
                    .last_contiguous()?;
                c.shape(&[cos.layout.dim(0), half])?;
                Arg::new(op, "sin", &sin)
                    .dtype(&[DType::F32])?
                    .shape_of(c)?
                    .last_contiguous()?;
                AngleSource::Table { cos, sin }
            }
        };
        Ok(RotationProblem {
            style: self.style,
            rotary_dim,
            angles,
        })
    }
}

impl Scaling {
    fn check(&self, op: &'static str) -> Result<()> {
        let original = |n: u32| match n {
            0 => Err(Error::invalid(
                op,
                "original_max_positions",
                "is 0, this scaling needs it",
            )),
            _ => Ok(()),
        };
        match *self {
            Scaling::None => Ok(()),
            Scaling::Linear { factor } | Scaling::Ntk { factor } => {
                positive(op, "factor", factor).map(drop)
            }
            Scaling::Yarn {
                factor,
                original_max_positions,
                beta_fast,
                beta_slow,
                extrapolation_factor,
                fractional_ramp: _,
            } => {
                positive(op, "factor", factor)?;
                original(original_max_positions)?;
                not_negative(op, "beta_fast", beta_fast)?;
                not_negative(op, "beta_slow", beta_slow)?;
                not_negative(op, "extrapolation_factor", extrapolation_factor)
            }
            Scaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            } => {
                positive(op, "factor", factor)?;
                positive(op, "low_freq_factor", low_freq_factor)?;
                check::finite(op, "high_freq_factor", high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    let problem = format!(
                        "is {high_freq_factor}, it must be above low_freq_factor {low_freq_factor}"
                    );
                    return Err(Error::invalid(op, "high_freq_factor", problem));
                }
                original(original_max_positions)
            }
        }
    }
}

fn positive(op: &'static str, name: &'static str, value: f32) -> Result<f32> {
    if check::finite(op, name, value)? > 0.0 {
        return Ok(value);
    }
    let problem = format!("is {value}, a positive number is needed");
    Err(Error::invalid(op, name, problem))
}

fn not_negative(op: &'static str, name: &'static str, value: f32) -> Result<()> {
    if check::finite(op, name, value)? >= 0.0 {
        return Ok(());
    }
    let problem = format!("is {value}, at least 0 is needed");
    Err(Error::invalid(op, name, problem))
}

/// The `rotary_dim / 2` inverse frequencies of a base and a scaling, and the factor that multiplies cosines and sines (1 but
/// for YaRN).
///
/// # Errors
/// A parameter is out of its range; `rotary_dim` is odd.
pub fn inverse_frequencies(
    theta: f32,
    scaling: Scaling,
    rotary_dim: usize,
) -> Result<(Vec<f32>, f32)> {
    let rotation = Rotation {
        rotary_dim,
        angles: Angles::Computed {
            theta,
            scaling,
            freq_factors: None,
            attention_factor: 0.0,
        },
        ..Rotation::default()
    };
    match rotation.problem("rope", rotary_dim)?.angles {
        AngleSource::Computed { theta, scaling, .. } => {
            Ok(scaled_frequencies(theta, scaling, rotary_dim))
        }
        AngleSource::Table { .. } => Ok((Vec::new(), 1.0)),
    }
}

/// [`inverse_frequencies`] of validated arguments.
pub(crate) fn scaled_frequencies(
    theta: f32,
    scaling: Scaling,
    rotary_dim: usize,
) -> (Vec<f32>, f32) {
    let dim = rotary_dim as f32;
    let half = rotary_dim / 2;
    // The power is computed before the reciprocal, as the models' code does: the two roundings decide the last bit.
    let powers = |theta: f32| (0..half).map(move |i| theta.powf((2 * i) as f32 / dim));
    let plain = || powers(theta).map(f32::recip).collect::<Vec<f32>>();
    match scaling {
        Scaling::None => (plain(), 1.0),
        Scaling::Linear { factor } => (plain().iter().map(|f| f / factor).collect(), 1.0),
        Scaling::Ntk { factor } => {
            // With two components there is one frequency, 1, whatever the base.
            let exponent = f64::from(dim) / f64::from(dim - 2.0).max(1.0);
            let theta = f64::from(theta) * f64::from(factor).powf(exponent);
            (powers(theta as f32).map(f32::recip).collect(), 1.0)
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
            let extrapolation = or(extrapolation_factor, 1.0);
            let frequencies = powers(theta).enumerate().map(|(i, power)| {
                let ramp = ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
                let kept = (1.0 - ramp) * extrapolation;
                (1.0 / (factor * power)) * (1.0 - kept) + (1.0 / power) * kept
            });
            let attention = if factor <= 1.0 {
                1.0
            } else {
                (0.1 * f64::from(factor).ln() + 1.0) as f32
            };
            (frequencies.collect(), attention)
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
            let scaled = plain().into_iter().map(|frequency| {
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
            (scaled.collect(), 1.0)
        }
    }
}

/// The pair indices where YaRN's ramp begins and ends. Scalars in f64, as Python has them, then rounded to f32.
fn yarn_ramp(
    theta: f32,
    rotary_dim: usize,
    original_max_positions: u32,
    (beta_fast, beta_slow): (f32, f32),
    fractional: bool,
) -> (f32, f32) {
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
    (low as f32, high as f32)
}
