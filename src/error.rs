//! Errors: what can go wrong, in words that name the argument, its value and what is allowed.

use std::borrow::Cow;
use std::fmt;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. Nothing was written to any output when one of the argument errors is returned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A pointer that must not be NULL is.
    #[error("{op}: {argument} is NULL")]
    NullPointer {
        /// The operation that was called.
        op: &'static str,
        /// The argument's name.
        argument: Cow<'static, str>,
    },
    /// An argument has a value that no backend could accept.
    #[error("{op}: {argument} {problem}")]
    InvalidArgument {
        /// The operation that was called.
        op: &'static str,
        /// The argument's name.
        argument: Cow<'static, str>,
        /// The value and what is allowed, as the end of a sentence that starts with the name.
        problem: String,
    },
    /// The arguments make sense, but this backend or build has no implementation for them.
    #[error("{op}: {argument} {problem}")]
    Unsupported {
        /// The operation that was called.
        op: &'static str,
        /// The argument's name.
        argument: Cow<'static, str>,
        /// The value and what is supported.
        problem: String,
    },
    /// The caller's workspace is smaller than the size the workspace query answers.
    #[error("{op}: workspace_size is {provided} bytes, {required} are required")]
    WorkspaceTooSmall {
        /// The operation that was called.
        op: &'static str,
        /// The exact size needed, in bytes.
        required: usize,
        /// The size given, in bytes.
        provided: usize,
    },
    /// Memory could not be allocated, or the context's limit would be passed.
    #[error("{op}: {requested} bytes could not be allocated: {reason}")]
    OutOfMemory {
        /// The operation that was called.
        op: &'static str,
        /// The size asked for, in bytes.
        requested: u64,
        /// What stood in the way.
        reason: String,
    },
    /// A KV cache has too few free pages; every sequence is as it was.
    #[error("{op}: {requested} pages are needed, {free} of {capacity} are free")]
    OutOfPages {
        /// The operation that was called.
        op: &'static str,
        /// Pages the call needs.
        requested: usize,
        /// Pages that are free.
        free: usize,
        /// Pages in the cache.
        capacity: usize,
    },
    /// A handle that was never created, belongs to another type, or has been destroyed.
    #[error(
        "{op}: {argument} is not a live {kind} handle ({handle:#x}){}",
        if *.forked { ": it was made before this process was forked, and a child makes its own" } else { "" }
    )]
    InvalidHandle {
        /// The operation that was called.
        op: &'static str,
        /// The argument's name.
        argument: &'static str,
        /// The type the handle should have.
        kind: &'static str,
        /// The value given.
        handle: usize,
        /// Whether a parent of this process made it, before the fork.
        forked: bool,
    },
    /// The backend is not compiled in, or its driver is missing.
    #[error("{op}: the {backend} backend is unavailable: {reason}")]
    BackendUnavailable {
        /// The operation that was called.
        op: &'static str,
        /// The name of the backend asked for.
        backend: &'static str,
        /// Why it cannot be used.
        reason: String,
    },
    /// No compiled kernel image fits the device.
    #[error("{op}: device {device} {problem}")]
    UnsupportedDevice {
        /// The operation that was called.
        op: &'static str,
        /// The device ordinal.
        device: i32,
        /// Its capability, and the list of those supported.
        problem: String,
    },
    /// The CUDA driver, or a library of CUDA's, reported an error.
    #[error(
        "{op}: {call} failed with {name} ({code}){}",
        if *.sticky { "; the device's context is lost, every later call on it fails until the process ends" } else { "" }
    )]
    Cuda {
        /// The operation that was called.
        op: &'static str,
        /// The function that was called.
        call: &'static str,
        /// The error's name.
        name: String,
        /// Its code.
        code: i32,
        /// Whether the device's context is lost with it, as after a fault in a kernel.
        sticky: bool,
    },
    /// The ranks of a group did not come together, or NCCL reported an error.
    #[error("{op}: comm {problem}")]
    Comm {
        /// The operation that was called.
        op: &'static str,
        /// What is wrong with the group, as the end of a sentence.
        problem: String,
    },
    /// A bug in this library.
    #[error("{op}: internal error: {message}")]
    Internal {
        /// The operation that was called.
        op: &'static str,
        /// What was found broken.
        message: String,
    },
}

/// `format!` for the texts of errors; see [`text_of`].
macro_rules! text {
    ($($text:tt)*) => {
        $crate::error::text_of(format_args!($($text)*))
    };
}
pub(crate) use text;

/// A text that is made without ending the process where the host has no memory for it: it is cut
/// instead.
pub(crate) fn text_of(text: impl fmt::Display) -> String {
    struct Careful(String);

    impl fmt::Write for Careful {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0.try_reserve(text.len()).map_err(|_| fmt::Error)?;
            self.0.push_str(text);
            Ok(())
        }
    }

    let mut careful = Careful(String::new());
    let _ = fmt::write(&mut careful, format_args!("{text}"));
    careful.0
}

impl Error {
    /// An [`Error::InvalidArgument`]; `problem` continues a sentence that starts with the argument's name.
    pub(crate) fn invalid(
        op: &'static str,
        argument: impl Into<Cow<'static, str>>,
        problem: impl fmt::Display,
    ) -> Self {
        Error::InvalidArgument {
            op,
            argument: argument.into(),
            problem: text_of(problem),
        }
    }

    /// An [`Error::OutOfMemory`] of the host's memory.
    pub(crate) fn out_of_host_memory(op: &'static str, requested: usize) -> Self {
        const REASON: &str = "the host has too little free memory";
        // The reason too, where there is memory for it.
        let mut reason = String::new();
        if reason.try_reserve(REASON.len()).is_ok() {
            reason.push_str(REASON);
        }
        Error::OutOfMemory {
            op,
            requested: requested as u64,
            reason,
        }
    }

    /// The same error as one of `name`, an operation that called the one it comes from.
    pub(crate) fn within(mut self, name: &'static str) -> Self {
        match &mut self {
            Error::NullPointer { op, .. }
            | Error::InvalidArgument { op, .. }
            | Error::Unsupported { op, .. }
            | Error::WorkspaceTooSmall { op, .. }
            | Error::OutOfMemory { op, .. }
            | Error::OutOfPages { op, .. }
            | Error::InvalidHandle { op, .. }
            | Error::BackendUnavailable { op, .. }
            | Error::UnsupportedDevice { op, .. }
            | Error::Cuda { op, .. }
            | Error::Comm { op, .. }
            | Error::Internal { op, .. } => *op = name,
        }
        self
    }

    /// The same error of an argument that the caller knows by another name: pairs of inner and outer names.
    pub(crate) fn renamed(mut self, names: &[(&str, &'static str)]) -> Self {
        if let Error::NullPointer { argument, .. }
        | Error::InvalidArgument { argument, .. }
        | Error::Unsupported { argument, .. } = &mut self
            && let Some((_, outer)) = names.iter().find(|(inner, _)| argument == inner)
        {
            *argument = Cow::Borrowed(*outer);
        }
        self
    }

    /// The same error of an argument that is part of `outer`, such as an entry of a list.
    pub(crate) fn inside(mut self, outer: impl fmt::Display) -> Self {
        if let Error::NullPointer { argument, .. }
        | Error::InvalidArgument { argument, .. }
        | Error::Unsupported { argument, .. } = &mut self
        {
            let joined = match argument.strip_prefix("data of ") {
                Some(inner) => text!("data of {outer}.{inner}"),
                None => text!("{outer}.{argument}"),
            };
            *argument = joined.into();
        }
        self
    }

    /// An [`Error::Comm`]; `problem` continues a sentence that starts with the group.
    pub(crate) fn comm(op: &'static str, problem: impl fmt::Display) -> Self {
        Error::Comm {
            op,
            problem: text_of(problem),
        }
    }

    /// An [`Error::Unsupported`]; `problem` continues a sentence that starts with the argument's name.
    pub(crate) fn unsupported(
        op: &'static str,
        argument: impl Into<Cow<'static, str>>,
        problem: impl fmt::Display,
    ) -> Self {
        Error::Unsupported {
            op,
            argument: argument.into(),
            problem: text_of(problem),
        }
    }
}
