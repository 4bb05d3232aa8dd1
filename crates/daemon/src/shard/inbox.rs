//! Bytes on their way from one client: a receive buffer, and the part of a large payload that is
//! received into the arena directly.

use super::limits::RECEIVE_BYTES;

/// The vectors of the receive in flight. They stay where they are: the kernel reads them.
struct Message {
    header: libc::msghdr,
    vectors: [libc::iovec; 2],
}

// SAFETY: the pointers are only used by the kernel, for the thread that owns the inbox.
unsafe impl Send for Message {}

pub(super) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    message: Box<Message>,
    /// Length of the memory outside of the buffer that the receive in flight fills first.
    direct: usize,
    in_flight: bool,
}

impl Inbox {
    pub(super) fn new() -> Inbox {
        let no_vector = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        // SAFETY: a message header of zeroes is a valid one without vectors.
        let header = unsafe { std::mem::zeroed() };
        Inbox {
            bytes: vec![0; RECEIVE_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            message: Box::new(Message { header, vectors: [no_vector; 2] }),
            direct: 0,
            in_flight: false,
        }
    }

    /// What has been received and not been taken.
    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Takes `len` bytes of it.
    pub(super) fn take(&mut self, len: usize) {
        assert!(len <= self.end - self.start, "only what was received can be taken");
        self.start += len;
        if self.start == self.end && !self.in_flight {
            (self.start, self.end) = (0, 0);
        }
    }

    pub(super) fn in_flight(&self) -> bool {
        self.in_flight
    }

    /// The message for the next receive. With `direct`, that memory is filled first, and the buffer only if
    /// `beyond`.
    pub(super) fn next_message(
        &mut self,
        direct: Option<(*mut u8, usize)>,
        beyond: bool,
    ) -> *mut libc::msghdr {
        assert!(!self.in_flight, "one receive at a time");
        // What is left is part of a header, so this moves a few bytes at most.
        self.bytes.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let mut used = 0;
        let vectors = &mut self.message.vectors;
        self.direct = 0;
        if let Some((ptr, len)) = direct {
            vectors[0] = libc::iovec { iov_base: ptr.cast(), iov_len: len };
            (self.direct, used) = (len, 1);
        }
        if beyond || used == 0 {
            let rest = &mut self.bytes[self.end..];
            assert!(!rest.is_empty(), "a full buffer is parsed before more is received");
            vectors[used] = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            used += 1;
        }
        self.message.header.msg_iov = self.message.vectors.as_mut_ptr();
        self.message.header.msg_iovlen = used;
        self.in_flight = true;
        &mut self.message.header
    }

    /// The receive in flight is done and brought `bytes`. Returns how many of them went to the
    /// memory outside of the buffer.
    pub(super) fn received(&mut self, bytes: usize) -> usize {
        assert!(self.in_flight, "a receive completes once");
        self.in_flight = false;
        let direct = bytes.min(self.direct);
        self.end += bytes - direct;
        direct
    }
}
