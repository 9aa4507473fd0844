//! What is compiled: one image per operation.

use crate::Error;
use crate::emit::{self, Kernel};
use crate::nvcc::{Architecture, Source, Unit};
use crate::{
    argmax, attention, cast, embedding, kv_cache, layer_norm, linear, rms_norm, rope, swiglu,
};

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
            source: Source::Text(emit::translation_unit(&self.kernels)),
            flags: flags.map(|flag| flag.to_string()).collect(),
            machine_code: archs.to_vec(),
            ptx: archs.last().cloned(),
        }
    }
}

/// An image's name, its kernels, and flags of the compiler beyond the usual.
type Entry = (
    &'static str,
    fn() -> Result<Vec<Kernel>, Error>,
    &'static [&'static str],
);

/// Exponentials lose the instructions that serve subnormal numbers, which softmax does not notice.
const FLUSH_SUBNORMALS: &[&str] = &["-ftz=true"];

/// What is compiled: a line for each image.
const CATALOG: &[Entry] = &[
    ("argmax", argmax::kernels, &[]),
    ("attention", attention::kernels, FLUSH_SUBNORMALS),
    ("attention_combine", attention::combine_kernels, &[]),
    ("cast", cast::kernels, &[]),
    ("embedding", embedding::kernels, &[]),
    ("kv_append", kv_cache::kernels, &[]),
    ("layer_norm", layer_norm::kernels, &[]),
    ("linear", linear::kernels, &[]),
    ("rms_norm", rms_norm::kernels, &[]),
    ("rope", rope::kernels, &[]),
    ("swiglu", swiglu::kernels, &[]),
];

/// The images' names.
pub fn names() -> impl Iterator<Item = &'static str> {
    CATALOG.iter().map(|(name, ..)| *name)
}

/// Every image.
///
/// # Errors
/// CubeCL refuses a kernel.
pub fn images() -> Result<Vec<Image>, Error> {
    CATALOG.iter().map(expanded).collect()
}

/// The image of this name, if there is one.
///
/// # Errors
/// CubeCL refuses a kernel.
pub fn image(name: &str) -> Result<Option<Image>, Error> {
    let found = CATALOG.iter().find(|(other, ..)| *other == name);
    found.map(expanded).transpose()
}

fn expanded(&(name, kernels, flags): &Entry) -> Result<Image, Error> {
    Ok(Image {
        name,
        kernels: kernels()?,
        flags,
    })
}
