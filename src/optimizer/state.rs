//! How the state lies in its memory.

use std::ops::Range;

use super::{OP, Params};
use crate::comm::Comm;
use crate::error::{Error, Result, text};
use crate::problem::optimizer::{CHUNK, Control, Group, PACK, Storage, Tensor, traits};
use crate::tensor::Workspace;

/// A parameter in the table of kernels, as [`traits`] has it.
pub(super) type Entry = [u64; traits::WORDS];

/// Offsets into the state in bytes, each a multiple of the alignment. What is saved comes first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    pub groups: usize,
    pub moments: [usize; 2],
    pub masters: usize,
    /// Where what is saved ends.
    pub saved: usize,
    pub partials: usize,
    pub sums: usize,
    pub entries: usize,
    pub size: usize,
    pub num_chunks: usize,
}

/// Parameters of one shape.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub elements: usize,
    /// How many there are.
    pub count: usize,
    pub storage: Storage,
}

/// Hands out memory.
struct Cursor(Option<usize>);

impl Cursor {
    /// Where `bytes` more begin.
    fn take(&mut self, bytes: Option<usize>) -> usize {
        let at = self.0.unwrap_or(0);
        let end = self.0.zip(bytes).and_then(|(at, n)| at.checked_add(n));
        self.0 = end.and_then(|end| end.checked_next_multiple_of(Workspace::ALIGNMENT));
        at
    }
}

/// Elements of a parameter in the state.
fn padded(elements: usize) -> Option<usize> {
    elements.checked_next_multiple_of(PACK)
}

/// Bytes that an element's master takes.
fn master_bytes(storage: Storage) -> usize {
    match storage {
        Storage::Weight | Storage::Stochastic => 0,
        Storage::F32 => 4,
        Storage::Remainder => 2,
    }
}

impl State {
    /// Of checked parameters.
    pub fn new(params: &Params<'_>) -> Result<State> {
        let shapes = params.parameters.iter().map(|p| Shape {
            elements: p.weight.layout().num_elements(),
            count: 1,
            storage: params.storage(p),
        });
        let num_ranks = params.comm.map_or(0, Comm::size);
        let num_groups = params.groups.len();
        State::of(num_groups, params.rule.num_moments(), num_ranks, shapes)
    }

    /// Of parameters that need not be there yet. There are no ranks where none share them.
    pub fn of(
        num_groups: usize,
        num_moments: usize,
        num_ranks: usize,
        shapes: impl Iterator<Item = Shape>,
    ) -> Result<State> {
        let (mut elements, mut masters) = (Some(0usize), Some(0usize));
        let (mut num_chunks, mut num_entries) = (0usize, 0usize);
        for shape in shapes {
            let own = shape.elements;
            let in_state = padded(own).and_then(|n| n.checked_mul(shape.count));
            let master = in_state.and_then(|n| n.checked_mul(master_bytes(shape.storage)));
            elements = elements.zip(in_state).and_then(|(a, b)| a.checked_add(b));
            masters = masters.zip(master).and_then(|(a, b)| a.checked_add(b));
            let chunks = own.div_ceil(CHUNK).saturating_mul(shape.count);
            num_chunks = num_chunks.saturating_add(chunks);
            num_entries = num_entries.saturating_add(if own > 0 { shape.count } else { 0 });
        }
        let of = |count: usize, bytes: usize| count.checked_mul(bytes);
        let mut cursor = Cursor(Some(0));
        cursor.take(Some(size_of::<Control>()));
        let groups = cursor.take(of(num_groups, size_of::<Group>()));
        let moments = [0, 1].map(|i| match i < num_moments {
            true => cursor.take(elements.and_then(|n| n.checked_mul(4))),
            false => 0,
        });
        let masters = cursor.take(masters);
        let saved = cursor.0.unwrap_or(0);
        let partials = cursor.take(of(num_chunks, size_of::<f32>()));
        let sums = cursor.take(of(num_ranks, size_of::<f64>()));
        let entries = cursor.take(of(num_entries, size_of::<Entry>()));
        // Chunks are counted in 31 bits by kernels.
        let fits = num_chunks <= i32::MAX as usize;
        match cursor.0.filter(|size| fits && *size <= isize::MAX as usize) {
            Some(size) => Ok(State {
                groups,
                moments,
                masters,
                saved,
                partials,
                sums,
                entries,
                size,
                num_chunks,
            }),
            None => Err(Error::invalid(OP, "parameters", "have too many elements")),
        }
    }

    /// The parameters that have elements, with their places in the state at `memory`.
    pub fn tensors(&self, params: &Params<'_>, memory: *mut u8) -> Result<Vec<Tensor>> {
        let mut tensors = Vec::new();
        let count = params.parameters.len();
        tensors.try_reserve_exact(count).map_err(|_| {
            Error::out_of_host_memory(OP, count.saturating_mul(size_of::<Tensor>()))
        })?;
        let (mut first_chunk, mut first_pack, mut master_at) = (0, 0, self.masters);
        for p in params.parameters {
            let elements = p.weight.layout().num_elements();
            if elements == 0 {
                continue;
            }
            let storage = params.storage(p);
            let packs = elements.div_ceil(PACK);
            let moment = |i: usize| match i < params.rule.num_moments() {
                true => memory.wrapping_add(self.moments[i] + first_pack * PACK * 4),
                false => std::ptr::null_mut(),
            };
            let master_size = packs * PACK * master_bytes(storage);
            tensors.push(Tensor {
                weight: p.weight.raw().ptr,
                gradient: p.gradient.raw().ptr,
                moments: [moment(0), moment(1)],
                master: match master_size {
                    0 => std::ptr::null_mut(),
                    _ => memory.wrapping_add(master_at),
                },
                elements,
                first_chunk,
                first_pack,
                weight_dtype: p.weight.dtype(),
                gradient_dtype: p.gradient.dtype(),
                storage,
                group: p.group,
            });
            first_chunk += elements.div_ceil(CHUNK);
            first_pack += packs;
            master_at += master_size;
        }
        Ok(tensors)
    }

    /// Where a group's values are.
    pub fn group(&self, group: usize) -> Range<usize> {
        let at = self.groups + group * size_of::<Group>();
        at..at + size_of::<Group>()
    }
}

/// A parameter as kernels read it.
pub(super) fn entry(tensor: &Tensor) -> Entry {
    let address = |ptr: *mut u8| ptr.addr() as u64;
    let vectors = [tensor.weight, tensor.gradient]
        .iter()
        .all(|ptr| address(*ptr).is_multiple_of(16));
    let traits = tensor.weight_dtype as u64
        | (tensor.gradient_dtype as u64) << traits::GRADIENT
        | (tensor.storage as u64) << traits::STORAGE
        | u64::from(vectors) << traits::VECTORS
        | (tensor.group as u64) << traits::GROUP;
    [
        address(tensor.weight),
        address(tensor.gradient),
        address(tensor.moments[0]),
        address(tensor.moments[1]),
        address(tensor.master),
        tensor.elements as u64,
        tensor.first_pack as u64,
        tensor.first_chunk as u64 | traits << 32,
    ]
}

/// A group's number, checked.
pub(super) fn check_index(op: &'static str, group: usize, count: usize) -> Result<()> {
    if group < count {
        return Ok(());
    }
    let problem = text!("is {group}, the number of groups is {count}");
    Err(Error::invalid(op, "group", problem))
}
