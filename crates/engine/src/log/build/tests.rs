//! What an append has room for.

use super::*;

const BUF_BLOCKS: u32 = 24;

fn builder(first_block: u32) -> Builder {
    let buf = Buf { offset: 0, len: BUF_BLOCKS * BLOCK_BYTES as u32 };
    let append = Append::new(Stream::Log, buf);
    Builder {
        stream: Stream::Log,
        segment: 0,
        sequence: 1,
        epoch: 1,
        segment_first: 0,
        first_block,
        block: first_block,
        segment_blocks: 64,
        buf,
        records: 0,
        entries: 0,
        append,
        record: None,
    }
}

#[test]
fn an_append_ends_where_its_buffer_does_or_the_summary_of_its_segment_begins() {
    // Data blocks of each record, and ranges of each: summaries of one to three blocks.
    let mixed = [(0, 1, 0), (0, 2, 30), (0, 1, 90), (0, 0, 60), (0, 3, 200)];
    // With so many entries before that those of a few blocks of data make the summary longer.
    let plain = (180..340).step_by(8).map(|entries| (entries, 10, 0));
    for (entries, data, ranges) in plain.chain(mixed) {
        let (mut records, mut entries) = (0, entries);
        for first_block in [1, 9, 21, 30, 41, 50] {
            let mut builder = Builder { records, entries, ..builder(first_block) };
            let mut block = first_block;
            let fits = |blocks: u32, records, entries| {
                blocks + Geometry::summary_blocks(records, entries) <= 64
                    && blocks - first_block <= BUF_BLOCKS
            };
            for _ in 0..8 {
                assert_eq!(
                    builder.has_room_for_record(),
                    fits(block + 2, records + 1, entries + 1)
                );
                if !builder.has_room_for_record() {
                    break;
                }
                builder.begin_record(VolumeId(0), RecordKind::Write);
                (block, records) = (block + 1, records + 1);
                for n in 0..data + ranges {
                    assert_eq!(builder.has_room_for_entry(), fits(block + 1, records, entries + 1));
                    if !builder.has_room_for_entry() {
                        break;
                    }
                    entries += 1;
                    if n < data {
                        builder.push_data(n, 0, 0);
                        block += 1;
                    } else {
                        builder.push_range(EntryKind::Discard, n, 1);
                    }
                }
                builder.record = None;
            }
        }
    }
}

#[test]
fn a_record_has_no_more_entries_than_its_header_has_room_for() {
    let mut builder = builder(1);
    for _ in 0..3 {
        builder.begin_record(VolumeId(0), RecordKind::Write);
        let mut entries = 0;
        while builder.has_room_for_entry() {
            builder.push_range(EntryKind::Discard, entries, 1);
            entries += 1;
        }
        assert_eq!(entries, RECORD_ENTRIES_MAX as u64);
        builder.record = None;
    }
}
