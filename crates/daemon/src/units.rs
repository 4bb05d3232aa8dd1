//! Sizes and durations as people write them: shared by the command's flags, the configuration file
//! and the admin API, so that one spelling works everywhere.

use crate::text::plain;
use serde::de::{Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A size in bytes, written `4096`, `512KiB`, `64MiB`, `10GiB` or `2TiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Size(pub u64);

/// A time span with a resolution of one millisecond, written `500ms`, `5s` or `2m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Duration(std::time::Duration);

/// The suffixes of a size, largest first, with their bytes.
const SIZE_SUFFIXES: [(&str, u64); 4] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// The suffixes of a duration, with their milliseconds. `ms` stands before `s` and `m`, which it
/// ends or begins with.
const DURATION_SUFFIXES: [(&str, u64); 3] = [("ms", 1), ("s", 1_000), ("m", 60_000)];

/// Longest duration that is accepted; anything above is a slip of the keyboard.
const DURATION_MS_MAX: u64 = 7 * 24 * 3600 * 1000;

/// Longest part of a wrong input that an error repeats, in characters.
const QUOTE_CHARS_MAX: usize = 40;

/// Why a text is not a size or a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// No size.
    #[error("\"{0}\" is not a size: write a whole number with KiB, MiB, GiB or TiB, as in 64GiB")]
    Size(String),
    /// More bytes than a size holds.
    #[error("the size \"{0}\" is too large")]
    SizeTooLarge(String),
    /// No duration.
    #[error("\"{0}\" is not a duration: write a whole number with ms, s or m, as in 5s")]
    Duration(String),
    /// Longer than a week.
    #[error("the duration \"{0}\" is too long: at most 10080m (a week)")]
    DurationTooLong(String),
}

impl Size {
    /// For people: three digits at least, one decimal where it helps (`1.5GiB`, `640KiB`).
    pub fn approximate(self) -> String {
        for (suffix, bytes) in SIZE_SUFFIXES {
            if self.0 >= bytes {
                let value = self.0 as f64 / bytes as f64;
                let decimals = usize::from(value < 100.0 && !self.0.is_multiple_of(bytes));
                return format!("{value:.decimals$}{suffix}");
            }
        }
        format!("{}B", self.0)
    }
}

impl Duration {
    /// From milliseconds.
    pub const fn from_millis(millis: u64) -> Duration {
        Duration(std::time::Duration::from_millis(millis))
    }

    /// As the standard library's type.
    pub const fn get(self) -> std::time::Duration {
        self.0
    }

    /// Whole milliseconds.
    pub fn as_millis(self) -> u64 {
        u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX)
    }

    /// Seconds with their fraction.
    pub fn as_seconds(self) -> f64 {
        self.0.as_secs_f64()
    }
}

/// Splits `text` into its digits and the factor of its suffix; `None` when it is neither.
fn split(text: &str, suffixes: &[(&str, u64)], bare: Option<u64>) -> Option<(String, u64)> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, suffix) = (&text[..end], text[end..].trim_start());
    let factor = match suffix {
        "" => bare?,
        other => suffixes.iter().find(|(name, _)| *name == other)?.1,
    };
    (!digits.is_empty()).then(|| (digits.to_owned(), factor))
}

/// The part of a wrong input that an error repeats: one line, of bounded length.
fn quoted(text: &str) -> String {
    let mut quote = plain(&text.chars().take(QUOTE_CHARS_MAX).collect::<String>());
    if text.chars().count() > QUOTE_CHARS_MAX {
        quote.push('…');
    }
    quote
}

impl FromStr for Size {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Size, UnitError> {
        let (digits, factor) =
            split(text, &SIZE_SUFFIXES, Some(1)).ok_or_else(|| UnitError::Size(quoted(text)))?;
        let bytes = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor));
        bytes.map(Size).ok_or_else(|| UnitError::SizeTooLarge(quoted(text)))
    }
}

impl FromStr for Duration {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Duration, UnitError> {
        let (digits, factor) = split(text, &DURATION_SUFFIXES, None)
            .ok_or_else(|| UnitError::Duration(quoted(text)))?;
        let millis = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(factor));
        millis
            .filter(|millis| *millis <= DURATION_MS_MAX)
            .map(Duration::from_millis)
            .ok_or_else(|| UnitError::DurationTooLong(quoted(text)))
    }
}

impl fmt::Display for Size {
    /// Exact: the largest suffix that divides the size, else plain bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match SIZE_SUFFIXES.iter().find(|(_, bytes)| self.0 > 0 && self.0.is_multiple_of(*bytes)) {
            Some((suffix, bytes)) => write!(f, "{}{suffix}", self.0 / bytes),
            None => write!(f, "{}", self.0),
        }
    }
}

impl fmt::Display for Duration {
    /// Exact: minutes, seconds or milliseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.as_millis() {
            millis if millis > 0 && millis.is_multiple_of(60_000) => {
                write!(f, "{}m", millis / 60_000)
            }
            millis if millis.is_multiple_of(1_000) => write!(f, "{}s", millis / 1_000),
            millis => write!(f, "{millis}ms"),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Serialize for Duration {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

struct SizeVisitor;

impl Visitor<'_> for SizeVisitor {
    type Value = Size;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"64GiB\" or a number of bytes")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Size, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: serde::de::Error>(self, bytes: u64) -> Result<Size, E> {
        Ok(Size(bytes))
    }

    fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<Size, E> {
        u64::try_from(bytes).map(Size).map_err(|_| E::custom("a size is not negative"))
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Size, D::Error> {
        deserializer.deserialize_any(SizeVisitor)
    }
}

struct DurationVisitor;

impl Visitor<'_> for DurationVisitor {
    type Value = Duration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration such as \"5s\" or \"500ms\"")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Duration, E> {
        text.parse().map_err(E::custom)
    }
}

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        deserializer.deserialize_any(DurationVisitor)
    }
}

/// A point of time for people, from milliseconds since 1970.
pub fn time(unix_ms: u64) -> String {
    let time =
        i64::try_from(unix_ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    time.map_or_else(|| format!("{unix_ms} ms"), |time| format!("{time:.3}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_read_with_binary_suffixes_only() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512KiB", 512 << 10),
            ("3 MiB", 3 << 20),
            ("64GiB", 64 << 30),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in [
            "",
            "GiB",
            "64G",
            "64GB",
            "64gib",
            "-1",
            "1.5GiB",
            "0x10",
            "64GiBx",
            "64 GiB GiB",
            "٣GiB",
        ] {
            assert_eq!(text.parse::<Size>(), Err(UnitError::Size(text.to_owned())), "{text}");
        }
        assert_eq!(
            "16777216TiB".parse::<Size>(),
            Err(UnitError::SizeTooLarge("16777216TiB".into()))
        );
        assert_eq!(
            "99999999999999999999".parse::<Size>(),
            Err(UnitError::SizeTooLarge("99999999999999999999".into()))
        );
    }

    #[test]
    fn durations_need_a_unit() {
        for (text, millis) in [("500ms", 500), ("5s", 5_000), ("2m", 120_000), ("0s", 0)] {
            assert_eq!(text.parse(), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "5", "5sec", "5h", "s", "1.5s", "-5s"] {
            assert_eq!(
                text.parse::<Duration>(),
                Err(UnitError::Duration(text.to_owned())),
                "{text}"
            );
        }
        assert!(matches!("10081m".parse::<Duration>(), Err(UnitError::DurationTooLong(_))));
    }

    #[test]
    fn a_wrong_size_is_repeated_on_one_short_line() {
        let error =
            format!("{}\n{}", "x", "9".repeat(1000)).parse::<Size>().unwrap_err().to_string();
        assert!(!error.contains('\n') && error.len() < 200, "{error}");
    }

    #[test]
    fn approximate_sizes_are_short() {
        let cases =
            [(0, "0B"), (512, "512B"), (1536, "1.5KiB"), (1 << 30, "1GiB"), (150 << 30, "150GiB")];
        for (bytes, text) in cases {
            assert_eq!(Size(bytes).approximate(), text);
        }
    }

    proptest! {
        #[test]
        fn what_is_printed_reads_back(bytes: u64, millis in 0..=DURATION_MS_MAX) {
            prop_assert_eq!(Size(bytes).to_string().parse(), Ok(Size(bytes)));
            prop_assert_eq!(Duration::from_millis(millis).to_string().parse(), Ok(Duration::from_millis(millis)));
        }

        #[test]
        fn no_text_makes_the_parsers_panic(text: String) {
            let _ = text.parse::<Size>();
            let _ = text.parse::<Duration>();
        }
    }
}
