//! Student's distribution, for any level and any degrees of freedom.

/// Most steps of the continued fraction. It converges within 40 steps for 1 to 100 degrees of
/// freedom; the number of steps grows with the degrees.
const STEPS_MAX: usize = 300;
/// Halvings of the interval that contains a quantile; they leave 1e-12 of its width.
const HALVINGS: usize = 40;
/// Where the search for a quantile ends. No quantile of a level above 1e-9 is larger, even with one
/// degree of freedom.
const QUANTILE_MAX: f64 = 1e9;

/// The value that |t| exceeds with probability `alpha`, which is from 0 to 1 exclusive. Degrees of
/// freedom below 1 and NaN count as 1.
pub fn quantile(alpha: f64, degrees: f64) -> f64 {
    let degrees = degrees.max(1.0);
    let (mut low, mut high) = (0.0, 2.0);
    while exceeded(high, degrees) > alpha && high < QUANTILE_MAX {
        (low, high) = (high, 2.0 * high);
    }
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        if exceeded(middle, degrees) > alpha { low = middle } else { high = middle }
    }
    high
}

/// The probability that |t| exceeds `t`.
fn exceeded(t: f64, degrees: f64) -> f64 {
    incomplete_beta(degrees / (degrees + t * t), degrees / 2.0, 0.5)
}

/// The regularised incomplete beta function, by Lentz's continued fraction (Press and others,
/// Numerical Recipes, 3rd edition, 2007, section 6.4).
fn incomplete_beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    let log_front = ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b) + a * x.ln() + b * (1.0 - x).ln();
    // The fraction converges on one side only; the value on the other side is its complement.
    if x < (a + 1.0) / (a + b + 2.0) {
        log_front.exp() * fraction(x, a, b) / a
    } else {
        1.0 - log_front.exp() * fraction(1.0 - x, b, a) / b
    }
}

fn fraction(x: f64, a: f64, b: f64) -> f64 {
    let apart_from_zero = |value: f64| if value.abs() < 1e-300 { 1e-300 } else { value };
    let mut c = 1.0;
    let mut d = 1.0 / apart_from_zero(1.0 - (a + b) * x / (a + 1.0));
    let mut value = d;
    for step in 1..=STEPS_MAX {
        let m = step as f64;
        let even = m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m));
        let odd = -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0));
        let before = value;
        for coefficient in [even, odd] {
            d = 1.0 / apart_from_zero(1.0 + coefficient * d);
            c = apart_from_zero(1.0 + coefficient / c);
            value *= c * d;
        }
        if (value / before - 1.0).abs() < 1e-15 {
            break;
        }
    }
    value
}

/// The logarithm of the gamma function above 0: Stirling's series (Abramowitz and Stegun, Handbook
/// of Mathematical Functions, 1964, 6.1.41), after a shift of the argument to where the series is
/// exact.
fn ln_gamma(x: f64) -> f64 {
    let (mut x, mut shift) = (x, 0.0);
    while x < 15.0 {
        shift += x.ln();
        x += 1.0;
    }
    let inverse = 1.0 / (x * x);
    let series =
        (1.0 / 12.0 - inverse * (1.0 / 360.0 - inverse * (1.0 / 1260.0 - inverse / 1680.0))) / x;
    (x - 0.5) * x.ln() - x + 0.5 * (2.0 * std::f64::consts::PI).ln() + series - shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (alpha, degrees, wanted) in [
            (0.05, 1.0, 12.706),
            (0.05, 2.0, 4.303),
            (0.05, 4.0, 2.776),
            (0.05, 30.0, 2.042),
            (0.05, 120.0, 1.980),
            (0.05, 1e9, 1.960),
            (0.01, 8.0, 3.355),
            (0.001, 4.0, 8.610),
            (0.5, 3.0, 0.765),
            (0.05, 0.2, 12.706),
            (0.05, f64::NAN, 12.706),
        ] {
            let found = quantile(alpha, degrees);
            assert!((found - wanted).abs() < 6e-4, "{alpha} {degrees}: {found}");
        }
        assert!(
            quantile(0.05, 2.5) < quantile(0.05, 2.0) && quantile(0.05, 2.5) > quantile(0.05, 3.0)
        );
    }
}
