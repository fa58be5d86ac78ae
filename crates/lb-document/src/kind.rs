//! The kinds of values that a key may have. A kind has limits and a parser.
//!
//! A kind defines both the values that readers accept and the values that documentation pages list,
//! so that they cannot differ. If a key accepts more than one kind of value, a function reads the
//! value ([`ReadBy`]). Only if the function needs more than the value, the kind is a [`FreeForm`],
//! and the code around the key reads the value.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;

use super::Item;
use super::duration::{in_units, parse_duration};
use super::near::did_you_mean;
use crate::diagnostic::quote;

pub trait ValueKind: Sync {
    /// The type of the parsed value.
    type Value: Clone + Sync;
    /// The accepted values: either all of them, or examples.
    fn values(&self) -> Vec<String>;
    /// Formats a value as it is written in a file. Kinds whose keys have no default value need no
    /// format.
    fn written(&self, _: &Self::Value) -> String {
        String::new()
    }
    /// Parses the value. If the value is wrong, reports a fault and returns `None`.
    fn read(&self, item: &Item<'_>) -> Option<Self::Value>;
}

/// The help text for a value of the wrong kind.
pub fn write<K: ValueKind>(kind: &K) -> String {
    format!("write {}", kind.values().join(" or "))
}

/// A whole number within a range.
pub struct Number<T = u32>(pub RangeInclusive<T>);

impl<T: Copy + PartialOrd + Display + Sync + TryFrom<u32>> ValueKind for Number<T> {
    type Value = T;

    fn values(&self) -> Vec<String> {
        vec![format!("{} to {}", self.0.start(), self.0.end())]
    }

    fn written(&self, value: &T) -> String {
        value.to_string()
    }

    fn read(&self, item: &Item<'_>) -> Option<T> {
        let DeValue::Integer(integer) = item.value() else {
            item.wrong_kind_but("a whole number", write(self));
            return None;
        };
        let number = u32::from_str_radix(integer.as_str(), integer.radix()).ok();
        let number = number.and_then(|number| T::try_from(number).ok());
        let number = number.filter(|number| self.0.contains(number));
        if number.is_none() {
            item.fault(format!("{} is {integer:.40}", item.name()), write(self));
        }
        number
    }
}

/// A decimal fraction within a range, in thousandths. The fraction may have up to three decimal
/// places.
pub struct Thousandths(pub RangeInclusive<u32>);

impl ValueKind for Thousandths {
    type Value = u32;

    fn values(&self) -> Vec<String> {
        vec![format!("{} to {}", self.written(self.0.start()), self.written(self.0.end()))]
    }

    fn written(&self, value: &u32) -> String {
        let text = format!("{}.{:03}", value / 1000, value % 1000);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }

    fn read(&self, item: &Item<'_>) -> Option<u32> {
        let text = match item.value() {
            DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
            DeValue::Float(float) => float.as_str(),
            _ => {
                item.wrong_kind_but("a number", write(self));
                return None;
            }
        };
        let number = thousandths(text).filter(|number| self.0.contains(number));
        if number.is_none() {
            let help = format!("{}, with at most three decimals", write(self));
            item.fault(format!("{} is {text:.40}", item.name()), help);
        }
        number
    }
}

/// Parses digits, which may be followed by a decimal point and at most three more digits. Returns
/// the number in thousandths.
fn thousandths(text: &str) -> Option<u32> {
    let (whole, rest) = text.split_once('.').unwrap_or((text, ""));
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !is_digits(whole) || !is_digits(rest) || rest.len() > 3 {
        return None;
    }
    format!("{whole}{rest:0<3}").parse().ok()
}

/// A power of two within a range.
pub struct PowerOfTwo(pub RangeInclusive<u32>);

impl ValueKind for PowerOfTwo {
    type Value = u32;

    fn values(&self) -> Vec<String> {
        let Self(range) = self;
        vec![format!("{} to {}, a power of two", range.start(), range.end())]
    }

    fn written(&self, value: &u32) -> String {
        value.to_string()
    }

    fn read(&self, item: &Item<'_>) -> Option<u32> {
        let number = Number(self.0.clone()).read(item)?;
        if !number.is_power_of_two() {
            let (above, below) = (number.next_power_of_two(), number.next_power_of_two() / 2);
            let message = format!("{} is {number}, which is not a power of two", item.name());
            item.fault(message, format!("write {below} or {above}"));
        }
        Some(number)
    }
}

/// A time within a range: a whole number with its unit, such as `10s`.
pub struct Time(pub RangeInclusive<Duration>);

impl ValueKind for Time {
    type Value = Duration;

    fn values(&self) -> Vec<String> {
        vec![format!("\"{}\" to \"{}\"", in_units(*self.0.start()), in_units(*self.0.end()))]
    }

    fn written(&self, value: &Duration) -> String {
        format!("\"{}\"", in_units(*value))
    }

    fn read(&self, item: &Item<'_>) -> Option<Duration> {
        read_time(item, &self.0, write(self))
    }
}

/// A time within a range, or `"off"`.
pub struct TimeOrOff(pub RangeInclusive<Duration>);

const OFF: &str = "off";

impl ValueKind for TimeOrOff {
    type Value = Option<Duration>;

    fn values(&self) -> Vec<String> {
        [vec![format!("{OFF:?}")], Time(self.0.clone()).values()].concat()
    }

    fn written(&self, value: &Option<Duration>) -> String {
        format!("\"{}\"", value.map_or_else(|| OFF.to_owned(), in_units))
    }

    fn read(&self, item: &Item<'_>) -> Option<Option<Duration>> {
        if item.as_str() == Some(OFF) {
            return Some(None);
        }
        read_time(item, &self.0, write(self)).map(Some)
    }
}

fn read_time(item: &Item<'_>, range: &RangeInclusive<Duration>, help: String) -> Option<Duration> {
    let text = item.text_or(help.clone())?;
    let duration = parse_duration(text).filter(|duration| range.contains(duration));
    if duration.is_none() {
        item.fault(format!("{} is {}", item.name(), quote(text)), help);
    }
    duration
}

/// A value that is written as one of several words. Contains the values, and a function that
/// returns the word for a value.
pub struct Keyword<T: 'static>(pub &'static [T], pub fn(T) -> &'static str);

impl<T: Copy + Sync> ValueKind for Keyword<T> {
    type Value = T;

    fn values(&self) -> Vec<String> {
        self.0.iter().map(|value| self.written(value)).collect()
    }

    fn written(&self, value: &T) -> String {
        format!("{:?}", (self.1)(*value))
    }

    fn read(&self, item: &Item<'_>) -> Option<T> {
        let Self(all, name) = self;
        let text = item.text_or(write(self))?;
        let value = all.iter().find(|value| name(**value) == text);
        if value.is_none() {
            let words: Vec<_> = all.iter().map(|value| name(*value)).collect();
            let help = format!("{}{}", did_you_mean(text, &words), write(self));
            item.fault(format!("unknown {} {}", item.name(), quote(text)), help);
        }
        value.copied()
    }
}

/// A string that a function can parse without further context. Also contains examples.
pub struct Text<T>(pub &'static [&'static str], pub fn(&str) -> Result<T, Refusal>);

/// The fault of a text and its correction. In a message, the fault follows the name of the key.
pub type Refusal = (String, Option<String>);

impl<T: Clone + Sync + Display> ValueKind for Text<T> {
    type Value = T;

    fn values(&self) -> Vec<String> {
        self.0.iter().map(|example| format!("{example:?}")).collect()
    }

    fn written(&self, value: &T) -> String {
        format!("\"{value}\"")
    }

    fn read(&self, item: &Item<'_>) -> Option<T> {
        item.text_or(self.0.first().map(|example| format!("write it as in {example:?}")))?;
        item.parse(self.1)
    }
}

pub struct Boolean();

impl ValueKind for Boolean {
    type Value = bool;

    fn values(&self) -> Vec<String> {
        [true, false].map(|value| self.written(&value)).to_vec()
    }

    fn written(&self, value: &bool) -> String {
        value.to_string()
    }

    fn read(&self, item: &Item<'_>) -> Option<bool> {
        let DeValue::Boolean(value) = item.value() else {
            item.wrong_kind("true or false");
            return None;
        };
        Some(*value)
    }
}

/// A list, which may not be empty, of strings that a function can parse. Also contains examples,
/// and the fault of an empty list with its correction.
pub struct List<T>(
    pub &'static [&'static str],
    pub fn(&str) -> Result<T, Refusal>,
    pub (&'static str, &'static str),
);

impl<T: Clone + Sync> ValueKind for List<T> {
    type Value = Vec<T>;

    fn values(&self) -> Vec<String> {
        FreeForm(self.0).values()
    }

    fn read(&self, item: &Item<'_>) -> Option<Vec<T>> {
        let items = item.list()?;
        let (fault, help) = self.2;
        if items.is_empty() {
            item.fault(fault, help.to_owned());
        }
        Some(items.iter().filter_map(|item| item.parse(self.1)).collect())
    }
}

/// Parses a value of any form. If the value is wrong, reports a fault and returns `None`.
type Reader<T> = fn(&Item<'_>) -> Option<T>;

/// A value that a function of the key reads. Also contains examples.
pub struct ReadBy<T>(pub &'static [&'static str], pub Reader<T>);

impl<T: Clone + Sync> ValueKind for ReadBy<T> {
    type Value = T;

    fn values(&self) -> Vec<String> {
        FreeForm(self.0).values()
    }

    fn read(&self, item: &Item<'_>) -> Option<T> {
        (self.1)(item)
    }
}

/// A value that the code around the key reads. Contains examples.
pub struct FreeForm(pub &'static [&'static str]);

impl ValueKind for FreeForm {
    type Value = ();

    fn values(&self) -> Vec<String> {
        self.0.iter().map(|&example| example.to_owned()).collect()
    }

    fn read(&self, _: &Item<'_>) -> Option<()> {
        Some(())
    }
}
