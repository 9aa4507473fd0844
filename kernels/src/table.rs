//! Writes `kernels.rs`: the images, how their kernels are launched, and the structs of their arguments.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::ops::Range;
use std::path::Path;

use crate::Error;
use crate::catalog::Image;
use crate::emit::{Arguments, Choice, Kernel};
use crate::family::Family;
use crate::nvcc::{Architecture, Compiled, Compiler, Unit};

/// The text of `kernels.rs` as it grows; the images are written beside it.
pub struct Table<'a> {
    out: &'a Path,
    header: String,
    images: String,
    num_images: usize,
    arguments: String,
    launches: HashMap<String, Launch>,
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
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
            launches: HashMap::new(),
        }
    }

    /// Adds the parts of an image, each for every architecture.
    ///
    /// # Errors
    /// A file cannot be written, or its kernels differ in their arguments.
    pub fn image<'b>(
        &mut self,
        image: &Image,
        parts: impl Iterator<Item = (&'b Unit, &'b Compiled)>,
    ) -> Result<(), Error> {
        let first_part = self.num_images;
        for (kernels, (unit, compiled)) in image.parts().into_iter().zip(parts) {
            let kernels = kernels.iter();
            let launches = kernels.map(|k| {
                let launch = Launch {
                    block: k.block,
                    shared_bytes: k.shared_bytes as u32,
                };
                (k.name.clone(), launch)
            });
            self.add(&unit.name, compiled, "None", launches)?;
        }
        let Some(first) = image.kernels.first() else {
            return Ok(());
        };
        let differs = |kernel: &&Kernel| kernel.arguments != first.arguments;
        if let Some(odd) = image.kernels.iter().find(differs) {
            return Err(Error::Expand {
                kernel: odd.name.clone(),
                reason: format!("its arguments differ from those of {}", first.name),
            });
        }
        let all: Vec<_> = image.kernels.iter().map(|k| k.choices.clone()).collect();
        let names: Vec<_> = first.choices.iter().map(|(name, _)| *name).collect();
        let choices = choices(image.name, &names, &all)?;
        let parts = first_part..self.num_images;
        let module = self::module(&arguments(parts, image.name, &first.arguments, choices));
        self.arguments.push_str(&module);
        Ok(())
    }

    /// Adds a family with its images, if it has any here.
    ///
    /// # Errors
    /// A file cannot be written, or an image is not what the family promises.
    pub fn family<'b>(
        &mut self,
        family: &Family,
        images: impl Iterator<Item = (&'b Unit, &'b Compiled)>,
    ) -> Result<(), Error> {
        let first = self.num_images;
        let capability = match family.architecture {
            Some((number, _)) => format!("Some(({}, {}))", number / 10, number % 10),
            None => "None".into(),
        };
        let mut all = Vec::new();
        for (unit, compiled) in images {
            let kernels = family.exports(&unit.name, compiled)?;
            all.extend(kernels.iter().map(|kernel| kernel.choices.clone()));
            let launches = kernels.into_iter().map(|k| {
                let launch = Launch {
                    block: [k.threads, 1, 1],
                    shared_bytes: k.shared_bytes,
                };
                (k.name, launch)
            });
            self.add(&unit.name, compiled, &capability, launches)?;
        }
        let names: Vec<_> = family.choices.iter().map(|(name, _)| *name).collect();
        let mut fields = Fields::default();
        let (offsets, size) = family.layout();
        let mut asserts = format!("    const _: () = assert!(size_of::<Arguments>() == {size});\n");
        for (field, offset) in family.arguments.iter().zip(offsets) {
            let (ty, zero) = field.ty.rust();
            fields.push(field.name, &ty, &zero);
            let name = field.name;
            let assert = format!("std::mem::offset_of!(Arguments, {name}) == {offset}");
            let _ = writeln!(asserts, "    const _: () = assert!({assert});");
        }
        self.arguments.push_str(&module(&Module {
            name: family.name,
            images: first..self.num_images,
            fields,
            asserts,
            parameters: vec![0],
            choices: choices(family.name, &names, &all)?,
        }));
        Ok(())
    }

    fn add(
        &mut self,
        name: &str,
        compiled: &Compiled,
        capability: &str,
        kernels: impl Iterator<Item = (String, Launch)>,
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
        for (name, launch) in kernels {
            let Launch {
                block,
                shared_bytes,
            } = launch;
            let _ = writeln!(
                self.images,
                "            KernelInfo {{ name: c{name:?}, block: {block:?}, shared_bytes: {shared_bytes} }},"
            );
            self.launches.insert(name, launch);
        }
        self.images.push_str("        ],\n    },\n");
        self.num_images += 1;
        Ok(())
    }

    /// Writes `kernels.rs`, and gives how each kernel is launched.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn finish(self) -> Result<HashMap<String, Launch>, Error> {
        let text = format!(
            "{}/// Every image.\npub static IMAGES: [Image; {}] = [\n{}];\n{}",
            self.header, self.num_images, self.images, self.arguments,
        );
        crate::write(&self.out.join("kernels.rs"), text.as_bytes())?;
        Ok(self.launches)
    }
}

/// Rust that declares what tells kernels apart: a struct of the choices' names, and its value for every kernel.
fn choices(image: &str, names: &[&str], kernels: &[Vec<Choice>]) -> Result<String, Error> {
    let has_names = |choices: &[Choice]| {
        choices
            .iter()
            .map(|(name, _)| *name)
            .eq(names.iter().copied())
    };
    if let Some(odd) = kernels.iter().find(|choices| !has_names(choices)) {
        return Err(Error::Exports {
            image: image.into(),
            reason: format!("choices {odd:?} have other names than {names:?}"),
        });
    }
    let mut declared = String::from(
        "    /// What tells kernels apart.\n    #[derive(Clone, Copy, Debug, PartialEq, Eq)]\n    \
         #[allow(dead_code)]\n    pub struct Choices {\n",
    );
    for name in names {
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
    Ok(declared)
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

/// What `kernels.rs` says of kernels with the same arguments.
struct Module<'a> {
    name: &'a str,
    /// Where their images are.
    images: Range<usize>,
    fields: Fields,
    /// Of the struct's layout.
    asserts: String,
    /// Where each parameter begins.
    parameters: Vec<usize>,
    /// Rust that declares what tells them apart.
    choices: String,
}

fn module(module: &Module<'_>) -> String {
    let Module {
        name,
        images,
        fields: Fields { declared, zero },
        asserts,
        parameters,
        choices,
    } = module;
    format!(
        "\n/// The arguments of `{name}`.\n\
         pub mod {name} {{\n    \
             /// As the kernels take them.\n    \
             #[derive(Clone, Copy, Debug)]\n    \
             #[repr(C)]\n    \
             pub struct Arguments {{\n{declared}    }}\n\
             {asserts}    \
             impl Arguments {{\n        \
                 /// All zero: what a caller leaves out, and gaps if there are any.\n        \
                 #[allow(dead_code)]\n        \
                 pub const ZERO: Arguments = Arguments {{\n{zero}        }};\n    \
             }}\n    \
             // SAFETY: laid out by what laid out the kernels' parameters.\n    \
             unsafe impl super::Arguments for Arguments {{\n        \
                 type Choices = Choices;\n        \
                 const IMAGES: std::ops::Range<usize> = {images:?};\n        \
                 const CHOICES: &[Choices] = CHOICES;\n        \
                 const PARAMETERS: &[usize] = &{parameters:?};\n    \
             }}\n\
             {choices}\
         }}\n"
    )
}

/// Of CubeCL's kernels: pointers, then scalars as the kernels unpack them, then an array if there is one.
fn arguments<'a>(
    images: Range<usize>,
    name: &'a str,
    arguments: &Arguments,
    choices: String,
) -> Module<'a> {
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
    Module {
        name,
        images,
        fields,
        asserts: format!("    const _: () = assert!(size_of::<Arguments>() == {size});\n"),
        parameters,
        choices,
    }
}
