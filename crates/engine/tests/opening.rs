//! Opening: what it says of a device, and that one bad copy of anything is no loss.

use crate::common::*;
use tidepool_engine::api::*;
use tidepool_engine::format::{CHECKPOINT_MAGIC, PAGE_MAGIC, SUMMARY_MAGIC, SUPERBLOCK_MAGIC};
use tidepool_engine::{Engine, EngineConfig, OpenError, RecoveryReport};

const BLOCK: usize = BLOCK_BYTES;

/// A cache with dirty blocks in its log, and what they hold.
fn written(pieces: u64) -> (World, Vec<Vec<u8>>) {
    let mut w = World::new(64 * MIB, &[spec("a", 32 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    let content: Vec<Vec<u8>> = (0..pieces).map(|i| pattern(i, 2 * BLOCK)).collect();
    for (i, data) in content.iter().enumerate() {
        w.write(0, i as u64 * 2 * BLOCK as u64, data);
    }
    (w, content)
}

fn open(bytes: &[u8]) -> Result<(Engine, RecoveryReport), OpenError> {
    Engine::open(&mut MemoryDevice(bytes.to_vec()), EngineConfig::small(), 0)
}

/// Blocks of the device that begin like this.
fn blocks_with(w: &World, magic: &[u8]) -> Vec<usize> {
    let blocks = w.device.0.chunks_exact(BLOCK).enumerate();
    blocks.filter(|(_, block)| block.starts_with(magic)).map(|(i, _)| i).collect()
}

fn damage(w: &mut World, blocks: &[usize]) {
    blocks.iter().for_each(|block| w.device.0[block * BLOCK + 30] ^= 1);
}

fn holds(w: &mut World, content: &[Vec<u8>]) {
    w.reopen();
    w.attach(true);
    for (i, data) in content.iter().enumerate() {
        assert!(w.read(0, i as u64 * 2 * BLOCK as u64, 2 * BLOCK as u64) == *data, "piece {i}");
    }
    assert_eq!(w.status(0).dirty_bytes, content.len() as u64 * 2 * BLOCK as u64);
}

#[test]
fn a_device_that_is_no_cache_is_told_from_one_that_is_damaged_or_cut() {
    let (w, _) = written(1);
    let good = &w.device.0;
    assert!(open(good).is_ok());
    let error = |bytes: &[u8]| open(bytes).map(|_| ()).expect_err("it is not opened").to_string();
    let not_a_cache = error(&vec![0; 4 << 20]);
    assert_eq!(error(&[0; 8 * BLOCK]), not_a_cache);
    assert_eq!(error(&good[..0]), not_a_cache);
    let superblocks = blocks_with(&w, &SUPERBLOCK_MAGIC);
    assert_eq!(superblocks, [0, 256]);
    let mut both = good.clone();
    superblocks.iter().for_each(|block| both[block * BLOCK + 20] ^= 1);
    assert_ne!(error(&both), not_a_cache, "the magic number says that it was one");
    for block in superblocks {
        let mut one = good.clone();
        one[block * BLOCK..(block + 1) * BLOCK].fill(0);
        assert!(open(&one).is_ok(), "the other copy is whole");
    }
    let cut = open(&good[..good.len() - BLOCK]).map(|_| ()).expect_err("it is not opened");
    assert!(
        matches!(cut, OpenError::Truncated { expected, found } if expected == found + BLOCK as u64)
    );
    for (end, superblock) in [(1, 0), (256, 0), (257, 256)] {
        let mut cut = vec![0; end * BLOCK];
        cut[superblock * BLOCK..][..BLOCK].copy_from_slice(&good[..BLOCK]);
        assert!(
            matches!(open(&cut).err(), Some(OpenError::Truncated { .. })),
            "cut behind {end} blocks"
        );
    }
    let longer = [&good[..], &[0; BLOCK]].concat();
    assert!(open(&longer).is_ok(), "a device may be larger than what is used of it");
}

#[test]
fn the_report_counts_what_was_replayed() {
    let (mut w, content) = written(5);
    let checkpoint = w.engine.device_status().checkpoints;
    let (_, report) = open(&w.device.0).expect("open");
    assert_eq!((report.records_replayed, report.blocks_replayed), (5, 10));
    assert_eq!((report.records_cut, report.blocks_lost, report.volumes_failed), (0, 0, 0));
    assert!(report.checkpoint > checkpoint && report.summaries_rebuilt == 0);
    holds(&mut w, &content);
    w.control(|e, now, c| e.shutdown(now, c)).expect("shutdown");
    let (_, report) = open(&w.device.0).expect("open");
    assert_eq!((report.records_replayed, report.blocks_replayed), (0, 0), "the checkpoint has it");
    assert!(report.segments > 0);
}

#[test]
fn a_block_that_a_crash_could_not_tear_is_lost_and_counted() {
    let (mut w, content) = written(4);
    w.flush(0);
    w.write(0, 16 * MIB, &content[0]);
    w.flush(0);
    w.corrupt(&content[1][..BLOCK]);
    let (_, report) = open(&w.device.0).expect("open");
    assert_eq!((report.blocks_lost, report.volumes_failed, report.records_cut), (1, 0, 0));
    w.reopen();
    w.attach(true);
    assert_eq!(w.status(0).lost_blocks, 1);
    assert_eq!(w.try_read(0, 2 * BLOCK as u64, BLOCK as u64), Err(RequestError::Io));
    assert!(w.read(0, 3 * BLOCK as u64, BLOCK as u64) == content[1][BLOCK..]);
}

#[test]
fn summaries_that_are_damaged_are_made_again_from_the_records() {
    let (mut w, content) = written(500);
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("a checkpoint");
    let summaries = blocks_with(&w, &SUMMARY_MAGIC);
    assert!(summaries.len() >= 10, "{} summaries", summaries.len());
    damage(&mut w, &summaries);
    let (_, report) = open(&w.device.0).expect("open");
    assert_eq!(report.summaries_rebuilt, summaries.len() as u64);
    holds(&mut w, &content);
}

#[test]
fn either_copy_of_a_checkpoint_is_enough_and_pages_come_from_whichever_is_good() {
    let (mut w, content) = written(40);
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("a checkpoint");
    let headers = blocks_with(&w, &CHECKPOINT_MAGIC);
    let pages = blocks_with(&w, &PAGE_MAGIC);
    assert!(headers.len() == 4 && pages.len() > 60, "{headers:?} {pages:?}");
    let slot = headers[1] - headers[0];
    let whole = w.device.0.clone();
    for copy in 0..2 {
        // All of one copy, of both slots.
        let of = |block: &&usize| (**block - headers[0]) / slot % 2 == copy;
        let all: Vec<usize> = headers.iter().chain(&pages).filter(of).copied().collect();
        damage(&mut w, &all);
        holds(&mut w, &content);
        w.device.0.copy_from_slice(&whole);
        // Odd pages of the one, even pages of the other.
        let some: Vec<usize> = pages
            .iter()
            .filter(|block| ((**block - headers[0]) / slot + **block) % 2 == copy)
            .copied()
            .collect();
        damage(&mut w, &some);
        holds(&mut w, &content);
        w.device.0.copy_from_slice(&whole);
    }
    // A page that neither copy has.
    let last = *pages.last().expect("pages");
    damage(&mut w, &[last, last - slot, last - 2 * slot, last - 3 * slot]);
    assert!(matches!(open(&w.device.0).map(|_| ()), Err(OpenError::Checkpoint)));
}

#[test]
fn every_checkpoint_has_a_number_of_its_own_and_leaves_the_one_before_it_alone() {
    let (mut w, _) = written(1);
    let slots = |w: &World| {
        let headers = blocks_with(w, &CHECKPOINT_MAGIC);
        [0, 2].map(|slot| w.device.0[headers[slot] * BLOCK..(headers[slot] + 1) * BLOCK].to_vec())
    };
    for _ in 0..4 {
        let (_, before) = open(&w.device.0).expect("open");
        let old = slots(&w);
        w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c))
            .expect("a checkpoint");
        let (_, after) = open(&w.device.0).expect("open");
        assert_eq!(after.checkpoint, before.checkpoint + 1);
        let changed: Vec<bool> = old.iter().zip(slots(&w)).map(|(old, new)| *old != new).collect();
        let slot = (after.checkpoint % 2) as usize;
        assert_eq!((changed[slot], changed[1 - slot]), (true, false));
    }
}

#[test]
fn what_reaches_to_the_end_of_a_segment_is_not_overwritten_by_its_summary() {
    let mut w = World::new(64 * MIB, &[spec("a", 32 * MIB, Mode::WriteBack)]);
    w.flush(0);
    w.backend_stopped = true;
    let mut content = Vec::new();
    // Ranges take room in the summary only: with different numbers of both, segments end at every
    // block.
    for writes in (1..9).chain(3..9) {
        for _ in 0..12 {
            for i in 0..40 {
                w.submit(0, Op::Discard { fua: false }, 16 * MIB + i * 8192, 4096, None);
            }
            for _ in 0..writes {
                let at = content.len() as u64;
                let data = pattern(at, 2 * BLOCK);
                w.submit(0, Op::Write { fua: false }, at * 8192, 8192, Some(&data));
                content.push(data);
            }
            w.run();
        }
    }
    let (_, report) = open(&w.device.0).expect("open");
    assert_eq!((report.blocks_lost, report.summaries_rebuilt), (0, 0));
    holds(&mut w, &content);
    w.control(|e, now, c| e.set_attachment(now, VolumeId(0), vec![1], c)).expect("a checkpoint");
    let (_, report) = open(&w.device.0).expect("open");
    assert_eq!((report.blocks_lost, report.summaries_rebuilt), (0, 0));
    holds(&mut w, &content);
}

#[test]
fn the_log_goes_on_in_the_segment_that_was_open() {
    let (mut w, _) = written(5);
    let free = w.engine.device_status().segments_free;
    for round in 0..5 {
        w.restart(true);
        w.backend_stopped = true;
        w.write(0, 16 * MIB + round * 4096, &pattern(round, BLOCK));
        assert_eq!(w.engine.device_status().segments_free, free);
    }
}
