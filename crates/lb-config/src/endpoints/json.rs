//! JSON values as slices of their text, which are parsed level by level. A parser that returns
//! complete values would lose the position of each value.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::ops::Range;

use lb_common::abi::MAX_BACKENDS;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use lb_document::NotAnAddress;
use lb_document::diagnostic::{DiagnosticCollector, quote};

use super::ListedAddress;
use super::yaml::{self, SourceMapping};

/// A JSON text, or a YAML text converted to JSON.
pub struct JsonDocument<'t> {
    json: Cow<'t, str>,
    /// Whether strings need no quotes, as in YAML.
    is_lenient: bool,
    /// For YAML: the source position of each value and key, in the order of the JSON.
    places: Option<Vec<SourceMapping>>,
}

impl<'t> JsonDocument<'t> {
    /// `is_lenient`: whether the text may also be YAML that is not JSON.
    pub const fn json(text: &'t str, is_lenient: bool) -> Self {
        Self { json: Cow::Borrowed(text), is_lenient, places: None }
    }

    pub fn yaml(text: &str, report: &DiagnosticCollector<'_>) -> Option<Self> {
        let yaml::Json { text, places } = yaml::read(text, report)?;
        Some(Self { json: Cow::Owned(text), is_lenient: true, places: Some(places) })
    }

    /// Returns the whole document as a value; `None` if it is empty.
    ///
    /// # Errors
    /// The first syntax error of the document.
    pub fn root(&self) -> Result<Option<JsonValue<'_>>, serde_json::Error> {
        let body = self.body();
        if body.trim().is_empty() {
            return Ok(None);
        }
        let raw = serde_json::from_str(body)?;
        Ok(Some(JsonValue { name: "the file", document: self, raw }))
    }

    /// The text without a byte order mark. Some editors begin a file with this mark, which JSON
    /// does not allow.
    fn body(&self) -> &str {
        self.json.strip_prefix('\u{feff}').unwrap_or(&self.json)
    }

    /// The position of a part of this document in the source text.
    fn span(&self, part: &str) -> Range<usize> {
        let start = part.as_ptr().addr() - self.json.as_ptr().addr();
        match self.place(start) {
            Some(origin) => origin,
            None => start..start + part.len(),
        }
    }

    /// For YAML: the source position of the value or key that contains this offset.
    fn place(&self, offset: usize) -> Option<Range<usize>> {
        let places = self.places.as_ref()?;
        let after = places.partition_point(|place| place.start as usize <= offset);
        let origin = &places.get(after.checked_sub(1)?)?.origin;
        Some(origin.start as usize..origin.end as usize)
    }

    /// Reports a syntax error of this document.
    pub fn report_syntax(
        &self,
        error: &serde_json::Error,
        report: &DiagnosticCollector<'_>,
        help: Option<String>,
    ) {
        self.report(error, self.body(), help, report);
    }

    /// Reports an error of `serde_json` in a part of this document.
    fn report(
        &self,
        error: &serde_json::Error,
        part: &str,
        help: Option<String>,
        report: &DiagnosticCollector<'_>,
    ) {
        let before = part.split_inclusive('\n').take(error.line().saturating_sub(1));
        let at = before.map(str::len).sum::<usize>() + error.column().saturating_sub(1);
        let start = part.as_ptr().addr() - self.json.as_ptr().addr() + at;
        let span = self.place(start).unwrap_or(start..start + 1);
        let message = error.to_string();
        let position = format!(" at line {} column {}", error.line(), error.column());
        let message = message.strip_suffix(&position).unwrap_or(&message);
        if error.is_data() {
            let message = message.replace("expected u16", "expected 0 to 65535");
            report.add(span, message.replace("expected a nonzero u16", "expected 1 to 65535"), help);
        } else {
            let message = not_json(error, part).unwrap_or_else(|| message.replace("EOF", "the file ends"));
            report.add_syntax(span, message, help);
        }
    }
}

/// The message for a text whose first character cannot begin a JSON value, such as a page in HTML;
/// `None` for another error.
pub fn not_json(error: &serde_json::Error, text: &str) -> Option<String> {
    const SHOWN: usize = 30;
    let is_first = error.is_syntax() && (error.line(), error.column()) == (1, 1);
    let start = &text[..text.floor_char_boundary(SHOWN)];
    is_first.then(|| format!("the text is not JSON: it begins with {}", quote(start)))
}

/// A value as a slice of the text, not parsed yet.
#[derive(Clone, Copy)]
pub struct JsonValue<'t> {
    pub name: &'static str,
    pub document: &'t JsonDocument<'t>,
    pub raw: &'t RawValue,
}

pub struct JsonKey {
    pub name: String,
    pub span: Range<usize>,
}

impl JsonKey {
    pub fn as_str(&self) -> &str {
        &self.name
    }
}

impl<'t> JsonValue<'t> {
    pub fn span(&self) -> Range<usize> {
        self.document.span(self.raw.get())
    }

    pub fn kind(&self) -> &'static str {
        match self.raw.get().as_bytes().first() {
            Some(b'"') => "a string",
            Some(b'[') => "a list",
            Some(b'{') => "an object",
            Some(b't' | b'f') => "true or false",
            Some(b'n') => "null",
            _ => "a number",
        }
    }

    // The whole text has already been parsed once, so parsing fails only if the value has another
    // type, or is a string that is not valid Unicode.
    pub fn parse<T: Deserialize<'t>>(
        &self,
        name: &str,
        expected: &str,
        report: &DiagnosticCollector<'_>,
    ) -> Option<T> {
        let value = serde_json::from_str(self.raw.get());
        if value.is_err() && self.kind() == expected {
            report.add(self.span(), format!("{} is not valid Unicode text", self.raw.get()), None);
        } else if value.is_err() {
            let help = (expected == "a string").then(|| format!("write \"{}\"", self.raw.get()));
            let help = help.filter(|_| self.kind() == "a number");
            report.add(self.span(), format!("{name} must be {expected}, not {}", self.kind()), help);
        }
        value.ok()
    }

    /// The value's text. For an unquoted number or truth value in YAML, returns the text as
    /// written, because strings need no quotes in YAML.
    pub fn text_of(&self, name: &str, report: &DiagnosticCollector<'_>) -> Option<String> {
        if self.document.is_lenient && matches!(self.kind(), "a number" | "true or false") {
            return Some(self.raw.get().to_owned());
        }
        self.parse(name, "a string", report)
    }

    /// The value's elements. If the list is too long, the result ends with the first element beyond
    /// the maximum.
    pub fn list(&self, report: &DiagnosticCollector<'_>) -> Option<Vec<Self>> {
        let JsonElements(elements) = self.parse(self.name, "a list", report)?;
        Some(elements.into_iter().map(|raw| Self { raw, ..*self }).collect())
    }

    /// The value of one key of this object.
    pub const fn of_key(&self, name: &'static str, raw: &'t RawValue) -> Self {
        Self { name, raw, ..*self }
    }

    /// As [`Self::list`], but names each element `element`, and refuses a list with more than the
    /// maximum number of elements.
    pub fn whole_list(&self, element: &'static str, report: &DiagnosticCollector<'_>) -> Option<Vec<Self>> {
        let elements = self.list(report)?;
        if let Some(past) = elements.get(MAX_BACKENDS as usize) {
            let message = format!("{} has more than {MAX_BACKENDS} elements", self.name);
            report.add(past.span(), message, format!("a service has at most {MAX_BACKENDS} endpoints"));
            return None;
        }
        Some(elements.into_iter().map(|value| Self { name: element, ..value }).collect())
    }

    pub fn members(&self, report: &DiagnosticCollector<'_>) -> Option<Vec<(JsonKey, Self)>> {
        let JsonMembers(raw_members) = self.parse(self.name, "an object", report)?;
        if let Some((key, _)) = raw_members.get(MAX_MEMBERS) {
            let span = Self { raw: key, ..*self }.span();
            let message = format!("key {} of {} is one too many", MAX_MEMBERS + 1, self.name);
            report.add(span, message, format!("at most {MAX_MEMBERS}"));
            return None;
        }
        let mut names = BTreeSet::new();
        let mut members = Vec::with_capacity(raw_members.len());
        for (key, raw) in raw_members {
            let key = Self { raw: key, ..*self };
            let name = key.text_of("a key", report)?;
            if !names.insert(name.clone()) {
                report.add(key.span(), format!("key {} appears twice", quote(&name)), None);
            }
            members.push((JsonKey { name, span: key.span() }, Self { raw, ..*self }));
        }
        Some(members)
    }

    /// Reads an object as a `serde` type. Checks first that the value is an object, because `serde`
    /// would also accept a list.
    pub fn read<T: Deserialize<'t>>(&self, report: &DiagnosticCollector<'_>) -> Option<T> {
        if self.kind() != "an object" {
            report.add(self.span(), format!("{} must be an object, not {}", self.name, self.kind()), None);
            return None;
        }
        self.read_any(report)
    }

    /// Reads a value as a `serde` type that accepts no list in place of an object.
    pub fn read_any<T: Deserialize<'t>>(&self, report: &DiagnosticCollector<'_>) -> Option<T> {
        let text = self.raw.get();
        let read = serde_json::from_str(text);
        read.map_err(|error| self.document.report(&error, text, None, report)).ok()
    }

    /// Reads an IP address without a port.
    pub fn ip(&self, report: &DiagnosticCollector<'_>) -> Option<IpAddr> {
        let text = self.text_of(self.name, report)?;
        let ip = text.parse().ok();
        if ip.is_none() {
            let message = format!("{} {} is not an IP address", self.name, quote(&text));
            report.add(self.span(), message, "write an IP address".to_owned());
        }
        ip
    }

    /// Reads an IP address or a host name without a port, and adds the port.
    pub fn target_at(&self, port: u16, report: &DiagnosticCollector<'_>) -> Option<ListedAddress> {
        let text = self.text_of(self.name, report)?;
        let target = ListedAddress::of(&text, port);
        target
            .map_err(|why| {
                let message = format!("{} {} {why}", self.name, quote(&text));
                report.add(self.span(), message, "write an IP address or a host name".to_owned());
            })
            .ok()
    }

    /// Reads an IP address or a host name, with a port.
    pub fn target(&self, report: &DiagnosticCollector<'_>) -> Option<ListedAddress> {
        let text = self.text_of(self.name, report)?;
        match ListedAddress::parse(&text) {
            Ok(target) => Some(target),
            Err(NotAnAddress { why, help }) => {
                report.add(self.span(), format!("{} {} {why}", self.name, quote(&text)), help);
                None
            }
        }
    }
}

/// The maximum number of keys of an object. Labels that socklb does not use are allowed, and
/// service discovery may add dozens of labels.
pub const MAX_MEMBERS: usize = 1024;

/// The elements of a list as slices of the text. Contains at most one element beyond the maximum,
/// so that a fault can report the position of that element.
pub struct JsonElements<'t>(Vec<&'t RawValue>);

impl<'de> Deserialize<'de> for JsonElements<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ElementsVisitor;
        impl<'de> Visitor<'de> for ElementsVisitor {
            type Value = JsonElements<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut elements = Vec::new();
                while elements.len() <= MAX_BACKENDS as usize
                    && let Some(element) = list.next_element()?
                {
                    elements.push(element);
                }
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(JsonElements(elements))
            }
        }
        deserializer.deserialize_seq(ElementsVisitor)
    }
}

/// The members of an object in their order, with keys as slices of the text. Contains at most one
/// member beyond the maximum, so that a fault can report the position of that member.
pub struct JsonMembers<'t>(Vec<(&'t RawValue, &'t RawValue)>);

impl<'de> Deserialize<'de> for JsonMembers<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MembersVisitor;
        impl<'de> Visitor<'de> for MembersVisitor {
            type Value = JsonMembers<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while members.len() <= MAX_MEMBERS
                    && let Some(member) = map.next_entry()?
                {
                    members.push(member);
                }
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(JsonMembers(members))
            }
        }
        deserializer.deserialize_map(MembersVisitor)
    }
}
