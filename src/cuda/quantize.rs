//! Quantisation on the GPU: there are no kernels yet.

use super::{Cuda, Run};
use crate::backend::Stream;
use crate::error::{Error, Result};
use crate::problem::quantize::Problem;

const OP: &str = "quantize";

fn unsupported() -> Error {
    let problem = "is on the cuda backend, which has no kernel for this operation";
    Error::unsupported(OP, "ctx", problem)
}

impl Run for Problem {
    fn check(&self) -> Result<()> {
        Err(unsupported())
    }

    fn run(&self, _: &Cuda, _: Stream) -> Result<()> {
        Err(unsupported())
    }
}
