//! Runs cbindgen over the library's `src/ffi`, and lists the structs of the header that it makes.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    let root = PathBuf::from(var("CARGO_MANIFEST_DIR")).join("../..");
    let ffi = root.join("src/ffi");
    let config = root.join("cbindgen.toml");
    println!("cargo:rerun-if-changed={}", ffi.display());
    println!("cargo:rerun-if-changed={}", config.display());

    // In the order of the library's sections; every file of src/ffi is one.
    let mut sources = Vec::new();
    collect(&ffi, "", &mut sources);
    sources.sort_by_key(|source| (rank(&source.module), source.module.clone()));

    // A syntax error in src/ffi is better told by the compiler, which gets there only if this build
    // succeeds.
    let header = header(&config, &sources).unwrap_or_else(|error| {
        println!("cargo:warning=the header was not made: {error}");
        String::new()
    });
    let out = PathBuf::from(var("OUT_DIR"));
    write(&out.join("unsloth.h"), &header);
    write(&out.join("structs.rs"), &structs(&header, &sources));
}

/// A file, and the module of `unsloth::ffi` that it is; nothing for that module itself.
struct Source {
    path: PathBuf,
    module: String,
}

impl Source {
    fn text(&self) -> String {
        fs::read_to_string(&self.path).unwrap_or_default()
    }
}

/// The files of a folder and of those in it: a folder is a module too, whose text is in `mod.rs`.
fn collect(folder: &Path, module: &str, sources: &mut Vec<Source>) {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries.flatten(),
        Err(error) => panic!("{}: {error}", folder.display()),
    };
    for path in entries.map(|entry| entry.path()) {
        let stem = path.file_stem().and_then(|stem| stem.to_str());
        let inner = match (stem.unwrap_or_default(), module) {
            ("mod", _) => module.to_string(),
            (stem, "") => stem.to_string(),
            (stem, _) => format!("{module}::{stem}"),
        };
        if path.is_dir() {
            collect(&path, &inner, sources);
        } else {
            let module = inner;
            sources.push(Source { path, module });
        }
    }
}

/// The text of the header.
fn header(config: &Path, sources: &[Source]) -> Result<String, String> {
    let mut config = cbindgen::Config::from_file(config)?;
    let macros = config.after_includes.get_or_insert_default();
    macros.push_str(&initialisers(sources));
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in sources {
        builder = if source.path.ends_with("mod.rs") {
            // A copy elsewhere: cbindgen follows `mod` items, and every section would come twice.
            let name = format!("alone_{}", source.module.replace("::", "_"));
            let alone = PathBuf::from(var("OUT_DIR")).join(name);
            if let Err(error) = fs::create_dir_all(&alone) {
                panic!("{}: {error}", alone.display());
            }
            let alone = alone.join("mod.rs");
            write(&alone, &source.text());
            builder.with_src(alone)
        } else {
            builder.with_src(&source.path)
        };
    }
    let bindings = builder.generate().map_err(|error| error.to_string())?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8_lossy(&text).replace("# Safety\n * ", "Requires: ");
    Ok(behind(&text, "unsloth_quantization", "unsloth_tensor"))
}

/// A macro for each struct that `params!` declares, which initialises it.
fn initialisers(sources: &[Source]) -> String {
    let mut names = Vec::new();
    for source in sources {
        let text = source.text();
        for declared in text.split("\nparams!(").skip(1) {
            let name = declared.trim_start().split(',').next().unwrap_or_default();
            names.push(name.to_string());
        }
    }
    names.sort();
    names.iter().fold(String::from("\n"), |macros, name| {
        macros
            + &format!(
                "#define {}_INIT UNSLOTH_INIT({name})\n",
                name.to_uppercase()
            )
    })
}

/// The header with the struct `holder` behind `held`, of which it has some by value. `held` points
/// back to it, and cbindgen puts first what is pointed to.
fn behind(header: &str, holder: &str, held: &str) -> String {
    let begin = |name: &str| {
        let at = header.find(&format!("\ntypedef struct {name} {{\n"))?;
        header[..at].rfind("\n\n/**")
    };
    let end = |name: &str| {
        let last = format!("\n}} {name};\n");
        Some(header.find(&last)? + last.len() - 1)
    };
    let places = || Some((begin(holder)?, end(holder)?, begin(held)?, end(held)?));
    match places() {
        Some((a, b, c, d)) if b <= c => [
            &header[..a],
            &header[b..c],
            &header[c..d],
            &header[a..b],
            &header[d..],
        ]
        .concat(),
        _ => header.to_string(),
    }
}

/// A macro that lists every struct of the header with its fields: the header names them, the
/// compiler of the test measures them.
fn structs(header: &str, sources: &[Source]) -> String {
    let mut rust = String::from(
        "/// Applies a macro to every struct of the header: its name, then its fields.\n\
         #[macro_export]\n\
         macro_rules! structs {\n    ($each:ident) => {{\n",
    );
    for source in sources {
        if source.text().contains("\npub struct unsloth_") {
            let _ = writeln!(rust, "        use unsloth::ffi::{}::*;", source.module);
        }
    }
    let _ = writeln!(rust, "        &[");
    let mut name = None;
    for line in header.lines() {
        if let Some(begun) = line.strip_prefix("typedef struct ") {
            name = begun.strip_suffix(" {");
            if let Some(name) = name {
                let _ = write!(rust, "            $each!({name}");
            }
        } else if let Some(ended) = name
            && line == format!("}} {ended};")
        {
            let _ = writeln!(rust, "),");
            name = None;
        } else if name.is_some()
            && let Some(declaration) = line.strip_suffix(';')
        {
            // `int64_t shape[UNSLOTH_MAX_RANK]`, `void *data`
            let declared = declaration.split('[').next().unwrap_or_default();
            let field = declared.rsplit([' ', '*']).next().unwrap_or_default();
            let _ = write!(rust, ", {field}");
        }
    }
    rust.push_str("        ]\n    }};\n}\n");
    rust
}

/// The rank of a header section: what others build upon comes first.
fn rank(module: &str) -> usize {
    const FIRST: [&str; 6] = ["", "status", "context", "memory", "tensor", "dlpack"];
    FIRST
        .iter()
        .position(|first| *first == module)
        .unwrap_or(FIRST.len())
}

fn write(path: &Path, text: &str) {
    if let Err(error) = fs::write(path, text) {
        panic!("{}: {error}", path.display());
    }
}

fn var(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
