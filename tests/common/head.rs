//! What tests of a layer over a vocabulary share, whose output is made in chunks: the layouts of its
//! tensors, inputs, the layer by its definition, and how its gradients are judged.

use rand::Rng;
use unsloth::ops::cross_entropy::IGNORE_INDEX;
use unsloth::ops::linear::Weights;
use unsloth::{Context, DType, Error, Layout, Result, Workspace};

use super::reference::linear::{
    Gradients, linear, linear_backward, linear_backward_f32, linear_f32,
};
use super::rules::{assert_gradient_rule, cut_off};
use super::tensor::{DeviceTensor, TestTensor, strided_rows, transposed};
use super::{contiguous, rounded};

/// The layer of a case.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    pub x: Layout,
    pub dx: Layout,
    /// Targets, or whatever each token has of the vocabulary.
    pub ids: Layout,
    pub weight: Layout,
    pub dweight: Layout,
    pub bias: bool,
    pub ids_dtype: DType,
    pub ignore_index: i64,
    /// Of `x`, of the weight, of the bias.
    pub gradients: [bool; 3],
    pub accumulate: bool,
    pub chunk_tokens: usize,
    pub skew: usize,
}

impl Layer {
    /// Contiguous tensors, all gradients, one chunk.
    pub fn plain(tokens: usize, (vocab, hidden): (usize, usize)) -> Layer {
        let (x, weight) = (contiguous(&[tokens, hidden]), contiguous(&[vocab, hidden]));
        Layer {
            x,
            dx: x,
            ids: contiguous(&[tokens]),
            weight,
            dweight: weight,
            bias: true,
            ids_dtype: DType::I32,
            ignore_index: IGNORE_INDEX,
            gradients: [true; 3],
            accumulate: false,
            chunk_tokens: 0,
            skew: 0,
        }
    }

    pub fn vocab(&self) -> usize {
        self.weight.dim(0)
    }

    /// What the gradients of weight and bias hold before a call.
    pub fn before(&self, rng: &mut impl Rng, dtype: DType) -> [TestTensor; 2] {
        [self.dweight, contiguous(&[self.vocab()])].map(|layout| {
            let mut tensor = TestTensor::poisoned_at(dtype, layout, self.skew);
            if self.accumulate {
                tensor.set_values(&TestTensor::normal(rng, dtype, layout).values());
            }
            tensor
        })
    }

    /// Judges the gradients that a call has written by the exact ones, those of a plain
    /// implementation and the magnitudes of what adds up to them. `dtypes` are those of `x` and of
    /// the parameters' gradients.
    pub fn assert_gradients(
        &self,
        ctx: &Context,
        dtypes: (DType, DType),
        before: &[TestTensor; 2],
        got: &[Option<Vec<f64>>; 3],
        [exact, plain, terms]: [&Gradients; 3],
    ) {
        let listed = |g: &Gradients| [g.dx.clone(), g.dweight.clone(), g.dbias.clone()];
        let [exact, plain, terms] = [exact, plain, terms].map(listed);
        let depths = [self.vocab(), self.x.num_rows(), 0];
        for (i, name) in ["dx", "dweight", "dbias"].into_iter().enumerate() {
            assert_eq!(got[i].is_some(), self.gradients[i], "{name}");
            let Some(got) = &got[i] else { continue };
            let dtype = if i == 0 { dtypes.0 } else { dtypes.1 };
            let held = match (self.accumulate, i) {
                (true, 1 | 2) => before[i - 1].values(),
                _ => vec![0.0; exact[i].len()],
            };
            let add = |g: &[f64]| g.iter().zip(&held).map(|(g, h)| g + h).collect::<Vec<_>>();
            let (exact, plain) = (add(&exact[i]), rounded(dtype, &add(&plain[i])));
            let most = greatest(&terms[i]) + greatest(&magnitudes(&held));
            let most = most.max(cut_off(ctx, dtypes.0, depths[i], &exact));
            assert_gradient_rule(name, dtype, got, &exact, &plain, most);
        }
    }
}

/// Layouts with eight sets of features each, whose numbers come with them.
pub fn layers() -> Vec<(Layer, usize)> {
    let mut layers = Vec::new();
    let of = |leading: &[usize], hidden: usize| {
        let x = contiguous(&[leading, &[hidden]].concat());
        (x, x, contiguous(leading))
    };
    for (i, ((x, dx, ids), vocab, gap)) in [
        (of(&[1], 1), 1, 0),
        (of(&[7], 20), 33, 0),
        (of(&[0], 8), 16, 0),
        (of(&[2, 2, 3], 16), 48, 0),
        (of(&[40], 8), 40, 0),
        (of(&[2], 8), 520, 8),
        (
            (
                strided_rows(&[9, 20], 4),
                strided_rows(&[9, 20], 1),
                Layout::strided(&[9], &[3]).unwrap(),
            ),
            50,
            3,
        ),
        (
            (
                transposed(&[5, 4, 8], 0, 1),
                contiguous(&[5, 4, 8]),
                transposed(&[5, 4], 0, 1),
            ),
            32,
            0,
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let hidden = x.dim(x.rank() - 1);
        for features in i..i + 8 {
            let bit = |n: usize| features >> n & 1 == 1;
            let layer = Layer {
                x,
                dx,
                ids,
                weight: strided_rows(&[vocab, hidden], gap),
                dweight: strided_rows(&[vocab, hidden], gap / 2),
                bias: bit(1),
                ids_dtype: if bit(1) { DType::I64 } else { DType::I32 },
                ignore_index: if bit(0) { 0 } else { IGNORE_INDEX },
                gradients: match features - i {
                    4 => [true, false, false],
                    5 => [false, true, false],
                    6 => [false, true, true],
                    _ => [true; 3],
                },
                accumulate: bit(0) && bit(1),
                // Several of a size, uneven ones, one of all tokens and more.
                chunk_tokens: [0, 1, 4, 1000][features % 4],
                skew: usize::from(features - i == 5),
            };
            layers.push((layer, features));
        }
    }
    layers
}

/// Inputs of a layer.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub x: TestTensor,
    pub weight: TestTensor,
    pub bias: Option<TestTensor>,
    pub ids: TestTensor,
}

/// Inputs on a device.
pub struct There {
    pub x: DeviceTensor,
    pub weight: DeviceTensor,
    pub bias: Option<DeviceTensor>,
    pub ids: DeviceTensor,
}

impl There {
    pub fn weights(&self) -> Weights<'_> {
        Weights {
            weight: self.weight.view(),
            bias: self.bias.as_ref().map(|t| t.view()),
        }
    }
}

type Sizes = (usize, usize, usize);
type Forward = fn(&[f64], &[f64], Sizes, Option<&[f64]>, Option<&[f64]>) -> Vec<f64>;
type Backward = fn(&[f64], &[f64], &[f64], Sizes) -> Gradients;

/// A linear layer and its gradients: by their definitions, or as a plain implementation.
#[derive(Clone, Copy)]
pub struct Functions {
    forward: Forward,
    backward: Backward,
    /// Whether the output and its gradient are rounded to the dtype of `x`.
    rounds: bool,
}

pub const EXACT: Functions = Functions {
    forward: linear,
    backward: linear_backward,
    rounds: false,
};
pub const PLAIN: Functions = Functions {
    forward: linear_f32,
    backward: linear_backward_f32,
    rounds: true,
};

impl Inputs {
    /// Random ones, of these dtypes of `x` and the weight: a quarter of the tokens are ignored,
    /// logits are of about 2.
    pub fn random(rng: &mut impl Rng, layer: &Layer, dtypes: (DType, DType)) -> Inputs {
        let vocab = layer.vocab();
        let mut normal = |dtype, layout: Layout, scale: f64| {
            let mut tensor = TestTensor::poisoned_at(dtype, layout, layer.skew);
            let values = TestTensor::normal(rng, dtype, layout).values();
            tensor.set_values(&values.iter().map(|x| x * scale).collect::<Vec<_>>());
            tensor
        };
        let x = normal(dtypes.0, layer.x, 1.0);
        let weight = normal(
            dtypes.1,
            layer.weight,
            2.0 / (layer.weight.dim(1) as f64).sqrt(),
        );
        let bias = layer
            .bias
            .then(|| normal(dtypes.1, contiguous(&[vocab]), 0.5));
        let ids: Vec<f64> = (0..layer.ids.num_elements())
            .map(|_| match rng.random_range(0..4) {
                0 => layer.ignore_index as f64,
                _ => rng.random_range(0..vocab as i64) as f64,
            })
            .collect();
        Inputs {
            x,
            weight,
            bias,
            ids: TestTensor::from_values(layer.ids_dtype, layer.ids, &ids),
        }
    }

    pub fn upload(&self, ctx: &Context) -> There {
        There {
            x: self.x.upload(ctx),
            weight: self.weight.upload(ctx),
            bias: self.bias.as_ref().map(|t| t.upload(ctx)),
            ids: self.ids.upload(ctx),
        }
    }

    /// Those of the first or the second half of the tokens, which have one dimension.
    pub fn half(&self, half: usize) -> Inputs {
        Inputs {
            x: half_of(&self.x, half),
            ids: half_of(&self.ids, half),
            ..self.clone()
        }
    }

    /// Tokens, columns of the weight, and its rows.
    pub fn sizes(&self) -> Sizes {
        let (n, k) = (self.weight.layout.dim(0), self.weight.layout.dim(1));
        (self.x.layout.num_rows(), k, n)
    }

    pub fn ids(&self) -> Vec<i64> {
        self.ids.values().iter().map(|id| *id as i64).collect()
    }

    fn stored(&self, with: Functions, values: Vec<f64>) -> Vec<f64> {
        match with.rounds {
            true => rounded(self.x.dtype, &values),
            false => values,
        }
    }

    pub fn logits(&self, with: Functions) -> Vec<f64> {
        let (x, weight) = (self.x.values(), self.weight.values());
        let bias = self.bias.as_ref().map(TestTensor::values);
        let logits = (with.forward)(&x, &weight, self.sizes(), bias.as_deref(), None);
        self.stored(with, logits)
    }

    /// The gradients for that of the logits.
    pub fn gradients(&self, with: Functions, dlogits: Vec<f64>) -> Gradients {
        let (x, weight) = (self.x.values(), self.weight.values());
        let dlogits = self.stored(with, dlogits);
        (with.backward)(&dlogits, &x, &weight, self.sizes())
    }

    /// The greatest magnitude of what logits add up from.
    pub fn terms_of_logits(&self) -> f64 {
        let [x, weight] = [&self.x, &self.weight].map(|t| magnitudes(&t.values()));
        greatest(&linear(&x, &weight, self.sizes(), None, None))
    }

    /// The magnitudes of what gradients add up from, for those of the logits' gradient.
    pub fn terms_of_gradients(&self, dlogits: &[f64]) -> Gradients {
        let [x, weight] = [&self.x, &self.weight].map(|t| magnitudes(&t.values()));
        linear_backward(dlogits, &x, &weight, self.sizes())
    }
}

/// The first or the second half of the rows.
pub fn half_of(t: &TestTensor, half: usize) -> TestTensor {
    let rows = t.layout.dim(0) / 2;
    let layout = t.layout.narrowed(0, half * rows, rows).unwrap().0;
    let (values, n) = (t.values(), layout.num_elements());
    TestTensor::from_values(t.dtype, layout, &values[half * n..(half + 1) * n])
}

/// Makes a call with what it needs of a workspace, of which a byte less is refused, or with all of
/// `size`, which is what is useful.
pub fn run_in_workspace(
    ctx: &Context,
    size: usize,
    useful: bool,
    mut call: impl FnMut(Workspace<'static>) -> Result<()>,
) {
    let mut size = size;
    if !useful {
        size = match call(Workspace::none()) {
            Err(Error::WorkspaceTooSmall { required, .. }) => required,
            done => return done.unwrap(),
        };
    }
    let memory = TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx);
    // SAFETY: `size` bytes from the start of the tensor are its elements, which nothing else uses
    // while the call runs.
    let lent = |size| unsafe { Workspace::from_raw(memory.data().cast(), size) };
    if !useful {
        let refused = call(lent(size - 1)).unwrap_err();
        let too_small = matches!(refused, Error::WorkspaceTooSmall { .. });
        assert!(too_small, "{refused}");
    }
    call(lent(size)).unwrap();
    memory.download_output();
}

pub fn magnitudes(values: &[f64]) -> Vec<f64> {
    values.iter().map(|v| v.abs()).collect()
}

pub fn greatest(values: &[f64]) -> f64 {
    values.iter().copied().fold(0.0, f64::max)
}
