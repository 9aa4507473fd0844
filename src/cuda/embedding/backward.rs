//! The gradient of a table on the GPU.

use crate::backend::Stream;
use crate::cuda::{Cuda, Run};
use crate::error::{Error, Result};
use crate::problem::embedding::Backward;

const OP: &str = "embedding_backward";

impl Run for Backward {
    fn check(&self) -> Result<()> {
        let problem = "is on the cuda backend, which has no kernel for this operation";
        Err(Error::unsupported(OP, "ctx", problem))
    }

    fn run(&self, _: &Cuda, _: Stream) -> Result<()> {
        self.check()
    }
}
