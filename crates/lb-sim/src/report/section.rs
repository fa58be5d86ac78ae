//! A section of the report: figures that answer one question, how to read them, and their source's figures beside ours.
//!
//! Also how much a report computes. Must not know what the questions are.

use lb_svg::Figure;

/// How much is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The largest jobs of sweeps.
    pub most_tasks: u32,
    /// The largest subsets of comparisons of sizes.
    pub most_size: u32,
    /// Seeds over which random algorithms are tried.
    pub trials: u64,
    /// At most so many seconds of virtual time are played of a scenario with load.
    pub load_seconds: u64,
}

impl Default for Extent {
    /// What the sources have, and enough seeds for one digit behind the point.
    fn default() -> Self {
        Self { most_tasks: 256, most_size: 300, trials: 100, load_seconds: 3_600 }
    }
}

/// One question.
#[derive(Clone, Debug)]
pub struct ReportSection {
    /// Its name in links.
    pub id: &'static str,
    /// One line.
    pub heading: &'static str,
    /// What answers it.
    pub figures: Vec<Figure>,
    /// How to read them: paragraphs.
    pub reading: Vec<String>,
    /// Numbers.
    pub table: NumberTable,
}

/// Numbers in rows.
#[derive(Clone, Debug)]
pub struct NumberTable {
    /// What the columns are.
    pub head: Vec<String>,
    /// As many cells as there are columns; the first says what the row is.
    pub rows: Vec<Vec<String>>,
}

impl NumberTable {
    /// A table without rows yet.
    pub fn new(head: &[&str]) -> Self {
        Self { head: head.iter().map(|&word| word.to_owned()).collect(), rows: Vec::new() }
    }

    /// Adds a row.
    ///
    /// # Panics
    /// If it has not as many cells as there are columns.
    pub fn row<const N: usize>(&mut self, cells: [&str; N]) {
        assert_eq!(N, self.head.len(), "a cell for every column");
        self.rows.push(cells.map(str::to_owned).into());
    }
}
