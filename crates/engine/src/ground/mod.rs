//! What all rooms stand on: memory and effects, where blocks are, the log, and what is true of each volume.

pub(crate) mod task;
pub(crate) mod volume;

use crate::api::*;
use crate::base::consequences::Consequence;
use crate::base::flight::{DeviceFailed, Io, OpId};
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::shared::{Base, EngineConfig};
use crate::blocks::arriving::Arriving;
use crate::blocks::bad::Bad;
use crate::blocks::budget::Budget;
use crate::blocks::extents::{self, Extents};
use crate::blocks::index::{Lookup, Position, VolumeIndex};
use crate::blocks::own::Source;
use crate::blocks::space::Space;
use crate::format::record::Record;
use crate::format::{ExtentKind, Geometry, RecordKind, Stream};
use crate::ground::volume::Volume;
use crate::log::build::{Append, Builder, BuiltEntry, RecordFields};
use crate::log::copy::{Incoming, is_zeroes, room_of};
use crate::log::stable::{Look, Waiting};
use crate::log::{Log, Want};
use std::ops::Range;

/// Where a stretch of blocks is found.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    /// The volume whose index has it, or whose image.
    pub(crate) volume: VolumeId,
    /// What the index of that volume says.
    pub(crate) lookup: Lookup,
    /// No index has it, and no image: it reads as zero.
    pub(crate) hole: bool,
    /// How many blocks are like the first one.
    pub(crate) blocks: u32,
}

/// What the rooms of one cache device share.
pub(crate) struct Ground {
    pub(crate) base: Base,
    pub(crate) space: Space,
    pub(crate) budget: Budget,
    pub(crate) arriving: Arriving,
    pub(crate) bad: Bad,
    pub(crate) log: Log,
    /// By number; no longer than needed, since every round looks at all of them.
    pub(crate) volumes: Vec<Option<Box<Volume>>>,
}

impl Ground {
    pub(crate) fn new(geo: Geometry, config: EngineConfig, durable: u64, epoch: u64) -> Ground {
        Ground {
            base: Base::new(geo, config, durable),
            space: Space::new(geo, epoch),
            budget: Budget::default(),
            arriving: Arriving::new(),
            bad: Bad::default(),
            log: Log::new(geo.segment_blocks),
            volumes: Vec::new(),
        }
    }

    /// Does something with a volume's backend.
    pub(crate) fn backend(&mut self, io: Io, volume: VolumeId, op: BackendOp) {
        let of = self.volume_mut(volume);
        match op {
            BackendOp::Write { offset, buf } => of.own.insert(offset, buf.len.into()),
            BackendOp::Discard { offset, len } | BackendOp::WriteZeroes { offset, len } => {
                of.own.insert(offset, len);
            }
            // What is cut off does not come back from the parent when the image grows again.
            BackendOp::Resize { size_bytes } => of.own.insert(size_bytes, u64::MAX),
            _ => {}
        }
        let count = &mut of.count;
        match op {
            BackendOp::Read { buf, .. } => {
                count.backend_reads += 1;
                count.backend_read_bytes += u64::from(buf.len);
            }
            BackendOp::Write { buf, .. } | BackendOp::RedoWrite { buf, .. } => {
                count.backend_writes += 1;
                count.backend_written_bytes += u64::from(buf.len);
            }
            _ => {}
        }
        self.base.out.backend(io, volume, op);
    }

    /// The volumes that there are.
    pub(crate) fn ids(&self) -> impl Iterator<Item = VolumeId> + use<'_> {
        let volumes = self.volumes.iter().enumerate();
        volumes.filter(|(_, volume)| volume.is_some()).map(|(number, _)| VolumeId(number as u16))
    }

    pub(crate) fn volume(&self, id: VolumeId) -> &Volume {
        self.volumes[id.0 as usize].as_ref().expect("the volume exists while something of it is in flight")
    }

    pub(crate) fn volume_mut(&mut self, id: VolumeId) -> &mut Volume {
        self.volumes[id.0 as usize].as_mut().expect("the volume exists while something of it is in flight")
    }

    pub(crate) fn volume_and_space(&mut self, id: VolumeId) -> (&mut Volume, &mut Space) {
        let volume = self.volumes[id.0 as usize].as_mut();
        (volume.expect("the volume exists while something of it is in flight"), &mut self.space)
    }

    /// The dirty quota in force, in bytes; see [`Budget::quota`].
    pub(crate) fn dirty_bytes_max(&self, id: VolumeId) -> u64 {
        let spec = &self.volume(id).spec;
        if spec.read_only { 0 } else { self.budget.quota(&self.space, spec.dirty_bytes_max) }
    }

    /// A volume has come or gone, or its quota has changed.
    pub(crate) fn count_quotas(&mut self) {
        let written = self.volumes.iter().flatten().filter(|volume| !volume.spec.read_only);
        self.budget.set_quotas(&self.space, written.map(|volume| volume.spec.dirty_bytes_max));
    }

    fn extents(&self) -> Extents {
        let volumes = self.volumes.iter();
        extents::collect(volumes.map(|v| v.as_ref().map(|volume| (&volume.ledger, volume.failed))))
    }

    /// The extents of a checkpoint of the state now; `None` while there are too many of them.
    ///
    /// Ranges are limited when they are admitted, but a drain in the wrong order can split one into many.
    /// Lost blocks that are too many to be named make their volume fail as a whole.
    pub(crate) fn extents_that_fit(&mut self) -> Option<Extents> {
        let max = self.base.geo.extents_max();
        loop {
            let extents = self.extents();
            self.budget.set_extents(extents.items.len() + self.log.unpublished_ranges());
            if extents.items.len() <= max {
                return Some(extents);
            }
            let lost = extents.items.iter().filter(|e| e.kind == ExtentKind::Lost as u8).count();
            if lost <= max / 2 {
                return None;
            }
            let whole = self.volumes.iter_mut().flatten().filter(|v| !v.failed);
            whole.max_by_key(|v| v.ledger.blocks().lost)?.failed = true;
        }
    }

    /// Whether new ranges must wait for room in checkpoints. What is pending is an upper bound; it is
    /// counted only when somebody would have to wait, and once for each change of the real number.
    pub(crate) fn extents_are_full(&mut self) -> bool {
        self.count_extents(1);
        self.ranges_left() == 0
    }

    /// Counts the extents anew if fewer than `wanted` more seem to be possible.
    pub(crate) fn count_extents(&mut self, wanted: u64) {
        if self.ranges_left() < wanted && self.budget.take_extents_changed() {
            let extents = self.extents().items.len() + self.log.unpublished_ranges();
            self.budget.set_extents(extents);
        }
    }

    /// Extents that the checkpoint has of one volume.
    pub(crate) fn extents_of(&self, id: VolumeId) -> u64 {
        self.extents().items.iter().filter(|extent| extent.volume.get() == id.0).count() as u64
    }

    /// Ranges of zeroes that may still be logged, beside what owners of replicas were told.
    pub(crate) fn ranges_left(&self) -> u64 {
        self.budget.ranges_left(&self.space)
    }

    /// Ends a look at who waits for stable media: begins a sync of the device if somebody must have one.
    pub(crate) fn sync(&mut self, look: Look) {
        if self.log.end_look(look, self.base.dead) {
            for volume in self.volumes.iter_mut().flatten() {
                volume.log.begin_sync();
            }
            self.base.device.syncs += 1;
            self.base.out.sync(Io::Sync);
        }
    }

    /// The device has answered a sync of the log.
    ///
    /// # Errors
    /// The device has failed.
    pub(crate) fn sync_done(&mut self, result: Result<(), IoError>) -> Result<(), DeviceFailed> {
        let succeeded = result.is_ok() || mutated!(FailedSyncCounts);
        self.log.end_sync(succeeded);
        if !succeeded {
            return Err(DeviceFailed);
        }
        self.volumes.iter_mut().flatten().for_each(|volume| volume.log.end_sync());
        Ok(())
    }

    /// The records of an append have taken effect.
    pub(crate) fn note_published(&mut self, append: &Append) {
        if self.log.note_published(append) && append.stream() == Stream::Log {
            for volume in self.volumes.iter_mut().flatten() {
                volume.log.note_durable(volume.log.published());
            }
        }
    }

    /// Starts an append; see [`Log::begin`].
    pub(crate) fn begin_append(&mut self, want: Want, buf: Buf) -> Result<Builder, Buf> {
        self.log.begin(&mut self.base, &mut self.space, want, buf)
    }

    /// Takes a buffer and starts an append for a move in it; `None` while there is no room or no buffer.
    pub(crate) fn begin_move(&mut self, stream: Stream) -> Option<Builder> {
        let buf = self.base.pools.append.take()?;
        match self.begin_append(Want { stream, least: (1, 1), moves: true }, buf) {
            Ok(builder) => Some(builder),
            Err(buf) => {
                self.base.pools.append.give(buf);
                None
            }
        }
    }

    /// Drops what the cache holds of a range, as a record says. Dirty blocks go too: the caller knows why.
    pub(crate) fn drop_blocks(&mut self, id: VolumeId, first: u64, blocks: u64) {
        let (volume, space) = self.volume_and_space(id);
        volume.ledger.forget(space, first, blocks);
    }

    /// Drops what the cache holds of a range, without a record that says so: a crash may bring it back
    /// until the next checkpoint.
    pub(crate) fn forget_blocks(&mut self, id: VolumeId, first: u64, blocks: u64) {
        self.note_forgotten(id);
        self.drop_blocks(id, first, blocks);
    }

    /// Something of the volume is dropped without a record that says so.
    pub(crate) fn note_forgotten(&mut self, id: VolumeId) {
        let next = self.base.checkpoints.next();
        self.volume_mut(id).forgotten_until = next;
    }

    /// A record of a volume is built.
    pub(crate) fn note_built(&mut self, builder: &Builder) {
        let (record, entries) = builder.last_record().expect("it was built");
        let room = room_of(entries.iter().map(BuiltEntry::entry));
        let (id, sequence) = (record.volume(), record.sequence());
        if let Some(copy) = &mut self.volume_mut(id).copy {
            copy.note_built(sequence, room);
        }
    }

    /// Sends the records of an append that is about to be written to the device, each to the peer of its volume. `durable` says of a
    /// record of a volume whether somebody waits for it to be on stable media.
    pub(crate) fn send_records(&mut self, builder: &Builder, durable: impl Fn(VolumeId, u64) -> bool) {
        for (record, buf) in builder.records() {
            let (id, sequence) = (record.volume(), record.sequence());
            let volume = self.volumes[id.0 as usize].as_mut();
            let copy = volume.and_then(|volume| volume.copy.as_deref_mut()).filter(|copy| copy.sends());
            let Some(copy) = copy.filter(|_| record.kind() == RecordKind::Write) else { continue };
            let durable = durable(id, sequence);
            if durable {
                copy.note_asked(sequence);
            }
            self.base.out.peer(id, PeerOp::Record { sequence, buf, durable });
        }
    }

    /// Asks the peer to bring everything up to `sequence` to stable media, unless it has or is about to.
    pub(crate) fn stabilise_copy(&mut self, id: VolumeId, sequence: u64) {
        let copy = self.volume_mut(id).copy.as_deref_mut();
        if let Some(sequence) = copy.and_then(|copy| copy.ask(sequence)) {
            self.base.out.peer(id, PeerOp::Stabilise { sequence });
        }
    }

    /// Whether the copy at the peer has what an operation has left in the log up to the record `sequence`, on `stable` media if
    /// that is needed; if not, the operation waits until then.
    pub(crate) fn has_copy(&mut self, id: VolumeId, op: OpId, sequence: u64, stable: bool) -> bool {
        let volume = self.volume_mut(id);
        let refuses = volume.is_refusing();
        let Some(copy) = &mut volume.copy else { return true };
        // Nothing comes on top of what has to be stable when the record says that the peer is gone.
        let has = !copy.is_parting() && copy.has(sequence, stable && !mutated!(PeersStableIgnored));
        // A volume that refuses answers at once.
        if refuses || has || mutated!(AckBeforePeer) {
            return true;
        }
        copy.wait(op);
        if stable {
            self.stabilise_copy(id, sequence);
        }
        false
    }

    /// Whether the copy at the peer has, on stable media, what this part of the drain takes to the backend; if not, the part waits
    /// until then.
    pub(crate) fn has_drained_copy(&mut self, part: Waiting) -> bool {
        let (id, sequence) = (part.volume(), part.sequence());
        let volume = self.volume_mut(id);
        let has =
            volume.copy.as_ref().is_none_or(|copy| copy.has(sequence, true)) || mutated!(DrainBeforePeer);
        if has {
            volume.progress.note_sent(sequence);
            return true;
        }
        volume.copy.as_mut().expect("what is waited for").defer(part);
        self.stabilise_copy(id, sequence);
        false
    }

    /// Blocks have changed: what of them is on its way into the read cache is not the newest any more. Returns how many blocks were.
    pub(crate) fn overtake(&mut self, id: VolumeId, first: u64, blocks: u64) -> u64 {
        let overtaken = self.arriving.overtake(id, first, blocks);
        if overtaken > 0 {
            self.volume_mut(id).count.bypass_overtaken_blocks += overtaken;
        }
        overtaken
    }

    /// The read `number` of `bytes` brings nothing into the read cache.
    pub(crate) fn settle_read(&mut self, id: VolumeId, first: u64, bytes: u32, number: u32) {
        for block in first..first + u64::from(bytes) / BLOCK_BYTES as u64 {
            if self.arriving.brings(id, block, number) {
                self.arriving.settle(id, block);
            }
        }
    }

    /// A cached block does not verify, also when it was read again.
    pub(crate) fn note_corrupt(&mut self, id: VolumeId, position: Position) {
        // Until it is repaired it may be found bad many times.
        if !self.bad.has(position) {
            self.volume_mut(id).count.corrupt_blocks += 1;
        }
    }

    /// The only copy of a dirty block is lost: it reads EIO until it is overwritten.
    pub(crate) fn lose_for_good(&mut self, id: VolumeId, block: u64, position: Position) {
        if self.volume(id).ledger.index().lookup(block) != Lookup::At(position) {
            return;
        }
        let (volume, space) = self.volume_and_space(id);
        volume.ledger.lose(space, block, position);
        if let Some(copy) = &mut volume.copy {
            copy.note_lost();
        }
        self.base.checkpoints.want();
        if self.base.dead {
            self.fail(id);
        }
    }

    /// A dirty block has no good copy left and the cache device cannot record that. The volume answers
    /// nothing any more: what the image holds is older than what its clients have seen. It keeps its place in
    /// the image's record (see [`Engine::disown`](crate::Engine::disown)), so that a restart does not serve the image either.
    pub(crate) fn fail(&mut self, id: VolumeId) {
        let volume = self.volume_mut(id);
        if !std::mem::replace(&mut volume.failed, true) {
            let lost = volume.ledger.blocks().lost;
            self.base.consequences.push(Consequence::Failed(id, lost));
        }
    }

    /// Another owner has the volume: nothing of it is served or written any more.
    pub(crate) fn fence(&mut self, id: VolumeId) {
        let volume = self.volume_mut(id);
        if !volume.fenced && volume.attached {
            volume.fenced = true;
            self.base.consequences.push(Consequence::Fenced(id));
        }
    }

    /// Remembers whether the backend works.
    pub(crate) fn note_backend_result(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        let volume = self.volume_mut(id);
        volume.backend.note_result(now, result);
        volume.count.backend_errors += u64::from(result.is_err());
        if result == Err(IoError::Fenced) {
            self.fence(id);
        }
    }

    /// Of what may fail without the backend failing, only that another owner has the image.
    pub(crate) fn note_fence(&mut self, now: Nanos, id: VolumeId, result: Result<(), IoError>) {
        if result == Err(IoError::Fenced) {
            self.note_backend_result(now, id, result);
        }
    }

    /// The owner of a copy is told that it may send so much more.
    pub(crate) fn grant(&mut self, id: VolumeId, room: Room) {
        self.budget.reserve(room);
        self.volume_mut(id).reserve.grant(room);
    }

    /// The owner of a copy is not heard any more: what it was told of room is others' again.
    pub(crate) fn withdraw_room(&mut self, id: VolumeId) {
        let volume = self.volumes.get_mut(id.0 as usize).and_then(Option::as_mut);
        if let Some(volume) = volume.filter(|volume| volume.is_copy()) {
            self.budget.release(volume.reserve.withdraw());
            self.base.out.stir();
        }
    }

    /// What waited for the log of a copy does not wait any more.
    pub(crate) fn forget_pending_room(&mut self, id: VolumeId) {
        if let Some(volume) = self.volumes[id.0 as usize].as_mut() {
            self.budget.release(volume.reserve.forget_pending());
        }
    }

    /// Puts a record of the owner's, which is in `buf`, into an append as it is; false when there is no room for the whole of it.
    pub(crate) fn take_record(
        &mut self,
        builder: &mut Builder,
        id: VolumeId,
        incoming: Incoming,
        buf: Buf,
    ) -> bool {
        let (blocks, entries) = incoming.size();
        if !builder.has_room_for(blocks, entries) {
            return false;
        }
        let header = buf.slice(0, BLOCK_BYTES);
        let record = Record::decode(self.base.arena.bytes(header)).expect("it was read when it came");
        builder.begin_record(id, RecordKind::Write);
        let mut from = BLOCK_BYTES;
        for entry in record.entries {
            if entry.has_data() {
                let to = builder.push_data(&self.space, entry.block(), entry.value(), 0);
                self.base.arena.copy(buf.slice(from, BLOCK_BYTES), to);
                from += BLOCK_BYTES;
                continue;
            }
            let kind = entry.kind().expect("it was looked at when it came");
            builder.push_range(kind, entry.block(), entry.value());
            self.budget.add_extents(usize::from(is_zeroes(Some(kind))));
        }
        self.note_data_built(id, u64::from(blocks));
        let volume = self.volume_mut(id);
        volume.reserve.note_built(incoming.room());
        self.budget.release(incoming.room());
        self.end_record(builder, id, incoming.sequence());
        true
    }

    /// Ends a record of a volume, which is the next one in its log.
    pub(crate) fn end_record(&mut self, builder: &mut Builder, id: VolumeId, sequence: u64) {
        let volume = self.volumes[id.0 as usize].as_mut().expect("its record is being built");
        let fields = RecordFields::next(volume.spec.generation, sequence, &volume.log);
        let chain = builder.end_record(&mut self.base, &self.space, fields);
        volume.log.build(sequence, chain);
    }

    /// Data blocks are in a record that is being built.
    pub(crate) fn note_data_built(&mut self, id: VolumeId, blocks: u64) {
        self.budget.note_built(blocks);
        self.volume_mut(id).unpublished_blocks += blocks;
    }

    /// Data blocks of a record take effect.
    pub(crate) fn note_data_published(&mut self, id: VolumeId, blocks: u64) {
        self.budget.note_published(blocks);
        self.volume_mut(id).unpublished_blocks -= blocks;
    }

    /// Blocks that the volume may still dirty.
    pub(crate) fn quota_left(&self, id: VolumeId) -> u64 {
        let volume = self.volume(id);
        let used = volume.ledger.held() + volume.unpublished_blocks + volume.reserve.blocks();
        let own = (self.dirty_bytes_max(id) / BLOCK_BYTES as u64).saturating_sub(used);
        own.min(self.blocks_left())
    }

    /// Blocks that all volumes together may still dirty, beside what owners of replicas were told.
    pub(crate) fn blocks_left(&self) -> u64 {
        self.budget.blocks_left(&self.space)
    }

    /// Whether any of the blocks is dirty. What is on its way to the image stays so until it is flushed there, and zeroes are
    /// forgotten then.
    pub(crate) fn has_dirty(&self, id: VolumeId, first: u64, end: u64) -> bool {
        let volume = self.volume(id);
        if volume.ledger.dirty() == 0 && !volume.is_dirty() {
            return false;
        }
        let is_dirty = |found, n| match found {
            Lookup::At(position) => (position..position + n).any(|p| self.space.marks.is_dirty(p)),
            Lookup::Zero => true,
            Lookup::Absent | Lookup::Lost => false,
        };
        any(volume.ledger.index(), first..end, is_dirty)
    }

    /// Whether the only copy of any of the blocks is lost.
    pub(crate) fn has_lost(&self, id: VolumeId, first: u64, end: u64) -> bool {
        let index = self.volume(id).ledger.index();
        index.blocks().lost > 0 && any(index, first..end, |found, _| found == Lookup::Lost)
    }

    /// Whether the index knows anything about the blocks.
    pub(crate) fn is_known(&self, id: VolumeId, first: u64, end: u64) -> bool {
        any(self.volume(id).ledger.index(), first..end, |found, _| found != Lookup::Absent)
    }

    /// Where a block of a volume is found, and how many of the next `n` are like it.
    pub(crate) fn find(&self, id: VolumeId, block: u64, n: u32) -> Found {
        let (mut id, mut n) = (id, n);
        loop {
            let volume = self.volume(id);
            let (lookup, blocks) = volume.ledger.index().lookup_run(block, n);
            let found = Found { volume: id, lookup, hole: false, blocks };
            if lookup != Lookup::Absent {
                return found;
            }
            let (source, blocks) = volume.source(block, blocks);
            let parent = volume.parent.filter(|_| volume.mode != Mode::Off);
            match (source, parent) {
                (Source::Parent, Some(parent)) => (id, n) = (parent, blocks),
                _ => return Found { hole: source == Source::Hole, blocks, ..found },
            }
        }
    }

    /// Something has changed for operations of all volumes that wait in the front.
    pub(crate) fn recheck_all(&mut self) {
        self.volumes.iter_mut().flatten().for_each(|volume| volume.recheck = true);
    }
}

/// Whether `is` holds of any stretch of the blocks: it is told what is known of a stretch, and how many blocks that has.
fn any(index: &VolumeIndex, blocks: Range<u64>, is: impl Fn(Lookup, u32) -> bool) -> bool {
    let mut at = blocks.start;
    while at < blocks.end {
        let (found, n) = index.lookup_run(at, (blocks.end - at).min(1 << 20) as u32);
        if is(found, n) {
            return true;
        }
        at += u64::from(n);
    }
    false
}
