//! The dry run of opening an image in a pool.

use super::attach::check_cache;
use super::cluster::{Cluster, grant};
use super::fence::{self, Fences};
use super::image::Access;
use super::place::{Place, Site};
use super::rights;
use super::survey::{Holder, Survey};
use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::record::{Continuity, Fenced, OwnerState, Ownership};
use crate::redo::check_version;
use crate::report::{self, CheckReport};
use crate::uri::BackendUri;
use uuid::Uuid;

/// Checks the image, its lock and its ownership record, and adds to the report what was found.
pub(crate) fn check(uri: &BackendUri, options: &OpenOptions, report: &mut CheckReport) {
    let Some(place) = Place::of(uri) else { return };
    let reached = report.step("cluster", place.connect(), |site| {
        let address = site.cluster.address().unwrap_or_default();
        format!("reached as client.{} from {address}", site.cluster.user())
    });
    let Some(site) = reached else {
        report.skip(
            &["rights", "image", "features", "lock", "ownership"],
            "the cluster or pool cannot be reached",
        );
        return;
    };
    if !has_rights(&site, options, report) {
        report.skip(&["image", "features", "lock", "ownership"], "a right is missing");
        return;
    }
    if let Some(snapshot) = &place.snapshot {
        return check_snapshot(&site, snapshot, report);
    }
    let survey = report.step("image", Survey::take(&site), |survey| {
        format!("id {}, {} bytes", survey.facts.id, survey.facts.size_bytes)
    });
    let Some(mut survey) = survey else {
        report.skip(&["features", "lock", "ownership"], "the image cannot be opened");
        return;
    };
    let unfit = survey.record.as_mut().map(fence::drop_unfit_claims).unwrap_or_default();
    unfit.into_iter().for_each(|note| report.warn("claims", note));
    let holder = survey.holder(options);
    if !options.read_only {
        features(&place, &survey, report);
    }
    report.step("lock", survey.check_lock(&place, &holder, options), |()| describe(&holder));
    let continuity = survey.continuity(Uuid::from_bytes(options.cache_uuid), &holder);
    let continuity = continuity.of_generation(survey.record.as_ref(), options);
    let owner = check_owner(&site, &survey, &holder, options, &continuity);
    report.step("ownership", owner, |()| report::describe(survey.record.as_ref()));
    fences(&site.cluster, survey.record.as_ref(), report);
    if options.read_only {
        report.would.push("open the image read-only, without lock and ownership".into());
        return;
    }
    plan(&survey, &holder, &continuity, report);
}

/// Reports which rights the client has. Returns whether it has those that it needs.
fn has_rights(site: &Site, options: &OpenOptions, report: &mut CheckReport) -> bool {
    let read_only = options.read_only || site.place.snapshot.is_some();
    let all = if read_only { "read" } else { "read, write, lock, fence" };
    if report.step("rights", rights::check(site, read_only), |()| all.into()).is_none() {
        return false;
    }
    if let Some(pool) = rights::pool_without_children(&site.cluster).filter(|_| !read_only) {
        let user = site.cluster.user();
        let grant = grant(user, &site.place.pool);
        let why = format!(
            "client.{user} may not look for clones in pool `{pool}`, which `volume snap unprotect` needs; grant it: {grant}"
        );
        report.warn("clones", why);
    }
    true
}

fn check_snapshot(site: &Site, snapshot: &str, report: &mut CheckReport) {
    let facts = site.open(Access::Snapshot(snapshot)).and_then(|image| image.facts());
    let facts = facts.map_err(site.failed("open the snapshot"));
    report.step("snapshot", facts, |facts| {
        format!("of image {}, {} bytes", facts.id, facts.size_bytes)
    });
    report.would.push("open the snapshot read-only".into());
}

/// Reports whether the image is of a kind that can be cached, and what its user should know.
fn features(place: &Place, survey: &Survey, report: &mut CheckReport) {
    report.step("features", survey.check_kind(place), |()| "exclusive-lock is on".into());
    for (subject, note) in survey.notes() {
        report.warn(subject, note);
    }
    let is_owned = survey.record.as_ref().is_some_and(|record| record.state != OwnerState::Clean);
    if survey.facts.forbidden && !is_owned {
        let why = "changes of the image are forbidden by a cache that has it no more, so that `rbd` refuses them; opening it here, or \
                   tidepool recover URI --accept-loss, ends that";
        report.warn("guard", why);
    }
}

/// Refuses a cache that an open would refuse by the record, the redo and the state of the image.
fn check_owner(
    site: &Site,
    survey: &Survey,
    holder: &Holder,
    options: &OpenOptions,
    continuity: &Continuity,
) -> Result<(), BackendError> {
    let (place, cache_uuid) = (&site.place, Uuid::from_bytes(options.cache_uuid));
    if options.read_only {
        survey.check_reader(place, cache_uuid)?;
        return survey.check_whole(place, options);
    }
    survey.check_owner(place, cache_uuid)?;
    survey.check_group_snapshots(place, cache_uuid)?;
    survey.check_plugins(place, cache_uuid)?;
    check_version(&place.what, &site.shelf(&survey.facts.id)?)?;
    Fences::of_open(place, survey, holder, options, survey.own_fence_s(cache_uuid))?;
    survey.check_whole(place, options)?;
    if let Some(record) = &survey.record {
        record.check_elsewhere(&place.what, options)?;
        record.check_known(&place.what, options)?;
        check_cache(site, survey, record, options)?;
    }
    continuity.check_dirty(&place.what, options)
}

/// Reports which fences stand.
fn fences(cluster: &Cluster, record: Option<&Ownership>, report: &mut CheckReport) {
    let fences = standing_fences(cluster, record);
    if !fences.is_empty() {
        let fences: Vec<String> = fences.iter().map(Fenced::to_string).collect();
        report.ok(
            "fences",
            format!(
                "kept away since owners of this image could not be proved dead: {}; a fence can be ended once its host was restarted or \
                 its daemon has ended, an hour ago at least, so that nothing that it has sent is under way: ceph osd blocklist rm ADDRESS",
                fences.join("; ")
            ),
        );
    }
}

/// The fences that the record lists and the cluster has. If the cluster does not report its fences,
/// the listed fences that have not expired.
fn standing_fences(cluster: &Cluster, record: Option<&Ownership>) -> Vec<Fenced> {
    let Some(record) = record else { return Vec::new() };
    let standing = fence::standing(cluster, &record.clients.fenced);
    standing.unwrap_or_else(|_| record.clients.standing_fences().cloned().collect())
}

fn describe(holder: &Holder) -> String {
    match holder {
        Holder::Nobody => "free".into(),
        Holder::OurDead(locker) => {
            format!("held by this cache's killed process ({})", locker.address)
        }
        Holder::Gone(locker) => {
            format!("left behind by {} at {}, which is gone", locker.client, locker.address)
        }
        Holder::Live(locker) | Holder::Manual(locker) => {
            format!("held by {} at {}", locker.client, locker.address)
        }
    }
}

fn plan(survey: &Survey, holder: &Holder, continuity: &Continuity, report: &mut CheckReport) {
    let would = &mut report.would;
    if let Some(record) = survey.record.as_ref().filter(|record| record.state == OwnerState::Open) {
        let who = if record.taken_from.is_some() { "former owner" } else { "killed process" };
        would.extend(
            record.clients.owner.iter().map(|client| format!("fence the {who} at {client}")),
        );
    }
    match holder {
        Holder::OurDead(locker) => would.push(format!("break the lock of {}", locker.client)),
        Holder::Gone(locker) => would.push(format!("fence {} and break its lock", locker.address)),
        Holder::Nobody | Holder::Live(_) | Holder::Manual(_) => {}
    }
    would.push("take the exclusive lock and keep it".into());
    would.push(match survey.can_guard() {
        true => "guard the image against other writers (feature non-primary) until it is released clean".into(),
        false => "have others refused who would change the image (by a bit of op_features), until it is released clean".into(),
    });
    let generation = survey.record.as_ref().map_or(1, |record| record.generation.saturating_add(1));
    would.push(format!("write generation {generation} to object {}", survey.facts.owner()));
    would.push(continuity.plan());
}
