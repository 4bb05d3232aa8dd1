//! The sockets of a client.

use super::ClientError;
use crate::uri::{NbdUri, Transport};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Idle time of a TCP connection before the first keepalive probe, and pause between two probes.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(5);
/// Number of unanswered keepalive probes after which the connection is broken.
const KEEPALIVE_PROBES: u32 = 3;

/// What [`Duplex::exchange`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moved {
    /// Number of bytes that were sent.
    Sent(usize),
    /// Number of bytes that were received; 0 when the other side has closed the connection.
    Received(usize),
}

/// A connection whose two directions are independent of each other.
pub trait Duplex: Read + Write + Sized {
    /// A second handle of the same connection.
    ///
    /// # Errors
    /// What the system reports.
    fn second(&self) -> io::Result<Self>;

    /// Sends a part of `output` or receives bytes into `input`, whichever is possible first. A
    /// client that only sends could block forever: a server may stop reading while its replies are
    /// not read.
    ///
    /// # Errors
    /// What the system reports.
    fn exchange(&mut self, output: &[u8], input: &mut [u8]) -> io::Result<Moved>;
}

fn exchange<S: Read + AsFd>(
    stream: &mut S,
    timeout: Option<Duration>,
    output: &[u8],
    input: &mut [u8],
) -> io::Result<Moved> {
    loop {
        match rustix::net::send(&*stream, output, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => return Ok(Moved::Sent(sent)),
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut polled = [PollFd::new(&*stream, PollFlags::IN | PollFlags::OUT)];
        match poll(&mut polled, timeout.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // Receiving comes first, because sending may be blocked until replies are read. A socket
        // error is reported by either call.
        if polled[0].revents().contains(PollFlags::IN) {
            return stream.read(input).map(Moved::Received);
        }
    }
}

impl Duplex for UnixStream {
    fn second(&self) -> io::Result<UnixStream> {
        self.try_clone()
    }

    fn exchange(&mut self, output: &[u8], input: &mut [u8]) -> io::Result<Moved> {
        let timeout = self.write_timeout()?;
        exchange(self, timeout, output, input)
    }
}

impl Duplex for TcpStream {
    fn second(&self) -> io::Result<TcpStream> {
        self.try_clone()
    }

    fn exchange(&mut self, output: &[u8], input: &mut [u8]) -> io::Result<Moved> {
        let timeout = self.write_timeout()?;
        exchange(self, timeout, output, input)
    }
}

/// A connection to the server of an NBD URI.
#[derive(Debug)]
pub enum Stream {
    /// Over a unix socket.
    Unix(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

impl Stream {
    /// Connects to the server of the URI.
    ///
    /// # Errors
    /// What the system reports.
    pub fn connect(uri: &NbdUri) -> Result<Stream, ClientError> {
        let stream = match &uri.transport {
            Transport::Unix { socket } => UnixStream::connect(socket).map(Stream::Unix),
            Transport::Tcp { host, port } => {
                TcpStream::connect((host.as_str(), *port)).and_then(|stream| {
                    stream.set_nodelay(true)?;
                    Ok(Stream::Tcp(stream))
                })
            }
        };
        stream.map_err(|source| ClientError::Io {
            what: "connect to",
            at: format!(" at {uri}"),
            source,
        })
    }

    /// Connects as [`Stream::connect`] does, with a limit. A connection over TCP is tried for at
    /// most `timeout` per address of the host; the lookup of the host's name is not limited. A
    /// connection to a unix socket succeeds or fails at once. When the server's host stops
    /// answering, an established connection over TCP breaks after about 20 seconds instead of
    /// hanging.
    ///
    /// # Errors
    /// What the system reports.
    pub fn connect_within(uri: &NbdUri, timeout: Duration) -> Result<Stream, ClientError> {
        let stream = match &uri.transport {
            Transport::Unix { socket } => unix_now(socket).map(Stream::Unix),
            Transport::Tcp { host, port } => tcp_within(host, *port, timeout).map(Stream::Tcp),
        };
        stream.map_err(|source| ClientError::Io {
            what: "connect to",
            at: format!(" at {uri}"),
            source,
        })
    }

    /// Makes every blocking send and receive fail after this time.
    ///
    /// # Errors
    /// What the system reports.
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => {
                stream.set_read_timeout(timeout)?;
                stream.set_write_timeout(timeout)
            }
            Stream::Tcp(stream) => {
                stream.set_read_timeout(timeout)?;
                stream.set_write_timeout(timeout)
            }
        }
    }
}

/// Connects without waiting: when the server does not accept connections and its backlog is full,
/// this fails at once.
fn unix_now(socket: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&fd, &SocketAddrUnix::new(socket)?)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn tcp_within(host: &str, port: u16, timeout: Duration) -> io::Result<TcpStream> {
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "its host has no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, KEEPALIVE_EVERY)?;
                sockopt::set_tcp_keepintvl(&stream, KEEPALIVE_EVERY)?;
                sockopt::set_tcp_keepcnt(&stream, KEEPALIVE_PROBES)?;
                // The kernel sends keepalive probes only while all sent bytes are acknowledged.
                // This limit covers the time in which sent bytes are not acknowledged.
                let limit = KEEPALIVE_EVERY * (KEEPALIVE_PROBES + 1);
                sockopt::set_tcp_user_timeout(&stream, limit.as_millis() as u32)?;
                return Ok(stream);
            }
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Unix(stream) => stream.as_fd(),
            Stream::Tcp(stream) => stream.as_fd(),
        }
    }
}

impl Duplex for Stream {
    fn second(&self) -> io::Result<Stream> {
        match self {
            Stream::Unix(stream) => stream.second().map(Stream::Unix),
            Stream::Tcp(stream) => stream.second().map(Stream::Tcp),
        }
    }

    fn exchange(&mut self, output: &[u8], input: &mut [u8]) -> io::Result<Moved> {
        match self {
            Stream::Unix(stream) => stream.exchange(output, input),
            Stream::Tcp(stream) => stream.exchange(output, input),
        }
    }
}

impl Read for Stream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(buf),
            Stream::Tcp(stream) => stream.read(buf),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(buf),
            Stream::Tcp(stream) => stream.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
