//! Axes in addition to the ground's own point: other numbers of copies, and neighbours of the
//! measured clients.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{CLIENTS_MAX, Cell, ClusterSize, Ground, Suite, SuiteError, Workload};
use crate::words;

/// Least limit of a neighbour in requests per second. Reads and writes are limited separately.
const IOPS_MIN: u32 = 10;
/// Largest limit of a neighbour in requests per second.
const IOPS_MAX: u32 = 1_000_000;

/// Virtual machines beside the measured clients, each with its own image, on the clients' access
/// path: 4 KiB random, 70 % reads, one request at a time. Written as `N`, or as `N:IOPS`, which
/// limits each to IOPS requests per second.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Default,
    Serialize,
    Deserialize,
    JsonSchema,
)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Neighbours {
    /// Number of neighbours.
    pub count: u32,
    /// Most requests per second of each neighbour. No limit if absent.
    pub iops_max: Option<u32>,
}

impl FromStr for Neighbours {
    type Err = String;

    fn from_str(text: &str) -> Result<Neighbours, String> {
        let wrong = || {
            format!(
                "\"{text}\" are no neighbours: write N or N:IOPS, with 0 to {CLIENTS_MAX} neighbours and {IOPS_MIN} to {IOPS_MAX} requests per second of each"
            )
        };
        let (count, iops_max) = match text.split_once(':') {
            Some((count, iops)) => (count, Some(iops.parse::<u32>().map_err(|_| wrong())?)),
            None => (text, None),
        };
        let count =
            count.parse::<u32>().ok().filter(|count| *count <= CLIENTS_MAX).ok_or_else(wrong)?;
        if iops_max.is_some_and(|iops| !(IOPS_MIN..=IOPS_MAX).contains(&iops)) {
            return Err(wrong());
        }
        // With zero neighbours the limit means nothing and is left out.
        Ok(Neighbours { count, iops_max: iops_max.filter(|_| count > 0) })
    }
}

impl TryFrom<String> for Neighbours {
    type Error = String;

    fn try_from(text: String) -> Result<Neighbours, String> {
        text.parse()
    }
}

impl From<Neighbours> for String {
    fn from(neighbours: Neighbours) -> String {
        neighbours.short()
    }
}

impl Neighbours {
    /// The form in which a suite writes it, `N` or `N:IOPS`.
    pub fn short(self) -> String {
        match self.iops_max {
            Some(iops) => format!("{}:{iops}", self.count),
            None => self.count.to_string(),
        }
    }
}

impl fmt::Display for Neighbours {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.count, self.iops_max) {
            (0, _) => write!(f, "no neighbours"),
            (count, None) => {
                write!(f, "{} without a limit", words::count(count as usize, "neighbour"))
            }
            (count, Some(iops)) => {
                let all = words::count(count as usize, "neighbour");
                write!(f, "{all} of at most {iops} requests per second each")
            }
        }
    }
}

impl Cell {
    /// Whether the number of copies or the neighbours differ from the ground's own.
    pub fn is_beside(&self) -> bool {
        self.replicas.is_some() || self.neighbours.is_some()
    }

    /// The number of copies and the neighbours that are not the ground's own, in words. `None` if
    /// all are the ground's own.
    pub fn beside(&self) -> Option<String> {
        words::beside(self.replicas, self.neighbours)
    }
}

impl Ground {
    /// Largest number of copies that is measured.
    pub fn replicas_max(&self) -> u32 {
        self.replicas_beside.iter().copied().fold(self.replicas, u32::max)
    }

    /// Largest number of neighbours that is measured.
    pub fn neighbours_max(&self) -> u32 {
        let all = self.neighbours.iter().chain(&self.neighbours_beside);
        all.map(|neighbours| neighbours.count).max().unwrap_or(0)
    }

    /// Checks these axes, on clusters with at least this number of OSDs.
    fn check_beside(&self, osds: u32) -> Result<(), String> {
        let all: Vec<u32> =
            [self.replicas].into_iter().chain(self.replicas_beside.iter().copied()).collect();
        if all.iter().any(|replicas| !(1..=osds).contains(replicas)) {
            return Err("replicas are at least 1 and at most as many as OSDs".into());
        }
        if all.iter().collect::<BTreeSet<_>>().len() < all.len() {
            return Err(
                "replicas_beside has each number of copies once, and not that of replicas".into()
            );
        }
        let own = self.neighbours.unwrap_or_default();
        let all: Vec<Neighbours> =
            [own].into_iter().chain(self.neighbours_beside.iter().copied()).collect();
        if all.iter().collect::<BTreeSet<_>>().len() < all.len() {
            return Err("neighbours_beside has each once, and not those of neighbours".into());
        }
        Ok(())
    }
}

impl Suite {
    /// Checks these axes, on the clusters that are measured.
    pub(super) fn check_beside(&self) -> Result<(), String> {
        self.ground.check_beside(self.sizes().into_iter().map(ClusterSize::osds).min().unwrap_or(0))
    }

    /// The points beside the ground's own at which a workload is measured on a placement. One axis
    /// at a time varies.
    pub(super) fn points_beside(
        &self,
        placement: &str,
        workload: &Workload,
    ) -> Vec<(Option<u32>, Option<Neighbours>)> {
        // The repeated baseline is measured only at the ground's own point.
        if !self.placements.iter().any(|name| name == placement) || !workload.is_on(placement) {
            return Vec::new();
        }
        let copies = self.ground.replicas_beside.iter().map(|&replicas| (Some(replicas), None));
        copies.chain(self.ground.neighbours_beside.iter().map(|&of| (None, Some(of)))).collect()
    }

    /// Copies of each object in a measurement.
    pub fn replicas(&self, cell: &Cell) -> u32 {
        cell.replicas.unwrap_or(self.ground.replicas)
    }

    /// Neighbours of the clients of a measurement, if there are any.
    pub fn neighbours(&self, cell: &Cell) -> Option<Neighbours> {
        cell.neighbours.or(self.ground.neighbours).filter(|neighbours| neighbours.count > 0)
    }

    /// The suite with these numbers of copies. The first is the ground's, the others are measured
    /// beside it.
    ///
    /// # Errors
    /// If the resulting suite is not valid, for example if the clusters cannot have as many copies.
    pub fn with_replicas(mut self, replicas: &[u32]) -> Result<Suite, SuiteError> {
        if let [first, others @ ..] = replicas {
            (self.ground.replicas, self.ground.replicas_beside) = (*first, others.to_vec());
        }
        self.checked()
    }

    /// The suite with these neighbours. The first are the ground's, the others are measured beside
    /// them.
    ///
    /// # Errors
    /// If the resulting suite is not valid, for example if there is no room for the images.
    pub fn with_neighbours(mut self, neighbours: &[Neighbours]) -> Result<Suite, SuiteError> {
        if let [first, others @ ..] = neighbours {
            self.ground.neighbours = Some(*first).filter(|first| first.count > 0);
            self.ground.neighbours_beside = others.to_vec();
        }
        self.checked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: &str = include_str!("../suites/which-side.toml");

    fn with(lines: &str) -> Result<Suite, SuiteError> {
        Suite::parse("s.toml", &SUITE.replacen("replicas = 2\n", lines, 1))
    }

    #[test]
    fn neighbours_are_written_as_they_are_read() {
        for text in ["0", "4", "4:100", "64:1000000"] {
            let read: Neighbours = text.parse().expect(text);
            assert_eq!(read.short(), text);
            let json = serde_json::to_string(&read).expect("plain data");
            assert_eq!(serde_json::from_str::<Neighbours>(&json).expect("as written"), read);
        }
        assert_eq!("0:100".parse(), Ok(Neighbours::default()));
        for text in ["", "x", "-1", "65", "2:", "2:9", "2:1000001", "2:1:1", "1:1e3"] {
            let error = text.parse::<Neighbours>().expect_err(text);
            assert!(error.contains("N:IOPS") && !error.contains('\n'), "{error}");
        }
        assert_eq!(
            ["0", "1", "4:1500"].map(|text| text.parse::<Neighbours>().expect(text).to_string()),
            [
                "no neighbours",
                "1 neighbour without a limit",
                "4 neighbours of at most 1500 requests per second each"
            ]
        );
    }

    #[test]
    fn both_axes_are_measured_beside_the_grounds_point_and_not_with_each_other() {
        let plain = Suite::parse("s.toml", SUITE).expect("a suite");
        let suite =
            with("replicas = 2\nreplicas_beside = [1]\nneighbours_beside = [\"2:100\", \"2\"]\n");
        let suite = suite.expect("a suite");
        let (before, after) = (plain.cells(), suite.cells());
        assert!(before.iter().all(|cell| !cell.is_beside() && after.contains(cell)));
        let beside: Vec<&Cell> = after.iter().filter(|cell| cell.is_beside()).collect();
        assert!(
            beside.iter().all(|cell| cell.slowed_by.is_none()
                && cell.replicas.is_none() != cell.neighbours.is_none())
        );
        assert!(beside.iter().all(|cell| !words::is_again(&cell.placement)));
        let at = |wanted: &dyn Fn(&Cell) -> bool| beside.iter().filter(|cell| wanted(cell)).count();
        let one_copy = at(&|cell| cell.replicas == Some(1));
        assert!(one_copy > 0 && at(&|cell| cell.neighbours.is_some()) == 2 * one_copy);
        let cell = beside.iter().find(|cell| cell.replicas.is_some()).expect("one copy");
        assert_eq!((suite.replicas(cell), cell.beside()), (1, Some("1 copy".into())));
        assert_eq!((suite.images(), plain.images()), (5, 3), "neighbours have images, too");
    }

    #[test]
    fn what_makes_no_sense_is_told_in_one_line_and_a_suite_without_axes_is_what_it_was() {
        for (lines, wanted) in [
            ("replicas = 2\nreplicas_beside = [3]\n", "at most as many as OSDs"),
            ("replicas = 2\nreplicas_beside = [0]\n", "at least 1"),
            ("replicas = 2\nreplicas_beside = [2]\n", "not that of replicas"),
            ("replicas = 2\nreplicas_beside = [1, 1]\n", "each number of copies once"),
            ("replicas = 2\nreplicas_beside = 1\n", "line "),
            ("replicas = 2\nneighbours = \"many\"\n", "N:IOPS"),
            (
                "replicas = 2\nneighbours = \"2\"\nneighbours_beside = [\"2\"]\n",
                "not those of neighbours",
            ),
            ("replicas = 2\nneighbours_beside = [\"0\"]\n", "not those of neighbours"),
            ("replicas = 2\nneighbours = \"20\"\n", "images with 2 copies"),
        ] {
            let error = with(lines).expect_err(lines).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        let plain = Suite::parse("s.toml", SUITE).expect("a suite");
        let text = serde_json::to_string(&plain).expect("plain data");
        assert!(
            !text.contains("_beside\":[") && !text.contains("neighbours"),
            "its SHA-256 would be another one"
        );
    }

    #[test]
    fn the_command_line_sets_them_for_a_whole_suite() {
        let plain = Suite::parse("s.toml", SUITE).expect("a suite");
        let same = plain.clone().with_replicas(&[2]).expect("that is what it has");
        assert_eq!(same.sha256(), plain.sha256());
        let one = plain.clone().with_replicas(&[1, 2]).expect("one copy, and two beside");
        assert_eq!(
            (one.ground.replicas, one.ground.replicas_beside.as_slice()),
            (1, [2].as_slice())
        );
        assert!(plain.clone().with_replicas(&[3]).is_err());
        // The quick form has only clusters with seven disks; the exact form also has a cluster with
        // one.
        let journal = Suite::find("journal").expect("it comes with the program");
        assert!(journal.clone().with_replicas(&[2]).is_err());
        journal.quick().with_replicas(&[2, 3]).expect("there are enough OSDs");
        let two: Neighbours = "2:100".parse().expect("two");
        let crowd = plain.clone().with_neighbours(&[two]).expect("there is room");
        assert!(
            crowd
                .cells()
                .iter()
                .all(|cell| !cell.is_beside() && crowd.neighbours(cell) == Some(two))
        );
        let toml = toml::to_string(&crowd).expect("TOML");
        assert_eq!(Suite::parse("s.toml", &toml).expect("a suite"), crowd);
        let alone = crowd.with_neighbours(&[Neighbours::default()]).expect("nobody");
        assert_eq!(alone.sha256(), plain.sha256());
    }
}
