//! Memory: allocations of a context, their accounting, and copies.

mod buffer;
mod staging;
mod transfer;

pub use crate::backend::CopyKind;
pub use crate::context::MemoryStats;
pub use buffer::Buffer;
pub(crate) use buffer::FREE_OUTSIDE;
pub(crate) use staging::Staging;
pub use transfer::{copy, copy_peer, set};
