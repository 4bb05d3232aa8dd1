//! What the machine does while something is measured, second by second: processors, memory, network, devices, by kind
//! of process.
//!
//! Everything that this process has started is looked at, so nothing has to be announced. Processor time is counted from
//! the start of a process, not from the second time that it is seen; memory is the proportional set size, so shared pages
//! are counted once.

pub mod hops;
mod means;
mod proc;

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::device::Counts;
use crate::guest;
use crate::network::Network;
use crate::vm;
pub use means::{Flow, Means, Parts};
pub(crate) use proc::machine;
use proc::{MachineTime, Stat, Traffic};

/// Time between two samples.
const PERIOD: Duration = Duration::from_secs(1);
/// Samples between two looks at the memory, which the kernel has to add up page by page.
const MEMORY_EVERY: usize = 5;

/// Kinds of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Ceph's monitors.
    Mon,
    /// Ceph's managers.
    Mgr,
    /// Ceph's OSDs.
    Osd,
    /// Tidepool's daemon.
    Tidepool,
    /// The iSCSI gateway.
    Gateway,
    /// What has images on a hypervisor for clients: initiators, and other NBD servers than Tidepool's.
    Exporter,
    /// Guests that OSDs are in, with all that runs in them, and what serves their disks.
    Guest,
    /// What makes the load.
    Client,
    /// The lab itself, with the devices that it emulates.
    Lab,
    /// Everything else that the lab has started.
    Other,
}

impl Class {
    /// All of them.
    pub const ALL: [Class; 10] = [
        Class::Mon,
        Class::Mgr,
        Class::Osd,
        Class::Tidepool,
        Class::Gateway,
        Class::Exporter,
        Class::Guest,
        Class::Client,
        Class::Lab,
        Class::Other,
    ];

    /// Its name in results.
    pub fn name(self) -> &'static str {
        match self {
            Class::Mon => "mon",
            Class::Mgr => "mgr",
            Class::Osd => "osd",
            Class::Tidepool => "tidepool",
            Class::Gateway => "gateway",
            Class::Exporter => "exporter",
            Class::Guest => "guest",
            Class::Client => "client",
            Class::Lab => "lab",
            Class::Other => "other",
        }
    }

    fn of(stat: &Stat) -> Class {
        match stat.name.as_str() {
            _ if stat.pid == std::process::id() => Class::Lab,
            crate::scratch::CARETAKER => Class::Lab,
            "ceph-mon" => Class::Mon,
            "ceph-mgr" => Class::Mgr,
            "ceph-osd" => Class::Osd,
            "tidepool" => Class::Tidepool,
            "tgtd" => Class::Gateway,
            // The kernel keeps fifteen bytes of a name.
            "qemu-storage-da" => Class::Exporter,
            // A guest with a client in it is the client, as a whole.
            "fio" | "rados" | "rbd" | vm::PROCESS_NAME => Class::Client,
            name if guest::PROCESS_NAMES.contains(&name) => Class::Guest,
            _ => Class::Other,
        }
    }
}

/// What a kind of process used in a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Usage {
    /// Processor time, in percent of one processor.
    pub cpu_percent: f64,
    /// Memory (proportional set size) in bytes, when it was looked at last.
    pub pss_bytes: u64,
}

/// What a network interface or a node carried in a second.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Carried {
    /// Bytes per second that came in.
    pub received_bytes_per_s: f64,
    /// Bytes per second that went out.
    pub sent_bytes_per_s: f64,
}

/// One second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Sample {
    /// Its end, in milliseconds since the first one began.
    pub at_ms: u64,
    /// All processors, in percent of all of them.
    pub busy_percent: f64,
    /// Processors that had nothing to do but to wait for a disk, in percent of all.
    pub iowait_percent: f64,
    /// The busiest thread of all clients, in percent of one processor.
    pub busiest_client_percent: f64,
    /// Memory of the machine in bytes that is in use: all but what the kernel could give to a new process, when it was looked at last. 0
    /// where that was not recorded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_used_bytes: u64,
    /// By kind of process.
    pub classes: BTreeMap<Class, Usage>,
    /// By node, or where there is no network of nodes by interface of the machine.
    pub network: BTreeMap<String, Carried>,
    /// What emulated devices did, by their names.
    pub devices: BTreeMap<String, Counts>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Where the counters of a device come from.
pub type CountsOf = Box<dyn Fn() -> Counts + Send>;

/// Largest table of a node's interfaces, in bytes; one has two lines of 200, and one more for each guest.
const TABLE_BYTES_MAX: usize = 8192;

/// What is looked at besides processes.
#[derive(Default)]
pub struct Sources {
    /// Emulated devices, by their names.
    pub devices: Vec<(String, CountsOf)>,
    /// Nodes of a network by their names, with the tables of their interfaces. Without any, the machine's interfaces are looked at.
    pub nodes: Vec<(String, File)>,
    /// Processes that load the cluster beside the clients, by their ids: that one of their threads is busy limits no client.
    pub beside: Vec<u32>,
}

impl Sources {
    /// The nodes of `network` as well, if there is one.
    ///
    /// # Errors
    /// When a node is gone.
    pub fn with_network(mut self, network: Option<&Network>) -> io::Result<Sources> {
        for node in network.into_iter().flat_map(Network::nodes) {
            self.nodes.push((node.name().to_string(), node.interfaces()?));
        }
        Ok(self)
    }

    /// What has been carried so far, by node or by interface.
    fn traffic(&self) -> HashMap<String, Traffic> {
        if self.nodes.is_empty() {
            return proc::traffic(&fs::read_to_string("/proc/net/dev").unwrap_or_default());
        }
        let of = |table: &File| {
            let mut text = [0; TABLE_BYTES_MAX];
            let length = table.read_at(&mut text, 0).unwrap_or(0);
            proc::node_traffic(&String::from_utf8_lossy(&text[..length]))
        };
        self.nodes.iter().map(|(name, table)| (name.clone(), of(table))).collect()
    }
}

/// Collects samples until it is stopped.
#[derive(Debug)]
pub struct Collector {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Sample>>,
}

impl Collector {
    /// Begins to collect.
    pub fn start(sources: Sources) -> Collector {
        let (stop, stopped) = channel();
        // Here and now, so that all that the caller does from now on is in the samples.
        let mut last = Look::now(&sources, None);
        let thread = std::thread::spawn(move || {
            let start = last.at;
            let mut samples = Vec::new();
            loop {
                // A second after the last one, however late that was: no sample is about less.
                let next = last.at + PERIOD;
                let wait = next.saturating_duration_since(Instant::now());
                let more = matches!(stopped.recv_timeout(wait), Err(RecvTimeoutError::Timeout));
                let memory = samples.len() % MEMORY_EVERY == 0;
                let now = Look::now(&sources, (!memory).then_some(&last));
                // What is left at the end may be too short for a figure.
                if more || now.at.duration_since(last.at) >= PERIOD / 2 {
                    samples.push(now.since(&last, start));
                }
                if !more {
                    return samples;
                }
                last = now;
            }
        });
        Collector { stop, thread }
    }

    /// Ends it and returns the samples.
    pub fn stop(self) -> Vec<Sample> {
        let _ = self.stop.send(());
        self.thread.join().unwrap_or_default()
    }
}

/// All counters at one moment.
struct Look {
    at: Instant,
    machine: MachineTime,
    /// By id and start.
    processes: HashMap<(u32, u64), (Class, u64)>,
    /// Threads of clients, by id and start.
    client_threads: HashMap<(u32, u64), u64>,
    memory: BTreeMap<Class, u64>,
    memory_used: u64,
    network: HashMap<String, Traffic>,
    devices: BTreeMap<String, Counts>,
}

impl Look {
    /// Looks at everything; the memory is that of `before`, if there is one.
    fn now(sources: &Sources, before: Option<&Look>) -> Look {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let family = proc::descendants(std::process::id());
        let (memory, memory_used) = match before {
            Some(before) => (before.memory.clone(), before.memory_used),
            None => {
                let mut memory = BTreeMap::new();
                for stat in &family {
                    let pss = proc::pss(&text(&format!("/proc/{}/smaps_rollup", stat.pid)));
                    *memory.entry(Class::of(stat)).or_insert(0) += pss.unwrap_or(0);
                }
                (memory, proc::memory_used(&text("/proc/meminfo")).unwrap_or(0))
            }
        };
        Look {
            at: Instant::now(),
            machine: proc::machine(&text("/proc/stat")).unwrap_or_default(),
            processes: family.iter().map(|s| ((s.pid, s.started), (Class::of(s), s.ticks))).collect(),
            client_threads: family
                .iter()
                .filter(|stat| Class::of(stat) == Class::Client && !sources.beside.contains(&stat.pid))
                .flat_map(|stat| proc::threads(stat.pid))
                .map(|thread| ((thread.pid, thread.started), thread.ticks))
                .collect(),
            memory,
            memory_used,
            network: sources.traffic(),
            devices: sources.devices.iter().map(|(name, counts)| (name.clone(), counts())).collect(),
        }
    }

    /// What happened since `last`.
    fn since(&self, last: &Look, start: Instant) -> Sample {
        let seconds = self.at.duration_since(last.at).as_secs_f64().max(1e-3);
        let total = self.machine.total.saturating_sub(last.machine.total).max(1) as f64;
        let percent = |now: u64, before: u64| now.saturating_sub(before) as f64 / total * 100.0;
        let mut classes: BTreeMap<Class, Usage> = BTreeMap::new();
        for (key, &(class, ticks)) in &self.processes {
            // One that was not there has done all it did since.
            let before = last.processes.get(key).map_or(0, |&(_, ticks)| ticks);
            let cpu = ticks.saturating_sub(before) as f64 / ticks_per_s() / seconds * 100.0;
            classes.entry(class).or_default().cpu_percent += cpu;
        }
        for (&class, usage) in &mut classes {
            usage.pss_bytes = self.memory.get(&class).copied().unwrap_or(0);
        }
        let network = self.network.iter().map(|(name, now)| {
            let before = last.network.get(name).copied().unwrap_or_default();
            let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / seconds;
            let carried = Carried {
                received_bytes_per_s: rate(now.received, before.received),
                sent_bytes_per_s: rate(now.sent, before.sent),
            };
            (name.clone(), carried)
        });
        let devices = self.devices.iter().map(|(name, now)| {
            let before = last.devices.get(name).copied().unwrap_or_default();
            (name.clone(), now.since(before))
        });
        Sample {
            at_ms: self.at.duration_since(start).as_millis() as u64,
            busy_percent: percent(self.machine.busy, last.machine.busy),
            iowait_percent: percent(self.machine.iowait, last.machine.iowait),
            busiest_client_percent: self
                .client_threads
                .iter()
                .map(|(key, &ticks)| {
                    let before = last.client_threads.get(key).copied().unwrap_or(0);
                    ticks.saturating_sub(before) as f64 / ticks_per_s() / seconds * 100.0
                })
                .fold(0.0, f64::max),
            memory_used_bytes: self.memory_used,
            classes,
            network: network.collect(),
            devices: devices.collect(),
        }
    }
}

/// Clock ticks per second.
fn ticks_per_s() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Process;
    use std::process::Command;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Clock ticks that the child burns.
    const BURNT_TICKS: u64 = 30;

    /// Something that is looked at with everything else, last, and counts how often that was.
    fn counted() -> (Sources, Arc<AtomicUsize>) {
        let looks = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&looks);
        let counts: CountsOf = Box::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Counts::default()
        });
        (Sources { devices: vec![("counted".into(), counts)], ..Sources::default() }, looks)
    }

    /// Waits for a look that has begun since, and whose sample is there with it.
    fn wait_for_a_look(looks: &AtomicUsize) {
        // One may have been under way.
        let enough = looks.load(Ordering::Relaxed) + 2;
        while looks.load(Ordering::Relaxed) < enough {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A child that has burnt some time of a processor, and does nothing any more; and how much that was, in clock ticks.
    fn burnt_out() -> (Process, u64) {
        let mut command = Command::new("sh");
        command.args(["-c", "while :; do :; done"]);
        let child = Process::spawn(command).expect("a child");
        let ticks = || {
            let text = fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("it runs");
            proc::stat(&text).expect("a process").ticks
        };
        while ticks() < BURNT_TICKS {
            std::thread::sleep(Duration::from_millis(10));
        }
        child.stop().expect("it stops");
        let burnt = ticks();
        (child, burnt)
    }

    /// Processor time of all samples that a kind of process has used, in clock ticks.
    fn used_ticks(samples: &[Sample], class: Class) -> f64 {
        let mut begin_ms = 0;
        let mut ticks = 0.0;
        for sample in samples {
            let seconds = (sample.at_ms - begin_ms) as f64 / 1e3;
            begin_ms = sample.at_ms;
            let percent = sample.classes.get(&class).map_or(0.0, |usage| usage.cpu_percent);
            ticks += percent / 100.0 * seconds * ticks_per_s();
        }
        ticks
    }

    #[test]
    fn a_child_that_burns_a_processor_is_seen_from_its_first_second_on() {
        let (sources, looks) = counted();
        let collector = Collector::start(sources);
        let (child, burnt) = burnt_out();
        wait_for_a_look(&looks);
        let samples = collector.stop();
        drop(child);
        // Half a tick is for times in whole milliseconds. Other tests may have children, too.
        let used = used_ticks(&samples, Class::Other);
        assert!(used > burnt as f64 - 0.5, "{used} of {burnt}, its first second counts: {samples:?}");
        let last = samples.last().expect("a sample");
        let own = last.classes[&Class::Lab].pss_bytes;
        assert!(own > 0 && last.memory_used_bytes > own, "{last:?}");
        assert!(last.network.contains_key("lo"));
    }
}
