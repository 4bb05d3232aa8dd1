//! Writes one record for each cluster of a placement and a size on which all jobs were measured.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::{CLIENT, JOBS, Job, TEST_FORMAT, client};
use crate::collect::{Flow, Means, Parts};
use crate::results::{Results, Run};
use crate::stats::objections;
use crate::suite::ClusterSize;

/// Which cells are exported. A field that is None allows every value; one placement and one size
/// have to remain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The placement.
    pub placement: Option<String>,
    /// Disks of the cluster.
    pub disks: Option<u32>,
    /// OSDs on each disk.
    pub osds_per_disk: Option<u32>,
}

/// Records, and what the format cannot say of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    /// The list of records, in the format.
    pub records: Vec<Value>,
    /// What users of the records have to know, one sentence each.
    pub notes: Vec<String>,
}

/// Why nothing is written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ExportError {
    /// The suite does not measure all jobs of the format.
    #[error(
        "the suite {suite} does not measure all jobs of the format with one client; it lacks {missing}"
    )]
    NoJobs {
        /// Name of the suite.
        suite: String,
        /// Names of the missing jobs.
        missing: String,
    },
    /// No cell that was measured is wanted.
    #[error("nothing of that was measured; there are {there}")]
    Nothing {
        /// The placements and sizes that were measured.
        there: String,
    },
    /// Several placements or sizes are wanted.
    #[error(
        "a record is of one placement and one size: choose with --placement, --disks and --osds-per-disk among {there}"
    )]
    Ambiguous {
        /// The placements and sizes that are wanted.
        there: String,
    },
    /// Reports of fio, or the memory that was used, were not recorded.
    #[error(
        "the results hold no reports of fio, which the format wants whole, or not what memory was used: run the suite again"
    )]
    NoReports,
    /// No cluster has a run that counts of every job.
    #[error("no cluster has a run that counts of every job; {why}")]
    Incomplete {
        /// What the first cluster lacks.
        why: String,
    },
}

/// The job of a run, if the run does one: with one client, without neighbours, and with the
/// ground's copies and factor.
fn job(results: &Results, run: &Run) -> Option<Job> {
    let workload = results.suite.workload(&run.cell.workload)?;
    let is = |job: &&Job| job.is(workload, run.cell.depth);
    let alone = !run.cell.is_beside() && results.suite.neighbours(&run.cell).is_none();
    let plain = run.cell.clients == 1 && run.cell.slowed_by.is_none() && alone;
    JOBS.iter().filter(|_| plain).find(is).copied()
}

fn size(run: &Run) -> ClusterSize {
    ClusterSize { disks: run.cell.disks, osds_per_disk: run.cell.osds_per_disk }
}

/// Placements and sizes as a list of choices.
fn listed(sets: &BTreeSet<(&str, ClusterSize)>) -> String {
    let one = |(placement, size): &(&str, ClusterSize)| format!("{placement} on {size}");
    sets.iter().map(one).collect::<Vec<String>>().join("; ")
}

/// The records of the cells that are wanted.
///
/// # Errors
/// When no cell is wanted, cells of several placements or sizes are wanted, or the cells cannot be
/// written in the format.
pub fn export(results: &Results, wanted: &Wanted) -> Result<Exported, ExportError> {
    let suite = &results.suite;
    let measured = |job: &&Job| {
        suite.workloads.iter().any(|found| {
            found.clients.contains(&1) && found.depth.iter().any(|depth| job.is(found, *depth))
        })
    };
    let missing: Vec<&str> = JOBS.iter().filter(|job| !measured(job)).map(|job| job.name).collect();
    if !missing.is_empty() {
        return Err(ExportError::NoJobs { suite: suite.name.clone(), missing: missing.join(", ") });
    }
    let jobs: Vec<(&Run, Job)> =
        results.runs.iter().filter_map(|run| Some((run, job(results, run)?))).collect();
    let sets: BTreeSet<(&str, ClusterSize)> =
        jobs.iter().map(|(run, _)| (run.cell.placement.as_str(), size(run))).collect();
    let is_wanted = |(placement, size): &(&str, ClusterSize)| {
        wanted.placement.as_ref().is_none_or(|wanted| wanted == placement)
            && wanted.disks.is_none_or(|disks| disks == size.disks)
            && wanted.osds_per_disk.is_none_or(|osds| osds == size.osds_per_disk)
    };
    let chosen: BTreeSet<(&str, ClusterSize)> = sets.iter().copied().filter(is_wanted).collect();
    // The baseline's control lacks jobs. A user who does not name the control does not mean it.
    let whole: BTreeSet<(&str, ClusterSize)> = chosen
        .iter()
        .copied()
        .filter(|(name, _)| suite.placements.iter().any(|own| own == name))
        .collect();
    let chosen = if whole.is_empty() { chosen } else { whole };
    let Some((placement, chosen_size)) = chosen.first().filter(|_| chosen.len() == 1) else {
        return Err(match chosen.len() {
            0 => ExportError::Nothing { there: listed(&sets) },
            _ => ExportError::Ambiguous { there: listed(&chosen) },
        });
    };
    let of_it =
        |(run, _): &&(&Run, Job)| run.cell.placement == *placement && size(run) == *chosen_size;
    let mut clusters: BTreeMap<(u32, u32), Vec<(&Run, Job)>> = BTreeMap::new();
    for (run, job) in jobs.iter().filter(of_it) {
        clusters.entry((run.repeat, run.testbed)).or_default().push((*run, *job));
    }
    records(results, &clusters)
}

/// One record for each cluster that has all jobs.
fn records(
    results: &Results,
    clusters: &BTreeMap<(u32, u32), Vec<(&Run, Job)>>,
) -> Result<Exported, ExportError> {
    let (mut records, mut notes, mut lacking) = (Vec::new(), Vec::new(), Vec::new());
    let mut is_limited = false;
    for ((repeat, testbed), found) in clusters {
        let of = |job: &Job| found.iter().find(|(run, of)| of == job && objections(run).is_empty());
        if let Some(job) = JOBS.iter().find(|job| of(job).is_none()) {
            let why =
                found.iter().find(|(_, of)| of == job).map(|(run, _)| objections(run).join("; "));
            let why = why.unwrap_or_else(|| "it was not measured".into());
            lacking.push(format!("cluster {testbed} lacks {}: {why}", job.name));
            continue;
        }
        let mut result = Map::new();
        for job in &JOBS {
            let Some((run, _)) = of(job) else { continue };
            result
                .insert(job.name.into(), self::result(results, run).ok_or(ExportError::NoReports)?);
            is_limited |= run.lower_bound.is_some();
        }
        let cell = &found[0].0.cell;
        let id = records.len() + 1;
        records.push(json!({
            "id": id,
            "job": format!("{}_{}_{}x{}_repeat-{repeat}", results.begun, cell.placement, cell.disks, cell.osds_per_disk),
            "test_format": TEST_FORMAT,
            "benchmark_result": result,
        }));
    }
    if records.is_empty() {
        let why = lacking.into_iter().next().unwrap_or_default();
        return Err(ExportError::Incomplete { why });
    }
    notes.extend(lacking.into_iter().map(|why| format!("left out: {why}")));
    if is_limited {
        notes.push(
            "the client or the machine was the limit of some runs, which the format cannot say"
                .into(),
        );
    }
    if !results.devices.is_empty() {
        notes
            .push("devices were emulated, which the format cannot say: relative order only".into());
    }
    let has_nodes =
        |run: &Run| run.samples.iter().all(|sample| sample.network.contains_key(CLIENT));
    if !clusters.values().flatten().all(|(run, _)| has_nodes(run)) {
        notes.push("there was no network of nodes: what is told of it is the loopback interface, with all that OSDs and monitor sent one another".into());
    }
    Ok(Exported { records, notes })
}

/// A job's part of a record: fio's report, and beside it the processors, memory and network that
/// were used. None where fio's report, the samples or the use of memory are missing.
fn result(results: &Results, run: &Run) -> Option<Value> {
    let means = Means::of(&run.samples, &results.machine)?;
    let mut fields = run.fio.first()?.as_object()?.clone();
    let percent = |parts: Parts| json!({"total": parts.total_percent, "ceph-mon": parts.mon_percent, "ceph-osd": parts.osd_percent});
    let flow: Flow = client(&means).unwrap_or_default();
    fields.insert("avg_cpu_util_percent".into(), percent(means.cpu));
    fields.insert("avg_memory_util_percent".into(), percent(means.memory?));
    let network = json!({
        "sent": flow.sent_bits_per_s,
        "recv": flow.received_bits_per_s,
        "total": flow.total_bits_per_s(),
    });
    fields.insert("avg_network_util_bps".into(), network);
    Some(Value::Object(fields))
}
