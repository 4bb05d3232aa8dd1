//! Volumes that are on their way to being served: their clients wait in the handshake.

use crate::shard::api::ShardError;
use crate::shard::control::command::Command;
use crate::shard::control::handle::ShardHandle;
use crate::shard::core::Core;
use crate::shard::reactor::Reactor;
use std::sync::atomic::{AtomicU64, Ordering};

/// A volume that is not served yet.
pub(in crate::shard) struct Coming {
    number: u64,
    pub(in crate::shard) name: String,
    /// It may be served soon: its clients wait for that.
    pub(in crate::shard) awaited: bool,
}

impl<C: Core> Reactor<C> {
    /// Has the clients of a volume wait for it, or not any more; with `None` it is forgotten.
    pub(in crate::shard) fn announce(&mut self, number: u64, name: String, awaited: Option<bool>) {
        let coming = &mut self.shared.coming;
        match (coming.iter().position(|one| one.number == number), awaited) {
            (Some(index), Some(awaited)) => coming[index].awaited = awaited,
            (Some(index), None) => drop(coming.swap_remove(index)),
            (None, Some(awaited)) => coming.push(Coming { number, name, awaited }),
            (None, None) => {}
        }
        self.shared.came = true;
    }
}

/// Tells a shard of a volume that is to be served. Dropped, the volume is served, or will not be.
pub struct Announcement {
    shard: ShardHandle,
    number: u64,
    name: String,
}

impl ShardHandle {
    /// Has the clients of a volume that is being opened wait for it.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub fn announce(&self, name: &str) -> Result<Announcement, ShardError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let announcement = Announcement { shard: self.clone(), number, name: name.to_owned() };
        announcement.say(Some(true))?;
        Ok(announcement)
    }
}

impl Announcement {
    /// Whether clients are to wait for the volume: with false they are told at once that it is not
    /// there.
    ///
    /// # Errors
    /// Only when the reactor has stopped.
    pub fn set_awaited(&self, awaited: bool) -> Result<(), ShardError> {
        self.say(Some(awaited))
    }

    fn say(&self, awaited: Option<bool>) -> Result<(), ShardError> {
        self.shard.send(Command::Announce { number: self.number, name: self.name.clone(), awaited })
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        // A reactor that has stopped has no clients.
        let _ = self.say(None);
    }
}
