//! Start-time fair queueing (Goyal, Vin, Cheng 1996): who is next to be served.
//!
//! A tag advances by what its owner is given, divided by the owner's weight; the smallest tag is next. An owner that was
//! idle begins at the present, the tag served last, and gains nothing by waiting.

use std::collections::HashMap;
use std::hash::Hash;

/// Tags of owners.
#[derive(Debug)]
pub struct Tags<K> {
    tags: HashMap<K, f64>,
    now: f64,
}

impl<K> Default for Tags<K> {
    fn default() -> Self {
        Tags { tags: HashMap::new(), now: 0.0 }
    }
}

impl<K: Eq + Hash> Tags<K> {
    /// Tag of an owner: the smaller, the less it has been served.
    pub fn get(&self, owner: &K) -> f64 {
        self.tags.get(owner).map_or(self.now, |tag| tag.max(self.now))
    }

    /// Smallest tag of `owners`; infinite without any.
    pub fn least<'a>(&self, owners: impl Iterator<Item = &'a K>) -> f64
    where
        K: 'a,
    {
        owners.map(|owner| self.get(owner)).fold(f64::INFINITY, f64::min)
    }

    /// Charges `cost`, divided by the owner's weight.
    pub fn charge(&mut self, owner: K, cost: f64) {
        let tag = self.get(&owner) + cost;
        self.tags.insert(owner, tag);
    }

    /// Moves the present to a tag that is served, unless it is infinite.
    pub fn advance(&mut self, tag: f64) {
        if tag.is_finite() {
            self.now = self.now.max(tag);
        }
    }

    /// Forgets the owners of the past, whose tags the present has reached.
    pub fn forget_past(&mut self) {
        let now = self.now;
        self.tags.retain(|_, tag| *tag > now);
    }
}
