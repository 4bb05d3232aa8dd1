//! Fills: blocks that were read from an image are put into the read cache.

use crate::api::{BLOCK_BYTES, Nanos, VolumeId};
use crate::base::mem::Buf;
use crate::base::pools::{BUFFERS_FOR_MOVES, For};
use crate::blocks::index::Lookup;
use crate::cache::Cache;
use crate::format::{RecordKind, Stream};
use crate::ground::Ground;
use crate::log::Want;
use crate::log::build::{Builder, Built, BuiltEntry, RecordFields};

/// How long admitted blocks wait for company before they are written.
const DELAY_NS: Nanos = 20_000_000;
/// An append with this many blocks is written at once.
const BLOCKS_FULL: usize = 96;

/// Appends that are being filled.
#[derive(Default)]
pub(crate) struct Fills {
    /// By stream: newcomers, and blocks that the ghost remembers.
    open: [Option<Builder>; 3],
    /// The volume whose record is open, by stream.
    record: [Option<VolumeId>; 3],
    since: Nanos,
}

impl Fills {
    fn has_open(&self) -> bool {
        self.open.iter().any(Option::is_some)
    }
}

impl Cache {
    /// Some admitted block is not on its way to the device yet.
    pub(crate) fn has_open_fills(&self) -> bool {
        self.fills.has_open()
    }

    /// When the open appends are to be written, if nothing else happens.
    pub(crate) fn fills_deadline(&self) -> Option<Nanos> {
        self.fills.has_open().then_some(self.fills.since + DELAY_NS)
    }

    /// Copies the blocks that the read `number` has brought from the image of a volume, and that
    /// nobody has changed meanwhile, into the read cache's appends.
    pub(crate) fn admit(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        (id, first, number): (VolumeId, u64, u32),
        buf: Buf,
    ) {
        if ground.volume(id).backend().is_dirty() {
            // The image may hold what a power loss takes back; a clean copy must not outlive that.
            let volume = ground.volume_mut(id);
            volume.backend_mut().want_flush();
            volume.count_mut().bypass_mode_blocks += u64::from(buf.len) / BLOCK_BYTES as u64;
            return ground.settle_read(id, first, buf.len, number);
        }
        for i in 0..buf.len as usize / BLOCK_BYTES {
            let block = first + i as u64;
            if !ground.arriving().brings(id, block, number) {
                continue;
            }
            let absent = ground.volume(id).ledger().index().lookup(block) == Lookup::Absent;
            let stream = if self.ghost.take(id, block) { Stream::Main } else { Stream::Fill };
            let from = buf.slice(i * BLOCK_BYTES, BLOCK_BYTES);
            match if absent { self.stage(ground, now, (id, block, from), stream) } else { None } {
                Some(copy) => ground.arriving_mut().stage(id, block, copy),
                None => {
                    ground.arriving_mut().settle(id, block);
                    ground.volume_mut(id).count_mut().bypass_no_room_blocks += u64::from(absent);
                }
            }
        }
    }

    /// Puts a block into the open append of a stream; returns the copy's number.
    fn stage(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        (id, block, from): (VolumeId, u64, Buf),
        stream: Stream,
    ) -> Option<u32> {
        let s = stream as usize;
        if let (Some(builder), Some(volume)) = (&self.fills.open[s], self.fills.record[s])
            && (volume != id || !builder.has_room_for_entry())
        {
            self.end_fill_record(ground, s);
        }
        if self.fills.open[s]
            .as_ref()
            .is_some_and(|b| self.fills.record[s].is_none() && !b.has_room_for_record())
        {
            self.issue_fill(ground, stream);
        }
        if self.fills.open[s].is_none() {
            // The last append buffers belong to the log.
            if ground.pools().left(For::Append)
                <= ground.config().appends_in_flight + BUFFERS_FOR_MOVES
            {
                return None;
            }
            self.fills.open[s] = Some(ground.begin_append(Want::fills(stream))?);
            ground.arriving_mut().note_open();
            self.fills.since = now;
        }
        let builder = self.fills.open[s].as_mut().expect("open by now");
        if self.fills.record[s].is_none() {
            builder.begin_record(id, RecordKind::Fill);
            self.fills.record[s] = Some(id);
        }
        let number = ground.arriving_mut().take_number();
        ground.push_block(builder, block, number, from);
        Some(number)
    }

    fn end_fill_record(&mut self, ground: &mut Ground, s: usize) {
        let Some(id) = self.fills.record[s].take() else { return };
        let builder = self.fills.open[s].as_mut().expect("a record is open in it");
        // What was overtaken since it was staged must not come back at replay.
        builder.void_entries(|block, number| !ground.arriving().brings(id, block, number));
        let volume = ground.get(id);
        // Everything up to here had its say in whether the blocks were still wanted.
        let fields = volume.map_or_else(RecordFields::default, |volume| {
            RecordFields::beside(volume.spec().generation, volume.log())
        });
        ground.end_record_beside(builder, fields);
    }

    /// Writes the open append of a stream, if there is one.
    pub(super) fn issue_fill(&mut self, ground: &mut Ground, stream: Stream) {
        let s = stream as usize;
        self.end_fill_record(ground, s);
        let builder = self.fills.open[s].take();
        ground.arriving_mut().note_issued(self.fills.has_open());
        if let Some(builder) = builder {
            ground.issue(builder, false);
        }
    }

    /// Writes the open appends that are full enough or have waited long enough, or `all` of them.
    pub(crate) fn issue_fills(&mut self, ground: &mut Ground, now: Nanos, all: bool) {
        for stream in Stream::ALL {
            let Some(builder) = &self.fills.open[stream as usize] else { continue };
            let late = now >= self.fills.since + DELAY_NS;
            if all || late || builder.entries() >= BLOCKS_FULL || ground.arriving().is_wanted() {
                self.issue_fill(ground, stream);
            }
        }
    }

    /// A record with admitted blocks takes effect: those that nobody has changed meanwhile are in
    /// the read cache.
    pub(crate) fn fill(&mut self, ground: &mut Ground, record: &Built, entries: &[BuiltEntry]) {
        let id = record.volume();
        for built in entries {
            let block = built.entry().block();
            if !ground.arriving().brings(id, block, built.old()) {
                continue;
            }
            ground.arriving_mut().settle(id, block);
            let (volume, space) = ground.volume_and_space(id);
            volume.ledger_mut().fill(space, block, built.position(), built.entry().value());
            volume.count_mut().admitted_blocks += 1;
        }
    }

    /// The device has failed: nothing that is staged will be in the read cache.
    pub(crate) fn abandon_fills(&mut self, ground: &mut Ground) {
        self.fills = Fills::default();
        ground.arriving_mut().abandon();
    }
}
