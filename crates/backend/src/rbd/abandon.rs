//! Giving up what a lost cache holds of an image.

use super::fence::Fences;
use super::forbid;
use super::guard;
use super::place::{Place, Site};
use super::point::{Point, reached};
use super::rights;
use super::survey::Survey;
use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::record::{OwnerState, Ownership};
use crate::redo;
use std::io;

/// Refuses an image that its owner or another client still has open or locked.
pub(super) fn check_abandoned(place: &Place, survey: &Survey) -> Result<(), BackendError> {
    let Some(record) = survey.record.as_ref().filter(|record| record.state != OwnerState::Clean)
    else {
        return Ok(());
    };
    survey.refuse_live(place, record)?;
    survey.check_lock(place, &survey.holder(&OpenOptions::default()), &OpenOptions::default())
}

/// Gives up what a lost cache holds; see [`crate::abandon`].
pub(super) fn abandon(site: &Site) -> Result<Option<Ownership>, BackendError> {
    let Site { place, pool, .. } = site;
    rights::check(site, false)?;
    let mut survey = Survey::take(site)?;
    survey.drop_unfit_claims(place);
    // Without the uuid of a cache, no process counts as dead: a client that watches the image
    // counts as alive.
    let holder = survey.holder(&OpenOptions::default());
    let unlocked = survey.check_lock(place, &holder, &OpenOptions::default());
    // What an earlier attempt to open the image, or to give it up, has left when it was killed.
    let is_left = survey.guarded() || survey.facts.forbidden;
    let left = |record: &Ownership| {
        let is_guard_left = record.left_guard() && (is_left || !record.clients.claims.is_empty());
        record.state != OwnerState::Clean || is_guard_left
    };
    let Some(before) = survey.record.clone().filter(left) else {
        // An older release does not know these parts of the guard, and has left them.
        if survey.facts.forbidden || unlocked.is_ok() {
            unlocked?;
            // This fails if another client has changed the header since the survey.
            allow(site, &survey, Some(survey.header_version))
                .and_then(|()| guard::unreserve(pool, &survey.facts.header()))
                .map_err(site.failed("take away the guard of the image"))?;
        }
        return Ok(None);
    };
    unlocked?;
    survey.refuse_live(place, &before)?;
    let shelf = site.shelf(&survey.facts.id)?;
    redo::check_version(&place.what, &shelf)?;
    let fences = Fences::of_giving_up(place, &survey, &holder)?;
    let before = before.with_fences(&fences.listed());
    // The fences are listed before they are set, so that a kill leaves no fence that no record
    // lists.
    survey.owner.swap(pool, &before)?;
    fences.set_former(site)?;
    fences.shut_out(site, &survey, &holder)?;
    // The record is written first: an owner that comes back in between must not find its guard
    // gone. A kill in between leaves a record that lets the next attempt lift the guard.
    survey.owner.swap(pool, &before.abandoned())?;
    redo::clear(&place.what, &shelf, before.generation)?;
    reached(Point::Abandoned)?;
    allow(site, &survey, None)
        .and_then(|()| guard::free(pool, &survey.facts.header()))
        .map_err(site.failed("lift the guard of the image"))?;
    Ok(Some(before))
}

/// Allows changes of an image if a cache has forbidden them and the header still has this version
/// (`None`: any).
fn allow(site: &Site, survey: &Survey, expected: Option<u64>) -> io::Result<()> {
    match survey.facts.forbidden {
        true => forbid::lift(&site.pool, &survey.facts.header(), expected).map(drop),
        false => Ok(()),
    }
}
