//! Temporary directories that leave nothing behind, even when their process is killed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock};

use crate::mounts::unmount_below;

/// Where directories are made: `TMPDIR`, else `/var/tmp`, which is on a disk where `/tmp` may be memory, and whose name is short enough
/// for the paths of sockets.
pub fn parent() -> PathBuf {
    std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// Where the user's directories are, unless another parent is asked for.
pub fn base() -> PathBuf {
    base_in(&parent())
}

fn base_in(parent: &Path) -> PathBuf {
    parent.join(format!("tidepool-{}", rustix::process::getuid().as_raw()))
}

/// Removes what killed processes have left below [`base`].
///
/// # Errors
/// When the directory cannot be read.
pub fn sweep_leftovers() -> io::Result<()> {
    let base = base();
    if base.exists() { sweep(&base) } else { Ok(()) }
}

/// A directory that is removed when it is dropped.
///
/// Next to the directory `NAME` stands `NAME.lock`, which its process keeps locked. A lock that can be taken therefore belongs to a
/// process that has ended, and whoever makes the next directory removes what it left.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    lock_path: PathBuf,
    _lock: File,
    keep: bool,
}

impl Scratch {
    /// Makes a directory for `kind` (a short word, for people who look) below [`parent`].
    pub fn new(kind: &str) -> io::Result<Scratch> {
        Scratch::new_in(&parent(), kind)
    }

    /// Makes a directory for `kind` below `parent`.
    pub fn new_in(parent: &Path, kind: &str) -> io::Result<Scratch> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let base = base_in(parent);
        fs::create_dir_all(&base)?;
        sweep(&base)?;
        let name = format!("{kind}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let lock_path = base.join(format!("{name}.lock"));
        let lock = loop {
            let lock = File::create(&lock_path)?;
            flock(&lock, FlockOperation::LockExclusive)?;
            // A sweeper may have removed the file between its creation and the lock.
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
        fs::create_dir(&path)?;
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

    /// Leaves the directory in place for good when this is dropped, to look at what a failure left.
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

/// Removes the directories below `base` whose processes have ended.
fn sweep(base: &Path) -> io::Result<()> {
    for entry in fs::read_dir(base)?.flatten() {
        let lock_path = entry.path();
        if lock_path.extension().is_none_or(|extension| extension != "lock") {
            continue;
        }
        let Ok(lock) = File::open(&lock_path) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            let directory = lock_path.with_extension("");
            unmount_below(&directory);
            let _ = fs::remove_dir_all(&directory);
            // What could not be removed is left to the next one.
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
    fn a_directory_goes_with_its_owner_and_leftovers_go_with_the_next() {
        let outer = Scratch::new("scratch-test").expect("outer");
        let first = Scratch::new_in(outer.path(), "a").expect("first");
        fs::write(first.join("file"), "x").expect("write");
        let base = first.path().parent().expect("base").to_path_buf();
        // What a killed process leaves: a directory and a lock file that nobody holds.
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
