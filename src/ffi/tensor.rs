//! Tensors.

use std::borrow::Cow;
use std::ffi::c_void;
use std::fmt;

use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::ffi::params::{Field, params, read_field};
use crate::layout::{Layout, MAX_RANK};
use crate::tensor::{Activations, InOut, TensorMut, TensorRef, Workspace};

/// The greatest rank of a tensor.
pub const UNSLOTH_MAX_RANK: usize = 6;
const _: () = assert!(UNSLOTH_MAX_RANK == MAX_RANK);

/// The type of a tensor's elements. Zero is none, so that a zeroed tensor is recognised as absent.
pub type unsloth_dtype = u32;
/// IEEE binary32.
pub const UNSLOTH_DTYPE_F32: unsloth_dtype = 1;
/// IEEE binary16.
pub const UNSLOTH_DTYPE_F16: unsloth_dtype = 2;
/// bfloat16, the upper half of binary32.
pub const UNSLOTH_DTYPE_BF16: unsloth_dtype = 3;
/// 32-bit signed integer.
pub const UNSLOTH_DTYPE_I32: unsloth_dtype = 4;
/// 64-bit signed integer.
pub const UNSLOTH_DTYPE_I64: unsloth_dtype = 5;
/// One byte; zero is false, anything else is true.
pub const UNSLOTH_DTYPE_BOOL: unsloth_dtype = 6;
/// 8-bit float, 4 exponent bits with bias 7 and 3 of mantissa, up to 448, without infinities; 0x7f and
/// 0xff are NaN. Weights may be of it, with a scale that lies apart: `unsloth_quantize_forward` writes both; and
/// so may a KV cache, and attention's keys and values.
pub const UNSLOTH_DTYPE_F8E4M3: unsloth_dtype = 7;
/// 8-bit float, 5 exponent bits and 2 of mantissa. It has a value and a layout; every operation answers
/// `UNSLOTH_STATUS_UNSUPPORTED` for it.
pub const UNSLOTH_DTYPE_F8E5M2: unsloth_dtype = 8;
/// 8-bit signed integer, whose scale lies apart: `unsloth_quantize_forward` writes it.
pub const UNSLOTH_DTYPE_I8: unsloth_dtype = 9;
/// Ternary codes of 2 bits, weight + 1: 128 in 32 bytes, byte `p` holding those of `p`, `p + 32`,
/// `p + 64` and `p + 96` from its low bits up. Rows are a multiple of 128
/// elements. Scales lie apart: `unsloth_quantize_forward` writes both, and
/// `unsloth_weight_repack_forward` makes them of a file of BitNet's.
pub const UNSLOTH_DTYPE_TERNARY: unsloth_dtype = 10;
/// GGUF's Q8_0, blocks as in the file, as of all of GGUF's: 32 elements in 34 bytes. Weights and
/// tables of embeddings may be in blocks.
/// Shapes and strides are in elements; a row is whole blocks, one behind the other, and may begin at
/// any address: no alignment is asked for, and nothing past the last block is read.
pub const UNSLOTH_DTYPE_Q8_0: unsloth_dtype = 11;
/// GGUF's Q4_0: 32 elements in 18 bytes.
pub const UNSLOTH_DTYPE_Q4_0: unsloth_dtype = 12;
/// GGUF's Q4_1: 32 elements in 20 bytes.
pub const UNSLOTH_DTYPE_Q4_1: unsloth_dtype = 13;
/// GGUF's Q4_K: 256 elements in 144 bytes.
pub const UNSLOTH_DTYPE_Q4_K: unsloth_dtype = 14;
/// GGUF's Q6_K: 256 elements in 210 bytes.
pub const UNSLOTH_DTYPE_Q6_K: unsloth_dtype = 15;
/// GGUF's TQ1_0, -1 to 1 times a scale: 256 elements in 54 bytes.
pub const UNSLOTH_DTYPE_TQ1_0: unsloth_dtype = 16;
/// GGUF's TQ2_0, -1 to 1 times a scale: 256 elements in 66 bytes. A code of 3 is twice the scale.
pub const UNSLOTH_DTYPE_TQ2_0: unsloth_dtype = 17;
/// GGUF's Q2_0, -1 to 2 times a scale: 64 elements in 18 bytes.
pub const UNSLOTH_DTYPE_Q2_0: unsloth_dtype = 18;
/// GGUF's Q5_0: 32 elements in 22 bytes.
pub const UNSLOTH_DTYPE_Q5_0: unsloth_dtype = 19;
/// GGUF's Q5_1: 32 elements in 24 bytes.
pub const UNSLOTH_DTYPE_Q5_1: unsloth_dtype = 20;
/// GGUF's Q5_K: 256 elements in 176 bytes.
pub const UNSLOTH_DTYPE_Q5_K: unsloth_dtype = 21;

/// Of `unsloth_tensor.flags`: `strides` are meant as they are. Without it strides that are all zero
/// stand for row-major without gaps; with it they repeat one element, as NumPy's `broadcast_to`
/// does.
pub const UNSLOTH_TENSOR_STRIDED: u32 = 1;

/// Of the `flags` of a weight in blocks: what it multiplies stays as it is. Without it an operation
/// may round that to 16 bits, which makes products of few rows faster: each 32 neighbours of a row to
/// multiples of one scale. Other tensors have no use for it.
pub const UNSLOTH_TENSOR_FLOAT_ACTIVATIONS: u32 = 2;

/// Of the `flags` of a weight in blocks: what it multiplies may be rounded to 8 bits, each 32 neighbours of
/// a row to multiples of one scale, as engines for CPUs often do. That is done for more than eight rows by AVX-512,
/// and for any number by AVX2 where it is faster; an engine reads prompts 1.3 to 1.8 times as fast by AVX-512. The
/// mean square of errors is below 5e-5 of that of the results. All other products, and those of several weights, as of
/// a gate and up, of which not each has the flag, are as without it. A weight has only one of it and
/// `UNSLOTH_TENSOR_FLOAT_ACTIVATIONS`. Other tensors have no use for it.
pub const UNSLOTH_TENSOR_INT8_ACTIVATIONS: u32 = 8;

/// Of the `flags` of a weight, or of the gains of a norm that a product takes (`x_norm`): a promise that
/// nothing writes it, or its scales, until what is queued with it has run, neither work that is queued before,
/// on any stream, nor the host. Products of few rows then read it ahead, while the kernels before them on the
/// stream still run, which makes a decoding step faster. For weights of inference, once they are loaded
/// and that has been waited for; not for those that an optimizer updates. Other tensors have no use for
/// it.
pub const UNSLOTH_TENSOR_CONSTANT: u32 = 4;

/// A view of memory that the caller owns. A zeroed one is absent, where a parameter is optional.
///
/// A tensor may have no elements (a size of zero), and `data` is then not read. Queries
/// (`unsloth_*_supported`, `unsloth_*_workspace_size`) never look at `data`, so it may be NULL
/// there. `UNSLOTH_TENSOR` makes one.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_tensor {
    /// Address of the first element, aligned to the dtype (blocks to nothing): host memory for the CPU backend, device memory for CUDA.
    pub data: *mut c_void,
    /// One of `UNSLOTH_DTYPE_*`.
    pub dtype: unsloth_dtype,
    /// Number of dimensions, 1 to `UNSLOTH_MAX_RANK`; 0 if the tensor is absent.
    pub rank: u32,
    /// Sizes of the `rank` dimensions, outermost first, in elements.
    pub shape: [i64; UNSLOTH_MAX_RANK],
    /// Distances between neighbours along each dimension, in elements, not negative. All zero means
    /// row-major without gaps, unless `flags` has `UNSLOTH_TENSOR_STRIDED`.
    pub strides: [i64; UNSLOTH_MAX_RANK],
    /// Scales and zero points that lie apart from the data, read by the call; NULL for plain dtypes and
    /// for blocks that hold their own, and of codes where all scales are 1.
    pub quantization: *const unsloth_quantization,
    /// `UNSLOTH_TENSOR_*`, or zero.
    pub flags: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

/// How the elements of a tensor become numbers: `(element - zero) * scale`. The weights of
/// `linear`, `mlp` and `attention_block` may have one where they are i8, ternary or f8e4m3, with f32 scales
/// `[s]`, contiguous, of which each is that of as many rows, and without `zero`; and so may attention's
/// keys and values where they are f8e4m3, with one scale, or one for each of their heads. Everything else
/// is answered by `UNSLOTH_STATUS_UNSUPPORTED`.
///
/// The shape of `scale` and of `zero` says their granularity, for a matrix `[n, k]`: `[1]` one for
/// all, `[n]` one for each row, `[n, k/g]` one for each group of `g` along a row, `[n/a, k/b]` one
/// for each tile of `a` by `b`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct unsloth_quantization {
    /// `sizeof(unsloth_quantization)`.
    pub struct_size: u32,
    /// Zero.
    pub reserved: u32,
    /// Factors, any float dtype. Absent: all ones.
    pub scale: unsloth_tensor,
    /// Optional: what elements are for zero; like `scale` or of integers.
    pub zero: unsloth_tensor,
}

params!(unsloth_quantization, [reserved, scale, zero]);

impl unsloth_quantization {
    /// That of a tensor: its scales.
    pub(crate) fn of(tensor: &TensorRef<'_>) -> unsloth_quantization {
        let mut quantization = unsloth_quantization {
            struct_size: size_of::<unsloth_quantization>() as u32,
            reserved: 0,
            scale: unsloth_tensor::ABSENT,
            zero: unsloth_tensor::ABSENT,
        };
        if let Some(scales) = tensor.scales() {
            // SAFETY: a view that nothing reads through here.
            let scales =
                unsafe { TensorRef::from_raw(scales.raw().ptr, DType::F32, scales.raw().layout) };
            quantization.scale = unsloth_tensor::of(&scales);
        }
        quantization
    }
}

impl Field for unsloth_tensor {
    fn check(&self, op: &'static str, name: fmt::Arguments<'_>) -> Result<()> {
        self.reserved.check(op, format_args!("{name}.reserved"))?;
        const ROUNDED: u32 = UNSLOTH_TENSOR_FLOAT_ACTIVATIONS | UNSLOTH_TENSOR_INT8_ACTIVATIONS;
        const KNOWN: u32 = UNSLOTH_TENSOR_STRIDED | ROUNDED | UNSLOTH_TENSOR_CONSTANT;
        if self.flags & !KNOWN != 0 {
            let problem = text!(
                "is {:#x}, allowed: 0 or a sum of 1 (strided), 2 (float_activations), 4 (constant) and 8 (int8_activations)",
                self.flags
            );
            return Err(Error::invalid(op, text!("{name}.flags"), problem));
        }
        if self.flags & ROUNDED == ROUNDED {
            let problem = text!(
                "is {:#x}, allowed: only one of 2 (float_activations) and 8 (int8_activations)",
                self.flags
            );
            return Err(Error::invalid(op, text!("{name}.flags"), problem));
        }
        // A mistake, not an absence.
        if self.rank == 0 && !self.data.is_null() {
            let problem = text!("has data but rank 0, allowed: 1 to {MAX_RANK}");
            return Err(Error::invalid(op, text!("{name}"), problem));
        }
        let of_codes = DType::from_raw(self.dtype)
            .is_some_and(|dtype| dtype.is_quantized() || dtype == DType::F8E4M3);
        if !self.quantization.is_null() && !of_codes {
            return Err(no_quantization(op, name));
        }
        match DType::from_raw(self.dtype).filter(|dtype| dtype.is_reserved()) {
            None => Ok(()),
            Some(dtype) => Err(reserved_dtype(op, text!("{name}"), dtype)),
        }
    }
}

impl Default for unsloth_tensor {
    fn default() -> Self {
        Self::ABSENT
    }
}

fn no_quantization(op: &'static str, name: impl fmt::Display) -> Error {
    let problem = "is set: only weights that are i8, ternary or f8e4m3, and keys and values that are \
                   f8e4m3, take scales that lie apart";
    Error::unsupported(op, text!("{name}.quantization"), problem)
}

fn reserved_dtype(op: &'static str, name: impl Into<Cow<'static, str>>, dtype: DType) -> Error {
    let problem = text!("has dtype {dtype}, which no operation of this version takes");
    Error::unsupported(op, name, problem)
}

/// The dtype, if operations take it; `name` has it.
pub(crate) fn implemented(op: &'static str, name: &'static str, dtype: DType) -> Result<DType> {
    if dtype.is_reserved() {
        return Err(reserved_dtype(op, name, dtype));
    }
    Ok(dtype)
}

pub(crate) fn layout_of(
    op: &'static str,
    name: &'static str,
    t: &unsloth_tensor,
) -> Result<(DType, Layout)> {
    let rank = t.rank as usize;
    if rank > MAX_RANK {
        let problem = text!("has rank {rank}, above the maximum {MAX_RANK}");
        return Err(Error::invalid(op, name, problem));
    }
    let dtype = DType::from_raw(t.dtype).ok_or_else(|| {
        let problem = text!("has dtype {}, which does not exist", t.dtype);
        Error::invalid(op, name, problem)
    })?;
    let dtype = implemented(op, name, dtype)?;
    let convert = |what: &str, values: &[i64]| -> Result<[usize; MAX_RANK]> {
        let mut out = [0; MAX_RANK];
        for (i, (to, &from)) in out.iter_mut().zip(values).enumerate() {
            *to = usize::try_from(from).map_err(|_| {
                Error::invalid(
                    op,
                    name,
                    text!("has {what} {from} in dimension {i}, negative"),
                )
            })?;
        }
        Ok(out)
    };
    let shape = convert("size", &t.shape[..rank])?;
    let strides = convert("stride", &t.strides[..rank])?;
    let row_major = t.flags & UNSLOTH_TENSOR_STRIDED == 0;
    let layout = if row_major && strides[..rank].iter().all(|&s| s == 0) {
        Layout::contiguous(&shape[..rank])
    } else {
        Layout::strided(&shape[..rank], &strides[..rank])
    };
    let layout = layout.map_err(|_| {
        let problem = text!(
            "has shape {:?} with strides {:?}: it overflows the address space",
            &t.shape[..rank],
            &t.strides[..rank]
        );
        Error::invalid(op, name, problem)
    })?;
    // The last byte's address must exist too.
    if (t.data as usize)
        .checked_add(dtype.row_bytes(layout.span()))
        .is_none()
    {
        let problem = text!("at {:p} reaches past the end of the address space", t.data);
        return Err(Error::invalid(op, name, problem));
    }
    Ok((dtype, layout))
}

impl unsloth_tensor {
    /// A tensor that is left out, all zero.
    pub(crate) const ABSENT: unsloth_tensor = unsloth_tensor {
        data: std::ptr::null_mut(),
        dtype: 0,
        rank: 0,
        shape: [0; UNSLOTH_MAX_RANK],
        strides: [0; UNSLOTH_MAX_RANK],
        quantization: std::ptr::null(),
        flags: 0,
        reserved: [0; 3],
    };

    /// The C view of a tensor.
    pub(crate) fn of(tensor: &TensorRef<'_>) -> unsloth_tensor {
        let raw = tensor.raw();
        let mut out = unsloth_tensor {
            data: raw.ptr.cast(),
            dtype: raw.dtype as u32,
            rank: raw.layout.rank() as u32,
            ..unsloth_tensor::ABSENT
        };
        if raw.layout.strides().iter().all(|&s| s == 0) {
            out.flags |= UNSLOTH_TENSOR_STRIDED;
        }
        match tensor.activations() {
            Activations::Eight => out.flags |= UNSLOTH_TENSOR_INT8_ACTIVATIONS,
            Activations::Sixteen => {}
            Activations::Float => out.flags |= UNSLOTH_TENSOR_FLOAT_ACTIVATIONS,
        }
        if tensor.is_constant() {
            out.flags |= UNSLOTH_TENSOR_CONSTANT;
        }
        // Sizes and strides fit (see Layout).
        for (to, &from) in out.shape.iter_mut().zip(raw.layout.shape()) {
            *to = from as i64;
        }
        for (to, &from) in out.strides.iter_mut().zip(raw.layout.strides()) {
            *to = from as i64;
        }
        out
    }

    /// Whether an optional tensor is left out.
    pub(crate) fn is_absent(&self) -> bool {
        self.rank == 0
    }

    /// An optional input.
    ///
    /// # Safety
    /// As [`TensorRef::from_raw`].
    pub(crate) unsafe fn optional_input<'a>(
        &self,
        op: &'static str,
        name: &'static str,
    ) -> Result<Option<TensorRef<'a>>> {
        if self.is_absent() {
            return Ok(None);
        }
        let (dtype, layout) = layout_of(op, name, self)?;
        // SAFETY: the caller's promise.
        let mut tensor =
            unsafe { TensorRef::from_raw(self.data.cast_const().cast(), dtype, layout) };
        if !self.quantization.is_null() {
            // SAFETY: the caller's promise holds for what the tensor points to.
            let scales = unsafe { scales_from(op, self.quantization) };
            if let Some(scales) = scales.map_err(|error| error.inside(name))? {
                let attached = tensor.with_scales(scales);
                tensor = attached.map_err(|error| error.within(op).inside(name))?;
            }
        }
        if self.flags & UNSLOTH_TENSOR_FLOAT_ACTIVATIONS != 0 {
            tensor = tensor.with_float_activations();
        }
        if self.flags & UNSLOTH_TENSOR_INT8_ACTIVATIONS != 0 {
            tensor = tensor.with_int8_activations();
        }
        if self.flags & UNSLOTH_TENSOR_CONSTANT != 0 {
            tensor = tensor.with_constant_elements();
        }
        Ok(Some(tensor))
    }

    /// A required input.
    ///
    /// # Safety
    /// As [`TensorRef::from_raw`].
    pub(crate) unsafe fn input<'a>(
        &self,
        op: &'static str,
        name: &'static str,
    ) -> Result<TensorRef<'a>> {
        // SAFETY: the caller's promise.
        unsafe { self.optional_input(op, name) }?.ok_or_else(|| absent(op, name))
    }

    /// An optional output.
    ///
    /// # Safety
    /// As [`TensorMut::from_raw`].
    pub(crate) unsafe fn optional_output<'a>(
        &self,
        op: &'static str,
        name: &'static str,
    ) -> Result<Option<TensorMut<'a>>> {
        if self.is_absent() {
            return Ok(None);
        }
        let (dtype, layout) = layout_of(op, name, self)?;
        if !self.quantization.is_null() {
            return Err(no_quantization(op, name));
        }
        // SAFETY: the caller's promise.
        Ok(Some(unsafe {
            TensorMut::from_raw(self.data.cast(), dtype, layout)
        }))
    }

    /// A required output.
    ///
    /// # Safety
    /// As [`TensorMut::from_raw`].
    pub(crate) unsafe fn output<'a>(
        &self,
        op: &'static str,
        name: &'static str,
    ) -> Result<TensorMut<'a>> {
        // SAFETY: the caller's promise.
        unsafe { self.optional_output(op, name) }?.ok_or_else(|| absent(op, name))
    }
}

/// The scales of a tensor's quantization, if it has any.
///
/// # Safety
/// `quantization` is NULL or points to `struct_size` readable bytes; its tensors are as
/// [`TensorRef::from_raw`] asks.
unsafe fn scales_from<'a>(
    op: &'static str,
    quantization: *const unsloth_quantization,
) -> Result<Option<TensorRef<'a>>> {
    // SAFETY: the caller's promise.
    let quantization = unsafe { read_field(op, "quantization", quantization) }?;
    if !quantization.zero.is_absent() {
        let problem = "is there: codes of this version are 0 for zero";
        return Err(Error::unsupported(op, "quantization.zero", problem));
    }
    // SAFETY: the caller's promise.
    unsafe { quantization.scale.optional_input(op, "quantization.scale") }
}

pub(crate) fn absent(op: &'static str, name: &'static str) -> Error {
    Error::invalid(op, name, "is absent (rank 0), it is required")
}

/// An input and the output it becomes: in place if both are the same tensor or the output is absent.
///
/// # Safety
/// As [`TensorRef::from_raw`] and [`TensorMut::from_raw`].
pub(crate) unsafe fn in_out<'a>(
    op: &'static str,
    names: (&'static str, &'static str),
    input: &unsloth_tensor,
    output: &unsloth_tensor,
) -> Result<Option<InOut<'a>>> {
    // SAFETY: the caller's promise.
    let (i, o) = unsafe {
        (
            input.optional_input(op, names.0)?,
            output.optional_output(op, names.1)?,
        )
    };
    match (i, o) {
        (None, None) => Ok(None),
        (None, Some(_)) => Err(absent(op, names.0)),
        // SAFETY: the caller's promise: without an output the input is the one written.
        (Some(_), None) => Ok(Some(InOut::InPlace(unsafe { input.output(op, names.0) }?))),
        (Some(i), Some(o)) if i.raw().same_as(&o.raw()) && !i.raw().ptr.is_null() => {
            Ok(Some(InOut::InPlace(o)))
        }
        (Some(i), Some(o)) => Ok(Some(InOut::Apart {
            input: i,
            output: o,
        })),
    }
}

/// The caller's workspace.
///
/// # Safety
/// As [`Workspace::from_raw`].
pub(crate) unsafe fn workspace_from<'a>(
    op: &'static str,
    workspace: *mut c_void,
    size: usize,
) -> Result<Workspace<'a>> {
    if (workspace as usize).checked_add(size).is_none() {
        let problem = text!("{size} from {workspace:p} overflows the address space");
        return Err(Error::invalid(op, "workspace_size", problem));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { Workspace::from_raw(workspace.cast(), size) })
}
