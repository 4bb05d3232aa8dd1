//! Faults of an emulated device: power failures, errors, and operations that the device holds while
//! a process is killed.
//!
//! There are no faults unless they are requested. A [`plan`](Faults::plan) gets each read, write,
//! flush and trim before the operation takes effect. Whether a power failure loses writes is set
//! separately ([`Faults::volatile`]). Times are those of the model in any case.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::emulated::Answer;
use super::files::Extent;
use super::model::Kind;
use super::volatile::{Losses, Number, Piece, SECTOR_BYTES, Volatile, tear};
use crate::random::Random;

/// An operation on a file of a device, when it arrives.
#[derive(Debug, Clone, Copy)]
pub struct Operation<'a> {
    /// The kind of the operation.
    pub kind: Kind,
    /// Number of operations of this kind since the plan was made, including this one.
    pub number: u64,
    /// Name of the file; empty for the directory, and for a file without a name.
    pub file: &'a str,
    /// Offset in the file, in bytes; 0 for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
    /// The data of a write.
    pub data: &'a [u8],
    /// Whether the data has to be on the media when the operation is answered (`O_DSYNC`).
    pub durable: bool,
}

/// How much takes effect of an operation that is not answered with success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remains {
    /// Nothing.
    Nothing,
    /// Some sectors of a write; nothing of a flush or a trim.
    Part,
    /// All of it.
    All,
}

/// What the device does with an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The operation is done and answered.
    Pass,
    /// The operation is answered with an I/O error.
    Fail(Remains),
    /// The operation gets no answer, and later operations are not processed, until
    /// [`Faults::disconnect`].
    Hold(Remains),
}

/// How often an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// Once.
    Once,
    /// The operation, and all later ones of its kind.
    Always,
}

/// A function that decides about each read, write, flush and trim.
type Plan = Box<dyn FnMut(&Operation<'_>) -> Act + Send>;

/// The faults of a device.
#[derive(Default)]
pub struct Faults {
    /// Whether the state has to be considered for operations.
    active: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    plan: Option<Plan>,
    seen: [u64; 4],
    volatile: Option<Volatile>,
    link: Link,
    held: bool,
    /// Answers of operations that were completed while the device was cut off.
    withheld: Vec<Answer>,
    /// Number of operations that arrived while the device fails all operations.
    refused: u64,
    random: Option<Random>,
}

/// The state between the device and its users.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// Operations are taken and answered.
    #[default]
    Up,
    /// No operation is taken or answered.
    Cut,
    /// All operations fail.
    Down,
}

/// What becomes of an operation, for the device's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fate {
    remains: Remains,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Answer,
    Error,
    Hold,
    /// An error, because the device is gone.
    Gone,
}

/// What becomes stable when an operation is answered.
#[derive(Debug, Default)]
pub(super) enum Ticket {
    /// Nothing that is tracked.
    #[default]
    None,
    /// Nothing yet; a later flush covers this write.
    Write(Number),
    /// This write.
    Durable(Number),
    /// These writes.
    Flush(Vec<Number>),
}

impl Fate {
    /// What becomes of all operations of a device without faults.
    pub(super) const PASS: Fate = Fate { remains: Remains::All, end: End::Answer };

    /// Whether a trim clears its range.
    pub(super) fn clears(self) -> bool {
        self.remains == Remains::All
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("active", &self.active).finish_non_exhaustive()
    }
}

impl Faults {
    /// With `true`: from now on a power failure loses writes until a flush, or their own `O_DSYNC`,
    /// has made them stable. With `false`: all writes are stable.
    pub fn volatile(&self, on: bool) {
        let mut state = self.lock();
        state.volatile = on.then(Volatile::default);
        self.update(&state);
    }

    /// Calls `plan` for each read, write, flush and trim from now on, in the order in which they
    /// arrive. `plan` must not use the device.
    pub fn plan(&self, plan: impl FnMut(&Operation<'_>) -> Act + Send + 'static) {
        let mut state = self.lock();
        state.plan = Some(Box::new(plan));
        state.seen = Default::default();
        self.update(&state);
    }

    /// Makes the operation of a kind with this number fail, counted from now on and from 1.
    pub fn fail(&self, kind: Kind, number: u64, times: Times, remains: Remains) {
        self.plan(move |operation| {
            let hit =
                operation.number == number || operation.number > number && times == Times::Always;
            if operation.kind == kind && hit { Act::Fail(remains) } else { Act::Pass }
        });
    }

    /// Number of operations of a kind since the plan was made.
    pub fn seen(&self, kind: Kind) -> u64 {
        self.lock().seen[place(kind)]
    }

    /// Waits until an operation is held, for at most `limit`; returns whether one is held.
    pub fn wait_held(&self, limit: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, |state| !state.held);
        waited.expect("no thread panics while it holds the faults").0.held
    }

    /// Makes the device take and answer nothing from now on, as when the power fails. A process
    /// that uses the device can then be killed, if [`Faults::disconnect`] follows: the kernel does
    /// not end a process before its device has answered.
    pub fn cut(&self) {
        let mut state = self.lock();
        state.link = Link::Cut;
        self.active.store(true, Ordering::Release);
    }

    /// Makes all operations fail that are held, under way or arrive from now on, as when the device
    /// has failed. From now on these operations have no further effect.
    pub fn disconnect(&self) {
        let withheld = {
            let mut state = self.lock();
            state.link = Link::Down;
            state.held = false;
            self.active.store(true, Ordering::Release);
            self.changed.notify_all();
            std::mem::take(&mut state.withheld)
        };
        // A dropped answer is an I/O error.
        drop(withheld);
    }

    /// Number of operations that arrived while all operations failed ([`Faults::disconnect`]).
    pub fn refused(&self) -> u64 {
        self.lock().refused
    }

    /// Brings the device back, without a plan.
    pub fn reconnect(&self) {
        let mut state = self.lock();
        state.link = Link::Up;
        if let Some(volatile) = &mut state.volatile {
            volatile.all_over();
        }
        state.plan = None;
        self.update(&state);
        self.changed.notify_all();
    }

    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    fn update(&self, state: &State) {
        let active = state.plan.is_some() || state.volatile.is_some() || state.link != Link::Up;
        self.active.store(active, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the faults")
    }

    /// Decides what becomes of an operation, and gives the operation its number. Waits while the
    /// device is cut off.
    pub(super) fn begin(&self, operation: Operation<'_>) -> Fate {
        let cut = self.changed.wait_while(self.lock(), |state| state.link == Link::Cut);
        let state = &mut *cut.expect("no thread panics while it holds the faults");
        if state.link == Link::Down {
            state.refused += 1;
            return Fate { remains: Remains::Nothing, end: End::Gone };
        }
        let seen = &mut state.seen[place(operation.kind)];
        *seen += 1;
        let operation = Operation { number: *seen, ..operation };
        match state.plan.as_mut().map_or(Act::Pass, |plan| plan(&operation)) {
            Act::Pass => Fate::PASS,
            Act::Fail(remains) => Fate { remains, end: End::Error },
            Act::Hold(remains) => Fate { remains, end: End::Hold },
        }
    }

    /// Whether an operation that has taken effect is answered with success. An operation that has
    /// to be held waits in here.
    pub(super) fn passes(&self, fate: Fate) -> bool {
        if fate.end == End::Hold {
            let mut state = self.lock();
            state.held = state.link != Link::Down;
            self.changed.notify_all();
            let held = self.changed.wait_while(state, |state| state.held);
            drop(held.expect("no thread panics while it holds the faults"));
        }
        fate.end == End::Answer
    }

    /// Writes the part of a write that takes effect to the device's file.
    pub(super) fn write(
        &self,
        file: &File,
        extents: &[Extent],
        data: &[u8],
        durable: bool,
        fate: Fate,
    ) -> io::Result<Ticket> {
        if !self.is_active() {
            return put(file, extents, data).map(|()| Ticket::None);
        }
        if fate.remains == Remains::Nothing {
            return Ok(Ticket::None);
        }
        let state = &mut *self.lock();
        let mut pieces = read_pieces(file, extents, data)?;
        if fate.remains == Remains::Part {
            let random = state.random.get_or_insert_with(|| Random::new(0));
            tear_pieces(&mut pieces, random);
        }
        for (piece, &(place, len)) in pieces.iter().zip(extents) {
            let place = place.expect("a write has its space");
            let skip = (place - piece.sector * SECTOR_BYTES as u64) as usize;
            file.write_all_at(&piece.after[skip..skip + len as usize], place)?;
        }
        let Some(volatile) = &mut state.volatile else { return Ok(Ticket::None) };
        let number = volatile.write(pieces);
        Ok(match (fate.end, durable) {
            (End::Answer, false) => Ticket::Write(number),
            (End::Answer, true) => Ticket::Durable(number),
            (_, true) if fate.remains == Remains::All => {
                volatile.stable(&[number]);
                Ticket::None
            }
            (End::Error, _) => Ticket::Write(number),
            // The write gets no answer. It is over when the device is reconnected.
            _ => Ticket::None,
        })
    }

    /// What a flush makes stable when it is answered.
    pub(super) fn flush(&self, fate: Fate) -> Ticket {
        let Some(volatile) = &mut self.lock().volatile else { return Ticket::None };
        let due = volatile.flushable();
        match fate {
            Fate { end: End::Answer, .. } => return Ticket::Flush(due),
            Fate { remains: Remains::All, .. } => volatile.stable(&due),
            Fate { end: End::Error, .. } => volatile.forsake(&due),
            _ => {}
        }
        Ticket::None
    }

    /// Records that these ranges of the device become zeroes, which are stable at once.
    pub(super) fn clear(&self, file: &File, places: &[(u64, u64)]) -> io::Result<()> {
        let Some(volatile) = &mut self.lock().volatile else { return Ok(()) };
        for &(place, len) in places {
            let pieces = read_pieces(file, &[(Some(place), len)], &vec![0; len as usize])?;
            let number = volatile.write(pieces);
            volatile.stable(&[number]);
        }
        Ok(())
    }

    /// Answers a complete operation, unless the device is cut off.
    pub(super) fn complete(&self, answer: Answer, ticket: Ticket) {
        if !self.is_active() {
            return answer.send();
        }
        let state = &mut *self.lock();
        match state.link {
            Link::Cut => state.withheld.push(answer),
            Link::Down => drop(answer),
            Link::Up => {
                state.settle(ticket);
                // Sent while the state is locked: once the device has been cut off, no answer is on
                // its way.
                answer.send();
            }
        }
    }

    /// Whether files may be made, renamed and removed now. Waits while the device is cut off.
    pub(super) fn is_up(&self) -> bool {
        let cut = self.changed.wait_while(self.lock(), |state| state.link == Link::Cut);
        let state = &mut *cut.expect("no thread panics while it holds the faults");
        state.refused += u64::from(state.link == Link::Down);
        state.link == Link::Up
    }

    /// Makes the device's file what is on the media after a power failure at a time when no process
    /// used the device. `seed` decides about the writes that were not stable.
    pub(super) fn lose(&self, file: &File, seed: u64) -> io::Result<Losses> {
        let Some(volatile) = &mut self.lock().volatile else { return Ok(Losses::default()) };
        let (found, losses) = volatile.lose(&mut Random::new(seed));
        let end = file.metadata()?.len();
        for (sector, content) in found {
            let place = sector * SECTOR_BYTES as u64;
            let len = SECTOR_BYTES.min(end.saturating_sub(place) as usize);
            file.write_all_at(&content[..len], place)?;
        }
        Ok(losses)
    }
}

impl State {
    /// Records what an answered operation has made stable.
    fn settle(&mut self, ticket: Ticket) {
        let Some(volatile) = &mut self.volatile else { return };
        match ticket {
            Ticket::None => {}
            Ticket::Write(number) => volatile.answered(number),
            Ticket::Durable(number) => volatile.stable(&[number]),
            Ticket::Flush(numbers) => volatile.stable(&numbers),
        }
    }
}

fn place(kind: Kind) -> usize {
    match kind {
        Kind::Read => 0,
        Kind::Write => 1,
        Kind::Flush => 2,
        Kind::Trim => 3,
    }
}

/// Writes `data` to its places in the file.
fn put(file: &File, extents: &[Extent], data: &[u8]) -> io::Result<()> {
    let mut rest = data;
    for &(place, len) in extents {
        let (part, after) = rest.split_at(len as usize);
        file.write_all_at(part, place.expect("a write has its space"))?;
        rest = after;
    }
    Ok(())
}

/// The whole sectors that `data` changes, with their content in the file and their new content.
fn read_pieces(file: &File, extents: &[Extent], data: &[u8]) -> io::Result<Vec<Piece>> {
    let mut rest = data;
    let mut pieces = Vec::with_capacity(extents.len());
    for &(place, len) in extents {
        let (part, after) = rest.split_at(len as usize);
        rest = after;
        let place = place.expect("a write has its space");
        let unit = SECTOR_BYTES as u64;
        let (sector, end) = (place / unit, (place + len).div_ceil(unit));
        let mut before = vec![0; ((end - sector) * unit) as usize];
        read_up_to_end(file, &mut before, sector * unit)?;
        let mut after = before.clone();
        let skip = (place - sector * unit) as usize;
        after[skip..skip + part.len()].copy_from_slice(part);
        pieces.push(Piece { sector, before, after });
    }
    Ok(pieces)
}

/// As `read_exact_at`, but bytes after the file's end keep the zeroes of `buf`.
fn read_up_to_end(file: &File, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !buf.is_empty() {
        match file.read_at(buf, offset) {
            Ok(0) => return Ok(()),
            Ok(n) => (buf, offset) = (&mut buf[n..], offset + n as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Gives some sectors their old content back.
fn tear_pieces(pieces: &mut [Piece], random: &mut Random) {
    let sectors = pieces.iter().map(|piece| piece.after.len() / SECTOR_BYTES).sum();
    let mut reached = tear(sectors, random).into_iter();
    for piece in pieces {
        let old = piece.before.chunks_exact(SECTOR_BYTES);
        for (after, before) in piece.after.chunks_exact_mut(SECTOR_BYTES).zip(old) {
            if reached.next() == Some(false) {
                after.copy_from_slice(before);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_decides_about_trims_and_a_dead_device_counts_what_it_refuses() {
        let faults = Faults::default();
        let trim = || {
            let (kind, number, file, offset, len) = (Kind::Trim, 0, "file", 0, 4096);
            faults.begin(Operation { kind, number, file, offset, len, data: &[], durable: false })
        };
        for (remains, clears) in
            [(Remains::Nothing, false), (Remains::Part, false), (Remains::All, true)]
        {
            faults.fail(Kind::Trim, 2, Times::Once, remains);
            let passed = trim();
            assert!(passed.clears() && faults.passes(passed));
            let failed = trim();
            assert_eq!((failed.clears(), faults.passes(failed)), (clears, false), "{remains:?}");
            assert_eq!(faults.seen(Kind::Trim), 2);
        }
        faults.disconnect();
        let refused = trim();
        assert!(!refused.clears() && !faults.passes(refused) && !faults.is_up());
        assert_eq!(faults.refused(), 2, "the trim, and the change of the directory");
    }
}
