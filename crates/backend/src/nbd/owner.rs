//! The ownership of an export: an NBD server keeps no record and no lock, so both are files of this
//! host.
//!
//! They stand in the directory of the records of block devices, under a name made of what the URI
//! means. They exclude two caches of one host from each other. Nothing excludes a client on another
//! host.

use crate::api::OpenOptions;
use crate::error::BackendError;
use crate::identity::export;
use crate::record::{Continuity, OwnerState, Ownership};
use crate::sidecar::{self, Sidecar};
use sha2::{Digest, Sha256};
use std::path::Path;
use tidepool_nbd::NbdUri;
use uuid::Uuid;

/// Characters of the readable part of a record's name.
const NAME_CHARS_MAX: usize = 120;

/// The place of the record and the lock of the export that a URI means.
pub(super) fn sidecar(uri: &NbdUri, state_dir: Option<&Path>) -> Sidecar {
    Sidecar::within(sidecar::state_dir(state_dir), &name(uri))
}

/// A name for the files of an export: a part that can be read, and a digest that distinguishes it
/// from others.
fn name(uri: &NbdUri) -> String {
    let key = export(uri).to_string();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let readable: String = key.chars().map(plain).take(NAME_CHARS_MAX).collect();
    let digest = Sha256::digest(key.as_bytes());
    let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{readable}-{digest}")
}

/// Refuses an open by what the record says against it. Returns what is known about writes of
/// others. The check of an export asks no less.
pub(super) fn check(
    what: &str,
    record: Option<&Ownership>,
    options: &OpenOptions,
) -> Result<Continuity, BackendError> {
    if let Some(record) = record {
        record.check(what, options)?;
    }
    let cache_uuid = Uuid::from_bytes(options.cache_uuid);
    let continuity = continuity(record, cache_uuid).of_generation(record, options);
    continuity.check_dirty(what, options).map(|()| continuity)
}

/// Whether another client has written since the record was made. The server tells nothing about
/// that. Another client may have written even while this cache owned the export, so clean cached
/// data is never kept.
fn continuity(record: Option<&Ownership>, cache_uuid: Uuid) -> Continuity {
    if let Some(known) = Continuity::of_record(record, cache_uuid) {
        return known;
    }
    match record.map(|record| record.state) {
        Some(OwnerState::Clean) => Continuity::overwritten(
            "others were free to write to the export since this cache's release",
        ),
        Some(OwnerState::Open) => Continuity::unproven(
            "this cache still owns the export, but its server tells nothing about others",
        ),
        _ => Continuity::unproven("a released export tells nothing about the writes of others"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> String {
        name(&text.parse().expect("an NBD URI"))
    }

    #[test]
    fn an_export_has_one_record_whatever_it_is_called() {
        assert_eq!(of("nbd://Host/disk"), of("nbd://host:10809/disk"));
        assert_eq!(of("nbd+unix:///?socket=/tmp/../tmp/s"), of("nbd+unix:///?socket=/tmp/s"));
        assert_ne!(of("nbd://host/a_b"), of("nbd://host/a%20b"), "equal when made readable");
        assert_ne!(of("nbd://host/a"), of("nbd://host:1/a"));
        let long = of(&format!("nbd://host/{}", "x".repeat(900)));
        assert!(long.len() < 160 && long.starts_with("nbd"), "{long}");
        assert!(!long.contains('/'));
    }

    #[test]
    fn clean_data_never_stays_and_dirty_data_only_under_our_own_ownership() {
        let ours = Uuid::from_bytes([3; 16]);
        for (state, overwritten) in
            [(OwnerState::Open, false), (OwnerState::Dirty, false), (OwnerState::Clean, true)]
        {
            let found = continuity(Some(&Ownership::new(4, ours, state)), ours);
            assert_eq!((found.proven, found.overwritten), (false, overwritten), "{state:?}");
        }
        assert!(continuity(None, ours).overwritten);
        let other = Ownership::new(4, Uuid::from_bytes([4; 16]), OwnerState::Clean);
        assert!(continuity(Some(&other), ours).overwritten);
    }
}
