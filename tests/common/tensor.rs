//! Tensors for tests: guarded, poisoned, of any dtype and layout.

use half::{bf16, f16};
use rand::Rng;
use unsloth::{Buffer, Context, DType, Layout, Stream, TensorMut, TensorRef, Workspace};

/// Bytes before and after a tensor that nothing may touch.
const GUARD: usize = Workspace::ALIGNMENT;

/// A host tensor inside poisoned memory.
#[derive(Clone, Debug)]
pub struct TestTensor {
    pub dtype: DType,
    pub layout: Layout,
    /// Guard, elements and gaps, guard.
    bytes: Vec<u8>,
    /// Where the first element is.
    start: usize,
}

/// A [`TestTensor`] in a context's memory.
#[derive(Debug)]
pub struct DeviceTensor {
    pub dtype: DType,
    pub layout: Layout,
    buffer: Buffer,
    start: usize,
}

/// NaN for floats, an absurd value for the others.
fn poison(dtype: DType) -> &'static [u8] {
    match dtype {
        DType::F32 => &[0xad, 0xde, 0xc0, 0x7f],
        DType::F16 => &[0xad, 0x7e],
        DType::Bf16 => &[0xad, 0x7f],
        DType::I32 => &[0xa5; 4],
        DType::I64 => &[0xa5; 8],
        DType::F8E4M3 => &[0x7f],
        _ => &[0xa5],
    }
}

impl TestTensor {
    /// All poison: what an output is before the run.
    pub fn poisoned(dtype: DType, layout: Layout) -> Self {
        Self::poisoned_at(dtype, layout, 0)
    }

    /// All poison, beginning `skew` elements past an aligned address, so that vectorised paths meet
    /// misalignment.
    pub fn poisoned_at(dtype: DType, layout: Layout, skew: usize) -> Self {
        let pattern = poison(dtype);
        let start = GUARD + skew * dtype.size();
        let size = start + layout.span() * dtype.size() + GUARD;
        let bytes = pattern.iter().copied().cycle().take(size).collect();
        TestTensor {
            dtype,
            layout,
            bytes,
            start,
        }
    }

    /// All poison, of the same dtype and layout and at the same place as another.
    pub fn poisoned_like(other: &TestTensor) -> Self {
        let skew = (other.start - GUARD) / other.dtype.size();
        Self::poisoned_at(other.dtype, other.layout, skew)
    }

    /// Elements from `values`, in row-major order, rounded to the dtype.
    pub fn from_values(dtype: DType, layout: Layout, values: &[f64]) -> Self {
        let mut tensor = Self::poisoned(dtype, layout);
        tensor.set_values(values);
        tensor
    }

    /// Contiguous elements from `values`.
    pub fn of(dtype: DType, shape: &[usize], values: &[f64]) -> Self {
        Self::from_values(dtype, Layout::contiguous(shape).unwrap(), values)
    }

    /// Standard normal elements.
    pub fn normal(rng: &mut impl Rng, dtype: DType, layout: Layout) -> Self {
        let values: Vec<f64> = (0..layout.num_elements()).map(|_| normal(rng)).collect();
        Self::from_values(dtype, layout, &values)
    }

    /// Integers below `end`.
    pub fn integers(rng: &mut impl Rng, dtype: DType, layout: Layout, end: i64) -> Self {
        let values: Vec<f64> = (0..layout.num_elements())
            .map(|_| rng.random_range(0..end) as f64)
            .collect();
        Self::from_values(dtype, layout, &values)
    }

    /// Overwrites every element, in row-major order.
    pub fn set_values(&mut self, values: &[f64]) {
        let offsets = self.element_offsets();
        assert_eq!(values.len(), offsets.len());
        for (&value, offset) in values.iter().zip(offsets) {
            write_element(self.dtype, value, &mut self.bytes[offset..]);
        }
    }

    /// The elements, in row-major order.
    pub fn values(&self) -> Vec<f64> {
        self.element_offsets()
            .into_iter()
            .map(|offset| read_element(self.dtype, &self.bytes[offset..]))
            .collect()
    }

    /// The elements' bytes, in row-major order, for comparisons to the bit.
    pub fn bits(&self) -> Vec<u8> {
        let size = self.dtype.size();
        self.element_offsets()
            .into_iter()
            .flat_map(|offset| self.bytes[offset..offset + size].iter().copied())
            .collect()
    }

    /// Overwrites every element with these bytes, in row-major order.
    pub fn set_bits(&mut self, bits: &[u8]) {
        let size = self.dtype.size();
        let offsets = self.element_offsets();
        assert_eq!(bits.len(), offsets.len() * size);
        for (element, offset) in bits.chunks(size).zip(offsets) {
            self.bytes[offset..offset + size].copy_from_slice(element);
        }
    }

    /// Copies it to the memory of a context.
    pub fn upload(&self, ctx: &Context) -> DeviceTensor {
        DeviceTensor {
            dtype: self.dtype,
            layout: self.layout,
            buffer: upload_bytes(ctx, &self.bytes),
            start: self.start,
        }
    }

    /// Panics if guards or gaps differ from poison.
    pub fn assert_surroundings_untouched(&self) {
        let pattern = poison(self.dtype);
        let mut is_element = vec![false; self.bytes.len()];
        for offset in self.element_offsets() {
            is_element[offset..offset + self.dtype.size()].fill(true);
        }
        for (i, (&byte, element)) in self.bytes.iter().zip(is_element).enumerate() {
            assert!(
                element || byte == pattern[i % pattern.len()],
                "byte {} relative to the first element was overwritten",
                i as isize - self.start as isize
            );
        }
    }

    fn element_offsets(&self) -> Vec<usize> {
        let shape = self.layout.shape();
        (0..self.layout.num_elements())
            .map(|mut index| {
                let mut offset = 0;
                for (&n, &stride) in shape.iter().zip(self.layout.strides()).rev() {
                    offset += (index % n) * stride;
                    index /= n;
                }
                self.start + offset * self.dtype.size()
            })
            .collect()
    }
}

impl DeviceTensor {
    pub fn view(&self) -> TensorRef<'_> {
        self.buffer
            .tensor(self.start, self.dtype, self.layout)
            .unwrap()
    }

    pub fn view_mut(&mut self) -> TensorMut<'_> {
        self.buffer
            .tensor_mut(self.start, self.dtype, self.layout)
            .unwrap()
    }

    /// Whose memory it is in.
    pub fn backend(&self) -> unsloth::Backend {
        self.buffer.context().backend()
    }

    /// Address of the first element, for calls through the C ABI.
    pub fn data(&self) -> *mut std::ffi::c_void {
        self.buffer.as_ptr().wrapping_add(self.start).cast()
    }

    /// Copies another tensor of the same layout over it.
    pub fn overwrite(&mut self, with: &TestTensor) {
        assert_eq!(
            (with.dtype, with.layout, with.start),
            (self.dtype, self.layout, self.start)
        );
        self.buffer
            .copy_from_slice(0, &words(&with.bytes), Stream::DEFAULT)
            .unwrap();
        self.buffer.context().synchronize(Stream::DEFAULT).unwrap();
    }

    /// Copies it back to the host.
    pub fn download(&self) -> TestTensor {
        let words: Vec<i32> = self
            .buffer
            .to_vec(0, self.buffer.size() / 4, Stream::DEFAULT)
            .unwrap();
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let size = self.start + self.layout.span() * self.dtype.size() + GUARD;
        bytes.truncate(size);
        TestTensor {
            dtype: self.dtype,
            layout: self.layout,
            bytes,
            start: self.start,
        }
    }

    /// Copies an output back, having checked that the run wrote nothing around it.
    pub fn download_output(&self) -> TestTensor {
        let tensor = self.download();
        tensor.assert_surroundings_untouched();
        tensor
    }
}

/// A layout with gaps: every row is `gap` elements longer than its data, as a slice of a wider
/// tensor is.
pub fn strided_rows(shape: &[usize], gap: usize) -> Layout {
    let mut padded = shape.to_vec();
    *padded.last_mut().unwrap() += gap;
    let strides = Layout::contiguous(&padded).unwrap().strides().to_vec();
    Layout::strided(shape, &strides).unwrap()
}

/// A layout whose dimensions `a` and `b` are exchanged in memory, as after a transposition.
pub fn transposed(shape: &[usize], a: usize, b: usize) -> Layout {
    let mut stored = shape.to_vec();
    stored.swap(a, b);
    Layout::contiguous(&stored)
        .unwrap()
        .transposed(a, b)
        .unwrap()
}

/// A standard normal number (Box and Muller).
pub fn normal(rng: &mut impl Rng) -> f64 {
    let (u, v): (f64, f64) = (rng.random(), rng.random());
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

/// `value` rounded to `dtype` and back.
pub fn round_to(dtype: DType, value: f64) -> f64 {
    let mut bytes = [0; 8];
    write_element(dtype, value, &mut bytes);
    read_element(dtype, &bytes)
}

fn upload_bytes(ctx: &Context, bytes: &[u8]) -> Buffer {
    Buffer::from_slice(ctx, &words(bytes)).unwrap()
}

/// Bytes as words, the last one filled up.
fn words(bytes: &[u8]) -> Vec<i32> {
    bytes
        .chunks(4)
        .map(|chunk| {
            let mut word = [0; 4];
            word[..chunk.len()].copy_from_slice(chunk);
            i32::from_ne_bytes(word)
        })
        .collect()
}

/// `value` as f32 with its last bit set if it is not exact (round to odd), so that rounding it
/// again to fewer bits is rounding `value` once. (`half`'s conversions from f64 look at its upper
/// bits alone.)
fn sticky(value: f64) -> f32 {
    let nearest = value as f32;
    if nearest.is_infinite() || nearest.is_nan() || f64::from(nearest) == value {
        return nearest;
    }
    let away = f64::from(nearest).abs() > value.abs();
    f32::from_bits((nearest.to_bits() - u32::from(away)) | 1)
}

/// The number of a code of e4m3, by the format's definition (Micikevicius et al. 2022, table 1).
pub fn e4m3_value(code: u8) -> f64 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    match (exponent, code & 7) {
        (15, 7) => f64::NAN,
        (0, _) => sign * fraction * 2f64.powi(-9),
        _ => sign * (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
    }
}

/// The code nearest to a number, the even one of two, the last for what lies beyond.
pub fn e4m3_nearest(value: f64) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    if value.is_nan() {
        return sign | 0x7f;
    }
    // Codes count up with what they are.
    let (mut below, mut above) = (0u8, 0x7eu8);
    while above - below > 1 {
        let middle = below + (above - below) / 2;
        match e4m3_value(middle) <= value.abs() {
            true => below = middle,
            false => above = middle,
        }
    }
    let distance = |code: u8| (e4m3_value(code) - value.abs()).abs();
    let nearest = match distance(below).total_cmp(&distance(above)) {
        std::cmp::Ordering::Less => below,
        std::cmp::Ordering::Greater => above,
        std::cmp::Ordering::Equal => below + below % 2,
    };
    sign | nearest
}

fn write_element(dtype: DType, value: f64, to: &mut [u8]) {
    match dtype {
        DType::F32 => to[..4].copy_from_slice(&(value as f32).to_ne_bytes()),
        DType::F16 => to[..2].copy_from_slice(&f16::from_f32(sticky(value)).to_ne_bytes()),
        DType::Bf16 => to[..2].copy_from_slice(&bf16::from_f32(sticky(value)).to_ne_bytes()),
        DType::I32 => to[..4].copy_from_slice(&(value as i32).to_ne_bytes()),
        DType::I64 => to[..8].copy_from_slice(&(value as i64).to_ne_bytes()),
        DType::I8 => to[0] = (value as i8).cast_unsigned(),
        DType::F8E4M3 => to[0] = e4m3_nearest(value),
        _ => to[0] = u8::from(value != 0.0),
    }
}

fn read_element(dtype: DType, from: &[u8]) -> f64 {
    fn take<const N: usize>(from: &[u8]) -> [u8; N] {
        from[..N].try_into().unwrap()
    }
    match dtype {
        DType::F32 => f32::from_ne_bytes(take(from)).into(),
        DType::F16 => f16::from_ne_bytes(take(from)).into(),
        DType::Bf16 => bf16::from_ne_bytes(take(from)).into(),
        DType::I32 => i32::from_ne_bytes(take(from)).into(),
        DType::I64 => i64::from_ne_bytes(take(from)) as f64,
        DType::I8 => from[0].cast_signed().into(),
        DType::F8E4M3 => e4m3_value(from[0]),
        _ => f64::from(u8::from(from[0] != 0)),
    }
}
