//! The CUDA kernels, and what turns them into the images that the library embeds. Used at build time only.
//!
//! | room | what it is for |
//! |-|-|
//! | `norm`, .. | the `#[cube]` kernels, one file per operation, and which of their forms are instantiated |
//! | [`catalog`] | makes images of them: one per operation, each with its kernels |
//! | [`emit`] | expands kernels to CUDA C++, and tells how they are launched |
//! | [`family`] | the kernels in CUDA C++ (`cuda/`), and what their images say of themselves |
//! | [`cubin`] | reads machine code |
//! | [`nvcc`] | finds the compiler, compiles what changed, reads its resource report |
//! | [`table`] | writes the Rust table of images that the library includes |
//!
//! [`build`] does it all.

mod accumulate;
mod argmax;
mod attention;
mod attention_merge;
mod cast;
pub mod catalog;
mod column_sums;
mod cross_entropy;
pub mod cubin;
mod e4m3;
mod embedding;
pub mod emit;
pub mod family;
mod kv_cache;
mod linear;
mod logprob;
mod math;
mod norm;
pub mod nvcc;
mod optimizer;
mod qk_norm_rope;
mod rope;
mod rotation;
mod rows;
mod swiglu;
pub mod table;
mod weight_repack;

use std::env;
use std::path::{Path, PathBuf};

use emit::Kernel;
use family::FAMILIES;

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
    ("accumulate", accumulate::kernels, &[]),
    ("argmax", argmax::kernels, &[]),
    ("attention", attention::kernels, FLUSH_SUBNORMALS),
    (
        "attention_backward",
        attention::backward::kernels,
        FLUSH_SUBNORMALS,
    ),
    (
        "attention_backward_any",
        attention::backward::any_kernels,
        FLUSH_SUBNORMALS,
    ),
    (
        "attention_backward_bias",
        attention::backward::bias_kernels,
        FLUSH_SUBNORMALS,
    ),
    (
        "attention_backward_rows",
        attention::backward::row_kernels,
        &[],
    ),
    ("attention_combine", attention::combine_kernels, &[]),
    ("attention_e4m3", attention::e4m3_kernels, FLUSH_SUBNORMALS),
    ("attention_merge", attention_merge::kernels, &[]),
    ("cast", cast::kernels, &[]),
    ("column_sums", column_sums::kernels, &[]),
    ("cross_entropy", cross_entropy::kernels, &[]),
    ("cross_entropy_part", cross_entropy::part_kernels, &[]),
    ("cross_entropy_sums", cross_entropy::sum_kernels, &[]),
    ("cross_entropy_whole", cross_entropy::whole_kernels, &[]),
    ("embedding", embedding::kernels, &[]),
    ("embedding_backward", embedding::backward::kernels, &[]),
    ("kv_append", kv_cache::kernels, &[]),
    ("kv_append_e4m3", kv_cache::e4m3_kernels, &[]),
    ("linear", linear::kernels, &[]),
    ("linear_backward", linear::backward::kernels, &[]),
    ("logprob", logprob::kernels, &[]),
    ("norm", norm::kernels, &[]),
    ("norm_backward", norm::backward::kernels, &[]),
    ("optimizer", optimizer::kernels, &[]),
    ("qk_norm_rope", qk_norm_rope::kernels, &[]),
    (
        "qk_norm_rope_backward",
        qk_norm_rope::backward::kernels,
        &[],
    ),
    ("rope", rope::kernels, &[]),
    ("swiglu", swiglu::kernels, &[]),
    ("swiglu_backward", swiglu::backward::kernels, &[]),
    ("weight_repack", weight_repack::kernels, &[]),
];

/// What goes wrong while images are made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// CubeCL refuses a kernel.
    #[error("kernel {kernel} does not expand: {reason}")]
    Expand {
        /// The kernel's name.
        kernel: String,
        /// CubeCL's words.
        reason: String,
    },
    /// There is no CUDA compiler.
    #[error(
        "nvcc was not found in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda. Without a CUDA toolkit, pip gives one:\n  \
         pip install --target DIR {packages}\nthen set CUDA_HOME=DIR/nvidia/cu13",
        packages = nvcc::PIP_PACKAGES
    )]
    NoCompiler,
    /// `UNSLOTH_CUDA_ARCHS` names something that is no architecture.
    #[error("UNSLOTH_CUDA_ARCHS contains {0:?}; architectures are written as 80,86,89,90a,100,120")]
    Architecture(String),
    /// The compiler, or a tool beside it, fails.
    #[error("{command} failed:\n{output}")]
    Tool {
        /// What was run.
        command: String,
        /// What it said.
        output: String,
    },
    /// An image is not what its sources promise.
    #[error("image {image}: {reason}")]
    Exports {
        /// The image's name.
        image: String,
        /// What is wrong.
        reason: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
}

/// Compiles every image of the catalog for the architectures of `UNSLOTH_CUDA_ARCHS` into `out`: `kernels.rs`, which embeds the
/// images, and `kernels.json`, the resource report. What `cache` holds from earlier builds is not compiled again.
///
/// With `UNSLOTH_JITTER` in the environment, warps of the kernels in CUDA C++ wait for random times wherever they synchronise: a build
/// that finds what is right by luck of timing, and nothing to ship.
///
/// # Errors
/// See [`Error`].
pub fn build(out: &Path, cache: &Path) -> Result<Report, Error> {
    let archs = nvcc::architectures()?;
    let compiler = nvcc::Compiler::find()?;
    let delays = env::var_os("UNSLOTH_JITTER").is_some();
    let images = catalog::images()?;
    let mut units: Vec<_> = images.iter().flat_map(|i| i.units(&archs)).collect();
    let mut of_families = Vec::with_capacity(FAMILIES.len());
    let include = cache.join("include");
    family::write_headers(&include)?;
    for family in FAMILIES {
        let of_family = family.units(&archs, &include, delays)?;
        of_families.push(of_family.len());
        units.extend(of_family);
    }
    let compiled = compiler.compile(&units, cache)?;
    let mut table = table::Table::new(out, &compiler, &archs);
    let mut results = units.iter().zip(&compiled);
    for image in &images {
        let count = image.parts().len();
        table.image(image, results.by_ref().take(count))?;
    }
    for (family, count) in FAMILIES.iter().zip(of_families) {
        table.family(family, results.by_ref().take(count))?;
    }
    let launches = table.finish()?;
    let mut usage: Vec<_> = compiled.into_iter().flat_map(|c| c.usage).collect();
    for kernel in &mut usage {
        let arch = archs.iter().find(|arch| arch.name() == kernel.architecture);
        kernel.occupancy = launches
            .get(&kernel.kernel)
            .zip(arch)
            .and_then(|(launch, arch)| {
                let threads = launch.block.iter().product();
                nvcc::Occupancy::new(
                    arch,
                    threads,
                    kernel.registers,
                    kernel.static_shared_bytes,
                    launch.shared_bytes,
                )
            });
    }
    let path = out.join("kernels.json");
    let json = serde_json::to_vec_pretty(&usage).unwrap_or_default();
    write(&path, &json)?;
    Ok(Report {
        path,
        usage,
        architectures: archs.iter().map(nvcc::Architecture::name).collect(),
        delays,
    })
}

/// What the compiled kernels use.
#[derive(Debug)]
pub struct Report {
    /// The same as JSON.
    pub path: PathBuf,
    /// One entry per kernel and architecture.
    pub usage: Vec<nvcc::Usage>,
    /// What was compiled for, such as `90a`.
    pub architectures: Vec<String>,
    /// Whether kernels have random delays.
    pub delays: bool,
}

fn write(path: &Path, contents: &[u8]) -> Result<(), Error> {
    // An unchanged file keeps its time, so that what depends on it is not rebuilt.
    if std::fs::read(path).is_ok_and(|old| old == contents) {
        return Ok(());
    }
    std::fs::write(path, contents).map_err(|source| Error::File {
        path: path.into(),
        source,
    })
}
