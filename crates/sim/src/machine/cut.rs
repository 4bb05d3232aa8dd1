//! What becomes of what is under way when the core comes to its end.

use super::backend::Trouble;
use super::{Flight, FlightKind, Machine, Policy};
use tidepool_engine::api::Nanos;

impl Machine {
    /// Takes all that is under way, in an order that does not depend on that of the core. Each is
    /// to be cut off ([`Machine::cut_off`]).
    pub fn interrupt(&mut self) -> Vec<Flight> {
        let mut flights: Vec<_> = std::mem::take(&mut self.flights).into_values().collect();
        flights.sort_unstable_by_key(Flight::name);
        flights
    }

    /// The sender of something that was under way is no more: it has taken place, partly, or not at
    /// all. Returns the image of which a group is committed now.
    ///
    /// # Errors
    /// What of it no core may ask for.
    pub fn cut_off(
        &mut self,
        flight: Flight,
        now: Nanos,
        policy: &mut impl Policy,
    ) -> Result<Option<usize>, String> {
        let Some(image) = flight.kind.backend() else {
            if let FlightKind::DeviceWrite { offset, data, .. } = flight.kind {
                self.disk.cut_at(offset, &data);
            }
            return Ok(None);
        };
        let backend = &mut self.mounts[image].backend;
        let trouble = backend.trouble_now(now);
        // What was sent to it may have arrived.
        let delivers = !matches!(trouble, Trouble::Stopped | Trouble::Fenced);
        match flight.kind {
            FlightKind::Write { first, data, applied: false, .. }
                if trouble != Trouble::Stopped =>
            {
                backend.apply_cut(policy.rng(), first, &data);
            }
            FlightKind::RedoWrite { name, bytes, .. } if delivers => {
                backend.redo.write_cut(policy.rng(), name, &bytes);
            }
            FlightKind::RedoCommit { generation, commit, .. }
                if delivers && policy.has_arrived() =>
            {
                let committed = backend.redo.commit(generation, self.layout.uuid(), commit);
                return committed
                    .map(|()| Some(image))
                    .map_err(|what| format!("volume {image}: {what}"));
            }
            FlightKind::RedoTrim { .. } | FlightKind::Resize { .. }
                if delivers && policy.has_arrived() =>
            {
                backend.take_place(&flight.kind);
            }
            // Even of a backend that is stopped.
            FlightKind::Disown { .. } if policy.has_arrived() => backend.take_place(&flight.kind),
            _ => {}
        }
        Ok(None)
    }
}
