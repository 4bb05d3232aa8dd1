//! Which summaries are refused.

use super::super::*;
use super::*;
use zerocopy::little_endian::{U16, U64};

const SEGMENT: u32 = 3;
const SEQUENCE: u64 = 77;

/// A summary with so many records and entries, in so many blocks.
fn summary(geo: &Geometry, records: usize, entries: usize) -> Vec<u8> {
    let record = SummaryRecord {
        sequence: U64::new(8),
        header_crc: U32::new(1),
        volume: U16::new(2),
        first_block: U16::new(3),
        entries: U16::new(4),
        kind: RecordKind::Write as u8,
        reserved: 0,
    };
    let entries: Vec<Entry> =
        (0..entries as u64).map(|i| Entry::new(EntryKind::Data, i, 9)).collect();
    let blocks = Geometry::summary_blocks(records, entries.len()) as usize;
    let mut bytes = vec![0; blocks * BLOCK_BYTES];
    encode_summary(geo, (SEGMENT, SEQUENCE), &vec![record; records], &entries, &mut bytes);
    bytes
}

#[test]
fn a_summary_that_is_not_the_segments_own_or_contradicts_itself_is_refused() {
    let geo = Geometry::new([7; 16], 1 << 30, None).expect("a valid size");
    let lengths = |bytes: &[u8]| {
        let decoded = decode_summary(&geo, SEGMENT, SEQUENCE, bytes);
        decoded.map(|(records, entries)| (records.len(), entries.len()))
    };
    for (records, entries) in [(0, 0), (1, 1), (100, 300), (10, 1000)] {
        assert_eq!(lengths(&summary(&geo, records, entries)), Some((records, entries)));
    }
    let two = (10, 600);
    let changes: [fn(&mut SummaryHeader); 7] = [
        |header| header.magic[0] ^= 1,
        |header| header.uuid[0] ^= 1,
        |header| header.segment.set(SEGMENT + 1),
        |header| header.segment_sequence.set(SEQUENCE - 1),
        |header| header.records.set(300),
        |header| header.entries.set(10),
        // As many as it takes, but not as there are.
        |header| (header.blocks.set(1), header.entries.set(10)).1,
    ];
    for (n, change) in changes.iter().enumerate() {
        let mut bytes = summary(&geo, two.0, two.1);
        assert_eq!(bytes.len(), 2 * BLOCK_BYTES);
        let mut header: SummaryHeader = open(&bytes).expect("sealed");
        change(&mut header);
        header.write_to_prefix(&mut bytes).expect("room");
        seal::<SummaryHeader>(&mut bytes);
        assert_eq!(lengths(&bytes), None, "change {n}");
    }
    let mut torn = summary(&geo, two.0, two.1);
    torn[BLOCK_BYTES + 5] ^= 1;
    assert_eq!(lengths(&torn), None);
}
