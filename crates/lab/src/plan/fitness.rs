//! Whether an SSD is fit to hold data that must not be lost, and how many OSDs it carries.

use super::inventory::{Drive, Host, Kind, Product, State};
use super::rules::{Advice, GRADE, NOT_TOUCHED, POWER_LOSS, UNWRITABLE};
use crate::qualify::Grade;

/// Bandwidth of an SSD that an OSD on a disk takes, in bytes per second. A publication had seven
/// disks to an SSD, and 800 MB/s for the cluster; with fourteen disks this is the part of each
/// disk.
const OSD_WRITE_BYTES_PER_S: f64 = 57e6;
/// Most OSDs on an SSD, whatever its speed: the largest number that Ceph recommends.
const OSDS_MAX: usize = 15;

/// Fitness of an SSD, as far as it is known.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fitness {
    /// The SSD may be used.
    Fit,
    /// The SSD must not be used, for this reason.
    Unfit(Advice),
    /// The fitness is not known, because this fact is missing.
    Unknown(&'static str),
}

impl Product {
    /// The grade that was given, or the grade of the measured synchronous writes; of both, the
    /// worse one.
    pub fn grade(&self) -> Option<Grade> {
        let measured = self.sync_write_iops.map(Grade::of_iops);
        match (self.grade, measured) {
            (Some(told), Some(measured)) => Some(told.min(measured)),
            (told, measured) => told.or(measured),
        }
    }

    /// Whether the drive may hold a journal, a database or a cache.
    pub(super) fn fitness(&self) -> Fitness {
        if self.protected == Some(false) {
            return Fitness::Unfit(Advice::new("it has no power-loss protection", &[POWER_LOSS]));
        }
        if self.grade() == Some(Grade::Reject) {
            return Fitness::Unfit(Advice::new("`lab qualify` rejects it", &[GRADE]));
        }
        match (self.kind, self.protected) {
            (None, _) => Fitness::Unknown("what kind of drive it is (hdd, ssd, nvme)"),
            (_, None) => Fitness::Unknown("whether its write cache survives a power failure"),
            _ => Fitness::Fit,
        }
    }

    /// Most OSDs whose database or journal the drive carries: one for a poor or rejected drive,
    /// otherwise by the measured bandwidth, otherwise by kind and grade, at most as many as Ceph
    /// recommends.
    pub(super) fn osds_max(&self) -> usize {
        if matches!(self.grade(), Some(Grade::Reject | Grade::Poor)) {
            return 1;
        }
        if let Some(bandwidth) = self.sync_write_bytes_per_s {
            return ((bandwidth / OSD_WRITE_BYTES_PER_S) as usize).clamp(1, OSDS_MAX);
        }
        match (self.kind, self.grade()) {
            (Some(Kind::Nvme), Some(Grade::Good)) => 10,
            (Some(Kind::Nvme), _) | (_, Some(Grade::Good)) => 5,
            _ => 4,
        }
    }
}

impl Drive {
    /// The drive is flash, as far as is known.
    pub(super) fn is_flash(&self) -> bool {
        matches!(self.product.kind, Some(Kind::Ssd | Kind::Nvme))
    }
}

/// Why a drive is not used. A read-only or zoned drive is always refused. Of the other drives only
/// SSDs that hold no OSDs are checked; None for any other drive, and for an SSD without an
/// objection.
pub(super) fn refusal(drive: &Drive) -> Option<Advice> {
    if let State::Unfit(why) = &drive.state {
        return Some(Advice::new(format!("it is {why}"), &[UNWRITABLE]));
    }
    if !drive.is_flash() || drive.state == State::Osd {
        return None;
    }
    match (drive.product.fitness(), &drive.state) {
        (Fitness::Unfit(why), _) => Some(why),
        (_, State::InUse(what)) => {
            Some(Advice::new(format!("it is {}", used(what)), &[NOT_TOUCHED]))
        }
        (_, State::Unknown) => Some(Advice::new("nobody has said that it is free", &[NOT_TOUCHED])),
        (Fitness::Unknown(what), _) => {
            Some(Advice::new(format!("it is not known {what}"), &[POWER_LOSS, GRADE]))
        }
        (Fitness::Fit, _) => None,
    }
}

/// What is known of the use of a drive, in a form that reads well after "it is". A text such as
/// `holds a partition` gets words before it.
fn used(what: &str) -> String {
    if what.starts_with("holds") { format!("in use: it {what}") } else { what.to_string() }
}

/// Facts about a host's drives that were not given, but decide how the drives are used.
pub(super) fn missing(host: &Host) -> Vec<String> {
    let mut missing = Vec::new();
    for drive in &host.drives {
        let name = format!("{} of {}", drive.label, host.name);
        if drive.state == State::Unknown {
            missing.push(format!("whether {name} is free (use = \"free\", \"osd\" or \"other\")"));
        }
        if drive.state != State::Free {
            continue;
        }
        match drive.product.fitness() {
            Fitness::Unknown(what) if drive.product.kind != Some(Kind::Hdd) => {
                missing.push(format!("of {name}: {what}"));
            }
            Fitness::Fit if drive.is_flash() && drive.product.grade().is_none() => {
                let path = drive.path.as_deref().unwrap_or("DEVICE");
                missing.push(format!(
                    "the grade of {name}: `tidepool lab qualify {path} --long 10m --yes-destroy` overwrites it and tells"
                ));
            }
            _ => {}
        }
        if drive.path.is_none() {
            missing.push(format!("the path of {name}: without it there are no commands"));
        }
    }
    missing
}

/// Indices of a host's SSDs that may be used, best first: by grade, then NVMe before SATA, then the
/// larger before the smaller.
pub(super) fn usable(host: &Host) -> Vec<usize> {
    let fit = |drive: &Drive| {
        drive.is_flash() && drive.state == State::Free && drive.product.fitness() == Fitness::Fit
    };
    let mut usable: Vec<usize> =
        (0..host.drives.len()).filter(|&index| fit(&host.drives[index])).collect();
    usable.sort_by_key(|&index| {
        let product = &host.drives[index].product;
        std::cmp::Reverse((product.grade(), product.kind, product.bytes))
    });
    usable
}

#[cfg(test)]
mod tests {
    use super::super::tests::{drive, product};
    use super::*;

    #[test]
    fn without_power_loss_protection_or_when_rejected_an_ssd_is_unfit_and_the_rule_is_named() {
        let mut unprotected = product(Kind::Nvme, 1 << 40);
        unprotected.protected = Some(false);
        let mut rejected = product(Kind::Ssd, 1 << 40);
        rejected.grade = Some(Grade::Reject);
        // A grade in the inventory does not outweigh a measurement.
        let mut measured = product(Kind::Ssd, 1 << 40);
        (measured.grade, measured.sync_write_iops) = (Some(Grade::Good), Some(490.0));
        for (product, rule) in
            [(unprotected, "power-loss"), (rejected, "grade"), (measured, "grade")]
        {
            let Fitness::Unfit(why) = product.fitness() else { panic!("{product:?}") };
            assert_eq!(why.rules, [rule]);
        }
    }

    #[test]
    fn what_is_not_known_of_an_ssd_is_missing_and_not_guessed() {
        let mut product = product(Kind::Nvme, 1 << 40);
        product.protected = None;
        assert!(matches!(product.fitness(), Fitness::Unknown(_)));
        let host = Host {
            name: "a".into(),
            role: None,
            drives: vec![Drive {
                product,
                ..drive(Kind::Nvme, 1 << 40, "/dev/nvme0n1", State::Free)
            }],
        };
        assert_eq!(usable(&host), Vec::<usize>::new());
        assert!(missing(&host)[0].contains("survives a power failure"), "{:?}", missing(&host));
    }

    #[test]
    fn only_free_drives_are_usable_and_good_ones_come_first() {
        let with = |path: &str, state, grade| {
            let mut drive = drive(Kind::Ssd, 1 << 40, path, state);
            drive.product.grade = grade;
            drive
        };
        let host = Host {
            name: "a".into(),
            role: None,
            drives: vec![
                with("/dev/sda", State::InUse("mounted at /".into()), Some(Grade::Good)),
                with("/dev/sdb", State::Free, Some(Grade::Fair)),
                with("/dev/sdc", State::Free, Some(Grade::Good)),
                with("/dev/sdd", State::Unknown, Some(Grade::Good)),
            ],
        };
        assert_eq!(usable(&host), [2, 1]);
        for index in [0, 3] {
            assert_eq!(refusal(&host.drives[index]).expect("refused").rules, ["not-touched"]);
        }
        assert_eq!(refusal(&host.drives[1]), None);
    }

    #[test]
    fn how_many_osds_an_ssd_carries_depends_on_its_kind_and_grade() {
        let osds_max = |kind, grade| Product { grade, ..product(kind, 1 << 40) }.osds_max();
        assert_eq!(osds_max(Kind::Ssd, Some(Grade::Good)), 5);
        assert_eq!(osds_max(Kind::Ssd, Some(Grade::Fair)), 4);
        assert_eq!(osds_max(Kind::Ssd, None), 4);
        assert_eq!(osds_max(Kind::Nvme, Some(Grade::Good)), 10);
        assert_eq!(osds_max(Kind::Nvme, None), 5);
        assert_eq!(osds_max(Kind::Nvme, Some(Grade::Poor)), 1);
    }

    #[test]
    fn a_measured_bandwidth_says_how_many_osds_an_ssd_carries() {
        let osds_max = |grade, megabytes: f64| {
            let product = product(Kind::Ssd, 1 << 40);
            Product { grade: Some(grade), sync_write_bytes_per_s: Some(megabytes * 1e6), ..product }
                .osds_max()
        };
        assert_eq!(osds_max(Grade::Fair, 400.0), 7, "as published");
        assert_eq!(osds_max(Grade::Good, 200.0), 3);
        assert_eq!((osds_max(Grade::Good, 2.0), osds_max(Grade::Good, 7_000.0)), (1, 15));
        assert_eq!(osds_max(Grade::Poor, 400.0), 1);
    }
}
