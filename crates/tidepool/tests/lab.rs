//! The lab's commands as a user runs them.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// A directory for the lab's own, so that other runs on the machine are left alone.
fn tidepool(parent: &Path, words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidepool"))
        .args(words)
        .env("TMPDIR", parent)
        .output()
        .expect("tidepool runs")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).expect("JSON on the output")
}

/// Asks until the answer is right, for a minute at most: a cluster on a busy machine has warnings
/// at times.
fn ask_until<T>(right: impl Fn(&T) -> bool, ask: impl Fn() -> T) -> T {
    let begun = Instant::now();
    loop {
        let said = ask();
        if right(&said) || begun.elapsed() > Duration::from_secs(60) {
            return said;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn parent() -> tempfile::TempDir {
    // Sockets below it have long names already.
    tempfile::tempdir_in("/var/tmp").expect("a directory")
}

#[test]
fn devices_are_listed_with_what_speaks_against_using_them() {
    let parent = parent();
    let listed = tidepool(parent.path(), &["lab", "devices", "--format", "json"]);
    assert!(listed.status.success(), "{listed:?}");
    let listed = json(&listed);
    let names: Vec<&str> = listed["emulated"]
        .as_array()
        .expect("classes")
        .iter()
        .filter_map(|spec| spec["name"].as_str())
        .collect();
    assert!(names.contains(&"hdd-7200") && names.contains(&"nvme"), "{names:?}");
    for device in listed["real"].as_array().expect("devices") {
        assert!(device["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{device}");
    }
}

#[test]
fn what_cannot_be_qualified_is_refused_on_one_line() {
    let parent = parent();
    let file = parent.path().join("file");
    std::fs::write(&file, "precious").expect("a file");
    for (device, status, says) in [
        (file.to_str().expect("a path"), 2, "name the directory"),
        ("/dev/no-such-device", 1, "no such file"),
        ("emulated:floppy", 2, "hdd-7200"),
    ] {
        let refused = tidepool(parent.path(), &["lab", "qualify", device]);
        let error = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(status), "{error}");
        assert!(error.lines().count() == 1 && error.contains(says), "{error}");
    }
    assert_eq!(std::fs::read_to_string(&file).expect("the file"), "precious");
}

/// The repository's file of that name.
fn repository(name: &str) -> String {
    format!("{}/../../{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_sample_inventory_gets_its_plan_and_the_manual_shows_it() {
    let parent = parent();
    let sample = repository("docs/examples/inventory.toml");
    let words = ["lab", "plan", "--inventory", &sample];
    let text = tidepool(parent.path(), &words);
    assert!(text.status.success() && text.stderr.is_empty(), "{text:?}");
    let text = String::from_utf8(text.stdout).expect("text");
    let manual = std::fs::read_to_string(repository("docs/lab.md")).expect("the manual");
    let shown =
        manual.split("inventory docs/examples/inventory.toml\n").nth(1).expect("the command");
    let shown =
        shown.trim_start().lines().take_while(|line| line.is_empty() || line.starts_with("    "));
    for line in
        shown.map(|line| line.strip_prefix("    ").unwrap_or("")).filter(|line| *line != "…")
    {
        assert!(text.lines().any(|printed| printed == line), "{line:?} is not in\n{text}");
    }
    assert_eq!(
        tidepool(parent.path(), &[&words[..], &["--format", "text"]].concat()).stdout,
        text.as_bytes()
    );

    let plan = json(&tidepool(parent.path(), &[&words[..], &["--format", "json"]].concat()));
    assert_eq!((&plan["first"], &plan["missing"]), (&"host".into(), &Value::Array(vec![])));
    assert_eq!(plan["hosts"][2]["placed"][0]["recover_bytes"], 16_000_000_000_000_u64);
    assert_eq!(
        (&plan["bills"][0]["cost"], &plan["bills"][1]["to_buy"]),
        (&220.0.into(), &2.into())
    );
    assert_eq!(plan["refused"][0]["why"]["rules"][0], "power-loss");
    assert!(plan["rules"].as_array().is_some_and(|rules| rules.len() > 5), "{plan}");
}

#[test]
fn what_is_no_inventory_is_refused_on_one_line_with_its_place() {
    let parent = parent();
    let file = parent.path().join("inventory.toml");
    let host = "[[host]]\nname = \"a\"\n";
    for (text, says) in [
        (String::new(), "no host in it: write [[host]]"),
        (
            format!("{host}rule = \"osd\"\n"),
            "line 3, column 1: unknown key \"rule\"; did you mean \"role\"?",
        ),
        (
            format!("{host}[[host.drive]]\nkind = \"ssd\"\nsize = -1\n"),
            "line 5, column 8: a size is not negative",
        ),
        (format!("{host}[[host.drive]]\nkind = \"ssd\"\n"), "missing field `size`"),
        ("host = 1\n".into(), "line 1, column 8"),
        ("[[host]\n".into(), "line 1"),
        (
            format!(
                "{host}[[host.drive]]\nkind = \"ssd\"\nsize = 1\npaths = [\"/dev/sda; reboot\"]\n"
            ),
            "host a: \"/dev/sda; reboot\" is no device",
        ),
    ] {
        std::fs::write(&file, &text).expect("a file");
        refused_as_inventory(parent.path(), &file, says);
    }
    std::fs::write(&file, b"\xff").expect("a file");
    refused_as_inventory(parent.path(), &file, "not UTF-8");
    refused_as_inventory(
        parent.path(),
        &parent.path().join("missing"),
        "no such file or directory",
    );
    refused_as_inventory(parent.path(), parent.path(), "it is not a file");
}

fn refused_as_inventory(parent: &Path, file: &Path, says: &str) {
    let refused = tidepool(parent, &["lab", "plan", "--inventory", file.to_str().expect("a path")]);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0), "{error}");
    assert!(error.lines().count() == 1 && error.contains(says), "{says}: {error}");
    assert!(error.starts_with("tidepool: ") && !error.contains("panicked"), "{error}");
}

#[test]
fn a_plan_for_this_machine_asks_for_what_lsblk_does_not_know_and_gives_no_commands() {
    let parent = parent();
    let plan = json(&tidepool(parent.path(), &["lab", "plan", "--format", "json"]));
    assert_eq!(
        (&plan["first"], &plan["hosts"][0]["placed"]),
        (&Value::Null, &Value::Array(vec![]))
    );
    let missing = plan["missing"].to_string();
    assert!(
        missing.contains("the role of this-machine") && missing.contains("block-size"),
        "{missing}"
    );
    let text = tidepool(parent.path(), &["lab", "plan"]);
    let text = String::from_utf8(text.stdout).expect("text");
    assert!(text.contains("\nNot told\n") && !text.contains("commands"), "{text}");
}

#[test]
#[ignore = "its figures are those of a machine that does nothing else: make long"]
fn a_good_ssd_gets_its_grade() {
    // So slow that what else the machine does is little beside it.
    let found = graded("ssd-sata-plp", "good", "128", 3);
    // Without a cache every write is the media's, which is slower for a good SSD and no slower for
    // one that flushes anyway.
    let without = found["without_cache"][0]["figures"]["iops"].as_f64().expect("a figure");
    let with = found["runs"][0]["figures"]["iops"].as_f64().expect("a figure");
    assert!(without < with, "{found}");
}

/// A busy machine makes it no better.
#[test]
fn a_bad_ssd_gets_its_grade() {
    graded("ssd-sata-consumer", "reject", "32", 1);
}

/// What is found out about an emulated SSD, after so many attempts at most.
fn graded(class: &str, grade: &str, slow: &str, attempts: u32) -> Value {
    let parent = parent();
    let device = format!("emulated:{class}");
    let words = [
        "lab", "qualify", &device, "--run", "2s", "--size", "256MiB", "--slow", slow, "--format",
        "json",
    ];
    let qualify = || json(&tidepool(parent.path(), &words));
    let mut found = qualify();
    for _ in 1..attempts {
        if found["grade"] != grade {
            // Two seconds are few: whatever else the machine does makes an SSD look worse than it
            // is.
            found = qualify();
        }
    }
    assert_eq!(found["grade"], grade, "{found}");
    let without = found["without_cache"].as_array().expect("runs with its write cache off");
    assert_eq!(without.len(), 3, "synchronous, with flushes, and without: {found}");
    assert!(without.iter().all(|run| run["figures"]["iops"].as_f64() > Some(0.0)), "{found}");
    assert!(found["sync_write_bytes_per_s"].as_f64().expect("a figure") > 0.0, "{found}");
    let left = std::fs::read_dir(parent.path()).expect("a directory").flatten();
    let left =
        left.flat_map(|entry| std::fs::read_dir(entry.path()).into_iter().flatten().flatten());
    assert_eq!(left.count(), 0, "nothing is left");
    found
}

#[test]
fn a_cluster_stays_until_its_holder_ends_and_leaves_nothing() {
    let parent = parent();
    let up = |name: &str| {
        let up = tidepool(
            parent.path(),
            &["lab", "cluster", "up", "--name", name, "--disks", "1", "--slow", "2"],
        );
        assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
        String::from_utf8(up.stdout).expect("a path").trim().to_string()
    };
    let status =
        || json(&tidepool(parent.path(), &["lab", "cluster", "status", "--format", "json"]));
    let conf = up("a");
    let said = ask_until(|said| said[0]["health"] == "HEALTH_OK", status);
    assert_eq!(
        (&said[0]["name"], &said[0]["health"]),
        (&"a".into(), &"HEALTH_OK".into()),
        "{said}"
    );
    assert_eq!(said[0]["conf"], conf.as_str());
    let again = tidepool(parent.path(), &["lab", "cluster", "up", "--name", "a"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("is up already"), "{again:?}");
    assert!(
        !tidepool(parent.path(), &["lab", "cluster", "down", "b"]).status.success(),
        "there is no such cluster"
    );

    end_the_holder(parent.path(), Signal::KILL);
    // Without another command of the lab.
    nothing_is_left(parent.path());
    assert_eq!(status(), Value::Array(vec![]), "it is not up any more");

    up("b");
    end_the_holder(parent.path(), Signal::TERM);
    nothing_is_left(parent.path());
}

#[test]
fn a_cluster_with_a_network_says_how_it_is_reached_and_goes_when_it_is_told_to() {
    let parent = parent();
    let up = tidepool(
        parent.path(),
        &["lab", "cluster", "up", "--disks", "1", "--slow", "2", "--nodes", "1"],
    );
    let said = String::from_utf8_lossy(&up.stderr);
    assert!(up.status.success(), "{said}");
    if said.contains("will be on the loopback interface") {
        println!("skipped: {said}");
        assert!(tidepool(parent.path(), &["lab", "cluster", "down"]).status.success());
        return;
    }
    let status = json(&tidepool(parent.path(), &["lab", "cluster", "status", "--format", "json"]));
    assert_eq!(status[0]["nodes"], 1, "{status}");
    let example = said.split_once("for example: ").expect("an example").1.trim();
    assert!(example.starts_with(status[0]["enter"].as_str().expect("a prefix")), "{example}");
    let is_well = |ran: &Output| String::from_utf8_lossy(&ran.stdout).contains("HEALTH_OK");
    let ran =
        ask_until(is_well, || Command::new("sh").args(["-c", example]).output().expect("a shell"));
    assert!(is_well(&ran), "{ran:?}");
    let table = tidepool(parent.path(), &["lab", "cluster", "status"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains(example), "{table:?}");
    let down = tidepool(parent.path(), &["lab", "cluster", "down"]);
    assert!(down.status.success(), "{down:?}");
    nothing_is_left(parent.path());
}

#[test]
fn what_a_killed_lab_leaves_goes_by_itself_or_with_the_next_command_of_the_lab() {
    let parent = parent();
    for all_are_killed in [false, true] {
        let elsewhere = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let place = elsewhere.path().to_str().expect("a path");
        let out = parent.path().join("out.json");
        let mut lab = Command::new(env!("CARGO_BIN_EXE_tidepool"))
            .args(["lab", "run", "which-side", "--quick", "--restart", "--dir", place, "--out"])
            .arg(&out)
            .env("TMPDIR", parent.path())
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("tidepool runs");
        let mounts = || std::fs::read_to_string("/proc/self/mounts").expect("mounts");
        let mounted = ask_until(|said: &String| said.contains(place), mounts);
        assert!(mounted.contains(place), "it has a device: {mounted}");
        if all_are_killed {
            let named = |(_, name): &(i32, String)| name == "lab-caretaker";
            let caretaker =
                processes(parent.path()).into_iter().find(named).expect("a caretaker").0;
            let caretaker = Pid::from_raw(caretaker).expect("a process");
            rustix::process::kill_process(caretaker, Signal::KILL).expect("it is ours");
        }
        lab.kill().expect("it is ours");
        wait_for_the_end(parent.path());
        if all_are_killed {
            // Though it is told of no other directory, and a thread of the lab may hang in one of
            // its own mounts.
            let down = tidepool(parent.path(), &["lab", "cluster", "down"]);
            assert!(down.status.success(), "{down:?}");
        }
        lab.wait().expect("a child");
        assert_eq!(processes(parent.path()), vec![]);
        nothing_is_left(elsewhere.path());
    }
}

/// Sends a signal to the process that holds the cluster, and waits until it has closed its files:
/// its lock, by which others see that it has ended, is free only then.
fn end_the_holder(parent: &Path, signal: Signal) {
    // The other processes with that directory are Ceph's, and its caretaker.
    let holder =
        processes(parent).into_iter().find(|(_, name)| name == "tidepool").expect("its holder");
    let pid = Pid::from_raw(holder.0).expect("a process");
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("the process");
    pidfd_send_signal(&process, signal).expect("a signal");
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)).expect("a poll");
    assert_eq!(ended, 1, "the holder of the cluster has not ended");
}

fn wait_for_the_end(parent: &Path) {
    for _ in 0..600 {
        if processes(parent).is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

fn nothing_is_left(parent: &Path) {
    // Who took the cluster down has had its answer; the process that gave it may be about to end.
    wait_for_the_end(parent);
    assert_eq!(processes(parent), vec![]);
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!mounts.contains(parent.to_str().expect("a path")), "{mounts}");
    for base in std::fs::read_dir(parent).expect("a directory").flatten() {
        assert_eq!(std::fs::read_dir(base.path()).expect("a directory").count(), 0, "{base:?}");
    }
}

/// Processes that were started with `parent` as their temporary directory, by their ids and names.
fn processes(parent: &Path) -> Vec<(i32, String)> {
    let marker = format!("TMPDIR={}", parent.display());
    let entries = std::fs::read_dir("/proc").expect("processes").flatten();
    entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let environment = std::fs::read(entry.path().join("environ")).ok()?;
            let name = std::fs::read_to_string(entry.path().join("comm")).ok()?.trim().to_string();
            environment
                .split(|&byte| byte == 0)
                .any(|word| word == marker.as_bytes())
                .then_some((pid, name))
        })
        .collect()
}
