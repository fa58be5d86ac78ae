//! The style of a text on an output stream: whether to use colour, and how wide lines may be.

use std::borrow::Cow;
use std::io::IsTerminal;
use std::os::fd::AsFd;

use lb_document::control::{escaped, is_obeyed};

/// The codes of [`Style::paint`], and the code that ends each of them.
const CODES: [&str; 6] = ["0", "1", "31", "32", "33", "36"];

#[derive(Clone, Copy, Debug, Default)]
pub struct Style {
    /// Whether to use escape sequences.
    pub colour: bool,
    /// The width of the terminal in columns. `None` if the stream is no terminal or the width is
    /// unknown; texts are then shown in full and not wrapped.
    pub width: Option<usize>,
}

impl Style {
    /// The style for standard output. On a terminal, colour is used unless `NO_COLOR` is set and
    /// not empty, and the width is `COLUMNS` if that is a positive number, else the width of the
    /// terminal.
    pub fn for_stdout() -> Self {
        Self::of(&std::io::stdout())
    }

    /// The style for standard error, by the same rules as for standard output.
    pub fn for_stderr() -> Self {
        Self::of(&std::io::stderr())
    }

    fn of(stream: &(impl IsTerminal + AsFd)) -> Self {
        if !stream.is_terminal() {
            return Self::default();
        }
        let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let columns = rustix::termios::tcgetwinsize(stream).map_or(0, |size| size.ws_col);
        Self { colour, width: width(std::env::var("COLUMNS").ok().as_deref(), columns) }
    }

    /// Escapes the control characters of a text, because names, reasons and messages come from
    /// files and from other processes. Line ends and this crate's own colours stay.
    pub fn shown(self, text: &str) -> Cow<'_, str> {
        let is_escaped = |character| is_obeyed(character) && character != '\n';
        let mut rest = text;
        let mut shown = String::new();
        // Bound: each iteration shortens the rest.
        while let Some(at) = rest.find(is_escaped) {
            let (before, after) = rest.split_at(at);
            let own = CODES.iter().find_map(|code| {
                let after = after.strip_prefix("\x1b[")?.strip_prefix(code)?.strip_prefix('m')?;
                self.colour.then_some(after)
            });
            let end = after.chars().next().map_or(0, char::len_utf8);
            rest = own.unwrap_or(&after[end..]);
            let control = &after[..after.len() - rest.len()];
            shown.push_str(before);
            shown.push_str(&if own.is_some() { Cow::Borrowed(control) } else { escaped(control) });
        }
        if shown.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(shown + rest) }
    }

    pub(super) fn paint(self, code: &str, text: &str) -> String {
        debug_assert!(CODES.contains(&code), "{code} is not in the list");
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// The width: the variable `COLUMNS` if it is a positive number, else `columns`, the number that
/// the terminal reports. A terminal that does not know its width reports 0.
fn width(variable: Option<&str>, columns: u16) -> Option<usize> {
    let requested = variable.and_then(|value| value.trim().parse().ok());
    requested.filter(|&width| width > 0).or(Some(columns.into()).filter(|&width| width > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_except_line_ends_and_own_colours() {
        let shown = |colour, text: &str| Style { colour, width: None }.shown(text).into_owned();
        let coloured = Style { colour: true, width: None };
        let painted =
            format!("{} größer\n{}\n", coloured.paint("1", "users"), coloured.paint("33", "degraded:"));
        assert_eq!(shown(true, &painted), painted);
        assert_eq!(shown(true, "a\x1b[1mb\x1b[2Jc\x1b[1"), "a\x1b[1mb\\u{1b}[2Jc\\u{1b}[1");
        for colour in [true, false] {
            assert_eq!(shown(colour, "a\tb\r\n\u{9b}2Jc\u{202e}"), "a\\u{9}b\\u{d}\n\\u{9b}2Jc\\u{202e}");
        }
        assert_eq!(shown(false, "\x1b[1mb\x1b[0m"), "\\u{1b}[1mb\\u{1b}[0m");
    }

    #[test]
    fn the_width_is_from_columns_or_the_terminal() {
        assert_eq!(width(None, 80), Some(80));
        assert_eq!(width(Some("120"), 80), Some(120));
        for nothing in ["", "0", "wide", "-1"] {
            assert_eq!(width(Some(nothing), 80), Some(80), "{nothing}");
        }
        assert_eq!(width(None, 0), None);
    }
}
