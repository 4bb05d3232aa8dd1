//! The access paths by which clients reach the images of a cluster: librbd in the client, an NBD
//! server that has librbd, iSCSI through a gateway that has librbd, or a guest.
//!
//! A path is put in place for all images of a testbed together. It stands between the cluster and
//! the placement in front of the cluster. Guests ([`Guests`]) stand in front of that placement.

mod exporter;
mod gateway;
mod guest;
mod iscsi;
mod krbd;
mod librbd;
mod nbd;

use std::fmt::{self, Debug};
use std::path::PathBuf;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub(crate) use guest::Guests;

use tidepool_cluster::fio::Endpoint;
use tidepool_cluster::network::HostNode;
use tidepool_cluster::vm::VmError;

/// An access path.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// The client, or the cache on its hypervisor, has librbd itself.
    #[default]
    Librbd,
    /// An NBD server on the hypervisor has librbd. A cache on the hypervisor is such a server
    /// itself, and has librbd itself.
    Nbd,
    /// A gateway on the monitor's machine has librbd, and the hypervisor has an initiator.
    Iscsi,
    /// The client is in a guest. The guest's QEMU has the disk by librbd, or as an export of the
    /// cache on the hypervisor.
    Guest,
    /// The client is in a guest whose kernel maps the image, past the page cache.
    Krbd,
    /// The client is in a guest whose kernel maps the image, through the page cache.
    KrbdWriteback,
    /// As `krbd_writeback`, but no flush is ever sent: writes survive no failure.
    KrbdUnsafe,
}

impl Access {
    /// All access paths.
    pub const ALL: [Access; 7] = [
        Access::Librbd,
        Access::Nbd,
        Access::Iscsi,
        Access::Guest,
        Access::Krbd,
        Access::KrbdWriteback,
        Access::KrbdUnsafe,
    ];

    /// The path's name in suites and results.
    pub fn name(self) -> &'static str {
        match self {
            Access::Librbd => "librbd",
            Access::Nbd => "nbd",
            Access::Iscsi => "iscsi",
            Access::Guest => "guest",
            Access::Krbd => "krbd",
            Access::KrbdWriteback => "krbd_writeback",
            Access::KrbdUnsafe => "krbd_unsafe",
        }
    }

    /// A description of the path, in a few words.
    pub fn what(self) -> &'static str {
        match self {
            Access::Librbd => "librbd in the client",
            Access::Nbd => "an NBD server in the hypervisor, which has librbd",
            Access::Iscsi => "an initiator in the hypervisor, and a gateway that has librbd",
            Access::Guest => {
                "a guest, whose disk its QEMU has by librbd or from the cache in the hypervisor"
            }
            Access::Krbd => "a guest whose kernel maps the image, past the page cache",
            Access::KrbdWriteback => "a guest whose kernel maps the image, through the page cache",
            Access::KrbdUnsafe => {
                "a guest whose kernel maps the image, through the page cache, and nobody sends a flush"
            }
        }
    }

    /// Whether clients are in guests.
    pub fn is_in_guests(self) -> bool {
        self == Access::Guest || self.maps()
    }

    /// Whether the kernel of a guest maps the image.
    pub fn maps(self) -> bool {
        matches!(self, Access::Krbd | Access::KrbdWriteback | Access::KrbdUnsafe)
    }

    /// Whether a completed write may be in the memory of one machine only, even after a flush. Such
    /// a path is never ranked.
    pub fn is_volatile(self) -> bool {
        self == Access::KrbdUnsafe
    }

    /// Whether this is the path of a suite that names none: librbd.
    pub fn is_librbd(&self) -> bool {
        *self == Access::Librbd
    }

    /// Checks whether the path is possible on this machine.
    ///
    /// # Errors
    /// The reason why it is not, in one line.
    pub fn probe(self) -> Result<(), String> {
        match self {
            Access::Librbd => Ok(()),
            Access::Nbd => exporter::probe("block-rbd.so"),
            Access::Iscsi => gateway::probe().and_then(|()| exporter::probe("block-iscsi.so")),
            Access::Guest => guest::probe(),
            Access::Krbd | Access::KrbdWriteback | Access::KrbdUnsafe => krbd::probe(),
        }
    }

    /// Puts the path in place. `None` for librbd, which needs nothing, and for paths with clients
    /// in guests ([`Guests::prepare`]).
    ///
    /// # Errors
    /// When that fails; nothing of the path is left then.
    pub(crate) fn apply(self, site: &Site) -> Result<Option<Box<dyn InPlace>>, AccessError> {
        Ok(match self {
            Access::Nbd => Some(Box::new(nbd::Nbd::start(site)?)),
            Access::Iscsi => Some(Box::new(iscsi::Iscsi::start(site, gateway::Store::Rbd)?)),
            _ => None,
        })
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Access {
    type Err = String;

    fn from_str(text: &str) -> Result<Access, String> {
        let known = Access::ALL.map(Access::name).join(", ");
        let found = Access::ALL.into_iter().find(|access| access.name() == text);
        found.ok_or_else(|| format!("no access path {text}; there are {known}"))
    }
}

/// A gateway that answers at once and keeps nothing, and its initiators: a bound for all placements
/// over iSCSI.
///
/// # Errors
/// When it cannot be put in place; nothing of it is left then.
pub(crate) fn nothing(site: &Site) -> Result<Box<dyn InPlace>, AccessError> {
    Ok(Box::new(iscsi::Iscsi::start(site, gateway::Store::Null)?))
}

/// Guests whose disks answer at once and keep nothing: a bound for all clients in guests.
///
/// # Errors
/// When they cannot be put in place; nothing of them is left then.
pub(crate) fn nothing_in_guests(site: Site) -> Result<Box<dyn InPlace>, AccessError> {
    Ok(Box::new(Guests::nothing(site)?))
}

/// What an access path needs to be put in place.
#[derive(Debug)]
pub(crate) struct Site {
    /// A directory for the path's files. It is on no emulated device.
    pub(crate) directory: PathBuf,
    /// ceph.conf for clients. Its last section is the clients' section, so lines for clients can be
    /// appended.
    pub(crate) conf: PathBuf,
    /// The node on which gateways run; `None` where there is no network.
    pub(crate) gateway: Option<HostNode>,
    /// The images.
    pub(crate) images: Vec<Image>,
}

/// An image, and the hypervisor of its clients.
#[derive(Debug, Clone)]
pub(crate) struct Image {
    /// The image's name in the pool `rbd`.
    pub(crate) name: String,
    /// The number of that hypervisor.
    pub(crate) host: usize,
    /// That hypervisor's node in the network, if there is a network.
    pub(crate) node: Option<HostNode>,
}

/// An access path that is in place. Dropping it removes it.
pub(crate) trait InPlace: Debug {
    /// Proves that the path is in place; returns what its parts report about themselves.
    ///
    /// # Errors
    /// When it is not in place.
    fn verify(&self) -> Result<Value, AccessError>;
    /// Proves that all parts of the path still run.
    ///
    /// # Errors
    /// When a part does not run.
    fn holds(&self) -> Result<(), AccessError>;
    /// The endpoint by which clients reach an image over the path.
    fn endpoint(&self, image: &str) -> Option<Endpoint>;
    /// The URI under which a cache on the hypervisor reaches an image over the path.
    fn uri(&self, image: &str) -> Option<String>;
    /// The path's counters, added up over all images: numbers that only grow. Times are in
    /// microseconds.
    ///
    /// # Errors
    /// When a part of the path does not answer.
    fn counters(&self) -> Result<Map<String, Value>, AccessError>;
    /// Removes the path. All flushed data is in the images then, and no part of the path has them
    /// open.
    ///
    /// # Errors
    /// When the path cannot be removed.
    fn undo(self: Box<Self>) -> Result<(), AccessError>;
}

/// Why an access path is not in place.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// A file or a process operation failed.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// A program failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// The end of the program's error output.
        output: String,
    },
    /// A guest could not be started, or failed.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// A part of the path is not what it should be.
    #[error("the access path {access} is not in place: {what}")]
    NotInPlace {
        /// The access path.
        access: Access,
        /// What was found instead.
        what: String,
    },
}

/// Turns an I/O error into an [`AccessError`] that says what was tried.
fn failed(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> AccessError {
    let what = what.into();
    |source| AccessError::Io { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_known_by_its_name_everywhere() {
        for access in Access::ALL {
            assert_eq!(access.to_string().parse::<Access>(), Ok(access));
            assert_eq!(serde_json::to_value(access).expect("a name"), access.name());
        }
        let told = "fibre-channel".parse::<Access>().expect_err("there is none");
        assert!(told.contains("librbd, nbd, iscsi") && !told.contains('\n'), "{told}");
        assert!(Access::default().is_librbd() && Access::Librbd.probe().is_ok());
    }
}
