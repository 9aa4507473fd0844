//! The images of the kernels that `lib.rs` lists.

use crate::emit::{self, Kernel};
use crate::nvcc::{Architecture, Source, Unit};
use crate::{CATALOG, Entry, Error};

/// The kernels of one operation: one image, or several of about a size where there is much text.
#[derive(Clone, Debug)]
pub struct Image {
    /// The operation's name.
    pub name: &'static str,
    /// Its kernels, all with the same arguments.
    pub kernels: Vec<Kernel>,
    /// Flags of the compiler beyond the usual.
    pub flags: &'static [&'static str],
}

/// Bytes of text that are compiled together, if they are not of one kernel. They take a quarter of a minute or so: several processors
/// share the kernels of an operation, and a change of one compiles only those beside it again. Of smaller parts images would be
/// larger, for what kernels have in common is compressed within one.
const TOGETHER: usize = 4_000_000;

impl Image {
    /// The kernels that are compiled together, in their order.
    pub fn parts(&self) -> Vec<&[Kernel]> {
        let total: usize = self.kernels.iter().map(|kernel| kernel.text.len()).sum();
        let each = total / total.div_ceil(TOGETHER).max(1);
        let (mut parts, mut begin, mut size) = (Vec::new(), 0, 0);
        for (i, kernel) in self.kernels.iter().enumerate() {
            size += kernel.text.len();
            if size >= each || i + 1 == self.kernels.len() {
                parts.push(&self.kernels[begin..=i]);
                (begin, size) = (i + 1, 0);
            }
        }
        parts
    }

    /// What the compiler gets, for each part: machine code for every architecture, and PTX for the newest.
    pub fn units(&self, archs: &[Architecture]) -> Vec<Unit> {
        let flags = ["-std=c++17"].iter().chain(self.flags);
        let flags: Vec<_> = flags.map(|flag| flag.to_string()).collect();
        let unit = |(i, kernels): (usize, &[Kernel])| {
            let name = match i {
                0 => self.name.into(),
                i => format!("{}_{}", self.name, i + 1),
            };
            Unit {
                folder: name.clone().into(),
                name,
                source: Source::Text(emit::translation_unit(kernels)),
                flags: flags.clone(),
                machine_code: archs.to_vec(),
                ptx: archs.last().cloned(),
            }
        };
        self.parts().into_iter().enumerate().map(unit).collect()
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

/// Images whose kernels do not let the next kernel start before they have ended. Products of few rows mostly follow each other. Such a
/// product has fewer blocks than the device takes at once. Started early, it has them placed wherever a block of the product before
/// has ended: some multiprocessors get several, others none, and the whole reads its matrix as slowly as the busiest. A product
/// behind a kernel of another image, which does let it start early, is not helped by this.
const ALONE: [&str; 1] = ["linear"];

fn expanded(&(name, kernels, flags): &Entry) -> Result<Image, Error> {
    let mut kernels = kernels()?;
    if ALONE.contains(&name) {
        kernels.iter_mut().for_each(emit::start_none_early);
    }
    Ok(Image {
        name,
        kernels,
        flags,
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::OnceLock;

    use super::*;

    /// Every image, expanded once for all tests.
    pub fn expanded() -> &'static [Image] {
        static IMAGES: OnceLock<Vec<Image>> = OnceLock::new();
        IMAGES.get_or_init(|| images().unwrap())
    }

    #[test]
    fn parts_are_all_of_an_image() {
        for image in expanded() {
            let parts = image.parts();
            let names = |kernels: &[Kernel]| -> Vec<_> {
                kernels.iter().map(|kernel| kernel.name.clone()).collect()
            };
            assert_eq!(names(&parts.concat()), names(&image.kernels));
            for part in parts {
                let (last, others) = part.split_last().unwrap();
                let size: usize = others.iter().map(|kernel| kernel.text.len()).sum();
                assert!(size < TOGETHER, "{} up to {}", image.name, last.name);
            }
        }
    }
}
