//! The loop: take completions, hand everything that arrived to the core, execute what it wants,
//! enter the kernel once, begin again. What arrives together is handed over together, so a burst of
//! writes becomes one append.

use crate::shard::control::command::Command;
use crate::shard::control::{Controls, Stopping};
use crate::shard::core::Core;
use crate::shard::front::effort::COMMANDS_MAX;
use crate::shard::front::gate;
use crate::shard::front::guests::Asks;
use crate::shard::io::device::{DeviceOps, Kind};
use crate::shard::limits::{CONNECTIONS_MAX, LISTENERS_MAX, STALL_LOOK_NS};
use crate::shard::net::connection::{Connection, Stall};
use crate::shard::net::listener::Listener;
use crate::shard::net::requests::piece_of;
use crate::shard::pair::replication::{self, ASK_SLOT, Replication};
use crate::shard::pulse::Pulse;
use crate::shard::shared::Shared;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tidepool_driver::{CacheFile, Completion, Ring};
use tidepool_engine::api::{Effect, Event, IoError, Nanos, Token, VolumeId};
use tidepool_engine::mem::{Buf, Slab};
use tidepool_replica::Limits;

/// What a completion belongs to; the upper part of its user data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Source {
    Bell,
    Accept,
    Device,
    Backend,
    Receive,
    Send,
    Cancel,
    LinkReceive,
    LinkSend,
}

/// User data of an operation.
pub(super) fn user(source: Source, slot: u32) -> u64 {
    (source as u64) << 56 | u64::from(slot)
}

fn source_of(user: u64) -> (Source, u32) {
    const SOURCES: [Source; 9] = [
        Source::Bell,
        Source::Accept,
        Source::Device,
        Source::Backend,
        Source::Receive,
        Source::Send,
        Source::Cancel,
        Source::LinkReceive,
        Source::LinkSend,
    ];
    (SOURCES[(user >> 56) as usize], user as u32)
}

/// Connections that wait for something, by what that is; who waits longest comes first.
struct Waiting {
    /// For memory or a gate.
    stalled: VecDeque<u32>,
    /// Until less is trimmed or zeroed.
    ranged: VecDeque<u32>,
    /// Until it is known whose their volume is.
    unleased: VecDeque<u32>,
    /// For a volume that is on its way.
    patient: VecDeque<u32>,
}

impl Waiting {
    fn new() -> Waiting {
        let queue = || VecDeque::with_capacity(CONNECTIONS_MAX);
        Waiting { stalled: queue(), ranged: queue(), unleased: queue(), patient: queue() }
    }

    /// Who waits for this to pass; `None` if that needs no queue.
    fn queue(&mut self, stall: Stall) -> Option<&mut VecDeque<u32>> {
        match stall {
            Stall::Memory | Stall::Gate => Some(&mut self.stalled),
            Stall::Ranges => Some(&mut self.ranged),
            Stall::Lease => Some(&mut self.unleased),
            Stall::Volume => Some(&mut self.patient),
            Stall::Own => None,
        }
    }
}

pub(super) struct Reactor<C> {
    // First, so that the kernel lets go of all memory before it is freed.
    pub(in crate::shard) ring: Ring,
    pub(in crate::shard) limits: Limits,
    pub(in crate::shard) shared: Shared<C>,
    cache: Option<CacheFile>,
    device_ops: DeviceOps,
    pub(in crate::shard) connections: Slab<Box<Connection>>,
    /// Connections to look at before the next entry into the kernel.
    listed: Vec<u32>,
    waiting: Waiting,
    pub(in crate::shard) listeners: Slab<Listener>,
    pub(in crate::shard) controls: Controls,
    pub(in crate::shard) replication: Replication,
    pub(in crate::shard) asks: Asks,
    pub(in crate::shard) stopping: Option<Stopping>,
    commands: mpsc::Receiver<Command>,
    bell: Arc<OwnedFd>,
    pub(in crate::shard) pulse: Arc<Pulse>,
    /// When listeners and handshakes are looked at next.
    alarm: Option<Nanos>,
    /// Reused for what a backend has completed.
    completed: Vec<(Token, Result<(), IoError>)>,
}

impl<C: Core> Reactor<C> {
    pub(super) fn new(
        ring: Ring,
        core: C,
        cache: Option<CacheFile>,
        (commands, bell, pulse): (mpsc::Receiver<Command>, Arc<OwnedFd>, Arc<Pulse>),
        limits: Limits,
    ) -> Reactor<C> {
        let mut reactor = Reactor {
            ring,
            limits,
            shared: Shared::new(core, tidepool_driver::now()),
            cache,
            device_ops: DeviceOps::new(),
            connections: Slab::new(CONNECTIONS_MAX),
            listed: Vec::with_capacity(CONNECTIONS_MAX),
            waiting: Waiting::new(),
            listeners: Slab::new(LISTENERS_MAX),
            controls: Controls::default(),
            replication: Replication::default(),
            asks: Asks::new(),
            stopping: None,
            commands,
            bell,
            pulse,
            alarm: None,
            completed: Vec::with_capacity(tidepool_backend::INFLIGHT_MAX),
        };
        let arena = reactor.shared.core.arena();
        let (ptr, len) = (arena.as_ptr(), arena.len_bytes());
        // SAFETY: the arena belongs to the core, which is dropped after the ring.
        if let Err(error) = unsafe { reactor.ring.register(ptr, len) } {
            tracing::info!(
                "the arena is not registered with the kernel, which costs some speed: {error} (raise the limit of locked memory)"
            );
        }
        // SAFETY: the arena's own memory; what it has is not changed. A core dump is to have no
        // data of guests, as far as that goes.
        unsafe { libc::madvise(ptr.cast(), len, libc::MADV_DONTDUMP) };
        reactor.poll_bell();
        reactor
    }

    fn poll_bell(&mut self) {
        self.ring.poll_readable(user(Source::Bell, 0), self.bell.as_fd());
    }

    /// Runs until a shutdown is complete.
    pub(super) fn run(mut self) {
        loop {
            loop {
                self.settle();
                // Sending may have made room for more.
                if !self.arm() {
                    break;
                }
            }
            if self.is_stopped() {
                return self.stop();
            }
            // Asked before the sleep: afterwards the core only tells what comes next.
            let deadline = self.shared.core.next_deadline();
            // Who has had its part of the round goes on at once, but after the others.
            let is_idle = self.listed.is_empty() && !self.replication.deferred;
            let timeout = if is_idle { self.timeout(deadline) } else { Some(Duration::ZERO) };
            self.ring.enter(timeout);
            self.take_turns();
            self.pulse.beat();
            self.shared.count.rounds += 1;
            self.shared.now = tidepool_driver::now();
            while let Some(completion) = self.ring.next_completion() {
                self.shared.count.completions += 1;
                self.complete(completion);
            }
            self.pass_time(deadline);
        }
    }

    /// Begins a round in which those are first that have not had their turn in the one before.
    fn take_turns(&mut self) {
        let done = self.shared.effort.next_round();
        self.shared.count.round_effort_max = self.shared.count.round_effort_max.max(done);
        self.replication.next_round();
        let mut served = |slot: &u32| {
            self.connections.get_mut(*slot).is_some_and(|c| std::mem::take(&mut c.turn.served))
        };
        self.listed.sort_by_cached_key(|slot| served(slot));
    }

    /// How long the kernel may let the thread sleep, given the core's deadline.
    fn timeout(&self, deadline: Option<Nanos>) -> Option<Duration> {
        let goodbye = self.stopping.as_ref().and_then(Stopping::deadline);
        let next = [deadline, self.alarm, goodbye].into_iter().flatten().min()?;
        Some(Duration::from_nanos(next.saturating_sub(tidepool_driver::now())))
    }

    /// Acts on deadlines that have come; `deadline` is the core's.
    fn pass_time(&mut self, deadline: Option<Nanos>) {
        let now = self.shared.now;
        if deadline.is_some_and(|at| at <= now) {
            self.shared.core.handle(now, Event::Tick);
        }
        if self.alarm.is_some_and(|at| at <= now) {
            self.alarm = None;
            self.resume_listeners();
            self.end_late_handshakes();
            self.wake_those_who_left();
            // One of them may have waited long enough; each sets the alarm again that has not.
            self.shared.came = true;
            self.beat();
            self.retry_transfers();
        }
    }

    /// Looks at listeners, handshakes and clients that wait again at this time.
    pub(super) fn alarm_at(&mut self, at: Nanos) {
        self.alarm = Some(self.alarm.map_or(at, |earlier| earlier.min(at)));
    }

    fn end_late_handshakes(&mut self) {
        for slot in 0..self.connections.capacity() as u32 {
            let Some(connection) = self.connections.get_mut(slot).filter(|c| !c.broken()) else {
                continue;
            };
            match connection.handshake_deadline {
                Some(at) if at <= self.shared.now => {
                    tracing::info!(peer = %connection.peer, "closing a connection: no handshake in time");
                    connection.break_off();
                    self.list(slot);
                }
                Some(at) => self.alarm_at(at),
                None => {}
            }
        }
    }

    /// A client that has left while it waits gives its place back.
    fn wake_those_who_left(&mut self) {
        let mut waits = false;
        for slot in 0..self.connections.capacity() as u32 {
            let Some(connection) = self.connections.get_mut(slot).filter(|c| c.turn.waiting) else {
                continue;
            };
            waits = true;
            if connection.may_wait_in_vain() {
                connection.turn.wake = true;
                self.list(slot);
            }
        }
        if waits {
            self.alarm_at(self.shared.now + STALL_LOOK_NS);
        }
    }

    /// Remembers a connection for this round.
    pub(super) fn list(&mut self, slot: u32) {
        if let Some(connection) = self.connections.get_mut(slot)
            && !std::mem::replace(&mut connection.turn.listed, true)
        {
            self.listed.push(slot);
        }
    }

    pub(super) fn complete(&mut self, completion: Completion) {
        let Completion { user, result, more } = completion;
        let (source, slot) = source_of(user);
        match source {
            Source::Bell => {
                let mut count = [0; 8];
                // Empties the bell; that it rang is all that matters.
                let _ = rustix::io::read(&self.bell, &mut count);
                let mut done = 0;
                while done < COMMANDS_MAX
                    && let Ok(command) = self.commands.try_recv()
                {
                    self.command(command);
                    done += 1;
                }
                if done == COMMANDS_MAX {
                    // What is left is for the next round. A bell that cannot be rung is ringing.
                    let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
                }
                self.poll_bell();
            }
            Source::Accept => self.accepted(slot, result),
            Source::Device => {
                let now = self.shared.now;
                let (ops, through) = self.device();
                let ended = ops.complete(slot, result, now, device_user, through);
                match ended {
                    Some((token, result)) => {
                        self.shared.core.handle(now, Event::Done { token, result })
                    }
                    None => self.retry_transfers(),
                }
            }
            Source::Backend => {
                let id = VolumeId(slot as u16);
                self.pulse.work_for(Some(id));
                self.backend_ready(id);
                self.pulse.work_for(None);
            }
            Source::Receive | Source::Send => {
                let connection =
                    self.connections.get_mut(slot).expect("it stays until its operations are done");
                self.pulse.work_for(connection.volume());
                match source {
                    Source::Receive => connection.received(result, more, &mut self.shared),
                    _ => connection.sent(result, &mut self.shared),
                }
                self.pulse.work_for(None);
                self.list(slot);
            }
            Source::Cancel => {}
            Source::LinkReceive | Source::LinkSend => self.link_done(source, slot, result, more),
        }
    }

    /// A backend has completed something.
    fn backend_ready(&mut self, id: VolumeId) {
        let Shared { core, volumes, now, .. } = &mut self.shared;
        let Some(volume) = volumes.get_mut(id) else { return };
        volume.polled = false;
        volume.completions(*now, core.arena(), &mut self.completed);
        if volume.serving
            && self.completed.iter().any(|(_, result)| *result == Err(IoError::Fenced))
        {
            // Whose the image is, nobody knows yet: what waits is not answered.
            self.close_door(id);
        }
        let Shared { core, volumes, now, .. } = &mut self.shared;
        let Some(volume) = volumes.get_mut(id) else { return };
        for (token, result) in self.completed.drain(..) {
            core.handle(*now, Event::Done { token, result });
        }
        if let Some(result) = volume.record_written.take()
            && !self.leave_after_record(id)
        {
            self.record_written(id, result);
        }
        self.poll_backend(id);
    }

    /// Polls a backend's descriptor if it is not polled yet.
    pub(super) fn poll_backend(&mut self, id: VolumeId) {
        let Some(volume) = self.shared.volumes.get_mut(id) else { return };
        if !std::mem::replace(&mut volume.polled, true) {
            // SAFETY: the backend keeps its descriptor open as long as the volume has it.
            let fd = unsafe { BorrowedFd::borrow_raw(volume.event_fd()) };
            self.ring.poll_readable(user(Source::Backend, u32::from(id.0)), fd);
        }
    }

    /// Parses, hands over and executes until nothing more can be done without the kernel.
    fn settle(&mut self) {
        loop {
            let parsed = self.parse();
            self.shared.now = tidepool_driver::now();
            let executed = self.execute();
            let replicated = self.replicate();
            let woken = self.wake_stalled();
            if !parsed && !executed && !replicated && !woken {
                return;
            }
        }
    }

    /// Lets every listed connection that has reason to take apart what it has received.
    fn parse(&mut self) -> bool {
        let awake = |slot: &u32| self.connections.get(*slot).filter(|c| c.turn.wake);
        self.shared.effort.divide(self.listed.iter().filter_map(awake).map(|c| c.volume()));
        let mut parsed = false;
        for index in 0..self.listed.len() {
            let slot = self.listed[index];
            let Some(connection) = self.connections.get_mut(slot).filter(|c| c.turn.wake) else {
                continue;
            };
            if self.shared.effort.is_spent(connection.volume()) {
                connection.turn.deferred = true;
                continue;
            }
            parsed = true;
            self.pulse.work_for(connection.volume());
            connection.process(&mut self.shared);
            self.pulse.work_for(None);
            let Some(queue) = connection.stall.and_then(|stall| self.waiting.queue(stall)) else {
                continue;
            };
            let until = connection.waits_until.filter(|_| connection.stall == Some(Stall::Volume));
            if !std::mem::replace(&mut connection.turn.waiting, true) {
                queue.push_back(slot);
            }
            let look_at = self.shared.now + STALL_LOOK_NS;
            self.alarm_at(until.map_or(look_at, |at| at.min(look_at)));
        }
        parsed
    }

    /// Wakes the connections whose obstacle may be gone.
    fn wake_stalled(&mut self) -> bool {
        let mut started = false;
        for index in 0..self.shared.gated.len() {
            let id = self.shared.gated[index];
            started |= gate::advance(&mut self.shared, id);
        }
        let changed =
            std::mem::take(&mut self.shared.freed) | std::mem::take(&mut self.shared.gate_opened);
        let ranged = std::mem::take(&mut self.shared.range_ended);
        let leased = std::mem::take(&mut self.shared.leased);
        let came = std::mem::take(&mut self.shared.came);
        let over = [
            (changed, Stall::Memory),
            (ranged, Stall::Ranges),
            (leased, Stall::Lease),
            (came, Stall::Volume),
        ];
        for (is_over, stall) in over {
            if is_over {
                self.wake(stall);
            }
        }
        started | changed | ranged | leased | came
    }

    /// Wakes those who wait for this to pass.
    fn wake(&mut self, stall: Stall) {
        while let Some(slot) = self.waiting.queue(stall).and_then(VecDeque::pop_front) {
            if let Some(connection) = self.connections.get_mut(slot) {
                connection.turn.waiting = false;
                connection.turn.wake = true;
                self.list(slot);
            }
        }
    }

    /// Executes what the core wants, as far as there is room for it.
    fn execute(&mut self) -> bool {
        let mut executed = false;
        while !self.device_ops.is_full() {
            let Some(effect) = self.shared.core.next_effect(self.shared.now) else { break };
            executed = true;
            match effect {
                Effect::DeviceRead { token, offset, buf } => {
                    self.transfer((token, Kind::Read, offset, buf))
                }
                Effect::DeviceWrite { token, offset, buf, dsync } => {
                    self.transfer((token, Kind::Write { dsync }, offset, buf));
                }
                Effect::DeviceSync { token } => {
                    self.transfer((token, Kind::Sync, 0, Buf { offset: 0, len: 0 }));
                }
                Effect::Backend { token, volume, op } => {
                    self.pulse.work_for(Some(volume));
                    let Shared { core, volumes, now, .. } = &mut self.shared;
                    match volumes.get_mut(volume) {
                        Some(volume) => volume.transfer(*now, core.arena(), token, op),
                        None => core.handle(
                            *now,
                            Event::Done { token, result: Err(IoError::Errno(libc::ENODEV)) },
                        ),
                    }
                }
                Effect::Peer { volume, op } => self.peer_op(volume, op),
                Effect::Reply { id, result } => self.reply(id, result),
                Effect::ControlDone { control, result } => self.control_done(control, result),
            }
            self.pulse.work_for(None);
        }
        executed
    }

    /// The transfers with the cache device, and what they go through.
    fn device(&mut self) -> (&mut DeviceOps, (&mut Ring, BorrowedFd<'_>, *mut u8)) {
        let cache = self.cache.as_ref().expect("a core that uses a device has one");
        let arena = self.shared.core.arena().as_ptr();
        (&mut self.device_ops, (&mut self.ring, cache.fd(), arena))
    }

    fn transfer(&mut self, what: (Token, Kind, u64, Buf)) {
        let (ops, through) = self.device();
        ops.begin(what, device_user, through);
    }

    /// Tries transfers again that have waited for it.
    fn retry_transfers(&mut self) {
        if !self.device_ops.has_waiting() {
            return;
        }
        let now = self.shared.now;
        let (ops, through) = self.device();
        if let Some(at) = ops.retry(now, device_user, through) {
            self.alarm_at(at);
        }
    }

    fn reply(&mut self, id: u64, result: Result<(), tidepool_engine::api::RequestError>) {
        if let Some((ASK_SLOT, number)) = replication::of_link(id) {
            return self.asked(number, result);
        }
        if let Some((slot, number)) = replication::of_link(id) {
            return self.link_reply(slot, number, result);
        }
        let (name, result) = match gate::of_gate(id) {
            None => (piece_of(id), result),
            Some((volume, _)) => match gate::done(&mut self.shared, volume, result) {
                Some(done) => done,
                None => return,
            },
        };
        let connection =
            self.connections.get_mut(name.connection).expect("it stays until its pieces are done");
        self.pulse.work_for(connection.volume());
        connection.piece_done(name.piece, result, &mut self.shared);
        self.list(name.connection);
    }

    /// Sends and receives for the listed connections; lets go of those that are over. Returns
    /// whether that has made something possible that was not before.
    fn arm(&mut self) -> bool {
        self.arm_links();
        let mut kept = 0;
        for index in 0..self.listed.len() {
            let slot = self.listed[index];
            let Some(connection) = self.connections.get_mut(slot) else { continue };
            connection.arm(
                &mut self.ring,
                &mut self.shared,
                user(Source::Receive, slot),
                user(Source::Send, slot),
            );
            connection.turn.listed = connection.turn.wake && !connection.broken();
            if connection.is_leaving() {
                self.pass_on(slot);
            } else if connection.is_over() {
                self.connections.remove(slot).dismantle(&mut self.shared);
            } else if connection.turn.listed {
                self.listed[kept] = slot;
                kept += 1;
            }
        }
        self.listed.truncate(kept);
        let connections = &self.connections;
        let volume = |slot: &u32| connections.get(*slot).and_then(|c| c.volume());
        let goes_on = self.listed.iter().any(|slot| !self.shared.effort.is_spent(volume(slot)));
        goes_on || self.shared.freed || self.shared.range_ended || self.replication.hung_up
    }

    /// Ends the kernel's and the clients' part; the rest is for the caller.
    pub(super) fn dismantle(self) -> (Option<CacheFile>, Shared<C>, Option<Stopping>) {
        (self.cache, self.shared, self.stopping)
    }

    /// No transfer with the cache device is under way.
    pub(super) fn device_is_idle(&self) -> bool {
        self.device_ops.is_empty()
    }
}

fn device_user(slot: u32) -> u64 {
    user(Source::Device, slot)
}
