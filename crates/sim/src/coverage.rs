//! What a run has been through. A simulator that never reaches a state proves nothing about it.

use std::collections::BTreeMap;

/// Kinds of faults that must take place.
pub const FAULTS: [&str; 26] = [
    "kill",
    "kill during checkpoint",
    "kill during reclaim",
    "kill during drain",
    "kill during commit",
    "stop during recovery",
    "stop during a change of size",
    "power loss",
    "power loss after a lie",
    "device stopped",
    "device slow",
    "device death",
    "device failed for a moment",
    "cache lost",
    "lost write",
    "misdirected write",
    "unreadable block",
    "flipped bit",
    "backend stopped",
    "backend slow",
    "backend error",
    "backend full",
    "request of the backend lost",
    "commit without an answer",
    "unflushed writes lost",
    "fence",
];

/// States that must be reached.
pub const WANTED: [&str; 45] = [
    "orderly restart",
    "group committed",
    "group forced early",
    "redo trimmed",
    "redo replayed",
    "cut checked",
    "checkpoint",
    "replay with tail",
    "torn tail cut",
    "summary rebuilt",
    "reclaim",
    "reclaim under pressure",
    "dirty move",
    "hot move",
    "fill",
    "fill voided",
    "fill overtaken",
    "fill remembered by ghost",
    "eviction",
    "quota wait",
    "ack held",
    "arena full",
    "direct write",
    "mode change with backlog",
    "purge",
    "drain verified",
    "snapshot",
    "snapshot checked",
    "removal verified",
    "foreign write",
    "clean dropped at attach",
    "served without backend",
    "corrupt block found",
    "block lost",
    "block lost on a dead device",
    "cache behind its image",
    "stopped without a flush",
    "resize",
    "resize in use",
    "resize refused",
    "inspected",
    "verified after power loss",
    "parent block",
    "clone of a clone",
    "hole block",
];

/// Counters by name.
#[derive(Debug, Clone, Default)]
pub struct Coverage {
    counts: BTreeMap<&'static str, u64>,
}

/// What two hosts with a copy each must go through.
pub const PAIRS: [&str; 42] = [
    "host kill",
    "host power loss",
    "last copy lost its power",
    "host paused",
    "link cut",
    "link cut one way",
    "witness away",
    "lost answer",
    "copy begun",
    "record in sync",
    "record solo again",
    "record taken over",
    "record taken back",
    "peer left",
    "owner back in sync",
    "owner back with less than its peer",
    "record fetched",
    "block gone bad",
    "block from the peer",
    "owner back and unsure",
    "owner closed",
    "read that waits for the lease",
    "former owner's lease waited for",
    "volume let go of",
    "fenced transfer",
    "volume served",
    "verified after power loss",
    "image compared",
    "mode changed",
    "copy without room given up",
    "owner's device died",
    "peer's device died",
    "device replaced",
    "record without the owner's copy",
    "failed device back",
    "dead device disowned",
    "owner lost, and its peer's power",
    "loss accepted by the peer",
    "power loss of an owner that has just parted",
    "copy parted with for a loss",
    "power loss of an owner that has lost something",
    "record tried again",
];

impl Coverage {
    /// Counts something that has happened.
    pub fn hit(&mut self, what: &'static str) {
        self.add(what, 1);
    }

    /// Counts `n` of it.
    pub fn add(&mut self, what: &'static str, n: u64) {
        if n > 0 {
            *self.counts.entry(what).or_default() += n;
        }
    }

    /// How often it has happened.
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// Adds the counters of another run.
    pub fn merge(&mut self, other: &Coverage) {
        for (what, n) in &other.counts {
            *self.counts.entry(what).or_default() += n;
        }
    }

    /// What has happened less than `n` times of what must.
    pub fn missing(&self, n: u64) -> Vec<&'static str> {
        FAULTS.into_iter().chain(WANTED).filter(|w| self.count(w) < n).collect()
    }

    /// The same for two hosts.
    pub fn missing_of_pairs(&self, n: u64) -> Vec<&'static str> {
        PAIRS.into_iter().filter(|w| self.count(w) < n).collect()
    }
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let known = |what: &&str| !FAULTS.contains(what) && !WANTED.contains(what);
        let beside: Vec<&str> = self.counts.keys().copied().filter(known).collect();
        for (title, names) in [("faults", &FAULTS[..]), ("reached", &WANTED), ("beside", &beside)] {
            // A world of two hosts has names of its own.
            if names.iter().all(|what| self.count(what) == 0) {
                continue;
            }
            writeln!(f, "{title}:")?;
            for what in names {
                writeln!(f, "{:>14}  {what}", self.count(what))?;
            }
        }
        Ok(())
    }
}
