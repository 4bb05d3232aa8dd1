//! The simulated backend of one volume.

use super::FlightKind;
use super::redo::Redo;
use crate::rng::Rng;
use crate::store::{Content, Store, content};
use std::collections::BTreeMap;
use tidepool_engine::OwnObjects;
use tidepool_engine::api::{BLOCK_BYTES, IoError, Nanos};

/// What goes wrong with a backend for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Nothing.
    None,
    /// Operations fail with EIO, with this probability in parts per thousand.
    Errors(u64),
    /// Flushes fail, with this probability in parts per thousand.
    Flushes(u64),
    /// Writes fail because there is no space.
    Full,
    /// Nothing completes.
    Stopped,
    /// The connection is gone: nothing completes, and what was in flight fails when it is there
    /// again.
    Disconnected,
    /// Everything takes this many times longer.
    Slow(u64),
    /// Another owner has the image.
    Fenced,
}

/// An image: a file with a volatile write cache, or one whose writes are durable when they
/// complete.
pub struct Backend {
    pub(super) store: Store,
    /// The redo beside it.
    pub(super) redo: Redo,
    size_bytes: u64,
    /// Completed writes are durable (as on RBD).
    durable: bool,
    /// Usual time of an operation.
    latency_ns: Nanos,
    /// What is wrong.
    trouble: Trouble,
    /// Until when.
    trouble_until: Nanos,
    /// The ownership record: generation of the last opening.
    generation: u64,
    /// The ownership record: what the cache knew then, 0 for nothing.
    base: u64,
    /// Somebody else has written the image since then.
    foreign: bool,
    /// The record no longer names the cache.
    disowned: bool,
    /// What has ever been written to.
    own: OwnObjects,
    /// What completes now was in flight when the connection went away.
    disconnected: bool,
}

impl Backend {
    /// An image of zeroes.
    pub fn new(size_bytes: u64, durable: bool, latency_ns: Nanos) -> Backend {
        Backend {
            store: Store::default(),
            redo: Redo::default(),
            size_bytes,
            durable,
            latency_ns,
            trouble: Trouble::None,
            trouble_until: 0,
            generation: 0,
            base: 0,
            foreign: false,
            disowned: false,
            own: OwnObjects::default(),
            disconnected: false,
        }
    }

    /// Bytes of the image.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Usual time of an operation.
    pub fn latency_ns(&self) -> Nanos {
        self.latency_ns
    }

    /// The cache takes the image, of which it knows `known`; others have not written it since then.
    pub fn own_as(&mut self, known: u64) {
        self.generation += 1;
        self.base = known;
        self.foreign = false;
    }

    /// The ownership record: generation of the last opening.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// A cache that knows `known` of the image knows all of it.
    pub fn is_known(&self, known: u64) -> bool {
        !self.foreign && self.generation == known
    }

    /// Somebody else writes the image.
    pub fn belongs_to_others(&mut self) {
        self.foreign = true;
    }

    /// The ownership record no longer names the cache.
    pub fn is_disowned(&self) -> bool {
        self.disowned
    }

    /// The ownership record names the cache again.
    pub fn is_owned_again(&mut self) {
        self.disowned = false;
    }

    /// What has ever been written to.
    pub fn own(&self) -> &OwnObjects {
        &self.own
    }

    /// From now on this counts as what has ever been written to.
    pub fn set_own(&mut self, own: OwnObjects) {
        self.own = own;
    }

    /// Something takes place that has nothing to do with the image's content.
    pub(super) fn take_place(&mut self, kind: &FlightKind) {
        match *kind {
            FlightKind::Disown { .. } => self.disowned = true,
            FlightKind::RedoTrim { first, .. } => self.redo.trim(first),
            FlightKind::RedoNote { durable, .. } => self.redo.note(self.generation, durable),
            FlightKind::Resize { size_bytes, .. } => self.resize(size_bytes),
            _ => {}
        }
    }

    /// Reads a block of the image.
    pub fn read(&self, block: u64, out: &mut [u8]) {
        self.store.read(block, out);
    }

    /// Somebody writes a block of the image, durably.
    pub fn write(&mut self, block: u64, bytes: &[u8]) {
        self.note_own(block, 1);
        self.store.write(block, content(bytes), true);
    }

    /// A power loss would change nothing of the image.
    pub fn is_stable(&self) -> bool {
        self.store.is_stable()
    }

    /// Somebody makes all of the image stable.
    pub fn flush(&mut self) {
        self.store.sync(self.store.sync_point());
    }

    /// Power is lost: what was not flushed is lost, or not.
    pub fn lose_power(&mut self, rng: &mut Rng) {
        self.store.power_loss(rng);
    }

    /// The redo beside the image.
    pub fn redo(&self) -> &Redo {
        &self.redo
    }

    /// The redo is removed.
    pub fn clear_redo(&mut self) {
        self.redo.clear();
    }

    /// The cache is lost: brings the image to its last cut.
    ///
    /// # Errors
    /// What is wrong with the redo.
    pub fn recover(&mut self) -> Result<(), String> {
        let size = self.size_bytes;
        let clip = |block: u64, bytes: &[u8]| {
            let left =
                size.saturating_sub(block * BLOCK_BYTES as u64).min(BLOCK_BYTES as u64) as usize;
            let mut bytes = bytes.to_vec();
            bytes[left..].fill(0);
            bytes
        };
        self.redo.recover(&mut self.store, &mut self.own, clip)
    }

    /// A cache that knows `known` of the image has known more.
    pub fn is_forgotten(&self, known: u64) -> bool {
        known < self.generation && known != self.base
    }

    /// Reads blocks; what is beyond the end reads as zero.
    pub fn read_at(&self, offset: u64, out: &mut [u8]) {
        assert!(
            offset.is_multiple_of(BLOCK_BYTES as u64),
            "backend reads of the core are block-aligned"
        );
        for (i, out) in out.chunks_mut(BLOCK_BYTES).enumerate() {
            self.store.read(offset / BLOCK_BYTES as u64 + i as u64, out);
        }
    }

    /// Reads a block as it would be with the redo's `content` applied.
    pub fn read_cut(&self, content: &BTreeMap<u64, Option<Vec<u8>>>, block: u64, out: &mut [u8]) {
        match content.get(&block) {
            Some(Some(bytes)) => match self.clip(block, bytes) {
                Some(bytes) => out.copy_from_slice(&bytes[..]),
                None => out.fill(0),
            },
            Some(None) => out.fill(0),
            None => self.store.read(block, out),
        }
    }

    /// Content of a block as it would be written: nothing beyond the image's end.
    pub fn clip(&self, block: u64, bytes: &[u8]) -> Content {
        let start = block * BLOCK_BYTES as u64;
        if start + BLOCK_BYTES as u64 <= self.size_bytes {
            return content(bytes);
        }
        let mut cut = [0; BLOCK_BYTES];
        let n = self.size_bytes.saturating_sub(start) as usize;
        cut[..n].copy_from_slice(&bytes[..n]);
        content(&cut)
    }

    /// Blocks of the image are written.
    pub(super) fn note_own(&mut self, first: u64, blocks: usize) {
        self.own.insert(first * BLOCK_BYTES as u64, (blocks * BLOCK_BYTES) as u64);
    }

    /// A write or discard takes effect.
    pub fn apply(&mut self, first: u64, data: &[Content]) {
        let durable = self.durable;
        self.note_own(first, data.len());
        for (i, content) in data.iter().enumerate() {
            self.store.write(first + i as u64, content.clone(), durable);
        }
    }

    /// A write or discard that was in flight when its process was killed: all of it, nothing, or
    /// blocks of it.
    pub fn apply_cut(&mut self, rng: &mut Rng, first: u64, data: &[Content]) {
        let style = rng.below(3);
        self.note_own(first, data.len());
        for (i, content) in data.iter().enumerate() {
            if style == 0 || style == 1 && rng.permille(500) {
                self.store.write(first + i as u64, content.clone(), self.durable);
            }
        }
    }

    /// Result of an operation that completes now.
    pub fn outcome(&self, rng: &mut Rng, writes: bool, now: Nanos) -> Result<(), IoError> {
        if self.disconnected {
            return Err(crate::disk::EIO);
        }
        match self.trouble_now(now) {
            Trouble::Errors(n) if rng.permille(n) => Err(crate::disk::EIO),
            Trouble::Full if writes => Err(IoError::Full),
            Trouble::Fenced => Err(IoError::Fenced),
            _ => Ok(()),
        }
    }

    /// Result of a flush that completes now.
    pub fn flush_outcome(&self, rng: &mut Rng, now: Nanos) -> Result<(), IoError> {
        match self.trouble_now(now) {
            Trouble::Flushes(n) if rng.permille(n) => Err(crate::disk::EIO),
            _ => self.outcome(rng, false, now),
        }
    }

    /// Nothing is wrong any more.
    pub fn heal(&mut self) {
        (self.trouble, self.trouble_until) = (Trouble::None, 0);
    }

    /// The image gets another size; what is beyond its end is gone.
    pub fn resize(&mut self, size_bytes: u64) {
        let block = BLOCK_BYTES as u64;
        self.own.insert(size_bytes, u64::MAX);
        let old = std::mem::replace(&mut self.size_bytes, size_bytes);
        let mut bytes = [0; BLOCK_BYTES];
        for b in size_bytes / block..old.div_ceil(block) {
            self.store.read(b, &mut bytes);
            let cut = self.clip(b, &bytes);
            self.store.write(b, cut, true);
        }
    }

    /// From now on this is wrong with it, until then.
    pub fn set_trouble(&mut self, trouble: Trouble, until: Nanos) {
        (self.trouble, self.trouble_until) = (trouble, until);
    }

    /// Another owner has the image.
    pub fn is_fenced(&self) -> bool {
        self.trouble == Trouble::Fenced
    }

    /// Until when something is wrong.
    pub fn trouble_until(&self) -> Nanos {
        self.trouble_until
    }

    pub(super) fn is_durable(&self) -> bool {
        self.durable
    }

    pub(super) fn is_disconnected(&self) -> bool {
        self.disconnected
    }

    pub(super) fn set_disconnected(&mut self, disconnected: bool) {
        self.disconnected = disconnected;
    }

    /// Whether nothing completes now.
    pub fn is_away(&self, now: Nanos) -> bool {
        matches!(self.trouble_now(now), Trouble::Stopped | Trouble::Disconnected)
    }

    /// What is wrong now.
    pub fn trouble_now(&self, now: Nanos) -> Trouble {
        if now < self.trouble_until { self.trouble } else { Trouble::None }
    }
}
