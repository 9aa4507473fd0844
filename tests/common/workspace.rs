//! Scratch memory that a test lends.

use unsloth::{Buffer, Context, DType, Error, Layout, Stream, Workspace};

use super::TestTensor;

/// Runs with exactly the workspace that is asked for, poisoned, having seen that less is refused.
pub fn with_workspace<'a>(
    ctx: &Context,
    op: &'static str,
    size: usize,
    mut run: impl FnMut(Workspace<'a>) -> Result<(), Error>,
) {
    if size > 0 {
        let error = Error::WorkspaceTooSmall {
            op,
            required: size,
            provided: 0,
        };
        assert_eq!(run(Workspace::none()).unwrap_err(), error);
    }
    let layout = Layout::contiguous(&[size.div_ceil(4)]).unwrap();
    let memory = TestTensor::poisoned(DType::F32, layout).upload(ctx);
    // SAFETY: `size` bytes from the start of the tensor are its elements, which nothing else uses.
    run(unsafe { Workspace::from_raw(memory.data().cast(), size) }).unwrap();
    memory.download_output();
}

/// A workspace of exactly this size, all NaN.
pub fn poisoned_workspace(ctx: &Context, size: usize) -> Buffer {
    let mut workspace = Buffer::new(ctx, size).unwrap();
    let nan = vec![f32::from_bits(0x7fc0_7fc0); size / 4];
    workspace.copy_from_slice(0, &nan, Stream::DEFAULT).unwrap();
    workspace
}
