//! The CUDA backend of a build without it: it has no values, so that what is above it needs no second
//! version.

use std::ffi::c_void;

use crate::backend::{
    Allocation, Backend, CopyKind, Device, DeviceInfo, Implementation, NcclLibrary, ProductShape,
    Stream, Upload,
};
use crate::error::{Error, Result, text};
use crate::problem::{Plan, Plans};
use crate::tensor::Scratch;

/// There is none.
#[derive(Debug)]
pub(crate) enum Cuda {}

/// An event of the backend that is not there.
#[derive(Debug)]
pub(crate) enum Event {}

impl Event {
    pub fn ordinal(&self) -> i32 {
        match *self {}
    }

    pub fn record(&self, _: &'static str, _: Stream) -> Result<()> {
        match *self {}
    }

    pub fn is_done(&self, _: &'static str) -> Result<bool> {
        match *self {}
    }

    pub fn synchronize(&self, _: &'static str) -> Result<()> {
        match *self {}
    }

    pub fn milliseconds_since(&self, _: &'static str, _: &Event) -> Result<f32> {
        match *self {}
    }
}

pub(crate) mod collective {
    use super::{Cuda, unavailable};
    use crate::backend::{NcclLibrary, Stream};
    use crate::error::Result;

    /// A rank of a group of GPUs, of which there are none.
    #[derive(Debug)]
    pub(crate) enum Comm {}

    pub(crate) fn new_id(op: &'static str, _: &NcclLibrary<'_>) -> Result<[u8; 128]> {
        Err(unavailable(op))
    }

    impl Comm {
        pub fn rank(&self) -> usize {
            match *self {}
        }

        pub fn size(&self) -> usize {
            match *self {}
        }

        pub fn version_code(&self) -> i32 {
            match *self {}
        }

        pub fn chunk_rows(&self, _: usize, _: usize) -> usize {
            match *self {}
        }

        pub fn warm_up(&self, _: &'static str, _: &Cuda, _: Stream) -> Result<()> {
            match *self {}
        }

        pub fn slot_bytes(&self) -> usize {
            match *self {}
        }

        pub fn make_slots(
            &self,
            _: &'static str,
            _: &Cuda,
            _: Option<usize>,
            _: Stream,
        ) -> Result<bool> {
            match *self {}
        }

        pub fn alloc(&self, _: &'static str, _: &Cuda, _: usize) -> Result<Option<*mut u8>> {
            match *self {}
        }

        pub fn free(&self, _: &'static str, _: *mut u8) -> Result<bool> {
            match *self {}
        }

        pub fn abort(&self, _: &'static str) -> Result<()> {
            match *self {}
        }

        pub fn health(&self, _: &'static str) -> Result<()> {
            match *self {}
        }
    }
}

fn unavailable(op: &'static str) -> Error {
    Error::BackendUnavailable {
        op,
        backend: Backend::Cuda.name(),
        reason: text!("this build does not contain it"),
    }
}

/// Number of devices.
pub(crate) fn device_count(op: &'static str) -> Result<i32> {
    Err(unavailable(op))
}

/// What a device is.
pub(crate) fn device_info(op: &'static str, _: i32) -> Result<DeviceInfo> {
    Err(unavailable(op))
}

impl Cuda {
    pub fn new(op: &'static str, _: i32) -> Result<Cuda> {
        Err(unavailable(op))
    }

    pub fn join(
        &self,
        _: &'static str,
        _: &NcclLibrary<'_>,
        _: [u8; 128],
        _: (usize, usize),
    ) -> Result<collective::Comm> {
        match *self {}
    }

    /// # Safety
    /// None: it cannot be called.
    pub unsafe fn borrow(
        &self,
        _: &'static str,
        _: &NcclLibrary<'_>,
        _: *mut c_void,
    ) -> Result<collective::Comm> {
        match *self {}
    }

    pub fn create_event(&self, _: &'static str, _: bool) -> Result<Event> {
        match *self {}
    }

    pub fn wait_event(&self, _: &'static str, _: Stream, _: &Event) -> Result<()> {
        match *self {}
    }

    /// # Safety
    /// None: it cannot be called.
    pub unsafe fn copy_peer(
        &self,
        _: &'static str,
        _: *mut u8,
        _: &Cuda,
        _: *const u8,
        _: usize,
        _: Stream,
    ) -> Result<()> {
        match *self {}
    }
}

impl<P> Plans<P> for Cuda {
    type Plan<'a> = Never;

    fn plan(&self, _: P) -> Result<Never> {
        match *self {}
    }
}

/// The plan of a backend that is not there.
pub(crate) enum Never {}

impl Plan for Never {
    fn implementation(&self) -> Implementation {
        match *self {}
    }

    fn launch(&self, _: Scratch, _: Stream) -> Result<()> {
        match *self {}
    }
}

impl Device for Cuda {
    fn backend(&self) -> Backend {
        match *self {}
    }

    fn ordinal(&self) -> i32 {
        match *self {}
    }

    fn alloc(&self, _: &'static str, _: usize) -> Result<Allocation> {
        match *self {}
    }

    unsafe fn alloc_async(&self, _: &'static str, _: usize, _: Stream) -> Result<Allocation> {
        match *self {}
    }

    unsafe fn free(&self, _: &'static str, _: Allocation) -> Result<()> {
        match *self {}
    }

    unsafe fn free_async(&self, _: &'static str, _: Allocation, _: Stream) -> Result<()> {
        match *self {}
    }

    fn pool_size(&self, _: &'static str) -> Result<u64> {
        match *self {}
    }

    fn trim_pool(&self, _: &'static str, _: usize) -> Result<()> {
        match *self {}
    }

    unsafe fn copy(
        &self,
        _: &'static str,
        _: *mut u8,
        _: *const u8,
        _: usize,
        _: CopyKind,
        _: Stream,
    ) -> Result<()> {
        match *self {}
    }

    unsafe fn upload(
        &self,
        _: &'static str,
        _: *mut u8,
        _: *const u8,
        _: usize,
        _: Stream,
    ) -> Result<()> {
        match *self {}
    }

    fn staging(&self, _: &'static str, _: usize) -> Result<Box<dyn Upload>> {
        match *self {}
    }

    unsafe fn set(&self, _: &'static str, _: *mut u8, _: u8, _: usize, _: Stream) -> Result<()> {
        match *self {}
    }

    fn check_stream(&self, _: &'static str, _: Stream) -> Result<()> {
        match *self {}
    }

    fn warm_up(&self, _: &'static str, _: &[ProductShape]) -> Result<()> {
        match *self {}
    }

    fn synchronize(&self, _: &'static str, _: Stream) -> Result<()> {
        match *self {}
    }

    fn synchronize_device(&self, _: &'static str) -> Result<()> {
        match *self {}
    }

    fn create_stream(&self, _: &'static str) -> Result<Stream> {
        match *self {}
    }

    unsafe fn destroy_stream(&self, _: &'static str, _: Stream) -> Result<()> {
        match *self {}
    }

    fn is_capturing(&self, _: &'static str, _: Stream) -> Result<bool> {
        match *self {}
    }
}
