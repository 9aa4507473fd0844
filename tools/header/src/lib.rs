//! The header as cbindgen makes it from `src/ffi`, and a list of its structs.
//!
//! `tests/header.rs` compares the committed `include/unsloth.h` with it, or writes it.

/// The text of the header; empty where cbindgen could not read `src/ffi`, and then the build says
/// why.
pub const HEADER: &str = include_str!(concat!(env!("OUT_DIR"), "/unsloth.h"));

// `structs!(each)`: the value `&[each!(unsloth_tensor, data, shape, ..), ..]`, with every struct of
// the header and its fields. Import it with `#[macro_use] extern crate`.
include!(concat!(env!("OUT_DIR"), "/structs.rs"));
