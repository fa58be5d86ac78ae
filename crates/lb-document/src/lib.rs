//! Parses TOML documents into trees of values with their positions. Reports all faults of a file at
//! once.
//!
//! A derived deserializer stops at the first fault, so an operator would have to repair one fault
//! per attempt. This crate processes tables with their keys, and kinds of values. Its callers
//! define the keys and their effects.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::diagnostic::{DiagnosticCollector, quote};

mod address;
pub mod control;
pub mod diagnostic;
mod duration;
pub mod key;
pub mod kind;
mod log_format;
mod names;
mod near;

pub use address::{NotAnAddress, address, parse_address};
pub use duration::{in_units, parse_duration};
pub use log_format::LogFormat;
pub use names::{hosts, interfaces};
pub use near::did_you_mean;

use key::Section;
use kind::Refusal;

/// The maximum length, in bytes, of a text for which all syntax faults are reported. For a longer
/// text only the first fault is reported, because a file that is not TOML may cause a fault for
/// every byte.
pub const MAX_RECOVERED_BYTES: usize = 1 << 20;

/// Parses a document. Syntax faults are reported. Returns everything that could be parsed.
pub fn read<'t>(text: &'t str, report: &DiagnosticCollector<'_>) -> DeTable<'t> {
    let first = match DeTable::parse(text) {
        Ok(root) => return root.into_inner(),
        Err(error) => error,
    };
    let (root, errors) = if text.len() <= MAX_RECOVERED_BYTES {
        let (root, errors) = DeTable::parse_recoverable(text);
        (root.into_inner(), errors)
    } else {
        (DeTable::new(), vec![first])
    };
    for error in errors {
        add_syntax(error.span().unwrap_or(text.len()..text.len()), error.message(), report);
    }
    root
}

/// Reports a syntax fault with the message of the TOML library, with a correction if one is known.
pub fn add_syntax(span: Range<usize>, message: &str, report: &DiagnosticCollector<'_>) {
    let message = message.strip_suffix(", expected nothing").unwrap_or(message);
    // An address without quotes begins like a number.
    let numeric = ["invalid float", "invalid integer", "invalid datetime"];
    let help = numeric.iter().any(|kind| message.starts_with(kind));
    let help = help.then(|| "text, such as an address, is written in quotes".to_owned());
    report.add_syntax(span, message, help);
}

/// A table of a document. An absent table has no keys.
#[derive(Clone)]
pub struct Table<'t> {
    what: &'static str,
    span: Range<usize>,
    entries: Option<&'t DeTable<'t>>,
    report: &'t DiagnosticCollector<'t>,
}

impl<'t> Table<'t> {
    /// The document as a table; `what` is the document's name in messages.
    pub fn root(what: &'static str, entries: &'t DeTable<'t>, report: &'t DiagnosticCollector<'t>) -> Self {
        Self { what, span: 0..0, entries: Some(entries), report }
    }

    /// The collector of the document's faults.
    pub fn report(&self) -> &'t DiagnosticCollector<'t> {
        self.report
    }

    /// Reports a fault of the whole table.
    pub fn fault(&self, message: impl Into<String>, help: impl Into<Option<String>>) {
        self.report.add(self.span(), message, help);
    }

    /// Reports that something is absent from the table. The fault is dropped if any line could not
    /// be parsed, because this line may contain what is absent.
    pub fn absent(&self, message: impl Into<String>, help: impl Into<Option<String>>) {
        self.report.add_absent(self.span(), message, help);
    }

    pub fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// Reports every key that is not `known`.
    pub fn check_keys(&self, known: &[&str]) {
        self.check_keys_and_former(known, &[]);
    }

    /// Like `check_keys`, but the message for a former key (in `gone`) names its replacement.
    fn check_keys_and_former(&self, known: &[&str], gone: &[(&str, &str)]) {
        let keys = self.entries.iter().flat_map(|entries| entries.keys());
        for key in keys.filter(|key| !known.contains(&key.get_ref().as_ref())) {
            let name = key.get_ref();
            let (kind, help) = match gone.iter().find(|(former, _)| former == name) {
                Some((_, instead)) => ("former", (*instead).to_owned()),
                None => ("unknown", format!("{}known keys: {}", did_you_mean(name, known), known.join(", "))),
            };
            self.report.add(key.span(), format!("{kind} key {} in {}", quote(name), self.what), help);
        }
    }

    pub fn get(&self, key: &'static str) -> Option<Item<'t>> {
        self.entries?.get(key).map(|value| Item { name: Cow::Borrowed(key), value, report: self.report })
    }

    /// The table with the header `[name]`. If the table is absent, the result has no keys.
    pub fn table(&self, section: &Section) -> Self {
        let table = self.get(section.name()).and_then(|item| item.table(section));
        table.unwrap_or(Self { what: section.what, span: 0..0, entries: None, report: self.report })
    }

    /// The tables with the header `[[name]]`, at most `limit` of them. Reports a fault if there are
    /// more tables.
    pub fn tables(&self, section: &Section, limit: usize) -> Vec<Self> {
        let key = section.name();
        let Some(item) = self.get(key) else { return Vec::new() };
        let DeValue::Array(elements) = item.value.get_ref() else {
            item.wrong_kind_but("a list of tables", format!("write the header [[{key}]]"));
            return Vec::new();
        };
        if let Some(beyond) = elements.get(limit) {
            let message = format!("{key} {} is one too many", limit + 1);
            self.report.add(beyond.span(), message, format!("at most {limit}"));
        }
        item.elements(elements).take(limit).filter_map(|item| item.table(section)).collect()
    }
}

/// A value of a document, with its name in messages.
pub struct Item<'t> {
    name: Cow<'t, str>,
    value: &'t Spanned<DeValue<'t>>,
    report: &'t DiagnosticCollector<'t>,
}

impl<'t> Item<'t> {
    pub fn span(&self) -> Range<usize> {
        self.value.span()
    }

    /// The collector of the document's faults.
    pub fn report(&self) -> &'t DiagnosticCollector<'t> {
        self.report
    }

    /// Reports a fault of the value.
    pub fn fault(&self, message: impl Into<String>, help: impl Into<Option<String>>) {
        self.report.add(self.span(), message, help);
    }

    /// Like [`Table::absent`], for a value.
    pub fn absent(&self, message: impl Into<String>, help: impl Into<Option<String>>) {
        self.report.add_absent(self.span(), message, help);
    }

    /// The name of the value in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn is_empty_list(&self) -> bool {
        matches!(self.value(), DeValue::Array(elements) if elements.is_empty())
    }

    pub fn as_str(&self) -> Option<&'t str> {
        self.value().as_str()
    }

    /// The raw value, for keys that accept more than one kind.
    pub fn value(&self) -> &'t DeValue<'t> {
        self.value.get_ref()
    }

    /// Reports that the value is not `expected`.
    pub fn wrong_kind(&self, expected: &str) {
        self.wrong_kind_but(expected, None);
    }

    /// Like [`Item::wrong_kind`], with a correction.
    pub fn wrong_kind_but(&self, expected: &str, help: impl Into<Option<String>>) {
        let message = format!("{} must be {expected}, not {}", self.name, kind(self.value()));
        self.fault(message, help);
    }

    /// The string. Reports a value of another kind.
    pub fn text(&self) -> Option<&'t str> {
        self.text_or(None)
    }

    /// Like [`Item::text`]. `help` is the correction for a value of another kind.
    pub fn text_or(&self, help: impl Into<Option<String>>) -> Option<&'t str> {
        let text = self.as_str();
        if text.is_none() {
            self.wrong_kind_but("a string", help);
        }
        text
    }

    /// The elements of the list. Reports a value of another kind.
    pub fn list(&self) -> Option<Vec<Self>> {
        let DeValue::Array(elements) = self.value() else {
            // A text with blanks may be intended as several elements, so no correction is
            // suggested.
            let element = self.as_str().filter(|text| !text.contains(' '));
            let help = element.map(|text| format!("write [{}]", quote(text)));
            self.wrong_kind_but("a list", help);
            return None;
        };
        Some(self.elements(elements).collect())
    }

    fn elements(&self, elements: &'t [Spanned<DeValue<'t>>]) -> impl Iterator<Item = Self> {
        let name = || Cow::Owned(format!("an entry of {}", self.name));
        elements.iter().map(move |value| Self { name: name(), value, report: self.report })
    }

    /// The table. The keys of the table are checked against the section.
    pub fn table(&self, section: &Section) -> Option<Table<'t>> {
        let DeValue::Table(entries) = self.value() else {
            self.wrong_kind("a table");
            return None;
        };
        let table =
            Table { what: section.what, span: self.span(), entries: Some(entries), report: self.report };
        table.check_keys_and_former(&section.keys(), section.gone);
        Some(table)
    }

    /// Parses the string with `parse`, and reports the parser's error.
    pub fn parse<T>(&self, parse: fn(&str) -> Result<T, Refusal>) -> Option<T> {
        match parse(self.text()?) {
            Ok(value) => Some(value),
            Err((why, help)) => {
                self.fault(format!("{} {why}", self.name), help);
                None
            }
        }
    }
}

fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "a whole number",
        DeValue::Float(_) => "a decimal fraction",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date or time",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// The values that may occur only once, with their positions.
pub struct Unique<K>(BTreeMap<K, Range<usize>>);

impl<K> Default for Unique<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> Unique<K> {
    /// Registers `key` at `span`. If the key has been registered before, reports a fault and
    /// returns `false`. `what` is the name of the value in the message.
    pub fn claim(
        &mut self,
        key: K,
        span: Range<usize>,
        what: &str,
        report: &DiagnosticCollector<'_>,
    ) -> bool {
        if let Some(first) = self.0.get(&key) {
            let place = report.place(first, &span);
            report.add(span, format!("{what} is already {place}"), None);
            return false;
        }
        self.0.insert(key, span);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::path::Path;
    use std::time::Duration;

    use super::duration::parse_duration;
    use super::key::ConfigKey;
    use super::key::Unset::Means;
    use super::kind::{FreeForm, Keyword, Number, Text, Time, TimeOrOff};
    use super::*;
    use crate::section;

    section! {
        keys, "[test]", "the test", "";

        NUMBER "number": Number(1..=256), Means("none"), "";
        S "s": Text<String>(&[], |text| Ok(text.to_owned())), Means("none"), "";
        L "l": FreeForm(&[]), Means("none"), "";
        T "t": FreeForm(&[]), Means("none"), "";
        A "a": Text<SocketAddr>(&["10.0.0.1:80"], address), Means("none"), "";
        C "c": Keyword<&'static str>(&["first", "second"], |word| word), Means("none"), "";
        D "d": Time(Duration::from_secs(1)..=Duration::from_hours(24)), Means("none"), "";
        O "o": TimeOrOff(Duration::from_secs(1)..=Duration::from_hours(24)), Means("none"), "";
        TABLES "tables": FreeForm(&[]), Means("none"), "";
    }

    section! { inner, "[[tables]]", "an inner table", ""; }

    fn faults(text: &str) -> String {
        let report = DiagnosticCollector::new(Path::new("x"), text);
        let root = read(text, &report);
        let table = Table::root("the test", &root, &report);
        table.check_keys(&keys::SECTION.keys());
        keys::NUMBER.take_written(&table);
        keys::S.take_written(&table);
        keys::L.item(&table).map(|item| item.list().is_some());
        keys::T.item(&table).map(|item| item.table(&inner::SECTION).is_some());
        keys::A.take_written(&table);
        keys::C.take_written(&table);
        keys::D.take_written(&table);
        keys::O.take_written(&table);
        table.tables(&inner::SECTION, 2);
        report.finish(Some(())).map_or_else(|faults| faults.to_string(), |()| String::new())
    }

    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert_eq!(faults(text), expected, "{text}");
    }

    #[test]
    fn valid_values_cause_no_fault() {
        for text in ["", "number = 1", "number = 0x1_00", "s = ''", "l = []", "t = {}", "[t]", "c = 'second'"]
        {
            check(text, "");
        }
        check("a = '[::1]:1'", "");
        check("[[tables]]\n[[tables]]", "");
    }

    #[test]
    fn wrong_kinds_and_ranges_are_reported_with_a_correction() {
        check("number = 'x'", "x:1:10: number must be a whole number, not a string (write 1 to 256)");
        check(
            "number = 1.5",
            "x:1:10: number must be a whole number, not a decimal fraction (write 1 to 256)",
        );
        check("number = 0", "x:1:10: number is 0 (write 1 to 256)");
        check("number = 257", "x:1:10: number is 257 (write 1 to 256)");
        check("number = -1", "x:1:10: number is -1 (write 1 to 256)");
        check(
            "number = 99999999999999999999999",
            "x:1:10: number is 99999999999999999999999 (write 1 to 256)",
        );
        check("s = true", "x:1:5: s must be a string, not true or false");
        check("s = 1979-05-27", "x:1:5: s must be a string, not a date or time");
        check("l = 1", "x:1:5: l must be a list, not a whole number");
        check("l = 'a'", "x:1:5: l must be a list, not a string (write [\"a\"])");
        check("l = 'a b'", "x:1:5: l must be a list, not a string");
        check("a = 1", "x:1:5: a must be a string, not a whole number (write it as in \"10.0.0.1:80\")");
        check("c = 1", "x:1:5: c must be a string, not a whole number (write \"first\" or \"second\")");
        check("t = []", "x:1:5: t must be a table, not a list");
        check(
            "c = 'frist'",
            "x:1:5: unknown c \"frist\" (did you mean first? write \"first\" or \"second\")",
        );
        check("c = 'x'", "x:1:5: unknown c \"x\" (write \"first\" or \"second\")");
        check(
            "[tables]",
            "x:1:1: tables must be a list of tables, not a table (write the header [[tables]])",
        );
        check("tables = [1]", "x:1:11: an entry of tables must be a table, not a whole number");
        check("[[tables]]\n[[tables]]\n[[tables]]", "x:3:1: tables 3 is one too many (at most 2)");
        check(
            "nunber = 1",
            "x:1:1: unknown key \"nunber\" in the test (did you mean number? known keys: number, s, l, \
             t, a, c, d, o, tables)",
        );
    }

    #[test]
    fn a_time_is_a_whole_number_of_units() {
        for (text, seconds) in [("1s", 1), ("007s", 7), ("90s", 90), ("2m", 120), ("24h", 86_400)] {
            check(&format!("d = '{text}'"), "");
            assert_eq!(parse_duration(text), Some(Duration::from_secs(seconds)), "{text}");
        }
        let wrong =
            ["", "s", "10", "0s", "25h", "86401s", "1.5s", "1 s", "+1s", "-1s", "1ms", "1d", "1S", "off"];
        for text in wrong.into_iter().chain(["18446744073709551615h", "99999999999999999999s", "1s1s"]) {
            check(&format!("d = '{text}'"), &format!("x:1:5: d is {text:?} (write \"1s\" to \"24h\")"));
        }
        check("o = 'of'", "x:1:5: o is \"of\" (write \"off\" or \"1s\" to \"24h\")");
        check("d = 10", "x:1:5: d must be a string, not a whole number (write \"1s\" to \"24h\")");
    }

    #[test]
    fn an_invalid_address_is_refused_with_the_reason() {
        let example = "write an IP address and a port, as in \"10.0.0.1:8080\" or \"[2001:db8::1]:8080\"";
        let cases = [
            ("10.0.0.1", "has no port", "write \"10.0.0.1:8080\", with the right port"),
            ("::1", "has no port", "write \"[::1]:8080\", with the right address and port"),
            ("10.0.0.1:65536", "has a wrong port", "write 1 to 65535"),
            ("[::1]:99999", "has a wrong port", "write 1 to 65535"),
            ("users.internal:80", "is a host name, not an address", example),
            ("localhost", "is a host name, not an address", example),
            ("10.0.0:80", "is not an address", example),
            ("10.0.0.1:http", "is not an address", example),
            ("", "is not an address", example),
            ("[fe80::1%eth0]:80", "is not an address", example),
        ];
        for (text, why, help) in cases {
            let expected = format!("x:1:5: a {text:?} {why} ({help})");
            check(&format!("a = '{text}'"), &expected);
        }
    }

    #[test]
    fn all_faults_of_syntax_and_of_meaning_are_reported_together() {
        check(
            "number = \ns = 1\nl = [\n",
            "x:1:10: string values must be quoted, expected literal string\n\
             x:2:5: s must be a string, not a whole number\n\
             x:3:6: unclosed array, expected `]`",
        );
    }

    #[test]
    fn a_long_text_is_reported_up_to_its_first_syntax_fault() {
        let text = "= 1\n".repeat(MAX_RECOVERED_BYTES / 4);
        assert_eq!(faults(&text).lines().count(), 101);
        assert_eq!(faults(&format!("{text}\n")).lines().count(), 1);
    }
}
