//! Candle's memory on a GPU.

use candle_core::cuda_backend::CudaDType;
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::{CudaDevice, DType, Error, Result, Shape, Storage};
use half::{bf16, f16};

use super::storage::{Float, Input};
use super::wrapped;
use crate::context::{Context, Stream};
use crate::dtype::Element;
use crate::layout::Layout;
use crate::tensor::{TensorMut, TensorRef};

/// A dtype of candle's that its driver can pass.
pub(in crate::candle) trait DeviceFloat: CudaDType + DeviceRepr {}

impl<T: CudaDType + DeviceRepr> DeviceFloat for T {}

/// Has `launch` write a new tensor on the device's stream.
pub(super) fn output<T: Float>(
    device: &CudaDevice,
    context: &Context,
    inputs: &[Input<'_>],
    shape: &Shape,
    launch: impl FnOnce(&Context, &[TensorRef<'_>], TensorMut<'_>, Stream) -> crate::Result<()>,
) -> Result<Storage> {
    let layout = Layout::contiguous(shape.dims()).map_err(wrapped)?;
    let stream = device.cuda_stream();
    // SAFETY: `launch` writes every element.
    let mut out = unsafe { device.alloc::<T>(shape.elem_count().max(1)) }?;
    {
        // When dropped, behind the launch, these record that the stream has used the memory.
        let mut records = Vec::with_capacity(inputs.len());
        let mut views = Vec::with_capacity(inputs.len());
        for input in inputs {
            let (view, record) = view(input, &stream)?;
            views.push(view);
            records.push(record);
        }
        let (ptr, _record) = out.device_ptr_mut(&stream);
        let ptr = std::ptr::with_exposed_provenance_mut(ptr as usize);
        // SAFETY: the memory was allocated for these elements, and the stream is candle's own, of
        // this device.
        let (out, stream) = unsafe {
            let out = TensorMut::from_raw(ptr, T::DTYPE, layout);
            (out, Stream::from_raw(stream.cu_stream().cast()))
        };
        launch(context, &views, out, stream).map_err(wrapped)?;
    }
    Ok(Storage::Cuda(T::wrap_cuda_slice(out, device.clone())))
}

fn view<'a>(
    input: &'a Input<'_>,
    stream: &'a CudaStream,
) -> Result<(TensorRef<'a>, SyncOnDrop<'a>)> {
    fn typed<'a, T: Element + CudaDType>(
        input: &'a Input<'_>,
        stream: &'a CudaStream,
    ) -> Result<(TensorRef<'a>, SyncOnDrop<'a>)> {
        let Storage::Cuda(storage) = &*input.storage else {
            return Err(Error::Msg("unsloth: a tensor has left its device".into()).bt());
        };
        let (ptr, record) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
        let address = ptr as usize + input.start * size_of::<T>();
        let ptr = std::ptr::with_exposed_provenance(address);
        // SAFETY: candle's layouts stay within their storage, which is locked against writers and
        // lives behind the launch: freeing it is queued on its stream.
        let view = unsafe { TensorRef::from_raw(ptr, T::DTYPE, input.layout) };
        Ok((view, record))
    }
    match input.storage.dtype() {
        DType::F32 => typed::<f32>(input, stream),
        DType::F16 => typed::<f16>(input, stream),
        DType::BF16 => typed::<bf16>(input, stream),
        DType::I32 => typed::<i32>(input, stream),
        DType::I64 => typed::<i64>(input, stream),
        other => Err(Error::UnsupportedDTypeForOp(other, "unsloth").bt()),
    }
}
