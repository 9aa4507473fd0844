//! The attention block of a transformer, as the problems of its operations.

use arrayvec::ArrayVec;

use super::{attention, kv_cache, linear, rms_norm, rope};

/// What an operation and the block call the same argument, in this order.
pub(crate) type Names = &'static [(&'static str, &'static str)];

/// An operation of the block: its problem, or the plan of it.
#[derive(Clone, Debug)]
pub(crate) struct Part<P> {
    pub is: P,
    /// For errors of its validation, of its plan and of its launch.
    pub names: Names,
}

/// Validated arguments: one problem for each operation, in the order in which they run. Queries, keys, values and
/// attention's output lie at the beginning of the block's workspace.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    /// Queries, keys and values: in one product or in three.
    pub projections: ArrayVec<Part<linear::Problem>, 3>,
    /// Of queries and of keys.
    pub norms: ArrayVec<Part<rms_norm::Problem>, 2>,
    /// Of queries, and of keys unless they are rotated on their way to the cache.
    pub rope: Option<Part<rope::Problem>>,
    /// With a cache.
    pub append: Option<Part<kv_cache::Append>>,
    pub attention: Part<attention::Problem>,
    pub out_projection: Part<linear::Problem>,
    /// Bytes of the workspace that hold what passes between operations.
    pub intermediates: usize,
    /// Whether it stands for every batch of the cache that has as many tokens: it is asked about
    /// and not run.
    pub any_batch: bool,
}
