//! What goes wrong with an emulated device: power failures, errors, and operations that it holds while somebody is killed.
//!
//! Nothing does unless it is asked for. An operation is shown to a [`plan`](Faults::plan) before it takes effect; whether writes are
//! lost with the power is a switch of its own ([`Faults::volatile`]). Times are those of the model all along.

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

/// An operation on a file of a device, as it arrives.
#[derive(Debug, Clone, Copy)]
pub struct Operation<'a> {
    /// What it does.
    pub kind: Kind,
    /// How many of this kind there were since the plan was made, this one included.
    pub number: u64,
    /// Name of the file; empty for the directory, and for a file without a name.
    pub file: &'a str,
    /// First byte in the file; 0 for a flush.
    pub offset: u64,
    /// Bytes; 0 for a flush.
    pub len: u64,
    /// What a write writes.
    pub data: &'a [u8],
    /// It is to be on the media when it is answered (`O_DSYNC`).
    pub durable: bool,
}

/// What the device does of an operation that is not answered with success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remains {
    /// Nothing.
    Nothing,
    /// Some sectors of a write; nothing of a flush.
    Part,
    /// All of it.
    All,
}

/// What becomes of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// It is done and answered.
    Pass,
    /// It is answered with an I/O error.
    Fail(Remains),
    /// It gets no answer, and what comes after it is not looked at, until [`Faults::disconnect`].
    Hold(Remains),
}

/// How often an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Times {
    /// Once.
    Once,
    /// It, and all later ones of its kind.
    Always,
}

/// Asked about every operation.
type Plan = Box<dyn FnMut(&Operation<'_>) -> Act + Send>;

/// The faults of a device.
#[derive(Default)]
pub struct Faults {
    /// Whether there is anything to be looked at.
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
    /// What the device had done when the power failed, and was not told.
    withheld: Vec<Answer>,
    /// Operations that came while everything fails.
    refused: u64,
    random: Option<Random>,
}

/// Between the device and its users.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Link {
    /// All is well.
    #[default]
    Up,
    /// Nothing is taken or answered.
    Cut,
    /// Everything fails.
    Down,
}

/// What becomes of an operation, as its server has to know it.
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
    /// An error, as the device is gone.
    Gone,
}

/// What is stable when an operation is answered.
#[derive(Debug, Default)]
pub(super) enum Ticket {
    /// Nothing that anybody keeps account of.
    #[default]
    None,
    /// Nothing, but a later flush covers this write.
    Write(Number),
    /// This write.
    Durable(Number),
    /// These writes.
    Flush(Vec<Number>),
}

impl Fate {
    /// What becomes of all operations of a device without faults.
    pub(super) const PASS: Fate = Fate { remains: Remains::All, end: End::Answer };
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("active", &self.active).finish_non_exhaustive()
    }
}

impl Faults {
    /// From now on writes are lost with the power until a flush, or their own `O_DSYNC`, has made them stable; or no longer,
    /// and all are.
    pub fn volatile(&self, on: bool) {
        let mut state = self.lock();
        state.volatile = on.then(Volatile::default);
        self.update(&state);
    }

    /// Asks `plan` about every operation from now on, in the order in which they arrive. It must not ask for anything of the device
    /// itself.
    pub fn plan(&self, plan: impl FnMut(&Operation<'_>) -> Act + Send + 'static) {
        let mut state = self.lock();
        state.plan = Some(Box::new(plan));
        state.seen = Default::default();
        self.update(&state);
    }

    /// The operation of a kind with this number fails, counted from now on and from 1.
    pub fn fail(&self, kind: Kind, number: u64, times: Times, remains: Remains) {
        self.plan(move |operation| {
            let hit = operation.number == number || operation.number > number && times == Times::Always;
            if operation.kind == kind && hit { Act::Fail(remains) } else { Act::Pass }
        });
    }

    /// Operations of a kind since the plan was made.
    pub fn seen(&self, kind: Kind) -> u64 {
        self.lock().seen[place(kind)]
    }

    /// Waits until an operation is held, at most for `limit`; returns whether one is.
    pub fn wait_held(&self, limit: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), limit, |state| !state.held);
        waited.expect("no thread panics while it holds the faults").0.held
    }

    /// The device takes and answers nothing from now on, as when the power fails. A process that uses it can be killed, if
    /// [`Faults::disconnect`] follows: the kernel does not let go of a process before its device has answered.
    pub fn cut(&self) {
        let mut state = self.lock();
        state.link = Link::Cut;
        self.active.store(true, Ordering::Release);
    }

    /// Everything that is held, on its way or coming fails, and has no effect any more: as when the device has died.
    pub fn disconnect(&self) {
        let withheld = {
            let mut state = self.lock();
            state.link = Link::Down;
            state.held = false;
            self.active.store(true, Ordering::Release);
            self.changed.notify_all();
            std::mem::take(&mut state.withheld)
        };
        // An answer that is dropped is an I/O error.
        drop(withheld);
    }

    /// Operations that came while everything fails ([`Faults::disconnect`]).
    pub fn refused(&self) -> u64 {
        self.lock().refused
    }

    /// The device is there again, without a plan.
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

    /// What becomes of an operation; it has no number yet. Waits while the device is cut off.
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

    /// Whether an operation that has taken effect is answered as usual. One that is to be held is held in here.
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

    /// Writes what remains of a write to the device's file.
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
            // Nobody is told of it: it is over when nobody waits for it any more.
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

    /// These places of the device are about to become zeroes for good.
    pub(super) fn clear(&self, file: &File, places: &[(u64, u64)]) -> io::Result<()> {
        let Some(volatile) = &mut self.lock().volatile else { return Ok(()) };
        for &(place, len) in places {
            let pieces = read_pieces(file, &[(Some(place), len)], &vec![0; len as usize])?;
            let number = volatile.write(pieces);
            volatile.stable(&[number]);
        }
        Ok(())
    }

    /// An operation is complete: it is answered, unless the device is cut off.
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
                // While the state is held: when the device has been cut off, no answer is on its way.
                answer.send();
            }
        }
    }

    /// Whether files may be made, renamed and removed now. Waits while the device is cut off.
    pub(super) fn is_up(&self) -> bool {
        let cut = self.changed.wait_while(self.lock(), |state| state.link == Link::Cut);
        cut.expect("no thread panics while it holds the faults").link == Link::Up
    }

    /// The power has failed, while nobody used the device: makes its file what is on the media. `seed` decides about the writes that
    /// were not stable.
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
    /// An operation is answered.
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

/// Writes `data` to its places.
fn put(file: &File, extents: &[Extent], data: &[u8]) -> io::Result<()> {
    let mut rest = data;
    for &(place, len) in extents {
        let (part, after) = rest.split_at(len as usize);
        file.write_all_at(part, place.expect("a write has its space"))?;
        rest = after;
    }
    Ok(())
}

/// The whole sectors that `data` changes, as they are in the file and as they are to be.
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

/// As `read_exact_at`, and what is behind the file's end is zeroes.
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

/// Leaves some sectors as they were.
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
