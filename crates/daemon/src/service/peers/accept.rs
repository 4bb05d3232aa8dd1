//! An owner of a volume introduces itself here. Whether it is the owner is asked of the ownership record.

use super::identity::Role;
use super::images::{as_reached_here, check_place, is_one, is_way_of_this_host};
use super::stream::Who;
use super::{Certificates, HOSTS_MAX, Leaving, PeerAddress, PeerError, Stream, Transport, me, record_of};
use crate::service::attachment;
use crate::service::plan::drain_order;
use crate::service::volumes::Volumes;
use crate::shard::{Counterpart, Hello};
use crate::volume::check_name;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidepool_backend::{BackendUri, Prepared};
use tidepool_engine::api::{Mode, Nanos, VOLUMES_MAX, VolumeSpec};
use tidepool_engine::status::VolumeState;
use tidepool_replica::wire::Message;
use tidepool_replica::{Copies, Limits, Party, Record};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tracing::{info, warn};

/// Connections at once of which nobody knows whose they are, and as many again from addresses of hosts that have introduced themselves.
const STRANGERS_MAX: usize = 64;
/// Addresses of one host that are remembered.
const ADDRESSES_OF_HOST_MAX: usize = 4;
/// Introductions of one host that are looked at at once: each may keep a thread that waits for the cluster.
const LOOKED_AT_MAX: usize = 4;
/// Introductions of one host that wait, or are looked at: one for each volume, when it has been away, and as many again.
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

/// Connections of which nobody knows whose they are. Those from addresses of hosts that have introduced themselves have places of their
/// own. When there are too many, the network that has the most loses one: in it the address that has the most, and
/// of that the oldest one that has shown no certificate, if there is one. A host that connects and says nothing keeps no other address out.
#[derive(Default)]
struct Strangers(Mutex<Crowd>);

#[derive(Default)]
struct Crowd {
    strangers: Vec<Stranger>,
    /// From where hosts have introduced themselves, the newest last.
    addresses: BTreeMap<String, Vec<IpAddr>>,
}

struct Stranger {
    number: u64,
    from: Option<IpAddr>,
    task: AbortHandle,
    is_secured: bool,
    /// A host has introduced itself from there.
    is_known_place: bool,
}

impl Strangers {
    fn crowd(&self) -> MutexGuard<'_, Crowd> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes one in; another one may have to go.
    fn insert(&self, number: u64, from: Option<IpAddr>, task: AbortHandle) {
        let mut crowd = self.crowd();
        let is_known_place =
            from.is_some_and(|from| crowd.addresses.values().any(|known| known.contains(&from)));
        crowd.make_room(is_known_place);
        crowd.strangers.push(Stranger { number, from, task, is_secured: false, is_known_place });
    }

    /// It has shown a certificate.
    fn secure(&self, number: u64) {
        let mut crowd = self.crowd();
        let found = crowd.strangers.iter_mut().find(|stranger| stranger.number == number);
        found.into_iter().for_each(|stranger| stranger.is_secured = true);
    }

    /// It is known whose it is, or it has gone.
    fn remove(&self, number: u64) {
        self.crowd().strangers.retain(|stranger| stranger.number != number);
    }

    /// A host has introduced itself from there.
    fn is_at(&self, host: &str, from: IpAddr) {
        let (mut crowd, host) = (self.crowd(), host.to_ascii_lowercase());
        if crowd.addresses.len() >= HOSTS_MAX && !crowd.addresses.contains_key(&host) {
            return;
        }
        let known = crowd.addresses.entry(host).or_default();
        if known.last() != Some(&from) {
            known.retain(|known| *known != from);
            known.push(from);
            known.drain(..known.len().saturating_sub(ADDRESSES_OF_HOST_MAX));
        }
    }
}

impl Crowd {
    /// Has one go, if all places are taken that one from such a place could have.
    fn make_room(&mut self, is_known_place: bool) {
        let rivals: Vec<usize> = (0..self.strangers.len())
            .filter(|&at| self.strangers[at].is_known_place == is_known_place)
            .collect();
        if rivals.len() >= STRANGERS_MAX {
            let shown: Vec<_> =
                rivals.iter().map(|&at| &self.strangers[at]).map(|s| (s.from, s.is_secured)).collect();
            self.strangers.remove(rivals[who_has_to_go(&shown)]).task.abort();
        }
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

/// Which of these has to go, of which the oldest comes first; there is one at least. Each has an address, and has shown a certificate or not.
fn who_has_to_go(all: &[(Option<IpAddr>, bool)]) -> usize {
    let of_network = |from: Option<IpAddr>| {
        all.iter().filter(|(other, _)| other.map(network) == from.map(network)).count()
    };
    let of_address = |from: Option<IpAddr>| all.iter().filter(|(other, _)| *other == from).count();
    let reasons: Vec<(usize, usize, bool)> =
        all.iter().map(|&(from, is_secured)| (of_network(from), of_address(from), !is_secured)).collect();
    let most = reasons.iter().max();
    reasons.iter().position(|reasons| Some(reasons) == most).unwrap_or(0)
}

/// What a host has of its own: its address, or its network of IPv6.
fn network(from: IpAddr) -> IpAddr {
    const OWN_BITS: u32 = 64;
    match from {
        IpAddr::V6(from) => IpAddr::V6((from.to_bits() >> OWN_BITS << OWN_BITS).into()),
        from => from,
    }
}

async fn introduced(accepted: Accepted, reception: &Reception, number: u64) -> Result<(), PeerError> {
    let volumes = &reception.volumes;
    let limits = *volumes.limits();
    let from = accepted.from();
    let secured = || reception.strangers.secure(number);
    let heard = timeout(Duration::from_nanos(limits.hello_ns), hear(accepted, limits, secured)).await;
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
    let hello = Hello { socket: stream.into_socket()?, host: host.clone(), me, my_host, record, spec };
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
            info!("volume {}: {} is about to hand it over; its clients are let in", said.name, said.host);
            arriving.start(stream);
            Ok(())
        }
        Err(Refusal { told, why }) => stream.refuse_with(&told, &why).await,
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

/// Why a host is not taken in as the owner of a volume.
struct Refusal {
    /// What the host is told. One whose volume it is not learns nothing of this host from it.
    told: String,
    /// What the log here says.
    why: String,
}

/// Why an owner is not believed, with what is here and how this host reaches it.
struct Doubt {
    why: String,
    /// The same for a host that the record names.
    told: Option<String>,
}

impl From<String> for Doubt {
    fn from(why: String) -> Doubt {
        Doubt { why, told: None }
    }
}

impl Said {
    /// It is not believed.
    fn doubted(&self, doubt: Doubt) -> Refusal {
        let Doubt { why, told } = doubt;
        let told = match told {
            Some(told) => told,
            None if self.is_local => why.clone(),
            None => format!(
                "this host does not know {} as the owner of volume {} on that image; its log says why",
                self.host, self.name
            ),
        };
        Refusal { told, why }
    }

    /// It is the owner, and is told why that does not do. `backend` is its image as this host reaches it.
    fn refused(&self, backend: &str, why: String) -> Refusal {
        let told = if self.is_local { why.clone() } else { why.replace(backend, &self.image) };
        Refusal { told, why }
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

/// Asks the ownership record whether that is true. Returns what it says, and the volume as it would be here. `turn` is given back when no
/// thread looks any more, which may be later.
async fn look(
    said: &Said,
    me: Party,
    volumes: &Volumes,
    turn: OwnedSemaphorePermit,
) -> Result<(Record, VolumeSpec), Refusal> {
    look_up(said, me, volumes, turn).await.map_err(|doubt| said.doubted(doubt))
}

async fn look_up(
    said: &Said,
    me: Party,
    volumes: &Volumes,
    turn: OwnedSemaphorePermit,
) -> Result<(Record, VolumeSpec), Doubt> {
    check_name(&said.name).map_err(|e| e.to_string())?;
    if said.owner.cache == me.cache {
        return Err("that is this very host".to_owned().into());
    }
    let uri: BackendUri = said.image.parse().map_err(|e| format!("{}: {e}", said.image))?;
    let here = volumes.shard().volumes().await.map_err(|e| e.to_string())?;
    let own = volumes.own_images(&here);
    let wanted = volumes.wanted_images();
    let images = here.iter().filter_map(|(_, spec, _)| Some((spec.name.clone(), spec.backend.parse().ok()?)));
    let images: Vec<(String, BackendUri)> = images.chain(wanted).collect();
    let listed = volumes.images_of_others().to_vec();
    let is_local = said.is_local;
    let uri = if is_local { uri } else { as_reached_here(&uri, &own, &listed)? };
    // One image is one volume.
    if let Some((name, _)) = images.iter().find(|(name, image)| *name != said.name && is_one(image, &uri)) {
        return Err(format!("{uri} is here as volume {name}").into());
    }
    let known = here.into_iter().find(|(_, spec, _)| spec.name == said.name);
    // A copy may have been begun in a way that this host does not take.
    let is_old = !is_local
        && known.as_ref().is_some_and(|(_, spec, state)| {
            let recorded = spec.backend.parse();
            *state == VolumeState::Replica
                && recorded.is_ok_and(|recorded| !is_way_of_this_host(&recorded, &own, &listed))
        });
    let takes_over = matches!(said.wish, Wish::TakeOver);
    // Also one that is not open.
    let named = images.into_iter().find(|(name, _)| *name == said.name).map(|(_, image)| image);
    let drain = drain_order(&uri, None).into();
    let image = uri.to_string();
    let read = volumes.ask_image(&uri, "reading the ownership record", move |uri| {
        let _turn = turn;
        if !is_local && let Err(why) = check_place(uri, &own, &listed) {
            return Ok(Err(why));
        }
        let same = named.is_none_or(|named| {
            is_one(&named, uri) || tidepool_backend::identity(&named) == tidepool_backend::identity(uri)
        });
        match same {
            true => tidepool_backend::ownership(uri, None).map(Ok),
            false => Ok(Err("another volume of this name is here".into())),
        }
    });
    let found = match timeout(Duration::from_nanos(volumes.limits().record_ns), read).await {
        Ok(Ok(found)) => found?,
        Ok(Err(error)) => return Err(error.to_string().into()),
        Err(_) => return Err(format!("the ownership record of {uri} cannot be read in time").into()),
    };
    let found = found.ok_or_else(|| format!("{uri} has no ownership record"))?;
    let record = record_of(&found);
    let is_owner = record.owner.cache == said.owner.cache && found.host == said.host;
    if !is_owner || record.generation != said.generation {
        let why = |image: &str| {
            format!(
                "the ownership record of {image} names {} as owner, in generation {} (a host that was renamed since needs its old name until the volume is served again)",
                found.host, record.generation
            )
        };
        let is_named =
            found.host == said.host || found.peer.as_ref().is_some_and(|peer| peer.host == said.host);
        let told = (is_named && !is_local).then(|| why(&said.image));
        return Err(Doubt { why: why(&image), told });
    }
    // The record names the host: it is told.
    let told = |why: String| Doubt { told: Some(why.clone()), why };
    let owner = Counterpart { cache: said.owner.cache, host: said.host.clone() };
    volumes.check_counterpart(&said.name, owner).await.map_err(told)?;
    if !is_local {
        volumes.hosts().has_cache(&said.host, said.owner.cache);
    }
    let backend = match known {
        // The copy does not count, and begins anew.
        Some(_) if is_old && !takes_over && record.copies == Copies::Solo => {
            let forgotten = volumes.forget_old_copy(&said.name, &uri);
            let forgotten = timeout(Duration::from_nanos(volumes.limits().record_ns), forgotten).await;
            let forgotten =
                forgotten.map_err(|_| format!("the copy of {uri} cannot be forgotten in time"))?;
            forgotten.map_err(|error| error.to_string())?;
            image
        }
        // What is to come here does not come in the copy's way.
        Some(_) if is_old && matches!(said.wish, Wish::Expect(_)) => image,
        // A volume that is known has its image by the name that it has here.
        Some((_, known, _)) => known.backend,
        None => image,
    };
    let attachment = attachment::encode(None, volumes.socket_of(&said.name).as_ref(), &[])
        .expect("a socket that is there is not too long");
    let spec = VolumeSpec {
        name: said.name.clone(),
        backend,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_with_the_most_connections_loses_its_oldest_one() {
        let from = |text: &str| (Some(text.parse().expect("an address")), false);
        let (honest, flood, other) = (from("fd00::2"), from("fd00::3"), from("fd01::1"));
        assert_eq!(who_has_to_go(&[honest, flood, flood, other]), 1, "in one network");
        assert_eq!(
            who_has_to_go(&[other, other, honest, flood, from("fd00::4")]),
            2,
            "a network of many addresses"
        );
        assert_eq!(who_has_to_go(&[from("192.0.2.1"), from("192.0.2.2"), from("192.0.2.2")]), 1);
        assert_eq!(who_has_to_go(&[(None, false)]), 0);
        // Of one address the first that has shown no certificate; those of another one are no worse for that.
        let secured = (flood.0, true);
        assert_eq!(who_has_to_go(&[honest, secured, flood, flood]), 2);
        assert_eq!(who_has_to_go(&[honest, secured, secured]), 1);
    }

    /// Numbers of the strangers that are there.
    fn numbers(strangers: &Strangers) -> Vec<u64> {
        strangers.crowd().strangers.iter().map(|stranger| stranger.number).collect()
    }

    #[tokio::test]
    async fn silent_connections_keep_no_host_out_that_has_introduced_itself_or_shows_a_certificate() {
        let strangers = Strangers::default();
        let insert = |number: u64, from: &str| {
            let from = from.parse().expect("an address");
            strangers.insert(number, Some(from), tokio::spawn(std::future::pending::<()>()).abort_handle());
        };
        let known = "fd00::2";
        strangers.is_at("h2", known.parse().expect("an address"));
        insert(0, known);
        // Addresses of one network, and of many.
        for number in 1..1000 {
            insert(number, &format!("fd00::1:{number:x}"));
            insert(1000 + number, &format!("10.0.{}.{}", number / 256, number % 256));
        }
        let left = numbers(&strangers);
        assert_eq!(left.len(), STRANGERS_MAX + 1, "{left:?}");
        assert!(left.contains(&0), "it has a place of its own");
        // One that shows a certificate stays, although its address has the most.
        insert(5000, "10.9.9.9");
        strangers.secure(5000);
        (5001..6000).for_each(|number| insert(number, "10.9.9.9"));
        assert!(numbers(&strangers).contains(&5000));
        // Users of the host whose address is known have only that one's places.
        (6000..7000).for_each(|number| insert(number, known));
        let left = numbers(&strangers);
        assert_eq!(left.len(), 2 * STRANGERS_MAX);
        assert!(left.contains(&5000) && left.contains(&6999));
    }

    #[test]
    fn a_host_is_known_by_its_newest_addresses() {
        let strangers = Strangers::default();
        let at = |number: usize| IpAddr::from([10, 0, 0, number as u8]);
        (1..=6).chain([4]).for_each(|number| strangers.is_at("H2", at(number)));
        assert_eq!(strangers.crowd().addresses["h2"], [3, 5, 6, 4].map(at));
        (0..2 * HOSTS_MAX).for_each(|host| strangers.is_at(&format!("x{host}"), at(9)));
        assert_eq!(strangers.crowd().addresses.len(), HOSTS_MAX);
    }
}
