//! The CUDA compiler: where it is, what it compiles anew, and what it reports.
//!
//! Every unit is compiled once per architecture, each result kept beside the source and the command that gave it; it is compiled
//! again only when one of these differs. `fatbinary` then joins a unit's results into one image.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::cubin::{Cubin, Wgmma};

/// What pip installs to give a complete compiler in `nvidia/cu13/bin`.
pub const PIP_PACKAGES: &str = "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
     nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85";

/// Ampere, its consumer and Ada relatives, Hopper with its own instructions, and both Blackwells.
const DEFAULT_ARCHITECTURES: &str = "80,86,89,90a,100,120";

/// A GPU architecture, such as `90a`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Major times ten plus minor.
    pub number: u32,
    /// `a` or `f` for code that only this architecture, or its family, runs; empty otherwise.
    pub suffix: String,
}

impl Architecture {
    fn parse(text: &str) -> Result<Architecture, Error> {
        let digits = text.trim_end_matches(['a', 'f']);
        let number = digits.parse().ok().filter(|n| (70..=999).contains(n));
        let suffix = &text[digits.len()..];
        match number {
            Some(number) if suffix.len() <= 1 => Ok(Architecture {
                number,
                suffix: suffix.to_string(),
            }),
            _ => Err(Error::Architecture(text.to_string())),
        }
    }

    /// As in `sm_90a`.
    pub fn name(&self) -> String {
        format!("{}{}", self.number, self.suffix)
    }

    /// As in "compute capability 9.0".
    pub fn capability(&self) -> String {
        format!("{}.{}", self.number / 10, self.number % 10)
    }
}

/// The architectures to compile for: `UNSLOTH_CUDA_ARCHS`, or the default list; ascending.
///
/// # Errors
/// The variable is malformed or empty.
pub fn architectures() -> Result<Vec<Architecture>, Error> {
    let list = env::var("UNSLOTH_CUDA_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHITECTURES.into());
    parse_architectures(&list)
}

fn parse_architectures(list: &str) -> Result<Vec<Architecture>, Error> {
    let mut archs = list
        .split([',', ';', ' '])
        .filter(|part| !part.is_empty())
        .map(Architecture::parse)
        .collect::<Result<Vec<_>, _>>()?;
    archs.sort_by_key(|arch| (arch.number, arch.suffix.clone()));
    archs.dedup();
    if archs.is_empty() {
        return Err(Error::Architecture(list.to_string()));
    }
    Ok(archs)
}

/// What one kernel uses on one architecture, as ptxas reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// The image.
    pub image: String,
    /// The kernel's symbol.
    pub kernel: String,
    /// The architecture, such as `90a`.
    pub architecture: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory that a thread's stack frame takes.
    pub stack_bytes: u32,
    /// Bytes of registers written to local memory.
    pub spill_store_bytes: u32,
    /// Bytes of registers read back.
    pub spill_load_bytes: u32,
    /// Bytes of static shared memory; dynamic shared memory is the launch's.
    pub static_shared_bytes: u32,
    /// What the compiler warned of, such as serialised wgmma (C7510).
    pub warnings: Vec<String>,
    /// How wgmma are arranged, in kernels that have any.
    pub wgmma: Option<Wgmma>,
}

/// What is compiled into one image.
#[derive(Clone, Debug)]
pub struct Unit {
    /// The image's name.
    pub name: String,
    /// CUDA C++, whole: a change of it compiles it again.
    pub text: String,
    /// Flags of the compiler beyond the usual.
    pub flags: Vec<String>,
    /// What it is compiled to machine code for.
    pub machine_code: Vec<Architecture>,
    /// The oldest that it is compiled to PTX for, if it is.
    pub ptx: Option<Architecture>,
}

/// A unit, compiled.
#[derive(Debug)]
pub struct Compiled {
    /// Machine code and PTX, joined.
    pub fatbin: PathBuf,
    /// Machine code for each architecture.
    pub cubins: Vec<PathBuf>,
    /// What its kernels use.
    pub usage: Vec<Usage>,
}

/// An nvcc and the tools beside it.
#[derive(Debug)]
pub struct Compiler {
    nvcc: PathBuf,
    fatbinary: PathBuf,
    /// What `nvcc --version` says.
    banner: String,
    /// Major and minor version.
    pub version: (u32, u32),
}

/// One run of nvcc.
struct Job<'a> {
    unit: &'a Unit,
    directory: PathBuf,
    architecture: &'a Architecture,
    ptx: bool,
}

impl Compiler {
    /// The compiler of `CUDA_HOME`, `CUDA_PATH`, `PATH` or `/usr/local/cuda`, the first that there is.
    ///
    /// # Errors
    /// There is none, or it does not run.
    pub fn find() -> Result<Compiler, Error> {
        let homes = ["CUDA_HOME", "CUDA_PATH"]
            .into_iter()
            .filter_map(env::var_os)
            .map(|home| Path::new(&home).join("bin"));
        let path = env::var_os("PATH").unwrap_or_default();
        let tool = |name: &str| format!("{name}{}", env::consts::EXE_SUFFIX);
        let found = homes
            .chain(env::split_paths(&path))
            .chain([PathBuf::from("/usr/local/cuda/bin")])
            .map(|directory| directory.join(tool("nvcc")))
            .find(|path| path.is_file())
            .ok_or(Error::NoCompiler)?;
        // Its companions, and the headers, are where it really is.
        let nvcc = fs::canonicalize(&found).unwrap_or(found);
        let (banner, _) = run(Command::new(&nvcc).arg("--version"))?;
        let version = version(&banner).ok_or_else(|| Error::Tool {
            command: format!("{} --version", nvcc.display()),
            output: banner.clone(),
        })?;
        Ok(Compiler {
            fatbinary: nvcc.with_file_name(tool("fatbinary")),
            nvcc,
            banner,
            version,
        })
    }

    /// Compiles units, as many at a time as Cargo allows jobs.
    ///
    /// # Errors
    /// The compiler refuses a source, or files cannot be written to `cache`.
    pub fn compile(&self, units: &[Unit], cache: &Path) -> Result<Vec<Compiled>, Error> {
        create(cache)?;
        let lock_path = cache.join("lock");
        let at = |source| Error::File {
            path: lock_path.clone(),
            source,
        };
        // Builds of several profiles share the cache.
        let lock = fs::File::create(&lock_path).map_err(at)?;
        lock.lock().map_err(at)?;

        let jobs_of = |unit| Job::all(unit, cache);
        let jobs: Vec<_> = units.iter().flat_map(jobs_of).collect();
        let logs = self.run_all(&jobs)?;
        let mut rest = jobs.iter().zip(&logs).peekable();
        units
            .iter()
            .map(|unit| {
                let (mut own, mut usage, mut cubins) = (Vec::new(), Vec::new(), Vec::new());
                while let Some((job, log)) = rest.next_if(|(j, _)| std::ptr::eq(j.unit, unit)) {
                    if !job.ptx {
                        usage.extend(job.usage(log)?);
                        cubins.push(job.output());
                    }
                    own.push(job);
                }
                let fatbin = self.join(&cache.join(&unit.name), &own)?;
                Ok(Compiled {
                    fatbin,
                    cubins,
                    usage,
                })
            })
            .collect()
    }

    fn run_all(&self, jobs: &[Job<'_>]) -> Result<Vec<String>, Error> {
        let threads = env::var("NUM_JOBS")
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or(1usize)
            .clamp(1, jobs.len().max(1));
        let next = AtomicUsize::new(0);
        let results: Vec<_> = jobs.iter().map(|_| Mutex::new(None)).collect();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let result = self.run(job);
                        let failed = result.is_err();
                        let slot = jobs.iter().position(|other| std::ptr::eq(other, job));
                        if let Some(Ok(mut slot)) = slot.map(|i| results[i].lock()) {
                            *slot = Some(result);
                        }
                        if failed {
                            next.store(jobs.len(), Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        // After a failure the rest was not run: the failure is what there is to report.
        let done: Vec<Option<Result<String, Error>>> = results
            .into_iter()
            .map(|slot| slot.into_inner().unwrap_or(None))
            .collect();
        let mut logs = Vec::with_capacity(done.len());
        for result in done.into_iter().flatten() {
            logs.push(result?);
        }
        Ok(logs)
    }

    /// Compiles, unless the directory holds the result already, and gives the compiler's log.
    fn run(&self, job: &Job<'_>) -> Result<String, Error> {
        let (source, contents) = (job.directory.join("source.cu"), &job.unit.text);
        let output = job.output();
        let log = job.directory.join("log.txt");
        let stamp = job.directory.join("command.txt");
        let arch = job.architecture;
        let flags: Vec<String> = if job.ptx {
            // PTX for one architecture's own instructions would run nowhere else.
            vec!["-ptx".into(), format!("-arch=compute_{}", arch.number)]
        } else {
            vec!["-cubin".into(), format!("-arch=sm_{}", arch.name())]
        };
        // CubeCL's shuffles pass the mask -1 (68) and it declares what it may not use (177).
        let flags: Vec<String> = flags
            .into_iter()
            .chain(
                [
                    "-O3",
                    "-diag-suppress=68,177",
                    "-Xptxas",
                    "-v,--warn-on-spills",
                ]
                .map(String::from),
            )
            .chain(job.unit.flags.iter().cloned())
            .collect();
        let command = format!("{}\n{}", self.banner, flags.join(" "));
        let same = |path: &Path, text: &str| fs::read(path).is_ok_and(|old| old == text.as_bytes());
        if same(&stamp, &command)
            && same(&source, contents)
            && output.is_file()
            && let Ok(log) = fs::read_to_string(&log)
        {
            return Ok(log);
        }
        create(&job.directory)?;
        // The stamp goes first and comes last: an interrupted run leaves none.
        let _ = fs::remove_file(&stamp);
        crate::write(&source, contents.as_bytes())?;
        let (_, text) = run(Command::new(&self.nvcc)
            .args(&flags)
            .arg("-o")
            .arg(&output)
            .arg(&source))?;
        crate::write(&log, text.as_bytes())?;
        crate::write(&stamp, command.as_bytes())?;
        Ok(text)
    }

    /// Joins a unit's results into one file.
    fn join(&self, directory: &Path, jobs: &[&Job<'_>]) -> Result<PathBuf, Error> {
        let fatbin = directory.join("image.fatbin");
        let mut command = Command::new(&self.fatbinary);
        command.arg(format!("--create={}", fatbin.display()));
        command.args(["-64", "--compress-mode=size"]);
        for job in jobs {
            let (kind, arch) = match job.ptx {
                true => ("ptx", job.architecture.number.to_string()),
                false => ("elf", job.architecture.name()),
            };
            let file = job.output();
            command.arg(format!(
                "--image3=kind={kind},sm={arch},file={}",
                file.display()
            ));
        }
        run(&mut command)?;
        Ok(fatbin)
    }
}

impl<'a> Job<'a> {
    /// Everything that a unit is compiled for.
    fn all(unit: &'a Unit, cache: &Path) -> Vec<Job<'a>> {
        let machine_code = unit.machine_code.iter().map(|arch| (arch, false));
        let ptx = unit.ptx.iter().map(|arch| (arch, true));
        let job = |(architecture, ptx): (&'a Architecture, bool)| {
            let kind = if ptx { "compute" } else { "sm" };
            let name = format!("{kind}_{}", architecture.name());
            Job {
                unit,
                directory: cache.join(&unit.name).join(name),
                architecture,
                ptx,
            }
        };
        machine_code.chain(ptx).map(job).collect()
    }

    fn output(&self) -> PathBuf {
        let extension = if self.ptx { "ptx" } else { "cubin" };
        self.directory
            .join(format!("{}.{extension}", self.unit.name))
    }

    /// What the log and the machine code say of the kernels.
    fn usage(&self, log: &str) -> Result<Vec<Usage>, Error> {
        let mut all = usage(&self.unit.name, &self.architecture.name(), log);
        // Only Hopper has wgmma.
        if self.architecture.number == 90 {
            let path = self.output();
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
            }
        }
        Ok(all)
    }
}

fn create(directory: &Path) -> Result<(), Error> {
    fs::create_dir_all(directory).map_err(|source| Error::File {
        path: directory.into(),
        source,
    })
}

/// Runs a tool and gives what it wrote to standard output and error.
fn run(command: &mut Command) -> Result<(String, String), Error> {
    let failed = |output: String| Error::Tool {
        command: format!("{command:?}"),
        output,
    };
    let output = Command::new(command.get_program())
        .args(command.get_args())
        .output()
        .map_err(|error| failed(error.to_string()))?;
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|b| String::from_utf8_lossy(&b).into_owned());
    if output.status.success() {
        Ok((stdout, stderr))
    } else {
        Err(failed(stdout + &stderr))
    }
}

fn version(banner: &str) -> Option<(u32, u32)> {
    let (_, rest) = banner.split_once("release ")?;
    let (major, rest) = rest.split_once('.')?;
    let digits = rest
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(rest.len());
    Some((major.parse().ok()?, rest[..digits].parse().ok()?))
}

/// Reads ptxas' report.
fn usage(image: &str, architecture: &str, log: &str) -> Vec<Usage> {
    let mut all: Vec<Usage> = Vec::new();
    let number_before = |line: &str, what: &str| -> Option<u32> {
        let (head, _) = line.split_once(what)?;
        head.split_whitespace().last()?.parse().ok()
    };
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            all.push(Usage {
                image: image.to_string(),
                kernel: rest.split('\'').next().unwrap_or_default().to_string(),
                architecture: architecture.to_string(),
                registers: 0,
                stack_bytes: 0,
                spill_store_bytes: 0,
                spill_load_bytes: 0,
                static_shared_bytes: 0,
                warnings: Vec::new(),
                wgmma: None,
            });
            continue;
        }
        // ptxas names the function in a warning; else the one being compiled is meant.
        let named = all
            .iter()
            .position(|u| line.contains(&format!("'{}'", u.kernel)));
        let last = all.len().checked_sub(1);
        let Some(current) = named.or(last).and_then(|i| all.get_mut(i)) else {
            continue;
        };
        if line.contains("warning") || line.contains("(C7") {
            current.warnings.push(line.trim().to_string());
            continue;
        }
        let fields = [
            (" bytes stack frame", &mut current.stack_bytes),
            (" bytes spill stores", &mut current.spill_store_bytes),
            (" bytes spill loads", &mut current.spill_load_bytes),
            (" registers", &mut current.registers),
            (" bytes smem", &mut current.static_shared_bytes),
        ];
        for (what, field) in fields {
            if let Some(n) = number_before(line, what) {
                *field = n;
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_checked() {
        let names = |list| {
            parse_architectures(list)
                .map(|archs| archs.iter().map(Architecture::name).collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            names("120, 90a;80"),
            Ok(vec!["80".into(), "90a".into(), "120".into()])
        );
        assert_eq!(Architecture::parse("120").unwrap().capability(), "12.0");
        for bad in ["", "9.0", "sm_90", "90x", "90aa", "8", "a"] {
            let error = names(bad).unwrap_err();
            assert!(error.contains(&format!("contains {bad:?}")), "{error}");
        }
    }

    #[test]
    fn the_report_is_read() {
        let log = "\
ptxas info    : Compiling entry function 'rows' for 'sm_90a'
ptxas info    : Function properties for rows
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 29 registers, used 1 barriers, 16 bytes smem
ptxas warning : Registers are spilled to local memory in function 'rows', 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Compiling entry function 'any' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized in function 'rows'
ptxas info    : Used 40 registers, used 0 barriers
";
        let [rows, any] = usage("image", "90a", log).try_into().unwrap();
        assert_eq!(
            (rows.registers, rows.stack_bytes, rows.static_shared_bytes),
            (29, 8, 16)
        );
        assert_eq!((rows.spill_store_bytes, rows.spill_load_bytes), (4, 12));
        assert_eq!(rows.warnings.len(), 2);
        assert_eq!((any.registers, any.warnings.len()), (40, 0));
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(
            version("Cuda compilation tools, release 13.0, V13.0.88"),
            Some((13, 0))
        );
        assert_eq!(version("clang version 19"), None);
    }
}
