//! Commands of the control plane, executed on the reactor thread.
//!
//! | file | what it is about |
//! |---|---|
//! | `command` | What a reactor thread is asked to do, and does |
//! | `handle` | The control plane's end of a shard |
//! | `stats` | What a shard tells about itself |

pub(super) mod command;
pub(super) mod handle;
pub(super) mod stats;

use crate::shard::api::{Image, Refused, ShardError, Stopped, StoppedVolume};
use crate::shard::control::command::Answer;
use crate::shard::control::stats::{
    CopiesStatus, LATENCY_NS_MAX, LatencyHistogram, ShardStatus, ShardVolumeStatus,
};
use crate::shard::core::Core;
use crate::shard::io::volume::Volume;
use crate::shard::limits::{CONTROLS_MAX, GOODBYE_NS_MAX};
use crate::shard::pair::owner::OwnerSide;
use crate::shard::reactor::{Reactor, Source, user};
use crate::shard::shared::Shared;
use std::time::Duration;
use tidepool_backend::Backend;
use tidepool_engine::api::{ControlError, Degraded, Nanos, RequestError, VolumeId, VolumeSpec};
use tidepool_engine::status::{VolumeState, VolumeStatus};
use tidepool_engine::{Attach, OwnObjects};
use tidepool_replica::PeerLost;
use tokio::sync::oneshot;

/// What waits for the core's answer.
pub(super) enum Pending {
    Add {
        id: VolumeId,
        answer: oneshot::Sender<Result<VolumeId, Refused>>,
    },
    Attach {
        id: VolumeId,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Remove {
        id: VolumeId,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    /// A volume lets go of its backend, for its peer to take it over.
    HandOver {
        id: VolumeId,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    Simple {
        answer: Answer<()>,
    },
    /// The copy of another host's volume begins.
    Begin {
        slot: u32,
    },
    /// A copy is made ready to be taken over.
    Takeover {
        id: VolumeId,
        answer: Answer<()>,
    },
    Snapshot {
        id: VolumeId,
        answer: Answer<()>,
    },
    Resize {
        id: VolumeId,
        size_bytes: u64,
        answer: Answer<()>,
    },
    /// The host that is about to have a volume's copy is noted.
    Counterpart {
        id: VolumeId,
    },
    Shutdown,
}

/// Control operations under way, by the number that the core was given.
#[derive(Default)]
pub(in crate::shard) struct Controls {
    next: u64,
    pending: Vec<(u64, Pending)>,
    /// Those that are done, and wait for the backend to answer a change of the volume's ownership
    /// record.
    leaving: Vec<(u64, VolumeId, Pending)>,
}

impl Controls {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The number of an operation that notes a volume's counterpart.
    pub(in crate::shard) fn of_counterpart(&mut self, id: VolumeId) -> u64 {
        let number = self.number();
        self.pending.push((number, Pending::Counterpart { id }));
        number
    }

    /// The number of an operation that a link has asked for.
    pub(in crate::shard) fn of_link(&mut self, slot: u32) -> u64 {
        let number = self.number();
        self.pending.push((number, Pending::Begin { slot }));
        number
    }

    /// The number of the operation that prepares a takeover.
    pub(in crate::shard) fn of_takeover(&mut self, id: VolumeId, answer: Answer<()>) -> u64 {
        let number = self.number();
        self.pending.push((number, Pending::Takeover { id, answer }));
        number
    }

    /// The core was not asked after all.
    pub(in crate::shard) fn forget(&mut self, number: u64) {
        self.take(number);
    }

    fn is_full(&self) -> bool {
        self.pending.len() + self.leaving.len() >= CONTROLS_MAX
    }

    fn take(&mut self, number: u64) -> Option<Pending> {
        let index = self.pending.iter().position(|(n, _)| *n == number)?;
        Some(self.pending.swap_remove(index).1)
    }
}

/// A shutdown under way.
pub(in crate::shard) struct Stopping {
    answer: Answer<Stopped>,
    outcome: Option<Result<(), ControlError>>,
    /// The last replies are no longer waited for.
    goodbye: Option<Nanos>,
}

impl Stopping {
    pub(in crate::shard) fn deadline(&self) -> Option<Nanos> {
        self.goodbye
    }
}

impl<C: Core> Reactor<C> {
    /// Lets go of a volume that another host is to serve, if it may; else it stays as it is.
    pub(super) fn detach_for_another(
        &mut self,
        id: VolumeId,
        may: Result<(), ShardError>,
        answer: Answer<Option<Box<dyn Backend>>>,
    ) {
        let (now, wait_ns) = (self.shared.now, self.limits.hand_over_ns);
        match may {
            Err(error) => drop(answer.send(Err(error))),
            Ok(()) => self.operate(id, answer, |shared, number, answer| {
                let engine = shared.core.engine().expect("a volume with an owner has an engine");
                engine.detach(now, id, wait_ns, number);
                Pending::HandOver { id, answer }
            }),
        }
    }

    /// Why no operation can be started now.
    pub(in crate::shard) fn refusal(&self) -> Option<ShardError> {
        if self.stopping.is_some() {
            return Some(ShardError::ShuttingDown);
        }
        let limit = ShardError::Limit { what: "control operation", limit: CONTROLS_MAX };
        self.controls.is_full().then_some(limit)
    }

    pub(super) fn volumes(&self) -> Vec<(VolumeId, VolumeSpec, VolumeState)> {
        let core = &self.shared.core;
        let state =
            |id| core.volume_status(self.shared.now, id).map_or(VolumeState::Detached, |s| s.state);
        core.volumes().into_iter().map(|(id, spec)| (id, spec, state(id))).collect()
    }

    pub(super) fn copies_of(&self, name: &str) -> Option<CopiesStatus> {
        let all = self.shared.core.volumes();
        let (id, _) = all.into_iter().find(|(_, spec)| spec.name == name)?;
        let status = self.shared.core.volume_status(self.shared.now, id)?;
        Some(CopiesStatus { status, pair: self.replication.owners.get(&id).map(OwnerSide::status) })
    }

    fn knows(&self, id: VolumeId) -> bool {
        self.shared.core.volumes().iter().any(|(known, _)| *known == id)
    }

    /// Starts an operation on a volume.
    pub(super) fn operate<T>(
        &mut self,
        id: VolumeId,
        answer: Answer<T>,
        start: impl FnOnce(&mut Shared<C>, u64, Answer<T>) -> Pending,
    ) {
        let refusal =
            self.refusal().or_else(|| (!self.knows(id)).then_some(ShardError::NoVolume(id)));
        if let Some(error) = refusal {
            let _ = answer.send(Err(error));
            return;
        }
        let number = self.controls.number();
        let pending = start(&mut self.shared, number, answer);
        self.controls.pending.push((number, pending));
    }

    pub(super) fn add(
        &mut self,
        spec: VolumeSpec,
        image: Image,
        degraded: Degraded,
        answer: oneshot::Sender<Result<VolumeId, Refused>>,
    ) {
        let number = self.controls.number();
        let outcome = match self.refusal() {
            Some(error) => Err(error),
            None => self
                .shared
                .core
                .add_volume(self.shared.now, spec.clone(), number)
                .map_err(ShardError::from),
        };
        match outcome {
            Ok(id) => {
                self.pulse.name(id, &spec.name);
                self.shared.volumes.insert(Volume::new(
                    id,
                    spec.name,
                    spec.size_bytes,
                    spec.read_only,
                    image.backend,
                ));
                self.poll_backend(id);
                self.set_own(id, image.own);
                self.set_degraded(id, degraded);
                self.controls.pending.push((number, Pending::Add { id, answer }));
            }
            Err(error) => {
                let _ = answer.send(Err(Refused { error, backend: Some(image.backend) }));
            }
        }
    }

    pub(super) fn attach(
        &mut self,
        (id, name): (VolumeId, String),
        attach: Attach,
        image: Image,
        degraded: Degraded,
        answer: oneshot::Sender<Result<(), Refused>>,
    ) {
        let (size_bytes, read_only) = (attach.size_bytes, attach.read_only);
        let number = self.controls.number();
        match self.try_attach((id, &name), attach, number) {
            Ok(()) => {
                self.pulse.name(id, &name);
                self.shared.volumes.insert(Volume::new(
                    id,
                    name,
                    size_bytes,
                    read_only,
                    image.backend,
                ));
                self.poll_backend(id);
                self.set_own(id, image.own);
                self.set_degraded(id, degraded);
                self.controls.pending.push((number, Pending::Attach { id, answer }));
            }
            Err(error) => {
                let _ = answer.send(Err(Refused { error, backend: Some(image.backend) }));
            }
        }
    }

    /// Before anything is sent to the image: what it has.
    fn set_own(&mut self, id: VolumeId, own: Option<OwnObjects>) {
        let told = own.map_or(Ok(()), |own| self.shared.core.set_own(id, &own));
        debug_assert_eq!(told, Ok(()), "the volume has just got its backend");
    }

    /// Before the first request: what write-back is to do without a second copy.
    fn set_degraded(&mut self, id: VolumeId, degraded: Degraded) {
        let now = self.shared.now;
        if let Some(engine) = self.shared.core.engine() {
            engine.set_degraded(now, id, degraded);
        }
    }

    /// Starts the attachment of a volume; returns its name.
    fn try_attach(
        &mut self,
        (id, name): (VolumeId, &str),
        attach: Attach,
        number: u64,
    ) -> Result<(), ShardError> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        if self.shared.volumes.get(id).is_some() {
            return Err(ShardError::Attached(id));
        }
        // It may have been given up meanwhile, and its number be another one's.
        if !self.shared.core.volumes().iter().any(|(known, spec)| *known == id && spec.name == name)
        {
            return Err(ShardError::NoVolume(id));
        }
        // An owner that is connected still has found the volume as it was.
        self.end_following(id, PeerLost::ServedHere);
        let attach =
            Attach { attachment: self.with_counterpart_of(id, &attach.attachment), ..attach };
        Ok(self.shared.core.attach(self.shared.now, id, attach, number)?)
    }

    pub(super) fn shutdown(&mut self, answer: Answer<Stopped>) {
        if self.stopping.is_some() {
            let _ = answer.send(Err(ShardError::ShuttingDown));
            return;
        }
        self.stopping = Some(Stopping { answer, outcome: None, goodbye: None });
        self.stop_listening();
        for slot in 0..self.connections.capacity() as u32 {
            if let Some(connection) = self.connections.get_mut(slot) {
                connection.stop_reading();
                self.list(slot);
            }
        }
        let number = self.controls.number();
        self.controls.pending.push((number, Pending::Shutdown));
        self.shared.core.shutdown(self.shared.now, number);
    }

    /// The core has finished a control operation.
    pub(in crate::shard) fn control_done(&mut self, number: u64, result: Result<(), ControlError>) {
        let pending = self.controls.take(number).expect("the core answers every operation once");
        if let (Pending::Remove { id, .. } | Pending::HandOver { id, .. }, Ok(())) =
            (&pending, &result)
            && self.shared.volumes.get(*id).is_some_and(Volume::changes_record)
        {
            self.controls.leaving.push((number, *id, pending));
            return;
        }
        self.end_control(number, pending, result);
    }

    /// The backend has answered a change of the ownership record. True if the volume was waiting
    /// for that to leave: then the answer is nobody's.
    pub(in crate::shard) fn leave_after_record(&mut self, id: VolumeId) -> bool {
        let mut found = false;
        while let Some(index) =
            self.controls.leaving.iter().position(|(_, leaving, _)| *leaving == id)
        {
            let (number, _, pending) = self.controls.leaving.swap_remove(index);
            self.end_control(number, pending, Ok(()));
            found = true;
        }
        found
    }

    fn end_control(&mut self, number: u64, pending: Pending, result: Result<(), ControlError>) {
        match (pending, result) {
            (Pending::Add { id, answer }, Ok(())) => {
                self.serve(id);
                let _ = answer.send(Ok(id));
            }
            (Pending::Attach { id, answer }, Ok(())) => {
                self.serve(id);
                let _ = answer.send(Ok(()));
            }
            (Pending::Add { id, answer }, Err(error)) => {
                let _ = answer.send(Err(Refused { error: error.into(), backend: self.detach(id) }));
            }
            (Pending::Attach { id, answer }, Err(error)) => {
                let _ = answer.send(Err(Refused { error: error.into(), backend: self.detach(id) }));
            }
            (Pending::Remove { id, answer }, result) => {
                if result.is_ok() {
                    // Another volume may get its number.
                    self.end_following(id, PeerLost::Forgotten);
                }
                let _ = answer.send(result.map_err(ShardError::from).map(|()| self.detach(id)));
            }
            (Pending::HandOver { id, answer }, result) => {
                let backend = match result {
                    Ok(()) => {
                        self.say_goodbye(id);
                        Ok(self.detach(id))
                    }
                    Err(error) => {
                        self.keep_after_all(id);
                        Err(error.into())
                    }
                };
                let _ = answer.send(backend);
            }
            (Pending::Snapshot { id, answer }, result) => {
                if let Some(volume) = self.shared.volumes.get_mut(id) {
                    volume.forget_snapshot(number);
                }
                let _ = answer.send(result.map_err(ShardError::from));
            }
            (Pending::Resize { id, size_bytes, answer }, result) => {
                if let (Ok(()), Some(volume)) = (result, self.shared.volumes.get_mut(id)) {
                    volume.size_bytes = size_bytes;
                }
                let _ = answer.send(result.map_err(ShardError::from));
            }
            (Pending::Begin { slot }, result) => {
                self.begun(slot, result.map_err(|error| error.to_string()))
            }
            (Pending::Takeover { id, answer }, result) => self.promised(id, answer, result),
            (Pending::Simple { answer }, result) => {
                let _ = answer.send(result.map_err(ShardError::from));
            }
            // A cache device that has failed remembers nothing.
            (Pending::Counterpart { id }, _) => self.counterpart_noted(id, number),
            (Pending::Shutdown, result) => {
                let goodbye = self.shared.now + GOODBYE_NS_MAX;
                if let Some(stopping) = &mut self.stopping {
                    stopping.outcome = Some(result);
                    stopping.goodbye = Some(goodbye);
                }
            }
        }
    }

    pub(in crate::shard) fn serve(&mut self, id: VolumeId) {
        if let Some(volume) = self.shared.volumes.get_mut(id) {
            volume.serving = true;
        }
        self.shared.came = true;
    }

    /// No client is let in, and those that are connected lose the connection.
    pub(in crate::shard) fn close_door(&mut self, id: VolumeId) {
        if let Some(volume) = self.shared.volumes.get_mut(id) {
            volume.serving = false;
        }
        for slot in 0..self.connections.capacity() as u32 {
            if let Some(connection) =
                self.connections.get_mut(slot).filter(|c| c.volume == Some(id))
            {
                connection.break_off();
                self.list(slot);
            }
        }
    }

    /// Takes a volume out of service: closes its connections and hands its backend out.
    fn detach(&mut self, id: VolumeId) -> Option<Box<dyn Backend>> {
        self.close_door(id);
        for slot in 0..self.connections.capacity() as u32 {
            if let Some(connection) =
                self.connections.get_mut(slot).filter(|c| c.volume == Some(id))
            {
                connection.volume = None;
            }
        }
        self.disown(id);
        let mut volume = self.shared.volumes.remove(id)?;
        self.ring.cancel(user(Source::Cancel, 0), user(Source::Backend, u32::from(id.0)));
        for name in volume.gate.abandon() {
            if let Some(connection) = self.connections.get_mut(name.connection) {
                connection.piece_done(name.piece, Err(RequestError::Shutdown), &mut self.shared);
            }
        }
        self.shared.gated.retain(|gated| *gated != id);
        assert_eq!(
            volume.in_flight(),
            0,
            "the core lets go of a volume before it reports that it did"
        );
        Some(volume.into_backend())
    }

    pub(super) fn status(&self) -> ShardStatus {
        let empty = || {
            LatencyHistogram::new_with_bounds(1_000, LATENCY_NS_MAX, 2)
                .expect("as in `Volume::new`")
        };
        let core = &self.shared.core;
        let volumes = core.volumes().into_iter().filter_map(|(id, _)| {
            let status = core.volume_status(self.shared.now, id)?;
            let volume = self.shared.volumes.get(id);
            let [read_latency, write_latency, flush_latency] =
                volume.map_or_else(|| [empty(), empty(), empty()], |v| v.latency.clone());
            let now = self.shared.now;
            Some(ShardVolumeStatus {
                backend_wait_ns: volume.map_or(0, |v| v.backend_wait_ns(now)),
                backend_error: volume.and_then(|v| v.backend_error(now)).or(status.backend_error),
                connections: volume.map_or(0, |v| u64::from(v.connections)),
                pair: self.replication.owners.get(&id).map(OwnerSide::status),
                followed: self.replication.followed(id, now),
                status,
                read_latency,
                write_latency,
                flush_latency,
            })
        });
        ShardStatus {
            device: core.device_status(),
            volumes: volumes.collect(),
            reactor: self.shared.count,
        }
    }

    /// The shutdown is complete, as far as it can be waited for.
    pub(in crate::shard) fn is_stopped(&self) -> bool {
        let Some(stopping) = self.stopping.as_ref().filter(|s| s.outcome.is_some()) else {
            return false;
        };
        let patience = stopping.goodbye.is_some_and(|at| self.shared.now < at);
        let unsent = || self.connections.iter().any(|(_, c)| !c.broken() && !c.outbox.is_empty());
        self.device_is_idle() && !(patience && unsent())
    }

    /// Ends: lets the kernel finish with all memory, and hands out what is left.
    pub(in crate::shard) fn stop(mut self) {
        for slot in 0..self.connections.capacity() as u32 {
            self.connections.get_mut(slot).into_iter().for_each(|c| c.break_off());
        }
        self.break_links();
        while self.connections.iter().any(|(_, c)| !c.is_quiet()) || !self.links_are_quiet() {
            self.ring.enter(Some(Duration::from_secs(1)));
            while let Some(completion) = self.ring.next_completion() {
                self.complete(completion);
            }
        }
        let clean =
            |s: &VolumeStatus| !s.dirty && s.lost_blocks == 0 && s.state != VolumeState::Failed;
        let (core, now) = (&self.shared.core, self.shared.now);
        let device_failed = core.device_status().failed;
        let known: Vec<(VolumeId, VolumeSpec, Option<VolumeStatus>)> = core
            .volumes()
            .into_iter()
            .map(|(id, spec)| (id, spec, core.volume_status(now, id)))
            .collect();
        let mut in_flight = 0;
        let volumes = known.into_iter().map(|(id, spec, status)| {
            let volume = self.shared.volumes.remove(id);
            in_flight += volume.as_ref().map_or(0, Volume::in_flight);
            StoppedVolume {
                id,
                spec,
                clean: status.as_ref().is_some_and(clean),
                unflushed: status.as_ref().is_some_and(|s| s.backend_unflushed),
                backend: volume.map(Volume::into_backend),
            }
        });
        let volumes = volumes.collect();
        let (cache, shared, stopping) = self.dismantle();
        if in_flight > 0 {
            // A backend that hangs may still write to the arena, so that must not be freed. The
            // process is about to end anyway.
            std::mem::forget(shared.core);
        }
        if let Some(Stopping { answer, outcome: Some(outcome), .. }) = stopping {
            let _ = answer.send(Ok(Stopped { outcome, device_failed, volumes, cache }));
        }
    }
}
