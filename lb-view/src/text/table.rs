//! A table of columns that line up, written row by row: rows are made when they are wanted and not kept.

use std::fmt::Write as _;

use super::Style;

/// To which side the cells of a column go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Names.
    Left,
    /// Numbers.
    Right,
}

impl Side {
    /// Columns of which the first, which has names, goes to the left, and the others to the right.
    pub fn first_left<'a>(titles: &[&'a str]) -> Vec<(&'a str, Self)> {
        let side = |number| if number == 0 { Self::Left } else { Self::Right };
        titles.iter().enumerate().map(|(number, title)| (*title, side(number))).collect()
    }
}

/// A table of so many rows. Each is asked for twice: the first time for the widths.
pub fn table(
    columns: &[(&str, Side)],
    count: usize,
    row: impl Fn(usize) -> Vec<String>,
    style: Style,
) -> String {
    table_of_rows(columns, count, |number| Row { cells: row(number), ..Row::default() }, style)
}

/// A row of a table.
#[derive(Debug, Default)]
pub struct Row {
    /// One for each column.
    pub cells: Vec<String>,
    /// Whether something is wrong with what the row shows: it then begins with `!`, and is red where colour is used.
    pub is_bad: bool,
    /// Printed on a line of its own below the row.
    pub note: Option<String>,
}

/// As [`table`], with rows that are marked or have notes.
pub fn table_of_rows(
    columns: &[(&str, Side)],
    count: usize,
    row: impl Fn(usize) -> Row,
    style: Style,
) -> String {
    let mut widths: Vec<usize> = columns.iter().map(|(title, _)| title.chars().count()).collect();
    for number in 0..count {
        for (width, cell) in widths.iter_mut().zip(row(number).cells) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |text: &mut String, cells: &mut dyn Iterator<Item = &str>| {
        for ((cell, &width), (_, side)) in cells.zip(&widths).zip(columns) {
            let _ = match side {
                Side::Left => write!(text, "  {cell:<width$}"),
                Side::Right => write!(text, "  {cell:>width$}"),
            };
        }
        text.truncate(text.trim_end_matches(' ').len());
    };
    let mut header = String::new();
    line(&mut header, &mut columns.iter().map(|(title, _)| *title));
    let mut text = style.paint("1", &header);
    text.push('\n');
    for number in 0..count {
        let Row { cells, is_bad, note } = row(number);
        let mut this = String::new();
        line(&mut this, &mut cells.iter().map(String::as_str));
        if is_bad {
            // In place of the first blank, so that columns stay where they are.
            this.replace_range(..1, "!");
            this = style.paint("31", &this);
        }
        text.push_str(&this);
        text.push('\n');
        if let Some(note) = note {
            let _ = writeln!(text, "    {}", style.paint("33", &note));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_notes_do_not_widen_them() {
        let rows = [("a", "1000"), ("long", "1")];
        let row = |number: usize| {
            let (name, count) = rows[number];
            Row {
                cells: vec![name.to_owned(), count.to_owned()],
                is_bad: number == 1,
                note: (number == 0).then(|| "refused 12.0/s, reset 1.0/s".to_owned()),
            }
        };
        let table = |colour| table_of_rows(&Side::first_left(&["name", "n"]), 2, row, Style { colour });
        assert_eq!(
            table(false),
            "  name     n\n  a     1000\n    refused 12.0/s, reset 1.0/s\n! long     1\n"
        );
        assert!(table(true).ends_with("\x1b[31m! long     1\x1b[0m\n"));
    }
}
