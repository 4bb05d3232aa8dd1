//! The cache file or block device: opened with O_DIRECT, locked, preallocated.

use rustix::fs::{FallocateFlags, FileType, FlockOperation, IFlags, Mode, OFlags};
use rustix::io::Errno;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tidepool_engine::api::BLOCK_BYTES;

/// Smallest cache in bytes.
pub const CACHE_BYTES_MIN: u64 = 64 << 20;
/// Attempts to lock a block device: udev locks a device for a moment when it probes the device.
const LOCK_TRIES: u32 = 20;
/// Pause between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_millis(50);
/// Longest wait for the lock of a process that has died. The kernel keeps the files of such a
/// process open until the last request of its io_uring has ended.
const DYING_WAIT: Duration = Duration::from_secs(30);
/// Bytes at either end of a device that must be zero before the device counts as unused: every
/// common partition table, file system and volume manager leaves a mark within these bytes.
const BLANK_BYTES: u64 = 1 << 20;

/// Types of the file systems that keep files in memory, tmpfs and ramfs (`statfs(2)`).
const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

/// Types of the file systems that write overwritten data to another place: Btrfs, ZFS, bcachefs.
const COPY_ON_WRITE: [u32; 3] = [0x9123_683e, 0x2fc1_2fc1, 0xca45_1a4e];
/// A cache file has holes if its allocated bytes are fewer than its size by at least this number.
const HOLES_BYTES_MIN: u64 = 1 << 20;

/// Why a cache device could not be opened or created. Each error is one line, and nothing was
/// changed.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Nothing exists at the path.
    #[error("{}: no such cache; create it with --cache-size or `tidepool cache format`", .0.display())]
    Missing(PathBuf),
    /// The path names something that cannot be a cache.
    #[error("{}: not a regular file or block device; name another path", .0.display())]
    Kind(PathBuf),
    /// A new cache would overwrite something that exists.
    #[error("{}: already exists; name another path, or remove it first", .0.display())]
    Exists(PathBuf),
    /// A new cache would overwrite data: the first or the last MiB of the block device is not zero.
    #[error("{}: the device is not empty; clear it with `wipefs --all` and `blkdiscard` if it is the right one", .0.display())]
    NotBlank(PathBuf),
    /// Another process has locked the cache, or the kernel uses the block device.
    #[error("{}: in use by {holder}; stop that first, or name another cache", .path.display())]
    InUse {
        /// The cache.
        path: PathBuf,
        /// The process or system that uses the cache, as far as known.
        holder: String,
    },
    /// The size is too small for a cache.
    #[error("{}: {size} bytes are too small for a cache; at least {CACHE_BYTES_MIN} are needed", .path.display())]
    TooSmall {
        /// The cache.
        path: PathBuf,
        /// The size in bytes.
        size: u64,
    },
    /// The file system or block device has too little room.
    #[error("{}: no room for a cache of {wanted} bytes{}; choose a smaller --cache-size or free some space",
        .path.display(), free.map(|f| format!(" ({f} are free)")).unwrap_or_default())]
    DiskFull {
        /// The cache.
        path: PathBuf,
        /// The requested size in bytes.
        wanted: u64,
        /// The free bytes of the file system, or the size of the block device; `None` if unknown.
        free: Option<u64>,
    },
    /// No file may have this size, by the file system or by a limit of the process.
    #[error("{}: no file may have {wanted} bytes here, whatever is free; choose a smaller --cache-size or raise the limit (ulimit -f, LimitFSIZE=)", .path.display())]
    TooLarge {
        /// The cache.
        path: PathBuf,
        /// The requested size in bytes.
        wanted: u64,
    },
    /// The kernel reported another error.
    #[error("{}: cannot {action} the cache: {source}", .path.display())]
    Io {
        /// The cache.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

impl CacheError {
    fn io(path: &Path, action: &'static str, source: impl Into<io::Error>) -> CacheError {
        CacheError::Io { path: path.into(), action, source: source.into() }
    }
}

/// An open cache device. The lock is held on the file descriptor that does the I/O. So a process
/// that can write through this descriptor holds the lock, and the lock ends with the process,
/// however the process ends.
#[derive(Debug)]
pub struct CacheFile {
    fd: OwnedFd,
    path: PathBuf,
    size_bytes: u64,
    direct: bool,
    block_device: bool,
}

impl CacheFile {
    /// Opens and locks an existing cache file or block device.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn open(path: &Path) -> Result<CacheFile, CacheError> {
        CacheFile::open_with(path, OFlags::RDWR)
    }

    /// Opens an existing cache for inspection, without write access. Fails with
    /// [`CacheError::InUse`] while a daemon has the cache open.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn open_read_only(path: &Path) -> Result<CacheFile, CacheError> {
        CacheFile::open_with(path, OFlags::RDONLY)
    }

    fn open_with(path: &Path, access: OFlags) -> Result<CacheFile, CacheError> {
        // The type is checked before the file is opened: opening a FIFO or a tape has side effects.
        let kind = rustix::fs::stat(path).map_err(|e| match e {
            Errno::NOENT | Errno::NOTDIR => CacheError::Missing(path.into()),
            e => CacheError::io(path, "look at", e),
        })?;
        let block_device = match FileType::from_raw_mode(kind.st_mode) {
            FileType::RegularFile => false,
            FileType::BlockDevice => true,
            _ => return Err(CacheError::Kind(path.into())),
        };
        // On a block device O_EXCL makes the open fail while the device is mounted or part of
        // another device.
        let exclusive = if block_device { OFlags::EXCL } else { OFlags::empty() };
        let (fd, direct) =
            open_direct(path, access | exclusive, Mode::empty()).map_err(|e| match e {
                Errno::BUSY => CacheError::InUse {
                    path: path.into(),
                    holder: "the kernel (mounted, or part of another device)".into(),
                },
                e => CacheError::io(path, "open", e),
            })?;
        let cache = CacheFile { fd, path: path.into(), size_bytes: 0, direct, block_device };
        cache.lock()?;
        let size = if block_device {
            block_device_bytes(cache.fd.as_fd()).map_err(|e| CacheError::io(path, "measure", e))?
        } else {
            rustix::fs::fstat(&cache.fd).map_err(|e| CacheError::io(path, "measure", e))?.st_size
                as u64
        };
        Ok(CacheFile { size_bytes: size / BLOCK_BYTES as u64 * BLOCK_BYTES as u64, ..cache })
    }

    /// Creates a cache file of `size_bytes`, rounded up to a block, and reserves its space, so that
    /// a full disk is reported now. After a failure no file is left behind. An existing block
    /// device becomes the cache if it has at least this size and is blank.
    ///
    /// # Errors
    /// See [`CacheError`].
    pub fn create(path: &Path, size_bytes: u64) -> Result<CacheFile, CacheError> {
        let size = size_bytes.next_multiple_of(BLOCK_BYTES as u64);
        if size < CACHE_BYTES_MIN {
            return Err(CacheError::TooSmall { path: path.into(), size });
        }
        if path.exists() {
            let cache = CacheFile::open(path).map_err(|e| match e {
                CacheError::Kind(path) => CacheError::Exists(path),
                e => e,
            })?;
            return cache.take_blank(size);
        }
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let (fd, direct) =
            open_direct(path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| match e {
                Errno::EXIST => CacheError::Exists(path.into()),
                e => CacheError::io(path, "create", e),
            })?;
        let cache =
            CacheFile { fd, path: path.into(), size_bytes: size, direct, block_device: false };
        // This call has created the file, so every failure from here on removes the file.
        let ready = cache.lock().and_then(|()| cache.reserve(size));
        if ready.is_err() {
            let _ = fs::remove_file(path);
        }
        ready.map(|()| cache)
    }

    /// Makes the first `size` bytes of an existing block device a new cache, if the device is large
    /// enough and blank.
    fn take_blank(self, size: u64) -> Result<CacheFile, CacheError> {
        if !self.block_device {
            return Err(CacheError::Exists(self.path));
        }
        if self.size_bytes < size {
            return Err(CacheError::DiskFull {
                path: self.path,
                wanted: size,
                free: Some(self.size_bytes),
            });
        }
        if !self.is_blank()? {
            return Err(CacheError::NotBlank(self.path));
        }
        Ok(CacheFile { size_bytes: size, ..self })
    }

    /// Whether the first and the last MiB are zero, that is, no partition table, file system or
    /// cache is there.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn is_blank(&self) -> Result<bool, CacheError> {
        let mut buf = tidepool_engine::mem::AlignedBuf::zeroed(BLANK_BYTES as usize);
        for start in [0, self.size_bytes.saturating_sub(BLANK_BYTES)] {
            let len = BLANK_BYTES.min(self.size_bytes) as usize;
            let mut done = 0;
            while done < len {
                match rustix::io::pread(&self.fd, &mut buf[done..len], start + done as u64) {
                    Ok(0) => break,
                    Ok(n) => done += n,
                    Err(Errno::INTR) => {}
                    Err(e) => return Err(CacheError::io(&self.path, "read", e)),
                }
            }
            if buf[..done].iter().any(|b| *b != 0) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn lock(&self) -> Result<(), CacheError> {
        let start = Instant::now();
        loop {
            match rustix::fs::flock(&self.fd, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => continue,
                Err(Errno::WOULDBLOCK) => {}
                Err(e) => return Err(CacheError::io(&self.path, "lock", e)),
            }
            let holder = holder(self.fd.as_fd());
            let wait = match holder {
                Some(pid) if has_died(pid) => DYING_WAIT,
                // When the parent of a dying holder has noticed the holder's end, the kernel's
                // table of locks names no process for the lock any more.
                None => DYING_WAIT,
                _ if self.block_device => LOCK_PAUSE * LOCK_TRIES,
                _ => Duration::ZERO,
            };
            if start.elapsed() >= wait {
                let holder = holder.map_or_else(|| "another process".into(), describe);
                return Err(CacheError::InUse { path: self.path.clone(), holder });
            }
            std::thread::sleep(LOCK_PAUSE);
        }
    }

    fn reserve(&self, size: u64) -> Result<(), CacheError> {
        // The free space is checked first, so that a size that cannot fit does not fill the disk
        // for a moment.
        let free = self.path.parent().and_then(free_bytes);
        let outcome = loop {
            if free.is_some_and(|free| free < size) {
                break Err(Errno::NOSPC);
            }
            match rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), 0, size) {
                Err(Errno::INTR) => {}
                // This file system cannot reserve space. The format writes every byte and reports a
                // full disk.
                Err(Errno::OPNOTSUPP) => break rustix::fs::ftruncate(&self.fd, size),
                outcome => break outcome,
            }
        };
        outcome.map_err(|e| match e {
            Errno::NOSPC | Errno::DQUOT => {
                CacheError::DiskFull { path: self.path.clone(), wanted: size, free }
            }
            Errno::FBIG => CacheError::TooLarge { path: self.path.clone(), wanted: size },
            e => CacheError::io(&self.path, "reserve the space of", e),
        })?;
        // The file's name must survive a power loss, as its content does.
        rustix::fs::fsync(&self.fd).map_err(|e| CacheError::io(&self.path, "sync", e))?;
        let directory =
            self.path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let synced = fs::File::open(directory).and_then(|d| d.sync_all());
        synced.map_err(|e| CacheError::io(&self.path, "sync the directory of", e))
    }

    /// Removes the cache file, for example after a failed format. A block device stays as it is.
    pub fn discard(self) {
        if !self.block_device {
            let _ = fs::remove_file(&self.path);
        }
    }

    /// The path of the cache.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the cache in bytes, a multiple of a block.
    pub fn len_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether I/O bypasses the page cache.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// The properties that make this cache slower or less safe than it could be, one line of text
    /// each.
    pub fn drawbacks(&self) -> Vec<&'static str> {
        let memory = self.in_memory();
        let all = [
            (
                memory,
                "the cache is in memory: what the images do not have yet is lost when this host loses its power",
            ),
            (
                !memory && !self.direct,
                "the file system does not do direct I/O: the cache takes memory twice and is slower",
            ),
            (
                !memory && self.has_holes(),
                "the cache file has holes: a write into one is slow, and fails when the disk is full; make the cache anew (tidepool cache format)",
            ),
            (
                self.copies_on_write(),
                "the file system writes what is overwritten to another place: the cache is slower, and may find the disk full; use another file system, or make the file without that (chattr +C)",
            ),
        ];
        all.into_iter().filter_map(|(has, told)| has.then_some(told)).collect()
    }

    /// Whether the file has holes: its allocated bytes are fewer than its size by
    /// [`HOLES_BYTES_MIN`] or more.
    fn has_holes(&self) -> bool {
        /// Unit of `st_blocks` in bytes.
        const BLOCKS_BYTES: u64 = 512;
        let allocated = |stat: rustix::fs::Stat| stat.st_blocks as u64 * BLOCKS_BYTES;
        !self.block_device
            && rustix::fs::fstat(&self.fd)
                .is_ok_and(|stat| allocated(stat) + HOLES_BYTES_MIN <= self.size_bytes)
    }

    /// Whether the file system writes overwritten data of this file to another place.
    fn copies_on_write(&self) -> bool {
        let of = |found: rustix::fs::StatFs| COPY_ON_WRITE.contains(&(found.f_type as u32));
        let is_off = || {
            rustix::fs::ioctl_getflags(&self.fd).is_ok_and(|flags| flags.contains(IFlags::NOCOW))
        };
        !self.block_device && rustix::fs::fstatfs(&self.fd).is_ok_and(of) && !is_off()
    }

    /// Whether the cache is on FUSE. There a write blocks the submitting thread while the file is
    /// synced.
    pub fn has_writers_wait(&self) -> bool {
        let of = |found: rustix::fs::StatFs| found.f_type == libc::FUSE_SUPER_MAGIC;
        !self.block_device && rustix::fs::fstatfs(&self.fd).is_ok_and(of)
    }

    /// Whether the cache is in memory (tmpfs, ramfs, a RAM disk, zram) and so is lost when the host
    /// loses its power.
    pub fn in_memory(&self) -> bool {
        if self.block_device {
            let Ok(stat) = rustix::fs::fstat(&self.fd) else { return false };
            let (major, minor) = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
            let device = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}"));
            let name = device
                .ok()
                .and_then(|device| Some(device.file_name()?.to_string_lossy().into_owned()));
            return name.is_some_and(|name| name.starts_with("ram") || name.starts_with("zram"));
        }
        rustix::fs::fstatfs(&self.fd).is_ok_and(|found| IN_MEMORY.contains(&(found.f_type as u32)))
    }

    /// The file descriptor that does the I/O.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens with O_DIRECT, or without O_DIRECT where the file system refuses the flag.
fn open_direct(path: &Path, flags: OFlags, mode: Mode) -> Result<(OwnedFd, bool), Errno> {
    let flags = flags | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags | OFlags::DIRECT, mode) {
        Ok(fd) => Ok((fd, true)),
        // With O_CREAT, the refused call may have created the file already.
        Err(Errno::INVAL) => {
            let flags = flags.difference(OFlags::EXCL | OFlags::CREATE);
            let made = match rustix::fs::open(path, flags, mode) {
                Err(Errno::NOENT) => {
                    rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, mode)
                }
                other => other,
            };
            made.map(|fd| (fd, false))
        }
        Err(e) => Err(e),
    }
}

/// The process that holds the lock on a file, from the kernel's table of locks; `None` if unknown.
fn holder(fd: BorrowedFd<'_>) -> Option<u32> {
    let stat = rustix::fs::fstat(fd).ok()?;
    let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
    let inode = format!("{major:02x}:{minor:02x}:{}", stat.st_ino);
    let table = fs::read_to_string("/proc/locks").ok()?;
    let pid = table.lines().find_map(|line| {
        let mut words = line.split_whitespace().filter(|w| *w != "->");
        let pid = words.nth(4)?;
        (words.next()? == inode).then_some(pid)
    })?;
    pid.parse().ok().filter(|pid| *pid > 0)
}

/// Whether the process has ended. Its parent may not have noticed the end yet.
pub fn has_died(pid: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        // Processes of other users may be hidden in /proc.
        let process = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        return process
            .is_none_or(|pid| rustix::process::test_kill_process(pid) == Err(Errno::SRCH));
    };
    // The name in parentheses may contain any character. The state is the word behind the last `)`.
    stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']))
}

fn describe(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    if name.is_empty() {
        format!("process {pid}")
    } else {
        format!("process {pid} ({})", name.trim())
    }
}

fn free_bytes(directory: &Path) -> Option<u64> {
    let directory = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let stat = rustix::fs::statvfs(directory).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

fn block_device_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    /// `_IOR(0x12, 114, size_t)` of linux/fs.h.
    const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;
    let mut bytes = 0u64;
    // SAFETY: BLKGETSIZE64 writes one u64 to the address given.
    let outcome = unsafe { libc::ioctl(fd.as_raw_fd(), BLKGETSIZE64, &mut bytes) };
    if outcome == 0 { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_opener_is_told_who_has_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("cache");
        let first = CacheFile::create(&path, CACHE_BYTES_MIN).expect("room for the smallest cache");
        assert_eq!(first.len_bytes(), CACHE_BYTES_MIN);
        let error = CacheFile::open(&path).expect_err("it is locked");
        let line = error.to_string();
        assert!(matches!(error, CacheError::InUse { .. }), "{line}");
        assert!(line.contains(&format!("process {}", std::process::id())), "{line}");
        assert!(!line.contains('\n'));
        drop(first);
        CacheFile::open(&path).expect("the lock went with its holder");
    }

    #[test]
    fn a_cache_in_memory_is_told_from_one_that_stays() {
        let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
            println!("not run: there is no file system in memory at /dev/shm");
            return;
        };
        let cache = CacheFile::create(&dir.path().join("cache"), CACHE_BYTES_MIN).expect("a cache");
        assert!(cache.in_memory());
        let on_disk = CacheFile::open_read_only(Path::new("/usr/bin/env")).expect("a file");
        assert!(!on_disk.in_memory());
    }

    #[test]
    fn a_cache_file_with_holes_is_told_from_one_that_has_its_room() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory");
        let [whole, sparse] = ["whole", "sparse"].map(|name| dir.path().join(name));
        drop(CacheFile::create(&whole, CACHE_BYTES_MIN).expect("a cache"));
        fs::File::create(&sparse).and_then(|file| file.set_len(CACHE_BYTES_MIN)).expect("a file");
        let told = |path: &Path| {
            let drawbacks = CacheFile::open(path).expect("a cache").drawbacks();
            drawbacks.iter().any(|told| told.contains("has holes"))
        };
        assert!(told(&sparse) && !told(&whole));
    }

    #[test]
    fn create_overwrites_nothing() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("precious");
        fs::write(&path, b"data").expect("a small file");
        let error = CacheFile::create(&path, CACHE_BYTES_MIN).expect_err("the file exists");
        assert!(matches!(error, CacheError::Exists(_)), "{error}");
        assert_eq!(fs::read(&path).expect("still there"), b"data");
        let error = CacheFile::create(dir.path(), CACHE_BYTES_MIN).expect_err("a directory");
        assert!(matches!(error, CacheError::Exists(_)), "{error}");
    }

    #[test]
    fn a_full_disk_leaves_no_file_behind() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("cache");
        let free = free_bytes(dir.path()).expect("a file system that counts");
        let error = CacheFile::create(&path, free + (1 << 40)).expect_err("more than there is");
        assert!(matches!(error, CacheError::DiskFull { .. }), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn what_cannot_be_a_cache_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let missing = CacheFile::open(&dir.path().join("none")).expect_err("nothing there");
        assert!(matches!(missing, CacheError::Missing(_)), "{missing}");
        let kind = CacheFile::open(Path::new("/dev/null")).expect_err("a character device");
        assert!(matches!(kind, CacheError::Kind(_)), "{kind}");
        let small = CacheFile::create(&dir.path().join("small"), 4096).expect_err("too small");
        assert!(matches!(small, CacheError::TooSmall { .. }), "{small}");
        assert!(!dir.path().join("small").exists());
    }

    #[test]
    fn a_new_cache_is_blank_until_something_is_written() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("cache");
        let cache = CacheFile::create(&path, CACHE_BYTES_MIN).expect("room");
        assert!(cache.is_blank().expect("readable"));
        let mut block = tidepool_engine::mem::AlignedBuf::zeroed(4096);
        block[4095] = 1;
        rustix::io::pwrite(cache.fd(), &block, CACHE_BYTES_MIN - 4096).expect("one block");
        assert!(!cache.is_blank().expect("readable"));
    }
}
