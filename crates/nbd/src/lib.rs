//! The NBD protocol (fixed newstyle) as codecs that perform no I/O.
//!
//! **Server.** [`Handshake`] takes a client's bytes in pieces of any length and appends its replies
//! to a buffer, until the handshake ends with a [`Session`]. From then on [`Session::request`]
//! decodes and checks each 28-byte request header, and the functions of [`reply`] write reply
//! headers into buffers of the caller. The server's side allocates nothing per request, and
//! payloads do not pass through it.
//!
//! **Client.** [`client::Handshake`] and [`client::Pipeline`] are the codecs of the client's side.
//! [`client::BlockingClient`] uses both on a socket.
//!
//! On the server's side, bytes that break the protocol end in a [`ProtocolError`], after which the
//! caller drops the connection. Every other fault of a client is answered with the error that the
//! protocol prescribes. Every length is checked against a limit before it is used.

pub mod client;
mod context;
mod errno;
mod export;
mod handshake;
mod option;
pub mod reply;
mod request;
mod uri;
pub mod wire;

pub use context::{Context, Contexts};
pub use errno::Errno;
pub use export::{BlockSizes, Export, Exports};
pub use handshake::{
    Handshake, LISTED_EXPORTS_MAX, OPTION_BYTES_MAX, OPTION_SKIP_BYTES_MAX, OPTIONS_MAX,
    ProtocolError, Session, Step,
};
pub use option::QUERIES_MAX;
pub use request::{
    Command, Incoming, Refusal, Request, WRITE_SKIP_BYTES_MAX, encode as encode_request,
};
pub use uri::{NbdUri, SOCKET_PATH_BYTES_MAX, Transport, UriError};
