//! What one object's table says, and how a stretch of it is rewritten: pure functions on slices.

use super::{Lookup, OBJECT_BLOCKS, POSITION_END};
use std::ops::Range;

/// Most blocks of one run.
pub(super) const RUN_BLOCKS_MAX: u32 = 64;

// Values of a run besides positions; all of them are above POSITION_END.
/// The block is not in the cache.
pub(super) const ABSENT: u32 = u32::MAX - 2;
/// The block's only copy is lost.
pub(super) const LOST: u32 = u32::MAX - 1;
/// The block reads as zero.
pub(super) const ZERO: u32 = u32::MAX;

/// What a value means.
pub(super) fn decode(value: u32) -> Lookup {
    match value {
        ABSENT => Lookup::Absent,
        LOST => Lookup::Lost,
        ZERO => Lookup::Zero,
        position => Lookup::At(position),
    }
}

/// The value `blocks` further on in a stretch that begins with `value`.
pub(super) fn advance(value: u32, blocks: u32) -> u32 {
    if value < POSITION_END { value + blocks } else { value }
}

/// Blocks of an object that follow each other in both spaces. At most [`RUN_BLOCKS_MAX`] in a
/// table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: u32,
    pub(super) blocks: u32,
    pub(super) value: u32,
}

impl Run {
    pub(super) fn end(&self) -> u32 {
        self.start + self.blocks
    }

    /// The same blocks in pieces that fit into runs.
    pub(super) fn chunks(self) -> impl Iterator<Item = Run> {
        (0..self.blocks).step_by(RUN_BLOCKS_MAX as usize).map(move |done| Run {
            start: self.start + done,
            blocks: (self.blocks - done).min(RUN_BLOCKS_MAX),
            value: advance(self.value, done),
        })
    }

    fn continues_with(&self, next: &Run) -> bool {
        self.end() == next.start && advance(self.value, self.blocks) == next.value
    }

    fn key(&self) -> u16 {
        (self.start << 6 | (self.blocks - 1)) as u16
    }
}

fn start_of(key: u16) -> u32 {
    u32::from(key >> 6)
}

fn end_of(key: u16) -> u32 {
    start_of(key) + u32::from(key & 63) + 1
}

/// Keys on either side of the guessed place that are searched first: about two cache lines.
const GUESS_REACH: usize = 24;

/// Number of runs that start at or before `at`. In a long table of scattered blocks it is close to
/// what `at` makes expect; looking there first spares most of the cache misses of a binary search.
fn count_starts(keys: &[u16], at: u32) -> usize {
    let before = |key: &u16| start_of(*key) <= at;
    let guess = keys.len() * at as usize / OBJECT_BLOCKS;
    let (low, high) = (guess.saturating_sub(GUESS_REACH), (guess + GUESS_REACH).min(keys.len()));
    let low_fits = low == 0 || before(&keys[low - 1]);
    let high_fits = high == keys.len() || !before(&keys[high]);
    match (low_fits, high_fits) {
        (true, true) => low + keys[low..high].partition_point(before),
        (true, false) => high + keys[high..].partition_point(before),
        (false, _) => keys[..low].partition_point(before),
    }
}

/// One object's table, to read.
#[derive(Clone, Copy)]
pub(super) enum Table<'a> {
    /// Sorted runs; blocks in no run have the value `gap`.
    Runs { positions: &'a [u32], keys: &'a [u16], gap: u32 },
    /// A value for each block.
    Flat(&'a [u32]),
}

impl<'a> Table<'a> {
    /// Number of runs (blocks, when flat).
    pub(super) fn len(&self) -> usize {
        match self {
            Table::Runs { keys, .. } => keys.len(),
            Table::Flat(values) => values.len(),
        }
    }

    /// The value of one block.
    pub(super) fn value(&self, at: u32) -> u32 {
        match *self {
            Table::Flat(values) => values[at as usize],
            Table::Runs { .. } => self.piece(self.first_ending_after(at), at).value,
        }
    }

    /// Index of the first run that ends after `at`.
    pub(super) fn first_ending_after(&self, at: u32) -> usize {
        match *self {
            Table::Flat(_) => at as usize,
            Table::Runs { keys, .. } => {
                // The last run that starts at or before `at` is the only one that can contain it.
                let after = count_starts(keys, at);
                if after > 0 && end_of(keys[after - 1]) > at { after - 1 } else { after }
            }
        }
    }

    /// Run number `i`.
    pub(super) fn run(&self, i: usize) -> Run {
        match *self {
            Table::Flat(values) => Run { start: i as u32, blocks: 1, value: values[i] },
            Table::Runs { positions, keys, .. } => {
                let start = start_of(keys[i]);
                Run { start, blocks: end_of(keys[i]) - start, value: positions[i] }
            }
        }
    }

    /// From `at` to the end of its run or gap, where run `i` is the first that ends after `at`.
    fn piece(&self, i: usize, at: u32) -> Run {
        match *self {
            Table::Flat(values) => Run { start: at, blocks: 1, value: values[at as usize] },
            Table::Runs { keys, gap, .. } => {
                if i == keys.len() {
                    return Run { start: at, blocks: OBJECT_BLOCKS as u32 - at, value: gap };
                }
                let run = self.run(i);
                if run.start > at {
                    Run { start: at, blocks: run.start - at, value: gap }
                } else {
                    Run {
                        start: at,
                        blocks: run.end() - at,
                        value: advance(run.value, at - run.start),
                    }
                }
            }
        }
    }

    /// The longest homogeneous stretch from `at` up to `limit`, of any length. `i` is the first run
    /// that ends after `at`; it is moved on to where the next stretch begins, unless `limit` cut
    /// this one.
    pub(super) fn stretch(&self, i: &mut usize, at: u32, limit: u32) -> Run {
        let mut whole = self.piece(*i, at);
        loop {
            // A piece inside of a gap ends where run `i` starts, and then `i` is still the next.
            while *i < self.len() && self.run(*i).end() <= whole.end() {
                *i += 1;
            }
            if whole.end() >= limit {
                whole.blocks = limit - at;
                return whole;
            }
            let next = self.piece(*i, whole.end());
            if !whole.continues_with(&next) {
                return whole;
            }
            whole.blocks += next.blocks;
        }
    }
}

/// All stretches of a table, from the object's first block to its last.
pub(super) fn stretches(table: Table<'_>) -> impl Iterator<Item = Run> {
    let (mut i, mut at) = (0, 0);
    std::iter::from_fn(move || {
        (at < OBJECT_BLOCKS as u32).then(|| {
            let run = table.stretch(&mut i, at, OBJECT_BLOCKS as u32);
            at = run.end();
            run
        })
    })
}

/// Most runs that one change writes: 16 full ones of an object, one more for each of the places
/// where contiguity may break (before and after the change, and at the end).
const SPLICE_RUNS_MAX: usize = 20;

/// A change of a run table: runs `from..to` give way to `runs`.
pub(super) struct Splice {
    pub(super) from: usize,
    pub(super) to: usize,
    runs: [Run; SPLICE_RUNS_MAX],
    len: usize,
}

impl Splice {
    /// How some blocks of a table get `value` (that of the first of them); run `first` is the first
    /// that ends after their start. Neighbours that continue the change are joined with it, so that
    /// no two runs stay apart that fit into one.
    pub(super) fn plan(
        table: &Table<'_>,
        first: usize,
        gap: u32,
        blocks: Range<u32>,
        value: u32,
    ) -> Splice {
        let Range { start, end } = blocks;
        let mut to = first;
        let mut splice = Splice {
            from: first,
            to,
            runs: [Run { start: 0, blocks: 0, value: gap }; SPLICE_RUNS_MAX],
            len: 0,
        };
        let mut rest = None;
        while to < table.len() {
            let run = table.run(to);
            if run.start >= end {
                break;
            }
            if run.start < start {
                splice.push(Run { start: run.start, blocks: start - run.start, value: run.value });
            }
            if run.end() > end {
                rest = Some(Run {
                    start: end,
                    blocks: run.end() - end,
                    value: advance(run.value, end - run.start),
                });
            }
            to += 1;
        }
        let change = Run { start, blocks: end - start, value };
        if first > 0 {
            let before = table.run(first - 1);
            let next = if splice.len > 0 { splice.runs[0] } else { change };
            if (splice.len > 0 || value != gap) && before.continues_with(&next) {
                splice.from -= 1;
                let kept = splice.len;
                splice.len = 0;
                splice.push(before);
                if kept > 0 {
                    splice.push(next);
                }
            }
        }
        if value != gap {
            splice.push(change);
        }
        if let Some(rest) = rest {
            splice.push(rest);
        }
        while splice.len > 0 && to < table.len() {
            let (last, next) = (splice.runs[splice.len - 1], table.run(to));
            if last.blocks == RUN_BLOCKS_MAX || !last.continues_with(&next) {
                break;
            }
            splice.push(next);
            to += 1;
        }
        splice.to = to;
        splice
    }

    /// The new runs.
    pub(super) fn runs(&self) -> &[Run] {
        &self.runs[..self.len]
    }

    fn push(&mut self, mut run: Run) {
        if self.len > 0 {
            let last = &mut self.runs[self.len - 1];
            if last.continues_with(&run) {
                let joined = run.blocks.min(RUN_BLOCKS_MAX - last.blocks);
                last.blocks += joined;
                run = Run {
                    start: run.start + joined,
                    blocks: run.blocks - joined,
                    value: advance(run.value, joined),
                };
            }
        }
        while run.blocks > 0 {
            let blocks = run.blocks.min(RUN_BLOCKS_MAX);
            self.runs[self.len] = Run { blocks, ..run };
            self.len += 1;
            run = Run {
                start: run.start + blocks,
                blocks: run.blocks - blocks,
                value: advance(run.value, blocks),
            };
        }
    }

    /// Carries the change out in a table with `count` runs and room for the outcome.
    pub(super) fn apply(&self, positions: &mut [u32], keys: &mut [u16], count: usize) {
        if self.from + self.len != self.to {
            positions.copy_within(self.to..count, self.from + self.len);
            keys.copy_within(self.to..count, self.from + self.len);
        }
        for (i, run) in self.runs().iter().enumerate() {
            positions[self.from + i] = run.value;
            keys[self.from + i] = run.key();
        }
    }
}

/// Writes runs one after the other into an empty table.
pub(super) fn write_runs(
    positions: &mut [u32],
    keys: &mut [u16],
    runs: impl Iterator<Item = Run>,
) -> usize {
    let mut n = 0;
    for run in runs {
        (positions[n], keys[n]) = (run.value, run.key());
        n += 1;
    }
    n
}
