//! Ranks that share what an optimizer trains: weights, norms and skipped steps are those of one
//! optimizer over all of it.

#[allow(dead_code)] // what is made for the optimizer's own tests
#[path = "../elementwise/optimizer/model.rs"]
mod model;

use std::ops::Range;
use std::sync::Barrier;

use model::{BF16, Config, F16, F32, Model, Shape, save, step};
use unsloth::comm::Comm;
use unsloth::optimizer::{Group, LossScale, Master, Optimizer, Rule, Status};
use unsloth::{Context, Error, Layout, Stream};

use crate::common::{TestTensor, rng};
use crate::group::{LONG, context, is_cuda, is_emulated, new_id, params, ranks, sizes};

/// Elements of some of a parameter, by its number.
type Piece = (usize, Range<usize>);

/// What each rank has, and whether a parameter is cut.
struct Division {
    shares: Vec<Vec<Piece>>,
    cut: bool,
}

/// Whole parameters by turns, all of one rank's, and as many elements of each rank or nearly so.
fn divisions(lengths: &[usize], size: usize) -> [Division; 3] {
    let whole = |i: usize| (i, 0..lengths[i]);
    let none = || vec![(0, 0..0)];
    let by_turns = (0..size)
        .map(|rank| (rank..lengths.len()).step_by(size).map(whole).collect())
        .map(|share: Vec<Piece>| if share.is_empty() { none() } else { share })
        .collect();
    let mut of_last: Vec<_> = (0..size).map(|_| none()).collect();
    of_last[size - 1] = (0..lengths.len()).map(whole).collect();
    let total: usize = lengths.iter().sum();
    let evenly = (0..size).map(|rank| {
        let own = rank * total / size..(rank + 1) * total / size;
        let mut before = 0;
        let mut share = Vec::new();
        for (i, length) in lengths.iter().enumerate() {
            let range = own.start.max(before)..own.end.min(before + length);
            if range.start < range.end {
                share.push((i, range.start - before..range.end - before));
            }
            before += length;
        }
        share
    });
    [
        (by_turns, false),
        (of_last, false),
        (evenly.collect(), size > 1),
    ]
    .map(|(shares, cut)| Division { shares, cut })
}

/// What is trained: values and dtypes, from which each rank takes its own.
struct Whole {
    shapes: Vec<Shape>,
    weights: Vec<Vec<f64>>,
    /// Of each step.
    gradients: Vec<Vec<Vec<f64>>>,
}

impl Whole {
    fn lengths(&self) -> Vec<usize> {
        self.weights.iter().map(Vec::len).collect()
    }

    fn share(&self, ctx: &Context, pieces: &[Piece]) -> Model {
        let of = |dtype, values: &[f64]| {
            let mut tensor = TestTensor::poisoned_at(
                dtype,
                Layout::contiguous(&[values.len()]).unwrap(),
                usize::from(values.len() % 2 == 1),
            );
            tensor.set_values(values);
            tensor.upload(ctx)
        };
        let shapes = || {
            pieces
                .iter()
                .map(|(i, range)| (&self.shapes[*i], *i, range))
        };
        Model {
            ctx: ctx.clone(),
            weights: shapes()
                .map(|(shape, i, range)| of(shape.0, &self.weights[i][range.clone()]))
                .collect(),
            gradients: shapes()
                .map(|(shape, _, range)| of(shape.1, &vec![0.0; range.len()]))
                .collect(),
            groups: shapes().map(|(shape, ..)| shape.4).collect(),
            state: None,
        }
    }

    fn set(&self, model: &mut Model, at: usize, pieces: &[Piece]) {
        let own: Vec<_> = pieces
            .iter()
            .map(|(i, range)| self.gradients[at][*i][range.clone()].to_vec())
            .collect();
        model.set_gradients(&own);
    }

    /// Steps of a share, and what they found.
    fn run(&self, model: &mut Model, config: &Config<'_>, pieces: &[Piece]) -> Vec<Status> {
        let mut optimizer = model.optimizer(config);
        (0..self.gradients.len())
            .map(|at| {
                self.set(model, at, pieces);
                step(&mut optimizer);
                optimizer.status(Stream::DEFAULT).unwrap()
            })
            .collect()
    }
}

const GROUPS: [Group; 2] = [
    Group {
        learning_rate: 1e-2,
        weight_decay: 0.1,
    },
    Group {
        learning_rate: 3e-2,
        weight_decay: 0.0,
    },
];

fn adamw() -> Config<'static> {
    let rule = Rule::Adam {
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        decoupled: true,
    };
    Config {
        groups: &GROUPS,
        ..Config::new(rule)
    }
}

/// Weights' dtype and gradients', and what is trained with them. Gradients have a norm of a hundred or more
/// before they are scaled.
fn cases() -> Vec<(unsloth::DType, unsloth::DType, Config<'static>)> {
    let sgd = Rule::Sgd {
        momentum: 0.9,
        nesterov: false,
        decoupled: false,
    };
    let sgd = Config {
        max_norm: 1.0,
        groups: &GROUPS,
        ..Config::new(sgd)
    };
    let clipped = Config {
        max_norm: 1.0,
        ..adamw()
    };
    let dynamic = LossScale {
        init: 1024.0,
        interval: 2,
        ..LossScale::DYNAMIC
    };
    vec![
        (F32, F32, adamw()),
        (F32, F32, clipped),
        (F32, BF16, sgd),
        (BF16, F32, clipped.master(Master::Remainder)),
        (F16, F16, clipped.master(Master::F32).scaled(dynamic)),
    ]
}

fn whole(weights: unsloth::DType, gradients: unsloth::DType, steps: usize) -> Whole {
    let rng = &mut rng();
    let shape = |shape, group| Shape(weights, gradients, shape, 0, group);
    let shapes = vec![
        shape(&[33], 1),
        shape(&[20_001], 0),
        shape(&[7, 9], 0),
        shape(&[1], 1),
        shape(&[40, 128], 0),
    ];
    let random = |rng: &mut _, dtype, shape: &Shape| {
        TestTensor::normal(rng, dtype, Layout::contiguous(shape.2).unwrap()).values()
    };
    Whole {
        weights: shapes.iter().map(|s| random(rng, s.0, s)).collect(),
        gradients: (0..steps)
            .map(|_| shapes.iter().map(|s| random(rng, s.1, s)).collect())
            .collect(),
        shapes,
    }
}

/// Whole parameters have the same bits, also where the norm is limited, which is one sum of the same
/// numbers; of parts of them sums are rounded elsewhere. In the last step but one a gradient is not finite on
/// one rank, and none makes it.
#[test]
fn ranks_that_share_are_one_optimizer() {
    const STEPS: usize = 5;
    let most = if is_emulated() { 2 } else { 4 };
    for (weights, gradients, config) in cases() {
        let mut whole = whole(weights, gradients, STEPS);
        let last = whole.lengths().len() - 1;
        whole.gradients[STEPS - 2][last][17] = f64::INFINITY;
        whole.gradients[STEPS - 2][last][19] = f64::NAN;
        let ctx = context(2);
        let everything: Vec<Piece> = whole.lengths().iter().map(|n| 0..*n).enumerate().collect();
        let mut alone = whole.share(&ctx, &everything);
        let expected = whole.run(&mut alone, &config, &everything);
        let (values, ends) = (alone.values(), expected[STEPS - 1]);
        assert_eq!((ends.step, ends.skipped), (STEPS as u64 - 1, 1));
        for size in sizes().filter(|size| *size <= most) {
            for Division { shares, cut } in divisions(&whole.lengths(), size) {
                println!("case {weights} {gradients} {config:?}, {shares:?}");
                let of_ranks = ranks(size, |ctx, comm| {
                    let pieces = &shares[comm.rank()];
                    let mut model = whole.share(ctx, pieces);
                    let config = Config {
                        comm: Some(comm),
                        ..config
                    };
                    let found = whole.run(&mut model, &config, pieces);
                    model.assert_within_bounds();
                    (found, model.values())
                });
                for (rank, (found, own)) in of_ranks.iter().enumerate() {
                    assert_eq!(bits(found), bits(&of_ranks[0].0), "ranks decide alike");
                    if cut {
                        assert_alike(found, &expected);
                    } else {
                        assert_eq!(bits(found), bits(&expected));
                    }
                    for ((i, range), own) in shares[rank].iter().zip(own) {
                        let values = &values[*i][range.clone()];
                        if !cut {
                            assert_eq!(own, values);
                        }
                        // What a rounding of the norm makes of some steps, and then another of the weight.
                        let rounding = if weights == F32 { 1e-6 } else { 1e-2 };
                        for (x, y) in own.iter().zip(values) {
                            assert!((x - y).abs() <= rounding * y.abs().max(0.1), "{x}, not {y}");
                        }
                    }
                }
            }
        }
    }
}

fn bits(found: &[Status]) -> Vec<[u64; 5]> {
    let of = |s: &Status| {
        let norm = if s.found_inf {
            0
        } else {
            s.gradient_norm.to_bits()
        };
        [
            u64::from(s.loss_scale.to_bits()),
            u64::from(norm),
            u64::from(s.found_inf),
            s.step,
            s.skipped,
        ]
    };
    found.iter().map(of).collect()
}

/// The norm is rounded once more at most in each of a few sums.
fn assert_alike(found: &[Status], expected: &[Status]) {
    for (a, b) in found.iter().zip(expected) {
        assert_eq!((a.found_inf, a.loss_scale), (b.found_inf, b.loss_scale));
        assert_eq!((a.step, a.skipped), (b.step, b.skipped));
        assert_eq!(a.gradient_norm.is_nan(), b.found_inf);
        let off = (a.gradient_norm - b.gradient_norm).abs();
        assert!(b.found_inf || off <= 1e-6 * b.gradient_norm, "{a:?}, {b:?}");
    }
}

/// Each rank saves what it has, and goes on with the same bits.
#[test]
fn ranks_take_their_states_up_again() {
    const STEPS: usize = 4;
    let (weights, gradients, config) = cases().pop().unwrap();
    let whole = whole(weights, gradients, STEPS);
    for size in sizes().filter(|size| *size <= 3) {
        let [.., Division { shares, .. }] = divisions(&whole.lengths(), size);
        ranks(size, |ctx, comm| {
            let pieces = &shares[comm.rank()];
            let config = Config {
                comm: Some(comm),
                ..config
            };
            let mut model = whole.share(ctx, pieces);
            let mut optimizer = model.optimizer(&config);
            let run = |model: &mut Model, optimizer: &mut Optimizer, steps: Range<usize>| {
                for at in steps {
                    whole.set(model, at, pieces);
                    step(optimizer);
                }
            };
            run(&mut model, &mut optimizer, 0..2);
            let saved = save(&optimizer);
            let mut other = Model::like(&model);
            run(&mut model, &mut optimizer, 2..STEPS);
            let mut resumed = other.optimizer(&config);
            resumed.load(&saved, Stream::DEFAULT).unwrap();
            run(&mut other, &mut resumed, 2..STEPS);
            assert_eq!(other.bits(), model.bits());
            assert_eq!(save(&resumed), save(&optimizer));
        });
    }
}

/// A step of a group that broke is none, on any rank, and no optimizer is made over it.
#[test]
fn broken_groups_make_no_steps() {
    if is_cuda() {
        // NCCL's ranks do not tell each other.
        return;
    }
    let whole = whole(F32, F32, 1);
    let id = new_id();
    let made = &Barrier::new(2);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let whole = &whole;
            scope.spawn(move || {
                let ctx = context(1);
                let comm = Comm::new(&ctx, &params(id, rank, 2, LONG)).unwrap();
                let config = Config {
                    comm: Some(&comm),
                    ..adamw()
                };
                let pieces = [(1, 0..100)];
                let mut model = whole.share(&ctx, &pieces);
                let mut optimizer = model.optimizer(&config);
                whole.set(&mut model, 0, &pieces);
                let (weights, saved) = (model.bits(), save(&optimizer));
                made.wait();
                if rank == 1 {
                    comm.abort().unwrap();
                }
                let error = optimizer.step(Stream::DEFAULT).unwrap_err();
                assert!(matches!(error, Error::Comm { .. }));
                let expected = "optimizer_step: comm is broken: rank 1 aborted it";
                assert_eq!(error.to_string(), expected);
                assert_eq!((model.bits(), save(&optimizer)), (weights, saved));
                let error = model.made(&config, 5).unwrap_err();
                let expected = "optimizer: comm is broken: rank 1 aborted it";
                assert_eq!(error.to_string(), expected);
            });
        }
    });
}
