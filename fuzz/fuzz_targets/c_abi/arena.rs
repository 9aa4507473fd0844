//! Tensors over memory of exactly the size that they describe, so that a byte read or written outside it is seen.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr;

use unsloth::ffi::tensor::*;

use crate::input::Input;

/// No tensor with data is larger, in elements or bytes.
const LARGEST: i128 = 1 << 16;

struct Block {
    ptr: *mut u8,
    layout: Layout,
    /// What it was filled with; empty for scratch memory, which any call may write to.
    before: Vec<u8>,
}

#[derive(Default)]
pub struct Arena {
    blocks: Vec<Block>,
    /// Whether a tensor is too large to have memory.
    has_large: bool,
}

/// The memory that a tensor describes.
enum Extent {
    /// No elements: data is not looked at.
    Empty,
    Bytes(usize),
    /// More than it is sensible to allocate.
    Large,
    /// Not a tensor. The library must refuse it before it touches data.
    Impossible,
}

impl Arena {
    /// Whether every tensor that has elements has memory for them.
    pub fn is_small(&self) -> bool {
        !self.has_large
    }

    /// Scratch memory of exactly this size.
    pub fn scratch(&mut self, size: usize) -> *mut u8 {
        let ptr = self.block(size, 256);
        if let Some(block) = self.blocks.last_mut() {
            block.before.clear();
        }
        ptr
    }

    /// A block of exactly this size.
    fn block(&mut self, size: usize, align: usize) -> *mut u8 {
        let layout = Layout::from_size_align(size.max(1), align).expect("a small block");
        // SAFETY: the size is not zero.
        let ptr = unsafe { alloc_zeroed(layout) };
        assert!(!ptr.is_null());
        let before = vec![0; layout.size()];
        self.blocks.push(Block {
            ptr,
            layout,
            before,
        });
        ptr
    }

    /// A tensor of this dtype and shape in some layout; one in eight has something wrong with it.
    pub fn tensor(
        &mut self,
        input: &mut Input,
        dtype: unsloth_dtype,
        shape: &[i64],
    ) -> unsloth_tensor {
        let mut t = absent();
        t.dtype = dtype;
        t.rank = shape.len() as u32;
        t.shape[..shape.len()].copy_from_slice(shape);
        match input.pick(&[0, 0, 1, 2, 3]) {
            0 => {}
            1 => strides(&mut t, 0, None),
            3 => {
                // One element for all of a dimension.
                strides(&mut t, 0, None);
                let dim = input.up_to(shape.len().max(1) as i64 - 1) as usize;
                t.strides[dim] = 0;
            }
            _ => {
                let swapped =
                    (shape.len() > 2).then(|| input.up_to(shape.len() as i64 - 2) as usize);
                strides(&mut t, input.up_to(3), swapped);
            }
        }
        if input.one_in(8) {
            spoil(input, &mut t);
        }
        self.place(input, &mut t);
        t
    }

    /// Gives a tensor its data.
    fn place(&mut self, input: &mut Input, t: &mut unsloth_tensor) {
        let size = match extent(t) {
            Extent::Empty => {
                t.data = input.pick(&[ptr::null_mut(), ptr::without_provenance_mut(64)]);
                return;
            }
            Extent::Large => {
                self.has_large = true;
                return;
            }
            Extent::Impossible => 8,
            Extent::Bytes(size) => size,
        };
        let sound = !input.one_in(16);
        if !sound && input.one_in(4) {
            return;
        }
        if !sound && let Some(other) = self.blocks.iter().find(|block| block.layout.size() >= size)
        {
            t.data = other.ptr.cast();
            return;
        }
        let offset = if sound { 0 } else { input.up_to(3) as usize };
        let ptr = self.block(size + offset, 64);
        self.fill(input, t.dtype);
        // SAFETY: the block has `offset` bytes more than the tensor.
        t.data = unsafe { ptr.add(offset) }.cast();
    }

    /// Fills the newest block with numbers that mean something for the dtype, most of the time.
    fn fill(&mut self, input: &mut Input, dtype: unsloth_dtype) {
        let Some(block) = self.blocks.last_mut() else {
            return;
        };
        let wild = input.one_in(16);
        let mut state = u64::from(input.byte()) << 8 | 1;
        let step = match dtype {
            UNSLOTH_DTYPE_I64 => 8,
            UNSLOTH_DTYPE_F32 | UNSLOTH_DTYPE_I32 => 4,
            UNSLOTH_DTYPE_F16 | UNSLOTH_DTYPE_BF16 => 2,
            _ => 1,
        };
        let mut total = 0;
        for element in block.before.chunks_exact_mut(step) {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let random = state >> 33;
            // Integers are positions, lengths, their sums, pages or rows of a table: small, or growing.
            total += random as i64 % 4;
            let integer = if state & 256 == 0 {
                random as i64 % 6
            } else {
                total
            };
            let bits = match dtype {
                _ if wild => state,
                UNSLOTH_DTYPE_I32 | UNSLOTH_DTYPE_I64 => integer as u64,
                UNSLOTH_DTYPE_F32 => {
                    u64::from((random as f32 / (1u64 << 30) as f32 - 1.0).to_bits())
                }
                // In f16 and bf16 these are of moderate size.
                _ => random & 0xbfff,
            };
            element.copy_from_slice(&bits.to_ne_bytes()[..step]);
        }
        // SAFETY: the block has this size.
        unsafe { ptr::copy_nonoverlapping(block.before.as_ptr(), block.ptr, block.before.len()) };
    }

    /// Whether every block still has what it was filled with.
    pub fn is_untouched(&self) -> bool {
        self.blocks.iter().all(|block| {
            // SAFETY: the block is live and has this size.
            let now = unsafe { std::slice::from_raw_parts(block.ptr, block.layout.size()) };
            block.before.is_empty() || now == block.before
        })
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for block in &self.blocks {
            // SAFETY: allocated with this layout, and freed nowhere else.
            unsafe { dealloc(block.ptr, block.layout) };
        }
    }
}

pub fn absent() -> unsloth_tensor {
    unsloth_tensor::default()
}

/// Row-major strides with `padding` elements after each row, and two neighbouring outer dimensions swapped in memory.
fn strides(t: &mut unsloth_tensor, padding: i64, swapped: Option<usize>) {
    let rank = t.rank as usize;
    let mut order: Vec<usize> = (0..rank).collect();
    if let Some(at) = swapped.filter(|at| at + 2 < rank) {
        order.swap(at, at + 1);
    }
    let mut next: i64 = 1;
    for &dim in order.iter().rev() {
        t.strides[dim] = next;
        next = next.saturating_mul(t.shape[dim].max(1));
        if dim + 1 == rank {
            next = next.saturating_add(padding);
        }
    }
}

/// Changes one thing about a tensor, by a little as often as by much.
fn spoil(input: &mut Input, t: &mut unsloth_tensor) {
    let rank = i64::from(t.rank).clamp(1, UNSLOTH_MAX_RANK as i64);
    let dim = input.up_to(rank - 1) as usize;
    match input.byte() % 10 {
        8 => t.flags = u32::from(input.byte()) % 16,
        9 => t.reserved[input.byte() as usize % 3] = u32::from(input.byte()),
        0 => t.dtype = u32::from(input.byte()) % 23,
        1 => t.rank = u32::from(input.byte()) % 9,
        2 => *t = absent(),
        3..6 => t.shape[dim] = near(input, t.shape[dim]),
        _ => t.strides[dim] = near(input, t.strides[dim]),
    }
}

fn near(input: &mut Input, n: i64) -> i64 {
    match input.byte() % 8 {
        0 | 1 => n.wrapping_sub(1),
        2 => n.wrapping_add(1),
        3 => n.wrapping_mul(2),
        4 => 1,
        5 => 0,
        _ => input.number(),
    }
}

fn extent(t: &unsloth_tensor) -> Extent {
    let rank = t.rank as usize;
    let (len, size): (i128, i128) = match t.dtype {
        UNSLOTH_DTYPE_F32 | UNSLOTH_DTYPE_I32 => (1, 4),
        UNSLOTH_DTYPE_F16 | UNSLOTH_DTYPE_BF16 => (1, 2),
        UNSLOTH_DTYPE_I64 => (1, 8),
        UNSLOTH_DTYPE_BOOL | UNSLOTH_DTYPE_I8 | UNSLOTH_DTYPE_F8E4M3 => (1, 1),
        UNSLOTH_DTYPE_TERNARY => (128, 32),
        UNSLOTH_DTYPE_Q8_0 => (32, 34),
        UNSLOTH_DTYPE_Q4_0 => (32, 18),
        UNSLOTH_DTYPE_Q4_1 => (32, 20),
        UNSLOTH_DTYPE_Q5_0 => (32, 22),
        UNSLOTH_DTYPE_Q5_1 => (32, 24),
        UNSLOTH_DTYPE_Q4_K => (256, 144),
        UNSLOTH_DTYPE_Q5_K => (256, 176),
        UNSLOTH_DTYPE_Q6_K => (256, 210),
        UNSLOTH_DTYPE_TQ1_0 => (256, 54),
        UNSLOTH_DTYPE_TQ2_0 => (256, 66),
        UNSLOTH_DTYPE_Q2_0 => (64, 18),
        _ => return Extent::Impossible,
    };
    if rank == 0 {
        return Extent::Empty;
    }
    if rank > UNSLOTH_MAX_RANK {
        return Extent::Impossible;
    }
    let (shape, strides) = (&t.shape[..rank], &t.strides[..rank]);
    if shape.iter().chain(strides).any(|&n| n < 0) {
        return Extent::Impossible;
    }
    if shape.contains(&0) {
        return Extent::Empty;
    }
    let contiguous = strides.iter().all(|&s| s == 0);
    let elements = shape.iter().fold(1i128, |n, &d| n.saturating_mul(d.into()));
    let reach = if contiguous {
        elements
    } else {
        let steps = shape.iter().zip(strides);
        steps.fold(1i128, |n, (&d, &s)| {
            n.saturating_add((i128::from(d) - 1) * i128::from(s))
        })
    };
    let blocks = reach.saturating_add(len - 1) / len;
    match blocks.saturating_mul(size) {
        bytes if bytes > i64::MAX.into() => Extent::Impossible,
        bytes if bytes > LARGEST || elements > LARGEST => Extent::Large,
        bytes => Extent::Bytes(bytes as usize),
    }
}
