//! What the tests of real parts stand on.
//!
//! - [`stamps`]: workloads whose every sector tells who wrote it, checked on every read and after every crash.
//! - [`nbd`]: the plain NBD client that they use, sharing no code with the server.
//! - [`admin`]: the admin API from outside.
//! - [`daemon`]: the daemon as a child process that is killed and started again.
//! - [`guest`]: a QEMU guest with Debian's kernel and a tiny root, driven over its serial console.
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
pub use tidepool_lab::{Cluster, ClusterOptions, Process, Scratch};

/// Held by a test that starts real parts (daemons, clusters, guests): such tests of one program run one after the other, whatever
/// the number of test threads, so that they do not starve each other.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed while it held the turn does not make the others fail.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fails unless `program` is on the PATH, naming the Debian `package` that brings it.
pub fn need(program: &str, package: &str) -> Result<(), Error> {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    if found {
        return Ok(());
    }
    Err(Error::Missing { program: program.into(), package: package.into() })
}
