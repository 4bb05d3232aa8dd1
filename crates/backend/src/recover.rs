//! Recovery of a volume whose cache is lost: what is left of it, and how the image is brought to
//! its newest cut.

use crate::api::{Backend, OpenOptions, Release, Transfer};
use crate::error::BackendError;
use crate::open::{abandon, look, open};
use crate::record::{OwnerState, Ownership};
use crate::redo::{self, Found, Loss, Progress, Shelf};
use crate::uri::BackendUri;
use crate::{mailbox, rbd};
use serde::Serialize;
use std::path::Path;
use std::time::{Duration, Instant};
use tidepool_engine::api::{BLOCK_BYTES, IoError};
use tidepool_engine::mem::AlignedBuf;
use tidepool_engine::redo::{Change, FRAME_BYTES_MAX};

/// Longest wait for a dead owner: Ceph forgets a client that has been silent for 30 s.
const OWNER_WAIT: Duration = Duration::from_secs(45);

/// What [`recover`] found, and did unless `look_only` was set.
#[derive(Debug, Clone, Serialize)]
pub struct Recovered {
    /// The ownership that was given up, or with `look_only` would be; `None` if the image held
    /// everything.
    pub given_up: Option<Ownership>,
    /// The image with its redo is one exact cut of the volume. If not, the owner has no redo (the
    /// drain was unordered, or had not begun to be grouped), other clients have written, or a
    /// rollback was cut short. Then the image is no state that the volume ever had.
    pub exact: bool,
    /// Groups of the redo.
    pub groups: usize,
    /// Bytes of data and zeroes in them.
    pub bytes: u64,
    /// What is lost; `None` if the image held everything, or if the owner has no redo that can be
    /// used: then the loss is not known.
    pub loss: Option<Loss>,
}

/// Brings an image whose cache is lost to the end of its newest group, and frees it. For caches
/// that are lost for good: the owner must not be running, and is fenced. With `look_only` nothing
/// is changed. A run that was cut short can be repeated. Blocks.
///
/// # Errors
/// The owner is still running, the redo is damaged, and as for [`open`].
pub fn recover(
    uri: &BackendUri,
    state_dir: Option<&Path>,
    look_only: bool,
) -> Result<Recovered, BackendError> {
    if !look_only {
        wait_for_owner(uri)?;
    }
    let (what, record, shelf) = look(uri, state_dir)?;
    let mut recovered =
        Recovered { given_up: record.clone(), exact: true, groups: 0, bytes: 0, loss: None };
    let Some(record) = record.filter(|record| record.state != OwnerState::Clean) else {
        recovered.given_up = if look_only { None } else { abandon(uri, state_dir)? };
        return Ok(recovered);
    };
    let find = || Ok(redo::find(&what, &*shelf, &record)?.filter(|_| record.superseded.is_none()));
    let mut found = find()?;
    if let Some(found) = found.as_ref().filter(|_| !look_only) {
        check_frames(&what, &*shelf, found)?;
    }
    recovered.exact = found.is_some() || record.superseded.is_some() && record.rollback.is_none();
    let mut backend = None;
    if found.is_some() && !look_only {
        let options = OpenOptions {
            cache_uuid: record.cache_uuid.into_bytes(),
            dirty: true,
            grouped: true,
            recover: true,
            state_dir: state_dir.map(Path::to_owned),
            ..OpenOptions::default()
        };
        // An owner that is silent may still commit and trim: only what is found after it was fenced
        // counts.
        match open(uri, options) {
            Ok(opened) => {
                backend = Some(opened.backend);
                found = find()?;
            }
            // The rest of the redo must not overwrite what other clients have written.
            Err(BackendError::Overwritten { .. }) => (found, recovered.exact) = (None, false),
            Err(error) => return Err(error),
        }
    }
    if let Some(found) = found {
        recovered.groups = found.header.groups.len();
        recovered.loss = Some(found.loss.clone());
        recovered.bytes = count(&what, &*shelf, &found)?;
        if let Some(backend) = backend.take() {
            apply(&what, &*shelf, &found, backend)?;
        }
    }
    drop(backend);
    if !look_only {
        abandon(uri, state_dir)?;
    }
    Ok(recovered)
}

/// How far the owner of an image was according to its redo and its last note; `None` if the image
/// has no owner, or its drain is not grouped. Blocks.
///
/// # Errors
/// The image cannot be found, or the record or redo beside it cannot be read.
pub fn progress(
    uri: &BackendUri,
    state_dir: Option<&Path>,
) -> Result<Option<Progress>, BackendError> {
    let (what, record, shelf) = look(uri, state_dir)?;
    record.map_or(Ok(None), |record| redo::progress(&what, &*shelf, &record))
}

/// Waits until the cluster has forgotten an owner that has died without closing the image.
fn wait_for_owner(uri: &BackendUri) -> Result<(), BackendError> {
    let BackendUri::Rbd { .. } = uri else { return Ok(()) };
    let start = Instant::now();
    loop {
        match rbd::owner_is_gone(uri) {
            Err(BackendError::Locked { what, holder }) if start.elapsed() < OWNER_WAIT => {
                tracing::info!("{what}: waiting for its owner to be forgotten: {holder}");
                std::thread::sleep(Duration::from_secs(1));
            }
            other => return other,
        }
    }
}

/// Refuses a redo with frames of a newer version, before the image or its record is changed.
/// Whether the frames are complete is decided after the owner is fenced: an owner that is alive
/// trims them.
fn check_frames(what: &str, shelf: &dyn Shelf, found: &Found) -> Result<(), BackendError> {
    match redo::replay(what, shelf, &found.header, &mut |_| Ok(())) {
        Err(newer @ BackendError::Newer { .. }) => Err(newer),
        _ => Ok(()),
    }
}

/// Bytes that the redo changes. This verifies every frame before the first one is applied.
fn count(what: &str, shelf: &dyn Shelf, found: &Found) -> Result<u64, BackendError> {
    let mut blocks = 0;
    redo::replay(what, shelf, &found.header, &mut |changes| {
        blocks += changes
            .iter()
            .map(|change| match change {
                Change::Data(..) => 1,
                Change::Zeroes(_, n, _) => u64::from(*n),
            })
            .sum::<u64>();
        Ok(())
    })?;
    Ok(blocks * BLOCK_BYTES as u64)
}

/// Writes the redo into the image. The image stays owned as it was: the redo is removed only after
/// that.
fn apply(
    what: &str,
    shelf: &dyn Shelf,
    found: &Found,
    mut backend: Box<dyn Backend>,
) -> Result<(), BackendError> {
    let mut buf = AlignedBuf::zeroed(FRAME_BYTES_MAX);
    let failed = |error: IoError| {
        let errno = match error {
            IoError::Errno(errno) => errno,
            IoError::Full => libc::ENOSPC,
            IoError::Fenced => libc::ESHUTDOWN,
        };
        BackendError::io(
            what,
            "write the redo into the image",
            std::io::Error::from_raw_os_error(errno),
        )
    };
    let mut result = redo::replay(what, shelf, &found.header, &mut |changes| {
        let mut transfers = Vec::new();
        let mut used = 0;
        let block = BLOCK_BYTES as u64;
        for change in changes {
            match *change {
                Change::Data(at, bytes) => {
                    buf[used..used + BLOCK_BYTES].copy_from_slice(bytes);
                    let ptr = buf[used..].as_ptr();
                    used += BLOCK_BYTES;
                    match transfers.last_mut() {
                        Some(Transfer::Write { offset, len, .. })
                            if *offset + *len as u64 == at * block =>
                        {
                            *len += BLOCK_BYTES;
                        }
                        _ => transfers.push(Transfer::Write {
                            offset: at * block,
                            ptr,
                            len: BLOCK_BYTES,
                        }),
                    }
                }
                Change::Zeroes(at, n, true) => {
                    transfers.push(Transfer::WriteZeroes {
                        offset: at * block,
                        len: u64::from(n) * block,
                    });
                }
                Change::Zeroes(at, n, false) => {
                    transfers
                        .push(Transfer::Discard { offset: at * block, len: u64::from(n) * block });
                }
            }
        }
        // SAFETY: `buf` is not touched until all transfers are back.
        unsafe { execute(&mut *backend, &transfers) }.map_err(failed)
    });
    if result.is_ok() {
        // SAFETY: a flush names no memory.
        result = unsafe { execute(&mut *backend, &[Transfer::Flush]) }.map_err(failed);
    }
    let closed = backend.close(Release { clean: false, cache_failed: false });
    result.and(closed)
}

/// Executes transfers that do not overlap, and waits for them.
///
/// # Safety
/// The memory that they name is valid and not changed during the call.
unsafe fn execute(backend: &mut dyn Backend, transfers: &[Transfer]) -> Result<(), IoError> {
    for (token, transfer) in transfers.iter().enumerate() {
        // SAFETY: as promised by the caller, until the last completion below.
        unsafe { backend.submit(token as u64, *transfer) };
    }
    let (mut left, mut result) = (transfers.len(), Ok(()));
    while left > 0 {
        mailbox::wait_readable(backend.event_fd(), 1000);
        backend.completions(&mut |_, outcome| {
            left -= 1;
            result = result.and(outcome);
        });
    }
    result
}
