//! A volume leaves the device: drained, compared with its image, and forgotten; or given up.

use crate::api::*;
use crate::base::flight::Io;
use crate::base::mem::Buf;
use crate::base::pools::{For, PIECE_BLOCKS};
use crate::blocks::index::Lookup;
use crate::blocks::ledger::object_of;
use crate::engine::Engine;
use crate::format::crc32c;
use crate::ground::task::Task;

/// Transfers of a verification in flight.
const VERIFY_IN_FLIGHT: u32 = 8;

/// Progress of comparing an image with the cache.
#[derive(Debug, Default)]
pub(super) struct Verify {
    /// Whose image; the removals of others wait.
    volume: Option<VolumeId>,
    /// Everything cached before this block has been issued.
    next: u64,
    in_flight: u32,
    finished: bool,
    result: Option<ControlError>,
}

impl Engine {
    /// Drains a volume, compares the image with the cache if asked to, and forgets the volume. New
    /// requests are refused from now on. A parent stays as long as it has clones. Without a backend
    /// only a volume can be forgotten of which nothing is dirty or lost, unverified.
    pub fn remove(&mut self, _now: Nanos, id: VolumeId, verify: bool, control: u64) {
        self.ground.stir();
        let Some(volume) = self.controllable(id, control, true) else { return };
        let needs_backend =
            verify || volume.is_failed() || volume.is_dirty() || volume.ledger().blocks().lost > 0;
        if !volume.is_attached() && needs_backend && !volume.is_copy() {
            let result = Err(ControlError::Detached);
            return self.ground.control_done(control, result);
        }
        if self.is_parent(id) {
            let result = Err(ControlError::IsParent);
            return self.ground.control_done(control, result);
        }
        if self.ground.volume(id).copy().is_some() {
            let result = Err(ControlError::Paired);
            return self.ground.control_done(control, result);
        }
        self.ground.withdraw_room(id);
        let volume = self.ground.volume_mut(id);
        volume.close();
        volume.progress_mut().want(u64::MAX);
        volume.begin(Task::Remove { control, verify });
    }

    /// Forgets a volume that has no backend, with everything that the cache holds of it, dirty or
    /// lost. Until [`Effect::ControlDone`] a crash may bring it back as it was.
    pub fn give_up(&mut self, now: Nanos, id: VolumeId, control: u64) {
        self.ground.stir();
        if self.ground.get(id).is_some_and(|v| v.is_copy()) {
            // Another host's: nothing here is the only copy.
            return self.remove(now, id, false, control);
        }
        let is_parent = self.is_parent(id);
        let Some(volume) = self.controllable(id, control, true) else { return };
        let error = match &volume {
            v if v.is_attached() => Some(ControlError::Attached),
            _ if is_parent => Some(ControlError::IsParent),
            _ => None,
        };
        if let Some(error) = error {
            return self.ground.control_done(control, Err(error));
        }
        let volume = self.ground.volume_mut(id);
        volume.close();
        volume.begin(Task::GiveUp { control });
    }

    pub(super) fn pump_remove(&mut self, now: Nanos, id: VolumeId, control: u64, verify: bool) {
        if self.control.verify.volume == Some(id) && self.control.verify.in_flight > 0 {
            if !self.ground.volume(id).is_fenced() && self.is_quiet(now, id) {
                self.pump_verify(id);
            }
            return;
        }
        if self.ground.volume(id).is_fenced() {
            return self.end_remove(id, control, Err(ControlError::Backend(IoError::Fenced)));
        }
        if self.is_stuck(id) {
            let error = self.ground.volume(id).loss().unwrap_or(ControlError::Failed);
            return self.end_remove(id, control, Err(error));
        }
        if self.ground.volume(id).is_copy() && !self.empty_replica(id) {
            return;
        }
        if !self.front.is_answered(id) || !self.is_quiet(now, id) {
            return;
        }
        if let Some(error) = self.ground.volume(id).loss() {
            return self.end_remove(id, control, Err(error));
        }
        if verify {
            match self.control.verify.volume {
                None => self.control.verify = Verify { volume: Some(id), ..Verify::default() },
                Some(other) if other != id => return,
                Some(_) => {}
            }
            if let Some(error) = self.control.verify.result {
                return self.end_remove(id, control, Err(error));
            }
            if !self.control.verify.finished {
                return self.pump_verify(id);
            }
        }
        if self.backend_is_told(now, id) {
            self.end_remove(id, control, Ok(()));
        }
    }

    pub(super) fn pump_give_up(&mut self, now: Nanos, id: VolumeId, control: u64) {
        if self.front.is_answered(id) && self.is_still(now, id) {
            // What reads as zero may be all that the cache has of a place.
            self.ground.budget_mut().note_extents_changed();
            self.end_remove(id, control, Ok(()));
        }
    }

    /// Whether the image can do without the cache: all that was written is on its stable media, and
    /// it does not name a cache device that failed.
    fn backend_is_told(&mut self, now: Nanos, id: VolumeId) -> bool {
        let dead = self.ground.is_dead();
        let volume = self.ground.volume_mut(id);
        if !volume.is_attached() {
            return true; // Nothing of it is dirty: the image lacks nothing, whatever its record says.
        }
        if dead && !volume.backend().is_disowned() {
            self.disown(now, id);
            return false;
        }
        if volume.backend().is_dirty() && !volume.backend().wants_flush() {
            volume.backend_mut().want_flush();
            self.ground.stir();
        }
        let volume = self.ground.volume(id);
        !volume.backend().is_flushing() && !volume.backend().wants_flush()
    }

    fn end_remove(&mut self, id: VolumeId, control: u64, result: Result<(), ControlError>) {
        if self.control.verify.volume == Some(id) {
            self.control.verify = Verify::default();
            self.ground.stir(); // Others may be waiting for their turn.
        }
        if result.is_err() {
            let volume = self.ground.volume_mut(id);
            volume.open_again();
            volume.progress_mut().want_only(0);
            self.ground.control_done(control, result);
            return;
        }
        let blocks = self.ground.volume(id).blocks();
        self.ground.forget_blocks(id, 0, blocks);
        self.forget_volume(id);
        // The driver has the volume under its number until it is told.
        self.control.note_leaving(control, id);
        self.ground.count_quotas();
        self.cache.forget_evicted();
        // With the device gone nothing names the volume any more, and the backend has everything.
        self.persist_or(control, Ok(()));
    }

    /// Reads the image where the cache has blocks and compares checksums.
    fn pump_verify(&mut self, id: VolumeId) {
        while self.control.verify.in_flight < VERIFY_IN_FLIGHT
            && self.control.verify.result.is_none()
        {
            let Some((block, blocks)) = self.next_to_verify(id) else {
                self.control.verify.finished = self.control.verify.in_flight == 0;
                if self.control.verify.finished {
                    self.ground.stir();
                }
                return;
            };
            let Some(buf) = self.ground.pools_mut().take(For::Drain) else { return };
            self.control.verify.next = block + u64::from(blocks);
            self.control.verify.in_flight += 1;
            let part = buf.slice(0, blocks as usize * BLOCK_BYTES);
            let offset = block * BLOCK_BYTES as u64;
            self.ground.backend(
                Io::Verify { volume: id, block, blocks, buf },
                id,
                BackendOp::Read { offset, buf: part },
            );
        }
    }

    /// The next stretch of cached blocks that is to be verified.
    fn next_to_verify(&self, id: VolumeId) -> Option<(u64, u32)> {
        let next = self.control.verify.next;
        let index = self.ground.get(id)?.ledger().index();
        let mut runs = index.objects(object_of(next)).flat_map(|object| index.runs(object));
        let is_left = |&(block, n, found): &(u64, u32, Lookup)| {
            matches!(found, Lookup::At(_)) && block + u64::from(n) > next
        };
        let (block, n, _) = runs.find(is_left)?;
        let first = block.max(next);
        let left = n - (first - block) as u32;
        Some((first, left.min(PIECE_BLOCKS as u32)))
    }

    pub(crate) fn verify_done(
        &mut self,
        now: Nanos,
        id: VolumeId,
        (block, blocks): (u64, u32),
        buf: Buf,
        result: Result<(), IoError>,
    ) {
        self.ground.note_backend_result(now, id, result);
        self.control.verify.in_flight -= 1;
        if let Err(error) = result {
            self.control.verify.result = Some(ControlError::Backend(error));
        } else {
            for i in 0..blocks as usize {
                let Lookup::At(position) =
                    self.ground.volume(id).ledger().index().lookup(block + i as u64)
                else {
                    continue;
                };
                let bytes = self.ground.bytes(buf.slice(i * BLOCK_BYTES, BLOCK_BYTES));
                if crc32c(bytes) != self.ground.marks().crc(position) {
                    let byte = (block + i as u64) * BLOCK_BYTES as u64;
                    self.control.verify.result = Some(ControlError::Differs(byte));
                    break;
                }
            }
        }
        self.ground.pools_mut().give(For::Drain, buf);
    }
}
