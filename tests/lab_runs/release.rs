//! Another release of Ceph than the machine's, in a root directory.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tidepool_cluster::{Scratch, ceph};
use tidepool_lab::results::Results;

use super::{LIMIT, assert_no_traces, end, faults, found, lab_run, lines, start, suite};

/// The release of Debian 13, and the one of Debian 12: one of them is not the machine's.
const RELEASES: [u32; 2] = [18, 16];

#[test]
#[ignore = "it makes root directories of another release of Debian, for many minutes: make long"]
fn a_suite_runs_on_another_release_and_leaves_nothing_however_it_ends() {
    let here = ceph::release().expect("Ceph is installed");
    let ceph = RELEASES.into_iter().find(|release| *release != here).expect("one of two");
    let scratch = Scratch::new("lab-runs").expect("a directory");
    let workloads = ["a", "b"].map(|name| (name, "rw = \"randwrite\"\nset_bytes = 67108864"));
    let placements = "\"bluestore-colocated\", \"filestore-journal\", \"host-tidepool\"";
    let suite =
        suite(scratch.path(), placements, "replicas = 1\nosd_cache_bytes = 16777216", &workloads);
    let (out, part) = (scratch.join("out.json"), scratch.join("out.json.part"));
    let work = scratch.join("w");
    fs::create_dir(&work).expect("a directory");
    let lab = |words: &[&str]| {
        lab_run(&suite, &out, &work, &[&["--release", &ceph.to_string()], words].concat())
    };

    // While the root is made: after a signal to end, and by force.
    for signal in [Signal::INT, Signal::KILL] {
        let ended = end(start(lab(&[]), |_| holds(&work, "etc")), signal);
        let says = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success(), "{says}");
        assert!(signal == Signal::KILL || says.contains("nothing of it is left"), "{says}");
        assert_gone(&work);
    }
    // While it measures.
    let killed = end(wait_for(lab(&[]), || lines(&part, "run") >= 1), Signal::KILL);
    assert!(!killed.status.success());
    assert_gone(&work);

    let ran = lab(&["--format", "json"]).output().expect("it runs");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let results: Results = serde_json::from_slice(&ran.stdout).expect("results");
    assert_eq!(results.ceph_releases(), [ceph].into());
    for (placement, workload) in
        ["bluestore-colocated", "host-tidepool"].into_iter().zip(["a", "b"])
    {
        assert_eq!(faults(found(&results, placement, workload)), "", "{placement}");
    }
    let not_run: Vec<&str> = results.not_run.iter().map(|found| found.placement.as_str()).collect();
    assert_eq!(not_run, if ceph == 18 { vec!["filestore-journal"] } else { vec![] });
    assert!(results.command.contains(&format!("--release {ceph}")), "{}", results.command);
    assert_gone(&work);
}

/// As [`start`], for what begins after a root was made.
fn wait_for(command: std::process::Command, so_far: impl Fn() -> bool) -> std::process::Child {
    let begun = Instant::now();
    let mut child = start(command, |_| true);
    while !so_far() {
        assert!(begun.elapsed() < LIMIT * 10, "it does not get so far");
        assert!(child.try_wait().expect("a child").is_none(), "it ended");
        std::thread::sleep(Duration::from_millis(100));
    }
    child
}

/// Whether a root that is made below a directory holds something of that name.
fn holds(work: &Path, name: &str) -> bool {
    let below = |path: &Path| {
        fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .collect::<Vec<_>>()
    };
    below(work)
        .iter()
        .flat_map(|base| below(base))
        .any(|directory| directory.join("root").join(name).exists())
}

/// Nothing that has to do with a directory is there any more, in a while: what was killed has a
/// caretaker, which takes its time.
fn assert_gone(work: &Path) {
    let marker = format!("TMPDIR={}", work.display());
    let runs = || {
        let processes = fs::read_dir("/proc").expect("processes").flatten();
        processes.filter_map(|process| fs::read(process.path().join("environ")).ok()).any(
            |environment| {
                environment.split(|&byte| byte == 0).any(|word| word == marker.as_bytes())
            },
        )
    };
    let begun = Instant::now();
    while runs() {
        assert!(begun.elapsed() < LIMIT, "something still runs");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_no_traces(work);
}
