//! Measures what the index costs: bytes of memory for each cached block, and nanoseconds for each
//! operation.
//!
//! `cargo run --release -p tidepool-engine --example index_memory [BLOCKS]` (10,000,000 unless
//! given). The device is a little larger than what is cached (record headers). Fails if a budget is
//! exceeded: 12 bytes for each block at random, 5 sequential, all told.

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;
use tidepool_engine::ghost::Ghost;
use tidepool_engine::index::{Lookup, VolumeIndex};
use tidepool_engine::marks::Marks;

/// Volumes that share the cache, in the part where there are many.
const VOLUMES: u32 = 256;
/// Blocks of data for each block of record headers on the device.
const BLOCKS_PER_HEADER: u64 = 64;
const RANDOM_BYTES_MAX: f64 = 12.0;
const SEQUENTIAL_BYTES_MAX: f64 = 5.0;
/// Parts in which the cached blocks are replaced.
const BATCHES: u32 = 100;
const LOOKUPS: u32 = 4_000_000;

fn main() {
    let blocks: u32 = match std::env::args().nth(1).map(|a| a.parse()) {
        None => 10_000_000,
        Some(Ok(blocks)) if (1_000..=400_000_000).contains(&blocks) => blocks,
        Some(_) => {
            eprintln!("index_memory: the argument is a number of blocks from 1000 to 400000000");
            std::process::exit(2);
        }
    };
    // In this order, because only the first one's resident memory is all its own.
    let random = random(blocks, 10).max(random(blocks, 2));
    many_volumes(blocks);
    let sequential = sequential(blocks);
    let failed = sequential > SEQUENTIAL_BYTES_MAX || random > RANDOM_BYTES_MAX;
    println!(
        "sequential {sequential:.2} of {SEQUENTIAL_BYTES_MAX} bytes, random {random:.2} of {RANDOM_BYTES_MAX} bytes for each block: {}",
        if failed { "TOO MUCH" } else { "ok" }
    );
    std::process::exit(i32::from(failed));
}

fn sequential(blocks: u32) -> f64 {
    let mut worst: f64 = 0.0;
    for record in [64, 240] {
        let mut index = VolumeIndex::new();
        // As the log leaves it: a header before each record.
        let insert = timed(blocks / record, |i| {
            index.insert((i * record).into(), record, i * (record + 1) + 1, &mut |_, _, _| ());
        });
        let lookup = timed(LOOKUPS, |i| {
            black_box(index.lookup(scatter(i) % u64::from(blocks)));
        });
        let run = timed(LOOKUPS, |i| {
            black_box(index.lookup_run(scatter(i) % u64::from(blocks), 64));
        });
        let costs = [("insert of a record", insert), ("lookup", lookup), ("lookup_run", run)];
        worst =
            worst.max(report(&format!("sequential, records of {record}"), &index, None, &costs));
    }
    worst
}

/// Blocks at random in a volume `factor` times as large as the cache.
fn random(blocks: u32, factor: u64) -> f64 {
    let volume = u64::from(blocks) * factor;
    // Touched before the first look at the resident memory, so that they do not count.
    let mut cached: Vec<u64> = (0..u64::from(blocks)).collect();
    let mut fresh: Vec<u64> = (0..u64::from(blocks / BATCHES)).collect();
    let before = resident_bytes();
    let mut index = VolumeIndex::new();
    let mut draw = 0u32;
    let mut draw_absent = |index: &VolumeIndex| loop {
        draw += 1;
        let block = scatter(draw) % volume;
        if index.lookup(block) == Lookup::Absent {
            break block;
        }
    };
    for (position, slot) in cached.iter_mut().enumerate() {
        *slot = draw_absent(&index);
        index.insert(*slot, 1, position as u32, &mut |_, _, _| ());
    }
    let hit = timed(LOOKUPS, |i| {
        black_box(index.lookup(cached[(scatter(i) % u64::from(blocks)) as usize]));
    });
    let any = timed(LOOKUPS, |i| {
        black_box(index.lookup(scatter(i) % volume));
    });
    let costs = [("lookup of a cached block", hit), ("of any", any)];
    let worst = report(&format!("random in {factor} x the cache"), &index, Some(before), &costs);

    // The steady state: each block that comes in replaces the oldest one.
    let (mut insert, mut remove) = (0.0, 0.0);
    for old in cached.chunks_mut(fresh.len()) {
        fresh.truncate(old.len());
        fresh.iter_mut().for_each(|block| *block = draw_absent(&index));
        insert += timed(old.len() as u32, |i| {
            index.insert(fresh[i as usize], 1, blocks + i, &mut |_, _, _| ());
        }) / f64::from(BATCHES);
        remove += timed(old.len() as u32, |i| index.remove(old[i as usize], 1, &mut |_, _, _| ()))
            / f64::from(BATCHES);
        old.copy_from_slice(&fresh);
    }
    let costs = [("insert", insert), ("remove", remove)];
    worst.max(report("the same, each block replaced once", &index, Some(before), &costs))
}

/// The same number of blocks at random in many volumes, each of them ten times its part of the
/// cache. Not held against the budget: the page that each table size has begun counts for more
/// here.
fn many_volumes(blocks: u32) {
    let mut volumes: Vec<VolumeIndex> = (0..VOLUMES).map(|_| VolumeIndex::new()).collect();
    let volume_blocks = u64::from(blocks / VOLUMES) * 10;
    for position in 0..blocks {
        let volume = &mut volumes[(position % VOLUMES) as usize];
        volume.insert(scatter(position) % volume_blocks, 1, position, &mut |_, _, _| ());
    }
    let bytes: usize = volumes.iter().map(VolumeIndex::memory_bytes).sum();
    let cached: u64 = volumes.iter().map(|v| v.blocks().at).sum();
    let (index, fixed) = (bytes as f64 / cached as f64, fixed_bytes(cached));
    println!(
        "random in {VOLUMES} volumes: {cached} blocks; bytes each: index {index:.2}, marks and ghost {fixed:.2}, all {:.2}",
        index + fixed
    );
}

/// Marks and ghost, for each of so many cached blocks.
fn fixed_bytes(cached: u64) -> f64 {
    let device_blocks = (cached + cached / BLOCKS_PER_HEADER) as usize;
    let marks = Marks::new(device_blocks).memory_bytes();
    let ghost = Ghost::for_device(device_blocks).memory_bytes();
    (marks + ghost) as f64 / cached as f64
}

/// Prints one line; returns the bytes for each cached block, all told.
fn report(
    name: &str,
    index: &VolumeIndex,
    resident_before: Option<usize>,
    costs: &[(&str, f64)],
) -> f64 {
    let cached = index.blocks().at;
    let bytes = |bytes: usize| bytes as f64 / cached as f64;
    let (counted, fixed) = (bytes(index.memory_bytes()), fixed_bytes(cached));
    let mut line = format!("{name}: {cached} blocks; bytes each: index {counted:.2}");
    if let Some(before) = resident_before {
        let _ = write!(line, " (resident {:.2})", bytes(resident_bytes().saturating_sub(before)));
    }
    let _ = write!(line, ", marks and ghost {fixed:.2}, all {:.2}; ns:", counted + fixed);
    for (what, ns) in costs {
        let _ = write!(line, " {what} {ns:.0},");
    }
    println!("{}", line.trim_end_matches(','));
    counted + fixed
}

/// Nanoseconds of each of `n` calls.
fn timed(n: u32, mut call: impl FnMut(u32)) -> f64 {
    let start = Instant::now();
    (0..n).for_each(&mut call);
    start.elapsed().as_nanos() as f64 / f64::from(n)
}

/// A number that looks random, the same for the same `i`.
fn scatter(i: u32) -> u64 {
    let x = u64::from(i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Resident memory of this process, or 0 where the system does not tell.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_whitespace().nth(1).and_then(|n| n.parse::<usize>().ok());
    pages.unwrap_or(0) * 4096
}
