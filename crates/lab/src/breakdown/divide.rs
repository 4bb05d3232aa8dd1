//! How the mean time of a run's requests is divided among the parts of their path.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Breakdown, Hops, Load, Part, Share};
use crate::access::Access;
use crate::collect::hops::{Hop, Stage};
use crate::results::{Durability, Run};
use crate::testbed::HOST_SSDS;
use crate::words;
use tidepool_cluster::device::Counts;
use tidepool_cluster::fio::Figures;

/// Up to this factor between them, the requests that librbd counted are taken for those that the
/// clients sent: the two windows differ by a moment.
const SAME_REQUESTS: f64 = 1.25;

/// Subtracts parts from a mean.
struct Cut {
    left_us: f64,
    parts: BTreeMap<Part, f64>,
}

impl Cut {
    fn new(mean_us: f64) -> Cut {
        Cut { left_us: mean_us, parts: BTreeMap::new() }
    }

    /// Gives `part` this time, but at most what is left.
    fn take(&mut self, part: Part, us: f64) {
        let us = if us.is_finite() { us.clamp(0.0, self.left_us) } else { 0.0 };
        *self.parts.entry(part).or_insert(0.0) += us;
        self.left_us = (self.left_us - us).max(0.0);
    }

    /// Gives `part` what is left.
    fn rest(&mut self, part: Part) {
        self.take(part, self.left_us);
    }

    fn done(self, figures: &Figures) -> Hops {
        let parts = self.parts.into_iter().filter(|(_, us)| *us > 0.0);
        let parts = parts.map(|(part, mean_us)| Share { part, mean_us }).collect();
        Hops { iops: figures.iops, mean_us: figures.mean_us, parts }
    }
}

/// Ceph's hops in a run.
struct Stages<'a>(&'a [Stage]);

impl Stages<'_> {
    fn find(&self, hop: Hop) -> Option<&Stage> {
        self.0.iter().find(|stage| stage.hop == hop)
    }

    /// Mean time of a hop in microseconds; 0 if it was not passed.
    fn mean_us(&self, hop: Hop) -> f64 {
        self.find(hop).map_or(0.0, |stage| stage.mean_us)
    }

    /// Mean time of `hop` for each `of`, which may have passed it several times or never.
    fn mean_us_per(&self, hop: Hop, of: Hop) -> f64 {
        let times = |hop| self.find(hop).map_or(0.0, |stage| stage.count as f64);
        if times(of) > 0.0 { self.mean_us(hop) * times(hop) / times(of) } else { 0.0 }
    }

    /// Subtracts an OSD's read from a request. `part` is the part of the requests that have one.
    fn read(&self, cut: &mut Cut, part: f64) {
        let osd_us = self.mean_us(Hop::OsdRead) * part;
        let mut inside = Cut::new(osd_us.min(cut.left_us));
        inside.take(Part::OsdQueue, self.mean_us(Hop::OsdQueue) * part);
        inside.take(Part::StoreRead, self.mean_us_per(Hop::StoreRead, Hop::OsdRead) * part);
        inside.rest(Part::OsdOther);
        inside.parts.into_iter().for_each(|(part, us)| cut.take(part, us));
    }

    /// Subtracts an OSD's write from a request. A packet takes `transit_us` to a replica.
    fn write(&self, cut: &mut Cut, transit_us: f64) {
        let mut inside = Cut::new(self.mean_us(Hop::OsdWrite).min(cut.left_us));
        inside.take(Part::OsdQueue, self.mean_us(Hop::OsdQueue));
        // The time in the KV queue includes the flush before the commit.
        let flush_us = self.mean_us(Hop::KvFlush);
        let store = [
            (Part::StorePrepare, self.mean_us(Hop::StorePrepare)),
            (Part::DataDevice, self.mean_us(Hop::DataDevice)),
            (Part::KvQueue, self.mean_us(Hop::KvQueue) - flush_us),
            (Part::KvFlush, flush_us),
            (Part::KvCommit, self.mean_us(Hop::KvCommit)),
            (Part::JournalWait, self.mean_us(Hop::JournalQueue)),
            (Part::Journal, self.mean_us(Hop::Journal)),
        ];
        let before_us = inside.left_us;
        store.into_iter().for_each(|(part, us)| inside.take(part, us));
        if let Some(replica) = self.find(Hop::Replica) {
            let own_us = before_us - inside.left_us;
            beside(&mut inside, own_us, replica.mean_us, transit_us);
        }
        inside.rest(Part::OsdOther);
        inside.parts.into_iter().for_each(|(part, us)| cut.take(part, us));
    }
}

/// Subtracts the extra time of a second copy over the own copy, written at the same time, and the
/// way to it and back.
fn beside(cut: &mut Cut, own_us: f64, second_us: f64, transit_us: f64) {
    cut.take(Part::Replica, second_us - own_us);
    cut.take(Part::Network, 2.0 * transit_us - (own_us - second_us).max(0.0));
}

/// Mean time of a read or write inside a cache's daemon in microseconds, if it counts that.
fn daemon_us(run: &Run, kind: &str) -> Option<f64> {
    let caches = run.counted.placement.as_object()?;
    let (_, daemon) = caches.iter().find(|(name, _)| words::on_host(name))?;
    let number = |name: String| daemon.get(name)?.as_f64().filter(|number| *number > 0.0);
    Some(number(format!("{kind}_us"))? / number(format!("{kind}s"))?)
}

/// The access path and the counters of its librbd, if it has them.
fn path(run: &Run) -> Option<(Access, &Value)> {
    let counted = run.counted.placement.as_object()?;
    Access::ALL.into_iter().find_map(|access| Some((access, counted.get(access.name())?)))
}

/// Subtracts the way from a client to the librbd at the end of its access path: the client's time
/// less the time in librbd. This includes the client's own side. Nothing is subtracted if librbd
/// counted other requests than the clients sent.
fn to_librbd(cut: &mut Cut, run: &Run, kind: &str, figures: &Figures, transit_us: f64) {
    let Some((access, counted)) = path(run) else { return };
    let number = |name: String| counted.get(name).and_then(Value::as_f64).unwrap_or(0.0);
    let times = number(format!("{kind}s"));
    let sent = figures.iops * seconds(run).unwrap_or(0.0);
    if times <= 0.0 || !(1.0 / SAME_REQUESTS..=SAME_REQUESTS).contains(&(sent / times)) {
        return;
    }
    let before_us = cut.left_us - number(format!("{kind}_us")) / times;
    let mut way = Cut::new(before_us.max(0.0));
    if access == Access::Iscsi {
        way.take(Part::Network, 2.0 * transit_us);
    }
    way.rest(match access {
        Access::Iscsi => Part::Gateway,
        Access::Guest => Part::ClientGuest,
        _ => Part::NbdServer,
    });
    way.parts.into_iter().for_each(|(part, us)| cut.take(part, us));
}

/// Length of a run's samples in seconds.
fn seconds(run: &Run) -> Option<f64> {
    run.samples.last().map(|sample| sample.at_ms as f64 / 1e3).filter(|seconds| *seconds > 0.0)
}

/// Subtracts the time inside a cache's daemon, divided into known parts. The rest of it belongs to
/// `rest`.
fn in_daemon(cut: &mut Cut, run: &Run, kind: &str, rest: Part, parts: impl FnOnce(&mut Cut)) {
    let all_us = daemon_us(run, kind);
    let mut inside = Cut::new(all_us.unwrap_or(cut.left_us).min(cut.left_us));
    parts(&mut inside);
    if all_us.is_some() {
        inside.rest(rest);
    }
    inside.parts.into_iter().for_each(|(part, us)| cut.take(part, us));
}

/// Counts of the SSDs of the hypervisors with clients, together.
fn own_ssds(run: &Run) -> Counts {
    let own = HOST_SSDS
        .iter()
        .take(run.hypervisors as usize)
        .filter_map(|name| run.counted.devices.get(*name));
    own.fold(Counts::default(), |sum, counts| sum.plus(*counts))
}

/// Counts of the SSDs that take second copies: those of the other hypervisors. None if there are no
/// such copies.
fn second_ssds(run: &Run) -> Option<Counts> {
    words::without_copy(&run.cell.placement)?;
    if run.hypervisors > 1 {
        Some(own_ssds(run))
    } else {
        run.counted.devices.get(HOST_SSDS[1]).copied()
    }
}

/// Part of the blocks that were cache hits. If there are two caches, of the one nearest to the
/// client.
fn hit_ratio(run: &Run) -> Option<f64> {
    let caches = run.counted.placement.as_object()?;
    let counting = caches.iter().filter(|(_, cache)| cache.get("hit_blocks").is_some());
    let cache = counting.max_by_key(|(name, _)| words::on_host(name))?.1;
    let blocks = |name: &str| cache.get(name)?.as_f64().filter(|blocks| *blocks >= 0.0);
    let (hit, missed) = blocks("hit_blocks").zip(blocks("miss_blocks"))?;
    (hit + missed > 0.0).then(|| hit / (hit + missed))
}

/// Mean time of a command in microseconds; 0 if there were none.
fn mean_us(total_us: f64, commands: f64) -> f64 {
    if commands > 0.0 { total_us / commands } else { 0.0 }
}

fn loads(run: &Run) -> Vec<Load> {
    let seconds = seconds(run);
    // A document may contain any numbers. Their sums are computed as floats, because integers might
    // overflow.
    let commands =
        |counts: &Counts| counts.reads as f64 + counts.writes as f64 + counts.flushes as f64;
    let total_us =
        |counts: &Counts| counts.read_us as f64 + counts.write_us as f64 + counts.flush_us as f64;
    let load = |(device, counts): (&String, &Counts)| {
        // Rates come from the samples, whose length is known.
        let sampled = run.samples.iter().filter_map(|sample| sample.devices.get(device));
        let sampled = sampled.fold((0.0, 0.0), |(n, us), c| (n + commands(c), us + total_us(c)));
        Load {
            device: device.clone(),
            commands_per_s: seconds.map(|seconds| sampled.0 / seconds),
            command_us: mean_us(total_us(counts), commands(counts)),
            in_flight: seconds.map(|seconds| sampled.1 / 1e6 / seconds),
        }
    };
    // SSDs of other placements on the testbed did nothing and are left out.
    let busy = run.counted.devices.iter().filter(|(_, counts)| commands(counts) > 0.0);
    let mut loads: Vec<Load> = busy.map(load).collect();
    loads.sort_by(|one, two| two.in_flight.unwrap_or(0.0).total_cmp(&one.in_flight.unwrap_or(0.0)));
    loads
}

/// The breakdown of a run's time.
pub fn breakdown(run: &Run) -> Breakdown {
    // The counters include the requests of neighbours, which cannot be told apart.
    if run.neighbours.is_some() {
        return Breakdown { devices: loads(run), ..Breakdown::default() };
    }
    let stages = Stages(&run.counted.stages);
    let (ssd, copies) = (own_ssds(run), second_ssds(run));
    let hit_ratio = hit_ratio(run);
    let usable = |figures: &&Figures| {
        figures.iops > 0.0 && figures.mean_us.is_finite() && figures.mean_us > 0.0
    };
    let on_host = words::on_host(&run.cell.placement);
    // A cache in the client's memory has no counters, and requests do not wait for the OSDs behind
    // it.
    let told = run.durability != Durability::Volatile;
    // One way; a round trip takes twice as long. Nothing is attributed to a network that did not
    // measure its transit times.
    let transit_us = run.counted.transit_us.unwrap_or(0.0);
    let reads = run.reads.as_ref().filter(usable).filter(|_| told).and_then(|figures| {
        let mut cut = Cut::new(figures.mean_us);
        if on_host {
            let hits = hit_ratio?;
            let over_gateway = path(run).is_some_and(|(access, _)| access == Access::Iscsi);
            // To the gateway, and on to the OSD. Nothing counts how long a miss is in the gateway,
            // so that the rest is not only the daemon's.
            let (ways, rest) = if over_gateway && hits < 1.0 {
                (2.0, Part::NotAccounted)
            } else {
                (1.0, Part::CacheDaemon)
            };
            in_daemon(&mut cut, run, "read", rest, |cut| {
                cut.take(Part::CacheSsd, hits * mean_us(ssd.read_us as f64, ssd.reads as f64));
                cut.take(Part::Network, ways * 2.0 * transit_us * (1.0 - hits));
                stages.read(cut, 1.0 - hits);
            });
        } else {
            stages.find(Hop::OsdRead)?;
            to_librbd(&mut cut, run, "read", figures, transit_us);
            cut.take(Part::Network, 2.0 * transit_us);
            stages.read(&mut cut, 1.0);
        }
        cut.rest(Part::NotAccounted);
        Some(cut.done(figures))
    });
    let writes = run.writes.as_ref().filter(usable).filter(|_| told).and_then(|figures| {
        let mut cut = Cut::new(figures.mean_us);
        if on_host {
            // The OSDs write only the cache's drain, which no request waits for.
            if ssd.writes == 0 {
                return None;
            }
            let own_us = mean_us(ssd.write_us as f64, ssd.writes as f64);
            in_daemon(&mut cut, run, "write", Part::CacheDaemon, |cut| {
                cut.take(Part::CacheSsd, own_us);
                if let Some(copies) = copies.filter(|copies| copies.writes > 0) {
                    beside(
                        cut,
                        own_us,
                        mean_us(copies.write_us as f64, copies.writes as f64),
                        transit_us,
                    );
                }
            });
        } else {
            stages.find(Hop::OsdWrite)?;
            to_librbd(&mut cut, run, "write", figures, transit_us);
            cut.take(Part::Network, 2.0 * transit_us);
            stages.write(&mut cut, transit_us);
        }
        cut.rest(Part::NotAccounted);
        Some(cut.done(figures))
    });
    Breakdown { reads, writes, hit_ratio, devices: loads(run) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::breakdown::{Side, combined};
    use crate::synthetic;

    fn stage(hop: Hop, count: u64, mean_us: f64) -> Stage {
        Stage { hop, count, mean_us }
    }

    fn part(hops: &Hops, part: Part) -> f64 {
        hops.parts.iter().find(|share| share.part == part).map_or(0.0, |share| share.mean_us)
    }

    fn run(placement: &str, read_us: f64, write_us: f64) -> Run {
        let mut run = synthetic::run(placement, "4k-80-20", 16, 1, 100.0);
        let figures = |iops, mean_us| Some(Figures { iops, mean_us, ..Figures::default() });
        (run.reads, run.writes) = (figures(80.0, read_us), figures(20.0, write_us));
        run
    }

    #[test]
    fn the_parts_of_a_request_add_up_to_what_the_client_saw() {
        let mut run = run("bluestore-dbwal", 10_000.0, 4_000.0);
        run.counted.stages = vec![
            stage(Hop::OsdRead, 800, 9_000.0),
            stage(Hop::OsdWrite, 200, 3_500.0),
            stage(Hop::OsdQueue, 1_000, 500.0),
            stage(Hop::StoreRead, 1_600, 4_000.0),
            stage(Hop::StorePrepare, 200, 100.0),
            stage(Hop::KvQueue, 200, 700.0),
            stage(Hop::KvFlush, 150, 600.0),
            stage(Hop::KvCommit, 200, 9_999.0),
            stage(Hop::Replica, 200, 50.0),
        ];
        let found = breakdown(&run);
        let (reads, writes) =
            (found.reads.as_ref().expect("reads"), found.writes.as_ref().expect("writes"));
        for hops in [reads, writes] {
            let sum: f64 = hops.parts.iter().map(|share| share.mean_us).sum();
            assert!((sum - hops.mean_us).abs() < 1e-6, "{hops:?}");
        }
        assert_eq!(part(reads, Part::StoreRead), 8_000.0, "two of them for each read");
        assert_eq!(
            (part(reads, Part::NotAccounted), part(reads, Part::OsdOther)),
            (1_000.0, 500.0)
        );
        assert_eq!((part(writes, Part::KvQueue), part(writes, Part::KvFlush)), (100.0, 600.0));
        assert_eq!(part(writes, Part::KvCommit), 2_200.0, "not more than the OSD's own time");
        assert_eq!(part(writes, Part::Replica), 0.0, "it was faster than the store");
        let bottleneck = found.bottleneck().expect("one");
        assert_eq!(
            (bottleneck.side, bottleneck.part, bottleneck.share),
            (Side::Read, Part::StoreRead, 0.8)
        );
    }

    #[test]
    fn a_replica_counts_for_what_it_takes_longer_than_the_own_store() {
        let mut run = run("filestore-journal", 10.0, 4_000.0);
        run.counted.stages = vec![
            stage(Hop::OsdWrite, 200, 3_500.0),
            stage(Hop::Journal, 400, 1_000.0),
            stage(Hop::Replica, 200, 3_000.0),
        ];
        let writes = breakdown(&run).writes.expect("writes");
        assert_eq!(
            (part(&writes, Part::Journal), part(&writes, Part::Replica)),
            (1_000.0, 2_000.0)
        );
    }

    #[test]
    fn reads_of_a_host_cache_wait_for_its_ssd_or_for_ceph_and_writes_for_its_ssd() {
        let mut run = run("host-tidepool", 3_000.0, 1_000.0);
        run.counted.placement =
            serde_json::json!({"host-tidepool": {"hit_blocks": 75, "miss_blocks": 25}});
        let ssd =
            Counts { reads: 10, read_us: 8_000, writes: 5, write_us: 3_000, ..Counts::default() };
        run.counted.devices = [(HOST_SSDS[0].to_string(), ssd)].into();
        run.counted.stages =
            vec![stage(Hop::OsdRead, 20, 8_000.0), stage(Hop::StoreRead, 20, 6_000.0)];
        let found = breakdown(&run);
        let reads = found.reads.expect("reads");
        assert_eq!(found.hit_ratio, Some(0.75));
        assert_eq!((part(&reads, Part::CacheSsd), part(&reads, Part::StoreRead)), (600.0, 1_500.0));
        assert_eq!(
            (part(&reads, Part::OsdOther), part(&reads, Part::NotAccounted)),
            (500.0, 400.0)
        );
        assert_eq!(part(&found.writes.expect("writes"), Part::CacheSsd), 600.0);
        assert_eq!(found.devices.len(), 1);
    }

    #[test]
    fn a_second_hypervisor_counts_for_what_its_ssd_takes_longer() {
        let mut run = run("host-tidepool-replicated", 3_000.0, 1_000.0);
        let parts = |run: &Run| {
            let writes = breakdown(run).writes.expect("writes");
            [Part::CacheSsd, Part::Replica, Part::NotAccounted].map(|of| part(&writes, of))
        };
        let ssd = |write_us| Counts { writes: 5, write_us, ..Counts::default() };
        run.counted.devices =
            [(HOST_SSDS[0].to_string(), ssd(2_000)), (HOST_SSDS[1].to_string(), ssd(3_000))].into();
        assert_eq!(parts(&run), [400.0, 200.0, 400.0]);
        run.counted.devices.insert(HOST_SSDS[1].into(), ssd(1_000));
        assert_eq!(parts(&run), [400.0, 0.0, 600.0]);
    }

    #[test]
    fn the_network_and_the_daemon_have_what_they_were_seen_to_take() {
        let mut run = run("bluestore-dbwal", 10_000.0, 4_000.0);
        run.counted.transit_us = Some(500.0);
        run.counted.stages = vec![
            stage(Hop::OsdRead, 800, 6_000.0),
            stage(Hop::OsdWrite, 200, 2_500.0),
            stage(Hop::KvCommit, 200, 1_000.0),
            stage(Hop::Replica, 200, 900.0),
        ];
        let found = breakdown(&run);
        let (reads, writes) = (found.reads.expect("reads"), found.writes.expect("writes"));
        assert_eq!(
            (part(&reads, Part::Network), part(&reads, Part::NotAccounted)),
            (1_000.0, 3_000.0)
        );
        // To the OSD and back. To the replica and back, less what the own store takes longer.
        assert_eq!((part(&writes, Part::Network), part(&writes, Part::Replica)), (1_900.0, 0.0));
        assert_eq!(
            reads.bottleneck(Side::Read).expect("one").part,
            Part::OsdOther,
            "what nobody counts is none"
        );

        run = self::run("host-tidepool-replicated", 3_000.0, 2_000.0);
        run.counted.transit_us = Some(300.0);
        run.counted.placement =
            serde_json::json!({"host-tidepool-replicated": {"writes": 10, "write_us": 18_000}});
        let ssd = |write_us| Counts { writes: 5, write_us, ..Counts::default() };
        run.counted.devices =
            [(HOST_SSDS[0].to_string(), ssd(2_000)), (HOST_SSDS[1].to_string(), ssd(3_000))].into();
        let writes = breakdown(&run).writes.expect("writes");
        let parts =
            [Part::CacheSsd, Part::Replica, Part::Network, Part::CacheDaemon, Part::NotAccounted];
        assert_eq!(parts.map(|of| part(&writes, of)), [400.0, 200.0, 600.0, 600.0, 200.0]);
    }

    #[test]
    fn a_gateway_has_what_clients_wait_longer_than_its_librbd() {
        let mut run = run("bluestore-dbwal", 10_000.0, 4_000.0);
        run.counted.transit_us = Some(500.0);
        run.counted.stages =
            vec![stage(Hop::OsdRead, 400, 6_000.0), stage(Hop::OsdWrite, 100, 1_500.0)];
        let counted = |access: &str, reads: u64| {
            let (read_us, write_us) = (reads * 7_500, 100 * 3_000);
            serde_json::json!({ access: {"reads": reads, "read_us": read_us, "writes": 100, "write_us": write_us} })
        };
        let parts = |hops: &Hops| {
            let parts =
                [Part::Gateway, Part::NbdServer, Part::Network, Part::OsdOther, Part::NotAccounted];
            parts.map(|of| part(hops, of))
        };
        // The samples cover five seconds.
        run.counted.placement = counted("iscsi", 400);
        let found = breakdown(&run);
        assert_eq!(parts(&found.reads.expect("reads")), [1_500.0, 0.0, 2_000.0, 6_000.0, 500.0]);
        assert_eq!(parts(&found.writes.expect("writes")), [0.0, 0.0, 2_000.0, 1_500.0, 500.0]);
        run.counted.placement = counted("nbd", 400);
        let found = breakdown(&run).reads.expect("reads");
        assert_eq!(parts(&found), [0.0, 2_500.0, 1_000.0, 6_000.0, 500.0]);
        // librbd is in the guest's QEMU. The kernel's times say nothing about requests.
        run.counted.placement = counted("guest", 400);
        run.counted.placement["guest"]["cpu_us"] = 5_000_000.into();
        let found = breakdown(&run).reads.expect("reads");
        assert_eq!(
            (part(&found, Part::ClientGuest), part(&found, Part::NbdServer)),
            (2_500.0, 0.0)
        );
        run.counted.placement =
            serde_json::json!({ "krbd": {"cpu_us": 5_000_000, "cpu_busy_us": 1} });
        let found = breakdown(&run).reads.expect("reads");
        assert_eq!(part(&found, Part::ClientGuest), 0.0, "nobody counts it");
        // One request of a client became several of librbd.
        run.counted.placement = counted("iscsi", 1_600);
        let found = breakdown(&run).reads.expect("reads");
        assert_eq!(parts(&found), [0.0, 0.0, 1_000.0, 6_000.0, 3_000.0]);
    }

    #[test]
    fn what_is_left_of_misses_over_a_gateway_is_not_the_daemons() {
        let mut run = run("host-tidepool", 3_000.0, 1_000.0);
        run.counted.transit_us = Some(100.0);
        let ssd =
            Counts { reads: 10, read_us: 8_000, writes: 5, write_us: 3_000, ..Counts::default() };
        run.counted.devices = [(HOST_SSDS[0].to_string(), ssd)].into();
        run.counted.stages = vec![stage(Hop::OsdRead, 20, 4_000.0)];
        let cache = serde_json::json!({
            "hit_blocks": 75, "miss_blocks": 25, "reads": 100, "read_us": 280_000, "writes": 10, "write_us": 9_000
        });
        let parts = |run: &Run| {
            let reads = breakdown(run).reads.expect("reads");
            let parts = [
                Part::CacheSsd,
                Part::Network,
                Part::OsdOther,
                Part::CacheDaemon,
                Part::NotAccounted,
            ];
            parts.map(|of| part(&reads, of))
        };
        run.counted.placement = serde_json::json!({ "host-tidepool": cache });
        assert_eq!(parts(&run), [600.0, 50.0, 1_000.0, 1_150.0, 200.0]);
        run.counted.placement =
            serde_json::json!({ "host-tidepool": cache, "iscsi": {"reads": 25} });
        assert_eq!(parts(&run), [600.0, 100.0, 1_000.0, 0.0, 1_300.0]);
    }

    #[test]
    fn without_counters_nothing_is_claimed() {
        let nothing = |mut run: Run| {
            (run.counted.stages, run.samples) = (Vec::new(), Vec::new());
            let found = breakdown(&run);
            assert_eq!((&found.reads, &found.writes, found.bottleneck()), (&None, &None, None));
            found
        };
        nothing(run("bluestore-dbwal", 1_000.0, 1_000.0));
        let found = nothing(run("host-tidepool", f64::NAN, 0.0));
        assert!(found.devices.iter().all(|load| load.in_flight.is_none()));
        assert_eq!(combined(&[]), Breakdown::default());
    }
}
