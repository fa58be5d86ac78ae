//! The style of a text on an output stream: whether to use colour, and how wide lines may be.

use std::io::IsTerminal;
use std::os::fd::AsFd;

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

    pub(super) fn paint(self, code: &str, text: &str) -> String {
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
    fn the_width_is_from_columns_or_the_terminal() {
        assert_eq!(width(None, 80), Some(80));
        assert_eq!(width(Some("120"), 80), Some(120));
        for nothing in ["", "0", "wide", "-1"] {
            assert_eq!(width(Some(nothing), 80), Some(80), "{nothing}");
        }
        assert_eq!(width(None, 0), None);
    }
}
