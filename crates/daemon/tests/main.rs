//! The daemon from outside: one program, so that it is linked once.

mod copies;
mod door;
mod front_door;
mod interop;
mod shard;
