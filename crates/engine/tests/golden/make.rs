//! Makes golden images of the version that is current:
//! `cargo test -p tidepool-engine --test golden -- --ignored make`.
//!
//! The core is driven step by step on a device in memory, so that the same commit makes the same
//! bytes. An image that exists stays as it is.

use crate::common::{MIB, World, spec};
use crate::content::{Holds, Stretch, push};
use crate::manifest::{Golden, Manifest, Volume, exists, mode_name};
use crate::{attach, found, recovery};
use std::collections::{BTreeSet, HashSet};
use std::ops::Range;
use tidepool_engine::Contents;
use tidepool_engine::api::*;
use tidepool_engine::format::{
    self, Entry, FORMAT_VERSION, RECORD_MAGIC, RecordHeader, RecordKind, SegmentHeader, Stream,
};
use tidepool_engine::status::VolumeState;

/// Bytes of every device: the smallest that can be.
const DEVICE_BYTES: u64 = 64 * MIB;
/// Most blocks of one request.
const REQUEST_BLOCKS: u64 = 64;
/// Longer than what has been fetched waits before it is written to the cache.
const UNTIL_FILLED: Nanos = 30_000_000;
const SECOND: Nanos = 1_000_000_000;

/// A cache that lives, and what its volumes must hold.
struct Life {
    w: World,
    models: Vec<Vec<Holds>>,
    /// Volumes and blocks that were zeroed so that the backend keeps their space.
    kept: Vec<(u16, Range<u64>)>,
    /// Clone and parent.
    family: Option<(u16, u16)>,
}

fn in_requests(blocks: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = blocks.end;
    blocks.step_by(REQUEST_BLOCKS as usize).map(move |at| at..(at + REQUEST_BLOCKS).min(end))
}

impl Life {
    fn new(segment_bytes: u64) -> Life {
        let w = World::with_segments(DEVICE_BYTES, segment_bytes as u32, &[]);
        Life { w, models: Vec::new(), kept: Vec::new(), family: None }
    }

    /// Adds a volume whose image holds this in stretches that are equally long.
    fn add(&mut self, spec: VolumeSpec, fills: &[u32]) -> u16 {
        let number = self.models.len() as u16;
        let blocks = spec.size_bytes.div_ceil(BLOCK_BYTES as u64);
        let each = blocks.div_ceil(fills.len() as u64);
        let holds: Vec<Holds> =
            (0..blocks).map(|b| Holds::Fill(fills[(b / each) as usize])).collect();
        let mut image: Vec<u8> =
            (0..).zip(&holds).flat_map(|(block, holds)| holds.content(block)).collect();
        image.truncate(spec.size_bytes as usize);
        self.w.images.push(image);
        self.models.push(holds);
        self.w
            .control(|e, now, c| assert_eq!(e.add_volume(now, spec, c), Ok(VolumeId(number))))
            .expect("added");
        self.w.flush(number); // From here on writes do not wait for stable media.
        number
    }

    fn remove(&mut self, number: u16) {
        self.w.control(|e, now, c| e.remove(now, VolumeId(number), true, c)).expect("removed");
        self.w.images[usize::from(number)].clear();
        self.models[usize::from(number)].clear();
    }

    /// Bytes of a volume from the first of these blocks on.
    fn range(&self, number: u16, blocks: &Range<u64>) -> (u64, u64) {
        let offset = blocks.start * BLOCK_BYTES as u64;
        let end = self.w.images[usize::from(number)].len() as u64;
        (offset, (blocks.end * BLOCK_BYTES as u64).min(end) - offset)
    }

    fn set(&mut self, number: u16, blocks: Range<u64>, holds: Holds) {
        self.models[usize::from(number)][blocks.start as usize..blocks.end as usize].fill(holds);
    }

    /// Writes that no client is promised: what was acknowledged and is not durable.
    fn write_unmodelled(&mut self, number: u16, blocks: Range<u64>, holds: Holds) {
        for part in in_requests(blocks) {
            let (offset, len) = self.range(number, &part);
            let mut bytes: Vec<u8> = part.flat_map(|block| holds.content(block)).collect();
            bytes.truncate(len as usize);
            self.w.write(number, offset, &bytes);
        }
    }

    fn write(&mut self, number: u16, blocks: Range<u64>, holds: Holds) {
        self.write_unmodelled(number, blocks.clone(), holds);
        self.set(number, blocks, holds);
    }

    fn stamp(&mut self, number: u16, blocks: Range<u64>, stamp: u32) {
        self.write(number, blocks, Holds::Stamp(stamp));
    }

    /// Discards blocks, or zeroes them so that the backend keeps their space.
    fn zero(&mut self, number: u16, blocks: Range<u64>, keep: bool) {
        let (offset, len) = self.range(number, &blocks);
        let op = match keep {
            true => Op::WriteZeroes { fua: false, no_hole: true },
            false => Op::Discard { fua: false },
        };
        self.w.op(number, op, offset, len).expect("zeroes");
        self.kept.extend(keep.then_some((number, blocks.clone())));
        self.set(number, blocks, Holds::Zero);
    }

    fn read(&mut self, number: u16, blocks: Range<u64>) {
        for part in in_requests(blocks) {
            let (offset, len) = self.range(number, &part);
            let bytes = self.w.read(number, offset, len);
            for (block, bytes) in part.zip(bytes.chunks(BLOCK_BYTES)) {
                let holds = self.models[usize::from(number)][block as usize];
                assert!(
                    holds.content(block)[..bytes.len()] == *bytes,
                    "volume {number}, block {block}"
                );
            }
        }
    }

    /// Reads what is not cached, so that it is from then on.
    fn fill(&mut self, number: u16, blocks: Range<u64>) {
        for part in in_requests(blocks) {
            self.read(number, part);
            self.w.pass(UNTIL_FILLED);
        }
    }

    /// Reads what is cached of a volume, through itself or its clone.
    fn use_again(&mut self, through: u16, number: u16) {
        let contents = Contents::open(&mut self.w.device).expect("a cache");
        for stretch in found(&contents, &mut self.w.device, VolumeId(number)) {
            self.read(through, stretch.first..stretch.last + 1);
        }
    }

    /// The daemon dies and comes back.
    fn restart(&mut self) {
        self.w.reopen();
        let family = self.family.map(|(clone, parent)| self.volume(clone, Some(parent)));
        attach(&mut self.w, family.as_slice());
    }

    /// A checkpoint of the state now, with a new attachment of a volume in it.
    fn checkpoint(&mut self, number: u16, attachment: Vec<u8>) {
        let set = |e: &mut tidepool_engine::Engine, now, c| {
            e.set_attachment(now, VolumeId(number), attachment, c);
        };
        self.w.control(set).expect("recorded");
    }

    /// The only copy of a block goes bad, and somebody notices.
    fn lose(&mut self, number: u16, block: u64) {
        let holds = self.models[usize::from(number)][block as usize];
        self.w.corrupt(&holds.content(block));
        let (offset, len) = self.range(number, &(block..block + 1));
        assert_eq!(self.w.try_read(number, offset, len), Err(RequestError::Io));
        self.set(number, block..block + 1, Holds::Lost);
    }

    /// What dirty blocks a volume has is forgotten with the header of their record: it fails when
    /// the cache is opened.
    fn fail(&mut self, number: u16) {
        let of_volume = |block: &&mut [u8]| {
            format::open::<RecordHeader>(block)
                .is_some_and(|header| header.magic == RECORD_MAGIC && header.volume.get() == number)
        };
        let mut blocks = self.w.device.0.chunks_mut(BLOCK_BYTES);
        blocks.find(of_volume).expect("a record of it").fill(0);
        self.restart();
        assert_eq!(self.w.status(number).state, VolumeState::Failed);
    }

    /// A volume as the manifest tells it, but for what it holds.
    fn volume(&self, number: u16, parent: Option<u16>) -> Volume {
        let all = self.w.engine.volumes();
        let (_, spec) = all.into_iter().find(|(id, _)| id.0 == number).expect("a volume");
        let drain = if spec.drain == DrainOrder::Grouped { "grouped" } else { "unordered" };
        Volume {
            number,
            name: spec.name,
            backend: spec.backend,
            size_bytes: spec.size_bytes,
            mode: mode_name(spec.mode).into(),
            drain: drain.into(),
            dirty_bytes_max: spec.dirty_bytes_max,
            read_only: spec.read_only,
            generation: spec.generation,
            attachment: spec.attachment.iter().map(|byte| format!("{byte:02x}")).collect(),
            failed: self.w.status(number).state == VolumeState::Failed,
            parent,
            image: Vec::new(),
            cache: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// The device as it is now is what a golden image is made of.
    fn save(mut self, name: &str, about: &str) {
        let volumes: Vec<u16> = self.w.engine.volumes().iter().map(|(id, _)| id.0).collect();
        let volumes = volumes.into_iter().map(|number| {
            let parent = self.family.filter(|family| family.0 == number).map(|family| family.1);
            self.volume(number, parent)
        });
        let mut volumes: Vec<Volume> = volumes.collect();
        let contents = Contents::open(&mut self.w.device).expect("a cache");
        for volume in &mut volumes {
            volume.cache = found(&contents, &mut self.w.device, VolumeId(volume.number));
            volume.image = self.image(volume.number);
            volume.kept = self.kept(volume.number);
            if !volume.failed {
                self.compare(volume);
            }
        }
        let manifest = Manifest {
            about: about.into(),
            format_version: FORMAT_VERSION,
            device_bytes: DEVICE_BYTES,
            recovery: recovery(&contents),
            volumes,
        };
        println!("{name}: {:?}", manifest.recovery);
        Golden { name: format!("v{FORMAT_VERSION}/{name}"), manifest, device: self.w.device.0 }
            .write();
    }

    fn image(&self, number: u16) -> Vec<Stretch> {
        let mut list = Vec::new();
        for (block, bytes) in (0..).zip(self.w.images[usize::from(number)].chunks(BLOCK_BYTES)) {
            match Holds::of(bytes, block).expect("nothing else was written") {
                Holds::Zero => {}
                holds => push(&mut list, block, None, holds),
            }
        }
        list
    }

    fn kept(&self, number: u16) -> Vec<Stretch> {
        let own = self.kept.iter().filter(|(of, _)| *of == number);
        let blocks: BTreeSet<u64> = own.flat_map(|(_, blocks)| blocks.clone()).collect();
        let model = &self.models[usize::from(number)];
        let mut list = Vec::new();
        for block in blocks.into_iter().filter(|&block| model[block as usize] == Holds::Zero) {
            push(&mut list, block, None, Holds::Zero);
        }
        list
    }

    /// Image and cache together are what clients were told.
    fn compare(&self, volume: &Volume) {
        let model = &self.models[usize::from(volume.number)];
        for ((block, holds), found) in (0..).zip(model).zip(volume.expected()) {
            let found = found.map_or(Some(Holds::Lost), |bytes| Holds::of(&bytes, block));
            assert_eq!(found, Some(*holds), "volume {}, block {block}", volume.name);
        }
    }
}

/// What kinds of things stand on a device.
#[derive(Debug, Default)]
struct Census {
    /// Stream and kind of records.
    records: HashSet<(Stream, u8)>,
    /// The same of those behind the newest checkpoint.
    tail: HashSet<(Stream, u8)>,
    /// Kinds of entries.
    entries: BTreeSet<u8>,
    epochs: BTreeSet<u64>,
    segments: u32,
    newest_segment: u64,
}

fn census(device: &[u8], contents: &Contents) -> Census {
    let geo = contents.geometry();
    let mut census = Census { segments: geo.segments, ..Census::default() };
    let block = |at: u32| &device[at as usize * BLOCK_BYTES..][..BLOCK_BYTES];
    for first in (0..geo.segments).map(|segment| geo.segment_block(segment)) {
        let Some(header) = format::open::<SegmentHeader>(block(first)) else { continue };
        census.newest_segment = census.newest_segment.max(header.segment_sequence.get());
        let stream = Stream::from_number(header.stream).expect("a stream");
        for block in (first + 1..first + geo.segment_blocks).map(block) {
            let record = format::open::<RecordHeader>(block).filter(|record| {
                record.magic == RECORD_MAGIC && record.segment_sequence == header.segment_sequence
            });
            let Some(record) = record else { continue };
            census.records.insert((stream, record.kind));
            if record.checkpoint.get() == contents.recovery().checkpoint {
                census.tail.insert((stream, record.kind));
            }
            census.epochs.insert(record.epoch.get());
            let entries = block[size_of::<RecordHeader>()..].chunks(size_of::<Entry>());
            census.entries.extend(entries.take(record.entries.get().into()).map(|entry| entry[7]));
        }
    }
    census
}

fn grouped(name: &str, size_bytes: u64) -> VolumeSpec {
    VolumeSpec { drain: DrainOrder::Grouped, ..spec(name, size_bytes, Mode::WriteBack) }
}

const WRITE: u8 = RecordKind::Write as u8;
const FILL: u8 = RecordKind::Fill as u8;
const MOVE: u8 = RecordKind::Move as u8;

// The volumes of the image `killed`.
const BASE: u16 = 0;
const CLONE: u16 = 1;
const ORDERED: u16 = 2;
const GONE: u16 = 3;
const PLAIN: u16 = 4;
const THROUGH: u16 = 5;
const AROUND: u16 = 6;
const OFF: u16 = 7;
const FAILED: u16 = 8;

/// Everything that the format has, in one cache.
fn killed() {
    let mut life = all_kinds();
    young(&mut life);
    crowded(&mut life);
    undrained(&mut life);
    behind_the_checkpoint(&mut life);
    has_everything(&mut life);
    life.save(
        "killed",
        "A daemon that was killed under load, all kinds of volumes: a read-only parent (0) and its clone (1), one with a grouped \
         drain whose last block is a part (2), a removed one (3), one with an unordered drain and a lost block (4), write-through (5), \
         write-around (6), off (7), and one that has lost what cannot be named (8). Backends were stopped: groups are committed, \
         closed and open, large ranges are discarded and zeroed with blocks above them. Blocks were moved by reclaim and fetched \
         a second time. The log goes on behind the newest checkpoint, and its last record but one is torn.",
    );
}

/// A cache with a volume of every kind.
fn all_kinds() -> Life {
    let mut life = Life::new(2 * MIB);
    let fills = [1, 2, 3, 4, 5, 6, 7, 8];
    let plain = |name, mib| spec(name, mib * MIB, Mode::WriteBack);
    let large = |spec| VolumeSpec { dirty_bytes_max: 12 * MIB, ..spec };
    life.add(VolumeSpec { read_only: true, ..plain("@base", 44) }, &fills);
    life.add(grouped("clone", 44 * MIB), &fills);
    life.add(large(grouped("grouped", 24 * MIB + 1536)), &[20, 21]);
    life.add(plain("gone", 4), &[22]);
    life.add(large(plain("unordered", 24)), &[23, 24]);
    life.add(spec("through", 8 * MIB, Mode::WriteThrough), &[25]);
    life.add(spec("around", 8 * MIB, Mode::WriteAround), &[26]);
    life.add(spec("off", 4 * MIB, Mode::Off), &[27]);
    life.add(plain("failed", 4), &[28]);
    life.remove(GONE);
    life.family = Some((CLONE, BASE));
    life.w.stopped = vec![VolumeId(FAILED)];
    life.stamp(FAILED, 0..8, 1);
    life.restart();
    life.fail(FAILED);
    life
}

/// What is drained stays as clean blocks of the log.
fn young(life: &mut Life) {
    life.stamp(ORDERED, 0..256, 2);
    life.w.drain(ORDERED);
    life.stamp(PLAIN, 0..128, 3);
    life.write(PLAIN, 128..512, Holds::Fill(30));
    life.w.drain(PLAIN);
    life.stamp(THROUGH, 0..64, 4);
    life.fill(AROUND, 0..64);
    life.stamp(AROUND, 8..12, 5);
    life.stamp(OFF, 0..8, 7);
    life.restart();
}

/// More is read than the cache holds: what was used twice is moved, what comes back is remembered.
fn crowded(life: &mut Life) {
    life.fill(CLONE, 0..2048);
    life.read(CLONE, 256..768);
    life.fill(CLONE, 2048..11264);
    life.fill(AROUND, 64..1024);
    life.fill(CLONE, 1024..1536);
    life.restart();
}

/// Backends take nothing any more.
fn undrained(life: &mut Life) {
    // What is written of a last block that is only a part is merged with what was there.
    life.fill(ORDERED, 6140..6145);
    // A group whose redo is committed and not in the image, one that is closed, and an open one
    // above it.
    life.w.stopped = [CLONE, PLAIN, FAILED].map(VolumeId).into();
    life.w.holds = |op| {
        matches!(
            op,
            BackendOp::Write { .. } | BackendOp::Discard { .. } | BackendOp::WriteZeroes { .. }
        )
    };
    life.stamp(ORDERED, 300..400, 10);
    life.w.pass(3 * SECOND);
    life.w.stopped.push(VolumeId(ORDERED));
    life.w.holds = |_| false;
    life.stamp(ORDERED, 350..450, 11);
    life.w.pass(3 * SECOND);
    life.stamp(ORDERED, 360..370, 12);
    life.zero(ORDERED, 1024..3072, false);
    life.zero(ORDERED, 3072..4200, true);
    life.stamp(ORDERED, 1100..1104, 13);
    life.stamp(ORDERED, 6144..6145, 14);
    life.stamp(PLAIN, 600..700, 15);
    life.write(PLAIN, 700..1000, Holds::Fill(31));
    life.zero(PLAIN, 2048..4096, false);
    life.zero(PLAIN, 4096..5120, true);
    life.stamp(PLAIN, 2100..2110, 16);
    life.stamp(CLONE, 64..96, 17);
    life.zero(CLONE, 2048..3072, false);
    life.stamp(CLONE, 2100..2101, 18);
    life.stamp(THROUGH, 100..110, 19);
    life.lose(PLAIN, 650);
    // What is used again is not dropped but moved, also behind the newest checkpoint.
    life.use_again(CLONE, BASE);
    life.checkpoint(ORDERED, (0..=255).cycle().take(ATTACHMENT_BYTES_MAX).collect());
    life.checkpoint(PLAIN, Vec::new());
}

/// What is replayed, and what is not.
fn behind_the_checkpoint(life: &mut Life) {
    life.fill(AROUND, 1024..2048);
    life.stamp(ORDERED, 500..520, 40);
    life.zero(ORDERED, 600..640, false);
    life.zero(ORDERED, 640..648, true);
    // A fill that a write overtakes leaves void entries.
    life.read(THROUGH, 300..308);
    life.stamp(THROUGH, 303..305, 46);
    life.w.pass(UNTIL_FILLED);
    life.stamp(THROUGH, 200..204, 41);
    life.fill(AROUND, 36..48);
    life.stamp(AROUND, 40..44, 42);
    life.stamp(PLAIN, 1000..1016, 43);
    life.w.flush(PLAIN);
    // The last record is torn, and a whole one behind it does not count either.
    life.write_unmodelled(PLAIN, 1016..1024, Holds::Stamp(44));
    life.write_unmodelled(PLAIN, 1030..1032, Holds::Stamp(45));
    let torn = Holds::Stamp(44).content(1020);
    life.w
        .device
        .0
        .chunks_mut(BLOCK_BYTES)
        .filter(|block| **block == torn)
        .for_each(|block| block.fill(0));
}

/// The life has come to all that it was made for.
fn has_everything(life: &mut Life) {
    let contents = Contents::open(&mut life.w.device).expect("a cache");
    let census = census(&life.w.device.0, &contents);
    println!("{census:?}");
    let all =
        [(Stream::Log, WRITE), (Stream::Fill, FILL), (Stream::Main, FILL), (Stream::Main, MOVE)];
    assert!(all.iter().all(|kind| census.records.contains(kind)));
    let tail = [(Stream::Log, WRITE), (Stream::Fill, FILL), (Stream::Main, MOVE)];
    assert!(tail.iter().all(|kind| census.tail.contains(kind)));
    assert_eq!(census.entries, (0..5).collect(), "every kind of entry");
    assert!(census.epochs.len() > 2 && contents.recovery().records_replayed > 5);
    assert_eq!(contents.recovery().records_cut, 2);
}

/// An orderly end: everything is in the checkpoint.
fn stopped() {
    let mut life = Life::new(MIB);
    let ordered = life.add(grouped("grouped", 16 * MIB + 512), &[50]);
    let plain = life.add(spec("unordered", 16 * MIB, Mode::WriteBack), &[51]);
    let through = life.add(spec("through", 16 * MIB, Mode::WriteThrough), &[52]);
    for number in [ordered, plain, through] {
        life.stamp(number, 0..200, 60 + u32::from(number));
        life.w.drain(number);
        life.fill(number, 512..1024);
    }
    life.restart();
    life.fill(ordered, 4096..4097);
    life.w.stopped = [ordered, plain].map(VolumeId).into();
    for number in [ordered, plain] {
        life.stamp(number, 100..300, 70 + u32::from(number));
        life.zero(number, 1024..2048, number == ordered);
        life.stamp(number, 1500..1510, 80 + u32::from(number));
    }
    life.stamp(ordered, 4096..4097, 90);
    life.w.control(|e, now, c| e.shutdown(now, c)).expect("stopped");
    let contents = Contents::open(&mut life.w.device).expect("a cache");
    assert_eq!(contents.recovery().records_replayed, 0);
    life.save(
        "stopped",
        "An orderly end with dirty data: the checkpoint has everything, nothing is replayed.",
    );
}

/// An old cache: every segment has had several lives, and dirty blocks have been packed together.
fn reused() {
    let mut life = Life::new(MIB / 4);
    let plain = life.add(spec("unordered", 48 * MIB, Mode::WriteBack), &[100]);
    let ordered = life.add(grouped("grouped", 16 * MIB), &[101]);
    for round in 0..12u64 {
        let from = round * 1000;
        life.write(plain, from % 8000..from % 8000 + 4000, Holds::Fill(110 + round as u32));
        life.stamp(ordered, round * 64..round * 64 + 16, 130 + round as u32);
        life.w.drain(plain);
        life.fill(ordered, 1024..4096);
        if round % 3 == 2 {
            life.restart();
        }
    }
    // With the backends stopped everything clean has to go, and what is left of each segment is
    // moved.
    life.w.stopped = [plain, ordered].map(VolumeId).into();
    for step in 0..300u64 {
        life.write(plain, step * 40..step * 40 + 4, Holds::Fill(150 + step as u32 % 8));
        life.write(plain, 12100..12150, Holds::Fill(160 + step as u32 % 8));
        if step % 30 == 0 {
            life.stamp(ordered, step..step + 2, 170);
        }
    }
    life.checkpoint(plain, vec![5; 100]);
    life.stamp(ordered, 700..710, 180);
    life.zero(plain, 0..64, false);
    let contents = Contents::open(&mut life.w.device).expect("a cache");
    let census = census(&life.w.device.0, &contents);
    println!("{census:?}");
    assert!(census.newest_segment > 3 * u64::from(census.segments), "segments have several lives");
    assert!(census.records.contains(&(Stream::Log, MOVE)), "dirty blocks were moved");
    assert!(contents.recovery().records_replayed > 0);
    life.save(
        "reused",
        "An old cache that was killed: all segments were written several times, and with stopped backends the dirty blocks \
         that were left in them have been moved to others.",
    );
}

#[test]
#[ignore = "makes the golden images of this version that do not exist"]
fn make() {
    let images: [(&str, fn()); 3] = [("killed", killed), ("stopped", stopped), ("reused", reused)];
    for (name, make) in images {
        match exists(FORMAT_VERSION, name) {
            true => println!("{name} exists, and a golden image is never changed"),
            false => make(),
        }
    }
}
