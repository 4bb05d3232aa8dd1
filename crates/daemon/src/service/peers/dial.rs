//! An owner introduces itself to a peer.

use super::{PeerError, Route, Stream, Welcomed};
use std::time::Duration;
use tidepool_replica::wire::{Call, Message, one_line};
use tidepool_replica::{Party, Record};
use tokio::time::timeout;

/// How long a connection may take to come about.
const CONNECT_WAIT_MAX: Duration = Duration::from_secs(2);
/// How long a peer may take to say welcome: it reads the ownership record first.
const WELCOME_WAIT_MAX: Duration = Duration::from_secs(10);

/// How long a peer may take to serve a volume that is handed over to it.
const TAKEN_WAIT_MAX: Duration = Duration::from_secs(30);

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
    /// Sends the first message.
    async fn say(&self, stream: &mut Stream, hands_over: bool) -> Result<(), PeerError> {
        let Party { cache, boot } = self.record.owner;
        let (host, image) = (one_line(self.host), one_line(self.image));
        let generation = self.record.generation;
        let call = Call { cache, boot, generation, host: &host, name: self.name, image: &image };
        let message = if hands_over { Message::HandOver(call) } else { Message::Hello(call) };
        stream.send(&message).await
    }
}

async fn connect(route: &Route) -> Result<Stream, PeerError> {
    timeout(CONNECT_WAIT_MAX, route.connect()).await.map_err(|_| PeerError::Silent)?
}

/// Connects to a peer and asks it to take over a volume that this host has let go of. Returns when it serves it.
pub(in crate::service) async fn hand_over(route: &Route, caller: &Caller<'_>) -> Result<(), PeerError> {
    let mut stream = connect(route).await?;
    let asked = timeout(TAKEN_WAIT_MAX, async {
        stream.greet().await?;
        caller.say(&mut stream, true).await?;
        let mut head = Vec::new();
        match stream.receive(&mut head).await? {
            Message::Taken { .. } => Ok(()),
            Message::Refused(why) => Err(PeerError::Refused(why.to_owned())),
            _ => Err(PeerError::Unexpected),
        }
    });
    asked.await.map_err(|_| PeerError::Silent)?
}

/// Connects to a peer and says hello.
pub(in crate::service) async fn dial(route: &Route, caller: &Caller<'_>) -> Result<Welcomed, PeerError> {
    let mut stream = connect(route).await?;
    let introduced = timeout(WELCOME_WAIT_MAX, introduce(&mut stream, caller)).await;
    let (party, host, room, holds) = introduced.map_err(|_| PeerError::Silent)??;
    Ok(Welcomed { stream, party, host, room, holds })
}

type Introduced = (Party, String, tidepool_engine::api::Room, Option<tidepool_replica::wire::Holds>);

async fn introduce(stream: &mut Stream, caller: &Caller<'_>) -> Result<Introduced, PeerError> {
    stream.greet().await?;
    caller.say(stream, false).await?;
    let mut head = Vec::new();
    match stream.receive(&mut head).await? {
        Message::Welcome { cache, boot, host, room, holds } => {
            Ok((Party { cache, boot }, host.to_owned(), room, holds))
        }
        Message::Refused(why) => Err(PeerError::Refused(why.to_owned())),
        _ => Err(PeerError::Unexpected),
    }
}
