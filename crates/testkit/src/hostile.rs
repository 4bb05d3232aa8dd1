//! NBD clients that send arbitrary bytes, may leave replies unread, and request as much work as
//! they can.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::nbd::{TRIM, WRITE_ZEROES};

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const GO: u32 = 7;
const STRUCTURED: u32 = 8;
const SET_META_CONTEXT: u32 = 10;
const LIST: u32 = 3;
const READ: u16 = 0;
const BLOCK_STATUS: u16 = 7;
/// Requests that a connection sends in one batch, in an attack that repeats one request or option.
pub const PIPELINED: usize = 64;
/// Requests in one batch of an attack that moves from one offset to the next; then the batch
/// repeats.
const PLACES: u64 = 4096;
/// Bytes of a request without a payload.
const REQUEST_BYTES: usize = 28;
/// Longest time that a sender blocks in a send before it checks whether the attack is over.
const LOOK: Duration = Duration::from_millis(50);
/// Pause of a client whose connection was refused, before it connects again.
const AWAY: Duration = Duration::from_millis(5);
/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// A connection to an NBD server.
#[derive(Debug)]
pub struct Raw(pub UnixStream);

impl Raw {
    /// Connects, receives the greeting and sends the client flags.
    ///
    /// # Errors
    /// The server refuses the connection, closes it, or does not answer.
    pub fn connect(socket: &Path) -> io::Result<Raw> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        stream.write_all(&3u32.to_be_bytes())?;
        Ok(Raw(stream))
    }

    /// Connects and enters the transmission phase of an export, with structured replies and
    /// `base:allocation`.
    ///
    /// # Errors
    /// The server refuses the connection or an option, closes the connection, or does not answer.
    pub fn of_export(socket: &Path, export: &str) -> io::Result<Raw> {
        let mut raw = Raw::connect(socket)?;
        raw.option(STRUCTURED, &[])?;
        raw.answered()?;
        let context = "base:allocation";
        let mut query = text(export);
        query.extend(1u32.to_be_bytes());
        query.extend(text(context));
        raw.option(SET_META_CONTEXT, &query)?;
        raw.answered()?;
        let mut go = text(export);
        go.extend(0u16.to_be_bytes());
        raw.option(GO, &go)?;
        raw.answered()?;
        Ok(raw)
    }

    /// Sends an option.
    fn option(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        self.0.write_all(&Raw::option_bytes(option, data))
    }

    /// The bytes of an option.
    fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    /// Reads the replies to an option up to the last one. An error reply is an error.
    fn answered(&mut self) -> io::Result<()> {
        loop {
            let mut head = [0; 20];
            self.0.read_exact(&mut head)?;
            let number =
                |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
            let mut body = vec![0; number(16) as usize];
            self.0.read_exact(&mut body)?;
            match number(12) {
                1 => return Ok(()),
                error if error & 0x8000_0000 != 0 => {
                    return Err(io::Error::other(format!(
                        "{error:#x}: {}",
                        String::from_utf8_lossy(&body)
                    )));
                }
                _ => {}
            }
        }
    }

    /// The bytes of a request.
    pub fn request(kind: u16, offset: u64, len: u32) -> Vec<u8> {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(0u16.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(7u64.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        bytes
    }
}

/// What a connection sends over and over.
#[derive(Debug)]
pub enum Attack {
    /// Requests without a payload, as bytes.
    Requests(Vec<u8>),
    /// Options of a handshake that never ends.
    Options,
}

/// The attacks with their names. The attacks assume that of the first `cached_bytes` bytes of the
/// volume every second block is cached, beginning with block 0. Attacks that need these blocks come
/// before those that leave zeroes there.
pub fn attacks(cached_bytes: u32) -> [(&'static str, Attack); 6] {
    let many = |kind, len| Attack::Requests(Raw::request(kind, 0, len).repeat(PIPELINED));
    let each = |request: &dyn Fn(u64) -> Vec<u8>| {
        Attack::Requests((0..PLACES).flat_map(request).collect())
    };
    // These are the offsets of the cached blocks, so every read is a hit on the cache device.
    let read = |number| Raw::request(READ, number * 8192 % u64::from(cached_bytes), 4096);
    // Each request zeroes one sector of a block. Every second request is for block 0, the others
    // are for different blocks.
    let part = |number: u64| Raw::request(WRITE_ZEROES, number % 2 * number * 4096 + 512, 512);
    [
        ("options", Attack::Options),
        ("block status", many(BLOCK_STATUS, cached_bytes)),
        ("cached reads", each(&read)),
        ("trim", many(TRIM, !4095)),
        ("write zeroes", many(WRITE_ZEROES, (1 << 30) - 4096)),
        ("half blocks", each(&part)),
    ]
}

/// Ends all attacks when it is dropped, also when the test that holds it panics.
#[derive(Debug)]
pub struct End<'a>(pub &'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends to an export without a pause and discards the replies, until `over` is set. After the
/// server closes the connection, the client connects again.
pub fn attack(
    (socket, export): (&Path, &str),
    attack: &Attack,
    over: &AtomicBool,
    sent: &AtomicU64,
) {
    while !over.load(Ordering::Relaxed) {
        let connected = match attack {
            Attack::Requests(_) => Raw::of_export(socket, export),
            Attack::Options => Raw::connect(socket),
        };
        let Ok(raw) = connected else {
            std::thread::sleep(AWAY);
            continue;
        };
        raw.0.set_write_timeout(Some(LOOK)).expect("a limit");
        let mut answers = raw.0.try_clone().expect("a second half");
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut chunk = vec![0; 1 << 20];
                while answers.read(&mut chunk).is_ok_and(|bytes| bytes > 0) {}
            });
            send(&raw, attack, over, sent);
            let _ = raw.0.shutdown(std::net::Shutdown::Both);
        });
    }
}

/// Sends until `over` is set or the server closes the connection.
fn send(raw: &Raw, attack: &Attack, over: &AtomicBool, sent: &AtomicU64) {
    let bytes = match attack {
        Attack::Requests(bytes) => bytes.clone(),
        Attack::Options => Raw::option_bytes(LIST, &[]).repeat(PIPELINED),
    };
    let count = match attack {
        Attack::Requests(bytes) => bytes.len() / REQUEST_BYTES,
        Attack::Options => PIPELINED,
    };
    let mut at = 0;
    while !over.load(Ordering::Relaxed) {
        match (&raw.0).write(&bytes[at..]) {
            Ok(taken) => at += taken,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
        if at == bytes.len() {
            at = 0;
            sent.fetch_add(count as u64, Ordering::Relaxed);
        }
    }
}

/// Gives the calling thread the scheduling class SCHED_IDLE. So attackers do not take processors
/// from the kernel's own threads, some of which complete disk I/O, or from threads that measure.
pub fn step_back() {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: only the calling thread is named, and the parameters outlive the call. If the kernel
    // refuses, nothing changes.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const none) };
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attacks_that_need_cached_blocks_come_before_those_that_zero_them() {
        let kind = |request: &[u8]| u16::from_be_bytes([request[6], request[7]]);
        let zeroes = |attack: &Attack| match attack {
            Attack::Requests(bytes) => bytes
                .chunks(REQUEST_BYTES)
                .any(|request| [TRIM, WRITE_ZEROES].contains(&kind(request))),
            Attack::Options => false,
        };
        let zeroes = attacks(1 << 20).map(|(_, attack)| zeroes(&attack));
        assert_eq!(zeroes, [false, false, false, true, true, true]);
    }
}
