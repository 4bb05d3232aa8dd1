//! What the tests of RBD images need from their cluster.

#![allow(dead_code)]

use std::time::{Duration, Instant};

use tidepool_cluster::ceph::{Cluster, ClusterOptions};

const MIB: u64 = 1 << 20;
/// Longest wait for the cluster to forget a client that has ended.
const CLOSED_MAX: Duration = Duration::from_secs(60);

pub struct Shared(Cluster);

impl Shared {
    /// A pool in the cluster that all tests share; `None` where Ceph is not installed.
    pub fn get() -> Option<Shared> {
        Shared::available().then(|| Shared(Cluster::for_test().expect("a cluster")))
    }

    /// A cluster whose daemons the test may stop; `None` where Ceph is not installed.
    pub fn alone() -> Option<Shared> {
        let options = ClusterOptions { cephx: true, ..ClusterOptions::for_tests() };
        Shared::available().then(|| Shared(Cluster::up(&options).expect("a cluster")))
    }

    fn available() -> bool {
        Cluster::available().inspect_err(|e| println!("not run: {e}")).is_ok()
    }

    /// Adds a client with these rights at the monitors and in the pool; returns its name.
    pub fn client(&self, name: &str, mon: &str, osd: &str) -> String {
        let name = format!("{name}-{}", self.pool());
        let osd = format!("{osd} pool={}", self.pool());
        self.client_add(&name, &[("mon", mon), ("osd", &osd)]).expect("a client");
        name
    }

    /// Whether the cluster has fenced the client with this address.
    pub fn is_fenced(&self, address: &str) -> bool {
        self.ceph(&["osd", "blocklist", "ls"]).expect("the blocklist").contains(address)
    }

    pub fn image(&self, name: &str, mib: u64) -> String {
        self.rbd_create(name, mib * MIB).expect("an image");
        self.uri(name)
    }

    /// Waits until the cluster has forgotten the clients that have ended without closing an image,
    /// which takes ten seconds. Returns `false`, and prints why, if the cluster does not forget
    /// them: Ceph 16 has been seen to keep such a client for good, without a connection and without
    /// a watch in the OSD's list. The test cannot continue then.
    pub fn wait_closed(&self, name: &str) -> bool {
        let since = Instant::now();
        loop {
            let status = self.rbd(&["status", name]).expect("a status");
            if !status.contains("watcher=") {
                return true;
            }
            if since.elapsed() > CLOSED_MAX {
                println!(
                    "not tested: the cluster does not forget a client of {name} that has ended: {}",
                    status.replace('\n', " ")
                );
                return false;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    pub fn export(&self, name: &str) -> Vec<u8> {
        let path = self.dir().join(format!("{name}.export"));
        self.rbd_export(name, &path).expect("an export");
        let content = std::fs::read(&path).expect("the export");
        std::fs::remove_file(&path).expect("the export");
        content
    }

    pub fn header(&self, name: &str) -> String {
        let info = self.rbd(&["info", "--format", "json", name]).expect("info");
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        format!("rbd_header.{}", info["id"].as_str().expect("an id"))
    }

    /// Address of the client that holds an image's lock.
    pub fn lock_address(&self, name: &str) -> Option<String> {
        let info = self.rados(&["lock", "info", &self.header(name), "rbd_lock"]).ok()?;
        let info: serde_json::Value = serde_json::from_str(&info).ok()?;
        Some(info["lockers"][0]["addr"].as_str()?.to_owned())
    }

    /// Writes a block with a client of its own; returns whether that succeeded.
    pub fn foreign_write(&self, name: &str) -> bool {
        let write = [
            "bench",
            "--io-type",
            "write",
            "--io-size",
            "4096",
            "--io-total",
            "4096",
            "--io-threads",
            "1",
            name,
        ];
        self.rbd(&write).is_ok()
    }
}

impl std::ops::Deref for Shared {
    type Target = Cluster;
    fn deref(&self) -> &Cluster {
        &self.0
    }
}
