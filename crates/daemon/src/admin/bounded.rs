//! An HTTP server of only so many connections at once, and fewer of one peer. Where there is no
//! room, the connection ends that has waited longest for its client. One that waits for the daemon
//! stays.

use super::ErrorBody;
use crate::audit::Caller;
use axum::Json;
use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream, unix};
use tokio::task::AbortHandle;

/// Most connections at once.
const CONNECTIONS_MAX: usize = 64;
/// Most of them that one peer has.
const OF_PEER_MAX: usize = 32;
/// Most further connections at once that are only told that there is no room.
const REFUSED_MAX: usize = 16;
/// How long the head of a request may take, from the connection or from the answer before. A
/// connection that asks nothing ends then, too.
const HEAD_TIME_MAX: Duration = Duration::from_secs(5);
/// How long the body of a request may take.
pub(super) const BODY_TIME_MAX: Duration = Duration::from_secs(5);
/// How long a client may take to read an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);
/// Leading bits of an IPv6 address that stand for one peer: a host has all addresses below them.
const IPV6_PEER_BITS: u32 = 64;

/// Who is at the other end, as far as the limits tell peers apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Peer {
    /// A user of this host.
    User(u32),
    /// A host, or a network that one host may have.
    Host(IpAddr),
    /// The system does not say.
    Unknown,
}

/// A listener that knows who connects.
pub(super) trait Door: Listener {
    /// Who it is.
    fn peer(connection: &Self::Io, address: &Self::Addr) -> Peer;

    /// Who it is for the audit.
    fn caller(_: &Self::Io) -> Caller {
        Caller::default()
    }
}

impl Door for UnixListener {
    fn peer(connection: &UnixStream, _: &unix::SocketAddr) -> Peer {
        connection.peer_cred().map_or(Peer::Unknown, |who| Peer::User(who.uid()))
    }

    fn caller(connection: &UnixStream) -> Caller {
        connection.peer_cred().map_or_else(|_| Caller::default(), |who| Caller::of(&who))
    }
}

impl Door for TcpListener {
    fn peer(_: &TcpStream, address: &SocketAddr) -> Peer {
        Peer::Host(network(address.ip()))
    }
}

/// The addresses that one host may have beside this one, by the first of them.
fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => {
            Ipv6Addr::from_bits(ip.to_bits() >> IPV6_PEER_BITS << IPV6_PEER_BITS).into()
        }
        ip => ip,
    }
}

/// A connection that is served, or told that it is not.
struct Entry {
    number: u64,
    peer: Peer,
    refused: bool,
    /// Since when it has waited for its client; nothing while it waits for the daemon.
    waits_since: Option<Instant>,
    /// Ends it; nothing until it has begun.
    task: Option<AbortHandle>,
}

#[derive(Default)]
struct Table {
    entries: Vec<Entry>,
    /// How many there were.
    count: u64,
}

impl Table {
    /// Takes a connection in, and ends others for it if need be. Returns its number, and whether it
    /// is only told that there is no room.
    fn admit(&mut self, peer: Peer, now: Instant) -> (u64, bool) {
        let of_peer = |entry: &Entry| entry.peer == peer;
        let refused =
            !(self.make_room(OF_PEER_MAX, of_peer) && self.make_room(CONNECTIONS_MAX, |_| true));
        if refused && self.entries.iter().filter(|entry| entry.refused).count() >= REFUSED_MAX {
            self.end(|entry| entry.refused);
        }
        self.count += 1;
        self.entries.push(Entry {
            number: self.count,
            peer,
            refused,
            waits_since: Some(now),
            task: None,
        });
        (self.count, refused)
    }

    /// Whether one more of these connections can be served.
    fn make_room(&mut self, most: usize, counts: impl Fn(&Entry) -> bool) -> bool {
        let served = |entry: &Entry| !entry.refused && counts(entry);
        self.entries.iter().filter(|entry| served(entry)).count() < most || self.end(served)
    }

    /// Ends the one of these connections that has waited longest for its client.
    fn end(&mut self, which: impl Fn(&Entry) -> bool) -> bool {
        let waiting = self.entries.iter().enumerate().filter(|(_, entry)| which(entry));
        let longest = waiting.filter_map(|(place, entry)| Some((entry.waits_since?, place))).min();
        let Some((_, place)) = longest else { return false };
        if let Some(task) = self.entries.swap_remove(place).task {
            task.abort();
        }
        true
    }

    fn get(&mut self, number: u64) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.number == number)
    }
}

type Connections = Arc<Mutex<Table>>;

fn lock(connections: &Connections) -> MutexGuard<'_, Table> {
    connections.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The place of a connection among the others, until it is dropped.
struct Held {
    connections: Connections,
    number: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        lock(&self.connections).entries.retain(|entry| entry.number != self.number);
    }
}

/// What a request knows of its connection.
#[derive(Clone)]
pub(super) struct Place(Arc<Held>);

impl Place {
    /// The request is complete: from now on its client waits for the daemon.
    pub(super) fn works(&self) {
        self.set(None);
    }

    fn waits(&self) {
        self.set(Some(Instant::now()));
    }

    fn set(&self, since: Option<Instant>) {
        if let Some(entry) = lock(&self.0.connections).get(self.0.number) {
            entry.waits_since = since;
        }
    }

    /// Returns when the client has let the daemon wait for too long.
    async fn given_up(&self) {
        loop {
            let since =
                lock(&self.0.connections).get(self.0.number).and_then(|entry| entry.waits_since);
            let left = since
                .map_or(ANSWER_TIME_MAX, |since| ANSWER_TIME_MAX.saturating_sub(since.elapsed()));
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }
}

/// What a client gets for which there is no room.
async fn no_room() -> Response {
    let error =
        "the daemon is busy with as many requests as it takes at once: try again later".to_owned();
    (StatusCode::SERVICE_UNAVAILABLE, [(header::CONNECTION, "close")], Json(ErrorBody { error }))
        .into_response()
}

/// Serves `router` until the future is dropped.
pub(super) async fn serve<D: Door>(mut door: D, router: Router) {
    let connections = Connections::default();
    let router = TowerToHyperService::new(router);
    let refusal = TowerToHyperService::new(Router::new().fallback(no_room));
    loop {
        let (connection, address) = door.accept().await;
        let peer = D::peer(&connection, &address);
        let caller = D::caller(&connection);
        let (number, refused) = lock(&connections).admit(peer, Instant::now());
        let place = Place(Arc::new(Held { connections: connections.clone(), number }));
        let router = if refused { refusal.clone() } else { router.clone() };
        let of_request = place.clone();
        let service = service_fn(move |mut request: Request<_>| {
            let place = of_request.clone();
            request.extensions_mut().insert(place.clone());
            request.extensions_mut().insert(caller.clone());
            let answer = router.call(request);
            async move {
                let answer = answer.await;
                place.waits();
                answer
            }
        });
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIME_MAX)
            .serve_connection(TokioIo::new(connection), service);
        let task = tokio::spawn(async move {
            tokio::select! {
                // What goes wrong on a connection is its client's.
                _ = served => {}
                () = place.given_up() => {}
            }
        });
        if let Some(entry) = lock(&connections).get(number) {
            entry.task = Some(task.abort_handle());
        }
        // Who has asked already is heard before others come in its place.
        tokio::task::yield_now().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peers(table: &Table, peer: Peer) -> usize {
        table.entries.iter().filter(|entry| entry.peer == peer && !entry.refused).count()
    }

    #[test]
    fn the_connection_that_has_waited_longest_makes_room() {
        let mut table = Table::default();
        let start = Instant::now();
        let (one, other) = (Peer::User(1), Peer::User(2));
        for number in 0..3 * CONNECTIONS_MAX as u64 {
            let (_, refused) = table.admit(one, start + Duration::from_millis(number));
            assert!(!refused);
        }
        assert_eq!(peers(&table, one), OF_PEER_MAX);
        let oldest = table.entries.iter().filter_map(|entry| entry.waits_since).min();
        let kept = 3 * CONNECTIONS_MAX - OF_PEER_MAX;
        assert_eq!(oldest, Some(start + Duration::from_millis(kept as u64)));
        // Further peers have what is left, and then the places of those who have waited longest.
        for number in 0..3 * OF_PEER_MAX as u64 {
            let peer = Peer::User(2 + number as u32 / OF_PEER_MAX as u32);
            assert!(!table.admit(peer, start + Duration::from_millis(1000 + number)).1);
        }
        assert_eq!(table.entries.len(), CONNECTIONS_MAX);
        assert_eq!([one, other].map(|peer| peers(&table, peer)), [0, 0]);
    }

    #[test]
    fn nobody_ends_what_waits_for_the_daemon() {
        let mut table = Table::default();
        let (start, busy, other) = (Instant::now(), Peer::User(1), Peer::User(2));
        for _ in 0..OF_PEER_MAX {
            let (number, refused) = table.admit(busy, start);
            assert!(!refused);
            table.get(number).expect("it is there").waits_since = None;
        }
        for _ in 0..2 * REFUSED_MAX {
            assert!(table.admit(busy, start).1, "it has all that one peer may have");
        }
        assert_eq!(peers(&table, busy), OF_PEER_MAX);
        assert_eq!(table.entries.len(), OF_PEER_MAX + REFUSED_MAX);
        assert!(!table.admit(other, start).1, "others are served");
    }

    #[test]
    fn a_host_is_one_peer_with_all_its_addresses() {
        let at = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(at("fd00::1"), at("fd00::2:3"));
        assert_ne!(at("fd00::1"), at("fd00:0:0:1::1"));
        assert_eq!(at("::ffff:10.0.0.1"), at("10.0.0.1"));
        assert_ne!(at("10.0.0.1"), at("10.0.0.2"));
    }
}
