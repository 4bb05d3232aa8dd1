//! What can go wrong in a test's own machinery, and the one thing that must not happen.

use std::path::PathBuf;
use std::time::Duration;

use tidepool_lab::nbd::NbdError;

use crate::stamps::Violation;

/// Why a step of a test failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Data was lost, stale or foreign.
    #[error("after {requests} requests of seed {seed}: {violation}")]
    Violation {
        /// The seed of the run.
        seed: u64,
        /// Requests sent until then.
        requests: u64,
        /// What was found.
        violation: Violation,
    },
    /// The server failed a request.
    #[error("the server answered errno {errno} to {request}")]
    Refused {
        /// The errno.
        errno: u32,
        /// The request.
        request: String,
    },
    /// The server broke the protocol, or the negotiation failed.
    #[error("NBD: {0}")]
    Protocol(String),
    /// The connection ended.
    #[error("the connection to the server has ended")]
    Disconnected,
    /// Something did not come in time.
    #[error("{what} did not come within {limit:?}{hint}")]
    Timeout {
        /// What.
        what: String,
        /// How long was waited.
        limit: Duration,
        /// Where to look, or the last lines of a log.
        hint: String,
    },
    /// A program ended before it should.
    #[error("{program} ended with {status}: {log}")]
    Ended {
        /// Which program.
        program: String,
        /// How.
        status: String,
        /// The last lines of its error output.
        log: String,
    },
    /// A program that the test needs is missing.
    #[error("{program} is not installed; run scripts/deps.sh (Debian package {package})")]
    Missing {
        /// The program.
        program: String,
        /// The Debian package that brings it.
        package: String,
    },
    /// A file, socket or process could not be used.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// What a guest boots could not be made.
    #[error(transparent)]
    Vm(#[from] tidepool_lab::vm::VmError),
    /// A guest did not do what it was told.
    #[error("guest: {what}; its console is in {console}")]
    Guest {
        /// What went wrong.
        what: String,
        /// The file with everything that the console printed.
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
