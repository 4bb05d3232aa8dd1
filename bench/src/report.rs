//! Medians, ratios and the table.

use std::fmt::Write;

use serde::{Deserialize, Serialize};
use tidepool_cluster::fio::Figures;
use tidepool_cluster::machine::Machine;

use crate::Sizes;
use crate::drain::{Disturbance, Load, Pair, Pool, median_interval};
use crate::neighbours::{BOUND, Neighbour, Neighbours};
use crate::restart::Restart;
use crate::rows::ROWS;
use crate::targets::Target;

/// A drain that is shorter shows how long it takes to say so.
const DRAIN_SECONDS_MIN: f64 = 1.0;

/// One run of one workload on one target.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The workload's name.
    pub row: String,
    /// What was measured.
    pub target: Target,
    /// Length of the run.
    pub seconds: u32,
    /// Which of the repeats, from 1.
    pub repeat: u32,
    /// The figures.
    #[serde(flatten)]
    pub figures: Figures,
    /// Dirty bytes of the volume when the measured time began and ended, where there is a cache.
    pub dirty_bytes: Option<(f64, f64)>,
    /// Time that the drain took afterwards.
    pub drain_seconds: Option<f64>,
    /// Part of the blocks read that came from the cache.
    pub hit_ratio: Option<f64>,
    /// The command that repeats it.
    pub command: String,
}

/// Everything of one benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Results {
    /// Version of this format.
    pub format: u32,
    /// What it ran on.
    pub machine: Machine,
    /// Sizes of image, cache and working set.
    pub sizes: Sizes,
    /// Every run, in the order in which they ran.
    pub points: Vec<Point>,
    /// Kills and restarts.
    pub restarts: Vec<Restart>,
    /// What a client notices of the clients of another volume.
    #[serde(default)]
    pub neighbours: Option<Neighbours>,
    /// What a client notices of the drain.
    #[serde(default)]
    pub drain: Option<Disturbance>,
}

/// The median; the mean of the two in the middle for an even number.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    match (count, count % 2) {
        (0, _) => None,
        (_, 1) => Some(values[count / 2]),
        _ => Some((values[count / 2 - 1] + values[count / 2]) / 2.0),
    }
}

/// The median, and the least and the greatest of several.
fn least_to_most(mut values: Vec<f64>) -> Option<String> {
    values.sort_by(f64::total_cmp);
    let middle = median(values.clone())?;
    Some(match values[..] {
        [least, .., most] => format!("{middle:.2} ({least:.2}–{most:.2})"),
        _ => format!("{middle:.2}"),
    })
}

impl Results {
    /// The points of one cell.
    fn cell(&self, row: &str, target: Target, seconds: u32) -> Vec<&Point> {
        let same =
            |point: &&Point| point.row == row && point.target == target && point.seconds == seconds;
        self.points.iter().filter(same).collect()
    }

    /// The median of one figure of a cell.
    fn median(
        &self,
        row: &str,
        target: Target,
        seconds: u32,
        of: impl Fn(&Figures) -> Option<f64>,
    ) -> Option<f64> {
        median(
            self.cell(row, target, seconds).iter().filter_map(|point| of(&point.figures)).collect(),
        )
    }

    /// A client beside those of another volume that ask for as much as they can.
    fn neighbours_table(&self, text: &mut String) {
        let Some(Neighbours { machine, apart, points }) = &self.neighbours else { return };
        let (times, more_us) = BOUND;
        let _ = writeln!(
            text,
            "## Beside a volume whose clients ask for all they can\n\n\
             A write and a read of 4 KiB, one after the other, on one volume, while 24 connections of another one send without a pause{}. Latencies of both, in µs; medians of the repeats, and the ratio of each pair (least to most). \
             The p99.9 is to stay below {times} × that of before and {} ms. The disk is 4 KiB written to stable media (`O_DSYNC`) past the daemon, beside the same clients. Commit {}, {}.\n\n\
             | what they send | requests a second | p50 alone | p50 | p99.9 alone | p99.9 | ratio | below | worst | p99.9 of the disk | worst of the disk |\n|---|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|",
            if *apart { ", which have a processor of their own" } else { "" },
            more_us / 1e3,
            machine.commit,
            machine.cpu,
        );
        let mut names: Vec<&str> = points.iter().map(|point| point.attack.as_str()).collect();
        names.dedup();
        names.sort_unstable();
        names.dedup();
        for name in names {
            let of: Vec<&Neighbour> = points.iter().filter(|point| point.attack == name).collect();
            let all = |figure: &dyn Fn(&Neighbour) -> f64| {
                of.iter().map(|point| figure(point)).collect::<Vec<f64>>()
            };
            let middle = |figure: &dyn Fn(&Neighbour) -> f64| median(all(figure)).unwrap_or(0.0);
            let holds = of
                .iter()
                .all(|point| point.attacked.p999_us <= times * point.idle.p999_us + more_us);
            let _ = writeln!(
                text,
                "| {name} | {:.0} | {:.0} | {:.0} | {:.0} | {:.0} | {} | {} | {:.0} | {:.0} | {:.0} |",
                middle(&|point| point.sent as f64 / f64::from(2 * point.seconds)),
                middle(&|point| point.idle.p50_us),
                middle(&|point| point.attacked.p50_us),
                middle(&|point| point.idle.p999_us),
                middle(&|point| point.attacked.p999_us),
                least_to_most(all(&|point| point.attacked.p999_us / point.idle.p999_us))
                    .unwrap_or_default(),
                if holds { "yes" } else { "**no**" },
                all(&|point| point.attacked.max_us).into_iter().fold(0.0, f64::max),
                middle(&|point| point.disk.p999_us),
                all(&|point| point.disk.max_us).into_iter().fold(0.0, f64::max),
            );
        }
        text.push('\n');
    }

    /// A client with the drain and without it.
    fn disturbance_table(&self, text: &mut String) {
        let Some(Disturbance { machine, seconds, series }) = &self.drain else { return };
        let _ = writeln!(
            text,
            "## What a client notices of the drain\n\n\
             One client sends one request after the other, 4 KiB to random places of 1 GiB, to one daemon whose drain is paused and not, in turn, for {seconds} s each. \
             The ratio is that of the rates of each pair, its median with the 95 % interval of the median. \
             A pair does not count if the disk moved by more than 2 × meanwhile, or had a p99.9 above 1 ms, with 4 KiB to stable media past the daemon before and after the pair. \
             Latencies in µs, medians of the pairs. Commit {}, {}.\n\n\
             | image | request | pairs | do not count | rate paused | rate draining | ratio | p50 paused | p50 | p99.9 paused | p99.9 | syncs paused, for each request | syncs for each group |\n|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
            machine.commit, machine.cpu,
        );
        for of in series {
            let kept: Vec<&Pair> =
                of.pairs.iter().filter(|pair| pair.objection().is_none()).collect();
            let all = |figure: &dyn Fn(&Pair) -> f64| {
                kept.iter().map(|pair| figure(pair)).collect::<Vec<f64>>()
            };
            let middle = |figure: &dyn Fn(&Pair) -> f64| median(all(figure)).unwrap_or(f64::NAN);
            let ratio = match median_interval(all(&Pair::ratio)) {
                Some((middle, low, high)) => format!("{middle:.2} ({low:.2}–{high:.2})"),
                None => format!("{:.2}", middle(&Pair::ratio)),
            };
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {:.0} | {:.0} | {ratio} | {:.0} | {:.0} | {:.0} | {:.0} | {:.2} | {:.1} |",
                match of.pool {
                    Pool::Memory => "in memory",
                    Pool::OneDisk => "on the cache's disk",
                },
                match of.load {
                    Load::WriteAndFlush => "write and flush",
                    Load::Write => "write",
                },
                kept.len(),
                of.pairs.len() - kept.len(),
                middle(&|pair| pair.paused.rate),
                middle(&|pair| pair.draining.rate),
                middle(&|pair| pair.paused.latency.p50_us),
                middle(&|pair| pair.draining.latency.p50_us),
                middle(&|pair| pair.paused.latency.p999_us),
                middle(&|pair| pair.draining.latency.p999_us),
                middle(&|pair| pair.paused.syncs / pair.paused.latency.requests as f64),
                middle(&|pair| pair.draining.syncs / pair.draining.groups),
            );
        }
        text.push('\n');
    }

    /// The report as Markdown.
    pub fn markdown(&self) -> String {
        let mut text = String::from("# Measured\n\n");
        let Machine { cpu, cpus, memory_bytes, kernel, system, filesystem, versions, commit } =
            &self.machine;
        let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
        let _ = writeln!(
            text,
            "{cpus} × {cpu}, {:.0} GiB, {system}, {kernel}, {filesystem}. {}. Commit {commit}.\n",
            gib(*memory_bytes),
            versions.join("; ")
        );
        let Sizes { image_bytes, cache_bytes, work_bytes } = self.sizes;
        let _ = writeln!(
            text,
            "Image {:.1} GiB on one OSD, cache {:.1} GiB, reads and mix over the first {:.1} GiB; all on one disk. \
             Medians of repeats in interleaved order; every run is in [results.json](results.json), \
             with the command that repeats it. A row with flush counts pairs of a write and a flush.\n",
            gib(image_bytes),
            gib(cache_bytes),
            gib(work_bytes)
        );
        let mut lengths: Vec<u32> = self.points.iter().map(|point| point.seconds).collect();
        lengths.sort_unstable();
        lengths.dedup();
        for &seconds in &lengths {
            self.table(&mut text, seconds);
        }
        self.copies_table(&mut text, &lengths);
        self.drain_table(&mut text);
        self.restart_table(&mut text);
        self.neighbours_table(&mut text);
        self.disturbance_table(&mut text);
        self.all_points(&mut text);
        text
    }

    /// The table of the runs of one length.
    fn table(&self, text: &mut String, seconds: u32) {
        let targets: Vec<Target> = Target::ALL
            .into_iter()
            .filter(|target| {
                self.points.iter().any(|point| point.seconds == seconds && point.target == *target)
            })
            .collect();
        let repeats = self
            .points
            .iter()
            .filter(|point| point.seconds == seconds)
            .map(|point| point.repeat)
            .max();
        let _ = writeln!(
            text,
            "## {seconds} s per run, repeats: {}\n\nIOPS (p99 latency in µs); ratio of IOPS, Tidepool to librbd.\n",
            repeats.unwrap_or(0)
        );
        let titles: Vec<&str> = targets.iter().map(|target| target.title()).collect();
        let _ = writeln!(text, "| workload | {} | ratio |", titles.join(" | "));
        let _ = writeln!(text, "|---|{}", "---:|".repeat(targets.len() + 1));
        for row in ROWS {
            let mut line = format!("| {} |", row.name);
            for &target in &targets {
                let iops = self.median(row.name, target, seconds, |figures| Some(figures.iops));
                let p99 = self.median(row.name, target, seconds, |figures| figures.p99_us);
                match iops.zip(p99) {
                    Some((iops, p99)) => {
                        let _ = write!(line, " {iops:.0} ({p99:.0}) |");
                    }
                    None => line.push_str(" – |"),
                }
            }
            let iops =
                |target| self.median(row.name, target, seconds, |figures| Some(figures.iops));
            match iops(Target::Tidepool).zip(iops(Target::Librbd)) {
                Some((cached, plain)) if plain > 0.0 => {
                    let _ = write!(line, " {:.1} × |", cached / plain);
                }
                _ => line.push_str(" – |"),
            }
            let _ = writeln!(text, "{line}");
        }
        text.push('\n');
    }

    /// What a second copy costs a write: each repeat's run with it against the one without.
    fn copies_table(&self, text: &mut String, lengths: &[u32]) {
        let mut rows = String::new();
        for (&seconds, row) in
            lengths.iter().flat_map(|seconds| ROWS.iter().map(move |row| (seconds, row)))
        {
            let cell = |of| least_to_most(self.ratios_of_copies(row.name, seconds, of));
            if let Some((latency, iops)) =
                cell(|figures| figures.mean_us).zip(cell(|figures| figures.iops))
            {
                let _ = writeln!(rows, "| {} | {seconds} | {latency} | {iops} |", row.name);
            }
        }
        if !rows.is_empty() {
            let _ = writeln!(
                text,
                "## Two copies against one\n\nBoth daemons, their caches and the OSD on this machine. Each repeat's ratio: the median (least–most).\n\n\
                 | workload | s | mean latency × | IOPS × |\n|---|---:|---:|---:|\n{rows}"
            );
        }
    }

    /// Of each repeat a figure with a second copy, in parts of that without one.
    fn ratios_of_copies(&self, row: &str, seconds: u32, of: fn(&Figures) -> f64) -> Vec<f64> {
        let ones = self.cell(row, Target::Tidepool, seconds);
        let ratio = |two: &&Point| {
            let one = of(&ones.iter().find(|one| one.repeat == two.repeat)?.figures);
            (one > 0.0).then(|| of(&two.figures) / one)
        };
        self.cell(row, Target::TidepoolReplicated, seconds).iter().filter_map(ratio).collect()
    }

    /// How fast dirty data goes to the image after a run, when nothing else happens.
    fn drain_table(&self, text: &mut String) {
        let rate = |row: &str, target| {
            let rates =
                self.points.iter().filter(|point| point.row == row && point.target == target);
            let rates = rates.filter_map(|point| {
                let (_, dirty) = point.dirty_bytes?;
                let seconds =
                    point.drain_seconds.filter(|&seconds| seconds >= DRAIN_SECONDS_MIN)?;
                Some(dirty / 1_048_576.0 / seconds)
            });
            median(rates.collect())
        };
        let cached = Target::ALL.map(|target| (target, ROWS.map(|row| rate(row.name, target))));
        let cached: Vec<_> = cached
            .into_iter()
            .filter(|(_, rates)| rates.iter().any(|rate| rate.is_some()))
            .collect();
        if cached.is_empty() {
            return;
        }
        let titles: Vec<&str> = cached.iter().map(|(target, _)| target.title()).collect();
        let _ = writeln!(
            text,
            "## Drain after a run, nothing else to do\n\nMiB of dirty data per second; only drains of {DRAIN_SECONDS_MIN} s and more.\n\n| dirtied by | {} |\n|---|{}",
            titles.join(" | "),
            "---:|".repeat(titles.len())
        );
        for (at, row) in ROWS
            .iter()
            .enumerate()
            .filter(|(at, _)| cached.iter().any(|(_, rates)| rates[*at].is_some()))
        {
            let cells = cached
                .iter()
                .map(|(_, rates)| rates[at].map_or("–".into(), |rate| format!("{rate:.0}")));
            let _ =
                writeln!(text, "| {} | {} |", row.name, cells.collect::<Vec<String>>().join(" | "));
        }
        text.push('\n');
    }

    /// Restarts after a kill.
    fn restart_table(&self, text: &mut String) {
        if self.restarts.is_empty() {
            return;
        }
        text.push_str("## Restart after kill -9\n\nHits are those of the same random trace, counted by what was read from the backend.\n\n");
        text.push_str("| backend | cached GiB | ready after s | hits before | hits after |\n|---|---:|---:|---:|---:|\n");
        for restart in &self.restarts {
            let _ = writeln!(
                text,
                "| {} | {:.2} | {:.2} | {:.1} % | {:.1} % |",
                restart.backend,
                restart.cached_bytes / f64::from(1 << 30),
                restart.ready_seconds,
                restart.hit_ratio_before * 100.0,
                restart.hit_ratio_after * 100.0
            );
        }
        text.push('\n');
    }

    /// Every run, so that the spread is seen.
    fn all_points(&self, text: &mut String) {
        text.push_str("## All runs\n\n| workload | target | s | repeat | IOPS | mean µs | p99.9 µs | dirty MiB, begin → end | drained after s | hits |\n");
        text.push_str("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n");
        for point in &self.points {
            let dirty = point.dirty_bytes.map_or("–".into(), |(begin, end)| {
                format!("{:.0} → {:.0}", begin / 1_048_576.0, end / 1_048_576.0)
            });
            let drain = point.drain_seconds.map_or("–".into(), |seconds| format!("{seconds:.1}"));
            let hits =
                point.hit_ratio.map_or("–".into(), |ratio| format!("{:.1} %", ratio * 100.0));
            let Figures { iops, mean_us, p999_us, .. } = point.figures;
            let p999 = p999_us.map_or("–".into(), |us| format!("{us:.0}"));
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {iops:.0} | {mean_us:.0} | {p999} | {dirty} | {drain} | {hits} |",
                point.row,
                point.target.title(),
                point.seconds,
                point.repeat
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_are_medians() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn a_spread_is_told_where_there_is_one() {
        assert_eq!(least_to_most(vec![]), None);
        assert_eq!(least_to_most(vec![1.5]), Some("1.50".into()));
        assert_eq!(least_to_most(vec![3.0, 1.0, 2.0]), Some("2.00 (1.00–3.00)".into()));
    }
}
