//! What training needs beside single operations: which activations are kept and which computed again.

pub mod checkpoint;
