//! Runs inside the guest: writes files in which every block carries its file, place and version,
//! syncs the files, and checks them.
//!
//! `verifier run DIRECTORY SEED ROUNDS` rewrites the files in a sequence that SEED gives, ROUNDS
//! times in all or until the file /tmp/stop exists. After each fsync the program prints
//! `synced FILE VERSION`: from then on this version must survive. Every six rounds the program
//! drops the page cache and checks all files. `verifier check DIRECTORY SEED FILE:VERSION...`
//! checks after a crash that every block of every file holds this version or the next one, which
//! was being written.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BLOCK_BYTES: usize = 4096;
const FILES: u64 = 12;
const BLOCKS_MAX: u64 = 48;
const CHECK_EVERY: u64 = 6;

fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The number of blocks of a file. All versions of a file have this number, so every version
/// replaces all blocks of the version before.
fn blocks(seed: u64, file: u64) -> u64 {
    1 + mix(seed ^ mix(file)) % BLOCKS_MAX
}

fn fill(block: &mut [u8], seed: u64, file: u64, index: u64, version: u64) {
    let key = mix(seed ^ mix(file << 32 | index) ^ mix(version << 1));
    let head = [file, index, version];
    for (place, bytes) in block.chunks_exact_mut(8).enumerate() {
        let word = head.get(place).copied().unwrap_or_else(|| key.wrapping_add(place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}

fn path(directory: &Path, file: u64) -> PathBuf {
    directory.join(format!("file{file}"))
}

fn fail(text: &str) -> ! {
    println!("verifier-failed {text}");
    std::process::exit(1);
}

fn must<T>(result: std::io::Result<T>, what: &str) -> T {
    result.unwrap_or_else(|error| fail(&format!("{what}: {error}")))
}

fn write(directory: &Path, seed: u64, file: u64, version: u64) {
    let path = path(directory, file);
    let output = must(OpenOptions::new().write(true).create(true).truncate(false).open(&path), "open");
    let mut block = vec![0; BLOCK_BYTES];
    for index in 0..blocks(seed, file) {
        fill(&mut block, seed, file, index, version);
        must(output.write_all_at(&block, index * BLOCK_BYTES as u64), "write");
    }
    must(output.sync_all(), "fsync");
    if version == 1 {
        must(must(File::open(directory), "open the directory").sync_all(), "fsync of the directory");
    }
}

/// Checks that every block of a file has a version of `least..=most`. With a `least` of 0, the file
/// or a block may also be missing or zero.
fn check(directory: &Path, seed: u64, file: u64, least: u64, most: u64) {
    if least == 0 && !path(directory, file).exists() {
        return;
    }
    let input = must(File::open(path(directory, file)), "open for reading");
    let mut found = vec![0; BLOCK_BYTES];
    let mut expected = vec![0; BLOCK_BYTES];
    for index in 0..blocks(seed, file) {
        if let Err(error) = input.read_exact_at(&mut found, index * BLOCK_BYTES as u64) {
            // A first version that was never synced may be incomplete.
            if least > 0 {
                fail(&format!("file {file} block {index}: {error}"));
            }
            return;
        }
        let version = u64::from_le_bytes(found[16..24].try_into().unwrap());
        fill(&mut expected, seed, file, index, version);
        let zeros = least == 0 && found.iter().all(|&byte| byte == 0);
        if !zeros && (found != expected || version < least || version > most) {
            fail(&format!("file {file} block {index}: version {version}, expected {least} to {most}, intact: {}", found == expected));
        }
    }
}

fn run(directory: &Path, seed: u64, rounds: u64) {
    let stop = PathBuf::from("/tmp/stop");
    let mut versions = vec![0; FILES as usize];
    let mut pause_max = Duration::ZERO;
    let mut round = 0;
    while round < rounds && !stop.exists() {
        let file = mix(seed ^ round) % FILES;
        let version = versions[file as usize] + 1;
        let start = Instant::now();
        write(directory, seed, file, version);
        pause_max = pause_max.max(start.elapsed());
        versions[file as usize] = version;
        println!("synced {file} {version}");
        must(std::io::stdout().flush(), "flush");
        if round % CHECK_EVERY == CHECK_EVERY - 1 {
            must(std::fs::write("/proc/sys/vm/drop_caches", "3"), "drop the page cache");
            for file in 0..FILES {
                check(directory, seed, file, versions[file as usize], versions[file as usize]);
            }
        }
        round += 1;
    }
    println!("verifier-done rounds {round} longest-pause-ms {}", pause_max.as_millis());
}

fn main() {
    let words: Vec<String> = std::env::args().collect();
    let number = |text: &str| text.parse().unwrap_or_else(|_| fail(&format!("{text} is no number")));
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [_, "run", directory, seed, rounds] => run(Path::new(directory), number(seed), number(rounds)),
        [_, "check", directory, seed, ref synced @ ..] => {
            let mut versions = vec![0; FILES as usize];
            for word in synced {
                let (file, version) = word.split_once(':').unwrap_or_else(|| fail("FILE:VERSION is missing its colon"));
                versions[number(file) as usize] = number(version);
            }
            for file in 0..FILES {
                let least = versions[file as usize];
                check(Path::new(directory), number(seed), file, least, least + 1);
            }
            println!("verifier-checked {FILES} files");
        }
        _ => fail("usage: verifier run DIRECTORY SEED ROUNDS | check DIRECTORY SEED FILE:VERSION..."),
    }
}
