//! Blocks that are on their way from an image into the read cache, and the reads that wait for
//! them.

use crate::api::VolumeId;
use crate::base::flight::OpId;
use crate::base::mem::Buf;
use crate::base::util::FixedMap;

/// Most blocks that are on their way into the read cache; beyond, misses are not admitted.
const BLOCKS_MAX: usize = 16 * 1024;

/// A stretch of a request whose first block is on its way into the read cache already: it waits for
/// that instead of fetching the block a second time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitingRead {
    op: OpId,
    volume: VolumeId,
    block: u64,
    blocks: u32,
    buf: Buf,
}

impl WaitingRead {
    /// `blocks` blocks from `block` on of the image of `volume`, which is that of the operation or
    /// a parent of it, into `buf`.
    pub(crate) fn new(
        op: OpId,
        volume: VolumeId,
        block: u64,
        blocks: u32,
        buf: Buf,
    ) -> WaitingRead {
        WaitingRead { op, volume, block, blocks, buf }
    }

    pub(crate) fn op(&self) -> OpId {
        self.op
    }

    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    pub(crate) fn buf(&self) -> Buf {
        self.buf
    }
}

/// Blocks on their way from images into the read cache.
pub(crate) struct Arriving {
    /// Which read or staged copy is going to bring a block. A change of the block takes it out: the
    /// bytes that are on their way are then not the newest any more.
    pending: FixedMap<(VolumeId, u64), u32>,
    /// The number of the next read or staged copy. It may wrap: only what is pending must differ.
    next: u32,
    waiting: Vec<WaitingRead>,
    /// Something that reads may be waiting for is not pending any more.
    arrived: bool,
    /// Some blocks are staged in appends that are still open.
    is_open: bool,
    /// A read waits for something that is in an open append.
    wanted: bool,
}

impl Arriving {
    pub(crate) fn new() -> Arriving {
        let mut pending = FixedMap::default();
        pending.reserve(BLOCKS_MAX);
        let waiting = Vec::with_capacity(256);
        Arriving { pending, next: 1, waiting, arrived: false, is_open: false, wanted: false }
    }

    /// Nothing brings anything into the read cache any more; who has waited for it looks elsewhere.
    pub(crate) fn abandon(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        *self = Arriving { waiting, arrived: true, ..Arriving::new() };
    }

    /// The number of a read or of a staged copy.
    pub(crate) fn take_number(&mut self) -> u32 {
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        number
    }

    /// So many blocks more may be on their way.
    pub(crate) fn has_room(&self, blocks: u32) -> bool {
        self.pending.len() + blocks as usize <= BLOCKS_MAX
    }

    /// The read `number` brings a block, unless something does already.
    pub(crate) fn begin(&mut self, volume: VolumeId, block: u64, number: u32) {
        self.pending.entry((volume, block)).or_insert(number);
    }

    /// Whether the read or staged copy `number` is still the one that brings a block.
    pub(crate) fn brings(&self, volume: VolumeId, block: u64, number: u32) -> bool {
        self.pending.get(&(volume, block)) == Some(&number)
    }

    /// The block has been read, and the staged copy `number` brings it now.
    pub(crate) fn stage(&mut self, volume: VolumeId, block: u64, number: u32) {
        self.pending.insert((volume, block), number);
        self.wanted |= self.waiting.iter().any(|read| (read.volume, read.block) == (volume, block));
    }

    /// The block is in the read cache, or is not going to be.
    pub(crate) fn settle(&mut self, volume: VolumeId, block: u64) {
        self.arrived |= self.pending.remove(&(volume, block)).is_some();
    }

    /// Blocks have changed: what is on its way is not the newest any more. Returns how many of them
    /// were.
    pub(crate) fn overtake(&mut self, volume: VolumeId, first: u64, blocks: u64) -> u64 {
        let pending = &mut self.pending;
        if pending.is_empty() {
            return 0;
        }
        let before = pending.len();
        if blocks > pending.len() as u64 {
            pending.retain(|&(v, b), _| v != volume || b < first || b >= first + blocks);
        } else {
            for block in first..first + blocks {
                pending.remove(&(volume, block));
            }
        }
        let overtaken = (before - pending.len()) as u64;
        self.arrived |= overtaken > 0;
        overtaken
    }

    /// Whether a block is on its way, and how many of the `n` from it on are like it.
    pub(crate) fn run(&self, volume: VolumeId, block: u64, n: u32) -> (bool, u32) {
        if self.pending.is_empty() {
            return (false, n);
        }
        let pending = |i: u32| self.pending.contains_key(&(volume, block + u64::from(i)));
        let first = pending(0);
        (first, (0..n).take_while(|&i| pending(i) == first).count() as u32)
    }

    /// A read waits until its first block has arrived. It may be in an open append already.
    pub(crate) fn wait(&mut self, read: WaitingRead) {
        self.waiting.push(read);
        self.wanted |= self.is_open;
    }

    /// An append is open in which blocks are staged.
    pub(crate) fn note_open(&mut self) {
        self.is_open = true;
    }

    /// An append with staged blocks is written; `is_open` says whether there is another one.
    pub(crate) fn note_issued(&mut self, is_open: bool) {
        self.is_open = is_open;
        self.wanted &= is_open;
    }

    /// A read waits for something that is in an open append.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted
    }

    /// Reads that have waited can go on.
    pub(crate) fn wakes(&self) -> bool {
        self.arrived && !self.waiting.is_empty()
    }

    /// Whether something has arrived, or is not going to, since this was asked last.
    pub(crate) fn take_arrived(&mut self) -> bool {
        std::mem::take(&mut self.arrived)
    }

    /// Takes out the next read, from place `at` on, whose first block is not on its way any more.
    pub(crate) fn next_arrived(&mut self, at: &mut usize) -> Option<WaitingRead> {
        while let Some(&read) = self.waiting.get(*at) {
            if !self.pending.contains_key(&(read.volume, read.block)) {
                self.waiting.swap_remove(*at);
                return Some(read);
            }
            *at += 1;
        }
        None
    }
}
