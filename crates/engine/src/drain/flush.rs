//! The backend's flush: what it covers is in the image for good.

use crate::api::{BackendOp, IoError, Mode, Nanos, VolumeId};
use crate::base::flight::Io;
use crate::drain::Drain;
use crate::ground::Ground;

impl Drain {
    /// Sends a backend flush where drained objects or direct writes wait for one.
    pub(crate) fn flush_step(&mut self, ground: &mut Ground, now: Nanos) {
        for id in ground.places() {
            let Some(volume) = ground.get_mut(id) else { continue };
            let part = self.volumes.of_mut(id);
            let wanted = !part.unflushed.is_empty() || volume.backend().wants_flush();
            if volume.backend().is_flushing() || !wanted || !volume.backend().may_send(now) {
                continue;
            }
            let covers = volume.backend_mut().begin_flush();
            std::mem::swap(&mut part.flushing, &mut part.unflushed);
            ground.backend(Io::DrainFlush { volume: id, covers }, id, BackendOp::Flush);
        }
    }

    /// A flush has completed, or failed.
    pub(crate) fn flush_done(
        &mut self,
        ground: &mut Ground,
        now: Nanos,
        (id, covers): (VolumeId, u64),
        result: Result<(), IoError>,
    ) {
        ground.note_backend_result(now, id, result);
        let volume = ground.volume_mut(id);
        let logged = volume.mode() == Mode::WriteBack;
        volume.backend_mut().end_flush(covers, result.is_ok(), logged);
        if result.is_err() {
            self.distrust(ground, id);
        }
        let mut flushed = std::mem::take(&mut self.volumes.of_mut(id).flushing);
        for d in flushed.drain(..) {
            self.finish_flushed(ground, d, result.is_ok());
        }
        self.volumes.of_mut(id).flushing = flushed;
        self.update(ground, id);
    }

    /// A backend flush has failed: whatever the backend completed since its last good one may be
    /// gone, and no later flush brings it back (a server that was restarted, a device that has
    /// dropped its cache). What the drain gave it since, also of objects that are half way or not
    /// in this flush, is sent again.
    pub(crate) fn distrust(&mut self, ground: &mut Ground, id: VolumeId) {
        self.distrust_objects(id);
        let mut unflushed = std::mem::take(&mut self.volumes.of_mut(id).unflushed);
        for d in unflushed.drain(..) {
            self.finish(ground, d, false);
        }
        self.volumes.of_mut(id).unflushed = unflushed;
    }

    /// The volume lets go of its backend: what the drain has not brought to the image is dirty
    /// again, as soon as it comes back.
    pub(crate) fn stop(&mut self, ground: &mut Ground, id: VolumeId) {
        self.distrust(ground, id);
        self.give_up_open(ground, id);
    }
}
