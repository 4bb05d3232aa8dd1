//! Ceph's cache tier: a pool of its own in front of the images' pool, inside the cluster, on OSDs
//! that have their data on the servers' SSDs.

use std::cell::OnceCell;
use std::fs::File;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use serde_json::{Map, Value, json};

use super::daemon::sum;
use super::{Applied, Ground, Layer, Placement, PlacementError, Slot, Ssd, failed};
use crate::results::Drained;
use tidepool_cluster::ceph::{self, Cluster};
use tidepool_cluster::network::Namespace;

pub(super) static CACHE_TIER: CacheTier = CacheTier;

/// The release of Ceph that first calls cache tiers deprecated. It still has them.
const DEPRECATED: u32 = 18;
/// The tier's pool, and the number of its placement groups.
const POOL: &str = "cache";
const GROUPS: &str = "32";
/// CRUSH rules by which pools choose OSDs, each with the class of these OSDs.
const RULES: [(&str, &str); 2] = [("on-disks", "hdd"), ("on-ssds", "ssd")];
/// Least size of an OSD on an SSD, in bytes.
const OSD_BYTES_MIN: u64 = 512 << 20;
/// Unit of the sizes of the files that are these OSDs' devices, in bytes.
const UNIT_BYTES: u64 = 1 << 20;
/// Part of the OSDs' space that the pool may take, copies included, in percent. The tiering agent
/// is behind at times, and an OSD also keeps a database.
const TARGET_PERCENT: u64 = 70;
/// Size of an image's objects in bytes. A dirty object counts with its whole size.
const OBJECT_BYTES: u64 = 4 << 20;
/// Longest run of one command, in seconds.
const COMMAND_LIMIT_S: u32 = 60;
/// How often a drain reads how much is dirty, and the longest drain with devices that answer at
/// once.
const LOOK: Duration = Duration::from_millis(500);
const HURRIED_LIMIT: Duration = Duration::from_secs(600);
/// The pool's settings that the proof contains.
const TOLD: [&str; 12] = [
    "cache_mode",
    "target_max_bytes",
    "cache_target_dirty_ratio_micro",
    "cache_target_dirty_high_ratio_micro",
    "cache_target_full_ratio_micro",
    "cache_min_flush_age",
    "cache_min_evict_age",
    "hit_set_count",
    "hit_set_period",
    "min_read_recency_for_promote",
    "min_write_recency_for_promote",
    "size",
];
/// Counters of the tier's OSDs. They begin at the OSD's start.
const COUNTERS: [&str; 8] = [
    "op_cache_hit",
    "tier_promote",
    "tier_proxy_read",
    "tier_proxy_write",
    "tier_flush",
    "tier_try_flush",
    "tier_evict",
    "tier_clean",
];

/// A pool on SSDs in front of the images' pool, in write-back, with Ceph's default settings for a
/// tier.
#[derive(Debug)]
pub(super) struct CacheTier;

impl Placement for CacheTier {
    fn name(&self) -> &'static str {
        "cache-tier"
    }

    fn what(&self) -> &'static str {
        "Ceph's cache tier: a pool on OSDs on the SSD in front of that on the disks, in write-back"
    }

    fn layer(&self) -> Layer {
        Layer::Tier
    }

    fn ssd(&self) -> Ssd {
        Ssd::File
    }

    fn caches_reads(&self) -> bool {
        true
    }

    fn apply(&self, ground: &mut Ground) -> Result<Box<dyn Applied>, PlacementError> {
        let first = ground.slots.len();
        // The tier has at least as many OSDs as there are copies. With one server, all of these
        // OSDs are in it.
        let each =
            u64::from(ground.replicas).div_ceil(ground.server_ssds.len().max(1) as u64).max(1);
        let mut bytes = 0;
        for (server, ssd) in ground.server_ssds.iter().enumerate() {
            let of_one = ssd.bytes / each / UNIT_BYTES * UNIT_BYTES;
            if of_one < OSD_BYTES_MIN {
                let what = format!(
                    "an OSD on the SSD has {} MiB; it needs {}",
                    of_one >> 20,
                    OSD_BYTES_MIN >> 20
                );
                return Err(PlacementError::NotInPlace { placement: self.name(), what });
            }
            for number in 0..each {
                let data = ssd.directory.join(format!("tier{number}"));
                let made = File::create(&data).and_then(|file| {
                    Ok(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, of_one)?)
                });
                made.map_err(failed(format!("cannot make {}", data.display())))?;
                bytes += of_one;
                ground.slots.push(Slot {
                    data,
                    journal: None,
                    ssd: None,
                    fast_bytes: 0,
                    rotational: false,
                    server,
                });
            }
        }
        let target_bytes = bytes / u64::from(ground.replicas.max(1)) * TARGET_PERCENT / 100;
        let osds = first as u32..ground.slots.len() as u32;
        if osds.is_empty() {
            let what = "there is no SSD in the servers".into();
            return Err(PlacementError::NotInPlace { placement: self.name(), what });
        }
        Ok(Box::new(Tier {
            osds,
            replicas: ground.replicas,
            target_bytes,
            cluster: OnceCell::new(),
        }))
    }
}

/// A cache tier that is in place.
#[derive(Debug)]
struct Tier {
    /// The numbers of its OSDs.
    osds: Range<u32>,
    replicas: u32,
    target_bytes: u64,
    cluster: OnceCell<Reach>,
}

/// What is needed to send commands to the running cluster.
#[derive(Debug)]
struct Reach {
    conf: PathBuf,
    client: Option<Namespace>,
    /// The admin sockets of the tier's OSDs.
    sockets: Vec<PathBuf>,
}

impl Reach {
    fn ceph(&self, words: &[&str]) -> Result<(), PlacementError> {
        let mut command = Command::new("timeout");
        command.arg(COMMAND_LIMIT_S.to_string()).arg("ceph").arg("-c").arg(&self.conf).args(words);
        command.stdout(Stdio::null());
        self.client.iter().for_each(|client| client.enter(&mut command));
        super::run(&mut command)
    }

    /// Counters, added up over all of the tier's OSDs.
    fn counted(&self) -> Result<Map<String, Value>, PlacementError> {
        let counted = |socket: &PathBuf| {
            let said = ceph::socket::ask(socket, "perf dump")
                .map_err(failed("an OSD of the cache tier does not answer"))?;
            Ok(counters(&said["osd"]))
        };
        let counted =
            self.sockets.iter().map(counted).collect::<Result<Vec<_>, PlacementError>>()?;
        Ok(figures(sum(counted)))
    }

    /// Sets the parts of the pool that may be dirty: above `ratio` the tiering agent writes back,
    /// above `high` it does so faster.
    fn dirty_ratio(&self, ratio: &str, high: &str) -> Result<(), PlacementError> {
        self.ceph(&["osd", "pool", "set", POOL, "cache_target_dirty_ratio", ratio])?;
        self.ceph(&["osd", "pool", "set", POOL, "cache_target_dirty_high_ratio", high])
    }
}

/// The counters of one OSD that concern the tier.
fn counters(osd: &Value) -> Map<String, Value> {
    let names = COUNTERS.into_iter().chain(["tier_dirty"]);
    names.map(|name| (name.into(), json!(osd[name].as_u64().unwrap_or(0)))).collect()
}

/// The tier's counters, with the names that other caches use. The tier counts requests where other
/// caches count blocks. A request that is proxied and whose object is promoted counts as two
/// misses.
fn figures(mut sums: Map<String, Value>) -> Map<String, Value> {
    let of = |name: &str| sums.get(name).and_then(Value::as_u64).unwrap_or(0);
    let missed = of("tier_promote") + of("tier_proxy_read") + of("tier_proxy_write");
    let (hits, dirty) = (of("op_cache_hit"), of("tier_dirty").saturating_sub(of("tier_clean")));
    sums.remove("tier_dirty");
    sums.insert("hit_blocks".into(), json!(hits));
    sums.insert("miss_blocks".into(), json!(missed));
    sums.insert("dirty_bytes".into(), json!(dirty * OBJECT_BYTES));
    sums
}

impl Tier {
    fn reach(&self) -> Result<&Reach, PlacementError> {
        self.cluster.get().ok_or_else(|| self.not("its cluster is not up".into()))
    }

    fn not(&self, what: String) -> PlacementError {
        PlacementError::NotInPlace { placement: CACHE_TIER.name(), what }
    }

    /// The failure domain in the cluster's own rule: copies are on different servers, or on
    /// different OSDs.
    fn domain(&self, cluster: &Cluster) -> Result<String, PlacementError> {
        let said = cluster.ceph(&[
            "osd",
            "crush",
            "rule",
            "dump",
            "replicated_rule",
            "--format",
            "json",
        ])?;
        let rule: Value = serde_json::from_str(&said).map_err(|e| self.not(e.to_string()))?;
        let steps = rule["steps"].as_array().into_iter().flatten();
        let domain = steps.filter_map(|step| step["type"].as_str()).next();
        domain
            .map(String::from)
            .ok_or_else(|| self.not("the cluster's rule chooses nothing".into()))
    }
}

impl Applied for Tier {
    fn attach(&mut self, cluster: &mut Cluster) -> Result<(), PlacementError> {
        let base = cluster.pool().to_string();
        let domain = self.domain(cluster)?;
        let sockets = cluster.osd_sockets();
        for osd in 0..sockets.len() as u32 {
            let (name, (_, class)) =
                (format!("osd.{osd}"), RULES[usize::from(self.osds.contains(&osd))]);
            cluster.ceph(&["osd", "crush", "rm-device-class", &name])?;
            cluster.ceph(&["osd", "crush", "set-device-class", class, &name])?;
        }
        for (rule, class) in RULES {
            cluster.ceph(&[
                "osd",
                "crush",
                "rule",
                "create-replicated",
                rule,
                "default",
                &domain,
                class,
            ])?;
        }
        let [(on_disks, _), (on_ssds, _)] = RULES;
        cluster.ceph(&["osd", "pool", "set", &base, "crush_rule", on_disks])?;
        cluster.ceph(&["osd", "pool", "create", POOL, GROUPS, GROUPS, "replicated", on_ssds])?;
        cluster.ceph(&["osd", "pool", "set", POOL, "pg_autoscale_mode", "off"])?;
        // `add-cache` uses the cluster's defaults for a tier: write-back, hit sets, and limits for
        // dirty data.
        cluster.ceph(&["osd", "tier", "add-cache", &base, POOL, &self.target_bytes.to_string()])?;
        cluster.ceph(&["osd", "tier", "set-overlay", &base, POOL])?;
        cluster.wait_clean()?;
        let of_it = self.osds.start as usize..;
        let sockets = sockets.get(of_it).unwrap_or_default().to_vec();
        let client = cluster.network().map(|network| network.client().namespace().clone());
        let _ = self.cluster.set(Reach { conf: cluster.conf().into(), client, sockets });
        Ok(())
    }

    fn verify(&self, cluster: &Cluster) -> Result<Value, PlacementError> {
        let said = cluster.ceph(&["osd", "pool", "ls", "detail", "--format", "json"])?;
        let pools: Value = serde_json::from_str(&said).map_err(|e| self.not(e.to_string()))?;
        let pool = |name: &str| {
            let mut pools = pools.as_array().into_iter().flatten();
            pools
                .find(|pool| pool["pool_name"] == name)
                .ok_or_else(|| self.not(format!("there is no pool {name}")))
        };
        let (base, tier) = (pool(cluster.pool())?, pool(POOL)?);
        let id = |pool: &Value| pool["pool_id"].as_u64().or_else(|| pool["pool"].as_u64());
        let is_in_front =
            base["read_tier"].as_u64() == id(tier) && base["write_tier"].as_u64() == id(tier);
        if tier["cache_mode"] != "writeback" || !is_in_front || id(tier).is_none() {
            return Err(self.not(format!(
                "the pool {POOL} says cache_mode = {} and is in front: {is_in_front}",
                tier["cache_mode"]
            )));
        }
        if tier["size"].as_u64() != Some(self.replicas.into()) {
            return Err(self.not(format!(
                "the pool {POOL} has {} copies, not {}",
                tier["size"], self.replicas
            )));
        }
        let told = TOLD.iter().filter(|name| !tier[**name].is_null());
        let mut proof: Map<String, Value> =
            told.map(|name| (name.to_string(), tier[*name].clone())).collect();
        proof.insert("osds".into(), json!(self.osds.clone().collect::<Vec<u32>>()));
        if ceph::release().is_some_and(|ceph| ceph >= DEPRECATED) {
            proof.insert("deprecated".into(), json!(true));
        }
        Ok(Value::Object(proof))
    }

    fn counters(&self) -> Result<Value, PlacementError> {
        self.reach()?.counted().map(Value::Object)
    }

    fn drain(
        &self,
        limit_s: f64,
        hurry: &dyn Fn(),
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<Drained>, PlacementError> {
        let reach = self.reach()?;
        let dirty =
            || Ok::<_, PlacementError>(reach.counted()?["dirty_bytes"].as_u64().unwrap_or(0));
        let dirty_bytes = dirty()?;
        if dirty_bytes == 0 {
            hurry();
            return Ok(Some(Drained { dirty_bytes, seconds: 0.0, hurried_bytes: 0 }));
        }
        let begun = Instant::now();
        reach.dirty_ratio("0", "0")?;
        let wait = |limit: Duration, stop: &dyn Fn() -> bool| {
            let begun = Instant::now();
            loop {
                let left = dirty()?;
                if left == 0 || begun.elapsed() >= limit || stop() {
                    return Ok::<_, PlacementError>(left);
                }
                std::thread::sleep(LOOK);
            }
        };
        let hurried_bytes = wait(Duration::from_secs_f64(limit_s.max(0.0)), stop)?;
        let seconds = begun.elapsed().as_secs_f64();
        hurry();
        let left = wait(HURRIED_LIMIT, &|| false)?;
        reach.dirty_ratio("0.4", "0.6")?;
        match left {
            0 => Ok(Some(Drained { dirty_bytes, seconds, hurried_bytes })),
            left => Err(self.not(format!("{} MiB of it are not written back", left >> 20))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_osds_count_is_told_as_other_caches_tell_it() {
        let osd = json!({ "op_cache_hit": 90, "tier_promote": 3, "tier_proxy_read": 4, "tier_dirty": 7, "tier_clean": 5, "op": 1 });
        let other = json!({ "op_cache_hit": 10, "tier_proxy_write": 1 });
        let told = Value::Object(figures(sum([osd, other].iter().map(counters).collect())));
        assert_eq!((&told["hit_blocks"], &told["miss_blocks"]), (&json!(100), &json!(8)), "{told}");
        assert_eq!(
            (&told["dirty_bytes"], &told["tier_promote"]),
            (&json!(8_388_608), &json!(3)),
            "{told}"
        );
        assert!(told["op"].is_null() && told["tier_dirty"].is_null(), "{told}");
    }
}
