//! How many clusters would tell what those that were measured do not.

use super::student::quantile;
use super::{EQUIVALENCE, moments};

/// Most clusters of each placement that an outlook speaks of.
pub const CLUSTERS_MAX: u32 = 30;

/// A ratio with the spread of what it is made of, from which the interval with more clusters
/// follows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outlook {
    /// Logarithm of the ratio.
    log: f64,
    /// Variance of the logarithms: of each pair's difference, or of each side.
    spread: Spread,
    /// Clusters of each placement so far.
    clusters: u32,
    /// Level at which the interval is read.
    alpha: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Spread {
    Pairs(f64),
    Sides([f64; 2]),
}

impl Outlook {
    /// The outlook of pairs with these differences of logarithms.
    pub fn of_pairs(differences: &[f64], alpha: f64) -> Outlook {
        let (log, variance) = moments(differences);
        let clusters = differences.len() as u32;
        Outlook { log, spread: Spread::Pairs(variance), clusters, alpha }
    }

    /// The outlook of two sides without pairs, given as logarithms.
    pub fn of_sides(first: &[f64], second: &[f64], alpha: f64) -> Outlook {
        let [(mean, variance), (other_mean, other_variance)] = [moments(first), moments(second)];
        let clusters = first.len().min(second.len()) as u32;
        let spread = Spread::Sides([variance, other_variance]);
        Outlook { log: mean - other_mean, spread, clusters, alpha }
    }

    /// The interval with so many clusters, if ratio and spread stay what they are.
    fn interval(&self, clusters: u32) -> (f64, f64) {
        let count = f64::from(clusters);
        let (variance, degrees) = match self.spread {
            Spread::Pairs(variance) => (variance, count - 1.0),
            Spread::Sides([a, b]) => {
                (a + b, (count - 1.0) * (a + b).powi(2) / (a.powi(2) + b.powi(2)))
            }
        };
        let half = if variance > 0.0 {
            quantile(self.alpha, degrees) * (variance / count).sqrt()
        } else {
            0.0
        };
        ((self.log - half).exp(), (self.log + half).exp())
    }

    /// The least number of clusters whose interval tells.
    fn clusters(&self, tells: &dyn Fn((f64, f64)) -> bool) -> Option<u32> {
        (self.clusters..=CLUSTERS_MAX).find(|clusters| tells(self.interval(*clusters)))
    }
}

/// An interval that shows more, less or the same.
pub fn shows((low, high): (f64, f64)) -> bool {
    low > 1.0 || high < 1.0 || is_same((low, high))
}

/// An interval that shows the same, or that two are not the same.
pub fn shows_whether_same(interval: (f64, f64)) -> bool {
    is_same(interval) || is_apart(interval)
}

/// The whole interval lies within the band that counts as the same.
pub fn is_same((low, high): (f64, f64)) -> bool {
    low >= 1.0 / (1.0 + EQUIVALENCE) && high <= 1.0 + EQUIVALENCE
}

/// The whole interval lies outside of the band that counts as the same.
pub fn is_apart((low, high): (f64, f64)) -> bool {
    low > 1.0 + EQUIVALENCE || high < 1.0 / (1.0 + EQUIVALENCE)
}

/// How many clusters would tell, in words. None where there is no outlook, and where the clusters
/// that were measured are enough, so that something else keeps the answer open.
pub fn sentence(outlooks: &[Outlook], tells: &dyn Fn((f64, f64)) -> bool) -> Option<String> {
    let measured = outlooks.iter().map(|outlook| outlook.clusters).max()?;
    let needed: Option<Vec<u32>> = outlooks.iter().map(|outlook| outlook.clusters(tells)).collect();
    match needed.and_then(|needed| needed.into_iter().max()) {
        None => Some(format!("more than {CLUSTERS_MAX} clusters of each would tell")),
        Some(needed) if needed > measured => {
            Some(format!("with this spread {needed} clusters of each would tell"))
        }
        Some(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::{of_logs, welch};
    use super::*;

    /// Logarithms of so many clusters with this mean and this standard deviation.
    fn logs(clusters: u32, mean: f64, deviation: f64) -> Vec<f64> {
        let signs = (0..clusters).map(|at| if at % 2 == 0 { 1.0 } else { -1.0 });
        let raw: Vec<f64> = signs.collect();
        let (middle, variance) = moments(&raw);
        raw.iter().map(|of| mean + (of - middle) / variance.sqrt() * deviation).collect()
    }

    #[test]
    fn that_many_clusters_tell_and_one_less_does_not() {
        type Tells = fn((f64, f64)) -> bool;
        for (mean, deviation, tells) in [
            (0.02, 0.12, shows as Tells),
            (0.02, 0.12, shows_whether_same),
            (0.3, 0.3, shows),
            (0.3, 0.2, shows_whether_same),
            (-0.4, 0.4, shows),
        ] {
            for pairs in [true, false] {
                let found = |clusters: u32| {
                    let [one, two] =
                        [logs(clusters, mean, deviation), logs(clusters, 0.0, deviation)];
                    if pairs {
                        (Outlook::of_pairs(&one, 0.05), of_logs(&one, 0.05))
                    } else {
                        (Outlook::of_sides(&one, &two, 0.05), welch(&one, &two, 0.05))
                    }
                };
                let at = |clusters| found(clusters).1.and_then(|of| of.interval).expect("several");
                let needed = found(3).0.clusters(&tells).expect("not so many");
                assert!(needed > 3, "{mean} {deviation} {pairs}");
                assert!(tells(at(needed)) && !tells(at(needed - 1)), "{mean} {deviation} {pairs}");
            }
        }
    }

    #[test]
    fn what_no_number_of_clusters_would_tell_is_told_as_such() {
        let edge = Outlook::of_pairs(&logs(3, EQUIVALENCE.ln_1p(), 0.1), 0.05);
        let said = sentence(&[edge], &shows_whether_same).expect("open");
        assert_eq!(said, "more than 30 clusters of each would tell");
        assert!(sentence(&[], &shows).is_none());
        let told = Outlook::of_pairs(&logs(3, 2.0, 0.1), 0.05);
        assert_eq!(sentence(&[told], &shows), None, "something else keeps it open");
        let open = Outlook::of_pairs(&logs(3, 0.0, 0.12), 0.05);
        let said = sentence(&[told, open], &shows).expect("the second factor is open");
        assert_eq!(said, "with this spread 6 clusters of each would tell");
    }
}
