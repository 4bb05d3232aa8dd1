//! What a published record of the log does to the index.

use crate::api::Nanos;
use crate::engine::Engine;
use crate::format::EntryKind;
use crate::drain::group::supersede;
use crate::blocks::index::{Lookup, OBJECT_BLOCKS, ObjectFlags, Position, VolumeIndex};
use crate::log::{Built, BuiltEntry};
use crate::base::mutation::mutated;
use crate::blocks::space::Space;
use crate::control::volume::{Volume, object_of};
use std::ops::Range;

impl Engine {
    pub(crate) fn publish_write(&mut self, now: Nanos, record: &Built, entries: &[BuiltEntry]) {
        let vid = record.volume;
        let mut i = 0;
        while i < entries.len() {
            let entry = entries[i].entry;
            match entry.kind() {
                Some(EntryKind::Data) => {
                    let n = run_length(&entries[i..]);
                    if !mutated!(WriteKeepsFills) {
                        self.cancel_fills(vid, entry.block(), n as u64);
                    }
                    self.unpublished_blocks -= n as u64;
                    let (volume, space) = self.volume_and_space(vid);
                    volume.unpublished_blocks -= n as u64;
                    apply_data(volume, space, &entries[i..i + n], now);
                    let last = entry.block() + if mutated!(CrossingRunQueuedOnce) { 0 } else { n as u64 - 1 };
                    for object in object_of(entry.block())..=object_of(last) {
                        volume.note_dirty(object, record.sequence, now);
                    }
                    i += n;
                    continue;
                }
                Some(EntryKind::Discard | EntryKind::WriteZeroes) => {
                    let blocks = u64::from(entry.value());
                    if !mutated!(DiscardKeepsFills) {
                        self.cancel_fills(vid, entry.block(), blocks);
                    }
                    let (volume, space) = self.volume_and_space(vid);
                    let keep = entry.kind() == Some(EntryKind::WriteZeroes);
                    apply_zeroes(
                        volume,
                        space,
                        entry.block()..entry.block() + blocks,
                        keep,
                        record.sequence,
                        now,
                    );
                    self.extents_changed = true;
                }
                Some(EntryKind::Invalidate) => {
                    self.cancel_fills(vid, entry.block(), u64::from(entry.value()));
                    self.drop_blocks(vid, entry.block(), u64::from(entry.value()));
                }
                Some(EntryKind::Void) | None => unreachable!("not in a write record"),
            }
            i += 1;
        }
        let volume = self.volume_mut(vid);
        volume.sequence = record.sequence;
        volume.chain_published = record.header_crc;
        let volume = self.volume(vid);
        if !volume.is_dirty() {
            self.update_drained(vid);
        }
    }
}

/// Data blocks at the start of `entries` that follow each other in the volume and on the device.
fn run_length(entries: &[BuiltEntry]) -> usize {
    let follows = |a: &BuiltEntry, b: &BuiltEntry| {
        b.entry.kind() == Some(EntryKind::Data)
            && b.entry.block() == a.entry.block() + 1
            && b.position == a.position + 1
    };
    1 + entries.windows(2).take_while(|w| follows(&w[0], &w[1])).count()
}

/// Blocks that follow each other become the current, dirty copies.
pub(crate) fn apply_data(volume: &mut Volume, space: &mut Space, entries: &[BuiltEntry], now: Nanos) {
    let mut cleaned = 0;
    let (block, position) = (entries[0].entry.block(), entries[0].position);
    let n = entries.len() as u32;
    let (groups, frozen) = (&mut volume.groups, &mut volume.frozen_blocks);
    volume.index.insert(block, n, position, &mut |at, n, was| {
        inherit_refs(space, was, n, position + (at - block) as u32);
        cleaned += supersede(groups.as_mut(), space, frozen, at, n, was);
    });
    if let Some(groups) = &mut volume.groups {
        groups.insert(now, block, n, position);
    }
    for built in entries {
        space.place(built.position, built.entry.value(), true);
    }
    volume.dirty_blocks = volume.dirty_blocks + u64::from(n) - cleaned;
}

/// What was used is no less wanted when it has been written again.
fn inherit_refs(space: &mut Space, was: Lookup, n: u32, position: Position) {
    let Lookup::At(old) = was else { return };
    for i in 0..n {
        let refs = space.marks.refs(old + i);
        if refs > 0 {
            space.marks.set_refs(position + i, refs);
        }
    }
}

/// A range reads as zero from now on; with `keep`, the backend is to keep its space. That is remembered for
/// whole objects: zeroes that might give space back keep it beside others that must.
pub(crate) fn apply_zeroes(
    volume: &mut Volume,
    space: &mut Space,
    range: Range<u64>,
    keep: bool,
    sequence: u64,
    now: Nanos,
) {
    let mut cleaned = 0;
    let blocks = range.end - range.start;
    let (groups, frozen) = (&mut volume.groups, &mut volume.frozen_blocks);
    volume.index.set_zero(range.start, blocks, &mut |block, n, was| {
        cleaned += supersede(groups.as_mut(), space, frozen, block, n, was);
    });
    if let Some(groups) = &mut volume.groups {
        groups.set_zero(now, range.start, blocks);
    }
    volume.dirty_blocks -= cleaned;
    for object in object_of(range.start)..=object_of(range.end - 1) {
        let first = u64::from(object) * OBJECT_BLOCKS as u64;
        if keep {
            volume.index.set_flags(object, ObjectFlags::ZERO_DIRTY | ObjectFlags::ZERO_KEEP);
        } else {
            if range.start <= first && first + OBJECT_BLOCKS as u64 <= range.end {
                volume.index.clear_flags(object, ObjectFlags::ZERO_KEEP);
            }
            volume.index.set_flags(object, ObjectFlags::ZERO_DIRTY);
        }
        volume.note_dirty(object, sequence, now);
    }
}

/// Marks the objects that have dirty blocks or zeroes for the drain (after recovery).
pub(crate) fn queue_dirty_objects(volume: &mut Volume, space: &Space, now: Nanos) {
    // Replay has queued some with the sequence of their zeroes; what else is dirty in them may be older.
    for queued in std::mem::take(&mut volume.dirty_objects) {
        volume.index.clear_flags(queued.object, ObjectFlags::QUEUED);
    }
    let objects: Vec<u32> = volume.index.objects(0).filter(|&o| is_dirty(&volume.index, space, o)).collect();
    for object in objects {
        let sequence = volume.sequence_drained + 1;
        volume.note_dirty(object, sequence, now);
    }
}

fn is_dirty(index: &VolumeIndex, space: &Space, object: u32) -> bool {
    debug_assert!(u64::from(object) < u64::MAX / OBJECT_BLOCKS as u64);
    index.flags(object).contains(ObjectFlags::ZERO_DIRTY)
        || index.runs(object).any(|(_, n, found)| match found {
            Lookup::At(position) => (position..position + n).any(|p| space.marks.is_dirty(p)),
            _ => false,
        })
}
