//! The floors of the house: a room of `src/` imports from its own floor or those below, and no two rooms import each other.
//!
//! A room is a file or a folder directly in `src/`. Modules of tests may look upwards.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The rooms of each floor, the ground first.
const FLOORS: [&[&str]; 7] = [
    &[
        "alloc", "backend", "dtype", "error", "layout", "log", "tensor",
    ],
    &["problem"],
    &["cpu", "cuda", "no_cuda"],
    &["context"],
    &["memory"],
    &[
        "comm",
        "estimate",
        "kv_cache",
        "ops",
        "optimizer",
        "training",
    ],
    &["candle", "ffi", "guide"],
];

fn floor(room: &str) -> Option<usize> {
    FLOORS
        .iter()
        .position(|rooms| rooms.contains(&room))
        .map(|i| i + 1)
}

/// A line of a file that names a path of the crate.
struct Import {
    file: PathBuf,
    line: usize,
    from: String,
    to: String,
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The code without comments, strings and modules of tests; lines stay where they are.
fn code(text: &str) -> String {
    let mut out = String::new();
    let mut in_string = false;
    for line in text.lines() {
        let mut chars = line.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '\\' if in_string => {
                    chars.next();
                }
                '"' => in_string = !in_string,
                _ if in_string => {}
                '/' if chars.peek() == Some(&'/') => break,
                // A quote as a character, which begins no string.
                '\'' if chars.clone().take(2).eq("\"'".chars()) => {
                    chars.nth(1);
                }
                _ => out.push(c),
            }
        }
        out.push('\n');
    }
    while let Some(start) = out.find("#[cfg(test)]") {
        // As far as the item that the attribute is on: to its closing brace, or to a semicolon before any.
        let (mut depth, mut end) = (0, out.len());
        for (at, c) in out[start..].char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ';' if depth == 0 => {}
                _ => continue,
            }
            if depth == 0 {
                end = start + at + 1;
                break;
            }
        }
        let lines = out[start..end].matches('\n').count();
        out.replace_range(start..end, &"\n".repeat(lines));
    }
    out
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

/// What stands first in each path of a list in braces.
fn heads(list: &str) -> Vec<&str> {
    let (mut depth, mut heads, mut next) = (0, Vec::new(), true);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => next = true,
            _ if depth == 0 => break,
            _ if next && c.is_alphabetic() => {
                heads.push(word(&list[at..]));
                next = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    heads
}

/// Rooms by the names that the crate's root gives to what is in them.
fn root_names(lib: &str) -> BTreeMap<String, String> {
    let mut names = BTreeMap::new();
    for statement in code(lib).split(';') {
        let Some(path) = statement.trim().rsplit("pub use ").next() else {
            continue;
        };
        if !statement.contains("pub use ") || path.starts_with("crate") {
            continue;
        }
        for name in path.split(|c: char| !c.is_alphanumeric() && c != '_') {
            names.insert(name.to_string(), word(path).to_string());
        }
    }
    names
}

fn imports() -> Vec<Import> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let names = root_names(&fs::read_to_string(root.join("lib.rs")).unwrap());
    let mut files = Vec::new();
    sources(&root, &mut files);
    files.sort();
    let mut imports = Vec::new();
    for file in files {
        let inside = file.strip_prefix(&root).unwrap();
        let first = inside.iter().next().unwrap().to_str().unwrap();
        let from = first.trim_end_matches(".rs");
        if from == "lib" {
            continue;
        }
        let code = code(&fs::read_to_string(&file).unwrap());
        for (at, _) in code.match_indices("crate::") {
            let path = &code[at + "crate::".len()..];
            let targets = if path.starts_with('{') {
                heads(path)
            } else {
                vec![word(path)]
            };
            for target in targets {
                let to = match floor(target) {
                    Some(_) => target,
                    None => names.get(target).map_or(target, String::as_str),
                };
                if to != from {
                    imports.push(Import {
                        file: Path::new("src").join(inside),
                        line: code[..at].matches('\n').count() + 1,
                        from: from.to_string(),
                        to: to.to_string(),
                    });
                }
            }
        }
    }
    imports
}

#[test]
fn every_room_is_on_a_floor() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in fs::read_dir(root).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let room = name.trim_end_matches(".rs");
        assert!(
            room == "lib" || floor(room).is_some(),
            "src/{name} is on no floor: add it to FLOORS, where the design has it"
        );
    }
}

#[test]
fn no_import_goes_up() {
    let mut broken = Vec::new();
    for i in imports() {
        // A macro or a name of the root that is nobody's room.
        let (Some(from), Some(to)) = (floor(&i.from), floor(&i.to)) else {
            continue;
        };
        if to > from {
            let place = format!("{}:{}", i.file.display(), i.line);
            broken.push(format!(
                "{place}: {} (floor {from}) imports {} (floor {to})",
                i.from, i.to
            ));
        }
    }
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

#[test]
fn no_rooms_import_each_other() {
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for i in imports() {
        graph.entry(i.from).or_default().insert(i.to);
    }
    // A room that imports only rooms outside every circle, or that only such rooms import, is outside too.
    let mut before = usize::MAX;
    while graph.len() < before {
        before = graph.len();
        let imported: BTreeSet<_> = graph.values().flatten().cloned().collect();
        let kept: BTreeSet<_> = graph.keys().cloned().collect();
        graph.retain(|room, to| imported.contains(room) && !to.is_disjoint(&kept));
    }
    assert!(graph.is_empty(), "rooms in a circle: {graph:?}");
}

#[test]
fn imports_are_found() {
    let text = "use crate::{a::{x, y}, b};\n// crate::no\nlet s = \"crate::no\";\ncrate::c::f();\n\
        #[cfg(test)]\nmod tests {\n    use crate::no;\n}\nuse crate::d;\n";
    let code = code(text);
    let found: Vec<_> = code
        .match_indices("crate::")
        .map(|(at, m)| &code[at + m.len()..])
        .map(|path| match path.starts_with('{') {
            true => heads(path),
            false => vec![word(path)],
        })
        .collect();
    assert_eq!(found, [vec!["a", "b"], vec!["c"], vec!["d"]]);
    assert_eq!(code.matches('\n').count(), text.matches('\n').count());
}
