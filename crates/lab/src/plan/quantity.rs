//! Numbers in an inventory, as people write them.

use std::fmt;

use serde::de::{Error, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// Suffixes of a size with their bytes. Drives are sold by powers of ten; requests are powers of
/// two.
const SUFFIXES: [(&str, u64); 8] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
];
/// Largest size in bytes: far above any drive, and small enough that the sizes of one host's drives
/// can be added up.
const BYTES_MAX: u64 = 1 << 52;
/// Largest duration in milliseconds: one week.
const MILLIS_MAX: u64 = 7 * 24 * 3_600_000;
/// Names of Ceph's releases, with their first numbers.
const NAMES: [(&str, u32); 12] = [
    ("hammer", 9),
    ("jewel", 10),
    ("kraken", 11),
    ("luminous", 12),
    ("mimic", 13),
    ("nautilus", 14),
    ("octopus", 15),
    ("pacific", 16),
    ("quincy", 17),
    ("reef", 18),
    ("squid", 19),
    ("tentacle", 20),
];

/// A size in bytes, above zero, written `8TB`, `1.92TB`, `960GB` or `400GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(u64);

/// A time in milliseconds, written `500ms`, `5s` or `2m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Millis(u64);

/// A share in percent, from 0 to 100.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Percent(u64);

/// A count above zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Positive(u64);

/// A number that is not negative, such as a price or an endurance.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Amount(f64);

/// A release of Ceph, written `16.2.15`, `16` or `pacific`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release {
    /// The first number.
    pub major: u32,
    /// The third number, if it was given.
    pub patch: Option<u32>,
}

impl Bytes {
    /// The bytes.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl Millis {
    /// The milliseconds.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl Percent {
    /// The percent.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl Positive {
    /// The count.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl Amount {
    /// The number.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl Release {
    /// OSDs on SSDs that were made under this release allocate 16 KiB at a time.
    pub fn has_large_units(self) -> bool {
        self.major < 14 || (self.major == 14 && self.patch.is_some_and(|patch| patch < 8))
    }

    /// Databases of this release use sizes of 3, 30 and 300 GiB only. For releases 14 and 15
    /// without a third number the answer is true, although later patches of these releases use
    /// other sizes.
    pub fn has_steps(self) -> bool {
        match self.major {
            14 => self.patch.is_none_or(|patch| patch < 12),
            15 => self.patch.is_none_or(|patch| patch < 6),
            major => major < 14,
        }
    }
}

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_multiple_of(1_000) {
            write!(f, "{}s", self.0 / 1_000)
        } else {
            write!(f, "{}ms", self.0)
        }
    }
}

/// A size in words, in powers of ten, by which drives are known.
pub fn decimal(bytes: u64) -> String {
    for (suffix, unit) in [("TB", 1_000_000_000_000_u64), ("GB", 1_000_000_000), ("MB", 1_000_000)]
    {
        if bytes >= unit {
            let value = bytes as f64 / unit as f64;
            let text = if value < 100.0 { format!("{value:.2}") } else { format!("{value:.0}") };
            let text = if text.contains('.') {
                text.trim_end_matches('0').trim_end_matches('.')
            } else {
                &text
            };
            return format!("{text} {suffix}");
        }
    }
    format!("{bytes} bytes")
}

/// Years in words.
pub fn lasting(years: f64) -> String {
    if years >= 100.0 { "a century".into() } else { format!("{years:.1} years") }
}

/// A size in words, in powers of two, as for requests and partitions.
pub fn binary(bytes: u64) -> String {
    for (suffix, unit) in &SUFFIXES[..4] {
        if bytes >= *unit && bytes.is_multiple_of(*unit) {
            return format!("{} {suffix}", bytes / unit);
        }
    }
    format!("{bytes} bytes")
}

fn bytes_of(text: &str) -> Option<f64> {
    let text = text.trim();
    let (number, unit) = SUFFIXES
        .iter()
        .find_map(|(suffix, unit)| text.strip_suffix(suffix).map(|number| (number, *unit)))
        .unwrap_or((text, 1));
    let number = number.trim();
    let digits = number.chars().all(|c| c.is_ascii_digit() || c == '.');
    let value = number.parse::<f64>().ok().filter(|value| digits && value.is_finite())?;
    Some((value * unit as f64).round())
}

fn millis_of(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, unit) = [("ms", 1), ("s", 1_000), ("m", 60_000)]
        .into_iter()
        .find_map(|(suffix, unit)| text.strip_suffix(suffix).map(|number| (number, unit)))?;
    let number = number.trim();
    let digits = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
    let millis = number.parse::<u64>().ok().filter(|_| digits)?.checked_mul(unit)?;
    (millis <= MILLIS_MAX).then_some(millis)
}

fn release_of(text: &str) -> Option<Release> {
    let text = text.trim().to_lowercase();
    if let Some((_, major)) = NAMES.iter().find(|(name, _)| *name == text) {
        return Some(Release { major: *major, patch: None });
    }
    let parts: Option<Vec<u32>> = text.split('.').map(|part| part.parse().ok()).collect();
    let parts = parts.filter(|parts| parts.len() <= 3 && (1..100).contains(&parts[0]))?;
    // The second number has no effect: it is 2 in a stable release, and less in one of development.
    let patch = parts.get(2).copied();
    Some(Release { major: parts[0], patch })
}

/// Makes a value from a text or a number in the file, or says why not.
trait FromToml: Sized {
    /// What a correct value looks like.
    const EXPECTED: &'static str;

    fn text(_: &str) -> Result<Self, String> {
        Err(String::new())
    }

    fn number(_: f64) -> Result<Self, String> {
        Err(String::new())
    }
}

impl FromToml for Bytes {
    const EXPECTED: &'static str = "a size such as \"1.92TB\" or \"400GiB\", or a number of bytes";

    fn text(text: &str) -> Result<Bytes, String> {
        let bytes = bytes_of(text)
            .ok_or_else(|| format!("{text:?} is not a size: write it as 8TB or 400GiB"))?;
        Bytes::number(bytes)
    }

    fn number(bytes: f64) -> Result<Bytes, String> {
        match bytes {
            bytes if bytes < 0.0 => Err("a size is not negative".into()),
            0.0 => Err("a size is not zero".into()),
            bytes if bytes > BYTES_MAX as f64 => Err("the size is larger than 4096TiB".into()),
            bytes if bytes.fract() == 0.0 => Ok(Bytes(bytes as u64)),
            _ => Err(String::new()),
        }
    }
}

impl FromToml for Millis {
    const EXPECTED: &'static str = "a duration such as \"5s\" or \"500ms\"";

    fn text(text: &str) -> Result<Millis, String> {
        millis_of(text).map(Millis).ok_or_else(|| {
            format!("{text:?} is not a duration: write a whole number with ms, s or m, as in 5s")
        })
    }
}

impl FromToml for Percent {
    const EXPECTED: &'static str = "a whole number from 0 to 100";

    fn number(number: f64) -> Result<Percent, String> {
        let valid = (0.0..=100.0).contains(&number) && number.fract() == 0.0;
        if valid { Ok(Percent(number as u64)) } else { Err(String::new()) }
    }
}

impl FromToml for Positive {
    const EXPECTED: &'static str = "a whole number above zero, up to a billion";

    fn number(number: f64) -> Result<Positive, String> {
        let valid = (1.0..=1e9).contains(&number) && number.fract() == 0.0;
        if valid { Ok(Positive(number as u64)) } else { Err(String::new()) }
    }
}

impl FromToml for Amount {
    const EXPECTED: &'static str = "a number from zero to a billion";

    fn number(number: f64) -> Result<Amount, String> {
        if (0.0..=1e9).contains(&number) {
            return Ok(Amount(number));
        }
        Err(format!("{number} is not a finite number from zero to a billion"))
    }
}

impl FromToml for Release {
    const EXPECTED: &'static str = "a release of Ceph such as \"16.2.15\" or \"pacific\"";

    fn text(text: &str) -> Result<Release, String> {
        release_of(text).ok_or_else(|| {
            format!("{text:?} is not a release of Ceph: write it as \"16.2.15\" or \"pacific\"")
        })
    }
}

struct FromTomlVisitor<T>(std::marker::PhantomData<T>);

impl<T: FromToml> FromTomlVisitor<T> {
    fn outcome<E: Error>(&self, outcome: Result<T, String>, found: Unexpected<'_>) -> Result<T, E> {
        outcome.map_err(
            |why| if why.is_empty() { E::invalid_value(found, self) } else { E::custom(why) },
        )
    }
}

impl<T: FromToml> Visitor<'_> for FromTomlVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        self.outcome(T::text(text), Unexpected::Str(text))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        self.outcome(T::number(number as f64), Unexpected::Signed(number))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        self.outcome(T::number(number as f64), Unexpected::Unsigned(number))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<T, E> {
        self.outcome(T::number(number), Unexpected::Float(number))
    }
}

macro_rules! deserialize {
    ($($name:ident)*) => {$(
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                deserializer.deserialize_any(FromTomlVisitor(std::marker::PhantomData))
            }
        }
    )*};
}

deserialize!(Bytes Millis Percent Positive Amount Release);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_on_the_box_and_those_of_requests() {
        for (text, bytes) in [
            ("8TB", 8_000_000_000_000),
            ("1.92 TB", 1_920_000_000_000),
            ("4KiB", 4096),
            ("512", 512),
            ("400GiB", 400 << 30),
        ] {
            assert_eq!(Bytes::text(text), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "TB", "8 T", "-1TB", "1e3GB", "8TBB", "infTB", "NaN", "0GB", "99999999TB"]
        {
            assert!(Bytes::text(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_for_people_have_no_superfluous_digits() {
        for (bytes, text) in [
            (8_000_000_000_000, "8 TB"),
            (1_920_000_000_000, "1.92 TB"),
            (160_000_000_000, "160 GB"),
            (512, "512 bytes"),
        ] {
            assert_eq!(decimal(bytes), text);
        }
        assert_eq!((binary(65536).as_str(), binary(4096).as_str()), ("64 KiB", "4 KiB"));
    }

    #[test]
    fn a_release_is_a_number_or_a_name() {
        assert_eq!(Release::text("16.2.15"), Ok(Release { major: 16, patch: Some(15) }));
        assert_eq!(Release::text("Pacific"), Ok(Release { major: 16, patch: None }));
        for text in ["", "0", "16.", "16.2.15.1", "v16", "none"] {
            assert!(Release::text(text).is_err(), "{text}");
        }
        let steps = |text| Release::text(text).expect("a release").has_steps();
        for text in ["12.2.13", "14", "14.2.11", "octopus", "15.2.5"] {
            assert!(steps(text), "{text}");
        }
        for text in ["14.2.12", "15.2.6", "16", "reef"] {
            assert!(!steps(text), "{text}");
        }
        let large_units = |text| Release::text(text).expect("a release").has_large_units();
        assert!(large_units("14.2.7") && large_units("mimic"));
        assert!(!large_units("14.2.8") && !large_units("nautilus") && !large_units("16.2.15"));
    }

    #[test]
    fn a_duration_needs_a_unit() {
        assert_eq!(Millis::text("2m").map(|millis| millis.to_string()), Ok("120s".into()));
        assert_eq!(Millis::text("500ms").map(|millis| millis.to_string()), Ok("500ms".into()));
        for text in ["", "5", "s", "-1s", "1.5s", "99999999m"] {
            assert!(Millis::text(text).is_err(), "{text}");
        }
    }
}
