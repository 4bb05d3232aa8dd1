//! The plan in one sentence.

use super::bill::Bill;
use super::verdict::{Effect, Key, Placement, Verdict};

/// The answer: where the SSDs go, how many this takes, and how many the other side would take; or
/// that no SSDs are to be bought; or what to do first.
pub(super) fn answer(
    key: &Key,
    first: Option<Placement>,
    verdicts: &[Verdict],
    bills: &[Bill],
) -> String {
    let Some(first) = first else {
        return nowhere(key, verdicts).into();
    };
    let place = match first {
        Placement::Host => "SSDs into the hypervisors, under Tidepool",
        Placement::DbWal => "SSDs into the servers with OSDs, for database and log",
        Placement::Journal => "SSDs into the servers with OSDs, for the journals",
        Placement::OsdCache => {
            "SSDs into the servers with OSDs, for databases and a cache under the OSDs"
        }
    };
    let is_host = |placement| placement == Placement::Host;
    let (here, there): (Vec<&Bill>, Vec<&Bill>) =
        bills.iter().partition(|bill| is_host(bill.placement) == is_host(first));
    let other = if is_host(first) { "in the servers with OSDs" } else { "in the hypervisors" };
    match (here.first(), there.first()) {
        (Some(here), Some(there)) => {
            format!("{place}: {}, or {} {other}.", here.needed, there.needed)
        }
        (Some(here), None) => format!("{place}: {}.", here.needed),
        (None, _) => format!("{place}."),
    }
}

fn nowhere(key: &Key, verdicts: &[Verdict]) -> &'static str {
    if key.block_bytes.is_none() || key.read_percent.is_none() || key.media.is_empty() {
        return "No answer yet: what is missing stands under \"Not told\".";
    }
    if verdicts.iter().any(|verdict| verdict.effect == Effect::NotKnown) {
        return "Measure before you buy: for this workload no place is known to help.";
    }
    "Do not buy SSDs to cache: no place helps this workload."
}
