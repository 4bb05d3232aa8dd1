//! Measures one cell on a testbed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::validity::{self, Evidence};
use super::watch::Watch;
use super::{RunError, Runner};
use crate::access::Access;
use crate::collect::hops::Counters;
use crate::collect::{Class, Collector, CountsOf, Sample, Sources};
use crate::device::Counts;
use crate::fio::{self, Endpoint, Measured, Pass, Running, Sync};
use crate::load::neighbours::{self, AtWork};
use crate::load::{self, Client, Filled, Load, LoadError, Objects, Reach, Span};
use crate::network::Transit;
use crate::placement::Arrangement;
use crate::results::{Bench, Drained, Run, WINDOWS, Window};
use crate::scratch::Scratch;
use crate::suite::{Caches, Cell, Guest, Tool, Workload};
use crate::testbed::Testbed;
use crate::words;

/// Most passes over a set that should become warm.
const WARM_PASSES_MAX: u32 = 8;
/// A set is warm if a pass misses less than this part of it. A miss on a slowed disk takes as long
/// as hundreds of hits.
const WARM_MISSES_MAX: f64 = 0.000_2;
/// Most runs of a load that let the caches settle before the load is measured.
const SETTLE_ROUNDS_MAX: u32 = 4;
/// Bytes of a block in the caches' counters of misses.
const CACHE_BLOCK_BYTES: f64 = 4096.0;
/// Extra time for a load generator, beyond the time it was given.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time limit of a pass over an image, with devices that answer at once.
pub(super) const PASS_LIMIT: Duration = Duration::from_secs(3_600);
/// Time between two checks whether all clients have begun, or one has ended.
const POLL: Duration = Duration::from_millis(10);
/// Longest wait for all clients to begin.
const BEGIN_LIMIT: Duration = Duration::from_secs(60);
/// Pause between the preparation of a measurement and its beginning.
pub(super) const REST: Duration = Duration::from_millis(300);

/// A testbed with its images.
#[derive(Debug)]
pub(super) struct Stand {
    pub(super) testbed: Testbed,
    /// Its number in the results.
    pub(super) id: u32,
    /// Images, and the bytes of each that were ever written.
    pub(super) images: Vec<(String, u64)>,
    /// Objects in addition to the images.
    pub(super) objects: Objects,
    /// The sets that the caches hold, as far as these fit. `None` if the caches are not known to be
    /// warm.
    pub(super) warm: Option<Warm>,
}

/// What caches are warm with: the sets of this number of clients and of neighbours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Warm {
    tool: Tool,
    /// Bytes of the set of each client.
    set_bytes: u64,
    clients: u32,
    neighbours: u32,
    /// The workload under which the caches settled, if it reads and writes. Running it leaves the
    /// caches as they are.
    workload: Option<String>,
}

impl Stand {
    /// The images of this number of neighbours: the last ones.
    fn of_neighbours(&self, count: u32) -> impl Iterator<Item = Endpoint> {
        let first = self.images.len().saturating_sub(count as usize);
        self.images[first..].iter().map(|(image, _)| self.testbed.endpoint(image))
    }

    /// Why the cache treats a guest wrongly. `flushed` are the images for which the cache remembers
    /// a flush. `None` if no guest is treated wrongly.
    fn mistaken(&self, flushed: Option<Vec<String>>, clients: u32, guest: Guest) -> Option<String> {
        let flushed = flushed?;
        let images: Vec<&String> = self.images[..clients as usize].iter().map(|(image, _)| image).collect();
        mistaken(&images, &flushed, guest)
    }
}

/// Says which image's guest the cache treats wrongly: as a guest that flushes, or as a guest that
/// never flushes.
fn mistaken(images: &[&String], flushed: &[String], guest: Guest) -> Option<String> {
    let flushes = guest == Guest::Flushes;
    let image = images.iter().find(|image| flushed.contains(image) != flushes)?;
    Some(match guest {
        Guest::Flushes => {
            format!("the cache has seen no flush of {image}, and takes its guest for one that never flushes")
        }
        Guest::NeverFlushes => format!("the cache has seen a flush of {image}, whose guest never flushes"),
    })
}

/// Counters and states at one moment: before or after a window.
struct Look {
    devices: BTreeMap<String, Counts>,
    placements: Map<String, Value>,
    transit: Option<Transit>,
    stages: Option<Counters>,
    osds: u32,
    /// Why a placement was not as it should be.
    out_of_place: Option<String>,
}

impl Runner<'_> {
    /// Makes a measurement. Failures of the load or of Ceph make the run invalid. Errors are those
    /// that concern the whole suite.
    pub(super) fn measure(&self, stand: &mut Stand, cell: &Cell, repeat: u32) -> Result<Run, RunError> {
        let workload = self.suite.workload(&cell.workload).expect("a suite's cells are of its workloads");
        let arrangement = Arrangement::parse(&cell.placement).map_err(RunError::Suite)?;
        let slowed_by = cell.slowed_by.unwrap_or(self.suite.ground.slowed_by);
        stand.testbed.slow(slowed_by).map_err(RunError::Placement)?;
        let filled = self.prepare(stand, cell, workload, &arrangement)?;
        let begun_s = self.begun.elapsed().as_secs_f64();
        let clients = self.clients(stand, cell, workload);
        stand.testbed.emulate(true);
        if self.options.added.is_some() {
            stand.testbed.add(self.options.added).map_err(RunError::Placement)?;
        }
        std::thread::sleep(REST);
        let directory = Scratch::new("neighbours").map_err(RunError::io("cannot make a directory".into()))?;
        let beside = self.neighbours(stand, cell, workload, &directory);
        let ids = beside.as_ref().ok().and_then(Option::as_ref).map(AtWork::ids).unwrap_or_default();
        let Seen { mut got, before, mut after, samples } =
            self.load(&stand.testbed, clients.as_ref(), workload.block_bytes, ids)?;
        let beside = match beside {
            Ok(at_work) => at_work.map(AtWork::end),
            Err(why) => {
                got.failure.get_or_insert(why.to_string());
                None
            }
        };
        drop(directory);
        if let Some(ended) = &beside {
            got.failure = got.failure.or_else(|| ended.failure.clone());
            // Device reads are for clients and neighbours together, so the neighbours' reads count
            // too.
            let seconds = f64::from(self.suite.seconds);
            got.neighbours_read_bytes = (ended.read_bytes_per_s * seconds) as u64;
        }
        if self.options.added.is_some() {
            stand.testbed.add(None).map_err(RunError::Placement)?;
        }
        self.interrupted()?;
        let mistaken = stand.testbed.flushed().map_err(|why| why.to_string());
        let mistaken =
            mistaken.map_or_else(Some, |flushed| stand.mistaken(flushed, cell.clients, workload.guest));
        after.out_of_place = after.out_of_place.or(mistaken);
        // Dirty data is written back at the devices' own speed only after the first repeat of a
        // cell of the deciding workload. Otherwise devices answer at once meanwhile.
        let timed = repeat == 1 && cell.workload == self.suite.deciding;
        let limit_s = if timed { self.drain_limit_s() } else { 0.0 };
        let stop = || self.interrupted().is_err();
        let drained = stand.testbed.drain(limit_s, &stop).map_err(RunError::Placement)?;
        self.interrupted()?;
        let flushed = workload.sync == Sync::Flush;
        let run = Run {
            cell: cell.clone(),
            repeat,
            testbed: stand.id,
            hypervisors: self.suite.ground.hypervisors.min(cell.clients),
            durability: arrangement.durability(self.suite.replicas(cell), workload.access),
            begun_s,
            commands: got.commands.clone(),
            figures: got.measured.figures(flushed),
            reads: got.measured.reads.figures(),
            writes: got.measured.write_figures(flushed),
            // No histogram if a write is complete with its flush: nothing records which flush
            // belongs to which write.
            histogram: if flushed { Vec::new() } else { got.measured.all().histogram() },
            invalid: Vec::new(),
            lower_bound: None,
            samples: Vec::new(),
            // With neighbours there are none: the counters include the neighbours' requests, which
            // cannot be told apart.
            stages: if beside.is_some() { Vec::new() } else { stages(&before, &after) },
            transit_us: after.transit.zip(before.transit).and_then(|(after, before)| after.mean_us(before)),
            devices: after
                .devices
                .iter()
                .map(|(name, now)| (name.clone(), since(now, &before, name)))
                .collect(),
            cpu_us_per_io: BTreeMap::new(),
            placement: differences(&before.placements, &after.placements),
            drained: drained.filter(|drained: &Drained| timed && drained.dirty_bytes > 0),
            bench: got.bench,
            windows: got.windows.clone(),
            fio: got.reports.clone(),
            neighbours: beside.map(|ended| ended.crowd),
        };
        // Without reads it does not matter which data was ever written.
        let set_bytes = if workload.reads() { clients.set_bytes() * u64::from(clients.clients()) } else { 0 };
        let sets = (set_bytes, filled.bytes);
        Ok(self.judged(run, workload, &got, sets, (&before, &after), samples))
    }

    /// Adds what follows from the measurement: whether the run is valid, and its costs.
    fn judged(
        &self,
        mut run: Run,
        workload: &Workload,
        got: &Got,
        (set_bytes, written_bytes): (u64, u64),
        (before, after): (&Look, &Look),
        samples: Vec<Sample>,
    ) -> Run {
        let mean =
            |of: &dyn Fn(&Sample) -> f64| samples.iter().map(of).sum::<f64>() / samples.len().max(1) as f64;
        let cpu = |class: Class| {
            mean(&|sample| sample.classes.get(&class).map_or(0.0, |usage| usage.cpu_percent)) / 100.0
        };
        let arrangement = Arrangement::parse(&run.cell.placement).ok();
        let databases = |name| after.stages.as_ref().map_or(0, |osds| osds.level("bluefs", name));
        let evidence = Evidence {
            osds: run.cell.disks * run.cell.osds_per_disk,
            osds_answering: before.osds.min(after.osds),
            set_bytes,
            written_bytes,
            unnamed_cache_bytes: self.suite.ground.osd_cache_bytes
                * u64::from(run.cell.disks * run.cell.osds_per_disk),
            asks_no_device: arrangement.is_some_and(|arrangement| arrangement.asks_no_device()),
            flushes: if workload.sync == Sync::Flush { flushes(&run.placement) } else { None },
            read_bytes: got.measured.reads.ios * workload.block_bytes + got.neighbours_read_bytes,
            device_read_bytes: run.devices.values().map(|counts| counts.read_bytes).sum(),
            // A store with one device reports no data on a slower one.
            spilled_bytes: databases("slow_used_bytes"),
            database_bytes: databases("db_used_bytes"),
            requests: got.measured.all().ios,
            client_thread: mean(&|sample| sample.busiest_client_percent) / 100.0,
            busy: mean(&|sample| sample.busy_percent) / 100.0,
            failure: got.failure.clone(),
            out_of_place: after.out_of_place.clone(),
        };
        run.invalid = validity::faults(&evidence);
        run.lower_bound = validity::lower_bound(&evidence).filter(|_| run.invalid.is_empty());
        for class in Class::ALL {
            let used = cpu(class);
            if used > 0.0 && run.figures.iops > 0.0 && run.neighbours.is_none() {
                run.cpu_us_per_io.insert(class.name().into(), used * 1e6 / run.figures.iops);
            }
        }
        run.samples = samples;
        run
    }

    /// The load of a cell's clients, on what is in front of the cluster now.
    fn clients(&self, stand: &Stand, cell: &Cell, workload: &Workload) -> Box<dyn Load> {
        let image = |client: u32| {
            let (image, written) = &stand.images[client as usize];
            (stand.testbed.endpoint(image), *written)
        };
        let reach = Reach { image: &image, pool: &|client| stand.testbed.entrance(client) };
        load::of(&self.suite, workload, cell.depth, cell.clients, &reach)
    }

    /// Bytes of its image that a neighbour uses: as many as the workload's set has if clients have
    /// images, otherwise all.
    fn neighbours_set_bytes(&self, workload: &Workload) -> u64 {
        let image_bytes = self.suite.ground.image_bytes;
        if workload.tool == Tool::Fio { workload.set_bytes.min(image_bytes) } else { image_bytes }
    }

    /// Starts the neighbours of a measurement, if it has any, and waits until they are at work.
    fn neighbours(
        &self,
        stand: &Stand,
        cell: &Cell,
        workload: &Workload,
        directory: &Scratch,
    ) -> Result<Option<AtWork>, LoadError> {
        let Some(of) = self.suite.neighbours(cell) else { return Ok(None) };
        let images: Vec<Endpoint> = stand.of_neighbours(of.count).collect();
        let deadline = Instant::now() + BEGIN_LIMIT;
        let stop = || self.stop_reason(deadline);
        let set_bytes = self.neighbours_set_bytes(workload);
        neighbours::start(&images, of, set_bytes, directory.path(), &stop).map(Some)
    }

    /// Brings the caches, and the data that clients will read, into the state that the workload
    /// needs. Devices answer at once meanwhile.
    pub(super) fn prepare(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        workload: &Workload,
        arrangement: &Arrangement,
    ) -> Result<Filled, RunError> {
        let filled = if self.options.unfilled {
            Filled::default()
        } else {
            let clients = self.clients(stand, cell, workload);
            let watch = Watch::new(self, &stand.testbed, PASS_LIMIT);
            clients.fill(&mut stand.objects, &|| watch.stop()).map_err(RunError::Load)?
        };
        if filled.anew {
            stand.warm = None;
        }
        let beside = self.suite.neighbours(cell).map_or(0, |neighbours| neighbours.count);
        stand.testbed.drain(0.0, &|| false).map_err(RunError::Placement)?;
        // A placement in front of the cluster that was not as it should be in the measurement
        // before is put in place anew.
        if let Some(front) = arrangement.front().filter(|_| stand.testbed.holds().is_err()) {
            self.front(stand, Some(front))?;
        }
        // A cache does not forget that a guest has flushed. If it has seen a flush, it is put in
        // place anew for guests that never flush.
        if workload.guest == Guest::NeverFlushes
            && let Some(front) = arrangement.front()
        {
            let flushed = stand.testbed.flushed().map_err(RunError::Placement)?;
            if stand.mistaken(flushed, cell.clients, workload.guest).is_some() {
                self.front(stand, Some(front))?;
            }
        }
        let settles = workload.caches == Caches::Warm && workload.reads() && workload.writes();
        let warm = Warm {
            tool: workload.tool,
            set_bytes: workload.set_bytes,
            clients: cell.clients,
            neighbours: beside,
            workload: settles.then(|| workload.name.clone()),
        };
        match workload.caches {
            Caches::Cold => {
                let front = arrangement.front().filter(|front| front.caches_reads());
                if let Some(front) = front {
                    stand.warm = None;
                    stand.testbed.front(Some(front)).map_err(RunError::Placement)?;
                }
            }
            Caches::Warm if stand.warm.as_ref() == Some(&warm) => {}
            Caches::Warm if arrangement.caches_reads() && !arrangement.caches_in_memory() => {
                let clients = self.clients(stand, cell, workload);
                stand.testbed.prepare(|| {
                    // A cache that resists scans admits a block when it is read again.
                    for _ in 0..2 {
                        let set_bytes = self.neighbours_set_bytes(workload);
                        let images = stand.of_neighbours(beside).map(|image| (image, set_bytes));
                        self.pass_over(&stand.testbed, Pass::Read, images)?;
                    }
                    (0..cell.clients)
                        .try_for_each(|client| self.warm(&stand.testbed, clients.as_ref(), client))
                })?;
                if settles {
                    self.settle(&stand.testbed, clients.as_ref(), workload)?;
                }
                // These blocks stay until other data is read or written.
                stand.warm = Some(warm);
                stand.testbed.drain(0.0, &|| false).map_err(RunError::Placement)?;
            }
            Caches::Warm => {}
        }
        if workload.guest == Guest::Flushes {
            let limit = Instant::now() + PATIENCE;
            let clients = self.clients(stand, cell, workload);
            clients.flush(&|| self.stop_reason(limit)).map_err(RunError::Load)?;
            for image in stand.of_neighbours(beside) {
                let words = fio::flush(&image);
                let flushed = Running::start(&image, &words);
                let flushed = flushed.and_then(|running| running.finish(&|| self.stop_reason(limit)));
                flushed.map_err(|e| RunError::Load(e.into()))?;
            }
            stand.testbed.drain(0.0, &|| false).map_err(RunError::Placement)?;
        }
        if workload.changes_caches() && !settles || beside > 0 {
            stand.warm = None;
        }
        self.interrupted()?;
        Ok(filled)
    }

    /// Reads a client's set until a cache holds as much of it as it can.
    fn warm(&self, testbed: &Testbed, clients: &dyn Load, client: u32) -> Result<(), RunError> {
        let set_bytes = clients.set_bytes();
        let misses = || -> Result<f64, RunError> {
            let counters = testbed.counters().map_err(RunError::Placement)?;
            Ok(missed_blocks(&counters) * CACHE_BLOCK_BYTES)
        };
        // The second pass shows nothing: a cache that resists scans admits blocks then, and holds
        // them from the third pass on.
        until_warm(WARM_PASSES_MAX, 3, || {
            let before = misses()?;
            let watch = Watch::new(self, testbed, PASS_LIMIT);
            clients.pass(client, &|| watch.stop()).map_err(RunError::Load)?;
            Ok(Some((misses()? - before) / set_bytes as f64))
        })
    }

    /// Runs the measured load until a cache misses as little as it can, because writes take the
    /// place of cached blocks. SNIA's test specification calls that workload-dependent
    /// preconditioning.
    fn settle(&self, testbed: &Testbed, clients: &dyn Load, workload: &Workload) -> Result<(), RunError> {
        until_warm(SETTLE_ROUNDS_MAX, 2, || {
            let Seen { got, before, after, .. } =
                self.load(testbed, clients, workload.block_bytes, Vec::new())?;
            self.interrupted()?;
            let missed = missed_blocks(&after.placements) - missed_blocks(&before.placements);
            // A load that fails here fails in the measurement too, which reports the reason.
            let goes_on = got.failure.is_none();
            Ok(goes_on.then(|| missed / got.measured.all().ios.max(1) as f64))
        })
    }

    /// Runs all clients side by side. Reads all counters when the last client's ramp ends and when
    /// the first client's time is over: counters and clients share this window. `beside` are the
    /// process ids of neighbours.
    fn load(
        &self,
        testbed: &Testbed,
        clients: &dyn Load,
        block_bytes: u64,
        beside: Vec<u32>,
    ) -> Result<Seen, RunError> {
        let devices = testbed.devices().map(|(name, device)| {
            let counts: CountsOf = Box::new(device.counter());
            (name.to_string(), counts)
        });
        let sources = Sources { devices: devices.collect(), beside, ..Sources::default() };
        let sources = sources.with_network(testbed.cluster().network());
        let sources = sources.map_err(RunError::io("cannot look at the network".into()))?;
        let scratch = Scratch::new("clients").map_err(RunError::io("cannot make a directory".into()))?;
        let (mut got, mut running) = (Got::default(), Vec::new());
        for client in 0..clients.clients() {
            got.commands.push(clients.command(client));
            match clients.start(client, scratch.path()) {
                Ok(client) => running.push(client),
                Err(error) => got.failure = Some(error.to_string()),
            }
        }
        let limit = Duration::from_secs(u64::from(self.suite.seconds + self.suite.ramp_s)) + PATIENCE;
        let deadline = Instant::now() + limit;
        let begun = self.all_begun(&mut running);
        let ramp = Duration::from_secs(self.suite.ramp_s.into());
        let last = begun.iter().max().map_or_else(Instant::now, |last| *last + ramp);
        self.wait_until(last, &mut running);
        let begin = Instant::now();
        let before = look(testbed);
        let collector = Collector::start(sources);
        let seconds = Duration::from_secs(self.suite.seconds.into());
        let first = begun.iter().min().map_or_else(Instant::now, |first| *first + ramp + seconds);
        let mut dirty = Vec::new();
        for part in 1..WINDOWS as u32 {
            self.wait_until((last + seconds * part / WINDOWS as u32).min(first), &mut running);
            dirty.push(dirty_bytes(&testbed.counters().unwrap_or_default()));
        }
        self.wait_until(first, &mut running);
        let span = Span { begin, end: Instant::now() };
        let after = look(testbed);
        dirty.push(dirty_bytes(&after.placements));
        let samples = collector.stop();
        let (mut rates, mut told) = (Vec::new(), Vec::new());
        for client in running {
            match client.finish(span, &|| self.stop_reason(deadline)) {
                Ok(done) => {
                    got.measured.add(&done.measured);
                    got.reports.extend(done.report);
                    rates.push(done.rates);
                    told.push(done.told);
                }
                Err(error) => got.failure = Some(error.to_string()),
            }
        }
        got.windows = windows(rates, &dirty, seconds / WINDOWS as u32, block_bytes);
        got.bench = load::together(told, got.measured.figures(false).mean_us);
        Ok(Seen { got, before, after, samples })
    }

    /// When each client began. Returns when all have begun, one has ended, the suite is interrupted
    /// or [`BEGIN_LIMIT`] is over. Clients that have not begun by then are missing.
    fn all_begun(&self, running: &mut [Box<dyn Client>]) -> Vec<Instant> {
        let deadline = Instant::now() + BEGIN_LIMIT;
        loop {
            let begun: Vec<Instant> = running.iter().filter_map(|client| client.begun()).collect();
            let is_over =
                running.iter_mut().any(|client| client.has_ended()) || self.stop_reason(deadline).is_some();
            if begun.len() == running.len() || is_over {
                return begun;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits until this time, a client's end, or an interruption.
    fn wait_until(&self, then: Instant, running: &mut [Box<dyn Client>]) {
        while Instant::now() < then
            && !running.iter_mut().any(|client| client.has_ended())
            && self.interrupted().is_ok()
        {
            std::thread::sleep(POLL.min(then.saturating_duration_since(Instant::now())));
        }
    }

    /// Why a load generator should stop. `None` if it should go on.
    pub(super) fn stop_reason(&self, deadline: Instant) -> Option<String> {
        if self.interrupted().is_err() {
            return Some("it was interrupted".into());
        }
        (Instant::now() > deadline).then(|| "it did not end in time".into())
    }
}

/// Repeats `once`, at most `most` times, until a cache misses next to nothing of a set. A set that
/// does not fit never gets there. Such a set is as warm as it can be when a round, from round
/// `told` on, misses more than 90 % of what the round before missed. `once` returns the part that
/// was missed, or `None` to stop.
fn until_warm(
    most: u32,
    told: u32,
    mut once: impl FnMut() -> Result<Option<f64>, RunError>,
) -> Result<(), RunError> {
    let mut last = f64::MAX;
    for time in 1..=most {
        let Some(missed) = once()? else { break };
        if missed < WARM_MISSES_MAX || time >= told && missed > last * 0.9 {
            break;
        }
        last = missed;
    }
    Ok(())
}

/// The outcome of a load.
struct Seen {
    got: Got,
    /// Taken when the last client's ramp had ended.
    before: Look,
    /// Taken when the first client's time was over.
    after: Look,
    /// Samples between the two.
    samples: Vec<Sample>,
}

/// What the clients of a run got.
#[derive(Debug, Default)]
struct Got {
    measured: Measured,
    commands: Vec<String>,
    /// fio's own reports, of the clients that came to their end.
    reports: Vec<Value>,
    windows: Vec<Window>,
    bench: Option<Bench>,
    failure: Option<String>,
    /// Bytes that neighbours read meanwhile, roughly.
    neighbours_read_bytes: u64,
}

fn look(testbed: &Testbed) -> Look {
    let sockets: Vec<PathBuf> = testbed.cluster().osd_sockets();
    let answers = sockets.iter().map(|socket| Counters::now([socket.as_path()]));
    let answers: Vec<Counters> = answers.flatten().collect();
    Look {
        devices: testbed.counts(),
        transit: testbed.transit(),
        placements: testbed.counters().unwrap_or_default(),
        osds: answers.len() as u32,
        stages: (!answers.is_empty()).then(|| Counters::joined(answers)),
        out_of_place: testbed.holds().err().map(|why| why.to_string()),
    }
}

/// The equal windows of all clients together. Empty if a client did not report its rates.
fn windows(
    rates: Vec<Option<Vec<[f64; 2]>>>,
    dirty: &[u64],
    window: Duration,
    block_bytes: u64,
) -> Vec<Window> {
    let Some(rates) = rates.into_iter().collect::<Option<Vec<_>>>().filter(|rates| !rates.is_empty()) else {
        return Vec::new();
    };
    let requests = |at: usize, side: usize| {
        (rates.iter().map(|of_client| of_client[at][side]).sum::<f64>() * window.as_secs_f64()).round() as u64
    };
    let of = |(at, &dirty_bytes): (usize, &u64)| {
        let writes = requests(at, 1);
        Window { requests: requests(at, 0) + writes, written_bytes: writes * block_bytes, dirty_bytes }
    };
    dirty.iter().enumerate().map(of).collect()
}

/// Blocks that caches missed, in total.
fn missed_blocks(counters: &Map<String, Value>) -> f64 {
    counters.values().filter_map(|of| of["miss_blocks"].as_f64()).sum()
}

/// Bytes that placements have not written back, in total.
fn dirty_bytes(counters: &Map<String, Value>) -> u64 {
    let all = counters.values().filter_map(Value::as_object).flatten();
    all.filter(|(name, _)| name.ends_with("dirty_bytes")).filter_map(|(_, level)| level.as_u64()).sum()
}

/// Flushes of clients that arrived at the cache on the hypervisor or, without such a cache, at the
/// iSCSI gateway. `None` if neither counts them.
fn flushes(counted: &Value) -> Option<u64> {
    let counted = counted.as_object()?;
    let on_host = counted.iter().find(|(name, _)| words::on_host(name)).map(|(_, counters)| counters);
    // QEMU's own rbd driver makes librbd flush with reads too, so that flushes counted there would
    // prove nothing.
    let gateway = || counted.get(Access::Iscsi.name());
    on_host.or_else(gateway)?["flushes"].as_u64()
}

fn since(now: &Counts, before: &Look, name: &str) -> Counts {
    now.since(before.devices.get(name).copied().unwrap_or_default())
}

fn stages(before: &Look, after: &Look) -> Vec<crate::collect::hops::Stage> {
    let both = after.stages.as_ref().zip(before.stages.as_ref()).filter(|_| after.osds == before.osds);
    both.map(|(after, before)| after.since(before)).unwrap_or_default()
}

/// Counters of placements, as differences between two looks. A counter whose name ends with
/// `dirty_bytes` is a level; its last value is kept.
fn differences(before: &Map<String, Value>, after: &Map<String, Value>) -> Value {
    let of = |(name, now): (&String, &Value)| {
        let counters = now.as_object().into_iter().flatten().map(|(key, value)| {
            let earlier = before.get(name).and_then(|before| before[key].as_u64()).unwrap_or(0);
            let grown = value.as_u64().unwrap_or(0).saturating_sub(earlier);
            (key.clone(), if key.ends_with("dirty_bytes") { value.clone() } else { json!(grown) })
        });
        (name.clone(), Value::Object(counters.collect()))
    };
    Value::Object(after.iter().map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_has_seen_a_flush_of_each_guest_but_of_one_that_never_flushes() {
        let [one, two] = ["img0".to_string(), "img1".to_string()];
        let images = [&one, &two];
        let seen = |flushed: &[&String], guest| {
            let flushed: Vec<String> = flushed.iter().map(|image| image.to_string()).collect();
            mistaken(&images, &flushed, guest)
        };
        assert_eq!(seen(&[&one, &two], Guest::Flushes), None);
        assert_eq!(seen(&[], Guest::NeverFlushes), None);
        let missing = seen(&[&one], Guest::Flushes).expect("one is missing");
        assert!(missing.contains("no flush of img1"), "{missing}");
        let sent = seen(&[&two], Guest::NeverFlushes).expect("one was sent");
        assert!(sent.contains("a flush of img1"), "{sent}");
    }

    #[test]
    fn a_flush_arrives_at_the_cache_or_at_the_end_of_the_path_if_somebody_counts() {
        assert_eq!(flushes(&json!({ "osd-tidepool": { "flushes": 7 } })), None, "those are the OSDs'");
        assert_eq!(flushes(&json!({ "iscsi": { "flushes": 3 }, "osd-tidepool": { "flushes": 7 } })), Some(3));
        assert_eq!(
            flushes(&json!({ "iscsi": { "flushes": 3 }, "host-tidepool": { "flushes": 5 } })),
            Some(5)
        );
        assert_eq!(flushes(&Value::Null), None);
    }
}
