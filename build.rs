//! Sets the soname, checks that `include/unsloth.h` is what cbindgen makes of `src/ffi`, and lists the header's structs for
//! `tests/header.rs`.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=src/ffi");
    println!("cargo:rerun-if-changed=cbindgen.toml");
    println!("cargo:rerun-if-changed=include/unsloth.h");
    println!("cargo:rerun-if-env-changed=UNSLOTH_UPDATE_HEADER");
    println!("cargo:rustc-env=UNSLOTH_TARGET={}", var("TARGET"));
    if var("CARGO_CFG_TARGET_OS") == "linux" {
        // The number changes only with an incompatible ABI.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libunsloth.so.0");
    }
    header();
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
    for variable in ["CUDA_HOME", "CUDA_PATH", "UNSLOTH_CUDA_ARCHS"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    println!(
        "cargo:rerun-if-changed={}",
        unsloth_kernels::hopper::SOURCES
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
        "cargo:rustc-env=UNSLOTH_CUDA_ARCHITECTURES={}",
        report.architectures.join(" ")
    );
    println!(
        "cargo:rustc-env=UNSLOTH_KERNEL_REPORT={}",
        report.path.display()
    );
}

/// Compares the committed header with a fresh one; with `UNSLOTH_UPDATE_HEADER` set, writes it (`make header`).
fn header() {
    let root = var("CARGO_MANIFEST_DIR");
    let root = Path::new(&root);
    let config = match cbindgen::Config::from_file(root.join("cbindgen.toml")) {
        Ok(config) => config,
        Err(error) => panic!("cbindgen.toml: {error}"),
    };
    // In the order of the library's sections; every file of src/ffi is one.
    let mut sources: Vec<_> = match fs::read_dir(root.join("src/ffi")) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(error) => panic!("src/ffi: {error}"),
    };
    sources.sort_by_key(|path| (section(path), path.clone()));
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in &sources {
        builder = if source.ends_with("mod.rs") {
            // Elsewhere, so that its `mod` items lead nowhere: they would be followed, and every section would come twice.
            let alone = PathBuf::from(var("OUT_DIR")).join("mod.rs");
            write(&alone, &fs::read_to_string(source).unwrap_or_default());
            builder.with_src(alone)
        } else {
            builder.with_src(source)
        };
    }
    let bindings = match builder.generate() {
        Ok(bindings) => bindings,
        Err(error) => {
            // A syntax error in the crate is better told by the compiler.
            println!("cargo:warning=the header was not checked: {error}");
            return;
        }
    };
    let mut fresh = Vec::new();
    bindings.write(&mut fresh);
    let fresh = String::from_utf8_lossy(&fresh).replace("# Safety\n * ", "Requires: ");
    let out = PathBuf::from(var("OUT_DIR"));
    write(&out.join("unsloth.h"), &fresh);
    write(&out.join("structs.rs"), &structs(&fresh, &sources));
    let path = root.join("include/unsloth.h");
    if fs::read(&path).is_ok_and(|committed| committed == fresh.as_bytes()) {
        return;
    }
    if env::var_os("UNSLOTH_UPDATE_HEADER").is_some() {
        write(&path, &fresh);
    } else {
        println!("cargo:warning=include/unsloth.h is not current: run `make header`");
    }
}

/// Rust that lists every struct of the header with its size, its alignment and its fields, for `tests/header.rs` to include: the
/// header names them, the compiler measures them.
fn structs(header: &str, sources: &[PathBuf]) -> String {
    let mut rust = String::new();
    for source in sources {
        let text = fs::read_to_string(source).unwrap_or_default();
        if text.contains("\npub struct unsloth_")
            && let Some(section) = source.file_stem().and_then(|stem| stem.to_str())
        {
            let _ = writeln!(rust, "use unsloth::ffi::{section}::*;");
        }
    }
    let _ = writeln!(rust, "const STRUCTS: &[Struct] = &[");
    let mut name = None;
    for line in header.lines() {
        if let Some(begun) = line.strip_prefix("typedef struct ") {
            name = begun.strip_suffix(" {");
            if let Some(name) = name {
                let _ = writeln!(rust, "    structure!({name}");
            }
        } else if let Some(ended) = name
            && line == format!("}} {ended};")
        {
            let _ = writeln!(rust, "    ),");
            name = None;
        } else if name.is_some()
            && let Some(declaration) = line.strip_suffix(';')
        {
            // `int64_t shape[UNSLOTH_MAX_RANK]`, `void *data`
            let declared = declaration.split('[').next().unwrap_or_default();
            let field = declared.rsplit([' ', '*']).next().unwrap_or_default();
            let _ = writeln!(rust, "        , {field}");
        }
    }
    let _ = writeln!(rust, "];");
    rust
}

/// The rank of a header section: what others build upon comes first.
fn section(path: &Path) -> usize {
    const FIRST: [&str; 5] = ["mod", "status", "context", "memory", "tensor"];
    let stem = path
        .file_stem()
        .and_then(|stem| stem.to_str())
        .unwrap_or_default();
    FIRST
        .iter()
        .position(|first| *first == stem)
        .unwrap_or(FIRST.len())
}

fn write(path: &Path, text: &str) {
    if let Err(error) = fs::write(path, text) {
        panic!("{}: {error}", path.display());
    }
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
