//! What others may see of the reactor's thread without asking it: that it makes rounds, and for
//! which volume it is working.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use tidepool_engine::api::VolumeId;

/// Written by the reactor, read by those that watch it, also when it has panicked.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    rounds: AtomicU64,
    /// The volume's number and one, or nothing.
    works_for: AtomicU32,
    names: Mutex<BTreeMap<u16, String>>,
}

impl Pulse {
    /// A round begins.
    pub(super) fn beat(&self) {
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    /// How many rounds there were.
    pub(super) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// A volume of this number is served from now on.
    pub(super) fn name(&self, id: VolumeId, name: &str) {
        if let Ok(mut names) = self.names.lock() {
            names.insert(id.0, name.to_owned());
        }
    }

    /// What follows is work for this volume alone, if for any.
    pub(super) fn work_for(&self, id: Option<VolumeId>) {
        self.works_for.store(id.map_or(0, |id| u32::from(id.0) + 1), Ordering::Relaxed);
    }

    /// The volume that is being worked for. Waits for nobody.
    pub(super) fn works_for(&self) -> Option<String> {
        let id = self.works_for.load(Ordering::Relaxed).checked_sub(1)?;
        self.names.try_lock().ok()?.get(&u16::try_from(id).ok()?).cloned()
    }
}
