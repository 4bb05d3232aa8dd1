//! Every operation of Ceph's tools on an image that a cache owns, whatever has become of the cache,
//! comes to what the manual says of it, and none changes a byte. Once the image is given back, all
//! of them work at once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use tidepool_testkit::nbd::Client as Nbd;
use tidepool_testkit::one_at_a_time;
use tidepool_tests::rig::{MIB, VOLUME};

use crate::clients::{LOCK_BREAKER, Outcome, REMOVERS, State, run, sum_of};
use crate::{POLL, POLLS_MAX, Stage, VICTIM};

/// What an operation comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It fails and changes nothing.
    Refused,
    /// It works, and changes nothing of what is in the image.
    Harmless,
    /// It works, and the daemon says what it has come to; nothing that was acknowledged is lost, or
    /// written where it does not belong.
    Noticed,
}

impl Verdict {
    /// Its spelling in the manual.
    fn as_str(self) -> &'static str {
        match self {
            Verdict::Refused => "refused",
            Verdict::Harmless => "harmless",
            Verdict::Noticed => "noticed",
        }
    }
}

/// A column of the manual's table.
#[derive(Debug, Clone, Copy)]
pub enum Column {
    Served,
    OwnerDead,
    Journaled,
}

/// Checks what operations have come to against a column of the manual's table, which has a row for
/// each of them.
pub fn check_manual<'a>(column: Column, found: impl Iterator<Item = (&'a str, Verdict)>) {
    let manual = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/backends.md");
    let manual = std::fs::read_to_string(manual).expect("the manual");
    let (_, table) = manual.split_once("| operation |").expect("the table");
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    let mut stands = BTreeMap::new();
    for row in rows {
        let mut cells = row.split('|').skip(1).map(str::trim);
        let names = cells.next().expect("a row has names");
        let cell = cells.nth(column as usize).expect("a row has a cell for each column");
        for name in names.split('`').skip(1).step_by(2) {
            assert!(
                stands.insert(name.to_owned(), cell.to_owned()).is_none(),
                "{name} stands there twice"
            );
        }
    }
    let wrong: Vec<String> = found
        .filter(|(name, verdict)| {
            stands.get(*name).is_none_or(|cell| !cell.starts_with(verdict.as_str()))
        })
        .map(|(name, verdict)| {
            format!("{name}: {verdict:?}, the manual says {:?}", stands.get(name))
        })
        .collect();
    assert!(wrong.is_empty(), "{column:?}:\n{}", wrong.join("\n"));
}

impl Stage {
    /// All operations while a client writes what is there already, so that the cache is dirty and
    /// the image stays what it is.
    fn matrix_while_dirty(&mut self, when: &str) {
        let (socket, data) = (self.rig.socket.clone(), self.model[..MIB as usize].to_vec());
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut client = Nbd::connect(&socket, VOLUME).expect("connected");
                let mut rounds = 0;
                while !over.load(Ordering::Relaxed) {
                    client.write(0, &data).expect("absorbed");
                    client.flush().expect("flushed");
                    rounds += 1;
                }
                rounds
            });
            let dirty = |volume: &serde_json::Value| volume["dirty_bytes"].as_u64() > Some(0);
            self.rig.admin.wait_volume(VOLUME, POLL * POLLS_MAX, dirty).expect("it is dirty");
            self.matrix(when);
            over.store(true, Ordering::Relaxed);
            assert!(
                writer.join().expect("it writes to the end") > 100,
                "it has written all the time"
            );
        });
    }

    /// Somebody breaks the lock of an owner that is alive, which fences it: it says so, and comes
    /// back.
    fn break_the_lock(&mut self, when: &str) {
        let before = State::of(&self.cluster, VICTIM).expect("the image can be read");
        let outcome = run(&LOCK_BREAKER, &self.cluster, &self.rig.scratch, VICTIM);
        println!("{when:10} {:26} {outcome}", LOCK_BREAKER.name);
        assert_eq!(outcome, Outcome::Done);
        // A host that is fenced learns it from an answer. The volume is let go of then, and has no
        // clients until it comes back.
        let mut client = Nbd::connect(&self.rig.socket, VICTIM).expect("connected");
        let asked = client.write(0, &self.model[..4096]).and_then(|()| client.flush());
        drop(client);
        let fenced = |line: &str| line.contains(VICTIM) && line.contains("blocklisted");
        for poll in 0.. {
            let log = self.rig.daemon.log();
            if log.lines().any(fenced) {
                break;
            }
            assert!(poll < POLLS_MAX, "nobody has noticed: {asked:?} {log}");
            std::thread::sleep(POLL);
        }
        let serving = |volume: &serde_json::Value| volume["state"] == "serving";
        self.rig
            .admin
            .wait_volume(VICTIM, POLL * POLLS_MAX, serving)
            .expect("it comes back by itself");
        self.rig.admin.drain(VICTIM).expect("drained");
        assert_eq!(State::of(&self.cluster, VICTIM).expect("the image can be read"), before);
        self.seen.push((LOCK_BREAKER.name, Verdict::Noticed));
    }

    /// Somebody removes an image whose newest data is in the cache: the daemon says so, serves the
    /// other one, and forgets it when it is told to.
    fn remove_for_good(&mut self, when: &str) {
        let remover = REMOVERS.last().expect("there are some");
        let outcome = run(remover, &self.cluster, &self.rig.scratch, VICTIM);
        println!("{when:10} {:26} {outcome}", remover.name);
        assert_eq!(outcome, Outcome::Done);
        self.rig.daemon.start().expect("the other image is served");
        let volume = self.rig.admin.volume(VICTIM).expect("a status");
        let error = volume["error"].as_str().unwrap_or_default();
        assert!(error.contains("no such image") && error.contains("--give-up"), "{volume}");
        let give_up = serde_json::json!({ "accept_loss": true });
        let path = format!("/v1/volumes/{VICTIM}/give-up");
        let given = self.rig.admin.call("POST", &path, Some(&give_up)).expect("it is forgotten");
        assert!(given["bytes"].as_u64() > Some(0), "{given}");
    }
}

#[test]
fn g6_every_operation_of_ceph_comes_to_what_the_manual_says() {
    let _turn = one_at_a_time();
    let mut stage = Stage::new();
    println!("{}", stage.cluster.ceph(&["--version"]).expect("ceph"));
    stage.matrix("served");
    stage.try_all("served", VICTIM, REMOVERS, &[]);
    stage.matrix_while_dirty("dirty");
    stage.try_all("dirty", VICTIM, REMOVERS, &[]);
    stage.break_the_lock("dirty");
    let served = std::mem::take(&mut stage.seen);

    stage.kill_dirty();
    stage.matrix("killed");
    stage.wait_forgotten(&stage.images);
    stage.try_all("forgotten", VICTIM, &[LOCK_BREAKER], &[LOCK_BREAKER.name]);
    stage.matrix("forgotten");
    assert!(stage.through.is_empty(), "not refused:\n{}", stage.through.join("\n"));
    let dead = std::mem::take(&mut stage.seen);

    let image = stage.images[0];
    // Some of Ceph's own clients have died of being refused.
    let strangers = stage.watchers(image);
    stage.trash_and_restore();
    stage.wait_forgotten(&[VICTIM]);
    stage.remove_for_good("forgotten");
    stage
        .rig
        .admin
        .call("DELETE", &format!("/v1/volumes/{VOLUME}"), None)
        .expect("it is given back");
    assert!(stage.rig.daemon.terminate().expect("it ends").success());
    assert_eq!(
        stage.cluster.rbd_checksum(image).expect("rbd export"),
        sum_of(&stage.model),
        "nothing is lost"
    );
    assert!(stage.watchers(image).is_subset(&strangers), "nothing of ours is left");
    // No image is migrated while a client that has died counts as one that has it open.
    stage.wait_forgotten(&[image]);
    stage.use_it_all("clean");
    let remover = &REMOVERS[0];
    let outcome = run(remover, &stage.cluster, &stage.rig.scratch, image);
    println!("{:10} {:26} {outcome}", "clean", remover.name);
    assert_eq!(outcome, Outcome::Done);

    for (column, found) in [(Column::Served, served), (Column::OwnerDead, dead)] {
        check_manual(column, found.into_iter());
    }
}
