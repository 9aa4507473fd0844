//! What an optimizer refuses, in which words, and that nothing was written.

use unsloth::DType;
use unsloth::Layout;
use unsloth::ffi::optimizer::*;
use unsloth::ffi::optimizer_handle::*;
use unsloth::ffi::status::*;

use super::model::{BF16, F32, Model, Shape};
use crate::common::abi::{self, assert_fails, c_tensor, last_message, zeroed_params};
use crate::common::{TestTensor, rng};

const INVALID: unsloth_status = UNSLOTH_STATUS_INVALID_ARGUMENT;
const UNSUPPORTED: unsloth_status = UNSLOTH_STATUS_UNSUPPORTED;

/// A good call's params with the lists that they point to, which rows of the table spoil.
struct Good {
    params: unsloth_optimizer_params,
    parameters: [unsloth_parameter; 2],
    groups: [unsloth_parameter_group; 1],
}

type Spoil = (fn(&mut Good), unsloth_status, &'static str);

/// What is refused by queries as well.
const MISUSE: &[Spoil] = &[
    (
        |g| g.params.kind = 4,
        INVALID,
        "optimizer: kind is 4, allowed: 0 (adam), 2 (sgd), 3 (sgd with momentum)",
    ),
    (
        |g| g.params.kind = UNSLOTH_OPTIMIZER_ADAM_8BIT,
        UNSUPPORTED,
        "optimizer: kind is 1 (adam 8-bit), which is estimated, but not made by this version",
    ),
    (
        |g| g.params.decoupled = 2,
        INVALID,
        "optimizer: decoupled is 2, allowed: 0, 1",
    ),
    (
        |g| g.params.nesterov = 1,
        INVALID,
        "optimizer: nesterov is set without momentum",
    ),
    (
        |g| (g.params.kind, g.params.nesterov) = (UNSLOTH_OPTIMIZER_SGD, 1),
        INVALID,
        "optimizer: nesterov is set without momentum",
    ),
    (
        |g| g.params.zero_gradients = 3,
        INVALID,
        "optimizer: zero_gradients is 3, allowed: 0, 1",
    ),
    (
        |g| g.params.beta1 = 1.0,
        INVALID,
        "optimizer: beta1 is 1, allowed: 0 to below 1",
    ),
    (
        |g| g.params.beta2 = -0.5,
        INVALID,
        "optimizer: beta2 is -0.5, allowed: 0 to below 1",
    ),
    (
        |g| g.params.epsilon = f32::NAN,
        INVALID,
        "optimizer: epsilon is NaN, allowed: finite, above 0",
    ),
    (
        |g| (g.params.kind, g.params.momentum) = (UNSLOTH_OPTIMIZER_SGD_MOMENTUM, 1.5),
        INVALID,
        "optimizer: momentum is 1.5, allowed: 0 to below 1",
    ),
    (
        |g| g.params.max_norm = -1.0,
        INVALID,
        "optimizer: max_norm is -1, at least 0 is needed",
    ),
    (
        |g| g.params.max_norm = f32::INFINITY,
        INVALID,
        "optimizer: max_norm is inf, a finite number is needed",
    ),
    (
        |g| g.params.precision.compute_dtype = 4,
        INVALID,
        "optimizer: precision.compute_dtype is 4, allowed: 0, 1 (f32), 2 (f16), 3 (bf16)",
    ),
    (
        |g| g.params.precision.compute_dtype = 2,
        INVALID,
        "optimizer: parameters[1].weight has dtype bf16, the compute dtype is f16",
    ),
    (
        |g| g.params.precision.master = 4,
        INVALID,
        "optimizer: precision.master is 4, \
         allowed: 0 (none), 1 (f32), 2 (remainder), 3 (stochastic)",
    ),
    (
        |g| (g.params.precision.master, g.parameters[1].weight.dtype) = (3, 2),
        UNSUPPORTED,
        "optimizer: parameters[1].weight has dtype f16, allowed with this master: f32, bf16",
    ),
    (
        |g| g.params.precision.loss_scale.dynamic = 2,
        INVALID,
        "optimizer: precision.loss_scale.dynamic is 2, allowed: 0, 1",
    ),
    (
        |g| g.params.precision.loss_scale.init = -2.0,
        INVALID,
        "optimizer: precision.loss_scale.init is -2, allowed: finite, above 0",
    ),
    (
        |g| g.params.precision.loss_scale.growth = 0.5,
        INVALID,
        "optimizer: precision.loss_scale.growth is 0.5, allowed: finite, at least 1",
    ),
    (
        |g| g.params.precision.loss_scale.backoff = 2.0,
        INVALID,
        "optimizer: precision.loss_scale.backoff is 2, allowed: finite, above 0, at most 1",
    ),
    (
        |g| g.params.parameters = std::ptr::null(),
        UNSLOTH_STATUS_NULL_POINTER,
        "optimizer: parameters is NULL",
    ),
    (
        |g| g.params.num_parameters = usize::MAX / 2,
        INVALID,
        "optimizer: parameters has 9223372036854775807 entries, more than the address space",
    ),
    (
        |g| g.params.num_parameters = 0,
        INVALID,
        "optimizer: num_parameters is 0, at least 1 is needed",
    ),
    (
        |g| g.params.num_groups = 0,
        INVALID,
        "optimizer: num_groups is 0, at least 1 is needed",
    ),
    (
        |g| g.groups[0].learning_rate = -1.0,
        INVALID,
        "optimizer: groups[0].learning_rate is -1, at least 0 is needed",
    ),
    (
        |g| g.groups[0].weight_decay = f32::NAN,
        INVALID,
        "optimizer: groups[0].weight_decay is NaN, a finite number is needed",
    ),
    (
        |g| g.parameters[1].group = 1,
        INVALID,
        "optimizer: parameters[1].group is 1, the number of groups is 1",
    ),
    (
        |g| g.parameters[0].reserved = 1,
        INVALID,
        "optimizer: parameters[0].reserved is 1, allowed: 0",
    ),
    (
        |g| g.parameters[0].weight = abi::absent(),
        INVALID,
        "optimizer: parameters[0].weight is absent (rank 0), it is required",
    ),
    (
        |g| g.parameters[1].gradient.dtype = 4,
        INVALID,
        "optimizer: parameters[1].gradient has dtype i32, allowed: f32, f16, bf16",
    ),
    (
        |g| g.parameters[1].gradient.flags = 16,
        INVALID,
        "optimizer: parameters[1].gradient.flags is 0x10, allowed: 0 or a sum of 1 (strided), 2 (float_activations), 4 (constant) and 8 (int8_activations)",
    ),
    (
        |g| g.parameters[0].gradient.shape[1] = 3,
        INVALID,
        "optimizer: parameters[0].gradient has shape [2, 3], weight has [2, 4]",
    ),
    (
        |g| g.parameters[0].weight.strides[0] = 5,
        INVALID,
        "optimizer: parameters[0].weight has shape [2, 4] with strides [5, 1], \
         it must be contiguous",
    ),
    (
        |g| {
            for t in [&mut g.parameters[0].weight, &mut g.parameters[0].gradient] {
                (t.data, t.shape, t.strides) = (std::ptr::null_mut(), [1 << 58; 6], [0; 6]);
                t.rank = 1;
            }
        },
        INVALID,
        "optimizer: parameters have too many elements",
    ),
];

/// What data alone tells.
const OF_DATA: &[Spoil] = &[
    (
        |g| g.params.state = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "optimizer: state is NULL",
    ),
    (
        |g| g.params.state_size -= 1,
        INVALID,
        "optimizer: state_size is 1535 bytes, 1536 are required",
    ),
    (
        |g| g.parameters[1].gradient.data = std::ptr::null_mut(),
        UNSLOTH_STATUS_NULL_POINTER,
        "optimizer: data of parameters[1].gradient is NULL",
    ),
    (
        |g| g.parameters[1].gradient.data = g.parameters[0].weight.data,
        INVALID,
        "optimizer: parameters[1].gradient overlaps parameters[0].weight",
    ),
    (
        |g| g.parameters[1].weight.data = g.params.state.wrapping_byte_add(64),
        INVALID,
        "optimizer: state overlaps parameters[1].weight",
    ),
];

#[test]
fn misuse_is_refused() {
    for (ctx, handle) in abi::backends() {
        let rng = &mut rng();
        let shapes = [
            Shape(F32, F32, &[2, 4], 0, 0),
            Shape(BF16, BF16, &[3], 0, 0),
        ];
        let model = Model::new(&ctx, rng, &shapes);
        let parameter = |i: usize| unsloth_parameter {
            weight: c_tensor(&model.weights[i]),
            gradient: c_tensor(&model.gradients[i]),
            group: 0,
            reserved: 0,
        };
        let size = 1536;
        let poison = TestTensor::poisoned(DType::Bool, Layout::contiguous(&[size]).unwrap());
        let state = poison.upload(&ctx);
        let with = |spoil: fn(&mut Good), run: &mut dyn FnMut(&unsloth_optimizer_params)| {
            let mut good = Good {
                // SAFETY: integers, floats and pointers.
                params: unsafe { zeroed_params() },
                parameters: [parameter(0), parameter(1)],
                groups: [unsloth_parameter_group {
                    learning_rate: 1.0,
                    weight_decay: 0.0,
                }],
            };
            good.params.parameters = good.parameters.as_ptr();
            good.params.groups = good.groups.as_ptr();
            (good.params.num_parameters, good.params.num_groups) = (2, 1);
            (good.params.state, good.params.state_size) = (state.data(), size);
            spoil(&mut good);
            run(&good.params);
        };
        let none: *mut unsloth_optimizer = std::ptr::null_mut();
        for (spoil, status, message) in MISUSE {
            with(*spoil, &mut |params| {
                let (mut optimizer, mut size, mut implementation) = (none, 7, 7);
                // SAFETY: live locals; what is wrong is what is tested.
                unsafe {
                    let got = unsloth_optimizer_supported(handle.0, params, &mut implementation);
                    assert_fails(got, *status, message);
                    let got = unsloth_optimizer_state_size(handle.0, params, &mut size);
                    assert_fails(got, *status, message);
                    let got =
                        unsloth_optimizer_create(handle.0, params, none.cast(), &mut optimizer);
                    assert_fails(got, *status, message);
                }
                assert_eq!((optimizer, size, implementation), (none, 7, 7));
            });
        }
        for (spoil, status, message) in OF_DATA {
            with(*spoil, &mut |params| {
                let mut optimizer = none;
                // SAFETY: as above.
                let got = unsafe {
                    unsloth_optimizer_create(handle.0, params, none.cast(), &mut optimizer)
                };
                assert_fails(got, *status, message);
                assert!(optimizer.is_null());
            });
        }
        assert_eq!(state.download().bits(), poison.bits());
        with(|_| (), &mut |params| {
            let (mut optimizer, mut needed) = (none, 0);
            // SAFETY: live locals and memory of the context.
            unsafe {
                let got = unsloth_optimizer_state_size(handle.0, params, &mut needed);
                assert_eq!((got, needed), (UNSLOTH_STATUS_SUCCESS, size));
                let got = unsloth_optimizer_create(handle.0, params, none.cast(), &mut optimizer);
                assert_eq!(got, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
                misuse_of_handles(optimizer);
                let got = unsloth_optimizer_step(optimizer, none.cast());
                assert_eq!(got, UNSLOTH_STATUS_SUCCESS, "{}", last_message());
                let got = unsloth_optimizer_destroy(optimizer);
                assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
                let got = unsloth_optimizer_step(optimizer, none.cast());
                assert_eq!(got, UNSLOTH_STATUS_INVALID_HANDLE);
            }
        });
    }
}

/// # Safety
/// A live optimizer.
unsafe fn misuse_of_handles(optimizer: *mut unsloth_optimizer) {
    let none = std::ptr::null_mut();
    let good = unsloth_parameter_group {
        learning_rate: 0.5,
        weight_decay: 0.0,
    };
    let bad = unsloth_parameter_group {
        learning_rate: f32::INFINITY,
        ..good
    };
    let mut data = vec![0u8; 2000];
    let mut size = 0;
    // SAFETY: live locals.
    unsafe {
        let got = unsloth_optimizer_set_group(optimizer, 1, &good, none);
        assert_fails(
            got,
            INVALID,
            "optimizer_set_group: group is 1, the number of groups is 1",
        );
        let got = unsloth_optimizer_set_group(optimizer, 0, &bad, none);
        let message = "optimizer_set_group: learning_rate is inf, a finite number is needed";
        assert_fails(got, INVALID, message);
        let got = unsloth_gradients_scale(optimizer, f32::NAN, none);
        let message = "gradients_scale: factor is NaN, a finite number is needed";
        assert_fails(got, INVALID, message);
        let got = unsloth_optimizer_saved_size(optimizer, &mut size);
        assert_eq!((got, size), (UNSLOTH_STATUS_SUCCESS, 64 + 2 * 16 + 4 * 256));
        let got = unsloth_optimizer_save(optimizer, data.as_mut_ptr().cast(), size + 1, none);
        let message = "optimizer_save: size is 1121, the state of this optimizer is 1120 bytes";
        assert_fails(got, INVALID, message);
        assert!(data.iter().all(|byte| *byte == 0));
        let got = unsloth_optimizer_save(optimizer, data.as_mut_ptr().cast(), size, none);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
        for (at, byte, size, status, problem) in SPOILT {
            let mut data = data.clone();
            data[*at] = *byte;
            let got = unsloth_optimizer_load(optimizer, data.as_ptr().cast(), *size, none);
            assert_fails(got, *status, &format!("optimizer_load: {problem}"));
        }
        let got = unsloth_optimizer_load(optimizer, data.as_ptr().cast(), size, none);
        assert_eq!(got, UNSLOTH_STATUS_SUCCESS);
    }
}

/// A byte of what was saved, what it becomes, the size that is stated, and what follows.
const SPOILT: &[(usize, u8, usize, unsloth_status, &str)] = &[
    (
        0,
        b'U',
        63,
        INVALID,
        "size is 63, the state of this optimizer is 1120 bytes",
    ),
    (
        0,
        b'X',
        1120,
        INVALID,
        "data is not the saved state of an optimizer",
    ),
    (
        8,
        2,
        1120,
        UNSUPPORTED,
        "data is of version 2, this library reads 1",
    ),
    (
        12,
        3,
        1120,
        INVALID,
        "data is of sgd with momentum, this optimizer is adam",
    ),
    (
        16,
        3,
        1120,
        INVALID,
        "data has 3 parameters, this optimizer 2",
    ),
    (24, 2, 1120, INVALID, "data has 2 groups, this optimizer 1"),
    (
        0,
        b'U',
        90,
        INVALID,
        "size is 90, the state of this optimizer is 1120 bytes",
    ),
    (
        64 + 16,
        9,
        1120,
        INVALID,
        "data has 9 elements of bf16 with no master as parameters[1], \
         this optimizer 3 of bf16 with no master",
    ),
    (
        0,
        b'U',
        1119,
        INVALID,
        "size is 1119, the state of this optimizer is 1120 bytes",
    ),
    (
        64 + 32 + 3,
        0xff,
        1120,
        INVALID,
        "data has a loss scale of -inf",
    ),
];
