//! The stale-image guard: while the newest data of an image is in a cache, no other client changes
//! a byte of it, whether our daemon lives or not; once the image is given back, all of them work at
//! once.

mod around;
mod clients;
mod guests;
mod journaled;
mod table;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use clients::{CHANGERS, Client, MORE_CHANGERS, Outcome, State, WRITERS, run};
use table::Verdict;
use tidepool_testkit::nbd::Client as Nbd;
use tidepool_testkit::{Cluster, ClusterOptions, Scratch, daemon, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME, complaint};

/// Size of the images.
const IMAGE_BYTES: u64 = 32 * MIB;
/// A second image, to be removed.
const VICTIM: &str = "victim";
/// How often a wait looks.
const POLL: Duration = Duration::from_millis(500);
/// How often it looks at most: librbd's watches end after 30 s.
const POLLS_MAX: u32 = 240;

/// After how many clients the image is looked at: each look is three more of them.
const CLIENTS_A_LOOK: usize = 6;

/// What changes where an image is listed and no byte of it, and is not refused.
const GET_THROUGH: &[&str] = &["rbd trash mv", "rbd deep cp from it"];
/// What no image can have done to it that is there.
const NEVER: &str = "rbd import over it";
/// What not every build of Ceph's tools supports.
const NOT_EVERYWHERE: &str = "rbd encryption format";
/// What no image without a mirror can do.
const NEEDS_A_MIRROR: &str = "rbd mirror image promote";

/// Recognisable content that is different for each `seed`.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = tidepool_testkit::rng::Rng::new(seed);
    let mut data = vec![0; len];
    data.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.word().to_le_bytes()));
    data
}

/// Writes `data` to a volume, and flushes it.
fn fill(socket: &Path, volume: &str, offset: u64, data: &[u8]) {
    const PIECE_BYTES: usize = 256 << 10;
    let mut client = Nbd::connect(socket, volume).expect("connected");
    for (at, piece) in (offset..).step_by(PIECE_BYTES).zip(data.chunks(PIECE_BYTES)) {
        client.write(at, piece).expect("absorbed");
    }
    client.flush().expect("flushed");
}

/// Two images that are served and what their clients have written.
struct Stage {
    cluster: Cluster,
    rig: Rig,
    images: [&'static str; 2],
    model: Vec<u8>,
    /// Clients that were not refused as they should be, and what they did.
    through: Vec<String>,
    /// What clients have come to.
    seen: Vec<(&'static str, Verdict)>,
}

impl Stage {
    /// Images with a parent, a snapshot and content, served and drained.
    fn new() -> Stage {
        let cluster = Cluster::up(&ClusterOptions::for_tests()).expect("a cluster");
        let scratch = Scratch::new("rig").expect("a directory");
        let model = pattern(1, IMAGE_BYTES as usize);
        std::fs::write(scratch.join("disk"), pattern(2, IMAGE_BYTES as usize)).expect("a disk");
        std::fs::write(scratch.join("parent"), &model).expect("a disk");
        cluster.rbd_import(&scratch.join("parent"), "parent").expect("an image");
        let rbd = |arguments: &[&str]| drop(cluster.rbd(arguments).expect("rbd"));
        rbd(&["snap", "create", "--no-progress", "parent@base"]);
        rbd(&["snap", "protect", "parent@base"]);
        rbd(&["mirror", "pool", "enable", "rbd", "image"]);
        let images = ["served", VICTIM];
        for image in images {
            rbd(&["clone", "parent@base", image]);
        }
        rbd(&["snap", "create", "--no-progress", &format!("{}@before", images[0])]);
        // A difference that can be imported into any image of this size.
        cluster.rbd_create("other", IMAGE_BYTES).expect("an image");
        rbd(&["bench", "--io-type", "write", "--io-total", "1M", "other"]);
        rbd(&["export-diff", "--no-progress", "other", &scratch.join("diff").to_string_lossy()]);
        let uri = |image: &str| cluster.uri(image);
        let volumes = vec![(VOLUME.to_string(), uri(images[0])), (VICTIM.to_string(), uri(VICTIM))];
        let options = RigOptions { cache_bytes: 128 * MIB, volumes, extra: Vec::new() };
        let rig = Rig::within(scratch, &options).expect("a rig");
        let mut stage =
            Stage { cluster, rig, images, model, through: Vec::new(), seen: Vec::new() };
        stage.rig.daemon.start().expect("the daemon starts");
        stage.write(3, 0, 4 * MIB as usize);
        for volume in [VOLUME, VICTIM] {
            stage.rig.admin.drain(volume).expect("drained");
        }
        stage
    }

    /// Writes to both volumes.
    fn write(&mut self, seed: u64, offset: u64, len: usize) {
        let data = pattern(seed, len);
        for volume in [VOLUME, VICTIM] {
            fill(&self.rig.socket, volume, offset, &data);
        }
        self.model[offset as usize..offset as usize + len].copy_from_slice(&data);
    }

    /// Leaves dirty data behind: nothing can be drained while the OSD stands still, and then the
    /// daemon is dead.
    fn kill_dirty(&mut self) {
        self.cluster.osd_stop(0).expect("the OSD is stopped");
        self.write(4, 2 * MIB, 16 * MIB as usize);
        self.rig.daemon.kill().expect("kill");
        self.cluster.osd_continue(0).expect("the OSD goes on");
        let cache = self.rig.cache.to_string_lossy().into_owned();
        let output =
            daemon::run(["cache", "inspect", &cache, "--format", "json"]).expect("tidepool runs");
        let found: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        // The images are clones, whose parent has a volume, too.
        let is_served = |volume: &&serde_json::Value| volume["read_only"] == false;
        for volume in found["volumes"].as_array().expect("a list").iter().filter(is_served) {
            assert!(volume["dirty_bytes"].as_u64() >= Some(4 * MIB), "{volume}");
        }
        // What the dead client had sent already may still be executed.
        for image in self.images {
            let mut last = State::of(&self.cluster, image).expect("the image can be read");
            for _ in 0..POLLS_MAX {
                std::thread::sleep(POLL);
                let now = State::of(&self.cluster, image).expect("the image can be read");
                if std::mem::replace(&mut last, now.clone()) == now {
                    break;
                }
            }
            assert_ne!(
                last.sum(),
                clients::sum_of(&self.model),
                "something is missing in the image"
            );
        }
    }

    /// Addresses of the clients that have an image open, or have died with it open in the last
    /// 30 s.
    fn watchers(&self, image: &str) -> BTreeSet<String> {
        let status = self.cluster.rbd(&["status", "--format", "json", image]).expect("rbd status");
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let watchers = status["watchers"].as_array().expect("a list");
        watchers
            .iter()
            .map(|watcher| watcher["address"].as_str().expect("an address").to_owned())
            .collect()
    }

    /// Waits until the OSD has forgotten the clients that have died.
    fn wait_forgotten(&self, images: &[&str]) {
        for image in images {
            if self.is_forgotten(image) {
                continue;
            }
            // A client that dies while its watch is being registered is never forgotten (Ceph's
            // tracker, 58120), not even when it is fenced, until the OSD peers anew and finds that
            // nobody pings.
            let left = self.watchers(image);
            self.cluster.ceph(&["osd", "down", "0"]).expect("the OSD peers anew");
            assert!(
                self.is_forgotten(image),
                "a dead client of {image} is never forgotten: {left:?}"
            );
        }
    }

    /// Whether nobody has an image open any more, after two minutes at most.
    fn is_forgotten(&self, image: &str) -> bool {
        (0..POLLS_MAX).any(|poll| {
            if poll > 0 {
                std::thread::sleep(POLL);
            }
            self.watchers(image).is_empty()
        })
    }

    /// Runs clients on a guarded image. Not one may hang or change a byte; which of them get
    /// through otherwise, beside those named in `allowed`, is noted.
    fn try_all(&mut self, when: &str, image: &str, clients: &[Client], allowed: &[&str]) {
        let before = State::of(&self.cluster, image).expect("the image can be read");
        for some in clients.chunks(CLIENTS_A_LOOK) {
            let outcomes: Vec<_> = some
                .iter()
                .map(|client| {
                    let outcome = run(client, &self.cluster, &self.rig.scratch, image);
                    println!("{when:10} {:26} {outcome}", client.name);
                    (client.name, outcome)
                })
                .collect();
            let after = State::of(&self.cluster, image);
            let same = after.as_ref().is_ok_and(|after| *after == before);
            let changed = if same { "unchanged" } else { "CHANGED, by it or one beside it" };
            for (name, outcome) in outcomes {
                let what = format!("{when}: {name}: {outcome}; {changed}");
                match outcome {
                    Outcome::Refused(line) if same && !line.is_empty() => {
                        self.seen.push((name, Verdict::Refused));
                    }
                    Outcome::Done if same && allowed.contains(&name) => {
                        self.seen.push((name, Verdict::Harmless));
                    }
                    _ => self.through.push(what),
                }
            }
        }
    }

    /// A second Tidepool with a cache of its own.
    fn try_second_tidepool(&mut self, when: &str) {
        let uri = self.cluster.uri(self.images[0]);
        let before = State::of(&self.cluster, self.images[0]).expect("the image can be read");
        let scratch = &self.rig.scratch;
        let output = daemon::run([
            "serve".to_string(),
            format!("--cache={}", scratch.join("second").display()),
            "--cache-size=64MiB".to_string(),
            format!("--volume=vm={uri}"),
            format!("--nbd=nbd+unix:///?socket={}", scratch.join("second.sock").display()),
            format!("--admin={}", scratch.join("second-admin.sock").display()),
        ]);
        let (status, line) = complaint(&output.expect("tidepool runs"));
        println!("{when:10} {:26} {line}", "second Tidepool");
        assert_eq!(status, 1);
        assert_eq!(
            State::of(&self.cluster, self.images[0]).expect("the image can be read"),
            before
        );
    }

    /// An image that somebody has moved to the trash is missed, and served again when it is back.
    fn trash_and_restore(&mut self) {
        let info = self.cluster.rbd(&["info", "--format", "json", VICTIM]).expect("rbd info");
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        self.cluster.rbd(&["trash", "mv", VICTIM]).expect("it is not kept from that");
        self.rig.daemon.start().expect("the other image is served");
        let volume = self.rig.admin.volume(VICTIM).expect("a status");
        assert!(
            volume["error"].as_str().is_some_and(|error| error.contains("rbd trash restore")),
            "{volume}"
        );
        self.cluster
            .rbd(&["trash", "restore", info["id"].as_str().expect("an id")])
            .expect("it is back");
        let serving = |volume: &serde_json::Value| {
            volume["state"] == "serving" || volume["state"] == "draining"
        };
        self.rig.admin.wait_volume(VICTIM, POLL * POLLS_MAX, serving).expect("it is found again");
        self.rig.daemon.kill().expect("kill");
    }

    /// All of the clients on an image that was given back: they work at once.
    fn use_it_all(&mut self, when: &str) {
        let image = self.images[0];
        let possible = |client: &&Client| client.name != NEEDS_A_MIRROR && client.name != NEVER;
        for client in WRITERS.iter().chain(CHANGERS).chain(MORE_CHANGERS).filter(possible) {
            let outcome = run(client, &self.cluster, &self.rig.scratch, image);
            println!("{when:10} {:26} {outcome}", client.name);
            match &outcome {
                Outcome::Refused(line)
                    if client.name == NOT_EVERYWHERE && line.contains("not supported") => {}
                _ => assert_eq!(outcome, Outcome::Done, "{}", client.name),
            }
        }
        let uri = self.cluster.uri(image);
        let volumes = vec![(VOLUME.to_string(), uri)];
        let options = RigOptions { cache_bytes: 64 * MIB, volumes, extra: Vec::new() };
        let mut second = Rig::new(&options).expect("a rig");
        second.daemon.start().expect("another cache may have it");
        println!("{when:10} {:26} DONE", "second Tidepool");
        second
            .admin
            .call("DELETE", &format!("/v1/volumes/{VOLUME}"), None)
            .expect("it is given back");
        assert!(second.daemon.terminate().expect("it ends").success());
    }

    /// All clients that must be refused, whatever has become of our daemon.
    fn matrix(&mut self, when: &str) {
        self.try_all(when, self.images[0], WRITERS, &[]);
        for some in [CHANGERS, MORE_CHANGERS] {
            self.try_all(when, self.images[0], some, GET_THROUGH);
        }
        self.try_second_tidepool(when);
    }
}

#[test]
fn an_image_that_was_written_all_the_same_is_not_drained_over_and_both_sides_are_exported() {
    const FOREIGN: usize = 24 * MIB as usize;
    let _turn = one_at_a_time();
    let mut stage = Stage::new();
    stage.kill_dirty();
    stage.wait_forgotten(&stage.images);
    let image = stage.images[0];
    let uri = stage.cluster.uri(image);
    // Somebody takes the cache for lost, and others write: where it has dirty data, and where it
    // has nothing.
    let given_up = daemon::run(["recover", &uri, "--accept-loss"]).expect("tidepool runs");
    assert!(given_up.status.success(), "{given_up:?}");
    let foreign = Client {
        name: "somebody",
        line: "qemu-io -f raw -c 'write -P 0x66 4M 64k' -c 'write -P 0x66 24M 64k' rbd:rbd/IMG:conf=CONF",
    };
    assert_eq!(run(&foreign, &stage.cluster, &stage.rig.scratch, image), Outcome::Done);
    let theirs = stage.cluster.rbd_checksum(image).expect("rbd export");

    let volume = {
        stage.rig.daemon.start().expect("the other volume is served");
        stage.rig.admin.volume(VOLUME).expect("a status")
    };
    let error = volume["error"].as_str().expect("it is refused").to_string();
    assert!(
        error.contains("must not be written over") && error.contains("tidepool cache export"),
        "{error}"
    );
    assert!(stage.rig.daemon.terminate().expect("it ends").success());
    assert_eq!(
        stage.cluster.rbd_checksum(image).expect("rbd export"),
        theirs,
        "nothing is drained over it"
    );

    let (cache, out) =
        (stage.rig.cache.to_string_lossy().into_owned(), stage.rig.scratch.join("ours"));
    let out_text = out.to_string_lossy().into_owned();
    let export =
        ["cache", "export", &cache, "--volume", VOLUME, "--image", &uri, "--out", &out_text];
    let output = daemon::run(export).expect("tidepool runs");
    assert!(output.status.success(), "{output:?}");
    let mut ours = std::fs::read(&out).expect("an export");
    assert!(
        ours[FOREIGN..FOREIGN + 65536].iter().all(|byte| *byte == 0x66),
        "what the cache does not know"
    );
    ours[FOREIGN..FOREIGN + 65536].copy_from_slice(&stage.model[FOREIGN..FOREIGN + 65536]);
    assert!(ours == stage.model, "our side is what clients saw");
    assert_eq!(
        stage.cluster.rbd_checksum(image).expect("rbd export"),
        theirs,
        "and theirs is untouched"
    );
}
