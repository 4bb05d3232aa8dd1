//! Why a figure stays level along an axis: what was busiest there, and whether more clients would
//! have got more.

use serde::Serialize;

use crate::breakdown::{Bottleneck, Part, combined};
use crate::collect::Means;
use crate::results::{Results, Run};
use crate::stats::{self, Finding, Metric, Ratio, Setting, Stretch};
use crate::suite::Direction;

/// Share in percent from which on a thread of the clients or the machine's processors are the
/// limit, as in the check for lower bounds of runs.
const SATURATED_PERCENT: f64 = 95.0;

/// What was busiest at a point of an axis.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plateau {
    /// The first measured point that is not below the claimed point.
    pub at: u32,
    /// What the limit was, as far as it is known.
    pub limit: Limit,
    /// The busiest thread of the clients, in percent of one processor.
    pub client_thread_percent: f64,
    /// Processors that were busy, in percent of all of them.
    pub cpu_percent: f64,
    /// Processors that the OSDs used, in percent of all of them.
    pub osd_cpu_percent: f64,
    /// The largest part of a request's time that was counted.
    pub hop: Option<Bottleneck>,
    /// This point with more clients, if that was measured.
    pub more_clients: Option<MoreClients>,
}

/// A point with more clients.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MoreClients {
    /// Number of clients.
    pub clients: u32,
    /// Ratio of the figure with all these clients to the figure with the fewer clients.
    pub ratio: Ratio,
}

/// What keeps a figure level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The client: a thread of it is saturated, or more clients get more.
    Client,
    /// The machine's processors.
    Cpu,
    /// The OSDs: the largest part of a request's time is in them, or in their replicas.
    Osds,
    /// The devices of the store, of the journal or of a cache: the largest part of a request's time
    /// is there.
    Disks,
    /// The network: the largest part of a request's time is there.
    Network,
    /// Not known: nothing was recorded, the part of a request's time that no counter covers is at
    /// least as large as the largest counted part, or the largest counted part is in a cache
    /// daemon, a gateway, an NBD server or a guest.
    NotKnown,
}

impl Limit {
    /// The limit in words.
    fn title(self) -> &'static str {
        match self {
            Limit::Client => "the client",
            Limit::Cpu => "the processors",
            Limit::Osds => "the OSDs",
            Limit::Disks => "the disks",
            Limit::Network => "the network",
            Limit::NotKnown => "not known",
        }
    }

    /// The limit for the part in which requests spend most of their time.
    fn of(part: Part) -> Limit {
        match part {
            Part::NotAccounted
            | Part::CacheDaemon
            | Part::Gateway
            | Part::NbdServer
            | Part::ClientGuest => Limit::NotKnown,
            Part::Network => Limit::Network,
            Part::OsdQueue
            | Part::OsdOther
            | Part::StorePrepare
            | Part::KvQueue
            | Part::Replica => Limit::Osds,
            Part::CacheSsd
            | Part::StoreRead
            | Part::DataDevice
            | Part::KvFlush
            | Part::KvCommit
            | Part::JournalWait
            | Part::Journal => Limit::Disks,
        }
    }
}

impl Plateau {
    /// What was busiest in these settings, which are one point of the direction's axis. None
    /// without samples.
    pub(super) fn of(
        results: &Results,
        direction: &Direction,
        at: u32,
        settings: &[Setting],
        metric: Metric,
    ) -> Option<Plateau> {
        let runs: Vec<&Run> = settings
            .iter()
            .flat_map(|setting| stats::runs(results, &direction.placement, setting))
            .filter(|run| stats::objections(run).is_empty())
            .collect();
        let means: Vec<Means> =
            runs.iter().filter_map(|run| Means::of(&run.samples, &results.machine)).collect();
        let means = Means::joined(&means)?;
        let breakdown = combined(&runs);
        let hop = breakdown.bottleneck();
        let sides = [&breakdown.reads, &breakdown.writes].into_iter().flatten();
        let not_accounted = sides.map(|hops| hops.not_accounted()).fold(0.0, f64::max);
        let more_clients = more_clients(results, direction, settings, metric);
        let more = |found: &MoreClients| {
            let better = if metric == Metric::Iops { Finding::More } else { Finding::Less };
            found.ratio.finding == better
        };
        let limit = if means.client_thread_percent >= SATURATED_PERCENT
            || more_clients.as_ref().is_some_and(more)
        {
            Limit::Client
        } else if means.cpu.total_percent >= SATURATED_PERCENT {
            Limit::Cpu
        } else {
            hop.filter(|hop| hop.share > not_accounted)
                .map_or(Limit::NotKnown, |hop| Limit::of(hop.part))
        };
        Some(Plateau {
            at,
            limit,
            client_thread_percent: means.client_thread_percent,
            cpu_percent: means.cpu.total_percent,
            osd_cpu_percent: means.cpu.osd_percent,
            hop,
            more_clients,
        })
    }

    /// The plateau in a sentence; `along` is what the axis counts.
    pub(super) fn sentence(&self, along: &str) -> String {
        let Plateau {
            at,
            limit,
            client_thread_percent,
            cpu_percent,
            osd_cpu_percent,
            hop,
            more_clients,
        } = self;
        let hop = hop.map(|hop| format!(", largest hop {hop}")).unwrap_or_default();
        let more = more_clients.as_ref().map(|MoreClients { clients, ratio }| {
            format!("; {clients} clients there have {ratio} of what fewer have")
        });
        format!(
            "At {at} {along} the limit was {}: the client's busiest thread had {client_thread_percent:.0} % of a processor, all processors were busy for {cpu_percent:.0} %, with the OSDs {osd_cpu_percent:.0} %{hop}{}.",
            limit.title(),
            more.unwrap_or_default()
        )
    }
}

/// The same settings with the largest number of clients. None unless this is more than the settings
/// have, and was measured in all of them.
fn more_clients(
    results: &Results,
    direction: &Direction,
    settings: &[Setting],
    metric: Metric,
) -> Option<MoreClients> {
    let here = settings.iter().map(|setting| setting.clients).max()?;
    let measured = stats::settings(results, &direction.workload);
    let clients =
        measured.iter().map(|setting| setting.clients).filter(|clients| *clients > here).max()?;
    let there: Vec<Setting> =
        settings.iter().map(|setting| Setting { clients, ..setting.clone() }).collect();
    if !there.iter().all(|setting| measured.contains(setting)) {
        return None;
    }
    let stretch = Stretch { from: settings, to: &there, intervals: 1 };
    let ratio = stats::change(results, &direction.placement, None, stretch, metric);
    ratio.ratio.is_some().then_some(MoreClients { clients, ratio })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::hops::Hop;
    use crate::suite::{Along, Axis};
    use crate::synthetic;
    use crate::verdict::verdict;

    /// One, four and eight OSDs, which do no more from four on; four clients get `four` times as
    /// much as one client.
    fn results(four: f64, change: fn(&mut Run)) -> Results {
        let mut results = synthetic::empty();
        results.machine.cpus = 16;
        results.suite.directions.truncate(1);
        let direction = &mut results.suite.directions[0];
        direction.workload = "4k-randwrite".into();
        (direction.placement, direction.against, direction.expect) = ("a".into(), None, None);
        direction.clients = Some(1);
        direction.axis = Some(Axis { along: Along::Osds, trend: None, plateau_beyond: Some(4) });
        for (disks, iops) in [(1, 100.0), (4, 300.0), (8, 303.0)] {
            for clients in [1, 4] {
                for repeat in 1..=3 {
                    let times = if clients == 4 { four } else { 1.0 };
                    let spread = 1.0 + f64::from(repeat) / 100.0;
                    let mut run =
                        synthetic::run("a", "4k-randwrite", 16, repeat, iops * times * spread);
                    (run.cell.disks, run.cell.clients) = (disks, clients);
                    run.testbed += 100 * disks;
                    run.reads = None;
                    change(&mut run);
                    results.runs.push(run);
                }
            }
        }
        results
    }

    /// The factor for four clients, the change in each run, and the limit that is to be found.
    type Case = (f64, fn(&mut Run), Limit);

    fn plateau(four: f64, change: fn(&mut Run)) -> (Plateau, String) {
        let found = verdict(&results(four, change)).directions.remove(0);
        (found.course.and_then(|course| course.plateau).expect("a plateau"), found.evidence)
    }

    #[test]
    fn a_plateau_is_that_of_what_was_busiest() {
        let busy =
            |run: &mut Run| run.samples.iter_mut().for_each(|sample| sample.busy_percent = 99.0);
        let thread = |run: &mut Run| {
            run.samples.iter_mut().for_each(|sample| sample.busiest_client_percent = 98.0)
        };
        let queue = |run: &mut Run| {
            let mean_us = run.figures.mean_us;
            run.counted.stages.iter_mut().for_each(|stage| {
                stage.mean_us = mean_us
                    * if matches!(stage.hop, Hop::OsdQueue | Hop::OsdWrite) { 0.9 } else { 0.0 };
            });
        };
        let nobody = |run: &mut Run| run.counted.stages.clear();
        let cases: [Case; 6] = [
            (1.0, busy, Limit::Cpu),
            (1.0, thread, Limit::Client),
            (1.6, |_| {}, Limit::Client),
            (1.0, |_| {}, Limit::Disks),
            (1.0, queue, Limit::Osds),
            (1.0, nobody, Limit::NotKnown),
        ];
        for (four, change, limit) in cases {
            let (found, evidence) = plateau(four, change);
            assert_eq!((found.at, found.limit), (4, limit), "{evidence}");
            assert!(
                evidence.contains(&format!("At 4 OSDs the limit was {}", limit.title())),
                "{evidence}"
            );
            let more = found.more_clients.expect("four clients were measured");
            assert_eq!(more.clients, 4);
            assert!((more.ratio.ratio.expect("a ratio").value - four).abs() < 1e-9, "{evidence}");
        }
    }

    #[test]
    fn one_client_alone_is_followed_where_the_claim_is_about_one() {
        let found = verdict(&results(1.6, |_| {})).directions.remove(0);
        let figures: Vec<u32> = found
            .course
            .expect("a course")
            .points
            .iter()
            .map(|point| point.figure.round() as u32)
            .collect();
        assert_eq!(figures, [102, 306, 309], "not the mean over one and four clients");
    }

    #[test]
    fn without_samples_nothing_is_said_of_what_was_busy() {
        let found = verdict(&results(1.0, |run| run.samples.clear())).directions.remove(0);
        assert!(!found.evidence.contains("the limit was"), "{}", found.evidence);
    }
}
