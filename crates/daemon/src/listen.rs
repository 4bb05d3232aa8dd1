//! Front-door addresses, and the sockets of the daemon: bound before anything else is touched, so
//! that an address in use stops the start while it is still harmless.

use crate::failure::reason;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::fmt;
use std::io;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// NBD's port.
const NBD_PORT: u16 = 10809;

/// Connections that wait to be accepted on one socket.
const BACKLOG: i32 = 128;

/// Longest path of a unix socket, in bytes.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// What stands for itself in the path and query of a URI.
const PLAIN: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_').remove(b'~').remove(b':');

/// Where a front door listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A unix socket.
    Unix(PathBuf),
    /// A TCP port.
    Tcp {
        /// Name or address of the interface.
        host: String,
        /// Port.
        port: u16,
    },
}

/// An NBD URI: an address, and the volume that is offered there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NbdUri {
    /// Where.
    pub address: Address,
    /// Which volume; `None` offers all of them by name.
    pub volume: Option<String>,
}

/// Why a text is no NBD URI that can be listened on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{uri}\": {why}; say nbd+unix:///?socket=PATH or nbd://HOST:PORT/")]
pub struct NbdUriError {
    uri: String,
    why: &'static str,
}

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

impl FromStr for NbdUri {
    type Err = NbdUriError;

    fn from_str(text: &str) -> Result<NbdUri, NbdUriError> {
        parse(text).map_err(|why| NbdUriError { uri: crate::failure::one_line(text), why })
    }
}

fn parse(text: &str) -> Result<NbdUri, &'static str> {
    let decode = |part: &str| {
        let text = percent_decode_str(part).decode_utf8().map_err(|_| "it is not UTF-8")?;
        if text.contains(char::is_control) {
            Err("it has a control character")
        } else {
            Ok(text.into_owned())
        }
    };
    let (scheme, rest) = text.split_once("://").ok_or("it is not an NBD URI")?;
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, name) = rest.split_once('/').unwrap_or((rest, ""));
    let name = decode(name)?;
    if !name.is_empty() {
        crate::volume::check_name(&name).map_err(|_| "the part after the slash is not a volume name")?;
    }
    let volume = Some(name).filter(|name| !name.is_empty());
    match scheme {
        "nbd+unix" => {
            if !authority.is_empty() {
                return Err("a unix socket has no host: write three slashes");
            }
            let path = query.strip_prefix("socket=").ok_or("it needs ?socket=PATH and nothing else")?;
            if path.contains('&') {
                return Err("it has a parameter other than socket");
            }
            let path = decode(path)?;
            if path.is_empty() {
                return Err("the path of the socket is empty");
            }
            Ok(NbdUri { address: Address::Unix(path.into()), volume })
        }
        "nbd" => {
            if !query.is_empty() {
                return Err("an address of a host has no parameters");
            }
            let (host, port) = split_port(authority)?;
            if host.is_empty() {
                return Err("it needs a host");
            }
            Ok(NbdUri { address: Address::Tcp { host: host.to_owned(), port }, volume })
        }
        "nbds" | "nbds+unix" => Err("TLS is not available in this version"),
        _ => Err("its scheme is neither nbd nor nbd+unix"),
    }
}

/// Host and port; an IPv6 address stands in brackets.
fn split_port(authority: &str) -> Result<(&str, u16), &'static str> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("the bracket of the address is not closed")?;
            (host, rest.strip_prefix(':'))
        }
        None => match authority.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (authority, None),
        },
    };
    match port {
        None => Ok((host, NBD_PORT)),
        Some(port) => {
            port.parse().map(|port| (host, port)).map_err(|_| "the port is not a number below 65536")
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "{}", path.display()),
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
        }
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let volume = self.volume.as_deref().unwrap_or("");
        match &self.address {
            Address::Unix(path) => {
                let path = path.to_string_lossy();
                write!(f, "nbd+unix:///{volume}?socket={}", utf8_percent_encode(&path, PLAIN))
            }
            tcp => write!(f, "nbd://{tcp}/{volume}"),
        }
    }
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

impl Listening {
    /// Splits it into the socket and the guard of its file.
    pub fn into_parts(self) -> (OwnedFd, Option<SocketFile>) {
        (self.socket, self.file)
    }

    /// Listens on an address.
    ///
    /// # Errors
    /// It is in use, or the system refuses. Nothing stays behind then.
    pub fn bind(address: &Address) -> Result<Listening, ListenError> {
        match address {
            Address::Unix(path) => bind_unix(path, None),
            Address::Tcp { host, port } => {
                let socket = TcpListener::bind((host.as_str(), *port)).map_err(|e| match e.kind() {
                    io::ErrorKind::AddrInUse => ListenError::InUse { address: address.to_string() },
                    _ => ListenError::System { address: address.to_string(), why: reason(&e) },
                })?;
                Ok(Listening { socket: socket.into(), file: None })
            }
        }
    }

    /// Listens on a unix socket that only this user may connect to.
    ///
    /// # Errors
    /// As [`Listening::bind`].
    pub fn bind_private(path: &Path) -> Result<Listening, ListenError> {
        bind_unix(path, Some(Mode::RUSR | Mode::WUSR))
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
    match UnixStream::connect(path) {
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path).map_err(system),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(system(e)),
        // A connection, a full backlog, or another type of socket: somebody is there.
        _ => Err(ListenError::InUse { address: path.display().to_string() }),
    }
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
    use proptest::prelude::*;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("tidepool-listen-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    #[test]
    fn nbd_uris_name_an_address_and_a_volume() {
        let unix = |path: &str| Address::Unix(path.into());
        let tcp = |host: &str, port| Address::Tcp { host: host.into(), port };
        for (text, address, volume) in [
            ("nbd+unix:///?socket=/run/a.sock", unix("/run/a.sock"), None),
            ("nbd+unix:///vm1?socket=/run/a%20b.sock", unix("/run/a b.sock"), Some("vm1")),
            ("nbd+unix://?socket=a", unix("a"), None),
            ("nbd://localhost/vm1", tcp("localhost", 10809), Some("vm1")),
            ("nbd://0.0.0.0:99/", tcp("0.0.0.0", 99), None),
            ("nbd://[::1]:99", tcp("::1", 99), None),
        ] {
            let uri: NbdUri = text.parse().expect(text);
            assert_eq!((uri.address.clone(), uri.volume.as_deref()), (address, volume), "{text}");
            assert_eq!(uri.to_string().parse(), Ok(uri), "{text}");
        }
    }

    #[test]
    fn other_uris_are_refused_with_what_to_write() {
        for text in [
            "",
            "/run/a.sock",
            "nbd+unix:///",
            "nbd+unix:///?socket=",
            "nbd+unix:///?path=/a",
            "nbd+unix:///?socket=/a&tls=1",
            "nbd+unix:///a b?socket=/a",
            "nbd+unix://host/?socket=/a",
            "nbd://",
            "nbd://:10809/",
            "nbd://h:65536/",
            "nbd://[::1/",
            "nbd://h/v?x=1",
            "nbds://h/v",
            "http://h/v",
            "nbd+unix:///?socket=%ff",
            "nbd+unix:///?socket=a%00b",
        ] {
            let error = text.parse::<NbdUri>().expect_err(text).to_string();
            assert!(error.contains("nbd+unix:///?socket=PATH") && !error.contains('\n'), "{error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in "(nbd(\\+unix)?://)?[\\PC\\[\\]:/?=%&]{0,60}") {
            if let Ok(uri) = text.parse::<NbdUri>() {
                prop_assert_eq!(uri.to_string().parse(), Ok(uri));
            }
        }
    }

    #[test]
    fn a_socket_in_use_is_refused_and_left_alone() {
        let path = scratch("used");
        let first = Listening::bind(&Address::Unix(path.clone())).expect("free");
        let second = Listening::bind_private(&path).expect_err("in use");
        assert!(matches!(second, ListenError::InUse { .. }), "{second}");
        assert!(UnixStream::connect(&path).is_ok());
        drop(first);
        assert!(!path.exists(), "the file goes with the listener");
    }

    #[test]
    fn the_socket_of_a_dead_daemon_is_replaced() {
        let path = scratch("stale");
        let (socket, file) = Listening::bind(&Address::Unix(path.clone())).expect("free").into_parts();
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
        let taken = Listening::bind(&Address::Tcp { host: "127.0.0.1".into(), port });
        assert!(matches!(taken, Err(ListenError::InUse { .. })));
    }
}
