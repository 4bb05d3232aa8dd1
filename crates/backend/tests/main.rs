//! Tests of backends through their public interface. They are one program, so that it is linked
//! once.

mod common;
mod conformance;
mod file;
mod full;
mod nbd;
mod peer;
mod rbd;
mod redo;
mod same;
