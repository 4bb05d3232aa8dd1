//! The throw-away Ceph cluster that the tests of one program share.

#![allow(dead_code)]

use std::sync::{Mutex, MutexGuard};
use tidepool_lab::cluster::{Cluster, ClusterOptions};

const MIB: u64 = 1 << 20;

static CLUSTER: Mutex<Option<Cluster>> = Mutex::new(None);

/// The cluster, for one test at a time; `None` where Ceph is not installed.
pub struct Shared(MutexGuard<'static, Option<Cluster>>);

impl Shared {
    pub fn get() -> Option<Shared> {
        if let Err(e) = Cluster::available() {
            println!("not run: {e}");
            return None;
        }
        // A failed test leaves the cluster as usable as it was.
        let mut guard = CLUSTER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if guard.is_none() {
            let options = ClusterOptions { cephx: true, ..ClusterOptions::default() };
            *guard = Some(Cluster::up(&options).expect("a cluster"));
            // SAFETY: a function without arguments that touches nothing but the static above.
            unsafe { libc::atexit(end_cluster) };
        }
        Some(Shared(guard))
    }

    pub fn image(&self, name: &str, mib: u64) -> String {
        self.rbd_create(name, mib * MIB).expect("an image");
        self.uri(name)
    }

    pub fn uri(&self, name: &str) -> String {
        format!("rbd:rbd/{name}?conf={}", self.conf().display())
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

    /// A client of its own that writes a block; its outcome.
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
        self.0.as_ref().expect("brought up in get")
    }
}

extern "C" fn end_cluster() {
    let mut guard = CLUSTER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    drop(guard.take());
}
