//! Reading parameter structs whose size the caller states.

use std::fmt;

use crate::error::{Error, Result, text};
use crate::ffi::check_pointer;

/// A C parameter struct: `struct_size` first, all zero the default of every other field.
///
/// # Safety
/// The type is `repr(C)`, begins with the `u32` field `struct_size`, and every bit pattern is a value of it.
pub(crate) unsafe trait Params: Copy {
    /// The smallest size that a caller may state: that of the struct when it first appeared.
    const MIN_SIZE: usize;

    /// Refuses what this version does not know, by the name of the field.
    fn check(&self, op: &'static str) -> Result<()>;
}

/// A field, or a struct embedded by value, with room for what newer versions may say there.
pub(crate) trait Field {
    /// Refuses what this version does not know; `name` is the way to the field.
    fn check(&self, op: &'static str, name: fmt::Arguments<'_>) -> Result<()>;
}

/// Reserved: a value other than zero may one day mean something.
impl Field for u32 {
    fn check(&self, op: &'static str, name: fmt::Arguments<'_>) -> Result<()> {
        if *self == 0 {
            return Ok(());
        }
        let problem = text!("is {self}, allowed: 0");
        Err(Error::invalid(op, text!("{name}"), problem))
    }
}

impl<const N: usize> Field for [u32; N] {
    fn check(&self, op: &'static str, name: fmt::Arguments<'_>) -> Result<()> {
        self.iter().try_for_each(|word| word.check(op, name))
    }
}

/// Declares that a struct is one of [`Params`], with the list of its fields that are [`Field`]s:
/// the reserved ones, tensors, rotations. `c_tests/generate.py` finds those that are missing.
///
/// The least size is that of version 0.2.0. Who lets a struct grow after that release states its
/// size there: `params!(unsloth_example_params, [reserved, x], min_size = 120)`.
macro_rules! params {
    ($t:ty, [$($field:ident),* $(,)?] $(, min_size = $min:expr)?) => {
        // SAFETY: repr(C), `struct_size` first (asserted), and only integers, floats and pointers inside.
        unsafe impl $crate::ffi::params::Params for $t {
            const MIN_SIZE: usize = {
                assert!(std::mem::offset_of!($t, struct_size) == 0);
                let known = size_of::<$t>();
                $(
                    assert!($min <= known);
                    let known = $min;
                )?
                known
            };

            #[allow(unused_variables)] // structs that have no such field
            fn check(&self, op: &'static str) -> $crate::error::Result<()> {
                $(
                    $crate::ffi::params::Field::check(
                        &self.$field,
                        op,
                        format_args!(stringify!($field)),
                    )?;
                )*
                Ok(())
            }
        }
    };
}
pub(crate) use params;

/// A copy of the caller's struct, fields beyond its stated size being zero. A larger struct, of a newer header, is accepted as
/// long as it asks for nothing this library does not know: the rest of it must be zero.
///
/// # Safety
/// `ptr` is NULL, or points to `struct_size` readable bytes, at least four.
pub(crate) unsafe fn read<T: Params>(op: &'static str, ptr: *const T) -> Result<T> {
    check_pointer(op, "params", ptr)?;
    // SAFETY: not NULL, aligned, and `struct_size` is the first field of every such struct.
    let stated = unsafe { ptr.cast::<u32>().read() } as usize;
    if stated < T::MIN_SIZE {
        let problem = text!("is {stated}, at least {} is needed", T::MIN_SIZE);
        return Err(Error::invalid(op, "struct_size", problem));
    }
    let known = size_of::<T>();
    if stated > known {
        const MAX_SIZE: usize = 1 << 16;
        if stated > MAX_SIZE {
            let problem = text!("is {stated}, above the maximum {MAX_SIZE}");
            return Err(Error::invalid(op, "struct_size", problem));
        }
        // SAFETY: the caller promises `stated` readable bytes.
        let rest =
            unsafe { std::slice::from_raw_parts(ptr.cast::<u8>().add(known), stated - known) };
        if rest.iter().any(|&b| b != 0) {
            let problem = text!(
                "is {stated}: fields past byte {known} are set, which this version does not know"
            );
            return Err(Error::unsupported(op, "struct_size", problem));
        }
    }
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: `min(stated, known)` bytes are readable there and fit here; every bit pattern is a value (Params).
    let value = unsafe {
        std::ptr::copy_nonoverlapping(
            ptr.cast::<u8>(),
            value.as_mut_ptr().cast(),
            stated.min(known),
        );
        value.assume_init()
    };
    value.check(op)?;
    Ok(value)
}

/// [`read`], of a struct that another one's field `name` points to.
///
/// # Safety
/// As [`read`].
pub(crate) unsafe fn read_field<T: Params>(
    op: &'static str,
    name: &'static str,
    ptr: *const T,
) -> Result<T> {
    check_pointer(op, name, ptr)?;
    // SAFETY: the caller's promise.
    unsafe { read(op, ptr) }.map_err(|error| error.inside(name))
}

/// Writes a result struct back, no further than the size the caller stated.
///
/// # Safety
/// `read` accepted `to`, and it points to `struct_size` writable bytes.
pub(crate) unsafe fn write<T: Params>(value: &T, to: *mut T) {
    // SAFETY: `struct_size` is the first field of every such struct; the caller promises that many writable bytes.
    unsafe {
        let stated = to.cast::<u32>().read() as usize;
        let known = size_of::<T>();
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>(),
            to.cast::<u8>(),
            stated.min(known),
        );
    }
}
