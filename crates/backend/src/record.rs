//! The ownership record: who may write to an image, and where its newest data is.
//!
//! `file:` keeps it as a file beside the image, `rbd:` as a RADOS object beside the image. Both are the
//! same JSON document, changed only by whoever holds the image's lock, and only from the exact
//! version that was read.

use crate::{BackendError, OpenOptions, Release};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use uuid::Uuid;

/// Version of our JSON documents that this release writes; it reads all up to it (docs/format.md, Versions).
pub(crate) const VERSION: u32 = 1;

/// Longest record in bytes; anything longer is not ours.
pub(crate) const RECORD_BYTES_MAX: usize = 16 * 1024;

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
    /// The peer alone.
    Remote,
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
    /// The replica's peer, when there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// `rbd:` only: address of the owner's RADOS client, to be fenced by whoever takes over.
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
    /// State of the image at the release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<ImageStamp>,
    /// Why the owner's cached data is no longer what the volume holds, when the image was changed without
    /// it: none of it may be used any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub superseded: Option<String>,
}

impl Ownership {
    /// A record of this host and moment.
    pub(crate) fn new(generation: u64, cache_uuid: Uuid, state: OwnerState) -> Ownership {
        Ownership {
            version: VERSION,
            generation,
            base: None,
            cache_uuid,
            state,
            host: host_name(),
            boot_id: boot_id(),
            time_unix_s: unix_s(),
            copies: Copies::Solo,
            peer: None,
            client: None,
            claims: Vec::new(),
            lifted: None,
            stamp: None,
            superseded: None,
        }
    }

    /// The record that makes an image the cache's, with what stood there before.
    pub(crate) fn taken(before: Option<&Ownership>, options: &OpenOptions) -> Ownership {
        let generation = before.map_or(1, |before| before.generation.saturating_add(1));
        let cache_uuid = Uuid::from_bytes(options.cache_uuid);
        let base = Some(options.generation.unwrap_or(0));
        Ownership { base, ..Ownership::new(generation, cache_uuid, OwnerState::Open) }
    }

    /// The record of an image whose owner's data is given up. The generation goes up, so that the owner
    /// is no longer the owner should it come back.
    pub(crate) fn abandoned(&self) -> Ownership {
        let generation = self.generation.saturating_add(1);
        Ownership::new(generation, Uuid::nil(), OwnerState::Clean)
    }

    /// The record of an image that is about to be changed without its owner's cache. The generation goes
    /// up: what the cache knows of its ownership is the past from now on.
    pub(crate) fn disowned(&self) -> Ownership {
        let generation = self.generation.saturating_add(1);
        let superseded = Some(CACHE_FAILED.to_owned());
        Ownership { generation, superseded, ..self.renewed() }
    }

    /// The record that a release leaves, with the state of the image that proves that nobody wrote.
    pub(crate) fn released(&self, how: Release, stamp: Option<ImageStamp>) -> Ownership {
        let mut record = self.renewed();
        record.state = if how.clean { OwnerState::Clean } else { OwnerState::Dirty };
        record.client = None;
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
        let record: Ownership = parse(what, bytes).map_err(|error| match error {
            BackendError::Newer { what, version, known } => {
                BackendError::Newer { what: format!("{what}: the ownership record"), version, known }
            }
            other => other,
        })?;
        let names = [&record.peer, &record.client, &record.superseded].into_iter().flatten();
        let is_foreign = |text: &String| text.contains(char::is_control);
        // They are told to people and taken for names.
        if names.chain(&record.claims).chain([&record.host, &record.boot_id]).any(is_foreign) {
            let why = "has control characters in its texts; see who wrote it before removing it".into();
            return Err(BackendError::Record { what: what.into(), why });
        }
        Ok(record)
    }

    pub(crate) fn to_json(&self) -> Vec<u8> {
        let mut json = serde_json::to_vec_pretty(self).expect("a record of plain fields is serialisable");
        json.push(b'\n');
        json
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

    /// Refuses a cache of the owner's that knows less of the image than it has known: its device has lost that the
    /// volume was attached, or removed and added again, and with that whatever came after.
    pub(crate) fn check_known(&self, what: &str, options: &OpenOptions) -> Result<(), BackendError> {
        let is_owner = self.cache_uuid.as_bytes() == &options.cache_uuid && self.state != OwnerState::Clean;
        let (Some(base), Some(known)) = (self.base, options.generation) else { return Ok(()) };
        // A volume that is only read has no generation.
        if !is_owner || self.superseded.is_some() || known == 0 || known == base || known >= self.generation {
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
        format!(
            "its newest data is in cache {} on host {}, {kind} ({} ago); start tidepool there and remove the volume",
            self.cache_uuid,
            self.host,
            age(self.time_unix_s),
        )
    }
}

/// Reads one of our JSON documents: a record, or what belongs to a redo. `what` names it in errors.
pub(crate) fn parse<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, BackendError> {
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
    if version > VERSION {
        return Err(BackendError::Newer { what: what.into(), version, known: VERSION });
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
        let known = options.generation.zip(record).is_none_or(|(known, record)| known == record.generation);
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

/// Name of this host.
pub(crate) fn host_name() -> String {
    // A name may be any bytes, and a record with control characters would be refused when it is read again.
    printable(&rustix::system::uname().nodename().to_string_lossy())
}

/// Text that stays on one line.
fn printable(text: &str) -> String {
    text.replace(char::is_control, "?")
}

/// The kernel's id of this boot; empty where there is none.
pub(crate) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|id| id.trim().to_owned())
        .unwrap_or_default()
}

fn unix_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs()
}

/// How long ago `time_unix_s` was, for people.
fn age(time_unix_s: u64) -> String {
    match unix_s().saturating_sub(time_unix_s) {
        s @ 0..=119 => format!("{s} s"),
        s @ 120..=7199 => format!("{} min", s / 60),
        s @ 7200..=172_799 => format!("{} h", s / 3600),
        s => format!("{} days", s / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redo::{Header, Note};
    use proptest::prelude::*;

    fn record(state: OwnerState) -> Ownership {
        Ownership::new(7, Uuid::from_bytes([3; 16]), state)
    }

    #[test]
    fn a_record_is_read_back_as_written() {
        let mut record = record(OwnerState::Dirty);
        record.stamp =
            Some(ImageStamp::File { size_bytes: 1 << 40, inode: 7, mtime_ns: 1_700_000_000_000_000_001 });
        record.client = Some("10.0.0.1:0/77".into());
        assert_eq!(Ownership::from_json("x", &record.to_json()).expect("own record"), record);
        record.stamp = Some(ImageStamp::Header { version: 9 });
        assert_eq!(Ownership::from_json("x", &record.to_json()).expect("own record"), record);
    }

    #[test]
    fn only_a_clean_or_own_image_can_be_taken() {
        let (own, other) = (Uuid::from_bytes([3; 16]), Uuid::from_bytes([4; 16]));
        for state in [OwnerState::Clean, OwnerState::Dirty, OwnerState::Open] {
            assert!(record(state).check_owner("x", own).is_ok());
            assert_eq!(record(state).check_owner("x", other).is_ok(), state == OwnerState::Clean);
        }
        let line = record(OwnerState::Dirty).check_owner("img", other).expect_err("not ours").to_string();
        assert!(
            line.contains(&own.to_string()) && line.contains(&host_name()) && !line.contains('\n'),
            "{line}"
        );
    }

    #[test]
    fn a_cache_that_has_forgotten_the_image_is_refused() {
        let uuid = [3; 16];
        let knows = |generation| OpenOptions { cache_uuid: uuid, generation, ..OpenOptions::default() };
        let added = Ownership::taken(Some(&record(OwnerState::Clean)), &knows(None));
        assert_eq!((added.generation, added.base), (8, Some(0)));
        let again = Ownership::taken(Some(&added), &knows(Some(8)));
        assert_eq!((again.generation, again.base), (9, Some(8)));
        let cut = Ownership::taken(Some(&again), &knows(Some(8)));
        assert_eq!((cut.generation, cut.base), (10, Some(8)));
        let refused = |record: &Ownership, known| record.check_known("img", &knows(known)).is_err();
        // What it knew before, what it was given, a volume that is only read, and one that is not there.
        for (record, known) in [(&added, 8), (&added, 0), (&again, 8), (&again, 9), (&cut, 8), (&cut, 10)] {
            assert!(!refused(record, Some(known)) && !refused(record, None), "{known}: {record:?}");
        }
        // It was removed before it was added, or had got further.
        for (record, known) in [(&added, 5), (&added, 7), (&again, 7), (&cut, 9), (&cut, 1)] {
            assert!(refused(record, Some(known)), "{known}: {record:?}");
            let released = Ownership { state: OwnerState::Clean, ..record.clone() };
            assert!(!refused(&released, Some(known)), "the image holds everything");
            let earlier = Ownership { base: None, ..record.clone() };
            assert!(!refused(&earlier, Some(known)), "a record of an earlier version does not tell");
            let other = Ownership { cache_uuid: Uuid::nil(), ..record.clone() };
            assert!(!refused(&other, Some(known)), "another cache's record says nothing about this one");
        }
        let line = again.check_known("img", &knows(Some(7))).expect_err("forgotten").to_string();
        assert!(
            line.contains("generation 7") && line.contains("generation 8") && !line.contains('\n'),
            "{line}"
        );
    }

    #[test]
    fn a_record_of_a_later_format_is_refused() {
        let text = String::from_utf8(record(OwnerState::Clean).to_json()).expect("JSON");
        let text = text.replace("\"version\": 1", "\"version\": 2");
        let error = Ownership::from_json("img", text.as_bytes()).expect_err("version 2");
        assert!(matches!(error, BackendError::Newer { version: 2, known: VERSION, .. }), "{error}");
        assert!(error.to_string().starts_with("img: the ownership record has version 2, "), "{error}");
        let text = text.replace("\"version\": 2", "\"version\": 0");
        assert!(Ownership::from_json("img", text.as_bytes()).is_err(), "there is no version 0");
    }

    /// A document of an earlier version, read and written again: everything in it must still be there.
    fn read_again<T: DeserializeOwned + Serialize>(name: &str, bytes: &[u8]) {
        let document: T = parse(name, bytes).unwrap_or_else(|e| panic!("{e}"));
        let again = serde_json::to_value(document).expect("plain fields");
        let golden: serde_json::Value = serde_json::from_slice(bytes).expect("JSON");
        for (field, value) in golden.as_object().expect("an object").iter().filter(|(f, _)| *f != "version") {
            assert_eq!(again.get(field), Some(value), "{name}: {field}");
        }
    }

    #[test]
    fn documents_of_every_version_are_read() {
        for version in 1..=VERSION {
            let directory = format!("{}/tests/golden/v{version}", env!("CARGO_MANIFEST_DIR"));
            let entries = std::fs::read_dir(&directory).expect("golden documents of every version");
            let mut kinds = [0; 3];
            for path in entries.map(|entry| entry.expect("an entry").path()) {
                let bytes = std::fs::read(&path).expect("a document");
                let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
                match name.split('-').next() {
                    Some("record") => read_again::<Ownership>(&name, &bytes),
                    Some("redo") => read_again::<Header>(&name, &bytes),
                    Some("note") => read_again::<Note>(&name, &bytes),
                    _ => panic!("nobody knows what {name} is"),
                }
                let kind = ["record", "redo", "note"].iter().position(|kind| name.starts_with(kind));
                kinds[kind.expect("matched above")] += 1;
            }
            assert!(kinds.iter().all(|&n| n > 0), "golden documents of version {version}: {kinds:?}");
        }
    }

    #[test]
    fn what_a_record_says_is_one_line() {
        let text = String::from_utf8(record(OwnerState::Dirty).to_json()).expect("JSON");
        let host = format!("\"host\": \"{}\"", host_name());
        assert!(text.contains(&host), "{text}");
        let owner = Uuid::from_bytes([3; 16]).to_string();
        for foreign in [text.replace(&host, "\"host\": \"a\\nb\""), text.replace(&owner, "\\n\\u001b")] {
            let line = Ownership::from_json("img", foreign.as_bytes()).expect_err("not ours").to_string();
            assert!(!line.contains(char::is_control), "{line:?}");
        }
        assert_eq!(printable("a\nb\u{1b}ä"), "a?b?ä");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(Ownership::from_json("x", &bytes).is_err());
        }
    }
}
