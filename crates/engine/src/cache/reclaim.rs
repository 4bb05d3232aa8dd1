//! Reclaim: makes segments free again.
//!
//! One segment at a time: its summary says which blocks it once got, the index says which of them
//! are current. Clean blocks are dropped (and remembered by the ghost) unless they were used again.
//! Dirty blocks are always moved, so a segment with dirty blocks is chosen only when there is no
//! other. Clean ones that keep ranges of zeroes together are dropped only as long as a checkpoint
//! has room for the parts. A segment is free when a checkpoint that does not name it is durable.
//!
//! The order of victims follows S3-FIFO (Yang et al., SOSP 2023): newcomers leave first when they
//! take more than a tenth; what was used twice lives in the main stream and gets a second chance
//! there. A log has what S3-FIFO does not have, blocks that were written again and stand there
//! dead. Before anything is dropped, segments of the main stream that are half dead are packed: all
//! that lives in them moves.

use crate::api::{BLOCK_BYTES, IoError, VolumeId};
use crate::base::flight::Io;
use crate::base::mutation::mutated;
use crate::base::pools::MOVE_BLOCKS;
use crate::base::util::runs;
use crate::blocks::bad::BadCopy;
use crate::blocks::index::{Lookup, ObjectFlags, Position};
use crate::blocks::ledger::{Moved, object_of};
use crate::blocks::space::{RESERVE_READ_CACHE, RESERVE_WRITES};
use crate::cache::Cache;
use crate::format::summary::decode_summary;
use crate::format::{RecordKind, Stream, byte, crc32c};
use crate::ground::Ground;
use crate::log::Want;
use crate::log::build::Builder;
use crate::log::build::Built;
use crate::log::build::BuiltEntry;
use crate::log::build::RecordFields;

/// Segments of a queue that are looked at for a victim.
const SCAN_MAX: usize = 512;

/// A live block of the victim.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    volume: VolumeId,
    block: u64,
    position: Position,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Summary,
    /// Deciding on candidates from the cursor on.
    Sorting,
    /// The batch is being read.
    Reading,
    /// The batch waits for room in its stream.
    Moving,
    /// Moved batches are in flight.
    Publishing,
}

/// The segment that is being reclaimed.
struct Job {
    segment: u32,
    phase: Phase,
    candidates: Vec<Candidate>,
    cursor: usize,
    /// What is to be moved, and to which stream.
    batch: Vec<Candidate>,
    stream: Stream,
    reads: u32,
    /// Blocks of the batch that verified and are still to be moved.
    good: u64,
    appends: u32,
    /// Hot blocks that may still be kept.
    survivors_left: u32,
    /// The segment is packed: what lives in it is kept, and how often it was used.
    packs: bool,
}

/// Reclaim's state.
#[derive(Default)]
pub(super) struct Reclaim {
    job: Option<Job>,
    /// No new job is to be started: somebody waits for the end of this one.
    hold: bool,
    /// Where in the queue of the main stream the next look for a segment to be packed begins.
    look_from: usize,
    /// Objects of dirty blocks that a record has moved.
    moved: Vec<u32>,
    /// Memory of the previous job.
    spare: (Vec<Candidate>, Vec<Candidate>),
}

impl Cache {
    /// No segment is being reclaimed.
    pub(crate) fn reclaim_is_idle(&self) -> bool {
        self.reclaim.job.is_none()
    }

    /// No other segment is reclaimed after the one at hand until [`Cache::resume_reclaim`]:
    /// somebody waits for its end.
    pub(crate) fn hold_reclaim(&mut self) {
        self.reclaim.hold = true;
    }

    /// See [`Cache::hold_reclaim`].
    pub(crate) fn resume_reclaim(&mut self) {
        self.reclaim.hold = false;
    }

    /// The device has failed: what is being reclaimed will not be.
    pub(crate) fn abandon_reclaim(&mut self, ground: &mut Ground) {
        self.reclaim.job = None;
        ground.log_mut().set_reclaims(false);
    }

    /// Reclaims segments as long as too few are free.
    pub(crate) fn reclaim(&mut self, ground: &mut Ground) {
        if ground.is_dead() {
            return;
        }
        loop {
            let Some(job) = &self.reclaim.job else {
                let free = ground.space().free_count() + ground.space().released_count();
                if free >= free_target(ground) || self.reclaim.hold || ground.is_stopping() {
                    return;
                }
                let Some((segment, packs)) = self.choose(ground) else { return };
                self.start_reclaim(ground, segment, packs);
                continue;
            };
            match job.phase {
                Phase::Summary | Phase::Reading => return,
                Phase::Sorting => self.reclaim_sort(ground),
                Phase::Moving => {
                    if !self.reclaim_append(ground) {
                        return;
                    }
                }
                Phase::Publishing if job.appends > 0 => return,
                Phase::Publishing => self.finish_reclaim(ground),
            }
        }
    }

    /// The segment that is emptied next, and whether it is packed. What is dead costs nothing, and
    /// what is packed costs no block.
    fn choose(&mut self, ground: &mut Ground) -> Option<(u32, bool)> {
        if let Some(dead) = self.dead_segment(ground) {
            return Some((dead, false));
        }
        if let Some(sparse) = self.sparse(ground) {
            return Some((sparse, true));
        }
        self.victim(ground).map(|segment| (segment, false))
    }

    fn dead_segment(&self, ground: &Ground) -> Option<u32> {
        let log = ground.space().sealed(Stream::Log);
        log.iter().take(SCAN_MAX).copied().find(|&s| ground.space().segment(s).is_dead())
    }

    /// The segment of the main stream with fewest live blocks, if these are no more than half of it
    /// and can move. A part of the stream is looked at, and if there is none in it the next part
    /// the next time.
    fn sparse(&mut self, ground: &mut Ground) -> Option<u32> {
        let main = ground.space().sealed(Stream::Main);
        if main.is_empty() || ground.space().free_count() <= RESERVE_READ_CACHE {
            return None;
        }
        let from = self.reclaim.look_from % main.len();
        let part = (from..from + SCAN_MAX.min(main.len())).map(|at| main[at % main.len()]);
        let segment = |s: u32| ground.space().segment(s);
        let clean = part.filter(|&s| segment(s).dirty() == 0);
        let sparse = clean
            .min_by_key(|&s| segment(s).live())
            .filter(|&s| segment(s).live() <= ground.geo().segment_blocks / 2);
        if sparse.is_none() {
            self.reclaim.look_from = from + SCAN_MAX;
        }
        sparse
    }

    fn victim(&self, ground: &Ground) -> Option<u32> {
        let segment = |s: u32| ground.space().segment(s);
        let queue = |stream| ground.space().sealed(stream);
        let (fill, main, log) = (queue(Stream::Fill), queue(Stream::Main), queue(Stream::Log));
        let clean = |s: &&u32| segment(**s).dirty() == 0;
        let log_clean = log.iter().take(SCAN_MAX).find(clean).copied();
        let all = fill.len() + main.len() + log.len();
        if fill.len() > ground.geo().segments as usize / 10 {
            return fill.front().copied();
        }
        if main.len() * 10 > all * 8 {
            return main.iter().find(clean).copied();
        }
        let clean = log_clean
            .or_else(|| fill.front().copied())
            .or_else(|| main.iter().find(clean).copied());
        if clean.is_some() || ground.space().free_count() > RESERVE_WRITES + 1 {
            return clean;
        }
        // Everything left is dirty, and the drain may be stopped: pack the dirty blocks together.
        // What is being repaired would be found bad again.
        let blocks = |s: u32| {
            ground.geo().segment_block(s)
                ..ground.geo().segment_block(s) + ground.geo().segment_blocks
        };
        let whole = log.iter().copied().filter(|&s| !ground.bad().are_in(blocks(s)));
        let least = whole.min_by_key(|&s| segment(s).dirty())?;
        (segment(least).dirty() < ground.geo().segment_blocks * 15 / 16).then_some(least)
    }

    fn start_reclaim(&mut self, ground: &mut Ground, segment: u32, packs: bool) {
        ground.space_mut().begin_reclaim(segment);
        ground.log_mut().set_reclaims(true);
        let (mut candidates, mut batch) = std::mem::take(&mut self.reclaim.spare);
        candidates.clear();
        batch.clear();
        let s = *ground.space().segment(segment);
        self.reclaim.job = Some(Job {
            segment,
            phase: if s.is_dead() { Phase::Publishing } else { Phase::Summary },
            candidates,
            cursor: 0,
            batch,
            stream: Stream::Log,
            reads: 0,
            good: 0,
            appends: 0,
            survivors_left: ground.geo().segment_blocks / 2,
            packs,
        });
        if !s.is_dead() {
            let blocks = u32::from(s.summary_blocks());
            let first = ground.geo().segment_block(segment) + ground.geo().segment_blocks - blocks;
            let buf = ground.pools().reclaim_summary().slice(0, blocks as usize * BLOCK_BYTES);
            ground.read(Io::ReclaimSummary, byte(first), buf);
        }
    }

    pub(crate) fn reclaim_summary_done(
        &mut self,
        ground: &mut Ground,
        result: Result<(), IoError>,
    ) {
        let Some(mut job) = self.reclaim.job.take() else {
            return assert!(ground.is_dead(), "a job reads its summary");
        };
        let s = ground.space().segment(job.segment);
        let buf = ground
            .pools()
            .reclaim_summary()
            .slice(0, usize::from(s.summary_blocks()) * BLOCK_BYTES);
        let summary = result
            .ok()
            .and_then(|()| decode_summary(ground.geo(), job.segment, s.life(), ground.bytes(buf)));
        match summary {
            Some((records, entries)) => {
                let mut entries = entries.into_iter();
                for record in records {
                    let base = ground.geo().segment_block(job.segment)
                        + u32::from(record.first_block.get())
                        + 1;
                    let data = entries
                        .by_ref()
                        .take(usize::from(record.entries.get()))
                        .filter(|e| e.has_data());
                    for (i, entry) in data.enumerate() {
                        let volume = VolumeId(record.volume.get());
                        let candidate =
                            Candidate { volume, block: entry.block(), position: base + i as u32 };
                        if is_needed(ground, candidate) {
                            job.candidates.push(candidate);
                        }
                    }
                }
            }
            None => self.candidates_from_index(ground, &mut job),
        }
        // Batches of one stream each, records of one volume each: two in turn would spend a header
        // on every block.
        job.candidates.sort_by_key(|c| (!ground.marks().is_dirty(c.position), c.volume.0));
        let records = job.candidates.chunk_by(|a, b| a.volume == b.volume).count()
            + job.candidates.len() / MOVE_BLOCKS;
        // With a header for each few blocks there is nothing to be gained.
        job.packs &= job.candidates.len() + records <= ground.geo().segment_blocks as usize * 3 / 4;
        job.phase = Phase::Sorting;
        self.reclaim.job = Some(job);
    }

    /// The summary is unreadable: the index knows as well, it only takes longer to ask.
    fn candidates_from_index(&self, ground: &Ground, job: &mut Job) {
        let first = ground.geo().segment_block(job.segment);
        let range = first..first + ground.geo().segment_blocks;
        for id in ground.ids() {
            let volume = ground.volume(id);
            let closed = volume.ledger().closed_index();
            let all = std::iter::once(volume.ledger().index()).chain(closed);
            for (index, object) in
                all.flat_map(|index| index.objects(0).map(move |object| (index, object)))
            {
                for (block, n, found) in index.runs(object) {
                    let Lookup::At(position) = found else { continue };
                    let inside = (0..n).filter(|i| range.contains(&(position + i)));
                    job.candidates.extend(inside.map(|i| Candidate {
                        volume: id,
                        block: block + u64::from(i),
                        position: position + i,
                    }));
                }
            }
        }
        // What is current may stand in both.
        job.candidates.sort_by_key(|c| c.position);
        job.candidates.dedup_by_key(|c| c.position);
        let mut candidates = std::mem::take(&mut job.candidates);
        candidates.retain(|&c| is_needed(ground, c));
        job.candidates = candidates;
    }

    /// Decides on candidates until a batch is full or none are left. Those that must stay form
    /// batches for the log, hot ones for the main stream; the others are dropped.
    fn reclaim_sort(&mut self, ground: &mut Ground) {
        let mut job = self.reclaim.job.take().expect("a job is being sorted");
        let probation = ground.space().segment(job.segment).stream() != Stream::Main;
        while let Some(&c) = job.candidates.get(job.cursor) {
            if is_needed(ground, c) {
                match self.survives(ground, c, &job) {
                    Some(stream) => {
                        let full = job.batch.len() == MOVE_BLOCKS;
                        if full || !job.batch.is_empty() && stream != job.stream {
                            break;
                        }
                        job.stream = stream;
                        job.batch.push(c);
                        if stream == Stream::Main {
                            job.survivors_left = job.survivors_left.saturating_sub(1);
                        }
                    }
                    None if job.packs => {
                        // There is no room any more: what is left stays where it is.
                        job.cursor = job.candidates.len();
                        break;
                    }
                    None => {
                        self.evict(ground, c);
                        if probation {
                            self.ghost.insert(c.volume, c.block);
                        }
                    }
                }
            }
            job.cursor += 1;
        }
        if job.batch.is_empty() {
            job.phase = Phase::Publishing;
            self.reclaim.job = Some(job);
            return;
        }
        job.phase = Phase::Reading;
        job.good = 0;
        self.reclaim.job = Some(job);
        self.read_batch(ground);
    }

    /// The stream that a block is moved to, or `None` if it is to be dropped.
    fn survives(&self, ground: &Ground, c: Candidate, job: &Job) -> Option<Stream> {
        if ground.marks().is_dirty(c.position) {
            return Some(Stream::Log);
        }
        // What waits for a checkpoint is room soon.
        let room =
            ground.space().free_count() + ground.space().released_count() > RESERVE_READ_CACHE;
        if must_stay(ground, c) {
            return Some(if room { Stream::Main } else { Stream::Log });
        }
        let hot = job.packs || ground.marks().refs(c.position) > 0;
        (room && hot && job.survivors_left > 0).then_some(Stream::Main)
    }

    /// Drops a clean block.
    fn evict(&mut self, ground: &mut Ground, c: Candidate) {
        if joins_zeroes(ground, c) {
            ground.budget_mut().add_extents(1);
            ground.budget_mut().note_extents_changed();
        }
        ground.forget_blocks(c.volume, c.block, 1);
        ground.volume_mut(c.volume).count_mut().evicted_blocks += 1;
    }

    fn read_batch(&mut self, ground: &mut Ground) {
        let job = self.reclaim.job.as_ref().expect("a job has a batch");
        let mut reads = 0;
        let mut spans = [(0u16, 0u16, 0u32); MOVE_BLOCKS];
        for (start, end) in runs(job.batch.len(), |i| job.batch[i].position) {
            spans[reads] = (start as u16, end as u16, job.batch[start].position);
            reads += 1;
        }
        self.reclaim.job.as_mut().expect("a job has a batch").reads = reads as u32;
        for &(start, end, position) in &spans[..reads] {
            let len = usize::from(end - start) * BLOCK_BYTES;
            let buf = ground.pools().reclaim_data().slice(usize::from(start) * BLOCK_BYTES, len);
            ground.read(Io::ReclaimRead { start, end }, byte(position), buf);
        }
    }

    /// Blocks of the batch have been read.
    pub(crate) fn reclaim_read_done(
        &mut self,
        ground: &mut Ground,
        (start, end): (u16, u16),
        result: Result<(), IoError>,
    ) {
        let Some(mut job) = self.reclaim.job.take() else {
            return assert!(ground.is_dead(), "a job reads");
        };
        for i in usize::from(start)..usize::from(end) {
            let buf = ground.pools().reclaim_data().slice(i * BLOCK_BYTES, BLOCK_BYTES);
            let crc = crc32c(ground.bytes(buf));
            let c = job.batch[i];
            if result.is_ok() && crc == ground.marks().crc(c.position) {
                job.good |= 1 << i;
            } else if is_needed(ground, c) {
                ground.note_corrupt(c.volume, c.position);
                if ground.marks().is_dirty(c.position) {
                    ground.bad_mut().report(BadCopy::of_anybody(c.volume, c.block, c.position));
                } else {
                    ground.forget_blocks(c.volume, c.block, 1);
                }
            }
        }
        job.reads -= 1;
        if job.reads == 0 {
            job.phase = Phase::Moving;
        }
        self.reclaim.job = Some(job);
    }

    /// Appends the batch to its stream; false when there is no room for it now.
    fn reclaim_append(&mut self, ground: &mut Ground) -> bool {
        let mut job = self.reclaim.job.take().expect("a job moves");
        let mut moved = self.append_batch(ground, &mut job);
        let (free, released) = (ground.space().free_count(), ground.space().released_count());
        let gives_up = !moved && (free < RESERVE_WRITES || released == 0 && free <= RESERVE_WRITES);
        if gives_up && job.packs {
            job.cursor = job.candidates.len();
            job.good = 0;
            moved = true;
        } else if gives_up {
            // Perhaps there will be no room before this segment is free, but for the log.
            self.evict_batch(ground, &job);
            job.stream = Stream::Log;
            moved = self.append_batch(ground, &mut job);
        }
        if moved {
            job.batch.clear();
            job.phase = Phase::Sorting;
        }
        self.reclaim.job = Some(job);
        moved
    }

    /// Drops what need not stay of a batch. Nothing that is dropped is appended.
    fn evict_batch(&mut self, ground: &mut Ground, job: &Job) {
        for (i, &c) in job.batch.iter().enumerate() {
            if job.good >> i & 1 == 1 && !must_stay(ground, c) {
                self.evict(ground, c);
            }
        }
    }

    /// Appends what is left of the batch, in as many appends as it takes.
    fn append_batch(&mut self, ground: &mut Ground, job: &mut Job) -> bool {
        let left = (0..job.batch.len()).filter(|&i| !is_needed(ground, job.batch[i]));
        left.for_each(|i| job.good &= !(1 << i));
        if job.good != 0 && job.stream != Stream::Log {
            self.issue_fill(ground, job.stream);
        }
        while job.good != 0 {
            let Some(mut builder) = ground.begin_append(Want::moves(job.stream)) else {
                return false;
            };
            while job.good != 0 && builder.has_room_for_record() {
                self.move_record(ground, job, &mut builder);
            }
            job.appends += 1;
            ground.issue(builder, false);
        }
        true
    }

    /// Puts blocks of the batch that belong to one volume into one record.
    fn move_record(&mut self, ground: &mut Ground, job: &mut Job, builder: &mut Builder) {
        let volume = job.batch[job.good.trailing_zeros() as usize].volume;
        builder.begin_record(volume, RecordKind::Move);
        while job.good != 0 && builder.has_room_for_entry() {
            let i = job.good.trailing_zeros() as usize;
            let c = job.batch[i];
            if c.volume != volume {
                break;
            }
            let crc = ground.marks().crc(c.position);
            let from = ground.pools().reclaim_data().slice(i * BLOCK_BYTES, BLOCK_BYTES);
            ground.push_moved(builder, (c.block, c.position, crc), from);
            job.good &= !(1 << i);
        }
        ground.end_record_beside(builder, RecordFields::default());
    }

    /// A record takes effect by which blocks of a volume were moved. Returns the objects of those
    /// that are dirty.
    pub(crate) fn moved(
        &mut self,
        ground: &mut Ground,
        record: &Built,
        entries: &[BuiltEntry],
    ) -> &[u32] {
        self.reclaim.moved.clear();
        let id = record.volume();
        if ground.get(id).is_none() {
            return &[];
        }
        let packs = self.reclaim.job.as_ref().is_some_and(|job| job.packs);
        for built in entries {
            let block = built.entry().block();
            let (ledger, space) = ground.ledger_and_space(id);
            let places = (built.old(), built.position());
            // A clean block has had its second chance.
            match ledger.moved(space, block, places, built.entry().value(), packs) {
                Moved::Gone => continue,
                Moved::Current { dirty: true } => self.reclaim.moved.push(object_of(block)),
                Moved::Current { dirty: false } | Moved::Frozen => {}
            }
            ground.note_moved();
        }
        &self.reclaim.moved
    }

    /// An append of moved blocks has taken effect.
    pub(crate) fn end_move(&mut self) {
        self.reclaim.job.as_mut().expect("moves belong to a job").appends -= 1;
    }

    fn finish_reclaim(&mut self, ground: &mut Ground) {
        let mut job = self.reclaim.job.take().expect("a job ends");
        ground.log_mut().set_reclaims(false);
        job.candidates.clear();
        job.batch.clear();
        self.reclaim.spare = (job.candidates, job.batch);
        let s = ground.space().segment(job.segment);
        if !s.is_dead() {
            // Something in it became unreadable in between; it stays until it is looked at again.
            ground.space_mut().give_up_reclaim(job.segment);
            return;
        }
        ground.space_mut().release(job.segment);
        if mutated!(SegmentReusedEarly) {
            ground.space_mut().free_released(job.segment);
        }
        ground.note_reclaimed();
    }
}

/// Free segments below which reclaim works.
fn free_target(ground: &Ground) -> u32 {
    (ground.geo().segments / 32).clamp(RESERVE_READ_CACHE + 3, 256)
}

/// The copy is current, or a group needs it.
fn is_needed(ground: &Ground, c: Candidate) -> bool {
    is_current(ground, c) || is_frozen(ground, c)
}

fn is_frozen(ground: &Ground, c: Candidate) -> bool {
    let marks = ground.marks();
    let volume = ground.get(c.volume);
    !marks.is_live(c.position)
        && marks.is_dirty(c.position)
        && volume.is_some_and(|volume| volume.ledger().closed_has(c.block, c.position))
}

fn is_current(ground: &Ground, c: Candidate) -> bool {
    ground.marks().is_live(c.position)
        && ground.get(c.volume).is_some_and(|volume| {
            c.block < volume.blocks_held()
                && volume.ledger().index().lookup(c.block) == Lookup::At(c.position)
        })
}

/// The block is dirty, or without it there might be more extents than a checkpoint holds, so that
/// no segment would become free.
fn must_stay(ground: &Ground, c: Candidate) -> bool {
    ground.marks().is_dirty(c.position)
        || ground.budget().extents() >= ground.geo().extents_max() * 3 / 4
            && joins_zeroes(ground, c)
}

/// A run of cached blocks, this one among them, lies between two ranges of zeroes that the backend
/// lacks. A checkpoint writes all of it as one extent (`blocks/extents.rs`). Without this block it
/// would be two.
fn joins_zeroes(ground: &Ground, c: Candidate) -> bool {
    let (index, object) = (ground.volume(c.volume).ledger().index(), object_of(c.block));
    if !index.flags(object).contains(ObjectFlags::ZERO_DIRTY) {
        return false;
    }
    let mut joined_to = u64::MAX;
    for (block, n, found) in index.runs(object) {
        match found {
            Lookup::Zero if block > c.block => return joined_to == block,
            Lookup::At(_) if joined_to != block => joined_to = u64::MAX,
            Lookup::Zero | Lookup::At(_) => joined_to = block + u64::from(n),
            Lookup::Absent | Lookup::Lost => joined_to = u64::MAX,
        }
    }
    false
}
