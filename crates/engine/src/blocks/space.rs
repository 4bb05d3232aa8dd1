//! The segments of the cache device: who uses them, what in them is live and dirty, which are free.

use crate::base::mutation::mutated;
use crate::blocks::index::Position;
use crate::blocks::marks::Marks;
use crate::format::{Geometry, NO_SEGMENT, Stream};
use std::collections::VecDeque;

/// What a segment is being used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SegmentState {
    /// Holds nothing; may be opened.
    Free,
    /// Records are appended.
    Open,
    /// Full; its summary is being written.
    Sealing,
    /// Full, with summary.
    Sealed,
    /// Its live blocks are being moved or dropped.
    Reclaiming,
    /// Holds nothing live, but the last durable checkpoint may still name it: free after the next.
    Released,
}

/// One segment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    /// Which life of the segment this is: another one means that other blocks stand there.
    life: u64,
    stream: Stream,
    state: SegmentState,
    summary_blocks: u16,
    live: u32,
    dirty: u32,
    /// Device reads in flight: a segment with pins is not opened again.
    pins: u32,
}

impl Segment {
    const EMPTY: Segment = Segment {
        life: 0,
        stream: Stream::Log,
        state: SegmentState::Free,
        summary_blocks: 0,
        live: 0,
        dirty: 0,
        pins: 0,
    };

    /// Nothing in it is needed any more.
    pub(crate) fn is_dead(&self) -> bool {
        self.live == 0 && self.dirty == 0
    }

    /// The next checkpoint will name it.
    pub(crate) fn is_used(&self) -> bool {
        !matches!(self.state, SegmentState::Free | SegmentState::Released)
    }

    /// Its number in the order in which segments were opened: another one means that other blocks
    /// stand there.
    pub(crate) fn life(&self) -> u64 {
        self.life
    }

    /// Whose records stand in it.
    pub(crate) fn stream(&self) -> Stream {
        self.stream
    }

    /// Blocks of its summary, 0 if it has none.
    pub(crate) fn summary_blocks(&self) -> u16 {
        self.summary_blocks
    }

    /// Current blocks in it.
    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    /// Blocks in it that the backend does not have.
    pub(crate) fn dirty(&self) -> u32 {
        self.dirty
    }
}

/// All segments, with the marks of their blocks.
pub(crate) struct Space {
    geo: Geometry,
    segments: Vec<Segment>,
    pub(super) marks: Marks,
    free: VecDeque<u32>,
    /// Sealed segments by stream, oldest first.
    sealed: [VecDeque<u32>; 3],
    released: u32,
    /// Per checkpoint slot: pages of the segment table that changed since they were written there.
    changed: [Vec<u64>; crate::format::SLOTS],
    next_life: u64,
    /// How often the cache was opened.
    epoch: u64,
    live_blocks: u64,
    dirty_blocks: u64,
}

impl Space {
    pub(crate) fn new(geo: Geometry, epoch: u64) -> Space {
        let pages = geo.segment_pages() as usize;
        let mut space = Space {
            geo,
            segments: vec![Segment::EMPTY; geo.segments as usize],
            marks: Marks::new(geo.device_blocks as usize),
            free: VecDeque::with_capacity(geo.segments as usize),
            sealed: [VecDeque::new(), VecDeque::new(), VecDeque::new()],
            released: 0,
            changed: [vec![0; pages.div_ceil(64)], vec![0; pages.div_ceil(64)]],
            next_life: 1,
            epoch,
            live_blocks: 0,
            dirty_blocks: 0,
        };
        space.changed.iter_mut().for_each(|bits| bits.fill(u64::MAX));
        space
    }

    /// Recovery has set all segments: builds the queues from them.
    pub(crate) fn rebuild_queues(&mut self) {
        self.free.clear();
        self.sealed.iter_mut().for_each(VecDeque::clear);
        let mut order: Vec<u32> = (0..self.geo.segments).collect();
        order.sort_by_key(|&s| (self.segments[s as usize].life, s));
        for segment in order {
            let s = self.segments[segment as usize];
            match s.state {
                SegmentState::Free => self.free.push_back(segment),
                SegmentState::Sealed => self.sealed[s.stream as usize].push_back(segment),
                SegmentState::Open => {}
                state => unreachable!("segment {segment} is {state:?} after recovery"),
            }
        }
    }

    /// Layout of the device.
    pub(crate) fn geo(&self) -> &Geometry {
        &self.geo
    }

    /// How often the cache was opened.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// One segment, by its number.
    pub(crate) fn segment(&self, number: u32) -> &Segment {
        &self.segments[number as usize]
    }

    /// All segments, in the order of their numbers.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.segments.iter()
    }

    /// Segments that are free once a checkpoint is durable that does not name them.
    pub(crate) fn released(&self) -> Vec<u32> {
        let is_released = |&s: &u32| self.segments[s as usize].state == SegmentState::Released;
        (0..self.geo.segments).filter(is_released).collect()
    }

    /// What is known of each block of the device.
    pub(crate) fn marks(&self) -> &Marks {
        &self.marks
    }

    /// A cached block is used.
    pub(crate) fn touch(&mut self, position: Position) {
        self.marks.touch(position);
    }

    /// The life that the segment has which is opened next.
    pub(crate) fn next_life(&self) -> u64 {
        self.next_life
    }

    /// Segments that are opened from now on have this life, or a later one.
    pub(crate) fn begin_lives_at(&mut self, life: u64) {
        self.next_life = self.next_life.max(life);
    }

    /// Recovery has found a full segment.
    pub(crate) fn restore_segment(
        &mut self,
        number: u32,
        life: u64,
        stream: Stream,
        summary_blocks: u16,
    ) {
        let state = SegmentState::Sealed;
        self.segments[number as usize] =
            Segment { life, stream, state, summary_blocks, ..Segment::EMPTY };
    }

    /// Recovery goes on in a segment that it has found.
    pub(crate) fn reopen_segment(&mut self, number: u32) {
        self.segments[number as usize].state = SegmentState::Open;
    }

    pub(crate) fn free_count(&self) -> u32 {
        self.free.len() as u32
    }

    pub(crate) fn released_count(&self) -> u32 {
        self.released
    }

    pub(crate) fn live_blocks(&self) -> u64 {
        self.live_blocks
    }

    pub(crate) fn dirty_blocks(&self) -> u64 {
        self.dirty_blocks
    }

    pub(crate) fn sealed(&self, stream: Stream) -> &VecDeque<u32> {
        &self.sealed[stream as usize]
    }

    /// Takes a free segment for a stream; `None` when only `reserve` or fewer (unpinned) are left.
    pub(crate) fn open_segment(&mut self, stream: Stream, reserve: u32) -> Option<u32> {
        if self.free.len() as u32 <= reserve {
            return None;
        }
        let at = self.free.iter().position(|&s| self.segments[s as usize].pins == 0)?;
        let segment = self.free.remove(at).expect("found just now");
        let s = &mut self.segments[segment as usize];
        assert!(s.live == 0 && s.dirty == 0, "a free segment holds nothing");
        s.life = self.next_life;
        s.stream = stream;
        s.state = SegmentState::Open;
        s.summary_blocks = 0;
        self.next_life += 1;
        self.note_change(segment);
        Some(segment)
    }

    /// A segment is full: its summary is being written.
    pub(crate) fn begin_seal(&mut self, segment: u32) {
        self.go_on(segment, SegmentState::Open, SegmentState::Sealing);
    }

    /// The summary of a full segment is written.
    pub(crate) fn end_seal(&mut self, segment: u32) {
        self.go_on(segment, SegmentState::Sealing, SegmentState::Sealed);
        self.queue_of(segment).push_back(segment);
    }

    /// The live blocks of a full segment are being moved or dropped.
    pub(crate) fn begin_reclaim(&mut self, segment: u32) {
        self.go_on(segment, SegmentState::Sealed, SegmentState::Reclaiming);
        let queue = self.queue_of(segment);
        let at = queue.iter().position(|&other| other == segment);
        queue.remove(at.expect("a sealed segment is in its queue"));
    }

    /// A segment that was to be emptied holds something still, and is full as before.
    pub(crate) fn give_up_reclaim(&mut self, segment: u32) {
        self.go_on(segment, SegmentState::Reclaiming, SegmentState::Sealed);
        self.queue_of(segment).push_back(segment);
    }

    /// A segment is empty: it is free when a checkpoint is durable that does not name it.
    pub(crate) fn release(&mut self, segment: u32) {
        self.go_on(segment, SegmentState::Reclaiming, SegmentState::Released);
        assert!(self.segment(segment).is_dead(), "a released segment holds nothing");
        self.released += 1;
    }

    fn queue_of(&mut self, segment: u32) -> &mut VecDeque<u32> {
        &mut self.sealed[self.segments[segment as usize].stream as usize]
    }

    fn go_on(&mut self, segment: u32, from: SegmentState, to: SegmentState) {
        let state = &mut self.segments[segment as usize].state;
        assert_eq!(*state, from, "segment {segment} is to be {to:?}");
        *state = to;
        self.note_change(segment);
    }

    /// A checkpoint that does not name `segment` is durable.
    pub(crate) fn free_released(&mut self, segment: u32) {
        let s = &mut self.segments[segment as usize];
        assert_eq!(s.state, SegmentState::Released);
        s.state = SegmentState::Free;
        self.released -= 1;
        self.free.push_back(segment);
        // The table's item says "not used" in both states: nothing changed for the checkpoint.
    }

    /// A block of a published record becomes the current copy.
    pub(crate) fn place(&mut self, position: Position, crc: u32, dirty: bool) {
        let segment = self.geo.segment_of(position);
        let s = &mut self.segments[segment as usize];
        assert!(self.marks.set_live(position), "position {position} was not live");
        self.marks.set_crc(position, crc);
        s.live += 1;
        self.live_blocks += 1;
        if dirty && self.marks.set_dirty(position) {
            s.dirty += 1;
            self.dirty_blocks += 1;
        }
        self.note_change(segment);
    }

    /// The copy at `position` is superseded or dropped; tells whether it was dirty.
    pub(crate) fn kill(&mut self, position: Position) -> bool {
        let segment = self.geo.segment_of(position);
        let was_dirty = self.clean(position);
        assert!(self.marks.clear_live(position), "position {position} was live");
        self.marks.clear_refs(position);
        self.segments[segment as usize].live -= 1;
        self.live_blocks -= 1;
        self.note_change(segment);
        was_dirty
    }

    /// The copy at `position` is superseded, but a group still needs it: it stays dirty where it
    /// is.
    pub(crate) fn freeze(&mut self, position: Position) {
        let segment = self.geo.segment_of(position);
        assert!(self.marks.clear_live(position), "position {position} was live");
        self.marks.clear_refs(position);
        self.segments[segment as usize].live -= 1;
        self.live_blocks -= 1;
        self.note_change(segment);
    }

    /// The copy at `position` is in the backend; tells whether it was dirty before.
    pub(crate) fn clean(&mut self, position: Position) -> bool {
        let was_dirty = self.marks.clear_dirty(position);
        if was_dirty {
            let segment = self.geo.segment_of(position);
            self.segments[segment as usize].dirty -= 1;
            self.dirty_blocks -= 1;
            if !mutated!(CleaningNotNoted) {
                self.note_change(segment);
            }
        }
        was_dirty
    }

    /// The life of the segment that `position` is in: another one means that another block stands
    /// there.
    pub(crate) fn life_of(&self, position: Position) -> u64 {
        self.segments[self.geo.segment_of(position) as usize].life
    }

    /// Where a position stands in the order of its stream: life of the segment, and block in it.
    pub(crate) fn place_of(&self, position: Position) -> (u64, u32) {
        (self.life_of(position), position - self.geo.segment_block(self.geo.segment_of(position)))
    }

    pub(crate) fn pin(&mut self, position: Position) {
        let segment = self.geo.segment_of(position);
        self.segments[segment as usize].pins += 1;
    }

    pub(crate) fn unpin(&mut self, position: Position) {
        let segment = self.geo.segment_of(position);
        self.segments[segment as usize].pins -= 1;
    }

    pub(crate) fn set_summary_blocks(&mut self, segment: u32, blocks: u32) {
        self.segments[segment as usize].summary_blocks = blocks as u16;
        self.note_change(segment);
    }

    fn note_change(&mut self, segment: u32) {
        let page = (segment / self.geo.segments_per_page()) as usize;
        for bits in &mut self.changed {
            bits[page / 64] |= 1 << (page % 64);
        }
    }

    /// Pages of the segment table that must be written to `slot`, which counts as done from now on.
    pub(crate) fn take_changed_pages(&mut self, slot: usize) -> Vec<u32> {
        let pages = self.geo.segment_pages();
        let bits = &mut self.changed[slot];
        let list = (0..pages).filter(|&p| bits[p as usize / 64] >> (p % 64) & 1 == 1).collect();
        bits.fill(0);
        list
    }

    /// Segments described by a page of the table.
    pub(crate) fn segments_of_page(&self, page: u32) -> std::ops::Range<u32> {
        let per_page = self.geo.segments_per_page();
        page * per_page..((page + 1) * per_page).min(self.geo.segments)
    }

    /// Data blocks that fit into the device beside what streams and reclaim need, all told.
    pub(crate) fn dirty_blocks_max(&self) -> u64 {
        let usable = u64::from(self.geo.segments.saturating_sub(RESERVED_SEGMENTS));
        usable * u64::from(self.geo.segment_blocks) * 3 / 4
    }
}

/// Segments that are no room for dirty data: three open ones, reclaim's targets, and what waits for
/// a checkpoint.
pub(crate) const RESERVED_SEGMENTS: u32 = 12;
/// Free segments that the read cache leaves to the log.
pub(crate) const RESERVE_READ_CACHE: u32 = 5;
/// Free segments that new writes leave to reclaim's moves.
pub(crate) const RESERVE_WRITES: u32 = 2;
/// "None" of an open segment.
pub(crate) const NONE: u32 = NO_SEGMENT;
