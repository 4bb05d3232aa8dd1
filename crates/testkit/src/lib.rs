//! What the tests that run real programs share.
//!
//! - [`stamps`]: workloads in which every written sector carries the identity of its write. Every
//!   read is checked, also after a crash of the server.
//! - [`nbd`]: the plain NBD client of the workloads, which shares no code with the server.
//! - [`admin`]: a client of the admin API.
//! - [`daemon`]: the daemon as a child process that is killed and started again.
//! - [`guest`]: a QEMU guest with Debian's kernel and a tiny root, controlled over its serial
//!   console.
//! - [`Cluster`]: throw-away Ceph clusters.

pub mod admin;
pub mod daemon;
pub mod error;
pub mod guest;
pub mod hostile;
pub mod nbd;
pub mod rng;
pub mod server;
pub mod stamps;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use admin::Admin;
pub use daemon::Daemon;
pub use error::Error;
pub use server::Server;
pub use tidepool_cluster::{Cluster, ClusterOptions, Process, Scratch};

/// A lock for tests that start real programs (daemons, clusters, guests). While they hold it, such
/// tests of one program run one after the other, whatever the number of test threads, and do not
/// starve each other.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed while it held the lock does not make other tests fail.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fails unless `program` is on the PATH. The error names the Debian `package` that contains the
/// program.
pub fn need(program: &str, package: &str) -> Result<(), Error> {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    if found {
        return Ok(());
    }
    Err(Error::Missing { program: program.into(), package: package.into() })
}
