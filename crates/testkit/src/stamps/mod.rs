//! Stamped workloads: every written sector carries its run, volume, sector number and version, and
//! every read is checked.

mod history;
mod model;
mod requests;
mod workload;

pub use history::{History, Lost};
pub use model::{Model, Snapshot, Violation};
pub use requests::{Kind, Mix, Request, Requests};
pub use tidepool_cluster::stamps::{Origin, SECTOR_BYTES, Stamp, Version, ZEROS, describe};
pub use workload::{Gauge, Progress, Summary, Workload, WorkloadOptions};
