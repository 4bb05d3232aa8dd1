//! Backends through their public interface: one program, so that it is linked once.

mod common;
mod conformance;
mod file;
mod full;
mod nbd;
mod peer;
mod rbd;
mod redo;
mod same;
