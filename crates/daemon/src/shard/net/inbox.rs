//! Bytes on their way from one client: a receive buffer, and the part of a large payload that is
//! received into the arena directly.

use crate::shard::limits::RECEIVE_BYTES;
use crate::shard::net::message::Message;

pub(in crate::shard) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    message: Box<Message<2>>,
    /// Length of the memory outside of the buffer that the receive in flight fills first.
    direct: usize,
    in_flight: bool,
    /// The last receive has emptied the socket.
    drained: bool,
}

impl Inbox {
    pub(in crate::shard) fn new() -> Inbox {
        Inbox {
            bytes: vec![0; RECEIVE_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            message: Message::new(),
            direct: 0,
            in_flight: false,
            drained: false,
        }
    }

    /// What has been received and not been taken.
    pub(in crate::shard) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Begins with what was received elsewhere: at most as much as one buffer has.
    pub(in crate::shard) fn put(&mut self, bytes: &[u8]) {
        assert!(!self.in_flight && self.end == 0, "before anything is received");
        self.bytes[..bytes.len()].copy_from_slice(bytes);
        self.end = bytes.len();
    }

    /// Takes `len` bytes of it.
    pub(in crate::shard) fn take(&mut self, len: usize) {
        assert!(len <= self.end - self.start, "only what was received can be taken");
        self.start += len;
        if self.start == self.end && !self.in_flight {
            (self.start, self.end) = (0, 0);
        }
    }

    pub(in crate::shard) fn in_flight(&self) -> bool {
        self.in_flight
    }

    /// The message for the next receive, and whether the last one has emptied the socket. With
    /// `direct`, that memory is filled first, and the buffer only if `beyond`.
    pub(in crate::shard) fn next_message(
        &mut self,
        direct: Option<(*mut u8, usize)>,
        beyond: bool,
    ) -> (*mut libc::msghdr, bool) {
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
        self.in_flight = true;
        (self.message.of(used), self.drained)
    }

    /// The receive in flight is done and brought `bytes`, and there may be `more` in the socket.
    /// Returns how many of them went to the memory outside of the buffer.
    pub(in crate::shard) fn received(&mut self, bytes: usize, more: bool) -> usize {
        assert!(self.in_flight, "a receive completes once");
        (self.in_flight, self.drained) = (false, !more);
        let direct = bytes.min(self.direct);
        self.end += bytes - direct;
        direct
    }
}
