//! Locks of open files (`flock`), which exclude other processes of this host.

use crate::error::BackendError;
use rustix::fs::FlockOperation;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait for a lock holder that has died with requests in flight.
const DYING_WAIT: Duration = Duration::from_secs(30);
/// Longest wait for a lock holder that the system does not list.
const UNLISTED_WAIT: Duration = Duration::from_secs(1);
/// Pause before a lock is tried again.
const DYING_POLL: Duration = Duration::from_millis(20);

/// Takes the lock: shared to read, exclusive to write. Waits for a holder that has died.
pub(crate) fn lock(what: &str, file: &OwnedFd, read_only: bool) -> Result<(), BackendError> {
    let start = Instant::now();
    loop {
        let holder = match try_lock(what, file, read_only)? {
            None => return Ok(()),
            Some(holder) => holder,
        };
        let (dying, wait) = match holder {
            Some(pid) => (!Path::new(&format!("/proc/{pid}")).exists(), DYING_WAIT),
            // A holder that is not listed may just have released the lock.
            None => (true, UNLISTED_WAIT),
        };
        if !dying || start.elapsed() > wait {
            let who = match holder {
                Some(pid) if dying => {
                    format!("process {pid} died and its last requests do not complete")
                }
                Some(pid) => {
                    format!("process {pid}{} holds its lock; stop that first", command_of(pid))
                }
                None => "another process holds its lock; stop that first".into(),
            };
            return Err(BackendError::Locked { what: what.into(), holder: who });
        }
        std::thread::sleep(DYING_POLL);
    }
}

/// `None` when the lock was taken, otherwise the process that holds it, as far as known.
fn try_lock(
    what: &str,
    file: &OwnedFd,
    read_only: bool,
) -> Result<Option<Option<u32>>, BackendError> {
    let operation = match read_only {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    match rustix::fs::flock(file, operation) {
        Ok(()) => Ok(None),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(Some(lock_holder(file))),
        Err(e) => Err(BackendError::io(what, "lock", e)),
    }
}

/// Releases the lock. Closing the file would do that only if nothing else, not even the kernel for
/// a moment, refers to the same open file description.
pub(crate) fn unlock(file: &OwnedFd) {
    // Without a lock there is nothing to release.
    let _ = rustix::fs::flock(file, FlockOperation::Unlock);
}

/// The process that holds a conflicting flock, from `/proc/locks`.
fn lock_holder(file: &OwnedFd) -> Option<u32> {
    let stat = rustix::fs::fstat(file).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let inode = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip_while(|field| *field != "FLOCK").skip(3);
        let pid = fields.next()?.parse().ok()?;
        (fields.next()? == inode && !line.contains("->")).then_some(pid)
    })
}

fn command_of(pid: u32) -> String {
    match fs::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!(" ({})", name.trim()),
        Err(_) => String::new(),
    }
}
