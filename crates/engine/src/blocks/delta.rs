//! What a range of a volume's log has changed: for each block its last content.

use crate::api::Nanos;
use crate::blocks::index::{Lookup, OBJECT_BLOCKS, Position, VolumeIndex};

/// A delta keeps as many runs, and twice as many as it has blocks, before it looks which are of
/// use.
const RUNS_MIN: usize = 4096;

/// A delta that may grow.
pub(super) struct Delta {
    pub(super) index: VolumeIndex,
    /// Where `index` has its data blocks, in the order in which they came into the log, and where
    /// it had them.
    runs: Vec<Run>,
    /// When the first change came.
    pub(super) since: Nanos,
}

/// Blocks that follow each other in the volume and on the device.
#[derive(Debug, Clone, Copy)]
struct Run {
    block: u64,
    position: Position,
    n: u32,
}

/// What of a closed delta has been gathered.
#[derive(Debug)]
struct Cursor {
    /// Next run of the data, and block of it.
    run: usize,
    block: u32,
    /// Next object, and block of it, whose zeroes are to be gathered; `None` when all are.
    zeroes: Option<(u32, u32)>,
}

/// A delta that grows no more, and that is gathered once.
pub(super) struct Closed {
    pub(super) delta: Delta,
    cursor: Cursor,
    /// Blocks with frozen copies.
    pub(super) frozen: Vec<u64>,
    /// It is committed, and the image is being brought to it.
    pub(super) is_cut: bool,
}

impl Delta {
    pub(super) fn new() -> Delta {
        Delta { index: VolumeIndex::new(), runs: Vec::new(), since: 0 }
    }

    /// Data blocks have become current at `position` and those that follow.
    pub(super) fn insert(&mut self, block: u64, n: u32, position: Position) {
        self.index.insert(block, n, position, &mut |_, _, _| ());
        self.push(Run { block, position, n });
    }

    fn push(&mut self, run: Run) {
        match self.runs.last_mut() {
            Some(last)
                if (last.block + u64::from(last.n), last.position + last.n)
                    == (run.block, run.position) =>
            {
                last.n += run.n;
            }
            _ => self.runs.push(run),
        }
        if self.runs.len() > RUNS_MIN && self.runs.len() as u64 > 2 * self.index.blocks().at {
            let index = &self.index;
            let current = |run: &Run| {
                (0..run.n)
                    .any(|i| index.lookup(run.block + u64::from(i)) == Lookup::At(run.position + i))
            };
            self.runs.retain(current);
        }
    }

    /// Nothing has changed.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks() == 0
    }

    /// Blocks that have changed, zeroes among them.
    pub(super) fn blocks(&self) -> u64 {
        let blocks = self.index.blocks();
        blocks.at + blocks.zero
    }

    /// Takes in that blocks have changed.
    pub(super) fn note(&mut self, now: Nanos) {
        if self.is_empty() {
            self.since = now;
        }
    }

    /// Brings its data into the order in which it stands on the device.
    pub(super) fn sort(&mut self) {
        self.runs.sort_unstable_by_key(|run| run.position);
    }

    /// A copy has been moved.
    pub(super) fn moved(&mut self, block: u64, old: Position, new: Position) {
        if self.index.replace_if(block, old, new) {
            self.push(Run { block, position: new, n: 1 });
        }
    }
}

impl Closed {
    pub(super) fn new(delta: Delta) -> Closed {
        let cursor = Cursor { run: 0, block: 0, zeroes: Some((0, 0)) };
        Closed { delta, cursor, frozen: Vec::new(), is_cut: false }
    }

    /// A copy has been moved.
    pub(super) fn moved(&mut self, block: u64, old: Position, new: Position) {
        if self.delta.index.replace_if(block, old, new) && self.cursor.run < self.delta.runs.len() {
            // It may have been gathered already: then it is gathered twice.
            self.delta.runs.push(Run { block, position: new, n: 1 });
        }
    }

    /// Everything has been gathered.
    pub(super) fn is_gathered(&self) -> bool {
        self.cursor.run == self.delta.runs.len() && self.cursor.zeroes.is_none()
    }

    /// Gathers at most `max` data blocks, in the order of the log: most of them are read from the
    /// device in one go.
    pub(super) fn gather_blocks(&mut self, max: usize, take: &mut impl FnMut(u64, Position)) {
        let cursor = &mut self.cursor;
        let mut left = max as u32;
        while let Some(run) = self.delta.runs.get(cursor.run).filter(|_| left > 0) {
            if cursor.block == run.n {
                (cursor.run, cursor.block) = (cursor.run + 1, 0);
                continue;
            }
            let (block, position) =
                (run.block + u64::from(cursor.block), run.position + cursor.block);
            let (found, n) = self.delta.index.lookup_run(block, run.n - cursor.block);
            let n = if found == Lookup::At(position) { n.min(left) } else { n };
            if found == Lookup::At(position) {
                (0..n).for_each(|i| take(block + u64::from(i), position + i));
                left -= n;
            }
            cursor.block += n;
        }
    }

    /// Gathers at most `max` stretches of zeroes below block `end`, once all data is gathered: of
    /// which object, first block, blocks.
    pub(super) fn gather_zeroes(
        &mut self,
        max: usize,
        end: u64,
        take: &mut impl FnMut(u32, u64, u32),
    ) {
        const OBJECT: u32 = OBJECT_BLOCKS as u32;
        if self.cursor.run < self.delta.runs.len() {
            return;
        }
        let mut left = max;
        while let Some((object, done)) = self.cursor.zeroes.filter(|_| left > 0) {
            let found =
                if done > 0 { Some(object) } else { self.delta.index.objects(object).next() };
            self.cursor.zeroes = found.map(|object| (object + 1, 0));
            let Some(object) = found else { return };
            let first = u64::from(object) * u64::from(OBJECT);
            let (at, end) = (first + u64::from(done), end.min(first + u64::from(OBJECT)));
            if at >= end {
                continue;
            }
            let (found, n) = self.delta.index.lookup_run(at, (end - at) as u32);
            if found == Lookup::Zero {
                take(object, at, n);
                left -= 1;
            }
            if done + n < OBJECT {
                self.cursor.zeroes = Some((object, done + n));
            }
        }
    }
}

/// Groups of a volume that are not committed, or not in the image.
pub(super) struct Deltas {
    pub(super) open: Delta,
    pub(super) closed: Option<Closed>,
}

#[cfg(test)]
mod tests;
