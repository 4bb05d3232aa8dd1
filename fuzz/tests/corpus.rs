//! The corpora without the fuzzer: what it has found and what it began with, and inputs that are
//! close to these. The counters of `scripts/fuzz.py` are missing in this build, and its checks for
//! overflow.
//!
//! A failure prints the input's path, or the seed in `TIDEPOOL_SEED` and the number of the input
//! that it makes.

use std::fs;
use std::path::Path;
use tidepool_fuzz::{TARGETS, Target};

/// Changes of one input, at most.
const CHANGES_MAX: u64 = 8;

/// xorshift64: any order will do, as long as the seed repeats it.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }

    /// An input that is like one of the corpus.
    fn input(&mut self, corpus: &[Vec<u8>], bytes_max: usize) -> Vec<u8> {
        const NUMBERS: [&[u8]; 6] =
            [&[0; 8], &[0xff; 8], &[0; 2], &[0xff; 4], &[1, 0, 0, 0], &[0x80]];
        let mut bytes = self.pick(corpus).clone();
        for _ in 0..=self.below(CHANGES_MAX as usize) {
            let at = self.below(bytes.len() + 1);
            let end = (at + self.below(16)).min(bytes.len());
            match self.below(5) {
                0 if at < bytes.len() => bytes[at] ^= 1 << self.below(8),
                1 => {
                    drop(bytes.splice(at..end, NUMBERS[self.below(NUMBERS.len())].iter().copied()))
                }
                2 => drop(bytes.drain(at..end)),
                3 => drop(bytes.splice(at..at, bytes[at..end].to_vec())),
                _ => {
                    let other = self.pick(corpus);
                    let from = self.below(other.len() + 1);
                    let part = other[from..(from + self.below(64)).min(other.len())].to_vec();
                    bytes.splice(at..end, part);
                }
            }
        }
        bytes.truncate(bytes_max);
        bytes
    }
}

/// Runs all inputs of a target's corpus, and so many that are like them.
fn run(name: &str, random_inputs: usize) {
    let target = Target::find(name).expect("a target");
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
    let files = fs::read_dir(&directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    let mut paths: Vec<_> = files.map(|file| file.expect("a readable directory").path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "an empty corpus");
    let mut corpus = Vec::new();
    for path in paths {
        let bytes = fs::read(&path).expect("a readable file");
        assert!(
            bytes.len() <= target.bytes_max,
            "{} is longer than what is fuzzed",
            path.display()
        );
        // Of a failure, the last one is shown.
        println!("{}", path.display());
        target.run(&bytes);
        corpus.push(bytes);
    }
    let seed = std::env::var("TIDEPOOL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Random(seed | 1 << 63);
    for number in 0..random_inputs {
        println!("TIDEPOOL_SEED={seed}, input {number}");
        target.run(&random.input(&corpus, target.bytes_max));
    }
}

macro_rules! targets {
    ($($name:ident $random_inputs:literal)*) => {
        $(#[test]
        fn $name() {
            run(stringify!($name), $random_inputs);
        })*

        #[test]
        fn no_target_is_left_out() {
            let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, [$(stringify!($name)),*]);
        }
    };
}

targets! {
    nbd_server 2000
    nbd_client 2000
    nbd_replies 2000
    nbd_door 500
    cache_image 300
    redo_frame 2000
    replica_wire 2000
    recover 300
    config 2000
    admin 1000
    uri 2000
    peer_images 2000
    peer_allow 2000
    peer_certificate 2000
    peer_revoked 2000
    socket_allow 2000
    fence_address 2000
    aborts 2000
    lab_inventory 1000
    lab_suite 1000
    lab_results 1000
    lab_journal 1000
    lab_records 1000
}
