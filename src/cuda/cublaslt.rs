//! cuBLASLt: opened at run time where there is one, for products of many rows.
//!
//! Its descriptors are made on the stack for each call, which is cheap; its choice of an algorithm is not, and is remembered.

use std::collections::hash_map::DefaultHasher;
use std::ffi::{c_int, c_void};
use std::hash::{Hash, Hasher};
use std::sync::OnceLock;

use crate::context::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result};

/// `cublasStatus_t`.
type Status = c_int;
type HandlePtr = *mut c_void;

const SUCCESS: Status = 0;
/// What a call gives that an algorithm does not serve.
const INVALID_VALUE: Status = 7;
const NOT_SUPPORTED: Status = 15;

/// `cublasComputeType_t`: products and sums in f32, without TF32.
const COMPUTE_32F: c_int = 68;
/// `cudaDataType_t`.
const R_32F: c_int = 0;
const R_16F: c_int = 2;
const R_16BF: c_int = 14;
/// `cublasOperation_t`.
const OP_T: c_int = 1;
/// `cublasLtEpilogue_t`: the bias has an element per row of the (column-major) result.
const EPILOGUE_BIAS: c_int = 4;

/// `cublasLtMatmulDescAttributes_t`.
const DESC_TRANSA: c_int = 3;
const DESC_EPILOGUE: c_int = 7;
const DESC_BIAS_POINTER: c_int = 8;
/// `cublasLtMatmulPreferenceAttributes_t`; the alignments of A, B, C and D follow each other.
const PREFERENCE_MAX_WORKSPACE: c_int = 1;
const PREFERENCE_REDUCTION_SCHEMES: c_int = 3;
const PREFERENCE_ALIGNMENT_A: c_int = 5;
/// `cublasLtReductionScheme_t`: partial sums stay f32.
const REDUCTION_COMPUTE_TYPE: u32 = 2;

/// Room for any of the library's descriptors, which it fills itself and which differ in size between versions.
#[repr(C, align(16))]
struct Opaque([u64; 64]);

impl Opaque {
    const SIZE: usize = size_of::<Opaque>();

    fn new() -> Opaque {
        Opaque([0; 64])
    }

    fn ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }
}

/// `cublasLtMatmulAlgo_t`.
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
struct HeuristicResult {
    algorithm: Algorithm,
    workspace_size: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

macro_rules! functions {
    ($($method:ident = $symbol:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        struct Functions {
            $($method: unsafe extern "C" fn($($type),*) -> Status,)*
        }

        impl Functions {
            fn resolve(library: &libloading::Library) -> Option<Functions> {
                Some(Functions {
                    // SAFETY: the type is that of the function in CUDA's headers.
                    $($method: unsafe { *library.get(stringify!($symbol)).ok()? },)*
                })
            }
        }
    };
}

functions! {
    create = cublasLtCreate(handle: *mut HandlePtr);
    destroy = cublasLtDestroy(handle: HandlePtr);
    desc_init = cublasLtMatmulDescInit_internal(desc: *mut c_void, size: usize, compute: c_int, scale: c_int);
    desc_set = cublasLtMatmulDescSetAttribute(desc: *mut c_void, attribute: c_int, value: *const c_void, size: usize);
    layout_init = cublasLtMatrixLayoutInit_internal(layout: *mut c_void, size: usize, dtype: c_int, rows: u64, columns: u64, stride: i64);
    preference_init = cublasLtMatmulPreferenceInit_internal(preference: *mut c_void, size: usize);
    preference_set = cublasLtMatmulPreferenceSetAttribute(preference: *mut c_void, attribute: c_int, value: *const c_void,
        size: usize);
    heuristic = cublasLtMatmulAlgoGetHeuristic(handle: HandlePtr, desc: *mut c_void, a: *mut c_void, b: *mut c_void, c: *mut c_void,
        d: *mut c_void, preference: *mut c_void, requested: c_int, results: *mut HeuristicResult, found: *mut c_int);
    matmul = cublasLtMatmul(handle: HandlePtr, desc: *mut c_void, alpha: *const c_void, a: *const c_void, a_layout: *mut c_void,
        b: *const c_void, b_layout: *mut c_void, beta: *const c_void, c: *const c_void, c_layout: *mut c_void, d: *mut c_void,
        d_layout: *mut c_void, algorithm: *const Algorithm, workspace: *mut c_void, workspace_size: usize, stream: *mut c_void);
}

/// The library's functions, if there is one. It stays open: its own threads may outlive any owner.
fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    let open = || {
        // Of the versions known to have these functions, the newest first; then whatever the linker's path calls so.
        for name in [
            "libcublasLt.so.13",
            "libcublasLt.so.12",
            "libcublasLt.so",
            "cublasLt64_13.dll",
            "cublasLt64_12.dll",
        ] {
            // SAFETY: opening the library runs its initialisers, which may run at any time and on any thread.
            if let Ok(library) = unsafe { libloading::Library::new(name) }
                && let Some(functions) = Functions::resolve(&library)
            {
                std::mem::forget(library);
                return Some(functions);
            }
        }
        None
    };
    FUNCTIONS.get_or_init(open).as_ref()
}

/// `out = x Wᵀ + bias + residual`, all row-major, of one dtype; strides between rows in elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub dtype: DType,
    pub rows: usize,
    pub in_features: usize,
    pub out_features: usize,
    pub x: usize,
    pub x_stride: usize,
    pub weight: usize,
    pub weight_stride: usize,
    pub bias: Option<usize>,
    /// Address and stride.
    pub residual: Option<(usize, usize)>,
    pub out: usize,
    pub out_stride: usize,
}

/// What the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 3],
    strides: [usize; 4],
    /// Dtype, whether there are bias and residual, and the alignments of the pointers.
    traits: u32,
}

/// Alignments of more bytes than this serve no algorithm better.
const WIDEST: u32 = 16;

impl Product {
    fn pointers(&self) -> [usize; 4] {
        let (residual, _) = self.residual.unwrap_or((self.out, 0));
        [self.weight, self.x, residual, self.out]
    }

    fn alignments(&self) -> [u32; 4] {
        self.pointers()
            .map(|address| 1 << address.trailing_zeros().min(WIDEST.ilog2()))
    }

    /// The key of this product and of those with nearly as many rows, which share an algorithm.
    fn key(&self) -> Key {
        let alignments = self.alignments();
        let aligned = alignments.iter().fold(0, |bits, a| bits << 5 | a);
        let flags = u32::from(self.bias.is_some()) | u32::from(self.residual.is_some()) << 1;
        Key {
            sizes: [rounded_rows(self.rows), self.in_features, self.out_features],
            strides: [
                self.weight_stride,
                self.x_stride,
                self.residual.map_or(0, |(_, stride)| stride),
                self.out_stride,
            ],
            traits: self.dtype as u32 | flags << 4 | aligned << 8,
        }
    }
}

/// Rows up to the next eighth of their power of two.
fn rounded_rows(rows: usize) -> usize {
    let step = 1 << rows.max(8).ilog2().saturating_sub(3);
    rows.next_multiple_of(step)
}

/// Descriptors of a product.
struct Descriptors {
    desc: Opaque,
    weight: Opaque,
    x: Opaque,
    residual: Opaque,
    out: Opaque,
}

/// Shapes whose algorithms are remembered.
const SLOTS: usize = 1024;
/// Slots that are looked at for one shape.
const PROBES: usize = 8;

/// What was chosen for a key; `None` if nothing serves it. Written once, so that readers need no lock.
type Slot = OnceLock<(Key, Option<Algorithm>)>;

/// A handle on one device, with the algorithms that were chosen there.
pub(super) struct Library {
    functions: &'static Functions,
    handle: HandlePtr,
    /// By hash of the key. A shape that finds no slot is chosen for at each call.
    chosen: Box<[Slot]>,
}

impl Library {
    /// The library on the device of the current context; `None` if there is none or it does not start there.
    pub fn open() -> Option<Library> {
        let functions = functions()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the handle is valid for a write.
        if unsafe { (functions.create)(&mut handle) } != SUCCESS {
            return None;
        }
        Some(Library {
            functions,
            handle,
            chosen: (0..SLOTS).map(|_| Slot::new()).collect(),
        })
    }

    /// Gives the handle back. Its device's context is current, and it is not used again.
    pub fn close(&mut self) {
        // SAFETY: made by `open`; the owner's promise.
        unsafe { (self.functions.destroy)(self.handle) };
    }

    /// Queues a product, of at least one element in each dimension; `false` if the library has no algorithm for it.
    ///
    /// # Safety
    /// The pointers are valid on the current context's device until the work has run, and the stream is live and of it.
    pub unsafe fn multiply(&self, op: &'static str, p: &Product, stream: Stream) -> Result<bool> {
        let mut d = self.describe(op, p, p.rows)?;
        let key = p.key();
        let Some(algorithm) = self.remembered(op, p, key)? else {
            return Ok(false);
        };
        // SAFETY: the caller's promise.
        let mut status = unsafe { self.run(p, &mut d, &algorithm, stream) };
        if matches!(status, INVALID_VALUE | NOT_SUPPORTED) && key.sizes[0] != p.rows {
            // The algorithm of the rounded shape does not serve this one.
            let Some(algorithm) = self.choose(op, p, p.rows)? else {
                return Ok(false);
            };
            // SAFETY: the caller's promise.
            status = unsafe { self.run(p, &mut d, &algorithm, stream) };
        }
        check(op, "cublasLtMatmul", status)?;
        Ok(true)
    }

    /// # Safety
    /// As [`Library::multiply`].
    unsafe fn run(
        &self,
        p: &Product,
        d: &mut Descriptors,
        algorithm: &Algorithm,
        stream: Stream,
    ) -> Status {
        let [weight, x, residual, out] =
            p.pointers().map(std::ptr::without_provenance_mut::<c_void>);
        let alpha = 1.0f32;
        let beta = if p.residual.is_some() { 1.0f32 } else { 0.0 };
        // SAFETY: the descriptors say what lies at the pointers; the rest is the caller's promise.
        unsafe {
            (self.functions.matmul)(
                self.handle,
                d.desc.ptr(),
                (&raw const alpha).cast(),
                weight,
                d.weight.ptr(),
                x,
                d.x.ptr(),
                (&raw const beta).cast(),
                residual,
                d.residual.ptr(),
                out,
                d.out.ptr(),
                algorithm,
                std::ptr::null_mut(),
                0,
                stream.as_raw(),
            )
        }
    }

    /// The algorithm for a key, chosen now unless it was before.
    fn remembered(&self, op: &'static str, p: &Product, key: Key) -> Result<Option<Algorithm>> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let first = hasher.finish() as usize;
        let slots = (0..PROBES).map(|i| first.wrapping_add(i) % SLOTS);
        let mut free = None;
        for slot in slots.filter_map(|slot| self.chosen.get(slot)) {
            match slot.get() {
                Some((other, algorithm)) if *other == key => return Ok(*algorithm),
                Some(_) => {}
                None => {
                    free = Some(slot);
                    break;
                }
            }
        }
        let algorithm = self.choose(op, p, key.sizes[0])?;
        if let Some(slot) = free {
            // Another thread may have been faster, with this shape or another: then it is chosen for once more.
            let _ = slot.set((key, algorithm));
        }
        Ok(algorithm)
    }

    /// Asks for the best algorithm that needs no workspace.
    fn choose(&self, op: &'static str, p: &Product, rows: usize) -> Result<Option<Algorithm>> {
        let mut d = self.describe(op, p, rows)?;
        let mut preference = Opaque::new();
        // SAFETY: the preference has room for the library's struct, and is initialised before it is used; values have the sizes
        // that the attributes ask for.
        unsafe {
            let initialised = (self.functions.preference_init)(preference.ptr(), Opaque::SIZE);
            check(op, "cublasLtMatmulPreferenceInit", initialised)?;
            let mut set = |attribute: c_int, value: *const c_void, size: usize| {
                let status =
                    (self.functions.preference_set)(preference.ptr(), attribute, value, size);
                check(op, "cublasLtMatmulPreferenceSetAttribute", status)
            };
            let workspace = 0u64;
            set(PREFERENCE_MAX_WORKSPACE, (&raw const workspace).cast(), 8)?;
            let schemes = REDUCTION_COMPUTE_TYPE;
            set(PREFERENCE_REDUCTION_SCHEMES, (&raw const schemes).cast(), 4)?;
            for (attribute, alignment) in (PREFERENCE_ALIGNMENT_A..).zip(p.alignments()) {
                set(attribute, (&raw const alignment).cast(), 4)?;
            }
        }
        let mut result = HeuristicResult {
            algorithm: [0; 8],
            workspace_size: 0,
            status: SUCCESS,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut found = 0;
        // SAFETY: everything is initialised; there is room for the one result that is asked for.
        let status = unsafe {
            (self.functions.heuristic)(
                self.handle,
                d.desc.ptr(),
                d.weight.ptr(),
                d.x.ptr(),
                d.residual.ptr(),
                d.out.ptr(),
                preference.ptr(),
                1,
                &mut result,
                &mut found,
            )
        };
        if status == NOT_SUPPORTED {
            return Ok(None);
        }
        check(op, "cublasLtMatmulAlgoGetHeuristic", status)?;
        let usable = found > 0 && result.status == SUCCESS && result.workspace_size == 0;
        Ok(usable.then_some(result.algorithm))
    }

    /// Describes `outᵀ = W xᵀ` with column-major matrices: what is row-major is the transpose of what is column-major.
    fn describe(&self, op: &'static str, p: &Product, rows: usize) -> Result<Descriptors> {
        let dtype = match p.dtype {
            DType::F16 => R_16F,
            DType::Bf16 => R_16BF,
            _ => R_32F,
        };
        let mut d = Descriptors {
            desc: Opaque::new(),
            weight: Opaque::new(),
            x: Opaque::new(),
            residual: Opaque::new(),
            out: Opaque::new(),
        };
        let (k, n, m) = (p.in_features as u64, p.out_features as u64, rows as u64);
        let (_, residual_stride) = p.residual.unwrap_or((0, p.out_stride));
        let layouts = [
            (&mut d.weight, k, n, p.weight_stride),
            (&mut d.x, k, m, p.x_stride),
            (&mut d.residual, n, m, residual_stride),
            (&mut d.out, n, m, p.out_stride),
        ];
        // SAFETY: the descriptors have room for the library's structs; values have the sizes that the attributes ask for.
        unsafe {
            let f = self.functions;
            let status = (f.desc_init)(d.desc.ptr(), Opaque::SIZE, COMPUTE_32F, R_32F);
            check(op, "cublasLtMatmulDescInit", status)?;
            let mut set = |attribute: c_int, value: *const c_void, size: usize| {
                let status = (f.desc_set)(d.desc.ptr(), attribute, value, size);
                check(op, "cublasLtMatmulDescSetAttribute", status)
            };
            let transposed = OP_T;
            set(DESC_TRANSA, (&raw const transposed).cast(), 4)?;
            if let Some(bias) = p.bias {
                let epilogue = EPILOGUE_BIAS;
                set(DESC_EPILOGUE, (&raw const epilogue).cast(), 4)?;
                set(DESC_BIAS_POINTER, (&raw const bias).cast(), 8)?;
            }
            for (layout, rows, columns, stride) in layouts {
                let stride = stride as i64;
                let status =
                    (f.layout_init)(layout.ptr(), Opaque::SIZE, dtype, rows, columns, stride);
                check(op, "cublasLtMatrixLayoutInit", status)?;
            }
        }
        Ok(d)
    }
}

fn check(op: &'static str, call: &'static str, status: Status) -> Result<()> {
    let name = match status {
        SUCCESS => return Ok(()),
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        INVALID_VALUE => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        11 => "CUBLAS_STATUS_MAPPING_ERROR",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        NOT_SUPPORTED => "CUBLAS_STATUS_NOT_SUPPORTED",
        _ => "an error that cuBLAS does not name",
    };
    Err(Error::Cuda {
        op,
        call,
        name: name.into(),
        code: status,
        sticky: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearly_equal_rows_share_an_algorithm() {
        let cases = [
            (1, 1),
            (16, 16),
            (17, 18),
            (31, 32),
            (33, 36),
            (512, 512),
            (513, 576),
            (8191, 8192),
        ];
        for (rows, rounded) in cases {
            assert_eq!(rounded_rows(rows), rounded, "{rows}");
        }
    }

    #[test]
    fn keys_tell_apart_what_algorithms_depend_on() {
        let product = Product {
            dtype: DType::Bf16,
            rows: 512,
            in_features: 64,
            out_features: 128,
            x: 256,
            x_stride: 64,
            weight: 4096,
            weight_stride: 64,
            bias: None,
            residual: None,
            out: 8192,
            out_stride: 128,
        };
        let others = [
            Product {
                dtype: DType::F16,
                ..product
            },
            Product {
                rows: 600,
                ..product
            },
            Product {
                in_features: 56,
                ..product
            },
            Product { x: 258, ..product },
            Product {
                weight: 4104,
                ..product
            },
            Product {
                out_stride: 136,
                ..product
            },
            Product {
                bias: Some(512),
                ..product
            },
            Product {
                residual: Some((8192, 128)),
                ..product
            },
        ];
        for other in others {
            assert_ne!(other.key(), product.key(), "{other:?}");
        }
        let same = Product {
            rows: 500,
            x: 512,
            ..product
        };
        assert_eq!(same.key(), product.key());
    }
}
