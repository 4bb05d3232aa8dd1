//! Where the SSDs of a cluster should go: advice from an inventory, each line with the rules from
//! which it follows.
//!
//! Everything here is a function of the [`Inventory`] and of results that were measured before.
//! Nothing is measured, nothing is run, nothing is guessed. What the inventory does not give is
//! listed as missing.

mod answer;
mod bill;
mod commands;
mod evidence;
mod fitness;
mod inventory;
mod layout;
mod node;
#[cfg(test)]
mod published;
mod quantity;
mod rules;
mod verdict;

use serde::Serialize;

pub use bill::Bill;
pub use evidence::{Evidence, Measured};
pub use inventory::{
    Cluster, Drive, Host, Inventory, InventoryError, Kind, Product, Role, State, Store, Usage,
    Workload,
};
pub use layout::{Placed, Share};
pub use quantity::{Amount, Bytes, Millis, Percent, Positive, Release, binary, decimal, lasting};
pub use rules::{ALL as RULES, Advice, Rule};
pub use verdict::{Effect, Key, Placement, Verdict};

use layout::{Layout, Wanted};

/// Where the SSDs should go, and why.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Plan {
    /// The plan in one sentence.
    pub answer: String,
    /// The conditions for which the verdicts hold.
    pub key: Key,
    /// The place where an SSD helps most; `None` where too little is known, or where no place
    /// helps.
    pub first: Option<Placement>,
    /// The effect of an SSD in each place.
    pub verdicts: Vec<Verdict>,
    /// The places side by side: how many SSDs each place takes if the SSDs stand there alone, what
    /// they cost, how long they last, and what is lost with one of them.
    pub bills: Vec<Bill>,
    /// Currency of the prices, if it was given.
    pub currency: Option<String>,
    /// The places of each host's SSDs.
    pub hosts: Vec<HostPlan>,
    /// SSDs that are not used.
    pub refused: Vec<Refused>,
    /// Files in which no results were measured under these conditions.
    pub unmatched: Vec<String>,
    /// What the inventory does not give, although the advice depends on it.
    pub missing: Vec<String>,
    /// The rules that are cited.
    pub rules: Vec<Rule>,
}

/// The places of a host's SSDs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HostPlan {
    /// Name of the host.
    pub name: String,
    /// Role of the host, if it is known.
    pub role: Option<Role>,
    /// The host's SSDs that have a place.
    pub placed: Vec<Placed>,
    /// Further advice on the host.
    pub advice: Vec<Advice>,
}

/// An SSD that is not used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// The host that has the SSD; `None` for an offer.
    pub host: Option<String>,
    /// The drive, or the offer.
    pub drive: String,
    /// Why the SSD is not used.
    pub why: Advice,
}

/// Makes the plan for an inventory. `evidence` holds results that were measured before.
pub fn plan(inventory: &Inventory, evidence: &[Evidence]) -> Plan {
    let key = Key::of(inventory);
    let mut verdicts = verdict::verdicts(inventory, &key);
    let unmatched = evidence::apply(evidence, inventory, &key, &mut verdicts);
    verdict::ask_to_measure(&mut verdicts);
    let first = verdict::first(&key, &verdicts);
    let wanted = Wanted { inventory, verdicts: &verdicts, first };
    let layouts: Vec<_> =
        inventory.hosts.iter().map(|host| layout::lay_out(&wanted, host)).collect();
    let bills = bill::bills(&wanted);
    let missing = missing(inventory, &key, &bills, &layouts);
    let hosts = inventory.hosts.iter().zip(layouts).map(|(host, layout)| HostPlan {
        name: host.name.clone(),
        role: host.role,
        placed: layout.placed,
        advice: layout.advice,
    });
    let mut plan = Plan {
        answer: answer::answer(&key, first, &verdicts, &bills),
        key,
        first,
        bills,
        currency: inventory.cluster.currency.clone(),
        hosts: hosts.collect(),
        refused: refused(inventory),
        unmatched,
        missing,
        verdicts,
        rules: Vec::new(),
    };
    plan.rules = RULES.iter().copied().filter(|rule| plan.cites(rule.id)).collect();
    plan
}

impl Plan {
    /// Every line of advice.
    pub fn advice(&self) -> impl Iterator<Item = &Advice> {
        let hosts = self.hosts.iter().flat_map(|host| {
            host.placed.iter().flat_map(|placed| &placed.advice).chain(&host.advice)
        });
        self.verdicts
            .iter()
            .flat_map(|verdict| &verdict.advice)
            .chain(self.bills.iter().flat_map(|bill| &bill.advice))
            .chain(hosts)
            .chain(self.refused.iter().map(|refused| &refused.why))
    }

    fn cites(&self, id: &str) -> bool {
        // The conditions stand above all verdicts, so their rule is cited in any case.
        id == rules::KEY.id || self.advice().any(|advice| advice.rules.contains(&id))
    }
}

fn refused(inventory: &Inventory) -> Vec<Refused> {
    let mut refused = Vec::new();
    for host in &inventory.hosts {
        for drive in &host.drives {
            if let Some(why) = fitness::refusal(drive) {
                refused.push(Refused {
                    host: Some(host.name.clone()),
                    drive: drive.label.clone(),
                    why,
                });
            }
        }
    }
    for offer in &inventory.offers {
        let why = match offer.fitness() {
            fitness::Fitness::Fit => continue,
            fitness::Fitness::Unfit(why) => why,
            fitness::Fitness::Unknown(what) => {
                Advice::new(format!("it is not known {what}"), &[rules::POWER_LOSS])
            }
        };
        refused.push(Refused { host: None, drive: bill::offer_name(offer), why });
    }
    refused
}

/// What the inventory does not give, although the advice depends on it.
fn missing(inventory: &Inventory, key: &Key, bills: &[Bill], layouts: &[Layout]) -> Vec<String> {
    let Inventory { cluster, workload, hosts, .. } = inventory;
    let osds = hosts.iter().any(Host::has_osds);
    let guests = hosts.iter().any(Host::has_guests);
    let no_store = cluster.objectstore.is_none() && cluster.ceph.is_none();
    let told = [
        (
            !osds,
            "hosts with OSDs and their drives: without them there is nothing to say on places there",
        ),
        (!guests, "the hypervisors: without them there is no count of SSDs for hosts"),
        (
            osds && key.media.is_empty(),
            "what the OSDs' data is on: drives with use = \"osd\", or free disks",
        ),
        (key.block_bytes.is_none(), "workload.block-size: places win and lose by it"),
        (key.read_percent.is_none(), "workload.read-percent: without it no place comes first"),
        (
            key.queue_depth.is_none(),
            "workload.queue-depth: gains were published from +162 % at 6 to +30 % at 64",
        ),
        (
            guests && workload.working_set.is_none(),
            "workload.working-set: without it no cache has a size",
        ),
        (
            workload.written_per_day.is_none(),
            "workload.written-per-day: without it there is no endurance",
        ),
        (guests && workload.accept_loss.is_none(), "workload.accept-loss: taken as nothing"),
        (
            osds && cluster.replicas.is_none(),
            "cluster.replicas: what a lost SSD means depends on it",
        ),
        (
            osds && cluster.ceph.is_none(),
            "cluster.ceph, the release: sizes of databases depend on it",
        ),
        (osds && no_store, "cluster.objectstore: taken as bluestore"),
        (osds && cluster.usage.is_none(), "cluster.use: taken as rbd, for which 1 to 2 % suffice"),
    ];
    let mut missing: Vec<String> =
        told.into_iter().filter(|(absent, _)| *absent).map(|(_, what)| what.to_string()).collect();
    for (host, layout) in hosts.iter().zip(layouts) {
        for ssd in &layout.unmeasured {
            missing.push(format!(
                "sync-write-mb-s of {ssd} of {}: `tidepool lab qualify` tells it, and more OSDs may have a place there",
                host.name
            ));
        }
        if host.role.is_none() {
            missing.push(format!("the role of {}: osd, hypervisor or both", host.name));
        }
        missing.extend(fitness::missing(host));
    }
    for bill in bills.iter().filter(|bill| bill.to_buy > 0 && bill.cost.is_none()) {
        missing.push(format!(
            "a price: an [[offer]] of a fit SSD of at least {}, of which {} are to be bought",
            decimal(bill.each_bytes_min),
            bill.to_buy
        ));
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An inventory from its text.
    pub(super) fn inventory(text: &str) -> Inventory {
        Inventory::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    /// Makes the plan for an inventory, and checks what has to hold for every plan.
    pub(super) fn plan_of(text: &str) -> Plan {
        let inventory = inventory(text);
        let plan = plan(&inventory, &[]);
        for advice in plan.advice() {
            for id in &advice.rules {
                assert!(plan.rules.iter().any(|rule| rule.id == *id), "{id} is no rule");
            }
        }
        let drives = inventory.hosts.iter().flat_map(|host| &host.drives);
        let touched = drives
            .filter(|drive| drive.state != State::Free)
            .filter_map(|drive| drive.path.as_ref());
        for path in touched {
            for command in
                plan.hosts.iter().flat_map(|host| &host.placed).flat_map(|placed| &placed.commands)
            {
                assert!(
                    !command.split(' ').any(|word| word == path),
                    "{path} is in use: {command}"
                );
            }
        }
        plan
    }

    /// A product with power-loss protection and a good grade.
    pub(super) fn product(kind: Kind, bytes: u64) -> Product {
        Product {
            kind: Some(kind),
            bytes,
            model: None,
            protected: Some(true),
            grade: Some(crate::qualify::Grade::Good),
            sync_write_iops: None,
            sync_write_bytes_per_s: None,
            endurance_bytes: None,
            price: None,
        }
    }

    /// A drive with power-loss protection and a good grade.
    pub(super) fn drive(kind: Kind, bytes: u64, path: &str, state: State) -> Drive {
        Drive {
            product: product(kind, bytes),
            path: Some(path.into()),
            label: path.into(),
            state,
            osds: 1,
        }
    }

    const DISKS: &str = "[[host.drive]]\nkind = \"hdd\"\nsize = \"8TB\"\npaths = [\"/dev/sdb\", \"/dev/sdc\"]\nuse = \"free\"\n";

    fn ssd(path: &str, more: &str) -> String {
        format!("[[host.drive]]\nkind = \"ssd\"\nsize = \"960GB\"\npaths = [\"{path}\"]\n{more}\n")
    }

    fn osd_host(cluster: &str, drives: &str) -> Plan {
        plan_of(&format!(
            "[cluster]\n{cluster}\n[[host]]\nname = \"a\"\nrole = \"osd\"\n{DISKS}{drives}"
        ))
    }

    const GOOD: &str = "use = \"free\"\npower-loss-protection = true\ngrade = \"good\"";

    #[test]
    fn the_largest_inventory_is_planned() {
        let drives = |kind: &str, count: u32, usage: &str| {
            format!(
                "[[host.drive]]\nkind = \"{kind}\"\nsize = \"4096TiB\"\ncount = {count}\nuse = \"{usage}\"\n\
                 power-loss-protection = true\ngrade = \"good\"\nsync-write-mb-s = 1000000000\ndwpd = 1000000000\n"
            )
        };
        let mut text =
            "[cluster]\nceph = \"14\"\nreplicas = 1000000000\n[workload]\nblock-size = \"4KiB\"\n\
                        read-percent = 0\nqueue-depth = 1\nworking-set = \"4096TiB\"\n\
                        written-per-day = \"4096TiB\"\naccept-loss = \"1s\"\n"
                .to_string();
        for host in 0..18 {
            text.push_str(&format!("[[host]]\nname = \"h{host}\"\nrole = \"both\"\n"));
            text.push_str(&(drives("hdd", 240, "osd") + &drives("ssd", 16, "free")));
        }
        text.push_str("[[offer]]\nkind = \"nvme\"\nsize = \"4096TiB\"\nprice = 1000000000\n");
        let plan = plan_of(&text);
        let written = plan.bills.iter().filter_map(|bill| bill.written_per_day_bytes);
        assert!(
            written.clone().all(|bytes| bytes > 0.0) && written.count() > 0,
            "{:#?}",
            plan.bills
        );
    }

    #[test]
    fn what_is_unfit_unknown_or_in_use_gets_no_place_and_stands_in_no_command() {
        for (more, rule) in [
            ("use = \"free\"\npower-loss-protection = false\ngrade = \"good\"", "power-loss"),
            ("use = \"free\"\npower-loss-protection = true\ngrade = \"reject\"", "grade"),
            ("use = \"free\"\npower-loss-protection = true\nsync-write-iops = 490", "grade"),
            ("use = \"free\"\ngrade = \"good\"", "power-loss"),
            ("use = \"other\"\npower-loss-protection = true\ngrade = \"good\"", "not-touched"),
            ("power-loss-protection = true\ngrade = \"good\"", "not-touched"),
        ] {
            let plan = osd_host("", &ssd("/dev/sda", more));
            assert_eq!(plan.hosts[0].placed, [], "{more}");
            assert_eq!(plan.refused[0].why.rules[0], rule, "{more}");
            assert_eq!(plan.bills[0].to_buy, 1, "{more}");
        }
    }

    #[test]
    fn the_failure_domain_of_an_ssd_is_told_with_what_has_to_be_recovered() {
        let plan = osd_host("replicas = 3", &ssd("/dev/sda", GOOD));
        let placed = &plan.hosts[0].placed[0];
        assert_eq!(
            (placed.placement, placed.recover_bytes),
            (Placement::DbWal, 16_000_000_000_000)
        );
        let text = |part: &str| placed.advice.iter().any(|advice| advice.text.contains(part));
        assert!(text("takes 2 OSDs with it: 2 x 8 TB to be recovered"), "{placed:?}");
        assert!(text("all OSDs of the host") && text("no further host"), "{placed:?}");
        let two = osd_host("replicas = 3", &(ssd("/dev/sda", GOOD) + &ssd("/dev/sdd", GOOD)));
        assert_eq!(two.hosts[0].placed.len(), 2);
        assert!(
            two.hosts[0].placed.iter().all(|placed| placed.osds.len() == 1),
            "each OSD has its own"
        );
    }

    #[test]
    fn databases_have_their_share_of_the_osd_and_steps_in_old_releases() {
        let part = |cluster: &str, ssd: &str| {
            let plan = osd_host(cluster, ssd);
            (plan.hosts[0].placed[0].osds[0].part_bytes >> 30, plan.cites("db-steps"))
        };
        let large = ssd("/dev/sda", GOOD);
        assert_eq!(part("ceph = \"16.2.15\"", &large), (150, false), "2 % of 8 TB");
        assert_eq!(part("ceph = \"16.2.15\"\nuse = \"rgw\"", &large), (299, false), "4 % of 8 TB");
        assert_eq!(part("ceph = \"14.2.11\"", &large), (60, true));
        assert_eq!(part("ceph = \"14.2.22\"", &large), (150, false));
        let small = large.replace("960GB", "100GB");
        assert_eq!(part("ceph = \"16.2.15\"", &small), (46, false), "what there is");
        assert!(osd_host("", &small).advice().any(|advice| advice.text.contains("below 1 %")));
        let tiny = osd_host("", &large.replace("960GB", "6GB"));
        assert!(tiny.hosts[0].placed[0].wal_only && tiny.cites("wal"));
        assert!(tiny.hosts[0].placed[0].commands[0].contains("--wal-devices"), "{tiny:?}");
        let none = osd_host("", &large.replace("960GB", "2GB"));
        assert_eq!(
            (none.hosts[0].placed.len(), none.bills[0].to_buy),
            (0, 1),
            "not even a log fits"
        );
    }

    #[test]
    fn an_ssd_carries_as_many_osds_as_its_kind_and_grade_allow_and_the_rest_is_told() {
        let disks = DISKS.replace("paths = [\"/dev/sdb\", \"/dev/sdc\"]", "count = 12");
        let text = |grade: &str| {
            let ssd = ssd("/dev/sda", GOOD).replace("good", grade);
            plan_of(&format!("[[host]]\nname = \"a\"\nrole = \"osd\"\n{disks}{ssd}"))
        };
        let (good, poor) = (text("good"), text("poor"));
        assert_eq!(good.hosts[0].placed[0].osds.len(), 5);
        assert_eq!(poor.hosts[0].placed[0].osds.len(), 1);
        assert!(good.hosts[0].advice[0].text.contains("7 of 12 OSDs have no SSD"), "{good:?}");
        assert_eq!(good.bills[0].to_buy, 2);
    }

    #[test]
    fn on_a_host_that_does_both_the_first_place_is_served_first() {
        let host = |workload: &str| {
            let text = format!(
                "[workload]\nblock-size = \"4KiB\"\nworking-set = \"500GB\"\n{workload}\n[[host]]\nname = \"a\"\nrole = \"both\"\n{DISKS}{}",
                ssd("/dev/sda", GOOD)
            );
            plan_of(&text).hosts[0].placed[0].placement
        };
        assert_eq!(host("read-percent = 80"), Placement::Host);
        assert_eq!(host("read-percent = 10"), Placement::DbWal);
    }

    #[test]
    fn a_hypervisor_is_told_what_it_loses_what_fits_and_how_long_it_lasts() {
        let text = format!(
            "[workload]\nread-percent = 50\nworking-set = \"1.92TB\"\nwritten-per-day = \"960GB\"\naccept-loss = \"5s\"\n\
             [[host]]\nname = \"hv\"\nrole = \"hypervisor\"\n{}",
            ssd("/dev/sda", &format!("{GOOD}\ndwpd = 1"))
        );
        let plan = plan_of(&text);
        let placed = &plan.hosts[0].placed[0];
        assert_eq!(placed.years.map(f64::round), Some(5.0));
        let text = |part: &str| placed.advice.iter().any(|advice| advice.text.contains(part));
        assert!(
            text("50 % of the working set") && text("up to 5s of writes are lost"),
            "{placed:?}"
        );
        assert!(text("a second copy on another hypervisor's SSD"), "{placed:?}");
        assert_eq!(
            placed.commands,
            [
                "tidepool cache format /dev/sda",
                "tidepool serve --cache /dev/sda --volume NAME=rbd:POOL/IMAGE --accept-loss 5s"
            ]
        );
    }

    #[test]
    fn the_endurance_under_osds_counts_copies_and_hosts() {
        let text = |block: &str| {
            plan_of(&format!(
                "[cluster]\nreplicas = 2\n[workload]\nblock-size = \"{block}\"\nread-percent = 0\nwritten-per-day = \"1TB\"\n\
                 [[host]]\nname = \"hv\"\nrole = \"hypervisor\"\n[[host]]\nname = \"a\"\nrole = \"osd\"\n{DISKS}{}",
                ssd("/dev/sda", &format!("{GOOD}\ntbw = 1460"))
            ))
        };
        let placed = &text("4KiB").hosts[1].placed[0];
        assert_eq!(placed.written_per_day_bytes, Some(2e12));
        assert_eq!(placed.years, Some(2.0));
        let large = text("1MiB");
        assert!(large.hosts[1].placed[0].cache_bytes > 0, "the cache takes the large writes");
        assert_eq!(large.hosts[1].placed[0].years, Some(2.0));
    }

    #[test]
    fn what_is_not_told_is_missing() {
        let plan =
            plan_of("[[host]]\nname = \"a\"\n[[host.drive]]\nkind = \"ssd\"\nsize = \"1TB\"\n");
        for part in [
            "the role of a",
            "block-size",
            "read-percent",
            "hypervisors",
            "whether drive 1 of a is free",
        ] {
            assert!(
                plan.missing.iter().any(|missing| missing.contains(part)),
                "{part}: {:?}",
                plan.missing
            );
        }
        assert_eq!((plan.first, plan.bills.len()), (None, 0));
    }

    #[test]
    fn a_machine_of_which_only_lsblk_tells_gets_questions_and_no_commands() {
        let device = tidepool_cluster::device::real::Real {
            path: "/dev/nvme0n1".into(),
            bytes: 1 << 40,
            rotational: false,
            transport: Some("nvme".into()),
            model: None,
            no_drive: None,
            unfit: None,
            in_use: None,
        };
        let plan = plan(&Inventory::of_machine(&[device]), &[]);
        assert_eq!(plan.hosts[0].placed, []);
        assert!(
            plan.missing.iter().any(|missing| missing.contains("power failure")),
            "{:?}",
            plan.missing
        );
    }
}
