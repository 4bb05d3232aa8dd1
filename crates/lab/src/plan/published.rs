//! Hardware and workloads of publications: for each of them the plan says what the publication
//! says.

use super::tests::plan_of;
use super::*;

const IOMETER: &str = include_str!("../../../../docs/examples/published/iometer-8020.toml");
const MICRON: &str = include_str!("../../../../docs/examples/published/micron.toml");
const JOURNAL: &str = include_str!("../../../../docs/examples/published/journal.toml");
const PVC2: &str = include_str!("../../../../docs/examples/published/pvc2.toml");
const DISKSPD: &str = include_str!("../../../../docs/examples/published/diskspd-256k.toml");

fn effect(plan: &Plan, placement: Placement) -> Effect {
    plan.verdicts.iter().find(|verdict| verdict.placement == placement).expect("a verdict").effect
}

/// The inventory with one of its lines replaced.
fn with(text: &str, line: &str, other: &str) -> String {
    assert!(text.contains(line), "{line}");
    text.replacen(line, other, 1)
}

/// Number of OSDs on each SSD that has a place, and whether the plan says that OSDs have no SSD.
fn osds(plan: &Plan) -> (Vec<usize>, bool) {
    let placed = plan.hosts.iter().flat_map(|host| &host.placed);
    let without = plan.advice().any(|advice| advice.text.contains("have no SSD"));
    (placed.map(|placed| placed.osds.len()).collect(), without)
}

#[test]
fn three_ssds_in_hypervisors_stand_beside_six_in_servers_and_come_first() {
    let plan = plan_of(IOMETER);
    assert_eq!(
        (plan.first, effect(&plan, Placement::Host)),
        (Some(Placement::Host), Effect::Helps)
    );
    let two_copies = |advice: &Advice| advice.rules.contains(&"host-two-copies");
    assert!(
        plan.verdicts[0].advice.iter().any(two_copies),
        "both options keep two copies of a write"
    );
    let bills: Vec<_> =
        plan.bills.iter().map(|bill| (bill.placement, bill.needed, bill.cost)).collect();
    assert_eq!(
        bills,
        [(Placement::Host, 3, Some(1_200.0)), (Placement::Journal, 6, Some(2_400.0))]
    );
    assert!(
        plan.bills.iter().all(|bill| bill.years.is_some() && bill.written_per_day_bytes.is_some())
    );
    let domains: Vec<&str> = plan.bills.iter().map(|bill| bill.failure_domain.as_str()).collect();
    assert_eq!(
        domains,
        ["no data: another hypervisor has a copy", "4 OSDs: 16 TB to be recovered"]
    );
}

#[test]
fn databases_on_nvme_help_small_writes_to_sata_ssds_and_not_reads() {
    let of =
        |line: &str, other: &str| effect(&plan_of(&with(MICRON, line, other)), Placement::DbWal);
    let plan = plan_of(MICRON);
    assert_eq!(
        (plan.first, effect(&plan, Placement::DbWal)),
        (Some(Placement::DbWal), Effect::WritesOnly)
    );
    assert_eq!(
        osds(&plan),
        (vec![12; 8], false),
        "two NVMe in each of four nodes, for twenty-four OSDs"
    );
    assert_eq!(
        of("read-percent = 70", "read-percent = 0"),
        Effect::WritesOnly,
        "+71 % at 40 clients"
    );
    assert_eq!(of("read-percent = 70", "read-percent = 100"), Effect::Little, "little or no gain");
    assert_eq!(of("block-size = \"4KiB\"", "block-size = \"4MiB\""), Effect::Little, "9 %");
    assert_eq!(
        of("ceph = \"luminous\"", "ceph = \"reef\""),
        Effect::NotKnown,
        "other allocation units"
    );
}

#[test]
fn a_data_centre_ssd_is_the_journal_of_seven_disks_and_a_consumers_ssd_of_none() {
    let plan = plan_of(JOURNAL);
    assert_eq!(
        (plan.first, effect(&plan, Placement::Journal)),
        (Some(Placement::Journal), Effect::WritesOnly)
    );
    assert_eq!(osds(&plan), (vec![7, 7], false));
    let refused: Vec<&str> = plan.refused.iter().map(|refused| refused.drive.as_str()).collect();
    assert_eq!(refused, ["/dev/sda", "/dev/sda"]);
    let protected = with(JOURNAL, "power-loss-protection = false", "power-loss-protection = true");
    assert_eq!(
        plan_of(&protected).refused[0].why.rules,
        ["grade"],
        "2 MB/s with direct and synchronous writes"
    );
}

#[test]
fn nothing_is_put_in_front_of_osds_on_nvme() {
    for line in ["read-percent = 100", "read-percent = 0"] {
        let plan = plan_of(&with(PVC2, "read-percent = 100", line));
        assert_eq!((plan.first, plan.bills.len()), (None, 0));
        assert!(
            plan.verdicts.iter().all(|verdict| verdict.effect == Effect::No),
            "{:?}",
            plan.verdicts
        );
        assert!(plan.hosts.iter().all(|host| host.placed.is_empty()));
        assert!(plan.cites("osds-per-node"), "what was published: OSDs, not caches");
        assert!(plan.answer.starts_with("Do not buy"), "{}", plan.answer);
    }
}

#[test]
fn at_256_kib_a_cache_under_the_osds_helps_and_databases_alone_do_little() {
    let plan = plan_of(DISKSPD);
    assert_eq!(
        (plan.first, effect(&plan, Placement::OsdCache)),
        (Some(Placement::OsdCache), Effect::Helps)
    );
    assert_eq!(effect(&plan, Placement::DbWal), Effect::Little);
    assert_eq!(
        effect(&plan, Placement::Host),
        Effect::NotKnown,
        "no host cache was published at 256 KiB"
    );
    assert!(plan.cites("osd-cache-cutoff"), "bcache did nothing with its default");
    assert_eq!(osds(&plan), (vec![2; 12], false), "each SSD takes two OSDs with it");
    let placed = &plan.hosts[0].placed[0];
    assert!(
        placed.cache_bytes > 0
            && placed.commands.iter().any(|command| command.contains("/udev/rules.d/"))
    );
    let filestore =
        plan_of(&with(DISKSPD, "objectstore = \"bluestore\"", "objectstore = \"filestore\""));
    assert_eq!(filestore.first, Some(Placement::Journal), "journals on SSDs were as fast");
}

#[test]
fn the_manual_shows_the_answers_beside_what_was_published() {
    let manual = include_str!("../../../../docs/lab.md");
    for (name, text) in [
        ("iometer-8020", IOMETER),
        ("micron", MICRON),
        ("journal", JOURNAL),
        ("pvc2", PVC2),
        ("diskspd-256k", DISKSPD),
    ] {
        let link = format!("| [{name}](examples/published/{name}.toml) |");
        let row =
            manual.lines().find(|line| line.starts_with(&link)).unwrap_or_else(|| panic!("{link}"));
        let answer = plan_of(text).answer;
        assert!(row.ends_with(&format!("| {answer} |")), "{answer}: {row}");
    }
}
