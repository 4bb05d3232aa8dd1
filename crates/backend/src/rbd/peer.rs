//! The second copy's part in the ownership: the record names the cache of the copy, and that cache
//! can make the image its own.

use super::claim::Claim;
use super::fence::Fences;
use super::owner::OwnerObject;
use super::place::Site;
use super::point::{Point, reached};
use super::pool::IoCtx;
use super::survey::{Holder, Survey};
use crate::api::{OpenOptions, Peer, TakeOver};
use crate::error::BackendError;
use crate::record::Ownership;
use crate::redo;

/// Most attempts to change the record when other clients change it in between.
const ATTEMPTS: u32 = 3;

/// Makes the record name a peer, or none; see [`crate::Backend::set_peer`]. Returns the owner's
/// record with this peer. No write is acknowledged meanwhile, so the record is not read again
/// first: if the record is not the `known` one, the change is refused, and is tried again with the
/// record that is read then.
pub(super) fn name(
    claim: &Claim,
    known: &OwnerObject,
    peer: Option<&Peer>,
) -> Result<(OwnerObject, Ownership), BackendError> {
    let Site { place, pool, .. } = &claim.site()?;
    let mut outcome = Err(BackendError::Fenced { what: place.what.clone() });
    let known = known
        .seen()
        .filter(|seen| is_ours(claim, seen) && seen.peer.as_ref() != peer)
        .map(|seen| (known, seen));
    let mut known = known.map(|(owner, seen)| (owner.clone(), seen.clone()));
    for _ in 0..ATTEMPTS {
        let (mut owner, found) = known.take().map_or_else(|| read(claim, pool), Ok)?;
        found.check_peer(&place.what, peer)?;
        let wanted = claim.record.with_peer(peer.cloned());
        if found.peer.as_ref() == peer {
            return Ok((owner, wanted));
        }
        reached(Point::Naming)?;
        // The other fields may have been written meanwhile, and stay.
        outcome = owner.swap(pool, &found.with_peer(peer.cloned())).map(|()| (owner, wanted));
        if !matches!(outcome, Err(BackendError::Locked { .. })) {
            break;
        }
    }
    outcome
}

/// The record as it is before a release. Before a clean release the record must name no peer: the
/// named host could otherwise take the image over during the release.
pub(super) fn before_release(
    claim: &Claim,
    known: &OwnerObject,
    clean: bool,
) -> Result<(OwnerObject, Ownership), BackendError> {
    if clean {
        return name(claim, known, None);
    }
    let (owner, found) = read(claim, &claim.site()?.pool)?;
    Ok((owner, claim.record.with_peer(found.peer)))
}

/// Whether the record is still the owner's, and no other client has used a moment without the
/// image's guard.
fn is_ours(claim: &Claim, found: &Ownership) -> bool {
    found.is_of(&claim.record) && (found.superseded.is_none() || claim.record.superseded.is_some())
}

/// The record, if it is still the owner's and no other client has used a moment without the image's
/// guard.
fn read(claim: &Claim, pool: &IoCtx) -> Result<(OwnerObject, Ownership), BackendError> {
    let what = &claim.place.what;
    let (owner, found) = OwnerObject::read(what, pool, &claim.owner)?;
    match found.filter(|found| is_ours(claim, found)) {
        Some(found) => Ok((owner, found)),
        None => Err(BackendError::Fenced { what: what.clone() }),
    }
}

/// Makes the record the peer's, with a client that has an owner's rights; see [`crate::take_over`].
/// Everything that could keep the following open from taking the image is checked first.
pub(super) fn take_over(site: &Site, how: &TakeOver) -> Result<Ownership, BackendError> {
    let mut survey = Survey::take(site)?;
    survey.check_kind(&site.place)?;
    survey.drop_unfit_claims(&site.place);
    let taken = take_in(&mut survey, site, how)?;
    survey.owner.swap(&site.pool, &taken)?;
    Ok(taken)
}

/// The first part of opening an image that is to be taken over. If a client has to be fenced, the
/// record is changed before that. Otherwise the record changes with the first write of the open.
pub(super) fn take_first(
    survey: &mut Survey,
    site: &Site,
    how: &TakeOver,
) -> Result<(), BackendError> {
    if survey.record.as_ref().is_some_and(|record| record.is_by(how.cache_uuid)) {
        return Ok(());
    }
    let taken = take_in(survey, site, how)?;
    if taken.clients.named().next().is_some() {
        survey.owner.swap(&site.pool, &taken)?;
    }
    Ok(())
}

/// Checks whether the image can be taken over, and lets the survey continue with the record after
/// the takeover.
fn take_in(survey: &mut Survey, site: &Site, how: &TakeOver) -> Result<Ownership, BackendError> {
    let place = &site.place;
    let Some(before) = &survey.record else {
        let why = "it has no ownership record".into();
        return Err(BackendError::NotPeer { what: place.what.clone(), why });
    };
    let taken = before.taken_over(&place.what, how)?;
    // The former owner's client, and the boot of its host, are still known here.
    let fences = Fences::of_giving_up(place, survey, &Holder::Nobody)?;
    let taken = taken.with_fences(&fences.listed());
    redo::check_version(&place.what, &site.shelf(&survey.facts.id)?)?;
    let options = OpenOptions { cache_uuid: how.cache_uuid, ..OpenOptions::default() };
    survey.record = Some(taken.clone());
    survey.check_lock(place, &survey.holder(&options), &options)?;
    Ok(taken)
}
