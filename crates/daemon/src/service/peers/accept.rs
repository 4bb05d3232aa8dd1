//! An owner of a volume introduces itself here. Whether it is the owner is asked of the ownership record.

use super::identity::Role;
use super::images::as_reached_here;
use super::stream::Who;
use super::{Certificates, Leaving, PeerAddress, PeerError, Stream, Transport, me, record_of};
use crate::service::attachment;
use crate::service::plan::drain_order;
use crate::service::volumes::Volumes;
use crate::shard::Hello;
use crate::volume::check_name;
use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidepool_backend::{BackendUri, Prepared};
use tidepool_engine::api::{Mode, Nanos, VolumeSpec};
use tidepool_replica::wire::Message;
use tidepool_replica::{Limits, Party, Record};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tracing::{info, warn};

/// Connections at once of which nobody knows whose they are.
const STRANGERS_MAX: usize = 64;
/// Introductions at once of hosts that are known.
const INTRODUCTIONS_MAX: usize = 64;
/// Reasons that are remembered, so that the log has each once while a host tries again and again.
const REASONS_MAX: usize = 256;
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
            Listener::Unix(listener) => listener.accept().await.map(|(stream, _)| Accepted::Unix(stream)),
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

/// Connections of which nobody knows whose they are. When there are too many, the address that has the most loses its oldest one: who
/// connects and says nothing keeps nobody else out.
#[derive(Default)]
struct Strangers(Mutex<Vec<Stranger>>);

struct Stranger {
    number: u64,
    from: Option<IpAddr>,
    task: AbortHandle,
}

impl Strangers {
    fn all(&self) -> MutexGuard<'_, Vec<Stranger>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one in; another one may have to go.
    fn insert(&self, stranger: Stranger) {
        let mut all = self.all();
        if all.len() >= STRANGERS_MAX {
            let of = |from: Option<IpAddr>| all.iter().filter(|other| other.from == from).count();
            // The oldest comes first; of several that are alike the last one would be taken.
            let most = all.iter().map(|other| of(other.from)).max().unwrap_or(0);
            if let Some(at) = all.iter().position(|other| of(other.from) == most) {
                all.remove(at).task.abort();
            }
        }
        all.push(stranger);
    }

    /// It is known whose it is, or it has gone.
    fn remove(&self, number: u64) {
        self.all().retain(|stranger| stranger.number != number);
    }
}

/// What all connections of a listener share.
struct Reception {
    volumes: Arc<Volumes>,
    host: String,
    strangers: Strangers,
    introductions: Semaphore,
    reasons: Reasons,
}

/// Takes owners in until the future is dropped.
pub(in crate::service) async fn accept(listener: Listener, volumes: Arc<Volumes>, host: String) {
    let reception = Arc::new(Reception {
        volumes,
        host,
        strangers: Strangers::default(),
        introductions: Semaphore::new(INTRODUCTIONS_MAX),
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
                    warn!("{who} was not taken in as owner of a volume: {error}");
                }
                Err(_) => {}
            }
        });
        reception.strangers.insert(Stranger { number, from, task: task.abort_handle() });
        let _ = begin.send(());
    }
}

async fn introduced(accepted: Accepted, reception: &Reception, number: u64) -> Result<(), PeerError> {
    let volumes = &reception.volumes;
    let limits = *volumes.limits();
    let heard = timeout(Duration::from_nanos(limits.hello_ns), hear(accepted, limits)).await;
    reception.strangers.remove(number);
    let (mut stream, said) = heard.map_err(|_| PeerError::Silent)??;
    let role = match said.wish {
        Wish::Follow { .. } => Role::SendsCopies,
        Wish::TakeOver | Wish::Expect(_) => Role::HandsOver,
    };
    if let Err(error) = stream.check(&said.host, volumes.hosts(), role) {
        return stream.refuse(&error.to_string()).await;
    }
    let my_host = reception.host.clone();
    let turn = reception.introductions.acquire().await;
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
            // That may take long, and is in nobody's way.
            drop(turn);
            return take_over(stream, said, volumes).await;
        }
        Wish::Expect(leaving) => {
            let leaving = leaving.clone();
            return expect(stream, said, leaving, volumes, &my_host).await;
        }
    }
    let shard = volumes.shard();
    let me = me(shard.opened().uuid);
    let (record, spec) = match look(&said, me, volumes).await {
        Ok(looked) => looked,
        Err(why) => return stream.refuse(&why).await,
    };
    let Said { host, name, .. } = said;
    let hello = Hello { socket: stream.into_socket()?, host: host.clone(), me, my_host, record, spec };
    let welcome = shard.welcome(hello).await;
    welcome.map_err(|error| PeerError::Refused(format!("volume {name} of {host}: {error}")))?;
    volumes.look_again(&name);
    info!("volume {name}: {host} owns it and may send its records here");
    Ok(())
}

/// Takes over what its owner has let go of.
async fn take_over(mut stream: Stream, said: Said, volumes: &Arc<Volumes>) -> Result<(), PeerError> {
    if let Err(why) = look(&said, me(volumes.shard().opened().uuid), volumes).await {
        return stream.refuse(&why).await;
    }
    let Said { name, owner, generation, .. } = said;
    match volumes.take_handed_over(&name, owner, generation, Prepared::default()).await {
        Ok(()) => stream.send(&Message::Taken { generation }).await,
        Err(error) => stream.refuse(&crate::failure::one_line(&error)).await,
    }
}

/// Lets the clients of a volume in that is to be served here later.
async fn expect(
    mut stream: Stream,
    said: Said,
    leaving: Leaving,
    volumes: &Arc<Volumes>,
    my_host: &str,
) -> Result<(), PeerError> {
    let shard = volumes.shard();
    let me = me(shard.opened().uuid);
    let looked = if leaving.to != my_host {
        Err(format!("this is host {my_host}"))
    } else {
        match look(&said, me, volumes).await {
            Ok((record, spec)) => volumes.expect(&spec, record, leaving).await,
            Err(why) => Err(why),
        }
    };
    match looked {
        Ok(arriving) => {
            stream.send(&Message::Expecting { cache: me.cache }).await?;
            info!("volume {}: {} is about to hand it over; its clients are let in", said.name, said.host);
            arriving.start(stream);
            Ok(())
        }
        Err(why) => stream.refuse(&why).await,
    }
}

/// What an owner wants.
enum Wish {
    /// To send its records here.
    Follow {
        /// How long it takes reads without an echo of its beats.
        lease_ns: Nanos,
    },
    /// To have the volume taken over.
    TakeOver,
    /// To have its clients let in.
    Expect(Leaving),
}

/// What an owner has said of itself.
struct Said {
    wish: Wish,
    owner: Party,
    generation: u64,
    host: String,
    name: String,
    image: String,
    /// It is another daemon of this host.
    is_local: bool,
}

async fn hear(accepted: Accepted, limits: Limits) -> Result<(Stream, Said), PeerError> {
    let mut stream = accepted.secured(limits).await?;
    stream.greet().await?;
    let mut head = Vec::new();
    let (wish, call) = match stream.receive(&mut head).await? {
        Message::Hello { call, lease_ns } => (Wish::Follow { lease_ns }, call),
        Message::HandOver(call) => (Wish::TakeOver, call),
        Message::Offer(offer) => (Wish::Expect(Leaving::from_offer(&offer)?), offer.call),
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
    Ok((stream, said))
}

/// Asks the ownership record whether that is true. Returns what it says, and the volume as it would be here.
async fn look(said: &Said, me: Party, volumes: &Volumes) -> Result<(Record, VolumeSpec), String> {
    check_name(&said.name).map_err(|e| e.to_string())?;
    if said.owner.cache == me.cache {
        return Err("that is this very host".into());
    }
    let uri: BackendUri = said.image.parse().map_err(|e| format!("{}: {e}", said.image))?;
    let here = volumes.shard().volumes().await.map_err(|e| e.to_string())?;
    let uri = match said.is_local {
        true => uri,
        false => {
            let here = here.iter().filter_map(|(_, spec, _)| spec.backend.parse().ok());
            let own: Vec<BackendUri> = here.chain(volumes.wanted_images()).collect();
            as_reached_here(&uri, &own, volumes.images_of_others())?
        }
    };
    let known = here.into_iter().map(|(_, spec, _)| spec).find(|spec| spec.name == said.name);
    let own: Option<BackendUri> = known.as_ref().and_then(|known| known.backend.parse().ok());
    let drain = drain_order(&uri, None).into();
    let image = uri.to_string();
    let read = volumes.ask_image(&uri, "reading the ownership record", move |uri| {
        let same = own.is_none_or(|own| {
            own == *uri || tidepool_backend::identity(&own) == tidepool_backend::identity(uri)
        });
        Ok(if same { Some(tidepool_backend::ownership(uri, None)?) } else { None })
    });
    let found = match timeout(Duration::from_nanos(volumes.limits().record_ns), read).await {
        Ok(Ok(Some(found))) => found,
        Ok(Ok(None)) => return Err("another volume of this name is here".into()),
        Ok(Err(error)) => return Err(error.to_string()),
        Err(_) => return Err(format!("the ownership record of {uri} cannot be read in time")),
    };
    let found = found.ok_or_else(|| format!("{uri} has no ownership record"))?;
    let record = record_of(&found);
    let is_owner = record.owner.cache == said.owner.cache && found.host == said.host;
    if !is_owner || record.generation != said.generation {
        return Err(format!(
            "the ownership record of {uri} names {} as owner, in generation {}",
            found.host, record.generation
        ));
    }
    let attachment = attachment::encode(None, &[]).expect("nothing is not too long");
    let spec = VolumeSpec {
        name: said.name.clone(),
        // A volume that is known has its image by the name that it has here.
        backend: known.map_or(image, |known| known.backend),
        size_bytes: 0,
        mode: Mode::WriteBack,
        drain,
        dirty_bytes_max: 0,
        read_only: false,
        generation: 0,
        attachment,
    };
    Ok((record, spec))
}
