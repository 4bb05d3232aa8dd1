//! Controls: what is the same has to come out as the same, or the instrument is off and nothing that it says counts.

use serde::Serialize;

use crate::results::Results;
use crate::stats::{self, Finding, Ratio};
use crate::words;

/// A control and what it is to be the same as.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Control {
    /// Its name: the baseline again, or what only hands requests on.
    pub placement: String,
    /// What it is to be as fast as.
    pub against: String,
    /// Its requests per second to those of the other in the deciding workload.
    pub iops: Ratio,
}

impl Control {
    /// It came out as different.
    pub fn differs(&self) -> bool {
        matches!(self.iops.finding, Finding::More | Finding::Less)
    }

    /// What it shows, in a sentence.
    pub(super) fn sentence(&self) -> String {
        let Control { placement, against, iops } = self;
        match iops.finding {
            Finding::Same => format!("The control {placement} came out as equal to {against} ({iops})."),
            Finding::More | Finding::Less => {
                format!(
                    "The control {placement} came out as different from {against} ({iops}), which is the same."
                )
            }
            Finding::Turns | Finding::Inconclusive => format!(
                "The control {placement} shows neither that it is equal to {against} nor that it is not ({iops}): {}.",
                iops.why.as_deref().unwrap_or("it was not measured")
            ),
        }
    }
}

/// The controls that were measured.
pub(super) fn controls(results: &Results) -> Vec<Control> {
    let settings = stats::settings(results, &results.suite.deciding);
    let control = |placement: &str| {
        let against = words::wrapped(placement)?;
        let iops = stats::of_control(results, placement, &against, &settings);
        iops.ratio?;
        Some(Control { placement: placement.into(), against, iops })
    };
    super::placements(results).into_iter().filter_map(control).collect()
}
