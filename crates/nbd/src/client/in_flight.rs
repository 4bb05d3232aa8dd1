//! The requests of a client that are in flight on a connection, without any I/O.

use super::ClientError;
use super::handshake::Negotiated;
use super::pipeline::{Failure, Pipeline, Sink};
use crate::request::Command;
use crate::wire;
use std::collections::VecDeque;

/// Most requests in flight on one connection.
const DEPTH: usize = 4096;

/// One extent of a block status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Id of the metadata context.
    pub context: u32,
    /// Length in bytes.
    pub len: u32,
    /// Status flags, as the metadata context defines them.
    pub flags: u32,
}

/// A request that is over.
#[derive(Debug)]
pub struct Completion {
    /// The tag that was given with the request.
    pub tag: u64,
    /// Success, or why the request failed.
    pub result: Result<(), Failure>,
    /// The buffer of a read; its content is defined only if the read succeeded.
    pub data: Vec<u8>,
    /// The extents of a block status, in the order of arrival.
    pub extents: Vec<Extent>,
}

/// One request, as a caller of the client asks for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    command: Command,
    offset: u64,
    len: usize,
    /// The data of a write.
    payload: &'a [u8],
}

impl<'a> Call<'a> {
    pub(super) fn read(offset: u64, len: usize) -> Call<'a> {
        Call { command: Command::Read { df: false }, offset, len, payload: &[] }
    }

    pub(super) fn write(offset: u64, data: &'a [u8], fua: bool) -> Call<'a> {
        Call { command: Command::Write { fua }, offset, len: data.len(), payload: data }
    }

    /// A command whose request has no payload.
    pub(super) fn on_range(command: Command, offset: u64, len: u64) -> Call<'a> {
        // A length that does not fit is longer than any request may be, and is refused as such.
        Call { command, offset, len: usize::try_from(len).unwrap_or(usize::MAX), payload: &[] }
    }

    /// Whether the request or its reply carries the bytes of the range.
    fn carries_data(&self) -> bool {
        matches!(self.command, Command::Read { .. } | Command::Write { .. })
    }
}

#[derive(Debug)]
struct Entry {
    completion: Completion,
    /// Whether the request belongs to a method that waits for its own reply. The completion then
    /// goes to [`Entries::answer`].
    own: bool,
}

/// Takes the content of replies. The tag that the pipeline gets for a request is the index of the
/// request's entry.
#[derive(Debug)]
struct Entries {
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    done: VecDeque<Completion>,
    answer: Option<Completion>,
}

impl Entries {
    fn buffer(&mut self, index: u64, at: u32, len: usize) -> Option<&mut [u8]> {
        let entry = self.entries.get_mut(index as usize)?.as_mut()?;
        entry.completion.data.get_mut(at as usize..at as usize + len)
    }
}

impl Sink for Entries {
    fn data(&mut self, index: u64, at: u32, bytes: &[u8]) {
        if let Some(buffer) = self.buffer(index, at, bytes.len()) {
            buffer.copy_from_slice(bytes);
        }
    }

    fn zeroes(&mut self, index: u64, at: u32, len: u32) {
        if let Some(buffer) = self.buffer(index, at, len as usize) {
            buffer.fill(0);
        }
    }

    fn status(&mut self, index: u64, context: u32, len: u32, flags: u32) {
        if let Some(Some(entry)) = self.entries.get_mut(index as usize) {
            entry.completion.extents.push(Extent { context, len, flags });
        }
    }

    fn completed(&mut self, index: u64, result: Result<(), Failure>) {
        if let Some(Entry { mut completion, own }) =
            self.entries.get_mut(index as usize).and_then(Option::take)
        {
            self.free.push(index as usize);
            completion.result = result;
            if own {
                self.answer = Some(completion);
            } else {
                self.done.push_back(completion);
            }
        }
    }
}

impl Entry {
    fn new(tag: u64, data: Vec<u8>, own: bool) -> Entry {
        Entry { completion: Completion { tag, result: Ok(()), data, extents: Vec::new() }, own }
    }
}

/// The requests in flight on a connection, and the codec of its replies; performs no I/O.
#[derive(Debug)]
pub(super) struct InFlight {
    pipeline: Pipeline,
    entries: Entries,
    payload_bytes_max: u32,
}

impl InFlight {
    /// No requests, on a connection whose handshake is over.
    pub(super) fn new(negotiated: &Negotiated) -> InFlight {
        InFlight {
            pipeline: Pipeline::new(negotiated, DEPTH),
            entries: Entries {
                entries: (0..DEPTH).map(|_| None).collect(),
                free: (0..DEPTH).rev().collect(),
                done: VecDeque::new(),
                answer: None,
            },
            payload_bytes_max: negotiated
                .block_sizes
                .payload_bytes_max
                .min(wire::PAYLOAD_BYTES_MAX),
        }
    }

    /// Requests that are not answered yet.
    pub(super) fn count(&self) -> usize {
        self.pipeline.in_flight()
    }

    /// Longest payload in bytes of a request.
    pub(super) fn payload_bytes_max(&self) -> u32 {
        self.payload_bytes_max
    }

    /// Adds a request. `buffer` takes the data of a read.
    pub(super) fn submit(
        &mut self,
        out: &mut Vec<u8>,
        tag: u64,
        call: Call<'_>,
        buffer: Vec<u8>,
    ) -> Result<(), ClientError> {
        self.add(out, Entry::new(tag, buffer, false), call)
    }

    /// Adds a request other than a read or write.
    pub(super) fn submit_on_range(
        &mut self,
        out: &mut Vec<u8>,
        tag: u64,
        call: Call<'_>,
    ) -> Result<(), ClientError> {
        if call.carries_data() {
            return Err(ClientError::Usage("reads and writes are submitted with their buffers"));
        }
        self.submit(out, tag, call, Vec::new())
    }

    /// Adds a request of a method that waits for its own reply, the answer.
    pub(super) fn ask(
        &mut self,
        out: &mut Vec<u8>,
        call: Call<'_>,
        buffer: Vec<u8>,
    ) -> Result<(), ClientError> {
        self.add(out, Entry::new(0, buffer, true), call)
    }

    fn add(&mut self, out: &mut Vec<u8>, entry: Entry, call: Call<'_>) -> Result<(), ClientError> {
        let len = u32::try_from(call.len).ok();
        let len = len.filter(|&len| !call.carries_data() || len <= self.payload_bytes_max);
        let len = len
            .ok_or(ClientError::Usage("the request is longer than the server's maximum payload"))?;
        let index =
            *self.entries.free.last().ok_or(ClientError::Usage("too many requests in flight"))?;
        let header = self.pipeline.submit(index as u64, call.command, call.offset, len)?;
        self.entries.free.pop();
        self.entries.entries[index] = Some(entry);
        out.extend_from_slice(&header);
        out.extend_from_slice(call.payload);
        Ok(())
    }

    /// Takes bytes from the server.
    pub(super) fn receive(&mut self, input: &[u8]) -> Result<(), ClientError> {
        self.pipeline.receive(input, &mut self.entries)
    }

    /// A submitted request is over.
    pub(super) fn has_done(&self) -> bool {
        !self.entries.done.is_empty()
    }

    /// The next submitted request that is over, in the order of the replies.
    pub(super) fn next_done(&mut self) -> Option<Completion> {
        self.entries.done.pop_front()
    }

    /// The reply to the request of [`InFlight::ask`].
    pub(super) fn take_answer(&mut self) -> Option<Completion> {
        self.entries.answer.take()
    }
}
