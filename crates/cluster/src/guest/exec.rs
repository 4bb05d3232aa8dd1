//! Runs a command in a guest as a process of this machine: the process ends when the command ends,
//! and the command is killed when the process ends.

use std::fs;
use std::io::{self, Write};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;

use super::agent::join;
use super::protocol::{PORT, Reply, Request, exchange};
use super::{ANSWER_LIMIT, GuestError, failed};

/// Placeholder for the process id in the path of a socket.
pub(crate) const PID: &str = "%p";

/// A command in a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exec {
    /// The guest's address.
    pub address: Ipv4Addr,
    /// A directory that the command may write to.
    pub share: Option<PathBuf>,
    /// A Unix socket in the guest to which this machine gets a socket, too: the path here, in which
    /// `%p` stands for the id of this process, and the path in the guest.
    pub socket: Option<(PathBuf, PathBuf)>,
    /// The program and its arguments.
    pub words: Vec<String>,
}

/// The parts of a command line that runs a command in a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// The program `tidepool`.
    pub program: PathBuf,
    /// As in [`Exec`].
    pub address: Ipv4Addr,
    /// As in [`Exec`].
    pub share: PathBuf,
    /// As in [`Exec`].
    pub socket: (PathBuf, PathBuf),
}

impl Prefix {
    /// A command that runs `program` in the guest; arguments for `program` may be added.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["lab", "guest", "exec"]).arg(format!("--address={}", self.address));
        let paths = [&self.share, &self.socket.0, &self.socket.1];
        for (option, path) in ["--share", "--socket-here", "--socket-there"].into_iter().zip(paths)
        {
            command.arg(option).arg(path);
        }
        command.args(["--", program]);
        command
    }
}

/// Runs the command to its end, then prints its output, and returns its exit status.
///
/// # Errors
/// When the guest does not answer, or cannot run the command.
pub fn exec(command: &Exec) -> Result<i32, GuestError> {
    // The processor time of this process is accounted for under this name.
    let _ = rustix::thread::set_name(super::EXEC_NAME);
    let agent = SocketAddrV4::new(command.address, PORT);
    let no_answer = || failed(format!("the guest at {agent} does not answer"));
    if let Some(directory) = &command.share {
        let request = Request::Share { directory: directory.clone() };
        let (reply, _) = exchange(agent, &request, Some(ANSWER_LIMIT)).map_err(no_answer())?;
        super::done(reply)?;
    }
    if let Some((here, there)) = &command.socket {
        let here = here.to_string_lossy().replace(PID, &std::process::id().to_string());
        let listener =
            UnixListener::bind(&here).map_err(failed(format!("cannot make the socket {here}")))?;
        let there = there.clone();
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let there = there.clone();
                // If nothing listens in the guest, the connection here is closed.
                std::thread::spawn(move || forward(agent, &socket, there));
            }
        });
    }
    let request = Request::Run { words: command.words.clone() };
    let (reply, _) = exchange(agent, &request, None).map_err(no_answer())?;
    if let Some((here, _)) = &command.socket {
        let _ =
            fs::remove_file(here.to_string_lossy().replace(PID, &std::process::id().to_string()));
    }
    let Reply::Ended { status, output, errors } = reply else {
        return super::done(reply).map(|()| 0);
    };
    let _ = io::stdout().write_all(output.as_bytes());
    let _ = io::stderr().write_all(errors.as_bytes());
    Ok(status)
}

/// Joins a connection on this machine to a socket in the guest.
fn forward(agent: SocketAddrV4, socket: &UnixStream, there: PathBuf) -> io::Result<()> {
    let (reply, stream) = exchange(agent, &Request::Connect { path: there }, Some(ANSWER_LIMIT))?;
    match reply {
        Reply::Done => join(&stream, socket),
        other => Err(io::Error::other(format!("{other:?}"))),
    }
}
