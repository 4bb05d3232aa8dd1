//! Events under load, in sentences and for programs. Events rank nothing.

use serde::Serialize;

use crate::results::{EventRun, EventWindow, Results};
use crate::suite::Event;
use crate::words;

/// An event on one cluster.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Happened {
    /// Name of the event in the suite.
    pub event: String,
    /// The placement to which the event happened.
    pub placement: String,
    /// Number of the repeat, from 1.
    pub repeat: u32,
    /// Reasons why the event does not count. Empty if it counts.
    pub invalid: Vec<String>,
    /// Blocks of which a write was acknowledged.
    pub acknowledged: u64,
    /// Acknowledged blocks that lack the newest acknowledged write. None if this is not known, or
    /// no write was acknowledged.
    pub lost: Option<u64>,
    /// Blocks that were acknowledged before the event and again from then on: nothing can be said
    /// of their older content. None where these blocks were not counted.
    pub overwritten: Option<u64>,
    /// Reads of clients that returned neither the newest acknowledged data nor newer data.
    pub wrong_reads: u64,
    /// Number of OSDs that ended by themselves.
    pub osds_ended: usize,
    /// Longest time in which a client got no successful answer, in seconds, from the start of the
    /// event on.
    pub gap_s: f64,
    /// 99th percentiles in microseconds before, at and after the event. None where too many
    /// requests got no good answer, or where there were too few.
    pub p99_us: [Option<f64>; 3],
    /// When all placement groups were clean again, in seconds from the event on. None where they
    /// always were, or did not become clean while the cluster was watched.
    pub clean_s: Option<f64>,
    /// All placement groups stayed clean.
    pub stayed_clean: bool,
}

impl Happened {
    fn of(run: &EventRun) -> Happened {
        let p99 = |window: Option<&EventWindow>| window.and_then(|window| window.p99_us);
        Happened {
            event: run.event.clone(),
            placement: run.cell.placement.clone(),
            repeat: run.repeat,
            invalid: run.invalid.clone(),
            acknowledged: run.acknowledged.blocks,
            lost: run.acknowledged.lost(),
            overwritten: run.acknowledged.overwritten,
            wrong_reads: run.acknowledged.wrong_reads,
            osds_ended: run.cluster.osds_ended.len(),
            gap_s: run.gap_after_s,
            p99_us: [p99(run.before()), p99(run.at()), p99(run.after())],
            clean_s: run.cluster.recovery.clean_s,
            stayed_clean: run.cluster.recovery.left_clean_s.is_none()
                && run.cluster.recovery.not_known.is_none(),
        }
    }
}

/// All events, in the order of the suite.
pub(super) fn happened(results: &Results) -> Vec<Happened> {
    let of_event = |event: &Event| -> Vec<&EventRun> {
        let mut runs: Vec<&EventRun> =
            results.events.iter().filter(|run| run.event == event.name).collect();
        let place = |run: &EventRun| {
            results.suite.placements.iter().position(|name| *name == run.cell.placement)
        };
        runs.sort_by_key(|run| (place(run), run.cell.clone(), run.repeat));
        runs
    };
    results.suite.events.iter().flat_map(of_event).map(Happened::of).collect()
}

/// Sentences about each event: what was lost, of how many blocks nothing certain can be said, and
/// how long clients got no answer. Placements of which no event counts are named.
pub(super) fn sentences(results: &Results) -> Vec<String> {
    let all = happened(results);
    let of = |event: &Event| -> Vec<String> {
        let found: Vec<&Happened> = all.iter().filter(|found| found.event == event.name).collect();
        let counted: Vec<&Happened> =
            found.iter().copied().filter(|found| found.invalid.is_empty()).collect();
        let mut silent: Vec<&str> = results.suite.placements.iter().map(String::as_str).collect();
        silent.retain(|name| event.is_on(&results.suite, name));
        silent.extend(
            placements(&found)
                .into_iter()
                .filter(|name| !silent.contains(name))
                .collect::<Vec<_>>(),
        );
        silent.retain(|name| !counted.iter().any(|found| found.placement == *name));
        let mut parts = losses(&counted);
        if !silent.is_empty() {
            parts.push(format!("no event of {} counts", words::list(&silent)));
        }
        if parts.is_empty() {
            return Vec::new();
        }
        let title = event.kind.title();
        let mut told = vec![format!("When {title}: {}.", parts.join("; "))];
        told.extend(overwritten(&counted).map(|blocks| {
            format!(
                "When {title}, nothing can be said of what blocks had that were acknowledged before and overwritten since: {blocks}."
            )
        }));
        if !counted.is_empty() {
            told.push(format!(
                "The longest time without an answer when {title}: {}.",
                gaps(&counted)
            ));
        }
        told
    };
    results.suite.events.iter().flat_map(of).collect()
}

/// The placements of these events, each once, in their order.
fn placements<'a>(counted: &[&'a Happened]) -> Vec<&'a str> {
    let mut names: Vec<&str> = counted.iter().map(|found| found.placement.as_str()).collect();
    names.dedup();
    names
}

/// What was lost at worst of each placement, and how many reads of its clients returned other data
/// than what was acknowledged.
fn losses(counted: &[&Happened]) -> Vec<String> {
    let (mut safe, mut lost, mut wrong, mut unknown) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for placement in placements(counted) {
        let of: Vec<&Happened> =
            counted.iter().copied().filter(|found| found.placement == placement).collect();
        let is_known = of.iter().all(|found| found.lost.is_some());
        let wrong_reads = of.iter().map(|found| found.wrong_reads).fold(0, u64::saturating_add);
        let worst = of.iter().filter_map(|found| Some((found.lost?, found.acknowledged))).max();
        let loss = worst.filter(|(blocks, _)| *blocks > 0);
        if let Some((blocks, all)) = loss {
            let (blocks, all) = (words::whole(blocks), words::whole(all));
            lost.push(format!("{placement} loses {blocks} of {all} acknowledged blocks"));
        }
        if wrong_reads > 0 {
            let reads = if wrong_reads == 1 { "read" } else { "reads" };
            let count = words::whole(wrong_reads);
            wrong.push(format!(
                "{count} {reads} with {placement} returned something else than what was acknowledged"
            ));
        }
        if !is_known {
            unknown.push(placement);
        }
        if is_known && loss.is_none() && wrong_reads == 0 {
            safe.push(placement);
        }
    }
    let mut parts = Vec::new();
    if !safe.is_empty() {
        parts.push(format!("no acknowledged write is lost with {}", words::list(&safe)));
    }
    parts.extend(lost);
    parts.extend(wrong);
    if !unknown.is_empty() {
        parts.push(format!("of {} it is not known", words::list(&unknown)));
    }
    parts
}

/// For each placement, in words, the largest number of blocks that were overwritten since the
/// event. None if no placement has such blocks.
fn overwritten(counted: &[&Happened]) -> Option<String> {
    let most = |placement: &str| {
        let of = counted.iter().filter(|found| found.placement == placement);
        of.filter_map(|found| Some((found.overwritten?, found.acknowledged))).max()
    };
    let told = placements(counted).into_iter().filter_map(|placement| {
        let (blocks, all) = most(placement).filter(|(blocks, _)| *blocks > 0)?;
        Some(format!("{} of {} with {placement}", words::whole(blocks), words::whole(all)))
    });
    let told: Vec<String> = told.collect();
    (!told.is_empty()).then(|| words::list(&told))
}

/// The longest gap of each placement.
fn gaps(counted: &[&Happened]) -> String {
    let longest = |placement: &str| {
        let of = counted.iter().filter(|found| found.placement == placement);
        of.map(|found| found.gap_s).fold(0.0, f64::max)
    };
    let told = placements(counted)
        .into_iter()
        .map(|placement| format!("{} with {placement}", words::latency(longest(placement) * 1e6)));
    words::list(&told.collect::<Vec<String>>())
}

#[cfg(test)]
mod tests {
    use crate::synthetic;
    use crate::verdict::{Advice, verdict};

    #[test]
    fn what_is_lost_is_told_first_and_what_is_not_known_is_not_called_safe() {
        let results = synthetic::events();
        let found = verdict(&results);
        assert_eq!(
            found.headline,
            "When the SSD dies: no acknowledged write is lost with bluestore-dbwal and host-tidepool-replicated; host-tidepool loses 120 of \
             1,000 acknowledged blocks; of osd-tidepool it is not known; no event of bluestore-colocated, filestore-journal and osd-bcache counts."
        );
        assert_eq!((found.advice, found.standings.rankings.len()), (Advice::NoVerdict, 0));
        assert!(
            found.answer.iter().any(|text| text.contains("12.0 s with bluestore-dbwal")),
            "{:?}",
            found.answer
        );
        assert!(
            found
                .answer
                .iter()
                .any(|text| text.contains("83 of 1,000 with host-tidepool-replicated.")),
            "{:?}",
            found.answer
        );
        assert!(found.events.iter().any(|event| event.stayed_clean && event.clean_s.is_none()));
    }

    #[test]
    fn what_does_not_count_says_nothing_and_is_named() {
        let mut results = synthetic::events();
        results.events.retain(|run| run.cell.placement == "host-tidepool");
        results.events.iter_mut().for_each(|run| run.invalid.push("it was not in place".into()));
        results.suite.placements = vec!["host-tidepool".into()];
        let found = verdict(&results);
        assert_eq!(found.headline, "When the SSD dies: no event of host-tidepool counts.");
        let longest = found.answer.iter().find(|text| text.contains("The longest"));
        assert_eq!(longest, None, "nothing was measured");
    }

    #[test]
    fn where_no_write_was_acknowledged_nothing_is_called_safe() {
        let mut results = synthetic::events();
        for run in &mut results.events {
            (run.acknowledged.writes, run.acknowledged.blocks) = (0, 0);
        }
        let found = verdict(&results);
        for text in found.answer.iter().chain([&found.headline]) {
            assert!(
                !text.contains("no acknowledged write is lost") && !text.contains("loses"),
                "{text}"
            );
        }
        assert!(found.headline.contains("of bluestore-dbwal, "), "{}", found.headline);
        assert!(found.events.iter().all(|event| event.lost.is_none()));
    }

    #[test]
    fn a_placement_whose_clients_read_something_older_is_not_called_safe() {
        let mut results = synthetic::events();
        let is_read =
            |placement: &str| placement == "bluestore-dbwal" || placement == "host-tidepool";
        for run in results.events.iter_mut().filter(|run| is_read(&run.cell.placement)) {
            run.acknowledged.wrong_reads = if run.event == "ssd-dies" { 3 } else { 1 };
        }
        let found = verdict(&results);
        assert!(
            found.headline.contains("no acknowledged write is lost with host-tidepool-replicated;"),
            "{}",
            found.headline
        );
        for wanted in [
            "host-tidepool loses 120 of 1,000 acknowledged blocks",
            "3 reads with bluestore-dbwal returned something else than what was acknowledged",
            "3 reads with host-tidepool returned something else",
        ] {
            assert!(found.headline.contains(wanted), "{}", found.headline);
        }
        let out: Vec<&String> =
            found.answer.iter().filter(|text| text.contains("goes out")).collect();
        assert!(
            out.iter().any(|text| text.contains("1 read with host-tidepool returned")),
            "{out:?}"
        );
        assert!(!out.iter().any(|text| text.contains("no acknowledged write is lost")), "{out:?}");
        let json = serde_json::to_value(&found).expect("plain data");
        let of_event = json["events"].as_array().expect("events").iter();
        assert_eq!(of_event.filter(|event| event["wrong_reads"] == 3).count(), 2);
    }

    #[test]
    fn events_beside_measurements_change_no_verdict() {
        let mut results = synthetic::which_side();
        let before = verdict(&results);
        let events = synthetic::events();
        (results.suite.events, results.events) =
            (events.suite.events.clone(), events.events.clone());
        let after = verdict(&results);
        assert_eq!(
            (&after.headline, &after.standings.rankings),
            (&before.headline, &before.standings.rankings)
        );
        assert!(
            after.answer.starts_with(&before.answer) && after.answer.len() > before.answer.len()
        );
    }
}
