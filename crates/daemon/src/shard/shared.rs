//! What all connections of a shard share: the core, its volumes, and the front door's part of the arena.

use super::core::Core;
use super::limits::EXTENTS_MAX;
use super::stats::ReactorCounters;
use super::volume::Volumes;
use tidepool_engine::api::{BLOCK_BYTES, Event, Extent, Nanos, Request, VolumeId};
use tidepool_engine::mem::Buf;

/// What one holder (a connection, or the unaligned writes of a volume) has of the arena.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Held(usize);

impl Held {
    pub(super) fn is_zero(&self) -> bool {
        self.0 == 0
    }
}

pub(super) struct Shared<C> {
    pub core: C,
    pub volumes: Volumes,
    pub count: ReactorCounters,
    /// Time of this round.
    pub now: Nanos,
    /// Reused for block status.
    pub extents: Vec<Extent>,
    /// Bytes of the arena that the front door may still take.
    room: usize,
    /// Memory was given back since somebody last looked.
    pub freed: bool,
    /// Volumes whose gate is closed.
    pub gated: Vec<VolumeId>,
    /// A gate was opened since somebody last looked.
    pub gate_opened: bool,
}

/// Bytes that a buffer of `len` bytes takes from the arena.
fn footprint(len: usize) -> usize {
    len.next_power_of_two().max(BLOCK_BYTES)
}

impl<C: Core> Shared<C> {
    pub(super) fn new(core: C, now: Nanos) -> Shared<C> {
        // The core has set aside what it needs itself.
        let room = core.arena().free_bytes();
        let count = ReactorCounters::default();
        Shared {
            core,
            volumes: Volumes::new(),
            count,
            now,
            extents: Vec::with_capacity(EXTENTS_MAX),
            room,
            freed: false,
            gated: Vec::new(),
            gate_opened: false,
        }
    }

    /// A buffer of the arena, or `None` when the holder has its share.
    ///
    /// A holder gets no more than what is left afterwards for the others (dynamic thresholds): any number
    /// of clients that never take their replies leave room for one more that does, and one client
    /// alone can use half.
    pub(super) fn alloc(&mut self, held: &mut Held, len: usize) -> Option<Buf> {
        let bytes = footprint(len);
        if held.0 + bytes > self.room {
            return None;
        }
        let buf = self.core.arena_mut().alloc(len)?;
        held.0 += bytes;
        self.room -= bytes;
        Some(buf)
    }

    /// Gives a buffer back, with the length that it was allocated with.
    pub(super) fn free(&mut self, held: &mut Held, buf: Buf) {
        let bytes = footprint(buf.len as usize);
        held.0 -= bytes;
        self.room += bytes;
        self.freed = true;
        self.core.arena_mut().free(buf);
    }

    /// Hands a request to the core.
    pub(super) fn submit(&mut self, request: Request) {
        self.core.handle(self.now, Event::Request(request));
    }
}
