//! Placements that go together, as a suite names them.

use super::{Base, Layer, Placement, Ssd, all, probe, store};
use crate::access::Access;
use crate::results::Durability;

/// Part of a second name of a placement: `NAME+again` is the same placement, measured on clusters
/// of its own.
pub const AGAIN: &str = "again";

/// At most one placement of each layer, and the class of the SSD. A suite writes it as
/// `NAME[+NAME…][@CLASS]`.
#[derive(Debug, Clone)]
pub struct Arrangement {
    /// The placements, from the media up; one of them is always a store.
    pub placements: Vec<&'static dyn Placement>,
    /// Class of the SSD; `None` for the class that the suite's ground names.
    pub ssd: Option<String>,
    /// Whether the arrangement is a second one, to be compared with an equal first one.
    pub again: bool,
}

impl Arrangement {
    /// Parses an arrangement as a suite writes it.
    ///
    /// # Errors
    /// One line that says what is wrong.
    pub fn parse(text: &str) -> Result<Arrangement, String> {
        let (names, ssd) = match text.split_once('@') {
            Some((names, ssd)) => (names, Some(ssd.to_string())),
            None => (text, None),
        };
        let mut placements = Vec::new();
        let again = names.split('+').any(|name| name == AGAIN);
        for name in names.split('+').filter(|name| *name != AGAIN) {
            let found =
                all().into_iter().find(|placement| placement.name() == name).ok_or_else(|| {
                    let known: Vec<&str> = all().iter().map(|placement| placement.name()).collect();
                    format!("no placement {name}; there are {}", known.join(", "))
                })?;
            placements.push(found);
        }
        if !placements.iter().any(|placement| placement.layer() == Layer::Store) {
            placements.push(&store::BLUESTORE_COLOCATED);
        }
        placements.sort_by_key(|placement| placement.layer());
        if let Some(pair) = placements.windows(2).find(|pair| pair[0].layer() == pair[1].layer()) {
            return Err(format!(
                "{text}: {} and {} are in the same place",
                pair[0].name(),
                pair[1].name()
            ));
        }
        if let Some(format) = placements.iter().find(|placement| placement.layer() == Layer::Format)
            && !placements.iter().any(|placement| placement.is_bluestore())
        {
            return Err(format!("{text}: only BlueStore has {}", format.name()));
        }
        let tier = placements.iter().find(|placement| placement.layer() == Layer::Tier);
        let other = placements.iter().find(|placement| {
            let parts = placement.layer() == Layer::Store && placement.ssd() != Ssd::Unused;
            placement.in_guests() || placement.mounts_disks() || parts
        });
        if let Some((tier, other)) = tier.zip(other) {
            return Err(format!(
                "{text}: {} has OSDs of its own, of BlueStore, and those of {} are others",
                tier.name(),
                other.name()
            ));
        }
        let guests = placements.iter().find(|placement| placement.in_guests());
        let mounts = placements.iter().find(|placement| placement.mounts_disks());
        if let Some((guests, mounts)) = guests.zip(mounts) {
            return Err(format!(
                "{text}: {} is mounted by this machine's kernel, and with {} OSDs are in guests",
                mounts.name(),
                guests.name()
            ));
        }
        Ok(Arrangement { placements, ssd, again })
    }

    /// The placements in the given layers.
    pub fn within(&self, layers: &[Layer]) -> impl Iterator<Item = &'static dyn Placement> {
        self.placements.iter().copied().filter(move |placement| layers.contains(&placement.layer()))
    }

    /// How many of the placements share an SSD. Only placements in servers share one: a
    /// hypervisor's SSD has one user. At least 1.
    pub fn ssd_shares(&self) -> u32 {
        let below = self.within(&Layer::BELOW);
        (below.filter(|placement| placement.ssd() != Ssd::Unused).count() as u32).max(1)
    }

    /// Checks whether the arrangement is possible on this machine, and with a release of Ceph if
    /// one is given.
    ///
    /// # Errors
    /// The reason why it is not, in one line.
    pub fn probe(&self, ceph: Option<u32>) -> Result<(), String> {
        self.placements.iter().try_for_each(|placement| probe(*placement, ceph))
    }

    /// The durability of a write through all placements of the arrangement over an access path,
    /// with `replicas` copies of each object in the cluster.
    pub fn durability(&self, replicas: u32, access: Access) -> Durability {
        if access.is_volatile() {
            return Durability::Volatile;
        }
        let cluster = if replicas > 1 { Durability::Replicated } else { Durability::OneCopy };
        let found =
            self.placements.iter().map(|placement| placement.durability()).fold(cluster, Ord::min);
        match found {
            Durability::OneCopy
                if self.placements.iter().any(|placement| placement.keeps_two_copies()) =>
            {
                Durability::TwoCopies
            }
            found => found,
        }
    }

    /// Whether a cache on an SSD in the servers is among the placements.
    pub fn caches_below(&self) -> bool {
        self.within(&[Layer::Device, Layer::Tier]).any(|below| below.ssd() == Ssd::File)
    }

    /// Whether the OSDs run in guests.
    pub fn in_guests(&self) -> bool {
        self.placements.iter().any(|placement| placement.in_guests())
    }

    /// The placement between client and cluster, if there is one.
    pub fn front(&self) -> Option<&'static dyn Placement> {
        self.within(&[Layer::Client]).next()
    }

    /// The access path by which the arrangement reaches images when a workload asks for `access`.
    ///
    /// # Errors
    /// The arrangement is not possible on that path, or the path is not possible on this machine:
    /// the reason, in one line.
    pub fn path(&self, access: Access) -> Result<Access, String> {
        let path = self.front().map_or(Ok(access), |front| front.path(access))?;
        path.probe().map(|()| path)
    }

    /// The device on which the arrangement depends. Of several, the nearest to the clients.
    pub fn base(&self) -> Base {
        match self.on_ssd().map(|placement| placement.layer()) {
            Some(Layer::Client) => Base::HostSsd,
            Some(Layer::Device | Layer::Tier | Layer::Store | Layer::Format) => Base::ServerSsd,
            None => Base::Disk,
        }
    }

    /// What an operator has to do when that device has failed ([`Arrangement::base`]).
    pub fn mend(&self) -> &'static str {
        self.on_ssd()
            .map_or("replace the disk, and make its OSD anew", |placement| placement.mend())
    }

    /// The placement that uses an SSD. Of several, the first in this order of their layers: client,
    /// tier, device, store.
    fn on_ssd(&self) -> Option<&'static dyn Placement> {
        let layers = [Layer::Client, Layer::Tier, Layer::Device, Layer::Store];
        layers
            .iter()
            .find_map(|layer| self.within(&[*layer]).find(|part| part.ssd() != Ssd::Unused))
    }

    /// Whether reads of clients need no device.
    pub fn asks_no_device(&self) -> bool {
        self.placements.iter().any(|placement| placement.asks_no_device())
    }

    /// Whether a placement of the arrangement keeps, in memory, blocks that have been read.
    pub fn caches_in_memory(&self) -> bool {
        self.placements.iter().any(|placement| placement.caches_in_memory())
    }

    /// Whether a placement of the arrangement keeps blocks that have been read.
    pub fn caches_reads(&self) -> bool {
        self.placements.iter().any(|placement| placement.caches_reads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_each_layer_goes_together() {
        let names = |text: &str| {
            let arrangement = Arrangement::parse(text).expect(text);
            arrangement.placements.iter().map(|placement| placement.name()).collect::<Vec<_>>()
        };
        assert_eq!(names("host-tidepool"), ["bluestore-colocated", "host-tidepool"]);
        assert_eq!(
            names("host-tidepool+filestore-journal+osd-tidepool"),
            ["osd-tidepool", "filestore-journal", "host-tidepool"]
        );
        assert_eq!(
            Arrangement::parse("filestore-journal@x").expect("a class").ssd.as_deref(),
            Some("x")
        );
        assert_eq!(names("host-tidepool+again"), names("host-tidepool"));
        assert_eq!(
            names("host-tidepool+alloc-16k+bluestore-dbwal"),
            ["bluestore-dbwal", "alloc-16k", "host-tidepool"]
        );
        let shares = |text: &str| Arrangement::parse(text).expect(text).ssd_shares();
        assert_eq!(
            [
                "librbd-cache",
                "host-tidepool+osd-tidepool",
                "filestore-journal+osd-tidepool",
                "cache-tier+osd-tidepool"
            ]
            .map(shares),
            [1, 1, 2, 2]
        );
        for (text, wanted) in [
            ("nothing", "no placement"),
            ("host-tidepool+librbd-cache", "same place"),
            ("alloc-4k+alloc-16k", "same place"),
            ("filestore-journal+alloc-16k", "only BlueStore has alloc-16k"),
            ("", "no placement"),
            ("filestore-journal+osd-bcache", "OSDs are in guests"),
            ("filestore-colocated+cache-tier", "has OSDs of its own"),
            ("osd-guest+cache-tier", "has OSDs of its own"),
            ("bluestore-dbwal+cache-tier", "has OSDs of its own"),
        ] {
            let error = Arrangement::parse(text).expect_err(text);
            assert!(error.contains(wanted), "{error}");
        }
    }

    #[test]
    fn a_release_that_lacks_a_part_has_none_of_the_arrangement() {
        let probe = |text: &str, ceph| Arrangement::parse(text).expect(text).probe(Some(ceph));
        let refused =
            probe("host-tidepool+filestore-journal", 18).expect_err("18 has no FileStore");
        assert!(refused.contains("Ceph 18 has no FileStore"), "{refused}");
        assert!(!probe("filestore-journal", 17).is_err_and(|why| why.contains("Ceph")));
        assert_eq!(probe("bluestore-dbwal", 18), Ok(()));
    }

    #[test]
    fn a_placement_falls_with_the_device_that_it_stands_on() {
        for (text, base, mend) in [
            ("bluestore-colocated", Base::Disk, "replace the disk"),
            ("osd-passthrough", Base::Disk, "replace the disk"),
            ("librbd-cache", Base::Disk, "replace the disk"),
            ("bluestore-dbwal", Base::ServerSsd, "OSD anew"),
            ("filestore-journal", Base::ServerSsd, "OSD anew"),
            ("osd-tidepool", Base::ServerSsd, "OSD anew"),
            ("cache-tier", Base::ServerSsd, "OSD anew"),
            ("host-tidepool", Base::HostSsd, "tidepool recover"),
            ("host-tidepool-replicated", Base::HostSsd, "replace the SSD"),
            ("host-tidepool+osd-tidepool", Base::HostSsd, "tidepool recover"),
        ] {
            let arrangement = Arrangement::parse(text).expect(text);
            assert_eq!(arrangement.base(), base, "{text}");
            assert!(arrangement.mend().contains(mend), "{text}: {}", arrangement.mend());
        }
    }

    #[test]
    fn the_weakest_part_decides_what_a_write_is_safe_from() {
        let over = |text: &str, replicas, access| {
            Arrangement::parse(text).expect(text).durability(replicas, access)
        };
        assert_eq!(over("filestore-journal", 3, Access::KrbdWriteback), Durability::Replicated);
        assert_eq!(over("filestore-journal", 3, Access::KrbdUnsafe), Durability::Volatile);
        let durability = |text: &str, replicas| over(text, replicas, Access::Librbd);
        assert_eq!(durability("bluestore-dbwal", 1), Durability::OneCopy);
        assert_eq!(durability("bluestore-dbwal", 2), Durability::Replicated);
        assert_eq!(durability("host-tidepool", 2), Durability::OneCopy);
        assert_eq!(durability("host-tidepool-replicated", 1), Durability::TwoCopies);
        assert_eq!(durability("host-tidepool-replicated+osd-tidepool", 2), Durability::Replicated);
        assert_eq!(durability("librbd-cache", 2), Durability::Volatile);
        assert_eq!(durability("osd-tidepool", 3), Durability::Replicated);
    }
}
