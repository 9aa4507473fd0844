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

/// A struct's fields and the expression of its zero value.
#[derive(Default)]
struct Fields {
    declared: String,
    zero: String,
}

impl Fields {
    fn push(&mut self, name: &str, ty: &str, zero: &str) {
        let _ = writeln!(self.declared, "        pub {name}: {ty},");
        let _ = writeln!(self.zero, "            {name}: {zero},");
    }
}

fn arguments(text: &mut String, index: usize, image: &str, arguments: &Arguments) {
    let mut fields = Fields::default();
    for buffer in &arguments.buffers {
        fields.push(buffer, "u64", "0");
    }
    // The gaps between groups of scalars become fields: the struct has no padding.
    let mut end = 0;
    let pad = |fields: &mut Fields, to: usize, end: &mut usize| {
        while *end < to {
            fields.push(&format!("reserved_{end}"), "u32", "0");
            *end += 4;
        }
    };
    for scalar in &arguments.scalars {
        pad(&mut fields, scalar.offset, &mut end);
        fields.push(scalar.name, scalar.ty.rust(), scalar.ty.zero());
        end += scalar.ty.size();
    }
    pad(&mut fields, arguments.scalars_size, &mut end);
    let mut parameters: Vec<usize> = (0..arguments.buffers.len()).map(|i| 8 * i).collect();
    let mut size = 8 * arguments.buffers.len();
    let array_size = arguments.by_value.map_or(0, |(_, len)| 4 * len);
    for bytes in [arguments.scalars_size, array_size] {
        if bytes > 0 {
            parameters.push(size);
            size += bytes;
        }
    }
    if let Some((name, len)) = arguments.by_value {
        fields.push(name, &format!("[f32; {len}]"), &format!("[0.0; {len}]"));
    }
    let Fields { declared, zero } = fields;
    let _ = writeln!(
        text,
        "\n/// The arguments of `{image}`.\n\
         pub mod {image} {{\n    \
             /// Pointers, then scalars as the kernels unpack them, then an array if there is one.\n    \
             #[derive(Clone, Copy, Debug)]\n    \
             #[repr(C)]\n    \
             pub struct Arguments {{\n{declared}    }}\n    \
             const _: () = assert!(size_of::<Arguments>() == {size});\n    \
             impl Arguments {{\n        \
                 /// All zero: what a caller leaves out, and gaps if there are any.\n        \
                 #[allow(dead_code)]\n        \
                 pub const ZERO: Arguments = Arguments {{\n{zero}        }};\n    \
             }}\n    \
             // SAFETY: laid out by what laid out the kernels' parameters.\n    \
             unsafe impl super::Arguments for Arguments {{\n        \
                 const IMAGE: usize = {index};\n        \
                 const PARAMETERS: &[usize] = &{parameters:?};\n    \
             }}\n\
         }}"
    );
}
