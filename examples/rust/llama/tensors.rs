//! Weights and their gradients, and the optimizer that they have.

use unsloth::estimate::{Model, Training};
use unsloth::ops::cast;
use unsloth::optimizer::{self, Group, LossScale, MixedPrecision, Optimizer, Parameter};
use unsloth::{Buffer, Context, DType, Layout, Result, Stream, TensorMut, TensorRef, Workspace};

use super::Allocate;

pub struct Tensor {
    pub buffer: Buffer,
    pub dtype: DType,
    pub layout: Layout,
}

impl Tensor {
    pub fn new(ctx: &Context, allocate: Allocate, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let layout = Layout::contiguous(shape)?;
        let mut buffer = allocate(ctx, layout.num_elements() * dtype.size())?;
        buffer.copy_from_slice(0, &vec![false; buffer.size()], Stream::DEFAULT)?;
        Ok(Tensor {
            buffer,
            dtype,
            layout,
        })
    }

    pub fn set(&mut self, ctx: &Context, values: &[f32]) -> Result<()> {
        let wide = Buffer::from_slice(ctx, values)?;
        let params = cast::Params {
            x: wide.tensor(0, DType::F32, self.layout)?,
            out: self.view_mut()?,
        };
        cast::forward(ctx, &params, Stream::DEFAULT)?;
        ctx.synchronize(Stream::DEFAULT)
    }

    pub fn view(&self) -> Result<TensorRef<'_>> {
        self.buffer.tensor(0, self.dtype, self.layout)
    }

    pub fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        self.buffer.tensor_mut(0, self.dtype, self.layout)
    }
}

/// Tensors of a layer, each of which a model may lack.
pub type Layer = [Option<Tensor>; 12];

pub const ATTENTION_NORM: usize = 0;
pub const QKV: usize = 1;
pub const QKV_BIAS: usize = 2;
pub const Q_NORM: usize = 3;
pub const K_NORM: usize = 4;
pub const OUT: usize = 5;
pub const OUT_BIAS: usize = 6;
pub const MLP_NORM: usize = 7;
pub const GATE_UP: usize = 8;
pub const GATE_UP_BIAS: usize = 9;
pub const DOWN: usize = 10;
pub const DOWN_BIAS: usize = 11;

/// The weights of a model, or their gradients.
pub struct Tensors {
    pub embedding: Tensor,
    pub layers: Vec<Layer>,
    pub norm: Tensor,
    pub head: Option<Tensor>,
}

impl Tensors {
    /// Makes each tensor by its shape.
    pub fn new(m: &Model, make: &mut dyn FnMut(&[usize]) -> Result<Tensor>) -> Result<Tensors> {
        let [hidden, inner, dim] = [m.hidden_size, m.intermediate_size, m.head_dim];
        let attended = m.num_heads * m.v_head_dim;
        let qkv = m.num_heads * dim + m.num_kv_heads * (dim + m.v_head_dim);
        let matrix = |rows: u64, columns: u64| Some(vec![rows as usize, columns as usize]);
        let vector = |there: bool, size: u64| there.then(|| vec![size as usize]);
        let shapes = || {
            [
                vector(true, hidden),
                matrix(qkv, hidden),
                vector(m.qkv_bias, qkv),
                vector(m.qk_norm, dim),
                vector(m.qk_norm, dim),
                matrix(hidden, attended),
                vector(m.output_bias, hidden),
                vector(true, hidden),
                matrix(2 * inner, hidden),
                vector(m.mlp_bias, 2 * inner),
                matrix(hidden, inner),
                vector(m.mlp_bias, hidden),
            ]
        };
        let table = [m.vocab_size as usize, hidden as usize];
        let embedding = make(&table)?;
        let mut layers = Vec::new();
        for _ in 0..m.num_layers {
            let mut layer = Layer::default();
            for (tensor, shape) in layer.iter_mut().zip(shapes()) {
                *tensor = shape.map(|shape| make(&shape)).transpose()?;
            }
            layers.push(layer);
        }
        let head = (!m.tied_embeddings).then(|| make(&table)).transpose()?;
        Ok(Tensors {
            embedding,
            layers,
            norm: make(&[hidden as usize])?,
            head,
        })
    }

    pub fn all(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let ends = [&mut self.embedding, &mut self.norm].into_iter();
        let layers = self.layers.iter_mut().flatten().flatten();
        ends.chain(&mut self.head).chain(layers)
    }
}

/// What AdamW is told, beside its defaults: the learning rate, and the greatest norm of all gradients
/// together, or 0 for no limit.
#[derive(Clone, Copy)]
pub struct Update {
    pub rate: f32,
    pub max_norm: f32,
}

/// The optimizer of all weights, and the memory of its state. Each step leaves zeros in gradients.
pub fn optimizer(
    ctx: &Context,
    t: &Training,
    update: Update,
    weights: &mut Tensors,
    gradients: &mut Tensors,
    allocate: Allocate,
) -> Result<(Optimizer, Buffer)> {
    let mut parameters = Vec::new();
    for (weight, gradient) in weights.all().zip(gradients.all()) {
        parameters.push(Parameter {
            weight: weight.view_mut()?,
            gradient: gradient.view_mut()?,
            group: 0,
        });
    }
    let groups = [Group {
        learning_rate: update.rate,
        weight_decay: 0.0,
    }];
    let params = optimizer::Params {
        precision: MixedPrecision {
            compute: None,
            master: t.master,
            loss_scale: LossScale::NONE,
        },
        max_norm: update.max_norm,
        zero_gradients: true,
        ..optimizer::Params::adamw(&parameters, &groups, Workspace::none())
    };
    let mut state = allocate(ctx, optimizer::state_size(ctx, &params)?)?;
    let params = optimizer::Params {
        state: state.workspace(),
        ..params
    };
    // SAFETY: the tensors and the state are the model's, as the optimizer is, and its steps run in
    // the order of the stream that everything else runs on.
    let optimizer = unsafe { Optimizer::new(ctx, &params, Stream::DEFAULT) }?;
    Ok((optimizer, state))
}
