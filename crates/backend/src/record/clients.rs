//! The RADOS clients in an ownership record: which client has the image, which were about to take
//! it, and which are fenced.

use super::Ownership;
use super::host::{boot_id, host_name, unix_s};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Display};

/// Most claims in a record. A claim names the client of an attempt to open the image; it remains if
/// the attempt is cut short.
pub(crate) const CLAIMS_MAX: usize = 8;

/// Most fences that a record lists.
pub(super) const FENCED_MAX: usize = 16;

/// What the record of an image in a Ceph pool says about the image's clients.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clients {
    /// Address of the owner's RADOS client. The next owner fences this client.
    #[serde(rename = "client", default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Addresses of clients of this cache that were about to take the lock since the last open,
    /// oldest first. They are written before the lock is taken, so that a kill between lock and
    /// record leaves no lock of an unknown client.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<String>,
    /// Version of the image's header object after the owner has lifted its guard to take the lock.
    /// As long as the header has this version, no other client has used that moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifted: Option<u64>,
    /// Clients that are fenced for a long time, in the order in which their fences expire.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fenced: Vec<Fenced>,
}

impl Clients {
    /// What the record of another owner says about clients: which are fenced.
    pub(crate) fn kept_away(&self) -> Clients {
        Clients { fenced: self.fenced.clone(), ..Clients::default() }
    }

    /// Adds a client that is about to take the lock. If there is no room, the oldest claims go, but
    /// not those for which `stays` says so.
    pub(crate) fn claim(&mut self, client: &str, stays: impl Fn(&str) -> bool) {
        let surplus = (self.claims.len() + 1).saturating_sub(CLAIMS_MAX);
        let mut dropped = 0;
        self.claims.retain(|claim| {
            let drop = dropped < surplus && !stays(claim);
            dropped += usize::from(drop);
            !drop
        });
        self.claims.push(client.to_owned());
    }

    /// The owner, and the clients that were about to take the lock.
    pub(crate) fn named(&self) -> impl Iterator<Item = &String> {
        self.owner.iter().chain(&self.claims)
    }

    /// The fences in its list that have not expired.
    pub(crate) fn standing_fences(&self) -> impl Iterator<Item = &Fenced> {
        self.fenced.iter().filter(|fenced| fenced.stands())
    }

    /// Drops the fences beyond those that a record lists.
    pub(super) fn truncate(&mut self) {
        self.fenced.truncate(FENCED_MAX);
    }

    /// Its texts, which appear in messages.
    pub(super) fn texts(&self) -> impl Iterator<Item = &String> {
        let fenced =
            self.fenced.iter().flat_map(|fenced| [&fenced.address, &fenced.host, &fenced.boot_id]);
        self.named().chain(fenced)
    }
}

/// A client that is fenced for a long time, because nothing has proved that it is dead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fenced {
    /// Address of the RADOS client.
    pub address: String,
    /// Name of its host; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host: String,
    /// Boot id of its host, see [`crate::boot_id`]; empty if it is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot_id: String,
    /// When its fence expires, in seconds since 1970.
    pub until_unix_s: u64,
}

impl Fenced {
    /// A fence that expires in `expire_s` seconds.
    pub(crate) fn new(address: String, (host, boot_id): (String, String), expire_s: u64) -> Fenced {
        Fenced { address, host, boot_id, until_unix_s: unix_s().saturating_add(expire_s) }
    }

    /// Whether its host is this one, by its name, and has been restarted since.
    pub(crate) fn is_of_former_boot(&self) -> bool {
        let now = boot_id();
        self.host == host_name()
            && ![&self.boot_id, &now].contains(&&String::new())
            && self.boot_id != now
    }

    /// Whether it has not expired.
    fn stands(&self) -> bool {
        self.until_unix_s > unix_s()
    }
}

/// One line for messages.
impl Display for Fenced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let days = self.until_unix_s.saturating_sub(unix_s()).div_ceil(86_400);
        let host =
            if self.host.is_empty() { "an unknown host" } else { &format!("host {}", self.host) };
        write!(f, "{} of {host} for {days} more days", self.address)
    }
}

impl Ownership {
    /// The record with these fences added. Fences that have expired are dropped, and if there is no
    /// room, those that expire first.
    pub(crate) fn with_fences(mut self, fences: &[Fenced]) -> Ownership {
        self.clients.fenced.retain(Fenced::stands);
        for new in fences {
            match self.clients.fenced.iter_mut().find(|known| known.address == new.address) {
                // Ceph does not prolong a fence that exists.
                Some(known) if known.host.is_empty() => {
                    (known.host, known.boot_id) = (new.host.clone(), new.boot_id.clone());
                }
                Some(_) => {}
                None => self.clients.fenced.push(new.clone()),
            }
        }
        let surplus = self.clients.fenced.len().saturating_sub(FENCED_MAX);
        self.clients.fenced.sort_by_key(|fenced| fenced.until_unix_s);
        self.clients.fenced.drain(..surplus);
        self
    }

    /// The record with this version of the header after the owner has lifted its guard; `None` if
    /// other clients may have used that moment.
    pub(crate) fn with_lifted(mut self, lifted: Option<u64>) -> Ownership {
        self.clients.lifted = lifted;
        self
    }

    /// The record without the fences that are in `were` and not in `are`.
    pub(crate) fn without_fences(mut self, were: &[Fenced], are: &[Fenced]) -> Ownership {
        let has =
            |list: &[Fenced], one: &Fenced| list.iter().any(|fenced| fenced.address == one.address);
        self.clients.fenced.retain(|fenced| !has(were, fenced) || has(are, fenced));
        self
    }
}
