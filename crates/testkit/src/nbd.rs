//! A plain NBD client for workloads: simple replies and many requests in flight, nothing else.
//!
//! The client shares no code with the server's codec on purpose: a misreading of the protocol that
//! both sides shared would never show.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidepool_cluster::nbd;

use crate::error::{Error, io};

pub use tidepool_cluster::nbd::{Command, Export, FLUSH, READ, WRITE};

/// The command that disconnects.
pub const DISCONNECT: u16 = 2;
/// The command that discards.
pub const TRIM: u16 = 4;
/// The command that writes zeroes.
pub const WRITE_ZEROES: u16 = 6;
/// Command flag: force unit access.
pub const FUA: u16 = 1;

/// The half of a connection that sends.
#[derive(Debug, Clone)]
pub struct Sender {
    stream: Arc<UnixStream>,
}

/// The half of a connection that receives.
#[derive(Debug)]
pub struct Receiver {
    stream: std::io::BufReader<SharedStream>,
}

/// Reads one socket through an `Arc`, so that the other half can shut the socket down.
#[derive(Debug)]
struct SharedStream(Arc<UnixStream>);

impl Read for SharedStream {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        (&*self.0).read(buf)
    }
}

/// Connects to the unix socket at `socket` and opens `export`.
pub fn connect(socket: &Path, export: &str) -> Result<(Export, Sender, Receiver), Error> {
    let stream = UnixStream::connect(socket)
        .map_err(io(format!("cannot connect to {}", socket.display())))?;
    let sender = Sender { stream: Arc::new(stream) };
    let mut stream = std::io::BufReader::new(SharedStream(sender.stream.clone()));
    let export = nbd::negotiate(&mut stream, &mut &*sender.stream, export)?;
    Ok((export, sender, Receiver { stream }))
}

impl Sender {
    /// Sends one request. `payload` is the data of a write.
    pub fn send(&mut self, command: Command, payload: &[u8]) -> Result<(), Error> {
        let mut header = command.header().to_vec();
        header.extend(payload);
        (&*self.stream).write_all(&header).map_err(|_| Error::Disconnected)
    }

    /// Ends the connection at once; the receiving half then reads the end of the connection.
    pub fn shutdown(&self) {
        // The other side may have closed the connection already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Receiver {
    /// Receives a reply: its errno (0 for success) and cookie.
    pub fn reply(&mut self) -> Result<(u32, u64), Error> {
        Ok(nbd::reply(&mut self.stream)?)
    }

    /// Receives the data that follows the reply to a read.
    pub fn payload(&mut self, data: &mut [u8]) -> Result<(), Error> {
        self.stream.read_exact(data).map_err(|_| Error::Disconnected)
    }
}

/// A connection that sends one request at a time and waits for its answer.
#[derive(Debug)]
pub struct Client {
    /// What the server said about the export.
    pub export: Export,
    sender: Sender,
    receiver: Receiver,
    cookie: u64,
}

impl Client {
    /// Opens `export` at the unix socket `socket`.
    pub fn connect(socket: &Path, export: &str) -> Result<Client, Error> {
        let (export, sender, receiver) = connect(socket, export)?;
        Ok(Client { export, sender, receiver, cookie: 0 })
    }

    /// Limits the wait for an answer: a receive that takes longer than `limit` fails as if the
    /// server had closed the connection.
    pub fn give_up_after(&self, limit: Duration) -> Result<(), Error> {
        self.sender
            .stream
            .set_read_timeout(Some(limit))
            .map_err(io("cannot limit the time of an answer"))
    }

    /// Sends one request and waits for the reply. The client chooses the cookie. `payload` is the
    /// data of a write, and `data` takes the data of a read. [`Error::Refused`] carries the errno
    /// of a refusal.
    pub fn request(
        &mut self,
        command: Command,
        payload: &[u8],
        data: &mut [u8],
    ) -> Result<(), Error> {
        self.cookie += 1;
        self.sender.send(Command { cookie: self.cookie, ..command }, payload)?;
        let (errno, cookie) = self.receiver.reply()?;
        if cookie != self.cookie {
            return Err(Error::Protocol(format!(
                "a reply to cookie {cookie} instead of {}",
                self.cookie
            )));
        }
        if errno != 0 {
            let Command { kind, len, offset, .. } = command;
            let request = format!("command {kind} of {len} bytes at {offset}");
            return Err(Error::Refused { errno, request });
        }
        self.receiver.payload(data)
    }

    /// Reads `len` bytes at `offset`.
    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        let mut data = vec![0; len];
        self.request(Command::new(READ, offset, len as u32), &[], &mut data)?;
        Ok(data)
    }

    /// Writes `data` at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.request(Command::new(WRITE, offset, data.len() as u32), data, &mut [])
    }

    /// Flushes.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.request(Command::new(FLUSH, 0, 0), &[], &mut [])
    }

    /// Discards `len` bytes at `offset`.
    pub fn trim(&mut self, offset: u64, len: u32) -> Result<(), Error> {
        self.request(Command::new(TRIM, offset, len), &[], &mut [])
    }
}
