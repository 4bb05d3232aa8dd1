//! The lab's commands as a user runs them.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

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

#[test]
fn a_good_ssd_and_a_bad_one_get_their_grades() {
    let parent = parent();
    for (class, grade) in [("ssd-sata-plp", "good"), ("ssd-sata-consumer", "reject")] {
        let device = format!("emulated:{class}");
        let words = [
            "lab", "qualify", &device, "--run", "2s", "--size", "256MiB", "--slow", "32", "--format", "json",
        ];
        let found = json(&tidepool(parent.path(), &words));
        assert_eq!(found["grade"], grade, "{found}");
    }
    let left = std::fs::read_dir(parent.path()).expect("a directory").flatten();
    let left = left.flat_map(|entry| std::fs::read_dir(entry.path()).into_iter().flatten().flatten());
    assert_eq!(left.count(), 0, "nothing is left");
}

#[test]
fn a_cluster_stays_until_it_is_told_to_go_and_a_killed_one_leaves_nothing() {
    let parent = parent();
    let up = |name: &str| {
        let up =
            tidepool(parent.path(), &["lab", "cluster", "up", "--name", name, "--disks", "1", "--slow", "2"]);
        assert!(up.status.success(), "{}", String::from_utf8_lossy(&up.stderr));
        String::from_utf8(up.stdout).expect("a path").trim().to_string()
    };
    let status = || json(&tidepool(parent.path(), &["lab", "cluster", "status", "--format", "json"]));
    let conf = up("a");
    assert_eq!((&status()[0]["name"], &status()[0]["health"]), (&"a".into(), &"HEALTH_OK".into()));
    assert_eq!(status()[0]["conf"], conf.as_str());
    let again = tidepool(parent.path(), &["lab", "cluster", "up", "--name", "a"]);
    assert!(String::from_utf8_lossy(&again.stderr).contains("is up already"), "{again:?}");
    assert!(
        !tidepool(parent.path(), &["lab", "cluster", "down", "b"]).status.success(),
        "there is no such cluster"
    );

    // The other processes with that directory are Ceph's.
    let holder =
        processes(parent.path()).into_iter().find(|(_, name)| name == "tidepool").expect("its holder");
    let pid = rustix::process::Pid::from_raw(holder.0).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("kill");
    wait_for_the_end(parent.path());
    assert_eq!(status(), Value::Array(vec![]), "it is not up any more");
    nothing_is_left(parent.path());

    up("b");
    let holder =
        processes(parent.path()).into_iter().find(|(_, name)| name == "tidepool").expect("its holder");
    let pid = rustix::process::Pid::from_raw(holder.0).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("a signal");
    wait_for_the_end(parent.path());
    nothing_is_left(parent.path());

    up("c");
    let down = tidepool(parent.path(), &["lab", "cluster", "down"]);
    assert!(down.status.success(), "{down:?}");
    nothing_is_left(parent.path());
}

fn wait_for_the_end(parent: &Path) {
    for _ in 0..100 {
        if processes(parent).is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}

fn nothing_is_left(parent: &Path) {
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
            environment.split(|&byte| byte == 0).any(|word| word == marker.as_bytes()).then_some((pid, name))
        })
        .collect()
}
