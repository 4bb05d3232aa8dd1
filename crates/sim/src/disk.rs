//! The simulated cache device: blocking for format and recovery, and as effects while the core
//! runs.

use crate::rng::Rng;
use crate::store::{Content, Cut, Store, content, cut_mask};
use std::collections::BTreeSet;
use tidepool_engine::api::{BLOCK_BYTES, IoError, Nanos};
use tidepool_engine::device::{Device, DeviceRead};

/// EIO.
pub const EIO: IoError = IoError::Errno(5);

/// Probabilities of what goes wrong with a write, in parts per million.
#[derive(Debug, Clone, Copy, Default)]
pub struct DiskFaults {
    /// It is acknowledged, but a block of it never reaches the medium.
    lost_ppm: u64,
    /// A block of it lands elsewhere instead.
    misdirected_ppm: u64,
}

impl DiskFaults {
    /// With so many writes of which a block is lost, or lands elsewhere.
    pub fn new(lost_ppm: u64, misdirected_ppm: u64) -> DiskFaults {
        DiskFaults { lost_ppm, misdirected_ppm }
    }
}

/// What delays a disk for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delay {
    /// Nothing.
    None,
    /// Nothing completes.
    Stopped,
    /// Everything takes this many times longer.
    Slow(u64),
}

/// How writes and syncs of a disk fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failing {
    /// They do not.
    No,
    /// This many do, then all work again.
    Some(u32),
    /// All of them, for good.
    All,
}

/// A disk with a volatile write cache.
pub struct Disk {
    store: Store,
    blocks: u64,
    /// Blocks that cannot be read until they are written again.
    unreadable: BTreeSet<u64>,
    /// Writes or syncs have failed, or are about to.
    dead: bool,
    /// Which of them.
    failing: Failing,
    /// What delays it.
    delay: Delay,
    /// Until when.
    delay_until: Nanos,
    /// It says that a sync is done and does nothing.
    lies: bool,
    /// It has said so of something that is not stable yet.
    lied: bool,
    /// While a blocking caller works: operations until the machine or process stops.
    stop_after: Option<u64>,
    faults: DiskFaults,
    rng: Rng,
    /// Faults that took place and may have cost something.
    faults_done: u64,
    /// Faults by kind, since somebody asked.
    done: FaultsDone,
    /// Blocks that were read.
    blocks_read: u64,
}

/// Faults that took place.
#[derive(Debug, Clone, Copy, Default)]
pub struct FaultsDone {
    lost: u64,
    misdirected: u64,
    unreadable: u64,
    flipped: u64,
}

impl FaultsDone {
    /// With their names in [`crate::coverage::FAULTS`].
    pub fn named(&self) -> [(&'static str, u64); 4] {
        [
            ("lost write", self.lost),
            ("misdirected write", self.misdirected),
            ("unreadable block", self.unreadable),
            ("flipped bit", self.flipped),
        ]
    }
}

impl Disk {
    /// An empty disk.
    pub fn new(size_bytes: u64, rng: Rng) -> Disk {
        Disk {
            store: Store::default(),
            blocks: size_bytes / BLOCK_BYTES as u64,
            unreadable: BTreeSet::new(),
            dead: false,
            failing: Failing::No,
            delay: Delay::None,
            delay_until: 0,
            lies: false,
            lied: false,
            stop_after: None,
            faults: DiskFaults::default(),
            rng,
            faults_done: 0,
            done: FaultsDone::default(),
            blocks_read: 0,
        }
    }

    /// Writes or syncs have failed, or are about to.
    pub fn is_dead(&self) -> bool {
        self.dead
    }

    /// From now on what goes wrong is drawn from this stream.
    pub fn draw_from(&mut self, rng: Rng) {
        self.rng = rng;
    }

    /// From now on so many writes go wrong.
    pub fn set_faults(&mut self, faults: DiskFaults) {
        self.faults = faults;
    }

    /// Whether it says that a sync is done and does nothing.
    pub fn lies(&self) -> bool {
        self.lies
    }

    /// From now on it lies about syncs, or no longer.
    pub fn set_lies(&mut self, lies: bool) {
        self.lies = lies;
    }

    /// It has lied about something that is not stable yet.
    pub fn has_lied(&self) -> bool {
        self.lied
    }

    /// From now on this delays it, until then.
    pub fn set_delay(&mut self, delay: Delay, until: Nanos) {
        (self.delay, self.delay_until) = (delay, until);
    }

    /// Until when something delays it.
    pub fn delay_until(&self) -> Nanos {
        self.delay_until
    }

    /// No further faults, delays and lies. A dead one stays dead.
    pub fn heal(&mut self) {
        (self.faults, self.delay, self.lies) = (DiskFaults::default(), Delay::None, false);
    }

    /// While a blocking caller works: stops after so many operations, or never.
    pub fn stop_after(&mut self, operations: Option<u64>) {
        self.stop_after = operations;
    }

    /// It has stopped under a blocking caller.
    pub fn is_stopped(&self) -> bool {
        self.stop_after == Some(0)
    }

    /// A fault took place that may have cost something.
    pub fn may_have_lost(&self) -> bool {
        self.faults_done > 0
    }

    /// The faults that took place since this was asked last.
    pub fn take_faults_done(&mut self) -> FaultsDone {
        std::mem::take(&mut self.done)
    }

    /// Blocks that were read.
    pub fn blocks_read(&self) -> u64 {
        self.blocks_read
    }

    /// Reads blocks as an effect does.
    pub fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), IoError> {
        let first = offset / BLOCK_BYTES as u64;
        assert!(offset.is_multiple_of(BLOCK_BYTES as u64), "device reads are block-aligned");
        let blocks = (out.len() / BLOCK_BYTES) as u64;
        self.blocks_read += blocks;
        assert!(first + blocks <= self.blocks, "a read at {offset} goes past the device's end");
        if self.unreadable.range(first..first + blocks).next().is_some() {
            // What a failed read leaves in memory is anything.
            out.fill(0xbd);
            return Err(EIO);
        }
        for (i, out) in out.chunks_exact_mut(BLOCK_BYTES).enumerate() {
            self.store.read(first + i as u64, out);
        }
        Ok(())
    }

    /// Completes a write effect.
    pub fn write_at(&mut self, offset: u64, data: &[Content], dsync: bool) -> Result<(), IoError> {
        let first = offset / BLOCK_BYTES as u64;
        assert!(offset.is_multiple_of(BLOCK_BYTES as u64), "device writes are block-aligned");
        assert!(
            first + data.len() as u64 <= self.blocks,
            "a write at {offset} goes past the device's end"
        );
        if self.fails() {
            self.cut_at(offset, data);
            return Err(EIO);
        }
        let mut spoiled = None;
        if self.faults.lost_ppm > 0 && self.rng.below(1_000_000) < self.faults.lost_ppm {
            spoiled = Some(self.rng.below(data.len() as u64) as usize);
            self.done.lost += 1;
        }
        if self.faults.misdirected_ppm > 0
            && self.rng.below(1_000_000) < self.faults.misdirected_ppm
        {
            let n = self.rng.below(data.len() as u64) as usize;
            let elsewhere = self.rng.below(self.blocks);
            self.store.write(elsewhere, data[n].clone(), dsync);
            self.done.misdirected += 1;
            spoiled = Some(n);
        }
        self.faults_done += u64::from(spoiled.is_some());
        for (i, content) in data.iter().enumerate() {
            let block = first + i as u64;
            if spoiled == Some(i) {
                continue;
            }
            self.unreadable.remove(&block);
            self.store.write(block, content.clone(), dsync && !self.lies);
        }
        self.lied |= dsync && self.lies;
        Ok(())
    }

    /// A write that was in flight when its process was killed, or that failed.
    pub fn cut_at(&mut self, offset: u64, data: &[Content]) {
        let cut = Cut::random(&mut self.rng);
        let front = self.rng.bits();
        for (i, content) in data.iter().enumerate() {
            let mask = cut_mask(&mut self.rng, cut, i, data.len(), front);
            self.store.write_cut(offset / BLOCK_BYTES as u64 + i as u64, content, mask);
        }
    }

    /// See [`Store::sync_point`].
    pub fn sync_point(&self) -> u64 {
        self.store.sync_point()
    }

    /// Completes a sync effect.
    pub fn sync_to(&mut self, point: u64) -> Result<(), IoError> {
        if self.fails() {
            return Err(EIO);
        }
        if self.lies {
            self.lied |= !self.store.is_stable();
        } else {
            self.store.sync(point);
            self.lied &= !self.store.is_stable();
        }
        Ok(())
    }

    /// From now on writes and syncs fail, `some` of them or all.
    pub fn break_down(&mut self, some: Option<u32>) {
        self.dead = true;
        self.failing = some.map_or(Failing::All, Failing::Some);
    }

    /// It works again, with what it had on stable media and some of the rest.
    pub fn come_back(&mut self) {
        (self.dead, self.failing) = (false, Failing::No);
        self.power_loss();
    }

    fn fails(&mut self) -> bool {
        match &mut self.failing {
            Failing::No | Failing::Some(0) => false,
            Failing::Some(n) => {
                *n -= 1;
                true
            }
            Failing::All => true,
        }
    }

    /// Whether a block can be read and is still what was written.
    pub fn holds(&self, block: u64, content: &Content) -> bool {
        !self.unreadable.contains(&block) && self.store.get(block) == *content
    }

    /// What a reader of a block gets, `None` also where it gets an error.
    pub fn content(&self, block: u64) -> Content {
        if self.unreadable.contains(&block) { None } else { self.store.get(block) }
    }

    /// What delays it now.
    pub fn delay_now(&self, now: Nanos) -> Delay {
        if now < self.delay_until { self.delay } else { Delay::None }
    }

    /// What was not synced is lost, or not.
    pub fn power_loss(&mut self) {
        self.faults_done += u64::from(std::mem::take(&mut self.lied));
        self.store.power_loss(&mut self.rng);
    }

    /// Damages random blocks that are in use: they become unreadable, or a bit of each flips.
    pub fn damage(&mut self, blocks: u64) -> Vec<u64> {
        let used = self.store.used();
        if used.is_empty() {
            return used;
        }
        let chosen: Vec<u64> = (0..blocks).map(|_| self.rng.pick(&used)).collect();
        chosen.iter().for_each(|&block| self.damage_block(block));
        chosen
    }

    /// Damages one block in one of these ways.
    pub(crate) fn damage_block(&mut self, block: u64) {
        self.faults_done += 1;
        if self.rng.permille(500) {
            self.unreadable.insert(block);
            self.done.unreadable += 1;
        } else {
            self.done.flipped += 1;
            let mut bytes = [0; BLOCK_BYTES];
            self.store.read(block, &mut bytes);
            let bit = self.rng.below(BLOCK_BYTES as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
            self.store.damage(block, content(&bytes));
        }
    }

    /// A damaged block is again what it was.
    pub(crate) fn restore(&mut self, block: u64, content: Content) {
        self.unreadable.remove(&block);
        self.store.damage(block, content);
    }

    /// Blocks that are in use and can be read.
    pub(crate) fn readable(&self) -> impl Iterator<Item = u64> {
        self.store.used().into_iter().filter(|block| !self.unreadable.contains(block))
    }

    fn step(&mut self) -> Result<(), IoError> {
        match &mut self.stop_after {
            Some(0) => Err(EIO),
            Some(n) => {
                *n -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Device for Disk {
    fn size_bytes(&self) -> u64 {
        self.blocks * BLOCK_BYTES as u64
    }

    fn read(&mut self, batch: &mut [DeviceRead<'_>]) {
        for read in batch {
            read.result = self.step().and_then(|()| self.read_at(read.offset, read.buf));
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), IoError> {
        let data: Vec<Content> = data.chunks_exact(BLOCK_BYTES).map(content).collect();
        if self.stop_after == Some(0) {
            return Err(EIO);
        }
        if self.stop_after == Some(1) {
            // This very write is the one that is cut off.
            self.stop_after = Some(0);
            self.cut_at(offset, &data);
            return Err(EIO);
        }
        self.step()?;
        self.write_at(offset, &data, false)
    }

    fn sync(&mut self) -> Result<(), IoError> {
        self.step()?;
        self.sync_to(self.sync_point())
    }
}
