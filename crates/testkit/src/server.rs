//! Servers of other projects on a unix socket: to test the test machinery, and to compare
//! measurements with.

use std::ffi::OsStr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tidepool_cluster::Process;

use crate::error::{Error, io};

/// Longest wait until a server listens on its socket.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(60);

/// A running server that listens on a unix socket. Dropping the value kills the server.
#[derive(Debug)]
pub struct Server {
    process: Process,
    socket: PathBuf,
}

impl Server {
    /// Runs `nbdkit` on `socket` with `arguments`: a plugin and its parameters, and filters before
    /// them.
    pub fn nbdkit<I>(socket: &Path, arguments: I) -> Result<Server, Error>
    where
        I: IntoIterator,
        I::Item: AsRef<OsStr>,
    {
        crate::need("nbdkit", "nbdkit")?;
        let mut command = Command::new("nbdkit");
        command.arg("--foreground").arg("--unix").arg(socket).args(arguments);
        Server::start(command, socket)
    }

    /// Runs `command`, which has to listen on `socket`, and waits until it accepts a connection.
    pub fn start(mut command: Command, socket: &Path) -> Result<Server, Error> {
        // A killed server leaves its socket file behind.
        let _ = std::fs::remove_file(socket);
        let program = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut process = Process::spawn(command).map_err(io(format!("cannot start {program}")))?;
        let start = Instant::now();
        while UnixStream::connect(socket).is_err() {
            if let Some(status) = process.try_wait().map_err(io("cannot wait for a server"))? {
                let log = "its error output is above".into();
                return Err(Error::Ended { program, status: status.to_string(), log });
            }
            if start.elapsed() > SOCKET_TIMEOUT {
                let what = format!("the socket of {program}");
                return Err(Error::Timeout { what, limit: SOCKET_TIMEOUT, hint: String::new() });
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(Server { process, socket: socket.into() })
    }

    /// The socket on which the server listens.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Kills the server (SIGKILL) and waits for its end.
    pub fn kill(mut self) -> Result<(), Error> {
        self.process.kill().map_err(io("cannot kill a server")).map(drop)
    }
}
