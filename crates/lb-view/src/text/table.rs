//! A table of aligned columns. Its rows are not stored but built when they are needed.
//!
//! If the table is wider than the terminal, columns are omitted, the least important first, because
//! rows that continue on the next line would be hard to read.

use std::fmt::Write as _;

use super::Style;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Alignment {
    /// For names.
    Left,
    /// For numbers.
    Right,
}

#[derive(Clone, Copy, Debug)]
pub struct Column<'t> {
    pub title: &'t str,
    pub side: Alignment,
    /// If the table is too wide, the column with the lowest importance is omitted first. Of several
    /// columns with the same importance, the rightmost is omitted first.
    pub importance: u8,
}

/// The importance of a column that is never omitted, because it identifies the row.
pub const ALWAYS: u8 = u8::MAX;

impl<'t> Column<'t> {
    pub const fn left(title: &'t str, importance: u8) -> Self {
        Self { title, side: Alignment::Left, importance }
    }

    pub const fn right(title: &'t str, importance: u8) -> Self {
        Self { title, side: Alignment::Right, importance }
    }

    /// Columns with these titles. The first column has names and is never omitted. The other
    /// columns have numbers, and are all equally important.
    pub fn first_left(titles: &[&'t str]) -> Vec<Self> {
        let column = |(number, title): (usize, &&'t str)| match number {
            0 => Self::left(title, ALWAYS),
            _ => Self::right(title, 0),
        };
        titles.iter().enumerate().map(column).collect()
    }
}

#[derive(Debug, Default)]
pub struct TableRow {
    /// One cell for each column.
    pub cells: Vec<String>,
    /// Whether something is wrong with the object of the row. If so, the row begins with `!`, and
    /// is red if colour is used.
    pub is_bad: bool,
    /// A remark, which is printed on a line below the row.
    pub note: Option<String>,
}

impl TableRow {
    pub fn of(cells: Vec<String>) -> Self {
        Self { cells, ..Self::default() }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub struct RenderedTable<'t> {
    pub text: String,
    /// The titles of columns that do not fit the terminal, from left to right.
    pub left_out: Vec<&'t str>,
}

/// Builds a table of `count` rows. `row` is called twice for each row: first to measure the widths,
/// then to write the row.
pub fn table<'t>(
    columns: &[Column<'t>],
    count: usize,
    row: impl Fn(usize) -> TableRow,
    style: Style,
) -> RenderedTable<'t> {
    let mut widths: Vec<usize> = columns.iter().map(|column| column.title.chars().count()).collect();
    for number in 0..count {
        for (width, cell) in widths.iter_mut().zip(row(number).cells) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let shown = fitting(columns, &widths, style.width);
    let line = |text: &mut String, cells: &mut dyn Iterator<Item = &str>| {
        let cells = cells.zip(&widths).zip(columns).zip(&shown);
        for (((cell, &width), column), _) in cells.filter(|(_, shown)| **shown) {
            let _ = match column.side {
                Alignment::Left => write!(text, "  {cell:<width$}"),
                Alignment::Right => write!(text, "  {cell:>width$}"),
            };
        }
        text.truncate(text.trim_end_matches(' ').len());
    };
    let mut header = String::new();
    line(&mut header, &mut columns.iter().map(|column| column.title));
    let mut text = style.paint("1", &header);
    text.push('\n');
    for number in 0..count {
        let TableRow { cells, is_bad, note } = row(number);
        let mut this = String::new();
        line(&mut this, &mut cells.iter().map(String::as_str));
        if is_bad {
            // The mark `!` replaces the first blank, so that the columns remain aligned.
            this.replace_range(..1, "!");
            this = style.paint("31", &this);
        }
        text.push_str(&this);
        text.push('\n');
        if let Some(note) = note {
            let _ = writeln!(text, "    {}", style.paint("33", &note));
        }
    }
    let left_out = columns.iter().zip(&shown).filter(|(_, shown)| !**shown);
    RenderedTable { text, left_out: left_out.map(|(column, _)| column.title).collect() }
}

/// Whether each column is shown. Columns are omitted, the least important first, until the
/// remaining columns fit.
fn fitting(columns: &[Column<'_>], widths: &[usize], limit: Option<usize>) -> Vec<bool> {
    let mut shown = vec![true; columns.len()];
    let mut together: usize = widths.iter().map(|width| width + 2).sum();
    // Bound: each iteration omits a column.
    while limit.is_some_and(|limit| together > limit) {
        let candidates = columns.iter().enumerate().rev();
        let candidates = candidates.filter(|(number, column)| shown[*number] && column.importance < ALWAYS);
        let Some((least, _)) = candidates.min_by_key(|(_, column)| column.importance) else { break };
        shown[least] = false;
        together -= widths[least] + 2;
    }
    shown
}

/// The line that lists the omitted columns; `None` if all columns are shown.
pub fn left_out(titles: &[&str]) -> Option<String> {
    (!titles.is_empty()).then(|| format!("(narrow terminal: {} left out)\n", titles.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_notes_do_not_widen_them() {
        let rows = [("a", "1000"), ("long", "1")];
        let row = |number: usize| {
            let (name, count) = rows[number];
            TableRow {
                cells: vec![name.to_owned(), count.to_owned()],
                is_bad: number == 1,
                note: (number == 0).then(|| "refused 12.0/s, reset 1.0/s".to_owned()),
            }
        };
        let table =
            |colour| table(&Column::first_left(&["name", "n"]), 2, row, Style { colour, width: None }).text;
        assert_eq!(
            table(false),
            "  name     n\n  a     1000\n    refused 12.0/s, reset 1.0/s\n! long     1\n"
        );
        assert!(table(true).ends_with("\x1b[31m! long     1\x1b[0m\n"));
    }

    #[test]
    fn the_least_important_columns_are_left_out_until_the_table_fits() {
        let columns = [
            Column::left("name", ALWAYS),
            Column::right("b", 1),
            Column::right("c", 2),
            Column::left("state", ALWAYS),
            Column::right("d", 1),
        ];
        let cells = ["backend", "10", "200", "healthy", "3000"].map(str::to_owned);
        let check = |width: usize, text: &str, left_out: &[&str]| {
            let style = Style { colour: false, width: Some(width) };
            let table = table(&columns, 1, |_| TableRow::of(cells.to_vec()), style);
            assert_eq!((table.text.as_str(), table.left_out.as_slice()), (text, left_out), "width {width}");
        };
        check(33, "  name      b    c  state       d\n  backend  10  200  healthy  3000\n", &[]);
        // Of columns with the same importance, the rightmost is omitted first.
        check(32, "  name      b    c  state\n  backend  10  200  healthy\n", &["d"]);
        check(26, "  name       c  state\n  backend  200  healthy\n", &["b", "d"]);
        let least = "  name     state\n  backend  healthy\n";
        check(18, least, &["b", "c", "d"]);
        // The columns that identify a row are shown even if the terminal is too narrow for them.
        check(1, least, &["b", "c", "d"]);
    }

    #[test]
    fn missing_columns_are_named() {
        assert_eq!(left_out(&[]), None);
        assert_eq!(left_out(&["mean", "p50"]).as_deref(), Some("(narrow terminal: mean, p50 left out)\n"));
    }
}
