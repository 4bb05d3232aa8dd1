//! Runs the built command.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod serve;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use tempfile::TempDir;

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// The command, with nothing of the caller's settings in its environment.
pub fn tidepool() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidepool"));
    command
        .env_remove("RUST_LOG")
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        .env_remove("WATCHDOG_PID")
        .env_remove("JOURNAL_STREAM")
        .env("STATE_DIRECTORY", concat!(env!("CARGO_TARGET_TMPDIR"), "/state"))
        .stdin(Stdio::null());
    command
}

/// Runs it to its end.
pub fn run<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Ended {
    run_in(Path::new("."), args)
}

/// Runs it to its end in a directory.
pub fn run_in<S: AsRef<OsStr>>(directory: &Path, args: impl IntoIterator<Item = S>) -> Ended {
    Ended::of(tidepool().current_dir(directory).args(args))
}

impl Ended {
    /// Runs a command to its end.
    pub fn of(command: &mut Command) -> Ended {
        let output = command.output().expect("the command runs");
        Ended {
            status: output.status.code(),
            stdout: String::from_utf8(output.stdout).expect("text"),
            stderr: String::from_utf8(output.stderr).expect("text"),
        }
    }

    /// It was refused with this status and one line that contains `part`, and said nothing else.
    #[track_caller]
    pub fn refused(&self, status: i32, part: &str) {
        assert_eq!(self.status, Some(status), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "one line: {self:?}");
        assert!(
            self.stderr.starts_with("tidepool: ") && self.stderr.contains(part),
            "{part}: {self:?}"
        );
        for word in ["panicked", "RUST_BACKTRACE", "Os {", "Some(", "Err("] {
            assert!(!self.stderr.contains(word), "{word}: {self:?}");
        }
    }

    /// It did what it was asked.
    #[track_caller]
    pub fn done(&self) -> &str {
        assert_eq!(self.status, Some(0), "{self:?}");
        &self.stdout
    }
}

/// A directory with an image, and room for a cache and sockets.
pub struct Place {
    directory: TempDir,
}

/// Size of a test's image in bytes.
pub const IMAGE_BYTES: usize = 16 << 20;

impl Place {
    pub fn new() -> Place {
        let place = Place { directory: TempDir::new().expect("a directory") };
        fs::write(place.path("image"), vec![0x5a; IMAGE_BYTES]).expect("an image");
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Options of `serve` for a new cache and the image; without a front door of the user's own.
    pub fn serve_args(&self) -> Vec<String> {
        let mut args: Vec<String> =
            ["serve", "--cache", &self.text("cache"), "--cache-size", "64MiB"]
                .map(String::from)
                .into();
        args.extend(["--volume".into(), format!("vm1=file:{}", self.text("image"))]);
        args.extend(["--nbd".into(), format!("nbd+unix:///?socket={}", self.text("nbd.sock"))]);
        args.extend(["--admin".into(), self.text("admin.sock")]);
        args
    }

    /// Runs the command in the place's directory.
    pub fn run<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Ended {
        run_in(self.directory.path(), args)
    }

    /// Every file with its content: what must be the same after a refusal.
    pub fn snapshot(&self) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let entries = fs::read_dir(self.directory.path()).expect("a directory");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        paths.map(|path| (path.clone(), fs::read(&path).ok())).collect()
    }

    /// Runs the command and checks that it is refused and that no file was made, changed or
    /// removed.
    #[track_caller]
    pub fn refused<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        status: i32,
        part: &str,
    ) {
        let before = self.snapshot();
        self.run(args).refused(status, part);
        let after = self.snapshot();
        let names =
            |files: &BTreeMap<PathBuf, Option<Vec<u8>>>| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&before), names(&after), "files were made or removed");
        assert!(before == after, "a file was changed");
    }
}

/// A running `tidepool serve`; killed when dropped.
pub struct Daemon {
    child: Child,
    stdout: BufReader<ChildStdout>,
}

impl Daemon {
    /// Starts it in the directory of its log and waits for its line `ready`.
    #[track_caller]
    pub fn start<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, log: &Path) -> Daemon {
        let mut daemon = Daemon::start_unready(args, log);
        daemon.wait_ready(log);
        daemon
    }

    /// Starts it in the directory of its log.
    #[track_caller]
    pub fn start_unready<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>, log: &Path) -> Daemon {
        Daemon::start_unready_with(args, log, &[])
    }

    /// The same with more in its environment.
    #[track_caller]
    pub fn start_unready_with<S: AsRef<OsStr>>(
        args: impl IntoIterator<Item = S>,
        log: &Path,
        environment: &[(&str, &str)],
    ) -> Daemon {
        let stderr = fs::File::options().create(true).append(true).open(log).expect("a log");
        let mut command = tidepool();
        let directory = log.parent().expect("a directory");
        command.current_dir(directory).env("STATE_DIRECTORY", directory.join("state")).args(args);
        command.envs(environment.iter().copied());
        let mut child = command.stdout(Stdio::piped()).stderr(stderr).spawn().expect("it starts");
        let stdout = BufReader::new(child.stdout.take().expect("a pipe"));
        Daemon { child, stdout }
    }

    /// Waits for its line `ready`.
    #[track_caller]
    pub fn wait_ready(&mut self, log: &Path) {
        let line = self.line();
        assert_eq!(line, "ready\n", "{}", fs::read_to_string(log).unwrap_or_default());
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("text");
        line
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it runs");
    }

    /// Waits for its end.
    pub fn wait(mut self) -> Option<i32> {
        self.child.wait().expect("it ends").code()
    }

    /// Asks it to end and waits.
    pub fn terminate(self) -> Option<i32> {
        self.signal(rustix::process::Signal::TERM);
        self.wait()
    }

    /// Kills it as `kill -9` does.
    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
