//! A unit, compiled for one architecture. What nvcc gave is kept, and given again as long as nothing changed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use super::report::{Usage, usage};
use super::{Architecture, Compiler, JOINED, Source, Unit, create, holds, run};
use crate::Error;
use crate::cubin::Cubin;

/// A unit for one architecture.
#[derive(Debug)]
pub(super) struct Job<'a> {
    pub unit: &'a Unit,
    /// Where its results are.
    pub directory: PathBuf,
    pub architecture: &'a Architecture,
    /// Whether the image has its PTX too. Then machine code is made of that, which spares compiling the source twice.
    pub with_ptx: bool,
}

/// The compiler's list of what a source includes; the same relative to the folders in which it was found, so that results may be
/// moved with the repository; and all these files as they were compiled.
const RULE: &str = "dependencies.d";
const DEPENDENCIES: &str = "dependencies.txt";
const SOURCES: &str = "source.cu";

impl Compiler {
    /// Compiles, unless the directory holds the result already, and gives the compiler's log.
    pub(super) fn run(&self, job: &Job<'_>) -> Result<String, Error> {
        let output = job.machine_code();
        let log = job.directory.join("log.txt");
        let stamp = job.directory.join("command.txt");
        let kept = job.directory.join(SOURCES);
        let flags = job.flags();
        let mut command = format!("{}\n{}", self.banner, flags.join(" "));
        if job.with_ptx {
            command += "\nof ";
            command += &job.flags_of_ptx().join(" ");
        }
        if holds(&stamp, &command)
            && job.sources().is_some_and(|text| holds(&kept, &text))
            && output.is_file()
            && job.ptx().is_none_or(|ptx| ptx.is_file())
            && let Ok(log) = fs::read_to_string(&log)
        {
            return Ok(log);
        }
        create(&job.directory)?;
        // The stamps go first and come last: an interrupted run leaves none.
        let _ = fs::remove_file(&stamp);
        let _ = fs::remove_file(job.directory.with_file_name(JOINED));
        let ptx = job.ptx();
        let mut nvcc = Command::new(&self.nvcc);
        match &ptx {
            Some(ptx) => nvcc.args(job.flags_of_ptx()).arg("-o").arg(ptx),
            None => nvcc.args(&flags).arg("-o").arg(&output),
        };
        let rule = job.directory.join(RULE);
        let begun = SystemTime::now();
        match &job.unit.source {
            Source::Text(text) => {
                crate::write(&kept, text.as_bytes())?;
                nvcc.arg(&kept);
            }
            Source::File { path, include } => {
                nvcc.args(include.iter().map(|path| format!("-I{}", path.display())));
                nvcc.arg("-MMD").arg("-MF").arg(&rule).arg(path);
            }
        }
        let (_, mut text) = run(&mut nvcc)?;
        if let Some(ptx) = &ptx {
            let mut nvcc = Command::new(&self.nvcc);
            (_, text) = run(nvcc.args(&flags).arg("-o").arg(&output).arg(ptx))?;
        }
        crate::write(&log, text.as_bytes())?;
        if let Source::File { include, .. } = &job.unit.source {
            let rule = fs::read_to_string(&rule).unwrap_or_default();
            let names = relative(&prerequisites(&rule), include);
            crate::write(&job.directory.join(DEPENDENCIES), names.as_bytes())?;
            // Files that change while they are compiled are compiled again the next time.
            let Some(sources) = job.sources().filter(|_| !job.changed_since(begun)) else {
                return Ok(text);
            };
            crate::write(&kept, sources.as_bytes())?;
        }
        crate::write(&stamp, command.as_bytes())?;
        Ok(text)
    }
}

impl<'a> Job<'a> {
    /// Everything that a unit is compiled for.
    pub fn all(unit: &'a Unit, cache: &Path) -> Vec<Job<'a>> {
        let job = |architecture: &'a Architecture| {
            let name = format!("sm_{}", architecture.name());
            Job {
                unit,
                directory: cache.join(&unit.folder).join(name),
                architecture,
                with_ptx: unit.ptx.as_ref() == Some(architecture),
            }
        };
        unit.machine_code.iter().map(job).collect()
    }

    pub fn machine_code(&self) -> PathBuf {
        self.directory.join(format!("{}.cubin", self.unit.name))
    }

    pub fn ptx(&self) -> Option<PathBuf> {
        let name = format!("{}.ptx", self.unit.name);
        self.with_ptx.then(|| self.directory.join(name))
    }

    /// What takes longer has more of it: the text, which headers and templates multiply where it is a file.
    pub fn cost(&self) -> usize {
        match &self.unit.source {
            Source::Text(text) => text.len(),
            Source::File { .. } => usize::MAX,
        }
    }

    /// What the log and the machine code say of the kernels.
    pub fn usage(&self, log: &str) -> Result<Vec<Usage>, Error> {
        let mut all = usage(&self.unit.name, &self.architecture.name(), log);
        // Only Hopper has wgmma and the copy engine.
        if self.architecture.number == 90 {
            let path = self.machine_code();
            let bytes = fs::read(&path).map_err(|source| Error::File {
                path: path.clone(),
                source,
            })?;
            let cubin = Cubin::parse(&bytes).map_err(|error| Error::Exports {
                image: self.unit.name.clone(),
                reason: error.to_string(),
            })?;
            for kernel in &mut all {
                kernel.wgmma = cubin.wgmma(&kernel.kernel);
                kernel.boxes = cubin.boxes(&kernel.kernel);
            }
        }
        Ok(all)
    }

    fn flags(&self) -> Vec<String> {
        let arch = self.architecture.name();
        self.usual_flags(["-cubin".into(), format!("-arch=sm_{arch}")])
    }

    /// PTX for one architecture's own instructions would run nowhere else: it has none.
    fn flags_of_ptx(&self) -> Vec<String> {
        let number = self.architecture.number;
        self.usual_flags(["-ptx".into(), format!("-arch=compute_{number}")])
    }

    fn usual_flags(&self, first: [String; 2]) -> Vec<String> {
        // CubeCL's shuffles pass the mask -1 (68) and it declares what it may not use (177).
        let usual = [
            "-O3",
            "-diag-suppress=68,177",
            "-Xptxas",
            "-v,--warn-on-spills",
        ];
        let usual = usual.map(String::from);
        let all = first.into_iter().chain(usual);
        all.chain(self.unit.flags.iter().cloned()).collect()
    }

    /// The files that a source was last compiled from, but for those of the toolkit, which its banner stands for.
    fn files(&self) -> Option<Vec<PathBuf>> {
        let Source::File { include, .. } = &self.unit.source else {
            return Some(Vec::new());
        };
        let names = fs::read_to_string(self.directory.join(DEPENDENCIES)).ok()?;
        let found = |name: &str| {
            let mut paths = include.iter().map(|directory| directory.join(name));
            paths.find(|path| path.is_file())
        };
        names.lines().map(found).collect()
    }

    /// All that a change of must compile the unit again; `None` if that is not known or not there.
    fn sources(&self) -> Option<String> {
        if let Source::Text(text) = &self.unit.source {
            return Some(text.clone());
        }
        let mut sources = String::new();
        for file in self.files()? {
            sources += &fs::read_to_string(&file).ok()?;
        }
        Some(sources)
    }

    fn changed_since(&self, time: SystemTime) -> bool {
        let modified = |file: &PathBuf| fs::metadata(file).and_then(|data| data.modified());
        let files = self.files().unwrap_or_default();
        files
            .iter()
            .any(|file| modified(file).is_ok_and(|at| at >= time))
    }
}

/// Those files that are in one of the folders, by their paths in it, one a line.
fn relative(files: &[PathBuf], folders: &[PathBuf]) -> String {
    let folders: Vec<_> = folders
        .iter()
        .map(|f| fs::canonicalize(f).unwrap_or(f.clone()))
        .collect();
    let name = |file: &PathBuf| {
        let file = fs::canonicalize(file).unwrap_or(file.clone());
        let mut names = folders.iter().map(|folder| file.strip_prefix(folder));
        Some(format!("{}\n", names.find_map(Result::ok)?.display()))
    };
    files.iter().filter_map(name).collect()
}

/// What a make rule with one target lists: names in which a space is escaped, over lines that a backslash continues.
fn prerequisites(rule: &str) -> Vec<PathBuf> {
    let rule = rule.replace("\\\r\n", " ").replace("\\\n", " ");
    let Some((_, list)) = rule.split_once(": ") else {
        return Vec::new();
    };
    let list = list.replace("\\ ", "\0");
    let names = list.split_whitespace();
    names.map(|name| name.replace('\0', " ").into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_read() {
        let rule = "out/a.cubin : /src/a.cu \\\n    /src/with\\ space/b.h \\\n /src/c.h\n";
        let expected = ["/src/a.cu", "/src/with space/b.h", "/src/c.h"].map(PathBuf::from);
        assert_eq!(prerequisites(rule), expected);
        assert!(prerequisites("").is_empty());
    }
}
