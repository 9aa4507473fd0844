//! The kernels that the build compiled: images for the driver to load, and how to launch what is in them.

use std::ffi::CStr;
use std::fmt;
use std::ops::Range;

/// One operation's kernels, for every architecture of the build.
pub(crate) struct Image {
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

/// A `CUtensorMap`, which kernels take by value.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMap(pub [u64; 16]);

impl TensorMap {
    /// What no kernel uses.
    pub const ZERO: TensorMap = TensorMap([0; 16]);
}

/// A kernel and how it is launched.
#[derive(Debug)]
pub(crate) struct KernelInfo {
    /// Its symbol.
    pub name: &'static CStr,
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
}

/// The arguments of the kernels of one or several images.
///
/// # Safety
/// At each offset of `PARAMETERS` lies what the kernels' parameter at this index has for its bytes.
pub(crate) unsafe trait Arguments: Copy {
    /// The compile-time choices that tell the kernels apart.
    type Choices: Copy + fmt::Debug + 'static;
    /// Indices into [`IMAGES`].
    const IMAGES: Range<usize>;
    /// Of every kernel of these images, in their order.
    const CHOICES: &'static [Self::Choices];
    /// Where each parameter begins.
    const PARAMETERS: &[usize];
}

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Whether the images run on a device of this compute capability.
pub(crate) fn fit(capability: (u32, u32)) -> bool {
    runs_on(MACHINE_CODE, PTX, capability)
}

/// Whether what runs of the images on such a device waits for the kernel before it: text for 9.0 and
/// later does.
pub(crate) fn wait(capability: (u32, u32)) -> bool {
    waits_on(MACHINE_CODE, PTX, capability)
}

fn waits_on(machine_code: &[(u32, u32, bool)], ptx: (u32, u32), capability: (u32, u32)) -> bool {
    const FIRST: (u32, u32) = (9, 0);
    // The driver takes machine code, which is of the device's major version, before PTX. A PTX that is
    // too new for the device leaves machine code alone.
    capability >= FIRST && (ptx >= FIRST || runs_on(machine_code, (u32::MAX, 0), capability))
}

fn runs_on(machine_code: &[(u32, u32, bool)], ptx: (u32, u32), (major, minor): (u32, u32)) -> bool {
    let mut code = machine_code.iter();
    let native = code.any(|&(of_major, of_minor, exact)| {
        of_major == major && (of_minor == minor || (of_minor < minor && !exact))
    });
    native || (major, minor) >= ptx
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_fit_or_do_not() {
        let all = &[
            (8, 0, false),
            (8, 6, false),
            (8, 9, false),
            (9, 0, true),
            (10, 0, false),
            (12, 0, false),
        ];
        let runs = [
            (8, 0),
            (8, 6),
            (8, 7),
            (8, 9),
            (9, 0),
            (10, 0),
            (10, 3),
            (12, 0),
            (12, 1),
            (13, 0),
        ];
        for capability in runs {
            assert!(runs_on(all, (12, 0), capability), "{capability:?}");
        }
        for capability in [(7, 5), (11, 0)] {
            assert!(!runs_on(all, (12, 0), capability), "{capability:?}");
        }
        // Code for 9.0a runs on Hopper alone; PTX runs on later devices too.
        assert!(!runs_on(&[(9, 0, true)], (9, 0), (8, 9)));
        assert!(runs_on(&[(9, 0, true)], (9, 0), (10, 0)));
        assert!(!runs_on(&[(9, 0, true)], (12, 0), (9, 1)));
        // Code for 8.x does not wait, be it compiled on the device or not.
        for (code, ptx, capability, waits) in [
            (&[(9, 0, true)][..], (9, 0), (9, 0), true),
            (&[(8, 0, false)], (8, 0), (9, 0), false),
            (&[(8, 0, false)], (9, 0), (8, 0), false),
            (&[(8, 0, false)], (9, 0), (9, 0), true),
            (&[(8, 0, false), (9, 0, true)], (8, 0), (9, 0), true),
            (&[(8, 0, false), (9, 0, true)], (8, 0), (10, 0), false),
            (&[(9, 0, true)], (12, 0), (9, 0), true),
            (&[(9, 0, true)], (12, 0), (12, 0), true),
        ] {
            assert_eq!(
                waits_on(code, ptx, capability),
                waits,
                "{code:?} {ptx:?} {capability:?}"
            );
        }
        // The devices that this build has kernels for.
        for &(major, minor, _) in MACHINE_CODE {
            assert!(fit((major, minor)));
            assert!(CAPABILITIES.contains(&format!("{major}.{minor}")));
        }
        assert!(!fit((5, 2)));
    }

    #[test]
    fn kernels_are_distinct_and_launchable() {
        for (index, image) in IMAGES.iter().enumerate() {
            assert!(image.fatbin.0.len() > 1000, "image {index}");
            let mut names: Vec<_> = image.kernels.iter().map(|k| k.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), image.kernels.len(), "image {index}");
            for kernel in image.kernels {
                let threads: u32 = kernel.block.iter().product();
                assert!((32..=1024).contains(&threads), "{kernel:?}");
            }
        }
    }
}
