//! What a volume is added and attached with.

use crate::api::SECTOR_BYTES;

/// The largest volume.
pub const VOLUME_BYTES_MAX: u64 = 1 << 50;

/// Whether a volume can have so many bytes.
pub fn is_size(size_bytes: u64) -> bool {
    size_bytes > 0
        && size_bytes.is_multiple_of(SECTOR_BYTES as u64)
        && size_bytes <= VOLUME_BYTES_MAX
}

/// What the cache does with a volume's writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Acknowledged in the log, drained later.
    WriteBack,
    /// Acknowledged when the backend has them too; kept in the cache.
    WriteThrough,
    /// Sent to the backend alone; cached copies are dropped.
    WriteAround,
    /// The cache is not used.
    Off,
}

/// In what order dirty data goes to the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DrainOrder {
    /// By groups: with its redo, the image is at any time the volume as it once was.
    Grouped,
    /// Oldest object first. Between drains the image is no state that the volume ever had.
    #[default]
    Unordered,
}

/// A volume as it is added to a cache device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct VolumeSpec {
    /// Its name: 1 to 64 characters of `[A-Za-z0-9._-]`.
    pub name: String,
    /// Its backend's URI, at most 1,024 bytes; kept so that a restart finds it.
    pub backend: String,
    /// Bytes; a multiple of [`SECTOR_BYTES`].
    pub size_bytes: u64,
    /// What to do with writes.
    pub mode: Mode,
    /// In what order they are drained.
    pub drain: DrainOrder,
    /// Most dirty bytes it may hold; 0 for the default share of the cache.
    pub dirty_bytes_max: u64,
    /// Only reads are served.
    pub read_only: bool,
    /// The owner's generation of the volume (see the ownership record).
    pub generation: u64,
    /// Opaque bytes that a restart needs to take the image back (client address, lock cookie);
    /// at most [`ATTACHMENT_BYTES_MAX`].
    pub attachment: Vec<u8>,
}

/// Longest [`VolumeSpec::attachment`] in bytes.
pub const ATTACHMENT_BYTES_MAX: usize = 1024;

/// What a recovered volume is attached with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attach {
    /// The owner's new generation.
    pub generation: u64,
    /// Size of the image in bytes.
    pub size_bytes: u64,
    /// Mode to start in.
    pub mode: Mode,
    /// In what order dirty data is drained.
    pub drain: DrainOrder,
    /// Dirty quota; 0 for the default share.
    pub dirty_bytes_max: u64,
    /// Serve only reads.
    pub read_only: bool,
    /// See [`VolumeSpec::attachment`].
    pub attachment: Vec<u8>,
    /// There is proof that nobody else has written the image: clean blocks are kept.
    pub keep_clean: bool,
}

impl Attach {
    /// The volume as it was, in the generation that follows.
    pub fn again(spec: &VolumeSpec, keep_clean: bool) -> Attach {
        Attach {
            generation: spec.generation.saturating_add(1),
            size_bytes: spec.size_bytes,
            mode: spec.mode,
            drain: spec.drain,
            dirty_bytes_max: spec.dirty_bytes_max,
            read_only: spec.read_only,
            attachment: spec.attachment.clone(),
            keep_clean,
        }
    }
}

/// Why a volume cannot be added or attached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// Bad name.
    #[error("a volume's name has 1 to 64 characters of A-Z a-z 0-9 . _ - @, not {0:?}")]
    Name(String),
    /// Name in use.
    #[error("volume {0} exists already")]
    Exists(String),
    /// No such volume, or it is attached already.
    #[error("there is no detached volume with that number")]
    NotDetached,
    /// Too many.
    #[error("the cache device holds {0} volumes already, which is the most")]
    TooMany(u32),
    /// Size not a multiple of a sector, zero, or beyond what the index can hold.
    #[error(
        "a volume of {0} bytes cannot be served: the size must be a multiple of {SECTOR_BYTES} up to 1 PiB"
    )]
    Size(u64),
    /// The volume has become smaller than what the cache holds dirty.
    #[error("the image has shrunk to {0} bytes, but the cache holds newer data beyond its end")]
    Shrunk(u64),
    /// URI or attachment too long.
    #[error("the backend's {0} is too long")]
    TooLong(&'static str),
    /// The device has failed.
    #[error("the cache device has failed")]
    Device,
    /// The cache cannot hold as much as the owner of a copy was told.
    #[error("the cache has no room for a copy of the volume now")]
    NoRoom,
}

impl VolumeSpec {
    /// Whether a volume can be served so.
    pub(crate) fn check(&self) -> Result<(), AddError> {
        let good = |c: char| c.is_ascii_alphanumeric() || "._-@".contains(c);
        if self.name.is_empty() || self.name.len() > 64 || !self.name.chars().all(good) {
            return Err(AddError::Name(self.name.clone()));
        }
        if !is_size(self.size_bytes) {
            return Err(AddError::Size(self.size_bytes));
        }
        if self.backend.len() > 1024 {
            return Err(AddError::TooLong("URI"));
        }
        if self.attachment.len() > ATTACHMENT_BYTES_MAX {
            return Err(AddError::TooLong("attachment"));
        }
        Ok(())
    }
}
