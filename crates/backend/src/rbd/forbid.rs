//! Keeps other clients from changing an image that the guard's bit cannot protect, because
//! journaling gives that bit a meaning of its own.
//!
//! Other clients can open such an image for writing. What they cannot do without its lock
//! (snapshots, another size, another name, features, metadata) they pass on to the handle that has
//! the lock, which is ours. So as long as a cache owns the image, its header says that the image
//! has been changed by an operation that no release knows. A handle that has read this refuses to
//! change the image (EROFS), for itself and for other clients. It reads and writes the image as
//! before. Our handle therefore has to read its header again when the bit is set.
//!
//! Such a handle also does not repeat the changes in the journal that a dead owner has not
//! completed, so that taking the lock would never end. Therefore the bit is lifted before a handle
//! is opened that is to take the lock.
//!
//! The OSDs' class sets only bits that it knows. So the header's keys are written directly, each
//! only if it still has the value that was just read.

use super::guard;
use super::image::OPERATION_UNKNOWN;
use super::pool::{IoCtx, Step};
use std::ffi::CStr;
use std::io;

/// Feature bit: operations have left features (`op_features` is not 0).
const FEATURE_OPERATIONS: u64 = 1 << 8;
/// Keys of the header's omap; the value of each is a number.
const FEATURES: &CStr = c"features";
const OPERATIONS: &CStr = c"op_features";
/// Most attempts while another client changes one of these keys in between.
const ATTEMPTS: u32 = 10;

/// Forbids changes of the image. Returns whether they were allowed before; then the open handles of
/// the image have not seen this yet.
pub(super) fn set(pool: &IoCtx, header: &str) -> io::Result<bool> {
    change(pool, header, None, None, |operations| operations | OPERATION_UNKNOWN)
        .map(|version| version.is_some())
}

/// Allows changes again, if the header still has this version (`None`: any). Returns the header's
/// version after that, or `None` if changes were not forbidden.
pub(super) fn lift(pool: &IoCtx, header: &str, expected: Option<u64>) -> io::Result<Option<u64>> {
    change(pool, header, expected, None, allowed)
}

/// As [`lift`], but only if no client has the lock (otherwise EBUSY), and with the mark that
/// [`guard::mark`] leaves.
pub(super) fn lift_and_mark(pool: &IoCtx, header: &str, expected: u64) -> io::Result<Option<u64>> {
    let mark = guard::mark();
    change(pool, header, Some(expected), Some(&mark), allowed)
}

fn allowed(operations: u64) -> u64 {
    operations & !OPERATION_UNKNOWN
}

fn change(
    pool: &IoCtx,
    header: &str,
    expected: Option<u64>,
    mark: Option<&[u8]>,
    to: impl Fn(u64) -> u64,
) -> io::Result<Option<u64>> {
    // `get_features` is called for the image and not for a snapshot, read-only.
    let head = [&u64::MAX.wrapping_sub(1).to_le_bytes()[..], &[1]].concat();
    let number = |method, input: &[u8]| {
        let answer = pool.call(header, c"rbd", method, input, 16)?;
        let first = answer
            .first_chunk()
            .ok_or_else(|| io::Error::other("a class's answer is too short"))?;
        io::Result::Ok(u64::from_le_bytes(*first))
    };
    for _ in 0..ATTEMPTS {
        let (features, operations) =
            (number(c"get_features", &head)?, number(c"op_features_get", &[])?);
        let left = to(operations);
        if left == operations {
            return Ok(None);
        }
        let with =
            if left == 0 { features & !FEATURE_OPERATIONS } else { features | FEATURE_OPERATIONS };
        // If no operation has left a feature, the key may be missing.
        let absent: &[u8] = if operations == 0 { b"" } else { &operations.to_le_bytes() };
        for before in [absent, &operations.to_le_bytes()] {
            let steps = [
                Step::Require(FEATURES, &features.to_le_bytes()),
                Step::Require(OPERATIONS, before),
                Step::Set(FEATURES, &with.to_le_bytes()),
                Step::Set(OPERATIONS, &left.to_le_bytes()),
            ];
            let marked: Vec<Step<'_>> = mark.map(guard::marking).into_iter().chain(steps).collect();
            match pool.change(header, expected, &marked) {
                Err(e) if e.raw_os_error() == Some(libc::ECANCELED) => {}
                other => return other.map(Some),
            }
        }
    }
    Err(io::Error::from_raw_os_error(libc::EAGAIN))
}
