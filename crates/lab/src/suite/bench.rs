//! Workloads with `rados bench` as load generator: their valid settings, and the room for their
//! objects.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Caches, DISKS_PERCENT_MAX, Ground, Guest, OSD_ROOM_BYTES, Suite, Workload};
use crate::placement::Arrangement;
use crate::words;
use tidepool_cluster::fio::{Pattern, Sync};

/// Largest object, in bytes: an OSD refuses writes of more than 90 MB (`osd_max_write_size`).
const OBJECT_BYTES_MAX: u64 = 64 << 20;

/// The load generator of a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Tool {
    /// fio, on images.
    #[default]
    Fio,
    /// `rados bench`, on objects of the pool. Each request writes a new object, or reads an object,
    /// completely.
    RadosBench,
}

impl Tool {
    /// Whether it is the default, which a suite need not name.
    pub(super) fn is_default(&self) -> bool {
        *self == Tool::default()
    }

    /// Whether it reports the latency of each request, or a histogram of latencies.
    pub fn tells_percentiles(self) -> bool {
        self == Tool::Fio
    }
}

impl Workload {
    /// Checks a workload of `rados bench`; an error says what is wrong.
    pub(super) fn check_bench(&self) -> Result<(), String> {
        if !matches!(self.rw.as_str(), "write" | "read" | "randread") || self.read_percent.is_some()
        {
            return Err(format!(
                "rados bench has rw write, read (seq) or randread (rand) and no read_percent, not \"{}\"",
                self.rw
            ));
        }
        if self.sync != Sync::None {
            return Err("rados bench has no sync: a write is answered when the OSDs have it".into());
        }
        if self.guest != Guest::default() {
            return Err("rados bench has no guest".into());
        }
        if self.jobs != 1 {
            return Err("rados bench has no jobs: instances side by side are clients".into());
        }
        if self.caches == Caches::Cold {
            return Err(
                "what rados bench reads was written before by itself: its caches are never cold"
                    .into(),
            );
        }
        if self.block_bytes > OBJECT_BYTES_MAX {
            return Err(format!("an object has at most {}", words::bytes(OBJECT_BYTES_MAX)));
        }
        // A run that reads begins with as many objects as there are requests in flight, whether
        // those objects exist or not.
        let most = |axis: &[u32]| u64::from(axis.iter().copied().max().unwrap_or(1));
        let least =
            most(&self.depth).saturating_mul(most(&self.clients)).saturating_mul(self.block_bytes);
        if self.reads() && self.set_bytes < least {
            return Err(format!(
                "set_bytes is at least an object for each request in flight, {}",
                words::bytes(least)
            ));
        }
        Ok(())
    }

    /// Whether the workload reads.
    pub fn reads(&self) -> bool {
        self.pattern().is_some_and(Pattern::reads)
    }

    /// Bytes of all sets of this number of clients. With fio each client has its own set; with
    /// rados bench all clients share the objects.
    pub fn all_sets_bytes(&self, clients: u32) -> u64 {
        match self.tool {
            Tool::Fio => self.set_bytes.saturating_mul(clients.into()),
            Tool::RadosBench => self.set_bytes,
        }
    }
}

impl Suite {
    /// Bytes that objects of `rados bench` may have in all, without copies: what images and the
    /// OSDs' room leave on the disks.
    pub fn objects_bytes_max(&self) -> u64 {
        let Ground { disks, osds_per_disk, disk_bytes, image_bytes, .. } = &self.ground;
        let disks = u64::from(disks.iter().min().copied().unwrap_or(1));
        let osds = disks * u64::from(osds_per_disk.iter().max().copied().unwrap_or(1));
        let bytes = disk_bytes.saturating_mul(disks);
        let usable = (bytes / 100 * DISKS_PERCENT_MAX)
            .min(bytes.saturating_sub(OSD_ROOM_BYTES.saturating_mul(osds)));
        let images = image_bytes.saturating_mul(self.images().into());
        (usable / u64::from(self.ground.replicas_max()).max(1)).saturating_sub(images)
    }

    /// Checks the room for the objects of a workload of `rados bench`, and that no placement is in
    /// front of the cluster.
    pub(super) fn check_objects(
        &self,
        workload: &Workload,
        placements: &[String],
    ) -> Result<(), String> {
        if workload.tool != Tool::RadosBench {
            return Ok(());
        }
        let between =
            |name: &&String| Arrangement::parse(name).is_ok_and(|found| found.front().is_some());
        if let Some(name) = placements.iter().find(between) {
            return Err(format!(
                "rados bench has no images, and goes past {name}: name placements without it"
            ));
        }
        let most = |axis: &[u32]| u64::from(axis.iter().copied().max().unwrap_or(1));
        let written = most(&workload.depth)
            .saturating_mul(most(&workload.clients))
            .saturating_mul(if workload.writes() { workload.block_bytes } else { 0 });
        let room = self.objects_bytes_max();
        if workload.set_bytes.saturating_add(written) > room {
            return Err(format!(
                "its objects have at most {}: {DISKS_PERCENT_MAX} % of the disks, of which each OSD needs {}, with {} copies",
                words::bytes(room),
                words::bytes(OSD_ROOM_BYTES),
                self.ground.replicas_max()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: &str = include_str!("../suites/rados-bench.toml");

    #[test]
    fn what_rados_bench_cannot_do_is_told_in_one_line() {
        // All of this is in the first workload, which writes.
        for (from, to, wanted) in [
            ("rw = \"write\"", "rw = \"randwrite\"", "write, read (seq) or randread (rand)"),
            ("rw = \"write\"", "rw = \"randrw\"\nread_percent = 70", "no read_percent"),
            ("rw = \"write\"", "rw = \"write\"\nread_percent = 70", "no read_percent"),
            ("rw = \"write\"", "rw = \"write\"\nsync = \"dsync\"", "has no sync"),
            ("rw = \"write\"", "rw = \"write\"\nguest = \"never_flushes\"", "has no guest"),
            ("rw = \"write\"", "rw = \"write\"\njobs = 2", "has no jobs"),
            ("caches = \"warm\"", "caches = \"cold\"", "never cold"),
            ("block_bytes = 4194304", "block_bytes = 134217728", "at most 64 MiB"),
            ("set_bytes = 0", "set_bytes = 1000000000000", "its objects have at most"),
            ("tool = \"rados-bench\"", "tool = \"iometer\"", "line "),
            ("tool = \"rados-bench\"\n", "", "set_bytes is at least one block"),
            (
                "\"osd-tidepool\",\n",
                "\"osd-tidepool\",\n    \"host-tidepool\",\n",
                "goes past host-tidepool",
            ),
            ("metric = \"mean\"", "metric = \"p99\"", "rados bench tells no percentiles"),
        ] {
            assert!(SUITE.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &SUITE.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        let suite = Suite::parse("s.toml", SUITE).expect("a suite");
        let read =
            suite.workloads.iter().find(|workload| workload.reads()).expect("one that reads");
        let few = Workload { set_bytes: 15 * read.block_bytes, depth: vec![16], ..read.clone() };
        let error = few.check_bench().expect_err("sixteen in flight");
        assert!(error.contains("for each request in flight, 64 MiB"), "{error}");
    }

    #[test]
    fn a_suite_that_names_no_tool_is_what_it_was() {
        let suite = Suite::find("micron").expect("built in");
        assert!(suite.workloads.iter().all(|workload| workload.tool == Tool::Fio));
        let text = serde_json::to_string(&suite).expect("plain data");
        assert!(!text.contains("\"tool\""), "its SHA-256 would be another one");
    }

    #[test]
    fn only_workloads_with_images_have_images_and_objects_have_what_they_leave() {
        let bench = Suite::parse("s.toml", SUITE).expect("a suite");
        let ground = &bench.ground;
        let disks = ground.disk_bytes * u64::from(ground.disks[0]);
        assert_eq!(bench.images(), 0);
        assert!(
            bench.objects_bytes_max() * u64::from(ground.replicas)
                <= disks / 100 * DISKS_PERCENT_MAX
        );
        let mut both = bench.clone();
        let images =
            Workload { tool: Tool::Fio, clients: vec![1, 3], ..bench.workloads[0].clone() };
        both.workloads.push(images);
        assert_eq!(both.images(), 3);
        assert_eq!(bench.objects_bytes_max() - both.objects_bytes_max(), 3 * ground.image_bytes);
        let write = &bench.workloads[0];
        assert_eq!((write.all_sets_bytes(4), write.reads()), (write.set_bytes, false));
        let fio = Suite::find("micron").expect("built in").workloads[1].clone();
        assert_eq!((fio.all_sets_bytes(4), fio.reads()), (4 * fio.set_bytes, true));
    }
}
