//! What is told about the device and its volumes.

use crate::api::{BLOCK_BYTES, Extent, Mode, Nanos, VolumeId};
use crate::blocks::index::{Lookup, OBJECT_BLOCKS, ObjectFlags};
use crate::blocks::ledger::object_of;
use crate::engine::Engine;
use crate::ground::task::Task;
use crate::status::{DeviceStatus, VolumeState, VolumeStatus};

/// What one [`Engine::block_status`] may cost: many stretches may make one extent.
const STATUS_COST_MAX: u64 = 4 * 1024;
/// What a stretch costs beside its cached blocks, of which each costs 1.
const STRETCH_COST: u64 = 4;

impl Engine {
    /// State and counters of a volume.
    pub fn volume_status(&self, now: Nanos, id: VolumeId) -> Option<VolumeStatus> {
        let volume = self.ground.get(id)?;
        let block = BLOCK_BYTES as u64;
        let drain = self.drain.status(id);
        let blocks = volume.ledger().blocks();
        let age = |since: Option<Nanos>| since.map_or(0, |since| now.saturating_sub(since));
        let (exposed_blocks, exposed_since) = match volume.progress().is_grouped() {
            true => (volume.ledger().uncommitted_blocks(), volume.ledger().uncommitted_since()),
            false => (volume.ledger().dirty() + blocks.zero, drain.oldest),
        };
        let full = self.front.has_pending(id) && self.ground.quota_left(id) == 0;
        let backlog =
            volume.mode() != Mode::WriteBack && volume.progress().safe() < volume.backlog();
        let state = match () {
            _ if volume.is_fenced() => VolumeState::Fenced,
            _ if volume.is_failed() => VolumeState::Failed,
            _ if volume.is_copy() => VolumeState::Replica,
            _ if !volume.is_attached() => VolumeState::Detached,
            _ if volume.task() != Task::None || backlog || drain.is_waited_for => {
                VolumeState::Draining
            }
            _ if full => VolumeState::Full,
            _ => VolumeState::Serving,
        };
        Some(VolumeStatus {
            id,
            spec: volume.spec().clone(),
            mode: volume.mode(),
            state,
            dirty: volume.is_dirty() || volume.ledger().dirty() > 0,
            dirty_bytes: volume.ledger().held() * block,
            dirty_zero_bytes: blocks.zero * block,
            dirty_bytes_max: self.ground.dirty_bytes_max(id),
            dirty_age_ns: age(drain.oldest),
            exposed_bytes: exposed_blocks * block,
            exposed_age_ns: age(exposed_since),
            cached_bytes: (blocks.at + volume.ledger().frozen()) * block,
            lost_blocks: blocks.lost,
            sequence: volume.log().published(),
            sequence_drained: volume.progress().drained(),
            backend_error: volume.backend().error(),
            flushes: self.front.flushes(id),
            drain_writes_in_flight: u64::from(drain.writes),
            backend_unflushed: volume.backend().is_dirty(),
            count: *volume.count(),
        })
    }

    /// State and counters of the cache device.
    pub fn device_status(&self) -> DeviceStatus {
        let index: usize = self.ground.volumes().map(|v| v.ledger().index().memory_bytes()).sum();
        let index = index + self.ground.marks().memory_bytes() + self.cache.memory_bytes();
        let frozen: u64 = self.ground.volumes().map(|v| v.ledger().frozen()).sum();
        DeviceStatus {
            volumes_max: self.ground.geo().volume_pages,
            failed: self.ground.is_dead(),
            size_bytes: self.ground.geo().device_blocks * BLOCK_BYTES as u64,
            segment_bytes: u64::from(self.ground.geo().segment_blocks) * BLOCK_BYTES as u64,
            segments: u64::from(self.ground.geo().segments),
            segments_free: u64::from(self.ground.space().free_count()),
            segments_dirty: self.ground.space().segments().filter(|s| s.dirty() > 0).count() as u64,
            dirty_share_bytes: self.ground.quota_of_another(),
            reclaiming: !self.cache.reclaim_is_idle(),
            checkpointing: !self.checkpoint.is_idle(),
            index_bytes: index as u64,
            cached_blocks: self.ground.space().live_blocks() + frozen,
            arena_used_bytes: (self.ground.arena().len_bytes() - self.ground.arena().free_bytes())
                as u64,
            arena_bytes: self.ground.arena().len_bytes() as u64,
            ..self.ground.counters()
        }
    }

    /// What is known about a range, in order: at most `extents_max` stretches are put into `out`,
    /// which is cleared first. They may end before the range does: a call looks at a bounded part
    /// of the index. Returns how much it has looked at, in blocks and nodes of the index.
    pub fn block_status(
        &self,
        id: VolumeId,
        offset: u64,
        len: u64,
        extents_max: usize,
        out: &mut Vec<Extent>,
    ) -> u64 {
        out.clear();
        let Some(volume) = self.ground.get(id) else { return 0 };
        let block = BLOCK_BYTES as u64;
        let end = offset.saturating_add(len).min(volume.spec().size_bytes);
        let mut at = offset;
        if volume.is_refusing() && at < end {
            // Another host may have written what reads as zero here: a client that is told of data
            // reads it, and is told.
            out.push(Extent { len: end - at, cached: false, dirty: false, zero: false });
            return 1;
        }
        let mut cost = 0;
        while at < end && cost < STATUS_COST_MAX {
            let max = (end - at / block * block).div_ceil(block).min(1 << 20) as u32;
            let found = self.ground.find(id, at / block, max);
            let (n, dirty) = match found.lookup() {
                Lookup::At(position) => {
                    let dirty = self.ground.marks().is_dirty(position);
                    let same = (position..position + found.blocks())
                        .take_while(|&p| self.ground.marks().is_dirty(p) == dirty);
                    (same.count() as u32, dirty)
                }
                Lookup::Zero => {
                    let object = object_of(at / block);
                    let last = (u64::from(object) + 1) * OBJECT_BLOCKS as u64;
                    let n = u64::from(found.blocks()).min(last - at / block) as u32;
                    (
                        n,
                        self.ground
                            .volume(found.volume())
                            .ledger()
                            .flags(object)
                            .contains(ObjectFlags::ZERO_DIRTY),
                    )
                }
                _ => (found.blocks(), false),
            };
            let cached = matches!(found.lookup(), Lookup::At(_));
            cost += STRETCH_COST + if cached { u64::from(n) } else { 0 };
            let until = ((at / block + u64::from(n)) * block).min(end);
            let extent = Extent {
                len: until - at,
                dirty,
                zero: found.lookup() == Lookup::Zero || found.is_hole(),
                cached: cached || found.lookup() == Lookup::Zero,
            };
            let same = |l: &Extent| {
                (l.dirty, l.zero, l.cached) == (extent.dirty, extent.zero, extent.cached)
            };
            if out.last().is_some_and(same) {
                out.last_mut().expect("there is one").len += extent.len;
            } else if out.len() == extents_max {
                return cost;
            } else {
                out.push(extent);
            }
            at = until;
        }
        cost
    }
}
