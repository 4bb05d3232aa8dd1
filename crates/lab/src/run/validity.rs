//! Whether a measurement measured what it was meant to. Mistakes that others have published, such
//! as reading an image that was never written, are looked for in every run.

/// Least part of the clients' reads that devices must read too, unless a cache in memory is
/// measured.
const READ_PART_MIN: f64 = 0.5;
/// Fewer requests than this show nothing.
const REQUESTS_MIN: u64 = 10;
/// Largest part of the OSDs' databases that may be on disks instead of SSDs: rarely used data.
const SPILLED_PART_MAX: f64 = 0.1;
/// From this part of a processor or of the machine on, a client's thread or the machine limits a
/// measurement.
const SATURATED: f64 = 0.95;

/// Evidence about a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Evidence {
    /// OSDs that the cluster should have.
    pub osds: u32,
    /// OSDs that answered before and after the run.
    pub osds_answering: u32,
    /// Bytes of all sets that are read; 0 if nothing is read.
    pub set_bytes: u64,
    /// Bytes of the sets that were ever written.
    pub written_bytes: u64,
    /// Bytes of caches that no placement is about, such as the OSDs' memory.
    pub unnamed_cache_bytes: u64,
    /// The placement serves reads without a device: it is a cache in memory, or keeps nothing.
    pub asks_no_device: bool,
    /// Bytes that clients and neighbours read.
    pub read_bytes: u64,
    /// Bytes that all devices read in that time.
    pub device_read_bytes: u64,
    /// Requests of all clients.
    pub requests: u64,
    /// Part of a processor that the busiest thread of all clients used.
    pub client_thread: f64,
    /// Part of the machine's processors that was busy.
    pub busy: f64,
    /// Flushes that arrived at the cache on the hypervisor or, without one, at the gateway. `None`
    /// if neither counts them or clients do not flush.
    pub flushes: Option<u64>,
    /// Bytes of databases that should be on SSDs but are on the OSDs' disks.
    pub spilled_bytes: u64,
    /// Bytes of these databases on SSDs.
    pub database_bytes: u64,
    /// Why the load generator failed.
    pub failure: Option<String>,
    /// Why the placement was not as it should be, during the run or at its end.
    pub out_of_place: Option<String>,
}

/// Why a run is not what was meant. Empty if it is.
pub fn faults(evidence: &Evidence) -> Vec<String> {
    let mut faults = Vec::new();
    faults.extend(evidence.failure.clone());
    faults.extend(evidence.out_of_place.clone());
    if evidence.osds_answering < evidence.osds {
        faults.push(format!(
            "{} of {} OSDs did not answer",
            evidence.osds - evidence.osds_answering,
            evidence.osds
        ));
    }
    if evidence.written_bytes < evidence.set_bytes {
        faults.push(format!(
            "the set has {} bytes and only {} were ever written: reading the rest costs nothing",
            evidence.set_bytes, evidence.written_bytes
        ));
    }
    if evidence.set_bytes > 0
        && evidence.set_bytes <= evidence.unnamed_cache_bytes
        && !evidence.asks_no_device
    {
        faults.push(format!(
            "the set of {} bytes fits into caches of {} bytes that the placement does not name",
            evidence.set_bytes, evidence.unnamed_cache_bytes
        ));
    }
    let from_devices = evidence.device_read_bytes as f64 / evidence.read_bytes.max(1) as f64;
    if evidence.read_bytes > 0 && from_devices < READ_PART_MIN && !evidence.asks_no_device {
        faults.push(format!(
            "{:.0} % of what was read came from no device: a cache in memory that the placement does not name",
            (1.0 - from_devices) * 100.0
        ));
    }
    if evidence.flushes == Some(0) {
        faults.push("clients have flushed after each write, and no flush has arrived".into());
    }
    let databases_bytes = (evidence.spilled_bytes + evidence.database_bytes) as f64;
    if evidence.spilled_bytes as f64 > databases_bytes * SPILLED_PART_MAX {
        faults.push(format!(
            "{} bytes of databases are on the disks, and {} on the SSD: their parts of it are too small",
            evidence.spilled_bytes, evidence.database_bytes
        ));
    }
    if evidence.failure.is_none() && evidence.requests < REQUESTS_MIN {
        faults.push(format!("only {} requests were completed", evidence.requests));
    }
    faults
}

/// Why a placement might do more than was measured.
pub fn lower_bound(evidence: &Evidence) -> Option<String> {
    if evidence.client_thread >= SATURATED {
        let percent = evidence.client_thread * 100.0;
        return Some(format!(
            "a thread of the client was saturated ({percent:.0} % of a processor)"
        ));
    }
    (evidence.busy >= SATURATED).then(|| {
        format!("the machine's processors were saturated ({:.0} % busy)", evidence.busy * 100.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Evidence {
        Evidence {
            osds: 2,
            osds_answering: 2,
            set_bytes: 1 << 30,
            written_bytes: 2 << 30,
            unnamed_cache_bytes: 1 << 26,
            read_bytes: 1 << 20,
            device_read_bytes: 1 << 20,
            requests: 1000,
            client_thread: 0.3,
            busy: 0.6,
            flushes: Some(500),
            ..Evidence::default()
        }
    }

    #[test]
    fn a_good_run_has_no_fault_and_each_mistake_has_one() {
        assert_eq!((faults(&good()), lower_bound(&good())), (vec![], None));
        for (bad, wanted) in [
            (Evidence { osds_answering: 1, ..good() }, "1 of 2 OSDs"),
            (Evidence { written_bytes: 1 << 29, ..good() }, "ever written"),
            (Evidence { unnamed_cache_bytes: 1 << 30, ..good() }, "does not name"),
            (Evidence { device_read_bytes: 1 << 10, ..good() }, "no device"),
            (Evidence { requests: 3, ..good() }, "only 3 requests"),
            (Evidence { failure: Some("fio failed".into()), requests: 0, ..good() }, "fio failed"),
            (Evidence { flushes: Some(0), ..good() }, "no flush has arrived"),
            (
                Evidence { spilled_bytes: 12, database_bytes: 100, ..good() },
                "on the disks, and 100 on the SSD",
            ),
            (
                Evidence { out_of_place: Some("its mode is write-through".into()), ..good() },
                "write-through",
            ),
        ] {
            let found = faults(&bad);
            assert!(found.len() == 1 && found[0].contains(wanted), "{found:?}");
        }
        let some = Evidence { spilled_bytes: 10, database_bytes: 100, ..good() };
        assert!(faults(&some).is_empty(), "what is seldom asked for");
        let cached =
            Evidence { device_read_bytes: 0, asks_no_device: true, flushes: None, ..good() };
        assert!(faults(&cached).is_empty(), "a cache in memory is what is measured");
    }

    #[test]
    fn a_limit_of_the_machine_is_not_one_of_the_placement() {
        let client = Evidence { client_thread: 0.97, ..good() };
        assert!(lower_bound(&client).expect("a bound").contains("client"));
        let machine = Evidence { busy: 0.99, ..good() };
        assert!(lower_bound(&machine).expect("a bound").contains("machine"));
    }
}
