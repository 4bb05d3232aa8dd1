//! Whether a cache has everything: where two held a volume's newest data and one of them is not
//! there, the other may lack what was never flushed (RFC 9). Somebody has to accept that, and is
//! told what is known of it.

use super::departure::with_words;
use super::turns::Turn;
use super::{Entry, Volumes, lock};
use crate::failure::one_line;
use crate::service::VolumeError;
use crate::service::peers::{Caller, PeerError, Stream, Welcomed, dial, me, record_of};
use crate::shard::ShardError;
use crate::units::{Size, time};
use std::sync::Arc;
use std::time::Duration;
use tidepool_backend::{BackendError, BackendUri, OpenOptions, Opened, Ownership, Progress};
use tidepool_engine::api::{BLOCK_BYTES, VolumeId};
use tidepool_replica::wire::Message;
use tidepool_replica::{Resume, Tail, resume};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

/// Longest pause between two words to the peer that gives records.
const BEAT_PAUSE: Duration = Duration::from_millis(50);

/// Why records do not come.
#[derive(Debug, thiserror::Error)]
enum FetchError {
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error(transparent)]
    Shard(#[from] ShardError),
}

/// A volume that is not served because its peer may have more than this cache.
#[derive(Default)]
pub(super) struct PeerFirst {
    /// The record that says so is of this generation.
    as_of: Option<u64>,
    /// With the next attempt the volume is served all the same, if the record is of this
    /// generation.
    accepted_as_of: Option<u64>,
}

impl PeerFirst {
    /// An attempt to open the volume's backend has ended like this.
    pub(super) fn ended<T>(&mut self, outcome: &Result<T, VolumeError>) {
        self.as_of = match outcome {
            Err(VolumeError::Alone {
                source: BackendError::PeerFirst { generation, .. }, ..
            }) => Some(*generation),
            _ => None,
        };
    }
}

impl Volumes {
    /// Opens the backend of a volume that is known. If another cache held a copy and this host was
    /// restarted since, that one is asked first, and this cache gets from it what it lacks. Then
    /// `options` say so.
    pub(super) async fn open_whole(
        &self,
        entry: &Entry,
        id: VolumeId,
        options: &mut OpenOptions,
    ) -> Result<(Opened, Turn), VolumeError> {
        // It is accepted for one attempt: later the peer may be there.
        let accepted = lock(&entry.facts).peer_first.accepted_as_of.take();
        let source =
            match self.open(entry, options.clone(), None).await {
                Err(VolumeError::Open {
                    source: source @ BackendError::PeerFirst { .. }, ..
                }) if !options.read_only => source,
                first => return first,
            };
        let own_sequence = options.sequence.unwrap_or(0);
        let mut own = own_sequence;
        options.whole_as_of = self.whole_as_of(entry, id, &mut own).await?.or(accepted);
        if own > own_sequence {
            (options.sequence, options.dirty) = (Some(own), true);
        }
        if options.whole_as_of.is_some() {
            return self.open(entry, options.clone(), None).await;
        }
        let kept = match source {
            BackendError::PeerFirst { device_failed: true, .. } => Kept::DeviceFailed,
            _ => Kept::All,
        };
        let cost = self.cost(&entry.backend, own, kept).await;
        Err(VolumeError::Alone { name: entry.name.clone(), source, cost })
    }

    /// Whether this cache's log is known to have everything although another one held a copy and
    /// this host was restarted since: then the generation of the record of which that is known.
    /// What it lacks comes from there, and `own` tells its newest record.
    async fn whole_as_of(
        &self,
        entry: &Entry,
        id: VolumeId,
        own: &mut u64,
    ) -> Result<Option<u64>, VolumeError> {
        // What is wrong with the record is said when the image is opened.
        let Ok(Some(found)) = self.ownership(&entry.backend).await else { return Ok(None) };
        let (me, record) = (me(self.cache_uuid), record_of(&found));
        let alone = resume(me, &record, *own, None);
        let (Some(holder), Resume::Unreachable) = (record.peer(), alone) else { return Ok(None) };
        let image = entry.backend.to_string();
        let caller = Caller { record: &record, host: &self.host, name: &entry.name, image: &image };
        let mut addresses = self.pairs.peers.iter().peekable();
        while let Some(address) = addresses.peek() {
            let Welcomed { mut stream, party, host, holds, .. } = match dial(address, &caller).await
            {
                Ok(welcomed) => welcomed,
                Err(error) => {
                    warn!("volume {}: peer {address}: {error}", entry.name);
                    addresses.next();
                    continue;
                }
            };
            let named = found.peer.as_ref().map_or("", |peer| &peer.host);
            if party.cache == holder.cache && host != named {
                let name = &entry.name;
                warn!(
                    "volume {name}: host {host} says that it holds the copy which its record says is on {named} (if that host was renamed, it needs its old name until this one has what it lacks)"
                );
            }
            if party.cache != holder.cache || host != named {
                addresses.next();
                continue;
            }
            let tail = holds.map(|holds| Tail {
                generation: holds.generation,
                logged: holds.logged,
                holder: party,
            });
            let whole = Ok(Some(record.generation));
            let name = entry.name.clone();
            match resume(me, &record, *own, tail) {
                Resume::Serve => {
                    info!("volume {name}: the copy on {host} has nothing that is not here");
                    return whole;
                }
                Resume::Behind { records } => {
                    let why = "the cache device here has failed".to_owned();
                    return Err(VolumeError::Behind { name, host, records, why });
                }
                Resume::Fetch { after, through } if self.lost_blocks(id).await > 0 => {
                    let why = "blocks are lost here that are good there".to_owned();
                    return Err(VolumeError::Behind { name, host, records: through - after, why });
                }
                Resume::Fetch { after, through } => {
                    let records = through - after;
                    info!(
                        "volume {name}: its newest records, {records} in all, are fetched from {host}"
                    );
                    match self.fetch(entry, id, &mut stream, own, through).await {
                        Ok(()) => return whole,
                        // It goes on where it has got to.
                        Err(why) if *own > after => info!("volume {name}: {}", one_line(&why)),
                        Err(why) => {
                            let why = one_line(&why);
                            return Err(VolumeError::Behind { name, host, records, why });
                        }
                    }
                }
                Resume::Unreachable | Resume::Taken => drop(addresses.next()),
            }
        }
        Ok(None)
    }

    /// Blocks that are known to be lost in this cache.
    async fn lost_blocks(&self, id: VolumeId) -> u64 {
        let status = self.shard.status().await.ok();
        let known =
            status.and_then(|status| status.volumes.into_iter().find(|v| v.status.id == id));
        known.map_or(0, |known| known.status.lost_blocks)
    }

    /// Logs the records behind `own`, up to `through`, that the peer at the other end of `stream`
    /// has. Those that are logged when it fails, of which `own` tells the newest, stay: they are
    /// the volume's.
    async fn fetch(
        &self,
        entry: &Entry,
        id: VolumeId,
        stream: &mut Stream,
        own: &mut u64,
        through: u64,
    ) -> Result<(), FetchError> {
        // It looks like a copy that was left here until it is served.
        self.has_not_left(&entry.name);
        self.shard.follow_on(id).await?;
        // The cache takes it for a copy until it is served.
        lock(&entry.facts).takeover.begin_own();
        stream.send(&Message::Fetch { after: *own, through }).await?;
        let (mut head, mut data) = (Vec::new(), Vec::new());
        // Whatever else is said meanwhile.
        let wait = stream.answer_wait();
        let (mut spoke, mut waits_until) = (Instant::now(), Instant::now() + wait);
        while *own < through {
            if spoke.elapsed() >= BEAT_PAUSE {
                stream.send(&Message::Beat { time_ns: 0 }).await?;
                spoke = Instant::now();
            }
            let received = timeout_at(waits_until, stream.receive_with(&mut head, &mut data)).await;
            let sequence = match received.map_err(|_| PeerError::Silent)?? {
                Message::Record { record, .. } => record.header().sequence.get(),
                Message::Beat { .. } | Message::Have(_) => continue,
                Message::Refused(why) => return Err(PeerError::Refused(why.to_owned()).into()),
                _ => return Err(PeerError::Unexpected.into()),
            };
            let mut bytes = vec![0; BLOCK_BYTES];
            bytes[..head.len()].copy_from_slice(&head);
            bytes.extend_from_slice(&data);
            let logged = self.shard.log_record(id, bytes, sequence == through);
            with_words(stream, BEAT_PAUSE, logged).await?;
            *own = sequence;
            waits_until = Instant::now() + wait;
        }
        info!("volume {}: it has everything", entry.name);
        Ok(())
    }

    /// A volume of this host's that is not served because its peer may have more, and cannot be
    /// asked.
    pub(super) fn waiting(&self, name: &str) -> Option<Arc<Entry>> {
        let entry = lock(&self.entries).get(name).cloned();
        entry.filter(|entry| lock(&entry.facts).peer_first.as_of.is_some())
    }

    /// Serves such a volume from this cache alone, if the loss is accepted; returns when it is
    /// served.
    pub(super) async fn serve_alone(
        &self,
        entry: &Entry,
        accept_loss: bool,
    ) -> Result<(), VolumeError> {
        let (asking, outcome) = oneshot::channel();
        {
            let mut facts = lock(&entry.facts);
            let Some(generation) = facts.peer_first.as_of else {
                return Err(VolumeError::Busy(entry.name.clone()));
            };
            if !accept_loss {
                let why = facts.error.clone().unwrap_or_default();
                return Err(VolumeError::NotInSync { name: entry.name.clone(), why });
            }
            (facts.peer_first.accepted_as_of, facts.asking) = (Some(generation), Some(asking));
        }
        info!("volume {}: the loss of what only its peer may have is accepted", entry.name);
        entry.try_again(outcome).await
    }

    /// Why the copy in this cache does not count, and what is known of what it lacks.
    pub(super) async fn not_in_sync(
        &self,
        name: &str,
        id: VolumeId,
        uri: &BackendUri,
        found: &Ownership,
    ) -> VolumeError {
        let name = name.to_owned();
        let Some(peer) = &found.peer else {
            let why = format!("its record says that {} alone has its newest data", found.host);
            return VolumeError::NotInSync { name, why };
        };
        let mut why = format!(
            "its record names {} as the holder of the other copy, on a boot that is over or with another cache",
            peer.host
        );
        if self.has_copy_of(found) && peer.host != self.host {
            why = format!(
                "its record names host {} as the holder of the other copy, and this is {} (a host that was renamed since needs its old name)",
                peer.host, self.host
            );
        }
        if self.has_copy_of(found) {
            let status = self.shard.status().await.ok();
            let known =
                status.and_then(|status| status.volumes.into_iter().find(|v| v.status.id == id));
            let kept = if peer.host == self.host { Kept::All } else { Kept::NamedElsewhere };
            let cost = self.cost(uri, known.map_or(0, |v| v.status.sequence), kept).await;
            why = format!(
                "{why}; `tidepool volume takeover {name} --accept-loss` takes what this cache has of it: {cost}"
            );
        }
        VolumeError::NotInSync { name, why }
    }

    /// What a cache whose newest record is `own_sequence` may lack, in one line.
    async fn cost(&self, uri: &BackendUri, own_sequence: u64, kept: Kept) -> String {
        let read = |uri: &BackendUri| tidepool_backend::progress(uri, None);
        match self.ask_image(uri, "reading how far the owner was", read).await {
            Ok(progress) => cost(progress, own_sequence, kept),
            Err(error) => format!("how much would be lost cannot be read ({error})"),
        }
    }
}

/// What is known of what a cache has kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    /// What it was told to.
    All,
    /// Its device has failed.
    DeviceFailed,
    /// The record names it as another host's: what was flushed may be with that host alone.
    NamedElsewhere,
}

fn cost(progress: Option<Progress>, own_sequence: u64, kept: Kept) -> String {
    // The image has nothing that was not on stable media in both caches.
    let behind = progress.is_some_and(|progress| own_sequence < progress.committed);
    let flushed = match kept {
        Kept::NamedElsewhere => {
            "what was flushed may be among it, since the copy that counts may be on that host"
        }
        Kept::All if !behind => {
            "nothing of it was flushed, if the cache device has kept what it was told to"
        }
        Kept::All | Kept::DeviceFailed => {
            "what was flushed may be among it, since the cache device has failed"
        }
    };
    let Some(Progress { sequence, time_unix_ms, bytes, silence_ms, .. }) = progress else {
        return format!(
            "how much would be lost is not known, since no figures stand beside the image; {flushed}"
        );
    };
    let (time, silence) = (time(time_unix_ms), silence_ms as f64 / 1e3);
    let then = format!(
        "the last {silence:.1} s of its owner's life, if that reached the image to its end"
    );
    match sequence.saturating_sub(own_sequence) {
        0 => format!(
            "this cache has all that the volume was at {time}; lost are at most {then}; {flushed}"
        ),
        records => {
            let bytes = Size(bytes).approximate();
            format!(
                "lost are its {records} newest records of {time}, {bytes} at most, and at most {then}; {flushed}"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_has_what_is_known_in_figures() {
        let progress = Progress {
            sequence: 815,
            committed: 810,
            time_unix_ms: 1_700_000_000_000,
            bytes: 5 << 20,
            silence_ms: 2_000,
        };
        let text = cost(Some(progress), 812, Kept::All);
        assert!(text.starts_with("lost are its 3 newest records of 2023-11-14T22:13:20"), "{text}");
        assert!(
            text.contains("5MiB at most") && text.contains("nothing of it was flushed, if"),
            "{text}"
        );
        let text = cost(Some(progress), 815, Kept::DeviceFailed);
        assert!(text.starts_with("this cache has all that the volume was at 2023"), "{text}");
        assert!(text.contains("the last 2.0 s") && text.contains("may be among it"), "{text}");
        assert!(cost(Some(progress), 809, Kept::All).contains("may be among it"));
        assert!(cost(None, 1, Kept::All).contains("not known"));
        for progress in [Some(progress), None] {
            let text = cost(progress, 815, Kept::NamedElsewhere);
            assert!(
                text.contains("may be among it") && !text.contains("nothing of it was flushed"),
                "{text}"
            );
        }
    }
}
