//! Controls: a control and its placement are the same, so they have to come out as equal. Otherwise
//! the instrument is faulty, and none of its results counts.

use serde::Serialize;

use crate::results::Results;
use crate::stats::{self, Finding, Ratio};
use crate::words;

/// A control, with the placement that it has to equal.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Control {
    /// Name of the control: the baseline again, or a placement that only hands requests on.
    pub placement: String,
    /// The placement that the control has to equal in speed.
    pub against: String,
    /// Ratio of the control's requests per second to those of `against` in the deciding workload.
    pub iops: Ratio,
}

impl Control {
    /// The control came out as different.
    pub fn differs(&self) -> bool {
        matches!(self.iops.finding, Finding::More | Finding::Less)
    }

    /// What the control shows, in a sentence.
    pub(super) fn sentence(&self) -> String {
        let Control { placement, against, iops } = self;
        match iops.finding {
            Finding::Same => {
                format!("The control {placement} came out as equal to {against} ({iops}).")
            }
            Finding::More | Finding::Less => {
                format!(
                    "The control {placement} came out as different from {against} ({iops}), which is the same."
                )
            }
            Finding::Turns | Finding::Inconclusive => format!(
                "The control {placement} shows neither that it is equal to {against} nor that it is not ({iops}): {}{}.",
                iops.why.as_deref().unwrap_or("it was not measured"),
                iops.what_would_tell().map(|needed| format!("; {needed}")).unwrap_or_default()
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
