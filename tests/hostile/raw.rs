//! A client of the NBD protocol that sends what it likes and need not read the answers.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const GO: u32 = 7;
const STRUCTURED: u32 = 8;
const SET_META_CONTEXT: u32 = 10;
pub const LIST: u32 = 3;
pub const TRIM: u16 = 4;
pub const BLOCK_STATUS: u16 = 7;
pub const WRITE_ZEROES: u16 = 6;
/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// A connection to the server.
pub struct Raw(pub UnixStream);

impl Raw {
    /// Connects and says hello.
    pub fn connect(socket: &Path) -> Raw {
        let mut stream = UnixStream::connect(socket).expect("connected");
        stream.set_read_timeout(Some(ANSWER_MAX)).expect("a limit");
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).expect("a greeting");
        stream.write_all(&3u32.to_be_bytes()).expect("hello");
        Raw(stream)
    }

    /// In the transmission phase of an export, with structured replies and `base:allocation`.
    pub fn of_export(socket: &Path, export: &str) -> Raw {
        let mut raw = Raw::connect(socket);
        raw.option(STRUCTURED, &[]);
        raw.answered();
        let context = "base:allocation";
        let mut query = text(export);
        query.extend(1u32.to_be_bytes());
        query.extend(text(context));
        raw.option(SET_META_CONTEXT, &query);
        raw.answered();
        let mut go = text(export);
        go.extend(0u16.to_be_bytes());
        raw.option(GO, &go);
        raw.answered();
        raw
    }

    /// Sends an option.
    fn option(&mut self, option: u32, data: &[u8]) {
        self.0.write_all(&Raw::option_bytes(option, data)).expect("sent");
    }

    /// The bytes of an option.
    pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    /// Reads the answers to an option up to the last, which must be good.
    fn answered(&mut self) {
        loop {
            let mut head = [0; 20];
            self.0.read_exact(&mut head).expect("an answer");
            let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes"));
            let mut body = vec![0; number(16) as usize];
            self.0.read_exact(&mut body).expect("an answer");
            match number(12) {
                1 => return,
                error if error & 0x8000_0000 != 0 => panic!("{error:#x}: {}", String::from_utf8_lossy(&body)),
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

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}
