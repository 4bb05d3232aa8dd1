//! What the machine does during a measurement, second by second: processors, memory, network and
//! devices, by kind of process.
//!
//! All processes that this process has started are included, so that they need not be announced.
//! Processor time is counted from the start of a process, not from the second sample that contains
//! it. Memory is the proportional set size, so that shared pages are counted once.

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

pub use means::{Flow, Means, Parts};
pub(crate) use proc::machine;
use proc::{MachineTime, Stat, Traffic};
use tidepool_cluster::device::Counts;
use tidepool_cluster::guest;
use tidepool_cluster::network::Network;
use tidepool_cluster::vm;

/// Time between two samples.
const PERIOD: Duration = Duration::from_secs(1);
/// Samples between two reads of memory, which the kernel adds up page by page.
const MEMORY_EVERY: usize = 5;

/// A kind of process.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
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
    /// Programs on a hypervisor that give images to clients: initiators, and NBD servers other than
    /// Tidepool's.
    Exporter,
    /// Guests with OSDs and everything in them, and the programs that serve their disks.
    Guest,
    /// The load generators.
    Client,
    /// The lab itself, including the devices it emulates.
    Lab,
    /// Everything else started by the lab.
    Other,
}

impl Class {
    /// All kinds of processes.
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

    /// The name of the kind in results.
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
            tidepool_cluster::scratch::CARETAKER => Class::Lab,
            "ceph-mon" => Class::Mon,
            "ceph-mgr" => Class::Mgr,
            "ceph-osd" => Class::Osd,
            "tidepool" => Class::Tidepool,
            "tgtd" => Class::Gateway,
            // The kernel keeps fifteen bytes of a process name.
            "qemu-storage-da" => Class::Exporter,
            // A guest with a client counts as a client as a whole.
            "fio" | "rados" | "rbd" | vm::PROCESS_NAME => Class::Client,
            name if guest::PROCESS_NAMES.contains(&name) => Class::Guest,
            _ => Class::Other,
        }
    }
}

/// Resources used by a kind of process in a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Usage {
    /// Processor time, in percent of one processor.
    pub cpu_percent: f64,
    /// Memory (proportional set size) in bytes at the last read.
    pub pss_bytes: u64,
}

/// Traffic of a network interface or a node in a sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Carried {
    /// Bytes received per second.
    pub received_bytes_per_s: f64,
    /// Bytes sent per second.
    pub sent_bytes_per_s: f64,
}

/// A sample of the machine, usually of one second.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Sample {
    /// End of the sample in milliseconds since the first sample began.
    pub at_ms: u64,
    /// Busy time of all processors, in percent of all processors.
    pub busy_percent: f64,
    /// Time in which processors had nothing to do but waited for a disk, in percent of all
    /// processors.
    pub iowait_percent: f64,
    /// Processor time of the busiest thread of all clients, in percent of one processor.
    pub busiest_client_percent: f64,
    /// Memory of the machine in use, in bytes: all but what the kernel could give to a new process,
    /// at the last read. 0 if it was not recorded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory_used_bytes: u64,
    /// Use of resources by kind of process.
    pub classes: BTreeMap<Class, Usage>,
    /// Traffic by node, or by interface of the machine if there is no network of nodes.
    pub network: BTreeMap<String, Carried>,
    /// Counts of the emulated devices in the sample, by name.
    pub devices: BTreeMap<String, Counts>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Reads the counters of a device.
pub type CountsOf = Box<dyn Fn() -> Counts + Send>;

/// Largest interface table of a node in bytes. A table has two lines of 200 bytes, and one more for
/// each guest.
const TABLE_BYTES_MAX: usize = 8192;

/// Sources of samples besides processes.
#[derive(Default)]
pub struct Sources {
    /// Emulated devices by name.
    pub devices: Vec<(String, CountsOf)>,
    /// Nodes of a network by name, with their interface tables. Without any, the machine's
    /// interfaces are read.
    pub nodes: Vec<(String, File)>,
    /// Process ids of processes that load the cluster beside the clients. A busy thread of theirs
    /// does not limit a client.
    pub beside: Vec<u32>,
}

impl Sources {
    /// Adds the nodes of `network`, if there is one.
    ///
    /// # Errors
    /// If a node is gone.
    pub fn with_network(mut self, network: Option<&Network>) -> io::Result<Sources> {
        for node in network.into_iter().flat_map(Network::nodes) {
            self.nodes.push((node.name().to_string(), node.interfaces()?));
        }
        Ok(self)
    }

    /// Traffic so far by node, or by interface.
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
        // Read the counters here, so that everything the caller does from now on is in the samples.
        let mut last = Look::now(&sources, None);
        let thread = std::thread::spawn(move || {
            let start = last.at;
            let mut samples = Vec::new();
            loop {
                // One second after the last sample was taken, even if that was late. So no sample
                // but the last covers less than a second.
                let next = last.at + PERIOD;
                let wait = next.saturating_duration_since(Instant::now());
                let more = matches!(stopped.recv_timeout(wait), Err(RecvTimeoutError::Timeout));
                let memory = samples.len() % MEMORY_EVERY == 0;
                let now = Look::now(&sources, (!memory).then_some(&last));
                // A short rest at the end gives no meaningful figure.
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

    /// Ends the collection and returns the samples.
    pub fn stop(self) -> Vec<Sample> {
        let _ = self.stop.send(());
        self.thread.join().unwrap_or_default()
    }
}

/// All counters at one moment.
struct Look {
    at: Instant,
    machine: MachineTime,
    /// By process id and start time.
    processes: HashMap<(u32, u64), (Class, u64)>,
    /// Threads of clients by id and start time.
    client_threads: HashMap<(u32, u64), u64>,
    memory: BTreeMap<Class, u64>,
    memory_used: u64,
    network: HashMap<String, Traffic>,
    devices: BTreeMap<String, Counts>,
}

impl Look {
    /// Reads all counters. Memory is copied from `before` if it is given.
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
            processes: family
                .iter()
                .map(|s| ((s.pid, s.started), (Class::of(s), s.ticks)))
                .collect(),
            client_threads: family
                .iter()
                .filter(|stat| {
                    Class::of(stat) == Class::Client && !sources.beside.contains(&stat.pid)
                })
                .flat_map(|stat| proc::threads(stat.pid))
                .map(|thread| ((thread.pid, thread.started), thread.ticks))
                .collect(),
            memory,
            memory_used,
            network: sources.traffic(),
            devices: sources
                .devices
                .iter()
                .map(|(name, counts)| (name.clone(), counts()))
                .collect(),
        }
    }

    /// The sample since `last`.
    fn since(&self, last: &Look, start: Instant) -> Sample {
        let seconds = self.at.duration_since(last.at).as_secs_f64().max(1e-3);
        let total = self.machine.total.saturating_sub(last.machine.total).max(1) as f64;
        let percent = |now: u64, before: u64| now.saturating_sub(before) as f64 / total * 100.0;
        let mut classes: BTreeMap<Class, Usage> = BTreeMap::new();
        for (key, &(class, ticks)) in &self.processes {
            // A process that was not there before has done all of its work since.
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
    use std::process::Command;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tidepool_cluster::process::Process;

    /// Clock ticks that the child uses.
    const BURNT_TICKS: u64 = 30;

    /// A device whose counters count how often they are read. Devices are read last, so that this
    /// counts the looks.
    fn counted() -> (Sources, Arc<AtomicUsize>) {
        let looks = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&looks);
        let counts: CountsOf = Box::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
            Counts::default()
        });
        (Sources { devices: vec![("counted".into(), counts)], ..Sources::default() }, looks)
    }

    /// Waits until a look that began from now on is finished and its sample is recorded.
    fn wait_for_a_look(looks: &AtomicUsize) {
        // One look may be under way already.
        let enough = looks.load(Ordering::Relaxed) + 2;
        while looks.load(Ordering::Relaxed) < enough {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A child that has used some processor time and is stopped, and the time it used in clock
    /// ticks.
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

    /// Processor time of a kind of process in all samples, in clock ticks.
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
        // Half a tick covers times in whole milliseconds. Other tests may have children too.
        let used = used_ticks(&samples, Class::Other);
        assert!(
            used > burnt as f64 - 0.5,
            "{used} of {burnt}, its first second counts: {samples:?}"
        );
        let last = samples.last().expect("a sample");
        let own = last.classes[&Class::Lab].pss_bytes;
        assert!(own > 0 && last.memory_used_bytes > own, "{last:?}");
        assert!(last.network.contains_key("lo"));
    }
}
