//! The functions that open, check, take over and give up an image, whatever its kind: each chooses
//! the backend by the image's URI.

use crate::api::{OpenOptions, Opened, Prepared, TakeOver};
use crate::error::BackendError;
use crate::file::{self, Caching};
use crate::record::Ownership;
use crate::redo::Remains;
use crate::report::CheckReport;
use crate::snapshot::Snapshot;
use crate::uri::BackendUri;
use crate::{given_up, nbd, paced, rbd};
use std::path::Path;

/// Opens a backend: checks the ownership, takes the lock, and writes the ownership record. Blocks.
///
/// # Errors
/// One line that says what is wrong and what to do. The image's data is left as it was, unless a
/// rollback has begun ([`OpenOptions::roll_back`]).
pub fn open(uri: &BackendUri, options: OpenOptions) -> Result<Opened, BackendError> {
    if let (Some(how), BackendUri::File { .. } | BackendUri::Nbd(_)) = (&options.take_over, uri)
        && !ownership(uri, how.state_dir.as_deref())?
            .is_some_and(|record| record.is_by(how.cache_uuid))
    {
        take_over(uri, how)?;
    }
    let is_image = matches!(uri, BackendUri::Rbd { snapshot: None, .. }) && !options.read_only;
    if options.roll_back.is_some() && !is_image {
        let why = "only an image in a Ceph pool that may be written can be rolled back".to_owned();
        return Err(BackendError::Unsupported { what: uri.to_string(), why });
    }
    match uri {
        BackendUri::File { path, emulate: None, gate: None } => {
            file::open(path, &options, Caching::Direct, |_| Ok(())).map(|(opened, ())| opened)
        }
        BackendUri::File { path, emulate, gate } => {
            let caching = if emulate.is_some() { Caching::Played } else { Caching::Direct };
            let (opened, clock) = file::open(path, &options, caching, |event_fd| {
                // SAFETY: `event_fd` is the open descriptor of the backend that is being opened.
                let clock = unsafe { paced::Clock::new(event_fd) };
                clock.map_err(|e| BackendError::io(path.display(), "set up its timer", e))
            })?;
            let backend = paced::wrap(opened.backend, clock, *emulate, gate.clone());
            Ok(Opened { backend, ..opened })
        }
        BackendUri::Rbd { .. } => rbd::open(uri, &options),
        BackendUri::Nbd(uri) => nbd::open(uri, &options),
    }
}

/// Does the slow part of opening an image for writing in advance. Blocks.
///
/// # Errors
/// The storage is out of reach, or a right is missing there.
pub fn prepare(uri: &BackendUri) -> Result<Prepared, BackendError> {
    match uri {
        BackendUri::Rbd { .. } => rbd::prepare(uri),
        BackendUri::File { .. } | BackendUri::Nbd(_) => Ok(Prepared::default()),
    }
}

/// The ownership record of an image; `None` if it has none. Reads the record and changes nothing,
/// also while the image's owner has it open. Blocks.
///
/// # Errors
/// The image cannot be found, or its record cannot be read.
pub fn ownership(
    uri: &BackendUri,
    state_dir: Option<&Path>,
) -> Result<Option<Ownership>, BackendError> {
    match uri {
        BackendUri::Rbd { .. } => rbd::record(uri, &Prepared::default()),
        _ => look(uri, state_dir).map(|(_, record, _)| record),
    }
}

/// As [`ownership`], for an `rbd:` image with what [`prepare`] has made ready for it. Other images
/// are looked up in the default state directory.
///
/// # Errors
/// As for [`ownership`].
pub fn ownership_by(
    uri: &BackendUri,
    prepared: &Prepared,
) -> Result<Option<Ownership>, BackendError> {
    match uri {
        BackendUri::Rbd { .. } => rbd::record(uri, prepared),
        _ => ownership(uri, None),
    }
}

/// Makes an image the peer's, when its owner is gone or is to be replaced: changes the record, if
/// it names this peer, and nothing else. Afterwards the same cache has to [`open`] the image. That
/// open fences the former owner, even if it is alive, before it takes the image. It needs nothing
/// but the record, so it also works after a crash in between. `file:` and `nbd:` have no fence:
/// their owner must be gone. Returns the new record. Blocks.
///
/// # Errors
/// `NotPeer` if the record does not name this peer, has another generation, or, without
/// [`TakeOver::accept_loss`], names another boot of this host. `Locked` if another process, or a
/// client other than the owner's, has the image or is changing the record. And as for [`open`]. The
/// record is then as it was before, except that after `Io` it may have been changed.
pub fn take_over(uri: &BackendUri, how: &TakeOver) -> Result<Ownership, BackendError> {
    match uri {
        BackendUri::File { path, .. } => file::take_over(path, how),
        BackendUri::Rbd { .. } => rbd::take_over(uri, how),
        BackendUri::Nbd(uri) => nbd::take_over(uri, how),
    }
}

/// Records that a file or device is the image of an ownership record, where nothing else tells
/// that: a device without a lasting name after a reboot, or a file that was copied while a cache
/// held its newest data. The caller vouches for that. `record` is the path of the record's file; it
/// may be omitted where only one record comes into question. Returns the record. Blocks.
///
/// # Errors
/// Nothing has to be confirmed, no record or more than one comes into question, and as for
/// [`open`].
pub fn confirm(
    uri: &BackendUri,
    state_dir: Option<&Path>,
    record: Option<&Path>,
) -> Result<Ownership, BackendError> {
    match uri {
        BackendUri::File { path, .. } => file::confirm(path, state_dir, record),
        BackendUri::Rbd { .. } | BackendUri::Nbd(_) => Err(BackendError::Unsupported {
            what: uri.to_string(),
            why:
                "there is nothing to confirm: only a file or a device may be taken for another one"
                    .into(),
        }),
    }
}

/// Gives up what a lost cache holds: the image becomes clean as it is, without the data that the
/// cache had not drained. For caches that are lost for good; the owner must not be running. Returns
/// the ownership record as it was before, or `None` when there was nothing to give up. Blocks.
///
/// # Errors
/// The owner is still running, and as for [`open`].
pub fn abandon(
    uri: &BackendUri,
    state_dir: Option<&Path>,
) -> Result<Option<Ownership>, BackendError> {
    let before = match uri {
        BackendUri::File { path, .. } => file::abandon(path, state_dir),
        BackendUri::Rbd { .. } => rbd::abandon(uri),
        BackendUri::Nbd(uri) => nbd::abandon(uri, state_dir),
    }?;
    if let Some(before) = &before {
        given_up::forget(before, state_dir);
    }
    Ok(before)
}

/// Checks the image, its lock and its record as [`open`] does with these options, and says
/// what an open would do. What the options do not tell of the cache is not compared with the image
/// and its redo. Blocks.
pub fn check(uri: &BackendUri, options: &OpenOptions) -> CheckReport {
    let mut report = CheckReport::new(uri);
    match uri {
        BackendUri::File { path, emulate, gate } => {
            file::check(path, options, &mut report);
            if emulate.is_some() {
                report.warn(
                    "latency",
                    "emulated: the file plays a replicated pool and survives no power loss",
                );
            }
            if let Some(gate) = gate {
                report.warn(
                    "gate",
                    format!("stopped while {} exists; a facility for tests", gate.display()),
                );
            }
        }
        BackendUri::Rbd { .. } => rbd::check(uri, options, &mut report),
        BackendUri::Nbd(uri) => nbd::check(uri, options, &mut report),
    }
    report.finish()
}

/// The snapshots of an image, of all kinds, the oldest first. Reads the image and changes nothing,
/// also while it is served. Blocks.
///
/// # Errors
/// The storage of the image has no snapshots, or the image cannot be found or read.
pub fn snapshots(uri: &BackendUri) -> Result<Vec<Snapshot>, BackendError> {
    match uri {
        BackendUri::Rbd { .. } => rbd::snapshots(uri),
        BackendUri::File { .. } | BackendUri::Nbd(_) => Err(BackendError::Unsupported {
            what: uri.to_string(),
            why: "it is not in a Ceph pool, and has no snapshots".into(),
        }),
    }
}

/// An image as it is left, of whatever kind. Blocks.
pub(crate) fn look(uri: &BackendUri, state_dir: Option<&Path>) -> Result<Remains, BackendError> {
    match uri {
        BackendUri::File { path, .. } => file::look(path, state_dir),
        BackendUri::Nbd(uri) => nbd::look(uri, state_dir),
        BackendUri::Rbd { .. } => rbd::look(uri),
    }
}
