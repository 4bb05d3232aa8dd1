//! Devices: those of the machine ([`real`]), and emulated disks and SSDs of a class, for a machine
//! that has neither.
//!
//! A [`Spec`] has the properties of a device, and a [`preset`] those of a class of devices. The
//! [`model`] computes the times of commands from a spec. [`Emulated`] is a file on which each
//! access takes as long as the model says. Its faults are in [`faults`].

pub mod calibrate;
mod emulated;
pub mod faults;
mod files;
pub mod load;
mod media;
pub mod model;
pub mod preset;
pub mod real;
mod server;
mod spec;
mod volatile;

pub use emulated::{Counts, Emulated};
pub use preset::Preset;
pub use spec::{Burst, Channel, Disk, Flash, Media, Nanos, Spec, WriteCache};
pub use volatile::Losses;
