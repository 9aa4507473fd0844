//! What is made of other operations: the attention block and the decoder layer.

#[path = "../common/mod.rs"]
mod common;

mod attention_block;
mod attention_block_backward;
mod attention_block_cached;
mod attention_block_misuse;
mod attention_block_step;
mod bitnet;
mod decoder_layer;
