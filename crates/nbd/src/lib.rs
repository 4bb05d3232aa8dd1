//! The NBD protocol (fixed newstyle) as codecs that perform no I/O.
//!
//! **Server.** [`Handshake`] is fed with whatever bytes have come and writes its answers into a buffer, until it
//! ends with a [`Session`]. From then on [`Session::request`] takes each 28-byte header apart and checks it, and
//! the functions of [`reply`] write reply headers into buffers of the caller. Nothing is allocated per request,
//! and payloads never pass through this crate.
//!
//! **Client.** [`client::Handshake`] and [`client::Pipeline`] are the same for the other side;
//! [`client::BlockingClient`] puts them on a socket.
//!
//! Bytes that break the protocol end in a [`ProtocolError`] and cost the peer its connection; all else that a
//! peer can do wrong is answered with the error that the protocol asks for. Every length is bounded before it
//! is believed.

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
    Handshake, LISTED_EXPORTS_MAX, OPTION_BYTES_MAX, OPTION_SKIP_BYTES_MAX, OPTIONS_MAX, ProtocolError,
    Session, Step,
};
pub use option::QUERIES_MAX;
pub use request::{Command, Incoming, Refusal, Request, WRITE_SKIP_BYTES_MAX, encode as encode_request};
pub use uri::{NbdUri, SOCKET_PATH_BYTES_MAX, Transport, UriError};
