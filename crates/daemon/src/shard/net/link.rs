//! A connection to another host's daemon: the replica protocol's frames, both ways. The data of a
//! record is received where the core wants it; what is sent is copied, since no append waits for a
//! peer that does not read.

use crate::shard::api::Socket;
use crate::shard::net::inbox::Inbox;
use crate::shard::net::message::Message as Vectors;
use crate::shard::net::secure::Secure;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use tidepool_driver::Ring;
use tidepool_engine::api::{BLOCK_BYTES, Nanos, RECORD_BLOCKS_MAX};
use tidepool_engine::mem::{Arena, Buf};
use tidepool_replica::Arrived;
use tidepool_replica::wire::{Malformed, Message, PREFIX_BYTES, Prefix};

/// Data of one record in bytes.
const RECORD_DATA_BYTES_MAX: usize = RECORD_BLOCKS_MAX * BLOCK_BYTES;

/// Why a connection cannot be read any further.
#[derive(Debug, thiserror::Error)]
pub(in crate::shard) enum Unreadable {
    /// It has brought what no message is.
    #[error("{0}")]
    Malformed(#[from] Malformed),
    /// TLS says so, or has been ended.
    #[error("{0}")]
    Tls(String),
}

/// A record whose data is on its way, and bytes of its buffer that are filled.
#[derive(Debug)]
struct Arriving {
    record: Arrived,
    filled: usize,
}

/// What the next bytes of a connection are.
pub(in crate::shard) enum Next {
    /// Not here yet.
    Nothing,
    /// A message; its head is in the caller's buffer, with the data of a block, and taken with
    /// [`Link::take`].
    Frame(Prefix),
    /// All data of a record is here.
    Record(Arrived),
}

pub(in crate::shard) struct Link {
    fd: OwnedFd,
    /// The host at the other end.
    pub(in crate::shard) host: String,
    /// The same with the volume, for the log.
    pub(in crate::shard) peer: String,
    key: Option<[u8; 32]>,
    /// What has come; with TLS it is encrypted.
    inbox: Inbox,
    secure: Option<Secure>,
    arriving: Option<Arriving>,
    /// What waits to be sent, and what is being sent; with TLS the latter is encrypted.
    queued: Vec<u8>,
    queued_bytes_max: usize,
    sending: Vec<u8>,
    sent: usize,
    vectors: Box<Vectors<1>>,
    send_in_flight: bool,
    /// What was done for it in this round, in units of `effort.rs`.
    pub(in crate::shard) effort: u32,
    /// What has come has to wait: nothing more is received.
    pub(in crate::shard) stalled: bool,
    /// It has had its part of the round; what it has brought is for the next one, and nothing more
    /// is received before.
    pub(in crate::shard) deferred: bool,
    /// When something was last received, or could not be for reasons of our own.
    pub(in crate::shard) heard: Nanos,
    /// When something was last received.
    pub(in crate::shard) spoke: Nanos,
    broken: bool,
}

impl Link {
    /// A connection whose greetings are exchanged.
    /// It is to be given up when more than `queued_bytes_max` bytes wait to be sent.
    pub(in crate::shard) fn new(
        socket: Socket,
        host: String,
        volume: &str,
        queued_bytes_max: usize,
        now: Nanos,
    ) -> Link {
        Link {
            fd: socket.fd,
            peer: format!("{host} (volume {volume})"),
            host,
            key: socket.key,
            inbox: Inbox::new(),
            secure: socket.tls.map(Secure::new),
            arriving: None,
            queued: Vec::new(),
            queued_bytes_max,
            sending: Vec::new(),
            sent: 0,
            vectors: Vectors::new(),
            send_in_flight: false,
            effort: 0,
            stalled: false,
            deferred: false,
            heard: now,
            spoke: now,
            broken: false,
        }
    }

    /// The other host has shown a certificate with this key.
    pub(in crate::shard) fn has_shown(&self, key: &[u8; 32]) -> bool {
        self.key.as_ref() == Some(key)
    }

    pub(in crate::shard) fn broken(&self) -> bool {
        self.broken
    }

    /// The kernel uses none of its memory.
    pub(in crate::shard) fn is_quiet(&self) -> bool {
        !self.inbox.in_flight() && !self.send_in_flight
    }

    /// Ends the connection in both directions; operations in flight end now.
    pub(in crate::shard) fn break_off(&mut self) {
        if !std::mem::replace(&mut self.broken, true) {
            self.say_the_end();
        }
        // An error means that the other side is gone already.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }

    /// Ends TLS in order, if that can be said at once.
    fn say_the_end(&mut self) {
        let Some(secure) = &mut self.secure else { return };
        if !self.send_in_flight && self.sent == self.sending.len() {
            self.queued.clear();
            // A host that does not learn it sees the end of the connection itself.
            let _ = secure.end(&mut self.sending).is_ok() && self.send_now();
        }
    }

    /// The buffer of a record that has not come whole, for the caller to free. Only when the link
    /// is quiet.
    pub(in crate::shard) fn take_buffer(&mut self) -> Option<Buf> {
        assert!(self.is_quiet(), "the kernel may still write to it");
        self.arriving.take().map(|arriving| arriving.record.buf)
    }

    /// The other side does not read what it is sent: nothing more is queued for it.
    pub(in crate::shard) fn is_unread(&self) -> bool {
        self.queued.len() > self.queued_bytes_max
    }

    /// Queues a message without data.
    pub(in crate::shard) fn push(&mut self, message: &Message<'_>) {
        if !self.broken && !self.is_unread() {
            message.encode(&mut self.queued);
        }
    }

    /// What was queued and is not on its way yet.
    pub(in crate::shard) fn unsent_bytes(&self) -> usize {
        self.queued.len()
    }

    /// Bytes of memory for what waits to be sent, or is being sent.
    pub(in crate::shard) fn outgoing_bytes(&self) -> usize {
        self.queued.len() + self.sending.len()
    }

    /// Queues a message and its data.
    pub(in crate::shard) fn push_with(&mut self, message: &Message<'_>, data: &[u8]) {
        let is_queued = !self.broken && !self.is_unread();
        self.push(message);
        if is_queued {
            self.queued.extend_from_slice(data);
        }
    }

    /// Sends what the socket takes at once, before the connection is broken off.
    pub(in crate::shard) fn send_rest(&mut self) {
        if !self.send_in_flight && !self.send_now() {
            self.break_off();
        }
    }

    /// Says one thing at once, before the end of a connection that nothing else was said on.
    pub(in crate::shard) fn say(mut self, message: &Message<'_>) {
        self.push(message);
        // A host that does not read it learns nothing but the end.
        let _ = self.send_now();
    }

    /// What comes next. `head` is overwritten with the frame's head, and the data of a block behind
    /// it.
    pub(in crate::shard) fn next(
        &mut self,
        arena: &mut Arena,
        head: &mut Vec<u8>,
    ) -> Result<Next, Unreadable> {
        if self.arriving.is_some() {
            return self.next_data(arena);
        }
        let Some(prefix) = self.peek(PREFIX_BYTES)?.first_chunk() else { return Ok(Next::Nothing) };
        let prefix = Prefix::decode(prefix)?;
        let end = frame_bytes(&prefix);
        let Some(bytes) = self.peek(end)?.get(PREFIX_BYTES..end) else { return Ok(Next::Nothing) };
        head.clear();
        head.extend_from_slice(bytes);
        Ok(Next::Frame(prefix))
    }

    /// The data of the record that is arriving, as far as it has come.
    fn next_data(&mut self, arena: &mut Arena) -> Result<Next, Unreadable> {
        let Some(arriving) = &mut self.arriving else { return Ok(Next::Nothing) };
        let data = arena.bytes_mut(arriving.record.buf);
        if let Some(secure) = &mut self.secure {
            while arriving.filled < data.len() {
                let bytes = secure.read(&mut self.inbox, &mut data[arriving.filled..]);
                match bytes.map_err(Unreadable::Tls)? {
                    0 => break,
                    bytes => arriving.filled += bytes,
                }
            }
        } else if !self.inbox.in_flight() {
            // While a receive is in flight the kernel fills the buffer itself.
            let bytes = self.inbox.unread().len().min(data.len() - arriving.filled);
            data[arriving.filled..arriving.filled + bytes]
                .copy_from_slice(&self.inbox.unread()[..bytes]);
            self.inbox.take(bytes);
            arriving.filled += bytes;
        }
        let whole = arriving.filled == data.len();
        let arrived = if whole { self.arriving.take() } else { None };
        Ok(arrived.map_or(Next::Nothing, |arriving| Next::Record(arriving.record)))
    }

    /// What has come of a frame's prefix and head: `wanted` bytes and more, or less when more has
    /// to come first.
    fn peek(&mut self, wanted: usize) -> Result<&[u8], Unreadable> {
        match &mut self.secure {
            Some(secure) => secure.peek(&mut self.inbox, wanted).map_err(Unreadable::Tls),
            None => Ok(self.inbox.unread()),
        }
    }

    /// Takes the frame that [`Link::next`] has returned.
    pub(in crate::shard) fn take(&mut self, prefix: &Prefix) {
        let bytes = frame_bytes(prefix);
        match &mut self.secure {
            Some(secure) => secure.take(bytes),
            None => self.inbox.take(bytes),
        }
    }

    /// Bytes of the buffer for a record with this prefix; `None` if it is longer than this host's
    /// log takes.
    pub(in crate::shard) fn record_bytes(prefix: &Prefix) -> Option<usize> {
        (prefix.data_bytes() <= RECORD_DATA_BYTES_MAX).then_some(BLOCK_BYTES + prefix.data_bytes())
    }

    /// The data of a record goes behind its header in `buf`.
    pub(in crate::shard) fn begin_record(
        &mut self,
        sequence: u64,
        generation: u64,
        durable: bool,
        buf: Buf,
    ) {
        self.arriving = Some(Arriving {
            record: Arrived { sequence, generation, durable, buf },
            filled: BLOCK_BYTES,
        });
    }

    /// Sends what the socket takes, and starts what has to wait: one receive, one send.
    pub(in crate::shard) fn arm(
        &mut self,
        ring: &mut Ring,
        arena: *mut u8,
        receive: u64,
        send: u64,
    ) {
        if self.broken {
            return;
        }
        if !self.send_in_flight && !self.send_now() {
            return self.break_off();
        }
        if !self.send_in_flight && self.sent < self.sending.len() {
            let rest = &mut self.sending[self.sent..];
            self.vectors.vectors[0] =
                libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            self.send_in_flight = true;
            let message = self.vectors.of(1);
            // SAFETY: the message and what it names stay as they are until the completion
            // (`Link::sent`).
            unsafe { ring.sendmsg(send, self.fd.as_fd(), message) };
        }
        if !self.stalled && !self.deferred && !self.inbox.in_flight() {
            let plain = self.arriving.as_ref().filter(|_| self.secure.is_none());
            let direct = plain.map(|arriving| {
                let at = arriving.record.buf.offset as usize + arriving.filled;
                (arena.wrapping_add(at), arriving.record.buf.len as usize - arriving.filled)
            });
            let (message, drained) = self.inbox.next_message(direct, true);
            // SAFETY: the message, the receive buffer and the arena's buffer stay as they are until
            // the completion: the link is kept until then (`is_quiet`), and the record's buffer
            // with it.
            unsafe { ring.recvmsg(receive, self.fd.as_fd(), message, drained) };
        }
    }

    /// Sends what the socket takes at once; false when the connection is broken.
    fn send_now(&mut self) -> bool {
        loop {
            if self.sent == self.sending.len() {
                self.sending.clear();
                self.sent = 0;
                if !self.move_queued() {
                    return false;
                }
            }
            let rest = &self.sending[self.sent..];
            if rest.is_empty() {
                return true;
            }
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            // SAFETY: `rest` is memory of ours during the call.
            let sent =
                unsafe { libc::send(self.fd.as_raw_fd(), rest.as_ptr().cast(), rest.len(), flags) };
            let Ok(bytes) = usize::try_from(sent) else {
                let error = std::io::Error::last_os_error().kind();
                return matches!(
                    error,
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted
                );
            };
            self.sent += bytes;
        }
    }

    /// What is queued is sent next; false when it cannot be encrypted.
    fn move_queued(&mut self) -> bool {
        let Some(secure) = &mut self.secure else {
            std::mem::swap(&mut self.sending, &mut self.queued);
            return true;
        };
        // All at once: what is short shares what TLS adds.
        let encrypted = secure.write(&self.queued, &mut self.sending).is_ok();
        self.queued.clear();
        encrypted
    }

    /// A send is done.
    pub(in crate::shard) fn sent(&mut self, result: i32) {
        self.send_in_flight = false;
        match usize::try_from(result) {
            Ok(bytes) if bytes > 0 => self.sent += bytes,
            _ => self.break_off(),
        }
    }

    /// A receive is done.
    pub(in crate::shard) fn received(&mut self, result: i32, more: bool, now: Nanos) {
        let bytes = usize::try_from(result).unwrap_or(0);
        let direct = self.inbox.received(bytes, more);
        if let Some(arriving) = &mut self.arriving {
            arriving.filled += direct;
        }
        if bytes > 0 {
            (self.heard, self.spoke) = (now, now);
        } else {
            self.break_off();
        }
    }
}

/// Bytes of a frame that come to its reader in one piece: the data of a record goes where the core
/// wants it.
fn frame_bytes(prefix: &Prefix) -> usize {
    PREFIX_BYTES + prefix.head_bytes() + prefix.block_bytes()
}
