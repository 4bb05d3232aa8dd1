//! The summary at a segment's end: its records and their entries, so that recovery and reclaim need
//! not read the segment.

use super::{
    BLOCK_BYTES, Entry, Geometry, SUMMARY_MAGIC, SummaryHeader, SummaryRecord, open, seal,
};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

/// Writes the summary of a segment in this life of it into `out`, which has exactly its blocks.
pub(crate) fn encode_summary(
    geo: &Geometry,
    (segment, segment_sequence): (u32, u64),
    records: &[SummaryRecord],
    entries: &[Entry],
    out: &mut [u8],
) {
    let blocks = (out.len() / BLOCK_BYTES) as u32;
    debug_assert_eq!(blocks, Geometry::summary_blocks(records.len(), entries.len()));
    out.fill(0);
    let header = SummaryHeader {
        magic: SUMMARY_MAGIC,
        crc: U32::ZERO,
        uuid: geo.uuid,
        segment: U32::new(segment),
        blocks: U32::new(blocks),
        segment_sequence: U64::new(segment_sequence),
        records: U32::new(records.len() as u32),
        entries: U32::new(entries.len() as u32),
    };
    header.write_to_prefix(out).expect("a header is smaller than a block");
    let at = size_of::<SummaryHeader>();
    let mid = at + size_of_val(records);
    out[at..mid].copy_from_slice(records.as_bytes());
    out[mid..mid + size_of_val(entries)].copy_from_slice(entries.as_bytes());
    seal::<SummaryHeader>(out);
}

/// Reads a summary; `None` if it is damaged or belongs to another life of the segment.
pub(crate) fn decode_summary(
    geo: &Geometry,
    segment: u32,
    segment_sequence: u64,
    bytes: &[u8],
) -> Option<(Vec<SummaryRecord>, Vec<Entry>)> {
    let header: SummaryHeader = open(bytes)?;
    let (records, entries) = (header.records.get() as usize, header.entries.get() as usize);
    if header.magic != SUMMARY_MAGIC
        || header.uuid != geo.uuid
        || header.segment.get() != segment
        || header.segment_sequence.get() != segment_sequence
        || header.blocks.get() as usize * BLOCK_BYTES != bytes.len()
        || Geometry::summary_blocks(records, entries) != header.blocks.get()
    {
        return None;
    }
    let at = size_of::<SummaryHeader>();
    let mid = at + records * size_of::<SummaryRecord>();
    let end = mid + entries * size_of::<Entry>();
    use zerocopy::FromBytes;
    let records = <[SummaryRecord]>::ref_from_bytes(&bytes[at..mid]).ok()?.to_vec();
    let entries = <[Entry]>::ref_from_bytes(&bytes[mid..end]).ok()?.to_vec();
    Some((records, entries))
}

#[cfg(test)]
mod tests;
