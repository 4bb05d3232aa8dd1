//! A client for threads that may block: one request after the other, or many in flight.

use super::handshake::{Handshake, Negotiated, Wanted};
use super::pipeline::{Failure, Pipeline, Sink};
use super::{ClientError, Duplex, Moved, Stream};
use crate::request::Command;
use crate::uri::NbdUri;
use crate::wire;
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Most requests in flight on one connection.
const DEPTH: usize = 4096;
/// Bytes of the receive buffer.
const INPUT_BYTES: usize = 256 << 10;
/// Bytes of the receive buffer during a handshake.
const HANDSHAKE_INPUT_BYTES: usize = 4 << 10;
/// When at least this many bytes are queued, a `submit` method sends them without a call of `send`.
const OUTPUT_BYTES: usize = 256 << 10;
/// Longest range in bytes of one trim, write-zeroes or block-status request of the methods that
/// wait for the reply. The `submit` methods do not have this limit.
const RANGE_BYTES_MAX: u64 = 1 << 30;

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

/// The requests in flight on a connection, and the codec of its replies; performs no I/O.
#[derive(Debug)]
struct Core {
    pipeline: Pipeline,
    entries: Entries,
    payload_bytes_max: u32,
}

impl Core {
    fn new(negotiated: &Negotiated) -> Core {
        Core {
            pipeline: Pipeline::new(negotiated, DEPTH),
            entries: Entries {
                entries: (0..DEPTH).map(|_| None).collect(),
                free: (0..DEPTH).rev().collect(),
                done: VecDeque::new(),
                answer: None,
            },
            payload_bytes_max: negotiated.block_sizes.payload_bytes_max.min(wire::PAYLOAD_BYTES_MAX),
        }
    }

    fn submit(
        &mut self,
        out: &mut Vec<u8>,
        entry: Entry,
        command: Command,
        offset: u64,
        len: usize,
        payload: &[u8],
    ) -> Result<(), ClientError> {
        let carries = matches!(command, Command::Read { .. } | Command::Write { .. });
        let len = u32::try_from(len).ok().filter(|&len| !carries || len <= self.payload_bytes_max);
        let len = len.ok_or(ClientError::Usage("the request is longer than the server's maximum payload"))?;
        let index = *self.entries.free.last().ok_or(ClientError::Usage("too many requests in flight"))?;
        let header = self.pipeline.submit(index as u64, command, offset, len)?;
        self.entries.free.pop();
        self.entries.entries[index] = Some(entry);
        out.extend_from_slice(&header);
        out.extend_from_slice(payload);
        Ok(())
    }

    fn submit_tagged(
        &mut self,
        out: &mut Vec<u8>,
        tag: u64,
        command: Command,
        offset: u64,
        len: u64,
    ) -> Result<(), ClientError> {
        if matches!(command, Command::Read { .. } | Command::Write { .. }) {
            return Err(ClientError::Usage("reads and writes are submitted with their buffers"));
        }
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        self.submit(out, entry(tag, Vec::new(), false), command, offset, len, &[])
    }

    fn receive(&mut self, input: &[u8]) -> Result<(), ClientError> {
        self.pipeline.receive(input, &mut self.entries)
    }
}

fn entry(tag: u64, data: Vec<u8>, own: bool) -> Entry {
    Entry { completion: Completion { tag, result: Ok(()), data, extents: Vec::new() }, own }
}

fn send_all(stream: &mut impl Write, out: &mut Vec<u8>) -> Result<(), ClientError> {
    if !out.is_empty() {
        let sent = stream.write_all(out).and_then(|()| stream.flush());
        out.clear();
        out.shrink_to(2 * OUTPUT_BYTES);
        sent.map_err(|source| ClientError::io("send to", source))?;
    }
    Ok(())
}

fn receive_some(stream: &mut impl Read, input: &mut [u8]) -> Result<usize, ClientError> {
    loop {
        match stream.read(input) {
            Ok(len) => return Ok(len),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(ClientError::io("receive from", error)),
        }
    }
}

/// Carries out the whole handshake on a connection whose reads and writes block. Fails if the
/// deadline has passed before a receive. A receive or send that has begun may end later, within the
/// connection's own timeouts.
///
/// # Errors
/// The server refuses or breaks the protocol, or the connection fails.
pub fn negotiate(
    stream: &mut (impl Read + Write),
    wanted: Wanted,
    deadline: Option<Instant>,
) -> Result<Negotiated, ClientError> {
    let mut handshake = Handshake::new(wanted)?;
    let mut input = [0; HANDSHAKE_INPUT_BYTES];
    let mut output = Vec::new();
    loop {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Err(ClientError::io("finish the handshake with", ErrorKind::TimedOut.into()));
        }
        let len = receive_some(stream, &mut input)?;
        if len == 0 {
            return Err(ClientError::Closed { in_flight: 0 });
        }
        let (taken, negotiated) = handshake.receive(&input[..len], &mut output)?;
        send_all(stream, &mut output)?;
        if let Some(negotiated) = negotiated {
            if taken < len {
                return Err(ClientError::Protocol("it answered requests before there were any"));
            }
            return Ok(negotiated);
        }
    }
}

/// A connection to an NBD server, for one thread.
///
/// The methods named after commands send one request and wait for its reply. The `submit` methods
/// queue requests, and [`BlockingClient::receive`] returns replies in the order of arrival. While a
/// send has to wait, replies are received. For two threads there is [`BlockingClient::split`].
#[derive(Debug)]
pub struct BlockingClient<S = Stream> {
    stream: S,
    negotiated: Negotiated,
    core: Core,
    input: Box<[u8]>,
    output: Vec<u8>,
}

impl BlockingClient<Stream> {
    /// Connects to the export that the URI names, with structured replies if the server has them.
    ///
    /// # Errors
    /// The server cannot be reached, refuses, or breaks the protocol.
    pub fn connect(uri: &NbdUri) -> Result<BlockingClient, ClientError> {
        BlockingClient::connect_with(uri, Wanted::new(&uri.export), None)
    }

    /// Connects with the options in `wanted`, which also names the export. With a timeout, every
    /// single receive and send of the handshake and of later requests fails when it takes longer
    /// than the timeout. The connect itself has no timeout.
    ///
    /// # Errors
    /// The server cannot be reached, refuses, or breaks the protocol.
    pub fn connect_with(
        uri: &NbdUri,
        wanted: Wanted,
        timeout: Option<Duration>,
    ) -> Result<BlockingClient, ClientError> {
        let stream = Stream::connect(uri)?;
        stream.set_timeout(timeout).map_err(|source| ClientError::io("set a timeout for", source))?;
        BlockingClient::over(stream, wanted)
    }
}

impl<S: Duplex> BlockingClient<S> {
    /// Carries out the handshake over an existing connection.
    ///
    /// # Errors
    /// The server refuses or breaks the protocol, or the connection fails.
    pub fn over(mut stream: S, wanted: Wanted) -> Result<BlockingClient<S>, ClientError> {
        let negotiated = negotiate(&mut stream, wanted, None)?;
        Ok(BlockingClient::after_handshake(stream, negotiated))
    }

    /// Uses a connection whose handshake is over.
    pub fn after_handshake(stream: S, negotiated: Negotiated) -> BlockingClient<S> {
        let (core, input) = (Core::new(&negotiated), vec![0; INPUT_BYTES].into_boxed_slice());
        BlockingClient { stream, negotiated, core, input, output: Vec::new() }
    }

    /// Returns the connection, for use by another client.
    ///
    /// # Panics
    /// If requests are in flight.
    pub fn into_connection(self) -> (S, Negotiated) {
        assert_eq!(self.in_flight(), 0, "the replies in flight would be lost");
        (self.stream, self.negotiated)
    }

    /// What the server granted.
    pub fn negotiated(&self) -> &Negotiated {
        &self.negotiated
    }

    /// Size of the export in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.negotiated.size_bytes
    }

    /// Requests that are not answered yet.
    pub fn in_flight(&self) -> usize {
        self.core.pipeline.in_flight()
    }

    /// Queues a read of as many bytes as `buffer` holds.
    ///
    /// # Errors
    /// The request is too long, too many are in flight, or sending fails.
    pub fn submit_read(&mut self, tag: u64, offset: u64, buffer: Vec<u8>) -> Result<(), ClientError> {
        let (command, len) = (Command::Read { df: false }, buffer.len());
        self.core.submit(&mut self.output, entry(tag, buffer, false), command, offset, len, &[])?;
        self.send_when_much()
    }

    /// Queues a write.
    ///
    /// # Errors
    /// The request is too long, too many are in flight, or sending fails.
    pub fn submit_write(&mut self, tag: u64, offset: u64, data: &[u8], fua: bool) -> Result<(), ClientError> {
        let (command, entry) = (Command::Write { fua }, entry(tag, Vec::new(), false));
        self.core.submit(&mut self.output, entry, command, offset, data.len(), data)?;
        self.send_when_much()
    }

    /// Queues a command other than a read or write.
    ///
    /// # Errors
    /// The command is a read or write, the range is too long, the server does not offer the
    /// command, too many requests are in flight, or sending fails.
    pub fn submit(&mut self, tag: u64, command: Command, offset: u64, len: u64) -> Result<(), ClientError> {
        self.core.submit_tagged(&mut self.output, tag, command, offset, len)?;
        self.send_when_much()
    }

    /// Sends what is queued. Replies that arrive meanwhile are kept for
    /// [`BlockingClient::receive`].
    ///
    /// # Errors
    /// The connection fails, or the server breaks the protocol.
    pub fn send(&mut self) -> Result<(), ClientError> {
        let mut sent = 0;
        let mut outcome = Ok(());
        while sent < self.output.len() && outcome.is_ok() {
            outcome = match self.stream.exchange(&self.output[sent..], &mut self.input) {
                Ok(Moved::Sent(len)) => {
                    sent += len;
                    Ok(())
                }
                Ok(Moved::Received(len)) => self.received(len),
                Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
                Err(source) => Err(ClientError::io("send to", source)),
            };
        }
        self.output.clear();
        self.output.shrink_to(2 * OUTPUT_BYTES);
        outcome
    }

    fn send_when_much(&mut self) -> Result<(), ClientError> {
        if self.output.len() < OUTPUT_BYTES { Ok(()) } else { self.send() }
    }

    fn received(&mut self, len: usize) -> Result<(), ClientError> {
        if len == 0 {
            return Err(ClientError::Closed { in_flight: self.in_flight() });
        }
        self.core.receive(&self.input[..len])
    }

    /// Sends what is queued and waits until a submitted request is over.
    ///
    /// # Errors
    /// Nothing is in flight, the connection fails, or the server breaks the protocol.
    pub fn receive(&mut self) -> Result<Completion, ClientError> {
        loop {
            if let Some(completion) = self.core.entries.done.pop_front() {
                return Ok(completion);
            }
            if self.in_flight() == 0 {
                return Err(ClientError::Usage("there is no request in flight"));
            }
            // `send` may already have received a completion. Waiting for another reply could then
            // block forever.
            self.send()?;
            if self.core.entries.done.is_empty() {
                self.wait()?;
            }
        }
    }

    fn wait(&mut self) -> Result<(), ClientError> {
        let len = receive_some(&mut self.stream, &mut self.input)?;
        self.received(len)
    }

    fn call(
        &mut self,
        command: Command,
        offset: u64,
        len: usize,
        buffer: Vec<u8>,
        payload: &[u8],
    ) -> Result<Completion, ClientError> {
        self.core.submit(&mut self.output, entry(0, buffer, true), command, offset, len, payload)?;
        self.send()?;
        loop {
            if let Some(Completion { result, data, extents, tag }) = self.core.entries.answer.take() {
                result?;
                return Ok(Completion { tag, result: Ok(()), data, extents });
            }
            self.wait()?;
        }
    }

    /// Reads `buf.len()` bytes. A range longer than the server's maximum payload takes several
    /// requests.
    ///
    /// # Errors
    /// The request or the connection fails.
    pub fn read(&mut self, mut offset: u64, buf: &mut [u8]) -> Result<(), ClientError> {
        let mut buffer = Vec::new();
        for piece in buf.chunks_mut(self.core.payload_bytes_max as usize) {
            buffer.resize(piece.len(), 0);
            let command = Command::Read { df: false };
            buffer = self.call(command, offset, piece.len(), buffer, &[])?.data;
            piece.copy_from_slice(&buffer);
            offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Writes `data`. Data longer than the server's maximum payload takes several requests.
    ///
    /// # Errors
    /// The request or the connection fails.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        self.write_pieces(offset, data, false)
    }

    /// Writes to stable media. If the server does not offer FUA, a flush follows the writes.
    ///
    /// # Errors
    /// The request or the connection fails, or the server has neither FUA nor flush.
    pub fn write_fua(&mut self, offset: u64, data: &[u8]) -> Result<(), ClientError> {
        let fua = self.negotiated.offers(wire::FLAG_SEND_FUA);
        self.write_pieces(offset, data, fua)?;
        if fua { Ok(()) } else { self.flush() }
    }

    fn write_pieces(&mut self, mut offset: u64, data: &[u8], fua: bool) -> Result<(), ClientError> {
        for piece in data.chunks(self.core.payload_bytes_max as usize) {
            self.call(Command::Write { fua }, offset, piece.len(), Vec::new(), piece)?;
            offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Makes all completed writes stable.
    ///
    /// # Errors
    /// The request or the connection fails, or the server has no flush.
    pub fn flush(&mut self) -> Result<(), ClientError> {
        self.call(Command::Flush, 0, 0, Vec::new(), &[]).map(|_| ())
    }

    /// Discards a range.
    ///
    /// # Errors
    /// The request or the connection fails, or the server has no trim.
    pub fn trim(&mut self, offset: u64, len: u64) -> Result<(), ClientError> {
        self.ranges(Command::Trim { fua: false }, offset, len)
    }

    /// Writes zeroes; with `no_hole` the space stays allocated.
    ///
    /// # Errors
    /// The request or the connection fails, or the server does not offer write zeroes.
    pub fn zeroes(&mut self, offset: u64, len: u64, no_hole: bool) -> Result<(), ClientError> {
        self.ranges(Command::WriteZeroes { fua: false, no_hole, fast_zero: false }, offset, len)
    }

    /// Asks the server to bring a range into its cache.
    ///
    /// # Errors
    /// The request or the connection fails, or the server has no cache command.
    pub fn cache(&mut self, mut offset: u64, mut len: u64) -> Result<(), ClientError> {
        while len > 0 {
            let some = len.min(u64::from(self.core.payload_bytes_max));
            self.call(Command::Cache, offset, some as usize, Vec::new(), &[])?;
            (offset, len) = (offset + some, len - some);
        }
        Ok(())
    }

    fn ranges(&mut self, command: Command, mut offset: u64, mut len: u64) -> Result<(), ClientError> {
        while len > 0 {
            let some = len.min(RANGE_BYTES_MAX);
            self.call(command, offset, some as usize, Vec::new(), &[])?;
            (offset, len) = (offset + some, len - some);
        }
        Ok(())
    }

    /// The status of a range in one of the selected metadata contexts: consecutive extents that
    /// cover the range exactly.
    ///
    /// # Errors
    /// The context was not selected, or the request or the connection fails.
    pub fn block_status(
        &mut self,
        context: &str,
        mut offset: u64,
        mut len: u64,
    ) -> Result<Vec<Extent>, ClientError> {
        let mut all: Vec<Extent> = Vec::new();
        while len > 0 {
            for extent in self.first_extents(context, offset, len)? {
                (offset, len) = (offset + u64::from(extent.len), len - u64::from(extent.len));
                match all.last_mut() {
                    Some(last)
                        if last.flags == extent.flags && last.len.checked_add(extent.len).is_some() =>
                    {
                        last.len += extent.len;
                    }
                    _ => all.push(extent),
                }
            }
        }
        Ok(all)
    }

    /// The extents that one request returns for a range that is not empty. There is at least one
    /// extent, and all extents together are no longer than the range.
    ///
    /// # Errors
    /// As for [`BlockingClient::block_status`].
    pub fn first_extents(
        &mut self,
        context: &str,
        offset: u64,
        len: u64,
    ) -> Result<Vec<Extent>, ClientError> {
        let known = self.negotiated.contexts.iter().find(|(_, name)| name == context);
        let id = known.ok_or(ClientError::Unsupported("the metadata context that was asked for"))?.0;
        let some = len.min(RANGE_BYTES_MAX) as usize;
        let answer = self.call(Command::BlockStatus { one: false }, offset, some, Vec::new(), &[])?;
        let mut left = len;
        let mut extents = Vec::new();
        for extent in answer.extents.into_iter().filter(|extent| extent.context == id) {
            let clipped = u64::from(extent.len).min(left);
            left -= clipped;
            if clipped > 0 {
                extents.push(Extent { len: clipped as u32, ..extent });
            }
        }
        match extents.is_empty() {
            true => Err(ClientError::Protocol("a block status leaves out a selected context")),
            false => Ok(extents),
        }
    }

    /// Disconnects. By the protocol the server finishes the requests in flight; their replies are
    /// lost.
    ///
    /// # Errors
    /// The connection fails.
    pub fn disconnect(mut self) -> Result<(), ClientError> {
        self.output.extend_from_slice(&crate::encode_request(0, wire::CMD_DISC, 0, 0, 0));
        self.send()
    }
}

impl<S: Duplex> BlockingClient<S> {
    /// Splits the client into two halves for two threads: one submits, the other receives.
    /// Completions that were not fetched go to the receiver.
    ///
    /// # Errors
    /// The connection has no second handle, or fails.
    pub fn split(mut self) -> Result<(Sender<S>, Receiver<S>), ClientError> {
        self.send()?;
        let second =
            self.stream.second().map_err(|source| ClientError::io("split the connection to", source))?;
        let core = Arc::new(Mutex::new(self.core));
        Ok((
            Sender { stream: self.stream, core: Arc::clone(&core), output: self.output },
            Receiver { stream: second, core, input: self.input },
        ))
    }
}

fn lock(core: &Mutex<Core>) -> MutexGuard<'_, Core> {
    // The methods of `Core` leave it consistent, so the core can still be used after a panic of
    // another thread has poisoned the mutex.
    core.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sending half of a [`BlockingClient`].
#[derive(Debug)]
pub struct Sender<S = Stream> {
    stream: S,
    core: Arc<Mutex<Core>>,
    output: Vec<u8>,
}

impl<S: Write> Sender<S> {
    /// Queues a read, as [`BlockingClient::submit_read`] does.
    ///
    /// # Errors
    /// As for [`BlockingClient::submit_read`].
    pub fn submit_read(&mut self, tag: u64, offset: u64, buffer: Vec<u8>) -> Result<(), ClientError> {
        let (command, len) = (Command::Read { df: false }, buffer.len());
        lock(&self.core).submit(&mut self.output, entry(tag, buffer, false), command, offset, len, &[])?;
        self.send_when_much()
    }

    /// Queues a write, as [`BlockingClient::submit_write`] does.
    ///
    /// # Errors
    /// As for [`BlockingClient::submit_write`].
    pub fn submit_write(&mut self, tag: u64, offset: u64, data: &[u8], fua: bool) -> Result<(), ClientError> {
        let (command, entry) = (Command::Write { fua }, entry(tag, Vec::new(), false));
        lock(&self.core).submit(&mut self.output, entry, command, offset, data.len(), data)?;
        self.send_when_much()
    }

    /// Queues a command, as [`BlockingClient::submit`] does.
    ///
    /// # Errors
    /// As for [`BlockingClient::submit`].
    pub fn submit(&mut self, tag: u64, command: Command, offset: u64, len: u64) -> Result<(), ClientError> {
        lock(&self.core).submit_tagged(&mut self.output, tag, command, offset, len)?;
        self.send_when_much()
    }

    /// Sends what is queued. Without this call, a `submit` method sends requests only when at least
    /// 256 KiB are queued.
    ///
    /// # Errors
    /// The connection fails.
    pub fn send(&mut self) -> Result<(), ClientError> {
        send_all(&mut self.stream, &mut self.output)
    }

    fn send_when_much(&mut self) -> Result<(), ClientError> {
        if self.output.len() < OUTPUT_BYTES { Ok(()) } else { self.send() }
    }

    /// Requests that are not answered yet.
    pub fn in_flight(&self) -> usize {
        lock(&self.core).pipeline.in_flight()
    }

    /// Disconnects. The receiver then gets the remaining replies and the end of the connection.
    ///
    /// # Errors
    /// The connection fails.
    pub fn disconnect(mut self) -> Result<(), ClientError> {
        self.output.extend_from_slice(&crate::encode_request(0, wire::CMD_DISC, 0, 0, 0));
        self.send()
    }
}

/// The receiving half of a [`BlockingClient`].
#[derive(Debug)]
pub struct Receiver<S = Stream> {
    stream: S,
    core: Arc<Mutex<Core>>,
    input: Box<[u8]>,
}

impl<S: Read> Receiver<S> {
    /// Waits until a request is over, also when no request is in flight yet.
    ///
    /// # Errors
    /// The connection ends or fails, or the server breaks the protocol.
    pub fn receive(&mut self) -> Result<Completion, ClientError> {
        loop {
            if let Some(completion) = lock(&self.core).entries.done.pop_front() {
                return Ok(completion);
            }
            let len = receive_some(&mut self.stream, &mut self.input)?;
            let mut core = lock(&self.core);
            if len == 0 {
                return Err(ClientError::Closed { in_flight: core.pipeline.in_flight() });
            }
            core.receive(&self.input[..len])?;
        }
    }
}
