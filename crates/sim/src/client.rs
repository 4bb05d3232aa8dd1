//! The clients of the volumes: what they send, and what they expect back.

use crate::backend::Trouble;
use crate::checker::{SECTORS, fill};
use crate::plan::{MS, S};
use crate::volume::{Place, Sent, Vol};
use crate::world::{Ending, Happening, World};
use tidepool_engine::api::*;

/// Pause after the arena had no room for a request.
const RETRY_NS: Nanos = MS;
/// Looks in flight after a power loss.
const LOOKS: u32 = 32;
/// In place of the next block to be looked at: none for a while.
const PAUSED: u64 = u64::MAX;
/// Blocks of one look.
const LOOK_BLOCKS: u64 = 16;

impl World {
    /// A client slot's turn.
    pub(crate) fn client(&mut self, v: usize, slot: usize) {
        let vol = &mut self.vols[v];
        let usable = vol.place == Place::Serving || vol.place == Place::Removing && self.rng.permille(100);
        if self.engine.is_none() || !usable || self.requests_left == 0 {
            vol.idle_slots.push(slot);
            if self.requests_left == 0 && self.ending == Ending::Not {
                self.begin_end();
            }
            return;
        }
        self.requests_left -= 1;
        let op = self.choose_op(v);
        let (offset, len) = self.choose_range(v, op);
        if !self.send(v, op, offset, len, Some(slot), None) {
            self.requests_left += 1;
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
        let space = if hot { plan.hot_bytes.max(len).min(plan.size_bytes) } else { plan.size_bytes };
        let mut offset = self.rng.below((space - len) / unit + 1) * unit;
        if !hot && self.rng.permille(300) {
            // A sequential stream.
            let cursor = self.vols[v].cursor / unit * unit;
            offset = if cursor + len > plan.size_bytes { 0 } else { cursor };
            self.vols[v].cursor = offset + len;
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
    pub(crate) fn send(
        &mut self,
        v: usize,
        op: Op,
        offset: u64,
        len: u64,
        slot: Option<usize>,
        verifies: Option<u64>,
    ) -> bool {
        let Some(volume) = self.vols[v].id else { return false };
        let wants_buf = matches!(op, Op::Read | Op::Prefetch | Op::Write { .. });
        let engine = self.engine.as_mut().expect("clients send to a running core");
        let mut buf = None;
        if wants_buf {
            buf = engine.arena_mut().alloc(buffer_bytes(offset, len));
            let Some(buf) = buf else { return false };
            engine.arena_mut().bytes_mut(buf).fill(0xaa);
        }
        self.tick += 1;
        let start = self.tick;
        let (first, sectors) = (offset / SECTOR_BYTES as u64, len / SECTOR_BYTES as u64);
        let vol = &mut self.vols[v];
        vol.flushed |= op.is_fua() || op == Op::Flush;
        match op {
            Op::Read => vol.checker.start_read(start),
            Op::Write { .. } | Op::Discard { .. } | Op::WriteZeroes { .. } => {
                let writes = matches!(op, Op::Write { .. });
                let value = match slot {
                    Some(slot) if writes => {
                        vol.slot_writes[slot] += 1;
                        Vol::value(Some(slot), vol.slot_writes[slot])
                    }
                    _ => 0,
                };
                let direct = vol.goes_direct() || vol.backend.disowned || self.disk.dead;
                vol.checker.start_change(start, first, sectors, value, direct);
                vol.changes += 1;
                vol.changing += 1;
                if let (true, Some(buf)) = (writes, buf) {
                    let bytes = engine.arena_mut().bytes_mut(buf);
                    let skip = (offset % BLOCK_BYTES as u64) as usize;
                    let salt = vol.salt();
                    for (i, part) in
                        bytes[skip..skip + len as usize].chunks_exact_mut(SECTOR_BYTES).enumerate()
                    {
                        fill(part, salt, first + i as u64, value);
                    }
                }
            }
            Op::Flush | Op::Prefetch | Op::Record { .. } | Op::Block { .. } | Op::Fetch { .. } => {}
        }
        let id = self.next_request;
        self.next_request += 1;
        let closing = vol.place == Place::Removing || self.stopping;
        let sent = Sent { volume: v, op, first, sectors, buf, start, at: self.now, slot, verifies, closing };
        self.sent.insert(id, sent);
        let what = match op {
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
        };
        self.note(what, v as u64, first, sectors | start << 32);
        let request = Request { id, volume, op, offset, len, buf };
        let now = self.now;
        let engine = self.engine.as_mut().expect("clients send to a running core");
        engine.handle(now, Event::Request(request));
        true
    }

    /// The core answers a request.
    pub(crate) fn reply(&mut self, id: RequestId, result: Result<(), RequestError>) {
        let Some(sent) = self.sent.remove(&id) else {
            return self.fail(format!("request {id} is answered that is not in flight"));
        };
        self.tick += 1;
        let tick = self.tick;
        self.note("< reply", sent.start, tick, u64::from(result.is_err()));
        if let Some(buf) = sent.buf {
            let used = self.flights.values().any(|f| {
                f.buf.is_some_and(|b| b.offset < buf.offset + buf.len && buf.offset < b.offset + b.len)
            });
            if used {
                self.fail(format!("request {id} is answered while an effect uses its buffer"));
            }
        }
        let v = sent.volume;
        match result {
            Ok(()) => self.succeeded(&sent, tick),
            Err(error) => self.failed(id, &sent, tick, error),
        }
        if let (Some(buf), Some(engine)) = (sent.buf, &mut self.engine) {
            engine.arena_mut().free(buf);
        }
        if let Some(slot) = sent.slot {
            let think = self.vols[v].plan.think_ns;
            let pause = self.rng.around(think);
            self.after(pause, Happening::Client { volume: v, slot });
        } else if sent.verifies.is_some() {
            self.vols[v].verifying -= 1;
            let life = self.life;
            self.after(1, Happening::Verify { life, volume: v });
        }
        if self.ending != Ending::Not {
            self.after(1, Happening::End);
        }
    }

    fn succeeded(&mut self, sent: &Sent, tick: u64) {
        // What was decided in the moment of the failure may still come.
        if self.vols[sent.volume].failed_at.is_some_and(|at| at < self.now) {
            return self.fail(format!("{:?} of a failed volume succeeds", sent.op));
        }
        let vol = &mut self.vols[sent.volume];
        match sent.op {
            Op::Read => {
                let buf = sent.buf.expect("a read has a buffer");
                let engine = self.engine.as_ref().expect("replies come from a core");
                let bytes = engine.arena().bytes(buf);
                let skip = (sent.first as usize % SECTORS) * SECTOR_BYTES;
                let data = &bytes[skip..skip + sent.sectors as usize * SECTOR_BYTES];
                let value = u64::from_le_bytes(data[..8].try_into().expect("eight bytes"));
                let checked = vol.checker.end_read(sent.start, tick, sent.first, data);
                if vol.backend.is_away(self.now) {
                    self.cover.hit("served without backend");
                }
                self.note("< value", sent.start, sent.first, value);
                if let Err(what) = checked {
                    self.fail(format!("volume {}: {what}", sent.volume));
                }
            }
            Op::Flush => vol.checker.flushed(sent.start),
            Op::Prefetch | Op::Record { .. } | Op::Block { .. } | Op::Fetch { .. } => {}
            Op::Write { fua } | Op::Discard { fua } | Op::WriteZeroes { fua, .. } => {
                vol.changing -= 1;
                vol.checker.end_change(sent.start, tick, true, fua || !vol.flushed);
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
                vol.changing -= 1;
                vol.checker.end_change(sent.start, tick, false, false);
            }
        }
        if let Some(block) = sent.verifies
            && damage
            && vol.backend_error < sent.start
        {
            vol.checker.skip_verify(block);
        }
        let explained = match error {
            RequestError::Io => {
                let fenced = vol.backend.trouble == Trouble::Fenced;
                // A flush that the core has sent by itself is told of by the client's next one.
                let late = sent.op == Op::Flush && std::mem::take(&mut vol.flush_failed);
                damage || fenced || late || vol.backend_error > sent.start
            }
            RequestError::Shutdown => sent.closing,
            RequestError::Invalid | RequestError::ReadOnly => false,
        };
        if !explained {
            self.fail(format!("request {id} ({:?}) failed with {error:?} without a reason", sent.op));
        }
    }

    /// Something has happened that may have cost the only copy of a block.
    pub(crate) fn may_lose_data(&self) -> bool {
        self.disk.faults_done > 0
    }

    /// Looks at what a power loss has left of a volume, before clients use it.
    pub(crate) fn verify(&mut self, v: usize) {
        if self.vols[v].place != Place::Verifying || self.stopping || self.vols[v].verify_from == PAUSED {
            return;
        }
        while self.vols[v].verifying < LOOKS {
            let vol = &self.vols[v];
            let Some(block) = vol.checker.to_verify(vol.verify_from) else { break };
            // A lost block makes the whole read fail: what follows a failure is looked at one by one.
            let single = self.may_lose_data();
            let most = if single { 1 } else { LOOK_BLOCKS };
            let follow = (1..most).take_while(|i| vol.checker.to_verify(block + i) == Some(block + i));
            let blocks = 1 + follow.count() as u64;
            let offset = block * BLOCK_BYTES as u64;
            let len = (vol.plan.size_bytes - offset).min(blocks * BLOCK_BYTES as u64);
            if !self.send(v, Op::Read, offset, len, None, Some(block)) {
                let life = self.life;
                return self.after(RETRY_NS, Happening::Verify { life, volume: v });
            }
            let vol = &mut self.vols[v];
            vol.verify_from = block + blocks;
            vol.verifying += 1;
        }
        if self.vols[v].verifying > 0 {
            return;
        }
        if self.vols[v].checker.to_verify(0).is_some() {
            // Some looks failed because of the backend.
            self.vols[v].verify_from = PAUSED;
            let life = self.life;
            return self.after(S, Happening::VerifyAgain { life, volume: v });
        }
        let tick = self.next_tick();
        if let Err(what) = self.vols[v].checker.end_verify(tick) {
            return self.fail(format!("volume {v}: {what}"));
        }
        self.distrust(v);
        self.cover.hit("verified after power loss");
        self.vols[v].must_verify = false;
        self.serve(v);
    }

    /// Looks again at what could not be looked at.
    pub(crate) fn verify_again(&mut self, v: usize) {
        self.vols[v].verify_from = 0;
        self.verify(v);
    }

    /// Lets the clients of a volume go on.
    pub(crate) fn serve(&mut self, v: usize) {
        self.vols[v].place = Place::Serving;
        self.note("serving", v as u64, 0, 0);
        let mut idle = std::mem::take(&mut self.vols[v].idle_slots);
        idle.sort_unstable();
        for slot in idle {
            let pause = self.rng.below(10 * MS);
            self.after(pause, Happening::Client { volume: v, slot });
        }
        if self.ending != Ending::Not {
            self.after(1, Happening::End);
        }
    }
}
