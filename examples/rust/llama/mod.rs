//! A small model of the Llama family in training, with random weights: what the examples
//! `finetuning` and `memory_optimization` share, and a test of the estimate. It is made from the
//! description that estimates take, and all of its memory is there before the first step.

mod layer;
mod tensors;

use rand::{Rng, SeedableRng, rngs::StdRng};
use unsloth::estimate::{Checkpointing, Training};
use unsloth::ops::linear::Weights;
use unsloth::ops::{cross_entropy, decoder_layer, embedding, linear_cross_entropy, rms_norm};
use unsloth::optimizer::Optimizer;
use unsloth::training::checkpoint::{self, Action, Plan, Step};
use unsloth::{Buffer, Context, DType, InOut, Result, Stream, Workspace};

use layer::{backward_params, layer_params};
use tensors::{Tensor, Tensors, optimizer};

pub use tensors::Update;

const EPSILON: f32 = 1e-5;

/// Gives memory of a context's device.
pub type Allocate = fn(&Context, usize) -> Result<Buffer>;

/// What a step begins with and ends with; layers read where tokens stand.
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

impl Llama {
    /// All of a model's memory, with weights that follow from the seed.
    pub fn new(
        ctx: &Context,
        training: &Training,
        update: Update,
        allocate: Allocate,
    ) -> Result<Llama> {
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
        let (optimizer, state) =
            optimizer(ctx, &t, update, &mut weights, &mut gradients, allocate)?;

        let (batch, seq) = (t.batch_size as usize, t.sequence_length as usize);
        let leading = match t.packed_sequences {
            None => vec![batch, seq],
            Some(_) => vec![batch * seq],
        };
        let shape = [leading.as_slice(), &[t.model.hidden_size as usize]].concat();
        let of = |dtype, shape: &[usize]| Tensor::new(ctx, allocate, dtype, shape);
        // Packed sequences are as long as those of a batch; behind the last one they are empty.
        let packed = |most: u64| {
            let mut positions = of(DType::I32, &leading)?;
            let values: Vec<i32> = (0..batch * seq).map(|i| (i % seq) as i32).collect();
            positions
                .buffer
                .copy_from_slice(0, &values, Stream::DEFAULT)?;
            let mut ends = of(DType::I32, &[most as usize + 1])?;
            let values: Vec<i32> = (0..=most as usize)
                .map(|i| (i.min(batch) * seq) as i32)
                .collect();
            ends.buffer.copy_from_slice(0, &values, Stream::DEFAULT)?;
            Ok::<_, unsloth::Error>((positions, ends))
        };
        let inputs = Inputs {
            ids: of(DType::I32, &leading)?,
            targets: of(DType::I32, &leading)?,
            packed: t.packed_sequences.map(packed).transpose()?,
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

    /// Shapes and f32 values of all weights: the embedding, the last norm, the head where it is
    /// apart, then those of each layer in the order of its constants.
    #[allow(dead_code)] // what compares models asks for them
    pub fn weights(&mut self) -> Result<Vec<(Vec<usize>, Vec<f32>)>> {
        let values = |tensor: &mut Tensor| {
            let layout = tensor.layout;
            let values = tensor
                .buffer
                .to_vec(0, layout.num_elements(), Stream::DEFAULT)?;
            Ok((layout.shape().to_vec(), values))
        };
        self.weights.all().map(values).collect()
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
            vocabulary: None,
            workspace: Workspace::none(),
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
            vocabulary: None,
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
            vocabulary: None,
            dout: self.gradient.view()?,
            ids: self.inputs.ids.view()?,
            dweight: self.gradients.embedding.view_mut()?,
            padding_idx: None,
            accumulate,
            workspace,
        })
    }
}
