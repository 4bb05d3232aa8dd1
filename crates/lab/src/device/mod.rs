//! Devices: those of the machine ([`real`]), and emulated ones, disks and SSDs of a class, on a machine that has neither.
//!
//! A [`Spec`] says what a device can do, a [`preset`] what one of a class does; the [`model`] makes times of commands out of
//! it, and [`Emulated`] is a file whose every access takes as long as the model says. What can go wrong with it is in [`faults`].

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
