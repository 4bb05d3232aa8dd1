//! Synthetic results for tests, of the shape and about the size of real ones.

use std::collections::BTreeMap;

use serde_json::json;

use crate::collect::hops::{Hop, Stage};
use crate::collect::{Carried, Class, Sample, Usage};
use crate::placement::AGAIN;
use crate::results::{
    Acknowledged, Counted, Drained, Durability, EventCluster, EventPoint, EventRun, EventWindow,
    FORMAT, Frozen, NotRun, Recovery, Results, Run, Scrub, Testbed, WINDOWS, Window,
};
use crate::suite::{Cell, Suite};
use crate::testbed::HOST_SSDS;
use crate::words;
use tidepool_cluster::device::{Counts, preset};
use tidepool_cluster::fio::Figures;
use tidepool_cluster::machine::Machine;
use tidepool_cluster::random::Random;

/// Requests per second of a mixed workload, at queue depth 1 and at most, and the durability.
const SPEEDS: [(&str, f64, f64, Durability); 12] = [
    ("bluestore-colocated", 19.0, 96.0, Durability::OneCopy),
    ("bluestore-dbwal", 24.0, 130.0, Durability::OneCopy),
    ("filestore-colocated", 15.0, 70.0, Durability::OneCopy),
    ("filestore-journal", 25.0, 121.0, Durability::OneCopy),
    ("filestore-journal@ssd-sata-consumer", 14.0, 44.0, Durability::OneCopy),
    ("osd-passthrough", 18.5, 95.0, Durability::OneCopy),
    ("osd-tidepool", 290.0, 1_150.0, Durability::OneCopy),
    ("osd-on-ssd", 400.0, 2_000.0, Durability::OneCopy),
    ("ssd-raw", 1_900.0, 9_000.0, Durability::OneCopy),
    ("host-tidepool", 1_350.0, 4_900.0, Durability::OneCopy),
    ("host-tidepool-replicated", 1_020.0, 4_300.0, Durability::TwoCopies),
    ("librbd-cache", 48.0, 260.0, Durability::Volatile),
];

/// Durability of a placement, with one copy in the cluster.
fn durability(placement: &str) -> Durability {
    let known = SPEEDS.iter().find(|(name, ..)| *name == placement);
    known.map_or(Durability::OneCopy, |(.., durability)| *durability)
}

/// A placement of the suite that was not run.
pub(crate) const NOT_RUN: &str = "filestore-journal+host-tidepool";

/// A pseudorandom number from 0 to 1 that depends only on the arguments.
fn noise(text: &str, number: u64) -> f64 {
    let mut hash = 0xcbf2_9ce4_8422_2325 ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash ^= hash >> 29;
    hash = hash.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((hash >> 11) as f64) / (1u64 << 53) as f64
}

/// A run with this number of requests per second, on two disks with one OSD each, and one client.
pub(crate) fn run(placement: &str, workload: &str, depth: u32, repeat: u32, iops: f64) -> Run {
    let mean_us = f64::from(depth) / iops * 1e6;
    let figures = |iops: f64, mean_us: f64| Figures {
        iops,
        mean_us,
        p50_us: Some(mean_us * 0.8),
        p99_us: Some(mean_us * 4.0),
        p999_us: Some(mean_us * 7.0),
    };
    let spread = [(0.3, 10), (0.6, 25), (0.9, 30), (1.4, 20), (2.2, 10), (4.0, 4), (7.0, 1)];
    let bucket = |(part, percent): (f64, u64)| {
        ((mean_us * part * 1e3) as u64, ((iops * 0.6) as u64).saturating_mul(percent))
    };
    Run {
        cell: Cell {
            placement: placement.into(),
            disks: 2,
            osds_per_disk: 1,
            workload: workload.into(),
            depth,
            clients: 1,
            slowed_by: None,
            replicas: None,
            neighbours: None,
        },
        repeat,
        testbed: repeat,
        hypervisors: 1,
        durability: durability(placement),
        begun_s: f64::from(repeat) * 100.0,
        commands: vec![format!(
            "CEPH_CONF=/tmp/ceph.conf fio --name=bench --ioengine=rbd --iodepth={depth}"
        )],
        figures: figures(iops, mean_us),
        reads: Some(figures(iops * 0.8, mean_us)),
        writes: Some(figures(iops * 0.2, mean_us)),
        histogram: spread.into_iter().map(bucket).collect(),
        invalid: Vec::new(),
        lower_bound: None,
        samples: (1..=5).map(|second| sample(placement, second, iops)).collect(),
        counted: Counted {
            stages: stages(placement, mean_us),
            transit_us: None,
            devices: sample(placement, 1, iops).devices,
            cpu_us_per_io: [("osd".to_string(), 310.0), ("client".into(), 42.0)].into(),
            placement: if placement.contains("tidepool") {
                json!({placement: {"hit_blocks": 970, "miss_blocks": 30}})
            } else {
                json!({})
            },
        },
        drained: None,
        bench: None,
        windows: steady(iops),
        fio: Vec::new(),
        neighbours: None,
    }
}

/// Windows of twelve seconds that are all alike.
fn steady(iops: f64) -> Vec<Window> {
    let requests = (iops * 12.0) as u64;
    vec![Window { requests, written_bytes: requests.saturating_mul(819), dirty_bytes: 0 }; WINDOWS]
}

/// Makes a run's cache take in more than it writes back. `left_bytes` remain at the end.
pub(crate) fn absorb(run: &mut Run, left_bytes: u64) {
    for (window, number) in run.windows.iter_mut().zip(1..) {
        window.dirty_bytes = left_bytes * number / WINDOWS as u64;
    }
}

fn stages(placement: &str, mean_us: f64) -> Vec<Stage> {
    let stage = |hop, part: f64| Stage { hop, count: 1_000, mean_us: mean_us * part };
    let mut stages =
        vec![stage(Hop::OsdRead, 0.92), stage(Hop::OsdWrite, 0.95), stage(Hop::OsdQueue, 0.18)];
    if placement.starts_with("filestore") {
        stages.extend([stage(Hop::Journal, 0.55), stage(Hop::JournalQueue, 0.12)]);
    } else {
        stages.extend([
            stage(Hop::StoreRead, 0.61),
            stage(Hop::StorePrepare, 0.02),
            stage(Hop::DataDevice, 0.11),
            stage(Hop::KvQueue, 0.09),
            stage(Hop::KvCommit, 0.42),
        ]);
    }
    stages
}

fn sample(placement: &str, second: u64, iops: f64) -> Sample {
    let wave = |name: &str| 0.8 + 0.4 * noise(&format!("{placement}{name}"), second);
    let usage = |name: &str, cpu_percent: f64, mib: u64| Usage {
        cpu_percent: cpu_percent * wave(name),
        pss_bytes: mib << 20,
    };
    let mut classes: BTreeMap<Class, Usage> = [
        (Class::Mon, usage("mon", 2.0, 80)),
        (Class::Mgr, usage("mgr", 4.0, 240)),
        (Class::Osd, usage("osd", 35.0, 420)),
        (Class::Client, usage("client", 6.0, 60)),
        (Class::Lab, usage("lab", 12.0, 30)),
    ]
    .into();
    let device = |name: &str, reads: f64, writes: f64, us: f64| Counts {
        reads: (reads * wave(name)) as u64,
        read_bytes: (reads * wave(name) * 4096.0) as u64,
        writes: (writes * wave(name)) as u64,
        written_bytes: (writes * wave(name) * 8192.0) as u64,
        flushes: (writes / 4.0) as u64,
        read_us: (reads * us) as u64,
        write_us: (writes * us) as u64,
        ..Counts::default()
    };
    let mut devices: BTreeMap<String, Counts> = [
        ("disk0".into(), device("disk0", 22.0, 18.0, 21_000.0)),
        ("disk1".into(), device("disk1", 21.0, 19.0, 22_000.0)),
    ]
    .into();
    if !["colocated", "passthrough", "librbd-cache"].iter().any(|name| placement.ends_with(name)) {
        let name = if words::on_host(placement) { HOST_SSDS[0] } else { "node0-ssd" };
        devices.insert(name.into(), device(name, iops * 0.8, iops * 0.3, 410.0));
    }
    if words::without_copy(placement).is_some() {
        devices.insert(HOST_SSDS[1].into(), device(HOST_SSDS[1], 0.0, iops * 0.3, 430.0));
    }
    if placement.contains("tidepool") {
        classes.insert(Class::Tidepool, usage("tidepool", 25.0, 130));
    }
    let carried = |name: &str| Carried {
        received_bytes_per_s: iops * 4_500.0 * wave(name),
        sent_bytes_per_s: iops * 1_300.0 * wave(name),
    };
    Sample {
        busiest_client_percent: 20.0,
        at_ms: second * 1_000,
        busy_percent: 45.0 * wave("busy"),
        iowait_percent: 6.0 * wave("iowait"),
        memory_used_bytes: 2 << 30,
        classes,
        network: [("lo".to_string(), carried("lo"))].into(),
        devices,
    }
}

/// Results without runs, of a built-in suite.
pub(crate) fn empty() -> Results {
    let mut suite = Suite::find("which-side").expect("it comes with the program");
    // One client, and one copy so that durabilities differ.
    suite.ground.replicas = 1;
    suite.workloads.iter_mut().for_each(|workload| workload.clients = vec![1]);
    let frozen = |name: &str| {
        let spec = preset::find(name).expect("a class").spec;
        Frozen { spec, sha256: format!("{:064x}", name.len()) }
    };
    Results {
        format: FORMAT,
        suite_sha256: suite.sha256(),
        quick: false,
        seed: 7,
        command: "tidepool lab run which-side --seed 7".into(),
        begun: "2026-11-22T08:00:00Z".into(),
        machine: Machine {
            cpu: "Some Processor".into(),
            cpus: 2,
            memory_bytes: 8 << 30,
            kernel: "Linux 6.1".into(),
            system: "Debian 12".into(),
            filesystem: "ext4".into(),
            versions: vec!["fio-3.33".into(), "ceph version 16.2.15".into()],
            commit: "0123abc".into(),
        },
        devices: [&suite.ground.disk, &suite.ground.ssd, "ssd-sata-consumer"].map(frozen).into(),
        not_run: Vec::new(),
        not_run_sizes: Vec::new(),
        not_run_clients: Vec::new(),
        testbeds: (1..=suite.repeats)
            .map(|id| Testbed {
                id,
                disks: 2,
                osds_per_disk: 1,
                replicas: None,
                ceph: "ceph version 16.2.15 (0) pacific (stable)".into(),
                network: "a proxy between client and OSDs, 200 µs each way".into(),
                proofs: [("bluestore-dbwal".to_string(), json!({"bluefs_dedicated_db": "1"}))]
                    .into(),
            })
            .collect(),
        runs: Vec::new(),
        events: Vec::new(),
        suite,
    }
}

/// Results with runs of the deciding workload at one depth: placements, and the requests per second
/// of each repeat.
pub(crate) fn results(speeds: &[(&str, &[f64])]) -> Results {
    let mut results = empty();
    for (placement, repeats) in speeds {
        for (repeat, &iops) in (1..).zip(repeats.iter()) {
            results.runs.push(run(placement, "4k-80-20", 16, repeat, iops));
        }
    }
    results
}

/// An event without any effect: windows of 400 requests, one before it and six after it.
fn event(name: &str, placement: &str) -> EventRun {
    let window = |begin_s: f64, seconds: f64| EventWindow {
        begin_s,
        end_s: begin_s + seconds,
        due: (40.0 * seconds) as u64,
        failed: 0,
        unanswered: 0,
        p50_us: Some(9_000.0),
        p99_us: Some(9_000.0),
        p999_us: None,
        longest_us: Some(15_000.0),
    };
    let windows = (-1..6).map(|number| window(f64::from(number) * 10.0, 10.0));
    let points = (-10..60)
        .map(|second| EventPoint { clients: window(f64::from(second), 1.0), health: None });
    EventRun {
        event: name.into(),
        cell: Cell {
            placement: placement.into(),
            disks: 3,
            osds_per_disk: 1,
            workload: "4k-50-50".into(),
            depth: 4,
            clients: 2,
            slowed_by: None,
            replicas: None,
            neighbours: None,
        },
        repeat: 1,
        testbed: 1,
        durability: Durability::Replicated,
        begun_s: 30.0,
        what: "something happens".into(),
        late_s: Some(0.02),
        took_s: Some(0.0),
        windows: windows.collect(),
        points: points.collect(),
        gap_before_s: 0.1,
        gap_after_s: 0.2,
        acknowledged: Acknowledged {
            writes: 1_200,
            blocks: 1_000,
            lost: Some(0),
            ..Acknowledged::default()
        },
        cluster: EventCluster {
            osds_ended: Vec::new(),
            osds_down: Some(0),
            recovery: Recovery { watched_s: 60.0, ..Recovery::default() },
            scrub: None,
        },
        operator: None,
        salvaged: None,
        busy_percent: 40.0,
        invalid: Vec::new(),
    }
}

/// Results with events only.
pub(crate) fn events() -> Results {
    let mut results = empty();
    results.suite = Suite::find("faults").expect("it comes with the program").quick();
    let recovered = |left_s, clean_s, back_s| Recovery {
        left_clean_s: Some(left_s),
        clean_s,
        back_s,
        watched_s: 60.0,
        not_known: None,
    };
    let mut server = event("ssd-dies", "bluestore-dbwal");
    (server.gap_after_s, server.cluster.osds_ended, server.cluster.osds_down) =
        (12.0, vec![0], Some(1));
    server.cluster.recovery = recovered(3.0, Some(42.0), None);
    let mut under = event("ssd-dies", "osd-tidepool");
    under.acknowledged.lost = None;
    under.acknowledged.not_known =
        Some("an image could not be read: it did not end in time".into());
    under.cluster.recovery = recovered(3.0, None, None);
    let mut host = event("ssd-dies", "host-tidepool");
    host.durability = Durability::OneCopy;
    host.acknowledged.lost = Some(120);
    host.acknowledged.lost_from_to_s = Some((-4.0, 1.0));
    let all = host.windows.iter_mut().chain(host.points.iter_mut().map(|point| &mut point.clients));
    for window in all.filter(|window| window.begin_s >= 0.0) {
        window.failed = window.due;
        (window.p50_us, window.p99_us, window.longest_us) = (None, None, None);
    }
    let mut bad = event("ssd-dies", "bluestore-colocated");
    bad.invalid.push("the cluster was not clean before the event".into());
    let mut out = event("osd-out", "host-tidepool");
    out.windows[1].p99_us = Some(20_000.0);
    out.cluster.recovery = recovered(2.0, Some(42.0), Some(30.0));
    let mut scrub = event("deep-scrub", "bluestore-colocated");
    scrub.cluster.scrub = Some(Scrub { groups: 33, scrubbed: 20, finished_s: None });
    let mut replicated = event("ssd-dies", "host-tidepool-replicated");
    replicated.acknowledged.overwritten = Some(83);
    results.events = vec![scrub, server, under, host, bad, out, replicated];
    results
}

/// A copy of a run that keeps its figures only.
pub(crate) fn bare(run: Run) -> Run {
    let Run { cell, repeat, testbed, durability, figures, windows, .. } = run;
    let nothing = self::run("", "", 1, 1, 0.0);
    Run {
        cell,
        repeat,
        testbed,
        durability,
        figures,
        windows,
        samples: Vec::new(),
        counted: Counted {
            stages: Vec::new(),
            devices: BTreeMap::new(),
            cpu_us_per_io: BTreeMap::new(),
            ..nothing.counted
        },
        histogram: Vec::new(),
        ..nothing
    }
}

/// Standard deviations of the logarithm: between clusters, and between measurements on one cluster.
pub(crate) const SPREADS: (f64, f64) = (0.2, 0.1);

/// Normally distributed numbers (Box and Muller, 1958).
#[derive(Debug)]
pub(crate) struct Normal(Random);

impl Normal {
    pub(crate) fn new(seed: u64) -> Normal {
        Normal(Random::new(seed))
    }

    /// A number with mean 0 and this standard deviation.
    pub(crate) fn next(&mut self, deviation: f64) -> f64 {
        let mut uniform = || (self.0.word() >> 11) as f64 / (1u64 << 53) as f64;
        let (one, two) = (1.0 - uniform(), uniform());
        deviation * (-2.0 * one.ln()).sqrt() * (2.0 * std::f64::consts::PI * two).cos()
    }
}

/// Requests per second of a workload relative to the mixed workload, by placement.
fn pace(workload: &str, placement: &str) -> f64 {
    match (workload, placement) {
        ("4m-write", _) => 0.12,
        ("cold-scan", _) => 3.0,
        ("4k-80-20-large", "host-tidepool" | "host-tidepool-replicated") => 0.2,
        ("4k-80-20-large", "osd-tidepool") => 0.25,
        ("4k-randwrite" | "4k-write-qd1", "bluestore-dbwal" | "filestore-journal") => 2.1,
        _ => 1.0,
    }
}

/// Results of the whole suite, with an invalid run, a lower bound, a missing repeat and a placement
/// that was not run.
pub(crate) fn which_side() -> Results {
    let mut results = empty();
    results.suite.placements.push(NOT_RUN.into());
    for cell in results.suite.cells() {
        let wrapped = words::wrapped(&cell.placement).filter(|_| cell.placement.contains(AGAIN));
        let placement = wrapped.as_ref().unwrap_or(&cell.placement);
        let found = SPEEDS.iter().find(|(name, ..)| name == placement);
        let Some(&(placement, one, best, _)) = found else { continue };
        for repeat in 1..=results.suite.repeats {
            let depth = f64::from(cell.depth);
            let half = best / one;
            let speed = best * depth / (depth + half) * pace(&cell.workload, placement);
            let text = format!("{placement}{}{depth}", cell.workload);
            let iops = speed * (0.94 + 0.12 * noise(&text, u64::from(repeat)));
            let mut run = run(placement, &cell.workload, cell.depth, repeat, iops);
            run.cell = cell.clone();
            run.testbed +=
                100 * u32::from(cell.slowed_by.is_some()) + 200 * u32::from(wrapped.is_some());
            let workload = results.suite.workload(&cell.workload).expect("cells are of workloads");
            match workload.rw.as_str() {
                "read" | "randread" => run.writes = None,
                "write" | "randwrite" => run.reads = None,
                _ => {}
            }
            run.samples = (1..=60).map(|second| sample(placement, second, iops)).collect();
            if placement.contains("tidepool") {
                let dirty_bytes = (iops * 200_000.0) as u64;
                run.drained = Some(Drained {
                    dirty_bytes,
                    seconds: iops / 19.0,
                    hurried_bytes: dirty_bytes / 9,
                });
                run.counted.cpu_us_per_io.insert("tidepool".into(), 55.0);
                if placement.starts_with("host-") && cell.workload == results.suite.deciding {
                    absorb(&mut run, dirty_bytes);
                }
            }
            if placement == "host-tidepool" && cell.depth == 32 {
                run.lower_bound =
                    Some("the client's processor was busy for 97 % of the time".into());
            }
            if placement == "filestore-journal" && repeat == 2 && cell.depth == 4 {
                run.invalid.push("an OSD was marked down meanwhile".into());
            }
            if placement != "filestore-colocated" || repeat != 5 {
                results.runs.push(run);
            }
        }
    }
    let why = "mkfs.ext4 is not installed".to_string();
    results.not_run.push(NotRun::all(NOT_RUN, why));
    results
}
