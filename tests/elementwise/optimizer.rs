//! Optimizers against their definitions over many steps; clipping, loss scaling, what is kept of
//! 16-bit weights, steps that are skipped, saved states; misuse.

mod misuse;
mod model;
mod rounding;

use crate::common::reference::optimizer::{Scaler, Weights, clip};
use crate::common::{FLOATS, TestTensor, contexts, rng};
use model::{BF16, Config, F16, F32, Model, PLAIN, SHAPES, Shape, save, step};
use rand::Rng;
use unsloth::optimizer::{Group, LossScale, Master, Optimizer, Rule};
use unsloth::{Backend, Stream};

const ADAMW: Rule = Rule::Adam {
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-2,
    decoupled: true,
};

const SGD: Rule = Rule::Sgd {
    momentum: 0.0,
    nesterov: false,
    decoupled: false,
};

fn rules() -> Vec<Rule> {
    let adam = |decoupled| Rule::Adam {
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-2,
        decoupled,
    };
    let sgd = |momentum, nesterov, decoupled| Rule::Sgd {
        momentum,
        nesterov,
        decoupled,
    };
    vec![
        adam(true),
        adam(false),
        sgd(0.0, false, false),
        sgd(0.0, false, true),
        sgd(0.9, false, false),
        sgd(0.9, true, false),
    ]
}

/// Steps of f32 weights, with all that a step does: groups of their own, a loss scale that is
/// divided by, clipping of some of the gradients.
#[test]
fn agrees_with_its_definition() {
    const STEPS: i32 = 1000;
    const SCALE: f64 = 1024.0;
    const MAX_NORM: f64 = 1.0;
    let groups = [
        Group {
            learning_rate: 1e-2,
            weight_decay: 0.0,
        },
        Group {
            learning_rate: 3e-3,
            weight_decay: 0.5,
        },
    ];
    let rng = &mut rng();
    for ctx in contexts() {
        // A GPU runs kernels for as long as the copies of so many gradients take.
        let steps = if ctx.backend() == Backend::Cpu {
            STEPS
        } else {
            STEPS / 5
        };
        for rule in rules() {
            println!("case {rule:?}");
            let config = Config {
                max_norm: MAX_NORM as f32,
                groups: &groups,
                ..Config::new(rule).scaled(LossScale::fixed(SCALE as f32))
            };
            let mut model = Model::new(&ctx, rng, SHAPES);
            let mut expected: Vec<_> = model.values().into_iter().map(Weights::new).collect();
            let mut optimizer = model.optimizer(&config);
            let mut greatest = 1.0f64;
            let some: Vec<_> = (0..13)
                .map(|i| {
                    // Norms on either side of the limit.
                    let size = SCALE * MAX_NORM / 16.0 * (1.0 + f64::from(i) / 13.0);
                    let mut gradients = model.random_gradients(rng, size);
                    let tensors: Vec<_> = model.gradients.iter().map(|g| g.download()).collect();
                    gradients.iter_mut().flatten().for_each(|g| *g /= SCALE);
                    let (_, by) = clip(&gradients, MAX_NORM);
                    gradients.iter_mut().flatten().for_each(|g| *g *= by);
                    (tensors, gradients)
                })
                .collect();
            for (tensors, gradients) in some.iter().cycle().take(steps as usize) {
                for (gradient, with) in model.gradients.iter_mut().zip(tensors) {
                    gradient.overwrite(with);
                }
                step(&mut optimizer);
                for ((weights, gradients), group) in
                    expected.iter_mut().zip(gradients).zip(&model.groups)
                {
                    weights.step(&rule, &groups[*group], gradients);
                    let all = weights.values.iter();
                    greatest = all.fold(greatest, |max, x| max.max(x.abs()));
                }
            }
            // A rounding of the weight and one of what is added to it, each step.
            let allowed = f64::from(steps) * greatest * f64::powi(2.0, -23);
            for (actual, expected) in model.values().iter().zip(&expected) {
                for (x, y) in actual.iter().zip(&expected.values) {
                    assert!((x - y).abs() <= allowed, "{x}, not {y}, within {allowed}");
                }
            }
            let status = optimizer.status(Stream::DEFAULT).unwrap();
            assert_eq!((status.step, status.skipped), (steps as u64, 0));
            model.assert_within_bounds();
        }
    }
}

/// Clipping is that of `clip_grad_norm_`: nothing below the limit, over all parameters above.
#[test]
fn norms_are_limited() {
    let rng = &mut rng();
    let shapes = [
        Shape(F32, F32, &[40_000], 0, 0),
        Shape(F32, BF16, &[16_385], 1, 0),
        Shape(F32, F16, &[1], 0, 0),
    ];
    for ctx in contexts() {
        for max_norm in [100.0, 500.0] {
            let mut model = Model::new(&ctx, rng, &shapes);
            let config = Config {
                max_norm,
                ..Config::new(SGD)
            };
            let mut optimizer = model.optimizer(&config);
            let before = model.values();
            let gradients = model.random_gradients(rng, 1.0);
            let (norm, by) = clip(&gradients, f64::from(max_norm));
            assert_eq!(by < 1.0, max_norm == 100.0);
            step(&mut optimizer);
            let status = optimizer.status(Stream::DEFAULT).unwrap();
            assert!((f64::from(status.gradient_norm) - norm).abs() < 1e-6 * norm);
            for ((after, before), gradients) in model.values().iter().zip(&before).zip(&gradients) {
                for ((x, before), g) in after.iter().zip(before).zip(gradients) {
                    let error = (x - (before - by * g)).abs();
                    assert!(error < 2e-6, "{x}, {error} off");
                }
            }
        }
    }
}

/// The scale over many steps with overflows is that of PyTorch's rule, bit for bit.
#[test]
fn scales_follow_the_rule() {
    let rules = [
        LossScale {
            interval: 7,
            ..LossScale::DYNAMIC
        },
        LossScale {
            interval: 3,
            hysteresis: 3,
            growth: 1.5,
            backoff: 0.7,
            ..LossScale::DYNAMIC
        },
        // At once at what is finite.
        LossScale {
            init: 1e38,
            interval: 1,
            ..LossScale::DYNAMIC
        },
    ];
    let rng = &mut rng();
    for ctx in contexts() {
        for (i, rule) in rules.into_iter().enumerate() {
            let of_cpu = ctx.backend() == Backend::Cpu;
            let steps = match i {
                0 if of_cpu => 100_000,
                _ => 2_000,
            };
            let mut model = Model::new(&ctx, rng, &[Shape(F32, F32, &[3], 0, 0)]);
            let mut optimizer = model.optimizer(&Config::new(SGD).scaled(rule));
            let mut expected = Scaler::new(rule);
            let good = TestTensor::of(F32, &[3], &[0.0; 3]);
            let bad = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN]
                .map(|x| TestTensor::of(F32, &[3], &[0.0, x, 0.0]));
            let (mut skipped, mut was_good) = (0, true);
            for done in 1..=steps {
                let found_inf = rng.random_range(0..11) == 0;
                if found_inf || !was_good {
                    let gradient = match found_inf {
                        true => &bad[rng.random_range(0..3)],
                        false => &good,
                    };
                    model.gradients[0].overwrite(gradient);
                }
                was_good = !found_inf;
                skipped += u64::from(found_inf);
                step(&mut optimizer);
                expected.update(found_inf);
                let status = optimizer.status(Stream::DEFAULT).unwrap();
                assert_eq!(
                    (
                        status.loss_scale.to_bits(),
                        status.found_inf,
                        status.skipped,
                        status.step
                    ),
                    (expected.scale.to_bits(), found_inf, skipped, done - skipped),
                );
                assert_eq!(status.gradient_norm.is_nan(), found_inf);
            }
        }
    }
}

/// One gradient that is not finite, wherever it is: weights and what is kept of gradients stay as
/// they are, bit for bit, and gradients are zeroed where that is asked for.
#[test]
fn overflows_skip_the_step() {
    let rng = &mut rng();
    let shapes = [
        Shape(F32, F32, &[33], 1, 0),
        Shape(BF16, BF16, &[16_400], 0, 0),
        Shape(F16, F16, &[5], 0, 0),
    ];
    for ctx in contexts() {
        for (at, zero_gradients) in [(0, true), (1, false), (2, true), (1, true)] {
            let config = Config {
                zero_gradients,
                ..Config::new(ADAMW)
                    .master(Master::F32)
                    .scaled(LossScale::DYNAMIC)
            };
            let mut model = Model::new(&ctx, rng, &shapes);
            let mut optimizer = model.optimizer(&config);
            model.random_gradients(rng, 65536.0 / 100.0);
            step(&mut optimizer);
            let (weights, saved) = (model.bits(), save(&optimizer));
            let mut gradients = model.random_gradients(rng, 1.0);
            let last = gradients[at].len() - 1;
            let place = [0, last][usize::from(zero_gradients)];
            gradients[at][place] = [f64::INFINITY, f64::NAN][place % 2];
            let written = model.set_gradients(&gradients);
            step(&mut optimizer);
            assert_eq!(model.bits(), weights);
            // Behind header, records and control block.
            let moments = 64 + 16 * shapes.len() + 64;
            assert_eq!(save(&optimizer)[moments..], saved[moments..]);
            let status = optimizer.status(Stream::DEFAULT).unwrap();
            assert_eq!((status.step, status.skipped), (1, 1));
            assert_eq!((status.found_inf, status.loss_scale), (true, 32768.0));
            for (gradient, written) in model.gradients.iter().zip(written) {
                let left = gradient.download_output().values();
                match zero_gradients {
                    true => assert!(left.iter().all(|g| g.to_bits() == 0)),
                    false => assert_eq!(format!("{left:?}"), format!("{written:?}")),
                }
            }
            // The next one counts again.
            model.random_gradients(rng, 1.0);
            step(&mut optimizer);
            assert_ne!(model.bits(), weights);
            assert_eq!(optimizer.status(Stream::DEFAULT).unwrap().step, 2);
        }
    }
}

/// A step zeroes gradients that it was told to zero, and leaves others as they are.
#[test]
fn gradients_are_zeroed_or_kept() {
    let rng = &mut rng();
    for ctx in contexts() {
        for zero_gradients in [false, true] {
            let mut model = Model::new(&ctx, rng, SHAPES);
            let config = Config {
                zero_gradients,
                groups: &[PLAIN[0]; 2],
                ..Config::new(ADAMW)
            };
            let mut optimizer = model.optimizer(&config);
            let written = model.random_gradients(rng, 1.0);
            step(&mut optimizer);
            for (gradient, written) in model.gradients.iter().zip(written) {
                let left = gradient.download_output().values();
                let expected = if zero_gradients {
                    vec![0.0; left.len()]
                } else {
                    written
                };
                assert_eq!(left, expected);
            }
        }
    }
}

/// Multiplied gradients are the products, rounded once.
#[test]
fn gradients_are_scaled() {
    let rng = &mut rng();
    for ctx in contexts() {
        for dtype in FLOATS {
            let mut model = Model::new(&ctx, rng, &[Shape(F32, dtype, &[20_003], 3, 0)]);
            let mut optimizer = model.optimizer(&Config::new(SGD));
            let before = model.random_gradients(rng, 1.0).remove(0);
            let factor = 1.0f32 / 3.0;
            optimizer.scale_gradients(factor, Stream::DEFAULT).unwrap();
            let after = model.gradients[0].download_output().values();
            for (x, before) in after.iter().zip(&before) {
                let product = *before as f32 * factor;
                assert_eq!(
                    *x,
                    crate::common::tensor::round_to(dtype, f64::from(product))
                );
            }
        }
    }
}

/// The steps behind a change of a group's values have them, and those of other groups do not.
#[test]
fn groups_change_between_steps() {
    let rng = &mut rng();
    for ctx in contexts() {
        let shapes = [Shape(F32, F32, &[9], 0, 0), Shape(F32, F32, &[9], 0, 1)];
        let mut model = Model::new(&ctx, rng, &shapes);
        let config = Config {
            groups: &[PLAIN[0]; 2],
            ..Config::new(SGD)
        };
        let mut optimizer = model.optimizer(&config);
        let gradients = model.random_gradients(rng, 1.0);
        let before = model.values();
        let values = Group {
            learning_rate: 0.5,
            weight_decay: 0.25,
        };
        optimizer.set_group(1, values, Stream::DEFAULT).unwrap();
        step(&mut optimizer);
        for (i, after) in model.values().iter().enumerate() {
            for ((x, before), g) in after.iter().zip(&before[i]).zip(&gradients[i]) {
                let expected = match i {
                    0 => before - g,
                    _ => before - 0.5 * (g + 0.25 * before),
                };
                assert!((x - expected).abs() < 2e-6);
            }
        }
    }
}

/// Training that was saved and taken up elsewhere goes on with the same bits, and what is saved
/// does not depend on where it lay.
#[test]
fn saved_states_go_on() {
    let rng = &mut rng();
    let shapes = [
        Shape(F32, F32, &[33], 1, 0),
        Shape(BF16, BF16, &[16_400], 0, 1),
        Shape(F32, F32, &[0], 0, 0),
        Shape(BF16, F32, &[7], 0, 0),
    ];
    let groups = [PLAIN[0]; 2];
    let masters = [
        Master::None,
        Master::F32,
        Master::Remainder,
        Master::Stochastic,
    ];
    for ctx in contexts() {
        for (master, rule) in masters.into_iter().zip(rules()) {
            let config = Config {
                max_norm: 2.0,
                groups: &groups,
                ..Config::new(rule).master(master).scaled(LossScale {
                    interval: 2,
                    ..LossScale::DYNAMIC
                })
            };
            let mut model = Model::new(&ctx, rng, &shapes);
            let mut optimizer = model.optimizer(&config);
            let steps: Vec<Vec<Vec<f64>>> = (0..8)
                .map(|i| {
                    let mut all = model.random_gradients(rng, 100.0);
                    if i == 4 {
                        all[1][2] = f64::INFINITY;
                    }
                    all
                })
                .collect();
            let run = |model: &mut Model, optimizer: &mut Optimizer, some: &[Vec<Vec<f64>>]| {
                for gradients in some {
                    model.set_gradients(gradients);
                    step(optimizer);
                }
            };
            run(&mut model, &mut optimizer, &steps[..4]);
            let rate = Group {
                learning_rate: 0.01,
                weight_decay: 0.1,
            };
            optimizer.set_group(1, rate, Stream::DEFAULT).unwrap();
            let saved = save(&optimizer);
            let mut other = Model::like(&model);
            run(&mut model, &mut optimizer, &steps[4..]);
            let mut resumed = other.optimizer(&config);
            resumed.load(&saved, Stream::DEFAULT).unwrap();
            assert_eq!(save(&resumed), saved);
            run(&mut other, &mut resumed, &steps[4..]);
            assert_eq!(other.bits(), model.bits(), "{master:?}");
            assert_eq!(save(&resumed), save(&optimizer));
        }
    }
}

/// Every launch of a captured step is a step of its own, which sees the gradients and the groups'
/// values of then. What waits for the device, or must happen now, is refused by a captured stream.
#[cfg(feature = "cuda")]
#[test]
fn captured_steps_are_steps() {
    let Some(ctx) = crate::common::gpu() else {
        return;
    };
    let rng = &mut rng();
    let config = Config {
        max_norm: 1.0,
        zero_gradients: true,
        groups: &[PLAIN[0]; 2],
        ..Config::new(ADAMW).scaled(LossScale::DYNAMIC)
    };
    let mut eager = Model::new(&ctx, rng, SHAPES);
    let mut replayed = Model::like(&eager);
    let mut optimizer = eager.optimizer(&config);
    let mut captured = replayed.optimizer(&config);
    let stream = ctx.create_stream().unwrap();
    let graph = crate::common::graph::Graph::capture(&ctx, stream, || {
        captured.step(stream).unwrap();
        let mut room = vec![0; captured.saved_size()];
        let refusals = [
            captured.set_group(0, PLAIN[0], stream),
            captured.status(stream).map(|_| ()),
            captured.save(&mut room, stream),
            captured.load(&room, stream),
        ];
        for refused in refusals {
            let message = refused.unwrap_err().to_string();
            assert!(message.contains("is being captured"), "{message}");
        }
    });
    for i in 0..5u8 {
        let mut gradients = eager.random_gradients(rng, 1.0);
        if i == 3 {
            gradients[0][0] = f64::NAN;
            eager.set_gradients(&gradients);
        }
        replayed.set_gradients(&gradients);
        let values = Group {
            learning_rate: 0.1 / f32::from(1 + i),
            weight_decay: 0.1,
        };
        optimizer.set_group(1, values, Stream::DEFAULT).unwrap();
        captured.set_group(1, values, stream).unwrap();
        step(&mut optimizer);
        graph.launch(stream);
        ctx.synchronize(stream).unwrap();
        assert_eq!(replayed.bits(), eager.bits());
        assert_eq!(save(&captured), save(&optimizer));
    }
    assert_eq!(captured.status(stream).unwrap().skipped, 1);
    // SAFETY: made above, and used no more.
    unsafe { ctx.destroy_stream(stream) }.unwrap();
}
