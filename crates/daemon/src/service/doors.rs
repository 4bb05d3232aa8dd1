//! The volumes' own sockets: made before anything else, served as soon as there is a shard, and
//! gone with their volume. One that cannot be made, since something else is in its place, is tried
//! again; the other volumes do not wait for that.
//!
//! Clients are accepted here and not by the reactor, because a look at who they are may wait for
//! the kernel. Each socket has one task that looks at one client at a time, so that clients that
//! hammer on one of them hold up no other.

use crate::door::{Access, VolumeSocket};
use crate::listen::{ListenError, Listening, SocketFile};
use crate::shard::{ShardError, ShardHandle};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener as StdListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidepool_engine::api::VOLUMES_MAX;
use tokio::net::UnixListener;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tracing::{info, warn};

/// Pause after the system had no resources for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Pause before a socket that could not be made is tried again.
const MEND_PAUSE: Duration = Duration::from_secs(5);
/// Most looks at clients at the same time that may wait for the kernel.
const CHECKS_MAX: usize = 16;
/// Most sockets: one for each volume that a cache holds.
const DOORS_MAX: usize = VOLUMES_MAX;

/// Why a volume has no socket, in one line.
#[derive(Debug)]
pub enum NoDoor {
    /// It cannot have this one.
    Refused(String),
    /// The host is not as it is to be, which may pass.
    Trouble(String),
}

impl NoDoor {
    /// It as text.
    pub fn why(self) -> String {
        match self {
            NoDoor::Refused(why) | NoDoor::Trouble(why) => why,
        }
    }
}

/// The socket of one volume.
struct Door {
    wanted: VolumeSocket,
    /// The configuration names it, so that it stays when the volume goes to another host.
    configured: bool,
    /// What is not served yet.
    waiting: Option<Made>,
    task: Option<AbortHandle>,
    file: Option<SocketFile>,
    /// Why it could not be made; it is tried again.
    trouble: Option<String>,
}

/// A socket that takes clients in, and which ones.
type Made = (StdListener, Access);

/// Makes a socket.
fn make(wanted: &VolumeSocket) -> Result<(Made, Option<SocketFile>), NoDoor> {
    let resolved = wanted.resolve().map_err(|error| NoDoor::Refused(error.to_string()))?;
    let listening =
        Listening::bind_volume(&wanted.path, &resolved).map_err(|error| match error {
            ListenError::TooLong { .. } => NoDoor::Refused(error.to_string()),
            _ => NoDoor::Trouble(error.to_string()),
        })?;
    let (socket, file) = listening.into_parts();
    let listener = StdListener::from(socket);
    listener
        .set_nonblocking(true)
        .map_err(|error| NoDoor::Trouble(crate::failure::reason(&error)))?;
    Ok(((listener, resolved.access().clone()), file))
}

impl Door {
    /// It could not be made.
    fn is_in_trouble(&mut self, volume: &str, why: String) {
        if self.trouble.as_ref() != Some(&why) {
            warn!("volume {volume} has no socket of its own yet, which is tried again: {why}");
        }
        self.trouble = Some(why);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// The sockets by the names of their volumes.
pub struct Doors {
    doors: Mutex<BTreeMap<String, Door>>,
    checks: Arc<Semaphore>,
}

impl Default for Doors {
    fn default() -> Doors {
        Doors { doors: Mutex::default(), checks: Arc::new(Semaphore::new(CHECKS_MAX)) }
    }
}

impl Doors {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Door>> {
        // No panic leaves the map half changed.
        self.doors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the socket of a volume. Whether it is new: it may be there just as it is wanted. May
    /// wait for the user database and the file system.
    ///
    /// # Errors
    /// Why it cannot be. Nothing has changed then.
    pub fn open(
        &self,
        volume: &str,
        wanted: &VolumeSocket,
        configured: bool,
    ) -> Result<bool, NoDoor> {
        {
            let doors = self.lock();
            match doors.get(volume) {
                Some(door) if door.wanted == *wanted => return Ok(false),
                Some(door) => {
                    let why = format!("it has the socket {} already", door.wanted.path.display());
                    return Err(NoDoor::Refused(why));
                }
                None => {}
            }
            if let Some((other, _)) = doors.iter().find(|(_, door)| door.wanted.path == wanted.path)
            {
                let why = format!("{} is the socket of volume {other}", wanted.path.display());
                return Err(NoDoor::Refused(why));
            }
            if doors.len() >= DOORS_MAX {
                let why = format!(
                    "there are {DOORS_MAX} volumes with a socket of their own, which is the limit"
                );
                return Err(NoDoor::Refused(why));
            }
        }
        let (made, file) = make(wanted)?;
        let (wanted, waiting) = (wanted.clone(), Some(made));
        let door = Door { wanted, configured, waiting, task: None, file, trouble: None };
        // One that was entered meanwhile is at another path, since this one was free.
        self.lock().entry(volume.to_owned()).or_insert(door);
        Ok(true)
    }

    /// Gives a volume another socket, or the one that it has with other settings. Clients that are
    /// connected stay.
    ///
    /// # Errors
    /// Why it cannot have that. It has the one that it had then.
    pub(super) fn change(&self, volume: &str, wanted: &VolumeSocket) -> Result<(), NoDoor> {
        let before = self.lock().remove(volume);
        let had = before.as_ref().map(|door| (door.wanted.clone(), door.configured));
        let configured = had.as_ref().is_some_and(|(_, configured)| *configured);
        // At one path there is one at a time.
        let before = before.filter(|door| door.wanted.path != wanted.path);
        let opened = self.open(volume, wanted, configured);
        if opened.is_err()
            && let Some((had, configured)) = had
        {
            match before {
                Some(door) => drop(self.lock().insert(volume.to_owned(), door)),
                None => {
                    if let Err(why) = self.open(volume, &had, configured) {
                        self.keep(volume, had, configured, why.why());
                    }
                }
            }
        }
        opened.map(|_| ())
    }

    /// Tries again what could not be made, until it is dropped.
    pub(super) async fn mend(self: Arc<Self>, shard: ShardHandle) {
        loop {
            tokio::time::sleep(MEND_PAUSE).await;
            let in_trouble = |(volume, door): (&String, &Door)| {
                door.trouble.as_ref().map(|_| (volume.clone(), door.wanted.clone()))
            };
            let broken: Vec<_> = self.lock().iter().filter_map(in_trouble).collect();
            for (volume, wanted) in broken {
                let asked = wanted.clone();
                let made = tokio::task::spawn_blocking(move || make(&asked)).await;
                let Ok(made) = made else { continue };
                let mut doors = self.lock();
                // It may have been removed or changed meanwhile.
                let still = |door: &&mut Door| door.wanted == wanted && door.trouble.is_some();
                let Some(door) = doors.get_mut(&volume).filter(still) else { continue };
                match made {
                    Ok((made, file)) => {
                        (door.waiting, door.file, door.trouble) = (Some(made), file, None)
                    }
                    Err(why) => door.is_in_trouble(&volume, why.why()),
                }
            }
            self.serve(&shard);
        }
    }

    /// Begins to take clients in at those sockets that are not served yet.
    pub(super) fn serve(&self, shard: &ShardHandle) {
        for (volume, door) in self.lock().iter_mut() {
            let Some((listener, access)) = door.waiting.take() else { continue };
            match UnixListener::from_std(listener) {
                Ok(listener) => {
                    let guard = Guard { access: access.into(), checks: self.checks.clone() };
                    let serving = accept(listener, guard, volume.clone(), shard.clone());
                    door.task = Some(tokio::spawn(serving).abort_handle());
                    info!("volume {volume}: listening on {}", door.wanted.path.display());
                }
                Err(error) => {
                    door.file = None;
                    door.is_in_trouble(volume, crate::failure::reason(&error));
                }
            }
        }
    }

    /// The socket that a volume has.
    pub(super) fn of(&self, volume: &str) -> Option<VolumeSocket> {
        self.lock().get(volume).map(|door| door.wanted.clone())
    }

    /// Why a volume's socket could not be made.
    pub(super) fn trouble(&self, volume: &str) -> Option<String> {
        self.lock().get(volume).and_then(|door| door.trouble.clone())
    }

    /// The socket of a volume could not be made. It is tried again.
    pub(super) fn keep(&self, volume: &str, wanted: VolumeSocket, configured: bool, why: String) {
        let door =
            Door { wanted, configured, waiting: None, task: None, file: None, trouble: None };
        self.lock().entry(volume.to_owned()).or_insert(door).is_in_trouble(volume, why);
    }

    /// A volume is removed.
    pub(super) fn close(&self, volume: &str) {
        let door = self.lock().remove(volume);
        drop(door);
    }

    /// A volume has gone to another host, and nothing of it is here.
    pub(super) fn leave(&self, volume: &str) {
        let mut doors = self.lock();
        if doors.get(volume).is_some_and(|door| !door.configured) {
            doors.remove(volume);
        }
    }

    /// The daemon ends.
    pub(super) fn close_all(&self) {
        let doors = std::mem::take(&mut *self.lock());
        drop(doors);
    }
}

/// Who looks at the clients of one volume.
struct Guard {
    access: Arc<Access>,
    /// Those of all volumes that may do so.
    checks: Arc<Semaphore>,
}

/// Takes in the clients of one volume that are allowed to use it.
async fn accept(listener: UnixListener, guard: Guard, volume: String, shard: ShardHandle) {
    loop {
        let accepted = listener.accept().await.and_then(|(stream, _)| stream.into_std());
        let client = accepted.and_then(|stream| {
            // io_uring waits by itself; with O_NONBLOCK it would not.
            stream.set_nonblocking(false)?;
            Ok(OwnedFd::from(stream))
        });
        let outcome = match client {
            Ok(client) => let_in(client, &guard, &volume, &shard).await,
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
            Err(error) => {
                warn!("volume {volume}: cannot accept a connection: {error}; trying again shortly");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if outcome.is_err() {
            // The reactor has stopped: nobody is served any more.
            return;
        }
    }
}

async fn let_in(
    client: OwnedFd,
    Guard { access, checks }: &Guard,
    volume: &str,
    shard: &ShardHandle,
) -> Result<(), ShardError> {
    let (client, checked) = if access.may_wait() {
        let (access, turn) = (access.clone(), checks.clone().acquire_owned().await);
        let check = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            let checked = access.check(client.as_fd());
            (client, checked)
        });
        // It has no way to fail but a panic, which has ended the connection.
        let Ok(checked) = check.await else { return Ok(()) };
        checked
    } else {
        let checked = access.check(client.as_fd());
        (client, checked)
    };
    match checked {
        Ok(()) => shard.admit(client, volume).await,
        Err(why) => {
            let peer = crate::door::peer_of(client.as_fd())
                .map_or_else(|_| "a local client".into(), |peer| peer.to_string());
            warn!(%peer, "keeping a client out of volume {volume}: {why}");
            shard.deny().await
        }
    }
}
