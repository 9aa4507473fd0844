//! The same inputs through CubeCL's runtime and through the library's C ABI give the same bits.
//!
//! The library is UNSLOTH_LIBRARY, by default the one that `make CUDA=1 stage` made. Without a GPU nothing is compared.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use half::bf16;
use rand::Rng;
use same_bits::{Argument, client, run};
use unsloth::ffi::context::*;
use unsloth::ffi::memory::*;
use unsloth::ffi::rms_norm::unsloth_rms_norm_params;
use unsloth::ffi::swiglu::unsloth_swiglu_params;
use unsloth::ffi::tensor::unsloth_tensor;
use unsloth_kernels::catalog;
use unsloth_kernels::emit::Kernel;

const BF16: u32 = 3;

/// The library as a C program has it.
struct Library {
    loaded: libloading::Library,
    ctx: *mut unsloth_context,
}

impl Library {
    /// None where there is no GPU.
    fn open() -> Option<Library> {
        let default = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../build/prefix/lib/libunsloth.so"
        );
        let path = std::env::var("UNSLOTH_LIBRARY").unwrap_or_else(|_| default.into());
        // SAFETY: the library under test; its initialisers do nothing.
        let loaded = unsafe { libloading::Library::new(path) }.unwrap();
        let mut library = Library {
            loaded,
            ctx: ptr::null_mut(),
        };
        let params = unsloth_context_params {
            struct_size: size_of::<unsloth_context_params>() as u32,
            backend: UNSLOTH_BACKEND_CUDA,
            device: 0,
            num_threads: 0,
            memory_limit: 0,
        };
        let mut ctx: *mut unsloth_context = ptr::null_mut();
        let made = library.call("unsloth_context_create", |f: F2| {
            // SAFETY: as the header says.
            unsafe { f((&raw const params).cast_mut().cast(), (&raw mut ctx).cast()) }
        });
        if made != 0 {
            println!("skipped: a context on the cuda backend gives status {made}");
            return None;
        }
        library.ctx = ctx;
        Some(library)
    }

    fn call<F: Copy>(&self, name: &str, call: impl FnOnce(F) -> i32) -> i32 {
        // SAFETY: the callers name functions with their types.
        let function = unsafe { self.loaded.get::<F>(name) }.unwrap();
        call(*function)
    }

    fn tensor(&self, values: &[bf16], shape: &[i64]) -> unsloth_tensor {
        let mut data = ptr::null_mut();
        let size = size_of_val(values);
        // SAFETY: types and ranges are those of the header and of `values`.
        unsafe {
            type Alloc = unsafe extern "C" fn(*mut unsloth_context, usize, *mut *mut c_void) -> i32;
            let ok = self.call("unsloth_memory_alloc", |f: Alloc| {
                f(self.ctx, size, &mut data)
            });
            assert_eq!(ok, 0);
            self.copy(
                data,
                values.as_ptr().cast_mut().cast(),
                size,
                UNSLOTH_COPY_KIND_HOST_TO_DEVICE,
            );
        }
        let mut t = absent();
        (t.data, t.dtype, t.rank) = (data, BF16, shape.len() as u32);
        t.shape[..shape.len()].copy_from_slice(shape);
        t
    }

    fn read(&self, t: &unsloth_tensor, count: usize) -> Vec<u16> {
        let mut read = vec![0u16; count];
        // SAFETY: the tensor has as many elements.
        unsafe {
            self.copy(
                read.as_mut_ptr().cast(),
                t.data,
                2 * count,
                UNSLOTH_COPY_KIND_DEVICE_TO_HOST,
            );
        }
        read
    }

    unsafe fn copy(&self, to: *mut c_void, from: *mut c_void, size: usize, kind: u32) {
        type Copy = unsafe extern "C" fn(
            *mut unsloth_context,
            *mut c_void,
            *const c_void,
            usize,
            u32,
            *mut c_void,
        ) -> i32;
        let none = ptr::null_mut();
        // SAFETY: the caller's promise.
        let ok = self.call("unsloth_memory_copy", |f: Copy| unsafe {
            f(self.ctx, to, from, size, kind, none)
        });
        // SAFETY: as above.
        let done = self.call("unsloth_stream_synchronize", |f: F2| unsafe {
            f(self.ctx.cast(), none)
        });
        assert_eq!((ok, done), (0, 0));
    }

    fn forward<P>(&self, name: &str, params: &P) {
        type Forward =
            unsafe extern "C" fn(*mut unsloth_context, *const c_void, *mut c_void) -> i32;
        let ok = self.call(name, |f: Forward| {
            // SAFETY: the tensors are the library's own memory.
            unsafe { f(self.ctx, ptr::from_ref(params).cast(), ptr::null_mut()) }
        });
        assert_eq!(ok, 0);
    }
}

type F2 = unsafe extern "C" fn(*mut c_void, *mut c_void) -> i32;

fn absent() -> unsloth_tensor {
    unsloth_tensor::default()
}

fn random(count: usize) -> Vec<bf16> {
    let mut rng = rand::rng();
    (0..count)
        .map(|_| bf16::from_f32(rng.random_range(-4.0..4.0)))
        .collect()
}

fn bytes(values: &[bf16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn bits(bytes: &[u8]) -> Vec<u16> {
    bytes
        .chunks_exact(2)
        .map(|b| u16::from_ne_bytes([b[0], b[1]]))
        .collect()
}

fn kernels(image: &str) -> Vec<Kernel> {
    catalog::image(image).unwrap().unwrap().kernels
}

fn choice(kernel: &Kernel, name: &str) -> u32 {
    let found = kernel.choices.iter().find(|(other, _)| *other == name);
    found.map_or(0, |(_, value)| *value)
}

/// A divisor, or the part of it that turns division into multiplication.
fn divisor(name: &str, size: u64) -> Argument {
    let shift = size.next_power_of_two().trailing_zeros();
    let number = match name {
        _ if name.ends_with("_multiplier") => (((1 << shift) - size) << 32) / size + 1,
        _ if name.ends_with("_shift") => u64::from(shift),
        _ => size,
    };
    Argument::Number(number as f64)
}

#[test]
fn rms_norm() {
    let Some(library) = Library::open() else {
        return;
    };
    for (rows, dim) in [(37, 576), (64, 4096), (5, 8192)] {
        let (x, residual, weight) = (random(rows * dim), random(rows * dim), random(dim));
        let shape = [rows as i64, dim as i64];
        let blank = vec![bf16::ZERO; rows * dim];
        let params = unsloth_rms_norm_params {
            struct_size: size_of::<unsloth_rms_norm_params>() as u32,
            epsilon: 1e-5,
            weight_offset: 0.0,
            reserved: 0,
            x: library.tensor(&x, &shape),
            out: library.tensor(&blank, &shape),
            weight: library.tensor(&weight, &[dim as i64]),
            residual: library.tensor(&residual, &shape),
            residual_out: library.tensor(&blank, &shape),
        };
        library.forward("unsloth_rms_norm_forward", &params);
        let ours = [&params.out, &params.residual_out].map(|t| library.read(t, rows * dim));

        // One of the forms that the library chooses from: the smallest that hold a row in vectors give the same bits.
        let length = dim as u32 / 8;
        let mut forms: Vec<_> = kernels("norm")
            .into_iter()
            .filter(|k| choice(k, "dtype") == BF16 && choice(k, "residual") == 1)
            .filter(|k| choice(k, "wide") == 0)
            .filter(|k| choice(k, "threads") * choice(k, "vectors") >= length)
            .collect();
        forms.sort_by_key(|k| choice(k, "threads") * choice(k, "vectors"));
        let kernel = &forms[0];
        let client = client();
        let handles: HashMap<_, _> = [
            ("x", bytes(&x)),
            ("residual", bytes(&residual)),
            ("weight", bytes(&weight)),
            ("bias", bytes(&weight)),
            ("out", bytes(&blank)),
            ("residual_out", bytes(&blank)),
        ]
        .into_iter()
        .map(|(name, data)| (name, client.create_from_slice(&data)))
        .collect();
        let rows_per_block = kernel.block[0] / choice(kernel, "threads");
        let blocks = (rows as u32).div_ceil(rows_per_block);
        run(&client, "norm", kernel, blocks, |name| match name {
            "rows" => Argument::Number(rows as f64),
            "length" | "x_0" | "residual_0" | "out_0" | "residual_out_0" => {
                Argument::Number(f64::from(length))
            }
            "weight_dtype" => Argument::Number(f64::from(BF16)),
            "inverse_length" => Argument::Number(f64::from(1.0 / dim as f32)),
            name if name.starts_with("size_") => divisor(name, 1),
            "epsilon" => Argument::Number(f64::from(1e-5f32)),
            name => match handles.get(name) {
                Some(handle) => Argument::Buffer(handle.clone()),
                None => Argument::Number(0.0),
            },
        });
        let theirs = ["out", "residual_out"]
            .map(|name| bits(&client.read_one(handles[name].clone()).unwrap()));
        assert!(ours == theirs, "{} of {rows}x{dim}", kernel.name);
        assert!(ours[0].iter().any(|b| *b != 0));
        println!(
            "{} of {rows}x{dim}: the same {} bits",
            kernel.name,
            32 * rows * dim
        );
    }
}

#[test]
fn swiglu() {
    let Some(library) = Library::open() else {
        return;
    };
    for (activation, count) in [(0, 8 * 1000), (1, 8 * 77), (2, 8 * 4096)] {
        let (gate, up) = (random(count), random(count));
        let blank = vec![bf16::ZERO; count];
        let shape = [count as i64];
        let params = unsloth_swiglu_params {
            struct_size: size_of::<unsloth_swiglu_params>() as u32,
            activation,
            gate_order: 0,
            reserved: 0,
            gate: library.tensor(&gate, &shape),
            up: library.tensor(&up, &shape),
            gate_up: absent(),
            out: library.tensor(&blank, &shape),
        };
        library.forward("unsloth_swiglu_forward", &params);
        let ours = library.read(&params.out, count);

        let all = kernels("swiglu");
        let wanted = [("dtype", BF16), ("activation", activation), ("width", 8)];
        let kernel = all
            .iter()
            .find(|k| wanted.iter().all(|(name, value)| choice(k, name) == *value))
            .unwrap();
        let client = client();
        let handles: HashMap<_, _> = [
            ("gate", bytes(&gate)),
            ("up", bytes(&up)),
            ("out", bytes(&blank)),
        ]
        .into_iter()
        .map(|(name, data)| (name, client.create_from_slice(&data)))
        .collect();
        let length = count as u32 / 8;
        let blocks = length.div_ceil(choice(kernel, "per_block"));
        run(&client, "swiglu", kernel, blocks, |name| match name {
            "length" => Argument::Number(f64::from(length)),
            name if name.starts_with("blocks_per_row") => divisor(name, u64::from(blocks)),
            name if name.starts_with("size_") => divisor(name, 1),
            name => match handles.get(name) {
                Some(handle) => Argument::Buffer(handle.clone()),
                None => Argument::Number(0.0),
            },
        });
        let theirs = bits(&client.read_one(handles["out"].clone()).unwrap());
        assert!(ours == theirs, "{}", kernel.name);
        assert!(ours.iter().any(|b| *b != 0));
        println!("{}: the same {} bits", kernel.name, 16 * count);
    }
}
