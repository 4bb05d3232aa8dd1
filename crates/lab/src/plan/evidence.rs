//! Measurements of the places of a plan: ratios from results of the lab, from runs whose conditions
//! match the inventory.

use serde::Serialize;

use super::inventory::{Inventory, Kind, Store};
use super::rules::{Advice, MEASURED};
use super::verdict::{Effect, HostCopies, Key, Placement, Verdict, host_copies, store};
use crate::results::Results;
use crate::stats::{Finding, Metric, Ratio, Setting, paired, settings};
use crate::suite::{Caches, Tool, Workload};
use crate::words;
use tidepool_cluster::device::{Media, Spec, preset};
use tidepool_cluster::fio::Pattern;

/// Shares of reads that differ by at most this number of percentage points count as one mix.
const MIX_PERCENT: u64 = 10;
/// Queue depths that differ by at most this factor count as one queue depth.
const DEPTH_FACTOR: u64 = 2;

/// Results of the lab, with the name of their file.
#[derive(Debug, Clone, PartialEq)]
pub struct Evidence {
    /// Name of the file, as it is cited.
    pub file: String,
    /// The results in the file.
    pub results: Results,
}

/// A measurement of a place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Measured {
    /// Name of the file with the results.
    pub file: String,
    /// The placement, as its suite names it.
    pub placement: String,
    /// The placement without the SSD that `placement` is compared with.
    pub against: String,
    /// Ratio of the requests per second: `placement` to `against`.
    pub iops: Ratio,
    /// Conditions of the measurement, in words.
    pub conditions: String,
}

/// Adds the matching measurements to the verdicts, and lets them decide where no publication does.
/// Returns the files in which no measurement matches.
pub(super) fn apply(
    evidence: &[Evidence],
    inventory: &Inventory,
    key: &Key,
    verdicts: &mut [Verdict],
) -> Vec<String> {
    let mut unmatched: Vec<String> = Vec::new();
    for Evidence { file, results } in evidence {
        let mut found = false;
        for verdict in verdicts.iter_mut() {
            let measured = of_place(results, file, inventory, key, verdict);
            found |= !measured.is_empty();
            verdict.measured.extend(measured);
        }
        if !found {
            unmatched.push(file.clone());
        }
    }
    verdicts.iter_mut().for_each(decide);
    unmatched
}

/// Formats of the OSDs of today, named in the placement or not. Results with other formats match no
/// inventory, because an inventory does not give the format.
const FORMATS: [&str; 2] = ["", "+alloc-4k"];

/// The measurements of the place of a verdict in these results.
fn of_place(
    results: &Results,
    file: &str,
    inventory: &Inventory,
    key: &Key,
    verdict: &Verdict,
) -> Vec<Measured> {
    let suite = &results.suite;
    let media = verdict.media.or(key.media.first().copied());
    let (Some(placement), Some(media)) = (measured_as(verdict.placement, inventory), media) else {
        return Vec::new();
    };
    let against = match store(inventory) {
        Store::Bluestore => "bluestore-colocated",
        Store::Filestore => "filestore-colocated",
    };
    // Results of slowed devices do not stand for NVMe: beside slowed devices the time of Ceph
    // itself would look small.
    if class(results, &suite.ground.disk) != Some(media)
        || (media == Kind::Nvme && suite.ground.slowed_by > 1)
    {
        return Vec::new();
    }
    // An inventory gives no neighbours of the clients, so results with neighbours match none.
    if suite.ground.neighbours.is_some() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for workload in suite.workloads.iter().filter(|workload| is_alike(workload, key)) {
        let mut settings = settings(results, &workload.name);
        settings.retain(|setting| {
            key.queue_depth.is_none_or(|depth| is_near(u64::from(setting.depth), depth))
        });
        for format in FORMATS {
            let [placement, against] = [placement, against].map(|name| format!("{name}{format}"));
            let iops = paired(results, &placement, &against, &settings, Metric::Iops);
            if let Some(ratio) = iops.ratio {
                let conditions = conditions(results, workload, &settings, ratio.count);
                found.push(Measured {
                    file: file.to_string(),
                    placement,
                    against,
                    conditions,
                    iops,
                });
            }
        }
    }
    found
}

/// Name of the placement by which the lab measures a place. `None` where the lab measures none that
/// keeps writes in this way, and where the place belongs to another store.
fn measured_as(placement: Placement, inventory: &Inventory) -> Option<&'static str> {
    match (placement, host_copies(inventory), store(inventory)) {
        (Placement::Host, HostCopies::Two, _) => Some("host-tidepool-replicated"),
        (Placement::Host, HostCopies::One(_), _) => Some("host-tidepool"),
        (Placement::DbWal, _, Store::Bluestore) => Some("bluestore-dbwal"),
        (Placement::Journal, _, Store::Filestore) => Some("filestore-journal"),
        (Placement::OsdCache, _, _) => Some("osd-tidepool"),
        _ => None,
    }
}

/// Kind of the drives of a device class, as the results describe the class, or else its preset.
fn class(results: &Results, name: &str) -> Option<Kind> {
    let frozen = results.devices.iter().map(|frozen| &frozen.spec).find(|spec| spec.name == name);
    let kind = |spec: &Spec| match spec.media {
        Media::Disk(_) => Kind::Hdd,
        Media::Flash(_) if spec.name.contains(Kind::Nvme.name()) => Kind::Nvme,
        Media::Flash(_) => Kind::Ssd,
    };
    frozen.map(kind).or_else(|| preset::find(name).map(|preset| kind(&preset.spec)))
}

/// The workload has the block size, the mix and the access path of the inventory. Requests for
/// whole objects of a pool differ from the requests of a guest to its image.
fn is_alike(workload: &Workload, key: &Key) -> bool {
    let reads = match workload.pattern() {
        Some(Pattern::Read | Pattern::RandRead) => 100,
        Some(Pattern::Write | Pattern::RandWrite) => 0,
        Some(Pattern::RandMixed(reads)) => u64::from(reads),
        None => return false,
    };
    // A load of reads alone matches only a load of reads alone; likewise for writes alone.
    let is_one = |wanted: u64| {
        let alone = |percent| (wanted == percent) == (reads == percent);
        wanted.abs_diff(reads) <= MIX_PERCENT && alone(0) && alone(100)
    };
    // No inventory has a gateway between hypervisors and OSDs.
    let direct = workload.tool == Tool::Fio && workload.access.is_librbd();
    direct && key.block_bytes == Some(workload.block_bytes) && key.read_percent.is_some_and(is_one)
}

fn is_near(depth: u64, wanted: u64) -> bool {
    depth <= wanted.saturating_mul(DEPTH_FACTOR) && wanted <= depth.saturating_mul(DEPTH_FACTOR)
}

/// The conditions of a ratio, in words.
fn conditions(
    results: &Results,
    workload: &Workload,
    settings: &[Setting],
    repeats: usize,
) -> String {
    let ground = &results.suite.ground;
    let numbers = |of: fn(&Setting) -> u32| {
        let mut numbers: Vec<u32> = settings.iter().map(of).collect();
        numbers.sort_unstable();
        numbers.dedup();
        words::list(&numbers)
    };
    let caches = match workload.caches {
        Caches::Cold => "cold",
        Caches::Warm => "warm",
    };
    let devices = match (results.devices.is_empty(), ground.slowed_by) {
        (true, _) => "real devices".into(),
        (false, 1) => "emulated devices".into(),
        (false, slowed) => format!("emulated devices, slowed by {slowed}"),
    };
    let mut parts = vec![
        format!("{}, {caches} caches", workload.title),
        format!("queue depth {}", numbers(|setting| setting.depth)),
        format!("clients {}", numbers(|setting| setting.clients)),
        format!("disks {} ({}), SSD {}", numbers(|setting| setting.disks), ground.disk, ground.ssd),
        devices,
        format!("copies {}", ground.replicas),
        words::count(repeats, "repeat"),
    ];
    if results.quick {
        parts.push("quick form".into());
    }
    parts.join("; ")
}

/// Lets a measurement decide where no publication does. Where a measurement and a publication
/// disagree, the verdict says so.
fn decide(verdict: &mut Verdict) {
    let findings = || verdict.measured.iter().map(|measured| measured.iops.finding);
    let all = |finding| findings().next().is_some() && findings().all(|found| found == finding);
    let measured = if all(Finding::More) {
        Effect::Helps
    } else if all(Finding::Less) || all(Finding::Same) {
        Effect::Little
    } else {
        return;
    };
    let helps = |effect| matches!(effect, Effect::Helps | Effect::ReadsOnly | Effect::WritesOnly);
    // A cache on the host that is advised against, but was measured, is in front of NVMe, for which
    // nothing was published.
    let unpublished = verdict.effect == Effect::NotKnown
        || (verdict.placement == Placement::Host && verdict.effect == Effect::No);
    if unpublished {
        let text =
            if helps(measured) { "measured: it helps" } else { "measured: it does not help" };
        verdict.effect = measured;
        verdict.advice.insert(0, Advice::new(text, &[MEASURED]));
    } else if helps(verdict.effect) != helps(measured) {
        let text = "the measurement disagrees: what it holds for stands beside it";
        verdict.advice.push(Advice::new(text, &[MEASURED]));
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan;
    use super::super::tests::inventory;
    use super::*;
    use crate::plan::Plan;
    use crate::synthetic;

    /// The text of an inventory: two hypervisors and a server with OSDs. Its workload is like the
    /// lab's mix at queue depth 16.
    fn text(media: &str, workload: &str) -> String {
        format!(
            "[workload]\nblock-size = \"4KiB\"\nread-percent = 80\nqueue-depth = 16\n{workload}\n\
             [[host]]\nname = \"a\"\nrole = \"hypervisor\"\n[[host]]\nname = \"b\"\nrole = \"hypervisor\"\n\
             [[host]]\nname = \"c\"\nrole = \"osd\"\n[[host.drive]]\nkind = \"{media}\"\nsize = \"4TB\"\nuse = \"osd\"\n"
        )
    }

    fn evidence(change: impl Fn(&mut Results)) -> [Evidence; 1] {
        let mut results = synthetic::results(&[
            ("bluestore-colocated", &[100.0, 101.0, 99.0]),
            ("bluestore-dbwal", &[210.0, 205.0, 195.0]),
            ("filestore-journal", &[150.0, 160.0, 155.0]),
            ("host-tidepool-replicated", &[300.0, 310.0, 290.0]),
        ]);
        change(&mut results);
        [Evidence { file: "mine.json".into(), results }]
    }

    fn of(text: &str, change: impl Fn(&mut Results)) -> Plan {
        plan(&inventory(text), &evidence(change))
    }

    /// The placements that the plan cites.
    fn cited(plan: &Plan) -> Vec<&str> {
        plan.verdicts
            .iter()
            .flat_map(|verdict| &verdict.measured)
            .map(|found| found.placement.as_str())
            .collect()
    }

    #[test]
    fn a_measurement_of_the_same_load_is_cited_with_interval_conditions_and_file() {
        let plan = of(&text("hdd", ""), |_| ());
        assert_eq!(cited(&plan), ["host-tidepool-replicated", "bluestore-dbwal"]);
        assert_eq!(plan.unmatched, Vec::<String>::new());
        let host = &plan.verdicts[0].measured[0];
        let shown = host.iops.to_string();
        assert!(shown.starts_with("3.00 × (2.") && shown.ends_with(')'), "{shown}");
        assert_eq!(
            (host.file.as_str(), host.against.as_str()),
            ("mine.json", "bluestore-colocated")
        );
        for part in [
            "80 % reads",
            "warm caches",
            "queue depth 16;",
            "hdd-7200",
            "slowed by 4",
            "copies 1",
            "3 repeats",
        ] {
            assert!(host.conditions.contains(part), "{part}: {}", host.conditions);
        }
    }

    #[test]
    fn osds_that_were_made_as_today_are_cited_and_others_are_not() {
        for (unit, wanted) in
            [("alloc-4k", vec!["bluestore-dbwal+alloc-4k"]), ("alloc-16k", vec![])]
        {
            let plan = of(&text("hdd", ""), |results| {
                for run in &mut results.runs {
                    run.cell.placement = format!("{}+{unit}", run.cell.placement);
                }
                results.suite.placements =
                    results.runs.iter().map(|run| run.cell.placement.clone()).collect();
            });
            let databases = plan.verdicts.iter().flat_map(|verdict| &verdict.measured);
            let found: Vec<&str> = databases.map(|found| found.placement.as_str()).collect();
            let found: Vec<&str> =
                found.into_iter().filter(|name| name.contains("dbwal")).collect();
            assert_eq!(found, wanted, "{unit}");
        }
    }

    #[test]
    fn what_was_measured_under_other_conditions_is_not_cited() {
        for (from, to) in [
            ("4KiB", "8KiB"),
            ("read-percent = 80", "read-percent = 60"),
            ("read-percent = 80", "read-percent = 100"),
            ("queue-depth = 16", "queue-depth = 1"),
            ("kind = \"hdd\"", "kind = \"ssd\""),
        ] {
            let plan = of(&text("hdd", "").replace(from, to), |_| ());
            assert_eq!(cited(&plan), Vec::<&str>::new(), "{to}");
            assert_eq!(plan.unmatched, ["mine.json"], "{to}");
        }
        // With a loss accepted the cache has one copy, which is another placement.
        assert_eq!(cited(&of(&text("hdd", "accept-loss = \"5s\""), |_| ())), ["bluestore-dbwal"]);
        let invalid = of(&text("hdd", ""), |results| {
            results.runs.iter_mut().for_each(|run| run.invalid.push("an OSD was down".into()));
        });
        assert_eq!(cited(&invalid), Vec::<&str>::new());
    }

    #[test]
    fn in_front_of_nvme_only_a_measurement_speaks_for_a_cache_on_the_host() {
        let on_nvme = |slowed_by: u32| {
            move |results: &mut Results| {
                results.suite.ground.disk = "nvme".into();
                results.suite.ground.slowed_by = slowed_by;
            }
        };
        let host = |plan: &Plan| (plan.verdicts[0].effect, plan.first);
        let text = text("nvme", "");
        assert_eq!(host(&plan(&inventory(&text), &[])), (Effect::No, None));
        assert_eq!(host(&of(&text, on_nvme(8))), (Effect::No, None), "slowed");
        let found = of(&text, on_nvme(1));
        assert_eq!(host(&found), (Effect::Helps, Some(Placement::Host)));
        assert!(found.cites("measured"), "{:?}", found.verdicts[0]);
    }

    #[test]
    fn a_measurement_that_disagrees_with_a_publication_is_told_and_decides_nothing() {
        let plan = of(&text("hdd", ""), |results| {
            for run in results.runs.iter_mut().filter(|run| run.cell.placement == "bluestore-dbwal")
            {
                run.figures.iops /= 6.0;
            }
        });
        let databases = &plan.verdicts[1];
        assert_eq!(databases.effect, Effect::WritesOnly);
        assert!(
            databases.advice.iter().any(|advice| advice.text.contains("disagrees")),
            "{databases:?}"
        );
    }
}
