//! Guarantees of an RBD backend, against a throw-away Ceph cluster.
//!
//! The tests share one cluster (with authentication) and run one at a time. On a machine without
//! Ceph's programs they say that they are not run, and do nothing.

mod content;

use crate::common::cluster::Shared;
use crate::common::{
    Driver, OTHER, OURS, a_forgetful_cache_is_refused, check, failed, open, options, other_as_peer,
    ownership, pattern, refused, take_over,
};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tidepool_backend::{BackendError, OpenOptions, Transfer};
use tidepool_cluster::ceph::Cluster;
use tidepool_cluster::process::Process;
use tidepool_engine::api::IoError;
use tidepool_engine::mem::AlignedBuf;

const MIB: u64 = 1 << 20;

/// Environment variable with the URI of the image, for a process that is a child of a test.
const CHILD_URI: &str = "TIDEPOOL_TEST_CHILD_URI";
/// Environment variable that is set for a child that is in sync with OTHER.
const CHILD_IN_SYNC: &str = "TIDEPOOL_TEST_CHILD_IN_SYNC";

fn serve(uri: &str) -> Driver {
    Driver::new(open(uri, options(OURS)).expect("opened").backend)
}

/// This test program again, as a process that holds the image and writes to it until it is killed.
struct Child {
    process: Process,
    attachment: Vec<u8>,
}

impl Child {
    fn start(uri: &str) -> Child {
        Child::start_with(uri, &[])
    }

    fn start_with(uri: &str, variables: &[&str]) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args([
            "--exact",
            "rbd::child_that_writes_until_it_is_killed",
            "--nocapture",
            "--include-ignored",
        ]);
        command.env(CHILD_URI, uri).stdin(Stdio::null()).stdout(Stdio::piped());
        command.envs(variables.iter().map(|variable| (variable, "1")));
        let mut process = Process::spawn(command).expect("a child");
        let mut lines = BufReader::new(process.child().stdout.take().expect("its output")).lines();
        let attachment = loop {
            let line = lines.next().expect("the child says that it is ready").expect("a line");
            if let Some((_, attachment)) = line.split_once("attachment ") {
                break attachment.as_bytes().to_vec();
            }
        };
        // The child has writes in flight by then.
        std::thread::sleep(Duration::from_millis(300));
        Child { process, attachment }
    }

    /// Kills the child and returns its attachment.
    fn kill(mut self) -> Vec<u8> {
        self.process.kill().expect("killed");
        self.attachment
    }
}

#[test]
#[ignore = "a part of other tests"]
fn child_that_writes_until_it_is_killed() {
    let Ok(uri) = std::env::var(CHILD_URI) else { return };
    let opened = open(&uri, options(OURS)).expect("opened");
    let attachment = String::from_utf8(opened.backend.attachment()).expect("text");
    let mut driver = Driver::new(opened.backend);
    if std::env::var(CHILD_IN_SYNC).is_ok() {
        driver.set_peer(Some(other_as_peer())).expect("named");
    }
    println!("attachment {attachment}");
    std::io::stdout().flush().expect("the pipe");
    let backend = driver.backend();
    let mut data = AlignedBuf::zeroed(4096);
    data.fill(0xC5);
    let submit = |backend: &mut dyn tidepool_backend::Backend, token: u64| {
        let transfer = Transfer::Write { offset: token * 4096, ptr: data.as_ptr(), len: 4096 };
        // SAFETY: the data outlives the loop below, which never ends, and is not changed.
        unsafe { backend.submit(token, transfer) }
    };
    (0..32).for_each(|token| submit(backend, token));
    loop {
        let mut done = Vec::new();
        std::thread::sleep(Duration::from_millis(1));
        backend.completions(&mut |token, result| done.push((token, result)));
        for (token, result) in done {
            assert_eq!(result, Ok(()));
            submit(backend, token);
        }
    }
}

#[test]
fn an_image_that_cannot_be_had_is_refused_with_the_reason() {
    let Some(cluster) = Shared::get() else { return };
    cluster
        .rbd(&["create", "plain", "--size", "8M", "--image-feature", "layering"])
        .expect("an image");
    cluster.rbd(&["create", "empty", "--size", "0"]).expect("an image");
    let conf = cluster.conf().display().to_string();
    for (uri, why) in [
        (cluster.uri("absent"), "no such image"),
        (format!("rbd:absent/x?conf={conf}"), "no pool `absent`"),
        (cluster.uri("absent/x"), "no such image"),
        (
            cluster.uri("plain"),
            &format!("rbd feature enable {}/plain exclusive-lock", cluster.pool()),
        ),
        (
            cluster.uri("empty"),
            &format!(
                "it is empty; give it a size first: rbd resize --size SIZE {}/empty",
                cluster.pool()
            ),
        ),
        ("rbd:rbd/x?conf=/nonexistent".into(), "/nonexistent"),
        (format!("rbd:rbd/x?conf={conf}&id=nobody"), "client.nobody"),
    ] {
        let line = refused(&uri, options(OURS));
        assert!(line.contains(why), "{uri}: {line}");
    }
}

#[test]
fn without_the_right_to_fence_an_image_is_refused_and_untouched() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("caps", 8);
    let weak = cluster.client("weak", "allow r", "allow rwx");
    let blind = cluster.client("blind", "profile rbd", "allow r");
    let good = cluster.client("good", "profile rbd", "profile rbd");
    let objects = |cluster: &Cluster| cluster.rados(&["ls"]).expect("objects").lines().count();
    let before = objects(&cluster);
    let line = refused(&format!("{uri}&id={weak}"), options(OURS));
    assert!(
        line.contains(&format!("client.{weak} may not fence"))
            && line.contains(&format!("ceph auth caps client.{weak}")),
        "{line}"
    );
    let line = refused(&format!("{uri}&id={blind}"), options(OURS));
    assert!(line.contains("permission denied"), "{line}");
    let unfenced =
        take_over(&format!("{uri}&id={weak}"), 0).expect_err("it could not fence").to_string();
    assert!(unfenced.contains(&format!("client.{weak} may not fence")), "{unfenced}");
    assert_eq!(objects(&cluster), before, "a refused open left something behind");
    assert!(cluster.foreign_write("caps"), "a refused open locked the image");
    let opened =
        open(&format!("{uri}&id={good}"), options(OURS)).expect("the documented rights suffice");
    Driver::new(opened.backend).close(true).expect("closed");
}

#[test]
fn an_image_locked_by_another_client_is_refused_and_left_to_it() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("busy", 64);
    let mut bench = Command::new("rbd");
    bench.args([
        "-c",
        &cluster.conf().display().to_string(),
        "bench",
        "--io-type",
        "write",
        "--io-size",
        "4096",
    ]);
    bench
        .args(["--io-threads", "1", "--io-total", "100G", "busy"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let bench = Process::spawn(bench).expect("rbd bench");
    while cluster.lock_address("busy").is_none() {
        std::thread::sleep(Duration::from_millis(50));
    }
    let holder = cluster.lock_address("busy").expect("a holder");
    let line = refused(&uri, options(OURS));
    assert!(line.contains("in use") && line.contains(&holder), "{line}");
    assert_eq!(
        cluster.lock_address("busy"),
        Some(holder.clone()),
        "the lock was taken from its holder"
    );
    assert!(failed(&check(&uri, &options(OURS)), "lock").contains(&holder));
    drop(bench);
    cluster.image("manual", 8);
    cluster.rbd(&["lock", "add", "manual", "mine"]).expect("a lock");
    let line = refused(&cluster.uri("manual"), options(OURS));
    assert!(
        line.contains(&format!("rbd lock rm {}/manual 'mine' client.", cluster.pool())),
        "{line}"
    );
}

#[test]
fn an_image_that_an_idle_client_has_open_for_writing_is_refused() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("idle", 8);
    let mut watch = Command::new("rbd");
    watch.args(["-c", &cluster.conf().display().to_string(), "watch", "idle"]);
    watch.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    let watch = Process::spawn(watch).expect("rbd watch");
    while !cluster.rbd(&["status", "idle"]).expect("a status").contains("watcher=") {
        std::thread::sleep(Duration::from_millis(50));
    }
    let line = refused(&uri, options(OURS));
    assert!(line.contains("open for writing by 127."), "{line}");
    drop(watch);
}

#[test]
fn a_check_tells_what_would_be_done_and_changes_nothing() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("checked", 8);
    let state = |cluster: &Shared| {
        let header = cluster.header("checked");
        let objects = cluster.rados(&["ls"]).expect("objects");
        let locks = cluster.rados(&["lock", "info", &header, "rbd_lock"]).expect("locks");
        let fenced = cluster.lock_address("checked").map(|address| cluster.is_fenced(&address));
        (objects, locks, cluster.rbd(&["info", "checked"]).expect("info"), fenced)
    };
    let before = state(&cluster);
    let report = check(&uri, &options(OURS));
    assert!(report.usable, "{report:?}");
    for step in ["exclusive lock", "guard", "generation 1"] {
        assert!(report.would.iter().any(|would| would.contains(step)), "{report:?}");
    }
    assert_eq!(state(&cluster), before);
    drop(Child::start(&uri).kill());
    let before = state(&cluster);
    let report = check(&uri, &options(OURS));
    assert!(
        report.usable && report.would.iter().any(|would| would.contains("break the lock")),
        "{report:?}"
    );
    assert!(failed(&check(&uri, &options(OTHER)), "ownership").contains("owned by another cache"));
    assert_eq!(state(&cluster), before);
    assert!(
        failed(&check(&cluster.uri("absent"), &options(OURS)), "image").contains("no such image")
    );
    let watcher = cluster.client("watcher", "allow r", "allow rwx");
    let report = check(&format!("{}&id={watcher}", cluster.image("other", 8)), &options(OURS));
    assert!(
        failed(&report, "rights").contains(&format!("client.{watcher} may not fence")),
        "{report:?}"
    );
    serve(&uri).close(true).expect("closed");
}

#[test]
fn two_caches_cannot_own_one_image() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("owned", 8);
    let driver = serve(&uri);
    let line = refused(&uri, options(OTHER));
    assert!(line.contains("owned by another cache") && line.contains("07070707"), "{line}");
    driver.close(false).expect("closed");
    for read_only in [false, true] {
        let line = refused(&uri, OpenOptions { read_only, ..options(OTHER) });
        assert!(line.contains("not yet drained") && line.contains("07070707"), "{line}");
    }
    let opened = open(&uri, options(OURS)).expect("its own cache may");
    assert_eq!((opened.generation, opened.keep_clean), (2, true), "{}", opened.reason);
    Driver::new(opened.backend).close(true).expect("closed");
    let opened = open(&uri, options(OTHER)).expect("a clean image");
    assert_eq!((opened.generation, opened.keep_clean), (3, false), "{}", opened.reason);
    Driver::new(opened.backend).close(true).expect("closed");
}

#[test]
fn an_image_with_its_newest_data_in_a_cache_cannot_be_written_by_others() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("guarded", 8);
    let mut driver = serve(&uri);
    driver.write(0, &pattern(1, 4096)).expect("a write");
    assert!(!cluster.foreign_write("guarded"), "written while the cache serves it");
    driver.write(0, &pattern(2, 4096)).expect("the owner goes on");
    driver.close(false).expect("closed");
    assert!(!cluster.foreign_write("guarded"), "written while the cache holds dirty data");
    assert!(
        cluster.rbd(&["snap", "create", "guarded@s"]).is_err(),
        "a snapshot without the dirty data"
    );
    assert!(cluster.export("guarded")[..4096] == pattern(2, 4096), "reading is allowed");
    let opened = open(&uri, OpenOptions { dirty: true, ..options(OURS) }).expect("its own cache");
    assert!(opened.keep_clean, "{}", opened.reason);
    Driver::new(opened.backend).close(true).expect("closed");
    assert!(cluster.foreign_write("guarded"), "free again");
}

#[test]
fn clean_data_is_kept_only_while_nobody_else_wrote() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("warm", 8);
    serve(&uri).close(true).expect("closed");
    for _ in 0..2 {
        let opened = open(&uri, options(OURS)).expect("opened");
        assert!(opened.keep_clean, "{}", opened.reason);
        let mut driver = Driver::new(opened.backend);
        driver.write(0, &pattern(1, 4096)).expect("a write");
        driver.close(true).expect("closed");
        cluster.export("warm");
    }
    assert!(cluster.foreign_write("warm"));
    let opened = open(&uri, options(OURS)).expect("opened");
    assert!(!opened.keep_clean, "{}", opened.reason);
    Driver::new(opened.backend).close(true).expect("closed");
    for change in [
        vec!["resize", "warm", "--size", "16M", "--no-progress"],
        vec!["snap", "create", "warm@s"],
        vec!["snap", "rollback", "warm@s", "--no-progress"],
    ] {
        cluster.rbd(&change).expect("a change");
        let opened = open(&uri, options(OURS)).expect("opened");
        assert!(!opened.keep_clean, "{change:?}: {}", opened.reason);
        Driver::new(opened.backend).close(true).expect("closed");
    }
}

#[test]
fn dirty_data_never_goes_over_the_writes_of_others_at_the_second_start_neither() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("contested", 8);
    let dirty = || OpenOptions { dirty: true, ..options(OURS) };
    let overwrite = || assert!(cluster.foreign_write("contested"));
    let give_to_another = || {
        let opened = open(&uri, options(OTHER)).expect("a clean image");
        Driver::new(opened.backend).close(true).expect("closed");
    };
    let give_up = || {
        let parsed = uri.parse().expect("a URI");
        tidepool_backend::abandon(&parsed, None).expect("given up").expect("a record");
        assert!(cluster.foreign_write("contested"), "a plain image");
    };
    let events: [(bool, &dyn Fn()); 3] =
        [(true, &overwrite), (true, &give_to_another), (false, &give_up)];
    for (clean, event) in events {
        Driver::new(open(&uri, options(OURS)).expect("free").backend).close(clean).expect("closed");
        event();
        // The client that wrote may have ended without closing the image.
        if !cluster.wait_closed("contested") {
            return;
        }
        let owner = cluster.header("contested").replace("rbd_header", "tidepool_owner");
        let look = || {
            let record = cluster.rados(&["get", &owner, "-"]).expect("the record");
            (cluster.export("contested"), record, cluster.lock_address("contested"))
        };
        let before = look();
        for _ in 0..2 {
            let line = refused(&uri, dirty());
            assert!(line.contains("must not be written over it"), "{line}");
            assert!(look() == before, "touched");
        }
        let opened = open(&uri, options(OURS)).expect("without dirty data nothing is at stake");
        assert!(!opened.keep_clean, "{}", opened.reason);
        Driver::new(opened.backend).close(true).expect("closed");
    }
}

#[test]
fn a_disowned_cache_is_never_believed_again_while_its_process_goes_on_serving() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("disowned", 8);
    let dirty = || OpenOptions { dirty: true, ..options(OURS) };
    // Dropped as by a kill, stopped with dirty data, and released with everything in the image.
    for end in [None, Some(false), Some(true)] {
        let mut driver = serve(&uri);
        driver.write(0, &pattern(1, 4096)).expect("a write");
        let tokens = [(); 3].map(|()| driver.start_other(Transfer::Disown));
        for token in tokens {
            assert_eq!(driver.wait(token).0, Ok(()));
        }
        assert_eq!(driver.other(Transfer::Disown), Ok(()), "once is enough");
        assert!(cluster.lock_address("disowned").is_some(), "it stays locked");
        assert!(!cluster.foreign_write("disowned"), "and guarded");
        driver.write(0, &pattern(2, 4096)).expect("it goes on serving");
        assert!(driver.read(0, 4096) == pattern(2, 4096));
        match end {
            None => drop(driver),
            Some(clean) => driver.close(clean).expect("closed"),
        }
        // The cluster forgets the refused writer only after a while.
        if !cluster.wait_closed("disowned") {
            return;
        }
        for _ in 0..2 {
            let line = refused(&uri, dirty());
            assert!(line.contains("the cache device had failed"), "{line}");
        }
        if end == Some(true) {
            let opened = open(&uri, options(OTHER)).expect("the image is complete");
            Driver::new(opened.backend).close(true).expect("closed");
        } else {
            assert!(refused(&uri, options(OTHER)).contains("owned by another cache"));
        }
        let opened = open(&uri, options(OURS)).expect("without dirty data nothing is at stake");
        assert!(!opened.keep_clean, "{}", opened.reason);
        let mut driver = Driver::new(opened.backend);
        assert!(driver.read(0, 4096) == pattern(2, 4096));
        driver.close(true).expect("closed");
        let opened = open(&uri, dirty()).expect("what is cached from now on counts");
        assert!(opened.keep_clean, "{}", opened.reason);
        Driver::new(opened.backend).close(true).expect("closed");
    }
}

#[test]
fn after_a_kill_the_image_is_taken_back_at_once_and_late_writes_are_fenced() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("killed", 64);
    let child = Child::start(&uri);
    let line = refused(&uri, options(OTHER));
    assert!(line.contains("owned by another cache"), "{line}");
    let old = cluster.lock_address("killed").expect("the child's lock");
    let attachment = child.kill();
    let start = Instant::now();
    let opened = open(&uri, OpenOptions { attachment: Some(attachment), ..options(OURS) })
        .expect("taken back");
    println!("taken back after {} ms", start.elapsed().as_millis());
    assert!(opened.keep_clean && opened.generation == 2, "{}", opened.reason);
    assert!(cluster.is_fenced(&old), "{old} is not fenced");
    assert_ne!(cluster.lock_address("killed"), Some(old));
    let mut driver = Driver::new(opened.backend);
    driver.write(0, &pattern(9, 131_072)).expect("a write");
    driver.close(true).expect("closed");
    assert!(cluster.export("killed")[..131_072] == pattern(9, 131_072));
}

/// G4: an owner that is paused, and continues when its peer has the image.
#[test]
fn g4_a_paused_owner_that_was_taken_over_writes_nothing_when_it_goes_on() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("paused", 8);
    let mut child = Child::start_with(&uri, &[CHILD_IN_SYNC]);
    let generation = ownership(&uri).generation;
    // SAFETY: a signal to a child of ours that was not waited for.
    let mut signal =
        |signal| unsafe { assert_eq!(libc::kill(child.process.child().id() as i32, signal), 0) };
    signal(libc::SIGSTOP);
    let old = cluster.lock_address("paused").expect("its lock");
    let start = Instant::now();
    take_over(&uri, generation).expect("taken over");
    let by_peer = OpenOptions { generation: Some(generation), dirty: true, ..options(OTHER) };
    let opened = open(&uri, by_peer).expect("opened although it is watched");
    println!("taken over after {} ms", start.elapsed().as_millis());
    assert!(opened.keep_clean && opened.generation == generation + 2, "{}", opened.reason);
    assert!(cluster.is_fenced(&old));
    let mut driver = Driver::new(opened.backend);
    driver.write(0, &pattern(9, 131_072)).expect("a write");
    driver.flush().expect("a flush");
    signal(libc::SIGCONT);
    // The child ends with its first write that fails.
    let ended = child.process.child().wait().expect("its end");
    assert!(!ended.success(), "its writes were executed");
    driver.close(true).expect("closed");
    assert!(cluster.export("paused")[..131_072] == pattern(9, 131_072));
}

#[test]
fn a_killed_owners_image_cannot_be_written_by_others_even_when_its_lock_has_fallen() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("orphan", 64);
    drop(Child::start(&uri).kill());
    let (lock, header) = (["lock"], cluster.header("orphan"));
    let info =
        cluster.rados(&[&lock[..], &["info", &header, "rbd_lock"]].concat()).expect("the lock");
    let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
    let locker = |field: &str| info["lockers"][0][field].as_str().expect("a locker").to_owned();
    let (cookie, client) = (locker("cookie"), locker("name"));
    let take =
        [&lock[..], &["break", &header, "rbd_lock", &client, "--lock-cookie", &cookie]].concat();
    cluster.rados(&take).expect("a fallen lock");
    assert_eq!(cluster.lock_address("orphan"), None);
    assert!(!cluster.foreign_write("orphan"), "written although the newest data is in a cache");
    let opened = open(&uri, OpenOptions { dirty: true, ..options(OURS) }).expect("taken back");
    assert!(!opened.keep_clean, "{}", opened.reason);
    Driver::new(opened.backend).close(true).expect("closed");
}

#[test]
fn after_a_kill_the_record_alone_suffices_to_take_the_image_back() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("lost-attachment", 64);
    drop(Child::start(&uri).kill());
    for attachment in [None, Some(b"garbage".to_vec())] {
        let opened = open(&uri, OpenOptions { attachment, ..options(OURS) }).expect("taken back");
        assert_eq!(opened.generation, if opened.keep_clean { 2 } else { 3 }, "{}", opened.reason);
        Driver::new(opened.backend);
    }
}

#[test]
fn g1_a_cache_that_has_forgotten_an_attachment_is_refused() {
    let Some(cluster) = Shared::get() else { return };
    a_forgetful_cache_is_refused(&cluster.image("forgotten", 8), &options(OURS));
}

#[test]
fn a_fenced_owner_is_told_so_and_writes_nothing() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("fenced", 8);
    let mut driver = serve(&uri);
    driver.write(0, &pattern(1, 4096)).expect("a write");
    let address = cluster.lock_address("fenced").expect("our lock");
    // The entry does not expire while other tests look at the list.
    cluster.ceph(&["osd", "blocklist", "add", &address, "3600"]).expect("blocklisted");
    // The monitor answers before the OSD has the new map; a client with the new map makes the OSD
    // fetch it.
    cluster.rbd(&["info", "fenced"]).expect("rbd info");
    assert_eq!(driver.write(0, &pattern(2, 4096)), Err(IoError::Fenced));
    assert_eq!(driver.write(4096, &pattern(2, 4096)), Err(IoError::Fenced));
    let token = driver.start_read(0, 4096);
    assert_eq!(driver.wait(token).0, Err(IoError::Fenced));
    assert!(matches!(driver.close(true), Err(BackendError::Fenced { .. })));
    assert!(cluster.export("fenced")[..4096] == pattern(1, 4096));
}

#[test]
fn an_owner_whose_lock_was_taken_is_fenced() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("usurped", 8);
    let mut driver = serve(&uri);
    driver.write(0, &pattern(1, 4096)).expect("a write");
    // The record says that another owner has the image: a write that meets a read-only handle must
    // not be forced.
    let owner = cluster.header("usurped").replace("rbd_header", "tidepool_owner");
    let path = cluster.dir().join("record");
    cluster.rados(&["get", &owner, path.to_str().expect("UTF-8")]).expect("the record");
    let record = std::fs::read_to_string(&path).expect("the record");
    std::fs::write(&path, record.replace("\"generation\": 1", "\"generation\": 2"))
        .expect("a record");
    cluster.rados(&["put", &owner, path.to_str().expect("UTF-8")]).expect("a new record");
    let line = match driver.close(true) {
        Ok(()) => panic!("closed over another owner's record"),
        Err(e) => e.to_string(),
    };
    assert!(line.contains("ownership"), "{line}");
}

#[test]
fn transfers_wait_for_a_stopped_osd_and_complete_when_it_goes_on() {
    let Some(cluster) = Shared::alone() else { return };
    let uri = cluster.image("stopped", 8);
    let mut driver = serve(&uri);
    driver.write(0, &pattern(1, 4096)).expect("a write");
    cluster.osd_stop(0).expect("stopped");
    let tokens: Vec<u64> =
        (0..32u64).map(|i| driver.start_write(i * 4096, &pattern(i + 10, 4096))).collect();
    let read = driver.start_read(2 * MIB, 4096);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        driver.poll(100);
        assert!(!driver.finished(read) && tokens.iter().all(|token| !driver.finished(*token)));
    }
    cluster.osd_continue(0).expect("continued");
    tokens.into_iter().for_each(|token| driver.wait(token).0.expect("a write"));
    driver.wait(read).0.expect("a read");
    driver.flush().expect("a flush");
    driver.close(true).expect("closed");
    let image = cluster.export("stopped");
    for i in 0..32usize {
        assert!(image[i * 4096..][..4096] == pattern(i as u64 + 10, 4096));
    }
}

#[test]
#[ignore = "takes longer than half a minute"]
fn a_pool_that_does_not_answer_is_a_clear_refusal() {
    let Some(cluster) = Shared::alone() else { return };
    let uri = cluster.image("mute", 8);
    serve(&uri).close(true).expect("closed");
    cluster.osd_stop(0).expect("stopped");
    let line = refused(&uri, options(OURS));
    let report = check(&uri, &options(OURS));
    cluster.osd_continue(0).expect("continued");
    assert!(
        line.contains("the pool does not answer") && line.contains("ceph health detail"),
        "{line}"
    );
    assert!(!report.usable, "{report:?}");
    cluster.monitor_stop().expect("stopped");
    let line = refused(&uri, options(OURS));
    cluster.monitor_continue().expect("continued");
    assert!(line.contains("no monitor answers"), "{line}");
    let opened = open(&uri, options(OURS)).expect("opened");
    assert!(opened.keep_clean, "{}", opened.reason);
    Driver::new(opened.backend).close(true).expect("closed");
}

/// The watch of the image's handle is lost and renewed, and with it the handle's view of the guard.
#[test]
#[ignore = "takes longer than a minute"]
fn transfers_complete_after_an_osd_was_away_for_longer_than_a_watch_lasts() {
    let Some(cluster) = Shared::alone() else { return };
    let uri = cluster.image("long-stopped", 8);
    let mut driver = serve(&uri);
    driver.write(0, &pattern(1, 4096)).expect("a write");
    for round in 0..2u64 {
        cluster.osd_stop(0).expect("stopped");
        let token = driver.start_write(0, &pattern(round + 2, 4096));
        std::thread::sleep(Duration::from_secs(45));
        driver.poll(0);
        assert!(!driver.finished(token), "{:?} while the OSD was stopped", driver.wait(token).0);
        cluster.osd_continue(0).expect("continued");
        driver.wait(token).0.expect("a write");
        for i in 0..200u64 {
            driver.write(i % 64 * 4096, &pattern(i + round, 4096)).expect("a write");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    assert!(!cluster.foreign_write("long-stopped"), "the guard stands");
    driver.close(true).expect("closed");
}

#[test]
fn what_a_lost_cache_holds_can_be_given_up() {
    let Some(cluster) = Shared::get() else { return };
    let uri = cluster.image("lost", 8);
    let abandon = || tidepool_backend::abandon(&uri.parse().expect("a URI"), None);
    assert_eq!(abandon().expect("nothing to give up"), None);
    let driver = serve(&uri);
    let line = abandon().expect_err("the owner is there").to_string();
    assert!(line.contains("in use") && line.contains("remove the volume there first"), "{line}");
    driver.close(false).expect("closed");
    assert!(!cluster.foreign_write("lost"));
    let given_up = abandon().expect("given up").expect("a record");
    assert_eq!((given_up.generation, *given_up.cache_uuid.as_bytes()), (1, OURS));
    assert!(cluster.foreign_write("lost"), "an image without owner is a plain image");
    // The refused writer has ended without closing the image.
    if !cluster.wait_closed("lost") {
        return;
    }
    let opened = open(&uri, options(OTHER)).expect("free");
    assert_eq!((opened.generation, opened.keep_clean), (3, false), "{}", opened.reason);
    Driver::new(opened.backend).close(true).expect("closed");
}
