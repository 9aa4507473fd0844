//! Pipelines of decoder layers that run: every schedule gives the gradients of one rank, with the same bits.

use std::collections::BTreeMap;

use unsloth::ops::decoder_layer::{self, Checkpointing, backward};
use unsloth::ops::linear::{Output, Weights};
use unsloth::ops::mlp::{self, GateUp};
use unsloth::ops::rope::{Positions, Rotation};
use unsloth::ops::swiglu::Activation;
use unsloth::ops::{attention_block, send_receive};
use unsloth::training::pipeline::{Action, Kind, Params, Schedule, Step};
use unsloth::{Buffer, Comm, Context, DType, InOut, Stream, Workspace};

use super::params;
use crate::common::workspace::poisoned_workspace;
use crate::common::{DeviceTensor, TestTensor, contiguous, rng};
use crate::group::{context, devices, ranks};
use crate::parallel::{poisoned, unbound, unbound_ref};

const HEADS: usize = 2;
const DIM: usize = 4;
const HIDDEN: usize = 12;
const INTERMEDIATE: usize = 10;
const TOKENS: usize = 5;

/// Queries, keys, values, attention's output, gate, up, down.
const MATRICES: [[usize; 2]; 7] = [
    [HEADS * DIM, HIDDEN],
    [DIM, HIDDEN],
    [DIM, HIDDEN],
    [HIDDEN, HEADS * DIM],
    [INTERMEDIATE, HIDDEN],
    [INTERMEDIATE, HIDDEN],
    [HIDDEN, INTERMEDIATE],
];

/// A part of the model: a layer's matrices and the gains of its norms, and their gradients.
struct Part {
    tensors: Vec<DeviceTensor>,
    gradients: Vec<DeviceTensor>,
}

/// What is held of a micro-batch.
struct Slot {
    x: DeviceTensor,
    out: DeviceTensor,
    saved: Buffer,
    dout: DeviceTensor,
    dx: DeviceTensor,
}

fn hidden(ctx: &Context) -> DeviceTensor {
    poisoned(DType::F32, &[TOKENS, HIDDEN]).upload(ctx)
}

impl Part {
    fn new(ctx: &Context, tensors: &[TestTensor]) -> Part {
        let zeros = |t: &TestTensor| {
            let shape = t.layout.shape();
            TestTensor::of(t.dtype, shape, &vec![0.0; t.values().len()]).upload(ctx)
        };
        Part {
            tensors: tensors.iter().map(|t| t.upload(ctx)).collect(),
            gradients: tensors.iter().map(zeros).collect(),
        }
    }

    fn slot(&self, ctx: &Context) -> Slot {
        let [x, mut out, dout, dx] = [(); 4].map(|()| hidden(ctx));
        let none = [Workspace::none(), Workspace::none()];
        let size = decoder_layer::saved_size(ctx, &self.params(&x, &mut out, none)).unwrap();
        Slot {
            saved: poisoned_workspace(ctx, size),
            x,
            out,
            dout,
            dx,
        }
    }

    fn params<'a>(
        &'a self,
        x: &'a DeviceTensor,
        out: &mut DeviceTensor,
        [saved, workspace]: [Workspace<'a>; 2],
    ) -> decoder_layer::Params<'a> {
        let weights = |i: usize| Weights {
            weight: self.tensors[i].view(),
            bias: None,
        };
        decoder_layer::Params {
            x: x.view(),
            attention_norm: self.tensors[7].view(),
            mlp_norm: self.tensors[8].view(),
            norm_weight_offset: 0.0,
            norm_epsilon: 1e-5,
            attention: attention_block::Params {
                x_norm: None,
                x: x.view(),
                num_heads: HEADS,
                num_kv_heads: 1,
                head_dim: DIM,
                v_head_dim: DIM,
                projections: attention_block::Projections::Apart {
                    q: weights(0),
                    k: weights(1),
                    v: weights(2),
                },
                q_norm: None,
                k_norm: None,
                norm_weight_offset: 0.0,
                norm_epsilon: 1e-5,
                rotation: Some(Rotation::default()),
                positions: Positions::From(0),
                cache: None,
                cu_seqlens: None,
                max_seqlen: 0,
                scale: 0.0,
                softcap: 0.0,
                bidirectional: false,
                window: 0,
                alibi_slopes: None,
                sinks: None,
                attended_norm: None,
                out_projection: weights(3),
                output: Output::none(),
                workspace: Workspace::none(),
                qkv_out: None,
                attended_out: None,
                lse_out: None,
                parallel: None,
            },
            mlp: mlp::Params {
                x_norm: None,
                x: x.view(),
                gate_up: GateUp::Apart {
                    gate: weights(4),
                    up: weights(5),
                },
                activation: Activation::Silu,
                intermediate_norm: None,
                down: weights(6),
                output: Output::none(),
                workspace: Workspace::none(),
                gate_up_out: None,
                parallel: None,
            },
            checkpointing: Checkpointing::Selective,
            // SAFETY: it lives, and nothing else uses it, while a call with these runs.
            out: unsafe { unbound(out) },
            saved,
            workspace,
        }
    }

    fn forward(&self, ctx: &Context, slot: &mut Slot) {
        let Slot { x, out, saved, .. } = slot;
        let asked = self.params(x, out, [Workspace::none(), Workspace::none()]);
        let size = decoder_layer::workspace_size(ctx, &asked).unwrap();
        let mut memory = poisoned_workspace(ctx, size);
        let params = self.params(x, out, [saved.workspace(), memory.workspace()]);
        decoder_layer::forward(ctx, &params, Stream::DEFAULT).unwrap();
    }

    /// Goes back: the gradient of the input, and with `weights` those of weights, which are added to the
    /// ones that are there. Where only these are wanted, that of the input goes elsewhere.
    fn backward(&mut self, ctx: &Context, slot: &mut Slot, step: Step) {
        let mut gradients = std::mem::take(&mut self.gradients);
        let mut elsewhere = hidden(ctx);
        let mut run = |memory: Option<&mut Buffer>| {
            let Slot {
                x,
                out,
                saved,
                dout,
                dx,
            } = &mut *slot;
            let dx = match step {
                Step::BackwardWeight => &mut elsewhere,
                _ => dx,
            };
            // SAFETY: described once for each call, and alive while it runs.
            let mut all = gradients.iter_mut().map(|t| unsafe { unbound(t) });
            let mut next = || all.next().filter(|_| step != Step::BackwardInput);
            let mut attention = attention_block::backward::Gradients::default();
            let mut of_mlp = mlp::backward::Gradients::default();
            attention.dq_weight = next();
            attention.dk_weight = next();
            attention.dv_weight = next();
            attention.dout_weight = next();
            of_mlp.dgate_weight = next();
            of_mlp.dup_weight = next();
            of_mlp.ddown_weight = next();
            let asks = memory.is_none();
            let saved = match asks {
                true => Workspace::none(),
                false => saved.workspace(),
            };
            let params = backward::Params {
                forward: self.params(x, out, [saved, Workspace::none()]),
                dout: InOut::Apart {
                    input: dout.view(),
                    // SAFETY: as above.
                    output: unsafe { unbound(dx) },
                },
                dattention_norm: next(),
                dmlp_norm: next(),
                attention,
                mlp: of_mlp,
                accumulate: true,
                deterministic: true,
                workspace: match memory {
                    None => Workspace::none(),
                    Some(memory) => memory.workspace(),
                },
            };
            match asks {
                true => backward::workspace_size(ctx, &params),
                false => backward(ctx, &params, Stream::DEFAULT).map(|()| 0),
            }
        };
        let size = run(None).unwrap();
        let mut memory = poisoned_workspace(ctx, size);
        run(Some(&mut memory)).unwrap();
        self.gradients = gradients;
    }
}

/// What goes in, and the gradients of what comes out, of each micro-batch; the parts' weights.
struct Model {
    x: Vec<TestTensor>,
    dout: Vec<TestTensor>,
    parts: Vec<Vec<TestTensor>>,
}

impl Model {
    fn new(parts: usize, micro_batches: usize) -> Model {
        let rng = &mut rng();
        let mut normal = |shape: &[usize], scale: f64| {
            let values = TestTensor::normal(rng, DType::F32, contiguous(shape)).values();
            let values: Vec<f64> = values.iter().map(|v| v * scale).collect();
            TestTensor::of(DType::F32, shape, &values)
        };
        let mut hidden = || normal(&[TOKENS, HIDDEN], 1.0);
        let x = (0..micro_batches).map(|_| hidden()).collect();
        let dout = (0..micro_batches).map(|_| hidden()).collect();
        let mut part = || {
            let matrices = MATRICES.iter().map(|shape| normal(shape, 0.2));
            let mut all: Vec<_> = matrices.collect();
            all.extend([normal(&[HIDDEN], 1.0), normal(&[HIDDEN], 1.0)]);
            all
        };
        Model {
            x,
            dout,
            parts: (0..parts).map(|_| part()).collect(),
        }
    }

    /// Gradients of all parts, one micro-batch after the other.
    fn on_one_rank(&self) -> Vec<Vec<u8>> {
        // An emulated GPU has the bits of the CPU.
        let ctx = match devices() {
            None => Context::cpu().unwrap(),
            Some(_) => context(1),
        };
        let parts = self.parts.iter();
        let mut parts: Vec<_> = parts.map(|tensors| Part::new(&ctx, tensors)).collect();
        for (x, dout) in self.x.iter().zip(&self.dout) {
            let mut slots: Vec<Slot> = Vec::new();
            for part in &parts {
                let mut slot = part.slot(&ctx);
                slot.x = match slots.pop() {
                    None => x.upload(&ctx),
                    Some(mut before) => {
                        let out = std::mem::replace(&mut before.out, hidden(&ctx));
                        slots.push(before);
                        out
                    }
                };
                part.forward(&ctx, &mut slot);
                slots.push(slot);
            }
            let mut gradient = dout.upload(&ctx);
            for (part, mut slot) in parts.iter_mut().zip(slots).rev() {
                slot.dout = gradient;
                part.backward(&ctx, &mut slot, Step::Backward);
                gradient = slot.dx;
            }
        }
        let bits = |part: Part| {
            part.gradients
                .into_iter()
                .map(|g| g.download_output().bits())
        };
        parts.into_iter().flat_map(bits).collect()
    }
}

/// A rank that runs its actions.
struct Rank<'a> {
    model: &'a Model,
    ctx: &'a Context,
    comm: &'a Comm,
    p: Params,
    parts: Vec<Part>,
    slots: Vec<Slot>,
    /// Where the gradient of a chunk's micro-batch lies.
    sent_from: BTreeMap<(usize, usize), usize>,
}

impl<'a> Rank<'a> {
    fn new(model: &'a Model, ctx: &'a Context, comm: &'a Comm, schedule: &Schedule) -> Rank<'a> {
        let (p, rank) = (*schedule.params(), comm.rank());
        let own = |chunk| &model.parts[chunk * p.stages + rank];
        let parts: Vec<_> = (0..p.chunks)
            .map(|chunk| Part::new(ctx, own(chunk)))
            .collect();
        let slots = schedule.num_slots(rank).unwrap();
        Rank {
            slots: (0..slots).map(|_| parts[0].slot(ctx)).collect(),
            parts,
            model,
            ctx,
            comm,
            p,
            sent_from: BTreeMap::new(),
        }
    }

    fn pass(&mut self, action: &Action) {
        let (chunk, mb) = (action.chunk, action.micro_batch);
        let slot = &mut self.slots[action.slot.unwrap()];
        let part = chunk * self.p.stages + self.comm.rank();
        match action.step {
            Step::Forward => {
                if part == 0 {
                    slot.x = self.model.x[mb].upload(self.ctx);
                }
                self.parts[chunk].forward(self.ctx, slot);
            }
            step => {
                if part + 1 == self.model.parts.len() {
                    slot.dout = self.model.dout[mb].upload(self.ctx);
                }
                self.parts[chunk].backward(self.ctx, slot, step);
                self.sent_from.insert((chunk, mb), action.slot.unwrap());
            }
        }
    }

    /// One call, of one or two transfers.
    fn transfer(&mut self, actions: &[Action]) {
        let mut params = send_receive::Params {
            comm: self.comm,
            x: None,
            out: None,
        };
        for action in actions {
            let slot = match action.slot {
                Some(slot) => slot,
                None => self.sent_from[&(action.chunk, action.micro_batch)],
            };
            let slot = &mut self.slots[slot];
            let tensor = match action.step {
                Step::SendActivation => &mut slot.out,
                Step::ReceiveActivation => &mut slot.x,
                Step::SendGradient => &mut slot.dx,
                _ => &mut slot.dout,
            };
            let peer = action.peer.unwrap();
            if action.step.is_send() {
                // SAFETY: it lives while the call runs.
                params.x = Some((unsafe { unbound_ref(tensor) }, peer));
            } else {
                // SAFETY: likewise, and the other direction has another one.
                params.out = Some((unsafe { unbound(tensor) }, peer));
            }
        }
        send_receive::forward(self.ctx, &params, Stream::DEFAULT).unwrap();
    }

    fn run(mut self, actions: &[Action], joined: bool) -> Vec<Vec<Vec<u8>>> {
        let mut i = 0;
        while let Some(action) = actions.get(i) {
            i += 1;
            if !action.step.is_transfer() {
                self.pass(action);
                continue;
            }
            let together = usize::from(joined && action.joined);
            self.transfer(&actions[i - 1..i + together]);
            i += together;
        }
        let bits = |g: DeviceTensor| g.download_output().bits();
        let bits = |part: Part| part.gradients.into_iter().map(bits).collect();
        self.parts.into_iter().map(bits).collect()
    }
}

#[test]
fn gradients_are_those_of_one_rank() {
    for kind in Kind::ALL {
        for (stages, micro_batches) in [(1, 2), (2, 3), (3, 5), (4, 2), (4, 7)] {
            if devices().is_some_and(|most| stages > most) {
                continue;
            }
            let groups = match kind {
                Kind::Interleaved if stages == 1 => continue,
                Kind::Interleaved => micro_batches.min(2),
                _ => micro_batches,
            };
            let p = params(kind, stages, groups, 2);
            let schedule = Schedule::new(&p).unwrap();
            let model = Model::new(stages * p.chunks, p.micro_batches);
            let expected = model.on_one_rank();
            for joined in [true, false] {
                let outs = ranks(stages, |ctx, comm| {
                    let actions = schedule.actions(comm.rank()).unwrap();
                    Rank::new(&model, ctx, comm, &schedule).run(&actions, joined)
                });
                let found: Vec<_> = (0..p.chunks)
                    .flat_map(|chunk| outs.iter().flat_map(move |rank| rank[chunk].clone()))
                    .collect();
                assert!(found == expected, "{p:?}, {joined}");
            }
        }
    }
}
