//! Writes the CUDA C++ of every image, or of those whose names are given, to `DIR/IMAGE.cu`:
//! `cargo run -p unsloth-kernels --example emit DIR [IMAGE..]`. Equal text is equal machine code.

use std::path::Path;

use unsloth_kernels::{Error, catalog, emit};

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().unwrap_or_else(|| ".".into());
    let wanted: Vec<String> = arguments.collect();
    for name in catalog::names() {
        if !wanted.is_empty() && !wanted.iter().any(|other| other == name) {
            continue;
        }
        if let Some(image) = catalog::image(name)? {
            let path = Path::new(&directory).join(format!("{name}.cu"));
            let text = emit::translation_unit(&image.kernels);
            std::fs::write(&path, text).map_err(|source| Error::File { path, source })?;
            println!("{name}: {} kernels", image.kernels.len());
        }
    }
    Ok(())
}
