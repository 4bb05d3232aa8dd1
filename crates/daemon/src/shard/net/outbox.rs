//! Replies on their way to one client: headers and arena memory, sent in as few calls as possible
//! without copying data.

use crate::shard::core::Core;
use crate::shard::front::budget::Held;
use crate::shard::limits::{REPLIES_MAX, VECTORS_MAX};
use crate::shard::net::message::Message;
use crate::shard::shared::Shared;
use std::os::fd::{AsRawFd, BorrowedFd};
use tidepool_engine::mem::Buf;
use tidepool_nbd::reply::Head;

/// One reply, or a part of one.
struct Item {
    head: Head,
    head_len: u16,
    /// What follows the head.
    data: Option<Buf>,
    /// The buffer that the data is part of, to be freed when it is sent.
    owned: Option<Buf>,
}

impl Item {
    fn len(&self) -> usize {
        usize::from(self.head_len) + self.data.map_or(0, |d| d.len as usize)
    }
}

pub(in crate::shard) struct Outbox {
    items: Box<[Item]>,
    /// Number of the oldest item, counted since the beginning; its place is the remainder.
    first: usize,
    len: usize,
    /// Bytes of the oldest item that are sent already.
    sent: usize,
    /// What the handshake says, before all items; rare and short.
    greeting: Vec<u8>,
    greeting_sent: usize,
    message: Box<Message<VECTORS_MAX>>,
    in_flight: bool,
}

impl Outbox {
    pub(in crate::shard) fn new() -> Outbox {
        let item = || Item { head: [0; size_of::<Head>()], head_len: 0, data: None, owned: None };
        Outbox {
            items: (0..REPLIES_MAX).map(|_| item()).collect(),
            first: 0,
            len: 0,
            sent: 0,
            greeting: Vec::new(),
            greeting_sent: 0,
            message: Message::new(),
            in_flight: false,
        }
    }

    /// Items that still find room.
    pub(in crate::shard) fn room(&self) -> usize {
        REPLIES_MAX - self.len
    }

    pub(in crate::shard) fn is_empty(&self) -> bool {
        self.len == 0 && self.greeting.is_empty()
    }

    pub(in crate::shard) fn in_flight(&self) -> bool {
        self.in_flight
    }

    /// Where the handshake writes its answers; only while nothing is in flight.
    pub(in crate::shard) fn greeting(&mut self) -> &mut Vec<u8> {
        assert!(!self.in_flight, "the kernel reads what is being sent");
        &mut self.greeting
    }

    /// Queues a reply: what `write` puts in the head, then `data`, which is part of `owned`.
    pub(in crate::shard) fn push(
        &mut self,
        data: Option<Buf>,
        owned: Option<Buf>,
        write: impl FnOnce(&mut Head) -> usize,
    ) {
        assert!(self.len < REPLIES_MAX, "room for replies is set aside when requests are taken");
        let item = &mut self.items[(self.first + self.len) % REPLIES_MAX];
        item.head_len = write(&mut item.head) as u16;
        (item.data, item.owned) = (data, owned);
        self.len += 1;
    }

    /// Sends what the socket takes at once. Returns false when the connection is broken.
    pub(in crate::shard) fn send_now<C: Core>(
        &mut self,
        fd: BorrowedFd<'_>,
        shared: &mut Shared<C>,
        held: &mut Held,
    ) -> bool {
        while let Some(message) = self.next_message(shared.core.arena().as_ptr()) {
            let wanted: usize = self.message.vectors[..self.message.header.msg_iovlen]
                .iter()
                .map(|v| v.iov_len)
                .sum();
            // SAFETY: the message and what it names stay as they are during the call.
            let sent = unsafe {
                libc::sendmsg(fd.as_raw_fd(), message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
            };
            let bytes = usize::try_from(sent).unwrap_or(0);
            let error = std::io::Error::last_os_error().kind();
            self.sent(bytes, shared, held);
            shared.count.sent_bytes += bytes as u64;
            if bytes < wanted {
                return sent >= 0
                    || error == std::io::ErrorKind::WouldBlock
                    || error == std::io::ErrorKind::Interrupted;
            }
        }
        true
    }

    /// The message to send next, if there is one and none is in flight. `arena` is its first byte.
    pub(in crate::shard) fn next_message(&mut self, arena: *mut u8) -> Option<*const libc::msghdr> {
        if self.in_flight || self.is_empty() {
            return None;
        }
        let mut used = 0;
        let mut skip = if self.greeting.is_empty() { self.sent } else { 0 };
        let vectors = &mut self.message.vectors;
        let mut add = |ptr: *mut u8, len: usize, skip: &mut usize| {
            let skipped = len.min(*skip);
            *skip -= skipped;
            if skipped < len {
                vectors[used] = libc::iovec {
                    iov_base: ptr.wrapping_add(skipped).cast(),
                    iov_len: len - skipped,
                };
                used += 1;
            }
            used
        };
        if !self.greeting.is_empty() {
            let rest = &mut self.greeting[self.greeting_sent..];
            add(rest.as_mut_ptr(), rest.len(), &mut skip);
        }
        for number in self.first..self.first + self.len {
            let item = &mut self.items[number % REPLIES_MAX];
            let used = add(item.head.as_mut_ptr(), usize::from(item.head_len), &mut skip);
            let used = match item.data {
                Some(data) if used < VECTORS_MAX => {
                    add(arena.wrapping_add(data.offset as usize), data.len as usize, &mut skip)
                }
                _ => used,
            };
            if used + 2 > VECTORS_MAX {
                break;
            }
        }
        self.in_flight = true;
        Some(self.message.of(used).cast_const())
    }

    /// The message in flight is done: `bytes` of it are sent (0 after an error).
    pub(in crate::shard) fn sent<C: Core>(
        &mut self,
        bytes: usize,
        shared: &mut Shared<C>,
        held: &mut Held,
    ) {
        assert!(self.in_flight, "a send completes once");
        self.in_flight = false;
        let greeting = bytes.min(self.greeting.len() - self.greeting_sent);
        self.greeting_sent += greeting;
        if self.greeting_sent == self.greeting.len() {
            self.greeting.clear();
            self.greeting_sent = 0;
        }
        self.sent += bytes - greeting;
        while self.len > 0 && self.sent >= self.items[self.first % REPLIES_MAX].len() {
            self.sent -= self.items[self.first % REPLIES_MAX].len();
            self.pop(shared, held);
        }
    }

    fn pop<C: Core>(&mut self, shared: &mut Shared<C>, held: &mut Held) {
        let item = &mut self.items[self.first % REPLIES_MAX];
        item.data = None;
        if let Some(buf) = item.owned.take() {
            shared.free(held, buf);
        }
        self.first += 1;
        self.len -= 1;
    }

    /// Gives up what is not sent; only while nothing is in flight.
    pub(in crate::shard) fn clear<C: Core>(&mut self, shared: &mut Shared<C>, held: &mut Held) {
        assert!(!self.in_flight, "the kernel reads what is being sent");
        while self.len > 0 {
            self.pop(shared, held);
        }
        self.sent = 0;
        self.greeting = Vec::new();
        self.greeting_sent = 0;
    }
}
