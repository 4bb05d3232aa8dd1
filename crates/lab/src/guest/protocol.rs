//! What a guest's agent is asked, and what it answers: JSON behind its length in four bytes, the most significant first.

use std::io::{self, Read, Write};
use std::net::{SocketAddrV4, TcpStream};
use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Where the agent listens. Nobody else is in the guest.
pub(super) const PORT: u16 = 4000;
/// Longest message, in bytes.
const MESSAGE_BYTES_MAX: u32 = 16 << 20;
/// Longest wait for a connection: the guest is on this machine.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);

/// What the agent is to do. One connection asks one thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Request {
    /// Run a command. It is killed when the connection ends before it does.
    Run {
        /// The program and its arguments.
        words: Vec<String>,
    },
    /// Tell what files hold, such as those of sysfs.
    Read {
        /// The files.
        paths: Vec<PathBuf>,
    },
    /// Write a text to a file that there is.
    Write {
        /// The file.
        path: PathBuf,
        /// The text.
        text: String,
    },
    /// Let programs write to a directory of the machine.
    Share {
        /// The directory, which has the same path in the guest.
        directory: PathBuf,
    },
    /// Join this connection to a Unix socket.
    Connect {
        /// The socket.
        path: PathBuf,
    },
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// It is done.
    Done,
    /// The command has ended.
    Ended {
        /// Its exit status; 128 and its number if a signal has ended it.
        status: i32,
        /// What it printed.
        output: String,
        /// What it printed as errors.
        errors: String,
    },
    /// What the files hold; `null` for one that cannot be read.
    Contents(Vec<Option<String>>),
    /// It is not possible.
    Failed(String),
}

/// Sends a message.
pub(super) fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).ok().filter(|&length| length <= MESSAGE_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "too long a message"))?;
    // In one piece: each call of the kernel is dear in a guest.
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

/// Asks the agent something, and waits so long for its reply; without a limit until there is one. The connection stays open.
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
