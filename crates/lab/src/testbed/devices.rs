//! The devices of a testbed, and the partitions that OSDs get of them.

use std::fs;

use super::layout::{
    DISK_JOURNAL_BYTES, Layout, PARTITION_BYTES_MIN, PARTITION_UNIT_BYTES, disk_parts, too_small,
};
use super::{HOST_SSDS, failed};
use crate::placement::{Placement, PlacementError, Slot, Ssd};
use tidepool_cluster::device::{Emulated, Preset, Spec};
use tidepool_cluster::scratch::Scratch;

/// A device with its name and its unslowed specification.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) emulated: Emulated,
    pub(super) spec: Spec,
}

/// Name of the SSD in a server.
pub(super) fn server_ssd(server: u32) -> String {
    format!("node{server}-ssd")
}

/// Name of a disk.
pub(super) fn disk(number: u32) -> String {
    format!("disk{number}")
}

/// Makes the devices: disks, then servers' SSDs, then hypervisors' SSDs.
pub(super) fn devices(
    scratch: &Scratch,
    layout: &Layout,
    below: &[&'static dyn Placement],
    ssd_share_bytes: u64,
) -> Result<Vec<Device>, PlacementError> {
    let start = |name: &str, preset: &Preset, bytes: u64, parts: &[u64]| {
        let (backing, mount) = (scratch.join(format!("{name}.data")), scratch.join(name));
        let spec = preset.spec.clone();
        let emulated =
            Emulated::start(spec.slowed(layout.slowed_by), bytes, parts, &backing, &mount)
                .map_err(failed(format!("cannot emulate the device {name}")))?;
        emulated.pause(true);
        Ok::<_, PlacementError>(Device { name: name.into(), emulated, spec })
    };
    let mut devices = Vec::new();
    let parts = disk_parts(layout, below)?;
    for number in 0..layout.disks {
        let media = layout.data_media(below);
        devices.push(start(&disk(number), media, layout.disk_bytes, &parts)?);
    }
    let Some((preset, bytes)) = &layout.ssd else { return Ok(devices) };
    let users = below.iter().filter(|placement| placement.ssd() == Ssd::Partitions).count();
    let servers = layout.servers_with_ssd();
    let osds_max =
        servers.clone().map(|server| layout.osds_of(server).count()).max().unwrap_or(1).max(1);
    let part = ssd_share_bytes / osds_max as u64 / PARTITION_UNIT_BYTES * PARTITION_UNIT_BYTES;
    if users > 0 && part < PARTITION_BYTES_MIN {
        return Err(too_small("an SSD", "256 MiB for each OSD"));
    }
    for server in servers {
        let parts = vec![part; users * layout.osds_of(server).count()];
        devices.push(start(&server_ssd(server), preset, *bytes, &parts)?);
    }
    for name in HOST_SSDS.iter().take(layout.ssds.hosts as usize) {
        devices.push(start(name, preset, *bytes, &[])?);
    }
    Ok(devices)
}

/// The partitions and the server of each OSD. OSDs with consecutive numbers are on different disks.
pub(super) fn slots(
    devices: &[Device],
    layout: &Layout,
    below: &[&'static dyn Placement],
) -> Vec<Slot> {
    let journal = below.iter().any(|placement| placement.journal_on_disk());
    let partitioned = below.iter().any(|placement| placement.ssd() == Ssd::Partitions);
    let rotational = layout.data_media(below).spec.is_rotational();
    let slot = |osd: u32| {
        let (disk, on_disk) =
            (&devices[(osd % layout.disks) as usize].emulated, (osd / layout.disks) as usize);
        let first = on_disk * if journal { 2 } else { 1 } + 1;
        let server = layout.server(osd);
        let ssd = devices.iter().find(|device| partitioned && device.name == server_ssd(server));
        let part = layout.osds_of(server).position(|of| of == osd).unwrap_or(0) + 1;
        let ssd = ssd.map(|ssd| ssd.emulated.part(part));
        let fast =
            ssd.as_ref().and_then(|path| fs::metadata(path).ok()).map(|metadata| metadata.len());
        Slot {
            data: disk.part(first + usize::from(journal)),
            journal: journal.then(|| disk.part(first)),
            ssd,
            fast_bytes: fast.unwrap_or(DISK_JOURNAL_BYTES),
            rotational,
            server: server as usize,
        }
    };
    (0..layout.osds()).map(slot).collect()
}
