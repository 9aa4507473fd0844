//! The attention block of a transformer, as the problems of its operations.

use arrayvec::ArrayVec;

use super::{attention, kv_cache, linear, rms_norm, rope};

/// Validated arguments: one problem for each operation, in the order in which they run. Queries, keys, values and
/// attention's output lie at the beginning of the block's workspace.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    /// Queries, keys and values: in one product or in three.
    pub projections: ArrayVec<linear::Problem, 3>,
    /// Of queries and of keys.
    pub norms: ArrayVec<rms_norm::Problem, 2>,
    /// Of queries, and of keys unless they are rotated on their way to the cache.
    pub rope: Option<rope::Problem>,
    /// With a cache.
    pub append: Option<kv_cache::Append>,
    pub attention: attention::Problem,
    pub out_projection: linear::Problem,
    /// Bytes of the workspace that hold what passes between operations.
    pub intermediates: usize,
}
