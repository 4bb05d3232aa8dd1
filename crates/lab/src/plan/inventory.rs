//! The inventory: hosts with their drives, the cluster and its workload, from a TOML file or from
//! the machine itself.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::node::{self, Node};
use super::quantity::{Amount, Bytes, Millis, Percent, Positive, Release};
use crate::qualify::Grade;
use tidepool_cluster::device::real::Real;

/// Most hosts in an inventory.
const HOSTS_MAX: usize = 1_000;
/// Most drives of a host.
const DRIVES_MAX: usize = 256;
/// Most OSDs with their data on one drive.
const OSDS_PER_DRIVE_MAX: u64 = 16;
/// Name of the host if the inventory is the machine itself.
const THIS_MACHINE: &str = "this-machine";

/// The cluster, workload, hosts and offers for which a plan is made.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inventory {
    /// Facts that concern all hosts.
    pub cluster: Cluster,
    /// The workload of the guests.
    pub workload: Workload,
    /// The hosts.
    pub hosts: Vec<Host>,
    /// SSDs that could be bought; each has a price.
    pub offers: Vec<Product>,
}

/// Facts that concern all hosts. A field that is `None` was not given.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Cluster {
    /// Ceph's release.
    pub ceph: Option<Release>,
    /// How OSDs store objects.
    pub objectstore: Option<Store>,
    /// What the cluster is used for.
    #[serde(rename = "use")]
    pub usage: Option<Usage>,
    /// Copies of each object.
    pub replicas: Option<Positive>,
    /// Currency of the prices.
    pub currency: Option<String>,
}

/// How OSDs store objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Store {
    /// On the device itself, with the metadata in a database.
    Bluestore,
    /// In a filesystem behind a journal; until Ceph 17.
    Filestore,
}

/// What a cluster is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Usage {
    /// Block devices only.
    Rbd,
    /// Objects, alone or beside block devices.
    Rgw,
}

/// The workload of the guests. A field that is `None` was not given.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Workload {
    /// Size of most requests in bytes.
    pub block_size: Option<Bytes>,
    /// Share of reads among the requests, in percent.
    pub read_percent: Option<Percent>,
    /// Requests in flight of a volume.
    pub queue_depth: Option<Positive>,
    /// Bytes that are used again and again on each hypervisor.
    pub working_set: Option<Bytes>,
    /// Bytes that the guests of each hypervisor write in a day.
    pub written_per_day: Option<Bytes>,
    /// Time of writes that may be lost when a host dies; zero if nothing may be lost.
    pub accept_loss: Option<Millis>,
}

/// Role of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The host has OSDs.
    Osd,
    /// The host runs guests.
    Hypervisor,
    /// The host has OSDs and runs guests.
    Both,
}

/// A host.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Name of the host.
    pub name: String,
    /// Role of the host, if it is known.
    pub role: Option<Role>,
    /// Drives of the host, one entry for each drive.
    pub drives: Vec<Drive>,
}

/// The media of a drive, and its interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A rotating disk.
    Hdd,
    /// Flash behind SATA or SAS.
    Ssd,
    /// Flash behind NVMe.
    Nvme,
}

/// A drive as it can be bought. A field that is `None` was not given.
#[derive(Debug, Clone, PartialEq)]
pub struct Product {
    /// The media of the drive.
    pub kind: Option<Kind>,
    /// Size in bytes.
    pub bytes: u64,
    /// Model, as its maker calls it.
    pub model: Option<String>,
    /// The write cache survives a power failure.
    pub protected: Option<bool>,
    /// Grade by `lab qualify`.
    pub grade: Option<Grade>,
    /// Synchronous 4 KiB writes per second of one writer.
    pub sync_write_iops: Option<f64>,
    /// Bandwidth of synchronous writes of several writers, in bytes per second.
    pub sync_write_bytes_per_s: Option<f64>,
    /// Bytes that may be written to the drive in its life.
    pub endurance_bytes: Option<f64>,
    /// Price, in the cluster's currency.
    pub price: Option<f64>,
}

/// A drive of a host.
#[derive(Debug, Clone, PartialEq)]
pub struct Drive {
    /// The drive as a product.
    pub product: Product,
    /// Device node, such as `/dev/sda`, if it is known.
    pub path: Option<String>,
    /// Name of the drive in the advice.
    pub label: String,
    /// Use of the drive.
    pub state: State,
    /// Number of OSDs that have or will have their data on the drive, from 1 to 16.
    pub osds: usize,
}

/// Use of a drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// The drive is free: its content may be lost.
    Free,
    /// The drive holds the data of OSDs.
    Osd,
    /// The drive has another use, with what is known of this use.
    InUse(String),
    /// Nothing can be put on the drive, and why: it is read-only or zoned.
    Unfit(String),
    /// The use was not given.
    Unknown,
}

/// Why a text is no inventory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct InventoryError {
    /// Byte offset of the error in the text, if the error has one place.
    pub at: Option<usize>,
    /// What is wrong.
    pub why: String,
}

impl Kind {
    /// Name of the kind in an inventory.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Hdd => "hdd",
            Kind::Ssd => "ssd",
            Kind::Nvme => "nvme",
        }
    }
}

impl Role {
    /// The host has OSDs.
    pub fn has_osds(self) -> bool {
        matches!(self, Role::Osd | Role::Both)
    }

    /// The host runs guests.
    pub fn has_guests(self) -> bool {
        matches!(self, Role::Hypervisor | Role::Both)
    }
}

impl Host {
    /// The host is known to have OSDs.
    pub fn has_osds(&self) -> bool {
        self.role.is_some_and(Role::has_osds)
    }

    /// The host is known to run guests.
    pub fn has_guests(&self) -> bool {
        self.role.is_some_and(Role::has_guests)
    }
}

impl Inventory {
    /// Reads an inventory from TOML.
    ///
    /// # Errors
    /// When the text is no inventory: the place of the error, if it has one, and what is wrong.
    pub fn parse(text: &str) -> Result<Inventory, InventoryError> {
        let file: File = toml::from_str(text).map_err(|error| InventoryError {
            at: Some(error.span().map_or(0, |span| span.start)),
            why: error.message().to_string(),
        })?;
        file.checked().map_err(|why| InventoryError { at: None, why })
    }

    /// The inventory of the machine itself, from what `lsblk` reports. The role, the workload and
    /// the quality of the SSDs are not known. A device that is no drive of the machine is left out.
    pub fn of_machine(devices: &[Real]) -> Inventory {
        let drives = devices.iter().filter(|device| device.no_drive.is_none());
        let host = Host {
            name: THIS_MACHINE.into(),
            role: None,
            drives: drives.map(Drive::of_device).collect(),
        };
        Inventory { hosts: vec![host], ..Inventory::default() }
    }
}

impl Drive {
    /// Size of each OSD that has its data on the drive, in bytes.
    pub(super) fn osd_bytes(&self) -> u64 {
        self.product.bytes / self.osds as u64
    }

    /// The drive is a logical volume, which is used whole.
    pub(super) fn is_volume(&self) -> bool {
        self.path.as_deref().is_some_and(|path| node::node(path) == Node::Volume)
    }

    fn of_device(device: &Real) -> Drive {
        let kind = match (device.transport.as_deref(), device.rotational) {
            (Some("nvme"), _) => Some(Kind::Nvme),
            (_, false) => Some(Kind::Ssd),
            (Some("sata" | "ata" | "sas"), true) => Some(Kind::Hdd),
            // The kernel reports many virtual disks as rotating disks.
            _ => None,
        };
        let product = Product {
            kind,
            bytes: device.bytes,
            model: device.model.clone(),
            protected: None,
            grade: None,
            sync_write_iops: None,
            sync_write_bytes_per_s: None,
            endurance_bytes: None,
            price: None,
        };
        let in_use = || device.in_use.clone().map_or(State::Free, State::InUse);
        let state = device.unfit.clone().map_or_else(in_use, State::Unfit);
        Drive {
            product,
            path: Some(device.path.clone()),
            label: device.path.clone(),
            state,
            osds: 1,
        }
    }
}

/// The inventory file, as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    cluster: Cluster,
    #[serde(default)]
    workload: Workload,
    #[serde(default)]
    host: Vec<HostEntry>,
    #[serde(default)]
    offer: Vec<OfferEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct HostEntry {
    name: String,
    role: Option<Role>,
    #[serde(default)]
    drive: Vec<DriveEntry>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum UseEntry {
    Free,
    Osd,
    Other,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DriveEntry {
    kind: Kind,
    size: Bytes,
    count: Option<Positive>,
    paths: Option<Vec<String>>,
    #[serde(rename = "use")]
    usage: Option<UseEntry>,
    osds: Option<Positive>,
    model: Option<String>,
    power_loss_protection: Option<bool>,
    grade: Option<Grade>,
    sync_write_iops: Option<Positive>,
    sync_write_mb_s: Option<Positive>,
    tbw: Option<Amount>,
    dwpd: Option<Amount>,
    price: Option<Amount>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct OfferEntry {
    kind: Kind,
    size: Bytes,
    model: Option<String>,
    power_loss_protection: Option<bool>,
    grade: Option<Grade>,
    sync_write_iops: Option<Positive>,
    sync_write_mb_s: Option<Positive>,
    tbw: Option<Amount>,
    dwpd: Option<Amount>,
    price: Amount,
}

/// Years for which makers promise drive writes per day, if they promise nothing else.
const WARRANTY_YEARS: f64 = 5.0;

impl File {
    fn checked(self) -> Result<Inventory, String> {
        if self.host.is_empty() {
            return Err(
                "there is no host in it: write [[host]] with a name, a role and drives".into()
            );
        }
        if self.host.len() > HOSTS_MAX {
            return Err(format!("there are {} hosts; at most {HOSTS_MAX}", self.host.len()));
        }
        let mut names = BTreeSet::new();
        let mut hosts = Vec::new();
        for entry in self.host {
            if !names.insert(entry.name.clone()) {
                return Err(format!("there are two hosts of the name {:?}", entry.name));
            }
            hosts.push(entry.checked()?);
        }
        let offers: Result<Vec<Product>, String> =
            self.offer.into_iter().map(OfferEntry::checked).collect();
        Ok(Inventory { cluster: self.cluster, workload: self.workload, hosts, offers: offers? })
    }
}

impl HostEntry {
    fn checked(self) -> Result<Host, String> {
        plain(&self.name, "name of a host", "")?;
        let mut drives: Vec<Drive> = Vec::new();
        for entry in self.drive {
            let number = drives.len() + 1;
            drives
                .extend(entry.checked(number).map_err(|why| format!("host {}: {why}", self.name))?);
            if drives.len() > DRIVES_MAX {
                return Err(format!("host {} has more than {DRIVES_MAX} drives", self.name));
            }
        }
        let mut paths = BTreeSet::new();
        if let Some(path) =
            drives.iter().filter_map(|drive| drive.path.as_ref()).find(|p| !paths.insert(*p))
        {
            return Err(format!("host {}: {path} is there twice", self.name));
        }
        Ok(Host { name: self.name, role: self.role, drives })
    }
}

impl DriveEntry {
    /// The drives of an entry; the first drive is the host's drive number `number`, from 1.
    fn checked(self, number: usize) -> Result<Vec<Drive>, String> {
        let count = match (&self.paths, self.count) {
            (Some(paths), None) => paths.len(),
            (Some(paths), Some(count)) if paths.len() as u64 != count.get() => {
                return Err(format!("{} paths are named of {} drives", paths.len(), count.get()));
            }
            (_, count) => {
                count.map_or(1, |count| usize::try_from(count.get()).unwrap_or(usize::MAX))
            }
        };
        if count > DRIVES_MAX {
            return Err(format!("{count} drives are more than {DRIVES_MAX}"));
        }
        let osds = self.osds.map_or(1, Positive::get);
        if osds > OSDS_PER_DRIVE_MAX {
            return Err(format!("{osds} OSDs on a drive are more than {OSDS_PER_DRIVE_MAX}"));
        }
        if self.osds.is_some() && !matches!(self.usage, Some(UseEntry::Osd)) {
            return Err("osds is for drives that hold OSDs: use = \"osd\"".into());
        }
        let paths = self.paths.unwrap_or_default();
        for path in &paths {
            plain(path, "device", "/dev/")?;
        }
        let product = Product {
            kind: Some(self.kind),
            bytes: self.size.get(),
            model: self.model,
            protected: self.power_loss_protection,
            grade: self.grade,
            sync_write_iops: self.sync_write_iops.map(|iops| iops.get() as f64),
            sync_write_bytes_per_s: self
                .sync_write_mb_s
                .map(|megabytes| megabytes.get() as f64 * 1e6),
            endurance_bytes: endurance(self.tbw, self.dwpd, self.size)?,
            price: self.price.map(Amount::get),
        };
        let state = match self.usage {
            Some(UseEntry::Free) => State::Free,
            Some(UseEntry::Osd) => State::Osd,
            Some(UseEntry::Other) => State::InUse("in use".into()),
            None => State::Unknown,
        };
        let drive = |index: usize| Drive {
            product: product.clone(),
            path: paths.get(index).cloned(),
            label: paths.get(index).cloned().unwrap_or_else(|| format!("drive {}", number + index)),
            state: state.clone(),
            osds: osds as usize,
        };
        Ok((0..count).map(drive).collect())
    }
}

impl OfferEntry {
    fn checked(self) -> Result<Product, String> {
        if self.kind == Kind::Hdd {
            return Err("an offer is an SSD: ssd or nvme".into());
        }
        Ok(Product {
            kind: Some(self.kind),
            bytes: self.size.get(),
            model: self.model,
            protected: self.power_loss_protection,
            grade: self.grade,
            sync_write_iops: self.sync_write_iops.map(|iops| iops.get() as f64),
            sync_write_bytes_per_s: self
                .sync_write_mb_s
                .map(|megabytes| megabytes.get() as f64 * 1e6),
            endurance_bytes: endurance(self.tbw, self.dwpd, self.size)?,
            price: Some(self.price.get()),
        })
    }
}

/// Bytes that may be written to a drive in its life, from terabytes written or from drive writes
/// per day.
fn endurance(
    tbw: Option<Amount>,
    dwpd: Option<Amount>,
    size: Bytes,
) -> Result<Option<f64>, String> {
    match (tbw, dwpd) {
        (Some(_), Some(_)) => Err("say tbw or dwpd, not both".into()),
        (Some(tbw), None) => Ok(Some(tbw.get() * 1e12)),
        (None, Some(dwpd)) => Ok(Some(dwpd.get() * size.get() as f64 * 365.0 * WARRANTY_YEARS)),
        (None, None) => Ok(None),
    }
}

/// Checks a name. Names appear in commands, so they must have no character that a shell interprets.
fn plain(text: &str, what: &str, prefix: &str) -> Result<(), String> {
    let rest = text.strip_prefix(prefix).unwrap_or("");
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._:-/".contains(c);
    let allowed = !rest.is_empty() && !rest.contains("..") && rest.chars().all(allowed);
    if allowed
        && !rest.starts_with('-')
        && text.len() <= 255
        && (!prefix.is_empty() || !rest.contains('/'))
    {
        return Ok(());
    }
    let how = if prefix.is_empty() {
        "letters, digits and . _ -".into()
    } else {
        format!("{prefix}NAME")
    };
    Err(format!("{text:?} is no {what}: write {how}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidepool_cluster::device::real;

    const HOST: &str = "[[host]]\nname = \"a\"\nrole = \"osd\"\n";

    fn why(text: &str) -> String {
        Inventory::parse(text).expect_err(text).to_string()
    }

    #[test]
    fn drives_are_counted_one_by_one() {
        let text = format!(
            "{HOST}[[host.drive]]\nkind = \"hdd\"\nsize = \"8TB\"\npaths = [\"/dev/sdb\", \"/dev/sdc\"]\nuse = \"osd\"\n\
             [[host.drive]]\nkind = \"nvme\"\nsize = \"1.92TB\"\ncount = 2\ndwpd = 1\nprice = 300\n"
        );
        let host = Inventory::parse(&text).expect("valid").hosts.remove(0);
        let labels: Vec<&str> = host.drives.iter().map(|drive| drive.label.as_str()).collect();
        assert_eq!(labels, ["/dev/sdb", "/dev/sdc", "drive 3", "drive 4"]);
        assert_eq!(host.drives[0].state, State::Osd);
        assert_eq!(
            (host.drives[2].state.clone(), host.drives[2].path.clone()),
            (State::Unknown, None)
        );
        assert_eq!(host.drives[2].product.endurance_bytes, Some(1.92e12 * 365.0 * 5.0));
    }

    #[test]
    fn what_is_no_inventory_is_told_in_one_sentence() {
        for (text, says) in [
            (String::new(), "no host"),
            ("[cluster]\nreplicas = 0\n".into(), "above zero"),
            ("[cluster]\nceph = \"sixteen\"\n".into(), "not a release"),
            ("[workload]\nread-percent = 101\n".into(), "0 to 100"),
            ("[workload]\nblock-size = \"4 blocks\"\n".into(), "not a size"),
            ("[workload]\naccept-loss = 5\n".into(), "a duration such as"),
            (format!("{HOST}{HOST}"), "two hosts of the name \"a\""),
            (format!("{HOST}colour = \"red\"\n"), "unknown field `colour`"),
            ("[[host]]\nname = \"a; reboot\"\n".into(), "is no name of a host"),
            ("[[host]]\nname = \"-a\"\n".into(), "is no name of a host"),
            (
                format!("{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = -1\n"),
                "a size is not negative",
            ),
            (
                format!("{HOST}[[host.drive]]\nkind = \"tape\"\nsize = 1\n"),
                "unknown variant `tape`",
            ),
            (format!("{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 0\n"), "a size is not zero"),
            (
                format!("{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\nprice = -1\n"),
                "not a finite number from zero",
            ),
            (
                format!("{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\ntbw = 1\ndwpd = 1\n"),
                "not both",
            ),
            (
                format!("{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\ncount = 1000\n"),
                "more than 256",
            ),
            (
                format!("{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\npaths = [\"sda\"]\n"),
                "is no device: write /dev/NAME",
            ),
            (
                format!(
                    "{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\npaths = [\"/dev/a$(b)\"]\n"
                ),
                "is no device",
            ),
            (
                format!(
                    "{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\npaths = [\"/dev/a\", \"/dev/a\"]\n"
                ),
                "/dev/a is there twice",
            ),
            (
                format!(
                    "{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\ncount = 2\npaths = [\"/dev/a\"]\n"
                ),
                "1 paths are named of 2 drives",
            ),
            (
                format!("{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\nosds = 2\n"),
                "osds is for drives that hold OSDs",
            ),
            (
                format!(
                    "{HOST}[[host.drive]]\nkind = \"ssd\"\nsize = 1\nuse = \"osd\"\nosds = 17\n"
                ),
                "more than 16",
            ),
            (
                format!("{HOST}[[offer]]\nkind = \"hdd\"\nsize = 1\nprice = 1\n"),
                "an offer is an SSD: ssd or nvme",
            ),
        ] {
            assert!(why(&text).contains(says), "{text}: {}", why(&text));
        }
    }

    #[test]
    fn of_the_machine_its_own_drives_are_known_as_far_as_lsblk_tells() {
        let listing = include_str!("../../../cluster/src/device/lsblk.json");
        let inventory = Inventory::of_machine(&real::parse(listing.as_bytes()).expect("a listing"));
        let drives = &inventory.hosts[0].drives;
        let of = |state: fn(&State) -> bool| -> Vec<&str> {
            drives
                .iter()
                .filter(|drive| state(&drive.state))
                .map(|drive| drive.label.as_str())
                .collect()
        };
        assert_eq!(of(|state| *state == State::Free), ["/dev/mapper/mpatha", "/dev/nvme0n1"]);
        assert_eq!(of(|state| matches!(state, State::Unfit(_))), ["/dev/sdh", "/dev/nvme3n1"]);
        assert_eq!(drives.len(), 9, "{drives:#?}");
        let kind = |path: &str| {
            drives.iter().find(|drive| drive.label == path).map(|drive| drive.product.kind)
        };
        assert_eq!(kind("/dev/vda"), Some(None), "the kernel calls a virtual disk one that turns");
        assert_eq!(
            (kind("/dev/sda"), kind("/dev/sdb")),
            (Some(Some(Kind::Hdd)), Some(Some(Kind::Ssd)))
        );
        assert!(drives.iter().all(|drive| drive.product.protected.is_none()));
        assert_eq!(inventory.hosts[0].role, None);
    }
}
