//! Figures and names as text.

use crate::placement::AGAIN;
use crate::results::Durability;
use crate::suite::{Neighbours, Suite, Tool};

/// A number with the digits that are significant, and with commas between thousands: without a
/// fraction from 99.95 on, with one digit after the point from 9.995 on, otherwise with two. A dash
/// for a number that is not finite.
pub(crate) fn number(value: f64) -> String {
    match value {
        value if !value.is_finite() => "–".into(),
        value if value.abs() >= 99.95 => thousands(value),
        value if value.abs() >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// A count with commas between thousands.
pub(crate) fn whole(count: u64) -> String {
    thousands(count as f64)
}

fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = if value < 0.0 { String::from("−") } else { String::new() };
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A factor: with three digits after the point if it is below 0.2995, so that a small factor keeps
/// its significant digits; otherwise like [`number`].
pub(crate) fn factor(value: f64) -> String {
    match value {
        value if value.is_finite() && value > 0.0 && value < 0.2995 => format!("{value:.3}"),
        value => number(value),
    }
}

/// A latency in microseconds as text, in µs, ms or s.
pub(crate) fn latency(us: f64) -> String {
    match us {
        us if !us.is_finite() => "–".into(),
        us if us < 999.5 => format!("{us:.0} µs"),
        us if us < 99_950.0 => format!("{:.1} ms", us / 1e3),
        us if us < 999_500.0 => format!("{:.0} ms", us / 1e3),
        us => format!("{:.1} s", us / 1e6),
    }
}

/// A latency in microseconds as text; `not known` if there is none, because not every load
/// generator reports percentiles.
pub(crate) fn known(us: Option<f64>) -> String {
    us.map_or_else(|| "not known".into(), latency)
}

/// A size in bytes as text, in GiB, MiB, KiB or bytes.
pub(crate) fn bytes(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let Some((shift, unit)) = units.into_iter().find(|(shift, _)| bytes >= 1 << shift) else {
        return format!("{bytes} bytes");
    };
    let value = format!("{:.1}", bytes as f64 / (1u64 << shift) as f64);
    format!("{} {unit}", value.trim_end_matches(".0"))
}

/// `a, b and c`.
pub(crate) fn list<T: ToString>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    match items.split_last() {
        None => String::new(),
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

/// `1 repeat`, `5 repeats`.
pub(crate) fn count(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The conditions of a measurement that differ from the ground: the number of copies and the
/// neighbours. None where neither differs.
pub(crate) fn beside(replicas: Option<u32>, neighbours: Option<Neighbours>) -> Option<String> {
    let copies =
        replicas.map(|count| if count == 1 { "1 copy".into() } else { format!("{count} copies") });
    let neighbours = neighbours.map(|neighbours| format!("beside {neighbours}"));
    copies.into_iter().chain(neighbours).reduce(|one, other| format!("{one}, {other}"))
}

/// The number of copies that a durability stands for, in words.
pub(crate) fn copies(durability: Durability) -> &'static str {
    match durability {
        Durability::Volatile => "no safe copy",
        Durability::OneCopy => "one copy",
        Durability::TwoCopies => "two copies",
        Durability::Replicated => "two copies or more",
    }
}

/// What an acknowledged write is safe from, in words.
pub(crate) fn durability(durability: Durability) -> &'static str {
    match durability {
        Durability::Volatile => "volatile: a crash or a power failure loses acknowledged writes",
        Durability::OneCopy => {
            "one copy: survives a crash and a power failure, not the loss of the device that holds it"
        }
        Durability::TwoCopies => {
            "two copies on two hosts: survives the loss of either with its SSD; once it is written back, the cluster has one copy"
        }
        Durability::Replicated => "replicated: survives the loss of any one device or host",
    }
}

/// The SSD class that a placement asks for. None if the placement uses the ground's class.
pub(crate) fn class(placement: &str) -> Option<&str> {
    placement.split_once('@').map(|(_, class)| class)
}

/// The names of which a placement is composed.
fn names(placement: &str) -> impl Iterator<Item = &str> {
    placement.split('@').next().unwrap_or_default().split('+')
}

/// The placement has a cache on the hypervisor.
pub(crate) fn on_host(placement: &str) -> bool {
    names(placement).any(|name| name.starts_with("host-"))
}

/// The placement without the copy of its cache that a second hypervisor keeps; `None` if there is
/// no such copy.
pub(crate) fn without_copy(placement: &str) -> Option<String> {
    let replicated = |name: &str| name == "host-tidepool-replicated";
    names(placement)
        .any(replicated)
        .then(|| placement.replace("host-tidepool-replicated", "host-tidepool"))
}

/// The name of the control that repeats `placement` under another name.
pub(crate) fn again(placement: &str) -> String {
    match placement.split_once('@') {
        Some((names, class)) => format!("{names}+{AGAIN}@{class}"),
        None => format!("{placement}+{AGAIN}"),
    }
}

/// The placement is a control that repeats another placement under another name.
pub(crate) fn is_again(placement: &str) -> bool {
    names(placement).any(|name| name == AGAIN)
}

/// The placement that a control has to equal in speed. A control repeats a placement or only hands
/// requests on. `None` if `placement` is no control.
pub(crate) fn wrapped(placement: &str) -> Option<String> {
    let is_own = |name: &&str| *name != AGAIN && !name.ends_with("-passthrough");
    let left: Vec<&str> = names(placement).filter(is_own).collect();
    if left.len() == names(placement).count() {
        return None;
    }
    // A control that names no store stands on this store.
    let left = if left.is_empty() { "bluestore-colocated".to_string() } else { left.join("+") };
    Some(class(placement).map_or(left.clone(), |class| format!("{left}@{class}")))
}

/// The placement is a control: it shows the cost of the lab's own machinery.
pub(crate) fn is_control(placement: &str) -> bool {
    wrapped(placement).is_some()
}

/// The placement is a bound: it shows the speed that no SSD in a server or in a hypervisor, no
/// access over a gateway, and no client in a guest can exceed.
pub(crate) fn is_bound(placement: &str) -> bool {
    names(placement).any(|name| {
        [OSD_BOUND, GUEST_BOUND, HOST_BOUND, GATEWAY_BOUND, CLIENT_GUEST_BOUND].contains(&name)
    })
}

/// OSDs in guests, without a cache.
const GUEST_ALONE: &str = "osd-guest";
/// Caches under OSDs in guests.
const UNDER_GUESTS: [&str; 4] =
    ["osd-guest-tidepool", "osd-bcache", "osd-bcache-default", "osd-dm-writecache"];
/// The bound of caches under the OSDs.
pub(crate) const OSD_BOUND: &str = "osd-on-ssd";
/// The bound of caches under OSDs in guests.
pub(crate) const GUEST_BOUND: &str = "osd-guest-on-ssd";
/// The bound of caches in the hypervisor.
pub(crate) const HOST_BOUND: &str = "ssd-raw";
/// A pool on SSDs in front of the images' pool.
const TIER: &str = "cache-tier";
/// The bound of everything over an iSCSI gateway.
pub(crate) const GATEWAY_BOUND: &str = "iscsi-null";
/// The bound of clients in a guest.
pub(crate) const CLIENT_GUEST_BOUND: &str = "guest-null";

/// The placement has a cache under the OSDs.
pub(crate) fn under_osds(placement: &str) -> bool {
    names(placement).any(|name| name == "osd-tidepool" || UNDER_GUESTS.contains(&name))
}

/// The placement has a cache under the OSDs that sends every read (if `reads` is set) or every
/// write (if not) through its SSD, as long as the SSD has room.
pub(crate) fn takes_all(placement: &str, reads: bool) -> bool {
    names(placement).any(|name| match name {
        "osd-tidepool" | "osd-guest-tidepool" | "osd-bcache" => true,
        "osd-dm-writecache" => !reads,
        _ => false,
    })
}

/// The placement has its OSDs in guests, where Ceph's own code takes longer. It is ranked only if
/// the baseline has its OSDs in guests as well.
pub(crate) fn in_guests(placement: &str) -> bool {
    names(placement)
        .any(|name| [GUEST_ALONE, GUEST_BOUND].contains(&name) || UNDER_GUESTS.contains(&name))
}

/// Where the SSD of a placement is, as the start of a sentence.
pub(crate) fn side(placement: &str) -> &'static str {
    let in_server = |name: &str| {
        let below = name.starts_with("osd-") && name != GUEST_ALONE || name == TIER;
        below || name.ends_with("-dbwal") || name.ends_with("-journal")
    };
    match (on_host(placement), names(placement).any(in_server)) {
        (true, true) => "In both",
        (true, false) => "In the hypervisor",
        (false, true) => "In the OSDs' server",
        (false, false) => "Without an SSD",
    }
}

/// The unit in which OSDs allocate space, if this part of a placement's name sets one.
fn unit(name: &str) -> Option<&'static str> {
    match name {
        "alloc-4k" => Some("4 KiB"),
        "alloc-16k" => Some("16 KiB"),
        _ => None,
    }
}

/// Article and noun for a placement in a first sentence. A name that is not known stands for
/// itself.
fn article_and_noun(placement: &str) -> (&'static str, String) {
    let of = |name: &str| match name {
        "bluestore-dbwal" => Some("database on the SSD"),
        "filestore-journal" => Some("journal on the SSD"),
        TIER => Some("cache tier on the SSD"),
        "osd-tidepool" => Some("cache under the OSDs"),
        "osd-guest-tidepool" => Some("cache under the OSDs (Tidepool)"),
        "osd-bcache" => Some("cache under the OSDs (bcache)"),
        "osd-bcache-default" => Some("cache under the OSDs (bcache as it comes)"),
        "osd-dm-writecache" => Some("cache under the OSDs (dm-writecache)"),
        "host-tidepool" => Some("cache in the hypervisor"),
        "host-tidepool-replicated" => Some("cache in two hypervisors"),
        "librbd-cache" => Some("cache in the client's memory"),
        _ => None,
    };
    let without = |name: &str| match name {
        "bluestore-colocated" => "BlueStore without an SSD".to_string(),
        "filestore-colocated" => "FileStore without an SSD".into(),
        GUEST_ALONE => "BlueStore in a guest without an SSD".into(),
        other => other.into(),
    };
    let parts: Vec<&str> = names(placement).filter_map(of).collect();
    let (article, text) = match parts.as_slice() {
        [] => {
            let stores = names(placement).filter(|name| unit(name).is_none());
            ("", stores.map(without).collect::<Vec<String>>().join(" and "))
        }
        parts => ("a ", parts.join(" and a ")),
    };
    let text = match names(placement).find_map(unit) {
        Some(unit) => format!("{text}, units of {unit}"),
        None => text,
    };
    match class(placement) {
        Some(class) => (article, format!("{text} ({class})")),
        None => (article, text),
    }
}

/// A placement in few words, such as `cache in the hypervisor`.
pub(crate) fn noun(placement: &str) -> String {
    article_and_noun(placement).1
}

/// A placement in few words with its article, for use inside a sentence.
pub(crate) fn a(placement: &str) -> String {
    let (article, noun) = article_and_noun(placement);
    format!("{article}{noun}")
}

/// A text with a capital letter, for the start of a sentence. A text without a space is the name of
/// a placement and stays as it is.
pub(crate) fn capital(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) if text.contains(' ') => first.to_uppercase().chain(chars).collect(),
        _ => text.into(),
    }
}

/// The deciding load of a suite in few words, such as `4 KiB 80/20 that fits the SSD`.
pub(crate) fn load(suite: &Suite) -> String {
    let Some(workload) = suite.workload(&suite.deciding) else { return suite.deciding.clone() };
    let reads = workload.read_percent.unwrap_or(50);
    let what = match workload.rw.as_str() {
        "write" if workload.tool == Tool::RadosBench => {
            return format!("{} writes of whole objects", bytes(workload.block_bytes));
        }
        "randread" if workload.tool == Tool::RadosBench => "random reads of whole objects".into(),
        "read" if workload.tool == Tool::RadosBench => "reads of whole objects in order".into(),
        "randrw" => format!("{reads}/{}", 100u8.saturating_sub(reads)),
        "randread" => "random reads".into(),
        "randwrite" => "random writes".into(),
        "read" => "reads in order".into(),
        "write" => "writes in order".into(),
        other => other.into(),
    };
    let fits = |clients: Option<&u32>| suite.ground.fits(workload, clients.copied().unwrap_or(1));
    let size = match (fits(workload.clients.iter().min()), fits(workload.clients.iter().max())) {
        (true, true) if workload.rw == "randrw" => " that fits the SSD",
        (true, true) => " that fit the SSD",
        (false, _) => " larger than the SSD",
        (true, false) => "",
    };
    format!("{} {what}{size}", bytes(workload.block_bytes))
}

/// What a placement is, in words.
pub(crate) fn placement(placement: &str) -> String {
    let part = |name: &str| match name {
        "bluestore-colocated" => "BlueStore on the disks alone, no SSD".to_string(),
        "bluestore-dbwal" => "BlueStore with database and log on the SSD".into(),
        "filestore-colocated" => "FileStore with its journal on the same disks, no SSD".into(),
        "filestore-journal" => "FileStore with its journal on the SSD".into(),
        name if unit(name).is_some() => {
            format!("units of {} in which OSDs allocate", unit(name).unwrap_or_default())
        }
        AGAIN => "control: the same again".into(),
        TIER => "a cache tier: a pool on OSDs on the SSD, in front of the pool on the disks".into(),
        "osd-passthrough" => "control: the way under the OSD, without a cache".into(),
        "osd-tidepool" => "a cache on the SSD under each OSD".into(),
        GUEST_ALONE => "each OSD in a guest, without a cache".into(),
        "osd-guest-tidepool" => {
            "Tidepool's cache on the SSD under each OSD, which is in a guest".into()
        }
        "osd-bcache" => {
            "bcache on the SSD under each OSD, in a guest, with nothing going past it".into()
        }
        "osd-bcache-default" => "bcache as it comes on the SSD under each OSD, in a guest".into(),
        "osd-dm-writecache" => "dm-writecache on the SSD under each OSD, in a guest".into(),
        OSD_BOUND => "bound: OSDs that have SSDs in the place of disks".into(),
        GUEST_BOUND => "bound: OSDs in guests that have SSDs in the place of disks".into(),
        HOST_BOUND => "bound: the hypervisor's SSD, without Ceph".into(),
        GATEWAY_BOUND => "bound: the iSCSI gateway, which answers at once and keeps nothing".into(),
        CLIENT_GUEST_BOUND => "bound: a guest whose disk answers at once and keeps nothing".into(),
        "host-tidepool" => "a cache on the hypervisor's SSD".into(),
        "host-tidepool-replicated" => {
            "a cache on the hypervisor's SSD, writes also on a second hypervisor's".into()
        }
        "librbd-cache" => "librbd's cache in the client's memory, no SSD".into(),
        other => other.to_string(),
    };
    let text = names(placement).map(part).collect::<Vec<String>>().join("; ");
    match class(placement) {
        Some(class) => format!("{text}, here {class}"),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Layer, Ssd};

    #[test]
    fn figures_have_the_digits_that_they_are_worth() {
        let numbers = [
            (1_234_567.8, "1,234,568"),
            (999.6, "1,000"),
            (99.94, "99.9"),
            (1.234, "1.23"),
            (0.0, "0.00"),
        ];
        for (value, text) in numbers {
            assert_eq!(number(value), text);
        }
        assert_eq!((number(f64::NAN), latency(f64::INFINITY)), ("–".into(), "–".into()));
        assert_eq!((factor(0.0432), factor(0.43)), ("0.043".into(), "0.43".into()));
        assert_eq!(
            (latency(999.6), latency(12_345.0), latency(2.5e6)),
            ("1.0 ms".into(), "12.3 ms".into(), "2.5 s".into())
        );
        assert_eq!(
            (bytes(4 << 30), bytes(1536 << 20), bytes(17)),
            ("4 GiB".into(), "1.5 GiB".into(), "17 bytes".into())
        );
        assert_eq!((list(&[1, 4, 16]), list::<u32>(&[])), ("1, 4 and 16".into(), String::new()));
    }

    #[test]
    fn a_placement_is_told_by_its_parts() {
        assert!(on_host("filestore-journal+host-tidepool") && !on_host("osd-tidepool"));
        let with_copy = "host-tidepool-replicated+osd-tidepool@x";
        assert_eq!(without_copy(with_copy).as_deref(), Some("host-tidepool+osd-tidepool@x"));
        assert_eq!(without_copy("host-tidepool"), None);
        assert_eq!(side("filestore-journal@x"), "In the OSDs' server");
        assert_eq!(side("filestore-journal+host-tidepool"), "In both");
        assert_eq!(class("filestore-journal@ssd-sata-consumer"), Some("ssd-sata-consumer"));
        assert_eq!(placement("something@x"), "something, here x");
    }

    #[test]
    fn a_first_sentence_has_few_words_for_a_placement_and_its_load() {
        assert_eq!(a("host-tidepool"), "a cache in the hypervisor");
        assert_eq!(
            noun("filestore-journal+host-tidepool"),
            "journal on the SSD and a cache in the hypervisor"
        );
        assert_eq!(a("bluestore-colocated"), "BlueStore without an SSD");
        assert_eq!(a("bluestore-colocated+alloc-4k"), "BlueStore without an SSD, units of 4 KiB");
        assert_eq!(noun("bluestore-dbwal+alloc-16k"), "database on the SSD, units of 16 KiB");
        assert_eq!(a("bluestore-colocated+osd-tidepool@x"), "a cache under the OSDs (x)");
        assert_eq!(
            (capital(&noun("osd-tidepool")), capital("a")),
            ("Cache under the OSDs".into(), "a".into())
        );
        let mut suite = Suite::find("which-side").expect("it comes with the program");
        assert_eq!(load(&suite), "4 KiB 80/20 that fits the SSD");
        suite.deciding = "4k-80-20-large".into();
        assert_eq!(load(&suite), "4 KiB 80/20 larger than the SSD");
        suite.workloads[1].clients = vec![1, 4];
        suite.ground.ssd_bytes = 3 * suite.workloads[1].set_bytes;
        assert_eq!(load(&suite), "4 KiB 80/20", "it fits with one client and not with four");
        suite.ground.ssd_bytes = 3 * suite.workloads[0].set_bytes;
        suite.deciding = "4k-randwrite".into();
        assert_eq!(load(&suite), "4 KiB random writes that fit the SSD");
        suite.deciding = "cold-scan".into();
        assert_eq!(load(&suite), "64 KiB reads in order larger than the SSD");
    }

    #[test]
    fn what_is_in_guests_and_what_is_a_cache_under_osds_is_told_by_name() {
        for placement in crate::placement::all() {
            let name = placement.name();
            assert_eq!(in_guests(name), placement.in_guests(), "{name}");
            assert_eq!(
                under_osds(name),
                placement.layer() == Layer::Device && placement.ssd() == Ssd::File,
                "{name}"
            );
            assert!(under_osds(name) || !takes_all(name, false), "{name}");
            assert!(!takes_all(name, true) || placement.caches_reads(), "{name}");
        }
        assert_eq!(
            (side("osd-guest"), side("osd-bcache")),
            ("Without an SSD", "In the OSDs' server")
        );
        assert_eq!(
            (side(TIER), a(TIER)),
            ("In the OSDs' server", "a cache tier on the SSD".into())
        );
        assert_eq!(a("osd-bcache"), "a cache under the OSDs (bcache)");
    }

    #[test]
    fn a_control_knows_what_it_is_to_be_the_same_as() {
        for placement in
            ["bluestore-colocated", "filestore-journal@x", "filestore-journal+host-tidepool"]
        {
            assert_eq!(wrapped(&again(placement)).as_deref(), Some(placement));
            assert!(!is_control(placement) && is_control(&again(placement)));
        }
        assert_eq!(wrapped("osd-passthrough").as_deref(), Some("bluestore-colocated"));
        assert_eq!((wrapped("osd-guest"), wrapped("osd-bcache")), (None, None));
        assert_eq!(wrapped(&again("osd-guest")).as_deref(), Some("osd-guest"), "it is a baseline");
        assert_eq!(
            wrapped("filestore-journal+osd-passthrough").as_deref(),
            Some("filestore-journal")
        );
    }
}
