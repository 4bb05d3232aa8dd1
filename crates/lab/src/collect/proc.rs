//! Figures from /proc.

use std::collections::HashMap;
use std::fs;

/// Time of all processors since the machine was started, in clock ticks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct MachineTime {
    /// Working.
    pub(crate) busy: u64,
    /// Idle while a process waits for a disk.
    pub(crate) iowait: u64,
    /// Sum of busy, idle and iowait.
    pub(crate) total: u64,
}

/// A process, as read from `/proc/PID/stat`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) parent: u32,
    /// Processor time in clock ticks, without the time of children that were reaped.
    pub(super) ticks: u64,
    /// Start time in clock ticks since the machine was started. With the process id, it identifies
    /// the process.
    pub(super) started: u64,
}

/// Bytes carried by a network interface.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Traffic {
    pub(super) received: u64,
    pub(super) sent: u64,
}

/// Reads the first line of /proc/stat.
pub(crate) fn machine(text: &str) -> Option<MachineTime> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line.split_whitespace().map_while(|field| field.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal. The time of guests is included in user.
    let [user, nice, system, idle, iowait, irq, softirq, steal, ..] = fields[..] else {
        return None;
    };
    let busy = user + nice + system + irq + softirq + steal;
    Some(MachineTime { busy, iowait, total: busy + idle + iowait })
}

/// Reads the line of /proc/PID/stat. The name may contain spaces and parentheses.
pub(super) fn stat(text: &str) -> Option<Stat> {
    let (open, close) = (text.find('(')?, text.rfind(')')?);
    let pid = text[..open].trim().parse().ok()?;
    let rest: Vec<&str> = text.get(close + 1..)?.split_whitespace().collect();
    let number = |at: usize| rest.get(at)?.parse::<u64>().ok();
    Some(Stat {
        pid,
        name: text[open + 1..close].to_string(),
        parent: u32::try_from(number(1)?).ok()?,
        ticks: number(11)? + number(12)?,
        started: number(19)?,
    })
}

/// The value of `Pss:` in a smaps_rollup, in bytes. A page is divided among the processes that
/// share it.
pub(super) fn pss(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Memory in use according to /proc/meminfo, in bytes: all that is not available to new processes.
pub(super) fn memory_used(text: &str) -> Option<u64> {
    let kib = |key: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    Some(kib("MemTotal:")?.saturating_sub(kib("MemAvailable:")?) << 10)
}

/// Traffic of the interfaces in /proc/net/dev.
pub(super) fn traffic(text: &str) -> HashMap<String, Traffic> {
    let of = |line: &str| {
        let (name, fields) = line.split_once(':')?;
        let fields: Vec<u64> =
            fields.split_whitespace().map_while(|field| field.parse().ok()).collect();
        Some((
            name.trim().to_string(),
            Traffic { received: *fields.first()?, sent: *fields.get(8)? },
        ))
    };
    text.lines().filter_map(of).collect()
}

/// Traffic of a node to and from other nodes: of its cable, including what guests on the node
/// caused.
pub(super) fn node_traffic(text: &str) -> Traffic {
    traffic(text).remove(tidepool_cluster::network::LINK).unwrap_or_default()
}

/// All processes that descend from `ancestor`, and `ancestor` itself.
pub(super) fn descendants(ancestor: u32) -> Vec<Stat> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let pids =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let all: Vec<Stat> = pids
        .filter_map(|pid| stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?))
        .collect();
    family(ancestor, all)
}

/// All threads of a process.
pub(super) fn threads(pid: u32) -> Vec<Stat> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let stat = |entry: fs::DirEntry| stat(&fs::read_to_string(entry.path().join("stat")).ok()?);
    entries.flatten().filter_map(stat).collect()
}

/// The processes in `all` that descend from `ancestor`, and `ancestor` itself.
fn family(ancestor: u32, all: Vec<Stat>) -> Vec<Stat> {
    let parents: HashMap<u32, u32> = all.iter().map(|stat| (stat.pid, stat.parent)).collect();
    let descends = |mut pid: u32| {
        // A chain is no longer than there are processes. This ends the loop if ids that changed
        // while they were read form a cycle.
        for _ in 0..parents.len() {
            if pid == ancestor {
                return true;
            }
            match parents.get(&pid) {
                Some(&parent) => pid = parent,
                None => return false,
            }
        }
        false
    };
    all.into_iter().filter(|stat| descends(stat.pid)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_is_a_name() {
        let line = "42 (a) b (c) S 7 42 42 0 -1 4194560 1 2 3 4 100 20 5 6 20 0 1 0 12345 1000 200";
        let found = stat(line).expect("a process");
        assert_eq!((found.pid, found.parent, found.ticks, found.started), (42, 7, 120, 12345));
        assert_eq!(found.name, "a) b (c");
        assert!(stat("42 (a").is_none());
    }

    #[test]
    fn idle_and_waiting_for_a_disk_is_not_busy() {
        let found = machine("cpu  10 1 5 70 8 2 3 1 50 0\ncpu0 1 2\n").expect("times");
        assert_eq!(found, MachineTime { busy: 22, iowait: 8, total: 100 });
        assert!(machine("cpu 1 2").is_none());
    }

    #[test]
    fn memory_and_traffic_are_read() {
        assert_eq!(pss("00-ff ---p [rollup]\nRss:   100 kB\nPss:    64 kB\n"), Some(64 << 10));
        let memory = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  400 kB\n";
        assert_eq!((memory_used(memory), memory_used("MemTotal: 1 kB\n")), (Some(600 << 10), None));
        let text = "Inter-|   Receive  |  Transmit\n face |bytes packets\n    lo: 100 1 0 0 0 0 0 0 200 1 0 0 0 0 0 0\n";
        assert_eq!(traffic(text)["lo"], Traffic { received: 100, sent: 200 });
        let node = format!(
            "{text}  eth0: 7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0\n guest0: 7 1 0 0 0 0 0 0 8 1 0 0 0 0 0 0\n"
        );
        assert_eq!(node_traffic(&node), Traffic { received: 7, sent: 8 });
    }

    #[test]
    fn only_descendants_count() {
        let stat = |pid, parent| Stat { pid, parent, name: String::new(), ticks: 0, started: 0 };
        let all = vec![
            stat(1, 0),
            stat(5, 1),
            stat(6, 5),
            stat(7, 6),
            stat(8, 1),
            stat(9, 10),
            stat(10, 9),
        ];
        let pids: Vec<u32> = family(5, all).iter().map(|stat| stat.pid).collect();
        assert_eq!(pids, [5, 6, 7]);
    }
}
