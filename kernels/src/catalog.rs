//! What is compiled: one image per operation.

use crate::Error;
use crate::emit::Kernel;
use crate::{embedding, kv_cache, rms_norm, rope, swiglu};

/// The kernels of one operation, compiled together into one image.
#[derive(Clone, Debug)]
pub struct Image {
    /// The operation's name.
    pub name: &'static str,
    /// Its kernels, all with the same arguments.
    pub kernels: Vec<Kernel>,
}

/// Every image.
///
/// # Errors
/// CubeCL refuses a kernel.
pub fn images() -> Result<Vec<Image>, Error> {
    type Instances = fn() -> Result<Vec<Kernel>, Error>;
    let operations: [(&'static str, Instances); 5] = [
        ("embedding", embedding::kernels),
        ("kv_append", kv_cache::kernels),
        ("rms_norm", rms_norm::kernels),
        ("rope", rope::kernels),
        ("swiglu", swiglu::kernels),
    ];
    let image = |(name, kernels): (&'static str, Instances)| {
        let kernels = kernels()?;
        Ok(Image { name, kernels })
    };
    operations.into_iter().map(image).collect()
}
