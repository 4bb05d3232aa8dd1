//! Devices of classes that can be bought, each with the figures that its class is known for.

use super::spec::{Burst, Channel, Disk, Flash, Media, Nanos, Spec, WriteCache};
use crate::fio::{Job, Pattern, Sync};

const US: Nanos = 1_000;
const MS: Nanos = 1_000_000;
const MB: u64 = 1_000_000;
const MIB: u64 = 1 << 20;

/// A class of devices, with the properties of a good device of that class.
#[derive(Debug, Clone)]
pub struct Preset {
    /// The properties.
    pub spec: Spec,
    /// A description of the class, in one line.
    pub what: &'static str,
    /// Figures that data sheets of the class state.
    pub nominal: Vec<Nominal>,
}

/// A figure of a data sheet.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Nominal {
    /// The load.
    pub job: Job,
    /// Commands per second under that load.
    pub iops: f64,
}

/// All presets.
pub fn all() -> Vec<Preset> {
    vec![hdd(), hdd_uncached(), ssd(), consumer_ssd(), nvme(), nvme_slow_slot()]
}

/// The preset with that name, if there is one.
pub fn find(name: &str) -> Option<Preset> {
    all().into_iter().find(|preset| preset.spec.name == name)
}

fn figure(pattern: Pattern, block_bytes: u64, depth: u32, iops: f64) -> Nominal {
    Nominal { job: Job::new(pattern, block_bytes, depth), iops }
}

fn with_flush(iops: f64) -> Nominal {
    Nominal { job: Job::new(Pattern::Write, 4096, 1).with(Sync::Flush), iops }
}

/// A rate in megabytes per second, as the number of commands of 1 MiB per second.
fn mib_commands(mb_per_s: f64) -> f64 {
    mb_per_s * 1e6 / MIB as f64
}

/// 3.5" SATA, 7,200 turns per minute: average seek 8.5 ms, 75 random reads per second one at a
/// time, twice as many with a queue of 32, 210 MB/s at the outer edge.
fn hdd() -> Preset {
    Preset {
        what: "7,200 rpm SATA disk, write cache on",
        nominal: vec![
            figure(Pattern::RandRead, 4096, 1, 78.0),
            figure(Pattern::RandRead, 4096, 32, 190.0),
            figure(Pattern::Read, MIB, 1, mib_commands(210.0)),
            with_flush(119.0),
        ],
        spec: Spec {
            name: "hdd-7200".into(),
            command_ns: 30 * US,
            link_bytes_per_s: 550 * MB,
            media: Media::Disk(Disk {
                turn_ns: 60_000 * MS / 7_200,
                seek_min_ns: 600 * US,
                seek_max_ns: 15_500 * US,
                outer_bytes_per_s: 210 * MB,
                inner_bytes_per_s: 110 * MB,
                queue: 32,
            }),
            cache: Some(WriteCache { bytes: 16 * MIB, protected: false }),
            flush_ns: 0,
        },
    }
}

/// The disk of `hdd` with its write cache off: a write takes as long as the arm and the platter
/// need, and a flush has nothing to wait for.
fn hdd_uncached() -> Preset {
    let Preset { spec, nominal, .. } = hdd();
    Preset {
        what: "7,200 rpm SATA disk, write cache off",
        nominal,
        spec: Spec { name: "hdd-7200-uncached".into(), cache: None, ..spec },
    }
}

/// 2.5" SATA for data centres: its write cache survives a power failure, so a flush costs nothing.
fn ssd() -> Preset {
    Preset {
        what: "SATA SSD for data centres, write cache protected",
        nominal: vec![
            figure(Pattern::RandRead, 4096, 1, 9_000.0),
            figure(Pattern::RandRead, 4096, 32, 90_000.0),
            figure(Pattern::RandWrite, 4096, 32, 30_000.0),
            figure(Pattern::Read, MIB, 4, mib_commands(520.0)),
            figure(Pattern::Write, MIB, 4, mib_commands(480.0)),
            with_flush(26_500.0),
        ],
        spec: Spec {
            name: "ssd-sata-plp".into(),
            command_ns: 15 * US,
            link_bytes_per_s: 550 * MB,
            media: Media::Flash(Flash {
                read: Channel { latency_ns: 80 * US, command_ns: 11 * US, bytes_per_s: 530 * MB },
                write: Channel { latency_ns: 200 * US, command_ns: 33 * US, bytes_per_s: 485 * MB },
                burst: None,
            }),
            cache: Some(WriteCache { bytes: 8 * MIB, protected: true }),
            flush_ns: 0,
        },
    }
}

/// 2.5" SATA for desktops: fast until its fast cells are full, and 2 MB/s when every 4 KiB write
/// has to be on the media.
fn consumer_ssd() -> Preset {
    Preset {
        what: "SATA SSD for desktops, write cache not protected",
        nominal: vec![
            figure(Pattern::RandRead, 4096, 1, 9_000.0),
            figure(Pattern::RandRead, 4096, 32, 80_000.0),
            figure(Pattern::Write, MIB, 4, mib_commands(500.0)),
            with_flush(490.0),
        ],
        spec: Spec {
            name: "ssd-sata-consumer".into(),
            command_ns: 15 * US,
            link_bytes_per_s: 550 * MB,
            media: Media::Flash(Flash {
                read: Channel { latency_ns: 80 * US, command_ns: 12 * US, bytes_per_s: 530 * MB },
                write: Channel { latency_ns: 250 * US, command_ns: 15 * US, bytes_per_s: 505 * MB },
                burst: Some(Burst { bytes: 2 << 30, bytes_per_s_after: 120 * MB }),
            }),
            cache: Some(WriteCache { bytes: 8 * MIB, protected: false }),
            flush_ns: 1_750 * US,
        },
    }
}

/// NVMe for data centres.
fn nvme() -> Preset {
    Preset {
        what: "NVMe SSD for data centres, write cache protected",
        nominal: vec![
            figure(Pattern::RandRead, 4096, 1, 11_500.0),
            figure(Pattern::RandRead, 4096, 32, 360_000.0),
            figure(Pattern::RandWrite, 4096, 32, 120_000.0),
            figure(Pattern::Read, MIB, 4, mib_commands(3_000.0)),
            figure(Pattern::Write, MIB, 4, mib_commands(1_900.0)),
            with_flush(60_000.0),
        ],
        spec: Spec {
            name: "nvme".into(),
            command_ns: 5 * US,
            link_bytes_per_s: 3_500 * MB,
            media: Media::Flash(Flash {
                read: Channel { latency_ns: 80 * US, command_ns: 2 * US, bytes_per_s: 3_100 * MB },
                write: Channel { latency_ns: 60 * US, command_ns: 8 * US, bytes_per_s: 1_950 * MB },
                burst: None,
            }),
            cache: Some(WriteCache { bytes: 16 * MIB, protected: true }),
            flush_ns: 5 * US,
        },
    }
}

/// The SSD of `nvme` in a slot with one lane of PCI Express 2.0, behind a switch: 500 MB/s, of
/// which the protocol leaves some 80 %.
fn nvme_slow_slot() -> Preset {
    let nvme = nvme().spec;
    Preset {
        what: "the same in a slot with one lane of PCI Express 2.0, behind a switch",
        nominal: vec![
            figure(Pattern::RandRead, 4096, 1, 10_200.0),
            figure(Pattern::RandRead, 4096, 32, 97_000.0),
            figure(Pattern::Read, MIB, 4, mib_commands(400.0)),
            figure(Pattern::Write, MIB, 4, mib_commands(400.0)),
        ],
        spec: Spec {
            name: "nvme-slow-slot".into(),
            command_ns: nvme.command_ns + 2 * US,
            link_bytes_per_s: 400 * MB,
            ..nvme
        },
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::run;
    use super::*;

    /// Size of the devices in these tests, in bytes: as in a calibration.
    const SIZE: u64 = 16 << 30;

    #[test]
    fn every_preset_does_what_its_class_is_known_for() {
        for preset in all() {
            for Nominal { job, iops } in &preset.nominal {
                let found = run(&preset.spec, SIZE, *job, 4.0).iops;
                let ratio = found / iops;
                assert!(
                    (0.9..1.1).contains(&ratio),
                    "{}: {job:?}: {found:.0} instead of {iops}",
                    preset.spec.name
                );
            }
        }
    }

    #[test]
    fn a_slowed_device_is_slower_by_its_factor() {
        for preset in all() {
            let slowed = preset.spec.slowed(8);
            for Nominal { job, .. } in &preset.nominal {
                let (full, slow) =
                    (run(&preset.spec, SIZE, *job, 2.0).iops, run(&slowed, SIZE, *job, 16.0).iops);
                assert!(
                    (7.5..8.5).contains(&(full / slow)),
                    "{}: {job:?}: {full} and {slow}",
                    preset.spec.name
                );
            }
        }
    }

    #[test]
    fn fast_cells_are_full_after_their_bytes_and_are_emptied_when_idle() {
        let preset = consumer_ssd();
        let job = Job::new(Pattern::Write, MIB, 4);
        let mb_per_s = |seconds| run(&preset.spec, SIZE, job, seconds).iops * MIB as f64 / 1e6;
        assert!(mb_per_s(4.0) > 480.0);
        // 2 GiB at 500 MB/s take 4.3 s; the rest goes at 120 MB/s.
        assert!((150.0..200.0).contains(&mb_per_s(24.0)), "{}", mb_per_s(24.0));
    }
}
