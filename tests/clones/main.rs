//! Clones of one golden image, on a real cluster: what they have from it is fetched once, and each
//! of them is itself.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};
use tidepool_testkit::admin::number;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Cluster, one_at_a_time, rng::Rng};
use tidepool_tests::rig::{MIB, Rig, RigOptions};

/// What a clone reads at once.
const PIECE: usize = 128 << 10;
/// Boots until everything is in the cache, at most.
const WARM_BOOTS_MAX: u32 = 5;

/// A cluster with a golden image and clones of it, and a daemon that serves them all as volumes of
/// their names.
struct Storm {
    rig: Rig,
    cluster: Cluster,
    golden: Vec<u8>,
    clones: Vec<String>,
}

impl Storm {
    fn new(golden_bytes: u64, clones: usize, cache_bytes: u64) -> Storm {
        let cluster = Cluster::for_test().expect("a cluster");
        let mut rng = Rng::new(11);
        let golden: Vec<u8> =
            (0..golden_bytes / 8).flat_map(|_| rng.word().to_le_bytes()).collect();
        let clones: Vec<String> = (0..clones).map(|n| format!("vm{n}")).collect();
        let volumes = clones.iter().map(|name| (name.clone(), cluster.uri(name))).collect();
        let rig = Rig::new(&RigOptions { cache_bytes, volumes, extra: Vec::new() }).expect("a rig");
        let file = rig.scratch.join("golden");
        fs::write(&file, &golden).expect("a disk");
        cluster.rbd_import(&file, "golden").expect("an image");
        fs::remove_file(&file).expect("the disk");
        let rbd = |arguments: &[&str]| drop(cluster.rbd(arguments).expect("rbd"));
        rbd(&["snap", "create", "--no-progress", "golden@v1"]);
        rbd(&["snap", "protect", "golden@v1"]);
        clones.iter().for_each(|clone| rbd(&["clone", "golden@v1", clone]));
        Storm { rig, cluster, golden, clones }
    }

    fn client(&self, clone: usize) -> Client {
        Client::connect(&self.rig.socket, &self.clones[clone]).expect("connect")
    }

    /// All clones read their whole disks at the same time.
    fn boot(&self) {
        std::thread::scope(|scope| {
            for clone in 0..self.clones.len() {
                let (mut client, golden) = (self.client(clone), &self.golden);
                scope.spawn(move || {
                    for at in (0..golden.len()).step_by(PIECE) {
                        let end = (at + PIECE).min(golden.len());
                        let found = client.read(at as u64, end - at).expect("a read");
                        assert!(found == golden[at..end], "clone {clone} differs at {at}");
                    }
                });
            }
        });
    }

    fn volumes(&self) -> Vec<Value> {
        let status = self.rig.admin.status().expect("a status");
        status["volumes"].as_array().expect("a list").clone()
    }

    /// Bytes that were read from the cluster, by volume.
    fn fetched(&self) -> BTreeMap<String, u64> {
        let bytes = |volume: &Value| number(volume, "backend_read_bytes").expect("a number") as u64;
        let volumes = self.volumes();
        volumes.iter().map(|v| (v["name"].as_str().expect("a name").to_owned(), bytes(v))).collect()
    }

    fn fetched_bytes(&self) -> u64 {
        self.fetched().values().sum()
    }

    /// Bytes among them that the cache had no room for at the moment, and that are fetched again by
    /// who reads them next.
    fn dropped_bytes(&self) -> u64 {
        let blocks =
            |volume: &Value| number(volume, "bypass_no_room_blocks").expect("a number") as u64;
        4096 * self.volumes().iter().map(blocks).sum::<u64>()
    }

    /// Bytes that one more boot fetches.
    fn boot_again(&self) -> u64 {
        let before = self.fetched_bytes();
        self.boot();
        self.fetched_bytes() - before
    }

    /// The volume of the golden image's snapshot.
    fn parents(&self) -> Vec<String> {
        self.fetched().into_keys().filter(|name| name.starts_with('@')).collect()
    }

    /// The image of a clone that is not served any more has everything that was written to it.
    fn assert_image(&self, clone: usize, expected: &[u8]) {
        let export = self.rig.scratch.join("export");
        self.cluster.rbd_export(&self.clones[clone], &export).expect("rbd export");
        let content = fs::read(&export).expect("the export");
        fs::remove_file(&export).expect("the export");
        assert!(content == expected, "the image of clone {clone} is not what was written to it");
    }

    fn remove(&self, clone: usize) -> Value {
        let path = format!("/v1/volumes/{}", self.clones[clone]);
        self.rig.admin.call("DELETE", &path, None).expect("a removal")
    }
}

/// A golden image that all clones read at once.
fn boot_storm(golden_bytes: u64, clones: usize) {
    let mut storm = Storm::new(golden_bytes, clones, 2 * golden_bytes + 256 * MIB);
    storm.rig.daemon.start().expect("the daemon starts");
    storm.boot();
    let cold = storm.fetched_bytes().saturating_sub(storm.dropped_bytes());
    let warm = storm.boot_again().saturating_sub(storm.dropped_bytes());
    println!(
        "{clones} clones have read {} MiB each: {:.3} copies fetched, {:.3} when they read it again",
        golden_bytes / MIB,
        cold as f64 / golden_bytes as f64,
        warm as f64 / golden_bytes as f64
    );
    assert!(cold as f64 <= 1.1 * golden_bytes as f64, "{:?}", storm.fetched());
    let is_warm = |fetched: u64| fetched as f64 <= 0.02 * golden_bytes as f64;
    assert!(is_warm(warm), "{:?}", storm.fetched());
    // A busy device needs more boots until it has what it had no room for.
    let whole =
        storm.dropped_bytes() == 0 || (0..WARM_BOOTS_MAX).any(|_| is_warm(storm.boot_again()));
    assert!(whole, "{:?}", storm.fetched());
    // It is warm after a kill, too.
    storm.rig.daemon.kill().expect("kill");
    storm.rig.daemon.start().expect("the daemon starts");
    storm.boot();
    let again = storm.fetched_bytes();
    println!("after a restart: {:.3} copies fetched", again as f64 / golden_bytes as f64);
    assert!(again as f64 <= 0.05 * golden_bytes as f64, "{:?}", storm.fetched());
}

#[test]
fn a_boot_storm_fetches_the_golden_image_once() {
    let _turn = one_at_a_time();
    boot_storm(48 * MIB, 8);
}

#[test]
#[ignore = "some minutes: make long"]
fn twenty_clones_that_read_500_mb_fetch_them_once() {
    let _turn = one_at_a_time();
    boot_storm(500 * MIB, 20);
}

#[test]
fn clones_have_what_was_written_to_them_and_to_nobody_else() {
    let _turn = one_at_a_time();
    let mut storm = Storm::new(24 * MIB, 3, 128 * MIB);
    let mut disks = vec![storm.golden.clone(); 3];
    // Written before it is ever served.
    storm
        .cluster
        .rbd(&[
            "bench",
            "--io-type",
            "write",
            "--io-size",
            "4K",
            "--io-total",
            "64K",
            "--io-pattern",
            "rand",
            "vm2",
        ])
        .expect("rbd bench");
    let export = storm.rig.scratch.join("before");
    storm.cluster.rbd_export("vm2", &export).expect("rbd export");
    disks[2] = fs::read(&export).expect("the export");
    assert!(disks[2] != storm.golden);
    storm.rig.daemon.start().expect("the daemon starts");
    let [parent] = storm.parents().try_into().expect("one parent");
    assert!(storm.volumes().iter().all(|v| v["name"] == *parent || v["parent"] == *parent));
    let check = |storm: &Storm, disks: &[Vec<u8>], when: &str| {
        for (clone, disk) in disks.iter().enumerate() {
            let mut client = storm.client(clone);
            for at in (0..disk.len()).step_by(PIECE) {
                let found = client.read(at as u64, PIECE.min(disk.len() - at)).expect("a read");
                assert!(
                    found == disk[at..at + found.len()],
                    "{when}: clone {clone} differs at {at}"
                );
            }
        }
    };
    check(&storm, &disks, "cold");
    // Blocks, parts of blocks, zeroes; in objects that the parent has.
    let mut client = storm.client(0);
    for (at, len) in [(0usize, 4096usize), (5 << 20, 512), ((9 << 20) + 1536, 70_000 / 512 * 512)] {
        let data: Vec<u8> = (0..len).map(|i| (i * 7 + at) as u8 | 1).collect();
        client.write(at as u64, &data).expect("a write");
        disks[0][at..at + len].copy_from_slice(&data);
    }
    client.trim(13 << 20, 1 << 20).expect("a trim");
    disks[0][13 << 20..14 << 20].fill(0);
    // A whole object, of which nothing is left that hides the parent's but its name.
    client.trim(16 << 20, 4 << 20).expect("a trim");
    disks[0][16 << 20..20 << 20].fill(0);
    client.flush().expect("a flush");
    check(&storm, &disks, "dirty");
    storm.rig.daemon.kill().expect("kill");
    storm.rig.daemon.start().expect("the daemon starts");
    check(&storm, &disks, "after a kill");
    storm.rig.admin.drain("vm0").expect("drain");
    check(&storm, &disks, "drained");
    storm.rig.daemon.kill().expect("kill");
    storm.rig.daemon.start().expect("the daemon starts");
    check(&storm, &disks, "drained and restarted");
    let (parent_of, limit) = (format!("/v1/volumes/{parent}"), json!({}));
    let refusal =
        storm.rig.admin.call("DELETE", &parent_of, Some(&limit)).expect_err("it has clones");
    assert!(refusal.to_string().contains("clones"), "{refusal}");
    for (clone, disk) in disks.iter().enumerate().take(2) {
        assert_eq!(storm.remove(clone)["verified"], true);
        storm.assert_image(clone, disk);
        assert_eq!(storm.parents(), [parent.as_str()], "it stays as long as it has a clone");
    }
    // The last one takes it along.
    storm.remove(2);
    let mut polls = 0;
    while !storm.parents().is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(100));
        polls += 1;
        assert!(polls < 600, "the parent stays");
    }
    storm.assert_image(2, &disks[2]);
}

/// Names change their meaning: what counts is which snapshot it is.
#[test]
fn a_golden_image_that_is_replaced_under_its_name_is_another_parent() {
    let _turn = one_at_a_time();
    let mut storm = Storm::new(8 * MIB, 1, 64 * MIB);
    let rbd = |storm: &Storm, arguments: &[&str]| drop(storm.cluster.rbd(arguments).expect("rbd"));
    storm.rig.daemon.start().expect("the daemon starts");
    storm.boot();
    let old = storm.parents();
    // The next golden image, under the same name; and a clone that knows nothing of its own but its
    // name's map.
    let next: Vec<u8> = storm.golden.iter().map(|byte| !byte).collect();
    let file = storm.rig.scratch.join("next");
    fs::write(&file, &next).expect("a disk");
    rbd(&storm, &["mv", "golden", "golden.old"]);
    storm.cluster.rbd_import(&file, "golden").expect("an image");
    rbd(&storm, &["snap", "create", "--no-progress", "golden@v1"]);
    rbd(&storm, &["snap", "protect", "golden@v1"]);
    rbd(&storm, &["clone", "golden@v1", "new"]);
    rbd(&storm, &["clone", "--image-feature", "layering,exclusive-lock", "golden@v1", "plain"]);
    // The snapshot itself is served besides, too.
    for (name, image) in [("new", "new"), ("plain", "plain"), ("itself", "golden@v1")] {
        let volume = json!({ "name": name, "backend": storm.cluster.uri(image), "read_only": image.contains('@') });
        storm.rig.admin.call("POST", "/v1/volumes", Some(&volume)).expect("a volume");
    }
    let check = |storm: &Storm, when: &str| {
        for (name, expected) in
            [("vm0", &storm.golden), ("new", &next), ("plain", &next), ("itself", &next)]
        {
            let mut client = Client::connect(&storm.rig.socket, name).expect("connect");
            let found = client.read(0, PIECE).expect("a read");
            assert!(found == expected[..PIECE], "{when}: {name} is not what it should be");
        }
    };
    check(&storm, "served");
    assert_eq!(storm.parents().len(), 2, "one of each golden image");
    assert!(storm.parents().contains(&old[0]));
    let parent = |name: &str| storm.rig.admin.volume(name).expect("a volume")["parent"].clone();
    assert_ne!(parent("new"), parent("vm0"));
    assert!(parent("plain").is_null(), "nobody knows what it has of its own");
    storm.rig.daemon.kill().expect("kill");
    storm.rig.daemon.start().expect("the daemon starts");
    check(&storm, "restarted");
}
