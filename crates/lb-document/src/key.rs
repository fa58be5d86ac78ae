//! The keys of a document. Each key has one row: its accepted values, its default, and its text on
//! the documentation pages.
//!
//! The rows of the configuration are in `crates/lb-config/src/keys.rs`. The rows of endpoint files
//! are in the module that reads these files. This module does not depend on the effects of values.

use std::ops::Range;

use super::kind::ValueKind;
use super::{Item, Table};

/// The effect if a file does not contain the key.
pub enum Unset<V> {
    /// The key must be written.
    Required,
    /// The default value.
    Is(V),
    /// There is no default value; the text describes the effect.
    Means(&'static str),
}

pub struct ConfigKey<K: ValueKind> {
    pub name: &'static str,
    pub kind: K,
    pub unset: Unset<K::Value>,
    /// The effect of the key, for documentation pages.
    pub text: &'static str,
}

impl<K: ValueKind> ConfigKey<K> {
    /// The value of the key in the table; `None` if the key is not written. Reports a fault if the
    /// key is required and missing.
    pub fn item<'t>(&self, table: &Table<'t>) -> Option<Item<'t>> {
        let item = table.get(self.name);
        if item.is_none() && matches!(self.unset, Unset::Required) {
            let message = format!("{} is missing in {}", self.name, table.what);
            let help = format!("write {} = {}", self.name, self.kind.values().join(" or "));
            table.absent(message, help);
        }
        item
    }

    /// Returns whether the key is written, even if its value is wrong.
    pub fn is_written(&self, table: &Table<'_>) -> bool {
        table.get(self.name).is_some()
    }

    /// The default value. Panics if the key has none.
    pub fn default(&self) -> K::Value {
        match &self.unset {
            Unset::Is(value) => value.clone(),
            Unset::Required | Unset::Means(_) => unreachable!("the key {} has no default value", self.name),
        }
    }

    /// The written value, or the default. If the value is wrong, or a required key is missing,
    /// reports a fault and returns `None`.
    pub fn take(&self, table: &Table<'_>) -> Option<K::Value> {
        match self.item(table) {
            Some(item) => self.kind.read(&item),
            None if matches!(self.unset, Unset::Required) => None,
            None => Some(self.default()),
        }
    }

    /// The written value and its position. `None` if the key is not written. If the value is wrong,
    /// reports a fault and returns `None`.
    pub fn take_at(&self, table: &Table<'_>) -> Option<(K::Value, Range<usize>)> {
        let item = self.item(table)?;
        Some((self.kind.read(&item)?, item.span()))
    }

    /// The written value; `Some(None)` if the key is not written. If the value is wrong, reports a
    /// fault and returns `None`.
    pub fn take_written(&self, table: &Table<'_>) -> Option<Option<K::Value>> {
        match table.get(self.name) {
            Some(item) => self.kind.read(&item).map(Some),
            None => Some(None),
        }
    }

    /// The written value, or the default. If the value is wrong, reports a fault and returns the
    /// default.
    pub fn take_or_default(&self, table: &Table<'_>) -> K::Value {
        self.take(table).unwrap_or_else(|| self.default())
    }
}

/// A key as documentation pages show it.
pub trait DocumentedKey: Sync {
    fn name(&self) -> &'static str;
    /// Three cells in Markdown: the accepted values, the default, and the effect of the key.
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

pub struct Section {
    /// The header of the section: `[[name]]` or `[name]`. If the section is the value of a key: the
    /// path of the key, `key` or `key.key`.
    pub header: &'static str,
    /// The section's name in messages.
    pub what: &'static str,
    /// The section's description on documentation pages.
    pub text: &'static str,
    /// The section's keys, in the order in which pages and messages list them.
    pub rows: &'static [&'static dyn DocumentedKey],
    /// Former keys, each with the correction.
    pub gone: &'static [(&'static str, &'static str)],
}

impl Section {
    /// The name of the table, or of the key that has this section as its value.
    pub fn name(&self) -> &'static str {
        let path = self.header.trim_matches(['[', ']']);
        path.rsplit_once('.').map_or(path, |(_, last)| last)
    }

    pub fn keys(&self) -> Vec<&'static str> {
        self.rows.iter().map(|row| row.name()).collect()
    }

    /// The section's keys as documentation pages show them, each with [`DocumentedKey::cells`].
    fn entries(&self) -> impl Iterator<Item = (String, [String; 3])> {
        let prefix = if self.header.starts_with('[') { String::new() } else { format!("{}.", self.header) };
        self.rows.iter().map(move |row| (format!("{prefix}{}", row.name()), row.cells()))
    }
}

/// The keys of a table as documentation pages show them, each with [`DocumentedKey::cells`]. If the
/// value of a key is a table, that table's keys follow the key.
pub fn entries(sections: &[&Section]) -> Vec<(String, [String; 3])> {
    let mut entries: Vec<(String, [String; 3])> = Vec::new();
    for section in sections {
        let outer = entries.iter().position(|(key, _)| key == section.header);
        let at = outer.map_or(entries.len(), |position| position + 1);
        entries.splice(at..at, section.entries());
    }
    entries
}

/// The keys of a table as a Markdown table.
pub fn markdown(sections: &[&Section]) -> String {
    let mut text = String::from("| key | value | default | meaning |\n|---|---|---|---|\n");
    for (key, cells) in entries(sections) {
        text += &format!("| `{key}` | {} |\n", cells.join(" | "));
    }
    text
}

/// Reads the fields of a structure from the keys of a table, and returns the structure. Reports all
/// wrong values; if there are any, returns `None`. A field is `KEY`, `[KEY]` if its value is `None`
/// without the key, or an expression in parentheses, whose `None` means that the field has no
/// value. For example, this reads the keys `interval` and `port`, of which `port` may be absent:
///
/// ```ignore
/// let rules = fill!(&table, Rules { interval: INTERVAL, port: [PORT], name: (name) })?;
/// ```
#[macro_export]
macro_rules! fill {
    (@read $table:expr, [$key:expr]) => { $key.take_written($table) };
    (@read $table:expr, ($value:expr)) => { $value };
    (@read $table:expr, $key:tt) => { $key.take($table) };
    ($table:expr, $($type:ident)::+ { $($field:ident: $source:tt),* $(,)? }) => {
        match ($($crate::fill!(@read $table, $source),)*) {
            ($(Some($field),)*) => Some($($type)::+ { $($field),* }),
            _ => None,
        }
    };
}

/// Defines a module that has a constant for each key, and the [`Section`] of these keys. The tables
/// of lb-config's `keys.rs` are examples.
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
