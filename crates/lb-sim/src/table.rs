//! Tables for terminals: the first column is aligned to the left, numbers to the right, and there
//! are no colours or lines.
//!
//! This module also formats parts and ratios for the commands. It must not depend on the meaning of
//! the numbers.

use std::fmt;

use lb_view::text::{Column, Style, TableRow, table};

pub struct TextTable {
    headings: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    pub fn new(headings: impl Into<Vec<&'static str>>) -> Self {
        Self { headings: headings.into(), rows: Vec::new() }
    }

    /// Adds a row with one cell for each heading.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = Column::first_left(&self.headings);
        // The default style has no width limit, so a narrow terminal hides no column, and the
        // output is the same everywhere.
        let row = |row: usize| TableRow::of(self.rows[row].clone());
        let text = table(&columns, self.rows.len(), row, Style::default()).text;
        // Each line begins with two blanks, because tables of `status` have a mark there. Rows of
        // the planner have no mark.
        text.lines().try_for_each(|line| writeln!(f, "{}", line.strip_prefix("  ").unwrap_or(line)))
    }
}

pub fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// Formats a utilization, or another number near 1.
pub fn ratio(value: f64) -> String {
    format!("{value:.4}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = TextTable::new(["algorithm", "mean"]);
        table.row(["random".to_owned(), percent(0.5)]);
        table.row(["rocksteadier".to_owned(), ratio(1.0)]);
        assert_eq!(table.to_string(), "algorithm       mean\nrandom        50.0 %\nrocksteadier  1.0000\n");
    }
}
