//! What can be read from a cache device on which no core runs.

use crate::common::*;
use std::collections::HashSet;
use std::convert::Infallible;
use tidepool_engine::api::*;
use tidepool_engine::format::FORMAT_VERSION;
use tidepool_engine::{
    Content, Contents, Engine, EngineConfig, FormatOptions, RecoveryReport, check, format_device,
    inspect,
};

/// A stretch without its bytes: offset, length, dirty, and whether it has bytes, is zero, damaged
/// or lost.
type Seen = (u64, u64, bool, char);

/// The image with what the device holds of volume 0 above it, and all that was seen.
fn rescue(w: &mut World) -> (Vec<u8>, Vec<Seen>) {
    let contents = Contents::open(&mut w.device).expect("a cache");
    let id = contents.volumes()[0].id;
    let (mut image, mut seen) = (w.images[0].clone(), Vec::new());
    let Ok(()) = contents.read(&mut w.device, id, &mut |stretch| {
        let range = stretch.offset as usize..(stretch.offset + stretch.len) as usize;
        let kind = match stretch.content {
            Content::Data(data) => {
                image[range].copy_from_slice(data);
                'd'
            }
            Content::Zero => {
                image[range].fill(0);
                'z'
            }
            Content::Damaged => 'x',
            Content::Lost => 'l',
        };
        seen.push((stretch.offset, stretch.len, stretch.dirty, kind));
        Ok::<(), Infallible>(())
    });
    (image, seen)
}

#[test]
fn the_image_with_the_cache_above_it_is_what_clients_saw() {
    let size = 8 * MIB + 512;
    let mut w = World::new(64 * MIB, &[spec("a", size, Mode::WriteBack)]);
    w.images[0].fill(0x11);
    for half in 0..2 {
        w.write(0, half * (256 << 10), &pattern(half, 256 << 10));
    }
    w.drain(0);
    // With a checkpoint: what was drained since the last one counts as dirty.
    w.control(|e, now, c| e.set_dirty_bytes_max(now, VolumeId(0), 32 * MIB, c)).expect("recorded");
    w.read(0, 8 * MIB, 512);
    // Until it is in the read cache.
    w.pass(100_000_000);
    w.backend_stopped = true;
    w.write(0, 64 << 10, &pattern(2, 128 << 10));
    w.op(0, Op::Discard { fua: false }, 5 * MIB, MIB).expect("discard");
    w.write(0, 8 * MIB, &pattern(3, 512));
    let mut model = w.images[0].clone();
    model[64 << 10..192 << 10].copy_from_slice(&pattern(2, 128 << 10));
    model[5 << 20..6 << 20].fill(0);
    model[8 << 20..].copy_from_slice(&pattern(3, 512));
    // Others have written where the cache has clean data, and where it has dirty data.
    w.images[0][..4096].fill(0x66);
    w.images[0][100 << 10..104 << 10].fill(0x66);

    let before = w.device.0.clone();
    let (rescued, seen) = rescue(&mut w);
    assert!(rescued == model, "{seen:?}");
    assert!(w.device.0 == before, "looking changes nothing");
    assert!(seen.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "in order: {seen:?}");
    let bytes_of = |dirty: bool, kind: char| -> u64 {
        seen.iter().filter(|s| (s.2, s.3) == (dirty, kind)).map(|s| s.1).sum()
    };
    assert_eq!(bytes_of(true, 'd'), (128 << 10) + 512);
    assert_eq!(bytes_of(false, 'd'), 384 << 10);
    assert_eq!(bytes_of(true, 'z'), MIB);
}

#[test]
fn g7_what_does_not_verify_is_shown_as_damaged_and_costs_nothing_around_it() {
    let mut w = World::new(64 * MIB, &[spec("a", 8 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    let data = pattern(1, 256 << 10);
    w.write(0, 0, &data);
    // With a checkpoint behind it: what is damaged in the log's tail is lost already when it is
    // replayed.
    w.restart(true);
    w.corrupt(&data[40960..45056]);
    let (rescued, seen) = rescue(&mut w);
    assert!(seen.contains(&(40960, 4096, true, 'x')), "{seen:?}");
    assert!(rescued[..40960] == data[..40960] && rescued[45056..256 << 10] == data[45056..]);
    assert!(rescued[40960..45056] == w.images[0][40960..45056], "no byte of it is handed out");
}

#[test]
fn a_long_run_is_shown_whole_and_no_further_and_a_bad_block_spoils_itself_only() {
    let mut w = World::with_segments(64 * MIB, 1 << 20, &[spec("a", 8 * MIB, Mode::WriteBack)]);
    // Appends as large as in the service: runs are longer than what is read at once.
    let config = EngineConfig { append_bytes: 512 << 10, ..EngineConfig::small() };
    w.engine = Engine::open(&mut w.device, config, 0).expect("open").0;
    w.attach(true);
    w.flush(0);
    w.backend_stopped = true;
    let data = pattern(1, 400 << 10);
    let write = Op::Write { fua: false };
    w.submit(0, write, MIB, 200 << 10, Some(&data[..200 << 10]));
    w.submit(0, write, MIB + (200 << 10), 200 << 10, Some(&data[200 << 10..]));
    w.run();
    let shown = |w: &mut World, unreadable: Vec<u64>| {
        let contents = Contents::open(&mut w.device).expect("a cache");
        let mut device = Overlay { unreadable, ..Overlay::on(&w.device.0) };
        let (mut shown, mut seen) = (Vec::new(), Vec::new());
        let Ok(()) = contents.read(&mut device, VolumeId(0), &mut |stretch| {
            match stretch.content {
                Content::Data(bytes) => shown.extend_from_slice(bytes),
                _ => seen.push((stretch.offset, stretch.len)),
            }
            Ok::<(), Infallible>(())
        });
        (shown, seen)
    };
    assert!(shown(&mut w, vec![]) == (data.clone(), vec![]));
    for block in [0, 40, 63, 64, 99] {
        let at = block * BLOCK_BYTES;
        let on_device =
            w.device.0.chunks(BLOCK_BYTES).position(|b| *b == data[at..at + BLOCK_BYTES]);
        let unreadable = vec![on_device.expect("it is there") as u64];
        let rest = [&data[..at], &data[at + BLOCK_BYTES..]].concat();
        let expected = (rest, vec![(MIB + at as u64, BLOCK_BYTES as u64)]);
        assert!(shown(&mut w, unreadable) == expected, "block {block}");
    }
}

#[test]
fn a_look_and_a_check_tell_what_is_on_the_device() {
    let mut w = World::new(64 * MIB, &[spec("a", 8 * MIB, Mode::WriteBack)]);
    w.backend_stopped = true;
    let data = pattern(1, 256 << 10);
    w.write(0, 0, &data);
    w.write(0, MIB, &data);
    w.restart(true);
    let looked = inspect(&mut w.device).expect("a cache");
    assert_eq!((looked.device.cached_blocks, looked.device.size_bytes), (128, 64 * MIB));
    assert_eq!(looked.format_version, FORMAT_VERSION);
    assert_eq!((looked.volumes.len(), looked.volumes[0].dirty_bytes), (1, 512 << 10));
    let mut progress = Vec::new();
    let report =
        check(&mut w.device, &mut |done, all| progress.push((done, all))).expect("a cache");
    assert_eq!((report.blocks, report.damaged.len()), (128, 0));
    assert_eq!(progress.last(), Some(&(128, 128)));
    assert!(progress.iter().all(|&(_, all)| all == 128));
}

#[test]
fn g7_a_check_verifies_every_block_and_names_the_first_thousand_that_are_damaged() {
    let mut w = World::new(64 * MIB, &["a", "b"].map(|name| spec(name, 16 * MIB, Mode::WriteBack)));
    w.write(0, 0, &pattern(1, 256 << 10));
    w.drain(0);
    w.backend_stopped = true;
    let pieces: Vec<Vec<u8>> = (0..16).map(|i| pattern(100 + i, 256 << 10)).collect();
    for (i, piece) in pieces.iter().enumerate() {
        w.write(1, i as u64 * (256 << 10), piece);
    }
    w.op(1, Op::Discard { fua: false }, 8 * MIB, MIB).expect("discard");
    w.restart(true);
    let (total, block) = (16 * 64 + 64, BLOCK_BYTES as u64);
    let mut seen = Vec::new();
    let report = check(&mut w.device, &mut |done, all| seen.push((done, all))).expect("a cache");
    assert_eq!((report.blocks, report.damaged), (total, vec![]));
    assert_eq!(report.recovery, inspect(&mut w.device).expect("a cache").recovery);
    assert_ne!(report.recovery, RecoveryReport::default());
    assert_eq!(seen.last(), Some(&(total, total)));
    // One, then more than are named.
    let damage = |w: &mut World, content: &[u8]| assert_eq!(w.corrupt(content).len(), 1);
    damage(&mut w, &pieces[3][5 * 4096..6 * 4096]);
    let report = check(&mut w.device, &mut |_, _| ()).expect("a cache");
    assert_eq!((report.blocks, report.damaged.len()), (total, 1));
    let (spec, at, dirty) = &report.damaged[0];
    assert_eq!((&spec.name[..], *at, *dirty), ("b", (3 * 64 + 5) * block, true));
    let first: HashSet<[u8; 16]> = pieces
        .iter()
        .flat_map(|p| p.chunks(4096))
        .map(|b| b[..16].try_into().expect("16 bytes"))
        .collect();
    let blocks = w.device.0.chunks_exact_mut(4096);
    blocks.filter(|b| first.contains(&b[..16])).for_each(|b| b[9] ^= 1);
    let report = check(&mut w.device, &mut |_, _| ()).expect("a cache");
    assert_eq!((report.blocks, report.damaged.len()), (total, 1000));
}

#[test]
fn the_whole_device_is_written_when_it_is_laid_out_and_nothing_of_what_was_there_stays() {
    let size = 64 * MIB + 4096 * 37;
    let mut device = MemoryDevice(vec![0x77; size as usize + (1 << 20)]);
    let options = FormatOptions { uuid: [9; 16], size_bytes: size, segment_bytes: None };
    let mut seen = Vec::new();
    format_device(&mut device, &options, &mut |done, all| seen.push((done, all))).expect("format");
    let total = Contents::open(&mut device).expect("a cache").device().size_bytes;
    assert_eq!(total, size);
    assert!(!device.0[..size as usize].chunks(4096).any(|block| block.iter().all(|&b| b == 0x77)));
    assert!(device.0[size as usize..].iter().all(|&b| b == 0x77), "what is not used is left alone");
    assert_eq!(seen.len(), 65, "in steps of a MiB");
    assert!(
        seen.iter().zip(1..).all(|(&step, n)| step == ((n * MIB).min(total), total)),
        "{seen:?}"
    );
}
