//! The client's side: codecs without I/O, and a blocking client on top of them.

mod blocking;
mod handshake;
mod in_flight;
mod pipeline;
mod stream;

pub use blocking::{BlockingClient, Receiver, Sender, negotiate};
pub use handshake::{Handshake, Negotiated, Wanted};
pub use in_flight::{Completion, Extent};
pub use pipeline::{DEPTH_MAX, Failure, Pipeline, Sink};
pub use stream::{Duplex, Moved, Stream};

/// Why the client cannot go on, or why one request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket failed.
    #[error("cannot {what} the NBD server{at}: {source}")]
    Io {
        /// What was tried, for example "connect to", "send to", "receive from".
        what: &'static str,
        /// ` at ` and the server's URI; empty when unknown.
        at: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The server closed the connection.
    #[error("the NBD server closed the connection with {in_flight} requests in flight")]
    Closed {
        /// Requests that are not answered.
        in_flight: usize,
    },
    /// The server broke the protocol.
    #[error("the NBD server broke the protocol: {0}")]
    Protocol(&'static str),
    /// The server refused an option.
    #[error("the NBD server refused {option}: {message}")]
    Refused {
        /// The option's name.
        option: &'static str,
        /// The server's message, or the meaning of its reply.
        message: String,
    },
    /// The server demands TLS.
    #[error("the NBD server demands TLS, which is not supported")]
    Tls,
    /// The server did not offer this feature in the handshake.
    #[error("the NBD server does not offer {0}")]
    Unsupported(&'static str),
    /// The caller asked for something that the client cannot do, for example a request that is too
    /// long.
    #[error("{0}")]
    Usage(&'static str),
    /// The server answered a request with an error.
    #[error("the NBD server answered: {0}")]
    Failed(#[from] Failure),
}

impl ClientError {
    fn io(what: &'static str, source: std::io::Error) -> ClientError {
        ClientError::Io { what, at: String::new(), source }
    }
}
