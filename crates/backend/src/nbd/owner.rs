//! The ownership of an export: an NBD server keeps no record and no lock, so both are files of this host.
//!
//! They stand where the records of block devices stand, under a name made of what the URI means. They
//! keep two caches of one host apart; nothing keeps a client on another host away.

use crate::error::BackendError;
use crate::file::{self, STATE_DIR, Sidecar};
use crate::identity::export;
use crate::record::{Continuity, OwnerState, Ownership};
use rustix::fs::{Mode, OFlags};
use sha2::{Digest, Sha256};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use tidepool_nbd::NbdUri;
use uuid::Uuid;

/// Characters of the readable part of a record's name.
const NAME_CHARS_MAX: usize = 120;

/// The places of an export's record and lock.
#[derive(Debug, Clone)]
pub(super) struct Home {
    what: String,
    pub(super) sidecar: Sidecar,
    lock: PathBuf,
}

/// The lock of an export, held until it is dropped.
pub(super) struct Lock(OwnedFd);

impl Home {
    /// Where they are for the export that the URI means.
    pub(super) fn of(uri: &NbdUri, state_dir: Option<&Path>) -> Home {
        let (dir, name) = (state_dir.unwrap_or(Path::new(STATE_DIR)), name(uri));
        let lock = dir.join(format!("{name}.lock"));
        Home { what: uri.to_string(), sidecar: Sidecar::within(dir, &name), lock }
    }

    /// Takes the lock: shared to read, exclusive to write. A reader that may not make the lock's file goes without:
    /// then there is none of a writer either that could be seen.
    pub(super) fn lock(&self, read_only: bool) -> Result<Option<Lock>, BackendError> {
        let failed = |e| BackendError::io(self.lock.display(), "open the lock file", e);
        if !read_only {
            self.sidecar.make_dir()?;
        }
        let (access, create) = (OFlags::RDONLY | OFlags::CLOEXEC, OFlags::CREATE);
        let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        let file = rustix::fs::open(&self.lock, access, mode)
            .or_else(|_| rustix::fs::open(&self.lock, access | create, mode));
        let file = match file {
            Ok(file) => file,
            Err(_) if read_only => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        file::lock(&self.what, &file, read_only)?;
        Ok(Some(Lock(file)))
    }

    /// Looks whether the lock is free, and leaves no trace.
    pub(super) fn check_lock(&self, read_only: bool) -> Result<(), BackendError> {
        match rustix::fs::open(&self.lock, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => {
                file::lock(&self.what, &file, read_only)?;
                drop(Lock(file));
                Ok(())
            }
            // Nobody has ever held it.
            Err(_) => Ok(()),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        file::unlock(&self.0);
    }
}

/// A name for the files of an export: readable as far as it goes, and told from others by a digest.
fn name(uri: &NbdUri) -> String {
    let key = export(uri).to_string();
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let readable: String = key.chars().map(plain).take(NAME_CHARS_MAX).collect();
    let digest = Sha256::digest(key.as_bytes());
    let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{readable}-{digest}")
}

/// Whether somebody else wrote since the record was made. Nothing at a server tells: also while this cache owned
/// the export, another client may have written, so that clean cached data never stays.
pub(super) fn continuity(record: Option<&Ownership>, cache_uuid: Uuid) -> Continuity {
    if let Some(known) = Continuity::of_record(record, cache_uuid) {
        return known;
    }
    match record.map(|record| record.state) {
        Some(OwnerState::Clean) => {
            Continuity::overwritten("others were free to write to the export since this cache's release")
        }
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
