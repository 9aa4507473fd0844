//! What every integration test shares: contexts of each backend that this machine has, poisoned and
//! guarded tensors, f64 references, and the rules by which results are judged.
//!
//! A test builds [`TestTensor`]s on the host, uploads them to a context, runs the operation,
//! downloads the outputs and compares them with a [`reference`]. Gaps between strided elements, the
//! guard bytes around every tensor and all outputs are poisoned before the run: reading or writing
//! where one should not shows.
#![allow(dead_code, unused_imports)] // each test binary uses its part

pub mod abi;
pub mod attention;
pub mod attention_block;
pub mod devices;
#[cfg(feature = "cuda")]
pub mod graph;
pub mod guarded;
pub mod head;
pub mod kv_cache;
pub mod reference;
pub mod rules;
pub mod tensor;
pub mod workspace;

use std::cell::Cell;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use rand::SeedableRng;
use rand::rngs::StdRng;
use unsloth::{DType, InOut, Layout};

pub use devices::{contexts, gpu, gpu_options, hopper};
pub use rules::{
    assert_close, assert_close_of_sums, assert_flash_rule, assert_flash_rule_of_sums,
    assert_gradient_rule, cut_off,
};
pub use tensor::{DeviceTensor, TestTensor};

/// The floating-point dtypes, for tables.
pub const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// A fresh random generator. Its seed goes to the test's output, and `UNSLOTH_TEST_SEED` repeats
/// it. Where `UNSLOTH_TEST_SEEDS` is given, seeds count on from it in each test: other numbers for
/// each generator, the same in each run.
pub fn rng() -> StdRng {
    thread_local! {
        // Each test has a thread.
        static CALLS: Cell<u64> = const { Cell::new(0) };
    }
    let number = |name| {
        let text = std::env::var(name).ok()?;
        let number: Result<u64, _> = text.parse();
        Some(number.unwrap_or_else(|_| panic!("{name} is a number")))
    };
    let calls = CALLS.replace(CALLS.get() + 1);
    let seed = number("UNSLOTH_TEST_SEED")
        .or_else(|| Some(number("UNSLOTH_TEST_SEEDS")?.wrapping_add(calls)))
        .unwrap_or_else(rand::random);
    println!("UNSLOTH_TEST_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// `x` in place, or apart from `out`.
pub fn in_out<'a>(in_place: bool, x: &'a mut DeviceTensor, out: &'a mut DeviceTensor) -> InOut<'a> {
    match in_place {
        true => InOut::InPlace(x.view_mut()),
        false => InOut::Apart {
            input: x.view(),
            output: out.view_mut(),
        },
    }
}

/// The row-major layout of a shape.
pub fn contiguous(shape: &[usize]) -> Layout {
    Layout::contiguous(shape).unwrap()
}

/// Values rounded to a dtype: what a plain implementation stores.
pub fn rounded(dtype: DType, values: &[f64]) -> Vec<f64> {
    values.iter().map(|v| tensor::round_to(dtype, *v)).collect()
}

/// Every row of a table, with its description in the panic message of a failing one. Under a
/// sanitizer, which slows a kernel down a hundredfold, `UNSLOTH_TEST_EVERY=n` runs every nth case
/// of all tables, counted on from table to table: with a prime n the tables of several dtypes give
/// different cases.
pub fn for_each_case<C: std::fmt::Debug>(cases: &[C], run: impl Fn(&C)) {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let every = match std::env::var("UNSLOTH_TEST_EVERY") {
        Ok(text) => text.parse().expect("UNSLOTH_TEST_EVERY is a number"),
        Err(_) => NonZeroUsize::MIN,
    };
    for case in cases {
        if COUNT.fetch_add(1, Ordering::Relaxed) % every != 0 {
            continue;
        }
        println!("case {case:?}");
        run(case);
    }
}
