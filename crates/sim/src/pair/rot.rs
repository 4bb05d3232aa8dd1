//! Blocks of an owner's cache go bad while it is in sync with its peer, which has another copy of
//! what is dirty among them, unless those go bad, too. A block is bad until its host's process
//! ends: what a restart makes of one is for the lives of a single host.

use super::host::{Run, VOLUME};
use super::{MS, What, World};
use crate::rng::Rng;
use crate::store::Content;
use tidepool_engine::api::*;
use tidepool_replica::Phase;

/// In so many lives of a thousand blocks go bad.
const LIVES: u64 = 300;
/// One does so in so many beats of a thousand, and in so many where the peer's copies go bad as
/// well: what is lost was dirty still.
const BEATS: u64 = 150;
const BEATS_BOTH: u64 = 700;
/// In so many of these lives of a thousand the peer's copies go bad as well, so that some blocks
/// are lost.
const BOTH: u64 = 500;
/// In so many of those of a thousand the owner's host loses its power soon after something was
/// found lost: then it counts what the peer believes to be in the image.
const STRUCK: u64 = 700;

/// Mean time from a loss to that.
const STRIKE_NS: Nanos = 300 * MS;

/// What has gone bad, and what the volume had of a second copy then.
pub(super) struct Rot {
    both: bool,
    /// The owner's host is to lose its power when something is lost.
    strikes: bool,
    /// Host, block of its device, and what is there, and was.
    bad: Vec<(usize, u64, Content, Content)>,
    /// Host, life of its process, connection.
    since: Option<(usize, u64, u64)>,
    /// What the client has found lost, and overwrites: first block, blocks.
    pub(super) mend: Vec<(u64, u64)>,
    /// What it overwrites in the end, if something is lost that it has not found.
    pub(super) sweep: u64,
}

impl Rot {
    pub(super) fn of(rng: &mut Rng) -> Option<Rot> {
        let (rots, both) = (rng.permille(LIVES), rng.permille(BOTH));
        let strikes = both && rng.permille(STRUCK);
        rots.then(|| Rot {
            both,
            strikes,
            bad: Vec::new(),
            since: None,
            mend: Vec::new(),
            sweep: 0,
        })
    }

    /// The peer's copies go bad, too.
    pub(super) fn is_on_both(&self) -> bool {
        self.both
    }
}

/// A block of data and not one that says where data is: those are sectors in which each word is as
/// much larger than the last.
fn is_data(content: &Content) -> bool {
    let Some(bytes) = content else { return false };
    let word =
        |at: usize| u64::from_le_bytes(bytes[8 * at..][..8].try_into().expect("eight bytes"));
    let step = word(1).wrapping_sub(word(0));
    (1..8).all(|at| word(at + 1).wrapping_sub(word(at)) == step)
}

impl World {
    /// Blocks that the volume has lost on a host.
    pub(super) fn lost_blocks(&self, at: usize) -> u64 {
        let status = self.hosts[at]
            .engine
            .as_ref()
            .and_then(|engine| engine.volume_status(self.clock(at), VOLUME));
        status.map_or(0, |status| status.lost_blocks)
    }

    /// The connection in which a host is in sync with its peer, of which life.
    fn in_sync_since(&self, at: usize) -> Option<(usize, u64, u64)> {
        let host = &self.hosts[at];
        let in_sync = matches!(&host.run, Run::Owner(driver)
            if matches!(driver.owner().phase(), Phase::Sync { .. }));
        let connection = host.link.connection.filter(|_| in_sync)?;
        Some((at, host.life, connection))
    }

    /// Nothing is lost of which the peer has a good copy. To be looked at before the two part
    /// because of it.
    pub(super) fn check_rot(&mut self, at: usize) {
        let since = self.in_sync_since(at);
        let whole = self.rot.as_ref().is_some_and(|rot| since.is_some() && rot.since == since);
        let lost = self.lost_blocks(at);
        if whole && lost > 0 {
            self.fail(format!(
                "host {at} has lost {lost} blocks of which its peer has a good copy"
            ));
        }
    }

    /// Blocks go bad.
    pub(super) fn decay(&mut self, at: usize) {
        let (now_is, lost) = (self.in_sync_since(at), self.lost_blocks(at));
        let healthy = self.hosts.iter().all(|host| !host.disk.is_dead());
        let quiet = self.course.calm || self.course.healing || lost > 0;
        let Some(rot) = self.rot.as_mut() else { return };
        let (Some(since), false, true) = (now_is, quiet, healthy) else { return };
        if !self.draws.rng.permille(if rot.both { BEATS_BOTH } else { BEATS }) {
            return;
        }
        let count = if rot.both { 1000 } else { self.draws.rng.pick(&[1, 8, 100]) };
        for host in (0..2).filter(|&host| host == at || rot.both) {
            // What is bad when a process begins stays bad.
            if self.hosts[host].engine.is_none() {
                continue;
            }
            let disk = &mut self.hosts[host].disk;
            disk.draw_from(self.draws.rng.fork());
            let data: Vec<u64> =
                disk.readable().filter(|&block| is_data(&disk.content(block))).collect();
            for _ in 0..count.min(data.len()) {
                let block = self.draws.rng.pick(&data);
                let was = disk.content(block);
                disk.damage_block(block);
                rot.bad.push((host, block, disk.content(block), was));
            }
        }
        rot.since = Some(since).filter(|_| !rot.both);
        self.note("rot", at as u64, 0, 0);
        self.cover.hit("block gone bad");
    }

    /// The process of a host ends: what is bad on its device and was not written since is good
    /// again.
    pub(super) fn mend_device(&mut self, at: usize) {
        let Some(rot) = &mut self.rot else { return };
        let disk = &mut self.hosts[at].disk;
        // The other way round: a block may have gone bad twice.
        for (host, block, is, was) in std::mem::take(&mut rot.bad).into_iter().rev() {
            if host != at {
                rot.bad.insert(0, (host, block, is, was));
            } else if disk.content(block) == is {
                disk.restore(block, was);
            }
        }
    }

    /// The owner gets a block that it has asked for, or hears that there is none.
    pub(super) fn block_comes(&mut self, at: usize, is_there: bool) {
        self.cover.hit(if is_there {
            "block from the peer"
        } else {
            "block that the peer has not"
        });
        if let Some(rot) = self.rot.as_mut()
            && !is_there
            && !self.course.healing
            && std::mem::take(&mut rot.strikes)
        {
            let ns = self.draws.rng.around(STRIKE_NS);
            self.cover.hit("power loss of an owner that has lost something");
            self.after(ns, What::Strike { at, power: true });
        }
    }
}
