//! Schedules of pipelines: what ranks do and in what order, what that takes, and a pipeline that runs.

mod misuse;
mod run;
mod schedule;
mod simulate;

use unsloth::training::pipeline::{Action, Kind, Params, Schedule};

/// Pipelines of all kinds, some of one rank, some with fewer micro-batches than ranks.
pub fn params(kind: Kind, stages: usize, micro_batches: usize, chunks: usize) -> Params {
    let interleaved = kind == Kind::Interleaved;
    Params {
        kind,
        stages,
        micro_batches: micro_batches * if interleaved { stages } else { 1 },
        chunks: if interleaved { chunks } else { 1 },
    }
}

/// The actions of every rank.
pub fn actions(params: &Params) -> Vec<Vec<Action>> {
    let schedule = Schedule::new(params).unwrap();
    let of = |rank| schedule.actions(rank).unwrap();
    (0..params.stages).map(of).collect()
}
