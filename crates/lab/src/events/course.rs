//! Course of an event: what clients got in each window, for how long a client got nothing, and when
//! the cluster was clean again.

use std::collections::BTreeMap;

use super::client::{Asked, Client};
use crate::results::{EventWindow, Recovery, Scrub};
use tidepool_cluster::ceph::Health;

/// The requests of all clients that were due in a window. Its beginning and end are in seconds
/// since the beginning of the load. The event happened at `event_s`.
pub(crate) fn window(
    clients: &[Client],
    (begin_s, end_s): (f64, f64),
    event_s: f64,
) -> EventWindow {
    let all = clients.iter().flat_map(|client| &client.asked);
    let due: Vec<&Asked> = all.filter(|asked| (begin_s..end_s).contains(&asked.due_s)).collect();
    let answered = due.iter().filter(|asked| !asked.failed);
    let mut times_us: Vec<f64> = answered
        .filter_map(|asked| Some((asked.answered_s? - asked.due_s).max(0.0) * 1e6))
        .collect();
    times_us.sort_by(f64::total_cmp);
    let part = |part: f64| percentile(&times_us, due.len(), part);
    EventWindow {
        begin_s: begin_s - event_s,
        end_s: end_s - event_s,
        due: due.len() as u64,
        failed: due.iter().filter(|asked| asked.failed).count() as u64,
        unanswered: due.iter().filter(|asked| asked.answered_s.is_none()).count() as u64,
        p50_us: part(0.5),
        p99_us: part(0.99),
        p999_us: part(0.999),
        longest_us: times_us.last().copied(),
    }
}

/// The time within which this part of all due requests was answered without an error. `None` if
/// that part was not answered, or if fewer requests were due than 1 / (1 - `part`).
fn percentile(times_us: &[f64], due: usize, part: f64) -> Option<f64> {
    let least = (1.0 / (1.0 - part)).round() as usize;
    let wanted = (due as f64 * part).ceil() as usize;
    if due < least { None } else { times_us.get(wanted.max(1) - 1).copied() }
}

/// Longest time between two moments in which one client got no answer, or only errors.
pub(crate) fn gap(clients: &[Client], (from_s, to_s): (f64, f64)) -> f64 {
    let of = |client: &Client| {
        let good =
            client.asked.iter().filter(|asked| !asked.failed).filter_map(|asked| asked.answered_s);
        let mut moments: Vec<f64> = good.filter(|moment| (from_s..to_s).contains(moment)).collect();
        moments.extend([from_s, to_s]);
        moments.sort_by(f64::total_cmp);
        moments.windows(2).map(|two| two[1] - two[0]).fold(0.0, f64::max)
    };
    clients.iter().map(of).fold(0.0, f64::max)
}

/// Whether and when a cluster was clean again, from its reported health. Times are in seconds from
/// the event on.
pub(crate) fn recovery(said: &[(f64, Health)], back_s: Option<f64>, watched_s: f64) -> Recovery {
    let since: Vec<&(f64, Health)> = said.iter().filter(|(at_s, _)| *at_s >= 0.0).collect();
    let left = since.iter().find(|at| !at.1.is_clean()).map(|at| at.0);
    let last = since.iter().rposition(|at| !at.1.is_clean());
    let again = last.and_then(|last| since.get(last + 1)).map(|at| at.0);
    Recovery {
        left_clean_s: left,
        clean_s: again,
        back_s,
        watched_s,
        not_known: since.is_empty().then(|| "the monitor has told nothing since".to_string()),
    }
}

/// What was scrubbed since `before`, from the reported times.
pub(crate) fn scrub(
    before: &BTreeMap<String, String>,
    said: &[(f64, BTreeMap<String, String>)],
) -> Scrub {
    let scrubbed = |now: &BTreeMap<String, String>| {
        let is_new =
            |(group, stamp): &(&String, &String)| now.get(*group).is_some_and(|at| at != *stamp);
        before.iter().filter(is_new).count()
    };
    let all = |now: &BTreeMap<String, String>| !before.is_empty() && scrubbed(now) == before.len();
    Scrub {
        groups: before.len() as u64,
        scrubbed: said.last().map_or(0, |(_, now)| scrubbed(now)) as u64,
        finished_s: said.iter().find(|(_, now)| all(now)).map(|(at_s, _)| *at_s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A client with a request every tenth of a second. `took` is its answer time.
    fn client(seconds: u32, took: impl Fn(f64) -> (Option<f64>, bool)) -> Client {
        let asked = (0..seconds * 10).map(|number| {
            let due_s = f64::from(number) / 10.0;
            let (took_s, failed) = took(due_s);
            Asked { due_s, answered_s: took_s.map(|took_s| due_s + took_s), failed }
        });
        Client { asked: asked.collect(), regions: Vec::new() }
    }

    #[test]
    fn what_failed_or_was_not_answered_took_longer_than_all_others() {
        // From the tenth second on, one of ten requests fails and one of ten is not answered.
        let took = |due_s: f64| match ((due_s * 10.0).round() as u32 % 10, due_s >= 10.0) {
            (3, true) => (Some(0.001), true),
            (7, true) => (None, false),
            _ => (Some(0.005), false),
        };
        let clients = [client(20, took)];
        let before = window(&clients, (0.0, 10.0), 10.0);
        assert_eq!((before.begin_s, before.end_s, before.due), (-10.0, 0.0, 100));
        assert_eq!((before.failed, before.unanswered, before.answered()), (0, 0, 100));
        assert!(before.p99_us.is_some_and(|us| (us - 5_000.0).abs() < 1.0));
        assert_eq!(before.p999_us, None, "of 100 requests it is chance");
        let at = window(&clients, (10.0, 20.0), 10.0);
        assert_eq!((at.failed, at.unanswered, at.answered()), (10, 10, 80));
        assert!(at.p50_us.is_some_and(|us| (us - 5_000.0).abs() < 1.0));
        assert_eq!(at.p99_us, None, "that many have no answer");
        assert!(at.longest_us.is_some());
        let nothing = window(&clients, (30.0, 40.0), 10.0);
        assert_eq!((nothing.due, nothing.p50_us, nothing.longest_us), (0, None, None));
    }

    #[test]
    fn a_gap_is_that_of_one_client_and_an_error_does_not_end_it() {
        let good = client(20, |_| (Some(0.001), false));
        let stalled = client(20, |due_s| match due_s {
            due_s if (5.0..8.0).contains(&due_s) => (Some(0.001), true),
            due_s if due_s >= 15.0 => (None, false),
            _ => (Some(0.001), false),
        });
        let clients = [good, stalled];
        let near = |found: f64, wanted: f64| (found - wanted).abs() < 0.11;
        assert!(near(gap(&clients, (0.0, 10.0)), 3.1), "{}", gap(&clients, (0.0, 10.0)));
        assert!(near(gap(&clients, (10.0, 20.0)), 5.1), "{}", gap(&clients, (10.0, 20.0)));
        assert!(near(gap(&clients[..1], (0.0, 20.0)), 0.1));
        assert_eq!(gap(&[client(0, |_| (None, false))], (3.0, 9.0)), 6.0, "nothing at all");
    }

    fn health(clean: u64) -> Health {
        Health { groups: 8, clean, ..Health::default() }
    }

    #[test]
    fn a_cluster_is_clean_again_when_it_was_not_and_stays_so() {
        let said = |clean: &[u64]| -> Vec<(f64, Health)> {
            (0u8..)
                .map(|at| f64::from(at) - 1.0)
                .zip(clean.iter().map(|clean| health(*clean)))
                .collect()
        };
        let found = |clean: &[u64]| {
            let found = recovery(&said(clean), None, 9.0);
            (found.left_clean_s, found.clean_s, found.not_known.is_some())
        };
        assert_eq!(found(&[8, 8, 8]), (None, None, false), "it was clean all the time");
        assert_eq!(found(&[8, 8, 5, 6, 8, 8]), (Some(1.0), Some(3.0), false));
        assert_eq!(found(&[8, 8, 5, 8, 7, 8]), (Some(1.0), Some(4.0), false), "it has to stay so");
        assert_eq!(found(&[8, 5, 5]), (Some(0.0), None, false), "not as long as it was watched");
        assert_eq!(found(&[8]), (None, None, true), "what was said before tells nothing");
        assert_eq!(found(&[]), (None, None, true));
    }

    #[test]
    fn a_scrub_has_finished_when_every_group_has_a_new_time() {
        let stamps = |of: [&str; 2]| -> BTreeMap<String, String> {
            ["2.0", "2.1"]
                .into_iter()
                .zip(of)
                .map(|(group, at)| (group.into(), at.into()))
                .collect()
        };
        let before = stamps(["a", "b"]);
        let said =
            [(2.0, stamps(["a", "b"])), (4.0, stamps(["c", "b"])), (6.0, stamps(["c", "d"]))];
        let all = scrub(&before, &said);
        assert_eq!((all.groups, all.scrubbed, all.finished_s), (2, 2, Some(6.0)));
        let half = scrub(&before, &said[..2]);
        assert_eq!((half.scrubbed, half.finished_s), (1, None));
        assert_eq!(scrub(&BTreeMap::new(), &said).finished_s, None);
    }
}
