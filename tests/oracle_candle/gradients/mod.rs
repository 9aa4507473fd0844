//! Gradients, in f32: where candle has no gradient of a fused operation, of what it is made of.

mod attention;
mod block;
mod dense;
mod elementwise;
mod lookup;
mod loss;
mod norm;
mod step;

use candle_core::Var;
use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor};
use unsloth::ops::linear::Weights;
use unsloth::{Context, DType};

use crate::common::{DeviceTensor, TestTensor};
use crate::{assert_agrees, candle, normal, output};

/// What a gradient is of: on our device, and as a variable of candle's.
struct Leaf {
    ours: DeviceTensor,
    theirs: Var,
}

impl Leaf {
    fn of(ctx: &Context, values: &TestTensor) -> Leaf {
        Leaf {
            ours: values.upload(ctx),
            theirs: Var::from_tensor(&candle(values)).unwrap(),
        }
    }

    fn normal(ctx: &Context, shape: &[usize]) -> Leaf {
        Leaf::of(ctx, &normal(DType::F32, shape))
    }

    /// A matrix whose product with standard normal rows is standard normal.
    fn matrix(ctx: &Context, [rows, columns]: [usize; 2]) -> Leaf {
        let normal = normal(DType::F32, &[rows, columns]);
        let scale = 1.0 / (columns as f64).sqrt();
        let values: Vec<f64> = normal.values().iter().map(|x| x * scale).collect();
        Leaf::of(ctx, &TestTensor::of(DType::F32, &[rows, columns], &values))
    }

    /// As a layer's matrix, without a bias.
    fn weights(&self) -> Weights<'_> {
        Weights {
            weight: self.ours.view(),
            bias: None,
        }
    }

    /// Where our gradient goes.
    fn gradient(&self, ctx: &Context) -> DeviceTensor {
        output(ctx, DType::F32, self.ours.layout.shape())
    }
}

/// candle's gradients of the sum of `y dout` over all results.
fn gradients(results: &[(Result<Tensor>, &TestTensor)]) -> GradStore {
    let product = |(y, dout): &(Result<Tensor>, &TestTensor)| {
        let y = y.as_ref().expect("candle computes it");
        (y * candle(dout).reshape(y.shape())?)?.sum_all()
    };
    let sums: Result<Vec<Tensor>> = results.iter().map(product).collect();
    let sum = sums.and_then(|sums| Tensor::stack(&sums, 0)?.sum_all());
    sum.and_then(|sum| sum.backward()).unwrap()
}

/// Our gradient of each is candle's, up to `units` in the last place of its largest element.
fn assert_gradients(
    what: &str,
    leaves: &[(&str, &Leaf, &DeviceTensor)],
    theirs: &GradStore,
    units: f64,
) {
    for (name, leaf, ours) in leaves {
        let theirs = theirs
            .get(&leaf.theirs)
            .expect("the results depend on every variable");
        let what = format!("{what}: gradient of {name}");
        assert_agrees(&what, &ours.download_output(), theirs, units);
    }
}
