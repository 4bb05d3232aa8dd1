//! A machine under the real core: the core, its cache device, the images of its volumes, and what
//! is under way between them.
//!
//! It takes those effects of the core that are input or output, and gives completions back. An
//! effect becomes a [`Flight`] ([`Machine::prepare`]), which is sent on its way
//! ([`Machine::launch`]). When its time has come, it takes place or fails ([`Machine::arrive`]),
//! and the core is told ([`Machine::tell`]). The machine's user has the clock, and a [`Policy`]
//! that decides how long things take and what goes wrong on the way. The machine knows neither
//! clients nor operators, and does not check the core's promises. It only says when the core asks
//! for something that no core may ask for.

mod arrival;
pub mod backend;
mod cut;
mod flight;
mod launch;
mod layout;
mod policy;
pub mod redo;

pub use arrival::{Arrival, News};
pub use flight::{Flight, FlightKind};
pub use layout::Layout;
pub use policy::Policy;

use crate::disk::Disk;
use crate::rng::Rng;
use backend::Backend;
use std::collections::BTreeMap;
use tidepool_engine::api::*;
use tidepool_engine::format::Geometry;
use tidepool_engine::mem::Buf;
use tidepool_engine::status::VolumeStatus;
use tidepool_engine::{Engine, EngineConfig, FormatError, OpenError, RecoveryReport};

/// An image, and the volume of the core that has it.
struct Mount {
    backend: Backend,
    id: Option<VolumeId>,
}

/// A machine.
pub struct Machine {
    engine: Option<Box<Engine>>,
    /// How many cores have come to their end.
    life: u64,
    disk: Disk,
    layout: Layout,
    mounts: Vec<Mount>,
    flights: BTreeMap<u64, Flight>,
    /// The core has been told that a write or sync of the device failed.
    device_failed: bool,
    /// Bytes of the arena that were in use when the core was opened.
    arena_bytes_at_open: u64,
}

impl Machine {
    /// A machine that does not run yet, with a device on which nothing is.
    pub fn new(layout: Layout, rng: Rng, backends: impl Iterator<Item = Backend>) -> Machine {
        Machine {
            engine: None,
            life: 0,
            disk: Disk::new(layout.size_bytes(), rng),
            layout,
            mounts: backends.map(|backend| Mount { backend, id: None }).collect(),
            flights: BTreeMap::new(),
            device_failed: false,
            arena_bytes_at_open: 0,
        }
    }

    /// The core, while it runs.
    pub fn engine(&self) -> Option<&Engine> {
        self.engine.as_deref()
    }

    /// The core, to be sent something.
    pub fn engine_mut(&mut self) -> Option<&mut Engine> {
        self.engine.as_deref_mut()
    }

    /// Whether the core runs.
    pub fn is_running(&self) -> bool {
        self.engine.is_some()
    }

    /// The number of the core's life: what was begun in an earlier one is over.
    pub fn life(&self) -> u64 {
        self.life
    }

    /// The cache device.
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// The cache device, to be harmed or healed.
    pub fn disk_mut(&mut self) -> &mut Disk {
        &mut self.disk
    }

    /// How the cache is laid out.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Where on the device things are.
    pub fn geometry(&self) -> &Geometry {
        self.layout.geometry()
    }

    /// An image.
    pub fn backend(&self, image: usize) -> &Backend {
        &self.mounts[image].backend
    }

    /// An image, to be changed.
    pub fn backend_mut(&mut self, image: usize) -> &mut Backend {
        &mut self.mounts[image].backend
    }

    /// All images.
    pub fn backends_mut(&mut self) -> impl Iterator<Item = &mut Backend> {
        self.mounts.iter_mut().map(|mount| &mut mount.backend)
    }

    /// The volume of the core that has this image.
    pub fn id(&self, image: usize) -> Option<VolumeId> {
        self.mounts[image].id
    }

    /// The image of a volume of the core.
    pub fn image_of(&self, volume: VolumeId) -> Option<usize> {
        self.mounts.iter().position(|mount| mount.id == Some(volume))
    }

    /// From now on the image is that of this volume of the core, or of none.
    pub fn mount(&mut self, image: usize, id: Option<VolumeId>) {
        self.mounts[image].id = id;
    }

    /// What the core says of the volume that has this image.
    pub fn status(&self, image: usize, now: Nanos) -> Option<VolumeStatus> {
        self.engine.as_ref()?.volume_status(now, self.mounts[image].id?)
    }

    /// Lays the cache out under a new name.
    ///
    /// # Errors
    /// What the core says.
    pub fn format(&mut self) -> Result<(), FormatError> {
        self.layout.format(&mut self.disk)
    }

    /// Puts an empty device in the place of the one that is there.
    pub fn replace_disk(&mut self, rng: Rng) {
        self.disk = Disk::new(self.layout.size_bytes(), rng);
    }

    /// Starts the core, which recovers what is on the device.
    ///
    /// # Errors
    /// What the core says; then it does not run.
    pub fn open(&mut self, config: &EngineConfig, now: Nanos) -> Result<RecoveryReport, OpenError> {
        let (engine, report) = Engine::open(&mut self.disk, config.clone(), now)?;
        self.arena_bytes_at_open = engine.device_status().arena_used_bytes;
        self.engine = Some(Box::new(engine));
        Ok(report)
    }

    /// Starts the core on a device that stops after `steps` operations. Returns whether it came to
    /// nothing for that.
    pub fn open_and_stop(&mut self, config: &EngineConfig, now: Nanos, steps: u64) -> bool {
        self.disk.stop_after(Some(steps));
        let opened = Engine::open(&mut self.disk, config.clone(), now);
        let stopped = self.disk.is_stopped();
        self.disk.stop_after(None);
        stopped && opened.is_err()
    }

    /// The life of the core ends. What is under way is taken before, with [`Machine::interrupt`].
    pub fn end_life(&mut self) {
        self.engine = None;
        self.life += 1;
        self.device_failed = false;
    }

    /// Bytes of the arena in use, now and when the core was opened.
    pub fn arena_bytes(&self) -> Option<(u64, u64)> {
        let used = self.engine.as_ref()?.device_status().arena_used_bytes;
        Some((used, self.arena_bytes_at_open))
    }

    /// Whether something that is under way uses a part of this memory.
    pub fn uses(&self, buf: Buf) -> bool {
        self.flights.values().any(|flight| flight.overlaps(buf))
    }

    /// What is under way.
    pub fn flights(&self) -> impl Iterator<Item = &Flight> {
        self.flights.values()
    }

    /// The number that nothing else in this life has, of something under way.
    pub fn name_of(&self, token: u64) -> Option<u64> {
        self.flights.get(&token).map(Flight::name)
    }

    /// The connection to a backend is gone. What is under way comes back as failed, done or not;
    /// returns how much that is.
    pub fn disconnect(&mut self, image: usize) -> u64 {
        let lost =
            self.flights.values_mut().filter(|flight| flight.kind().backend() == Some(image));
        lost.map(Flight::disconnect).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::backend::Trouble;
    use super::*;
    use std::collections::BTreeSet;

    const BLOCK: u64 = BLOCK_BYTES as u64;

    /// Everything takes a microsecond, and nothing goes wrong.
    struct Prompt(Rng);

    impl Policy for Prompt {
        fn rng(&mut self) -> &mut Rng {
            &mut self.0
        }
        fn device_latency_ns(&mut self) -> Nanos {
            1_000
        }
        fn sync_latency_ns(&mut self) -> Nanos {
            1_000
        }
        fn backend_latency_ns(&mut self, _usual_ns: Nanos) -> Nanos {
            1_000
        }
        fn is_early(&mut self) -> bool {
            false
        }
        fn is_trim_late(&mut self) -> bool {
            false
        }
        fn waits_for_the_slow(&mut self) -> bool {
            false
        }
        fn has_arrived(&mut self) -> bool {
            false
        }
    }

    /// A machine with one image, its policy, and a clock.
    struct Bench {
        machine: Machine,
        policy: Prompt,
        now: Nanos,
        /// When what is under way arrives.
        due: BTreeSet<(Nanos, u64)>,
    }

    impl Bench {
        fn new() -> Bench {
            let image = Backend::new(16 * BLOCK, true, 1_000);
            let layout = Layout::new(64 << 20, Some(256 << 10));
            let machine = Machine::new(layout, Rng::new(1), std::iter::once(image));
            let mut bench =
                Bench { machine, policy: Prompt(Rng::new(2)), now: 0, due: BTreeSet::new() };
            bench.machine.format().expect("a device that works");
            bench.open();
            bench
        }

        fn open(&mut self) -> RecoveryReport {
            let config = EngineConfig {
                arena_bytes: 16 << 20,
                append_bytes: 64 << 10,
                appends_in_flight: 2,
                drain_buffers: 4,
                stop_flush_ns_max: 0,
                mirror_bytes: 0,
            };
            self.machine.open(&config, self.now).expect("a cache without faults")
        }

        /// The volume of the image is added, and is served once that is done.
        fn add_volume(&mut self) -> VolumeId {
            let spec = VolumeSpec {
                name: "volume".into(),
                backend: "file:/volume".into(),
                size_bytes: 16 * BLOCK,
                mode: Mode::WriteBack,
                drain: DrainOrder::Grouped,
                dirty_bytes_max: 0,
                read_only: false,
                generation: 1,
                attachment: Vec::new(),
            };
            let engine = self.machine.engine_mut().expect("it runs");
            let id = engine.add_volume(self.now, spec, 1).expect("room for a volume");
            self.machine.mount(0, Some(id));
            let done = self.run();
            assert!(matches!(done[..], [Effect::ControlDone { result: Ok(()), .. }]));
            id
        }

        /// Asks for something with a block of the core's memory.
        fn send(&mut self, volume: VolumeId, op: Op, fill: u8) -> Buf {
            let engine = self.machine.engine_mut().expect("it runs");
            let buf = engine.arena_mut().alloc(buffer_bytes(0, BLOCK)).expect("memory for a block");
            engine.arena_mut().bytes_mut(buf).fill(fill);
            let request = Request { id: 1, volume, op, offset: 0, len: BLOCK, buf: Some(buf) };
            engine.handle(self.now, Event::Request(request));
            buf
        }

        /// Sends on its way what the core wants; returns what is no input or output.
        fn launch(&mut self) -> Vec<Effect> {
            let mut others = Vec::new();
            while let Some(effect) =
                self.machine.engine_mut().expect("it runs").next_effect(self.now)
            {
                let prepared = self.machine.prepare(&effect, self.now, &mut self.policy);
                let Some(flight) = prepared.expect("it may ask for that") else {
                    others.push(effect);
                    continue;
                };
                let token = flight.token();
                let latency_ns =
                    self.machine.launch(token, flight, &mut self.policy).expect("it may do that");
                self.due.insert((self.now + latency_ns, token));
            }
            others
        }

        /// Lets everything arrive, until the core wants nothing more; returns what is no input or
        /// output.
        fn run(&mut self) -> Vec<Effect> {
            let mut others = self.launch();
            while let Some((at, token)) = self.due.pop_first() {
                self.now = at;
                let arrival =
                    self.machine.arrive(token, at, &mut self.policy).expect("it is under way");
                self.machine.tell(&arrival, at);
                others.extend(self.launch());
            }
            others
        }
    }

    #[test]
    fn a_core_on_a_machine_writes_and_reads_without_anything_else() {
        let mut bench = Bench::new();
        let id = bench.add_volume();
        bench.send(id, Op::Write { fua: true }, 7);
        assert!(matches!(bench.run()[..], [Effect::Reply { result: Ok(()), .. }]));
        let buf = bench.send(id, Op::Read, 0);
        assert!(matches!(bench.run()[..], [Effect::Reply { result: Ok(()), .. }]));
        assert!(bench.machine.bytes(buf).iter().all(|&byte| byte == 7));
    }

    #[test]
    fn what_a_killed_core_has_written_is_there_for_the_next() {
        let mut bench = Bench::new();
        let id = bench.add_volume();
        bench.send(id, Op::Write { fua: true }, 7);
        bench.run();
        let life = bench.machine.life();
        for flight in bench.machine.interrupt() {
            bench.machine.cut_off(flight, bench.now, &mut bench.policy).expect("it may do that");
        }
        bench.machine.end_life();
        assert!(!bench.machine.is_running() && bench.machine.life() == life + 1);
        assert!(bench.open().records_replayed > 0);
        let volumes = bench.machine.engine().expect("it runs").volumes();
        assert_eq!(volumes.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [id]);
    }

    #[test]
    fn a_backend_that_is_stopped_lets_what_is_for_it_wait_and_nothing_else() {
        let mut bench = Bench::new();
        let id = bench.add_volume();
        bench.send(id, Op::Read, 0);
        bench.launch();
        let read = bench.machine.flights().find(|flight| flight.kind().backend() == Some(0));
        let token = read.expect("the block is not in the cache").token();
        assert_eq!(bench.machine.delay_of(token, bench.now, &mut bench.policy), None);
        let until = bench.now + 5_000;
        bench.machine.backend_mut(0).set_trouble(Trouble::Stopped, until);
        assert_eq!(
            bench.machine.delay_of(token, bench.now, &mut bench.policy),
            Some(until + 1_000)
        );
        assert_eq!(bench.machine.delay_of(token, until, &mut bench.policy), None);
    }

    #[test]
    fn what_is_lost_with_the_connection_fails() {
        let mut bench = Bench::new();
        let id = bench.add_volume();
        bench.send(id, Op::Read, 0);
        bench.launch();
        assert_eq!(bench.machine.disconnect(0), 1);
        assert!(matches!(bench.run()[..], [Effect::Reply { result: Err(RequestError::Io), .. }]));
    }

    #[test]
    fn no_token_is_under_way_twice() {
        let mut bench = Bench::new();
        let sync = Effect::DeviceSync { token: Token(99) };
        let mut launch = || {
            let flight = bench.machine.prepare(&sync, 0, &mut bench.policy).expect("a sync");
            bench.machine.launch(1, flight.expect("input or output"), &mut bench.policy)
        };
        assert!(launch().is_ok());
        assert!(launch().is_err_and(|what| what.contains("token 99 is used twice")));
    }
}
