//! Numbered places for objects, each with a version that tells what is there from what was.
//!
//! The crate `slotmap` has the same, but ends the process where its first table finds no memory.

use crate::error::{Error, Result};

/// What an object is found by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    pub index: u32,
    /// Odd, as versions of objects are.
    pub version: u32,
}

struct Slot<V> {
    /// Grows by one with every object that comes, and with every one that goes.
    version: u32,
    /// The free slot to be taken after this one.
    next_free: Option<u32>,
    value: Option<V>,
}

/// Objects by key.
pub(super) struct Slots<V> {
    slots: Vec<Slot<V>>,
    free: Option<u32>,
}

impl<V> Slots<V> {
    pub const fn new() -> Self {
        Slots {
            slots: Vec::new(),
            free: None,
        }
    }

    /// Sees to it that there is a slot for one more; `None` where all `capacity` are taken.
    ///
    /// # Errors
    /// There is no memory.
    fn vacant(&mut self, op: &'static str, capacity: usize) -> Result<Option<u32>> {
        if let Some(index) = self.free {
            return Ok(Some(index));
        }
        let index = self.slots.len();
        if index >= capacity {
            return Ok(None);
        }
        self.slots
            .try_reserve(1)
            .map_err(|_| Error::out_of_host_memory(op, size_of::<Slot<V>>()))?;
        self.slots.push(Slot {
            version: 0,
            next_free: None,
            value: None,
        });
        self.free = Some(index as u32);
        Ok(self.free)
    }

    /// Takes in an object; `None` where `capacity` are there.
    ///
    /// # Errors
    /// There is no memory; everything is as it was.
    pub fn insert(&mut self, op: &'static str, capacity: usize, value: V) -> Result<Option<Key>> {
        let Some(index) = self.vacant(op, capacity)? else {
            return Ok(None);
        };
        let slot = &mut self.slots[index as usize];
        self.free = slot.next_free.take();
        slot.version = slot.version.wrapping_add(1);
        slot.value = Some(value);
        Ok(Some(Key {
            index,
            version: slot.version,
        }))
    }

    pub fn get(&self, key: Key) -> Option<&V> {
        let slot = self.slots.get(key.index as usize)?;
        slot.value.as_ref().filter(|_| slot.version == key.version)
    }

    pub fn remove(&mut self, key: Key) -> Option<V> {
        let slot = self.slots.get_mut(key.index as usize)?;
        if slot.version != key.version {
            return None;
        }
        let value = slot.value.take()?;
        slot.version = slot.version.wrapping_add(1);
        slot.next_free = self.free.replace(key.index);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again_under_other_versions() {
        let mut slots = Slots::new();
        let insert = |slots: &mut Slots<char>, value| slots.insert("test", 3, value).unwrap();
        let keys = ['a', 'b', 'c'].map(|value| insert(&mut slots, value).unwrap());
        assert_eq!(
            keys.map(|key| slots.get(key).copied()),
            ['a', 'b', 'c'].map(Some)
        );
        assert_eq!(insert(&mut slots, 'd'), None);
        assert_eq!(
            [keys[0], keys[2]].map(|key| slots.remove(key)),
            ['a', 'c'].map(Some)
        );
        assert_eq!([keys[0], keys[2]].map(|key| slots.remove(key)), [None; 2]);
        let again = ['e', 'f'].map(|value| insert(&mut slots, value).unwrap());
        assert_eq!(
            again.map(|key| slots.get(key).copied()),
            ['e', 'f'].map(Some)
        );
        assert_eq!(insert(&mut slots, 'g'), None);
        assert_eq!(
            keys.map(|key| slots.get(key).copied()),
            [None, Some('b'), None]
        );
        assert!(again.iter().chain(&keys).all(|key| key.version % 2 == 1));
        let none = Key {
            index: 9,
            version: 1,
        };
        assert!(slots.get(none).is_none() && slots.remove(none).is_none());
    }
}
