//! The lab's measurements: what is not what was meant does not count, what was interrupted goes on,
//! and nothing is left.

mod access;
mod clients_in_guests;
mod faults;
mod guests;
mod instrument;
mod release;
mod tier;

use std::cell::{Cell, RefCell};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tidepool_cluster::Scratch;
use tidepool_lab::results::{Durability, Results, Run};
use tidepool_lab::run::{Options, Progress, RunError, run};
use tidepool_lab::suite::Suite;
use tidepool_testkit::one_at_a_time;

/// Longest wait for something that a running lab is to do.
const LIMIT: Duration = Duration::from_secs(120);

/// A suite in a file: small, and with these placements, lines for its ground, and workloads.
fn suite(directory: &Path, placements: &str, ground: &str, workloads: &[(&str, &str)]) -> PathBuf {
    let mut text = format!(
        "name = \"small\"\nquestion = \"does it count?\"\nplacements = [{placements}]\nbaseline = \"bluestore-colocated\"\n\
         deciding = \"{}\"\nrepeats = 1\nseconds = 2\nramp_s = 0\n[ground]\ndisk = \"ssd-sata-plp\"\ndisks = [2]\n\
         osds_per_disk = [1]\ndisk_bytes = 8589934592\nssd = \"nvme\"\nssd_bytes = 1073741824\nslowed_by = 16\n\
         servers = 1\ndelay_us = 10\nimage_bytes = 268435456\n{ground}\n",
        workloads[0].0
    );
    for (name, lines) in workloads {
        text.push_str(&format!(
            "[[workload]]\nname = \"{name}\"\ntitle = \"{name}\"\nblock_bytes = 4096\n{}caches = \"warm\"\n{lines}\n",
            if lines.contains("depth = ") { "" } else { "depth = [8]\n" }
        ));
    }
    let path = directory.join("small.toml");
    fs::write(&path, text).expect("a file");
    path
}

fn options<'a>(directory: &Path, suite: &Path, stop: &'a AtomicBool) -> Options<'a> {
    Options {
        suite: Suite::find(&suite.to_string_lossy()).expect("a suite"),
        quick: true,
        seed: 1,
        command: String::new(),
        program: tidepool_testkit::daemon::tidepool().expect("the program").into(),
        commit: tidepool_cluster::machine::commit_here(),
        parent: directory.into(),
        out: directory.join("results.json"),
        restart: false,
        stop,
        release: None,
        unfilled: false,
        added: None,
    }
}

fn found<'a>(results: &'a Results, placement: &str, workload: &str) -> &'a Run {
    let of = |run: &&Run| run.cell.placement == placement && run.cell.workload == workload;
    results.runs.iter().find(of).unwrap_or_else(|| panic!("{placement} {workload} was measured"))
}

/// Why a run does not count, as one text.
fn faults(run: &Run) -> String {
    run.invalid.join("; ")
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn unwritten_images_and_dead_osds_make_runs_that_do_not_count() {
    let scratch = Scratch::new("lab-runs").expect("a directory");
    let set = "set_bytes = 268435456";
    let suite = suite(
        scratch.path(),
        "\"bluestore-colocated\"",
        "replicas = 2\nosd_cache_bytes = 67108864",
        &[
            ("read", &format!("rw = \"randread\"\n{set}")),
            ("write", &format!("rw = \"randwrite\"\n{set}")),
        ],
    );
    let stop = AtomicBool::new(false);
    let options = Options { unfilled: true, ..options(scratch.path(), &suite, &stop) };
    // An OSD dies before the run that writes.
    let kill = |progress: &Progress| {
        if progress.what.contains(" write ") {
            // Other clusters run beside this one.
            let osd = child_in(scratch.path(), "ceph-osd", "").expect("an OSD");
            rustix::process::kill_process(osd, rustix::process::Signal::KILL).expect("it is ours");
        }
    };
    let results = run(options, &kill).expect("it runs to its end");
    let read = found(&results, "bluestore-colocated", "read");
    assert!(faults(read).contains("only 0 were ever written"), "{}", faults(read));
    let write = found(&results, "bluestore-colocated", "write");
    assert!(faults(write).contains("1 of 2 OSDs did not answer"), "{}", faults(write));
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn sets_inside_a_cache_that_nobody_named_and_saturated_clients_are_marked() {
    // Two copies part when nobody answers for a moment: the other test with them does not run while
    // this one keeps all processors busy.
    let _turn = one_at_a_time();
    let scratch = Scratch::new("lab-runs").expect("a directory");
    let suite = suite(
        scratch.path(),
        "\"bluestore-colocated\", \"librbd-cache\", \"osd-tidepool\", \"host-tidepool\", \"host-tidepool-replicated\"",
        "replicas = 1\nosd_cache_bytes = 67108864",
        &[
            (
                "mixed",
                "rw = \"randrw\"\nread_percent = 80\nset_bytes = 268435456\nplacements = [\"bluestore-colocated\", \"osd-tidepool\", \"host-tidepool\", \"host-tidepool-replicated\"]",
            ),
            (
                "small",
                "rw = \"randread\"\nset_bytes = 67108864\nplacements = [\"bluestore-colocated\"]",
            ),
            ("memory", "rw = \"randread\"\nset_bytes = 1048576\nplacements = [\"librbd-cache\"]"),
        ],
    );
    let stop = AtomicBool::new(false);
    // Somebody else keeps all processors busy from when that begins until something else does.
    let busy = Arc::new(AtomicBool::new(false));
    let others = |progress: &Progress| {
        let memory = progress.what.contains(" memory ");
        if !busy.swap(memory, Ordering::Relaxed) && memory {
            burn_while(&busy);
        }
    };
    let results = run(options(scratch.path(), &suite, &stop), &others);
    busy.store(false, Ordering::Relaxed);
    let results = results.expect("it runs to its end");
    let small = found(&results, "bluestore-colocated", "small");
    assert!(faults(small).contains("that the placement does not name"), "{}", faults(small));
    let memory = found(&results, "librbd-cache", "memory");
    assert_eq!(faults(memory), "", "a cache in memory is what is measured there");
    let bound = memory.lower_bound.as_deref().unwrap_or_default();
    assert!(bound.contains("saturated"), "{:?} {:?}", memory.figures, memory.samples);
    // A hit in memory takes no part of the time that a device does.
    let direct = found(&results, "bluestore-colocated", "mixed");
    let median_us = |run: &Run| run.figures.p50_us.expect("fio tells percentiles");
    assert!(
        median_us(memory) * 2.0 < median_us(direct),
        "{:?} {:?}",
        memory.figures,
        direct.figures
    );
    for placement in
        ["bluestore-colocated", "osd-tidepool", "host-tidepool", "host-tidepool-replicated"]
    {
        let mixed = found(&results, placement, "mixed");
        assert_eq!(faults(mixed), "", "{placement}");
        let (reads, writes) =
            (mixed.reads.expect("reads").iops, mixed.writes.expect("writes").iops);
        assert!((3.0..5.0).contains(&(reads / writes)), "{placement}: {reads} and {writes}");
        assert!(mixed.samples.len() >= 2 && !mixed.histogram.is_empty(), "{placement}");
    }
    for placement in ["osd-tidepool", "host-tidepool", "host-tidepool-replicated"] {
        let cached = &found(&results, placement, "mixed").counted.placement[placement];
        assert!(
            cached["hit_blocks"].as_u64() > cached["miss_blocks"].as_u64(),
            "it was warm: {cached}"
        );
    }
    assert_eq!(results.not_run, []);
    let proven =
        |name: &str| results.testbeds.iter().any(|testbed| testbed.proofs.contains_key(name));
    assert!(proven("host-tidepool") && proven("librbd-cache"), "{:?}", results.testbeds);
    // What is there is not thrown away by a second start.
    let again = run(options(scratch.path(), &suite, &stop), &|_| ());
    assert!(matches!(again, Err(RunError::Finished(_))), "{again:?}");
    assert_no_traces(scratch.path());
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn rados_bench_and_the_counters_of_devices_see_one_window() {
    let scratch = Scratch::new("lab-runs").expect("a directory");
    let tool = "tool = \"rados-bench\"\ndepth = [4]\nclients = [2]";
    let workloads =
        [("write", "write", 0), ("rand", "randread", 268_435_456), ("again", "write", 268_435_456)];
    let lines = workloads.map(|(_, rw, set)| format!("rw = \"{rw}\"\nset_bytes = {set}\n{tool}"));
    let named: Vec<(&str, &str)> =
        workloads.iter().zip(&lines).map(|((name, ..), lines)| (*name, lines.as_str())).collect();
    let ground = "replicas = 1\nosd_cache_bytes = 16777216";
    let path = suite(scratch.path(), "\"bluestore-colocated\"", ground, &named);
    let text = fs::read_to_string(&path).expect("a file");
    let text = text.replace("block_bytes = 4096", "block_bytes = 1048576");
    fs::write(&path, text.replace("seconds = 2\nramp_s = 0", "seconds = 5\nramp_s = 2"))
        .expect("a file");
    let stop = AtomicBool::new(false);
    let results = run(options(scratch.path(), &path, &stop), &|_| ()).expect("it runs to its end");
    for (workload, rw, _) in workloads {
        let run = found(&results, "bluestore-colocated", workload);
        assert_eq!(faults(run), "", "{workload}");
        assert_eq!(
            (run.commands.len(), run.windows.len(), run.figures.p99_us),
            (2, 5, None),
            "{workload}"
        );
        let bench = run.bench.expect("what it tells");
        let rate = bench.bytes_per_s;
        assert!(rate.min <= rate.mean && rate.mean <= rate.max, "{bench:?}");
        assert!(
            (rate.mean / (run.figures.iops * 1_048_576.0) - 1.0).abs() < 0.1,
            "{bench:?} {:?}",
            run.figures
        );
        // What clients did in the window the disks did in it, and with it only little else.
        let on_disks: u64 = run
            .counted
            .devices
            .values()
            .map(|counts| if rw == "write" { counts.written_bytes } else { counts.read_bytes })
            .sum();
        let part = on_disks as f64 / (rate.mean * 5.0);
        assert!((0.85..1.3).contains(&part), "{workload}: {part} {:?}", run.counted.devices);
    }
    assert_no_traces(scratch.path());
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn neighbours_and_other_copies_stand_beside_and_neighbours_are_in_no_figure_of_the_clients() {
    let _turn = one_at_a_time();
    let scratch = Scratch::new("lab-runs").expect("a directory");
    let ground = "replicas = 1\nreplicas_beside = [2]\nneighbours_beside = [\"2:20\"]\nosd_cache_bytes = 16777216";
    let placements = "\"bluestore-colocated\", \"host-tidepool\"";
    let lines = "rw = \"randrw\"\nread_percent = 80\nset_bytes = 268435456";
    let suite = suite(scratch.path(), placements, ground, &[("mixed", lines)]);
    let stop = AtomicBool::new(false);
    let results = run(options(scratch.path(), &suite, &stop), &|_| ()).expect("it runs to its end");
    for placement in ["bluestore-colocated", "host-tidepool"] {
        let at = |wanted: &dyn Fn(&Run) -> bool| {
            let of = |run: &&Run| run.cell.placement == placement && wanted(run);
            results.runs.iter().find(of).unwrap_or_else(|| panic!("{placement} was measured"))
        };
        let alone = at(&|run| !run.cell.is_beside());
        let copies = at(&|run| run.cell.replicas == Some(2));
        let crowd = at(&|run| run.cell.neighbours.is_some());
        for run in [alone, copies, crowd] {
            assert_eq!(faults(run), "", "{placement} {:?}", run.cell);
        }
        assert!(alone.neighbours.is_none() && copies.neighbours.is_none());
        let told = crowd.neighbours.as_ref().expect("they are told");
        let iops = told.figures.expect("they have worked").iops;
        assert!((8.0..=44.0).contains(&iops), "two of at most twenty: {told:?}");
        let counted = &crowd.counted;
        assert!(
            counted.stages.is_empty() && counted.cpu_us_per_io.is_empty(),
            "nobody tells them apart"
        );
        assert_eq!(crowd.commands.len(), 1, "the clients' alone");
        assert_eq!(alone.testbed, crowd.testbed, "on the same cluster");
        assert_ne!(alone.testbed, copies.testbed);
        let wanted =
            if placement == "host-tidepool" { Durability::OneCopy } else { Durability::Replicated };
        assert_eq!((alone.durability, copies.durability), (Durability::OneCopy, wanted));
    }
    assert_no_traces(scratch.path());
}

/// Keeps all processors busy as long as `busy` is set.
fn burn_while(busy: &Arc<AtomicBool>) {
    let processors = std::thread::available_parallelism().expect("a number").get();
    for _ in 0..processors {
        let busy = Arc::clone(busy);
        std::thread::spawn(move || while busy.load(Ordering::Relaxed) {});
    }
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn a_second_copy_is_on_another_ssd_and_a_measurement_without_it_does_not_count() {
    let _turn = one_at_a_time();
    for servers in [0, 1] {
        let scratch = Scratch::new("lab-runs").expect("a directory");
        let workloads =
            ["a", "b", "c"].map(|name| (name, "rw = \"randwrite\"\nset_bytes = 67108864"));
        let placements = "\"bluestore-colocated\", \"host-tidepool-replicated\"";
        let path = suite(
            scratch.path(),
            placements,
            "replicas = 1\nosd_cache_bytes = 16777216",
            &workloads,
        );
        let text = fs::read_to_string(&path).expect("a file");
        fs::write(&path, text.replace("servers = 1", &format!("servers = {servers}")))
            .expect("a file");
        let stop = AtomicBool::new(false);
        let (measured, lost) = (Cell::new(0), RefCell::new(String::new()));
        // The second hypervisor dies in the middle of the second measurement.
        let kill = |progress: &Progress| {
            if !progress.what.starts_with("host-tidepool-replicated ") {
                return;
            }
            measured.set(measured.get() + 1);
            if measured.get() == 2 {
                *lost.borrow_mut() = progress.what.split(' ').nth(1).expect("a workload").into();
                let directory = scratch.path().to_owned();
                std::thread::spawn(move || {
                    // Before that it would be put in place anew.
                    while child_in(&directory, "fio", "randwrite").is_none() {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    std::thread::sleep(Duration::from_millis(500));
                    let peer =
                        child_in(&directory, "tidepool", "peer.cache").expect("a second daemon");
                    rustix::process::kill_process(peer, rustix::process::Signal::KILL)
                        .expect("it is ours");
                });
            }
        };
        let results =
            run(options(scratch.path(), &path, &stop), &kill).expect("it runs to its end");
        for (workload, _) in workloads {
            let run = found(&results, "host-tidepool-replicated", workload);
            if *lost.borrow() == workload {
                assert!(faults(run).contains("is not in place"), "{}", faults(run));
                continue;
            }
            assert_eq!(faults(run), "", "{workload}");
            assert_eq!(run.durability, Durability::TwoCopies);
            let counted = &run.counted.placement["host-tidepool-replicated"];
            assert_eq!(counted["partings"], 0, "{counted}");
            let written = |ssd: &str| run.counted.devices[ssd].written_bytes;
            let bytes = counted["written_bytes"].as_u64().expect("bytes");
            assert!(
                bytes > 0 && written("client-ssd") >= bytes && written("peer-ssd") >= bytes,
                "{:?}",
                run.counted.devices
            );
            let sent = run.samples.iter().filter_map(|sample| sample.network.get("peer"));
            let received: f64 = sent.map(|peer| peer.received_bytes_per_s).sum();
            assert_eq!(received > 0.0, servers > 0, "it goes past the switch, if there is one");
        }
        let proof = results
            .testbeds
            .iter()
            .find_map(|testbed| testbed.proofs.get("host-tidepool-replicated"));
        let proof = proof.expect("a proof");
        let [host, peer] = [0, 1].map(|number| &proof["hosts"][number]);
        assert_eq!(
            (&proof["copies_in_sync"], &host["volumes"][0]["mode"]),
            (&json!(true), &json!("write-back"))
        );
        assert_eq!(peer["volumes"][0]["state"], "replica", "{proof}");
        assert_ne!(peer["cache"]["path"], host["cache"]["path"], "{proof}");
        assert_no_traces(scratch.path());
    }
}

#[test]
#[ignore = "it measures, for minutes: make long"]
fn a_run_that_is_killed_or_interrupted_goes_on_and_leaves_nothing() {
    let scratch = Scratch::new("lab-runs").expect("a directory");
    let workloads = ["a", "b", "c"].map(|name| (name, "rw = \"randwrite\"\nset_bytes = 67108864"));
    // FileStore has a filesystem on a loop device: more to leave behind than any other.
    let placements = "\"bluestore-colocated\", \"filestore-journal\"";
    let suite =
        suite(scratch.path(), placements, "replicas = 1\nosd_cache_bytes = 16777216", &workloads);
    let (out, part) = (scratch.join("out.json"), scratch.join("out.json.part"));
    let work = scratch.join("w");
    fs::create_dir(&work).expect("a directory");
    let lab = |words: &[&str]| lab_run(&suite, &out, &work, words);
    let first = start(lab(&[]), |_| lines(&part, "run") >= 1);
    let dead = end(first, rustix::process::Signal::KILL);
    assert!(!dead.status.success());
    let begun =
        |at: usize| serde_json::from_str::<Value>(nth_run(&part, at).as_str()).expect("a line");
    let before = begun(0);

    let second = start(lab(&[]), |_| lines(&part, "run") >= 3);
    let interrupted = end(second, rustix::process::Signal::INT);
    let says = String::from_utf8_lossy(&interrupted.stderr).into_owned();
    assert_eq!(interrupted.status.code(), Some(1), "{says}");
    assert!(says.contains("goes on where it was"), "{says}");
    assert_no_traces(&work);

    let third = lab(&["--format", "json"]).output().expect("it runs");
    assert!(third.status.success(), "{}", String::from_utf8_lossy(&third.stderr));
    let results: Results = serde_json::from_slice(&third.stdout).expect("results");
    assert_eq!(results.runs.len(), results.suite.cells().len());
    assert_eq!(serde_json::to_value(&results.runs[0]).expect("JSON"), before["run"], "it was kept");
    assert!(out.exists() && !part.exists());
    assert_no_traces(&work);
}

/// `lab run` of a suite, with a directory for all that it makes.
fn lab_run(suite: &Path, out: &Path, work: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(tidepool_testkit::daemon::tidepool().expect("the program"));
    command.args(["lab", "run"]).arg(suite).args(["--seed", "1", "--out"]).arg(out).args(words);
    command.env("TMPDIR", work).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts the lab in a process group of its own and waits until it has come so far.
fn start(mut command: Command, so_far: impl Fn(&Path) -> bool) -> Child {
    let mut child = command.process_group(0).spawn().expect("it starts");
    let begun = Instant::now();
    while !so_far(Path::new("")) {
        assert!(begun.elapsed() < LIMIT, "it does not get so far");
        if let Some(status) = child.try_wait().expect("a child") {
            let output = child.wait_with_output().expect("its output");
            panic!("it ended with {status}: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

fn end(child: Child, signal: rustix::process::Signal) -> Output {
    let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).expect("an id");
    rustix::process::kill_process(pid, signal).expect("it is ours");
    child.wait_with_output().expect("its output")
}

/// Whole lines of a run in the making that tell of `what`.
fn lines(part: &Path, what: &str) -> usize {
    let text = fs::read_to_string(part).unwrap_or_default();
    text.split_inclusive('\n')
        .filter(|line| line.starts_with(&format!("{{\"{what}\"")) && line.ends_with('\n'))
        .count()
}

fn nth_run(part: &Path, at: usize) -> String {
    let text = fs::read_to_string(part).expect("a run in the making");
    text.lines().filter(|line| line.starts_with("{\"run\"")).nth(at).expect("a run").to_string()
}

/// Processes of that name that descend from this one.
fn children(name: &str) -> Vec<rustix::process::Pid> {
    let output =
        Command::new("pgrep").args(["-x", name, "-P", &std::process::id().to_string()]).output();
    let text = String::from_utf8(output.expect("pgrep runs").stdout).expect("numbers");
    text.lines()
        .filter_map(|line| rustix::process::Pid::from_raw(line.trim().parse().ok()?))
        .collect()
}

/// One of them whose command line has that word and something in this directory.
fn child_in(directory: &Path, name: &str, word: &str) -> Option<rustix::process::Pid> {
    let directory = directory.to_str().expect("a name");
    children(name).into_iter().find(|pid| {
        let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
        let line = String::from_utf8_lossy(&line);
        line.contains(directory) && line.contains(word)
    })
}

/// No process, mount, loop device or file has `directory` in its name.
fn assert_no_traces(directory: &Path) {
    let name = directory.to_str().expect("a name");
    let processes = Command::new("pgrep")
        .args(["-af", &format!("^(ceph|nbdfuse|fio|rbd|qemu-storage-daemon|qemu-system-x86_64|unshare|[^ ]*(linux.uml|lab-guest-disks|tidepool (serve|lab (guest|caretaker)))).*{name}")])
        .output();
    let processes = String::from_utf8(processes.expect("pgrep runs").stdout).expect("text");
    assert_eq!(processes, "");
    // Not all have it in their command line.
    let inside = fs::read_dir("/proc").expect("processes").flatten().filter(|process| {
        fs::read_link(process.path().join("cwd")).is_ok_and(|at| at.starts_with(directory))
    });
    let inside: Vec<_> = inside.map(|process| process.path()).collect();
    assert!(inside.is_empty(), "{inside:?}");
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!mounts.contains(name), "{mounts}");
    let loops = Command::new("losetup").args(["-a"]).output().expect("losetup runs");
    let loops = String::from_utf8_lossy(&loops.stdout).into_owned();
    assert!(!loops.contains(name), "{loops}");
    let base = directory.join(format!("tidepool-{}", rustix::process::getuid().as_raw()));
    let left: Vec<_> =
        fs::read_dir(base).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    assert!(left.is_empty(), "{left:?}");
}
