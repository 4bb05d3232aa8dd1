//! Whether a suite makes sense. An error says in one line what is wrong.

use std::collections::BTreeSet;

use super::{CELLS_MAX, CLIENTS_MAX, Caches, Ground, Guest, Suite, Tool, Workload};
use crate::access::Access;
use crate::placement::{Arrangement, Layer};
use crate::testbed::HOSTS_MAX;
use crate::words;
use tidepool_cluster::ceph::OSDS_MAX;
use tidepool_cluster::device::preset;
use tidepool_cluster::fio::Sync;

/// Longest measurement, in seconds.
const SECONDS_MAX: u32 = 7 * 24 * 3600;
/// Most repeats of a measurement.
const REPEATS_MAX: u32 = 1_000;
/// Largest factor by which devices are slowed.
const SLOWED_BY_MAX: u32 = 1_000;
/// Longest delay of a packet, in microseconds.
const DELAY_US_MAX: u32 = 1_000_000;
/// Limits of the size of a device or an image, in bytes.
const SIZE_BYTES_MIN: u64 = 64 << 20;
const SIZE_BYTES_MAX: u64 = 16 << 40;
/// Most requests in flight of one client.
const DEPTH_MAX: u32 = 1_024;
/// Beginning of the names of device classes that are as fast as Ceph's code, or faster.
const NVME: &str = "nvme";

impl Suite {
    /// Checks the suite; an error says what is wrong.
    pub(super) fn check(&self) -> Result<(), String> {
        self.check_numbers_and_names()?;
        self.ground.check()?;
        unique("placement", &self.placements)?;
        unique("workload", self.workloads.iter().map(|workload| &workload.name))?;
        self.check_placements()?;
        for found in &self.workloads {
            self.check_workload(found)
                .map_err(|what| format!("the workload {}: {what}", found.name))?;
        }
        self.check_cells()?;
        self.check_setups()?;
        self.check_sizes()?;
        self.check_beside()?;
        self.check_room()?;
        self.check_events()?;
        for direction in &self.directions {
            let named = |what: String| format!("the direction \"{}\": {what}", direction.claim);
            direction.check(self).map_err(named)?;
        }
        Ok(())
    }

    /// Checks how often and how long the suite measures, and what it names of its own parts.
    fn check_numbers_and_names(&self) -> Result<(), String> {
        let workload = |name: &str| self.workloads.iter().any(|workload| workload.name == name);
        let placement = |name: &String| self.placements.contains(name);
        if self.repeats == 0 || self.seconds == 0 {
            return Err("repeats and seconds are at least 1".into());
        }
        if self.repeats_max.is_some_and(|most| !(self.repeats..=REPEATS_MAX).contains(&most)) {
            return Err(format!("repeats_max is at least repeats and at most {REPEATS_MAX}"));
        }
        if self.repeats_beside.is_some_and(|beside| !(1..=self.repeats).contains(&beside)) {
            return Err("repeats_beside is at least 1 and at most repeats".into());
        }
        if !placement(&self.baseline) {
            return Err(format!("the baseline {} is none of its placements", self.baseline));
        }
        if !workload(&self.deciding) {
            return Err(format!(
                "the deciding workload {} is none of its workloads",
                self.deciding
            ));
        }
        if self.seconds > SECONDS_MAX || self.ramp_s > SECONDS_MAX || self.repeats > REPEATS_MAX {
            return Err(format!("at most {SECONDS_MAX} seconds and {REPEATS_MAX} repeats"));
        }
        if self.quick.as_ref().is_some_and(|quick| quick.smaller == 0) {
            return Err("the quick form is at least 1 times smaller".into());
        }
        let mut left_out =
            self.without.iter().chain(self.quick.iter().flat_map(|quick| &quick.without));
        let needed = |name: &String| *name == self.baseline || *name == self.deciding;
        if let Some(wrong) =
            left_out.find(|name| needed(name) || !placement(name) && !workload(name))
        {
            return Err(format!(
                "it cannot be without {wrong}: that decides, or is none of its placements and workloads"
            ));
        }
        Ok(())
    }

    /// Checks that each placement is known and can stand on the ground.
    fn check_placements(&self) -> Result<(), String> {
        for placement in &self.placements {
            let arrangement = Arrangement::parse(placement)?;
            if arrangement.in_guests() && self.ground.servers == 0 {
                return Err(format!(
                    "{placement}: its OSDs are in guests, which need a network: servers is at least 1"
                ));
            }
            arrangement.ssd.map_or(Ok(()), |ssd| class(&ssd))?;
        }
        Ok(())
    }

    /// Checks a workload, by itself and on its placements.
    fn check_workload(&self, found: &Workload) -> Result<(), String> {
        found.check(&self.ground)?;
        let placements =
            if found.placements.is_empty() { &self.placements } else { &found.placements };
        let below = placements.iter().find(|placement| {
            let arrangement = Arrangement::parse(placement);
            arrangement.is_ok_and(|found| {
                found.within(&[Layer::Device, Layer::Tier]).any(|p| p.caches_reads())
            })
        });
        if let Some(below) = below.filter(|_| found.caches == Caches::Cold) {
            return Err(format!("the cache of {below} is never cold"));
        }
        let in_memory = placements
            .iter()
            .find(|name| Arrangement::parse(name).is_ok_and(|found| found.caches_in_memory()));
        let always_flushed = found.guest == Guest::NeverFlushes && found.access == Access::Librbd;
        if let Some(name) = in_memory.filter(|_| always_flushed) {
            return Err(format!(
                "{name} always sees a flush over librbd, which fio sends when it opens an image; a client in a guest sends none (access = \"guest\")"
            ));
        }
        let has_librbd = matches!(found.access, Access::Librbd | Access::Guest);
        if let Some(name) = in_memory.filter(|_| !has_librbd) {
            return Err(format!(
                "{name} is a cache of who has librbd itself, not over {}; leave it out of the workload's placements",
                found.access
            ));
        }
        if let Some(unknown) = found.placements.iter().find(|name| !self.placements.contains(name))
        {
            return Err(format!("{unknown} is none of the placements"));
        }
        self.check_objects(found, placements)?;
        let most = found.clients.iter().copied().max().unwrap_or(1);
        if placements.iter().any(|name| name == words::HOST_BOUND) && !self.ground.fits(found, most)
        {
            return Err(format!(
                "{} has whole sets on the SSD, which does not hold those of {most} clients; leave it out of the workload's placements",
                words::HOST_BOUND
            ));
        }
        Ok(())
    }

    /// Checks that the suite has not too many cells.
    fn check_cells(&self) -> Result<(), String> {
        let grounds =
            self.ground.disks.len() * self.ground.osds_per_disk.len() * self.placements.len();
        let loads: usize =
            self.workloads.iter().map(|found| found.depth.len() * found.clients.len()).sum();
        let points = 1 + self.ground.replicas_beside.len() + self.ground.neighbours_beside.len();
        if grounds.saturating_mul(loads).saturating_mul(points) > CELLS_MAX {
            return Err(format!("it measures more than {CELLS_MAX} things: take fewer numbers"));
        }
        Ok(())
    }
}

impl Ground {
    /// Checks the numbers of the ground and its classes of devices.
    fn check(&self) -> Result<(), String> {
        let axes = [&self.disks, &self.osds_per_disk];
        if axes.iter().any(|axis| axis.is_empty() || axis.contains(&0)) {
            return Err("disks and osds_per_disk are lists of numbers above 0".into());
        }
        let most = |axis: &[u32]| axis.iter().copied().max().map_or(0, u64::from);
        let least = |axis: &[u32]| axis.iter().copied().min().map_or(0, u64::from);
        if most(&self.disks) * most(&self.osds_per_disk) > u64::from(OSDS_MAX) {
            return Err(format!("a cluster has at most {OSDS_MAX} OSDs"));
        }
        if [self.osds_per_processor_max, self.clients_per_processor_max].contains(&Some(0)) {
            return Err(
                "osds_per_processor_max and clients_per_processor_max are at least 1".into()
            );
        }
        if u64::from(self.servers) > least(&self.disks) {
            return Err("there are no more servers than disks".into());
        }
        if !(1..=HOSTS_MAX).contains(&self.hypervisors) {
            return Err(format!("there are 1 to {HOSTS_MAX} hypervisors"));
        }
        if self.second_slowed_by.is_some_and(|factor| {
            factor == self.slowed_by || !(1..=SLOWED_BY_MAX).contains(&factor)
        }) {
            return Err(format!(
                "second_slowed_by is 1 to {SLOWED_BY_MAX} and another factor than slowed_by"
            ));
        }
        if !(1..=SLOWED_BY_MAX).contains(&self.slowed_by) || self.delay_us > DELAY_US_MAX {
            return Err(format!(
                "slowed_by is 1 to {SLOWED_BY_MAX}, delay_us at most {DELAY_US_MAX}"
            ));
        }
        let sizes = [self.disk_bytes, self.ssd_bytes, self.image_bytes];
        if sizes.iter().any(|bytes| !(SIZE_BYTES_MIN..=SIZE_BYTES_MAX).contains(bytes)) {
            return Err("disks, SSD and images have 64 MiB to 16 TiB".into());
        }
        if self
            .ceph_conf
            .iter()
            .any(|line| line.contains('\n') || line.trim_start().starts_with('['))
        {
            return Err("ceph_conf has lines of the global section only".into());
        }
        if self.disk.starts_with(NVME) && (self.slowed_by != 1 || self.second_slowed_by.is_some()) {
            return Err("OSDs on NVMe are never slowed (slowed_by = 1, without second_slowed_by): there Ceph's own code takes the time, which stays as fast as it is".into());
        }
        class(&self.disk)?;
        class(&self.ssd)
    }
}

impl Workload {
    /// Checks what the workload says of itself.
    fn check(&self, ground: &Ground) -> Result<(), String> {
        if self.tool == Tool::RadosBench {
            self.check_bench()?;
        }
        self.pattern().ok_or_else(|| {
            format!("\"{}\" is nothing that fio does, or lacks read_percent", self.rw)
        })?;
        if self.block_bytes == 0 || !self.block_bytes.is_multiple_of(512) {
            return Err("block_bytes is a multiple of 512".into());
        }
        let fits_image = self.set_bytes / u64::from(self.jobs.max(1)) >= self.block_bytes
            && self.set_bytes <= ground.image_bytes;
        if self.tool == Tool::Fio && !fits_image {
            return Err("set_bytes is at least one block for each job and at most the image".into());
        }
        if self.sync == Sync::Dsync {
            return Err(
                "fio opens no image with O_DSYNC: write sync = \"flush\", a flush after each write"
                    .into(),
            );
        }
        if self.guest == Guest::NeverFlushes && self.sync != Sync::None {
            return Err("a guest that never flushes has no sync".into());
        }
        let axes = [
            (&self.depth, DEPTH_MAX),
            (&self.clients, CLIENTS_MAX),
            (&vec![self.jobs], CLIENTS_MAX),
        ];
        if axes
            .iter()
            .any(|(axis, most)| axis.is_empty() || axis.iter().any(|n| !(1..=*most).contains(n)))
        {
            return Err(format!(
                "depth is 1 to {DEPTH_MAX}, clients and jobs are 1 to {CLIENTS_MAX}"
            ));
        }
        Ok(())
    }
}

/// Fails if there is no class of devices with this name.
fn class(name: &str) -> Result<(), String> {
    let names =
        || preset::all().into_iter().map(|preset| preset.spec.name).collect::<Vec<_>>().join(", ");
    preset::find(name)
        .map(drop)
        .ok_or_else(|| format!("no class {name} of devices; there are {}", names()))
}

/// Fails if a name occurs twice.
pub(super) fn unique<'a>(
    what: &str,
    names: impl IntoIterator<Item = &'a String>,
) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    let again = names.into_iter().find(|name| !seen.insert(*name));
    again.map_or(Ok(()), |name| Err(format!("the {what} {name} is named twice")))
}

#[cfg(test)]
mod tests {
    use crate::suite::{BUILT_IN, Suite};

    #[test]
    fn a_direction_that_cannot_be_tested_is_told_in_one_line() {
        let good = Suite::find("micron")
            .map(|_| include_str!("../suites/micron.toml"))
            .expect("it is built in");
        let axis = "axis = { along = \"depth\", trend = \"falls\" }";
        for (from, to, wanted) in [
            (
                axis,
                "axis = { along = \"clients\", trend = \"falls\" }",
                "has one point of the axis clients",
            ),
            (
                axis,
                "axis = { along = \"osds\", plateau_beyond = 4 }",
                "has one point of the axis OSDs",
            ),
            (axis, "axis = { along = \"weather\", trend = \"falls\" }", "line "),
            (axis, "axis = { along = \"depth\" }", "either trend or plateau_beyond"),
            (
                axis,
                "axis = { along = \"depth\", trend = \"rises\", plateau_beyond = 4 }",
                "either trend or",
            ),
            (axis, "axis = { along = \"depth\", plateau_beyond = 0 }", "at least 1"),
            (axis, "", "either expect or axis"),
            (
                axis,
                "axis = { along = \"depth\", trend = \"falls\" }\nexpect = \"more\"",
                "either expect or",
            ),
            ("against = \"bluestore-colocated+alloc-16k\"\nexpect", "expect", "needs against"),
            ("ratio = 1.71", "ratio = 0", "above 0"),
            ("metric = \"p99\"", "metric = \"p98\"", "line "),
            (
                "placement = \"bluestore-dbwal+alloc-16k\"\n",
                "placement = \"osd-tidepool\"\n",
                "does not have",
            ),
            (
                "placement = \"bluestore-dbwal+alloc-16k\"\nagainst = \"bluestore-colocated+alloc-16k\"\nmetric = \"bandwidth\"",
                "placement = \"host-tidepool+alloc-16k\"\nagainst = \"bluestore-colocated+alloc-16k\"\nmetric = \"bandwidth\"",
                "host-tidepool+alloc-16k is not measured in 4m-write",
            ),
        ] {
            assert!(good.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        // The quick form keeps one depth. That is no error of the suite: the verdict reports it.
        assert_eq!(Suite::parse("s.toml", good).expect("a suite").quick().directions.len(), 8);
        let uneven =
            good.replacen(axis, "axis = { along = \"osds_per_node\", plateau_beyond = 4 }", 1);
        let uneven = uneven.replacen("disks = [2]", "disks = [2, 3]", 1);
        let error = Suite::parse("s.toml", &uneven).expect_err("two servers").to_string();
        assert!(error.contains("as many disks each"), "{error}");
    }

    #[test]
    fn what_makes_no_sense_is_told_in_one_line() {
        let good = BUILT_IN[0].1;
        for (from, to, wanted) in [
            ("baseline = \"bluestore-colocated\"", "baseline = \"nothing\"", "baseline nothing"),
            ("rw = \"randwrite\"", "rw = \"randwritten\"", "nothing that fio does"),
            ("repeats = ", "repeated = ", "line "),
            ("deciding = \"4k-80-20\"", "deciding = \"x\"", "workload x"),
            ("replicas = 2", "replicas = 3", "replicas"),
            ("hypervisors = 2", "hypervisors = 3", "1 to 2 hypervisors"),
            ("disks = [2]", "disks = []", "disks"),
            ("image_bytes = 4294967296", "image_bytes = 17179869184", "at most 60 %"),
            ("disk_bytes = 68719476736", "disk_bytes = 34359738368", "in its quick form: 3 images"),
            ("osds_per_disk = [1]", "osds_per_disk = [4000000000]", "at most 16"),
            ("smaller = 8", "smaller = 0", "at least 1"),
            ("\nslowed_by = 4", "\nslowed_by = 0", "slowed_by"),
            ("second_slowed_by = 8", "second_slowed_by = 4", "another factor"),
            ("repeats_max = 8", "repeats_max = 2", "repeats_max is at least repeats"),
            ("ssd = \"ssd-sata-plp\"", "ssd = \"floppy\"", "no class floppy"),
            ("disk = \"hdd-7200\"", "disk = \"nvme\"", "OSDs on NVMe are never slowed"),
            ("\"osd-passthrough\"", "\"osd-magic\"", "no placement osd-magic"),
            ("depth = [1, 4, 16, 32]", "depth = [0]", "depth"),
            ("name = \"4k-randwrite\"", "name = \"4k-80-20\"", "twice"),
            (
                "guest = \"never_flushes\"",
                "guest = \"never_flushes\"\nsync = \"flush\"",
                "has no sync",
            ),
            ("sync = \"flush\"", "sync = \"dsync\"", "no image with O_DSYNC"),
            ("guest = \"never_flushes\"", "guest = \"sleeps\"", "line "),
            ("caches = \"warm\"", "caches = \"warm\"\naccess = \"fibre-channel\"", "line "),
            (
                "    \"host-tidepool-replicated\",\n]\n\n[[dir",
                "    \"librbd-cache\",\n]\n\n[[dir",
                "always sees a flush",
            ),
            ("without = [", "without = [\"bluestore-colocated\", ", "without bluestore-colocated"),
            ("without = [", "without = [\"nothing\", ", "without nothing"),
            ("without = [", "without = [\"4k-80-20\", ", "without 4k-80-20"),
            ("repeats_beside = 2", "repeats_beside = 9", "in its quick form: repeats_beside"),
        ] {
            assert!(good.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        let guests = include_str!("../suites/bcache.toml");
        let alone = guests.replacen("servers = 1", "servers = 0", 1).replacen(
            "delay_us = 50",
            "delay_us = 0",
            1,
        );
        let error = Suite::parse("s.toml", &alone).expect_err("no network").to_string();
        assert!(error.contains("OSDs are in guests, which need a network"), "{error}");
        assert!(Suite::find("nothing").is_err());
        assert!(Suite::find("/nonexistent/s.toml").is_err());
    }
}
