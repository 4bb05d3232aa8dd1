//! A frame of a group's redo: patches on a whole one.

use crate::input::Input;
use tidepool_engine::api::BLOCK_BYTES;
use tidepool_engine::format::{Entry, EntryKind, crc32c, seal};
use tidepool_engine::redo::{
    Change, FRAME_BLOCKS_MAX, FrameHeader, FrameName, decode, encode_header, frame_bytes,
};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, IntoBytes};

/// Checksums of the blocks are made to fit the entries that name them.
const CONTENT: u8 = 1;
/// The header's checksum is not made to fit.
const BROKEN: u8 = 2;
/// The frame ends before its end.
const CUT: u8 = 4;

/// Data blocks of the frame that is patched.
const BLOCKS: usize = 3;

/// A frame with data and both kinds of zeroes.
pub(crate) fn whole(name: FrameName) -> Vec<u8> {
    let mut bytes = vec![0; frame_bytes(BLOCKS)];
    for (n, block) in bytes.chunks_exact_mut(BLOCK_BYTES).enumerate().skip(1) {
        block.fill(n as u8);
    }
    let crc = |n: usize| crc32c(&bytes[n * BLOCK_BYTES..(n + 1) * BLOCK_BYTES]);
    let entries = [
        Entry::new(EntryKind::Data, 7, crc(1)),
        Entry::new(EntryKind::Data, 8, crc(2)),
        Entry::new(EntryKind::WriteZeroes, 2, 3),
        Entry::new(EntryKind::Data, 12, crc(3)),
        Entry::new(EntryKind::Discard, 9, 2),
    ];
    encode_header(&mut bytes, name, entries.into_iter());
    bytes
}

/// Changes a frame as an input says: a byte of flags, then patches of its header.
pub(crate) fn patch(frame: &mut Vec<u8>, input: &mut Input<'_>) {
    let flags = input.u8();
    let cut = usize::from(input.u16());
    while !input.is_empty() {
        let at = usize::from(input.u16()) % BLOCK_BYTES;
        let len = usize::from(input.u8() % 64);
        let bytes = input.bytes(len.min(BLOCK_BYTES - at));
        frame[at..at + bytes.len()].copy_from_slice(bytes);
    }
    if flags & CONTENT != 0 {
        let count =
            FrameHeader::read_from_prefix(frame).expect("a block has room for it").0.entries.get();
        let mut data = 1;
        for n in 0..usize::from(count) {
            let at = size_of::<FrameHeader>() + n * size_of::<Entry>();
            let (head, blocks) = frame.split_at_mut(BLOCK_BYTES);
            let Some(bytes) = head.get_mut(at..at + size_of::<Entry>()) else { break };
            let mut entry = Entry::read_from_bytes(bytes).expect("its own size");
            if entry.kind() == Some(EntryKind::Data)
                && let Some(block) = blocks.chunks_exact(BLOCK_BYTES).nth(data - 1)
            {
                entry.crc_or_len = U32::new(crc32c(block));
                bytes.copy_from_slice(entry.as_bytes());
                data += 1;
            }
        }
    }
    if flags & BROKEN == 0 {
        seal::<FrameHeader>(&mut frame[..BLOCK_BYTES]);
    }
    if flags & CUT != 0 {
        frame.truncate(cut);
    }
}

/// What is read from a frame is written again as a frame that says the same; no other frame is
/// taken for it.
pub(crate) fn frame(bytes: &[u8]) {
    let name = FrameName { uuid: [9; 16], generation: 3, group: 1, frame: 0 };
    let mut frame = whole(name);
    patch(&mut frame, &mut Input(bytes));
    let Some(changes) = decode(&frame, name) else { return };
    let data = |change: &Change<'_>| match *change {
        Change::Data(_, bytes) => Some(bytes.to_vec()),
        Change::Zeroes(..) => None,
    };
    let blocks: Vec<Vec<u8>> = changes.iter().filter_map(data).collect();
    assert!(blocks.len() <= FRAME_BLOCKS_MAX);
    let entries = changes.iter().map(|change| match *change {
        Change::Data(block, bytes) => Entry::new(EntryKind::Data, block, crc32c(bytes)),
        Change::Zeroes(block, n, true) => Entry::new(EntryKind::WriteZeroes, block, n),
        Change::Zeroes(block, n, false) => Entry::new(EntryKind::Discard, block, n),
    });
    let mut again = vec![0; BLOCK_BYTES];
    encode_header(&mut again, name, entries);
    again.extend(blocks.concat());
    assert_eq!(decode(&again, name).as_ref(), Some(&changes));
    for other in [
        FrameName { uuid: [8; 16], ..name },
        FrameName { generation: 4, ..name },
        FrameName { group: 0, ..name },
        FrameName { frame: u32::MAX, ..name },
    ] {
        assert!(decode(&frame, other).is_none(), "{other:?}");
    }
}
