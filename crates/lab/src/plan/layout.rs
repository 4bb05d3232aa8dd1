//! Which SSD of a host goes where, how large its parts are, and what is lost with the SSD.

use std::cmp::Reverse;

use serde::Serialize;

use super::commands;
use super::fitness::usable;
use super::inventory::{Drive, Host, Inventory, Kind, State, Store, Usage};
use super::quantity::{binary, decimal, lasting};
use super::rules::{
    Advice, DB_FASTER, DB_HDD, DB_SIZE, DB_STEPS, ENDURANCE, FAILURE_DOMAIN, GRADE, HOST_FIRST,
    HOST_ONE_COPY, HOST_SIZE, HOST_THROUGH, HOST_TWO_COPIES, JOURNAL, JOURNAL_SIZE, KEY,
    NOT_DIVIDED, NOT_TOUCHED, OSD_CACHE, OSD_CACHE_COPIES, OSD_CACHE_CUTOFF, OSDS_PER_SSD, WAL,
};
use super::verdict::{
    DEFERRED_BYTES_MAX, Effect, HostCopies, Placement, Verdict, host_copies, media, store,
};
use crate::qualify::Grade;

const GIB: u64 = 1 << 30;
/// Sizes that a database of an old release uses, and twice these sizes, largest first, in GiB.
const STEPS_GIB: [u64; 6] = [600, 300, 60, 30, 6, 3];
/// Least size of a database in bytes. A smaller database is of no use, and the log stands by
/// itself.
const DB_BYTES_MIN: u64 = 3 * GIB;
/// Size of a log that stands by itself, in bytes.
const WAL_BYTES: u64 = 2 * GIB;
/// Size of a journal in bytes.
const JOURNAL_BYTES: u64 = 5120 << 20;
/// Most parts whose sizes are always listed one by one. More parts are listed as a count and a size
/// if they are alike.
const SIZES_MAX: usize = 4;
/// Bytes of an SSD that labels and metadata take.
const LABELS_BYTES: u64 = GIB;

/// What an OSD gets on an SSD.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Share {
    /// The drive with the OSD's data.
    pub data: String,
    /// Node of the drive with the data, if it is known and the drive is free.
    #[serde(skip)]
    pub path: Option<String>,
    /// The drive with the data holds the OSD already.
    pub exists: bool,
    /// Size of the OSD's data in bytes.
    pub data_bytes: u64,
    /// Size of the OSD's part of the SSD in bytes: database with log, log alone, or journal.
    pub part_bytes: u64,
}

/// An SSD with its place.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Placed {
    /// The place.
    pub placement: Placement,
    /// The SSD.
    pub drive: String,
    /// Size of the SSD in bytes.
    pub bytes: u64,
    /// The OSDs that have a part of the SSD; none on a hypervisor.
    pub osds: Vec<Share>,
    /// Some parts are logs alone, because no database fits.
    pub wal_only: bool,
    /// Bytes that are left of the SSD as a cache under these OSDs; 0 for none.
    pub cache_bytes: u64,
    /// Bytes that have to be copied anew when the SSD is lost, if its OSDs are full.
    pub recover_bytes: u64,
    /// Bytes that guests' writes bring to the SSD in a day.
    pub written_per_day_bytes: Option<f64>,
    /// Years for which the endurance that the maker promises lasts at this rate.
    pub years: Option<f64>,
    /// Advice on the SSD.
    pub advice: Vec<Advice>,
    /// Commands that would put the SSD in its place. They are not run.
    pub commands: Vec<String>,
}

/// The places of a host's SSDs.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Layout {
    pub(super) placed: Vec<Placed>,
    pub(super) advice: Vec<Advice>,
    /// What the OSDs need a part of an SSD for, if they need one.
    pub(super) osds_place: Option<Placement>,
    /// Kind of the drives with the data of these OSDs.
    pub(super) osds_media: Option<Kind>,
    /// Number of OSDs of the host that need a part of an SSD.
    pub(super) osds_wanting: usize,
    /// Number of these OSDs for which there is no SSD.
    pub(super) osds_without: usize,
    /// SSDs that might carry the OSDs without an SSD, but whose synchronous bandwidth was not
    /// measured.
    pub(super) unmeasured: Vec<String>,
    /// The OSDs are to have a cache as well.
    pub(super) osds_cache: bool,
    /// Size of the largest of these OSDs in bytes.
    pub(super) osd_bytes: u64,
    /// Largest part that one of these OSDs needs, in bytes.
    pub(super) part_bytes: u64,
    /// The hypervisor needs a cache and has no SSD for it.
    pub(super) host_without: bool,
}

/// What decides the layout of every host.
pub(super) struct Wanted<'a> {
    pub(super) inventory: &'a Inventory,
    pub(super) verdicts: &'a [Verdict],
    pub(super) first: Option<Placement>,
}

/// What OSDs are to have of an SSD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct OsdPart {
    /// What their part of the SSD is for.
    placement: Placement,
    /// They are to have a cache beside it.
    with_cache: bool,
}

/// A side on which SSDs stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// Caches in hypervisors.
    Host,
    /// Parts for the OSDs of a server.
    Osds,
}

impl Wanted<'_> {
    fn effect(&self, placement: Placement, media: Option<Kind>) -> Effect {
        let on = |verdict: &&Verdict| verdict.placement == placement && verdict.media == media;
        self.verdicts.iter().find(on).map_or(Effect::NotKnown, |verdict| verdict.effect)
    }

    /// Hypervisors are to have a cache.
    pub(super) fn host(&self) -> bool {
        matches!(self.effect(Placement::Host, None), Effect::Helps | Effect::ReadsOnly)
    }

    /// What OSDs on drives of this kind are to have of an SSD, if anything.
    fn osds(&self, media: Kind) -> Option<OsdPart> {
        let helps = |placement| {
            matches!(self.effect(placement, Some(media)), Effect::Helps | Effect::WritesOnly)
        };
        let placement = match (store(self.inventory), media) {
            (Store::Filestore, _) => helps(Placement::Journal).then_some(Placement::Journal),
            // Ceph's documentation puts the databases of disks on an SSD whatever the workload is.
            (Store::Bluestore, Kind::Hdd) => Some(Placement::DbWal),
            (Store::Bluestore, _) => helps(Placement::DbWal).then_some(Placement::DbWal),
        };
        Some(OsdPart { placement: placement?, with_cache: self.osd_cache(media) })
    }

    /// OSDs on drives of this kind are to have a cache, and no place that is nearer to the guests
    /// comes first.
    fn osd_cache(&self, media: Kind) -> bool {
        self.first == Some(Placement::OsdCache)
            && self.effect(Placement::OsdCache, Some(media)) == Effect::Helps
    }
}

/// Puts a host's SSDs into places on both sides. The side that is first for the workload takes its
/// SSDs first.
pub(super) fn lay_out(wanted: &Wanted<'_>, host: &Host) -> Layout {
    let host_first = wanted.first == Some(Placement::Host);
    let sides = if host_first { [Side::Host, Side::Osds] } else { [Side::Osds, Side::Host] };
    lay_out_on(wanted, host, &sides)
}

/// Puts a host's SSDs into places on these sides only.
pub(super) fn lay_out_on(wanted: &Wanted<'_>, host: &Host, sides: &[Side]) -> Layout {
    let mut layout = Layout::default();
    let mut ssds = usable(host);
    for side in sides {
        match side {
            Side::Host => place_host_cache(wanted, host, &mut ssds, &mut layout),
            Side::Osds => place_under_osds(wanted, host, &mut ssds, &mut layout),
        }
    }
    let not_known = host.has_guests() && wanted.effect(Placement::Host, None) == Effect::NotKnown;
    let why = if not_known {
        "whether a cache on it helps is not known for this workload"
    } else {
        "for this workload nothing wants it"
    };
    for index in ssds.iter().filter(|_| host.role.is_some()) {
        let text = format!("{} is left over: {why}", host.drives[*index].label);
        layout.advice.push(Advice::new(text, &[KEY]));
    }
    layout
}

fn place_host_cache(wanted: &Wanted<'_>, host: &Host, ssds: &mut Vec<usize>, layout: &mut Layout) {
    if !host.has_guests() || !wanted.host() {
        return;
    }
    let set = wanted.inventory.workload.working_set.map_or(0, |set| set.get());
    let product = |index: usize| &host.drives[index].product;
    // Of the SSDs that hold the working set, the smallest one of the best grade: larger SSDs are
    // left for other places.
    let holding = ssds.iter().copied().filter(|&index| set > 0 && product(index).bytes >= set);
    let smallest =
        holding.min_by_key(|&index| (Reverse(product(index).grade()), product(index).bytes));
    let largest = ssds.iter().copied().max_by_key(|&index| product(index).bytes);
    let index = smallest.or(largest);
    let Some(index) = index else {
        layout.host_without = true;
        let text = "it has no SSD for a cache: none is there, free and fit";
        layout.advice.push(Advice::new(text, &[HOST_FIRST]));
        return;
    };
    ssds.retain(|&other| other != index);
    layout.placed.push(host_cache(wanted.inventory, &host.drives[index], set));
}

fn host_cache(inventory: &Inventory, drive: &Drive, set: u64) -> Placed {
    let copies = host_copies(inventory);
    let mut placed = Placed::new(Placement::Host, drive);
    let sized = match (set, drive.product.bytes) {
        (0, _) => None,
        (set, bytes) if bytes >= set => {
            Some(format!("it holds the working set of {}", decimal(set)))
        }
        (set, bytes) => Some(format!(
            "it holds {:.0} % of the working set of {}: reads of the rest go to Ceph, and nothing here says how many",
            bytes as f64 * 100.0 / set as f64,
            decimal(set)
        )),
    };
    placed.advice.extend(sized.map(|text| Advice::new(text, &[HOST_SIZE])));
    placed.advice.push(match copies {
        HostCopies::One(loss) => {
            let text = format!(
                "one copy: with this SSD or its host up to {loss} of writes are lost; with a second copy on another hypervisor's SSD (--peer in place of --accept-loss) none are"
            );
            Advice::new(text, &[HOST_ONE_COPY, HOST_TWO_COPIES])
        }
        HostCopies::Two => Advice::new(
            "two copies: nothing is lost with this SSD or its host; it holds the second copies of another hypervisor, too",
            &[HOST_TWO_COPIES],
        ),
        HostCopies::None => Advice::new(
            "write-through: nothing is lost with this SSD; reads become faster, writes do not",
            &[HOST_FIRST, HOST_THROUGH],
        ),
    });
    placed.advice.extend(graded(drive));
    placed.wear(drive, written_on_host(inventory));
    placed.commands = commands::host_cache(drive, copies);
    placed
}

/// Bytes that guests' writes bring to the SSD of a hypervisor in a day, if this is known.
pub(super) fn written_on_host(inventory: &Inventory) -> Option<f64> {
    let copies = if host_copies(inventory) == HostCopies::Two { 2.0 } else { 1.0 };
    inventory.workload.written_per_day.map(|bytes| bytes.get() as f64 * copies)
}

/// Advice on the grade of an SSD, if there is any.
fn graded(drive: &Drive) -> Option<Advice> {
    let text = match drive.product.grade() {
        None => "it has no grade: qualify it before anything is put on it",
        Some(Grade::Poor) => "its grade is poor: it is for little load only",
        Some(_) => return None,
    };
    Some(Advice::new(text, &[GRADE]))
}

/// For each OSD of a host, the drive that holds or will hold the OSD's data, if the drive is of the
/// kind `media`.
fn data_drives(host: &Host, media: Kind) -> Vec<&Drive> {
    let holds = |drive: &&Drive| {
        let free_disk = media == Kind::Hdd && drive.state == State::Free;
        drive.product.kind == Some(media) && (drive.state == State::Osd || free_disk)
    };
    host.drives
        .iter()
        .filter(holds)
        .flat_map(|drive| std::iter::repeat_n(drive, drive.osds))
        .collect()
}

fn place_under_osds(wanted: &Wanted<'_>, host: &Host, ssds: &mut Vec<usize>, layout: &mut Layout) {
    let Some(media) = media(host).filter(|_| host.has_osds()) else { return };
    let Some(part) = wanted.osds(media) else { return };
    let placement = part.placement;
    let osds = data_drives(host, media);
    (layout.osds_place, layout.osds_media) = (Some(placement), Some(media));
    layout.osds_wanting = osds.len();
    layout.osds_cache = part.with_cache;
    layout.osd_bytes = osds.iter().map(|osd| osd.osd_bytes()).max().unwrap_or(0);
    let (_, percent) = db_percents(wanted.inventory);
    layout.part_bytes =
        osds.iter().map(|osd| part_wanted(placement, osd, percent)).max().unwrap_or(0);
    // In front of SSDs only a faster drive is of use.
    let chosen: Vec<usize> = ssds
        .iter()
        .copied()
        .filter(|&index| host.drives[index].product.kind > Some(media))
        .collect();
    if media != Kind::Hdd && chosen.len() < ssds.len() {
        let text = "its SATA SSDs are no faster than what the OSDs are on";
        layout.advice.push(Advice::new(text, &[DB_FASTER]));
    }
    let unmeasured: Vec<String> = chosen
        .iter()
        .map(|&index| &host.drives[index])
        .filter(|ssd| ssd.product.sync_write_bytes_per_s.is_none())
        .map(|ssd| ssd.label.clone())
        .collect();
    let mut parts: Vec<Vec<&Drive>> = vec![Vec::new(); chosen.len()];
    for osd in osds {
        let room =
            |&slot: &usize| parts[slot].len() < carried(&host.drives[chosen[slot]], placement);
        let emptiest = (0..chosen.len()).filter(room).min_by_key(|&slot| parts[slot].len());
        match emptiest {
            Some(slot) => parts[slot].push(osd),
            None => layout.osds_without += 1,
        }
    }
    for (index, osds) in chosen.into_iter().zip(parts).filter(|(_, osds)| !osds.is_empty()) {
        ssds.retain(|&other| other != index);
        let ssd = &host.drives[index];
        layout.placed.push(part.divide(ssd, &osds, wanted.inventory, host));
    }
    if layout.osds_without > 0 {
        let text = format!(
            "{} of {} OSDs have no SSD for their {}",
            layout.osds_without,
            layout.osds_wanting,
            part_name(placement)
        );
        let rule = if placement == Placement::Journal { JOURNAL } else { DB_HDD };
        layout.advice.push(Advice::new(text, &[rule, OSDS_PER_SSD]));
        layout.unmeasured = unmeasured;
    }
}

/// Most OSDs that an SSD carries, by its kind, grade and bandwidth, and by its size. A logical
/// volume carries at most one.
fn carried(ssd: &Drive, placement: Placement) -> usize {
    let least_bytes = if placement == Placement::Journal { JOURNAL_BYTES } else { WAL_BYTES };
    let by_size = ssd.product.bytes.saturating_sub(LABELS_BYTES) / least_bytes;
    if ssd.is_volume() {
        return usize::from(by_size > 0);
    }
    ssd.product.osds_max().min(usize::try_from(by_size).unwrap_or(usize::MAX))
}

/// Bytes of an SSD that an OSD needs. A database is `percent` percent of its OSD, and at least
/// [`DB_BYTES_MIN`], in whole GiB.
fn part_wanted(placement: Placement, osd: &Drive, percent: u64) -> u64 {
    match placement {
        Placement::Journal => JOURNAL_BYTES,
        _ => (osd.osd_bytes() / 100 * percent).max(DB_BYTES_MIN).next_multiple_of(GIB),
    }
}

/// The least and the most percent of an OSD that its database needs.
fn db_percents(inventory: &Inventory) -> (u64, u64) {
    match inventory.cluster.usage {
        Some(Usage::Rgw) => (4, 4),
        _ => (1, 2),
    }
}

/// Name of a part.
pub(super) fn part_name(placement: Placement) -> &'static str {
    if placement == Placement::Journal { "journal" } else { "database" }
}

impl OsdPart {
    /// Divides an SSD of a host among these OSDs.
    fn divide(self, ssd: &Drive, osds: &[&Drive], inventory: &Inventory, host: &Host) -> Placed {
        let OsdPart { placement, with_cache } = self;
        let mut placed = Placed::new(placement, ssd);
        let share_bytes =
            ssd.product.bytes.saturating_sub(LABELS_BYTES) / osds.len() as u64 / GIB * GIB;
        let (least, most) = db_percents(inventory);
        // A cache beside the databases takes the room that the databases can do without.
        let percent = if with_cache { least } else { most };
        let part = |osd: &&Drive| {
            let wanted_bytes = part_wanted(placement, osd, percent);
            part_bytes(inventory, placement, wanted_bytes, share_bytes)
        };
        let sized: Vec<(u64, bool)> = osds.iter().map(part).collect();
        placed.wal_only = sized.iter().any(|(_, wal_only)| *wal_only);
        placed.osds = osds
            .iter()
            .zip(&sized)
            .map(|(osd, (part_bytes, _))| Share {
                data: osd.label.clone(),
                path: osd.path.clone().filter(|_| osd.state == State::Free),
                exists: osd.state == State::Osd,
                data_bytes: osd.osd_bytes(),
                part_bytes: *part_bytes,
            })
            .collect();
        placed.advice.extend(part_advice(inventory, &placed));
        placed.recover_bytes = placed.osds.iter().map(|osd| osd.data_bytes).sum();
        placed.advice.extend(failure_domain(inventory, host, &placed));
        if ssd.is_volume() {
            let text = "a logical volume that exists is used whole, for one OSD; make one for each OSD to serve more";
            placed.advice.push(Advice::new(text, &[NOT_DIVIDED]));
        } else if with_cache {
            add_cache(&mut placed);
        }
        placed.advice.extend(graded(ssd));
        placed.wear(ssd, written_under_osds(inventory, &placed));
        placed.commands = commands::under_osds(inventory, ssd, &placed);
        placed
    }
}

/// Size of an OSD's part of an SSD, of which at most `share_bytes` are for this OSD, and whether
/// the part is a log alone.
fn part_bytes(
    inventory: &Inventory,
    placement: Placement,
    wanted_bytes: u64,
    share_bytes: u64,
) -> (u64, bool) {
    let bytes = wanted_bytes.min(share_bytes);
    if placement == Placement::Journal {
        return (bytes, false);
    }
    if bytes < DB_BYTES_MIN {
        return (share_bytes.min(WAL_BYTES), true);
    }
    let steps = inventory.cluster.ceph.is_some_and(|release| release.has_steps());
    let step = STEPS_GIB.iter().map(|step| step * GIB).find(|step| *step <= bytes);
    (step.filter(|_| steps).unwrap_or(bytes), false)
}

/// Sizes of parts in words: of each OSD, or as a count and a size where there are many parts that
/// are alike.
fn part_sizes(osds: &[Share]) -> String {
    let alike = osds.windows(2).all(|pair| pair[0].part_bytes == pair[1].part_bytes);
    if osds.len() > SIZES_MAX && alike {
        return format!("{} x {}", osds.len(), binary(osds[0].part_bytes));
    }
    let sizes: Vec<String> =
        osds.iter().map(|osd| format!("{} {}", osd.data, binary(osd.part_bytes))).collect();
    sizes.join(", ")
}

fn part_advice(inventory: &Inventory, placed: &Placed) -> Vec<Advice> {
    let sizes = part_sizes(&placed.osds);
    if placed.placement == Placement::Journal {
        return vec![Advice::new(format!("journals: {sizes}"), &[JOURNAL, JOURNAL_SIZE])];
    }
    if placed.wal_only {
        let text = format!("no database fits, so it takes the logs alone: {sizes}");
        return vec![Advice::new(text, &[WAL, DB_SIZE])];
    }
    let mut advice =
        vec![Advice::new(format!("database and log together: {sizes}"), &[DB_SIZE, WAL])];
    if inventory.cluster.ceph.is_some_and(|release| release.has_steps()) {
        let text =
            "in steps, as this release uses no others; after an upgrade larger ones are of use";
        advice.push(Advice::new(text, &[DB_STEPS]));
    }
    let (least, _) = db_percents(inventory);
    let small = placed.osds.iter().filter(|osd| osd.part_bytes < osd.data_bytes / 100 * least);
    let small = small.count();
    if small > 0 {
        let text = format!(
            "{small} of them are below {least} % of their OSD: metadata that does not fit is on the slow drive"
        );
        advice.push(Advice::new(text, &[DB_SIZE]));
    }
    advice
}

fn failure_domain(inventory: &Inventory, host: &Host, placed: &Placed) -> Vec<Advice> {
    let sizes: Vec<u64> = placed.osds.iter().map(|osd| osd.data_bytes).collect();
    let count = sizes.len();
    let total = if sizes.windows(2).all(|pair| pair[0] == pair[1]) {
        format!("{count} x {}", decimal(sizes[0]))
    } else {
        decimal(placed.recover_bytes)
    };
    let plural = if count == 1 { "OSD" } else { "OSDs" };
    let text = format!("this SSD takes {count} {plural} with it: {total} to be recovered if full");
    let mut advice = vec![Advice::new(text, &[FAILURE_DOMAIN])];
    let of_host = media(host).map_or(0, |media| data_drives(host, media).len());
    if count == of_host && count > 1 {
        let text = "these are all OSDs of the host: the SSD's failure is the host's; two SSDs would halve it";
        advice.push(Advice::new(text, &[FAILURE_DOMAIN]));
    }
    let hosts = inventory.hosts.iter().filter(|host| host.has_osds()).count() as u64;
    if inventory.cluster.replicas.is_some_and(|replicas| replicas.get() >= hosts)
        && count == of_host
    {
        let text = "there is no further host to copy to: the pools stay degraded until the SSD is replaced";
        advice.push(Advice::new(text, &[FAILURE_DOMAIN]));
    }
    advice
}

/// Uses what is left of an SSD for a cache under its OSDs.
fn add_cache(placed: &mut Placed) {
    let parts: u64 = placed.osds.iter().map(|osd| osd.part_bytes).sum();
    let left = placed.bytes.saturating_sub(parts + LABELS_BYTES) / GIB * GIB;
    if left < placed.osds.len() as u64 * GIB {
        let text = "there is no room beside the databases for a cache under the OSDs";
        placed.advice.push(Advice::new(text, &[OSD_CACHE]));
        return;
    }
    placed.cache_bytes = left;
    let text =
        format!("the other {} are a cache under the same OSDs: bcache, write-back", decimal(left));
    placed.advice.push(Advice::new(text, &[OSD_CACHE, OSD_CACHE_CUTOFF]));
    let text = "write-back adds no failure domain: without their databases these OSDs are lost in any case";
    placed.advice.push(Advice::new(text, &[OSD_CACHE_COPIES, FAILURE_DOMAIN]));
    let text = "Open CAS, or Tidepool with a file: volume, can stand in the same place; neither is compared here";
    placed.advice.push(Advice::new(text, &[OSD_CACHE]));
    if placed.osds.iter().any(|osd| osd.exists) {
        let text = "OSDs that exist have to be made anew on bcache, one host at a time, each after `ceph osd safe-to-destroy`";
        placed.advice.push(Advice::new(text, &[NOT_TOUCHED, OSD_CACHE]));
    }
}

/// Bytes that guests' writes bring to an SSD under OSDs in a day, if this is known.
fn written_under_osds(inventory: &Inventory, placed: &Placed) -> Option<f64> {
    let through = placed.cache_bytes > 0 || writes_through(inventory, placed.placement);
    written_per_osd_byte(inventory)
        .filter(|_| through)
        .map(|written| written * placed.recover_bytes as f64)
}

/// The data that guests write goes through such a part of an SSD, and not metadata alone.
pub(super) fn writes_through(inventory: &Inventory, placement: Placement) -> bool {
    let small = inventory.workload.block_size.is_some_and(|size| size.get() <= DEFERRED_BYTES_MAX);
    placement == Placement::Journal || small
}

/// Bytes that guests write to all OSDs in a day, with all copies, for each byte of the OSDs' size.
/// None if this is not known.
pub(super) fn written_per_osd_byte(inventory: &Inventory) -> Option<f64> {
    let guests = inventory.hosts.iter().filter(|host| host.has_guests()).count() as f64;
    let written = inventory.workload.written_per_day?.get() as f64 * guests;
    let copies = inventory.cluster.replicas?.get() as f64;
    // The sizes of one host's drives can be added up as integers, those of all hosts' drives
    // cannot.
    let of_host = |host: &Host| -> f64 {
        let drives = media(host).map(|media| data_drives(host, media)).unwrap_or_default();
        drives.iter().map(|drive| drive.osd_bytes()).sum::<u64>() as f64
    };
    let all: f64 = inventory.hosts.iter().filter(|host| host.has_osds()).map(of_host).sum();
    (guests > 0.0 && all > 0.0).then(|| written * copies / all)
}

/// Years for which an endurance lasts at this rate of writes. None without writes.
pub(super) fn years(endurance_bytes: f64, written_per_day_bytes: f64) -> Option<f64> {
    (written_per_day_bytes > 0.0).then(|| endurance_bytes / written_per_day_bytes / 365.0)
}

impl Placed {
    fn new(placement: Placement, drive: &Drive) -> Placed {
        Placed {
            placement,
            drive: drive.label.clone(),
            bytes: drive.product.bytes,
            osds: Vec::new(),
            wal_only: false,
            cache_bytes: 0,
            recover_bytes: 0,
            written_per_day_bytes: None,
            years: None,
            advice: Vec::new(),
            commands: Vec::new(),
        }
    }

    /// Adds what is known of the SSD's life when `written` bytes are written to it in a day.
    fn wear(&mut self, drive: &Drive, written: Option<f64>) {
        let Some(written) = written.filter(|&written| written > 0.0) else { return };
        self.written_per_day_bytes = Some(written);
        let Some(endurance) = drive.product.endurance_bytes else { return };
        let Some(years) = years(endurance, written) else { return };
        self.years = Some(years);
        let text = format!(
            "the guests' writes alone come to {} a day: the {} that its maker promises last {} at most",
            decimal(written as u64),
            decimal(endurance as u64),
            lasting(years),
        );
        self.advice.push(Advice::new(text, &[ENDURANCE]));
    }
}
