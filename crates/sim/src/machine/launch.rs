//! Effects of the core are sent on their way.

use super::backend::Trouble;
use super::redo::Commit;
use super::{Flight, FlightKind, Machine, Policy};
use crate::store::{Content, content};
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;

/// How many times longer than usual the late removal of redo takes.
const TRIM_LATE_TIMES: Nanos = 20;
const BLOCK: u64 = BLOCK_BYTES as u64;

impl Machine {
    /// What an effect is going to do. [`Machine::launch`] sends it on its way, unless it is no
    /// input or output.
    ///
    /// # Errors
    /// What of it no core may ask for.
    pub fn prepare(
        &mut self,
        effect: &Effect,
        now: Nanos,
        policy: &mut impl Policy,
    ) -> Result<Option<Flight>, String> {
        let changes = matches!(effect, Effect::DeviceWrite { .. } | Effect::DeviceSync { .. });
        if self.device_failed && changes {
            return Err("the core goes on writing to a device that has failed".into());
        }
        let (token, kind, buf) = match *effect {
            Effect::DeviceRead { token, offset, buf } => {
                (token, FlightKind::DeviceRead { offset }, Some(buf))
            }
            Effect::DeviceWrite { token, offset, buf, dsync } => {
                let data = self.contents(buf);
                (token, FlightKind::DeviceWrite { offset, data, dsync }, Some(buf))
            }
            Effect::DeviceSync { token } => {
                (token, FlightKind::DeviceSync { point: self.disk.sync_point() }, None)
            }
            Effect::Backend { token, volume, op } => {
                let image = self.image_of(volume).ok_or_else(|| {
                    format!("an operation for the backend of volume {}, which is none", volume.0)
                })?;
                let latency_ns =
                    policy.backend_latency_ns(self.mounts[image].backend.latency_ns()) + 1;
                let (kind, buf) = self.prepare_backend(image, op, now, policy)?;
                return Ok(Some(Flight::new(token, kind, buf, latency_ns)));
            }
            Effect::Peer { .. } | Effect::Reply { .. } | Effect::ControlDone { .. } => {
                return Ok(None);
            }
        };
        Ok(Some(Flight::new(token, kind, buf, 0)))
    }

    fn prepare_backend(
        &mut self,
        volume: usize,
        op: BackendOp,
        now: Nanos,
        policy: &mut impl Policy,
    ) -> Result<(FlightKind, Option<Buf>), String> {
        let backend = &self.mounts[volume].backend;
        Ok(match op {
            BackendOp::Read { offset, buf } => {
                let first = offset / BLOCK;
                let blocks = first..first + u64::from(buf.len) / BLOCK;
                let early = policy
                    .is_early()
                    .then(|| blocks.map(|block| backend.store.get(block)).collect());
                (FlightKind::Read { volume, offset, early }, Some(buf))
            }
            BackendOp::Write { offset, buf } => (
                self.prepare_write(volume, offset, buf, policy.is_early().then_some(now))?,
                Some(buf),
            ),
            BackendOp::Discard { offset, len } | BackendOp::WriteZeroes { offset, len } => {
                if offset % BLOCK != 0 || len % BLOCK != 0 || len == 0 {
                    return Err(format!("zeroes of {len} bytes at {offset} for the backend"));
                }
                let data = vec![None; (len / BLOCK) as usize];
                (FlightKind::Write { volume, first: offset / BLOCK, data, applied: false }, None)
            }
            BackendOp::Flush => {
                (FlightKind::Flush { volume, point: backend.store.sync_point() }, None)
            }
            BackendOp::Disown => (FlightKind::Disown { volume }, None),
            BackendOp::RedoWrite { group, frame, buf } => {
                let name = (backend.generation(), group, frame);
                let bytes = self.bytes(buf).to_vec();
                (FlightKind::RedoWrite { volume, name, bytes }, Some(buf))
            }
            BackendOp::RedoCommit { first, group, frames, sequence, .. } => {
                let commit = Commit::new(first, group, frames, sequence);
                (FlightKind::RedoCommit { volume, generation: backend.generation(), commit }, None)
            }
            BackendOp::RedoTrim { first } => (FlightKind::RedoTrim { volume, first }, None),
            BackendOp::RedoNote { durable, .. } => (FlightKind::RedoNote { volume, durable }, None),
            BackendOp::Resize { size_bytes } => (FlightKind::Resize { volume, size_bytes }, None),
            BackendOp::Snapshot { .. } => (FlightKind::Snapshot { volume }, None),
        })
    }

    /// A write of an image, which takes effect already if it is early and nothing is wrong with the
    /// backend.
    fn prepare_write(
        &mut self,
        volume: usize,
        offset: u64,
        buf: Buf,
        early: Option<Nanos>,
    ) -> Result<FlightKind, String> {
        let engine = self.engine.as_ref().expect("effects come from a core");
        let backend = &mut self.mounts[volume].backend;
        let first = offset / BLOCK;
        let bytes = engine.arena().bytes(buf).chunks_exact(BLOCK_BYTES);
        let data: Vec<Content> =
            bytes.zip(first..).map(|(bytes, b)| backend.clip(b, bytes)).collect();
        if offset + (data.len() as u64 - 1) * BLOCK >= backend.size_bytes() {
            let size = backend.size_bytes();
            return Err(format!(
                "volume {volume}: a write at {offset} beyond the image's {size} bytes"
            ));
        }
        let applied = early.is_some_and(|now| backend.trouble_now(now) == Trouble::None);
        if applied {
            backend.apply(first, &data);
        }
        Ok(FlightKind::Write { volume, first, data, applied })
    }

    /// Sends something on its way, under a name that nothing else in this life has. Returns how
    /// long it takes.
    ///
    /// # Errors
    /// What of it no core may ask for.
    pub fn launch(
        &mut self,
        name: u64,
        mut flight: Flight,
        policy: &mut impl Policy,
    ) -> Result<Nanos, String> {
        flight.name = name;
        let latency_ns = match flight.kind {
            FlightKind::DeviceRead { .. } => policy.device_latency_ns(),
            FlightKind::DeviceWrite { dsync, .. } => {
                let sync_ns = if dsync { policy.sync_latency_ns() } else { 0 };
                policy.device_latency_ns() + sync_ns
            }
            FlightKind::DeviceSync { .. } => policy.sync_latency_ns(),
            // What depends on a redo being there or not should have time to go wrong.
            FlightKind::RedoTrim { .. } if policy.is_trim_late() => {
                TRIM_LATE_TIMES * flight.latency_ns
            }
            _ => flight.latency_ns,
        };
        let token = flight.token.0;
        let clash = self.flights.iter().find(|(_, other)| other.clashes_with(&flight));
        if let (Some((other, _)), Some(buf)) = (clash, flight.buf) {
            return Err(format!("effect {token} uses memory of effect {other}: {buf:?}"));
        }
        match self.flights.insert(token, flight) {
            Some(_) => Err(format!("token {token} is used twice")),
            None => Ok(latency_ns + 1),
        }
    }

    /// The memory of the core.
    pub(super) fn bytes(&self, buf: Buf) -> &[u8] {
        self.engine.as_ref().expect("effects come from a core").arena().bytes(buf)
    }

    /// The blocks of a buffer of the core.
    pub(super) fn contents(&self, buf: Buf) -> Vec<Content> {
        self.bytes(buf).chunks_exact(BLOCK_BYTES).map(content).collect()
    }
}
