//! Transfers with the cache device. What the kernel did in part, or asks to be tried again, is gone
//! on with within bounds; the core hears of a transfer once, when it has ended.

use crate::shard::limits::{DEVICE_OPS_MAX, DEVICE_RETRY_NS, DEVICE_TRIES_MAX};
use std::os::fd::BorrowedFd;
use tidepool_driver::Ring;
use tidepool_engine::api::{IoError, Nanos, Token};
use tidepool_engine::mem::{Buf, Slab};

/// What a transfer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::shard) enum Kind {
    Read,
    Write {
        /// It is on stable media when it is done.
        dsync: bool,
    },
    Sync,
}

/// A transfer, and how much of it is done.
#[derive(Debug, Clone, Copy)]
struct Transfer {
    token: Token,
    kind: Kind,
    offset: u64,
    buf: Buf,
    done: u32,
    tries: u32,
    /// When it is tried again; `None` while it is under way.
    again_at: Option<Nanos>,
}

/// What becomes of a transfer.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// It has ended.
    End(Result<(), IoError>),
    /// What is left of it is tried at once.
    GoOn,
    /// It is tried again later.
    Later,
}

impl Transfer {
    fn bytes_left(&self) -> u32 {
        self.buf.len - self.done
    }

    /// Takes in what the kernel says: bytes, or an errno below zero.
    fn take(&mut self, result: i32) -> Next {
        self.tries += 1;
        let may_go_on = self.kind != Kind::Sync && self.tries < DEVICE_TRIES_MAX;
        match result {
            0 if self.kind == Kind::Sync => Next::End(Ok(())),
            // The kernel forgets what it could not write after it has said so once: a second sync
            // would succeed.
            failed if failed < 0 && self.kind == Kind::Sync => Next::End(Err(error(-failed))),
            failed if failed < 0 => match -failed {
                libc::EINTR if may_go_on => Next::GoOn,
                libc::EAGAIN | libc::ENOMEM if may_go_on => Next::Later,
                errno => Next::End(Err(error(errno))),
            },
            bytes if bytes as u32 == self.bytes_left() => Next::End(Ok(())),
            // There is nothing there: the device is shorter than it was.
            0 => Next::End(Err(IoError::Errno(libc::EIO))),
            bytes if (bytes as u32) < self.bytes_left() && may_go_on => {
                self.done += bytes as u32;
                Next::GoOn
            }
            _ => Next::End(Err(IoError::Errno(libc::EIO))),
        }
    }

    fn start(&self, ring: &mut Ring, user: u64, fd: BorrowedFd<'_>, arena: *mut u8) {
        let at = self.offset + u64::from(self.done);
        let first = arena.wrapping_add((self.buf.offset + self.done) as usize);
        let memory = std::ptr::slice_from_raw_parts_mut(first, self.bytes_left() as usize);
        match self.kind {
            // SAFETY: the core leaves the buffer alone until it is told that the transfer has
            // ended.
            Kind::Read => unsafe { ring.read(user, fd, at, memory) },
            // SAFETY: as above.
            Kind::Write { dsync } => unsafe { ring.write(user, fd, at, memory, dsync) },
            Kind::Sync => ring.datasync(user, fd),
        }
    }

    /// Says what has failed, and where.
    fn tell(&self, error: &IoError) {
        let error = match error {
            IoError::Errno(errno) => std::io::Error::from_raw_os_error(*errno),
            IoError::Full => std::io::ErrorKind::StorageFull.into(),
            IoError::Fenced => std::io::Error::other("fenced"),
        };
        let (what, bytes, offset) = (self.kind, self.buf.len, self.offset);
        let what = match what {
            Kind::Read => "read",
            Kind::Write { .. } => "write",
            Kind::Sync => return tracing::error!("cache device: fdatasync failed: {error}"),
        };
        let (done, tries) = (self.done, self.tries);
        tracing::error!(
            "cache device: {what} of {bytes} bytes at {offset} failed after {done} bytes and {tries} tries: {error}"
        );
    }
}

fn error(errno: i32) -> IoError {
    match errno {
        libc::ENOSPC | libc::EDQUOT => IoError::Full,
        other => IoError::Errno(other),
    }
}

/// The transfers that are under way, or wait to be tried again.
pub(in crate::shard) struct DeviceOps {
    transfers: Slab<Transfer>,
    /// Slots of those that wait.
    waiting: Vec<u32>,
}

impl DeviceOps {
    pub(in crate::shard) fn new() -> DeviceOps {
        DeviceOps {
            transfers: Slab::new(DEVICE_OPS_MAX),
            waiting: Vec::with_capacity(DEVICE_OPS_MAX),
        }
    }

    pub(in crate::shard) fn is_full(&self) -> bool {
        self.transfers.is_full()
    }

    /// Some wait to be tried again.
    pub(in crate::shard) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// None is under way, and none waits.
    pub(in crate::shard) fn is_empty(&self) -> bool {
        self.transfers.is_empty()
    }

    /// Begins a transfer, for which there must be room. `user` makes of its slot what the
    /// completion names.
    pub(in crate::shard) fn begin(
        &mut self,
        (token, kind, offset, buf): (Token, Kind, u64, Buf),
        user: impl Fn(u32) -> u64,
        (ring, fd, arena): (&mut Ring, BorrowedFd<'_>, *mut u8),
    ) {
        let transfer = Transfer { token, kind, offset, buf, done: 0, tries: 0, again_at: None };
        let slot =
            self.transfers.insert(transfer).expect("room was checked before the effect was taken");
        transfer.start(ring, user(slot), fd, arena);
    }

    /// Takes a completion in. Returns the transfer's end, if it has ended.
    pub(in crate::shard) fn complete(
        &mut self,
        slot: u32,
        result: i32,
        now: Nanos,
        user: impl Fn(u32) -> u64,
        (ring, fd, arena): (&mut Ring, BorrowedFd<'_>, *mut u8),
    ) -> Option<(Token, Result<(), IoError>)> {
        let transfer = self.transfers.get_mut(slot).expect("it stays until it has ended");
        match transfer.take(result) {
            Next::GoOn => transfer.start(ring, user(slot), fd, arena),
            Next::Later => {
                // Longer each time.
                transfer.again_at = Some(now + (DEVICE_RETRY_NS << transfer.tries));
                self.waiting.push(slot);
            }
            Next::End(result) => {
                let transfer = self.transfers.remove(slot);
                if let Err(error) = &result {
                    transfer.tell(error);
                }
                return Some((transfer.token, result));
            }
        }
        None
    }

    /// Tries what has waited long enough again. Returns when it has to be looked at next.
    pub(in crate::shard) fn retry(
        &mut self,
        now: Nanos,
        user: impl Fn(u32) -> u64,
        (ring, fd, arena): (&mut Ring, BorrowedFd<'_>, *mut u8),
    ) -> Option<Nanos> {
        let mut next: Option<Nanos> = None;
        let transfers = &mut self.transfers;
        self.waiting.retain(|&slot| {
            let transfer = transfers.get_mut(slot).expect("it stays until it has ended");
            match transfer.again_at.filter(|&at| at > now) {
                Some(at) => {
                    next = Some(next.map_or(at, |next| next.min(at)));
                    true
                }
                None => {
                    transfer.again_at = None;
                    transfer.start(ring, user(slot), fd, arena);
                    false
                }
            }
        });
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(kind: Kind) -> Transfer {
        let buf = Buf { offset: 8192, len: 16384 };
        Transfer { token: Token(0), kind, offset: 1 << 20, buf, done: 0, tries: 0, again_at: None }
    }

    #[test]
    fn what_the_kernel_asks_for_again_is_tried_again_within_bounds() {
        for kind in [Kind::Read, Kind::Write { dsync: true }] {
            for (errno, wanted) in [
                (libc::EINTR, Next::GoOn),
                (libc::EAGAIN, Next::Later),
                (libc::ENOMEM, Next::Later),
            ] {
                let mut one = transfer(kind);
                for _ in 1..DEVICE_TRIES_MAX {
                    assert_eq!(one.take(-errno), wanted);
                }
                assert_eq!(one.take(-errno), Next::End(Err(IoError::Errno(errno))));
            }
            let mut one = transfer(kind);
            assert_eq!((one.take(4096), one.done), (Next::GoOn, 4096));
            assert_eq!((one.take(-libc::EINTR), one.done), (Next::GoOn, 4096));
            assert_eq!(one.take(12288), Next::End(Ok(())), "the rest");
            let mut one = transfer(kind);
            (1..DEVICE_TRIES_MAX).for_each(|_| assert_eq!(one.take(512), Next::GoOn));
            assert_eq!(
                one.take(512),
                Next::End(Err(IoError::Errno(libc::EIO))),
                "too little each time"
            );
        }
    }

    #[test]
    fn neither_a_failed_sync_nor_the_end_of_the_device_is_tried_again() {
        for errno in [libc::EIO, libc::EINTR, libc::EAGAIN, libc::ENOMEM] {
            let wanted = Next::End(Err(IoError::Errno(errno)));
            assert_eq!(transfer(Kind::Sync).take(-errno), wanted);
        }
        assert_eq!(transfer(Kind::Sync).take(0), Next::End(Ok(())));
        assert_eq!(transfer(Kind::Sync).take(-libc::ENOSPC), Next::End(Err(IoError::Full)));
        for kind in [Kind::Read, Kind::Write { dsync: false }] {
            let mut one = transfer(kind);
            assert_eq!(one.take(0), Next::End(Err(IoError::Errno(libc::EIO))));
            assert_eq!(transfer(kind).take(-libc::EIO), Next::End(Err(IoError::Errno(libc::EIO))));
            assert_eq!(transfer(kind).take(-libc::EDQUOT), Next::End(Err(IoError::Full)));
            assert_eq!(
                transfer(kind).take(20000),
                Next::End(Err(IoError::Errno(libc::EIO))),
                "more than was asked"
            );
        }
    }
}
