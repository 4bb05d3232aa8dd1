//! An open image as a backend.

use super::address;
use super::change;
use super::claim::{self, Claim};
use super::forbid;
use super::guard;
use super::image::{Facts, Image};
use super::io::{Io, Letter, Outcome};
use super::layout;
use super::owner::OwnerObject;
use super::peer;
use super::place::Site;
use super::retake::{self, Failed, Retaken};
use crate::api::{Backend, INFLIGHT_MAX, Layout, OpenOptions, Peer, Release, Transfer};
use crate::changes::{self, Changes};
use crate::error::BackendError;
use crate::mailbox;
use crate::record::{ImageStamp, Ownership};
use crate::redo::{self as group_redo, Writer};
use crate::snapshot::SnapshotChange;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;
use tidepool_engine::api::IoError;

/// Most replacements of a read-only handle in a row before the transfers fail.
const RETAKES_MAX: u32 = 20;
/// Pause before a further attempt, multiplied by the number of attempts before it.
const RETAKE_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause before a further attempt.
const RETAKE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Ownership and lock of an image, as long as it is open for writing.
pub(super) struct Held {
    pub(super) claim: Claim,
    pub(super) owner: OwnerObject,
}

/// A change of the image that the guard forbids to every client.
struct Change {
    token: u64,
    what: change::Change,
    /// The thread that makes the change; `None` while the change waits for a handle that can write.
    thread: Option<JoinHandle<()>>,
}

/// What an open has found out about the image; see [`crate::Opened`].
#[derive(Default)]
pub(super) struct Found {
    pub(super) layout: Layout,
    pub(super) snapshot: Option<String>,
    pub(super) notes: Vec<String>,
}

/// An open image or snapshot.
pub(super) struct RbdBackend {
    size_bytes: u64,
    // Dropped in this order: no transfer without an image, no image without a pool.
    pub(super) io: Io,
    pub(super) held: Option<Held>,
    /// See [`Backend::attachment`].
    pub(super) attachment: Vec<u8>,
    /// Until the caller of the open has taken it.
    pub(super) found: Found,
    site: Site,
    /// Slots that wait for a handle that can write.
    pub(super) parked: Vec<u16>,
    /// The thread that replaces the handle by one that can write.
    pub(super) retake: Option<JoinHandle<()>>,
    /// Replacements of the handle since a transfer last succeeded.
    retakes: u32,
    /// Attempts in a row that have failed for a reason that may pass.
    postponed: u32,
    /// The handle is known to be read-only.
    pub(super) stale: bool,
    /// The backend is closing: nothing waits any longer for a reason that may pass.
    closing: bool,
    /// Changes of the record.
    changes: Changes,
    /// The thread that makes a change of the record.
    recording: Option<JoinHandle<()>>,
    change: Option<Change>,
    /// Changes that are made after `change`, each with its token.
    later: VecDeque<(u64, change::Change)>,
    pub(super) fenced: bool,
    /// Writes the redo; `None` where the cache does not drain in groups.
    redo: Option<Writer>,
}

impl RbdBackend {
    /// The backend of an open image, or of its snapshot with this number. `held` if it is opened
    /// for writing.
    pub(super) fn start(
        site: Site,
        image: Image,
        facts: &Facts,
        held: Option<Held>,
        snapshot: Option<u64>,
    ) -> Result<RbdBackend, BackendError> {
        let failed =
            |e: std::io::Error| BackendError::io(&site.place.what, "set up its transfers", e);
        // No other client writes to an image that is held and guarded, or to a snapshot. For any
        // other image, the layout may change later.
        let stays = snapshot.is_some() || held.is_some() && facts.can_guard();
        let layout = match stays {
            true => layout::find(&site, &image, facts, snapshot),
            false => Layout::default(),
        };
        let io = Io::new(image, facts).map_err(|e| failed(e.into()))?;
        site.cluster.wait_forever().map_err(failed)?;
        Ok(RbdBackend {
            size_bytes: facts.size_bytes,
            io,
            held,
            attachment: Vec::new(),
            found: Found { layout, ..Found::default() },
            site,
            parked: Vec::with_capacity(INFLIGHT_MAX),
            retake: None,
            retakes: 0,
            postponed: 0,
            stale: false,
            closing: false,
            changes: Changes::default(),
            recording: None,
            change: None,
            later: VecDeque::new(),
            fenced: false,
            redo: None,
        })
    }

    /// Takes what the open has found out.
    pub(super) fn take_found(&mut self) -> Found {
        std::mem::take(&mut self.found)
    }

    /// Starts the writer of the redo, or removes a redo where the cache does not drain in groups.
    pub(super) fn start_redo(
        &mut self,
        record: &Ownership,
        options: &OpenOptions,
    ) -> Result<(), BackendError> {
        let Some(held) = &self.held else { return Ok(()) };
        let what = &self.site.place.what;
        let shelf = self.site.shelf(&held.claim.id)?;
        if !options.grouped {
            return group_redo::clear(what, &shelf, record.generation);
        }
        let mailbox = Arc::clone(self.io.mailbox());
        let wake = move || mailbox.wake();
        let writer = Writer::start(what, Arc::new(shelf), record, options.dirty, wake)?;
        self.redo = Some(writer);
        Ok(())
    }

    /// Handles librbd's return value for a slot.
    fn settle(
        &mut self,
        index: u16,
        result: isize,
        done: &mut dyn FnMut(u64, Result<(), IoError>),
    ) {
        match self.io.advance(index, result) {
            Outcome::Finished(token, result) => {
                match result {
                    Err(IoError::Fenced) => self.fenced = true,
                    Ok(()) => self.retakes = 0,
                    Err(_) => {}
                }
                done(token, result);
            }
            Outcome::Continued => {}
            Outcome::ReadOnly(index) if self.held.is_none() => {
                done(self.io.abandon(index), Err(IoError::Errno(libc::EROFS)));
            }
            Outcome::ReadOnly(index) => self.parked.push(index),
        }
    }

    /// Takes the new handle. Parked transfers are made again, fail, or continue to wait.
    fn unpark(&mut self, retaken: Retaken, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        if let Some(thread) = self.retake.take() {
            let _ = thread.join();
        }
        if let (Some(owner), Some(held)) = (retaken.owner, &mut self.held) {
            held.owner = owner;
        }
        let outcome = match retaken.image {
            Err(Failed::Yet(_)) if !self.closing => {
                self.postponed = self.postponed.saturating_add(1);
                return;
            }
            Ok(image) => {
                self.io.image = Some(Arc::new(image));
                Ok(())
            }
            Err(Failed::Yet(e) | Failed::For(e)) => Err(e),
        };
        (self.postponed, self.stale) = (0, false);
        self.fenced |= outcome == Err(IoError::Fenced);
        if let (Err(e), Some(Change { token, thread: None, .. })) = (outcome, &self.change) {
            done(*token, Err(e));
            self.change = None;
            self.later.drain(..).for_each(|(token, _)| done(token, Err(e)));
        }
        let mut parked = std::mem::take(&mut self.parked);
        for index in parked.drain(..) {
            match outcome {
                Ok(()) => self.io.retry(index),
                Err(e) => done(self.io.abandon(index), Err(e)),
            }
        }
        self.parked = parked;
    }

    /// Starts to replace the handle that parked transfers wait for, once nothing else uses it.
    pub(super) fn start_retake(&mut self) {
        // All of these threads read the record, so they run one after the other.
        if self.parked.is_empty() && !self.stale
            || self.is_busy()
            || self.parked.len() < self.io.inflight()
        {
            return;
        }
        let Some(held) = self.held.as_ref() else { return };
        if self.postponed == 0 {
            self.retakes += 1;
        }
        let pause = RETAKE_PAUSE.saturating_mul((self.retakes - 1).saturating_add(self.postponed));
        let (attempt, old) = (self.retakes, self.io.image.take());
        let (claim, mailbox) = (held.claim.clone(), Arc::clone(self.io.mailbox()));
        let work = move || {
            let retaken = if attempt > RETAKES_MAX {
                Retaken::failed(libc::EROFS)
            } else {
                std::thread::sleep(pause.min(RETAKE_PAUSE_MAX));
                retake::retake(&claim, old)
            };
            drop(claim);
            mailbox.post(Letter::Retaken(Box::new(retaken)));
        };
        match std::thread::Builder::new().name("rbd-retake".into()).spawn(work) {
            Ok(thread) => self.retake = Some(thread),
            Err(_) => {
                self.io.mailbox().post(Letter::Retaken(Box::new(Retaken::failed(libc::EAGAIN))));
            }
        }
    }

    /// Whether a thread works with record and lock.
    fn is_busy(&self) -> bool {
        let change = self.change.as_ref().is_some_and(|change| change.thread.is_some());
        self.retake.is_some() || self.recording.is_some() || change
    }

    fn order_change(&mut self, token: u64, what: change::Change) {
        self.later.push_back((token, what));
        self.start_change();
    }

    /// Starts to change the image, once there is a handle and nothing else works with record and
    /// lock.
    fn start_change(&mut self) {
        if self.change.is_none() {
            let next = self.later.pop_front();
            self.change = next.map(|(token, what)| Change { token, what, thread: None });
        }
        let busy = self.is_busy() || self.stale || !self.parked.is_empty();
        if !busy
            && self.io.image.is_none()
            && let Some(change) = self.change.take()
        {
            match self.closing {
                true => self.io.complete(change.token, Err(IoError::Errno(libc::EAGAIN))),
                // A handle is needed first.
                false => (self.change, self.stale) = (Some(change), true),
            }
            return;
        }
        let (Some(change), Some(held), Some(image)) =
            (&mut self.change, &self.held, &self.io.image)
        else {
            return;
        };
        if busy {
            return;
        }
        let (claim, image, what) = (held.claim.clone(), Arc::clone(image), change.what.clone());
        let mailbox = Arc::clone(self.io.mailbox());
        let work = move || {
            let outcome = change::change(&claim, &image, &what);
            drop((claim, image));
            mailbox.post(Letter::Changed(outcome));
        };
        match std::thread::Builder::new().name("rbd-change".into()).spawn(work) {
            Ok(thread) => change.thread = Some(thread),
            Err(_) => {
                let token = change.token;
                self.change = None;
                self.io.complete(token, Err(IoError::Errno(libc::EAGAIN)));
            }
        }
    }

    /// Ends a change of the image, or lets it wait for a handle that can write.
    fn changed(
        &mut self,
        outcome: Result<(), IoError>,
        done: &mut dyn FnMut(u64, Result<(), IoError>),
    ) {
        let change = self.change.as_mut().expect("the image was being changed");
        if let Some(thread) = change.thread.take() {
            let _ = thread.join();
        }
        self.fenced |= outcome == Err(IoError::Fenced);
        if outcome == Err(IoError::Errno(libc::EROFS))
            && self.retakes < RETAKES_MAX
            && !self.closing
        {
            self.stale = true;
            return;
        }
        if let (Ok(()), &change::Change::Size(size_bytes)) = (outcome, &change.what) {
            self.size_bytes = size_bytes;
            self.io.set_size(size_bytes);
        }
        done(change.token, outcome);
        self.change = None;
        self.retakes = 0;
    }

    /// Queues a change of the record, and starts it if nothing else depends on the record.
    fn order_record(&mut self, token: u64, change: changes::Change) {
        self.changes.order(token, change);
        self.start_record();
    }

    /// Starts to change the record, once nothing else depends on it.
    fn start_record(&mut self) {
        let Some(held) = self.held.as_ref().filter(|_| !self.is_busy()) else { return };
        if self.fenced {
            self.changes.refuse_all(IoError::Fenced);
        }
        if let Some(change) = self.changes.start(&held.claim.record) {
            let (claim, known) = (held.claim.clone(), held.owner.clone());
            let mailbox = Arc::clone(self.io.mailbox());
            let work = move || {
                let outcome = match change {
                    changes::Change::Disown => claim::disown(&claim),
                    changes::Change::Peer(peer) => peer::name(&claim, &known, peer.as_ref()),
                };
                drop(claim);
                mailbox.post(Letter::Recorded(Box::new(outcome)));
            };
            match std::thread::Builder::new().name("rbd-record".into()).spawn(work) {
                Ok(thread) => self.recording = Some(thread),
                Err(_) => self.changes.finish(Err(IoError::Errno(libc::EAGAIN)), false),
            }
        }
        if self.changes.has_ended() {
            self.io.mailbox().wake();
        }
    }

    /// Takes the outcome of a change of the record.
    fn recorded(&mut self, outcome: Result<(OwnerObject, Ownership), BackendError>) {
        if let Some(thread) = self.recording.take() {
            let _ = thread.join();
        }
        let result = outcome.map_err(|error| {
            tracing::warn!("{error}");
            error.errno()
        });
        let result = result.map(|(owner, record)| {
            if let Some(held) = &mut self.held {
                (held.owner, held.claim.record) = (owner, record);
            }
        });
        self.fenced |= result == Err(IoError::Fenced);
        self.changes.finish(result, true);
    }

    /// Waits until nothing is in flight, and drops the outcomes.
    pub(super) fn quiesce(&mut self) {
        self.closing = true;
        while self.io.inflight() > 0
            || self.retake.is_some()
            || self.change.is_some()
            || !self.later.is_empty()
            || !self.changes.is_idle()
            || self.redo.as_ref().is_some_and(|redo| redo.in_flight() > 0)
        {
            mailbox::wait_readable(self.io.event_fd(), 1000);
            self.completions(&mut |_, _| {});
        }
    }
}

impl Backend for RbdBackend {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_only(&self) -> bool {
        self.held.is_none()
    }

    unsafe fn submit(&mut self, token: u64, transfer: Transfer) {
        let writes =
            !matches!(transfer, Transfer::Read { .. } | Transfer::Flush | Transfer::Disown);
        let superseded =
            self.held.as_ref().is_none_or(|held| held.claim.record.superseded.is_some());
        if transfer == Transfer::Disown && !self.fenced {
            if superseded {
                return self.io.complete(token, Ok(()));
            }
            self.order_record(token, changes::Change::Disown);
        } else if self.fenced {
            self.io.complete(token, Err(IoError::Fenced));
        } else if self.read_only() && writes {
            self.io.complete(token, Err(IoError::Errno(libc::EROFS)));
        } else if let Transfer::Snapshot { ptr, len } = transfer {
            // SAFETY: the caller vouches for `len` bytes at `ptr`.
            let name = unsafe { std::slice::from_raw_parts(ptr, len) };
            let change = match name {
                [] => change::Change::MirrorSnapshot,
                name => change::Change::Snapshot(String::from_utf8_lossy(name).into_owned()),
            };
            self.order_change(token, change);
        } else if let Transfer::Resize { size_bytes } = transfer {
            self.order_change(token, change::Change::Size(size_bytes));
        } else if transfer.is_redo() {
            match &mut self.redo {
                Some(redo) => redo.submit(token, transfer),
                None => self.io.complete(token, Err(IoError::Errno(libc::ENOTSUP))),
            }
        } else {
            // The handle is replaced when nothing uses it any more. Reads, which the handle still
            // serves, wait too; otherwise they would keep it in use for as long as they overlap.
            let hold = !self.parked.is_empty() || self.stale;
            // SAFETY: the caller's promise is passed on.
            let held = unsafe { self.io.submit(token, transfer, hold) };
            self.parked.extend(held);
        }
    }

    fn set_peer(&mut self, token: u64, peer: Option<Peer>) {
        if self.held.is_some() {
            return self.order_record(token, changes::Change::Peer(peer));
        }
        self.changes.refuse(token, IoError::Errno(libc::EROFS));
        self.io.mailbox().wake();
    }

    fn change_snapshot(
        &mut self,
        token: u64,
        name: &str,
        change: SnapshotChange,
    ) -> Result<(), IoError> {
        if self.fenced {
            return Err(IoError::Fenced);
        }
        if self.held.is_none() {
            return Err(IoError::Errno(libc::EROFS));
        }
        self.order_change(token, change::Change::OfSnapshot(change, name.to_owned()));
        Ok(())
    }

    fn event_fd(&self) -> RawFd {
        self.io.event_fd()
    }

    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        let mailbox = Arc::clone(self.io.mailbox());
        mailbox.drain(|letter| match letter {
            Letter::Done(index, result) => self.settle(index, result, done),
            Letter::Retaken(retaken) => self.unpark(*retaken, done),
            Letter::Recorded(outcome) => self.recorded(*outcome),
            Letter::Changed(outcome) => self.changed(outcome, done),
        });
        for (token, result) in self.io.ready() {
            done(token, result);
        }
        if let Some(redo) = &mut self.redo {
            let fenced = &mut self.fenced;
            redo.completions(&mut |token, result| {
                *fenced |= result == Err(IoError::Fenced);
                done(token, result);
            });
        }
        self.changes.completions(done);
        self.start_record();
        self.start_retake();
        self.start_change();
    }

    fn attachment(&self) -> Vec<u8> {
        self.attachment.clone()
    }

    fn close(mut self: Box<Self>, how: Release) -> Result<(), BackendError> {
        self.quiesce();
        let Some(Held { mut claim, mut owner, .. }) = self.held.take() else { return Ok(()) };
        if self.fenced {
            return Err(BackendError::Fenced { what: self.site.place.what.clone() });
        }
        if self.changes.is_unsure() || how.clean && claim.record.peer.is_some() {
            (owner, claim.record) = peer::before_release(&claim, &owner, how.clean)?;
        }
        // Without a handle, an attempt to replace it has failed, and the lock was released.
        let image = self.io.image.take();
        self.redo = None;
        let site = &self.site;
        let Site { place, pool, .. } = site;
        let failed = |action| site.failed(action);
        if let Some(image) = &image {
            image.flush().map_err(failed("flush the image"))?;
        }
        if how.clean {
            // Done before another client may write: a redo would take the image back to before that
            // write.
            group_redo::clear(&place.what, &site.shelf(&claim.id)?, claim.record.generation)?;
        }
        let header = &claim.header;
        let guard_failed = || failed("change the guard of the image");
        let read_locker = || pool.locker(header).map_err(failed("read the image's lock"));
        let mut alone = claim.guarded;
        if !how.clean && !claim.guarded {
            // The guard is set only until the lock is released. For longer it would be in the way
            // of mirroring.
            guard::set(pool, header).map_err(guard_failed())?;
            // An attempt to do so after a change of the image may have failed.
            forbid::set(pool, header).map_err(guard_failed())?;
            let ours = |address: &String| address::same(address, &claim.address);
            // A client that has opened the image before waits for the lock.
            let others = |image: &Arc<Image>| image.watchers().map(|found| found.iter().all(ours));
            let nobody_waits =
                image.as_ref().map(others).transpose().map_err(failed("list who has it open"))?;
            alone = nobody_waits == Some(true)
                && read_locker()?.is_some_and(|locker| ours(&locker.address));
        }
        // Closing releases the lock, in whatever state librbd has it.
        drop(image);
        // The version that this change makes is the proof for the next open: while the guard was
        // set no client could write, and a client that takes the lock after it changes the version.
        let version = match (how.clean, claim.guarded) {
            (true, _) => {
                forbid::lift(pool, header, None).map_err(guard_failed())?;
                guard::free(pool, header)
            }
            (false, true) => guard::set(pool, header),
            (false, false) => guard::lift(pool, header, None).or_else(|_| {
                // Another client has the lock already.
                alone = false;
                guard::pause(pool, header)
            }),
        };
        let version = version.map_err(guard_failed())?;
        // Without a guard, another client could have written between the lock's release and the
        // version.
        let stamp = (alone && read_locker()?.is_none()).then_some(ImageStamp::Header { version });
        owner.swap(pool, &claim.record.released(how, stamp))
    }
}

impl Drop for RbdBackend {
    fn drop(&mut self) {
        // librbd uses the transfers' memory until they complete.
        self.quiesce();
    }
}
