//! Reads an image from end to end.

use crate::api::{Backend, Transfer};
use crate::mailbox;
use std::io;
use std::mem::ManuallyDrop;
use tidepool_engine::api::IoError;
use tidepool_engine::mem::AlignedBuf;

/// Bytes of one read.
const READ_BYTES: usize = 1 << 20;
/// Reads in flight.
const DEPTH: usize = 8;
/// Longest wait for an event before completions are fetched anyway, in milliseconds.
const WAIT_MS: u32 = 1000;

/// Reads all of an open image and passes each piece with its offset to `see`, in no particular
/// order. Blocks. Nothing else may be in flight.
///
/// # Errors
/// The first read that failed, or the first error of `see`; no further piece is passed on then.
pub fn read_all(
    backend: &mut dyn Backend,
    see: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let size = backend.size_bytes();
    let slots: Vec<(AlignedBuf, u64)> =
        (0..DEPTH).map(|_| (AlignedBuf::zeroed(READ_BYTES), 0)).collect();
    // Dropped only when nothing is in flight: a panic of `see` leaks the buffers.
    let mut slots = ManuallyDrop::new(slots);
    let mut free: Vec<usize> = (0..DEPTH).collect();
    let (mut next, mut outcome) = (0, Ok(()));
    loop {
        while outcome.is_ok() && next < size {
            let Some(slot) = free.pop() else { break };
            let (buf, offset) = &mut slots[slot];
            *offset = next;
            let transfer = Transfer::Read { offset: next, ptr: buf.as_mut_ptr(), len: READ_BYTES };
            // SAFETY: the buffer lives in `slots`, which is dropped when every slot has come back.
            // Nothing touches the buffer before its own read has come back.
            unsafe { backend.submit(slot as u64, transfer) };
            next += READ_BYTES as u64;
        }
        if free.len() == DEPTH {
            drop(ManuallyDrop::into_inner(slots));
            return outcome;
        }
        mailbox::wait_readable(backend.event_fd(), WAIT_MS);
        backend.completions(&mut |token, result| {
            let slot = token as usize;
            free.push(slot);
            if outcome.is_err() {
                return;
            }
            let (buf, offset) = &slots[slot];
            let len = (size - offset).min(READ_BYTES as u64) as usize;
            outcome =
                result.map_err(|e| failed(e, *offset)).and_then(|()| see(*offset, &buf[..len]));
        });
    }
}

fn failed(error: IoError, offset: u64) -> io::Error {
    let why = match error {
        IoError::Errno(errno) => io::Error::from_raw_os_error(errno).to_string(),
        IoError::Full => "the backend is full".into(),
        IoError::Fenced => "this client is fenced".into(),
    };
    io::Error::other(format!("the image cannot be read at byte {offset}: {why}"))
}
