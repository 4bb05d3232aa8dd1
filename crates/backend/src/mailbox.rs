//! Completions on their way from any thread to the reactor: a bounded lock-free queue and an
//! eventfd.

use crossbeam_queue::ArrayQueue;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// A queue whose eventfd is readable while letters wait in the queue.
pub(crate) struct Mailbox<T> {
    queue: ArrayQueue<T>,
    event: OwnedFd,
    /// The eventfd has been written and not reset yet: further posts need no system call.
    signalled: AtomicBool,
}

impl<T> Mailbox<T> {
    /// A mailbox that holds at most `capacity` letters.
    pub(crate) fn new(capacity: usize) -> rustix::io::Result<Mailbox<T>> {
        Ok(Mailbox {
            queue: ArrayQueue::new(capacity),
            event: new_eventfd()?,
            signalled: AtomicBool::new(false),
        })
    }

    /// Adds a letter; `false` when the queue is full, which the sender's own bound rules out.
    pub(crate) fn post(&self, letter: T) -> bool {
        let posted = self.queue.push(letter).is_ok();
        self.wake();
        posted
    }

    /// Makes the eventfd readable.
    pub(crate) fn wake(&self) {
        // The push comes before this swap, and the reader's swap comes before its pops. So either
        // the reader sees the letter, or this thread sees `false` and signals the eventfd.
        if !self.signalled.swap(true, Ordering::AcqRel) {
            signal(&self.event);
        }
    }

    /// Resets the eventfd and takes all letters out.
    pub(crate) fn drain(&self, mut take: impl FnMut(T)) {
        reset(&self.event);
        self.signalled.swap(false, Ordering::AcqRel);
        while let Some(letter) = self.queue.pop() {
            take(letter);
        }
    }

    /// The eventfd.
    pub(crate) fn event_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

/// A non-blocking eventfd that starts at zero.
pub(crate) fn new_eventfd() -> rustix::io::Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Makes an eventfd readable. The only possible failure is a counter at its maximum, which is
/// readable.
pub(crate) fn signal(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Makes an eventfd or timerfd unreadable. It is no error if the descriptor was unreadable before.
pub(crate) fn reset(event: &OwnedFd) {
    let _ = rustix::io::read(event, &mut [0u8; 8]);
}

/// Waits until a descriptor is readable, at most `timeout_ms` milliseconds.
pub(crate) fn wait_readable(fd: RawFd, timeout_ms: u32) {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one valid pollfd for the duration of the call.
    unsafe { libc::poll(&raw mut poll, 1, i32::try_from(timeout_ms).unwrap_or(i32::MAX)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn no_letter_is_missed_between_threads() {
        const LETTERS: usize = 200_000;
        let mailbox = Arc::new(Mailbox::new(LETTERS).expect("an eventfd"));
        let senders: Vec<_> = (0..2usize)
            .map(|sender| {
                let mailbox = Arc::clone(&mailbox);
                std::thread::spawn(move || {
                    (sender..LETTERS).step_by(2).for_each(|i| assert!(mailbox.post(i)))
                })
            })
            .collect();
        let mut seen = vec![false; LETTERS];
        let mut count = 0;
        while count < LETTERS {
            wait_readable(mailbox.event_fd(), 1000);
            mailbox.drain(|i| {
                assert!(!std::mem::replace(&mut seen[i], true));
                count += 1;
            });
        }
        senders.into_iter().for_each(|s| s.join().expect("a sender"));
    }
}
