//! Which sizes of clusters are not measured, and why.

use crate::results::NotRunSize;
use crate::suite::{Cell, ClusterSize, Suite};
use crate::words;

/// Sizes that the suite is without, and those with more OSDs than it allows on a machine with so many processors.
pub(super) fn not_run_sizes(suite: &Suite, cpus: usize) -> Vec<NotRunSize> {
    let why = |size: &ClusterSize| {
        if suite.without_sizes.contains(size) {
            return Some("the quick form leaves it out".to_string());
        }
        let most = suite.ground.osds_per_processor_max?;
        let needed = size.osds().div_ceil(most);
        (needed as usize > cpus).then(|| {
            format!(
                "{} on {}: the suite allows {most} on each, so that it needs {needed}",
                words::count(size.osds() as usize, "OSD"),
                words::count(cpus, "processor")
            )
        })
    };
    let not_run = |size: ClusterSize| Some(NotRunSize { size, why: why(&size)? });
    suite.ground.sizes().into_iter().filter_map(not_run).collect()
}

/// A cell is of a size that is not measured.
pub(super) fn is_left_out(not_run: &[NotRunSize], cell: &Cell) -> bool {
    not_run
        .iter()
        .any(|found| (found.size.disks, found.size.osds_per_disk) == (cell.disks, cell.osds_per_disk))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_machine_does_not_bear_is_told_with_what_it_takes() {
        let suite = Suite::find("pvc2").expect("it comes with the program");
        let reason = |cpus| -> Vec<(u32, String)> {
            not_run_sizes(&suite, cpus).into_iter().map(|found| (found.size.osds(), found.why)).collect()
        };
        let why = "16 OSDs on 2 processors: the suite allows 4 on each, so that it needs 4".to_string();
        assert_eq!(reason(2), [(16, why)]);
        assert_eq!(reason(1).len(), 3, "one of sixteen, two of eight");
        assert!(reason(4).is_empty());
        let quick = suite.clone().quick();
        let found = not_run_sizes(&quick, 2);
        assert_eq!(found.len(), suite.sizes().len() - quick.sizes().len());
        assert!(found.iter().all(|found| found.why == "the quick form leaves it out"), "{found:?}");
        let found = not_run_sizes(&suite, 2);
        let left_out = suite.cells().into_iter().filter(|cell| is_left_out(&found, cell));
        assert!(left_out.clone().all(|cell| cell.disks * cell.osds_per_disk == 16) && left_out.count() > 0);
        let other = Suite::find("which-side").expect("it comes with the program");
        assert!(not_run_sizes(&other, 1).is_empty());
    }
}
