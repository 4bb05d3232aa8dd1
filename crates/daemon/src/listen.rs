//! The sockets of the daemon: bound before anything else is touched, so that an address in use stops
//! the start while it is still harmless.

use crate::failure::reason;
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tidepool_nbd::{SOCKET_PATH_BYTES_MAX, Transport};

/// Connections that wait to be accepted on one socket.
const BACKLOG: i32 = 128;

/// How long a TCP address that is in use is tried again.
const TCP_WAIT: Duration = Duration::from_secs(2);
/// How often.
const TCP_POLL: Duration = Duration::from_millis(50);

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Somebody serves it already.
    #[error(
        "cannot listen on {address}: it is in use by another process (choose another one, or stop that process)"
    )]
    InUse {
        /// Which.
        address: String,
    },
    /// Something that is no socket stands at the path.
    #[error("cannot listen on {}: there is something else at this path (choose another one)", .path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The path does not fit into an address.
    #[error("cannot listen on {}: the path of a socket has at most {SOCKET_PATH_BYTES_MAX} bytes", .path.display())]
    TooLong {
        /// The path.
        path: PathBuf,
    },
    /// The system refused.
    #[error("cannot listen on {address}: {why}")]
    System {
        /// Where.
        address: String,
        /// What the system said.
        why: String,
    },
}

/// A listening socket. A unix socket's file goes away with it.
#[derive(Debug)]
pub struct Listening {
    socket: OwnedFd,
    file: Option<SocketFile>,
}

/// The file of a unix socket, removed when dropped, unless somebody has put another one in its place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = std::fs::symlink_metadata(&self.path)
            .is_ok_and(|found| (found.dev(), found.ino()) == (self.device, self.inode));
        if ours {
            // The process ends: there is nobody left to tell about a file that stays behind, and the
            // next start replaces it.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl From<TcpListener> for Listening {
    fn from(listener: TcpListener) -> Listening {
        Listening { socket: listener.into(), file: None }
    }
}

impl Listening {
    /// Splits it into the socket and the guard of its file.
    pub fn into_parts(self) -> (OwnedFd, Option<SocketFile>) {
        (self.socket, self.file)
    }

    /// Listens on an address.
    ///
    /// # Errors
    /// It is in use, or the system refuses. Nothing stays behind then.
    pub fn bind(transport: &Transport) -> Result<Listening, ListenError> {
        match transport {
            Transport::Unix { socket } => bind_unix(socket, None),
            Transport::Tcp { host, port } => {
                let socket = bind_tcp(&format!("{host} port {port}"), (host.as_str(), *port))?;
                Ok(socket.into())
            }
        }
    }

    /// Listens on a TCP address.
    ///
    /// # Errors
    /// As [`Listening::bind`].
    pub fn bind_address(address: SocketAddr) -> Result<TcpListener, ListenError> {
        bind_tcp(&address.to_string(), address)
    }

    /// Listens on a unix socket that only this user may connect to.
    ///
    /// # Errors
    /// As [`Listening::bind`].
    pub fn bind_private(path: &Path) -> Result<Listening, ListenError> {
        bind_unix(path, Some(Mode::RUSR | Mode::WUSR))
    }
}

/// Binds a TCP socket. The kernel keeps that of a killed process for a moment, and does not say whose it
/// is: so an address in use is tried for a while.
fn bind_tcp(name: &str, address: impl ToSocketAddrs) -> Result<TcpListener, ListenError> {
    let start = Instant::now();
    loop {
        match TcpListener::bind(&address) {
            Ok(socket) => return Ok(socket),
            Err(e) if e.kind() != io::ErrorKind::AddrInUse => {
                return Err(ListenError::System { address: name.to_owned(), why: reason(&e) });
            }
            Err(_) if start.elapsed() > TCP_WAIT => {
                return Err(ListenError::InUse { address: name.to_owned() });
            }
            Err(_) => std::thread::sleep(TCP_POLL),
        }
    }
}

/// Binds a unix socket. A socket file without a listener is what a killed daemon leaves: it is replaced.
fn bind_unix(path: &Path, mode: Option<Mode>) -> Result<Listening, ListenError> {
    let fail = |error: io::Error| match error.kind() {
        io::ErrorKind::AddrInUse => ListenError::InUse { address: path.display().to_string() },
        io::ErrorKind::NotFound => ListenError::System {
            address: path.display().to_string(),
            why: "its directory does not exist (create it first)".into(),
        },
        _ => ListenError::System { address: path.display().to_string(), why: reason(&error) },
    };
    let address = SocketAddrUnix::new(path).map_err(|_| ListenError::TooLong { path: path.to_owned() })?;
    // Between the check for a stale file and listen() another daemon must not do the same: the lock on
    // the directory serialises them. It is advisory and goes with the descriptor.
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory =
        rustix::fs::open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| fail(e.into()))?;
    lock_briefly(&directory);
    clear_stale(path)?;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .map_err(|e| fail(e.into()))?;
    rustix::net::bind(&socket, &address).map_err(|e| fail(e.into()))?;
    let found = std::fs::symlink_metadata(path).map_err(fail)?;
    let file = SocketFile { path: path.to_owned(), device: found.dev(), inode: found.ino() };
    if let Some(mode) = mode {
        // Nobody can connect before listen(), so there is no moment at which the mode is too wide.
        rustix::fs::chmodat(CWD, path, mode, AtFlags::empty()).map_err(|e| fail(e.into()))?;
    }
    rustix::net::listen(&socket, BACKLOG).map_err(|e| fail(e.into()))?;
    Ok(Listening { socket, file: Some(file) })
}

/// Tries to lock a directory for at most a second. Without the lock two daemons that start in the same
/// instant could take each other's socket for a stale one; that is no reason not to start.
fn lock_briefly(directory: &OwnedFd) {
    for _ in 0..20 {
        if rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

/// Removes a socket file that nobody listens on.
fn clear_stale(path: &Path) -> Result<(), ListenError> {
    let system = |e: io::Error| ListenError::System { address: path.display().to_string(), why: reason(&e) };
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(system(e)),
    };
    if !found.file_type().is_socket() {
        return Err(ListenError::NotASocket { path: path.to_owned() });
    }
    match listener_of(path) {
        Ok(None) => std::fs::remove_file(path).map_err(system),
        Ok(Some(_)) => Err(ListenError::InUse { address: path.display().to_string() }),
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::ACCESS | Errno::PERM) => Err(system(io::ErrorKind::PermissionDenied.into())),
        // A full backlog, or another type of socket: somebody is there.
        Err(_) => Err(ListenError::InUse { address: path.display().to_string() }),
    }
}

/// Who listens on a unix socket. The kernel keeps the socket of a process that was killed open for a
/// moment, until its io_uring is gone: that counts as nobody.
fn listener_of(path: &Path) -> Result<Option<u32>, Errno> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::CONNREFUSED) => return Ok(None),
        Err(error) => return Err(error),
    }
    let pid = rustix::net::sockopt::socket_peercred(&socket)?.pid.as_raw_pid().unsigned_abs();
    Ok(Some(pid).filter(|pid| !tidepool_driver::has_died(*pid)))
}

/// The directory of sockets for which no path was given: `/run/tidepool` for root, else
/// `$XDG_RUNTIME_DIR/tidepool`.
pub fn runtime_directory() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some("/run/tidepool".into());
    }
    let base = PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?);
    base.is_absolute().then(|| base.join("tidepool"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("tidepool-listen-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    #[test]
    fn a_socket_in_use_is_refused_and_left_alone() {
        let path = scratch("used");
        let first = Listening::bind(&Transport::Unix { socket: path.clone() }).expect("free");
        let second = Listening::bind_private(&path).expect_err("in use");
        assert!(matches!(second, ListenError::InUse { .. }), "{second}");
        assert!(UnixStream::connect(&path).is_ok());
        drop(first);
        assert!(!path.exists(), "the file goes with the listener");
    }

    #[test]
    fn the_socket_of_a_dead_daemon_is_replaced() {
        let path = scratch("stale");
        let (socket, file) =
            Listening::bind(&Transport::Unix { socket: path.clone() }).expect("free").into_parts();
        std::mem::forget(file);
        drop(socket);
        assert!(path.exists());
        let again = Listening::bind_private(&path).expect("stale");
        assert_eq!(std::fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
        assert!(UnixStream::connect(&path).is_ok());
        drop(again);
    }

    #[test]
    fn a_file_that_is_no_socket_is_refused_and_kept() {
        let path = scratch("file");
        std::fs::write(&path, b"precious").expect("written");
        let error = Listening::bind_private(&path).expect_err("a file");
        assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
        assert_eq!(std::fs::read(&path).expect("there"), b"precious");
        std::fs::remove_file(&path).expect("removed");
    }

    #[test]
    fn a_listener_does_not_remove_the_file_of_its_successor() {
        let path = scratch("successor");
        let (_socket, file) = Listening::bind_private(&path).expect("free").into_parts();
        std::fs::remove_file(&path).expect("removed");
        let _successor = Listening::bind_private(&path).expect("free again");
        drop(file);
        assert!(UnixStream::connect(&path).is_ok());
    }

    #[test]
    fn addresses_that_cannot_be_are_refused_with_the_reason() {
        let long = std::env::temp_dir().join("x".repeat(200));
        assert!(matches!(Listening::bind_private(&long), Err(ListenError::TooLong { .. })));
        let nowhere = Path::new("/nonexistent-directory/socket");
        assert!(
            Listening::bind_private(nowhere)
                .expect_err("no directory")
                .to_string()
                .contains("create it first")
        );
        let first = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = first.local_addr().expect("bound").port();
        let taken = Listening::bind(&Transport::Tcp { host: "127.0.0.1".into(), port });
        assert!(matches!(taken, Err(ListenError::InUse { .. })));
    }
}
