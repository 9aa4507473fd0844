//! Sequences: the pages each one holds, and the identifiers callers know them by.

use crate::error::{Error, Result, text};

use super::pages::Page;
use super::reserve;

/// A sequence of a cache. Identifiers are never zero or negative, and one that has been freed is never given out again before
/// 2³¹ sequences have passed through its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId(i64);

impl SequenceId {
    /// The identifier with this C ABI value; whether it names a sequence is found out when it is used.
    pub fn from_raw(value: i64) -> SequenceId {
        SequenceId(value)
    }

    /// The C ABI value.
    pub fn as_raw(self) -> i64 {
        self.0
    }

    fn new(generation: u32, slot: usize) -> SequenceId {
        SequenceId((i64::from(generation) << 32) | slot as i64)
    }

    fn parts(self) -> (u32, usize) {
        ((self.0 >> 32) as u32, self.0 as u32 as usize)
    }
}

/// What a sequence holds.
///
/// Tokens lie in the pages in order. Positions count every token there ever was, so that after an eviction they run from 0 to
/// `gap_start`, then from `gap_start + evicted` on. Both are multiples of the page size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Sequence {
    /// Pages with tokens, then reserved ones, which no other sequence holds.
    pub pages: Vec<Page>,
    /// Tokens held.
    pub length: usize,
    /// Tokens before the evicted ones.
    pub gap_start: usize,
    /// Tokens evicted.
    pub evicted: usize,
}

impl Sequence {
    /// The position of the next token.
    pub fn position(&self) -> usize {
        self.length + self.evicted
    }

    /// Pages with tokens.
    pub fn num_filled(&self, page_size: usize) -> usize {
        self.length.div_ceil(page_size)
    }

    /// What eviction down to `num_sinks` and `window` tokens would remove: a range of tokens held, on page boundaries. The evicted
    /// tokens stay one range of positions.
    pub fn evictable(
        &self,
        num_sinks: usize,
        window: usize,
        page_size: usize,
    ) -> std::ops::Range<usize> {
        // These are positions. All lie on page boundaries, except that the start may not, and it may
        // lie past the end.
        let start = num_sinks.min(self.position()).next_multiple_of(page_size);
        let cut = self.position().saturating_sub(window);
        let end = cut - cut % page_size;
        if start >= end {
            return 0..0;
        }
        if self.evicted == 0 {
            return start..end;
        }
        let resume = self.gap_start + self.evicted;
        if end < self.gap_start || start > resume {
            return 0..0;
        }
        start.min(self.gap_start)..end.max(resume) - self.evicted
    }
}

#[derive(Debug)]
struct Slot {
    /// Odd while the slot holds a sequence, and below 2³¹, so that identifiers are positive.
    generation: u32,
    sequence: Sequence,
}

/// The live sequences.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    slots: Vec<Slot>,
    free: Vec<usize>,
}

impl Sequences {
    /// Of a sequence, without the pages that it holds.
    pub const BYTES: usize = size_of::<Slot>() + size_of::<usize>();

    pub fn insert(&mut self, op: &'static str, sequence: Sequence) -> Result<SequenceId> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() < u32::MAX as usize => {
                reserve(op, &mut self.slots, 1)?;
                // Freeing a sequence, which cannot fail, puts its slot here.
                let slots = self.slots.len() + 1;
                reserve(op, &mut self.free, slots)?;
                self.slots.push(Slot {
                    generation: 0,
                    sequence: Sequence::default(),
                });
                self.slots.len() - 1
            }
            None => {
                return Err(Error::OutOfMemory {
                    op,
                    requested: size_of::<Slot>() as u64,
                    reason: text!("{} sequences are live", u32::MAX),
                });
            }
        };
        let slot = &mut self.slots[index];
        slot.generation = (slot.generation + 1) & 0x7fff_ffff;
        slot.sequence = sequence;
        Ok(SequenceId::new(slot.generation, index))
    }

    /// What it uses of what it has allocated, which grows by more at a time.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        let pages: usize = self.iter().map(|sequence| sequence.pages.len()).sum();
        self.slots.len() * Self::BYTES + pages * size_of::<Page>()
    }

    pub fn remove(&mut self, op: &'static str, id: SequenceId) -> Result<Sequence> {
        let index = self.locate(op, id)?;
        let slot = &mut self.slots[index];
        slot.generation = (slot.generation + 1) & 0x7fff_ffff;
        self.free.push(index);
        Ok(std::mem::take(&mut slot.sequence))
    }

    pub fn get(&self, op: &'static str, id: SequenceId) -> Result<&Sequence> {
        Ok(&self.slots[self.locate(op, id)?].sequence)
    }

    pub fn get_mut(&mut self, op: &'static str, id: SequenceId) -> Result<&mut Sequence> {
        let index = self.locate(op, id)?;
        Ok(&mut self.slots[index].sequence)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Sequence> {
        self.slots
            .iter()
            .filter(|slot| slot.generation % 2 == 1)
            .map(|slot| &slot.sequence)
    }

    fn locate(&self, op: &'static str, id: SequenceId) -> Result<usize> {
        let (generation, index) = id.parts();
        match self.slots.get(index) {
            Some(slot) if generation % 2 == 1 && slot.generation == generation => Ok(index),
            _ => Err(Error::InvalidHandle {
                op,
                argument: "sequence",
                kind: "sequence",
                handle: id.0 as usize,
                forked: false,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_identifiers_are_refused() {
        let mut sequences = Sequences::default();
        let a = sequences.insert("t", Sequence::default()).unwrap();
        let b = sequences.insert("t", Sequence::default()).unwrap();
        assert!(a.as_raw() > 0 && b.as_raw() > 0 && a != b);
        sequences.remove("t", a).unwrap();
        assert!(sequences.remove("t", a).is_err() && sequences.get("t", a).is_err());
        let c = sequences.insert("t", Sequence::default()).unwrap();
        assert_ne!(a, c);
        assert!(sequences.get("t", a).is_err() && sequences.get("t", c).is_ok());
        assert_eq!(sequences.iter().count(), 2);
        for wild in [0, 1, -1, i64::MIN, i64::MAX, (1 << 32) | 77] {
            assert!(
                sequences.get("t", SequenceId::from_raw(wild)).is_err(),
                "{wild}"
            );
        }
    }

    #[test]
    fn evictable_ranges() {
        let fresh = |length| Sequence {
            length,
            ..Sequence::default()
        };
        // (sequence, sinks, window) -> tokens held that go, pages of 4
        assert_eq!(fresh(10).evictable(0, 100, 4), 0..0);
        assert_eq!(fresh(10).evictable(0, 3, 4), 0..4);
        assert_eq!(fresh(10).evictable(1, 0, 4), 4..8);
        assert_eq!(fresh(12).evictable(0, 0, 4), 0..12);
        assert_eq!(fresh(12).evictable(9, 1, 4), 0..0);
        assert_eq!(fresh(12).evictable(usize::MAX, 1, 4), 0..0);
        let gapped = Sequence {
            length: 14,
            gap_start: 8,
            evicted: 4,
            ..Sequence::default()
        };
        // Positions held: 0..8 and 12..18.
        assert_eq!(gapped.evictable(8, 2, 4), 8..12);
        assert_eq!(gapped.evictable(12, 2, 4), 8..12);
        assert_eq!(gapped.evictable(100, 2, 4), 0..0);
        assert_eq!(gapped.evictable(4, 8, 4), 4..8);
        assert_eq!(gapped.evictable(0, 12, 4), 0..0, "would split the gap");
        assert_eq!(gapped.evictable(0, 2, 4), 0..12);
    }
}
