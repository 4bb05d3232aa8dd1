//! Tells the service manager that the daemon goes on, as long as both of its loops make rounds: the
//! reactor's and the control thread's. It counts rounds and knows no clock: a disk that is slow, or
//! a daemon that stood still as a whole, is no reason to end it.

use crate::aborts::{Aborts, Note};
use crate::failure::reason;
use crate::shard::ShardHandle;
use sd_notify::NotifyState;
use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use tokio::sync::Notify;
use tracing::{error, warn};

/// How often the loops are looked at in the time after which the manager ends a daemon that says
/// nothing: a loop has to make no round at all in several looks before that.
const LOOKS: u32 = 6;
/// What is said then.
const GOES_ON: &[u8] = b"WATCHDOG=1\n";
/// After so many of them without a round the log says so.
const HELD_LOOKS: u32 = 3;

/// A loop that has to go on.
trait Loop: Send {
    /// What it is called.
    fn name(&self) -> &'static str;
    /// Has it make a round, should it sleep.
    fn wake(&self);
    /// How many rounds it has made.
    fn rounds(&self) -> u64;

    /// Notes what holds it up, as far as that is known.
    fn note(&self) -> Option<Note> {
        None
    }
}

/// The reactor's loop.
struct Reactor {
    shard: ShardHandle,
    aborts: Aborts,
}

impl Loop for Reactor {
    fn name(&self) -> &'static str {
        "reactor"
    }

    fn wake(&self) {
        self.shard.ring();
    }

    fn rounds(&self) -> u64 {
        self.shard.rounds()
    }

    fn note(&self) -> Option<Note> {
        self.aborts.note()
    }
}

/// The control thread's loop: a task that answers each call with a round.
struct Control(Arc<(Notify, AtomicU64)>);

impl Control {
    /// For the control thread, which has to be the one that calls.
    fn here() -> Control {
        let shared = Arc::<(Notify, AtomicU64)>::default();
        let rounds = shared.clone();
        tokio::spawn(async move {
            loop {
                rounds.0.notified().await;
                rounds.1.fetch_add(1, Ordering::Relaxed);
            }
        });
        Control(shared)
    }
}

impl Loop for Control {
    fn name(&self) -> &'static str {
        "control thread"
    }

    fn wake(&self) {
        self.0.0.notify_one();
    }

    fn rounds(&self) -> u64 {
        self.0.1.load(Ordering::Relaxed)
    }
}

/// A loop, and what was seen of it last.
struct Watched {
    is: Box<dyn Loop>,
    rounds: u64,
    /// Looks in a row in which it had made no round.
    held_looks: u32,
    /// What was noted in the last of them, should the manager end the daemon.
    note: Option<Note>,
}

impl Watched {
    fn new(is: Box<dyn Loop>) -> Watched {
        is.wake();
        Watched { rounds: is.rounds(), is, held_looks: 0, note: None }
    }

    /// Whether it has made a round since the last look; it is to make another one until the next.
    fn goes_on(&mut self) -> bool {
        let rounds = self.is.rounds();
        let goes_on = rounds != std::mem::replace(&mut self.rounds, rounds);
        self.held_looks = if goes_on { 0 } else { self.held_looks + 1 };
        if self.held_looks == HELD_LOOKS {
            self.note = self.is.note();
            let volume = self
                .note
                .as_ref()
                .map(|note| format!("; it is working for volume {}", note.volume()));
            error!(
                "the {} makes no rounds: the service manager ends the daemon if that lasts (nothing acknowledged is lost){}",
                self.is.name(),
                volume.unwrap_or_default()
            );
        }
        if goes_on && let Some(note) = self.note.take() {
            note.withdraw();
        }
        self.is.wake();
        goes_on
    }
}

/// A thread of its own says that the daemon goes on. Without a manager that wants to know there is
/// none.
pub(super) struct Watchdog(Option<Sender<Vec<Watched>>>);

impl Watchdog {
    /// Begins. Until it [watches](Watchdog::watch) something the daemon starts, which takes as long
    /// as it takes.
    pub(super) fn start() -> Watchdog {
        let wanted = sd_notify::watchdog_enabled().filter(|after| !after.is_zero());
        let (Some(after), Some(socket)) = (wanted, std::env::var_os("NOTIFY_SOCKET")) else {
            return Watchdog(None);
        };
        let (sender, changes) = channel();
        let run = move || run(after / LOOKS, &socket, &changes);
        match std::thread::Builder::new().name("watchdog".into()).spawn(run) {
            Ok(_) => Watchdog(Some(sender)),
            Err(e) => {
                warn!(
                    "the service manager will take the daemon for dead: cannot start the watchdog: {}",
                    reason(&e)
                );
                Watchdog(None)
            }
        }
    }

    /// From now on the loops have to go on. For the control thread.
    pub(super) fn watch(&self, shard: ShardHandle, aborts: Aborts) {
        if self.0.is_some() {
            let reactor = Reactor { shard, aborts };
            self.say(vec![
                Watched::new(Box::new(reactor)),
                Watched::new(Box::new(Control::here())),
            ]);
        }
    }

    /// The daemon ends in order, which takes as long as the manager lets it.
    pub(super) fn rest(&self) {
        self.say(Vec::new());
    }

    fn say(&self, loops: Vec<Watched>) {
        if let Some(changes) = &self.0 {
            // The thread ends after this.
            let _ = changes.send(loops);
        }
    }
}

fn run(look: Duration, socket: &OsStr, changes: &Receiver<Vec<Watched>>) {
    let mut loops: Vec<Watched> = Vec::new();
    let mut said = false;
    loop {
        // All of them are looked at, and woken.
        let held = loops.iter_mut().map(Watched::goes_on).filter(|goes_on| !goes_on).count();
        if held == 0
            && let Err(e) = send(socket, GOES_ON)
            // The next look says it again.
            && e.kind() != io::ErrorKind::WouldBlock
            && !std::mem::replace(&mut said, true)
        {
            warn!("cannot tell the service manager that the daemon goes on: {}", reason(&e));
        }
        match changes.recv_timeout(look) {
            Ok(new) => loops = new,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Tells the service manager something, if there is one; returns whether it has it. One that does
/// not read is not waited for.
pub(super) fn tell(states: &[NotifyState<'_>]) -> bool {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return true };
    let text: String = states.iter().map(|state| format!("{state}\n")).collect();
    match send(&socket, text.as_bytes()) {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => false,
        Err(e) => {
            warn!("cannot notify the service manager: {}", reason(&e));
            true
        }
        Ok(()) => true,
    }
}

fn send(socket: &OsStr, text: &[u8]) -> io::Result<()> {
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    sender.send_to_addr(text, &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aborts::FILE_NAME;
    use crate::shard::memory::{MemoryCore, MemoryOptions};
    use crate::shard::{Image, Opened, start_with};
    use std::os::fd::{AsRawFd, OwnedFd, RawFd};
    use tidepool_backend::{Backend, BackendError, Peer, Release, SnapshotChange, Transfer};
    use tidepool_engine::api::{Degraded, DrainOrder, IoError, Mode, VolumeSpec};
    use tidepool_replica::Limits;

    /// A backend that holds up those that ask it what is done, until it is told to go on.
    struct Holds {
        ready: OwnedFd,
        go: Receiver<()>,
    }

    impl Backend for Holds {
        fn size_bytes(&self) -> u64 {
            1 << 20
        }

        fn read_only(&self) -> bool {
            false
        }

        unsafe fn submit(&mut self, _: u64, _: Transfer) {}

        fn set_peer(&mut self, _: u64, _: Option<Peer>) {}

        fn change_snapshot(&mut self, _: u64, _: &str, _: SnapshotChange) -> Result<(), IoError> {
            Ok(())
        }

        fn event_fd(&self) -> RawFd {
            self.ready.as_raw_fd()
        }

        fn completions(&mut self, _: &mut dyn FnMut(u64, Result<(), IoError>)) {
            let _ = self.go.recv();
            let _ = rustix::io::read(&self.ready, &mut [0; 8]);
        }

        fn attachment(&self) -> Vec<u8> {
            Vec::new()
        }

        fn close(self: Box<Self>, _: Release) -> Result<(), BackendError> {
            Ok(())
        }
    }

    #[test]
    fn the_volume_that_holds_the_reactor_up_is_noted_until_it_goes_on() {
        let directory = tempfile::tempdir().expect("a directory");
        let shard = start_with(None, Limits::SHIPPED, || {
            Ok((MemoryCore::new(MemoryOptions::default()), None, Opened::default()))
        });
        let shard = shard.expect("a reactor");
        let (go, wait) = channel();
        let ready =
            rustix::event::eventfd(1, rustix::event::EventfdFlags::CLOEXEC).expect("an eventfd");
        let spec = VolumeSpec {
            name: "vm1".into(),
            backend: "none".into(),
            size_bytes: 1 << 20,
            mode: Mode::WriteBack,
            drain: DrainOrder::Unordered,
            dirty_bytes_max: 0,
            read_only: false,
            generation: 1,
            attachment: Vec::new(),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let image = Image::new(Box::new(Holds { ready, go: wait }));
        runtime.block_on(shard.add_volume(spec, image, Degraded::No)).expect("added");
        while shard.works_for().as_deref() != Some("vm1") {
            std::thread::yield_now();
        }
        let aborts = Aborts::new(Some(directory.path().into()), "this cache".into(), shard.clone());
        let mut watched = Watched::new(Box::new(Reactor { shard: shard.clone(), aborts }));
        for _ in 0..HELD_LOOKS {
            assert!(!watched.goes_on());
        }
        let notes =
            || std::fs::read_to_string(directory.path().join(FILE_NAME)).unwrap_or_default();
        while !notes().ends_with('\n') {
            std::thread::yield_now();
        }
        assert!(
            notes().lines().count() == 1 && notes().contains("\"volume\":\"vm1\""),
            "{}",
            notes()
        );
        let rounds = shard.rounds();
        go.send(()).expect("it waits");
        while shard.rounds() == rounds {
            std::thread::yield_now();
        }
        assert!(watched.goes_on());
        while !notes().is_empty() {
            std::thread::yield_now();
        }
        drop(go);
    }
}
