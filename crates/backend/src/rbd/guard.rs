//! The guard of an image whose newest data is in a cache.
//!
//! An image with dirty data in a cache looks like any other image. If plain librbd or a kernel
//! wrote to it, for instance after the cache's host has died and its lock has gone, the volume
//! would fork. So while a cache owns an image, the feature bit `non-primary` is set in its header.
//! Every other client then refuses to write, snapshot or resize with EROFS, and still reads and
//! exports. The bit is set through the class method `rbd.set_features`, and watchers are not
//! notified: the owner's own handle does not see the bit and continues to write.
//!
//! If the handle reads its header again nevertheless (its watch was lost and renewed because an OSD
//! was away), its writes fail with EROFS. [`super::retake::retake`] then proves that lock and
//! ownership are still ours, and opens the image anew while the bit is lifted. Watchers are not
//! notified then either: a client that has seen the guard must continue to see it.
//!
//! Two commands need no writable handle: a group's snapshots and rollbacks change the group's
//! members, and a migration moves the image elsewhere. Each begins by putting a key into the header
//! that must not be there yet. So the guard puts both keys there first, with values that mean
//! nothing: for librbd the image is in no group and does not migrate, and the OSDs' class refuses
//! the commands with EEXIST. An image that the guard's bit cannot protect gets the keys alone.

use super::image::FEATURE_NON_PRIMARY;
use super::pool::{IoCtx, LOCK_NAME, Step};
use std::ffi::CStr;
use std::io;

/// The tag of the image's lock since its guard was lifted. A client that takes the lock writes its
/// own tag, which stays when the lock is released. So this tag proves that no client has taken the
/// lock.
pub(super) const LIFTED_TAG: &str = "tidepool";

/// Duration of the lock that leaves [`LIFTED_TAG`], in nanoseconds.
const LIFTED_LOCK_NS: u32 = 1_000;

/// The header's key for the image's group, and a group that does not exist: no pool has its number.
const GROUP: (&CStr, &[u8]) = (
    c"rbd_group_ref",
    // Ceph's `GroupSpec`, version 1, compatible to 1, and the length before the content: a pool,
    // and a group's id.
    b"\x01\x01\x14\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\x08\0\0\0tidepool",
);
/// The header's key for the image's migration. It is read only where a feature bit says so.
const MIGRATION: (&CStr, &[u8]) = (c"migration", b"tidepool");

/// Sets the guard. Returns the header object's version after that: a client that takes the lock
/// later changes the version. ECANCELED if the image has been put into a group, or its migration
/// prepared, meanwhile.
pub(super) fn set(pool: &IoCtx, header: &str) -> io::Result<u64> {
    reserve(pool, header)?;
    pool.change(header, None, &[features(&features_input(true))])
}

/// Keeps groups and migrations away, without the guard's bit: for an image that the bit cannot
/// protect. Errors as for [`set`].
pub(super) fn reserve(pool: &IoCtx, header: &str) -> io::Result<()> {
    for (key, value) in [GROUP, MIGRATION] {
        let unless =
            |there| pool.change(header, None, &[Step::Require(key, there), Step::Set(key, value)]);
        match unless(b"") {
            Err(e) if e.raw_os_error() == Some(libc::ECANCELED) => unless(value)?,
            other => other?,
        };
    }
    Ok(())
}

/// Removes the keys that [`reserve`] has put there.
pub(super) fn unreserve(pool: &IoCtx, header: &str) -> io::Result<()> {
    for (key, value) in [GROUP, MIGRATION] {
        match pool.change(header, None, &[Step::Require(key, value), Step::Unset(key)]) {
            // The key is not there, or its value has a meaning.
            Err(e) if e.raw_os_error() == Some(libc::ECANCELED) => {}
            other => drop(other?),
        }
    }
    Ok(())
}

/// Lifts the guard for a change of the image that the guard forbids. Groups and migrations are
/// still kept away. Returns the header's version after that.
pub(super) fn pause(pool: &IoCtx, header: &str) -> io::Result<u64> {
    pool.change(header, None, &[features(&features_input(false))])
}

/// Removes the guard for good. Returns the header's version after that.
pub(super) fn free(pool: &IoCtx, header: &str) -> io::Result<u64> {
    unreserve(pool, header)?;
    pause(pool, header)
}

/// Lifts the guard for a moment, if the header still has this version (`None`: any) and no client
/// has the lock, and marks the lock with [`LIFTED_TAG`] in the same step. Returns the header's
/// version after that.
pub(super) fn lift(pool: &IoCtx, header: &str, expected: Option<u64>) -> io::Result<u64> {
    let (lock, bit) = (mark(), features_input(false));
    pool.change(header, expected, &[marking(&lock), features(&bit)])
}

/// The step that leaves [`LIFTED_TAG`]; `mark` was made by [`mark`]. The step fails with EBUSY if a
/// client has the lock.
pub(super) fn marking(mark: &[u8]) -> Step<'_> {
    Step::Call { class: c"lock", method: c"lock", input: mark }
}

fn features(input: &[u8]) -> Step<'_> {
    Step::Call { class: c"rbd", method: c"set_features", input }
}

fn features_input(on: bool) -> [u8; 16] {
    let features = if on { FEATURE_NON_PRIMARY } else { 0 };
    let mut input = [0u8; 16];
    input[..8].copy_from_slice(&features.to_le_bytes());
    input[8..].copy_from_slice(&FEATURE_NON_PRIMARY.to_le_bytes());
    input
}

/// Ceph's `cls_lock_lock_op`, version 1: an exclusive lock that ends by itself before any client
/// can ask for it. (A release in the same operation would not see it.)
pub(super) fn mark() -> Vec<u8> {
    const EXCLUSIVE: u8 = 1;
    let mut content = text(LOCK_NAME.to_bytes());
    content.push(EXCLUSIVE);
    content.extend(text(LIFTED_TAG.as_bytes())); // The cookie.
    content.extend(text(LIFTED_TAG.as_bytes()));
    content.extend(text(b"")); // The description.
    content.extend([0; 4]); // The duration, in seconds
    content.extend(LIFTED_LOCK_NS.to_le_bytes()); // and nanoseconds.
    content.push(0); // The flags.
    // Version 1, compatible to 1, and the length before the content.
    let mut encoded = vec![1, 1];
    encoded.extend(text(&content));
    encoded
}

fn text(bytes: &[u8]) -> Vec<u8> {
    let mut encoded = (bytes.len() as u32).to_le_bytes().to_vec();
    encoded.extend(bytes);
    encoded
}
