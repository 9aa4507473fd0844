//! Writes the headers that kernels in CUDA C++ include to DIR: `cargo run -p unsloth-kernels --example headers DIR`.

use std::path::Path;

use unsloth_kernels::{Error, family};

fn main() -> Result<(), Error> {
    let directory = std::env::args().nth(1).unwrap_or_else(|| ".".into());
    family::write_headers(Path::new(&directory))
}
