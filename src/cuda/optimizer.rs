//! An optimizer's step on the GPU: a block for each chunk of a parameter, found through the table
//! that the optimizer has put beside its state.

use contract::optimizer::{Kind, Storage as Code, shift};

use super::device::Resources;
use super::images::optimizer::Arguments;
use super::table::Table;
use super::{Cuda, Run, check_blocks};
use crate::backend::Stream;
use crate::error::Result;
use crate::problem::optimizer::{
    CHUNK, Decide, Norm, Rule, ScaleGradients, Storage, Sum, Table as Parameters, Update, traits,
};

const OP: &str = "optimizer";

// What the table says is the same on both sides.
const _: () = assert!(
    CHUNK == contract::optimizer::CHUNK as usize
        && traits::WORDS == contract::optimizer::ENTRY as usize
        && traits::GRADIENT == shift::GRADIENT
        && traits::STORAGE == shift::STORAGE
        && traits::VECTORS == shift::VECTORS
        && traits::GROUP == shift::GROUP
        && Storage::Weight as u32 == Code::Weight.code()
        && Storage::F32 as u32 == Code::F32.code()
        && Storage::Remainder as u32 == Code::Remainder.code()
        && Storage::Stochastic as u32 == Code::Stochastic.code()
);

/// By what they are made for.
pub(super) type Kernels = Table<Arguments, 1>;

pub(super) fn kernels(resources: &Resources) -> Result<Kernels> {
    Kernels::new(OP, resources, |c| [c.kind])
}

impl Parameters<'_> {
    /// Queues a kernel; every one finds the table and the state.
    fn launch(
        &self,
        cuda: &Cuda,
        kind: Kind,
        blocks: usize,
        arguments: Arguments,
        stream: Stream,
    ) -> Result<()> {
        let arguments = self.found(arguments);
        self.launch_with(cuda, kind, blocks, &arguments, stream)
    }

    /// Arguments by which a kernel finds the table and the state.
    fn found(&self, arguments: Arguments) -> Arguments {
        let control = self.control.addr() as u64;
        // Arrays of all memory begin at address zero, where `arguments` leaves them.
        Arguments {
            entries: self.entries.addr() as u64,
            control,
            control_u32: control,
            control_u64: control,
            control_f64: control,
            groups: self.groups.addr() as u64,
            partials: self.partials.addr() as u64,
            num_tensors: self.tensors.len() as u32,
            num_chunks: self.num_chunks as u32,
            ..arguments
        }
    }

    fn launch_with(
        &self,
        cuda: &Cuda,
        kind: Kind,
        blocks: usize,
        arguments: &Arguments,
        stream: Stream,
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let kernel = cuda.optimizer.get([kind.code()])?;
        let blocks = check_blocks(OP, "parameters", blocks)?;
        // SAFETY: table and state are the optimizer's own, whose parameters were checked, and
        // whoever made it promised that they are there; the stream is live by the promise of
        // whoever made it.
        unsafe { cuda.launch(OP, kernel, blocks, arguments, stream) }
    }
}

impl Run for Norm<'_> {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let chunks = self.table.num_chunks;
        self.table
            .launch(cuda, Kind::Norm, chunks, Arguments::ZERO, stream)
    }
}

impl Run for Sum<'_> {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let own = self.table.sums.wrapping_add(self.rank * size_of::<f64>());
        // The one number that it writes.
        let arguments = Arguments {
            control_f64: own.addr() as u64,
            ..self.table.found(Arguments::ZERO)
        };
        self.table
            .launch_with(cuda, Kind::Sum, 1, &arguments, stream)
    }
}

impl Run for Decide<'_> {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let arguments = Arguments {
            max_norm: self.max_norm,
            dynamic: u32::from(self.scaling.dynamic),
            growth: self.scaling.growth,
            backoff: self.scaling.backoff,
            interval: self.scaling.interval,
            hysteresis: self.scaling.hysteresis,
            beta1: self.betas[0],
            beta2: self.betas[1],
            ..Arguments::ZERO
        };
        let Some(ranks) = self.ranks else {
            return self.table.launch(cuda, Kind::Decide, 1, arguments, stream);
        };
        // The words that it reads are the sums, and there are as many as ranks.
        let arguments = Arguments {
            entries: self.table.sums.addr() as u64,
            num_chunks: ranks as u32,
            ..self.table.found(arguments)
        };
        self.table
            .launch_with(cuda, Kind::Agree, 1, &arguments, stream)
    }
}

impl Run for Update<'_> {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let mut arguments = Arguments {
            zero_gradients: u32::from(self.zero_gradients),
            seed_low: self.seed as u32,
            seed_high: (self.seed >> 32) as u32,
            ..Arguments::ZERO
        };
        let kind = match self.rule {
            Rule::Adam {
                beta1,
                beta2,
                epsilon,
                decoupled,
            } => {
                [arguments.beta1, arguments.beta2] = [beta1, beta2];
                [arguments.new1, arguments.new2] = self.rule.new_shares();
                arguments.epsilon = epsilon;
                arguments.decoupled = u32::from(decoupled);
                Kind::Adam
            }
            Rule::Sgd {
                momentum,
                nesterov,
                decoupled,
            } => {
                arguments.momentum = momentum;
                arguments.nesterov = u32::from(nesterov);
                arguments.decoupled = u32::from(decoupled);
                match momentum {
                    0.0 => Kind::Plain,
                    _ => Kind::Momentum,
                }
            }
        };
        let chunks = self.table.num_chunks;
        self.table.launch(cuda, kind, chunks, arguments, stream)
    }
}

impl Run for ScaleGradients<'_> {
    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn run(&self, cuda: &Cuda, stream: Stream) -> Result<()> {
        let arguments = Arguments {
            factor: self.factor,
            ..Arguments::ZERO
        };
        let chunks = self.table.num_chunks;
        self.table
            .launch(cuda, Kind::Scale, chunks, arguments, stream)
    }
}
