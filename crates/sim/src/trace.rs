//! What a core does in a life, so that another core can be compared with it.
//!
//! Every effect counts with all its fields, data with its checksum; the next deadline counts at
//! each instant, and what the core says of itself at each 64th and at the end. Tokens and places in
//! memory do not count: they are names that the core gives. From all this follow two hashes. The
//! *ordered* one changes also when effects of one instant come in another order; the *unordered*
//! one does not.

pub use crate::api::Hashes;
use std::hash::{Hash, Hasher};
use tidepool_engine::Engine;
use tidepool_engine::api::*;
use tidepool_engine::format::crc32c;
use tidepool_engine::mem::Arena;

/// Instants from one look at the core's status to the next.
const STATUS_INSTANTS: u64 = 64;

/// An effect without the names that the core gives to things.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum What {
    DeviceRead { offset: u64, bytes: u32 },
    DeviceWrite { offset: u64, bytes: u32, dsync: bool },
    DeviceSync,
    Backend { volume: u16, op: ToBackend },
    Peer { volume: u16, op: ToPeer },
    Reply { id: RequestId, result: Result<(), RequestError> },
    ControlDone { control: u64, result: Result<(), ControlError> },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ToBackend {
    Read { offset: u64, bytes: u32 },
    Write { offset: u64, bytes: u32 },
    Discard { offset: u64, bytes: u64 },
    WriteZeroes { offset: u64, bytes: u64 },
    Flush,
    RedoWrite { group: u64, frame: u32, bytes: u32 },
    RedoCommit { first: u64, group: u64, frames: u32, sequence: u64, cut_at: Nanos },
    RedoTrim { first: u64 },
    Snapshot { control: u64 },
    Resize { size_bytes: u64 },
    RedoNote { sequence: u64, durable: u64, bytes: u64, bytes_max: u64 },
    Disown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum ToPeer {
    Record { sequence: u64, bytes: u32, durable: bool },
    Stabilise { sequence: u64 },
    Block { block: u64, crc: u32 },
}

/// An effect as it is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seen {
    what: What,
    /// CRC-32C of the data that goes with it, 0 without any.
    data: u32,
}

impl Seen {
    /// An effect whose memory is in `arena`.
    pub fn of(effect: &Effect, arena: &Arena) -> Seen {
        let mut data = 0;
        let what = match *effect {
            Effect::DeviceRead { token: _, offset, buf } => {
                What::DeviceRead { offset, bytes: buf.len }
            }
            Effect::DeviceWrite { token: _, offset, buf, dsync } => {
                data = crc32c(arena.bytes(buf));
                What::DeviceWrite { offset, bytes: buf.len, dsync }
            }
            Effect::DeviceSync { token: _ } => What::DeviceSync,
            Effect::Backend { token: _, volume, op } => {
                let op = match op {
                    BackendOp::Read { offset, buf } => ToBackend::Read { offset, bytes: buf.len },
                    BackendOp::Write { offset, buf } => {
                        data = crc32c(arena.bytes(buf));
                        ToBackend::Write { offset, bytes: buf.len }
                    }
                    BackendOp::Discard { offset, len } => ToBackend::Discard { offset, bytes: len },
                    BackendOp::WriteZeroes { offset, len } => {
                        ToBackend::WriteZeroes { offset, bytes: len }
                    }
                    BackendOp::Flush => ToBackend::Flush,
                    BackendOp::RedoWrite { group, frame, buf } => {
                        data = crc32c(arena.bytes(buf));
                        ToBackend::RedoWrite { group, frame, bytes: buf.len }
                    }
                    BackendOp::RedoCommit { first, group, frames, sequence, cut_at } => {
                        ToBackend::RedoCommit { first, group, frames, sequence, cut_at }
                    }
                    BackendOp::RedoTrim { first } => ToBackend::RedoTrim { first },
                    BackendOp::Snapshot { control } => ToBackend::Snapshot { control },
                    BackendOp::Resize { size_bytes } => ToBackend::Resize { size_bytes },
                    BackendOp::RedoNote { sequence, durable, bytes, bytes_max } => {
                        ToBackend::RedoNote { sequence, durable, bytes, bytes_max }
                    }
                    BackendOp::Disown => ToBackend::Disown,
                };
                What::Backend { volume: volume.0, op }
            }
            Effect::Peer { volume, op } => {
                let op = match op {
                    PeerOp::Record { sequence, buf, durable } => {
                        data = crc32c(arena.bytes(buf));
                        ToPeer::Record { sequence, bytes: buf.len, durable }
                    }
                    PeerOp::Stabilise { sequence } => ToPeer::Stabilise { sequence },
                    PeerOp::Block { block, crc } => ToPeer::Block { block, crc },
                };
                What::Peer { volume: volume.0, op }
            }
            Effect::Reply { id, result } => What::Reply { id, result },
            Effect::ControlDone { control, result } => What::ControlDone { control, result },
        };
        Seen { what, data }
    }

    /// With the data that a client gets.
    pub fn with_data(self, data: &[u8]) -> Seen {
        Seen { data: crc32c(data), ..self }
    }

    /// Under another name: of a request or a control operation.
    pub fn called(self, name: u64) -> Seen {
        let what = match self.what {
            What::Reply { result, .. } => What::Reply { id: name, result },
            What::ControlDone { result, .. } => What::ControlDone { control: name, result },
            what => what,
        };
        Seen { what, ..self }
    }

    /// What names it: effects that do the same to the same place have one identity, whatever data
    /// they carry.
    pub fn identity(&self) -> u64 {
        match self.what {
            What::Backend { volume, op: ToBackend::RedoCommit { group, .. } } => {
                fold(&(1, volume, group))
            }
            What::Backend { volume, op: ToBackend::RedoNote { .. } } => fold(&(2, volume)),
            what => fold(&what),
        }
    }
}

/// The hash of a value. It depends on neither machine nor process.
pub fn fold(value: &impl Hash) -> u64 {
    let mut fold = Fold::default();
    value.hash(&mut fold);
    fold.finish()
}

/// A hash that depends on what is written to it alone.
#[derive(Clone, Copy, Default)]
struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = crate::rng::mix(self.0, u64::from_le_bytes(word) ^ (chunk.len() as u64) << 60);
        }
    }
}

/// What the cores of a life have done so far.
#[derive(Default)]
pub struct Trace {
    now: Nanos,
    /// What has been done in this instant.
    instant: Vec<u64>,
    instants: u64,
    instants_max: Option<u64>,
    /// What was done in the first instant that does not count.
    beyond: Vec<u64>,
    hashes: Hashes,
    text: Option<String>,
}

impl Trace {
    /// A trace that can be read, too.
    pub fn told() -> Trace {
        Trace { text: Some(String::new()), ..Trace::default() }
    }

    /// A trace of the first `instants` instants.
    pub fn of_first(instants: u64) -> Trace {
        Trace { instants_max: Some(instants), ..Trace::default() }
    }

    /// Something is done by core number `core`.
    pub fn add(&mut self, core: usize, seen: &(impl Hash + std::fmt::Debug)) {
        self.instant.push(fold(&(core, seen)));
        if let Some(text) = &mut self.text {
            use std::fmt::Write;
            let _ = writeln!(text, "{} {core} {seen:?}", self.now);
        }
    }

    /// An instant is over. `deadline` is when each core wants to be looked at next.
    pub fn end_instant<'a>(
        &mut self,
        cores: impl Iterator<Item = (Nanos, Option<&'a Engine>)> + Clone,
    ) {
        for (core, (_, engine)) in cores.clone().enumerate() {
            let deadline = engine.and_then(|engine| engine.next_deadline());
            self.instant.push(fold(&(core, "deadline", deadline)));
        }
        if self.instants.is_multiple_of(STATUS_INSTANTS) {
            self.look(cores);
        }
        self.close();
    }

    /// The life is over.
    pub fn end<'a>(&mut self, cores: impl Iterator<Item = (Nanos, Option<&'a Engine>)>) {
        self.look(cores);
        self.close();
    }

    /// What each core says of itself.
    fn look<'a>(&mut self, cores: impl Iterator<Item = (Nanos, Option<&'a Engine>)>) {
        for (core, (now, engine)) in cores.enumerate() {
            let Some(engine) = engine else { continue };
            self.add(core, &engine.device_status());
            for (id, _) in engine.volumes() {
                self.add(core, &(id, engine.volume_status(now, id), engine.log_status(id)));
            }
        }
    }

    fn close(&mut self) {
        if self.instants_max.is_some_and(|max| self.instants >= max) {
            if self.beyond.is_empty() {
                self.beyond.clone_from(&self.instant);
            }
            self.instant.clear();
            return;
        }
        self.instants += 1;
        let fold_all = |hash: u64, all: &[u64]| fold(&(hash, self.now, all));
        self.hashes.ordered = fold_all(self.hashes.ordered, &self.instant);
        self.instant.sort_unstable();
        self.hashes.unordered = fold_all(self.hashes.unordered, &self.instant);
        self.instant.clear();
    }

    /// An instant begins.
    pub fn begin_instant(&mut self, now: Nanos) {
        self.now = now;
    }

    /// Instants so far.
    pub fn instants(&self) -> u64 {
        self.instants
    }

    /// What was done since then, in its order: in the instant that is not over, or in the first one
    /// that does not count.
    pub fn beyond(&self) -> Vec<u64> {
        if self.beyond.is_empty() { self.instant.clone() } else { self.beyond.clone() }
    }

    /// The hashes of what is over.
    pub fn hashes(&self) -> Hashes {
        self.hashes
    }

    /// All of it, a line for each effect, if it is kept.
    pub fn text(&mut self) -> Option<String> {
        self.text.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(instants: &[&[u64]]) -> Hashes {
        let mut trace = Trace::default();
        for (now, instant) in (0..).zip(instants) {
            trace.begin_instant(now);
            instant.iter().for_each(|seen| trace.add(0, seen));
            trace.end_instant([].into_iter());
        }
        trace.hashes()
    }

    #[test]
    fn another_order_within_an_instant_changes_the_ordered_hash_alone() {
        let (one, other) = (hashes(&[&[1, 2], &[3]]), hashes(&[&[2, 1], &[3]]));
        assert_ne!(one.ordered, other.ordered);
        assert_eq!(one.unordered, other.unordered);
    }

    #[test]
    fn another_effect_or_instant_changes_both_hashes() {
        let one = hashes(&[&[1, 2], &[3]]);
        for other in
            [hashes(&[&[1, 2], &[4]]), hashes(&[&[1], &[2, 3]]), hashes(&[&[1, 2], &[3], &[]])]
        {
            assert_ne!(one.ordered, other.ordered);
            assert_ne!(one.unordered, other.unordered);
        }
    }

    #[test]
    fn what_the_core_calls_things_does_not_count() {
        let mut arena = Arena::new(1 << 20);
        let bufs = [arena.alloc(8192).expect("room"), arena.alloc(8192).expect("room")];
        let seen = |buf, token, dsync| {
            Seen::of(&Effect::DeviceWrite { token: Token(token), offset: 4096, buf, dsync }, &arena)
        };
        assert_eq!(seen(bufs[0], 1, true), seen(bufs[1], 2, true));
        assert_ne!(seen(bufs[0], 1, true), seen(bufs[0], 1, false));
        let before = seen(bufs[0], 1, true);
        arena.bytes_mut(bufs[1])[17] ^= 1;
        let write =
            Effect::DeviceWrite { token: Token(1), offset: 4096, buf: bufs[1], dsync: true };
        let after = Seen::of(&write, &arena);
        assert_ne!(before, after);
        assert_eq!(before.identity(), after.identity());
    }
}
