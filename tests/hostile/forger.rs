//! A host with a certificate of the authority that can write ownership records, too: it names
//! itself as the owner of what another host has left in a copy.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tidepool_engine::api::{Begin, Room};
use tidepool_replica::wire::Message;
use tidepool_testkit::admin::in_sync;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::stamps::{Progress, Workload};
use tidepool_testkit::{daemon, one_at_a_time};
use tidepool_tests::pair::Host;
use tidepool_tests::rig::{MIB, VOLUME};
use tidepool_tests::trio::{Loss, Trio};

use crate::intruder::Intruder;
use crate::liar::pretend;
use crate::peers::{Facts, HOLDER, OWNER, THIRD, beginnings, cache_of, number, text};

/// How long the workload writes before its owner is gone.
const LOAD: Duration = Duration::from_millis(500);

/// The ownership record of the volume.
struct Record(PathBuf);

impl Record {
    fn of(trio: &Trio) -> Record {
        Record(trio.scratch.join("image.tidepool"))
    }

    fn read(&self) -> Value {
        serde_json::from_slice(&fs::read(&self.0).expect("a record")).expect("JSON")
    }

    fn write(&self, record: &Value) {
        fs::write(&self.0, serde_json::to_vec(record).expect("JSON")).expect("written");
    }
}

/// Writes until the owner is gone; what the copy has then is in no image.
fn lose_owner_under_load(trio: &mut Trio, workload: &mut Workload) {
    let stop = AtomicBool::new(false);
    let owner = &mut trio.hosts[OWNER];
    let end = std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        std::thread::sleep(LOAD);
        let killed = owner.daemon.kill();
        stop.store(true, Ordering::Relaxed);
        killed.expect("killed");
        run.join().expect("no panic")
    });
    assert_eq!(end.expect("no request fails"), Progress::Disconnected);
    workload.server_died();
    wait_for_all(&trio.hosts[HOLDER]);
    assert!(dirty_bytes(&trio.hosts[HOLDER]) > 0, "the copy has what the image has not");
}

/// Waits until a copy has all that its owner, which is dead, had sent.
fn wait_for_all(holder: &Host) {
    holder.daemon.wait_log("connection with another host lost").expect("it says so");
    let mut before = None;
    while before != Some(dirty_bytes(holder)) {
        before = Some(dirty_bytes(holder));
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn image(trio: &Trio) -> String {
    format!("file:{}", trio.scratch.join("image").display())
}

/// Runs a command, which works.
fn tidepool(arguments: &[&str]) {
    let output = daemon::run(arguments);
    assert!(
        output.as_ref().is_ok_and(|output| output.status.success()),
        "{arguments:?}: {output:?}"
    );
}

fn dirty_bytes(host: &Host) -> u64 {
    let volume = host.volume().expect("a status").expect("the copy");
    volume["dirty_bytes"].as_u64().expect("a number")
}

#[test]
fn g6_a_forged_record_gets_nobody_the_copy_that_is_all_that_is_left() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    let mut workload = trio.workload(901);
    let record = Record::of(&trio);
    lose_owner_under_load(&mut trio, &mut workload);
    let (truth, dirty) = (record.read(), dirty_bytes(&trio.hosts[HOLDER]));
    let generation = truth["generation"].as_u64().expect("a number");
    let holder = truth["peer"].clone();
    // With its own cache, or with that of the true owner, which stands in the record.
    let caches = [cache_of(&trio, THIRD), number(truth["cache_uuid"].as_str().expect("a uuid"))];
    let cases = caches.into_iter().flat_map(|cache| [(cache, generation), (cache, generation + 1)]);
    for (cache, generation) in cases {
        for peer in [Value::Null, holder.clone()] {
            let mut forged = truth.clone();
            forged["generation"] = json!(generation);
            forged["cache_uuid"] = json!(text(cache));
            forged["host"] = json!("h2");
            forged["copies"] = json!(if peer.is_null() { "solo" } else { "sync" });
            forged["peer"] = peer;
            record.write(&forged);
            let facts = Facts { cache, generation, image: image(&trio) };
            for message in &beginnings(facts.call_it("h2", VOLUME, &facts.image), "h1") {
                let mut intruder = Intruder::connect(&trio, THIRD, HOLDER, THIRD);
                intruder.send(message).expect("sent");
                let why = intruder.refusal();
                assert!(why.contains("is kept for host h0"), "{forged}: {message:?}: {why}");
            }
        }
    }
    assert_eq!(dirty_bytes(&trio.hosts[HOLDER]), dirty, "nothing is lost");
    record.write(&truth);
    trio.fail_over(HOLDER, &mut workload).expect("the copy has everything");
    workload.disconnect().expect("goodbye");
}

/// A host that has said welcome, and was never sent anything, has no more right to what is here
/// than one that has not.
#[test]
fn g6_a_host_that_has_held_nothing_does_not_get_what_is_kept_for_the_one_that_held_a_copy() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    let mut workload = trio.workload(913);
    let (record, cache) = (Record::of(&trio), cache_of(&trio, THIRD));
    let stop = AtomicBool::new(false);
    let end = std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        std::thread::sleep(LOAD);
        for lost in [THIRD, HOLDER] {
            trio.hosts[lost].daemon.kill().expect("killed");
        }
        let tried = pretend(&trio, THIRD, cache, || {
            let is_tried = |volume: &Value| {
                volume["peer"] == "h2" && volume["replication"]["phase"] == "filling"
            };
            trio.owner().wait("a copy begins on the third host", is_tried)
        });
        let killed = trio.hosts[OWNER].daemon.kill();
        stop.store(true, Ordering::Relaxed);
        tried.expect("welcome");
        killed.expect("killed");
        run.join().expect("no panic")
    });
    assert_eq!(end.expect("no request fails"), Progress::Disconnected);
    let mut forged = record.read();
    let generation = forged["generation"].as_u64().expect("a number") + 1;
    forged["generation"] = json!(generation);
    forged["cache_uuid"] = json!(text(cache));
    forged["host"] = json!("h2");
    forged["copies"] = json!("solo");
    forged.as_object_mut().expect("a record").remove("peer");
    record.write(&forged);
    trio.hosts[OWNER].daemon.start().expect("it is back");
    assert!(dirty_bytes(&trio.hosts[OWNER]) > 0, "it has what the image has not");
    let facts = Facts { cache, generation, image: image(&trio) };
    for message in &beginnings(facts.call_it("h2", VOLUME, &facts.image), "h0") {
        let mut intruder = Intruder::connect(&trio, THIRD, OWNER, THIRD);
        intruder.send(message).expect("sent");
        let why = intruder.refusal();
        assert!(why.contains("is kept for host h1"), "{message:?}: {why}");
    }
}

/// What a former owner has left with everything in the image stands in no other owner's way.
#[test]
fn g4_what_a_former_owner_has_left_in_the_image_gives_way_to_another_owners_copy() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    trio.owner().admin.call("POST", &format!("/v1/volumes/{VOLUME}/drain"), None).expect("drained");
    trio.hosts[OWNER].daemon.terminate().expect("it ends");
    trio.hosts[HOLDER].daemon.kill().expect("killed");
    let volume = json!({ "name": VOLUME, "backend": image(&trio) });
    trio.hosts[THIRD].admin.call("POST", "/v1/volumes", Some(&volume)).expect("served");
    trio.hosts[OWNER].daemon.start().expect("it is back");
    let volume = trio.hosts[THIRD].wait_sync().expect("in sync");
    assert_eq!(volume["peer"], "h0", "{volume}");
}

/// What the message says leads out, where the host that the copy is kept for has lost it in all
/// honesty, and another one serves the volume.
#[test]
fn g4_a_copy_that_is_kept_for_a_lost_host_is_forgotten_by_a_command_and_then_begins_anew() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    let mut workload = trio.workload(907);
    lose_owner_under_load(&mut trio, &mut workload);
    trio.set(Loss::Cable(HOLDER), false);
    // An operator believes that both are lost.
    let (image, third) = (image(&trio), &trio.hosts[THIRD]);
    tidepool(&["recover", &image, "--accept-loss"]);
    let volume = json!({ "name": VOLUME, "backend": image });
    third.admin.call("POST", "/v1/volumes", Some(&volume)).expect("served");
    trio.set(Loss::Cable(HOLDER), true);

    let way_out = "tidepool volume remove vm --give-up --accept-loss";
    let kept = "is kept for host h0, until that one says that it needs nothing of it";
    third.daemon.wait_log(kept).expect("it says so");
    third
        .daemon
        .wait_log(&format!("if nobody needs it, forget it on the host that keeps it ({way_out})"))
        .expect("it says so");
    // What is kept can be saved before it is forgotten.
    let holder = &mut trio.hosts[HOLDER];
    holder.daemon.terminate().expect("it ends");
    let (cache, saved) = (holder.cache.display().to_string(), trio.scratch.join("saved"));
    tidepool(&[
        "cache",
        "export",
        &cache,
        "--volume",
        VOLUME,
        "--out",
        &saved.display().to_string(),
    ]);
    assert!(fs::metadata(&saved).expect("a file").blocks() > 0, "it has what is dirty");
    holder.daemon.start().expect("it starts");
    let mut command: Vec<&str> = way_out.split(' ').skip(1).collect();
    let admin = trio.hosts[HOLDER].admin.socket().display().to_string();
    command.extend(["--admin", &admin]);
    tidepool(&command);
    let volume = trio.hosts[THIRD].wait_sync().expect("in sync");
    assert_eq!(volume["peer"], "h1", "{volume}");
}

/// A host was away, and the copies that it has are stale: while their owner lives it says so, and
/// when that one is lost later they stand in nobody's way.
#[test]
fn g4_a_stale_copy_whose_owner_has_another_one_is_no_obstacle_when_that_owner_is_lost() {
    let _turn = one_at_a_time();
    // The owner would leave the third host for the preferred one if a busy machine kept these two
    // from each other for a moment.
    let mut trio = Trio::patient_on_file().expect("three hosts");
    let mut workload = trio.workload(911);
    let stop = AtomicBool::new(false);
    let end = std::thread::scope(|scope| {
        let run = scope.spawn(|| workload.run_until(&stop));
        std::thread::sleep(LOAD);
        let killed = trio.hosts[HOLDER].daemon.kill();
        let next = trio
            .owner()
            .wait("a copy on the next host", |volume| in_sync(volume) && volume["peer"] == "h2");
        stop.store(true, Ordering::Relaxed);
        killed.expect("killed");
        next.expect("in sync");
        run.join().expect("no panic")
    });
    assert_eq!(end.expect("no request fails"), Progress::Done);
    // It is not to become the holder again, which is preferred.
    trio.set(Loss::OneWay { from: OWNER, to: HOLDER }, false);
    trio.hosts[HOLDER].daemon.start().expect("it is back");
    assert!(dirty_bytes(&trio.hosts[HOLDER]) > 0, "it has what it had");
    trio.set(Loss::OneWay { from: OWNER, to: HOLDER }, true);
    trio.hosts[HOLDER]
        .daemon
        .wait_log("host h0 needs nothing of the copy here")
        .expect("it says so");
    trio.hosts[OWNER].daemon.kill().expect("killed");
    trio.fail_over(THIRD, &mut workload).expect("the other copy has everything");
    let volume = trio.hosts[THIRD].wait_sync().expect("in sync");
    assert_eq!(volume["peer"], "h1", "{volume}");
    workload.disconnect().expect("goodbye");
}

/// Whether a former owner says that it needs the copy of the volume on host `holder`.
fn is_needed(trio: &Trio, holder: usize) -> bool {
    is_needed_of(trio, holder, (VOLUME, &image(trio)))
}

fn is_needed_of(trio: &Trio, holder: usize, (name, image): (&str, &str)) -> bool {
    let host = format!("h{holder}");
    let mut asking = Intruder::connect(trio, holder, OWNER, holder);
    asking.send(&Message::Needs { host: &host, name, image }).expect("sent");
    let answer = asking.receive(|message| match message {
        Message::Needed { needed, .. } => Ok(*needed),
        other => Err(format!("{other:?}")),
    });
    answer.expect("an answer").expect("yes or no")
}

/// What has moved to a host is that one's own, also while it looks like a copy there: nobody says
/// that it is not needed. Other hosts' copies are not, however the volume has moved.
#[test]
fn g4_a_former_owner_needs_what_the_new_one_has_and_no_other_hosts_copy() {
    let _turn = one_at_a_time();
    for live in [false, true] {
        let trio = Trio::on_file().expect("three hosts");
        let admin = &trio.owner().admin;
        let handoff = format!("/v1/volumes/{VOLUME}/handoff");
        admin.call("POST", &handoff, Some(&json!({ "live": live }))).expect("handed over");
        let mut guest = Client::connect(&trio.hosts[HOLDER].socket, VOLUME).expect("let in");
        guest.write(0, &[7; 4096]).expect("written");
        let volume = trio.hosts[HOLDER].wait_sync().expect("in sync");
        assert_eq!(volume["peer"], "h0", "{volume}");
        assert_eq!(trio.owner().volume().expect("a status").expect("the copy")["state"], "replica");
        assert!(is_needed(&trio, HOLDER), "live: {live}: it is the owner's own");
        assert!(!is_needed(&trio, THIRD), "live: {live}: another host's copy is stale");
    }
}

/// What is on its way to a copy that counts may be acknowledged before anything here is dirty.
#[test]
fn g4_a_copy_that_its_owner_is_in_sync_with_is_needed_whatever_the_image_has() {
    let _turn = one_at_a_time();
    let trio = Trio::patient_on_file().expect("three hosts");
    let mut guest = Client::connect(&trio.owner().socket, VOLUME).expect("let in");
    guest.write(0, &[7; 4096]).expect("written");
    trio.owner().admin.call("POST", &format!("/v1/volumes/{VOLUME}/drain"), None).expect("drained");
    assert_eq!(dirty_bytes(trio.owner()), 0, "the image has everything");
    assert!(is_needed(&trio, HOLDER), "it counts");
    assert!(!is_needed(&trio, THIRD), "no other host has anything that is missing");
}

/// A host that only reads an image knows nothing of what a copy of it has.
#[test]
fn g4_a_host_that_reads_a_volume_does_not_say_that_its_copies_are_not_needed() {
    let _turn = one_at_a_time();
    let trio = Trio::on_file().expect("three hosts");
    let path = trio.scratch.join("read");
    File::create(&path).and_then(|file| file.set_len(MIB)).expect("an image");
    let image = format!("file:{}", path.display());
    let volume = json!({ "name": "read", "backend": image, "read_only": true });
    trio.owner().admin.call("POST", "/v1/volumes", Some(&volume)).expect("served");
    assert!(is_needed_of(&trio, HOLDER, ("read", &image)));
}

/// It names as many images as it likes, and sends copies of them: others have places left, and this
/// host for its own volumes.
#[test]
fn g8_a_host_takes_no_more_than_its_part_of_the_places_for_volumes() {
    /// Three quarters of the places that a small cache has.
    const COPIES_MAX: usize = 12;
    let _turn = one_at_a_time();
    let trio = Trio::on_file().expect("three hosts");
    let mut forged = Record::of(&trio).read();
    let (cache, generation) = (cache_of(&trio, THIRD), 1);
    forged["cache_uuid"] = json!(text(cache));
    forged["host"] = json!("h2");
    forged["copies"] = json!("solo");
    forged["generation"] = json!(generation);
    for left_out in ["peer", "image", "taken_at"] {
        forged.as_object_mut().expect("a record").remove(left_out);
    }
    let refusal = (0..=COPIES_MAX).find_map(|number| {
        let name = format!("flood-{number}");
        let path = trio.scratch.join(&name);
        File::create(&path).and_then(|file| file.set_len(MIB)).expect("an image");
        Record(trio.scratch.join(format!("{name}.tidepool"))).write(&forged);
        let facts = Facts { cache, generation, image: format!("file:{}", path.display()) };
        let mut intruder = Intruder::connect(&trio, THIRD, HOLDER, THIRD);
        let [hello, ..] = beginnings(facts.call_it("h2", &name, &facts.image), "h1");
        intruder.send(&hello).expect("sent");
        let begin = Begin { generation, size_bytes: MIB, base: 0, room: Room::default() };
        let answer = intruder.receive(|message| match message {
            Message::Welcome { .. } => None,
            other => Some(format!("{other:?}")),
        });
        if let Some(why) = answer.expect("an answer") {
            return Some((number, why));
        }
        intruder.send(&Message::Begin(begin)).expect("sent");
        let begun = loop {
            let said = intruder.receive(|message| match message {
                Message::Beat { .. } => None,
                other => Some(matches!(other, Message::Begun { .. })),
            });
            if let Some(begun) = said.expect("an answer") {
                break begun;
            }
        };
        assert!(begun, "the copy of {name} begins");
        None
    });
    let (copies, why) = refusal.expect("there is an end");
    assert!(why.contains(&format!("the limit is {COPIES_MAX}")), "{why}");
    assert_eq!(copies, COPIES_MAX);
    // An honest host's copy has a place, and this host's own volume.
    let more = trio.add(OWNER, "honest", MIB).expect("in sync");
    assert_eq!(more["peer"], "h1", "{more}");
    trio.add(HOLDER, "own", MIB).expect("in sync");
}
