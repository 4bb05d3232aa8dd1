//! The layout of a block's testbed.

use std::time::Duration;

use super::schedule::Block;
use super::{RunError, class};
use crate::suite::{Ground, Suite};
use crate::testbed::Layout;

/// The layout of a testbed for a block, with or without a network. Devices are those of the suite
/// in either case: what is compared has as many SSDs on a machine that cannot have the network.
pub(super) fn of(suite: &Suite, block: &Block, network: bool) -> Result<Layout, RunError> {
    let (ground, shape) = (&suite.ground, &block.shape);
    Ok(Layout {
        disk: class(&ground.disk)?,
        disks: shape.disks,
        osds_per_disk: shape.osds_per_disk,
        disk_bytes: ground.disk_bytes,
        ssd: Some((class(&shape.ssd)?, ground.ssd_bytes)),
        ssds: block.ssds(ground.hypervisors).map_err(RunError::Suite)?,
        hypervisors: ground.hypervisors,
        replicas: shape.replicas,
        slowed_by: ground.slowed_by,
        ssd_shares: shape.ssd_shares,
        ceph_conf: ceph_conf(ground),
        servers: ground.servers,
        network: network && ground.servers > 0,
        delay: delay(suite).filter(|_| network),
    })
}

/// The suite's delay of a packet, each way, before it is slowed like the devices. `None` without a
/// network or a delay.
pub(super) fn delay(suite: &Suite) -> Option<Duration> {
    let Ground { servers, delay_us, .. } = suite.ground;
    (servers > 0 && delay_us > 0).then(|| Duration::from_micros(delay_us.into()))
}

/// Lines for ceph.conf. OSDs cache little in memory, because sets are smaller here than in a data
/// centre.
fn ceph_conf(ground: &Ground) -> Vec<String> {
    let bytes = ground.osd_cache_bytes;
    let mut lines = vec![
        "bluestore cache autotune = false".to_string(),
        format!("bluestore cache size = {bytes}"),
        format!("bluestore cache size hdd = {bytes}"),
        format!("bluestore cache size ssd = {bytes}"),
    ];
    lines.extend(ground.ceph_conf.iter().cloned());
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::Arrangement;
    use crate::run::schedule;

    /// The bytes that each user of an SSD has: of the one in a server, and of the one in a
    /// hypervisor.
    fn shares(suite: &Suite, placement: &str) -> (u64, u64) {
        let layouts = layouts(suite, true);
        let (_, layout) = layouts
            .iter()
            .find(|(names, _)| names.iter().any(|name| name == placement))
            .expect(placement);
        (layout.server_share_bytes(), layout.host_share_bytes())
    }

    /// The layout of each block, with the placements that are measured on it.
    fn layouts(suite: &Suite, network: bool) -> Vec<(Vec<String>, Layout)> {
        let blocks = schedule::blocks(suite, 1, 7, &|_, _| false).expect("blocks");
        let one = |block: &Block| {
            let names = block.steps.iter().map(|step| step.placement.clone()).collect();
            (names, of(suite, block, network).expect("its classes are known"))
        };
        blocks.iter().map(one).collect()
    }

    fn both_forms() -> impl Iterator<Item = Suite> {
        Suite::built_in().into_iter().flat_map(|suite| [suite.clone().quick(), suite])
    }

    #[test]
    fn the_users_of_an_ssd_have_the_same_bytes_together_in_a_server_and_in_a_hypervisor() {
        const MIB: u64 = 1 << 20;
        let quick = |name: &str| Suite::find(name).expect("built in").quick();
        for (suite, placement, in_server, in_host) in [
            ("which-side", "osd-tidepool", 1216, 1216),
            ("which-side", "host-tidepool", 1216, 1216),
            ("which-side", "host-tidepool-replicated", 1216, 1216),
            ("iometer-8020", "osd-tidepool", 960, 960),
            ("iometer-8020", "filestore-journal+osd-tidepool", 480, 960),
            ("iometer-8020", "host-tidepool", 960, 960),
            ("iometer-8020", "host-tidepool-replicated", 960, 960),
        ] {
            let suite = Suite { without: Vec::new(), ..quick(suite) };
            let found = shares(&suite, placement);
            assert_eq!(found, (in_server * MIB, in_host * MIB), "{} {placement}", suite.name);
        }
        // What stands in front of a cluster whose servers divide their SSDs has its own SSD whole.
        let mut suite = quick("which-side");
        let divided = "host-tidepool+bluestore-dbwal+osd-tidepool".to_string();
        suite.placements.push(divided.clone());
        suite.workloads[0].placements = Vec::new();
        assert_eq!(shares(&suite, &divided), (608 * MIB, 1216 * MIB));
        for suite in both_forms() {
            for (names, layout) in layouts(&suite, true) {
                for name in names {
                    let users =
                        u64::from(Arrangement::parse(&name).expect("it is known").ssd_shares());
                    let (server, host) = (layout.server_share_bytes(), layout.host_share_bytes());
                    assert!(host.abs_diff(server * users) < users, "{} {name}", suite.name);
                }
            }
        }
    }

    #[test]
    fn a_machine_without_a_network_has_the_same_devices() {
        for suite in both_forms() {
            for ((names, with), (_, without)) in
                layouts(&suite, true).into_iter().zip(layouts(&suite, false))
            {
                assert!(
                    without.nodes().is_none() && without.delay.is_none(),
                    "{} {names:?}",
                    suite.name
                );
                assert_eq!(
                    with.nodes().is_some(),
                    suite.ground.servers > 0,
                    "{} {names:?}",
                    suite.name
                );
                assert_eq!(
                    without.servers_with_ssd(),
                    with.servers_with_ssd(),
                    "{} {names:?}",
                    suite.name
                );
                let told = with.ssds.count(suite.ground.servers);
                let made = without.servers_with_ssd().len() as u32 + without.ssds.hosts;
                assert_eq!(made, told, "{} {names:?}: the report counts its SSDs", suite.name);
            }
        }
    }
}
