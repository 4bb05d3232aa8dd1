//! The simulated redo beside an image, and what finding it there means.

use crate::rng::Rng;
use crate::store::{Store, content};
use std::collections::BTreeMap;
use tidepool_engine::OwnObjects;
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::redo::{Change, FrameName, decode};

/// The redo's header.
#[derive(Debug, Clone)]
pub struct Header {
    generation: u64,
    uuid: [u8; 16],
    /// Number of frames of each group that is kept.
    groups: BTreeMap<u64, u32>,
    /// Sequence of the last record in the newest group.
    sequence: u64,
}

/// What a commit says.
#[derive(Debug, Clone, Copy)]
pub struct Commit {
    /// The oldest group that is kept.
    first: u64,
    /// The new one.
    group: u64,
    /// How many frames it has.
    frames: u32,
    /// Sequence of its last record.
    sequence: u64,
}

impl Commit {
    /// Of `group`, with the sequence of its last record; groups from `first` on are kept.
    pub fn new(first: u64, group: u64, frames: u32, sequence: u64) -> Commit {
        Commit { first, group, frames, sequence }
    }
}

/// Frames and header beside one image; durable when they are written.
#[derive(Default)]
pub struct Redo {
    frames: BTreeMap<(u64, u64, u32), Vec<u8>>,
    header: Option<Header>,
    /// Newest group of the generation that was ever committed.
    newest: (u64, u64),
    /// The owner's last note: its generation, and what was on its stable media.
    noted: (u64, u64),
    /// The newest one was committed, but its owner was told of an error.
    unsure: bool,
}

impl Redo {
    /// A frame is written, or a part of it when its sender was killed.
    pub fn write(&mut self, name: (u64, u64, u32), bytes: &[u8]) {
        self.frames.insert(name, bytes.to_vec());
    }

    /// A frame was on its way when its sender was killed.
    pub fn write_cut(&mut self, rng: &mut Rng, name: (u64, u64, u32), bytes: &[u8]) {
        let n = rng.below(bytes.len() as u64 + 1) as usize;
        if rng.permille(500) {
            self.write(name, &bytes[..n]);
        }
    }

    /// The header changes: a group is committed.
    ///
    /// # Errors
    /// What of the core's promises does not hold.
    pub fn commit(
        &mut self,
        generation: u64,
        uuid: [u8; 16],
        commit: Commit,
    ) -> Result<(), String> {
        let Commit { first, group, frames, sequence } = commit;
        let mut groups = match &self.header {
            Some(header) if header.generation == generation => header.groups.clone(),
            Some(header) if header.generation > generation => {
                return Err(format!("generation {generation} commits over {}", header.generation));
            }
            _ => BTreeMap::new(),
        };
        let again = self.newest == (generation, group) && self.unsure;
        if self.newest.0 == generation && group <= self.newest.1 && !again {
            return Err(format!("group {group} is committed a second time"));
        }
        self.newest = (generation, group);
        self.unsure = false;
        groups.insert(group, frames);
        groups.retain(|&g, _| g >= first);
        for frame in 0..frames {
            let found = self.frames.get(&(generation, group, frame));
            let name = FrameName { uuid, generation, group, frame };
            if found.and_then(|bytes| decode(bytes, name)).is_none() {
                return Err(format!("frame {frame} of group {group} is committed, but not there"));
            }
        }
        self.frames.retain(|&(g, group, _), _| g == generation && group >= first);
        self.header = Some(Header { generation, uuid, groups, sequence });
        Ok(())
    }

    /// Whether the owner was told that the newest group was not committed, although it is.
    pub fn set_unsure(&mut self, unsure: bool) {
        self.unsure = unsure;
    }

    /// The owner of a generation notes what it has on stable media.
    pub fn note(&mut self, generation: u64, durable: u64) {
        self.noted = (generation, durable);
    }

    /// A cache whose log ends at `sequence` has lost what it once had on stable media.
    pub fn is_ahead(&self, uuid: [u8; 16], sequence: u64) -> bool {
        let Some(header) = self.header.as_ref().filter(|header| header.uuid == uuid) else {
            return false;
        };
        let noted = if self.noted.0 >= header.generation { self.noted.1 } else { 0 };
        header.sequence.max(noted) > sequence
    }

    /// Groups before `first` are not needed any more.
    pub fn trim(&mut self, first: u64) {
        if let Some(header) = &mut self.header {
            header.groups.retain(|&g, _| g >= first);
            self.frames.retain(|&(_, group, _), _| group >= first);
        }
    }

    /// Nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.header.as_ref().is_none_or(|header| header.groups.is_empty())
    }

    /// The image is released: nothing is kept.
    pub fn clear(&mut self) {
        *self = Redo::default();
    }

    /// What the redo says about blocks: `None` stands for zeroes.
    ///
    /// # Errors
    /// A frame that is not there.
    pub fn content(&self) -> Result<BTreeMap<u64, Option<Vec<u8>>>, String> {
        let mut all = BTreeMap::new();
        let Some(header) = &self.header else { return Ok(all) };
        for (&group, &frames) in &header.groups {
            for frame in 0..frames {
                let name =
                    FrameName { uuid: header.uuid, generation: header.generation, group, frame };
                let bytes = self.frames.get(&(header.generation, group, frame));
                let changes = bytes.and_then(|bytes| decode(bytes, name));
                for change in
                    changes.ok_or_else(|| format!("frame {frame} of group {group} is gone"))?
                {
                    match change {
                        Change::Data(block, bytes) => drop(all.insert(block, Some(bytes.to_vec()))),
                        Change::Zeroes(block, n, _) => {
                            all.extend((block..block + u64::from(n)).map(|b| (b, None)));
                        }
                    }
                }
            }
        }
        Ok(all)
    }

    /// Brings the image to the last cut.
    ///
    /// # Errors
    /// As for [`Redo::content`].
    pub fn recover(
        &mut self,
        store: &mut Store,
        own: &mut OwnObjects,
        clip: impl Fn(u64, &[u8]) -> Vec<u8>,
    ) -> Result<(), String> {
        for (block, bytes) in self.content()? {
            own.insert(block * BLOCK_BYTES as u64, BLOCK_BYTES as u64);
            let bytes = bytes.map(|bytes| clip(block, &bytes));
            store.write(block, bytes.and_then(|bytes| content(&bytes)), true);
        }
        self.clear();
        Ok(())
    }
}
