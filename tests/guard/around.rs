//! What is done to what an image is in, and beside it: mirroring, its namespace, its pool.

use tidepool_testkit::nbd::Client as Nbd;
use tidepool_testkit::{Cluster, ClusterOptions, daemon, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

use crate::clients::{Client, Outcome, State, run, sum_of};
use crate::table::{Column, Verdict, check_manual};
use crate::{POLL, POLLS_MAX, fill, pattern};

const IMAGE: &str = "image";
const IMAGE_BYTES: u64 = 16 * MIB;

fn served(cluster: &Cluster, uri: String) -> Rig {
    let volumes = vec![(VOLUME.to_string(), uri)];
    let mut rig = Rig::new(&RigOptions { cache_bytes: 128 * MIB, volumes, extra: Vec::new() })
        .expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    let volume = rig.admin.volume(VOLUME).expect("a status");
    assert_eq!(volume["state"], "serving", "{volume} {}", cluster.dir().display());
    rig
}

fn write(rig: &Rig, seed: u64) -> Vec<u8> {
    let data = pattern(seed, IMAGE_BYTES as usize);
    fill(&rig.socket, VOLUME, 0, &data);
    data
}

/// What mirroring does to its images, and that none of it changes one that is cached.
const MIRRORING: &[(Client, Verdict)] = &[
    (
        Client { name: "rbd mirror image snapshot", line: "rbd mirror image snapshot IMG" },
        Verdict::Refused,
    ),
    (
        Client { name: "rbd mirror image demote", line: "rbd mirror image demote IMG" },
        Verdict::Refused,
    ),
    (
        Client { name: "rbd mirror image promote", line: "rbd mirror image promote --force IMG" },
        Verdict::Refused,
    ),
    (
        Client { name: "rbd mirror image resync", line: "rbd mirror image resync IMG" },
        Verdict::Refused,
    ),
    (
        Client { name: "rbd mirror pool demote", line: "rbd mirror pool demote rbd" },
        Verdict::Refused,
    ),
    (
        Client { name: "rbd mirror image disable", line: "rbd mirror image disable IMG" },
        Verdict::Harmless,
    ),
];

/// How many snapshots of the image belong to mirroring.
fn mirror_snapshots(cluster: &Cluster) -> usize {
    let all = cluster.rbd(&["snap", "ls", "--all", "--format", "json", IMAGE]).expect("a list");
    let all: serde_json::Value = serde_json::from_str(&all).expect("JSON");
    let of_mirroring = |snapshot: &&serde_json::Value| snapshot["namespace"]["type"] == "mirror";
    all.as_array().expect("a list").iter().filter(of_mirroring).count()
}

#[test]
fn g6_an_image_that_is_mirrored_by_snapshots_gets_them_through_the_daemon() {
    let _turn = one_at_a_time();
    let cluster = Cluster::up(&ClusterOptions::for_tests()).expect("a cluster");
    let rbd = |arguments: &[&str]| drop(cluster.rbd(arguments).expect("rbd"));
    cluster.rbd_create(IMAGE, IMAGE_BYTES).expect("an image");
    rbd(&["mirror", "pool", "enable", "rbd", "image"]);
    rbd(&["mirror", "pool", "peer", "add", "rbd", "client.mirror@elsewhere"]);

    // One that is not mirrored has nothing to be sent.
    let mut rig = served(&cluster, cluster.uri(IMAGE));
    let volume = rig.admin.volume(VOLUME).expect("a status");
    assert!(volume["notes"].is_null(), "{volume}");
    let asked =
        ["volume", "snap", "mirror", VOLUME, "--admin", &rig.admin.socket().to_string_lossy()]
            .map(str::to_owned);
    let refused = daemon::run(&asked).expect("tidepool runs");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("not mirrored by snapshots"), "{said}");
    assert_eq!(said.trim().lines().count(), 1, "{said}");
    rig.admin.call("DELETE", &format!("/v1/volumes/{VOLUME}"), None).expect("it is given back");
    assert!(rig.daemon.terminate().expect("it ends").success());

    rbd(&["mirror", "image", "enable", IMAGE, "snapshot"]);
    let checked = daemon::run(["check", &cluster.uri(IMAGE)]).expect("tidepool runs");
    let said = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(said.contains("volume snap mirror"), "{said}");
    let rig = served(&cluster, cluster.uri(IMAGE));
    let volume = rig.admin.volume(VOLUME).expect("a status");
    assert!(
        volume["notes"][0].as_str().is_some_and(|note| note.contains("volume snap mirror")),
        "{volume}"
    );

    let model = write(&rig, 1);
    let before = mirror_snapshots(&cluster);
    let taken = rig.admin.call("POST", &format!("/v1/volumes/{VOLUME}/mirror-snapshots"), None);
    let taken = taken.expect("a snapshot is taken");
    assert!(
        taken["snapshot"].as_str().is_some_and(|name| name.contains("@.mirror.primary.")),
        "{taken}"
    );
    assert_eq!(mirror_snapshots(&cluster), before + 1);
    // Whatever was acknowledged before is in the image, and nobody has written since.
    assert_eq!(cluster.rbd_checksum(IMAGE).expect("rbd export"), sum_of(&model));

    let state = State::of(&cluster, IMAGE).expect("the image can be read");
    let mut seen = Vec::new();
    for (client, verdict) in MIRRORING {
        let outcome = run(client, &cluster, &rig.scratch, IMAGE);
        println!("served     {:26} {outcome}", client.name);
        let is_refused = matches!(&outcome, Outcome::Refused(line) if !line.is_empty());
        let fits = if *verdict == Verdict::Refused { is_refused } else { outcome == Outcome::Done };
        assert!(fits, "{}: {outcome}", client.name);
        seen.push((client.name, *verdict));
        assert_eq!(
            State::of(&cluster, IMAGE).expect("the image can be read"),
            state,
            "{}",
            client.name
        );
    }
    check_manual(Column::Served, seen.into_iter());
    let mut client = Nbd::connect(&rig.socket, VOLUME).expect("connected");
    assert!(client.read(0, MIB as usize).expect("read") == model[..MIB as usize], "it goes on");
    rig.admin.call("DELETE", &format!("/v1/volumes/{VOLUME}"), None).expect("it is given back");
}

#[test]
fn g8_an_image_whose_namespace_or_pool_is_to_be_deleted_is_missed_and_can_be_given_up() {
    let _turn = one_at_a_time();
    let extra = vec!["mon allow pool delete = true".to_owned()];
    let options = ClusterOptions { extra, ..ClusterOptions::for_tests() };
    let cluster = Cluster::up(&options).expect("a cluster");
    cluster.ceph(&["osd", "pool", "create", "doomed", "1"]).expect("a pool");
    cluster.rbd(&["pool", "init", "doomed"]).expect("a pool of images");
    cluster.rbd(&["namespace", "create", "doomed/space"]).expect("a namespace");
    cluster.rbd_create("doomed/space/image", IMAGE_BYTES).expect("an image");
    cluster.rbd_create(IMAGE, IMAGE_BYTES).expect("an image");
    let mut rig =
        served(&cluster, cluster.uri(IMAGE).replace("rbd:rbd/image", "rbd:doomed/space/image"));
    let add =
        serde_json::json!({ "name": "other", "backend": cluster.uri(IMAGE), "accept_loss": "60m" });
    rig.admin.call("POST", "/v1/volumes", Some(&add)).expect("it is added");
    let model = write(&rig, 1);

    let namespace = Client { name: "rbd namespace rm", line: "rbd namespace rm doomed/space" };
    let outcome = run(&namespace, &cluster, &rig.scratch, IMAGE);
    println!("served     {:26} {outcome}", namespace.name);
    assert!(matches!(&outcome, Outcome::Refused(_)), "{outcome}");

    rig.admin.drain(VOLUME).expect("drained");
    let pool = Client {
        name: "ceph osd pool rm",
        line: "ceph osd pool rm doomed doomed --yes-i-really-really-mean-it",
    };
    assert_eq!(run(&pool, &cluster, &rig.scratch, IMAGE), Outcome::Done);
    let newer = write(&rig, 2);
    assert_ne!(newer, model);
    let told = |volume: &serde_json::Value| volume["error"].as_str().is_some();
    let volume =
        rig.admin.wait_volume(VOLUME, POLL * POLLS_MAX, told).expect("it says what is wrong");
    println!("served     {:26} {}", pool.name, volume["error"]);
    let error = volume["error"].as_str().expect("an error");
    assert!(error.contains("no such file") && error.contains("--give-up"), "{error}");
    // What is cached is read as before, and the other volume does not care.
    let mut client = Nbd::connect(&rig.socket, VOLUME).expect("connected");
    assert!(client.read(0, MIB as usize).expect("read") == newer[..MIB as usize]);
    drop(client);
    let mut client = Nbd::connect(&rig.socket, "other").expect("connected");
    client.write(0, &newer[..4096]).expect("absorbed");
    client.flush().expect("flushed");
    drop(client);

    // The same after a kill.
    rig.daemon.kill().expect("kill");
    rig.daemon.start().expect("the other volume is served");
    let volume = rig.admin.volume(VOLUME).expect("a status");
    let error = volume["error"].as_str().unwrap_or_default();
    println!("restarted  {:26} {error}", pool.name);
    assert!(error.contains("no pool") && error.contains("--give-up"), "{volume}");
    let give_up = serde_json::json!({ "accept_loss": true });
    let given = rig.admin.call("POST", &format!("/v1/volumes/{VOLUME}/give-up"), Some(&give_up));
    assert!(given.expect("it is forgotten")["bytes"].as_u64() > Some(0));
    rig.admin.call("DELETE", "/v1/volumes/other", None).expect("the other one is given back");
    check_manual(
        Column::Served,
        [(namespace.name, Verdict::Refused), (pool.name, Verdict::Noticed)].into_iter(),
    );
}
