//! What an image has of its own: which of its objects are there, and what reads where there is
//! none.
//!
//! Who opens the image finds out which objects there are. From then on nobody else writes the
//! image, and what this core sends there it adds. An object that is not there is a hole, which
//! reads as zero, or comes from the image's parent.

use crate::api::BLOCK_BYTES;
use crate::base::mutation::mutated;
use crate::blocks::index::OBJECT_BLOCKS;

/// Bytes of the image for which one bit of an [`OwnObjects`] stands.
pub const OBJECT_BYTES: u64 = (OBJECT_BLOCKS * BLOCK_BYTES) as u64;

/// Where the bytes of an image come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The image has them, or may have.
    Own,
    /// Its parent.
    Parent,
    /// Nothing has ever been written there: they read as zero.
    Hole,
}

/// The objects of an image that are its own, one bit for every [`OBJECT_BYTES`]. Objects that are
/// not in it count as own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnObjects {
    words: Vec<u64>,
    /// What is not own comes from the parent up to here. A multiple of [`OBJECT_BYTES`].
    inherited_bytes: u64,
}

impl OwnObjects {
    /// The first `bytes` of an image have no object of their own, and nothing comes from a parent.
    pub fn none(bytes: u64) -> OwnObjects {
        let objects = bytes.div_ceil(OBJECT_BYTES);
        let mut words = vec![0; objects.div_ceil(64) as usize];
        if let (Some(last), used @ 1..) = (words.last_mut(), objects % 64) {
            *last = u64::MAX << used;
        }
        OwnObjects { words, inherited_bytes: 0 }
    }

    /// The first `bytes` of the image come from its parent where there is no object. An object of
    /// which only a part does counts as own.
    #[must_use]
    pub fn inheriting(mut self, bytes: u64) -> OwnObjects {
        self.inherited_bytes = bytes / OBJECT_BYTES * OBJECT_BYTES;
        self.insert(self.inherited_bytes, bytes - self.inherited_bytes);
        self
    }

    /// Every object that has something in common with the `len` bytes at `offset` is the image's
    /// own.
    pub fn insert(&mut self, offset: u64, len: u64) {
        let end =
            (offset.saturating_add(len).div_ceil(OBJECT_BYTES)).min(self.words.len() as u64 * 64);
        for object in offset / OBJECT_BYTES..end {
            self.words[object as usize / 64] |= 1 << (object % 64);
        }
    }

    /// Where what is at an offset comes from, and how many of the next `len` bytes, which are not
    /// 0, come from there.
    pub fn source(&self, offset: u64, len: u64) -> (Source, u64) {
        let first = offset / OBJECT_BYTES;
        let source = self.source_of(first);
        let end = offset.saturating_add(len).div_ceil(OBJECT_BYTES);
        let next = (first + 1..end).find(|&object| self.source_of(object) != source);
        (source, next.map_or(len, |object| object * OBJECT_BYTES - offset))
    }

    fn source_of(&self, object: u64) -> Source {
        let own =
            self.words.get(object as usize / 64).is_none_or(|word| word >> (object % 64) & 1 == 1);
        match own {
            true => Source::Own,
            false if object * OBJECT_BYTES < self.inherited_bytes => Source::Parent,
            false => Source::Hole,
        }
    }

    /// The parent is not larger than this.
    pub(crate) fn inherit_within(&mut self, bytes: u64) {
        let end = bytes / OBJECT_BYTES * OBJECT_BYTES;
        if end < self.inherited_bytes {
            self.insert(end, self.inherited_bytes - end);
        }
    }

    /// Takes in what was found of the image, beside what is known to have been written since.
    pub(crate) fn find(&mut self, found: &OwnObjects) {
        for (i, word) in self.words.iter_mut().enumerate() {
            let theirs = found.words.get(i).copied().unwrap_or(u64::MAX);
            *word = if mutated!(LinkForgetsWritten) { theirs } else { *word | theirs };
        }
        self.inherited_bytes = found.inherited_bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(own: &OwnObjects, object: u64) -> Source {
        own.source(object * OBJECT_BYTES, 1).0
    }

    #[test]
    fn what_is_not_known_to_be_absent_is_own() {
        let mut own = OwnObjects::none(70 * OBJECT_BYTES + 1);
        assert_eq!(
            (at(&own, 0), at(&own, 70), at(&own, 71)),
            (Source::Hole, Source::Hole, Source::Own)
        );
        assert_eq!(own.source(u64::MAX - 1, 1), (Source::Own, 1));
        own.insert(OBJECT_BYTES - 1, 2);
        assert_eq!(
            (at(&own, 0), at(&own, 1), at(&own, 2)),
            (Source::Own, Source::Own, Source::Hole)
        );
        own.find(&OwnObjects::none(65 * OBJECT_BYTES));
        assert_eq!(
            (at(&own, 0), at(&own, 2), at(&own, 64)),
            (Source::Own, Source::Hole, Source::Hole)
        );
        assert_eq!(at(&own, 65), Source::Own, "what was not looked at");
        own.insert(60 * OBJECT_BYTES, u64::MAX);
        assert_eq!((at(&own, 59), at(&own, 61)), (Source::Hole, Source::Own));
        let even = OwnObjects::none(64 * OBJECT_BYTES);
        assert_eq!((at(&even, 63), at(&even, 64)), (Source::Hole, Source::Own));
    }

    #[test]
    fn what_is_absent_comes_from_the_parent_as_far_as_it_reaches() {
        let mut own = OwnObjects::none(10 * OBJECT_BYTES).inheriting(4 * OBJECT_BYTES + 512);
        own.insert(OBJECT_BYTES, 1);
        let sources: Vec<Source> = (0..11).map(|object| at(&own, object)).collect();
        let [parent, own_, hole] = [Source::Parent, Source::Own, Source::Hole];
        assert_eq!(
            sources,
            [parent, own_, parent, parent, own_, hole, hole, hole, hole, hole, own_]
        );
        assert_eq!(
            own.source(2 * OBJECT_BYTES + 5, 9 * OBJECT_BYTES),
            (parent, 2 * OBJECT_BYTES - 5)
        );
        assert_eq!(own.source(5 * OBJECT_BYTES, 512), (hole, 512));
        assert_eq!(own.source(6 * OBJECT_BYTES, u64::MAX), (hole, 4 * OBJECT_BYTES));
        let mut seen = OwnObjects::none(10 * OBJECT_BYTES);
        seen.insert(0, 1);
        seen.find(&own);
        assert_eq!((at(&seen, 0), at(&seen, 2), at(&seen, 5)), (own_, parent, hole));
    }
}
