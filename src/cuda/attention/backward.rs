//! The backward pass of attention on the GPU, which has no kernels for it.

use crate::backend::Stream;
use crate::cuda::{Cuda, Run};
use crate::error::{Error, Result};
use crate::problem::attention::Backward;

const OP: &str = "attention_backward";

impl Run for Backward {
    fn check(&self) -> Result<()> {
        let problem =
            "is of the CUDA backend, which has no kernels for it: the CPU backend does it";
        Err(Error::unsupported(OP, "ctx", problem))
    }

    fn run(&self, _: &Cuda, _: Stream) -> Result<()> {
        self.check()
    }
}
