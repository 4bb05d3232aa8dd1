//! The redo beside an image: groups of changes that are committed and may not all be in the image
//! yet.
//!
//! A group's frames are written first. Then the header changes in one atomic step and names the
//! group; the step fails if the header is not the one that this owner has seen last. (For files the
//! image's lock ensures that.) A process that finds the image, the header and the frames without
//! the cache brings the image to the end of the newest group ([`recover`](fn@crate::recover)). An
//! image that is released clean has no redo.

use crate::api::{INFLIGHT_MAX, Transfer};
use crate::error::BackendError;
use crate::record::{self, Ownership};
use crossbeam_queue::ArrayQueue;
use serde::{Deserialize, Serialize};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tidepool_engine::api::IoError;
use tidepool_engine::format::FORMAT_VERSION;
use tidepool_engine::redo::{Change, FRAME_BYTES_MAX, FrameName, decode, newer_version};
use uuid::Uuid;

/// Version of header and note. Every version up to it is read (docs/format.md, Versions).
pub(crate) const VERSION: u32 = 1;

/// Longest header or note in bytes.
pub(crate) const DOCUMENT_BYTES_MAX: usize = 1 << 20;
/// Distance between frames in the file or object that holds them, in bytes.
pub(crate) const FRAME_STRIDE: u64 = FRAME_BYTES_MAX as u64;
/// Most later generations whose first group is looked for: an owner may have died before its first
/// commit.
const GENERATIONS_MAX: u64 = 64;
/// Threads that write the redo of one image: so many frames of a group are written at once.
const WRITERS: usize = 4;

/// One committed group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Group {
    pub(crate) group: u64,
    pub(crate) frames: u32,
}

/// The header of a redo: which groups it consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    version: u32,
    /// Generation of the owner that wrote the header.
    pub(crate) generation: u64,
    pub(crate) cache_uuid: Uuid,
    /// Committed groups that may not be in the image, oldest first.
    pub(crate) groups: Vec<Group>,
    /// Number of the next group, which may have been begun.
    pub(crate) next: u64,
    /// Sequence of the last record in the newest group.
    pub(crate) sequence: u64,
    /// When that group ended, in milliseconds since 1970. The group contains nothing later, and
    /// everything that was acknowledged before.
    pub(crate) cut_unix_ms: u64,
}

/// The note: how far the owner was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Note {
    version: u32,
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
    /// Newest sequence on the cache's stable media.
    #[serde(default)]
    pub(crate) durable: u64,
    /// Bytes that were in no committed group. `bytes_max` is the most that the owner lets them
    /// become.
    pub(crate) bytes: u64,
    pub(crate) bytes_max: u64,
    pub(crate) time_unix_ms: u64,
}

/// Where the redo of one image is kept. Every method blocks.
pub(crate) trait Shelf: Send + Sync {
    /// Writes a frame. It is durable after [`Shelf::sync_group`].
    fn put_frame(&self, generation: u64, group: u64, frame: u32, bytes: &[u8]) -> io::Result<()>;

    /// Makes the written frames of a group durable.
    fn sync_group(&self, generation: u64, group: u64) -> io::Result<()>;

    /// A frame, perhaps with further bytes behind it; `None` when the file or object that holds it
    /// does not exist.
    fn frame(&self, generation: u64, group: u64, frame: u32) -> io::Result<Option<Vec<u8>>>;

    /// Removes a group's frames. `frames` is `None` for a group that was only begun, whose number
    /// of frames is not known. It is no error if there are none.
    fn remove_group(&self, generation: u64, group: u64, frames: Option<u32>) -> io::Result<()>;

    /// Generation and number of every group that has frames. `None` where looking for them would
    /// take too long: then a header alone tells of groups.
    fn groups(&self) -> io::Result<Option<Vec<(u64, u64)>>>;

    /// The header's document as it is now, `None` when there is none.
    fn header(&self) -> io::Result<Option<Vec<u8>>>;

    /// Replaces the header's document if it is still the one that this shelf has read or written
    /// last; `None` removes it. Durable when this returns.
    fn swap_header(&self, document: Option<&[u8]>) -> io::Result<()>;

    /// The note's document.
    fn note(&self) -> io::Result<Option<Vec<u8>>>;

    /// Replaces the note's document; `None` removes it.
    fn set_note(&self, document: Option<&[u8]>) -> io::Result<()>;
}

/// An image as it is left: its name in errors, its ownership record, and where its redo is.
pub(crate) type Remains = (String, Option<Ownership>, Box<dyn Shelf>);

impl Header {
    /// A header without groups: the image alone is a cut of the volume.
    fn empty(generation: u64, cache_uuid: Uuid) -> Header {
        let cut_unix_ms = unix_ms();
        let groups = Vec::new();
        Header {
            version: VERSION,
            generation,
            cache_uuid,
            groups,
            next: 1,
            sequence: 0,
            cut_unix_ms,
        }
    }

    /// Reads the header of a shelf; `what` names the image in errors.
    pub(crate) fn read(what: &str, shelf: &dyn Shelf) -> Result<Option<Header>, BackendError> {
        let bytes =
            shelf.header().map_err(|e| BackendError::io(what, "read the header of its redo", e))?;
        bytes.map(|bytes| record::parse(&format!("{what} (redo)"), &bytes, VERSION)).transpose()
    }

    fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain fields are serialisable")
    }

    /// Generation and number of the first group that the redo has, or will have.
    fn first(&self) -> (u64, u64) {
        (self.generation, self.groups.first().map_or(self.next, |first| first.group))
    }
}

impl Note {
    /// Reads the note of a shelf; `what` names the image in errors. A note that a power failure has
    /// torn counts as missing. A note of a newer version is refused.
    fn read(what: &str, shelf: &dyn Shelf) -> Result<Option<Note>, BackendError> {
        let bytes =
            shelf.note().map_err(|e| BackendError::io(what, "read the owner's last note", e))?;
        match bytes
            .map(|bytes| record::parse(&format!("{what} (redo)"), &bytes, VERSION))
            .transpose()
        {
            Err(newer @ BackendError::Newer { .. }) => Err(newer),
            Err(_torn) => Ok(None),
            known => known,
        }
    }
}

/// Refuses a cache whose newest record is `sequence`, if the redo and the cache's own note say that
/// the cache once had a later record on stable media. The image or its redo may contain what the
/// cache has lost, and clients rely on it. `record` is the image's record, which says that the
/// image is this cache's.
pub(crate) fn check_cache(
    what: &str,
    shelf: &dyn Shelf,
    record: &Ownership,
    sequence: u64,
) -> Result<(), BackendError> {
    let Some(header) = find_header(what, shelf, record)? else { return Ok(()) };
    // The note of a former owner says what that owner's cache had, which may be ahead of what both
    // caches had.
    let own = |note: &Note| {
        note.generation >= header.generation && header.cache_uuid == record.cache_uuid
    };
    let note = Note::read(what, shelf)?.filter(own);
    let known = note.map_or(0, |note| note.durable).max(header.sequence);
    if known <= sequence {
        return Ok(());
    }
    let why =
        format!("its newest record is {sequence}, and it once had record {known} on stable media");
    Err(BackendError::Behind { what: what.into(), why })
}

/// The header of the redo, if the redo belongs to the record's owner.
fn find_header(
    what: &str,
    shelf: &dyn Shelf,
    record: &Ownership,
) -> Result<Option<Header>, BackendError> {
    Ok(Header::read(what, shelf)?.filter(|header| record.owns_redo_of(header.cache_uuid)))
}

/// Refuses an image whose redo a newer version has left. For a caller that is about to change
/// something of the image: afterwards the error could no longer say that nothing was changed.
pub(crate) fn check_version(what: &str, shelf: &dyn Shelf) -> Result<(), BackendError> {
    Header::read(what, shelf)?;
    Note::read(what, shelf)?;
    Ok(())
}

/// Removes a redo, because the image is released or is changed without groups from now on.
/// `generation` is the newest generation that may have begun a group.
pub(crate) fn clear(what: &str, shelf: &dyn Shelf, generation: u64) -> Result<(), BackendError> {
    let failed = |e| BackendError::io(what, "remove its redo", e);
    let header = Header::read(what, shelf)?;
    shelf.set_note(None).map_err(failed)?;
    if let Some(header) = header {
        shelf.swap_header(None).map_err(failed)?;
        remove_groups(shelf, &header, 0, generation).map_err(failed)?;
    }
    sweep(what, shelf, (u64::MAX, u64::MAX));
    Ok(())
}

/// Removes what earlier removals have left of groups before `first`, because they failed or were
/// cut short. No header names these groups any more, so they take room and do no other harm.
fn sweep(what: &str, shelf: &dyn Shelf, first: (u64, u64)) {
    let removed = shelf.groups().and_then(|groups| {
        let mut result = Ok(());
        for (generation, group) in
            groups.unwrap_or_default().into_iter().filter(|group| *group < first)
        {
            result = result.and(shelf.remove_group(generation, group, None));
        }
        result
    });
    not_removed(what, removed);
}

fn not_removed(what: &str, removed: io::Result<()>) {
    if let Err(e) = removed {
        tracing::warn!(image = %what, error = %e, "redo that is not needed any more could not be removed");
    }
}

/// Removes the frames of the groups that a header names, and of groups that may have been begun:
/// the next one, and the first group of each later generation up to `generation`. If `keep` is not
/// 0, groups from `keep` on stay, and later generations are left alone.
fn remove_groups(shelf: &dyn Shelf, header: &Header, keep: u64, generation: u64) -> io::Result<()> {
    let known = header.groups.iter().map(|group| (group.group, Some(group.frames)));
    let mut result = Ok(());
    for (group, frames) in
        known.chain([(header.next, None)]).filter(|&(group, _)| keep == 0 || group < keep)
    {
        result = result.and(shelf.remove_group(header.generation, group, frames));
    }
    let later = header.generation.saturating_add(1)
        ..=generation.min(header.generation.saturating_add(GENERATIONS_MAX));
    for generation in later.filter(|_| keep == 0) {
        result = result.and(shelf.remove_group(generation, 1, None));
    }
    result
}

/// Work for a thread of the writer.
enum Job {
    Frame {
        token: u64,
        group: u64,
        frame: u32,
        bytes: Bytes,
    },
    /// Replaces header `old` by `new`. `group`, if there is one, must be durable before.
    Header {
        token: u64,
        new: Header,
        old: Option<Header>,
        group: Option<u64>,
    },
    Note {
        token: u64,
        note: Note,
    },
}

/// Memory of a transfer.
struct Bytes {
    ptr: *const u8,
    len: usize,
}

// SAFETY: the submitter keeps the memory valid and unchanged until the token comes back, whichever
// thread reads it, as the contract of `Backend::submit` says.
unsafe impl Send for Bytes {}

/// The outcome of a job: its token, its result, and the header in force if the job has changed the
/// header.
type Outcome = (u64, Result<(), IoError>, Option<Header>);

/// Writes an image's redo on threads of its own, because the redo is no part of the image and its
/// calls block.
pub(crate) struct Writer {
    generation: u64,
    cache_uuid: Uuid,
    /// The header as it is on the shelf.
    header: Option<Header>,
    jobs: Option<Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    outcomes: Arc<ArrayQueue<Outcome>>,
    in_flight: usize,
}

impl Writer {
    /// A writer for the owner of `record`, which has just taken the image. `dirty`: the cache holds
    /// data that is not drained. `wake` makes the backend's event descriptor readable.
    pub(crate) fn start(
        what: &str,
        shelf: Arc<dyn Shelf>,
        record: &Ownership,
        dirty: bool,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Result<Writer, BackendError> {
        let failed = |e| BackendError::io(what, "write the header of its redo", e);
        let (generation, cache_uuid) = (record.generation, record.cache_uuid);
        let mut header = Header::read(what, &*shelf)?;
        if !dirty {
            // The image itself is the first cut. An older redo would take the image back to before
            // the changes that follow.
            let first = Header::empty(generation, cache_uuid);
            shelf.swap_header(Some(&first.to_json())).map_err(failed)?;
            forget(what, &*shelf, header.as_ref(), &first, generation - 1);
            header = Some(first);
        }
        if let Some(header) = &header {
            sweep(what, &*shelf, header.first());
        }
        let outcomes = Arc::new(ArrayQueue::new(INFLIGHT_MAX));
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let wake = Arc::new(wake);
        let work = || {
            let (shelf, queue, outcomes) =
                (Arc::clone(&shelf), Arc::clone(&queue), Arc::clone(&outcomes));
            let (what, wake) = (what.to_owned(), Arc::clone(&wake));
            move || {
                while let Some(job) = next(&queue) {
                    let outcome = job.run(&what, &*shelf, generation);
                    // The queue has room for every transfer that may be in flight.
                    let _ = outcomes.push(outcome);
                    wake();
                }
            }
        };
        let thread = |_| std::thread::Builder::new().name("redo".into()).spawn(work());
        let threads = (0..WRITERS).map(thread).collect::<io::Result<Vec<_>>>().map_err(failed)?;
        Ok(Writer {
            generation,
            cache_uuid,
            header,
            jobs: Some(jobs),
            threads,
            outcomes,
            in_flight: 0,
        })
    }

    /// Starts a transfer of the redo; its outcome comes through [`Writer::completions`].
    ///
    /// # Panics
    /// If it is a transfer of the image.
    pub(crate) fn submit(&mut self, token: u64, transfer: Transfer) {
        let job = match transfer {
            Transfer::RedoWrite { group, frame, ptr, len } => {
                Job::Frame { token, group, frame, bytes: Bytes { ptr, len } }
            }
            Transfer::RedoCommit { first, group, frames, sequence, age } => {
                let mut new = Header::empty(self.generation, self.cache_uuid);
                let kept = self.header.as_ref().filter(|old| old.generation == self.generation);
                let kept = kept.map(|old| old.groups.clone()).unwrap_or_default();
                new.groups = kept.into_iter().filter(|kept| kept.group >= first).collect();
                new.groups.push(Group { group, frames });
                new.next = group + 1;
                new.sequence = sequence;
                new.cut_unix_ms = before(since_1970(), age);
                Job::Header { token, new, old: self.header.clone(), group: Some(group) }
            }
            Transfer::RedoTrim { first } => {
                let own = self.header.clone().filter(|header| header.generation == self.generation);
                let mut new =
                    own.unwrap_or_else(|| Header::empty(self.generation, self.cache_uuid));
                new.groups.retain(|group| group.group >= first);
                Job::Header { token, new, old: self.header.clone(), group: None }
            }
            Transfer::RedoNote { sequence, durable, bytes, bytes_max } => {
                let (generation, time_unix_ms) = (self.generation, unix_ms());
                let version = VERSION;
                let note =
                    Note { version, generation, sequence, durable, bytes, bytes_max, time_unix_ms };
                Job::Note { token, note }
            }
            _ => unreachable!("transfers of the image go to the image"),
        };
        self.in_flight += 1;
        let jobs = self.jobs.as_ref().expect("open until it is dropped");
        jobs.send(job).expect("the workers end with the writer");
    }

    /// Reports the transfers that have completed.
    pub(crate) fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        while let Some((token, result, header)) = self.outcomes.pop() {
            self.in_flight -= 1;
            if header.is_some() {
                self.header = header;
            }
            done(token, result);
        }
    }

    /// Number of transfers in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.jobs = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn next(queue: &Mutex<Receiver<Job>>) -> Option<Job> {
    queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok()
}

impl Job {
    fn run(self, what: &str, shelf: &dyn Shelf, generation: u64) -> Outcome {
        match self {
            Job::Frame { token, group, frame, bytes } => {
                // SAFETY: `len` bytes at `ptr`, see `Bytes`.
                let bytes = unsafe { std::slice::from_raw_parts(bytes.ptr, bytes.len) };
                (token, outcome(shelf.put_frame(generation, group, frame, bytes)), None)
            }
            Job::Header { token, new, old, group } => {
                let synced = group.map_or(Ok(()), |group| shelf.sync_group(generation, group));
                match synced.and_then(|()| shelf.swap_header(Some(&new.to_json()))) {
                    Ok(()) => {
                        forget(what, shelf, old.as_ref(), &new, generation - 1);
                        (token, Ok(()), Some(new))
                    }
                    Err(e) => (token, outcome(Err(e)), None),
                }
            }
            Job::Note { token, note } => {
                let document = serde_json::to_vec(&note).expect("plain fields are serialisable");
                (token, outcome(shelf.set_note(Some(&document))), None)
            }
        }
    }
}

/// Removes the frames that a new header no longer names. `begun` is the newest generation that may
/// have begun a group without committing it. Frames that cannot be removed take room and do no
/// other harm: no header names them.
fn forget(what: &str, shelf: &dyn Shelf, old: Option<&Header>, new: &Header, begun: u64) {
    let Some(old) = old else { return };
    let keep = if old.generation == new.generation {
        new.groups.first().map_or(old.next, |first| first.group)
    } else {
        0
    };
    not_removed(what, remove_groups(shelf, old, keep, begun));
}

fn outcome(result: io::Result<()>) -> Result<(), IoError> {
    result.map_err(|e| match e.raw_os_error() {
        Some(libc::ESHUTDOWN) => IoError::Fenced,
        Some(libc::ENOSPC | libc::EDQUOT) => IoError::Full,
        errno => IoError::Errno(errno.unwrap_or(libc::EIO)),
    })
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO)
}

fn unix_ms() -> u64 {
    since_1970().as_millis() as u64
}

/// The last whole millisecond that is not after the moment `age` before `now`: a cut is never
/// reported later than it was.
fn before(now: Duration, age: Duration) -> u64 {
    now.saturating_sub(age).as_millis() as u64
}

/// What the loss of a cache costs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Loss {
    /// Time of the newest cut, in milliseconds since 1970: everything that was acknowledged until
    /// then is there.
    pub since_unix_ms: u64,
    /// Upper bound of the time over which acknowledged changes are lost, in seconds, if the owner
    /// reached the backend to its end.
    pub seconds: f64,
    /// Bytes that had been changed after the newest cut when the owner wrote its last note, zeroed
    /// and discarded ones included.
    pub bytes: u64,
    /// Most data among these bytes that the owner allowed, which is its dirty quota; `None` if the
    /// owner ended before its first note. Zeroes and discards take no room in a cache: only the
    /// time is a bound for them.
    pub bytes_max: Option<u64>,
}

/// Longest time for which an owner with something to lose writes no note, in milliseconds: twice
/// the interval of the notes, for a slow backend.
const SILENCE_MS: u64 = 2_000;

/// How far the owner of an image was according to its redo and its last note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Sequence of the owner's newest record.
    pub sequence: u64,
    /// Sequence of the newest record that is in the image or its redo.
    pub committed: u64,
    /// Time of the owner's last note, or of the newest cut if that is later, in milliseconds since
    /// 1970.
    pub time_unix_ms: u64,
    /// Bytes that were in no committed group of the redo at that time.
    pub bytes: u64,
    /// Longest time for which the owner went on after `time_unix_ms` without another note, in
    /// milliseconds, if it reached the backend to its end.
    pub silence_ms: u64,
}

/// How far the owner was; `None` where the drain is not grouped.
pub(crate) fn progress(
    what: &str,
    shelf: &dyn Shelf,
    record: &Ownership,
) -> Result<Option<Progress>, BackendError> {
    let Some(header) = find_header(what, shelf, record)? else { return Ok(None) };
    let silence_ms = SILENCE_MS;
    let committed = Progress {
        sequence: header.sequence,
        committed: header.sequence,
        time_unix_ms: header.cut_unix_ms,
        bytes: 0,
        silence_ms,
    };
    let note = Note::read(what, shelf)?.filter(|note| note.generation >= header.generation);
    Ok(Some(note.map_or(committed, |note| Progress {
        sequence: note.sequence.max(committed.sequence),
        time_unix_ms: note.time_unix_ms.max(committed.time_unix_ms),
        bytes: if note.sequence > committed.sequence { note.bytes } else { 0 },
        ..committed
    })))
}

impl Loss {
    /// The loss according to a redo's header and the owner's last note.
    fn of(header: &Header, note: Option<&Note>) -> Loss {
        let note = note.filter(|note| note.generation >= header.generation);
        let last = note.map_or(0, |note| note.time_unix_ms).max(header.cut_unix_ms);
        Loss {
            since_unix_ms: header.cut_unix_ms,
            seconds: last.saturating_add(SILENCE_MS).saturating_sub(header.cut_unix_ms) as f64
                / 1e3,
            bytes: note.filter(|note| note.sequence > header.sequence).map_or(0, |note| note.bytes),
            bytes_max: note.map(|note| note.bytes_max),
        }
    }
}

/// The redo of an image whose cache is lost, and what is lost beyond it.
pub(crate) struct Found {
    pub(crate) header: Header,
    pub(crate) loss: Loss,
}

/// Looks at the redo of an image whose owner is gone. `None` where the drain was not grouped: then
/// the image is no state that the volume ever had.
pub(crate) fn find(
    what: &str,
    shelf: &dyn Shelf,
    record: &Ownership,
) -> Result<Option<Found>, BackendError> {
    let Some(header) = find_header(what, shelf, record)? else { return Ok(None) };
    let loss = Loss::of(&header, Note::read(what, shelf)?.as_ref());
    Ok(Some(Found { header, loss }))
}

/// Reads and verifies all changes of a redo in order, and passes the changes of each frame to
/// `take`.
pub(crate) fn replay(
    what: &str,
    shelf: &dyn Shelf,
    header: &Header,
    take: &mut dyn FnMut(&[Change<'_>]) -> Result<(), BackendError>,
) -> Result<(), BackendError> {
    for group in &header.groups {
        for frame in 0..group.frames {
            let name = FrameName {
                uuid: header.cache_uuid.into_bytes(),
                generation: header.generation,
                group: group.group,
                frame,
            };
            let bytes = shelf.frame(name.generation, name.group, frame);
            let bytes = bytes.map_err(|e| BackendError::io(what, "read its redo", e))?;
            let changes = bytes.as_deref().and_then(|bytes| decode(bytes, name));
            let unknown = || match bytes.as_deref().and_then(newer_version) {
                Some(version) => BackendError::Newer {
                    what: format!("{what} (frame {frame} of group {} of its redo)", group.group),
                    version: version.into(),
                    known: FORMAT_VERSION.into(),
                },
                None => BackendError::Redo { what: what.into(), group: group.group, frame },
            };
            take(&changes.ok_or_else(unknown)?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn g5_a_cut_is_never_told_later_than_it_was() {
        let now = Duration::from_micros(5_000_400);
        assert_eq!(before(now, Duration::ZERO), 5_000);
        assert_eq!(before(now, Duration::from_micros(300)), 5_000);
        assert_eq!(before(now, Duration::from_micros(500)), 4_999);
        assert_eq!(before(now, Duration::from_micros(1_900)), 4_998);
    }
}
