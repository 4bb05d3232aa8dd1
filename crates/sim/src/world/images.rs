//! The images, looked at by the oracle: whether they are the volumes as they once were.

use super::World;
use crate::machine::{Flight, FlightKind};

impl World {
    /// A snapshot is the volume as it was at one moment after it was asked for, without any redo.
    pub(super) fn check_snapshot(&mut self, volume: usize, floor: u64) {
        // After the death of the device everything goes past it, also while a snapshot is being
        // taken.
        let direct = self.vols[volume].goes_direct() || self.machine.disk().is_dead();
        let writes =
            |f: &Flight| matches!(f.kind(), FlightKind::Write { volume: v, .. } if *v == volume);
        if !direct && self.machine.flights().any(writes) {
            return self.fail(format!(
                "volume {volume}: the image is written while a snapshot of it is taken"
            ));
        }
        if self.may_lose_data() || !self.vols[volume].checker.watches_cuts() {
            return;
        }
        self.cover.hit("snapshot checked");
        if let Err(what) = self.vols[volume].check_snapshot(self.machine.backend(volume), floor) {
            self.fail(format!("volume {volume}: snapshot: {what}"));
        }
    }

    /// Were the cache lost now, the volume would be as it once was.
    pub(super) fn check_cut(&mut self, volume: usize, whole: bool) {
        if self.may_lose_data() || !self.vols[volume].checker.watches_cuts() {
            return;
        }
        self.cover.hit("cut checked");
        if let Err(what) = self.vols[volume].check_cut(self.machine.backend(volume), whole) {
            self.fail(format!("volume {volume}: {what}"));
        }
    }

    /// Were the cache lost now, all volumes would be as they once were.
    pub(super) fn check_cuts(&mut self, whole: bool) {
        (0..self.vols.len()).for_each(|v| self.check_cut(v, whole));
    }

    /// The image of a volume that is not in the cache must hold everything.
    pub(super) fn check_image(&mut self, v: usize) {
        self.tick += 2;
        let tick = self.tick;
        let (vol, backend) = (&mut self.vols[v], self.machine.backend(v));
        let mut bytes = [0; tidepool_engine::api::BLOCK_BYTES];
        let mut problem = None;
        for block in vol.checker.touched() {
            // An image may be smaller already than the volume, of which nobody has heard yet that
            // it is.
            if vol.past.is_resizing() && block * bytes.len() as u64 >= backend.size_bytes() {
                continue;
            }
            backend.read(block, &mut bytes);
            if let Err(what) = vol.checker.check_image(block, &bytes, tick) {
                problem = Some(what);
                break;
            }
        }
        if vol.look.is_due() && problem.is_none() {
            problem = vol.checker.end_verify(tick).err();
            vol.look.set_due(false);
            self.distrust(v);
        }
        if let Some(what) = problem {
            self.fail(format!("volume {v}: {what}"));
        }
    }

    /// What was seen is stable, but nothing that comes now is, as long as the device lies.
    pub(super) fn distrust(&mut self, v: usize) {
        if self.machine.disk().lies() {
            self.vols[v].checker.trust_until(self.tick);
        }
    }
}
