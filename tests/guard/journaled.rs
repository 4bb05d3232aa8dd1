//! An image with journaling has no guard, and its owner does for others what they cannot do without
//! the lock. While a cache owns it, nobody changes it all the same.

use crate::clients::{CHANGERS, Client, Outcome, State, run, sum_of};
use crate::table::{Column, Verdict, check_manual};
use crate::{GET_THROUGH, IMAGE_BYTES, NEEDS_A_MIRROR, fill, pattern};
use tidepool_testkit::nbd::Client as Nbd;
use tidepool_testkit::{Cluster, ClusterOptions, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

/// The image.
const IMAGE: &str = "journaled";
/// Only images without journaling can be mirrored by snapshots.
const OTHER_MIRRORING: &str = "rbd mirror image enable";

/// What changes the image, as far as journaling lets it.
fn changers() -> Vec<Client> {
    let some =
        CHANGERS.iter().filter(|client| ![NEEDS_A_MIRROR, OTHER_MIRRORING].contains(&client.name));
    let of_journaling = [
        Client { name: "rbd journal reset", line: "rbd journal reset --image IMG" },
        Client {
            name: "rbd feature disable journaling",
            line: "rbd feature disable IMG journaling",
        },
    ];
    some.copied().chain(of_journaling).collect()
}

struct Stage {
    cluster: Cluster,
    rig: Rig,
    model: Vec<u8>,
}

impl Stage {
    /// A clone with journaling, a snapshot and content, served, with dirty data in its cache.
    fn new() -> Stage {
        let cluster = Cluster::up(&ClusterOptions::for_tests()).expect("a cluster");
        let rbd = |arguments: &[&str]| drop(cluster.rbd(arguments).expect("rbd"));
        cluster.rbd_create("parent", IMAGE_BYTES).expect("an image");
        rbd(&["bench", "--io-type", "write", "--io-size", "64K", "--io-total", "4M", "parent"]);
        rbd(&["snap", "create", "--no-progress", "parent@base"]);
        rbd(&["snap", "protect", "parent@base"]);
        rbd(&["clone", "parent@base", IMAGE]);
        rbd(&["snap", "create", "--no-progress", &format!("{IMAGE}@before")]);
        rbd(&["feature", "enable", IMAGE, "journaling"]);
        let volumes = vec![(VOLUME.to_string(), cluster.uri(IMAGE))];
        let rig = Rig::new(&RigOptions { cache_bytes: 128 * MIB, volumes, extra: Vec::new() })
            .expect("a rig");
        let mut stage = Stage { cluster, rig, model: vec![0; IMAGE_BYTES as usize] };
        stage.rig.daemon.start().expect("the daemon starts");
        let volume = stage.rig.admin.volume(VOLUME).expect("a status");
        assert_eq!(volume["state"], "serving", "{volume}");
        stage.write(1, 0, IMAGE_BYTES as usize);
        stage.rig.admin.drain(VOLUME).expect("drained");
        stage
    }

    fn write(&mut self, seed: u64, offset: u64, len: usize) {
        let data = pattern(seed, len);
        fill(&self.rig.socket, VOLUME, offset, &data);
        self.model[offset as usize..offset as usize + len].copy_from_slice(&data);
    }

    fn check_volume(&self, when: &str) {
        let mut client = Nbd::connect(&self.rig.socket, VOLUME).expect("connected");
        for at in (0..IMAGE_BYTES).step_by(MIB as usize) {
            let found = client.read(at, MIB as usize).expect("read");
            assert!(found == self.model[at as usize..][..MIB as usize], "{when}: at {at}");
        }
    }

    /// Each is refused and changes nothing, as the manual says.
    fn try_all(&self, when: &str) {
        let before = State::of(&self.cluster, IMAGE).expect("the image can be read");
        let (mut through, mut seen) = (Vec::new(), Vec::new());
        for client in changers() {
            let outcome = run(&client, &self.cluster, &self.rig.scratch, IMAGE);
            println!("{when:10} {:26} {outcome}", client.name);
            match outcome {
                Outcome::Refused(line) if !line.is_empty() => {
                    seen.push((client.name, Verdict::Refused))
                }
                Outcome::Done if GET_THROUGH.contains(&client.name) => {
                    seen.push((client.name, Verdict::Harmless));
                }
                other => through.push(format!("{when}: {}: {other}", client.name)),
            }
        }
        assert!(through.is_empty(), "not refused:\n{}", through.join("\n"));
        let after = State::of(&self.cluster, IMAGE).expect("the image can be read");
        assert_eq!(after, before, "{when}");
        check_manual(Column::Journaled, seen.into_iter());
    }

    /// The daemon's own changes are made all the same, however often.
    fn change_it_ourselves(&self) {
        let call = |what: &str, body: serde_json::Value| {
            let path = format!("/v1/volumes/{VOLUME}/{what}");
            self.rig
                .admin
                .call("POST", &path, Some(&body))
                .unwrap_or_else(|e| panic!("{what} {body}: {e}"));
        };
        for round in 0..3 {
            call("snapshots", serde_json::json!({ "snapshot": format!("s{round}") }));
            call("resize", serde_json::json!({ "size": IMAGE_BYTES + (round + 1) * 4 * MIB }));
        }
        let snapshots = self.cluster.rbd(&["snap", "ls", IMAGE]).expect("a list");
        assert!((0..3).all(|round| snapshots.contains(&format!("s{round}"))), "{snapshots}");
        call("resize", serde_json::json!({ "size": IMAGE_BYTES }));
    }
}

#[test]
fn g1_nobody_changes_a_journaled_image_through_the_handle_of_the_cache_that_owns_it() {
    let _turn = one_at_a_time();
    let mut stage = Stage::new();
    stage.try_all("served");
    stage.change_it_ourselves();
    stage.try_all("changed");
    stage.check_volume("changed");
    stage.write(2, 4 * MIB, 8 * MIB as usize);

    // Its owner is dead, and others may take the lock; the image is forbidden to be changed as
    // before.
    stage.cluster.osd_stop(0).expect("the OSD is stopped");
    stage.write(3, 8 * MIB, 2 * MIB as usize);
    stage.rig.daemon.kill().expect("kill");
    stage.cluster.osd_continue(0).expect("the OSD goes on");
    stage.rig.daemon.start().expect("its own cache takes the image back");
    stage.check_volume("after a kill");
    stage.rig.admin.drain(VOLUME).expect("drained");
    stage.try_all("restarted");

    stage
        .rig
        .admin
        .call("DELETE", &format!("/v1/volumes/{VOLUME}"), None)
        .expect("it is given back");
    assert!(stage.rig.daemon.terminate().expect("it ends").success());
    assert_eq!(stage.cluster.rbd_checksum(IMAGE).expect("rbd export"), sum_of(&stage.model));
    // An image that is nobody's is changed by everybody.
    for client in changers() {
        let outcome = run(&client, &stage.cluster, &stage.rig.scratch, IMAGE);
        println!("given back {:26} {outcome}", client.name);
        assert_eq!(outcome, Outcome::Done, "{}", client.name);
    }
}
