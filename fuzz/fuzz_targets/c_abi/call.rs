//! One call of one operation: its memory, what its arguments are made of, and what must hold.

use unsloth::ffi::context::unsloth_context;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::*;
use unsloth::ffi::{unsloth_implementation, unsloth_stream};

use crate::arena::{Arena, absent};
use crate::input::Input;
use crate::{context, last_message};

type Supported<P> = unsafe extern "C" fn(
    *mut unsloth_context,
    *const P,
    *mut unsloth_implementation,
) -> unsloth_status;
type WorkspaceSize<P> =
    unsafe extern "C" fn(*mut unsloth_context, *const P, *mut usize) -> unsloth_status;
type Forward<P> =
    unsafe extern "C" fn(*mut unsloth_context, *const P, unsloth_stream) -> unsloth_status;

/// A params struct with room behind it, for sizes that are too large.
#[repr(C)]
pub struct Stated<P> {
    pub params: P,
    beyond: [u8; 32],
}

/// Where an operation takes scratch memory.
pub struct Scratch<P> {
    size: WorkspaceSize<P>,
    set: fn(&mut P, *mut u8, usize),
}

impl<P> Scratch<P> {
    /// Of a call with these parameters, which say no more than the type.
    pub fn of(_: &Stated<P>, size: WorkspaceSize<P>, set: fn(&mut P, *mut u8, usize)) -> Self {
        Scratch { size, set }
    }
}

pub struct Call<'i, 'b> {
    pub input: &'i mut Input<'b>,
    arena: Arena,
    /// Structs that the call's own points to.
    pub kept: Vec<Box<dyn std::any::Any>>,
}

/// A struct whose every field is zero.
///
/// # Safety
/// `P` is a params struct of the C ABI, for which all zero is a value.
pub unsafe fn zeroed<P>() -> Box<Stated<P>> {
    // SAFETY: the caller's promise; bytes have no other values.
    unsafe { Box::new(std::mem::zeroed()) }
}

/// A tensor's shape.
pub fn like(t: &unsloth_tensor) -> Vec<i64> {
    t.shape[..(t.rank as usize).min(t.shape.len())].to_vec()
}

impl<'i, 'b> Call<'i, 'b> {
    pub fn new(input: &'i mut Input<'b>) -> Self {
        Call {
            input,
            arena: Arena::default(),
            kept: Vec::new(),
        }
    }

    /// Makes the call and what may be asked about it before.
    pub fn finish<P>(
        &mut self,
        mut stated: Box<Stated<P>>,
        supported: Supported<P>,
        scratch: Option<Scratch<P>>,
        forward: Forward<P>,
    ) {
        let ctx = context();
        let size = size_of::<P>();
        let mut struct_size = size;
        if self.input.one_in(32) {
            struct_size = self.input.up_to(255) as usize * (size + 32) / 255;
            stated.beyond[usize::from(self.input.byte()) % 32] = self.input.byte();
        }
        // SAFETY: every params struct begins with its size.
        unsafe {
            (&raw mut stated.params)
                .cast::<u32>()
                .write(struct_size as u32)
        };

        let mut expected = 0;
        // SAFETY: the struct has the size stated, and its tensors describe live memory or none.
        unsafe {
            let params = &raw const stated.params;
            let foretold = supported(ctx, params, std::ptr::null_mut());
            let mut short = false;
            if let Some(scratch) = &scratch {
                let status = (scratch.size)(ctx, params, &mut expected);
                assert_eq!(status, foretold, "workspace_size says {}", last_message());
                if status == UNSLOTH_STATUS_SUCCESS {
                    let is_small = expected < 1 << 24;
                    assert!(
                        is_small || !self.arena.is_small(),
                        "{expected} bytes of workspace for a small problem"
                    );
                    // Of sizes that nothing has memory for there are only queries: without a
                    // workspace the call must fail.
                    short = !is_small || (expected > 0 && self.input.one_in(16));
                    if is_small {
                        let given = expected - usize::from(short);
                        let at = self.arena.scratch(given);
                        (scratch.set)(&mut stated.params, at, given);
                    }
                }
            }
            let status = forward(ctx, &raw const stated.params, std::ptr::null_mut());
            if foretold != UNSLOTH_STATUS_SUCCESS {
                assert_eq!(status, foretold, "{}", last_message());
            }
            assert!(
                !short || status != UNSLOTH_STATUS_SUCCESS,
                "too little workspace was taken"
            );
            if status != UNSLOTH_STATUS_SUCCESS {
                assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
                assert!(!last_message().is_empty());
                assert!(
                    self.arena.is_untouched(),
                    "a failed call wrote: {}",
                    last_message()
                );
            }
        }
    }

    pub fn float_dtype(&mut self) -> unsloth_dtype {
        self.input
            .pick(&[UNSLOTH_DTYPE_F32, UNSLOTH_DTYPE_F16, UNSLOTH_DTYPE_BF16])
    }

    /// A dtype of blocks, and a number of elements in whole ones.
    pub fn blocks(&mut self) -> (unsloth_dtype, i64) {
        let (dtype, len) = self.input.pick(&[
            (UNSLOTH_DTYPE_Q8_0, 32),
            (UNSLOTH_DTYPE_Q4_0, 32),
            (UNSLOTH_DTYPE_Q4_1, 32),
            (UNSLOTH_DTYPE_Q5_0, 32),
            (UNSLOTH_DTYPE_Q5_1, 32),
            (UNSLOTH_DTYPE_Q4_K, 256),
            (UNSLOTH_DTYPE_Q5_K, 256),
            (UNSLOTH_DTYPE_Q6_K, 256),
            (UNSLOTH_DTYPE_TQ1_0, 256),
            (UNSLOTH_DTYPE_TQ2_0, 256),
            (UNSLOTH_DTYPE_Q2_0, 64),
        ]);
        (dtype, len * self.dim(3))
    }

    /// The quantization of a weight of so many rows, or of keys or values of so many heads: most of codes have one, and few others.
    pub fn quantization(&mut self, dtype: unsloth_dtype, rows: i64) -> *const unsloth_quantization {
        let of_codes = matches!(
            dtype,
            UNSLOTH_DTYPE_I8 | UNSLOTH_DTYPE_TERNARY | UNSLOTH_DTYPE_F8E4M3
        );
        if of_codes == self.input.one_in(8) {
            return std::ptr::null();
        }
        // SAFETY: a params struct.
        let mut stated: Box<Stated<unsloth_quantization>> = unsafe { zeroed() };
        let len = self.input.pick(&[1, rows, 2]);
        stated.params.struct_size = size_of::<unsloth_quantization>() as u32;
        stated.params.scale = self.optional(UNSLOTH_DTYPE_F32, &[len]);
        if self.input.one_in(16) {
            stated.params.zero = self.tensor(UNSLOTH_DTYPE_F32, &[len]);
        }
        let at = &raw const stated.params;
        self.kept.push(stated);
        at
    }

    /// A size, seldom none at all.
    pub fn dim(&mut self, most: i64) -> i64 {
        if self.input.one_in(64) {
            return 0;
        }
        1 + self.input.up_to(most - 1)
    }

    /// A size of which nothing is multiplied that may be as large: seldom so large that only an empty tensor can have it.
    pub fn extent(&mut self, most: i64) -> i64 {
        if self.input.one_in(32) {
            return self.input.pick(&[1 << 40, 1 << 50, 0]);
        }
        self.input.up_to(most)
    }

    pub fn tensor(&mut self, dtype: unsloth_dtype, shape: &[i64]) -> unsloth_tensor {
        self.arena.tensor(self.input, dtype, shape)
    }

    /// Absent one time in two.
    pub fn optional(&mut self, dtype: unsloth_dtype, shape: &[i64]) -> unsloth_tensor {
        if self.input.byte() % 2 == 0 {
            return absent();
        }
        self.tensor(dtype, shape)
    }

    /// Zero mostly.
    pub fn flag(&mut self, most: u32) -> u32 {
        if self.input.one_in(64) {
            return self.input.word() as u32;
        }
        u32::from(self.input.byte()) % (most + 1)
    }

    pub fn limit(&mut self) -> i64 {
        match self.input.byte() % 8 {
            0..5 => 0,
            5..7 => self.input.up_to(20),
            _ => self.input.number(),
        }
    }

    pub fn factor(&mut self) -> f32 {
        match self.input.byte() % 4 {
            0 | 1 => 0.0,
            _ => self.input.float(),
        }
    }

    /// Leading dimensions and a last one.
    pub fn rows(&mut self) -> (Vec<i64>, i64) {
        let leading = (0..self.input.up_to(3)).map(|_| self.extent(5)).collect();
        let last = match self.input.one_in(32) {
            true => self.extent(0),
            false => self.dim(40),
        };
        (leading, last)
    }
}
