//! The look at what a power loss has left of a volume, before clients use it.

use super::clients::RETRY_NS;
use super::plan::S;
use super::volume::{Place, Sender};
use super::{Happening, World};
use tidepool_engine::api::*;

/// Blocks of one look.
const LOOK_BLOCKS: u64 = 16;

impl World {
    /// Looks at what a power loss has left of a volume.
    pub(super) fn verify(&mut self, v: usize) {
        let vol = &self.vols[v];
        if vol.place != Place::Verifying || self.stops.is_shutting_down() || vol.look.is_paused() {
            return;
        }
        while let Some(block) = self.block_to_verify(v) {
            if !self.verify_from(v, block) {
                let life = self.machine.life();
                return self.after(RETRY_NS, Happening::Verify { life, volume: v });
            }
        }
        if self.vols[v].look.is_in_flight() {
            return;
        }
        if self.vols[v].checker.to_verify(0).is_some() {
            // Some looks failed because of the backend.
            self.vols[v].look.pause();
            let life = self.machine.life();
            return self.after(S, Happening::VerifyAgain { life, volume: v });
        }
        let tick = self.next_tick();
        if let Err(what) = self.vols[v].checker.end_verify(tick) {
            return self.fail(format!("volume {v}: {what}"));
        }
        self.distrust(v);
        self.cover.hit("verified after power loss");
        self.vols[v].look.set_due(false);
        self.serve(v);
    }

    /// The next block to be looked at, if there is room for a look.
    fn block_to_verify(&self, v: usize) -> Option<u64> {
        let vol = &self.vols[v];
        vol.checker.to_verify(vol.look.next()?)
    }

    /// Looks at some blocks; false when the arena has no room for that.
    fn verify_from(&mut self, v: usize, block: u64) -> bool {
        let vol = &self.vols[v];
        // A lost block makes the whole read fail: what follows a failure is looked at one by one.
        let most = if self.may_lose_data() { 1 } else { LOOK_BLOCKS };
        let follow = (1..most).take_while(|i| vol.checker.to_verify(block + i) == Some(block + i));
        let blocks = 1 + follow.count() as u64;
        let offset = block * BLOCK_BYTES as u64;
        let len = (vol.plan.size_bytes - offset).min(blocks * BLOCK_BYTES as u64);
        let sent = self.send(v, Op::Read, offset, len, Sender::Look(block));
        if sent {
            self.vols[v].look.begin(block + blocks);
        }
        sent
    }

    /// Looks again at what could not be looked at.
    pub(super) fn verify_again(&mut self, v: usize) {
        self.vols[v].look.begin_again();
        self.verify(v);
    }
}
