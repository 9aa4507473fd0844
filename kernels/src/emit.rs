//! From a `#[cube]` function to CUDA C++ text and the layout that its launch needs, without a GPU.
//!
//! The layout is read off the compiled kernel, so the text and the host's argument struct cannot disagree.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::sync::{Mutex, PoisonError};

use cubecl::ir::{
    ContiguousElements, ElemType, FloatKind, IntKind, ManagedVariable, MatrixLayout, MmaProperties,
    Scope, StorageType, TargetProperties, Type, UIntKind,
};
use cubecl::prelude::*;
use cubecl_core::Compiler;
use cubecl_core::server::ExecutionMode;
use cubecl_cpp::cuda::{CudaDialect, mma::CudaWmmaCompiler, mma::contiguous_elements_cuda};
use cubecl_cpp::shared::{
    CompilationOptions, CppCompiler, CppSupportedFeatures, Dialect, SharedMemory,
};

use crate::Error;

/// A compile-time choice that tells a kernel from its siblings, by name; what the host picks by.
pub type Choice = (&'static str, u32);

/// The type of a scalar argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScalarType {
    /// 32-bit float.
    F32,
    /// 32-bit unsigned integer.
    U32,
    /// 64-bit signed integer.
    I64,
    /// 64-bit unsigned integer; `usize` in kernels, whose addresses have 64 bits.
    U64,
}

impl ScalarType {
    fn storage(self) -> StorageType {
        StorageType::Scalar(match self {
            ScalarType::F32 => ElemType::Float(FloatKind::F32),
            ScalarType::U32 => ElemType::UInt(UIntKind::U32),
            ScalarType::I64 => ElemType::Int(IntKind::I64),
            ScalarType::U64 => ElemType::UInt(UIntKind::U64),
        })
    }

    /// Size in bytes.
    pub fn size(self) -> usize {
        self.storage().size()
    }

    /// Zero as a Rust literal.
    pub fn zero(self) -> &'static str {
        match self {
            ScalarType::F32 => "0.0",
            ScalarType::U32 | ScalarType::I64 | ScalarType::U64 => "0",
        }
    }

    /// The Rust type.
    pub fn rust(self) -> &'static str {
        match self {
            ScalarType::F32 => "f32",
            ScalarType::U32 => "u32",
            ScalarType::I64 => "i64",
            ScalarType::U64 => "u64",
        }
    }
}

/// A scalar argument and where it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scalar {
    /// The argument's name.
    pub name: &'static str,
    /// Its type.
    pub ty: ScalarType,
    /// Bytes from the beginning of the struct of scalars.
    pub offset: usize,
}

/// The arguments of a kernel: pointers, each a parameter, then one struct with all scalars, then at most one array of f32 by value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arguments {
    /// The pointers' names.
    pub buffers: Vec<&'static str>,
    /// The scalars, by offset.
    pub scalars: Vec<Scalar>,
    /// Bytes of the scalars' struct that the kernel reads.
    pub scalars_size: usize,
    /// Name and length of the array.
    pub by_value: Option<(&'static str, usize)>,
}

/// A kernel as CUDA C++.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its symbol.
    pub name: String,
    /// What tells it from its siblings.
    pub choices: Vec<Choice>,
    /// How it is called.
    pub arguments: Arguments,
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: usize,
    /// `#include` lines.
    pub includes: Vec<String>,
    /// Everything else.
    pub text: String,
}

impl Kernel {
    /// Lets a thread have this many registers. Where it needs nearly all that there are, the compiler spills one or another in vain.
    pub fn with_registers(mut self, registers: u32) -> Kernel {
        let bound = format!("__launch_bounds__({})", self.block[0]);
        let most = format!("__maxnreg__({registers})");
        self.text = self.text.replace(&bound, &most);
        self
    }

    /// Lets a thread have the registers that `blocks` blocks at a time on a multiprocessor leave it. The compiler aims at more by itself,
    /// and spills for it on some architectures.
    pub fn for_blocks(mut self, blocks: u32) -> Kernel {
        let bound = format!("__launch_bounds__({}", self.block[0]);
        let bounds = format!("{bound}, {blocks})");
        self.text = self.text.replace(&format!("{bound})"), &bounds);
        self
    }
}

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

/// Parts the includes from the rest, and sorts what CubeCL writes in no particular order, vector types and declarations of
/// variables: the same kernel gives the same text.
fn split(source: &str) -> (Vec<String>, String) {
    let mut includes = Vec::new();
    let mut types = Vec::new();
    let mut variables: Vec<&str> = Vec::new();
    let mut text = String::new();
    let mut lines = source.lines();
    while let Some(line) = lines.next() {
        if line.contains(" l_mut_") && line.ends_with(';') && line.split(' ').count() == 2 {
            variables.push(line);
            continue;
        }
        variables.sort_unstable();
        for variable in variables.drain(..) {
            text.push_str(variable);
            text.push('\n');
        }
        if line.starts_with("#include") {
            includes.push(line.to_string());
        } else if line.starts_with("struct __align__") {
            let mut definition = line.to_string();
            for line in lines.by_ref() {
                definition.push('\n');
                definition.push_str(line);
                if line == "};" {
                    break;
                }
            }
            types.push(definition);
        } else if line.starts_with("struct info_st") {
            types.sort();
            for definition in types.drain(..) {
                text.push_str(&definition);
                text.push('\n');
            }
            text.push_str(line);
            text.push('\n');
        } else {
            // Array lengths, which only checked kernels read.
            let kept = line.split("uint64 static_meta[").next().unwrap_or(line);
            text.push_str(kept);
            text.push('\n');
        }
    }
    (includes, text)
}

/// Turns the last pointer of a kernel, number `index`, into an array in the parameters. CubeCL has no such parameter; in the text it
/// is a change of the signature alone. The compiler does not get to see where the pointer leads: it would read the constant bank, which
/// serves the lanes of a warp one by one where each wants another element.
fn pass_by_value(text: &str, index: usize, len: usize) -> Option<String> {
    let scalars = "const __grid_constant__ info_st info";
    let pointer = format!(", const float* __restrict__ buffer_{index}, {scalars}\n) {{\n");
    let array = format!(
        ", {scalars}, const __grid_constant__ array_st array\n) {{\nconst float* buffer_{index} = array.values;\nasm(\"\" : \"+l\"(buffer_{index}));\n"
    );
    let (before, after) = text.split_once(&pointer)?;
    let (types, signature) = before.split_once("extern \"C\" __global__")?;
    Some(format!(
        "{types}struct array_st {{\n    float values[{len}];\n}};\nextern \"C\" __global__{signature}{array}{after}"
    ))
}

/// One translation unit of several kernels. Each has a namespace, for CubeCL gives helper types of different kernels one name.
pub fn translation_unit(kernels: &[Kernel]) -> String {
    let mut includes: Vec<&str> = kernels
        .iter()
        .flat_map(|kernel| kernel.includes.iter().map(String::as_str))
        .collect();
    includes.sort_unstable();
    includes.dedup();
    let mut unit = includes.join("\n");
    unit.push('\n');
    for kernel in kernels {
        unit.push_str(&format!(
            "\nnamespace ns_{0} {{\n{1}}} // namespace ns_{0}\n",
            kernel.name, kernel.text
        ));
    }
    unit
}

/// The element type of a tensor, as a compile-time choice: the library's `DType` discriminants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    /// IEEE binary32.
    F32 = 1,
    /// IEEE binary16.
    F16 = 2,
    /// bfloat16.
    Bf16 = 3,
}

impl Float {
    /// All of them.
    pub const ALL: [Float; 3] = [Float::F32, Float::F16, Float::Bf16];

    /// Lower-case name.
    pub fn name(self) -> &'static str {
        match self {
            Float::F32 => "f32",
            Float::F16 => "f16",
            Float::Bf16 => "bf16",
        }
    }

    /// Elements in 16 bytes.
    pub fn per_vector(self) -> u32 {
        match self {
            Float::F32 => 4,
            Float::F16 | Float::Bf16 => 8,
        }
    }
}

/// Runs `$body` with `$t` as the Rust type and `$n` as the number of elements in 16 bytes.
macro_rules! with_vector {
    ($float:expr, $t:ident, $n:ident => $body:expr) => {
        match $float {
            $crate::emit::Float::F32 => {
                type $t = f32;
                type $n = cubecl::prelude::Const<4>;
                $body
            }
            $crate::emit::Float::F16 => {
                type $t = half::f16;
                type $n = cubecl::prelude::Const<8>;
                $body
            }
            $crate::emit::Float::Bf16 => {
                type $t = half::bf16;
                type $n = cubecl::prelude::Const<8>;
                $body
            }
        }
    };
}
pub(crate) use with_vector;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog;

    #[test]
    fn the_same_kernels_give_the_same_text() {
        let texts = || -> Vec<String> {
            let images = catalog::images().unwrap();
            images
                .iter()
                .map(|image| translation_unit(&image.kernels))
                .collect()
        };
        assert!(texts() == texts());
    }

    #[test]
    fn symbols_are_distinct_and_arguments_alike() {
        for image in catalog::images().unwrap() {
            let mut names: Vec<_> = image.kernels.iter().map(|k| &k.name).collect();
            names.sort();
            names.dedup();
            assert_eq!(names.len(), image.kernels.len(), "{}", image.name);
            let first = &image.kernels[0].arguments;
            for kernel in &image.kernels {
                assert_eq!(&kernel.arguments, first, "{}", kernel.name);
            }
        }
    }

    #[test]
    fn scalars_lie_behind_each_other() {
        for image in catalog::images().unwrap() {
            let arguments = &image.kernels[0].arguments;
            let mut end = 0;
            for scalar in &arguments.scalars {
                // Groups of one type are padded to 8 bytes.
                assert!(
                    (end..end + 8).contains(&scalar.offset),
                    "{scalar:?} of {}",
                    image.name
                );
                assert_eq!(scalar.offset % scalar.ty.size(), 0);
                end = scalar.offset + scalar.ty.size();
            }
            assert_eq!(end.next_multiple_of(8), arguments.scalars_size);
        }
    }

    #[test]
    fn vectors_move_16_bytes() {
        for image in catalog::images().unwrap() {
            let unit = translation_unit(&image.kernels);
            // Of bf16, or, where partial results are f32, of these.
            let vectors =
                ["__nv_bfloat16_8", "float_4"].map(|ty| format!("struct __align__(16) {ty}"));
            assert!(vectors.iter().any(|v| unit.contains(v)), "{}", image.name);
        }
    }

    #[test]
    fn the_last_pointer_becomes_an_array() {
        let text = "struct info_st {\n};\nextern \"C\" __global__ void k (\n    float* buffer_0, const float* __restrict__ buffer_1, \
                    const __grid_constant__ info_st info\n) {\nbody";
        assert_eq!(
            pass_by_value(text, 1, 8).unwrap(),
            "struct info_st {\n};\nstruct array_st {\n    float values[8];\n};\nextern \"C\" __global__ void k (\n    float* buffer_0, \
             const __grid_constant__ info_st info, const __grid_constant__ array_st array\n) {\n\
             const float* buffer_1 = array.values;\nasm(\"\" : \"+l\"(buffer_1));\nbody"
        );
        assert!(pass_by_value(text, 0, 8).is_none());
    }
}
