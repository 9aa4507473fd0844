//! Kernels by the compile-time choices that tell them apart.

use super::device::{Kernel, Resources};
use super::images::Arguments;
use crate::error::{Error, Result};

/// The kernels of an image, by the values of `N` choices.
pub(crate) struct Table<A: Arguments, const N: usize> {
    op: &'static str,
    kernels: Vec<([u32; N], Kernel<A>)>,
}

impl<A: Arguments, const N: usize> Table<A, N> {
    pub fn new(
        op: &'static str,
        resources: &Resources,
        choices: fn(&A::Choices) -> [u32; N],
    ) -> Result<Self> {
        let kernels = resources.kernels::<A>()?.into_iter();
        Ok(Table {
            op,
            kernels: kernels
                .map(|kernel| (choices(kernel.choices), kernel))
                .collect(),
        })
    }

    /// The kernel with these choices.
    pub fn get(&self, choices: [u32; N]) -> Result<&Kernel<A>> {
        // A few dozen entries at most.
        let found = self.kernels.iter().find(|(key, _)| *key == choices);
        found
            .map(|(_, kernel)| kernel)
            .ok_or_else(|| Error::Internal {
                op: self.op,
                message: format!("no kernel with choices {choices:?}"),
            })
    }
}
