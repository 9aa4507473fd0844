//! An optimizer's step on the GPU.

use super::{Cuda, Run};
use crate::backend::Stream;
use crate::error::{Error, Result};
use crate::problem::optimizer::{Decide, Norm, ScaleGradients, Update};

macro_rules! absent {
    ($($problem:ident),*) => {$(
        impl Run for $problem<'_> {
            fn check(&self) -> Result<()> {
                Err(Error::unsupported("optimizer", "ctx", "is on the cuda backend, allowed: cpu"))
            }

            fn run(&self, _: &Cuda, _: Stream) -> Result<()> {
                self.check()
            }
        }
    )*};
}
absent!(Norm, Decide, Update, ScaleGradients);
