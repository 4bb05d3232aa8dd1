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

use super::cluster::IoCtx;
use super::image::FEATURE_NON_PRIMARY;
use std::io;

/// Sets or lifts the guard. Returns the header object's version after it: whoever takes the lock
/// later changes it.
pub(super) fn set(pool: &IoCtx, header: &str, on: bool) -> io::Result<u64> {
    change(pool, header, None, on)
}

/// Lifts the guard if the header still has this version. Returns the one after it.
pub(super) fn lift_from(pool: &IoCtx, header: &str, version: u64) -> io::Result<u64> {
    change(pool, header, Some(version), false)
}

fn change(pool: &IoCtx, header: &str, expected: Option<u64>, on: bool) -> io::Result<u64> {
    let features = if on { FEATURE_NON_PRIMARY } else { 0 };
    let mut input = [0u8; 16];
    input[..8].copy_from_slice(&features.to_le_bytes());
    input[8..].copy_from_slice(&FEATURE_NON_PRIMARY.to_le_bytes());
    pool.exec(header, expected, c"rbd", c"set_features", &input)
}
