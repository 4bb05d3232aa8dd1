//! The rules behind the advice, each with its source.

use serde::Serialize;

/// A rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Rule {
    /// Short name, which lines of advice cite.
    pub id: &'static str,
    /// What the rule says, in one line.
    pub statement: &'static str,
    /// Source of the rule: a page of a documentation, a published measurement by its subject, or
    /// the lab.
    pub source: &'static str,
}

/// A line of advice, with the rules that it follows from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// What is advised or stated, in one sentence.
    pub text: String,
    /// The ids of the rules; never empty.
    pub rules: Vec<&'static str>,
}

impl Advice {
    /// A line that follows from these rules.
    pub fn new(text: impl Into<String>, rules: &[Rule]) -> Advice {
        assert!(!rules.is_empty(), "advice cites what it follows from");
        Advice { text: text.into(), rules: rules.iter().map(|rule| rule.id).collect() }
    }
}

macro_rules! rules {
    ($($name:ident, $id:literal, $statement:literal, $source:literal;)*) => {
        $(
            #[doc = $statement]
            pub const $name: Rule = Rule { id: $id, statement: $statement, source: $source };
        )*

        /// All rules.
        pub const ALL: &[Rule] = &[$($name),*];
    };
}

rules! {
    POWER_LOSS, "power-loss",
        "An SSD without power-loss protection is no journal, database or cache: its synchronous writes are slow, or they are lost.",
        "Ceph, Hardware Recommendations (Write Caches)";
    GRADE, "grade",
        "An SSD that does fewer than 1,000 synchronous 4 KiB writes per second is rejected, and a poor one (below 5,000) carries one OSD. The limits are ours; that SSDs differ by orders of magnitude there was published.",
        "the lab: `lab qualify`; SSD as journal: 2 MB/s with direct and synchronous writes where the same SSD otherwise does 500 MB/s";
    NOT_TOUCHED, "not-touched",
        "A drive that is in use, holds data, or of which nobody has said that it is free stands in no command.",
        "Tidepool";
    NOT_DIVIDED, "not-divided",
        "A partition or a logical volume that exists keeps its table: a partition is used whole or divided by LVM, a logical volume is used whole.",
        "Tidepool";
    UNWRITABLE, "unwritable",
        "A read-only device takes nothing, and a zoned one takes writes in order only: neither is an OSD, a journal, a database or a cache here.",
        "Linux, sysfs-block (queue/zoned); Tidepool";
    KEY, "key",
        "A verdict holds for one block size, mix of reads and writes, queue depth and kind of drives, and for no other.",
        "BlueStore DB/WAL on NVMe, and FileStore journals, BlueStore and bcache on HDD: opposite results at 4 KiB and at 256 KiB";
    HOST_FIRST, "host-first",
        "An SSD in the hypervisor answers before the network, the gateway and two OSDs do; it takes as many SSDs as there are hypervisors, however many servers have OSDs.",
        "Host cache against OSD-side cache: 4 KiB, 80 % reads, the host's side ahead in throughput and latency";
    HOST_ONE_COPY, "host-one-copy",
        "Write-back on a hypervisor with an accepted loss has one copy: what is not drained is lost with the SSD of the host.",
        "Tidepool, docs/guarantees.md";
    HOST_TWO_COPIES, "host-two-copies",
        "With a second copy on the SSD of another hypervisor (--peer) write-back loses nothing with either host. Each write then goes to two SSDs; while there is no second copy the volume runs write-through.",
        "Tidepool, docs/guarantees.md; Host cache against OSD-side cache: writes replicated to a second hypervisor";
    HOST_THROUGH, "host-through",
        "Without an accepted loss and without another hypervisor for a second copy a volume runs write-through: reads become faster, writes do not.",
        "Tidepool, docs/guarantees.md";
    HOST_SIZE, "host-size",
        "A cache smaller than what is read again and again misses; one SSD is one cache.",
        "the lab: a set that fits any cache tells nothing, one larger than the cache has to be measured too";
    HOST_BLOCK, "host-block",
        "A cache in the hypervisor was published at 4 KiB only. With larger blocks the order of places may differ.",
        "Host cache against OSD-side cache: 4 KiB, 80 % reads; FileStore journals, BlueStore and bcache on HDD: bcache under the OSDs at 256 KiB";
    HOST_FLASH, "host-flash",
        "In front of OSDs on SSDs no cache in the hypervisor was published. OSDs on NVMe are as fast as the cache would be: what it can save is the network and the time of Ceph itself.",
        "OSDs per disk: 3 nodes with 4 NVMe each, no cache; BlueStore DB/WAL on NVMe, to cache or not to cache: no cache in the hypervisor";
    OSDS_PER_NODE, "osds-per-node",
        "On NVMe, 4 KiB random and sequential writes grow from one to about four OSDs on a node and then stay level. At queue depth 1 fewer OSDs are better.",
        "OSDs per disk: 1, 2 and 4 OSDs on 1 to 4 NVMe of each node";
    DB_FASTER, "db-faster",
        "A database device helps only if it is faster than the drive with the data.",
        "Ceph, BlueStore Configuration Reference (Devices)";
    DB_HDD, "db-hdd",
        "OSDs on disks are to have their database (and with it the log) on an SSD.",
        "Ceph, BlueStore Configuration Reference (block and block.db)";
    DB_DEFERRED, "db-deferred",
        "On disks BlueStore sends writes of up to 64 KiB through the log (bluestore_prefer_deferred_size_hdd; 0 on SSDs); larger ones go past it to the disk.",
        "Ceph, BlueStore Configuration Reference; FileStore journals, BlueStore and bcache on HDD: 256 KiB became slower with DB and WAL on SSD";
    DB_ON_SSD_OSDS, "db-on-ssd-osds",
        "In front of SATA SSDs a database on NVMe gave +71 % 4 KiB random writes with 40 clients, +162 % (queue depth 6) to +30 % (64) at 70 % reads, 9 % at 4 MiB, and next to nothing for reads.",
        "BlueStore DB/WAL on NVMe, to cache or not to cache";
    DB_ALLOC, "db-alloc",
        "That gain was measured with allocation units of 16 KiB; with 4 KiB, the default since Ceph 14.2.8, it may not appear. An OSD keeps the unit with which it was made.",
        "BlueStore DB/WAL on NVMe, to cache or not to cache; Ceph, v14.2.8 Nautilus (Notable Changes); BlueStore Configuration Reference (Minimum Allocation Size)";
    DB_SIZE, "db-size",
        "A database wants 1 to 2 % of its OSD for block devices and at least 4 % for objects (RGW), and the more the better; what does not fit spills over to the disk.",
        "Ceph, BlueStore Configuration Reference (Sizing)";
    DB_STEPS, "db-steps",
        "Before Ceph 14.2.12 and 15.2.6 a database uses sizes of about 3, 30 and 300 GiB only; twice as much leaves room to compact.",
        "Ceph, BlueStore Configuration Reference (Sizing)";
    WAL, "wal",
        "The log lies with the database. By itself, on 1 to 2 GiB, it is worth it only where no database fits, or on a still faster device.",
        "Ceph, BlueStore Configuration Reference (Devices)";
    OSDS_PER_SSD, "osds-per-ssd",
        "An SSD carries one OSD on a disk for each 57 MB/s of its measured synchronous bandwidth, 15 at most; seven, as published, take 400 MB/s. Where it was not measured, Ceph recommends 4 to 5 per SATA SSD and 10 (in newer editions 15) per NVMe: 5 and 10 for a good SSD here, 4 and 5 for a fair or ungraded one. 57 MB/s is our choice.",
        "SSD as journal: no two are equal (7 disks per SSD, 800 MB/s: with 14 disks 57 MB/s of each); Ceph, Hardware Recommendations (Minimum Hardware Recommendations)";
    FAILURE_DOMAIN, "failure-domain",
        "An SSD takes every OSD down whose database, journal or dirty data it holds, and Ceph copies them all anew.",
        "Ceph, Hardware Recommendations (Failure Domains); FileStore journals, BlueStore and bcache on HDD: two OSDs per SSD";
    JOURNAL, "journal",
        "FileStore writes everything to its journal first, at any size: on data-centre SSDs (7 disks each) 800 MB/s instead of 8 MB/s.",
        "SSD as journal: no two are equal; Ceph, Journal Config Reference";
    JOURNAL_SIZE, "journal-size",
        "A journal holds twice the throughput times filestore_max_sync_interval: 2 x 210 MB/s x 5 s are 2.1 GB; the default is 5,120 MiB.",
        "Ceph, Journal Config Reference; OSD Config Reference";
    FILESTORE_END, "filestore-end",
        "FileStore is not supported any more since Ceph 18 (Reef).",
        "Ceph, Journal Config Reference";
    OSD_CACHE, "osd-cache",
        "A write-back cache under the OSDs takes the large writes that go past the log: bcache at 256 KiB, 401 to 454 MB/s reads and 173 to 195 MB/s writes. That equals FileStore with journals on the same SSDs, 406 to 461 and 175 to 198 MB/s.",
        "FileStore journals, BlueStore and bcache on HDD: vioscsi and KRBD in both";
    OSD_CACHE_CUTOFF, "osd-cache-cutoff",
        "bcache lets sequential requests past it from 4 MB on, which is the size of Ceph's objects, and others when it finds the SSD slow: sequential_cutoff and both congestion thresholds have to be 0.",
        "Linux, A block layer cache (bcache) (Troubleshooting performance); FileStore journals, BlueStore and bcache on HDD";
    OSD_CACHE_COPIES, "osd-cache-copies",
        "A lost write-back cache is a lost OSD: it is for pools with two or more copies on different hosts.",
        "Linux, A block layer cache (bcache) (Getting started)";
    MEASURED, "measured",
        "A ratio that was measured under these conditions decides where no publication does. On NVMe only devices that were not slowed count.",
        "the files of --results";
    ENDURANCE, "endurance",
        "Life in years is what the drive may be written (TBW, or drive writes per day over 5 years) by what is written to it; compaction, fills and the drive's own copying come on top.",
        "the maker's data sheet";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_has_every_rule() {
        let manual = include_str!("../../../../docs/lab.md");
        for rule in ALL {
            let row = format!("| `{}` | {} | {} |", rule.id, rule.statement, rule.source);
            assert!(manual.contains(&row), "docs/lab.md: {row}");
        }
    }

    #[test]
    fn every_rule_has_a_name_of_its_own_a_statement_and_a_source() {
        for (index, rule) in ALL.iter().enumerate() {
            assert!(
                ALL[..index].iter().all(|other| other.id != rule.id),
                "{} is there twice",
                rule.id
            );
            assert!(rule.statement.ends_with('.') && !rule.source.is_empty(), "{}", rule.id);
        }
    }
}
