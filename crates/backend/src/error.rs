//! Errors of opening and closing a backend. Each is one line that says what failed, on what, and
//! what to do.

use std::io;
use tidepool_engine::api::IoError;

/// Why a backend could not be opened, checked or closed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// There is no such image, pool or file.
    #[error("{what}: {why}")]
    NotFound {
        /// Which image, pool or file.
        what: String,
        /// What is missing and how to get it.
        why: String,
    },
    /// Another process or client uses the image now.
    #[error("{what}: in use: {holder}")]
    Locked {
        /// Which image.
        what: String,
        /// Its holder, and what to do.
        holder: String,
    },
    /// Another cache owns the image: its newest data is there.
    #[error("{what}: owned by another cache: {owner}")]
    Owned {
        /// Which image.
        what: String,
        /// Where the data is and what to do.
        owner: String,
    },
    /// Another cache had the image last, and the open was not to take it in that case
    /// ([`crate::OpenOptions::unless_elsewhere`]).
    #[error("{what}: another cache had it last, on host {host}")]
    Elsewhere {
        /// Which image.
        what: String,
        /// Host of the cache that had the image last.
        host: String,
    },
    /// This cache is the owner's, but this host was restarted or the cache device has failed: the
    /// peer may have data that this cache lacks.
    #[error(
        "{what}: {} while host {peer_host} held the other copy, whose log may be newer; start tidepool there, or take the volume over there, or accept the loss",
        if *device_failed { "the cache device failed" } else { "this host was restarted" }
    )]
    PeerFirst {
        /// Which image.
        what: String,
        /// Host of the peer.
        peer_host: String,
        /// Generation of the record, for [`crate::OpenOptions::whole_as_of`].
        generation: u64,
        /// The record says that this cache's device has failed.
        device_failed: bool,
    },
    /// This cache is not the one that may take the image over.
    #[error("{what}: it cannot be taken over: {why}")]
    NotPeer {
        /// Which image.
        what: String,
        /// What the record says, and what to do.
        why: String,
    },
    /// The cache holds data that is not drained, and draining it would overwrite what other clients
    /// have written.
    #[error(
        "{what}: what this cache has not drained must not be written over it: {why}; put the image back as it was; or save this side (tidepool cache export PATH --volume NAME --image URI --out FILE) beside the image itself, then give it up (tidepool volume remove NAME --give-up --accept-loss)"
    )]
    Overwritten {
        /// Which image.
        what: String,
        /// The evidence.
        why: String,
    },
    /// It is not known whether the image is the one for which the cache holds data that is not
    /// drained.
    #[error("{what}: {why}")]
    Unrecognised {
        /// Which image.
        what: String,
        /// What is known, and what to do.
        why: String,
    },
    /// A right is missing.
    #[error("{what}: permission denied: {why}")]
    Denied {
        /// On what.
        what: String,
        /// Which right, and how to grant it.
        why: String,
    },
    /// The image or the machine cannot be used like this.
    #[error("{what}: {why}")]
    Unsupported {
        /// Which image.
        what: String,
        /// What is not supported and what to do.
        why: String,
    },
    /// A library or cluster cannot be reached.
    #[error("{what}: {why}")]
    Unavailable {
        /// Which image or library.
        what: String,
        /// What is missing and what to do.
        why: String,
    },
    /// A newer version of Tidepool has written the record or the redo of the image.
    #[error(
        "{what} has version {version}, and this tidepool knows versions up to {known}: use the tidepool that wrote it, or a newer one (nothing was changed)"
    )]
    Newer {
        /// Which record, or which part of which redo.
        what: String,
        /// Its version.
        version: u32,
        /// The newest version that is known.
        known: u32,
    },
    /// The ownership record is not valid.
    #[error("{what}: the ownership record {why}")]
    Record {
        /// Which record.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// A rollback of the image to a snapshot was cut short.
    #[error(
        "{what}: its rollback to snapshot {snapshot} was cut short, and it is neither that nor what it was: finish it with tidepool volume snap rollback NAME {snapshot} (or free it as it is with tidepool recover URI --accept-loss, then rbd object-map rebuild {what} and rbd snap rollback {what}@{snapshot})"
    )]
    HalfRolledBack {
        /// Which image.
        what: String,
        /// Name of the snapshot.
        snapshot: String,
    },
    /// The cache has lost data that it once had on stable media.
    #[error(
        "{what}: the cache device has lost data: {why}; bring the image to its newest group with tidepool recover URI --accept-loss"
    )]
    Behind {
        /// Which image.
        what: String,
        /// What the cache has, and what it is known to have had.
        why: String,
    },
    /// A part of the redo is damaged or missing.
    #[error(
        "{what}: frame {frame} of group {group} of its redo is damaged or missing; nothing was changed"
    )]
    Redo {
        /// Which image.
        what: String,
        /// Which group.
        group: u64,
        /// Which frame of it.
        frame: u32,
    },
    /// The cluster has blocklisted this client, or another owner has taken the image over.
    #[error(
        "{what}: fenced: the cluster has blocklisted this client, or another owner has taken over; see who owns it with `tidepool check URI`, and whom the cluster keeps away with `ceph osd blocklist ls`"
    )]
    Fenced {
        /// Which image.
        what: String,
    },
    /// The operating system or the cluster reported an error.
    #[error("{what}: cannot {action}: {source}")]
    Io {
        /// On what.
        what: String,
        /// What was tried.
        action: &'static str,
        /// The error that was returned.
        source: io::Error,
    },
}

impl BackendError {
    /// The error with which a transfer completes.
    pub(crate) fn errno(&self) -> IoError {
        match self {
            BackendError::Fenced { .. } => IoError::Fenced,
            BackendError::Io { source, .. } => match source.raw_os_error() {
                Some(libc::ESHUTDOWN) => IoError::Fenced,
                errno => IoError::Errno(errno.unwrap_or(libc::EIO)),
            },
            _ => IoError::Errno(libc::EIO),
        }
    }

    pub(crate) fn io(
        what: impl ToString,
        action: &'static str,
        source: impl Into<io::Error>,
    ) -> BackendError {
        BackendError::Io { what: what.to_string(), action, source: source.into() }
    }
}
