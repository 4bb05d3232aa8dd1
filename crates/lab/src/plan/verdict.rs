//! The effect of an SSD in each place, for one workload.

use serde::Serialize;

use super::evidence::Measured;
use super::inventory::{Host, Inventory, Kind, State, Store};
use super::quantity::{Millis, binary};
use super::rules::{
    Advice, DB_ALLOC, DB_DEFERRED, DB_FASTER, DB_HDD, DB_ON_SSD_OSDS, FILESTORE_END, HOST_BLOCK,
    HOST_FIRST, HOST_FLASH, HOST_ONE_COPY, HOST_THROUGH, HOST_TWO_COPIES, JOURNAL, KEY, OSD_CACHE,
    OSD_CACHE_COPIES, OSD_CACHE_CUTOFF, OSDS_PER_NODE,
};

/// Largest write that BlueStore sends through its log on a disk, in bytes.
pub(super) const DEFERRED_BYTES_MAX: u64 = 64 << 10;
/// Largest block for which what was published at 4 KiB is taken to hold, in bytes.
const SMALL_BYTES_MAX: u64 = 16 << 10;
/// Share of reads in percent from which on a cache that speeds up reads alone comes first.
const MOSTLY_READS_PERCENT: u64 = 50;

/// A place where an SSD can go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// In the hypervisor, under Tidepool.
    Host,
    /// In the OSD's server, for database and log of BlueStore.
    DbWal,
    /// In the OSD's server, for the journal of FileStore.
    Journal,
    /// In the OSD's server, as a cache under the OSD: bcache, Open CAS, Tidepool.
    OsdCache,
}

/// Effect of an SSD in a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// Reads and writes become faster.
    Helps,
    /// Reads become faster, writes do not.
    ReadsOnly,
    /// Writes become faster, reads do not.
    WritesOnly,
    /// Little gain for this workload.
    Little,
    /// No gain, or the place is not possible.
    No,
    /// The effect was not published, or too little was given: it has to be measured.
    NotKnown,
}

/// A judgement on a place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Verdict {
    /// The place.
    pub placement: Placement,
    /// Kind of the drives with the OSDs' data; `None` for the hypervisor, and where it is not
    /// known.
    pub media: Option<Kind>,
    /// Effect of an SSD in the place.
    pub effect: Effect,
    /// The reasons.
    pub advice: Vec<Advice>,
    /// Measurements of the place under these conditions.
    pub measured: Vec<Measured>,
}

impl Verdict {
    fn new(
        placement: Placement,
        media: Option<Kind>,
        effect: Effect,
        advice: Vec<Advice>,
    ) -> Verdict {
        Verdict { placement, media, effect, advice, measured: Vec::new() }
    }
}

/// The conditions for which a verdict holds. A field that is `None` was not given.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Key {
    /// Size of most requests in bytes.
    pub block_bytes: Option<u64>,
    /// Share of reads in percent.
    pub read_percent: Option<u64>,
    /// Requests in flight of a volume.
    pub queue_depth: Option<u64>,
    /// Kinds of the drives with the OSDs' data, the slowest first.
    pub media: Vec<Kind>,
}

impl Key {
    /// The conditions for which verdicts on this inventory hold.
    pub(super) fn of(inventory: &Inventory) -> Key {
        let mut media: Vec<Kind> =
            inventory.hosts.iter().filter(|host| host.has_osds()).filter_map(media).collect();
        media.sort();
        media.dedup();
        let workload = &inventory.workload;
        Key {
            block_bytes: workload.block_size.map(|size| size.get()),
            read_percent: workload.read_percent.map(|percent| percent.get()),
            queue_depth: workload.queue_depth.map(|depth| depth.get()),
            media,
        }
    }
}

/// Kind of the drives with the data of a host's OSDs: its disks if any of them is free or holds
/// OSDs, otherwise the SSDs that hold OSDs.
pub(super) fn media(host: &Host) -> Option<Kind> {
    let data = host.drives.iter().filter(|drive| {
        drive.state == State::Osd
            || (drive.product.kind == Some(Kind::Hdd) && drive.state == State::Free)
    });
    data.filter_map(|drive| drive.product.kind).min()
}

/// How OSDs store objects: as given, otherwise as the release does by default.
pub(super) fn store(inventory: &Inventory) -> Store {
    let old = inventory.cluster.ceph.is_some_and(|release| release.major < 12);
    inventory.cluster.objectstore.unwrap_or(if old { Store::Filestore } else { Store::Bluestore })
}

/// The verdicts: one on the hypervisor, and one on each place in the OSDs' servers for each kind of
/// drives with data.
pub(super) fn verdicts(inventory: &Inventory, key: &Key) -> Vec<Verdict> {
    let mut verdicts = vec![host(inventory, key)];
    for &media in &key.media {
        for judge in [db_wal, journal, osd_cache] {
            verdicts.push(judge(inventory, key, media));
        }
    }
    verdicts
}

/// Adds to each verdict with an unknown effect that the place is to be measured.
pub(super) fn ask_to_measure(verdicts: &mut [Verdict]) {
    for verdict in verdicts.iter_mut().filter(|verdict| verdict.effect == Effect::NotKnown) {
        let text = "not known for this workload: measure it before you buy";
        verdict.advice.push(Advice::new(text, &[KEY]));
    }
}

/// The place where an SSD helps most for this workload; `None` where too little is known or nothing
/// helps.
pub(super) fn first(key: &Key, verdicts: &[Verdict]) -> Option<Placement> {
    let effect = |placement| {
        let media = key.media.first().copied();
        let on = |verdict: &&Verdict| verdict.placement == placement && verdict.media == media;
        verdicts.iter().find(on).map(|verdict| verdict.effect)
    };
    let host = verdicts.iter().find(|verdict| verdict.placement == Placement::Host)?.effect;
    let reads = key.read_percent?;
    key.block_bytes?;
    if host == Effect::Helps || (host == Effect::ReadsOnly && reads >= MOSTLY_READS_PERCENT) {
        return Some(Placement::Host);
    }
    let behind = [Placement::Journal, Placement::OsdCache, Placement::DbWal];
    let helps = |placement: &Placement| {
        matches!(effect(*placement), Some(Effect::Helps | Effect::WritesOnly)) && reads < 100
    };
    behind.into_iter().find(helps).or((host == Effect::ReadsOnly).then_some(Placement::Host))
}

/// How a cache on a hypervisor keeps acknowledged writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostCopies {
    /// On the SSDs of two hypervisors.
    Two,
    /// On one SSD; writes of up to this time may be lost with it.
    One(Millis),
    /// In the cluster alone: write-through.
    None,
}

/// How caches on the hypervisors of an inventory keep writes: on one SSD if a loss is accepted,
/// otherwise on two hypervisors if there are several, otherwise in the cluster alone.
pub(super) fn host_copies(inventory: &Inventory) -> HostCopies {
    match inventory.workload.accept_loss.filter(|loss| loss.get() > 0) {
        Some(loss) => HostCopies::One(loss),
        None if inventory.hosts.iter().filter(|host| host.has_guests()).count() > 1 => {
            HostCopies::Two
        }
        None => HostCopies::None,
    }
}

fn host(inventory: &Inventory, key: &Key) -> Verdict {
    let verdict = |effect, advice| Verdict::new(Placement::Host, None, effect, advice);
    let Some(reads) = key.read_percent else {
        return verdict(
            Effect::NotKnown,
            vec![Advice::new("it depends on the share of reads", &[KEY])],
        );
    };
    match key.media.first() {
        Some(Kind::Nvme) => {
            let text =
                "do not cache: the OSDs are on NVMe, which is no slower than the cache would be";
            let osds =
                "more OSDs may help, up to about four on a node; at queue depth 1 fewer are better";
            let advice =
                vec![Advice::new(text, &[HOST_FLASH]), Advice::new(osds, &[OSDS_PER_NODE])];
            return verdict(Effect::No, advice);
        }
        Some(Kind::Ssd) => {
            let text = "published in front of slower servers only, not of OSDs on SSDs";
            return verdict(Effect::NotKnown, vec![Advice::new(text, &[HOST_FLASH])]);
        }
        Some(Kind::Hdd) | None => {}
    }
    if let Some(bytes) = key.block_bytes.filter(|&bytes| bytes > SMALL_BYTES_MAX) {
        let text = format!("published at 4 KiB only, not at {}", binary(bytes));
        return verdict(Effect::NotKnown, vec![Advice::new(text, &[HOST_BLOCK])]);
    }
    match host_copies(inventory) {
        HostCopies::One(loss) => {
            let text = format!(
                "write-back: reads and writes are answered by the host's SSD; up to {loss} of writes are lost if the host or its SSD is"
            );
            verdict(Effect::Helps, vec![Advice::new(text, &[HOST_FIRST, HOST_ONE_COPY])])
        }
        HostCopies::Two => {
            let text = "write-back with a second copy on another hypervisor (--peer): reads never leave the host, writes go to two SSDs, and nothing is lost with either host";
            verdict(Effect::Helps, vec![Advice::new(text, &[HOST_FIRST, HOST_TWO_COPIES])])
        }
        HostCopies::None if reads == 0 => {
            let text = "there are no reads, and writes wait for Ceph";
            verdict(Effect::No, vec![Advice::new(text, &[HOST_THROUGH])])
        }
        HostCopies::None => {
            let text = "write-through: reads of what was used before never leave the host; writes wait for Ceph";
            let more =
                "write-back takes a second hypervisor for a copy of each write, or accept-loss";
            let advice = vec![
                Advice::new(text, &[HOST_FIRST, HOST_THROUGH]),
                Advice::new(more, &[HOST_TWO_COPIES, HOST_ONE_COPY]),
            ];
            verdict(Effect::ReadsOnly, advice)
        }
    }
}

fn db_wal(inventory: &Inventory, key: &Key, media: Kind) -> Verdict {
    let verdict = |effect, advice| Verdict::new(Placement::DbWal, Some(media), effect, advice);
    if store(inventory) == Store::Filestore {
        return verdict(
            Effect::No,
            vec![Advice::new("FileStore has no database and log", &[JOURNAL])],
        );
    }
    match media {
        Kind::Hdd => db_wal_disks(key, verdict),
        Kind::Ssd => db_wal_ssds(inventory, key, verdict),
        Kind::Nvme => verdict(
            Effect::No,
            vec![Advice::new("the data is on NVMe already: nothing is faster", &[DB_FASTER])],
        ),
    }
}

fn db_wal_disks(key: &Key, verdict: impl Fn(Effect, Vec<Advice>) -> Verdict) -> Verdict {
    let Some(bytes) = key.block_bytes else {
        return verdict(
            Effect::NotKnown,
            vec![Advice::new("it depends on the block size", &[DB_DEFERRED])],
        );
    };
    if bytes > DEFERRED_BYTES_MAX {
        let text = format!(
            "writes of {} go past the log to the disk; what is left is that metadata is not on it",
            binary(bytes)
        );
        return verdict(Effect::Little, vec![Advice::new(text, &[DB_DEFERRED, DB_HDD])]);
    }
    if key.read_percent == Some(100) {
        let text = "data is read from the disk as before";
        return verdict(Effect::Little, vec![Advice::new(text, &[DB_DEFERRED, DB_ON_SSD_OSDS])]);
    }
    let text = format!(
        "writes of {} are acknowledged by the SSD; data is read from the disk as before",
        binary(bytes)
    );
    verdict(Effect::WritesOnly, vec![Advice::new(text, &[DB_DEFERRED, DB_HDD])])
}

fn db_wal_ssds(
    inventory: &Inventory,
    key: &Key,
    verdict: impl Fn(Effect, Vec<Advice>) -> Verdict,
) -> Verdict {
    let Some(bytes) = key.block_bytes else {
        return verdict(
            Effect::NotKnown,
            vec![Advice::new("it depends on the block size", &[DB_ON_SSD_OSDS])],
        );
    };
    if bytes > SMALL_BYTES_MAX || key.read_percent == Some(100) {
        let text = "the published gain is one of small writes; at 4 MiB it was 9 %, for reads next to none";
        return verdict(Effect::Little, vec![Advice::new(text, &[DB_ON_SSD_OSDS])]);
    }
    let depth =
        key.queue_depth.map_or("the queue depth".to_string(), |depth| format!("depth {depth}"));
    match inventory.cluster.ceph {
        Some(release) if release.has_large_units() => {
            let text = format!(
                "small writes gain if an NVMe takes the database; how much depends on {depth}"
            );
            verdict(Effect::WritesOnly, vec![Advice::new(text, &[DB_ON_SSD_OSDS])])
        }
        _ => {
            let text = "the published gain was one of small writes on an older Ceph";
            verdict(Effect::NotKnown, vec![Advice::new(text, &[DB_ON_SSD_OSDS, DB_ALLOC])])
        }
    }
}

fn journal(inventory: &Inventory, key: &Key, media: Kind) -> Verdict {
    let verdict = |effect, advice| Verdict::new(Placement::Journal, Some(media), effect, advice);
    if store(inventory) == Store::Bluestore {
        return verdict(Effect::No, vec![Advice::new("BlueStore has no journal", &[DB_HDD])]);
    }
    if inventory.cluster.ceph.is_some_and(|release| release.major >= 18) {
        let text =
            "FileStore is not supported by this release: its OSDs have to become BlueStore's";
        return verdict(Effect::No, vec![Advice::new(text, &[FILESTORE_END])]);
    }
    match (media, key.read_percent) {
        (Kind::Hdd, Some(100)) => {
            verdict(Effect::Little, vec![Advice::new("nothing is written", &[JOURNAL])])
        }
        (Kind::Hdd, _) => {
            let text = "writes of any size are acknowledged by the SSD; reads are not faster";
            verdict(Effect::WritesOnly, vec![Advice::new(text, &[JOURNAL])])
        }
        _ => verdict(Effect::NotKnown, vec![Advice::new("published for disks only", &[JOURNAL])]),
    }
}

fn osd_cache(inventory: &Inventory, key: &Key, media: Kind) -> Verdict {
    let verdict = |effect, advice| Verdict::new(Placement::OsdCache, Some(media), effect, advice);
    match media {
        Kind::Hdd => {}
        Kind::Ssd => {
            let text = "published for disks only";
            return verdict(Effect::NotKnown, vec![Advice::new(text, &[OSD_CACHE])]);
        }
        Kind::Nvme => {
            let text = "the data is on NVMe already: nothing is faster";
            return verdict(Effect::No, vec![Advice::new(text, &[DB_FASTER])]);
        }
    }
    let Some(bytes) = key.block_bytes else {
        return verdict(
            Effect::NotKnown,
            vec![Advice::new("it depends on the block size", &[OSD_CACHE])],
        );
    };
    if bytes <= DEFERRED_BYTES_MAX {
        let text = format!(
            "writes of {} are on the SSD already when the log is; reads become faster, but a hypervisor's SSD is nearer",
            binary(bytes)
        );
        return verdict(Effect::Little, vec![Advice::new(text, &[DB_DEFERRED, HOST_FIRST])]);
    }
    if inventory.cluster.replicas.is_some_and(|replicas| replicas.get() < 2) {
        let text = "one copy of each object: a write-back cache under the OSD would be the only place of new data";
        return verdict(Effect::No, vec![Advice::new(text, &[OSD_CACHE_COPIES])]);
    }
    let text =
        format!("writes of {} are acknowledged by the SSD and not by the disk", binary(bytes));
    let cutoff = "only with sequential_cutoff=0: with the default of 4 MB it does next to nothing";
    verdict(
        Effect::Helps,
        vec![Advice::new(text, &[OSD_CACHE]), Advice::new(cutoff, &[OSD_CACHE_CUTOFF])],
    )
}

#[cfg(test)]
mod tests {
    use super::super::tests::inventory;
    use super::*;

    /// The effect of each place in order, and the place that comes first, on a cluster with these
    /// lines of `[cluster]` and `[workload]`.
    fn effects(osd: &str, cluster: &str, workload: &str) -> (Vec<Effect>, Option<Placement>) {
        let inventory = inventory(&format!(
            "[cluster]\n{cluster}\n[workload]\n{workload}\n[[host]]\nname = \"a\"\nrole = \"osd\"\n\
             [[host.drive]]\nkind = \"{osd}\"\nsize = \"8TB\"\nuse = \"osd\""
        ));
        let key = Key::of(&inventory);
        let verdicts = verdicts(&inventory, &key);
        assert!(verdicts.iter().all(|verdict| !verdict.advice.is_empty()));
        (verdicts.iter().map(|verdict| verdict.effect).collect(), first(&key, &verdicts))
    }

    const RANDOM_4K: &str = "block-size = \"4KiB\"\nread-percent = 30";
    const DISKSPD: &str = "block-size = \"256KiB\"\nread-percent = 70";

    #[test]
    fn on_disks_small_writes_want_the_log_and_large_ones_a_cache() {
        use Effect::{Helps, Little, No, NotKnown, ReadsOnly, WritesOnly};
        assert_eq!(
            effects("hdd", "replicas = 3", RANDOM_4K),
            (vec![ReadsOnly, WritesOnly, No, Little], Some(Placement::DbWal))
        );
        assert_eq!(
            effects("hdd", "replicas = 3", DISKSPD),
            (vec![NotKnown, Little, No, Helps], Some(Placement::OsdCache))
        );
        assert_eq!(
            effects("hdd", "replicas = 1", DISKSPD).0[3],
            No,
            "a cache over one copy is refused"
        );
    }

    #[test]
    fn the_limit_between_small_and_large_is_64_kib() {
        let of =
            |size| effects("hdd", "", &format!("block-size = \"{size}\"\nread-percent = 0")).0[1];
        assert_eq!((of("64KiB"), of("65537")), (Effect::WritesOnly, Effect::Little));
    }

    #[test]
    fn a_host_cache_comes_first_when_a_loss_is_accepted_or_most_are_reads() {
        let with =
            |more: &str| effects("hdd", "replicas = 3", &format!("block-size = \"4KiB\"\n{more}"));
        assert_eq!(with("read-percent = 30\naccept-loss = \"5s\"").1, Some(Placement::Host));
        assert_eq!(with("read-percent = 80").1, Some(Placement::Host));
        let (effects, first) = with("read-percent = 0\naccept-loss = \"0s\"");
        assert_eq!(
            (effects[0], first),
            (Effect::No, Some(Placement::DbWal)),
            "no loss, no reads: nothing"
        );
    }

    #[test]
    fn at_no_loss_two_hypervisors_have_write_back_with_a_second_copy() {
        let of = |hypervisors: usize, loss: &str| {
            let hosts: Vec<String> = (0..hypervisors)
                .map(|number| format!("[[host]]\nname = \"hv{number}\"\nrole = \"hypervisor\"\n"))
                .collect();
            let text = format!(
                "[workload]\nblock-size = \"4KiB\"\nread-percent = 50\n{loss}\n{}",
                hosts.concat()
            );
            let inventory = inventory(&text);
            let host = verdicts(&inventory, &Key::of(&inventory)).remove(0);
            (host.effect, host.advice[0].rules.contains(&"host-two-copies"))
        };
        assert_eq!(of(2, "accept-loss = \"0s\""), (Effect::Helps, true));
        assert_eq!(of(2, ""), (Effect::Helps, true));
        assert_eq!(of(2, "accept-loss = \"5s\""), (Effect::Helps, false));
        assert_eq!(of(1, "accept-loss = \"0s\""), (Effect::ReadsOnly, false));
    }

    #[test]
    fn the_drives_of_the_cluster_decide_about_a_cache_on_the_host() {
        let of = |media| {
            effects(media, "", "block-size = \"4KiB\"\nread-percent = 80\naccept-loss = \"5s\"")
        };
        assert_eq!((of("hdd").0[0], of("hdd").1), (Effect::Helps, Some(Placement::Host)));
        assert_eq!((of("ssd").0[0], of("ssd").1), (Effect::NotKnown, None));
        assert_eq!(of("nvme"), (vec![Effect::No; 4], None));
    }

    #[test]
    fn write_back_on_one_copy_is_told_to_lose_what_is_not_drained() {
        let inventory = inventory(
            "[workload]\nread-percent = 50\naccept-loss = \"5s\"\n[[host]]\nname = \"a\"\nrole = \"hypervisor\"",
        );
        let verdicts = verdicts(&inventory, &Key::of(&inventory));
        assert!(verdicts[0].advice[0].text.contains("up to 5s of writes are lost"), "{verdicts:?}");
        assert!(verdicts[0].advice[0].rules.contains(&"host-one-copy"));
    }

    #[test]
    fn a_database_in_front_of_ssds_is_for_small_writes_of_older_releases() {
        let of = |cluster, workload| effects("ssd", cluster, workload).0[1];
        assert_eq!(of("ceph = \"14.2.7\"", RANDOM_4K), Effect::WritesOnly);
        assert_eq!(of("ceph = \"14.2.8\"", RANDOM_4K), Effect::NotKnown);
        assert_eq!(of("ceph = \"16.2.15\"", RANDOM_4K), Effect::NotKnown);
        assert_eq!(of("", RANDOM_4K), Effect::NotKnown);
        assert_eq!(of("ceph = \"14.2.7\"", DISKSPD), Effect::Little);
        assert_eq!(effects("nvme", "ceph = \"14.2.7\"", RANDOM_4K).0[1], Effect::No);
    }

    #[test]
    fn filestore_has_a_journal_until_it_is_no_more_supported() {
        let of = |cluster| effects("hdd", cluster, DISKSPD);
        assert_eq!(of("ceph = \"jewel\"").0[1..3], [Effect::No, Effect::WritesOnly]);
        assert_eq!(of("ceph = \"jewel\"").1, Some(Placement::Journal));
        assert_eq!(of("objectstore = \"filestore\"\nceph = \"16.2.15\"").0[2], Effect::WritesOnly);
        assert_eq!(of("objectstore = \"filestore\"\nceph = \"18.2.7\"").0[2], Effect::No);
    }

    #[test]
    fn without_a_workload_no_place_comes_first() {
        let (effects, first) = effects("hdd", "", "");
        assert_eq!((effects[0], effects[1], first), (Effect::NotKnown, Effect::NotKnown, None));
    }
}
