//! Snapshots of volumes under load, on RBD images of a real cluster.

mod rollback;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::json;
use tidepool_testkit::admin::number;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::stamps::WorkloadOptions;
use tidepool_testkit::{Cluster, Error, daemon, one_at_a_time, rng};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME, refused};

/// What the workload writes; behind it is the probe's block.
const WORK_BYTES: u64 = 64 * MIB;
/// The image.
const IMAGE_BYTES: u64 = WORK_BYTES + MIB;

fn rig(cluster: &Cluster, image: &str, extra: &[&str]) -> Rig {
    cluster.rbd_create(image, IMAGE_BYTES).expect("an image");
    let extra = extra.iter().map(ToString::to_string).collect();
    let options = RigOptions {
        cache_bytes: 96 * MIB,
        volumes: vec![(VOLUME.into(), cluster.uri(image))],
        extra,
    };
    let mut rig = Rig::new(&options).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    rig
}

/// What the image's guard answers. `rbd bench` does not always say it in words, but ends with the
/// error's number (EROFS).
fn is_read_only(refusal: &str) -> bool {
    ["Read-only file system", "exit status: 30"].iter().any(|said| refusal.contains(said))
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis() as u64
}

/// Writes and flushes one block again and again; returns the longest pair, and the longest of the
/// time before `begin` is set.
fn probe(
    mut client: Client,
    begin: &AtomicBool,
    stop: &AtomicBool,
) -> Result<(Duration, Duration), Error> {
    let (mut before, mut during) = (Duration::ZERO, Duration::ZERO);
    while !stop.load(Ordering::Relaxed) {
        let start = Instant::now();
        client.write(WORK_BYTES, &[7; 4096])?;
        client.flush()?;
        let longest = if begin.load(Ordering::Relaxed) { &mut during } else { &mut before };
        *longest = start.elapsed().max(*longest);
    }
    Ok((before, during))
}

/// Takes snapshots of a volume under load; each is compared with every state that the volume has
/// had.
fn snapshots_under_load(cluster: &Cluster, image: &str, count: u32) {
    let rig = rig(cluster, image, &[]);
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(900), WORK_BYTES)).expect("connect");
    workload.keep_history();
    let client = rig.client().expect("connect");
    let (begin, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let (taken, pauses) = std::thread::scope(|scope| {
        let load = scope.spawn(|| workload.run_until(&stop));
        let (begin, stop) = (&begin, &stop);
        let probe = scope.spawn(move || probe(client, begin, stop));
        std::thread::sleep(Duration::from_secs(2));
        begin.store(true, Ordering::Relaxed);
        let mut taken = Vec::new();
        for n in 0..count {
            let name = format!("s{n}");
            let asked_unix_ms = unix_ms();
            let path = format!("/v1/volumes/{VOLUME}/snapshots");
            let report = rig.admin.call("POST", &path, Some(&json!({ "snapshot": name })));
            let report = report.expect("a snapshot");
            assert_eq!(report["snapshot"], format!("{}/{image}@{name}", cluster.pool()));
            taken.push((name, asked_unix_ms, report["seconds"].as_f64().expect("a time")));
        }
        stop.store(true, Ordering::Relaxed);
        load.join().expect("no panic").expect("the load goes on");
        (taken, probe.join().expect("no panic").expect("the probe goes on"))
    });
    let mut longest_seconds = 0f64;
    for (name, asked_unix_ms, seconds) in &taken {
        let export = rig.scratch.join("export");
        cluster.rbd_export(&format!("{image}@{name}"), &export).expect("rbd export");
        let content = std::fs::read(&export).expect("the export");
        std::fs::remove_file(&export).expect("the export");
        let lost = workload.compare(&content[..WORK_BYTES as usize]);
        let lost =
            lost.unwrap_or_else(|what| panic!("snapshot {name} is no state of the volume: {what}"));
        if let Some((first, _)) = lost.acked_unix_ms {
            assert!(
                first + 1 >= *asked_unix_ms,
                "snapshot {name} lacks what was acknowledged before it"
            );
        }
        longest_seconds = longest_seconds.max(*seconds);
    }
    let (before, during) = pauses;
    println!(
        "{count} snapshots, the longest took {longest_seconds:.1} s; longest write and flush {before:?} before, {during:?} during them"
    );
    // The guard stands again, and everything goes on.
    let refusal = cluster.rbd(&["bench", "--io-type", "write", "--io-total", "4K", image]);
    let refusal = refusal.expect_err("the image is guarded").to_string();
    assert!(is_read_only(&refusal), "{refusal}");
    rig.admin.drain(VOLUME).expect("drain");
    workload.verify().expect("every sector is right");
}

#[test]
fn g5_snapshots_under_load_are_exact_and_have_what_was_acknowledged() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    snapshots_under_load(&cluster, "few", 2);
    names_and_images_that_cannot_be_had(&cluster);
    a_plain_snapshot_is_refused_at_once(&cluster, 2);
    a_snapshot_is_served_and_stays_warm(&cluster);
}

#[test]
#[ignore = "a minute and a half: make long"]
fn g5_twenty_snapshots_under_load_and_twenty_plain_ones() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    snapshots_under_load(&cluster, "many", 20);
    a_plain_snapshot_is_refused_at_once(&cluster, 20);
}

/// `rbd snap create` on a dirty image says so, and leaves nothing.
fn a_plain_snapshot_is_refused_at_once(cluster: &Cluster, count: u32) {
    let rig = rig(cluster, "plain", &[]);
    let mut client = rig.client().expect("connect");
    for n in 0..count {
        client.write(u64::from(n) * 8192, &[n as u8 + 1; 8192]).expect("a write");
        let refusal = cluster.rbd(&["snap", "create", "--no-progress", &format!("plain@p{n}")]);
        let refusal = refusal.expect_err("the image is dirty").to_string();
        assert!(is_read_only(&refusal), "{refusal}");
    }
    assert_eq!(cluster.rbd(&["snap", "ls", "plain"]).expect("a list").trim(), "");
}

fn names_and_images_that_cannot_be_had(cluster: &Cluster) {
    let rig = rig(cluster, "refused", &[]);
    let admin = format!("--admin={}", rig.admin.socket().display());
    let snapshot = |volume: &str, name: &str| refused(["volume", "snapshot", volume, name, &admin]);
    cluster.rbd(&["snap", "ls", "refused"]).expect("a list");
    let path = format!("/v1/volumes/{VOLUME}/snapshots");
    rig.admin.call("POST", &path, Some(&json!({ "snapshot": "one" }))).expect("a snapshot");
    let (status, line) = snapshot(VOLUME, "one");
    assert_eq!(status, 1);
    assert!(
        line.contains(&format!("{}/refused has a snapshot of this name", cluster.pool())),
        "{line}"
    );
    let (_, line) = snapshot(VOLUME, "a/b");
    assert!(line.contains("use 1 to 64 letters"), "{line}");
    let (_, line) = snapshot("other", "one");
    assert!(line.contains("there is no volume other"), "{line}");
    drop(rig);

    let file = Rig::with_file(IMAGE_BYTES, 96 * MIB).expect("a rig");
    let admin = format!("--admin={}", file.admin.socket().display());
    let (_, line) = refused(["volume", "snapshot", VOLUME, "one", &admin]);
    assert!(line.contains("is not in a Ceph pool"), "{line}");
}

/// A snapshot as a volume of its own, beside the volume that it was taken of: read-only, and warm
/// after a restart.
fn a_snapshot_is_served_and_stays_warm(cluster: &Cluster) {
    let mut rig = rig(cluster, "golden", &[]);
    let content = |seed: u8| vec![seed; 4 << 20];
    rig.client().and_then(|mut client| client.write(0, &content(1))).expect("a write");
    let path = format!("/v1/volumes/{VOLUME}/snapshots");
    rig.admin.call("POST", &path, Some(&json!({ "snapshot": "v1" }))).expect("a snapshot");
    rig.client().and_then(|mut client| client.write(0, &content(2))).expect("a write");
    let add =
        |name: &str| json!({ "name": "old", "backend": cluster.uri(&format!("golden@{name}")) });
    let missing =
        rig.admin.call("POST", "/v1/volumes", Some(&add("v2"))).expect_err("no such snapshot");
    assert!(
        missing.to_string().contains(&format!("rbd snap ls {}/golden", cluster.pool())),
        "{missing}"
    );
    rig.admin.call("POST", "/v1/volumes", Some(&add("v1"))).expect("a second volume");

    let read = |rig: &Rig| {
        let mut client = Client::connect(&rig.socket, "old").expect("connect");
        assert!(
            client.read(0, 4 << 20).expect("a read") == content(1),
            "as it was when the snapshot was taken"
        );
        assert!(client.write(0, &[3; 4096]).is_err(), "a snapshot is not written");
        let volume = rig.admin.volume("old").expect("its status");
        number(&volume, "backend_read_bytes").expect("a counter")
    };
    assert!(read(&rig) >= f64::from(4 << 20), "it is fetched once");
    rig.admin
        .wait_volume("old", Duration::from_secs(60), |volume| {
            let cached = number(volume, "cached_bytes") == Some(f64::from(4 << 20));
            if !cached {
                // What a busy device had no room for is taken in when it is fetched again.
                read(&rig);
            }
            cached
        })
        .expect("all of it is cached");
    rig.daemon.kill().expect("kill -9");
    rig.daemon.start().expect("it starts");
    assert_eq!(read(&rig), 0.0, "it is cached over the restart");
    let mut client = rig.client().expect("connect");
    assert!(client.read(0, 4 << 20).expect("a read") == content(2), "the volume has gone on");
}

/// `tidepool volume snap …` on the rig's volume: the exit status, and what is printed or complained
/// of.
fn snap(rig: &Rig, command: &str, arguments: &[&str]) -> (Option<i32>, String) {
    let admin = format!("--admin={}", rig.admin.socket().display());
    let all = [&["volume", "snap", command], arguments, &[&admin]].concat();
    let output = daemon::run(all).expect("it runs");
    let told = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.code(), String::from_utf8_lossy(&told).into_owned())
}

fn snap_done(rig: &Rig, command: &str, arguments: &[&str]) -> String {
    let (status, told) = snap(rig, command, arguments);
    assert_eq!(status, Some(0), "snap {command} {arguments:?}: {told}");
    told
}

/// What a command is refused with, in one line.
fn snap_refused(rig: &Rig, command: &str, arguments: &[&str]) -> String {
    let (status, told) = snap(rig, command, arguments);
    assert_eq!(
        (status, told.lines().count()),
        (Some(1), 1),
        "snap {command} {arguments:?}: {told}"
    );
    told
}

/// The names of a volume's snapshots, and which of them are protected.
fn listed(rig: &Rig) -> Vec<(String, bool)> {
    let json = snap_done(rig, "ls", &[VOLUME, "--format", "json"]);
    let list: Vec<serde_json::Value> = serde_json::from_str(&json).expect("a list");
    let entry = |snapshot: &serde_json::Value| {
        let name = snapshot["name"].as_str().expect("a name").to_owned();
        let taken_unix_s = snapshot["time_unix_s"].as_u64().expect("a time");
        assert!(taken_unix_s.abs_diff(unix_ms() / 1000) < 3600, "{snapshot}");
        (name, snapshot["protected"].as_bool().expect("yes or no"))
    };
    list.iter().map(entry).collect()
}

/// The names that `rbd` lists.
fn listed_by_rbd(cluster: &Cluster, image: &str) -> Vec<String> {
    let json = cluster.rbd(&["snap", "ls", "--format", "json", image]).expect("a list");
    let list: Vec<serde_json::Value> = serde_json::from_str(&json).expect("a list");
    list.iter().map(|snapshot| snapshot["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
#[ignore = "ten minutes where the disk is slow: make long"]
fn g5_a_rotation_of_backups_under_load_keeps_exact_snapshots_and_removes_the_rest() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    rotation(&cluster, "rotated", &[], 4);
    // What is not guarded is changed in the same way.
    rotation(&cluster, "rotated-journal", &["journaling"], 3);
}

#[test]
fn snapshots_are_listed_and_protected_and_what_ceph_refuses_is_said_in_a_line() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    protected_and_cloned(&cluster);
    what_is_no_image_has_no_snapshots();
    kinds_of_snapshots(&cluster);
}

/// A snapshot each round, of which the last two are kept; each that is kept is some state of the
/// volume, and has what was acknowledged.
fn rotation(cluster: &Cluster, image: &str, features: &[&str], rounds: usize) {
    cluster.rbd_create(image, IMAGE_BYTES).expect("an image");
    features.iter().for_each(|feature| {
        drop(cluster.rbd(&["feature", "enable", image, feature]).expect("a feature"))
    });
    let volumes = vec![(VOLUME.into(), cluster.uri(image))];
    let options = RigOptions { cache_bytes: 96 * MIB, volumes, extra: Vec::new() };
    let mut rig = Rig::new(&options).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(901), WORK_BYTES)).expect("connect");
    workload.keep_history();
    let stop = AtomicBool::new(false);
    let asked_unix_ms: Vec<u64> = std::thread::scope(|scope| {
        let load = scope.spawn(|| workload.run_until(&stop));
        let mut asked = Vec::new();
        for round in 0..rounds {
            asked.push(unix_ms());
            snap_done(&rig, "create", &[VOLUME, &format!("s{round}")]);
            if round >= 2 {
                snap_done(&rig, "rm", &[VOLUME, &format!("s{}", round - 2)]);
            }
        }
        stop.store(true, Ordering::Relaxed);
        load.join().expect("no panic").expect("the load goes on");
        asked
    });
    let kept = [rounds - 2, rounds - 1];
    let names = kept.map(|round| format!("s{round}"));
    assert_eq!(listed(&rig), names.clone().map(|name| (name, false)));
    assert_eq!(listed_by_rbd(cluster, image), names);
    for round in kept {
        let export = rig.scratch.join("export");
        cluster.rbd_export(&format!("{image}@s{round}"), &export).expect("rbd export");
        let content = std::fs::read(&export).expect("the export");
        std::fs::remove_file(&export).expect("the export");
        let lost = workload.compare(&content[..WORK_BYTES as usize]);
        let lost = lost
            .unwrap_or_else(|what| panic!("snapshot s{round} is no state of the volume: {what}"));
        if let Some((first, _)) = lost.acked_unix_ms {
            assert!(
                first + 1 >= asked_unix_ms[round],
                "snapshot s{round} lacks what was acknowledged before it"
            );
        }
    }
    if features.is_empty() {
        // The guard stands again.
        let refusal =
            cluster.rbd(&["snap", "rm", "--no-progress", &format!("{image}@s{}", kept[0])]);
        assert!(is_read_only(&refusal.expect_err("the image is guarded").to_string()));
    }
    rig.daemon.kill().expect("kill -9");
    rig.start_and_verify(&mut workload).expect("every sector is right");
    snap_done(&rig, "rm", &[VOLUME, &names[0]]);
    assert_eq!(listed_by_rbd(cluster, image), [names[1].clone()]);
    workload.verify().expect("every sector is right");
}

/// A protected snapshot is not removed, and one with clones is not unprotected; both say what to
/// do.
fn protected_and_cloned(cluster: &Cluster) {
    let rig = rig(cluster, "origin", &[]);
    let image = format!("{}/origin", cluster.pool());
    let mut client = rig.client().expect("connect");
    client.write(0, &[1; 65536]).expect("a write");
    assert!(snap_done(&rig, "ls", &[VOLUME]).contains("no snapshots"));
    assert!(
        snap_done(&rig, "create", &[VOLUME, "base"]).contains(&format!("{image}@base is taken"))
    );
    let one = [VOLUME, "base"];
    assert!(snap_refused(&rig, "create", &one).contains("has a snapshot of this name"));
    assert!(snap_refused(&rig, "unprotect", &one).contains("it is not protected"));
    assert!(snap_done(&rig, "protect", &one).contains(&format!("{image}@base is protected")));
    assert!(snap_refused(&rig, "protect", &one).contains("it is protected already"));
    assert_eq!(listed(&rig), [("base".to_owned(), true)]);
    let table = snap_done(&rig, "ls", &[VOLUME]);
    assert!(
        table.starts_with("SNAPSHOT") && table.contains("base") && table.contains("yes"),
        "{table}"
    );
    let line = snap_refused(&rig, "rm", &one);
    assert!(line.contains("tidepool volume snap unprotect vm base"), "{line}");

    // Of the first kind of clones, which need a protected parent.
    let clone = |name: &str| {
        let format = "--rbd-default-clone-format=1";
        cluster.rbd(&["clone", format, "origin@base", name]).expect("a clone");
    };
    clone("child");
    let line = snap_refused(&rig, "unprotect", &one);
    assert!(line.contains(&format!("it has clones (see rbd children {image}@base)")), "{line}");
    assert_eq!(listed(&rig), [("base".to_owned(), true)], "what was refused has changed nothing");
    client.write(0, &[2; 65536]).expect("the volume goes on");
    cluster.rbd_remove("child").expect("the clone goes");
    snap_done(&rig, "unprotect", &one);

    // What another volume reads is kept for it.
    let add = |name: &str, of: &str| json!({ "name": name, "backend": cluster.uri(of) });
    rig.admin
        .call("POST", "/v1/volumes", Some(&add("old", "origin@base")))
        .expect("a second volume");
    let line = snap_refused(&rig, "rm", &one);
    assert!(line.contains("volume old serves it: tidepool volume remove old"), "{line}");
    assert!(snap_refused(&rig, "create", &["old", "more"]).contains("it is itself a snapshot"));
    assert!(snap_refused(&rig, "rm", &["old", "base"]).contains("it is itself a snapshot"));
    assert!(snap_refused(&rig, "ls", &["old"]).contains("it is itself a snapshot"));
    rig.admin.call("DELETE", "/v1/volumes/old", None).expect("it goes");

    let line = snap_refused(&rig, "rm", &[VOLUME, "none"]);
    assert!(line.contains("there is no such snapshot (see tidepool volume snap ls vm)"), "{line}");
    assert!(snap_refused(&rig, "rm", &["other", "base"]).contains("there is no volume other"));
    assert!(snap_refused(&rig, "rm", &[VOLUME, ""]).contains("there is no such snapshot"));
    // Names that `rbd` takes are taken.
    rig.admin.call("DELETE", &format!("/v1/volumes/{VOLUME}"), None).expect("it is given back");
    cluster.rbd(&["snap", "create", "--no-progress", "origin@a b%41"]).expect("a name");
    rig.admin
        .call("POST", "/v1/volumes", Some(&add(VOLUME, "origin")))
        .expect("it is served again");
    snap_done(&rig, "rm", &[VOLUME, "a b%41"]);
    snap_done(&rig, "rm", &one);
    assert_eq!(listed_by_rbd(cluster, "origin"), [""; 0]);
    assert_eq!(rig.client().expect("connect").read(0, 65536).expect("a read"), [2; 65536]);

    // What is only read is not changed, but listed.
    rig.admin.call("DELETE", &format!("/v1/volumes/{VOLUME}"), None).expect("it is given back");
    cluster.rbd(&["snap", "create", "--no-progress", "origin@seen"]).expect("a snapshot");
    let reader = json!({ "name": VOLUME, "backend": cluster.uri("origin"), "read_only": true });
    rig.admin.call("POST", "/v1/volumes", Some(&reader)).expect("it is served again");
    assert_eq!(listed(&rig), [("seen".to_owned(), false)]);
    assert!(snap_refused(&rig, "rm", &[VOLUME, "seen"]).contains("the image is read-only"));
}

fn what_is_no_image_has_no_snapshots() {
    let rig = Rig::with_file(IMAGE_BYTES, 96 * MIB).expect("a rig");
    for (command, arguments) in [
        ("ls", &[VOLUME][..]),
        ("create", &[VOLUME, "s"]),
        ("rm", &[VOLUME, "s"]),
        ("protect", &[VOLUME, "s"]),
    ] {
        let line = snap_refused(&rig, command, arguments);
        assert!(line.contains("its image is not in a Ceph pool, and has no snapshots"), "{line}");
    }
}

/// Snapshots that only Ceph manages are not listed, and left alone.
fn kinds_of_snapshots(cluster: &Cluster) {
    cluster.rbd_create("kinds", IMAGE_BYTES).expect("an image");
    cluster.rbd(&["snap", "create", "--no-progress", "kinds@base"]).expect("a snapshot");
    cluster
        .rbd(&["clone", "--rbd-default-clone-format=2", "kinds@base", "kinds-child"])
        .expect("a clone");
    let volumes = vec![(VOLUME.into(), cluster.uri("kinds"))];
    let options = RigOptions { cache_bytes: 96 * MIB, volumes, extra: Vec::new() };
    let mut rig = Rig::new(&options).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    // A clone of the second kind keeps what it needs.
    snap_done(&rig, "rm", &[VOLUME, "base"]);
    assert_eq!(listed(&rig), []);
    let all = cluster.rbd(&["snap", "ls", "--all", "--format", "json", "kinds"]).expect("a list");
    let all: Vec<serde_json::Value> = serde_json::from_str(&all).expect("a list");
    assert_eq!(all.len(), 1, "it is in the trash: {all:?}");
    let name = all[0]["name"].as_str().expect("a name");
    let line = snap_refused(&rig, "rm", &[VOLUME, name]);
    assert!(line.contains("it was removed before, and goes with the last of its clones"), "{line}");
    cluster.rbd_remove("kinds-child").expect("the clone goes");
}

#[test]
fn volumes_grow_and_shrink_with_their_images() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let on_rbd = rig(&cluster, "sized", &[]);
    resized(&on_rbd, &|| {
        let info = cluster.rbd(&["info", "--format", "json", "sized"]).expect("rbd info");
        serde_json::from_str::<serde_json::Value>(&info).expect("JSON")["size"]
            .as_u64()
            .expect("a size")
    });
    // The guard stands again.
    let refusal = cluster.rbd(&["resize", "--no-progress", "--size", "1G", "sized"]);
    assert!(is_read_only(&refusal.expect_err("the image is guarded").to_string()));

    let on_file = Rig::with_file(IMAGE_BYTES, 96 * MIB).expect("a rig");
    resized(&on_file, &|| std::fs::metadata(on_file.image()).expect("an image").len());
}

fn resized(rig: &Rig, image_bytes: &dyn Fn() -> u64) {
    let admin = format!("--admin={}", rig.admin.socket().display());
    let resize = |size: &str, more: &[&str]| {
        let output = daemon::run([&["volume", "resize", VOLUME, size, &admin], more].concat())
            .expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let mut old = rig.client().expect("connect");
    old.write(0, &[1; 8192]).expect("a write");
    assert_eq!(resize("128MiB", &[]).0, Some(0));
    assert_eq!(image_bytes(), 128 * MIB);
    old.write(8192, &[2; 8192]).expect("the old connection goes on");
    rig.client()
        .and_then(|mut client| client.write(127 * MIB, &[3; 8192]))
        .expect("a write behind the old end");
    let (status, line) = resize("64MiB", &[]);
    assert!(status == Some(2) && line.contains("--shrink"), "{line}");
    assert_eq!(resize("64MiB", &["--shrink"]).0, Some(0));
    assert_eq!(image_bytes(), 64 * MIB);
    let mut client = rig.client().expect("connect");
    assert!(client.read(64 * MIB, 4096).is_err());
    assert_eq!(resize("128MiB", &[]).0, Some(0));
    let mut client = rig.client().expect("connect");
    assert!(
        client.read(127 * MIB, 8192).expect("a read").iter().all(|&b| b == 0),
        "it does not come back"
    );
    assert_eq!(client.read(0, 8192).expect("a read"), [1; 8192]);
    assert_eq!(client.read(8192, 8192).expect("a read"), [2; 8192]);
    let (status, line) = resize("4097", &["--shrink"]);
    assert!(status == Some(1) && line.contains("multiple of 4096"), "{line}");
}
