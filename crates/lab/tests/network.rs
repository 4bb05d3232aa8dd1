//! Clusters whose nodes have their own network.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tidepool_cluster::ceph::Servers;
use tidepool_cluster::device::Counts;
use tidepool_cluster::network::Network;
use tidepool_cluster::{Cluster, ClusterOptions, Scratch};
use tidepool_lab::collect::{Carried, Collector, CountsOf, Sample, Sources};

/// How much the client writes, in bytes.
const WRITTEN: u64 = 32 << 20;

/// Whether networks are possible. Prints why not.
fn possible() -> bool {
    let why = Network::available(Some(Duration::ZERO)).err();
    why.iter().for_each(|why| println!("skipped: {why}"));
    why.is_none()
}

/// Two OSDs on two servers, with two copies of each object.
fn options(delay: Option<Duration>) -> ClusterOptions {
    let servers = Some(Servers::new(2));
    ClusterOptions { replicas: 2, servers, delay, prompt: true, ..ClusterOptions::with_osds(2) }
}

/// Bytes that a node carried in all samples.
fn carried(samples: &[Sample], node: &str, of: impl Fn(&Carried) -> f64) -> u64 {
    let mut begin_ms = 0;
    let mut bytes = 0.0;
    for sample in samples {
        let seconds = (sample.at_ms - begin_ms) as f64 / 1e3;
        begin_ms = sample.at_ms;
        bytes += of(&sample.network[node]) * seconds;
    }
    bytes as u64
}

/// Adds a device whose counts count how often the sources are read.
fn count_looks(sources: &mut Sources) -> Arc<AtomicUsize> {
    let looks = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&looks);
    let counts: CountsOf = Box::new(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        Counts::default()
    });
    sources.devices.push(("looks".into(), counts));
    looks
}

#[test]
fn copies_go_between_servers_and_all_is_counted_where_it_passes() {
    if !possible() {
        return;
    }
    let cluster = Cluster::up(&options(None)).expect("a cluster");
    let map = cluster.ceph(&["osd", "dump"]).expect("the map");
    for (osd, server) in cluster.network().expect("a network").servers().iter().enumerate() {
        let line =
            map.lines().find(|line| line.starts_with(&format!("osd.{osd} "))).expect("a line");
        assert!(line.contains(&format!("v2:{}:", server.address())), "{line}");
    }
    cluster.rbd_create("image", 64 << 20).expect("an image");
    let mut sources = Sources::default().with_network(cluster.network()).expect("the nodes");
    let looks = count_looks(&mut sources);
    let collector = Collector::start(sources);
    let total = WRITTEN.to_string();
    let bench = [
        "bench",
        "--io-type=write",
        "--io-size=65536",
        "--io-threads=4",
        "--io-total",
        &total,
        "image",
    ];
    cluster.rbd(&bench).expect("a load");
    // Wait until a sample contains everything. A look that began too early may be under way.
    let enough = looks.load(Ordering::Relaxed) + 2;
    while looks.load(Ordering::Relaxed) < enough {
        std::thread::sleep(Duration::from_millis(20));
    }
    let samples = collector.stop();
    let nodes: Vec<&String> = samples[0].network.keys().collect();
    assert_eq!(nodes, ["client", "mon", "node0", "node1"]);

    let sent = |node: &str| carried(&samples, node, |carried| carried.sent_bytes_per_s);
    let received = |node: &str| carried(&samples, node, |carried| carried.received_bytes_per_s);
    let about = |bytes: u64| (WRITTEN / 100 * 97..WRITTEN / 2 * 3).contains(&bytes);
    assert!(about(sent("client")), "the client sends each byte once: {}", sent("client"));
    for node in ["node0", "node1"] {
        assert!(about(received(node)), "each server has a copy: {}", received(node));
    }
    // The object's name decides which server gets it first, so that one server may get next to
    // none.
    assert!(about(sent("node0") + sent("node1")), "all that one has is passed on to the other");
    assert!(sent("mon") + received("mon") < WRITTEN / 4, "none goes past the monitor");
    assert_eq!(cluster.rbd_checksum("image").expect("a checksum").len(), 64);
}

/// Environment variable that makes a child of the next test create a network and leave it behind.
const LEFT_BEHIND: &str = "TIDEPOOL_TEST_LEFT_BEHIND";
/// Delay of the child's network.
const DELAY: Duration = Duration::from_millis(5);

#[test]
fn each_way_takes_its_time_and_a_killed_process_leaves_nothing_of_its_network() {
    if let Some(parent) = std::env::var_os(LEFT_BEHIND) {
        hold(Path::new(&parent));
    }
    if !possible() {
        return;
    }
    let outer = Scratch::new("network").expect("a directory");
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "--nocapture"])
        .arg("each_way_takes_its_time_and_a_killed_process_leaves_nothing_of_its_network")
        .env(LEFT_BEHIND, outer.path())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts again");
    let lines = std::io::BufReader::new(child.stdout.take().expect("piped"));
    let mut figures = Vec::new();
    for line in std::io::BufRead::lines(lines).map(|line| line.expect("a line")) {
        if line == "up" {
            break;
        }
        figures.extend(
            line.strip_prefix("least ").map(|figure| figure.parse::<f64>().expect("seconds")),
        );
    }
    // A read takes one round trip. A write takes one round trip, and one more between the servers.
    let [write, read]: [f64; 2] = figures.try_into().expect("two figures");
    assert!(write >= DELAY.as_secs_f64() * 4.0, "{write}");
    assert!(read >= DELAY.as_secs_f64() * 2.0, "{read}");

    let family = family(outer.path());
    let namespaces: Vec<String> = family.iter().filter_map(|&pid| namespace(pid)).collect();
    let ours = namespace(std::process::id()).expect("a namespace");
    let distinct: std::collections::BTreeSet<_> =
        namespaces.iter().filter(|&other| *other != ours).collect();
    assert_eq!(distinct.len(), 4, "a client, a monitor and two servers: {namespaces:?}");
    // A new namespace may get the number of one that is gone, but not while the file is open.
    let held: Vec<_> =
        family.iter().flat_map(|pid| File::open(format!("/proc/{pid}/ns/net"))).collect();
    child.kill().expect("kill");
    child.wait().expect("its end");
    let gone = || family.iter().all(|pid| namespace(*pid).is_none());
    for _ in 0..600 {
        if gone() {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(gone(), "its processes have ended with it");
    let everywhere = all().filter_map(namespace).any(|left| distinct.contains(&left));
    assert!(!everywhere, "nobody is in one of its namespaces");
    drop(held);
    let interfaces = std::fs::read_to_string("/proc/net/dev").expect("interfaces");
    assert!(!interfaces.contains("node0"), "{interfaces}");
}

/// Starts a cluster with a network and prints its least latencies of writes and of reads.
fn hold(parent: &Path) {
    let options = ClusterOptions { parent: Some(parent.to_path_buf()), ..options(Some(DELAY)) };
    let cluster = Cluster::up(&options).expect("a cluster");
    println!("{}", cluster.network().expect("a network").describe());
    for load in ["write -b 4096 --no-cleanup", "rand"] {
        let mut command = Command::new("rados");
        command.arg("-c").arg(cluster.conf()).args(["-p", "rbd", "bench", "2"]);
        command.args(load.split(' ')).args(["-t", "1"]);
        cluster.as_client(&mut command);
        let output = command.output().expect("rados runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let least = text.lines().find_map(|line| line.strip_prefix("Min latency(s):"));
        println!("least {}", least.expect("a figure").trim());
    }
    println!("up");
    std::thread::sleep(Duration::from_secs(60));
}

/// The ids of all processes.
fn all() -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir("/proc").expect("processes").flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Processes with the environment of the child that was told to leave `parent` behind, including
/// the child.
fn family(parent: &Path) -> Vec<u32> {
    let marker = format!("{LEFT_BEHIND}={}", parent.display());
    let told = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|word| word == marker.as_bytes())
    };
    all().filter(told).collect()
}

/// Network namespace of a running process.
fn namespace(pid: u32) -> Option<String> {
    let link = std::fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
    Some(link.to_string_lossy().into_owned())
}
