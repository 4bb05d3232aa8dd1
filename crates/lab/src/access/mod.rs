//! How clients reach the images of a cluster: by librbd, through an NBD server that has librbd, over iSCSI through a gateway that has it, or
//! from inside of guests.
//!
//! A path is put in place for all images of a testbed together. It stands between the cluster and what is in front of it, and guests
//! ([`Guests`]) stand before that.

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

use crate::fio::Endpoint;
use crate::network::HostNode;
use crate::vm::VmError;

/// An access path.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// The client, or the cache on its hypervisor, has librbd itself.
    #[default]
    Librbd,
    /// An NBD server on the hypervisor has librbd. A cache there is such a server, and has librbd itself.
    Nbd,
    /// A gateway on the monitor's machine has librbd, and the hypervisor an initiator.
    Iscsi,
    /// The client is in a guest, whose disk its QEMU has: by librbd, or as an export of the cache on the hypervisor.
    Guest,
    /// The client is in a guest whose kernel maps the image, past the page cache.
    Krbd,
    /// The client is in a guest whose kernel maps the image, through the page cache.
    KrbdWriteback,
    /// The same, and no flush is ever sent: writes are safe from nothing.
    KrbdUnsafe,
}

impl Access {
    /// All of them.
    pub const ALL: [Access; 7] = [
        Access::Librbd,
        Access::Nbd,
        Access::Iscsi,
        Access::Guest,
        Access::Krbd,
        Access::KrbdWriteback,
        Access::KrbdUnsafe,
    ];

    /// Its name in suites and results.
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

    /// What it is, in a few words.
    pub fn what(self) -> &'static str {
        match self {
            Access::Librbd => "librbd in the client",
            Access::Nbd => "an NBD server in the hypervisor, which has librbd",
            Access::Iscsi => "an initiator in the hypervisor, and a gateway that has librbd",
            Access::Guest => "a guest, whose disk its QEMU has by librbd or from the cache in the hypervisor",
            Access::Krbd => "a guest whose kernel maps the image, past the page cache",
            Access::KrbdWriteback => "a guest whose kernel maps the image, through the page cache",
            Access::KrbdUnsafe => {
                "a guest whose kernel maps the image, through the page cache, and nobody sends a flush"
            }
        }
    }

    /// Clients are in guests.
    pub fn is_in_guests(self) -> bool {
        self == Access::Guest || self.maps()
    }

    /// The kernel of a guest maps the image.
    pub fn maps(self) -> bool {
        matches!(self, Access::Krbd | Access::KrbdWriteback | Access::KrbdUnsafe)
    }

    /// What was answered may be in the memory of one machine only, flush or no flush: it is never ranked.
    pub fn is_volatile(self) -> bool {
        self == Access::KrbdUnsafe
    }

    /// It is what a suite has that says nothing.
    pub fn is_librbd(&self) -> bool {
        *self == Access::Librbd
    }

    /// Says in one line why it is not possible on this machine.
    ///
    /// # Errors
    /// That line.
    pub fn probe(self) -> Result<(), String> {
        match self {
            Access::Librbd => Ok(()),
            Access::Nbd => exporter::probe("block-rbd.so"),
            Access::Iscsi => gateway::probe().and_then(|()| exporter::probe("block-iscsi.so")),
            Access::Guest => guest::probe(),
            Access::Krbd | Access::KrbdWriteback | Access::KrbdUnsafe => krbd::probe(),
        }
    }

    /// Puts it in place; `None` for the path that takes nothing, and for those that are in guests ([`Guests::prepare`]).
    ///
    /// # Errors
    /// When it cannot be; nothing is left of it then.
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

/// A gateway that answers at once and keeps nothing, and its initiators: what the path alone can do.
///
/// # Errors
/// When it cannot be put in place; nothing is left of it then.
pub(crate) fn nothing(site: &Site) -> Result<Box<dyn InPlace>, AccessError> {
    Ok(Box::new(iscsi::Iscsi::start(site, gateway::Store::Null)?))
}

/// Guests whose disks answer at once and keep nothing: what nothing in a guest is faster than.
///
/// # Errors
/// When they cannot be put in place; nothing is left of them then.
pub(crate) fn nothing_in_guests(site: Site) -> Result<Box<dyn InPlace>, AccessError> {
    Ok(Box::new(Guests::nothing(site)?))
}

/// What a path finds where it is put in place.
#[derive(Debug)]
pub(crate) struct Site {
    /// A directory for its files, on no emulated device.
    pub(crate) directory: PathBuf,
    /// ceph.conf for clients. Its last section is that of clients.
    pub(crate) conf: PathBuf,
    /// The place of gateways in a network; `None` where there is no network.
    pub(crate) gateway: Option<HostNode>,
    /// The images.
    pub(crate) images: Vec<Image>,
}

/// An image, and where its clients are.
#[derive(Debug, Clone)]
pub(crate) struct Image {
    /// Its name in the pool `rbd`.
    pub(crate) name: String,
    /// The hypervisor of its clients, by its number.
    pub(crate) host: usize,
    /// The hypervisor's place in a network, if there is one.
    pub(crate) node: Option<HostNode>,
}

/// A path that is in place. It ends when it is dropped.
pub(crate) trait InPlace: Debug {
    /// Shows that it is in place: what its parts say of themselves.
    ///
    /// # Errors
    /// When it is not.
    fn verify(&self) -> Result<Value, AccessError>;
    /// Shows that all of its parts still run.
    ///
    /// # Errors
    /// When one does not.
    fn holds(&self) -> Result<(), AccessError>;
    /// How clients reach an image by it.
    fn endpoint(&self, image: &str) -> Option<Endpoint>;
    /// The URI under which a cache on the hypervisor reaches an image by it.
    fn uri(&self, image: &str) -> Option<String>;
    /// What librbd counts at its end, all images together: numbers that only grow. Times are in microseconds.
    ///
    /// # Errors
    /// When somebody does not answer.
    fn counters(&self) -> Result<Map<String, Value>, AccessError>;
    /// Takes it away. What was flushed is in the images then, and nobody has them open.
    ///
    /// # Errors
    /// When it does not go.
    fn undo(self: Box<Self>) -> Result<(), AccessError>;
}

/// Why a path is not in place.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// A file or a process could not be had.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A program failed.
    #[error("`{command}` failed: {output}")]
    Command {
        /// The command line.
        command: String,
        /// The end of its error output.
        output: String,
    },
    /// A guest could not be had, or does not do what it is told.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// It says of itself that it is something else.
    #[error("the access path {access} is not in place: {what}")]
    NotInPlace {
        /// Which.
        access: Access,
        /// What was seen instead.
        what: String,
    },
}

/// An error of the system, with what was tried.
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
