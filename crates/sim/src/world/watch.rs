//! The core, watched from outside: which records it writes and what they prove, when it reclaims,
//! what fails.

use super::World;
use super::stop::Moment;
use crate::evidence::Evidence;
use crate::store::Content;
use std::collections::BTreeMap;
use tidepool_engine::api::{BLOCK_BYTES, VolumeId};
use tidepool_engine::format::{
    Entry, EntryKind, RECORD_MAGIC, RecordHeader, RecordKind, SEGMENT_MAGIC, Stream, byte,
};
use tidepool_engine::status::{VolumeState, VolumeStatus};

/// Where a record's entries begin in its header block, and how long one is.
const ENTRIES_AT: usize = size_of::<RecordHeader>();
const ENTRY_BYTES: usize = size_of::<Entry>();
/// Reads of the reclaim at which everything stops, in parts per thousand.
const RECLAIMS_STOPPED: u64 = 20;
/// A device with so few free segments is under pressure.
const PRESSURE_SEGMENTS: u64 = 5;
/// Blocks that the ghost may mistake for others beside its usual share.
const STRANGERS: u64 = 64;

/// What was seen of the core's records.
#[derive(Default)]
pub(super) struct Watch {
    /// Streams of the segments that were opened.
    streams: BTreeMap<u32, u8>,
    /// Blocks that misses brought into the cache in this life: new ones, and those that the ghost
    /// remembers.
    filled: [u64; 2],
    /// A volume was removed in this life, and with it its counters.
    removed: bool,
}

impl Watch {
    /// A volume is removed, and with it its counters.
    pub(super) fn remove(&mut self) {
        self.removed = true;
    }

    /// The life of the core is over.
    pub(super) fn forget_life(&mut self) {
        (self.filled, self.removed) = ([0; 2], false);
    }

    /// The ghost remembers what was evicted, and hardly anything else.
    pub(super) fn check_ghost(&self, all: &[VolumeStatus]) -> Result<(), String> {
        let evicted: u64 = all.iter().map(|s| s.count.evicted_blocks).sum();
        let [new, remembered] = self.filled;
        // The ghost takes one stranger in four hundred for somebody it knows.
        if !self.removed && remembered > evicted + new / 50 + STRANGERS {
            return Err(format!(
                "the ghost knows {remembered} blocks of {evicted} that were evicted"
            ));
        }
        Ok(())
    }

    /// Counts a record; returns what it is, if it is one to be reached.
    fn count(&mut self, segment: u32, content: &[u8]) -> Option<&'static str> {
        let main = self.streams.get(&segment) == Some(&(Stream::Main as u8));
        match RecordKind::from_number(content[10]) {
            Some(RecordKind::Fill) => {
                self.filled[usize::from(main)] += entries(content) as u64;
                Some(if main { "fill remembered by ghost" } else { "fill" })
            }
            Some(RecordKind::Move) => Some(if main { "hot move" } else { "dirty move" }),
            _ => None,
        }
    }
}

/// How many entries a record has.
fn entries(content: &[u8]) -> usize {
    u16::from_le_bytes([content[14], content[15]]) as usize
}

/// Whether a fill has left some block out.
fn has_void(content: &[u8]) -> bool {
    let is_void = |e: usize| content[ENTRIES_AT + e * ENTRY_BYTES + 7] == EntryKind::Void as u8;
    content[10] == RecordKind::Fill as u8 && (0..entries(content)).any(is_void)
}

impl World {
    /// Notes the records of an append that is complete.
    pub(super) fn note_records(&mut self, offset: u64, data: &[Content], tick: u64) {
        let geo = self.machine.geometry();
        if offset < byte(geo.segments_first_block) {
            return;
        }
        for (content, block) in data.iter().zip(offset / BLOCK_BYTES as u64..) {
            let Some(header) =
                Evidence::header(content).filter(|header| header.magic == RECORD_MAGIC)
            else {
                continue;
            };
            let id = VolumeId(header.volume.get());
            let segment_block = geo.segment_block(geo.segment_of(block as u32));
            if let Some(v) = self.machine.image_of(id) {
                let vol = &mut self.vols[v];
                vol.evidence.note(&header, segment_block.into(), block, content, tick);
            }
        }
    }

    /// Remembers since when volumes have failed.
    pub(super) fn note_failures(&mut self) {
        let now = self.clock.now();
        for (v, vol) in
            self.vols.iter_mut().enumerate().filter(|(_, vol)| vol.excuses.failed_at().is_none())
        {
            if self.machine.status(v, now).is_some_and(|s| s.state == VolumeState::Failed) {
                vol.excuses.set_failed(now);
            }
        }
    }

    /// A block of the device is read, perhaps by the reclaim.
    pub(super) fn look_at_reclaim(&mut self) {
        let Some(device) = self.machine.engine().map(|engine| engine.device_status()) else {
            return;
        };
        if device.reclaiming {
            self.cover
                .add("reclaim under pressure", (device.segments_free <= PRESSURE_SEGMENTS).into());
            self.moment(Moment::Reclaim);
            if self.may_stop() && self.rng.permille(RECLAIMS_STOPPED) {
                let how = self.any_stop();
                self.stop_soon(how);
            }
        }
    }

    /// Counts what kinds of records are written.
    pub(super) fn look_at_records(&mut self, offset: u64, data: &[Content]) {
        let first = (offset / BLOCK_BYTES as u64) as u32;
        let geo = self.machine.geometry();
        if first < geo.segments_first_block {
            return;
        }
        let segment = geo.segment_of(first);
        for content in data.iter().flatten() {
            if content[..4] == SEGMENT_MAGIC {
                self.watch.streams.insert(segment, content[10]);
            }
            if content[..4] != RECORD_MAGIC {
                continue;
            }
            if let Some(what) = self.watch.count(segment, &content[..]) {
                self.cover.hit(what);
            }
            self.cover.add("fill voided", u64::from(has_void(&content[..])));
        }
    }
}
