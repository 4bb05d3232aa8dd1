//! A plain NBD client for workloads: simple replies, many requests in flight, nothing else.
//!
//! It shares no code with the server's codec on purpose: a misreading of the protocol that both sides shared would never show.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, io};

const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
/// Fixed newstyle, no zeroes after the export's information.
const HANDSHAKE_FLAGS: u32 = 0b11;
/// Longest option reply that is taken: an error's text.
const OPTION_REPLY_BYTES_MAX: u32 = 64 << 10;

/// Read command.
pub const READ: u16 = 0;
/// Write command.
pub const WRITE: u16 = 1;
/// Disconnect command.
pub const DISCONNECT: u16 = 2;
/// Flush command.
pub const FLUSH: u16 = 3;
/// Trim command.
pub const TRIM: u16 = 4;
/// Write-zeroes command.
pub const WRITE_ZEROES: u16 = 6;
/// Force unit access, as a flag of a command.
pub const FUA: u16 = 1;

/// What a server said about an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// Bytes.
    pub size_bytes: u64,
    /// Transmission flags.
    pub flags: u16,
}

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

/// One socket read through an `Arc`, so that the other half may shut it down.
#[derive(Debug)]
struct SharedStream(Arc<UnixStream>);

impl Read for SharedStream {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        (&*self.0).read(buf)
    }
}

/// One request's header.
#[derive(Debug, Clone, Copy)]
pub struct Command {
    /// [`READ`], [`WRITE`] and so on.
    pub kind: u16,
    /// [`FUA`] or 0.
    pub flags: u16,
    /// Comes back with the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// Connects to the unix socket at `socket` and opens `export`.
pub fn connect(socket: &Path, export: &str) -> Result<(Export, Sender, Receiver), Error> {
    let stream =
        UnixStream::connect(socket).map_err(io(format!("cannot connect to {}", socket.display())))?;
    let mut stream = std::io::BufReader::new(SharedStream(Arc::new(stream)));
    let export = negotiate(&mut stream, export)?;
    let sender = Sender { stream: stream.get_ref().0.clone() };
    Ok((export, sender, Receiver { stream }))
}

/// The fixed newstyle handshake up to the transmission phase.
fn negotiate(stream: &mut std::io::BufReader<SharedStream>, export: &str) -> Result<Export, Error> {
    if read_u64(stream)? != INIT_MAGIC || read_u64(stream)? != OPTION_MAGIC {
        return Err(Error::Protocol("the server does not greet as a newstyle NBD server".into()));
    }
    let server_flags = read_u16(stream)?;
    if server_flags & 0b11 != 0b11 {
        return Err(Error::Protocol(format!("the server's handshake flags are {server_flags:#x}")));
    }
    let name = export.as_bytes();
    let mut go = Vec::new();
    go.extend(HANDSHAKE_FLAGS.to_be_bytes());
    go.extend(OPTION_MAGIC.to_be_bytes());
    go.extend(OPTION_GO.to_be_bytes());
    go.extend((name.len() as u32 + 6).to_be_bytes());
    go.extend((name.len() as u32).to_be_bytes());
    go.extend(name);
    go.extend(0u16.to_be_bytes());
    (&*stream.get_ref().0).write_all(&go).map_err(|_| Error::Disconnected)?;
    let mut found = None;
    loop {
        if read_u64(stream)? != OPTION_REPLY_MAGIC || read_u32(stream)? != OPTION_GO {
            return Err(Error::Protocol("the reply to GO is not an option reply to GO".into()));
        }
        let kind = read_u32(stream)?;
        let len = read_u32(stream)?;
        if len > OPTION_REPLY_BYTES_MAX {
            return Err(Error::Protocol(format!("an option reply of {len} bytes")));
        }
        let mut body = vec![0; len as usize];
        stream.read_exact(&mut body).map_err(|_| Error::Disconnected)?;
        match kind {
            REPLY_ACK => break,
            REPLY_INFO if body.len() == 12 && body[..2] == [0, 0] => {
                found = Some(Export {
                    size_bytes: u64::from_be_bytes(body[2..10].try_into().expect("eight bytes")),
                    flags: u16::from_be_bytes(body[10..].try_into().expect("two bytes")),
                });
            }
            REPLY_INFO => {}
            _ => {
                let text = String::from_utf8_lossy(&body);
                return Err(Error::Protocol(format!(
                    "the server refuses export {export:?} ({kind:#x}): {text}"
                )));
            }
        }
    }
    found.ok_or_else(|| Error::Protocol("the server accepts GO without telling the size".into()))
}

impl Sender {
    /// Sends one request; `payload` is what a write writes.
    pub fn send(&mut self, command: Command, payload: &[u8]) -> Result<(), Error> {
        let mut header = Vec::with_capacity(28 + payload.len());
        header.extend(REQUEST_MAGIC.to_be_bytes());
        header.extend(command.flags.to_be_bytes());
        header.extend(command.kind.to_be_bytes());
        header.extend(command.cookie.to_be_bytes());
        header.extend(command.offset.to_be_bytes());
        header.extend(command.len.to_be_bytes());
        header.extend(payload);
        (&*self.stream).write_all(&header).map_err(|_| Error::Disconnected)
    }

    /// Ends the connection at once; the receiving half notices.
    pub fn shutdown(&self) {
        // The other side may be gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Receiver {
    /// The next reply's errno (0 for success) and cookie.
    pub fn reply(&mut self) -> Result<(u32, u64), Error> {
        let magic = read_u32(&mut self.stream)?;
        if magic != SIMPLE_REPLY_MAGIC {
            return Err(Error::Protocol(format!("a reply begins with {magic:#x}")));
        }
        Ok((read_u32(&mut self.stream)?, read_u64(&mut self.stream)?))
    }

    /// What follows the reply to a read.
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

    /// Gives up waiting for an answer after `limit`, as if the server were gone.
    pub fn give_up_after(&self, limit: Duration) -> Result<(), Error> {
        self.sender.stream.set_read_timeout(Some(limit)).map_err(io("cannot limit the time of an answer"))
    }

    /// Sends one request and waits; the errno of a refusal is in [`Error::Refused`].
    pub fn request(
        &mut self,
        kind: u16,
        flags: u16,
        offset: u64,
        len: u32,
        payload: &[u8],
        data: &mut [u8],
    ) -> Result<(), Error> {
        self.cookie += 1;
        self.sender.send(Command { kind, flags, cookie: self.cookie, offset, len }, payload)?;
        let (errno, cookie) = self.receiver.reply()?;
        if cookie != self.cookie {
            return Err(Error::Protocol(format!("a reply to cookie {cookie} instead of {}", self.cookie)));
        }
        if errno != 0 {
            let request = format!("command {kind} of {len} bytes at {offset}");
            return Err(Error::Refused { errno, request });
        }
        self.receiver.payload(data)
    }

    /// Reads `len` bytes at `offset`.
    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
        let mut data = vec![0; len];
        self.request(READ, 0, offset, len as u32, &[], &mut data)?;
        Ok(data)
    }

    /// Writes `data` at `offset`.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.request(WRITE, 0, offset, data.len() as u32, data, &mut [])
    }

    /// Flushes.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.request(FLUSH, 0, 0, 0, &[], &mut [])
    }
}

fn read_array<const N: usize>(stream: &mut impl Read) -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).map_err(|_| Error::Disconnected)?;
    Ok(bytes)
}

fn read_u16(stream: &mut impl Read) -> Result<u16, Error> {
    read_array(stream).map(u16::from_be_bytes)
}

fn read_u32(stream: &mut impl Read) -> Result<u32, Error> {
    read_array(stream).map(u32::from_be_bytes)
}

fn read_u64(stream: &mut impl Read) -> Result<u64, Error> {
    read_array(stream).map(u64::from_be_bytes)
}
