//! What a run has been through. A simulator that never reaches a state proves nothing about it.

use std::collections::BTreeMap;

/// Everything that the short run must reach.
pub const WANTED: [&str; 50] = [
    "group committed",
    "cut checked",
    "redo trimmed",
    "kill during commit",
    "kill",
    "power loss",
    "orderly restart",
    "kill during checkpoint",
    "kill during reclaim",
    "kill during drain",
    "stop during recovery",
    "checkpoint",
    "replay with tail",
    "torn tail cut",
    "summary rebuilt",
    "reclaim",
    "dirty move",
    "hot move",
    "fill",
    "fill voided",
    "fill overtaken",
    "eviction",
    "quota wait",
    "ack held",
    "arena full",
    "direct write",
    "purge",
    "drain verified",
    "snapshot",
    "snapshot checked",
    "removal verified",
    "foreign write",
    "clean dropped at attach",
    "backend stopped",
    "backend error",
    "backend full",
    "served without backend",
    "unflushed writes lost",
    "corrupt block found",
    "block lost",
    "device death",
    "cache lost",
    "block lost on a dead device",
    "stopped without a flush",
    "fence",
    "resize",
    "inspected",
    "fill remembered by ghost",
    "verified after power loss",
    "parent block",
];

/// Counters by name.
#[derive(Debug, Clone, Default)]
pub struct Coverage {
    counts: BTreeMap<&'static str, u64>,
}

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

    /// What has never happened of what must.
    pub fn missing(&self) -> Vec<&'static str> {
        WANTED.into_iter().filter(|w| self.count(w) == 0).collect()
    }
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rest = self.counts.keys().copied().filter(|k| !WANTED.contains(k));
        for what in WANTED.into_iter().chain(rest) {
            writeln!(f, "{:>12}  {what}", self.count(what))?;
        }
        Ok(())
    }
}
