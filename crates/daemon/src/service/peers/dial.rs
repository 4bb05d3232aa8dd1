//! An owner introduces itself to a peer.

use super::identity::Role;
use super::{PeerError, Route, Stream, Welcomed};
use crate::shard::Counterpart;
use crate::units;
use crate::volume::Mode;
use std::time::Duration;
use tidepool_engine::api::{Nanos, Room};
use tidepool_replica::wire::{Call, Message, Offer, one_line};
use tidepool_replica::{Party, Record};
use tokio::time::timeout;

/// Who calls, and about what.
pub(in crate::service) struct Caller<'a> {
    /// The ownership record names this one as owner.
    pub(in crate::service) record: &'a Record,
    /// Name of this host.
    pub(in crate::service) host: &'a str,
    /// The volume's.
    pub(in crate::service) name: &'a str,
    /// URI of its image.
    pub(in crate::service) image: &'a str,
}

impl Caller<'_> {
    /// What stands in a message, in one line each: the host, the image.
    fn lines(&self) -> [String; 2] {
        [one_line(self.host), one_line(self.image)]
    }

    fn call<'c>(&'c self, [host, image]: &'c [String; 2]) -> Call<'c> {
        let Party { cache, boot } = self.record.owner;
        Call { cache, boot, generation: self.record.generation, host, name: self.name, image }
    }
}

/// Connects to a peer, which has to be host `to`, and asks it to take over a volume that this host
/// has let go of. Returns when it serves it.
pub(in crate::service) async fn hand_over(
    route: &Route,
    caller: &Caller<'_>,
    to: &str,
) -> Result<(), PeerError> {
    let mut stream = route.connect().await?;
    stream.check_found(to, route.hosts(), Role::TakesOver)?;
    let asked = timeout(Duration::from_nanos(route.limits().taken_ns), async {
        stream.greet().await?;
        stream.send(&Message::HandOver(caller.call(&caller.lines()))).await?;
        let mut head = Vec::new();
        match stream.receive(&mut head).await? {
            Message::Taken { .. } => Ok(()),
            Message::Refused(why) => Err(PeerError::Refused(why.to_owned())),
            _ => Err(PeerError::Unexpected),
        }
    });
    asked.await.map_err(|_| PeerError::Silent)?
}

/// Asks the owner of a copy whether it needs what host `me` holds of the volume; `None` if it is
/// not behind this route.
pub(in crate::service) async fn is_needed(
    route: &Route,
    of: &Counterpart,
    (me, name, image): (&str, &str, &str),
) -> Result<Option<bool>, PeerError> {
    let mut stream = route.connect().await?;
    match stream.check_found(&of.host, route.hosts(), Role::SendsCopies) {
        Err(PeerError::OtherHost { .. }) => return Ok(None),
        checked => checked?,
    }
    let asked = timeout(Duration::from_nanos(route.limits().welcome_ns), async {
        stream.greet().await?;
        let (host, image) = (one_line(me), one_line(image));
        stream.send(&Message::Needs { host: &host, name, image: &image }).await?;
        let mut head = Vec::new();
        match stream.receive(&mut head).await? {
            // The host has another daemon, or its cache was made anew: its answer is not about this
            // copy.
            Message::Needed { cache, .. } if cache != of.cache => Ok(None),
            Message::Needed { needed, .. } => Ok(Some(needed)),
            Message::Refused(why) => Err(PeerError::Refused(why.to_owned())),
            _ => Err(PeerError::Unexpected),
        }
    });
    asked.await.map_err(|_| PeerError::Silent)?
}

/// A volume as the host that its clients move to has to know it.
#[derive(Debug, Clone)]
pub(in crate::service) struct Leaving {
    /// The host.
    pub(in crate::service) to: String,
    /// Bytes.
    pub(in crate::service) size_bytes: u64,
    pub(in crate::service) mode: Mode,
    /// It is drained in no order.
    pub(in crate::service) unordered: bool,
    pub(in crate::service) accept_loss: Option<units::Duration>,
    pub(in crate::service) dirty_bytes_max: u64,
}

impl Leaving {
    /// As the other host has said it.
    ///
    /// # Errors
    /// It cannot be.
    pub(super) fn from_offer(offer: &Offer<'_>) -> Result<Leaving, PeerError> {
        Ok(Leaving {
            to: offer.to.to_owned(),
            size_bytes: offer.size_bytes,
            mode: offer.mode.parse().map_err(|_| PeerError::Unexpected)?,
            unordered: offer.unordered,
            accept_loss: offer.accept_loss_ms.map(units::Duration::from_millis),
            dirty_bytes_max: offer.dirty_bytes_max,
        })
    }
}

/// Connects to another host and has it let the clients of a volume in. Returns the connection for
/// what they ask, and the uuid of the cache there.
pub(in crate::service) async fn offer(
    route: &Route,
    caller: &Caller<'_>,
    leaving: &Leaving,
) -> Result<(Stream, u128), PeerError> {
    let mut stream = route.connect().await?;
    stream.check_found(&leaving.to, route.hosts(), Role::TakesOver)?;
    let Leaving { to, size_bytes, mode, unordered, accept_loss, dirty_bytes_max } = leaving;
    let (lines, to, mode) = (caller.lines(), one_line(to), mode.to_string());
    let message = Message::Offer(Offer {
        call: caller.call(&lines),
        to: &to,
        size_bytes: *size_bytes,
        mode: &mode,
        unordered: *unordered,
        accept_loss_ms: accept_loss.map(|loss| loss.as_millis()),
        dirty_bytes_max: *dirty_bytes_max,
    });
    let asked = timeout(Duration::from_nanos(route.limits().welcome_ns), async {
        stream.greet().await?;
        stream.send(&message).await?;
        let mut head = Vec::new();
        match stream.receive(&mut head).await? {
            Message::Expecting { cache } => Ok(cache),
            Message::Refused(why) => Err(PeerError::Refused(why.to_owned())),
            _ => Err(PeerError::Unexpected),
        }
    });
    let cache = asked.await.map_err(|_| PeerError::Silent)??;
    Ok((stream, cache))
}

/// Connects to a peer and says hello.
pub(in crate::service) async fn dial(
    route: &Route,
    caller: &Caller<'_>,
) -> Result<Welcomed, PeerError> {
    let mut stream = route.connect().await?;
    // It is told which image that is, and how this host reaches it.
    stream.check_any(route.hosts(), Role::HoldsCopies)?;
    let introduced = timeout(
        Duration::from_nanos(route.limits().welcome_ns),
        introduce(&mut stream, caller, route.limits().lease_ns),
    )
    .await;
    let (party, host, room, holds) = introduced.map_err(|_| PeerError::Silent)??;
    stream.check(&host, route.hosts(), Role::HoldsCopies)?;
    Ok(Welcomed { stream, party, host, room, holds })
}

type Introduced = (Party, String, Room, Option<tidepool_replica::wire::Holds>);

async fn introduce(
    stream: &mut Stream,
    caller: &Caller<'_>,
    lease_ns: Nanos,
) -> Result<Introduced, PeerError> {
    stream.greet().await?;
    stream.send(&Message::Hello { call: caller.call(&caller.lines()), lease_ns }).await?;
    let mut head = Vec::new();
    match stream.receive(&mut head).await? {
        Message::Welcome { cache, boot, host, room, holds } => {
            Ok((Party { cache, boot }, host.to_owned(), room, holds))
        }
        Message::Refused(why) => Err(PeerError::Refused(why.to_owned())),
        _ => Err(PeerError::Unexpected),
    }
}
