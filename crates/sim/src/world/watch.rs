//! The core, watched from outside: which records it writes and what they prove, when it reclaims, what fails.

use super::{Moment, World};
use crate::evidence::Evidence;
use crate::store::Content;
use tidepool_engine::api::{BLOCK_BYTES, VolumeId};
use tidepool_engine::format::{
    Entry, EntryKind, RECORD_MAGIC, RecordHeader, RecordKind, SEGMENT_MAGIC, Stream, byte,
};
use tidepool_engine::status::VolumeState;

/// Where a record's entries begin in its header block, and how long one is.
const ENTRIES_AT: usize = size_of::<RecordHeader>();
const ENTRY_BYTES: usize = size_of::<Entry>();
/// Reads of the reclaim at which everything stops, in parts per thousand.
const RECLAIMS_STOPPED: u64 = 20;
/// A device with so few free segments is under pressure.
const PRESSURE_SEGMENTS: u64 = 5;

impl World {
    /// Notes the records of an append that is complete.
    pub(super) fn note_records(&mut self, offset: u64, data: &[Content], tick: u64) {
        if offset < byte(self.geo.segments_first_block) {
            return;
        }
        for (content, block) in data.iter().zip(offset / BLOCK_BYTES as u64..) {
            let Some(header) = Evidence::header(content).filter(|header| header.magic == RECORD_MAGIC) else {
                continue;
            };
            let id = VolumeId(header.volume.get());
            let segment_block = self.geo.segment_block(self.geo.segment_of(block as u32));
            if let Some(vol) = self.vols.iter_mut().find(|v| v.id == Some(id)) {
                vol.evidence.note(&header, segment_block.into(), block, content, tick);
            }
        }
    }

    /// Remembers since when volumes have failed.
    pub(super) fn note_failures(&mut self) {
        let Some(engine) = &self.engine else { return };
        for vol in self.vols.iter_mut().filter(|vol| vol.failed_at.is_none()) {
            let status = vol.id.and_then(|id| engine.volume_status(self.now, id));
            vol.failed_at = status.filter(|s| s.state == VolumeState::Failed).map(|_| self.now);
        }
    }

    /// A block of the device is read, perhaps by the reclaim.
    pub(super) fn look_at_reclaim(&mut self) {
        let Some(device) = self.engine.as_ref().map(|engine| engine.device_status()) else { return };
        if device.reclaiming {
            self.cover.add("reclaim under pressure", (device.segments_free <= PRESSURE_SEGMENTS).into());
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
        if first < self.geo.segments_first_block {
            return;
        }
        let segment = self.geo.segment_of(first);
        for content in data.iter().flatten() {
            if content[..4] == SEGMENT_MAGIC {
                self.streams.insert(segment, content[10]);
            }
            if content[..4] != RECORD_MAGIC {
                continue;
            }
            let main = self.streams.get(&segment) == Some(&(Stream::Main as u8));
            match RecordKind::from_number(content[10]) {
                Some(RecordKind::Fill) => {
                    self.cover.hit(if main { "fill remembered by ghost" } else { "fill" });
                    let entries = u16::from_le_bytes([content[14], content[15]]) as usize;
                    self.filled[usize::from(main)] += entries as u64;
                    let is_void =
                        |e: usize| content[ENTRIES_AT + e * ENTRY_BYTES + 7] == EntryKind::Void as u8;
                    self.cover.add("fill voided", u64::from((0..entries).any(is_void)));
                }
                Some(RecordKind::Move) => self.cover.hit(if main { "hot move" } else { "dirty move" }),
                _ => {}
            }
        }
    }
}
