//! Control: volumes come, change and go; what is told about them.

mod copies;
mod detach;
mod failure;
mod mode;
mod pairing;
mod parents;
pub(crate) mod resize;
pub(crate) mod snapshot;
pub(crate) mod volume;

use crate::api::*;
use crate::base::flight::Io;
use crate::base::mem::Buf;
use crate::base::mutation::mutated;
use crate::base::shared::LAST_CHECKPOINT;
use crate::blocks::index::{Lookup, ObjectFlags};
use crate::blocks::ledger::object_of;
use crate::blocks::own::OwnObjects;
use crate::checkpoint::Waiter;
use crate::control::volume::{Task, Volume};
use crate::engine::Engine;
use crate::format::{Stream, crc32c};
use crate::status::{DeviceStatus, VolumeState, VolumeStatus};

/// Transfers of a verification in flight.
const VERIFY_IN_FLIGHT: u32 = 8;

/// What one [`Engine::block_status`] may cost: many stretches may make one extent.
const STATUS_COST_MAX: u64 = 4 * 1024;
/// What a stretch costs beside its cached blocks, of which each costs 1.
const STRETCH_COST: u64 = 4;

/// Why a volume cannot be added or attached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// Bad name.
    #[error("a volume's name has 1 to 64 characters of A-Z a-z 0-9 . _ - @, not {0:?}")]
    Name(String),
    /// Name in use.
    #[error("volume {0} exists already")]
    Exists(String),
    /// No such volume, or it is attached already.
    #[error("there is no detached volume with that number")]
    NotDetached,
    /// Too many.
    #[error("the cache device holds {0} volumes already, which is the most")]
    TooMany(u32),
    /// Size not a multiple of a sector, zero, or beyond what the index can hold.
    #[error(
        "a volume of {0} bytes cannot be served: the size must be a multiple of {SECTOR_BYTES} up to 1 PiB"
    )]
    Size(u64),
    /// The volume has become smaller than what the cache holds dirty.
    #[error("the image has shrunk to {0} bytes, but the cache holds newer data beyond its end")]
    Shrunk(u64),
    /// URI or attachment too long.
    #[error("the backend's {0} is too long")]
    TooLong(&'static str),
    /// The device has failed.
    #[error("the cache device has failed")]
    Device,
    /// The cache cannot hold as much as the owner of a copy was told.
    #[error("the cache has no room for a copy of the volume now")]
    NoRoom,
}

/// What a recovered volume is attached with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attach {
    /// The owner's new generation.
    pub generation: u64,
    /// Size of the image in bytes.
    pub size_bytes: u64,
    /// Mode to start in.
    pub mode: Mode,
    /// In what order dirty data is drained.
    pub drain: DrainOrder,
    /// Dirty quota; 0 for the default share.
    pub dirty_bytes_max: u64,
    /// Serve only reads.
    pub read_only: bool,
    /// See [`VolumeSpec::attachment`].
    pub attachment: Vec<u8>,
    /// There is proof that nobody else has written the image: clean blocks are kept.
    pub keep_clean: bool,
}

impl Attach {
    /// The volume as it was, in the generation that follows.
    pub fn again(spec: &VolumeSpec, keep_clean: bool) -> Attach {
        Attach {
            generation: spec.generation.saturating_add(1),
            size_bytes: spec.size_bytes,
            mode: spec.mode,
            drain: spec.drain,
            dirty_bytes_max: spec.dirty_bytes_max,
            read_only: spec.read_only,
            attachment: spec.attachment.clone(),
            keep_clean,
        }
    }
}

/// Progress of comparing an image with the cache.
#[derive(Debug, Default)]
pub(crate) struct Verify {
    /// Whose image; the removals of others wait.
    volume: Option<VolumeId>,
    /// Everything cached before this block has been issued.
    next: u64,
    in_flight: u32,
    finished: bool,
    result: Option<ControlError>,
}

impl Engine {
    /// All volumes that the device knows, attached or not.
    pub fn volumes(&self) -> Vec<(VolumeId, VolumeSpec)> {
        let all = self.ground.volumes.iter().enumerate();
        all.filter_map(|(i, v)| Some((VolumeId(i as u16), v.as_ref()?.spec.clone()))).collect()
    }

    /// Adds a volume. It is served at once; [`Effect::ControlDone`] tells when it is recorded so that a
    /// restart knows it; before that no request and no other operation may name it. If the device fails instead, the
    /// volume is gone again.
    ///
    /// # Errors
    /// See [`AddError`]; nothing has changed then.
    pub fn add_volume(&mut self, now: Nanos, spec: VolumeSpec, control: u64) -> Result<VolumeId, AddError> {
        check_spec(&spec)?;
        let mut volume = Volume::new(spec);
        volume.attached = true;
        let grouped = volume.spec.drain == DrainOrder::Grouped && volume.mode == Mode::WriteBack;
        let id = self.insert_volume(volume, control)?;
        if grouped {
            self.drain.begin_groups(&mut self.ground, now, id, false);
        }
        Ok(id)
    }

    /// Gives a volume a number; `control` is complete when a restart finds it.
    pub(crate) fn insert_volume(&mut self, volume: Volume, control: u64) -> Result<VolumeId, AddError> {
        if self.ground.base.dead {
            return Err(AddError::Device);
        }
        if self.ground.volumes.iter().flatten().any(|v| v.spec.name == volume.spec.name) {
            return Err(AddError::Exists(volume.spec.name));
        }
        let is_free = |&i: &usize| {
            self.ground.volumes[i].is_none() && self.leaving.iter().all(|&(_, id)| usize::from(id.0) != i)
        };
        let at = (0..self.ground.volumes.len()).find(is_free).unwrap_or(self.ground.volumes.len());
        if at == self.ground.base.geo.volume_pages as usize {
            return Err(AddError::TooMany(self.ground.base.geo.volume_pages));
        }
        if at == self.ground.volumes.len() {
            self.ground.volumes.push(None);
        }
        self.ground.volumes[at] = Some(Box::new(volume));
        self.ground.count_quotas();
        let id = VolumeId(at as u16);
        let published = self.ground.volume(id).log.published();
        self.front.add(id, published);
        self.drain.add(id);
        self.peers.add(id);
        self.ground.base.out.stir();
        let on_failure = Err(ControlError::Device);
        self.checkpoint.wait(Waiter { control, on_failure, added: Some(id) });
        Ok(id)
    }

    /// Gives a recovered volume its backend back, which is used from now on. [`Effect::ControlDone`] tells when
    /// requests may be sent, and is never an error: if the cache device fails before, or has failed already,
    /// what verifies is drained all the same, and the volume goes on past the cache as any other.
    ///
    /// # Errors
    /// See [`AddError`]; nothing has changed then.
    pub fn attach(&mut self, now: Nanos, id: VolumeId, attach: Attach, control: u64) -> Result<(), AddError> {
        let volume = self.ground.volumes.get_mut(id.0 as usize).and_then(Option::as_mut);
        let volume = volume.filter(|v| !v.attached && self.front.is_published(id) && v.task == Task::None);
        let volume = volume.ok_or(AddError::NotDetached)?;
        let spec = VolumeSpec {
            size_bytes: attach.size_bytes,
            mode: attach.mode,
            drain: attach.drain,
            dirty_bytes_max: attach.dirty_bytes_max,
            read_only: attach.read_only,
            generation: attach.generation,
            attachment: attach.attachment,
            ..volume.spec.clone()
        };
        check_spec(&spec)?;
        let blocks = spec.size_bytes.div_ceil(BLOCK_BYTES as u64);
        let old_blocks = volume.blocks();
        if blocks < old_blocks && self.ground.has_dirty(id, blocks, old_blocks) {
            return Err(AddError::Shrunk(spec.size_bytes));
        }
        if blocks < old_blocks {
            self.ground.forget_blocks(id, blocks, old_blocks - blocks);
        }
        let dead = self.ground.base.dead;
        self.ground.withdraw_room(id);
        let volume = self.ground.volume_mut(id);
        volume.mode = if dead { Mode::WriteAround } else { spec.mode };
        volume.own = OwnObjects::none(spec.size_bytes);
        volume.own_known = false;
        volume.spec = spec;
        volume.attached = true;
        volume.degraded = Degraded::No;
        volume.promised = None;
        volume.copy = None;
        volume.backend.attach();
        self.front.attach(id);
        self.ground.count_quotas();
        if !attach.keep_clean && !mutated!(CleanKeptWithoutProof) {
            self.drop_clean(id);
        }
        let volume = self.ground.volume_mut(id);
        let grouped = volume.spec.drain == DrainOrder::Grouped;
        let dirty = volume.is_dirty();
        if grouped && (volume.mode == Mode::WriteBack || dirty && !mutated!(AttachedWithoutGroups)) {
            volume.backlog.extend(volume.log.published());
            self.drain.begin_groups(&mut self.ground, now, id, dirty);
        }
        self.ground.base.out.stir();
        if attach.mode == Mode::Off && !dead {
            self.ground.volume_mut(id).task = Task::Purge { control, attaching: true };
        } else {
            self.persist_or(control, Ok(()));
        }
        Ok(())
    }

    /// Changes the dirty quota (0 for the default share). Where all volumes together were given more than the cache
    /// holds, each has less in proportion; [`VolumeStatus::dirty_bytes_max`] tells what is in force.
    pub fn set_dirty_bytes_max(&mut self, _now: Nanos, id: VolumeId, bytes: u64, control: u64) {
        self.ground.base.out.stir();
        let Some(volume) = self.controllable(id, control, false) else { return };
        volume.spec.dirty_bytes_max = bytes;
        self.ground.count_quotas();
        self.persist(control);
    }

    /// Replaces [`VolumeSpec::attachment`]. [`Effect::ControlDone`] comes when a restart will find the new one,
    /// whatever else is being done to the volume.
    pub fn set_attachment(&mut self, _now: Nanos, id: VolumeId, attachment: Vec<u8>, control: u64) {
        let volume = self.ground.volumes.get_mut(id.0 as usize).and_then(Option::as_mut);
        let error = match &volume {
            None => Some(ControlError::Gone),
            Some(_) if attachment.len() > ATTACHMENT_BYTES_MAX => Some(ControlError::TooLong),
            Some(_) if self.ground.base.dead => Some(ControlError::Device),
            Some(_) => None,
        };
        match (error, volume) {
            (None, Some(volume)) => {
                volume.spec.attachment = attachment;
                self.persist(control);
            }
            (error, _) => {
                let result = error.map_or(Ok(()), Err);
                self.ground.base.out.control_done(control, result);
            }
        }
    }

    /// Replaces [`VolumeSpec::attachment`] as of what is recorded next. One that is too long changes nothing.
    pub fn replace_attachment(&mut self, id: VolumeId, attachment: Vec<u8>) {
        let volume = self.ground.volumes.get_mut(id.0 as usize).and_then(Option::as_mut);
        if let Some(volume) = volume.filter(|_| attachment.len() <= ATTACHMENT_BYTES_MAX) {
            volume.spec.attachment = attachment;
        }
    }

    /// Drains what is dirty now; [`Effect::ControlDone`] comes when all of it is in the image, or was changed again and is in
    /// the redo.
    pub fn drain(&mut self, _now: Nanos, id: VolumeId, control: u64) {
        self.ground.base.out.stir();
        if self.controllable(id, control, true).is_none() {
            return;
        }
        if self.is_stuck(id) {
            let result = Err(self.ground.volume(id).loss().unwrap_or(ControlError::Failed));
            return self.ground.base.out.control_done(control, result);
        }
        let sequence = self.ground.volume(id).log.built();
        self.drain.wait(&mut self.ground, id, control, sequence);
    }

    /// Drains a volume, compares the image with the cache if asked to, and forgets the volume. New
    /// requests are refused from now on. A parent stays as long as it has clones. Without a backend only a volume can be forgotten of which
    /// nothing is dirty or lost, unverified.
    pub fn remove(&mut self, _now: Nanos, id: VolumeId, verify: bool, control: u64) {
        self.ground.base.out.stir();
        let Some(volume) = self.controllable(id, control, true) else { return };
        let needs_backend = verify || volume.failed || volume.is_dirty() || volume.ledger.blocks().lost > 0;
        if !volume.attached && needs_backend && !volume.is_copy() {
            let result = Err(ControlError::Detached);
            return self.ground.base.out.control_done(control, result);
        }
        if self.is_parent(id) {
            let result = Err(ControlError::IsParent);
            return self.ground.base.out.control_done(control, result);
        }
        if self.ground.volume(id).copy.is_some() {
            let result = Err(ControlError::Paired);
            return self.ground.base.out.control_done(control, result);
        }
        self.ground.withdraw_room(id);
        let volume = self.ground.volume_mut(id);
        volume.closing = true;
        volume.progress.want(u64::MAX);
        volume.task = Task::Remove { control, verify };
    }

    /// Forgets a volume that has no backend, with everything that the cache holds of it, dirty or lost. Until [`Effect::ControlDone`] a
    /// crash may bring it back as it was.
    pub fn give_up(&mut self, now: Nanos, id: VolumeId, control: u64) {
        self.ground.base.out.stir();
        if self.ground.volumes.get(id.0 as usize).and_then(Option::as_ref).is_some_and(|v| v.is_copy()) {
            // Another host's: nothing here is the only copy.
            return self.remove(now, id, false, control);
        }
        let is_parent = self.is_parent(id);
        let Some(volume) = self.controllable(id, control, true) else { return };
        let error = match &volume {
            v if v.attached => Some(ControlError::Attached),
            _ if is_parent => Some(ControlError::IsParent),
            _ => None,
        };
        if let Some(error) = error {
            return self.ground.base.out.control_done(control, Err(error));
        }
        let volume = self.ground.volume_mut(id);
        volume.closing = true;
        volume.task = Task::GiveUp { control };
    }

    /// Stops accepting requests, flushes the backends of what went past the cache, makes the log stable and
    /// takes a checkpoint; dirty data stays dirty. A backend that cannot be flushed in
    /// [`EngineConfig::stop_flush_ns_max`] is not waited for; its volume's status tells.
    /// Requests that wait for the backend or for room are not answered any more.
    pub fn shutdown(&mut self, now: Nanos, control: u64) {
        self.ground.base.out.stir();
        self.ground.base.stopping = Some(control);
        self.stop_by = now.saturating_add(self.ground.base.config.stop_flush_ns_max);
    }

    /// The volume if an operation on it may begin now; else that is the operation's answer.
    pub(crate) fn controllable(
        &mut self,
        id: VolumeId,
        control: u64,
        without_device: bool,
    ) -> Option<&mut Volume> {
        let volume = self.ground.volumes.get_mut(id.0 as usize).and_then(Option::as_mut);
        let error = match &volume {
            None => Some(ControlError::Gone),
            Some(_) if self.ground.base.dead && !without_device => Some(ControlError::Device),
            Some(v) if v.task != Task::None => Some(ControlError::Busy),
            Some(v) if v.fenced => Some(ControlError::Backend(IoError::Fenced)),
            Some(_) => None,
        };
        match error {
            Some(error) => {
                self.ground.base.out.control_done(control, Err(error));
                None
            }
            None => volume.map(|v| &mut **v),
        }
    }

    /// `control` is complete when a checkpoint of the state now is durable.
    pub(crate) fn persist(&mut self, control: u64) {
        self.persist_or(control, Err(ControlError::Device));
    }

    /// As `persist`, with the answer if the device fails.
    fn persist_or(&mut self, control: u64, on_failure: Result<(), ControlError>) {
        self.ground.base.out.stir();
        if self.ground.base.dead {
            self.ground.base.out.control_done(control, on_failure);
        } else {
            self.checkpoint.wait(Waiter { control, on_failure, added: None });
        }
    }

    /// Goes on with removals, purges and the shutdown.
    pub(crate) fn control(&mut self, now: Nanos) {
        self.cache.resume_reclaim();
        for i in 0..self.ground.volumes.len() {
            let id = VolumeId(i as u16);
            match self.ground.volumes[i].as_ref().map(|v| v.task) {
                Some(Task::Purge { control, attaching }) => self.pump_purge(now, id, control, attaching),
                Some(Task::Remove { control, verify }) => self.pump_remove(now, id, control, verify),
                Some(Task::GiveUp { control }) => self.pump_give_up(now, id, control),
                Some(Task::Snapshot { control, step }) => self.pump_snapshot(now, id, control, step),
                Some(Task::Resize(resize)) => self.pump_resize(id, resize),
                Some(Task::Detach { control, stopping, until }) => {
                    self.pump_detach(now, id, (control, stopping, until));
                }
                Some(Task::Begin { control, begin }) => self.pump_begin(id, control, begin),
                Some(Task::None) | None => {}
            }
        }
        self.pump_stop(now);
    }

    /// Takes the last checkpoint of a shutdown as soon as nothing is on its way any more.
    fn pump_stop(&mut self, now: Nanos) {
        let Some(control) = self.ground.base.stopping.filter(|&c| c != LAST_CHECKPOINT) else { return };
        let idle = self.ground.log.is_idle() && self.checkpoint.is_idle() && self.cache.reclaim_is_idle();
        let held = self.ground.ids().any(|id| self.front.holds_back(id));
        let flushed = self.backends_are_flushed() || now >= self.stop_by;
        if (idle || self.ground.base.dead) && flushed && !held && !self.cache.has_open_fills() {
            self.ground.base.stopping = Some(LAST_CHECKPOINT);
            self.persist(control);
            self.checkpoint.begin(&mut self.ground, now);
        }
    }

    /// Whether what went past the cache is on stable media; asks for the flushes that this takes.
    fn backends_are_flushed(&mut self) -> bool {
        let mut flushed = true;
        let mut stir = false;
        for i in 0..self.ground.volumes.len() {
            let volume = self.ground.volumes[i].as_mut();
            let Some(volume) = volume.filter(|v| v.attached && !v.fenced) else { continue };
            if self.front.is_direct(VolumeId(i as u16)) {
                flushed = false;
            } else if volume.backend.is_dirty() {
                flushed = false;
                stir |= !volume.backend.is_flushing() && !volume.backend.wants_flush();
                if !volume.backend.is_flushing() {
                    volume.backend.want_flush();
                }
            }
        }
        if stir {
            self.ground.base.out.stir();
        }
        flushed
    }

    /// When a shutdown looks at its backends again if none of them answers.
    pub(crate) fn stop_deadline(&self, now: Nanos) -> Option<Nanos> {
        self.ground.base.stopping.filter(|&c| c != LAST_CHECKPOINT)?;
        let volumes = self
            .ground
            .volumes
            .iter()
            .flatten()
            .filter(|v| v.backend.wants_flush() && !v.backend.is_flushing());
        let retry = volumes.map(|v| v.backend.retry_at()).filter(|&at| at > now).min();
        retry.into_iter().chain((self.stop_by > now).then_some(self.stop_by)).min()
    }

    /// Nothing of a failed volume is committed any more, so that it never gets clean.
    fn is_stuck(&self, id: VolumeId) -> bool {
        let volume = self.ground.volume(id);
        volume.failed && volume.ledger.is_uncommitted()
    }

    /// Drained, and still.
    fn is_quiet(&mut self, now: Nanos, id: VolumeId) -> bool {
        let volume = self.ground.volume(id);
        !volume.is_dirty() && !volume.has_redo() && self.is_still(now, id)
    }

    /// Nothing is on its way into the cache: the volume's blocks can go, if they are drained or given up.
    fn is_still(&mut self, now: Nanos, id: VolumeId) -> bool {
        if !self.front.is_published(id) || self.front.is_direct(id) {
            return false;
        }
        if self.ground.overtake(id, 0, u64::MAX / 2) > 0 {
            self.ground.note_forgotten(id);
        }
        self.cache.issue_fills(&mut self.ground, now, true);
        let fills_idle = |s: Stream| self.ground.log.in_flight(s) == 0;
        let idle = fills_idle(Stream::Fill) && fills_idle(Stream::Main);
        // Under load one job of reclaim follows the other: the next one has to wait.
        if idle && !self.cache.reclaim_is_idle() {
            self.cache.hold_reclaim();
        }
        idle && self.cache.reclaim_is_idle()
    }

    fn pump_purge(&mut self, now: Nanos, id: VolumeId, control: u64, attaching: bool) {
        if self.ground.volume(id).fenced {
            self.ground.volume_mut(id).task = Task::None;
            let result = if attaching { Ok(()) } else { Err(ControlError::Backend(IoError::Fenced)) };
            self.ground.base.out.control_done(control, result);
        } else if self.is_stuck(id) {
            self.ground.volume_mut(id).task = Task::None;
            let result = if attaching { Ok(()) } else { Err(ControlError::Failed) };
            self.ground.base.out.control_done(control, result);
        } else if self.is_quiet(now, id) {
            // What is lost stays lost: the image holds something older.
            self.drop_clean(id);
            self.ground.volume_mut(id).task = Task::None;
            self.persist_or(control, if attaching { Ok(()) } else { Err(ControlError::Device) });
        }
    }

    fn pump_remove(&mut self, now: Nanos, id: VolumeId, control: u64, verify: bool) {
        if self.verify.volume == Some(id) && self.verify.in_flight > 0 {
            if !self.ground.volume(id).fenced && self.is_quiet(now, id) {
                self.pump_verify(id);
            }
            return;
        }
        if self.ground.volume(id).fenced {
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
            match self.verify.volume {
                None => self.verify = Verify { volume: Some(id), ..Verify::default() },
                Some(other) if other != id => return,
                Some(_) => {}
            }
            if let Some(error) = self.verify.result {
                return self.end_remove(id, control, Err(error));
            }
            if !self.verify.finished {
                return self.pump_verify(id);
            }
        }
        if self.backend_is_told(now, id) {
            self.end_remove(id, control, Ok(()));
        }
    }

    fn pump_give_up(&mut self, now: Nanos, id: VolumeId, control: u64) {
        if self.front.is_answered(id) && self.is_still(now, id) {
            // What reads as zero may be all that the cache has of a place.
            self.ground.budget.note_extents_changed();
            self.end_remove(id, control, Ok(()));
        }
    }

    /// Whether the image can do without the cache: all that was written is on its stable media, and it
    /// does not name a cache device that failed.
    fn backend_is_told(&mut self, now: Nanos, id: VolumeId) -> bool {
        let dead = self.ground.base.dead;
        let volume = self.ground.volume_mut(id);
        if !volume.attached {
            return true; // Nothing of it is dirty: the image lacks nothing, whatever its record says.
        }
        if dead && !volume.backend.is_disowned() {
            self.disown(now, id);
            return false;
        }
        if volume.backend.is_dirty() && !volume.backend.wants_flush() {
            volume.backend.want_flush();
            self.ground.base.out.stir();
        }
        let volume = self.ground.volume(id);
        !volume.backend.is_flushing() && !volume.backend.wants_flush()
    }

    fn end_remove(&mut self, id: VolumeId, control: u64, result: Result<(), ControlError>) {
        if self.verify.volume == Some(id) {
            self.verify = Verify::default();
            self.ground.base.out.stir(); // Others may be waiting for their turn.
        }
        if result.is_err() {
            let volume = self.ground.volume_mut(id);
            volume.task = Task::None;
            volume.closing = false;
            volume.progress.want_only(0);
            self.ground.base.out.control_done(control, result);
            return;
        }
        let blocks = self.ground.volume(id).blocks();
        self.ground.forget_blocks(id, 0, blocks);
        self.forget_volume(id);
        // The driver has the volume under its number until it is told.
        self.leaving.push((control, id));
        self.ground.count_quotas();
        self.cache.forget_evicted();
        // With the device gone nothing names the volume any more, and the backend has everything.
        self.persist_or(control, Ok(()));
    }

    /// Reads the image where the cache has blocks and compares checksums.
    fn pump_verify(&mut self, id: VolumeId) {
        while self.verify.in_flight < VERIFY_IN_FLIGHT && self.verify.result.is_none() {
            let Some((block, blocks)) = self.next_to_verify(id) else {
                self.verify.finished = self.verify.in_flight == 0;
                if self.verify.finished {
                    self.ground.base.out.stir();
                }
                return;
            };
            let Some(buf) = self.ground.base.pools.drain.take() else { return };
            self.verify.next = block + u64::from(blocks);
            self.verify.in_flight += 1;
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
        let next = self.verify.next;
        let index = self.ground.volumes[id.0 as usize].as_ref()?.ledger.index();
        let mut runs = index.objects(object_of(next)).flat_map(|object| index.runs(object));
        let is_left = |&(block, n, found): &(u64, u32, Lookup)| {
            matches!(found, Lookup::At(_)) && block + u64::from(n) > next
        };
        let (block, n, _) = runs.find(is_left)?;
        let first = block.max(next);
        let left = n - (first - block) as u32;
        Some((first, left.min(crate::base::pools::PIECE_BLOCKS as u32)))
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
        self.verify.in_flight -= 1;
        if let Err(error) = result {
            self.verify.result = Some(ControlError::Backend(error));
        } else {
            for i in 0..blocks as usize {
                let Lookup::At(position) = self.ground.volume(id).ledger.index().lookup(block + i as u64)
                else {
                    continue;
                };
                let bytes = self.ground.base.arena.bytes(buf.slice(i * BLOCK_BYTES, BLOCK_BYTES));
                if crc32c(bytes) != self.ground.space.marks.crc(position) {
                    let byte = (block + i as u64) * BLOCK_BYTES as u64;
                    self.verify.result = Some(ControlError::Differs(byte));
                    break;
                }
            }
        }
        self.ground.base.pools.drain.give(buf);
    }

    fn drop_clean(&mut self, id: VolumeId) {
        self.ground.note_forgotten(id);
        let (volume, space) = self.ground.volume_and_space(id);
        volume.ledger.forget_clean(space);
    }

    /// State and counters of a volume.
    pub fn volume_status(&self, now: Nanos, id: VolumeId) -> Option<VolumeStatus> {
        let volume = self.ground.volumes.get(id.0 as usize)?.as_ref()?;
        let block = BLOCK_BYTES as u64;
        let drain = self.drain.status(id);
        let blocks = volume.ledger.blocks();
        let age = |since: Option<Nanos>| since.map_or(0, |since| now.saturating_sub(since));
        let (exposed_blocks, exposed_since) = match volume.progress.is_grouped() {
            true => (volume.ledger.uncommitted_blocks(), volume.ledger.uncommitted_since()),
            false => (volume.ledger.dirty() + blocks.zero, drain.oldest),
        };
        let full = self.front.has_pending(id) && self.ground.quota_left(id) == 0;
        let backlog = volume.mode != Mode::WriteBack && volume.progress.safe() < volume.backlog.sequence();
        let state = match () {
            _ if volume.fenced => VolumeState::Fenced,
            _ if volume.failed => VolumeState::Failed,
            _ if volume.is_copy() => VolumeState::Replica,
            _ if !volume.attached => VolumeState::Detached,
            _ if volume.task != Task::None || backlog || drain.is_waited_for => VolumeState::Draining,
            _ if full => VolumeState::Full,
            _ => VolumeState::Serving,
        };
        Some(VolumeStatus {
            id,
            spec: volume.spec.clone(),
            mode: volume.mode,
            state,
            dirty: volume.is_dirty() || volume.ledger.dirty() > 0,
            dirty_bytes: volume.ledger.held() * block,
            dirty_zero_bytes: blocks.zero * block,
            dirty_bytes_max: self.ground.dirty_bytes_max(id),
            dirty_age_ns: age(drain.oldest),
            exposed_bytes: exposed_blocks * block,
            exposed_age_ns: age(exposed_since),
            cached_bytes: (blocks.at + volume.ledger.frozen()) * block,
            lost_blocks: blocks.lost,
            sequence: volume.log.published(),
            sequence_drained: volume.progress.drained(),
            backend_error: volume.backend.error(),
            flushes: self.front.flushes(id),
            drain_writes_in_flight: u64::from(drain.writes),
            backend_unflushed: volume.backend.is_dirty(),
            count: volume.count,
        })
    }

    /// State and counters of the cache device.
    pub fn device_status(&self) -> DeviceStatus {
        let index: usize =
            self.ground.volumes.iter().flatten().map(|v| v.ledger.index().memory_bytes()).sum();
        let index = index + self.ground.space.marks.memory_bytes() + self.cache.memory_bytes();
        let frozen: u64 = self.ground.volumes.iter().flatten().map(|v| v.ledger.frozen()).sum();
        DeviceStatus {
            volumes_max: self.ground.base.geo.volume_pages,
            failed: self.ground.base.dead,
            size_bytes: self.ground.base.geo.device_blocks * BLOCK_BYTES as u64,
            segment_bytes: u64::from(self.ground.base.geo.segment_blocks) * BLOCK_BYTES as u64,
            segments: u64::from(self.ground.base.geo.segments),
            segments_free: u64::from(self.ground.space.free_count()),
            segments_dirty: self.ground.space.segments.iter().filter(|s| s.dirty > 0).count() as u64,
            dirty_share_bytes: self.ground.budget.quota_of_another(&self.ground.space),
            reclaiming: !self.cache.reclaim_is_idle(),
            checkpointing: !self.checkpoint.is_idle(),
            index_bytes: index as u64,
            cached_blocks: self.ground.space.live_blocks() + frozen,
            arena_used_bytes: (self.ground.base.arena.len_bytes() - self.ground.base.arena.free_bytes())
                as u64,
            arena_bytes: self.ground.base.arena.len_bytes() as u64,
            ..self.ground.base.device
        }
    }

    /// What is known about a range, in order: at most `extents_max` stretches are put into `out`, which
    /// is cleared first. They may end before the range does: a call looks at a bounded part of the index. Returns how much it has looked at,
    /// in blocks and nodes of the index.
    pub fn block_status(
        &self,
        id: VolumeId,
        offset: u64,
        len: u64,
        extents_max: usize,
        out: &mut Vec<Extent>,
    ) -> u64 {
        out.clear();
        let Some(Some(volume)) = self.ground.volumes.get(id.0 as usize) else { return 0 };
        let block = BLOCK_BYTES as u64;
        let end = offset.saturating_add(len).min(volume.spec.size_bytes);
        let mut at = offset;
        if volume.is_refusing() && at < end {
            // Another host may have written what reads as zero here: a client that is told of data reads it, and is told.
            out.push(Extent { len: end - at, cached: false, dirty: false, zero: false });
            return 1;
        }
        let mut cost = 0;
        while at < end && cost < STATUS_COST_MAX {
            let max = (end - at / block * block).div_ceil(block).min(1 << 20) as u32;
            let found = self.ground.find(id, at / block, max);
            let (n, dirty) = match found.lookup {
                Lookup::At(position) => {
                    let dirty = self.ground.space.marks.is_dirty(position);
                    let same = (position..position + found.blocks)
                        .take_while(|&p| self.ground.space.marks.is_dirty(p) == dirty);
                    (same.count() as u32, dirty)
                }
                Lookup::Zero => {
                    let object = object_of(at / block);
                    let last = (u64::from(object) + 1) * crate::blocks::index::OBJECT_BLOCKS as u64;
                    let n = u64::from(found.blocks).min(last - at / block) as u32;
                    (
                        n,
                        self.ground
                            .volume(found.volume)
                            .ledger
                            .flags(object)
                            .contains(ObjectFlags::ZERO_DIRTY),
                    )
                }
                _ => (found.blocks, false),
            };
            let cached = matches!(found.lookup, Lookup::At(_));
            cost += STRETCH_COST + if cached { u64::from(n) } else { 0 };
            let until = ((at / block + u64::from(n)) * block).min(end);
            let extent = Extent {
                len: until - at,
                dirty,
                zero: found.lookup == Lookup::Zero || found.hole,
                cached: cached || found.lookup == Lookup::Zero,
            };
            let same = |l: &Extent| (l.dirty, l.zero, l.cached) == (extent.dirty, extent.zero, extent.cached);
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

/// A volume can be served under this name, with this size.
pub(crate) fn check_spec(spec: &VolumeSpec) -> Result<(), AddError> {
    let good = |c: char| c.is_ascii_alphanumeric() || "._-@".contains(c);
    if spec.name.is_empty() || spec.name.len() > 64 || !spec.name.chars().all(good) {
        return Err(AddError::Name(spec.name.clone()));
    }
    if !is_size(spec.size_bytes) {
        return Err(AddError::Size(spec.size_bytes));
    }
    if spec.backend.len() > 1024 {
        return Err(AddError::TooLong("URI"));
    }
    if spec.attachment.len() > ATTACHMENT_BYTES_MAX {
        return Err(AddError::TooLong("attachment"));
    }
    Ok(())
}
