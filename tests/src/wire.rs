//! A wire between two daemons on one host, which can be cut, or swallow what is sent.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// How often a wire looks what it is to do.
const POLL: Duration = Duration::from_millis(2);

/// What a wire does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum WireMode {
    /// It carries everything.
    Works,
    /// Nothing arrives and nobody is told; connections seem to stand.
    Hole,
    /// Connections end, and no new ones come about.
    Cut,
    /// The test is over.
    Gone,
}

#[derive(Debug)]
struct Shared {
    mode: AtomicU8,
    ends: Mutex<Vec<UnixStream>>,
}

impl Shared {
    fn is(&self, mode: WireMode) -> bool {
        self.mode.load(Ordering::SeqCst) == mode as u8
    }

    /// Waits while the wire is a hole; whether it goes on then.
    fn goes_on(&self) -> bool {
        while self.is(WireMode::Hole) {
            std::thread::sleep(POLL);
        }
        self.is(WireMode::Works)
    }
}

/// A unix socket that leads to another one.
#[derive(Debug)]
pub struct Wire {
    socket: PathBuf,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

impl Wire {
    /// A wire that works, from a new socket at `socket` to the one at `to`.
    ///
    /// # Errors
    /// There can be no such socket.
    pub fn new(socket: PathBuf, to: PathBuf) -> std::io::Result<Wire> {
        let listener = UnixListener::bind(&socket)?;
        listener.set_nonblocking(true)?;
        let mode = AtomicU8::new(WireMode::Works as u8);
        let shared = Arc::new(Shared { mode, ends: Mutex::default() });
        let accepting = std::thread::spawn({
            let shared = shared.clone();
            move || accept(&listener, &to, &shared)
        });
        Ok(Wire { socket, shared, accepting: Some(accepting) })
    }

    /// Where it begins.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Changes what it does.
    pub fn set(&self, mode: WireMode) {
        self.shared.mode.store(mode as u8, Ordering::SeqCst);
        if matches!(mode, WireMode::Cut | WireMode::Gone) {
            let ends =
                std::mem::take(&mut *self.shared.ends.lock().expect("no thread panics with it"));
            // One that has ended by itself is as good.
            ends.iter().for_each(|end| drop(end.shutdown(Shutdown::Both)));
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.set(WireMode::Gone);
        self.accepting.take().map(JoinHandle::join);
    }
}

fn accept(listener: &UnixListener, to: &Path, shared: &Arc<Shared>) {
    while !shared.is(WireMode::Gone) {
        let near = match listener.accept() {
            Ok((near, _)) => near,
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(POLL);
                continue;
            }
            Err(_) => return,
        };
        // Dropped, it is a connection that has ended.
        if shared.is(WireMode::Cut) {
            continue;
        }
        let _ = join(near, to, shared);
    }
}

fn join(near: UnixStream, to: &Path, shared: &Arc<Shared>) -> std::io::Result<()> {
    near.set_nonblocking(false)?;
    let far = UnixStream::connect(to)?;
    for (from, to) in [(&near, &far), (&far, &near)] {
        let (from, to, shared) = (from.try_clone()?, to.try_clone()?, shared.clone());
        std::thread::spawn(move || carry(from, to, &shared));
    }
    shared.ends.lock().expect("no thread panics with it").extend([near, far]);
    Ok(())
}

/// Carries one direction to its end.
fn carry(mut from: UnixStream, mut to: UnixStream, shared: &Shared) {
    let mut bytes = vec![0; 256 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if !shared.goes_on() || to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
