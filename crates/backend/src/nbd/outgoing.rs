//! What waits to be sent: request headers, and the payload of writes, which is sent from the memory
//! of the transfer.

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use tidepool_engine::mem::AlignedBuf;
use tidepool_nbd::wire;

/// Longest payload of zeroes, in bytes.
pub(super) const ZERO_BYTES: usize = 1 << 20;
/// Most stretches that one system call sends.
const BATCH: usize = 64;

/// A stretch of bytes.
#[derive(Debug, Clone, Copy)]
enum Segment {
    Header([u8; wire::REQUEST_BYTES]),
    Memory { slot: u16, ptr: *const u8, len: usize },
    Zeroes { len: usize },
}

impl Segment {
    fn len(&self) -> usize {
        match self {
            Segment::Header(bytes) => bytes.len(),
            Segment::Memory { len, .. } | Segment::Zeroes { len } => *len,
        }
    }
}

/// The queue of one connection.
pub(super) struct Outgoing {
    segments: VecDeque<Segment>,
    /// Bytes of the first stretch that are sent already.
    sent: usize,
    /// For every slot, how many stretches of its memory wait here.
    held: Box<[u32]>,
    zeroes: AlignedBuf,
}

impl Outgoing {
    /// A queue for transfers in slots below `slots`.
    pub(super) fn new(slots: usize) -> Outgoing {
        Outgoing {
            segments: VecDeque::with_capacity(256),
            sent: 0,
            held: vec![0; slots].into_boxed_slice(),
            zeroes: AlignedBuf::zeroed(ZERO_BYTES),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Queues a request's header.
    pub(super) fn header(&mut self, header: [u8; wire::REQUEST_BYTES]) {
        self.segments.push_back(Segment::Header(header));
    }

    /// Queues a payload of `len` zeroes, at most [`ZERO_BYTES`].
    pub(super) fn zeroes(&mut self, len: usize) {
        self.segments.push_back(Segment::Zeroes { len });
    }

    /// Queues a payload that belongs to the transfer in `slot`.
    ///
    /// # Safety
    /// The memory stays valid and unchanged until it is sent or this queue is dropped.
    pub(super) unsafe fn memory(&mut self, slot: u16, ptr: *const u8, len: usize) {
        self.segments.push_back(Segment::Memory { slot, ptr, len });
        self.held[usize::from(slot)] += 1;
    }

    /// Whether memory of this slot still waits here.
    pub(super) fn holds(&self, slot: u16) -> bool {
        self.held[usize::from(slot)] > 0
    }

    /// Sends as much as the socket takes now.
    pub(super) fn send(&mut self, socket: impl AsFd) -> io::Result<()> {
        while !self.is_empty() {
            let sent = {
                let mut batch = [IoSlice::new(&[]); BATCH];
                let n = self.gather(&mut batch);
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                sendmsg(&socket, &batch[..n], &mut SendAncillaryBuffer::default(), flags)
            };
            match sent {
                Ok(bytes) => self.take(bytes),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }

    fn gather<'a>(&'a self, batch: &mut [IoSlice<'a>; BATCH]) -> usize {
        let mut n = 0;
        for (slice, segment) in batch.iter_mut().zip(&self.segments) {
            let bytes = match segment {
                Segment::Header(bytes) => &bytes[..],
                // SAFETY: the caller that queued it keeps the memory unchanged until it is sent.
                Segment::Memory { ptr, len, .. } => unsafe {
                    std::slice::from_raw_parts(*ptr, *len)
                },
                Segment::Zeroes { len } => &self.zeroes[..*len],
            };
            let skip = if n == 0 { self.sent } else { 0 };
            *slice = IoSlice::new(&bytes[skip..]);
            n += 1;
        }
        n
    }

    fn take(&mut self, mut bytes: usize) {
        while let Some(first) = self.segments.front() {
            let left = first.len() - self.sent;
            if bytes < left {
                self.sent += bytes;
                return;
            }
            if let Segment::Memory { slot, .. } = first {
                self.held[usize::from(*slot)] -= 1;
            }
            bytes -= left;
            self.sent = 0;
            self.segments.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    #[test]
    fn everything_arrives_in_order_through_a_socket_that_takes_little() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let data: Vec<u8> = (0..300_000u32).map(|i| i as u8).collect();
        let mut out = Outgoing::new(200);
        let mut expected = Vec::new();
        for i in 0..200u8 {
            out.header([i; wire::REQUEST_BYTES]);
            expected.extend([i; wire::REQUEST_BYTES]);
            if i % 3 == 0 {
                // SAFETY: `data` outlives the queue.
                unsafe { out.memory(u16::from(i), data.as_ptr(), data.len()) };
                expected.extend_from_slice(&data);
            } else if i % 3 == 1 {
                out.zeroes(70_001);
                expected.resize(expected.len() + 70_001, 0);
            }
        }
        assert!(out.holds(198) && !out.holds(199));
        let total = expected.len();
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; total];
            theirs.read_exact(&mut got).expect("all of it");
            got
        });
        while !out.is_empty() {
            out.send(&ours).expect("sent");
            std::thread::yield_now();
        }
        assert!(!out.holds(198));
        assert!(reader.join().expect("the reader") == expected);
    }
}
