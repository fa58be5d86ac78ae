//! Faults of a file: what is wrong, at which position, and the correction.
//!
//! To repair a file, an operator needs all its faults at once, each with line and column. A fault
//! is shown in one line for a log, or with its source line and a caret for a terminal. This module
//! does not depend on the content of the file.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::{self, Display, Formatter};
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::control::{escaped, is_obeyed};

/// The maximum number of faults stored for one file. A file with more faults is probably a file of
/// another kind.
pub const MAX_FAULTS: usize = 100;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    pub path: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// The column, in characters, from 1.
    pub column: usize,
    /// Byte offsets in the file.
    pub span: Range<usize>,
    /// The fault, with the wrong value.
    pub message: String,
    /// The correction, if there is one.
    pub help: Option<String>,
    excerpt: Excerpt,
}

/// All faults of a file, in the order of the file. There is at least one fault. Faults beyond
/// [`MAX_FAULTS`] are only counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostics {
    list: Vec<Diagnostic>,
    left_off: usize,
}

impl Diagnostics {
    /// The faults, one per line, without paths and positions: for a text that no operator can see.
    pub fn without_positions(&self) -> impl Display {
        fmt::from_fn(move |f| {
            for (position, fault) in self.list.iter().enumerate() {
                f.write_str(if position == 0 { "" } else { "\n" })?;
                fault.write_message(f)?;
            }
            match self.left_off {
                0 => Ok(()),
                more => write!(f, "\nand {more} more"),
            }
        })
    }

    /// The faults for a terminal. The text of each fault has several lines, including the source
    /// line and a caret.
    pub fn terminal(&self, colour: bool) -> impl Display {
        fmt::from_fn(move |f| {
            for fault in &self.list {
                fault.write_terminal(f, colour)?;
            }
            if self.left_off > 0 {
                writeln!(f, "and {} more", self.left_off)?;
            }
            Ok(())
        })
    }
}

/// One line per fault, for logs.
impl Display for Diagnostics {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (position, fault) in self.list.iter().enumerate() {
            let separator = if position == 0 { "" } else { "\n" };
            write!(f, "{separator}{fault}")?;
        }
        if self.left_off > 0 {
            write!(f, "\nand {} more", self.left_off)?;
        }
        Ok(())
    }
}

impl Error for Diagnostics {}

impl Display for Diagnostic {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: ", self.shown_path(), self.line, self.column)?;
        self.write_message(f)
    }
}

impl Diagnostic {
    fn write_message(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.help {
            Some(help) => write!(f, " ({help})"),
            None => Ok(()),
        }
    }

    fn shown_path(&self) -> String {
        escaped(&self.path.to_string_lossy()).into_owned()
    }

    // This code does not use `annotate-snippets` (0.12), for two reasons. That crate computes the
    // column from the whole source line, which takes 40 ms per fault if the file is one line of 4
    // MiB of JSON. It also passes U+009B, which begins an escape sequence, to the terminal.
    fn write_terminal(&self, f: &mut Formatter<'_>, colour: bool) -> fmt::Result {
        let (red, blue, bold, plain) =
            if colour { ("\x1b[1;31m", "\x1b[34m", "\x1b[1m", "\x1b[0m") } else { ("", "", "", "") };
        let line = self.line.to_string();
        let gutter = " ".repeat(line.len());
        let before = " ".repeat(self.excerpt.before);
        let caret = "^".repeat(self.excerpt.width);
        writeln!(f, "{red}error{plain}: {bold}{}{plain}", self.message)?;
        writeln!(f, "{gutter}{blue}-->{plain} {}:{}:{}", self.shown_path(), self.line, self.column)?;
        writeln!(f, "{gutter} {blue}|{plain}")?;
        writeln!(f, "{blue}{line} |{plain} {}", self.excerpt.text)?;
        writeln!(f, "{gutter} {blue}|{plain} {before}{red}{caret}{plain}")?;
        if let Some(help) = &self.help {
            writeln!(f, "{gutter} {blue}={plain} help: {help}")?;
        }
        writeln!(f)
    }
}

/// The shown part of a source line, without characters that control a terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Excerpt {
    text: String,
    before: usize,
    width: usize,
}

/// The number of bytes of a line that are shown before and after the start of a fault. These
/// numbers are limited because a JSON file may be a single line.
const EXCERPT_BYTES: Range<usize> = 60..100;

impl Excerpt {
    fn new(line: &str, span: Range<usize>) -> Self {
        let from = line.floor_char_boundary(span.start.saturating_sub(EXCERPT_BYTES.start));
        let to = line.ceil_char_boundary((span.start + EXCERPT_BYTES.end).min(line.len()));
        let mark = |cut| if cut { "…" } else { "" };
        let shown: String = line[from..to].chars().map(printable).collect();
        let text = format!("{}{shown}{}", mark(from > 0), mark(to < line.len()));
        let before = line[from..span.start].chars().count() + usize::from(from > 0);
        let width = line[span.start..span.end.clamp(span.start, to)].chars().count().max(1);
        Self { text, before, width }
    }
}

// Replaces a character that controls a terminal: escape sequences in a file must not reach the
// terminal, and a tab would move the caret.
fn printable(character: char) -> char {
    match character {
        '\t' => ' ',
        character if is_obeyed(character) => '\u{fffd}',
        character => character,
    }
}

/// Quotes a value from a file for a message: escapes it, and truncates it if it is long.
pub fn quote(text: &str) -> String {
    const LONGEST: usize = 80;
    if text.len() <= LONGEST {
        return format!("{text:?}");
    }
    format!("{:?}…", &text[..text.floor_char_boundary(LONGEST)])
}

/// Collects the faults of one file while a reader reads it. Every table and value of the file has a
/// shared reference to the collector.
pub struct DiagnosticCollector<'t> {
    path: &'t Path,
    text: &'t str,
    line_starts: Vec<usize>,
    /// The lines that could not be parsed. Other faults in these lines are dropped.
    broken: RefCell<BTreeSet<usize>>,
    faults: RefCell<Vec<Diagnostic>>,
    left_off: Cell<usize>,
}

impl<'t> DiagnosticCollector<'t> {
    /// Creates an empty collection for the file at `path` with the content `text`.
    pub fn new(path: &'t Path, text: &'t str) -> Self {
        let line_starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        let (broken, faults, left_off) = Default::default();
        Self { path, text, line_starts, broken, faults, left_off }
    }

    /// The line in which a span begins, from 1.
    pub fn line(&self, span: &Range<usize>) -> usize {
        self.line_starts.partition_point(|start| *start <= span.start)
    }

    /// Where a span begins, for a message about another place: its line, or its column if it is in
    /// the same line. A list in JSON often is one line.
    pub fn place(&self, span: &Range<usize>, of_message: &Range<usize>) -> String {
        match self.line(span) {
            // The message is only counted, and the columns of a long line take time.
            _ if self.faults.borrow().len() == MAX_FAULTS => String::new(),
            line if line == self.line(of_message) => format!("in column {} of this line", self.column(span)),
            line => format!("on line {line}"),
        }
    }

    /// The column in which a span begins, from 1.
    fn column(&self, span: &Range<usize>) -> usize {
        let line_start = self.line_starts[self.line(span) - 1];
        self.text[line_start..self.text.floor_char_boundary(span.start)].chars().count() + 1
    }

    /// Reports that the text could not be parsed at `span`.
    pub fn add_syntax(&self, span: Range<usize>, message: impl Into<String>, help: Option<String>) {
        self.broken.borrow_mut().insert(self.line(&span));
        self.push(span, &message.into(), help);
    }

    /// Reports a wrong value. The fault is dropped if the line of the value could not be parsed.
    pub fn add(&self, span: Range<usize>, message: impl Into<String>, help: impl Into<Option<String>>) {
        // A value with an empty span was inserted by the parser after a syntax fault.
        let broken = self.broken.borrow();
        if broken.contains(&self.line(&span)) || (span.is_empty() && !broken.is_empty()) {
            return;
        }
        self.push(span, &message.into(), help.into());
    }

    /// Reports that something is missing. The fault is dropped if any line could not be parsed,
    /// because the missing part may be in that line.
    pub fn add_absent(
        &self,
        span: Range<usize>,
        message: impl Into<String>,
        help: impl Into<Option<String>>,
    ) {
        if self.broken.borrow().is_empty() {
            self.push(span, &message.into(), help.into());
        }
    }

    /// Counts further faults, which are not stored.
    pub fn leave_off(&self, faults: usize) {
        self.left_off.update(|left_off| left_off + faults);
    }

    /// Returns whether no fault has been found so far.
    pub fn is_clean(&self) -> bool {
        self.faults.borrow().is_empty()
    }

    /// Returns `value` if no fault was found.
    ///
    /// # Errors
    /// If faults were found: all faults, in the order of the file.
    pub fn finish<T>(self, value: Option<T>) -> Result<T, Diagnostics> {
        let mut list = self.faults.into_inner();
        if list.is_empty() {
            return Ok(value.expect("a reader without a result has reported a fault"));
        }
        list.sort_by_key(|fault| fault.span.start);
        Err(Diagnostics { list, left_off: self.left_off.get() })
    }

    fn push(&self, span: Range<usize>, message: &str, help: Option<String>) {
        if self.faults.borrow().len() == MAX_FAULTS {
            return self.leave_off(1);
        }
        let start = self.text.floor_char_boundary(span.start);
        let span = start..self.text.ceil_char_boundary(span.end.min(self.text.len())).max(start);
        let line = self.line(&span);
        let line_start = self.line_starts[line - 1];
        let content = self.text[line_start..].split('\n').next().unwrap_or_default();
        let column = self.column(&span);
        let excerpt = Excerpt::new(content, start - line_start..span.end - line_start);
        let (message, help) = (escaped(message).into_owned(), help.map(|help| escaped(&help).into_owned()));
        self.faults.borrow_mut().push(Diagnostic {
            path: self.path.to_owned(),
            line,
            column,
            span,
            message,
            help,
            excerpt,
        });
    }
}

/// Decodes the bytes of a file as text.
///
/// # Errors
/// If the bytes are not UTF-8: a fault at the first wrong byte.
pub fn utf8<'t>(bytes: &'t [u8], path: &Path) -> Result<&'t str, Diagnostics> {
    let error = match str::from_utf8(bytes) {
        Ok(text) => return Ok(text),
        Err(error) => error,
    };
    let (good, bad) = bytes.split_at(error.valid_up_to());
    let text = str::from_utf8(good).unwrap_or_default();
    let report = DiagnosticCollector::new(path, text);
    let byte = bad.first().copied().unwrap_or_default();
    report.add_syntax(text.len()..text.len(), format!("byte {byte:#04x} is not UTF-8 text"), None);
    report.finish(None)
}

/// The texts of an error and its causes, on one line.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    // Bound: error chains have only a few links.
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some libraries repeat the cause in their own text.
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn two_faults() -> Diagnostics {
        let text = "a = 1\nfür\t= \"ü\u{1b}\"\n";
        let report = DiagnosticCollector::new(Path::new("x.toml"), text);
        report.add(11..16, "second", Some("do that".to_owned()));
        report.add(0..1, "first", None);
        report.finish(None::<()>).unwrap_err()
    }

    #[test]
    fn a_log_gets_one_line_per_fault_in_the_order_of_the_file() {
        assert_eq!(two_faults().to_string(), "x.toml:1:1: first\nx.toml:2:5: second (do that)");
    }

    #[test]
    fn a_terminal_gets_the_source_line_with_a_caret() {
        let expected = "\
error: first
 --> x.toml:1:1
  |
1 | a = 1
  | ^

error: second
 --> x.toml:2:5
  |
2 | für = \"ü\u{fffd}\"
  |     ^^^^
  = help: do that

";
        assert_eq!(two_faults().terminal(false).to_string(), expected);
        assert!(
            two_faults()
                .terminal(true)
                .to_string()
                .starts_with("\x1b[1;31merror\x1b[0m: \x1b[1mfirst\x1b[0m\n")
        );
    }

    #[test]
    fn names_from_a_file_cannot_control_the_terminal() {
        let path = Path::new("x\u{1b}[2J");
        let report = DiagnosticCollector::new(path, "a\u{202e}b = 1\n");
        report.add(0..1, "unknown key a\u{202e}b\u{1b}[31m", Some("not \r\n".to_owned()));
        let faults = report.finish(None::<()>).unwrap_err();
        let expected = r"x\u{1b}[2J:1:1: unknown key a\u{202e}b\u{1b}[31m (not \u{d}\u{a})";
        assert_eq!(faults.to_string(), expected);
        assert!(faults.terminal(false).to_string().contains("1 | a\u{fffd}b = 1"));
    }

    #[test]
    fn a_long_line_is_cut_around_the_fault() {
        let text = "x".repeat(1_000);
        let report = DiagnosticCollector::new(Path::new("x"), &text);
        report.add(500..503, "here", None);
        let faults = report.finish(None::<()>).unwrap_err();
        let expected = Excerpt { text: format!("…{}…", "x".repeat(160)), before: 61, width: 3 };
        assert_eq!(faults.list[0].excerpt, expected);
    }

    #[test]
    fn a_long_value_is_quoted_in_part() {
        assert_eq!(quote(&"y".repeat(80)), format!("{:?}", "y".repeat(80)));
        assert_eq!(quote(&"y".repeat(81)), format!("{:?}…", "y".repeat(80)));
    }

    #[test]
    fn faults_beyond_the_limit_are_only_counted() {
        let faults = |count: usize| {
            let report = DiagnosticCollector::new(Path::new("x"), "text");
            (0..count).for_each(|_| report.add(0..4, "wrong", None));
            report.finish(None::<()>).unwrap_err().to_string()
        };
        assert_eq!(faults(MAX_FAULTS).lines().count(), 100);
        assert_eq!(faults(MAX_FAULTS + 2).lines().count(), 101);
        assert_eq!(faults(MAX_FAULTS + 2).lines().last(), Some("and 2 more"));
    }

    #[test]
    fn an_unparsable_line_hides_its_other_faults_and_missing_parts() {
        let report = DiagnosticCollector::new(Path::new("x"), "a b\nc\n");
        report.add_syntax(2..3, "no", None);
        report.add(0..1, "hidden", None);
        report.add(4..5, "shown", None);
        report.add_absent(4..5, "hidden", None);
        assert_eq!(report.finish(None::<()>).unwrap_err().to_string(), "x:1:3: no\nx:2:1: shown");
    }

    #[test]
    fn the_first_byte_that_is_not_utf8_is_reported() {
        assert_eq!(
            utf8(b"a\nb\xff", Path::new("x")).unwrap_err().to_string(),
            "x:2:2: byte 0xff is not UTF-8 text"
        );
        assert_eq!(utf8("ü".as_bytes(), Path::new("x")).unwrap(), "ü");
    }

    proptest! {
        #[test]
        fn no_span_of_no_text_panics(text in "(?s).{0,40}", start in 0_usize..60, length in 0_usize..60) {
            let report = DiagnosticCollector::new(Path::new("x"), &text);
            report.add(start..start + length, "wrong", None);
            prop_assert!(!report.finish(None::<()>).unwrap_err().terminal(false).to_string().is_empty());
        }
    }
}
