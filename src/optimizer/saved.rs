//! The state as bytes that do not depend on where it lay: a header, a record of each parameter,
//! then the state's first part as it is. Numbers are little-endian.
//!
//! | bytes | header |
//! |-|-|
//! | 0 to 8 | `UNSLOPT` and a zero |
//! | 8 to 12 | version, 1 |
//! | 12 to 16 | kind of optimizer: 0 Adam, 2 SGD, 3 SGD with momentum |
//! | 16 to 24 | parameters |
//! | 24 to 32 | groups |
//! | 32 to 40 | bytes of the state |
//! | 40 to 64 | zeros |
//!
//! A record is the number of elements (8 bytes), the weight's dtype (4) and its storage (4).

use super::{OUTSIDE, Optimizer, Params, Rule};
use crate::backend::Stream;
use crate::dtype::DType;
use crate::error::{Error, Result, text};
use crate::problem::optimizer::{Control, Storage};

const MAGIC: [u8; 8] = *b"UNSLOPT\0";
const VERSION: u32 = 1;
const HEADER: usize = 64;
const RECORD: usize = 16;

/// What of a parameter must be as it was when the state was saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    elements: u64,
    dtype: DType,
    storage: Storage,
}

pub(super) fn records(params: &Params<'_>) -> Result<Vec<Record>> {
    let count = params.parameters.len();
    let mut records = Vec::new();
    records.try_reserve_exact(count).map_err(|_| {
        Error::out_of_host_memory(super::OP, count.saturating_mul(size_of::<Record>()))
    })?;
    records.extend(params.parameters.iter().map(|p| Record {
        elements: p.weight.layout().num_elements() as u64,
        dtype: p.weight.dtype(),
        storage: params.storage(p),
    }));
    Ok(records)
}

impl Record {
    fn bytes(&self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        bytes[..8].copy_from_slice(&self.elements.to_le_bytes());
        bytes[8..12].copy_from_slice(&(self.dtype as u32).to_le_bytes());
        bytes[12..].copy_from_slice(&(self.storage as u32).to_le_bytes());
        bytes
    }
}

/// A rule's number and name.
fn kind(rule: &Rule) -> u32 {
    match rule {
        Rule::Adam { .. } => 0,
        Rule::Sgd { momentum: 0.0, .. } => 2,
        Rule::Sgd { .. } => 3,
    }
}

fn kind_name(kind: u32) -> &'static str {
    match kind {
        0 => "adam",
        2 => "sgd",
        3 => "sgd with momentum",
        _ => "an unknown kind",
    }
}

fn storage_name(storage: u32) -> &'static str {
    match storage {
        0 => "no master",
        1 => "an f32 master",
        2 => "a remainder",
        3 => "random rounding",
        _ => "an unknown master",
    }
}

/// A little-endian number at a place that exists.
fn word(data: &[u8], at: usize) -> u32 {
    let mut bytes = [0; 4];
    bytes.copy_from_slice(&data[at..at + 4]);
    u32::from_le_bytes(bytes)
}

fn long(data: &[u8], at: usize) -> u64 {
    u64::from(word(data, at)) | u64::from(word(data, at + 4)) << 32
}

impl Optimizer {
    /// Bytes that [`Optimizer::save`] writes.
    pub fn saved_size(&self) -> usize {
        self.state_at() + self.state.saved
    }

    /// Where the state begins in what is saved.
    fn state_at(&self) -> usize {
        HEADER + RECORD * self.records.len()
    }

    /// Copies moments, masters or remainders, counters, the loss scale and the groups' values to
    /// the host, after everything queued on `stream`, and waits. What [`Params`] says otherwise,
    /// and weights and gradients, are not in it.
    ///
    /// # Errors
    /// `data` has another size than [`Optimizer::saved_size`], the stream is being captured, or the
    /// device fails.
    pub fn save(&self, data: &mut [u8], stream: Stream) -> Result<()> {
        self.check_size("optimizer_save", data.len())?;
        // SAFETY: as many bytes as are written, borrowed for the call.
        unsafe { self.save_to(data.as_mut_ptr(), stream) }
    }

    /// As [`Optimizer::save`], to memory that may not be initialised.
    ///
    /// # Safety
    /// `data` is valid for writes of [`Optimizer::saved_size`] bytes.
    pub(crate) unsafe fn save_to(&self, data: *mut u8, stream: Stream) -> Result<()> {
        let header = self.header();
        // SAFETY: the header, a record of each parameter and what is saved of the state are the
        // size that the caller promises, and none overlaps what it is copied from.
        unsafe {
            let state = data.add(self.state_at());
            self.download("optimizer_save", state, self.state.saved, stream)?;
            std::ptr::copy_nonoverlapping(header.as_ptr(), data, HEADER);
            for (i, record) in self.records.iter().enumerate() {
                let to = data.add(HEADER + RECORD * i);
                std::ptr::copy_nonoverlapping(record.bytes().as_ptr(), to, RECORD);
            }
        }
        Ok(())
    }

    fn header(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&kind(&self.rule).to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.records.len() as u64).to_le_bytes());
        bytes[24..32].copy_from_slice(&(self.num_groups as u64).to_le_bytes());
        bytes[32..40].copy_from_slice(&(self.state.saved as u64).to_le_bytes());
        bytes
    }

    pub(crate) fn check_size(&self, op: &'static str, size: usize) -> Result<()> {
        let expected = self.saved_size();
        if size == expected {
            return Ok(());
        }
        let problem = text!("is {size}, the state of this optimizer is {expected} bytes");
        Err(Error::invalid(op, "size", problem))
    }

    /// Takes over what an optimizer of the same kind, parameters and groups saved; has read it when
    /// it returns. With the weights and [`Params`] of then, steps go on with the same bits as if
    /// they had not been interrupted. Weights stay as they are, those with f32 masters too: the
    /// caller saves and restores them.
    ///
    /// # Errors
    /// `data` is not of such an optimizer, the stream is being captured, or the device fails. The
    /// state is as it was unless the device failed.
    pub fn load(&mut self, data: &[u8], stream: Stream) -> Result<()> {
        const OP: &str = "optimizer_load";
        self.context.check_not_capturing(OP, stream, OUTSIDE)?;
        let wrong = |problem: String| Error::invalid(OP, "data", problem);
        if data.len() < HEADER {
            return self.check_size(OP, data.len());
        }
        if data[..8] != MAGIC {
            return Err(wrong(text!("is not the saved state of an optimizer")));
        }
        let version = word(data, 8);
        if version != VERSION {
            let problem = text!("is of version {version}, this library reads {VERSION}");
            return Err(Error::unsupported(OP, "data", problem));
        }
        let (theirs, ours) = (word(data, 12), kind(&self.rule));
        if theirs != ours {
            let (theirs, ours) = (kind_name(theirs), kind_name(ours));
            return Err(wrong(text!("is of {theirs}, this optimizer is {ours}")));
        }
        let counts = [
            ("parameters", 16, self.records.len()),
            ("groups", 24, self.num_groups),
        ];
        for (name, at, ours) in counts {
            let theirs = long(data, at);
            if theirs != ours as u64 {
                let problem = text!("has {theirs} {name}, this optimizer {ours}");
                return Err(wrong(problem));
            }
        }
        if data.len() < self.state_at() {
            return self.check_size(OP, data.len());
        }
        for (i, ours) in self.records.iter().enumerate() {
            let at = HEADER + RECORD * i;
            if data[at..at + RECORD] == ours.bytes() {
                continue;
            }
            let dtype = DType::from_raw(word(data, at + 8)).map_or("no dtype", DType::name);
            let problem = text!(
                "has {} elements of {dtype} with {} as parameters[{i}], \
                 this optimizer {} of {} with {}",
                long(data, at),
                storage_name(word(data, at + 12)),
                ours.elements,
                ours.dtype,
                storage_name(ours.storage as u32),
            );
            return Err(wrong(problem));
        }
        self.check_size(OP, data.len())?;
        let state = &data[self.state_at()..];
        // The first field of the control block.
        const _: () = assert!(std::mem::offset_of!(Control, scale) == 0);
        let scale = f32::from_bits(word(state, 0));
        if !(scale.is_finite() && scale >= f32::MIN_POSITIVE) {
            return Err(wrong(text!("has a loss scale of {scale}")));
        }
        self.upload(0, state, stream).map_err(|e| e.within(OP))
    }
}
