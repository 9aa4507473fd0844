//! Codes of files in the library's order: each code by definition, in place and apart, any address,
//! the scale; what the quantisation writes; arguments that must be refused.

use crate::common::abi::{self, Misuse, Operation, absent, c_tensor};
use crate::common::{DeviceTensor, TestTensor, contexts, contiguous, for_each_case, rng};
use proptest::prelude::*;
use rand::Rng;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::unsloth_quantization;
use unsloth::ffi::weight_repack::{
    unsloth_weight_repack_forward, unsloth_weight_repack_params, unsloth_weight_repack_supported,
};
use unsloth::ops::quantize::{self, Rule};
use unsloth::ops::weight_repack::{self, Codes, Format, Params};
use unsloth::{Context, DType, Stream, TensorMut, Workspace};

/// Codes of a block, its bytes, and those behind all blocks.
const BLOCK: usize = 128;
const BYTES: usize = 32;
const TAIL: usize = 32;

/// Code `i` of bytes whose four codes begin at these bits.
fn code(bytes: &[u8], i: usize, shifts: [u32; 4]) -> u8 {
    let (block, at) = (i / BLOCK, i % BLOCK);
    bytes[BYTES * block + at % BYTES] >> shifts[at / BYTES] & 3
}

const OF_FILE: [u32; 4] = [6, 4, 2, 0];
const OURS: [u32; 4] = [0, 2, 4, 6];

/// A file's bytes of these codes and what is behind them.
fn packed(codes: impl ExactSizeIterator<Item = u8>, tail: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; codes.len() / 4];
    for (i, code) in codes.enumerate() {
        let (block, at) = (i / BLOCK, i % BLOCK);
        bytes[BYTES * block + at % BYTES] |= code << OF_FILE[at / BYTES];
    }
    bytes.extend_from_slice(tail);
    bytes
}

fn bytes_at(bytes: &[u8], skew: usize) -> TestTensor {
    let mut tensor = TestTensor::poisoned_at(DType::I8, contiguous(&[bytes.len()]), skew);
    tensor.set_bits(bytes);
    tensor
}

/// The memory of `[n, k]` codes as an output.
fn codes_of(memory: &mut DeviceTensor, shape: [usize; 2]) -> TensorMut<'_> {
    // SAFETY: the elements' memory, which is borrowed.
    unsafe { TensorMut::from_raw(memory.data().cast(), DType::Ternary, contiguous(&shape)) }
}

/// How a matrix is repacked.
#[derive(Clone, Copy, Debug)]
struct Way {
    in_place: bool,
    scaled: bool,
    /// Bytes from an aligned address, of what is read and what is written.
    skew: [usize; 2],
}

const fn way(in_place: bool, scaled: bool, skew: [usize; 2]) -> Way {
    Way {
        in_place,
        scaled,
        skew,
    }
}

const WAYS: &[Way] = &[
    way(false, true, [0, 0]),
    way(true, true, [0, 0]),
    way(true, false, [0, 0]),
    way(false, false, [0, 0]),
    way(true, true, [1, 0]),
    way(false, true, [3, 0]),
    way(false, true, [0, 5]),
    way(false, true, [16, 32]),
];

/// The bytes of the codes and the scale's bits. What is behind the codes is as it was.
fn run(ctx: &Context, bytes: &[u8], shape: [usize; 2], way: Way) -> (Vec<u8>, Option<Vec<u8>>) {
    let mut packed = bytes_at(bytes, way.skew[0]).upload(ctx);
    let room = contiguous(&[bytes.len() - TAIL]);
    let mut out = TestTensor::poisoned_at(DType::I8, room, way.skew[1]).upload(ctx);
    let mut scale = TestTensor::poisoned(DType::F32, contiguous(&[1])).upload(ctx);
    let params = Params {
        format: Format::I2S,
        codes: match way.in_place {
            true => Codes::InPlace {
                packed: packed.view_mut(),
                layout: contiguous(&shape),
            },
            false => Codes::Apart {
                packed: packed.view(),
                out: codes_of(&mut out, shape),
            },
        },
        scale: way.scaled.then(|| scale.view_mut()),
    };
    weight_repack::supported(ctx, &params).unwrap();
    assert_eq!(weight_repack::workspace_size(ctx, &params).unwrap(), 0);
    weight_repack::forward(ctx, &params, Stream::DEFAULT).unwrap();
    let after = packed.download_output().bits();
    let (codes, tail) = after.split_at(bytes.len() - TAIL);
    assert!(tail == &bytes[codes.len()..], "the tail was written");
    let scale = way.scaled.then(|| scale.download_output().bits());
    if way.in_place {
        return (codes.to_vec(), scale);
    }
    assert!(codes == &bytes[..codes.len()], "the input was written");
    (out.download_output().bits(), scale)
}

/// One block, odd numbers of them, none, several blocks of threads and a rest.
const SHAPES: &[[usize; 2]] = &[
    [1, 128],
    [3, 128],
    [1, 384],
    [5, 256],
    [0, 128],
    [33, 640],
    [130, 4096],
];

#[test]
fn every_code_finds_its_place() {
    let mut tail = [0; TAIL];
    rng().fill(&mut tail[..]);
    for ctx in contexts() {
        for_each_case(SHAPES, |shape| {
            let count = shape[0] * shape[1];
            let codes: Vec<u8> = (0..count).map(|_| rng().random_range(0..4)).collect();
            let bytes = packed(codes.iter().copied(), &tail);
            for &way in WAYS {
                let (found, scale) = run(&ctx, &bytes, *shape, way);
                let all = (0..count).all(|i| code(&found, i, OURS) == codes[i]);
                assert!(all, "{way:?}");
                assert_eq!(scale.unwrap_or(tail[..4].to_vec()), tail[..4], "{way:?}");
            }
        });
    }
}

/// Every value of a byte, in every place of a block.
#[test]
fn every_byte_is_turned_around() {
    let bytes: Vec<u8> = (0..BYTES)
        .flat_map(|shift| (0..=u8::MAX).map(move |byte| byte.wrapping_add(shift as u8)))
        .collect();
    let file = [&bytes[..], &[0; TAIL]].concat();
    for ctx in contexts() {
        for &way in WAYS {
            let (found, _) = run(&ctx, &file, [1, 4 * bytes.len()], way);
            for i in 0..4 * bytes.len() {
                assert_eq!(code(&found, i, OURS), code(&bytes, i, OF_FILE), "{way:?}");
            }
        }
    }
}

/// A file of what the quantisation finds becomes the bytes and the scale that it writes.
#[test]
fn files_become_what_is_quantised() {
    let [n, k] = [7, 512];
    for ctx in contexts() {
        let x = TestTensor::normal(&mut rng(), DType::F32, contiguous(&[n, k])).upload(&ctx);
        let mut out = TestTensor::poisoned(DType::I8, contiguous(&[n * k / 4])).upload(&ctx);
        let mut scale = TestTensor::poisoned(DType::F32, contiguous(&[1])).upload(&ctx);
        let mut params = quantize::Params {
            x: x.view(),
            out: codes_of(&mut out, [n, k]),
            scale: scale.view_mut(),
            sum: None,
            rule: Rule::AbsMean,
            workspace: Workspace::none(),
        };
        let size = quantize::workspace_size(&ctx, &params).unwrap();
        let memory = TestTensor::poisoned(DType::F32, contiguous(&[size / 4])).upload(&ctx);
        if size > 0 {
            // SAFETY: the tensor's elements, which nothing else uses.
            params.workspace = unsafe { Workspace::from_raw(memory.data().cast(), size) };
        }
        quantize::forward(&ctx, &params, Stream::DEFAULT).unwrap();
        let (ours, scale) = (out.download_output().bits(), scale.download_output().bits());
        let mut tail = [0xee; TAIL];
        tail[..4].copy_from_slice(&scale);
        let codes: Vec<u8> = (0..n * k).map(|i| code(&ours, i, OURS)).collect();
        let file = packed(codes.into_iter(), &tail);
        for &way in WAYS {
            let (found, of_file) = run(&ctx, &file, [n, k], way);
            assert!(found == ours, "{way:?}");
            assert_eq!(of_file.unwrap_or(scale.clone()), scale);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Turned around twice bytes are what they were, and in place as apart.
    #[test]
    fn twice_is_not_at_all(
        n in 1usize..20,
        blocks in 1usize..6,
        skew in 0usize..20,
        seed in any::<[u8; 31]>(),
    ) {
        let shape = [n, blocks * BLOCK];
        let len = n * blocks * BYTES + TAIL;
        let bytes: Vec<u8> = seed.iter().copied().cycle().take(len).collect();
        for ctx in contexts() {
            let (once, _) = run(&ctx, &bytes, shape, way(false, false, [0, skew]));
            let (in_place, _) = run(&ctx, &bytes, shape, way(true, false, [skew, 0]));
            prop_assert!(once == in_place);
            let again = [&once[..], &bytes[len - TAIL..]].concat();
            let (twice, _) = run(&ctx, &again, shape, way(false, false, [0, 0]));
            prop_assert!(twice == bytes[..len - TAIL]);
        }
    }
}

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const UNSUPPORTED: unsloth_status = UNSLOTH_STATUS_UNSUPPORTED;

const MISUSE: &[Misuse<unsloth_weight_repack_params>] = &[
    (
        |p| p.format = 1,
        INVALID,
        "weight_repack: format is 1, allowed: 0 (i2_s)",
    ),
    (
        |p| p.packed = absent(),
        INVALID,
        "weight_repack: packed is absent (rank 0), it is required",
    ),
    (
        |p| p.out = absent(),
        INVALID,
        "weight_repack: out is absent (rank 0), it is required",
    ),
    (
        |p| p.packed.dtype = DType::F32 as u32,
        INVALID,
        "weight_repack: packed has dtype f32, allowed: i8",
    ),
    (
        |p| p.packed.dtype = DType::Tq2_0 as u32,
        UNSUPPORTED,
        "weight_repack: packed has dtype tq2_0, allowed: i8",
    ),
    (
        |p| {
            p.packed.quantization = Box::leak(Box::new(unsloth_quantization {
                struct_size: size_of::<unsloth_quantization>() as u32,
                reserved: 0,
                scale: p.scale,
                zero: absent(),
            }));
        },
        INVALID,
        "weight_repack: packed has scales: a file's are in its bytes",
    ),
    (
        |p| p.out.dtype = DType::I8 as u32,
        UNSUPPORTED,
        "weight_repack: out has dtype i8, allowed: ternary",
    ),
    (
        // Where codes would change in place, too.
        |p| (p.out.dtype, p.out.data) = (DType::F32 as u32, p.packed.data),
        INVALID,
        "weight_repack: out has dtype f32, allowed: ternary",
    ),
    (
        |p| (p.out.rank, p.out.strides) = (1, [0; 6]),
        INVALID,
        "weight_repack: out has rank 1, allowed: 2",
    ),
    (
        |p| (p.out.shape[1], p.out.strides) = (192, [0; 6]),
        INVALID,
        "weight_repack: out has rows of 192 elements, allowed for ternary: multiples of 128",
    ),
    (
        |p| (p.out.shape[1], p.out.strides) = (128, [256, 1, 0, 0, 0, 0]),
        INVALID,
        "weight_repack: out has shape [2, 128] with strides [256, 1], it must be contiguous",
    ),
    (
        |p| p.out.shape[0] = 1,
        INVALID,
        "weight_repack: packed has shape [160], expected [96]",
    ),
    (
        |p| p.packed.shape[0] = 128,
        INVALID,
        "weight_repack: packed has shape [128], expected [160]",
    ),
    (
        |p| (p.packed.shape[0], p.out.data) = (159, p.packed.data),
        INVALID,
        "weight_repack: packed has shape [159], expected [160]",
    ),
    (
        |p| (p.packed.rank, p.packed.shape, p.packed.strides) = (2, [5, 32, 0, 0, 0, 0], [0; 6]),
        INVALID,
        "weight_repack: packed has shape [5, 32], expected [160]",
    ),
    (
        |p| p.packed.strides[0] = 2,
        INVALID,
        "weight_repack: packed has shape [160] with strides [2], it must be contiguous",
    ),
    (
        |p| p.scale.dtype = DType::F16 as u32,
        INVALID,
        "weight_repack: scale has dtype f16, allowed: f32",
    ),
    (
        |p| (p.scale.shape[0], p.scale.strides) = (2, [0; 6]),
        INVALID,
        "weight_repack: scale has shape [2], expected [1]",
    ),
    (
        |p| p.out.data = p.packed.data.wrapping_byte_add(1),
        INVALID,
        "weight_repack: out overlaps packed",
    ),
    (
        |p| p.packed.data = p.out.data.wrapping_byte_sub(32),
        INVALID,
        "weight_repack: out overlaps packed",
    ),
    (
        |p| p.scale.data = p.packed.data.wrapping_byte_add(128),
        INVALID,
        "weight_repack: scale overlaps packed",
    ),
    (
        |p| (p.scale.data, p.out.data) = (p.packed.data.wrapping_byte_add(128), p.packed.data),
        INVALID,
        "weight_repack: scale overlaps packed",
    ),
    (
        |p| p.scale.data = p.out.data,
        INVALID,
        "weight_repack: scale overlaps out",
    ),
    (
        |p| p.out.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "weight_repack: data of out is NULL",
    ),
    (
        |p| (p.packed.data, p.out.data) = (std::ptr::null_mut(), std::ptr::null_mut()),
        UNSLOTH_STATUS_NULL_POINTER,
        "weight_repack: data of packed is NULL",
    ),
];

#[test]
fn misuse_is_refused_and_writes_nothing() {
    for (memory, ctx) in abi::backends() {
        let poisoned =
            |dtype, shape: &[usize]| TestTensor::poisoned(dtype, contiguous(shape)).upload(&memory);
        let packed = bytes_at(&packed([1; 512].into_iter(), &[0; TAIL]), 0).upload(&memory);
        let (codes, scale) = (poisoned(DType::I8, &[128]), poisoned(DType::F32, &[1]));
        // SAFETY: integers and pointers, size first.
        let mut good: unsloth_weight_repack_params = unsafe { abi::zeroed_params() };
        (good.packed, good.scale) = (c_tensor(&packed), c_tensor(&scale));
        good.out = abi::described(codes.data(), DType::Ternary, &contiguous(&[2, 256]));
        let operation = Operation {
            name: "weight_repack",
            supported: unsloth_weight_repack_supported,
            forward: unsloth_weight_repack_forward,
        };
        operation.check_on(&ctx, good, MISUSE, &[&codes, &scale]);
    }
}
