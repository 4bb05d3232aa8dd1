//! Temporary directories that leave nothing behind, even when their process is killed.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use crate::mounts::{abort_below, points, unmount_below};

/// How long [`clear_after`] tries to remove what a killed process has left. Processes that end with
/// the killed one may use it for a moment.
const CLEAR_LIMIT: Duration = Duration::from_secs(60);
/// How long a killed process may take to end once none of its mounts answers any more.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Pause between two attempts.
const CLEAR_PAUSE: Duration = Duration::from_millis(100);

/// Name of the process that calls [`clear_after`], as the kernel shows it.
pub const CARETAKER: &str = "lab-caretaker";

/// The directory in which scratch directories are made: `TMPDIR`, else `/var/tmp`. `/var/tmp` is on
/// a disk, whereas `/tmp` may be in memory, and the name `/var/tmp` is short enough for the paths
/// of sockets.
pub fn parent() -> PathBuf {
    let chosen = std::env::var_os("TMPDIR").map(PathBuf::from).filter(|path| path.is_absolute());
    chosen.unwrap_or_else(|| "/var/tmp".into())
}

/// The directory of the user's scratch directories, unless another parent is asked for.
pub fn base() -> PathBuf {
    base_in(&parent())
}

fn base_in(parent: &Path) -> PathBuf {
    parent.join(format!("tidepool-{}", rustix::process::getuid().as_raw()))
}

/// Makes the user's directory `base`. Other users may make files in its parent, too; a `base` that
/// another user has made is not used. Other users may pass through `base` to what is opened to them
/// ([`Scratch::open_to_others`]), but cannot list it.
fn make_base(base: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o711).create(base) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        made => made?,
    }
    let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::NOFOLLOW;
    check_base(base)?;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(base)?;
    // An earlier release made the directory with the usual mode, and the umask changes the mode
    // given above.
    opened.set_permissions(Permissions::from_mode(0o711))
}

/// Fails if the directory is another user's, or is a link.
fn check_base(base: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(base)?;
    let is_ours = found.is_dir() && found.uid() == rustix::process::getuid().as_raw();
    if is_ours {
        return Ok(());
    }
    let why = format!(
        "{} is not a directory of this user: remove it, or name another place with TMPDIR",
        base.display()
    );
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Whether `name` can be the name of a scratch directory (a kind, a process id, and a count). Such
/// a name cannot lead out of the directory that it is in.
fn is_name(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    name.starts_with(|first: char| first.is_ascii_alphanumeric()) && name.bytes().all(is_plain)
}

/// Removes what killed processes have left below [`base`], and in the user's other directories in
/// which something is mounted.
///
/// # Errors
/// When [`base`] cannot be read, or is another user's.
pub fn sweep_leftovers() -> io::Result<()> {
    let base = base();
    for other in bases_of(&points()).into_iter().filter(|other| *other != base) {
        let _ = check_base(&other).and_then(|()| sweep(&other));
    }
    match check_base(&base) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        checked => checked.and_then(|()| sweep(&base)),
    }
}

/// The user's directories in which these paths are.
fn bases_of(points: &[PathBuf]) -> BTreeSet<PathBuf> {
    let name = base_in(Path::new(""));
    let above = points.iter().flat_map(|point| point.ancestors().skip(1));
    above.filter(|path| path.file_name() == Some(name.as_os_str())).map(PathBuf::from).collect()
}

/// Unmounts and removes what the process with the id `owner` has made below `parent`. That process
/// has been killed. One of its threads may still wait for a mount that the process itself serves,
/// and would wait without end.
pub fn clear_after(owner: u32, parent: &Path) {
    let base = base_in(parent);
    if check_base(&base).is_err() {
        return;
    }
    let left = || {
        let names =
            fs::read_dir(&base).into_iter().flatten().flatten().map(|entry| entry.file_name());
        let locked = |name: &str| {
            Some(
                base.join(name.strip_suffix(".lock").filter(|name| owner_of(name) == Some(owner))?),
            )
        };
        names.filter_map(|name| locked(name.to_str()?)).collect::<Vec<PathBuf>>()
    };
    left().iter().for_each(|directory| abort_below(directory));
    let begun = Instant::now();
    while !left().is_empty() && begun.elapsed() < CLEAR_LIMIT {
        let _ = sweep(&base);
        std::thread::sleep(CLEAR_PAUSE);
    }
}

/// The id of the process that has made the directory `name`.
fn owner_of(name: &str) -> Option<u32> {
    let mut parts = name.rsplitn(3, '-');
    let (_, owner, _) = (parts.next()?, parts.next()?, parts.next()?);
    owner.parse().ok().filter(|_| is_name(name))
}

/// A directory that is removed when this value is dropped.
///
/// Beside the directory `NAME` is the file `NAME.lock`, which the directory's process keeps locked.
/// So a lock that can be taken belongs to a process that has ended. The process that makes the next
/// directory removes what the ended process has left.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    lock_path: PathBuf,
    _lock: File,
    keep: bool,
}

impl Scratch {
    /// Makes a directory for `kind` below [`parent`]. `kind` is a short word, which tells an
    /// operator what the directory is for.
    pub fn new(kind: &str) -> io::Result<Scratch> {
        Scratch::new_in(&parent(), kind)
    }

    /// Makes a directory for `kind` below `parent`.
    pub fn new_in(parent: &Path, kind: &str) -> io::Result<Scratch> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let base = base_in(parent);
        fs::create_dir_all(parent)?;
        make_base(&base)?;
        sweep(&base)?;
        let name =
            format!("{kind}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        assert!(is_name(&name), "a kind is a short word");
        let lock_path = base.join(format!("{name}.lock"));
        let lock = loop {
            let lock = open_lock(&lock_path, OpenOptions::new().create(true))?;
            flock(&lock, FlockOperation::LockExclusive)?;
            // Another process may have removed the file as a leftover between its creation and the
            // lock.
            if fs::metadata(&lock_path)
                .is_ok_and(|now| lock.metadata().is_ok_and(|was| was.ino() == now.ino()))
            {
                break lock;
            }
        };
        let path = base.join(name);
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Scratch { path, lock_path, _lock: lock, keep: false })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path inside the directory.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }

    /// Lets other users pass through the directory to what they may use in it.
    ///
    /// # Errors
    /// When the directory's mode cannot be changed.
    pub fn open_to_others(&self) -> io::Result<()> {
        fs::set_permissions(&self.path, Permissions::from_mode(0o711))
    }

    /// Keeps the directory when this value is dropped, so that what a failure left can be examined.
    pub fn keep(&mut self) {
        self.keep = true;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.keep {
            unmount_below(&self.path);
            let _ = fs::remove_dir_all(&self.path);
        }
        if self.keep || !self.path.exists() {
            let _ = fs::remove_file(&self.lock_path);
        }
    }
}

/// Opens the lock file of a directory, but no symbolic link.
fn open_lock(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    options
        .write(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32)
        .open(path)
}

/// Whether the process with that id has been killed, or is about to end. If such a process still
/// has a lock, one of its threads has not ended: the thread waits for a mount that the process
/// itself served, and would wait without end.
pub fn is_killed(process: u32) -> bool {
    // From <linux/sched.h>; the flags are the ninth field of `stat` in proc(5).
    const PF_EXITING: u64 = 4;
    let read =
        |name: &str| fs::read_to_string(format!("/proc/{process}/{name}")).unwrap_or_default();
    let (stat, status) = (read("stat"), read("status"));
    // The process name before the fields may contain any characters.
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let is_zombie = fields.next() == Some("Z");
    let is_exiting = fields
        .nth(5)
        .and_then(|flags| flags.parse().ok())
        .is_some_and(|flags: u64| flags & PF_EXITING != 0);
    let pending = status.lines().find_map(|line| line.strip_prefix("SigPnd:"));
    let pending =
        pending.and_then(|signals| u64::from_str_radix(signals.trim(), 16).ok()).unwrap_or(0);
    is_zombie || is_exiting || pending & 1 << (rustix::process::Signal::KILL.as_raw() - 1) != 0
}

/// The lock of the directory `name` below `base`, if the directory's process has ended, or ends
/// within `limit`.
fn ended(base: &Path, name: &str, limit: Duration) -> Option<File> {
    let lock = open_lock(&base.join(format!("{name}.lock")), &mut OpenOptions::new()).ok()?;
    let begun = Instant::now();
    while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        if begun.elapsed() >= limit {
            return None;
        }
        std::thread::sleep(CLEAR_PAUSE);
    }
    Some(lock)
}

/// Removes the directories below `base` whose processes have ended, or have been killed and hang.
fn sweep(base: &Path) -> io::Result<()> {
    let names = fs::read_dir(base)?.flatten().filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.strip_suffix(".lock").filter(|name| is_name(name)).map(String::from)
    });
    let names: Vec<String> = names.collect();
    // Mounts below a link are not ours.
    let is_directory =
        |directory: &Path| fs::symlink_metadata(directory).is_ok_and(|found| found.is_dir());
    let hanging = |name: &str| {
        owner_of(name).is_some_and(is_killed) && ended(base, name, Duration::ZERO).is_none()
    };
    let hanging: BTreeSet<&String> = names.iter().filter(|name| hanging(name)).collect();
    // All mounts are aborted before the first process is waited for: a process ends only when none
    // of its threads hangs.
    let directories = hanging.iter().map(|name| base.join(name));
    directories
        .filter(|directory| is_directory(directory))
        .for_each(|directory| abort_below(&directory));
    for name in &names {
        let (lock_path, directory) = (base.join(format!("{name}.lock")), base.join(name));
        let limit = if hanging.contains(name) { END_LIMIT } else { Duration::ZERO };
        if let Some(_lock) = ended(base, name, limit) {
            if is_directory(&directory) {
                unmount_below(&directory);
            }
            let _ = fs::remove_dir_all(&directory);
            // A directory that could not be removed is left to the next sweep.
            if !directory.exists() {
                let _ = fs::remove_file(&lock_path);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_directories_of_ours_goes() {
        let outer = Scratch::new("scratch-test").expect("outer");
        let parent = outer.join("parent");
        let base = base_in(&parent);
        fs::create_dir_all(&base).expect("a directory");
        fs::write(parent.join("precious"), "x").expect("a file");
        let elsewhere = outer.join("elsewhere");
        fs::create_dir(&elsewhere).expect("a directory");
        fs::write(elsewhere.join("precious"), "x").expect("a file");
        for name in ["...lock", "..lock", ".lock", ". .lock", "-.lock"] {
            fs::write(base.join(name), "").expect("a lock");
        }
        std::os::unix::fs::symlink(&elsewhere, base.join("linked-1-0")).expect("a link");
        fs::write(base.join("linked-1-0.lock"), "").expect("a lock");
        std::os::unix::fs::symlink(outer.join("made"), base.join("lock-1-0.lock")).expect("a link");
        let scratch = Scratch::new_in(&parent, "next").expect("a directory");
        assert!(parent.join("precious").exists() && elsewhere.join("precious").exists());
        assert!(!outer.join("made").exists(), "no link is followed");
        assert_eq!(fs::metadata(scratch.path()).expect("there").mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(&base).expect("there").mode() & 0o777, 0o711);
    }

    #[test]
    fn what_another_user_has_put_there_is_refused() {
        let outer = Scratch::new("scratch-test").expect("outer");
        let (linked, theirs) = (outer.join("linked"), outer.join("theirs"));
        for parent in [&linked, &theirs] {
            fs::create_dir(parent).expect("a directory");
        }
        std::os::unix::fs::symlink(outer.path(), base_in(&linked)).expect("a link");
        let mut refused = vec![Scratch::new_in(&linked, "a")];
        fs::create_dir(base_in(&theirs)).expect("a directory");
        // Only root can give the directory to another user.
        if std::os::unix::fs::chown(base_in(&theirs), Some(65534), Some(65534)).is_ok() {
            refused.push(Scratch::new_in(&theirs, "a"));
        }
        for refused in refused {
            let error = refused.expect_err("it is refused").to_string();
            assert!(error.contains("TMPDIR"), "{error}");
        }
    }

    #[test]
    fn what_one_process_has_left_goes_and_what_another_one_has_stays() {
        let outer = Scratch::new("scratch-test").expect("outer");
        let used = Scratch::new_in(outer.path(), "used").expect("a directory");
        let base = base_in(outer.path());
        // No process can have this id.
        for name in ["lab-a-4194305-0", "used-4194305-12"] {
            fs::create_dir(base.join(name)).expect("a directory");
            fs::write(base.join(format!("{name}.lock")), "").expect("a lock");
        }
        clear_after(4_194_305, &outer.join("nothing"));
        clear_after(4_194_305, outer.path());
        let left: Vec<_> =
            fs::read_dir(&base).expect("a directory").flatten().map(|entry| entry.path()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(used.path().exists(), "{left:?}");
        assert_eq!(
            [owner_of("lab-a-17-3"), owner_of("x-17"), owner_of("17-3"), owner_of("-17-3")],
            [Some(17), None, None, None]
        );
    }

    #[test]
    fn a_process_that_was_killed_is_told_from_one_that_runs() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("it runs");
        assert!(!is_killed(std::process::id()) && !is_killed(child.id()));
        child.kill().expect("it is ours");
        let begun = Instant::now();
        while !is_killed(child.id()) && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(is_killed(child.id()), "nobody has waited for it");
        child.wait().expect("a child");
    }

    #[test]
    fn directories_of_ours_are_found_by_what_is_mounted_in_them() {
        let name = base_in(Path::new("/a b"));
        let points =
            [name.join("lab-x-1-0/tidepool-4294967295/disk0"), name.clone(), "/mnt".into()];
        assert_eq!(bases_of(&points), [name].into());
    }

    #[test]
    fn a_directory_goes_with_its_owner_and_leftovers_go_with_the_next() {
        let outer = Scratch::new("scratch-test").expect("outer");
        let first = Scratch::new_in(outer.path(), "a").expect("first");
        fs::write(first.join("file"), "x").expect("write");
        let base = first.path().parent().expect("base").to_path_buf();
        // A killed process leaves a directory, and a lock file that no process has locked.
        fs::create_dir(base.join("b-1-0")).expect("dir");
        fs::write(base.join("b-1-0.lock"), "").expect("lock");
        let second = Scratch::new_in(outer.path(), "c").expect("second");
        assert!(!base.join("b-1-0").exists(), "a leftover is swept");
        assert!(first.join("file").exists(), "a directory in use is not");
        let gone = first.path().to_path_buf();
        drop(first);
        assert!(!gone.exists());
        drop(second);
    }
}
