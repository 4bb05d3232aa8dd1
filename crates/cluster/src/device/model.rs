//! The timing of an emulated device in simulated time, without threads, clock or data.
//!
//! A command crosses the link. Then it waits for the media or, if it is a write, for room in the
//! write cache. The cache is destaged to the media in the background. Reads have priority over
//! destaging. When a flush waits, or when the cache is nearly full, both take turns.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use super::media::{Access, State};
use super::spec::{Media, Nanos, Spec, WriteCache, transfer_ns};

/// A command that has waited for this number of turns of a disk goes first, wherever the head is.
const PATIENCE_TURNS: u64 = 60;
/// Most entries of the write cache among which the next one for the media is picked.
const CACHE_QUEUE: usize = 64;

/// What a command does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads data.
    Read,
    /// Writes data.
    Write,
    /// Puts all data of commands that were completed before on the media.
    Flush,
    /// Frees space.
    Trim,
}

/// A command to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Command {
    /// What the command does.
    pub kind: Kind,
    /// Byte offset; 0 for a flush.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
}

/// Something that will happen. Events are ordered by time, then by kind, then by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A command, with the data if it is a write, has crossed the link.
    Arrived(u64),
    /// The media has done a queued read or write.
    Accessed(u64),
    /// An entry of the write cache is on the media.
    Destaged(u64),
    /// The running flush is done.
    Flushed,
    /// A command is complete.
    Done(u64),
    /// The media can begin the next access.
    Free,
}

/// A command that waits for the media.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    id: u64,
    access: Access,
    since: Nanos,
}

/// A write in the write cache.
#[derive(Debug, Clone, Copy)]
struct Entry {
    len: u64,
    number: u64,
}

/// A device in simulated time.
#[derive(Debug)]
pub struct Model {
    spec: Spec,
    size_bytes: u64,
    media: State,
    now: Nanos,
    media_busy: bool,
    link_free: Nanos,
    commands: BTreeMap<u64, Command>,
    events: BinaryHeap<Reverse<(Nanos, Event)>>,
    waiting: VecDeque<Waiting>,
    cache: Cache,
    /// Flushes that wait, each for the cache entries below a number; and the flushes that run.
    flushes: Vec<(u64, u64)>,
    flushing: Vec<u64>,
    cache_turn: bool,
    done: VecDeque<u64>,
}

/// The write cache: data that the media does not have yet.
#[derive(Debug, Default)]
struct Cache {
    bytes: u64,
    /// Entries by offset, without those on their way to the media.
    entries: BTreeMap<u64, Entry>,
    /// Lengths of all entries by number, including those on their way to the media.
    lengths: BTreeMap<u64, u64>,
    next: u64,
    /// Ids of writes that wait for room.
    waiting: VecDeque<u64>,
}

impl Model {
    /// A device of `size_bytes` at time 0.
    pub fn new(spec: Spec, size_bytes: u64) -> Model {
        let media = State::new(&spec, size_bytes);
        Model {
            spec,
            size_bytes,
            media,
            now: 0,
            media_busy: false,
            link_free: 0,
            commands: BTreeMap::new(),
            events: BinaryHeap::new(),
            waiting: VecDeque::new(),
            cache: Cache::default(),
            flushes: Vec::new(),
            flushing: Vec::new(),
            cache_turn: false,
            done: VecDeque::new(),
        }
    }

    /// This device at this time, with no command under way and with empty caches.
    pub fn anew(&self) -> Model {
        self.anew_as(self.spec.clone())
    }

    /// A device like `spec`, of this device's size, at this time, with no command under way and
    /// with empty caches.
    pub fn anew_as(&self, spec: Spec) -> Model {
        Model { now: self.now, ..Model::new(spec, self.size_bytes) }
    }

    /// Submits a command at `now`, or at the time to which the device has been advanced, if that is
    /// later. The caller chooses `id`, which is unique among the commands that are not done.
    pub fn submit(&mut self, now: Nanos, id: u64, command: Command) {
        self.advance(now);
        let now = self.now;
        let carried = if command.kind == Kind::Write { command.len } else { 0 };
        self.commands.insert(id, command);
        let at = self.carry(now + self.spec.command_ns, carried);
        self.at(at, Event::Arrived(id));
    }

    /// Turns the write cache on or off. Data in the cache still goes to the media.
    pub fn set_cache(&mut self, cache: Option<WriteCache>) {
        self.spec.cache = cache;
        // A write that waited for room in the cache now waits for the media.
        if cache.is_none() {
            for id in std::mem::take(&mut self.cache.waiting) {
                self.wait(id, Access::Write);
            }
            self.run_media();
        }
    }

    /// When the next event happens, if no command is submitted before.
    pub fn next(&self) -> Option<Nanos> {
        self.events.peek().map(|Reverse((at, _))| *at)
    }

    /// Advances the time to `now`.
    pub fn advance(&mut self, now: Nanos) {
        while let Some(&Reverse((at, event))) = self.events.peek()
            && at <= now
        {
            self.events.pop();
            self.now = at;
            self.happen(event);
        }
        self.now = self.now.max(now);
    }

    /// The id of the next command that is complete.
    pub fn completed(&mut self) -> Option<u64> {
        self.done.pop_front()
    }

    /// Bytes in the write cache.
    pub fn cached_bytes(&self) -> u64 {
        self.cache.bytes
    }

    fn at(&mut self, at: Nanos, event: Event) {
        self.events.push(Reverse((at, event)));
    }

    /// Occupies the link for `bytes`, from `from` on; returns when they have crossed it.
    fn carry(&mut self, from: Nanos, bytes: u64) -> Nanos {
        if bytes == 0 {
            return from;
        }
        self.link_free = self.link_free.max(from) + transfer_ns(bytes, self.spec.link_bytes_per_s);
        self.link_free
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Arrived(id) => self.arrived(id),
            Event::Accessed(id) => {
                let command = self.commands[&id];
                let carried = if command.kind == Kind::Read { command.len } else { 0 };
                let at = self.carry(self.now, carried);
                self.at(at, Event::Done(id));
            }
            Event::Destaged(number) => self.destaged(number),
            Event::Flushed => {
                self.done.extend(self.flushing.drain(..));
                self.media_busy = false;
            }
            Event::Done(id) => {
                self.commands.remove(&id);
                self.done.push_back(id);
            }
            Event::Free => self.media_busy = false,
        }
        self.run_media();
    }

    fn arrived(&mut self, id: u64) {
        let command = self.commands[&id];
        match (command.kind, self.spec.cache) {
            (Kind::Read, _) if self.cache.holds(command.offset, command.len) => {
                let at = self.carry(self.now, command.len);
                self.at(at, Event::Done(id));
            }
            (Kind::Read, _) => self.wait(id, Access::Read),
            (Kind::Write, None) => self.wait(id, Access::Write),
            (Kind::Write, Some(_)) => {
                self.cache.waiting.push_back(id);
                self.take_into_cache();
            }
            (Kind::Trim, _) => self.at(self.now, Event::Done(id)),
            (Kind::Flush, Some(cache)) if cache.protected => {
                self.at(self.now + self.spec.flush_ns, Event::Done(id));
            }
            (Kind::Flush, _) => {
                self.commands.remove(&id);
                self.flushes.push((id, self.cache.next));
            }
        }
    }

    fn wait(&mut self, id: u64, access: Access) {
        self.waiting.push_back(Waiting { id, access, since: self.now });
    }

    /// Completes the writes for which there is room in the cache.
    fn take_into_cache(&mut self) {
        let Some(size) = self.spec.cache.map(|cache| cache.bytes) else { return };
        while let Some(&id) = self.cache.waiting.front() {
            let command = self.commands[&id];
            if self.cache.bytes > 0 && self.cache.bytes + command.len > size {
                return;
            }
            self.cache.waiting.pop_front();
            self.cache.insert(command.offset, command.len);
            self.at(self.now, Event::Done(id));
        }
    }

    fn destaged(&mut self, number: u64) {
        self.cache.bytes -= self.cache.lengths.remove(&number).unwrap_or(0);
        self.take_into_cache();
    }

    /// Begins the next work of the media, if the media is free.
    fn run_media(&mut self) {
        if self.media_busy || self.start_flush() {
            return;
        }
        let size = self.spec.cache.map_or(0, |cache| cache.bytes);
        let pressed = !self.flushes.is_empty() || self.cache.bytes > size / 4 * 3;
        let cache_first = self.waiting.is_empty() || pressed && self.cache_turn;
        self.cache_turn = !self.cache_turn;
        if cache_first && self.destage_next() {
            return;
        }
        if !self.access_next() {
            self.destage_next();
        }
    }

    /// Begins one flush of the media for all flush commands that have nothing left to wait for.
    /// Meanwhile the media does nothing else. Returns whether there is such a command.
    fn start_flush(&mut self) -> bool {
        let first = self.cache.lengths.keys().next().copied().unwrap_or(u64::MAX);
        let (ready, wait): (Vec<_>, Vec<_>) =
            self.flushes.iter().partition(|&&(_, below)| below <= first);
        if ready.is_empty() {
            return false;
        }
        self.flushes = wait;
        self.flushing = ready.iter().map(|&(id, _)| id).collect();
        self.media_busy = true;
        self.at(self.now + self.spec.flush_ns, Event::Flushed);
        true
    }

    /// Begins the access that is reached first, or the oldest one if it has waited for too long.
    /// Returns whether there is one.
    fn access_next(&mut self) -> bool {
        let Some(oldest) = self.waiting.front() else { return false };
        let patience = match &self.spec.media {
            Media::Disk(disk) => disk.turn_ns * PATIENCE_TURNS,
            Media::Flash(_) => Nanos::MAX,
        };
        let at = if self.now - oldest.since > patience {
            0
        } else {
            let reach =
                |w: &Waiting| self.media.reach_ns(self.now, w.access, self.commands[&w.id].offset);
            let queue = self.waiting.iter().take(self.media.queue()).enumerate();
            queue.min_by_key(|(_, waiting)| reach(waiting)).map_or(0, |(at, _)| at)
        };
        let waiting = self.waiting.remove(at).expect("picked from the queue");
        let command = self.commands[&waiting.id];
        self.access(waiting.access, command.offset, command.len, Event::Accessed(waiting.id));
        true
    }

    /// Begins to put an entry of the write cache on the media; returns whether there is one. While
    /// flushes wait, only entries that they wait for are picked: otherwise a stream of later writes
    /// could delay a flush without end.
    fn destage_next(&mut self) -> bool {
        let below = self.flushes.iter().map(|&(_, below)| below).max().unwrap_or(u64::MAX);
        let head = self.media.head();
        let after = self.cache.entries.range(head..).chain(self.cache.entries.range(..head));
        let wanted = after.filter(|(_, entry)| entry.number < below);
        let reach = |offset: u64| self.media.reach_ns(self.now, Access::Write, offset);
        let queue = wanted.take(CACHE_QUEUE.min(self.media.queue() * 2));
        let Some(offset) = queue.map(|(&offset, _)| offset).min_by_key(|&offset| reach(offset))
        else {
            return false;
        };
        let entry = self.cache.entries.remove(&offset).expect("picked from the cache");
        self.access(Access::Write, offset, entry.len, Event::Destaged(entry.number));
        true
    }

    fn access(&mut self, access: Access, offset: u64, len: u64, then: Event) {
        let timing = self.media.start(self.now, access, offset, len);
        self.media_busy = true;
        self.at(timing.done, then);
        self.at(timing.free, Event::Free);
    }
}

impl Cache {
    /// Takes a write. A write to an offset that is in the cache needs no more room, unless it is
    /// longer.
    fn insert(&mut self, offset: u64, len: u64) {
        let number = self.next;
        let entry = self.entries.entry(offset).or_insert(Entry { len: 0, number });
        if entry.number == number {
            self.next += 1;
        }
        if len > entry.len {
            self.bytes += len - entry.len;
            entry.len = len;
            self.lengths.insert(entry.number, len);
        }
    }

    /// Whether one entry has the whole range.
    fn holds(&self, offset: u64, len: u64) -> bool {
        let before = self.entries.range(..=offset).next_back();
        before.is_some_and(|(&begin, entry)| begin + entry.len >= offset + len)
    }
}

#[cfg(test)]
mod tests {
    use super::super::preset;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn write(offset: u64, len: u64) -> Command {
        Command { kind: Kind::Write, offset, len }
    }

    /// When the command `id` is done, while another writer always has writes of 1 MiB in flight, to
    /// offsets from 0 on.
    fn done_beside_a_stream(model: &mut Model, id: u64) -> Nanos {
        let mut place = 0;
        loop {
            let now = model.next().expect("something is on its way");
            model.advance(now);
            while let Some(done) = model.completed() {
                if done == id {
                    return now;
                }
                place += MIB;
                model.submit(now, 1_000 + place, write(place % (4 << 30), MIB));
            }
        }
    }

    #[test]
    fn a_flush_is_not_kept_waiting_by_the_writes_that_come_after_it() {
        for preset in preset::all() {
            let Some(cache) = preset.spec.cache.filter(|cache| !cache.protected) else { continue };
            let mut model = Model::new(preset.spec.clone(), 16 << 30);
            model.submit(0, 1, write(15 << 30, 4096));
            for stream in 0..32 {
                model.submit(0, 1_000_000_000 + stream, write(stream * MIB, MIB));
            }
            model.advance(1_000_000);
            model.submit(1_000_000, 2, Command { kind: Kind::Flush, offset: 0, len: 0 });
            let took = done_beside_a_stream(&mut model, 2);
            // All data that can be in the cache, at the rate of the slowest media, and the seeks
            // between.
            let limit = transfer_ns(cache.bytes * 4, 100_000_000) + 500_000_000;
            assert!(took < limit, "{}: {} ms", preset.spec.name, took / 1_000_000);
        }
    }

    #[test]
    fn without_its_cache_a_write_is_complete_when_the_media_has_it() {
        let disk = preset::find("hdd-7200").expect("a preset").spec;
        let mut model = Model::new(disk.clone(), 16 << 30);
        model.set_cache(None);
        model.submit(0, 1, write(8 << 30, 4096));
        model.advance(500_000);
        assert_eq!(model.completed(), None);
        model.advance(60_000_000);
        assert_eq!(model.completed(), Some(1));
        model.set_cache(disk.cache);
        model.submit(60_000_000, 2, write(1 << 30, 4096));
        model.advance(60_500_000);
        assert_eq!(model.completed(), Some(2));
    }

    #[test]
    fn a_read_of_what_is_in_the_cache_does_not_wait_for_the_media() {
        let disk = preset::find("hdd-7200").expect("a preset").spec;
        let mut model = Model::new(disk, 16 << 30);
        model.submit(0, 1, write(8 << 30, 4096));
        model.submit(0, 2, write(1 << 30, 4096));
        model.advance(200_000);
        model.submit(200_000, 3, Command { kind: Kind::Read, offset: 1 << 30, len: 4096 });
        model.advance(1_000_000);
        let done: Vec<u64> = std::iter::from_fn(|| model.completed()).collect();
        assert_eq!(done, [1, 2, 3]);
    }
}
