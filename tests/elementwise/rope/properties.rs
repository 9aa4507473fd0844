//! What the mathematics promises of rotary embeddings.

use crate::common::{TestTensor, contexts};
use proptest::prelude::*;
use unsloth::ops::rope::{self, Params, Positions, Rotation, Style};
use unsloth::{Context, DType, InOut, Stream};

/// Rotates one head at one position.
fn rotated(ctx: &Context, x: &[f64], style: Style, position: i64, inverse: bool) -> Vec<f64> {
    let mut x = TestTensor::of(DType::F32, &[1, 1, x.len()], x).upload(ctx);
    let params = Params {
        q: Some(InOut::InPlace(x.view_mut())),
        positions: Positions::From(position),
        rotation: Rotation {
            style,
            ..Rotation::default()
        },
        inverse,
        ..Params::default()
    };
    rope::forward(ctx, &params, Stream::DEFAULT).unwrap();
    x.download_output().values()
}

fn styles() -> impl Strategy<Value = Style> {
    prop_oneof![Just(Style::HalfSplit), Just(Style::Interleaved)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// The dot product of a rotated query and key depends on the difference of their positions
    /// alone.
    #[test]
    fn scores_are_relative(
        q in prop::collection::vec(-2.0..2.0, 16..=16),
        k in prop::collection::vec(-2.0..2.0, 16..=16),
        style in styles(),
        (i, j, shift) in (0i64..200, 0i64..200, 0i64..1000),
    ) {
        for ctx in contexts() {
            let score = |i, j| -> f64 {
                let (q, k) = (rotated(&ctx, &q, style, i, false), rotated(&ctx, &k, style, j, false));
                q.iter().zip(&k).map(|(a, b)| a * b).sum()
            };
            // Angles up to 1200 are rounded to f32, by at most 1200 · 2⁻²⁴ each.
            prop_assert!((score(i, j) - score(i + shift, j + shift)).abs() < 64.0 * 4.0 * 1200.0 / 16_777_216.0);
        }
    }

    /// The inverse undoes the rotation.
    #[test]
    fn inverse_undoes(
        x in prop::collection::vec(-2.0f64..2.0, 24..=24),
        style in styles(),
        position in -100_000i64..100_000,
    ) {
        for ctx in contexts() {
            let there = rotated(&ctx, &x, style, position, false);
            let back = rotated(&ctx, &there, style, position, true);
            for (x, y) in x.iter().zip(&back) {
                prop_assert!((x - y).abs() < 2e-6, "{x} came back as {y}");
            }
        }
    }

    /// Rotation keeps lengths.
    #[test]
    fn norm_is_kept(
        x in prop::collection::vec(-2.0f64..2.0, 10..=10),
        style in styles(),
        position in 0i64..1_000_000,
    ) {
        for ctx in contexts() {
            let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
            let y = rotated(&ctx, &x, style, position, false);
            prop_assert!((norm(&x) - norm(&y)).abs() < 1e-5);
        }
    }
}
