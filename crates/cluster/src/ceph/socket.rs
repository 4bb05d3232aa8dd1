//! The admin sockets of Ceph's daemons.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

/// Longest wait for a daemon's answer.
const LIMIT: Duration = Duration::from_secs(10);
/// Largest answer, in bytes; the counters of an OSD have some 100 KiB.
const ANSWER_BYTES_MAX: u32 = 16 << 20;

/// Sends a command to a daemon of Ceph through the daemon's admin socket; returns the answer. The
/// request is the command in JSON and a zero byte. The answer follows its length in four bytes, the
/// most significant first (Ceph's `admin_socket.cc`).
///
/// # Errors
/// The daemon does not answer, or the answer is too long or not JSON.
pub fn ask(socket: &Path, command: &str) -> io::Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(serde_json::json!({ "prefix": command }).to_string().as_bytes())?;
    stream.write_all(&[0])?;
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_be_bytes(length);
    if length > ANSWER_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is too long"));
    }
    let mut answer = vec![0; length as usize];
    stream.read_exact(&mut answer)?;
    serde_json::from_slice(&answer).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
}
