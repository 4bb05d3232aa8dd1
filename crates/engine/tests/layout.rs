//! Where things stand on the device, in numbers: the same code writes and reads them, so that other
//! tests see a change of both.

use tidepool_engine::format::{
    CheckpointHeader, EXTENTS_PER_PAGE, Geometry, Superblock, byte, open,
};
use zerocopy::FromZeros;

const MIB: u64 = 1 << 20;

fn geometry(size_bytes: u64, segment_bytes: Option<u32>) -> Geometry {
    Geometry::new([7; 16], size_bytes, segment_bytes).expect("a valid size")
}

#[test]
fn a_geometry_follows_from_the_size_alone() {
    let of = |size_bytes, segment_bytes| {
        let g = geometry(size_bytes, segment_bytes);
        let pages = [g.volume_pages, g.extent_pages];
        (
            g.device_blocks,
            [g.segment_blocks, g.segments, g.segments_first_block, g.slot_blocks],
            pages,
        )
    };
    assert_eq!(of(64 * MIB, None), (1 << 14, [256, 61, 768, 35], [16, 16]));
    assert_eq!(of(64 * MIB, Some(256 << 10)), (1 << 14, [64, 245, 704, 36], [16, 16]));
    assert_eq!(of(1024 * MIB - 1, None).1[0], 256);
    assert_eq!(of(1024 * MIB, None), (1 << 18, [1024, 253, 3072, 532], [256, 256]));
    assert_eq!(of(8192 * MIB - 1, None).1[0], 1024);
    assert_eq!(of(8192 * MIB, None), (1 << 21, [2048, 1022, 4096, 660], [256, 256]));
    assert_eq!(of(8 << 40, None), (1 << 31, [2048, 1_048_282, 602_112, 150_310], [256, 256]));
}

#[test]
fn a_device_that_is_too_small_or_too_large_or_has_impossible_segments_has_no_geometry() {
    let none = |size_bytes, segment_bytes| {
        assert_eq!(
            Geometry::new([7; 16], size_bytes, segment_bytes),
            None,
            "{size_bytes} {segment_bytes:?}"
        )
    };
    none(64 * MIB - 1, None);
    none((8 << 40) + 1, None);
    for segment_bytes in [0, 128 << 10, 32 << 20, 384 << 10] {
        none(1024 * MIB, Some(segment_bytes));
    }
    assert_eq!(geometry(1024 * MIB, Some(16 << 20)).segment_blocks, 4096);
    none(64 * MIB, Some(4 << 20));
}

#[test]
fn pages_slots_and_segments_stand_where_the_format_says() {
    let g = geometry(1024 * MIB, None);
    assert_eq!((g.segment_item_bytes(), g.segments_per_page()), (16 + 2 * 128, 14));
    assert_eq!((g.segment_pages(), g.pages()), (19, 19 + 256 + 256));
    assert_eq!((EXTENTS_PER_PAGE, g.extents_max()), (254, 256 * 254));
    let slots = [g.slot_block(0, 0), g.slot_block(0, 1), g.slot_block(1, 0), g.slot_block(1, 1)];
    assert_eq!(slots, [512, 512 + 532, 512 + 2 * 532, 512 + 3 * 532]);
    assert_eq!((g.segment_block(0), g.segment_block(3)), (3072, 3072 + 3 * 1024));
    assert_eq!(
        [3072, 4095, 4096, 3072 + 9 * 1024].map(|position| g.segment_of(position)),
        [0, 0, 1, 9]
    );
    assert_eq!(byte(3072), 3072 * 4096);
    let summary = |records, entries| Geometry::summary_blocks(records, entries);
    // 48 bytes, 20 for each record and 12 for each entry.
    assert_eq!((summary(0, 0), summary(202, 0), summary(203, 0)), (1, 1, 2));
    assert_eq!((summary(0, 337), summary(0, 338), summary(1000, 1000)), (1, 2, 8));
}

#[test]
fn a_superblock_that_does_not_follow_from_its_size_is_refused() {
    let g = geometry(1024 * MIB, None);
    let good: Superblock = open(&g.superblock()).expect("sealed");
    assert_eq!(Geometry::from_superblock(&good), Some(g));
    let changes: [fn(&mut Superblock); 7] = [
        |sb| sb.device_blocks.set(sb.device_blocks.get() + 1024),
        |sb| sb.segment_blocks.set(512),
        |sb| sb.segments.set(sb.segments.get() - 1),
        |sb| sb.segments_first_block.set(sb.segments_first_block.get() + 1024),
        |sb| sb.slot_blocks.set(sb.slot_blocks.get() - 1),
        |sb| sb.volume_pages.set(16),
        |sb| sb.extent_pages.set(16),
    ];
    for (n, change) in changes.iter().enumerate() {
        let mut sb = good;
        change(&mut sb);
        assert_eq!(Geometry::from_superblock(&sb), None, "change {n}");
    }
}

#[test]
fn a_checkpoint_without_a_version_is_of_the_first_and_any_other_tells_its_own() {
    let mut header = CheckpointHeader::new_zeroed();
    assert_eq!(header.format_version(), 1);
    header.version.set(7);
    assert_eq!(header.format_version(), 7);
}
