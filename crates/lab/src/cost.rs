//! What a placement costs: the number of SSDs that it stands on, the requests per second of each
//! SSD, and the cost in money at a given price.

use crate::placement::Arrangement;
use crate::results::Results;
use crate::testbed::Ssds;
use crate::words;

/// Number of SSDs that a placement stands on in these results. None if the placement was not
/// measured, or if its name is not known.
pub fn ssds(results: &Results, placement: &str) -> Option<u32> {
    let measured = results.runs.iter().any(|run| run.cell.placement == placement);
    let arrangement = measured.then(|| Arrangement::parse(placement).ok()).flatten()?;
    let ground = &results.suite.ground;
    Some(Ssds::of([&arrangement], ground.hypervisors).count(ground.servers))
}

/// Device class of a placement's SSDs.
pub fn class<'a>(results: &'a Results, placement: &'a str) -> &'a str {
    words::class(placement).unwrap_or(&results.suite.ground.ssd)
}

/// Price of one SSD, in any currency: `120`, or `CLASS=120` for one of several classes.
#[derive(Debug, Clone, PartialEq)]
pub struct Price {
    /// Device class; None for the suite's own SSD class.
    pub class: Option<String>,
    /// Price of one SSD, in any currency.
    pub amount: f64,
}

/// Reads a price from its text.
///
/// # Errors
/// One line that says what is wrong.
pub fn price(text: &str) -> Result<Price, String> {
    let (class, amount) = match text.split_once('=') {
        Some((class, amount)) => (Some(class.to_string()), amount),
        None => (None, text),
    };
    let good = |amount: &f64| amount.is_finite() && *amount > 0.0;
    let amount = amount.parse().ok().filter(good).ok_or_else(|| {
        format!("{amount} is no price: give a number above 0, such as 120 or ssd-sata-plp=120")
    })?;
    Ok(Price { class, amount })
}

/// Prices of the SSD classes in some results.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Prices(Vec<Price>);

impl Prices {
    /// Checks the given prices against the SSD classes of the results.
    ///
    /// # Errors
    /// One line that names a class that no placement has, or a class with two prices.
    pub fn new(results: &Results, given: &[Price]) -> Result<Prices, String> {
        let own = &results.suite.ground.ssd;
        let mut classes: Vec<&str> =
            results.suite.placements.iter().map(|name| class(results, name)).collect();
        classes.push(own);
        classes.sort_unstable();
        classes.dedup();
        let mut prices: Vec<Price> = Vec::new();
        for price in given {
            let class = price.class.as_ref().unwrap_or(own);
            if !classes.contains(&class.as_str()) {
                return Err(format!(
                    "no placement stands on an SSD {class}; there are {}",
                    words::list(&classes)
                ));
            }
            if prices.iter().any(|other| other.class.as_ref() == Some(class)) {
                return Err(format!("{class} has two prices"));
            }
            prices.push(Price { class: Some(class.clone()), amount: price.amount });
        }
        Ok(Prices(prices))
    }

    /// No price was given.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Price of one SSD of a class. None if no price was given for the class.
    pub fn of(&self, class: &str) -> Option<f64> {
        self.0.iter().find(|price| price.class.as_deref() == Some(class)).map(|price| price.amount)
    }
}

/// What a placement's SSDs give, and what they cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    /// Number of SSDs.
    pub ssds: u32,
    /// Requests per second of the whole cluster.
    pub iops: f64,
    /// Price of all SSDs, if it is known.
    pub money: Option<f64>,
}

impl Cost {
    /// Requests per second of each SSD. None without an SSD.
    pub fn iops_per_ssd(self) -> Option<f64> {
        (self.ssds > 0).then(|| self.iops / f64::from(self.ssds))
    }

    /// SSDs for each 1,000 requests per second. None without an SSD.
    pub fn ssds_per_1000_iops(self) -> Option<f64> {
        (self.ssds > 0).then(|| f64::from(self.ssds) * 1_000.0 / self.iops)
    }

    /// Price for each request per second. None without a price.
    pub fn money_per_iops(self) -> Option<f64> {
        self.money.map(|money| money / self.iops)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic;

    #[test]
    fn ssds_are_those_that_a_measured_placement_stands_on() {
        let results = synthetic::which_side();
        let of = |placement: &str| ssds(&results, placement);
        assert_eq!(of("bluestore-colocated"), Some(0));
        assert_eq!(of("filestore-journal"), Some(2));
        assert_eq!(of("host-tidepool"), Some(2));
        assert_eq!(of("host-tidepool-replicated"), Some(2));
        assert_eq!((of(synthetic::NOT_RUN), of("a")), (None, None));
        assert_eq!(class(&results, "filestore-journal@ssd-sata-consumer"), "ssd-sata-consumer");
        assert_eq!(class(&results, "host-tidepool"), "ssd-sata-plp");
    }

    #[test]
    fn a_placement_costs_its_ssds_and_money_only_at_a_price() {
        let cost = Cost { ssds: 2, iops: 4_000.0, money: None };
        assert_eq!((cost.iops_per_ssd(), cost.ssds_per_1000_iops()), (Some(2_000.0), Some(0.5)));
        assert_eq!(cost.money_per_iops(), None);
        assert_eq!(Cost { money: Some(200.0), ..cost }.money_per_iops(), Some(0.05));
        let none = Cost { ssds: 0, iops: 100.0, money: None };
        assert_eq!((none.iops_per_ssd(), none.ssds_per_1000_iops()), (None, None));
    }

    #[test]
    fn a_price_is_a_number_above_0_of_a_class_that_there_is() {
        for text in ["", "0", "-1", "nan", "inf", "x", "ssd-sata-plp=", "1=2=3"] {
            let error = price(text).expect_err(text);
            assert!(error.contains("no price"), "{error}");
        }
        let results = synthetic::which_side();
        let prices = |texts: &[&str]| {
            let given: Vec<Price> = texts.iter().map(|text| price(text).expect(text)).collect();
            Prices::new(&results, &given)
        };
        let both = prices(&["120", "ssd-sata-consumer=49.5"]).expect("two classes");
        assert_eq!(
            (both.of("ssd-sata-plp"), both.of("ssd-sata-consumer")),
            (Some(120.0), Some(49.5))
        );
        assert!(prices(&[]).expect("none").is_empty());
        let unknown = prices(&["nvme=3"]).expect_err("no such class");
        assert_eq!(
            unknown,
            "no placement stands on an SSD nvme; there are ssd-sata-consumer and ssd-sata-plp"
        );
        assert_eq!(
            prices(&["1", "ssd-sata-plp=2"]).expect_err("twice"),
            "ssd-sata-plp has two prices"
        );
    }
}
