//! Simulated campaigns on clusters that differ: how often the verdict names a winner although there
//! is none, and how often it names the right winner.

use super::rank::rank;
use crate::results::Results;
use crate::run::schedule::contenders;
use crate::stats::Finding;
use crate::stats::looks::{ALPHA, Looks};
use crate::suite::Suite;
use crate::synthetic::{self, Normal, SPREADS};

/// Number of campaigns in which no placement is ahead: enough to notice a rate that is far above
/// [`ALPHA`].
const CAMPAIGNS: u32 = 1_000;
/// Number of campaigns that shows a rate near [`ALPHA`] to be below it.
const CAMPAIGNS_MANY: u32 = 5_000;
/// Measurements of a placement on one of its clusters; together they count as one.
const ON_ONE_CLUSTER: usize = 3;
const NAMES: [&str; 5] = [
    "host-tidepool",
    "osd-tidepool",
    "bluestore-dbwal",
    "filestore-journal",
    "filestore-colocated",
];

/// Adds one more cluster for each of these placements at each factor. Each placement has its true
/// requests per second beside its name.
fn measure(results: &mut Results, normal: &mut Normal, wanted: &[(&str, f64)], repeat: u32) {
    let factors = [Some(None), results.suite.ground.second_slowed_by.map(Some)];
    for slowed_by in factors.into_iter().flatten() {
        for &(placement, truth) in wanted {
            let testbed = results.runs.last().map_or(0, |run| run.testbed) + 1;
            let cluster = normal.next(SPREADS.0);
            for _ in 0..ON_ONE_CLUSTER {
                let iops = truth * (cluster + normal.next(SPREADS.1)).exp();
                let mut run = synthetic::run(placement, "4k-80-20", 16, repeat, iops);
                (run.testbed, run.cell.slowed_by) = (testbed, slowed_by);
                results.runs.push(synthetic::bare(run));
            }
        }
    }
}

/// The end of a campaign: the winner, if the campaign names one, and the number of clusters of a
/// placement.
fn campaign(suite: &Suite, seed: u64, truths: &[(&str, f64)]) -> (Option<String>, u32) {
    let mut results = Results { suite: suite.clone(), ..synthetic::empty() };
    let mut normal = Normal::new(seed);
    for repeat in 1..=suite.repeats {
        measure(&mut results, &mut normal, truths, repeat);
    }
    let mut clusters = suite.repeats;
    loop {
        let open = contenders(&results, clusters + 1);
        if open.is_empty() {
            break;
        }
        clusters += 1;
        let wanted: Vec<(&str, f64)> =
            truths.iter().copied().filter(|(placement, _)| open.contains(*placement)).collect();
        measure(&mut results, &mut normal, &wanted, clusters);
    }
    assert!(clusters <= Looks::of(suite).last());
    let (rankings, _) = rank(&results);
    let lead = rankings[0].lead.as_ref().expect("two were measured");
    let winner = match lead.iops.finding {
        Finding::More => Some(rankings[0].places[0].placement.clone()),
        Finding::Less => Some(lead.against.clone()),
        _ => None,
    };
    (winner, clusters)
}

/// The quick and the exact form at one factor: there is no second factor to notice a mistake.
fn at_one_factor() -> [(&'static str, Suite); 2] {
    at_two_factors().map(|(form, mut suite)| {
        suite.ground.second_slowed_by = None;
        (form, suite)
    })
}

/// The quick and the exact form as they are measured.
fn at_two_factors() -> [(&'static str, Suite); 2] {
    let suite = Suite::find("which-side").expect("built in");
    [("quick", suite.clone().quick()), ("exact", suite)]
}

/// How a number of campaigns ended.
struct Ends {
    count: u32,
    /// Campaigns that named the right winner.
    right: u32,
    /// Campaigns that named another winner.
    wrong: u32,
    /// Clusters of the placement that has most, on average.
    clusters: f64,
}

fn campaigns(count: u32, suite: &Suite, truths: &[(&str, f64)], winner: Option<&str>) -> Ends {
    let (mut right, mut wrong, mut clusters) = (0, 0, 0);
    for seed in 0..count {
        let (named, made) = campaign(suite, u64::from(seed) * 7_919 + 1, truths);
        clusters += made;
        right += u32::from(named.is_some() && named.as_deref() == winner);
        wrong += u32::from(named.is_some() && named.as_deref() != winner);
    }
    Ends { count, right, wrong, clusters: f64::from(clusters) / f64::from(count) }
}

impl Ends {
    /// Limits of the true rate of wrong ends, each with 95 % certainty (Wilson, JASA 22, 1927, one
    /// side).
    fn wrong_rate(&self) -> (f64, f64) {
        let (count, z) = (f64::from(self.count), 1.645f64);
        let rate = f64::from(self.wrong) / count;
        let spread = (rate * (1.0 - rate) / count + z * z / (4.0 * count * count)).sqrt();
        let limit = |z: f64| (rate + z * z / (2.0 * count) + z * spread) / (1.0 + z * z / count);
        (limit(-z), limit(z))
    }
}

/// How campaigns end in which so many placements are equally fast. Tells it on standard output.
fn of_equals(count: u32, form: &str, suite: &Suite, placements: usize) -> Ends {
    let truths: Vec<(&str, f64)> = NAMES[..placements].iter().map(|name| (*name, 100.0)).collect();
    let factors = 1 + u32::from(suite.ground.second_slowed_by.is_some());
    let ends = campaigns(count, suite, &truths, None);
    println!(
        "{form}, factors {factors}, {placements} equal: {} false winners of {count}, in truth at most {:.1} %; {:.2} clusters",
        ends.wrong,
        ends.wrong_rate().1 * 100.0,
        ends.clusters
    );
    ends
}

#[test]
fn nothing_shows_that_more_than_one_campaign_of_twenty_names_a_winner_that_is_none() {
    // Two placements are the worst case: of more equal placements, the first two are nearer to each
    // other.
    for (form, suite) in at_one_factor() {
        let ends = of_equals(CAMPAIGNS, form, &suite, 2);
        assert!(ends.wrong_rate().0 <= ALPHA, "{form}: {} of {CAMPAIGNS}", ends.wrong);
    }
}

#[test]
#[ignore = "it simulates 16,000 campaigns, for minutes: make long"]
fn at_most_one_campaign_of_twenty_names_a_winner_that_is_none() {
    for (form, suite) in at_one_factor() {
        let ends = of_equals(CAMPAIGNS_MANY, form, &suite, 2);
        assert!(ends.wrong_rate().1 <= ALPHA, "{form}: {} of {CAMPAIGNS_MANY}", ends.wrong);
    }
    // More placements and a second factor name fewer.
    let (one, two) = (at_one_factor(), at_two_factors());
    for (forms, placements) in [(&one, NAMES.len()), (&two, 2), (&two, NAMES.len())] {
        for (form, suite) in forms {
            let ends = of_equals(CAMPAIGNS, form, suite, placements);
            assert!(ends.wrong_rate().1 <= ALPHA, "{form}: {} of {CAMPAIGNS}", ends.wrong);
        }
    }
}

#[test]
fn a_winner_that_is_one_is_found_the_more_often_the_further_it_is_ahead() {
    let count = 100;
    for (form, suite) in at_two_factors() {
        let mut before = 0;
        for (times, least) in [(1.5, 5), (2.0, 70), (3.0, 95)] {
            let truths = [
                ("host-tidepool", 100.0 * times),
                ("osd-tidepool", 100.0),
                ("bluestore-dbwal", 60.0),
            ];
            let ends = campaigns(count, &suite, &truths, Some("host-tidepool"));
            println!(
                "{form}, {times} × ahead: found in {} of {count}, another in {}; {:.2} clusters",
                ends.right, ends.wrong, ends.clusters
            );
            assert!(ends.right >= least.max(before), "{form} {times}: {}", ends.right);
            assert_eq!(ends.wrong, 0, "{form} {times}");
            before = ends.right;
        }
    }
}
