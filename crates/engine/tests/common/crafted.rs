//! A cache whose log goes on behind its newest checkpoint with records that a test has written
//! itself.

#![allow(dead_code, reason = "each file of tests uses a part of it")]

use super::*;
use std::collections::BTreeMap;
use std::convert::Infallible;
use tidepool_engine::api::*;
use tidepool_engine::device::Device;
use tidepool_engine::format::*;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{Content, Contents, RecoveryReport};
use tidepool_engine::{Engine, EngineConfig, OpenError};
use zerocopy::{FromZeros, IntoBytes};

const BLOCK: usize = BLOCK_BYTES;
/// Blocks of each volume.
pub const BLOCKS: u64 = 4096;

/// One entry of a record: its volume's block, and the seed of its data.
#[derive(Clone, Copy)]
pub enum Part {
    Data(u64, u64),
    /// Its data does not verify.
    Torn(u64, u64),
    /// Its data says nothing, although it verifies.
    Void(u64, u64),
    Range(EntryKind, u64, u32),
}

/// A segment that a test fills.
#[derive(Clone)]
pub struct Segment {
    pub number: u32,
    pub sequence: u64,
    pub at: u32,
    pub records: Vec<SummaryRecord>,
    pub entries: Vec<Entry>,
}

/// What is found of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Data with this CRC.
    Data(u32),
    Zero,
    Lost,
    Damaged,
}

pub fn data(seed: u64) -> Holds {
    Holds::Data(crc32c(&pattern(seed, BLOCK)))
}

/// What is found on a device.
#[derive(Debug)]
pub struct Found {
    pub report: RecoveryReport,
    pub segments_free: u64,
    pub failed: Vec<bool>,
    pub dirty_blocks: Vec<u64>,
    /// By volume and block: what it holds, and whether it is dirty.
    pub blocks: BTreeMap<(u16, u64), (Holds, bool)>,
}

impl Found {
    pub fn holds(&self, volume: u16, block: u64) -> Option<Holds> {
        self.blocks.get(&(volume, block)).map(|(holds, _)| *holds)
    }

    fn on(device: &mut dyn Device) -> Result<Found, OpenError> {
        let contents = Contents::open(device)?;
        let volumes = contents.volumes();
        let mut blocks = BTreeMap::new();
        for volume in &volumes {
            let Ok(()) = contents.read(device, volume.id, &mut |stretch| {
                for at in (0..stretch.len as usize).step_by(BLOCK) {
                    let holds = match stretch.content {
                        Content::Data(bytes) => Holds::Data(crc32c(&bytes[at..at + BLOCK])),
                        Content::Zero => Holds::Zero,
                        Content::Lost => Holds::Lost,
                        Content::Damaged => Holds::Damaged,
                    };
                    let block = (stretch.offset + at as u64) / BLOCK as u64;
                    blocks.insert((volume.id.0, block), (holds, stretch.dirty));
                }
                Ok::<(), Infallible>(())
            });
        }
        Ok(Found {
            report: contents.recovery(),
            segments_free: contents.device().segments_free,
            failed: volumes.iter().map(|v| v.state == VolumeState::Failed).collect(),
            dirty_blocks: volumes.iter().map(|v| v.dirty_bytes / BLOCK as u64).collect(),
            blocks,
        })
    }
}

pub struct Crafted {
    pub device: MemoryDevice,
    pub geo: Geometry,
    /// That of the newest checkpoint.
    pub header: CheckpointHeader,
    /// Of each volume: the newest write record's sequence and CRC.
    pub last: [(u64, u32); 2],
}

impl Crafted {
    /// Two empty volumes.
    pub fn new() -> Crafted {
        let specs = ["a", "b"].map(|name| spec(name, BLOCKS * BLOCK as u64, Mode::WriteBack));
        Crafted::of(World::new(64 * MIB, &specs).device)
    }

    /// Blocks 0 and 1 of the first volume are in the open segment of the log, and the checkpoint
    /// has them: seeds 100 and 101.
    pub fn with_log() -> (Crafted, Segment) {
        let specs = ["a", "b"].map(|name| spec(name, BLOCKS * BLOCK as u64, Mode::WriteBack));
        let mut w = World::new(64 * MIB, &specs);
        w.backend_stopped = true;
        for block in 0..2 {
            w.write(0, block * BLOCK as u64, &pattern(100 + block, BLOCK));
        }
        // The first opening replays them, the second one finds nothing behind the checkpoint.
        w.reopen();
        w.reopen();
        let mut crafted = Crafted::of(w.device);
        let (number, at) =
            (crafted.header.open_segment[0].get(), crafted.header.open_block[0].get());
        let header = open::<SegmentHeader>(crafted.block(crafted.geo.segment_block(number)));
        let sequence = header.expect("an open segment").segment_sequence.get();
        let newest = (1..at).filter_map(|at| {
            let record =
                open::<RecordHeader>(crafted.block(crafted.geo.segment_block(number) + at))?;
            (record.magic == RECORD_MAGIC).then_some((record.sequence.get(), record.crc.get()))
        });
        crafted.last[0] = newest.max().expect("a record");
        (crafted, Segment { number, sequence, at, records: Vec::new(), entries: Vec::new() })
    }

    pub fn of(mut device: MemoryDevice) -> Crafted {
        let geo = *Contents::open(&mut device).expect("a cache").geometry();
        let slots = (0..SLOTS).map(|slot| byte(geo.slot_block(slot, 0)) as usize);
        let headers = slots.filter_map(|at| open::<CheckpointHeader>(&device.0[at..at + BLOCK]));
        let header = headers.max_by_key(|header| header.checkpoint.get()).expect("a checkpoint");
        Crafted { device, geo, header, last: [(0, 0); 2] }
    }

    pub fn block(&self, block: u32) -> &[u8] {
        &self.device.0[byte(block) as usize..][..BLOCK]
    }

    pub fn block_mut(&mut self, block: u32) -> &mut [u8] {
        &mut self.device.0[byte(block) as usize..][..BLOCK]
    }

    pub fn erase(&mut self, segment: &Segment, at: u32) {
        let block = self.geo.segment_block(segment.number) + at;
        self.block_mut(block).fill(0);
    }

    /// The sequence of the `n`th segment that is opened after the checkpoint.
    pub fn sequence(&self, n: u64) -> u64 {
        self.header.next_segment_sequence.get() + n
    }

    /// A segment that is opened, with its header.
    pub fn segment(&mut self, number: u32, sequence: u64, stream: Stream) -> Segment {
        self.segment_header(number, sequence, stream, |_| ());
        Segment { number, sequence, at: 1, records: Vec::new(), entries: Vec::new() }
    }

    pub fn segment_header(
        &mut self,
        number: u32,
        sequence: u64,
        stream: Stream,
        change: impl FnOnce(&mut SegmentHeader),
    ) {
        let mut header = SegmentHeader::new_zeroed();
        (header.magic, header.stream, header.uuid) = (SEGMENT_MAGIC, stream as u8, self.geo.uuid);
        header.version.set(FORMAT_VERSION);
        header.segment.set(number);
        header.segment_sequence.set(sequence);
        header.checkpoint = self.header.checkpoint;
        change(&mut header);
        let block = self.geo.segment_block(number);
        let bytes = self.block_mut(block);
        bytes.fill(0);
        bytes[..size_of::<SegmentHeader>()].copy_from_slice(header.as_bytes());
        seal::<SegmentHeader>(bytes);
    }

    /// Puts the next write record of a volume into a segment.
    pub fn write(&mut self, segment: &mut Segment, volume: u16, parts: &[Part]) {
        self.record(segment, RecordKind::Write, volume, parts, &[], |_| ());
    }

    /// The same with another header, or a record of another kind; `olds` are the old positions of a
    /// move.
    pub fn record(
        &mut self,
        segment: &mut Segment,
        kind: RecordKind,
        volume: u16,
        parts: &[Part],
        olds: &[u32],
        change: impl FnOnce(&mut RecordHeader),
    ) {
        let first = self.geo.segment_block(segment.number) + segment.at;
        let (mut entries, mut blocks) = (Vec::new(), 0);
        for part in parts {
            let (kind, block, seed) = match *part {
                Part::Data(block, seed) | Part::Torn(block, seed) => (EntryKind::Data, block, seed),
                Part::Void(block, seed) => (EntryKind::Void, block, seed),
                Part::Range(kind, block, len) => {
                    entries.push(Entry::new(kind, block, len));
                    continue;
                }
            };
            let mut content = pattern(seed, BLOCK);
            entries.push(Entry::new(kind, block, crc32c(&content)));
            content[0] ^= u8::from(matches!(part, Part::Torn(..)));
            blocks += 1;
            if segment.at + blocks < self.geo.segment_blocks {
                self.block_mut(first + blocks).copy_from_slice(&content);
            }
        }
        let mut header = RecordHeader::new_zeroed();
        (header.magic, header.kind, header.uuid) = (RECORD_MAGIC, kind as u8, self.geo.uuid);
        header.version.set(FORMAT_VERSION);
        header.volume.set(volume);
        header.entries.set(entries.len() as u16);
        header.blocks.set(blocks as u16);
        header.segment_sequence.set(segment.sequence);
        header.generation.set(1);
        (header.checkpoint, header.epoch) = (self.header.checkpoint, self.header.epoch);
        if kind == RecordKind::Write {
            let (sequence, crc) = self.last[usize::from(volume)];
            header.sequence.set(sequence + 1);
            header.chain.set(crc);
        }
        change(&mut header);
        let olds: Vec<u8> = olds.iter().flat_map(|old| old.to_le_bytes()).collect();
        let head = [header.as_bytes(), entries.as_bytes(), &olds].concat();
        let bytes = self.block_mut(first);
        bytes.fill(0);
        bytes[..head.len()].copy_from_slice(&head);
        let crc = seal::<RecordHeader>(bytes);
        if kind == RecordKind::Write {
            self.last[usize::from(volume)] = (header.sequence.get(), crc);
        }
        segment.records.push(SummaryRecord {
            sequence: header.sequence,
            header_crc: crc.into(),
            volume: header.volume,
            first_block: (segment.at as u16).into(),
            entries: header.entries,
            kind: header.kind,
            reserved: 0,
        });
        segment.entries.extend(entries);
        segment.at += 1 + blocks;
    }

    /// Closes a segment with its summary.
    pub fn summary(&mut self, segment: &Segment) {
        let blocks = Geometry::summary_blocks(segment.records.len(), segment.entries.len());
        let mut header = SummaryHeader::new_zeroed();
        (header.magic, header.uuid) = (SUMMARY_MAGIC, self.geo.uuid);
        header.segment.set(segment.number);
        header.blocks.set(blocks);
        header.segment_sequence.set(segment.sequence);
        header.records.set(segment.records.len() as u32);
        header.entries.set(segment.entries.len() as u32);
        let mut bytes =
            [header.as_bytes(), segment.records.as_bytes(), segment.entries.as_bytes()].concat();
        bytes.resize(blocks as usize * BLOCK, 0);
        seal::<SummaryHeader>(&mut bytes);
        let first = self.geo.segment_block(segment.number) + self.geo.segment_blocks - blocks;
        self.device.0[byte(first) as usize..][..bytes.len()].copy_from_slice(&bytes);
    }

    /// What is found. A daemon that opens the cache and is killed finds the same again.
    pub fn found(&self) -> Found {
        let mut device = Overlay::on(&self.device.0);
        let found = Found::on(&mut device).expect("a cache");
        Engine::open(&mut device, EngineConfig::small(), 0).expect("open");
        let again = Found::on(&mut device).expect("a cache");
        assert_eq!((&again.failed, &again.dirty_blocks), (&found.failed, &found.dirty_blocks));
        assert_eq!(again.blocks, found.blocks);
        assert_eq!((again.report.records_replayed, again.report.summaries_rebuilt), (0, 0));
        found
    }

    /// What is found after it has been opened once.
    pub fn opened(&self) -> Found {
        let mut device = Overlay::on(&self.device.0);
        Engine::open(&mut device, EngineConfig::small(), 0).expect("open");
        Found::on(&mut device).expect("a cache")
    }

    /// What is found without changing anything.
    pub fn seen(&self) -> Result<Found, OpenError> {
        Found::on(&mut Overlay::on(&self.device.0))
    }

    /// Opens it where some blocks of the device cannot be read.
    pub fn open_without(&self, unreadable: &[u32]) -> Result<RecoveryReport, OpenError> {
        let unreadable = unreadable.iter().copied().map(u64::from).collect();
        let mut device = Overlay { unreadable, ..Overlay::on(&self.device.0) };
        Engine::open(&mut device, EngineConfig::small(), 0).map(|(_, report)| report)
    }
}
