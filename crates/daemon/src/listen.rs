//! The sockets of the daemon: bound before anything else is touched, so that an address in use
//! stops the start while it is still harmless.

use crate::door::Resolved;
use crate::failure::reason;
use crate::state;
use rustix::fs::{AtFlags, FlockOperation, Gid, Mode, OFlags, RenameFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tidepool_nbd::{SOCKET_PATH_BYTES_MAX, Transport};

/// Connections that wait to be accepted on one socket.
const BACKLOG: i32 = 128;

/// Most names that are tried for a directory in which a socket is made.
const PRIVATE_TRIES_MAX: usize = 64;

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
    /// A socket stands at the path that this daemon has not left there.
    #[error(
        "cannot listen on {}: the socket at this path belongs to uid {owner} (remove it, or choose another path)", .path.display()
    )]
    Foreign {
        /// The path.
        path: PathBuf,
        /// Whose it is.
        owner: u32,
    },
    /// The socket cannot be given to who is to have it.
    #[error(
        "cannot give {} to its owner and group: {why} (the daemon needs CAP_CHOWN for that, and under systemd a drop-in with it; see docs/operations.md)", .path.display()
    )]
    Chown {
        /// The path.
        path: PathBuf,
        /// What the system said.
        why: String,
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

/// The file of a unix socket, removed when dropped, unless somebody has put another one in its
/// place.
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
            // The process ends: there is nobody left to tell about a file that stays behind, and
            // the next start replaces it.
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
            Transport::Unix { socket } => bind_unix(socket, &Marks::default()),
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
        bind_unix(path, &Marks { mode: Some(Mode::RUSR | Mode::WUSR), ..Marks::default() })
    }

    /// Listens on a volume's own unix socket, with its owner, group and mode.
    ///
    /// # Errors
    /// As [`Listening::bind`], and if this process may not give the socket away.
    pub fn bind_volume(path: &Path, wanted: &Resolved) -> Result<Listening, ListenError> {
        bind_unix(
            path,
            &Marks {
                mode: Some(Mode::from_bits_truncate(wanted.mode_bits())),
                owner: wanted.owner().map(Uid::from_raw),
                group: wanted.group().map(Gid::from_raw),
            },
        )
    }
}

/// Binds a TCP socket. The kernel keeps that of a killed process for a moment, and does not say
/// whose it is: so an address in use is tried for a while.
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

/// What a socket's file is to have; what is not named it has as the process makes files.
#[derive(Default)]
struct Marks {
    mode: Option<Mode>,
    owner: Option<Uid>,
    group: Option<Gid>,
}

/// Binds a unix socket. A socket file without a listener is what a killed daemon leaves: it is
/// replaced.
///
/// The file is made in a directory that only this process's user may enter, gets its owner and mode
/// there, is listened on there, and is renamed to its path. So a process that finds it finds it as
/// it is to be, and no symbolic link is followed: neither by what changes the file, which nobody
/// else can reach, nor by the rename, which does not follow any and replaces nothing.
fn bind_unix(path: &Path, marks: &Marks) -> Result<Listening, ListenError> {
    let fail = |error: io::Error| match error.kind() {
        io::ErrorKind::AddrInUse | io::ErrorKind::AlreadyExists => {
            ListenError::InUse { address: path.display().to_string() }
        }
        io::ErrorKind::NotFound => ListenError::System {
            address: path.display().to_string(),
            why: "its directory does not exist (create it first)".into(),
        },
        _ => ListenError::System { address: path.display().to_string(), why: reason(&error) },
    };
    let failed = |error: Errno| fail(error.into());
    let name = path.file_name().ok_or_else(|| fail(io::ErrorKind::InvalidInput.into()))?;
    // Clients must be able to name it.
    SocketAddrUnix::new(path).map_err(|_| ListenError::TooLong { path: path.to_owned() })?;
    let parent =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let directory = rustix::fs::open(
        parent,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(failed)?;
    // Between the check for a stale file and the rename another daemon of this user must not do
    // that. The lock goes with the descriptor.
    let _turn = lock_briefly();
    clear_stale(path, marks.owner)?;
    let private = Private::make(&directory, parent).map_err(failed)?;
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(failed)?;
    rustix::net::bind(&socket, &private.address(name).map_err(failed)?).map_err(failed)?;
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    let marked = || -> Result<rustix::fs::Stat, ListenError> {
        // Before it is given away: afterwards only its owner may, or who has one more capability.
        if let Some(mode) = marks.mode {
            // It is no link: nobody else can put one there.
            rustix::fs::chmodat(&private.fd, name, mode, AtFlags::empty()).map_err(failed)?;
        }
        // A process that may give nothing away can still name what the file has anyway.
        let made = rustix::fs::statat(&private.fd, name, flags).map_err(failed)?;
        let owner = marks.owner.filter(|owner| owner.as_raw() != made.st_uid);
        let group = marks.group.filter(|group| group.as_raw() != made.st_gid);
        if owner.is_some() || group.is_some() {
            let given = rustix::fs::chownat(&private.fd, name, owner, group, flags);
            given.map_err(|e| ListenError::Chown {
                path: path.to_owned(),
                why: reason(&e.into()),
            })?;
        }
        rustix::net::listen(&socket, BACKLOG).map_err(failed)?;
        match rustix::fs::renameat_with(&private.fd, name, &directory, name, RenameFlags::NOREPLACE) {
            // A file system that knows no flags; what was at the path a moment ago is removed.
            Err(Errno::INVAL) => rustix::fs::renameat(&private.fd, name, &directory, name),
            renamed => renamed,
        }
        .map_err(failed)?;
        Ok(made)
    };
    let found = marked().inspect_err(|_| {
        // It is there, since it was bound, and nobody uses it.
        let _ = rustix::fs::unlinkat(&private.fd, name, AtFlags::empty());
    })?;
    let file = SocketFile { path: path.to_owned(), device: found.st_dev, inode: found.st_ino };
    Ok(Listening { socket, file: Some(file) })
}

/// A directory beside a socket's path that only this process's user may enter; it is removed when
/// dropped.
struct Private<'a> {
    parent: &'a OwnedFd,
    name: String,
    path: PathBuf,
    fd: OwnedFd,
}

impl<'a> Private<'a> {
    fn make(parent: &'a OwnedFd, parent_path: &Path) -> Result<Private<'a>, Errno> {
        // A killed process may have left one, and another one have its number now.
        for number in 0..PRIVATE_TRIES_MAX {
            let name = format!(".tidepool-{}-{number}", std::process::id());
            match rustix::fs::mkdirat(parent, &name, Mode::RWXU) {
                Ok(()) => {}
                Err(Errno::EXIST) => continue,
                Err(error) => return Err(error),
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::openat(parent, &name, flags, Mode::empty())?;
            // Who may write to the directory around it could have put another one in its place.
            let found = rustix::fs::fstat(&fd)?;
            if found.st_uid != rustix::process::geteuid().as_raw() || found.st_mode & 0o077 != 0 {
                return Err(Errno::PERM);
            }
            return Ok(Private { parent, path: parent_path.join(&name), name, fd });
        }
        Err(Errno::EXIST)
    }

    /// The address of a socket in it. Its descriptor stands for the path where that is too long,
    /// and where others may write to the directory around it: they could put a link in its place.
    fn address(&self, name: &OsStr) -> Result<SocketAddrUnix, Errno> {
        let around = rustix::fs::fstat(self.parent)?;
        let is_own =
            around.st_uid == rustix::process::geteuid().as_raw() && around.st_mode & 0o022 == 0;
        let by_path = SocketAddrUnix::new(self.path.join(name)).ok().filter(|_| is_own);
        by_path.map_or_else(
            || {
                let directory = PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
                SocketAddrUnix::new(directory.join(name))
            },
            Ok,
        )
    }
}

impl Drop for Private<'_> {
    fn drop(&mut self) {
        // It is empty. What stays of it harms nobody.
        let _ = rustix::fs::unlinkat(self.parent, &self.name, AtFlags::REMOVEDIR);
    }
}

/// Tries to lock a file of this user's own for at most a second: a process that may read a file
/// could hold its lock. Without it two daemons that start in one instant could take each other's
/// socket for a stale one; that is no reason not to start.
fn lock_briefly() -> Option<File> {
    const NAME: &str = "sockets.lock";
    let file = state::open(&state::directory()?.join(NAME)).ok()?;
    for _ in 0..20 {
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return Some(file);
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    None
}

/// Removes a socket file that nobody listens on. It must be this process's user's, or of who is to
/// have it.
fn clear_stale(path: &Path, wanted: Option<Uid>) -> Result<(), ListenError> {
    let system =
        |e: io::Error| ListenError::System { address: path.display().to_string(), why: reason(&e) };
    let found = match std::fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(system(e)),
    };
    if !found.file_type().is_socket() {
        return Err(ListenError::NotASocket { path: path.to_owned() });
    }
    let owners = [Some(rustix::process::geteuid()), wanted];
    match listener_of(path) {
        Ok(None) if !owners.contains(&Some(Uid::from_raw(found.uid()))) => {
            Err(ListenError::Foreign { path: path.to_owned(), owner: found.uid() })
        }
        Ok(None) => std::fs::remove_file(path).map_err(system),
        Ok(Some(_)) => Err(ListenError::InUse { address: path.display().to_string() }),
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::ACCESS | Errno::PERM) => Err(system(io::ErrorKind::PermissionDenied.into())),
        // A full backlog, or another type of socket: somebody is there.
        Err(_) => Err(ListenError::InUse { address: path.display().to_string() }),
    }
}

/// Who listens on a unix socket. The kernel keeps the socket of a process that was killed open for
/// a moment, until its io_uring is gone: that counts as nobody.
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
    use crate::door::VolumeSocket;
    use std::os::unix::net::UnixStream;

    fn scratch(name: &str) -> PathBuf {
        let path =
            std::env::temp_dir().join(format!("tidepool-listen-{}-{name}", std::process::id()));
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

    fn socket_with(mode: u32) -> VolumeSocket {
        let mode = format!("{mode:04o}").parse().expect("a mode");
        VolumeSocket { mode: Some(mode), ..VolumeSocket::new("/s".into()) }
    }

    fn resolved(mode: u32) -> Resolved {
        socket_with(mode).resolve().expect("no names")
    }

    #[test]
    fn a_link_at_the_path_is_neither_followed_nor_replaced() {
        let (path, target) = (scratch("link"), scratch("target"));
        for made in [false, true] {
            if made {
                drop(std::os::unix::net::UnixListener::bind(&target).expect("a stale socket"));
            }
            std::os::unix::fs::symlink(&target, &path).expect("a link");
            let error = Listening::bind_volume(&path, &resolved(0o600)).expect_err("a link");
            assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
            assert_eq!(std::fs::read_link(&path).expect("it is as it was"), target);
            assert_eq!(target.exists(), made);
            std::fs::remove_file(&path).expect("removed");
        }
        std::fs::remove_file(&target).expect("removed");
    }

    #[test]
    fn a_socket_has_its_mode_whatever_the_umask_is_and_leaves_nothing_else() {
        let directory = tempfile::tempdir().expect("a directory");
        for mode in [0o600, 0o660, 0o666] {
            let path = directory.path().join("s");
            let listening = Listening::bind_volume(&path, &resolved(mode)).expect("free");
            assert_eq!(std::fs::metadata(&path).expect("there").mode() & 0o7777, mode);
            assert!(UnixStream::connect(&path).is_ok());
            assert_eq!(std::fs::read_dir(directory.path()).expect("readable").count(), 1);
            drop(listening);
        }
    }

    #[test]
    fn a_path_that_just_fits_an_address_is_bound() {
        let directory = tempfile::tempdir().expect("a directory");
        let short = directory.path().as_os_str().len() + 1;
        let path = directory.path().join("x".repeat(SOCKET_PATH_BYTES_MAX - short));
        let listening = Listening::bind_volume(&path, &resolved(0o600)).expect("it fits");
        assert!(UnixStream::connect(&path).is_ok());
        drop(listening);
        assert_eq!(std::fs::read_dir(directory.path()).expect("readable").count(), 0);
    }

    #[test]
    fn the_stale_socket_of_another_user_is_left_alone() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("not tested: this needs root");
        }
        let path = scratch("foreign");
        drop(std::os::unix::net::UnixListener::bind(&path).expect("bound"));
        std::os::unix::fs::chown(&path, Some(65534), None).expect("given away");
        let error = Listening::bind_volume(&path, &resolved(0o600)).expect_err("not ours");
        assert!(matches!(error, ListenError::Foreign { owner: 65534, .. }), "{error}");
        assert!(path.exists());
        let wanted = VolumeSocket { owner: Some("65534".into()), ..socket_with(0o600) };
        let listening = Listening::bind_volume(&path, &wanted.resolve().expect("a number"))
            .expect("it is of who is to have it");
        assert_eq!(std::fs::metadata(&path).expect("there").uid(), 65534);
        drop(listening);
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
