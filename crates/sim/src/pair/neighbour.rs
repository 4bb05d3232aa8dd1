//! Each host's other volume, which has no copy and wants its part of the cache. What it holds is
//! not looked at.

use super::host::NEIGHBOUR;
use super::{MS, What, World};
use tidepool_engine::Attach;
use tidepool_engine::api::*;

/// Requests and control operations of it are numbered from here on.
pub(super) const NEIGHBOURS: u64 = 1 << 62;
const SIZE_BYTES: u64 = 32 << 20;
/// Bytes of one write.
const WRITE_BYTES: u64 = 64 << 10;

impl World {
    /// The host's other volume is added, or attached, after a start.
    pub(super) fn start_neighbour(&mut self, at: usize) {
        let now = self.clock(at);
        let engine = self.hosts[at].engine();
        match engine.volumes().into_iter().find(|(id, _)| *id == NEIGHBOUR) {
            Some((id, spec)) => {
                engine
                    .attach(now, id, Attach::again(&spec, true), NEIGHBOURS)
                    .expect("it was there before");
            }
            None => {
                let spec = VolumeSpec {
                    name: "neighbour".into(),
                    backend: "file:/neighbour".into(),
                    size_bytes: SIZE_BYTES,
                    drain: DrainOrder::Unordered,
                    ..self.plan.spec(1)
                };
                self.hosts[at]
                    .engine()
                    .add_volume(now, spec, NEIGHBOURS)
                    .expect("a new cache has room for it");
            }
        }
    }

    /// Writes as much as is to be in flight.
    pub(super) fn neighbour(&mut self, at: usize) {
        let (now, life) = (self.clock(at), self.hosts[at].life);
        let pause = self.draws.rng.around(5 * MS);
        while self.hosts[at].neighbours.len() < self.plan.neighbour && !self.course.healing {
            let engine = self.hosts[at].engine();
            let Some(buf) = engine.arena_mut().alloc(WRITE_BYTES as usize) else { break };
            self.hosts[at].neighbour_writes += 1;
            let id = NEIGHBOURS + self.hosts[at].neighbour_writes;
            let offset = self.draws.rng.below(SIZE_BYTES / WRITE_BYTES) * WRITE_BYTES;
            self.hosts[at].neighbours.insert(id, buf);
            let op = Op::Write { fua: false };
            let request =
                Request { id, volume: NEIGHBOUR, op, offset, len: WRITE_BYTES, buf: Some(buf) };
            self.hosts[at].engine().handle(now, Event::Request(request));
        }
        self.drive(at);
        self.after(pause, What::Neighbour { at, life });
    }
}
