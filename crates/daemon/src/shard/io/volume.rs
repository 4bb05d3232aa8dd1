//! The volumes of a shard, as the reactor knows them: backend, latencies, unaligned writes.

use crate::shard::api::ShardError;
use crate::shard::control::command::Answer;
use crate::shard::control::stats::{LATENCY_NS_MAX, LatencyHistogram};
use crate::shard::front::coming::Coming;
use crate::shard::front::gate::Gate;
use crate::shard::front::guests::Expected;
use crate::volume::is_parent_name;
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use tidepool_backend::{Backend, INFLIGHT_MAX, Peer, SnapshotChange, Transfer};
use tidepool_engine::api::{BackendOp, ControlError, IoError, Nanos, Token, VOLUMES_MAX, VolumeId};
use tidepool_engine::mem::{Arena, Buf};
use tidepool_nbd::{Export, Exports};

/// Which histogram a request belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::shard) enum Kind {
    Read,
    Write,
    Flush,
}

/// How long an error of the backend is told. Whatever failed is tried again well within it, and
/// what succeeds meanwhile, such as reads from a full pool, says nothing about it.
const ERROR_TOLD_NS: Nanos = 2_000_000_000;

/// A transfer that the backend has not answered.
struct Flight {
    since: Nanos,
    /// An operator has asked for it, and is told how it ends: it says nothing about the backend.
    asked: bool,
}

pub(in crate::shard) struct Volume {
    pub(in crate::shard) id: VolumeId,
    pub(in crate::shard) name: String,
    pub(in crate::shard) size_bytes: u64,
    pub(in crate::shard) read_only: bool,
    /// Clients are let in.
    pub(in crate::shard) serving: bool,
    pub(in crate::shard) latency: [LatencyHistogram; 3],
    pub(in crate::shard) connections: u32,
    pub(in crate::shard) gate: Gate,
    backend: Box<dyn Backend>,
    /// The transfers that the backend has not answered.
    in_flight: HashMap<u64, Flight>,
    /// The last error of the backend, and when it came.
    error: Option<(IoError, Nanos)>,
    /// What the core wants beyond the backend's limit, in order.
    waiting: VecDeque<(Token, BackendOp)>,
    /// Names of snapshots that are to be taken, by their control operation.
    snapshots: Vec<(u64, String)>,
    /// Who is told how the change of a snapshot ends that is under way.
    snapshot_change: Option<Answer<()>>,
    /// The ring polls the backend's descriptor.
    pub(in crate::shard) polled: bool,
    /// Another host may own the image since: what is read here after that may be the past. `None`
    /// where that cannot be.
    pub(in crate::shard) leased_until: Option<Nanos>,
    /// The ownership record is being changed, and how the last change has ended.
    record_in_flight: bool,
    pub(in crate::shard) record_written: Option<Result<(), IoError>>,
}

/// The token of a change of the ownership record, which is not the core's: it has no such one.
const RECORD_TOKEN: u64 = u64::MAX;
/// The token of a change of a snapshot, of which the core knows nothing either.
const SNAPSHOT_TOKEN: u64 = u64::MAX - 1;

impl Volume {
    pub(in crate::shard) fn new(
        id: VolumeId,
        name: String,
        size_bytes: u64,
        read_only: bool,
        backend: Box<dyn Backend>,
    ) -> Volume {
        let histogram = || {
            LatencyHistogram::new_with_bounds(1_000, LATENCY_NS_MAX, 2)
                .expect("bounds that a histogram can have")
        };
        Volume {
            id,
            name,
            size_bytes,
            read_only,
            serving: false,
            latency: [histogram(), histogram(), histogram()],
            connections: 0,
            gate: Gate::of(id),
            backend,
            // Twice, so that it never allocates again.
            in_flight: HashMap::with_capacity(2 * INFLIGHT_MAX),
            error: None,
            waiting: VecDeque::with_capacity(INFLIGHT_MAX),
            snapshots: Vec::new(),
            snapshot_change: None,
            polled: false,
            leased_until: None,
            record_in_flight: false,
            record_written: None,
        }
    }

    pub(in crate::shard) fn record(&mut self, kind: Kind, latency_ns: Nanos) {
        self.latency[kind as usize].saturating_record(latency_ns);
    }

    pub(in crate::shard) fn event_fd(&self) -> std::os::fd::RawFd {
        self.backend.event_fd()
    }

    /// Transfers that the backend has not answered yet.
    pub(in crate::shard) fn in_flight(&self) -> usize {
        self.in_flight.len() + self.waiting.len() + usize::from(self.record_in_flight)
    }

    /// For how long the backend has not answered the transfer that waits longest.
    pub(in crate::shard) fn backend_wait_ns(&self, now: Nanos) -> Nanos {
        let oldest = self.in_flight.values().map(|flight| flight.since).min();
        oldest.map_or(0, |since| now.saturating_sub(since))
    }

    /// An error that the backend has reported just now.
    pub(in crate::shard) fn backend_error(&self, now: Nanos) -> Option<IoError> {
        let (error, at) = self.error?;
        (now.saturating_sub(at) < ERROR_TOLD_NS).then_some(error)
    }

    /// Has the ownership record say who holds the other copy; [`Volume::record_written`] tells when
    /// it does.
    pub(in crate::shard) fn set_peer(&mut self, peer: Option<Peer>) {
        assert!(!self.record_in_flight, "one change of the record at a time");
        self.record_in_flight = true;
        self.backend.set_peer(RECORD_TOKEN, peer);
    }

    /// What is read here is the volume's content now. Looked at when a read has come, with the
    /// clock of that moment: whatever another host acknowledges later is not older than the read.
    pub(in crate::shard) fn is_leased(&self) -> bool {
        self.leased_until.is_none_or(|until| tidepool_driver::now() <= until)
    }

    /// A change of the ownership record is under way.
    pub(in crate::shard) fn changes_record(&self) -> bool {
        self.record_in_flight
    }

    pub(in crate::shard) fn into_backend(self) -> Box<dyn Backend> {
        self.backend
    }

    /// Remembers what the snapshot of an operation is to be called.
    pub(in crate::shard) fn name_snapshot(&mut self, control: u64, name: String) {
        self.snapshots.push((control, name));
    }

    /// The operation has ended.
    pub(in crate::shard) fn forget_snapshot(&mut self, control: u64) {
        self.snapshots.retain(|(of, _)| *of != control);
    }

    /// Does something with a snapshot that the image has; `answer` tells how that ends.
    pub(in crate::shard) fn change_snapshot(
        &mut self,
        name: &str,
        change: SnapshotChange,
        answer: Answer<()>,
    ) {
        let begun = match &self.snapshot_change {
            Some(_) => Err(ControlError::Busy),
            None => self
                .backend
                .change_snapshot(SNAPSHOT_TOKEN, name, change)
                .map_err(ControlError::Backend),
        };
        match begun {
            Ok(()) => self.snapshot_change = Some(answer),
            Err(error) => drop(answer.send(Err(error.into()))),
        }
    }

    /// Executes a backend effect of the core.
    pub(in crate::shard) fn transfer(
        &mut self,
        now: Nanos,
        arena: &Arena,
        token: Token,
        op: BackendOp,
    ) {
        if self.in_flight.len() == INFLIGHT_MAX {
            self.waiting.push_back((token, op));
        } else {
            self.submit(now, arena, token, op);
        }
    }

    fn submit(&mut self, now: Nanos, arena: &Arena, token: Token, op: BackendOp) {
        let asked = matches!(op, BackendOp::Snapshot { .. } | BackendOp::Resize { .. });
        let memory = |buf: Buf| {
            assert!(
                buf.offset as usize + buf.len as usize <= arena.len_bytes(),
                "{buf:?} is outside of the arena"
            );
            arena.as_ptr().wrapping_add(buf.offset as usize)
        };
        let transfer = match op {
            BackendOp::Read { offset, buf } => {
                Transfer::Read { offset, ptr: memory(buf), len: buf.len as usize }
            }
            BackendOp::Write { offset, buf } => {
                Transfer::Write { offset, ptr: memory(buf), len: buf.len as usize }
            }
            BackendOp::Discard { offset, len } => Transfer::Discard { offset, len },
            BackendOp::WriteZeroes { offset, len } => Transfer::WriteZeroes { offset, len },
            BackendOp::Flush => Transfer::Flush,
            BackendOp::Disown => Transfer::Disown,
            BackendOp::RedoWrite { group, frame, buf } => {
                Transfer::RedoWrite { group, frame, ptr: memory(buf), len: buf.len as usize }
            }
            BackendOp::RedoCommit { first, group, frames, sequence, cut_at } => {
                // As old as it is now, not when the core decided: it may have waited for others in
                // between.
                let age = Duration::from_nanos(tidepool_driver::now().saturating_sub(cut_at));
                Transfer::RedoCommit { first, group, frames, sequence, age }
            }
            BackendOp::RedoTrim { first } => Transfer::RedoTrim { first },
            BackendOp::RedoNote { sequence, durable, bytes, bytes_max } => {
                Transfer::RedoNote { sequence, durable, bytes, bytes_max }
            }
            BackendOp::Resize { size_bytes } => Transfer::Resize { size_bytes },
            BackendOp::Snapshot { control } => {
                let name = self.snapshots.iter().find(|(of, _)| *of == control);
                let (_, name) = name.expect("a snapshot has a name until its operation ends");
                Transfer::Snapshot { ptr: name.as_ptr(), len: name.len() }
            }
        };
        self.in_flight.insert(token.0, Flight { since: now, asked });
        // SAFETY: the core leaves the buffer of an effect alone until it is told that it is done,
        // and the arena outlives the backend's transfers (see `Reactor::stop`).
        unsafe { self.backend.submit(token.0, transfer) };
    }

    /// Fetches what the backend has completed and starts what waited.
    pub(in crate::shard) fn completions(
        &mut self,
        now: Nanos,
        arena: &Arena,
        done: &mut Vec<(Token, Result<(), IoError>)>,
    ) {
        let (in_flight, last_error) = (&mut self.in_flight, &mut self.error);
        let (record_in_flight, record_written) =
            (&mut self.record_in_flight, &mut self.record_written);
        let snapshot_change = &mut self.snapshot_change;
        self.backend.completions(&mut |token, result| {
            if token == RECORD_TOKEN {
                *record_in_flight = false;
                *record_written = Some(result);
                return;
            }
            if token == SNAPSHOT_TOKEN {
                let outcome =
                    result.map_err(|error| ShardError::from(ControlError::Backend(error)));
                if let Some(answer) = snapshot_change.take() {
                    // The caller may have gone.
                    let _ = answer.send(outcome);
                }
                return;
            }
            let flight = in_flight.remove(&token).expect("a backend completes what it was given");
            if let Err(error) = result
                && !flight.asked
            {
                *last_error = Some((error, now));
            }
            done.push((Token(token), result));
        });
        while self.in_flight.len() < INFLIGHT_MAX {
            let Some((token, op)) = self.waiting.pop_front() else { break };
            self.submit(now, arena, token, op);
        }
    }
}

/// The attached volumes by their number.
pub(in crate::shard) struct Volumes(Box<[Option<Volume>]>);

impl Volumes {
    pub(in crate::shard) fn new() -> Volumes {
        Volumes((0..VOLUMES_MAX).map(|_| None).collect())
    }

    pub(in crate::shard) fn insert(&mut self, volume: Volume) {
        let slot = &mut self.0[volume.id.0 as usize];
        assert!(slot.is_none(), "two volumes with number {}", volume.id.0);
        *slot = Some(volume);
    }

    pub(in crate::shard) fn remove(&mut self, id: VolumeId) -> Option<Volume> {
        self.0.get_mut(id.0 as usize)?.take()
    }

    pub(in crate::shard) fn get(&self, id: VolumeId) -> Option<&Volume> {
        self.0.get(id.0 as usize)?.as_ref()
    }

    pub(in crate::shard) fn get_mut(&mut self, id: VolumeId) -> Option<&mut Volume> {
        self.0.get_mut(id.0 as usize)?.as_mut()
    }

    pub(in crate::shard) fn iter(&self) -> impl Iterator<Item = &Volume> {
        self.0.iter().flatten()
    }
}

/// The volumes that one listener offers.
pub(in crate::shard) struct Offer<'a> {
    pub(in crate::shard) volumes: &'a Volumes,
    /// Those whose clients are let in before they are served.
    pub(in crate::shard) expected: &'a [Expected],
    /// Those that are on their way.
    pub(in crate::shard) coming: &'a [Coming],
    /// The client may wait.
    pub(in crate::shard) patient: bool,
    /// The only one, if not all; it is the default export, too.
    pub(in crate::shard) only: Option<&'a str>,
    /// The volume for which the client is to wait.
    pub(in crate::shard) awaited: Cell<Option<&'a str>>,
}

impl<'a> Offer<'a> {
    fn offered(&self) -> impl Iterator<Item = Export<'_>> {
        let is_served = |name: &str| self.volumes.iter().any(|v| v.serving && v.name == name);
        let wanted =
            move |e: &&Expected| !is_served(&e.name) && self.only.is_none_or(|only| only == e.name);
        self.served().chain(self.expected.iter().filter(wanted).map(Expected::export))
    }

    /// Volumes that are on their way, and whether they may be here soon.
    fn coming(&self) -> impl Iterator<Item = &'a Coming> {
        let is_served = |name: &str| self.volumes.iter().any(|v| v.serving && v.name == name);
        let wanted = move |one: &&Coming| {
            !is_parent_name(&one.name)
                && !is_served(&one.name)
                && self.only.is_none_or(|only| only == one.name)
        };
        self.coming.iter().filter(wanted)
    }

    fn served(&self) -> impl Iterator<Item = Export<'_>> {
        let wanted = |v: &&Volume| {
            v.serving && !is_parent_name(&v.name) && self.only.is_none_or(|only| only == v.name)
        };
        self.volumes.iter().filter(wanted).map(|v| Export {
            read_only: v.read_only,
            ..Export::new(u64::from(v.id.0), &v.name, v.size_bytes)
        })
    }
}

impl Exports for Offer<'_> {
    fn find(&self, name: &str) -> Option<Export<'_>> {
        if name.is_empty() {
            // Without a choice there is a default. What is not here yet is no choice where there
            // are others.
            if self.only.is_some() {
                return self.offered().next();
            }
            let mut all = self.served();
            return all.next().filter(|_| all.next().is_none() && self.coming().next().is_none());
        }
        self.offered().find(|export| export.name == name)
    }

    fn is_coming(&self, name: &str) -> bool {
        if !self.patient {
            return false;
        }
        let awaited = if name.is_empty() {
            // The default, if it will be the only one.
            let mut all = self.coming();
            let first = all.next().filter(|_| all.next().is_none());
            first.filter(|one| {
                one.awaited && (self.only.is_some() || self.served().next().is_none())
            })
        } else {
            self.coming().find(|one| one.awaited && one.name == name)
        };
        self.awaited.set(awaited.map(|one| one.name.as_str()));
        awaited.is_some()
    }

    fn list(&self, visit: &mut dyn FnMut(&Export<'_>)) {
        self.offered().for_each(|export| visit(&export));
    }
}
