//! Keys of a document: one row for each, which gives what is accepted, what is refused, and what the pages say.
//!
//! The rows of the configuration are in `crates/lb-config/src/keys.rs`, those of endpoint files beside their reader. What a value decides
//! is not known here.

use std::ops::Range;

use super::kind::ValueKind;
use super::{Item, Table};
use crate::diagnostic::DiagnosticCollector;

/// What a key means that is not written.
pub enum Unset<V> {
    /// It must be written.
    Required,
    /// The same as this value.
    Is(V),
    /// No value, in words.
    Means(&'static str),
}

/// A key, with all that is to be said of it.
pub struct ConfigKey<K: ValueKind> {
    /// As it is written.
    pub name: &'static str,
    /// What its value may be.
    pub kind: K,
    /// What it means that it is not written.
    pub unset: Unset<K::Value>,
    /// What it decides, as pages have it.
    pub text: &'static str,
}

impl<K: ValueKind> ConfigKey<K> {
    /// The item, if the key is written. If it is not and is required, that is reported.
    pub fn item<'t>(&self, table: &Table<'t>, report: &mut DiagnosticCollector<'_>) -> Option<Item<'t>> {
        let item = table.get(self.name);
        if item.is_none() && matches!(self.unset, Unset::Required) {
            let message = format!("{} is missing in {}", self.name, table.what);
            let help = format!("write {} = {}", self.name, self.kind.values().join(" or "));
            report.add_absent(table.span(), message, help);
        }
        item
    }

    /// Whether it is written, rightly or not.
    pub fn is_written(&self, table: &Table<'_>) -> bool {
        table.get(self.name).is_some()
    }

    /// The value of a key that has one even if it is not written.
    pub fn default(&self) -> K::Value {
        match &self.unset {
            Unset::Is(value) => value.clone(),
            Unset::Required | Unset::Means(_) => unreachable!("the row of {} has no value", self.name),
        }
    }

    /// The value, written or not; `None` if it is wrong or missing, which is reported.
    pub fn take(&self, table: &Table<'_>, report: &mut DiagnosticCollector<'_>) -> Option<K::Value> {
        match self.item(table, report) {
            Some(item) => self.kind.read(&item, report),
            None if matches!(self.unset, Unset::Required) => None,
            None => Some(self.default()),
        }
    }

    /// The value if it is written, and where it stands; `None` also if it is wrong, which is reported.
    pub fn take_at(
        &self,
        table: &Table<'_>,
        report: &mut DiagnosticCollector<'_>,
    ) -> Option<(K::Value, Range<usize>)> {
        let item = self.item(table, report)?;
        Some((self.kind.read(&item, report)?, item.span()))
    }

    /// The value if it is written; the outer `None` if it is wrong, which is reported.
    pub fn take_written(
        &self,
        table: &Table<'_>,
        report: &mut DiagnosticCollector<'_>,
    ) -> Option<Option<K::Value>> {
        match table.get(self.name) {
            Some(item) => self.kind.read(&item, report).map(Some),
            None => Some(None),
        }
    }

    /// The value, or its default also where it is wrong, which is reported.
    pub fn take_or_default(&self, table: &Table<'_>, report: &mut DiagnosticCollector<'_>) -> K::Value {
        self.take(table, report).unwrap_or_else(|| self.default())
    }
}

/// A key as pages show it.
pub trait DocumentedKey: Sync {
    /// As it is written.
    fn name(&self) -> &'static str;
    /// In Markdown: what may be written, what is the default, and what the key decides.
    fn cells(&self) -> [String; 3];
}

impl<K: ValueKind> DocumentedKey for ConfigKey<K> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cells(&self) -> [String; 3] {
        let values: Vec<_> = self.kind.values().iter().map(|value| format!("`{value}`")).collect();
        let unset = match &self.unset {
            Unset::Required => "required".to_owned(),
            Unset::Is(value) => format!("`{}`", self.kind.written(value)),
            Unset::Means(words) => (*words).to_owned(),
        };
        [values.join(", "), unset, self.text.to_owned()]
    }
}

/// A table with its keys.
pub struct Section {
    /// Its header, `[[name]]` or `[name]`; or the keys whose value it is, `key` or `key.key`.
    pub header: &'static str,
    /// What messages call it.
    pub what: &'static str,
    /// What pages say of it.
    pub text: &'static str,
    /// Its keys, in the order of pages and messages.
    pub rows: &'static [&'static dyn DocumentedKey],
    /// Keys that it had once, and what to write now.
    pub gone: &'static [(&'static str, &'static str)],
}

impl Section {
    /// The key whose value it is.
    pub fn name(&self) -> &'static str {
        let path = self.header.trim_matches(['[', ']']);
        path.rsplit_once('.').map_or(path, |(_, last)| last)
    }

    /// The names of its keys.
    pub fn keys(&self) -> Vec<&'static str> {
        self.rows.iter().map(|row| row.name()).collect()
    }

    /// Its keys as pages name them, with their cells.
    fn entries(&self) -> impl Iterator<Item = (String, [String; 3])> {
        let prefix = if self.header.starts_with('[') { String::new() } else { format!("{}.", self.header) };
        self.rows.iter().map(move |row| (format!("{prefix}{}", row.name()), row.cells()))
    }
}

/// The keys of a table as pages name them, with their cells; behind a key those of the table that is its value.
pub fn entries(sections: &[&Section]) -> Vec<(String, [String; 3])> {
    let mut entries: Vec<(String, [String; 3])> = Vec::new();
    for section in sections {
        let outer = entries.iter().position(|(key, _)| key == section.header);
        let at = outer.map_or(entries.len(), |position| position + 1);
        entries.splice(at..at, section.entries());
    }
    entries
}

/// The keys of a table in Markdown.
pub fn markdown(sections: &[&Section]) -> String {
    let mut text = String::from("| key | value | default | meaning |\n|---|---|---|---|\n");
    for (key, cells) in entries(sections) {
        text += &format!("| `{key}` | {} |\n", cells.join(" | "));
    }
    text
}

/// Defines a module with a constant for each key, and their [`Section`].
#[macro_export]
macro_rules! section {
    (
        $module:ident, $header:literal, $what:literal, $text:expr $(, gone $gone:literal: $instead:literal)*;
        $($key:ident $name:literal: $kind:ident $(<$of:ty>)? ($($limits:tt)*), $unset:expr, $about:expr;)*
    ) => {
        #[doc = concat!("The keys of `", $header, "`.")]
        pub mod $module {
            use super::*;

            $(pub static $key: ConfigKey<$kind $(<$of>)?> =
                ConfigKey { name: $name, kind: $kind($($limits)*), unset: $unset, text: $about };)*

            pub static SECTION: Section =
                Section { header: $header, what: $what, text: $text, rows: &[$(&$key),*], gone: &[$(($gone, $instead)),*] };
        }
    };
}
