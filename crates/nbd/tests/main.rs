//! The protocol through the crate's public interface: one program, so that it is linked once.

mod handshake;
mod interop_clients;
mod interop_servers;
mod requests;
mod roundtrip;
mod support;
