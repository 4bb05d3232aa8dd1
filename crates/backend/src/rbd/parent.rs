//! The parent of a clone: which snapshot it is.

use super::cluster::{Cluster, check};
use super::image::{Image, text};
use super::place::Site;
use super::sys;
use crate::api::Parent;
use crate::uri::BackendUri;
use std::io;
use std::ptr;

/// A parent, as librbd describes it.
struct Named {
    pool: String,
    pool_id: i64,
    namespace: String,
    image: String,
    image_id: String,
    snapshot: String,
    snapshot_id: u64,
    /// The snapshot can be opened by its name: it is a user's snapshot, and its image is not in the
    /// trash.
    has_name: bool,
}

/// The parent of an image, if it has one whose cached data can be shared with other clones.
pub(super) fn find(site: &Site, image: &Image) -> io::Result<Option<Parent>> {
    let Some(parent) = named(image)?.filter(|parent| parent.has_name) else { return Ok(None) };
    let name = snapshot_name(&site.cluster, parent.pool_id, &parent.image_id, parent.snapshot_id)?;
    let uri = BackendUri::Rbd {
        pool: parent.pool,
        namespace: parent.namespace,
        image: parent.image,
        snapshot: Some(parent.snapshot),
        conf: site.place.conf.clone(),
        id: site.place.id.clone(),
    };
    Ok(Some(Parent { name, uri }))
}

/// A name that no other snapshot of the cluster has, whatever the snapshot or its image is called.
/// Eight digits of the cluster's id distinguish it from the snapshots of other clusters.
pub(super) fn snapshot_name(
    cluster: &Cluster,
    pool_id: i64,
    image_id: &str,
    number: u64,
) -> io::Result<String> {
    let fsid = cluster.fsid()?;
    let fsid = fsid.get(..8).unwrap_or(&fsid);
    Ok(format!("@{fsid}.{pool_id}.{image_id}.{number}"))
}

fn named(image: &Image) -> io::Result<Option<Named>> {
    let rbd = image.rbd();
    let mut spec = sys::LinkedImageSpec {
        pool_id: 0,
        pool_name: ptr::null_mut(),
        pool_namespace: ptr::null_mut(),
        image_id: ptr::null_mut(),
        image_name: ptr::null_mut(),
        trash: false,
    };
    let mut snap = sys::SnapSpec { id: 0, namespace_type: 0, name: ptr::null_mut() };
    // SAFETY: a valid image and structures of the library's layout.
    let found =
        check(unsafe { (rbd.rbd_get_parent)(image.handle(), &raw mut spec, &raw mut snap) });
    if let Err(e) = found {
        return if e.raw_os_error() == Some(libc::ENOENT) { Ok(None) } else { Err(e) };
    }
    let named = Named {
        pool: text(spec.pool_name),
        pool_id: spec.pool_id,
        namespace: text(spec.pool_namespace),
        image: text(spec.image_name),
        image_id: text(spec.image_id),
        snapshot: text(snap.name),
        snapshot_id: snap.id,
        has_name: !spec.trash && snap.namespace_type == sys::SNAP_NAMESPACE_USER,
    };
    // SAFETY: filled by the call above, freed once.
    unsafe {
        (rbd.rbd_linked_image_spec_cleanup)(&raw mut spec);
        (rbd.rbd_snap_spec_cleanup)(&raw mut snap);
    }
    Ok(Some(named))
}
