//! What an ownership record says about a file or device itself: which one it is, and what the
//! kernel had counted of it.
//!
//! Several things distinguish an image from others, and each of them may be missing: a number that
//! the kernel gives to no second disk while it runs, and names that last from boot to boot. Two
//! observations in which a name of one kind differs are of different images. They are of one image
//! if the kernel's number or a lasting name says so. Otherwise it is not known. A name that copies
//! of an image have too (see [`proves`]) can only show that images differ.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What distinguishes an image from others.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct ImageId {
    /// Name of the image when it was seen, for messages.
    #[serde(default)]
    pub(crate) name: String,
    /// Id of the boot of the host in which `sequence` is valid; empty where there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) boot_id: String,
    /// What the kernel uses for nothing else while it runs: the number of a disk (`diskseq`), or a
    /// file's file system and handle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sequence: Option<String>,
    /// What the kernel may change behind that number: the process that connects a network disk, the
    /// disks below a device-mapper device, the size of a memory disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) setup: Option<String>,
    /// The partition on its disk: its number, and its first sector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) partition: Option<(u32, u64)>,
    /// Names that last from boot to boot, by their kind.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) lasting: BTreeMap<String, String>,
    /// Kinds in `lasting` of which another disk of the host has the same name, so that they prove
    /// nothing.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) shared: BTreeSet<String>,
}

/// Kind of the name of a partition. A copy of the partition table contains the same name.
pub(crate) const PARTITION_UUID: &str = "partition uuid";

/// Whether two images cannot have the same name of this kind.
fn proves(kind: &str) -> bool {
    !kind.ends_with(PARTITION_UUID)
}

/// The result of comparing two observations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sameness {
    /// Both are of one image.
    Same,
    /// They are of two images.
    Different,
    /// It is not known.
    Unknown,
}

impl ImageId {
    /// Whether `now`, observed later, is the image that `self` is.
    pub(crate) fn compare(&self, now: &ImageId) -> Sameness {
        let both = |kind: &String| Some((self.lasting.get(kind)?, now.lasting.get(kind)?));
        let differs = |kind: &String| both(kind).is_some_and(|(then, now)| then != now);
        if self.partition != now.partition || self.lasting.keys().any(differs) {
            return Sameness::Different;
        }
        let is_unique = |kind: &String| !self.shared.contains(kind) && !now.shared.contains(kind);
        let proven = |kind: &String| proves(kind) && is_unique(kind) && both(kind).is_some();
        let one_boot = !self.boot_id.is_empty() && self.boot_id == now.boot_id;
        let one_setup =
            self.setup.as_ref().zip(now.setup.as_ref()).is_none_or(|(then, now)| then == now);
        let sequence = self.sequence.is_some() && self.sequence == now.sequence;
        match one_boot && one_setup && sequence || self.lasting.keys().any(proven) {
            true => Sameness::Same,
            false => Sameness::Unknown,
        }
    }

    /// Whether it is a device's: its name does not begin with `/`.
    pub(crate) fn is_of_device(&self) -> bool {
        !self.name.starts_with('/')
    }

    /// Whether the image can be recognised after a reboot too.
    pub(crate) fn lasts(&self) -> bool {
        self.lasting.keys().any(|kind| proves(kind) && !self.shared.contains(kind))
    }

    /// The names that distinguish it, on one line.
    pub(crate) fn names(&self) -> String {
        let partition =
            self.partition.map(|(number, start)| format!("partition {number} from sector {start}"));
        let lasting = self.lasting.iter().map(|(kind, name)| format!("{kind} {name}"));
        let names: Vec<String> = lasting.chain(partition).collect();
        if names.is_empty() { "no lasting name".into() } else { names.join(", ") }
    }

    /// Its texts, which appear in messages.
    pub(crate) fn texts(&self) -> impl Iterator<Item = &String> {
        [&self.name, &self.boot_id]
            .into_iter()
            .chain(&self.sequence)
            .chain(&self.setup)
            .chain(&self.shared)
            .chain(self.lasting.iter().flat_map(|(kind, name)| [kind, name]))
    }
}

/// The counters of a device, in one boot of the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counted {
    pub(crate) boot_id: String,
    /// Number of the disk (`diskseq`), which no other disk gets in this boot.
    pub(crate) sequence: String,
    /// Sectors written. (A flush counts as a write of none.)
    pub(crate) written: u64,
    /// Sectors discarded.
    pub(crate) discarded: u64,
    /// Version of the header of an RBD image that the kernel has mapped; other clients change it
    /// before they write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) header: Option<u64>,
}

impl Counted {
    /// Whether both were counted from the same start: in one boot of the host, while the disk was
    /// present.
    pub(crate) fn goes_on_from(&self, other: &Counted) -> bool {
        self.boot_id == other.boot_id && self.sequence == other.sequence
    }

    /// Whether no other client of the cluster has had the image in between.
    pub(crate) fn has_header_of(&self, other: &Counted) -> bool {
        self.header == other.header
    }
}
