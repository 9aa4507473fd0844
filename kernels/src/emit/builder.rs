//! Declares the arguments of a kernel, and compiles it to CUDA C++.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};

use cubecl::ir::{
    ContiguousElements, ManagedVariable, MatrixLayout, MmaProperties, Scope, TargetProperties, Type,
};
use cubecl::prelude::*;
use cubecl_core::Compiler;
use cubecl_core::server::ExecutionMode;
use cubecl_cpp::cuda::{CudaDialect, mma::CudaWmmaCompiler, mma::contiguous_elements_cuda};
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, Dialect, SharedMemory,
};

use super::text::{await_previous_kernel, pass_by_value, split};
use super::{Arguments, Choice, Kernel, Scalar, ScalarType};
use crate::Error;

/// Declares a kernel's arguments in the order in which its function takes them.
pub struct Builder {
    inner: KernelBuilder,
    buffers: Vec<&'static str>,
    scalars: Vec<(&'static str, ScalarType)>,
    by_value: Option<(&'static str, usize)>,
}

impl Default for Builder {
    fn default() -> Self {
        let mut inner = KernelBuilder::default();
        // Tensors may have more than 2³² elements.
        AddressType::U64.register(&mut inner.scope);
        inner.runtime_properties(tensor_core_properties());
        Builder {
            inner,
            buffers: Vec::new(),
            scalars: Vec::new(),
            by_value: None,
        }
    }
}

impl Builder {
    /// The scope that the kernel's `expand` function writes to.
    pub fn scope(&mut self) -> &mut Scope {
        &mut self.inner.scope
    }

    /// The type of elements of an array.
    pub fn type_of<T: CubePrimitive>(&self) -> Type {
        T::as_type(&self.inner.scope)
    }

    /// A pointer that is only read, to memory that nothing writes meanwhile: it becomes `const T *__restrict__`.
    pub fn read(&mut self, name: &'static str, ty: Type) -> ManagedVariable {
        self.buffers.push(name);
        self.inner.input_array(ty)
    }

    /// A pointer that is written, or read while another pointer may write the same memory.
    pub fn write(&mut self, name: &'static str, ty: Type) -> ManagedVariable {
        self.buffers.push(name);
        self.inner.output_array(ty)
    }

    /// An array of `len` f32 that travels with the launch, for what the host computes: no memory has to be there for it. At most one,
    /// after all pointers.
    pub fn by_value(&mut self, name: &'static str, len: usize) -> ManagedVariable {
        self.by_value = Some((name, len));
        let ty = self.type_of::<f32>();
        self.inner.input_array(ty)
    }

    /// A scalar.
    pub fn scalar(&mut self, name: &'static str, ty: ScalarType) -> ManagedVariable {
        self.scalars.push((name, ty));
        self.inner.scalar(ty.storage())
    }

    /// Compiles what was written to the scope.
    ///
    /// # Errors
    /// CubeCL refuses the kernel.
    pub fn finish(self, name: String, choices: Vec<Choice>, threads: u32) -> Result<Kernel, Error> {
        let settings = KernelSettings::default()
            .cube_dim(CubeDim::new_1d(threads))
            .address_type(AddressType::U64)
            .kernel_name(name.clone());
        let mut definition = self.inner.build(settings);
        DEFINITIONS.with_borrow_mut(|kept| {
            if let Some(kept) = kept {
                // Copies share a pool of variables, which the first to be compiled would empty.
                let variables = definition.body.allocator.take_variables();
                definition.body.locals.extend(variables);
                kept.push((name.clone(), definition.clone()));
            }
        });
        let options = CompilationOptions {
            warp_size: 32,
            supports_features: CppSupportedFeatures {
                grid_constants: true,
                clusters: false,
                fast_math: true,
                fast_tanh: true,
                elect_sync: false,
            },
        };
        // CubeCL numbers what it names with one counter for all threads, which every kernel begins anew.
        static COUNTING: Mutex<()> = Mutex::new(());
        let _alone = COUNTING.lock().unwrap_or_else(PoisonError::into_inner);
        // Unchecked: kernels guard their own bounds; the checks would need array lengths at every launch.
        let mut compiled = CppCompiler::<CudaDialect<CudaWmmaCompiler>>::default()
            .compile(
                definition,
                &options,
                ExecutionMode::Unchecked,
                ScalarType::U64.storage(),
            )
            .map_err(|error| Error::Expand {
                kernel: name.clone(),
                reason: error.to_string(),
            })?;

        lay_out(&mut compiled.body.shared_memories);
        let mut scalars = Vec::new();
        let mut scalars_size = 0;
        for field in &compiled.info.scalars {
            let of_type = self
                .scalars
                .iter()
                .filter(|(_, ty)| ty.storage() == field.ty)
                .enumerate();
            for (i, &(name, ty)) in of_type {
                scalars.push(Scalar {
                    name,
                    ty,
                    offset: field.offset + i * ty.size(),
                });
            }
            scalars_size = field.offset + field.padded_size() * field.ty.size();
        }
        // CubeCL writes for NVRTC, whose uint64_t is long long; that of nvcc and its libcu++ is long.
        let source = compiled.to_string().replace(
            "typedef unsigned long long int uint64;",
            "typedef unsigned long int uint64;",
        );
        let (includes, mut text) = split(&source);
        if let Some((_, len)) = self.by_value {
            text = pass_by_value(&text, self.buffers.len(), len).ok_or_else(|| Error::Expand {
                kernel: name.clone(),
                reason: "its signature is not what an array by value expects".into(),
            })?;
        }
        text = await_previous_kernel(&text).ok_or_else(|| Error::Expand {
            kernel: name.clone(),
            reason: "its text has no kernel to let wait".into(),
        })?;
        text.push_str(&format!(
            "static_assert(sizeof(info_st) == {scalars_size}, \"the host's struct of scalars\");\n"
        ));
        Ok(Kernel {
            name,
            choices,
            arguments: Arguments {
                buffers: self.buffers,
                scalars,
                scalars_size,
                by_value: self.by_value,
            },
            block: [threads, 1, 1],
            shared_bytes: compiled.shared_memory_size(),
            includes,
            text,
        })
    }
}

thread_local! {
    static DEFINITIONS: RefCell<Option<Vec<(String, KernelDefinition)>>> =
        const { RefCell::new(None) };
}

/// What `expand` gives, and every kernel that it finishes as CubeCL itself defines it, by name: for running them through CubeCL's runtime.
pub fn definitions<T>(expand: impl FnOnce() -> T) -> (T, Vec<(String, KernelDefinition)>) {
    DEFINITIONS.set(Some(Vec::new()));
    let expanded = expand();
    (expanded, DEFINITIONS.take().unwrap_or_default())
}

/// Gives arrays in shared memory their places, one after the other. CubeCL places them in the order of a hash map, so that every build
/// would have another text, to be compiled again.
fn lay_out<D: Dialect>(memories: &mut [SharedMemory<D>]) {
    // The strictest alignment first: no gaps.
    memories.sort_by_key(|memory| match memory {
        SharedMemory::Array { index, align, .. } | SharedMemory::Value { index, align, .. } => {
            (Reverse(*align), *index)
        }
    });
    let mut end = 0;
    for memory in memories {
        let start = usize::next_multiple_of(end, memory.align());
        end = start + memory.size();
        match memory {
            SharedMemory::Array { offset, .. } | SharedMemory::Value { offset, .. } => {
                *offset = start;
            }
        }
    }
}

/// The hardware's matrix fragments.
fn tensor_core_properties() -> TargetProperties {
    TargetProperties {
        mma: MmaProperties {
            register_size_bits: 32,
            const_plane_size: 32,
            register_layout_a: MatrixLayout::RowMajor,
            register_layout_b: MatrixLayout::ColMajor,
            register_layout_acc: MatrixLayout::RowMajor,
            register_duplication_a: 1,
            register_duplication_b: 1,
            register_duplication_acc: 1,
            contiguous_elements: ContiguousElements::new(contiguous_elements_cuda),
        },
    }
}
