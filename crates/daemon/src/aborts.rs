//! Which volumes the reactor was working for when the daemon was ended by an error of its own. One
//! that is named several times in a short while is left unserved by the next start: a request that
//! ends the daemon, and is sent again by its client, does not take the other volumes along.

use crate::failure::{one_line, reason};
use crate::shard::ShardHandle;
use crate::state;
use crate::volume::is_parent_name;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tracing::{info, warn};

/// The file's name in the [state directory](state::directory): a JSON object on each line.
pub const FILE_NAME: &str = "aborts.log";
/// Most aborts in the file after a start; the oldest go.
const ABORTS_MAX: usize = 32;
/// Most bytes of the file that are read.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// So many aborts that name one volume, within this time, leave it unserved until so long after the
/// last.
pub const OF_VOLUME_MAX: usize = 3;
/// See [`OF_VOLUME_MAX`].
pub const WITHIN: Duration = Duration::from_secs(600);
/// How long the end of the daemon waits for its note.
const NOTE_WAIT_MAX: Duration = Duration::from_secs(2);

/// An abort during the work for a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    time_unix_ms: u64,
    /// The uuid of the cache.
    cache: String,
    volume: String,
}

impl Abort {
    fn line(&self) -> io::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }
}

/// A volume that is left unserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeftOut {
    last_unix_ms: u64,
    until_unix_ms: u64,
}

impl LeftOut {
    /// The last abort that names it.
    pub fn last_unix_ms(&self) -> u64 {
        self.last_unix_ms
    }

    /// It is served again from then on.
    pub fn until_unix_ms(&self) -> u64 {
        self.until_unix_ms
    }
}

/// Now, for notes that outlive the process.
pub(crate) fn now_unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// The aborts that are noted, the oldest first. What cannot be understood is left out.
pub fn read(file: &mut File) -> io::Result<Vec<Abort>> {
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(FILE_BYTES_MAX)))?;
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    let lines = bytes.split(|&byte| byte == b'\n');
    Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

/// Adds a note, which is on stable media then. The daemon is about to end: what was noted before is
/// not touched.
fn append(path: &Path, abort: &Abort) -> io::Result<()> {
    let file = state::open_alone(path)?;
    state::append(path, &file, &abort.line()?)
}

/// Keeps the newest of those notes that `stays` says.
fn keep(path: &Path, stays: impl Fn(&Abort) -> bool) -> io::Result<()> {
    let mut file = state::open_alone(path)?;
    let mut aborts = read(&mut file)?;
    aborts.retain(stays);
    let newest = &aborts[aborts.len().saturating_sub(ABORTS_MAX)..];
    let lines = newest.iter().map(Abort::line).collect::<io::Result<Vec<_>>>()?;
    state::replace(path, &lines.concat())
}

/// The volumes of a cache that are left unserved at this time.
pub fn left_out(aborts: &[Abort], cache: &str, now_unix_ms: u64) -> BTreeMap<String, LeftOut> {
    let within_ms = WITHIN.as_millis() as u64;
    let mut of_volume: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    // A clock that was wrong has noted what is yet to come.
    for abort in
        aborts.iter().filter(|abort| abort.cache == cache && abort.time_unix_ms <= now_unix_ms)
    {
        of_volume.entry(abort.volume.clone()).or_default().push(abort.time_unix_ms);
    }
    let decide = |(volume, mut times): (String, Vec<u64>)| {
        times.sort_unstable();
        let last_unix_ms = *times.last()?;
        let first = *times.get(times.len().checked_sub(OF_VOLUME_MAX)?)?;
        let until_unix_ms = last_unix_ms.saturating_add(within_ms);
        let left_out = last_unix_ms - first <= within_ms && now_unix_ms < until_unix_ms;
        left_out.then_some((volume, LeftOut { last_unix_ms, until_unix_ms }))
    };
    of_volume.into_iter().filter_map(decide).collect()
}

/// The place of the notes about a cache, and the reactor that they are about.
#[derive(Clone)]
pub struct Aborts {
    path: Option<PathBuf>,
    cache: String,
    shard: ShardHandle,
}

/// For a panic, which has nothing else to go by.
static ABORTS: OnceLock<Aborts> = OnceLock::new();

impl Aborts {
    /// Of this cache, with the file in this directory.
    pub fn new(directory: Option<PathBuf>, cache: String, shard: ShardHandle) -> Aborts {
        Aborts { path: directory.map(|directory| directory.join(FILE_NAME)), cache, shard }
    }

    /// From now on a panic of the reactor is noted, too.
    pub fn note_panics(&self) {
        let _ = ABORTS.set(self.clone());
    }

    /// The volumes that are to be left unserved now. Blocks.
    pub(crate) fn left_out(&self) -> BTreeMap<String, LeftOut> {
        let Some(path) = self.path.as_ref().filter(|path| path.symlink_metadata().is_ok()) else {
            return BTreeMap::new();
        };
        match state::open(path).and_then(|mut file| read(&mut file)) {
            Ok(aborts) => {
                if aborts.len() > ABORTS_MAX
                    && let Err(e) = keep(path, |_| true)
                {
                    warn!("cannot cut {}: {}", path.display(), reason(&e));
                }
                left_out(&aborts, &self.cache, now_unix_ms())
            }
            Err(e) => {
                warn!(
                    "whether a volume has ended the daemon is not known: cannot read {}: {}",
                    path.display(),
                    reason(&e)
                );
                BTreeMap::new()
            }
        }
    }

    /// The volume that the reactor is working for, and a note about it that a thread of its own
    /// writes.
    pub(crate) fn note(&self) -> Option<Note> {
        let volume = self.shard.works_for().filter(|name| !is_parent_name(name))?;
        let abort = Abort {
            time_unix_ms: now_unix_ms(),
            cache: self.cache.clone(),
            volume: volume.clone(),
        };
        let (written, wait) = mpsc::channel();
        if let Some(path) = self.path.clone() {
            let abort = abort.clone();
            let write = move || {
                let _ = written.send(append(&path, &abort));
            };
            // Without a thread nothing is written, and nobody waits for it.
            let _ = std::thread::Builder::new().name("note".into()).spawn(write);
        }
        Some(Note { volume, abort, path: self.path.clone(), wait })
    }
}

/// A note about an abort that is being written.
pub(crate) struct Note {
    volume: String,
    abort: Abort,
    path: Option<PathBuf>,
    wait: mpsc::Receiver<io::Result<()>>,
}

impl Note {
    /// The volume that the reactor was working for.
    pub(crate) fn volume(&self) -> &str {
        &self.volume
    }

    /// Waits until it is written, for a while.
    fn wait(&self) {
        if let (Some(path), Ok(Err(e))) = (&self.path, self.wait.recv_timeout(NOTE_WAIT_MAX)) {
            warn!("cannot note in {} which volume it is: {}", path.display(), reason(&e));
        }
    }

    /// The daemon goes on after all.
    pub(crate) fn withdraw(self) {
        info!("volume {}: the reactor goes on with it", self.volume);
        let take_back = move || {
            // The thread that writes it has the first turn.
            let _ = self.wait.recv();
            let path = self.path?;
            keep(&path, |abort| *abort != self.abort).ok()
        };
        let _ = std::thread::Builder::new().name("note".into()).spawn(take_back);
    }
}

/// Notes for which volume the reactor was working if it is the thread that panics. Returns what
/// there is to say about that.
pub fn note_panic() -> String {
    let note = match std::thread::current().name() {
        Some("reactor") => ABORTS.get().and_then(Aborts::note),
        _ => None,
    };
    let Some(note) = note else { return String::new() };
    note.wait();
    one_line(format!("; it was working for volume {}", note.volume))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    const MINUTE: u64 = 60_000;

    fn aborts(times: &[(u64, &str)]) -> Vec<Abort> {
        let abort = |(minute, volume): &(u64, &str)| Abort {
            time_unix_ms: minute * MINUTE,
            cache: "cache".into(),
            volume: (*volume).into(),
        };
        times.iter().map(abort).collect()
    }

    #[test]
    fn three_aborts_within_ten_minutes_leave_a_volume_unserved_for_ten() {
        let names = |times: &[(u64, &str)], now: u64| {
            left_out(&aborts(times), "cache", now * MINUTE).into_keys().collect::<Vec<_>>()
        };
        let three = [(100, "a"), (104, "a"), (110, "a")];
        assert_eq!(names(&three[..2], 105), [""; 0]);
        assert_eq!(names(&three, 110), ["a"]);
        assert_eq!(names(&three, 119), ["a"]);
        assert_eq!(names(&three, 120), [""; 0]);
        assert_eq!(names(&[(100, "a"), (104, "a"), (111, "a")], 112), [""; 0]);
        // The newest count, whatever was before, and of each volume its own.
        assert_eq!(
            names(&[(1, "a"), (100, "a"), (104, "b"), (105, "a"), (106, "a"), (107, "b")], 108),
            ["a"]
        );
        // Another clock, another cache.
        assert_eq!(names(&three, 109), [""; 0]);
        assert!(left_out(&aborts(&three), "other", 111 * MINUTE).is_empty());
        let left = left_out(&aborts(&three), "cache", 111 * MINUTE)["a"];
        assert_eq!((left.last_unix_ms, left.until_unix_ms), (110 * MINUTE, 120 * MINUTE));
    }

    #[test]
    fn the_file_is_bounded_and_takes_what_it_does_not_understand() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE_NAME);
        std::fs::write(&path, "nonsense\n{\"time_unix_ms\":1}\n\0\n").expect("written");
        let all: Vec<Abort> =
            (0..ABORTS_MAX as u64 + 9).flat_map(|n| aborts(&[(n, "a")])).collect();
        for abort in &all {
            append(&path, abort).expect("written");
        }
        assert_eq!(written(&path), all);
        keep(&path, |_| true).expect("written");
        assert_eq!(written(&path), all[9..]);
        assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        keep(&path, |abort| *abort != all[20]).expect("written");
        assert_eq!(written(&path).len(), ABORTS_MAX - 1);
        assert_eq!(std::fs::read_dir(directory.path()).expect("files").count(), 1);

        let target = directory.path().join("target");
        std::fs::rename(&path, &target).expect("moved");
        symlink(&target, &path).expect("a link");
        append(&path, &all[0]).expect_err("a link");
        keep(&path, |_| false).expect_err("a link");
        assert_eq!(written(&target).len(), ABORTS_MAX - 1);
    }

    fn written(path: &Path) -> Vec<Abort> {
        read(&mut state::open(path).expect("opened")).expect("read")
    }

    #[test]
    fn a_note_leaves_what_is_there_and_half_of_one_is_left_out() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE_NAME);
        let all = aborts(&[(1, "a"), (2, "b")]);
        append(&path, &all[0]).expect("written");
        // The daemon was killed in the middle of the next one.
        let half = [std::fs::read(&path).expect("read"), b"{\"time_unix_ms\":9".to_vec()].concat();
        std::fs::write(&path, &half).expect("written");
        let before = std::fs::metadata(&path).expect("there").ino();
        append(&path, &all[1]).expect("written");
        let after = std::fs::read(&path).expect("read");
        assert!(after.starts_with(&half), "{}", String::from_utf8_lossy(&after));
        assert_eq!(std::fs::metadata(&path).expect("there").ino(), before);
        assert_eq!(written(&path), all);
    }

    /// Where a process of this test writes, which may write files of no more than two notes.
    const SMALL: &str = "TIDEPOOL_TEST_SMALL";

    #[test]
    fn a_full_disk_leaves_what_is_there() {
        if let Some(path) = std::env::var_os(SMALL) {
            let all = aborts(&[(1, "a"), (2, "b"), (3, "c")]);
            let len = all[0].line().expect("a line").len() as u64;
            crate::failure::limits_are_errors();
            let limit = rustix::process::Rlimit { current: Some(2 * len + len / 2), maximum: None };
            rustix::process::setrlimit(rustix::process::Resource::Fsize, limit).expect("limited");
            append(path.as_ref(), &all[0]).expect("room");
            append(path.as_ref(), &all[1]).expect("room");
            append(path.as_ref(), &all[2]).expect_err("no room");
            return;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(FILE_NAME);
        let ran = std::process::Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "aborts::tests::a_full_disk_leaves_what_is_there"])
            .env(SMALL, &path)
            .output()
            .expect("it runs");
        assert!(ran.status.success(), "{ran:?}");
        assert_eq!(written(&path), aborts(&[(1, "a"), (2, "b")]));
        assert!(std::fs::read(&path).expect("read").ends_with(b"\n"));
    }
}
