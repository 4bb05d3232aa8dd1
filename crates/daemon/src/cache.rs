//! Creates and formats cache devices. A cache file is made under another name and gets its own only
//! when it is complete, so that an interrupted format leaves nothing that looks like a cache.

use crate::failure::reason;
use crate::units::Size;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use tidepool_driver::{CACHE_BYTES_MIN, CacheError, CacheFile};
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::{FormatError, FormatOptions, OpenError};
use uuid::Uuid;

/// Told how much of a format is done: bytes done, bytes in all.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Why a cache could not be made; one line each.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// The device refused.
    #[error("cannot use the cache {0}")]
    Device(#[from] CacheError),
    /// The core refused.
    #[error("cannot format the cache {}: {source}", .path.display())]
    Format {
        /// The cache.
        path: PathBuf,
        /// Why.
        source: FormatError,
    },
    /// The size asked for is not the size that is there.
    #[error(
        "cannot use the cache {}: it has {found}, not {wanted}, and a cache does not change its size (leave --cache-size out)",
        .path.display()
    )]
    OtherSize {
        /// The cache.
        path: PathBuf,
        /// Its size.
        found: Size,
        /// The size asked for.
        wanted: Size,
    },
    /// Another process is making the same cache.
    #[error("cannot create the cache {}: another process is creating it", .path.display())]
    UnderWay {
        /// The cache.
        path: PathBuf,
    },
    /// The size is missing.
    #[error("cannot create the cache {}: how large shall it be? (give {option} SIZE)", .path.display())]
    NoSize {
        /// The cache.
        path: PathBuf,
        /// The option that says it.
        option: &'static str,
    },
    /// It holds data that would be lost.
    #[error(
        "cannot format the cache {}: it alone has the newest data of {held}; drain it (tidepool serve, then tidepool volume drain --all), save it (tidepool cache export), or lose it with --discard-dirty",
        .path.display()
    )]
    Dirty {
        /// The cache.
        path: PathBuf,
        /// Its volumes, with how much.
        held: String,
    },
    /// It may hold such data.
    #[error(
        "cannot format the cache {}: whether it has the newest data of an image is not known: {source} (--discard-dirty gives up whatever it has)",
        .path.display()
    )]
    Unreadable {
        /// The cache.
        path: PathBuf,
        /// Why nobody knows.
        source: OpenError,
    },
    /// The system refused.
    #[error("cannot create the cache {}: {why}", .path.display())]
    System {
        /// The cache.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

/// What is at a cache's path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    File { size_bytes: u64 },
    BlockDevice,
    Other,
}

fn look(path: &Path) -> Result<Found, MakeError> {
    match fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(Found::File { size_bytes: found.len() }),
        Ok(found) if found.file_type().is_block_device() => Ok(Found::BlockDevice),
        Ok(_) => Ok(Found::Other),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Found::Nothing),
        Err(e) => Err(MakeError::System { path: path.to_owned(), why: reason(&e) }),
    }
}

/// Makes sure that there is a cache at `path`: creates one of `size` where there is nothing. An
/// existing one is left as it is; whether it is a cache shows when it is opened.
///
/// # Errors
/// See [`MakeError`]; nothing has been changed then.
pub fn ensure(path: &Path, size: Option<Size>, progress: Progress<'_>) -> Result<(), MakeError> {
    match (look(path)?, size) {
        (Found::Nothing, None) => Err(CacheError::Missing(path.to_owned()).into()),
        (Found::Nothing, Some(size)) => make(path, size, progress),
        (Found::File { size_bytes }, Some(wanted)) if !same_size(size_bytes, wanted) => {
            Err(MakeError::OtherSize { path: path.to_owned(), found: Size(size_bytes), wanted })
        }
        (Found::BlockDevice, Some(size)) if CacheFile::open(path)?.is_blank()? => {
            make(path, size, progress)
        }
        _ => Ok(()),
    }
}

/// A cache file is a whole number of blocks.
fn same_size(found: u64, wanted: Size) -> bool {
    found == wanted.0.next_multiple_of(BLOCK_BYTES as u64)
}

/// What a new cache may take the place of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replace {
    /// Of nothing.
    Nothing,
    /// Of anything but a cache that alone has the newest data of an image, or may have.
    AllButDirty,
    /// Of anything.
    Everything,
}

/// Refuses to lose what a cache alone has.
fn keep_dirty(path: &Path, cache: &CacheFile) -> Result<(), MakeError> {
    let found = match tidepool_engine::inspect(&mut cache.blocking()) {
        Ok(found) => found,
        Err(OpenError::NotACache) => return Ok(()),
        // Shorter than what is looked for in it.
        Err(OpenError::Device(..)) if cache.len_bytes() < CACHE_BYTES_MIN => return Ok(()),
        Err(source) => return Err(MakeError::Unreadable { path: path.to_owned(), source }),
    };
    let dirty = found.volumes.iter().filter(|volume| volume.dirty);
    let held: Vec<String> = dirty
        .map(|volume| {
            let bytes = Size(volume.dirty_bytes + volume.dirty_zero_bytes).approximate();
            format!("{} ({bytes}, {})", volume.spec.name, volume.spec.backend)
        })
        .collect();
    match held.is_empty() {
        true => Ok(()),
        false => Err(MakeError::Dirty { path: path.to_owned(), held: held.join(", ") }),
    }
}

/// Makes a new cache of `size`. What is there is lost, if `replace` allows that. A block device
/// without a `size` is used whole.
///
/// # Errors
/// See [`MakeError`]; what `replace` does not allow to be lost has not been changed.
pub fn format(
    path: &Path,
    size: Option<Size>,
    replace: Replace,
    progress: Progress<'_>,
) -> Result<(), MakeError> {
    let keep = |cache: &CacheFile| match replace {
        Replace::Everything => Ok(()),
        _ => keep_dirty(path, cache),
    };
    let needs_size = || MakeError::NoSize { path: path.to_owned(), option: "--size" };
    match look(path)? {
        Found::Nothing => make(path, size.ok_or_else(needs_size)?, progress),
        Found::File { size_bytes } if replace != Replace::Nothing => {
            // The lock tells whether somebody uses it; the descriptor is held until the new one
            // stands.
            let old = CacheFile::open(path)?;
            keep(&old)?;
            make(path, size.unwrap_or(Size(size_bytes)), progress)
        }
        Found::File { .. } => Err(CacheError::Exists(path.to_owned()).into()),
        Found::BlockDevice => {
            let cache = CacheFile::open(path)?;
            if replace == Replace::Nothing && !cache.is_blank()? {
                return Err(CacheError::NotBlank(path.to_owned()).into());
            }
            keep(&cache)?;
            let size_bytes = size.map_or(cache.len_bytes(), |size| size.0);
            if size_bytes > cache.len_bytes() {
                let (wanted, free) = (size_bytes, Some(cache.len_bytes()));
                return Err(CacheError::DiskFull { path: path.to_owned(), wanted, free }.into());
            }
            write(&cache, path, size_bytes, progress)
        }
        Found::Other => Err(CacheError::Kind(path.to_owned()).into()),
    }
}

/// The name under which a cache file is made.
pub fn unfinished_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".unfinished");
    name.into()
}

fn make(path: &Path, size: Size, progress: Progress<'_>) -> Result<(), MakeError> {
    if look(path)? == Found::BlockDevice {
        let cache = CacheFile::create(path, size.0)?;
        return write(&cache, path, size.0, progress);
    }
    let unfinished = unfinished_path(path);
    clear_unfinished(path, &unfinished)?;
    let cache =
        CacheFile::create(&unfinished, size.0).map_err(|e| MakeError::Device(renamed(e, path)))?;
    let size_bytes = cache.len_bytes();
    if let Err(error) = write(&cache, path, size_bytes, progress) {
        cache.discard();
        return Err(error);
    }
    let named = fs::rename(&unfinished, path).and_then(|()| {
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::File::open(directory)?.sync_all()
    });
    named.map_err(|e| {
        cache.discard();
        MakeError::System { path: path.to_owned(), why: reason(&e) }
    })
}

/// Removes what a killed format left behind.
fn clear_unfinished(path: &Path, unfinished: &Path) -> Result<(), MakeError> {
    match CacheFile::open(unfinished) {
        Ok(left) => {
            left.discard();
            Ok(())
        }
        Err(CacheError::Missing(_)) => Ok(()),
        Err(CacheError::InUse { .. }) => Err(MakeError::UnderWay { path: path.to_owned() }),
        Err(error) => Err(error.into()),
    }
}

fn write(
    cache: &CacheFile,
    path: &Path,
    size_bytes: u64,
    progress: Progress<'_>,
) -> Result<(), MakeError> {
    let options =
        FormatOptions { uuid: Uuid::new_v4().into_bytes(), size_bytes, segment_bytes: None };
    tidepool_engine::format_device(&mut cache.blocking(), &options, progress)
        .map_err(|source| MakeError::Format { path: path.to_owned(), source })
}

/// The error under the name that the user gave.
fn renamed(error: CacheError, path: &Path) -> CacheError {
    let name = || path.to_owned();
    match error {
        CacheError::Missing(_) => CacheError::Missing(name()),
        CacheError::Kind(_) => CacheError::Kind(name()),
        CacheError::Exists(_) => CacheError::Exists(name()),
        CacheError::NotBlank(_) => CacheError::NotBlank(name()),
        CacheError::InUse { holder, .. } => CacheError::InUse { path: name(), holder },
        CacheError::TooSmall { size, .. } => CacheError::TooSmall { path: name(), size },
        CacheError::DiskFull { wanted, free, .. } => {
            CacheError::DiskFull { path: name(), wanted, free }
        }
        CacheError::TooLarge { wanted, .. } => CacheError::TooLarge { path: name(), wanted },
        CacheError::Io { action, source, .. } => CacheError::Io { path: name(), action, source },
    }
}
