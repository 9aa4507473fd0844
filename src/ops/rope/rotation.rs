//! Which angle each pair of components turns by: the part of RoPE that other operations (the KV cache's fused append, the
//! attention block) share.
//!
//! For a rotary dimension `d`, pair `i` of `d / 2` turns by `position * inv_freq[i]`, with
//! `inv_freq[i] = theta^(-2i/d)` before scaling. Frequencies, angles, sines and cosines are f32, as in the models' own code: the
//! product `position * inv_freq[i]` is rounded to f32, its sine and cosine are those of that rounded angle.

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ops::check::{self, Arg};
use crate::ops::operation::Tensors;
use crate::problem::rope::{self as problem, Scaling, Style, scaled_frequencies};
use crate::tensor::TensorRef;

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

impl Rotation<'_> {
    /// The tensors that it reads.
    pub(crate) fn tensors(&self, tensors: &mut Tensors) {
        match &self.angles {
            Angles::Computed { freq_factors, .. } => {
                tensors.read_optional("freq_factors", freq_factors.as_ref());
            }
            Angles::Table { cos, sin } => {
                tensors.read("cos", cos);
                tensors.read("sin", sin);
            }
        }
    }

    /// Validates for heads of `head_dim` components.
    pub(crate) fn problem(&self, op: &'static str, head_dim: usize) -> Result<problem::Rotation> {
        let (name, rotary_dim) = match self.rotary_dim {
            0 => ("head_dim", head_dim),
            n => ("rotary_dim", n),
        };
        if rotary_dim > head_dim {
            let problem = text!("is {rotary_dim}, above the head_dim {head_dim}");
            return Err(Error::invalid(op, name, problem));
        }
        if !rotary_dim.is_multiple_of(2) {
            let problem = text!("is {rotary_dim}: an even number of components is rotated");
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
                if matches!(scaling, Scaling::Yarn { .. }) && theta <= 1.0 {
                    // Its ramp is placed by the logarithm of the base.
                    let problem = text!("is {theta}, YaRN needs a base above 1");
                    return Err(Error::invalid(op, "theta", problem));
                }
                not_negative(op, "attention_factor", *attention_factor)?;
                let freq_factors = freq_factors.as_ref().map(TensorRef::raw);
                if let Some(factors) = &freq_factors {
                    Arg::new(op, "freq_factors", factors)
                        .dtype(&[DType::F32])?
                        .shape(&[half])?
                        .last_contiguous()?;
                }
                problem::Angles::Computed {
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
                problem::Angles::Table { cos, sin }
            }
        };
        Ok(problem::Rotation {
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
                    let problem = text!(
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
    let problem = text!("is {value}, a positive number is needed");
    Err(Error::invalid(op, name, problem))
}

fn not_negative(op: &'static str, name: &'static str, value: f32) -> Result<()> {
    if check::finite(op, name, value)? >= 0.0 {
        return Ok(());
    }
    let problem = text!("is {value}, at least 0 is needed");
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
    let half = rotary_dim / 2;
    let mut frequencies = Vec::new();
    match rotation.problem("rope", rotary_dim)?.angles {
        problem::Angles::Computed { theta, scaling, .. } => {
            frequencies
                .try_reserve_exact(half)
                .map_err(|_| Error::out_of_host_memory("rope", half.saturating_mul(4)))?;
            frequencies.resize(half, 0.0);
            let scale = scaled_frequencies(theta, scaling, &mut frequencies);
            Ok((frequencies, scale))
        }
        problem::Angles::Table { .. } => Ok((frequencies, 1.0)),
    }
}
