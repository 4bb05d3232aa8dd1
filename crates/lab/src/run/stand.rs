//! A testbed with its images: how it is made, and how placements are put in front of it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::journal::Journal;
use super::measure::PASS_LIMIT;
use super::prepare::Warm;
use super::schedule::Block;
use super::watch::Watch;
use super::{LOOPBACK, RunError, Runner, layout};
use crate::access::Access;
use crate::load::Objects;
use crate::placement::{Arrangement, Placement};
use crate::results::Testbed as Described;
use crate::suite::{Cell, Guest};
use crate::testbed::Testbed;
use tidepool_cluster::ceph::ClusterError;
use tidepool_cluster::fio::{self, Endpoint, Pass, Running};
use tidepool_cluster::network::Network;

/// Fills of new caches write a multiple of this many bytes to each image.
const AGED_UNIT_BYTES: u64 = 1 << 20;

/// A testbed with its images.
#[derive(Debug)]
pub(super) struct Stand {
    pub(super) testbed: Testbed,
    /// Its number in the results.
    pub(super) id: u32,
    /// Images, and the bytes of each that were ever written.
    pub(super) images: Vec<(String, u64)>,
    /// Objects in addition to the images.
    pub(super) objects: Objects,
    /// The sets that the caches hold, as far as these fit. `None` if the caches are not known to be
    /// warm.
    pub(super) warm: Option<Warm>,
}

impl Stand {
    /// The images of this number of neighbours: the last ones.
    pub(super) fn of_neighbours(&self, count: u32) -> impl Iterator<Item = Endpoint> {
        let first = self.images.len().saturating_sub(count as usize);
        self.images[first..].iter().map(|(image, _)| self.testbed.endpoint(image))
    }

    /// Why the cache treats a guest wrongly. `flushed` are the images for which the cache remembers
    /// a flush. `None` if no guest is treated wrongly.
    pub(super) fn mistaken(
        &self,
        flushed: Option<Vec<String>>,
        clients: u32,
        guest: Guest,
    ) -> Option<String> {
        let flushed = flushed?;
        let images: Vec<&String> =
            self.images[..clients as usize].iter().map(|(image, _)| image).collect();
        mistaken(&images, &flushed, guest)
    }
}

/// Says which image's guest the cache treats wrongly: as a guest that flushes, or as a guest that
/// never flushes.
fn mistaken(images: &[&String], flushed: &[String], guest: Guest) -> Option<String> {
    let flushes = guest == Guest::Flushes;
    let image = images.iter().find(|image| flushed.contains(image) != flushes)?;
    Some(match guest {
        Guest::Flushes => {
            format!(
                "the cache has seen no flush of {image}, and takes its guest for one that never flushes"
            )
        }
        Guest::NeverFlushes => {
            format!("the cache has seen a flush of {image}, whose guest never flushes")
        }
    })
}

impl Runner<'_> {
    /// Brings a testbed up, fills its images, and fills the caches below the cluster.
    pub(super) fn stand(&self, block: &Block, journal: &mut Journal) -> Result<Stand, RunError> {
        let (ground, shape) = (&self.suite.ground, &block.shape);
        let arrangement = Arrangement::parse(&shape.below).map_err(RunError::Suite)?;
        let layout = layout::of(&self.suite, block, self.no_network.is_none())?;
        let (parent, program) = (&self.options.parent, &self.options.program);
        let mut testbed =
            Testbed::up(parent, program, &layout, &arrangement).map_err(RunError::Placement)?;
        testbed.calm().map_err(RunError::Placement)?;
        let written_bytes = if self.options.unfilled { 0 } else { ground.image_bytes };
        let mut images = Vec::new();
        for number in 0..self.suite.images_on(self.cpus) {
            let name = format!("img{number}");
            testbed.image(&name, ground.image_bytes).map_err(RunError::Placement)?;
            images.push((name, written_bytes));
        }
        self.pass_over(
            &testbed,
            Pass::WriteAndFlush,
            images.iter().map(|(image, bytes)| (testbed.direct(image), *bytes)),
        )?;
        let id = journal.results.testbeds.iter().map(|testbed| testbed.id + 1).max().unwrap_or(1);
        let ceph = testbed
            .cluster()
            .ceph(&["version"])
            .map_err(|e: ClusterError| RunError::Placement(e.into()))?;
        testbed.filled().map_err(RunError::Placement)?;
        // Caches are filled through images. A suite with only rados bench workloads measures caches
        // that were never full.
        if !images.is_empty() && arrangement.caches_below() {
            let caches_bytes = testbed.server_share_bytes() * u64::from(ground.servers.max(1));
            let copies = u64::from(shape.replicas) * images.len() as u64;
            let bytes = caches_bytes / copies;
            self.age(&testbed, images.iter().map(|(image, _)| (testbed.direct(image), bytes)))?;
        }
        let proof = testbed.verify().map_err(RunError::Placement)?;
        journal.testbed(Described {
            id,
            disks: shape.disks,
            osds_per_disk: shape.osds_per_disk,
            replicas: Some(shape.replicas).filter(|copies| *copies != ground.replicas),
            ceph,
            network: self.network(&testbed),
            proofs: BTreeMap::from([(shape.below.clone(), proof)]),
        })?;
        Ok(Stand { testbed, id, images, objects: Objects::none(), warm: None })
    }

    /// Passes over several images at the same time: over the given number of bytes of each, from
    /// its beginning.
    pub(super) fn pass_over(
        &self,
        testbed: &Testbed,
        pass: Pass,
        images: impl Iterator<Item = (Endpoint, u64)>,
    ) -> Result<(), RunError> {
        let some = images.filter(|(_, bytes)| *bytes > 0);
        let passes =
            some.map(|(image, bytes)| Running::start(&image, &fio::pass(&image, pass, bytes)));
        let passes = passes.collect::<Result<Vec<_>, _>>().map_err(|e| RunError::Load(e.into()))?;
        let watch = Watch::new(self, testbed, PASS_LIMIT);
        for pass in passes {
            pass.finish(&|| watch.stop()).map_err(|e| RunError::Load(e.into()))?;
        }
        Ok(())
    }

    /// Writes through new caches as many bytes as they hold, over the images several times if
    /// needed. A cache that was never full would take writes in at no cost.
    fn age(
        &self,
        testbed: &Testbed,
        images: impl Iterator<Item = (Endpoint, u64)>,
    ) -> Result<(), RunError> {
        if self.options.unfilled {
            return Ok(());
        }
        let most = self.suite.ground.image_bytes;
        let whole = |bytes: u64| bytes.min(most) / AGED_UNIT_BYTES * AGED_UNIT_BYTES;
        let mut left: Vec<(Endpoint, u64)> = images.collect();
        testbed.prepare(|| {
            while left.iter().any(|(_, bytes)| whole(*bytes) > 0) {
                // This pass sends no flush: a cache remembers that its guest has flushed, and the
                // guests of some workloads never flush.
                self.pass_over(
                    testbed,
                    Pass::Write,
                    left.iter().map(|(image, bytes)| (image.clone(), whole(*bytes))),
                )?;
                left.iter_mut().for_each(|(_, bytes)| *bytes = bytes.saturating_sub(most));
            }
            Ok::<_, RunError>(())
        })?;
        testbed.drain(0.0, &|| self.interrupted().is_err()).map(drop).map_err(RunError::Placement)
    }

    /// The network between clients and OSDs, in words.
    fn network(&self, testbed: &Testbed) -> String {
        let loopback = || match &self.no_network {
            None => LOOPBACK.to_string(),
            Some(why) => format!("{LOOPBACK}, without a delay: {why}"),
        };
        testbed.cluster().network().map_or_else(loopback, Network::describe)
    }

    /// The access path by which a measurement's hypervisors reach images.
    pub(super) fn path(&self, cell: &Cell) -> Result<Access, RunError> {
        let arrangement = Arrangement::parse(&cell.placement).map_err(RunError::Suite)?;
        arrangement.path(self.suite.access(cell)).map_err(RunError::Suite)
    }

    /// Puts the placement of a measurement in front of the cluster, on its access path.
    pub(super) fn place(
        &self,
        stand: &mut Stand,
        cell: &Cell,
        path: Access,
        journal: &mut Journal,
    ) -> Result<(), RunError> {
        let arrangement = Arrangement::parse(&cell.placement).map_err(RunError::Suite)?;
        stand.testbed.emulate(false);
        if let Some(proof) = stand.testbed.reach(path).map_err(RunError::Placement)? {
            note(stand, journal, path.name().into(), proof)?;
        }
        let proof = self.front(stand, arrangement.front())?;
        note(stand, journal, on_path(&cell.placement, path), proof)
    }

    /// Puts a new placement in front of the cluster, or none. A cache that keeps reads, and is not
    /// in memory, is then written full. Returns the proof.
    pub(super) fn front(
        &self,
        stand: &mut Stand,
        front: Option<&'static dyn Placement>,
    ) -> Result<Value, RunError> {
        stand.warm = None;
        let proof = stand.testbed.front(front).map_err(RunError::Placement)?;
        if front.is_some_and(|front| front.caches_reads() && !front.caches_in_memory()) {
            let on_host =
                stand.images.len().div_ceil(self.suite.ground.hypervisors.max(1) as usize);
            let bytes = stand.testbed.host_share_bytes() / on_host.max(1) as u64;
            // Caches are filled without the guests in between, because requests through a guest are
            // slow.
            let image = |(image, _): &(String, u64)| (stand.testbed.outside(image), bytes);
            self.age(&stand.testbed, stand.images.iter().map(image))?;
        }
        Ok(proof)
    }
}

/// Records the proof that something is in place on a testbed, under a name.
fn note(stand: &Stand, journal: &mut Journal, name: String, proof: Value) -> Result<(), RunError> {
    let known = journal.results.testbeds.iter().find(|testbed| testbed.id == stand.id);
    let Some(mut testbed) = known.cloned().filter(|_| !proof.is_null()) else { return Ok(()) };
    let changed = testbed.proofs.insert(name, proof.clone()) != Some(proof);
    if changed { journal.testbed(testbed) } else { Ok(()) }
}

/// The name of a placement on an access path.
fn on_path(placement: &str, access: Access) -> String {
    if access.is_librbd() { placement.into() } else { format!("{placement} over {access}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_has_seen_a_flush_of_each_guest_but_of_one_that_never_flushes() {
        let [one, two] = ["img0".to_string(), "img1".to_string()];
        let images = [&one, &two];
        let seen = |flushed: &[&String], guest| {
            let flushed: Vec<String> = flushed.iter().map(|image| image.to_string()).collect();
            mistaken(&images, &flushed, guest)
        };
        assert_eq!(seen(&[&one, &two], Guest::Flushes), None);
        assert_eq!(seen(&[], Guest::NeverFlushes), None);
        let missing = seen(&[&one], Guest::Flushes).expect("one is missing");
        assert!(missing.contains("no flush of img1"), "{missing}");
        let sent = seen(&[&two], Guest::NeverFlushes).expect("one was sent");
        assert!(sent.contains("a flush of img1"), "{sent}");
    }
}
