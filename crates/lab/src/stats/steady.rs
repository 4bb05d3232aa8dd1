//! Whether a measurement shows a speed that lasts: the steady-state test of SNIA's Solid State
//! Storage Performance Test Specification (version 2.0.1, 2018, "steady state"), over five equal
//! windows.

use serde::Serialize;

use crate::results::{Run, WINDOWS};

/// Largest range of a stationary figure, as a part of its mean.
const RANGE_MAX: f64 = 0.20;
/// Largest difference between the ends of the least-squares line of a stationary figure, as a part
/// of the mean.
const SLOPE_MAX: f64 = 0.10;

/// How a figure changes over the windows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Course {
    /// Largest minus smallest value, as a part of the mean; 0 if all values are 0.
    pub range: f64,
    /// Rise of the least-squares line from the first window to the last one, as a part of the mean.
    pub slope: f64,
}

impl Course {
    /// The course of five values, none of which is negative.
    pub fn of(values: [f64; WINDOWS]) -> Course {
        let count = WINDOWS as f64;
        let mean = values.iter().sum::<f64>() / count;
        if mean == 0.0 {
            return Course { range: 0.0, slope: 0.0 };
        }
        let most = values.iter().copied().fold(f64::MIN, f64::max);
        let least = values.iter().copied().fold(f64::MAX, f64::min);
        let from_middle = |index: usize| index as f64 - (count - 1.0) / 2.0;
        let squares: f64 = (0..WINDOWS).map(|index| from_middle(index).powi(2)).sum();
        let products: f64 = values
            .iter()
            .enumerate()
            .map(|(index, value)| from_middle(index) * (value - mean))
            .sum();
        Course { range: (most - least) / mean, slope: products / squares * (count - 1.0) / mean }
    }

    /// Range and slope are within their bounds.
    pub fn is_stationary(self) -> bool {
        self.range <= RANGE_MAX && self.slope.abs() <= SLOPE_MAX
    }
}

/// Whether a measurement shows a speed that lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Steadiness {
    /// Requests per second and dirty bytes are stationary: the speed lasts.
    Sustained,
    /// Requests per second or dirty bytes are not stationary, and no cache held dirty bytes: a
    /// window has too few requests for a conclusion, or something else changes.
    Varying,
    /// Requests per second or dirty bytes are not stationary, and a cache held dirty bytes at the
    /// end of a window, or when the drain began: they have still to be written back.
    Absorbing {
        /// Bytes that clients wrote in the windows: a burst of at least this size goes at this
        /// speed.
        absorbed_bytes: u64,
        /// Bytes that remained to be written back.
        left_bytes: u64,
    },
    /// The results lack the five windows.
    Unknown,
}

impl Steadiness {
    /// The steadiness of one run.
    pub fn of(run: &Run) -> Steadiness {
        let Ok(windows) = <&[_; WINDOWS]>::try_from(run.windows.as_slice()) else {
            return Steadiness::Unknown;
        };
        let requests = Course::of(windows.map(|window| window.requests as f64));
        let dirty = Course::of(windows.map(|window| window.dirty_bytes as f64));
        if requests.is_stationary() && dirty.is_stationary() {
            return Steadiness::Sustained;
        }
        let left_bytes =
            run.drained.map_or(windows[WINDOWS - 1].dirty_bytes, |drained| drained.dirty_bytes);
        if left_bytes == 0 && windows.iter().all(|window| window.dirty_bytes == 0) {
            return Steadiness::Varying;
        }
        let absorbed_bytes =
            windows.iter().fold(0, |sum: u64, w| sum.saturating_add(w.written_bytes));
        Steadiness::Absorbing { absorbed_bytes, left_bytes }
    }

    /// The steadiness of two results together. It is sustained only if both are, and unknown if
    /// either is. An absorbing and a varying result together are absorbing. Of two absorbing
    /// results it has the smaller burst, which both have taken, and the larger remainder, which may
    /// be left.
    pub fn and(self, other: Steadiness) -> Steadiness {
        match (self, other) {
            (Steadiness::Unknown, _) | (_, Steadiness::Unknown) => Steadiness::Unknown,
            (Steadiness::Sustained, other) | (other, Steadiness::Sustained) => other,
            (Steadiness::Varying, other) | (other, Steadiness::Varying) => other,
            (
                Steadiness::Absorbing { absorbed_bytes, left_bytes },
                Steadiness::Absorbing { absorbed_bytes: other_absorbed, left_bytes: other_left },
            ) => Steadiness::Absorbing {
                absorbed_bytes: absorbed_bytes.min(other_absorbed),
                left_bytes: left_bytes.max(other_left),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Drained, Window};
    use crate::synthetic;

    fn run(requests: [u64; WINDOWS], dirty_bytes: [u64; WINDOWS]) -> Run {
        let mut run = synthetic::run("host-tidepool", "4k-80-20", 16, 1, 100.0);
        let window = |(requests, dirty_bytes)| Window { requests, written_bytes: 7, dirty_bytes };
        run.windows = requests.into_iter().zip(dirty_bytes).map(window).collect();
        run
    }

    #[test]
    fn range_and_slope_have_the_bounds_of_the_specification() {
        let of = |values: [f64; 5]| Course::of(values);
        let line = of([90.0, 95.0, 100.0, 105.0, 110.0]);
        assert!((line.range - 0.2).abs() < 1e-12 && (line.slope - 0.2).abs() < 1e-12, "{line:?}");
        for (values, stationary) in [
            ([100.0, 100.0, 100.0, 100.0, 100.0], true),
            ([0.0; 5], true),
            ([95.0, 97.5, 100.0, 102.5, 105.0], true),
            ([94.0, 97.0, 100.0, 103.0, 106.0], false),
            ([106.0, 103.0, 100.0, 97.0, 94.0], false),
            ([100.0, 110.0, 90.0, 110.0, 100.0], true),
            ([100.0, 111.0, 90.0, 111.0, 100.0], false),
            ([0.0, 0.0, 0.0, 0.0, 5.0], false),
        ] {
            assert_eq!(of(values).is_stationary(), stationary, "{values:?} {:?}", of(values));
        }
    }

    #[test]
    fn a_run_is_sustained_only_if_requests_and_dirty_bytes_both_are() {
        let (level, rising) = ([1_000; 5], [1, 2, 3, 4, 5]);
        assert_eq!(Steadiness::of(&run(level, [0; 5])), Steadiness::Sustained);
        assert_eq!(Steadiness::of(&run(level, level)), Steadiness::Sustained);
        assert_eq!(
            Steadiness::of(&run(level, rising)),
            Steadiness::Absorbing { absorbed_bytes: 35, left_bytes: 5 }
        );
        let mut slowing = run([900, 800, 700, 600, 500], level);
        slowing.drained = Some(Drained { dirty_bytes: 999, seconds: 1.0, hurried_bytes: 0 });
        assert_eq!(
            Steadiness::of(&slowing),
            Steadiness::Absorbing { absorbed_bytes: 35, left_bytes: 999 }
        );
    }

    #[test]
    fn what_keeps_nothing_back_absorbs_nothing_however_it_varies() {
        let mut varying = run([84, 63, 75, 75, 72], [0; 5]);
        assert_eq!(Steadiness::of(&varying), Steadiness::Varying);
        let absorbing = Steadiness::of(&run([9; 5], [1, 2, 3, 4, 5]));
        assert_eq!(Steadiness::Varying.and(absorbing), absorbing);
        assert_eq!(Steadiness::Sustained.and(Steadiness::Varying), Steadiness::Varying);
        assert_eq!(Steadiness::Varying.and(Steadiness::Unknown), Steadiness::Unknown);
        varying.drained = Some(Drained { dirty_bytes: 9, seconds: 1.0, hurried_bytes: 0 });
        assert_eq!(
            Steadiness::of(&varying),
            Steadiness::Absorbing { absorbed_bytes: 35, left_bytes: 9 }
        );
    }

    #[test]
    fn what_was_not_recorded_is_not_guessed() {
        let good = run([9; 5], [0; 5]);
        let mut short = good.clone();
        short.windows.pop();
        let absorbing = run([9; 5], [1, 2, 3, 4, 5]);
        assert_eq!(Steadiness::of(&short), Steadiness::Unknown);
        let [good, short, absorbing] = [&good, &short, &absorbing].map(Steadiness::of);
        for (pair, wanted) in [
            ([good, good], good),
            ([good, short], short),
            ([absorbing, short], short),
            ([good, absorbing], absorbing),
        ] {
            assert_eq!(pair[0].and(pair[1]), wanted);
        }
        let larger = Steadiness::Absorbing { absorbed_bytes: 36, left_bytes: 6 };
        assert_eq!(
            absorbing.and(larger),
            Steadiness::Absorbing { absorbed_bytes: 35, left_bytes: 6 }
        );
    }
}
