//! The part of a text that fits a terminal. If the text is too long, the screen shows as many lines
//! as fit, and one row with the number of remaining lines. A line that is too wide takes several
//! rows. A screen never has more rows than the terminal, so that the terminal never scrolls.

use super::Style;
use super::wrap::{is_escape, pieces};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Characters per row.
    pub columns: usize,
    pub rows: usize,
}

#[derive(Clone, Debug)]
pub struct Screen {
    lines: Vec<String>,
    remark: Option<String>,
    rows: usize,
    /// The first line that is shown.
    top: usize,
}

impl Screen {
    /// Shows a text, and below it a remark of at most one row, which is always visible. `top` is
    /// the first line to show. If too few lines follow to fill the terminal, the screen begins with
    /// an earlier line. `style` is that of the text.
    pub fn new(text: &str, remark: Option<&str>, size: TerminalSize, top: usize, style: Style) -> Self {
        let columns = size.columns.max(1);
        let mut lines = Vec::new();
        style.shown(text).lines().for_each(|line| cut(line, columns, &mut lines));
        let mut remarks = Vec::new();
        cut(&style.shown(remark.unwrap_or("")), columns, &mut remarks);
        let remark = remark.and_then(|_| remarks.into_iter().next());
        let mut screen = Self { lines, remark, rows: size.rows.max(1), top: 0 };
        screen.top = top.min(screen.last_top());
        screen
    }

    /// The number of the first visible line.
    pub fn top(&self) -> usize {
        self.top
    }

    /// The largest possible `top`, with which the end of the text is visible.
    pub fn last_top(&self) -> usize {
        // If no line fits, scrolling has no effect.
        match self.room() {
            0 => 0,
            room => self.lines.len().saturating_sub(room),
        }
    }

    /// How many lines of the text are visible at once. If the text does not fit, one row shows how
    /// many lines are not visible.
    pub fn room(&self) -> usize {
        let rows = self.rows_of_text();
        if self.lines.len() > rows { rows.saturating_sub(1) } else { rows }
    }

    fn rows_of_text(&self) -> usize {
        self.rows - usize::from(self.remark.is_some())
    }

    /// The rows of the terminal, from the top down.
    pub fn rows(&self) -> Vec<String> {
        let room = self.room();
        let mut rows: Vec<String> = self.lines.iter().skip(self.top).take(room).cloned().collect();
        if self.lines.len() > room && self.rows_of_text() > 0 {
            rows.push(match (self.lines.len() - self.top - room, self.top) {
                (0, above) => format!("... the end, {}", count(above, "above")),
                (below, 0) => format!("... {}", count(below, "")),
                (below, above) => format!("... {}, {}", count(below, ""), count(above, "above")),
            });
        }
        rows.extend(self.remark.clone());
        rows
    }
}

fn count(lines: usize, place: &str) -> String {
    match (lines, place) {
        (1, "") => "1 more line".to_owned(),
        (_, "") => format!("{lines} more lines"),
        (_, place) => format!("{lines} {place}"),
    }
}

/// Splits a line into rows of at most `columns` characters. Each row begins with the colour in
/// which the previous row ended, because the previous row may be outside of the screen.
fn cut(line: &str, columns: usize, lines: &mut Vec<String>) {
    let (mut row, mut at, mut colour) = (String::new(), 0, "");
    for piece in pieces(line) {
        if is_escape(piece) {
            row.push_str(piece);
            colour = if piece == "\x1b[0m" { "" } else { piece };
            continue;
        }
        for letter in piece.chars() {
            if at == columns {
                row.push_str(if colour.is_empty() { "" } else { "\x1b[0m" });
                lines.push(std::mem::replace(&mut row, colour.to_owned()));
                at = 0;
            }
            row.push(letter);
            at += 1;
        }
    }
    lines.push(row);
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLOUR: Style = Style { colour: true, width: None };

    #[track_caller]
    fn check(screen: (&str, Option<&str>), (columns, rows): (usize, usize), top: usize, expected: &[&str]) {
        let screen = Screen::new(screen.0, screen.1, TerminalSize { columns, rows }, top, COLOUR);
        assert_eq!(screen.rows(), expected);
        assert!(screen.rows().len() <= rows);
    }

    #[test]
    fn lines_that_do_not_fit_are_counted() {
        let text = "a\nb\nc\nd\ne\n";
        check((text, None), (80, 5), 0, &["a", "b", "c", "d", "e"]);
        check((text, None), (80, 4), 0, &["a", "b", "c", "... 2 more lines"]);
        check((text, None), (80, 4), 1, &["b", "c", "d", "... 1 more line, 1 above"]);
        check((text, None), (80, 4), 2, &["c", "d", "e", "... the end, 2 above"]);
        check((text, None), (80, 1), 0, &["... 5 more lines"]);
        check(("", None), (80, 1), 0, &[]);
    }

    #[test]
    fn scrolling_stops_at_the_end_of_the_text() {
        let text = "a\nb\nc\nd\ne\n";
        check((text, None), (80, 5), 3, &["a", "b", "c", "d", "e"]);
        check((text, None), (80, 4), 99, &["c", "d", "e", "... the end, 2 above"]);
        let screen = Screen::new(text, None, TerminalSize { columns: 80, rows: 4 }, 99, COLOUR);
        assert_eq!((screen.top(), screen.last_top(), screen.room()), (2, 2, 3));
    }

    #[test]
    fn a_remark_is_always_visible() {
        check(("a\nb\n", Some("wrong")), (80, 3), 0, &["a", "b", "wrong"]);
        check(("a\nb\n", Some("wrong")), (80, 2), 0, &["... 2 more lines", "wrong"]);
        check(("a\nb\n", Some("wrong again")), (5, 9), 0, &["a", "b", "wrong"]);
        check(("", Some("wrong")), (80, 1), 0, &["wrong"]);
    }

    #[test]
    fn a_line_that_is_too_wide_takes_several_rows() {
        check(("abcdefg\nh\n", None), (3, 9), 0, &["abc", "def", "g", "h"]);
        check(("abcdef\n", None), (3, 9), 0, &["abc", "def"]);
        check(("a\x1b[31mbcde\x1b[0mf", None), (3, 9), 0, &["a\x1b[31mbc\x1b[0m", "\x1b[31mde\x1b[0mf"]);
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        check(("a\tb\x1b[2Jc\u{202e}m\n", None), (80, 9), 0, &["a\\u{9}b\\u{1b}[2Jc\\u{202e}m"]);
        check(("", Some("a\x1bm")), (80, 9), 0, &["a\\u{1b}m"]);
        // Without colours, the text contains no sequence of this crate.
        let size = TerminalSize { columns: 80, rows: 9 };
        let screen = Screen::new("\x1b[31mm", Some("\x1b[0m"), size, 0, Style::default());
        assert_eq!(screen.rows(), ["\\u{1b}[31mm", "\\u{1b}[0m"]);
    }

    #[test]
    fn no_terminal_is_too_small() {
        check(("ab\n", Some("wrong")), (0, 1), 0, &["w"]);
        check(("ab\n", None), (0, 1), 7, &["... 2 more lines"]);
        assert_eq!(
            Screen::new("ab\n", None, TerminalSize { columns: 0, rows: 0 }, 7, COLOUR).rows().len(),
            1
        );
    }
}
