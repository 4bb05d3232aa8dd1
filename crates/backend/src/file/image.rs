//! The file or block device of an image: how it is opened, and its size.

use crate::error::BackendError;
use crate::flock;
use rustix::fs::{FileType, Mode, OFlags};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};
use tidepool_engine::api::SECTOR_BYTES;
use tidepool_engine::mem::AlignedBuf;

/// Longest wait for a busy device.
const BUSY_WAIT: Duration = Duration::from_secs(1);
/// Pause before a busy device is tried again.
const BUSY_POLL: Duration = Duration::from_millis(20);

/// How a file is accessed, beside [`crate::OpenOptions`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Caching {
    /// Without the page cache where possible; a flush reaches stable media.
    Direct,
    /// With the page cache, and a flush completes at once: the file plays a pool whose writes are
    /// durable when they complete.
    Played,
}

/// An opened image before it is used as a backend.
pub(super) struct Image {
    pub(super) what: String,
    pub(super) file: OwnedFd,
    pub(super) size_bytes: u64,
    /// Opened with O_DIRECT.
    pub(super) direct: bool,
}

impl Image {
    /// What users of this host other than the file's owner could do with the image, in one line.
    /// `None` if they cannot open the file, or cannot enter its directory.
    pub(super) fn open_to_others(&self, path: &Path) -> Option<String> {
        let stat = rustix::fs::fstat(&self.file).ok()?;
        let (is_file, mode) = (
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile,
            Mode::from_raw_mode(stat.st_mode),
        );
        let directory = path.parent().and_then(|directory| rustix::fs::stat(directory).ok())?;
        let is_entered = Mode::from_raw_mode(directory.st_mode).intersects(Mode::XGRP | Mode::XOTH);
        let others = Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
        (is_file && is_entered && mode.intersects(others)).then(|| {
            format!(
                "other users may open {} (mode {:03o}): they can read it, and keep it from being served by taking its lock; chmod 600",
                self.what,
                mode.as_raw_mode() & 0o777
            )
        })
    }

    /// Opens the image and checks that it can be served.
    pub(super) fn open(
        path: &Path,
        read_only: bool,
        caching: Caching,
    ) -> Result<Image, BackendError> {
        let what = path.display().to_string();
        let failed = |e: rustix::io::Errno| open_error(&what, path, read_only, e.into());
        // The kind decides the flags; opening a FIFO or a tape would have effects of its own.
        let kind = FileType::from_raw_mode(rustix::fs::stat(path).map_err(failed)?.st_mode);
        let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let exclusive = match kind {
            FileType::RegularFile => OFlags::empty(),
            // On a device, O_EXCL fails if the device is mounted or claimed.
            FileType::BlockDevice if read_only => OFlags::empty(),
            FileType::BlockDevice => OFlags::EXCL,
            FileType::Directory => {
                return Err(unfit(&what, "a directory; name a file or a block device"));
            }
            _ => return Err(unfit(&what, "neither a file nor a block device")),
        };
        let flags = access | exclusive | OFlags::CLOEXEC;
        let direct = || match caching {
            Caching::Direct => open_direct(path, flags),
            Caching::Played => None,
        };
        let open = || match direct() {
            Some(file) => Ok((file, true)),
            None => rustix::fs::open(path, flags, Mode::empty()).map(|file| (file, false)),
        };
        let start = Instant::now();
        let (file, direct) = loop {
            match open() {
                // The kernel releases a device a moment after the process that used it has ended or
                // closed it.
                Err(rustix::io::Errno::BUSY) if start.elapsed() < BUSY_WAIT => {
                    std::thread::sleep(BUSY_POLL);
                }
                outcome => break outcome.map_err(failed)?,
            }
        };
        if !rustix::fs::fstat(&file).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == kind)
        {
            return Err(replaced(&what));
        }
        let size_bytes = size_of(&file, kind)
            .map_err(|e| BackendError::io(&what, "read the size of the image", e))?;
        if size_bytes == 0 {
            return Err(unfit(&what, "empty; give it a size first (truncate -s SIZE)"));
        }
        if !size_bytes.is_multiple_of(SECTOR_BYTES as u64) {
            let why = format!(
                "its size of {size_bytes} bytes is no multiple of {SECTOR_BYTES}; enlarge it with truncate"
            );
            return Err(BackendError::Unsupported { what, why });
        }
        Ok(Image { what, file, size_bytes, direct })
    }

    /// Takes the lock, see [`flock::lock`].
    pub(super) fn lock(&self, read_only: bool) -> Result<(), BackendError> {
        flock::lock(&self.what, &self.file, read_only)
    }

    /// Releases the lock, see [`flock::unlock`].
    pub(super) fn unlock(&self) {
        flock::unlock(&self.file);
    }
}

/// The error for an image that has been replaced since it was opened.
pub(super) fn replaced(what: &str) -> BackendError {
    let why = "it was replaced while it was being opened; try again".into();
    BackendError::Unavailable { what: what.into(), why }
}

fn unfit(what: &str, why: &str) -> BackendError {
    BackendError::Unsupported { what: what.into(), why: why.into() }
}

fn open_error(what: &str, path: &Path, read_only: bool, e: io::Error) -> BackendError {
    let what = what.to_owned();
    match e.raw_os_error() {
        Some(libc::ENOENT) => {
            let why = "no such file; create it first (truncate -s SIZE)".into();
            BackendError::NotFound { what, why }
        }
        Some(libc::EACCES | libc::EPERM) => {
            let right = if read_only { "read" } else { "read and write" };
            let user = rustix::process::geteuid().as_raw();
            BackendError::Denied {
                what,
                why: format!("user id {user} may not {right} it; change its owner or mode"),
            }
        }
        Some(libc::EBUSY) => {
            let holder =
                "the device is mounted or used by the kernel (see lsblk); release it first".into();
            BackendError::Locked { what, holder }
        }
        Some(libc::EROFS) => {
            BackendError::Denied { what, why: "its file system or device is read-only".into() }
        }
        _ => BackendError::io(path.display(), "open", e),
    }
}

/// Opens with O_DIRECT and proves with a read that 512-byte transfers work; `None` when they do
/// not.
fn open_direct(path: &Path, flags: OFlags) -> Option<OwnedFd> {
    let file = rustix::fs::open(path, flags | OFlags::DIRECT, Mode::empty()).ok()?;
    let mut probe = AlignedBuf::zeroed(2 * SECTOR_BYTES);
    rustix::io::pread(&file, &mut probe[SECTOR_BYTES..], SECTOR_BYTES as u64).ok()?;
    Some(file)
}

/// Sets the size of a file. The size of a device is not changed here: an operator may have changed
/// it before. `ENOSPC` if the device is smaller than `size_bytes`.
pub(super) fn set_size(file: &OwnedFd, size_bytes: u64) -> io::Result<()> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(file)?.st_mode);
    if kind == FileType::RegularFile {
        rustix::fs::ftruncate(file, size_bytes)?;
        return Ok(rustix::fs::fsync(file)?);
    }
    match size_of(file, kind)? < size_bytes {
        true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        false => Ok(()),
    }
}

fn size_of(file: &OwnedFd, kind: FileType) -> io::Result<u64> {
    if kind == FileType::BlockDevice {
        return Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?);
    }
    Ok(u64::try_from(rustix::fs::fstat(file)?.st_size).unwrap_or(0))
}
