//! Tensors: borrowed views of memory that a caller owns.
//!
//! A [`TensorRef`] is read, a [`TensorMut`] is written. Safely they are made from slices, for the
//! CPU backend, and from [`Buffer`](crate::Buffer)s. These know whose memory they view, and a call
//! refuses memory that is not of its context's device: a slice given to a GPU would be read after
//! its borrow has ended. Views of other memory, or from C, are made by the `unsafe` constructors,
//! whose contract is the usual one: the memory is valid for the lifetime of the view, until queued
//! work that uses it has run, on the device of the context that the view is used with.

mod raw;
mod scales;
mod workspace;

use std::fmt;
use std::marker::PhantomData;

use crate::backend::Backend;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result, text};
use crate::layout::Layout;
pub(crate) use raw::RawTensor;
pub(crate) use scales::Scales;
pub(crate) use workspace::Scratch;
pub use workspace::Workspace;

/// The device whose memory a view is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub backend: Backend,
    pub ordinal: i32,
}

impl Place {
    pub const HOST: Place = Place {
        backend: Backend::Cpu,
        ordinal: 0,
    };
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.backend {
            Backend::Cpu => f.write_str("host memory"),
            backend => write!(f, "memory of {backend} device {}", self.ordinal),
        }
    }
}

/// To how few bits products may round what they multiply with a weight in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activations {
    Eight,
    Sixteen,
    /// They do not round it.
    Float,
}

/// A tensor that is read.
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a> {
    raw: RawTensor,
    /// `None` where who made the view promised that it is the context's.
    place: Option<Place>,
    /// Of a weight in blocks.
    activations: Activations,
    /// See [`TensorRef::with_constant_elements`].
    constant: bool,
    /// See [`TensorRef::with_scales`].
    scales: Option<Scales>,
    memory: PhantomData<&'a [u8]>,
}

/// A tensor that is written.
#[derive(Debug)]
pub struct TensorMut<'a> {
    raw: RawTensor,
    /// As a [`TensorRef`]'s.
    place: Option<Place>,
    memory: PhantomData<&'a mut [u8]>,
}

fn check_span(len: usize, layout: &Layout) -> Result<()> {
    if layout.span() <= len {
        return Ok(());
    }
    Err(Error::invalid(
        "tensor",
        "data",
        text!(
            "has {len} elements, shape {:?} with strides {:?} spans {}",
            layout.shape(),
            layout.strides(),
            layout.span()
        ),
    ))
}

impl<'a> TensorRef<'a> {
    /// A contiguous view of `data`, for contexts of the CPU backend.
    ///
    /// # Errors
    /// `data` is shorter than `shape`, or `shape` is refused by [`Layout::contiguous`].
    pub fn from_slice<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        Self::from_slice_with_layout(data, Layout::contiguous(shape)?)
    }

    /// A view of `data` with any layout, for contexts of the CPU backend.
    ///
    /// # Errors
    /// `data` is shorter than the layout's span.
    pub fn from_slice_with_layout<T: Element>(data: &'a [T], layout: Layout) -> Result<Self> {
        check_span(data.len(), &layout)?;
        let ptr = data.as_ptr().cast_mut().cast();
        Ok(TensorRef {
            raw: RawTensor {
                ptr,
                dtype: T::DTYPE,
                layout,
            },
            place: Some(Place::HOST),
            activations: Activations::Sixteen,
            constant: false,
            scales: None,
            memory: PhantomData,
        })
    }

    /// The tensor, whose elements are codes, as these times `scales`: f32, contiguous `[n]`. Of a weight of
    /// [`DType::QUANTIZED`] each is that of as many rows: one for all, one for each row, or one for each
    /// of equal parts; of keys or values of [`DType::F8E4M3`] there is one for all, or one for each head.
    /// It has no meaning for other tensors.
    ///
    /// # Errors
    /// The scales are not such.
    pub fn with_scales(self, scales: TensorRef<'a>) -> Result<Self> {
        let (op, name) = ("tensor", "scales");
        let layout = &scales.raw.layout;
        if scales.raw.dtype != DType::F32 {
            let problem = text!("has dtype {}, allowed: f32", scales.raw.dtype);
            return Err(Error::invalid(op, name, problem));
        }
        if layout.rank() != 1 || !layout.is_contiguous() {
            let problem = text!(
                "has shape {:?} with strides {:?}, allowed: one contiguous dimension",
                layout.shape(),
                layout.strides()
            );
            return Err(Error::unsupported(op, name, problem));
        }
        let scales = Scales {
            ptr: scales.raw.ptr.cast(),
            len: layout.dim(0),
            place: scales.place,
        };
        Ok(TensorRef {
            scales: Some(scales),
            ..self
        })
    }

    /// The tensor, f32 `[n]` and contiguous, as the scales of another.
    pub(crate) fn as_scales(&self) -> Scales {
        Scales {
            ptr: self.raw.ptr.cast(),
            len: self.raw.layout.num_elements(),
            place: self.place,
        }
    }

    pub(crate) fn scales(&self) -> Option<Scales> {
        self.scales
    }

    /// The tensor with these scales, which were checked where they come from.
    pub(crate) fn scaled(self, scales: Option<Scales>) -> Self {
        TensorRef { scales, ..self }
    }

    /// The weight, as one whose products are of activations as they are. Products with a weight in
    /// blocks may otherwise round them to 16 bits: see [`ops::linear`](crate::ops::linear). It has
    /// no meaning for other tensors. It takes the place of [`with_int8_activations`](Self::with_int8_activations).
    pub fn with_float_activations(self) -> Self {
        TensorRef {
            activations: Activations::Float,
            ..self
        }
    }

    /// The weight, as one whose products may be of activations that are rounded to 8 bits, where those with a weight in
    /// blocks otherwise have 16 at least. Some are faster then, on the CPU, and less exact: see
    /// [`ops::linear`](crate::ops::linear). It has no meaning for other tensors. It takes the place of [`with_float_activations`](Self::with_float_activations).
    pub fn with_int8_activations(self) -> Self {
        TensorRef {
            activations: Activations::Eight,
            ..self
        }
    }

    pub(crate) fn activations(&self) -> Activations {
        self.activations
    }

    /// The weight, or the gains of a product's norm, as what nothing writes, nor its scales, until what is queued
    /// with it has run: neither work that is queued before, nor what runs beside it. A product of few rows may
    /// then read it ahead, while the kernels before it on the stream still run. It has no meaning for
    /// other tensors, nor on the CPU.
    pub fn with_constant_elements(self) -> Self {
        TensorRef {
            constant: true,
            ..self
        }
    }

    pub(crate) fn is_constant(&self) -> bool {
        self.constant
    }

    /// A view of raw memory. `ptr` may be NULL where only a query is made.
    ///
    /// # Safety
    /// Unless `ptr` is NULL, every element of `layout` is initialised memory, readable by the
    /// device of the context that the view is used with, for `'a` and until work that was queued
    /// with it has run, and not written meanwhile.
    pub unsafe fn from_raw(ptr: *const u8, dtype: DType, layout: Layout) -> Self {
        TensorRef {
            raw: RawTensor {
                ptr: ptr.cast_mut(),
                dtype,
                layout,
            },
            place: None,
            activations: Activations::Sixteen,
            constant: false,
            scales: None,
            memory: PhantomData,
        }
    }
}

impl<'a> TensorMut<'a> {
    /// A contiguous view of `data`, for contexts of the CPU backend.
    ///
    /// # Errors
    /// `data` is shorter than `shape`, or `shape` is refused by [`Layout::contiguous`].
    pub fn from_slice<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        Self::from_slice_with_layout(data, Layout::contiguous(shape)?)
    }

    /// A view of `data` with any layout, for contexts of the CPU backend.
    ///
    /// # Errors
    /// `data` is shorter than the layout's span.
    pub fn from_slice_with_layout<T: Element>(data: &'a mut [T], layout: Layout) -> Result<Self> {
        check_span(data.len(), &layout)?;
        let ptr = data.as_mut_ptr().cast();
        Ok(TensorMut {
            raw: RawTensor {
                ptr,
                dtype: T::DTYPE,
                layout,
            },
            place: Some(Place::HOST),
            memory: PhantomData,
        })
    }

    /// A view of raw memory. `ptr` may be NULL where only a query is made.
    ///
    /// # Safety
    /// Unless `ptr` is NULL, every element of `layout` is memory that the device of the context
    /// that the view is used with may write, for `'a` and until work that was queued with it has
    /// run, and nothing else accesses it meanwhile.
    pub unsafe fn from_raw(ptr: *mut u8, dtype: DType, layout: Layout) -> Self {
        TensorMut {
            raw: RawTensor { ptr, dtype, layout },
            place: None,
            memory: PhantomData,
        }
    }

    /// A shorter borrow of the same tensor.
    pub fn reborrow(&mut self) -> TensorMut<'_> {
        TensorMut {
            raw: self.raw,
            place: self.place,
            memory: PhantomData,
        }
    }

    /// The tensor as an input.
    pub fn as_ref(&self) -> TensorRef<'_> {
        TensorRef {
            raw: self.raw,
            place: self.place,
            activations: Activations::Sixteen,
            constant: false,
            scales: None,
            memory: PhantomData,
        }
    }
}

macro_rules! views {
    ($name:ident) => {
        impl<'a> $name<'a> {
            pub(crate) fn raw(&self) -> RawTensor {
                self.raw
            }

            pub(crate) fn place(&self) -> Option<Place> {
                self.place
            }

            /// The view, known to be of a device's memory.
            pub(crate) fn on(self, place: Place) -> Self {
                $name {
                    place: Some(place),
                    ..self
                }
            }

            /// Address of the first element, on the device of the memory that is viewed.
            pub fn as_ptr(&self) -> *const u8 {
                self.raw.ptr
            }

            /// Element type.
            pub fn dtype(&self) -> DType {
                self.raw.dtype
            }

            /// Shape and strides.
            pub fn layout(&self) -> &Layout {
                &self.raw.layout
            }

            /// Sizes of the dimensions.
            pub fn shape(&self) -> &[usize] {
                self.raw.layout.shape()
            }

            /// The view with dimensions `a` and `b` exchanged.
            ///
            /// # Errors
            /// See [`Layout::transposed`].
            pub fn transposed(self, a: usize, b: usize) -> Result<Self> {
                let layout = self.raw.layout.transposed(a, b)?;
                Ok($name {
                    raw: self.raw.offset(layout, 0),
                    ..self
                })
            }

            /// The view of `len` entries from `start` along dimension `dim`.
            ///
            /// # Errors
            /// See [`Layout::narrowed`]; the range begins or ends inside a block of the dtype, or
            /// inside the rows of a scale.
            pub fn narrowed(self, dim: usize, start: usize, len: usize) -> Result<Self> {
                let raw = self.raw.narrowed(dim, start, len)?;
                let rows = self.raw.layout.dim(0);
                let whole = $name { raw, ..self };
                if dim == 0 {
                    return whole.of_rows(rows, start, len);
                }
                Ok(whole)
            }

            /// The view with dimension `dim` split into `sizes`.
            ///
            /// # Errors
            /// See [`Layout::unflattened`].
            pub fn unflattened(self, dim: usize, sizes: &[usize]) -> Result<Self> {
                let layout = self.raw.layout.unflattened(dim, sizes)?;
                Ok($name {
                    raw: self.raw.offset(layout, 0),
                    ..self
                })
            }
        }
    };
}

impl TensorRef<'_> {
    /// With the scales of some of the `rows` that there were.
    fn of_rows(self, rows: usize, start: usize, len: usize) -> Result<Self> {
        let scales = self.scales.map(|scales| scales.of_rows(rows, start, len));
        Ok(TensorRef {
            scales: scales.transpose()?,
            ..self
        })
    }
}

impl TensorMut<'_> {
    /// As a [`TensorRef`]'s: what is written has no scales.
    fn of_rows(self, _: usize, _: usize, _: usize) -> Result<Self> {
        Ok(self)
    }
}

views!(TensorRef);
views!(TensorMut);

/// What an operation transforms: one tensor in place, or an input into a separate output of the same shape and dtype.
#[derive(Debug)]
pub enum InOut<'a> {
    /// Read and overwritten.
    InPlace(TensorMut<'a>),
    /// Read from one, written to the other; they do not overlap.
    Apart {
        /// Read.
        input: TensorRef<'a>,
        /// Written.
        output: TensorMut<'a>,
    },
}

impl InOut<'_> {
    pub(crate) fn input(&self) -> RawTensor {
        match self {
            InOut::InPlace(t) => t.raw(),
            InOut::Apart { input, .. } => input.raw(),
        }
    }

    pub(crate) fn output(&self) -> RawTensor {
        self.written().raw()
    }

    pub(crate) fn written(&self) -> &TensorMut<'_> {
        match self {
            InOut::InPlace(t) => t,
            InOut::Apart { output, .. } => output,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_must_cover_the_layout() {
        let data = [0f32; 6];
        assert!(TensorRef::from_slice(&data, &[2, 3]).is_ok());
        let error = TensorRef::from_slice(&data, &[2, 4]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "tensor: data has 6 elements, shape [2, 4] with strides [4, 1] spans 8"
        );
        let layout = Layout::strided(&[2, 2], &[4, 1]).unwrap();
        assert!(TensorRef::from_slice_with_layout(&data, layout).is_ok());
    }

    #[test]
    fn rows_of_blocks_take_the_bytes_of_their_blocks() {
        let ptr = std::ptr::without_provenance_mut(0x1000);
        let raw = |dtype, layout| RawTensor { ptr, dtype, layout };
        let bytes = |t: &RawTensor| (t.byte_range().start - 0x1000, t.byte_range().end - 0x1000);
        let weight = raw(DType::Q4K, Layout::contiguous(&[3, 512]).unwrap());
        assert_eq!(bytes(&weight), (0, 3 * 2 * 144));
        assert_eq!(bytes(&weight.narrowed(0, 1, 2).unwrap()), (288, 864));
        let (left, right) = (
            weight.narrowed(1, 0, 256).unwrap(),
            weight.narrowed(1, 256, 256).unwrap(),
        );
        assert_eq!(bytes(&left), (0, 2 * 288 + 144));
        assert_eq!(bytes(&right), (144, 864));
        assert!(!left.overlaps(&right) && left.overlaps(&weight) && right.overlaps(&weight));
        for (start, len) in [(0, 128), (128, 256)] {
            assert!(weight.narrowed(1, start, len).is_err(), "{start} {len}");
        }
        let cut = Layout::strided(&[3, 256], &[300, 1]).unwrap();
        assert!(!cut.is_in_blocks(256) && cut.is_in_blocks(1));
    }

    #[test]
    fn overlap_is_by_byte_range() {
        let data = [0f32; 8];
        let whole = TensorRef::from_slice(&data, &[8]).unwrap();
        let head = whole.narrowed(0, 0, 4).unwrap().raw();
        let tail = whole.narrowed(0, 4, 4).unwrap().raw();
        assert!(!head.overlaps(&tail) && head.overlaps(&whole.raw()));
        let empty = whole.narrowed(0, 4, 0).unwrap().raw();
        assert!(!empty.overlaps(&whole.raw()));
    }

    #[test]
    fn parts_of_a_packed_tensor_interleave() {
        let data = [0f32; 3 * 8];
        let rows = TensorRef::from_slice(&data, &[3, 8]).unwrap();
        let part = |start, len| rows.narrowed(1, start, len).unwrap().raw();
        assert!(!part(0, 5).overlaps(&part(5, 3)) && !part(5, 3).overlaps(&part(0, 5)));
        assert!(part(0, 5).overlaps(&part(4, 4)) && part(4, 4).overlaps(&part(0, 5)));
        assert!(part(0, 5).overlaps(&rows.raw()));
        let heads = |start, n| {
            let part = rows.narrowed(1, start, 2 * n).unwrap();
            part.unflattened(1, &[n, 2]).unwrap().raw()
        };
        assert!(!heads(0, 2).overlaps(&heads(4, 1)) && heads(0, 2).overlaps(&heads(2, 2)));
        // Rows of different pitches meet somewhere.
        let strided = |pitch| {
            let layout = Layout::strided(&[3, 2], &[pitch, 1]).unwrap();
            TensorRef::from_slice_with_layout(&data, layout)
                .unwrap()
                .raw()
        };
        assert!(strided(5).overlaps(&strided(4)));
    }
}
