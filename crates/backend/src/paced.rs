//! A backend slowed down by the latency of an emulated pool, or stopped by a gate.
//!
//! Operations run on the inner backend at once. Their outcomes are held back until the model says
//! that the pool would have answered. A gate is a file: while it exists, nothing is handed to the
//! inner backend and nothing is reported, as if the backend were stopped. When the file is gone,
//! everything goes on. Gates are for tests.
//!
//! One epoll descriptor covers the inner backend's completions and a timer, so that the caller can
//! wait without a busy loop and without a thread.

use crate::api::{Backend, INFLIGHT_MAX, Peer, Release, Transfer};
use crate::error::BackendError;
use crate::latency::{Kind, Model};
use crate::mailbox;
use crate::uri::Emulation;
use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::PathBuf;
use tidepool_engine::api::IoError;

/// Offset of the redo in an emulated pool: beyond any image.
const REDO_OFFSET: u64 = 1 << 60;
/// Interval at which a closed gate is checked, in nanoseconds.
const GATE_POLL_NS: u64 = 3_000_000;
/// Slot of a change of the ownership record, which is no transfer.
const PEER_SLOT: u16 = INFLIGHT_MAX as u16;

/// An operation between submission and report.
#[derive(Debug, Clone, Copy)]
struct Slot {
    token: u64,
    due_ns: u64,
    /// The outcome; set when the inner backend has completed the operation.
    result: Result<(), IoError>,
}

/// The change of the ownership record that is under way.
enum Naming {
    Idle,
    /// Requested while the gate was closed.
    Waiting(u64, Option<Peer>),
    /// Handed to the inner backend, in [`PEER_SLOT`].
    Started,
}

struct Paced {
    inner: Box<dyn Backend>,
    model: Option<Model>,
    gate: Option<PathBuf>,
    clock: Clock,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Transfers that wait for the gate to open.
    waiting: VecDeque<(u64, Transfer)>,
    naming: Naming,
    /// Operations that the inner backend has completed and that are not reported yet: due time in
    /// nanoseconds, and slot.
    held: BinaryHeap<Reverse<(u64, u16)>>,
}

// SAFETY: the pointers in waiting transfers name memory that the submitter keeps valid whichever
// thread continues them, as the contract of `Backend::submit` says.
unsafe impl Send for Paced {}

/// An epoll descriptor over an inner backend's event descriptor and a timer.
pub(crate) struct Clock {
    epoll: OwnedFd,
    timer: OwnedFd,
}

impl Clock {
    /// A clock for the backend whose event descriptor is `inner_event`.
    ///
    /// # Safety
    /// `inner_event` is an open descriptor.
    pub(crate) unsafe fn new(inner_event: RawFd) -> rustix::io::Result<Clock> {
        let timer = rustix::time::timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // SAFETY: the caller promises an open descriptor; the kernel removes it from the epoll set
        // when it is closed.
        let inner_event = unsafe { BorrowedFd::borrow_raw(inner_event) };
        epoll::add(&epoll, inner_event, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &timer, epoll::EventData::new_u64(1), epoll::EventFlags::IN)?;
        Ok(Clock { epoll, timer })
    }
}

/// Adds the latency of a pool, or a gate, to a backend. `clock` was made for the backend's event
/// descriptor.
pub(crate) fn wrap(
    inner: Box<dyn Backend>,
    clock: Clock,
    emulate: Option<Emulation>,
    gate: Option<PathBuf>,
) -> Box<dyn Backend> {
    let idle = Slot { token: 0, due_ns: 0, result: Ok(()) };
    Box::new(Paced {
        inner,
        model: emulate.map(Model::new),
        gate,
        clock,
        slots: vec![idle; INFLIGHT_MAX + 1].into_boxed_slice(),
        free: (0..INFLIGHT_MAX as u16).rev().collect(),
        waiting: VecDeque::with_capacity(INFLIGHT_MAX),
        naming: Naming::Idle,
        held: BinaryHeap::with_capacity(INFLIGHT_MAX + 1),
    })
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Paced {
    /// Whether a request waits for the gate to open.
    fn is_waiting(&self) -> bool {
        !self.waiting.is_empty() || matches!(self.naming, Naming::Waiting(..))
    }

    fn is_idle(&self) -> bool {
        self.free.len() == INFLIGHT_MAX
            && self.waiting.is_empty()
            && matches!(self.naming, Naming::Idle)
    }

    fn gate_closed(&self) -> bool {
        self.gate.as_ref().is_some_and(|gate| gate.exists())
    }

    /// Hands a transfer to the inner backend.
    ///
    /// # Safety
    /// As for [`Backend::submit`].
    unsafe fn start(&mut self, token: u64, transfer: Transfer) {
        let (kind, offset, len) = match transfer {
            Transfer::Read { offset, len, .. } => (Kind::Read, offset, len as u64),
            Transfer::Write { offset, len, .. } => (Kind::Write, offset, len as u64),
            Transfer::Discard { offset, len } => (Kind::Trim, offset, len),
            Transfer::WriteZeroes { offset, len } => (Kind::Trim, offset, len),
            Transfer::Flush
            | Transfer::Disown
            | Transfer::Snapshot { .. }
            | Transfer::Resize { .. } => (Kind::Flush, 0, 0),
            // The redo is beside the image, one frame behind the other.
            Transfer::RedoWrite { frame, len, .. } => {
                (Kind::Write, REDO_OFFSET + u64::from(frame) * len as u64, len as u64)
            }
            Transfer::RedoCommit { .. } | Transfer::RedoTrim { .. } | Transfer::RedoNote { .. } => {
                (Kind::Write, REDO_OFFSET / 2, 4096)
            }
        };
        let due_ns =
            self.model.as_mut().map_or(0, |model| model.done_ns(now_ns(), kind, offset, len));
        let index = self.free.pop().expect("a free slot, as checked by submit");
        self.slots[usize::from(index)] = Slot { token, due_ns, result: Ok(()) };
        // SAFETY: the caller's promise is passed on.
        unsafe { self.inner.submit(u64::from(index), transfer) }
    }

    /// Hands a change of the ownership record to the inner backend.
    fn name(&mut self, token: u64, peer: Option<Peer>) {
        let done_ns =
            |model: &mut Model| model.done_ns(now_ns(), Kind::Write, REDO_OFFSET / 2, 4096);
        let due_ns = self.model.as_mut().map_or(0, done_ns);
        self.slots[usize::from(PEER_SLOT)] = Slot { token, due_ns, result: Ok(()) };
        self.naming = Naming::Started;
        self.inner.set_peer(u64::from(PEER_SLOT), peer);
    }

    /// Sets the timer to the time of the next report, or of the next look at the gate, if there is
    /// any.
    fn arm(&self, gate_closed: bool, now_ns: u64) {
        let busy = !self.is_idle();
        let at_ns = match (gate_closed && busy, self.held.peek()) {
            (true, _) => now_ns + GATE_POLL_NS,
            // The gate has opened: the requests that waited for it are next.
            (false, _) if self.is_waiting() => now_ns.max(1),
            (false, Some(Reverse((due_ns, _)))) => (*due_ns).max(1),
            (false, None) => 0,
        };
        let value = Timespec {
            tv_sec: (at_ns / 1_000_000_000) as i64,
            tv_nsec: (at_ns % 1_000_000_000) as i64,
        };
        let spec = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        rustix::time::timerfd_settime(&self.clock.timer, TimerfdTimerFlags::ABSTIME, &spec)
            .expect("a valid time for our own timer");
    }
}

impl Backend for Paced {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read_only(&self) -> bool {
        self.inner.read_only()
    }

    unsafe fn submit(&mut self, token: u64, transfer: Transfer) {
        assert!(
            self.waiting.len() < self.free.len(),
            "more than {INFLIGHT_MAX} transfers in flight"
        );
        let closed = self.gate_closed();
        if closed || !self.waiting.is_empty() {
            self.waiting.push_back((token, transfer));
            self.arm(closed, now_ns());
            return;
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { self.start(token, transfer) }
    }

    fn set_peer(&mut self, token: u64, peer: Option<Peer>) {
        assert!(matches!(self.naming, Naming::Idle), "one peer is named at a time");
        if self.gate_closed() {
            self.naming = Naming::Waiting(token, peer);
            return self.arm(true, now_ns());
        }
        self.name(token, peer);
    }

    fn event_fd(&self) -> RawFd {
        self.clock.epoll.as_raw_fd()
    }

    fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        mailbox::reset(&self.clock.timer);
        let closed = self.gate_closed();
        let (slots, held) = (&mut self.slots, &mut self.held);
        self.inner.completions(&mut |index, result| {
            let slot = &mut slots[index as usize];
            slot.result = result;
            held.push(Reverse((slot.due_ns, index as u16)));
        });
        let now_ns = now_ns();
        if !closed {
            while let Some((token, transfer)) = self.waiting.pop_front() {
                // SAFETY: the promise was made to `submit`, and the token has not come back yet.
                unsafe { self.start(token, transfer) }
            }
            if let Naming::Waiting(token, peer) = &mut self.naming {
                let (token, peer) = (*token, peer.take());
                self.name(token, peer);
            }
            while let Some(&Reverse((due_ns, index))) = self.held.peek()
                && due_ns <= now_ns
            {
                self.held.pop();
                let Slot { token, result, .. } = self.slots[usize::from(index)];
                match index {
                    PEER_SLOT => self.naming = Naming::Idle,
                    _ => self.free.push(index),
                }
                done(token, result);
            }
        }
        self.arm(closed, now_ns);
    }

    fn attachment(&self) -> Vec<u8> {
        self.inner.attachment()
    }

    fn close(mut self: Box<Self>, how: Release) -> Result<(), BackendError> {
        while !self.is_idle() {
            mailbox::wait_readable(self.clock.epoll.as_raw_fd(), 1000);
            self.completions(&mut |_, _| {});
        }
        self.inner.close(how)
    }
}
