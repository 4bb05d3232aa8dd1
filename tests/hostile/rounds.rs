//! Clients that ask for as much work as they can: what is done between two looks at the ring is
//! bounded, and their neighbours go on.

use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use tidepool_testkit::hostile::{End, PIPELINED, attack, attacks};
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Scratch, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

/// The volume of the neighbour.
const NEIGHBOUR: &str = "neighbour";
/// Of the one whose clients ask for much.
const SIZE_BYTES: u64 = 8 << 30;
/// What of it is cached, every second block.
const CACHED_BYTES: u64 = 64 * MIB;
/// The attacks that are about what is cached.
const OF_CACHED: [&str; 2] = ["block status", "cached reads"];
const CONNECTIONS: usize = 24;
/// Requests of the neighbour under each attack.
const REQUESTS: usize = 150;
/// What all clients together have done in a round, and what one request may go past that; see the
/// daemon's `shard/front/effort.rs`.
const ROUND_MAX: u64 = 8 * 1024;
const LARGEST_REQUEST: u64 = (64 << 20) / 4096 + 1;

/// Uses its volume, and says how long that took at the median and at worst.
fn neighbour(rig: &Rig) -> (f64, f64) {
    let mut client = Client::connect(&rig.socket, NEIGHBOUR).expect("connected");
    let mut took_ms: Vec<f64> = (0..REQUESTS)
        .map(|number| {
            let start = Instant::now();
            client.write((number % 64) as u64 * 4096, &[number as u8; 4096]).expect("absorbed");
            assert_eq!(
                client.read((number % 64) as u64 * 4096, 4096).expect("read"),
                [number as u8; 4096]
            );
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    took_ms.sort_by(f64::total_cmp);
    (took_ms[REQUESTS / 2], took_ms[REQUESTS - 1])
}

fn served() -> Rig {
    let scratch = Scratch::new("hostile").expect("a directory");
    let volumes = [(VOLUME, SIZE_BYTES), (NEIGHBOUR, 64 * MIB)].map(|(name, bytes)| {
        let image = scratch.join(name);
        File::create(&image).and_then(|file| file.set_len(bytes)).expect("an image");
        (name.to_owned(), format!("file:{}", image.display()))
    });
    let options = RigOptions { cache_bytes: 256 * MIB, volumes: volumes.into(), extra: Vec::new() };
    let mut rig = Rig::within(scratch, &options).expect("a rig");
    rig.daemon.start().expect("it starts");
    let mut client = rig.client().expect("connected");
    for at in (0..CACHED_BYTES).step_by(2 * 4096) {
        client.write(at, &[1; 4096]).expect("absorbed");
    }
    client.flush().expect("flushed");
    rig
}

#[test]
fn g8_what_clients_have_done_in_a_round_is_bounded_and_their_neighbours_go_on() {
    let _turn = one_at_a_time();
    let rig = served();
    let socket = &rig.socket;
    let (median_ms, worst_ms) = neighbour(&rig);
    println!("idle         {median_ms:8.2} ms at the median, {worst_ms:8.2} ms at worst");
    let mut client = rig.client().expect("connected");
    for (name, what) in attacks(CACHED_BYTES as u32) {
        let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        let (median_ms, worst_ms) = std::thread::scope(|scope| {
            let _end = End(&over);
            for _ in 0..CONNECTIONS {
                scope.spawn(|| attack((socket, VOLUME), &what, &over, &sent));
            }
            while sent.load(Ordering::Relaxed) < (CONNECTIONS * PIPELINED) as u64 {
                std::thread::yield_now();
            }
            neighbour(&rig)
        });
        if OF_CACHED.contains(&name) {
            let last = client.read(CACHED_BYTES - 2 * 4096, 4096).expect("read");
            assert_eq!(last, [1; 4096], "{name}: what is cached was not there any more");
        }
        let reactor = rig.admin.status().expect("a status")["reactor"].clone();
        println!(
            "{name:12} {median_ms:8.2} ms at the median, {worst_ms:8.2} ms at worst; {} sent, a round {}",
            sent.load(Ordering::Relaxed),
            reactor["round_effort_max"]
        );
        // Those of two volumes, and those that shake hands.
        let most = ROUND_MAX + ROUND_MAX / 2 + ROUND_MAX / 3 + 3 * LARGEST_REQUEST;
        assert!(reactor["round_effort_max"].as_u64().is_some_and(|done| done <= most), "{reactor}");
    }
}
