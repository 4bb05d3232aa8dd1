//! A cluster that is full, slow, or partly gone, under a volume with load: nothing fails, nothing
//! is lost, the status names the trouble, and all goes on by itself when it is over.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use serde_json::{Value, json};
use tidepool_testkit::nbd::Client as Nbd;
use tidepool_testkit::rng;
use tidepool_testkit::stamps::{Kind, Mix, Progress, Request, Workload, WorkloadOptions};
use tidepool_testkit::{Cluster, ClusterOptions, Scratch, daemon, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

const BLOCK_BYTES: usize = 4096;
/// Size of the images.
const IMAGE_BYTES: u64 = 192 * MIB;
/// Dirty quota of the volumes: little, so that it is soon reached.
const DIRTY_BYTES_MAX: u64 = 32 * MIB;
/// How long a state may take to come. Ceph notices a full pool after seconds, and an OSD starts in
/// seconds.
const LIMIT: Duration = Duration::from_secs(120);

/// The cluster that the tests share; it goes with the last test that uses it.
fn cluster() -> Arc<Mutex<Cluster>> {
    static CLUSTER: Mutex<Weak<Mutex<Cluster>>> = Mutex::new(Weak::new());
    let mut shared = CLUSTER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(cluster) = shared.upgrade() {
        return cluster;
    }
    let cluster = Arc::new(Mutex::new(up()));
    *shared = Arc::downgrade(&cluster);
    cluster
}

fn up() -> Cluster {
    // What makes the monitor notice sooner how full the pools are.
    let often =
        ["mon tick interval", "mgr tick period", "mgr stats period", "mon mgr digest period"];
    let extra = often.map(|period| format!("{period} = 1")).to_vec();
    Cluster::up(&ClusterOptions { extra, manager: true, ..ClusterOptions::for_tests() })
        .expect("a cluster")
}

/// A test that has failed may have left the cluster full, or stopped: the next one gets another.
fn lock(cluster: &Mutex<Cluster>) -> MutexGuard<'_, Cluster> {
    cluster.lock().unwrap_or_else(|poisoned| {
        let mut guard = poisoned.into_inner();
        *guard = up();
        cluster.clear_poison();
        guard
    })
}

/// A grouped volume on an image, and a workload that has begun to write to it. Its first MiB is in
/// the cache.
fn volume(cluster: &Cluster, image: &str, seed: u64, mix: Mix) -> (Rig, Workload) {
    let uri = cluster.uri(image);
    let volumes = vec![(VOLUME.to_string(), uri)];
    let options = RigOptions { cache_bytes: 128 * MIB, volumes, extra: Vec::new() };
    let mut rig = Rig::new(&options).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    set_quota(&rig);
    let options = WorkloadOptions { mix, ..WorkloadOptions::new(rng::seed(seed), IMAGE_BYTES) };
    let mut workload = rig.workload(options).expect("connect");
    workload.run(200).expect("a run");
    rig.admin.drain(VOLUME).expect("drain");
    hit(&rig);
    (rig, workload)
}

fn set_quota(rig: &Rig) {
    let quota = json!({ "dirty_max": format!("{}MiB", DIRTY_BYTES_MAX / MIB) });
    rig.admin.call("PATCH", &format!("/v1/volumes/{VOLUME}"), Some(&quota)).expect("a dirty quota");
}

/// Writes and flushes alone: a read that misses would wait for the cluster, too, and keep its place
/// among the requests in flight.
fn writes() -> Mix {
    Mix { flushes: 3, ..Mix::aligned_writes(64 << 10) }
}

/// Reads what is in the cache, which needs no cluster.
fn hit(rig: &Rig) {
    let mut client = rig.client().expect("connect");
    client.read(0, 1 << 20).expect("a hit");
}

/// Ends a workload also when the test fails meanwhile.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does something while the workload goes on; tells how that has ended.
fn under_load(workload: &mut Workload, what: impl FnOnce()) -> Progress {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        let over = Stop(&stop);
        what();
        drop(over);
        run.join().expect("no panic").expect("no request fails")
    })
}

fn wait(rig: &Rig, what: impl FnMut(&Value) -> bool) -> Value {
    rig.admin.wait_volume(VOLUME, LIMIT, what).expect("the state comes")
}

/// Waits until the status names a trouble of the backend.
fn wait_backend(rig: &Rig, state: &str) {
    let volume = wait(rig, |volume| volume["backend_state"] == state);
    assert_eq!(volume["error"].is_null(), state == "ok", "{volume}");
}

/// Waits until writes wait for the quota; it is kept.
fn wait_writes_wait(rig: &Rig) {
    let volume = wait(rig, |volume| volume["state"] == "full");
    assert!(volume["dirty_bytes"].as_u64() <= volume["dirty_bytes_max"].as_u64(), "{volume}");
}

/// Waits until the image has got more since.
fn wait_drained_more(rig: &Rig) {
    let before = rig.volume_number("drained_blocks");
    wait(rig, |volume| volume["counters"]["drained_blocks"].as_u64() > Some(before));
}

/// What a command says that only looks, at the third attempt at the latest: the cluster may be
/// getting over what was done to it.
fn ask<T, E: std::fmt::Debug>(command: impl Fn() -> Result<T, E>) -> T {
    let again = || {
        std::thread::sleep(Duration::from_secs(1));
        command()
    };
    command().or_else(|_| again()).or_else(|_| again()).expect("the cluster answers")
}

/// Everything is in the image, and no redo is left beside it.
fn end(cluster: &Cluster, image: &str, mut rig: Rig, mut workload: Workload) {
    workload.verify().expect("nothing is lost");
    workload.disconnect().expect("goodbye");
    rig.admin.drain(VOLUME).expect("drain");
    assert_eq!(rig.volume_number("errors"), 0, "no request has failed");
    assert!(rig.daemon.terminate().expect("it ends").success());
    let export = rig.scratch.join("export");
    ask(|| {
        // What an attempt has left that failed.
        let _ = std::fs::remove_file(&export);
        cluster.rbd_export(image, &export)
    });
    rig.verify_plain(&mut workload, &export).expect("the image is what was written");
    assert_eq!(redo(cluster, image), BTreeSet::new(), "no redo is left");
}

/// Generation and group of each group of an image that has objects of redo.
fn redo(cluster: &Cluster, image: &str) -> BTreeSet<String> {
    let info = ask(|| cluster.rbd(&["info", "--format", "json", image]));
    let info: Value = serde_json::from_str(&info).expect("json");
    let prefix = format!("tidepool_redo.{}.", info["id"].as_str().expect("an id"));
    let objects = ask(|| cluster.rados(&["ls"]));
    let names = objects.lines().filter_map(|name| name.strip_prefix(&prefix)?.rsplit_once('.'));
    names.map(|(group, _)| group.to_owned()).collect()
}

/// How a pool becomes full, and how there is room again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Full {
    QuotaOfBytes,
    QuotaOfObjects,
    /// The OSDs have no space.
    Ratio,
}

impl Full {
    fn fill(self, cluster: &Cluster) {
        self.set(cluster, "4096", "1", ["0.0001"; 3]);
    }

    fn make_room(self, cluster: &Cluster) {
        self.set(cluster, "0", "0", ["0.85", "0.9", "0.95"]);
    }

    fn set(self, cluster: &Cluster, bytes: &str, objects: &str, ratios: [&str; 3]) {
        let ceph = |line: &[&str]| drop(cluster.ceph(line).expect("a command of Ceph"));
        match self {
            Full::QuotaOfBytes => ceph(&["osd", "pool", "set-quota", "rbd", "max_bytes", bytes]),
            Full::QuotaOfObjects => {
                ceph(&["osd", "pool", "set-quota", "rbd", "max_objects", objects])
            }
            Full::Ratio => {
                let kinds = ["set-nearfull-ratio", "set-backfillfull-ratio", "set-full-ratio"];
                kinds.iter().zip(ratios).for_each(|(kind, ratio)| ceph(&["osd", kind, ratio]));
            }
        }
    }
}

#[test]
fn g8_a_full_pool_is_named_makes_writes_wait_and_goes_on_when_there_is_room() {
    full_pool(&[Full::QuotaOfBytes, Full::Ratio]);
}

#[test]
#[ignore = "the monitor treats both quotas alike: make long"]
fn g8_a_pool_at_its_quota_of_objects_is_named_and_goes_on_when_there_is_room() {
    full_pool(&[Full::QuotaOfObjects]);
}

/// The pool becomes full in each way, and gets room again; the daemon is killed while it is full
/// the first time.
fn full_pool(ways: &[Full]) {
    let (cluster, _turn) = (cluster(), one_at_a_time());
    let cluster = lock(&cluster);
    cluster.rbd_create("thin", IMAGE_BYTES).expect("an image");
    let mix = Mix { reads: 20, discards: 3, zeroes: 3, ..writes() };
    let (mut rig, mut workload) = volume(&cluster, "thin", 91, mix);
    for (number, full) in ways.iter().enumerate() {
        let end = under_load(&mut workload, || {
            full.fill(&cluster);
            wait_backend(&rig, "full");
            wait_writes_wait(&rig);
            hit(&rig);
            if number == 0 {
                rig.daemon.kill().expect("kill");
                return;
            }
            full.make_room(&cluster);
            wait_backend(&rig, "ok");
            wait_drained_more(&rig);
        });
        if end == Progress::Done {
            continue;
        }
        // A full pool is in nobody's way who takes an image back.
        rig.daemon.start().expect("it takes its image back");
        workload.server_died();
        workload.connect(&rig.socket, VOLUME).expect("connect");
        let end = under_load(&mut workload, || {
            wait_backend(&rig, "full");
            hit(&rig);
            full.make_room(&cluster);
            wait_backend(&rig, "ok");
            wait_drained_more(&rig);
        });
        assert_eq!(end, Progress::Done);
    }
    end(&cluster, "thin", rig, workload);
}

#[test]
fn g8_in_a_full_pool_what_is_committed_reaches_the_image() {
    let (cluster, _turn) = (cluster(), one_at_a_time());
    let cluster = lock(&cluster);
    cluster.rbd_create("thick", IMAGE_BYTES).expect("an image");
    let (rig, mut workload) = volume(&cluster, "thick", 92, writes());
    // Every object of the image is there, so that nothing that goes to the image takes room.
    let every =
        |sector| Request { kind: Kind::Write, sector, count: 512, fua: false, connection: 0 };
    let sectors: Vec<Request> = (0..IMAGE_BYTES / 512).step_by(512).map(every).collect();
    workload.run_these(&sectors).expect("the whole volume is written");
    rig.admin.drain(VOLUME).expect("drain");
    let progress = under_load(&mut workload, || {
        wait(&rig, |_| !redo(&cluster, "thick").is_empty());
        cluster.ceph(&["osd", "pool", "set-quota", "rbd", "max_bytes", "4096"]).expect("a quota");
        wait_backend(&rig, "full");
        // All that is committed goes to the image. How much redo is left depends on how far behind
        // it was: a group's stays as long as it has the last committed content of something that
        // has been written again since.
        wait(&rig, |volume| volume["dirty_bytes"] == volume["exposure"]["bytes"]);
        wait_backend(&rig, "full");
        cluster.ceph(&["osd", "pool", "set-quota", "rbd", "max_bytes", "0"]).expect("no quota");
        wait_drained_more(&rig);
    });
    assert_eq!(progress, Progress::Done);
    end(&cluster, "thick", rig, workload);
}

#[test]
fn g8_with_a_stopped_osd_hits_go_on_and_writes_wait_at_the_quota_until_it_returns() {
    let (cluster, _turn) = (cluster(), one_at_a_time());
    let cluster = lock(&cluster);
    cluster.rbd_create("stopped", IMAGE_BYTES).expect("an image");
    let (rig, mut workload) = volume(&cluster, "stopped", 83, writes());
    let progress = under_load(&mut workload, || {
        cluster.osd_stop(0).expect("the OSD is stopped");
        wait_writes_wait(&rig);
        wait_backend(&rig, "slow");
        hit(&rig);
        cluster.osd_continue(0).expect("the OSD goes on");
        wait_backend(&rig, "ok");
    });
    assert_eq!(progress, Progress::Done);
    end(&cluster, "stopped", rig, workload);
}

#[test]
fn g8_an_osd_that_is_killed_and_started_again_is_waited_for() {
    let (cluster, _turn) = (cluster(), one_at_a_time());
    let mut cluster = lock(&cluster);
    cluster.rbd_create("killed", IMAGE_BYTES).expect("an image");
    let (rig, mut workload) = volume(&cluster, "killed", 93, writes());
    let progress = under_load(&mut workload, || {
        cluster.osd_kill(0).expect("the OSD is killed");
        wait_backend(&rig, "slow");
        hit(&rig);
        cluster.osd_start(0).expect("the OSD is started");
        wait_backend(&rig, "ok");
        wait_drained_more(&rig);
    });
    assert_eq!(progress, Progress::Done);
    end(&cluster, "killed", rig, workload);
}

#[test]
fn g8_with_a_slow_osd_the_drain_goes_on() {
    let (cluster, _turn) = (cluster(), one_at_a_time());
    let cluster = lock(&cluster);
    cluster.rbd_create("slow", IMAGE_BYTES).expect("an image");
    let (rig, mut workload) = volume(&cluster, "slow", 94, writes());
    let over = AtomicBool::new(false);
    let progress = under_load(&mut workload, || {
        std::thread::scope(|scope| {
            let over = Stop(&over);
            let (cluster, over_now) = (&*cluster, over.0);
            scope.spawn(move || {
                // It works for one fifth of the time.
                while !over_now.load(Ordering::Relaxed) {
                    cluster.osd_stop(0).expect("the OSD is stopped");
                    std::thread::sleep(Duration::from_millis(80));
                    cluster.osd_continue(0).expect("the OSD goes on");
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
            let groups = rig.volume_number("groups");
            wait(&rig, |volume| volume["counters"]["groups"].as_u64() >= Some(groups + 1));
            wait_drained_more(&rig);
            hit(&rig);
        });
    });
    assert_eq!(progress, Progress::Done);
    end(&cluster, "slow", rig, workload);
}

/// A rig with a volume of 8 MiB on an image, and what the client writes: blocks of one byte each,
/// from the first one on.
fn small(cluster: &Cluster, image: &str, more: &[(String, String)]) -> Rig {
    cluster.rbd_create(image, 8 * MIB).expect("an image");
    let volumes = [&[(VOLUME.to_string(), cluster.uri(image))], more].concat();
    let options = RigOptions { cache_bytes: 128 * MIB, volumes, extra: Vec::new() };
    let mut rig = Rig::new(&options).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    rig
}

fn write_blocks(rig: &Rig, volume: &str, byte: u8) {
    let mut client = Nbd::connect(&rig.socket, volume).expect("connected");
    for number in 0..BLOCKS {
        client.write(number * BLOCK_BYTES as u64, &block(byte, number)).expect("a write");
    }
    client.flush().expect("a flush");
}

const BLOCKS: u64 = 16;

fn block(byte: u8, number: u64) -> Vec<u8> {
    let mut block = vec![byte; BLOCK_BYTES];
    block[..8].copy_from_slice(&number.to_le_bytes());
    block
}

/// Every copy of a block in the cache, and what it has now.
fn rot(rig: &Rig, content: &[u8]) {
    let file = OpenOptions::new().write(true).open(&rig.cache).expect("the cache file");
    let all = std::fs::read(&rig.cache).expect("the cache file");
    let copies = all.chunks(BLOCK_BYTES).enumerate().filter(|(_, found)| *found == content);
    let places: Vec<u64> = copies.map(|(index, _)| (index * BLOCK_BYTES) as u64).collect();
    assert!(!places.is_empty(), "the block is in the cache");
    places.iter().for_each(|&at| file.write_all_at(&[!content[100]], at + 100).expect("written"));
}

/// A command's exit status and what it says.
fn command(rig: &Rig, arguments: &[&str]) -> (Option<i32>, String) {
    let admin = format!("--admin={}", rig.admin.socket().display());
    let output = daemon::run([arguments, &[&admin]].concat()).expect("it runs");
    let told = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.code(), String::from_utf8_lossy(&told).into_owned())
}

fn done(rig: &Rig, arguments: &[&str]) -> String {
    let (status, told) = command(rig, arguments);
    assert_eq!(status, Some(0), "{arguments:?}: {told}");
    told
}

#[test]
fn g7_a_volume_with_lost_blocks_goes_back_to_a_snapshot_by_the_way_that_the_refusal_names() {
    let (cluster, _turn) = (cluster(), one_at_a_time());
    let cluster = lock(&cluster);
    let mut rig = small(&cluster, "rotten", &[]);
    write_blocks(&rig, VOLUME, 1);
    done(&rig, &["volume", "snap", "create", VOLUME, "then"]);
    cluster.osd_stop(0).expect("the OSD is stopped");
    write_blocks(&rig, VOLUME, 2);
    // The next record says that what was flushed is stable: a damaged one is no torn tail then.
    let mut client = rig.client().expect("connected");
    client.write(BLOCKS * BLOCK_BYTES as u64, &block(2, BLOCKS)).expect("a write");
    client.flush().expect("a flush");
    drop(client);
    rot(&rig, &block(2, 3));
    rig.daemon.kill().expect("kill");
    cluster.osd_continue(0).expect("the OSD goes on");
    rig.daemon.start().expect("it starts again");
    wait(&rig, |volume| volume["lost_blocks"] == 1);

    let rollback = ["volume", "snap", "rollback", VOLUME, "then"];
    let line = loop {
        let (status, line) = command(&rig, &rollback);
        assert_eq!((status, line.lines().count()), (Some(1), 1), "{line}");
        // What it has is drained first.
        if !line.contains("tidepool volume drain") {
            break line;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    assert!(line.contains("1 blocks of it are lost until they are written again"), "{line}");
    let image = format!("{}/rotten", cluster.pool());
    for part in [
        "tidepool volume remove vm --give-up --accept-loss",
        "rbd snap rollback",
        "and add it again",
    ] {
        assert!(line.contains(part), "{line}");
    }
    done(&rig, &["volume", "remove", VOLUME, "--give-up", "--accept-loss"]);
    cluster
        .rbd(&["snap", "rollback", "--no-progress", &format!("{image}@then")])
        .expect("rolled back");
    let add = format!("{VOLUME}={}", cluster.uri("rotten"));
    done(&rig, &["volume", "add", &add, "--accept-loss", "60m"]);
    assert_eq!(rig.volume_number("lost_blocks"), 0);
    let mut client = rig.client().expect("connected");
    for number in 0..BLOCKS {
        let found = client.read(number * BLOCK_BYTES as u64, BLOCK_BYTES).expect("a read");
        assert!(found == block(1, number), "block {number}");
    }
}

#[test]
#[ignore = "waits for a cluster that does not answer for more than a minute: make long"]
fn g8_a_volume_whose_cluster_answers_nobody_is_given_up_after_a_restart_and_the_other_one_loses_nothing()
 {
    let (cluster, _turn) = (cluster(), one_at_a_time());
    let cluster = lock(&cluster);
    let scratch = Scratch::new("other").expect("a directory");
    let other = scratch.join("other");
    File::create(&other).and_then(|file| file.set_len(8 * MIB)).expect("an image");
    let mut rig =
        small(&cluster, "silent", &[("other".into(), format!("file:{}", other.display()))]);
    cluster.osd_stop(0).expect("the OSD is stopped");
    for volume in [VOLUME, "other"] {
        write_blocks(&rig, volume, 5);
    }
    let give_up = ["volume", "remove", VOLUME, "--give-up", "--accept-loss"];
    let (status, line) = command(&rig, &give_up);
    assert_eq!((status, line.lines().count()), (Some(1), 1), "{line}");
    assert!(
        line.contains("requests wait for its image") && line.contains("or restart the daemon"),
        "{line}"
    );
    // In order, as systemd does it: a stop waits for no cluster.
    assert!(rig.daemon.terminate().expect("it ends").success());
    rig.daemon.start().expect("it starts again");
    write_blocks(&rig, "other", 6);
    let told = done(&rig, &give_up);
    assert!(told.contains("could not be freed (") && told.contains("tidepool recover"), "{told}");
    cluster.osd_continue(0).expect("the OSD goes on");
    rig.admin.drain("other").expect("drained");
    let found = std::fs::read(&other).expect("the image");
    for number in 0..BLOCKS {
        let at = number as usize * BLOCK_BYTES;
        assert!(found[at..at + BLOCK_BYTES] == block(6, number), "block {number}");
    }
    let uri = cluster.uri("silent");
    let add = format!("{VOLUME}={uri}");
    let (status, line) = command(&rig, &["volume", "add", &add]);
    assert!(status == Some(1) && line.contains("this cache has given up"), "{line}");
    let recovered = daemon::run(["recover", &uri, "--accept-loss"]).expect("it runs");
    assert!(recovered.status.success(), "{}", String::from_utf8_lossy(&recovered.stderr));
    done(&rig, &["volume", "add", &add, "--accept-loss", "60m"]);
}

#[test]
fn g8_without_the_monitor_everything_goes_on() {
    let (cluster, _turn) = (cluster(), one_at_a_time());
    let cluster = lock(&cluster);
    cluster.rbd_create("headless", IMAGE_BYTES).expect("an image");
    let (rig, mut workload) = volume(&cluster, "headless", 95, writes());
    let progress = under_load(&mut workload, || {
        cluster.monitor_stop().expect("the monitor is stopped");
        let groups = rig.volume_number("groups");
        wait(&rig, |volume| volume["counters"]["groups"].as_u64() >= Some(groups + 3));
        wait_drained_more(&rig);
        cluster.monitor_continue().expect("the monitor goes on");
    });
    assert_eq!(progress, Progress::Done);
    end(&cluster, "headless", rig, workload);
}
