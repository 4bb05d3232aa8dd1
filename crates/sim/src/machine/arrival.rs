//! What was under way takes place, or fails, and the core is told.

use super::backend::Trouble;
use super::{Flight, FlightKind, Machine, Policy};
use crate::disk::Delay;
use crate::store::Content;
use tidepool_engine::api::*;
use tidepool_engine::mem::Buf;

/// Something that was under way has taken place or has failed. The core is not told yet.
pub struct Arrival {
    flight: Flight,
    result: Result<(), IoError>,
    news: Option<News>,
    /// What the core must not have done.
    complaint: Option<String>,
}

/// What somebody who watches the images wants to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// A group is committed: from now on the image and its redo are the volume without the cache.
    /// If it is `unsure`, the core is told of an error all the same.
    Committed {
        /// The core does not know.
        unsure: bool,
    },
    /// A backend has lost what it had not flushed.
    UnflushedLost,
}

impl Arrival {
    /// What was under way.
    pub fn flight(&self) -> &Flight {
        &self.flight
    }

    /// What the core is going to be told.
    pub fn result(&self) -> Result<(), IoError> {
        self.result
    }

    /// What has become of an image.
    pub fn news(&self) -> Option<News> {
        self.news
    }

    /// What the core has done that it must not do.
    pub fn complaint(&mut self) -> Option<String> {
        self.complaint.take()
    }
}

impl Machine {
    /// Until when a backend or a device in trouble lets something wait that would arrive now.
    pub fn delay_of(&self, token: u64, now: Nanos, policy: &mut impl Policy) -> Option<Nanos> {
        match self.flights.get(&token)?.kind().backend() {
            Some(image) => {
                let backend = &self.mounts[image].backend;
                let usual_ns = backend.latency_ns();
                match backend.trouble_now(now) {
                    Trouble::Stopped | Trouble::Disconnected => {
                        Some(backend.trouble_until() + policy.backend_latency_ns(usual_ns))
                    }
                    Trouble::Slow(times) if policy.waits_for_the_slow() => {
                        Some(now + policy.backend_latency_ns(usual_ns * times))
                    }
                    _ => None,
                }
            }
            None => match self.disk.delay_now(now) {
                Delay::Stopped => Some(self.disk.delay_until() + policy.device_latency_ns()),
                Delay::Slow(times) if policy.waits_for_the_slow() => {
                    Some(now + policy.device_latency_ns() * times)
                }
                _ => None,
            },
        }
    }

    /// Something under way arrives: it takes place, or fails. `None` if nothing of this name is
    /// under way.
    pub fn arrive(&mut self, token: u64, now: Nanos, policy: &mut impl Policy) -> Option<Arrival> {
        let flight = self.flights.remove(&token)?;
        let mut arrival = Arrival { flight, result: Ok(()), news: None, complaint: None };
        if let (Some(buf), FlightKind::DeviceWrite { data, .. }) =
            (arrival.flight.buf, arrival.flight.kind())
            && self.contents(buf) != *data
        {
            arrival.complaint = Some(format!(
                "memory of the device write {token} was changed while it was in flight"
            ));
        }
        arrival.result = match arrival.flight.kind().backend() {
            None => self.reach_device(&arrival.flight, policy),
            Some(image) => {
                let lost = arrival.flight.is_disconnected();
                self.mounts[image].backend.set_disconnected(lost);
                let result = self.reach_backend(&mut arrival, image, now, policy);
                self.mounts[image].backend.set_disconnected(false);
                result
            }
        };
        self.device_failed |= arrival.flight.kind().changes_device() && arrival.result.is_err();
        Some(arrival)
    }

    /// Tells the core of an arrival.
    pub fn tell(&mut self, arrival: &Arrival, now: Nanos) {
        if let Some(engine) = &mut self.engine {
            engine.handle(now, Event::Done { token: arrival.flight.token, result: arrival.result });
        }
    }

    fn reach_device(&mut self, flight: &Flight, policy: &mut impl Policy) -> Result<(), IoError> {
        match flight.kind() {
            FlightKind::DeviceRead { offset } => {
                let engine = self.engine.as_mut().expect("effects come from a core");
                let bytes = engine.arena_mut().bytes_mut(flight.buf.expect("a read has a buffer"));
                self.disk.read_at(*offset, bytes)
            }
            FlightKind::DeviceWrite { offset, data, dsync } => {
                self.disk.draw_from(policy.rng().fork());
                self.disk.write_at(*offset, data, *dsync)
            }
            FlightKind::DeviceSync { point } => self.disk.sync_to(*point),
            _ => unreachable!("everything else is for a backend"),
        }
    }

    fn reach_backend(
        &mut self,
        arrival: &mut Arrival,
        image: usize,
        now: Nanos,
        policy: &mut impl Policy,
    ) -> Result<(), IoError> {
        let backend = &mut self.mounts[image].backend;
        let flight = &arrival.flight;
        match flight.kind() {
            FlightKind::Read { offset, early, .. } => {
                let result = backend.outcome(policy.rng(), false, now);
                let buf = flight.buf.expect("a read has a buffer");
                self.fill(image, *offset, buf, result.is_ok(), early.as_deref());
                result
            }
            FlightKind::Write { first, data, applied, .. } => {
                let result = backend.outcome(policy.rng(), true, now);
                match result {
                    _ if *applied => {}
                    Ok(()) => backend.apply(*first, data),
                    Err(IoError::Fenced) => {}
                    Err(_) => backend.apply_cut(policy.rng(), *first, data),
                }
                result
            }
            FlightKind::Flush { point, .. } => {
                let result = backend.flush_outcome(policy.rng(), now);
                match result {
                    Ok(()) => backend.store.sync(*point),
                    Err(error) => {
                        let lost = self.lose_unflushed(image, error, now, policy);
                        arrival.news = lost.then_some(News::UnflushedLost);
                    }
                }
                result
            }
            FlightKind::RedoWrite { name, bytes, .. } => {
                let result = backend.outcome(policy.rng(), true, now);
                match result {
                    Ok(()) => backend.redo.write(*name, bytes),
                    Err(IoError::Fenced) => {}
                    Err(_) => backend.redo.write_cut(policy.rng(), *name, bytes),
                }
                result
            }
            FlightKind::RedoCommit { generation, commit, .. } => {
                let result = backend.outcome(policy.rng(), true, now);
                let unsure = backend.is_disconnected() && policy.has_arrived();
                if result.is_ok() || unsure {
                    match backend.redo.commit(*generation, self.layout.uuid(), *commit) {
                        Ok(()) => arrival.news = Some(News::Committed { unsure }),
                        Err(what) => arrival.complaint = Some(format!("volume {image}: {what}")),
                    }
                    backend.redo.set_unsure(unsure);
                }
                result
            }
            kind => {
                let result = backend.outcome(policy.rng(), false, now);
                if result.is_ok() {
                    backend.take_place(kind);
                }
                result
            }
        }
    }

    /// Fills a buffer of the core with what a read of an image gives, and after an error with
    /// anything.
    fn fill(&mut self, image: usize, offset: u64, buf: Buf, good: bool, early: Option<&[Content]>) {
        let engine = self.engine.as_mut().expect("effects come from a core");
        let bytes = engine.arena_mut().bytes_mut(buf);
        match early {
            _ if !good => bytes.fill(0xbe),
            None => self.mounts[image].backend.read_at(offset, bytes),
            Some(early) => {
                for (bytes, content) in bytes.chunks_exact_mut(BLOCK_BYTES).zip(early) {
                    match content {
                        Some(content) => bytes.copy_from_slice(&content[..]),
                        None => bytes.fill(0),
                    }
                }
            }
        }
    }

    /// A backend whose flush fails may lose what it has completed since the last one, as a storage
    /// server does that is restarted. Only while nothing went past the cache: clients would read
    /// that something is gone.
    fn lose_unflushed(
        &mut self,
        image: usize,
        error: IoError,
        now: Nanos,
        policy: &mut impl Policy,
    ) -> bool {
        let direct = self.status(image, now).is_none_or(|status| status.backend_unflushed);
        let backend = &mut self.mounts[image].backend;
        if backend.is_durable() || direct || error == IoError::Fenced {
            return false;
        }
        backend.store.power_loss(policy.rng());
        // What is in flight is done again when the server is brought back.
        for flight in self.flights.values_mut() {
            match &mut flight.kind {
                FlightKind::Write { volume, applied, .. } if *volume == image => *applied = false,
                _ => {}
            }
        }
        true
    }
}
