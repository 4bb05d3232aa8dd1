//! The rights that docs/backends.md asks for: they suffice for everything, and each of them is
//! needed.

use tidepool_testkit::rng;
use tidepool_testkit::stamps::WorkloadOptions;
use tidepool_testkit::{Cluster, ClusterOptions, Scratch, daemon, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

use crate::serve;

/// What the document grants to a client of the pool `rbd`.
pub struct Rights {
    /// One grant each.
    mon: Vec<String>,
    /// The letters.
    osd: String,
}

impl Rights {
    pub fn documented() -> Rights {
        let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/backends.md");
        let text = std::fs::read_to_string(document).expect("the document");
        let line = text.lines().find(|line| line.contains("auth get-or-create client.tidepool"));
        let words: Vec<&str> = line.expect("the document has the command").split('\'').collect();
        let [before, mon, between, osd, ""] = words[..] else {
            panic!("another command: {words:?}")
        };
        assert!(before.ends_with(" mon ") && between.trim() == "osd", "{words:?}");
        let letters = osd.strip_prefix("allow ").and_then(|osd| osd.strip_suffix(" pool=POOL"));
        Rights {
            mon: mon.split(", ").map(str::to_owned).collect(),
            osd: letters.expect("letters for one pool").to_owned(),
        }
    }

    /// Makes a client with these rights.
    pub fn give(&self, cluster: &Cluster, client: &str) {
        let (mon, osd) = self.capabilities();
        cluster.client_add(client, &[("mon", &mon), ("osd", &osd)]).expect("a client");
    }

    /// Gives them to a client that is there.
    pub fn give_again(&self, cluster: &Cluster, client: &str) {
        let (mon, osd) = self.capabilities();
        let arguments = ["auth", "caps", &format!("client.{client}"), "mon", &mon, "osd", &osd];
        cluster.ceph(&arguments).expect("a client");
    }

    /// Those of the monitors and of the OSDs.
    fn capabilities(&self) -> (String, String) {
        (self.mon.join(", "), format!("allow {} pool=rbd", self.osd))
    }

    /// All but one, for each one, with what the complaint has to name.
    fn each_without_one(&self) -> Vec<(Rights, String)> {
        let (mon, osd) = (&self.mon, &self.osd);
        let without_grant = (0..mon.len()).map(|i| {
            let kept =
                mon.iter().enumerate().filter(|(k, _)| *k != i).map(|(_, grant)| grant.clone());
            let command = mon[i].contains("osd blocklist");
            let named = if command { "osd blocklist".to_owned() } else { format!("`{}`", mon[i]) };
            (Rights { mon: kept.collect(), osd: osd.clone() }, named)
        });
        let without_letter = osd.chars().map(|letter| {
            (
                Rights { mon: mon.clone(), osd: osd.replace(letter, "") },
                format!("`{letter}` is missing"),
            )
        });
        without_grant.chain(without_letter).collect()
    }
}

/// A cluster whose clients authenticate, and which forgets dead ones sooner than others do.
fn cluster() -> Cluster {
    let extra = vec!["osd client watch timeout = 8".to_owned()];
    let options = ClusterOptions { cephx: true, extra, ..ClusterOptions::for_tests() };
    Cluster::up(&options).expect("a cluster")
}

#[test]
fn the_documented_rights_suffice_for_everything() {
    let _turn = one_at_a_time();
    let cluster = cluster();
    let size_bytes = 64 * MIB;
    cluster.rbd_create("image", size_bytes).expect("an image");
    Rights::documented().give(&cluster, "tidepool");
    let uri = format!("{}&id=tidepool", cluster.uri("image"));
    let check = daemon::run(["check", &uri]).expect("tidepool runs");
    assert!(check.status.success(), "{check:?}");

    let volumes = vec![(VOLUME.to_string(), uri.clone())];
    let mut rig =
        Rig::new(&RigOptions { cache_bytes: 64 * MIB, volumes, extra: Vec::new() }).expect("a rig");
    rig.daemon.start().expect("the daemon starts");
    let mut workload =
        rig.workload(WorkloadOptions::new(rng::seed(87), size_bytes)).expect("connect");
    workload.run(300).expect("a run");
    rig.daemon.kill().expect("kill");
    rig.start_and_verify(&mut workload)
        .expect("it fences its own dead client and takes the image back");
    let fenced = cluster.ceph(&["osd", "blocklist", "ls"]).expect("the blocklist");
    assert!(fenced.contains("127.0.0.1"), "{fenced}");
    workload.run(300).expect("a run");
    workload.disconnect().expect("goodbye");
    rig.admin.drain(VOLUME).expect("drain");
    rig.admin.call("DELETE", &format!("/v1/volumes/{VOLUME}"), None).expect("it is given back");
    rig.verify_export(&cluster, "image", &mut workload).expect("the image is what was written");
    cluster
        .rbd(&["bench", "--io-type", "write", "--io-total", "4K", "image"])
        .expect("anybody can write");

    assert!(rig.daemon.terminate().expect("it ends").success());
    rig.daemon.start().expect("the image is served again");
    let mut client = rig.client().expect("connect");
    (0..64).for_each(|i| client.write(i * MIB, &[7; 65536]).expect("a write"));
    rig.daemon.kill().expect("kill");
    std::fs::remove_file(&rig.cache).expect("the cache is lost");
    let recovered = daemon::run(["recover", &uri, "--accept-loss"]).expect("tidepool runs");
    assert!(recovered.status.success(), "{recovered:?}");
    cluster
        .rbd(&["bench", "--io-type", "write", "--io-total", "4K", "image"])
        .expect("anybody can write");
}

/// What `tidepool volume snap …` says of the volume's snapshot, and whether it was done.
fn snap(rig: &Rig, command: &str) -> (bool, String) {
    let admin = format!("--admin={}", rig.admin.socket().display());
    let output =
        daemon::run(["volume", "snap", command, VOLUME, "base", &admin]).expect("tidepool runs");
    let told = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.success(), String::from_utf8_lossy(&told).into_owned())
}

/// Ceph looks for clones in all pools before it unprotects a snapshot, and for that alone the
/// document has another grant.
#[test]
fn the_documented_rights_suffice_for_snapshots() {
    let _turn = one_at_a_time();
    let cluster = cluster();
    cluster.rbd_create("image", 64 * MIB).expect("an image");
    cluster.ceph(&["osd", "pool", "create", "other", "8"]).expect("another pool");
    Rights::documented().give(&cluster, "tidepool");
    let uri = format!("{}&id=tidepool", cluster.uri("image"));
    let volumes = vec![(VOLUME.to_string(), uri.clone())];
    let mut rig =
        Rig::new(&RigOptions { cache_bytes: 64 * MIB, volumes, extra: Vec::new() }).expect("a rig");
    let check = || {
        let output = daemon::run(["check", &uri]).expect("tidepool runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let told = check();
    assert!(told.contains("client.tidepool may not look for clones in pool `other`"), "{told}");
    rig.daemon.start().expect("the daemon starts");
    rig.client().and_then(|mut client| client.write(0, &[7; 65536])).expect("a write");
    for command in ["create", "rm", "create", "protect"] {
        let (done, told) = snap(&rig, command);
        assert!(done, "{command}: {told}");
    }
    let (done, told) = snap(&rig, "unprotect");
    assert!(!done && told.contains("allow class-read object_prefix rbd_children"), "{told}");
    let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/backends.md");
    let text = std::fs::read_to_string(document).expect("the document");
    let line = text
        .lines()
        .find(|line| line.contains("ceph auth caps client.tidepool"))
        .expect("the command");
    let words: Vec<&str> = line.split('\'').collect();
    let [_, mon, _, osd, ""] = words[..] else { panic!("another command: {words:?}") };
    let osd = osd.replace("POOL", "rbd");
    cluster
        .ceph(&["auth", "caps", "client.tidepool", "mon", mon, "osd", &osd])
        .expect("more rights");
    // A client knows its rights from when it has connected.
    rig.daemon.terminate().expect("it ends");
    rig.daemon.start().expect("the daemon starts");
    for command in ["unprotect", "rm"] {
        let (done, told) = snap(&rig, command);
        assert!(done, "{command}: {told}");
    }
    rig.daemon.terminate().expect("it ends");
    assert!(!check().contains("clones"));
}

#[test]
fn check_and_serve_name_the_right_that_is_missing_before_anything_is_touched() {
    let _turn = one_at_a_time();
    let cluster = cluster();
    let cases = Rights::documented().each_without_one();
    assert_eq!(cases.len(), 5, "two grants and three letters");
    // Side by side: who is not told where the pool is learns that by waiting.
    std::thread::scope(|scope| {
        for (number, (rights, named)) in cases.into_iter().enumerate() {
            let (image, client) = (format!("image{number}"), format!("less{number}"));
            cluster.rbd_create(&image, 64 * MIB).expect("an image");
            rights.give(&cluster, &client);
            let uri = format!("{}&id={client}", cluster.uri(&image));
            let cluster = &cluster;
            let told = move |by: &str, line: &str| {
                assert!(
                    line.contains(&named) && line.contains(&client),
                    "{by} without {named}: {line}"
                );
            };
            let told_by_serve = told.clone();
            let by_serve = uri.clone();
            scope.spawn(move || {
                let output = daemon::run(["check", &uri]).expect("tidepool runs");
                assert_eq!(output.status.code(), Some(1), "{output:?}");
                let errors = String::from_utf8_lossy(&output.stderr);
                assert_eq!(errors.lines().count(), 1, "{errors}");
                told("check", &errors);
            });
            scope.spawn(move || {
                let scratch = Scratch::new("rig").expect("a directory");
                let output = daemon::run(serve(&scratch, &by_serve)).expect("tidepool runs");
                assert_eq!(output.status.code(), Some(1), "{output:?}");
                // As long as it waits, it says so before.
                let errors = String::from_utf8_lossy(&output.stderr);
                told_by_serve("serve", errors.lines().last().expect("a complaint"));
                assert_eq!(cluster.rbd(&["lock", "ls", &image]).expect("rbd lock ls"), "");
            });
        }
    });
    let objects = cluster.rados(&["ls"]).expect("objects");
    assert!(
        !objects.contains("tidepool_"),
        "a refused client has left something behind: {objects}"
    );
}
