//! Candle's memory as this library's tensors.

use std::sync::Mutex;

use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, Device, DeviceLocation, Error, Result, Shape, Storage, StorageRef, Tensor,
};
use half::{bf16, f16};

use super::wrapped;
use crate::context::{Backend, Context, ContextOptions, Stream};
use crate::dtype::Element;
use crate::layout::Layout;
use crate::tensor::{TensorMut, TensorRef};

/// A tensor to be read, its storage locked against writers.
pub(super) struct Input<'a> {
    pub storage: StorageRef<'a>,
    pub layout: Layout,
    /// Elements before its first one.
    pub start: usize,
}

/// An operation on tensors of one device that makes a new one.
pub(super) struct Call<'a> {
    device: &'a Device,
    inputs: Vec<Input<'a>>,
    shape: Shape,
    dtype: candle_core::DType,
}

impl<'a> Call<'a> {
    /// A call with these inputs, at least one, whose output has this shape and dtype.
    pub fn new(
        inputs: &[&'a Tensor],
        shape: &Shape,
        dtype: candle_core::DType,
    ) -> Result<Call<'a>> {
        let device = inputs[0].device();
        let mut read = Vec::with_capacity(inputs.len());
        for tensor in inputs {
            if !tensor.device().same_device(device) {
                return Err(Error::DeviceMismatchBinaryOp {
                    lhs: device.location(),
                    rhs: tensor.device().location(),
                    op: "unsloth",
                }
                .bt());
            }
            let (storage, layout) = tensor.storage_and_layout();
            read.push(Input {
                storage,
                layout: Layout::strided(layout.dims(), layout.stride()).map_err(wrapped)?,
                start: layout.start_offset(),
            });
        }
        Ok(Call {
            device,
            inputs: read,
            shape: shape.clone(),
            dtype,
        })
    }

    /// Makes the output and has `launch` write it.
    pub fn run(
        self,
        launch: impl FnOnce(&Context, &[TensorRef<'_>], TensorMut<'_>, Stream) -> crate::Result<()>,
    ) -> Result<Tensor> {
        use candle_core::DType;
        let context = context(self.device)?;
        let storage = match self.dtype {
            DType::F32 => self.output::<f32>(&context, launch),
            DType::F16 => self.output::<f16>(&context, launch),
            DType::BF16 => self.output::<bf16>(&context, launch),
            other => Err(Error::UnsupportedDTypeForOp(other, "unsloth").bt()),
        }?;
        Ok(Tensor::from_storage(
            storage,
            self.shape,
            BackpropOp::none(),
            false,
        ))
    }

    fn output<T: Float>(
        &self,
        context: &Context,
        launch: impl FnOnce(&Context, &[TensorRef<'_>], TensorMut<'_>, Stream) -> crate::Result<()>,
    ) -> Result<Storage> {
        match self.device {
            Device::Cpu => {
                let mut out = vec![T::ZERO; self.shape.elem_count()];
                let inputs = self.inputs.iter().map(host_view);
                let inputs: Vec<_> = inputs.collect::<Result<_>>()?;
                let view = TensorMut::from_slice(&mut out, self.shape.dims()).map_err(wrapped)?;
                launch(context, &inputs, view, Stream::DEFAULT).map_err(wrapped)?;
                Ok(Storage::Cpu(T::storage(out)))
            }
            #[cfg(feature = "candle-cuda")]
            Device::Cuda(device) => {
                super::cuda::output::<T>(device, context, &self.inputs, &self.shape, launch)
            }
            other => Err(no_backend(other)),
        }
    }
}

/// A dtype that outputs have.
pub(super) trait Float: Element + Copy + DeviceFloat {
    const ZERO: Self;
    fn storage(data: Vec<Self>) -> CpuStorage;
}

/// What a dtype has besides on a GPU.
#[cfg(feature = "candle-cuda")]
pub(super) use super::cuda::DeviceFloat;

#[cfg(not(feature = "candle-cuda"))]
pub(super) trait DeviceFloat {}

#[cfg(not(feature = "candle-cuda"))]
impl<T: Element> DeviceFloat for T {}

macro_rules! floats {
    ($($type:ty => $variant:ident, $zero:expr;)*) => {$(
        impl Float for $type {
            const ZERO: Self = $zero;
            fn storage(data: Vec<Self>) -> CpuStorage {
                CpuStorage::$variant(data)
            }
        }
    )*};
}

floats! {
    f32 => F32, 0.0;
    f16 => F16, f16::ZERO;
    bf16 => BF16, bf16::ZERO;
}

fn host_view<'a>(input: &'a Input<'_>) -> Result<TensorRef<'a>> {
    fn view<'a, T: Element>(data: &'a [T], input: &Input<'_>) -> Result<TensorRef<'a>> {
        let data = data.get(input.start..).unwrap_or_default();
        TensorRef::from_slice_with_layout(data, input.layout).map_err(wrapped)
    }
    match &*input.storage {
        Storage::Cpu(CpuStorage::F32(data)) => view(data, input),
        Storage::Cpu(CpuStorage::F16(data)) => view(data, input),
        Storage::Cpu(CpuStorage::BF16(data)) => view(data, input),
        Storage::Cpu(CpuStorage::I32(data)) => view(data, input),
        Storage::Cpu(CpuStorage::I64(data)) => view(data, input),
        other => Err(Error::UnsupportedDTypeForOp(other.dtype(), "unsloth").bt()),
    }
}

/// The context of a device, made when it is first asked for.
fn context(device: &Device) -> Result<Context> {
    static CONTEXTS: Mutex<Vec<(DeviceLocation, Context)>> = Mutex::new(Vec::new());
    let location = device.location();
    let (backend, ordinal) = match location {
        DeviceLocation::Cpu => (Backend::Cpu, 0),
        DeviceLocation::Cuda { gpu_id } => (Backend::Cuda, gpu_id as i32),
        DeviceLocation::Metal { .. } => return Err(no_backend(device)),
    };
    let mut contexts = CONTEXTS.lock().unwrap_or_else(|p| p.into_inner());
    if let Some((_, context)) = contexts.iter().find(|(l, _)| *l == location) {
        return Ok(context.clone());
    }
    let options = ContextOptions {
        backend,
        device: ordinal,
        ..ContextOptions::default()
    };
    let context = Context::new(&options).map_err(wrapped)?;
    contexts.push((location, context.clone()));
    Ok(context)
}

fn no_backend(device: &Device) -> Error {
    Error::Msg(format!(
        "unsloth: this build has no backend for {:?}",
        device.location()
    ))
    .bt()
}
