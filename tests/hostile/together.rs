//! Everything that clients and other hosts can do, at once: no link is lost, no copy falls behind,
//! and what is used stays bounded.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use tidepool_replica::wire::Message;
use tidepool_testkit::admin::in_sync;
use tidepool_testkit::hostile::{End, Raw, attack, attacks, step_back};
use tidepool_testkit::nbd::Client;
use tidepool_testkit::one_at_a_time;
use tidepool_tests::rig::{MIB, VOLUME};
use tidepool_tests::trio::{PORT, Trio};

use crate::intruder::Intruder;
use crate::peers::{Facts, HOLDER, OWNER, THIRD, beginnings, resident};

/// The volume whose clients mean harm; its writes have a second copy, too.
const ATTACKED: &str = "attacked";
const ATTACKED_BYTES: u64 = 8 << 30;
/// What of it is cached, every second block.
const CACHED_BYTES: u64 = 32 * MIB;
/// The volume that the third host owns, and pretends to lose.
const THEIRS: &str = "theirs";
/// Connections of each kind of attack.
const EACH: usize = 6;
/// For how long they go on.
const LENGTH: Duration = Duration::from_secs(8);
/// Longest wait for a status.
const STATUS_MAX: Duration = Duration::from_secs(20);
/// What of its memory a daemon may use for those who mean harm, besides the arena and the index,
/// whose sizes it tells. The table in docs/threat-model.md says how these come about.
const CONNECTION_BYTES: u64 = 512 << 10;
const LINK_BYTES: u64 = 16 * MIB;
const LOG_BYTES: u64 = 12 * MIB;
const HTTP_BYTES: u64 = 8 * MIB;
/// What the allocator keeps, and stacks.
const SLACK_BYTES: u64 = 32 * MIB;

/// Does something over and over, and gives way to all others.
fn again(over: &AtomicBool, mut what: impl FnMut()) {
    step_back();
    while !over.load(Ordering::Relaxed) {
        what();
    }
}

/// Asks for answers and reads none of them.
fn read_nothing(socket: &Path) {
    let Ok(raw) = Raw::of_export(socket, ATTACKED) else { return };
    let _ = raw.0.set_write_timeout(Some(Duration::from_millis(500)));
    let requests = Raw::request(0, 0, 1 << 20).repeat(64);
    while (&raw.0).write_all(&requests).is_ok() {}
}

/// Says what is no NBD.
fn break_the_protocol(socket: &Path) {
    let Ok(mut stream) = UnixStream::connect(socket) else { return };
    let _ = stream.write_all(&[0xff; 64]);
    let mut rest = [0; 64];
    while stream.read(&mut rest).is_ok_and(|bytes| bytes > 0) {}
}

/// Keeps connections, and says nothing.
fn stay_silent<T>(connect: impl Fn() -> Option<T>) {
    let _silent: Vec<T> = (0..100).filter_map(|_| connect()).collect();
    std::thread::sleep(Duration::from_millis(300));
}

/// Speaks as the host that it is, about its own volume, and reads no answer.
fn pour_beats(mut intruder: Intruder, facts: &Facts) {
    intruder.give_up_after(Duration::from_secs(2));
    let [hello, ..] = beginnings(facts.call_it("h2", THEIRS, &facts.image), "");
    let Message::Hello { call, lease_ns } = hello else { unreachable!("the first one") };
    // The hosts are patient.
    if intruder.send(&Message::Hello { call, lease_ns: 10 * lease_ns }).is_err() {
        return;
    }
    let mut beats = Vec::new();
    (0..4096).for_each(|_| Message::Beat { time_ns: 7 }.encode(&mut beats));
    while !intruder.pour(&beats) {}
}

/// What a daemon says of itself now, and its resident memory in bytes.
fn seen(trio: &Trio, host: usize) -> (Value, u64) {
    let host = &trio.hosts[host];
    let start = Instant::now();
    // Connections of one user have a part of the places, and here all are of one.
    let status = loop {
        match host.admin.status() {
            Ok(status) => break status,
            Err(error) => {
                assert!(start.elapsed() < STATUS_MAX, "{error}: {}", host.daemon.log_tail())
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    (status, resident(host.daemon.id().expect("it runs")))
}

/// What it may use by now beyond what it had at the start.
fn bound_bytes(status: &Value) -> u64 {
    let number = |value: &Value| value.as_u64().expect("a number");
    let cache = &status["cache"]["counters"];
    let volumes = status["volumes"].as_array().expect("volumes");
    let connections: u64 = volumes.iter().map(|volume| number(&volume["connections"])).sum();
    // Those in a handshake are counted nowhere; there is a bound to them.
    let connections = connections + 128;
    let links = 2 * volumes.len() as u64;
    number(&cache["arena_bytes"])
        + number(&cache["index_bytes"])
        + connections * CONNECTION_BYTES
        + links * LINK_BYTES
        + LOG_BYTES
        + HTTP_BYTES
        + SLACK_BYTES
}

/// Links with hosts other than the third one that were given up.
fn links_lost(trio: &Trio) -> Vec<String> {
    let logs: Vec<String> =
        [OWNER, HOLDER].iter().map(|&host| trio.hosts[host].daemon.log()).collect();
    let lines = logs.iter().flat_map(|log| log.lines());
    let of_them = |line: &&str| line.contains("peer=h0 ") || line.contains("peer=h1 ");
    let lost = lines.filter(|line| line.contains("connection with another host")).filter(of_them);
    lost.map(str::to_owned).collect()
}

#[test]
fn g4_g8_all_attacks_at_once_lose_no_link_and_leave_no_copy_behind() {
    let _turn = one_at_a_time();
    let trio = Trio::patient_on_file().expect("three hosts");
    trio.add(OWNER, ATTACKED, ATTACKED_BYTES).expect("in sync");
    let theirs = trio.add(THIRD, THEIRS, 32 * MIB).expect("in sync");
    let facts = Facts::about(&trio, THIRD, THEIRS);
    let socket = trio.owner().socket.clone();
    let mut client = Client::connect(&socket, ATTACKED).expect("connected");
    for at in (0..CACHED_BYTES).step_by(2 * 4096) {
        client.write(at, &[1; 4096]).expect("absorbed");
    }
    client.flush().expect("flushed");
    drop(client);
    let admin = trio.owner().admin.socket().to_owned();
    let (namespace, certificates) = (trio.namespace(THIRD).clone(), trio.certificates(THIRD));
    let addresses = [OWNER, HOLDER].map(|host| trio.address(host));
    let of_theirs = trio.address(if theirs["peer"] == "h0" { OWNER } else { HOLDER });
    let before = [OWNER, HOLDER].map(|host| seen(&trio, host).1);
    let lost_before = links_lost(&trio);

    let (over, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let each = attacks(CACHED_BYTES as u32);
    let (written, behind, highest) = std::thread::scope(|scope| {
        let (over, sent, facts, socket, admin) = (&over, &sent, &facts, &socket, &admin);
        let _end = End(over);
        let (namespace, certificates) = (&namespace, &certificates);
        for (_, what) in &each {
            for _ in 0..EACH {
                scope.spawn(move || {
                    step_back();
                    attack((socket, ATTACKED), what, over, sent);
                });
            }
        }
        for _ in 0..EACH {
            scope.spawn(move || again(over, || read_nothing(socket)));
        }
        scope.spawn(move || again(over, || break_the_protocol(socket)));
        for socket in [socket, admin] {
            scope.spawn(move || again(over, || stay_silent(|| UnixStream::connect(socket).ok())));
        }
        for address in addresses {
            scope.spawn(move || {
                let wait = Duration::from_secs(1);
                let connect = || TcpStream::connect_timeout(&(address, PORT).into(), wait).ok();
                namespace.within(|| again(over, || stay_silent(connect))).expect("a namespace");
            });
        }
        scope.spawn(move || {
            again(over, || {
                // One of many that the daemon has no time for yet.
                let Ok(intruder) = Intruder::dial(namespace, of_theirs, certificates) else {
                    return;
                };
                pour_beats(intruder, facts);
            });
        });

        // The volume beside, whose every block is known.
        let neighbour = scope.spawn(move || {
            let mut client = Client::connect(socket, VOLUME).expect("let in");
            let mut written = 0u64;
            while !over.load(Ordering::Relaxed) {
                let (at, byte) = (written % 1024 * 4096, written as u8);
                client.write(at, &[byte; 4096]).expect("absorbed");
                assert_eq!(client.read(at, 4096).expect("read"), [byte; 4096]);
                written += 1;
            }
            written
        });
        let (start, mut behind, mut highest) = (Instant::now(), Vec::new(), [(0, 0); 2]);
        while start.elapsed() < LENGTH {
            for (at, host) in [OWNER, HOLDER].into_iter().enumerate() {
                let (status, resident) = seen(&trio, host);
                let over_bound = |(used, bound): (u64, u64)| used as f64 / bound.max(1) as f64;
                let now = (resident.saturating_sub(before[at]), bound_bytes(&status));
                if over_bound(now) > over_bound(highest[at]) {
                    highest[at] = now;
                }
                let volumes = status["volumes"].as_array().expect("volumes").iter();
                let own = volumes.filter(|volume| volume["owner"]["host"] == "h0" && host == OWNER);
                behind.extend(own.filter(|volume| !in_sync(volume)).cloned());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        over.store(true, Ordering::Relaxed);
        (neighbour.join().expect("it is served"), behind, highest)
    });
    println!(
        "{} requests sent, {written} written and read beside them",
        sent.load(Ordering::Relaxed)
    );
    for ((used, bound), host) in highest.into_iter().zip(["the owner", "the holder"]) {
        println!("{host} has used {} MiB more, of at most {}", used >> 20, bound >> 20);
        assert!(used <= bound, "{host}: {} MiB more, of {}", used >> 20, bound >> 20);
    }
    assert!(behind.is_empty(), "{}: {}", behind.len(), behind[0]);
    assert_eq!(links_lost(&trio), lost_before);
    for host in [OWNER, HOLDER] {
        let (status, _) = seen(&trio, host);
        let done = status["reactor"]["round_effort_max"].as_u64().expect("a number");
        println!("a round of h{host} had {done} at most");
        // Clients, other hosts and commands have a part each, and one piece of each may go past it.
        let most = 3 * 8 * 1024 + 8 * 1024 / 2 + 8 * 1024 / 3 + 4 * ((64 << 20) / 4096 + 1);
        assert!(done <= most, "{status}");
    }
    let mut client = Client::connect(&socket, VOLUME).expect("let in");
    for block in 0..written.min(1024) {
        let newest = (written - 1 - block) / 1024 * 1024 + block;
        assert_eq!(
            client.read(block * 4096, 4096).expect("read"),
            [newest as u8; 4096],
            "block {block}"
        );
    }
    trio.owner().wait_sync().expect("in sync");
}
