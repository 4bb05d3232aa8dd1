//! Measures one cell on a testbed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::prepare::missed_blocks;
use super::stand::Stand;
use super::validity::{self, Evidence};
use super::{RunError, Runner};
use crate::access::Access;
use crate::collect::hops::{Counters, Stage};
use crate::collect::{Class, Collector, CountsOf, Sample, Sources};
use crate::load::neighbours::{self, AtWork};
use crate::load::{self, Client, Load, LoadError, Reach, Span};
use crate::placement::Arrangement;
use crate::results::{Bench, Counted, Crowd, Drained, Run, WINDOWS, Window};
use crate::suite::{Cell, Tool, Workload};
use crate::testbed::Testbed;
use crate::words;
use tidepool_cluster::device::Counts;
use tidepool_cluster::fio::{Endpoint, Measured, Sync};
use tidepool_cluster::network::Transit;
use tidepool_cluster::scratch::Scratch;

/// Extra time for a load generator, beyond the time it was given.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
/// Time limit of a pass over an image, with devices that answer at once.
pub(super) const PASS_LIMIT: Duration = Duration::from_secs(3_600);
/// Time between two checks whether all clients have begun, or one has ended.
const POLL: Duration = Duration::from_millis(10);
/// Longest wait for all clients to begin.
const BEGIN_LIMIT: Duration = Duration::from_secs(60);
/// Pause between the preparation of a measurement and its beginning.
pub(super) const REST: Duration = Duration::from_millis(300);

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
    pub(super) fn measure(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        repeat: u32,
    ) -> Result<Run, RunError> {
        let workload =
            self.suite.workload(&cell.workload).expect("a suite's cells are of its workloads");
        let arrangement = Arrangement::parse(&cell.placement).map_err(RunError::Suite)?;
        let slowed_by = cell.slowed_by.unwrap_or(self.suite.ground.slowed_by);
        stand.testbed.slow(slowed_by).map_err(RunError::Placement)?;
        let filled = self.prepare(stand, cell, workload, &arrangement)?;
        let begun_s = self.begun.elapsed().as_secs_f64();
        let clients = self.clients(stand, cell, workload);
        stand.testbed.emulate(true);
        let (mut seen, crowd) = self.at_work(stand, cell, workload, clients.as_ref())?;
        let mistaken = stand.testbed.flushed().map_err(|why| why.to_string());
        let mistaken = mistaken
            .map_or_else(Some, |flushed| stand.mistaken(flushed, cell.clients, workload.guest));
        seen.after.out_of_place = seen.after.out_of_place.or(mistaken);
        // Dirty data is written back at the devices' own speed only after the first repeat of a
        // cell of the deciding workload. Otherwise devices answer at once meanwhile.
        let timed = repeat == 1 && cell.workload == self.suite.deciding;
        let limit_s = if timed { self.drain_limit_s() } else { 0.0 };
        let stop = || self.interrupted().is_err();
        let drained = stand.testbed.drain(limit_s, &stop).map_err(RunError::Placement)?;
        self.interrupted()?;
        let flushed = workload.sync == Sync::Flush;
        let figures = seen.got.measured.figures(flushed);
        let counted = seen.counted(crowd.is_none().then_some(figures.iops));
        // Without reads it does not matter which data was ever written.
        let set_bytes =
            if workload.reads() { clients.set_bytes() * u64::from(clients.clients()) } else { 0 };
        let evidence = Evidence {
            set_bytes,
            written_bytes: filled.bytes,
            asks_no_device: arrangement.asks_no_device(),
            flushes: if flushed { flushes(&counted.placement) } else { None },
            ..self.evidence(cell, workload, &seen)
        };
        let invalid = validity::faults(&evidence);
        Ok(Run {
            cell: cell.clone(),
            repeat,
            testbed: stand.id,
            hypervisors: self.suite.ground.hypervisors.min(cell.clients),
            durability: arrangement.durability(self.suite.replicas(cell), workload.access),
            begun_s,
            figures,
            reads: seen.got.measured.reads.figures(),
            writes: seen.got.measured.write_figures(flushed),
            // No histogram if a write is complete with its flush: nothing records which flush
            // belongs to which write.
            histogram: if flushed { Vec::new() } else { seen.got.measured.all().histogram() },
            lower_bound: validity::lower_bound(&evidence).filter(|_| invalid.is_empty()),
            invalid,
            counted,
            drained: drained.filter(|drained: &Drained| timed && drained.dirty_bytes > 0),
            bench: seen.got.bench,
            commands: seen.got.commands,
            windows: seen.got.windows,
            fio: seen.got.reports,
            samples: seen.samples,
            neighbours: crowd,
        })
    }

    /// Lets clients and neighbours work, with the time that is added to a hop.
    fn at_work(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        workload: &Workload,
        clients: &dyn Load,
    ) -> Result<(Seen, Option<Crowd>), RunError> {
        if self.options.added.is_some() {
            stand.testbed.add(self.options.added).map_err(RunError::Placement)?;
        }
        std::thread::sleep(REST);
        let directory =
            Scratch::new("neighbours").map_err(RunError::io("cannot make a directory".into()))?;
        let beside = self.neighbours(stand, cell, workload, &directory);
        let ids =
            beside.as_ref().ok().and_then(Option::as_ref).map(AtWork::ids).unwrap_or_default();
        let mut seen = self.load(&stand.testbed, clients, workload.block_bytes, ids)?;
        let beside = match beside {
            Ok(at_work) => at_work.map(AtWork::end),
            Err(why) => {
                seen.got.failure.get_or_insert(why.to_string());
                None
            }
        };
        drop(directory);
        if let Some(ended) = &beside {
            seen.got.failure = seen.got.failure.or_else(|| ended.failure.clone());
            // Device reads are for clients and neighbours together, so the neighbours' reads count
            // too.
            let seconds = f64::from(self.suite.seconds);
            seen.got.neighbours_read_bytes = (ended.read_bytes_per_s * seconds) as u64;
        }
        if self.options.added.is_some() {
            stand.testbed.add(None).map_err(RunError::Placement)?;
        }
        self.interrupted()?;
        Ok((seen, beside.map(|ended| ended.crowd)))
    }

    /// What was seen that tells whether the run is valid.
    fn evidence(&self, cell: &Cell, workload: &Workload, seen: &Seen) -> Evidence {
        let Seen { got, before, after, .. } = seen;
        let databases = |name| after.stages.as_ref().map_or(0, |osds| osds.level("bluefs", name));
        let osds = cell.disks * cell.osds_per_disk;
        Evidence {
            osds,
            osds_answering: before.osds.min(after.osds),
            unnamed_cache_bytes: self.suite.ground.osd_cache_bytes * u64::from(osds),
            read_bytes: got.measured.reads.ios * workload.block_bytes + got.neighbours_read_bytes,
            device_read_bytes: seen.devices().values().map(|counts| counts.read_bytes).sum(),
            // A store with one device reports no data on a slower one.
            spilled_bytes: databases("slow_used_bytes"),
            database_bytes: databases("db_used_bytes"),
            requests: got.measured.all().ios,
            client_thread: seen.mean(|sample| sample.busiest_client_percent) / 100.0,
            busy: seen.mean(|sample| sample.busy_percent) / 100.0,
            failure: got.failure.clone(),
            out_of_place: after.out_of_place.clone(),
            ..Evidence::default()
        }
    }

    /// The load of a cell's clients, on what is in front of the cluster now.
    pub(super) fn clients(&self, stand: &Stand, cell: &Cell, workload: &Workload) -> Box<dyn Load> {
        let image = |client: u32| {
            let (image, written) = &stand.images[client as usize];
            (stand.testbed.endpoint(image), *written)
        };
        let reach = Reach { image: &image, pool: &|client| stand.testbed.entrance(client) };
        load::of(&self.suite, workload, cell.depth, cell.clients, &reach)
    }

    /// Bytes of its image that a neighbour uses: as many as the workload's set has if clients have
    /// images, otherwise all.
    pub(super) fn neighbours_set_bytes(&self, workload: &Workload) -> u64 {
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

    /// Runs all clients side by side. Reads all counters when the last client's ramp ends and when
    /// the first client's time is over: counters and clients share this window. `beside` are the
    /// process ids of neighbours.
    pub(super) fn load(
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
        let scratch =
            Scratch::new("clients").map_err(RunError::io("cannot make a directory".into()))?;
        let (mut got, mut running) = (Got::default(), Vec::new());
        for client in 0..clients.clients() {
            got.commands.push(clients.command(client));
            match clients.start(client, scratch.path()) {
                Ok(client) => running.push(client),
                Err(error) => got.failure = Some(error.to_string()),
            }
        }
        let limit =
            Duration::from_secs(u64::from(self.suite.seconds + self.suite.ramp_s)) + PATIENCE;
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
            let is_over = running.iter_mut().any(|client| client.has_ended())
                || self.stop_reason(deadline).is_some();
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

/// The outcome of a load.
pub(super) struct Seen {
    got: Got,
    /// Taken when the last client's ramp had ended.
    before: Look,
    /// Taken when the first client's time was over.
    after: Look,
    /// Samples between the two.
    samples: Vec<Sample>,
}

impl Seen {
    /// Blocks that caches missed for each request of the clients. `None` if the load failed.
    pub(super) fn missed_per_request(&self) -> Option<f64> {
        let missed = missed_blocks(&self.after.placements) - missed_blocks(&self.before.placements);
        let requests = self.got.measured.all().ios.max(1);
        self.got.failure.is_none().then(|| missed / requests as f64)
    }

    /// Mean of a figure of the samples.
    fn mean(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        self.samples.iter().map(of).sum::<f64>() / self.samples.len().max(1) as f64
    }

    /// What each device did meanwhile.
    fn devices(&self) -> BTreeMap<String, Counts> {
        let earlier = |name| self.before.devices.get(name).copied().unwrap_or_default();
        let devices = self.after.devices.iter();
        devices.map(|(name, now)| (name.clone(), now.since(earlier(name)))).collect()
    }

    /// Time of requests in each of Ceph's stages.
    fn stages(&self) -> Vec<Stage> {
        let (before, after) = (&self.before, &self.after);
        let both =
            after.stages.as_ref().zip(before.stages.as_ref()).filter(|_| after.osds == before.osds);
        both.map(|(after, before)| after.since(before)).unwrap_or_default()
    }

    /// Processor time per request in microseconds, by kind of process.
    fn cpu_us_per_io(&self, iops: f64) -> BTreeMap<String, f64> {
        let percent = |class| {
            self.mean(|sample| sample.classes.get(&class).map_or(0.0, |usage| usage.cpu_percent))
        };
        let used = Class::ALL.into_iter().map(|class| (class, percent(class) / 100.0));
        let used = used.filter(|(_, used)| *used > 0.0 && iops > 0.0);
        used.map(|(class, used)| (class.name().into(), used * 1e6 / iops)).collect()
    }

    /// What was counted. `iops` are the clients' requests per second if nobody worked beside the
    /// clients. The requests of neighbours cannot be told apart in Ceph's stages and in the time of
    /// processors, which are then left out.
    fn counted(&self, iops: Option<f64>) -> Counted {
        let transits = self.after.transit.zip(self.before.transit);
        Counted {
            stages: iops.map(|_| self.stages()).unwrap_or_default(),
            transit_us: transits.and_then(|(after, before)| after.mean_us(before)),
            devices: self.devices(),
            cpu_us_per_io: iops.map(|iops| self.cpu_us_per_io(iops)).unwrap_or_default(),
            placement: differences(&self.before.placements, &self.after.placements),
        }
    }
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
    let Some(rates) =
        rates.into_iter().collect::<Option<Vec<_>>>().filter(|rates| !rates.is_empty())
    else {
        return Vec::new();
    };
    let requests = |at: usize, side: usize| {
        (rates.iter().map(|of_client| of_client[at][side]).sum::<f64>() * window.as_secs_f64())
            .round() as u64
    };
    let of = |(at, &dirty_bytes): (usize, &u64)| {
        let writes = requests(at, 1);
        Window {
            requests: requests(at, 0) + writes,
            written_bytes: writes * block_bytes,
            dirty_bytes,
        }
    };
    dirty.iter().enumerate().map(of).collect()
}

/// Bytes that placements have not written back, in total.
fn dirty_bytes(counters: &Map<String, Value>) -> u64 {
    let all = counters.values().filter_map(Value::as_object).flatten();
    all.filter(|(name, _)| name.ends_with("dirty_bytes"))
        .filter_map(|(_, level)| level.as_u64())
        .sum()
}

/// Flushes of clients that arrived at the cache on the hypervisor or, without such a cache, at the
/// iSCSI gateway. `None` if neither counts them.
fn flushes(counted: &Value) -> Option<u64> {
    let counted = counted.as_object()?;
    let on_host =
        counted.iter().find(|(name, _)| words::on_host(name)).map(|(_, counters)| counters);
    // QEMU's own rbd driver makes librbd flush with reads too, so that flushes counted there would
    // prove nothing.
    let gateway = || counted.get(Access::Iscsi.name());
    on_host.or_else(gateway)?["flushes"].as_u64()
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
    fn a_flush_arrives_at_the_cache_or_at_the_end_of_the_path_if_somebody_counts() {
        assert_eq!(
            flushes(&json!({ "osd-tidepool": { "flushes": 7 } })),
            None,
            "those are the OSDs'"
        );
        assert_eq!(
            flushes(&json!({ "iscsi": { "flushes": 3 }, "osd-tidepool": { "flushes": 7 } })),
            Some(3)
        );
        assert_eq!(
            flushes(&json!({ "iscsi": { "flushes": 3 }, "host-tidepool": { "flushes": 5 } })),
            Some(5)
        );
        assert_eq!(flushes(&Value::Null), None);
    }
}
