//! What a reactor thread is asked to do, and does.

use super::Pending;
use crate::shard::api::{
    Connected, Counterpart, Guest, Hello, Image, Newest, Refused, ShardError, Stopped, Wants,
};
use crate::shard::control::stats::{CopiesStatus, ShardStatus};
use crate::shard::core::Core;
use crate::shard::front::effort::{REQUEST, STATUS};
use crate::shard::reactor::Reactor;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use tidepool_backend::{Backend, SnapshotChange};
use tidepool_engine::Attach;
use tidepool_engine::api::{Degraded, Mode, Nanos, VolumeId, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tidepool_replica::{Party, PeerLost, Record};
use tokio::sync::mpsc::Sender;
use tokio::sync::{Notify, oneshot};

/// The answer to a command that may fail.
pub(in crate::shard) type Answer<T> = oneshot::Sender<Result<T, ShardError>>;

/// What the control plane asks of the reactor thread.
pub(in crate::shard) enum Command {
    Volumes {
        answer: oneshot::Sender<Vec<(VolumeId, VolumeSpec, VolumeState)>>,
    },
    Add {
        spec: VolumeSpec,
        image: Image,
        degraded: Degraded,
        answer: oneshot::Sender<Result<VolumeId, Refused>>,
    },
    Attach {
        id: VolumeId,
        name: String,
        attach: Attach,
        image: Image,
        degraded: Degraded,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    Remove {
        id: VolumeId,
        verify: bool,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    Drain {
        id: VolumeId,
        answer: Answer<()>,
    },
    Snapshot {
        id: VolumeId,
        name: String,
        answer: Answer<()>,
    },
    ChangeSnapshot {
        id: VolumeId,
        name: String,
        change: SnapshotChange,
        answer: Answer<()>,
    },
    Resize {
        id: VolumeId,
        size_bytes: u64,
        answer: Answer<()>,
    },
    SetMode {
        id: VolumeId,
        mode: Mode,
        answer: Answer<()>,
    },
    SetDirtyBytesMax {
        id: VolumeId,
        dirty_bytes_max: u64,
        answer: Answer<()>,
    },
    SetAttachment {
        id: VolumeId,
        attachment: Vec<u8>,
        answer: Answer<()>,
    },
    EndFollowing {
        name: String,
        of: Counterpart,
        answer: Answer<Option<Newest>>,
    },
    ForgetCounterpart {
        name: String,
        of: Counterpart,
        newest: Newest,
        answer: Answer<()>,
    },
    CopiesOf {
        name: String,
        answer: oneshot::Sender<Option<CopiesStatus>>,
    },
    CheckCounterpart {
        name: String,
        owner: Counterpart,
        answer: Answer<()>,
    },
    SetParent {
        id: VolumeId,
        parent: VolumeId,
        answer: Answer<()>,
    },
    Status {
        answer: oneshot::Sender<ShardStatus>,
    },
    Listen {
        listener: OwnedFd,
        export: Option<String>,
        answer: Answer<()>,
    },
    Admit {
        client: OwnedFd,
        volume: String,
        answer: oneshot::Sender<()>,
    },
    Deny {
        answer: oneshot::Sender<()>,
    },
    PauseDrain {
        paused: bool,
        answer: oneshot::Sender<()>,
    },
    Shutdown {
        answer: Answer<Stopped>,
    },
    Own {
        id: VolumeId,
        record: Record,
        alone: Degraded,
        wanted: Arc<Notify>,
        answer: Answer<()>,
    },
    Connect {
        id: VolumeId,
        connected: Connected,
        answer: oneshot::Sender<bool>,
    },
    Part {
        id: VolumeId,
        answer: Answer<()>,
    },
    PairAgain {
        id: VolumeId,
    },
    WantsPeer {
        id: VolumeId,
        answer: oneshot::Sender<Option<Wants>>,
    },
    GiveUp {
        id: VolumeId,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    Detach {
        id: VolumeId,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    HandOver {
        id: VolumeId,
        disconnect: bool,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    LetGo {
        id: VolumeId,
        disconnect: bool,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    Forget {
        id: VolumeId,
        answer: Answer<Option<Box<dyn Backend>>>,
    },
    SetAlone {
        id: VolumeId,
        alone: Degraded,
    },
    Expect {
        number: u64,
        name: String,
        size_bytes: u64,
        guests: Sender<Guest>,
    },
    Unexpect {
        number: u64,
    },
    Revoke {
        keys: Vec<[u8; 32]>,
    },
    Announce {
        number: u64,
        name: String,
        awaited: Option<bool>,
    },
    Adopt {
        guest: Guest,
    },
    Ask {
        id: VolumeId,
        offset: u64,
        len: u32,
        answer: Answer<Vec<u8>>,
    },
    FollowOn {
        id: VolumeId,
        answer: Answer<()>,
    },
    LogRecord {
        id: VolumeId,
        bytes: Vec<u8>,
        durable: bool,
        answer: Answer<Vec<u8>>,
    },
    SilenceOf {
        host: String,
        answer: oneshot::Sender<Option<Nanos>>,
    },
    Unfollowed {
        id: VolumeId,
        answer: oneshot::Sender<Option<Nanos>>,
    },
    Welcome {
        hello: Hello,
        answer: Answer<()>,
    },
    Prepare {
        id: VolumeId,
        me: Party,
        record: Record,
        accept_loss: bool,
        answer: Answer<()>,
    },
}

impl Command {
    /// What it costs, in units of the reactor's effort.
    fn effort(&self) -> u32 {
        match self {
            Command::Volumes { .. }
            | Command::Status { .. }
            | Command::CopiesOf { .. }
            | Command::CheckCounterpart { .. } => STATUS,
            _ => REQUEST,
        }
    }
}

impl<C: Core> Reactor<C> {
    /// Executes a command, or begins to.
    pub(in crate::shard) fn command(&mut self, command: Command) {
        self.shared.effort.count(command.effort());
        self.execute_command(command, self.shared.now);
    }

    fn execute_command(&mut self, command: Command, now: Nanos) {
        match command {
            Command::Volumes { answer } => {
                let _ = answer.send(self.volumes());
            }
            Command::Status { answer } => {
                let _ = answer.send(self.status());
            }
            Command::Add { spec, image, degraded, answer } => {
                self.add(spec, image, degraded, answer)
            }
            Command::Attach { id, name, attach, image, degraded, answer } => {
                self.attach((id, name), attach, image, degraded, answer);
            }
            Command::GiveUp { id, answer } => {
                self.end_following(id, PeerLost::Forgotten);
                self.operate(id, answer, |shared, number, answer| {
                    shared.core.give_up(now, id, number);
                    Pending::Remove { id, answer }
                });
            }
            Command::Remove { id, verify, answer } => {
                self.end_following(id, PeerLost::Forgotten);
                self.operate(id, answer, |shared, number, answer| {
                    shared.core.remove(now, id, verify, number);
                    Pending::Remove { id, answer }
                });
            }
            Command::Detach { id, answer } => self.detach_lost(id, answer),
            Command::HandOver { id, disconnect, answer } => {
                let may = self.may_hand_over(id, disconnect);
                self.detach_for_another(id, may, answer);
            }
            Command::Forget { id, answer } => self.forget(id, answer),
            Command::LetGo { id, disconnect, answer } => {
                let may = self.may_let_go(id, disconnect);
                self.detach_for_another(id, may, answer);
            }
            Command::Drain { id, answer } => self.operate(id, answer, |shared, number, answer| {
                shared.core.drain(now, id, number);
                Pending::Simple { answer }
            }),
            Command::Snapshot { id, name, answer } => self.snapshot(id, name, answer),
            Command::ChangeSnapshot { id, name, change, answer } => {
                self.change_snapshot(id, &name, change, answer);
            }
            Command::Resize { id, size_bytes, answer } => {
                self.operate(id, answer, |shared, number, answer| {
                    shared.core.resize(now, id, size_bytes, number);
                    Pending::Resize { id, size_bytes, answer }
                })
            }
            Command::SetMode { id, mode, answer } => {
                self.operate(id, answer, |shared, number, answer| {
                    shared.core.set_mode(now, id, mode, number);
                    Pending::Simple { answer }
                })
            }
            Command::SetDirtyBytesMax { id, dirty_bytes_max, answer } => {
                self.operate(id, answer, |shared, number, answer| {
                    shared.core.set_dirty_bytes_max(now, id, dirty_bytes_max, number);
                    Pending::Simple { answer }
                });
            }
            Command::SetAttachment { id, attachment, answer } => {
                let attachment = self.with_counterpart_of(id, &attachment);
                self.operate(id, answer, |shared, number, answer| {
                    shared.core.set_attachment(now, id, attachment, number);
                    Pending::Simple { answer }
                })
            }
            Command::EndFollowing { name, of, answer } => {
                let _ = answer.send(Ok(self.end_following_for(&name, &of)));
            }
            Command::ForgetCounterpart { name, of, newest, answer } => {
                self.forget_counterpart(&name, &of, newest, answer);
            }
            Command::CheckCounterpart { name, owner, answer } => {
                let _ = answer.send(self.check_counterpart_of(&name, &owner));
            }
            Command::CopiesOf { name, answer } => {
                let _ = answer.send(self.copies_of(&name));
            }
            Command::SetParent { id, parent, answer } => {
                let outcome = self.shared.core.set_parent(id, parent);
                let _ = answer.send(outcome.map_err(ShardError::Control));
            }
            Command::Listen { listener, export, answer } => {
                let _ =
                    answer.send(self.refusal().map_or_else(|| self.listen(listener, export), Err));
            }
            Command::Admit { client, volume, answer } => {
                self.admit_unless_stopping(client, volume);
                let _ = answer.send(());
            }
            Command::Deny { answer } => {
                self.shared.count.denied += 1;
                let _ = answer.send(());
            }
            Command::PauseDrain { paused, answer } => {
                self.shared.core.pause_drain(paused);
                let _ = answer.send(());
            }
            Command::Shutdown { answer } => self.shutdown(answer),
            Command::Own { id, record, alone, wanted, answer } => {
                let _ = answer.send(self.own(id, record, alone, wanted));
            }
            Command::Connect { id, connected, answer } => {
                let _ = answer.send(self.connect_peer(id, connected));
            }
            Command::Part { id, answer } => self.part(id, answer),
            Command::PairAgain { id } => self.pair_again(id),
            Command::WantsPeer { id, answer } => {
                let _ = answer.send(self.wants_peer(id));
            }
            Command::Expect { number, name, size_bytes, guests } => {
                self.expect(number, name, size_bytes, guests);
            }
            Command::Announce { number, name, awaited } => self.announce(number, name, awaited),
            Command::Unexpect { number } => self.unexpect(number),
            Command::Revoke { keys } => self.revoke(&keys),
            Command::Adopt { guest } => self.adopt(guest),
            Command::Ask { id, offset, len, answer } => self.ask(id, offset, len, answer),
            Command::FollowOn { id, answer } => {
                // An owner that is connected still has found the volume as it was.
                self.end_following(id, PeerLost::OwnVolume);
                let _ = answer.send(self.follow_on(id));
            }
            Command::LogRecord { id, bytes, durable, answer } => {
                self.log_record(id, &bytes, durable, answer);
            }
            Command::SetAlone { id, alone } => self.set_alone(id, alone),
            Command::SilenceOf { host, answer } => {
                let _ = answer.send(self.replication.silence_of(&host, now));
            }
            Command::Unfollowed { id, answer } => {
                let since = self.replication.followed_at.get(&id);
                let _ = answer.send(since.map(|since| now.saturating_sub(*since)));
            }
            Command::Welcome { hello, answer } => {
                let _ = answer.send(self.welcome(hello));
            }
            Command::Prepare { id, me, record, accept_loss, answer } => {
                self.prepare(id, (me, record, accept_loss), answer);
            }
        }
    }

    /// Takes the backend of a volume away that another host has.
    fn detach_lost(&mut self, id: VolumeId, answer: Answer<Option<Box<dyn Backend>>>) {
        if !self.is_lost(id) && !self.is_fenced(id) {
            return drop(answer.send(Err(ShardError::Attached(id))));
        }
        let now = self.shared.now;
        self.operate(id, answer, |shared, number, answer| {
            let engine = shared.core.engine().expect("only volumes with an owner let go");
            // Nobody else is served by it: there is time.
            engine.detach(now, id, Nanos::MAX, number);
            Pending::Remove { id, answer }
        });
    }

    /// Forgets a volume that has no backend.
    fn forget(&mut self, id: VolumeId, answer: Answer<Option<Box<dyn Backend>>>) {
        let now = self.shared.now;
        let status = self.shared.core.volume_status(now, id);
        if status.is_none_or(|status| status.state != VolumeState::Detached) {
            return drop(answer.send(Err(ShardError::Attached(id))));
        }
        self.end_following(id, PeerLost::Forgotten);
        self.operate(id, answer, |shared, number, answer| {
            shared.core.remove(now, id, false, number);
            Pending::Remove { id, answer }
        });
    }

    fn snapshot(&mut self, id: VolumeId, name: String, answer: Answer<()>) {
        let now = self.shared.now;
        self.operate(id, answer, |shared, number, answer| {
            if let Some(volume) = shared.volumes.get_mut(id) {
                volume.name_snapshot(number, name);
            }
            shared.core.snapshot(now, id, number);
            Pending::Snapshot { id, answer }
        });
    }

    fn change_snapshot(
        &mut self,
        id: VolumeId,
        name: &str,
        change: SnapshotChange,
        answer: Answer<()>,
    ) {
        let refusal = self.refusal();
        match (refusal, self.shared.volumes.get_mut(id)) {
            (Some(error), _) => drop(answer.send(Err(error))),
            (None, Some(volume)) if volume.serving => volume.change_snapshot(name, change, answer),
            (None, _) => drop(answer.send(Err(ShardError::NoVolume(id)))),
        }
    }

    /// Takes no more records of the copy that is kept for a host; what is newest of it.
    fn end_following_for(&mut self, name: &str, of: &Counterpart) -> Option<Newest> {
        let (id, newest) = self.kept_for(name, of)?;
        self.end_following(id, PeerLost::WantedByAnother);
        Some(newest)
    }

    /// Keeps a copy for nobody any more, if nothing was added to it and nobody adds anything.
    fn forget_counterpart(
        &mut self,
        name: &str,
        of: &Counterpart,
        newest: Newest,
        answer: Answer<()>,
    ) {
        let kept = self.kept_for(name, of).filter(|(_, now)| *now == newest);
        let kept = kept.filter(|(id, _)| !self.is_followed(*id));
        let kept = kept.and_then(|(id, _)| Some((id, self.attachment_for(id, None)?)));
        let Some((id, attachment)) = kept else {
            return drop(answer.send(Ok(())));
        };
        let now = self.shared.now;
        self.operate(id, answer, |shared, number, answer| {
            shared.core.set_attachment(now, id, attachment, number);
            Pending::Simple { answer }
        });
    }

    fn check_counterpart_of(&self, name: &str, owner: &Counterpart) -> Result<(), ShardError> {
        let all = self.shared.core.volumes();
        let known = all.iter().find(|(_, spec)| spec.name == name);
        known.map_or(Ok(()), |(id, _)| self.check_counterpart(*id, owner))
    }

    fn admit_unless_stopping(&mut self, client: OwnedFd, volume: String) {
        if self.stopping.is_none() {
            self.admit(client, Some(volume.into()));
        }
    }
}
