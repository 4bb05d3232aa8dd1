//! Transfers with an image through librbd's asynchronous calls.
//!
//! librbd's threads report completions: the callback takes the return value, puts it into a bounded
//! lock-free queue and wakes the reactor. Everything else happens on the reactor's thread.

use super::image::{Facts, Image};
use super::owner::OwnerObject;
use super::retake::Retaken;
use super::sys::{self, CompletionT};
use crate::api::{INFLIGHT_MAX, Transfer};
use crate::error::BackendError;
use crate::mailbox::Mailbox;
use crate::record::Ownership;
use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;
use tidepool_engine::api::IoError;
use tidepool_engine::mem::AlignedBuf;

/// Most stripes that one call removes or zeroes: this bounds the number of objects that are changed
/// at once.
const STRIPES_PER_CALL_MAX: u64 = 32;
/// Bytes of one write of zeroes, where librbd has no call for zeroing.
const ZERO_BYTES: usize = 1 << 20;

/// A message in the mailbox.
pub(super) enum Letter {
    /// librbd's return value for the slot of this index.
    Done(u16, isize),
    /// The outcome of [`super::retake::retake`].
    Retaken(Box<Retaken>),
    /// The outcome of a change of the record: [`super::claim::disown`] or [`super::peer::name`].
    Recorded(Box<Result<(OwnerObject, Ownership), BackendError>>),
    /// The outcome of [`super::change::change`].
    Changed(Result<(), IoError>),
}

/// What a slot does.
#[derive(Debug, Clone, Copy)]
enum Step {
    Read { ptr: *mut u8 },
    Write { ptr: *const u8 },
    Zero { thick: bool },
    Flush,
}

/// A transfer in flight.
#[derive(Debug, Clone, Copy)]
struct Slot {
    token: u64,
    step: Step,
    /// Start of the range of the current call, followed by its length. One call does a whole read
    /// or write.
    at: u64,
    len: u64,
    end: u64,
}

/// What a callback needs: the mailbox to report to, and the slot.
struct Return {
    mailbox: Arc<Mailbox<Letter>>,
    index: u16,
}

/// Outcome of one call of librbd.
pub(super) enum Outcome {
    /// The slot's transfer has ended.
    Finished(u64, Result<(), IoError>),
    /// The slot goes on with its next call.
    Continued,
    /// The handle is read-only or is being replaced, see [`super::guard`]. The slot waits for
    /// [`Io::retry`].
    ReadOnly(u16),
}

/// The slots of an image's transfers.
pub(super) struct Io {
    /// `None` while the handle is being replaced.
    pub(super) image: Option<Arc<Image>>,
    mailbox: Arc<Mailbox<Letter>>,
    slots: Box<[Slot]>,
    returns: Box<[Return]>,
    free: Vec<u16>,
    /// Outcomes that do not come through the mailbox.
    ready: Vec<(u64, Result<(), IoError>)>,
    size_bytes: u64,
    stripe_bytes: u64,
    zeroes: AlignedBuf,
}

// SAFETY: the pointers in the slots name memory that the submitter keeps valid whichever thread
// reports its completion, as the contract of `Backend::submit` says.
unsafe impl Send for Io {}

/// librbd's callback. It must not unwind into C, so nothing in it panics.
unsafe extern "C" fn on_done(completion: CompletionT, argument: *mut c_void) {
    // SAFETY: `argument` is the slot's `Return`, which lives until the slot is idle for good.
    let slot = unsafe { &*argument.cast::<Return>() };
    let Ok(libraries) = sys::libraries() else { return };
    // SAFETY: the completion is complete; it is released once, here.
    let result = unsafe {
        let result = (libraries.rbd.rbd_aio_get_return_value)(completion);
        (libraries.rbd.rbd_aio_release)(completion);
        result
    };
    // The reactor may free the slot as soon as the letter is in the queue, so the callback holds a
    // reference to the mailbox.
    let mailbox = Arc::clone(&slot.mailbox);
    mailbox.post(Letter::Done(slot.index, result));
}

impl Io {
    pub(super) fn new(image: Image, facts: &Facts) -> rustix::io::Result<Io> {
        // One letter for each slot, one for a replaced handle, one for a changed record, one for a
        // changed image.
        let mailbox = Arc::new(Mailbox::new(INFLIGHT_MAX + 3)?);
        let idle = Slot { token: 0, step: Step::Flush, at: 0, len: 0, end: 0 };
        let returns = (0..INFLIGHT_MAX as u16)
            .map(|index| Return { mailbox: Arc::clone(&mailbox), index })
            .collect();
        Ok(Io {
            image: Some(Arc::new(image)),
            mailbox,
            slots: vec![idle; INFLIGHT_MAX].into_boxed_slice(),
            returns,
            free: (0..INFLIGHT_MAX as u16).rev().collect(),
            ready: Vec::with_capacity(INFLIGHT_MAX),
            size_bytes: facts.size_bytes,
            stripe_bytes: facts.stripe_bytes,
            zeroes: AlignedBuf::zeroed(ZERO_BYTES),
        })
    }

    pub(super) fn mailbox(&self) -> &Arc<Mailbox<Letter>> {
        &self.mailbox
    }

    /// Sets the size of the image.
    pub(super) fn set_size(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
    }

    pub(super) fn event_fd(&self) -> RawFd {
        self.mailbox.event_fd()
    }

    pub(super) fn inflight(&self) -> usize {
        INFLIGHT_MAX - self.free.len()
    }

    /// Outcomes that do not come through the mailbox.
    pub(super) fn ready(&mut self) -> std::vec::Drain<'_, (u64, Result<(), IoError>)> {
        self.ready.drain(..)
    }

    /// Completes a transfer without a call.
    pub(super) fn complete(&mut self, token: u64, result: Result<(), IoError>) {
        assert!(
            self.ready.len() + self.inflight() < INFLIGHT_MAX,
            "more than {INFLIGHT_MAX} transfers in flight"
        );
        self.ready.push((token, result));
        self.mailbox.wake();
    }

    /// Starts a transfer. With `hold` the transfer only gets a slot that waits for [`Io::retry`];
    /// that slot is returned.
    ///
    /// # Safety
    /// As for `Backend::submit`.
    pub(super) unsafe fn submit(
        &mut self,
        token: u64,
        transfer: Transfer,
        hold: bool,
    ) -> Option<u16> {
        // SAFETY: as the caller vouches.
        let (step, at, len) = match unsafe { transfer.clip(self.size_bytes) } {
            Transfer::Read { offset, ptr, len } => (Step::Read { ptr }, offset, len as u64),
            Transfer::Write { offset, ptr, len } => (Step::Write { ptr }, offset, len as u64),
            Transfer::Discard { offset, len } => (Step::Zero { thick: false }, offset, len),
            Transfer::WriteZeroes { offset, len } => (Step::Zero { thick: true }, offset, len),
            Transfer::Flush => (Step::Flush, 0, 1),
            _ => unreachable!("record and redo are no part of the image"),
        };
        if len == 0 {
            self.complete(token, Ok(()));
            return None;
        }
        assert!(
            self.ready.len() + self.inflight() < INFLIGHT_MAX,
            "more than {INFLIGHT_MAX} transfers in flight"
        );
        let index = self.free.pop().expect("a free slot, by the assertion above");
        self.slots[usize::from(index)] = Slot { token, step, at, len, end: at + len };
        if hold {
            return Some(index);
        }
        self.call(index);
        None
    }

    /// Makes the current call of a slot again.
    pub(super) fn retry(&mut self, index: u16) {
        self.call(index);
    }

    /// Frees a slot that waits for [`Io::retry`], and returns its transfer's token.
    pub(super) fn abandon(&mut self, index: u16) -> u64 {
        self.free.push(index);
        self.slots[usize::from(index)].token
    }

    fn call(&mut self, index: u16) {
        let result = self.try_call(index);
        if result < 0 {
            // librbd has not accepted the call, so no callback comes and the letter is posted here.
            self.mailbox.post(Letter::Done(index, result as isize));
        }
    }

    fn try_call(&mut self, index: u16) -> i32 {
        // The slot waits for the new handle, as it does when a handle has turned read-only.
        let Some(image) = &self.image else { return -libc::EROFS };
        let (rbd, image) = (image.rbd(), image.handle());
        let argument = (&raw const self.returns[usize::from(index)]).cast_mut().cast::<c_void>();
        let mut completion: CompletionT = ptr::null_mut();
        // SAFETY: the argument outlives the completion, see `on_done`; a valid out pointer.
        let created =
            unsafe { (rbd.rbd_aio_create_completion)(argument, on_done, &raw mut completion) };
        if created < 0 {
            return created;
        }
        let Slot { step, at, end, len, .. } = self.slots[usize::from(index)];
        let result = match step {
            // SAFETY: `len` bytes at `ptr`, valid until the completion by the contract of `submit`.
            Step::Read { ptr } => unsafe {
                (rbd.rbd_aio_read)(image, at, len as usize, ptr.cast(), completion)
            },
            // SAFETY: as above.
            Step::Write { ptr } => unsafe {
                (rbd.rbd_aio_write)(image, at, len as usize, ptr.cast(), completion)
            },
            // SAFETY: a valid image and completion.
            Step::Flush => unsafe { (rbd.rbd_aio_flush)(image, completion) },
            Step::Zero { thick } => {
                let len = self.zero_len(at, end, thick, rbd.rbd_aio_write_zeroes.is_some());
                self.slots[usize::from(index)].len = len;
                let whole = self.is_whole(at, len);
                match rbd.rbd_aio_write_zeroes {
                    Some(write_zeroes) => {
                        let flags = if thick { sys::WRITE_ZEROES_THICK } else { 0 };
                        // SAFETY: a valid image and completion.
                        unsafe { write_zeroes(image, at, len as usize, completion, flags, 0) }
                    }
                    // SAFETY: a valid image and completion.
                    None if whole && !thick => unsafe {
                        (rbd.rbd_aio_discard)(image, at, len, completion)
                    },
                    // SAFETY: at most `ZERO_BYTES` of zeroes, which live as long as the slots.
                    None => unsafe {
                        (rbd.rbd_aio_write)(
                            image,
                            at,
                            len as usize,
                            self.zeroes.as_ptr().cast(),
                            completion,
                        )
                    },
                }
            }
        };
        if result < 0 {
            // SAFETY: not accepted by librbd, so it is still ours.
            unsafe { (rbd.rbd_aio_release)(completion) };
        }
        result
    }

    /// Length of the next call of a zeroing that has reached `at`.
    fn zero_len(&self, at: u64, end: u64, thick: bool, native: bool) -> u64 {
        let stripe = self.stripe_bytes;
        if native {
            let boundary =
                (at / stripe).saturating_add(STRIPES_PER_CALL_MAX).saturating_mul(stripe);
            return end.min(boundary) - at;
        }
        let whole_end = end / stripe * stripe;
        if !thick && at.is_multiple_of(stripe) && whole_end > at {
            return whole_end.min(at.saturating_add(STRIPES_PER_CALL_MAX * stripe)) - at;
        }
        let next_stripe = (at / stripe + 1).saturating_mul(stripe);
        (end.min(next_stripe) - at).min(ZERO_BYTES as u64)
    }

    /// Whether the range consists of whole stripes, which a discard removes.
    fn is_whole(&self, at: u64, len: u64) -> bool {
        at.is_multiple_of(self.stripe_bytes) && len.is_multiple_of(self.stripe_bytes) && len > 0
    }

    /// Takes librbd's return value for a slot.
    pub(super) fn advance(&mut self, index: u16, result: isize) -> Outcome {
        let slot = &mut self.slots[usize::from(index)];
        let outcome = if result < 0 {
            match i32::try_from(-result).unwrap_or(libc::EIO) {
                libc::ESHUTDOWN => Err(IoError::Fenced),
                libc::EROFS => return Outcome::ReadOnly(index),
                libc::ENOSPC | libc::EDQUOT => Err(IoError::Full),
                errno => Err(IoError::Errno(errno)),
            }
        } else if matches!(slot.step, Step::Read { .. }) && result as u64 != slot.len {
            // The range is inside of the image as it was opened: another client has made the image
            // smaller.
            Err(IoError::Errno(libc::EIO))
        } else {
            slot.at += slot.len;
            if matches!(slot.step, Step::Zero { .. }) && slot.at < slot.end {
                self.call(index);
                return Outcome::Continued;
            }
            Ok(())
        };
        self.free.push(index);
        Outcome::Finished(self.slots[usize::from(index)].token, outcome)
    }
}
