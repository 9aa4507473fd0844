//! Loading what cuBLASLt loads at first use, ahead of it.

use super::Cuda;
use super::linear::{self, Epilogue, Product};
use crate::backend::{Allocation, Device, ProductShape, Stream};
use crate::dtype::DType;
use crate::error::Result;
use crate::layout::Layout;
use crate::problem::linear::Weights;
use crate::tensor::{Activations, RawTensor, Scratch};

/// Rows, inputs and outputs of the products of each dtype where the caller names none: of a batch
/// and of a prompt in a small model.
const DEFAULT: [[usize; 3]; 2] = [[64, 2048, 2048], [1024, 2048, 2048]];

impl Cuda {
    /// Runs products in memory that is taken for the moment, and waits for them.
    pub fn warm_up_products(&self, op: &'static str, products: &[ProductShape]) -> Result<()> {
        if !self.linear.has_library() {
            return Ok(());
        }
        if !products.is_empty() {
            return products
                .iter()
                .try_for_each(|p| self.warm_up_product(op, p));
        }
        for &dtype in DType::FLOATS {
            for [num_rows, in_features, out_features] in DEFAULT {
                let product = ProductShape {
                    dtype,
                    num_rows,
                    in_features,
                    out_features,
                };
                self.warm_up_product(op, &product)?;
            }
        }
        Ok(())
    }

    fn warm_up_product(&self, op: &'static str, product: &ProductShape) -> Result<()> {
        let start = std::time::Instant::now();
        let ProductShape {
            dtype,
            num_rows,
            in_features,
            out_features,
        } = *product;
        let tensor = |sizes: &[usize]| -> Result<RawTensor> {
            Ok(RawTensor {
                ptr: std::ptr::null_mut(),
                dtype,
                layout: Layout::contiguous(sizes)?,
            })
        };
        let x = tensor(&[num_rows, in_features])?;
        let weight = tensor(&[out_features, in_features])?;
        let out = tensor(&[num_rows, out_features])?;
        linear::fits(op, ("products", &x), ("products", &weight))?;
        let sizes = [&x, &weight, &out].map(|t| t.layout.num_elements() * dtype.size());
        let memory = Taken::new(self, op, sizes.into_iter().max().unwrap_or(0))?;
        // Nobody reads the results, so one piece of memory serves as every tensor.
        let there = |t: RawTensor| RawTensor {
            ptr: memory.allocation.ptr,
            ..t
        };
        let (x, out) = (there(x), there(out));
        let weights = Weights {
            weight: there(weight),
            scales: None,
            activations: Activations::Sixteen,
            constant: false,
            bias: None,
        };
        for epilogue in [Epilogue::Store, Epilogue::Add(out)] {
            let product = Product {
                op,
                x: &x,
                norm: None,
                weights: &weights,
                epilogue,
                out: &out,
            };
            self.run_product(op, &product)?;
        }
        tracing::debug!(
            "{op}: {num_rows} rows of {in_features} by {out_features} in {dtype}: {} ms",
            start.elapsed().as_millis(),
        );
        Ok(())
    }

    /// Runs a product as calls do that have a workspace, and as those that have none.
    fn run_product(&self, op: &'static str, product: &Product<'_>) -> Result<()> {
        // SAFETY: a stream of the library's own, which lives as long as the context.
        let stream = unsafe { Stream::from_raw(self.internal.cast()) };
        let size = linear::scratch_size(self, product)?;
        let workspace = Taken::new(self, op, size)?;
        let scratch = Scratch {
            ptr: workspace.allocation.ptr,
            size,
        };
        linear::multiply(self, product, scratch, stream)?;
        if size > 0 {
            linear::multiply(self, product, Scratch::NONE, stream)?;
        }
        self.synchronize(op, stream)
    }
}

/// Device memory until it is dropped.
pub(super) struct Taken<'a> {
    cuda: &'a Cuda,
    op: &'static str,
    allocation: Allocation,
}

impl<'a> Taken<'a> {
    pub fn new(cuda: &'a Cuda, op: &'static str, size: usize) -> Result<Taken<'a>> {
        Ok(Taken {
            cuda,
            op,
            allocation: cuda.alloc(op, size)?,
        })
    }

    /// The elements that lie in it.
    pub fn tensor(&self, dtype: DType, len: usize) -> Result<RawTensor> {
        Ok(RawTensor {
            ptr: self.allocation.ptr,
            dtype,
            layout: Layout::contiguous(&[len])?,
        })
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `new` and used by this file alone; freeing waits for work that is queued. A
        // lost context has freed it already.
        let _ = unsafe { self.cuda.free(self.op, self.allocation) };
    }
}
