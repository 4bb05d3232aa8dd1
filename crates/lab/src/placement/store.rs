//! How OSDs keep their data: BlueStore or FileStore, with or without a part of the SSD.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::{Applied, Ground, Layer, Placement, PlacementError, Ssd, failed, need, run};
use tidepool_cluster::ceph::{Cluster, Store};
use tidepool_cluster::mounts::unmount_below;

/// The first release of Ceph without FileStore.
const FILESTORE_GONE: u32 = 18;

pub(super) static BLUESTORE_COLOCATED: BlueStore = BlueStore { db_on_ssd: false };
pub(super) static BLUESTORE_DBWAL: BlueStore = BlueStore { db_on_ssd: true };
pub(super) static FILESTORE_COLOCATED: FileStore = FileStore { journal_on_ssd: false };
pub(super) static FILESTORE_JOURNAL: FileStore = FileStore { journal_on_ssd: true };

/// BlueStore on the disk, with its database and log on the disk or on the SSD.
#[derive(Debug)]
pub(super) struct BlueStore {
    db_on_ssd: bool,
}

impl Placement for BlueStore {
    fn name(&self) -> &'static str {
        if self.db_on_ssd { "bluestore-dbwal" } else { "bluestore-colocated" }
    }

    fn what(&self) -> &'static str {
        if self.db_on_ssd {
            "BlueStore, database and log on the SSD"
        } else {
            "BlueStore, everything on the disk"
        }
    }

    fn layer(&self) -> Layer {
        Layer::Store
    }

    fn is_bluestore(&self) -> bool {
        true
    }

    fn ssd(&self) -> Ssd {
        if self.db_on_ssd { Ssd::Partitions } else { Ssd::Unused }
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let store = |slot: &super::Slot| Store::BlueStore {
            block: slot.data.clone(),
            db: slot.ssd.clone().filter(|_| self.db_on_ssd),
            wal: None,
            rotational: slot.rotational,
        };
        ground.stores = ground.slots.iter().map(store).collect();
        Ok(Box::new(Stored { placement: self.name(), wanted: self.wanted(), mounts: Vec::new() }))
    }
}

impl BlueStore {
    /// Entries of an OSD's metadata when the store is in place.
    fn wanted(&self) -> [(&'static str, &'static str); 2] {
        [
            ("osd_objectstore", "bluestore"),
            ("bluefs_dedicated_db", if self.db_on_ssd { "1" } else { "0" }),
        ]
    }
}

/// FileStore on a filesystem on the disk, its journal on the same disk or on the SSD.
#[derive(Debug)]
pub(super) struct FileStore {
    journal_on_ssd: bool,
}

impl Placement for FileStore {
    fn name(&self) -> &'static str {
        if self.journal_on_ssd { "filestore-journal" } else { "filestore-colocated" }
    }

    fn what(&self) -> &'static str {
        if self.journal_on_ssd {
            "FileStore, journal on the SSD"
        } else {
            "FileStore, journal on the disk"
        }
    }

    fn layer(&self) -> Layer {
        Layer::Store
    }

    fn ssd(&self) -> Ssd {
        if self.journal_on_ssd { Ssd::Partitions } else { Ssd::Unused }
    }

    fn journal_on_disk(&self) -> bool {
        !self.journal_on_ssd
    }

    fn mounts_disks(&self) -> bool {
        true
    }

    fn probe(&self) -> Result<(), String> {
        if !rustix::process::geteuid().is_root() {
            return Err(
                "a filesystem on an emulated disk wants a loop device and a mount, which only root has"
                    .into(),
            );
        }
        need("mkfs.ext4", "e2fsprogs")?;
        need("losetup", "mount")
    }

    fn probe_release(&self, ceph: u32) -> Result<(), String> {
        if ceph >= FILESTORE_GONE {
            return Err(format!("Ceph {ceph} has no FileStore any more"));
        }
        Ok(())
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        // The names of RBD's objects are short enough. Longer names do not fit into ext4's
        // attributes.
        ground.ceph_conf.push("osd max object name len = 256".into());
        ground.ceph_conf.push("osd max object namespace len = 64".into());
        let mut stored = Stored {
            placement: self.name(),
            wanted: [("osd_objectstore", "filestore"); 2],
            mounts: Vec::new(),
        };
        for (number, slot) in ground.slots.iter().enumerate() {
            let mount = ground.directory.join(format!("filestore{number}"));
            fs::create_dir(&mount).map_err(failed(format!("cannot make {}", mount.display())))?;
            run(Command::new("mkfs.ext4")
                .args(["-q", "-F", "-E", "nodiscard,lazy_itable_init=0"])
                .arg(&slot.data))?;
            run(Command::new("mount").args(["-o", "loop,noatime"]).arg(&slot.data).arg(&mount))?;
            stored.mounts.push(mount.clone());
            past_the_page_cache(&slot.data)?;
            // The OSD needs an empty directory, so its data is not in the root of the filesystem.
            let data = mount.join("osd");
            fs::create_dir(&data).map_err(failed(format!("cannot make {}", data.display())))?;
            let journal = if self.journal_on_ssd { &slot.ssd } else { &slot.journal };
            let journal = journal.clone().ok_or_else(|| PlacementError::NotInPlace {
                placement: self.name(),
                what: format!("there is no room for the journal of OSD {number}"),
            })?;
            ground.stores.push(Store::FileStore { data, journal, journal_bytes: slot.fast_bytes });
        }
        Ok(Box::new(stored))
    }
}

/// Switches the loop device of a file to direct I/O. Its requests then bypass the page cache, and
/// it sends more than one at a time.
fn past_the_page_cache(file: &Path) -> Result<(), PlacementError> {
    let mut command = Command::new("losetup");
    command.args(["--noheadings", "--output", "NAME", "--associated"]).arg(file);
    let output = command.output().map_err(failed("cannot run losetup"))?;
    let device = String::from_utf8_lossy(&output.stdout).trim().to_string();
    run(Command::new("losetup").arg("--direct-io=on").arg(&device))
}

/// A store that is in use.
#[derive(Debug)]
struct Stored {
    placement: &'static str,
    wanted: [(&'static str, &'static str); 2],
    mounts: Vec<PathBuf>,
}

impl Applied for Stored {
    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError> {
        let metadata = cluster.ceph(&["osd", "metadata", "--format", "json"])?;
        let not = |what: String| PlacementError::NotInPlace { placement: self.placement, what };
        let osds: Vec<Value> = serde_json::from_str(&metadata).map_err(|e| not(e.to_string()))?;
        let mut proof = Vec::new();
        for osd in &osds {
            for (key, value) in self.wanted {
                if osd[key] != value {
                    return Err(not(format!("OSD {} says {key} = {}", osd["id"], osd[key])));
                }
            }
            let told = [
                "id",
                "osd_objectstore",
                "osd_journal",
                "bluefs_dedicated_db",
                "rotational",
                "journal_rotational",
            ];
            let told = told.iter().filter(|key| !osd[**key].is_null());
            let mut told: serde_json::Map<String, Value> =
                told.map(|key| (key.to_string(), osd[*key].clone())).collect();
            let directory = osd["osd_data"].as_str().map(Path::new);
            for name in ["block", "block.db"] {
                let link = directory.and_then(|directory| fs::read_link(directory.join(name)).ok());
                told.extend(link.map(|link| (name.to_string(), json!(link))));
            }
            proof.push(Value::Object(told));
        }
        Ok(json!({ "osds": proof }))
    }

    /// FileStore reads through the page cache. This cache is as large as the machine's memory, and
    /// is no part of the placement.
    fn forget(&self) {
        for mount in &self.mounts {
            if let Ok(file) = fs::File::open(mount) {
                let _ = rustix::fs::syncfs(file.as_fd());
            }
            forget_below(&mount.join("osd/current"));
        }
    }
}

impl Drop for Stored {
    fn drop(&mut self) {
        for mount in self.mounts.drain(..) {
            // Normally no process uses the mount any more. If one does, the mount is removed
            // nevertheless.
            let _ = rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::empty());
            unmount_below(&mount);
        }
    }
}

/// Drops all files below a directory from the page cache.
fn forget_below(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            forget_below(&path);
        } else if let Ok(file) = fs::File::open(&path) {
            let _ = rustix::fs::fadvise(file.as_fd(), 0, None, rustix::fs::Advice::DontNeed);
        }
    }
}
