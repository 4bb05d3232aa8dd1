//! Control: volumes come, change and go; what is told about them.
//!
//! | file | what it is about |
//! |---|---|
//! | `copies` | copies of other hosts' volumes begin, get room, promise |
//! | `detach` | A volume lets go of its backend |
//! | `failure` | What the core does when a part of it is gone |
//! | `mode` | What a volume does with writes |
//! | `pairing` | The owner's side of a second copy (RFC 9) |
//! | `parents` | clones and the volumes of their parents |
//! | `removal` | A volume leaves the device |
//! | `resize` | a volume gets another size |
//! | `snapshot` | the image is brought to a cut, and a snapshot taken |
//! | `told` | What is told about the device and its volumes |

mod copies;
mod detach;
mod failure;
mod mode;
mod pairing;
mod parents;
mod removal;
mod resize;
mod snapshot;
mod told;

use crate::api::*;
use crate::base::mutation::mutated;
use crate::checkpoint::Waiter;
use crate::engine::Engine;
use crate::format::Stream;
use crate::ground::task::Task;
use crate::ground::volume::Volume;
use removal::Verify;

/// What control keeps of its own.
#[derive(Default)]
pub(crate) struct Control {
    /// Until then a shutdown waits for backends to be flushed.
    stop_by: Nanos,
    /// The comparison of a volume that is being removed.
    verify: Verify,
    /// Removed volumes whose removal has not been reported, by its control number: their numbers
    /// are taken.
    leaving: Vec<(u64, VolumeId)>,
}

impl Control {
    /// The driver is told that an operation is complete: if that was the removal of a volume, its
    /// number is free again.
    pub(crate) fn note_reported(&mut self, control: u64) {
        self.leaving.retain(|&(removal, _)| removal != control);
    }

    fn note_leaving(&mut self, control: u64, id: VolumeId) {
        self.leaving.push((control, id));
    }

    fn is_leaving(&self, id: VolumeId) -> bool {
        self.leaving.iter().any(|&(_, leaving)| leaving == id)
    }
}

impl Engine {
    /// All volumes that the device knows, attached or not.
    pub fn volumes(&self) -> Vec<(VolumeId, VolumeSpec)> {
        self.ground.ids().map(|id| (id, self.ground.volume(id).spec().clone())).collect()
    }

    /// Adds a volume. It is served at once; [`Effect::ControlDone`] tells when it is recorded so
    /// that a restart knows it; before that no request and no other operation may name it. If the
    /// device fails instead, the volume is gone again.
    ///
    /// # Errors
    /// See [`AddError`]; nothing has changed then.
    pub fn add_volume(
        &mut self,
        now: Nanos,
        spec: VolumeSpec,
        control: u64,
    ) -> Result<VolumeId, AddError> {
        spec.check()?;
        let volume = Volume::served(spec);
        let grouped = volume.groups_begin();
        let id = self.insert_volume(volume, control)?;
        if grouped {
            self.drain.begin_groups(&mut self.ground, now, id, false);
        }
        Ok(id)
    }

    /// Gives a volume a number; `control` is complete when a restart finds it.
    pub(crate) fn insert_volume(
        &mut self,
        volume: Volume,
        control: u64,
    ) -> Result<VolumeId, AddError> {
        if self.ground.is_dead() {
            return Err(AddError::Device);
        }
        if self.ground.has_name(&volume.spec().name) {
            return Err(AddError::Exists(volume.spec().name.clone()));
        }
        let added = self.ground.insert(volume, |id| self.control.is_leaving(id));
        let id = added.ok_or(AddError::TooMany(self.ground.geo().volume_pages))?;
        let published = self.ground.volume(id).log().published();
        self.front.add(id, published);
        self.drain.add(id);
        self.peers.add(id);
        self.ground.stir();
        self.checkpoint.wait(Waiter::adding(control, id));
        Ok(id)
    }

    /// Gives a recovered volume its backend back, which is used from now on.
    /// [`Effect::ControlDone`] tells when requests may be sent, and is never an error: if the cache
    /// device fails before, or has failed already, what verifies is drained all the same, and the
    /// volume goes on past the cache as any other.
    ///
    /// # Errors
    /// See [`AddError`]; nothing has changed then.
    pub fn attach(
        &mut self,
        now: Nanos,
        id: VolumeId,
        attach: Attach,
        control: u64,
    ) -> Result<(), AddError> {
        let volume = self.ground.get(id);
        let volume = volume
            .filter(|v| !v.is_attached() && self.front.is_published(id) && v.task() == Task::None);
        let volume = volume.ok_or(AddError::NotDetached)?;
        let spec = VolumeSpec {
            size_bytes: attach.size_bytes,
            mode: attach.mode,
            drain: attach.drain,
            dirty_bytes_max: attach.dirty_bytes_max,
            read_only: attach.read_only,
            generation: attach.generation,
            attachment: attach.attachment,
            ..volume.spec().clone()
        };
        spec.check()?;
        let blocks = spec.size_bytes.div_ceil(BLOCK_BYTES as u64);
        let old_blocks = volume.blocks();
        if blocks < old_blocks && self.ground.has_dirty(id, blocks, old_blocks) {
            return Err(AddError::Shrunk(spec.size_bytes));
        }
        if blocks < old_blocks {
            self.ground.forget_blocks(id, blocks, old_blocks - blocks);
        }
        let dead = self.ground.is_dead();
        self.ground.withdraw_room(id);
        let mode = if dead { Mode::WriteAround } else { spec.mode };
        self.ground.volume_mut(id).attach(spec, mode);
        self.front.attach(id);
        self.ground.count_quotas();
        if !attach.keep_clean && !mutated!(CleanKeptWithoutProof) {
            self.drop_clean(id);
        }
        let volume = self.ground.volume_mut(id);
        let grouped = volume.spec().drain == DrainOrder::Grouped;
        let dirty = volume.is_dirty();
        if grouped
            && (volume.mode() == Mode::WriteBack || dirty && !mutated!(AttachedWithoutGroups))
        {
            volume.begin_with_backlog();
            self.drain.begin_groups(&mut self.ground, now, id, dirty);
        }
        self.ground.stir();
        if attach.mode == Mode::Off && !dead {
            self.ground.volume_mut(id).begin(Task::Purge { control, attaching: true });
        } else {
            self.persist_or(control, Ok(()));
        }
        Ok(())
    }

    /// Changes the dirty quota (0 for the default share). Where all volumes together were given
    /// more than the cache holds, each has less in proportion; [`VolumeStatus::dirty_bytes_max`]
    /// tells what is in force.
    pub fn set_dirty_bytes_max(&mut self, _now: Nanos, id: VolumeId, bytes: u64, control: u64) {
        self.ground.stir();
        let Some(volume) = self.controllable(id, control, false) else { return };
        volume.ask_for_quota(bytes);
        self.ground.count_quotas();
        self.persist(control);
    }

    /// Lets nothing more go from the cache to the backends, or lets it go again: to measure what the
    /// drain costs. Meanwhile what waits for the drain waits, and what a loss would cost has no
    /// bound.
    pub fn pause_drain(&mut self, paused: bool) {
        self.drain.pause(paused);
        self.ground.stir();
    }

    /// Replaces [`VolumeSpec::attachment`]. [`Effect::ControlDone`] comes when a restart will find
    /// the new one, whatever else is being done to the volume.
    pub fn set_attachment(&mut self, _now: Nanos, id: VolumeId, attachment: Vec<u8>, control: u64) {
        let error = match self.ground.get(id) {
            None => Some(ControlError::Gone),
            Some(_) if attachment.len() > ATTACHMENT_BYTES_MAX => Some(ControlError::TooLong),
            Some(_) if self.ground.is_dead() => Some(ControlError::Device),
            Some(_) => None,
        };
        if let Some(error) = error {
            return self.ground.control_done(control, Err(error));
        }
        self.ground.volume_mut(id).replace_attachment(attachment);
        self.persist(control);
    }

    /// Replaces [`VolumeSpec::attachment`] as of what is recorded next. One that is too long
    /// changes nothing.
    pub fn replace_attachment(&mut self, id: VolumeId, attachment: Vec<u8>) {
        let volume = self.ground.get_mut(id);
        if let Some(volume) = volume.filter(|_| attachment.len() <= ATTACHMENT_BYTES_MAX) {
            volume.replace_attachment(attachment);
        }
    }

    /// Drains what is dirty now; [`Effect::ControlDone`] comes when all of it is in the image, or
    /// was changed again and is in the redo.
    pub fn drain(&mut self, _now: Nanos, id: VolumeId, control: u64) {
        self.ground.stir();
        if self.controllable(id, control, true).is_none() {
            return;
        }
        if self.is_stuck(id) {
            let result = Err(self.ground.volume(id).loss().unwrap_or(ControlError::Failed));
            return self.ground.control_done(control, result);
        }
        let sequence = self.ground.volume(id).log().built();
        self.drain.wait(&mut self.ground, id, control, sequence);
    }

    /// Stops accepting requests, flushes the backends of what went past the cache, makes the log
    /// stable and takes a checkpoint; dirty data stays dirty. A backend that cannot be flushed in
    /// [`EngineConfig::stop_flush_ns_max`] is not waited for; its volume's status tells. Requests
    /// that wait for the backend or for room are not answered any more.
    pub fn shutdown(&mut self, now: Nanos, control: u64) {
        self.ground.stir();
        self.ground.ask_to_stop(control);
        self.control.stop_by = now.saturating_add(self.ground.config().stop_flush_ns_max);
    }

    /// The volume if an operation on it may begin now; else that is the operation's answer.
    pub(crate) fn controllable(
        &mut self,
        id: VolumeId,
        control: u64,
        without_device: bool,
    ) -> Option<&mut Volume> {
        let error = match self.ground.get(id) {
            None => Some(ControlError::Gone),
            Some(_) if self.ground.is_dead() && !without_device => Some(ControlError::Device),
            Some(v) if v.task() != Task::None => Some(ControlError::Busy),
            Some(v) if v.is_fenced() => Some(ControlError::Backend(IoError::Fenced)),
            Some(_) => None,
        };
        match error {
            Some(error) => {
                self.ground.control_done(control, Err(error));
                None
            }
            None => self.ground.get_mut(id),
        }
    }

    /// `control` is complete when a checkpoint of the state now is durable.
    pub(crate) fn persist(&mut self, control: u64) {
        self.persist_or(control, Err(ControlError::Device));
    }

    /// As `persist`, with the answer if the device fails.
    pub(super) fn persist_or(&mut self, control: u64, on_failure: Result<(), ControlError>) {
        self.ground.stir();
        if self.ground.is_dead() {
            self.ground.control_done(control, on_failure);
        } else {
            self.checkpoint.wait(Waiter::new(control, on_failure));
        }
    }

    /// Goes on with removals, purges and the shutdown.
    pub(crate) fn control(&mut self, now: Nanos) {
        self.cache.resume_reclaim();
        for id in self.ground.places() {
            match self.ground.get(id).map(Volume::task) {
                Some(Task::Purge { control, attaching }) => {
                    self.pump_purge(now, id, control, attaching)
                }
                Some(Task::Remove { control, verify }) => {
                    self.pump_remove(now, id, control, verify)
                }
                Some(Task::GiveUp { control }) => self.pump_give_up(now, id, control),
                Some(Task::Snapshot { control, step }) => {
                    self.pump_snapshot(now, id, control, step)
                }
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
        let Some(control) = self.ground.stop_asked() else { return };
        let idle = self.ground.log().is_idle()
            && self.checkpoint.is_idle()
            && self.cache.reclaim_is_idle();
        let held = self.ground.ids().any(|id| self.front.holds_back(id));
        let flushed = self.backends_are_flushed() || now >= self.control.stop_by;
        if (idle || self.ground.is_dead()) && flushed && !held && !self.cache.has_open_fills() {
            self.ground.begin_last_checkpoint();
            self.persist(control);
            self.checkpoint.begin(&mut self.ground, now);
        }
    }

    /// Whether what went past the cache is on stable media; asks for the flushes that this takes.
    fn backends_are_flushed(&mut self) -> bool {
        let mut flushed = true;
        let mut stir = false;
        for id in self.ground.places() {
            let volume = self.ground.get_mut(id);
            let Some(volume) = volume.filter(|v| v.is_attached() && !v.is_fenced()) else {
                continue;
            };
            if self.front.is_direct(id) {
                flushed = false;
            } else if volume.backend().is_dirty() {
                flushed = false;
                stir |= !volume.backend().is_flushing() && !volume.backend().wants_flush();
                if !volume.backend().is_flushing() {
                    volume.backend_mut().want_flush();
                }
            }
        }
        if stir {
            self.ground.stir();
        }
        flushed
    }

    /// When a shutdown looks at its backends again if none of them answers.
    pub(crate) fn stop_deadline(&self, now: Nanos) -> Option<Nanos> {
        self.ground.stop_asked()?;
        let waiting = |v: &&Volume| v.backend().wants_flush() && !v.backend().is_flushing();
        let volumes = self.ground.volumes().filter(waiting);
        let retry = volumes.map(|v| v.backend().retry_at()).filter(|&at| at > now).min();
        let stop_by = self.control.stop_by;
        retry.into_iter().chain((stop_by > now).then_some(stop_by)).min()
    }

    /// Nothing of a failed volume is committed any more, so that it never gets clean.
    pub(super) fn is_stuck(&self, id: VolumeId) -> bool {
        let volume = self.ground.volume(id);
        volume.is_failed() && volume.ledger().is_uncommitted()
    }

    /// Drained, and still.
    pub(super) fn is_quiet(&mut self, now: Nanos, id: VolumeId) -> bool {
        let volume = self.ground.volume(id);
        !volume.is_dirty() && !volume.has_redo() && self.is_still(now, id)
    }

    /// Nothing is on its way into the cache: the volume's blocks can go, if they are drained or
    /// given up.
    pub(super) fn is_still(&mut self, now: Nanos, id: VolumeId) -> bool {
        if !self.front.is_published(id) || self.front.is_direct(id) {
            return false;
        }
        if self.ground.overtake(id, 0, u64::MAX / 2) > 0 {
            self.ground.note_forgotten(id);
        }
        self.cache.issue_fills(&mut self.ground, now, true);
        let fills_idle = |s: Stream| self.ground.log().in_flight(s) == 0;
        let idle = fills_idle(Stream::Fill) && fills_idle(Stream::Main);
        // Under load one job of reclaim follows the other: the next one has to wait.
        if idle && !self.cache.reclaim_is_idle() {
            self.cache.hold_reclaim();
        }
        idle && self.cache.reclaim_is_idle()
    }

    fn pump_purge(&mut self, now: Nanos, id: VolumeId, control: u64, attaching: bool) {
        if self.ground.volume(id).is_fenced() {
            self.ground.volume_mut(id).end_task();
            let result =
                if attaching { Ok(()) } else { Err(ControlError::Backend(IoError::Fenced)) };
            self.ground.control_done(control, result);
        } else if self.is_stuck(id) {
            self.ground.volume_mut(id).end_task();
            let result = if attaching { Ok(()) } else { Err(ControlError::Failed) };
            self.ground.control_done(control, result);
        } else if self.is_quiet(now, id) {
            // What is lost stays lost: the image holds something older.
            self.drop_clean(id);
            self.ground.volume_mut(id).end_task();
            self.persist_or(control, if attaching { Ok(()) } else { Err(ControlError::Device) });
        }
    }

    fn drop_clean(&mut self, id: VolumeId) {
        self.ground.note_forgotten(id);
        let (volume, space) = self.ground.volume_and_space(id);
        volume.ledger_mut().forget_clean(space);
    }
}
