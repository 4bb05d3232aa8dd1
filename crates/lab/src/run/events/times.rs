//! When something happens under load, and the windows and seconds before and since.

use crate::cluster::Health;
use crate::events::client::Client;
use crate::events::course;
use crate::results::{EventPoint, EventWindow};
use crate::suite::{Event, Suite};

/// What happens later than this after it was due is not what was meant, in seconds.
const LATE_S_MAX: f64 = 1.0;
/// What takes longer to happen is none either, in seconds.
const TOOK_S_MAX: f64 = 10.0;
/// Clients go on for so long after the time that was planned, in seconds, since the last window may end later.
pub(super) const SLACK_S: f64 = LATE_S_MAX + TOOK_S_MAX;

/// Times of an event, in seconds since the begin of the load. Windows before it end when it begins to happen, those since begin when it
/// has happened: what happens takes commands, and their time is in no window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Times {
    window_s: f64,
    windows_before: u32,
    windows_after: u32,
    pub(super) back_after: Option<u32>,
    /// When it is due.
    pub(super) due: f64,
    /// When it began to happen; when it is due, as long as it has not.
    pub(super) began: f64,
    /// When it had happened. The other times of results are counted from here.
    pub(super) ended: f64,
}

impl Times {
    pub(super) fn of(suite: &Suite, event: &Event) -> Times {
        let due = f64::from(suite.ramp_s) + f64::from(event.before_s(suite));
        Times {
            window_s: f64::from(suite.seconds),
            windows_before: event.windows_before,
            windows_after: event.windows_after,
            back_after: event.back_after,
            due,
            began: due,
            ended: due,
        }
    }

    /// Of the first window.
    pub(super) fn begin(&self) -> f64 {
        self.began - self.window_s * f64::from(self.windows_before)
    }

    pub(super) fn back(&self) -> Option<f64> {
        self.back_after.map(|windows| self.ended + self.window_s * f64::from(windows))
    }

    /// Of the last window.
    pub(super) fn end(&self) -> f64 {
        self.ended + self.window_s * f64::from(self.windows_after)
    }

    /// Why it happened at another time than was meant.
    pub(super) fn fault(&self) -> Option<String> {
        let (late_s, took_s) = (self.began - self.due, self.ended - self.began);
        if late_s > LATE_S_MAX {
            return Some(format!(
                "it happened {late_s:.1} s after it was due, at most {LATE_S_MAX:.0} s count"
            ));
        }
        (took_s > TOOK_S_MAX)
            .then(|| format!("it took {took_s:.1} s to happen, at most {TOOK_S_MAX:.0} s count"))
    }
}

/// All windows, before the event and from then on.
pub(super) fn windows(clients: &[Client], times: Times) -> Vec<EventWindow> {
    let row = |from: f64, count: u32| {
        (0..count).map(move |number| {
            let begin = |number: u32| from + f64::from(number) * times.window_s;
            course::window(clients, (begin(number), begin(number + 1)), times.ended)
        })
    };
    row(times.begin(), times.windows_before).chain(row(times.ended, times.windows_after)).collect()
}

/// Second by second, with what the cluster has said of itself last. A second begins when the event has happened.
pub(super) fn points(clients: &[Client], health: &[(f64, Health)], times: Times) -> Vec<EventPoint> {
    // A little more than is needed, since differences of times are a little less than they were meant to be.
    let before = (times.ended - times.begin() + 1e-6).floor() as i32;
    let after = (times.end() - times.ended).round() as i32;
    let point = |second: i32| {
        let begin = times.ended + f64::from(second);
        let clients = course::window(clients, (begin, begin + 1.0), times.ended);
        let mut said = health.iter().rev();
        let fresh = |at_s: f64| at_s < clients.end_s && at_s >= clients.end_s - 3.0;
        let health = said.find(|(at_s, _)| fresh(*at_s)).map(|(_, health)| *health);
        EventPoint { clients, health }
    };
    (-before..after).map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::client::Asked;
    use crate::suite::Happening;

    #[test]
    fn windows_meet_at_the_event() {
        let suite = Suite::find("faults").expect("it comes with the program").quick();
        let event = suite.events.iter().find(|event| event.kind == Happening::OsdOut).expect("one");
        let times = Times::of(&suite, event);
        assert_eq!((times.begin(), times.due, times.back(), times.end()), (3.0, 13.0, Some(43.0), 83.0));
        assert_eq!(f64::from(event.load_s(&suite)), times.end());
        let windows = windows(&[], times);
        assert_eq!(windows.len(), 8);
        assert_eq!((windows[0].begin_s, windows[0].end_s, windows[1].begin_s), (-10.0, 0.0, 0.0));
        let points = points(&[], &[(0.4, Health { osds: 3, ..Health::default() })], times);
        assert_eq!(points.len(), 80);
        let told: Vec<bool> = points[8..16].iter().map(|point| point.health.is_some()).collect();
        assert_eq!(told, [false, false, true, true, true, false, false, false], "old news are none");
    }

    #[test]
    fn windows_are_counted_from_when_it_happened_and_not_from_when_it_was_due() {
        let suite = Suite::find("faults").expect("it comes with the program").quick();
        let event = suite.events.iter().find(|event| event.kind == Happening::OsdOut).expect("one");
        let due = Times::of(&suite, event);
        let times = Times { began: 13.5, ended: 15.75, ..due };
        assert_eq!((times.begin(), times.back(), times.end()), (3.5, Some(45.75), 85.75));
        assert_eq!(times.fault(), None);
        // A request is due each quarter of a second; none is answered from when it begins to happen until it has.
        let answered = |due_s: f64| (!(13.5..15.75).contains(&due_s)).then_some(due_s + 0.001);
        let all = (0..400).map(|number| f64::from(number) / 4.0);
        let asked =
            all.map(|due_s| Asked { due_s, answered_s: answered(due_s), failed: false }).collect::<Vec<_>>();
        let clients = [Client { asked, regions: Vec::new() }];
        let windows = windows(&clients, times);
        assert_eq!(windows.len(), 8);
        assert_eq!((windows[0].begin_s, windows[0].end_s), (-12.25, -2.25));
        assert_eq!((windows[1].begin_s, windows[1].end_s, windows[7].end_s), (0.0, 10.0, 70.0));
        assert!(windows.iter().all(|window| (window.due, window.unanswered) == (40, 0)), "{windows:?}");
        let points = points(&clients, &[], times);
        assert_eq!((points.len(), points[12].clients.begin_s), (82, 0.0));
        assert_eq!(points.iter().map(|point| point.clients.unanswered).sum::<u64>(), 9, "none is left out");
    }

    #[test]
    fn an_event_that_came_too_late_or_took_too_long_does_not_count() {
        let suite = Suite::find("faults").expect("it comes with the program").quick();
        let due = Times::of(&suite, &suite.events[0]);
        let fault = |late_s: f64, took_s: f64| {
            let began = due.due + late_s;
            Times { began, ended: began + took_s, ..due }.fault()
        };
        assert_eq!((fault(0.0, 0.0), fault(0.9, 9.0)), (None, None));
        let late = fault(1.5, 0.0).expect("it is late");
        assert!(late.contains("1.5 s after it was due"), "{late}");
        let long = fault(0.5, 11.0).expect("it took long");
        assert!(long.contains("took 11.0 s"), "{long}");
    }
}
