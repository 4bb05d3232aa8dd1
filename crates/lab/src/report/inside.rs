//! Processor time of guests with clients, as the guests' own kernels report it. A client that waits
//! for its disk shows as iowait there.

use maud::{Markup, html};

use super::Page;
use crate::results::{Results, Run};
use crate::stats::{self, Setting, objections};
use crate::words;

/// Processor time of guests, in percent of the time of their processors.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spent {
    busy_percent: f64,
    iowait_percent: f64,
}

impl Spent {
    /// Processor time in a run. None where no client was in a guest.
    fn of(run: &Run) -> Option<Spent> {
        let counted = run.counted.placement.as_object()?;
        let us = |name: &str| counted.values().find_map(|counters| counters.get(name)?.as_f64());
        let all_us = us("cpu_us").filter(|all_us| *all_us > 0.0)?;
        let percent = |name: &str| Some(us(name)? / all_us * 100.0);
        Some(Spent {
            busy_percent: percent("cpu_busy_us")?,
            iowait_percent: percent("cpu_iowait_us")?,
        })
    }

    /// The mean over several runs. None if there are none.
    fn mean(all: &[Spent]) -> Option<Spent> {
        let mean = |of: fn(&Spent) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
        (!all.is_empty()).then(|| Spent {
            busy_percent: mean(|spent| spent.busy_percent),
            iowait_percent: mean(|spent| spent.iowait_percent),
        })
    }
}

/// Clients were in guests in at least one run.
pub(super) fn are_there(results: &Results) -> bool {
    results.runs.iter().any(|run| Spent::of(run).is_some())
}

/// One row for each placement and load.
pub(super) fn section(page: &Page<'_>) -> Markup {
    let rows = page.results.suite.workloads.iter().flat_map(|workload| {
        let settings = stats::settings(page.results, &workload.name);
        settings.into_iter().flat_map(move |setting| {
            let row = |placement: &&'_ str| {
                Some((
                    workload.name.clone(),
                    setting.clone(),
                    placement.to_string(),
                    spent(page, placement, &setting)?,
                ))
            };
            page.placements.iter().filter_map(row).collect::<Vec<_>>()
        })
    });
    html! {
        p {
            "Means of the runs that count, over the window of all other counters. A guest waits (iowait) while its processor has nothing to do and a request "
            "to its disk is on its way. It is emulated, without help from the processor (TCG): what it is busy with takes many times as long as in a guest with that, "
            "so that no figure from a guest is more than a lower bound, and the bound is guest-null."
        }
        div.scroll { table {
            thead { tr {
                th { "workload" } th { "placement" } th.n { "depth" } th.n { "clients" } th.n { "busy, %" } th.n { "iowait, %" }
            } }
            tbody {
                @for (workload, setting, placement, spent) in rows {
                    tr {
                        td { (workload) } td.name { (placement) } td.n { (setting.depth) } td.n { (setting.clients) }
                        td.n { (words::number(spent.busy_percent)) } td.n { (words::number(spent.iowait_percent)) }
                    }
                }
            }
        } }
    }
}

fn spent(page: &Page<'_>, placement: &str, setting: &Setting) -> Option<Spent> {
    let runs = stats::runs(page.results, placement, setting);
    let counted = runs.into_iter().filter(|run| objections(run).is_empty());
    Spent::mean(&counted.filter_map(Spent::of).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::synthetic;

    #[test]
    fn a_guests_wait_is_a_part_of_its_processors_time() {
        let mut run = synthetic::run("bluestore-colocated", "4k", 1, 1, 100.0);
        assert_eq!(Spent::of(&run), None, "no guest");
        run.counted.placement = json!({ "guest": { "reads": 7, "cpu_us": 8_000_000, "cpu_busy_us": 2_000_000, "cpu_iowait_us": 5_000_000 } });
        let spent = Spent::of(&run).expect("a guest");
        assert_eq!(spent, Spent { busy_percent: 25.0, iowait_percent: 62.5 });
        let other = Spent { busy_percent: 75.0, iowait_percent: 12.5 };
        let mean = Spent::mean(&[spent, other]).expect("two");
        assert_eq!(mean, Spent { busy_percent: 50.0, iowait_percent: 37.5 });
        run.counted.placement =
            json!({ "guest": { "cpu_us": 0, "cpu_busy_us": 0, "cpu_iowait_us": 0 } });
        assert_eq!((Spent::of(&run), Spent::mean(&[])), (None, None));
    }
}
