//! Who has given a command that can lose data or changes whose it is: one line in the log and in a
//! file of its own, with the result.

use crate::failure::{one_line, reason};
use crate::state;
use crate::text::plain_within;
use serde::Serialize;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::Duration;
use tokio::net::unix::UCred;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::{info, warn};

/// The target of audit lines in the log, where they are left out last.
pub const TARGET: &str = "audit";
/// The file's name in the [state directory](state::directory).
pub const FILE_NAME: &str = "audit.log";
/// Size in bytes that the file has at most. What it had before is in one more file then, whose name
/// ends in `.1`.
pub const FILE_BYTES_MAX: u64 = 1 << 20;
/// Longest command, result and name of a program in a line, in bytes.
const COMMAND_BYTES_MAX: usize = 2048;
const RESULT_BYTES_MAX: usize = 1024;
const PROGRAM_BYTES_MAX: usize = 64;
/// Most lines that wait for the file; more are in the log only.
const LINES_MAX: usize = 256;
/// How long a command waits for its line to be in the file.
const WRITE_WAIT_MAX: Duration = Duration::from_secs(2);

/// Who gives a command, as far as it is known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Caller {
    /// Its user.
    uid: Option<u32>,
    /// The user who has logged in, whatever it has become since.
    #[serde(skip_serializing_if = "Option::is_none")]
    login_uid: Option<u32>,
    /// The user who has called sudo.
    #[serde(skip_serializing_if = "Option::is_none")]
    sudo_uid: Option<u32>,
    /// Its process.
    pid: Option<u32>,
    /// What that says it is called.
    program: String,
}

impl Caller {
    /// This process.
    pub fn this_process() -> Caller {
        let mut caller = Caller::of_process(std::process::id());
        caller.uid = Some(rustix::process::getuid().as_raw());
        caller.sudo_uid = std::env::var("SUDO_UID").ok().and_then(|uid| uid.parse().ok());
        caller
    }

    /// The other end of a connection.
    pub(crate) fn of(who: &UCred) -> Caller {
        let pid = who.pid().and_then(|pid| u32::try_from(pid).ok());
        Caller { uid: Some(who.uid()), ..pid.map_or_else(Caller::default, Caller::of_process) }
    }

    fn of_process(pid: u32) -> Caller {
        let read = |name| {
            let mut text = Vec::new();
            let file = fs::File::open(format!("/proc/{pid}/{name}")).ok()?;
            file.take(PROGRAM_BYTES_MAX as u64).read_to_end(&mut text).ok()?;
            Some(plain_within(String::from_utf8_lossy(&text).trim(), PROGRAM_BYTES_MAX))
        };
        // A process outside of all login sessions has the largest number.
        let login_uid =
            read("loginuid").and_then(|uid| uid.parse().ok()).filter(|uid| *uid != u32::MAX);
        Caller {
            uid: None,
            login_uid,
            sudo_uid: None,
            pid: Some(pid),
            program: read("comm").unwrap_or_default(),
        }
    }

    /// It for people.
    fn text(&self) -> String {
        let number =
            |number: Option<u32>| number.map_or_else(|| "unknown".to_owned(), |n| n.to_string());
        let mut text = format!("uid {}", number(self.uid));
        for (what, uid) in [("login", self.login_uid), ("sudo", self.sudo_uid)] {
            if let Some(uid) = uid {
                text.push_str(&format!(", {what} uid {uid}"));
            }
        }
        format!("{text}, pid {} {}", number(self.pid), self.program)
    }
}

/// A command as its words; what could be taken for more than one is in quotes.
pub fn command<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,?&".contains(c);
    let quoted = words.into_iter().map(|word| match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// A line.
#[derive(Debug, Serialize)]
struct Line {
    time: String,
    #[serde(flatten)]
    caller: Caller,
    command: String,
    result: String,
}

impl Line {
    fn new(caller: Caller, command: &str, result: &str) -> Line {
        Line {
            time: format!("{:.3}", jiff::Timestamp::now()),
            caller,
            command: plain_within(command, COMMAND_BYTES_MAX),
            result: plain_within(&one_line(result), RESULT_BYTES_MAX),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }
}

/// Writes a line for a command that runs without the daemon. Waits for the file.
///
/// # Errors
/// It is not in the file, as one line that says why.
pub fn record(command: &str, result: &str) -> Result<(), String> {
    let path = state::directory().ok_or("there is no $HOME for the audit file")?.join(FILE_NAME);
    append(&path, &Line::new(Caller::this_process(), command, result).bytes(), FILE_BYTES_MAX)
        .map_err(|e| format!("cannot write to the audit file {}: {}", path.display(), reason(&e)))
}

/// Appends a line to the file, which becomes no larger than this.
fn append(path: &Path, line: &[u8], bytes_max: u64) -> io::Result<()> {
    loop {
        let file = state::open_alone(path)?;
        let len = file.metadata()?.len();
        if len == 0 || len + (line.len() as u64) < bytes_max {
            return state::append(path, &file, line);
        }
        fs::rename(path, previous(path))?;
    }
}

/// Where what was written before is.
fn previous(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

/// A line on its way to the file, and who waits for it.
type Sent = (Vec<u8>, oneshot::Sender<()>);

/// The daemon's audit: a thread of its own writes the file, so that nobody waits for its disk for
/// long.
#[derive(Debug)]
pub struct Audit {
    lines: Option<SyncSender<Sent>>,
}

impl Audit {
    /// Starts it with the file in this directory; without one the lines are in the log only.
    pub fn start(directory: Option<PathBuf>) -> Audit {
        let Some(path) = directory.map(|directory| directory.join(FILE_NAME)) else {
            warn!("audit lines are in the log only: there is no $HOME for their file");
            return Audit { lines: None };
        };
        let (lines, sent) = sync_channel(LINES_MAX);
        let write = move || write_all(&path, &sent);
        match std::thread::Builder::new().name("audit".into()).spawn(write) {
            Ok(_) => Audit { lines: Some(lines) },
            Err(e) => {
                warn!(
                    "audit lines are in the log only: cannot start the thread that writes them: {}",
                    reason(&e)
                );
                Audit { lines: None }
            }
        }
    }

    /// A command begins; what becomes of it is told to what this returns.
    pub(crate) fn begin(self: &std::sync::Arc<Self>, caller: Caller, command: String) -> Begun {
        Begun { audit: self.clone(), asked: Some((caller, command)) }
    }

    fn say(&self, caller: Caller, command: &str, result: &str) -> oneshot::Receiver<()> {
        let line = Line::new(caller, command, result);
        info!(target: TARGET, "audit: {}: {} ({})", line.command, line.result, line.caller.text());
        let (written, wait) = oneshot::channel();
        if let Some(lines) = &self.lines
            && let Err(TrySendError::Full(_)) = lines.try_send((line.bytes(), written))
        {
            warn!("an audit line is in the log only: too many wait for their file");
        }
        wait
    }
}

/// A command that is being done.
pub(crate) struct Begun {
    audit: std::sync::Arc<Audit>,
    asked: Option<(Caller, String)>,
}

impl Begun {
    /// It has ended. Returns when that is written down, or cannot be.
    pub(crate) async fn ended(mut self, result: &str) {
        if let Some((caller, command)) = self.asked.take() {
            let _ = timeout(WRITE_WAIT_MAX, self.audit.say(caller, &command, result)).await;
        }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        if let Some((caller, command)) = self.asked.take() {
            self.audit.say(caller, &command, "given up: its caller has gone, or the daemon ends");
        }
    }
}

/// Writes what comes, and says once in the log when that fails.
fn write_all(path: &Path, sent: &Receiver<Sent>) {
    let mut failed = false;
    for (line, written) in sent {
        match append(path, &line, FILE_BYTES_MAX) {
            Ok(()) if std::mem::take(&mut failed) => {
                info!("audit lines are in {} again", path.display())
            }
            Ok(()) => {}
            Err(e) if !std::mem::replace(&mut failed, true) => {
                warn!(
                    "audit lines are in the log only: cannot write {}: {}",
                    path.display(),
                    reason(&e)
                );
            }
            Err(_) => {}
        }
        let _ = written.send(());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_callers_say_is_one_line_that_cannot_be_taken_for_another() {
        assert_eq!(command(["volume", "set", "vm1", "--mode", "off"]), "volume set vm1 --mode off");
        assert_eq!(command(["volume", "a b", "it's", ""]), "volume 'a b' 'it'\\''s' ''");
        let hostile = command(["volume", "snap", "rm", "vm1", "x\n{\"uid\":0}\u{1b}[31m\u{202e}"]);
        let line = Line::new(Caller::default(), &hostile, "no\nsuch\tthing").bytes();
        let text = String::from_utf8(line).expect("text");
        assert_eq!(text.lines().count(), 1, "{text}");
        let read: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(read["command"], "volume snap rm vm1 'x?{\"uid\":0}?[31m?'");
        assert_eq!(
            (&read["result"], &read["uid"]),
            (&"no such thing".into(), &serde_json::Value::Null)
        );
        assert!(
            Line::new(Caller::default(), &"ä".repeat(4000), "").command.len()
                <= COMMAND_BYTES_MAX + 3
        );
    }

    #[test]
    fn this_process_is_known() {
        let caller = Caller::this_process();
        assert_eq!(caller.uid, Some(rustix::process::getuid().as_raw()));
        assert_eq!(caller.pid, Some(std::process::id()));
        assert!(!caller.program.is_empty());
    }

    #[test]
    fn the_file_is_bounded_and_half_a_line_stays_alone() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE_NAME);
        for number in 0..100 {
            append(&path, format!("line {number}\n").as_bytes(), 100).expect("written");
            assert!(fs::metadata(&path).expect("there").len() <= 100);
        }
        let text = |path: &Path| fs::read_to_string(path).expect("text");
        let all = text(&previous(&path)) + &text(&path);
        assert!(all.ends_with("line 98\nline 99\n") && all.starts_with("line "), "{all}");
        assert_eq!(fs::read_dir(directory.path()).expect("files").count(), 2);
        fs::write(&path, "half").expect("written");
        append(&path, b"whole\n", 100).expect("written");
        assert_eq!(text(&path), "half\nwhole\n");
    }

    #[test]
    fn a_link_is_not_followed_and_what_is_there_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let (path, target) = (directory.path().join(FILE_NAME), directory.path().join("target"));
        fs::write(&target, "kept").expect("written");
        std::os::unix::fs::symlink(&target, &path).expect("a link");
        append(&path, b"line\n", 100).expect_err("a link");
        assert_eq!(fs::read(&target).expect("read"), b"kept");
        // One where the earlier lines go is replaced.
        fs::remove_file(&path).expect("removed");
        std::os::unix::fs::symlink(&target, previous(&path)).expect("a link");
        for _ in 0..30 {
            append(&path, b"line\n", 100).expect("written");
        }
        assert_eq!(fs::read(&target).expect("read"), b"kept");
        assert!(fs::symlink_metadata(previous(&path)).expect("there").is_file());
    }
}
