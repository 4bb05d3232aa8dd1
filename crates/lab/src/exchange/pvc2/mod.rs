//! The records of `pvc storage benchmark` (Parallel Virtual Cluster), format 2: a list of
//! benchmarks, each with eight jobs of one client. A job holds fio's whole report, and the mean use
//! of processors, memory and network.
//!
//! A record has no repeats and says nothing of its cluster, so nothing can be concluded from a
//! single record. Each cluster of the lab is therefore written as a record of its own. A record of
//! another program stands beside the lab's cells and is not compared with them.

mod export;
mod import;

use crate::collect::{Flow, Means};
use crate::suite::{Caches, Guest, Workload};
use tidepool_cluster::fio::Sync;

pub use export::{ExportError, Exported, Wanted, export};
pub use import::{Benchmark, Beside, ImportError, Imported, JobRow, beside, parse};

/// The format that this program writes.
pub const TEST_FORMAT: u64 = 2;

/// A job of the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// Name of the job.
    pub name: &'static str,
    /// Access pattern, as fio calls it.
    pub rw: &'static str,
    /// Bytes of a request.
    pub block_bytes: u64,
    /// Requests in flight.
    pub depth: u32,
}

const fn job(name: &'static str, rw: &'static str, block_bytes: u64, depth: u32) -> Job {
    Job { name, rw, block_bytes, depth }
}

const KIB_4: u64 = 4 << 10;
const MIB_4: u64 = 4 << 20;

/// All jobs, in their order.
pub static JOBS: [Job; 8] = [
    job("seq_read", "read", MIB_4, 64),
    job("seq_write", "write", MIB_4, 64),
    job("rand_read_4M", "randread", MIB_4, 64),
    job("rand_write_4M", "randwrite", MIB_4, 64),
    job("rand_read_4K", "randread", KIB_4, 64),
    job("rand_write_4K", "randwrite", KIB_4, 64),
    job("rand_read_4K_lowdepth", "randread", KIB_4, 1),
    job("rand_write_4K_lowdepth", "randwrite", KIB_4, 1),
];

impl Job {
    /// The workload at this depth makes the load of the job, whatever the workload's name is.
    pub fn is(&self, workload: &Workload, depth: u32) -> bool {
        (workload.rw.as_str(), workload.block_bytes, depth, workload.jobs)
            == (self.rw, self.block_bytes, self.depth, 1)
            && (workload.sync, workload.guest, workload.caches)
                == (Sync::None, Guest::Flushes, Caches::Warm)
    }
}

/// The client's node, whose network a record has.
const CLIENT: &str = "client";

/// What the client's node sent and received; where there is no such node, what the loopback
/// interface carried.
fn client(means: &Means) -> Option<Flow> {
    means.network.get(CLIENT).or_else(|| means.network.get("lo")).copied()
}

#[cfg(test)]
mod tests;
