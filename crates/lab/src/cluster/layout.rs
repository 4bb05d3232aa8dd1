//! Clusters on emulated devices: so many disks of a class, so many OSDs on each, and perhaps an SSD that serves them all.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::{Cluster, ClusterError, ClusterOptions, Servers, Store, io as failed};
use crate::device::{Emulated, Preset};
use crate::scratch::Scratch;

/// Least part of an SSD that is worth a database, in bytes.
const DB_BYTES_MIN: u64 = 256 << 20;

/// A cluster on emulated devices.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Class of the disks, as it is to be emulated.
    pub disk: Preset,
    /// How many disks.
    pub disks: u32,
    /// OSDs on each.
    pub osds_per_disk: u32,
    /// Size of a disk in bytes.
    pub disk_bytes: u64,
    /// Class and size in bytes of an SSD that holds the databases and their logs, in equal parts for all OSDs.
    pub ssd: Option<(Preset, u64)>,
    /// Copies of each object.
    pub replicas: u32,
    /// How much slower than their class the devices are.
    pub slowed_by: u32,
    /// Servers among which the disks are dealt out, in a network of their own; with 0 all is on the loopback interface.
    pub servers: u32,
    /// How long each packet is on its way between two of them; needs servers.
    pub delay: Option<Duration>,
}

impl Layout {
    /// The servers, with all OSDs of a disk on one of them.
    fn servers(&self) -> Option<Servers> {
        let of = |osd: u32| osd % self.disks % self.servers;
        let osds = 0..self.disks * self.osds_per_disk;
        (self.servers > 0).then(|| Servers { count: self.servers, of_osds: osds.map(of).collect() })
    }
}

/// A running cluster with the devices below it. Dropping it ends all and removes their files.
#[derive(Debug)]
pub struct Emulation {
    // Dropped in this order: Ceph, the devices, their files.
    cluster: Cluster,
    devices: Vec<(String, Emulated)>,
    _scratch: Scratch,
}

impl Emulation {
    /// Makes the devices and brings the cluster up on them, all below `parent`. The devices have no delays yet:
    /// see [`Emulation::emulate`].
    ///
    /// # Errors
    /// When a device or the cluster cannot be had.
    pub fn up(parent: &Path, layout: &Layout) -> Result<Emulation, ClusterError> {
        let scratch =
            Scratch::new_in(parent, "devices").map_err(failed("cannot make a directory for the devices"))?;
        let start = |name: &str, preset: &Preset, bytes: u64, parts: &[u64]| {
            let spec = preset.spec.slowed(layout.slowed_by);
            let device = Emulated::start(
                spec,
                bytes,
                parts,
                &scratch.join(format!("{name}.data")),
                &scratch.join(name),
            );
            let device = device.map_err(failed(format!("cannot emulate the device {name}")))?;
            device.pause(true);
            Ok((name.to_string(), device))
        };
        let parts = |bytes: u64, count: u32| vec![bytes / u64::from(count) / 4096 * 4096; count as usize];
        let mut devices = Vec::new();
        for number in 0..layout.disks {
            let parts = parts(layout.disk_bytes, layout.osds_per_disk);
            devices.push(start(&format!("disk{number}"), &layout.disk, layout.disk_bytes, &parts)?);
        }
        let osds = layout.disks * layout.osds_per_disk;
        if let Some((preset, bytes)) = &layout.ssd {
            let parts = parts(*bytes, osds);
            if parts.first().is_none_or(|&part| part < DB_BYTES_MIN) {
                let source = io::Error::new(io::ErrorKind::InvalidInput, "less than 256 MiB for each OSD");
                return Err(failed("the SSD is too small for the databases")(source));
            }
            devices.push(start("ssd", preset, *bytes, &parts)?);
        }
        let ssd = devices.get(layout.disks as usize).map(|(_, ssd)| ssd);
        let stores = (0..osds).map(|osd| {
            let (disk, part) = (osd % layout.disks, osd / layout.disks);
            Store::BlueStore {
                block: devices[disk as usize].1.part(part as usize + 1),
                db: ssd.map(|ssd| ssd.part(osd as usize + 1)),
                wal: None,
                rotational: layout.disk.spec.is_rotational(),
            }
        });
        let options = ClusterOptions {
            parent: Some(parent.to_path_buf()),
            stores: stores.collect(),
            replicas: layout.replicas,
            servers: layout.servers(),
            delay: layout.delay,
            ..ClusterOptions::default()
        };
        let cluster = Cluster::up(&options)?;
        Ok(Emulation { cluster, devices, _scratch: scratch })
    }

    /// Whether the devices are as slow as they are to be, or answer at once, which is for filling images.
    pub fn emulate(&self, slow: bool) {
        for (_, device) in &self.devices {
            device.pause(!slow);
        }
    }

    /// The cluster.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The devices by name.
    pub fn devices(&self) -> impl Iterator<Item = (&str, &Emulated)> {
        self.devices.iter().map(|(name, device)| (name.as_str(), device))
    }
}
