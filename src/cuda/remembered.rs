//! What was chosen for a call's sizes, so that a call of the same sizes need not choose again.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::sync::{Mutex, PoisonError};

use crate::error::{Error, Result};

/// Of the keys that share a place the last one is remembered.
const PLACES: usize = 256;

/// Choices by key.
pub(super) struct Remembered<K, V> {
    places: Mutex<Vec<Option<(K, V)>>>,
}

impl<K: Copy + Eq + Hash, V: Copy> Remembered<K, V> {
    /// # Errors
    /// The host has no memory for the places.
    pub fn new(op: &'static str) -> Result<Self> {
        let mut places = Vec::new();
        places
            .try_reserve_exact(PLACES)
            .map_err(|_| Error::out_of_host_memory(op, PLACES * size_of::<Option<(K, V)>>()))?;
        places.resize(PLACES, None);
        Ok(Remembered {
            places: Mutex::new(places),
        })
    }

    /// What was chosen for a key, or is chosen now.
    pub fn or_choose(&self, key: K, choose: impl FnOnce() -> V) -> V {
        let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(key);
        let place = hash as usize % PLACES;
        // What a thread that panicked has left is whole: a place is written at once.
        let lock = || self.places.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some((found, chosen))) = lock().get(place)
            && *found == key
        {
            return *chosen;
        }
        let chosen = choose();
        if let Some(place) = lock().get_mut(place) {
            *place = Some((key, chosen));
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Keys that share a place take it from each other, and have their own choices all the same.
    #[test]
    fn each_key_has_its_own_choice() {
        let remembered = Remembered::new("test").unwrap();
        let chosen = Cell::new(0);
        let choose = |key: usize| {
            remembered.or_choose(key, || {
                chosen.set(chosen.get() + 1);
                key * 3
            })
        };
        for key in (0..4 * PLACES).chain(0..4 * PLACES) {
            assert_eq!(choose(key), key * 3);
            assert_eq!(choose(key), key * 3);
        }
        // The second time for each at once; in the second round only where no other key had the place.
        assert!((4 * PLACES..=8 * PLACES).contains(&chosen.get()));
    }
}
