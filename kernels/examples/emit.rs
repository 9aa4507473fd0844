//! Prints the CUDA C++ of every image whose name is given, or the names of all: `cargo run -p unsloth-kernels --example emit rms_norm`.

fn main() -> Result<(), unsloth_kernels::Error> {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    for image in unsloth_kernels::catalog::images()? {
        if wanted.is_empty() {
            println!("{}: {} kernels", image.name, image.kernels.len());
        } else if wanted.iter().any(|name| name == image.name) {
            print!(
                "{}",
                unsloth_kernels::emit::translation_unit(&image.kernels)
            );
        }
    }
    Ok(())
}
