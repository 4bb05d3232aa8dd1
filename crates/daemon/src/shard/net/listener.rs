//! Listening sockets and the connections that they bring.

use crate::door::peer_of;
use crate::shard::api::ShardError;
use crate::shard::core::Core;
use crate::shard::limits::{ACCEPT_PAUSE_NS, HANDSHAKE_NS_MIN, LISTENERS_MAX};
use crate::shard::net::connection::Connection;
use crate::shard::net::places::{Full, Place};
use crate::shard::reactor::{Reactor, Source, user};
use rustix::fs::OFlags;
use rustix::net::{SocketAddrAny, sockopt};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tidepool_engine::api::Nanos;

/// Silence after which a TCP client is asked whether it is still there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);

pub(in crate::shard) struct Listener {
    fd: OwnedFd,
    /// The only export that it offers; all if none.
    only: Option<Arc<str>>,
    /// The system had no resources for a connection: nothing is accepted until then.
    pub(in crate::shard) paused_until: Option<Nanos>,
}

impl<C: Core> Reactor<C> {
    /// Begins to accept on a socket.
    pub(in crate::shard) fn listen(
        &mut self,
        fd: OwnedFd,
        export: Option<String>,
    ) -> Result<(), ShardError> {
        // io_uring waits by itself; with O_NONBLOCK it would not.
        let flags = rustix::fs::fcntl_getfl(&fd).map_err(system("look at the listening socket"))?;
        rustix::fs::fcntl_setfl(&fd, flags - OFlags::NONBLOCK)
            .map_err(system("set up the listening socket"))?;
        let listener = Listener { fd, only: export.map(Arc::from), paused_until: None };
        let limit = ShardError::Limit { what: "listening socket", limit: LISTENERS_MAX };
        let slot = self.listeners.insert(listener).ok_or(limit)?;
        self.accept(slot);
        Ok(())
    }

    fn accept(&mut self, slot: u32) {
        if let Some(listener) = self.listeners.get(slot) {
            self.ring.accept(user(Source::Accept, slot), listener.fd.as_fd());
        }
    }

    /// A connection has come, or accepting has failed.
    pub(in crate::shard) fn accepted(&mut self, slot: u32, result: i32) {
        if result >= 0 {
            // SAFETY: the kernel has just made this descriptor for us and nobody else knows it.
            let fd = unsafe { OwnedFd::from_raw_fd(result) };
            if self.stopping.is_none() {
                self.connect(slot, fd);
            }
        }
        if self.stopping.is_some() || result == -libc::ECANCELED {
            self.listeners.remove(slot);
            return;
        }
        match -result {
            ..=0 | libc::ECONNABORTED | libc::EINTR => self.accept(slot),
            errno => {
                let error = std::io::Error::from_raw_os_error(errno);
                tracing::warn!("cannot accept a connection: {error}; trying again shortly");
                let until = self.shared.now + ACCEPT_PAUSE_NS;
                if let Some(listener) = self.listeners.get_mut(slot) {
                    listener.paused_until = Some(until);
                }
                self.alarm_at(until);
            }
        }
    }

    fn connect(&mut self, listener: u32, fd: OwnedFd) {
        let only = self.listeners.get(listener).and_then(|l| l.only.clone());
        self.admit(fd, only);
    }

    /// Takes a client in, of one volume or of all, if it has a place.
    pub(in crate::shard) fn admit(&mut self, fd: OwnedFd, only: Option<Arc<str>>) {
        let peer = introduce(&fd);
        let place = match &only {
            Some(volume) => self.shared.places.take(volume, true),
            None => self.shared.places.take_handshake(),
        };
        let place = place.or_else(|full| self.place_of_another(full, only.as_deref()));
        let mut place = match place {
            Ok(place) => place,
            Err(full) => return self.turn_away(&peer, full),
        };
        // Those that are about to end may still be in the table.
        if self.connections.is_full() {
            self.shared.places.give(&mut place);
            return self.turn_away(&peer, Full::All);
        }
        self.shared.count.accepted += 1;
        // The slot that an insertion takes is known only afterwards.
        let connection = Box::new(Connection::new(fd, peer, only, place, self.shared.now));
        let deadline = connection.handshake_deadline;
        let slot = self.connections.insert(connection).expect("it is not full");
        self.connections.get_mut(slot).expect("just inserted").slot = slot;
        deadline.into_iter().for_each(|at| self.alarm_at(at));
        self.list(slot);
    }

    /// Ends the connection that has been shaking hands for longest, if that is long, and takes its
    /// place: clients that do nothing keep nobody out. It is one over the volume's own sockets, or
    /// over those for all volumes.
    fn place_of_another(&mut self, full: Full, only: Option<&str>) -> Result<Place, Full> {
        let is_rival = |place: &Place| match only {
            Some(volume) => place.is_own() && place.is_of(volume),
            None => *place == Place::Handshake,
        };
        let shakes =
            self.connections.iter().filter(|(_, c)| is_rival(&c.place) && c.has_said_too_little());
        let (slot, since) =
            shakes.map(|(slot, c)| (slot, c.since)).min_by_key(|(_, since)| *since).ok_or(full)?;
        if self.shared.now < since + HANDSHAKE_NS_MIN {
            return Err(full);
        }
        let idle = self.connections.get_mut(slot).ok_or(full)?;
        tracing::warn!(peer = %idle.peer, "closing a connection that is still in its handshake: {full}, and another client waits");
        idle.break_off();
        let place = std::mem::take(&mut idle.place);
        self.shared.count.turned_away += 1;
        self.list(slot);
        Ok(place)
    }

    pub(in crate::shard) fn turn_away(&mut self, peer: &str, full: Full) {
        self.shared.count.turned_away += 1;
        tracing::warn!(%peer, "turning a client away: {full}");
    }

    /// Goes on with listeners whose pause is over.
    pub(in crate::shard) fn resume_listeners(&mut self) {
        let now = self.shared.now;
        for slot in 0..LISTENERS_MAX as u32 {
            let Some(listener) = self.listeners.get_mut(slot) else { continue };
            match listener.paused_until {
                Some(until) if until <= now => {
                    listener.paused_until = None;
                    self.accept(slot);
                }
                Some(until) => self.alarm_at(until),
                None => {}
            }
        }
    }

    /// Accepts no more.
    pub(in crate::shard) fn stop_listening(&mut self) {
        for slot in 0..LISTENERS_MAX as u32 {
            match self.listeners.get(slot) {
                Some(listener) if listener.paused_until.is_some() => {
                    self.listeners.remove(slot);
                }
                Some(_) => self.ring.cancel(user(Source::Cancel, 0), user(Source::Accept, slot)),
                None => {}
            }
        }
    }
}

fn system(what: &'static str) -> impl Fn(rustix::io::Errno) -> ShardError {
    move |error| ShardError::System { what, source: error.into() }
}

/// Sets a connection up and says who is at the other end, for the log.
fn introduce(fd: &OwnedFd) -> String {
    let peer = rustix::net::getpeername(fd).ok().flatten();
    match peer.map(|p: SocketAddrAny| std::net::SocketAddr::try_from(p)) {
        Some(Ok(address)) => {
            // What fails here costs speed or delays the notice of a dead peer, no more.
            let _ = sockopt::set_tcp_nodelay(fd, true);
            let _ = sockopt::set_socket_keepalive(fd, true);
            let _ = sockopt::set_tcp_keepidle(fd, KEEPALIVE_IDLE);
            address.to_string()
        }
        _ => peer_of(fd.as_fd()).map_or_else(|_| "a local client".into(), |peer| peer.to_string()),
    }
}
