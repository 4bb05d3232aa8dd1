//! Events under load, each on its own cluster.

mod times;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::journal::Journal;
use super::measure::REST;
use super::schedule::{Block, Clock, Shape, Step};
use super::stand::Stand;
use super::{ATTEMPTS, Progress, RunError, Runner};
use crate::collect::{Collector, Sample, Sources};
use crate::events::client::{self, Client, Load};
use crate::events::course;
use crate::events::ledger::{Kept, Region, compare};
use crate::placement::{Arrangement, PlacementError};
use crate::results::{Acknowledged, EventCluster, EventRun, EventWindow, NotRun, Results};
use crate::suite::{Cell, Event, Happening, Suite, Workload};
use crate::testbed::Testbed;
use crate::words;
use tidepool_cluster::ceph::Health;
use tidepool_cluster::fio::{Endpoint, Pattern};
use tidepool_cluster::random::Random;
use times::{SLACK_S, Times, points, windows};

/// Seconds to wait for requests that were due at the end.
const GRACE_S: f64 = 5.0;
/// Seconds before an event at which placements and cluster are checked.
const LOOK_S: f64 = 1.0;
/// Time between two checks whether something is to be done.
const POLL: Duration = Duration::from_millis(20);
/// Time between two requests for the cluster's health.
const HEALTH: Duration = Duration::from_secs(1);
/// Time limit for reading all images back.
const COMPARE_LIMIT: Duration = Duration::from_secs(120);
/// A placement bears the load if half of its requests take at most this many microseconds before
/// the event.
const BORNE_US_MAX: f64 = 500_000.0;
/// Number of the OSD that goes out or stops.
const OSD: u32 = 0;

/// An event that is due, with its cell and the number of its repeat.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Due {
    pub(super) event: Event,
    pub(super) cell: Cell,
    pub(super) repeat: u32,
}

/// All events of a suite, in the order of the seed, repeat by repeat.
pub(super) fn due(suite: &Suite, seed: u64, is_done: &dyn Fn(&Due) -> bool) -> Vec<Due> {
    let mut random = Random::new(seed);
    let mut all = Vec::new();
    for repeat in 1..=suite.repeats {
        let happenings = suite.happenings().into_iter();
        let mut round: Vec<Due> =
            happenings.map(|(event, cell)| Due { event: event.clone(), cell, repeat }).collect();
        random.shuffle(&mut round);
        all.extend(round);
    }
    // Left out only now, so that the other events keep the order of the seed.
    all.retain(|due| !is_done(due));
    all
}

/// The events that are still due. `not_run` says what is not possible now; the list in `results`
/// also has entries of earlier starts.
fn left(suite: &Suite, not_run: &[NotRun], results: &Results) -> Vec<Due> {
    let known: Vec<(String, Cell, u32)> = results.events.iter().map(key).collect();
    let is_done = |due: &Due| {
        super::is_not_run(suite, not_run, &due.cell)
            || super::size::is_left_out(results, &due.cell)
            || known.contains(&(due.event.name.clone(), due.cell.clone(), due.repeat))
    };
    due(suite, results.seed, &is_done)
}

/// What was seen in addition to the clients' requests.
#[derive(Default)]
struct Seen {
    /// What was done, in words.
    what: String,
    /// Health of the cluster and when it was read, in seconds since the beginning of the load, like
    /// all times here.
    health: Vec<(f64, Health)>,
    /// Times of the last deep scrub of each placement group, before the event and since.
    scrubs: Option<BTreeMap<String, String>>,
    scrubs_since: Vec<(f64, BTreeMap<String, String>)>,
    back_s: Option<f64>,
    /// Why the event run does not count.
    faults: Vec<String>,
}

impl Seen {
    /// Makes all times relative to `event_s`.
    fn count_from(&mut self, event_s: f64) {
        self.health.iter_mut().for_each(|(at_s, _)| *at_s -= event_s);
        self.scrubs_since.iter_mut().for_each(|(at_s, _)| *at_s -= event_s);
        self.back_s = self.back_s.map(|at_s| at_s - event_s);
    }

    /// What became of the cluster. All times are relative to the event already.
    fn cluster(&self, osds_ended: Vec<u32>, times: Times) -> EventCluster {
        EventCluster {
            osds_ended,
            osds_down: down(&self.health),
            recovery: course::recovery(&self.health, self.back_s, times.end() - times.ended),
            scrub: self.scrubs.as_ref().map(|before| course::scrub(before, &self.scrubs_since)),
        }
    }
}

impl Runner<'_> {
    /// Runs all events that are still due and are possible now.
    pub(super) fn events(
        &self,
        not_run: &[NotRun],
        journal: &mut Journal,
        clock: &mut Clock,
    ) -> Result<(), RunError> {
        for _ in 0..ATTEMPTS {
            self.failed.take();
            let due = left(&self.suite, not_run, &journal.results);
            for (at, found) in due.iter().enumerate() {
                self.interrupted()?;
                let left = due.len() - at;
                let Due { event, cell, repeat } = found;
                let what = format!("{} {}, repeat {repeat}", cell.placement, event.name);
                let total = self.suite.runs();
                let done = total.saturating_sub(left);
                let left_s = clock.left_s(left, 0)
                    + due[at..]
                        .iter()
                        .map(|due| f64::from(due.event.load_s(&self.suite)))
                        .sum::<f64>();
                (self.progress)(&Progress { done, total, left_s, what });
                let run = self.event(found, journal, clock);
                if let Some(run) = self.attempt(run)? {
                    journal.event(run)?;
                }
            }
        }
        match self.failed.take() {
            Some(failed) => Err(RunError::Failed(failed)),
            None => Ok(()),
        }
    }

    /// Runs an event on a new cluster.
    fn event(
        &self,
        due: &Due,
        journal: &mut Journal,
        clock: &mut Clock,
    ) -> Result<EventRun, RunError> {
        let Due { event, cell, repeat } = due;
        let arrangement = Arrangement::parse(&cell.placement).map_err(RunError::Suite)?;
        let start = Instant::now();
        let mut stand = self.stand_for(due, &arrangement, journal)?;
        clock.testbed(start.elapsed().as_secs_f64());
        let begun_s = self.begun.elapsed().as_secs_f64();
        stand.testbed.cluster_mut().wait_clean().map_err(placement)?;
        stand.testbed.emulate(true);
        std::thread::sleep(REST);
        let times = Times::of(&self.suite, event);
        let load = self.event_load(&stand, due, journal.results.seed, times)?;
        let collector = Collector::start(Sources::default());
        let (seen, clients) = client::run(&load, || {
            self.watch(&mut stand.testbed, event, &arrangement, load.begin, times)
        });
        let samples = collector.stop();
        let (times, mut seen) = seen?;
        self.interrupted()?;
        stand.testbed.emulate(false);
        seen.faults.extend(times.fault());
        seen.count_from(times.ended);
        let windows = windows(&clients, times);
        seen.faults.extend(not_borne(&windows));
        let osds_ended = stand.testbed.cluster().ended_osds();
        let dies = event.kind == Happening::SsdDies;
        if dies
            && stand
                .testbed
                .base(&arrangement)
                .is_none_or(|(_, device)| device.faults().refused() == 0)
        {
            seen.faults.push("nothing was asked of the device after it had died".into());
        }
        let (salvaged, given_back) = give_back(&mut stand.testbed, dies);
        self.interrupted()?;
        let acknowledged = self.acknowledged(&stand, &clients, given_back, times);
        self.interrupted()?;
        Ok(EventRun {
            event: event.name.clone(),
            cell: cell.clone(),
            repeat: *repeat,
            testbed: stand.id,
            durability: arrangement.durability(self.suite.ground.replicas, self.suite.access(cell)),
            begun_s,
            late_s: Some(times.began - times.due),
            took_s: Some(times.ended - times.began),
            gap_before_s: course::gap(&clients, (times.begin(), times.began)),
            gap_after_s: course::gap(&clients, (times.began, times.end())),
            acknowledged,
            cluster: seen.cluster(osds_ended, times),
            operator: dies.then(|| arrangement.mend().to_string()),
            salvaged,
            busy_percent: busy_percent(&samples),
            points: points(&clients, &seen.health, times),
            windows,
            what: seen.what,
            invalid: seen.faults,
        })
    }

    /// A new cluster with the placement of an event in place, and the caches as its workload needs
    /// them.
    fn stand_for(
        &self,
        due: &Due,
        arrangement: &Arrangement,
        journal: &mut Journal,
    ) -> Result<Stand, RunError> {
        let Due { cell, repeat, .. } = due;
        let step =
            Step { placement: cell.placement.clone(), repeat: *repeat, cells: vec![cell.clone()] };
        let shape = Shape::of(&self.suite, cell).map_err(RunError::Suite)?;
        let mut stand = self.stand(&Block { shape, steps: vec![step] }, journal)?;
        self.place(&mut stand, cell, self.path(cell)?, journal)?;
        self.prepare(&mut stand, cell, self.workload_of(cell), arrangement)?;
        Ok(stand)
    }

    fn workload_of(&self, cell: &Cell) -> &Workload {
        self.suite.workload(&cell.workload).expect("an event's workload is one of the suite's")
    }

    /// What clients do before and after an event. They begin in a moment.
    fn event_load(
        &self,
        stand: &Stand,
        due: &Due,
        seed: u64,
        times: Times,
    ) -> Result<Load, RunError> {
        let Due { event, cell, repeat } = due;
        let workload = self.workload_of(cell);
        Ok(Load {
            seed: seed ^ u64::from(*repeat),
            exports: exports(stand, cell)?,
            depth: cell.depth,
            block_bytes: workload.block_bytes,
            set_bytes: workload.set_bytes,
            read_percent: read_percent(workload),
            requests_per_s: event.requests_per_s,
            begin: Instant::now() + REST,
            seconds: times.end() + SLACK_S,
        })
    }

    /// Waits until the event is due, causes the event, and watches the cluster until the load ends.
    /// Returns the actual times.
    fn watch(
        &self,
        testbed: &mut Testbed,
        event: &Event,
        arrangement: &Arrangement,
        begin: Instant,
        mut times: Times,
    ) -> Result<(Times, Seen), RunError> {
        let now_s = || Instant::now().saturating_duration_since(begin).as_secs_f64();
        let mut seen = Seen::default();
        let mut next_health = begin;
        let (mut looked, mut happened) = (false, false);
        let mut is_back = times.back_after.is_none();
        if event.kind == Happening::DeepScrub {
            seen.scrubs = Some(testbed.cluster().deep_scrubs().map_err(placement)?);
        }
        loop {
            self.interrupted()?;
            if happened && now_s() >= times.end() + GRACE_S {
                return Ok((times, seen));
            }
            if !looked && now_s() >= times.due - LOOK_S {
                looked = true;
                // If the placement is not in place now, the event shows nothing about the
                // placement.
                seen.faults.extend(testbed.holds().err().map(|why| why.to_string()));
                if seen.health.last().is_none_or(|(_, health)| !health.is_clean()) {
                    seen.faults.push("the cluster was not clean before the event".into());
                }
            }
            if !happened && now_s() >= times.due {
                happened = true;
                times.began = now_s();
                seen.what = happen(testbed, event.kind, arrangement)?;
                times.ended = now_s();
            }
            if happened && !is_back && times.back().is_some_and(|back| now_s() >= back) {
                is_back = true;
                come_back(testbed, event.kind)?;
                seen.back_s = Some(now_s());
            }
            // Between the check and the event no command is sent that may take long to answer.
            if looked == happened && Instant::now() >= next_health && now_s() < times.end() {
                next_health = Instant::now() + HEALTH;
                let at_s = now_s();
                // If the monitor does not answer, the cluster's health is missing for that second.
                seen.health.extend(testbed.cluster().health().ok().map(|health| (at_s, health)));
                if event.kind == Happening::DeepScrub && happened {
                    let at_s = now_s();
                    seen.scrubs_since
                        .extend(testbed.cluster().deep_scrubs().ok().map(|of| (at_s, of)));
                }
            }
            std::thread::sleep(POLL);
        }
    }

    /// Compares the images in the cluster with the acknowledged writes of clients.
    fn acknowledged(
        &self,
        stand: &Stand,
        clients: &[Client],
        given_back: Result<(), PlacementError>,
        times: Times,
    ) -> Acknowledged {
        let regions = || clients.iter().flat_map(|client| &client.regions);
        let mut found = Acknowledged {
            writes: regions().map(Region::writes).sum(),
            overwritten: Some(regions().map(|region| region.overwritten_blocks(times.began)).sum()),
            wrong_reads: regions().map(Region::wrong_reads).sum(),
            ..Acknowledged::default()
        };
        let deadline = Instant::now() + COMPARE_LIMIT;
        let stop = || self.stop_reason(deadline);
        let kept = |(client, (image, _)): (&Client, &(String, u64))| {
            let compare = |image: &mut dyn std::io::Read| compare(&client.regions, image);
            stand.testbed.cluster().rbd_read(image, &stop, compare)
        };
        let all: Result<Vec<Kept>, String> = match given_back {
            Err(why) => {
                Err(format!("what is in front of the images did not give them back: {why}"))
            }
            Ok(()) => clients
                .iter()
                .zip(&stand.images)
                .map(|of| kept(of).map_err(|why| format!("an image could not be read: {why}")))
                .collect(),
        };
        match all {
            Ok(all) => {
                found.blocks = all.iter().map(|kept| kept.blocks).sum();
                found.lost = Some(all.iter().map(|kept| kept.lost).sum());
                found.lost = found.lost();
                found.not_known = found.why_not_known().map(String::from);
                let spans = all.iter().filter_map(|kept| kept.lost_from_to_s);
                let span = spans.reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)));
                found.lost_from_to_s =
                    span.map(|(from, to)| (from - times.ended, to - times.ended));
            }
            Err(why) => {
                found.blocks = regions().map(Region::acknowledged_blocks).sum();
                found.not_known = Some(why);
            }
        }
        found
    }
}

/// Gives the images back: what can be had of them if the SSD of the placement in front died, all of
/// them otherwise. Returns what was done after a death, and whether it succeeded.
fn give_back(testbed: &mut Testbed, dies: bool) -> (Option<String>, Result<(), PlacementError>) {
    if !dies {
        return (None, testbed.front(None).map(drop));
    }
    match testbed.salvage() {
        Ok(salvaged) => (salvaged, Ok(())),
        Err(error) => (None, Err(error)),
    }
}

/// Why the clients' load was more than the placement bears, from its windows. `None` if it was not.
fn not_borne(windows: &[EventWindow]) -> Option<String> {
    let before: Vec<&EventWindow> = windows.iter().filter(|window| window.begin_s < 0.0).collect();
    let bad: u64 = before.iter().map(|window| window.failed + window.unanswered).sum();
    if bad > 0 {
        return Some(format!("{bad} requests before the event failed, or were not answered"));
    }
    let is_borne = |window: &&EventWindow| window.p50_us.is_some_and(|us| us <= BORNE_US_MAX);
    let slow = before.iter().find(|window| !is_borne(window))?;
    let median = words::known(slow.p50_us);
    Some(format!(
        "the load was more than it bears: half of the requests took {median} before the event"
    ))
}

/// Identity of an event run.
fn key(run: &EventRun) -> (String, Cell, u32) {
    (run.event.clone(), run.cell.clone(), run.repeat)
}

fn placement(error: impl Into<PlacementError>) -> RunError {
    RunError::Placement(error.into())
}

/// The NBD export of each client.
fn exports(stand: &Stand, cell: &Cell) -> Result<Vec<(PathBuf, String)>, RunError> {
    let export = |(image, _): &(String, u64)| match stand.testbed.endpoint(image) {
        Endpoint::Nbd { socket, export } => Ok((socket, export)),
        _ => Err(RunError::Suite(format!("{} gives its clients no NBD export", cell.placement))),
    };
    stand.images.iter().take(cell.clients as usize).map(export).collect()
}

fn read_percent(workload: &Workload) -> u8 {
    match workload.pattern() {
        Some(Pattern::RandMixed(percent)) => percent,
        Some(Pattern::RandRead | Pattern::Read) => 100,
        _ => 0,
    }
}

/// Causes the event. Returns what was done, in words.
fn happen(
    testbed: &mut Testbed,
    kind: Happening,
    arrangement: &Arrangement,
) -> Result<String, RunError> {
    match kind {
        Happening::SsdDies => {
            let found = testbed.base(arrangement);
            let (name, device) =
                found.ok_or_else(|| RunError::Suite("there is no device that could die".into()))?;
            device.faults().disconnect();
            Ok(format!("{name} fails every request"))
        }
        Happening::OsdOut => {
            testbed.cluster().ceph(&["osd", "out", &OSD.to_string()]).map_err(placement)?;
            Ok(format!("`ceph osd out {OSD}`, and later `ceph osd in {OSD}`"))
        }
        Happening::OsdStops => {
            testbed.cluster_mut().osd_kill(OSD).map_err(placement)?;
            Ok(format!("OSD {OSD} is killed, and later started"))
        }
        Happening::DeepScrub => {
            let cluster = testbed.cluster();
            for flag in ["noscrub", "nodeep-scrub"] {
                cluster.ceph(&["osd", "unset", flag]).map_err(placement)?;
            }
            cluster.ceph(&["osd", "deep-scrub", "all"]).map_err(placement)?;
            Ok("`ceph osd deep-scrub all`".into())
        }
    }
}

/// Brings the OSD back that went out or stopped.
fn come_back(testbed: &mut Testbed, kind: Happening) -> Result<(), RunError> {
    match kind {
        Happening::OsdOut => {
            testbed.cluster().ceph(&["osd", "in", &OSD.to_string()]).map(drop).map_err(placement)
        }
        Happening::OsdStops => testbed.cluster_mut().osd_start(OSD).map_err(placement),
        Happening::SsdDies | Happening::DeepScrub => Ok(()),
    }
}

/// Largest number of OSDs down at one time since the event.
fn down(health: &[(f64, Health)]) -> Option<u32> {
    let since = health.iter().filter(|(at_s, _)| *at_s >= 0.0);
    since.map(|(_, health)| health.osds.saturating_sub(health.osds_up)).max()
}

fn busy_percent(samples: &[Sample]) -> f64 {
    samples.iter().map(|sample| sample.busy_percent).sum::<f64>() / samples.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn all_that_happens_does_so_in_the_order_of_the_seed_and_what_has_happened_is_left_out() {
        let suite = Suite::find("faults").expect("it comes with the program");
        let all = due(&suite, 4, &|_| false);
        assert_eq!(all.len(), suite.happenings().len() * suite.repeats as usize);
        assert_eq!(all, due(&suite, 4, &|_| false));
        assert_ne!(all, due(&suite, 5, &|_| false));
        assert!(
            all.is_sorted_by_key(|due| due.repeat),
            "each round is whole before the next one begins"
        );
        let (first, rest) = all.split_at(5);
        assert_eq!(due(&suite, 4, &|found| first.contains(found)), rest);
    }

    #[test]
    fn what_was_not_possible_at_an_earlier_start_happens_now_and_is_not_told_any_more() {
        let mut results = synthetic::events();
        let happened = results.events.clone();
        results.events.clear();
        let stale = ["host-tidepool", "filestore-journal"];
        results.not_run =
            stale.iter().map(|name| NotRun::all(*name, "fio is not installed")).collect();
        let suite = results.suite.clone();
        let names = |not_run: &[NotRun]| -> Vec<String> {
            left(&suite, not_run, &results).into_iter().map(|due| due.cell.placement).collect()
        };
        let all = names(&[]);
        assert_eq!(all.len(), suite.happenings().len() * suite.repeats as usize);
        let fresh = [results.not_run[1].clone()];
        assert!(
            names(&fresh).contains(&stale[0].into()) && !names(&fresh).contains(&stale[1].into())
        );
        // Events that have happened are not due, and their placement was possible.
        results.events = happened;
        let left = left(&suite, &[], &results);
        let is_due = |event: &str| {
            left.iter().any(|due| due.event.name == event && due.cell.placement == stale[0])
        };
        assert!(!is_due("ssd-dies") && !is_due("osd-out") && is_due("deep-scrub"));
        super::super::journal::forget_past(&mut results);
        let told: Vec<&str> =
            results.not_run.iter().map(|not_run| not_run.placement.as_str()).collect();
        assert_eq!(told, [stale[1]]);
    }

    #[test]
    fn what_was_seen_is_told_by_the_time_since_the_event() {
        let mut seen = Seen { back_s: Some(40.0), ..Seen::default() };
        seen.health = vec![(9.0, Health::default()), (11.5, Health::default())];
        seen.scrubs_since = vec![(12.0, BTreeMap::new())];
        seen.count_from(10.0);
        assert_eq!((seen.health[0].0, seen.health[1].0), (-1.0, 1.5));
        assert_eq!((seen.scrubs_since[0].0, seen.back_s), (2.0, Some(30.0)));
    }

    #[test]
    fn a_load_that_is_not_borne_makes_an_event_that_does_not_count() {
        let window = |begin_s: f64, p50_us, failed| EventWindow {
            begin_s,
            end_s: begin_s + 10.0,
            due: 400,
            failed,
            p50_us,
            ..EventWindow::default()
        };
        let good = [window(-10.0, Some(9e3), 0), window(0.0, None, 400)];
        assert_eq!(not_borne(&good), None, "what happens from the event on is what is measured");
        let slow = not_borne(&[window(-10.0, Some(2e6), 0)]).expect("it waited");
        assert!(slow.contains("2.0 s before the event"), "{slow}");
        let failing = not_borne(&[window(-10.0, Some(9e3), 3)]).expect("it failed");
        assert!(failing.contains("3 requests before the event"), "{failing}");
    }
}
