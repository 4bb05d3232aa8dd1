//! Output of `rados bench --show-time`, and the window cut from it.
//!
//! rados bench has no ramp. But each second it prints how many requests have finished, and their
//! mean latency so far. So the work between any two of these moments is known. Between two lines, a
//! second apart, requests are taken to finish at an even pace.

use jiff::Timestamp;

/// Shortest window with figures, in seconds.
const WINDOW_MIN_S: f64 = 0.5;
/// How much shorter than a second the last second of a window may be, in seconds.
const SECOND_SHORT_S: f64 = 0.1;

/// What had finished by a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Point {
    /// Seconds since 1970.
    at_s: f64,
    finished: f64,
    /// Sum of the latencies of all finished requests, in seconds.
    total_s: f64,
}

/// Output of an instance.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Said {
    /// In the order of time, from the beginning of the instance; the last point is its end.
    points: Vec<Point>,
    /// Requests that finished.
    pub(super) finished: u64,
    /// Longest latency in seconds, of the whole instance.
    pub(super) max_s: f64,
    /// Shortest latency in seconds, of the whole instance.
    pub(super) min_s: f64,
}

/// Work of an instance in a window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Cut {
    /// Length in seconds.
    pub(super) seconds: f64,
    /// Requests that finished in the window.
    pub(super) finished: f64,
    /// Sum of the latencies of these requests, in seconds.
    pub(super) total_s: f64,
}

impl Cut {
    /// Requests per second.
    pub(super) fn per_s(self) -> f64 {
        self.finished / self.seconds
    }
}

/// When an instance began, in seconds since 1970; `None` until it has printed that.
pub(super) fn begin_s(text: &str) -> Option<f64> {
    // A line without its end may hold half a number.
    text.split_inclusive('\n')
        .filter(|line| line.ends_with('\n'))
        .find_map(point)
        .map(|point| point.at_s)
}

/// Reads the output of an instance that has ended. `None` if it has not ended.
pub(super) fn read(text: &str) -> Option<Said> {
    let mut points: Vec<Point> = text.lines().filter_map(point).collect();
    let begin_s = points.first()?.at_s;
    let finished = value(text, "s made:")?;
    let end = Point {
        at_s: begin_s + value(text, "Total time run:")?,
        finished,
        total_s: finished * value(text, "Average Latency(s):")?,
    };
    // A line for a second may be printed when the instance has ended but its totals are not printed
    // yet.
    points.retain(|point| point.at_s < end.at_s);
    points.push(end);
    let (max_s, min_s) = (value(text, "Max latency(s):")?, value(text, "Min latency(s):")?);
    let forward =
        |pair: &[Point]| pair[0].at_s <= pair[1].at_s && pair[0].finished <= pair[1].finished;
    points.windows(2).all(forward).then_some(Said {
        points,
        finished: finished as u64,
        max_s,
        min_s,
    })
}

/// Reads the line of one second: time, second, requests in flight, started and finished, two rates,
/// last latency, mean latency of all.
fn point(line: &str) -> Option<Point> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let [time, second, in_flight, started, finished, _, _, _, mean_s] = fields[..] else {
        return None;
    };
    for number in [second, in_flight, started] {
        number.parse::<u64>().ok()?;
    }
    let finished = finished.parse::<u64>().ok()? as f64;
    let mean_s = mean_s.parse::<f64>().ok().filter(|mean| mean.is_finite() && *mean >= 0.0)?;
    let time = Timestamp::strptime("%Y-%m-%dT%H:%M:%S%.f%z", time).ok()?;
    Some(Point { at_s: time.as_microsecond() as f64 / 1e6, finished, total_s: mean_s * finished })
}

/// The number after these words in the output.
fn value(text: &str, words: &str) -> Option<f64> {
    let after = text.lines().find_map(|line| line.split_once(words))?.1;
    after.trim().parse::<f64>().ok().filter(|value| value.is_finite() && *value >= 0.0)
}

impl Said {
    /// The state at a moment, interpolated between two lines.
    fn until(&self, at_s: f64) -> Point {
        let next =
            self.points.partition_point(|point| point.at_s < at_s).min(self.points.len() - 1);
        let (before, after) = (self.points[next.saturating_sub(1)], self.points[next]);
        let span_s = after.at_s - before.at_s;
        let part = if span_s > 0.0 { ((at_s - before.at_s) / span_s).clamp(0.0, 1.0) } else { 1.0 };
        let between = |one: f64, other: f64| one + (other - one) * part;
        Point {
            at_s,
            finished: between(before.finished, after.finished),
            total_s: between(before.total_s, after.total_s),
        }
    }

    fn between(&self, begin_s: f64, end_s: f64) -> Cut {
        let (begin, end) = (self.until(begin_s), self.until(end_s));
        Cut {
            seconds: end_s - begin_s,
            finished: end.finished - begin.finished,
            total_s: end.total_s - begin.total_s,
        }
    }

    /// When the instance had ended, in seconds since 1970.
    fn end_s(&self) -> f64 {
        self.points[self.points.len() - 1].at_s
    }

    /// Its work in the window, or until its end if that is earlier. `None` if nothing finished, or
    /// less than [`WINDOW_MIN_S`] of the window is left.
    pub(super) fn cut(&self, begin_s: f64, end_s: f64) -> Option<Cut> {
        let cut = self.between(begin_s, end_s.min(self.end_s()));
        (cut.seconds >= WINDOW_MIN_S && cut.finished > 0.0).then_some(cut)
    }

    /// Its work in `count` equal parts of the window. `None` if it ended before the window did.
    pub(super) fn parts(&self, begin_s: f64, end_s: f64, count: usize) -> Option<Vec<Cut>> {
        let part_s = (end_s - begin_s) / count as f64;
        let of = |part: usize| {
            let from_s = begin_s + part as f64 * part_s;
            self.between(from_s, from_s + part_s)
        };
        (end_s <= self.end_s()).then(|| (0..count).map(of).collect())
    }

    /// Its work in each second of the window in which it was at work.
    pub(super) fn seconds(&self, begin_s: f64, end_s: f64) -> Vec<Cut> {
        let end_s = end_s.min(self.end_s());
        let count = (end_s - begin_s + SECOND_SHORT_S).floor().max(0.0) as u64;
        let of = |second: u64| {
            let from_s = begin_s + second as f64;
            self.between(from_s, (from_s + 1.0).min(end_s))
        };
        (0..count).map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of two real runs on a cluster of two emulated disks. One wrote 4 MiB objects, the
    /// other read 4 KiB objects in order until there were no more.
    const WRITE: &str = include_str!("said/write.txt");
    const SEQ: &str = include_str!("said/seq.txt");

    /// The output of an instance whose count of finished requests is given for each second. Each
    /// request takes a tenth of a second.
    fn said(finished: &[u64], end_s: f64) -> Said {
        let mut text =
            "2026-11-28T10:00:00.500000+0000 Maintaining 16 concurrent writes of 4096 bytes\n"
                .to_string();
        for (second, finished) in finished.iter().enumerate() {
            let (started, second_s) = (finished + 16, second + 1);
            text += &format!(
                "2026-11-28T10:00:{second_s:02}.000000+0000 {second:5}      16 {started:9} {finished:9}   1.5   1.5         0.1         0.1\n"
            );
        }
        let all = finished.last().expect("a second") + 16;
        text += &format!(
            "2026-11-28T10:00:59.000000+0000 Total time run:         {end_s}\nTotal writes made:      {all}\n\
             Average Latency(s):     0.1\nMax latency(s):         0.9\nMin latency(s):         0.01\n"
        );
        read(&text).expect("it has ended")
    }

    #[test]
    fn a_window_is_what_lies_between_two_moments() {
        let said = said(&[0, 100, 300, 600, 1_000], 4.5);
        let begin_s = said.points[0].at_s;
        let cut = |from: f64, to: f64| said.cut(begin_s + from, begin_s + to);
        let close = |cut: Option<Cut>, seconds: f64, finished: f64| {
            let cut = cut.expect("it was at work");
            let near = |one: f64, other: f64| (one - other).abs() < 1e-3;
            assert!(near(cut.seconds, seconds) && near(cut.finished, finished), "{cut:?}");
            assert!(near(cut.total_s, finished * 0.1), "{cut:?}");
        };
        close(cut(1.0, 3.0), 2.0, 500.0);
        // Requests end at an even pace between two lines.
        close(cut(0.5, 1.5), 1.0, 150.0);
        // Its time was over at 4.5 s, and sixteen more requests were done then.
        close(cut(3.0, 60.0), 1.5, 416.0);
        assert_eq!((cut(4.2, 60.0), cut(50.0, 60.0), cut(2.0, 2.0)), (None, None, None));
        let per_s =
            |cuts: Vec<Cut>| cuts.into_iter().map(|cut| cut.per_s().round()).collect::<Vec<f64>>();
        assert_eq!(per_s(said.seconds(begin_s + 1.0, begin_s + 3.95)), [200.0, 300.0, 400.0]);
        assert_eq!(per_s(said.seconds(begin_s + 1.0, begin_s + 1.5)), [0.0; 0]);
        let parts =
            |from: f64, to: f64, count| said.parts(begin_s + from, begin_s + to, count).map(per_s);
        assert_eq!(parts(0.0, 4.0, 2), Some(vec![150.0, 350.0]));
        assert_eq!(parts(0.0, 4.6, 2), None, "it had ended before");
    }

    #[test]
    fn what_rados_bench_says_is_read_as_it_says_it() {
        for (text, finished) in
            [(WRITE, value(WRITE, "Total writes made:")), (SEQ, value(SEQ, "Total reads made:"))]
        {
            let said = read(text).expect("it has ended");
            assert_eq!(Some(said.finished as f64), finished);
            let first = said.points[0];
            assert_eq!((Some(first.at_s), first.finished), (begin_s(text), 0.0));
            // The whole run has the figures that its output states.
            let whole = said.cut(first.at_s, f64::MAX).expect("it was at work");
            assert_eq!(whole.finished, said.finished as f64);
            assert!(
                (whole.total_s / whole.finished
                    - value(text, "Average Latency(s):").expect("told"))
                .abs()
                    < 1e-6
            );
            let mib = if text == WRITE { 4.0 } else { 4.0 / 1024.0 };
            let told = value(text, "Bandwidth (MB/sec):").expect("told");
            assert!(
                (whole.per_s() * mib / told - 1.0).abs() < 1e-3,
                "{} {told}",
                whole.per_s() * mib
            );
            assert!(said.min_s < said.max_s);
        }
    }

    #[test]
    fn the_ramp_is_cut_off() {
        let said = read(WRITE).expect("it has ended");
        let begin_s = said.points[0].at_s;
        let line = |second: usize| said.points[second];
        let cut = said.cut(line(2).at_s, line(5).at_s).expect("three seconds");
        assert_eq!(cut.finished, line(5).finished - line(2).finished);
        assert!((cut.total_s - (line(5).total_s - line(2).total_s)).abs() < 1e-9);
        let whole = said.cut(begin_s, line(5).at_s).expect("five seconds");
        let ramp = said.cut(begin_s, line(2).at_s).expect("two seconds");
        assert!((ramp.finished + cut.finished - whole.finished).abs() < 1e-6);
    }

    #[test]
    fn what_is_not_whole_or_no_sense_is_nothing() {
        assert_eq!(begin_s(""), None);
        let line =
            WRITE.lines().position(|line| point(line).is_some()).expect("a line of a second");
        let before: String = WRITE.split_inclusive('\n').take(line).collect();
        assert_eq!(begin_s(&before), None);
        let with = |more: &str| format!("{before}{more}");
        let first = WRITE.split_inclusive('\n').nth(line).expect("it is there");
        assert_eq!(begin_s(&with(&first[..first.len() - 1])), None, "half a line");
        assert!(begin_s(&with(first)).is_some());
        assert_eq!(read(&with(first)), None, "it has not ended");
        for (from, to) in [
            ("Total time run:", "Total time:"),
            ("Average Latency(s):     ", "Average Latency(s):     -"),
            ("Max latency(s):         ", "Max latency(s):         nan"),
            ("Total writes made:      ", "Total writes made:      -"),
        ] {
            assert!(WRITE.contains(from), "{from}");
            assert_eq!(read(&WRITE.replace(from, to)), None, "{to}");
        }
        for wrong in ["", "a b c d e f g h i", "2026-11-28T10:00:01.0+0000 1 16 32 16 1 1 0.1 nan"]
        {
            assert_eq!(point(wrong), None, "{wrong}");
        }
    }
}
