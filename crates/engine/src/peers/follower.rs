//! A replica: the copy of another host's volume in this cache (RFC 9).
//!
//! It logs what the owner has logged, record for record, and has neither clients nor a backend
//! until it is attached. What it holds dirty becomes clean when the owner says how far its image
//! goes. Which record a block came with is not kept: the log is in the order of the records, so
//! that its place there tells.

use crate::api::{BLOCK_BYTES, RECORD_BLOCKS_MAX, Request, RequestError, VolumeId};
use crate::blocks::index::ObjectFlags;
use crate::blocks::ledger::{Ledger, Place, objects_of};
use crate::blocks::space::Space;
use crate::format::record::Record;
use crate::format::{EntryKind, RecordKind, crc32c};
use crate::ground::Ground;
use crate::log::build::{Append, BuiltEntry};
use crate::log::copy::{Incoming, is_zeroes};
use crate::peers::Peers;
use std::collections::{BTreeMap, VecDeque};

/// Behind everything that is published.
const EVERYTHING: Place = (u64::MAX, 0);

/// Records whose places are remembered one by one. Of older ones, which nobody asks for any more,
/// two and two share theirs.
const PLACES_MAX: usize = 1 << 16;

/// Where a record of the copy was logged.
#[derive(Debug, Clone, Copy)]
struct Logged {
    sequence: u64,
    /// Segment, and which life of it.
    segment: u32,
    life: u64,
    /// First block, and the first one behind it. No block where several records share the place
    /// behind them.
    first: u32,
    end: u32,
}

impl Logged {
    fn behind(&self) -> Place {
        (self.life, self.end)
    }
}

/// Has every other place of the older half stand for the one before it, too: what is clean before a
/// place is clean before a later one when the image has that record as well.
fn thin_out(places: &mut VecDeque<Logged>) {
    let half = places.len() / 2;
    let mut number = 0;
    places.retain_mut(|logged| {
        number += 1;
        if number <= half {
            logged.first = logged.end;
        }
        number > half || number % 2 == 0
    });
}

/// What is special about a volume that is a replica.
#[derive(Default)]
pub(super) struct Replica {
    /// Newest record that was taken, perhaps not logged yet.
    taken: u64,
    /// It is this host's own volume, which gets back what its log has lost: what had room once has
    /// it again, whatever the quotas.
    own: bool,
    /// Records that the image may lack, oldest first: what the volume has before the end of one is
    /// of that record or of an earlier one.
    places: VecDeque<Logged>,
    /// Of objects with zeroes that are not in the image: the newest record that zeroed something in
    /// them.
    zeroed: BTreeMap<u32, u64>,
}

impl Peers {
    /// A volume takes records, from the one after `taken` on. It is this host's `own`, or the copy
    /// of another host's.
    pub(crate) fn follow(&mut self, id: VolumeId, taken: u64, own: bool) {
        let replica = self.copies.of_mut(id);
        (replica.taken, replica.own) = (taken, own);
    }

    /// A volume takes records again as the copy of another host's.
    pub(crate) fn follow_another(&mut self, id: VolumeId) {
        self.copies.of_mut(id).own = false;
    }

    /// A volume takes records again as this host's own.
    pub(crate) fn follow_own(&mut self, id: VolumeId) {
        self.copies.of_mut(id).own = true;
    }

    /// The records after `taken` were not taken: the owner may send them again.
    pub(crate) fn take_again(&mut self, id: VolumeId, taken: u64) {
        self.copies.of_mut(id).taken = taken;
    }

    /// The copy is thrown away.
    pub(crate) fn forget_records(&mut self, id: VolumeId) {
        let replica = self.copies.of_mut(id);
        replica.places.clear();
        replica.zeroed.clear();
    }

    /// What the request brings, if it is the next record of the copy.
    ///
    /// # Errors
    /// It is not, or the copy takes none now.
    pub(crate) fn admit_record(
        &self,
        ground: &Ground,
        request: &Request,
    ) -> Result<Incoming, RequestError> {
        let volume = ground.get(request.volume);
        let volume = volume.filter(|v| !v.is_closing() && !v.is_busy() && !ground.is_stopping());
        let volume = volume.ok_or(RequestError::Shutdown)?;
        let promised = volume.promised().ok_or(RequestError::Invalid)?;
        if ground.is_dead() || volume.is_refusing() {
            return Err(RequestError::Io);
        }
        if (request.offset, request.len) != (0, 0) {
            return Err(RequestError::Invalid);
        }
        let buf = request.buf.expect("a record has a buffer");
        let (block, data) = ground.bytes(buf).split_at(BLOCK_BYTES);
        let record = Record::decode(block).ok_or(RequestError::Invalid)?;
        let header = &record.header;
        let generation = header.generation.get();
        let incoming = Incoming::new(header.sequence.get(), &record.entries);
        let replica = self.copies.of(request.volume);
        let (room, granted) = (incoming.room(), volume.reserve().granted());
        let has_room = match replica.own {
            true => {
                room.bytes <= ground.blocks_left() * BLOCK_BYTES as u64
                    && room.ranges <= ground.ranges_left()
            }
            false => room.bytes <= granted.bytes && room.ranges <= granted.ranges,
        };
        let blocks = incoming.size().0 as usize;
        let expected = header.kind == RecordKind::Write as u8
            && generation == volume.spec().generation
            && generation >= promised
            && incoming.sequence() == replica.taken + 1
            && has_room
            && blocks <= RECORD_BLOCKS_MAX
            && blocks * BLOCK_BYTES == data.len();
        let inside = record.entries.iter().all(|entry| {
            let len = if entry.has_data() { 1 } else { u64::from(entry.value()) };
            let known = !matches!(entry.kind(), None | Some(EntryKind::Void));
            known && len > 0 && entry.block() + len <= volume.blocks()
        });
        let mut blocks = data.chunks(BLOCK_BYTES);
        let mut with_data = record.entries.iter().filter(|entry| entry.has_data());
        let whole = with_data
            .all(|entry| blocks.next().is_some_and(|bytes| crc32c(bytes) == entry.value()));
        if expected && inside && whole { Ok(incoming) } else { Err(RequestError::Invalid) }
    }

    /// A record that was admitted is on its way into the log.
    pub(crate) fn take_record(&mut self, ground: &mut Ground, id: VolumeId, incoming: Incoming) {
        let replica = self.copies.of_mut(id);
        replica.taken = incoming.sequence();
        if replica.own {
            ground.grant(id, incoming.room());
        }
        ground.volume_mut(id).reserve_mut().begin(incoming.room());
    }

    /// Remembers what of an append's records the owner's word about its image will be measured by.
    pub(crate) fn note_places(&mut self, ground: &Ground, append: &Append) {
        let (segment, life) = (append.segment(), ground.space().segment(append.segment()).life());
        let blocks_of = |entries: &[BuiltEntry]| {
            1 + entries.iter().filter(|built| built.entry().has_data()).count() as u32
        };
        let mut end = append.end_block()
            - append.records().map(|(_, entries)| blocks_of(entries)).sum::<u32>();
        for (record, entries) in append.records() {
            let first = end;
            end += blocks_of(entries);
            let volume = ground.get(record.volume());
            if record.kind() == RecordKind::Write && volume.is_some_and(|volume| volume.is_copy()) {
                let replica = self.copies.of_mut(record.volume());
                replica.note_zeroes(record.sequence(), entries);
                replica.note_place(Logged {
                    sequence: record.sequence(),
                    segment,
                    life,
                    first,
                    end,
                });
            }
        }
    }

    /// Where a record of a copy was logged, if that is remembered and the image is not known to
    /// have it: segment, life of that, first block and how many.
    pub(super) fn place_of_record(
        &self,
        id: VolumeId,
        sequence: u64,
    ) -> Option<(u32, u64, u32, u32)> {
        self.copies.of(id).place_of_record(sequence)
    }

    /// The owner's image has everything up to the record `sequence`: forgets where records up to
    /// that were logged. Returns what is clean now: see [`Drained`].
    pub(crate) fn drained(&mut self, ground: &Ground, id: VolumeId, sequence: u64) -> Drained<'_> {
        let replica = self.copies.of_mut(id);
        let mut place = (0, 0);
        while let Some(logged) = replica.places.front().filter(|logged| logged.sequence <= sequence)
        {
            place = logged.behind();
            replica.places.pop_front();
        }
        if sequence >= ground.volume(id).log().published() {
            place = EVERYTHING;
        }
        Drained { replica, sequence, place, cleaned: 0, forgotten: false }
    }
}

/// What is clean of a copy when the owner's image has everything up to a record.
pub(crate) struct Drained<'a> {
    replica: &'a mut Replica,
    sequence: u64,
    /// What stands in the log before this place is clean.
    place: Place,
    cleaned: u64,
    forgotten: bool,
}

impl Drained<'_> {
    /// Cleans what is known of an object; tells whether that is all of it.
    pub(crate) fn clean(&mut self, ledger: &mut Ledger, space: &mut Space, object: u32) -> bool {
        let newest = self.replica.zeroed.get(&object).copied();
        let zeroes_done =
            self.place == EVERYTHING || newest.is_some_and(|newest| newest <= self.sequence);
        if ledger.flags(object).contains(ObjectFlags::ZERO_DIRTY) && zeroes_done {
            ledger.forget_zeroes(object);
            self.replica.zeroed.remove(&object);
            self.forgotten = true;
        }
        let (cleaned, is_dirty) = ledger.clean_before(space, object, self.place);
        self.cleaned += cleaned;
        !is_dirty && !ledger.flags(object).contains(ObjectFlags::ZERO_DIRTY)
    }

    /// Blocks that got clean, and whether zeroes were forgotten.
    pub(crate) fn result(&self) -> (u64, bool) {
        (self.cleaned, self.forgotten)
    }
}

impl Replica {
    fn note_place(&mut self, logged: Logged) {
        if self.places.len() == PLACES_MAX {
            thin_out(&mut self.places);
        }
        self.places.push_back(logged);
    }

    fn place_of_record(&self, sequence: u64) -> Option<(u32, u64, u32, u32)> {
        let at = self.places.binary_search_by_key(&sequence, |logged| logged.sequence).ok()?;
        let Logged { segment, life, first, end, .. } = self.places[at];
        (first < end).then_some((segment, life, first, end - first))
    }

    fn note_zeroes(&mut self, sequence: u64, entries: &[BuiltEntry]) {
        for entry in entries.iter().map(BuiltEntry::entry).filter(|entry| is_zeroes(entry.kind())) {
            for object in objects_of(entry.block()..entry.block() + u64::from(entry.value())) {
                self.zeroed.insert(object, sequence);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_are_shared_are_those_of_the_newer_record() {
        let logged = |sequence: u64| {
            let first = sequence as u32 * 2;
            Logged { sequence, segment: 0, life: 9, first, end: first + 2 }
        };
        let mut replica = Replica { places: (1..=8).map(logged).collect(), ..Replica::default() };
        thin_out(&mut replica.places);
        let left: Vec<_> =
            replica.places.iter().map(|logged| (logged.sequence, logged.behind())).collect();
        assert_eq!(left, [2, 4, 5, 6, 7, 8].map(|n| (n, (9, n as u32 * 2 + 2))));
        assert_eq!([1, 2, 4].map(|n| replica.place_of_record(n)), [None; 3]);
        assert_eq!(replica.place_of_record(5), Some((0, 9, 10, 2)));
    }
}
