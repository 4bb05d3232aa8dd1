//! The cluster sizes of a suite: each number of disks with each number of OSDs on a disk.

use std::collections::BTreeSet;
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{DISKS_PERCENT_MAX, Ground, OSD_ROOM_BYTES, Suite};
use crate::words;

/// Size of a cluster: its disks, and the OSDs on each disk.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(deny_unknown_fields)]
pub struct ClusterSize {
    /// Disks.
    pub disks: u32,
    /// OSDs on each disk.
    pub osds_per_disk: u32,
}

impl ClusterSize {
    /// OSDs of the whole cluster.
    pub fn osds(self) -> u32 {
        self.disks.saturating_mul(self.osds_per_disk)
    }
}

impl fmt::Display for ClusterSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let disks = words::count(self.disks as usize, "disk");
        write!(f, "{disks} with {} on each", words::count(self.osds_per_disk as usize, "OSD"))
    }
}

impl Ground {
    /// All cluster sizes of the ground.
    pub fn sizes(&self) -> Vec<ClusterSize> {
        let on = |&disks: &u32| {
            self.osds_per_disk
                .iter()
                .map(move |&osds_per_disk| ClusterSize { disks, osds_per_disk })
        };
        self.disks.iter().flat_map(on).collect()
    }
}

impl Suite {
    /// The cluster sizes of the ground without those that the suite leaves out.
    pub fn sizes(&self) -> Vec<ClusterSize> {
        let mut sizes = self.ground.sizes();
        sizes.retain(|size| !self.without_sizes.contains(size));
        sizes
    }

    /// Checks the sizes that are left out, in both forms.
    pub(super) fn check_sizes(&self) -> Result<(), String> {
        let all: BTreeSet<ClusterSize> = self.ground.sizes().into_iter().collect();
        let quick = self.quick.iter().flat_map(|quick| &quick.without_sizes);
        let without: BTreeSet<ClusterSize> =
            self.without_sizes.iter().chain(quick).copied().collect();
        if let Some(wrong) = without.difference(&all).next() {
            return Err(format!("it cannot be without {wrong}: that is none of its sizes"));
        }
        if without.len() == all.len() {
            return Err("without_sizes leaves no size to be measured".into());
        }
        Ok(())
    }

    /// Checks that images and OSDs have room on the disks of each size.
    pub(super) fn check_room(&self) -> Result<(), String> {
        let clients = self.images();
        let ground = &self.ground;
        let images = ground
            .image_bytes
            .saturating_mul(u64::from(clients) * u64::from(ground.replicas_max()));
        let is_small = |size: &ClusterSize| {
            let disks = ground.disk_bytes.saturating_mul(size.disks.into());
            let room = OSD_ROOM_BYTES.saturating_mul(size.osds().into());
            images > disks / 100 * DISKS_PERCENT_MAX || images.saturating_add(room) > disks
        };
        let Some(small) = self.sizes().into_iter().find(is_small) else { return Ok(()) };
        Err(format!(
            "{clients} images with {} copies take {} of the {} on the disks ({small}): at most {DISKS_PERCENT_MAX} %, and each OSD needs {} beside them",
            ground.replicas_max(),
            words::bytes(images),
            words::bytes(ground.disk_bytes.saturating_mul(small.disks.into())),
            words::bytes(OSD_ROOM_BYTES)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quick_form_is_without_some_sizes_and_the_exact_one_has_all() {
        let exact = Suite::find("pvc2").expect("it comes with the program");
        assert_eq!(exact.sizes(), exact.ground.sizes());
        let quick = exact.clone().quick();
        assert!(quick.sizes().len() >= 3 && quick.sizes().len() < exact.sizes().len());
        for cell in quick.cells() {
            let size = ClusterSize { disks: cell.disks, osds_per_disk: cell.osds_per_disk };
            assert!(!quick.without_sizes.contains(&size), "{size}");
        }
    }

    #[test]
    fn a_size_that_there_is_not_cannot_be_left_out_nor_can_all() {
        let good = include_str!("../suites/pvc2.toml");
        for (from, to, wanted) in [
            (
                "without_sizes = [",
                "without_sizes = [\n    { disks = 3, osds_per_disk = 1 },",
                "none of its sizes",
            ),
            ("{ disks = 1, osds_per_disk = 2 }", "{ disks = 1, osds = 2 }", "line "),
        ] {
            assert!(good.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        let all = good
            .replace("disks = [1, 2, 4]", "disks = [1]")
            .replace("osds_per_disk = [1, 2, 4]", "osds_per_disk = [2]");
        let (head, tail) = all.split_once("without_sizes = [").expect("in its quick form");
        let (_, tail) = tail.split_once("\n]").expect("it ends");
        let all = format!("{head}without_sizes = [{{ disks = 1, osds_per_disk = 2 }}]{tail}");
        let without_claims = all.split("[[direction]]").next().expect("the rest");
        let error =
            Suite::parse("s.toml", without_claims).expect_err("nothing is left").to_string();
        assert!(error.contains("leaves no size"), "{error}");
    }
}
