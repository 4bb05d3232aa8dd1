//! A connection with another host before it goes to the reactor.

use super::certificates::{Certificates, CertificatesError, explain};
use super::identity::{Hosts, Identity, Role};
use super::{PeerAddress, PeerError};
use crate::shard::Socket;
use rustls::pki_types::ServerName;
use rustls::{CommonState, Connection};
use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;
use tidepool_replica::Limits;
use tidepool_replica::wire::{GREETING_BYTES, Greeting, Message, PREFIX_BYTES, Prefix, one_line};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

/// How long a side that refuses waits until the other side has read why.
const PARTING_WAIT_MAX: Duration = Duration::from_millis(500);

/// How a peer is reached.
#[derive(Debug, Clone)]
pub struct Route {
    address: PeerAddress,
    certificates: Option<Arc<Certificates>>,
    /// Its name is looked up once at a time: that may take long, and keeps a thread.
    lookup: Arc<Semaphore>,
    hosts: Arc<Hosts>,
    limits: Limits,
}

impl Route {
    /// The way to an address. With TLS there are certificates. `hosts` says who may be there.
    pub fn new(
        address: PeerAddress,
        certificates: Option<Arc<Certificates>>,
        hosts: Arc<Hosts>,
        limits: Limits,
    ) -> Route {
        Route { address, certificates, lookup: Arc::new(Semaphore::new(1)), hosts, limits }
    }

    /// Who may be there.
    pub(super) fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Connects.
    ///
    /// # Errors
    /// The peer cannot be reached in time.
    pub(super) async fn connect(&self) -> Result<Stream, PeerError> {
        let connected =
            timeout(Duration::from_nanos(self.limits.connect_ns), self.transport()).await;
        let (transport, who) = connected.map_err(|_| PeerError::Silent)??;
        Ok(Stream::new(transport, who, self.limits))
    }

    async fn transport(&self) -> Result<(Transport, Who), PeerError> {
        match &self.address {
            PeerAddress::Unix(path) => {
                Ok((Transport::Unix(UnixStream::connect(path).await?), Who::Local))
            }
            PeerAddress::Tcp(address) => {
                Ok((Transport::Tcp(without_delay(TcpStream::connect(address).await?)?), Who::Local))
            }
            PeerAddress::Tls { host, port } => {
                let certificates = self.certificates.as_ref().ok_or(PeerError::NoCertificates)?;
                let config = certificates.client()?;
                let found = self.look_up(host.clone(), *port).await?;
                let stream = without_delay(TcpStream::connect(&found[..]).await?)?;
                let handshake =
                    TlsConnector::from(config).connect(host.clone(), stream).into_fallible();
                match handshake.await {
                    Ok(stream) => {
                        let who = Who::of(stream.get_ref().1, certificates)?;
                        Ok((Transport::Tls(Box::new(stream.into())), who))
                    }
                    Err((error, stream)) => Err(part(error, stream).await),
                }
            }
        }
    }

    /// How long the peer is waited for.
    pub(super) fn limits(&self) -> &Limits {
        &self.limits
    }

    async fn look_up(&self, host: ServerName<'static>, port: u16) -> io::Result<Vec<SocketAddr>> {
        if let ServerName::IpAddress(ip) = host {
            return Ok(vec![SocketAddr::new(ip.into(), port)]);
        }
        let turn = self.lookup.clone().acquire_owned().await.map_err(io::Error::other)?;
        let found = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            (host.to_str().as_ref(), port).to_socket_addrs().map(Iterator::collect)
        });
        found.await.map_err(io::Error::other)?
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl From<CertificatesError> for PeerError {
    fn from(error: CertificatesError) -> PeerError {
        PeerError::Tls(error.to_string())
    }
}

impl From<io::Error> for PeerError {
    fn from(error: io::Error) -> PeerError {
        let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        match tls {
            Some(error) => PeerError::Tls(explain(error)),
            None if error.kind() == ErrorKind::UnexpectedEof => PeerError::Closed,
            None => PeerError::Io(error),
        }
    }
}

fn without_delay(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Lets the other side read why TLS came to nothing: a close of a connection with something unread
/// takes back what was sent last.
async fn part(error: io::Error, mut stream: TcpStream) -> PeerError {
    let reading = async {
        let _ = stream.shutdown().await;
        let mut unread = [0; 512];
        while stream.read(&mut unread).await.is_ok_and(|bytes| bytes > 0) {}
    };
    // After that it has had its time.
    let _ = timeout(PARTING_WAIT_MAX, reading).await;
    error.into()
}

/// Who is at the other end of a connection.
pub(super) enum Who {
    /// Another daemon of this host.
    Local,
    /// A host with a certificate of the authority.
    Host {
        /// Whose that is.
        identity: Identity,
        /// They know whether it is revoked meanwhile.
        certificates: Arc<Certificates>,
    },
}

impl Who {
    /// The one whose certificate is verified.
    ///
    /// # Errors
    /// It has none that can be read, or it is not accepted any more.
    fn of(tls: &CommonState, certificates: &Arc<Certificates>) -> Result<Who, PeerError> {
        let shown = tls.peer_certificates().and_then(|chain| chain.first());
        let shown = shown.ok_or_else(|| PeerError::Tls("it shows no certificate".into()))?;
        let identity = Identity::of(shown)?;
        match certificates.revoked()?.contains(&identity.key()) {
            true => Err(PeerError::Revoked),
            false => Ok(Who::Host { identity, certificates: certificates.clone() }),
        }
    }

    fn is_revoked(&self) -> bool {
        match self {
            Who::Local => false,
            Who::Host { identity, certificates } => certificates.is_known_revoked(&identity.key()),
        }
    }
}

/// A connection with another host.
pub(in crate::service) struct Stream {
    transport: Transport,
    who: Who,
    limits: Limits,
}

/// What carries a connection.
pub(super) enum Transport {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Transport {
    /// A connection that another host has made.
    pub(super) async fn accepted(
        stream: TcpStream,
        certificates: Option<&Arc<Certificates>>,
    ) -> Result<(Transport, Who), PeerError> {
        let stream = without_delay(stream)?;
        let Some(certificates) = certificates else {
            return Ok((Transport::Tcp(stream), Who::Local));
        };
        let config = certificates.server()?;
        match TlsAcceptor::from(config).accept(stream).into_fallible().await {
            Ok(stream) => {
                let who = Who::of(stream.get_ref().1, certificates)?;
                Ok((Transport::Tls(Box::new(stream.into())), who))
            }
            Err((error, stream)) => Err(part(error, stream).await),
        }
    }
}

impl Stream {
    /// A connection whose other side is given so much time.
    pub(super) fn new(transport: Transport, who: Who, limits: Limits) -> Stream {
        Stream { transport, who, limits }
    }

    /// Looks whether the other side is this host, and may do that here. Another daemon of this host
    /// may be any host that it says.
    ///
    /// # Errors
    /// It is not, or may not.
    pub(super) fn check(&self, host: &str, hosts: &Hosts, role: Role) -> Result<(), PeerError> {
        if let Who::Host { identity, .. } = &self.who
            && !identity.is(host)
        {
            return Err(PeerError::NotItsName { said: host.to_owned(), names: identity.names() });
        }
        hosts.check(host, role).map_err(PeerError::Denied)
    }

    /// Looks whether the other side may be a host that may do that here, before it has said which
    /// one it is.
    ///
    /// # Errors
    /// None of the hosts that its certificate is for may.
    pub(super) fn check_any(&self, hosts: &Hosts, role: Role) -> Result<(), PeerError> {
        let Who::Host { identity, .. } = &self.who else { return Ok(()) };
        identity.check_any(hosts, role).map_err(PeerError::Denied)
    }

    /// Looks whether the other side's certificate is still accepted.
    ///
    /// # Errors
    /// It is revoked.
    pub(in crate::service) fn check_standing(&self) -> Result<(), PeerError> {
        if self.who.is_revoked() { Err(PeerError::Revoked) } else { Ok(()) }
    }

    /// Looks whether the host that was looked for is at the other end, and may do that here.
    ///
    /// # Errors
    /// It is not, or may not.
    pub(super) fn check_found(
        &self,
        wanted: &str,
        hosts: &Hosts,
        role: Role,
    ) -> Result<(), PeerError> {
        self.check(wanted, hosts, role).map_err(|error| match error {
            PeerError::NotItsName { said: wanted, names } => PeerError::OtherHost { wanted, names },
            error => error,
        })
    }

    /// The other side is another daemon of this host.
    pub(in crate::service) fn is_local(&self) -> bool {
        matches!(self.who, Who::Local)
    }

    /// How long the other side is waited for.
    pub(in crate::service) fn answer_wait(&self) -> Duration {
        Duration::from_nanos(self.limits.answer_ns)
    }

    async fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        match &mut self.transport {
            Transport::Tcp(stream) => stream.read_exact(bytes).await.map(drop),
            Transport::Unix(stream) => stream.read_exact(bytes).await.map(drop),
            Transport::Tls(stream) => stream.read_exact(bytes).await.map(drop),
        }
    }

    async fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.transport {
            Transport::Tcp(stream) => stream.write_all(bytes).await,
            Transport::Unix(stream) => stream.write_all(bytes).await,
            Transport::Tls(stream) => {
                stream.write_all(bytes).await?;
                stream.flush().await
            }
        }
    }

    /// Says which versions this release speaks, and looks whether the other side speaks one of
    /// them.
    pub(super) async fn greet(&mut self) -> Result<(), PeerError> {
        self.write_all(&Greeting::OURS.encode()).await?;
        let mut theirs = [0; GREETING_BYTES];
        self.read_exact(&mut theirs).await?;
        Greeting::agree(&theirs)?;
        Ok(())
    }

    pub(in crate::service) async fn send(
        &mut self,
        message: &Message<'_>,
    ) -> Result<(), PeerError> {
        self.send_with(message, &[]).await
    }

    /// Sends a message and its data.
    pub(in crate::service) async fn send_with(
        &mut self,
        message: &Message<'_>,
        data: &[u8],
    ) -> Result<(), PeerError> {
        self.check_standing()?;
        let mut bytes = Vec::new();
        message.encode(&mut bytes);
        bytes.extend_from_slice(data);
        Ok(self.write_all(&bytes).await?)
    }

    /// Says that this side does not do as it is asked, and why.
    ///
    /// # Errors
    /// Always: what was said, or that it could not be.
    pub(in crate::service) async fn refuse<T>(&mut self, why: &str) -> Result<T, PeerError> {
        self.refuse_with(why, why).await
    }

    /// The same, where the other side is told less than the log here.
    ///
    /// # Errors
    /// Always: why, or that nothing could be said.
    pub(in crate::service) async fn refuse_with<T>(
        &mut self,
        told: &str,
        why: &str,
    ) -> Result<T, PeerError> {
        self.send(&Message::Refused(&one_line(told))).await?;
        Err(PeerError::Refused(one_line(why)))
    }

    /// Receives one message without data; its head goes to `head`. What comes behind it is left for
    /// the reactor.
    pub(in crate::service) async fn receive<'a>(
        &mut self,
        head: &'a mut Vec<u8>,
    ) -> Result<Message<'a>, PeerError> {
        let (message, data_bytes) = self.receive_head(head).await?;
        if data_bytes > 0 {
            return Err(PeerError::Unexpected);
        }
        Ok(message)
    }

    /// Receives one message and its data, which goes to `data`.
    pub(in crate::service) async fn receive_with<'a>(
        &mut self,
        head: &'a mut Vec<u8>,
        data: &mut Vec<u8>,
    ) -> Result<Message<'a>, PeerError> {
        let (message, data_bytes) = self.receive_head(head).await?;
        data.resize(data_bytes, 0);
        self.read_exact(data).await?;
        Ok(message)
    }

    async fn receive_head<'a>(
        &mut self,
        head: &'a mut Vec<u8>,
    ) -> Result<(Message<'a>, usize), PeerError> {
        let mut prefix = [0; PREFIX_BYTES];
        self.read_exact(&mut prefix).await?;
        self.check_standing()?;
        let prefix = Prefix::decode(&prefix)?;
        head.resize(prefix.head_bytes(), 0);
        self.read_exact(head).await?;
        Ok((prefix.message(head)?, prefix.data_bytes()))
    }

    /// The connection as the reactor wants it: io_uring waits by itself, and would not with
    /// `O_NONBLOCK`.
    pub(super) fn into_socket(self) -> io::Result<Socket> {
        let key = match &self.who {
            Who::Host { identity, .. } => Some(identity.key()),
            Who::Local => None,
        };
        let (stream, tls) = match self.transport {
            Transport::Unix(stream) => {
                let stream = stream.into_std()?;
                stream.set_nonblocking(false)?;
                return Ok(Socket { fd: stream.into(), tls: None, key });
            }
            Transport::Tcp(stream) => (stream, None),
            Transport::Tls(stream) => {
                let (stream, tls) = match *stream {
                    TlsStream::Client(stream) => {
                        let (stream, tls) = stream.into_inner();
                        (stream, Connection::from(tls))
                    }
                    TlsStream::Server(stream) => {
                        let (stream, tls) = stream.into_inner();
                        (stream, Connection::from(tls))
                    }
                };
                (stream, Some(Box::new(tls)))
            }
        };
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(Socket { fd: stream.into(), tls, key })
    }
}
