//! Checks of arguments, in the words of the error messages.

use std::fmt;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::layout::MAX_RANK;
use crate::tensor::{InOut, RawTensor, TensorMut};

/// A tensor argument of an operation, by name.
#[derive(Clone, Copy)]
pub(crate) struct Arg<'a> {
    op: &'static str,
    name: &'static str,
    tensor: &'a RawTensor,
}

impl<'a> Arg<'a> {
    pub fn new(op: &'static str, name: &'static str, tensor: &'a RawTensor) -> Self {
        Arg { op, name, tensor }
    }

    /// The rank is one of `allowed`.
    pub fn rank(self, allowed: &[usize]) -> Result<Self> {
        let rank = self.tensor.layout.rank();
        if allowed.contains(&rank) {
            return Ok(self);
        }
        Err(self.invalid(text!("has rank {rank}, allowed: {}", list(allowed))))
    }

    /// The rank is `allowed`, for a reason that a message gives.
    pub fn rank_as(self, allowed: usize, reason: &str) -> Result<Self> {
        let rank = self.tensor.layout.rank();
        if rank == allowed {
            return Ok(self);
        }
        Err(self.invalid(text!("has rank {rank}, allowed: {allowed}, {reason}")))
    }

    /// The rank is at least `least`.
    pub fn min_rank(self, least: usize) -> Result<Self> {
        let rank = self.tensor.layout.rank();
        if rank >= least {
            return Ok(self);
        }
        Err(self.invalid(text!("has rank {rank}, at least {least} is needed")))
    }

    /// The dtype is one of `allowed`.
    pub fn dtype(self, allowed: &[DType]) -> Result<Self> {
        let dtype = self.tensor.dtype;
        if allowed.contains(&dtype) {
            return Ok(self);
        }
        let problem = text!("has dtype {dtype}, allowed: {}", list(allowed));
        if !DType::ALL.contains(&dtype) {
            return Err(Error::unsupported(self.op, self.name, problem));
        }
        Err(self.invalid(problem))
    }

    /// The dtype equals that of another argument.
    pub fn dtype_of(self, other: Arg<'_>) -> Result<Self> {
        if self.tensor.dtype == other.tensor.dtype {
            return Ok(self);
        }
        Err(self.invalid(text!(
            "has dtype {}, {} has {}",
            self.tensor.dtype,
            other.name,
            other.tensor.dtype
        )))
    }

    /// The dtype equals that of another argument, or is f32.
    pub fn dtype_of_or_f32(self, other: Arg<'_>) -> Result<Self> {
        let (own, of_other) = (self.tensor.dtype, other.tensor.dtype);
        if own == DType::F32 {
            return Ok(self);
        }
        if own == of_other || of_other == DType::F32 {
            return self.dtype_of(other);
        }
        let name = other.name;
        Err(self.invalid(text!(
            "has dtype {own}, {name} has {of_other}; allowed: that or f32"
        )))
    }

    /// The shape is exactly `expected`.
    pub fn shape(self, expected: &[usize]) -> Result<Self> {
        let shape = self.tensor.layout.shape();
        if shape == expected {
            return Ok(self);
        }
        Err(self.invalid(text!("has shape {shape:?}, expected {expected:?}")))
    }

    /// The shape equals that of another argument.
    pub fn shape_of(self, other: Arg<'_>) -> Result<Self> {
        let (shape, expected) = (self.tensor.layout.shape(), other.tensor.layout.shape());
        if shape == expected {
            return Ok(self);
        }
        Err(self.invalid(text!(
            "has shape {shape:?}, {} has {expected:?}",
            other.name
        )))
    }

    /// Neighbours along the last dimension are neighbours in memory.
    pub fn last_contiguous(self) -> Result<Self> {
        if self.tensor.layout.is_last_contiguous() {
            return Ok(self);
        }
        let rank = self.tensor.layout.rank();
        Err(self.invalid(text!(
            "has stride {} along its last dimension, allowed: 1",
            self.tensor.layout.stride(rank.saturating_sub(1))
        )))
    }

    /// Rows are contiguous and, where the dtype is one of blocks, whole blocks that begin where one
    /// does.
    pub fn rows_in_blocks(self) -> Result<Self> {
        let arg = self.last_contiguous()?;
        let (dtype, layout) = (self.tensor.dtype, &self.tensor.layout);
        let (len, _) = dtype.block();
        let row = layout.dim(layout.rank().saturating_sub(1));
        if !row.is_multiple_of(len) {
            return Err(self.invalid(text!(
                "has rows of {row} elements, allowed for {dtype}: multiples of {len}"
            )));
        }
        if layout.is_in_blocks(len) {
            return Ok(arg);
        }
        Err(self.invalid(text!(
            "has shape {:?} with strides {:?}, allowed for {dtype}: rows that begin at multiples of {len}",
            layout.shape(),
            layout.strides()
        )))
    }

    /// Elements lie in row-major order without gaps.
    pub fn contiguous(self) -> Result<Self> {
        if self.tensor.layout.is_contiguous() {
            return Ok(self);
        }
        Err(self.invalid(text!(
            "has shape {:?} with strides {:?}, it must be contiguous",
            self.tensor.layout.shape(),
            self.tensor.layout.strides()
        )))
    }

    /// No element is written twice.
    pub fn writable(self) -> Result<Self> {
        if !self.tensor.layout.may_self_overlap() {
            return Ok(self);
        }
        Err(self.invalid(text!(
            "has shape {:?} with strides {:?}: elements of an output may not overlap",
            self.tensor.layout.shape(),
            self.tensor.layout.strides()
        )))
    }

    /// The data pointer is there and aligned to its dtype. Only for calls that touch data.
    pub fn data(self) -> Result<Self> {
        if self.tensor.layout.is_empty() {
            return Ok(self);
        }
        if self.tensor.ptr.is_null() {
            return Err(Error::NullPointer {
                op: self.op,
                argument: text!("data of {}", self.name).into(),
            });
        }
        let size = self.tensor.dtype.alignment();
        if (self.tensor.ptr as usize).is_multiple_of(size) {
            return Ok(self);
        }
        Err(self.invalid(text!(
            "has data at {:p}, which is not aligned to the {size} bytes of {}",
            self.tensor.ptr,
            self.tensor.dtype
        )))
    }

    /// Shares no memory with another argument, one of the two being written.
    pub fn disjoint(self, other: Arg<'_>) -> Result<Self> {
        if !self.tensor.overlaps(other.tensor) {
            return Ok(self);
        }
        Err(self.invalid(text!("overlaps {}", other.name)))
    }

    fn invalid(self, problem: String) -> Error {
        Error::invalid(self.op, self.name, problem)
    }
}

/// Checks of an in-out pair: the output matches its input in shape and dtype, has a contiguous last dimension, and overlaps
/// neither itself nor (unless in place) its input.
pub(crate) fn in_out(
    op: &'static str,
    names: (&'static str, &'static str),
    pair: &InOut<'_>,
) -> Result<()> {
    let (input, output) = (pair.input(), pair.output());
    let i = Arg::new(op, names.0, &input).last_contiguous()?;
    let o = Arg::new(op, names.1, &output)
        .dtype_of(i)?
        .shape_of(i)?
        .last_contiguous()?;
    o.writable()?;
    Ok(())
}

/// The gradient of a parameter is of any float dtype; f32 where it accumulates, as a sum over many
/// calls would lose in 16 bits what each adds.
pub(crate) fn parameter_gradient(gradient: Arg<'_>, accumulate: bool) -> Result<Arg<'_>> {
    let gradient = gradient.dtype(DType::FLOATS)?;
    if accumulate && gradient.tensor.dtype != DType::F32 {
        let dtype = gradient.tensor.dtype;
        let problem = text!("has dtype {dtype}, allowed with accumulate: f32");
        return Err(Error::invalid(gradient.op, gradient.name, problem));
    }
    Ok(gradient)
}

/// An output that may be absent, described once more: for a part of an operation, which it is the only
/// one to write.
pub(crate) fn described<'t>(tensor: &'t Option<TensorMut<'_>>) -> Option<TensorMut<'t>> {
    tensor.as_ref().map(|tensor| {
        let raw = tensor.raw();
        // SAFETY: the memory is lent to the whole, which lends it on.
        unsafe { TensorMut::from_raw(raw.ptr, raw.dtype, raw.layout) }
    })
}

/// The gradient of a parameter that may be absent, of the parameter's shape; it has no use without
/// the parameter.
pub(crate) fn gradient_like(
    op: &'static str,
    (name, gradient): (&'static str, Option<&TensorMut<'_>>),
    parameter: Option<&RawTensor>,
    accumulate: bool,
) -> Result<Option<RawTensor>> {
    let Some(gradient) = gradient.map(TensorMut::raw) else {
        return Ok(None);
    };
    let Some(parameter) = parameter else {
        let of = name.strip_prefix('d').unwrap_or(name);
        let problem = text!("is there, without {of} it has no use");
        return Err(Error::invalid(op, name, problem));
    };
    parameter_gradient(Arg::new(op, name, &gradient), accumulate)?
        .shape(parameter.layout.shape())?
        .last_contiguous()?
        .writable()?;
    Ok(Some(gradient))
}

/// A finite float within bounds.
pub(crate) fn finite(op: &'static str, name: &'static str, value: f32) -> Result<f32> {
    if value.is_finite() {
        return Ok(value);
    }
    Err(Error::invalid(
        op,
        name,
        text!("is {value}, a finite number is needed"),
    ))
}

/// "a, b, c" for messages.
pub(crate) fn list<T: fmt::Display>(items: &[T]) -> impl fmt::Display {
    struct List<'a, T>(&'a [T]);

    impl<T: fmt::Display> fmt::Display for List<'_, T> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            for (i, item) in self.0.iter().enumerate() {
                let comma = if i == 0 { "" } else { ", " };
                write!(f, "{comma}{item}")?;
            }
            Ok(())
        }
    }

    List(items)
}

/// A tensor's shape with another last size, in the room given: a call allocates nothing.
pub(crate) fn with_last<'a>(
    t: &RawTensor,
    size: usize,
    room: &'a mut [usize; MAX_RANK],
) -> &'a [usize] {
    let rank = t.layout.rank();
    room[..rank].copy_from_slice(t.layout.shape());
    if let Some(last) = room[..rank].last_mut() {
        *last = size;
    }
    &room[..rank]
}
