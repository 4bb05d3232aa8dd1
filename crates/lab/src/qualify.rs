//! Whether an SSD is fit to be a journal or a cache: how it behaves when every write must be on the
//! media.
//!
//! There is no authority for such grades. Ours are, in synchronous 4 KiB writes per second of one
//! writer: below 1,000 *reject*, below 5,000 *poor*, up to 20,000 *fair*, above that *good*. A
//! device gets at most *fair* if it loses more than half of its speed to the synchronous writes, if
//! its 99.9th percentile is 5 ms or more, if four writers get less than 1.2 times what one writer
//! gets, or if it keeps less than 80 % of its first speed to the end of the long run.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use tidepool_cluster::device::calibrate::CARRIED_IOPS_MAX;
use tidepool_cluster::fio::{self, Endpoint, Figures, FioError, Job, Pattern, Sync};

/// Numbers of concurrent writers with which the device is measured.
const WRITERS: [u32; 4] = [1, 2, 4, 8];
/// Bytes of a request of the graded runs.
const BLOCK_BYTES: u64 = 4096;
/// Bytes of a request, and writers, for the synchronous bandwidth: several OSDs write to one SSD.
const BANDWIDTH_BLOCK_BYTES: u64 = 128 << 10;
const BANDWIDTH_WRITERS: u32 = 4;
/// A good device keeps at least this part of its speed without synchronous writes.
const KEPT_MIN: f64 = 0.5;
/// From this 99.9th percentile on, in microseconds, a device is not good.
const P999_US_MAX: f64 = 5_000.0;
/// Least ratio of four writers' IOPS to one writer's.
const SCALING_MIN: f64 = 1.2;
/// Least part of its first speed that a good device keeps to the end of the long run.
const LASTING_MIN: f64 = 0.8;
/// Parts of the long run whose speeds are compared.
const LONG_PARTS: usize = 10;

/// How fit a device is, worst first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grade {
    /// Too slow with synchronous writes.
    Reject,
    /// Fit for little load only.
    Poor,
    /// Acceptable.
    Fair,
    /// Fit to be a journal or a cache.
    Good,
}

impl Qualification {
    /// Pairs of runs with the same job, with the device's write cache on and off.
    pub fn by_cache(&self) -> impl Iterator<Item = (&Run, &Run)> {
        let with = |off: &Run| self.runs.iter().find(|on| on.job == off.job);
        self.without_cache.iter().filter_map(move |off| Some((with(off)?, off)))
    }
}

impl Grade {
    /// The grade for this number of synchronous 4 KiB writes per second of one writer, by itself.
    pub fn of_iops(iops: f64) -> Grade {
        match iops {
            iops if iops < 1_000.0 => Grade::Reject,
            iops if iops < 5_000.0 => Grade::Poor,
            iops if iops <= 20_000.0 => Grade::Fair,
            _ => Grade::Good,
        }
    }
}

/// What part of a device is measured, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Options {
    /// Bytes of the device that are overwritten.
    pub bytes: u64,
    /// Seconds of each run.
    pub seconds: u32,
    /// Seconds of the long run, which shows whether the device gets slower as it is written. 0 for
    /// no long run.
    pub long_s: u32,
    /// Whether the device is emulated.
    pub emulated: bool,
    /// The factor by which the device is slower than the device it stands for. Figures are of the
    /// device it stands for.
    pub slowed_by: u32,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Run {
    /// What was run.
    pub job: Job,
    /// The figures of the device that an emulated device stands for: made faster by the factor
    /// [`Options::slowed_by`].
    pub figures: Figures,
    /// The command that repeats it.
    pub command: String,
}

/// What the measurements showed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Qualification {
    /// How fit the device is.
    pub grade: Grade,
    /// Why the grade is no better.
    pub reasons: Vec<String>,
    /// The runs with 4 KiB writes and the write cache as it is. The grade starts from the first
    /// one, a single synchronous writer.
    pub runs: Vec<Run>,
    /// Bytes per second of several synchronous writers. It shows how many OSDs the device carries.
    pub sync_write_bytes_per_s: f64,
    /// Speed in the parts of the long run relative to the first part; empty without a long run.
    pub lasting: Vec<f64>,
    /// Runs of one writer with the device's write cache off: synchronous, with a flush after each
    /// write, and without a flush. Empty if the cache cannot be switched.
    pub without_cache: Vec<Run>,
}

/// Switches the write cache of a device on or off.
pub type Switch<'a> = &'a dyn Fn(bool) -> std::io::Result<()>;

/// Measures the device at `path`, whose first [`Options::bytes`] are overwritten. `switch` turns
/// the write cache off for a moment, if that is possible. `progress` is called with the next step.
///
/// # Errors
/// If fio fails.
pub fn qualify(
    path: &Path,
    options: Options,
    switch: Option<Switch<'_>>,
    progress: &dyn Fn(&str),
) -> Result<Qualification, FioError> {
    let endpoint = Endpoint::File(path.to_path_buf());
    let write = Job::new(Pattern::Write, BLOCK_BYTES, 1);
    let synchronous = WRITERS.map(|jobs| Job { jobs, ..write.with(Sync::Dsync) });
    let single = [synchronous[0], write.with(Sync::Flush), write];
    let jobs = synchronous.into_iter().chain(single.into_iter().skip(1));
    let measure = |job: Job, how: &str| {
        let (sync, writers) = (sync_name(job.sync), job.jobs);
        let kib = job.block_bytes >> 10;
        progress(&format!("{kib}K writes, {sync}, {writers} writers{how}: {} s", options.seconds));
        let words = fio::arguments(&endpoint, &job, options.bytes, 0, options.seconds);
        let found = fio::figures(&fio::run(&endpoint, &words)?, &job);
        let figures = found.faster(f64::from(options.slowed_by));
        Ok(Run { job, figures, command: fio::command_line(&endpoint, &words) })
    };
    let runs = jobs.map(|job| measure(job, "")).collect::<Result<Vec<_>, FioError>>()?;
    let large = Job::new(Pattern::Write, BANDWIDTH_BLOCK_BYTES, 1).with(Sync::Dsync);
    let large = measure(Job { jobs: BANDWIDTH_WRITERS, ..large }, "")?;
    let sync_write_bytes_per_s = large.figures.iops * BANDWIDTH_BLOCK_BYTES as f64;
    let mut without_cache = Vec::new();
    // If the cache cannot be switched off, the runs without it are left out.
    if let Some(switch) = switch.filter(|switch| switch(false).is_ok()) {
        let found: Result<Vec<Run>, FioError> =
            single.into_iter().map(|job| measure(job, ", write cache off")).collect();
        // The cache was on before. Turn it on again, also when a run has failed.
        let _ = switch(true);
        without_cache = found?;
    }
    let mut lasting = Vec::new();
    if options.long_s > 0 {
        progress(&format!("4K writes, dsync, 1 writer: {} s", options.long_s));
        let part_s = (options.long_s / LONG_PARTS as u32).max(1);
        let mut words =
            fio::arguments(&endpoint, &synchronous[0], options.bytes, 0, options.long_s);
        words.push(format!("--status-interval={part_s}"));
        lasting = relative(&fio::run_reports(&endpoint, &words)?);
    }
    let (grade, mut reasons) = grade(&runs, &lasting);
    if emulated_too_fast(&runs, options) {
        reasons.push("more than a file in user space carries: emulate it slower".into());
    }
    Ok(Qualification { grade, reasons, runs, sync_write_bytes_per_s, lasting, without_cache })
}

/// Whether the first run reached the limit of the emulation instead of the limit of the device.
fn emulated_too_fast(runs: &[Run], options: Options) -> bool {
    let base = runs.first().map_or(0.0, |run| run.figures.iops);
    options.emulated && base / f64::from(options.slowed_by) > CARRIED_IOPS_MAX
}

/// Speeds between the reports of one run, relative to the first speed.
fn relative(reports: &[Value]) -> Vec<f64> {
    let of = |report: &Value| {
        let write = &report["jobs"][0]["write"];
        (write["total_ios"].as_f64().unwrap_or(0.0), write["runtime"].as_f64().unwrap_or(0.0))
    };
    let points: Vec<(f64, f64)> = [(0.0, 0.0)].into_iter().chain(reports.iter().map(of)).collect();
    let steps = points.windows(2).map(|pair| (pair[1].0 - pair[0].0, pair[1].1 - pair[0].1));
    // Steps of less than 500 ms are left out: the final report may follow the last interval report
    // at once.
    let speeds: Vec<f64> = steps.filter(|step| step.1 >= 500.0).map(|(ios, ms)| ios / ms).collect();
    let first = speeds.first().copied().filter(|&first| first > 0.0).unwrap_or(1.0);
    speeds.iter().map(|speed| speed / first).collect()
}

/// When a write counts as complete, in words like fio's options.
fn sync_name(sync: Sync) -> &'static str {
    match sync {
        Sync::None => "no sync",
        Sync::Flush => "fsync after each",
        Sync::Dsync => "dsync",
    }
}

/// The grade of the measured runs, and why it is no better.
fn grade(runs: &[Run], lasting: &[f64]) -> (Grade, Vec<String>) {
    let find = |sync, jobs| {
        runs.iter().find(|run| run.job.sync == sync && run.job.jobs == jobs).map(|run| run.figures)
    };
    let (Some(base), Some(free)) = (find(Sync::Dsync, 1), find(Sync::None, 1)) else {
        return (Grade::Reject, vec!["nothing was measured".into()]);
    };
    let first = Grade::of_iops(base.iops);
    let bound = match first {
        Grade::Reject => Some("1,000"),
        Grade::Poor => Some("5,000"),
        Grade::Fair => Some("20,000"),
        Grade::Good => None,
    };
    let mut reasons = Vec::new();
    if let Some(bound) = bound {
        reasons.push(format!(
            "{:.0} synchronous 4 KiB writes per second are less than {bound}",
            base.iops
        ));
    }
    let kept = base.iops / free.iops;
    if kept < KEPT_MIN {
        reasons
            .push(format!("synchronous writes go at {:.0} % of the speed of others", kept * 100.0));
    }
    if let Some(us) = base.p999_us.filter(|us| *us >= P999_US_MAX) {
        reasons.push(format!("one of a thousand takes {:.1} ms or more", us / 1e3));
    }
    if let Some(four) = find(Sync::Dsync, 4).filter(|four| four.iops < base.iops * SCALING_MIN) {
        reasons.push(format!("four writers get {:.2} times what one gets", four.iops / base.iops));
    }
    if let Some(last) = lasting.last().filter(|&&last| last < LASTING_MIN) {
        reasons.push(format!(
            "at the end of the long run it has {:.0} % of its first speed",
            last * 100.0
        ));
    }
    let others = reasons.len() > usize::from(bound.is_some());
    (if others { first.min(Grade::Fair) } else { first }, reasons)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(iops: [f64; 4], free: f64, p999_us: f64) -> Vec<Run> {
        let job = Job::new(Pattern::Write, 4096, 1);
        let run = |job, iops| Run {
            job,
            figures: Figures { iops, p999_us: Some(p999_us), ..Figures::default() },
            command: String::new(),
        };
        let mut runs: Vec<Run> = WRITERS
            .iter()
            .zip(iops)
            .map(|(&jobs, iops)| run(Job { jobs, ..job.with(Sync::Dsync) }, iops))
            .collect();
        runs.push(run(job, free));
        runs
    }

    #[test]
    fn grades_follow_from_what_is_said_of_them() {
        let fast = [25_000.0, 40_000.0, 60_000.0, 70_000.0];
        assert_eq!(grade(&runs(fast, 30_000.0, 200.0), &[1.0, 0.98]), (Grade::Good, vec![]));
        for (runs, lasting) in [
            (runs(fast, 80_000.0, 200.0), vec![]),
            (runs(fast, 30_000.0, 6_000.0), vec![]),
            (runs([25_000.0; 4], 30_000.0, 200.0), vec![]),
            (runs(fast, 30_000.0, 200.0), vec![1.0, 0.5]),
        ] {
            let (grade, reasons) = grade(&runs, &lasting);
            assert_eq!((grade, reasons.len()), (Grade::Fair, 1), "{reasons:?}");
        }
        let slow = |iops: f64| {
            grade(&runs([iops, iops * 2.0, iops * 4.0, iops * 4.0], iops, 200.0), &[]).0
        };
        assert_eq!(
            [slow(500.0), slow(3_000.0), slow(9_000.0)],
            [Grade::Reject, Grade::Poor, Grade::Fair]
        );
    }

    #[test]
    fn runs_with_the_write_cache_on_and_off_are_pairs() {
        let runs = runs([100.0, 200.0, 300.0, 400.0], 5_000.0, 200.0);
        let slow =
            |run: &Run| Run { figures: Figures { iops: 10.0, ..run.figures }, ..run.clone() };
        let (first, last) = (&runs[0], &runs[runs.len() - 1]);
        let without_cache = vec![slow(first), slow(last)];
        let found = Qualification {
            grade: Grade::Reject,
            reasons: Vec::new(),
            sync_write_bytes_per_s: 0.0,
            lasting: Vec::new(),
            without_cache,
            runs: runs.clone(),
        };
        let pairs: Vec<[f64; 2]> =
            found.by_cache().map(|(on, off)| [on.figures.iops, off.figures.iops]).collect();
        assert_eq!(pairs, [[100.0, 10.0], [5_000.0, 10.0]]);
        assert_eq!(Qualification { without_cache: Vec::new(), ..found }.by_cache().count(), 0);
    }

    #[test]
    fn parts_of_a_long_run_are_what_lies_between_its_reports() {
        let report = |ios: u64, ms: u64| serde_json::json!({"jobs": [{"write": {"total_ios": ios, "runtime": ms}}]});
        let reports = [
            report(1_000, 1_000),
            report(2_000, 2_000),
            report(2_500, 3_000),
            report(2_510, 3_010),
        ];
        assert_eq!(relative(&reports), [1.0, 1.0, 0.5]);
    }
}
