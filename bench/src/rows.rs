//! What is measured.

use tidepool_cluster::fio::{Job, Pattern, Sync};

/// A workload, named as in the table of results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// What is done.
    pub job: Job,
    /// It works on the part of the image that fits into the cache, warmed up before.
    pub warm: bool,
}

const fn write(name: &'static str, block_bytes: u64, depth: u32) -> Row {
    Row { name, job: Job::new(Pattern::RandWrite, block_bytes, depth), warm: false }
}

const fn read(name: &'static str, depth: u32) -> Row {
    Row { name, job: Job::new(Pattern::RandRead, 4096, depth), warm: true }
}

const FLUSHED: Job = Job::new(Pattern::RandWrite, 4096, 1).with(Sync::Flush);
const MIXED: Job = Job::new(Pattern::RandMixed(80), 4096, 32);

/// All workloads.
pub const ROWS: [Row; 9] = [
    write("4K randwrite QD1", 4096, 1),
    Row { name: "4K randwrite + flush QD1", job: FLUSHED, warm: false },
    write("4K randwrite QD64", 4096, 64),
    write("64K randwrite QD16", 64 << 10, 16),
    write("1M randwrite QD4", 1 << 20, 4),
    read("4K randread QD1", 1),
    read("4K randread QD32", 32),
    read("4K randread QD64", 64),
    Row { name: "4K 80/20 QD32", job: MIXED, warm: true },
];
