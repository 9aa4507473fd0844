//! The devices that this machine has, as contexts.
//!
//! A test of a GPU ends early on a machine without one. Where `UNSLOTH_REQUIRE_GPU` is 1, as
//! `scripts/gpu_run.sh` sets it, it fails instead: a broken driver must not look like a green run.
//! `UNSLOTH_TEST_BACKEND` names the only backend that tests are to see, which must be there.

use unsloth::{Backend, Context, ContextOptions};

/// A context of every backend that is compiled in and has a device.
pub fn contexts() -> Vec<Context> {
    let only = std::env::var("UNSLOTH_TEST_BACKEND").ok();
    let there = |backend: &Backend| match &only {
        Some(only) => only == backend.name(),
        None => *backend == Backend::Cpu || gpu_is_there(),
    };
    let make = |backend| {
        let options = ContextOptions {
            backend,
            ..ContextOptions::default()
        };
        Context::new(&options).expect("a backend with a device gives a context")
    };
    let contexts: Vec<Context> = Backend::ALL.into_iter().filter(there).map(make).collect();
    assert!(
        !contexts.is_empty(),
        "UNSLOTH_TEST_BACKEND is {only:?}, which is no backend"
    );
    contexts
}

/// A context of its own of the first GPU, if this build has the backend and the machine a device.
pub fn gpu() -> Option<Context> {
    gpu_is_there().then(|| Context::new(&gpu_options()).expect("a device gives a context"))
}

/// A context of the first GPU, if that is a Hopper and this build has the kernels for it.
pub fn hopper() -> Option<Context> {
    let ctx = gpu()?;
    let info = Backend::Cuda.device_info(0).expect("a device is described");
    let mut built = env!("UNSLOTH_CUDA_ARCHITECTURES").split(' ');
    if info.compute_capability == (9, 0) && built.any(|architecture| architecture == "90a") {
        return Some(ctx);
    }
    println!(
        "not run: {} has no kernels for Hopper in this build",
        info.name
    );
    None
}

pub fn gpu_options() -> ContextOptions {
    ContextOptions {
        backend: Backend::Cuda,
        ..ContextOptions::default()
    }
}

/// Whether there is a GPU. Panics if there is none and `UNSLOTH_REQUIRE_GPU` asks for one.
#[track_caller]
fn gpu_is_there() -> bool {
    let problem = match Backend::Cuda.device_count() {
        Ok(count) if count > 0 => return true,
        Ok(_) => "the driver knows no device".to_string(),
        Err(error) => error.to_string(),
    };
    let required = std::env::var_os("UNSLOTH_REQUIRE_GPU").is_some_and(|value| value == "1");
    assert!(!required, "UNSLOTH_REQUIRE_GPU is set: {problem}");
    false
}
