//! Power is lost: what was flushed is there, and what was not is lost only as a tail of the
//! acknowledged order.
//!
//! The cache file is copied right after a flush and again after further writes that were
//! acknowledged and never flushed. A device with a volatile cache may hold any mixture of the two
//! copies when the power fails; the daemon is started on such mixtures.

use std::os::unix::fs::FileExt;
use std::path::Path;

use tidepool_testkit::nbd::{self, Command};
use tidepool_testkit::one_at_a_time;
use tidepool_testkit::rng::{self, Rng};
use tidepool_testkit::stamps::{Origin, SECTOR_BYTES, Stamp, describe};
use tidepool_tests::rig::{MIB, Rig, VOLUME};

const BLOCK_BYTES: usize = 4096;
/// Writes before and after the flush, each of its own block.
const WRITES: u64 = 400;
/// Requests in flight.
const DEPTH: usize = 16;
/// How often a version is written that nothing but the test's flush is to sync.
const ATTEMPTS_MAX: usize = 5;
/// Mixtures that are tried.
const MIXTURES: u64 = 6;

fn block(seed: u64, number: u64, version: u32) -> Vec<u8> {
    let mut data = vec![0; BLOCK_BYTES];
    let sectors = BLOCK_BYTES / SECTOR_BYTES;
    for (index, sector) in data.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        let sector_number = number * sectors as u64 + index as u64;
        Stamp { origin: Origin { seed, volume: 1 }, sector: sector_number, version }.fill(sector);
    }
    data
}

/// Writes `version` to the blocks in this order on one connection; returns the blocks in the order
/// of their answers.
fn write_all(rig: &Rig, seed: u64, blocks: &[u64], version: u32) -> Vec<u64> {
    let (_, mut sender, mut receiver) = nbd::connect(&rig.socket, VOLUME).expect("connect");
    let mut answered = Vec::new();
    for (sent, &number) in blocks.iter().enumerate() {
        if sent >= DEPTH {
            answered.push(take(&mut receiver));
        }
        let command = Command {
            kind: nbd::WRITE,
            flags: 0,
            cookie: number,
            offset: number * BLOCK_BYTES as u64,
            len: BLOCK_BYTES as u32,
        };
        sender.send(command, &block(seed, number, version)).expect("send");
    }
    while answered.len() < blocks.len() {
        answered.push(take(&mut receiver));
    }
    answered
}

fn take(receiver: &mut nbd::Receiver) -> u64 {
    let (errno, cookie) = receiver.reply().expect("a reply");
    assert_eq!(errno, 0, "the write of block {cookie}");
    cookie
}

/// Writes version 1 and flushes it, then writes version 2: the cache file between the two, and the
/// blocks in the order of their last answers. `None` if something has synced the device since the
/// flush.
fn write_unsynced(rig: &Rig, seed: u64, blocks: &[u64]) -> Option<(Vec<u8>, Vec<u64>)> {
    write_all(rig, seed, blocks, 1);
    rig.client().expect("connect").flush().expect("flush");
    let syncs = rig.cache_number("syncs");
    let old = std::fs::read(&rig.cache).expect("the cache file");
    let answered = write_all(rig, seed, blocks, 2);
    (rig.cache_number("syncs") == syncs).then_some((old, answered))
}

/// Makes `cache` a mixture: each sector in which the copies differ is the older or the newer one.
fn mix(cache: &Path, old: &[u8], new: &[u8], rng: &mut Rng, percent_old: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(cache).expect("the cache file");
    file.write_all_at(new, 0).expect("write");
    for (index, (before, after)) in
        old.chunks(SECTOR_BYTES).zip(new.chunks(SECTOR_BYTES)).enumerate()
    {
        if before != after && rng.chance(percent_old) {
            file.write_all_at(before, (index * SECTOR_BYTES) as u64).expect("write");
        }
    }
}

#[test]
fn g3_what_was_not_flushed_is_lost_only_as_a_tail_of_the_acknowledged_order() {
    let _turn = one_at_a_time();
    let seed = rng::seed(31);
    let mut rng = Rng::new(seed);
    let mut rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    // Nothing is drained, so that nothing but the log is written and synced.
    rig.close_gate();
    let blocks: Vec<u64> = (0..WRITES).map(|number| number * 7 % WRITES).collect();
    // A checkpoint syncs the device behind the test's back at times.
    let unsynced = (0..ATTEMPTS_MAX).find_map(|_| write_unsynced(&rig, seed, &blocks));
    let (old, answered) = unsynced.expect("a moment in which nothing else syncs the device");
    rig.daemon.kill().expect("kill");
    let new = std::fs::read(&rig.cache).expect("the cache file");
    let mut told = false;
    for mixture in 0..MIXTURES {
        let percent_old = [0, 1, 5, 20, 50, 100][mixture as usize % 6];
        mix(&rig.cache, &old, &new, &mut rng, percent_old);
        rig.daemon.start().expect("it starts on the mixture");
        let mut client = rig.client().expect("connect");
        let mut cut = None;
        for (place, &number) in answered.iter().enumerate() {
            let data = client
                .read(number * BLOCK_BYTES as u64, BLOCK_BYTES)
                .expect("no torn write is an error");
            if data == block(seed, number, 2) {
                assert_eq!(
                    cut, None,
                    "mixture {mixture}: write {place} is there, an earlier one is not"
                );
            } else {
                assert_eq!(
                    data,
                    block(seed, number, 1),
                    "mixture {mixture}: {}",
                    describe(&data[..SECTOR_BYTES])
                );
                cut.get_or_insert(place);
            }
        }
        let says = rig.daemon.log().contains("records of the cache's log are cut off");
        assert!(!says || cut.is_some(), "mixture {mixture}: nothing is cut off");
        told |= says;
        match percent_old {
            0 => assert_eq!(cut, None, "nothing was lost, so nothing may be missing"),
            100 => assert_eq!(cut, Some(0), "what is on no medium cannot be there"),
            _ => {}
        }
        println!(
            "mixture {mixture} with {percent_old} % old sectors: {} of {WRITES} unflushed writes kept",
            cut.unwrap_or(answered.len())
        );
        rig.daemon.kill().expect("kill");
    }
    assert!(told, "what is cut off is told");
}

#[test]
fn g1_an_old_copy_of_the_cache_is_refused() {
    let _turn = one_at_a_time();
    let mut rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    // Nothing is drained, so that nothing but the ownership record tells.
    rig.close_gate();
    let blocks: Vec<u64> = (0..WRITES).collect();
    write_all(&rig, 1, &blocks, 1);
    rig.daemon.kill().expect("kill");
    let old = std::fs::read(&rig.cache).expect("the cache file");
    for _ in 0..2 {
        rig.daemon.start().expect("its cache takes the image back");
        write_all(&rig, 1, &blocks, 2);
        rig.daemon.kill().expect("kill");
    }
    let new = std::fs::read(&rig.cache).expect("the cache file");
    std::fs::write(&rig.cache, &old).expect("the copy comes back");
    let (image, record) = (rig.image(), rig.image().with_extension("tidepool"));
    let before = [&image, &record].map(|path| std::fs::read(path).expect("a file"));
    rig.daemon.start().expect_err("the copy is refused");
    let log = rig.daemon.log();
    assert!(
        log.contains("the cache device has lost data") && log.contains("tidepool recover"),
        "{log}"
    );
    assert!(
        [&image, &record].map(|path| std::fs::read(path).expect("a file")) == before,
        "nothing is touched"
    );
    std::fs::write(&rig.cache, &new).expect("the newest comes back");
    rig.daemon.start().expect("it is the one that the image knows");
    let mut client = rig.client().expect("connect");
    for &number in &blocks {
        let data = client.read(number * BLOCK_BYTES as u64, BLOCK_BYTES).expect("a block");
        assert!(data == block(1, number, 2), "block {number}");
    }
}
