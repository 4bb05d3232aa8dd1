//! Set-ups that were published side by side: what stands for each here, or what it would take.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Suite;
use crate::placement::Arrangement;

/// A set-up of a publication. It has a placement that stands for it here, or it says what it needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// What the publication calls it.
    pub name: String,
    /// Its figures there, short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<String>,
    /// The placement of the suite that stands for it. One that the suite or this version of the program does not have is told as
    /// not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<String>,
    /// The workload that does so, if not the deciding one: such as over another access path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// What it takes that there is not here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs: Option<String>,
}

impl Setup {
    /// Why it is not measured in this suite. None where its placement is one of the suite.
    pub fn not_run(&self, suite: &Suite) -> Option<String> {
        match (&self.needs, &self.placement) {
            (Some(needs), _) => Some(format!("not possible here: it needs {needs}")),
            (None, Some(placement)) if !suite.placements.contains(placement) => {
                // All that there are instead are no part of the reason.
                let why = Arrangement::parse(placement).err();
                let why = why.as_deref().and_then(|why| why.split(';').next());
                Some(match why {
                    Some(why) => format!("not possible with this version: {why}"),
                    None => format!("{placement} is none of the suite's placements"),
                })
            }
            _ => None,
        }
    }
}

impl Suite {
    /// What is wrong with its set-ups.
    pub(super) fn check_setups(&self) -> Result<(), String> {
        let mut names: BTreeSet<&String> = self.placements.iter().collect();
        for setup in &self.setups {
            if setup.placement.is_some() == setup.needs.is_some() {
                return Err(format!("the set-up {}: it has either a placement or needs", setup.name));
            }
            if let Some(name) = &setup.workload
                && (self.workload(name).is_none() || setup.placement.is_none())
            {
                return Err(format!(
                    "the set-up {}: {name} is a workload of the suite, beside a placement",
                    setup.name
                ));
            }
            if !names.insert(&setup.name) {
                return Err(format!("the set-up {} is named twice", setup.name));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: &str = include_str!("../suites/diskspd-256k.toml");

    #[test]
    fn each_of_the_published_set_ups_has_a_placement_or_says_what_it_takes() {
        let suite = Suite::parse("s.toml", SUITE).expect("a suite");
        assert_eq!(suite.setups.len(), 9);
        assert!(suite.setups.iter().all(|setup| setup.published.is_some()));
        for setup in &suite.setups {
            let here = setup.placement.as_ref().is_some_and(|name| suite.placements.contains(name));
            assert_eq!(setup.not_run(&suite).is_none(), here, "{}", setup.name);
        }
        let text = serde_json::to_string(&Suite::find("which-side").expect("built in")).expect("plain data");
        assert!(!text.contains("\"setup\""), "its SHA-256 would be another one");
    }

    #[test]
    fn a_set_up_that_makes_no_sense_is_told_in_one_line() {
        let whole = "[[setup]]\nname = \"FileStore and journals, vioscsi\"";
        for (from, to, wanted) in [
            (whole, "[[setup]]\nname = \"filestore-journal\"", "named twice"),
            ("placement = \"filestore-journal\"\nworkload", "workload", "either a placement or needs"),
            (
                "placement = \"filestore-journal\"\n",
                "placement = \"filestore-journal\"\nneeds = \"x\"\n",
                "either",
            ),
            ("needs = \"", "wants = \"", "line "),
            (
                "placement = \"filestore-journal\"\nworkload = \"256k",
                "placement = \"filestore-journal\"\nworkload = \"512k",
                "a workload of the suite",
            ),
        ] {
            assert!(SUITE.contains(from), "{from}");
            let error = Suite::parse("s.toml", &SUITE.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        // A placement of another version, or one that the suite does not have, is told, and is no mistake.
        let stands = "placement = \"filestore-journal\"\nworkload";
        for (name, wanted) in [("osd-magic", "no placement osd-magic"), ("ssd-raw", "none of the suite's")] {
            let other = SUITE.replacen(stands, &format!("placement = \"{name}\"\nworkload"), 1);
            let other = Suite::parse("s.toml", &other).expect("a suite");
            let mut told = other.setups.iter().filter_map(|setup| setup.not_run(&other));
            assert!(told.any(|told| told.contains(wanted) && !told.contains('\n')), "{name}");
        }
    }
}
