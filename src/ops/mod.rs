//! Operations: for each one its parameters, their validation, and the choice of implementation.
//!
//! Every operation has the same four parts. `Params` is what a caller sets. `Problem` is what validation makes of it: the sizes
//! and flags a backend needs, known to be consistent. `supported` and `workspace_size` answer from the same choice that
//! `forward` acts on, and look at shapes, strides and dtypes but never at data pointers, which may be NULL there.

pub mod argmax;
pub mod attention;
pub mod attention_block;
pub mod cast;
pub(crate) mod check;
pub mod embedding;
pub(crate) mod kv_cache;
pub mod linear;
pub mod mlp;
pub mod rms_norm;
pub mod rope;
pub mod swiglu;

/// Which implementation a call runs. The discriminants are those of the C ABI (`UNSLOTH_IMPLEMENTATION_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum Implementation {
    /// The CPU backend.
    Cpu = 1,
    /// The CUDA backend's portable kernels.
    Cuda = 2,
    /// The CUDA backend's kernels for Hopper's matrix and copy instructions.
    CudaHopper = 3,
}
