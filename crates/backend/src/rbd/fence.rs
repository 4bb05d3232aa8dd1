//! Who is fenced before an image is taken, and for how long.
//!
//! Whoever may write to the pool can write the ownership record, and the image's lock too. So no text goes from there to the monitors:
//! what goes there is the address of exactly one client ([`Client`]), or nothing.

use super::address::Client;
use super::attach::CLAIMS_MAX;
use super::cluster::{Cluster, Locker};
use super::place::Place;
use super::survey::{FENCE_FOREIGN_S, Holder, Survey};
use crate::backend::OpenOptions;
use crate::error::BackendError;
use crate::record::{OwnerState, Ownership};

/// So many characters of an address that is none are repeated.
const TOLD_CHARS_MAX: usize = 80;

/// A fence that is to be set.
#[derive(Debug, Clone, PartialEq)]
struct Fence {
    client: Client,
    expire_s: f64,
}

/// Everybody who is fenced before an image is taken or given up.
#[derive(Debug, Default)]
pub(super) struct Fences {
    /// They are fenced before anything is added to the record: it has room for so many clients only.
    former: Vec<Fence>,
    dead: Vec<Fence>,
}

impl Fences {
    /// Who is fenced before the image is taken, the image's own dead clients for `own_s`. `given_up`: nothing of the record's owner counts any
    /// more. Claims that cannot be fenced have to be gone from the record by then ([`drop_unfit_claims`]).
    pub(super) fn plan(
        place: &Place,
        survey: &Survey,
        holder: &Holder,
        options: &OpenOptions,
        own_s: f64,
        given_up: bool,
    ) -> Result<Fences, BackendError> {
        let mut fences = Fences::default();
        let locker = match holder {
            Holder::OurDead(locker) => Some((locker, own_s)),
            Holder::Gone(locker) => Some((locker, FENCE_FOREIGN_S)),
            Holder::Nobody | Holder::Live(_) | Holder::Manual(_) => None,
        };
        let locker = locker.map(|(locker, expire_s)| of_lock(place, locker).map(|client| (client, expire_s)));
        let locker = locker.transpose()?;
        if let Some(record) = &survey.record {
            // The cache itself knows its last client, and that one has the lock: then it is whom the record should name.
            let is_known = matches!(holder, Holder::OurDead(locker) if survey.was_attached(options, locker));
            if given_up || record.taken_from.is_some() {
                fences.former = of_record(place, survey, record, FENCE_FOREIGN_S, true)?;
            } else if record.state == OwnerState::Open {
                match of_record(place, survey, record, own_s, false) {
                    Ok(owner) => fences.dead = owner,
                    Err(_) if is_known => tracing::warn!(
                        image = %place.what,
                        "the ownership record names `{}` as its owner's client, which cannot be fenced; the holder of the lock is fenced, which this \
                         cache knows as its last client",
                        told(record.client.as_deref().unwrap_or_default())
                    ),
                    Err(error) => return Err(error),
                }
            }
        }
        if let Some((client, expire_s)) = locker
            && !fences.all().any(|fence| fence.client == client)
        {
            fences.dead.push(Fence { client, expire_s });
        }
        Ok(fences)
    }

    fn all(&self) -> impl Iterator<Item = &Fence> {
        self.former.iter().chain(&self.dead)
    }

    /// Fences those who come before the record is changed.
    pub(super) fn set_former(&self, cluster: &Cluster) -> Result<(), BackendError> {
        set(cluster, &self.former)
    }

    /// Fences the others.
    pub(super) fn set_dead(&self, cluster: &Cluster) -> Result<(), BackendError> {
        set(cluster, &self.dead)
    }
}

fn set(cluster: &Cluster, fences: &[Fence]) -> Result<(), BackendError> {
    fences.iter().try_for_each(|fence| cluster.blocklist(fence.client, fence.expire_s))
}

/// The fences of a record's clients: of its owner's, and `with_claims` of those that were about to be that. An owner whose client cannot be
/// fenced may be alive all the same: a damaged record is no reason to let it write.
fn of_record(
    place: &Place,
    survey: &Survey,
    record: &Ownership,
    expire_s: f64,
    with_claims: bool,
) -> Result<Vec<Fence>, BackendError> {
    let mut fences: Vec<Fence> = Vec::new();
    if let Some(text) = &record.client {
        let client = Client::to_fence(text).map_err(|why| unfit_owner(place, survey, record, text, why))?;
        fences.push(Fence { client, expire_s });
    }
    let claims = record.claims.iter().filter(|_| with_claims);
    for client in claims.filter_map(|claim| Client::to_fence(claim).ok()) {
        if !fences.iter().any(|fence| fence.client == client) {
            fences.push(Fence { client, expire_s });
        }
    }
    Ok(fences)
}

/// Text of a record, as far as it is repeated to people.
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

/// Takes those claims out of a record that cannot be fenced, and says so. Whoever was about to take the lock has written nothing: if it has
/// got the lock, its address stands there; if not, it does not get past the record, which others have changed by then.
pub(super) fn drop_unfit_claims(record: &mut Ownership) -> Vec<String> {
    let mut notes = Vec::new();
    record.claims.retain(|claim| match Client::to_fence(claim) {
        Ok(_) => true,
        Err(why) => {
            notes.push(format!(
                "the ownership record names `{}` as a client that was about to take the image; it is not fenced: {why}",
                told(claim)
            ));
            false
        }
    });
    let surplus = record.claims.len().saturating_sub(CLAIMS_MAX);
    if surplus > 0 {
        record.claims.drain(..surplus);
        notes.push(format!(
            "the ownership record names {surplus} more clients that were about to take the image than tidepool writes there; the oldest are \
             not fenced"
        ));
    }
    notes
}

impl Survey {
    /// Takes out of the record what cannot be fenced and does not have to be; says so in the log.
    pub(super) fn drop_unfit_claims(&mut self, place: &Place) {
        for note in self.record.as_mut().map(drop_unfit_claims).unwrap_or_default() {
            tracing::warn!(image = %place.what, "{note}");
        }
    }
}
