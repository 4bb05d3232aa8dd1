//! The guard of an image whose newest data is in a cache.
//!
//! An image with dirty data in a cache looks like any other. If plain librbd or a kernel wrote to it,
//! for instance after the cache's host has died and its lock has fallen, the volume would fork. So
//! while a cache owns an image, the feature bit `non-primary` is set in its header: every other client
//! then refuses to write, snapshot or resize with EROFS, and still reads and exports. The bit is set
//! through the class method `rbd.set_features` and without telling watchers: the owner's own handle
//! does not learn of it and goes on writing.
//!
//! If the handle reads its header again nevertheless (its watch was lost and renewed because an OSD was
//! away), its writes fail with EROFS. [`super::attach::retake`] then proves that lock and ownership are
//! still ours, and opens the image anew with the bit lifted for that moment. Watchers are not told then
//! either: a client that has seen the guard must go on seeing it.

use super::cluster::{Call, IoCtx, LOCK_NAME};
use super::image::FEATURE_NON_PRIMARY;
use std::io;

/// The tag of the image's lock since its guard was lifted: whoever takes the lock puts its own there, and it
/// stays when the lock is released. So it proves that nobody has.
pub(super) const LIFTED_TAG: &str = "tidepool";

/// How long the lock is held that leaves [`LIFTED_TAG`].
const LIFTED_LOCK_NS: u32 = 1_000;

/// Sets or takes away the guard. Returns the header object's version after it: whoever takes the lock
/// later changes it.
pub(super) fn set(pool: &IoCtx, header: &str, on: bool) -> io::Result<u64> {
    pool.exec(header, None, &[features(&features_input(on))])
}

/// Lifts the guard for a moment, if the header still has this version (`None`: any) and nobody has the lock, and
/// marks the lock with [`LIFTED_TAG`] in the same step. Returns the header's version after it.
pub(super) fn lift(pool: &IoCtx, header: &str, expected: Option<u64>) -> io::Result<u64> {
    let (lock, bit) = (lock_input(), features_input(false));
    let mark = Call { class: c"lock", method: c"lock", input: &lock };
    pool.exec(header, expected, &[mark, features(&bit)])
}

fn features(input: &[u8]) -> Call<'_> {
    Call { class: c"rbd", method: c"set_features", input }
}

fn features_input(on: bool) -> [u8; 16] {
    let features = if on { FEATURE_NON_PRIMARY } else { 0 };
    let mut input = [0u8; 16];
    input[..8].copy_from_slice(&features.to_le_bytes());
    input[8..].copy_from_slice(&FEATURE_NON_PRIMARY.to_le_bytes());
    input
}

/// Ceph's `cls_lock_lock_op`, version 1: an exclusive lock that ends by itself before anybody can ask for
/// it. (A release in the same operation would not see it.)
fn lock_input() -> Vec<u8> {
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
