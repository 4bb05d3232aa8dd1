//! A client of the daemon's admin API, without the daemon's own code.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::{Error, io};

/// Longest wait for an answer: a drain is answered when the drain is done.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);
/// Pause between two looks at the status.
const POLL: Duration = Duration::from_millis(20);

/// The admin API at a unix socket.
#[derive(Debug, Clone)]
pub struct Admin {
    socket: PathBuf,
}

impl Admin {
    /// The API at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Admin {
        Admin { socket: socket.into() }
    }

    /// The socket of the API.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The daemon's status.
    pub fn status(&self) -> Result<Value, Error> {
        self.call("GET", "/v1/status", None)
    }

    /// One volume's part of the status.
    pub fn volume(&self, name: &str) -> Result<Value, Error> {
        self.call("GET", &format!("/v1/volumes/{name}"), None)
    }

    /// Drains a volume. The answer comes when everything that was acknowledged before is in the
    /// backend.
    pub fn drain(&self, name: &str) -> Result<Value, Error> {
        self.call("POST", &format!("/v1/volumes/{name}/drain"), None)
    }

    /// Waits until `what` is true of a volume's part of the status. Returns this part.
    pub fn wait_volume(
        &self,
        name: &str,
        limit: Duration,
        mut what: impl FnMut(&Value) -> bool,
    ) -> Result<Value, Error> {
        let start = Instant::now();
        loop {
            let volume = self.volume(name)?;
            if what(&volume) {
                return Ok(volume);
            }
            if start.elapsed() > limit {
                let what = format!("a state of the volume {name} that the test waits for");
                return Err(Error::Timeout {
                    what,
                    limit,
                    hint: format!("; its last status: {volume}"),
                });
            }
            std::thread::sleep(POLL);
        }
    }

    /// Makes a call. An answer that reports a failure is an error.
    pub fn call(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, Error> {
        let (status, answer) = self.exchange(method, path, body)?;
        if (200..300).contains(&status) {
            return Ok(answer);
        }
        Err(Error::Protocol(format!("admin API: {method} {path} answers {status}: {answer}")))
    }

    /// Makes a call and returns the HTTP status and the answer.
    pub fn exchange(
        &self,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(u16, Value), Error> {
        let failed = || io(format!("cannot ask the admin API at {}", self.socket.display()));
        let mut stream = UnixStream::connect(&self.socket).map_err(failed())?;
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).map_err(failed())?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: tidepool\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).map_err(failed())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).map_err(failed())?;
        parse(&answer).ok_or_else(|| {
            Error::Protocol(format!(
                "admin API: not understood: {}",
                String::from_utf8_lossy(&answer)
            ))
        })
    }
}

/// The status and body of an HTTP answer that is complete.
fn parse(answer: &[u8]) -> Option<(u16, Value)> {
    let text = std::str::from_utf8(answer).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { unchunk(body)? } else { body.to_string() };
    let value =
        if body.trim().is_empty() { Value::Null } else { serde_json::from_str(&body).ok()? };
    Some((status, value))
}

/// The content of a chunked body.
fn unchunk(mut body: &str) -> Option<String> {
    let mut whole = String::new();
    loop {
        let (length, rest) = body.split_once("\r\n")?;
        let length = usize::from_str_radix(length.trim(), 16).ok()?;
        if length == 0 {
            return Some(whole);
        }
        whole.push_str(rest.get(..length)?);
        body = rest.get(length..)?.strip_prefix("\r\n")?;
    }
}

/// The number `name` of an object, or of its `counters`.
pub fn number(report: &Value, name: &str) -> Option<f64> {
    report[name].as_f64().or_else(|| report["counters"][name].as_f64())
}

/// Whether a volume's report says that every acknowledged write is in the logs of both hosts.
pub fn in_sync(volume: &Value) -> bool {
    volume["replication"]["in_sync"] == true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_understood_with_a_length_or_in_chunks() {
        let plain = b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n{\"a\":1}";
        assert_eq!(parse(plain), Some((200, serde_json::json!({"a": 1}))));
        let chunked = b"HTTP/1.1 409 Conflict\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{\"a\r\n4\r\n\":1}\r\n0\r\n\r\n";
        assert_eq!(parse(chunked), Some((409, serde_json::json!({"a": 1}))));
        assert_eq!(parse(b"HTTP/1.1 204 No Content\r\n\r\n"), Some((204, Value::Null)));
        assert_eq!(parse(b"nonsense"), None);
    }
}
