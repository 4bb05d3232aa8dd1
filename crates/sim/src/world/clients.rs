//! The clients of the volumes: what they send, and what they expect back.

use super::plan::MS;
use super::volume::{Place, Sender, Sent};
use super::{Happening, World};
use crate::checker::{SECTORS, fill};
use std::collections::BTreeMap;
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;

/// Pause after the arena had no room for a request.
pub(super) const RETRY_NS: Nanos = MS;

/// The requests in flight, and how many are still to come.
pub(super) struct Clients {
    sent: BTreeMap<RequestId, Sent>,
    next_request: RequestId,
    requests_left: u64,
}

impl Clients {
    /// Clients that send so many requests.
    pub(super) fn new(requests: u64) -> Clients {
        Clients { sent: BTreeMap::new(), next_request: 1, requests_left: requests }
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&Sent> {
        self.sent.get(&id)
    }

    /// The requests in flight, in the order in which they were sent.
    pub(super) fn sent(&self) -> impl Iterator<Item = (RequestId, &Sent)> {
        self.sent.iter().map(|(id, sent)| (*id, sent))
    }

    pub(super) fn in_flight(&self) -> usize {
        self.sent.len()
    }

    /// The number of the next request.
    pub(super) fn next_request(&self) -> RequestId {
        self.next_request
    }

    /// No more requests are sent by clients.
    pub(super) fn finish(&mut self) {
        self.requests_left = 0;
    }

    /// A volume is on its way out: what is in flight may be refused.
    pub(super) fn close(&mut self, volume: usize) {
        self.sent
            .values_mut()
            .filter(|sent| sent.volume == volume)
            .for_each(|sent| sent.closing = true);
    }

    /// Nothing in flight is answered any more.
    pub(super) fn forget_life(&mut self) -> impl Iterator<Item = Sent> + use<> {
        std::mem::take(&mut self.sent).into_values()
    }

    fn add(&mut self, sent: Sent) -> RequestId {
        let id = self.next_request;
        self.next_request += 1;
        self.sent.insert(id, sent);
        id
    }
}

impl World {
    /// A client slot's turn.
    pub(super) fn client(&mut self, v: usize, slot: usize) {
        let vol = &mut self.vols[v];
        let usable =
            vol.place == Place::Serving || vol.place == Place::Removing && self.rng.permille(100);
        let over = self.clients.requests_left == 0;
        if !self.machine.is_running() || !usable || over {
            vol.traffic.rest(slot);
            if over && !self.finale.has_begun() {
                self.begin_end();
            }
            return;
        }
        let op = self.choose_op(v);
        let (offset, len) = self.choose_range(v, op);
        if self.send(v, op, offset, len, Sender::Slot(slot)) {
            self.clients.requests_left -= 1;
        } else {
            self.cover.hit("arena full");
            self.after(RETRY_NS, Happening::Client { volume: v, slot });
        }
    }

    fn choose_op(&mut self, v: usize) -> Op {
        let plan = &self.vols[v].plan;
        let (flushes, fua, reads, discards) = (plan.flushes, plan.fua, plan.reads, plan.discards);
        // Now and then even a client that hardly flushes does, after its first.
        if self.rng.permille(flushes) || flushes > 0 && self.rng.permille(2) {
            return Op::Flush;
        }
        if self.rng.permille(reads) {
            return if self.rng.permille(20) { Op::Prefetch } else { Op::Read };
        }
        if self.vols[v].plan.read_only {
            return Op::Read;
        }
        let fua = self.rng.permille(fua);
        if self.rng.permille(discards) {
            return match self.rng.below(3) {
                0 => Op::Discard { fua },
                n => Op::WriteZeroes { fua, no_hole: n == 1 },
            };
        }
        Op::Write { fua }
    }

    /// A range inside of the volume; with a buffer, one that fits.
    fn choose_range(&mut self, v: usize, op: Op) -> (u64, u64) {
        if op == Op::Flush {
            return (0, 0);
        }
        let plan = self.vols[v].plan.clone();
        let sector = SECTOR_BYTES as u64;
        let block = BLOCK_BYTES as u64;
        let aligned = !self.rng.permille(plan.unaligned);
        let unit = if aligned { block } else { sector };
        let zeroes = matches!(op, Op::Discard { .. } | Op::WriteZeroes { .. });
        let len = match self.rng.below(1000) {
            n if n < plan.large && zeroes && self.rng.permille(200) => plan.size_bytes,
            n if n < plan.large => self.rng.range(1..65) * block,
            _ if aligned => self.rng.pick(&[block, block, 2 * block, 4 * block]),
            _ => self.rng.range(1..20) * sector,
        };
        let len = len.min(plan.size_bytes);
        let hot = self.rng.permille(plan.hot);
        let space =
            if hot { plan.hot_bytes.max(len).min(plan.size_bytes) } else { plan.size_bytes };
        let mut offset = self.rng.below((space - len) / unit + 1) * unit;
        if !hot && self.rng.permille(300) {
            offset = self.vols[v].traffic.go_on(len, unit, plan.size_bytes);
        }
        if self.rng.permille(20) {
            // The end of the volume, which may be a part of a block.
            offset = (plan.size_bytes - len) / unit * unit;
        }
        let mut end = offset + len;
        if !zeroes && buffer_bytes(offset, len) > REQUEST_BYTES_MAX {
            end = (offset / block * block) + REQUEST_BYTES_MAX as u64;
        }
        (offset, end - offset)
    }

    /// Sends a request; false when the arena has no room for it.
    pub(super) fn send(&mut self, v: usize, op: Op, offset: u64, len: u64, sender: Sender) -> bool {
        let Some(volume) = self.machine.id(v) else { return false };
        let engine = self.machine.engine_mut().expect("clients send to a running core");
        let mut buf = None;
        if matches!(op, Op::Read | Op::Prefetch | Op::Write { .. }) {
            buf = engine.arena_mut().alloc(buffer_bytes(offset, len));
            let Some(buf) = buf else { return false };
            engine.arena_mut().bytes_mut(buf).fill(0xaa);
        }
        let start = self.next_tick();
        let vol = &mut self.vols[v];
        vol.traffic.send(op);
        let sent = Sent {
            volume: v,
            op,
            first_sector: offset / SECTOR_BYTES as u64,
            sectors: len / SECTOR_BYTES as u64,
            buf,
            start,
            sent_at: self.clock.now(),
            sender,
            closing: vol.place == Place::Removing || self.stops.is_shutting_down(),
        };
        match op {
            Op::Read => vol.checker.start_read(start),
            Op::Write { .. } | Op::Discard { .. } | Op::WriteZeroes { .. } => {
                self.begin_change(&sent, offset)
            }
            Op::Flush | Op::Prefetch | Op::Record { .. } | Op::Block { .. } | Op::Fetch { .. } => {}
        }
        let id = self.clients.add(sent);
        self.note(told(op), v as u64, sent.first_sector, sent.sectors | start << 32);
        let now = self.clock.now();
        let engine = self.machine.engine_mut().expect("clients send to a running core");
        engine.handle(now, Event::Request(Request { id, volume, op, offset, len, buf }));
        true
    }

    /// A change is about to be sent: what it writes is in its buffer, and the oracle knows.
    fn begin_change(&mut self, sent: &Sent, offset: u64) {
        let Sent { volume: v, first_sector, sectors, .. } = *sent;
        let disowned = self.machine.backend(v).is_disowned();
        let dead = self.machine.disk().is_dead();
        let vol = &mut self.vols[v];
        let writes = matches!(sent.op, Op::Write { .. });
        let value = vol.traffic.begin_change(sent.sender.slot().filter(|_| writes));
        let direct = vol.goes_direct() || disowned || dead;
        vol.checker.start_change(sent.start, first_sector, sectors, value, direct);
        if let (true, Some(buf)) = (writes, sent.buf) {
            let salt = vol.salt();
            let bytes = self.sectors_mut(buf, offset, sectors);
            for (part, sector) in bytes.chunks_exact_mut(SECTOR_BYTES).zip(first_sector..) {
                fill(part, salt, sector, value);
            }
        }
    }

    /// The bytes of a request in its buffer, which begins with a whole block.
    fn sectors_mut(&mut self, buf: Buf, offset: u64, sectors: u64) -> &mut [u8] {
        let engine = self.machine.engine_mut().expect("clients send to a running core");
        let skip = (offset % BLOCK_BYTES as u64) as usize;
        &mut engine.arena_mut().bytes_mut(buf)[skip..skip + sectors as usize * SECTOR_BYTES]
    }

    /// The core answers a request.
    pub(super) fn reply(&mut self, id: RequestId, result: Result<(), RequestError>) {
        let Some(sent) = self.clients.sent.remove(&id) else {
            return self.fail(format!("request {id} is answered that is not in flight"));
        };
        let tick = self.next_tick();
        self.note("< reply", sent.start, tick, u64::from(result.is_err()));
        if sent.buf.is_some_and(|buf| self.machine.uses(buf)) {
            self.fail(format!("request {id} is answered while an effect uses its buffer"));
        }
        let v = sent.volume;
        match result {
            Ok(()) => self.succeeded(&sent, tick),
            Err(error) => self.failed(id, &sent, tick, error),
        }
        if let (Some(buf), Some(engine)) = (sent.buf, self.machine.engine_mut()) {
            engine.arena_mut().free(buf);
        }
        match sent.sender {
            Sender::Slot(slot) => {
                let think = self.vols[v].plan.think_ns;
                let pause = self.rng.around(think);
                self.after(pause, Happening::Client { volume: v, slot });
            }
            Sender::Look(_) => {
                self.vols[v].look.end();
                let life = self.machine.life();
                self.after(1, Happening::Verify { life, volume: v });
            }
            Sender::Comparison => {}
        }
        self.go_on_to_the_end();
    }

    fn succeeded(&mut self, sent: &Sent, tick: u64) {
        let now = self.clock.now();
        let vol = &mut self.vols[sent.volume];
        // What was decided in the moment of the failure may still come.
        if vol.excuses.failed_at().is_some_and(|at| at < now) {
            return self.fail(format!("{:?} of a failed volume succeeds", sent.op));
        }
        match sent.op {
            Op::Read => {
                let buf = sent.buf.expect("a read has a buffer");
                let engine = self.machine.engine().expect("replies come from a core");
                let bytes = engine.arena().bytes(buf);
                let skip = (sent.first_sector as usize % SECTORS) * SECTOR_BYTES;
                let data = &bytes[skip..skip + sent.sectors as usize * SECTOR_BYTES];
                let value = u64::from_le_bytes(data[..8].try_into().expect("eight bytes"));
                let checked = vol.checker.end_read(sent.start, tick, sent.first_sector, data);
                if self.machine.backend(sent.volume).is_away(now) {
                    self.cover.hit("served without backend");
                }
                self.note("< value", sent.start, sent.first_sector, value);
                if let Err(what) = checked {
                    self.fail(format!("volume {}: {what}", sent.volume));
                }
            }
            Op::Flush => vol.checker.flushed(sent.start),
            Op::Prefetch | Op::Record { .. } | Op::Block { .. } | Op::Fetch { .. } => {}
            Op::Write { fua } | Op::Discard { fua } | Op::WriteZeroes { fua, .. } => {
                vol.traffic.end_change();
                vol.checker.end_change(sent.start, tick, true, fua || !vol.traffic.has_flushed());
                if fua {
                    vol.checker.flushed(sent.start);
                }
            }
        }
    }

    fn failed(&mut self, id: RequestId, sent: &Sent, tick: u64, error: RequestError) {
        let damage = self.may_lose_data();
        let vol = &mut self.vols[sent.volume];
        match sent.op {
            Op::Read => vol.checker.forget_read(sent.start),
            Op::Flush | Op::Prefetch | Op::Record { .. } | Op::Block { .. } | Op::Fetch { .. } => {}
            _ => {
                vol.traffic.end_change();
                vol.checker.end_change(sent.start, tick, false, false);
            }
        }
        let backend_failed = vol.excuses.backend_failed_after(sent.start);
        if let Some(block) = sent.sender.looks_at()
            && damage
            && !backend_failed
        {
            vol.checker.skip_verify(block);
        }
        let explained = match error {
            RequestError::Io => {
                let fenced = self.machine.backend(sent.volume).is_fenced();
                // A flush that the core has sent by itself is told of by the client's next one.
                let late = sent.op == Op::Flush && vol.excuses.take_flush_failure();
                damage || fenced || late || backend_failed
            }
            RequestError::Shutdown => sent.closing,
            RequestError::Invalid | RequestError::ReadOnly => false,
        };
        if !explained {
            self.fail(format!(
                "request {id} ({:?}) failed with {error:?} without a reason",
                sent.op
            ));
        }
    }

    /// Lets the clients of a volume go on.
    pub(super) fn serve(&mut self, v: usize) {
        self.vols[v].place = Place::Serving;
        self.note("serving", v as u64, 0, 0);
        let mut idle = self.vols[v].traffic.take_idle();
        idle.sort_unstable();
        for slot in idle {
            let pause = self.rng.below(10 * MS);
            self.after(pause, Happening::Client { volume: v, slot });
        }
        self.go_on_to_the_end();
    }
}

/// What a request is called.
fn told(op: Op) -> &'static str {
    match op {
        Op::Read => "> read",
        Op::Write { fua: false } => "> write",
        Op::Write { fua: true } => "> write fua",
        Op::Flush => "> flush",
        Op::Discard { .. } => "> discard",
        Op::WriteZeroes { .. } => "> zeroes",
        Op::Prefetch => "> prefetch",
        Op::Record { .. } => "> record",
        Op::Block { .. } => "> block",
        Op::Fetch { .. } => "> fetch",
    }
}
