//! The ownership record: which cache may write to an image, and where the image's newest data is.
//!
//! `file:` and `nbd:` keep it as a file, `rbd:` as a RADOS object beside the image. All use the
//! same JSON document. The file is changed only by the process that holds the image's lock. The
//! object is changed by compare-and-set: only if it still has the version that was read.

mod clients;
mod continuity;
mod host;
mod image;
#[cfg(test)]
pub(crate) mod tests;

use crate::api::{OpenOptions, Peer, Release, TakeOver};
use crate::error::BackendError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use uuid::Uuid;

pub(crate) use clients::CLAIMS_MAX;
pub use clients::{Clients, Fenced};
pub(crate) use continuity::Continuity;
use host::printable;
pub(crate) use host::{age, is_this_boot, unix_s};
pub use host::{boot_id, host_name};
pub(crate) use image::{Counted, ImageId, PARTITION_UUID, Sameness};

/// Newest version of an ownership record that this release reads and writes (docs/format.md,
/// Versions).
pub(crate) const VERSION: u32 = 3;
/// Version of a record that names a second copy, or says that it was taken over.
const VERSION_PAIRED: u32 = 2;
/// Version of every other record: every release understands it.
const VERSION_ALONE: u32 = 1;

/// Longest record in bytes; a longer one was not written by us.
pub(crate) const RECORD_BYTES_MAX: usize = 16 * 1024;
/// Highest generation that a record may have: the next owner's generation is one more.
const GENERATION_MAX: u64 = u64::MAX - 1;

/// Most former owners that a record lists.
const FORMER_MAX: usize = 8;

/// Longest name of a snapshot that a record can hold, in bytes.
const ROLLBACK_BYTES_MAX: usize = 255;

/// Text of [`Ownership::superseded`] when the image goes on without its cache.
const CACHE_FAILED: &str =
    "the cache device had failed, and the image has been changed without it since";

/// State in which the owner left the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OwnerState {
    /// The image holds everything; any client may take it.
    Clean,
    /// The owner was stopped and keeps dirty data; only its cache, or the peer in the record, may
    /// take the image.
    Dirty,
    /// The owner is serving the image, or was killed while it did.
    Open,
}

/// How many caches hold the dirty data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Copies {
    /// The owner alone.
    Solo,
    /// The owner and its peer.
    Sync,
}

/// State of the image when it was released or taken. If it is unchanged since a release, no other
/// client has written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageStamp {
    /// A file's attributes.
    File {
        /// Size in bytes.
        size_bytes: u64,
        /// Inode number.
        inode: u64,
        /// Modification time in nanoseconds since 1970.
        mtime_ns: i128,
    },
    /// RADOS version of an image's header object: taking the exclusive lock changes it.
    Header {
        /// The version of the object.
        version: u64,
    },
}

/// The ownership record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ownership {
    /// Version of this format.
    pub version: u32,
    /// Number of the ownership. Every open for writing, takeover and abandonment raises it by one.
    /// So does recording that the cache is no longer to be trusted: [`crate::Transfer::Disown`], or
    /// a clean release after a failure of the cache device.
    pub generation: u64,
    /// Generation that the cache knew of the image when it opened the image for this generation; 0
    /// for a cache that held nothing of the image. It is the only other generation that the cache
    /// may know later, namely after an open that was cut short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// Uuid of the cache device that owns the image.
    pub cache_uuid: Uuid,
    /// State in which the owner left the image.
    pub state: OwnerState,
    /// Name of the owner's host.
    pub host: String,
    /// Boot id of the owner's host, to distinguish a restarted host from a running one.
    #[serde(default)]
    pub boot_id: String,
    /// When the record was written, in seconds since 1970.
    pub time_unix_s: u64,
    /// How many caches hold the dirty data.
    pub copies: Copies,
    /// The cache that holds the second copy; present if and only if `copies` is [`Copies::Sync`].
    #[serde(default, deserialize_with = "peer", skip_serializing_if = "Option::is_none")]
    pub peer: Option<Peer>,
    /// Host from which a peer has taken the image over, until the peer has opened the image. Until
    /// then the owner and the claims in `clients` are of that host, whose process may be alive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_from: Option<String>,
    /// Caches from which the image was taken over since it was clean. Until the owner has committed
    /// a group of its own, the redo is that of one of these caches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<Uuid>,
    /// `rbd:` only: the RADOS clients that have or had to do with the image.
    #[serde(flatten)]
    pub clients: Clients,
    /// State of the image when it was released.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<ImageStamp>,
    /// `file:` only: the kernel's counters of a device at the release, where they tell whether
    /// anything has written since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) counted: Option<Counted>,
    /// `file:` only: state of the image when it was taken. A modification time before this one
    /// means that an older state was put back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) taken_at: Option<ImageStamp>,
    /// `file:` only: what distinguishes the image from others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<ImageId>,
    /// `rbd:` only: the snapshot to which the image is being rolled back. While it is set, parts of
    /// the image may be as before and others as in the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<String>,
    /// `rbd:` only: a rollback of the image was cut short and given up, so its object map may lack
    /// objects that exist.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) hides: bool,
    /// Why the owner's cached data is no longer the content of the volume: the image was changed
    /// without it. None of that data may be used any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub superseded: Option<String>,
}

impl Ownership {
    /// A record of this host with the present time.
    pub(crate) fn new(generation: u64, cache_uuid: Uuid, state: OwnerState) -> Ownership {
        Ownership {
            version: VERSION_ALONE,
            generation,
            base: None,
            cache_uuid,
            state,
            host: host_name(),
            boot_id: boot_id(),
            time_unix_s: unix_s(),
            copies: Copies::Solo,
            peer: None,
            taken_from: None,
            former: Vec::new(),
            clients: Clients::default(),
            stamp: None,
            counted: None,
            taken_at: None,
            image: None,
            rollback: None,
            hides: false,
            superseded: None,
        }
    }

    /// The record with which the cache of `options` takes an image; `before` is the image's record
    /// so far.
    pub(crate) fn taken(before: Option<&Ownership>, options: &OpenOptions) -> Ownership {
        let generation = before.map_or(1, |before| before.generation.saturating_add(1));
        let cache_uuid = Uuid::from_bytes(options.cache_uuid);
        let base = Some(options.generation.unwrap_or(0));
        let goes_on = |before: &&Ownership| {
            before.cache_uuid == cache_uuid && before.state != OwnerState::Clean
        };
        let former = before.filter(goes_on).map(|before| before.former.clone()).unwrap_or_default();
        let hides = before.is_some_and(|before| before.hides);
        let clients = before.map(|before| before.clients.kept_away()).unwrap_or_default();
        Ownership {
            base,
            former,
            hides,
            clients,
            ..Ownership::new(generation, cache_uuid, OwnerState::Open)
        }
    }

    /// The record with which the peer takes the image over.
    pub(crate) fn taken_over(&self, what: &str, how: &TakeOver) -> Result<Ownership, BackendError> {
        let refused = |why: String| Err(BackendError::NotPeer { what: what.into(), why });
        if self.generation != how.generation {
            return refused(format!(
                "it is of generation {}, not {}",
                self.generation, how.generation
            ));
        }
        let cache_uuid = Uuid::from_bytes(how.cache_uuid);
        let Some(peer) = self.peer.as_ref().filter(|_| self.superseded.is_none()) else {
            return refused(format!(
                "only cache {} on host {} has its newest data",
                self.cache_uuid, self.host
            ));
        };
        if peer.cache_uuid != cache_uuid {
            return refused(format!(
                "the other copy is in cache {} on host {}",
                peer.cache_uuid, peer.host
            ));
        }
        if !how.accept_loss && !is_this_boot(&peer.boot_id) {
            let host = &self.host;
            return refused(format!(
                "this host was restarted since, and what it had not flushed is gone; start tidepool on host {host}, or \
                 accept the loss"
            ));
        }
        let others = |former: &&Uuid| **former != cache_uuid && **former != self.cache_uuid;
        let mut former: Vec<Uuid> = self.former.iter().filter(others).copied().collect();
        former.push(self.cache_uuid);
        former.drain(..former.len().saturating_sub(FORMER_MAX));
        let generation = self.generation.saturating_add(1);
        // The clients of the former owner and the image's state are needed by the open that
        // follows.
        let left = self.clone();
        Ok(Ownership {
            base: Some(self.generation),
            taken_from: Some(self.host.clone()),
            former,
            clients: left.clients,
            stamp: left.stamp,
            image: left.image,
            hides: left.hides,
            ..Ownership::new(generation, cache_uuid, OwnerState::Open)
        }
        .versioned())
    }

    /// The record with `peer` as the holder of the second copy.
    pub(crate) fn with_peer(&self, peer: Option<Peer>) -> Ownership {
        let copies = if peer.is_some() { Copies::Sync } else { Copies::Solo };
        Ownership { copies, peer, ..self.renewed() }.versioned()
    }

    /// Refuses a peer that the record cannot name.
    pub(crate) fn check_peer(&self, what: &str, peer: Option<&Peer>) -> Result<(), BackendError> {
        let fits = |peer: &Peer| peer.is_sound(self.cache_uuid) && self.superseded.is_none();
        if peer.is_none_or(fits) {
            return Ok(());
        }
        let invalid = std::io::Error::from_raw_os_error(libc::EINVAL);
        Err(BackendError::io(what, "name that peer in the ownership record", invalid))
    }

    /// Whether the record has the generation and the cache of `owner`.
    pub(crate) fn is_of(&self, owner: &Ownership) -> bool {
        (self.generation, self.cache_uuid) == (owner.generation, owner.cache_uuid)
    }

    /// Sets the version that is needed for what the record says: an older release then refuses a
    /// record with fields that it must not ignore.
    fn versioned(mut self) -> Ownership {
        self.version = match () {
            () if self.rollback.is_some() => VERSION,
            () if self.peer.is_some() || self.taken_from.is_some() => VERSION_PAIRED,
            () => VERSION_ALONE,
        };
        self
    }

    /// Whether a redo that this cache has written belongs to the record's owner.
    pub(crate) fn owns_redo_of(&self, cache_uuid: Uuid) -> bool {
        self.cache_uuid == cache_uuid || self.former.contains(&cache_uuid)
    }

    /// The record of an image whose owner's data is given up. The generation goes up, so that the
    /// former owner is not the owner any more if it comes back.
    pub(crate) fn abandoned(&self) -> Ownership {
        let generation = self.generation.saturating_add(1);
        Ownership {
            image: self.image.clone(),
            hides: self.hides || self.rollback.is_some(),
            clients: self.clients.kept_away(),
            ..Ownership::new(generation, Uuid::nil(), OwnerState::Clean)
        }
    }

    /// The record of an image that is about to be changed without its owner's cache. The generation
    /// goes up, so that the ownership which the cache knows is outdated.
    pub(crate) fn disowned(&self) -> Ownership {
        let generation = self.generation.saturating_add(1);
        let superseded = Some(CACHE_FAILED.to_owned());
        Ownership { generation, superseded, ..self.with_peer(None) }
    }

    /// The record of an image that is about to be rolled back to a snapshot: nothing that any cache
    /// holds of the image is valid from now on.
    pub(crate) fn rolling_back(self, snapshot: &str) -> Ownership {
        let superseded = Some(format!("the image was being rolled back to snapshot {snapshot}"));
        Ownership { rollback: Some(snapshot.to_owned()), superseded, ..self }.versioned()
    }

    /// The record after the rollback has ended.
    pub(crate) fn rolled_back(&self) -> Ownership {
        Ownership { rollback: None, superseded: None, hides: false, ..self.renewed() }.versioned()
    }

    /// Whether a record can hold this snapshot name.
    pub(crate) fn can_name(snapshot: &str) -> bool {
        snapshot.len() <= ROLLBACK_BYTES_MAX && !snapshot.contains(char::is_control)
    }

    /// The record that a release leaves. `stamp` is the state of the image that proves later that
    /// no other client has written.
    pub(crate) fn released(&self, how: Release, stamp: Option<ImageStamp>) -> Ownership {
        let mut record = self.renewed();
        if how.clean {
            record = record.with_peer(None);
            record.former.clear();
        }
        record.state = if how.clean { OwnerState::Clean } else { OwnerState::Dirty };
        (record.clients.owner, record.taken_at) = (None, None);
        if how.clean && how.cache_failed && record.superseded.is_none() {
            record = record.disowned();
        }
        record.stamp = stamp.filter(|_| record.superseded.is_none());
        record
    }

    /// The record with the present time.
    pub(crate) fn renewed(&self) -> Ownership {
        Ownership { time_unix_s: unix_s(), ..self.clone() }
    }

    /// Reads a record; `what` names the record in errors.
    pub(crate) fn from_json(what: &str, bytes: &[u8]) -> Result<Ownership, BackendError> {
        let mut record: Ownership = parse(what, bytes, VERSION).map_err(|error| match error {
            BackendError::Newer { what, version, known } => BackendError::Newer {
                what: format!("{what}: the ownership record"),
                version,
                known,
            },
            other => other,
        })?;
        let bad = |why: &str| {
            let why = format!("{why}; see who wrote it before removing it");
            Err(BackendError::Record { what: what.into(), why })
        };
        if record.version == VERSION_ALONE {
            // No release has written a second copy into a record of version 1.
            (record.copies, record.peer) = (Copies::Solo, None);
        }
        // Every owner's generation is one more than that of the owner before.
        if record.generation > GENERATION_MAX {
            return bad("has a generation that no cache has come to");
        }
        if (record.copies == Copies::Sync) != record.peer.is_some() {
            return bad("does not say who holds the other copy");
        }
        let names = [&record.superseded, &record.taken_from, &record.rollback];
        let names = names.into_iter().flatten();
        let peer = record.peer.iter().flat_map(|peer| [&peer.boot_id, &peer.host]);
        let is_foreign = |text: &String| text.contains(char::is_control);
        record.clients.truncate();
        let image = record.image.iter().flat_map(ImageId::texts);
        // These texts are shown in messages and used as names.
        if names
            .chain(peer)
            .chain(image)
            .chain(record.clients.texts())
            .chain([&record.host, &record.boot_id])
            .any(is_foreign)
        {
            return bad("has control characters in its texts");
        }
        Ok(record)
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        let record = self.clone().versioned();
        let mut json =
            serde_json::to_vec_pretty(&record).expect("a record of plain fields is serialisable");
        json.push(b'\n');
        json
    }

    /// Whether the record is this cache's.
    pub(crate) fn is_by(&self, cache_uuid: [u8; 16]) -> bool {
        self.cache_uuid == Uuid::from_bytes(cache_uuid)
    }

    /// Whether the record was written on this host, and the host has not been restarted since.
    pub(crate) fn is_of_this_boot(&self) -> bool {
        self.host == host_name() && self.boot_id == boot_id()
    }

    /// Whether a guard on the image was left by a kill: the image holds everything, and the record
    /// names no cache or has claims.
    pub(crate) fn left_guard(&self) -> bool {
        self.state == OwnerState::Clean
            && (self.cache_uuid.is_nil() || !self.clients.claims.is_empty())
    }
}

/// Reads a peer. A name in its place, which version 1 had room for, is ignored.
fn peer<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Peer>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Peer(Peer),
        #[expect(dead_code, reason = "it is only read")]
        Name(String),
    }
    Ok(match Option::deserialize(deserializer)? {
        Some(Written::Peer(peer)) => Some(peer),
        Some(Written::Name(_)) | None => None,
    })
}

/// Reads one of our JSON documents: a record, a header or note of a redo, or a note of data that
/// was given up. `what` names it in errors; `known` is the newest version of it that can be read.
pub(crate) fn parse<T: DeserializeOwned>(
    what: &str,
    bytes: &[u8],
    known: u32,
) -> Result<T, BackendError> {
    let bad = |why: String| BackendError::Record { what: what.into(), why };
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    // The error repeats parts of the document, which may contain anything.
    let unreadable = |e: serde_json::Error| {
        bad(format!(
            "cannot be read ({}); see who wrote it before removing it",
            printable(&e.to_string())
        ))
    };
    let Versioned { version } = serde_json::from_slice(bytes).map_err(unreadable)?;
    if version > known {
        return Err(BackendError::Newer { what: what.into(), version, known });
    }
    if version == 0 {
        return Err(bad(
            "has version 0, which there never was; see who wrote it before removing it".into(),
        ));
    }
    serde_json::from_slice(bytes).map_err(unreadable)
}
