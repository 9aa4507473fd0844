//! Weights and gains that nothing in flight writes: products of few rows read these ahead, and nothing else.
//! In a chain of products each has what the one before it has just made, so a kernel that read more than its
//! weight and gains before the one before it has ended would have other bits.

use crate::common::guarded::AtEnd;
use crate::common::reference::blocks;
use crate::common::{DeviceTensor, TestTensor, contexts, contiguous, rng};
use rand::Rng;
use unsloth::ops::linear::{self, Output, Params, Weights};
use unsloth::ops::rms_norm::Norm;
use unsloth::{Context, DType, Stream, TensorRef, Workspace};

/// A multiple of all blocks' lengths, from which on a GPU's kernels for few rows of 16 bits are asked for.
const SIZE: usize = 1024;
const PRODUCTS: usize = 6;

enum Matrix {
    Floats(DeviceTensor),
    Codes(AtEnd, DType),
}

impl Matrix {
    fn random(ctx: &Context, dtype: DType) -> Matrix {
        let rng = &mut rng();
        let layout = contiguous(&[SIZE, SIZE]);
        if dtype.is_float() {
            return Matrix::Floats(TestTensor::normal(rng, dtype, layout).upload(ctx));
        }
        let (len, bytes) = dtype.block();
        let codes: Vec<u8> = match DType::BLOCKS.contains(&dtype) {
            true => (0..SIZE)
                .flat_map(|_| blocks::random(rng, dtype, SIZE))
                .collect(),
            // No NaN of f8e4m3, and no great number: products would grow beyond f32.
            false if dtype == DType::F8E4M3 => (0..SIZE * SIZE)
                .map(|_| rng.random::<u8>() & 0xbf)
                .collect(),
            false => (0..SIZE * SIZE / len * bytes)
                .map(|_| rng.random())
                .collect(),
        };
        Matrix::Codes(AtEnd::new(ctx, &codes), dtype)
    }

    fn view(&self) -> TensorRef<'_> {
        match self {
            Matrix::Floats(tensor) => tensor.view(),
            Matrix::Codes(memory, dtype) => memory.view(*dtype, contiguous(&[SIZE, SIZE])),
        }
    }
}

/// What a chain of products ends with; each is queued at once, or once the one before it has ended.
fn chain(
    ctx: &Context,
    x: &TestTensor,
    gains: Option<&DeviceTensor>,
    matrices: &[Matrix],
    constant: bool,
) -> TestTensor {
    fn as_said(view: TensorRef<'_>, constant: bool) -> TensorRef<'_> {
        match constant {
            true => view.with_constant_elements(),
            false => view,
        }
    }
    let mut between: Vec<DeviceTensor> = (0..=matrices.len())
        .map(|_| TestTensor::poisoned_like(x).upload(ctx))
        .collect();
    between[0].overwrite(x);
    let mut memory: Vec<DeviceTensor> = Vec::new();
    for (i, matrix) in matrices.iter().enumerate() {
        let (before, after) = between.split_at_mut(i + 1);
        let mut params = Params {
            x_norm: gains.map(|gains| Norm {
                weight: as_said(gains.view(), constant),
                weight_offset: 0.0,
                epsilon: 1e-5,
            }),
            parallel: None,
            x: before[i].view(),
            weights: Weights {
                weight: as_said(matrix.view(), constant),
                bias: None,
            },
            output: Output::Write(after[0].view_mut()),
            workspace: Workspace::none(),
        };
        let size = linear::workspace_size(ctx, &params).unwrap();
        memory.push(TestTensor::poisoned(DType::F32, contiguous(&[size.div_ceil(4)])).upload(ctx));
        if size > 0 {
            let data = memory.last().unwrap().data().cast();
            // SAFETY: the tensor's elements, which nothing else uses.
            params.workspace = unsafe { Workspace::from_raw(data, size) };
        }
        linear::forward(ctx, &params, Stream::DEFAULT).unwrap();
        if !constant {
            ctx.synchronize(Stream::DEFAULT).unwrap();
        }
    }
    between.last().unwrap().download_output()
}

#[test]
fn products_read_nothing_ahead_but_weights_and_gains() {
    for ctx in contexts() {
        let gains = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[SIZE])).upload(&ctx);
        let codes = DType::QUANTIZED;
        for dtype in [DType::F32, DType::F16, DType::Bf16]
            .into_iter()
            .chain(DType::BLOCKS)
            .chain(codes)
        {
            let matrices: Vec<Matrix> =
                (0..PRODUCTS).map(|_| Matrix::random(&ctx, dtype)).collect();
            // Of 16 bits where the weight is not of 32; products grow beyond f16.
            let of_x = match dtype {
                DType::F32 | DType::F16 => DType::F32,
                _ => DType::Bf16,
            };
            for rows in [1, 3, 6, 8, 16, 32] {
                let x = TestTensor::normal(&mut rng(), of_x, contiguous(&[rows, SIZE]));
                for gains in [None, Some(&gains)] {
                    let expected = chain(&ctx, &x, gains, &matrices, false);
                    let case = format!("{dtype} {rows}, a norm: {}", gains.is_some());
                    assert!(expected.values().iter().all(|y| y.is_finite()), "{case}");
                    let y = chain(&ctx, &x, gains, &matrices, true);
                    assert!(y.bits() == expected.bits(), "{case}");
                }
            }
        }
    }
}
