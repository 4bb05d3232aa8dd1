//! `tidepool serve`: from a configuration to a daemon that serves, and to its orderly end.

mod attachment;
mod daemon;
mod doors;
pub(crate) mod error;
mod monitor;
mod neighbours;
mod peers;
mod plan;
pub(crate) mod volumes;
mod watchdog;

pub use daemon::{Console, end_at_once, serve};
pub use doors::{Doors, NoDoor};
pub use error::VolumeError;
pub use peers::{
    Allowed, Certificates, CertificatesError, Denied, Fingerprint, Hosts, Identity, Images,
    PeerAddress, PeerAddressError, PeerError, Role, Route, as_reached_here, check_place,
    fingerprint,
};
pub use plan::{ModeError, Plan, Wanted, mode_rule, order_rule};
pub use volumes::{Pairs, Volumes};
