//! Mean use of processors, memory and network by a measurement.
//!
//! Each sample is weighted by its length, from the beginning of the window to its end; the first
//! sample is treated like the others. Memory is the proportional set size, so that pages shared by
//! processes are counted once.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Class, Sample};
use tidepool_cluster::machine::Machine;

/// Means of all resources.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Means {
    /// Processor time.
    pub cpu: Parts,
    /// Memory. None if the memory of the machine was not recorded.
    pub memory: Option<Parts>,
    /// Traffic of each node, or of each interface of the machine if there is no network of nodes.
    pub network: BTreeMap<String, Flow>,
    /// The busiest thread of all clients, in percent of one processor.
    pub client_thread_percent: f64,
}

/// Use of a resource in percent of what the machine has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Parts {
    /// Of everything on the machine, including processes that the lab did not start.
    pub total_percent: f64,
    /// Of Ceph's monitors.
    pub mon_percent: f64,
    /// Of Ceph's OSDs.
    pub osd_percent: f64,
}

/// Traffic of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Flow {
    /// Bits per second sent.
    pub sent_bits_per_s: f64,
    /// Bits per second received.
    pub received_bits_per_s: f64,
}

impl Flow {
    /// Both directions together, in bits per second.
    pub fn total_bits_per_s(self) -> f64 {
        self.sent_bits_per_s + self.received_bits_per_s
    }
}

/// The mean of a figure over samples weighted by their lengths.
fn mean(timed: &[(&Sample, f64)], of: impl Fn(&Sample) -> f64) -> f64 {
    let seconds: f64 = timed.iter().map(|(_, seconds)| seconds).sum();
    timed.iter().map(|(sample, seconds)| of(sample) * seconds).sum::<f64>() / seconds
}

impl Means {
    /// The means of one measurement on this machine. None without samples.
    pub fn of(samples: &[Sample], machine: &Machine) -> Option<Means> {
        let begins = std::iter::once(0).chain(samples.iter().map(|sample| sample.at_ms));
        let seconds = |(sample, begin): (&Sample, u64)| {
            sample.at_ms.saturating_sub(begin).max(1) as f64 / 1e3
        };
        let timed: Vec<(&Sample, f64)> =
            samples.iter().zip(begins).map(|both| (both.0, seconds(both))).collect();
        if timed.is_empty() {
            return None;
        }
        let cpus = machine.cpus.max(1) as f64;
        let cpu = |class: Class| {
            mean(&timed, |sample| sample.classes.get(&class).map_or(0.0, |usage| usage.cpu_percent))
                / cpus
        };
        let part = |bytes: f64| bytes / machine.memory_bytes as f64 * 100.0;
        let memory = |class: Class| {
            let pss = |sample: &Sample| {
                sample.classes.get(&class).map_or(0.0, |usage| usage.pss_bytes as f64)
            };
            part(mean(&timed, pss))
        };
        let is_known =
            machine.memory_bytes > 0 && samples.iter().all(|sample| sample.memory_used_bytes > 0);
        let names = samples.iter().flat_map(|sample| sample.network.keys());
        let flow = |name: &String| {
            let carried = |sample: &Sample| sample.network.get(name).copied().unwrap_or_default();
            let flow = Flow {
                sent_bits_per_s: 8.0 * mean(&timed, |sample| carried(sample).sent_bytes_per_s),
                received_bits_per_s: 8.0
                    * mean(&timed, |sample| carried(sample).received_bytes_per_s),
            };
            (name.clone(), flow)
        };
        Some(Means {
            cpu: Parts {
                total_percent: mean(&timed, |sample| sample.busy_percent),
                mon_percent: cpu(Class::Mon),
                osd_percent: cpu(Class::Osd),
            },
            memory: is_known.then(|| Parts {
                total_percent: part(mean(&timed, |sample| sample.memory_used_bytes as f64)),
                mon_percent: memory(Class::Mon),
                osd_percent: memory(Class::Osd),
            }),
            network: names.map(flow).collect(),
            client_thread_percent: mean(&timed, |sample| sample.busiest_client_percent),
        })
    }

    /// The means of several measurements with equal weight. None if there are none.
    pub fn joined(all: &[Means]) -> Option<Means> {
        let count = all.len() as f64;
        let mean = |of: &dyn Fn(&Means) -> f64| all.iter().map(of).sum::<f64>() / count;
        let parts = |of: &dyn Fn(&Means) -> Parts| Parts {
            total_percent: mean(&|found| of(found).total_percent),
            mon_percent: mean(&|found| of(found).mon_percent),
            osd_percent: mean(&|found| of(found).osd_percent),
        };
        let is_known = all.iter().all(|found| found.memory.is_some());
        let names = all.iter().flat_map(|found| found.network.keys());
        let flow = |name: &String| {
            let of = |found: &Means| found.network.get(name).copied().unwrap_or_default();
            let flow = Flow {
                sent_bits_per_s: mean(&|found| of(found).sent_bits_per_s),
                received_bits_per_s: mean(&|found| of(found).received_bits_per_s),
            };
            (name.clone(), flow)
        };
        (!all.is_empty()).then(|| Means {
            cpu: parts(&|found| found.cpu),
            memory: is_known.then(|| parts(&|found| found.memory.unwrap_or_default())),
            network: names.map(flow).collect(),
            client_thread_percent: mean(&|found| found.client_thread_percent),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collect::{Carried, Usage};
    use crate::synthetic;

    fn sample(at_ms: u64, percent: f64) -> Sample {
        let usage = |cpu_percent: f64, pss_bytes| Usage { cpu_percent, pss_bytes };
        let carried = Carried { received_bytes_per_s: percent, sent_bytes_per_s: 10.0 * percent };
        Sample {
            at_ms,
            busy_percent: percent,
            busiest_client_percent: percent / 2.0,
            memory_used_bytes: 2 << 30,
            classes: [(Class::Osd, usage(percent, 1 << 30)), (Class::Mon, usage(2.0, 1 << 28))]
                .into(),
            network: [("client".to_string(), carried)].into(),
            ..Sample::default()
        }
    }

    #[test]
    fn a_second_counts_for_as_long_as_it_was_and_the_first_one_as_well() {
        let machine = synthetic::empty().machine;
        assert_eq!((machine.cpus, machine.memory_bytes), (2, 8 << 30));
        let found =
            Means::of(&[sample(1_000, 80.0), sample(4_000, 40.0)], &machine).expect("samples");
        assert_eq!(found.cpu, Parts { total_percent: 50.0, mon_percent: 1.0, osd_percent: 25.0 });
        let memory = Parts { total_percent: 25.0, mon_percent: 3.125, osd_percent: 12.5 };
        assert_eq!(found.memory, Some(memory));
        let flow = found.network["client"];
        assert_eq!((flow.received_bits_per_s, flow.sent_bits_per_s), (400.0, 4_000.0));
        assert_eq!((flow.total_bits_per_s(), found.client_thread_percent), (4_400.0, 25.0));
        assert_eq!(Means::of(&[], &machine), None);
    }

    #[test]
    fn samples_without_the_machines_memory_tell_no_part_of_it() {
        let machine = synthetic::empty().machine;
        let old = Sample { memory_used_bytes: 0, ..sample(1_000, 80.0) };
        let text = serde_json::to_string(&old).expect("plain data");
        assert!(!text.contains("memory_used_bytes"), "{text}");
        let back: Sample = serde_json::from_str(&text).expect("as it was written");
        let found = Means::of(&[back], &machine).expect("a sample");
        assert_eq!((found.memory, found.cpu.osd_percent), (None, 40.0));
        let new = Means::of(&[sample(1_000, 20.0)], &machine).expect("a sample");
        let both = Means::joined(&[found, new]).expect("two");
        assert_eq!((both.memory, both.cpu.osd_percent), (None, 25.0));
        assert_eq!(both.network["client"].received_bits_per_s, 400.0);
        assert_eq!(Means::joined(&[]), None);
    }
}
