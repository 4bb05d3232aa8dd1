//! Clusters on emulated devices.

use std::path::Path;

use tidepool_cluster::Scratch;
use tidepool_cluster::device::preset;
use tidepool_lab::collect::hops::{Counters, Hop};
use tidepool_lab::placement::Arrangement;
use tidepool_lab::testbed::{Layout, Ssds, Testbed};

#[test]
fn osds_run_on_emulated_devices_with_their_databases_on_an_ssd() {
    if let Err(missing) = tidepool_cluster::Cluster::available() {
        panic!("{missing}");
    }
    let outer = Scratch::new("layout").expect("a directory");
    let layout = Layout {
        disk: preset::find("hdd-7200").expect("a preset"),
        disks: 1,
        osds_per_disk: 2,
        disk_bytes: 8 << 30,
        ssd: Some((preset::find("ssd-sata-plp").expect("a preset"), 2 << 30)),
        ssds: Ssds { in_servers: true, hosts: 0 },
        hypervisors: 1,
        replicas: 2,
        slowed_by: 4,
        servers: 0,
        network: false,
        delay: None,
        ssd_shares: 1,
        ceph_conf: Vec::new(),
    };
    let arrangement = Arrangement::parse("bluestore-dbwal").expect("a placement");
    // This placement does not use the program.
    let testbed =
        Testbed::up(outer.path(), Path::new("tidepool"), &layout, &arrangement).expect("a cluster");
    let cluster = testbed.cluster();
    let proof = testbed.verify().expect("it is in place").to_string();
    assert!(proof.contains("block.db"), "{proof}");
    let stored = |osd: u32| {
        let text = cluster
            .ceph(&["osd", "metadata", &osd.to_string(), "--format", "json"])
            .expect("metadata");
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON")
    };
    for osd in 0..2 {
        let metadata = stored(osd);
        assert_eq!(metadata["bluefs_dedicated_db"], "1", "{metadata}");
        assert_eq!(
            metadata["bluestore_bdev_size"],
            ((4096u64 - 32) << 20).to_string(),
            "{metadata}"
        );
    }
    testbed.emulate(true);
    let written = |name: &str| {
        testbed.devices().find(|(found, _)| *found == name).expect("it").1.counts().written_bytes
    };
    let before = (written("disk0"), written("node0-ssd"));
    let counters = || {
        let sockets = cluster.osd_sockets();
        Counters::now(sockets.iter().map(|socket| socket.as_path())).expect("counters")
    };
    let begin = counters();
    cluster
        .rados(&["bench", "2", "write", "-b", "4096", "-t", "4", "--no-cleanup"])
        .expect("a load");
    assert!(
        written("disk0") > before.0 && written("node0-ssd") > before.1,
        "both have something of it"
    );
    let stages = counters().since(&begin);
    let mean = |hop| stages.iter().find(|stage| stage.hop == hop).expect("it was gone").mean_us;
    assert!(
        mean(Hop::OsdWrite) > mean(Hop::StoreCommit),
        "a part is less than the whole: {stages:?}"
    );
    drop(testbed);
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    assert!(!mounts.contains(outer.path().to_str().expect("a path")), "{mounts}");
    assert!(is_empty(outer.path()), "nothing is left");
}

/// Whether a directory contains no file at any depth.
fn is_empty(path: &Path) -> bool {
    std::fs::read_dir(path)
        .expect("a directory")
        .flatten()
        .all(|entry| entry.path().is_dir() && is_empty(&entry.path()))
}
