//! The kernels in CUDA C++ for Hopper's own instructions (`kernels/cuda`): what is compiled, and what the images say of themselves.
//!
//! Every kernel exports how it is launched and every image where its kernels look for their arguments, so that the host's idea of both
//! comes from the compiled code.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::cubin::Cubin;
use crate::nvcc::{Architecture, Compiled, Unit};

/// The sources. What is compiled depends on nothing else of this crate's files that is not Rust.
pub const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda");

/// The architecture with these instructions, which no other runs.
const ARCHITECTURE: (u32, &str) = (90, "a");

/// `AttentionForwardLaunch` of `cuda/attention/params.h`: choices, then threads of a block and bytes of shared memory.
pub const CHOICES: [&str; 8] = [
    "dtype",
    "head_dim",
    "head_dim_v",
    "mask",
    "softcap",
    "for_short",
    "block_m",
    "block_n",
];

/// A kernel and how it is launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its symbol.
    pub name: String,
    /// What tells it from its siblings, and the shape of its tiles.
    pub choices: Vec<(&'static str, u32)>,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
}

/// What an image says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exports {
    /// Its kernels.
    pub kernels: Vec<Kernel>,
    /// The size of the kernels' argument, then the offset of each field.
    pub layout: Vec<u32>,
}

/// What is compiled for these architectures: a unit per file of `cuda/attention`, or nothing.
///
/// # Errors
/// A file cannot be read.
pub fn units(archs: &[Architecture]) -> Result<Vec<Unit>, Error> {
    let (number, suffix) = ARCHITECTURE;
    let is_hopper = |arch: &&Architecture| arch.number == number && arch.suffix == suffix;
    let Some(hopper) = archs.iter().find(is_hopper) else {
        return Ok(Vec::new());
    };
    let directory = Path::new(SOURCES).join("attention");
    let listed = fs::read_dir(&directory).map_err(|source| Error::File {
        path: directory.clone(),
        source,
    })?;
    let mut paths: Vec<_> = listed.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "cu"));
    paths.sort();
    let unit = |path: PathBuf| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Unit {
            name: format!("attention_{stem}"),
            text: with_includes(&path)?,
            flags: vec!["-std=c++20".into()],
            machine_code: vec![hopper.clone()],
            ptx: None,
        })
    };
    paths.into_iter().map(unit).collect()
}

/// A file with those that it includes by name in quotes in place of their first mention: all that a change must compile again, and
/// compiled as it was read, whatever happens to the files meanwhile.
fn with_includes(path: &Path) -> Result<String, Error> {
    fn visit(path: &Path, seen: &mut BTreeSet<PathBuf>, text: &mut String) -> Result<(), Error> {
        let at = |source| Error::File {
            path: path.into(),
            source,
        };
        let path = fs::canonicalize(path).map_err(at)?;
        if !seen.insert(path.clone()) {
            return Ok(());
        }
        let contents = fs::read_to_string(&path).map_err(at)?;
        // The compiler's messages name the file, the same wherever the repository is.
        let name = path.strip_prefix(SOURCES).unwrap_or(&path).display();
        let quoted = |line: &str| {
            let rest = line.trim_start().strip_prefix("#include \"")?;
            Some(path.with_file_name(rest.split('"').next()?))
        };
        let _ = writeln!(text, "#line 1 \"{name}\"");
        for (number, line) in contents.lines().enumerate() {
            if let Some(included) = quoted(line) {
                visit(&included, seen, text)?;
                let _ = writeln!(text, "#line {} \"{name}\"", number + 2);
            } else if line.trim() == "#pragma once" {
                text.push('\n');
            } else {
                text.push_str(line);
                text.push('\n');
            }
        }
        Ok(())
    }
    let mut text = String::new();
    visit(path, &mut BTreeSet::new(), &mut text)?;
    Ok(text)
}

/// Reads what a compiled image exports.
///
/// # Errors
/// It lacks something, or its kernels are not as this file has it.
pub fn exports(unit: &Unit, compiled: &Compiled) -> Result<Exports, Error> {
    let wrong = |reason: String| Error::Exports {
        image: unit.name.clone(),
        reason,
    };
    let [path] = compiled.cubins.as_slice() else {
        return Err(wrong("it is not for one architecture".into()));
    };
    let bytes = fs::read(path).map_err(|source| Error::File {
        path: path.clone(),
        source,
    })?;
    let cubin = Cubin::parse(&bytes).map_err(|error| wrong(error.to_string()))?;
    let words = |name: &str| {
        let found = cubin.variable(name);
        found.ok_or_else(|| wrong(format!("{name} is missing")))
    };
    let kernel = |name: String| {
        let launch = words(&format!("{name}_launch"))?;
        let (choices, rest) = launch.split_at_checked(CHOICES.len()).unwrap_or_default();
        let [threads, shared_bytes] = *rest else {
            let reason = format!("{name}_launch has {} words", launch.len());
            return Err(wrong(reason));
        };
        Ok(Kernel {
            name,
            choices: CHOICES.into_iter().zip(choices.iter().copied()).collect(),
            threads,
            shared_bytes,
        })
    };
    Ok(Exports {
        kernels: cubin
            .kernels()
            .into_iter()
            .map(kernel)
            .collect::<Result<_, _>>()?,
        layout: words("attention_forward_layout")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hopper_gets_units() {
        let arch = |number, suffix: &str| Architecture {
            number,
            suffix: suffix.into(),
        };
        assert!(
            units(&[arch(80, ""), arch(90, ""), arch(100, "a")])
                .unwrap()
                .is_empty()
        );
        let found = units(&[arch(80, ""), arch(90, "a")]).unwrap();
        let names: Vec<_> = found.iter().map(|unit| unit.name.as_str()).collect();
        assert!(names.contains(&"attention_forward_hd128"), "{names:?}");
        assert!(
            found
                .iter()
                .all(|unit| unit.machine_code == [arch(90, "a")] && unit.ptx.is_none())
        );
    }

    #[test]
    fn a_unit_is_all_that_it_includes() {
        let text = with_includes(&Path::new(SOURCES).join("attention/forward_hd64.cu")).unwrap();
        for file in [
            "attention/config.h",
            "attention/params.h",
            "common/mbarrier.cuh",
        ] {
            let begins = format!("#line 1 \"{file}\"\n");
            assert_eq!(text.matches(&begins).count(), 1, "{file}");
        }
        assert!(!text.contains("#include \"") && !text.contains("#pragma once"));
    }
}
