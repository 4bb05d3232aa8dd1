//! What must hold at any time, whatever happens.

use super::World;
use super::plan::S;
use super::volume::{Place, Sent};
use tidepool_engine::api::*;
use tidepool_engine::status::{DeviceStatus, VolumeState, VolumeStatus};

/// A request may wait this long while its backend works.
const WAIT_NS: Nanos = 120 * S;

impl World {
    /// What must hold at any time.
    pub(super) fn check_invariants(&mut self) {
        let Some(engine) = self.machine.engine() else { return };
        let (device, now) = (engine.device_status(), self.clock.now());
        let all: Vec<VolumeStatus> =
            engine.volumes().iter().filter_map(|(id, _)| engine.volume_status(now, *id)).collect();
        let sound = sums_up(&device, &all).and_then(|()| self.watch.check_ghost(&all));
        if let Err(what) = sound {
            return self.fail(what);
        }
        for s in &all {
            if let Err(what) = self.check_volume(s, device.failed) {
                return self.fail(format!("volume {}: {what}", s.spec.name));
            }
        }
        self.check_waits();
        self.check_extents();
    }

    /// What the core says of a volume makes sense, and has a reason.
    fn check_volume(&mut self, s: &VolumeStatus, device_failed: bool) -> Result<(), &'static str> {
        if s.dirty_bytes > s.cached_bytes {
            return Err("more is dirty than cached");
        }
        if s.sequence_drained > s.sequence {
            return Err("drained beyond its log");
        }
        if s.lost_blocks > 0 && device_failed {
            self.cover.hit("block lost on a dead device");
            if s.state != VolumeState::Failed && s.state != VolumeState::Fenced {
                return Err("serves without a block that it lost");
            }
        }
        if s.lost_blocks > 0 && !self.may_lose_data() {
            return Err("a block is lost without a fault");
        }
        if s.state == VolumeState::Failed && !self.may_lose_data() {
            return Err("failed without a fault");
        }
        Ok(())
    }

    /// A volume whose log is drained has no dirty blocks.
    pub(super) fn check_drained(&mut self, v: usize) {
        let status = self.machine.status(v, self.clock.now());
        if status.as_ref().is_some_and(|s| s.dirty_bytes > 0 && s.sequence_drained == s.sequence) {
            self.fail(format!(
                "volume {v}: all of its log is drained, but not all blocks: {status:?}"
            ));
        }
    }

    /// A request may wait for its own backend, but not for that of another volume.
    fn check_waits(&mut self) {
        let now = self.clock.now();
        let waits = |s: &Sent| {
            let trouble_at = self.vols[s.volume].excuses.trouble_at();
            s.sent_at + WAIT_NS < now && trouble_at.saturating_add(WAIT_NS) < now
        };
        // Quotas add up to no more than the cache holds: whatever the others hold, there is room.
        let waiting =
            self.clients.sent().find(|(_, s)| waits(s)).map(|(id, s)| (id, s.op, s.volume));
        if let Some((id, op, v)) = waiting {
            self.fail(format!("request {id} ({op:?}) of volume {v} waits forever"));
        }
    }

    /// What the core tells about blocks must fit the guarantees, too.
    fn check_extents(&mut self) {
        let v = self.rng.below(self.vols.len() as u64) as usize;
        let vol = &self.vols[v];
        let (Some(id), Some(engine), Place::Serving) =
            (self.machine.id(v), self.machine.engine(), vol.place)
        else {
            return;
        };
        let block = BLOCK_BYTES as u64;
        let from = self.rng.below(vol.plan.size_bytes.div_ceil(block)) * block;
        let mut extents = Vec::new();
        engine.block_status(id, from, vol.plan.size_bytes - from, 16, &mut extents);
        let mut at = from;
        for extent in &extents {
            let sectors = at / SECTOR_BYTES as u64..(at + extent.len) / SECTOR_BYTES as u64;
            if extent.zero && !vol.checker.may_be_zero(sectors) {
                return self
                    .fail(format!("volume {v}: {} bytes at {at} are told to be zero", extent.len));
            }
            at += extent.len;
        }
        if extents.is_empty() || at > vol.plan.size_bytes {
            self.fail(format!("volume {v}: the extents from {from} on end at {at}"));
        }
    }

    /// A shutdown that was given time has flushed every backend that works.
    pub(super) fn check_flushed(&mut self) {
        let now = self.clock.now();
        for v in 0..self.vols.len() {
            // One that is attached while the core stops is none of them.
            if self.vols[v].place != Place::Serving {
                continue;
            }
            let status = self.machine.status(v, now);
            let Some(status) = status.filter(|s| s.backend_unflushed) else { continue };
            let trouble_at = self.vols[v].excuses.trouble_at();
            let works = trouble_at.saturating_add(WAIT_NS) < now || trouble_at == 0;
            if works && self.plan.engine.stop_flush_ns_max >= 5 * S {
                return self.fail(format!(
                    "volume {}: the shutdown has not flushed its backend",
                    status.spec.name
                ));
            }
        }
    }
}

/// What the volumes have is what the device has, and the quotas fit in it.
fn sums_up(device: &DeviceStatus, all: &[VolumeStatus]) -> Result<(), String> {
    let cached: u64 = all.iter().map(|s| s.cached_bytes).sum();
    if cached != device.cached_blocks * BLOCK_BYTES as u64 {
        let blocks = device.cached_blocks;
        return Err(format!("volumes have {cached} bytes cached, but the device {blocks} blocks"));
    }
    let usable = device.segments.saturating_sub(12) * device.segment_bytes;
    if all.iter().map(|s| s.dirty_bytes_max).sum::<u64>() > usable * 3 / 4 + 4096 * all.len() as u64
    {
        return Err("the quotas add up to more than the cache holds".into());
    }
    Ok(())
}
