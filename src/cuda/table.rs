//! Kernels by the compile-time choices that tell them apart.

use super::device::{Kernel, Resources};
use super::images::Arguments;
use crate::alloc::push;
use crate::error::{Error, Result, text};

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
        let mut kernels = Vec::new();
        for kernel in resources.kernels::<A>()? {
            push(op, &mut kernels, (choices(kernel.choices), kernel))?;
        }
        Ok(Table { op, kernels })
    }

    /// The kernel with these choices.
    pub fn get(&self, choices: [u32; N]) -> Result<&Kernel<A>> {
        // A few dozen entries at most.
        let found = self.kernels.iter().find(|(key, _)| *key == choices);
        found
            .map(|(_, kernel)| kernel)
            .ok_or_else(|| Error::Internal {
                op: self.op,
                message: text!("no kernel with choices {choices:?}"),
            })
    }
}
