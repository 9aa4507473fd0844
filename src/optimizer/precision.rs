//! Mixed precision: what is computed in 16 bits, where weights have more, and how the loss is
//! scaled.

use super::OP;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::optimizer::Scaling;

/// Where the f32 value of a 16-bit weight is kept between steps. The discriminants are those of the
/// C ABI (`UNSLOTH_MASTER_*`). A weight of f32 is its own, whatever this says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Master {
    /// Nowhere: each update is rounded to the weight's dtype, and small ones are lost.
    #[default]
    None = 0,
    /// In f32, 4 bytes (Micikevicius et al. 2017, arXiv:1710.03740).
    F32 = 1,
    /// In the bf16 weight and 2 bytes that hold what rounding took from it. The value is that of
    /// [`Master::F32`], bit for bit; the weight too, unless the value lies halfway between two of
    /// bf16: then it is the one further from zero.
    Remainder = 2,
    /// Nowhere; updates are rounded to bf16 at random so that on average none is lost.
    Stochastic = 3,
}

impl Master {
    /// The one with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Master> {
        use Master::{F32, None, Remainder, Stochastic};
        [None, F32, Remainder, Stochastic]
            .into_iter()
            .find(|m| *m as u32 == value)
    }
}

/// How the loss is scaled, so that small gradients of f16 do not vanish (arXiv:1710.03740, section
/// 3.2). The rule is that of PyTorch's `GradScaler`, with Megatron-LM's hysteresis:
///
/// After a step without an update, because gradients were not finite, the scale is multiplied by
/// `backoff`; after `interval` updates in a row by `growth`. It stays what it is where it would be
/// infinite or below the least normal number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// Whether it changes.
    pub dynamic: bool,
    /// The first scale, above 0.
    pub init: f32,
    /// At least 1.
    pub growth: f32,
    /// Above 0, at most 1.
    pub backoff: f32,
    /// At least 1.
    pub interval: u32,
    /// Steps in a row that must fail before the scale shrinks; at least 1, as in PyTorch.
    pub hysteresis: u32,
}

impl LossScale {
    /// No scaling: 1, for ever. What bf16 and f32 need.
    pub const NONE: LossScale = LossScale::fixed(1.0);

    /// PyTorch's defaults: 65536, doubled after 2000 updates, halved after an overflow.
    pub const DYNAMIC: LossScale = LossScale {
        dynamic: true,
        ..LossScale::fixed(65536.0)
    };

    /// A scale that does not change.
    pub const fn fixed(scale: f32) -> LossScale {
        LossScale {
            dynamic: false,
            init: scale,
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
            hysteresis: 1,
        }
    }

    pub(super) fn check(&self) -> Result<Scaling> {
        let between = |name, value: f32, least: &str, ok: bool| match ok {
            true => Ok(()),
            false => Err(Error::invalid(
                OP,
                name,
                text!("is {value}, allowed: finite, {least}"),
            )),
        };
        let (init, growth, backoff) = (self.init, self.growth, self.backoff);
        let is_scale = init.is_finite() && init >= f32::MIN_POSITIVE;
        between("precision.loss_scale.init", init, "above 0", is_scale)?;
        let grows = growth.is_finite() && growth >= 1.0;
        between("precision.loss_scale.growth", growth, "at least 1", grows)?;
        let shrinks = backoff > 0.0 && backoff <= 1.0;
        between(
            "precision.loss_scale.backoff",
            backoff,
            "above 0, at most 1",
            shrinks,
        )?;
        for (name, value) in [
            ("precision.loss_scale.interval", self.interval),
            ("precision.loss_scale.hysteresis", self.hysteresis),
        ] {
            if value == 0 {
                return Err(Error::invalid(OP, name, "is 0, at least 1 is needed"));
            }
        }
        Ok(Scaling {
            dynamic: self.dynamic,
            growth,
            backoff,
            interval: self.interval,
            hysteresis: self.hysteresis,
        })
    }
}

impl Default for LossScale {
    fn default() -> Self {
        LossScale::NONE
    }
}

/// The precision that a model is trained in.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MixedPrecision {
    /// What weights are multiplied in: the dtype of every weight but those kept in f32. `None` asks
    /// nothing of them.
    pub compute: Option<DType>,
    /// Where weights of 16 bits are kept in f32.
    pub master: Master,
    /// How the loss is scaled.
    pub loss_scale: LossScale,
}
