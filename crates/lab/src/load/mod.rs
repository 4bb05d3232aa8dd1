//! Load generators of a measurement, behind one interface: clients side by side, each a process.
//! The generators are fio and `rados bench`.

mod fio;
pub mod neighbours;
mod points;
mod rados;

use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::time::Instant;

use serde_json::Value;

use crate::results::{Bench, Spread};
use crate::suite::{Suite, Tool, Workload};
use crate::testbed::Entrance;
use tidepool_cluster::fio::{Endpoint, FioError, Measured};

/// Why a load generator gave no figures.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// fio failed.
    #[error(transparent)]
    Fio(#[from] FioError),
    /// The program `rados` is not installed.
    #[error("cannot run rados: {0}; on Debian: apt-get install ceph-common")]
    NoRados(io::Error),
    /// The program failed, or did not do enough.
    #[error("`{command}` failed: {output}")]
    Failed {
        /// The command line.
        command: String,
        /// The last line of its error output, or what is missing.
        output: String,
    },
    /// No place for the output of the clients could be made.
    #[error("cannot make a file for what a client says: {0}")]
    Place(io::Error),
}

/// Called repeatedly by functions that wait. Returns why they should stop, or `None`.
pub type Stop<'a> = &'a dyn Fn() -> Option<String>;

/// The window that all clients share, and over which counters are compared.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// When the ramp of the last client was over.
    pub begin: Instant,
    /// When the time of the first client was over, or a client had ended before.
    pub end: Instant,
}

/// A client at work. Dropping it kills its process.
pub trait Client: Debug {
    /// When it began to send requests, which is when its ramp began. `None` until then.
    fn begun(&self) -> Option<Instant>;

    /// Whether it has ended.
    fn has_ended(&mut self) -> bool;

    /// Waits for its end and returns what it did in the window.
    ///
    /// # Errors
    /// If it fails, is stopped, or did nothing in the window.
    fn finish(self: Box<Self>, span: Span, stop: Stop<'_>) -> Result<Done, LoadError>;
}

/// What a client did: rados bench in the window, fio in its own time after the ramp.
#[derive(Debug, Default)]
pub struct Done {
    /// Its requests.
    pub measured: Measured,
    /// Requests per second of reads and of writes in each of the equal parts of a measurement.
    /// `None` if not known.
    pub rates: Option<Vec<[f64; 2]>>,
    /// Output of rados bench about itself.
    pub told: Option<Told>,
    /// fio's own report, without its bins.
    pub report: Option<Value>,
}

/// Output of an instance of rados bench about itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// Bytes per second in each second of the window.
    pub bytes_per_s: Vec<f64>,
    /// Longest latency of its whole run in microseconds.
    pub max_us: f64,
    /// Shortest latency of its whole run in microseconds.
    pub min_us: f64,
}

/// What clients can read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filled {
    /// Bytes of all sets that were ever written.
    pub bytes: u64,
    /// Objects were written or removed just now, so that the caches do not hold the same data as
    /// before.
    pub anew: bool,
}

/// The objects in a cluster's pool that clients write and read.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// The objects that exist. `None` if not known, for example after a measurement that wrote.
    known: Option<Kept>,
}

impl Objects {
    /// An empty pool.
    pub fn none() -> Objects {
        Objects { known: Some(Kept::default()) }
    }
}

/// Objects that were written to be read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Kept {
    clients: u32,
    /// Objects of each client.
    objects: u64,
    object_bytes: u64,
}

/// The load of a measurement's clients.
pub trait Load: Debug {
    /// Clients.
    fn clients(&self) -> u32;

    /// Bytes that each client reads from.
    fn set_bytes(&self) -> u64;

    /// The shell command that repeats a client's load.
    fn command(&self, client: u32) -> String;

    /// Writes what must exist before the load, and removes what must not. To be called while
    /// devices answer at once.
    ///
    /// # Errors
    /// If the load generator fails or is stopped.
    fn fill(&self, objects: &mut Objects, stop: Stop<'_>) -> Result<Filled, LoadError>;

    /// Reads everything that a client will read, once.
    ///
    /// # Errors
    /// If the load generator fails or is stopped.
    fn pass(&self, client: u32, stop: Stop<'_>) -> Result<(), LoadError>;

    /// Sends one flush from each client, as a guest does when it mounts. It does nothing for
    /// clients without guests, which are those of rados bench.
    ///
    /// # Errors
    /// If the load generator fails or is stopped.
    fn flush(&self, stop: Stop<'_>) -> Result<(), LoadError>;

    /// Starts a client, with its own place in `directory`, which other clients use too.
    ///
    /// # Errors
    /// If it cannot be started.
    fn start(&self, client: u32, directory: &Path) -> Result<Box<dyn Client>, LoadError>;
}

/// Where clients find their data: an image with the bytes of it that were ever written, or the
/// pool.
pub struct Reach<'a> {
    /// For a client with an image.
    pub image: &'a dyn Fn(u32) -> (Endpoint, u64),
    /// For a client with objects.
    pub pool: &'a dyn Fn(u32) -> Entrance,
}

/// The load of this number of clients of a workload at this depth.
pub fn of(
    suite: &Suite,
    workload: &Workload,
    depth: u32,
    clients: u32,
    reach: &Reach<'_>,
) -> Box<dyn Load> {
    match workload.tool {
        Tool::Fio => {
            let images = (0..clients).map(reach.image).collect();
            Box::new(fio::Images::new(suite, workload, depth, images))
        }
        Tool::RadosBench => {
            let entrances = (0..clients).map(reach.pool).collect();
            Box::new(rados::Instances::new(suite, workload, depth, entrances))
        }
    }
}

/// The figures of several instances of rados bench together. `None` if there are none, or if one
/// has reported nothing.
pub fn together(told: Vec<Option<Told>>, mean_us: f64) -> Option<Bench> {
    let told: Vec<Told> = told.into_iter().collect::<Option<_>>()?;
    let seconds =
        told.iter().map(|of| of.bytes_per_s.len()).min().filter(|seconds| *seconds > 0)?;
    let second = |at: usize| told.iter().map(|of| of.bytes_per_s[at]).sum::<f64>();
    let bytes_per_s: Vec<f64> = (0..seconds).map(second).collect();
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MIN, f64::max);
    let least = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::MAX, f64::min);
    Some(Bench {
        bytes_per_s: Spread {
            mean: bytes_per_s.iter().sum::<f64>() / seconds as f64,
            max: most(&mut bytes_per_s.iter().copied()),
            min: least(&mut bytes_per_s.iter().copied()),
        },
        latency_us: Spread {
            mean: mean_us,
            max: most(&mut told.iter().map(|of| of.max_us)),
            min: least(&mut told.iter().map(|of| of.min_us)),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_side_by_side_are_added_second_by_second() {
        let told = |rates: &[f64], min_us, max_us| {
            Some(Told { bytes_per_s: rates.to_vec(), max_us, min_us })
        };
        let both = together(
            vec![told(&[10.0, 30.0, 5.0], 7.0, 90.0), told(&[20.0, 20.0], 4.0, 50.0)],
            33.0,
        );
        let both = both.expect("both have told");
        assert_eq!(both.bytes_per_s, Spread { mean: 40.0, max: 50.0, min: 30.0 });
        assert_eq!(both.latency_us, Spread { mean: 33.0, max: 90.0, min: 4.0 });
        assert_eq!(together(vec![told(&[1.0], 1.0, 1.0), None], 1.0), None);
        assert_eq!(together(vec![told(&[], 1.0, 1.0)], 1.0), None);
        assert_eq!(together(vec![], 1.0), None);
    }
}
