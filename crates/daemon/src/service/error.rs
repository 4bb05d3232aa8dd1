//! Why the control plane could not do what it was asked with a volume.

use super::plan::ModeError;
use crate::shard::ShardError;
use crate::volume::NameError;
use tidepool_backend::{BackendError, UriError};

/// Why an operation on a volume failed; one line each.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// No name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// No backend.
    #[error(transparent)]
    Uri(#[from] UriError),
    /// Something about the request is wrong.
    #[error("cannot serve volume {name}: {why}")]
    Invalid {
        /// The volume.
        name: String,
        /// What.
        why: String,
    },
    /// The mode rule.
    #[error("cannot change volume {name}: {source}")]
    Mode {
        /// The volume.
        name: String,
        /// Why.
        source: ModeError,
    },
    /// The name is taken.
    #[error("cannot add volume {0}: there is one of this name (see `tidepool volume list`)")]
    Exists(String),
    /// The image is taken.
    #[error("cannot serve volume {name}: volume {other} has the image {backend}")]
    SameImage {
        /// The volume.
        name: String,
        /// The volume that has the image.
        other: String,
        /// The image.
        backend: String,
    },
    /// No such volume.
    #[error("there is no volume {0} (see `tidepool volume list`)")]
    Unknown(String),
    /// Another change is under way.
    #[error(
        "cannot change volume {0}: another operation on it is under way (try again when it is done)"
    )]
    Busy(String),
    /// The backend cannot be opened.
    #[error("cannot open the backend of volume {name}: {source}")]
    Open {
        /// The volume.
        name: String,
        /// Why.
        source: BackendError,
    },
    /// The backend does not answer.
    #[error(
        "cannot open the backend of volume {name}: {backend} has not answered for {seconds} s (is it reachable?)"
    )]
    Silent {
        /// The volume.
        name: String,
        /// Its backend.
        backend: String,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The volume is recorded with another image.
    #[error(
        "cannot serve volume {name} from {wanted}: this cache holds {dirty_bytes} dirty bytes of it for {recorded}; serve it from there and drain it first, or give the new volume another name"
    )]
    OtherImage {
        /// The volume.
        name: String,
        /// Where its data belongs.
        recorded: String,
        /// What was asked for.
        wanted: String,
        /// What is at stake.
        dirty_bytes: u64,
    },
    /// The image of a configured volume was another cache's last.
    #[error(
        "cannot serve volume {name}: {backend} was served last from another cache, by host {host}; if that host has let go of it, `tidepool volume add {name}={backend}` serves it here"
    )]
    Elsewhere {
        /// The volume.
        name: String,
        /// Its image.
        backend: String,
        /// Where it was served.
        host: String,
    },
    /// The daemon was ended several times while it worked for the volume.
    #[error(
        "volume {name} is left unserved until {until}, since the daemon was ended {times} times within {minutes} minutes while it worked for it, the last time at {last}; `tidepool volume add {name}={backend}` serves it at once"
    )]
    LeftOut {
        /// The volume.
        name: String,
        /// Its image.
        backend: String,
        /// How often.
        times: usize,
        /// Within which time.
        minutes: u64,
        /// When that was last.
        last: String,
        /// Until when.
        until: String,
    },
    /// The volume has no backend now.
    #[error("cannot {what} volume {name}: its backend is not reachable: {why}")]
    Unreachable {
        /// What was asked for.
        what: &'static str,
        /// The volume.
        name: String,
        /// Why.
        why: String,
    },
    /// A drain makes no progress.
    #[error(
        "cannot remove volume {name}: its backend has taken nothing for {seconds} s; the volume goes on serving (try again when the backend answers)"
    )]
    Stalled {
        /// The volume.
        name: String,
        /// For how long.
        seconds: u64,
    },
    /// Giving the volume up would lose what is in the cache alone.
    #[error(
        "volume {name} is not given up: {bytes} bytes, written over {seconds:.0} s, are in the cache alone and would be lost; to save them first, stop the daemon and run tidepool cache export PATH --volume {name} --image '{backend}' --out FILE (without --image where the image is gone); then add --accept-loss"
    )]
    WouldLose {
        /// The volume.
        name: String,
        /// Its image.
        backend: String,
        /// What the cache alone has.
        bytes: u64,
        /// Age of the oldest byte of it.
        seconds: f64,
    },
    /// The shard refused.
    #[error("cannot {what} volume {name}: {source}")]
    Shard {
        /// What was asked for.
        what: &'static str,
        /// The volume.
        name: String,
        /// Why.
        source: ShardError,
    },
    /// This host was restarted, and what it has is not the newest.
    #[error(
        "cannot serve volume {name}: this host was restarted, or its cache device failed, and the copy on {host} has {records} newer records, which cannot be had ({why}); take the volume over there (tidepool volume takeover {name})"
    )]
    Behind {
        /// The volume.
        name: String,
        /// Who has more.
        host: String,
        /// How much more.
        records: u64,
        /// Why they did not come.
        why: String,
    },
    /// This cache held the volume with a peer that cannot be asked, and may have less than it.
    #[error(
        "cannot open the backend of volume {name}: {source} (tidepool volume takeover {name} --accept-loss): {cost}"
    )]
    Alone {
        /// The volume.
        name: String,
        /// Why the peer comes first.
        source: BackendError,
        /// What accepting the loss costs, as far as known.
        cost: String,
    },
    /// The copy in this cache does not count.
    #[error("cannot take volume {name} over: {why}")]
    NotInSync {
        /// The volume.
        name: String,
        /// What the record says instead.
        why: String,
    },
    /// The volume stays here.
    #[error("cannot hand volume {name} over: {why}")]
    NotHandedOver {
        /// The volume.
        name: String,
        /// Why.
        why: String,
    },
    /// The copy in this cache is needed.
    #[error("cannot remove volume {name}: {why}")]
    NotForgotten {
        /// The volume.
        name: String,
        /// By whom.
        why: String,
    },
    /// Nothing was done with a snapshot.
    #[error("cannot {what} of volume {name}: {why}")]
    Snapshot {
        /// What was asked for, with the snapshot's name.
        what: String,
        /// The volume.
        name: String,
        /// Why.
        why: String,
    },
    /// The image is complete, but still locked.
    #[error(
        "volume {name} is removed and its image is complete, but the image could not be released: {source}"
    )]
    Release {
        /// The volume.
        name: String,
        /// Why.
        source: BackendError,
    },
}

impl VolumeError {
    /// Whether asking again would bring no other answer.
    pub(super) fn is_decision(&self) -> bool {
        match self {
            VolumeError::NotInSync { .. }
            | VolumeError::Alone { .. }
            | VolumeError::Behind { .. }
            | VolumeError::Elsewhere { .. }
            | VolumeError::SameImage { .. }
            | VolumeError::OtherImage { .. } => true,
            VolumeError::Open { source, .. } => matches!(
                source,
                BackendError::NotFound { .. }
                    | BackendError::PeerFirst { .. }
                    | BackendError::Overwritten { .. }
                    | BackendError::Unrecognised { .. }
                    | BackendError::Denied { .. }
                    | BackendError::Unsupported { .. }
                    | BackendError::Newer { .. }
                    | BackendError::Record { .. }
                    | BackendError::Behind { .. }
                    | BackendError::Redo { .. }
            ),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_pass_is_told_from_a_decision() {
        let open = |source| VolumeError::Open { name: "v".into(), source };
        let (what, why) = ("rbd:p/i".to_owned(), "no monitor answers".to_owned());
        let away = open(BackendError::Unavailable { what: what.clone(), why: why.clone() });
        assert!(!away.is_decision());
        assert!(
            !open(BackendError::Locked { what: what.clone(), holder: why.clone() }).is_decision()
        );
        // The record has changed meanwhile: it is looked at again.
        assert!(
            !open(BackendError::NotPeer { what: what.clone(), why: why.clone() }).is_decision()
        );
        assert!(!VolumeError::Busy("v".into()).is_decision());
        assert!(open(BackendError::Denied { what, why: why.clone() }).is_decision());
        assert!(VolumeError::NotInSync { name: "v".into(), why }.is_decision());
    }
}
