//! How many SSDs each place takes, how many of them the hosts have, and what the missing SSDs cost.

use serde::Serialize;

use super::fitness::Fitness;
use super::inventory::{Inventory, Kind, Product};
use super::layout::{
    Layout, Placed, Side, Wanted, lay_out_on, part_name, writes_through, written_on_host,
    written_per_osd_byte, years,
};
use super::quantity::decimal;
use super::rules::{
    Advice, DB_HDD, ENDURANCE, FAILURE_DOMAIN, HOST_FIRST, HOST_SIZE, JOURNAL, OSDS_PER_SSD,
};
use super::verdict::{HostCopies, Placement, host_copies};

/// OSDs on one bought SSD, if no offer was chosen.
const OSDS_PER_SSD_DEFAULT: usize = 5;
/// Years that a bought SSD has to last.
const YEARS_MIN: f64 = 5.0;

/// The SSDs that a place takes, and what they cost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bill {
    /// The place.
    pub placement: Placement,
    /// Number of SSDs that the place takes in all.
    pub needed: usize,
    /// Number of fit SSDs that the hosts already have and that the plan puts in this place.
    pub in_hand: usize,
    /// Cost of the SSDs in `in_hand`, in the cluster's currency, if each of these SSDs has a price.
    pub in_hand_cost: Option<f64>,
    /// Number of SSDs to buy.
    pub to_buy: usize,
    /// Least size of an SSD to buy, in bytes.
    pub each_bytes_min: u64,
    /// The cheapest of the offers that are fit, large enough and last long enough. None without
    /// such an offer, or if no SSD is to be bought.
    pub offer: Option<String>,
    /// Cost of `to_buy` SSDs of the offer, in the cluster's currency.
    pub cost: Option<f64>,
    /// Bytes that guests' writes bring to the busiest of the SSDs in a day, if this is known.
    pub written_per_day_bytes: Option<f64>,
    /// Years until the first of the SSDs wears out at this rate, as far as endurances are known.
    pub years: Option<f64>,
    /// What is lost with one of the SSDs.
    pub failure_domain: String,
    /// The sources of the numbers.
    pub advice: Vec<Advice>,
}

/// The bill of each side if the SSDs stand on that side alone: in the hypervisors, or in the
/// servers with OSDs.
pub(super) fn bills(wanted: &Wanted<'_>) -> Vec<Bill> {
    let inventory = wanted.inventory;
    let layouts = |side| -> Vec<Layout> {
        inventory.hosts.iter().map(|host| lay_out_on(wanted, host, &[side])).collect()
    };
    let host =
        wanted.host().then(|| host(inventory, &layouts(Side::Host))).filter(|bill| bill.needed > 0);
    host.into_iter().chain(osds(inventory, &layouts(Side::Osds))).collect()
}

/// The fit offers, with their prices.
fn fit(inventory: &Inventory) -> impl Iterator<Item = (&Product, f64)> {
    let fit = inventory.offers.iter().filter(|offer| offer.fitness() == Fitness::Fit);
    fit.filter_map(|offer| offer.price.map(|price| (offer, price)))
}

/// Name of an offer.
pub(super) fn offer_name(offer: &Product) -> String {
    let model = offer.model.as_deref().or(offer.kind.map(Kind::name)).unwrap_or("SSD");
    format!("{model} {}", decimal(offer.bytes))
}

/// The offer lasts for [`YEARS_MIN`] years when so many bytes are written to it in a day, as far as
/// is known.
fn lasts(offer: &Product, written: Option<f64>) -> bool {
    match (offer.endurance_bytes, written) {
        (Some(endurance), Some(written)) => endurance >= written * 365.0 * YEARS_MIN,
        _ => true,
    }
}

/// Advice on how long a chosen offer lasts.
fn lasting(chosen: bool, written: Option<f64>) -> Option<Advice> {
    let text =
        "the offer lasts five years at what the guests write, as far as its endurance is told";
    written.filter(|_| chosen).map(|_| Advice::new(text, &[ENDURANCE]))
}

/// Bytes that are written to the busiest SSD in a day, and the years of the SSD that wears out
/// first. Both are over the SSDs that have a place and the SSDs to buy. `bought` holds the offer,
/// if one was chosen, and the bytes that are written to one bought SSD in a day.
fn wear(
    placed: &[(usize, &Placed)],
    bought: Option<(Option<&Product>, f64)>,
) -> (Option<f64>, Option<f64>) {
    let there = placed.iter().filter_map(|(_, placed)| placed.written_per_day_bytes);
    let written = there.chain(bought.map(|(_, written)| written)).reduce(f64::max);
    let offer = bought.and_then(|(offer, written)| years(offer?.endurance_bytes?, written));
    let lasting = placed.iter().filter_map(|(_, placed)| placed.years).chain(offer);
    (written, lasting.reduce(f64::min))
}

fn price_of(inventory: &Inventory, placed: &[(usize, &Placed)]) -> Option<f64> {
    let price = |(host, placed): &(usize, &Placed)| {
        let drive = inventory.hosts[*host].drives.iter().find(|drive| drive.label == placed.drive);
        drive.and_then(|drive| drive.product.price)
    };
    placed.iter().map(price).sum()
}

fn placed_as(layouts: &[Layout], places: impl Fn(Placement) -> bool) -> Vec<(usize, &Placed)> {
    let all = layouts
        .iter()
        .enumerate()
        .flat_map(|(host, layout)| layout.placed.iter().map(move |placed| (host, placed)));
    all.filter(|(_, placed)| places(placed.placement)).collect()
}

fn host(inventory: &Inventory, layouts: &[Layout]) -> Bill {
    let placed = placed_as(layouts, |placement| placement == Placement::Host);
    let to_buy = layouts.iter().filter(|layout| layout.host_without).count();
    let set = inventory.workload.working_set.map_or(0, |set| set.get());
    let written = written_on_host(inventory);
    let offers = fit(inventory).filter(|(offer, _)| offer.bytes >= set && lasts(offer, written));
    let cheapest = offers.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|_| to_buy > 0 && set > 0);
    let needed = placed.len() + to_buy;
    let text = format!("one SSD for each of {needed} hypervisors");
    let mut advice = vec![Advice::new(text, &[HOST_FIRST, HOST_SIZE])];
    advice.extend(lasting(cheapest.is_some(), written));
    let bought =
        written.filter(|_| to_buy > 0).map(|written| (cheapest.map(|(offer, _)| offer), written));
    let (written_per_day_bytes, years) = wear(&placed, bought);
    let failure_domain = match host_copies(inventory) {
        HostCopies::Two => "no data: another hypervisor has a copy".into(),
        HostCopies::One(loss) => format!("up to {loss} of a hypervisor's writes"),
        HostCopies::None => "no data: the cluster has all".into(),
    };
    Bill {
        placement: Placement::Host,
        needed,
        in_hand: placed.len(),
        in_hand_cost: price_of(inventory, &placed),
        to_buy,
        each_bytes_min: set,
        offer: cheapest.map(|(offer, _)| offer_name(offer)),
        cost: cheapest.map(|(_, price)| price * to_buy as f64),
        written_per_day_bytes,
        years,
        failure_domain,
        advice,
    }
}

fn osds(inventory: &Inventory, layouts: &[Layout]) -> Option<Bill> {
    let placement = layouts.iter().find_map(|layout| layout.osds_place)?;
    let placed = placed_as(layouts, |placed| placed == placement);
    let caches = layouts.iter().any(|layout| layout.osds_cache);
    let wanting: usize = layouts.iter().map(|layout| layout.osds_wanting).sum();
    let part_bytes = layouts.iter().map(|layout| layout.part_bytes).max().unwrap_or(0).max(1);
    let count = |osds_per_ssd: usize| -> usize {
        layouts.iter().map(|layout| layout.osds_without.div_ceil(osds_per_ssd)).sum()
    };
    let most_without = layouts.iter().map(|layout| layout.osds_without).max().unwrap_or(0);
    let carries = |offer: &Product| {
        let by_size = usize::try_from(offer.bytes / part_bytes).unwrap_or(usize::MAX);
        offer.osds_max().min(by_size)
    };
    let media = layouts.iter().filter_map(|layout| layout.osds_media).max();
    let osd_bytes = layouts.iter().map(|layout| layout.osd_bytes).max().unwrap_or(0) as f64;
    let through = caches || writes_through(inventory, placement);
    let written = written_per_osd_byte(inventory).filter(|_| through);
    let written = |osds: usize| written.map(|written| written * osd_bytes * osds as f64);
    let fast = fit(inventory).filter(|(offer, _)| carries(offer) > 0 && offer.kind > media);
    let offers = fast.filter(|(offer, _)| lasts(offer, written(carries(offer).min(most_without))));
    let priced = offers.map(|(offer, price)| (offer, price * count(carries(offer)) as f64));
    let cheapest = priced.min_by(|a, b| a.1.total_cmp(&b.1)).filter(|_| count(1) > 0);
    let per_ssd = cheapest.map_or(OSDS_PER_SSD_DEFAULT, |(offer, _)| carries(offer));
    let to_buy = count(per_ssd);
    let most = most_without.min(per_ssd);
    let rule = if placement == Placement::Journal { JOURNAL } else { DB_HDD };
    let with = if caches { ", and a cache beside it" } else { "" };
    let mut text = format!("{wanting} OSDs want a {}{with}", part_name(placement));
    if to_buy > 0 {
        text.push_str(&format!(", those without an SSD up to {most} on each that is bought"));
    }
    let mut advice = vec![Advice::new(text, &[rule, OSDS_PER_SSD])];
    advice.extend(lasting(cheapest.is_some(), written(most)));
    if most > 1 {
        let text = format!(
            "one that is bought takes up to {most} OSDs with it; more SSDs, fewer OSDs on each"
        );
        advice.push(Advice::new(text, &[FAILURE_DOMAIN]));
    }
    let bought =
        written(most).filter(|_| to_buy > 0).map(|bytes| (cheapest.map(|(offer, _)| offer), bytes));
    let (written_per_day_bytes, years) = wear(&placed, bought);
    let largest = placed.iter().map(|(_, placed)| (placed.osds.len(), placed.recover_bytes));
    let bought = (to_buy > 0).then_some((most, most as u64 * osd_bytes as u64));
    let (count, recover) = largest.chain(bought).max().unwrap_or_default();
    let plural = if count == 1 { "OSD" } else { "OSDs" };
    Some(Bill {
        placement: if caches { Placement::OsdCache } else { placement },
        needed: placed.len() + to_buy,
        in_hand: placed.len(),
        in_hand_cost: price_of(inventory, &placed),
        to_buy,
        each_bytes_min: part_bytes * most as u64,
        offer: cheapest.map(|(offer, _)| offer_name(offer)),
        cost: cheapest.map(|(_, cost)| cost),
        written_per_day_bytes,
        years,
        failure_domain: format!("{count} {plural}: {} to be recovered", decimal(recover)),
        advice,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan_of;
    use super::*;

    const HOSTS: &str = "[[host]]\nname = \"hv1\"\nrole = \"hypervisor\"\n[[host]]\nname = \"hv2\"\nrole = \"hypervisor\"\n\
        [[host]]\nname = \"osd1\"\nrole = \"osd\"\n[[host.drive]]\nkind = \"hdd\"\nsize = \"4TB\"\ncount = 6\nuse = \"osd\"\n";
    const WORKLOAD: &str = "[workload]\nblock-size = \"4KiB\"\nread-percent = 80\nworking-set = \"300GB\"\nwritten-per-day = \"1TB\"\n";

    fn offer(kind: &str, size: &str, price: u32, more: &str) -> String {
        format!(
            "[[offer]]\nkind = \"{kind}\"\nsize = \"{size}\"\nprice = {price}\npower-loss-protection = true\n{more}\n"
        )
    }

    #[test]
    fn hypervisors_and_servers_with_osds_are_counted_each_by_its_rule() {
        let plan = plan_of(&format!("{WORKLOAD}{HOSTS}"));
        let counts: Vec<(Placement, usize, usize)> =
            plan.bills.iter().map(|bill| (bill.placement, bill.needed, bill.to_buy)).collect();
        assert_eq!(counts, [(Placement::Host, 2, 2), (Placement::DbWal, 2, 2)]);
        assert!(plan.bills.iter().all(|bill| bill.cost.is_none()));
        assert!(
            plan.missing.iter().any(|missing| missing.contains("[[offer]]")),
            "{:?}",
            plan.missing
        );
    }

    #[test]
    fn each_side_is_counted_as_if_it_had_the_ssds_to_itself() {
        let ssd = "[[host.drive]]\nkind = \"ssd\"\nsize = \"960GB\"\nuse = \"free\"\npower-loss-protection = true\ngrade = \"good\"\n";
        let host = |name: &str| {
            format!(
                "[[host]]\nname = \"{name}\"\nrole = \"both\"\n[[host.drive]]\nkind = \"hdd\"\nsize = \"4TB\"\ncount = 4\nuse = \"osd\"\n{ssd}"
            )
        };
        let plan =
            plan_of(&format!("[cluster]\nreplicas = 2\n{WORKLOAD}{}{}", host("a"), host("b")));
        let counts: Vec<(Placement, usize, usize, usize)> = plan
            .bills
            .iter()
            .map(|bill| (bill.placement, bill.needed, bill.in_hand, bill.to_buy))
            .collect();
        assert_eq!(counts, [(Placement::Host, 2, 2, 0), (Placement::DbWal, 2, 2, 0)]);
        let written: Vec<Option<f64>> =
            plan.bills.iter().map(|bill| bill.written_per_day_bytes).collect();
        assert_eq!(written, [Some(2e12), Some(2e12)], "two copies, on either side");
        assert_eq!(plan.bills[0].failure_domain, "no data: another hypervisor has a copy");
        assert_eq!(plan.bills[1].failure_domain, "4 OSDs: 16 TB to be recovered");
    }

    #[test]
    fn a_cache_under_the_osds_is_written_what_guests_write_in_blocks_of_any_size() {
        let workload = WORKLOAD.replace("4KiB", "256KiB");
        let plan = plan_of(&format!(
            "[cluster]\nreplicas = 3\n{workload}{HOSTS}{}",
            offer("nvme", "1.92TB", 300, "grade = \"good\"\ndwpd = 5")
        ));
        let [bill] = &plan.bills[..] else { panic!("{:?}", plan.bills) };
        assert_eq!(bill.placement, Placement::OsdCache);
        // Two hypervisors write 2 TB a day; with three copies the six OSDs get 6 TB.
        assert_eq!((bill.to_buy, bill.written_per_day_bytes), (1, Some(6e12)));
        assert_eq!(bill.years.map(|years| (years * 10.0).round()), Some(80.0));
    }

    #[test]
    fn the_cheapest_offer_that_is_large_fit_and_lasting_enough_is_taken() {
        let offers = [
            offer("ssd", "240GB", 50, "grade = \"good\""),
            offer("ssd", "480GB", 60, "grade = \"reject\""),
            offer("ssd", "480GB", 70, "grade = \"good\"\ndwpd = 0.3"),
            offer("ssd", "480GB", 100, "grade = \"good\"\ndwpd = 5"),
            offer("nvme", "960GB", 160, "grade = \"good\"\ndwpd = 3"),
        ];
        let plan =
            plan_of(&format!("[cluster]\nreplicas = 3\n{WORKLOAD}{HOSTS}{}", offers.concat()));
        let (host, osds) = (&plan.bills[0], &plan.bills[1]);
        assert_eq!((host.offer.as_deref(), host.cost), (Some("ssd 480 GB"), Some(200.0)));
        // Offers of 480 GB would carry two OSDs each, for less money, but would not last five
        // years.
        assert_eq!(
            (osds.offer.as_deref(), osds.to_buy, osds.cost),
            (Some("ssd 240 GB"), 3, Some(150.0))
        );
        assert!(
            plan.refused.iter().any(|refused| refused.drive.contains("480 GB")),
            "{:?}",
            plan.refused
        );
    }
}
