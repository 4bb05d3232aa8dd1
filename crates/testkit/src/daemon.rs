//! The daemon as a child process that a test can start, kill, and start again with the same
//! arguments.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidepool_cluster::Process;
use tidepool_cluster::network::Namespace;

use crate::error::{Error, io};

/// Longest wait for the line `ready`.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// Longest wait for a line of the log: the daemon writes its log beside what it does, and a busy
/// machine late.
const SAID_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for the end of the daemon.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// Shell script that runs its arguments with the content of the file `$0` as the kernel's boot id.
const AS_IF_BOOTED: &str = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
/// Shell script that runs its arguments with the host name `$0`.
const AS_IF_NAMED: &str = "hostname \"$0\" && exec \"$@\"";

/// A `tidepool serve` under a test's control. Dropping the value kills the process.
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
    drain_switch: Option<PathBuf>,
}

impl Daemon {
    /// A daemon that runs `tidepool` with `arguments` (`serve …`). The error output of each start
    /// goes to a file of its own, whose name is `log`, a dot and the number of the start. The
    /// daemon is not started yet.
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
            drain_switch: None,
        })
    }

    /// From its next start on, the daemon waits ten times as long for other hosts as the released
    /// program does. For tests of two hosts that are not about these limits, on a machine that may
    /// be busy.
    ///
    /// # Errors
    /// The program cannot be built.
    pub fn use_long_limits(&mut self) -> Result<(), Error> {
        self.program = LONG_LIMITS.path()?.to_path_buf();
        Ok(())
    }

    /// From its next start on, the daemon has the limits of the released program again.
    ///
    /// # Errors
    /// The program cannot be built.
    pub fn use_shipped_limits(&mut self) -> Result<(), Error> {
        self.program = tidepool()?.to_path_buf();
        Ok(())
    }

    /// From its next start on, the daemon reads the boot id of its host from this file. Needs root.
    pub fn set_boot(&mut self, boot: PathBuf) {
        self.boot = Some(boot);
    }

    /// From its next start on, the daemon runs with this host name. Needs root.
    pub fn set_host(&mut self, name: &str) {
        self.host = Some(name.to_owned());
    }

    /// From its next start on, the daemon runs in this network namespace. Needs root.
    pub fn set_network(&mut self, namespace: Namespace) {
        self.network = Some(namespace);
    }

    /// From its next start on, the daemon pauses its drain while there is a file at this path.
    pub fn set_drain_switch(&mut self, path: PathBuf) {
        self.drain_switch = Some(path);
    }

    /// Starts the daemon and waits for its line `ready`. Returns the time that this took.
    pub fn start(&mut self) -> Result<Duration, Error> {
        self.start_unready()?;
        self.wait_ready()
    }

    /// Starts the daemon without waiting, so that a test can kill the daemon while it recovers.
    pub fn start_unready(&mut self) -> Result<(), Error> {
        assert!(self.process.is_none(), "the daemon runs already");
        self.starts += 1;
        let log = File::create(self.log_path()).map_err(io("cannot make the daemon's log file"))?;
        let mut words: Vec<OsString> = Vec::new();
        if let Some(name) = &self.host {
            words.extend(["unshare", "--uts", "sh", "-c", AS_IF_NAMED, name].map(OsString::from));
        }
        if let Some(boot) = &self.boot {
            let private =
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", AS_IF_BOOTED];
            words.extend(private.map(OsString::from));
            words.push(boot.into());
        }
        words.push(self.program.clone().into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        command.env("STATE_DIRECTORY", self.state());
        if let Some(switch) = &self.drain_switch {
            command.env("TIDEPOOL_DRAIN_SWITCH", switch);
        }
        if let Some(network) = &self.network {
            network.enter(&mut command);
        }
        let mut process = Process::spawn(command)
            .map_err(io(format!("cannot start {}", self.program.display())))?;
        let output = process.child().stdout.take().expect("its output is piped");
        let (sender, lines) = channel();
        // The thread ends with the daemon's output. Until then the thread keeps the pipe from
        // filling up.
        std::thread::spawn(move || {
            for text in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(text);
            }
        });
        self.process = Some(process);
        self.lines = Some(lines);
        Ok(())
    }

    /// Whether the daemon has printed `ready`. After [`Daemon::start_unready`] each line counts for
    /// one call only, so a later call returns false again. True before the first start and after
    /// [`Daemon::wait_ready`].
    pub fn is_ready(&self) -> bool {
        self.lines.as_ref().is_none_or(|lines| lines.try_iter().any(|line| line == "ready"))
    }

    /// Whether the daemon has `path` open.
    pub fn has_open(&self, path: &Path) -> bool {
        let files = self.id().map(|id| std::fs::read_dir(format!("/proc/{id}/fd")));
        let Some(Ok(files)) = files else { return false };
        files
            .flatten()
            .any(|file| std::fs::read_link(file.path()).is_ok_and(|target| target == path))
    }

    /// Waits for the line `ready`. Returns the time that this took.
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

    /// Kills the daemon (SIGKILL) and waits for its end.
    pub fn kill(&mut self) -> Result<(), Error> {
        let mut process = self.process.take().expect("the daemon runs");
        process.kill().map_err(io("cannot kill the daemon"))?;
        Ok(())
    }

    /// Asks the daemon to end (SIGTERM) and waits for its end.
    pub fn terminate(&mut self) -> Result<ExitStatus, Error> {
        self.signal(Signal::TERM)?;
        self.wait()
    }

    /// Sends a signal to the daemon.
    pub fn signal(&self, signal: Signal) -> Result<(), Error> {
        let process = self.process.as_ref().expect("the daemon runs");
        process.signal(signal).map_err(io("cannot signal the daemon"))
    }

    /// Waits for the daemon's end.
    pub fn wait(&mut self) -> Result<ExitStatus, Error> {
        let process = self.process.as_mut().expect("the daemon runs");
        let Some(status) = process.wait(END_TIMEOUT).map_err(io("cannot wait for the daemon"))?
        else {
            return Err(Error::Timeout {
                what: "the daemon's end".into(),
                limit: END_TIMEOUT,
                hint: format!("; its log ends with: {}", self.log_tail()),
            });
        };
        self.process = None;
        Ok(status)
    }

    /// Whether the daemon still runs.
    pub fn runs(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None)))
    }

    /// The daemon's process id while it runs.
    pub fn id(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }

    /// The daemon's arguments.
    pub fn arguments(&self) -> &[OsString] {
        &self.arguments
    }

    /// Replaces the daemon's arguments for the next start.
    pub fn set_arguments<I>(&mut self, arguments: I)
    where
        I: IntoIterator,
        I::Item: Into<OsString>,
    {
        self.arguments = arguments.into_iter().map(Into::into).collect();
    }

    /// The file with the error output of the latest start.
    pub fn log_path(&self) -> PathBuf {
        let mut name = self.log.clone().into_os_string();
        name.push(format!(".{}", self.starts));
        name.into()
    }

    /// The daemon's state directory.
    pub fn state(&self) -> PathBuf {
        let mut name = self.log.clone().into_os_string();
        name.push(".state");
        name.into()
    }

    /// Waits until the log of the latest start says this, and returns the log. A daemon that
    /// serves, or that answers a request, may not have written yet what it has to say of that.
    ///
    /// # Errors
    /// The log does not say it in time.
    pub fn wait_log(&self, part: &str) -> Result<String, Error> {
        let start = Instant::now();
        loop {
            let log = self.log();
            if log.contains(part) {
                return Ok(log);
            }
            if start.elapsed() >= SAID_TIMEOUT {
                return Err(Error::Timeout {
                    what: format!("the line \"{part}\" of the daemon's log"),
                    limit: SAID_TIMEOUT,
                    hint: format!("; it is: {log}"),
                });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The error output of the latest start, as far as it is written: all of it once the daemon has
    /// ended by itself.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// The last lines of the latest start's error output, on one line.
    pub fn log_tail(&self) -> String {
        tail(&self.log())
    }
}

/// The last five lines of a text that are not empty, joined to one line.
pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(5)..].join(" / ")
}

/// Runs `tidepool` with `arguments` and waits for its end.
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
    /// The environment variable that names the program's path.
    variable: &'static str,
    path: OnceLock<Result<PathBuf, String>>,
}

/// The program that users run.
static TIDEPOOL: Program = Program {
    package: "tidepool",
    name: "tidepool",
    variable: "TIDEPOOL_BIN",
    path: OnceLock::new(),
};
/// The program with longer limits.
static LONG_LIMITS: Program = Program {
    package: "tidepool-tests",
    name: "tidepool-long-limits",
    variable: "TIDEPOOL_LONG_LIMITS_BIN",
    path: OnceLock::new(),
};

/// The path of the `tidepool` binary: `TIDEPOOL_BIN`, or the binary that cargo builds next to the
/// running program.
pub fn tidepool() -> Result<&'static Path, Error> {
    TIDEPOOL.path()
}

impl Program {
    fn path(&'static self) -> Result<&'static Path, Error> {
        let Program { package, name, variable, path } = self;
        let path = path.get_or_init(|| match std::env::var_os(variable) {
            Some(path) if Path::new(&path).is_file() => Ok(path.into()),
            Some(path) => {
                Err(format!("{variable} names {}, which is no file", Path::new(&path).display()))
            }
            None => build(package, name).map_err(|error| error.to_string()),
        });
        path.as_deref().map_err(|text| Error::Io {
            what: format!("there is no program {name} to test: {text}"),
            source: std::io::ErrorKind::NotFound.into(),
        })
    }
}

/// Builds a binary with the profile of the running program, into the target directory of the
/// running program.
fn build(package: &str, name: &str) -> Result<PathBuf, Error> {
    let program = std::env::current_exe().map_err(io("cannot find the running program"))?;
    let directory =
        program.ancestors().find(|path| path.join("deps").is_dir()).ok_or_else(|| Error::Io {
            what: "no target directory".into(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
    let profile = match directory.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(name) => name,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args([
            "build",
            "--quiet",
            "--package",
            package,
            "--bin",
            name,
            "--profile",
            profile,
            "--target-dir",
        ])
        .arg(directory.parent().expect("a profile's directory has a parent"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .map_err(io("cannot run cargo"))?;
    if !output.status.success() {
        let log = tail(&String::from_utf8_lossy(&output.stderr));
        return Err(Error::Ended {
            program: "cargo build".into(),
            status: output.status.to_string(),
            log,
        });
    }
    Ok(directory.join(name))
}
