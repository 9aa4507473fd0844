//! Every operation in f64, written from its definition and nothing else.

pub mod rms_norm;
