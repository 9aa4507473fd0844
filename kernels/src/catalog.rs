//! The images of the kernels that `lib.rs` lists.

use crate::emit::{self, Kernel};
use crate::nvcc::{Architecture, Source, Unit};
use crate::{CATALOG, Entry, Error};

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
