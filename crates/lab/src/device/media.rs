//! The moving parts of an emulated device: when the media has done a command.

use super::spec::{Disk, Flash, Media, Nanos, Spec, transfer_ns};

/// Zones of a disk, each with its own rate and so its own track length.
const ZONES: u64 = 16;
/// How far a disk reads on after a read, in bytes.
const READ_AHEAD_BYTES: u64 = 1 << 20;

/// What the media is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Data from the media.
    Read,
    /// Data to the media.
    Write,
}

/// When the media is done with a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Timing {
    /// It can begin the next one.
    pub(super) free: Nanos,
    /// The data of this one is where it belongs.
    pub(super) done: Nanos,
}

/// The state of a device's media.
#[derive(Debug, Clone)]
pub(super) enum State {
    Disk(DiskState),
    Flash(FlashState),
}

impl State {
    pub(super) fn new(spec: &Spec, size_bytes: u64) -> State {
        match &spec.media {
            Media::Disk(disk) => State::Disk(DiskState::new(disk.clone(), size_bytes)),
            Media::Flash(flash) => State::Flash(FlashState::new(flash.clone())),
        }
    }

    /// Begins a command at `now`, which is not before the media was free.
    pub(super) fn start(&mut self, now: Nanos, access: Access, offset: u64, len: u64) -> Timing {
        match self {
            State::Disk(disk) => disk.start(now, access, offset, len),
            State::Flash(flash) => flash.start(now, access, len),
        }
    }

    /// How long the media would need to reach `offset`: what a queue is ordered by.
    pub(super) fn reach_ns(&self, now: Nanos, access: Access, offset: u64) -> Nanos {
        match self {
            State::Disk(disk) => disk.reach_ns(now, access, offset),
            State::Flash(_) => 0,
        }
    }

    /// Where the head is, in bytes from the begin of the device.
    pub(super) fn head(&self) -> u64 {
        match self {
            State::Disk(disk) => disk.head,
            State::Flash(_) => 0,
        }
    }

    /// How many commands the drive looks at to pick the next.
    pub(super) fn queue(&self) -> usize {
        match self {
            State::Disk(disk) => disk.spec.queue as usize,
            State::Flash(_) => 1,
        }
    }
}

/// An arm over turning platters.
#[derive(Debug, Clone)]
pub(super) struct DiskState {
    spec: Disk,
    size_bytes: u64,
    /// End of the last transfer, as a place and as a time.
    head: u64,
    head_at: Nanos,
    /// The last transfer was a read, which the drive goes on with on its own.
    reads_on: bool,
}

impl DiskState {
    fn new(spec: Disk, size_bytes: u64) -> DiskState {
        DiskState { spec, size_bytes: size_bytes.max(ZONES), head: 0, head_at: 0, reads_on: false }
    }

    fn start(&mut self, now: Nanos, access: Access, offset: u64, len: u64) -> Timing {
        let done = match self.read_ahead(now, access, offset, len) {
            Some(done) => done,
            None => now + self.reach_ns(now, access, offset) + self.transfer_ns(offset, len),
        };
        (self.head, self.head_at, self.reads_on) = (offset + len, done, access == Access::Read);
        Timing { free: done, done }
    }

    /// Seek and turn until the head is over `offset`.
    fn reach_ns(&self, now: Nanos, access: Access, offset: u64) -> Nanos {
        if self.read_ahead(now, access, offset, 0).is_some() {
            return 0;
        }
        let seek = self.seek_ns(self.head.abs_diff(offset));
        let turn = self.spec.turn_ns as f64;
        let angle = ((now + seek) % self.spec.turn_ns) as f64 / turn;
        let wait = (self.angle(offset) - angle).rem_euclid(1.0) * turn;
        // A whole turn less a rounding error is none.
        let wait = if wait > turn - 2.0 { 0 } else { wait as Nanos };
        seek + wait
    }

    /// When a read is done that goes on where the last one ended: the drive has read on meanwhile.
    fn read_ahead(&self, now: Nanos, access: Access, offset: u64, len: u64) -> Option<Nanos> {
        if !self.reads_on || access != Access::Read || offset != self.head {
            return None;
        }
        // The drive stops when its buffer is full; the head then waits over the place.
        let ahead = self.transfer_ns(offset, READ_AHEAD_BYTES.min(self.size_bytes));
        let from = self.head_at.max(now.saturating_sub(ahead));
        Some((from + self.transfer_ns(offset, len)).max(now))
    }

    /// Square root of the distance between the shortest and the longest seek; none within a track.
    fn seek_ns(&self, distance: u64) -> Nanos {
        if distance < self.track_bytes(self.zone(self.head)) {
            return 0;
        }
        let part = (distance as f64 / self.size_bytes as f64).sqrt();
        let range = self.spec.seek_max_ns.saturating_sub(self.spec.seek_min_ns) as f64;
        self.spec.seek_min_ns + (range * part) as Nanos
    }

    fn zone(&self, offset: u64) -> u64 {
        (u128::from(offset) * u128::from(ZONES) / u128::from(self.size_bytes)).min(u128::from(ZONES - 1))
            as u64
    }

    fn rate(&self, zone: u64) -> u64 {
        let slower = self.spec.outer_bytes_per_s.saturating_sub(self.spec.inner_bytes_per_s);
        self.spec.outer_bytes_per_s - slower * zone / (ZONES - 1)
    }

    fn track_bytes(&self, zone: u64) -> u64 {
        (u128::from(self.rate(zone)) * u128::from(self.spec.turn_ns) / 1_000_000_000).max(1) as u64
    }

    /// Where on the track `offset` is, as a part of a turn.
    fn angle(&self, offset: u64) -> f64 {
        let zone = self.zone(offset);
        let begin = (u128::from(zone) * u128::from(self.size_bytes)).div_ceil(u128::from(ZONES)) as u64;
        let track = self.track_bytes(zone);
        ((offset - begin) % track) as f64 / track as f64
    }

    fn transfer_ns(&self, offset: u64, len: u64) -> Nanos {
        transfer_ns(len, self.rate(self.zone(offset)))
    }
}

/// Chips that work side by side behind one controller.
#[derive(Debug, Clone)]
pub(super) struct FlashState {
    spec: Flash,
    free: Nanos,
    /// Bytes in the fast part.
    burst_used: u64,
}

impl FlashState {
    fn new(spec: Flash) -> FlashState {
        FlashState { spec, free: 0, burst_used: 0 }
    }

    fn start(&mut self, now: Nanos, access: Access, len: u64) -> Timing {
        let channel = match access {
            Access::Read => self.spec.read,
            Access::Write => self.spec.write,
        };
        let mut rate = channel.bytes_per_s;
        if let Some(burst) = self.spec.burst {
            let idle_ns = now.saturating_sub(self.free);
            let emptied = u128::from(idle_ns) * u128::from(burst.bytes_per_s_after) / 1_000_000_000;
            self.burst_used = self.burst_used.saturating_sub(emptied as u64);
            match access {
                Access::Read => {}
                Access::Write if self.burst_used + len > burst.bytes => rate = burst.bytes_per_s_after,
                Access::Write => self.burst_used += len,
            }
        }
        let free = now + channel.command_ns.max(transfer_ns(len, rate));
        self.free = free;
        Timing { free, done: free.max(now + channel.latency_ns + transfer_ns(len, rate)) }
    }
}
