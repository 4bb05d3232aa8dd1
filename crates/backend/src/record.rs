//! The ownership record: who may write to an image, and where its newest data is.
//!
//! `file:` keeps it as a file beside the image, `rbd:` as a RADOS object beside the image. Both are the
//! same JSON document, changed only by the process that holds the image's lock, and only from the exact
//! version that was read.

use crate::file::{Counted, ImageId};
use crate::{BackendError, OpenOptions, Release, TakeOver, given_up};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt::{self, Display};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// Newest version of an ownership record that this release reads and writes (docs/format.md, Versions).
pub(crate) const VERSION: u32 = 3;
/// Version of a record that names a second copy, or says that it was taken over.
const VERSION_PAIRED: u32 = 2;
/// Version of any other record that is not of version 3: every release understands it.
const VERSION_ALONE: u32 = 1;

/// Longest record in bytes; anything longer is not ours.
pub(crate) const RECORD_BYTES_MAX: usize = 16 * 1024;
/// Highest generation that a record may have: the next owner's is one more.
const GENERATION_MAX: u64 = u64::MAX - 1;

/// Former owners that are remembered.
const FORMER_MAX: usize = 8;

/// Fences that are remembered.
const FENCED_MAX: usize = 16;

/// Longest name of a snapshot that can be written down, in bytes.
const ROLLBACK_BYTES_MAX: usize = 255;

/// What is written down when the image goes on without its cache.
const CACHE_FAILED: &str = "the cache device had failed, and the image has been changed without it since";

/// What the owner left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OwnerState {
    /// The image holds everything; anybody may take it.
    Clean,
    /// The owner was stopped and keeps dirty data; only its cache may take the image.
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

/// The cache that holds the other copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// Uuid of the cache device.
    pub cache_uuid: Uuid,
    /// Boot of its host, see [`boot_id`]: what it had not on stable media is gone with another one.
    pub boot_id: String,
    /// Name of its host, for people.
    pub host: String,
    /// The owner's cache device has failed: whatever it comes back with may be less than what this copy has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only: bool,
}

/// Longest text about a peer in bytes.
const PEER_TEXT_BYTES_MAX: usize = 255;

impl Peer {
    /// It can stand in a record of the owner with this uuid, and be read again.
    pub(crate) fn is_sound(&self, owner: Uuid) -> bool {
        let texts = [&self.boot_id, &self.host].into_iter();
        let mut foreign =
            texts.filter(|text| text.len() > PEER_TEXT_BYTES_MAX || text.contains(char::is_control));
        foreign.next().is_none() && !self.cache_uuid.is_nil() && self.cache_uuid != owner
    }
}

/// A client that was fenced for long, since nothing has proved that it is dead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fenced {
    /// Address of the RADOS client.
    pub address: String,
    /// Name of its host; empty where nothing tells.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host: String,
    /// Boot of its host, see [`boot_id`]; empty where nothing tells.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// When its fence falls, in seconds since 1970.
    pub until_unix_s: u64,
}

impl Fenced {
    /// A fence of `expire_s` seconds from now on.
    pub(crate) fn new(address: String, (host, boot_id): (String, String), expire_s: u64) -> Fenced {
        Fenced { address, host, boot_id, until_unix_s: unix_s().saturating_add(expire_s) }
    }

    /// Its host is this one, by its name, and has been restarted since.
    pub(crate) fn is_of_former_boot(&self) -> bool {
        let now = boot_id();
        self.host == host_name() && ![&self.boot_id, &now].contains(&&String::new()) && self.boot_id != now
    }

    /// It still stands.
    fn stands(&self) -> bool {
        self.until_unix_s > unix_s()
    }
}

/// In one line, for people.
impl Display for Fenced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days = self.until_unix_s.saturating_sub(unix_s()).div_ceil(86_400);
        let host = if self.host.is_empty() { "an unknown host" } else { &format!("host {}", self.host) };
        write!(f, "{} of {host} for {days} more days", self.address)
    }
}

/// State of the image when it was released: what must be unchanged to prove that nobody wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageStamp {
    /// A file's attributes.
    File {
        /// Bytes.
        size_bytes: u64,
        /// Inode number.
        inode: u64,
        /// Modification time in nanoseconds since 1970.
        mtime_ns: i128,
    },
    /// RADOS version of an image's header object: every taking of the exclusive lock changes it.
    Header {
        /// The version.
        version: u64,
    },
}

/// The ownership record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ownership {
    /// Version of this format.
    pub version: u32,
    /// Goes up by one with every open.
    pub generation: u64,
    /// Generation that the cache knew of the image when it opened it for this one, 0 for a cache that held nothing of
    /// it: the only other one that the cache may know later, namely after an open that was cut short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<u64>,
    /// Cache device that owns the image.
    pub cache_uuid: Uuid,
    /// What the owner left behind.
    pub state: OwnerState,
    /// Name of the owner's host.
    pub host: String,
    /// The host's boot, so that a restarted host is told from a running one.
    #[serde(default)]
    pub boot_id: String,
    /// When the record was written, in seconds since 1970.
    pub time_unix_s: u64,
    /// How many caches hold the dirty data.
    pub copies: Copies,
    /// Who holds the other copy, when there is one: if and only if `copies` says so.
    #[serde(default, deserialize_with = "peer", skip_serializing_if = "Option::is_none")]
    pub peer: Option<Peer>,
    /// Host from which the image was taken over by its peer, until that one has opened it: `client` and `claims` are
    /// of that host, whose process may live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_from: Option<String>,
    /// Caches from which the image was taken over since it was clean: until the owner has committed a group of its own,
    /// the redo is one of theirs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub former: Vec<Uuid>,
    /// `rbd:` only: address of the owner's RADOS client, to be fenced by the host that takes over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// `rbd:` only: addresses of clients of the same cache that were about to take the lock since the
    /// last open, oldest first. They stand here so that a kill between lock and record leaves no lock
    /// that nobody can attribute.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<String>,
    /// `rbd:` only: version of the image's header object since the owner has lifted its guard to take
    /// the lock. As long as it is the same, nobody has used that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifted: Option<u64>,
    /// `rbd:` only: clients that were fenced for long, the first of them first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fenced: Vec<Fenced>,
    /// State of the image at the release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<ImageStamp>,
    /// `file:` only: what the kernel had counted on a device at the release, where that tells whether anybody has written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) counted: Option<Counted>,
    /// `file:` only: state of the image when it was taken: no time goes back behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) taken_at: Option<ImageStamp>,
    /// `file:` only: what tells the image from others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<ImageId>,
    /// `rbd:` only: the snapshot to which the image is being rolled back. As long as it stands here, parts of the image may be as they
    /// were before and others as in the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollback: Option<String>,
    /// `rbd:` only: a rollback of the image was cut short and given up, so that its object map may lack objects that are there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) hides: bool,
    /// Why the owner's cached data is no longer what the volume holds, when the image was changed without
    /// it: none of it may be used any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub superseded: Option<String>,
}

impl Ownership {
    /// A record of this host and moment.
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

    /// The record that makes an image the cache's, with what stood there before.
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

    /// The record with which the peer makes the image its own.
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
        // What stands here of clients and of the image's state is still to be acted on.
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

    /// The same record, which names this cache as the holder of the other copy.
    pub(crate) fn with_peer(&self, peer: Option<Peer>) -> Ownership {
        let copies = if peer.is_some() { Copies::Sync } else { Copies::Solo };
        Ownership { copies, peer, ..self.renewed() }.versioned()
    }

    /// Refuses a peer that cannot stand here.
    pub(crate) fn check_peer(&self, what: &str, peer: Option<&Peer>) -> Result<(), BackendError> {
        let fits = |peer: &Peer| peer.is_sound(self.cache_uuid) && self.superseded.is_none();
        if peer.is_none_or(fits) {
            return Ok(());
        }
        let invalid = std::io::Error::from_raw_os_error(libc::EINVAL);
        Err(BackendError::io(what, "name that peer in the ownership record", invalid))
    }

    /// The record, which lists these fences too. Those that have fallen are forgotten, and if there is no room those that fall first.
    pub(crate) fn with_fences(mut self, fences: &[Fenced]) -> Ownership {
        self.fenced.retain(Fenced::stands);
        for new in fences {
            match self.fenced.iter_mut().find(|known| known.address == new.address) {
                // Ceph does not prolong it.
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

    /// The record without those of the fences `were` that are no more in `are`.
    pub(crate) fn without_fences(mut self, were: &[Fenced], are: &[Fenced]) -> Ownership {
        let has = |list: &[Fenced], one: &Fenced| list.iter().any(|fenced| fenced.address == one.address);
        self.fenced.retain(|fenced| !has(were, fenced) || has(are, fenced));
        self
    }

    /// The fences that it lists and that still stand.
    pub(crate) fn standing_fences(&self) -> impl Iterator<Item = &Fenced> {
        self.fenced.iter().filter(|fenced| fenced.stands())
    }

    /// It is that owner's, as it was written down.
    pub(crate) fn is_of(&self, owner: &Ownership) -> bool {
        (self.generation, self.cache_uuid) == (owner.generation, owner.cache_uuid)
    }

    /// Clients of its owner, and those that were about to become it.
    pub(crate) fn clients(&self) -> impl Iterator<Item = &String> {
        self.client.iter().chain(&self.claims)
    }

    /// With the version that says what this record says: an older release refuses what it must not pass over.
    fn versioned(mut self) -> Ownership {
        self.version = match () {
            () if self.rollback.is_some() => VERSION,
            () if self.peer.is_some() || self.taken_from.is_some() => VERSION_PAIRED,
            () => VERSION_ALONE,
        };
        self
    }

    /// A redo that this cache has written is this owner's.
    pub(crate) fn owns_redo_of(&self, cache_uuid: Uuid) -> bool {
        self.cache_uuid == cache_uuid || self.former.contains(&cache_uuid)
    }

    /// The record of an image whose owner's data is given up. The generation goes up, so that the owner
    /// is no longer the owner should it come back.
    pub(crate) fn abandoned(&self) -> Ownership {
        let generation = self.generation.saturating_add(1);
        Ownership {
            image: self.image.clone(),
            hides: self.hides || self.rollback.is_some(),
            fenced: self.fenced.clone(),
            ..Ownership::new(generation, Uuid::nil(), OwnerState::Clean)
        }
    }

    /// The record of an image that is about to be changed without its owner's cache. The generation goes
    /// up: what the cache knows of its ownership is the past from now on.
    pub(crate) fn disowned(&self) -> Ownership {
        let generation = self.generation.saturating_add(1);
        let superseded = Some(CACHE_FAILED.to_owned());
        Ownership { generation, superseded, ..self.with_peer(None) }
    }

    /// The record of an image that is about to be rolled back to a snapshot: nothing that any cache holds of it counts from now on.
    pub(crate) fn rolling_back(self, snapshot: &str) -> Ownership {
        let superseded = Some(format!("the image was being rolled back to snapshot {snapshot}"));
        Ownership { rollback: Some(snapshot.to_owned()), superseded, ..self }.versioned()
    }

    /// The record when that is done.
    pub(crate) fn rolled_back(&self) -> Ownership {
        Ownership { rollback: None, superseded: None, hides: false, ..self.renewed() }.versioned()
    }

    /// A snapshot's name can stand in a record.
    pub(crate) fn can_name(snapshot: &str) -> bool {
        snapshot.len() <= ROLLBACK_BYTES_MAX && !snapshot.contains(char::is_control)
    }

    /// The record that a release leaves, with the state of the image that proves that nobody wrote.
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

    /// The same record, written now.
    pub(crate) fn renewed(&self) -> Ownership {
        Ownership { time_unix_s: unix_s(), ..self.clone() }
    }

    /// Reads a record; `what` names it in errors.
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
            // No release has written of a second copy in it.
            (record.copies, record.peer) = (Copies::Solo, None);
        }
        // Each owner's is one more than that of the owner before.
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
        // They are told to people and taken for names.
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

    /// It is this cache's.
    pub(crate) fn is_by(&self, cache_uuid: [u8; 16]) -> bool {
        self.cache_uuid == Uuid::from_bytes(cache_uuid)
    }

    /// The host that wrote it is this one, and has not been restarted since.
    pub(crate) fn is_of_this_boot(&self) -> bool {
        self.host == host_name() && self.boot_id == boot_id()
    }

    /// A guard of the image is one that a kill has left: the image holds everything.
    pub(crate) fn left_guard(&self) -> bool {
        self.state == OwnerState::Clean && (self.cache_uuid.is_nil() || !self.claims.is_empty())
    }

    /// Refuses an image whose newest data is in another cache.
    pub(crate) fn check_owner(&self, what: &str, cache_uuid: Uuid) -> Result<(), BackendError> {
        if self.state == OwnerState::Clean || self.cache_uuid == cache_uuid {
            return Ok(());
        }
        Err(BackendError::Owned { what: what.into(), owner: self.refusal() })
    }

    /// Refuses an image that another cache had last, if it is not to be taken then.
    pub(crate) fn check_elsewhere(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        match options.unless_elsewhere && !self.is_by(options.cache_uuid) {
            true => Err(BackendError::Elsewhere { what: what.into(), host: self.host.clone() }),
            false => Ok(()),
        }
    }

    /// Refuses an image that is half rolled back, except to the process that rolls it back.
    pub(crate) fn check_rolled_back(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        match &self.rollback {
            Some(snapshot) if options.roll_back.is_none() => {
                Err(BackendError::HalfRolledBack { what: what.into(), snapshot: snapshot.clone() })
            }
            _ => Ok(()),
        }
    }

    /// Refuses a cache of the owner's that may lack what was only in its host's memory when that was restarted, or on a device
    /// that has failed, and that the peer has.
    pub(crate) fn check_whole(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        let is_owner = self.cache_uuid.as_bytes() == &options.cache_uuid && self.state != OwnerState::Clean;
        let Some(peer) = self.peer.as_ref().filter(|_| is_owner) else { return Ok(()) };
        // A user who recovers the image without the cache has given up what is in it.
        let known = options.recover || options.whole_as_of == Some(self.generation);
        if known || is_this_boot(&self.boot_id) && !peer.only {
            return Ok(());
        }
        let (peer_host, generation) = (peer.host.clone(), self.generation);
        let device_failed = peer.only;
        Err(BackendError::PeerFirst { what: what.into(), peer_host, generation, device_failed })
    }

    /// Refuses a cache of the owner's that knows less of the image than it has known: its device has lost that the
    /// volume was attached, or removed and added again, and with that whatever came after. Or it has given that up.
    pub(crate) fn check_known(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        given_up::check(what, self, options)?;
        let is_owner = self.cache_uuid.as_bytes() == &options.cache_uuid && self.state != OwnerState::Clean;
        let (Some(base), Some(known)) = (self.base, options.generation) else { return Ok(()) };
        // A volume that is only read has no generation; but a copy that was taken over has had one.
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

    /// Where the data is, in one line.
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

/// Reads a peer. Of the name that an earlier version had in its place nothing is known.
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

/// Reads one of our JSON documents: a record, or what belongs to a redo. `what` names it in errors, `known` is the newest
/// version of it that can be read.
pub(crate) fn parse<T: DeserializeOwned>(what: &str, bytes: &[u8], known: u32) -> Result<T, BackendError> {
    let bad = |why: String| BackendError::Record { what: what.into(), why };
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    // What is wrong is repeated, and may be anything.
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

/// What is known about writes of others since this cache had the image last.
#[derive(Debug, Clone)]
pub(crate) struct Continuity {
    /// Nobody else wrote.
    pub(crate) proven: bool,
    /// Somebody else wrote, or the image was given to others.
    pub(crate) overwritten: bool,
    /// Why, for the log.
    pub(crate) reason: String,
}

impl Continuity {
    pub(crate) fn unproven(reason: impl Into<String>) -> Continuity {
        Continuity { proven: false, overwritten: false, reason: reason.into() }
    }

    pub(crate) fn proven(reason: impl Into<String>) -> Continuity {
        Continuity { proven: true, overwritten: false, reason: reason.into() }
    }

    /// Refuses an image over which dirty data must not be drained.
    pub(crate) fn check_dirty(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        if options.dirty && self.overwritten {
            return Err(BackendError::Overwritten { what: what.into(), why: self.reason.clone() });
        }
        Ok(())
    }

    /// The proof is only one for content that the cache has brought to the record's generation. A generation that
    /// the cache has not seen, and that was released with everything in the image, was somebody else's: whatever
    /// the cache holds dirty is older.
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
        // What was taken over is what the peer knew.
        let is_of = |(known, record): (u64, &Ownership)| {
            known == record.generation || record.taken_from.is_some() && record.base == Some(known)
        };
        let known = options.generation.zip(record).is_none_or(is_of);
        if known || !self.proven {
            return self;
        }
        Continuity::unproven("an earlier attempt to open the image was cut short")
    }

    /// What the record alone says; `None` when the image has to be looked at.
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

    /// What it means for the cached data, as a step of a plan.
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

/// Name of this host, as it stands in records.
pub fn host_name() -> String {
    // A name may be any bytes, and a record with control characters would be refused when it is read again.
    printable(&rustix::system::uname().nodename().to_string_lossy())
}

/// Text that stays on one line.
fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

/// The kernel's id of this boot of the host, as it stands in records; empty where there is none.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

/// The boot of a record or peer is this one. Where there is no id, nothing tells.
fn is_this_boot(id: &str) -> bool {
    !id.is_empty() && id == boot_id()
}

/// Seconds since 1970.
pub(crate) fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// How long ago `time_unix_s` was, for people.
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
