//! Gated activation.

use crate::tensor::RawTensor;

/// The function applied to the gate. The discriminants are those of the C ABI (`UNSLOTH_ACTIVATION_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Activation {
    /// `x / (1 + exp(-x))` (Llama, Qwen, Mistral).
    #[default]
    Silu = 0,
    /// `x Φ(x)` with the normal distribution function `Φ(x) = (1 + erf(x / √2)) / 2`.
    Gelu = 1,
    /// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2` (Gemma).
    GeluTanh = 2,
    /// `max(x, 0)²` (BitNet; arXiv 2109.08668).
    ReluSquared = 3,
}

impl Activation {
    /// The activation with this C ABI value.
    pub fn from_raw(value: u32) -> Option<Activation> {
        [
            Activation::Silu,
            Activation::Gelu,
            Activation::GeluTanh,
            Activation::ReluSquared,
        ]
        .into_iter()
        .find(|a| *a as u32 == value)
    }
}

/// The order of the halves of a packed tensor. The discriminants are those of the C ABI (`UNSLOTH_GATE_ORDER_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum GateOrder {
    /// Gate, then up.
    #[default]
    GateFirst = 0,
    /// Up, then gate.
    UpFirst = 1,
}

impl GateOrder {
    /// The order with this C ABI value.
    pub fn from_raw(value: u32) -> Option<GateOrder> {
        [GateOrder::GateFirst, GateOrder::UpFirst]
            .into_iter()
            .find(|o| *o as u32 == value)
    }

    /// Where gate and up begin, in units of the intermediate dimension.
    pub(crate) fn offsets(self) -> (usize, usize) {
        match self {
            GateOrder::GateFirst => (0, 1),
            GateOrder::UpFirst => (1, 0),
        }
    }
}

/// Validated arguments; a packed tensor has become its two halves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Problem {
    pub gate: RawTensor,
    pub up: RawTensor,
    pub out: RawTensor,
    pub activation: Activation,
}

/// Validated arguments of the backward pass; packed tensors have become their halves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backward {
    pub gate: RawTensor,
    pub up: RawTensor,
    pub dout: RawTensor,
    /// May be `gate`.
    pub dgate: RawTensor,
    /// May be `up`.
    pub dup: RawTensor,
    /// The forward's output again; may be `dout`.
    pub out: Option<RawTensor>,
    pub activation: Activation,
}

impl Backward {
    /// Every tensor; `dout` stands for an output that is not asked for.
    pub fn tensors(&self) -> [&RawTensor; 6] {
        let out = self.out.as_ref().unwrap_or(&self.dout);
        [
            &self.gate,
            &self.up,
            &self.dout,
            &self.dgate,
            &self.dup,
            out,
        ]
    }
}
