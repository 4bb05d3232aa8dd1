//! Laying out a cache device, and looking at one without changing it.

use crate::api::{BLOCK_BYTES, IoError, VolumeId, VolumeSpec};
use crate::device::Device;
use crate::engine::{Engine, EngineConfig};
use crate::format::{CACHE_BYTES_MAX, CACHE_BYTES_MIN, Geometry, SUPERBLOCKS, byte, crc32c};
use crate::index::Lookup;
use crate::mem::AlignedBuf;
use crate::recover::{OpenError, RecoveryReport, load_checkpoint, read, read_superblock};
use crate::status::{DeviceStatus, VolumeStatus};

/// Bytes written at once while a device is laid out.
const FORMAT_CHUNK_BYTES: usize = 1 << 20;

/// How a device is laid out.
#[derive(Debug, Clone)]
pub struct FormatOptions {
    /// The cache's name; must be new for every format.
    pub uuid: [u8; 16],
    /// Bytes of the device to use.
    pub size_bytes: u64,
    /// Bytes of one segment, a power of two; chosen by size where `None`.
    pub segment_bytes: Option<u32>,
}

/// Why a device cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Too small, too large, or segments that do not fit.
    #[error("a cache of {0} bytes is not possible: it must have between {min} MiB and {max} TiB, and room for 24 segments",
        min = CACHE_BYTES_MIN >> 20, max = CACHE_BYTES_MAX >> 40)]
    Size(u64),
    /// The device failed.
    #[error("the device failed ({0:?})")]
    Device(IoError),
}

/// Lays out an empty cache. The whole device is written once, because later writes are then as fast
/// as the device is, and because nothing of what was there must be taken for ours. The superblock is
/// written last: an interrupted format leaves no cache.
///
/// # Errors
/// See [`FormatError`].
pub fn format_device(
    device: &mut dyn Device,
    options: &FormatOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), FormatError> {
    let size = options.size_bytes.min(device.size_bytes());
    let geo = Geometry::new(options.uuid, size, options.segment_bytes).ok_or(FormatError::Size(size))?;
    let zeroes = AlignedBuf::zeroed(FORMAT_CHUNK_BYTES);
    let total = geo.device_blocks * BLOCK_BYTES as u64;
    let mut at = 0;
    while at < total {
        let n = (total - at).min(FORMAT_CHUNK_BYTES as u64);
        device.write(at, &zeroes[..n as usize]).map_err(FormatError::Device)?;
        at += n;
        progress(at, total);
    }
    let config = EngineConfig::small();
    let mut engine = Engine::new(geo, config, 0, 0, 0);
    engine.checkpoint_blocking(device).map_err(FormatError::Device)?;
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
    block.copy_from_slice(&geo.superblock());
    for at in SUPERBLOCKS {
        device.write(byte(at), &block).map_err(FormatError::Device)?;
    }
    device.sync().map_err(FormatError::Device)
}

/// What a cache device holds, without changing it.
#[derive(Debug, Clone)]
pub struct Inspection {
    /// Identity and layout.
    pub geometry: Geometry,
    /// State as of now, tail included.
    pub device: DeviceStatus,
    /// The volumes.
    pub volumes: Vec<VolumeStatus>,
    /// What opening it would find.
    pub recovery: RecoveryReport,
}

/// Looks at a cache device. Nothing is written.
///
/// # Errors
/// See [`OpenError`].
pub fn inspect(device: &mut dyn Device) -> Result<Inspection, OpenError> {
    let (engine, recovery) = rebuild(device)?;
    let ids: Vec<VolumeId> = engine.volumes().into_iter().map(|(id, _)| id).collect();
    Ok(Inspection {
        geometry: engine.geo,
        device: engine.device_status(),
        volumes: ids.into_iter().filter_map(|id| engine.volume_status(0, id)).collect(),
        recovery,
    })
}

fn rebuild(device: &mut dyn Device) -> Result<(Engine, RecoveryReport), OpenError> {
    let geo = read_superblock(device)?;
    let loaded = load_checkpoint(device, &geo)?;
    let (mut engine, report, _) = Engine::rebuild(device, geo, &loaded, EngineConfig::small(), 0)?;
    engine.space.rebuild_queues();
    Ok((engine, report))
}

/// Outcome of verifying every cached block.
#[derive(Debug, Clone, Default)]
pub struct CheckReport {
    /// Blocks verified.
    pub blocks: u64,
    /// Of each damaged block: the volume's name, the byte offset in it, and whether it was dirty.
    pub damaged: Vec<(VolumeSpec, u64, bool)>,
    /// What recovery would find.
    pub recovery: RecoveryReport,
}

/// Most damaged blocks that a [`CheckReport`] names.
const DAMAGED_MAX: usize = 1000;

/// Verifies every cached block of a device against its checksum. Nothing is written.
///
/// # Errors
/// See [`OpenError`].
pub fn check(device: &mut dyn Device, progress: &mut dyn FnMut(u64, u64)) -> Result<CheckReport, OpenError> {
    let (engine, recovery) = rebuild(device)?;
    let mut report = CheckReport { recovery, ..CheckReport::default() };
    let total = engine.space.live_blocks();
    let mut buf = AlignedBuf::zeroed(64 * BLOCK_BYTES);
    for volume in engine.volumes.iter().flatten() {
        for object in volume.index.objects(0) {
            for (block, n, found) in volume.index.runs(object) {
                let Lookup::At(position) = found else { continue };
                let bytes = &mut buf[..n.min(64) as usize * BLOCK_BYTES];
                let mut done = 0;
                while done < n {
                    let now = (n - done).min(64);
                    let bytes = &mut bytes[..now as usize * BLOCK_BYTES];
                    let readable = read(device, byte(position + done), bytes).is_ok();
                    for (i, data) in bytes.chunks(BLOCK_BYTES).enumerate() {
                        let p = position + done + i as u32;
                        report.blocks += 1;
                        let good = readable && crc32c(data) == engine.space.marks.crc(p);
                        if !good && report.damaged.len() < DAMAGED_MAX {
                            let at = (block + u64::from(done) + i as u64) * BLOCK_BYTES as u64;
                            report.damaged.push((volume.spec.clone(), at, engine.space.marks.is_dirty(p)));
                        }
                    }
                    done += now;
                }
                progress(report.blocks, total);
            }
        }
    }
    Ok(report)
}
