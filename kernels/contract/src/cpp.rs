//! The same for kernels in CUDA C++.

use std::fmt::Write;

use crate::{
    Activation, Blocks, Float, I8, TERNARY, attention, linear, quantize, rank_sums, rotation,
};

/// A header that declares what kernels in CUDA C++ need of this crate.
pub fn header() -> String {
    let mut text = String::from(
        "// Generated from kernels/contract.\n#pragma once\n\n#include <stdint.h>\n\nnamespace unsloth {\n\n",
    );
    macro_rules! declare {
        ($($name:ident: $codes:ty,)*) => {
            $(
                let codes = <$codes>::ALL.iter();
                let codes = codes.map(|code| format!("k{} = {}", code.identifier(), code.code()));
                let codes = codes.collect::<Vec<_>>().join(", ");
                let _ = writeln!(text, "enum class {} : int32_t {{ {codes} }};", stringify!($name));
            )*
        };
    }
    declare! {
        Float: Float,
        Blocks: Blocks,
        Activation: Activation,
        Mask: attention::Mask,
        Part: attention::Part,
        Epilogue: linear::Epilogue,
        QuantizeKind: quantize::Kind,
        QuantizeCodes: quantize::Codes,
        Rule: quantize::Rule,
        PositionKind: rotation::Positions,
        AngleKind: rotation::Angles,
    }
    let _ = writeln!(
        text,
        "constexpr int32_t kNoLimit = {};",
        attention::NO_LIMIT
    );
    for (name, value) in [
        ("DtypeI8", I8),
        ("DtypeTernary", TERNARY),
        ("QuantizeHeld", quantize::HELD),
        ("RankSumRanks", rank_sums::RANKS),
        ("RankSumRows", rank_sums::ROWS),
        ("RankSumLines", rank_sums::LINES),
    ] {
        let _ = writeln!(text, "constexpr uint32_t k{name} = {value};");
    }
    text.push_str("\n}  // namespace unsloth\n");
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn codes_become_enums() {
        let header = super::header();
        let mask = "enum class Mask : int32_t { kNone = 0, kCausal = 1, kWindow = 2 };\n";
        assert!(header.contains(mask), "{header}");
    }
}
