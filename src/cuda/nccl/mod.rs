//! NCCL: found at run time, where the program has it or the machine.
//!
//! A communicator works only with the library that made it. So what the caller names comes first, then a
//! library that the process has loaded, whoever did and however hidden; a fresh one is loaded only for
//! communicators that are made here.

mod bindings;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;

use crate::backend::NcclLibrary;
use crate::error::{Error, Result, text};
pub(super) use bindings::*;

/// A version of NCCL's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version(pub u32, pub u32, pub u32);

impl Version {
    /// Of the number that `ncclGetVersion` gives.
    fn from_code(code: u32) -> Version {
        // Up to 2.8 minor versions had one digit.
        let unit = if code < 10_000 { 1000 } else { 10_000 };
        Version(code / unit, code % unit / 100, code % 100)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// The library. It stays open: its own threads may outlive any owner.
#[derive(Clone, Copy)]
pub(super) struct Nccl {
    pub functions: Functions,
    pub version: Version,
    /// As `ncclGetVersion` gives it.
    pub version_code: i32,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl({})", self.version)
    }
}

const NAME: &str = "libnccl.so.2\0";

/// A library that was opened, whose symbols are looked up.
struct Opened(ManuallyDrop<libloading::Library>);

impl Opened {
    fn find(&self, name: &'static str) -> *mut c_void {
        // SAFETY: an address is taken, and not called here.
        unsafe { self.0.get::<*mut c_void>(name.as_bytes()) }
            .map_or(std::ptr::null_mut(), |symbol| *symbol)
    }
}

/// What the process has loaded by that name, or has linked.
#[cfg(unix)]
fn loaded() -> Option<Opened> {
    use libloading::os::unix::Library;
    let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD;
    // SAFETY: nothing is loaded, so no initialiser runs.
    let named = unsafe { Library::open(Some(NAME), flags) }.ok();
    let opened = |library: Library| Opened(ManuallyDrop::new(library.into()));
    named.map(opened).or_else(|| {
        let global = opened(Library::this());
        (!global.find("ncclGetVersion\0").is_null()).then_some(global)
    })
}

#[cfg(not(unix))]
fn loaded() -> Option<Opened> {
    None
}

fn open(name: &str) -> Option<Opened> {
    // SAFETY: opening NCCL runs its initialisers, which may run at any time and on any thread.
    let library = unsafe { libloading::Library::new(name) }.ok()?;
    Some(Opened(ManuallyDrop::new(library)))
}

fn unavailable(op: &'static str, reason: String) -> Error {
    Error::BackendUnavailable {
        op,
        backend: "nccl",
        reason,
    }
}

impl Nccl {
    /// The library that `source` names, or else the process's, or where `fresh` allows it the machine's.
    ///
    /// # Errors
    /// There is none, or it is none of NCCL's.
    pub fn find(op: &'static str, source: &NcclLibrary<'_>, fresh: bool) -> Result<Nccl> {
        if let Some(symbols) = source.symbols {
            return Nccl::of(op, |name| symbols.find(name));
        }
        let opened = match source.path {
            Some(path) => {
                let name = path.to_str().map_err(|_| {
                    Error::invalid(op, "library", "is not UTF-8, which a path is to be")
                })?;
                open(name).ok_or_else(|| unavailable(op, text!("{name} could not be loaded")))?
            }
            None => {
                let fresh = || if fresh { open(NAME) } else { None };
                loaded().or_else(fresh).ok_or_else(|| {
                    unavailable(op, text!("libnccl.so.2 is not loaded, and was not found"))
                })?
            }
        };
        Nccl::of(op, |name| opened.find(name))
    }

    fn of(op: &'static str, find: impl Fn(&'static str) -> *mut c_void) -> Result<Nccl> {
        // SAFETY: the library is NCCL's, or the caller promised that `find` gives its functions.
        let functions = unsafe { Functions::resolve(find) }
            .map_err(|missing| unavailable(op, text!("the library has no {missing}")))?;
        let mut code: c_int = 0;
        // SAFETY: valid for a write.
        let status = unsafe { (functions.get_version)(&mut code) };
        let version = Version::from_code(code.unsigned_abs());
        let nccl = Nccl {
            functions,
            version,
            version_code: code,
        };
        nccl.check(op, "ncclGetVersion", std::ptr::null_mut(), status)?;
        Ok(nccl)
    }

    /// A new id.
    pub fn new_id(&self, op: &'static str) -> Result<[u8; 128]> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: valid for a write.
        let status = unsafe { (self.functions.get_unique_id)(&mut id) };
        self.check(op, "ncclGetUniqueId", std::ptr::null_mut(), status)?;
        Ok(id.0)
    }

    /// Turns a result into an error that has the library's words; `comm` may be NULL.
    pub fn check(
        &self,
        op: &'static str,
        call: &'static str,
        comm: *mut c_void,
        status: Status,
    ) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        Err(self.error(op, call, comm, status))
    }

    pub fn error(
        &self,
        op: &'static str,
        call: &'static str,
        comm: *mut c_void,
        status: Status,
    ) -> Error {
        // SAFETY: NULL or a static string; the last error is the library's until its next.
        let (name, last) = unsafe {
            let last = self.functions.last_error.map(|last| last(comm));
            (
                said((self.functions.error_string)(status)),
                last.and_then(|last| said(last)),
            )
        };
        let name = name.unwrap_or("an error without a name");
        let (joint, last) = match last {
            Some(last) => (": ", last),
            None => ("", ""),
        };
        Error::comm(
            op,
            text!("failed: {call} gave {name} ({status}){joint}{last}"),
        )
    }

    /// A function that old versions lack.
    pub fn later<F>(
        &self,
        op: &'static str,
        function: Option<F>,
        name: &'static str,
        since: &'static str,
    ) -> Result<F> {
        function.ok_or_else(|| {
            let problem = text!(
                "is of NCCL {}, which has no {name}: {since} is needed",
                self.version
            );
            Error::unsupported(op, "comm", problem)
        })
    }
}

/// A string of the library's, unless it is empty.
///
/// # Safety
/// NULL or NUL-terminated, and stays for `'a`.
unsafe fn said<'a>(text: *const c_char) -> Option<&'a str> {
    if text.is_null() {
        return None;
    }
    // SAFETY: not NULL; the caller's promise.
    let text = unsafe { CStr::from_ptr(text) }.to_str().ok()?;
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_from_their_numbers() {
        for (code, version) in [
            (2407, Version(2, 4, 7)),
            (2804, Version(2, 8, 4)),
            (21005, Version(2, 10, 5)),
            (22803, Version(2, 28, 3)),
            (23007, Version(2, 30, 7)),
        ] {
            assert_eq!(Version::from_code(code), version);
        }
        assert!(Version(2, 4, 7) < Version(2, 7, 0) && Version(2, 10, 0) > Version(2, 9, 9));
        assert_eq!(Version(2, 28, 3).to_string(), "2.28.3");
    }
}
