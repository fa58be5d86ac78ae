//! The words and numbers of a scenario file, as types that can contain only allowed values.
//!
//! Each type rejects other values with a message that contains the value and the correction. The
//! TOML reader adds line and column. This module must not depend on the purpose of the values.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use lb_core::control::{Law, Switch};
use lb_core::service::{Ejection, Overflow, Policy};
use lb_core::subset::{Algorithm, UnknownAlgorithm};
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Reads a value from a text. The string describes the expected value in error messages about
/// values that are not texts.
struct TextVisitor<T>(&'static str, PhantomData<T>);

impl<T: FromStr<Err = String>> Visitor<'_> for TextVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// Makes a type readable from a text. The literal describes the expected value in error messages
/// about values that are not texts.
macro_rules! read_from_text {
    ($value:ty, $expected:literal, $read:expr) => {
        impl FromStr for $value {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                let read: fn(&str) -> Result<Self, String> = $read;
                read(text)
            }
        }

        impl<'de> Deserialize<'de> for $value {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.deserialize_any(TextVisitor($expected, PhantomData))
            }
        }
    };
}

/// Finds a value by its name. `what` describes the values in the message, and `others` are further
/// valid words.
fn by_name<T: Copy>(
    text: &str,
    all: &[T],
    name: fn(T) -> &'static str,
    (what, others): (&str, &str),
) -> Result<T, String> {
    let names = || all.iter().map(|value| name(*value)).collect::<Vec<_>>().join(", ");
    let known = all.iter().copied().find(|value| name(*value) == text);
    known.ok_or_else(|| format!("{text:?} is not {what}: write one of {}{others}", names()))
}

/// A whole number from MIN to MAX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Within<const MIN: u32, const MAX: u32>(pub u32);

impl<const MIN: u32, const MAX: u32> TryFrom<i64> for Within<MIN, MAX> {
    type Error = String;

    fn try_from(number: i64) -> Result<Self, String> {
        let fits = u32::try_from(number).ok().filter(|number| (MIN..=MAX).contains(number));
        fits.map(Self).ok_or_else(|| format!("{number} is not a whole number from {MIN} to {MAX}"))
    }
}

impl<const MAX: u32> Default for Within<0, MAX> {
    fn default() -> Self {
        Self(0)
    }
}

impl<'de, const MIN: u32, const MAX: u32> Deserialize<'de> for Within<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberVisitor<const MIN: u32, const MAX: u32>;
        impl<const MIN: u32, const MAX: u32> Visitor<'_> for NumberVisitor<MIN, MAX> {
            type Value = Within<MIN, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a whole number from {MIN} to {MAX}")
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<Within<MIN, MAX>, E> {
                Within::try_from(number).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(NumberVisitor)
    }
}

/// A length of virtual time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    pub us: u64,
}

/// The longest span: a day.
const MAX_SPAN_US: u64 = 24 * 3600 * 1_000_000;

const UNITS: [(&str, u64); 5] =
    [("us", 1), ("ms", 1_000), ("s", 1_000_000), ("m", 60_000_000), ("h", 3_600_000_000)];

read_from_text!(Span, "a time in quotes, as in \"90s\"", |text| {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = UNITS.iter().find(|(name, _)| *name == unit);
    let us = unit.and_then(|(_, us)| number.parse::<u64>().ok()?.checked_mul(*us));
    match us {
        Some(us) if us <= MAX_SPAN_US => Ok(Self { us }),
        Some(_) => Err(format!("{text:?} is too long: at most \"24h\"")),
        None => Err(format!(
            "{text:?} is not a time: write a whole number and one of us, ms, s, m, h, as in \"90s\""
        )),
    }
});

impl fmt::Display for Span {
    /// Formats the span as in a scenario file, in the largest unit in which it is a whole number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().rev().find(|(_, us)| self.us.is_multiple_of(*us) && self.us > 0);
        let (name, us) = unit.copied().unwrap_or(("s", 1_000_000));
        f.pad(&format!("{}{name}", self.us / us))
    }
}

/// A seed: a 64-bit number as text, because the integers of TOML and JSON are too small for 64
/// bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seed(pub u64);

read_from_text!(Seed, "a decimal number of 64 bits in quotes, as in \"7\"", |text| {
    text.parse().map(Self).map_err(|_| {
        format!("{text:?} is not a seed: write a decimal number of 64 bits in quotes, as in \"7\"")
    })
});

/// A name: 1 to 63 letters, digits, `-`, `_` and `.`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScenarioName(pub String);

read_from_text!(ScenarioName, "a name in quotes", |text| {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if (1..=63).contains(&text.len()) && text.bytes().all(fine) {
        Ok(Self(text.to_owned()))
    } else {
        Err(format!("{text:?} is not a name: write 1 to 63 letters, digits, \"-\", \"_\" or \".\""))
    }
});

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AlgorithmName(pub Algorithm);

read_from_text!(AlgorithmName, "the name of a subsetting algorithm in quotes", |text| {
    let names = || Algorithm::ALL.map(Algorithm::name).join(", ");
    text.parse().map(Self).map_err(|error: UnknownAlgorithm| format!("{error}: write one of {}", names()))
});

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolicyName(pub Policy);

read_from_text!(PolicyName, "the name of a policy in quotes", |text| {
    by_name(text, &Policy::ALL, Policy::name, ("a policy", "")).map(Self)
});

/// What a task does if every backend is at `active_limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverflowName(pub Overflow);

read_from_text!(OverflowName, "\"least-loaded\" or \"refuse\"", |text| {
    by_name(text, &Overflow::ALL, Overflow::name, ("an overflow", "")).map(Self)
});

/// The name of the law that adjusts weights to load, or `"off"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadChoice(pub Option<Law>);

read_from_text!(LoadChoice, "\"a58\", \"feedback\", or \"off\"", |text| match text {
    "off" => Ok(Self(None)),
    _ => by_name(text, &Law::ALL, Law::name, ("a law of load control", ", off")).map(|law| Self(Some(law))),
});

/// The state to which an operator switches load control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwitchName(pub Switch);

read_from_text!(SwitchName, "\"on\", \"freeze\", or \"off\"", |text| {
    by_name(text, &Switch::ALL, Switch::name, ("a switch", "")).map(Self)
});

/// The age of the state that a daemon has saved for its successor; `"nothing"` if the daemon has
/// saved none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedStateAge(pub Option<Span>);

read_from_text!(SavedStateAge, "a time in quotes, as in \"10s\", or \"nothing\"", |text| {
    if text == "nothing" { Ok(Self(None)) } else { text.parse().map(|age| Self(Some(age))) }
});

/// Reads a time from a second to an hour, or `"off"`, as in the daemon's configuration.
fn seconds_or_off(key: &str, text: &str) -> Result<Option<Span>, String> {
    if text == "off" {
        return Ok(None);
    }
    let span: Span = text.parse()?;
    let is_right = (1_000_000..=3_600_000_000).contains(&span.us);
    is_right
        .then_some(Some(span))
        .ok_or_else(|| format!("{key} is \"{span}\": write \"1s\" to \"1h\", or \"off\""))
}

/// The half-life of an error; `"off"` if errors do not add to load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorDecay(pub Option<Span>);

impl Default for ErrorDecay {
    /// The same default as in the configuration.
    fn default() -> Self {
        Self(Some(Span { us: 5_000_000 }))
    }
}

read_from_text!(ErrorDecay, "a time in quotes, as in \"5s\", or \"off\"", |text| {
    seconds_or_off("error_decay", text).map(Self)
});

/// The time until a member has its whole share; `"off"` if it has the share at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SlowStart(pub Option<Span>);

read_from_text!(SlowStart, "a time in quotes, as in \"10s\", or \"off\"", |text| {
    seconds_or_off("slow_start", text).map(Self)
});

/// The limit on open flows, or `"off"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ActiveLimit(pub Option<u32>);

impl<'de> Deserialize<'de> for ActiveLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct LimitVisitor;
        impl Visitor<'_> for LimitVisitor {
            type Value = ActiveLimit;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a limit from 1 to {}, or \"off\"", u32::MAX)
            }

            fn visit_i64<E: Error>(self, number: i64) -> Result<ActiveLimit, E> {
                let limit: Within<1, { u32::MAX }> = Within::try_from(number).map_err(E::custom)?;
                Ok(ActiveLimit(Some(limit.0)))
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<ActiveLimit, E> {
                if word == "off" {
                    return Ok(ActiveLimit(None));
                }
                Err(E::custom(format!("{word:?} is not a limit: write a number, or \"off\"")))
            }
        }
        deserializer.deserialize_any(LimitVisitor)
    }
}

/// The rules of ejection: a table of the values that differ from the defaults, or `"off"`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EjectionChoice(pub Option<Ejection>);

/// The table of an [`EjectionChoice`]. Missing keys get their defaults.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
struct EjectionTable {
    failures: Within<1, 255>,
    base: Span,
    max: Span,
}

impl Default for EjectionTable {
    fn default() -> Self {
        let Ejection { failures, base, max, hangs: _ } = Ejection::default();
        let span = |time: Duration| Span { us: u64::try_from(time.as_micros()).expect("minutes") };
        Self { failures: Within(failures.into()), base: span(base), max: span(max) }
    }
}

/// The shortest and the longest ejection, as in the configuration.
const EJECTION_US: RangeInclusive<u64> = 100_000..=3_600_000_000;

impl TryFrom<EjectionTable> for EjectionChoice {
    type Error = String;

    fn try_from(table: EjectionTable) -> Result<Self, String> {
        let EjectionTable { failures, base, max } = table;
        for (key, time) in [("base", base), ("max", max)] {
            if !EJECTION_US.contains(&time.us) {
                return Err(format!("{key} is \"{time}\": write \"100ms\" to \"1h\""));
            }
        }
        if base > max {
            return Err(format!(
                "`base` is \"{base}\", but no ejection is longer than `max`, which is \"{max}\": write at \
                 most max"
            ));
        }
        let failures = u8::try_from(failures.0).expect("failures fit into u8");
        let (base, max) = (Duration::from_micros(base.us), Duration::from_micros(max.us));
        // In this model the ejector does not learn about backends that do not answer on established
        // connections.
        Ok(Self(Some(Ejection { failures, base, max, hangs: false })))
    }
}

impl<'de> Deserialize<'de> for EjectionChoice {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EjectionVisitor;
        impl<'de> Visitor<'de> for EjectionVisitor {
            type Value = EjectionChoice;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("\"off\", or a table as in { failures = 5 }")
            }

            fn visit_str<E: Error>(self, word: &str) -> Result<EjectionChoice, E> {
                if word == "off" {
                    return Ok(EjectionChoice(None));
                }
                Err(E::custom(format!(
                    "{word:?} is not an ejection: write \"off\", or a table as in {{ failures = 5 }}"
                )))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<EjectionChoice, A::Error> {
                let table = EjectionTable::deserialize(MapAccessDeserializer::new(map))?;
                EjectionChoice::try_from(table).map_err(A::Error::custom)
            }
        }
        deserializer.deserialize_any(EjectionVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_a_whole_number_and_a_unit() {
        let us = |text: &str| text.parse().map(|span: Span| span.us);
        assert_eq!(us("62500us"), Ok(62_500));
        assert_eq!(us("0s"), Ok(0));
        assert_eq!(us("90s"), Ok(90_000_000));
        assert_eq!(us("24h"), Ok(MAX_SPAN_US));
        assert_eq!(us("25h"), Err("\"25h\" is too long: at most \"24h\"".into()));
        for wrong in
            ["", "s", "5", "1.5s", "-1s", "5 s", "1m30s", "99999999999999999999s", "18446744073709551615h"]
        {
            assert!(us(wrong).unwrap_err().contains("is not a time"), "{wrong}");
        }
    }

    #[test]
    fn a_span_is_formatted_as_in_a_scenario_file() {
        for text in ["62500us", "5ms", "90s", "2m", "1h", "0s"] {
            assert_eq!(text.parse::<Span>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn bounds_of_numbers_are_inclusive() {
        let read = Within::<2, 9>::try_from;
        assert_eq!((read(2), read(9)), (Ok(Within(2)), Ok(Within(9))));
        assert_eq!(read(1), Err("1 is not a whole number from 2 to 9".into()));
        assert_eq!(read(10), Err("10 is not a whole number from 2 to 9".into()));
        assert_eq!(read(-3), Err("-3 is not a whole number from 2 to 9".into()));
        assert_eq!(read(1 << 32), Err("4294967296 is not a whole number from 2 to 9".into()));
    }
}
