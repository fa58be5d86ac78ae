//! Reads an endpoint file in TOML as events, using only as much memory as its entries need.
//!
//! A tree of a whole file needs a hundred bytes for each byte of the file, whatever the file
//! contains. So this reader stores only the values of entries, and at most one entry more than a
//! service may have. For a list or a table inside an entry, which no entry may have, the reader
//! records only that the value exists. The callers interpret keys and values.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};
use toml_parser::decoder::{Encoding, ScalarKind};
use toml_parser::parser::{EventReceiver, RecursionGuard, ValidateWhitespace, parse_document};
use toml_parser::{ErrorSink, Expected, ParseError, Source, Span};

use lb_document as document;
use lb_document::diagnostic::{DiagnosticCollector, MAX_FAULTS};

/// The key of the list of entries.
const ENTRIES: &str = "endpoint";

/// The maximum number of tokens in a file. A file with the maximum number of endpoints of a
/// service, each with all keys, has 650,000 tokens.
const MAX_TOKENS: usize = 1 << 20;

/// The maximum number of keys stored for one table. A table with more keys is not an entry.
const MAX_KEYS: usize = 32;

/// The maximum nesting of lists and tables. The TOML library has the same limit.
const MAX_DEPTH: u32 = 80;

/// Parses a file and stores at most `limit` + 1 entries. Syntax faults are reported. The return
/// value contains everything that could be read.
pub fn read<'t>(text: &'t str, limit: usize, report: &DiagnosticCollector<'_>) -> DeTable<'t> {
    let source = Source::new(text);
    let mut tokens = Vec::new();
    for token in source.lex() {
        if tokens.len() == MAX_TOKENS {
            let (at, message) = (token.span().start(), format!("the file has more than {MAX_TOKENS} tokens"));
            report.add_syntax(at..at, message, Some(format!("a service has at most {limit} endpoints")));
            return DeTable::new();
        }
        tokens.push(token);
    }
    let mut errors = SyntaxErrors::default();
    let mut reader = Reader::new(source, limit);
    {
        let mut checked = ValidateWhitespace::new(&mut reader, source);
        let mut bounded = RecursionGuard::new(&mut checked, MAX_DEPTH);
        parse_document(&tokens, &mut bounded, &mut errors);
    }
    drop(tokens);
    let root = reader.finish();
    // If the file is not an endpoint file, every byte may cause a fault. So for a long file, only
    // the first fault is reported.
    let is_long = text.len() > document::MAX_RECOVERED_BYTES && !errors.list.is_empty();
    if is_long {
        errors.list.truncate(1);
    } else {
        report.leave_off(errors.left_off);
    }
    for error in errors.list {
        let span = error.unexpected().map_or(text.len()..text.len(), range);
        document::add_syntax(span, &message(&error), report);
    }
    if is_long { DeTable::new() } else { root }
}

/// The syntax faults that are reported, and the number of further syntax faults.
#[derive(Default)]
struct SyntaxErrors {
    list: Vec<ParseError>,
    left_off: usize,
}

impl ErrorSink for SyntaxErrors {
    fn report_error(&mut self, error: ParseError) {
        if self.list.len() < MAX_FAULTS {
            self.list.push(error);
        } else {
            self.left_off += 1;
        }
    }
}

/// Describes a syntax fault in the same words as the TOML library.
fn message(error: &ParseError) -> String {
    let literal = |literal: &str| match literal {
        "\n" => "newline".to_owned(),
        "`" => "'`'".to_owned(),
        text if text.chars().all(|c| c.is_ascii_control()) => format!("`{}`", text.escape_debug()),
        text => format!("`{text}`"),
    };
    let word = |expected: &Expected| match expected {
        Expected::Literal(text) => literal(text),
        Expected::Description(text) => (*text).to_owned(),
        _ => "etc".to_owned(),
    };
    match error.expected() {
        None | Some([]) => error.description().to_owned(),
        Some(expected) => {
            let words: Vec<String> = expected.iter().map(word).collect();
            format!("{}, expected {}", error.description(), words.join(", "))
        }
    }
}

fn range(span: Span) -> Range<usize> {
    span.start()..span.end()
}

type Key = Spanned<String>;

/// An unfinished table or list within a value.
enum OpenContainer<'t> {
    /// The list of entries.
    Entries(usize),
    /// An entry in the list of entries, and the key of the value that comes next.
    Entry(usize, DeTable<'t>, Vec<Key>),
    /// Any other container. The caller does not read its content.
    Other(usize, DeValue<'t>),
}

/// The table of the last header. Keys belong to it while no container is open.
enum CurrentTable<'t> {
    Root,
    /// An entry with this header.
    Entry(Range<usize>, DeTable<'t>),
    /// A table with a header that is not an entry.
    Other,
}

struct Reader<'t> {
    source: Source<'t>,
    limit: usize,
    /// Everything except the entries.
    root: DeTable<'t>,
    entries: Option<(Range<usize>, DeArray<'t>)>,
    /// Whether the entries are the value of a key, `endpoint = [..]`, instead of tables with
    /// headers.
    is_value: bool,
    section: CurrentTable<'t>,
    /// An unfinished header: its start, whether it has double brackets, and its keys.
    header: Option<(Span, bool, Vec<Key>)>,
    /// The key of the value that comes next, if no container is open.
    key: Vec<Key>,
    /// Whether the next key follows a dot, and so continues the previous key.
    is_dotted: bool,
    open: Vec<OpenContainer<'t>>,
}

impl<'t> Reader<'t> {
    fn new(source: Source<'t>, limit: usize) -> Self {
        Self {
            source,
            limit,
            root: DeTable::new(),
            entries: None,
            is_value: false,
            section: CurrentTable::Root,
            header: None,
            key: Vec::new(),
            is_dotted: false,
            open: Vec::new(),
        }
    }

    /// Returns what was read, and closes every container that a truncated file left open.
    fn finish(mut self) -> DeTable<'t> {
        let end = self.source.input().len();
        // Bound: each iteration closes one container.
        while !self.open.is_empty() {
            self.close(Span::new_unchecked(end, end), &mut ());
        }
        self.end_section();
        if let Some((span, entries)) = self.entries {
            let key = Spanned::new(span.clone(), ENTRIES.into());
            self.root.insert(key, Spanned::new(span, DeValue::Array(entries)));
        }
        self.root
    }

    fn end_section(&mut self) {
        if let CurrentTable::Entry(span, table) = std::mem::replace(&mut self.section, CurrentTable::Other) {
            self.add_entry(Spanned::new(span, DeValue::Table(table)));
        }
    }

    fn add_entry(&mut self, entry: Spanned<DeValue<'t>>) {
        let (_, entries) = self.entries.get_or_insert_with(|| (entry.span(), DeArray::new()));
        // One entry beyond the limit is stored so that its position can be reported.
        if entries.len() <= self.limit {
            entries.push(entry);
        }
    }

    /// Handles a complete header.
    fn begin_section(&mut self, span: Span, is_list: bool, keys: &[Key], error: &mut dyn ErrorSink) {
        self.end_section();
        self.key.clear();
        let Some(first) = keys.first() else { return };
        let empty = || if is_list { DeValue::Array(DeArray::new()) } else { DeValue::Table(DeTable::new()) };
        let is_entries = first.get_ref() == ENTRIES;
        match keys {
            [_, _, ..] if is_entries && self.is_value => {
                error.report_error(
                    ParseError::new("cannot extend value of type array with a dotted key")
                        .with_unexpected(Span::new_unchecked(first.span().start, first.span().end)),
                );
            }
            [_] if is_entries && is_list && !self.is_value && !self.root.contains_key(ENTRIES) => {
                self.section = CurrentTable::Entry(range(span), DeTable::new());
            }
            // A table within the previous entry. An entry may not contain a table.
            [_, second, ..] if is_entries && self.entries.is_some() => {
                let entries = self.entries.as_mut().and_then(|(_, entries)| entries.last_mut());
                if let Some(DeValue::Table(table)) = entries.map(Spanned::get_mut) {
                    insert(table, std::slice::from_ref(second), Spanned::new(range(span), empty()), error);
                }
            }
            [_] if is_entries && self.entries.is_some() => duplicate(first, error),
            [_] => {
                insert(
                    &mut self.root,
                    std::slice::from_ref(first),
                    Spanned::new(range(span), empty()),
                    error,
                );
            }
            // This table has no header of its own, so a later header may define it.
            _ if self.root.contains_key(first.get_ref().as_str()) => {}
            _ => {
                let table = DeValue::Table(DeTable::new());
                insert(&mut self.root, std::slice::from_ref(first), Spanned::new(first.span(), table), error);
            }
        }
    }

    /// Handles a complete value.
    fn value(&mut self, value: Spanned<DeValue<'t>>, error: &mut dyn ErrorSink) {
        match self.open.last_mut() {
            Some(OpenContainer::Entries(_)) => self.add_entry(value),
            Some(OpenContainer::Entry(_, table, key)) => insert(table, &std::mem::take(key), value, error),
            Some(OpenContainer::Other(..)) => {}
            None => {
                let key = std::mem::take(&mut self.key);
                match &mut self.section {
                    CurrentTable::Entry(_, table) => insert(table, &key, value, error),
                    CurrentTable::Root => insert(&mut self.root, &key, value, error),
                    CurrentTable::Other => {}
                }
            }
        }
    }

    fn close(&mut self, span: Span, error: &mut dyn ErrorSink) {
        match self.open.pop() {
            Some(OpenContainer::Entries(start)) => {
                let (at, _) = self.entries.get_or_insert_with(|| (0..0, DeArray::new()));
                *at = start..span.end();
                self.is_value = true;
                self.key.clear();
            }
            Some(OpenContainer::Entry(start, table, _)) => {
                self.value(Spanned::new(start..span.end(), DeValue::Table(table)), error);
            }
            Some(OpenContainer::Other(start, value)) => {
                self.value(Spanned::new(start..span.end(), value), error);
            }
            None => {}
        }
    }
}

fn duplicate(key: &Key, error: &mut dyn ErrorSink) {
    let span = Span::new_unchecked(key.span().start, key.span().end);
    error.report_error(ParseError::new("duplicate key").with_unexpected(span));
}

/// Inserts a value under a key. For a dotted key, inserts an empty table under the first part of
/// the key, because the callers do not read that table's content.
fn insert<'t>(table: &mut DeTable<'t>, key: &[Key], value: Spanned<DeValue<'t>>, error: &mut dyn ErrorSink) {
    let Some(first) = key.first() else { return };
    let name = first.get_ref().as_str();
    if let Some(there) = table.get(name) {
        let is_same_table = key.len() > 1 && there.get_ref().is_table();
        if !is_same_table {
            duplicate(first, error);
        }
        return;
    }
    if table.len() >= MAX_KEYS {
        return;
    }
    let value =
        if key.len() > 1 { Spanned::new(first.span(), DeValue::Table(DeTable::new())) } else { value };
    table.insert(Spanned::new(first.span(), name.to_owned().into()), value);
}

impl EventReceiver for Reader<'_> {
    fn std_table_open(&mut self, span: Span, _: &mut dyn ErrorSink) {
        self.header = Some((span, false, Vec::new()));
    }

    fn array_table_open(&mut self, span: Span, _: &mut dyn ErrorSink) {
        self.header = Some((span, true, Vec::new()));
    }

    fn std_table_close(&mut self, span: Span, error: &mut dyn ErrorSink) {
        if let Some((open, is_list, keys)) = self.header.take() {
            self.begin_section(open.append(span), is_list, &keys, error);
        }
    }

    fn array_table_close(&mut self, span: Span, error: &mut dyn ErrorSink) {
        self.std_table_close(span, error);
    }

    fn inline_table_open(&mut self, span: Span, _: &mut dyn ErrorSink) -> bool {
        let open = match self.open.last() {
            Some(OpenContainer::Entries(_)) => OpenContainer::Entry(span.start(), DeTable::new(), Vec::new()),
            _ => OpenContainer::Other(span.start(), DeValue::Table(DeTable::new())),
        };
        self.open.push(open);
        true
    }

    fn inline_table_close(&mut self, span: Span, error: &mut dyn ErrorSink) {
        self.close(span, error);
    }

    fn array_open(&mut self, span: Span, error: &mut dyn ErrorSink) -> bool {
        let is_of_entries = self.open.is_empty()
            && matches!(self.section, CurrentTable::Root)
            && matches!(&self.key[..], [key] if key.get_ref() == ENTRIES);
        let open = if is_of_entries && self.entries.is_none() && !self.root.contains_key(ENTRIES) {
            OpenContainer::Entries(span.start())
        } else {
            if is_of_entries && let Some(key) = self.key.first() {
                duplicate(key, error);
                self.key.clear();
            }
            OpenContainer::Other(span.start(), DeValue::Array(DeArray::new()))
        };
        self.open.push(open);
        true
    }

    fn array_close(&mut self, span: Span, error: &mut dyn ErrorSink) {
        self.close(span, error);
    }

    fn simple_key(&mut self, span: Span, encoding: Option<Encoding>, error: &mut dyn ErrorSink) {
        let mut name = std::borrow::Cow::Borrowed("");
        let Some(raw) = self.source.get(span) else { return };
        let raw = toml_parser::Raw::new_unchecked(raw.as_str(), encoding, span);
        raw.decode_key(&mut name, error);
        let is_dotted = std::mem::take(&mut self.is_dotted);
        let path = match (&mut self.header, self.open.last_mut()) {
            (Some((_, _, keys)), _) => keys,
            (None, Some(OpenContainer::Entry(_, _, key))) => key,
            (None, None) => &mut self.key,
            (None, Some(OpenContainer::Entries(_) | OpenContainer::Other(..))) => return,
        };
        if !is_dotted {
            path.clear();
        }
        // No entry has a key of three parts, so further parts are not stored.
        if path.len() < 3 {
            path.push(Spanned::new(range(span), name.into_owned()));
        }
    }

    fn key_sep(&mut self, _: Span, _: &mut dyn ErrorSink) {
        self.is_dotted = true;
    }

    fn scalar(&mut self, span: Span, encoding: Option<Encoding>, error: &mut dyn ErrorSink) {
        let mut text = std::borrow::Cow::Borrowed("");
        let Some(raw) = self.source.get(span) else { return };
        let written = raw.as_str();
        let kind = toml_parser::Raw::new_unchecked(written, encoding, span).decode_scalar(&mut text, error);
        // The decoder has already reported a text that is not a number.
        let parsed = || DeValue::parse(written).map(Spanned::into_inner);
        let value = match kind {
            ScalarKind::String => DeValue::String(text),
            ScalarKind::Boolean(value) => DeValue::Boolean(value),
            ScalarKind::DateTime => match parsed() {
                Ok(value) => value,
                Err(fault) => {
                    let fault = ParseError::new(fault.message().to_owned());
                    error.report_error(fault.with_unexpected(span));
                    return;
                }
            },
            ScalarKind::Integer(_) => parsed().unwrap_or(DeValue::Integer(Default::default())),
            ScalarKind::Float => parsed().unwrap_or(DeValue::Float(Default::default())),
        };
        self.value(Spanned::new(range(span), value), error);
    }
}

#[cfg(test)]
mod tests;
