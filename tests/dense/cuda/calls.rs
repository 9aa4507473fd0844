//! Operations of the family with their tensors on a GPU, for what holds of each.

use crate::common::{DeviceTensor, TestTensor, contiguous, rng};
use unsloth::ops::linear::{self, Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::ops::{argmax, cast};
use unsloth::{Context, DType, InOut, Stream, Workspace};

pub fn normal(ctx: &Context, dtype: DType, shape: &[usize]) -> DeviceTensor {
    TestTensor::normal(&mut rng(), dtype, contiguous(shape)).upload(ctx)
}

pub fn poisoned(ctx: &Context, dtype: DType, shape: &[usize]) -> DeviceTensor {
    TestTensor::poisoned(dtype, contiguous(shape)).upload(ctx)
}

/// Weights whose products of normal inputs are about as large as those.
pub fn weights(ctx: &Context, dtype: DType, n: usize, k: usize) -> DeviceTensor {
    let values = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[n, k])).values();
    let scale = 1.0 / (k as f64).sqrt();
    let values: Vec<f64> = values.iter().map(|v| v * scale).collect();
    TestTensor::of(dtype, &[n, k], &values).upload(ctx)
}

/// An operation with its tensors.
pub trait Call {
    fn queue(&mut self, ctx: &Context, stream: Stream);
    /// The tensor that a replay may find changed.
    fn input(&mut self) -> &mut DeviceTensor;
    /// The output, having checked what lies around it and around the workspace.
    fn result(&self) -> TestTensor;
    /// Poisons the output, and the workspace if there is one.
    fn poison(&mut self);
}

pub fn poison(tensor: &mut DeviceTensor) {
    let poisoned = TestTensor::poisoned(tensor.dtype, tensor.layout);
    tensor.overwrite(&poisoned);
}

/// With the workspace that is asked for.
pub struct Product {
    pub x: DeviceTensor,
    pub weight: DeviceTensor,
    pub bias: DeviceTensor,
    pub residual: DeviceTensor,
    pub out: DeviceTensor,
    pub workspace: DeviceTensor,
}

impl Product {
    pub fn new(ctx: &Context, dtype: DType, (rows, n, k): (usize, usize, usize)) -> Product {
        let mut product = Product {
            x: normal(ctx, dtype, &[rows, k]),
            weight: weights(ctx, dtype, n, k),
            bias: normal(ctx, dtype, &[n]),
            residual: normal(ctx, dtype, &[rows, n]),
            out: poisoned(ctx, dtype, &[rows, n]),
            workspace: poisoned(ctx, DType::Bool, &[0]),
        };
        let size = linear::workspace_size(ctx, &product.params()).unwrap();
        product.workspace = poisoned(ctx, DType::Bool, &[size]);
        product
    }

    pub fn params(&mut self) -> linear::Params<'_> {
        linear::Params {
            x_norm: None,
            parallel: None,
            x: self.x.view(),
            weights: Weights {
                weight: self.weight.view(),
                bias: Some(self.bias.view()),
            },
            output: Output::Add(InOut::Apart {
                input: self.residual.view(),
                output: self.out.view_mut(),
            }),
            workspace: lent(&self.workspace),
        }
    }
}

/// All of a tensor as a workspace.
pub fn lent(memory: &DeviceTensor) -> Workspace<'_> {
    let size = memory.layout.num_elements() * memory.dtype.size();
    // SAFETY: the tensor's elements, which nothing else uses.
    unsafe { Workspace::from_raw(memory.data().cast(), size) }
}

impl Call for Product {
    fn queue(&mut self, ctx: &Context, stream: Stream) {
        linear::forward(ctx, &self.params(), stream).unwrap();
    }

    fn input(&mut self) -> &mut DeviceTensor {
        &mut self.x
    }

    fn result(&self) -> TestTensor {
        self.workspace.download_output();
        self.out.download_output()
    }

    fn poison(&mut self) {
        poison(&mut self.out);
        poison(&mut self.workspace);
    }
}

pub struct Block {
    pub x: DeviceTensor,
    pub gate_up: DeviceTensor,
    pub down: DeviceTensor,
    pub out: DeviceTensor,
    pub workspace: DeviceTensor,
}

impl Block {
    /// With a workspace of as many times what is asked for, or with what is needed.
    pub fn new(
        ctx: &Context,
        dtype: DType,
        (rows, hidden, dim): (usize, usize, usize),
        times: usize,
    ) -> Block {
        let mut block = Block {
            x: normal(ctx, dtype, &[rows, hidden]),
            gate_up: weights(ctx, dtype, 2 * dim, hidden),
            down: weights(ctx, dtype, hidden, dim),
            out: poisoned(ctx, dtype, &[rows, hidden]),
            workspace: poisoned(ctx, dtype, &[1]),
        };
        let size = match times {
            0 => rows * dim * dtype.size(),
            _ => times * mlp::workspace_size(ctx, &block.params()).unwrap(),
        };
        block.workspace = poisoned(ctx, DType::Bool, &[size]);
        block
    }

    pub fn params(&mut self) -> mlp::Params<'_> {
        let layer = |weight| Weights { weight, bias: None };
        mlp::Params {
            x_norm: None,
            parallel: None,
            x: self.x.view(),
            gate_up: GateUp::Packed {
                weights: layer(self.gate_up.view()),
                order: GateOrder::UpFirst,
            },
            activation: Activation::Silu,
            intermediate_norm: None,
            down: layer(self.down.view()),
            output: Output::Write(self.out.view_mut()),
            workspace: lent(&self.workspace),
            gate_up_out: None,
        }
    }
}

impl Call for Block {
    fn queue(&mut self, ctx: &Context, stream: Stream) {
        mlp::forward(ctx, &self.params(), stream).unwrap();
    }

    fn input(&mut self) -> &mut DeviceTensor {
        &mut self.x
    }

    fn result(&self) -> TestTensor {
        self.workspace.download_output();
        self.out.download_output()
    }

    fn poison(&mut self) {
        poison(&mut self.out);
        poison(&mut self.workspace);
    }
}

/// Gradients of a layer, with the workspace that is asked for.
pub struct Gradients {
    pub dout: DeviceTensor,
    pub x: DeviceTensor,
    pub weight: DeviceTensor,
    pub dx: DeviceTensor,
    pub dweight: DeviceTensor,
    pub dbias: DeviceTensor,
    pub workspace: DeviceTensor,
}

impl Gradients {
    /// Those of the parameters of dtype `gradient`.
    pub fn new(
        ctx: &Context,
        (dtype, gradient): (DType, DType),
        (rows, n, k): (usize, usize, usize),
    ) -> Gradients {
        let mut call = Gradients {
            dout: normal(ctx, dtype, &[rows, n]),
            x: normal(ctx, dtype, &[rows, k]),
            weight: weights(ctx, dtype, n, k),
            dx: poisoned(ctx, dtype, &[rows, k]),
            dweight: poisoned(ctx, gradient, &[n, k]),
            dbias: poisoned(ctx, gradient, &[n]),
            workspace: poisoned(ctx, DType::Bool, &[0]),
        };
        let size = linear::backward::workspace_size(ctx, &call.params()).unwrap();
        call.workspace = poisoned(ctx, DType::Bool, &[size]);
        call
    }

    pub fn params(&mut self) -> linear::backward::Params<'_> {
        linear::backward::Params {
            parallel: None,
            dout: self.dout.view(),
            x: Some(self.x.view()),
            weight: Some(self.weight.view()),
            dx: Some(self.dx.view_mut()),
            dweight: Some(self.dweight.view_mut()),
            dbias: Some(self.dbias.view_mut()),
            accumulate: false,
            workspace: lent(&self.workspace),
        }
    }

    pub fn results(&self) -> [TestTensor; 3] {
        [&self.dx, &self.dweight, &self.dbias].map(|t| t.download_output())
    }
}

impl Call for Gradients {
    fn queue(&mut self, ctx: &Context, stream: Stream) {
        linear::backward(ctx, &self.params(), stream).unwrap();
    }

    fn input(&mut self) -> &mut DeviceTensor {
        &mut self.dout
    }

    /// All three behind each other; f32 holds each of their values.
    fn result(&self) -> TestTensor {
        self.workspace.download_output();
        let values = self.results().map(|t| t.values()).concat();
        TestTensor::of(DType::F32, &[values.len()], &values)
    }

    fn poison(&mut self) {
        for tensor in [&mut self.dx, &mut self.dweight, &mut self.dbias] {
            poison(tensor);
        }
        poison(&mut self.workspace);
    }
}

/// Rows cast, and the greatest of each.
pub struct Sample {
    pub x: DeviceTensor,
    pub cast: DeviceTensor,
    pub out: DeviceTensor,
}

impl Sample {
    pub fn new(ctx: &Context, dtype: DType, rows: usize, n: usize) -> Sample {
        Sample {
            x: normal(ctx, dtype, &[rows, n]),
            cast: poisoned(ctx, DType::Bf16, &[rows, n]),
            out: poisoned(ctx, DType::I64, &[rows]),
        }
    }
}

impl Call for Sample {
    fn queue(&mut self, ctx: &Context, stream: Stream) {
        let params = cast::Params {
            x: self.x.view(),
            out: self.cast.view_mut(),
        };
        cast::forward(ctx, &params, stream).unwrap();
        let params = argmax::Params {
            x: self.cast.view(),
            out: self.out.view_mut(),
        };
        argmax::forward(ctx, &params, stream).unwrap();
    }

    fn input(&mut self) -> &mut DeviceTensor {
        &mut self.x
    }

    fn result(&self) -> TestTensor {
        self.cast.download_output();
        self.out.download_output()
    }

    fn poison(&mut self) {
        poison(&mut self.cast);
        poison(&mut self.out);
    }
}

/// Few and many rows of each operation, through every kind of kernel.
pub fn calls(ctx: &Context) -> Vec<Box<dyn Call>> {
    use DType::{Bf16, F16, F32};
    let mut calls: Vec<Box<dyn Call>> = Vec::new();
    for (dtype, sizes) in [
        (Bf16, (1, 512, 1024)),
        (F16, (13, 100, 264)),
        (F32, (3, 130, 320)),
        (Bf16, (17, 512, 256)),
        (Bf16, (300, 1024, 1024)),
        (F16, (64, 131, 72)),
        (F32, (90, 200, 300)),
        (F32, (33, 31, 7)),
        // With sums that are shared in a workspace.
        (F32, (70, 256, 2048)),
        (F32, (200, 1024, 512)),
    ] {
        calls.push(Box::new(Product::new(ctx, dtype, sizes)));
    }
    for (dtype, sizes, times) in [
        (Bf16, (2, 256, 704), 1),
        (F32, (5, 64, 100), 1),
        (F16, (40, 128, 330), 2),
        // Rows all at once, in two parts and in three.
        (Bf16, (64, 128, 1400), 2),
        (Bf16, (700, 128, 1400), 1),
        (F16, (1101, 64, 520), 1),
        (F32, (66, 512, 1024), 0),
        (F32, (66, 512, 1024), 1),
        (F32, (130, 256, 1024), 2),
    ] {
        calls.push(Box::new(Block::new(ctx, dtype, sizes, times)));
    }
    for (dtypes, sizes) in [
        ((Bf16, Bf16), (300, 512, 256)),
        ((Bf16, F32), (1000, 264, 128)),
        ((F16, F32), (70, 33, 31)),
        ((F32, F32), (200, 256, 320)),
        // A pair that cuBLASLt does not serve.
        ((Bf16, F16), (130, 72, 96)),
    ] {
        calls.push(Box::new(Gradients::new(ctx, dtypes, sizes)));
    }
    calls.push(Box::new(Sample::new(ctx, F32, 3, 4096)));
    calls
}
