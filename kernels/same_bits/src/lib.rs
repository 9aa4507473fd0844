//! Launches kernels of the catalog through CubeCL's own runtime: NVRTC compiles them, its allocator gives memory, its streams carry them.
//! What differs from the library's launch is everything but the kernel, so the same bits show that emitting, compiling ahead of time and
//! packing arguments change nothing. The test in `tests/` does so; it needs a GPU, and a CUDA toolkit's headers and NVRTC at run time.

use cubecl_core::ir::{AddressType, ElemType, StorageType, UIntKind};
use cubecl_core::prelude::{
    ArrayArg, CubeKernel, KernelDefinition, KernelId, KernelLauncher, KernelMetadata,
};
use cubecl_core::server::Handle;
use cubecl_core::{CubeCount, CubeDim, KernelSettings, Runtime, client::ComputeClient};
use cubecl_cuda::CudaRuntime;
use unsloth_kernels::catalog;
use unsloth_kernels::emit::{self, Kernel, ScalarType};

/// A kernel of the catalog, as CubeCL's runtime takes one.
#[derive(Clone)]
struct FromCatalog {
    image: &'static str,
    name: String,
    threads: u32,
}

impl KernelMetadata for FromCatalog {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>().info(self.name.clone())
    }

    fn address_type(&self) -> StorageType {
        StorageType::Scalar(ElemType::UInt(UIntKind::U64))
    }
}

impl CubeKernel for FromCatalog {
    fn define(&self) -> KernelDefinition {
        definition(self.image, &self.name)
    }
}

fn definition(image: &'static str, name: &str) -> KernelDefinition {
    let (_, all) = emit::definitions(|| catalog::image(image));
    let found = all.into_iter().find(|(other, _)| other == name);
    found.expect("the catalog's own name").1
}

/// A pointer's memory, or a scalar's value.
#[derive(Clone)]
pub enum Argument {
    /// Memory.
    Buffer(Handle),
    /// A number, whatever its type; f32 exactly.
    Number(f64),
}

/// CubeCL's client for the first GPU.
pub fn client() -> ComputeClient<CudaRuntime> {
    CudaRuntime::client(&Default::default())
}

/// Runs a kernel on `blocks` blocks; `argument` gives each argument by name.
pub fn run(
    client: &ComputeClient<CudaRuntime>,
    image: &'static str,
    kernel: &Kernel,
    blocks: u32,
    argument: impl Fn(&str) -> Argument,
) {
    let threads = kernel.block[0];
    let settings = KernelSettings::default()
        .cube_dim(CubeDim::new_1d(threads))
        .address_type(AddressType::U64);
    let mut launcher = KernelLauncher::<CudaRuntime>::new(settings);
    let types = definition(image, &kernel.name).buffers;
    for (name, declared) in kernel.arguments.buffers.iter().zip(types) {
        let Argument::Buffer(handle) = argument(name) else {
            panic!("{name} is a pointer");
        };
        let len = handle.size_in_used() as usize / declared.ty.storage_type().size();
        // SAFETY: the handle has that many elements.
        let array = unsafe { ArrayArg::from_raw_parts(handle, len) };
        launcher.register_array(array, declared.ty);
    }
    for scalar in &kernel.arguments.scalars {
        let Argument::Number(value) = argument(scalar.name) else {
            panic!("{} is a number", scalar.name);
        };
        match scalar.ty {
            ScalarType::F32 => launcher.register_scalar(value as f32),
            ScalarType::U32 => launcher.register_scalar(value as u32),
            ScalarType::I64 => launcher.register_scalar(value as i64),
            ScalarType::U64 => launcher.register_scalar(value as u64),
        }
    }
    let task = FromCatalog {
        image,
        name: kernel.name.clone(),
        threads,
    };
    assert_eq!(task.threads, definition(image, &task.name).cube_dim.x);
    // SAFETY: the caller's arguments are those of the library's own launch.
    unsafe { launcher.launch_unchecked(CubeCount::new_1d(blocks), task, client) };
}
