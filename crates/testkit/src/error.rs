//! Errors of the test machinery, and violations: data that is lost, stale or foreign.

use std::path::PathBuf;
use std::time::Duration;

use tidepool_cluster::nbd::NbdError;

use crate::stamps::Violation;

/// Why a step of a test failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Data is lost, stale or foreign.
    #[error("after {requests} requests of seed {seed}: {violation}")]
    Violation {
        /// The seed of the run.
        seed: u64,
        /// Requests sent until then.
        requests: u64,
        /// The wrong sector.
        violation: Violation,
    },
    /// The server answered a request with an error.
    #[error("the server answered errno {errno} to {request}")]
    Refused {
        /// The errno.
        errno: u32,
        /// The request.
        request: String,
    },
    /// An NBD server broke the protocol, refused an option, or has too small an export. Also a
    /// failure that the admin API or QEMU's monitor reported.
    #[error("NBD: {0}")]
    Protocol(String),
    /// The connection ended.
    #[error("the connection to the server has ended")]
    Disconnected,
    /// Something did not happen in time.
    #[error("{what} did not come within {limit:?}{hint}")]
    Timeout {
        /// What did not happen.
        what: String,
        /// The time limit.
        limit: Duration,
        /// More about the state, for example the last lines of a log.
        hint: String,
    },
    /// A program ended before it should.
    #[error("{program} ended with {status}: {log}")]
    Ended {
        /// The program.
        program: String,
        /// The exit status or the signal.
        status: String,
        /// The last lines of its error output.
        log: String,
    },
    /// A program that the test needs is missing.
    #[error("{program} is not installed; run scripts/deps.sh (Debian package {package})")]
    Missing {
        /// The program.
        program: String,
        /// The Debian package that contains the program.
        package: String,
    },
    /// A file, socket or process could not be used.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The kernel or root of a guest could not be found or made.
    #[error(transparent)]
    Vm(#[from] tidepool_cluster::vm::VmError),
    /// A command in a guest failed, or the guest did not answer, migrate or end in time.
    #[error("guest: {what}; its console is in {console}")]
    Guest {
        /// What went wrong.
        what: String,
        /// The file with everything that the guest's console has printed.
        console: PathBuf,
    },
}

impl From<NbdError> for Error {
    fn from(error: NbdError) -> Error {
        match error {
            NbdError::Protocol(what) => Error::Protocol(what),
            NbdError::Disconnected(_) => Error::Disconnected,
        }
    }
}

/// Turns an I/O error into an [`Error`] that says what was tried.
pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.into();
    move |source| Error::Io { what, source }
}
