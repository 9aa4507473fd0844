//! What turns tokens into rows and back: embedding and argmax.

#[path = "../common/mod.rs"]
mod common;

mod argmax;
mod argmax_misuse;
mod embedding;
mod embedding_backward;
mod embedding_misuse;
