//! An owner of a volume introduces itself here, and has what it wants if the ownership record names
//! it.

use super::claim::{Refusal, Said, Wish, look};
use super::identity::Role;
use super::strangers::Strangers;
use super::stream::Who;
use super::{Certificates, Leaving, PeerAddress, PeerError, Stream, Transport, me};
use crate::service::volumes::Volumes;
use crate::shard::Hello;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidepool_backend::Prepared;
use tidepool_engine::api::{Nanos, VOLUMES_MAX};
use tidepool_replica::wire::Message;
use tidepool_replica::{Limits, Party};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::timeout;
use tracing::{info, warn};

/// Introductions of one host that are looked at at once: each may keep a thread that waits for the
/// cluster.
const LOOKED_AT_MAX: usize = 4;
/// Introductions of one host that wait, or are looked at: one for each volume, when it has been
/// away, and as many again.
const INTRODUCTIONS_MAX: usize = 2 * VOLUMES_MAX;
/// Reasons that are remembered, so that the log has each once while a host tries again and again.
const REASONS_MAX: usize = 256;
/// What a host is told that has more.
const TOO_MANY: &str = "too many of its connections wait to be looked at";
/// Pause after the system had no resources for a connection.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Where owners connect to.
pub(in crate::service) enum Listener {
    /// On this host.
    Unix(UnixListener),
    /// Over the network, which may be with TLS.
    Tcp(TcpListener, Option<Arc<Certificates>>),
}

/// A connection that nothing was said on.
enum Accepted {
    Unix(UnixStream),
    Tcp(TcpStream, SocketAddr, Option<Arc<Certificates>>),
}

impl Listener {
    /// A listener on a socket that is bound to an address. With TLS there are certificates.
    ///
    /// # Errors
    /// The socket is of no use.
    pub(in crate::service) fn new(
        socket: OwnedFd,
        address: &PeerAddress,
        certificates: Option<Arc<Certificates>>,
    ) -> std::io::Result<Listener> {
        let certificates = match address {
            PeerAddress::Unix(_) => {
                let listener = std::os::unix::net::UnixListener::from(socket);
                listener.set_nonblocking(true)?;
                return UnixListener::from_std(listener).map(Listener::Unix);
            }
            PeerAddress::Tcp(_) => None,
            PeerAddress::Tls { .. } => Some(certificates.ok_or(std::io::ErrorKind::InvalidInput)?),
        };
        let listener = std::net::TcpListener::from(socket);
        listener.set_nonblocking(true)?;
        Ok(Listener::Tcp(TcpListener::from_std(listener)?, certificates))
    }

    async fn accept(&self) -> std::io::Result<Accepted> {
        match self {
            Listener::Unix(listener) => {
                listener.accept().await.map(|(stream, _)| Accepted::Unix(stream))
            }
            Listener::Tcp(listener, certificates) => {
                let (stream, from) = listener.accept().await?;
                Ok(Accepted::Tcp(stream, from, certificates.clone()))
            }
        }
    }
}

impl Accepted {
    /// The other host's address, if it is another one.
    fn from(&self) -> Option<IpAddr> {
        match self {
            Accepted::Unix(_) => None,
            Accepted::Tcp(_, from, _) => Some(from.ip()),
        }
    }

    async fn secured(self, limits: Limits) -> Result<Stream, PeerError> {
        let (transport, who) = match self {
            Accepted::Unix(stream) => (Transport::Unix(stream), Who::Local),
            Accepted::Tcp(stream, _, certificates) => {
                Transport::accepted(stream, certificates.as_ref()).await?
            }
        };
        Ok(Stream::new(transport, who, limits))
    }
}

impl fmt::Display for Accepted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Accepted::Unix(_) => f.write_str("another daemon of this host"),
            Accepted::Tcp(_, from, _) => write!(f, "the host at {from}"),
        }
    }
}

/// Why hosts were not taken in, since one was.
#[derive(Default)]
struct Reasons(Mutex<BTreeSet<(Option<IpAddr>, String)>>);

impl Reasons {
    fn known(&self) -> MutexGuard<'_, BTreeSet<(Option<IpAddr>, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether that has not been said.
    fn is_new(&self, of: Option<IpAddr>, why: String) -> bool {
        let mut known = self.known();
        if known.len() >= REASONS_MAX {
            known.clear();
        }
        known.insert((of, why))
    }

    /// A host was taken in: what is wrong with it next is news.
    fn forget(&self, of: Option<IpAddr>) {
        self.known().retain(|(who, _)| *who != of);
    }
}

/// Introductions of hosts that are known, each of which has turns of its own.
#[derive(Default)]
struct Introductions(Mutex<BTreeMap<String, (Arc<Semaphore>, usize)>>);

impl Introductions {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, (Arc<Semaphore>, usize)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One more of a host; `None` if there are too many.
    fn begin(&self, host: &str) -> Option<Introduction<'_>> {
        let mut all = self.all();
        let (turns, count) = all
            .entry(host.to_ascii_lowercase())
            .or_insert_with(|| (Arc::new(Semaphore::new(LOOKED_AT_MAX)), 0));
        if *count >= INTRODUCTIONS_MAX {
            return None;
        }
        *count += 1;
        Some(Introduction { of: self, host: host.to_ascii_lowercase(), turns: turns.clone() })
    }
}

/// One of them; it ends when this is dropped.
struct Introduction<'a> {
    of: &'a Introductions,
    host: String,
    turns: Arc<Semaphore>,
}

impl Drop for Introduction<'_> {
    fn drop(&mut self) {
        let mut all = self.of.all();
        if let Some((turns, count)) = all.get_mut(&self.host) {
            *count -= 1;
            // A thread may still hang in an image that it has named.
            if *count == 0 && turns.available_permits() == LOOKED_AT_MAX {
                all.remove(&self.host);
            }
        }
    }
}

/// What all connections of a listener share.
struct Reception {
    volumes: Arc<Volumes>,
    host: String,
    strangers: Strangers,
    introductions: Introductions,
    reasons: Reasons,
}

/// Takes owners in until the future is dropped.
pub(in crate::service) async fn accept(listener: Listener, volumes: Arc<Volumes>, host: String) {
    let reception = Arc::new(Reception {
        volumes,
        host,
        strangers: Strangers::default(),
        introductions: Introductions::default(),
        reasons: Reasons::default(),
    });
    let mut number = 0;
    loop {
        let accepted = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!("cannot accept a connection of another host: {error}; trying again shortly");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        number += 1;
        let (reception, from) = (reception.clone(), accepted.from());
        let (begin, begun) = oneshot::channel();
        let inner = reception.clone();
        let task = tokio::spawn(async move {
            // It stands among the strangers by then.
            if begun.await.is_err() {
                return;
            }
            let (who, from) = (accepted.to_string(), accepted.from());
            match introduced(accepted, &inner, number).await {
                Ok(()) => inner.reasons.forget(from),
                Err(error) if inner.reasons.is_new(from, error.to_string()) => {
                    // By its address: the port is another one each time.
                    let peer = from.map_or_else(|| who.clone(), |from| from.to_string());
                    warn!(%peer, "{who} was not taken in as owner of a volume: {error}");
                }
                Err(_) => {}
            }
        });
        reception.strangers.insert(number, from, task.abort_handle());
        let _ = begin.send(());
    }
}

async fn introduced(
    accepted: Accepted,
    reception: &Reception,
    number: u64,
) -> Result<(), PeerError> {
    let volumes = &reception.volumes;
    let limits = *volumes.limits();
    let from = accepted.from();
    let secured = || reception.strangers.secure(number);
    let heard =
        timeout(Duration::from_nanos(limits.hello_ns), hear(accepted, limits, secured)).await;
    reception.strangers.remove(number);
    let (mut stream, heard) = heard.map_err(|_| PeerError::Silent)??;
    let said = match heard {
        Heard::Owner(said) => said,
        Heard::Holder { host, name, image } => {
            return tell_need(stream, (&host, &name, &image), reception).await;
        }
    };
    let role = match said.wish {
        Wish::Follow { .. } => Role::SendsCopies,
        Wish::TakeOver | Wish::Expect(_) => Role::HandsOver,
    };
    if let Err(error) = stream.check(&said.host, volumes.hosts(), role) {
        return stream.refuse(&error.to_string()).await;
    }
    from.into_iter().for_each(|from| reception.strangers.is_at(&said.host, from));
    let my_host = reception.host.clone();
    let Some(introduction) = reception.introductions.begin(&said.host) else {
        return stream.refuse(TOO_MANY).await;
    };
    let turn = introduction.turns.clone().acquire_owned().await.map_err(|_| PeerError::Silent)?;
    match &said.wish {
        Wish::Follow { lease_ns } if *lease_ns != limits.lease_ns => {
            let ms = |ns: Nanos| ns / 1_000_000;
            let (theirs, ours) = (ms(*lease_ns), ms(limits.lease_ns));
            let why = format!(
                "the lease of an owner is {theirs} ms on host {} and {ours} ms here: both hosts need releases with one lease",
                said.host
            );
            return stream.refuse(&why).await;
        }
        Wish::Follow { .. } => {}
        Wish::TakeOver => {
            return take_over(stream, said, volumes, turn).await;
        }
        Wish::Expect(leaving) => {
            let leaving = leaving.clone();
            return expect(stream, said, leaving, (volumes, turn), &my_host).await;
        }
    }
    let shard = volumes.shard();
    let me = me(shard.opened().uuid);
    let (record, spec) = match look(&said, me, volumes, turn).await {
        Ok(looked) => looked,
        Err(Refusal { told, why }) => return stream.refuse_with(&told, &why).await,
    };
    let Said { host, name, .. } = said;
    let hello =
        Hello { socket: stream.into_socket()?, host: host.clone(), me, my_host, record, spec };
    let welcome = shard.welcome(hello).await;
    welcome.map_err(|error| PeerError::Refused(format!("volume {name} of {host}: {error}")))?;
    volumes.look_again(&name);
    info!("volume {name}: {host} owns it and may send its records here");
    Ok(())
}

/// Tells the holder of a copy whether this host needs it.
async fn tell_need(
    mut stream: Stream,
    (host, name, image): (&str, &str, &str),
    reception: &Reception,
) -> Result<(), PeerError> {
    let volumes = &reception.volumes;
    if let Err(error) = stream.check(host, volumes.hosts(), Role::HoldsCopies) {
        return stream.refuse(&error.to_string()).await;
    }
    let Some(introduction) = reception.introductions.begin(host) else {
        return stream.refuse(TOO_MANY).await;
    };
    let wait = Duration::from_nanos(volumes.limits().hello_ns);
    let Ok(Ok(_turn)) = timeout(wait, introduction.turns.acquire()).await else {
        return stream.refuse(TOO_MANY).await;
    };
    let cache = me(volumes.shard().opened().uuid).cache;
    match volumes.needs_copy(host, name, image).await {
        Ok(needed) => stream.send(&Message::Needed { cache, needed }).await,
        Err(error) => stream.refuse(&error.to_string()).await,
    }
}

/// Takes over what its owner has let go of.
async fn take_over(
    mut stream: Stream,
    said: Said,
    volumes: &Arc<Volumes>,
    turn: OwnedSemaphorePermit,
) -> Result<(), PeerError> {
    let looked = look(&said, me(volumes.shard().opened().uuid), volumes, turn).await;
    let backend = match looked {
        Ok((_, spec)) => spec.backend,
        Err(Refusal { told, why }) => return stream.refuse_with(&told, &why).await,
    };
    let generation = said.generation;
    // It may have been revoked while that was looked at.
    stream.check_standing()?;
    match volumes.take_handed_over(&said.name, said.owner, generation, Prepared::default()).await {
        Ok(()) => stream.send(&Message::Taken { generation }).await,
        Err(error) => {
            let Refusal { told, why } = said.refused(&backend, crate::failure::one_line(&error));
            stream.refuse_with(&told, &why).await
        }
    }
}

/// Lets the clients of a volume in that is to be served here later.
async fn expect(
    mut stream: Stream,
    said: Said,
    leaving: Leaving,
    (volumes, turn): (&Arc<Volumes>, OwnedSemaphorePermit),
    my_host: &str,
) -> Result<(), PeerError> {
    let shard = volumes.shard();
    let me = me(shard.opened().uuid);
    if leaving.to != my_host {
        return stream.refuse(&format!("this is host {my_host}")).await;
    }
    let looked = match look(&said, me, volumes, turn).await {
        Ok((record, spec)) => {
            let expected = volumes.expect(&spec, record, leaving, (&said.host, &said.image)).await;
            expected.map_err(|why| said.refused(&spec.backend, why))
        }
        Err(refusal) => Err(refusal),
    };
    match looked {
        Ok(arriving) => {
            stream.send(&Message::Expecting { cache: me.cache }).await?;
            info!(
                "volume {}: {} is about to hand it over; its clients are let in",
                said.name, said.host
            );
            arriving.start(stream);
            Ok(())
        }
        Err(Refusal { told, why }) => stream.refuse_with(&told, &why).await,
    }
}

/// Who introduces itself.
enum Heard {
    /// The owner of a volume.
    Owner(Said),
    /// The holder of a copy, which wants to know whether that is needed.
    Holder { host: String, name: String, image: String },
}

/// What a host says of itself. `secured` is told when it has shown a certificate, if it has to.
async fn hear(
    accepted: Accepted,
    limits: Limits,
    secured: impl FnOnce(),
) -> Result<(Stream, Heard), PeerError> {
    let mut stream = accepted.secured(limits).await?;
    secured();
    stream.greet().await?;
    let mut head = Vec::new();
    let (wish, call) = match stream.receive(&mut head).await? {
        Message::Hello { call, lease_ns } => (Wish::Follow { lease_ns }, call),
        Message::HandOver(call) => (Wish::TakeOver, call),
        Message::Offer(offer) => (Wish::Expect(Leaving::from_offer(&offer)?), offer.call),
        Message::Needs { host, name, image } => {
            let [host, name, image] = [host, name, image].map(str::to_owned);
            let heard = Heard::Holder { host, name, image };
            return Ok((stream, heard));
        }
        _ => return Err(PeerError::Unexpected),
    };
    let said = Said {
        wish,
        owner: Party { cache: call.cache, boot: call.boot },
        generation: call.generation,
        host: call.host.to_owned(),
        name: call.name.to_owned(),
        image: call.image.to_owned(),
        is_local: stream.is_local(),
    };
    Ok((stream, Heard::Owner(said)))
}
