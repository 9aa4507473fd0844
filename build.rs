//! Sets the soname and checks that `include/unsloth.h` is what cbindgen makes of `src/ffi`.

use std::path::Path;
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
    for source in sources {
        builder = builder.with_src(source);
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
    let path = root.join("include/unsloth.h");
    if fs::read(&path).is_ok_and(|committed| committed == fresh.as_bytes()) {
        return;
    }
    if env::var_os("UNSLOTH_UPDATE_HEADER").is_some() {
        fs::write(&path, fresh).expect("include/unsloth.h is writable");
    } else {
        println!("cargo:warning=include/unsloth.h is not current: run `make header`");
    }
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

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
