//! The requests to a guest's agent, and its replies. A message is JSON after its length in four
//! bytes, the most significant first.

use std::io::{self, Read, Write};
use std::net::{SocketAddrV4, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The TCP port on which the agent listens. It is fixed: a guest has an address of its own, and one
/// agent.
pub(super) const PORT: u16 = 4000;
/// Longest message, in bytes.
const MESSAGE_BYTES_MAX: u32 = 16 << 20;
/// Longest wait for a connection. It is short, because the guest is on this machine.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// A request to the agent. Each connection carries one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    /// Runs a command. The command is killed if the connection ends first.
    Run {
        /// The program and its arguments.
        words: Vec<String>,
    },
    /// Reads files, such as those of sysfs.
    Read {
        /// The files.
        paths: Vec<PathBuf>,
    },
    /// Writes a text to an existing file.
    Write {
        /// The file.
        path: PathBuf,
        /// The text.
        text: String,
    },
    /// Lets programs in the guest write to a directory of the machine.
    Share {
        /// The directory, which has the same path in the guest.
        directory: PathBuf,
    },
    /// Joins this connection to a Unix socket.
    Connect {
        /// The socket.
        path: PathBuf,
    },
}

/// The agent's reply to a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// The request was carried out.
    Done,
    /// The command has ended.
    Ended {
        /// The command's exit status; 128 plus the signal's number if a signal ended the command.
        status: i32,
        /// The command's standard output.
        output: String,
        /// The command's error output.
        errors: String,
    },
    /// The content of each file; `null` for a file that cannot be read.
    Contents(Vec<Option<String>>),
    /// The request failed; this is the reason.
    Failed(String),
}

/// Sends a message.
pub(super) fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).ok().filter(|&length| length <= MESSAGE_BYTES_MAX);
    let length =
        length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "too long a message"))?;
    // In one system call: these are expensive in a guest.
    stream.write_all(&[&length.to_be_bytes(), text.as_slice()].concat())
}

/// Receives a message.
pub(super) fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    if length > MESSAGE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "too long a message"));
    }
    let mut text = vec![0; length as usize];
    stream.read_exact(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Sends a request to the agent, and waits for the reply: for at most `limit`, or without a limit
/// if that is `None`. The connection stays open.
pub(super) fn exchange(
    agent: SocketAddrV4,
    request: &Request,
    limit: Option<Duration>,
) -> io::Result<(Reply, TcpStream)> {
    let mut stream = TcpStream::connect_timeout(&agent.into(), CONNECT_LIMIT)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(limit)?;
    send(&mut stream, request)?;
    let reply = receive(&mut stream)?;
    stream.set_read_timeout(None)?;
    Ok((reply, stream))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_arrives_as_it_was_sent_and_one_that_is_cut_off_or_too_long_is_an_error() {
        let request = Request::Write { path: "/sys/x".into(), text: "0".into() };
        let mut bytes = Vec::new();
        send(&mut bytes, &request).expect("sent");
        assert_eq!(receive::<Request>(&mut bytes.as_slice()).expect("received"), request);
        assert!(receive::<Request>(&mut &bytes[..bytes.len() - 1]).is_err());
        assert!(receive::<Request>(&mut [0xff, 0xff, 0xff, 0xff].as_slice()).is_err());
        assert!(receive::<Reply>(&mut bytes.as_slice()).is_err(), "a request is no reply");
    }
}
