//! Memory: allocations of a context, their accounting, and copies.

mod accountant;
mod buffer;
pub mod estimate;
mod staging;
mod transfer;

pub(crate) use accountant::Accountant;
pub use accountant::MemoryStats;
pub use buffer::Buffer;
pub(crate) use buffer::FREE_OUTSIDE;
pub(crate) use staging::Staging;
pub use transfer::{CopyKind, copy, copy_peer, set};
