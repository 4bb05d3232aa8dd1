//! Keeps a peer connected to each volume that is owned here.

use super::dial::Caller;
use super::{PeerError, Route, Welcomed, dial};
use crate::shard::{Connected, ShardHandle, Wants};
use std::sync::Arc;
use std::time::Duration;
use tidepool_backend::{Ownership, Peer};
use tidepool_engine::api::VolumeId;
use tidepool_replica::{Copies, Party, Record};
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::{info, warn};
use uuid::Uuid;

/// Pause between two attempts to find a peer.
const PAUSE: Duration = Duration::from_secs(1);

/// What a volume is to the world, and where its second copy may be.
pub struct Replicated {
    /// Its number in the core.
    pub(in crate::service) id: VolumeId,
    /// Its name.
    pub(in crate::service) name: String,
    /// URI of its image.
    pub(in crate::service) image: String,
    /// Its ownership record, which names no peer.
    pub(in crate::service) record: Record,
    /// This host.
    pub(in crate::service) host: String,
    /// Peers, the best first.
    pub(in crate::service) peers: Arc<[Route]>,
}

impl Replicated {
    /// Has the core keep a second copy of the volume, as long as there is a peer. Returns when the
    /// volume is served no more; whether it is another host's now, and its backend is to be taken
    /// away.
    pub(in crate::service) async fn keep(self, shard: &ShardHandle, wanted: Arc<Notify>) -> bool {
        let mut said = Vec::new();
        loop {
            wanted.notified().await;
            loop {
                match shard.wants_peer(self.id).await {
                    Ok(Some(Wants::Peer)) if self.try_all(shard, &mut said).await => break,
                    Ok(Some(Wants::LettingGo)) => return true,
                    Ok(Some(_)) => sleep(PAUSE).await,
                    Ok(None) | Err(_) => return false,
                }
            }
            // One that is of no use is not asked again and again.
            sleep(PAUSE).await;
        }
    }

    async fn try_all(&self, shard: &ShardHandle, said: &mut Vec<String>) -> bool {
        let (mut failures, mut is_connected) = (Vec::new(), false);
        for route in self.peers.iter() {
            match self.try_one(shard, route).await {
                Ok(true) => {
                    info!("volume {}: connected to peer {route}", self.name);
                    is_connected = true;
                    break;
                }
                // It was of no use at this moment, which the reactor has said.
                Ok(false) => {}
                Err(error) => failures.push(format!("peer {route}: {error}")),
            }
        }
        // Also what is wrong with those that come before the one that is connected.
        if failures != *said {
            failures.iter().for_each(|failure| warn!("volume {}: {failure}", self.name));
            *said = failures;
        }
        is_connected
    }

    async fn try_one(&self, shard: &ShardHandle, route: &Route) -> Result<bool, PeerError> {
        let caller =
            Caller { record: &self.record, host: &self.host, name: &self.name, image: &self.image };
        let Welcomed { stream, party, host, room, .. } = dial(route, &caller).await?;
        // A host that says so is of no use: the next one is asked.
        let checked = route.hosts().check_cache(&host, party.cache, self.record.owner.cache);
        checked.map_err(PeerError::NotItsCache)?;
        let boot_id = Uuid::from_u128(party.boot).to_string();
        let peer = Peer { cache_uuid: Uuid::from_u128(party.cache), boot_id, host, only: false };
        let connected = Connected { socket: stream.into_socket()?, peer, party, room };
        Ok(shard.connect(self.id, connected).await.unwrap_or(false))
    }
}

/// This cache on this boot of its host.
pub(in crate::service) fn me(cache_uuid: [u8; 16]) -> Party {
    let boot = boot(&tidepool_backend::boot_id());
    // One that is not known is not the one of a record that does not know it either.
    Party { cache: Uuid::from_bytes(cache_uuid).as_u128(), boot: if boot == 0 { 1 } else { boot } }
}

/// A boot as the machines have it; 0 if it is not known.
fn boot(boot_id: &str) -> u128 {
    Uuid::parse_str(boot_id).map_or(0, |boot| boot.as_u128())
}

/// An ownership record as the machines have it.
pub(in crate::service) fn record_of(found: &Ownership) -> Record {
    let owner = Party { cache: found.cache_uuid.as_u128(), boot: boot(&found.boot_id) };
    let party = |peer: &Peer| Party { cache: peer.cache_uuid.as_u128(), boot: boot(&peer.boot_id) };
    let copies = match &found.peer {
        Some(peer) if peer.only => Copies::Peer(party(peer)),
        Some(peer) => Copies::Sync(party(peer)),
        None => Copies::Solo,
    };
    Record { generation: found.generation, owner, copies }
}
