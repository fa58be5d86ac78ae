//! Tables for terminals: aligned columns, the first to the left and numbers to the right. No colour, no lines.
//!
//! Also how the commands write parts and ratios. Must not know what the numbers are.

use std::fmt;

use lb_view::text::{Column, Style, TableRow, table};

/// A table, row by row.
pub struct TextTable {
    headings: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl TextTable {
    /// A table with these headings and no row.
    pub fn new(headings: impl Into<Vec<&'static str>>) -> Self {
        Self { headings: headings.into(), rows: Vec::new() }
    }

    /// Adds a row, of as many cells as there are headings.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = Column::first_left(&self.headings);
        // As wide as it is, on every terminal: the planner says the same wherever it is asked.
        let row = |row: usize| TableRow::of(self.rows[row].clone());
        let text = table(&columns, self.rows.len(), row, Style::default()).text;
        // Its lines begin with two blanks, where `status` marks a row; no row is marked here.
        text.lines().try_for_each(|line| writeln!(f, "{}", line.strip_prefix("  ").unwrap_or(line)))
    }
}

/// A part as a percentage.
pub fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

/// A utilization, or another number that is near 1.
pub fn ratio(value: f64) -> String {
    format!("{value:.4}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_below_each_other() {
        let mut table = TextTable::new(["algorithm", "mean"]);
        table.row(["random".to_owned(), percent(0.5)]);
        table.row(["rocksteadier".to_owned(), ratio(1.0)]);
        assert_eq!(table.to_string(), "algorithm       mean\nrandom        50.0 %\nrocksteadier  1.0000\n");
    }
}
