//! Transfers with one file through an io_uring of its own.

use crate::api::{INFLIGHT_MAX, Transfer};
use crate::mailbox;
use io_uring::{IoUring, opcode, squeue, types};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use tidepool_engine::api::IoError;
use tidepool_engine::mem::AlignedBuf;

/// Bytes of one write of zeroes, where the file system cannot zero a range itself.
const ZERO_BYTES: usize = 1 << 20;
/// Most times that one transfer is submitted again after `EINTR` or `EAGAIN`.
const ATTEMPTS_MAX: u16 = 64;
/// Longest single read or write in bytes; the kernel cuts longer ones.
const TRANSFER_BYTES_MAX: usize = 1 << 30;

/// The system call that a slot makes next.
#[derive(Debug, Clone, Copy)]
enum Step {
    Read { ptr: *mut u8 },
    Write { ptr: *const u8 },
    Punch,
    Zero,
    FillZeroes,
    Flush,
}

/// A transfer in flight.
#[derive(Debug, Clone, Copy)]
struct Slot {
    token: u64,
    step: Step,
    offset: u64,
    len: u64,
    /// Bytes of the transfer that are done, after short system calls.
    done: u64,
    attempts: u16,
}

/// The ring, its slots and the file that they work on.
pub(super) struct Ring {
    ring: IoUring,
    event: OwnedFd,
    file: OwnedFd,
    size_bytes: u64,
    slots: Box<[Slot]>,
    free: Vec<u16>,
    /// Outcomes that do not come through the ring.
    ready: Vec<(u64, Result<(), IoError>)>,
    /// Entries pushed to the ring that the kernel has not taken yet.
    unsubmitted: bool,
    zeroes: AlignedBuf,
    /// The file system cannot zero a range; set at its first refusal.
    no_zero_range: bool,
    no_punch: bool,
    /// The file system (FUSE) lets a write wait, in the thread that submits it, while the file is
    /// synced: transfers are started on another thread.
    elsewhere: bool,
}

// SAFETY: the pointers in the slots name memory that the submitter keeps valid whichever thread
// reports its completion, as the contract of `Backend::submit` says.
unsafe impl Send for Ring {}

impl Ring {
    /// A ring for `file`, of which the first `size_bytes` are the image.
    pub(super) fn new(file: OwnedFd, size_bytes: u64) -> io::Result<Ring> {
        let ring = IoUring::builder().build(INFLIGHT_MAX as u32)?;
        let event = mailbox::new_eventfd()?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        let elsewhere =
            rustix::fs::fstatfs(&file).is_ok_and(|found| found.f_type == libc::FUSE_SUPER_MAGIC);
        let idle = Slot { token: 0, step: Step::Flush, offset: 0, len: 0, done: 0, attempts: 0 };
        Ok(Ring {
            ring,
            event,
            file,
            size_bytes,
            slots: vec![idle; INFLIGHT_MAX].into_boxed_slice(),
            free: (0..INFLIGHT_MAX as u16).rev().collect(),
            ready: Vec::with_capacity(INFLIGHT_MAX),
            unsubmitted: false,
            zeroes: AlignedBuf::zeroed(ZERO_BYTES),
            no_zero_range: false,
            no_punch: false,
            elsewhere,
        })
    }

    /// Sets the size of the image.
    pub(super) fn set_size(&mut self, size_bytes: u64) {
        self.size_bytes = size_bytes;
    }

    pub(super) fn event_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// The eventfd, for a thread whose outcomes do not come through the ring.
    pub(super) fn event(&self) -> io::Result<OwnedFd> {
        self.event.try_clone()
    }

    /// Wakes the driver to fetch outcomes that do not come through the ring.
    pub(super) fn wake(&self) {
        mailbox::signal(&self.event);
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Completes a transfer without touching the file.
    pub(super) fn complete(&mut self, token: u64, result: Result<(), IoError>) {
        assert!(
            self.ready.len() + self.inflight() < INFLIGHT_MAX,
            "more than {INFLIGHT_MAX} transfers in flight"
        );
        self.ready.push((token, result));
        mailbox::signal(&self.event);
    }

    /// Starts a transfer.
    ///
    /// # Safety
    /// As for `Backend::submit`.
    pub(super) unsafe fn submit(&mut self, token: u64, transfer: Transfer) {
        // SAFETY: as the caller vouches.
        let (step, offset, len) = match unsafe { transfer.clip(self.size_bytes) } {
            Transfer::Read { offset, ptr, len } => (Step::Read { ptr }, offset, len as u64),
            Transfer::Write { offset, ptr, len } => (Step::Write { ptr }, offset, len as u64),
            Transfer::Discard { offset, len } => (Step::Punch, offset, len),
            Transfer::WriteZeroes { offset, len } => (Step::Zero, offset, len),
            Transfer::Flush => (Step::Flush, 0, 1),
            _ => unreachable!("record and redo are no part of the file"),
        };
        if len == 0 {
            return self.complete(token, Ok(()));
        }
        assert!(
            self.ready.len() + self.inflight() < INFLIGHT_MAX,
            "more than {INFLIGHT_MAX} transfers in flight"
        );
        let index = self.free.pop().expect("a free slot, by the assertion above");
        self.slots[usize::from(index)] = Slot { token, step, offset, len, done: 0, attempts: 0 };
        self.push(index);
        self.enter();
    }

    fn inflight(&self) -> usize {
        INFLIGHT_MAX - self.free.len()
    }

    /// Queues the next system call of a slot.
    fn push(&mut self, index: u16) {
        let slot = &mut self.slots[usize::from(index)];
        match slot.step {
            Step::Punch if self.no_punch => slot.step = Step::Zero,
            _ => {}
        }
        if matches!(slot.step, Step::Zero) && self.no_zero_range {
            slot.step = Step::FillZeroes;
        }
        let fd = types::Fd(self.file.as_raw_fd());
        let (at, left) = (slot.offset + slot.done, slot.len - slot.done);
        let bytes = left.min(TRANSFER_BYTES_MAX as u64) as u32;
        let entry = match slot.step {
            // SAFETY (both `add`s): `done` is less than `len`, which the memory at `ptr` has.
            Step::Read { ptr } => {
                // SAFETY: as above.
                let ptr = unsafe { ptr.add(slot.done as usize) };
                opcode::Read::new(fd, ptr, bytes).offset(at).build()
            }
            Step::Write { ptr } => {
                // SAFETY: as above.
                let ptr = unsafe { ptr.add(slot.done as usize) };
                opcode::Write::new(fd, ptr, bytes).offset(at).build()
            }
            Step::Punch => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(fd, left).offset(at).mode(mode).build()
            }
            Step::Zero => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                opcode::Fallocate::new(fd, left).offset(at).mode(mode).build()
            }
            Step::FillZeroes => {
                let bytes = left.min(ZERO_BYTES as u64) as u32;
                opcode::Write::new(fd, self.zeroes.as_ptr(), bytes).offset(at).build()
            }
            Step::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        };
        let entry = if self.elsewhere { entry.flags(squeue::Flags::ASYNC) } else { entry };
        // SAFETY: the memory of the entry stays valid until its completion: the transfer's by the
        // contract of `submit`, the zeroes because `quiesce` runs before they are dropped.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(u64::from(index))) };
        pushed.expect("the ring has an entry for every slot");
    }

    /// Hands queued entries to the kernel.
    fn enter(&mut self) {
        loop {
            match self.ring.submit() {
                Ok(_) => self.unsubmitted = false,
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => continue,
                // The kernel is out of memory for the moment, or completions have to be fetched
                // first. The signalled eventfd leads to another call of `completions`, which tries
                // again.
                Err(_) => {
                    self.unsubmitted = true;
                    mailbox::signal(&self.event);
                }
            }
            return;
        }
    }

    /// Reports the transfers that have completed.
    pub(super) fn completions(&mut self, done: &mut dyn FnMut(u64, Result<(), IoError>)) {
        mailbox::reset(&self.event);
        let mut again = self.unsubmitted;
        loop {
            let Some(entry) = self.ring.completion().next() else { break };
            let index = entry.user_data() as u16;
            if let Some(result) = self.advance(index, entry.result()) {
                let token = self.slots[usize::from(index)].token;
                self.free.push(index);
                done(token, result);
            } else {
                self.push(index);
                again = true;
            }
        }
        if again {
            self.enter();
        }
        for (token, result) in self.ready.drain(..) {
            done(token, result);
        }
    }

    /// Takes the outcome of a slot's system call; `None` when the slot goes on with another.
    fn advance(&mut self, index: u16, result: i32) -> Option<Result<(), IoError>> {
        let slot = &mut self.slots[usize::from(index)];
        if result < 0 {
            match (-result, slot.step) {
                (libc::EINTR | libc::EAGAIN, _) if slot.attempts < ATTEMPTS_MAX => {
                    slot.attempts += 1
                }
                (libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV, Step::Punch) => {
                    self.no_punch |= result != -libc::EINVAL;
                    slot.step = Step::Zero;
                }
                (libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV, Step::Zero) => {
                    self.no_zero_range |= result != -libc::EINVAL;
                    slot.step = Step::FillZeroes;
                }
                (libc::ENOSPC | libc::EDQUOT, _) => return Some(Err(IoError::Full)),
                (errno, _) => return Some(Err(IoError::Errno(errno))),
            }
            return None;
        }
        match slot.step {
            Step::Punch | Step::Zero | Step::Flush => Some(Ok(())),
            // Nothing was transferred inside of the image: the file has been shortened.
            Step::Read { .. } | Step::Write { .. } | Step::FillZeroes if result == 0 => {
                Some(Err(IoError::Errno(libc::EIO)))
            }
            Step::Read { .. } | Step::Write { .. } | Step::FillZeroes => {
                slot.done += result as u64;
                (slot.done >= slot.len).then_some(Ok(()))
            }
        }
    }

    /// Waits until nothing is in flight, and drops the outcomes.
    pub(super) fn quiesce(&mut self) {
        while self.inflight() > 0 {
            mailbox::wait_readable(self.event.as_raw_fd(), 1000);
            self.completions(&mut |_, _| {});
        }
        self.ready.clear();
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // The kernel goes on using the transfers' memory until they complete.
        self.quiesce();
    }
}
