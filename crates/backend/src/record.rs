//! The ownership record: which cache may write to an image, and where the image's newest data is.
//!
//! `file:` and `nbd:` keep it as a file, `rbd:` as a RADOS object beside the image. All use the
//! same JSON document. The file is changed only by the process that holds the image's lock. The
//! object is changed by compare-and-set: only if it still has the version that was read.

use crate::file::{Counted, ImageId};
use crate::{BackendError, OpenOptions, Release, TakeOver, given_up};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt::{self, Display};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

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

/// Most fences that a record lists.
const FENCED_MAX: usize = 16;

/// Longest name of a snapshot that a record can hold, in bytes.
const ROLLBACK_BYTES_MAX: usize = 255;

/// Text of [`Ownership::superseded`] when the image goes on without its cache.
const CACHE_FAILED: &str = "the cache device had failed, and the image has been changed without it since";

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

/// The cache that holds the second copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Uuid of the cache device.
    pub cache_uuid: Uuid,
    /// Boot id of its host, see [`boot_id`]: data that was not on stable media is lost with the
    /// next boot.
    pub boot_id: String,
    /// Name of its host, for messages.
    pub host: String,
    /// The owner's cache device has failed: when it comes back, it may have less data than this
    /// copy.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only: bool,
}

/// Longest text about a peer in bytes.
const PEER_TEXT_BYTES_MAX: usize = 255;

impl Peer {
    /// Whether a record of the owner with this uuid can name this peer, and be read again.
    pub(crate) fn is_sound(&self, owner: Uuid) -> bool {
        let texts = [&self.boot_id, &self.host].into_iter();
        let mut foreign =
            texts.filter(|text| text.len() > PEER_TEXT_BYTES_MAX || text.contains(char::is_control));
        foreign.next().is_none() && !self.cache_uuid.is_nil() && self.cache_uuid != owner
    }
}

/// A client that is fenced for a long time, because nothing has proved that it is dead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fenced {
    /// Address of the RADOS client.
    pub address: String,
    /// Name of its host; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host: String,
    /// Boot id of its host, see [`boot_id`]; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// When its fence expires, in seconds since 1970.
    pub until_unix_s: u64,
}

impl Fenced {
    /// A fence that expires in `expire_s` seconds.
    pub(crate) fn new(address: String, (host, boot_id): (String, String), expire_s: u64) -> Fenced {
        Fenced { address, host, boot_id, until_unix_s: unix_s().saturating_add(expire_s) }
    }

    /// Whether its host is this one, by its name, and has been restarted since.
    pub(crate) fn is_of_former_boot(&self) -> bool {
        let now = boot_id();
        self.host == host_name() && ![&self.boot_id, &now].contains(&&String::new()) && self.boot_id != now
    }

    /// Whether it has not expired.
    fn stands(&self) -> bool {
        self.until_unix_s > unix_s()
    }
}

/// One line for messages.
impl Display for Fenced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days = self.until_unix_s.saturating_sub(unix_s()).div_ceil(86_400);
        let host = if self.host.is_empty() { "an unknown host" } else { &format!("host {}", self.host) };
        write!(f, "{} of {host} for {days} more days", self.address)
    }
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
    /// then `client` and `claims` are of that host, whose process may be alive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_from: Option<String>,
    /// Caches from which the image was taken over since it was clean. Until the owner has committed
    /// a group of its own, the redo is that of one of these caches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<Uuid>,
    /// `rbd:` only: address of the owner's RADOS client. The next owner fences this client.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// `rbd:` only: addresses of clients of this cache that were about to take the lock since the
    /// last open, oldest first. They are written before the lock is taken, so that a kill between
    /// lock and record leaves no lock of an unknown client.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<String>,
    /// `rbd:` only: version of the image's header object after the owner has lifted its guard to
    /// take the lock. As long as the header has this version, no other client has used that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifted: Option<u64>,
    /// `rbd:` only: clients that are fenced for a long time, in the order in which their fences
    /// expire.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fenced: Vec<Fenced>,
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
            client: None,
            claims: Vec::new(),
            lifted: None,
            fenced: Vec::new(),
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
        let goes_on =
            |before: &&Ownership| before.cache_uuid == cache_uuid && before.state != OwnerState::Clean;
        let former = before.filter(goes_on).map(|before| before.former.clone()).unwrap_or_default();
        let hides = before.is_some_and(|before| before.hides);
        let fenced = before.map(|before| before.fenced.clone()).unwrap_or_default();
        Ownership { base, former, hides, fenced, ..Ownership::new(generation, cache_uuid, OwnerState::Open) }
    }

    /// The record with which the peer takes the image over.
    pub(crate) fn taken_over(&self, what: &str, how: &TakeOver) -> Result<Ownership, BackendError> {
        let refused = |why: String| Err(BackendError::NotPeer { what: what.into(), why });
        if self.generation != how.generation {
            return refused(format!("it is of generation {}, not {}", self.generation, how.generation));
        }
        let cache_uuid = Uuid::from_bytes(how.cache_uuid);
        let Some(peer) = self.peer.as_ref().filter(|_| self.superseded.is_none()) else {
            return refused(format!(
                "only cache {} on host {} has its newest data",
                self.cache_uuid, self.host
            ));
        };
        if peer.cache_uuid != cache_uuid {
            return refused(format!("the other copy is in cache {} on host {}", peer.cache_uuid, peer.host));
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
            client: left.client,
            claims: left.claims,
            lifted: left.lifted,
            fenced: left.fenced,
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

    /// The record with these fences added. Fences that have expired are dropped, and if there is no
    /// room, those that expire first.
    pub(crate) fn with_fences(mut self, fences: &[Fenced]) -> Ownership {
        self.fenced.retain(Fenced::stands);
        for new in fences {
            match self.fenced.iter_mut().find(|known| known.address == new.address) {
                // Ceph does not prolong a fence that exists.
                Some(known) if known.host.is_empty() => {
                    (known.host, known.boot_id) = (new.host.clone(), new.boot_id.clone());
                }
                Some(_) => {}
                None => self.fenced.push(new.clone()),
            }
        }
        let surplus = self.fenced.len().saturating_sub(FENCED_MAX);
        self.fenced.sort_by_key(|fenced| fenced.until_unix_s);
        self.fenced.drain(..surplus);
        self
    }

    /// The record without the fences that are in `were` and not in `are`.
    pub(crate) fn without_fences(mut self, were: &[Fenced], are: &[Fenced]) -> Ownership {
        let has = |list: &[Fenced], one: &Fenced| list.iter().any(|fenced| fenced.address == one.address);
        self.fenced.retain(|fenced| !has(were, fenced) || has(are, fenced));
        self
    }

    /// The fences in its list that have not expired.
    pub(crate) fn standing_fences(&self) -> impl Iterator<Item = &Fenced> {
        self.fenced.iter().filter(|fenced| fenced.stands())
    }

    /// Whether the record has the generation and the cache of `owner`.
    pub(crate) fn is_of(&self, owner: &Ownership) -> bool {
        (self.generation, self.cache_uuid) == (owner.generation, owner.cache_uuid)
    }

    /// The client of its owner, and clients that were about to take the lock.
    pub(crate) fn clients(&self) -> impl Iterator<Item = &String> {
        self.client.iter().chain(&self.claims)
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
            fenced: self.fenced.clone(),
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
        (record.client, record.taken_at) = (None, None);
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
            BackendError::Newer { what, version, known } => {
                BackendError::Newer { what: format!("{what}: the ownership record"), version, known }
            }
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
        let names = [&record.client, &record.superseded, &record.taken_from, &record.rollback];
        let names = names.into_iter().flatten();
        let peer = record.peer.iter().flat_map(|peer| [&peer.boot_id, &peer.host]);
        let is_foreign = |text: &String| text.contains(char::is_control);
        record.fenced.truncate(FENCED_MAX);
        let fenced = record.fenced.iter().flat_map(|fenced| [&fenced.address, &fenced.host, &fenced.boot_id]);
        let image = record.image.iter().flat_map(ImageId::texts);
        // These texts are shown in messages and used as names.
        if names
            .chain(peer)
            .chain(image)
            .chain(fenced)
            .chain(&record.claims)
            .chain([&record.host, &record.boot_id])
            .any(is_foreign)
        {
            return bad("has control characters in its texts");
        }
        Ok(record)
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        let record = self.clone().versioned();
        let mut json = serde_json::to_vec_pretty(&record).expect("a record of plain fields is serialisable");
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
        self.state == OwnerState::Clean && (self.cache_uuid.is_nil() || !self.claims.is_empty())
    }

    /// Refuses a cache that may not have the image, or that may lack something of it: all that a
    /// record says against an open. The check of an image asks no less.
    pub(crate) fn check(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        self.check_elsewhere(what, options)?;
        self.check_owner(what, Uuid::from_bytes(options.cache_uuid))?;
        self.check_whole(what, options)?;
        self.check_known(what, options)
    }

    /// Refuses an image whose newest data is in another cache.
    pub(crate) fn check_owner(&self, what: &str, cache_uuid: Uuid) -> Result<(), BackendError> {
        if self.state == OwnerState::Clean || self.cache_uuid == cache_uuid {
            return Ok(());
        }
        Err(BackendError::Owned { what: what.into(), owner: self.refusal() })
    }

    /// Refuses an image that another cache had last, if `unless_elsewhere` is set.
    pub(crate) fn check_elsewhere(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        match options.unless_elsewhere && !self.is_by(options.cache_uuid) {
            true => Err(BackendError::Elsewhere { what: what.into(), host: self.host.clone() }),
            false => Ok(()),
        }
    }

    /// Refuses an image whose rollback was cut short, except to an open that rolls it back.
    pub(crate) fn check_rolled_back(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        match &self.rollback {
            Some(snapshot) if options.roll_back.is_none() => {
                Err(BackendError::HalfRolledBack { what: what.into(), snapshot: snapshot.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Refuses the owner's cache if it may lack data that the peer has: data that was only in the
    /// host's memory before a restart, or on a device that has failed.
    pub(crate) fn check_whole(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        let is_owner = self.cache_uuid.as_bytes() == &options.cache_uuid && self.state != OwnerState::Clean;
        let Some(peer) = self.peer.as_ref().filter(|_| is_owner) else { return Ok(()) };
        // A user who recovers the image without the cache has given up what is in the cache.
        let known = options.recover || options.whole_as_of == Some(self.generation);
        if known || is_this_boot(&self.boot_id) && !peer.only {
            return Ok(());
        }
        let (peer_host, generation) = (peer.host.clone(), self.generation);
        let device_failed = peer.only;
        Err(BackendError::PeerFirst { what: what.into(), peer_host, generation, device_failed })
    }

    /// Refuses the owner's cache if its device has an older generation on record than it once had.
    /// Then the device has lost that the volume was attached, or removed and added again, and also
    /// everything later. Also refuses an image whose data this cache has given up.
    pub(crate) fn check_known(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        given_up::check(what, self, options)?;
        let is_owner = self.cache_uuid.as_bytes() == &options.cache_uuid && self.state != OwnerState::Clean;
        let (Some(base), Some(known)) = (self.base, options.generation) else { return Ok(()) };
        // A volume that is only read has no generation, but a copy that was taken over has had one.
        let never = known == 0 && self.taken_from.is_none();
        if !is_owner || self.superseded.is_some() || never || known == base || known >= self.generation {
            return Ok(());
        }
        let why = format!(
            "it knows the image as of generation {known}, and has had it as generation {} since",
            if base == 0 { self.generation } else { base }
        );
        Err(BackendError::Behind { what: what.into(), why })
    }

    /// Where the newest data is, in one line.
    fn refusal(&self) -> String {
        let kind = match self.state {
            OwnerState::Open => "which serves it or was killed while it did",
            OwnerState::Dirty | OwnerState::Clean => "which was stopped with data not yet drained",
        };
        let or = self.peer.as_ref().map(|peer| format!(", or take it over on host {}", peer.host));
        format!(
            "its newest data is in cache {} on host {}, {kind} ({} ago); start tidepool there and remove the volume{}",
            self.cache_uuid,
            self.host,
            age(self.time_unix_s),
            or.unwrap_or_default(),
        )
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
pub(crate) fn parse<T: DeserializeOwned>(what: &str, bytes: &[u8], known: u32) -> Result<T, BackendError> {
    let bad = |why: String| BackendError::Record { what: what.into(), why };
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    // The error repeats parts of the document, which may contain anything.
    let unreadable = |e: serde_json::Error| {
        bad(format!("cannot be read ({}); see who wrote it before removing it", printable(&e.to_string())))
    };
    let Versioned { version } = serde_json::from_slice(bytes).map_err(unreadable)?;
    if version > known {
        return Err(BackendError::Newer { what: what.into(), version, known });
    }
    if version == 0 {
        return Err(bad("has version 0, which there never was; see who wrote it before removing it".into()));
    }
    serde_json::from_slice(bytes).map_err(unreadable)
}

/// What is known about writes of other clients since this cache had the image last.
#[derive(Debug, Clone)]
pub(crate) struct Continuity {
    /// No other client has written.
    pub(crate) proven: bool,
    /// Another client has written, or the image was given to other clients.
    pub(crate) overwritten: bool,
    /// The reason, for the log.
    pub(crate) reason: String,
}

impl Continuity {
    pub(crate) fn unproven(reason: impl Into<String>) -> Continuity {
        Continuity { proven: false, overwritten: false, reason: reason.into() }
    }

    pub(crate) fn proven(reason: impl Into<String>) -> Continuity {
        Continuity { proven: true, overwritten: false, reason: reason.into() }
    }

    /// Refuses an image if the cache has dirty data that must not be drained to it.
    pub(crate) fn check_dirty(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        if options.dirty && self.overwritten {
            return Err(BackendError::Overwritten { what: what.into(), why: self.reason.clone() });
        }
        Ok(())
    }

    /// The proof is valid only for content that the cache has brought to the record's generation.
    /// If the cache does not know a generation in which the image was released clean, the image had
    /// another use in between: whatever dirty data the cache holds is older.
    pub(crate) fn of_generation(self, record: Option<&Ownership>, options: &OpenOptions) -> Continuity {
        let later = |record: &&Ownership| {
            record.state == OwnerState::Clean
                && options.generation.is_some_and(|known| known < record.generation)
        };
        if let Some(record) = record.filter(later).filter(|_| !self.overwritten) {
            let reason =
                format!("the image was used and released since, as generation {}", record.generation);
            return Continuity::overwritten(reason);
        }
        let known_later =
            |(known, record): &(u64, &Ownership)| *known > record.generation && !self.overwritten;
        if let Some((known, record)) = options.generation.zip(record).filter(known_later) {
            let reason = format!(
                "the cache has had the image as generation {known}, and its record says {}: somebody has put back an older state",
                record.generation
            );
            return Continuity::overwritten(reason);
        }
        // After a takeover, the peer knows the generation before it.
        let is_of = |(known, record): (u64, &Ownership)| {
            known == record.generation || record.taken_from.is_some() && record.base == Some(known)
        };
        let known = options.generation.zip(record).is_none_or(is_of);
        if known || !self.proven {
            return self;
        }
        Continuity::unproven("an earlier attempt to open the image was cut short")
    }

    /// What the record alone says; `None` when the image has to be examined.
    pub(crate) fn of_record(record: Option<&Ownership>, cache_uuid: Uuid) -> Option<Continuity> {
        let Some(record) = record else {
            return Some(Continuity::overwritten("the image has no ownership record"));
        };
        if record.cache_uuid.is_nil() {
            return Some(Continuity::overwritten("what a cache held for it was given up"));
        }
        if record.cache_uuid != cache_uuid {
            let reason = format!("cache {} had the image last", record.cache_uuid);
            return Some(Continuity::overwritten(reason));
        }
        record.superseded.as_deref().map(Continuity::overwritten)
    }

    /// The consequence for the cached data, as a step of a plan.
    pub(crate) fn plan(&self) -> String {
        match (self.proven, self.overwritten) {
            (true, _) => format!("keep clean cached data: {}", self.reason),
            (false, true) => {
                format!("drop clean cached data, and refuse if any is dirty: {}", self.reason)
            }
            (false, false) => format!("drop clean cached data: {}", self.reason),
        }
    }

    pub(crate) fn overwritten(reason: impl Into<String>) -> Continuity {
        Continuity { proven: false, overwritten: true, reason: reason.into() }
    }
}

/// Name of this host, as it is written into records.
pub fn host_name() -> String {
    // A name may be any bytes, and a record with control characters would be refused when it is
    // read again.
    printable(&rustix::system::uname().nodename().to_string_lossy())
}

/// The text with every control character replaced, so that it stays on one line.
fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

/// The kernel's id of this boot of the host, as it is written into records; empty where there is
/// none.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

/// Whether the boot id of a record or peer is that of this boot. `false` where it is empty.
fn is_this_boot(id: &str) -> bool {
    !id.is_empty() && id == boot_id()
}

/// Seconds since 1970.
pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// How long ago `time_unix_s` was, for messages.
pub(crate) fn age(time_unix_s: u64) -> String {
    match unix_s().saturating_sub(time_unix_s) {
        s @ 0..=119 => format!("{s} s"),
        s @ 120..=7199 => format!("{} min", s / 60),
        s @ 7200..=172_799 => format!("{} h", s / 3600),
        s => format!("{} days", s / 86_400),
    }
}

#[cfg(test)]
mod tests;
