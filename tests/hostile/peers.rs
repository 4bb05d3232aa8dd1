//! Three hosts of which the third means harm: it has a certificate of the authority, and may do
//! with it what it likes. The first one owns a volume, the second one holds the copy.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidepool_replica::wire::{Call, Message, Offer};
use tidepool_testkit::admin::in_sync;
use tidepool_testkit::one_at_a_time;
use tidepool_tests::rig::{MIB, VOLUME};
use tidepool_tests::trio::{Loss, PORT, Trio};

use crate::intruder::Intruder;
use crate::liar::pretend;

pub const OWNER: usize = 0;
pub const HOLDER: usize = 1;
pub const THIRD: usize = 2;
/// How often silent connections are opened: several for each that a peer needs.
const SILENT_PAUSE: Duration = Duration::from_millis(5);

pub fn number(uuid: &str) -> u128 {
    u128::from_str_radix(&uuid.replace('-', ""), 16).expect("a uuid")
}

/// A uuid as it is written.
pub fn text(uuid: u128) -> String {
    let digits = format!("{uuid:032x}");
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32].map(|part| digits[part].to_owned());
    parts.join("-")
}

/// The uuid of a host's cache.
pub fn cache_of(trio: &Trio, host: usize) -> u128 {
    let status = trio.hosts[host].admin.status().expect("a status");
    number(status["cache"]["uuid"].as_str().expect("a uuid"))
}

/// The truth about the owner, which the third host has found out.
pub struct Facts {
    pub cache: u128,
    pub generation: u64,
    pub image: String,
}

impl Facts {
    fn of(trio: &Trio) -> Facts {
        Facts::about(trio, OWNER, VOLUME)
    }

    /// Those about a volume that a host owns.
    pub fn about(trio: &Trio, host: usize, volume: &str) -> Facts {
        let admin = &trio.hosts[host].admin;
        let volume = admin.volume(volume).expect("the volume");
        Facts {
            cache: cache_of(trio, host),
            generation: volume["owner"]["generation"].as_u64().expect("a number"),
            image: volume["backend"].as_str().expect("a URI").to_owned(),
        }
    }

    fn call<'a>(&'a self, host: &'a str, image: &'a str) -> Call<'a> {
        self.call_it(host, VOLUME, image)
    }

    pub fn call_it<'a>(&'a self, host: &'a str, name: &'a str, image: &'a str) -> Call<'a> {
        Call { cache: self.cache, boot: 1, generation: self.generation, host, name, image }
    }
}

/// What a host can begin with.
pub fn beginnings<'a>(call: Call<'a>, to: &'a str) -> [Message<'a>; 3] {
    let offer = Offer {
        call,
        to,
        size_bytes: 32 * MIB,
        mode: "write-back",
        unordered: false,
        accept_loss_ms: None,
        dirty_bytes_max: 0,
    };
    [
        Message::Hello { call, lease_ns: tidepool_replica::LEASE_V1_NS },
        Message::HandOver(call),
        Message::Offer(offer),
    ]
}

/// Links that were given up because somebody has called who seemed to be their owner.
fn links_replaced(trio: &Trio) -> usize {
    let logs = trio.hosts.iter().map(|host| host.daemon.log());
    logs.map(|log| log.matches("its owner has connected again").count()).sum()
}

#[test]
fn g6_a_host_of_the_authority_speaks_for_no_other_host() {
    let _turn = one_at_a_time();
    let trio = Trio::on_file().expect("three hosts");
    let (facts, links) = (Facts::of(&trio), links_replaced(&trio));
    for to in [OWNER, HOLDER] {
        let target = format!("h{to}");
        for (host, image, part) in [
            // As the owner.
            (
                "h0",
                facts.image.as_str(),
                "it says that it is host h0, and its certificate is for h2",
            ),
            // As the holder of the copy.
            ("h1", &facts.image, "it says that it is host h1, and its certificate is for h2"),
            // As itself, with the owner's cache.
            ("h2", &facts.image, UNKNOWN),
            // Images that it has made, or that are none of its business.
            ("h2", "file:/etc/passwd", UNKNOWN),
            ("h2", "nbd+unix:///x?socket=/run/x.sock", UNKNOWN),
            ("h2", "rbd:rbd/x?conf=/tmp/theirs.conf", UNKNOWN),
        ] {
            for message in &beginnings(facts.call(host, image), &target) {
                let mut intruder = Intruder::connect(&trio, THIRD, to, THIRD);
                intruder.send(message).expect("sent");
                let why = intruder.refusal();
                assert!(why.contains(part), "{message:?}: {why}");
            }
        }
    }
    // A volume of its own is no other volume, and has one name.
    let theirs = trio.add(THIRD, "theirs", 32 * MIB).expect("in sync");
    let of_theirs = if theirs["peer"] == "h0" { OWNER } else { HOLDER };
    let own = Facts::about(&trio, THIRD, "theirs");
    for (to, name, part) in [
        (1 - of_theirs, VOLUME, "another volume of this name is here"),
        (of_theirs, VOLUME, "is here as volume theirs"),
        (of_theirs, "squatter", "is here as volume theirs"),
    ] {
        for message in &beginnings(own.call_it("h2", name, &own.image), &format!("h{to}")) {
            let mut intruder = Intruder::connect(&trio, THIRD, to, THIRD);
            intruder.send(message).expect("sent");
            let why = intruder.refusal();
            assert_eq!(why, unknown(name), "to h{to}, {theirs}: {message:?}");
        }
        trio.hosts[to].daemon.wait_log(part).expect("it says so");
    }
    // The record names this host as the owner, and not in this generation: that is its own
    // business.
    let stale = Facts { generation: own.generation + 1, ..own };
    let image = format!("{}?gate=/tmp/theirs", stale.image);
    for message in &beginnings(stale.call_it("h2", "theirs", &image), &format!("h{of_theirs}")) {
        let mut intruder = Intruder::connect(&trio, THIRD, of_theirs, THIRD);
        intruder.send(message).expect("sent");
        let (why, told) =
            (intruder.refusal(), format!("record of {image} names h2 as owner, in generation"));
        assert!(why.contains(&told), "{message:?}: {why}");
    }
    assert_eq!(links_replaced(&trio), links, "no link was given up");
    let volume = trio.owner().wait_sync().expect("in sync");
    assert_eq!(volume["peer"], "h1", "{volume}");
    assert_eq!(Facts::of(&trio).generation, facts.generation);
    assert_eq!(trio.wait_one_serving().expect("one"), OWNER);
}

/// What a host is told that is not known as an owner, in part.
const UNKNOWN: &str = "this host does not know h2 as the owner of volume";

/// The same as a whole.
fn unknown(volume: &str) -> String {
    format!("{UNKNOWN} {volume} on that image; its log says why")
}

#[test]
fn g6_a_refusal_tells_a_host_nothing_of_what_another_one_has() {
    let _turn = one_at_a_time();
    let trio = Trio::on_file().expect("three hosts");
    let facts = Facts::of(&trio);
    let place = trio.scratch.path().display().to_string();
    let at = |name: &str| format!("file:{place}/{name}");
    std::fs::write(trio.scratch.join("bare"), [0; 4096]).expect("a file");
    let holder = Facts { cache: cache_of(&trio, HOLDER), ..Facts::of(&trio) };
    let third = Facts { cache: cache_of(&trio, THIRD), ..Facts::of(&trio) };
    for (what, facts, name, image, part) in [
        (
            "not allowed",
            &third,
            "x",
            "rbd:secret/x".to_owned(),
            "other hosts may not name rbd:secret/x here",
        ),
        ("missing", &third, "x", at("missing"), "missing: "),
        ("without a record", &third, "x", at("bare"), "bare has no ownership record"),
        ("the copy's, under its name", &third, VOLUME, facts.image.clone(), "names h0 as owner"),
        ("the copy's, under another name", &third, "x", facts.image.clone(), "is here as volume"),
        ("a name that is known", &third, VOLUME, at("bare"), "another volume of this name is here"),
        ("its own cache", &holder, "x", at("missing"), "that is this very host"),
        ("the owner's cache", &facts, VOLUME, facts.image.clone(), "names h0 as owner"),
    ] {
        for message in &beginnings(facts.call_it("h2", name, &image), "h1") {
            let mut intruder = Intruder::connect(&trio, THIRD, HOLDER, THIRD);
            intruder.send(message).expect("sent");
            assert_eq!(intruder.refusal(), unknown(name), "{what}: {message:?}");
        }
        trio.hosts[HOLDER].daemon.wait_log(part).expect("it says so");
    }
    let volume = trio.owner().wait_sync().expect("in sync");
    assert_eq!(volume["peer"], "h1", "{volume}");
}

#[test]
fn g6_a_host_that_says_anothers_cache_is_its_own_holds_no_copy_and_keeps_no_other_host_from_it() {
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    // The third host is known by a volume of its own, whose copy is with the first one.
    let theirs = trio.add(THIRD, "theirs", 32 * MIB).expect("in sync");
    assert_eq!(theirs["peer"], "h0", "{theirs}");
    let caches = [OWNER, THIRD].map(|host| cache_of(&trio, host));
    trio.hosts[HOLDER].daemon.kill().expect("kill");
    let on_next = |volume: &serde_json::Value| in_sync(volume) && volume["peer"] == "h2";
    trio.owner().wait("in sync with the next host", on_next).expect("a copy");
    for (cache, part) in [
        (0, "which is no cache's"),
        (caches[0], "which is that of the volume's owner"),
        (caches[1], "which is that of host h2"),
    ] {
        pretend(&trio, HOLDER, cache, || {
            trio.set(Loss::OneWay { from: OWNER, to: THIRD }, false);
            trio.owner().wait_degraded().expect("they notice");
            trio.set(Loss::OneWay { from: OWNER, to: THIRD }, true);
            trio.owner().wait("in sync with the next host", on_next).expect("a copy");
        });
        let says = format!("host h1 says that the uuid of its cache is {}", text(cache));
        trio.owner().daemon.wait_log(&says).expect("it says so");
        trio.owner().daemon.wait_log(part).expect("it says so");
    }
}

#[test]
fn g4_silent_connections_keep_no_second_copy_out() {
    let _turn = one_at_a_time();
    let trio = Trio::on_file().expect("three hosts");
    let (stop, opened) = (AtomicBool::new(false), AtomicU64::new(0));
    let (address, namespace) = (trio.address(HOLDER), trio.namespace(THIRD).clone());
    std::thread::scope(|scope| {
        let (stop, opened) = (&stop, &opened);
        let silent = scope.spawn(move || {
            namespace.within(|| {
                let mut silent = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    // Those that are thrown out come again.
                    silent.extend(TcpStream::connect_timeout(
                        &(address, PORT).into(),
                        Duration::from_secs(1),
                    ));
                    opened.fetch_add(1, Ordering::Relaxed);
                    if silent.len() > 500 {
                        silent.drain(..100);
                    }
                    std::thread::sleep(SILENT_PAUSE);
                }
            })
        });
        let start = Instant::now();
        while opened.load(Ordering::Relaxed) < 200 {
            assert!(start.elapsed() < Duration::from_secs(60), "they connect");
            std::thread::sleep(Duration::from_millis(20));
        }
        // The owner and its holder lose each other, and find each other again; the third host is no
        // holder meanwhile.
        trio.set(Loss::OneWay { from: THIRD, to: OWNER }, false);
        for _ in 0..3 {
            trio.set(Loss::OneWay { from: OWNER, to: HOLDER }, false);
            trio.owner().wait_degraded().expect("they notice");
            trio.set(Loss::OneWay { from: OWNER, to: HOLDER }, true);
            let volume = trio.owner().wait_sync().expect("a copy, although others connect");
            assert_eq!(volume["peer"], "h1", "{volume}");
        }
        stop.store(true, Ordering::Relaxed);
        silent.join().expect("no panic").expect("a namespace");
    });
    println!("{} silent connections", opened.load(Ordering::Relaxed));
}

/// Resident memory of a process in bytes.
pub fn resident(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).expect("it runs");
    statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096
}

#[test]
fn g8_a_host_that_asks_and_does_not_read_is_given_up() {
    /// What may be done for other hosts in one round.
    const ROUND_MAX: u64 = 8 * 1024;
    /// What it pours in, in bytes: many times what may wait.
    const POURED_BYTES: u64 = 512 * MIB;
    /// By how much memory may grow: what may wait, twice, since it is encrypted, and something.
    const GROWTH_BYTES_MAX: u64 = 64 * MIB;
    let _turn = one_at_a_time();
    let mut trio = Trio::on_file().expect("three hosts");
    let facts = Facts::of(&trio);
    // Somebody has got hold of the owner's host.
    trio.hosts[OWNER].daemon.kill().expect("kill");
    let holder = &trio.hosts[HOLDER];
    let pid = holder.daemon.id().expect("it runs");
    let mut intruder = Intruder::connect(&trio, OWNER, HOLDER, OWNER);
    let [hello, ..] = beginnings(facts.call("h0", &facts.image), "h1");
    intruder.send(&hello).expect("sent");
    let welcome =
        intruder.receive(|message| matches!(message, Message::Welcome { holds: Some(_), .. }));
    assert!(welcome.expect("an answer"), "it is the owner, as far as anybody can know");
    let before = resident(pid);
    let mut beats = Vec::new();
    (0..4096).for_each(|_| Message::Beat { time_ns: 7 }.encode(&mut beats));
    intruder.give_up_after(Duration::from_secs(20));
    let (mut poured, mut highest, mut ended) = (0, before, false);
    while poured < POURED_BYTES && !ended {
        ended = intruder.pour(&beats);
        poured += beats.len() as u64;
        highest = highest.max(resident(pid));
    }
    let reactor = holder.admin.status().expect("a status")["reactor"].clone();
    // Each connection with another host has a part of the round; see the daemon's
    // `shard/front/effort.rs`.
    assert!(
        reactor["round_effort_max"].as_u64().is_some_and(|done| done <= ROUND_MAX * 2),
        "{reactor}"
    );
    println!("{} MiB poured, {} MiB more resident", poured >> 20, (highest - before) >> 20);
    assert!(highest - before <= GROWTH_BYTES_MAX, "{} MiB more", (highest - before) >> 20);
    assert!(ended, "it is given up");
    holder.daemon.wait_log("it does not read what it is sent").expect("it says so");
}
