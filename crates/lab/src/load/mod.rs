//! What makes the load of a measurement: clients side by side, each a process, behind one interface. fio is one load generator,
//! `rados bench` the other.

mod fio;
pub mod neighbours;
mod points;
mod rados;

use std::fmt::Debug;
use std::io;
use std::path::Path;
use std::time::Instant;

use serde_json::Value;

use crate::fio::{Endpoint, FioError, Measured};
use crate::results::{Bench, Spread};
use crate::suite::{Suite, Tool, Workload};
use crate::testbed::Entrance;

/// Why a load generator gave no figures.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// fio did not.
    #[error(transparent)]
    Fio(#[from] FioError),
    /// The program is not there.
    #[error("cannot run rados: {0}; on Debian: apt-get install ceph-common")]
    NoRados(io::Error),
    /// It failed, or did too little.
    #[error("`{command}` failed: {output}")]
    Failed {
        /// The command line.
        command: String,
        /// The last line of its error output, or what it lacks.
        output: String,
    },
    /// A place for what clients say could not be had.
    #[error("cannot make a file for what a client says: {0}")]
    Place(io::Error),
}

/// Asked all the while by what waits: it says why not to go on.
pub type Stop<'a> = &'a dyn Fn() -> Option<String>;

/// The window that clients share with all counters.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// When the ramp of the last client was over.
    pub begin: Instant,
    /// When the time of the first one was over, or it had ended.
    pub end: Instant,
}

/// A client at work. Dropping it kills it.
pub trait Client: Debug {
    /// When it began to send requests, which is when its ramp began. None as long as it has not.
    fn begun(&self) -> Option<Instant>;

    /// Whether it has ended.
    fn has_ended(&mut self) -> bool;

    /// Waits for its end and returns what it did in the window.
    ///
    /// # Errors
    /// When it fails, is stopped, or did nothing in the window.
    fn finish(self: Box<Self>, span: Span, stop: Stop<'_>) -> Result<Done, LoadError>;
}

/// What a client did.
#[derive(Debug, Default)]
pub struct Done {
    /// Its requests.
    pub measured: Measured,
    /// Requests per second of reads and of writes in each of the equal windows of a measurement. None where that is not known.
    pub rates: Option<Vec<[f64; 2]>>,
    /// What rados bench tells of itself.
    pub told: Option<Told>,
    /// fio's own report, without its bins.
    pub report: Option<Value>,
}

/// What an instance of rados bench tells of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// Bytes per second in each second of the window.
    pub bytes_per_s: Vec<f64>,
    /// Longest latency of its whole run in microseconds.
    pub max_us: f64,
    /// Shortest latency of its whole run in microseconds.
    pub min_us: f64,
}

/// What is there for clients to read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Filled {
    /// Bytes of all sets together that were ever written.
    pub bytes: u64,
    /// Some of it was written just now: caches hold something else than before.
    pub anew: bool,
}

/// The objects in a cluster's pool, which clients make and find.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Objects {
    /// Those that there are. None if nobody knows, as when a measurement has written.
    known: Option<Kept>,
}

impl Objects {
    /// A pool without any.
    pub fn none() -> Objects {
        Objects { known: Some(Kept::default()) }
    }
}

/// Objects that were written to be read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Kept {
    clients: u32,
    /// Of each client.
    objects: u64,
    object_bytes: u64,
}

/// What the clients of a measurement do.
pub trait Load: Debug {
    /// Clients.
    fn clients(&self) -> u32;

    /// Bytes that each of them reads from.
    fn set_bytes(&self) -> u64;

    /// What a client does as a line for a shell, which repeats it.
    fn command(&self, client: u32) -> String;

    /// Makes what is to be there before, and removes what is not. To be called with devices that answer at once.
    ///
    /// # Errors
    /// When that fails.
    fn fill(&self, objects: &mut Objects, stop: Stop<'_>) -> Result<Filled, LoadError>;

    /// Reads all that a client is going to read from, once.
    ///
    /// # Errors
    /// When that fails.
    fn pass(&self, client: u32, stop: Stop<'_>) -> Result<(), LoadError>;

    /// Has each client send one flush, as a guest does when it mounts, where there are guests.
    ///
    /// # Errors
    /// When that fails.
    fn flush(&self, stop: Stop<'_>) -> Result<(), LoadError>;

    /// Starts a client, which has a place of its own in `directory`, where others are too.
    ///
    /// # Errors
    /// When it cannot be started.
    fn start(&self, client: u32, directory: &Path) -> Result<Box<dyn Client>, LoadError>;
}

/// What clients find: the image of each with the bytes of it that were ever written, or the cluster.
pub struct Reach<'a> {
    /// Of a client that has an image.
    pub image: &'a dyn Fn(u32) -> (Endpoint, u64),
    /// Of one that has objects.
    pub pool: &'a dyn Fn(u32) -> Entrance,
}

/// What so many clients of a workload do at a depth.
pub fn of(suite: &Suite, workload: &Workload, depth: u32, clients: u32, reach: &Reach<'_>) -> Box<dyn Load> {
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

/// What instances side by side come to. None where there is none, or one of them has told nothing.
pub fn together(told: Vec<Option<Told>>, mean_us: f64) -> Option<Bench> {
    let told: Vec<Told> = told.into_iter().collect::<Option<_>>()?;
    let seconds = told.iter().map(|of| of.bytes_per_s.len()).min().filter(|seconds| *seconds > 0)?;
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
        let told = |rates: &[f64], min_us, max_us| Some(Told { bytes_per_s: rates.to_vec(), max_us, min_us });
        let both = together(vec![told(&[10.0, 30.0, 5.0], 7.0, 90.0), told(&[20.0, 20.0], 4.0, 50.0)], 33.0);
        let both = both.expect("both have told");
        assert_eq!(both.bytes_per_s, Spread { mean: 40.0, max: 50.0, min: 30.0 });
        assert_eq!(both.latency_us, Spread { mean: 33.0, max: 90.0, min: 4.0 });
        assert_eq!(together(vec![told(&[1.0], 1.0, 1.0), None], 1.0), None);
        assert_eq!(together(vec![told(&[], 1.0, 1.0)], 1.0), None);
        assert_eq!(together(vec![], 1.0), None);
    }
}
