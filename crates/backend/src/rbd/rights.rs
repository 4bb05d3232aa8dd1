//! The rights that a client needs. Each is tried on an object that does not exist, so that nothing changes.

use super::cluster::{Cluster, IoCtx, Locker, grant};
use super::place::Place;
use crate::error::BackendError;
use std::io;

/// No image has this id.
const PROBE: &str = "tidepool_owner.check";

/// Fails with the first right that the client lacks.
pub(super) fn check(
    place: &Place,
    cluster: &Cluster,
    pool: &IoCtx,
    read_only: bool,
) -> Result<(), BackendError> {
    let lacks = |letter, to: &'static str| move |e| denied(place, cluster, letter, to, e);
    absent(pool.version(PROBE)).map_err(lacks('r', "read from the pool"))?;
    absent(pool.locker(PROBE)).map_err(lacks('x', "read headers of images"))?;
    if read_only {
        return Ok(());
    }
    absent(pool.remove(PROBE)).map_err(lacks('w', "write to the pool"))?;
    let nobody = Locker { client: "client.0".into(), cookie: "check".into(), address: String::new() };
    absent(pool.break_lock(PROBE, &nobody)).map_err(lacks('x', "lock images"))?;
    cluster.check_blocklist_right()
}

/// That there is no such object is what an allowed attempt finds.
fn absent<T>(outcome: io::Result<T>) -> io::Result<()> {
    match outcome {
        Err(e) if e.raw_os_error() != Some(libc::ENOENT) => Err(e),
        _ => Ok(()),
    }
}

fn denied(
    place: &Place,
    cluster: &Cluster,
    letter: char,
    action: &'static str,
    e: io::Error,
) -> BackendError {
    if !matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM)) {
        return place.error(cluster, action, e);
    }
    let (user, pool) = (cluster.user(), &place.pool);
    let why = format!(
        "client.{user} may not {action}: `{letter}` is missing in its osd capabilities; grant it: {}",
        grant(user, pool)
    );
    BackendError::Denied { what: place.what.clone(), why }
}
