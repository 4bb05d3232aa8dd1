//! What the reactor needs of a core. [`tidepool_engine::Engine`] is the real one; tests and
//! measurements of the front door put a volume in memory in its place. Generic, so it costs nothing.

use tidepool_engine::api::{Effect, Event, Extent, Mode, Nanos, VolumeId, VolumeSpec};
use tidepool_engine::mem::Arena;
use tidepool_engine::status::{DeviceStatus, VolumeStatus};

/// Settings of the core.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Bytes of the arena.
    pub arena_bytes: usize,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig { arena_bytes: 64 << 20 }
    }
}

/// What a recovered volume is attached with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attach {
    /// The owner's generation.
    pub generation: u64,
    /// Size of the image.
    pub size_bytes: u64,
    /// What to do with writes.
    pub mode: Mode,
    /// Dirty quota, 0 for the default share.
    pub dirty_bytes_max: u64,
    /// Only reads are served.
    pub read_only: bool,
    /// See [`VolumeSpec::attachment`].
    pub attachment: Vec<u8>,
    /// Nobody else has written: clean blocks stay.
    pub keep_clean: bool,
}

/// Why a volume was not added or attached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// There are too many volumes.
    #[error("the cache device serves as many volumes as it can")]
    TooMany,
}

/// Why a cache device could not be recovered.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {}

/// The core as the reactor drives it; see the crate `tidepool-engine` for what each does.
#[allow(missing_docs, reason = "the engine documents them")]
pub trait Core {
    fn arena(&self) -> &Arena;
    fn arena_mut(&mut self) -> &mut Arena;
    fn handle(&mut self, now: Nanos, event: Event);
    fn next_effect(&mut self, now: Nanos) -> Option<Effect>;
    fn next_deadline(&self, now: Nanos) -> Option<Nanos>;
    fn volumes(&self) -> Vec<(VolumeId, VolumeSpec)>;
    fn add_volume(&mut self, now: Nanos, spec: VolumeSpec, control: u64) -> Result<VolumeId, AddError>;
    fn attach(&mut self, now: Nanos, id: VolumeId, attach: Attach, control: u64) -> Result<(), AddError>;
    fn set_mode(&mut self, now: Nanos, id: VolumeId, mode: Mode, control: u64);
    fn set_dirty_bytes_max(&mut self, now: Nanos, id: VolumeId, bytes: u64, control: u64);
    fn drain(&mut self, now: Nanos, id: VolumeId, control: u64);
    fn remove(&mut self, now: Nanos, id: VolumeId, verify: bool, control: u64);
    fn shutdown(&mut self, now: Nanos, control: u64);
    fn volume_status(&self, now: Nanos, id: VolumeId) -> Option<VolumeStatus>;
    fn device_status(&self) -> DeviceStatus;
    fn block_status(&self, id: VolumeId, offset: u64, len: u64, extents_max: usize, out: &mut Vec<Extent>);
}
