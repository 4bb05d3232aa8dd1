//! A client for threads that may block: one request after the other, or many in flight.

use super::handshake::{Handshake, Negotiated, Wanted};
use super::in_flight::{Call, Completion, Extent, InFlight};
use super::{ClientError, Duplex, Moved, Stream};
use crate::request::Command;
use crate::uri::NbdUri;
use crate::wire;
use std::io::{ErrorKind, Read, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of the receive buffer.
const INPUT_BYTES: usize = 256 << 10;
/// Bytes of the receive buffer during a handshake.
const HANDSHAKE_INPUT_BYTES: usize = 4 << 10;
/// When at least this many bytes are queued, a `submit` method sends them without a call of `send`.
const OUTPUT_BYTES: usize = 256 << 10;
/// Longest range in bytes of one trim, write-zeroes or block-status request of the methods that
/// wait for the reply. The `submit` methods do not have this limit.
const RANGE_BYTES_MAX: u64 = 1 << 30;

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
    in_flight: InFlight,
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
        stream
            .set_timeout(timeout)
            .map_err(|source| ClientError::io("set a timeout for", source))?;
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
        let (in_flight, input) =
            (InFlight::new(&negotiated), vec![0; INPUT_BYTES].into_boxed_slice());
        BlockingClient { stream, negotiated, in_flight, input, output: Vec::new() }
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
        self.in_flight.count()
    }

    /// Queues a read of as many bytes as `buffer` holds.
    ///
    /// # Errors
    /// The request is too long, too many are in flight, or sending fails.
    pub fn submit_read(
        &mut self,
        tag: u64,
        offset: u64,
        buffer: Vec<u8>,
    ) -> Result<(), ClientError> {
        let call = Call::read(offset, buffer.len());
        self.in_flight.submit(&mut self.output, tag, call, buffer)?;
        self.send_when_much()
    }

    /// Queues a write.
    ///
    /// # Errors
    /// The request is too long, too many are in flight, or sending fails.
    pub fn submit_write(
        &mut self,
        tag: u64,
        offset: u64,
        data: &[u8],
        fua: bool,
    ) -> Result<(), ClientError> {
        let call = Call::write(offset, data, fua);
        self.in_flight.submit(&mut self.output, tag, call, Vec::new())?;
        self.send_when_much()
    }

    /// Queues a command other than a read or write.
    ///
    /// # Errors
    /// The command is a read or write, the range is too long, the server does not offer the
    /// command, too many requests are in flight, or sending fails.
    pub fn submit(
        &mut self,
        tag: u64,
        command: Command,
        offset: u64,
        len: u64,
    ) -> Result<(), ClientError> {
        self.in_flight.submit_on_range(
            &mut self.output,
            tag,
            Call::on_range(command, offset, len),
        )?;
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
        self.in_flight.receive(&self.input[..len])
    }

    /// Sends what is queued and waits until a submitted request is over.
    ///
    /// # Errors
    /// Nothing is in flight, the connection fails, or the server breaks the protocol.
    pub fn receive(&mut self) -> Result<Completion, ClientError> {
        loop {
            if let Some(completion) = self.in_flight.next_done() {
                return Ok(completion);
            }
            if self.in_flight() == 0 {
                return Err(ClientError::Usage("there is no request in flight"));
            }
            // `send` may already have received a completion. Waiting for another reply could then
            // block forever.
            self.send()?;
            if !self.in_flight.has_done() {
                self.wait()?;
            }
        }
    }

    fn wait(&mut self) -> Result<(), ClientError> {
        let len = receive_some(&mut self.stream, &mut self.input)?;
        self.received(len)
    }

    /// Sends a request and waits for its reply. `buffer` takes the data of a read.
    fn call(&mut self, call: Call<'_>, buffer: Vec<u8>) -> Result<Completion, ClientError> {
        self.in_flight.ask(&mut self.output, call, buffer)?;
        self.send()?;
        loop {
            if let Some(Completion { result, data, extents, tag }) = self.in_flight.take_answer() {
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
        for piece in buf.chunks_mut(self.in_flight.payload_bytes_max() as usize) {
            buffer.resize(piece.len(), 0);
            buffer = self.call(Call::read(offset, piece.len()), buffer)?.data;
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
        for piece in data.chunks(self.in_flight.payload_bytes_max() as usize) {
            self.call(Call::write(offset, piece, fua), Vec::new())?;
            offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Makes all completed writes stable.
    ///
    /// # Errors
    /// The request or the connection fails, or the server has no flush.
    pub fn flush(&mut self) -> Result<(), ClientError> {
        self.call(Call::on_range(Command::Flush, 0, 0), Vec::new()).map(|_| ())
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
            let some = len.min(u64::from(self.in_flight.payload_bytes_max()));
            self.call(Call::on_range(Command::Cache, offset, some), Vec::new())?;
            (offset, len) = (offset + some, len - some);
        }
        Ok(())
    }

    fn ranges(
        &mut self,
        command: Command,
        mut offset: u64,
        mut len: u64,
    ) -> Result<(), ClientError> {
        while len > 0 {
            let some = len.min(RANGE_BYTES_MAX);
            self.call(Call::on_range(command, offset, some), Vec::new())?;
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
                        if last.flags == extent.flags
                            && last.len.checked_add(extent.len).is_some() =>
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
        let id =
            known.ok_or(ClientError::Unsupported("the metadata context that was asked for"))?.0;
        let call =
            Call::on_range(Command::BlockStatus { one: false }, offset, len.min(RANGE_BYTES_MAX));
        let answer = self.call(call, Vec::new())?;
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
        let second = self
            .stream
            .second()
            .map_err(|source| ClientError::io("split the connection to", source))?;
        let in_flight = Arc::new(Mutex::new(self.in_flight));
        Ok((
            Sender { stream: self.stream, in_flight: Arc::clone(&in_flight), output: self.output },
            Receiver { stream: second, in_flight, input: self.input },
        ))
    }
}

fn lock(in_flight: &Mutex<InFlight>) -> MutexGuard<'_, InFlight> {
    // The methods of `InFlight` leave it consistent, so it can still be used after a panic of
    // another thread has poisoned the mutex.
    in_flight.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The sending half of a [`BlockingClient`].
#[derive(Debug)]
pub struct Sender<S = Stream> {
    stream: S,
    in_flight: Arc<Mutex<InFlight>>,
    output: Vec<u8>,
}

impl<S: Write> Sender<S> {
    /// Queues a read, as [`BlockingClient::submit_read`] does.
    ///
    /// # Errors
    /// As for [`BlockingClient::submit_read`].
    pub fn submit_read(
        &mut self,
        tag: u64,
        offset: u64,
        buffer: Vec<u8>,
    ) -> Result<(), ClientError> {
        let call = Call::read(offset, buffer.len());
        lock(&self.in_flight).submit(&mut self.output, tag, call, buffer)?;
        self.send_when_much()
    }

    /// Queues a write, as [`BlockingClient::submit_write`] does.
    ///
    /// # Errors
    /// As for [`BlockingClient::submit_write`].
    pub fn submit_write(
        &mut self,
        tag: u64,
        offset: u64,
        data: &[u8],
        fua: bool,
    ) -> Result<(), ClientError> {
        let call = Call::write(offset, data, fua);
        lock(&self.in_flight).submit(&mut self.output, tag, call, Vec::new())?;
        self.send_when_much()
    }

    /// Queues a command, as [`BlockingClient::submit`] does.
    ///
    /// # Errors
    /// As for [`BlockingClient::submit`].
    pub fn submit(
        &mut self,
        tag: u64,
        command: Command,
        offset: u64,
        len: u64,
    ) -> Result<(), ClientError> {
        lock(&self.in_flight).submit_on_range(
            &mut self.output,
            tag,
            Call::on_range(command, offset, len),
        )?;
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
        lock(&self.in_flight).count()
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
    in_flight: Arc<Mutex<InFlight>>,
    input: Box<[u8]>,
}

impl<S: Read> Receiver<S> {
    /// Waits until a request is over, also when no request is in flight yet.
    ///
    /// # Errors
    /// The connection ends or fails, or the server breaks the protocol.
    pub fn receive(&mut self) -> Result<Completion, ClientError> {
        loop {
            if let Some(completion) = lock(&self.in_flight).next_done() {
                return Ok(completion);
            }
            let len = receive_some(&mut self.stream, &mut self.input)?;
            let mut in_flight = lock(&self.in_flight);
            if len == 0 {
                return Err(ClientError::Closed { in_flight: in_flight.count() });
            }
            in_flight.receive(&self.input[..len])?;
        }
    }
}
