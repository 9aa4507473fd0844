//! What is compiled: one image per operation.

use crate::Error;
use crate::emit::Kernel;
use crate::rms_norm;

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
    Ok(vec![Image {
        name: "rms_norm",
        kernels: rms_norm::kernels()?,
    }])
}
