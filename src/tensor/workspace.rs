//! Workspaces: scratch memory of the caller's.

use std::marker::PhantomData;

use super::{Place, RawTensor, TensorMut};
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::Layout;

/// Scratch memory that the caller owns and an operation may overwrite, aligned to [`Workspace::ALIGNMENT`].
#[derive(Debug)]
pub struct Workspace<'a> {
    ptr: *mut u8,
    size: usize,
    /// As a [`TensorRef`]'s.
    place: Option<Place>,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Workspace<'a> {
    /// Alignment that a workspace needs, in bytes. Allocations of this library and of CUDA have it.
    pub const ALIGNMENT: usize = 256;

    /// No workspace, for operations whose query answers zero.
    pub fn none() -> Self {
        Workspace {
            ptr: std::ptr::null_mut(),
            size: 0,
            place: None,
            memory: PhantomData,
        }
    }

    /// A workspace of raw memory.
    ///
    /// # Safety
    /// `size` bytes from `ptr` may be written by the device of the context it is used with, for
    /// `'a` and until work that was queued with it has run, and nothing else accesses them
    /// meanwhile.
    pub unsafe fn from_raw(ptr: *mut u8, size: usize) -> Self {
        Workspace {
            ptr,
            size,
            place: None,
            memory: PhantomData,
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    pub(crate) fn place(&self) -> Option<Place> {
        self.place
    }

    /// The workspace, known to be a device's memory.
    pub(crate) fn on(self, place: Place) -> Self {
        Workspace {
            place: Some(place),
            ..self
        }
    }

    /// Its first `size` bytes as a tensor, for checks of overlap; `None` for no bytes.
    pub(crate) fn as_tensor(&self, size: usize) -> Result<Option<TensorMut<'_>>> {
        if size == 0 {
            return Ok(None);
        }
        let layout = Layout::contiguous(&[size])?;
        // SAFETY: the memory is lent for as long as the workspace is, and has the size where it is
        // used, which `check_argument` finds.
        let tensor = unsafe { TensorMut::from_raw(self.ptr, DType::Bool, layout) };
        Ok(Some(match self.place {
            Some(place) => tensor.on(place),
            None => tensor,
        }))
    }

    /// Checks memory that is no scratch: `name` is what the operation calls it.
    pub(crate) fn check_argument(
        &self,
        op: &'static str,
        name: &'static str,
        required: usize,
    ) -> Result<()> {
        match self.check(op, required) {
            Ok(_) => Ok(()),
            Err(Error::WorkspaceTooSmall { provided, .. }) => {
                let problem = text!("has {provided} bytes, {required} are needed");
                Err(Error::invalid(op, name, problem))
            }
            Err(error) => Err(error.renamed(&[("workspace", name)])),
        }
    }

    /// The pointer, once size and alignment have been found sufficient for `required` bytes.
    pub(crate) fn check(&self, op: &'static str, required: usize) -> Result<*mut u8> {
        if self.size < required {
            return Err(Error::WorkspaceTooSmall {
                op,
                required,
                provided: self.size,
            });
        }
        if required == 0 {
            return Ok(self.ptr);
        }
        if self.ptr.is_null() {
            return Err(Error::NullPointer {
                op,
                argument: "workspace".into(),
            });
        }
        if !(self.ptr as usize).is_multiple_of(Self::ALIGNMENT) {
            return Err(Error::invalid(
                op,
                "workspace",
                text!("{:p} is not aligned to {} bytes", self.ptr, Self::ALIGNMENT),
            ));
        }
        Ok(self.ptr)
    }

    /// The part of it that an operation uses: what it needs or, where more was given, what `used` says of
    /// that. The rest is not looked at.
    pub(crate) fn scratch(
        &self,
        op: &'static str,
        needed: usize,
        used: impl FnOnce(usize) -> Result<usize>,
    ) -> Result<Scratch> {
        let mut size = needed;
        self.check(op, needed)?;
        if self.size > needed {
            size = used(self.size)?.clamp(needed, self.size);
        }
        if size == 0 {
            return Ok(Scratch::NONE);
        }
        Ok(Scratch {
            ptr: self.check(op, size)?,
            size,
        })
    }
}

/// Memory of a checked workspace, aligned to [`Workspace::ALIGNMENT`], that an operation may overwrite if it has use for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    pub ptr: *mut u8,
    pub size: usize,
}

impl Scratch {
    pub const NONE: Scratch = Scratch {
        ptr: std::ptr::null_mut(),
        size: 0,
    };

    /// What is left behind so many bytes; nothing, if there are not as many.
    pub fn behind(&self, bytes: usize) -> Scratch {
        match self.size.checked_sub(bytes) {
            Some(size) if size > 0 => Scratch {
                ptr: self.ptr.wrapping_add(bytes),
                size,
            },
            _ => Scratch::NONE,
        }
    }

    /// As a tensor, for overlap checks.
    pub fn raw(&self) -> Result<RawTensor> {
        Ok(RawTensor {
            ptr: self.ptr,
            dtype: DType::Bool,
            layout: Layout::contiguous(&[self.size])?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspace_checks() {
        assert!(Workspace::none().check("t", 0).is_ok());
        assert!(matches!(
            Workspace::none().check("t", 8),
            Err(Error::WorkspaceTooSmall {
                required: 8,
                provided: 0,
                ..
            })
        ));
    }
}
