//! The health of a cluster as the cluster reports it: OSDs, placement groups, and data to recover.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::librados::To;
use super::{Cluster, ClusterError};

/// A cluster's health, as `ceph status` reports it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Health {
    /// Number of OSDs.
    pub osds: u32,
    /// OSDs that are up.
    pub osds_up: u32,
    /// OSDs that are in: Ceph places data on them.
    pub osds_in: u32,
    /// Number of placement groups.
    pub groups: u64,
    /// Placement groups that are active and clean, scrubbed at the moment or not.
    pub clean: u64,
    /// Placement groups that are active: they serve requests.
    pub active: u64,
    /// Copies of objects that are missing.
    pub degraded_objects: u64,
    /// Copies of objects that are not where they belong.
    pub misplaced_objects: u64,
}

impl Health {
    /// Whether all placement groups are active and clean.
    pub fn is_clean(&self) -> bool {
        self.groups > 0 && self.clean == self.groups
    }

    /// Parses the output of `ceph status --format json`; `None` if it lacks OSDs or placement
    /// groups.
    fn read(status: &Value) -> Option<Health> {
        // Up to Ceph 14 the OSD map is one level deeper.
        let outer = &status["osdmap"];
        let osds = if outer["osdmap"].is_object() { &outer["osdmap"] } else { outer };
        let groups = &status["pgmap"];
        let number = |of: &Value, name: &str| of[name].as_u64();
        let with = |words: &[&str]| {
            let states = groups["pgs_by_state"].as_array().into_iter().flatten();
            let wanted = |state: &&Value| {
                let name = state["state_name"].as_str().unwrap_or_default();
                words.iter().all(|word| name.split('+').any(|part| part == *word))
            };
            states.filter(wanted).filter_map(|state| state["count"].as_u64()).sum::<u64>()
        };
        Some(Health {
            osds: number(osds, "num_osds")? as u32,
            osds_up: number(osds, "num_up_osds")? as u32,
            osds_in: number(osds, "num_in_osds")? as u32,
            groups: number(groups, "num_pgs")?,
            clean: with(&["active", "clean"]),
            active: with(&["active"]),
            degraded_objects: number(groups, "degraded_objects").unwrap_or(0),
            misplaced_objects: number(groups, "misplaced_objects").unwrap_or(0),
        })
    }
}

impl Cluster {
    /// The cluster's health, as the cluster reports it.
    ///
    /// # Errors
    /// When the monitor does not answer, or the answer is something else.
    pub fn health(&self) -> Result<Health, ClusterError> {
        let said = self.tell(To::Monitor, &json!({ "prefix": "status", "format": "json" }))?;
        let health = serde_json::from_str(&said).ok().and_then(|status| Health::read(&status));
        health.ok_or_else(|| ClusterError::Command {
            command: "ceph status".into(),
            status: "it says something else".into(),
            stderr: super::last_lines(&said),
        })
    }

    /// When each placement group was last scrubbed deeply, in Ceph's format, by the placement
    /// group's name.
    ///
    /// # Errors
    /// When the manager does not answer.
    pub fn deep_scrubs(&self) -> Result<BTreeMap<String, String>, ClusterError> {
        let list = json!({ "prefix": "pg ls", "format": "json", "target": ["mon-mgr", ""] });
        Ok(stamps(&self.tell(To::Manager, &list)?))
    }

    /// The numbers of OSDs whose daemons have ended by themselves.
    pub fn ended_osds(&self) -> Vec<u32> {
        let has_ended = |osd: &crate::process::Process| osd.ended().ok().flatten().is_some();
        let ended = (0..).zip(&self.osds).filter(|(_, osd)| osd.as_ref().is_some_and(has_ended));
        ended.map(|(number, _)| number).collect()
    }
}

/// The times of deep scrubs in a list of placement groups, by the placement group's name.
fn stamps(list: &str) -> BTreeMap<String, String> {
    let list: Value = serde_json::from_str(list).unwrap_or_default();
    // Some releases return the list itself, others an object with the list in a field.
    let groups = list["pg_stats"].as_array().or_else(|| list.as_array());
    let of = |group: &Value| {
        let stamp = group["last_deep_scrub_stamp"].as_str()?;
        Some((group["pgid"].as_str()?.to_string(), stamp.to_string()))
    };
    groups.into_iter().flatten().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cluster_is_what_its_status_says() {
        let status = json!({
            "osdmap": { "num_osds": 3, "num_up_osds": 2, "num_in_osds": 3 },
            "pgmap": {
                "pgs_by_state": [
                    { "state_name": "active+undersized+degraded", "count": 20 },
                    { "state_name": "active+clean+scrubbing+deep", "count": 2 },
                    { "state_name": "active+clean", "count": 10 },
                    { "state_name": "unclean+inactive", "count": 1 },
                ],
                "num_pgs": 33, "degraded_objects": 57,
            },
        });
        let health = Health::read(&status).expect("a status");
        assert_eq!((health.osds, health.osds_up, health.osds_in), (3, 2, 3));
        assert_eq!((health.clean, health.active, health.degraded_objects), (12, 32, 57));
        assert!(!health.is_clean());
        let nested = json!({ "osdmap": { "osdmap": status["osdmap"] }, "pgmap": status["pgmap"] });
        assert_eq!(Health::read(&nested), Some(health));
        assert_eq!(
            Health::read(&json!({ "osdmap": { "num_osds": 3 } })),
            None,
            "what is missing is not zero"
        );
        assert!(!Health::default().is_clean(), "no groups are not clean ones");
    }

    #[test]
    fn each_group_has_a_time_of_its_scrub() {
        let groups = json!([{ "pgid": "2.0", "last_deep_scrub_stamp": "a" }, { "pgid": "2.1" }]);
        for list in [groups.clone(), json!({ "pg_ready": true, "pg_stats": groups })] {
            assert_eq!(stamps(&list.to_string()), [("2.0".to_string(), "a".to_string())].into());
        }
        assert!(stamps("no").is_empty());
    }
}
