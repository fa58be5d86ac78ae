//! Tables for terminals: aligned columns, the first to the left and numbers to the right. No colour, no lines.
//!
//! Also how the commands write parts and ratios. Must not know what the numbers are.

use std::fmt;

/// A table, row by row.
pub struct TextTable {
    rows: Vec<Vec<String>>,
}

impl TextTable {
    /// A table with these headings and no row.
    pub fn new<const N: usize>(headings: [&str; N]) -> Self {
        Self { rows: vec![headings.map(str::to_owned).to_vec()] }
    }

    /// Adds a row, of as many cells as there are headings.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into());
    }
}

impl fmt::Display for TextTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
        };
        let widths: Vec<usize> = (0..columns).filter_map(width).collect();
        for row in &self.rows {
            let mut cells = row.iter().zip(&widths);
            if let Some((first, &width)) = cells.next() {
                write!(f, "{first:width$}")?;
            }
            for (cell, &width) in cells {
                write!(f, "  {cell:>width$}")?;
            }
            writeln!(f)?;
        }
        Ok(())
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
