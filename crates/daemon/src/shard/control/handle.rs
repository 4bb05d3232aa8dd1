//! The control plane's end of a shard: messages to the reactor thread and answers from it.

use crate::shard::api::{
    Connected, Counterpart, Guest, Hello, Image, Newest, Opened, Refused, ShardError, Stopped,
    Wants,
};
use crate::shard::control::command::Command;
use crate::shard::control::stats::{CopiesStatus, ShardStatus};
use crate::shard::pulse::Pulse;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use tidepool_backend::{Backend, SnapshotChange};
use tidepool_engine::Attach;
use tidepool_engine::api::{Degraded, Mode, VolumeId, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tidepool_replica::{Party, Record};
use tokio::sync::mpsc::Sender;
use tokio::sync::{Notify, oneshot};

/// The way to a reactor thread. Clones lead to the same thread.
#[derive(Clone)]
pub struct ShardHandle {
    sender: mpsc::Sender<Command>,
    /// Rings the reactor's ring; shared so that it stays open as long as anyone may ring.
    bell: Arc<OwnedFd>,
    pulse: Arc<Pulse>,
    opened: Opened,
}

impl ShardHandle {
    pub(in crate::shard) fn new(
        sender: mpsc::Sender<Command>,
        bell: Arc<OwnedFd>,
        pulse: Arc<Pulse>,
        opened: Opened,
    ) -> ShardHandle {
        ShardHandle { sender, bell, pulse, opened }
    }

    /// How many rounds the reactor's loop has made.
    pub fn rounds(&self) -> u64 {
        self.pulse.rounds()
    }

    /// The name of the volume for which the reactor is working at the moment, if it is for one
    /// alone. Waits for nobody.
    pub fn works_for(&self) -> Option<String> {
        self.pulse.works_for()
    }

    /// The cache device's name, and what recovery found on it.
    pub fn opened(&self) -> Opened {
        self.opened
    }

    pub(in crate::shard) fn send(&self, command: Command) -> Result<(), ShardError> {
        self.sender.send(command).map_err(|_| ShardError::Stopped)?;
        self.ring();
        Ok(())
    }

    /// Has the reactor's loop make a round.
    pub fn ring(&self) {
        // The counter of an eventfd saturates only after 2^64 - 2 unread rings: a failed write can
        // only be a bell that is already ringing.
        let _ = rustix::io::write(self.bell.as_fd(), &1u64.to_ne_bytes());
    }

    async fn ask<T>(
        &self,
        make: impl FnOnce(oneshot::Sender<T>) -> Command,
    ) -> Result<T, ShardError> {
        let (answer, wait) = oneshot::channel();
        self.send(make(answer))?;
        wait.await.map_err(|_| ShardError::Stopped)
    }

    /// All volumes of the cache device: those that recovery found and those that were added since.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn volumes(&self) -> Result<Vec<(VolumeId, VolumeSpec, VolumeState)>, ShardError> {
        self.ask(|answer| Command::Volumes { answer }).await
    }

    /// Adds a volume; returns when its place in the cache is persisted and it is being served.
    /// `degraded` is what write-back does until it has a second copy (see [`ShardHandle::own`]).
    ///
    /// # Errors
    /// The core refused it, or persisting it failed; the backend comes back with the error.
    pub async fn add_volume(
        &self,
        spec: VolumeSpec,
        image: Image,
        degraded: Degraded,
    ) -> Result<VolumeId, Refused> {
        self.ask(|answer| Command::Add { spec, image, degraded, answer })
            .await
            .map_err(|error| Refused { error, backend: None })?
    }

    /// Gives the recovered volume of this number and name its backend; returns when it is being
    /// served. `degraded` as for [`ShardHandle::add_volume`].
    ///
    /// # Errors
    /// There is no such volume, it has a backend, or the core refused; the backend comes back.
    pub async fn attach_volume(
        &self,
        (id, name): (VolumeId, &str),
        attach: Attach,
        image: Image,
        degraded: Degraded,
    ) -> Result<(), Refused> {
        let name = name.to_owned();
        self.ask(|answer| Command::Attach { id, name, attach, image, degraded, answer })
            .await
            .map_err(|error| Refused { error, backend: None })?
    }

    /// Forgets a volume that has no backend, with what is dirty.
    ///
    /// # Errors
    /// It has a backend, or as for any operation.
    pub async fn give_up(&self, id: VolumeId) -> Result<(), ShardError> {
        self.ask(|answer| Command::GiveUp { id, answer }).await?.map(drop)
    }

    /// Drains a volume, compares the image with the cache if `verify`, forgets the volume, closes
    /// its connections and hands back its backend (`None` when it was never attached) to be closed.
    ///
    /// # Errors
    /// The volume stays as it was.
    pub async fn remove_volume(
        &self,
        id: VolumeId,
        verify: bool,
    ) -> Result<Option<Box<dyn Backend>>, ShardError> {
        self.ask(|answer| Command::Remove { id, verify, answer }).await?
    }

    /// Takes a volume's backend away and hands it out to be closed, when nothing is on its way
    /// there any more; closes the volume's connections. What is dirty stays dirty.
    ///
    /// # Errors
    /// The volume stays as it was.
    pub async fn detach_volume(
        &self,
        id: VolumeId,
    ) -> Result<Option<Box<dyn Backend>>, ShardError> {
        self.ask(|answer| Command::Detach { id, answer }).await?
    }

    /// The same for a volume whose second copy is in sync, and has everything on stable media then.
    /// Where clients are connected only with `disconnect`.
    ///
    /// # Errors
    /// As above, and if there is no such copy, or not any more.
    pub async fn hand_over(
        &self,
        id: VolumeId,
        disconnect: bool,
    ) -> Result<Option<Box<dyn Backend>>, ShardError> {
        self.ask(|answer| Command::HandOver { id, disconnect, answer }).await?
    }

    /// The same for a volume without a second copy. Where clients are connected only with
    /// `disconnect`.
    ///
    /// # Errors
    /// As above, and if there is a copy.
    pub async fn let_go(
        &self,
        id: VolumeId,
        disconnect: bool,
    ) -> Result<Option<Box<dyn Backend>>, ShardError> {
        self.ask(|answer| Command::LetGo { id, disconnect, answer }).await?
    }

    /// Forgets a volume that has no backend and is nobody's copy.
    ///
    /// # Errors
    /// It is something else, or as for any operation.
    pub async fn forget(&self, id: VolumeId) -> Result<(), ShardError> {
        self.ask(|answer| Command::Forget { id, answer }).await?.map(drop)
    }

    /// Returns when everything that was acknowledged before is in the backend.
    ///
    /// # Errors
    /// The backend or the cache device failed, or data is lost.
    pub async fn drain(&self, id: VolumeId) -> Result<(), ShardError> {
        self.ask(|answer| Command::Drain { id, answer }).await?
    }

    /// Has the backend take a snapshot of this name (none: one of mirroring) of the volume as it is
    /// at a moment after the call.
    ///
    /// # Errors
    /// The volume's drain is unordered, the backend refused, or data is lost.
    pub async fn snapshot(&self, id: VolumeId, name: String) -> Result<(), ShardError> {
        self.ask(|answer| Command::Snapshot { id, name, answer }).await?
    }

    /// Has the backend do something with a snapshot that the image has; requests go on.
    ///
    /// # Errors
    /// The volume is not served, another such change is under way, or the backend refused.
    pub async fn change_snapshot(
        &self,
        id: VolumeId,
        name: String,
        change: SnapshotChange,
    ) -> Result<(), ShardError> {
        self.ask(|answer| Command::ChangeSnapshot { id, name, change, answer }).await?
    }

    /// Lets clients of a volume in that is not served here yet: they go to `guests` after the
    /// handshake. What was expected under this name before is not any more. Returns the number for
    /// [`ShardHandle::unexpect`].
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub fn expect(
        &self,
        name: &str,
        size_bytes: u64,
        guests: Sender<Guest>,
    ) -> Result<u64, ShardError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.send(Command::Expect { number, name: name.to_owned(), size_bytes, guests })?;
        Ok(number)
    }

    /// Lets no more of them in.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub fn unexpect(&self, number: u64) -> Result<(), ShardError> {
        self.send(Command::Unexpect { number })
    }

    /// Gives the connections to other hosts up whose certificates have one of these keys (SHA-256
    /// of each).
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub fn revoke(&self, keys: Vec<[u8; 32]>) -> Result<(), ShardError> {
        self.send(Command::Revoke { keys })
    }

    /// A client whose volume is served now goes on here; if it is not, the connection ends.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub fn adopt(&self, guest: Guest) -> Result<(), ShardError> {
        self.send(Command::Adopt { guest })
    }

    /// Reads from a volume for a client on another host. Without bytes, everything completed before
    /// is on stable media afterwards.
    ///
    /// # Errors
    /// The volume is not served, there is no room at the moment, or the request has failed.
    pub async fn ask_for(
        &self,
        id: VolumeId,
        offset: u64,
        len: u32,
    ) -> Result<Vec<u8>, ShardError> {
        self.ask(|answer| Command::Ask { id, offset, len, answer }).await?
    }

    /// Has a volume that is not served take records of its own log that it has lost (see
    /// [`ShardHandle::log_record`]).
    ///
    /// # Errors
    /// It is served, or something else is being done with it.
    pub async fn follow_on(&self, id: VolumeId) -> Result<(), ShardError> {
        self.ask(|answer| Command::FollowOn { id, answer }).await?
    }

    /// Logs such a record, header block and data; with `durable` everything is on stable media
    /// afterwards.
    ///
    /// # Errors
    /// It is not the next one, or there is no room for it.
    pub async fn log_record(
        &self,
        id: VolumeId,
        bytes: Vec<u8>,
        durable: bool,
    ) -> Result<(), ShardError> {
        self.ask(|answer| Command::LogRecord { id, bytes, durable, answer }).await?.map(drop)
    }

    /// Gives a volume and its image another size; what lies beyond the end of a smaller one is
    /// lost. Connected clients learn of it when they connect anew.
    ///
    /// # Errors
    /// The size cannot be had, or the backend or the cache device failed.
    pub async fn resize(&self, id: VolumeId, size_bytes: u64) -> Result<(), ShardError> {
        self.ask(|answer| Command::Resize { id, size_bytes, answer }).await?
    }

    /// Changes what the cache does with the volume's writes; returns when it is in force.
    ///
    /// # Errors
    /// The volume is not attached, or the backlog could not be drained.
    pub async fn set_mode(&self, id: VolumeId, mode: Mode) -> Result<(), ShardError> {
        self.ask(|answer| Command::SetMode { id, mode, answer }).await?
    }

    /// Changes the volume's dirty quota (0 for the default share).
    ///
    /// # Errors
    /// There is no such volume.
    pub async fn set_dirty_bytes_max(
        &self,
        id: VolumeId,
        dirty_bytes_max: u64,
    ) -> Result<(), ShardError> {
        self.ask(|answer| Command::SetDirtyBytesMax { id, dirty_bytes_max, answer }).await?
    }

    /// Replaces what the cache device keeps with the volume for the control plane; returns when a
    /// restart will find the new one.
    ///
    /// # Errors
    /// There is no such volume, or the cache device failed.
    pub async fn set_attachment(
        &self,
        id: VolumeId,
        attachment: Vec<u8>,
    ) -> Result<(), ShardError> {
        self.ask(|answer| Command::SetAttachment { id, attachment, answer }).await?
    }

    /// Has records of the copy that is kept for a host come here no more, until its owner has
    /// introduced itself again. Returns what is newest of it, if there is such a copy.
    ///
    /// # Errors
    /// The reactor has stopped.
    pub async fn end_following(
        &self,
        name: &str,
        of: &Counterpart,
    ) -> Result<Option<Newest>, ShardError> {
        let (name, of) = (name.to_owned(), of.clone());
        self.ask(|answer| Command::EndFollowing { name, of, answer }).await?
    }

    /// The copy that is kept for a host may be given to, or thrown away for, any owner from now on,
    /// if that is still what is newest of it and nobody is connected that may send records. Returns
    /// when a restart will know it. Where it is not so, nothing happens.
    ///
    /// # Errors
    /// The cache device failed.
    pub async fn forget_counterpart(
        &self,
        name: &str,
        of: &Counterpart,
        newest: Newest,
    ) -> Result<(), ShardError> {
        let (name, of) = (name.to_owned(), of.clone());
        self.ask(|answer| Command::ForgetCounterpart { name, of, newest, answer }).await?
    }

    /// What is here of a volume of this name, and its second copy. Costs little, however many
    /// volumes there are.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn copies_of(&self, name: &str) -> Result<Option<CopiesStatus>, ShardError> {
        self.ask(|answer| Command::CopiesOf { name: name.to_owned(), answer }).await
    }

    /// Looks whether what is here of a volume of this name, if there is something, may be given to,
    /// or thrown away for, this owner.
    ///
    /// # Errors
    /// It is kept for another host.
    pub async fn check_counterpart(
        &self,
        name: &str,
        owner: Counterpart,
    ) -> Result<(), ShardError> {
        let name = name.to_owned();
        self.ask(|answer| Command::CheckCounterpart { name, owner, answer }).await?
    }

    /// Has what a volume's image has from its parent read through the parent's volume; see
    /// [`Engine::set_parent`].
    ///
    /// # Errors
    /// One of them is not there or not attached, or the one cannot be the parent of the other.
    ///
    /// [`Engine::set_parent`]: tidepool_engine::Engine::set_parent
    pub async fn set_parent(&self, id: VolumeId, parent: VolumeId) -> Result<(), ShardError> {
        self.ask(|answer| Command::SetParent { id, parent, answer }).await?
    }

    /// State, counters and latencies of the device and its volumes at one moment.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn status(&self) -> Result<ShardStatus, ShardError> {
        self.ask(|answer| Command::Status { answer }).await
    }

    /// Serves NBD on a bound and listening unix or TCP socket: one volume (also as the default
    /// export), or all of them by name when `export` is `None`.
    ///
    /// # Errors
    /// There are too many listeners, or the shard is shutting down.
    pub async fn listen(
        &self,
        listener: OwnedFd,
        export: Option<String>,
    ) -> Result<(), ShardError> {
        self.ask(|answer| Command::Listen { listener, export, answer }).await?
    }

    /// Serves NBD to a client that has connected to a volume's own socket: that volume alone, also
    /// as the default export. Turns it away where it has its share of connections. The descriptor
    /// is without `O_NONBLOCK`.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn admit(&self, client: OwnedFd, volume: &str) -> Result<(), ShardError> {
        let volume = volume.to_owned();
        self.ask(|answer| Command::Admit { client, volume, answer }).await
    }

    /// Counts a client that a volume's allow list has kept out.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn deny(&self) -> Result<(), ShardError> {
        self.ask(|answer| Command::Deny { answer }).await
    }

    /// Nothing more goes to the backends, or everything that is due goes again.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn pause_drain(&self, paused: bool) -> Result<(), ShardError> {
        self.ask(|answer| Command::PauseDrain { paused, answer }).await
    }

    /// The writes of a volume that is served are to have a second copy; `record` is its ownership
    /// record, which names none. `alone` is what write-back does while none counts. `wanted` is
    /// rung when a connection to a peer would be of use.
    ///
    /// # Errors
    /// There is no such volume.
    pub async fn own(
        &self,
        id: VolumeId,
        record: Record,
        alone: Degraded,
        wanted: Arc<Notify>,
    ) -> Result<(), ShardError> {
        self.ask(|answer| Command::Own { id, record, alone, wanted, answer }).await?
    }

    /// A peer has said welcome to an owner; whether it is of use now. If not, the connection is
    /// closed.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn connect(&self, id: VolumeId, connected: Connected) -> Result<bool, ShardError> {
        self.ask(|answer| Command::Connect { id, connected, answer }).await
    }

    /// Ends the second copy of a volume until [`ShardHandle::pair_again`]; returns when the
    /// ownership record says so. At once for a volume without one.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn part(&self, id: VolumeId) -> Result<(), ShardError> {
        self.ask(|answer| Command::Part { id, answer }).await?
    }

    /// Whether a connection to a peer would be of use to a volume; `None` when it is not served any
    /// more.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn wants_peer(&self, id: VolumeId) -> Result<Option<Wants>, ShardError> {
        self.ask(|answer| Command::WantsPeer { id, answer }).await
    }

    /// A second copy is wanted again after [`ShardHandle::part`].
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub fn pair_again(&self, id: VolumeId) -> Result<(), ShardError> {
        self.send(Command::PairAgain { id })
    }

    /// What write-back does from now on while there is no second copy that counts.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub fn set_alone(&self, id: VolumeId, alone: Degraded) -> Result<(), ShardError> {
        self.send(Command::SetAlone { id, alone })
    }

    /// For how long nothing has been received of a host's daemon; `None` if there is no connection
    /// with it.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn silence_of(&self, host: &str) -> Result<Option<std::time::Duration>, ShardError> {
        let silence =
            self.ask(|answer| Command::SilenceOf { host: host.to_owned(), answer }).await?;
        Ok(silence.map(std::time::Duration::from_nanos))
    }

    /// For how long the owner of a copy has not been told that it is followed; `None` if it never
    /// was since the reactor began.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub async fn unfollowed_for(
        &self,
        id: VolumeId,
    ) -> Result<Option<std::time::Duration>, ShardError> {
        let time = self.ask(|answer| Command::Unfollowed { id, answer }).await?;
        Ok(time.map(std::time::Duration::from_nanos))
    }

    /// An owner wants to send a volume's records here. It is answered on its connection, also when
    /// it is refused.
    ///
    /// # Errors
    /// Why it was refused.
    pub async fn welcome(&self, hello: Hello) -> Result<(), ShardError> {
        self.ask(|answer| Command::Welcome { hello, answer }).await?
    }

    /// Makes the copy of a volume ready to be taken over while `record` stands: it is on stable
    /// media, and nothing more is taken from the owner.
    ///
    /// # Errors
    /// It does not count, or the cache device failed.
    pub async fn prepare(
        &self,
        id: VolumeId,
        me: Party,
        record: Record,
        accept_loss: bool,
    ) -> Result<(), ShardError> {
        self.ask(|answer| Command::Prepare { id, me, record, accept_loss, answer }).await?
    }

    /// Stops accepting, lets requests in flight finish, flushes, writes a checkpoint, closes all
    /// connections and ends the reactor thread. Nothing is drained. A second call gets
    /// [`ShardError::ShuttingDown`].
    ///
    /// # Errors
    /// The reactor has stopped already, or is about to.
    pub async fn shutdown(&self) -> Result<Stopped, ShardError> {
        self.ask(|answer| Command::Shutdown { answer }).await?
    }
}
