//! A small model of the Llama family in training, with random weights: what the examples
//! `finetuning` and `memory_optimization` share. It is made from the description that estimates take,
//! and all of its memory is there before the first step.

use rand::{Rng, SeedableRng, rngs::StdRng};
use unsloth::estimate::{Checkpointing, Model, Training};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::ops::swiglu::{Activation, GateOrder};
use unsloth::ops::{attention_block, cast, cross_entropy, decoder_layer, embedding};
use unsloth::ops::{linear_cross_entropy, rms_norm};
use unsloth::optimizer::{self, Group, LossScale, MixedPrecision, Optimizer, Parameter};
use unsloth::training::checkpoint::{self, Action, Plan, Step};
use unsloth::{
    Buffer, Context, DType, InOut, Layout, Result, Stream, TensorMut, TensorRef, Workspace,
};

const EPSILON: f32 = 1e-5;

/// Gives memory of a context's device.
pub type Allocate = fn(&Context, usize) -> Result<Buffer>;

struct Tensor {
    buffer: Buffer,
    dtype: DType,
    layout: Layout,
}

impl Tensor {
    fn new(ctx: &Context, allocate: Allocate, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let layout = Layout::contiguous(shape)?;
        let mut buffer = allocate(ctx, layout.num_elements() * dtype.size())?;
        buffer.copy_from_slice(0, &vec![false; buffer.size()], Stream::DEFAULT)?;
        Ok(Tensor {
            buffer,
            dtype,
            layout,
        })
    }

    fn set(&mut self, ctx: &Context, values: &[f32]) -> Result<()> {
        let wide = Buffer::from_slice(ctx, values)?;
        let params = cast::Params {
            x: wide.tensor(0, DType::F32, self.layout)?,
            out: self.view_mut()?,
        };
        cast::forward(ctx, &params, Stream::DEFAULT)?;
        ctx.synchronize(Stream::DEFAULT)
    }

    fn view(&self) -> Result<TensorRef<'_>> {
        self.buffer.tensor(0, self.dtype, self.layout)
    }

    fn view_mut(&mut self) -> Result<TensorMut<'_>> {
        self.buffer.tensor_mut(0, self.dtype, self.layout)
    }
}

/// Tensors of a layer, each of which a model may lack.
type Layer = [Option<Tensor>; 12];

const ATTENTION_NORM: usize = 0;
const QKV: usize = 1;
const QKV_BIAS: usize = 2;
const Q_NORM: usize = 3;
const K_NORM: usize = 4;
const OUT: usize = 5;
const OUT_BIAS: usize = 6;
const MLP_NORM: usize = 7;
const GATE_UP: usize = 8;
const GATE_UP_BIAS: usize = 9;
const DOWN: usize = 10;
const DOWN_BIAS: usize = 11;

/// The weights of a model, or their gradients.
struct Tensors {
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Option<Tensor>,
}

impl Tensors {
    /// Makes each tensor by its shape.
    fn new(m: &Model, make: &mut dyn FnMut(&[usize]) -> Result<Tensor>) -> Result<Tensors> {
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

    fn all(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let ends = [&mut self.embedding, &mut self.norm].into_iter();
        let layers = self.layers.iter_mut().flatten().flatten();
        ends.chain(&mut self.head).chain(layers)
    }
}

/// What is written once and read by every layer.
struct Inputs {
    ids: Tensor,
    targets: Tensor,
    /// Of packed sequences: where tokens stand, and where sequences begin.
    packed: Option<(Tensor, Tensor)>,
    loss: Tensor,
    denominator: Tensor,
}

pub struct Llama {
    context: Context,
    training: Training,
    plan: Plan,
    weights: Tensors,
    gradients: Tensors,
    optimizer: Optimizer,
    inputs: Inputs,
    hidden: Vec<Tensor>,
    saved: Vec<Buffer>,
    normalized: Tensor,
    gradient: Tensor,
    workspace: Buffer,
    _state: Buffer,
}

fn view(tensor: &Option<Tensor>) -> Result<Option<TensorRef<'_>>> {
    tensor.as_ref().map(Tensor::view).transpose()
}

fn view_mut(tensor: &mut Option<Tensor>) -> Result<Option<TensorMut<'_>>> {
    tensor.as_mut().map(Tensor::view_mut).transpose()
}

fn weights(layer: &Layer, matrix: usize, bias: usize) -> Result<Weights<'_>> {
    Ok(Weights {
        weight: view(&layer[matrix])?.expect("every layer has its matrices"),
        bias: view(&layer[bias])?,
    })
}

/// The arguments of a layer's forward pass, which are part of its backward pass's.
fn layer_params<'a>(
    (m, checkpointing): (&Model, Checkpointing),
    layer: &'a Layer,
    inputs: &'a Inputs,
    (x, out): (TensorRef<'a>, TensorMut<'a>),
    (saved, workspace): (Workspace<'a>, Workspace<'a>),
) -> Result<decoder_layer::Params<'a>> {
    let packed = inputs.packed.as_ref();
    let packed = packed.map(|(at, ends)| Ok::<_, unsloth::Error>((at.view()?, ends.view()?)));
    let packed = packed.transpose()?;
    let attention = attention_block::Params {
        x,
        num_heads: m.num_heads as usize,
        num_kv_heads: m.num_kv_heads as usize,
        head_dim: m.head_dim as usize,
        v_head_dim: m.v_head_dim as usize,
        projections: attention_block::Projections::Packed(weights(layer, QKV, QKV_BIAS)?),
        q_norm: view(&layer[Q_NORM])?,
        k_norm: view(&layer[K_NORM])?,
        norm_weight_offset: 0.0,
        norm_epsilon: EPSILON,
        rotation: Some(Rotation::default()),
        positions: packed.map_or(Positions::From(0), |(at, _)| Positions::PerToken(at)),
        cache: None,
        cu_seqlens: packed.map(|(_, ends)| ends),
        max_seqlen: 0,
        scale: 0.0,
        softcap: 0.0,
        bidirectional: false,
        window: 0,
        alibi_slopes: None,
        sinks: None,
        out_projection: weights(layer, OUT, OUT_BIAS)?,
        output: Output::none(),
        workspace: Workspace::none(),
        qkv_out: None,
        attended_out: None,
        lse_out: None,
    };
    let mlp = mlp::Params {
        x,
        gate_up: GateUp::Packed {
            weights: weights(layer, GATE_UP, GATE_UP_BIAS)?,
            order: GateOrder::GateFirst,
        },
        activation: Activation::Silu,
        down: weights(layer, DOWN, DOWN_BIAS)?,
        output: Output::none(),
        workspace: Workspace::none(),
        gate_up_out: None,
    };
    Ok(decoder_layer::Params {
        x,
        attention_norm: view(&layer[ATTENTION_NORM])?.expect("every layer has its norms"),
        mlp_norm: view(&layer[MLP_NORM])?.expect("every layer has its norms"),
        norm_weight_offset: 0.0,
        norm_epsilon: EPSILON,
        attention,
        mlp,
        checkpointing,
        out,
        saved,
        workspace,
    })
}

/// Of a layer's backward pass; `dout` becomes `dx`.
fn backward_params<'a>(
    forward: decoder_layer::Params<'a>,
    dout: TensorMut<'a>,
    gradients: &'a mut Layer,
    accumulate: bool,
    workspace: Workspace<'a>,
) -> Result<decoder_layer::backward::Params<'a>> {
    let [
        a,
        qkv,
        qkv_bias,
        q,
        k,
        out,
        out_bias,
        m,
        gate_up,
        gate_up_bias,
        down,
        down_bias,
    ] = gradients;
    Ok(decoder_layer::backward::Params {
        forward,
        dout: InOut::InPlace(dout),
        dattention_norm: view_mut(a)?,
        dmlp_norm: view_mut(m)?,
        attention: attention_block::backward::Gradients {
            dqkv_weight: view_mut(qkv)?,
            dqkv_bias: view_mut(qkv_bias)?,
            dq_norm: view_mut(q)?,
            dk_norm: view_mut(k)?,
            dout_weight: view_mut(out)?,
            dout_bias: view_mut(out_bias)?,
            ..Default::default()
        },
        mlp: mlp::backward::Gradients {
            dgate_up_weight: view_mut(gate_up)?,
            dgate_up_bias: view_mut(gate_up_bias)?,
            ddown_weight: view_mut(down)?,
            ddown_bias: view_mut(down_bias)?,
            ..Default::default()
        },
        accumulate,
        workspace,
    })
}

impl Llama {
    /// All of a model's memory, with weights that follow from the seed.
    pub fn new(ctx: &Context, training: &Training, rate: f32, allocate: Allocate) -> Result<Llama> {
        let t = *training;
        let mut rng = StdRng::seed_from_u64(3);
        let mut weights = Tensors::new(&t.model, &mut |shape| {
            let dtype = if shape.len() > 1 {
                t.weight_dtype
            } else {
                t.vector_dtype
            };
            let mut tensor = Tensor::new(ctx, allocate, dtype, shape)?;
            let values: Vec<f32> = match shape {
                [rows, columns] => {
                    let bound = 1.0 / (*columns as f32).sqrt();
                    let draw = |_| rng.random_range(-bound..bound);
                    (0..rows * columns).map(draw).collect()
                }
                _ => vec![1.0; tensor.layout.num_elements()],
            };
            tensor.set(ctx, &values)?;
            Ok(tensor)
        })?;
        let mut gradients = Tensors::new(&t.model, &mut |shape| {
            Tensor::new(ctx, allocate, t.gradient_dtype, shape)
        })?;
        let (optimizer, state) = optimizer(ctx, &t, rate, &mut weights, &mut gradients, allocate)?;

        let (batch, seq) = (t.batch_size as usize, t.sequence_length as usize);
        let leading = match t.packed_sequences {
            None => vec![batch, seq],
            Some(_) => vec![batch * seq],
        };
        let shape = [leading.as_slice(), &[t.model.hidden_size as usize]].concat();
        let of = |dtype, shape: &[usize]| Tensor::new(ctx, allocate, dtype, shape);
        let ends = |n: u64| {
            Ok::<_, unsloth::Error>((
                of(DType::I32, &leading)?,
                of(DType::I32, &[n as usize + 1])?,
            ))
        };
        let inputs = Inputs {
            ids: of(DType::I32, &leading)?,
            targets: of(DType::I32, &leading)?,
            packed: t.packed_sequences.map(ends).transpose()?,
            loss: of(DType::F32, &[1])?,
            denominator: of(DType::F32, &[1])?,
        };
        let state_bytes = shape.iter().product::<usize>() * t.dtype.size();
        let num_layers = t.model.num_layers as usize;
        let every = t.segment_layers.map_or(num_layers, |every| every as usize);
        let mut llama = Llama {
            context: ctx.clone(),
            training: t,
            plan: Plan::new(&checkpoint::Params {
                num_layers,
                every,
                hidden_bytes: state_bytes as u64,
                saved_bytes: 0,
            })?,
            weights,
            gradients,
            optimizer,
            inputs,
            hidden: Vec::new(),
            saved: Vec::new(),
            normalized: of(t.dtype, &shape)?,
            gradient: of(t.dtype, &shape)?,
            workspace: Buffer::new(ctx, 0)?,
            _state: state,
        };
        for _ in 0..llama.plan.num_hidden_slots() {
            llama.hidden.push(of(t.dtype, &shape)?);
        }
        let (saved, workspace) = llama.measure()?;
        for _ in 0..llama.plan.num_saved_slots() {
            llama.saved.push(allocate(ctx, saved)?);
        }
        llama.workspace = allocate(ctx, workspace)?;
        Ok(llama)
    }

    /// Bytes that a layer saves, and that the largest call needs.
    fn measure(&mut self) -> Result<(usize, usize)> {
        let (ctx, none) = (self.context.clone(), Workspace::none);
        let policy = self.training.checkpointing;
        let layer = self.layer(0, (0, 1), policy, (none(), none()))?;
        let saved = decoder_layer::saved_size(&ctx, &layer)?;
        let mut most = decoder_layer::workspace_size(&ctx, &layer)?;
        if self.plan.num_recomputed() > 0 {
            let layer = self.layer(0, (0, 1), Checkpointing::Full, (none(), none()))?;
            most = most.max(decoder_layer::workspace_size(&ctx, &layer)?);
        }
        let layer = self.layer_backward(0, 0, (none(), none()))?;
        most = most.max(decoder_layer::backward::workspace_size(&ctx, &layer)?);
        let loss = self.loss(none())?;
        most = most.max(linear_cross_entropy::workspace_size(&ctx, &loss)?);
        let norm = self.norm_backward(none())?;
        most = most.max(rms_norm::backward::workspace_size(&ctx, &norm)?);
        let embedding = self.embedding_backward(none())?;
        most = most.max(embedding::backward::workspace_size(&ctx, &embedding)?);
        Ok((saved, most))
    }

    /// Makes a step with these tokens and what follows each of them, where that is to be learned;
    /// gives the mean loss.
    pub fn step(&mut self, ids: &[i32], targets: &[i32]) -> Result<f32> {
        let ctx = self.context.clone();
        let learned = targets
            .iter()
            .filter(|t| i64::from(**t) != cross_entropy::IGNORE_INDEX);
        let learned = [learned.count().max(1) as f32];
        let inputs = &mut self.inputs;
        inputs.ids.buffer.copy_from_slice(0, ids, Stream::DEFAULT)?;
        inputs
            .targets
            .buffer
            .copy_from_slice(0, targets, Stream::DEFAULT)?;
        inputs
            .denominator
            .buffer
            .copy_from_slice(0, &learned, Stream::DEFAULT)?;
        let params = embedding::Params {
            table: self.weights.embedding.view()?,
            ids: inputs.ids.view()?,
            out: self.hidden[0].view_mut()?,
        };
        embedding::forward(&ctx, &params, Stream::DEFAULT)?;

        // The plan's first backward pass comes when all layers have run.
        let mut gradient_is_there = false;
        for action in self.plan.actions() {
            if action.step == Step::Backward && !gradient_is_there {
                self.run_head()?;
                gradient_is_there = true;
            }
            self.run_layer(action)?;
        }
        let mut workspace = std::mem::replace(&mut self.workspace, Buffer::new(&ctx, 0)?);
        let params = self.embedding_backward(workspace.workspace())?;
        embedding::backward(&ctx, &params, Stream::DEFAULT)?;
        self.workspace = workspace;
        self.optimizer.step(Stream::DEFAULT)?;
        let loss = self
            .inputs
            .loss
            .buffer
            .to_vec::<f32>(0, 1, Stream::DEFAULT)?;
        Ok(loss[0])
    }

    fn run_layer(&mut self, action: Action) -> Result<()> {
        let ctx = self.context.clone();
        let none = || Buffer::new(&ctx, 0);
        let mut workspace = std::mem::replace(&mut self.workspace, none()?);
        let mut saved = none()?;
        if let Some(slot) = action.saved {
            std::mem::swap(&mut saved, &mut self.saved[slot]);
        }
        let memory = (saved.workspace(), workspace.workspace());
        match (action.step, action.output) {
            (Step::Forward | Step::Recompute, Some(output)) => {
                let checkpointing = match action.saved {
                    Some(_) => self.training.checkpointing,
                    None => Checkpointing::Full,
                };
                let slots = (action.input, output);
                let params = self.layer(action.layer, slots, checkpointing, memory)?;
                decoder_layer::forward(&ctx, &params, Stream::DEFAULT)?;
            }
            (Step::Backward, _) => {
                let params = self.layer_backward(action.layer, action.input, memory)?;
                decoder_layer::backward(&ctx, &params, Stream::DEFAULT)?;
            }
            _ => {}
        }
        self.workspace = workspace;
        if let Some(slot) = action.saved {
            self.saved[slot] = saved;
        }
        Ok(())
    }

    /// The last norm, and the loss with its gradient.
    fn run_head(&mut self) -> Result<()> {
        let ctx = self.context.clone();
        let params = rms_norm::Params {
            x: InOut::Apart {
                input: self.hidden[self.plan.output_slot()].view()?,
                output: self.normalized.view_mut()?,
            },
            residual: None,
            weight: Some(self.weights.norm.view()?),
            weight_offset: 0.0,
            epsilon: EPSILON,
        };
        rms_norm::forward(&ctx, &params, Stream::DEFAULT)?;
        let mut workspace = std::mem::replace(&mut self.workspace, Buffer::new(&ctx, 0)?);
        let params = self.loss(workspace.workspace())?;
        linear_cross_entropy::forward(&ctx, &params, Stream::DEFAULT)?;
        let params = self.norm_backward(workspace.workspace())?;
        rms_norm::backward(&ctx, &params, Stream::DEFAULT)?;
        self.workspace = workspace;
        Ok(())
    }

    fn accumulates(&self) -> bool {
        self.training.gradient_dtype == DType::F32
    }

    fn layer<'a>(
        &'a mut self,
        layer: usize,
        (input, output): (usize, usize),
        checkpointing: Checkpointing,
        memory: (Workspace<'a>, Workspace<'a>),
    ) -> Result<decoder_layer::Params<'a>> {
        let [x, out] = self
            .hidden
            .get_disjoint_mut([input, output])
            .expect("two slots");
        layer_params(
            (&self.training.model, checkpointing),
            &self.weights.layers[layer],
            &self.inputs,
            (x.view()?, out.view_mut()?),
            memory,
        )
    }

    fn layer_backward<'a>(
        &'a mut self,
        layer: usize,
        input: usize,
        (saved, workspace): (Workspace<'a>, Workspace<'a>),
    ) -> Result<decoder_layer::backward::Params<'a>> {
        let accumulate = self.accumulates();
        // The output is not looked at, so any tensor of its shape will do.
        let forward = layer_params(
            (&self.training.model, self.training.checkpointing),
            &self.weights.layers[layer],
            &self.inputs,
            (self.hidden[input].view()?, self.normalized.view_mut()?),
            (saved, Workspace::none()),
        )?;
        let gradients = &mut self.gradients.layers[layer];
        let dout = self.gradient.view_mut()?;
        backward_params(forward, dout, gradients, accumulate, workspace)
    }

    fn loss<'a>(
        &'a mut self,
        workspace: Workspace<'a>,
    ) -> Result<linear_cross_entropy::Params<'a>> {
        let accumulate = self.accumulates();
        let table = self
            .weights
            .head
            .as_ref()
            .unwrap_or(&self.weights.embedding);
        let dtable = self
            .gradients
            .head
            .as_mut()
            .unwrap_or(&mut self.gradients.embedding);
        Ok(linear_cross_entropy::Params {
            x: self.normalized.view()?,
            weights: Weights {
                weight: table.view()?,
                bias: None,
            },
            targets: self.inputs.targets.view()?,
            loss: Some(self.inputs.loss.view_mut()?),
            losses: None,
            lse: None,
            dx: Some(self.gradient.view_mut()?),
            dweight: Some(dtable.view_mut()?),
            dbias: None,
            accumulate,
            dloss: Some(self.optimizer.loss_scale()?),
            denominator: Some(self.inputs.denominator.view()?),
            reduction: cross_entropy::Reduction::Mean,
            ignore_index: cross_entropy::IGNORE_INDEX,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: 0.0,
            chunk_tokens: self.training.chunk_tokens as usize,
            workspace,
        })
    }

    fn norm_backward<'a>(
        &'a mut self,
        workspace: Workspace<'a>,
    ) -> Result<rms_norm::backward::Params<'a>> {
        let accumulate = self.accumulates();
        Ok(rms_norm::backward::Params {
            x: self.hidden[self.plan.output_slot()].view()?,
            dout: InOut::InPlace(self.gradient.view_mut()?),
            dresidual: None,
            weight: Some(self.weights.norm.view()?),
            weight_offset: 0.0,
            epsilon: EPSILON,
            dweight: Some(self.gradients.norm.view_mut()?),
            accumulate,
            workspace,
        })
    }

    fn embedding_backward<'a>(
        &'a mut self,
        workspace: Workspace<'a>,
    ) -> Result<embedding::backward::Params<'a>> {
        let accumulate = self.accumulates();
        Ok(embedding::backward::Params {
            dout: self.gradient.view()?,
            ids: self.inputs.ids.view()?,
            dweight: self.gradients.embedding.view_mut()?,
            padding_idx: None,
            accumulate,
            workspace,
        })
    }

    /// Where packed sequences begin, and the last one's end.
    pub fn pack(&mut self, ends: &[i32]) -> Result<()> {
        let positions = ends.windows(2).flat_map(|pair| 0..pair[1] - pair[0]);
        let positions: Vec<i32> = positions.collect();
        if let Some((at, cu_seqlens)) = &mut self.inputs.packed {
            at.buffer.copy_from_slice(0, &positions, Stream::DEFAULT)?;
            cu_seqlens
                .buffer
                .copy_from_slice(0, ends, Stream::DEFAULT)?;
        }
        Ok(())
    }
}

/// The optimizer of all weights, and the memory of its state. Each step leaves zeros in gradients.
fn optimizer(
    ctx: &Context,
    t: &Training,
    rate: f32,
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
        learning_rate: rate,
        weight_decay: 0.0,
    }];
    let params = optimizer::Params {
        precision: MixedPrecision {
            compute: None,
            master: t.master,
            loss_scale: LossScale::NONE,
        },
        max_norm: 1.0,
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
