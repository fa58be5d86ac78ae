//! JSON as slices of its text, looked into level by level: a parser into values would forget where each stands.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use lb_common::abi::MAX_BACKENDS;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;

use lb_document::diagnostic::{Report, quote};
use lb_document::{NotAnAddress, parse_address};

/// A value as a slice of the text, not looked into yet.
#[derive(Clone, Copy)]
pub struct Value<'t> {
    pub name: &'static str,
    pub text: &'t str,
    pub raw: &'t RawValue,
}

pub struct Key {
    pub name: String,
    pub span: Range<usize>,
}

impl Key {
    pub fn as_str(&self) -> &str {
        &self.name
    }
}

impl<'t> Value<'t> {
    pub fn span(&self) -> Range<usize> {
        let start = self.raw.get().as_ptr().addr() - self.text.as_ptr().addr();
        start..start + self.raw.get().len()
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

    // The whole text was parsed once, so what fails here is the kind, or a string that is no text.
    pub fn parse<T: Deserialize<'t>>(
        &self,
        name: &str,
        expected: &str,
        report: &mut Report<'_>,
    ) -> Option<T> {
        let value = serde_json::from_str(self.raw.get());
        if value.is_err() && self.kind() == expected {
            report.add(self.span(), format!("{} is not text", self.raw.get()), None);
        } else if value.is_err() {
            let help = (expected == "a string").then(|| format!("write \"{}\"", self.raw.get()));
            let help = help.filter(|_| self.kind() == "a number");
            report.add(self.span(), format!("{name} must be {expected}, not {}", self.kind()), help);
        }
        value.ok()
    }

    pub fn text_of(&self, name: &str, report: &mut Report<'_>) -> Option<String> {
        self.parse(name, "a string", report)
    }

    /// The elements, and of those past the limit the first.
    pub fn list(&self, report: &mut Report<'_>) -> Option<Vec<Self>> {
        let Elements(elements) = self.parse(self.name, "a list", report)?;
        Some(elements.into_iter().map(|raw| Self { raw, ..*self }).collect())
    }

    pub fn members(&self, report: &mut Report<'_>) -> Option<Vec<(Key, Self)>> {
        let Members(raw_members) = self.parse(self.name, "an object", report)?;
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
                report.add(key.span(), format!("key {} is there twice", quote(&name)), None);
            }
            members.push((Key { name, span: key.span() }, Self { raw, ..*self }));
        }
        Some(members)
    }

    pub fn address(&self, report: &mut Report<'_>) -> Option<std::net::SocketAddr> {
        let text = self.text_of(self.name, report)?;
        match parse_address(&text) {
            Ok(address) => Some(address),
            Err(NotAnAddress { why, help }) => {
                report.add(self.span(), format!("{} {} {why}", self.name, quote(&text)), help);
                None
            }
        }
    }
}

/// Keys of one object: labels that socklb does not know are allowed, and a service discovery may give some dozens.
pub const MAX_MEMBERS: usize = 1024;

/// The elements of a list as slices of the text: as many as matter, and one more for its position.
pub struct Elements<'t>(Vec<&'t RawValue>);

impl<'de> Deserialize<'de> for Elements<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Elements<'de>;

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
                Ok(Elements(elements))
            }
        }
        deserializer.deserialize_seq(InOrder)
    }
}

/// The members of an object, with their keys as slices of the text, in their order: as many as matter, and one more.
pub struct Members<'t>(Vec<(&'t RawValue, &'t RawValue)>);

impl<'de> Deserialize<'de> for Members<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;

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
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}
