//! The rights that a client needs. Each is tried on an object that does not exist, so that nothing
//! changes.

use super::cluster::{Cluster, grant};
use super::place::Site;
use super::pool::Locker;
use crate::error::BackendError;
use std::io;
use std::sync::Arc;

/// Object on which the rights are tried: no image has this id.
const PROBE: &str = "tidepool_owner.check";
/// The object that names the clones in a pool.
const CHILDREN: &str = "rbd_children";

/// Fails with the first right that the client lacks.
pub(super) fn check(site: &Site, read_only: bool) -> Result<(), BackendError> {
    let Site { pool, cluster, .. } = site;
    let lacks = |letter, to: &'static str| move |e| denied(site, letter, to, e);
    absent(pool.version(PROBE)).map_err(lacks('r', "read from the pool"))?;
    absent(pool.locker(PROBE)).map_err(lacks('x', "read headers of images"))?;
    if read_only {
        return Ok(());
    }
    absent(pool.remove(PROBE)).map_err(lacks('w', "write to the pool"))?;
    let nobody =
        Locker { client: "client.0".into(), cookie: "check".into(), address: String::new() };
    absent(pool.break_lock(PROBE, &nobody)).map_err(lacks('x', "lock images"))?;
    cluster.check_blocklist_right()
}

/// A pool in which the client may not look for clones. Ceph does that in every pool before it
/// unprotects a snapshot.
pub(super) fn pool_without_children(cluster: &Arc<Cluster>) -> Option<String> {
    let may_look = |pool: &String| {
        let looked = cluster.pool(pool, "").map(|pool| absent(pool.locker(CHILDREN)));
        // Any other error has nothing to do with rights.
        !matches!(looked, Ok(Err(e)) if matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM)))
    };
    cluster.pools().ok()?.into_iter().find(|pool| !may_look(pool))
}

/// An attempt that is allowed finds that there is no such object.
fn absent<T>(outcome: io::Result<T>) -> io::Result<()> {
    match outcome {
        Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
        _ => Ok(()),
    }
}

fn denied(site: &Site, letter: char, action: &'static str, e: io::Error) -> BackendError {
    if !matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM)) {
        return site.failed(action)(e);
    }
    let place = &site.place;
    let (user, pool) = (site.cluster.user(), &place.pool);
    let why = format!(
        "client.{user} may not {action}: `{letter}` is missing in its osd capabilities; grant it: {}",
        grant(user, pool)
    );
    BackendError::Denied { what: place.what.clone(), why }
}
