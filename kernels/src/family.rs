//! Families of kernels in CUDA C++ (`kernels/cuda`): what is compiled, what the kernels are told, and what the images say of
//! themselves.
//!
//! A family is a folder with a `family.rs`, which lists the kernels' arguments and the choices between them, and files to compile
//! (`*.cu`), an image each. Its argument struct is generated from that list for both sides. Every kernel exports how it is launched,
//! so that the host's idea of it comes from the compiled code.

use std::borrow::Cow;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::cubin::Cubin;
use crate::nvcc::{Architecture, Compiled, Source, Unit};

#[path = "../cuda/all_reduce_rms_norm/family.rs"]
mod all_reduce_rms_norm;
#[path = "../cuda/attention/decode/family.rs"]
mod attention_decoding;
#[path = "../cuda/attention/forward/family.rs"]
mod attention_forward;
#[path = "../cuda/attention/backward/family.rs"]
mod attention_gradients;
#[path = "../cuda/attention/step/family.rs"]
mod attention_step;
#[path = "../cuda/blocks/family.rs"]
mod blocks_rows;
#[path = "../cuda/cross_entropy/family.rs"]
mod cross_entropy_ring;
#[path = "../cuda/linear/blocks/family.rs"]
mod linear_blocks;
#[path = "../cuda/linear/codes/family.rs"]
mod linear_codes;
#[path = "../cuda/linear/e4m3/family.rs"]
mod linear_e4m3;
#[path = "../cuda/linear/few/family.rs"]
mod linear_few;
#[path = "../cuda/linear/few_codes/family.rs"]
mod linear_few_codes;
#[path = "../cuda/linear/one_row/family.rs"]
mod linear_one_row;
#[path = "../cuda/linear/wide/family.rs"]
mod linear_wide;
#[path = "../cuda/norm/backward/family.rs"]
mod norm_backward_ring;
#[path = "../cuda/qk_norm_rope/family.rs"]
mod qk_norm_rope_ring;
#[path = "../cuda/quantize/family.rs"]
mod quantize;
#[path = "../cuda/sum_rms_norm/family.rs"]
mod sum_rms_norm;

/// Every family.
pub const FAMILIES: &[Family] = &[
    all_reduce_rms_norm::FAMILY,
    attention_forward::FAMILY,
    attention_decoding::FAMILY,
    attention_gradients::FAMILY,
    attention_step::FAMILY,
    blocks_rows::FAMILY,
    cross_entropy_ring::FAMILY,
    linear_blocks::FAMILY,
    linear_codes::FAMILY,
    linear_e4m3::FAMILY,
    linear_few::FAMILY,
    linear_few_codes::FAMILY,
    linear_one_row::FAMILY,
    linear_wide::FAMILY,
    norm_backward_ring::FAMILY,
    qk_norm_rope_ring::FAMILY,
    quantize::FAMILY,
    sum_rms_norm::FAMILY,
];

/// The sources in CUDA C++.
pub const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda");

/// Writes what kernels in CUDA C++ include of what is generated: the contract, and every family's `arguments.h`.
///
/// # Errors
/// A file cannot be written.
pub fn write_headers(include: &Path) -> Result<(), Error> {
    let arguments = |family: &Family| {
        let path = Path::new(family.directory).join("arguments.h");
        (path, family.header())
    };
    let contract = (PathBuf::from("contract.h"), contract::cpp::header());
    for (path, text) in FAMILIES.iter().map(arguments).chain([contract]) {
        let path = include.join(path);
        crate::nvcc::create(path.parent().unwrap_or(include))?;
        crate::write(&path, text.as_bytes())?;
    }
    Ok(())
}

/// Kernels that take the same arguments.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// As the table of images has it; its C++ types begin with it in camel case.
    pub name: &'static str,
    /// Of [`SOURCES`].
    pub directory: &'static str,
    /// The number and the suffix of the architecture whose instructions it uses, which no other runs; `None` for kernels that every
    /// architecture runs.
    pub architecture: Option<(u32, &'static str)>,
    /// The fields of the one argument, which kernels take by value.
    pub arguments: &'static [Field],
    /// What tells kernels apart, and what it means.
    pub choices: &'static [(&'static str, &'static str)],
}

/// A field of an argument struct.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its type.
    pub ty: Type,
    /// Its name, the same on both sides.
    pub name: &'static str,
    /// What a reader has to know of it.
    pub doc: &'static str,
}

/// A field, in one line.
pub const fn field(ty: Type, name: &'static str, doc: &'static str) -> Field {
    Field { ty, name, doc }
}

/// The type of a field.
#[derive(Clone, Copy, Debug)]
pub enum Type {
    /// A `CUtensorMap`.
    TensorMap,
    /// A pointer to this.
    Pointer(&'static str),
    /// 64-bit unsigned integer.
    U64,
    /// 64-bit signed integer.
    I64,
    /// 32-bit unsigned integer.
    U32,
    /// 32-bit signed integer.
    I32,
    /// 32-bit float.
    F32,
    /// So many 32-bit floats.
    Floats(usize),
}

impl Type {
    /// Bytes.
    pub fn size(self) -> usize {
        match self {
            Type::Floats(count) => 4 * count,
            _ => self.alignment(),
        }
    }

    /// Bytes that it is aligned to.
    pub fn alignment(self) -> usize {
        match self {
            Type::TensorMap => 128,
            Type::Pointer(_) | Type::U64 | Type::I64 => 8,
            Type::U32 | Type::I32 | Type::F32 | Type::Floats(_) => 4,
        }
    }

    /// The Rust type, and its zero.
    pub fn rust(self) -> (Cow<'static, str>, Cow<'static, str>) {
        let (ty, zero) = match self {
            Type::TensorMap => ("super::TensorMap", "super::TensorMap::ZERO"),
            Type::Pointer(_) | Type::U64 => ("u64", "0"),
            Type::I64 => ("i64", "0"),
            Type::U32 => ("u32", "0"),
            Type::I32 => ("i32", "0"),
            Type::F32 => ("f32", "0.0"),
            Type::Floats(count) => {
                return (
                    format!("[f32; {count}]").into(),
                    format!("[0.0; {count}]").into(),
                );
            }
        };
        (ty.into(), zero.into())
    }

    fn cpp(self, name: &str) -> String {
        match self {
            Type::TensorMap => format!("CUtensorMap {name}"),
            Type::Pointer(to) => format!("{to} *{name}"),
            Type::U64 => format!("uint64_t {name}"),
            Type::I64 => format!("int64_t {name}"),
            Type::U32 => format!("uint32_t {name}"),
            Type::I32 => format!("int32_t {name}"),
            Type::F32 => format!("float {name}"),
            Type::Floats(count) => format!("float {name}[{count}]"),
        }
    }
}

impl Family {
    /// What the struct is aligned to: its strictest field, which are tensor maps where it has some.
    fn alignment(&self) -> usize {
        let all = self.arguments.iter().map(|field| field.ty.alignment());
        all.max().unwrap_or(1)
    }

    /// Where each field lies, and the size of the whole.
    pub fn layout(&self) -> (Vec<usize>, usize) {
        let mut end = 0usize;
        let place = |field: &Field| {
            let offset = end.next_multiple_of(field.ty.alignment());
            end = offset + field.ty.size();
            offset
        };
        let offsets = self.arguments.iter().map(place).collect();
        (offsets, end.next_multiple_of(self.alignment()))
    }

    /// `AttentionForward`.
    fn camel(&self) -> String {
        let capital = |part: &str| {
            let (first, rest) = part.split_at(part.len().min(1));
            first.to_uppercase() + rest
        };
        self.name.split('_').map(capital).collect()
    }

    /// The argument struct, and what a kernel exports of its launch, for C++.
    pub fn header(&self) -> String {
        let name = self.camel();
        let (offsets, size) = self.layout();
        let mut text = format!(
            "// Generated from kernels/cuda/{}/family.rs.\n#pragma once\n\n#include <cuda.h>\n#include <stddef.h>\n\
             #include <stdint.h>\n\nstruct alignas({}) {name}Arguments {{\n",
            self.directory,
            self.alignment()
        );
        let comment = |doc: &str| match doc {
            "" => String::new(),
            doc => format!("  // {doc}"),
        };
        for field in self.arguments {
            let _ = writeln!(
                text,
                "  {};{}",
                field.ty.cpp(field.name),
                comment(field.doc)
            );
        }
        let _ = writeln!(
            text,
            "}};\n\nstatic_assert(sizeof({name}Arguments) == {size});"
        );
        for (field, offset) in self.arguments.iter().zip(offsets) {
            let _ = writeln!(
                text,
                "static_assert(offsetof({name}Arguments, {}) == {offset});",
                field.name
            );
        }
        let _ = writeln!(
            text,
            "\n// Each kernel exports one as NAME_launch.\nstruct {name}Launch {{"
        );
        for (choice, doc) in self.choices {
            let _ = writeln!(text, "  int32_t {choice};{}", comment(doc));
        }
        text.push_str("  int32_t threads;\n  int32_t shared_bytes;  // dynamic\n};\n");
        text
    }

    /// What is compiled for these architectures: a unit per `*.cu` of its folder, or nothing. Generated headers are in `include`.
    /// With `delays`, warps wait for a random time wherever they synchronise (`cuda/common/jitter.cuh`).
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn units(
        &self,
        archs: &[Architecture],
        include: &Path,
        delays: bool,
    ) -> Result<Vec<Unit>, Error> {
        let is_its_own = |arch: &&Architecture| match self.architecture {
            Some((number, suffix)) => arch.number == number && arch.suffix == suffix,
            None => true,
        };
        let machine_code: Vec<_> = archs.iter().filter(is_its_own).cloned().collect();
        if machine_code.is_empty() {
            return Ok(Vec::new());
        }
        let ptx = archs.last().filter(|_| self.architecture.is_none());
        let directory = Path::new(SOURCES).join(self.directory);
        let listed = fs::read_dir(&directory).map_err(|source| Error::File {
            path: directory.clone(),
            source,
        })?;
        let mut paths: Vec<_> = listed.flatten().map(|entry| entry.path()).collect();
        paths.retain(|path| path.extension().is_some_and(|e| e == "cu"));
        paths.sort();
        let unit = |path: PathBuf| {
            let stem = path.file_stem().unwrap_or_default().to_string_lossy();
            let name = format!("{}_{stem}", self.name);
            let mut flags = vec!["-std=c++20".into()];
            if delays {
                flags.push("-DUNSLOTH_JITTER".into());
            }
            Unit {
                // A build with delays leaves those without in the cache.
                folder: if delays {
                    Path::new("delays").join(&name)
                } else {
                    name.clone().into()
                },
                name,
                source: Source::File {
                    include: vec![include.to_path_buf(), SOURCES.into()],
                    path,
                },
                flags,
                machine_code: machine_code.clone(),
                ptx: ptx.cloned(),
            }
        };
        Ok(paths.into_iter().map(unit).collect())
    }

    /// Reads what a compiled image says of its kernels.
    ///
    /// # Errors
    /// It lacks something, or its kernels are not as the family has it.
    pub fn exports(&self, image: &str, compiled: &Compiled) -> Result<Vec<Kernel>, Error> {
        let wrong = |reason: String| Error::Exports {
            image: image.into(),
            reason,
        };
        // What kernels export is the same for every architecture.
        let Some(path) = compiled.cubins.first() else {
            return Err(wrong("it has no machine code".into()));
        };
        let bytes = fs::read(path).map_err(|source| Error::File {
            path: path.clone(),
            source,
        })?;
        let cubin = Cubin::parse(&bytes).map_err(|error| wrong(error.to_string()))?;
        let kernel = |name: String| {
            let launch = cubin.variable(&format!("{name}_launch"));
            let launch = launch.ok_or_else(|| wrong(format!("{name}_launch is missing")))?;
            let (choices, rest) = launch
                .split_at_checked(self.choices.len())
                .unwrap_or_default();
            let [threads, shared_bytes] = *rest else {
                let reason = format!("{name}_launch has {} words", launch.len());
                return Err(wrong(reason));
            };
            let names = self.choices.iter().map(|(name, _)| *name);
            Ok(Kernel {
                name,
                choices: names.zip(choices.iter().copied()).collect(),
                threads,
                shared_bytes,
            })
        };
        cubin.kernels().into_iter().map(kernel).collect()
    }
}

/// A kernel and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its symbol.
    pub name: String,
    /// What tells it from its siblings.
    pub choices: Vec<(&'static str, u32)>,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The host starts kernels before the one before them has ended.
    #[test]
    fn kernels_await_the_one_before() {
        fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    sources(&path, found);
                } else if path.extension().is_some_and(|e| e == "cu" || e == "cuh") {
                    found.push(path);
                }
            }
        }
        let mut found = Vec::new();
        sources(Path::new(SOURCES), &mut found);
        let mut kernels = 0;
        for path in found {
            let text = fs::read_to_string(&path).unwrap().replace('\\', " ");
            for kernel in text.split("__global__").skip(1) {
                let calls = kernel.split_once('{').unwrap().1.split(';');
                let in_a_line = |call: &str| call.split_whitespace().collect::<Vec<_>>().join(" ");
                // Those of constant weights wait behind their first reads, the warps of QK-norm once they
                // know their first heads, by the arguments alone.
                let early = |call: &str| {
                    [
                        "unsloth::let_next_kernel_start()",
                        "if (params.launch != unsloth::kFirst) unsloth::let_next_kernel_start()",
                        "extern __shared__",
                        "unsloth::Warp<",
                    ]
                    .iter()
                    .any(|first| call.starts_with(first))
                };
                // Those that decode attention wait once their barriers are set up, those that round once
                // they know their groups, in what they call.
                let folder = path.parent().unwrap();
                let awaits = |file: &str| {
                    let text = fs::read_to_string(folder.join(file)).unwrap();
                    text.contains("  await_previous_kernel();")
                };
                let within = |call: &str| {
                    (call.starts_with("unsloth::attention_decoding<")
                        && text.contains("  await_previous_kernel();"))
                        || (call.starts_with("unsloth::codes<")
                            && awaits("held.cuh")
                            && awaits("quantize.cuh"))
                        || (call.starts_with("unsloth::round_in_turn<") && awaits("in_turn.cuh"))
                };
                // A step of decoding waits once it has asked for what the cache held, which no kernel wrote
                // that may still run. A product of many rows may be two launches: the second (kRest) runs
                // beside the first, and waits for it at its end.
                let unless = [
                    "if (params.constant == 0) ",
                    "if (params.append == 0) ",
                    "if (params.constant == 0 && params.launch != unsloth::kRest) { ",
                ];
                let first = calls.map(in_a_line).find(|call| !early(call));
                let waits = first.is_some_and(|call| {
                    let wait = unless.iter().find_map(|unless| call.strip_prefix(unless));
                    wait.unwrap_or(&call) == "unsloth::await_previous_kernel()" || within(&call)
                });
                assert!(waits, "{}: {kernel}", path.display());
                let at_its_end = "if (p_.launch == kRest) await_previous_kernel();";
                let beside = kernel.contains("params.launch != unsloth::kRest");
                assert!(
                    !beside || text.contains(at_its_end),
                    "{}: {kernel}",
                    path.display()
                );
                kernels += 1;
            }
        }
        assert!(kernels >= FAMILIES.len());
    }

    #[test]
    fn kernels_for_hopper_are_for_no_other() {
        let arch = |number, suffix: &str| Architecture {
            number,
            suffix: suffix.into(),
        };
        let include = std::env::temp_dir().join(format!("unsloth-headers-{}", std::process::id()));
        write_headers(&include).unwrap();
        let of_hopper = &attention_forward::FAMILY;
        let units = |archs: &[_]| of_hopper.units(archs, &include, false).unwrap();
        assert!(units(&[arch(80, ""), arch(90, ""), arch(100, "a")]).is_empty());
        let found = units(&[arch(80, ""), arch(90, "a")]);
        let slow = of_hopper.units(&[arch(90, "a")], &include, true).unwrap();
        assert_eq!(found.len(), slow.len());
        for (unit, slow) in found.iter().zip(&slow) {
            assert_eq!(unit.name, slow.name);
            assert_ne!(unit.folder, slow.folder);
            let delays = |unit: &Unit| unit.flags.contains(&"-DUNSLOTH_JITTER".into());
            assert!(delays(slow) && !delays(unit));
        }
        let names: Vec<_> = found.iter().map(|unit| unit.name.as_str()).collect();
        assert!(names.contains(&"attention_forward_hd128"), "{names:?}");
        assert!(
            found
                .iter()
                .all(|unit| unit.machine_code == [arch(90, "a")] && unit.ptx.is_none())
        );
        let all = FAMILIES.iter().filter(|f| f.architecture.is_none());
        for unit in all.flat_map(|f| {
            f.units(&[arch(80, ""), arch(90, "a")], &include, false)
                .unwrap()
        }) {
            assert_eq!(unit.machine_code, [arch(80, ""), arch(90, "a")]);
            assert_eq!(unit.ptx, Some(arch(90, "a")));
        }
        let header = fs::read_to_string(include.join("attention/forward/arguments.h")).unwrap();
        assert!(
            header.contains("  const float *sinks;  // [heads]"),
            "{header}"
        );
        fs::remove_dir_all(&include).unwrap();
    }

    #[test]
    fn families_are_distinct_and_their_fields_too() {
        for (i, family) in FAMILIES.iter().enumerate() {
            assert!(FAMILIES[..i].iter().all(|other| other.name != family.name));
            let mut names: Vec<_> = family.arguments.iter().map(|field| field.name).collect();
            names.sort_unstable();
            names.dedup();
            assert_eq!(names.len(), family.arguments.len(), "{}", family.name);
            let (offsets, size) = family.layout();
            assert!(offsets.is_sorted() && size % family.alignment() == 0);
        }
    }
}
