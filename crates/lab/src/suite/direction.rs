//! Published claims in a form that can be tested: a ratio of two placements, or the course of one
//! placement along an axis.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ClusterSize, Suite, Workload};
use crate::words;

/// A published claim and how it is tested: as a ratio (`expect`) or along an axis (`axis`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Direction {
    /// The claim, in one sentence.
    pub claim: String,
    /// Where it was published.
    pub source: String,
    /// The source's own words or figures, short, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quotation: Option<String>,
    /// The workload in which the claim is tested.
    pub workload: String,
    /// The placement that the claim is about.
    pub placement: String,
    /// The placement that `placement` is compared with. Without it, an axis follows the figure of
    /// `placement` itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against: Option<String>,
    /// The workload of `against`, if it is not `workload`. It differs from `workload` only in the
    /// access path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub against_workload: Option<String>,
    /// Only with this number of clients; with every number if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<u32>,
    /// Only on clusters with this number of disks; on all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<u32>,
    /// The figure that is compared.
    #[serde(default)]
    pub metric: Measure,
    /// The ratio that is expected, if the claim is a ratio.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expect: Option<Expect>,
    /// What is expected along an axis, if the claim is about an axis.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub axis: Option<Axis>,
    /// The ratios of the source, if it has figures. They are shown beside our ratios and decide
    /// nothing: emulated devices have other sizes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<Published>,
    /// What the claim needs that is missing here, so that it is not measurable. Its placements may
    /// be set-ups of the suite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs: Option<String>,
}

/// The figure of a run that is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Requests per second.
    #[default]
    Iops,
    /// Bytes per second.
    Bandwidth,
    /// Mean latency.
    Mean,
    /// 99th percentile of the latency.
    P99,
}

impl Measure {
    /// Title, such as `requests per second`.
    pub fn title(self) -> &'static str {
        match self {
            Measure::Iops => "requests per second",
            Measure::Bandwidth => "bandwidth",
            Measure::Mean => "mean latency",
            Measure::P99 => "99th percentile of the latency",
        }
    }

    /// Whether a smaller value is better.
    pub fn is_latency(self) -> bool {
        matches!(self, Measure::Mean | Measure::P99)
    }
}

/// What is expected of a ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Expect {
    /// Above 1.
    More,
    /// About 1.
    Same,
    /// Below 1.
    Less,
}

/// What is expected along an axis: a trend, or a plateau.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// What changes.
    pub along: Along,
    /// How the last point compares with the first point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trend: Option<Trend>,
    /// The figure gets better up to this point, and stays level beyond it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plateau_beyond: Option<u32>,
}

/// What changes along an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Along {
    /// The queue depth.
    Depth,
    /// Clients.
    Clients,
    /// OSDs in all.
    Osds,
    /// OSDs on each server.
    OsdsPerNode,
    /// Copies of each object.
    Replicas,
    /// Neighbours of the clients.
    Neighbours,
}

impl Along {
    /// Title, such as `queue depth`.
    pub fn title(self) -> &'static str {
        match self {
            Along::Depth => "queue depth",
            Along::Clients => "clients",
            Along::Osds => "OSDs",
            Along::OsdsPerNode => "OSDs on each server",
            Along::Replicas => "copies of each object",
            Along::Neighbours => "neighbours",
        }
    }
}

/// How the last point of an axis compares with the first one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Trend {
    /// The last point is higher.
    Rises,
    /// The last point is lower.
    Falls,
}

/// A ratio from a source's figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Published {
    /// The quotient of the source's two figures.
    pub ratio: f64,
    /// Conditions of the source's figures, such as `40 clients`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
}

impl Direction {
    /// The expectation in words, such as `less` or `falls with the queue depth`.
    pub fn expected(&self) -> String {
        match (self.expect, self.axis) {
            (Some(Expect::More), _) => "more".into(),
            (Some(Expect::Same), _) => "the same".into(),
            (Some(Expect::Less), _) => "less".into(),
            (None, Some(Axis { along, trend: Some(Trend::Rises), .. })) => {
                format!("rises with the {}", along.title())
            }
            (None, Some(Axis { along, trend: Some(Trend::Falls), .. })) => {
                format!("falls with the {}", along.title())
            }
            (None, Some(Axis { along, plateau_beyond: Some(point), .. })) => {
                format!("level beyond {point} {}", along.title())
            }
            (None, _) => "–".into(),
        }
    }

    /// Whether the claim covers measurements with this number of clients, on a cluster with this
    /// number of disks.
    pub fn counts(&self, clients: u32, disks: u32) -> bool {
        let is = |wanted: Option<u32>, found| wanted.is_none_or(|wanted| wanted == found);
        is(self.clients, clients) && is(self.disks, disks)
    }

    /// Checks the claim in a suite; an error says what is wrong.
    pub(super) fn check(&self, suite: &Suite) -> Result<(), String> {
        if self.needs.is_some() {
            return self.check_needs(suite);
        }
        let known = [Some(&self.placement), self.against.as_ref()];
        let known =
            known.into_iter().flatten().all(|placement| suite.placements.contains(placement));
        let Some(workload) = suite.workload(&self.workload).filter(|_| known) else {
            return Err("it names what the suite does not have".into());
        };
        let other = self.other_path(suite, workload)?.unwrap_or(workload);
        for (name, workload) in [(Some(&self.placement), workload), (self.against.as_ref(), other)]
        {
            if let Some(name) = name.filter(|name| !workload.is_on(name)) {
                return Err(format!("{name} is not measured in {}", workload.name));
            }
        }
        if let Some(clients) = self.clients.filter(|clients| !workload.clients.contains(clients)) {
            return Err(format!("{} is not measured with {clients} clients", self.workload));
        }
        if let Some(disks) = self.disks.filter(|disks| !suite.ground.disks.contains(disks)) {
            return Err(format!("no cluster has {}", words::count(disks as usize, "disk")));
        }
        if self.metric == Measure::P99 && !workload.tool.tells_percentiles() {
            return Err(format!(
                "rados bench tells no percentiles, so that {} has none",
                self.workload
            ));
        }
        if self
            .published
            .iter()
            .any(|published| !(published.ratio.is_finite() && published.ratio > 0.0))
        {
            return Err("a published ratio is a number above 0".into());
        }
        match (self.expect, self.axis) {
            (Some(_), None) if self.against.is_none() => Err("a ratio needs against".into()),
            (Some(_), None) => Ok(()),
            (None, Some(axis)) => axis.check(),
            _ => Err("it has either expect or axis".into()),
        }?;
        let ground = &suite.ground;
        let uneven = ground.disks.iter().any(|disks| !disks.is_multiple_of(ground.servers.max(1)));
        match self.axis.map(|axis| axis.along) {
            Some(Along::OsdsPerNode) if uneven => {
                Err("servers do not have as many disks each".into())
            }
            _ => Ok(()),
        }
    }

    /// The workload of `against`, if it is not the claim's own workload.
    fn other_path<'a>(
        &self,
        suite: &'a Suite,
        workload: &Workload,
    ) -> Result<Option<&'a Workload>, String> {
        let Some(name) = &self.against_workload else { return Ok(None) };
        let other = suite.workload(name).ok_or("it names what the suite does not have")?;
        if self.expect.is_none() || self.axis.is_some() {
            return Err("against_workload goes with a ratio: it has expect".into());
        }
        let alike = Workload {
            name: workload.name.clone(),
            title: workload.title.clone(),
            access: workload.access,
            placements: workload.placements.clone(),
            ..other.clone()
        };
        if alike != *workload || other.access == workload.access {
            return Err(format!(
                "{name} and {} differ in other things than their access path",
                workload.name
            ));
        }
        Ok(Some(other))
    }

    /// Checks a claim that is not measurable here.
    fn check_needs(&self, suite: &Suite) -> Result<(), String> {
        let names = [Some(&self.placement), self.against.as_ref()];
        let set_up = |name: &String| suite.setups.iter().any(|setup| setup.name == *name);
        let known = |name: &&String| suite.placements.contains(name) || set_up(name);
        if suite.workload(&self.workload).is_none()
            || !names.into_iter().flatten().all(|name| known(&name))
        {
            return Err("it names what the suite does not have".into());
        }
        match (&self.against, self.expect, self.axis) {
            (Some(_), Some(_), None) => Ok(()),
            _ => Err("what is not measurable here is a ratio: it has against and expect".into()),
        }
    }

    /// Checks that the claim's axis has at least two points in a suite.
    pub(super) fn has_points(&self, suite: &Suite) -> Result<(), String> {
        let (Some(axis), Some(workload)) = (self.axis, suite.workload(&self.workload)) else {
            return Ok(());
        };
        let points = match axis.along {
            Along::Depth => workload.depth.len(),
            Along::Clients => workload.clients.len(),
            Along::Osds | Along::OsdsPerNode => {
                let sizes = suite.sizes().into_iter();
                let sizes = sizes.filter(|size| self.disks.is_none_or(|disks| disks == size.disks));
                sizes.map(ClusterSize::osds).collect::<BTreeSet<u32>>().len()
            }
            Along::Replicas => 1 + suite.ground.replicas_beside.len(),
            Along::Neighbours => {
                let ground = &suite.ground;
                let own = [ground.neighbours.unwrap_or_default()];
                let all = own.iter().chain(&ground.neighbours_beside);
                all.map(|neighbours| neighbours.count).collect::<BTreeSet<u32>>().len()
            }
        };
        if points < 2 {
            return Err(format!(
                "{} has one point of the axis {}",
                self.workload,
                axis.along.title()
            ));
        }
        Ok(())
    }
}

impl Axis {
    fn check(self) -> Result<(), String> {
        match (self.trend, self.plateau_beyond) {
            (Some(_), None) | (None, Some(1..)) => Ok(()),
            _ => Err("an axis has either trend or plateau_beyond, which is at least 1".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::suite::Suite;

    #[test]
    fn a_claim_about_some_disks_needs_a_cluster_that_has_as_many() {
        let good = include_str!("../suites/journal.toml");
        let suite = Suite::parse("s.toml", good).expect("a suite");
        let of_seven =
            suite.directions.iter().find(|direction| direction.disks == Some(7)).expect("one");
        assert!(of_seven.counts(4, 7) && !of_seven.counts(4, 2));
        for (from, to, wanted) in [
            ("disks = 7\n", "disks = 5\n", "no cluster has 5 disks"),
            ("disks = 7\n", "disks = \"7\"\n", "line "),
            (
                "along = \"osds\", trend = \"rises\" }",
                "along = \"osds\", trend = \"rises\" }\ndisks = 4",
                "one point",
            ),
        ] {
            assert!(good.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        let paths = include_str!("../suites/diskspd-256k.toml");
        let path = "against_workload = \"256k-70-30-guest\"\n";
        let needs = paths.replacen(path, "needs = \"a kernel that there is not\"\n", 1);
        Suite::parse("s.toml", &needs).expect("a suite with a claim that is not measurable here");
        let against = "against = \"filestore-journal\"\nneeds";
        for (good, from, to, wanted) in [
            (&needs[..], against, "against = \"nothing\"\nneeds", "does not have"),
            (&needs, against, "needs", "a ratio"),
            (paths, path, "against_workload = \"256k\"\n", "does not have"),
            (
                paths,
                path,
                "against_workload = \"256k-70-30-large\"\n",
                "other things than their access path",
            ),
            (
                paths,
                path,
                "against_workload = \"256k-70-30-krbd\"\n",
                "other things than their access path",
            ),
            (
                paths,
                "against = \"filestore-journal\"\nagainst_workload",
                "against = \"bluestore-dbwal\"\nagainst_workload",
                "not measured in 256k-70-30-guest",
            ),
        ] {
            assert!(good.contains(from), "{from}");
            let error =
                Suite::parse("s.toml", &good.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        let other = Suite::find("which-side").expect("it comes with the program");
        let text = serde_json::to_string(&other.directions).expect("plain data");
        assert!(!text.contains("\"disks\""), "its SHA-256 would be another one");
    }
}
