//! Transfers in flight, and the effect of replies on them.

use crate::api::INFLIGHT_MAX;
use std::collections::VecDeque;
use tidepool_engine::api::IoError;
use tidepool_nbd::Errno;
use tidepool_nbd::client::{Failure, Sink};

/// Kind of an order.
#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    Read {
        ptr: *mut u8,
    },
    Write {
        ptr: *const u8,
    },
    /// Zeroes; with `keep` the space stays allocated.
    Zeroes {
        keep: bool,
    },
    /// `told`: losses that the submitter of the flush has learnt of.
    Flush {
        told: u64,
    },
    Disown,
    /// Makes the record name the peer in [`super::link::Shared`].
    Peer,
}

impl Work {
    pub(super) fn writes(self) -> bool {
        matches!(self, Work::Write { .. } | Work::Zeroes { .. })
    }
}

/// A transfer, or a change of the record, on its way to the thread that does it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Order {
    pub(super) token: u64,
    pub(super) work: Work,
    pub(super) offset: u64,
    pub(super) len: u64,
}

// SAFETY: the pointers name memory that the submitter keeps valid whichever thread uses it, as the
// contract of `Backend::submit` says.
unsafe impl Send for Order {}

/// A transfer in flight. It is cut into pieces, each of which is a request of its own.
#[derive(Debug)]
struct Slot {
    order: Order,
    /// Bytes of the transfer that have been requested.
    asked: u64,
    /// Requests that are not answered yet.
    unanswered: u32,
    error: Option<IoError>,
    /// Of a flush: number of writes that had completed when it was sent.
    covers: u64,
}

/// Slots of one backend: one more than the transfers, for the last flush of a close.
pub(super) const SLOTS: usize = INFLIGHT_MAX + 1;

/// All transfers in flight.
pub(super) struct Slots {
    slots: Box<[Option<Slot>]>,
    free: Vec<u16>,
    /// Transfers with something left to request, in turn.
    waiting: VecDeque<u16>,
    /// Transfers whose last answer has come.
    over: Vec<u16>,
    /// A server has announced that it is about to end.
    leaving: bool,
}

impl Slots {
    pub(super) fn new() -> Slots {
        Slots {
            slots: (0..SLOTS).map(|_| None).collect(),
            free: (0..SLOTS as u16).rev().collect(),
            waiting: VecDeque::with_capacity(SLOTS),
            over: Vec::with_capacity(SLOTS),
            leaving: false,
        }
    }

    pub(super) fn insert(&mut self, order: Order) {
        let index = self.free.pop().expect("the submitter's own bound leaves a free slot");
        let slot = Slot { order, asked: 0, unanswered: 0, error: None, covers: 0 };
        self.slots[usize::from(index)] = Some(slot);
        self.waiting.push_back(index);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The next transfer with something left to request, and the number of its bytes that are
    /// requested.
    pub(super) fn next_waiting(&mut self) -> Option<(u16, Order, u64)> {
        let index = self.waiting.pop_front()?;
        let slot = self.slot(index);
        Some((index, slot.order, slot.asked))
    }

    /// Notes a request for `bytes` more of the transfer that [`Slots::next_waiting`] has returned.
    /// If more is left, the transfer waits for its next turn.
    pub(super) fn asked(&mut self, index: u16, bytes: u64, covers: u64) {
        let slot = self.slot(index);
        slot.asked += bytes;
        slot.unanswered += 1;
        slot.covers = covers;
        if slot.asked < slot.order.len {
            self.waiting.push_back(index);
        }
    }

    /// Ends a transfer and frees its slot.
    pub(super) fn end(&mut self, index: u16) -> Order {
        let slot = self.slots[usize::from(index)].take().expect("a transfer in flight");
        self.free.push(index);
        slot.order
    }

    /// Makes every transfer start again from its beginning: earlier requests will not be answered
    /// any more.
    pub(super) fn restart(&mut self) {
        self.waiting.clear();
        self.over.clear();
        self.leaving = false;
        for (index, slot) in self.slots.iter_mut().enumerate() {
            let Some(slot) = slot else { continue };
            (slot.asked, slot.unanswered, slot.error) = (0, 0, None);
            self.waiting.push_back(index as u16);
        }
    }

    /// All transfers in flight.
    pub(super) fn all(&self) -> Vec<u16> {
        let slots = self.slots.iter().enumerate();
        slots.filter(|(_, slot)| slot.is_some()).map(|(index, _)| index as u16).collect()
    }

    /// A transfer whose answers have all come: its outcome, and what a flush covers. The transfer
    /// stays in flight until [`Slots::end`].
    pub(super) fn over(&mut self) -> Option<(u16, Result<(), IoError>, u64)> {
        let index = self.over.pop()?;
        let slot = self.slot(index);
        Some((index, slot.error.map_or(Ok(()), Err), slot.covers))
    }

    /// Whether a server has announced its end since the last call or [`Slots::restart`].
    pub(super) fn take_leaving(&mut self) -> bool {
        std::mem::take(&mut self.leaving)
    }

    fn slot(&mut self, index: u16) -> &mut Slot {
        self.slots[usize::from(index)].as_mut().expect("a transfer in flight")
    }

    /// Destination of bytes of a read.
    fn target(&mut self, tag: u64, at: u32) -> *mut u8 {
        let (index, start) = untag(tag);
        let Work::Read { ptr } = self.slot(index).order.work else {
            unreachable!("only reads are answered with data");
        };
        // SAFETY: the codec passes on what lies inside of the request, and that lies inside of the
        // memory.
        unsafe { ptr.add(start as usize + at as usize) }
    }
}

/// Tag of a request: the transfer, and where in the transfer the request begins.
pub(super) fn tag(index: u16, start: u64) -> u64 {
    start << 16 | u64::from(index)
}

fn untag(tag: u64) -> (u16, u64) {
    (tag as u16, tag >> 16)
}

impl Sink for Slots {
    fn data(&mut self, tag: u64, at: u32, bytes: &[u8]) {
        let target = self.target(tag, at);
        // SAFETY: the submitter of the read keeps its memory valid, and nothing else touches it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) };
    }

    fn zeroes(&mut self, tag: u64, at: u32, len: u32) {
        let target = self.target(tag, at);
        // SAFETY: as above.
        unsafe { std::ptr::write_bytes(target, 0, len as usize) };
    }

    fn status(&mut self, _tag: u64, _context: u32, _len: u32, _flags: u32) {}

    fn completed(&mut self, tag: u64, result: Result<(), Failure>) {
        let (index, _) = untag(tag);
        let error = result.err().map(|failure| failure.errno);
        // A request that an ending server refuses is sent again over the next connection.
        self.leaving |= error == Some(Errno::Shutdown);
        let slot = self.slot(index);
        slot.unanswered -= 1;
        let more = slot.asked < slot.order.len;
        if let Some(errno) = error {
            slot.asked = slot.order.len;
            slot.error.get_or_insert(match errno {
                Errno::NoSpc => IoError::Full,
                errno => IoError::Errno(errno.code() as i32),
            });
            if more {
                self.waiting.retain(|&i| i != index);
            }
        }
        let slot = self.slot(index);
        if slot.unanswered == 0 && slot.asked == slot.order.len {
            self.over.push(index);
        }
    }
}
