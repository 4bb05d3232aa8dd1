//! QEMU's monitor (QMP) over a unix socket: lines of JSON.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, io};

/// Longest wait for the monitor's socket, and for a line.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to a monitor. A monitor serves one connection at a time.
pub struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects as soon as QEMU has made the socket.
    pub fn connect(socket: &Path) -> Result<Monitor, Error> {
        let start = Instant::now();
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if start.elapsed() > TIMEOUT => {
                    return Err(io("cannot reach QEMU's monitor")(error));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        stream.set_read_timeout(Some(TIMEOUT)).map_err(io("cannot set QEMU's monitor up"))?;
        let mut monitor = Monitor(BufReader::new(stream));
        monitor.read()?;
        monitor.execute("qmp_capabilities", &json!({}))?;
        Ok(monitor)
    }

    /// Executes a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, Error> {
        let mut line = json!({ "execute": command, "arguments": arguments }).to_string();
        line.push('\n');
        self.0
            .get_mut()
            .write_all(line.as_bytes())
            .map_err(io("cannot write to QEMU's monitor"))?;
        loop {
            let mut told = self.read()?;
            if let Some(result) = told.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = told.get("error") {
                return Err(Error::Protocol(format!("QEMU's monitor: {command}: {error}")));
            }
            // The line was neither a result nor an error: it is an event.
        }
    }

    fn read(&mut self) -> Result<Value, Error> {
        let mut line = String::new();
        self.0.read_line(&mut line).map_err(io("cannot read from QEMU's monitor"))?;
        serde_json::from_str(&line)
            .map_err(|error| Error::Protocol(format!("QEMU's monitor: {error}: {line:?}")))
    }
}
