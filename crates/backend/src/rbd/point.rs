//! Moments of taking, changing and giving up an image at which tests intervene.

use crate::error::BackendError;

/// Moments of taking and giving up an image at which tests can intervene.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Point {
    /// All checks were made.
    Fencing,
    /// The claim is in the record.
    Claimed,
    /// The guard is lifted; the record does not say so yet.
    Bare,
    /// The guard is lifted, and the record says so.
    Lifted,
    /// Changes of the image, if they were forbidden, are allowed; its lock is not taken.
    Permitted,
    /// The lock is ours; the guard is not set.
    Locked,
    /// Lock and guard are ours; the record does not say so yet.
    Guarded,
    /// The record says that the image is given up; the guard is still set.
    Abandoned,
    /// The guard is lifted for a change of the image.
    Exposed,
    /// The record says that the image is being rolled back; the rollback has not begun.
    Marked,
    /// The image is rolled back; the record does not say so yet.
    RolledBack,
    /// The record says that the image is rolled back; the handle has not read the header again.
    Finished,
    /// The record is about to name another peer.
    Naming,
}

#[cfg(not(test))]
pub(super) fn reached(_: Point) -> Result<(), BackendError> {
    Ok(())
}

/// What a test does at these moments.
#[cfg(test)]
pub(super) type Hook = Box<dyn FnMut(Point) -> Result<(), BackendError> + Send>;

#[cfg(test)]
pub(super) static HOOK: std::sync::Mutex<Option<Hook>> = std::sync::Mutex::new(None);

#[cfg(test)]
pub(super) fn reached(point: Point) -> Result<(), BackendError> {
    // The hook is taken out, so that a hook that never returns does not block the next one.
    let hook = HOOK.lock().expect("no hook panics").take();
    let Some(mut hook) = hook else { return Ok(()) };
    let outcome = hook(point);
    HOOK.lock().expect("no hook panics").get_or_insert(hook);
    outcome
}
