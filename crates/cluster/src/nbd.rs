//! The client's side of the NBD protocol, with simple replies: greeting, requests and replies.
//!
//! It shares no code with Tidepool's own codec on purpose: if both sides shared a misreading of the
//! protocol, no test would show it.

use std::io::{self, Read, Write};

const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
/// Fixed newstyle, and no zeroes after the export's information.
const HANDSHAKE_FLAGS: u32 = 0b11;
/// Longest option reply that is accepted, in bytes: the text of an error.
const OPTION_REPLY_BYTES_MAX: u32 = 64 << 10;
/// Bytes of a request without the data of a write.
const REQUEST_BYTES: usize = 28;

/// Read command.
pub const READ: u16 = 0;
/// Write command.
pub const WRITE: u16 = 1;
/// Flush command.
pub const FLUSH: u16 = 3;

/// What a server reports about an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Export {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Transmission flags.
    pub flags: u16,
}

/// The header of a request.
#[derive(Debug, Clone, Copy)]
pub struct Command {
    /// The command: [`READ`], [`WRITE`] and so on.
    pub kind: u16,
    /// Flags of the command.
    pub flags: u16,
    /// A number of the client's choice, which the server returns in its reply.
    pub cookie: u64,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// Why a connection cannot be used any more.
#[derive(Debug, thiserror::Error)]
pub enum NbdError {
    /// The server broke the protocol, or refused the export.
    #[error("NBD: {0}")]
    Protocol(String),
    /// The connection has ended.
    #[error("the connection to the NBD server has ended: {0}")]
    Disconnected(io::Error),
}

impl Command {
    /// A command without flags. The cookie is 0.
    pub fn new(kind: u16, offset: u64, len: u32) -> Command {
        Command { kind, flags: 0, cookie: 0, offset, len }
    }

    /// The bytes of the header.
    pub fn header(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }
}

/// Does the fixed newstyle handshake, up to the transmission phase.
///
/// # Errors
/// When the server has no such export, breaks the protocol, or ends the connection.
pub fn negotiate(
    input: &mut impl Read,
    output: &mut impl Write,
    export: &str,
) -> Result<Export, NbdError> {
    if read_u64(input)? != INIT_MAGIC || read_u64(input)? != OPTION_MAGIC {
        return Err(NbdError::Protocol(
            "the server does not greet as a newstyle NBD server".into(),
        ));
    }
    let server_flags = u16::from_be_bytes(array(input)?);
    if server_flags & 0b11 != 0b11 {
        return Err(NbdError::Protocol(format!(
            "the server's handshake flags are {server_flags:#x}"
        )));
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
    output.write_all(&go).map_err(NbdError::Disconnected)?;
    let mut found = None;
    loop {
        if read_u64(input)? != OPTION_REPLY_MAGIC || read_u32(input)? != OPTION_GO {
            return Err(NbdError::Protocol("the reply to GO is not an option reply to GO".into()));
        }
        let kind = read_u32(input)?;
        let len = read_u32(input)?;
        if len > OPTION_REPLY_BYTES_MAX {
            return Err(NbdError::Protocol(format!("an option reply of {len} bytes")));
        }
        let mut body = vec![0; len as usize];
        input.read_exact(&mut body).map_err(NbdError::Disconnected)?;
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
                return Err(NbdError::Protocol(format!(
                    "the server refuses export {export:?} ({kind:#x}): {text}"
                )));
            }
        }
    }
    found.ok_or_else(|| NbdError::Protocol("the server accepts GO without telling the size".into()))
}

/// Reads the next reply: its errno (0 for success) and cookie. The data of a read follows.
///
/// # Errors
/// When something else than a simple reply comes, or the connection ends.
pub fn reply(input: &mut impl Read) -> Result<(u32, u64), NbdError> {
    let magic = read_u32(input)?;
    if magic != SIMPLE_REPLY_MAGIC {
        return Err(NbdError::Protocol(format!("a reply begins with {magic:#x}")));
    }
    Ok((read_u32(input)?, read_u64(input)?))
}

fn array<const N: usize>(input: &mut impl Read) -> Result<[u8; N], NbdError> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes).map_err(NbdError::Disconnected)?;
    Ok(bytes)
}

fn read_u32(input: &mut impl Read) -> Result<u32, NbdError> {
    array(input).map(u32::from_be_bytes)
}

fn read_u64(input: &mut impl Read) -> Result<u64, NbdError> {
    array(input).map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The greeting of a server with an export of 1 MiB.
    fn greeting() -> Vec<u8> {
        let mut said = Vec::new();
        said.extend(INIT_MAGIC.to_be_bytes());
        said.extend(OPTION_MAGIC.to_be_bytes());
        said.extend(3u16.to_be_bytes());
        for (kind, body) in
            [(REPLY_INFO, &[0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 5][..]), (REPLY_ACK, &[])]
        {
            said.extend(OPTION_REPLY_MAGIC.to_be_bytes());
            said.extend(OPTION_GO.to_be_bytes());
            said.extend(kind.to_be_bytes());
            said.extend((body.len() as u32).to_be_bytes());
            said.extend(body);
        }
        said
    }

    #[test]
    fn an_export_is_opened_and_a_reply_is_read() {
        let mut sent = Vec::new();
        let export = negotiate(&mut &greeting()[..], &mut sent, "vm1").expect("an export");
        assert_eq!(export, Export { size_bytes: 1 << 20, flags: 5 });
        assert!(sent.windows(3).any(|name| name == b"vm1"));
        let cut = &greeting()[..40];
        assert!(matches!(
            negotiate(&mut &cut[..], &mut Vec::new(), "vm1"),
            Err(NbdError::Disconnected(_))
        ));
        assert!(matches!(
            negotiate(&mut &[0; 64][..], &mut Vec::new(), "vm1"),
            Err(NbdError::Protocol(_))
        ));
        let mut answer = SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        answer.extend(5u32.to_be_bytes());
        answer.extend(9u64.to_be_bytes());
        assert_eq!(reply(&mut &answer[..]).expect("a reply"), (5, 9));
        let command = Command { kind: WRITE, flags: 0, cookie: 9, offset: 4096, len: 512 };
        assert_eq!(command.header()[24..], 512u32.to_be_bytes());
    }
}
