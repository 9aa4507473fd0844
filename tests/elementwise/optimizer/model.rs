//! Parameters that are trained, in guarded and poisoned memory.

use rand::Rng;
use unsloth::comm::Comm;
use unsloth::optimizer::{
    Group, LossScale, Master, MixedPrecision, Optimizer, Parameter, Params, Rule, state_size,
};
use unsloth::{Context, DType, Layout, Result, Stream, Workspace};

use crate::common::{DeviceTensor, TestTensor};

pub const PLAIN: &[Group] = &[Group {
    learning_rate: 1.0,
    weight_decay: 0.0,
}];

/// A weight's dtype, its gradient's, their shape, how far they begin past an aligned address, and
/// the group.
#[derive(Clone, Copy, Debug)]
pub struct Shape(
    pub DType,
    pub DType,
    pub &'static [usize],
    pub usize,
    pub usize,
);

pub const F32: DType = DType::F32;
pub const F16: DType = DType::F16;
pub const BF16: DType = DType::Bf16;

/// Empty, of one element, odd, of several chunks, misaligned, of two dtypes.
pub const SHAPES: &[Shape] = &[
    Shape(F32, F32, &[3, 7], 0, 0),
    Shape(F32, BF16, &[1], 0, 1),
    Shape(F32, F16, &[0, 4], 0, 0),
    Shape(F32, F32, &[5, 13], 1, 1),
    Shape(F32, F16, &[33], 3, 0),
];

pub struct Model {
    pub ctx: Context,
    pub weights: Vec<DeviceTensor>,
    pub gradients: Vec<DeviceTensor>,
    pub groups: Vec<usize>,
    pub state: Option<DeviceTensor>,
}

/// What is made of a model beside its parameters.
#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    pub rule: Rule,
    pub precision: MixedPrecision,
    pub max_norm: f32,
    pub zero_gradients: bool,
    pub groups: &'a [Group],
    /// Of ranks that share what is trained.
    pub comm: Option<&'a Comm>,
}

impl Config<'_> {
    pub fn new(rule: Rule) -> Config<'static> {
        Config {
            rule,
            precision: MixedPrecision::default(),
            max_norm: 0.0,
            zero_gradients: false,
            groups: PLAIN,
            comm: None,
        }
    }

    pub fn master(self, master: Master) -> Self {
        let precision = MixedPrecision {
            master,
            ..self.precision
        };
        Config { precision, ..self }
    }

    pub fn scaled(self, loss_scale: LossScale) -> Self {
        let precision = MixedPrecision {
            loss_scale,
            ..self.precision
        };
        Config { precision, ..self }
    }
}

impl Model {
    /// Random weights.
    pub fn new(ctx: &Context, rng: &mut impl Rng, shapes: &[Shape]) -> Model {
        let layout = |shape: &Shape| Layout::contiguous(shape.2).unwrap();
        let of = |shape: &Shape, values: &[f64], dtype| {
            let mut tensor = TestTensor::poisoned_at(dtype, layout(shape), shape.3);
            tensor.set_values(values);
            tensor.upload(ctx)
        };
        let (mut weights, mut gradients) = (Vec::new(), Vec::new());
        for shape in shapes {
            let random = TestTensor::normal(rng, shape.0, layout(shape)).values();
            weights.push(of(shape, &random, shape.0));
            gradients.push(of(shape, &vec![0.0; random.len()], shape.1));
        }
        Model {
            ctx: ctx.clone(),
            weights,
            gradients,
            groups: shapes.iter().map(|shape| shape.4).collect(),
            state: None,
        }
    }

    /// One that begins as another is.
    pub fn like(other: &Model) -> Model {
        let copies = |tensors: &[DeviceTensor]| -> Vec<DeviceTensor> {
            let copy = |t: &DeviceTensor| t.download().upload(&other.ctx);
            tensors.iter().map(copy).collect()
        };
        Model {
            ctx: other.ctx.clone(),
            weights: copies(&other.weights),
            gradients: copies(&other.gradients),
            groups: other.groups.clone(),
            state: None,
        }
    }

    pub fn optimizer(&mut self, config: &Config<'_>) -> Optimizer {
        self.seeded(config, 5)
    }

    pub fn seeded(&mut self, config: &Config<'_>, seed: u64) -> Optimizer {
        self.made(config, seed).unwrap()
    }

    pub fn made(&mut self, config: &Config<'_>, seed: u64) -> Result<Optimizer> {
        let tensors = self.weights.iter_mut().zip(&mut self.gradients);
        let parameters: Vec<_> = tensors
            .zip(&self.groups)
            .map(|((weight, gradient), &group)| Parameter {
                weight: weight.view_mut(),
                gradient: gradient.view_mut(),
                group,
            })
            .collect();
        let params = |state| Params {
            rule: config.rule,
            precision: config.precision,
            max_norm: config.max_norm,
            zero_gradients: config.zero_gradients,
            seed,
            parameters: &parameters,
            groups: config.groups,
            comm: config.comm,
            state,
        };
        let size = state_size(&self.ctx, &params(Workspace::none())).unwrap();
        let poison = TestTensor::poisoned(DType::Bool, Layout::contiguous(&[size]).unwrap());
        let state = self.state.insert(poison.upload(&self.ctx));
        // SAFETY: the model's memory, which outlives the optimizers that tests make of it; nothing
        // else accesses it during a call, and calls of tests on a device follow one another.
        unsafe {
            let state = Workspace::from_raw(state.data().cast(), size);
            Optimizer::new(&self.ctx, &params(state), Stream::DEFAULT)
        }
    }

    /// Writes gradients, and gives them as they were rounded.
    pub fn set_gradients(&mut self, values: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let rounded = |(gradient, values): (&mut DeviceTensor, &Vec<f64>)| {
            let mut tensor = gradient.download();
            tensor.set_values(values);
            gradient.overwrite(&tensor);
            tensor.values()
        };
        self.gradients.iter_mut().zip(values).map(rounded).collect()
    }

    pub fn random_gradients(&mut self, rng: &mut impl Rng, scale: f64) -> Vec<Vec<f64>> {
        let random = |g: &DeviceTensor| -> Vec<f64> {
            let normal = TestTensor::normal(rng, DType::F32, g.layout).values();
            normal.iter().map(|x| x * scale).collect()
        };
        let values: Vec<_> = self.gradients.iter().map(random).collect();
        self.set_gradients(&values)
    }

    pub fn values(&self) -> Vec<Vec<f64>> {
        let values = |t: &DeviceTensor| t.download_output().values();
        self.weights.iter().map(values).collect()
    }

    pub fn bits(&self) -> Vec<Vec<u8>> {
        let bits = |t: &DeviceTensor| t.download_output().bits();
        self.weights.iter().map(bits).collect()
    }

    /// Nothing was written around gradients and state.
    pub fn assert_within_bounds(&self) {
        let all = self.gradients.iter().chain(&self.state);
        all.for_each(|t| t.download().assert_surroundings_untouched());
    }
}

pub fn step(optimizer: &mut Optimizer) {
    optimizer.step(Stream::DEFAULT).unwrap();
}

pub fn save(optimizer: &Optimizer) -> Vec<u8> {
    let mut data = vec![0xa5; optimizer.saved_size()];
    optimizer.save(&mut data, Stream::DEFAULT).unwrap();
    data
}
