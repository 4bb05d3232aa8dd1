//! A host with 21 volumes of which eight are in trouble, each in another kind: the thirteen others
//! are served as ever, and the eight come back by themselves when their trouble goes.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tidepool_testkit::nbd::Client;
use tidepool_testkit::{Cluster, ClusterOptions, Error, one_at_a_time};
use tidepool_tests::rig::{MIB, Rig, RigOptions, VOLUME};

use crate::rights::Rights;

/// Size of the images.
const IMAGE_BYTES: u64 = 8 * MIB;
/// Volumes without any trouble.
const HEALTHY: usize = 13;
/// How long a state may take to come.
const LIMIT: Duration = Duration::from_secs(180);

/// The daemon of the host, and what its volumes are.
struct Stage {
    cluster: Cluster,
    rig: Rig,
    healthy: Vec<String>,
}

impl Stage {
    fn new() -> Stage {
        let often = ["mon tick interval = 1", "mgr tick period = 1", "mgr stats period = 1"];
        let more = [
            "mon mgr digest period = 1",
            "mon allow pool delete = true",
            "osd client watch timeout = 8",
        ];
        let extra = often.iter().chain(&more).map(|&line| line.to_owned()).collect();
        let options =
            ClusterOptions { extra, manager: true, cephx: true, ..ClusterOptions::for_tests() };
        let cluster = Cluster::up(&options).expect("a cluster");
        for pool in ["gone", "full"] {
            make_pool(&cluster, pool);
        }
        Rights::documented().give(&cluster, "less");
        let healthy: Vec<String> = (0..HEALTHY).map(|number| format!("well{number}")).collect();
        let uri = |pool: &str, image: &str| {
            cluster.uri(image).replace("rbd:rbd/", &format!("rbd:{pool}/"))
        };
        let mut volumes: Vec<(String, String)> =
            healthy.iter().map(|name| (name.clone(), uri("rbd", name))).collect();
        for name in ["away", "foreign", "blocklisted"] {
            volumes.push((name.into(), uri("rbd", name)));
        }
        volumes.push(("refused".into(), format!("{}&id=less", uri("rbd", "refused"))));
        volumes.push(("gone".into(), uri("gone", "gone")));
        volumes.push(("full".into(), uri("full", "full")));
        for (name, uri) in &volumes {
            let image = uri.trim_start_matches("rbd:").split('?').next().expect("an image");
            cluster
                .rbd(&["create", "--size", "8M", image])
                .unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let options = RigOptions { cache_bytes: 1024 * MIB, volumes, extra: Vec::new() };
        Stage { rig: Rig::new(&options).expect("a rig"), cluster, healthy }
    }

    fn ceph(&self, line: &str) {
        self.cluster.ceph(&line.split(' ').collect::<Vec<_>>()).expect("a command of Ceph");
    }

    /// Starts the daemon and reads each healthy volume as soon as its client is let in; returns how
    /// long that took, together.
    fn start_and_read(&mut self) -> Duration {
        let begin = Instant::now();
        self.rig.daemon.start_unready().expect("the daemon starts");
        let mut connect = |name: &str| loop {
            assert!(self.rig.daemon.runs(), "{}", self.rig.daemon.log());
            match Client::connect(&self.rig.socket, name) {
                Ok(client) => return client,
                // It does not listen yet.
                Err(Error::Io { .. } | Error::Disconnected) if begin.elapsed() < LIMIT => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) => panic!("{name}: {error}"),
            }
        };
        for (number, name) in self.healthy.iter().enumerate() {
            let data = connect(name).read(0, 4096).expect("read");
            assert_eq!(data, [number as u8 + 1; 4096], "{name}");
        }
        begin.elapsed()
    }

    fn wait(&self, name: &str, what: impl FnMut(&Value) -> bool) -> Value {
        self.rig.admin.wait_volume(name, LIMIT, what).expect("the state comes")
    }
}

fn make_pool(cluster: &Cluster, pool: &str) {
    cluster.ceph(&["osd", "pool", "create", pool, "1"]).expect("a pool");
    cluster.rbd(&["pool", "init", pool]).expect("a pool of images");
}

fn is_served(volume: &Value) -> bool {
    volume["state"] == "serving" || volume["state"] == "draining"
}

#[test]
fn g8_the_trouble_of_eight_volumes_is_not_that_of_thirteen_others() {
    let _turn = one_at_a_time();
    let mut stage = Stage::new();
    stage.rig.daemon.start().expect("the daemon starts");
    for (number, name) in stage.healthy.iter().enumerate() {
        let connected = Client::connect(&stage.rig.socket, name);
        let mut client =
            connected.unwrap_or_else(|error| panic!("{name}: {error}: {}", stage.rig.daemon.log()));
        client.write(0, &[number as u8 + 1; 4096]).expect("a write");
        client.flush().expect("a flush");
    }
    assert!(stage.rig.daemon.terminate().expect("it ends").success());
    let alone = stage.start_and_read();
    stage.rig.daemon.wait_ready().expect("ready");

    // A full pool has something to take.
    stage.ceph("osd pool set-quota full max_bytes 4096");
    let mut client = Client::connect(&stage.rig.socket, "full").expect("connect");
    let mut offset = 0;
    while stage.rig.admin.volume("full").expect("a status")["backend_state"] != "full" {
        client.write(offset % IMAGE_BYTES, &[9; 65536]).expect("absorbed");
        client.flush().expect("a flush");
        offset += 65536;
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(client);
    assert!(stage.rig.daemon.terminate().expect("it ends").success());

    // The other troubles come while it is down.
    stage.cluster.rbd(&["rename", "away", "elsewhere"]).expect("rename");
    stage.cluster.ceph(&["auth", "caps", "client.less", "mon", "allow r"]).expect("no rights");
    stage.ceph("osd pool delete gone gone --yes-i-really-really-mean-it");
    let volumes = vec![(VOLUME.to_owned(), stage.cluster.uri("foreign"))];
    let options = RigOptions { cache_bytes: 64 * MIB, volumes, extra: Vec::new() };
    let mut other = Rig::new(&options).expect("a rig");
    other.daemon.start().expect("another host serves it");
    // A monitor that takes connections and says nothing.
    let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
    let silent = stage.rig.scratch.join("silent.conf");
    let monitor = listener.local_addr().expect("an address");
    std::fs::write(&silent, format!("[global]\nmon host = {monitor}\n")).expect("a configuration");
    stage.cluster.rbd(&["create", "--size", "8M", "silent"]).expect("an image");
    let conf = |path: &Path| format!("conf={}", path.display());
    let silent_uri =
        stage.cluster.uri("silent").replace(&conf(stage.cluster.conf()), &conf(&silent));
    let mut arguments = stage.rig.daemon.arguments().to_vec();
    arguments.push(format!("--volume=stale={}", stage.cluster.uri("stale")).into());
    arguments.push(format!("--volume=silent={silent_uri}").into());
    stage.rig.daemon.set_arguments(arguments);

    let beside = stage.start_and_read();
    println!(
        "{HEALTHY} volumes are read {alone:?} after the start, beside others in trouble {beside:?}"
    );
    stage.rig.daemon.wait_ready().expect("ready");
    for name in ["away", "refused", "gone", "foreign", "stale", "silent"] {
        let volume = stage.wait(name, |volume| volume["state"] == "unavailable");
        println!("{name}: {}", volume["error"]);
        assert!(volume["error"].as_str().is_some_and(|error| !error.contains('\n')), "{volume}");
    }
    stage.wait("full", |volume| volume["backend_state"] == "full");
    let status = stage.rig.admin.status().expect("a status");
    let served = status["volumes"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|volume| is_served(volume))
        .count();
    assert!(served >= HEALTHY, "{status}");

    // A live client is blocklisted by mistake. What it had is in the cache, and its client gets no
    // error.
    let before = stage.wait("blocklisted", is_served);
    let mut client = Client::connect(&stage.rig.socket, "blocklisted").expect("connect");
    client.write(0, &[7; 65536]).expect("absorbed");
    client.flush().expect("a flush");
    let watchers =
        stage.cluster.rbd(&["status", "blocklisted", "--format", "json"]).expect("a status");
    let watchers: Value = serde_json::from_str(&watchers).expect("JSON");
    let address = watchers["watchers"][0]["address"].as_str().expect("it is served");
    stage.ceph(&format!("osd blocklist add {address} 3600"));
    let mut offset = 65536;
    let cut = loop {
        match client.write(offset % IMAGE_BYTES, &[8; 4096]).and_then(|()| client.flush()) {
            Ok(()) => offset = 65536 + (offset - 61440) % (4 * MIB),
            Err(error) => break error,
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert!(
        matches!(cut, Error::Disconnected | Error::Io { .. }),
        "the connection ends, no request does: {cut}"
    );
    let generation = |volume: &Value| volume["owner"]["generation"].as_u64();
    let after = stage.wait("blocklisted", |volume| {
        is_served(volume) && generation(volume) > generation(&before)
    });
    println!("blocklisted: {} to {}", before["owner"], after["owner"]);
    let mut client = Client::connect(&stage.rig.socket, "blocklisted").expect("connect");
    assert_eq!(client.read(0, 65536).expect("read"), [7; 65536]);
    stage.rig.admin.drain("blocklisted").expect("drain");

    // Each trouble goes, and its volume comes.
    stage.cluster.rbd(&["rename", "elsewhere", "away"]).expect("rename");
    Rights::documented().give_again(&stage.cluster, "less");
    make_pool(&stage.cluster, "gone");
    stage.cluster.rbd(&["create", "--size", "8M", "gone/gone"]).expect("an image");
    stage.cluster.rbd(&["create", "--size", "8M", "stale"]).expect("an image");
    stage.ceph("osd pool set-quota full max_bytes 0");
    other
        .admin
        .call("DELETE", &format!("/v1/volumes/{VOLUME}"), None)
        .expect("the other host gives it back");
    for name in ["away", "refused", "gone", "foreign", "stale", "full"] {
        stage.wait(name, |volume| is_served(volume) && volume["backend_state"] == "ok");
        Client::connect(&stage.rig.socket, name).expect("connect").read(0, 4096).expect("read");
    }
    drop(listener);
    std::fs::copy(stage.cluster.conf(), &silent).expect("a configuration");
    stage.wait("silent", is_served);
    assert!(other.daemon.terminate().expect("it ends").success());
    assert!(stage.rig.daemon.terminate().expect("it ends").success());
}
