//! Writes each kernel whose name contains FILTER to DIR as CUDA C++, with `kernels.json`, which tells the Python programs in `dev/`
//! how to launch it: `cargo run -p unsloth-kernels --example dev -- DIR [FILTER]`.

use serde_json::{Map, Value, json};
use unsloth_kernels::{Error, catalog, emit};

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().unwrap_or_else(|| ".".into());
    let filter = arguments.next().unwrap_or_default();
    let mut list = Vec::new();
    for image in catalog::images()? {
        for kernel in image.kernels.iter().filter(|k| k.name.contains(&filter)) {
            write(
                &directory,
                &format!("{}.cu", kernel.name),
                &emit::translation_unit(std::slice::from_ref(kernel)),
            )?;
            let choices: Map<String, Value> = kernel
                .choices
                .iter()
                .map(|(name, value)| (name.to_string(), json!(value)))
                .collect();
            let scalars: Vec<_> = kernel
                .arguments
                .scalars
                .iter()
                .map(|s| json!([s.name, s.ty.rust(), s.offset]))
                .collect();
            list.push(json!({
                "name": kernel.name,
                "flags": image.flags,
                "choices": choices,
                "buffers": kernel.arguments.buffers,
                "scalars": scalars,
                "scalars_size": kernel.arguments.scalars_size,
                "threads": kernel.block[0],
                "shared_bytes": kernel.shared_bytes,
            }));
        }
    }
    write(&directory, "kernels.json", &json!(list).to_string())
}

fn write(directory: &str, file: &str, text: &str) -> Result<(), Error> {
    let path = std::path::Path::new(directory).join(file);
    std::fs::write(&path, text).map_err(|source| Error::File { path, source })
}
