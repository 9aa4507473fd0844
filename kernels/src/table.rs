//! Writes `kernels.rs`: the images, how their kernels are launched, and the structs of their arguments.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use crate::Error;
use crate::catalog::Image;
use crate::emit::{Arguments, Kernel};
use crate::nvcc::{Architecture, Compiled, Compiler};

/// Writes `kernels.rs` to `out`, and the images beside it.
///
/// # Errors
/// A file cannot be written, or kernels of one image differ in their arguments.
pub fn write(
    out: &Path,
    compiler: &Compiler,
    archs: &[Architecture],
    images: &[Image],
    compiled: &[Compiled],
) -> Result<(), Error> {
    let capabilities: Vec<_> = archs.iter().map(Architecture::capability).collect();
    let mut text = String::from("// Generated from the kernels' own layout.\n\n");
    let _ = writeln!(
        text,
        "/// The CUDA version whose compiler made the images: drivers need its major version at least.\n\
         pub const TOOLKIT: (u32, u32) = {:?};\n\
         /// The compute capabilities that there is machine code for.\n\
         pub const CAPABILITIES: &str = {:?};\n\
         /// Every image.\n\
         pub static IMAGES: [Image; {}] = [",
        compiler.version,
        capabilities.join(", "),
        images.len()
    );
    for (image, compiled) in images.iter().zip(compiled) {
        let file = format!("{}.fatbin", image.name);
        let bytes = fs::read(&compiled.fatbin).map_err(|source| Error::File {
            path: compiled.fatbin.clone(),
            source,
        })?;
        crate::write(&out.join(&file), &bytes)?;
        let _ = writeln!(
            text,
            "    Image {{\n        name: {:?},\n        \
             fatbin: &Aligned(*include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{file}\"))),\n        kernels: &[",
            image.name
        );
        for kernel in &image.kernels {
            let _ = writeln!(text, "            {},", describe(kernel));
        }
        text.push_str("        ],\n    },\n");
    }
    text.push_str("];\n");
    for (index, image) in images.iter().enumerate() {
        let Some(first) = image.kernels.first() else {
            continue;
        };
        if let Some(odd) = image
            .kernels
            .iter()
            .find(|kernel| kernel.arguments != first.arguments)
        {
            return Err(Error::Expand {
                kernel: odd.name.clone(),
                reason: format!("its arguments differ from those of {}", first.name),
            });
        }
        arguments(&mut text, index, image.name, &first.arguments);
    }
    crate::write(&out.join("kernels.rs"), text.as_bytes())
}

fn describe(kernel: &Kernel) -> String {
    format!(
        "KernelInfo {{ name: c{:?}, choices: &{:?}, block: {:?}, shared_bytes: {} }}",
        kernel.name, kernel.choices, kernel.block, kernel.shared_bytes
    )
}

fn arguments(text: &mut String, index: usize, image: &str, arguments: &Arguments) {
    let mut fields = String::new();
    for buffer in &arguments.buffers {
        let _ = writeln!(fields, "        pub {buffer}: u64,");
    }
    // The gaps between groups of scalars become fields: the struct has no padding.
    let mut end = 0;
    let pad = |fields: &mut String, to: usize, end: &mut usize| {
        while *end < to {
            let _ = writeln!(fields, "        pub reserved_{end}: u32,");
            *end += 4;
        }
    };
    for scalar in &arguments.scalars {
        pad(&mut fields, scalar.offset, &mut end);
        let _ = writeln!(fields, "        pub {}: {},", scalar.name, scalar.ty.rust());
        end += scalar.ty.size();
    }
    pad(&mut fields, arguments.scalars_size, &mut end);
    let size = 8 * arguments.buffers.len() + arguments.scalars_size;
    let _ = writeln!(
        text,
        "\n/// The arguments of `{image}`.\n\
         pub mod {image} {{\n    \
             /// Pointers, then scalars as the kernels unpack them.\n    \
             #[derive(Clone, Copy, Debug, Default)]\n    \
             #[repr(C)]\n    \
             pub struct Arguments {{\n{fields}    }}\n    \
             const _: () = assert!(size_of::<Arguments>() == {size});\n    \
             // SAFETY: {} pointers, then the struct of scalars, laid out by what laid out the kernels' parameters.\n    \
             unsafe impl super::Arguments for Arguments {{\n        \
                 const IMAGE: usize = {index};\n        \
                 const NUM_BUFFERS: usize = {};\n    \
             }}\n\
         }}",
        arguments.buffers.len(),
        arguments.buffers.len(),
    );
}
