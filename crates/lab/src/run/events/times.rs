//! Times of an event, and the windows and seconds before and after it.

use crate::events::client::Client;
use crate::events::course;
use crate::results::{EventPoint, EventWindow};
use crate::suite::{Event, Suite};
use tidepool_cluster::ceph::Health;

/// An event that begins more than this many seconds after it was due does not count.
const LATE_S_MAX: f64 = 1.0;
/// An event that takes more than this many seconds to happen does not count.
const TOOK_S_MAX: f64 = 10.0;
/// Seconds that clients run beyond the planned end, because the last window may end later.
pub(super) const SLACK_S: f64 = LATE_S_MAX + TOOK_S_MAX;

/// Times of an event, in seconds since the beginning of the load. Windows before the event end when
/// the event begins. Windows after the event begin when the event has happened. The time of the
/// event's commands is in no window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Times {
    window_s: f64,
    windows_before: u32,
    windows_after: u32,
    pub(super) back_after: Option<u32>,
    /// When the event is due.
    pub(super) due: f64,
    /// When the event began. Equal to `due` until then.
    pub(super) began: f64,
    /// When the event had happened. Times in the results are counted from here.
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

    /// Beginning of the first window.
    pub(super) fn begin(&self) -> f64 {
        self.began - self.window_s * f64::from(self.windows_before)
    }

    pub(super) fn back(&self) -> Option<f64> {
        self.back_after.map(|windows| self.ended + self.window_s * f64::from(windows))
    }

    /// End of the last window.
    pub(super) fn end(&self) -> f64 {
        self.ended + self.window_s * f64::from(self.windows_after)
    }

    /// Why the event does not count: it began too late or took too long. `None` if it counts.
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

/// All windows, before and after the event.
pub(super) fn windows(clients: &[Client], times: Times) -> Vec<EventWindow> {
    let row = |from: f64, count: u32| {
        (0..count).map(move |number| {
            let begin = |number: u32| from + f64::from(number) * times.window_s;
            course::window(clients, (begin(number), begin(number + 1)), times.ended)
        })
    };
    row(times.begin(), times.windows_before).chain(row(times.ended, times.windows_after)).collect()
}

/// One point for each second, with the last health that the cluster reported in the 3 s before the
/// second's end, if it did. Seconds are counted from when the event had happened.
pub(super) fn points(
    clients: &[Client],
    health: &[(f64, Health)],
    times: Times,
) -> Vec<EventPoint> {
    // Slightly more than needed, because differences of times may be slightly too small.
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
        assert_eq!(
            (times.begin(), times.due, times.back(), times.end()),
            (3.0, 13.0, Some(43.0), 83.0)
        );
        assert_eq!(f64::from(event.load_s(&suite)), times.end());
        let windows = windows(&[], times);
        assert_eq!(windows.len(), 8);
        assert_eq!((windows[0].begin_s, windows[0].end_s, windows[1].begin_s), (-10.0, 0.0, 0.0));
        let points = points(&[], &[(0.4, Health { osds: 3, ..Health::default() })], times);
        assert_eq!(points.len(), 80);
        let told: Vec<bool> = points[8..16].iter().map(|point| point.health.is_some()).collect();
        assert_eq!(
            told,
            [false, false, true, true, true, false, false, false],
            "old news are none"
        );
    }

    #[test]
    fn windows_are_counted_from_when_it_happened_and_not_from_when_it_was_due() {
        let suite = Suite::find("faults").expect("it comes with the program").quick();
        let event = suite.events.iter().find(|event| event.kind == Happening::OsdOut).expect("one");
        let due = Times::of(&suite, event);
        let times = Times { began: 13.5, ended: 15.75, ..due };
        assert_eq!((times.begin(), times.back(), times.end()), (3.5, Some(45.75), 85.75));
        assert_eq!(times.fault(), None);
        // A request is due each quarter of a second. None is answered while the event happens.
        let answered = |due_s: f64| (!(13.5..15.75).contains(&due_s)).then_some(due_s + 0.001);
        let all = (0..400).map(|number| f64::from(number) / 4.0);
        let asked = all
            .map(|due_s| Asked { due_s, answered_s: answered(due_s), failed: false })
            .collect::<Vec<_>>();
        let clients = [Client { asked, regions: Vec::new() }];
        let windows = windows(&clients, times);
        assert_eq!(windows.len(), 8);
        assert_eq!((windows[0].begin_s, windows[0].end_s), (-12.25, -2.25));
        assert_eq!((windows[1].begin_s, windows[1].end_s, windows[7].end_s), (0.0, 10.0, 70.0));
        assert!(
            windows.iter().all(|window| (window.due, window.unanswered) == (40, 0)),
            "{windows:?}"
        );
        let points = points(&clients, &[], times);
        assert_eq!((points.len(), points[12].clients.begin_s), (82, 0.0));
        assert_eq!(
            points.iter().map(|point| point.clients.unanswered).sum::<u64>(),
            9,
            "none is left out"
        );
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
