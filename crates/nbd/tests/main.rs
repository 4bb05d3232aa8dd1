//! Tests of the protocol through the crate's public interface, all in one program, so that only one
//! program has to be linked.

mod handshake;
mod interop_clients;
mod interop_servers;
mod requests;
mod roundtrip;
mod support;
