//! Direct changes: past the cache to the backend, after cached copies were made void.

use crate::api::{BLOCK_BYTES, BackendOp, IoError, Mode, Nanos, Op, RequestError};
use crate::base::consequences::Consequence;
use crate::base::flight::{Io, OpId};
use crate::base::mutation::mutated;
use crate::format::EntryKind;
use crate::front::Front;
use crate::front::op::{ClientOp, Part, Stage};
use crate::ground::Ground;

/// What a direct change is to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Into the log, as other changes.
    Log,
    /// It waits for something.
    Wait,
    /// To the backend.
    Backend,
}

impl Front {
    /// A direct change whose blocks are whole: void cached copies, then the backend. True when it
    /// is no longer parked.
    pub(super) fn advance_direct(&mut self, ground: &mut Ground, now: Nanos, id: OpId) -> bool {
        match self.way(ground, now, id) {
            Way::Wait => return false,
            Way::Log => {
                self.ops[id].direct = false;
                self.enter_log(id);
                return true;
            }
            Way::Backend => {}
        }
        if self.has_to_invalidate(ground, id) {
            self.enter_log(id);
            return true;
        }
        self.send_direct(ground, id);
        true
    }

    fn way(&self, ground: &mut Ground, now: Nanos, id: OpId) -> Way {
        let op = &self.ops[id];
        let vid = op.request.volume;
        let (first, end) = op.range();
        let dead = ground.is_dead();
        if !dead && !ground.volume(vid).goes_direct() {
            // The mode has changed while it waited: in front of a log that goes on it might wait
            // for ever.
            return Way::Log;
        }
        if !dead && ground.has_lost(vid, first, end) {
            // The image holds something older. Were the write to fail on its way there, that would
            // be read: the log takes the place of what is lost at once, and the drain brings it to
            // the image.
            return Way::Log;
        }
        let has_redo = ground.volume(vid).has_redo() && !mutated!(DirectBesideRedo);
        if has_redo || ground.has_dirty(vid, first, end) {
            // A redo that is kept would take the image back behind this change if it were needed.
            let volume = ground.volume_mut(vid);
            let published = volume.log().published();
            volume.progress_mut().want(published);
            return Way::Wait;
        }
        let volume = ground.volume(vid);
        if !volume.backend().may_send(now) || ground.is_at_last_checkpoint() {
            return Way::Wait; // After the last flush of a shutdown nothing more is sent, nor answered.
        }
        if dead && !volume.backend().is_disowned() {
            ground.tell(Consequence::Disown(vid));
            return Way::Wait;
        }
        if volume.log().durable() < volume.log().published() && !dead {
            // The backend must not get ahead of what a power loss would leave in the log.
            ground.log_mut().want_stable();
            return Way::Wait;
        }
        Way::Backend
    }

    /// Whether something is known of the blocks that a record has to make void first. Where no
    /// record can be, it is forgotten.
    fn has_to_invalidate(&self, ground: &mut Ground, id: OpId) -> bool {
        let op = &self.ops[id];
        let vid = op.request.volume;
        let (first, end) = op.range();
        let overtaken = ground.overtake(vid, first, end - first);
        let volume = ground.volume(vid);
        let forgotten = volume.may_remember(ground.checkpoints().durable());
        // The peer may still hold what we have evicted.
        let copied = volume.copy().is_some() && !mutated!(PeerNotTold);
        let known = overtaken > 0 || forgotten || copied || ground.is_known(vid, first, end);
        if op.invalidated || !known {
            return false;
        }
        if ground.is_dead() {
            ground.forget_blocks(vid, first, end - first);
            return false;
        }
        true
    }

    fn send_direct(&mut self, ground: &mut Ground, id: OpId) {
        self.ops[id].stage = Stage::Direct;
        self.volumes.of_mut(self.ops[id].request.volume).direct_in_flight += 1;
        // The parts are those of the change itself now, not of its invalidation.
        let op = ClientOp { direct: false, ..self.ops[id] };
        let block = BLOCK_BYTES as u64;
        if matches!(op.request.op, Op::Write { .. }) {
            let buf = op.request.buf.expect("a write has a buffer");
            return self.direct_io(
                ground,
                id,
                BackendOp::Write { offset: op.first_block * block, buf },
            );
        }
        for part in (0..).map_while(|n| op.part(n)) {
            let op = match part {
                Part::Data(at, buf) => BackendOp::Write { offset: at * block, buf },
                Part::Range(EntryKind::WriteZeroes, at, len) => {
                    BackendOp::WriteZeroes { offset: at * block, len: u64::from(len) * block }
                }
                Part::Range(_, at, len) => {
                    BackendOp::Discard { offset: at * block, len: u64::from(len) * block }
                }
            };
            self.direct_io(ground, id, op);
        }
    }

    fn direct_io(&mut self, ground: &mut Ground, id: OpId, op: BackendOp) {
        let vid = self.ops[id].request.volume;
        self.ops[id].waiting += 1;
        ground.volume_mut(vid).count_mut().bypass_mode_blocks += self.ops[id].blocks;
        ground.backend(Io::Direct { op: id }, vid, op);
    }

    /// The backend has answered a part of a direct change.
    pub(crate) fn direct_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        id: OpId,
        result: Result<(), IoError>,
    ) {
        let op = &mut self.ops[id];
        let vid = op.request.volume;
        ground.note_backend_result(now, vid, result);
        op.waiting -= 1;
        if let Err(error) = result {
            op.error = Some(RequestError::Io);
            if error == IoError::Full {
                op.barrier = u64::MAX; // Marks that it is to be tried again.
            }
        }
        if op.waiting > 0 {
            return;
        }
        let full = std::mem::replace(&mut op.barrier, 0) == u64::MAX;
        self.volumes.of_mut(vid).direct_in_flight -= 1;
        ground.volume_mut(vid).backend_mut().note_written();
        if full {
            // A full backend makes writes wait; it does not fail them.
            op.error = None;
            op.stage = Stage::Whole;
            return self.park(ground, id);
        }
        match op.error {
            Some(error) => self.complete(ground, id, Err(error)),
            None if op.durable => self.flush_backend_for(ground, id),
            None => self.complete(ground, id, Ok(())),
        }
    }

    /// Sends the volume's backend flush for an operation (a flush or a FUA change).
    pub(super) fn flush_backend_for(&mut self, ground: &mut Ground, id: OpId) {
        let vid = self.ops[id].request.volume;
        self.ops[id].stage = Stage::Acking;
        let covers = ground.volume(vid).backend().covers();
        ground.backend(Io::DirectFlush { op: id, covers }, vid, BackendOp::Flush);
    }

    /// The backend has answered a flush that an operation has asked for. Tells whether what the
    /// drain has sent is to be sent again.
    pub(crate) fn note_flush(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        (id, covers): (OpId, u64),
        result: Result<(), IoError>,
    ) -> bool {
        let vid = self.ops[id].request.volume;
        ground.note_backend_result(now, vid, result);
        let volume = ground.volume_mut(vid);
        let logged = volume.mode() == Mode::WriteBack;
        match result {
            Ok(()) => volume.backend_mut().note_flushed(covers),
            Err(_) => volume.backend_mut().note_flush_failed(logged),
        }
        result.is_err()
    }

    /// Goes on with an operation whose flush the backend has answered.
    pub(crate) fn flush_done(
        &mut self,
        ground: &mut Ground,
        id: OpId,
        result: Result<(), IoError>,
    ) {
        let op = &self.ops[id];
        let (vid, asked) = (op.request.volume, op.request.op == Op::Flush);
        let logged = !asked && !op.direct;
        if result.is_ok() && logged && !self.has_copy(ground, id) {
            return; // The peer has gone meanwhile.
        }
        // The client that flushes is told of a flush of ours that failed before, once.
        let lost = asked && ground.volume_mut(vid).backend_mut().take_lost();
        let result =
            if lost { Err(RequestError::Io) } else { result.map_err(|_| RequestError::Io) };
        self.complete(ground, id, result);
    }
}
