//! What training needs beside single operations: which activations are kept and which computed again, and
//! in what order the ranks of a pipeline work.

pub mod checkpoint;
pub mod pipeline;
