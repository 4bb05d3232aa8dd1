//! Laying out a cache device, and looking at one without changing it.

use crate::api::{BLOCK_BYTES, IoError, VolumeSpec};
use crate::base::device::Device;
use crate::base::mem::AlignedBuf;
use crate::base::shared::EngineConfig;
use crate::engine::Engine;
use crate::format::{CACHE_BYTES_MAX, CACHE_BYTES_MIN, Geometry, SUPERBLOCKS, byte};
use crate::recovery::content::Contents;
use crate::recovery::recover::OpenError;
use crate::status::{Content, Inspection, RecoveryReport, VolumeStatus};
use std::convert::Infallible;

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
/// as the device is, and because nothing of what was there must be taken for ours. The superblock
/// is written last: an interrupted format leaves no cache.
///
/// # Errors
/// See [`FormatError`].
pub fn format_device(
    device: &mut dyn Device,
    options: &FormatOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), FormatError> {
    let size = options.size_bytes.min(device.size_bytes());
    let geo =
        Geometry::new(options.uuid, size, options.segment_bytes).ok_or(FormatError::Size(size))?;
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
    engine.checkpoint.write_blocking(&mut engine.ground, device).map_err(FormatError::Device)?;
    let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
    block.copy_from_slice(&geo.superblock());
    for at in SUPERBLOCKS {
        device.write(byte(at), &block).map_err(FormatError::Device)?;
    }
    device.sync().map_err(FormatError::Device)
}

/// Looks at a cache device. Nothing is written.
///
/// # Errors
/// See [`OpenError`].
pub fn inspect(device: &mut dyn Device) -> Result<Inspection, OpenError> {
    let contents = Contents::open(device)?;
    Ok(Inspection {
        geometry: *contents.geometry(),
        format_version: contents.format_version(),
        device: contents.device(),
        volumes: contents.volumes(),
        recovery: contents.recovery(),
    })
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
pub fn check(
    device: &mut dyn Device,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<CheckReport, OpenError> {
    let contents = Contents::open(device)?;
    let mut report = CheckReport { recovery: contents.recovery(), ..CheckReport::default() };
    let total = contents.live_blocks();
    for VolumeStatus { id, spec, .. } in contents.volumes() {
        let seen: Result<(), Infallible> = contents.read(device, id, &mut |stretch| {
            let damaged = match stretch.content {
                Content::Zero | Content::Lost => return Ok(()),
                Content::Data(_) => false,
                Content::Damaged => true,
            };
            for at in (stretch.offset..stretch.offset + stretch.len).step_by(BLOCK_BYTES) {
                report.blocks += 1;
                if damaged && report.damaged.len() < DAMAGED_MAX {
                    report.damaged.push((spec.clone(), at, stretch.dirty));
                }
            }
            progress(report.blocks, total);
            Ok(())
        });
        let Ok(()) = seen;
    }
    Ok(report)
}
