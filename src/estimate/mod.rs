//! Memory before it is allocated: what attention, a KV cache, inference and training take, by use,
//! in bytes.
//!
//! What this library allocates itself (a KV cache) or asks its caller for (workspace, what a layer
//! saves, an optimizer's state) is answered by the code that does so, and is exact. The rest are
//! formulas, each with its source beside it; they count tensors, not what an allocator rounds them up
//! to or a framework keeps beside them. Sums are checked: sizes that overflow 64 bits are an error.

mod attention;
mod block;
mod format;
mod inference;
mod model;
mod step;
mod training;

pub use crate::optimizer::Master;
pub use attention::{AttentionMemory, AttentionShape, attention_memory};
pub use format::format_bytes;
pub(crate) use format::in_words;
pub use inference::{Inference, InferenceMemory, inference_memory, inference_memory_of_rank};
pub use model::{Model, ParameterCount};
pub use step::training_step_memory;
pub use training::{Checkpointing, OptimizerKind, Training, TrainingMemory, training_memory};

use crate::dtype::DType;
use crate::error::{Error, Result, text};

const OP: &str = "estimate";

/// The product, or an error that says what overflows.
fn product(what: &'static str, factors: &[u64]) -> Result<u64> {
    factors
        .iter()
        .try_fold(1u64, |product, &factor| product.checked_mul(factor))
        .ok_or_else(|| overflow(what))
}

/// The sum, or an error that says what overflows.
fn sum(what: &'static str, terms: &[u64]) -> Result<u64> {
    terms
        .iter()
        .try_fold(0u64, |sum, &term| sum.checked_add(term))
        .ok_or_else(|| overflow(what))
}

/// A size as the operations take it.
fn index(what: &'static str, value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| overflow(what))
}

fn overflow(what: &'static str) -> Error {
    Error::invalid(OP, what, "overflows 64 bits")
}

/// A size that may not be zero.
fn positive(name: &'static str, value: u64) -> Result<u64> {
    if value > 0 {
        return Ok(value);
    }
    Err(Error::invalid(OP, name, "is 0, at least 1 is needed"))
}

/// Bytes of a float dtype.
fn float_size(name: &'static str, dtype: DType) -> Result<u64> {
    if dtype.is_float() {
        return Ok(dtype.size() as u64);
    }
    let problem = text!("is {dtype}, allowed: f32, f16, bf16");
    Err(Error::invalid(OP, name, problem))
}
