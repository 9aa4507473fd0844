//! The kernels of a modern transformer behind one API, for Rust and, through a C ABI, for everything else.
//!
//! | room | what it is for |
//! |-|-|
//! | [`ffi`] | the C ABI: pointers checked and converted, errors mapped, nothing else |
//! | [`ops`] | one module per operation: parameters and their validation |
//! | [`comm`] | groups of ranks, over which collectives run |
//! | [`kv_cache`] | pages, sequences, eviction |
//! | [`optimizer`] | updates of parameters, loss scaling, clipping |
//! | [`estimate`] | how much memory a model takes |
//! | [`training`] | which activations a training step keeps and which it computes again; pipelines |
//! | [`memory`] | buffers, pools, copies |
//! | [`context`] | a device behind one handle: the only file that knows both backends |
//! | `cpu` | the CPU backend, one file per operation |
//! | `cuda` | the CUDA backend (feature `cuda`): driver, compiled kernels, launching; then one file per operation |
//! | `problem` | validated calls, plain data: what a backend needs to know |
//! | [`tensor`], [`layout`], [`dtype`], [`backend`], [`error`] | the ground |
//!
//! Rooms import only from those below them, so a call travels down: `ffi` reads a struct into an operation's
//! `Params`; these become a problem; the context's backend answers it with a plan, which alone can launch.
//!
//! ```
//! use unsloth::{Context, InOut, Stream, TensorMut, TensorRef, ops::rms_norm};
//!
//! let ctx = Context::cpu()?;
//! let x = [3.0f32, 4.0];
//! let mut out = [0.0f32; 2];
//! let params = rms_norm::Params {
//!     x: InOut::Apart {
//!         input: TensorRef::from_slice(&x, &[1, 2])?,
//!         output: TensorMut::from_slice(&mut out, &[1, 2])?,
//!     },
//!     residual: None,
//!     weight: None,
//!     weight_offset: 0.0,
//!     epsilon: 1e-12,
//! };
//! rms_norm::forward(&ctx, &params, Stream::DEFAULT)?;
//! assert!((out[0] - 3.0 / 12.5f32.sqrt()).abs() < 1e-6);
//! # Ok::<(), unsloth::Error>(())
//! ```

#![deny(missing_docs, unsafe_op_in_unsafe_fn)]
#![warn(clippy::undocumented_unsafe_blocks, clippy::missing_safety_doc)]

mod alloc;
pub mod backend;
#[cfg(feature = "candle")]
pub mod candle;
pub mod comm;
pub mod context;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "no_cuda.rs"]
mod cuda;
pub mod dtype;
pub mod error;
pub mod estimate;
pub mod ffi;
pub mod guide;
pub mod kv_cache;
pub mod layout;
mod log;
pub mod memory;
pub mod ops;
pub mod optimizer;
mod problem;
pub mod tensor;
pub mod training;

pub use comm::Comm;
pub use context::{Backend, Context, ContextOptions, DeviceInfo, Event, Stream};
pub use dtype::{DType, Element};
pub use error::{Error, Result};
pub use kv_cache::KvCache;
pub use layout::{Layout, MAX_RANK};
pub use memory::{Buffer, MemoryStats};
pub use tensor::{InOut, TensorMut, TensorRef, Workspace};
