//! What was under way takes place, or fails, and the core is told.

use super::{Flight, FlightKind, Happening, World};
use crate::backend::Trouble;
use crate::disk::Delay;
use crate::plan::Theme;
use tidepool_engine::api::*;

impl World {
    /// An effect completes: it takes place, and the core is told.
    pub(super) fn complete(&mut self, token: u64) {
        if self.is_delayed(token) {
            return;
        }
        let Some(flight) = self.flights.remove(&token) else { return };
        if let (Some(buf), FlightKind::DeviceWrite { data, .. }) = (flight.buf, &flight.kind)
            && self.contents(buf) != *data
        {
            self.fail(format!("memory of the device write {token} was changed while it was in flight"));
        }
        let flushed = if let FlightKind::Flush { volume, .. } = flight.kind { Some(volume) } else { None };
        let lost = flight.kind.backend().filter(|_| flight.disconnected);
        let changes_device =
            matches!(flight.kind, FlightKind::DeviceWrite { .. } | FlightKind::DeviceSync { .. });
        if let Some(volume) = lost {
            self.vols[volume].backend.disconnected = true;
        }
        let result = self.take_place(flight);
        if let Some(volume) = lost {
            self.vols[volume].backend.disconnected = false;
        }
        self.device_failed |= changes_device && result.is_err();
        self.note("done", token, u64::from(result.is_err()), 0);
        let now = self.now;
        if let Some(engine) = &mut self.engine {
            engine.handle(now, Event::Done { token: Token(token), result });
        }
        if let Some(v) = flushed {
            self.check_drained(v);
        }
    }

    /// A backend or a device in trouble lets its operations wait.
    fn is_delayed(&mut self, token: u64) -> bool {
        let Some(flight) = self.flights.get(&token) else { return false };
        let until = match flight.kind.backend() {
            Some(volume) => {
                let backend = &self.vols[volume].backend;
                let latency = backend.latency_ns;
                match backend.trouble_now(self.now) {
                    Trouble::Stopped | Trouble::Disconnected => {
                        backend.trouble_until + self.rng.around(latency)
                    }
                    Trouble::Slow(times) if self.rng.permille(800) => {
                        self.now + self.rng.around(latency * times)
                    }
                    _ => return false,
                }
            }
            None => match self.disk.delay_now(self.now) {
                Delay::Stopped => self.disk.delay_until + self.device_latency(),
                Delay::Slow(times) if self.rng.permille(800) => self.now + self.device_latency() * times,
                _ => return false,
            },
        };
        let life = self.life;
        self.at(until, Happening::Done { life, token });
        true
    }

    fn take_place(&mut self, flight: Flight) -> Result<(), IoError> {
        let now = self.now;
        match flight.kind {
            FlightKind::DeviceRead { offset } => {
                let buf = flight.buf.expect("a read has a buffer");
                let engine = self.engine.as_mut().expect("effects come from a core");
                let bytes = engine.arena_mut().bytes_mut(buf);
                self.disk.read_at(offset, bytes)
            }
            FlightKind::DeviceWrite { offset, data, dsync, tick } => {
                self.disk.rng = self.rng.fork();
                if self.plan.theme == Theme::Corruption {
                    self.note_records(offset, &data, tick);
                }
                self.disk.write_at(offset, &data, dsync)
            }
            FlightKind::DeviceSync { point } => self.disk.sync_to(point),
            FlightKind::Read { volume, offset, early } => {
                let buf = flight.buf.expect("a read has a buffer");
                let backend = &self.vols[volume].backend;
                let result = backend.outcome(&mut self.rng, false, now);
                let engine = self.engine.as_mut().expect("effects come from a core");
                let bytes = engine.arena_mut().bytes_mut(buf);
                match (&result, early) {
                    (Err(_), _) => bytes.fill(0xbe),
                    (Ok(()), None) => backend.read_at(offset, bytes),
                    (Ok(()), Some(early)) => {
                        for (bytes, content) in bytes.chunks_exact_mut(BLOCK_BYTES).zip(early) {
                            match content {
                                Some(content) => bytes.copy_from_slice(&content[..]),
                                None => bytes.fill(0),
                            }
                        }
                    }
                }
                self.note_backend(volume, result)
            }
            FlightKind::Write { volume, first, data, applied } => {
                let backend = &mut self.vols[volume].backend;
                let result = backend.outcome(&mut self.rng, true, now);
                match result {
                    _ if applied => {}
                    Ok(()) => backend.apply(first, &data),
                    Err(IoError::Fenced) => {}
                    Err(_) => backend.apply_cut(&mut self.rng, first, &data),
                }
                let beside_redo = !backend.redo.is_empty() && self.vols[volume].goes_direct();
                if beside_redo && self.rng.permille(300) {
                    self.check_cut(volume, false);
                }
                self.note_backend(volume, result)
            }
            FlightKind::Flush { volume, point } => {
                let backend = &mut self.vols[volume].backend;
                let result = backend.flush_outcome(&mut self.rng, now);
                match result {
                    Ok(()) => backend.store.sync(point),
                    Err(error) => {
                        self.vols[volume].flush_failed = true;
                        self.lose_unflushed(volume, error);
                    }
                }
                self.note_backend(volume, result)
            }
            FlightKind::Disown { volume } => {
                let backend = &mut self.vols[volume].backend;
                let result = backend.outcome(&mut self.rng, false, now);
                backend.disowned |= result.is_ok();
                self.note_backend(volume, result)
            }
            FlightKind::RedoWrite { volume, name, bytes } => {
                let backend = &mut self.vols[volume].backend;
                let result = backend.outcome(&mut self.rng, true, now);
                match result {
                    Ok(()) => backend.redo.write(name, &bytes),
                    Err(IoError::Fenced) => {}
                    Err(_) => backend.redo.write_cut(&mut self.rng, name, &bytes),
                }
                self.note_backend(volume, result)
            }
            FlightKind::RedoCommit { volume, generation, commit } => {
                let backend = &mut self.vols[volume].backend;
                let result = backend.outcome(&mut self.rng, true, now);
                let unsure = backend.disconnected && self.rng.permille(500);
                if result.is_ok() || unsure {
                    self.commit(volume, generation, commit);
                    self.vols[volume].backend.redo.unsure = unsure;
                    self.cover.add("commit without an answer", u64::from(unsure));
                }
                self.note_backend(volume, result)
            }
            FlightKind::RedoTrim { volume, first } => {
                let backend = &mut self.vols[volume].backend;
                let result = backend.outcome(&mut self.rng, false, now);
                if result.is_ok() {
                    backend.redo.trim(first);
                    self.cover.hit("redo trimmed");
                    if self.rng.permille(200) {
                        self.check_cut(volume, false);
                    }
                }
                self.note_backend(volume, result)
            }
            FlightKind::RedoNote { volume, durable } => {
                let backend = &mut self.vols[volume].backend;
                let result = backend.outcome(&mut self.rng, false, now);
                if result.is_ok() {
                    backend.redo.noted = (backend.generation, durable);
                }
                self.note_backend(volume, result)
            }
            FlightKind::Resize { volume, size_bytes } => {
                let backend = &mut self.vols[volume].backend;
                let result = backend.outcome(&mut self.rng, false, now);
                if result.is_ok() {
                    backend.resize(size_bytes);
                }
                self.note_backend(volume, result)
            }
            FlightKind::Snapshot { volume, floor } => {
                let result = self.vols[volume].backend.outcome(&mut self.rng, false, now);
                if result.is_ok() {
                    self.check_snapshot(volume, floor);
                }
                self.note_backend(volume, result)
            }
        }
    }
}
