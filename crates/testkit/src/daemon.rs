//! The daemon as a child process: started, killed, started again with the same arguments.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidepool_lab::Process;
use tidepool_lab::network::Namespace;

use crate::error::{Error, io};

/// Longest wait for `ready`.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest wait for an end that was asked for.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the arguments where the kernel's boot id reads as what stands in the file that is named first.
const AS_IF_BOOTED: &str = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
/// Runs what follows on a host of the name that is its first word.
const AS_IF_NAMED: &str = "hostname \"$0\" && exec \"$@\"";

/// A `tidepool serve` (or any other server that prints `ready`) under a test's control. Dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    program: PathBuf,
    arguments: Vec<OsString>,
    log: PathBuf,
    process: Option<Process>,
    lines: Option<Receiver<String>>,
    starts: u32,
    boot: Option<PathBuf>,
    host: Option<String>,
    network: Option<Namespace>,
}

impl Daemon {
    /// `tidepool` with `arguments` (`serve …`), its error output going to files beginning with `log`. Not started yet.
    pub fn new<I>(arguments: I, log: impl Into<PathBuf>) -> Result<Daemon, Error>
    where
        I: IntoIterator,
        I::Item: Into<OsString>,
    {
        Ok(Daemon {
            program: tidepool()?.to_path_buf(),
            arguments: arguments.into_iter().map(Into::into).collect(),
            log: log.into(),
            process: None,
            lines: None,
            starts: 0,
            boot: None,
            host: None,
            network: None,
        })
    }

    /// From its next start on it waits ten times as long for other hosts as a release does: for a test of two hosts that is not about
    /// these limits, on a machine that may be busy.
    ///
    /// # Errors
    /// The program cannot be built.
    pub fn use_long_limits(&mut self) -> Result<(), Error> {
        self.program = LONG_LIMITS.path()?.to_path_buf();
        Ok(())
    }

    /// From its next start on it is the program of a release again.
    ///
    /// # Errors
    /// The program cannot be built.
    pub fn use_shipped_limits(&mut self) -> Result<(), Error> {
        self.program = tidepool()?.to_path_buf();
        Ok(())
    }

    /// What it takes for the boot of its host from its next start on is what stands in this file. That needs root.
    pub fn set_boot(&mut self, boot: PathBuf) {
        self.boot = Some(boot);
    }

    /// What its host is called from its next start on. That needs root.
    pub fn set_host(&mut self, name: &str) {
        self.host = Some(name.to_owned());
    }

    /// From its next start on it is in this network namespace. That needs root.
    pub fn set_network(&mut self, namespace: Namespace) {
        self.network = Some(namespace);
    }

    /// Starts it and waits for its line `ready`; returns how long that took.
    pub fn start(&mut self) -> Result<Duration, Error> {
        self.start_unready()?;
        self.wait_ready()
    }

    /// Starts it without waiting: to kill it while it recovers.
    pub fn start_unready(&mut self) -> Result<(), Error> {
        assert!(self.process.is_none(), "the daemon runs already");
        self.starts += 1;
        let log = File::create(self.log_path()).map_err(io("cannot make the daemon's log file"))?;
        let mut words: Vec<OsString> = Vec::new();
        if let Some(name) = &self.host {
            words.extend(["unshare", "--uts", "sh", "-c", AS_IF_NAMED, name].map(OsString::from));
        }
        if let Some(boot) = &self.boot {
            let private = ["unshare", "--mount", "--propagation", "private", "sh", "-c", AS_IF_BOOTED];
            words.extend(private.map(OsString::from));
            words.push(boot.into());
        }
        words.push(self.program.clone().into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        command.env("STATE_DIRECTORY", self.state());
        if let Some(network) = &self.network {
            network.enter(&mut command);
        }
        let mut process =
            Process::spawn(command).map_err(io(format!("cannot start {}", self.program.display())))?;
        let output = process.child().stdout.take().expect("its output is piped");
        let (sender, lines) = channel();
        // The thread ends with the daemon's output; until then it keeps the pipe from filling up.
        std::thread::spawn(move || {
            for text in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(text);
            }
        });
        self.process = Some(process);
        self.lines = Some(lines);
        Ok(())
    }

    /// Whether it has printed `ready` since it was started with [`Daemon::start_unready`].
    pub fn is_ready(&self) -> bool {
        self.lines.as_ref().is_none_or(|lines| lines.try_iter().any(|line| line == "ready"))
    }

    /// Whether it has `path` open.
    pub fn has_open(&self, path: &Path) -> bool {
        let files = self.id().map(|id| std::fs::read_dir(format!("/proc/{id}/fd")));
        let Some(Ok(files)) = files else { return false };
        files.flatten().any(|file| std::fs::read_link(file.path()).is_ok_and(|target| target == path))
    }

    /// Waits for the line `ready`; returns how long that took.
    pub fn wait_ready(&mut self) -> Result<Duration, Error> {
        let start = Instant::now();
        let line = self.lines.take().expect("the daemon was started");
        loop {
            match line.recv_timeout(READY_TIMEOUT.saturating_sub(start.elapsed())) {
                Ok(text) if text == "ready" => return Ok(start.elapsed()),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Error::Timeout {
                        what: "the daemon's line \"ready\"".into(),
                        limit: READY_TIMEOUT,
                        hint: format!("; its log ends with: {}", self.log_tail()),
                    });
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.wait()?;
                    return Err(Error::Ended {
                        program: self.program.display().to_string(),
                        status: status.to_string(),
                        log: self.log_tail(),
                    });
                }
            }
        }
    }

    /// Kills it (SIGKILL) and waits until it is gone.
    pub fn kill(&mut self) -> Result<(), Error> {
        let mut process = self.process.take().expect("the daemon runs");
        process.kill().map_err(io("cannot kill the daemon"))?;
        Ok(())
    }

    /// Asks it to end (SIGTERM) and waits for that.
    pub fn terminate(&mut self) -> Result<ExitStatus, Error> {
        self.signal(Signal::TERM)?;
        self.wait()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<(), Error> {
        let process = self.process.as_ref().expect("the daemon runs");
        process.signal(signal).map_err(io("cannot signal the daemon"))
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Result<ExitStatus, Error> {
        let process = self.process.as_mut().expect("the daemon runs");
        let Some(status) = process.wait(END_TIMEOUT).map_err(io("cannot wait for the daemon"))? else {
            return Err(Error::Timeout {
                what: "the daemon's end".into(),
                limit: END_TIMEOUT,
                hint: format!("; its log ends with: {}", self.log_tail()),
            });
        };
        self.process = None;
        Ok(status)
    }

    /// Whether it still runs.
    pub fn runs(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None)))
    }

    /// Its process id while it runs.
    pub fn id(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// Its arguments.
    pub fn arguments(&self) -> &[OsString] {
        &self.arguments
    }

    /// Replaces its arguments for the next start.
    pub fn set_arguments<I>(&mut self, arguments: I)
    where
        I: IntoIterator,
        I::Item: Into<OsString>,
    {
        self.arguments = arguments.into_iter().map(Into::into).collect();
    }

    /// The file with the error output of its latest start.
    pub fn log_path(&self) -> PathBuf {
        let mut name = self.log.clone().into_os_string();
        name.push(format!(".{}", self.starts));
        name.into()
    }

    /// The directory of its own small files.
    pub fn state(&self) -> PathBuf {
        let mut name = self.log.clone().into_os_string();
        name.push(".state");
        name.into()
    }

    /// The error output of its latest start.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The last lines of its error output, on one line.
    pub fn log_tail(&self) -> String {
        tail(&self.log())
    }
}

/// The last lines of a text, joined to one.
pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(5)..].join(" / ")
}

/// Runs `tidepool` with `arguments` to its end.
pub fn run<I>(arguments: I) -> Result<std::process::Output, Error>
where
    I: IntoIterator,
    I::Item: AsRef<std::ffi::OsStr>,
{
    let program = tidepool()?;
    let state = program.with_file_name("state");
    let mut command = Command::new(program);
    command.args(arguments).env("STATE_DIRECTORY", state).stdin(Stdio::null());
    command.output().map_err(io("cannot run tidepool"))
}

/// A program under test.
struct Program {
    package: &'static str,
    name: &'static str,
    /// The environment variable that names its path.
    variable: &'static str,
    path: OnceLock<Result<PathBuf, String>>,
}

/// The program that users run.
static TIDEPOOL: Program =
    Program { package: "tidepool", name: "tidepool", variable: "TIDEPOOL_BIN", path: OnceLock::new() };
/// The program with longer limits.
static LONG_LIMITS: Program = Program {
    package: "tidepool-tests",
    name: "tidepool-long-limits",
    variable: "TIDEPOOL_LONG_LIMITS_BIN",
    path: OnceLock::new(),
};

/// The path of the `tidepool` binary: `TIDEPOOL_BIN`, or the one that cargo builds next to the running program.
pub fn tidepool() -> Result<&'static Path, Error> {
    TIDEPOOL.path()
}

impl Program {
    fn path(&'static self) -> Result<&'static Path, Error> {
        let Program { package, name, variable, path } = self;
        let path = path.get_or_init(|| match std::env::var_os(variable) {
            Some(path) if Path::new(&path).is_file() => Ok(path.into()),
            Some(path) => Err(format!("{variable} names {}, which is no file", Path::new(&path).display())),
            None => build(package, name).map_err(|error| error.to_string()),
        });
        path.as_deref().map_err(|text| Error::Io {
            what: format!("there is no program {name} to test: {text}"),
            source: std::io::ErrorKind::NotFound.into(),
        })
    }
}

/// Builds a binary with the profile and into the target directory of the running program.
fn build(package: &str, name: &str) -> Result<PathBuf, Error> {
    let program = std::env::current_exe().map_err(io("cannot find the running program"))?;
    let directory = program.ancestors().find(|path| path.join("deps").is_dir()).ok_or_else(|| Error::Io {
        what: "no target directory".into(),
        source: std::io::ErrorKind::NotFound.into(),
    })?;
    let profile = match directory.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--quiet", "--package", package, "--bin", name, "--profile", profile, "--target-dir"])
        .arg(directory.parent().expect("a profile's directory has a parent"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .map_err(io("cannot run cargo"))?;
    if !output.status.success() {
        let log = tail(&String::from_utf8_lossy(&output.stderr));
        return Err(Error::Ended { program: "cargo build".into(), status: output.status.to_string(), log });
    }
    Ok(directory.join(name))
}
