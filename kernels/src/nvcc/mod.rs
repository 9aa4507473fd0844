//! The CUDA compiler: where it is, what it compiles anew, and what it reports.
//!
//! Every unit is compiled once per architecture, the longest first, each result kept beside the sources and the command that gave it;
//! it is compiled again only when one of these differs. `fatbinary` then joins a unit's results into one image, if one of them is new.
//!
//! | file | what it is for |
//! |-|-|
//! | `mod.rs` | finds the compiler, compiles units, joins images |
//! | `architecture` | what is compiled for |
//! | `job` | a unit for one architecture: compiled, or kept if nothing changed |
//! | `occupancy` | how many blocks of a kernel run at once |
//! | `report` | what ptxas says of kernels |

mod architecture;
mod job;
mod occupancy;
mod report;

pub use architecture::{Architecture, architectures};
use job::Job;
pub use occupancy::Occupancy;
pub use report::Usage;

use std::cmp::Reverse;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{env, fs};

use crate::Error;

/// What pip installs to give a complete compiler in `nvidia/cu13/bin`.
pub const PIP_PACKAGES: &str = "nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 \
     nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85";

/// Beside a unit's image: what that was joined of. It is not there while one of these is compiled.
const JOINED: &str = "image.txt";

/// What is compiled into one image.
#[derive(Clone, Debug)]
pub struct Unit {
    /// The image's name.
    pub name: String,
    /// Where, in the cache, its results are kept.
    pub folder: PathBuf,
    /// What is compiled.
    pub source: Source,
    /// Flags of the compiler beyond the usual.
    pub flags: Vec<String>,
    /// What it is compiled to machine code for.
    pub machine_code: Vec<Architecture>,
    /// That of these for which the image has PTX too, which later ones run.
    pub ptx: Option<Architecture>,
}

/// Where a unit's CUDA C++ is.
#[derive(Clone, Debug)]
pub enum Source {
    /// Here, whole.
    Text(String),
    /// In a file, which may include others.
    File {
        /// The file.
        path: PathBuf,
        /// Folders in which includes are looked for.
        include: Vec<PathBuf>,
    },
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
        // The longest first: none of them is left for the end, when others have nothing to do.
        let logs = in_parallel(&jobs, Job::cost, |job| self.run(job))?;
        let mut rest = jobs.iter().zip(&logs).peekable();
        let mut of_units = Vec::with_capacity(units.len());
        for unit in units {
            let (mut own, mut usage, mut cubins) = (Vec::new(), Vec::new(), Vec::new());
            while let Some((job, log)) = rest.next_if(|(j, _)| std::ptr::eq(j.unit, unit)) {
                usage.extend(job.usage(log)?);
                cubins.push(job.machine_code());
                own.push(job);
            }
            of_units.push((cache.join(&unit.folder), own, usage, cubins));
        }
        let join = |(folder, jobs, ..): &(PathBuf, Vec<_>, _, _)| self.join(folder, jobs);
        let fatbins = in_parallel(&of_units, |_| 0, join)?;
        let joined = fatbins.into_iter().zip(of_units);
        let compiled = |(fatbin, (_, _, usage, cubins))| Compiled {
            fatbin,
            cubins,
            usage,
        };
        Ok(joined.map(compiled).collect())
    }

    /// Joins a unit's results into one file, unless it is made of them already: compressing all takes half a minute.
    fn join(&self, directory: &Path, jobs: &[&Job<'_>]) -> Result<PathBuf, Error> {
        let fatbin = directory.join("image.fatbin");
        let stamp = directory.join(JOINED);
        let flags = ["-64", "--compress-mode=size"];
        let mut command = Command::new(&self.fatbinary);
        command.arg(format!("--create={}", fatbin.display()));
        command.args(flags);
        let mut text = flags.join(" ");
        let mut add = |kind: &str, arch: String, file: PathBuf| {
            let file = file.display();
            command.arg(format!("--image3=kind={kind},sm={arch},file={file}"));
            text += &format!("\n{kind} {arch}");
        };
        for job in jobs {
            let arch = job.architecture;
            add("elf", arch.name(), job.machine_code());
            if let Some(ptx) = job.ptx() {
                add("ptx", arch.number.to_string(), ptx);
            }
        }
        if holds(&stamp, &text) && fatbin.is_file() {
            return Ok(fatbin);
        }
        let _ = fs::remove_file(&stamp);
        run(&mut command)?;
        crate::write(&stamp, text.as_bytes())?;
        Ok(fatbin)
    }
}

/// What `work` makes of each item, the costliest first, as many at a time as Cargo allows jobs.
///
/// # Errors
/// The first that there is. The rest is not begun.
fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    cost: impl Fn(&T) -> usize,
    work: impl Fn(&T) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok());
    let threads = jobs
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1)
        .clamp(1, items.len().max(1));
    let next = AtomicUsize::new(0);
    let results: Vec<_> = items.iter().map(|_| Mutex::new(None)).collect();
    let mut order: Vec<_> = items.iter().zip(&results).collect();
    order.sort_by_key(|(item, _)| Reverse(cost(item)));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((item, slot)) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let result = work(item);
                    let failed = result.is_err();
                    if let Ok(mut slot) = slot.lock() {
                        *slot = Some(result);
                    }
                    if failed {
                        next.store(items.len(), Ordering::Relaxed);
                    }
                }
            });
        }
    });
    // After a failure the rest was not run: the failure is what there is to report.
    let done = results
        .into_iter()
        .filter_map(|slot| slot.into_inner().unwrap_or(None));
    done.collect()
}

/// Whether a file is this text.
fn holds(path: &Path, text: &str) -> bool {
    fs::read(path).is_ok_and(|old| old == text.as_bytes())
}

/// Makes a folder, and those that it is in.
pub(crate) fn create(directory: &Path) -> Result<(), Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_order_and_a_failure_is_told() {
        let work = |&number: &usize| match number {
            5 => Err(Error::NoCompiler),
            number => Ok(number * 2),
        };
        let doubled = in_parallel(&[1, 9, 4, 2], |&number| number, work);
        assert_eq!(doubled.unwrap(), [2, 18, 8, 4]);
        assert!(in_parallel(&[], |_| 0, work).unwrap().is_empty());
        let failed = in_parallel(&[1, 5, 2], |_| 0, work);
        assert!(matches!(failed, Err(Error::NoCompiler)));
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
