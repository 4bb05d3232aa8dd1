//! `nbd:`: an export of an NBD server, so that whatever nbdkit or qemu-nbd opens can be cached.
//!
//! One connection carries many requests in flight, through the codec of `tidepool-nbd`. When the
//! connection breaks, the backend connects again; see `link.rs`. The server knows no owner: lock
//! and record are files of this host; see `owner.rs`.

mod check;
mod holes;
mod link;
mod outgoing;
mod owner;
mod place;
mod slots;

use crate::api::{
    Backend, INFLIGHT_MAX, Layout, OpenOptions, Opened, Peer, Release, TakeOver, Transfer,
};
use crate::error::BackendError;
use crate::mailbox;
use crate::record::{Continuity, OwnerState, Ownership};
use crate::redo::Remains;
use crate::sidecar::{FileShelf, Lock, Sidecar};
use link::{Held, Letter, Link, Phase, Shared};
use place::{Place, Terms};
use slots::{Order, Work};
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use tidepool_engine::api::IoError;
use tidepool_nbd::NbdUri;

pub(crate) use check::check;

struct NbdBackend {
    place: Place,
    size_bytes: u64,
    read_only: bool,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// Transfers whose outcome is not reported yet.
    inflight: usize,
    /// Token of the change of the ownership record that is under way; it is no transfer.
    naming: Option<u64>,
    /// Losses of completed writes that the submitter has learnt of, by a flush that failed.
    told: u64,
    /// Dropped last: the lock is held until nothing touches the export any more.
    _lock: Option<Lock>,
}

/// Opens an export. The ownership is taken last, so that no later failure can leave it behind.
pub(crate) fn open(uri: &NbdUri, options: &OpenOptions) -> Result<Opened, BackendError> {
    let place = Place::new(uri);
    let (stream, negotiated) = place.connect()?;
    let terms = Terms::of(&place, &negotiated)?;
    terms.check_writable(&place, options)?;
    let sidecar = owner::sidecar(uri, options.state_dir.as_deref());
    let lock = sidecar.lock(&place.what, options.read_only)?;
    let connection = (stream, negotiated);
    // Where the export is opened for reading only, other clients may write what is a hole now.
    let (own, connection) = match options.read_only {
        true => (None, connection),
        false => holes::own_objects(&place, connection, &terms)?,
    };
    let failed = |e: std::io::Error| BackendError::io(&place.what, "set up its transfers", e);
    let shared = Arc::new(Shared::new().map_err(|e| failed(e.into()))?);
    let thread = {
        let (place, shared, writable) = (place.clone(), Arc::clone(&shared), !options.read_only);
        let work = move || Link::new(place, &shared, connection, terms, writable).run();
        std::thread::Builder::new().name("nbd".into()).spawn(work).map_err(failed)?
    };
    let backend = NbdBackend {
        place,
        size_bytes: terms.size_bytes,
        read_only: options.read_only,
        shared,
        thread: Some(thread),
        inflight: 0,
        naming: None,
        told: 0,
        _lock: lock,
    };
    let (generation, continuity) = backend.take(sidecar, options)?;
    let Continuity { proven, reason, .. } = continuity;
    Ok(Opened {
        backend: Box::new(backend),
        generation,
        keep_clean: proven,
        reason,
        layout: Layout { own, parent: None },
        snapshot: None,
        notes: Vec::new(),
    })
}

/// An export's name in messages, its ownership record, and a place for a redo. An export has no
/// redo, so nothing is found there.
pub(crate) fn look(uri: &NbdUri, state_dir: Option<&Path>) -> Result<Remains, BackendError> {
    let sidecar = owner::sidecar(uri, state_dir);
    Ok((uri.to_string(), sidecar.read()?, Box::new(FileShelf::new(&sidecar))))
}

/// Gives up what a lost cache holds; see [`crate::abandon`]. The server need not run.
pub(crate) fn abandon(
    uri: &NbdUri,
    state_dir: Option<&Path>,
) -> Result<Option<Ownership>, BackendError> {
    let sidecar = owner::sidecar(uri, state_dir);
    let _lock = sidecar.lock(&uri.to_string(), false)?;
    let Some(before) = sidecar.read()?.filter(|record| record.state != OwnerState::Clean) else {
        return Ok(None);
    };
    sidecar.write(&before.abandoned())?;
    Ok(Some(before))
}

/// Makes an export the peer's; see [`crate::take_over`]. The server need not run.
pub(crate) fn take_over(uri: &NbdUri, how: &TakeOver) -> Result<Ownership, BackendError> {
    let (what, sidecar) = (uri.to_string(), owner::sidecar(uri, how.state_dir.as_deref()));
    let _lock = sidecar.lock(&what, false)?;
    sidecar.take_over(&what, how)
}

impl NbdBackend {
    /// Checks and takes the ownership of a locked export.
    fn take(
        &self,
        sidecar: Sidecar,
        options: &OpenOptions,
    ) -> Result<(u64, Continuity), BackendError> {
        let what = &self.place.what;
        let record = sidecar.read()?;
        let continuity = owner::check(what, record.as_ref(), options)?;
        if self.read_only {
            return Ok((
                0,
                Continuity::unproven("the export is opened read-only, without ownership"),
            ));
        }
        let record = Ownership::taken(record.as_ref(), options);
        let generation = record.generation;
        sidecar.write(&record)?;
        *self.shared.held() = Some(Held { sidecar, record, unsure: false });
        Ok((generation, continuity))
    }

    /// Completes a transfer without the thread.
    fn complete(&mut self, token: u64, result: Result<(), IoError>) {
        self.shared.letters.post(Letter { token, result, losses: 0 });
    }

    fn order(&mut self, token: u64, work: Work, offset: u64, len: u64) {
        let taken = self.shared.orders.post(Order { token, work, offset, len });
        debug_assert!(taken, "there is room for an order of every transfer");
    }

    /// Waits until nothing is in flight, and drops the outcomes.
    fn quiesce(&mut self) {
        self.shared.set_phase(Phase::Closing);
        while self.inflight > 0 || self.naming.is_some() {
            mailbox::wait_readable(self.event_fd(), 1000);
            self.completions(&mut |_, _| {});
        }
    }

    /// Flushes, and waits for the outcome.
    fn flush(&mut self) -> Result<(), IoError> {
        self.inflight += 1;
        self.order(u64::MAX, Work::Flush { told: self.told }, 0, 1);
        let mut outcome = None;
        while outcome.is_none() {
            mailbox::wait_readable(self.event_fd(), 1000);
            self.completions(&mut |_, result| outcome = Some(result));
        }
        outcome.unwrap_or(Ok(()))
    }

    /// Ends the thread. Nothing may be in flight.
    fn end(&mut self) {
        self.shared.set_phase(Phase::Ended);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Backend for NbdBackend {
    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn read_only(&self) -> bool {
        self.read_only
    }

    unsafe fn submit(&mut self, token: u64, transfer: Transfer) {
        assert!(self.inflight < INFLIGHT_MAX, "more than {INFLIGHT_MAX} transfers in flight");
        self.inflight += 1;
        if transfer.is_redo()
            || matches!(transfer, Transfer::Snapshot { .. } | Transfer::Resize { .. })
        {
            // There is no place beside an export, and NBD has no request for these.
            return self.complete(token, Err(IoError::Errno(libc::ENOTSUP)));
        }
        // SAFETY: as the caller vouches.
        let (work, offset, len) = match unsafe { transfer.clip(self.size_bytes) } {
            Transfer::Read { offset, ptr, len } => (Work::Read { ptr }, offset, len as u64),
            Transfer::Write { offset, ptr, len } => (Work::Write { ptr }, offset, len as u64),
            Transfer::Discard { offset, len } => (Work::Zeroes { keep: false }, offset, len),
            Transfer::WriteZeroes { offset, len } => (Work::Zeroes { keep: true }, offset, len),
            Transfer::Flush if self.read_only => return self.complete(token, Ok(())),
            Transfer::Flush => (Work::Flush { told: self.told }, 0, 1),
            Transfer::Disown => (Work::Disown, 0, 1),
            _ => unreachable!("an export has no redo and no snapshots"),
        };
        if self.read_only && work.writes() {
            return self.complete(token, Err(IoError::Errno(libc::EROFS)));
        }
        if len == 0 {
            return self.complete(token, Ok(()));
        }
        self.order(token, work, offset, len);
    }

    fn set_peer(&mut self, token: u64, peer: Option<Peer>) {
        assert!(self.naming.is_none(), "one peer is named at a time");
        self.naming = Some(token);
        if self.read_only {
            return self.complete(token, Err(IoError::Errno(libc::EROFS)));
        }
        *self.shared.peer() = peer;
        self.order(token, Work::Peer, 0, 1);
    }

    fn event_fd(&self) -> RawFd {
        self.shared.letters.event_fd()
    }

    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        let (inflight, told, naming) = (&mut self.inflight, &mut self.told, &mut self.naming);
        self.shared.letters.drain(|Letter { token, result, losses }| {
            if *naming == Some(token) {
                *naming = None;
                return done(token, result);
            }
            *inflight -= 1;
            if result.is_err() {
                *told = losses.max(*told);
            }
            done(token, result);
        });
    }

    fn attachment(&self) -> Vec<u8> {
        Vec::new()
    }

    fn close(mut self: Box<Self>, how: Release) -> Result<(), BackendError> {
        self.quiesce();
        if self.read_only {
            return Ok(());
        }
        let flushed = self.flush();
        self.end();
        if flushed.is_err() {
            return Err(BackendError::Unavailable {
                what: self.place.what.clone(),
                why: "its server has not confirmed that everything is on stable media; it stays owned by this cache".into(),
            });
        }
        let Some(Held { sidecar, mut record, unsure }) = self.shared.held().take() else {
            return Ok(());
        };
        if unsure && let Some(found) = sidecar.read()?.filter(|found| found.is_of(&record)) {
            record = record.with_peer(found.peer);
        }
        // The lock is released with the backend, after the record says how the export was left.
        sidecar.write(&record.released(how, None))
    }
}

impl Drop for NbdBackend {
    fn drop(&mut self) {
        // The thread uses the transfers' memory until they complete.
        self.quiesce();
        self.end();
    }
}
