//! The load from which on a placement gives no more requests per second, and more load only makes
//! each request wait longer.

use serde::Serialize;

use super::EQUIVALENCE;

/// Figures of a placement at one load.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Requests in flight, of all clients together.
    pub in_flight: u32,
    /// Requests per second.
    pub iops: f64,
    /// Mean latency in microseconds.
    pub mean_us: f64,
    /// The client or the machine was the limit.
    pub is_limited: bool,
}

/// Where a placement is saturated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Saturation {
    /// There is one load, or none.
    OnePoint,
    /// No load is saturated: up to the end of the axis requests per second still grow, or the
    /// latency does not grow with the load.
    NotReached,
    /// Saturated from the point at this index on: requests per second grow by less than
    /// [`EQUIVALENCE`] beyond it, and the latency grows with the load.
    At(usize),
    /// Saturated from the point at this index on, but the client or the machine was the limit there
    /// or beyond: the placement may do more.
    Limited(usize),
}

impl Saturation {
    /// The saturation of these points, which are in ascending order of the load.
    pub fn of(points: &[Point]) -> Saturation {
        let Some((last, before)) = points.split_last().filter(|(_, before)| !before.is_empty())
        else {
            return Saturation::OnePoint;
        };
        let is_full = |index: usize| {
            let (here, beyond) = (&points[index], &points[index + 1..]);
            let load = f64::from(last.in_flight) / f64::from(here.in_flight.max(1));
            beyond.iter().all(|point| point.iops < here.iops * (1.0 + EQUIVALENCE))
                && last.mean_us * (1.0 + EQUIVALENCE) > here.mean_us * load
        };
        match (0..before.len()).find(|index| is_full(*index)) {
            None => Saturation::NotReached,
            Some(index) if points[index..].iter().any(|point| point.is_limited) => {
                Saturation::Limited(index)
            }
            Some(index) => Saturation::At(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Points of a closed loop: the latency is the number of requests in flight divided by the
    /// requests per second.
    fn points(of: &[(u32, f64)]) -> Vec<Point> {
        let point = |&(in_flight, iops): &(u32, f64)| Point {
            in_flight,
            iops,
            mean_us: f64::from(in_flight) / iops * 1e6,
            is_limited: false,
        };
        of.iter().map(point).collect()
    }

    #[test]
    fn a_placement_is_saturated_where_more_load_brings_longer_waits_alone() {
        for (of, wanted) in [
            (&[][..], Saturation::OnePoint),
            (&[(16, 100.0)], Saturation::OnePoint),
            (&[(1, 100.0), (4, 390.0), (16, 1_500.0)], Saturation::NotReached),
            (&[(1, 100.0), (4, 390.0), (16, 440.0)], Saturation::At(1)),
            (&[(1, 100.0), (4, 390.0), (16, 449.0)], Saturation::NotReached),
            (&[(1, 100.0), (4, 101.0), (16, 90.0)], Saturation::At(0)),
            // Each step is small, but all steps together are not.
            (&[(1, 100.0), (2, 110.0), (3, 121.0), (4, 133.0), (5, 134.0)], Saturation::At(2)),
        ] {
            assert_eq!(Saturation::of(&points(of)), wanted, "{of:?}");
        }
    }

    #[test]
    fn no_longer_waits_are_no_saturation_and_a_limit_from_outside_is_told() {
        // Clients that do not keep the load up: neither more requests nor longer waits.
        let mut idle = points(&[(4, 400.0), (16, 400.0)]);
        idle[1].mean_us = idle[0].mean_us;
        assert_eq!(Saturation::of(&idle), Saturation::NotReached);
        let mut limited = points(&[(1, 100.0), (4, 390.0), (16, 400.0)]);
        limited[2].is_limited = true;
        assert_eq!(Saturation::of(&limited), Saturation::Limited(1));
        (limited[0].is_limited, limited[2].is_limited) = (true, false);
        assert_eq!(Saturation::of(&limited), Saturation::At(1), "a limit below says nothing");
    }
}
