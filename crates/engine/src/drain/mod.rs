//! The drain: dirty blocks and zeroes go to the backend, oldest object first.
//!
//! Within and across objects the newest content wins, and the image between two drains is no point
//! of the volume's history; where the drain is grouped, only what a redo beside the image holds
//! already goes there (see `group`). Correctness rests on three rules: an object is drained by one
//! drain at a time; a block becomes clean only when the backend's flush has covered it and the
//! index still has the very copy that was written; an object that changes meanwhile is queued
//! again.
//!
//! | file | what it is about |
//! |---|---|
//! | `flush` | when the backend is flushed, and what that makes clean |
//! | `frame` | the redo of a group, written beside the image |
//! | `group` | groups: when one is cut, committed and trimmed |
//! | `object` | An object on its way to the backend |
//! | `piece` | parts of objects: read back, verified, written to the image |
//! | `queue` | The queue of objects with something to drain, the oldest first |

mod flush;
mod frame;
mod group;
mod object;
mod piece;
mod queue;

pub(crate) use group::GROUP_BLOCKS_MAX;

use crate::api::{BLOCK_BYTES, IoError, Mode, Nanos, VolumeId};
use crate::base::consequences::Consequence;
use crate::base::mutation::mutated;
use crate::base::pools::For;
use crate::base::table::Table;
use crate::base::util::Slab;
use crate::blocks::index::ObjectFlags;
use crate::blocks::ledger::{Ledger, dirty_objects};
use crate::blocks::space::Space;
use crate::drain::frame::Frame;
use crate::drain::group::Groups;
use crate::drain::object::{ObjectDrain, Written};
use crate::drain::piece::Piece;
use crate::drain::queue::{DirtyObject, Queue};
use crate::ground::Ground;
use crate::log::stable::{Deferred, Waiting};

/// A dirty object is left alone for this long in write-back: it may be written again.
const DELAY_NS: Nanos = 1_000_000_000;
/// Pieces in flight for one volume while there is no hurry.
const PIECES_RELAXED: usize = 8;
/// Pieces in flight to the image while its volume is being written and the redo has what is
/// committed: the more is dirty, the nearer they come to [`PIECES_RELAXED`].
const PIECES_GENTLE: usize = 1;
/// Blocks that are copied from memory at once; a client waits meanwhile.
const COPIED_BLOCKS_MAX: usize = (1 << 20) / BLOCK_BYTES;
/// Objects of one volume that are being drained or wait for the backend's flush.
const OBJECTS_MAX: usize = 1024;

/// The drains of all volumes.
pub(crate) struct Drain {
    volumes: Table<Part>,
    objects: Slab<ObjectDrain>,
    pieces: Slab<Piece>,
    frames: Slab<Frame>,
    /// Memory of earlier drains.
    spare_written: Vec<Vec<Written>>,
    /// The volume that is the first to be looked at next.
    next: usize,
    /// Nothing more is begun.
    paused: bool,
    /// Blocks that this step has copied from memory.
    copied_blocks: usize,
}

/// The drain of one volume.
#[derive(Default)]
struct Part {
    queue: Queue,
    /// What is committed to the backend in groups; `None` where the drain is unordered.
    groups: Option<Box<Groups>>,
    /// Groups that this generation has committed.
    groups_made: u64,
    /// Objects that are being drained.
    objects: Vec<u32>,
    /// The one of them that has more to issue.
    open: Option<u32>,
    /// Pieces, zeroes and frames in flight.
    in_flight: usize,
    /// Of these, what the backend has been given.
    writes: u32,
    /// Drained objects that wait for the backend's flush.
    unflushed: Vec<u32>,
    flushing: Vec<u32>,
    waiters: Vec<Waiter>,
}

/// A control operation that waits until everything up to a record is drained.
#[derive(Debug, Clone, Copy)]
struct Waiter {
    control: u64,
    sequence: u64,
}

/// What the drain of a volume is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DrainStatus {
    /// Since when something of the volume is dirty.
    pub(crate) oldest: Option<Nanos>,
    /// Somebody waits for the drain.
    pub(crate) is_waited_for: bool,
    /// Writes and zeroes that the backend has been given.
    pub(crate) writes: u32,
}

impl Drain {
    /// So many transfers are in flight at once.
    pub(crate) fn new(transfers: usize) -> Drain {
        Drain {
            volumes: Table::new(),
            objects: Slab::with_capacity(256),
            pieces: Slab::with_capacity(transfers),
            frames: Slab::with_capacity(transfers),
            spare_written: Vec::new(),
            next: 0,
            paused: false,
            copied_blocks: 0,
        }
    }

    /// From now on nothing more is begun, or everything that is due.
    pub(crate) fn pause(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// A volume has come.
    pub(crate) fn add(&mut self, id: VolumeId) {
        self.volumes.add(id);
    }

    /// A volume is gone.
    pub(crate) fn remove(&mut self, id: VolumeId) {
        self.volumes.remove(id);
    }

    /// What is dirty of a volume after a start waits for its drain.
    pub(crate) fn restore(&mut self, ground: &mut Ground, id: VolumeId, now: Nanos) {
        self.add(id);
        let (volume, space) = ground.volume_and_space(id);
        let sequence = volume.progress().drained() + 1;
        for object in dirty_objects(volume.ledger(), space) {
            self.volumes
                .of_mut(id)
                .queue
                .note(volume.ledger_mut(), DirtyObject::since(object, sequence, now));
        }
    }

    /// A volume lets go of its backend: what is dirty stays so, and nothing else is known of its
    /// drain.
    pub(crate) fn let_go(&mut self, id: VolumeId) {
        let part = self.volumes.of_mut(id);
        let mut queue = std::mem::take(&mut part.queue);
        queue.forget_groups();
        *part = Part { queue, ..Part::default() };
    }

    /// Everything of a copy is thrown away.
    pub(crate) fn clear(&mut self, id: VolumeId) {
        self.volumes.of_mut(id).queue.clear();
    }

    /// The record `sequence` has dirtied objects of a volume.
    pub(crate) fn note_dirty(
        &mut self,
        ground: &mut Ground,
        (id, sequence): (VolumeId, u64),
        objects: impl Iterator<Item = u32>,
        now: Nanos,
    ) {
        let volume = ground.volume_mut(id);
        let wait_for = if volume.progress().is_grouped() { sequence } else { 0 };
        let queue = &mut self.volumes.of_mut(id).queue;
        for object in objects {
            queue.note(
                volume.ledger_mut(),
                DirtyObject::since(object, sequence, now).waiting(wait_for),
            );
        }
    }

    /// Something dirty of an object stands at another place now.
    pub(crate) fn note_moved(
        &mut self,
        ground: &mut Ground,
        id: VolumeId,
        object: u32,
        now: Nanos,
    ) {
        let volume = ground.volume_mut(id);
        let queue = &mut self.volumes.of_mut(id).queue;
        let flags = volume.ledger().flags(object);
        let queued = flags.contains(ObjectFlags::QUEUED);
        // A drain under way knows the old position only: it will not make this copy clean.
        if queued && flags.contains(ObjectFlags::DRAINING) {
            queue.again(object);
        }
        if !queued && !mutated!(MovedWhileDrained) {
            let sequence = volume.progress().drained() + 1;
            queue.requeue(volume.ledger_mut(), DirtyObject::since(object, sequence, now));
        }
    }

    /// Another host's image has everything up to the record `sequence` of a volume of which this is
    /// the copy. `is_clean` cleans what there is of an object, and tells whether that is all of it.
    pub(crate) fn drained_elsewhere(
        &mut self,
        ground: &mut Ground,
        (id, sequence): (VolumeId, u64),
        mut is_clean: impl FnMut(&mut Ledger, &mut Space, u32) -> bool,
    ) {
        let (ledger, space) = ground.ledger_and_space(id);
        let queue = &mut self.volumes.of_mut(id).queue;
        queue.drain_until(ledger, sequence, |ledger, object| is_clean(ledger, space, object));
    }

    /// Starts as much of the drain as is due.
    pub(crate) fn step(&mut self, ground: &mut Ground, now: Nanos) {
        if self.paused {
            return;
        }
        self.copied_blocks = 0;
        // Stopped backends keep what they have: some buffers are for volumes that have none.
        let attached = ground.ids().filter(|&id| ground.volume(id).is_attached());
        let without = attached.filter(|&id| self.volumes.of(id).in_flight == 0).count();
        let reserved = without.min(ground.config().drain_buffers / 2);
        let volumes = ground.places_count();
        for i in 0..volumes {
            let id = VolumeId(((self.next + i) % volumes) as u16);
            if ground.get(id).is_some() {
                self.step_volume(ground, now, id, reserved);
            }
        }
        self.next = (self.next + 1) % volumes.max(1);
    }

    /// `reserved`: buffers that are only for volumes with nothing in flight.
    fn step_volume(&mut self, ground: &mut Ground, now: Nanos, id: VolumeId, reserved: usize) {
        loop {
            let volume = ground.volume(id);
            let idle = !volume.is_attached() || volume.is_leaving() || volume.spec().read_only;
            // What is bad would be found bad again.
            if idle || !volume.backend().may_send(now) || ground.bad().are_of(id) {
                return;
            }
            let part = self.volumes.of(id);
            let in_flight = part.in_flight;
            // What is in flight comes back, and the next step goes on.
            if in_flight > 0 && self.copied_blocks >= COPIED_BLOCKS_MAX {
                return;
            }
            let urgent = self.is_urgent(ground, id);
            // A volume may use as many buffers as are left for the others: a stopped backend cannot
            // take them all.
            let reserved = if in_flight > 0 { reserved } else { 0 };
            let left = ground.pools().left(For::Drain).saturating_sub(reserved);
            let limit = if urgent { left } else { PIECES_RELAXED };
            if in_flight >= 4 && in_flight >= limit || left == 0 {
                return;
            }
            // The redo first: nothing else can go to the image before it is committed. Not where
            // the backend is full: what is committed may take no room there, and its redo can be
            // removed then.
            let full = volume.backend().error() == Some(IoError::Full);
            let (open, may_start) = (part.open, part.objects.len() < OBJECTS_MAX);
            let gentle = !urgent && in_flight >= pieces_gentle(ground, id);
            let more = !full && self.redo_next(ground, id)
                || !gentle
                    && match open {
                        Some(drain) => self.issue_next(ground, id, drain),
                        None => may_start && self.start_object(ground, now, id, urgent),
                    }
                || full && self.redo_next(ground, id);
            if !more {
                return;
            }
            if in_flight == 0 {
                ground.volume_mut(id).backend_mut().begin_drain(now);
            }
        }
    }

    /// Whether the volume's drain is to run as fast as it can.
    fn is_urgent(&self, ground: &Ground, id: VolumeId) -> bool {
        let volume = ground.volume(id);
        volume.mode() != Mode::WriteBack
            || volume.is_busy()
            || volume.progress().wanted() > volume.progress().drained()
            || volume.ledger().held() * BLOCK_BYTES as u64 > ground.dirty_bytes_max(id) / 2
            || self.redo_is_long(ground, id)
            || volume.copy().is_some_and(|copy| copy.is_short())
            || ground.space().dirty_blocks() > ground.space().dirty_blocks_max() / 2
            || ground.budget().extents() > ground.geo().extents_max() / 4
            || ground.is_dead()
    }

    /// Only what a power loss would leave in the log may reach the backend: else the image could
    /// hold a write whose predecessors are lost.
    fn when_stable(&mut self, ground: &mut Ground, id: VolumeId, part: Deferred) {
        let waiting = Waiting::new(id, ground.volume(id).log().published(), part);
        if !ground.log().is_stable() && !ground.is_dead() {
            ground.log_mut().defer(waiting);
            // The part that issues syncs may have had its turn already.
            ground.stir();
        } else {
            self.stable(ground, waiting);
        }
    }

    /// Our log has a part of the drain on stable media; so must a copy that could take over.
    pub(crate) fn stable(&mut self, ground: &mut Ground, waiting: Waiting) {
        let part = waiting.part();
        if ground.volume(waiting.volume()).is_leaving() {
            // The host that has the image now may not have this.
            match part {
                Deferred::Piece(index) => self.release_piece(ground, index, false),
                Deferred::Zeroes(drain, ..) => self.returned(ground, drain, false),
                Deferred::Frame(index) => self.give_back_frame(ground, index),
            }
        } else if ground.has_drained_copy(waiting) {
            match part {
                Deferred::Piece(index) => self.send_piece(ground, index),
                Deferred::Zeroes(drain, first, n) => self.send_zeroes(ground, drain, first, n),
                Deferred::Frame(index) => self.send_frame(ground, index),
            }
        }
    }

    /// A control operation is complete when everything up to a record is drained.
    pub(crate) fn wait(&mut self, ground: &mut Ground, id: VolumeId, control: u64, sequence: u64) {
        ground.volume_mut(id).progress_mut().want(sequence);
        self.volumes.of_mut(id).waiters.push(Waiter { control, sequence });
        self.update(ground, id);
    }

    /// Takes out the control operations that wait for the drain.
    pub(crate) fn take_waiters(&mut self, id: VolumeId) -> impl Iterator<Item = u64> + use<> {
        std::mem::take(&mut self.volumes.of_mut(id).waiters)
            .into_iter()
            .map(|waiter| waiter.control)
    }

    /// The device has failed: what the log did not take, from the record after `sequence` on, never
    /// will be drained from it.
    pub(crate) fn wait_no_longer(&mut self, id: VolumeId, sequence: u64) {
        for waiter in &mut self.volumes.of_mut(id).waiters {
            waiter.sequence = waiter.sequence.min(sequence);
        }
    }

    /// Finds out up to which sequence everything is in the backend, and tells those who wait for
    /// it.
    pub(crate) fn update(&mut self, ground: &mut Ground, id: VolumeId) {
        let part = self.volumes.of_mut(id);
        let queued = part.queue.front().map(|d| d.first_sequence);
        let busy = part.objects.iter().map(|&d| self.objects[d].first_sequence()).min();
        let oldest = queued.into_iter().chain(busy).min();
        let volume = ground.volume_mut(id);
        let before = if mutated!(DrainedOneTooFar) { 0 } else { 1 };
        let drained = oldest.map_or(volume.log().published(), |s| s.saturating_sub(before));
        volume.note_drained(drained);
        let drained = volume.progress().drained();
        let result = volume.loss().map_or(Ok(()), Err);
        let done = |waiter: &&Waiter| waiter.sequence <= drained;
        part.waiters
            .iter()
            .filter(done)
            .for_each(|waiter| ground.control_done(waiter.control, result));
        part.waiters.retain(|waiter| waiter.sequence > drained);
        ground.tell(Consequence::Drained(id));
    }

    /// When the drain has something to do next, if nothing else happens.
    pub(crate) fn deadline(&self, ground: &Ground, now: Nanos) -> Option<Nanos> {
        let due = |id: VolumeId| {
            let volume = ground.volume(id);
            if !volume.is_attached() || volume.is_leaving() {
                return None;
            }
            if !volume.backend().may_send(now) {
                return Some(volume.backend().retry_at());
            }
            let next = self.volumes.of(id).queue.next().filter(|_| !volume.progress().is_grouped());
            next.map(|dirty| dirty.since + DELAY_NS)
        };
        let due = ground.ids().filter(|_| !self.paused).filter_map(due);
        due.filter(|&at| at > now).min()
    }

    /// Objects are being drained, or something of the volume is on its way to the backend.
    pub(crate) fn is_in_flight(&self, id: VolumeId) -> bool {
        let part = self.volumes.of(id);
        let groups = part.groups.as_ref().is_some_and(|groups| groups.is_in_flight());
        groups || !part.objects.is_empty() || part.in_flight > 0
    }

    /// No object is being drained.
    pub(crate) fn is_quiet(&self, id: VolumeId) -> bool {
        self.volumes.of(id).objects.is_empty()
    }

    /// An object from `first` on is being drained.
    pub(crate) fn is_draining_from(&self, id: VolumeId, first: u32) -> bool {
        self.volumes.of(id).objects.iter().any(|&d| self.objects[d].object() >= first)
    }

    /// A drained object waits for a flush of the backend.
    pub(crate) fn waits_for_flush(&self, id: VolumeId) -> bool {
        !self.volumes.of(id).unflushed.is_empty()
    }

    pub(crate) fn status(&self, id: VolumeId) -> DrainStatus {
        let part = self.volumes.of(id);
        let drains = part.objects.iter().map(|&d| self.objects[d].since());
        DrainStatus {
            oldest: part.queue.front().map(|d| d.since).into_iter().chain(drains).min(),
            is_waited_for: !part.waiters.is_empty(),
            writes: part.writes,
        }
    }

    /// What was left out of drains is looked at again.
    pub(crate) fn look_again(&mut self, id: VolumeId) {
        self.volumes.of_mut(id).queue.look_again();
    }

    /// The volume has no object from `first` on any more, nor blocks from `end` on.
    pub(crate) fn truncate(&mut self, ground: &mut Ground, id: VolumeId, end: u64, first: u32) {
        let (ledger, space) = ground.ledger_and_space(id);
        ledger.truncate(space, end);
        self.volumes.of_mut(id).queue.truncate(ledger, first);
    }
}

/// Transfers of one volume in flight from which on none to the image is added. What a redo holds is
/// in no hurry to reach the image, and would take from the writes at hand what they need of the
/// backend, and of this machine.
fn pieces_gentle(ground: &Ground, id: VolumeId) -> usize {
    let volume = ground.volume(id);
    if !volume.ledger().is_uncommitted() {
        return PIECES_RELAXED;
    }
    let (dirty, max) = (volume.ledger().held(), ground.dirty_bytes_max(id) / BLOCK_BYTES as u64);
    // Half of what may be dirty is urgent.
    let more = dirty * 2 * (PIECES_RELAXED - PIECES_GENTLE) as u64 / max.max(1);
    (PIECES_GENTLE + more as usize).min(PIECES_RELAXED)
}
