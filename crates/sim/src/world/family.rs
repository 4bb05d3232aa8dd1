//! Clones and their parents: the last volume of a run may be the snapshot of which others are
//! clones, and one of those a snapshot that others are clones of.

use super::World;
use super::plan::{Plan, VolumePlan};
use super::volume::Place;
use crate::rng::Rng;
use tidepool_engine::api::{BLOCK_BYTES, ControlError, DrainOrder};

impl Plan {
    /// In some runs, makes the last volume the parent of some others.
    pub(super) fn make_family(&mut self, rng: &mut Rng) {
        if self.volumes.len() < 2 || !rng.permille(400) {
            return;
        }
        let parent = self.volumes.len() - 1;
        let bytes = rng.range(2048..5000) * BLOCK_BYTES as u64;
        for plan in &mut self.volumes[..parent] {
            if rng.permille(250) {
                continue;
            }
            (plan.parent, plan.content_of) = (Some(parent), Some(parent));
            plan.resize(match rng.below(3) {
                0 => bytes,
                1 => bytes / 2 / BLOCK_BYTES as u64 * BLOCK_BYTES as u64,
                _ => bytes + rng.range(1..2000) * BLOCK_BYTES as u64,
            });
            plan.base_bytes = plan.size_bytes.min(bytes);
        }
        let plan = &mut self.volumes[parent];
        plan.resize(bytes);
        plan.base_bytes = bytes;
        plan.make_snapshot();
        self.make_chain(rng, parent);
    }

    /// Sometimes puts a volume between the oldest parent and some of its clones.
    fn make_chain(&mut self, rng: &mut Rng, oldest: usize) {
        let Some(middle) = oldest.checked_sub(1).filter(|&middle| middle > 0 && rng.permille(500))
        else {
            return;
        };
        let plan = &mut self.volumes[middle];
        if plan.parent.is_none() {
            return;
        }
        plan.make_snapshot();
        let bytes = plan.base_bytes;
        for plan in self.volumes[..middle].iter_mut().filter(|plan| plan.parent.is_some()) {
            if rng.permille(600) {
                plan.parent = Some(middle);
                plan.base_bytes = plan.size_bytes.min(bytes);
            }
        }
    }
}

impl VolumePlan {
    fn make_snapshot(&mut self) {
        self.read_only = true;
        self.drain = DrainOrder::Unordered;
        self.reads = 1000;
    }

    fn resize(&mut self, bytes: u64) {
        self.size_bytes = bytes;
        self.hot_bytes = self.hot_bytes.min(bytes);
    }
}

impl World {
    /// Now and then the core is told what the image of a volume that is served had of its own, and
    /// a clone begins to read through its parent.
    pub(super) fn tell_of_images(&mut self) {
        for v in 0..self.vols.len() {
            let told = self.vols[v].told.knows_own();
            let parent =
                self.vols[v].plan.parent.filter(|_| told && !self.vols[v].told.is_linked());
            if told && parent.is_none() || !self.is_served(v) || self.stops.is_shutting_down() {
                continue;
            }
            if parent.is_some_and(|parent| !self.is_served(parent)) || !self.rng.permille(500) {
                continue;
            }
            if let Err(error) = self.tell_of_image(v, parent) {
                return self.fail(format!("volume {v} cannot have what its image has: {error}"));
            }
        }
    }

    fn is_served(&self, v: usize) -> bool {
        self.vols[v].place == Place::Serving && self.machine.id(v).is_some()
    }

    fn tell_of_image(&mut self, v: usize, parent: Option<usize>) -> Result<(), ControlError> {
        let through = parent.map(|parent| self.machine.id(parent));
        let (Some(id), Some(engine)) = (self.machine.id(v), self.machine.engine_mut()) else {
            return Ok(());
        };
        let Some(parent) = parent else {
            engine.set_own(id, self.vols[v].told.own())?;
            self.vols[v].told.set_knows_own();
            self.note("own", v as u64, 0, 0);
            return Ok(());
        };
        let Some(through) = through.flatten() else { return Ok(()) };
        engine.set_parent(id, through)?;
        self.vols[v].told.set_linked();
        let chain =
            self.vols[parent].told.is_linked() || self.vols[v].plan.read_only && self.is_parent(v);
        self.cover.add("clone of a clone", chain.into());
        self.note("link", v as u64, parent as u64, 0);
        Ok(())
    }

    /// Whether a volume is there for clones.
    pub(super) fn is_parent(&self, v: usize) -> bool {
        self.vols.iter().any(|vol| vol.told.is_linked() && vol.plan.parent == Some(v))
    }
}
