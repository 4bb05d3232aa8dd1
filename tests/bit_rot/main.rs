//! Bytes on the cache device change: a bad clean block is fetched again, a bad dirty block reads as
//! an error and nothing else does.
//!
//! Blocks are found on the device by their content, which is unique, so that the tests know nothing
//! of the format.

use std::os::unix::fs::FileExt;
use std::path::Path;

use tidepool_testkit::nbd::Client;
use tidepool_testkit::stamps::{Origin, SECTOR_BYTES, Stamp};
use tidepool_testkit::{Error, one_at_a_time, rng};
use tidepool_tests::pair::{Pair, PairOptions};
use tidepool_tests::rig::{MIB, Rig, VOLUME, refused};

const BLOCK_BYTES: usize = 4096;
const EIO: u32 = 5;

fn block(seed: u64, number: u64) -> Vec<u8> {
    let mut data = vec![0; BLOCK_BYTES];
    for (index, sector) in data.chunks_exact_mut(SECTOR_BYTES).enumerate() {
        let sector_number = number * (BLOCK_BYTES / SECTOR_BYTES) as u64 + index as u64;
        Stamp { origin: Origin { seed, volume: 1 }, sector: sector_number, version: 1 }
            .fill(sector);
    }
    data
}

/// Changes one bit of every copy of `content` in the cache file, at `place` of each; returns the
/// number of copies.
fn rot(cache: &Path, content: &[u8], place: usize) -> usize {
    let file =
        std::fs::OpenOptions::new().read(true).write(true).open(cache).expect("the cache file");
    let all = std::fs::read(cache).expect("the cache file");
    let mut copies = 0;
    for (index, found) in all.chunks(BLOCK_BYTES).enumerate() {
        if found == content {
            let at = (index * BLOCK_BYTES + place) as u64;
            file.write_all_at(&[found[place] ^ 0x10], at).expect("write");
            copies += 1;
        }
    }
    copies
}

fn write_blocks(rig: &Rig, seed: u64, count: u64) {
    let mut client = rig.client().expect("connect");
    for number in 0..count {
        client.write(number * BLOCK_BYTES as u64, &block(seed, number)).expect("write");
    }
    client.flush().expect("flush");
}

#[test]
fn g7_a_rotten_clean_block_is_fetched_again_while_the_daemon_runs() {
    let _turn = one_at_a_time();
    let seed = rng::seed(51);
    let rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    write_blocks(&rig, seed, 64);
    rig.admin.drain(VOLUME).expect("drain");
    for (number, place) in [(3, 0), (4, 2000), (5, BLOCK_BYTES - 1)] {
        assert!(rot(&rig.cache, &block(seed, number), place) > 0, "block {number} is in the cache");
    }
    let mut client = rig.client().expect("connect");
    for number in 0..64 {
        assert_eq!(
            client.read(number * BLOCK_BYTES as u64, BLOCK_BYTES).expect("read"),
            block(seed, number)
        );
    }
    assert!(rig.volume_number("corrupt_blocks") >= 3, "nothing is silent");
    assert_eq!(rig.volume_number("lost_blocks"), 0);
}

#[test]
fn g7_a_rotten_clean_block_is_fetched_again_after_a_restart() {
    let _turn = one_at_a_time();
    let seed = rng::seed(52);
    let mut rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    write_blocks(&rig, seed, 64);
    rig.admin.drain(VOLUME).expect("drain");
    assert!(rig.daemon.terminate().expect("it ends").success());
    assert!(rot(&rig.cache, &block(seed, 9), 100) > 0, "the block is in the cache");
    rig.daemon.start().expect("it starts again");
    let mut client = rig.client().expect("connect");
    for number in 0..64 {
        assert_eq!(
            client.read(number * BLOCK_BYTES as u64, BLOCK_BYTES).expect("read"),
            block(seed, number)
        );
    }
}

#[test]
fn g7_a_rotten_dirty_block_reads_as_an_error_until_it_is_overwritten() {
    let _turn = one_at_a_time();
    let seed = rng::seed(53);
    let mut rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    rig.close_gate();
    write_blocks(&rig, seed, 64);
    let bad = 9;
    assert!(rot(&rig.cache, &block(seed, bad), 100) > 0, "the block is in the cache");
    let check = |rig: &Rig| {
        let mut client = rig.client().expect("connect");
        for number in 0..64 {
            let read = client.read(number * BLOCK_BYTES as u64, BLOCK_BYTES);
            match read {
                Err(Error::Refused { errno: EIO, .. }) => {
                    assert_eq!(number, bad, "only the bad block is lost")
                }
                Ok(data) => {
                    assert_ne!(number, bad, "a block without a good copy must not be served");
                    assert_eq!(data, block(seed, number));
                }
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(rig.volume_number("lost_blocks"), 1, "it is counted");
    };
    check(&rig);
    rig.daemon.kill().expect("kill");
    rig.daemon.start().expect("it starts again");
    check(&rig);
    rig.open_gate();
    // The drain goes on without it.
    let limit = std::time::Duration::from_secs(60);
    rig.admin
        .wait_volume(VOLUME, limit, |volume| volume["dirty_bytes"].as_u64() <= Some(4096))
        .expect("it drains");
    let image = std::fs::read(rig.image()).expect("the image");
    let at = bad as usize * BLOCK_BYTES;
    assert!(
        image[at..at + BLOCK_BYTES].iter().all(|&byte| byte == 0),
        "a bad block is never drained"
    );
    assert_eq!(image[at + BLOCK_BYTES..at + 2 * BLOCK_BYTES], block(seed, bad + 1));
    let mut client = rig.client().expect("connect");
    client.write(bad * BLOCK_BYTES as u64, &block(seed, bad)).expect("overwrite");
    assert_eq!(client.read(bad * BLOCK_BYTES as u64, BLOCK_BYTES).expect("read"), block(seed, bad));
    assert_eq!(rig.volume_number("lost_blocks"), 0);
}

#[test]
fn g7_a_rotten_block_is_not_drained() {
    let _turn = one_at_a_time();
    let seed = rng::seed(54);
    let mut rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    rig.close_gate();
    write_blocks(&rig, seed, 16);
    // Nobody reads it before the drain does.
    assert!(rot(&rig.cache, &block(seed, 2), 8) > 0, "the block is in the cache");
    rig.daemon.kill().expect("kill");
    rig.daemon.start().expect("it starts again");
    rig.open_gate();
    let limit = std::time::Duration::from_secs(60);
    rig.admin.wait_volume(VOLUME, limit, |volume| volume["lost_blocks"] == 1).expect("it is found");
    rig.admin
        .wait_volume(VOLUME, limit, |volume| volume["dirty_bytes"].as_u64() <= Some(4096))
        .expect("it drains");
    let image = std::fs::read(rig.image()).expect("the image");
    assert!(
        image[2 * BLOCK_BYTES..3 * BLOCK_BYTES].iter().all(|&byte| byte == 0),
        "a bad block is never drained"
    );
    assert_eq!(image[3 * BLOCK_BYTES..4 * BLOCK_BYTES], block(seed, 3));
}

#[test]
fn one_bad_copy_of_the_superblock_is_survived_and_two_are_refused() {
    let _turn = one_at_a_time();
    let seed = rng::seed(55);
    let mut rig = Rig::with_file(64 * MIB, 128 * MIB).expect("the daemon starts");
    write_blocks(&rig, seed, 16);
    rig.daemon.kill().expect("kill");
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&rig.cache)
        .expect("the cache file");
    let mut first = [0; BLOCK_BYTES];
    file.read_exact_at(&mut first, 0).expect("read");
    file.write_all_at(&[0x5a; BLOCK_BYTES], 0).expect("write");
    rig.daemon.start().expect("the second copy suffices");
    let mut client = rig.client().expect("connect");
    assert_eq!(client.read(0, BLOCK_BYTES).expect("read"), block(seed, 0));
    rig.daemon.kill().expect("kill");

    // Both copies: whatever begins with the superblock's magic bytes in the first two MiB.
    let mut head = vec![0; 2 * MIB as usize];
    file.read_exact_at(&mut head, 0).expect("read");
    for (index, found) in head.chunks(BLOCK_BYTES).enumerate() {
        if found[..8] == first[..8] {
            file.write_all_at(&[0x5a; BLOCK_BYTES], (index * BLOCK_BYTES) as u64).expect("write");
        }
    }
    let before = std::fs::read(&rig.cache).expect("the cache file");
    let cache = rig.cache.display().to_string();
    let nbd = format!("nbd+unix:///?socket={}", rig.scratch.join("other.sock").display());
    let admin = rig.scratch.join("other-admin.sock").display().to_string();
    let (status, line) = refused(["serve", "--cache", &cache, "--nbd", &nbd, "--admin", &admin]);
    assert_eq!(status, 1);
    assert!(line.contains(&cache), "{line}");
    assert_eq!(std::fs::read(&rig.cache).expect("the cache file"), before, "nothing is touched");
}

/// One of a pair's hosts has a block whose only copy in its cache is bad, and the image does not
/// have it yet.
#[test]
fn g7_a_rotten_dirty_block_comes_back_from_the_second_copy() {
    let _turn = one_at_a_time();
    let options =
        PairOptions { cache_bytes: 64 * MIB, image: Err(32 * MIB), ..PairOptions::default() };
    let mut pair = Pair::new(&options).expect("two hosts in sync");
    let number = |pair: &Pair, key: &str| {
        let volume = pair.owner().volume().expect("status").expect("the volume");
        volume["counters"][key].as_u64().or(volume[key].as_u64()).expect("a figure")
    };
    // Two seconds after a write the image has it: then there was nothing to repair, and it is tried
    // again.
    for round in 0..20 {
        let seed = rng::seed(54 + round);
        let mut client = Client::connect(&pair.owner().socket, VOLUME).expect("connect");
        for at in 0..16 {
            client.write(at * BLOCK_BYTES as u64, &block(seed, at)).expect("write");
        }
        for at in [3, 4, 11] {
            assert!(
                rot(&pair.owner().cache, &block(seed, at), 100) > 0,
                "the block is in the cache"
            );
        }
        for at in 0..16 {
            let found = client.read(at * BLOCK_BYTES as u64, BLOCK_BYTES).expect("read");
            assert!(found == block(seed, at), "block {at}");
        }
        assert_eq!(number(&pair, "lost_blocks"), 0);
        if number(&pair, "repaired_blocks") == 0 {
            continue;
        }
        // What came back is as good as what was written.
        drop(client);
        let owner = pair.owner;
        pair.hosts[owner].daemon.kill().expect("kill");
        pair.hosts[owner].daemon.start().expect("it starts");
        pair.owner().wait_sync().expect("in sync again");
        let mut client = Client::connect(&pair.owner().socket, VOLUME).expect("connect");
        for at in 0..16 {
            let found = client.read(at * BLOCK_BYTES as u64, BLOCK_BYTES).expect("read");
            assert!(found == block(seed, at), "block {at} after a restart");
        }
        return;
    }
    panic!("no dirty block has gone bad in time");
}
