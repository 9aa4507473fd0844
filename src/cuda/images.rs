//! The kernels that the build compiled: images for the driver to load, and how to launch what is in them.

use std::ffi::CStr;

/// One operation's kernels, for every architecture of the build.
pub(crate) struct Image {
    /// The operation.
    pub name: &'static str,
    /// The compute capability that it is for; `None` for all.
    pub capability: Option<(u32, u32)>,
    /// What the driver loads.
    pub fatbin: &'static Aligned<[u8]>,
    /// What it contains.
    pub kernels: &'static [KernelInfo],
}

/// The driver reads images in words.
#[repr(C, align(64))]
pub(crate) struct Aligned<T: ?Sized>(pub T);

/// A kernel and how it is launched.
#[derive(Debug)]
pub(crate) struct KernelInfo {
    /// Its symbol.
    pub name: &'static CStr,
    /// The compile-time choices that tell it from its siblings.
    pub choices: &'static [(&'static str, u32)],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
}

impl KernelInfo {
    /// A compile-time choice; 0 for one that the kernel does not have.
    pub fn choice(&self, name: &str) -> u32 {
        let choice = self.choices.iter().find(|(n, _)| *n == name);
        choice.map_or(0, |(_, value)| *value)
    }
}

/// The arguments of one image's kernels.
///
/// # Safety
/// At each offset of `PARAMETERS` lies what the kernels' parameter at this index has for its bytes.
pub(crate) unsafe trait Arguments: Copy {
    /// Index into [`IMAGES`].
    const IMAGE: usize;
    /// Where each parameter begins.
    const PARAMETERS: &[usize];
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_distinct_and_launchable() {
        for image in &IMAGES {
            assert!(image.fatbin.0.len() > 1000, "{}", image.name);
            let mut names: Vec<_> = image.kernels.iter().map(|k| k.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), image.kernels.len(), "{}", image.name);
            for kernel in image.kernels {
                let threads: u32 = kernel.block.iter().product();
                assert!((32..=1024).contains(&threads), "{kernel:?}");
            }
        }
    }
}
