//! Cluster sizes and numbers of clients that are not measured, and why.

use crate::results::{NotRunClients, NotRunSize, Results};
use crate::suite::{Cell, ClusterSize, Suite};
use crate::words;

/// Why a machine with `cpus` processors cannot run `count` of something, of which the suite allows
/// `most` on each processor. `None` if it can.
fn too_many(count: u32, what: &str, most: u32, cpus: usize) -> Option<String> {
    let needed = count.div_ceil(most.max(1));
    (needed as usize > cpus).then(|| {
        format!(
            "{} on {}: the suite allows {most} on each, so that it needs {needed}",
            words::count(count as usize, what),
            words::count(cpus, "processor")
        )
    })
}

/// The cluster sizes that the suite is without, and those with more OSDs than it allows on this
/// number of processors.
pub(super) fn not_run_sizes(suite: &Suite, cpus: usize) -> Vec<NotRunSize> {
    let why = |size: &ClusterSize| {
        if suite.without_sizes.contains(size) {
            return Some("the quick form leaves it out".to_string());
        }
        too_many(size.osds(), "OSD", suite.ground.osds_per_processor_max?, cpus)
    };
    let not_run = |size: ClusterSize| Some(NotRunSize { size, why: why(&size)? });
    suite.ground.sizes().into_iter().filter_map(not_run).collect()
}

/// The numbers of clients that are larger than the suite allows on this number of processors.
pub(super) fn not_run_clients(suite: &Suite, cpus: usize) -> Vec<NotRunClients> {
    let Some(most) = suite.ground.clients_per_processor_max else { return Vec::new() };
    let why = |clients: u32| {
        Some(NotRunClients { clients, why: too_many(clients, "client", most, cpus)? })
    };
    suite.clients().into_iter().filter_map(why).collect()
}

/// Whether the cell has a size or a number of clients that is not measured.
pub(super) fn is_left_out(results: &Results, cell: &Cell) -> bool {
    let size = ClusterSize { disks: cell.disks, osds_per_disk: cell.osds_per_disk };
    results.not_run_sizes.iter().any(|found| found.size == size)
        || results.not_run_clients.iter().any(|found| found.clients == cell.clients)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    /// Results of a suite before the first measurement, on a machine with this number of
    /// processors.
    fn header(suite: &Suite, cpus: usize) -> Results {
        Results {
            suite: suite.clone(),
            not_run_sizes: not_run_sizes(suite, cpus),
            not_run_clients: not_run_clients(suite, cpus),
            ..synthetic::empty()
        }
    }

    #[test]
    fn what_a_machine_does_not_bear_is_told_with_what_it_takes() {
        let suite = Suite::find("pvc2").expect("it comes with the program");
        let reason = |cpus| -> Vec<(u32, String)> {
            not_run_sizes(&suite, cpus)
                .into_iter()
                .map(|found| (found.size.osds(), found.why))
                .collect()
        };
        let why =
            "16 OSDs on 2 processors: the suite allows 4 on each, so that it needs 4".to_string();
        assert_eq!(reason(2), [(16, why)]);
        assert_eq!(reason(1).len(), 3, "one of sixteen, two of eight");
        assert!(reason(4).is_empty());
        let quick = suite.clone().quick();
        let found = not_run_sizes(&quick, 2);
        assert_eq!(found.len(), suite.sizes().len() - quick.sizes().len());
        assert!(found.iter().all(|found| found.why == "the quick form leaves it out"), "{found:?}");
        let found = header(&suite, 2);
        let left_out = suite.cells().into_iter().filter(|cell| is_left_out(&found, cell));
        assert!(
            left_out.clone().all(|cell| cell.disks * cell.osds_per_disk == 16)
                && left_out.count() > 0
        );
        let other = Suite::find("which-side").expect("it comes with the program");
        assert!(not_run_sizes(&other, 1).is_empty() && not_run_clients(&other, 1).is_empty());
    }

    #[test]
    fn more_clients_than_a_machine_bears_are_left_out_and_told() {
        let suite = Suite::find("micron").expect("it comes with the program");
        let why = "40 clients on 2 processors: the suite allows 10 on each, so that it needs 4"
            .to_string();
        assert_eq!(not_run_clients(&suite, 2), [NotRunClients { clients: 40, why }]);
        assert!(not_run_clients(&suite, 4).is_empty());
        let found = header(&suite, 2);
        for cell in suite.cells() {
            assert_eq!(is_left_out(&found, &cell), cell.clients == 40, "{cell:?}");
        }
        let with_images = suite.images_on(found.machine.cpus);
        assert!(
            suite
                .cells()
                .iter()
                .all(|cell| is_left_out(&found, cell) || cell.clients <= with_images)
        );
    }
}
