//! `rbd:`: an image in a Ceph pool, through librbd and librados, which are loaded at run time.
//!
//! Every image has a RADOS client of its own, so that one blocklist entry fences one volume. The
//! image's exclusive lock is taken at open and held. The ownership record is a RADOS object beside
//! the image, `tidepool_owner.ID`. The image stays a plain RBD image.
//!
//! | file | what it is about |
//! |---|---|
//! | `abandon` | Giving up what a lost cache holds of an image |
//! | `address` | Addresses of RADOS clients |
//! | `attach` | Taking an image, with all steps until the image is ours |
//! | `backend` | An open image as a backend |
//! | `change` | Changing an image of ours with its open handle |
//! | `check` | The dry run of opening an image in a pool |
//! | `claim` | What an owner knows about the image that it holds |
//! | `cluster` | A RADOS client, and the operations of the control path on it |
//! | `fence` | Which clients are fenced before an image is taken, for how long, and when such a fence ends early |
//! | `forbid` | Keeps other clients from changing an image that the guard's bit cannot protect, because journaling gives that bit a meaning of its own |
//! | `guard` | The guard of an image whose newest data is in a cache |
//! | `image` | An open image, and the operations on it outside of the data path |
//! | `io` | Transfers with an image through librbd's asynchronous calls |
//! | `layout` | Which objects an image or a snapshot has of its own, and which snapshot has the others |
//! | `mapped` | An image that a kernel has mapped |
//! | `object_map` | The object map of an image or a snapshot |
//! | `owner` | The ownership record of an image |
//! | `parent` | The parent of a clone |
//! | `peer` | The second copy's part in the ownership |
//! | `place` | Where an image is |
//! | `point` | Moments of taking, changing and giving up an image at which tests intervene |
//! | `pool` | A pool of a cluster |
//! | `redo` | The redo of an image |
//! | `retake` | A handle that has turned read-only |
//! | `rights` | The rights that a client needs |
//! | `spot` | The lock of an image |
//! | `survey` | What is known about an image before it is taken, and which client holds its lock |
//! | `sys` | The parts of librados and librbd that are used, loaded at run time |

mod abandon;
mod address;
mod attach;
mod backend;
mod change;
mod check;
mod claim;
mod cluster;
mod fence;
mod forbid;
mod guard;
mod image;
mod io;
mod layout;
mod mapped;
mod object_map;
mod owner;
mod parent;
mod peer;
mod place;
mod point;
mod pool;
mod redo;
mod retake;
mod rights;
mod spot;
mod survey;
mod sys;
#[cfg(test)]
mod tests;

use crate::api::{OpenOptions, Opened, Prepared, TakeOver};
use crate::error::BackendError;
use crate::record::{Continuity, Ownership};
use crate::redo::Remains;
use crate::snapshot::Snapshot;
use crate::uri::BackendUri;
use attach::Attached;
use backend::{Found, Held, RbdBackend};
use cluster::Cluster;
use image::Access;
use owner::OwnerObject;
use place::{Place, Site};
use std::sync::Arc;
use survey::Survey;
use uuid::Uuid;

pub use address::Client;
pub(crate) use check::check;
pub(crate) use mapped::Mapped;
pub use survey::FENCE_NS_MIN;

fn place_of(uri: &BackendUri) -> Result<Place, BackendError> {
    let unfit =
        || BackendError::Unsupported { what: uri.to_string(), why: "not an rbd: URI".into() };
    Place::of(uri).ok_or_else(unfit)
}

/// The place of an image, which can have an owner. Refuses a snapshot.
fn image_of(uri: &BackendUri) -> Result<Place, BackendError> {
    let place = place_of(uri)?;
    if place.snapshot.is_some() {
        let why = format!("it is a snapshot, which has no owner; name the image: {}", place.head);
        return Err(BackendError::Unsupported { what: place.what, why });
    }
    Ok(place)
}

/// A client of the cluster for one image, with an owner's rights there.
struct Way {
    cluster: Arc<Cluster>,
}

/// Connects, and checks for an owner's rights.
pub(crate) fn prepare(uri: &BackendUri) -> Result<Prepared, BackendError> {
    let place = image_of(uri)?;
    owners_site(&place, &Prepared::default())
        .map(|site| Prepared::of(Way { cluster: site.cluster }))
}

/// The site of an image, reached by the client that was made ready for it, or by a new one.
fn site_of(place: &Place, prepared: &Prepared) -> Result<Site, BackendError> {
    match prepared.made::<Way>() {
        Some(way) => Site::new(place.clone(), Arc::clone(&way.cluster)),
        None => place.connect(),
    }
}

/// As [`site_of`], for an image that this client is to own: the rights of a new client are checked.
fn owners_site(place: &Place, prepared: &Prepared) -> Result<Site, BackendError> {
    let site = site_of(place, prepared)?;
    if prepared.made::<Way>().is_none() {
        rights::check(&site, false)?;
    }
    Ok(site)
}

/// The ownership record of an image.
pub(crate) fn record(
    uri: &BackendUri,
    prepared: &Prepared,
) -> Result<Option<Ownership>, BackendError> {
    let place = image_of(uri)?;
    let site = site_of(&place, prepared)?;
    let object = image::owner_object(&site.image_id()?);
    OwnerObject::read(&place.what, &site.pool, &object).map(|(_, record)| record)
}

/// Opens an image.
pub(crate) fn open(uri: &BackendUri, options: &OpenOptions) -> Result<Opened, BackendError> {
    let place = place_of(uri)?;
    let (mut backend, generation, continuity) = open_place(place, options)?;
    let Found { layout, snapshot, notes } = backend.take_found();
    let Continuity { proven, reason, .. } = continuity;
    Ok(Opened {
        backend: Box::new(backend),
        generation,
        keep_clean: proven,
        reason,
        layout,
        snapshot,
        notes,
    })
}

/// The snapshots of an image; see [`crate::snapshots`].
pub(crate) fn snapshots(uri: &BackendUri) -> Result<Vec<Snapshot>, BackendError> {
    let site = image_of(uri)?.connect()?;
    let image = site.open(Access::Read).map_err(site.failed("open the image"))?;
    image.snapshots().map_err(site.failed("list the image's snapshots"))
}

/// Gives up what a lost cache holds; see [`crate::abandon`].
pub(crate) fn abandon(uri: &BackendUri) -> Result<Option<Ownership>, BackendError> {
    abandon::abandon(&image_of(uri)?.connect()?)
}

/// Makes an image the peer's; see [`crate::take_over`].
pub(crate) fn take_over(uri: &BackendUri, how: &TakeOver) -> Result<Ownership, BackendError> {
    peer::take_over(&owners_site(&image_of(uri)?, &Prepared::default())?, how)
}

/// An image's name in messages, its ownership record, and the place of its redo.
pub(crate) fn look(uri: &BackendUri) -> Result<Remains, BackendError> {
    let site = image_of(uri)?.connect()?;
    let survey = Survey::take(&site)?;
    let shelf = site.shelf(&survey.facts.id)?;
    Ok((site.place.what, survey.record, Box::new(shelf)))
}

/// Refuses an image that its owner has open, or that another client has locked.
pub(crate) fn owner_is_gone(uri: &BackendUri) -> Result<(), BackendError> {
    let site = image_of(uri)?.connect()?;
    abandon::check_abandoned(&site.place, &Survey::take(&site)?)
}

fn open_place(
    place: Place,
    options: &OpenOptions,
) -> Result<(RbdBackend, u64, Continuity), BackendError> {
    if let Some(snapshot) = place.snapshot.clone() {
        return open_snapshot(&place, &snapshot, options);
    }
    if options.read_only {
        let backend = open_read_only(&place, options)?;
        return Ok((
            backend,
            0,
            Continuity::unproven("the image is opened read-only, without ownership"),
        ));
    }
    let site = owners_site(&place, &options.prepared)?;
    let attached = attach::attach(&site, options)?;
    let attachment =
        serde_json::to_vec(&attached.attachment).expect("two strings are serialisable");
    let claim = attached.claim(&site);
    let Attached { image, facts, owner, record, continuity, notes, .. } = attached;
    let held = Held { claim, owner };
    let backend = RbdBackend::start(site, image, &facts, Some(held), None);
    let backend =
        backend.and_then(|mut backend| backend.start_redo(&record, options).map(|()| backend));
    let mut backend = backend.inspect_err(|_| {
        // What this cache holds of the image is in the image, too.
        if !options.dirty {
            tracing::warn!(
                image = %place.what,
                "it is this cache's although it could not be opened: open it with this cache again, or free it: tidepool recover URI \
                 --accept-loss"
            );
        }
    })?;
    backend.attachment = attachment;
    backend.found.notes = notes;
    Ok((backend, record.generation, continuity))
}

fn open_read_only(place: &Place, options: &OpenOptions) -> Result<RbdBackend, BackendError> {
    let site = place.connect()?;
    rights::check(&site, true)?;
    let survey = Survey::take(&site)?;
    survey.check_reader(place, Uuid::from_bytes(options.cache_uuid))?;
    // A client that only reads rolls nothing back.
    let reads = OpenOptions { roll_back: None, ..options.clone() };
    survey.check_whole(place, &reads)?;
    survey.check_lock(place, &survey.holder(options), options)?;
    let image = site.open(Access::Read).map_err(site.failed("open the image"))?;
    RbdBackend::start(site, image, &survey.facts, None, None)
}

/// Opens a snapshot. It has no owner and never changes: as long as it is the same snapshot, its
/// cached data is valid.
fn open_snapshot(
    place: &Place,
    snapshot: &str,
    options: &OpenOptions,
) -> Result<(RbdBackend, u64, Continuity), BackendError> {
    let site = place.connect()?;
    rights::check(&site, true)?;
    let image = site.open(Access::Snapshot(snapshot)).map_err(site.failed("open the snapshot"))?;
    let read = "read the image's header";
    let facts = image.facts().map_err(site.failed(read))?;
    let number = image.snapshot_id(snapshot).map_err(site.failed(read))?;
    let attachment = format!("snapshot {number} of {}", facts.id).into_bytes();
    let continuity = match options.attachment.as_ref() == Some(&attachment) {
        true => Continuity::proven("it is the same snapshot"),
        false => Continuity::unproven("it is another snapshot, or one that this cache has not had"),
    };
    let name = parent::snapshot_name(&site.cluster, site.pool.id(), &facts.id, number);
    let name = name.map_err(site.failed(read))?;
    let mut backend = RbdBackend::start(site, image, &facts, None, Some(number))?;
    backend.attachment = attachment;
    backend.found.snapshot = Some(name);
    Ok((backend, 0, continuity))
}
