//! A PostgreSQL of its own: Debian's server as an unprivileged user on a data directory, and a
//! client that knows exactly when a COMMIT was acknowledged.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use tidepool_testkit::{Error, Process};

/// Where Debian has the servers, one directory for each major version.
const SERVERS: &str = "/usr/lib/postgresql";
/// The user and group `nobody` of Debian: a PostgreSQL refuses root.
const NOBODY: u32 = 65_534;
/// Longest wait for a server that starts, recovers or ends, and for a program beside it.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How often a wait looks.
const POLL: Duration = Duration::from_millis(20);
/// The longest answer of a server that is believed, in bytes.
const MESSAGE_BYTES_MAX: u32 = 1 << 28;
/// Beside the defaults, of which `fsync` is one: no network, nothing in the system's shared memory,
/// and so short a log that checkpoints come under load.
const SETTINGS: [&str; 6] = [
    "listen_addresses=",
    "dynamic_shared_memory_type=mmap",
    "shared_buffers=32MB",
    "min_wal_size=32MB",
    "max_wal_size=64MB",
    "log_min_messages=warning",
];

/// A running server. Dropping it kills it.
#[derive(Debug)]
pub struct Postgres {
    process: Process,
    programs: PathBuf,
    sockets: PathBuf,
    log: PathBuf,
}

impl Postgres {
    /// Makes the data directory `data`, with checksums on its pages. What it says goes to the file
    /// `log`.
    pub fn init(data: &Path, log: &Path) -> Result<(), Error> {
        fs::create_dir(data).map_err(io("cannot make a data directory"))?;
        chown(data, Some(NOBODY), Some(NOBODY))
            .map_err(io("cannot give the data directory away"))?;
        let mut command = as_nobody(&programs()?.join("initdb"));
        command.args(["--username=postgres", "--auth=trust", "--locale=C", "--encoding=UTF8"]);
        command.arg("--data-checksums").arg("--pgdata").arg(data).current_dir(data);
        finish(command, log)
    }

    /// Starts a server on `data`, its socket in the directory `sockets`, and waits until it takes
    /// statements: after a crash, until it has recovered.
    pub fn start(data: &Path, sockets: &Path, log: &Path) -> Result<Postgres, Error> {
        let programs = programs()?;
        fs::create_dir_all(sockets)
            .and_then(|()| chown(sockets, Some(NOBODY), Some(NOBODY)))
            .and_then(|()| fs::set_permissions(sockets, Permissions::from_mode(0o700)))
            .map_err(io("cannot make a directory for the server's socket"))?;
        // As the first process of a namespace it takes all of its children with it; one that waits
        // for a dead one would stay.
        let server = as_nobody(&programs.join("postgres"));
        let mut command = Command::new("unshare");
        command
            .args(["--pid", "--fork", "--kill-child"])
            .arg(server.get_program())
            .args(server.get_args());
        command.arg("-D").arg(data).arg("-k").arg(sockets).current_dir(data);
        command.args(SETTINGS.iter().flat_map(|setting| ["-c", *setting]));
        log_to(&mut command, log)?;
        let process = Process::spawn(command).map_err(io("cannot start postgres"))?;
        let mut server = Postgres { process, programs, sockets: sockets.into(), log: log.into() };
        let start = Instant::now();
        while let Err(error) = server.connect() {
            if let Some(status) =
                server.process.try_wait().map_err(io("cannot wait for postgres"))?
            {
                return Err(ended("postgres", status.to_string(), log));
            }
            if start.elapsed() > TIMEOUT {
                let hint = format!("; it says: {error}");
                return Err(Error::Timeout { what: "a PostgreSQL".into(), limit: TIMEOUT, hint });
            }
            std::thread::sleep(POLL);
        }
        Ok(server)
    }

    /// A session.
    pub fn connect(&self) -> Result<Session, SqlError> {
        Session::connect(&self.sockets)
    }

    /// Checks every table and every index of every database, each against the other. What is found
    /// goes to the file `log`.
    pub fn check(&self, log: &Path) -> Result<(), Error> {
        let mut command = as_nobody(&self.programs.join("pg_amcheck"));
        command.args(["--username=postgres", "--all", "--install-missing", "--heapallindexed"]);
        command.args(["--parent-check", "--host"]).arg(&self.sockets).current_dir(&self.sockets);
        finish(command, log)
    }

    /// Ends it as a shutdown of its host does, and waits for that.
    pub fn stop(mut self) -> Result<(), Error> {
        for server in children(self.process.id()) {
            rustix::process::kill_process(server, Signal::INT)
                .map_err(|errno| io("cannot signal postgres")(errno.into()))?;
        }
        match self.process.wait(TIMEOUT).map_err(io("cannot wait for postgres"))? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(ended("postgres", status.to_string(), &self.log)),
            None => Err(Error::Timeout {
                what: "postgres' end".into(),
                limit: TIMEOUT,
                hint: String::new(),
            }),
        }
    }

    /// Kills all of its processes.
    pub fn kill(self) {}
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // The first process of the namespace; with it the kernel kills the others.
        for server in children(self.process.id()) {
            let _ = rustix::process::kill_process(server, Signal::KILL);
        }
        let _ = self.process.kill();
    }
}

/// The processes that `parent` has started.
fn children(parent: u32) -> Vec<Pid> {
    let parent = parent.to_string();
    let of_parent = |id: &str| {
        let stat = fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
        // The name before it, in parentheses, may hold anything.
        stat.rsplit(')')
            .next()
            .and_then(|rest| rest.split_whitespace().nth(1))
            .is_some_and(|id| id == parent)
    };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()) && of_parent(name))
        .filter_map(|name| Pid::from_raw(name.parse().ok()?))
        .collect()
}

/// The programs of the newest server that is installed.
fn programs() -> Result<PathBuf, Error> {
    fs::read_dir(SERVERS)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            Some((entry.file_name().to_str()?.parse::<u32>().ok()?, entry.path().join("bin")))
        })
        .filter(|(_, programs)| programs.join("postgres").is_file())
        .max()
        .map(|(_, programs)| programs)
        .ok_or_else(|| Error::Missing { program: "postgres".into(), package: "postgresql".into() })
}

/// A command that runs `program` as nobody, and that does not outlive this process.
fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    // A change of the user clears the parent-death signal, so it is set again behind it.
    command.args([&format!("--reuid={NOBODY}"), &format!("--regid={NOBODY}")]);
    command.args(["--clear-groups", "--pdeathsig=KILL"]).arg(program);
    command
}

fn log_to(command: &mut Command, log: &Path) -> Result<(), Error> {
    let output = File::create(log).map_err(io("cannot make a log file"))?;
    let errors = output.try_clone().map_err(io("cannot make a log file"))?;
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    Ok(())
}

/// Runs a command to its end.
fn finish(mut command: Command, log: &Path) -> Result<(), Error> {
    let program = command.get_args().find(|argument| argument.to_string_lossy().starts_with('/'));
    let program =
        program.map_or("setpriv".into(), |program| program.to_string_lossy().into_owned());
    log_to(&mut command, log)?;
    let mut process = Process::spawn(command).map_err(io(format!("cannot run {program}")))?;
    match process.wait(TIMEOUT).map_err(io(format!("cannot wait for {program}")))? {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(ended(&program, status.to_string(), log)),
        None => Err(Error::Timeout {
            what: format!("the end of {program}"),
            limit: TIMEOUT,
            hint: String::new(),
        }),
    }
}

fn ended(program: &str, status: String, log: &Path) -> Error {
    let log = fs::read_to_string(log).unwrap_or_default();
    Error::Ended { program: program.into(), status, log: log.trim().replace('\n', " / ") }
}

/// Turns an I/O error into an [`Error`] that says what was tried.
fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    move |source| Error::Io { what, source }
}

/// Why a statement was not done, as far as its session knows.
#[derive(Debug)]
pub enum SqlError {
    /// The server is gone.
    Gone(io::Error),
    /// The server says no.
    Refused(String),
}

impl std::fmt::Display for SqlError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SqlError::Gone(error) => write!(f, "the PostgreSQL is gone: {error}"),
            SqlError::Refused(text) => write!(f, "the PostgreSQL refuses: {text}"),
        }
    }
}

impl std::error::Error for SqlError {}

impl From<io::Error> for SqlError {
    fn from(error: io::Error) -> SqlError {
        SqlError::Gone(error)
    }
}

/// A connection: the simple query protocol, version 3.
#[derive(Debug)]
pub struct Session {
    stream: UnixStream,
}

impl Session {
    fn connect(sockets: &Path) -> Result<Session, SqlError> {
        let mut stream = UnixStream::connect(sockets.join(".s.PGSQL.5432"))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let words = b"\0\x03\0\0user\0postgres\0database\0postgres\0\0";
        stream.write_all(&(words.len() as u32 + 4).to_be_bytes())?;
        stream.write_all(words)?;
        let mut session = Session { stream };
        session.answer()?;
        Ok(session)
    }

    /// Executes statements and returns the rows that they give, as text. When this returns, they
    /// are done, and a COMMIT among them is acknowledged.
    pub fn execute(&mut self, statements: &str) -> Result<Vec<Vec<String>>, SqlError> {
        let mut message = vec![b'Q'];
        message.extend((statements.len() as u32 + 5).to_be_bytes());
        message.extend(statements.as_bytes());
        message.push(0);
        self.stream.write_all(&message)?;
        self.answer()
    }

    /// The only number that statements give.
    pub fn number(&mut self, statements: &str) -> Result<u64, SqlError> {
        let rows = self.execute(statements)?;
        let number = rows.first().and_then(|row| row.first()).and_then(|text| text.parse().ok());
        number.ok_or_else(|| SqlError::Refused(format!("no number, but {rows:?}")))
    }

    /// Everything until the server is ready for the next statement.
    fn answer(&mut self) -> Result<Vec<Vec<String>>, SqlError> {
        let (mut rows, mut refused) = (Vec::new(), None);
        loop {
            let (kind, body) = match (self.message(), refused) {
                (Ok(message), before) => {
                    refused = before;
                    message
                }
                // It says why, and goes.
                (Err(_), Some(text)) => return Err(SqlError::Refused(text)),
                (Err(error), None) => return Err(error),
            };
            match kind {
                b'D' => rows.push(row(&body).ok_or_else(|| nonsense("a row"))?),
                b'R' if body != [0; 4] => return Err(nonsense("a wish for a password")),
                b'E' => refused = Some(complaint(&body)),
                b'Z' => return refused.map_or(Ok(rows), |text| Err(SqlError::Refused(text))),
                _ => {}
            }
        }
    }

    fn message(&mut self) -> Result<(u8, Vec<u8>), SqlError> {
        let mut head = [0; 5];
        self.stream.read_exact(&mut head)?;
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
        if !(4..=MESSAGE_BYTES_MAX).contains(&length) {
            return Err(nonsense("a message"));
        }
        let mut body = vec![0; length as usize - 4];
        self.stream.read_exact(&mut body)?;
        Ok((head[0], body))
    }
}

fn nonsense(what: &str) -> SqlError {
    SqlError::Gone(io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{what} that is not understood"),
    ))
}

/// The values of a row; a null is an empty text.
fn row(body: &[u8]) -> Option<Vec<String>> {
    let (count, mut rest) = body.split_at_checked(2)?;
    let mut values = Vec::new();
    for _ in 0..u16::from_be_bytes(count.try_into().ok()?) {
        let (length, tail) = rest.split_at_checked(4)?;
        let length = usize::try_from(i32::from_be_bytes(length.try_into().ok()?)).unwrap_or(0);
        let (value, tail) = tail.split_at_checked(length)?;
        values.push(String::from_utf8_lossy(value).into_owned());
        rest = tail;
    }
    Some(values)
}

/// Severity, code and message of an error.
fn complaint(body: &[u8]) -> String {
    let fields = body.split(|&byte| byte == 0);
    let fields = fields.filter(|field| matches!(field.first(), Some(b'S' | b'C' | b'M' | b'D')));
    let words: Vec<_> =
        fields.map(|field| String::from_utf8_lossy(&field[1..]).into_owned()).collect();
    words.join(" ")
}
