//! What a checkpoint says is believed if it can be true, and all of it is found again.

use crate::common::crafted::Part::Data;
use crate::common::crafted::*;
use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::format::*;
use tidepool_engine::status::VolumeState;
use tidepool_engine::{Engine, EngineConfig, OpenError};
use zerocopy::IntoBytes;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Writes a checkpoint's header into both copies of a slot.
fn put_header(c: &mut Crafted, slot: usize, header: &CheckpointHeader) {
    for copy in 0..SLOT_COPIES {
        let at = c.geo.slot_block(slot, copy);
        let block = c.block_mut(at);
        block[..size_of::<CheckpointHeader>()].copy_from_slice(header.as_bytes());
        seal::<CheckpointHeader>(block);
    }
}

/// The slot of the newest checkpoint.
fn slot(c: &Crafted) -> usize {
    (c.header.checkpoint.get() % SLOTS as u64) as usize
}

/// Where a page of the newest checkpoint stands.
fn page(c: &Crafted, copy: usize, page: u32) -> u32 {
    c.geo.slot_block(slot(c), copy) + 1 + page
}

/// Changes a page of the newest checkpoint in both copies, as if the core had written it.
fn change_page(c: &mut Crafted, number: u32, change: impl Fn(&mut [u8])) {
    for copy in 0..SLOT_COPIES {
        let at = page(c, copy, number);
        change(c.block_mut(at));
        seal::<PageHeader>(c.block_mut(at));
    }
    let crcs: Vec<u8> =
        (0..c.geo.pages()).flat_map(|n| crc32c(c.block(page(c, 0, n))).to_le_bytes()).collect();
    c.header.pages_crc.set(crc32c(&crcs));
    let (slot, header) = (slot(c), c.header);
    put_header(c, slot, &header);
}

fn crafted_with_log() -> Crafted {
    Crafted::with_log().0
}

#[test]
fn every_opening_has_a_checkpoint_an_epoch_and_segment_sequences_of_its_own() {
    let mut c = Crafted::new();
    for _ in 0..3 {
        let before = c.header;
        Engine::open(&mut c.device, EngineConfig::small(), 0).expect("open");
        c = Crafted::of(c.device);
        assert_eq!(c.header.checkpoint.get(), before.checkpoint.get() + 1);
        assert_eq!(c.header.epoch.get(), before.epoch.get() + 1);
        let skipped = c.header.next_segment_sequence.get() - before.next_segment_sequence.get();
        assert_eq!(skipped, u64::from(c.geo.segments));
    }
}

#[test]
fn a_header_that_cannot_be_that_of_a_checkpoint_is_passed_over() {
    let mut c = crafted_with_log();
    let (newest, other) = (c.header.checkpoint.get(), 1 - slot(&c));
    let mut changed = |change: fn(&mut CheckpointHeader, u32)| {
        let mut header = c.header;
        header.checkpoint += 1;
        change(&mut header, c.geo.segment_blocks);
        put_header(&mut c, other, &header);
        c.seen().map(|found| found.report.checkpoint)
    };
    assert_eq!(changed(|_, _| ()), Ok(newest + 1), "its pages are the same");
    assert_eq!(changed(|h, _| h.uuid[0] ^= 1), Ok(newest), "another cache's");
    assert_eq!(changed(|h, _| h.magic = PAGE_MAGIC), Ok(newest), "no header");
    assert_eq!(changed(|h, _| h.checkpoint += 1), Ok(newest), "of the other slot");
    assert_eq!(
        changed(|h, _| h.epoch.set(COUNTER_MAX + 1)),
        Ok(newest),
        "nobody counts up to that"
    );
    let beyond = |h: &mut CheckpointHeader, blocks| {
        h.open_segment[1].set(0);
        h.open_block[1].set(blocks + 1);
    };
    assert_eq!(changed(beyond), Ok(newest), "an open segment ends sooner");
}

#[test]
fn a_page_that_belongs_elsewhere_comes_from_the_other_copy() {
    let whole = crafted_with_log();
    let volume = whole.geo.segment_pages();
    let next = whole.block(page(&whole, 0, volume + 1)).to_vec();
    let changed = |change: &dyn Fn(&mut [u8]), damaged: Option<u32>| {
        let mut c = crafted_with_log();
        let at = page(&c, 0, volume);
        change(c.block_mut(at));
        seal::<PageHeader>(c.block_mut(at));
        if let Some(damaged) = damaged {
            let at = page(&c, 1, damaged);
            c.block_mut(at)[100] ^= 1;
        }
        c.seen().map(|found| found.holds(0, 0))
    };
    let found = Ok(Some(data(100)));
    // Where another page is damaged, that one comes from the first copy.
    assert_eq!(changed(&|block| block.copy_from_slice(&next), Some(0)), found, "another page");
    assert_eq!(changed(&|block| block[8] ^= 1, Some(0)), found, "another cache's");
    assert_eq!(changed(&|block| block[0] ^= 1, Some(0)), found, "no page");
    assert_eq!(changed(&|block| block[2000] ^= 1, None), found, "of another time");
}

#[test]
fn a_checkpoint_of_more_pages_than_are_read_at_once_is_read_whole() {
    let mut w = World::with_segments(1 << 30, 16 << 20, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    w.write(0, 0, &pattern(1, BLOCK_BYTES));
    w.reopen();
    let mut c = Crafted::of(w.device);
    let last = c.geo.pages() - 1;
    assert!(last > 256);
    for (copy, number) in [(0, last), (1, last - 1), (0, 0), (1, 1)] {
        let at = page(&c, copy, number);
        c.block_mut(at)[100] ^= 1;
    }
    assert_eq!(c.seen().expect("a cache").holds(0, 0), Some(data(1)));
}

#[test]
fn a_segment_that_no_core_has_described_like_this_makes_a_checkpoint_worthless() {
    let changed = |change: &dyn Fn(&mut [u8])| {
        let mut c = crafted_with_log();
        let number = c.header.open_segment[0].get() as usize;
        let at = size_of::<PageHeader>() + number * c.geo.segment_item_bytes();
        change_page(&mut c, 0, |block| change(&mut block[at..at + 16]));
        c.seen().map(|found| found.holds(0, 0))
    };
    assert_eq!(changed(&|_| ()), Ok(Some(data(100))));
    assert_eq!(changed(&|item| item[10] = SUMMARY_BLOCKS_MAX as u8), Ok(Some(data(100))));
    assert_eq!(
        changed(&|item| item[10] = SUMMARY_BLOCKS_MAX as u8 + 1),
        Err(OpenError::Checkpoint)
    );
    assert_eq!(changed(&|item| item[7] = 0x80), Err(OpenError::Checkpoint));
}

#[test]
fn zeroes_of_a_checkpoint_are_found_again_up_to_the_end_of_their_volume() {
    let mut w = World::new(64 * MIB, &[spec("a", BLOCKS * BLOCK, Mode::WriteBack)]);
    w.backend_stopped = true;
    let blocks: Vec<u64> = (0..300).map(|n| BLOCKS - 1 - 2 * n).rev().collect();
    for block in &blocks {
        w.op(0, Op::Discard { fua: false }, block * BLOCK, BLOCK).expect("discard");
    }
    assert!(blocks.len() > EXTENTS_PER_PAGE);
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("a checkpoint");
    let found = Crafted::of(w.device).found();
    assert_eq!(found.report.records_replayed, 0);
    assert!(found.blocks.values().all(|&found| found == (Holds::Zero, true)));
    assert_eq!(found.blocks.keys().map(|key| key.1).collect::<Vec<_>>(), blocks);
}

#[test]
fn extents_that_are_empty_or_behind_the_end_of_their_volume_are_none() {
    let mut c = Crafted::new();
    let first = c.geo.segment_pages() + c.geo.volume_pages;
    let extent = |block: u64, len: u32| ExtentItem {
        block: block.into(),
        len: len.into(),
        volume: 0.into(),
        kind: ExtentKind::Zero as u8,
        reserved: 0,
    };
    let extents =
        [extent(100, 0), extent(BLOCKS - 6, 7), extent(u64::MAX, 2), extent(BLOCKS - 1, 1)];
    change_page(&mut c, first, |block| {
        let at = size_of::<PageHeader>();
        block[at - 4..at].copy_from_slice(&(extents.len() as u32).to_le_bytes());
        block[at..at + size_of_val(&extents)].copy_from_slice(extents.as_bytes());
    });
    let found = c.found();
    assert_eq!(
        found.blocks.into_iter().collect::<Vec<_>>(),
        [((0, BLOCKS - 1), (Holds::Zero, true))]
    );
}

#[test]
fn zeroes_of_a_checkpoint_are_drained_as_what_they_are() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images[0].fill(0x44);
    w.backend_stopped = true;
    let object = 4 * MIB;
    w.op(0, Op::WriteZeroes { fua: false, no_hole: true }, 0, object).expect("zeroes");
    w.op(0, Op::Discard { fua: false }, 3 * object - 5 * BLOCK, 10 * BLOCK).expect("discard");
    w.restart(true);
    w.restart(true); // This one finds them in the checkpoint.
    w.op(0, Op::Discard { fua: false }, object, 3 * BLOCK).expect("discard");
    w.backend_stopped = false;
    w.run();
    w.drain(0);
    let zero = |range: std::ops::Range<u64>| {
        w.images[0][range.start as usize..range.end as usize].iter().all(|&b| b == 0)
    };
    assert!(zero(0..object + 3 * BLOCK) && zero(3 * object - 5 * BLOCK..3 * object + 5 * BLOCK));
    assert_eq!(w.images[0].iter().filter(|&&b| b == 0).count() as u64, object + 13 * BLOCK);
    assert!(!w.backend_zeroes.is_empty());
    assert!(
        w.backend_zeroes.iter().all(|&(_, offset, len)| offset + len <= object),
        "a discard gives space back"
    );
}

#[test]
fn g7_a_volume_fails_if_but_one_of_the_blocks_among_its_zeroes_is_not_found() {
    let mut w = World::new(64 * MIB, &[spec("a", 16 * MIB, Mode::WriteBack)]);
    w.images[0] = pattern(0, 16 * MIB as usize);
    let cached = [10, 20];
    for block in cached {
        w.read(0, block * BLOCK, BLOCK);
        w.pass(100_000_000);
    }
    w.backend_stopped = true;
    for (first, end) in [(0, 10), (11, 20), (21, 30)] {
        w.op(0, Op::Discard { fua: false }, first * BLOCK, (end - first) * BLOCK).expect("discard");
    }
    w.pass(20_000_000_000);
    w.reopen();
    assert_eq!(w.status(0).state, VolumeState::Detached);
    let content = w.images[0][(20 * BLOCK) as usize..][..BLOCK_BYTES].to_vec();
    for at in w.corrupt(&content) {
        // The whole segment but the other block's record, which is the first in it.
        let segment = at / 64 * 64;
        w.device.0[(segment + 3) * BLOCK_BYTES..(segment + 64) * BLOCK_BYTES].fill(0);
    }
    w.reopen();
    assert_eq!(w.status(0).state, VolumeState::Failed);
}

#[test]
fn a_summary_that_names_a_place_twice_or_a_block_behind_the_end_of_its_volume_does_no_harm() {
    let mut c = Crafted::new();
    let sequence = c.sequence(0);
    let mut segment = c.segment(0, sequence, Stream::Fill);
    c.record(&mut segment, RecordKind::Fill, 0, &[Data(1, 1), Data(2, 2)], &[], |_| ());
    c.summary(&segment);
    Engine::open(&mut c.device, EngineConfig::small(), 0).expect("open");
    let mut twice = segment.clone();
    twice.records.extend_from_slice(&segment.records);
    twice
        .entries
        .extend(segment.entries.iter().map(|e| Entry::new(EntryKind::Data, 10, e.value())));
    c.summary(&twice);
    let found = c.found();
    assert_eq!([1, 2].map(|block| found.holds(0, block)), [1, 2].map(|seed| Some(data(seed))));
    assert_eq!(found.blocks.len(), 2);
    segment.entries[0] = Entry::new(EntryKind::Data, BLOCKS, segment.entries[0].value());
    c.summary(&segment);
    let found = c.found();
    assert_eq!(found.blocks.into_iter().collect::<Vec<_>>(), [((0, 2), (data(2), false))]);
}
