//! The life of an optimizer.

use std::ptr;

use unsloth::ffi::optimizer::*;
use unsloth::ffi::optimizer_handle::*;
use unsloth::ffi::status::*;
use unsloth::ffi::tensor::*;

use crate::arena::{Arena, absent};
use crate::collectives::comm;
use crate::input::Input;
use crate::{context, last_message};

/// No call may find a bug in the library; anything else it may answer.
fn passes(status: unsloth_status) -> bool {
    assert_ne!(status, UNSLOTH_STATUS_INTERNAL_ERROR, "{}", last_message());
    status == UNSLOTH_STATUS_SUCCESS
}

/// A small number, seldom any.
fn number(input: &mut Input) -> f32 {
    match input.one_in(32) {
        true => input.float(),
        false => input.pick(&[0.0, 0.5, 0.25, 1.0]),
    }
}

/// A flag or code up to `most`, seldom one more.
fn code(input: &mut Input, most: u32) -> u32 {
    u32::from(input.byte()) % (most + 1) + u32::from(input.one_in(64))
}

fn parameter(input: &mut Input, arena: &mut Arena) -> unsloth_parameter {
    const DTYPES: [unsloth_dtype; 4] = [
        UNSLOTH_DTYPE_F32,
        UNSLOTH_DTYPE_BF16,
        UNSLOTH_DTYPE_BF16,
        UNSLOTH_DTYPE_F16,
    ];
    let shape = [1 + input.up_to(3), input.pick(&[0, 1, 7, 64, 6000])];
    let mut contiguous = |input: &mut Input| {
        let dtype = input.pick(&DTYPES);
        // Most of what the arena makes has gaps, which an optimizer refuses.
        loop {
            let t = arena.tensor(input, dtype, &shape);
            if t.strides == absent().strides || input.one_in(8) {
                return t;
            }
        }
    };
    unsloth_parameter {
        weight: contiguous(input),
        gradient: contiguous(input),
        group: code(input, 1),
        reserved: u32::from(input.one_in(64)),
    }
}

pub fn run(input: &mut Input) {
    let mut arena = Arena::default();
    let count = 1 + input.up_to(2) as usize;
    let parameters: Vec<_> = (0..count).map(|_| parameter(input, &mut arena)).collect();
    let groups = [(); 2].map(|()| unsloth_parameter_group {
        learning_rate: number(input),
        weight_decay: number(input),
    });
    // SAFETY: integers, floats and pointers.
    let mut params: unsloth_optimizer_params = unsafe { std::mem::zeroed() };
    params.struct_size = size_of::<unsloth_optimizer_params>() as u32;
    params.kind = code(input, 3);
    params.decoupled = code(input, 1);
    params.nesterov = u32::from(params.kind == UNSLOTH_OPTIMIZER_SGD_MOMENTUM);
    params.zero_gradients = code(input, 1);
    params.beta1 = number(input).min(0.5);
    params.max_norm = number(input);
    params.precision.master = code(input, 3);
    params.precision.loss_scale.dynamic = code(input, 1);
    params.precision.loss_scale.interval = code(input, 3);
    params.seed = input.word();
    params.parameters = parameters.as_ptr();
    params.num_parameters = count;
    params.groups = groups.as_ptr();
    params.num_groups = 2 - usize::from(input.one_in(8));
    if input.one_in(4) {
        params.comm = comm(input);
    }
    let mut size = 0;
    // SAFETY: pointers to live locals and blocks of the sizes stated.
    unsafe {
        let sized = passes(unsloth_optimizer_state_size(context(), &params, &mut size));
        let supported = passes(unsloth_optimizer_supported(
            context(),
            &params,
            ptr::null_mut(),
        ));
        assert_eq!(sized, supported, "{}", last_message());
        if size < 1 << 22 && arena.is_small() {
            params.state = arena.scratch(size).cast();
            params.state_size = size - usize::from(sized && input.one_in(32));
        }
        let mut optimizer = ptr::null_mut();
        let none = ptr::null_mut();
        if !passes(unsloth_optimizer_create(
            context(),
            &params,
            none,
            &mut optimizer,
        )) {
            assert!(optimizer.is_null() && arena.is_untouched());
            return;
        }
        assert!(sized);
        live(input, optimizer);
        let destroyed = [(); 2].map(|()| unsloth_optimizer_destroy(optimizer));
        assert_eq!(
            destroyed,
            [UNSLOTH_STATUS_SUCCESS, UNSLOTH_STATUS_INVALID_HANDLE]
        );
    }
}

/// # Safety
/// A live optimizer.
unsafe fn live(input: &mut Input, optimizer: *mut unsloth_optimizer) {
    let none = ptr::null_mut();
    let (mut size, mut steps, mut counted) = (0, 0, true);
    // SAFETY: pointers to live locals.
    unsafe {
        assert!(passes(unsloth_optimizer_saved_size(optimizer, &mut size)));
        let mut saved = vec![0u8; size];
        let to = saved.as_mut_ptr();
        assert!(passes(unsloth_optimizer_save(
            optimizer,
            to.cast(),
            size,
            none
        )));
        for _ in 0..8 {
            match input.byte() % 6 {
                0 | 1 => {
                    assert!(passes(unsloth_optimizer_step(optimizer, none)));
                    steps += 1;
                }
                2 => {
                    passes(unsloth_gradients_scale(optimizer, input.float(), none));
                }
                3 => {
                    let values = unsloth_parameter_group {
                        learning_rate: number(input),
                        weight_decay: number(input),
                    };
                    let group = code(input, 2);
                    passes(unsloth_optimizer_set_group(optimizer, group, &values, none));
                }
                4 => {
                    let mut scale = absent();
                    assert!(passes(unsloth_optimizer_loss_scale(optimizer, &mut scale)));
                    assert!(scale.data.cast::<f32>().read() > 0.0);
                }
                _ => {
                    let mut spoilt = saved.clone();
                    if input.one_in(2) {
                        spoilt[input.up_to(size as i64 - 1) as usize] = input.byte();
                    }
                    let stated = size - usize::from(input.one_in(8));
                    let from = spoilt.as_ptr();
                    if passes(unsloth_optimizer_load(optimizer, from.cast(), stated, none)) {
                        counted = false;
                    }
                }
            }
        }
        let mut status: unsloth_optimizer_status = std::mem::zeroed();
        status.struct_size = size_of::<unsloth_optimizer_status>() as u32;
        assert!(passes(unsloth_optimizer_read(optimizer, none, &mut status)));
        assert!(!counted || status.step + status.skipped == steps);
    }
}
