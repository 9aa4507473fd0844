//! What is compiled: one image per operation.

use crate::Error;
use crate::emit::{self, Kernel};
use crate::nvcc::{Architecture, Unit};
use crate::{argmax, attention, cast, embedding, kv_cache, linear, rms_norm, rope, swiglu};

/// The kernels of one operation, compiled together into one image.
#[derive(Clone, Debug)]
pub struct Image {
    /// The operation's name.
    pub name: &'static str,
    /// Its kernels, all with the same arguments.
    pub kernels: Vec<Kernel>,
    /// Flags of the compiler beyond the usual.
    pub flags: &'static [&'static str],
}

impl Image {
    /// What the compiler gets: machine code for every architecture, and PTX for the newest.
    pub fn unit(&self, archs: &[Architecture]) -> Unit {
        let flags = ["-std=c++17"].iter().chain(self.flags);
        Unit {
            name: self.name.into(),
            text: emit::translation_unit(&self.kernels),
            flags: flags.map(|flag| flag.to_string()).collect(),
            machine_code: archs.to_vec(),
            ptx: archs.last().cloned(),
        }
    }
}

/// Exponentials lose the instructions that serve subnormal numbers, which softmax does not notice.
const FLUSH_SUBNORMALS: &[&str] = &["-ftz=true"];

/// Every image.
///
/// # Errors
/// CubeCL refuses a kernel.
pub fn images() -> Result<Vec<Image>, Error> {
    selected(|_| true)
}

/// The image of this name, if there is one.
///
/// # Errors
/// CubeCL refuses a kernel.
pub fn image(name: &str) -> Result<Option<Image>, Error> {
    Ok(selected(|other| other == name)?.pop())
}

fn selected(wanted: impl Fn(&str) -> bool) -> Result<Vec<Image>, Error> {
    type Instances = fn() -> Result<Vec<Kernel>, Error>;
    let operations: [(&'static str, Instances); 10] = [
        ("argmax", argmax::kernels),
        ("attention", attention::kernels),
        ("attention_combine", attention::combine_kernels),
        ("cast", cast::kernels),
        ("embedding", embedding::kernels),
        ("kv_append", kv_cache::kernels),
        ("linear", linear::kernels),
        ("rms_norm", rms_norm::kernels),
        ("rope", rope::kernels),
        ("swiglu", swiglu::kernels),
    ];
    let image = |(name, kernels): (&'static str, Instances)| {
        let kernels = kernels()?;
        let flags: &[_] = match name {
            "attention" => FLUSH_SUBNORMALS,
            _ => &[],
        };
        Ok(Image {
            name,
            kernels,
            flags,
        })
    };
    let wanted = operations.into_iter().filter(|(name, _)| wanted(name));
    wanted.map(image).collect()
}
