//! The library's enums by the numbers that kernels know them by, which are `kernels/contract`'s.

use contract::rotation::Style as StyleCode;
use contract::{Activation as ActivationCode, Float};

use crate::dtype::DType;
use crate::problem::rope::Style;
use crate::problem::swiglu::Activation;

// Kernels are chosen by dtypes as the C ABI numbers them.
const _: () = {
    assert!(DType::F32 as u32 == Float::F32.code());
    assert!(DType::F16 as u32 == Float::F16.code());
    assert!(DType::Bf16 as u32 == Float::Bf16.code());
};

pub(super) fn activation(activation: Activation) -> ActivationCode {
    match activation {
        Activation::Silu => ActivationCode::Silu,
        Activation::Gelu => ActivationCode::Gelu,
        Activation::GeluTanh => ActivationCode::GeluTanh,
        Activation::ReluSquared => ActivationCode::ReluSquared,
    }
}

pub(super) fn style(style: Style) -> StyleCode {
    match style {
        Style::HalfSplit => StyleCode::HalfSplit,
        Style::Interleaved => StyleCode::Interleaved,
    }
}
