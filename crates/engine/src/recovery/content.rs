//! What a cache device holds of its volumes, read while no engine runs on it: to look, to verify,
//! to rescue.

use crate::api::{BLOCK_BYTES, VolumeId};
use crate::base::device::Device;
use crate::base::mem::AlignedBuf;
use crate::base::shared::EngineConfig;
use crate::blocks::index::{Lookup, Position};
use crate::engine::Engine;
use crate::format::{Geometry, byte, crc32c};
use crate::ground::volume::Volume;
use crate::recovery::recover::{OpenError, Rebuilt, load_checkpoint, read, read_superblock};
use crate::status::{Content, DeviceStatus, RecoveryReport, Stretch, VolumeStatus};

/// Blocks that are read at once.
const READ_BLOCKS: usize = 64;

/// The volumes of a device as an engine would find them that was opened now, the log's tail
/// included.
pub struct Contents {
    engine: Engine,
    recovery: RecoveryReport,
    format_version: u16,
}

/// Blocks of one kind that are neighbours in the volume and on the device.
struct Run {
    block: u64,
    blocks: u32,
    position: Position,
}

impl Contents {
    /// Reads what recovery reads. Nothing is written.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(device: &mut dyn Device) -> Result<Contents, OpenError> {
        let geo = read_superblock(device)?;
        let loaded = load_checkpoint(device, &geo)?;
        let Rebuilt { mut engine, report: mut recovery, unreadable, .. } =
            Engine::rebuild(device, geo, &loaded, EngineConfig::small(), 0)?;
        if unreadable {
            // What can be read is shown all the same, for a rescue: it may not be all.
            engine.ground.volumes_mut().for_each(|volume| _ = volume.fail());
            recovery.volumes_failed = engine.ground.volumes().count() as u64;
        }
        engine.ground.space_mut().rebuild_queues();
        Ok(Contents { engine, recovery, format_version: loaded.header.format_version() })
    }

    /// The version that the device is of: that of its newest checkpoint.
    pub fn format_version(&self) -> u16 {
        self.format_version
    }

    /// Identity and layout of the device.
    pub fn geometry(&self) -> &Geometry {
        self.engine.ground.geo()
    }

    /// State of the device.
    pub fn device(&self) -> DeviceStatus {
        self.engine.device_status()
    }

    /// What opening it would find.
    pub fn recovery(&self) -> RecoveryReport {
        self.recovery
    }

    /// The volumes.
    pub fn volumes(&self) -> Vec<VolumeStatus> {
        let ids = self.engine.volumes().into_iter().map(|(id, _)| id);
        ids.filter_map(|id| self.engine.volume_status(0, id)).collect()
    }

    /// Blocks on the device, all volumes.
    pub(crate) fn live_blocks(&self) -> u64 {
        self.engine.ground.space().live_blocks()
    }

    /// Shows everything that the device holds of a volume, in the volume's order and verified,
    /// until `see` fails. Of a volume that is not there nothing is shown.
    ///
    /// # Errors
    /// That of `see`; what cannot be read is shown as [`Content::Damaged`].
    pub fn read<E>(
        &self,
        device: &mut dyn Device,
        id: VolumeId,
        see: &mut dyn FnMut(Stretch<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(volume) = self.engine.ground.get(id) else { return Ok(()) };
        let mut buf = AlignedBuf::zeroed(READ_BLOCKS * BLOCK_BYTES);
        for object in volume.ledger().index().objects(0) {
            for (block, blocks, found) in volume.ledger().index().runs(object) {
                let (dirty, content) = match found {
                    Lookup::At(position) => {
                        self.read_run(
                            device,
                            volume,
                            Run { block, blocks, position },
                            &mut buf,
                            see,
                        )?;
                        continue;
                    }
                    Lookup::Absent => continue,
                    Lookup::Zero => (true, Content::Zero),
                    Lookup::Lost => (true, Content::Lost),
                };
                see(stretch(volume, block, u64::from(blocks), dirty, content))?;
            }
        }
        Ok(())
    }

    fn read_run<E>(
        &self,
        device: &mut dyn Device,
        volume: &Volume,
        run: Run,
        buf: &mut AlignedBuf,
        see: &mut dyn FnMut(Stretch<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut done = 0;
        while done < run.blocks {
            let count = (run.blocks - done).min(READ_BLOCKS as u32);
            let (block, position) = (run.block + u64::from(done), run.position + done);
            let bytes = &mut buf[..count as usize * BLOCK_BYTES];
            let readable = read(device, byte(position), bytes).is_ok();
            let mut kinds = [(false, false); READ_BLOCKS];
            for (i, data) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
                let p = position + i as u32;
                let verifies = |data: &[u8]| crc32c(data) == self.engine.ground.marks().crc(p);
                // A bad sector spoils its own block only, and a bad transfer not even that.
                let good = (readable && verifies(data))
                    || (read(device, byte(p), data).is_ok() && verifies(data));
                kinds[i] = (self.engine.ground.marks().is_dirty(p), good);
            }
            let mut at = 0;
            for alike in kinds[..count as usize].chunk_by(|a, b| a == b) {
                let (dirty, good) = alike[0];
                let data = &bytes[at * BLOCK_BYTES..(at + alike.len()) * BLOCK_BYTES];
                let content = if good { Content::Data(data) } else { Content::Damaged };
                see(stretch(volume, block + at as u64, alike.len() as u64, dirty, content))?;
                at += alike.len();
            }
            done += count;
        }
        Ok(())
    }
}

/// A stretch of whole blocks, cut at the end of the volume.
fn stretch<'a>(
    volume: &Volume,
    block: u64,
    blocks: u64,
    dirty: bool,
    content: Content<'a>,
) -> Stretch<'a> {
    let offset = block * BLOCK_BYTES as u64;
    let len = (blocks * BLOCK_BYTES as u64).min(volume.spec().size_bytes.saturating_sub(offset));
    let content = match content {
        Content::Data(data) => Content::Data(&data[..len as usize]),
        other => other,
    };
    Stretch { offset, len, dirty, content }
}
