//! The kernels' argument: `AttentionForwardParams` of `kernels/cuda/attention/params.h`, where the fields are described.

use std::mem::offset_of;
use std::ops::Range;

use super::tensor_map::TensorMap;
use crate::cuda::images::{Arguments, attention_forward};

macro_rules! params {
    ($($field:ident: $type:ty = $zero:expr,)*) => {
        #[derive(Clone, Copy, Debug)]
        #[repr(C)]
        pub(super) struct Params {
            $(pub $field: $type,)*
        }

        impl Params {
            /// What a caller leaves out.
            pub const ZERO: Params = Params { $($field: $zero,)* };
        }

        /// The size, then where each field is.
        const LAYOUT: &[usize] = &[size_of::<Params>(), $(offset_of!(Params, $field),)*];
    };
}

params! {
    q: TensorMap = TensorMap::ZERO,
    k: TensorMap = TensorMap::ZERO,
    v: TensorMap = TensorMap::ZERO,
    o: TensorMap = TensorMap::ZERO,
    o_pointer: u64 = 0,
    lse: u64 = 0,
    sinks: u64 = 0,
    cu_seqlens_q: u64 = 0,
    cu_seqlens_k: u64 = 0,
    seqlens_k: u64 = 0,
    block_table: u64 = 0,
    tile_counter: u64 = 0,
    launch_tag: u64 = 0,
    o_batch_stride: i64 = 0,
    o_sequence_stride: i64 = 0,
    o_head_stride: i64 = 0,
    lse_batch_stride: i64 = 0,
    lse_head_stride: i64 = 0,
    lse_sequence_stride: i64 = 0,
    batch: i32 = 0,
    heads_q: i32 = 0,
    heads_kv: i32 = 0,
    head_dim_v: i32 = 0,
    seqlen_q: i32 = 0,
    seqlen_k: i32 = 0,
    pack_log2: i32 = 0,
    kv_box_rows: i32 = 0,
    page_log2: i32 = 0,
    block_table_stride: i32 = 0,
    window_left: i32 = 0,
    window_right: i32 = 0,
    ragged: i32 = 0,
    tiles: i32 = 0,
    row_blocks: i32 = 0,
    pairs_in_l2: i32 = 0,
    keys_in_l2: i32 = 0,
    scale_log2: f32 = 0.0,
    softcap_scale: f32 = 0.0,
    zero: u32 = 0,
}

// What the compiled kernels expect, if there are any in this build.
const _: () = {
    let theirs = attention_forward::LAYOUT;
    assert!(theirs.is_empty() || theirs.len() == LAYOUT.len());
    let mut i = 0;
    while i < theirs.len() {
        assert!(theirs[i] as usize == LAYOUT[i]);
        i += 1;
    }
};

// SAFETY: the kernels take this struct alone, by value, and lay it out as has been checked above.
unsafe impl Arguments for Params {
    type Choices = attention_forward::Choices;
    const IMAGES: Range<usize> = attention_forward::IMAGES;
    const CHOICES: &'static [Self::Choices] = attention_forward::CHOICES;
    const PARAMETERS: &[usize] = &[0];
}

/// Which keys a kernel hides, as its choice `mask` says: none, those after the query, those outside a window of any two sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mask {
    None,
    Causal,
    Window,
}

impl Mask {
    /// The mask with this value in the kernels' choices.
    pub fn from_choice(choice: u32) -> Option<Mask> {
        [Mask::None, Mask::Causal, Mask::Window]
            .into_iter()
            .find(|mask| *mask as u32 == choice)
    }

    /// Whether a kernel with this mask can hide what `other` does, and nothing else.
    pub fn hides(self, other: Mask) -> bool {
        self == Mask::Window || self == other
    }
}
