//! Snapshots of volumes under load, on RBD images of a real cluster.

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
    let options =
        RigOptions { cache_bytes: 96 * MIB, volumes: vec![(VOLUME.into(), cluster.uri(image))], extra };
    let mut rig = Rig::new(&options).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    rig
}

/// What the image's guard answers. `rbd bench` does not always say it in words, but ends with the error's number (EROFS).
fn is_read_only(refusal: &str) -> bool {
    ["Read-only file system", "exit status: 30"].iter().any(|said| refusal.contains(said))
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis() as u64
}

/// Writes and flushes one block again and again; returns the longest pair, and the longest of the time before
/// `begin` is set.
fn probe(mut client: Client, begin: &AtomicBool, stop: &AtomicBool) -> Result<(Duration, Duration), Error> {
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

/// Takes snapshots of a volume under load; each is compared with every state that the volume has had.
fn snapshots_under_load(cluster: &Cluster, image: &str, count: u32) {
    let rig = rig(cluster, image, &[]);
    let mut workload = rig.workload(WorkloadOptions::new(rng::seed(900), WORK_BYTES)).expect("connect");
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
        let lost = lost.unwrap_or_else(|what| panic!("snapshot {name} is no state of the volume: {what}"));
        if let Some((first, _)) = lost.acked_unix_ms {
            assert!(first + 1 >= *asked_unix_ms, "snapshot {name} lacks what was acknowledged before it");
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
    assert!(line.contains(&format!("{}/refused has a snapshot of this name", cluster.pool())), "{line}");
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

/// A snapshot as a volume of its own, beside the volume that it was taken of: read-only, and warm after a restart.
fn a_snapshot_is_served_and_stays_warm(cluster: &Cluster) {
    let mut rig = rig(cluster, "golden", &[]);
    let content = |seed: u8| vec![seed; 4 << 20];
    rig.client().and_then(|mut client| client.write(0, &content(1))).expect("a write");
    let path = format!("/v1/volumes/{VOLUME}/snapshots");
    rig.admin.call("POST", &path, Some(&json!({ "snapshot": "v1" }))).expect("a snapshot");
    rig.client().and_then(|mut client| client.write(0, &content(2))).expect("a write");
    let add = |name: &str| json!({ "name": "old", "backend": cluster.uri(&format!("golden@{name}")) });
    let missing = rig.admin.call("POST", "/v1/volumes", Some(&add("v2"))).expect_err("no such snapshot");
    assert!(missing.to_string().contains(&format!("rbd snap ls {}/golden", cluster.pool())), "{missing}");
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

#[test]
fn volumes_grow_and_shrink_with_their_images() {
    let _turn = one_at_a_time();
    let cluster = Cluster::for_test().expect("a cluster");
    let on_rbd = rig(&cluster, "sized", &[]);
    resized(&on_rbd, &|| {
        let info = cluster.rbd(&["info", "--format", "json", "sized"]).expect("rbd info");
        serde_json::from_str::<serde_json::Value>(&info).expect("JSON")["size"].as_u64().expect("a size")
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
        let output =
            daemon::run([&["volume", "resize", VOLUME, size, &admin], more].concat()).expect("it runs");
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
    assert!(client.read(127 * MIB, 8192).expect("a read").iter().all(|&b| b == 0), "it does not come back");
    assert_eq!(client.read(0, 8192).expect("a read"), [1; 8192]);
    assert_eq!(client.read(8192, 8192).expect("a read"), [2; 8192]);
    let (status, line) = resize("4097", &["--shrink"]);
    assert!(status == Some(1) && line.contains("multiple of 4096"), "{line}");
}
