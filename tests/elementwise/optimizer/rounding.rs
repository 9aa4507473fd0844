//! What is kept of weights of 16 bits.

use half::bf16;
use unsloth::optimizer::{Group, Master};
use unsloth::{Context, ContextOptions};

use super::model::{BF16, Config, F16, F32, Model, Shape, save, step};
use super::{ADAMW, SGD};
use crate::common::tensor::round_to;
use crate::common::{FLOATS, TestTensor, contexts, rng};

/// 16-bit weights beside f32 ones that began alike and have the same gradients: of f32 masters and
/// remainders they are the rounded f32 weights, and the values that are kept are these, bit for
/// bit.
#[test]
fn masters_are_f32_weights() {
    let groups = [Group {
        learning_rate: 1e-3,
        weight_decay: 0.1,
    }];
    let rng = &mut rng();
    // More than a chunk.
    let shapes: &'static [usize] = &[3, 5_500];
    for ctx in contexts() {
        for (dtype, master) in [
            (BF16, Master::F32),
            (F16, Master::F32),
            (BF16, Master::Remainder),
        ] {
            let config = Config {
                groups: &groups,
                ..Config::new(ADAMW).master(master)
            };
            let mut model = Model::new(&ctx, rng, &[Shape(dtype, BF16, shapes, 1, 0)]);
            let mut twin = Model::new(&ctx, rng, &[Shape(F32, BF16, shapes, 0, 0)]);
            let start = TestTensor::of(F32, shapes, &model.values()[0]);
            twin.weights[0] = start.upload(&ctx);
            let (mut optimizer, mut of_twin) = (model.optimizer(&config), twin.optimizer(&config));
            for _ in 0..6 {
                let gradients = model.random_gradients(rng, 1.0);
                twin.set_gradients(&gradients);
                step(&mut optimizer);
                step(&mut of_twin);
            }
            let kept = twin.bits().remove(0);
            let kept = kept
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            let kept: Vec<u32> = kept.collect();
            // Masters are the end of what is saved.
            let elements = kept.len().next_multiple_of(8);
            let size = if master == Master::F32 { 4 } else { 2 };
            let saved = save(&optimizer);
            let masters = &saved[saved.len() - (elements * size).next_multiple_of(256)..];
            let weights = model.bits().remove(0);
            for (i, &bits) in kept.iter().enumerate() {
                let weight = u16::from_le_bytes([weights[2 * i], weights[2 * i + 1]]);
                let value = f32::from_bits(bits);
                let rounded = match dtype {
                    F16 => half::f16::from_f32(value).to_bits(),
                    _ => bf16::from_f32(value).to_bits(),
                };
                let tie = bits & 0xffff == 0x8000 && master == Master::Remainder;
                assert!(weight == rounded || tie, "{value} gave {weight:#x}");
                let master: Vec<u8> = masters[size * i..size * (i + 1)].to_vec();
                assert_eq!(master, bits.to_le_bytes()[..size], "element {i}");
            }
            model.assert_within_bounds();
        }
    }
}

/// Without a master a weight is rounded to its dtype by every step.
#[test]
fn weights_alone_are_rounded_each_step() {
    let rng = &mut rng();
    for ctx in contexts() {
        for dtype in FLOATS {
            let mut model = Model::new(&ctx, rng, &[Shape(dtype, dtype, &[3, 129], 1, 0)]);
            let mut optimizer = model.optimizer(&Config::new(SGD));
            let mut expected = model.values();
            for _ in 0..10 {
                let gradients = model.random_gradients(rng, 0.1);
                step(&mut optimizer);
                for (x, g) in expected[0].iter_mut().zip(&gradients[0]) {
                    // In f32 first, as all arithmetic is.
                    *x = round_to(dtype, f64::from((*x - g) as f32));
                }
                assert_eq!(model.values(), expected, "{dtype}");
            }
        }
    }
}

/// Rounding at random depends on the seed, the step and the place alone, and loses nothing on
/// average where rounding to nearest loses all.
#[test]
fn random_rounding_is_unbiased_and_repeats() {
    const STEPS: usize = 32;
    const NUM: usize = 20_000;
    const SHAPE: Shape = Shape(BF16, F32, &[4, NUM / 4], 0, 0);
    // A 16th of the distance between 1 and the next below it.
    let rate = f32::powi(2.0, -12);
    let groups = [Group {
        learning_rate: rate,
        weight_decay: 0.0,
    }];
    let run = |ctx: &Context, seed, master| {
        let rng = &mut rng();
        let mut model = Model::new(ctx, rng, &[SHAPE]);
        let ones = vec![1.0; NUM];
        let start = TestTensor::of(BF16, SHAPE.2, &ones);
        model.weights[0] = start.upload(ctx);
        let config = Config {
            groups: &groups,
            ..Config::new(SGD).master(master)
        };
        let mut optimizer = model.seeded(&config, seed);
        model.set_gradients(&[ones]);
        (0..STEPS).for_each(|_| step(&mut optimizer));
        model.assert_within_bounds();
        model.values().remove(0)
    };
    let mut all = Vec::new();
    let threads = |num_threads| {
        let options = ContextOptions {
            num_threads,
            ..ContextOptions::default()
        };
        Context::new(&options).unwrap()
    };
    for ctx in [threads(1), threads(3)].into_iter().chain(contexts()) {
        all.push(run(&ctx, 7, Master::Stochastic));
    }
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]));
    let ctx = threads(2);
    assert_ne!(run(&ctx, 8, Master::Stochastic), all[0]);
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let expected = 1.0 - STEPS as f64 * f64::from(rate);
    // Each step rounds by at most 2⁻⁸, independently: five deviations.
    let allowed = 5.0 * f64::powi(2.0, -9) * (STEPS as f64 / NUM as f64).sqrt();
    assert!(
        (mean(&all[0]) - expected).abs() < allowed,
        "{}",
        mean(&all[0])
    );
    assert_eq!(mean(&run(&ctx, 7, Master::None)), 1.0);
}
