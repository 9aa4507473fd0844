//! Writes `kernels.rs`: the images, how their kernels are launched, and the structs of their arguments.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use crate::Error;
use crate::catalog::Image;
use crate::emit::{Arguments, Choice, Kernel};
use crate::hopper::Exports;
use crate::nvcc::{Architecture, Compiled, Compiler, Unit};

/// The text of `kernels.rs` as it grows; the images are written beside it.
pub struct Table<'a> {
    out: &'a Path,
    header: String,
    images: String,
    num_images: usize,
    arguments: String,
    /// Of the Hopper kernels' argument; the same for all.
    layout: Vec<u32>,
    first_hopper: Option<usize>,
    /// Of the Hopper kernels, one after the other.
    hopper_choices: Vec<Vec<Choice>>,
}

impl<'a> Table<'a> {
    /// A table without images.
    pub fn new(out: &'a Path, compiler: &Compiler, archs: &[Architecture]) -> Table<'a> {
        let capabilities: Vec<_> = archs.iter().map(Architecture::capability).collect();
        // Code for one architecture's own instructions runs on no other; else on later minor versions of its major one too.
        let machine_code: Vec<_> = archs
            .iter()
            .map(|arch| (arch.number / 10, arch.number % 10, arch.suffix == "a"))
            .collect();
        let ptx = archs.last().map_or(0, |arch| arch.number);
        let header = format!(
            "// Generated from the kernels' own layout.\n\n\
             /// The CUDA version whose compiler made the images: drivers need its major version at least.\n\
             pub const TOOLKIT: (u32, u32) = {:?};\n\
             /// The compute capabilities that there is machine code for.\n\
             pub const CAPABILITIES: &str = {:?};\n\
             /// The same as major, minor, and whether that device alone runs it.\n\
             pub const MACHINE_CODE: &[(u32, u32, bool)] = &{machine_code:?};\n\
             /// The compute capability from which the driver can compile PTX.\n\
             pub const PTX: (u32, u32) = {:?};\n",
            compiler.version,
            capabilities.join(", "),
            (ptx / 10, ptx % 10)
        );
        Table {
            out,
            header,
            images: String::new(),
            num_images: 0,
            arguments: String::new(),
            layout: Vec::new(),
            first_hopper: None,
            hopper_choices: Vec::new(),
        }
    }

    /// Adds an image for every architecture.
    ///
    /// # Errors
    /// A file cannot be written, or its kernels differ in their arguments.
    pub fn image(&mut self, image: &Image, compiled: &Compiled) -> Result<(), Error> {
        if let Some(first) = image.kernels.first() {
            let differs = |kernel: &&Kernel| kernel.arguments != first.arguments;
            if let Some(odd) = image.kernels.iter().find(differs) {
                return Err(Error::Expand {
                    kernel: odd.name.clone(),
                    reason: format!("its arguments differ from those of {}", first.name),
                });
            }
            let all: Vec<_> = image.kernels.iter().map(|k| k.choices.clone()).collect();
            let choices = choices(image.name, &all)?;
            arguments(
                &mut self.arguments,
                self.num_images,
                image.name,
                &first.arguments,
                &choices,
            );
        }
        let kernels = image.kernels.iter();
        let infos = kernels.map(|k| describe(&k.name, k.block, k.shared_bytes));
        self.add(image.name, compiled, "None", infos)
    }

    /// Adds an image of Hopper kernels.
    ///
    /// # Errors
    /// A file cannot be written, or their argument is laid out otherwise than before.
    pub fn hopper_image(
        &mut self,
        unit: &Unit,
        compiled: &Compiled,
        exports: &Exports,
    ) -> Result<(), Error> {
        if self.first_hopper.is_none() {
            self.first_hopper = Some(self.num_images);
            self.layout.clone_from(&exports.layout);
        }
        if self.layout != exports.layout {
            return Err(Error::Exports {
                image: unit.name.clone(),
                reason: "its layout differs from that of the others".into(),
            });
        }
        let kernels = exports.kernels.iter();
        self.hopper_choices
            .extend(kernels.clone().map(|k| k.choices.clone()));
        let infos = kernels.map(|k| describe(&k.name, [k.threads, 1, 1], k.shared_bytes as usize));
        self.add(&unit.name, compiled, "Some((9, 0))", infos)
    }

    fn add(
        &mut self,
        name: &str,
        compiled: &Compiled,
        capability: &str,
        kernels: impl Iterator<Item = String>,
    ) -> Result<(), Error> {
        let file = format!("{name}.fatbin");
        let bytes = fs::read(&compiled.fatbin).map_err(|source| Error::File {
            path: compiled.fatbin.clone(),
            source,
        })?;
        crate::write(&self.out.join(&file), &bytes)?;
        let _ = writeln!(
            self.images,
            "    Image {{\n        capability: {capability},\n        \
             fatbin: &Aligned(*include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{file}\"))),\n        kernels: &["
        );
        for kernel in kernels {
            let _ = writeln!(self.images, "            {kernel},");
        }
        self.images.push_str("        ],\n    },\n");
        self.num_images += 1;
        Ok(())
    }

    /// Writes `kernels.rs`.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn finish(self) -> Result<(), Error> {
        let first = self.first_hopper.unwrap_or(self.num_images);
        // Without images there is nothing to tell apart, but the names have to be there.
        let names = crate::hopper::CHOICES.map(|name| (name, 0)).to_vec();
        let choices = match self.hopper_choices.as_slice() {
            [] => choices("attention_forward", &[names])?.without_values(),
            all => choices("attention_forward", all)?,
        };
        let text = format!(
            "{}/// Every image.\npub static IMAGES: [Image; {count}] = [\n{}];\n{}\n\
             /// The Hopper attention kernels, if there are any.\n\
             pub mod attention_forward {{\n    \
                 /// Where their images are in [`IMAGES`](super::IMAGES).\n    \
                 pub const IMAGES: std::ops::Range<usize> = {first}..{count};\n    \
                 /// The size of their argument, then the offset of each field.\n    \
                 pub const LAYOUT: &[u32] = &{:?};\n\
                 {}\
             }}\n",
            self.header,
            self.images,
            self.arguments,
            self.layout,
            choices.declared,
            count = self.num_images,
        );
        crate::write(&self.out.join("kernels.rs"), text.as_bytes())
    }
}

fn describe(name: &str, block: [u32; 3], shared_bytes: usize) -> String {
    format!("KernelInfo {{ name: c{name:?}, block: {block:?}, shared_bytes: {shared_bytes} }}")
}

/// Rust that declares what tells an image's kernels apart.
struct Choices {
    declared: String,
}

impl Choices {
    /// The names alone.
    fn without_values(self) -> Choices {
        let names = self.declared.split("    /// Of every kernel").next();
        let declared =
            names.unwrap_or_default().to_string() + "    pub const CHOICES: &[Choices] = &[];\n";
        Choices { declared }
    }
}

/// A struct of the choices' names, and its value for every kernel.
fn choices(image: &str, kernels: &[Vec<Choice>]) -> Result<Choices, Error> {
    let names = |choices: &[Choice]| choices.iter().map(|(name, _)| *name).collect::<Vec<_>>();
    let first = kernels
        .first()
        .map(|choices| names(choices))
        .unwrap_or_default();
    if let Some(odd) = kernels.iter().find(|choices| names(choices) != first) {
        return Err(Error::Exports {
            image: image.into(),
            reason: format!("choices {odd:?} have other names than {first:?}"),
        });
    }
    let mut declared = String::from(
        "    /// What tells kernels apart.\n    #[derive(Clone, Copy, Debug, PartialEq, Eq)]\n    \
         #[allow(dead_code)]\n    pub struct Choices {\n",
    );
    for name in &first {
        let _ = writeln!(declared, "        pub {name}: u32,");
    }
    declared.push_str(
        "    }\n    /// Of every kernel of the images, in their order.\n    \
         pub const CHOICES: &[Choices] = &[\n",
    );
    for choices in kernels {
        let values = choices
            .iter()
            .map(|(name, value)| format!("{name}: {value}"));
        let values = values.collect::<Vec<_>>().join(", ");
        let _ = writeln!(declared, "        Choices {{ {values} }},");
    }
    declared.push_str("    ];\n");
    Ok(Choices { declared })
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

fn arguments(
    text: &mut String,
    index: usize,
    image: &str,
    arguments: &Arguments,
    choices: &Choices,
) {
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
    let (choices, end) = (&choices.declared, index + 1);
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
                 type Choices = Choices;\n        \
                 const IMAGES: std::ops::Range<usize> = {index}..{end};\n        \
                 const CHOICES: &[Choices] = CHOICES;\n        \
                 const PARAMETERS: &[usize] = &{parameters:?};\n    \
             }}\n\
             {choices}\
         }}"
    );
}
