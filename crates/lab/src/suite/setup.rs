//! Published set-ups, side by side: the placement that stands for each here, or what is missing for
//! it.

use std::collections::BTreeSet;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Suite;
use crate::placement::Arrangement;

/// A published set-up. It has a placement that stands for it here, or names what it needs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// The publication's name for the set-up.
    pub name: String,
    /// The figures in the publication, short.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<String>,
    /// The placement of the suite that stands for the set-up. If the suite or this version does not
    /// have the placement, the set-up is reported as not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<String>,
    /// The workload that stands for the set-up, if it is not the deciding one, for example over
    /// another access path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// What the set-up needs that is missing here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub needs: Option<String>,
}

impl Setup {
    /// Why the set-up is not measured in this suite. `None` if its placement is one of the suite's.
    pub fn not_run(&self, suite: &Suite) -> Option<String> {
        match (&self.needs, &self.placement) {
            (Some(needs), _) => Some(format!("not possible here: it needs {needs}")),
            (None, Some(placement)) if !suite.placements.contains(placement) => {
                // The list of known placements is not part of the reason.
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
    /// Checks the suite's set-ups.
    pub(super) fn check_setups(&self) -> Result<(), String> {
        let mut names: BTreeSet<&String> = self.placements.iter().collect();
        for setup in &self.setups {
            if setup.placement.is_some() == setup.needs.is_some() {
                return Err(format!(
                    "the set-up {}: it has either a placement or needs",
                    setup.name
                ));
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
        let text = serde_json::to_string(&Suite::find("which-side").expect("built in"))
            .expect("plain data");
        assert!(!text.contains("\"setup\""), "its SHA-256 would be another one");
    }

    #[test]
    fn a_set_up_that_makes_no_sense_is_told_in_one_line() {
        let whole = "[[setup]]\nname = \"FileStore and journals, vioscsi\"";
        for (from, to, wanted) in [
            (whole, "[[setup]]\nname = \"filestore-journal\"", "named twice"),
            (
                "placement = \"filestore-journal\"\nworkload",
                "workload",
                "either a placement or needs",
            ),
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
            let error =
                Suite::parse("s.toml", &SUITE.replacen(from, to, 1)).expect_err(to).to_string();
            assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
        }
        // A placement that the suite or this version does not have is reported, and is no error of
        // the suite.
        let stands = "placement = \"filestore-journal\"\nworkload";
        for (name, wanted) in
            [("osd-magic", "no placement osd-magic"), ("ssd-raw", "none of the suite's")]
        {
            let other = SUITE.replacen(stands, &format!("placement = \"{name}\"\nworkload"), 1);
            let other = Suite::parse("s.toml", &other).expect("a suite");
            let mut told = other.setups.iter().filter_map(|setup| setup.not_run(&other));
            assert!(told.any(|told| told.contains(wanted) && !told.contains('\n')), "{name}");
        }
    }
}
