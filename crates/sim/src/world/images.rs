//! What becomes of the images: redo is committed, cuts and snapshots are looked at, servers lose what is not flushed.

use super::{Flight, FlightKind, World};
use crate::redo::Commit;
use tidepool_engine::api::IoError;

impl World {
    /// A snapshot is the volume as it was at one moment after it was asked for, without any redo.
    pub(super) fn check_snapshot(&mut self, volume: usize, floor: u64) {
        // After the death of the device everything goes past it, also while a snapshot is being taken.
        let direct = self.vols[volume].goes_direct() || self.disk.dead;
        let writes = |f: &Flight| matches!(f.kind, FlightKind::Write { volume: v, .. } if v == volume);
        if !direct && self.flights.values().any(writes) {
            return self
                .fail(format!("volume {volume}: the image is written while a snapshot of it is taken"));
        }
        if self.may_lose_data() || self.vols[volume].checker.cuts.is_none() {
            return;
        }
        self.cover.hit("snapshot checked");
        if let Err(what) = self.vols[volume].check_snapshot(floor) {
            self.fail(format!("volume {volume}: snapshot: {what}"));
        }
    }

    /// A group is committed: from now on the image and its redo are the volume without the cache.
    pub(crate) fn commit(&mut self, volume: usize, generation: u64, commit: Commit) {
        let uuid = self.uuid;
        if let Err(what) = self.vols[volume].backend.redo.commit(generation, uuid, commit) {
            return self.fail(format!("volume {volume}: {what}"));
        }
        self.cover.hit("group committed");
        if self.rng.permille(300) {
            self.check_cut(volume, false);
        }
    }

    /// Were the cache lost now, the volume would be as it once was.
    pub(crate) fn check_cut(&mut self, volume: usize, whole: bool) {
        if self.may_lose_data() || self.vols[volume].checker.cuts.is_none() {
            return;
        }
        self.cover.hit("cut checked");
        if let Err(what) = self.vols[volume].check_cut(whole) {
            self.fail(format!("volume {volume}: {what}"));
        }
    }

    /// A backend whose flush fails may lose what it has completed since the last one, as a storage server does that
    /// is restarted. Only while nothing went past the cache: clients would read that something is gone.
    pub(super) fn lose_unflushed(&mut self, volume: usize, error: IoError) {
        let id = self.vols[volume].id;
        let status = id.and_then(|id| self.engine.as_ref()?.volume_status(self.now, id));
        let direct = status.is_none_or(|status| status.backend_unflushed);
        let backend = &mut self.vols[volume].backend;
        if backend.durable || direct || error == IoError::Fenced {
            return;
        }
        backend.store.power_loss(&mut self.rng);
        // What is in flight is done again when the server is brought back.
        for flight in self.flights.values_mut() {
            match &mut flight.kind {
                FlightKind::Write { volume: v, applied, .. } if *v == volume => *applied = false,
                _ => {}
            }
        }
        self.cover.hit("unflushed writes lost");
    }

    pub(super) fn note_backend(&mut self, volume: usize, result: Result<(), IoError>) -> Result<(), IoError> {
        if let Err(error) = result {
            self.vols[volume].backend_error = self.next_tick();
            self.cover.hit(if error == IoError::Full { "backend full" } else { "backend error" });
        }
        result
    }
}
