//! cuBLASLt's functions and constants, as its headers declare them, found at run time.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use crate::error::{Error, Result, text};

/// `cublasStatus_t`.
pub(super) type Status = c_int;
pub(super) type HandlePtr = *mut c_void;

pub(super) const SUCCESS: Status = 0;
/// What a call gives that an algorithm does not serve.
pub(super) const INVALID_VALUE: Status = 7;
pub(super) const NOT_SUPPORTED: Status = 15;

/// `cublasComputeType_t`: products and sums in f32, without TF32.
pub(super) const COMPUTE_32F: c_int = 68;
/// `cudaDataType_t`.
pub(super) const R_32F: c_int = 0;
pub(super) const R_16F: c_int = 2;
pub(super) const R_16BF: c_int = 14;
/// `cublasOperation_t`.
pub(super) const OP_T: c_int = 1;
/// `cublasLtEpilogue_t`: the bias has an element per row of the (column-major) result.
pub(super) const EPILOGUE_BIAS: c_int = 4;

/// `cublasLtMatmulDescAttributes_t`.
pub(super) const DESC_TRANSA: c_int = 3;
pub(super) const DESC_TRANSB: c_int = 4;
pub(super) const DESC_EPILOGUE: c_int = 7;
pub(super) const DESC_BIAS_POINTER: c_int = 8;
/// `cublasLtMatmulPreferenceAttributes_t`; the alignments of A, B, C and D follow each other.
pub(super) const PREFERENCE_MAX_WORKSPACE: c_int = 1;
pub(super) const PREFERENCE_REDUCTION_SCHEMES: c_int = 3;
pub(super) const PREFERENCE_ALIGNMENT_A: c_int = 5;
/// `cublasLtMatmulAlgoConfigAttributes_t`.
pub(super) const ALGORITHM_CLUSTER_SHAPE: c_int = 8;
/// `cublasLtReductionScheme_t`: partial sums stay f32.
pub(super) const REDUCTION_COMPUTE_TYPE: u32 = 2;

/// Room for any of the library's descriptors, which it fills itself and which differ in size between versions.
#[repr(C, align(16))]
pub(super) struct Opaque([u64; 64]);

impl Opaque {
    pub const SIZE: usize = size_of::<Opaque>();

    pub fn new() -> Opaque {
        Opaque([0; 64])
    }

    pub fn ptr(&mut self) -> *mut c_void {
        (&raw mut self.0).cast()
    }
}

/// `cublasLtMatmulAlgo_t`.
pub(super) type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct HeuristicResult {
    pub algorithm: Algorithm,
    pub workspace_size: usize,
    pub status: Status,
    pub waves: f32,
    pub reserved: [c_int; 4],
}

macro_rules! functions {
    ($($method:ident = $symbol:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        pub(super) struct Functions {
            $(pub $method: unsafe extern "C" fn($($type),*) -> Status,)*
        }

        impl Functions {
            fn resolve(library: &libloading::Library) -> Option<Functions> {
                Some(Functions {
                    // SAFETY: the type is that of the function in CUDA's headers.
                    $($method: unsafe { *library.get(concat!(stringify!($symbol), "\0")).ok()? },)*
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
    algorithm_get = cublasLtMatmulAlgoConfigGetAttribute(algorithm: *const Algorithm, attribute: c_int, value: *mut c_void, size: usize,
        written: *mut usize);
    heuristic = cublasLtMatmulAlgoGetHeuristic(handle: HandlePtr, desc: *mut c_void, a: *mut c_void, b: *mut c_void, c: *mut c_void,
        d: *mut c_void, preference: *mut c_void, requested: c_int, results: *mut HeuristicResult, found: *mut c_int);
    matmul = cublasLtMatmul(handle: HandlePtr, desc: *mut c_void, alpha: *const c_void, a: *const c_void, a_layout: *mut c_void,
        b: *const c_void, b_layout: *mut c_void, beta: *const c_void, c: *const c_void, c_layout: *mut c_void, d: *mut c_void,
        d_layout: *mut c_void, algorithm: *const Algorithm, workspace: *mut c_void, workspace_size: usize, stream: *mut c_void);
}

/// The library's functions, if there is one. It stays open: its own threads may outlive any owner.
pub(super) fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    let open = || {
        // The versions known to have these functions, newest first; then whatever the search path
        // has by that name. With their NUL they are opened as they are, without a copy.
        for name in [
            "libcublasLt.so.13\0",
            "libcublasLt.so.12\0",
            "libcublasLt.so\0",
            "cublasLt64_13.dll\0",
            "cublasLt64_12.dll\0",
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

pub(super) fn check(op: &'static str, call: &'static str, status: Status) -> Result<()> {
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
        name: text!("{name}"),
        code: status,
        sticky: false,
    })
}
