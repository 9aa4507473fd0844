//! Memory: allocations of a context, their accounting, and copies.

mod accountant;
mod buffer;
pub mod estimate;
mod transfer;

pub(crate) use accountant::Accountant;
pub use accountant::MemoryStats;
pub use buffer::Buffer;
pub(crate) use buffer::FREE_OUTSIDE;
pub use transfer::{CopyKind, copy, copy_peer, set};
