//! Sets the soname, and compiles the CUDA kernels.

use std::env;
#[cfg(feature = "cuda")]
use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=UNSLOTH_TARGET={}", var("TARGET"));
    if var("CARGO_CFG_TARGET_OS") == "linux" {
        // Before 1.0 a minor version may break the ABI, so the name carries it.
        println!(
            "cargo:rustc-cdylib-link-arg=-Wl,-soname,libunsloth.so.{}.{}",
            var("CARGO_PKG_VERSION_MAJOR"),
            var("CARGO_PKG_VERSION_MINOR")
        );
    }
    kernels();
}

#[cfg(not(feature = "cuda"))]
fn kernels() {
    println!("cargo:rustc-env=UNSLOTH_BACKENDS=cpu");
    println!("cargo:rustc-env=UNSLOTH_CUDA_ARCHITECTURES=none");
}

/// Compiles the CUDA kernels and writes the table of images that `src/cuda/images.rs` includes.
#[cfg(feature = "cuda")]
fn kernels() {
    for variable in [
        "CUDA_HOME",
        "CUDA_PATH",
        "UNSLOTH_CUDA_ARCHS",
        "UNSLOTH_JITTER",
    ] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    println!(
        "cargo:rerun-if-changed={}",
        unsloth_kernels::family::SOURCES
    );
    let out = var("OUT_DIR");
    let out = Path::new(&out);
    // Compiled kernels depend on nothing that a profile changes, so all profiles share them: they are kept beside the profiles'
    // folders, which is where Cargo puts its cache tag.
    let target = out.ancestors().find(|p| p.join("CACHEDIR.TAG").is_file());
    let report = match unsloth_kernels::build(out, &target.unwrap_or(out).join("cuda-kernels")) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    };
    for usage in &report.usage {
        if usage.stack_bytes > 0 || !usage.warnings.is_empty() {
            println!(
                "cargo:warning={} for sm_{}: {} bytes of stack frame; {}",
                usage.kernel,
                usage.architecture,
                usage.stack_bytes,
                usage.warnings.join("; ")
            );
        }
    }
    println!("cargo:rustc-env=UNSLOTH_BACKENDS=cpu, cuda");
    println!(
        "cargo:rustc-env=UNSLOTH_CUDA_ARCHITECTURES={}{}",
        report.architectures.join(" "),
        // So that nobody takes such a library for one to ship.
        if report.delays {
            " with random delays"
        } else {
            ""
        }
    );
    println!(
        "cargo:rustc-env=UNSLOTH_KERNEL_REPORT={}",
        report.path.display()
    );
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
