//! What a launch needs whose blocks take their work from a counter (`kernels/cuda/common/claims.cuh`), or tell each
//! other what they have done by its tag (`kernels/cuda/common/tag.cuh`).

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the counter: two words, aligned to as many. They may hold anything.
pub(super) const COUNTER: usize = 16;

/// A number that no other launch of the process has, and that memory hardly holds by chance: what tells a launch that its counter,
/// or a block's word, is its own.
pub(super) fn tag() -> u64 {
    static NEXT: OnceLock<AtomicU64> = OnceLock::new();
    let seed = || AtomicU64::new(RandomState::new().build_hasher().finish());
    NEXT.get_or_init(seed)
        .fetch_add(1, Ordering::Relaxed)
        .max(1)
}
