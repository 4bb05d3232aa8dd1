//! The volume's client: it follows the volume from owner to owner, and checks what it reads.

use super::host::{Run, VOLUME};
use super::{MS, What, World};
use crate::checker::{BASE_VALUE, fill};
use crate::store::{Store, content};
use crate::volume::Vol;
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;
use tidepool_replica::Phase;

/// Longest request in blocks.
const BLOCKS_MAX: u64 = 64;

/// A request that is not answered.
struct Sent {
    id: RequestId,
    op: Op,
    start: u64,
    first: u64,
    buf: Option<Buf>,
}

/// Requests in flight, and who serves them.
pub(super) struct Client {
    slots: Vec<Option<Sent>>,
    next_id: RequestId,
    /// Writes that each slot has ever sent.
    written: Vec<u64>,
    serving: Option<usize>,
    /// A flush was sent to this owner.
    flushed: bool,
    /// What a power loss has left is being looked at.
    verifying: bool,
    /// Nothing new is sent from then on.
    pub(super) stop_after: Option<Nanos>,
}

impl Client {
    pub(super) fn new(slots: usize) -> Client {
        let written = vec![0; slots];
        let slots = (0..slots).map(|_| None).collect();
        Client {
            slots,
            next_id: 0,
            written,
            serving: None,
            flushed: false,
            verifying: false,
            stop_after: None,
        }
    }

    /// A host does not serve any more.
    pub(super) fn left(&mut self, at: usize) {
        if self.serving == Some(at) {
            self.serving = None;
        }
    }

    /// No request is open.
    pub(super) fn is_idle(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }

    /// That host serves the volume.
    pub(super) fn is_served_by(&self, at: usize) -> bool {
        self.serving == Some(at)
    }

    /// Nobody serves the volume.
    pub(super) fn is_unserved(&self) -> bool {
        self.serving.is_none()
    }

    /// The slot whose request has this number, and the memory of what it reads.
    pub(super) fn of_request(&self, id: RequestId) -> Option<(usize, Option<Buf>)> {
        let mut slots = self.slots.iter().enumerate();
        let sent = slots
            .find_map(|(slot, sent)| Some((slot, sent.as_ref().filter(|sent| sent.id == id)?)));
        sent.map(|(slot, sent)| (slot, sent.buf.filter(|_| sent.op == Op::Read)))
    }

    /// For a report.
    pub(super) fn state(&self) -> String {
        let open = self.slots.iter().flatten().count();
        format!("served by {:?}, {open} requests open, verifying: {}", self.serving, self.verifying)
    }
}

/// Gives the first bytes of an image their content.
pub(super) fn fill_base(image: &mut Store, salt: u64, base_bytes: u64) {
    for block in 0..base_bytes / BLOCK_BYTES as u64 {
        let mut bytes = [0; BLOCK_BYTES];
        let first = block * (BLOCK_BYTES / SECTOR_BYTES) as u64;
        for (sector, out) in (first..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
            fill(out, salt, sector, BASE_VALUE);
        }
        image.write(block, content(&bytes), true);
    }
}

impl World {
    /// A host is the owner now and serves.
    pub(super) fn serve(&mut self, at: usize) {
        let tick = self.next_tick();
        self.note("serve", at as u64, self.ceph.record().generation, u64::from(self.fate.lost));
        self.cover.hit("volume served");
        self.checker.killed(tick);
        if !std::mem::take(&mut self.fate.lost) && !self.client.verifying {
            // Everything acknowledged is there. What was only read before it was in both copies may
            // be gone.
            self.checker.settle(tick);
        }
        self.checker.power_lost(tick);
        self.client.verifying = true;
        self.fate.whole_image = false;
        self.client.slots.iter_mut().for_each(|slot| *slot = None);
        self.client.serving = Some(at);
        self.hosts[at].standing.serves = true;
        self.check_lease(1 - at);
        self.client.flushed = false;
        self.last_drain.control = None;
        for slot in 0..self.client.slots.len() {
            self.after(MS, What::Think(slot));
        }
    }

    /// A slot sends its next request.
    pub(super) fn think(&mut self, slot: usize) {
        let Some(at) = self.client.serving else { return };
        if self.client.slots[slot].is_some() || !matches!(self.hosts[at].run, Run::Owner(_)) {
            return;
        }
        if self.is_paused(at) {
            let until = self.hosts[at].paused_until;
            return self.at(until, What::Think(slot));
        }
        if self.client.verifying {
            return self.verify(at, slot);
        }
        if let Some((first, blocks)) = self.rot.as_mut().and_then(|rot| rot.mend.pop()) {
            return self.request(at, slot, Op::Write { fua: false }, first, blocks);
        }
        if self.client.stop_after.is_some_and(|stop| self.now >= stop) {
            return self.overwrite_what_is_lost(at, slot);
        }
        let plan = &self.plan;
        let (reads, flushes, fua, zeroes) = (plan.reads, plan.flushes, plan.fua, plan.zeroes);
        let blocks = plan.size_bytes / BLOCK_BYTES as u64;
        let fua = self.draws.rng.permille(fua);
        let op = match self.draws.rng.below(1000) {
            n if n < reads => Op::Read,
            n if n < reads + flushes => Op::Flush,
            n if n < reads + flushes + zeroes => Op::Discard { fua },
            n if n < reads + flushes + 2 * zeroes => Op::WriteZeroes { fua, no_hole: true },
            _ => Op::Write { fua },
        };
        let longest = if self.draws.rng.permille(800) { 4 } else { BLOCKS_MAX };
        let n = 1 + self.draws.rng.below(longest.min(blocks));
        let first = self.draws.rng.below(blocks - n + 1);
        if op == Op::Flush {
            self.request(at, slot, op, 0, 0)
        } else {
            self.request(at, slot, op, first, n)
        }
    }

    /// Changes may go past the log.
    fn goes_direct(&self, at: usize) -> bool {
        let host = &self.hosts[at];
        let status =
            host.engine.as_ref().and_then(|engine| engine.volume_status(self.clock(at), VOLUME));
        let mode = status.map_or(Mode::Off, |status| status.spec.mode);
        matches!(mode, Mode::WriteAround | Mode::Off) || host.disk.is_dead()
    }

    /// The host may take reads: nobody else serves the volume yet, as far as it knows.
    pub(super) fn is_leased(&self, at: usize) -> bool {
        let Run::Owner(driver) = &self.hosts[at].run else { return false };
        driver.leased_until().is_none_or(|until| self.clock(at) <= until)
    }

    fn request(&mut self, at: usize, slot: usize, op: Op, first: u64, blocks: u64) {
        if matches!(op, Op::Read | Op::Flush) && !self.is_leased(at) {
            self.cover.hit("read that waits for the lease");
            return self.after(5 * MS, What::Think(slot));
        }
        let (offset, len) = (first * BLOCK_BYTES as u64, blocks * BLOCK_BYTES as u64);
        let engine = self.hosts[at].engine.as_mut().expect("it serves");
        let mut buf = None;
        if matches!(op, Op::Read | Op::Write { .. }) {
            buf = engine.arena_mut().alloc(len as usize);
            if buf.is_none() {
                return self.after(MS, What::Think(slot));
            }
        }
        let start = self.next_tick();
        let (sector, sectors) = (offset / SECTOR_BYTES as u64, len / SECTOR_BYTES as u64);
        let salt = self.checker.salt();
        let direct = self.goes_direct(at);
        let engine = self.hosts[at].engine.as_mut().expect("it serves");
        match op {
            Op::Read => self.checker.start_read(start),
            Op::Write { .. } => {
                self.client.written[slot] += 1;
                let value = Vol::value(Some(slot), self.client.written[slot]);
                self.checker.start_change(start, sector, sectors, value, direct);
                let bytes = engine.arena_mut().bytes_mut(buf.expect("a write has a buffer"));
                for (sector, out) in (sector..).zip(bytes.chunks_exact_mut(SECTOR_BYTES)) {
                    fill(out, salt, sector, value);
                }
            }
            Op::Discard { .. } | Op::WriteZeroes { .. } => {
                self.checker.start_change(start, sector, sectors, 0, direct);
            }
            _ => {}
        }
        self.client.flushed |= op.is_fua() || op == Op::Flush;
        if !matches!(op, Op::Read | Op::Flush) {
            // What was lost may be overwritten while the last drain is under way.
            (self.last_drain.is_done, self.last_drain.control) = (false, None);
        }
        self.client.next_id += 1;
        let id = self.client.next_id;
        self.client.slots[slot] = Some(Sent { id, op, start, first: sector, buf });
        self.note("> request", slot as u64, offset, len);
        let request = Request { id, volume: VOLUME, op, offset, len, buf };
        let now = self.clock(at);
        self.hosts[at].engine.as_mut().expect("it serves").handle(now, Event::Request(request));
        self.drive(at);
    }

    /// An answer. What a former owner says reaches nobody.
    pub(super) fn client_reply(
        &mut self,
        at: usize,
        id: RequestId,
        result: Result<(), RequestError>,
    ) {
        let slot = self
            .client
            .slots
            .iter()
            .position(|slot| slot.as_ref().is_some_and(|sent| sent.id == id));
        let Some(slot) = slot.filter(|_| self.client.serving == Some(at)) else { return };
        let sent = self.client.slots[slot].take().expect("found just now");
        let tick = self.next_tick();
        self.note("< reply", slot as u64, sent.start, u64::from(result.is_err()));
        let engine = self.hosts[at].engine.as_mut().expect("it has answered");
        match (sent.op, result) {
            (Op::Read, Ok(())) => {
                let bytes = engine.arena().bytes(sent.buf.expect("a read has a buffer")).to_vec();
                if let Err(what) = self.checker.end_read(sent.start, tick, sent.first, &bytes) {
                    self.fail(what);
                }
            }
            (Op::Read, Err(_)) => {
                self.checker.forget_read(sent.start);
                let blocks = sent.buf.map_or(0, |buf| u64::from(buf.len)) / BLOCK_BYTES as u64;
                self.may_be_lost(at, sent.first * SECTOR_BYTES as u64 / BLOCK_BYTES as u64, blocks);
            }
            (Op::Flush, Ok(())) => self.checker.flushed(sent.start),
            (Op::Flush, Err(_)) => {}
            (op, Ok(())) => {
                self.checker.end_change(
                    sent.start,
                    tick,
                    true,
                    op.is_fua() || !self.client.flushed,
                );
                if op.is_fua() {
                    self.checker.flushed(sent.start);
                }
            }
            (_, Err(_)) => self.checker.end_change(sent.start, tick, false, false),
        }
        if let Some(buf) = sent.buf {
            self.hosts[at].engine.as_mut().expect("it has answered").arena_mut().free(buf);
        }
        let ns = if result.is_err() { 100 * MS } else { self.draws.rng.around(self.plan.think_ns) };
        self.after(ns, What::Think(slot));
    }

    /// A read has failed: what is lost is overwritten.
    fn may_be_lost(&mut self, at: usize, first: u64, blocks: u64) {
        let is_lost = self.lost_blocks(at) > 0;
        let Some(rot) = self.rot.as_mut().filter(|_| is_lost) else { return };
        rot.mend.push((first, blocks));
        if self.client.verifying {
            self.checker.skip_verify(first);
        }
    }

    /// In the end everything is overwritten, where something is lost still.
    fn overwrite_what_is_lost(&mut self, at: usize, slot: usize) {
        let is_lost = self.lost_blocks(at) > 0;
        let Some(rot) = self.rot.as_mut() else { return };
        if !is_lost {
            // The drain may find something later.
            return self.after(50 * MS, What::Think(slot));
        }
        let all = self.plan.size_bytes / BLOCK_BYTES as u64;
        let first = rot.sweep % all;
        let blocks = BLOCKS_MAX.min(all - first);
        rot.sweep = first + blocks;
        self.request(at, slot, Op::Write { fua: false }, first, blocks);
    }

    /// Looks at what a power loss has left before anything is written.
    fn verify(&mut self, at: usize, slot: usize) {
        if self.client.slots.iter().any(Option::is_some) {
            return self.after(MS, What::Think(slot));
        }
        if let Some(block) = self.checker.to_verify(0) {
            return self.request(at, slot, Op::Read, block, 1);
        }
        self.client.verifying = false;
        self.cover.hit("verified after power loss");
        let tick = self.next_tick();
        if let Err(what) = self.checker.end_verify(tick) {
            self.fail(what);
        }
        self.after(0, What::Think(slot));
    }

    /// Everything has come to its end: the hosts are in sync, all is answered and drained, and the
    /// image is the volume.
    pub(super) fn is_over(&mut self) -> bool {
        let Some(at) = self.client.serving else { return false };
        if self.client.verifying
            || self.client.slots.iter().any(Option::is_some)
            || self.client.stop_after.is_none_or(|stop| self.now < stop)
        {
            return false;
        }
        let (now, tick) = (self.clock(at), self.next_tick());
        let host = &mut self.hosts[at];
        let Run::Owner(driver) = &host.run else { return false };
        if !matches!(driver.owner().phase(), Phase::Sync { .. }) {
            return false;
        }
        if !self.last_drain.is_done {
            if self.last_drain.control.is_none() {
                // An earlier one may be answered yet.
                let control = 1 << 61 | tick;
                self.last_drain.control = Some((at, control));
                host.engine.as_mut().expect("it serves").drain(now, VOLUME, control);
                self.drive(at);
            }
            return false;
        }
        for block in self.checker.touched() {
            let mut bytes = [0; BLOCK_BYTES];
            self.ceph.read(block, &mut bytes);
            let tick = self.next_tick();
            if let Err(what) = self.checker.check_image(block, &bytes, tick) {
                self.fail(what);
                return false;
            }
        }
        self.cover.hit("image compared");
        true
    }
}
