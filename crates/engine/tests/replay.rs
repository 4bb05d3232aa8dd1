//! The end of the log, record by record: which records count, and what is told of those that are
//! missing.

use crate::common::crafted::Part::{self, Data, Range, Torn, Void};
use crate::common::crafted::*;
use crate::common::{MIB, World, pattern, spec};
use tidepool_engine::OpenError;
use tidepool_engine::api::{BLOCK_BYTES, Mode};
use tidepool_engine::format::*;

use EntryKind::{Discard, Invalidate, WriteZeroes};
use RecordKind::{Fill, Move, Write};

/// A log segment that was opened behind the checkpoint.
fn log() -> (Crafted, Segment) {
    let mut c = Crafted::new();
    let sequence = c.sequence(0);
    let segment = c.segment(0, sequence, Stream::Log);
    (c, segment)
}

/// The same with segments of another size, and one volume.
fn log_in(segment_bytes: u32) -> (Crafted, Segment) {
    let volume = spec("a", BLOCKS * BLOCK_BYTES as u64, Mode::WriteBack);
    let mut c = Crafted::of(World::with_segments(64 * MIB, segment_bytes, &[volume]).device);
    let sequence = c.sequence(0);
    let segment = c.segment(0, sequence, Stream::Log);
    (c, segment)
}

#[test]
fn only_records_of_this_cache_this_life_this_epoch_and_this_owner_count() {
    let (mut c, at_mark) = Crafted::with_log();
    let (last, parts) = (c.last, [Data(5, 1)]);
    c.write(&mut at_mark.clone(), 0, &parts);
    let found = c.found();
    assert_eq!((found.holds(0, 5), found.report.records_replayed), (Some(data(1)), 1));
    type Change = fn(&mut RecordHeader);
    let strangers: [(&str, Change); 9] = [
        ("another cache's", |h| h.uuid[0] ^= 1),
        ("of a later life", |h| h.segment_sequence += 1),
        ("of an earlier life", |h| h.segment_sequence -= 1),
        ("of an earlier epoch", |h| h.epoch -= 1),
        ("of another owner", |h| h.generation += 1),
        ("of a volume that is not there", |h| h.volume.set(9)),
        ("a newer version's of another cache", |h| {
            (h.uuid[0], h.version) = (1, (FORMAT_VERSION + 1).into())
        }),
        ("a newer version's of an earlier life", |h| {
            h.segment_sequence -= 1;
            h.version.set(FORMAT_VERSION + 1);
        }),
        ("with another record before it", |h| h.chain ^= 1),
    ];
    for (what, change) in strangers {
        c.last = last;
        let mut segment = at_mark.clone();
        c.record(&mut segment, Write, 0, &parts, &[], change);
        let found = c.found();
        assert_eq!((found.holds(0, 5), found.report.records_replayed), (None, 0), "{what}");
        assert_eq!((found.holds(0, 0), found.failed[0]), (Some(data(100)), false), "{what}");
    }
    let later: [Change; 2] = [|h| h.checkpoint += 1, |h| h.epoch += 1];
    for change in later {
        c.last = last;
        c.record(&mut at_mark.clone(), Write, 0, &parts, &[], change);
        assert_eq!(c.seen().err(), Some(OpenError::Checkpoint), "a newer checkpoint is lost");
    }
}

#[test]
fn a_record_ends_with_its_segment_at_the_latest() {
    let (mut c, mut segment) = log();
    let blocks = c.geo.segment_blocks;
    segment.at = blocks - 2;
    c.write(&mut segment.clone(), 0, &[Data(5, 1)]);
    assert_eq!(c.seen().expect("a cache").holds(0, 5), Some(data(1)));
    c.erase(&segment, blocks - 2);
    c.last[0] = (0, 0);
    segment.at = blocks - 1;
    c.write(&mut segment, 0, &[Data(5, 1)]);
    assert_eq!(c.seen().expect("a cache").holds(0, 5), None);
}

#[test]
fn g3_a_torn_tail_is_cut_with_everything_behind_it() {
    let (mut c, mut segment) = log();
    c.write(&mut segment, 0, &[Data(1, 1)]);
    c.write(&mut segment, 0, &[Data(2, 2), Torn(3, 3), Data(4, 4)]);
    c.write(&mut segment, 0, &[Data(5, 5)]);
    let found = c.found();
    assert_eq!((found.report.records_replayed, found.report.records_cut), (1, 2));
    assert_eq!((found.report.blocks_lost, found.report.blocks_replayed), (0, 1));
    assert_eq!(found.blocks.keys().collect::<Vec<_>>(), [&(0, 1)]);
}

#[test]
fn g7_what_is_known_to_be_durable_is_no_torn_tail_up_to_the_last_record() {
    for durable in 0..2 {
        let (mut c, mut segment) = log();
        c.write(&mut segment, 0, &[Torn(1, 1), Data(2, 2)]);
        c.record(&mut segment, Write, 0, &[Data(3, 3)], &[], |h| h.durable_sequence.set(durable));
        let found = c.found();
        assert_eq!(found.report.records_cut, 2 - 2 * durable);
        assert_eq!(found.report.blocks_lost, durable);
        if durable == 1 {
            assert_eq!(
                [1, 2, 3].map(|n| found.holds(0, n)),
                [Some(Holds::Lost), Some(data(2)), Some(data(3))]
            );
        }
        // The same record is not there at all, and no summary tells what was in it.
        c.erase(&segment, 1);
        assert_eq!(c.found().failed, [durable == 1, false]);
    }
}

#[test]
fn g7_a_durable_record_that_is_gone_loses_what_the_summary_says_and_nothing_older_is_there_instead()
{
    let (mut c, mut segment) = log();
    let end = BLOCKS - 1;
    c.write(&mut segment, 0, &[Data(10, 1), Data(30, 2), Data(31, 3), Data(11, 4), Data(32, 8)]);
    let gone = segment.at;
    let beyond = [Data(BLOCKS, 9), Range(Discard, end, 2), Data(12, 9)];
    c.write(
        &mut segment,
        0,
        &[&[Data(10, 5), Range(Discard, 30, 2), Data(0, 5), Data(end, 5)], &beyond[..]].concat(),
    );
    c.write(&mut segment, 0, &[Data(12, 6)]);
    c.write(&mut segment, 1, &[Data(10, 10)]);
    c.summary(&segment);
    let sequence = c.sequence(1);
    let mut next = c.segment(1, sequence, Stream::Log);
    c.record(&mut next, Write, 0, &[Data(33, 7)], &[], |h| h.durable_sequence.set(3));
    c.erase(&segment, gone);
    let found = c.found();
    assert_eq!(found.failed, [false, false]);
    let lost: Vec<u64> = found
        .blocks
        .iter()
        .filter(|(_, (holds, _))| *holds == Holds::Lost)
        .map(|(&(_, block), _)| block)
        .collect();
    assert_eq!((lost, found.report.blocks_lost), (vec![0, 10, 30, 31, end], 5));
    let kept = [11, 12, 32, 33].map(|block| found.holds(0, block));
    assert_eq!(kept, [4, 6, 8, 7].map(|seed| Some(data(seed))));
    assert_eq!((found.holds(1, 10), found.dirty_blocks), (Some(data(10)), vec![4, 1]));
}

#[test]
fn g7_a_summary_that_tells_of_another_volumes_record_or_of_a_fill_says_nothing_of_a_write_that_is_gone()
 {
    let (mut c, mut segment) = log();
    c.write(&mut segment, 0, &[Data(1, 1)]);
    let gone = segment.at;
    c.write(&mut segment, 0, &[Data(2, 2)]);
    c.summary(&segment);
    let (fills, next) = (c.sequence(1), c.sequence(2));
    let mut fills = c.segment(1, fills, Stream::Fill);
    c.record(&mut fills, Fill, 1, &[Data(3, 3)], &[], |h| h.sequence.set(2));
    c.summary(&fills);
    let mut next = c.segment(2, next, Stream::Log);
    c.write(&mut next, 1, &[Data(4, 4)]);
    let unknown = next.at;
    c.write(&mut next, 1, &[Data(5, 5)]);
    for volume in 0..2 {
        c.record(&mut next, Write, volume, &[Data(6, 6)], &[], |h| h.durable_sequence.set(2));
    }
    c.erase(&segment, gone);
    c.erase(&fills, 1);
    c.erase(&next, unknown);
    let found = c.found();
    assert_eq!(found.failed, [false, true]);
    assert_eq!((found.holds(0, 2), found.report.blocks_lost), (Some(Holds::Lost), 1));
}

#[test]
fn a_write_record_is_replayed_entry_by_entry_but_for_what_is_behind_the_end_of_its_volume() {
    let (mut c, mut segment) = log();
    let parts = [
        Range(Discard, 4000, 96),
        Range(Discard, 3990, 107),
        Range(WriteZeroes, 7, 0),
        Data(BLOCKS - 1, 1),
        Data(BLOCKS, 2),
        Data(5, 3),
        Data(0, 4),
    ];
    c.write(&mut segment, 0, &parts);
    let found = c.found();
    assert_eq!((found.report.records_replayed, found.report.blocks_replayed), (1, 3));
    let written = [BLOCKS - 1, 5, 0].map(|block| found.holds(0, block));
    assert_eq!(written, [1, 3, 4].map(|seed| Some(data(seed))));
    assert!((4000..BLOCKS - 1).all(|block| found.holds(0, block) == Some(Holds::Zero)));
    assert_eq!((found.blocks.len(), found.dirty_blocks[0]), (98, 3));
}

#[test]
fn a_fill_counts_unless_it_is_damaged_void_written_over_or_overtaken_by_an_invalidation() {
    let (mut c, mut segment) = log();
    c.write(&mut segment, 0, &[Range(Invalidate, 10, 4)]);
    c.write(&mut segment, 0, &[Data(30, 30)]);
    let sequence = c.sequence(1);
    let mut fills = c.segment(1, sequence, Stream::Fill);
    let before = [9, 10, 13, 14, 30, BLOCKS, BLOCKS - 1].map(|block| Data(block, block + 1));
    c.record(&mut fills, Fill, 0, &before, &[], |_| ());
    c.record(&mut fills, Fill, 0, &[Data(11, 12), Torn(20, 1), Void(21, 1)], &[], |h| {
        h.sequence.set(1)
    });
    c.record(&mut fills, Fill, 1, &[Data(12, 13)], &[], |_| ());
    let found = c.found();
    let clean: Vec<u64> =
        found.blocks.iter().filter(|(_, (_, dirty))| !dirty).map(|(key, _)| key.1).collect();
    assert_eq!(clean, [9, 11, 14, BLOCKS - 1, 12]);
    assert!(clean[..4].iter().all(|&block| found.holds(0, block) == Some(data(block + 1))));
    assert_eq!((found.holds(1, 12), found.holds(0, 30)), (Some(data(13)), Some(data(30))));
    assert_eq!((found.report.blocks_replayed, found.report.blocks_lost), (6, 0));
}

#[test]
fn a_moved_block_is_where_it_was_moved_to_if_it_stood_where_the_move_says() {
    let (mut c, segment) = Crafted::with_log();
    let first = c.geo.segment_block(segment.number);
    let stands =
        |c: &Crafted, seed| (first..first + segment.at).find(|&p| crc32c(c.block(p)) == crc(seed));
    let olds = [100, 101].map(|seed| stands(&c, seed).expect("the block"));
    let parts = [Data(0, 100), Data(1, 101)];
    c.record(&mut segment.clone(), Move, 0, &parts, &olds, |_| ());
    olds.iter().for_each(|&old| c.block_mut(old).fill(0));
    let found = c.found();
    assert_eq!(
        [0, 1].map(|block| found.blocks[&(0, block)]),
        [100, 101].map(|seed| (data(seed), true))
    );
    assert_eq!(found.dirty_blocks[0], 2);

    let (mut c, mut segment) = Crafted::with_log();
    let parts = [Torn(0, 100), Void(1, 102), Data(0, 103), Data(BLOCKS, 104)];
    c.record(&mut segment, Move, 0, &parts, &[olds[0], olds[1], olds[1], olds[1]], |_| ());
    let found = c.found();
    assert_eq!(
        [0, 1].map(|block| found.blocks[&(0, block)]),
        [100, 101].map(|seed| (data(seed), true))
    );
    assert_eq!(found.blocks.len(), 2);
}

fn crc(seed: u64) -> u32 {
    let Holds::Data(crc) = data(seed) else { unreachable!("data") };
    crc
}

#[test]
fn g3_a_block_that_cannot_be_read_keeps_the_cache_closed_only_where_the_log_may_go_on() {
    let refused = Err(OpenError::LogEnd);
    let (mut c, mut segment) = Crafted::with_log();
    let first = c.geo.segment_block(segment.number);
    let mark = segment.at;
    c.write(&mut segment, 0, &[Data(5, 5)]);
    assert_eq!(c.open_without(&[first + mark]), refused, "at the checkpoint's mark");
    assert_eq!(c.open_without(&[first + mark + 1]), refused, "data of the last record");
    // In front of the mark nothing can be missing without being missed.
    assert_eq!(c.open_without(&[first + 1]).expect("open").volumes_failed, 1);
    assert_eq!(c.open_without(&[first]).expect("open").records_replayed, 1);
    // The record in front of the mark is damaged, too: nothing but the mark says where the next one
    // begins.
    c.erase(&segment, mark - 2);
    assert_eq!(c.open_without(&[first + mark]), refused, "at the mark, behind a damaged record");

    let (mut c, mut segment) = log();
    let first = c.geo.segment_block(0);
    c.write(&mut segment, 0, &[Data(1, 1)]);
    assert_eq!(c.open_without(&[first]).expect("open").records_replayed, 1, "a segment's header");
    assert_eq!(c.open_without(&[first + 1]), refused, "its first record");
    assert_eq!(c.open_without(&[first, first + 1]), refused, "both");
    let free = c.geo.segment_block(7);
    assert!(c.open_without(&[free]).is_ok() && c.open_without(&[free + 1]).is_ok(), "one of two");
    assert_eq!(c.open_without(&[free, free + 1]), refused, "nobody knows what stands there");

    // What reclaim has moved within the read cache is no part of the log.
    let mut c = Crafted::new();
    let sequence = c.sequence(0);
    let mut main = c.segment(0, sequence, Stream::Main);
    c.record(&mut main, Move, 0, &[Data(1, 1)], &[0], |_| ());
    assert!(c.open_without(&[c.geo.segment_block(0) + main.at]).is_ok());
}

#[test]
fn g7_a_block_that_cannot_be_read_is_the_only_one_that_is_lost_also_in_a_segment_that_is_read_in_parts()
 {
    let (mut c, mut segment) = log_in(512 << 10);
    for n in 0..40 {
        let parts = [Data(2 * n, n), Data(2 * n + 1, n)];
        c.record(&mut segment, Write, 0, &parts, &[], |h| h.durable_sequence.set(n));
    }
    let first = c.geo.segment_block(0);
    for data in [2, 63, 65, 101] {
        let report = c.open_without(&[first + data]).expect("open");
        assert_eq!((report.blocks_lost, report.volumes_failed), (1, 0), "block {data}");
        assert_eq!((report.records_replayed, report.records_cut), (40, 0), "block {data}");
    }
}

#[test]
fn a_segment_that_was_opened_behind_the_checkpoint_is_known_by_its_header_or_its_first_record() {
    // The header is gone. Yet the segment is of the log: what it holds is older than what the next
    // one holds.
    let (mut c, mut segment) = log();
    c.write(&mut segment, 0, &[Data(1, 1), Data(2, 2)]);
    let sequence = c.sequence(1);
    let mut next = c.segment(1, sequence, Stream::Log);
    c.record(&mut next, Write, 0, &[Data(1, 3)], &[], |h| h.durable_sequence.set(1));
    c.erase(&segment, 0);
    let found = c.found();
    assert_eq!([1, 2].map(|block| found.holds(0, block)), [3, 2].map(|seed| Some(data(seed))));

    // It is that of an earlier life.
    let earlier = c.sequence(0) - 1;
    c.segment_header(0, earlier, Stream::Log, |_| ());
    assert_eq!(c.found().holds(0, 2), Some(data(2)));

    // The first record is of an earlier life.
    let (mut c, mut segment) = log();
    c.record(&mut segment, Fill, 0, &[Data(7, 7)], &[], |h| h.segment_sequence -= 1);
    c.write(&mut segment, 0, &[Data(1, 1)]);
    let found = c.found();
    assert_eq!((found.holds(0, 1), found.holds(0, 7)), (Some(data(1)), None));
}

#[test]
fn a_free_segment_with_left_overs_or_with_what_belongs_elsewhere_stays_free() {
    let fresh = Crafted::new().found().segments_free;
    type Change = fn(&mut SegmentHeader);
    let headers: [(&str, Change); 4] = [
        ("another cache's", |h| h.uuid[0] ^= 1),
        ("another segment's", |h| h.segment += 1),
        ("of a number that nobody counts up to", |h| h.segment_sequence.set(COUNTER_MAX + 1)),
        ("no header", |h| h.magic = RECORD_MAGIC),
    ];
    for (what, change) in headers {
        let mut c = Crafted::new();
        let sequence = c.sequence(0);
        c.segment_header(3, sequence, Stream::Log, change);
        assert_eq!(c.found().segments_free, fresh, "{what}");
    }
    let records: [Option<fn(&mut RecordHeader)>; 2] = [None, Some(|h| h.uuid[0] ^= 1)];
    for change in records {
        // Without a change it is a record of an earlier life, behind its header.
        let mut c = Crafted::new();
        let sequence = c.sequence(0) - u64::from(change.is_none());
        let mut segment = c.segment(3, sequence, Stream::Log);
        c.record(&mut segment, Write, 0, &[Data(1, 1)], &[], change.unwrap_or(|_| ()));
        if change.is_some() {
            c.erase(&segment, 0);
        }
        let found = c.found();
        assert_eq!((found.segments_free, found.blocks.len()), (fresh, 0));
    }
}

#[test]
fn a_segment_whose_summary_would_be_too_long_is_left_without_one_and_not_gone_on_in() {
    for segment_bytes in [256 << 10, 512 << 10] {
        let (mut c, mut segment) = log_in(segment_bytes);
        for _ in 0..46 {
            c.write(&mut segment, 0, &[Range(Discard, 0, 4); RECORD_ENTRIES_MAX]);
        }
        c.write(&mut segment, 0, &[Data(9, 9)]);
        assert!(Geometry::summary_blocks(47, 46 * RECORD_ENTRIES_MAX + 1) > SUMMARY_BLOCKS_MAX);
        let again = c.opened();
        assert_eq!((again.holds(0, 9), again.holds(0, 3)), (Some(data(9)), Some(Holds::Zero)));
        assert_eq!((again.report.summaries_rebuilt, again.failed[0]), (1, false));
        let mut w =
            World::on(c.device, vec![vec![0; BLOCKS as usize * BLOCK_BYTES]]).expect("open");
        w.attach(true);
        w.backend_stopped = true;
        w.write(0, 0, &pattern(10, BLOCK_BYTES));
        w.reopen();
        let found = Crafted::of(w.device).seen().expect("a cache");
        assert_eq!([0, 9].map(|block| found.holds(0, block)), [10, 9].map(|seed| Some(data(seed))));
    }
}

#[test]
fn a_record_that_counts_wrongly_or_too_much_is_none() {
    let (mut c, segment) = log();
    type Change = fn(&mut RecordHeader);
    let mut replayed = |parts: &[Part], change: Change| {
        c.last[0] = (0, 0);
        c.record(&mut segment.clone(), Write, 0, parts, &[], change);
        c.seen().map(|found| found.report.records_replayed)
    };
    let ranges = [Range(Discard, 0, 4); RECORD_ENTRIES_MAX + 1];
    assert_eq!(replayed(&ranges[1..], |_| ()), Ok(1));
    assert_eq!(replayed(&ranges, |_| ()), Ok(0), "too many entries");
    assert_eq!(
        replayed(&ranges, |h| h.entries.set(u16::MAX)),
        Ok(0),
        "more than there is room for"
    );
    assert_eq!(
        replayed(&[Data(1, 1)], |h| h.blocks.set(2)),
        Ok(0),
        "more blocks than entries with data"
    );
    assert_eq!(
        replayed(&[Data(1, 1)], |h| h.entries.set(0)),
        Ok(0),
        "fewer entries with data than blocks"
    );
}

#[test]
fn a_segment_or_record_of_a_newer_version_or_checkpoint_is_not_passed_over() {
    let newer = Err(OpenError::Version(FORMAT_VERSION + 1));
    let (mut c, mut segment) = log();
    c.record(&mut segment, Write, 0, &[Data(1, 1)], &[], |h| h.version.set(FORMAT_VERSION + 1));
    assert_eq!(c.seen().map(|_| ()), newer);
    let (mut c, mut segment) = log();
    c.write(&mut segment, 0, &[Data(1, 1)]);
    let sequence = segment.sequence;
    c.segment_header(0, sequence, Stream::Log, |h| h.version.set(FORMAT_VERSION + 1));
    assert_eq!(c.seen().map(|_| ()), newer);
    c.segment_header(0, sequence, Stream::Log, |h| h.checkpoint += 1);
    assert_eq!(c.seen().map(|_| ()), Err(OpenError::Checkpoint));
}
