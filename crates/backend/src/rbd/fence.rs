//! Which clients are fenced before an image is taken, for how long, and when such a fence ends
//! early.
//!
//! A client that may write to the pool can also write the ownership record and the image's lock. So
//! no text from there is sent to the monitors. They get the address of exactly one client
//! ([`Client`]), or nothing.

use super::address::{self, Client};
use super::cluster::{Blocklisted, Cluster};
use super::place::{Place, Site};
use super::pool::Locker;
use super::survey::{FENCE_FOREIGN_S, FENCE_OWN_S, Holder, Survey};
use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::record::{CLAIMS_MAX, Fenced, OwnerState, Ownership, unix_s};

/// Most characters of a malformed address that a message repeats.
const TOLD_CHARS_MAX: usize = 80;

/// A fence is reported if it expires by more than so many seconds too early.
const SHORTER_S: f64 = 86_400.0;

/// A fence that is to be set.
#[derive(Debug, Clone, PartialEq)]
struct Fence {
    client: Client,
    expire_s: f64,
    /// Name of its host, followed by the host's boot id; both are empty where they are not known.
    host: String,
    boot_id: String,
}

/// All clients that are fenced before an image is taken or given up.
#[derive(Debug, Default)]
pub(super) struct Fences {
    /// Fenced before anything is added to the record, which has room for a limited number of
    /// clients.
    former: Vec<Fence>,
    dead: Vec<Fence>,
}

impl Fences {
    /// The clients that are fenced before an open takes the image; this cache's own dead clients
    /// are fenced for `own_s` seconds. Claims that cannot be fenced must have been removed from the
    /// record before ([`drop_unfit_claims`]).
    pub(super) fn of_open(
        place: &Place,
        survey: &Survey,
        holder: &Holder,
        options: &OpenOptions,
        own_s: f64,
    ) -> Result<Fences, BackendError> {
        let mut fences = Fences::default();
        let locker = of_holder(place, holder, own_s)?;
        if let Some(record) = &survey.record {
            // The cache itself knows its last client, and that client has the lock: it is the
            // client that the record should name.
            let is_known =
                matches!(holder, Holder::OurDead(locker) if survey.was_attached(options, locker));
            if record.taken_from.is_some() {
                fences.former = of_record(place, survey, record, FENCE_FOREIGN_S, true)?;
            } else if record.state == OwnerState::Open {
                match of_record(place, survey, record, own_s, false) {
                    Ok(owner) => fences.dead = owner,
                    Err(_) if is_known => tracing::warn!(
                        image = %place.what,
                        "the ownership record names `{}` as its owner's client, which cannot be fenced; the holder of the lock is fenced, which this \
                         cache knows as its last client",
                        told(record.clients.owner.as_deref().unwrap_or_default())
                    ),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(fences.and(locker))
    }

    /// The clients that are fenced before the image's owner is given up, or its record is made
    /// another cache's: all that the record names. The owner is not proven dead, so these fences
    /// last as long as that of a foreign client. As for claims, see [`Fences::of_open`].
    pub(super) fn of_giving_up(
        place: &Place,
        survey: &Survey,
        holder: &Holder,
    ) -> Result<Fences, BackendError> {
        let mut fences = Fences::default();
        let locker = of_holder(place, holder, FENCE_FOREIGN_S)?;
        if let Some(record) = &survey.record {
            fences.former = of_record(place, survey, record, FENCE_FOREIGN_S, true)?;
        }
        Ok(fences.and(locker))
    }

    /// These fences, and that of the lock's holder.
    fn and(mut self, locker: Option<Fence>) -> Fences {
        let known = |fence: &Fence| self.all().any(|other| other.client == fence.client);
        let locker = locker.filter(|fence| !known(fence));
        self.dead.extend(locker);
        self
    }

    fn all(&self) -> impl Iterator<Item = &Fence> {
        self.former.iter().chain(&self.dead)
    }

    /// The fences that the record has to list before they are set: those that last longer than
    /// [`FENCE_OWN_S`] seconds.
    pub(super) fn listed(&self) -> Vec<Fenced> {
        let long = self.all().filter(|fence| fence.expire_s > FENCE_OWN_S);
        long.map(|Fence { client, expire_s, host, boot_id }| {
            Fenced::new(client.to_string(), (host.clone(), boot_id.clone()), *expire_s as u64)
        })
        .collect()
    }

    /// The fences that a record lists and that are not among these.
    pub(super) fn others(&self, record: Option<&Ownership>) -> Vec<Fenced> {
        let ours = |fenced: &&Fenced| {
            self.all().any(|fence| Client::of(&fenced.address) == Ok(fence.client))
        };
        let listed = record.map(|record| &record.clients.fenced[..]).unwrap_or_default();
        listed.iter().filter(|fenced| !ours(fenced)).cloned().collect()
    }

    /// Fences the clients that are fenced before the record is changed.
    pub(super) fn set_former(&self, site: &Site) -> Result<(), BackendError> {
        set(site, &self.former)
    }

    /// Fences the other clients, so that nothing arrives any more from clients that had the image,
    /// and removes the lock of a dead client. Returns the version that the image's header has if no
    /// other client has changed it since the survey.
    pub(super) fn shut_out(
        &self,
        site: &Site,
        survey: &Survey,
        holder: &Holder,
    ) -> Result<u64, BackendError> {
        // A dead process of ours that has lost its lock may still have requests in flight, too.
        set(site, &self.dead)?;
        let mut version = survey.header_version;
        if let Holder::OurDead(locker) | Holder::Gone(locker) = holder {
            tracing::info!(image = %site.place.what, client = %locker.client, address = %locker.address, "a dead owner is fenced");
            let broken = site.pool.break_lock(&survey.facts.header(), locker);
            let broken = broken.map_err(site.failed("break the dead owner's lock"))?;
            // If there was no lock to break, another client was faster. Then the header is not as
            // the survey saw it.
            version = broken.unwrap_or(version);
        }
        Ok(version)
    }
}

fn set(site: &Site, fences: &[Fence]) -> Result<(), BackendError> {
    let Site { place, cluster, .. } = site;
    fences.iter().try_for_each(|fence| cluster.blocklist(fence.client, fence.expire_s))?;
    let long: Vec<&Fence> = fences.iter().filter(|fence| fence.expire_s > FENCE_OWN_S).collect();
    if long.is_empty() {
        return Ok(());
    }
    match cluster.blocklisted() {
        Ok(standing) => {
            let notes = long.into_iter().filter_map(|fence| shorter(fence, &standing));
            notes.for_each(|note| tracing::warn!(image = %place.what, "{note}"));
        }
        Err(error) => {
            tracing::debug!(image = %place.what, %error, "how long the fences stand is not known")
        }
    }
    Ok(())
}

/// A warning about a fence that expires earlier than it should: Ceph does not prolong a fence that
/// exists, which may have been set for the default of one hour.
fn shorter(fence: &Fence, standing: &[Blocklisted]) -> Option<String> {
    let client = &fence.client;
    let entry = entry_of(&client.to_string(), standing)?;
    let missing_s = unix_s() as f64 + fence.expire_s - entry.until_unix_s()? as f64;
    (missing_s > SHORTER_S).then(|| {
        format!(
            "{client} may be alive, and was fenced before, until {}, which Ceph does not prolong; make sure that it is gone by then, or make \
             its fence longer while its host is off: ceph osd blocklist rm {client}; ceph osd blocklist add {client} {}",
            entry.until, fence.expire_s
        )
    })
}

/// The monitors' entry for the fence of a client, if there is one.
fn entry_of<'a>(address: &str, standing: &'a [Blocklisted]) -> Option<&'a Blocklisted> {
    standing.iter().find(|entry| address::same(&entry.address, address))
}

/// The listed fences that the cluster has, each with the expiry that the cluster reports. An
/// administrator may have ended others.
pub(super) fn standing(cluster: &Cluster, listed: &[Fenced]) -> Result<Vec<Fenced>, BackendError> {
    if listed.is_empty() {
        return Ok(Vec::new());
    }
    let standing = cluster.blocklisted()?;
    let as_it_stands = |fenced: &Fenced| {
        let entry = entry_of(&fenced.address, &standing)?;
        let until = entry.until_unix_s().and_then(|until| u64::try_from(until).ok());
        Some(Fenced { until_unix_s: until.unwrap_or(fenced.until_unix_s), ..fenced.clone() })
    };
    Ok(listed.iter().filter_map(as_it_stands).collect())
}

/// The fences of a record's clients: of its owner's client, and `with_claims` also of clients that
/// were about to take the lock. An owner whose client cannot be fenced may be alive all the same,
/// so that is an error: a damaged record is no reason to let the owner write.
fn of_record(
    place: &Place,
    survey: &Survey,
    record: &Ownership,
    expire_s: f64,
    with_claims: bool,
) -> Result<Vec<Fence>, BackendError> {
    let mut fences: Vec<Fence> = Vec::new();
    if let Some(text) = &record.clients.owner {
        let client =
            Client::to_fence(text).map_err(|why| unfit_owner(place, survey, record, text, why))?;
        // After a takeover the record names the host of the new owner.
        let (host, boot_id) = match record.taken_from {
            None => (record.host.clone(), record.boot_id.clone()),
            Some(_) => (String::new(), String::new()),
        };
        fences.push(Fence { client, expire_s, host, boot_id });
    }
    let claims = record.clients.claims.iter().filter(|_| with_claims);
    for client in claims.filter_map(|claim| Client::to_fence(claim).ok()) {
        if !fences.iter().any(|fence| fence.client == client) {
            // The record does not say in which boot of its host an attempt was made.
            fences.push(Fence { client, expire_s, host: String::new(), boot_id: String::new() });
        }
    }
    Ok(fences)
}

/// The beginning of a record's text, as a message repeats it.
fn told(text: &str) -> String {
    text.chars().take(TOLD_CHARS_MAX).collect()
}

fn unfit_owner(
    place: &Place,
    survey: &Survey,
    record: &Ownership,
    text: &str,
    why: &'static str,
) -> BackendError {
    let object = survey.facts.owner();
    let host = record.taken_from.as_ref().unwrap_or(&record.host);
    BackendError::Record {
        what: format!("{} (object {object})", place.what),
        why: format!(
            "names `{}` as its owner's client, which cannot be fenced: {why}; make sure that tidepool on host {host} has the image \
             no more (stop it there, or switch the host off), then take `client` out of the object (rados get, rados put)",
            told(text)
        ),
    }
}

/// The fence of a holder of the lock that is dead or gone; this cache's own dead client is fenced
/// for `own_s` seconds.
fn of_holder(place: &Place, holder: &Holder, own_s: f64) -> Result<Option<Fence>, BackendError> {
    let (locker, expire_s) = match holder {
        Holder::OurDead(locker) => (locker, own_s),
        Holder::Gone(locker) => (locker, FENCE_FOREIGN_S),
        Holder::Nobody | Holder::Live(_) | Holder::Manual(_) => return Ok(None),
    };
    let client = of_lock(place, locker)?;
    Ok(Some(Fence { client, expire_s, host: String::new(), boot_id: String::new() }))
}

fn of_lock(place: &Place, locker: &Locker) -> Result<Client, BackendError> {
    let Locker { client, cookie, address } = locker;
    Client::to_fence(address).map_err(|why| {
        let (what, address) = (place.what.clone(), told(address));
        let holder = format!(
            "{client} has left its exclusive lock, and its address `{address}` cannot be fenced: {why}; make sure that this client is \
             gone, then: rbd lock rm {what} '{cookie}' {client}"
        );
        BackendError::Locked { what, holder }
    })
}

/// Removes from a record the claims that cannot be fenced, and the oldest claims beyond
/// [`CLAIMS_MAX`]; returns a note for each case. A client that was about to take the lock has
/// written nothing. If it has got the lock, its address is in the lock. If it has not got the lock,
/// its change of the record fails, because another client has changed the record by then.
pub(super) fn drop_unfit_claims(record: &mut Ownership) -> Vec<String> {
    let mut notes = Vec::new();
    record.clients.claims.retain(|claim| match Client::to_fence(claim) {
        Ok(_) => true,
        Err(why) => {
            notes.push(format!(
                "the ownership record names `{}` as a client that was about to take the image; it is not fenced: {why}",
                told(claim)
            ));
            false
        }
    });
    let surplus = record.clients.claims.len().saturating_sub(CLAIMS_MAX);
    if surplus > 0 {
        record.clients.claims.drain(..surplus);
        notes.push(format!(
            "the ownership record names {surplus} more clients that were about to take the image than tidepool writes there; the oldest are \
             not fenced"
        ));
    }
    notes
}

impl Survey {
    /// Removes from the record the claims that [`drop_unfit_claims`] removes, and logs the notes.
    pub(super) fn drop_unfit_claims(&mut self, place: &Place) {
        for note in self.record.as_mut().map(drop_unfit_claims).unwrap_or_default() {
            tracing::warn!(image = %place.what, "{note}");
        }
    }
}

/// Ends the fences of clients of former boots of this host, once they have lasted as long as those
/// of this cache's own dead clients. Returns the fences that the record has to keep listing; those
/// that an administrator has ended are not among them. A host's name proves little, so the client's
/// IP address has to be that of this client (`own`), too.
pub(super) fn end_former_boots(site: &Site, own: &str, listed: &[Fenced]) -> Vec<Fenced> {
    let Site { place, cluster, .. } = site;
    let left = match standing(cluster, listed) {
        Ok(standing) => standing,
        Err(error) => {
            tracing::debug!(image = %place.what, %error, "which fences stand is not known");
            return listed.to_vec();
        }
    };
    let own = Client::of(own).ok();
    let over = |fenced: &Fenced| {
        let (client, own) = (Client::to_fence(&fenced.address).ok()?, own?);
        let set_unix_s = fenced.until_unix_s.saturating_sub(FENCE_FOREIGN_S as u64);
        let has_stood = set_unix_s.saturating_add(FENCE_OWN_S as u64) <= unix_s();
        let is_over =
            has_stood && fenced.is_of_former_boot() && client.ip() == own.ip() && client != own;
        is_over.then_some(client)
    };
    let stays = |fenced: &&Fenced| {
        if !left.iter().any(|left| left.address == fenced.address) {
            tracing::info!(image = %place.what, client = %fenced.address, "its fence was ended: it is listed no more");
            return false;
        }
        match over(fenced).map(|client| (client, cluster.unblocklist(client))) {
            None => true,
            Some((client, Ok(()))) => {
                tracing::info!(image = %place.what, %client, "this host was restarted since: the client is fenced no more");
                false
            }
            Some((client, Err(error))) => {
                tracing::debug!(image = %place.what, %client, %error, "the fence of a former boot of this host stays");
                true
            }
        }
    };
    listed.iter().filter(stays).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fence_that_falls_too_early_is_told_with_what_to_do() {
        let client = Client::to_fence("10.0.0.1:0/77").expect("a client");
        let fence =
            |expire_s| Fence { client, expire_s, host: String::new(), boot_id: String::new() };
        let entry = |address: &str, until: &str| Blocklisted {
            address: address.into(),
            until: until.into(),
        };
        let early = [
            entry("10.0.0.1:0/78", "1999-01-01T00:00:00.000000+0000"),
            entry("10.0.0.1:0/77", "2001-01-01T00:00:00.000000+0000"),
        ];
        let line = shorter(&fence(FENCE_FOREIGN_S), &early).expect("it is told");
        assert!(line.contains("until 2001-01-01T00:00:00.000000+0000"), "{line}");
        assert!(
            line.ends_with("ceph osd blocklist add 10.0.0.1:0/77 31536000") && !line.contains('\n'),
            "{line}"
        );
        assert_eq!(shorter(&fence(FENCE_FOREIGN_S), &early[..1]), None);
        assert_eq!(
            shorter(
                &fence(FENCE_FOREIGN_S),
                &[entry("10.0.0.1:0/77", "9999-01-01T00:00:00.000000+0000")]
            ),
            None
        );
        assert_eq!(shorter(&fence(FENCE_FOREIGN_S), &[entry("10.0.0.1:0/77", "in a year")]), None);
    }
}
