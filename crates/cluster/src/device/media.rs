//! The media of an emulated device: when it has done an access.

use super::spec::{Disk, Flash, Media, Nanos, Spec, transfer_ns};

/// Number of a disk's zones. Each zone has a rate of its own, and so a track length of its own.
const ZONES: u64 = 16;
/// How far a disk reads ahead after a read, in bytes.
const READ_AHEAD_BYTES: u64 = 1 << 20;

/// The kind of an access to the media.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Data from the media.
    Read,
    /// Data to the media.
    Write,
}

/// When the media is done with an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Timing {
    /// When the media can begin the next access.
    pub(super) free: Nanos,
    /// When the data of this access is where it belongs.
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

    /// Begins an access at `now`, at which the media must be free.
    pub(super) fn start(&mut self, now: Nanos, access: Access, offset: u64, len: u64) -> Timing {
        match self {
            State::Disk(disk) => disk.start(now, access, offset, len),
            State::Flash(flash) => flash.start(now, access, len),
        }
    }

    /// Time that the media needs to reach `offset`. The next command of a queue is picked by it.
    pub(super) fn reach_ns(&self, now: Nanos, access: Access, offset: u64) -> Nanos {
        match self {
            State::Disk(disk) => disk.reach_ns(now, access, offset),
            State::Flash(_) => 0,
        }
    }

    /// Position of the head, in bytes from the begin of the device; 0 for flash.
    pub(super) fn head(&self) -> u64 {
        match self {
            State::Disk(disk) => disk.head,
            State::Flash(_) => 0,
        }
    }

    /// Number of commands among which the drive picks the next one.
    pub(super) fn queue(&self) -> usize {
        match self {
            State::Disk(disk) => disk.spec.queue as usize,
            State::Flash(_) => 1,
        }
    }
}

/// A disk: an arm over turning platters.
#[derive(Debug, Clone)]
pub(super) struct DiskState {
    spec: Disk,
    size_bytes: u64,
    /// Where the last transfer ended, and when.
    head: u64,
    head_at: Nanos,
    /// Whether the last transfer was a read; the drive then reads ahead.
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

    /// Time to seek and turn until the head is over `offset`; 0 if the read-ahead has reached it.
    fn reach_ns(&self, now: Nanos, access: Access, offset: u64) -> Nanos {
        if self.read_ahead(now, access, offset, 0).is_some() {
            return 0;
        }
        let seek = self.seek_ns(self.head.abs_diff(offset));
        let turn = self.spec.turn_ns as f64;
        let angle = ((now + seek) % self.spec.turn_ns) as f64 / turn;
        let wait = (self.angle(offset) - angle).rem_euclid(1.0) * turn;
        // A wait of a whole turn, less a rounding error, is no wait.
        let wait = if wait > turn - 2.0 { 0 } else { wait as Nanos };
        seek + wait
    }

    /// When a read is done that continues the last read: the drive has read ahead meanwhile. `None`
    /// for any other access.
    fn read_ahead(&self, now: Nanos, access: Access, offset: u64, len: u64) -> Option<Nanos> {
        if !self.reads_on || access != Access::Read || offset != self.head {
            return None;
        }
        // The drive stops when its buffer is full. The head then waits over that place.
        let ahead = self.transfer_ns(offset, READ_AHEAD_BYTES.min(self.size_bytes));
        let from = self.head_at.max(now.saturating_sub(ahead));
        Some((from + self.transfer_ns(offset, len)).max(now))
    }

    /// Seek time for a distance: between the shortest and the longest seek it grows with the square
    /// root of the distance. 0 within a track.
    fn seek_ns(&self, distance: u64) -> Nanos {
        if distance < self.track_bytes(self.zone(self.head)) {
            return 0;
        }
        let part = (distance as f64 / self.size_bytes as f64).sqrt();
        let range = self.spec.seek_max_ns.saturating_sub(self.spec.seek_min_ns) as f64;
        self.spec.seek_min_ns + (range * part) as Nanos
    }

    fn zone(&self, offset: u64) -> u64 {
        (u128::from(offset) * u128::from(ZONES) / u128::from(self.size_bytes))
            .min(u128::from(ZONES - 1)) as u64
    }

    fn rate(&self, zone: u64) -> u64 {
        let slower = self.spec.outer_bytes_per_s.saturating_sub(self.spec.inner_bytes_per_s);
        self.spec.outer_bytes_per_s - slower * zone / (ZONES - 1)
    }

    fn track_bytes(&self, zone: u64) -> u64 {
        (u128::from(self.rate(zone)) * u128::from(self.spec.turn_ns) / 1_000_000_000).max(1) as u64
    }

    /// The position of `offset` on its track, as a part of a turn.
    fn angle(&self, offset: u64) -> f64 {
        let zone = self.zone(offset);
        let begin =
            (u128::from(zone) * u128::from(self.size_bytes)).div_ceil(u128::from(ZONES)) as u64;
        let track = self.track_bytes(zone);
        ((offset - begin) % track) as f64 / track as f64
    }

    fn transfer_ns(&self, offset: u64, len: u64) -> Nanos {
        transfer_ns(len, self.rate(self.zone(offset)))
    }
}

/// Flash chips that work in parallel behind one controller.
#[derive(Debug, Clone)]
pub(super) struct FlashState {
    spec: Flash,
    free: Nanos,
    /// Bytes in the single-level cells.
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
                Access::Write if self.burst_used + len > burst.bytes => {
                    rate = burst.bytes_per_s_after
                }
                Access::Write => self.burst_used += len,
            }
        }
        let free = now + channel.command_ns.max(transfer_ns(len, rate));
        self.free = free;
        Timing { free, done: free.max(now + channel.latency_ns + transfer_ns(len, rate)) }
    }
}
